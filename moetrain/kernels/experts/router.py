"""The router: top-k, weights, and the statistics that the balancing losses need.

    p = softmax(logits)      s = p (or sigmoid(logits))      chosen = the K largest of s + bias
    weight = scale * s[chosen], divided by max(sum of s[chosen], min_sum) + sum_eps if ``normalize``

``bias`` changes the choice only, never the weights (auxiliary-loss-free balancing, arXiv
2408.15664). With expert groups (DeepSeek-V3, arXiv 2412.19437) the choice is among the experts of
the best ``topk_groups`` groups. A group's score is the sum of its two largest s + bias, or the
largest alone (``best_of_group``, DeepSeek-V2, arXiv 2405.04434). All arithmetic is fp32. Of equal
scores the lower expert id wins, and of equal group scores the lower group. Padding tokens get ids
of -1 and weights of 0, and count in no statistic.

Worked example, E=4, K=2, softmax, normalised: logits [0, ln 3, 0, ln 4] give
p = [1, 3, 1, 4] / 9, ids [3, 1], weights [4/7, 3/7]; a tie between experts 0 and 2 would go to 0.

Sums are added up in a fixed order, so equal inputs give equal bits. A tile's layout decides the
order of a softmax's sum, and the compiler chooses the layout by the alignment of rows. So a row's
stride is the constant E. A stride as an argument could be aligned for one token, whose logits may
be a view of padded ones, and not for many.

Legend: T tokens, E experts, K experts a token, G expert groups, M = E / G experts a group,
P programs, C tile columns (E with each group padded to a power of two), S slots (K, padded).
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# Triton has no types: the bodies of kernels, and what calls them, consist of unknown ones.

from typing import Any, Literal

import torch

from moetrain.kernels.experts.routed import Routed, weighted
from moetrain.runtime.backend import (
    Backend,
    gradients,
    refusal,
    tl,
    triton,
    use_fast,
    worth_saving,
)
from moetrain.runtime.typed import OpContext, fake_of, register_gradient

_NUM_SCALARS = 2
"""Sums over tokens that are one number each, z and entropy. The kernels write it as ``E + 2``."""
_MAX_EXPERTS = 512
_MAX_K = 32
_TILE_ELEMENTS = 2048
"""Logits of a tile: 16 tokens of 128 experts, 16 values a thread. Measured on one H200."""
_FEW = 16
"""Up to this many tokens, a tile has as many rows as there are tokens, rounded up to a power of
two, where the order of no sum depends on that."""
_MAX_PROGRAMS = 264  # two for each of an H200's multiprocessors; more only adds partial sums
_TAKEN = tl.constexpr(-(2**63))  # below the key of every score


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
    best_of_group: bool = False,
    scale: float = 1.0,
    min_sum: float = 0.0,
    sum_eps: float = 0.0,
    backend: Backend = "auto",
) -> Routed:
    """Choose ``k`` experts for every token of ``logits_TE`` (fp32, contiguous rows).

    Args:
        bias_E: fp32, added to the scores for the choice only.
        is_pad_T: bool, True for padding; None: no token is padding.
        num_groups: the number of equal groups of consecutive experts; the choice is within
            ``topk_groups`` of them.
        best_of_group: score a group by its best expert, instead of its two best.
        scale: multiplies the weights.
        min_sum: the smallest divisor of ``normalize``, for scores close to zero.
        sum_eps: is added to that divisor.

    Raises:
        ValueError: shapes, dtypes or numbers do not fit.
    """
    if logits_TE.dim() != 2 or not logits_TE.is_floating_point():
        raise refusal("router_topk", "floating [T, E]", logits=logits_TE)
    tokens, experts = logits_TE.shape
    if score not in ("softmax", "sigmoid"):
        raise refusal("router_topk", "'softmax' or 'sigmoid'", score=repr(score))
    if num_groups < 1 or experts % num_groups or not 1 <= topk_groups <= num_groups:
        takes = "num_groups that divides experts, and topk_groups from 1 to num_groups"
        raise refusal(
            "router_topk",
            takes,
            num_groups=num_groups,
            topk_groups=topk_groups,
            experts=experts,
        )
    reachable = experts // num_groups * topk_groups
    if not 1 <= k <= reachable:
        raise refusal("router_topk", f"1 to {reachable}, the experts of the chosen groups", k=k)
    if bias_E is not None and bias_E.shape != (experts,):
        raise refusal("router_topk", "one number an expert", logits=logits_TE, bias=bias_E)
    if is_pad_T is not None and (is_pad_T.dtype != torch.bool or is_pad_T.shape != (tokens,)):
        raise refusal("router_topk", "bool, one a token", logits=logits_TE, is_pad=is_pad_T)
    is_fast = use_fast(backend, logits_TE)
    if is_fast:
        _check_fast(logits_TE, k, bias_E)
    route = router_topk_op if is_fast else _reference
    weights_TK, prob_sum_E, z_sum, entropy_sum, ids_TK, counts_E = route(
        logits_TE,
        bias_E,
        is_pad_T,
        k,
        sigmoid=score == "sigmoid",
        normalize=normalize,
        num_groups=num_groups,
        topk_groups=topk_groups,
        best_of_group=best_of_group,
        scale=scale,
        min_sum=min_sum,
        sum_eps=sum_eps,
    )
    return Routed(
        ids_TK=ids_TK,
        weights_TK=weights_TK,
        counts_E=counts_E,
        prob_sum_E=prob_sum_E,
        z_sum=z_sum,
        entropy_sum=entropy_sum,
    )


def _check_fast(
    logits_TE: torch.Tensor,
    k: int,
    bias_E: torch.Tensor | None,
) -> None:
    if logits_TE.dtype != torch.float32 or logits_TE.stride(1) != 1:
        raise refusal("router_topk", "float32 with contiguous rows", logits=logits_TE)
    if logits_TE.shape[1] > _MAX_EXPERTS or k > _MAX_K:
        takes = f"k of at most {_MAX_K} and {_MAX_EXPERTS} experts"
        raise refusal("router_topk", takes, k=k, logits=logits_TE)
    if bias_E is not None and (bias_E.dtype != torch.float32 or not bias_E.is_contiguous()):
        raise refusal("router_topk", "contiguous float32", bias=bias_E)


# weights, prob_sum, z_sum, entropy_sum, ids, counts
_Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _reference(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    is_pad_T: torch.Tensor | None,
    k: int,
    sigmoid: bool,
    normalize: bool,
    num_groups: int,
    topk_groups: int,
    best_of_group: bool,
    scale: float,
    min_sum: float,
    sum_eps: float,
) -> _Outputs:
    log_probs_TE = logits_TE.log_softmax(-1)
    probs_TE = log_probs_TE.exp()
    scores_TE = logits_TE.sigmoid() if sigmoid else probs_TE
    choice_TE = scores_TE.detach() if bias_E is None else scores_TE.detach() + bias_E
    if topk_groups < num_groups:
        choice_TGM = choice_TE.unflatten(-1, (num_groups, -1))
        scored = 1 if best_of_group else min(2, choice_TGM.shape[-1])
        group_TG = choice_TGM.topk(scored, -1).values.sum(-1)
        groups = group_TG.sort(dim=-1, descending=True, stable=True).indices[:, :topk_groups]
        dropped_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter(1, groups, False)
        choice_TE = choice_TGM.masked_fill(dropped_TG[..., None], float("-inf")).flatten(1)
    # A stable sort, since torch.topk leaves the order of ties open.
    ids_TK = choice_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    ids_TK, weights_TK, counts_E = weighted(
        scores_TE, ids_TK, is_pad_T, normalize, scale, min_sum, sum_eps
    )
    counted_T = logits_TE.new_ones(logits_TE.shape[0])
    if is_pad_T is not None:
        counted_T = counted_T.masked_fill(is_pad_T, 0)
    entropy_T = -(probs_TE * log_probs_TE).detach().sum(-1)
    prob_sum_E = (probs_TE * counted_T[:, None]).sum(0)
    z_sum = (logits_TE.logsumexp(-1).square() * counted_T).sum()
    entropy_sum = (entropy_T * counted_T).sum()
    return weights_TK, prob_sum_E, z_sum, entropy_sum, ids_TK, counts_E


@torch.library.custom_op("moetrain::router_topk", mutates_args=())
def router_topk_op(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    is_pad_T: torch.Tensor | None,
    k: int,
    sigmoid: bool,
    normalize: bool,
    num_groups: int,
    topk_groups: int,
    best_of_group: bool,
    scale: float,
    min_sum: float,
    sum_eps: float,
) -> _Outputs:
    T, E = logits_TE.shape
    M = E // num_groups
    logits_TE = logits_TE.contiguous()
    outputs = _empty_outputs(logits_TE, k)
    weights_TK, prob_sum_E, z_sum, entropy_sum, ids_TK, counts_E = outputs
    padded_groups = triton.next_power_of_2(num_groups)
    padded_members = triton.next_power_of_2(M)
    columns = padded_groups * padded_members
    rows, warps, slots = max(1, _TILE_ELEMENTS // columns), 4, triton.next_power_of_2(k)
    # With few tokens a tile is smaller. A warp still has whole rows, so the sums' order stays.
    if T <= _FEW and columns == 128 and slots == 8:
        rows = triton.next_power_of_2(max(1, T))
        warps = min(warps, rows)
    # Without tokens one program still runs: its zeros are the sums.
    num_programs = max(1, min(triton.cdiv(T, rows), _MAX_PROGRAMS))
    alone = num_programs == 1  # the sums of its tokens are the results
    counts_PE = counts_E if alone else counts_E.new_empty((num_programs, E))
    sums_PE = logits_TE.new_empty((0 if alone else num_programs, E + _NUM_SCALARS))
    is_pad = None if is_pad_T is None else is_pad_T.contiguous().view(torch.uint8)
    _route_kernel[(num_programs,)](
        logits_TE, bias_E, is_pad, ids_TK, weights_TK, counts_PE,
        prob_sum_E if alone else sums_PE, z_sum, entropy_sum,
        T, topk_groups, scale, min_sum, sum_eps, K=k, E=E, G=num_groups, M=M,
        SIGMOID=sigmoid, NORMALIZE=normalize, DROP_GROUPS=topk_groups < num_groups,
        BEST=best_of_group, B=rows, GP=padded_groups, MP=padded_members,
        S=slots, ALONE=alone, num_warps=warps,
    )  # fmt: skip
    if not alone:
        _sum_programs_kernel[(triton.cdiv(E + _NUM_SCALARS, 16),)](
            counts_PE, sums_PE, counts_E, prob_sum_E, z_sum, entropy_sum, num_programs,
            E=E, B=64, C=16,
        )  # fmt: skip
    return outputs


@torch.library.custom_op("moetrain::router_topk_backward", mutates_args=())
def router_topk_backward_op(
    logits_TE: torch.Tensor,
    ids_TK: torch.Tensor,
    grad_weights_TK: torch.Tensor,
    grad_prob_sum_E: torch.Tensor,
    grad_z_sum: torch.Tensor,
    sigmoid: bool,
    normalize: bool,
    scale: float,
    min_sum: float,
    sum_eps: float,
) -> torch.Tensor:
    T, E = logits_TE.shape
    k = ids_TK.shape[1]
    logits_TE = logits_TE.contiguous()
    grad_logits_TE = logits_TE.new_empty((T, E))
    if T:
        columns = triton.next_power_of_2(E)
        rows = max(1, _TILE_ELEMENTS // columns)
        _route_backward_kernel[(triton.cdiv(T, rows),)](
            logits_TE, ids_TK, grad_weights_TK.contiguous(), grad_prob_sum_E.contiguous(),
            grad_z_sum, grad_logits_TE, T, scale, min_sum, sum_eps, K=k, E=E,
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


@fake_of(router_topk_op)
def _(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    is_pad_T: torch.Tensor | None,
    k: int,
    sigmoid: bool,
    normalize: bool,
    num_groups: int,
    topk_groups: int,
    best_of_group: bool,
    scale: float,
    min_sum: float,
    sum_eps: float,
) -> _Outputs:
    return _empty_outputs(logits_TE, k)


@fake_of(router_topk_backward_op)
def _(
    logits_TE: torch.Tensor,
    ids_TK: torch.Tensor,
    grad_weights_TK: torch.Tensor,
    grad_prob_sum_E: torch.Tensor,
    grad_z_sum: torch.Tensor,
    sigmoid: bool,
    normalize: bool,
    scale: float,
    min_sum: float,
    sum_eps: float,
) -> torch.Tensor:
    return logits_TE.new_empty(logits_TE.shape)


def _save(ctx: OpContext, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    logits_TE, _, _, _, ctx.sigmoid, ctx.normalize, _, _, _, *divisor = inputs
    ctx.scale, ctx.min_sum, ctx.sum_eps = divisor
    _, _, _, entropy_sum, ids_TK, counts_E = output
    ctx.mark_non_differentiable(ids_TK, counts_E, entropy_sum)
    ctx.save_for_backward(logits_TE, ids_TK)


def _differentiate(
    ctx: OpContext,
    grad_weights_TK: torch.Tensor,
    grad_prob_sum_E: torch.Tensor,
    grad_z_sum: torch.Tensor,
    *_: None,
) -> tuple[object, ...]:
    logits_TE, ids_TK = ctx.saved_tensors
    grad_logits_TE = router_topk_backward_op(
        logits_TE,
        ids_TK,
        grad_weights_TK,
        grad_prob_sum_E,
        grad_z_sum,
        sigmoid=ctx.sigmoid,
        normalize=ctx.normalize,
        scale=ctx.scale,
        min_sum=ctx.min_sum,
        sum_eps=ctx.sum_eps,
    )
    return gradients(router_topk_op, logits_TE=grad_logits_TE)


register_gradient(router_topk_op, _differentiate, _save)
# In the reference the sort makes the choice.
worth_saving("routing", torch.ops.moetrain.router_topk.default, torch.ops.aten.sort.stable)


@triton.jit
def _keys(score, col, C: tl.constexpr):
    """Return int64 keys ordered by score, then by lower column: a plain maximum breaks ties."""
    # + 0.0 turns -0.0 into 0.0; the xor orders negative floats as signed integers.
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (C - 1 - col).to(tl.int64)


@triton.jit
def _column(key, C: tl.constexpr):
    """Return the column that :func:`_keys` put into ``key``."""
    return (C - 1 - (key & 0xFFFFFFFF)).to(tl.int32)


@triton.jit
def _drop_groups(
    choice, is_expert, topk_groups, B: tl.constexpr, GP: tl.constexpr, MP: tl.constexpr,
    BEST: tl.constexpr,
):  # fmt: skip
    """Return ``choice`` [B, GP * MP] with -inf outside each row's best ``topk_groups`` groups."""
    member = tl.arange(0, MP)
    group = tl.arange(0, GP)
    keys = tl.where(is_expert, _keys(choice, tl.arange(0, GP * MP)[None, :] % MP, MP), _TAKEN)
    keys = tl.reshape(keys, (B, GP, MP))
    best = tl.max(keys, axis=2)
    values = tl.reshape(choice, (B, GP, MP))
    is_best = member[None, None, :] == _column(best, MP)[:, :, None]
    score = tl.sum(tl.where(is_best, values, 0.0), axis=2)
    if not BEST:
        rest = tl.where(keys == best[:, :, None], _TAKEN, keys)
        second = tl.max(rest, axis=2)
        is_second = member[None, None, :] == _column(second, MP)[:, :, None]
        # A group of one expert has no second, a padding group nothing at all.
        score += tl.where(
            second == _TAKEN,
            0.0,
            tl.sum(tl.where(is_second & ~is_best, values, 0.0), axis=2),
        )
    group_keys = tl.where(best == _TAKEN, _TAKEN, _keys(score, group[None, :], GP))
    kept = tl.zeros((B, GP), tl.int32)
    for _ in range(topk_groups):
        hit = group_keys == tl.max(group_keys, axis=1)[:, None]
        kept = tl.where(hit, 1, kept)
        group_keys = tl.where(hit, _TAKEN, group_keys)
    values = tl.where(kept[:, :, None] != 0, values, float("-inf"))
    return tl.reshape(values, (B, GP * MP))


@triton.jit
def _sum_of_slots(weights, C: tl.constexpr, B: tl.constexpr, S: tl.constexpr):
    """Return the sum of each row's S weights.

    For 8 slots and 128 experts it is added up in pairs, ((0 + 1) + (4 + 5)) + ((2 + 3) + (6 + 7)),
    so that its order does not depend on the compiler's layout.
    """
    if C == 128 and S == 8:
        pairs = tl.sum(tl.reshape(weights, (B, 4, 2)), axis=2)
        return tl.sum(tl.sum(tl.reshape(pairs, (B, 2, 2)), axis=1), axis=1)
    return tl.sum(weights, axis=1)


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, is_pad_ptr, ids_ptr, weights_ptr, counts_ptr, sums_ptr, z_ptr,
    entropy_ptr, T, topk_groups, scale, min_sum, sum_eps,
    K: tl.constexpr, E: tl.constexpr, G: tl.constexpr, M: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, DROP_GROUPS: tl.constexpr,
    BEST: tl.constexpr, B: tl.constexpr, GP: tl.constexpr, MP: tl.constexpr, S: tl.constexpr,
    ALONE: tl.constexpr,
):  # fmt: skip
    """Route tiles of B tokens; a program takes every num_programs-th tile.

    ``sums`` [P, E + 2] has each program's sums of p, then of z and entropy. A program that is alone
    stores them as results.
    """
    C: tl.constexpr = GP * MP
    program = tl.program_id(0)
    col = tl.arange(0, C)
    slot = tl.arange(0, S)
    expert = col // MP * M + col % MP
    is_expert = ((col // MP < G) & (col % MP < M))[None, :]
    counts = tl.zeros((B, C), tl.int32)
    prob_sums = tl.zeros((B, C), tl.float32)
    z_sums = tl.zeros((B,), tl.float32)
    entropy_sums = tl.zeros((B,), tl.float32)
    for start in range(program * B, T, tl.num_programs(0) * B):
        row = start + tl.arange(0, B)
        in_range = row < T
        # Rows past the end repeat the last one and are left out of every store and sum.
        row = tl.minimum(row, T - 1).to(tl.int64)
        row_ptr = logits_ptr + row * E
        logits = tl.load(row_ptr[:, None] + expert[None, :], mask=is_expert, other=float("-inf"))
        largest = tl.max(logits, axis=1)
        exps = tl.exp(logits - largest[:, None])
        total = tl.sum(exps, axis=1)
        probs = exps / total[:, None]
        lse = largest + tl.log(total)

        # 1. Choose: the K largest keys, one after the other.
        choice = tl.sigmoid(logits) if SIGMOID else probs
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + expert, mask=(col // MP < G) & (col % MP < M), other=0.0)
            choice += bias[None, :]
        if DROP_GROUPS:
            choice = _drop_groups(choice, is_expert, topk_groups, B, GP, MP, BEST)
        keys = tl.where(is_expert, _keys(choice, col[None, :], C), _TAKEN)
        ids = tl.zeros((B, S), tl.int32)
        for j in range(K):
            best = tl.max(keys, axis=1)
            keys = tl.where(keys == best[:, None], _TAKEN, keys)
            chosen = _column(best, C)
            ids = tl.where(slot[None, :] == j, (chosen // MP * M + chosen % MP)[:, None], ids)

        # 2. Weights of the chosen.
        in_slots = (slot < K)[None, :]
        picked = tl.load(row_ptr[:, None] + ids, mask=in_slots, other=float("-inf"))
        weights = tl.exp(picked - largest[:, None]) / total[:, None]
        if SIGMOID:
            weights = tl.sigmoid(picked)
        if NORMALIZE:
            divisor = tl.maximum(_sum_of_slots(weights, C, B, S), min_sum) + sum_eps
            weights = weights / divisor[:, None]
        is_counted = in_range
        if is_pad_ptr is not None:
            is_pad = tl.load(is_pad_ptr + row) != 0
            ids = tl.where(is_pad[:, None], -1, ids)
            weights = tl.where(is_pad[:, None], 0.0, weights)
            is_counted = in_range & (is_pad == 0)
        slot_index = row[:, None] * K + slot[None, :]
        tl.store(ids_ptr + slot_index, ids, mask=in_range[:, None] & in_slots)
        tl.store(weights_ptr + slot_index, weights * scale, mask=in_range[:, None] & in_slots)

        # 3. Statistics. A chosen expert's key is _TAKEN.
        counted = is_counted[:, None] & is_expert
        counts += (counted & (keys == _TAKEN)).to(tl.int32)
        prob_sums += tl.where(counted, probs, 0.0)
        z_sums += tl.where(is_counted, lse * lse, 0.0)
        # sum of -p log p = lse - sum of p * logit
        mean = tl.sum(tl.where(is_expert, probs * logits, 0.0), axis=1)
        entropy_sums += tl.where(is_counted, lse - mean, 0.0)

    columns = (col // MP < G) & (col % MP < M)
    tl.store(counts_ptr + program * E + expert, tl.sum(counts, axis=0), mask=columns)
    sums_ptr += program * (E + 2)
    tl.store(sums_ptr + expert, tl.sum(prob_sums, axis=0), mask=columns)
    tl.store(z_ptr if ALONE else sums_ptr + E, tl.sum(z_sums, axis=0))
    tl.store(entropy_ptr if ALONE else sums_ptr + E + 1, tl.sum(entropy_sums, axis=0))


@triton.jit
def _sum_programs_kernel(
    counts_in_ptr, sums_in_ptr, counts_ptr, prob_sum_ptr, z_sum_ptr, entropy_sum_ptr,
    P, E: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add the programs' partial sums, always in the same order."""
    col = tl.program_id(0) * C + tl.arange(0, C)
    counts = tl.zeros((B, C), tl.int32)
    sums = tl.zeros((B, C), tl.float32)
    for start in range(0, P, B):
        row = start + tl.arange(0, B)[:, None]
        counts += tl.load(
            counts_in_ptr + row * E + col[None, :], mask=(row < P) & (col < E)[None, :], other=0
        )
        sums += tl.load(
            sums_in_ptr + row * (E + 2) + col[None, :],
            mask=(row < P) & (col < E + 2)[None, :],
            other=0.0,
        )
    total = tl.sum(sums, axis=0)
    tl.store(counts_ptr + col, tl.sum(counts, axis=0), mask=col < E)
    tl.store(prob_sum_ptr + col, total, mask=col < E)
    tl.store(z_sum_ptr + col * 0, total, mask=col == E)
    tl.store(entropy_sum_ptr + col * 0, total, mask=col == E + 1)


@triton.jit
def _route_backward_kernel(
    logits_ptr, ids_ptr, grad_weights_ptr, grad_prob_sum_ptr, grad_z_sum_ptr, grad_logits_ptr,
    T, scale, min_sum, sum_eps,
    K: tl.constexpr, E: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    B: tl.constexpr, C: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Compute dlogits from the gradients ds of scores, dp of the sum of probabilities, dz of z.

    softmax: ds is added to dp;  dlogits = p * (dp - sum(p * dp)) + 2 * dz * lse * p
    sigmoid: s * (1 - s) * ds is added to dlogits
    """
    row = tl.program_id(0) * B + tl.arange(0, B)
    in_range = row < T
    row = tl.minimum(row, T - 1).to(tl.int64)
    col = tl.arange(0, C)
    slot = tl.arange(0, S)
    in_slots = (slot < K)[None, :]
    row_ptr = logits_ptr + row * E
    logits = tl.load(row_ptr[:, None] + col[None, :], mask=(col < E)[None, :], other=float("-inf"))
    largest = tl.max(logits, axis=1)
    exps = tl.exp(logits - largest[:, None])
    total = tl.sum(exps, axis=1)
    probs = exps / total[:, None]
    lse = largest + tl.log(total)

    slot_index = row[:, None] * K + slot[None, :]
    ids = tl.load(ids_ptr + slot_index, mask=in_slots, other=-1)
    is_pad = tl.max(ids, axis=1) < 0
    grad = tl.load(grad_weights_ptr + slot_index, mask=in_slots, other=0.0) * scale
    picked = tl.load(row_ptr[:, None] + ids, mask=ids >= 0, other=float("-inf"))
    scores = tl.exp(picked - largest[:, None]) / total[:, None]
    if SIGMOID:
        scores = tl.sigmoid(picked)
    if NORMALIZE:
        sum_chosen = tl.sum(scores, axis=1)[:, None]
        divisor = tl.maximum(sum_chosen, min_sum) + sum_eps
        through_sum = tl.sum(grad * scores, axis=1)[:, None] / divisor
        grad = (grad - tl.where(sum_chosen >= min_sum, through_sum, 0.0)) / divisor
    if SIGMOID:
        grad = grad * scores * (1.0 - scores)

    # Slots to columns, one slot at a time: a token's ids differ, so nothing is added twice.
    spread = tl.zeros((B, C), tl.float32)
    for j in range(K):
        is_slot = slot[None, :] == j
        id_j = tl.sum(tl.where(is_slot, ids, 0), axis=1)
        grad_j = tl.sum(tl.where(is_slot, grad, 0.0), axis=1)
        spread = tl.where(col[None, :] == id_j[:, None], grad_j[:, None], spread)

    grad_probs = tl.load(grad_prob_sum_ptr + col, mask=col < E, other=0.0)[None, :]
    if not SIGMOID:
        grad_probs += spread
    mean = tl.sum(probs * grad_probs, axis=1)
    grad_lse = 2.0 * tl.load(grad_z_sum_ptr) * lse
    grad_logits = probs * (grad_probs + (grad_lse - mean)[:, None])
    if SIGMOID:
        grad_logits += spread
    grad_logits = tl.where(is_pad[:, None], 0.0, grad_logits)
    tl.store(
        grad_logits_ptr + row[:, None] * E + col[None, :],
        grad_logits,
        mask=in_range[:, None] & (col < E)[None, :],
    )
