"""Compiled blocks: one graph each, for all layers, steps, routings and packings."""

import tomllib
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import moetrain
from moetrain.config import ActivationSection, Config, KernelsSection
from moetrain.kernels import small_m
from moetrain.kernels.norm.rms_norm import fusible_rms_norm, rms_norm
from moetrain.losses.balancing import load_balancing_loss
from moetrain.models.layers import Linear, linears
from moetrain.models.moe import update_router_bias
from moetrain.models.transformer import Transformer, compile_blocks
from moetrain.runtime import ahead
from moetrain.train.session import resolve_run
from tests.lib.compiled_blocks import MOE, ROWS, SEQ_LEN, batch, compile_counting, fresh_model

MIXED = MOE.model_copy(
    update={
        "moe_layers": (True, False) * 2,
        "sliding_windows": (5, 5, None, None),
    }
)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def train_step(model: Transformer, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one forward, backward and update; return the loss and the expert counts."""
    hidden_BSD, routing = model.backbone(batch(step))
    assert routing is not None
    loss = hidden_BSD.float().square().mean() + load_balancing_loss(
        routing.counts_LE, routing.prob_sum_LE, routing.num_tokens
    )
    loss = loss + (hidden_BSD.float() @ model.head_weight.T).logsumexp(-1).mean()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p -= 0.1 * p.grad
    model.zero_grad()
    return loss.detach(), routing.counts_LE


@pytest.mark.tier("wide", long=["reference-False", "reference-True"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "reference"])
def test_blocks_compile_once(attention, recompute):
    model = fresh_model(MOE, attention, bias_update_rate=0.01)
    model.set_recomputation(ActivationSection(policy="full" if recompute else "none"))
    counter = compile_counting(model)
    patterns = set()
    for step in range(15):
        _, counts_LE = train_step(model, step)
        update_router_bias(model, counts_LE, rate=0.01)
        patterns.add(tuple(counts_LE.flatten().tolist()))
        assert counter.frame_count == 1, f"compiled again in step {step}"
    assert len(patterns) == 15  # the routing did vary
    assert not counters["graph_break"]
    assert not counters["recompiles"]


VARIANTS = {
    "sigmoid": {
        "router_score": "sigmoid",
        "router_min_sum": 1e-20,
        "router_fp32": True,
        "selection_bias": True,
        "num_expert_groups": 2,
        "topk_expert_groups": 1,
        "shared_intermediate_size": 24,
        "shared_gate": True,
        "partial_rotary_factor": 0.5,
    },
    "wide norms": {"qk_norm_of": "width", "rope_interleaved": True},
    "norms behind rotation": {"qk_norm_of": "rotated", "shared_intermediate_size": 8},
}


@pytest.mark.tier("long", wide=["sigmoid-triton", "wide norms-triton"])
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_compile_once(name, backend):
    arch = MOE.model_copy(update=VARIANTS[name] | {"num_layers": 2})
    outputs = []
    for compiled in (False, True):
        model = Transformer(arch, kernels=KernelsSection(backend=backend, attention="sdpa"))
        model.init_weights(std=0.3, seed=0)
        counter = compile_counting(model) if compiled else None
        losses = torch.stack([train_step(model, step)[0] for step in range(2)])
        outputs.append(losses)
        assert counter is None or counter.frame_count == 1
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=0)
    assert not counters["graph_break"]


@pytest.mark.tier("long")
def test_a_process_may_build_many_models():
    """Their blocks share the code, and each shape is compiled separately."""
    for width in range(8, 80, 8):  # nine, one more than torch's own limit
        sizes = {"moe_intermediate_size": width, "num_layers": 1}
        model = fresh_model(MOE.model_copy(update=sizes))
        counter = CompileCounterWithBackend("eager")
        compile_blocks(model, backend=counter)
        with torch.no_grad():
            model(batch(0).tokens_BS)
        assert counter.frame_count == 1


@pytest.mark.tier("long")
def test_an_expert_may_run_empty():
    model = fresh_model(MOE)
    counter = compile_counting(model)
    train_step(model, 0)
    with torch.no_grad():
        for block in model.layers:
            block.moe.router.weight.zero_()  # ties go to the lower experts
    _, counts_LE = train_step(model, 1)
    assert (counts_LE[:, 2:] == 0).all()
    assert counter.frame_count == 1


@pytest.mark.tier("long")
def test_one_graph_for_each_kind_of_block():
    model = fresh_model(MIXED)
    counter = compile_counting(model)
    for step in range(4):
        train_step(model, step)
    assert counter.frame_count == 2  # MoE and dense; windows only change the mask's values
    with torch.no_grad():
        for step in range(4):
            model.backbone(batch(step))
    assert counter.frame_count == 4  # and both again without gradients
    assert not counters["graph_break"]


@pytest.mark.tier("long")
@torch.no_grad()  # flex has no backward on a CPU
def test_flex_masks_do_not_recompile():
    model = fresh_model(MOE, "flex")
    plain = fresh_model(MOE, "sdpa")
    counter = compile_counting(model)
    for step in range(10):
        hidden_BSD, _ = model.backbone(batch(step))
        torch.testing.assert_close(hidden_BSD, plain.backbone(batch(step))[0])
    assert counter.frame_count == 1


@pytest.mark.tier("long")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_forced_balance_and_bf16_compile(dtype):
    model = fresh_model(MOE, force_balanced=True)
    model.compute_dtype = dtype
    counter = compile_counting(model)
    for step in range(5):
        _, counts_LE = train_step(model, step)
        assert (counts_LE == ROWS * SEQ_LEN * 2 // 4).all()
    assert counter.frame_count == 1


@pytest.mark.tier("long")
def test_inductor_gives_the_losses_of_eager():
    arch = MOE.model_copy(update={"num_layers": 2})
    eager, compiled = fresh_model(arch), fresh_model(arch)
    compile_blocks(compiled)
    for step in range(5):
        want, want_counts = train_step(eager, step)
        got, got_counts = train_step(compiled, step)
        assert torch.equal(got_counts, want_counts)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    assert not counters["graph_break"]
    assert not counters["recompiles"]


@pytest.mark.tier("long")
def test_compile_cache_hits_unless_the_source_changed(monkeypatch):
    """The backward of one norm is an op of ours, that of the other an autograd function."""

    def gradients():
        torch._dynamo.reset()
        counters.clear()
        x_TD, w_D = torch.linspace(-2, 3, 12).view(3, 4).requires_grad_(), torch.ones(4)
        _, y_TD = compiled(x_TD, w_D)
        (y_TD**2).sum().backward()
        return x_TD.grad, counters["aot_autograd"]["autograd_cache_hit"]

    def norms(x_TD, w_D):
        return fusible_rms_norm(rms_norm(x_TD, w_D, 1e-6, "triton"), w_D, 1e-6, "triton")

    compiled = torch.compile(norms, fullgraph=True, dynamic=False)
    with fresh_cache(), torch.compiler.config.patch(cache_key_tag=""):
        found = []
        for source in ("one", "one", "another"):
            monkeypatch.setattr(ahead, "_source_hash", lambda source=source: source)
            ahead.cache_compiled_blocks()
            found.append(gradients())
            torch.compiler.config.cache_key_tag = ""
    (first, *_), (again, _), _ = found
    assert torch.equal(first, again)
    assert [hit for _, hit in found] == [0, 1, 0]


def test_few_rows_and_many_compile_once():
    """Generation's choice of a kernel for few rows is not compiled into training."""
    layer = Linear(16, 16)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda x: linears(x, [layer])[0], backend=counter, dynamic=True)
    for rows in (small_m._MAX_ROWS + 8, small_m._MAX_ROWS - 8):
        compiled(torch.randn(rows, 16))
    assert counter.frame_count == 1


def test_no_recipe_says_whether_blocks_are_compiled():
    for file in (Path(moetrain.__file__).parent / "recipes").glob("*.toml"):
        assert "compile" not in tomllib.loads(file.read_text()), file.name


PIPELINE = ["parallel.pp=2", "launch.nproc=2"]


@pytest.mark.parametrize(
    ("words", "on_cuda", "is_on"),
    [
        ([], False, False),
        ([], True, True),
        (["compile.enabled=no"], True, False),
        (["compile.enabled=yes"], False, True),
        (["train.device=cpu"], True, False),
        (PIPELINE, True, True),
    ],
)
def test_blocks_are_compiled_where_there_is_cuda(words, on_cuda, is_on, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_cuda)
    config, _ = resolve_run(Config.load("debug", words, environ={}))
    assert config.compile.is_on is is_on


class Broken(torch.nn.Module):
    """A norm that cannot be traced."""

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x_BSD


def test_a_block_that_is_not_one_graph_is_an_error():
    model = fresh_model(MOE)
    model.layers[0].attn_norm = Broken()
    compile_blocks(model, "eager")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        model(torch.zeros(1, 4, dtype=torch.int64))
