"""``moetrain report``: the page of runs, parsed, and in a browser if there is one."""

import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
import torch

from moetrain import Trainer
from moetrain.cli.report import _POINTS, Report, main
from moetrain.generate.weights import Sampled

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture
def run(tiny):
    config = tiny("train.eval_interval=2", "checkpoint.interval=2")
    return Trainer(config, callbacks=[Report(), Sampled()])


def page_of(folder):
    text = (folder / "report.html").read_text("utf-8")
    return ET.fromstring(text.removeprefix("<!DOCTYPE html>\n")), text


def test_the_page_of_a_run_has_its_parts(run, capsys):
    folder = run.fit().folder
    page, text = page_of(folder)
    svg = "{http://www.w3.org/2000/svg}"
    titles = [figure.find("figcaption").text for figure in page.iter("figure")]
    shown = ["Loss (nats a token)", "Gradient norm", "Learning rate", "Peak memory (GiB)"]
    assert set(shown) <= set(titles)
    assert {"layer 0", "layer 1"} <= set(titles)
    lines = {x.find(f"{svg}title").text.partition(":")[0] for x in page.iter(f"{svg}polyline")}
    assert {"loss", "eval_loss", "expert_load_max", "router_entropy/layer_1"} <= lines
    loss = next(x for x in page.iter(f"{svg}polyline") if x.find(f"{svg}title").text[:5] == "loss:")
    assert len(loss.get("points").split()) == 4
    assert [h.text for h in page.iter("h2")][:4] == ["Curves", "Time", "Experts", "Samples"]
    cells = {row[0].text: row[1].text for row in page.iter("tr")}
    assert cells["data.seq_len"] == "32"
    parts = {"data", "forward and backward", "update", "other", "evaluations", "checkpoints"}
    assert all(cells[part].endswith(" s") for part in parts)
    assert {x.get("title").rpartition(" ")[2] for x in page.iter("span") if x.get("title")} == {
        row[2].text for row in page.iter("tr") if row[0].text in parts
    }
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")  # nothing is downloaded
    sample = (folder / "sample.txt").read_text()
    assert sample[:8] in "".join(x.text for x in page.iter("pre"))
    (folder / "report.html").unlink()
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(folder / "report.html")
    assert page_of(folder)[1] == text
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is not None:
        picture = folder / "report.png"
        words = ["--headless", "--no-sandbox", "--window-size=1200,2400"]
        subprocess.run(
            [browser, *words, f"--screenshot={picture}", str(folder / "report.html")], check=True
        )
        assert picture.stat().st_size > 20_000


@pytest.mark.tier("long")
def test_dead_experts_are_named_and_a_resumed_run_keeps_the_routing_before_it(run, tiny):
    run.fit()
    file = run.folder / "routing.npz"
    with np.load(file) as kept:
        assert kept["counts"].shape == (4, 2, 4)
        assert kept["steps"].tolist() == [1, 2, 3, 4]
        parts = dict(kept)
    parts["counts"][-1, 1, [0, 3]] = 0
    np.savez(file, **parts)
    assert main([str(run.folder)]) == 0
    dead = [p.text for p in page_of(run.folder)[0].iter("p") if p.get("class") == "dead"]
    assert dead == ["No token in the last tenth of the run: layer 1: experts 0, 3"]
    Trainer(tiny("train.steps=5", "train.eval_interval=2"), callbacks=[Report()]).fit()
    with np.load(file) as kept:
        assert kept["steps"].tolist() == [1, 2, 3, 4, 5]


def test_a_long_run_keeps_few_points(run):
    kept = Report()
    for run.step in range(1, 5 * _POINTS):
        run.expert_counts_LE = torch.full((2, 4), run.step)
        kept.on_log(run, {"loss": 1.0})
    assert len(kept._steps) < 2 * _POINTS
    assert kept._counts[0][0, 0] == pytest.approx(np.mean(range(1, kept._steps[0] + 1)))


def test_a_folder_without_a_run_is_one_line(tmp_path, capsys):
    assert main([str(tmp_path / "gone")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: RUN: '{tmp_path}/gone' has no run that can be read: ")
    assert error.endswith("give the output_dir of a run\n")


def test_a_damaged_routing_is_one_line(run, capsys):
    folder = run.fit().folder
    (folder / "routing.npz").write_bytes(b"PK damaged")
    assert main([str(folder)]) == 2
    assert "has no run that can be read: " in capsys.readouterr().err


def test_several_runs_share_charts_and_show_the_settings_that_differ(tiny, tmp_path, capsys):
    folders = []
    for name, rate in (("slow", 1e-4), ("fast", 1e-2)):
        words = f"optim.lr={rate}", f"output_dir={tmp_path / name}", "train.sample_tokens=0"
        folders.append(str(Trainer(tiny(*words)).fit().folder))
    out = tmp_path / "both.html"
    assert main([*folders, "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    page = ET.fromstring(out.read_text("utf-8").removeprefix("<!DOCTYPE html>\n"))
    titles = [x.text.partition(" at step")[0] for x in page.iter() if x.tag.endswith("title")]
    losses = [title for title in titles if ": loss: " in title]
    assert [loss.partition(":")[0] for loss in losses] == ["slow", "fast"]
    rows = [[cell.text or "" for cell in row] for row in page.iter("tr")]
    assert ["optim.lr", "0.0001", "0.01"] in rows
    assert not any(row[0] == "data.seq_len" for row in rows)


def test_a_rank_beside_the_main_one_writes_nothing(run):
    run.world = replace(run.world, rank=1)
    shown = Report()
    shown.on_start(run)
    run.expert_counts_LE = torch.ones(2, 4)
    shown.on_log(run, {"loss": 1.0})
    shown.on_checkpoint(run, run.folder)
    shown.on_end(run, None)
    assert not list(run.folder.glob("r*"))
