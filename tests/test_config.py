"""Config: the four sources, their order, and what is refused."""

import json

import pytest

from moetrain.config import Config, ConfigError, recipe_names
from moetrain.config_help import format_help
from moetrain.train import main


def load(*words, source=None, environ=None):
    return Config.load(source, words, environ={} if environ is None else environ)


def test_later_sources_win_and_their_origin_is_kept(tmp_path):
    toml = tmp_path / "mine.toml"
    toml.write_text('[model]\npreset = "debug"\n[train]\nsteps = 7\nseed = 1\n[optim]\nlr = 1.0\n')
    environ = {"MOETRAIN_TRAIN__SEED": "2", "MOETRAIN_OPTIM__LR": "2.0", "HOME": "/"}
    config = load("--optim.lr", "3.0", "--train.steps=8", source=str(toml), environ=environ)
    assert (config.train.steps, config.train.seed, config.optim.lr) == (8, 2, 3.0)
    assert config.origins["train.seed"] == "environment"
    assert config.origins["optim.lr"] == "command line"
    assert config.origins["model.preset"] == str(toml)
    assert "optim.lr = 3.0  (command line)" in config.describe()
    assert "data.source" not in config.describe()


@pytest.mark.parametrize("text", ["FALSE", "no", "0", "Off", "f"])
def test_false_in_any_spelling(text):
    assert load("--compile.enabled", text).compile.enabled is False


@pytest.mark.parametrize("text", ["TRUE", "Yes", "1", "on"])
def test_true_in_any_spelling(text):
    assert load("--compile.enabled", text).compile.enabled is True


@pytest.mark.parametrize(
    ("words", "field", "says"),
    [
        (["--train.stepz", "3"], "train.stepz", "did you mean --train.steps?"),
        (["--train.steps", "many"], "train.steps", "'many'"),
        (["--train.steps", "0"], "train.steps", "greater than 0"),
        (["--train.steps"], "train.steps", "no value"),
        (["--compile.enabled", "maybe"], "compile.enabled", "'maybe'"),
        (["--data.source", "web"], "data.source", "'stdlib'"),
        (["--train.global_batch_size", "17"], "train.global_batch_size", "micro_batch_size 16"),
        (["--model.path", "x", "--model.preset", "debug"], "model.path", "model.preset 'debug'"),
        (["--model.path", "x", "--model.num_layers", "2"], "model.num_layers", "model.path 'x'"),
        (["--data.source", "text"], "data.path", "not set"),
        (["--data.path", "x"], "data.path", "data.source 'stdlib'"),
        (["--moe.deepep_num_sms", "7"], "moe.deepep_num_sms", "even"),
        (
            ["--moe.deepep_num_sms", "24", "--moe.dispatcher", "alltoall"],
            "moe.deepep_num_sms",
            "contradicts moe.dispatcher 'alltoall'",
        ),
        (["--moe.static_capacity", "3"], "moe.static_capacity", "moe.dispatch_mode 'exact'"),
        (["--activation.save", "linear"], "activation.save", "activation.policy 'none'"),
        (["steps"], "recipe", "'steps' is not one of"),
        (["no/such.toml"], "config file", "does not exist"),
    ],
)
def test_bad_settings_exit_2_with_one_line(words, field, says, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {field}: ")
    assert says in error
    assert error.count("\n") == 1


def test_unknown_environment_variable_is_an_error():
    with pytest.raises(ConfigError, match="MOETRAIN_TRAIN__STEPZ: unknown setting"):
        load(environ={"MOETRAIN_TRAIN__STEPZ": "3"})


def test_toml_with_an_unknown_key_or_a_section_as_value(tmp_path):
    toml = tmp_path / "bad.toml"
    toml.write_text("[train]\nspeed = 3\n")
    with pytest.raises(ConfigError, match=r"train\.speed: unknown setting"):
        load(source=str(toml))
    toml.write_text("train = 3\n")
    with pytest.raises(ConfigError, match="train"):
        load(source=str(toml))


def test_a_checkpoint_on_the_command_line_replaces_the_recipes_preset():
    config = load("--model.path", "some/folder", source="qwen3-0.6b")
    assert (config.model.path, config.model.preset) == ("some/folder", None)


def test_help_lists_every_setting_with_default_and_meaning(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for section, field in Config.model_fields.items():
        settings = getattr(field.default, "model_dump", dict)()
        for name in settings:
            assert f"--{section}.{name} (" in text
    assert "Optimizer steps." in text
    for line in format_help().splitlines():
        assert len(line) <= 200


def test_dry_run_prints_json_that_loads_again(capsys):
    assert main(["--dry_run", "--train.steps", "9", "--optim.warmup_steps", "2"]) == 0
    resolved = json.loads(capsys.readouterr().out)
    assert resolved["train"]["steps"] == 9
    assert Config.load(resolved, environ={}).to_dict() == resolved


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads(name):
    needed = [] if name not in ("sft", "continue") else ["model.path=x", "data.path=y"]
    config = load(*needed, source=name)
    assert (config.model.path if needed else config.model.preset) is not None


def test_none_unsets_what_may_be_unset_and_is_a_word_elsewhere():
    config = load("moe.aux_loss_coef=none", "activation.policy=none", source="debug")
    assert config.moe.aux_loss_coef is None
    assert config.activation.policy == "none"
    with pytest.raises(ConfigError, match=r"train\.seed: 'none'"):
        load("train.seed=none")


def test_config_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        load().train.steps = 3  # pyright: ignore
