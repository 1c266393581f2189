"""The promises of a kernel as data, and the one way to check them.

A :class:`KernelSpec` describes one function that a kernel file offers. The test suite and the
benchmark walk the same specs and measure errors with the same :func:`relative_errors`, so they
cannot drift apart.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

Case = Mapping[str, Any]
"""Sizes and switches of one set of inputs, for example ``{"T": 257, "E": 5, "routing": "one"}``."""

Inputs = dict[str, Any]
"""Keyword arguments of a kernel: tensors, tuples of integer tensors, and plain values."""


@dataclass(frozen=True)
class Cost:
    """The least work of one call: each input read once, each output written once."""

    bytes: float = 0.0
    flops: float = 0.0

    def floor_seconds(self, bytes_per_second: float, flops_per_second: float) -> float:
        """Return the time that no implementation beats on a device of these rates."""
        return max(self.bytes / bytes_per_second, self.flops / flops_per_second)


@dataclass(frozen=True)
class Bench:
    """One row of the benchmark's table."""

    case: Case
    targets: Mapping[str, float] = field(default_factory=dict)
    """Targets on one H200 by metric: ``forward_ms``, ``backward_ms``, ``total_ms`` and
    ``extra_gib`` at most; ``forward_fraction``, ``backward_fraction`` (of the floor) and
    ``total_tflops`` at least."""
    check_case: Case | None = None
    """Smaller sizes for the correctness check, where the reference does not fit in memory at
    ``case``; the reference is then not timed."""


@dataclass(frozen=True)
class KernelSpec:
    """One kernel: its two implementations, how to call them, and what they promise."""

    name: str
    fast: Callable[..., Any]
    """The fast path: keyword arguments of ``make_inputs`` to a tensor or a (named) tuple."""
    reference: Callable[..., Any]
    """Pure torch, differentiable by autograd, right in float64."""
    make_inputs: Callable[[Case, torch.dtype, torch.Generator], Inputs]
    """Inputs of a case, on the generator's device."""
    cases: tuple[Case, ...]
    """Sizes of the tests, ugly on purpose. The first is an ordinary one with nothing unspecified
    (opcheck compares all). The compile test uses it, and opcheck continues until it has seen every
    op of ``ops``."""
    benches: tuple[Bench, ...]
    """Sizes the benchmark times on a GPU, in bf16."""
    tolerance: Mapping[torch.dtype, float]
    """Largest ``|fast - float64 reference| / |float64 reference|`` (2-norms) of each output and
    gradient, for each input dtype the tests walk; integer outputs must be equal."""
    cost: Callable[[Case], tuple[Cost, Cost]]
    """Least work of the forward and of the backward pass at the benchmark's dtype."""
    differentiable: tuple[str, ...] = ()
    """Names of the inputs whose gradients are checked (those that are None are left out)."""
    select: Callable[[Inputs, torch.Tensor], torch.Tensor] = lambda inputs, output: output
    """Drops what is unspecified (rows past the last offset) from an output, differentiably.
    The tests set the upstream gradient of all it drops to NaN."""
    select_grads: Mapping[str, Callable[[Inputs, torch.Tensor], torch.Tensor]] = field(
        default_factory=dict
    )
    """Maps an input's name to a function that drops what is unspecified from its gradient."""
    cpu_dtypes: tuple[torch.dtype, ...] = ()
    """The dtypes of ``tolerance`` that the fast path takes on a CPU alone."""
    ops: tuple[Any, ...] = ()
    """The custom ops (``torch.library.CustomOpDef``), for ``torch.library.opcheck``. None: it is a
    part of other ops, so it is not compiled by itself and may leave the checks to them."""
    bad_inputs: dict[str, Callable[[Inputs], Inputs]] = field(default_factory=dict)
    """Maps the text of a ValueError to a change of the first case's inputs that must raise it."""


class Results(NamedTuple):
    """The results of one forward and backward pass, without unspecified parts."""

    outputs: tuple[torch.Tensor, ...]
    grads: dict[str, torch.Tensor]

    def named(self) -> dict[str, torch.Tensor]:
        """Return every tensor by a name to print."""
        outputs = {f"output {i}": x for i, x in enumerate(self.outputs)}
        return outputs | {f"gradient of {name}": x for name, x in self.grads.items()}


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Draw from N(0, 1), fp32, on the generator's device."""
    return torch.randn(*shape, device=generator.device, generator=generator)


def uniform(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Draw from [0, 1), fp32, on the generator's device."""
    return torch.rand(*shape, device=generator.device, generator=generator)


def as_tuple(outputs: Any) -> tuple[torch.Tensor, ...]:
    """Return a kernel's return value as a plain tuple of tensors."""
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def with_grad(spec: KernelSpec, inputs: Inputs, dtype: torch.dtype | None = None) -> Inputs:
    """Copy inputs to fresh leaves, floating ones in ``dtype`` (None: their own).

    Those in ``spec.differentiable`` require gradients.
    """
    leaves = {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
            value = value.detach().to(wanted, copy=True)
            value.requires_grad_(name in spec.differentiable)
        leaves[name] = value
    return leaves


def evaluate(
    spec: KernelSpec, implementation: Callable[..., Any], inputs: Inputs, poison: float
) -> Results:
    """Run forward and backward on leaves from :func:`with_grad`.

    The upstream gradients are random, the same for every implementation and dtype, and ``poison``
    where ``select`` drops the output: NaN for a kernel, which must not read them; 0 for a reference
    that may.
    """
    outputs = as_tuple(implementation(**inputs))
    roots = [x for x in outputs if x.requires_grad]
    grads = {}
    if roots:
        names = [name for name in spec.differentiable if inputs[name] is not None]
        upstream = _upstream_grads(spec, inputs, outputs, poison)
        found = torch.autograd.grad(roots, [inputs[name] for name in names], upstream)
        grads = dict(zip(names, found, strict=True))
        for name in grads.keys() & spec.select_grads.keys():
            grads[name] = spec.select_grads[name](inputs, grads[name])
    with torch.no_grad():
        return Results(tuple(spec.select(inputs, x) for x in outputs), grads)


def relative_errors(
    spec: KernelSpec,
    inputs: Inputs,
    implementation: Callable[..., Any] | None = None,
    wide: torch.dtype = torch.float64,
) -> dict[str, float]:
    """Return the error of each output and gradient of ``implementation`` (None: ``spec.fast``).

    The reference runs in ``wide`` on the same values; 2-norms over whole tensors. An integer
    output that differs counts as infinity.
    """
    ours = evaluate(spec, implementation or spec.fast, with_grad(spec, inputs), float("nan"))
    theirs = evaluate(spec, spec.reference, with_grad(spec, inputs, wide), 0.0)
    expected = theirs.named()
    if ours.named().keys() != expected.keys():
        raise AssertionError(f"{spec.name} gives {list(ours.named())}, not {list(expected)}")
    return {name: _error(x, expected[name]) for name, x in ours.named().items()}


def rerun_differences(spec: KernelSpec, inputs: Inputs) -> list[str]:
    """Return the outputs and gradients of ``spec.fast`` that a second run does not repeat.

    It runs in torch's deterministic mode, which a vendor's kernel may need for that.
    """
    leaves = with_grad(spec, inputs)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first, second = (evaluate(spec, spec.fast, leaves, float("nan")).named() for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    return [name for name, x in first.items() if not torch.equal(x, second[name])]


def _upstream_grads(
    spec: KernelSpec, inputs: Inputs, outputs: tuple[torch.Tensor, ...], poison: float
) -> list[torch.Tensor]:
    # The gradient of the sum of what select keeps is 1 where it keeps, 0 (or None) elsewhere.
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in outputs]
    kept = [spec.select(inputs, x).sum() for x in leaves if x.requires_grad]
    wanted = [x for x in leaves if x.requires_grad]
    masks = torch.autograd.grad(kept, wanted, allow_unused=True, materialize_grads=True)
    generator = torch.Generator(wanted[0].device).manual_seed(1)
    grads = []
    for x, mask in zip(wanted, masks, strict=True):
        grad = torch.randn(x.shape, generator=generator, device=x.device)
        # Values are rounded to bf16, so that every dtype gets the same ones.
        grads.append(grad.bfloat16().to(x.dtype).masked_fill(mask == 0, poison))
    return grads


def _error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    if ours.shape != expected.shape:
        raise AssertionError(f"shape {tuple(ours.shape)}, expected {tuple(expected.shape)}")
    if expected.dtype.itemsize == 1 and expected.is_floating_point():
        expected = expected.float()  # nothing computes in e4m3
    if not ours.is_floating_point():
        return 0.0 if torch.equal(ours, expected) else float("inf")
    # The comparison goes by parts: the difference in the wide dtype may not fit beside the tensors.
    difference, norm = 0.0, 0.0
    parts = zip(ours.reshape(-1).split(1 << 28), expected.reshape(-1).split(1 << 28), strict=True)
    for a, b in parts:
        difference += (a.to(b.dtype) - b).square().sum(dtype=torch.float64).item()
        norm += b.square().sum(dtype=torch.float64).item()
    return (difference / norm) ** 0.5 if norm else difference**0.5
