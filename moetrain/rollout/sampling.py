"""Each request's own way to choose tokens, whatever is in the batch beside it.

The noise of a choice (:mod:`moetrain.kernels.loss.sampling`) hashes seed, completion, position and
token id, and nothing else, so that neither the batch, nor what was preempted, nor how often a
request came before changes a request's tokens.

Legend: N sequences, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from moetrain.kernels.loss.sampling import MASK, gumbel, gumbel_argmax, mix
from moetrain.rollout.request import SamplingParams

_SALT = 0x9E3779B9


def stream_of(params: SamplingParams, completion: int) -> int:
    """32 bits, as a signed number, of all that a completion's noise depends on but the position."""
    stream = 0
    for word in (params.seed & MASK, params.seed >> 32, completion):
        stream = mix(stream ^ mix((word + _SALT) & MASK))
    return stream - (stream >> 31 << 32)


def inverse_temperature(params: SamplingParams) -> float:
    """0 for the likeliest token. Clamped: times logits it is finite in fp32."""
    return min(max(1 / params.temperature, 1e-30), 1e30) if params.temperature > 0 else 0.0


def keys_of(streams_N: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
    """The key, int32, of each token at ``positions_N`` (in its sequence, prompt included)."""
    return mix((streams_N.long() & MASK) ^ mix((positions_N.long() + _SALT) & MASK)).int()


def scale_of(params: SamplingParams) -> float:
    """What logits are multiplied by in the log-probabilities that are reported."""
    return (params.tempered and inverse_temperature(params)) or 1.0


def choose_filtered(
    logits_NV: torch.Tensor, params: Sequence[SamplingParams], keys_N: torch.Tensor
) -> torch.Tensor:
    """The token of each sequence among what its filters leave: int64 [N], from fp32 logits."""
    device, vocabulary = logits_NV.device, logits_NV.shape[1]
    inverse_N = torch.tensor([inverse_temperature(p) for p in params], device=device)
    kept_NV = _kept(logits_NV * torch.where(inverse_N > 0, inverse_N, 1.0)[:, None], params)
    masked_NV = logits_NV.masked_fill(~kept_NV, -torch.inf)
    return gumbel_argmax(masked_NV, gumbel(keys_N, vocabulary), inverse_N)


def _kept(scores_NV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """bool [N, V]: what ``params`` do not rule out; the likeliest token always stays."""
    vocabulary = scores_NV.shape[1]

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, device=scores_NV.device)[:, None]

    ranked_NV, order_NV = scores_NV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(vocabulary, device=scores_NV.device)
    kept_NV = rank_V < column([min(p.top_k or vocabulary, vocabulary) for p in params])
    shares_NV = ranked_NV.masked_fill(~kept_NV, -torch.inf).softmax(-1)
    before_NV = shares_NV.cumsum(-1) - shares_NV
    # A sum of shares is rounded, maybe to 1: no filter is one that keeps everything.
    kept_NV &= before_NV < column([p.top_p if p.top_p < 1 else math.inf for p in params])
    kept_NV &= shares_NV >= column([p.min_p for p in params]) * shares_NV[:, :1]
    kept_NV[:, 0] = True
    return torch.empty_like(kept_NV).scatter_(1, order_NV, kept_NV)
