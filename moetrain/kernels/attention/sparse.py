"""Attention of each token to keys of its own, within the latent (DeepSeek-V3.2, section 2.1).

All heads share one latent a token, which is key and value at once: multi-query attention. Its first
c elements are the value, and all c + r are the key. With S(t) the keys that are selected for token
t, and for each head::

    s[t, j] = scale q[t] . kv[j], j in S(t)     p[t, j] = exp(s[t, j] - lse[t])
    o[t] = sum over j of p[t, j] kv[j, :c]      delta[t] = do[t] . o[t]
    ds[t, j] = scale p[t, j] (do[t] . kv[j, :c] - delta[t])
    dq[t] = sum over j of ds[t, j] kv[j]
    dkv[j] = sum over heads and over tokens t with j in S(t) of ds[t, j] q[t] + [p[t, j] do[t] | 0]

Latent attention (:mod:`moetrain.models.parts.latent_attention`) takes this form by associativity:
``q_nope . (W c) = (W^T q_nope) . c``. Its keys need not be expanded, so that a token's own keys can
be gathered: 576 elements a key in DeepSeek-V3.2, where the expanded ones of all heads have 40,960.

Worked example, one head, c = 1, r = 1, scale 1: kv = [[1, 0], [3, 0], [5, 0]], a token with q = 0
and keys 0 and 2. Then p = 1/2 for both, and o = 3. For do = 1, dkv is 1/2 + ds q = 1/2 for both
keys, ds = 1/2 (1 - 3) = -1 and 1, and dq = [-1 * 1 + 1 * 5, 0] = [4, 0].

Forward and dq: a program takes some heads of one token, gathers the token's latents, some at a
time, and keeps running maxima and sums (arXiv 1805.02867).

dkv: many tokens select one key, and their terms must be added up in an order that does not change
from run to run. Tokens are taken in blocks of :data:`_TOKENS`. For each token and key of a block
the sum over heads is written to memory as one term. Then a program for each key adds the key's
terms in the order of their tokens. It finds them in an inverted index: each pair writes its place
into a table of keys and tokens, whose entries have one writer each, and each key's row of the table
is made a list. So a key that all tokens select has no more than :data:`_TOKENS` terms at a time,
and its sum is continued from block to block in fp32. No sum has an order that depends on timing.

Terms, p and ds are rounded to the inputs' dtype, as are the inputs of all products. Sums are fp32.

Left out on purpose: sinks, windows and a causal rule. The caller selects the keys. Integer atomics,
whose sums do not depend on an order either, would need a bound of the terms.

Legend: T tokens, L latents, H heads, K selected keys, c width of a value, r width of the rest of a
key (it rotates), w = c + r.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import Any, NamedTuple

import torch

from moetrain.kernels.attention.sparse_kernels import (
    forward_kernel,
    lists_kernel,
    query_gradients_kernel,
    sums_kernel,
    terms_kernel,
)
from moetrain.runtime.backend import (
    Backend,
    gradients,
    refusal,
    require_contiguous,
    triton,
    use_fast,
    worth_saving,
)
from moetrain.runtime.typed import OpContext

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TOKENS = 256
"""Tokens whose terms of dkv are in memory at once: 0.6 GB for 2,048 keys of width 576 in bf16."""
_MOST_HEADS = 256
"""The most heads whose terms one program can add up."""


def sparse_attention(
    q_THw: torch.Tensor,
    kv_Lw: torch.Tensor,
    keys_TK: torch.Tensor,
    scale: float,
    value_dim: int,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Attend to the selected keys: ``o_THc`` in ``q``'s dtype; ``q`` and ``kv`` get gradients.

    A token without any key gets zeros. The results, and all gradients, have the same bits in every
    run.

    Args:
        q_THw, kv_Lw: one dtype, contiguous.
        keys_TK: int32, the selected keys, each at most once a token; -1: none. They are not checked
            on a GPU, where a key outside of the L latents reads memory outside of ``kv_Lw``.
        scale: the factor of the scores.
        value_dim: c. The kernels take widths c and r that are powers of two and at least 16.

    Raises ValueError: shapes, dtypes, widths or strides do not fit.
    """
    (T, H, w), K = q_THw.shape, keys_TK.shape[-1]
    if kv_Lw.dim() != 2 or kv_Lw.shape[1] != w or keys_TK.shape != (T, K) or value_dim > w:
        takes = "[T, H, w], [L, w] and [T, K], and values of at most w elements"
        raise refusal(
            "sparse_attention", takes, q=q_THw, kv=kv_Lw, keys=keys_TK, value_dim=value_dim
        )
    if q_THw.dtype != kv_Lw.dtype or keys_TK.dtype != torch.int32:
        takes = "queries and latents in one dtype, and keys in int32"
        raise refusal("sparse_attention", takes, q=q_THw, kv=kv_Lw, keys=keys_TK)
    if not use_fast(backend, q_THw):
        return _reference(q_THw, kv_Lw, keys_TK, scale, value_dim)
    if not fits_kernels(q_THw.dtype, H, value_dim, w - value_dim):
        takes = (
            "bf16, fp16 or fp32, widths of values and of the rest that are powers of two from 16, "
            f"and at most {_MOST_HEADS} heads"
        )
        raise refusal("sparse_attention", takes, q=q_THw, value_dim=value_dim)
    require_contiguous("sparse_attention", q=q_THw, kv=kv_Lw, keys=keys_TK)
    return sparse_attention_op(q_THw, kv_Lw, keys_TK, scale, value_dim)[0]


def fits_kernels(dtype: torch.dtype, num_heads: int, value_dim: int, rest: int) -> bool:
    """Return True if the kernels take ``num_heads`` heads of these widths, c and r."""
    widths = all(x >= 16 and x & (x - 1) == 0 for x in (value_dim, rest))
    return dtype in _DTYPES and widths and num_heads <= _MOST_HEADS


def scratch_bytes(
    tokens: int, keys: int, heads: float, topk: int, width: int, itemsize: int
) -> float:
    """Return the bytes that the backward takes beside its inputs and results."""
    terms = itemsize * min(_TOKENS, tokens) * topk * (width + 2 * heads)
    index, sums = 2 * 4 * _TOKENS * keys, 4 * width * keys
    return terms + index + sums


def _reference(
    q_THw: torch.Tensor, kv_Lw: torch.Tensor, keys_TK: torch.Tensor, scale: float, value_dim: int
) -> torch.Tensor:
    """Gather each token's latents, in plain torch. Places without a key get a latent of zeros."""
    wide = torch.promote_types(q_THw.dtype, torch.float32)
    is_key_T1K = (keys_TK >= 0)[:, None]
    padded_Lw = torch.cat((kv_Lw, kv_Lw.new_zeros(1, kv_Lw.shape[1]))).to(wide)
    kv_TKw = padded_Lw[keys_TK.long().where(keys_TK >= 0, kv_Lw.shape[0])]
    scores_THK = (q_THw.to(wide) @ kv_TKw.mT) * scale
    # The scores of a token without any key stay equal, since a softmax needs finite ones.
    scores_THK = scores_THK.masked_fill(~is_key_T1K & is_key_T1K.any(-1, True), -torch.inf)
    return (scores_THK.softmax(-1) @ kv_TKw[..., :value_dim]).to(q_THw.dtype)


class _Launch(NamedTuple):
    """Launch settings of a kernel."""

    warps: int
    stages: int
    heads: int = 0
    """Heads of a program, at most."""
    keys: int = 0
    """Selected keys at a time."""
    columns: int = 0
    """Columns of the values at a time, at most."""

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


class _Launches(NamedTuple):
    forward: _Launch
    queries: _Launch
    terms: _Launch


# No others have been tried. The shared memory of these tiles (217, 212 and 72 KiB) and their
# registers suffice on sm_90 by Triton 3.6, for widths of 512 + 64. Latents are prefetched only with
# three stages, since their addresses are loaded, too.
_NARROW = _Launches(
    forward=_Launch(8, 3, heads=64, keys=64),
    queries=_Launch(8, 3, heads=64, keys=32, columns=64),
    terms=_Launch(4, 2, keys=128, columns=64),
)
_FP32 = _Launches(
    forward=_Launch(8, 1, heads=16, keys=16),
    queries=_Launch(8, 1, heads=16, keys=16, columns=64),
    terms=_Launch(8, 1, keys=16, columns=32),
)
_LISTS, _SUMS, _SUMMED = _Launch(1, 1), _Launch(4, 1), 8
"""The sum of a key takes this many terms at a time."""


class _Sizes(NamedTuple):
    """The sizes of one call."""

    T: int
    L: int
    H: int
    K: int
    c: int
    r: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls, q_THw: torch.Tensor, kv_Lw: torch.Tensor, keys_TK: torch.Tensor, value_dim: int
    ) -> "_Sizes":
        T, H, w = q_THw.shape
        return cls(T, kv_Lw.shape[0], H, keys_TK.shape[1], value_dim, w - value_dim, q_THw.dtype)

    @property
    def launches(self) -> _Launches:
        return _FP32 if self.dtype == torch.float32 else _NARROW

    @property
    def constants(self) -> dict[str, Any]:
        """Return the arguments that kernels of a token are compiled for."""
        # With fp32 inputs the products' error must be below the inputs' own.
        precision = "tf32x3" if self.dtype == torch.float32 else "tf32"
        places = triton.next_power_of_2(self.K)
        sizes = {"H": self.H, "K": self.K, "C": self.c, "R": self.r}
        return {**sizes, "PRECISION": precision, "PLACES": places}

    @property
    def heads(self) -> int:
        """H as a power of two, at least 16, the fewest rows of a product."""
        return max(16, triton.next_power_of_2(self.H))

    def of_heads(self, launch: _Launch) -> tuple[int, dict[str, int]]:
        """Return how many programs take a token's heads, and their arguments."""
        heads = min(launch.heads, self.heads)
        own = {"BH": heads, "BK": launch.keys}
        if launch.columns:
            own["BC"] = min(launch.columns, self.c)
        return triton.cdiv(self.H, heads), {**own, **launch.options}

    @property
    def is_empty(self) -> bool:
        return 0 in (self.T, self.L, self.H, self.K)


@torch.library.custom_op("moetrain::sparse_attention", mutates_args=())
def sparse_attention_op(
    q_THw: torch.Tensor,
    kv_Lw: torch.Tensor,
    keys_TK: torch.Tensor,
    scale: float,
    value_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``o_THc`` and ``lse_TH`` (fp32; -inf for a token without keys)."""
    sizes = _Sizes.of(q_THw, kv_Lw, keys_TK, value_dim)
    out_THc = q_THw.new_empty(sizes.T, sizes.H, sizes.c)
    lse_TH = q_THw.new_empty(sizes.T, sizes.H, dtype=torch.float32)
    if sizes.is_empty:
        return out_THc.zero_(), lse_TH.fill_(-torch.inf)
    blocks, launched = sizes.of_heads(sizes.launches.forward)
    forward_kernel[(sizes.T * blocks,)](
        q_THw, kv_Lw, keys_TK, out_THc, lse_TH, scale, **sizes.constants, **launched
    )
    return out_THc, lse_TH


@sparse_attention_op.register_fake
def _(
    q_THw: torch.Tensor,
    kv_Lw: torch.Tensor,
    keys_TK: torch.Tensor,
    scale: float,
    value_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    T, H, _ = q_THw.shape
    return q_THw.new_empty(T, H, value_dim), q_THw.new_empty(T, H, dtype=torch.float32)


worth_saving("attention", torch.ops.moetrain.sparse_attention.default)


@torch.library.custom_op("moetrain::sparse_attention_gradients", mutates_args=())
def sparse_attention_gradients_op(
    do_THc: torch.Tensor,
    q_THw: torch.Tensor,
    kv_Lw: torch.Tensor,
    keys_TK: torch.Tensor,
    out_THc: torch.Tensor,
    lse_TH: torch.Tensor,
    scale: float,
    value_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of ``q_THw`` and ``kv_Lw``."""
    sizes = _Sizes.of(q_THw, kv_Lw, keys_TK, value_dim)
    if sizes.is_empty:
        return torch.zeros_like(q_THw), torch.zeros_like(kv_Lw)
    do_THc, dq_THw = do_THc.contiguous(), torch.empty_like(q_THw)
    H, K, (*_, terms) = sizes.H, sizes.K, sizes.launches
    # The scratch of a block of t tokens. The table is zero where a token has not selected a key.
    t = min(_TOKENS, sizes.T)
    p_tHK, terms_tKw = q_THw.new_empty(t, H, K), q_THw.new_empty(t, K, q_THw.shape[2])
    ds_tHK = torch.empty_like(p_tHK)
    place_Lt = keys_TK.new_zeros(sizes.L, _TOKENS)
    list_Lt, count_L = torch.empty_like(place_Lt), keys_TK.new_empty(sizes.L)
    dkv_Lw = torch.zeros_like(kv_Lw, dtype=torch.float32)
    blocks, launched = sizes.of_heads(sizes.launches.queries)
    for start in range(0, sizes.T, _TOKENS):
        own = slice(start, start + _TOKENS)
        do, q, keys = do_THc[own], q_THw[own], keys_TK[own]
        # 1. dq, and p and ds of each token and key.
        query_gradients_kernel[(len(q) * blocks,)](
            do,
            q,
            kv_Lw,
            keys,
            out_THc[own],
            lse_TH[own],
            dq_THw[own],
            p_tHK,
            ds_tHK,
            scale,
            **sizes.constants,
            **launched,
        )
        # 2. Their sums over heads, and the table.
        terms_kernel[(len(q) * triton.cdiv(K, terms.keys),)](
            do,
            q,
            keys,
            p_tHK,
            ds_tHK,
            terms_tKw,
            place_Lt,
            **sizes.constants,
            TOKENS=_TOKENS,
            HEADS=sizes.heads,
            BK=terms.keys,
            BC=min(terms.columns, sizes.c),
            **terms.options,
        )
        # 3. Each key's list, and its sum.
        lists_kernel[(sizes.L,)](place_Lt, list_Lt, count_L, K=K, TOKENS=_TOKENS, **_LISTS.options)
        sums_kernel[(sizes.L,)](
            terms_tKw,
            list_Lt,
            count_L,
            dkv_Lw,
            C=sizes.c,
            R=sizes.r,
            TOKENS=_TOKENS,
            BT=_SUMMED,
            **_SUMS.options,
        )
    return dq_THw, dkv_Lw.to(kv_Lw.dtype)


@sparse_attention_gradients_op.register_fake
def _(
    do_THc: torch.Tensor,
    q_THw: torch.Tensor,
    kv_Lw: torch.Tensor,
    keys_TK: torch.Tensor,
    out_THc: torch.Tensor,
    lse_TH: torch.Tensor,
    scale: float,
    value_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q_THw), torch.empty_like(kv_Lw)


def _save(ctx: OpContext, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, ctx.scale, ctx.value_dim = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: OpContext, do_THc: torch.Tensor | None, *_: object) -> tuple[object, ...]:
    if do_THc is None:
        return gradients(sparse_attention_op)
    dq_THw, dkv_Lw = sparse_attention_gradients_op(
        do_THc, *ctx.saved_tensors, ctx.scale, ctx.value_dim
    )
    return gradients(sparse_attention_op, q_THw=dq_THw, kv_Lw=dkv_Lw)


sparse_attention_op.register_autograd(_differentiate, setup_context=_save)
