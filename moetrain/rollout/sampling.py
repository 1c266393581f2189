"""Samples tokens by each request's own parameters, whatever else is in the batch.

The noise (:mod:`moetrain.kernels.loss.vocabulary_chunk`) is a hash of seed, completion, position
and token id, and of nothing else, so that neither the batch, nor preemption, nor earlier requests
change a request's tokens.

Legend: N sequences, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from moetrain.kernels.loss.vocabulary_chunk import MASK, gumbel_argmax, mix
from moetrain.rollout.request import SamplingParams

_SALT = 0x9E3779B9


def stream_of(params: SamplingParams, completion: int) -> int:
    """Hash what a completion's noise depends on, except the position, to a signed 32-bit number."""
    stream = 0
    for word in (params.seed & MASK, params.seed >> 32, completion):
        stream = mix(stream ^ mix((word + _SALT) & MASK))
    return stream - (stream >> 31 << 32)


def inverse_temperature(params: SamplingParams) -> float:
    """Return 1 / temperature, 0 for greedy choice; clamped so that products stay finite in fp32."""
    return min(max(1 / params.temperature, 1e-30), 1e30) if params.temperature > 0 else 0.0


def keys_of(streams_N: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
    """Return the noise key, int32, of each position (in its sequence, prompt included)."""
    return mix((streams_N.long() & MASK) ^ mix((positions_N.long() + _SALT) & MASK)).int()


def scale_of(params: SamplingParams) -> float:
    """Return the factor of the logits in reported log-probabilities."""
    return (params.tempered and inverse_temperature(params)) or 1.0


def choose_filtered(
    logits_NV: torch.Tensor, params: Sequence[SamplingParams], keys_N: torch.Tensor
) -> torch.Tensor:
    """Sample each sequence's token among those its filters keep: int64 [N], from fp32 logits."""
    inverses = [inverse_temperature(p) for p in params]
    inverse_N = torch.tensor(inverses, device=logits_NV.device)
    kept_NV = _kept(logits_NV * torch.where(inverse_N > 0, inverse_N, 1.0)[:, None], params)
    masked_NV = logits_NV.masked_fill(~kept_NV, -torch.inf)
    return gumbel_argmax(masked_NV, keys_N, inverse_N)


def _kept(scores_NV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return the tokens that ``params`` keep, bool [N, V]; the likeliest always stays."""
    vocabulary = scores_NV.shape[1]

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, device=scores_NV.device)[:, None]

    ranked_NV, order_NV = scores_NV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(vocabulary, device=scores_NV.device)
    kept_NV = rank_V < column([min(p.top_k or vocabulary, vocabulary) for p in params])
    shares_NV = ranked_NV.masked_fill(~kept_NV, -torch.inf).softmax(-1)
    before_NV = shares_NV.cumsum(-1) - shares_NV
    # A sum of shares may round to 1 before the last token, so top_p 1 must not be compared.
    kept_NV &= before_NV < column([p.top_p if p.top_p < 1 else math.inf for p in params])
    kept_NV &= shares_NV >= column([p.min_p for p in params]) * shares_NV[:, :1]
    kept_NV[:, 0] = True
    return torch.empty_like(kept_NV).scatter_(1, order_NV, kept_NV)
