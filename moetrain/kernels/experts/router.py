"""The router: logits, top-k, weights, and the statistics that the balancing losses need.

    p = softmax(logits)      s = p (or sigmoid(logits))      chosen = the K largest of s + bias
    weight = scale * s[chosen], divided by the sum of s[chosen] if ``normalize``

``bias`` moves the choice only, never the weights (auxiliary-loss-free balancing, arXiv 2408.15664).
With expert groups (DeepSeek-V3, arXiv 2412.19437) the choice is among the ``topk_groups`` groups
whose two best s + bias have the largest sums. All arithmetic is fp32. Equal scores go to the lower
expert id, equal group scores to the lower group.

Worked example, E=4, K=2, softmax, normalised: logits [0, ln 3, 0, ln 4] give
p = [1, 3, 1, 4] / 9, ids [3, 1], weights [4/7, 3/7]; a tie between experts 0 and 2 would go to 0.

The forward is one kernel that walks tokens in a fixed order and leaves each program's sums in
memory, and one small kernel that adds them up, so equal inputs give equal bits. The backward is one
kernel, which recomputes the probabilities (both in ``router_triton.py``). Padding is left out of
everything: a pad's ids are -1, its weights 0, and it counts in no sum. The entropy and the bias
have no gradients.

:func:`router_logits` is ``x @ weight^T`` in fp32 from bf16 operands at the speed of bf16. A product
of two bf16 numbers is exact in fp32, so nothing is lost by multiplying the operands as they are:
the tensor cores' sums are fp32. In the backward the upstream gradient is fp32, and rounding it to
bf16 would lose something; it is split into two bf16 numbers that hold its leading 16 bits,
``d = high + low + O(2^-17) d``, whose products are summed in fp32::

    dx = [high low] @ [weight; weight]        d_weight = high^T @ x + low^T @ x

Legend: T tokens, D width, E experts, K experts a token, G expert groups, M = E / G experts a group,
P programs, C tile columns (E with each group padded to a power of two), S slots (K, padded).
"""

# pyright: reportArgumentType=false

from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional as F

from moetrain.kernels.backend import Backend, triton, use_fast, worth_saving
from moetrain.kernels.experts.router_triton import (
    route_backward_kernel,
    route_kernel,
    sum_programs_kernel,
)

_MAX_EXPERTS = 512
_MAX_K = 32
# 16 tokens of 128 experts: 16 values a thread in every tile-sized variable. Measured on one H200.
_TILE_ELEMENTS = 2048
_MAX_PROGRAMS = 264  # two for each of an H200's multiprocessors; more only adds partial sums


class Routed(NamedTuple):
    """The decision of one router call, and its sums over tokens, which balancing needs."""

    ids_TK: torch.Tensor
    """int32, the largest s + bias first; -1 for a pad."""
    weights_TK: torch.Tensor
    """fp32, differentiable."""
    counts_E: torch.Tensor
    """int32: (token, slot) pairs that chose each expert."""
    prob_sum_E: torch.Tensor
    """fp32, differentiable: sum over tokens of softmax(logits)."""
    z_sum: torch.Tensor
    """fp32 scalar, differentiable: sum over tokens of logsumexp(logits)^2 (arXiv 2202.08906)."""
    entropy_sum: torch.Tensor
    """fp32 scalar, no gradient: sum over tokens of the entropy of softmax(logits), in nats."""


def router_topk(
    logits_TE: torch.Tensor,
    k: int,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    normalize: bool = True,
    bias_E: torch.Tensor | None = None,
    is_pad_T: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
    backend: Backend = "auto",
) -> Routed:
    """Choose ``k`` experts for every token of ``logits_TE`` (fp32, contiguous rows).

    Args:
        bias_E: fp32, added to the scores for the choice only.
        is_pad_T: bool, which tokens are padding; None: none.
        num_groups: equal groups of consecutive experts; the choice is within ``topk_groups``.
        scale: multiplies the weights.

    Raises:
        ValueError: for a dtype, shape or option that does not fit; it names what was given.
    """
    _check(logits_TE, k, score, bias_E, is_pad_T, num_groups, topk_groups)
    if not use_fast(backend, logits_TE):
        return router_topk_reference(
            logits_TE,
            k,
            score=score,
            normalize=normalize,
            bias_E=bias_E,
            is_pad_T=is_pad_T,
            num_groups=num_groups,
            topk_groups=topk_groups,
            scale=scale,
        )
    _check_fast(logits_TE, k, bias_E)
    weights_TK, prob_sum_E, z_sum, entropy_sum, ids_TK, counts_E = _router_topk(
        logits_TE,
        bias_E,
        is_pad_T,
        k,
        score == "sigmoid",
        normalize,
        num_groups,
        topk_groups,
        scale,
    )
    return Routed(ids_TK, weights_TK, counts_E, prob_sum_E, z_sum, entropy_sum)


def router_topk_reference(
    logits_TE: torch.Tensor,
    k: int,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    normalize: bool = True,
    bias_E: torch.Tensor | None = None,
    is_pad_T: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
) -> Routed:
    """Compute :func:`router_topk` in plain torch."""
    log_probs_TE = logits_TE.log_softmax(-1)
    probs_TE = log_probs_TE.exp()
    scores_TE = probs_TE if score == "softmax" else logits_TE.sigmoid()
    choice_TE = scores_TE.detach() if bias_E is None else scores_TE.detach() + bias_E
    if topk_groups < num_groups:
        choice_TGM = choice_TE.unflatten(-1, (num_groups, -1))
        group_TG = choice_TGM.topk(min(2, choice_TGM.shape[-1]), -1).values.sum(-1)
        groups = group_TG.sort(dim=-1, descending=True, stable=True).indices[:, :topk_groups]
        dropped_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter(1, groups, False)
        choice_TE = choice_TGM.masked_fill(dropped_TG[..., None], float("-inf")).flatten(1)
    # A stable sort, since torch.topk leaves the order of ties open.
    ids_TK = choice_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights_TK = scores_TE.gather(1, ids_TK)
    if normalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    counted_T = logits_TE.new_ones(logits_TE.shape[0])
    if is_pad_T is not None:
        counted_T = counted_T.masked_fill(is_pad_T, 0)
        ids_TK = ids_TK.masked_fill(is_pad_T[:, None], -1)
        weights_TK = weights_TK.masked_fill(is_pad_T[:, None], 0)
    ids_R = ids_TK.reshape(-1)
    counts_E = torch.zeros(logits_TE.shape[1], dtype=torch.int32, device=logits_TE.device)
    entropy_T = -(probs_TE * log_probs_TE).detach().sum(-1)
    return Routed(
        ids_TK=ids_TK.int(),
        weights_TK=weights_TK * scale,
        counts_E=counts_E.scatter_add(0, ids_R.clamp(min=0), (ids_R >= 0).int()),
        prob_sum_E=(probs_TE * counted_T[:, None]).sum(0),
        z_sum=(logits_TE.logsumexp(-1).square() * counted_T).sum(),
        entropy_sum=(entropy_T * counted_T).sum(),
    )


def _check(
    logits_TE: torch.Tensor,
    k: int,
    score: str,
    bias_E: torch.Tensor | None,
    is_pad_T: torch.Tensor | None,
    num_groups: int,
    topk_groups: int,
) -> None:
    if logits_TE.dim() != 2 or not logits_TE.is_floating_point():
        raise ValueError(
            f"router_topk: logits are {logits_TE.dtype} {tuple(logits_TE.shape)}; it takes "
            "floating [T, E]"
        )
    num_experts = logits_TE.shape[1]
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"router_topk: score is {score!r}; it takes 'softmax' or 'sigmoid'")
    if num_groups < 1 or num_experts % num_groups or not 1 <= topk_groups <= num_groups:
        raise ValueError(
            f"router_topk: num_groups is {num_groups} and topk_groups {topk_groups} with "
            f"{num_experts} experts; it takes groups that divide the experts, and 1 to all of them"
        )
    reachable = num_experts // num_groups * topk_groups
    if not 1 <= k <= reachable:
        raise ValueError(
            f"router_topk: k is {k}; it takes 1 to {reachable}, the experts of the chosen groups"
        )
    if bias_E is not None and bias_E.shape != (num_experts,):
        raise ValueError(
            f"router_topk: the bias has shape {tuple(bias_E.shape)}; with {num_experts} experts it "
            f"takes ({num_experts},)"
        )
    if is_pad_T is not None and (
        is_pad_T.dtype != torch.bool or is_pad_T.shape != logits_TE.shape[:1]
    ):
        raise ValueError(
            f"router_topk: is_pad is {is_pad_T.dtype} {tuple(is_pad_T.shape)}; for "
            f"{logits_TE.shape[0]} tokens it takes bool ({logits_TE.shape[0]},)"
        )


def _check_fast(logits_TE: torch.Tensor, k: int, bias_E: torch.Tensor | None) -> None:
    if logits_TE.dtype != torch.float32 or logits_TE.stride(1) != 1:
        raise ValueError(
            f"router_topk: logits are {logits_TE.dtype} with strides {logits_TE.stride()}; the "
            "fast path takes float32 with contiguous rows"
        )
    if logits_TE.shape[1] > _MAX_EXPERTS or k > _MAX_K:
        raise ValueError(
            f"router_topk: k is {k} of {logits_TE.shape[1]} experts; the fast path takes at most "
            f"{_MAX_K} of {_MAX_EXPERTS}"
        )
    if bias_E is not None and (bias_E.dtype != torch.float32 or not bias_E.is_contiguous()):
        raise ValueError(
            f"router_topk: the bias is {bias_E.dtype} with strides {bias_E.stride()}; the fast "
            "path takes contiguous float32"
        )


# weights, prob_sum, z_sum, entropy_sum, ids, counts
_Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op("moetrain::router_topk", mutates_args=())
def _router_topk(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    is_pad_T: torch.Tensor | None,
    k: int,
    sigmoid: bool,
    normalize: bool,
    num_groups: int,
    topk_groups: int,
    scale: float,
) -> _Outputs:
    (T, E), M = logits_TE.shape, logits_TE.shape[1] // num_groups
    outputs = _empty_outputs(logits_TE, k)
    weights_TK, prob_sum_E, z_sum, entropy_sum, ids_TK, counts_E = outputs
    padded_groups, padded_members = triton.next_power_of_2(num_groups), triton.next_power_of_2(M)
    columns = padded_groups * padded_members
    rows = max(1, _TILE_ELEMENTS // columns)
    # No token still takes one program, whose zeros are the sums.
    num_programs = max(1, min(triton.cdiv(T, rows), _MAX_PROGRAMS))
    counts_PE = logits_TE.new_empty((num_programs, E), dtype=torch.int32)
    sums_PE = logits_TE.new_empty((num_programs, E + 2))
    is_pad = None if is_pad_T is None else is_pad_T.contiguous().view(torch.uint8)
    route_kernel[(num_programs,)](
        logits_TE, bias_E, is_pad, ids_TK, weights_TK, counts_PE, sums_PE,
        T, logits_TE.stride(0), topk_groups, scale, K=k, E=E, G=num_groups, M=M,
        SIGMOID=sigmoid, NORMALIZE=normalize, DROP_GROUPS=topk_groups < num_groups,
        B=rows, GP=padded_groups, MP=padded_members, S=triton.next_power_of_2(k),
    )  # fmt: skip
    sum_programs_kernel[(triton.cdiv(E + 2, 16),)](
        counts_PE, sums_PE, counts_E, prob_sum_E, z_sum, entropy_sum, num_programs,
        E=E, B=64, C=16,
    )  # fmt: skip
    return outputs


@torch.library.custom_op("moetrain::router_topk_backward", mutates_args=())
def _router_topk_backward(
    logits_TE: torch.Tensor,
    ids_TK: torch.Tensor,
    grad_weights_TK: torch.Tensor,
    grad_prob_sum_E: torch.Tensor,
    grad_z_sum: torch.Tensor,
    sigmoid: bool,
    normalize: bool,
    scale: float,
) -> torch.Tensor:
    (T, E), k = logits_TE.shape, ids_TK.shape[1]
    grad_logits_TE = logits_TE.new_empty((T, E))
    if T:
        columns = triton.next_power_of_2(E)
        rows = max(1, _TILE_ELEMENTS // columns)
        route_backward_kernel[(triton.cdiv(T, rows),)](
            logits_TE, ids_TK, grad_weights_TK.contiguous(), grad_prob_sum_E.contiguous(),
            grad_z_sum, grad_logits_TE, T, logits_TE.stride(0), scale, K=k, E=E,
            SIGMOID=sigmoid, NORMALIZE=normalize, B=rows, C=columns, S=triton.next_power_of_2(k),
        )  # fmt: skip
    return grad_logits_TE


def _empty_outputs(logits_TE: torch.Tensor, k: int) -> _Outputs:
    T, E = logits_TE.shape
    return (
        logits_TE.new_empty((T, k)),
        logits_TE.new_empty((E,)),
        logits_TE.new_empty(()),
        logits_TE.new_empty(()),
        logits_TE.new_empty((T, k), dtype=torch.int32),
        logits_TE.new_empty((E,), dtype=torch.int32),
    )


@_router_topk.register_fake
def _(logits_TE, bias_E, is_pad_T, k, sigmoid, normalize, num_groups, topk_groups, scale):
    return _empty_outputs(logits_TE, k)


@_router_topk_backward.register_fake
def _(logits_TE, ids_TK, grad_weights, grad_prob_sum, grad_z_sum, sigmoid, normalize, scale):
    return logits_TE.new_empty(logits_TE.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    logits_TE, _, _, _, ctx.sigmoid, ctx.normalize, _, _, ctx.scale = inputs
    _, _, _, entropy_sum, ids_TK, counts_E = output
    ctx.mark_non_differentiable(ids_TK, counts_E, entropy_sum)
    ctx.save_for_backward(logits_TE, ids_TK)


def _backward(ctx: Any, grad_weights, grad_prob_sum, grad_z_sum, *_):
    grads, how = (grad_weights, grad_prob_sum, grad_z_sum), (ctx.sigmoid, ctx.normalize, ctx.scale)
    return _router_topk_backward(*ctx.saved_tensors, *grads, *how), *[None] * 8


_router_topk.register_autograd(_backward, setup_context=_save)
# The sort is what chooses in the reference.
worth_saving("routing", torch.ops.moetrain.router_topk.default, torch.ops.aten.sort.stable)


def router_logits(
    x_TD: torch.Tensor, weight_ED: torch.Tensor, backend: Backend = "auto"
) -> torch.Tensor:
    """Return ``logits_TE`` in fp32 (float64 for a float64 ``x``).

    Args:
        x_TD: any floating dtype; bf16 takes the fast path, others the reference.
        weight_ED: any floating dtype; it is rounded to ``x``'s. Its gradient has its own dtype.

    Raises:
        ValueError: if the widths differ.
    """
    if x_TD.dim() != 2 or weight_ED.dim() != 2 or x_TD.shape[1] != weight_ED.shape[1]:
        raise ValueError(
            f"router_logits: x and weight were given as {tuple(x_TD.shape)} and "
            f"{tuple(weight_ED.shape)}; it takes [T, D] and [E, D]"
        )
    if x_TD.dtype == torch.bfloat16 and use_fast(backend, x_TD):
        return _router_logits(x_TD, weight_ED)
    return router_logits_reference(x_TD, weight_ED)


def router_logits_reference(x_TD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    """Compute :func:`router_logits` in plain torch."""
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    return F.linear(x_TD.to(wide), weight_ED.to(x_TD.dtype).to(wide))


@torch.library.custom_op("moetrain::router_logits", mutates_args=())
def _router_logits(x_TD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    return _wide_product(x_TD, weight_ED.to(x_TD.dtype).t())


@torch.library.custom_op("moetrain::router_logits_backward", mutates_args=())
def _router_logits_backward(
    parts_T2E: torch.Tensor, x_TD: torch.Tensor, weight_ED: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of ``x``, and those of ``weight`` from each part, fp32 [2E, D]."""
    d_x_TD = parts_T2E @ weight_ED.to(x_TD.dtype).repeat(2, 1)
    return d_x_TD, _wide_product(parts_T2E.t(), x_TD)


def _wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` in fp32."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


@_router_logits.register_fake
def _(x_TD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    return x_TD.new_empty(x_TD.shape[0], weight_ED.shape[0], dtype=torch.float32)


@_router_logits_backward.register_fake
def _(parts_T2E, x_TD, weight_ED):
    experts, width = weight_ED.shape
    return torch.empty_like(x_TD), x_TD.new_empty(2 * experts, width, dtype=torch.float32)


def _save_logits(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_logits(ctx: Any, d_logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x_TD, weight_ED = ctx.saved_tensors
    # The split is outside the op, so that the compiler fuses it.
    high_TE = d_logits_TE.to(x_TD.dtype)
    low_TE = (d_logits_TE - high_TE.float()).to(x_TD.dtype)
    parts_T2E = torch.cat((high_TE, low_TE), dim=1)
    d_x_TD, d_weights_2ED = _router_logits_backward(parts_T2E, x_TD, weight_ED)
    high_ED, low_ED = d_weights_2ED.chunk(2)
    return d_x_TD, (high_ED + low_ED).to(weight_ED.dtype)


_router_logits.register_autograd(_differentiate_logits, setup_context=_save_logits)
worth_saving("linear", torch.ops.moetrain.router_logits.default)
