"""CUDA graphs of steps have the bits of steps without graphs, whatever happens in between."""

import shutil
import sys
from unittest.mock import patch

import pytest
import torch

from moetrain import Trainer
from moetrain.config import Config, ConfigError
from moetrain.parallel import apply
from moetrain.runtime.graphs import Graphs, document_bucket, pad_documents
from moetrain.train import session as setup
from moetrain.train.objectives import CrossEntropy, Term
from moetrain.train.session import Session, resolve_run
from tests.lib import engines, fake_deep_ep
from tests.lib.distributed import spawn
from tests.lib.engines import ROWS, SEQ_LEN, weights_of
from tests.lib.graphed_steps import (
    CASES,
    COPY,
    DOCUMENTS,
    GPU,
    LORA,
    ON,
    RANKS,
    RANKS_GPU,
    STATIC,
    look_between,
    numbers_of,
    packed,
    run_steps,
)

TOKENS = ROWS * SEQ_LEN


def make_engine(*words, **sizes):
    """Return an engine that uses graphs even on a CPU, where a stand-in captures them."""
    if torch.cuda.is_available():
        return engines.make_engine(*words, **sizes)
    with patch("moetrain.train.engine.check_run", lambda config, *_: config):
        return engines.make_engine(*words, **sizes)


class Marked:
    marks = 0


def counting(device="cpu"):
    """Return graphs that count captures and replays, and run on a CPU."""
    seen = []

    def capture(fn):
        seen.append("capture")

        def replay():
            seen.append("replay")
            return fn()

        return replay

    graphs = Graphs(torch.device(device), Marked())
    graphs.capture = capture
    return graphs, seen


def test_the_first_call_runs_the_second_is_captured_and_others_are_replayed():
    graphs, seen = counting()
    how = {"x": torch.ones(3), "none": None, "n": 2}
    for i in range(4):
        out = graphs.run(
            [], lambda given: {"y": [given["x"] * given["n"]]}, {**how, "x": torch.ones(3) * i}
        )
        assert out["y"][0].tolist() == [2.0 * i] * 3
    assert seen == ["capture", "replay", "replay", "replay"]


def test_results_of_graphs_are_copies():
    held = torch.zeros(2)

    def fn(x):
        return held.copy_(x)

    graphs, _ = counting()
    outs = [graphs.run([], fn, torch.full((2,), float(i))) for i in range(1, 5)]
    assert [x.tolist() for x in outs[1:]] == [[2.0] * 2, [3.0] * 2, [4.0] * 2]


@pytest.mark.parametrize(
    "other",
    [
        ([1], torch.ones(3), 0),
        ([0], torch.ones(4), 0),
        ([0], torch.ones(3).double(), 0),
        ([0], (torch.ones(3),), 0),
        ([0], torch.ones(3), 1),
    ],
)
def test_graphs_capture_each_shape_separately(other):
    graphs, seen = counting()
    objects = [object(), object()]
    for _ in range(2):
        for what, inputs, marks in (([0], torch.ones(3), 0), other):
            graphs.marked.marks = marks
            graphs.run([objects[i] for i in what], lambda x: x, inputs)
    assert seen == ["capture", "replay"] * 2


def test_marks_of_the_capture_are_set_again():
    marked = Marked()

    def capture(fn):
        out = fn()
        return lambda: out

    graphs = Graphs(torch.device("cpu"), marked)
    graphs.capture = capture

    def fn(x):
        marked.marks = 7
        return x

    for _ in range(4):
        marked.marks = 0
        graphs.run([], fn, torch.ones(1))
        assert marked.marks == 7


def test_objectives_that_come_anew_are_not_kept_without_end():
    graphs, seen = counting()
    for _ in range(1000):
        graphs.run([object()], lambda x: x, torch.ones(1))
    assert len(graphs._kept) <= 64
    assert not seen


def test_inputs_are_tensors_and_plain_values():
    graphs, _ = counting()
    with pytest.raises(
        ConfigError, match=r"compile.cuda_graphs: true, but a micro-batch holds a set"
    ):
        graphs.run([], lambda x: x, [{1}])


def test_micro_batches_get_as_many_documents():
    few, many = packed(0, 9)[0], packed(1, 20)[0]
    for batches, most in (([few], 16), ([few, many], 32)):
        for old, new in zip(batches, pad_documents(batches), strict=True):
            ends, count = new.cu_seqlens, len(old.cu_seqlens)
            assert len(ends) == most + 1
            assert torch.equal(ends[:count], old.cu_seqlens)
            assert set(ends[count:].tolist()) <= {TOKENS}
            assert ends.dtype == torch.int32
            assert new.tokens_BS is old.tokens_BS


@pytest.mark.parametrize("theirs", [(9,), (20,), (9, 9)])
def test_micro_batches_of_ranks_get_as_many_documents_or_none(theirs):
    mine, others = [packed(0, 9)[0]], [packed(1, number)[0] for number in theirs]
    heard = []
    pad_documents(others, heard.append)
    found = pad_documents(mine, lambda own: torch.maximum(own, heard[0], out=own))
    if len(theirs) == 2:
        assert found is None
    else:
        assert len(found[0].cu_seqlens) == 1 + (32 if theirs == (20,) else 16)


def check_steps(words, micro):
    plain, ours = make_engine(*words, micro=micro), make_engine(*words, ON, micro=micro)
    if plain.world.device.type == "cpu":
        ours.graphs.capture = lambda fn: fn
    assert run_steps(ours, micro, look_between) == run_steps(plain, micro, look_between)
    for (name, mine), (_, theirs) in zip(ours.weights(), plain.weights(), strict=True):
        assert torch.equal(mine, theirs), name
    captured = ours.graphs.captured
    more = 9 * (ours.world.dims.data_ranks - 1)
    buckets = [document_bucket(min(n + more, micro * SEQ_LEN // 2)) for n in DOCUMENTS]
    assert len(captured) == 1 + len(set(buckets))  # and the update
    assert not any(ours.fsdp.marks)
    assert ours.passes.num_retried == plain.passes.num_retried
    return len(captured), ours.passes.num_retried


@pytest.mark.tier("long", quick=["plain"])
@pytest.mark.parametrize("case", ["plain", "accumulated", "muon", "coded"])
def test_graphed_steps_equal_plain_steps(case):
    check_steps(*CASES[case])


@pytest.mark.tier("long", wide=["copies", "recomputed"])
@pytest.mark.parametrize("case", RANKS)
def test_ranks_agree_on_graphs_and_have_the_same_numbers(case):
    """Each rank has other numbers of documents."""
    words, micro = RANKS[case]
    first, second = spawn(2, check_steps, words, micro, timeout=120)
    assert first == second


def check_static(capacity):
    sys.modules["deep_ep"] = fake_deep_ep
    apply.why_not = lambda *_, **__: None
    words = [*STATIC, "train.dtype=bfloat16", f"moe.static_capacity={capacity}"]
    return check_steps(words, 4)


@pytest.mark.tier("wide", long=["1"])
@pytest.mark.parametrize("capacity", [1, 2])  # 2 is room for everything
def test_static_dispatch_has_the_same_numbers(capacity):
    first, second = spawn(2, check_static, capacity)
    assert first == second
    _, retried = first
    assert (retried > 0) == (capacity == 1)


def shared_copies():
    engine, objective, found = (
        make_engine("train.dtype=bfloat16", COPY, micro=4),
        CrossEntropy(),
        [],
    )
    for step in range(2):
        batches = packed(step, 12, 4)[engine.world.rank :][:1]
        engine.forward_backward(batches, objective)
        engine.step(1e-2)
        for bucket in engine.fsdp.buckets:
            assert torch.equal(bucket._cast_N, bucket.shard_N.to(bucket.dtype))
            found.append(bucket.is_cast)
    return found


def test_shared_copies_are_updated_by_replays():
    """A replay would not update it in any other way."""
    for found in spawn(2, shared_copies):
        assert {*found} == {True, False}


def differing(graphs):
    engine, objective, seen = make_engine(*graphs, micro=4), CrossEntropy(), []
    if engine.graphs is not None:
        engine.graphs.capture = lambda fn: seen.append(fn) or fn
    for step in range(4):
        for micro in (4, 2 + 2 * engine.world.rank):
            batches = packed(step, 12, micro)[:1]
            total = engine.forward_backward(batches, objective).total
        norm = engine.step(1e-2).grad_norm
    return total.item(), norm.item(), len(seen)


@pytest.mark.tier("long")
def test_ranks_with_other_shapes_run_without_graphs():
    plain, ours = (spawn(2, differing, words) for words in ([], [ON]))
    assert [x[:2] for x in ours] == [x[:2] for x in plain]
    assert {x[2] for x in ours} == {2}  # where shapes agree, and the update


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["no", "yes"])
@pytest.mark.parametrize("case", CASES)
def test_steps_have_the_same_bits_on_a_gpu(case, compiled):
    words, micro = CASES[case]
    check_steps([*GPU, f"compile.enabled={compiled}", *words], micro)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("case", RANKS_GPU)
def test_steps_of_ranks_have_the_same_bits_on_gpus(case):
    words, micro = RANKS_GPU[case]
    if "parallel.ep=2" in words:
        pytest.importorskip("deep_ep")
    words = [*GPU, "compile.enabled=no", *words]
    first, second = spawn(2, check_steps, words, micro, device_type="cuda", timeout=180)
    assert first == second


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["qwen3-next-80b-a3b", "nemotron-3-nano-30b-a3b", "gpt-oss-20b"])
def test_steps_of_other_families_have_the_same_bits_on_a_gpu(preset):
    """The models have recurrent layers and sinks in windows; Nemotron-3's sixth has attention."""
    check_steps([*GPU, f"model.preset={preset}", "model.num_layers=6"], ROWS)


@pytest.mark.gpu
def test_a_step_without_a_finite_loss_changes_nothing_in_a_replay():
    engine = make_engine(*GPU, ON)
    objective = Scaled()
    for step in range(6):
        batches = packed(step, 12)
        if step == 4:
            before = weights_of(engine)
            batches = [
                b._replace(extra={"scale": b.extra["scale"] * torch.inf}) for b in scaled(batches)
            ]
        engine.forward_backward(scaled(batches), objective)
        assert bool(engine.step(1e-2).skipped) == (step == 4)
        if step == 4:
            for name, weight in engine.weights():
                assert torch.equal(weight, before[name]), name


def scaled(batches):
    return [b if b.extra else b._replace(extra={"scale": torch.ones(1)}) for b in batches]


class Scaled(CrossEntropy):
    def terms(self, model, outputs, batch, sizes):
        (term,) = super().terms(model, outputs, batch, sizes).values()
        return {"cross_entropy": Term(term.value * batch.extra["scale"].sum())}


class Waiting(CrossEntropy):
    def terms(self, model, outputs, batch, sizes):
        found = super().terms(model, outputs, batch, sizes)
        found["cross_entropy"].value.item()
        return found


@pytest.mark.gpu
def test_a_step_that_waits_for_the_device_cannot_be_captured():
    engine, objective = make_engine(*GPU, ON), Waiting()
    engine.forward_backward(packed(0, 12), objective)
    engine.step(1e-2)
    with pytest.raises(ConfigError, match=r"compile.cuda_graphs: true, but this run's step cannot"):
        engine.forward_backward(packed(0, 12), objective)
    assert torch.zeros(3, device="cuda").sum().item() == 0  # the device still works


@pytest.mark.gpu
def test_memory_that_comes_back_elsewhere_is_captured_anew():
    numbers = []
    for words in ([], [ON]):
        engine = make_engine(*GPU, *words)

        def between(engine, step):
            if step == 4:
                engine.offload()
                torch.empty(1 << 26, device="cuda")
                engine.reload()

        numbers.append(run_steps(engine, between=between))
    assert numbers[0] == numbers[1]


@pytest.mark.gpu
def test_a_run_has_the_same_losses_and_its_checkpoints_go_on_without_graphs(tiny_words, tmp_path):
    """The run has evaluations, samples of text and checkpoints in the background."""
    words = [*tiny_words, "train.device=cuda", "train.steps=12", "train.eval_interval=5"]
    words += ["model.hidden_size=64", "model.head_dim=16", "model.moe_intermediate_size=32"]
    words += ["checkpoint.interval=4", "checkpoint.keep=9", "checkpoint.asynchronous=yes"]
    found = []
    for name, graphs in (("with", "yes"), ("without", "no")):
        run = [*words, f"output_dir={tmp_path / name}", f"compile.cuda_graphs={graphs}"]
        Trainer(Config.load(None, run, environ={})).fit()
        found.append(numbers_of(tmp_path / name))
    assert found[0] == found[1]
    shutil.rmtree(tmp_path / "with/checkpoints/step-00000012")
    Trainer(Config.load(None, [*words, f"output_dir={tmp_path / 'with'}"], environ={})).fit()
    assert numbers_of(tmp_path / "with") == found[1]


# ---- settings -----------------------------------------------------------------------------------


def test_graphs_take_a_gpu(tiny_words):
    words = [*tiny_words, ON, "train.device=cpu"]
    config, arch = resolve_run(Config.load(None, words, environ={}))
    with pytest.raises(ConfigError, match=r"compile.cuda_graphs: True, but this run is on a CPU"):
        Session(config, arch)


@pytest.mark.parametrize(
    "word",
    [
        "optim.offload_fraction=0.5",
        "parallel.reshard_after_forward=yes",
        "parallel.pp=2",
        "parallel.tp=2",
        "parallel.cp=2",
        "parallel.ep=2",
        "parallel.ep=2 moe.dispatch_mode=exact",
    ],
)
def test_settings_that_move_memory_are_refused(word):
    with pytest.raises(ConfigError, match="cuda_graphs"):
        Config.load(None, [ON, *word.split()], environ={})


def test_graphs_are_for_processes_that_train(tiny_words, monkeypatch):
    monkeypatch.setattr(setup, "check_run", lambda config, *_: config)
    config, arch = resolve_run(Config.load(None, [*tiny_words, ON], environ={}))
    with pytest.raises(
        ConfigError, match="true, but a run that generates cannot use CUDA graphs; set no"
    ):
        Session(config, arch, "never")


MICRO_16 = "train.micro_batch_size=16"


class OnGPU:
    """A world whose device claims to be a GPU, for sizes."""

    device = torch.device("cuda")

    def __init__(self, world):
        self._world = world

    def __getattr__(self, name):
        return getattr(self._world, name)


@pytest.mark.parametrize(
    ("words", "sleep", "graphs"),
    [
        ([], None, True),
        (["train.device=cpu"], None, False),
        ([], "never", False),
        (["model.hidden_size=4096", "model.moe_intermediate_size=4096", MICRO_16], None, False),
        (["model.preset=qwen3-30b-a3b"], None, False),
    ],
)
def test_auto_is_where_graphs_can_be_and_pay(words, sleep, graphs, tiny_words, monkeypatch):
    """The simulated GPU has 60 GB: the last model fits once, but not twice."""
    base = ["train.dtype=bfloat16", "compile.cuda_graphs=auto"]
    base += ["train.global_batch_size=16", "train.micro_batch_size=1", "data.seq_len=512"]
    if "model.preset=qwen3-30b-a3b" in words:
        tiny_words = ["model.num_layers=4", "data.source=synthetic"]
    on_gpu = "train.device=cpu" not in words
    words = [*tiny_words, "train.device=auto", "compile.enabled=yes", *base, *words]
    monkeypatch.setattr(setup, "check_run", lambda config, *_: config)
    monkeypatch.setattr(setup, "device_capacity", lambda _: 60e9)
    if on_gpu:
        join = setup.join_world
        monkeypatch.setattr(setup, "join_world", lambda *given: OnGPU(join(*given)))
    config, arch = resolve_run(Config.load(None, words, environ={}))
    assert Session(config, arch, sleep).config.compile.cuda_graphs is graphs


def test_leaving_the_world_drops_graphs():
    engine, objective = make_engine(ON), CrossEntropy()
    engine.graphs.capture = lambda fn: fn
    for _ in range(2):
        engine.forward_backward(packed(0, 12), objective)
        engine.step(1e-2)
    assert engine.graphs._kept
    engine.world.leave()
    assert not engine.graphs._kept


def test_memory_stays_and_graphs_go_with_it():
    engine, objective = make_engine(ON), CrossEntropy()
    assert not engine.fsdp.frees
    assert make_engine().fsdp.frees
    engine.graphs.capture = lambda fn: fn
    for _ in range(2):
        engine.forward_backward(packed(0, 12), objective)
        engine.step(1e-2)
    assert engine.graphs._kept
    engine.offload("workspaces")
    assert not engine.graphs._kept


def test_replay_reads_weights_changed_outside():
    """A replay casts nothing: weights that were changed outside are cast before it."""
    engine, objective = make_engine(ON, "train.dtype=bfloat16"), CrossEntropy()

    def capture(fn):
        results = fn()
        return lambda: results

    engine.graphs.capture = capture
    for step in range(3):
        engine.forward_backward(packed(0, 12), objective)
        casts = [bucket for bucket in engine.fsdp.buckets if bucket.is_cast]
        assert casts
        assert all(bucket.is_fresh for bucket in casts)
        engine.forget()
        state = {name: x.tensor.clone() * 0.5 for name, x in engine.state()["model"].items()}
        engine.load_state({"model": state})
        assert not any(bucket.is_fresh for bucket in casts), step


@pytest.mark.parametrize("layers", [1, 2])
def test_a_capture_holds_the_casts_of_what_takes_turns(layers):
    """A replay's update does not change the counter that marks stale copies."""
    base = [*LORA, "lora.base_dtype=nf4", "train.dtype=bfloat16"]
    engine = make_engine(ON, *base, f"model.num_layers={layers}")
    engine.forward_backward(packed(0, 12), CrossEntropy())
    units = [unit for unit in engine.fsdp.units if unit.shares_region]
    assert len(units) == layers
    engine.fsdp.refresh()
    for unit in units:
        unit.move_in()
        casts = [bucket for bucket in unit.buckets if bucket.is_trained and bucket.is_cast]
        assert casts
        assert not any(bucket.is_fresh for bucket in casts)


@pytest.mark.parametrize("words", [[], [ON]])
def test_a_step_is_as_long_as_the_learning_rate(words):
    """AdamW's first step moves every weight by about the learning rate."""
    engine = make_engine("optim.weight_decay=0", *words)
    before = weights_of(engine)
    engine.forward_backward(packed(0, 12), CrossEntropy())
    engine.step(3e-4)
    moved = [
        (x - before[name]).abs().max().item() for name, x in engine.weights() if "bias" not in name
    ]
    assert max(moved) == pytest.approx(3e-4, rel=1e-2)


def test_recomputed_blocks_stay_where_they_are():
    engine = make_engine("activation.policy=selective", ON)
    assert not engine.fsdp.reshards
    assert make_engine("activation.policy=selective").fsdp.reshards
