"""The loss that trains indexers (DeepSeek-V3.2, section 2.1): they shall score as attention weighs.

    p[t, s] = mean over attention's heads of softmax over A of the attention scores
    loss[t] = KL(p[t] || softmax over A of the index scores)

A are the keys that token t may see (``warmup``), or those of them that are selected (``joint``).
Neither p nor the indexer's inputs have a gradient, so the loss trains the indexer alone, and the
model's loss everything else. ``kept`` is the share of attention to all visible keys that the
selected keys have: 1 if attention to all keys would not look at any other.

Both ops compute a block of queries at a time, in plain torch. The loss op computes gradients of the
scores in its forward, since they are ``softmax - p``::

    z[h, t, s] = iq[t, h] . ik[s] / sqrt(d)         d z = (softmax - p)[t, s] w[t, h]  where z > 0
    d w[t, h] = sum over s of (softmax - p)[t, s] relu(z)[h, t, s]

p itself takes 4 bytes for each pair of a query and a key.

Legend: B batch, S queries of a row, L keys of a row, H heads of attention, e width of a query of
attention, h index heads, d their width, K selected keys.
"""

from collections.abc import Mapping

import torch

from moetrain.kernels.attention.index_keys import visible_keys
from moetrain.kernels.attention.paged import as_mask
from moetrain.models.layers import Selection
from moetrain.models.parts.indexer import Indexed
from moetrain.runtime.typed import OpContext

_BLOCK_SCORES = 2**27
"""About how many scores of single heads exist at once."""


@torch.library.custom_op("moetrain::attention_weights", mutates_args=())
def attention_weights(
    q_BSHe: torch.Tensor,
    k_BLHe: torch.Tensor,
    seen_BS2: torch.Tensor,
    keys_BSK: torch.Tensor | None,
    scale: float,
    is_limited: bool,
) -> torch.Tensor:
    """Return attention's weights, summed over heads, at least fp32: [B, S, L + 1].

    The last column is the sum over heads of the share of the selected keys in the weights over all
    visible keys.

    Args:
        seen_BS2: the first and the last key that each token may see.
        keys_BSK: the selected keys, as :attr:`Selection.keys_BSK`.
        is_limited: True: the weights are over the selected keys. False: over all visible keys.
    """
    (B, S, H, _), L = q_BSHe.shape, k_BLHe.shape[1]
    wide = torch.promote_types(q_BSHe.dtype, torch.float32)
    out_BSL = q_BSHe.new_empty(B, S, L + 1, dtype=wide)
    k_BHeL = k_BLHe.to(wide).permute(0, 2, 3, 1)
    for own in _blocks(S, B * H * L):
        scores_BHSL = (q_BSHe[:, own].to(wide).transpose(1, 2) @ k_BHeL) * scale
        visible_BSL = visible_keys(seen_BS2[:, own], L)
        scores_BHSL = scores_BHSL.masked_fill(~visible_BSL[:, None], -torch.inf)
        weights_BHSL = scores_BHSL.softmax(-1)
        kept_BHS1 = torch.ones_like(weights_BHSL[..., :1])
        if keys_BSK is not None:
            weights_of_selected_BHSL = weights_BHSL * as_mask(keys_BSK[:, own], L)[:, None]
            kept_BHS1 = weights_of_selected_BHSL.sum(-1, keepdim=True)
            if is_limited:
                hidden_BSL = ~as_mask(keys_BSK[:, own], L)
                weights_BHSL = scores_BHSL.masked_fill(hidden_BSL[:, None], -torch.inf).softmax(-1)
        out_BSL[:, own] = torch.cat((weights_BHSL, kept_BHS1), dim=-1).sum(1)
    return out_BSL


@attention_weights.register_fake
def _(
    q_BSHe: torch.Tensor,
    k_BLHe: torch.Tensor,
    seen_BS2: torch.Tensor,
    keys_BSK: torch.Tensor | None,
    scale: float,
    is_limited: bool,
) -> torch.Tensor:
    wide = torch.promote_types(q_BSHe.dtype, torch.float32)
    return q_BSHe.new_empty(*q_BSHe.shape[:2], k_BLHe.shape[1] + 1, dtype=wide)


def divergence(
    indexed: Indexed,
    weights_BSL: torch.Tensor,
    seen_BS2: torch.Tensor,
    keys_BSK: torch.Tensor | None,
    counts_BS: torch.Tensor,
) -> torch.Tensor:
    """Return the sum over tokens of KL(weights || softmax of the index scores), 0-d.

    It is differentiable in ``indexed``.

    Args:
        weights_BSL: p, over the keys of the softmax.
        seen_BS2: the first and the last key that each token may see.
        keys_BSK: the keys of the softmax; None: all that a token may see.
        counts_BS: each token's weight in the sum.
    """
    q_BShd, k_BLd, w_BSh = indexed.q_BShd, indexed.k_BLd, indexed.w_BSh
    return _divergence(q_BShd, k_BLd, w_BSh, weights_BSL, seen_BS2, keys_BSK, counts_BS)[0]


@torch.library.custom_op("moetrain::indexer_divergence", mutates_args=())
def _divergence(
    q_BShd: torch.Tensor,
    k_BLd: torch.Tensor,
    w_BSh: torch.Tensor,
    weights_BSL: torch.Tensor,
    seen_BS2: torch.Tensor,
    keys_BSK: torch.Tensor | None,
    counts_BS: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    (B, S, h, d), L, wide = q_BShd.shape, k_BLd.shape[1], w_BSh.dtype
    scale = d**-0.5
    k_wide_BLd = k_BLd.to(wide)
    total = w_BSh.new_zeros(())
    dq_BShd, dk_BLd = torch.empty_like(q_BShd, dtype=wide), torch.zeros_like(k_wide_BLd)
    dw_BSh = torch.empty_like(w_BSh)
    for own in _blocks(S, B * h * L):
        # 1. The scores, and their softmax over the keys.
        q_BRd = q_BShd[:, own].to(wide).flatten(1, 2)
        z_BShL = ((q_BRd @ k_wide_BLd.mT) * scale).unflatten(1, (-1, h))
        relu_BShL = z_BShL.relu()
        scores_BSL = (w_BSh[:, own, None] @ relu_BShL)[:, :, 0]
        among_BSL = visible_keys(seen_BS2[:, own], L)
        if keys_BSK is not None:
            among_BSL = as_mask(keys_BSK[:, own], L)
        logprobs_BSL = scores_BSL.masked_fill(~among_BSL, -torch.inf).log_softmax(-1)
        # 2. The divergence; keys outside of both have no part in it.
        p_BSL, counts_BS1 = weights_BSL[:, own].to(wide), counts_BS[:, own, None].to(wide)
        terms_BSL = torch.xlogy(p_BSL, p_BSL) - p_BSL * logprobs_BSL.masked_fill(~among_BSL, 0.0)
        total = total + (terms_BSL * counts_BS1).sum()
        # 3. Its gradients.
        ds_BSL = (logprobs_BSL.exp() - p_BSL) * counts_BS1
        dw_BSh[:, own] = (relu_BShL @ ds_BSL[..., None])[..., 0]
        dz_BShL = ds_BSL[:, :, None] * w_BSh[:, own, :, None] * (z_BShL > 0)
        dz_BRL = dz_BShL.flatten(1, 2) * scale
        dq_BShd[:, own] = (dz_BRL @ k_wide_BLd).unflatten(1, (-1, h))
        dk_BLd += dz_BRL.mT @ q_BRd
    return total, dq_BShd, dk_BLd, dw_BSh


@_divergence.register_fake
def _(
    q_BShd: torch.Tensor,
    k_BLd: torch.Tensor,
    w_BSh: torch.Tensor,
    weights_BSL: torch.Tensor,
    seen_BS2: torch.Tensor,
    keys_BSK: torch.Tensor | None,
    counts_BS: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = w_BSh.dtype
    gradients = (torch.empty_like(x, dtype=wide) for x in (q_BShd, k_BLd, w_BSh))
    return w_BSh.new_empty(()), *gradients  # pyright: ignore[reportReturnType]


def _save(
    ctx: OpContext, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]
) -> None:
    ctx.dtypes = [x.dtype for x in inputs[:3]]
    ctx.save_for_backward(*output[1:])


def _backward(
    ctx: OpContext, d_total: torch.Tensor, *others: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
    return *((d_total * gradient).to(dtype) for gradient, dtype in pairs), None, None, None, None


_divergence.register_autograd(_backward, setup_context=_save)


def _blocks(queries: int, scores_per_query: int) -> list[slice]:
    """Cut ``queries`` into blocks with about :data:`_BLOCK_SCORES` scores each."""
    size = max(1, _BLOCK_SCORES // max(1, scores_per_query))
    return [slice(start, start + size) for start in range(0, queries, size)]


def indexer_values(
    selections: Mapping[int, Selection], num_tokens: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return this micro-batch's share of each layer's mean divergence and of its ``kept``, 0-d.

    Args:
        selections: by layer; those without sums are left out.
        num_tokens: tokens of the global batch.
    """
    found: dict[str, torch.Tensor] = {}
    for layer, selection in selections.items():
        if selection.kl_sum is not None and selection.kept_sum is not None:
            found[f"indexer_kl/layer_{layer}"] = selection.kl_sum / num_tokens
            found[f"indexer_kept/layer_{layer}"] = selection.kept_sum / num_tokens
    return found
