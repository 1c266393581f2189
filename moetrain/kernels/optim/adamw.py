"""AdamW (arXiv 1711.05101) of one flat shard in one pass, with the copy in the compute dtype.

    g = gradient * clip                     m <- beta1 m + (1 - beta1) g
    v <- beta2 v + (1 - beta2) g^2          p <- p - lr weight_decay p
    p <- p - lr / bias1 * m / (sqrt(v / bias2) + eps)        bias_i = 1 - beta_i^step
    out = p in the compute dtype

The kernel reads what changes from step to step from device memory (:class:`Rates`), the decision to
skip included. A skipped step writes only the copy.

bf16 moments are rounded stochastically (:mod:`moetrain.kernels.optim.rounding`), so that their mean
is exact. Rounded to nearest, a second moment at beta2 0.95 would lose all that is below 1/256 of
it.

Left out on purpose: gradients (it runs after the backward), AMSGrad, masters in other than fp32.

Legend: N elements of a shard, B blocks of :data:`BLOCK` of them, each of one parameter.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import torch

from moetrain.kernels.optim.rounding import (
    BLOCK,
    OUT_DTYPES,
    STATE_DTYPES,
    WARPS,
    random_bits,
    random_bits_reference,
    round_by,
    round_by_reference,
)
from moetrain.runtime.backend import Backend, launch, refusal, tl, triton, use_fast


class Rates(NamedTuple):
    """The rates of one step: 0-d tensors, in the order in which kernels read them."""

    clip: torch.Tensor
    """Factor of the gradients."""
    decay: torch.Tensor
    """Learning rate times weight decay."""
    lr_over_bias1: torch.Tensor
    """Learning rate over the bias correction of the first moment, ``1 - beta1^step``."""
    rsqrt_bias2: torch.Tensor
    """1 / sqrt of the bias correction of the second moment, ``1 - beta2^step``."""
    skipped: torch.Tensor
    """1 if the step changes nothing, else 0."""
    step: torch.Tensor
    """Number of steps, this one included."""
    lr: torch.Tensor
    """Learning rate."""

    @classmethod
    def unpack(cls, rates_S: torch.Tensor) -> Self:
        """Return the rates that :meth:`Settings.rates` packed into one tensor."""
        return cls(*rates_S.unbind())


class Settings(NamedTuple):
    """The settings of AdamW that stay the same throughout a run."""

    beta1: float
    """Decay rate of the first moment."""
    beta2: float
    """Decay rate of the second moment."""
    eps: float
    """Added to the root of the second moment."""
    seed: int
    """The seed of the random bits of stochastic rounding, at least 0."""

    def rates(
        self,
        steps: torch.Tensor,
        clip: torch.Tensor,
        skipped: torch.Tensor,
        lr: float | torch.Tensor,
        weight_decay: float,
    ) -> torch.Tensor:
        """Return the step's :class:`Rates` in one fp32 tensor [7] on the device.

        They are computed in fp64.

        Args:
            steps: the number of steps, this one included (0-d).
            clip: the factor of the gradients (0-d).
            skipped: true if the step changes nothing (0-d).
            lr: the learning rate; as a tensor, 0-d fp64 on the device.
        """
        step = steps.double()
        lr = torch.zeros_like(step) + lr
        rates = Rates(
            clip=clip.double(),
            decay=lr * weight_decay,
            lr_over_bias1=lr / (1 - self.beta1**step),
            rsqrt_bias2=(1 - self.beta2**step).rsqrt(),
            skipped=skipped.double(),
            step=step,
            lr=lr,
        )
        return torch.stack(rates).float()


def adamw(
    param_N: torch.Tensor,
    grad_N: torch.Tensor,
    avg_N: torch.Tensor,
    avg_sq_N: torch.Tensor,
    rates_S: torch.Tensor,
    decays_B: torch.Tensor,
    settings: Settings,
    origins_B: torch.Tensor | None = None,
    out_N: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Update ``param_N``, ``avg_N``, ``avg_sq_N`` in place, and write ``out_N`` if it is given.

    All tensors over N are contiguous. In plain torch they may also all be fp64.

    Args:
        param_N: fp32.
        grad_N: fp32 or bf16.
        avg_N, avg_sq_N: the moments, both fp32 or both bf16.
        rates_S: made by :meth:`Settings.rates`.
        decays_B: uint8, 1 where weight decay applies.
        origins_B: int64, the index of each block's first element, from which its random bits are
            drawn; given with bf16 moments, and only with these.
        out_N: fp32, bf16 or fp16: receives the new parameters, rounded to nearest.

    Raises ValueError: shapes or dtypes do not fit, or a tensor is not contiguous.
    """
    flat = {"param": param_N, "grad": grad_N, "avg": avg_N, "avg_sq": avg_sq_N}
    is_fast = use_fast(backend, param_N)
    _check(flat if out_N is None else flat | {"out": out_N}, decays_B, origins_B, is_fast)
    if is_fast:
        # In torch 2.11 an argument that an op writes must be a tensor.
        out_N = param_N.new_empty(0) if out_N is None else out_N
        tensors = (param_N, grad_N, avg_N, avg_sq_N, rates_S, decays_B, origins_B)
        launch(adamw_op, (param_N, avg_N, avg_sq_N, out_N), *tensors, out_N, *settings)
        return
    rates = Rates.unpack(rates_S)
    beta1, beta2 = settings.beta1, settings.beta2
    g_N, m_N, v_N = (x_N.to(param_N.dtype) for x_N in (grad_N, avg_N, avg_sq_N))
    # Clip the gradient.
    g_N = g_N * rates.clip
    # Update the averages of the gradient and of its square.
    m_N = beta1 * m_N + (1 - beta1) * g_N
    v_N = beta2 * v_N + (1 - beta2) * g_N * g_N
    # Weight decay, decoupled: of the parameter before the update.
    decays_N = (rates.decay * decays_B).repeat_interleave(BLOCK)[: param_N.numel()]
    p_N = param_N - decays_N * param_N
    # Step along the averages; both bias corrections are in the rates.
    p_N = p_N - rates.lr_over_bias1 * m_N / (v_N.sqrt() * rates.rsqrt_bias2 + settings.eps)
    # Round moments in bf16, by 16 random bits each.
    if avg_N.dtype == torch.bfloat16:
        assert origins_B is not None  # checked
        bits_N = random_bits_reference(origins_B, rates.step, settings.seed)[: param_N.numel()]
        m_N, v_N = round_by_reference(m_N, bits_N & 0xFFFF), round_by_reference(v_N, bits_N >> 16)
    # Write the results, the old values in a skipped step.
    is_kept = rates.skipped != 0
    for old_N, new_N in ((param_N, p_N), (avg_N, m_N), (avg_sq_N, v_N)):
        old_N.copy_(torch.where(is_kept, old_N, new_N))
    if out_N is not None:
        out_N.copy_(param_N)


class OffloadedParameter(NamedTuple):
    """A parameter in host memory with its gradient and moments; all fp32, of one shape."""

    param: torch.Tensor
    grad: torch.Tensor
    avg: torch.Tensor
    avg_sq: torch.Tensor


def adamw_on_host(
    parameters: Sequence[OffloadedParameter],
    settings: Settings,
    *,
    step: float,
    clip: float,
    lr: float,
    weight_decay: float,
) -> None:
    """Update parameters in host memory by torch's fused kernel, vectorised and on all its threads.

    Args:
        parameters: updated in place; there may be none.
        step: the number of steps, this one included.
        clip: the factor of the gradients.
    """
    if not parameters:
        return
    torch._fused_adamw_(
        [p.param for p in parameters],
        [p.grad for p in parameters],
        [p.avg for p in parameters],
        [p.avg_sq for p in parameters],
        [],
        [torch.tensor(step)] * len(parameters),
        lr=lr,
        beta1=settings.beta1,
        beta2=settings.beta2,
        weight_decay=weight_decay,
        eps=settings.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=torch.tensor(1 / clip),
    )


def _check(
    flat: Mapping[str, torch.Tensor],
    decays_B: torch.Tensor,
    origins_B: torch.Tensor | None,
    is_fast: bool,
) -> None:
    shape = flat["param"].shape
    moment_dtype = flat["avg"].dtype
    is_fp64 = flat["param"].dtype == torch.float64 and not is_fast
    blocks = -(-shape.numel() // BLOCK)
    allowed = {
        "grad": STATE_DTYPES,
        "avg": STATE_DTYPES,
        "avg_sq": (moment_dtype,),
        "out": OUT_DTYPES,
    }
    for name, tensor in flat.items():
        dtypes = (torch.float64,) if is_fp64 else allowed.get(name, (torch.float32,))
        if tensor.shape != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
            takes = f"a contiguous {tuple(shape)} of {' or '.join(map(str, dtypes))}"
            raise refusal("adamw", takes, **{name: tensor})
    if decays_B.shape != (blocks,) or decays_B.dtype != torch.uint8:
        takes = f"uint8 [{blocks}] with {shape[0]} elements"
        raise refusal("adamw", takes, decays=decays_B)
    if (origins_B is None) == (moment_dtype == torch.bfloat16):
        takes = f"int64 [{blocks}] with bf16 moments, and with those alone"
        raise refusal("adamw", takes, moments=moment_dtype, origins=origins_B)


@torch.library.custom_op("moetrain::adamw", mutates_args=("param_N", "avg_N", "avg_sq_N", "out_N"))
def adamw_op(
    param_N: torch.Tensor,
    grad_N: torch.Tensor,
    avg_N: torch.Tensor,
    avg_sq_N: torch.Tensor,
    rates_S: torch.Tensor,
    decays_B: torch.Tensor,
    origins_B: torch.Tensor | None,
    out_N: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    seed: int,
) -> None:
    """Update in place; an empty ``out_N`` stands for none."""
    size = param_N.numel()
    if not size:
        return
    _adamw_kernel[(triton.cdiv(size, BLOCK),)](
        param_N,
        grad_N,
        avg_N,
        avg_sq_N,
        out_N if out_N.numel() else None,
        rates_S,
        decays_B,
        origins_B,
        size,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        eps,
        seed,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


@adamw_op.register_fake
def _(
    param_N: torch.Tensor,
    grad_N: torch.Tensor,
    avg_N: torch.Tensor,
    avg_sq_N: torch.Tensor,
    rates_S: torch.Tensor,
    decays_B: torch.Tensor,
    origins_B: torch.Tensor | None,
    out_N: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    seed: int,
) -> None:
    """Write in place; there is nothing to return."""


@triton.jit(do_not_specialize=["seed"])
def _adamw_kernel(
    param,
    grad,
    avg,
    avg_sq,
    out,
    rates,
    decays,
    origins,
    size,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    seed,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    # ``rates`` has the fields of Rates, in order.
    p = tl.load(param + at, mask, 0.0)
    if tl.load(rates + 4) == 0.0:
        # Clip, and update the averages.
        g = tl.load(grad + at, mask, 0.0).to(tl.float32) * tl.load(rates)
        m = beta1 * tl.load(avg + at, mask, 0.0).to(tl.float32) + rest1 * g
        v = beta2 * tl.load(avg_sq + at, mask, 0.0).to(tl.float32) + rest2 * g * g
        # Weight decay, then the step along the averages.
        p -= tl.load(rates + 1) * tl.load(decays + block).to(tl.float32) * p
        # Division and root are those that round as torch's do; the plain ones are approximate.
        p -= tl.div_rn(tl.load(rates + 2) * m, tl.sqrt_rn(v) * tl.load(rates + 3) + eps)
        tl.store(param + at, p, mask)
        # Round moments in bf16 stochastically.
        if origins is not None:
            step = tl.load(rates + 5).to(tl.int32)
            bits = random_bits(tl.load(origins + block), step, seed, BLOCK)
            m, v = round_by(m, bits & 0xFFFF), round_by(v, (bits >> 16) & 0xFFFF)
        tl.store(avg + at, m.to(avg.dtype.element_ty), mask)
        tl.store(avg_sq + at, v.to(avg_sq.dtype.element_ty), mask)
    if out is not None:
        tl.store(out + at, p.to(out.dtype.element_ty), mask)
