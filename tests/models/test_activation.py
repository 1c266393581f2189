"""Memory between forward and backward: activations by policy and name, gathered parameters."""

import gc
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from typing import get_args
from unittest.mock import Mock, patch

import pytest
import torch
from torch._dynamo.utils import counters
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from moetrain.config import ActivationSection, Config, ConfigError, KernelsSection, MoeSection
from moetrain.config.compute import SavedName
from moetrain.kernels.attention import cudnn as cudnn_attention
from moetrain.models.transformer import Inputs, Transformer, compile_blocks
from moetrain.parallel import apply
from moetrain.parallel.expert import dispatch
from moetrain.parallel.fsdp import fsdp
from moetrain.parallel.mesh import ParallelDims
from moetrain.runtime import backend
from moetrain.train import session
from moetrain.train.loop import Trainer
from tests.lib.compiled_blocks import MOE, batch, compile_counting, fresh_model
from tests.lib.distributed import compile_by_turns, spawn
from tests.lib.estimates import estimate_memory

POLICIES = {
    "none": ActivationSection(policy="none"),
    "selective": ActivationSection(policy="selective"),
    "nothing saved": ActivationSection(policy="selective", save=()),
    "attention alone": ActivationSection(policy="selective", save=("attention",)),
    "full": ActivationSection(policy="full"),
}
FIRST = {
    "first selective": ActivationSection(policy="selective", blocks=1),
    "first full": ActivationSection(policy="full", blocks=1),
}
"""Policies of the first block alone."""


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def fresh(activation, compiled):
    model = fresh_model(MOE)
    model.set_recomputation(activation)
    return model, compile_counting(model) if compiled else None


@pytest.mark.tier("wide", long=["False"])
@pytest.mark.parametrize("compiled", [False, True])
def test_recomputation_changes_no_gradient(compiled):
    answers = {}
    for name, activation in (POLICIES | FIRST).items():
        torch.compiler.reset()
        model, counter = fresh(activation, compiled)
        for step in range(3):
            hidden_BSD, routing = model.backbone(batch(step))
            assert routing is not None
            (hidden_BSD.pow(3).mean() + routing.prob_sum_LE.square().sum() * 1e-3).backward()
        answers[name] = {n: p.grad for n, p in model.layers.named_parameters()}
        with torch.no_grad():
            model.backbone(batch(0))
        # One graph with gradients and one without for each kind of block. With a policy for the
        # first block alone there are two kinds: recomputed selectively, or not within the block.
        frames = 4 if activation.blocks == 1 else 2
        assert counter is None or counter.frame_count == frames, name
    assert not counters["graph_break"]
    for name, gradients in answers.items():
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(
                gradient, answers["none"][parameter], msg=lambda m, n=name: f"{n}: {m}"
            )


class Watch(TorchDispatchMode):
    """Remembers every storage that an op made, without keeping it alive."""

    def __init__(self):
        super().__init__()
        self.sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.sizes[StorageWeakRef(storage)] = storage.nbytes()
        return out

    def alive(self):
        """Return the bytes of storages that are still alive."""
        return sum(size for storage, size in self.sizes.items() if not storage.expired())


def kept_eager(activation):
    """Return the bytes that live between a forward and its backward."""
    model, _ = fresh(activation, compiled=False)
    with Watch() as watch:
        answer = model.backbone(batch(0))
    gc.collect()
    assert answer[0].requires_grad
    return watch.alive()


def kept_compiled(activation):
    """Return these bytes from the tensors that graphs save; ops inside cannot be watched."""
    model, _ = fresh(activation, compiled=True)
    sizes = {}

    def pack(x):
        sizes[StorageWeakRef(x.untyped_storage())] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        answer = model.backbone(batch(0))
    assert answer[0].requires_grad
    return sum(sizes.values())


@pytest.mark.tier("quick", wide=["kept_compiled"])
@pytest.mark.parametrize("kept", [kept_eager, kept_compiled])
def test_activation_save_keeps_only_the_named_values(kept):
    kept = {name: kept(activation) for name, activation in POLICIES.items()}
    assert kept["full"] < kept["attention alone"] < kept["selective"] < kept["none"]
    if kept is kept_eager:  # a compiled block that repeats attention keeps a generator's 5 KB state
        assert kept["full"] < kept["nothing saved"] < kept["attention alone"]


class Count(TorchDispatchMode):
    """Counts the calls of every op by name."""

    def __init__(self):
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", POLICIES)
def test_backward_recomputes_the_ops_that_were_not_saved(policy):
    model, _ = fresh(POLICIES[policy], compiled=False)
    hidden_BSD, _ = model.backbone(batch(0))
    with Count() as count:
        hidden_BSD.sum().backward()
    attention = count.calls["aten::_scaled_dot_product_flash_attention_for_cpu"]
    routing = count.calls["aten::sort.stable"]
    layers = MOE.num_layers
    repeats = {"full": (layers, 2 * layers), "nothing saved": (layers, 0)}
    assert (attention, routing) == repeats.get(policy, (0, 0))


def test_every_name_stands_for_ops_that_exist():
    known = set(torch._C._dispatch_get_all_op_names()) | {"flex_attention"}
    routing = backend.saved_ops([])
    # Present once a test has imported what makes them.
    of_parts = {"moetrain::assign_places", "moetrain::select_keys", "moetrain::select_blocks"}
    assert routing - of_parts == {
        "moetrain::router_topk",
        "moetrain::expert_indices",
        "aten::sort.stable",
    }
    groups = {name: backend.saved_ops([name]) - routing for name in get_args(SavedName)}
    assert all(groups.values())
    assert backend.saved_ops(groups) == routing.union(*groups.values()) <= known
    assert sum(map(len, groups.values())) == len(set().union(*groups.values()))  # each in one group
    with pytest.raises(KeyError, match="mlp"):
        backend.worth_saving("mlp", torch.ops.aten.mm.default)  # pyright: ignore


def test_an_op_that_joins_a_group_late_is_kept(monkeypatch):
    model, _ = fresh(POLICIES["selective"], compiled=False)

    def repeats():
        hidden_BSD, _ = model.backbone(batch(0))
        with Count() as count:
            hidden_BSD.sum().backward()
        return count.calls["aten::_fused_rms_norm"] + count.calls["aten::rsqrt"]

    assert repeats() > 0
    monkeypatch.setitem(backend._OPS, "attention", set(backend._OPS["attention"]))
    norms = torch.ops.aten._fused_rms_norm.default, torch.ops.aten.rsqrt.default
    backend.worth_saving("attention", *norms)
    assert repeats() == 0


@pytest.mark.tier("wide")
def test_a_group_has_ops_once_what_runs_them_is_imported():
    """No token can travel before that import."""
    program = """
from moetrain.runtime.backend import saved_ops
import moetrain.models
assert saved_ops(["dispatch"]) == saved_ops([])
import moetrain.parallel.expert.dispatch
assert "moetrain::exchange_rows" in saved_ops(["dispatch"])
import moetrain.kernels.experts.deepep
assert "moetrain::deepep_dispatch" in saved_ops(["dispatch"])
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=360)


def test_names_are_read_from_words():
    def load(*words):
        words = ("activation.policy=selective", *words)
        return Config.load(None, words, environ={}).activation.save

    assert load() == ("dispatch", "attention", "experts")
    assert load("activation.save=linear,attention") == ("linear", "attention")
    assert load("activation.save=") == ()
    with pytest.raises(ConfigError, match=r"^activation\.save: 'mlp': .*dispatch.*linear"):
        load("activation.save=attention,mlp")


def train(words, steps=1):
    """Return a trainer after some steps on this rank."""
    if not torch.cuda.is_available():
        compile_by_turns(words, turn=0)
    trainer = Trainer(Config.load(None, words, environ={}))
    for _ in range(steps):
        trainer.train_step()
    return trainer


def count_exchanges(words):
    """Return how often rows or counts travelled between ranks in one step."""
    exchange = Mock(wraps=dispatch.all_to_all_single)
    with patch.object(dispatch, "all_to_all_single", exchange):
        train(words)
    return exchange.call_count


def count_all_exchanges(runs):
    return {name: count_exchanges(words) for name, words in runs.items()}


@pytest.mark.tier("wide")
def test_recomputation_sends_no_token_twice(tiny_words):
    words = [*tiny_words, "parallel.ep=2"]
    runs = {
        f"{policy} {mode}": [*words, f"activation.policy={policy}", f"compile.enabled={mode}"]
        for policy in ("none", "selective", "full")
        for mode in ("no", "yes")
    }
    runs["forgetful"] = [*words, "activation.policy=selective", "activation.save=attention"]
    calls = spawn(2, count_all_exchanges, runs)[0]
    once = calls["none no"]
    assert once > 0
    assert calls["none yes"] == calls["selective no"] == calls["selective yes"] == once
    assert once < min(calls["forgetful"], calls["full no"], calls["full yes"])


def watch_reshard(words):
    """Return the unsharded blocks after the forward and whenever a block is reduced.

    Also return the number of memory pieces of all blocks, and the gradients' norm.
    """
    trainer = train(words, steps=0)
    sharding = trainer.engine.fsdp
    blocks = sharding.units[1:-1]
    reduce = fsdp.FSDP.reduce

    def unsharded():
        return [unit.index for unit in blocks if unit.region.owner is unit]

    def look(self, unit, gradients):
        if unit in blocks:
            seen.append((unit.index, unsharded()))
        reduce(self, unit, gradients)

    seen: list[tuple[int, list[int]]] = []
    with patch.object(fsdp.FSDP, "reduce", look), sharding.work():
        hidden_BSD, _ = trainer.model.backbone(Inputs(batch(0).tokens_BS))
        seen.append((0, unsharded()))
        sharding.backward(hidden_BSD.pow(3).sum(), is_last=True)
    places = {
        row.untyped_storage().data_ptr()
        for unit in blocks
        for bucket in unit.buckets
        for row in bucket.rows()
    }
    return seen, len(places), sharding.gradient_norm().item()


def test_a_block_is_gathered_before_the_backward_of_the_one_behind_it(tiny_words, monkeypatch):
    """One process, with the two regions that several have."""
    monkeypatch.setattr(apply, "shared_regions", lambda config, ranks: 2)
    words = [*tiny_words, "model.num_layers=4", "parallel.reshard_after_forward=yes"]
    seen, _, _ = watch_reshard([*words, "train.dtype=bfloat16"])
    assert seen == [(0, [3, 4]), (4, [3, 4]), (3, [2, 3]), (2, [1, 2]), (1, [1])]


def watch_all_reshards(runs):
    return {name: watch_reshard(words) for name, words in runs.items()}


@pytest.mark.tier("wide")
def test_parameters_are_away_between_forward_and_backward(tiny_words):
    stays = [*tiny_words, "model.num_layers=4"]
    words = [*stays, "parallel.reshard_after_forward=yes"]
    bf16 = "train.dtype=bfloat16"  # in fp32, local experts are used in place
    runs = {
        "stays": [*stays, "parallel.dp_shard=2"],
        "dp": [*words, "parallel.dp_shard=2"],
        "ep": [*words, "parallel.ep=2", bf16],
        "compiled": [*words, "parallel.dp_shard=2", "compile.enabled=yes"],
        "selective": [*words, "parallel.dp_shard=2", "activation.policy=selective"],
        "full": [*stays, "parallel.dp_shard=2", "activation.policy=full"],
    }
    answers = spawn(2, watch_all_reshards, runs)[0]
    seen, places, norm = answers.pop("stays")
    assert {tuple(there) for _, there in seen} == {(1, 2, 3, 4)}
    assert places == 4
    for name, (seen, places, same_norm) in answers.items():
        assert same_norm == pytest.approx(norm, rel=0.02 if bf16 in runs[name] else 1e-5), name
        # These are a block's own parameters, and the next block's in flight.
        assert seen == [(0, [3, 4]), (4, [3, 4]), (3, [2, 3]), (2, [1, 2]), (1, [1, 2])], name
        assert places == 2, name


def losses_and_memory(folder, policy):
    """Return the losses of three steps, the estimate's peak in bytes, and what the policy means."""
    words = ["train.steps=3", "train.global_batch_size=8", "train.micro_batch_size=8"]
    words += ["data.seq_len=256", "data.source=synthetic", "train.dtype=float32"]
    words += [f"output_dir={folder}", "model.num_layers=4", *policy]
    trainer = Trainer(Config.load(None, words, environ={}))
    config, arch = trainer.config, trainer.model.arch
    dims = ParallelDims.resolve(config.parallel, 1, arch)
    peak = estimate_memory(config, arch, dims, torch.float32).total
    losses = [trainer.train_step().loss for _ in range(3)]
    return losses, peak, config.activation


@pytest.mark.tier("long")
def test_auto_recomputes_what_does_not_fit_with_the_same_losses(tmp_path, monkeypatch, caplog):
    ways = {
        "none": ["activation.policy=none"],
        "two": ["activation.policy=selective", "activation.blocks=2"],
        "all": ["activation.policy=full"],
    }
    runs = {name: losses_and_memory(tmp_path / name, words) for name, words in ways.items()}
    losses, peaks = runs["none"][0], {name: peak for name, (_, peak, _) in runs.items()}
    assert peaks["none"] > peaks["two"] > peaks["all"]
    meant, auto = {"none": ("none", "all"), "two": ("selective", 2)}, ["activation.policy=auto"]
    for name, (policy, blocks) in meant.items():
        room = 1.05 * peaks[name]
        monkeypatch.setattr(session, "device_capacity", lambda _, room=room: room)
        with caplog.at_level("INFO"):
            found, peak, chosen = losses_and_memory(tmp_path / f"auto {name}", auto)
        assert (chosen.policy, chosen.blocks) == (policy, blocks)
        assert peak == peaks[name]
        assert found == losses
    assert runs["two"][0] == runs["all"][0] == losses
    said = "activation.policy auto: selective in a rank's first 2 blocks, none in others"
    assert said in caplog.text


GPU = MOE.model_copy(
    update={
        "vocab_size": 264,
        "hidden_size": 256,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "num_experts": 8,
        "moe_intermediate_size": 128,
    }
)


def gpu_step(policy, attention, compiled, count):
    """Return a GPU model's gradients under ``policy``, and the bytes that its forward left."""
    model = Transformer(GPU, kernels=KernelsSection(attention=attention), moe=MoeSection())
    model.init_weights(std=0.02, seed=0)
    model.cuda().compute_dtype = torch.bfloat16
    model.set_recomputation(POLICIES[policy])
    if compiled:
        compile_blocks(model)
    generator = torch.Generator().manual_seed(0)
    tokens_BS = torch.randint(0, GPU.vocab_size, (2, 512), generator=generator).cuda()
    model.backbone(Inputs(tokens_BS))[0].sum().backward()  # compiles and tunes
    model.zero_grad()
    gc.collect()  # so that no earlier garbage is collected in the forward
    before = torch.cuda.memory_allocated()
    hidden_BSD, _ = model.backbone(Inputs(tokens_BS))
    kept = torch.cuda.memory_allocated() - before
    with count:
        hidden_BSD.float().pow(3).mean().backward()
    grads = [p.grad.flatten() for p in model.layers.parameters() if p.grad is not None]
    return torch.cat(grads), kept


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "cudnn", "flex"])
def test_policies_on_a_gpu(attention, compiled):
    """Triton kernels and GPU attention ops: gradients, memory, repeated ops."""
    if attention == "cudnn" and not cudnn_attention.runs(torch.device("cuda"), torch.bfloat16):
        pytest.skip("needs nvidia-cudnn-frontend")
    # Ops inside a graph cannot be counted, and FlexAttention is always a graph.
    counted = not compiled and attention != "flex"
    gradients, kept = {}, {}
    for policy in ("none", "selective", "full"):
        torch.compiler.reset()
        count = Count() if counted else nullcontext()
        gradients[policy], kept[policy] = gpu_step(policy, attention, compiled, count)
        if policy == "selective" and isinstance(count, Count):
            assert not {op for op in backend.saved_ops(["attention"]) if count.calls[op]}
            assert not count.calls["moetrain::expert_mlp"]
            assert not count.calls["moetrain::router_topk"]
    assert kept["full"] < kept["selective"] < kept["none"]
    for policy in ("selective", "full"):
        error = (gradients[policy] - gradients["none"]).norm() / gradients["none"].norm()
        assert error < (0.02 if compiled else 1e-3), f"{policy}: {error:.1e}"
