"""User errors in the environment, a TOML file or a mapping of settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from moetrain.config import Config, ConfigError
from tests.lib.command_lines import assert_refused

# ---- the environment ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "value", "field", "says"),
    [
        ("MOETRAIN_TRAIN__LR", "1", "MOETRAIN_TRAIN__LR", "did you mean MOETRAIN_OPTIM__LR"),
        ("MOETRAIN_LR", "1", "MOETRAIN_LR", "did you mean MOETRAIN_OPTIM__LR"),
        ("MOETRAIN_TRAIN_STEPS", "1", "MOETRAIN_TRAIN_STEPS", "mean MOETRAIN_TRAIN__STEPS"),
        ("MOETRAIN_TRAIN__STEPZ", "1", "MOETRAIN_TRAIN__STEPZ", "mean MOETRAIN_TRAIN__STEPS"),
        ("MOETRAIN_", "1", "MOETRAIN_", "unknown setting"),
        ("MOETRAIN_DEBUG", "1", "MOETRAIN_DEBUG", "--help lists them all"),
        ("moetrain_optim__lr", "fast", "optim.lr", "'fast'"),
        ("MOETRAIN_OPTIM__LR", "", "optim.lr", "''"),
        ("MOETRAIN_OPTIM__EPS", "inf", "optim.eps", "finite"),
        ("MOETRAIN_OUTPUT_DIR", "", "output_dir", "is empty"),
        ("MOETRAIN_OUTPUT_DIR", "none", "output_dir", "needs a folder"),
        ("MOETRAIN_TRAIN__SEED", str(2**64), "train.seed", "beyond 64 bits"),
        ("MOETRAIN_COMPILE__ENABLED", "2", "compile.enabled", "'2'"),
        ("MOETRAIN_MODEL__PATH", "x", "data.path", "not set"),
    ],
)
def test_environment(variable, value, field, says, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(variable, value)
    monkeypatch.chdir(tmp_path)
    assert_refused([], field, says, tmp_path, capsys)


@pytest.mark.parametrize(
    ("variables", "field", "says"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "MASTER_ADDR", "not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "MASTER_PORT", "not set"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "http"},
            "MASTER_PORT",
            "'http' is not a whole number",
        ),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_LAUNCH_NODE_IPADDR", "not set"),
    ],
    ids=repr,
)
def test_a_launchers_variables(variables, field, says, tmp_path, capsys, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert_refused([], field, says, tmp_path, capsys)


# ---- TOML files ---------------------------------------------------------------------------------

DEBUG = '[model]\npreset = "debug"\n'

TOML = [
    ("not TOML", "steps", "config file", "cannot be read as TOML"),
    ("a tab that is no TOML", "[train\nsteps = 3", "config file", "cannot be read as TOML"),
    ("twice", "[train]\nsteps = 3\nsteps = 4", "config file", "cannot be read as TOML"),
    ("latin-1", b'[model]\npreset = "d\xe9bug"', "config file", "as TOML: .*utf-8.* position 19"),
    ("UTF-16", '[model]\npreset = "debug"'.encode("utf-16"), "config file", "as TOML: .*utf-8"),
    ("binary", bytes(range(256)), "config file", "cannot be read as TOML: "),
    ("deep arrays", "a = " + "[" * 100_000, "config file", "as TOML: .*recursion"),
    ("deep tables", "a." * 2_000 + "b = 1", "config file", "as TOML: .*recursion"),
    ("a number of 5,000 digits", f"[train]\nsteps = {'9' * 5000}", "config file", "digits"),
    ("a number of 65 bits", "[train]\nseed = 18446744073709551616", "train.seed", "64 bits"),
    ("a huge hexadecimal", f"[train]\nseed = 0x{'f' * 9000}", "train.seed", "36000 bits"),
    ("true for a number", "[train]\nsteps = true", "train.steps", "True: .* valid integer"),
    ("true for a float", "[optim]\nlr = true", "optim.lr", "True: .* valid number"),
    ("true in a union", "[launch]\nnproc = true", "launch.nproc", "True"),
    ("1 for a truth value", "[compile]\nenabled = 1", "compile.enabled", "1: give yes or no"),
    ("text for a truth value", '[compile]\nenabled = "yes"', "compile.enabled", "'yes'"),
    ("text for a number", '[train]\nsteps = "10"', "train.steps", "'10'"),
    ("text for a float", '[optim]\nlr = "1e-4"', "optim.lr", "'1e-4'"),
    ("10.5 for an integer", "[train]\nsteps = 10.5", "train.steps", "10.5: give a valid integer"),
    (
        "a word for an integer",
        '[train]\nsteps = "many"',
        "train.steps",
        "'many': give a valid inte",
    ),
    ("a setting of no section", 'steps = "many"', "steps", "did you mean train.steps"),
    ("a number for text", "[data]\ntokenizer = 3", "data.tokenizer", "3: .* valid string"),
    ("a date for text", "[data]\ntokenizer = 2026-01-01", "data.tokenizer", "date"),
    ("a list for text", '[data]\ntokenizer = ["byte"]', "data.tokenizer", "valid string"),
    ("a list for a number", "[train]\nsteps = [3]", "train.steps", r"\[3\]"),
    ("a table for a number", "[train.steps]\na = 3", "train.steps.a", "unknown setting"),
    ("inf", "[optim]\neps = inf", "optim.eps", "inf: .* finite"),
    ("nan", "[moe]\nz_loss_coef = nan", "moe.z_loss_coef", "finite"),
    ("NUL", '[data]\ntokenizer = "a\\u0000"', "data.tokenizer", "not text"),
    ("NUL in the folder", 'output_dir = "a\\u0000"', "output_dir", "not text"),
    ("an empty folder", 'output_dir = ""', "output_dir", "is empty"),
    ("no folder", 'output_dir = "none"', "output_dir", "needs a folder"),
    ("an unknown key", "[train]\nspeed = 3", "train.speed", "unknown setting"),
    ("a key of elsewhere", "[train]\nlr = 3", "train.lr", "did you mean optim.lr"),
    ("an unknown section", "[trian]\nsteps = 3", "trian.steps", "did you mean train.steps"),
    ("an empty unknown section", "[adapter]", "adapter", "unknown setting"),
    (
        "a section as a value",
        "train = 3",
        "train",
        r"3 is given, but train is a section; .*\[train\]",
    ),
    ("a list of sections", "[[train]]\nsteps = 3", "train", "is given, but train is a section"),
    ("two that contradict", "[train]\nsteps = 3\nepochs = 1", "train.epochs", "train.steps 3"),
    ("both models", DEBUG + 'path = "x"', "model.path", "contradicts model.preset 'debug'"),
    ("no model", "[train]\nsteps = 3", "model.preset", "not set"),
    ("what is saved", '[activation]\nsave = ["x"]', "activation.save", "'x'"),
    ("numbers that are saved", "[activation]\nsave = [3]", "activation.save", "3"),
]


@pytest.mark.parametrize(
    ("text", "field", "says"), [row[1:] for row in TOML], ids=[row[0] for row in TOML]
)
def test_toml(text: str | bytes, field: str, says: str, tmp_path, capsys, monkeypatch):
    file = tmp_path / "mine.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.chdir(tmp_path)
    assert_refused([str(file)], field, says, tmp_path, capsys)


def test_files_that_cannot_be_read(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "link.toml").symlink_to(tmp_path / "nothing")
    (tmp_path / "loop.toml").symlink_to(tmp_path / "loop.toml")
    (tmp_path / "file").write_text("")
    for name, says in (
        ("folder.toml", "as TOML: .*Is a directory"),
        ("link.toml", "No such file"),
        ("loop.toml", "as TOML: .*Too many levels"),
        ("no/such.toml", "No such file"),
        ("file/below.toml", "as TOML: .*Not a directory"),
    ):
        assert_refused([name], "config file", says, tmp_path, capsys)


def test_a_file_that_may_not_be_read(tmp_path, capsys, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)  # root may read anything
    assert_refused(["a.toml"], "config file", "as TOML: .*Permission denied", tmp_path, capsys)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    file = tmp_path / "windows.toml"
    file.write_bytes(b'\xef\xbb\xbf[model]\r\npreset = "debug"\r\n[train]\r\nsteps = 7\r\n')
    assert Config.load(file, environ={}).train.steps == 7


# ---- mappings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "overrides", "message"),
    [
        ({"train": {"steps": True}}, [], r"train\.steps: True"),
        ({"train": {"steps": "3"}}, [], r"train\.steps: '3'"),
        ({"train": {"steps": 2**70}}, [], r"train\.steps: 1180\d+: is beyond 64 bits"),
        ({"train": {"steps": None}}, [], r"train\.steps: not set"),
        ({"train": {"seed": None}}, [], r"train\.seed: None"),
        ({"train": None}, [], "train: None is given, but train is a section"),
        ({"train": 3}, [], "train: 3 is given, but train is a section"),
        ({"train": {"steps": {}}}, [], r"train\.steps: {}"),
        ({"train.stepz": 3}, [], r"train\.stepz: unknown setting; did you mean train\.steps"),
        ({3: 4}, [], "3: unknown setting"),
        ({"optim": {"eps": float("inf")}}, [], r"optim\.eps: inf"),
        ({"output_dir": ""}, [], "output_dir: '': is empty"),
        (
            {"train": {"steps": 3}},
            ["train.epochs=1"],
            r"epochs: 1\.0 \(command.*\(mapping\)",
        ),
        (
            {"train": {"epochs": 3}},
            ["train.steps=1"],
            r"epochs: 3 \(mapping\) contra.*steps 1",
        ),
        (
            {},
            ["model.path=x", "data.path=y.txt"],
            r"'x' \(command line\) .* 'debug' \(mapping\)",
        ),
    ],
    ids=repr,
)
def test_mappings(source, overrides, message):
    with pytest.raises(ConfigError, match=message):
        Config.load({"model": {"preset": "debug"}} | source, overrides, environ={})


def test_a_mapping_that_contains_itself():
    tree: dict = {"model": {"preset": "debug"}}
    tree["train"] = tree
    with pytest.raises(
        ConfigError, match="config file: 'mapping' cannot be read as TOML: maximum recursion"
    ):
        Config.load(tree, environ={})


def test_paths_from_home_wherever_they_are_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.toml").write_text(
        '[model]\npreset = "debug"\n[data]\nsource = "text"\npath = "~/a"\neval_path = "~/b"\n'
        'tokenizer = "~/t"\ncache_dir = "~/c"\n[checkpoint]\nresume = "~/s"'
    )
    config = Config.load(tmp_path / "mine.toml", ["--output_dir=~/o"], environ={})
    data = config.data
    given = data.path, data.eval_path, data.tokenizer, data.cache_dir, config.checkpoint.resume
    assert [*given, config.output_dir] == [str(tmp_path / name) for name in "abtcso"]
