"""Sampling filters: which tokens may be chosen, and the choice among them.

Each filter is a field of :class:`Filters` and a function of the same name that returns the tokens
to keep. A new filter needs these two and nothing else in this package: requests, steps and the
values that a checkpoint recommends use a filter by its name. CONTRIBUTING.md lists the steps.

Requests without filters do not use this module: the fused kernel samples their tokens from all
logits (:func:`~moetrain.kernels.vocabulary.chunk.sample_tokens`), with the same noise.

Legend: N rows, for each of which one token is chosen; V tokens of the vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Annotated

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked_dataclass

from moetrain.kernels.vocabulary.gumbel import gumbel_argmax

STRICT = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")
"""Values of a request have exactly their field's type, and are finite. A name that is no field is
an error."""


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Filters:
    """The sampling filters of one request, by name. A field's default keeps all tokens.

    They act on the probabilities at the request's temperature. ``top_k`` comes first. The other
    filters act on the probabilities of the tokens that ``top_k`` keeps, renormalised. A token may
    be chosen if every filter keeps it. The likeliest token may always be chosen.
    """

    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep the k likeliest tokens; 0: keep all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the fewest tokens whose probabilities add up to p (nucleus sampling, Holtzman et al.,
    arXiv 1904.09751)."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Keep tokens with at least this share of the likeliest token's probability (Nguyen et al.,
    arXiv 2407.01082)."""

    @property
    def is_neutral(self) -> bool:
        """True if every filter keeps all tokens."""
        return all(getattr(self, field.name) == field.default for field in fields(Filters))


FILTER_NAMES = tuple(field.name for field in fields(Filters))


def _top_p(shares_NV: torch.Tensor, top_p_N1: torch.Tensor) -> torch.Tensor:
    before_NV = shares_NV.cumsum(-1) - shares_NV
    # A sum of shares may round to 1 before the last token.
    return (before_NV < top_p_N1) | (top_p_N1 == 1)


def _min_p(shares_NV: torch.Tensor, min_p_N1: torch.Tensor) -> torch.Tensor:
    return shares_NV >= min_p_N1 * shares_NV[:, :1]


_Keep = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_BY_SHARE: Mapping[str, _Keep] = MappingProxyType({"top_p": _top_p, "min_p": _min_p})
"""The filters that act on probabilities, by the names of :class:`Filters`.

Each function takes the probabilities [N, V] of the tokens that ``top_k`` keeps, in fp32, with the
likeliest token first and 0 for tokens that are not kept, and the values of its filter [N, 1]. It
returns bool [N, V]: True for the tokens that the filter keeps.
"""


def kept_tokens(scores_NV: torch.Tensor, filters: Sequence[Filters]) -> torch.Tensor:
    """Return which tokens the filters of each row keep, bool [N, V].

    ``scores_NV``: logits at each row's temperature, fp32.
    """
    device, most = scores_NV.device, scores_NV.shape[1]

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, device=device)[:, None]

    # 1. Rank the tokens. The sort is stable, so equal ones stay in the order of their ids.
    ranked_NV, order_NV = scores_NV.sort(dim=-1, descending=True, stable=True)
    # 2. Keep the k likeliest; k may be larger than an int64.
    top_k_N1 = column([min(one.top_k, most) for one in filters])
    kept_NV = (torch.arange(most, device=device) < top_k_N1) | (top_k_N1 == 0)
    # 3. Keep the tokens that all other filters keep, by the probabilities of the tokens left.
    shares_NV = ranked_NV.masked_fill(~kept_NV, -torch.inf).softmax(-1)
    for name, keep in _BY_SHARE.items():
        kept_NV &= keep(shares_NV, column([getattr(one, name) for one in filters]))
    kept_NV[:, 0] = True
    # 4. Return to the order of the vocabulary.
    return torch.empty_like(kept_NV).scatter_(1, order_NV, kept_NV)


def sample_filtered(
    logits_NV: torch.Tensor,
    keys_N: torch.Tensor,
    inverse_temperatures: Sequence[float],
    filters: Sequence[Filters],
) -> torch.Tensor:
    """Sample each row's token among those that its filters keep: int64 [N].

    Args:
        logits_NV: fp32; -inf for tokens that cannot be chosen.
        keys_N: int32, the keys of the noise
            (:func:`~moetrain.kernels.vocabulary.gumbel.noise_keys`).
        inverse_temperatures: 1 / temperature of each row; 0: choose the likeliest token.
        filters: the filters of each row.
    """
    inverse_N = torch.tensor(inverse_temperatures, device=logits_NV.device)
    # Filters of a greedy row act on the logits as they are.
    factor_N = torch.where(inverse_N > 0, inverse_N, 1.0)
    kept_NV = kept_tokens(logits_NV * factor_N[:, None], filters)
    masked_NV = logits_NV.masked_fill(~kept_NV, -torch.inf)
    return gumbel_argmax(masked_NV, keys_N, inverse_N)
