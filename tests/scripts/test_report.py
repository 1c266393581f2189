"""examples/report.py: the page of a run, parsed, and in a browser if there is one."""

import runpy
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
import report
import torch
from report import _POINTS, Report

from moetrain import Trainer
from moetrain.generate.weights import Sampled

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture
def run(tiny):
    config = tiny("train.eval_interval=2", "checkpoint.interval=2")
    return Trainer(config, callbacks=[Report(), Sampled()])


@pytest.fixture
def command(monkeypatch):
    """Return the example as a function of its command-line arguments."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["report.py", *map(str, words)])
        runpy.run_path(report.__file__, run_name="__main__")

    return run


def page_of(folder):
    text = (folder / "report.html").read_text("utf-8")
    return ET.fromstring(text.removeprefix("<!DOCTYPE html>\n")), text


def test_the_page_of_a_run_has_its_parts(run, command, capsys):
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
    command(folder)
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
def test_dead_experts_are_named_and_a_resumed_run_keeps_the_routing_before_it(run, command, tiny):
    run.fit()
    file = run.folder / "routing.npz"
    with np.load(file) as kept:
        assert kept["counts"].shape == (4, 2, 4)
        assert kept["steps"].tolist() == [1, 2, 3, 4]
        parts = dict(kept)
    parts["counts"][-1, 1, [0, 3]] = 0
    np.savez(file, **parts)
    command(run.folder)
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


@pytest.mark.parametrize("given", [["gone"], []])
def test_a_folder_without_a_run_is_said_to_be_one(given, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"gone has no run|FOLDER"):
        command(*given)


def test_a_rank_beside_the_main_one_writes_nothing(run):
    run.world = replace(run.world, rank=1)
    shown = Report()
    shown.on_start(run)
    run.expert_counts_LE = torch.ones(2, 4)
    shown.on_log(run, {"loss": 1.0})
    shown.on_checkpoint(run, run.folder)
    shown.on_end(run, None)
    assert not list(run.folder.glob("r*"))
