"""Every kernel keeps the promises of its spec: values, gradients, reproducibility, compilability,
errors.

The specs hold the sizes and tolerances; this file knows no kernel. On a CPU the fast paths run in
Triton's interpreter (tests/conftest.py); the tests marked ``gpu`` walk the same specs compiled.
"""

import importlib
import inspect
import itertools
import os
import pkgutil
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._library.custom_ops import OPDEFS
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import moetrain.kernels
from moetrain.kernels.experts.products import grouped_mm, grouped_weight_grad
from moetrain.kernels.experts.swiglu import GATES
from moetrain.kernels.optim.reduction import sum_chunks
from tests.lib.dispatched_ops import Ops
from tests.lib.kernel_cases import devices
from tests.lib.specs import SPECS
from tests.lib.specs.optim import block_squares
from tests.lib.specs.spec import (
    Case,
    Inputs,
    KernelSpec,
    as_tuple,
    evaluate,
    relative_errors,
    rerun_differences,
    with_grad,
)


def case_name(case: Case) -> str:
    return ",".join(f"{k}={v}" for k, v in case.items())


def tier_of_variant(spec: KernelSpec, *, is_first: bool) -> tuple[pytest.MarkDecorator, ...]:
    """Return the mark of a further case of experts' kernels, which take seconds when interpreted.

    The products of all kinds of experts share one frame in bf16 and one in e4m3.
    """
    is_variant = "expert_mlp" in spec.name and spec.name not in ("expert_mlp", "expert_mlp_fp8")
    return (pytest.mark.tier("long"),) if is_variant and not is_first else ()


specs = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
specs_by_tier = pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, marks=tier_of_variant(spec, is_first=False), id=spec.name)
        for spec in SPECS
    ],
)
SAVING = [spec for spec in SPECS if "expert_mlp" in spec.name or "entropy_sum" in spec.name]
ENDINGS = ("expert_mlp", "expert_mlp_fp8", "expert_mlp_fp8_gradients")
EXPERTS = [spec.name for spec in SPECS if spec.name.endswith(ENDINGS)]
ACTIVATIONS = [
    spec.name
    for spec in SPECS
    if re.match(rf"swiglu(_({'|'.join(GATES)}).*)?$|relu2|clamped_swiglu", spec.name)
]
every_case = pytest.mark.parametrize(
    ("spec", "case", "dtype"),
    [
        pytest.param(
            spec,
            case,
            dtype,
            id=f"{spec.name}-{case_name(case)}-{dtype}",
            marks=tier_of_variant(spec, is_first=(i, j) == (0, 0)),
        )
        for spec in SPECS
        for i, case in enumerate(spec.cases)
        for j, dtype in enumerate(spec.tolerance)
    ],
)


def dtypes(spec: KernelSpec, device: str) -> list[torch.dtype]:
    """Return the dtypes of the fast path there; the first is the usual one."""
    return [x for x in spec.tolerance if device == "cpu" or x not in spec.cpu_dtypes]


def make(spec: KernelSpec, case: Case, device: str, dtype: torch.dtype | None = None) -> Inputs:
    dtype = dtype or dtypes(spec, device)[0]
    if dtype not in dtypes(spec, device):
        pytest.skip(f"takes {dtype} on a CPU alone")
    return spec.make_inputs(case, dtype, torch.Generator(device).manual_seed(0))


@devices
@every_case
def test_matches_the_float64_reference(spec, case, dtype, device):
    errors = relative_errors(spec, make(spec, case, device, dtype))
    for name, error in errors.items():
        assert error <= spec.tolerance[dtype], f"{name}: relative error {error:.2e}"


@devices
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_nan_is_not_lost(name, device):
    """A minimum or maximum of Triton's would return the other operand."""
    (found,) = (spec for spec in SPECS if spec.name == name)
    spec = replace(found, select=lambda inputs, output: output, select_grads={})
    for changed, place in itertools.product(spec.differentiable, (0, -1)):  # gate, up
        inputs = make(spec, spec.cases[1], device)  # a row
        inputs[changed].view(-1)[place] = float("nan")
        ours = evaluate(spec, spec.fast, with_grad(spec, inputs), 0.0).named()
        theirs = evaluate(spec, spec.reference, with_grad(spec, inputs, torch.float64), 0.0).named()
        assert any(x.isnan().any() for x in theirs.values())
        for result, x in ours.items():
            assert x.isnan()[theirs[result].isnan()].all(), f"{result}, with NaN in {changed}"


@devices
@specs_by_tier
def test_a_rerun_is_bitwise_equal(spec, device):
    # An interpreter runs like the first time.
    for case in spec.cases[: 1 if device == "cpu" else 3]:
        assert rerun_differences(spec, make(spec, case, device)) == [], case


@devices
@specs_by_tier
def test_compiles_without_graph_breaks(spec, device):
    if not spec.ops:
        pytest.skip("is a part of an op")
    # One wrapper of torch's stands for every kernel, and it compiles one function at most 8 times.
    torch.compiler.reset()
    compiled = torch.compile(spec.fast, fullgraph=True, backend="aot_eager")
    inputs = make(spec, spec.cases[0], device)
    for name, error in relative_errors(spec, inputs, compiled).items():
        tolerance = spec.tolerance[dtypes(spec, device)[0]]
        assert error <= tolerance, f"{name}: relative error {error:.2e}"


@devices
@specs_by_tier
def test_takes_expanded_and_missing_gradients(spec, device):
    leaves = with_grad(spec, make(spec, spec.cases[0], device))
    roots = [x for x in as_tuple(spec.fast(**leaves)) if x.requires_grad]
    wanted = [leaves[name] for name in spec.differentiable]
    for root in roots:
        # The gradient of a sum has stride 0; the other outputs get none.
        sums = torch.autograd.grad(root.sum(), wanted, retain_graph=True, materialize_grads=True)
        full = [torch.full_like(x, float(x is root)) for x in roots]
        plain = torch.autograd.grad(roots, wanted, full, retain_graph=True)
        for name, a, b in zip(spec.differentiable, sums, plain, strict=True):
            assert torch.equal(a, b), name


class Zeros(TorchDispatchMode):
    """Records the shapes of new zeros."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.name().startswith(("aten::zeros", "aten::new_zeros")):
            self.shapes.append(tuple(result.shape))
        return result


class GivesNone(torch.autograd.Function):
    """An identity whose input gets no gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        return None


@pytest.mark.tier(
    "quick",
    long=[
        "adapted_expert_mlp_fp8-compiled-cpu",
        "clamped_expert_mlp_fp8-compiled-cpu",
        "clamped_expert_mlp_fp8_gradients-compiled-cpu",
        "expert_mlp_fp8_blocks-compiled-cpu",
        "expert_mlp_fp8_gradients-compiled-cpu",
        "linear_cross_entropy_sum_narrow-compiled-cpu",
    ],
)
@devices
@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("spec", SAVING, ids=lambda spec: spec.name)
def test_what_is_kept_for_a_backward_gets_no_gradient(spec, how, device):
    """No zeros of its size are made; the backward returns None where no gradient arrives."""

    def run(has_gradient, **leaves):
        y, *_ = as_tuple(spec.fast(**leaves))
        return y if has_gradient else GivesNone.apply(y)

    torch.compiler.reset()
    if how == "compiled":
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    for has_gradient in (True, False):
        leaves = with_grad(spec, make(spec, spec.cases[0], device))
        y = run(has_gradient, **leaves)
        with Zeros() as zeros:
            y.backward(torch.ones_like(y))
        assert not zeros.shapes
        found = [leaves[name].grad for name in spec.differentiable]
        assert all((x is not None and x.any()) == has_gradient for x in found)


class Recorder(TorchDispatchMode):
    """Records the arguments of the first call of each wanted op."""

    def __init__(self, ops):
        super().__init__()
        self.wanted = {op._opoverload: op for op in ops}
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        op = self.wanted.get(func)
        if op is not None and op not in self.calls:
            self.calls[op] = (tuple(map(_copied, args)), kwargs or {})
        return func(*args, **(kwargs or {}))


def _copied(value):
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


@pytest.mark.tier(
    "quick",
    long=[
        "adapted_clamped_expert_mlp-cpu",
        "adapted_expert_mlp-cpu",
        "adapted_expert_mlp_fp8-cpu",
        "clamped_expert_mlp_fp8-cpu",
        "clamped_expert_mlp_fp8_gradients-cpu",
        "expert_mlp_fp8_blocks-cpu",
        "expert_mlp_fp8_gradients-cpu",
        "linear_cross_entropy_sum_narrow-cpu",
        "ssd-cpu",
    ],
)
@devices
@specs
def test_ops_pass_opcheck(spec, device):
    if not spec.ops:
        pytest.skip("is a part of an op")
    forward, backward = Recorder(spec.ops), Recorder(spec.ops)
    for case in spec.cases:
        leaves = with_grad(spec, make(spec, case, device))
        with forward:
            outputs = as_tuple(spec.fast(**leaves))
        with backward:
            roots = [x for x in outputs if x.requires_grad]
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(x) for x in roots])
        if len(forward.calls | backward.calls) == len(spec.ops):
            break
    assert forward.calls.keys() | backward.calls.keys() == set(spec.ops)
    for op, (args, kwargs) in forward.calls.items():
        opcheck(op, args, kwargs)
    for op, (args, kwargs) in backward.calls.items():
        # Saved inputs still require gradients, but no one differentiates a backward op.
        opcheck(op, tuple(map(detached, args)), kwargs)


def detached(value):
    if isinstance(value, list):
        return [detached(x) for x in value]
    return value.detach() if isinstance(value, torch.Tensor) else value


@specs
def test_bad_input_is_refused(spec):
    assert spec.bad_inputs or not spec.ops, "a spec lists its bad inputs"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for text, spoil in spec.bad_inputs.items():
        with pytest.raises(ValueError, match=text):
            spec.fast(**spoil(make(spec, spec.cases[0], device)))


def test_every_spec_has_a_name_of_its_own():
    assert len({spec.name for spec in SPECS}) == len(SPECS)


def test_fakes_have_the_parameters_of_their_ops():
    for module in pkgutil.walk_packages(moetrain.kernels.__path__, "moetrain.kernels."):
        importlib.import_module(module.name)
    for name, op in OPDEFS.items():
        if not op._init_fn.__module__.startswith("moetrain.kernels."):
            continue
        ours, fakes = (
            list(inspect.signature(f).parameters) for f in (op._init_fn, op._abstract_fn)
        )
        assert ours == fakes, name


def test_every_custom_op_is_in_a_spec():
    (folder,) = moetrain.kernels.__path__
    sources = "".join(path.read_text() for path in Path(folder).rglob("*.py"))
    defined = set(re.findall(r'custom_op\(\s*"(\w+::\w+)"', sources))
    wrapped = {"moetrain::grouped_mm", "moetrain::grouped_outer"}  # torch's, checked below
    ranked = ("start_copies", "expert_mlp_copied", "expert_mlp_copied_backward", "fetch_copies")
    ranked += ("deepep_dispatch", "deepep_combine", "deepep_combine_backward")
    # These need several ranks: tests/parallel/expert has test_redundant_experts.py, test_deepep.py.
    wrapped |= {f"moetrain::{name}" for name in (*ranked, "give_back_gradients")}
    assert defined - wrapped == {op._opoverload.name() for spec in SPECS for op in spec.ops}


@devices
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_keep_no_row_of_a_token(name, device):
    """Only pre-activations and adapter-wide rows are kept, as the memory estimate says."""
    (spec,) = (spec for spec in SPECS if spec.name == name)
    case = {"T": 9, "K": 2, "E": 2, "D": 64, "F": 16, "r": 16}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        spec.fast(**with_grad(spec, make(spec, case, device)))
    by_row = sorted(tuple(t.shape[1:]) for t in kept if t.shape[0] == 18)
    assert by_row == ([(16,), (16,)] if "adapted" in name else []) + [(32,)]


@devices
@pytest.mark.parametrize("name", EXPERTS)
def test_room_that_no_row_takes_is_not_read(name, device):
    """Deterministic mode fills uninitialised memory with NaN."""
    (spec,) = (spec for spec in SPECS if spec.name == name)
    case = {"T": 9, "K": 2, "E": 3, "D": 16, "F": 16, "r": 16, "empty": 0.5, "rows": 17}
    inputs = make(spec, case, device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1, device=device).isnan().all()
        errors = relative_errors(spec, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert max(errors.values()) <= spec.tolerance[dtypes(spec, device)[0]], errors


def test_grouped_products_keep_the_rules_of_custom_ops():
    offsets = torch.tensor([2, 2, 7], dtype=torch.int32)
    a, b = torch.randn(7, 8), torch.randn(3, 8, 12)
    opcheck(torch.ops.moetrain.grouped_mm, (a.requires_grad_(), b.requires_grad_(), offsets))
    opcheck(torch.ops.moetrain.grouped_outer, (a.detach(), torch.randn(7, 12), offsets))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widths", [(10, 12), (8, 9), (1, 16)])
def test_grouped_products_on_a_cpu_take_any_width(dtype, widths):
    """torch's grouped product reads 16 bytes at a time; other widths are multiplied per group."""
    inner, outer = widths
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    a = torch.randn(8, inner, dtype=dtype, requires_grad=True)  # the last row is in no group
    b = torch.randn(3, outer, inner, dtype=dtype, requires_grad=True)
    g = torch.randn(8, outer, dtype=dtype)
    y, grads = [], []
    for product in (grouped_mm(a, b.mT, ends), torch.cat((a[:2] @ b[0].T, a[2:7] @ b[2].T))):
        y.append(product[:7])
        grads.append(torch.autograd.grad(y[-1], (a, b), g[:7]))
    torch.testing.assert_close(y[0], y[1])
    torch.testing.assert_close(grads[0][0][:7], grads[1][0][:7])
    torch.testing.assert_close(grads[0][1], grads[1][1])
    outer_products = grouped_weight_grad(a.detach(), g, ends)
    torch.testing.assert_close(outer_products, grads[1][1].mT)


def test_triton_on_a_cpu_tensor_names_the_remedy(monkeypatch):
    from moetrain.runtime import backend

    monkeypatch.setattr(backend, "INTERPRETED", False)
    with pytest.raises(ValueError, match=r'tensor on cpu.*backend="auto"'):
        backend.use_fast("triton", torch.zeros(1))
    assert not backend.use_fast("auto", torch.zeros(1))


@pytest.mark.tier("long")
def test_everything_runs_on_a_cpu_without_triton():
    code = """
import sys
sys.modules["triton"] = None  # as where there is no wheel of it
import torch, moetrain.generate.weights
from moetrain.kernels.experts.swiglu import swiglu
print(swiglu(torch.ones(3, 4), torch.ones(3)).shape)
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "torch.Size([3, 2])\n"


@devices
def test_the_sum_of_one_chunk_is_a_cast(device):
    chunk_N = torch.randn(3001, device=device)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        out_N = torch.empty(3001, dtype=dtype, device=device)
        # This is plain torch on a CPU: Triton's interpreter truncates where a GPU rounds to bf16.
        assert torch.equal(sum_chunks(chunk_N[None], out_N=out_N), chunk_N.to(dtype))
    with pytest.raises(ValueError, match=r"contiguous \[3001\] of float32 or bfloat16"):
        sum_chunks(chunk_N[None], out_N=out_N, accumulate=True)


@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sum_kept_in_bf16_is_rounded_once(dtype, device):
    """The fp32 sum is rounded to nearest; squares are those of the stored value."""
    chunks_RN = torch.randn(3, 3001, device=device).to(dtype)
    before_N = torch.randn(3001, device=device).bfloat16()
    for accumulate in (False, True):
        wide_N, out_N, kernel_N = before_N.float(), before_N.clone(), before_N.clone()
        squares_B = torch.empty(3, device=device)
        sum_chunks(chunks_RN, wide_N, accumulate)
        sum_chunks(chunks_RN, out_N, accumulate, squares_B=squares_B)
        assert torch.equal(out_N, wide_N.bfloat16())
        torch.testing.assert_close(squares_B, block_squares(out_N), rtol=1e-6, atol=0)
        # The interpreter truncates to bf16; its squares are of that.
        sum_chunks(chunks_RN, kernel_N, accumulate, "triton", squares_B)
        assert ((kernel_N - wide_N).abs() <= 2**-7 * wide_N.abs()).all()
        torch.testing.assert_close(squares_B, block_squares(kernel_N), rtol=1e-6, atol=0)


@devices
def test_a_launch_that_nothing_watches_takes_no_op_and_is_a_change(device):
    chunks_RN, watched = torch.ones(1, 32, device=device), Ops()
    dispatched = []
    for mode in (watched, nullcontext()):
        out_N, squares_B = (torch.zeros(n, device=device) for n in (32, 1))
        # The profiler sees what the dispatcher runs, and is no mode.
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=cpu) as profile, mode:
            sum_chunks(chunks_RN, out_N, squares_B=squares_B, backend="triton")
        dispatched.append("moetrain::sum_chunks" in {event.name for event in profile.events()})
        assert (out_N._version, squares_B.item()) == (1, 32)
    assert "moetrain.sum_chunks.default" in watched.names
    assert dispatched == [True, False]
