"""Settings without effect: every row of the table of needs is applied, and its error is checked."""

import json

import pytest

from moetrain.cli.train import main
from moetrain.config import Config, ConfigError, Fact, Recipes, needs
from moetrain.parallel.world import join_world
from moetrain.train.engine import Engine
from moetrain.train.estimates.plan import MemoryPlan, plan_memory
from moetrain.train.session import Session, resolve_run
from tests.lib.distributed import spawn
from tests.lib.needs_table import DEFAULTS, NEEDS_OF_ONE, PROBES, names_of


def test_every_name_in_the_table_is_a_setting_or_a_fact():
    for need in needs.NEEDS:
        assert names_of(need), need.settings
        assert need.settings.endswith(".*") or names_of(need) == sorted_as_settings(need)
        assert all(other in DEFAULTS or other in list(Fact) for other in need.requires), (
            need.requires
        )


def sorted_as_settings(need):
    return sorted(need.settings.split(), key=list(DEFAULTS).index)


@pytest.mark.parametrize(
    ("need", "name"),
    NEEDS_OF_ONE,
    ids=[f"{name}-{'-'.join(x.requires)}" for x, name in NEEDS_OF_ONE],
)
def test_a_setting_that_lacks_what_it_needs_is_named_with_it(need, name, monkeypatch):
    monkeypatch.setattr(needs, "NEEDS", (need,))
    value = next(x for x in PROBES if x in need.when and x != DEFAULTS[name])
    there = {other: None for other in need.requires if other in list(Fact)}
    lacking = dict.fromkeys(there, "the reason")
    wrong = {
        k: next(x for x in PROBES if x not in v) for k, v in need.requires.items() if k in DEFAULTS
    }
    values = DEFAULTS | wrong | {name: value}
    ((found, why, _),) = needs.unmet(values, DEFAULTS, lacking)
    assert found == name
    assert all(other in why for other in wrong)
    assert ("the reason" in why) == bool(there)
    assert not list(needs.unmet(values | {name: DEFAULTS[name]}, DEFAULTS, lacking))
    if there:
        assert not list(needs.unmet(values, DEFAULTS, there))
        assert not list(needs.unmet(values, DEFAULTS, {}))  # not known yet
    for other in wrong:  # one of several suffices
        fit = next(x for x in PROBES if x in need.requires[other])
        assert not list(needs.unmet(values | {other: fit}, DEFAULTS, lacking))


GIVEN = [
    (
        "--train.indexer joint --parallel.pp 2",
        "train.indexer: 'joint' contradicts parallel.pp 2 (the last stage has no losses of other "
        "stages' indexers); unset it, or set parallel.pp 1",
    ),
    (
        "--train.indexer joint --lora.rank 8",
        "train.indexer: 'joint' contradicts lora.rank 8 (PEFT's files hold no indexers); unset",
    ),
    (
        "--train.indexer warmup --train.mtp_weight 0.1",
        "train.indexer: 'warmup' contradicts train.mtp_weight 0.1 (everything but the indexers is "
        "frozen); unset it",
    ),
    ("--optim.schedule constant --optim.min_lr_ratio 0", "optim.min_lr_ratio: 0.0 contradicts opt"),
    (
        "--train.sample_tokens 0 --train.sample_prompt x",
        "train.sample_prompt: 'x' contradicts train.sample_tokens 0; unset it, or raise "
        "train.sample_tokens",
    ),
    (
        "--data.source synthetic --train.sample_prompt x",
        "train.sample_prompt: 'x' contradicts data.source 'synthetic'; unset it, or use "
        "another data.source",
    ),
    (
        "--checkpoint.asynchronous yes --checkpoint.minutes 0",
        "checkpoint.asynchronous: True contradicts checkpoint.interval 0 and checkpoint.minutes 0",
    ),
    (
        "--data.eval_fraction 0 --train.eval_rows 8",
        "train.eval_rows: 8 contradicts data.eval_fraction 0.0 and data.eval_path none and "
        "data.mix none; unset it, or raise data.eval_fraction, or set data.eval_path",
    ),
    (
        "--data.eval_fraction 0 --train.patience 3",
        "train.patience: 3 contradicts data.eval_fraction 0.0 and data.eval_path none and "
        "data.mix none; unset it, or raise data.eval_fraction, or set data.eval_path",
    ),
    (
        "--data.eval_fraction 0 --train.target_loss 1.5",
        "train.target_loss: 1.5 contradicts data.eval_fraction 0.0 and data.eval_path none and "
        "data.mix none; unset it, or raise data.eval_fraction, or set data.eval_path",
    ),
    (
        "--train.eval_interval 0 --train.target_loss 1.5",
        "train.target_loss: 1.5 contradicts train.eval_interval 0; unset it, or raise "
        "train.eval_interval",
    ),
    (
        "--moe.force_balanced yes --moe.bias_update_rate 0.1",
        "moe.bias_update_rate: 0.1 contradicts moe.force_balanced True; unset it, or set "
        "moe.force_balanced no",
    ),
    (
        "--lora.rank 8 --moe.bias_update_rate 0.01",
        "moe.bias_update_rate: 0.01 contradicts lora.rank 8 (it moves a selection bias, "
        "which an adapter's files do not hold); set it to 0",
    ),
    ("--kernels.attention exact --dry_run", "kernels.attention: 'exact', but this run is on a CPU"),
    ("--kernels.attention exact", "kernels.attention: 'exact', but this run is on a CPU; unset it"),
    ("--model.preset qwen3-0.6b --moe.z_loss_coef 1", "moe.z_loss_coef: 1.0, but qwen3 has no exp"),
    (
        "--optim.muon_momentum 0.9",
        "optim.muon_momentum: 0.9 contradicts optim.name 'adamw'; unset it, or set optim.name muon",
    ),
    (
        "--optim.muon_qk_clip 100",
        "optim.muon_qk_clip: 100.0 contradicts optim.name 'adamw'; unset it, or set optim.name m",
    ),
    (
        "--optim.name muon --optim.muon_qk_clip 100 --kernels.attention flex",
        "optim.muon_qk_clip: 100.0 contradicts kernels.attention 'flex' (QK-clip needs the "
        "boundaries of documents, which flex masks do not show); unset it, or use another "
        "kernels.attention",
    ),
    (
        "--optim.name muon --lora.rank 8",
        "optim.name: 'muon' contradicts lora.rank 8 (Muon does not train adapters); use adamw",
    ),
    (
        "--optim.name muon --optim.state_dtype float8",
        "optim.state_dtype: 'float8' contradicts optim.name 'muon'; use bfloat16",
    ),
    (
        "--optim.name muon --optim.offload_fraction 0.5",
        "optim.offload_fraction: 0.5 contradicts optim.name 'muon' (Muon needs whole ",
    ),
    ("--optim.lr 1 --train.seed 1 --optim.lr 2", "optim.lr: given twice on the command line, as"),
    ("--train.seed 1 train.seed=1", "train.seed: given twice on the command line, as '1' and '1'"),
]


@pytest.mark.parametrize(("words", "says"), GIVEN, ids=lambda x: x[:50])
def test_settings_without_effect_are_refused_in_one_line(words, says, tmp_path, capsys):
    where = ["--train.device", "cpu", "--output_dir", str(tmp_path / "out")]
    assert main([*words.split(), *where]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {says}")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("word", ["train.eval_interval=5", "train.patience=3"])
def test_entries_of_a_mixture_may_be_what_is_evaluated_on(word):
    mix = json.dumps([{"path": "a.jsonl", "eval_path": "b.jsonl"}])
    Config.load(None, [f"data.mix={mix}", "data.eval_fraction=0", word], environ={})


@pytest.mark.parametrize("word", ["train.patience=3", "checkpoint.best=yes"])
def test_without_tasks_to_evaluate_on_there_is_no_best(word):
    with pytest.raises(ConfigError, match=r"contradicts rl\.eval_tasks 0; unset it, or raise rl"):
        Config.load(None, ["rl.eval_tasks=0", word], environ={}, recipes=Recipes.RL)


def test_an_environment_says_a_setting_once(monkeypatch):
    with pytest.raises(ConfigError, match=r"train\.seed: given twice in the environment"):
        Config.load(environ={"MOETRAIN_TRAIN__SEED": "1", "moetrain_train__seed": "2"})


def test_proposals_of_a_recipe_without_effect_become_defaults():
    """The resolved settings also load again, although a mapping counts as the user's."""
    prompt = Config.load("debug").train.sample_prompt
    config = Config.load("debug", ["train.sample_tokens=0"])
    assert (prompt is None, config.train.sample_prompt) == (False, None)
    origin = f"as {prompt!r} contradicts train.sample_tokens 0"
    assert config.origins["train.sample_prompt"] == origin
    assert Config.load(config.to_dict(), environ={}).to_dict() == config.to_dict()
    dense, _ = resolve_run(Config.load("debug", ["model.preset=qwen3-0.6b"]))
    assert dense.moe.aux_loss_coef is None
    assert Config.load("debug").moe.aux_loss_coef == 0.01


ON_A_CPU = ["train.device=cpu", "compile.enabled=no", "model.hidden_size=32", "data.seq_len=64"]


def proposed(*words, **values):
    """Return settings and a model, where a recipe has proposed ``values``."""
    values = {name.replace("__", "."): value for name, value in values.items()}
    config = Config.load("debug", [*ON_A_CPU, *words], environ={})
    return resolve_run(config.filled(values, "recipe of a test"))


def test_a_proposal_that_the_device_does_not_take_is_not_what_runs_or_is_planned():
    config, arch = proposed(kernels__attention="exact")
    assert config.kernels.attention == "exact"  # the device is not known yet
    plan = MemoryPlan.of(config, arch, generates=False)
    for found in (Session(config, arch).config, plan.config):
        assert found.kernels.attention == "auto"
        origin = "as 'exact', but this run is on a CPU"
        assert found.origins["kernels.attention"] == origin


def dispatched():
    """Return the dispatcher of an engine of two ranks whose recipe proposed DeepEP."""
    wanted = {"moe__dispatch_mode": "static", "moe__dispatcher": "deepep"}
    config, arch = proposed("parallel.ep=2", "train.micro_batch_size=8", **wanted)
    engine = Engine(config, arch, join_world(config, arch))
    return engine.runner.static, engine.config.moe.dispatch_mode, engine.config.moe.dispatcher


def test_a_proposal_of_deepep_is_not_what_runs_without_it():
    assert spawn(2, dispatched) == [(None, "exact", "auto")] * 2


def test_a_default_asks_for_nothing(tmp_path):
    toml = tmp_path / "mine.toml"
    toml.write_text('[model]\npreset = "debug"\n[optim]\nschedule = "constant"\n')
    Config.load(toml, ["optim.min_lr_ratio=0.1"], environ={})
    toml.write_text(toml.read_text() + "min_lr_ratio = 0.2\n")
    with pytest.raises(ConfigError, match=r"^optim\.min_lr_ratio: 0\.2 contradicts"):
        Config.load(toml, environ={})


def test_settings_for_a_gpu_are_planned_for_machines_with_gpus():
    config = Config.load("debug", ["kernels.attention=exact", "launch.gpus=1"], environ={})
    plan = MemoryPlan.of(*resolve_run(config), generates=False)
    assert plan.machine.device.type == "cuda"
    assert plan.config.kernels.attention == "exact"


def test_settings_for_a_gpu_are_refused_in_a_plan_for_a_cpu():
    words = ["kernels.attention=exact", "train.device=cpu"]
    with pytest.raises(ConfigError, match=r"kernels\.attention: 'exact', but this run is on a CPU"):
        plan_memory(*resolve_run(Config.load("debug", words, environ={})))


def test_machines_that_are_planned_for_are_no_runs(tmp_path, capsys):
    words = ["--launch.gpus", "8", "--output_dir", str(tmp_path / "out")]
    words += ["--train.global_batch_size", "128"]
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("error: launch.gpus: 8, but only --dry_run uses it")
    assert main([*words, "--dry_run"]) == 0
    assert json.loads(capsys.readouterr().out)["launch"]["gpus"] == 8
