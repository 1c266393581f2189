"""Logits of a chunk of tokens over (a part of) the vocabulary: the loss's parts, and sampling.

A chunk of a loss takes two calls. ``_chunk_stats`` multiplies h by w^T and gives each token's
(lse, target logit, mean) of logits = scale * h @ w^T, with p = exp(logits - lse) and mean =
sum(p * logits). It can also store exp(logit - largest logit of the row's tile), which
``_chunk_logit_grads`` replaces, in place, by the gradient of the logits.

Exponentials are stored in h's dtype, maxima and sums in fp32. In bf16 the error of an exponential
is relative to itself. If logits were stored, rounding one of 20 could change its p by 6 %.

With a softcap c > 0 (Gemma, arXiv 2408.00118) the product z = h @ w^T is replaced by
``c * tanh(z / c)``, and the gradient of z is that of the logits times 1 - tanh(z / c)^2.

If the vocabulary is split over ranks, the statistics of its parts are joined between the two calls.
A target outside [0, V) has no logit here: its target logit is 0. Two parts a and b join by
lse = logaddexp(lse_a, lse_b), target logit = the sum of both, mean = the sum of
exp(lse_i - lse) * mean_i. The second call then takes the joined statistics.

:func:`sample_tokens` draws the next token in the same product, by the Gumbel-max trick::

    chosen = argmax over v of  logit[v] / temperature + noise[v]     (no noise at temperature 0)

The noise is that of :mod:`moetrain.kernels.vocabulary.gumbel`.

Worked example, one token, V=3 in tiles of 2, logits [0, ln 2, ln 3]: the tiles' largest are
[ln 2, ln 3], their exponentials [1/2, 1] and [1], their sums [3/2, 1]; so lse = ln(2 * 3/2 + 3 * 1)
= ln 6, and p = [1/2, 1, 1] * [2, 2, 3] / 6 = [1/6, 1/3, 1/2].

Legend: T tokens, C tokens of the chunk, D model width, V vocabulary, N vocabulary tiles (in
sampling: rows).
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from moetrain.kernels.vocabulary.gumbel import gumbel_argmax, tl_gumbel
from moetrain.runtime.backend import (
    INTERPRETED,
    Backend,
    TensorDescriptor,
    refusal,
    tl,
    triton,
    use_fast,
)

_ALIGNMENT_BYTES = 16
"""Alignment of rows that tensor descriptors (Hopper's bulk copies) read and write."""
CHUNK_ELEMENTS = 4096 * 151_936
"""Logits of a chunk: 4096 tokens of a vocabulary of 151,936, 1.24 GB in bf16."""


class _VocabTile(NamedTuple):
    """Launch settings of the product."""

    tokens: int
    columns: int
    """Rows of w, which are columns of the logits."""
    depth: int
    """Columns of h and w that are multiplied at a time."""
    num_warps: int
    num_stages: int


# bf16 on one H200: the fastest of those tried, 3.7 ms for 4096 tokens x 2048 x 151,936
# (docs/log/loss.md).
_TILES = {
    torch.bfloat16: _VocabTile(256, 128, 64, num_warps=8, num_stages=3),
    # For tests: a small tile, which compiles fast.
    torch.float32: _VocabTile(64, 64, 32, num_warps=4, num_stages=2),
}
# For sampling, where rows are few: 64 take 0.2 ms, 256 take 0.45. Tiles have as many columns as
# above, and a warp has whole rows, so that a row's sums are added up in the same order.
_SAMPLING_TILES = {
    torch.bfloat16: _VocabTile(64, 128, 64, num_warps=4, num_stages=4),
    torch.float32: _TILES[torch.float32],
}
_STATS_TOKENS, _STATS_TILES = 8, 256  # that a program of the stats kernel reads at a time
_GRAD_TILES = 16  # tiles of one row that a program of the gradient kernel takes
# Inside the kernels logits are in units of ln 2: the hardware's exponential is that of base 2.
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


class ChunkStats(NamedTuple):
    """Statistics of each token's scaled logits over the vocabulary that ``w`` holds, fp32."""

    lse_C: torch.Tensor
    target_logit_C: torch.Tensor
    """Zero where the target is outside that vocabulary."""
    mean_C: torch.Tensor
    """The mean of the logits under p."""

    @classmethod
    def empty(cls, h_TD: torch.Tensor) -> "ChunkStats":
        """Return uninitialised statistics for all tokens, with target logits of zero."""
        lse_T = h_TD.new_empty(h_TD.shape[0], dtype=torch.float32)
        return cls(lse_T, torch.zeros_like(lse_T), torch.empty_like(lse_T))


class LossGrads(NamedTuple):
    """Upstream gradients of each token's results, fp32; None: zeros."""

    loss_C: torch.Tensor
    lse_C: torch.Tensor | None = None
    mean_C: torch.Tensor | None = None


def _check_fast(h_TD: torch.Tensor, w_VD: torch.Tensor) -> None:
    are_aligned = h_TD.shape[1] * h_TD.element_size() % _ALIGNMENT_BYTES == 0
    are_rows = are_aligned and h_TD.is_contiguous() and w_VD.is_contiguous()
    if not are_rows or h_TD.dtype != w_VD.dtype or h_TD.dtype not in _TILES:
        rows = f"contiguous rows of a multiple of {_ALIGNMENT_BYTES} bytes"
        takes = f"{rows}, both in bf16 or both in fp32"
        raise refusal("the loss's fast path", takes, h=h_TD, w=w_VD)


class _Draws(NamedTuple):
    """The tensors of sampling."""

    keys_C: torch.Tensor
    inverse_temperatures_C: torch.Tensor
    scales_C: torch.Tensor
    score_NC: torch.Tensor
    """Written: the largest score of each tile."""
    token_NC: torch.Tensor
    """Written: the token that has it."""
    logit_NC: torch.Tensor
    """Written: the logit of that token."""


def _chunk_stats(
    h_CD: torch.Tensor,
    w_VD: torch.Tensor,
    tile: _VocabTile,
    stats: ChunkStats,
    scale: float = 1.0,
    *,
    targets_C: torch.Tensor | None = None,
    exps_CV: torch.Tensor | None = None,
    draws: _Draws | None = None,
    known: int | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Fill ``stats`` and, unless None, ``exps_CV``; return tiles' largest logits / ln 2, [N, C].

    ``stats.target_logit_C`` must be zeros. With ``draws`` there are no targets, and a token is
    drawn from each tile among the first ``known`` of the vocabulary.
    """
    C, D = h_CD.shape
    V = w_VD.shape[0]
    N = triton.cdiv(V, tile.columns)
    largest_NC, total_NC, weighted_NC = h_CD.new_empty((3, N, C), dtype=torch.float32)
    store = exps_CV is not None
    _product_kernel[(triton.cdiv(C, tile.tokens) * N,)](
        TensorDescriptor.from_tensor(h_CD, [tile.tokens, tile.depth]),
        TensorDescriptor.from_tensor(w_VD, [tile.columns, tile.depth]),
        TensorDescriptor.from_tensor(exps_CV, [tile.tokens, tile.columns]) if store else None,
        targets_C,
        largest_NC,
        total_NC,
        weighted_NC,
        None if targets_C is None else stats.target_logit_C,
        None if draws is None else draws.keys_C,
        None if draws is None else draws.inverse_temperatures_C,
        None if draws is None else draws.scales_C,
        None if draws is None else draws.score_NC,
        None if draws is None else draws.token_NC,
        None if draws is None else draws.logit_NC,
        C,
        V,
        V if known is None else known,
        D,
        scale,
        BC=tile.tokens,
        BV=tile.columns,
        BD=tile.depth,
        STORE=store,
        IN_FP32=INTERPRETED,
        CAP=softcap,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    _stats_kernel[(triton.cdiv(C, _STATS_TOKENS),)](
        largest_NC,
        total_NC,
        weighted_NC,
        stats.lse_C,
        stats.mean_C,
        C,
        N,
        BN=_STATS_TILES,
        BC=_STATS_TOKENS,
    )
    return largest_NC


def _chunk_logit_grads(
    exps_CV: torch.Tensor,
    largest_NC: torch.Tensor,
    targets_C: torch.Tensor,
    stats: ChunkStats,
    grads: LossGrads,
    scale: float,
    softcap: float,
) -> None:
    """Replace ``exps_CV`` by the gradient in ``h @ w^T``.

    It is the gradient of the sum of
    ``grads.loss * loss + grads.lse * lse + grads.mean * mean``.
    """
    C, V = exps_CV.shape
    tile_columns = _TILES[exps_CV.dtype].columns
    _logit_grad_kernel[(C, triton.cdiv(V, tile_columns * _GRAD_TILES))](
        exps_CV,
        largest_NC,
        targets_C,
        stats.lse_C,
        stats.mean_C,
        stats.target_logit_C,
        grads.loss_C,
        grads.lse_C,
        grads.mean_C,
        C,
        V,
        exps_CV.stride(0),
        scale,
        BV=tile_columns,
        BN=_GRAD_TILES,
        CAP=softcap,
    )


def _chunks(h_TD: torch.Tensor, columns: int, chunk_elements: int) -> list[slice]:
    """Cut the tokens into equal chunks of whole tiles, each of about ``chunk_elements`` logits.

    A token has ``columns`` logits.
    """
    T = h_TD.shape[0]
    multiple = _TILES[h_TD.dtype].tokens
    num_chunks = max(1, triton.cdiv(T * columns, chunk_elements))
    step = max(1, triton.cdiv(T, num_chunks * multiple)) * multiple
    return [slice(i, min(i + step, T)) for i in range(0, T, step)]


def token_stats(
    h_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    scale: float,
    chunk_elements: int = CHUNK_ELEMENTS,
    softcap: float = 0.0,
) -> ChunkStats:
    """Return the statistics of all tokens over the vocabulary in ``w``; a fast path, not an op."""
    _check_fast(h_TD, w_VD)
    stats = ChunkStats.empty(h_TD)
    for c in _chunks(h_TD, w_VD.shape[0], chunk_elements):
        stats_C = ChunkStats(*(x[c] for x in stats))
        tile = _TILES[h_TD.dtype]
        _chunk_stats(h_TD[c], w_VD, tile, stats_C, scale, targets_C=targets_T[c], softcap=softcap)
    return stats


class _Exponentials(NamedTuple):
    """The exponentials of a chunk of tokens."""

    tokens: slice
    stats: ChunkStats
    exps_CV: torch.Tensor
    """exp(logit - largest logit of the row's tile); the next chunk overwrites it."""
    largest_NC: torch.Tensor
    """Tiles' largest logits / ln 2."""
    tile: int
    """Columns of a tile."""


def exponentials(
    h_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    stats: ChunkStats,
    scale: float,
    chunk_elements: int = CHUNK_ELEMENTS,
    join: Callable[[ChunkStats], None] = lambda stats: None,
    columns: int | None = None,
    *,
    multiple: int = 1,
    softcap: float = 0.0,
) -> Iterator[_Exponentials]:
    """Walk the tokens in chunks, and fill ``stats``, which is ``ChunkStats.empty``.

    Args:
        multiple: rows of the exponentials begin at multiples of so many elements, and of 16 bytes.

    The other arguments are those of :func:`loss_gradients`.
    """
    _check_fast(h_TD, w_VD)
    V = w_VD.shape[0]
    chunks = _chunks(h_TD, V if columns is None else columns, chunk_elements)
    rows = max((c.stop - c.start for c in chunks), default=0)
    multiple = max(multiple, _ALIGNMENT_BYTES // h_TD.element_size())
    buffer_CV = h_TD.new_empty((rows, triton.cdiv(V, multiple) * multiple))[:, :V]
    tile = _TILES[h_TD.dtype]
    for c in chunks:
        exps_CV = buffer_CV[: c.stop - c.start]
        stats_C = ChunkStats(*(x[c] for x in stats))
        largest_NC = _chunk_stats(
            h_TD[c],
            w_VD,
            tile,
            stats_C,
            scale,
            targets_C=targets_T[c],
            exps_CV=exps_CV,
            softcap=softcap,
        )
        join(stats_C)
        yield _Exponentials(c, stats_C, exps_CV, largest_NC, tile.columns)


def loss_gradients(
    h_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    grads: LossGrads,
    scale: float,
    chunk_elements: int = CHUNK_ELEMENTS,
    join: Callable[[ChunkStats], None] = lambda stats: None,
    columns: int | None = None,
    *,
    is_trained: bool = True,
    softcap: float = 0.0,
) -> tuple[ChunkStats, torch.Tensor, torch.Tensor]:
    """Return all tokens' statistics and the gradients of h and w; a fast path, not an op.

    Args:
        grads: the upstream gradients.
        chunk_elements: about so many logits exist at once.
        join: called with each chunk's statistics. If ranks share the vocabulary, it replaces those
            over ``w``'s part by those over the whole, in place. The gradient of h is then only the
            term that comes from ``w``'s part.
        columns: the number of logits of a token for which chunks are cut. Ranks that share the
            vocabulary must cut the same chunks, so they give the most rows that any of them holds.
            None: ``w``'s rows.
        is_trained: False: the gradient of w is empty.
    """
    stats = ChunkStats.empty(h_TD)
    grad_h_TD = torch.empty_like(h_TD)
    grad_w_VD = w_VD.new_empty(0)
    if is_trained:
        grad_w_VD = torch.empty_like(w_VD) if len(h_TD) else torch.zeros_like(w_VD)
    chunks = exponentials(
        h_TD, w_VD, targets_T, stats, scale, chunk_elements, join, columns, softcap=softcap
    )
    for chunk in chunks:
        c = chunk.tokens
        grads_C = LossGrads(
            loss_C=grads.loss_C[c],
            lse_C=None if grads.lse_C is None else grads.lse_C[c],
            mean_C=None if grads.mean_C is None else grads.mean_C[c],
        )
        d_logits_CV = chunk.exps_CV
        _chunk_logit_grads(
            d_logits_CV, chunk.largest_NC, targets_T[c], chunk.stats, grads_C, scale, softcap
        )
        torch.mm(d_logits_CV, w_VD, out=grad_h_TD[c])
        if is_trained:  # for the first chunk beta is 0: the buffer is uninitialised
            grad_w_VD.addmm_(d_logits_CV.T, h_TD[c], beta=min(c.start, 1))
    return stats, grad_h_TD, grad_w_VD


@triton.jit(do_not_specialize=["C", "known"])  # it changes with every call
def _product_kernel(
    h_desc, w_desc, exps_desc, targets_ptr,
    largest_ptr, total_ptr, weighted_ptr, target_logit_ptr,
    keys_ptr, inverse_ptr, scale_ptr, score_ptr, chosen_ptr, chosen_logit_ptr,
    C, V, known, D, scale,
    BC: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr,
    STORE: tl.constexpr, IN_FP32: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Compute one tile of logits = scale / ln 2 * h @ w^T; CAP > 0 caps the products.

    With x = logit - the largest of its row here, it writes 2^x [C, V] if STORE, sum(2^x) and
    sum(2^x * x) [N, C], and the target's logit (in nats) if the target is here.

    With keys (:func:`sample_tokens`) each row has a scale of its own. In place of a target's logit
    it then writes the largest score, the token that has it, and that token's logit, all [N, C].

    Programs that share columns of w follow one another, so w is read once.
    """
    token_tiles = tl.cdiv(C, BC)
    first_row = tl.program_id(0) % token_tiles * BC
    tile = tl.program_id(0) // token_tiles
    products = tl.zeros((BC, BV), tl.float32)
    for k in range(0, D, BD):
        h = h_desc.load([first_row, k])
        w = w_desc.load([tile * BV, k])
        if IN_FP32:  # Triton's interpreter would multiply bf16 as integers
            h, w = h.to(tl.float32), w.to(tl.float32)
        products = tl.dot(h, w.T, products, input_precision="ieee")
    if CAP > 0:
        products = _tl_tanh(products * (1 / CAP)) * CAP
    row = first_row + tl.arange(0, BC)
    col = tile * BV + tl.arange(0, BV)
    if tile * BV + BV > V:
        # Past the vocabulary: far below any logit, yet finite, so that 2^x * x is 0.
        products = tl.where((col < V)[None, :], products, -1e30)
    in_chunk = row < C
    if keys_ptr is None:
        scale = tl.full((), scale, tl.float32) * _LOG2_E  # in the interpreter it is fp64
        largest = tl.max(products, axis=1) * scale
        x = products * scale - largest[:, None]
    else:
        scales = tl.load(scale_ptr + row, mask=in_chunk, other=1.0) * _LOG2_E
        largest = tl.max(products, axis=1) * scales
        x = products * scales[:, None] - largest[:, None]
    exps = tl.exp2(x)
    if STORE:
        exps_desc.store([first_row, tile * BV], exps.to(exps_desc.dtype))
    tile_row = tile.to(tl.int64) * C + row
    tl.store(largest_ptr + tile_row, largest, mask=in_chunk)
    tl.store(total_ptr + tile_row, tl.sum(exps, axis=1), mask=in_chunk)
    tl.store(weighted_ptr + tile_row, tl.sum(exps * x, axis=1), mask=in_chunk)
    if keys_ptr is not None:
        inverse = tl.load(inverse_ptr + row, mask=in_chunk, other=0.0)[:, None]
        noise = tl_gumbel(tl.load(keys_ptr + row, mask=in_chunk, other=0)[:, None], col[None, :])
        # An inverse temperature of 0 stands for the likeliest token.
        score = tl.where(inverse > 0, products * inverse + noise, products)
        # NaN scores count as -inf, so that even a row of NaN chooses a token of the vocabulary.
        score = tl.where((col < known)[None, :] & (score == score), score, float("-inf"))
        best = tl.argmax(score, axis=1)
        tl.store(score_ptr + tile_row, tl.max(score, axis=1), mask=in_chunk)
        tl.store(chosen_ptr + tile_row, tile * BV + best, mask=in_chunk)
        chosen_x = tl.sum(tl.where(tl.arange(0, BV)[None, :] == best[:, None], x, 0.0), axis=1)
        tl.store(chosen_logit_ptr + tile_row, (chosen_x + largest) * _LN_2, mask=in_chunk)
    else:
        target = tl.load(targets_ptr + row, mask=in_chunk, other=-1).to(tl.int32)
        has_target = (target >= tile * BV) & (target < tl.minimum(tile * BV + BV, V))
        if tl.max(has_target.to(tl.int32), axis=0) > 0:  # few tiles hold one
            target_x = tl.sum(tl.where(col[None, :] == target[:, None], x, 0.0), axis=1)
            tl.store(target_logit_ptr + row, (target_x + largest) * _LN_2, mask=has_target)


@triton.jit(do_not_specialize=["C"])  # it changes with every call
def _stats_kernel(
    largest_ptr, total_ptr, weighted_ptr, lse_ptr, mean_ptr, C, N,
    BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Compute lse and mean of BC tokens from their N tiles' sums, with running maxima."""
    row = tl.program_id(0) * BC + tl.arange(0, BC)
    largest = tl.full((BC,), float("-inf"), tl.float32)
    total = tl.zeros((BC,), tl.float32)
    weighted = tl.zeros((BC,), tl.float32)
    for start in range(0, N, BN):
        tile = start + tl.arange(0, BN)
        # Repeats of the last token keep every lane finite; they are not stored.
        at = tile[:, None].to(tl.int64) * C + tl.minimum(row, C - 1)[None, :]
        mask = (tile < N)[:, None]
        tile_largest = tl.load(largest_ptr + at, mask=mask, other=float("-inf"))
        new_largest = tl.maximum(largest, tl.max(tile_largest, axis=0))
        shrink = tl.exp2(largest - new_largest)
        weighted = tl.where(total > 0, shrink * (weighted + total * (largest - new_largest)), 0.0)
        total = total * shrink
        shift = tl.where(mask, tile_largest - new_largest[None, :], 0.0)
        tile_total = tl.load(total_ptr + at, mask=mask, other=0.0) * tl.exp2(shift)
        tile_weighted = tl.load(weighted_ptr + at, mask=mask, other=0.0) * tl.exp2(shift)
        weighted += tl.sum(tile_weighted + tile_total * shift, axis=0)
        total += tl.sum(tile_total, axis=0)
        largest = new_largest
    tl.store(lse_ptr + row, (largest + tl.log2(total)) * _LN_2, mask=row < C)
    tl.store(mean_ptr + row, (largest + weighted / total) * _LN_2, mask=row < C)


@triton.jit
def _logit_grad_kernel(
    exps_ptr, largest_ptr, targets_ptr, lse_ptr, mean_ptr, target_logit_ptr,
    grad_loss_ptr, grad_lse_ptr, grad_mean_ptr,
    C, V, row_stride, scale, BV: tl.constexpr, BN: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Replace 2^x by the gradient of the logits, in place, for BN tiles of one row."""
    row = tl.program_id(0)
    tile = tl.program_id(1) * BN + tl.arange(0, BN)
    col = tile[:, None] * BV + tl.arange(0, BV)[None, :]
    exps_ptr += row.to(tl.int64) * row_stride + col
    exps = tl.load(exps_ptr, mask=col < V, other=0.0).to(tl.float32)
    largest = tl.load(largest_ptr + tile.to(tl.int64) * C + row, mask=tile * BV < V, other=0.0)
    lse = tl.load(lse_ptr + row)
    p = exps * tl.exp2(largest - lse * _LOG2_E)[:, None]
    grad_loss = tl.load(grad_loss_ptr + row)
    slope = grad_loss
    if grad_lse_ptr is not None:
        slope += tl.load(grad_lse_ptr + row)
    grad = p * slope
    is_target = col == tl.load(targets_ptr + row)
    if grad_mean_ptr is not None:
        # d mean / d logits = p * (1 + logits - mean)
        logits = _tl_logits(exps, largest)
        grad += p * (1.0 + logits - tl.load(mean_ptr + row)) * tl.load(grad_mean_ptr + row)
    grad -= tl.where(is_target, grad_loss, 0.0)
    if CAP > 0:
        target_logit = tl.load(target_logit_ptr + row)
        tanh = tl.where(is_target, target_logit, _tl_logits(exps, largest)) / (scale * CAP)
        grad *= 1.0 - tanh * tanh
    tl.store(exps_ptr, (grad * scale).to(exps_ptr.dtype.element_ty), mask=col < V)


@triton.jit
def _tl_logits(exps, largest):
    """Return the logits of these exponentials; 0 where 2^x is 0, since p is 0 there."""
    return tl.where(exps > 0, (tl.log2(exps) + largest[:, None]) * _LN_2, 0.0)


@triton.jit
def _tl_tanh(x):
    """Return tanh of fp32; near 0 by its series, where 1 - 2 / (e^2x + 1) would cancel."""
    square = x * x
    small = x * (1.0 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    return tl.where(square < 0.01, small, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


def soft_capped(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    """Return ``softcap * tanh(logits / softcap)``, or ``logits`` as they are for 0."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def sample_tokens(
    h_ND: torch.Tensor,
    w_VD: torch.Tensor,
    keys_N: torch.Tensor,
    inverse_temperatures_N: torch.Tensor,
    scales_N: torch.Tensor,
    known: int,
    backend: Backend = "auto",
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample each row's token (int64) and return its log-probability (fp32), without gradient.

    The log-probability has the same bits as that of a loss on the same device, at the temperature
    1 / the row's scale.

    Args:
        keys_N: int32, any bits; they determine the noise.
        inverse_temperatures_N: fp32; 0: temperature 0, the likeliest token.
        scales_N: fp32, above 0: 1 / the temperature of the log-probability.
        known: tokens from this id on are never chosen.
        softcap: caps logits first, see :func:`soft_capped`.
    """
    if not use_fast(backend, h_ND):
        logits_NV = soft_capped((h_ND @ w_VD.T).float(), softcap)
        chosen_N = gumbel_argmax(logits_NV[:, :known], keys_N, inverse_temperatures_N)
        scaled_NV = logits_NV * scales_N[:, None]
        return chosen_N, scaled_NV.gather(1, chosen_N[:, None])[:, 0] - scaled_NV.logsumexp(-1)
    _check_fast(h_ND, w_VD)
    C, tile = h_ND.shape[0], _SAMPLING_TILES[h_ND.dtype]
    N = triton.cdiv(w_VD.shape[0], tile.columns)
    score_NC, logit_NC = h_ND.new_empty((2, N, C), dtype=torch.float32)
    token_NC = h_ND.new_empty((N, C), dtype=torch.int32)
    chosen_C = h_ND.new_empty(C, dtype=torch.int64)
    stats = ChunkStats(*h_ND.new_empty((3, C), dtype=torch.float32))
    logprob_C = torch.empty_like(stats.lse_C)
    if C:
        draws = _Draws(keys_N, inverse_temperatures_N, scales_N, score_NC, token_NC, logit_NC)
        _chunk_stats(h_ND, w_VD, tile, stats, draws=draws, known=known, softcap=softcap)
        _best_kernel[(C,)](
            score_NC,
            token_NC,
            logit_NC,
            stats.lse_C,
            chosen_C,
            logprob_C,
            C,
            N,
            BLOCK=triton.next_power_of_2(N),
        )
    return chosen_C, logprob_C


@triton.jit(do_not_specialize=["C"])  # it changes with every call
def _best_kernel(
    score_ptr, token_ptr, logit_ptr, lse_ptr, chosen_ptr, logprob_ptr, C, N, BLOCK: tl.constexpr
):
    """Choose the tile with the largest score of a row's N tiles (the first of equals)."""
    row, tile = tl.program_id(0), tl.arange(0, BLOCK)
    score = tl.load(score_ptr + tile * C + row, mask=tile < N, other=float("-inf"))
    best = tl.argmax(score, axis=0)
    tl.store(chosen_ptr + row, tl.load(token_ptr + best * C + row).to(tl.int64))
    loss = tl.load(lse_ptr + row) - tl.load(logit_ptr + best * C + row)
    tl.store(logprob_ptr + row, -loss)
