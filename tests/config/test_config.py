"""Config: its four sources, their order, and refused settings."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from moetrain.cli import checkpoint, generate, serve
from moetrain.cli.train import main, run_jobs, run_rl
from moetrain.config import Config, ConfigError, sources
from moetrain.config.sections import TrainSection
from moetrain.config.sources import recipe_names
from moetrain.data.preview import cautions
from moetrain.models.families import PRESETS
from moetrain.train.session import resolve_run


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
        (["--data.path", "x.md"], "data.source", "not set, and data.path 'x.md'"),
        (["--moe.deepep_num_sms", "7"], "moe.deepep_num_sms", "even"),
        (
            ["--moe.deepep_num_sms", "24", "--moe.dispatcher", "alltoall"],
            "moe.deepep_num_sms",
            "contradicts moe.dispatcher 'alltoall'",
        ),
        (["--moe.static_capacity", "3"], "moe.static_capacity", "moe.dispatch_mode 'exact'"),
        (["--activation.save", "linear"], "activation.save", "activation.policy 'none'"),
        (["steps"], "recipe", "'steps' is not one of"),
        (["no/such.toml"], "config file", "No such file"),
    ],
)
def test_bad_settings_exit_2_with_one_line(words, field, says, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {field}: ")
    assert says in error
    assert error.count("\n") == 1


def test_a_recipes_experts_may_be_absent():
    words = ["model.preset=qwen3-0.6b", "moe.force_balanced=no"]  # the default, but given
    config = load(*words, source="debug")
    assert config.moe.aux_loss_coef == 0.01
    resolve_run(config)
    for name, value in (("bias_update_rate", "0.1"), ("aux_loss_coef", "0.02")):
        with pytest.raises(ConfigError, match=rf"moe\.{name}: {value}, but qwen3 has no experts"):
            resolve_run(load(*words, source="debug", environ={f"MOETRAIN_MOE__{name}": value}))


def test_micro_batches_make_up_the_global_batch():
    train = TrainSection(global_batch_size=24, micro_batch_size=8)
    assert (train.micro_batches(), train.micro_batches(3)) == (3, 1)
    with pytest.raises(ConfigError) as caught:
        train.micro_batches(2)
    assert caught.value.field == "train.global_batch_size"
    assert re.search(r"24 is not a multiple of .*micro_batch_size 8 x 2 ranks", str(caught.value))
    says = r"_batch_size: 25 .* train\.micro_batch_size 8; set .*global_batch_size 32 or .*size 1$"
    with pytest.raises(ConfigError, match=says):
        train.model_copy(update={"global_batch_size": 25}).micro_batches()


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
    for line in text.splitlines():
        assert len(line) <= 200


@pytest.mark.parametrize("run", [main, run_rl, run_jobs])
def test_help_of_a_section_lists_its_settings_alone(run, capsys):
    assert run(["--help", "optim", "log"]) == 0
    named = re.findall(r"^  --(\w+)\.", capsys.readouterr().out, re.M)
    assert set(named) == {"optim", "log"}
    assert named.count("log") == len(type(Config.model_fields["log"].default).model_fields)
    assert run(["rl", "--help"]) == 0  # a recipe, which has a section's name
    assert "--optim.lr (" in capsys.readouterr().out


SETTINGS_COMMANDS = {"train": main, "rl": run_rl, "jobs": run_jobs}
OPTION_COMMANDS = {"generate": generate.main, "serve": serve.main, "checkpoint": checkpoint.main}


@pytest.mark.parametrize("name", [*SETTINGS_COMMANDS, *OPTION_COMMANDS])
def test_every_command_says_its_version_and_how_it_is_called(name, capsys):
    def output_of(word):
        if name in SETTINGS_COMMANDS:
            assert SETTINGS_COMMANDS[name]([word]) == 0
        else:
            with pytest.raises(SystemExit, match=r"^0$"):  # argparse ends the process
                OPTION_COMMANDS[name]([word])
        return capsys.readouterr().out

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert output_of("--version") == f"moetrain {project['project']['version']}\n"
    assert output_of("--help").startswith(f"usage: python -m moetrain.{name} [")


def test_dry_run_prints_json_that_loads_again(capsys):
    assert main(["--dry_run", "--train.steps", "9", "--optim.warmup_steps", "2"]) == 0
    resolved = json.loads(capsys.readouterr().out)
    assert resolved["train"]["steps"] == 9
    assert Config.load(resolved, environ={}).to_dict() == resolved


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads(name):
    path = ["model.path=x"]
    needed = {
        "rl": path,
        "jobs": path,
        "sft": [*path, "data.path=y"],
        "continue": [*path, "data.path=y"],
    }
    needed = needed.get(name, [])
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


FINE_TUNING = "--model.path some/qwen --data.path chats.jsonl"


@pytest.mark.parametrize(
    ("words", "environ", "toml", "recipe"),
    [
        ("--model.path x/qwen --data.source jsonl --data.path a/chats.jsonl", {}, None, "sft"),
        ("--model.path x/qwen --data.path a/chats.jsonl", {}, None, "sft"),
        ("--data.path a/chats.jsonl", {"MOETRAIN_MODEL__PATH": "x/qwen"}, None, "sft"),
        ("", {}, '[model]\npath = "x/qwen"\n[data]\npath = "a/chats.jsonl"', "sft"),
        (
            "--data.source text",
            {},
            '[model]\npath = "x/qwen"\n[data]\npath = "a/chats"',
            "continue",
        ),
        ("--model.path x/qwen --data.path a/chats.txt", {}, None, "continue"),
        ("--model.path x/qwen --data.source stdlib", {}, None, "continue"),
    ],
)
def test_a_checkpoint_and_no_recipe_imply_one_for_fine_tuning(
    words, environ, toml, recipe, tmp_path
):
    source = None
    if toml is not None:
        source = tmp_path / "mine.toml"
        source.write_text(toml)
    config = load(*words.split(), source=source, environ=environ)
    assert config.origins["optim.lr"] == f"recipe {recipe}"
    assert config.optim.lr == {"sft": 1e-5, "continue": 2e-5}[recipe]
    assert (config.train.epochs, config.train.steps) == (
        {"sft": 3.0, "continue": 1.0}[recipe],
        None,
    )
    assert config.train.sample_prompt is None
    assert config.checkpoint.save_hf
    assert config.output_dir == f"outputs/qwen-{'stdlib' if 'stdlib' in words else 'chats'}"
    assert f"recipe {recipe}, as model.path is set" in config.describe()
    assert "output_dir" in config.describe()


@pytest.mark.parametrize(
    ("kinds", "recipe"),
    [(["text", "text"], "continue"), (["text", "records"], "sft"), ([None, None], "sft")],
)
def test_a_mixture_of_texts_implies_continued_pretraining(kinds, recipe):
    """Values of the recipe for chats were taken for a mixture of texts."""
    mix = [{"path": f"{i}.parquet", "source": kind} for i, kind in enumerate(kinds)]
    given = Config.load({"model": {"path": "x/qwen"}, "data": {"mix": mix}}, environ={})
    said = load("--model.path", "x/qwen", "--data.mix", json.dumps(mix))
    for config in (given, said):
        assert config.origins["optim.lr"] == f"recipe {recipe}"
        assert f"recipe {recipe}, as model.path is set" in config.describe()


def test_a_named_recipe_stays_the_one(tmp_path):
    assert load(source=Path("debug")).origins == load(source="debug").origins
    config = load("--model.path", "x", "--data.path", "y", source="continue")
    assert config.describe().startswith("  recipe continue\n")
    assert config.optim.lr == 2e-5
    pretraining = load("--model.path", "some/qwen", source="qwen3-0.6b")
    assert (pretraining.optim.lr, pretraining.output_dir) == (3e-4, "outputs/qwen3-0.6b")
    toml = tmp_path / "mine.toml"
    toml.write_text('[model]\npreset = "qwen3-0.6b"\n')
    mine = load(source=toml)
    assert (mine.optim.lr, mine.output_dir) == (3e-4, "outputs/qwen3-0.6b-stdlib")
    assert mine.describe().splitlines()[0].endswith(f"({toml})")


@pytest.mark.parametrize(
    ("path", "data", "folder"),
    [
        ("Qwen/Qwen3-0.6B", "chats.jsonl", "Qwen3-0.6B-chats"),
        ("/models/qwen/", "/data/books.txt", "qwen-books"),
        ("outputs/qwen-chats/hf", "more.jsonl", "qwen-chats-more"),  # a run's own export
    ],
)
def test_the_folder_names_model_and_data(path, data, folder):
    config = load("--model.path", path, "--data.path", data)
    assert config.output_dir == f"outputs/{folder}"
    assert config.origins["output_dir"] == "model and data"


def test_the_users_choice_of_two_replaces_a_recipes():
    assert load("--train.epochs", "2").train.steps is None
    assert load("--train.epochs", "2").train.total_steps(33) == 5  # 66 rows, 16 a step
    assert "train.steps = null  (as train.epochs is set)" in load("--train.epochs", "2").describe()
    assert load("--train.steps", "7", source="debug").train.total_steps(33) == 7
    chats = load(*FINE_TUNING.split(), "--train.steps", "7", "--optim.warmup_steps", "2")
    assert (chats.train.epochs, chats.train.total_steps(10**6)) == (None, 7)
    assert (chats.optim.warmup_fraction, chats.optim.warmup(7)) == (None, 2)
    assert load(*FINE_TUNING.split()).optim.warmup(200) == 10
    unset = load("--train.epochs", "2", "--train.steps", "none")
    assert (unset.train.epochs, unset.train.steps) == (2.0, None)


def test_values_of_the_environment_and_the_command_line_are_text():
    config = load("train.steps=10.0", "optim.lr=1", environ={"MOETRAIN_LAUNCH__NPROC": " 2 "})
    assert (config.train.steps, config.optim.lr, config.launch.nproc) == (10, 1.0, 2)
    assert isinstance(config.train.steps, int)


def test_values_of_a_file_keep_their_types(tmp_path):
    toml = tmp_path / "mine.toml"
    toml.write_text(
        '[model]\npreset = "debug"\n[optim]\nlr = 1\n[compile]\nenabled = true\n'
        '[activation]\npolicy = "selective"\nsave = ["linear", "experts"]\n[launch]\n'
        "[parallel]\npp = 2\npp_split = [3, 1]\n"
    )
    config = load(source=toml)
    assert (config.optim.lr, config.compile.enabled) == (1.0, True)
    assert config.activation.save == ("linear", "experts")
    assert config.parallel.pp_split == (3, 1)
    assert Config.load(config.to_dict(), environ={}).to_dict() == config.to_dict()


def test_filled_settings_are_set_and_have_an_origin():
    config = load("--train.steps", "9")
    filled = config.filled({"data.num_documents": 3, "output_dir": "x"}, "the test")
    assert (filled.data.num_documents, filled.output_dir, filled.train.steps) == (3, "x", 9)
    assert not config.is_set("data.num_documents")
    assert filled.is_set("data.num_documents")
    assert filled.is_set("train.steps")
    assert filled.origins == config.origins | {
        "data.num_documents": "the test",
        "output_dir": "the test",
    }
    assert not filled.is_set("train.gc_interval")


def test_a_home_folder_is_found_in_any_source(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert load("output_dir=~/runs").output_dir == "/home/me/runs"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["data.new_tokens=<a>,<b>"], ("<a>", "<b>")),
        (["data.new_tokens="], ()),
        (["data.new_tokens=<a>,"], None),
        (["data.new_tokens=<a>,,<b>"], None),
        (["data.new_tokens= ,<b>"], None),
        ({"data": {"new_tokens": ["<a>", "<b>"]}}, ("<a>", "<b>")),
        ({"data": {"new_tokens": []}}, ()),
        ({"data": {"new_tokens": ["<a>", ""]}}, None),
        ({"data": {"new_tokens": ["", " "]}}, None),
        (["lora.targets=*.wq,", "lora.rank=8"], None),
        (["log.reporters=,wandb"], None),
    ],
)
def test_an_empty_entry_of_a_list_is_refused_and_not_dropped(given, wanted):
    source, words = (given, []) if isinstance(given, dict) else ({}, given)
    learned = {"lora.rank": 8, "lora.modules_to_save": "embed_tokens", "data.source": "text"}
    words = [*words, "data.path=a.txt", "model.preset=debug"]
    words += [f"{k}={v}" for k, v in learned.items() if f"{k}=" not in " ".join(words)]
    if wanted is None:
        with pytest.raises(ConfigError, match=r"an entry is empty; leave it out"):
            Config.load(source, words, environ={})
    else:
        assert Config.load(source, words, environ={}).data.new_tokens == wanted


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_that_learn_random_tokens_begin_with_bench(name):
    text = (Path(sources.__file__).parents[1] / "recipes" / f"{name}.toml").read_text()
    said = tomllib.loads(text)
    is_random = said.get("data", {}).get("source") == "synthetic"
    assert is_random == name.startswith("bench-")


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "qwen3-235b-a22b"])
def test_recipes_of_published_models_train_them(name):
    own = load(source=name)
    assert cautions(own, PRESETS[name].vocab_size) == []
    assert own.model.preset == name
    assert own.data.tokenizer.lower() == f"qwen/{name}"
    assert own.checkpoint.interval > 0
    assert own.checkpoint.at_end
    assert own.train.eval_interval > 0
    random, _ = cautions(load(source=f"bench-{name}"), PRESETS[name].vocab_size)
    assert random == "data.source synthetic: random tokens, from which nothing is learned"
