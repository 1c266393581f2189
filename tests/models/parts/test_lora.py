"""Adapters equal dense weights with B A added: outputs, losses, every gradient, on every mesh."""

import pytest
import torch

from moetrain.cli.checkpoint import main as checkpoint_command
from moetrain.config import Config, ConfigError
from moetrain.config.sections import LoraSection
from moetrain.models.hf.load import resolve_architecture
from moetrain.models.rules import ADAPTER
from moetrain.parallel.mesh import ParallelDims
from moetrain.train.loop import Trainer
from tests.lib.adapters import (
    BASE,
    EVERYTHING,
    MICRO,
    TOLERANCE,
    adapted,
    base_of,
    compare,
    dense_reference,
    gradients_of,
    learn,
    learn_all,
)
from tests.lib.checkpoints import tensors_of
from tests.lib.distributed import spawn
from tests.lib.engines import (
    copy_of,
    make_batches,
    make_engine,
    objective_of,
    train,
    weights_of,
)
from tests.lib.estimates import estimate_memory

TARGETS = {
    "auto": [],
    "everything": [EVERYTHING, "lora.rs=yes"],
    "attention": ["lora.targets=*.attn.*"],
    "experts": ["lora.targets=layers.*.moe.experts"],
    "one router": ["lora.targets=layers.1.moe.router"],
    # With these weights fp32 has five digits: with other seeds, autograd's own fp32 gradients of
    # the merged weights are up to 9e-5 from those in fp64.
    "dense": ["lora.rank=3", "train.seed=2"],
}


@pytest.mark.parametrize("name", TARGETS)
def test_adapters_equal_a_dense_reference(name):
    base = base_of(name)
    compare(name, learn(TARGETS[name], base), dense_reference(TARGETS[name], base))


VARIANTS = {
    "recompute": ["activation.policy=full"],
    "selective": ["activation.policy=selective"],
    "compile": ["compile.enabled=yes"],
    "kernels selective": ["kernels.backend=triton", "activation.policy=selective"],
}


@pytest.mark.tier("long")
def test_compiled_and_recomputed_adapters_equal_the_dense_reference():
    runs = {name: [EVERYTHING, *words] for name, words in VARIANTS.items()}
    expected = dense_reference([EVERYTHING])
    for name, answer in learn_all(runs).items():
        compare(name, answer, expected)


@pytest.mark.tier("long")
def test_kernels_beside_frozen_experts():
    """Neither frozen experts nor the head make gradients of weights."""
    words = ["lora.targets=*.attn.*", "kernels.backend=triton"]
    (answer,) = learn_all({"compiled": [*words, "compile.enabled=yes"]}).values()
    compare("compiled", answer, dense_reference(words[:1]))


LAYOUTS = {
    2: {
        "dp compile reshard": ["compile.enabled=yes", "parallel.reshard_after_forward=yes"],
        "ep selective": ["parallel.ep=2", "activation.policy=selective"],
        "tp": ["parallel.tp=2"],
        "tp+ep kernels": ["parallel.tp=2", "parallel.ep=2", "kernels.backend=triton"],
        "pp": ["parallel.pp=2"],
    },
    4: {
        "dp+tp+ep": ["parallel.tp=2", "parallel.ep=4"],
        "pp ep": ["parallel.pp=2", "parallel.ep=2"],
        "pp tp": ["parallel.pp=2", "parallel.tp=2"],
    },
}


@pytest.mark.tier("wide", long=["2"])
@pytest.mark.parametrize("world", LAYOUTS)
def test_every_mesh_equals_the_dense_reference(world):
    runs = {name: [EVERYTHING, *words] for name, words in LAYOUTS[world].items()}
    expected = dense_reference([EVERYTHING])
    for answers in spawn(world, learn_all, runs, timeout=200):
        for name, answer in answers.items():
            compare(name, answer, expected)


def test_only_adapters_are_kept_and_what_they_adapt_is_as_it_was():
    """Frozen weights have no moments, gradients or place in a checkpoint, and never change."""
    engine = adapted()
    before = weights_of(engine)
    train(engine, range(2), MICRO)
    after, state = weights_of(engine), copy_of(engine.state())
    trained = {name for name in before if name.endswith(ADAPTER)}
    assert set(state["model"]) == trained
    assert {name.rpartition(".")[0] for name in state["optim"]} == trained
    assert len(engine.optimizer.state) == len(trained)
    for name, weight in after.items():
        assert torch.equal(weight, before[name]) != name.endswith(ADAPTER), name


def go_on(words, state, steps):
    """Return losses and norms of ``steps`` after ``state``, the fingerprint, and the new state."""
    engine = make_engine(*words, base=BASE, micro=MICRO)
    engine.load_state(state)
    return train(engine, steps, MICRO), engine.fingerprint, copy_of(engine.state())["model"]


def go_on_everywhere(runs, state, steps):
    return {name: go_on(words, state, steps) for name, words in runs.items()}


@pytest.mark.tier("long")
def test_state_goes_on_on_any_mesh():
    engine = adapted()
    train(engine, range(1), MICRO)
    state = copy_of(engine.state())
    numbers, fingerprint, weights = go_on([], state, range(1, 3))
    assert numbers == train(engine, range(1, 3), MICRO)  # bit for bit
    assert fingerprint == engine.fingerprint
    assert all(torch.equal(x, weights[n]) for n, x in copy_of(engine.state())["model"].items())
    runs = {"ep": ["parallel.ep=2"], "tp": ["parallel.tp=2"], "pp": ["parallel.pp=2"]}
    for answers in spawn(2, go_on_everywhere, runs, state, range(1, 3), timeout=100):
        for name, answer in answers.items():
            for mine, theirs in zip(answer[0], numbers, strict=True):
                assert mine == pytest.approx(theirs, rel=TOLERANCE), name
            assert answer[1] == fingerprint, name


@pytest.mark.tier("long")
def test_a_run_goes_on_beside_the_same_frozen_weights_alone(tiny, capsys):
    words = ["lora.rank=8", "optim.schedule=constant", "checkpoint.interval=2"]
    straight = Trainer(tiny(*words))
    straight.fit()
    saved = straight.folder / "checkpoints" / "step-00000002"
    held = tensors_of(saved)["model"]
    assert held
    assert all(name.endswith(ADAPTER) for name in held)
    assert checkpoint_command(["export-hf", str(saved), f"{saved}-hf"]) == 2
    assert "lacks weights that were not trained (embed.weight" in capsys.readouterr().err
    resume = [f"checkpoint.resume={saved}", f"output_dir={straight.folder}-again"]
    again = Trainer(tiny(*words, *resume))
    again.fit()
    found = weights_of(again.engine)
    assert all(torch.equal(x, found[name]) for name, x in straight.engine.weights())
    for other, problem in {
        "train.seed=1": "beside other frozen weights.*train.seed 1",
        "train.freeze=*.wq.*": "other frozen weights.*train.freeze as they were",
        "lora.rank=16": "lora_a' is float32 of shape",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            Trainer(tiny(*words, *resume, other))


def test_what_freeze_names_is_not_trained():
    words = ["train.freeze=embed.*,layers.0.*", "lora.rank=0", "lora.alpha=32"]
    engine = make_engine(*words, base=BASE, micro=MICRO)
    whole = make_engine("lora.rank=0", "lora.alpha=32", base=BASE, micro=MICRO)
    answers = []
    for one in (engine, whole):
        one.forward_backward(make_batches(0, MICRO), objective_of(one))
        answers.append(gradients_of(one)[1])
    mine, theirs = answers
    assert set(theirs) - set(mine) == {n for n in theirs if n.startswith(("embed.", "layers.0."))}
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-5, atol=1e-7, msg=name)
    frozen = engine.fsdp.members["layers.0.moe.experts.w_down"]
    assert not frozen.parameter.requires_grad


def test_a_frozen_router_keeps_its_selection_bias():
    words = ["train.freeze=layers.0.*.router.*", "moe.bias_update_rate=0.01"]
    base = [w for w in BASE if not w.startswith(("lora.", "moe.bias_update_rate"))]
    engine = make_engine(*words, base=base, micro=MICRO)
    engine.forward_backward(make_batches(0, MICRO), objective_of(engine))
    engine.step(1e-3)
    biases = [layer.moe.router.bias for layer in engine.model.layers]
    assert torch.equal(biases[0], torch.zeros_like(biases[0]))
    assert all(bias.abs().max() == pytest.approx(0.01) for bias in biases[1:])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["lora.targets=*.nothing"],
            r"lora\.targets: '\*\.nothing' matches no .* attn\.wq",
        ),
        (["lora.targets=*.q_norm"], r"lora\.targets: '\*\.q_norm' matches no module"),
        (["lora.rank=12"], r"lora\.rank: 12 is not a multiple of 8.*layers\.0\.moe\.experts"),
        (
            ["lora.dropout=0.1"],
            r"lora\.dropout: 0\.1, but layers\.0\.moe\.experts does not support dropout",
        ),
        (["lora.rank=0"], r"lora\.alpha: 4\.0 contradicts lora\.rank 0"),
        (["train.freeze=*.wz.*"], r"train\.freeze: '\*\.wz\.\*' matches no parameter"),
        (["train.freeze=*"], r"train\.freeze: '\*' leaves nothing to train"),
    ],
)
def test_bad_settings_of_lora_are_refused_in_one_line(words, problem):
    with pytest.raises(ConfigError, match=problem):
        make_engine(*words, base=BASE, micro=MICRO)


def nothing_to_train(words):
    with pytest.raises(
        ConfigError, match=r"lora\.targets: pipeline rank 1 of 2 would have nothing"
    ):
        make_engine(*words, "lora.targets=layers.0.*", base=BASE, micro=MICRO)
    return learn(["lora.targets=layers.0.moe.experts,layers.1.attn.wo", *words])


def test_stages_with_little_to_train():
    """A stage's statistics need not have gradients; a rank without parameters is refused."""
    expected = dense_reference(["lora.targets=layers.0.moe.experts,layers.1.attn.wo"])
    for answer in spawn(2, nothing_to_train, ["parallel.pp=2"], timeout=60):
        compare("pp", answer, expected)


def test_initial_values_and_the_scale():
    for init, std in (("kaiming", (3 * 16) ** -0.5), ("gaussian", 1 / 8)):
        engine = make_engine(f"lora.init={init}", "lora.targets=*.experts", base=BASE, micro=MICRO)
        weights = weights_of(engine)
        a = weights["layers.1.moe.experts.w_gate_up_lora_a"]
        assert a.std().item() == pytest.approx(std, rel=0.1)
        assert not any(w.any() for name, w in weights.items() if name.endswith("_lora_b"))
    assert LoraSection(rank=16, alpha=8.0).scale == 0.5
    assert LoraSection(rank=16, alpha=8.0, rs=True).scale == 2.0


DROPPING = ["lora.targets=*.attn.*", "lora.dropout=0.5"]


@pytest.mark.tier("long")
def test_what_is_dropped_is_dropped_again_where_it_is_recomputed():
    torch.manual_seed(0)
    plain = learn(["lora.targets=*.attn.*"])
    policies = ("none", "full", "selective")
    runs = {p: [*DROPPING, f"activation.policy={p}"] for p in policies}
    runs["compiled"] = [*runs["selective"], "compile.enabled=yes"]
    answers = {}
    for name, words in runs.items():
        torch.manual_seed(0)
        answers |= learn_all({name: words})
    for name, answer in answers.items():
        compare(name, answer, answers["none"])
    assert answers["none"][1] != pytest.approx(plain[1], rel=0.01)
    engines = adapted(*DROPPING), adapted("lora.targets=*.attn.*")
    seen, wanted = (e.forward(make_batches(0, MICRO), objective_of(e)).total for e in engines)
    assert seen == wanted


def test_every_call_drops_anew_and_the_same_again():
    engine = adapted(*DROPPING)
    states, losses = [], []
    for _ in range(2):
        states.append(torch.get_rng_state())
        totals = engine.forward_backward(make_batches(0, MICRO), objective_of(engine))
        losses.append(totals.total.item())
        engine.forget()
    assert losses[0] != losses[1]
    torch.set_rng_state(states[1])
    totals = engine.forward_backward(make_batches(0, MICRO), objective_of(engine))
    assert totals.total.item() == losses[1]


def test_memory_of_what_is_not_trained_is_not_counted():
    words = ["train.micro_batch_size=1", "train.global_batch_size=1", "model.num_layers=4"]
    words += ["compile.enabled=yes"]
    found = []
    for extra in ([], ["lora.rank=16"]):
        config = Config.load("bench-qwen3-30b-a3b", [*words, *extra], environ={})
        arch = resolve_architecture(config.model)
        dims = ParallelDims.resolve(config.parallel, 1, arch)
        found.append(estimate_memory(config, arch, dims, torch.bfloat16))
    whole, adapters = found
    numbers = whole.weights / 4
    trained = adapters.moments / 8
    assert adapters.weights == pytest.approx(2 * numbers + 4 * trained, rel=1e-3)  # routers: fp32
    assert 0.01 * numbers < trained < 0.03 * numbers
    assert adapters.gradients <= 4 * trained
