"""The choice of tokens: each request's own, whatever is in the batch beside it.

A token is the largest of ``log p(token) / temperature + noise`` over what the filters leave, with
Gumbel noise (the Gumbel-max trick: that draws from the softmax exactly). The noise is a hash of
seed, completion, position and token id and of nothing else, so that neither the batch, nor what was
preempted, nor how often a request came before changes a request's tokens.

Legend: N sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from moetrain.rollout.request import SamplingParams

_MASK = 2**32 - 1


class Draw(NamedTuple):
    """One token to be chosen."""

    params: SamplingParams
    completion: int
    """Which of the request's ``n``."""
    position: int
    """Of the token in its sequence, prompt included."""


def choose(logits_NV: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """The token of each sequence: int64 [N], from fp32 logits of any scale."""
    params = [draw.params for draw in draws]
    temperatures = torch.tensor([p.temperature for p in params], device=logits_NV.device)
    is_greedy_N1 = (temperatures == 0)[:, None]
    scores_NV = logits_NV / torch.where(is_greedy_N1, 1.0, temperatures[:, None])
    if any(p.top_k or p.top_p < 1 or p.min_p for p in params):
        scores_NV = _filtered(scores_NV, params)
    if all(p.temperature == 0 for p in params):  # noise would be hashed for nothing
        return scores_NV.argmax(-1)
    noise_NV = gumbel(draws, logits_NV.shape[1], logits_NV.device)
    return torch.where(is_greedy_N1, scores_NV, scores_NV + noise_NV).argmax(-1)


def _filtered(scores_NV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """``scores_NV`` with -inf for what ``params`` rule out; the likeliest token always stays."""
    vocabulary = scores_NV.shape[1]

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, device=scores_NV.device)[:, None]

    ranked_NV, order_NV = scores_NV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(vocabulary, device=scores_NV.device)
    kept_NV = rank_V < column([p.top_k or vocabulary for p in params])
    shares_NV = ranked_NV.masked_fill(~kept_NV, -torch.inf).softmax(-1)
    before_NV = shares_NV.cumsum(-1) - shares_NV
    kept_NV &= before_NV < column([p.top_p for p in params])
    kept_NV &= shares_NV >= column([p.min_p for p in params]) * shares_NV[:, :1]
    kept_NV[:, 0] = True
    ranked_NV = ranked_NV.masked_fill(~kept_NV, -torch.inf)
    return torch.empty_like(scores_NV).scatter_(1, order_NV, ranked_NV)


def gumbel(draws: Sequence[Draw], vocabulary: int, device: torch.device) -> torch.Tensor:
    """Gumbel noise [N, V], fp32: -log(-log u) of uniform u that hash what each number is for."""
    keys = torch.tensor([_key(draw) for draw in draws], device=device)[:, None]
    ids_V = torch.arange(vocabulary, device=device) * 0x9E3779B1
    bits_NV = _mix(_mix(keys ^ (ids_V & _MASK)) ^ keys)
    # 24 bits, so that fp32 has them exactly; never 0 or 1.
    uniform_NV = ((bits_NV >> 8).float() + 0.5) / 2**24
    return -(-uniform_NV.log()).log()


def _key(draw: Draw) -> int:
    """32 bits of all that a draw's noise depends on, but for the token."""
    key = 0
    seed = draw.params.seed
    for word in (seed & _MASK, seed >> 32, draw.completion, draw.position):
        key = _mix_int(key ^ _mix_int((word + 0x9E3779B9) & _MASK))
    return key


def _mix_int(x: int) -> int:
    """The finalizer of MurmurHash3 on 32 bits: every bit of ``x`` changes half of the result's."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B & _MASK
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & _MASK
    return x ^ (x >> 16)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """:func:`_mix_int` of int64 tensors of 32 bits each; what products overflow is cut off."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B & _MASK
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & _MASK
    return x ^ (x >> 16)
