"""Jobs that are files: run from start to end, beside each other as alone, and as a run would."""

import json
from pathlib import Path

import pytest
from deaths import dying
from test_jobs import config_of

from moetrain.cli.jobs import run
from moetrain.config import Config, ConfigError, RunFailed
from moetrain.jobs.run import JobRun
from moetrain.jobs.service import Service
from moetrain.train.engine import Engine
from moetrain.train.trainer import Trainer

WORDS = ["model.vocab_size=264", "jobs.port=none"]
FILE = """\
[data]
source = "text"
path = "{corpus}"
[train]
steps = {steps}
global_batch_size = 4
seed = {seed}
[optim]
lr = {lr}
warmup_steps = 2
"""


@pytest.fixture
def write(tmp_path, corpus):
    """``write(name, **settings)``: a job's file; its path."""

    def make(name, steps=7, seed=0, lr=1e-2, more=""):
        path = tmp_path / f"{name}.toml"
        path.write_text(FILE.format(corpus=corpus, steps=steps, seed=seed, lr=lr) + more)
        return str(path)

    return make


@pytest.fixture
def config(token_cache, tmp_path):
    """``config(folder, files, ...)``: a service's settings."""

    def make(folder, files, *words):
        files = f"jobs.files={','.join(files)}"
        return config_of(tmp_path / folder, *WORDS, f"data.cache_dir={token_cache}", files, *words)

    return make


def left_by(config, name):
    folder = f"{config.output_dir}/files/{name}"
    with open(f"{folder}/metrics.jsonl") as metrics:
        rows = [json.loads(line) for line in metrics]
    with open(f"{folder}/adapter/adapter_model.safetensors", "rb") as adapter:
        return rows, adapter.read()


def test_files_beside_each_other_leave_what_each_leaves_alone(config, write):
    files = [write("a"), write("b", steps=4, seed=5), write("c", lr=3e-2)]
    together = config("together", files)
    JobRun(together).fit()
    for name, file in zip("abc", files, strict=True):
        by_itself = config(f"only-{name}", [file])
        JobRun(by_itself).fit()
        assert left_by(together, name) == left_by(by_itself, name)
    rows, _ = left_by(together, "a")
    assert [row["step"] for row in rows] == list(range(1, 8))
    assert rows[-1]["terms"]["cross_entropy"] < rows[0]["terms"]["cross_entropy"]
    JobRun(together).fit()  # they are done


def test_a_file_is_what_a_run_of_its_settings_is(config, write, corpus, tmp_path):
    service = config("service", [write("a")])
    JobRun(service).fit()
    rows, adapter = left_by(service, "a")
    mine = service.to_dict() | {"output_dir": str(tmp_path / "run"), "jobs": {}}
    mine["data"] |= {"source": "text", "path": str(corpus), "eval_fraction": 0.0}
    mine["train"] |= {"steps": 7, "global_batch_size": 4, "sample_tokens": 0}
    mine["optim"] |= {"lr": 1e-2, "warmup_steps": 2}
    mine["log"] |= {"interval": 1, "tensorboard": False}
    Trainer(Config.load(mine, environ={})).fit()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [row["loss"] for row in map(json.loads, lines) if "loss" in row]
    assert losses == [row["terms"]["cross_entropy"] for row in rows]
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").read_bytes() == adapter


def test_a_file_goes_on_where_its_service_was_killed(config, write):
    files = [write("a"), write("b", seed=5)]
    expected = config("undisturbed", files)
    JobRun(expected).fit()
    killed = config("killed", files)
    for turns in (1, 4, 5):
        service = Service(killed)
        for _ in range(turns):
            service.turn()
        service._stack.close()  # as the kernel ends a claim
    metrics = f"{killed.output_dir}/files/a/metrics.jsonl"
    with open(metrics, "a") as file:
        file.write('{"step": 4, "lo')  # half a line, by a kill in the middle of it
    JobRun(killed).fit()
    for name in "ab":
        assert left_by(killed, name) == left_by(expected, name)


def test_files_go_on_before_whatever_write_their_service_dies(config, write, monkeypatch):
    files = [write("a", steps=5), write("b", steps=4, seed=5)]
    expected = config("undisturbed", files)
    JobRun(expected).fit()
    settings, length, is_over = config("out", files), 0, False
    while not is_over:
        with dying(monkeypatch, length):
            JobRun(settings).fit()
            is_over = True
        length += 1
    assert 10 < length < 100
    for name in "ab":
        assert left_by(settings, name) == left_by(expected, name)


def test_a_file_that_fails_is_told_and_the_others_finish(config, write, monkeypatch):
    files = [write("bad", lr=7.0), write("good")]
    step = Engine.step

    def blow_up(self, lr):
        if lr > 1:
            for bucket in self.fsdp.buckets:
                if bucket.gradient_N is not None:
                    bucket.gradient_N.fill_(float("nan"))
        return step(self, lr)

    monkeypatch.setattr(Engine, "step", blow_up)
    settings = config("out", files, "train.max_bad_steps=3")
    with pytest.raises(RunFailed, match=r"1 of 2 jobs: bad \(3 steps in a row were not finite"):
        JobRun(settings).fit()
    assert len(left_by(settings, "good")[0]) == 7
    with Service(settings) as service:
        assert service.jobs["bad"].status == "failed"


def test_a_file_whose_folder_is_damaged_fails_alone(config, write):
    names = ["empty", "list", "cut", "short", "good"]
    files = [write(name, seed=number) for number, name in enumerate(names)]
    expected = config("undisturbed", files[-1:])
    JobRun(expected).fit()
    damaged = config("damaged", files, "jobs.save_interval=2", "jobs.max_loaded=9")
    service = Service(damaged)
    for _ in range(4 * len(files)):
        service.turn()
    service._stack.close()  # as the kernel ends a claim
    root = Path(damaged.output_dir) / "files"
    (root / "empty" / "job.json").touch()
    (root / "list" / "settings.json").write_text("[]")
    metrics = root / "cut" / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[1:])
    metrics = root / "short" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])
    with pytest.raises(RunFailed, match="4 of 5 jobs: ") as failed:
        JobRun(damaged).fit()
    for says in (
        r"empty \(job\.json is damaged",
        r"list \(settings\.json is damaged: it holds a list",
        r"cut \(metrics\.jsonl is damaged",
        r"short \(its log is damaged: a checkpoint has seen 4 requests of 1\)",
    ):
        failed.match(says)
    assert left_by(damaged, "good") == left_by(expected, "good")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("[model]\npreset = 'debug'", r"model\.preset: .*a\.toml' sets it, but it is the service"),
        ("weight_decay = 0.5", r"optim\.weight_decay: .*sets it"),
        ("[lora]\nrank = 16", r"lora\.rank: .*sets it"),
        ("learning = 1", r"optim\.learning: unknown setting"),
        ("[[", "config file: .*is not TOML"),
        ("[jobs]\nport = 1", r"jobs\.port: .*sets it"),
    ],
)
def test_a_file_may_not_say_everything(config, write, more, says):
    with pytest.raises(ConfigError, match=says):
        Service(config("out", [write("a", more=more)]))


def test_files_that_are_none(config, write, tmp_path):
    for file, says in (
        ("nowhere.toml", "does not exist"),
        ("nowhere.json", "cannot be read"),
        (write("a") + "," + write("a"), "has the name of"),
    ):
        with pytest.raises(ConfigError, match=says):
            Service(config("out", file.split(",")))
    path = tmp_path / "list.json"
    path.write_text("[]")
    with pytest.raises(ConfigError, match="holds no object"):
        Service(config("out", [str(path)]))


def test_a_folder_of_files_in_either_format(config, write, tmp_path, corpus):
    folder = tmp_path / "jobs"
    folder.mkdir()
    settings = {"data": {"source": "text", "path": str(corpus)}, "train": {"epochs": 0.1}}
    (folder / "b.json").write_text(json.dumps(settings))
    Path(write("a", steps=2)).rename(folder / "a.toml")
    (folder / "notes.md").write_text("no job")
    both = config("out", [str(folder)])
    JobRun(both).fit()
    assert len(left_by(both, "a")[0]) == 2
    assert len(left_by(both, "b")[0]) >= 1


def test_another_job_of_the_same_name_is_refused(config, write):
    with Service(config("out", [write("a")])) as service:
        service.turn()
    with pytest.raises(ConfigError, match=r"begun with another optim\.lr; put that back"):
        Service(config("out", [write("a", lr=5e-3)]))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--jobs.port none", "error: jobs.port: none, and there are no jobs.files"),
        ("--jobs.port none --jobs.files x --jobs.host ::1", "error: jobs.host: '::1' contradicts"),
        ("--jobs.auth none --jobs.token_file x", "error: jobs.token_file: 'x' contradicts"),
        ("--lora.rank 0", "error: lora.rank: 0, but jobs train adapters"),
        ("--optim.offload_fraction 1", "error: optim.offload_fraction: 1.0, but jobs take turns"),
        ("--jobs.max_jobs 0", "error: jobs.max_jobs: "),
        ("--rl.policy clip", "error: rl.policy: set (command line), but python -m moetrain.jobs"),
        ("--checkpoint.interval 3", "error: checkpoint.interval: set (command line), but"),
        ("--jobs.prot 3", "error: jobs.prot: unknown setting; did you mean --jobs.port?"),
        ("--launch.nproc 2 --train.global_batch_size 8 --lora.rank 0", "error: lora.rank: 0, but"),
    ],
)
def test_a_bad_setting_is_one_line(words, says, capsys, tmp_path):
    assert run([*words.split(), "--train.device=cpu", f"--output_dir={tmp_path / 'out'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(says)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_needs_nothing(capsys, tmp_path):
    assert run(["--dry_run", "--train.device=cpu", f"--output_dir={tmp_path / 'out'}"]) == 0
    assert json.loads(capsys.readouterr().out)["jobs"]["port"] == 8100
    assert not (tmp_path / "out").exists()
