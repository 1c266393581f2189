"""Router top-k: scores to expert ids, weights, and the statistics the balancing losses need.

    p = softmax(logits)      s = p (or sigmoid(logits))      chosen = the K largest of s + bias
    weight = scale * s[chosen], divided by the sum of s[chosen] if ``normalize``

``bias`` moves the choice only, never the weights (auxiliary-loss-free balancing, arXiv 2408.15664).
With expert groups (DeepSeek-V3, arXiv 2412.19437) the choice is among the ``topk_groups`` groups
whose two best s + bias have the largest sums. All arithmetic is fp32. Equal scores go to the lower
expert id, equal group scores to the lower group.

Legend: T tokens, E experts, K experts a token, G expert groups, M = E / G experts a group,
P programs, C tile columns (E with each group padded to a power of two), S slots (K, padded).

Worked example, E=4, K=2, softmax, normalised: logits [0, ln 3, 0, ln 4] give
p = [1, 3, 1, 4] / 9, ids [3, 1], weights [4/7, 3/7]; a tie between experts 0 and 2 would go to 0.

The forward is one kernel that walks tokens in a fixed order and leaves each program's sums in
memory, and one small kernel that adds them up, so equal inputs give equal bits. The backward is one
kernel; it recomputes the probabilities. Padding is left out of everything: a pad's ids are -1, its
weights 0, and it counts in no sum. Left out: a gradient of the entropy and of the bias.
"""

# pyright: reportArgumentType=false

from typing import Any, Literal, NamedTuple

import torch

from moetrain.kernels.backend import Backend, use_fast
from moetrain.kernels.experts.router_triton import (
    route_backward_kernel,
    route_kernel,
    sum_programs_kernel,
)
from moetrain.kernels.saving import worth_saving
from moetrain.kernels.triton import triton

MAX_EXPERTS = 512
MAX_K = 32
# 16 tokens of 128 experts: 16 values a thread in every tile-sized variable. Measured on one H200.
_TILE_ELEMENTS = 2048
_MAX_PROGRAMS = 264  # two for each of an H200's multiprocessors; more only adds partial sums


class Routed(NamedTuple):
    """One router call's decision and its sums over tokens (all that balancing needs)."""

    ids_TK: torch.Tensor
    """int32, largest s + bias first; -1 for a pad."""
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
        ValueError: a dtype, shape or option that does not fit, with what was given.
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
    """:func:`router_topk` in plain torch."""
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
    if logits_TE.shape[1] > MAX_EXPERTS or k > MAX_K:
        raise ValueError(
            f"router_topk: k is {k} of {logits_TE.shape[1]} experts; the fast path takes at most "
            f"{MAX_K} of {MAX_EXPERTS}"
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
# And what chooses in the reference.
worth_saving("routing", torch.ops.moetrain.router_topk.default, torch.ops.aten.sort.stable)
