"""Expert parallelism: every rank holds some experts, and tokens travel to them.

Rank r of W holds experts ``[r * E/W, (r+1) * E/W)``. There are two halves. A :class:`Transport`
brings each token to every rank where it chose an expert, once, and brings the sum of what these
ranks made of it back. :class:`ExpertParallelDispatcher` does what is local to a rank: it counts the
rows of the experts here. They copy a token that arrived to a row each, and sum these rows. Worked
example with W=2, E=4, K=2 (-: no expert)::

                        rank 0                 rank 1
    token               a       b              c       d
    experts             3 0     1 0            3 2     0 -
    sent to rank 0      a       b                      d          b chose two experts there
    sent to rank 1      a                      c
    arrived             a       b       d      a       c          from rank 0, then from rank 1
    local experts       - 0     1 0     0 -    1 -     1 0        ids_SK
    rows                0: a b d     1: b      0: c     1: a c     num_rows: 4 and 3
    sums                a       b       d      a       c          sent back, and added at home

An expert thus sees its rows in the order of the concatenated batch. A sum is rounded to the tokens'
dtype where it is sent, and once more where those of all ranks are added.

Legend: W expert parallel ranks, E experts, L = E / W local experts, T tokens here, K experts a
token, S tokens that arrived, R rows of the local experts, D width.
"""

from typing import NamedTuple, Protocol

import torch

from moetrain.kernels.backend import Backend
from moetrain.kernels.experts.permutation import expert_indices
from moetrain.models.moe import Dispatched


class Received(NamedTuple):
    """The tokens that chose an expert of this rank, by source rank, then in token order."""

    x_SD: torch.Tensor
    ids_SK: torch.Tensor
    """int32: the local expert of each slot; -1: none, or an expert of another rank."""
    weights_SK: torch.Tensor
    """fp32, differentiable; unspecified where the id is -1."""
    num_rows: int
    """R, the number of ids that are not -1; to the compiler a size that it does not know. A
    transport that does not know it either gives the number of rows to have room for."""
    handle: tuple[torch.Tensor, ...]
    """What the transport's ``combine`` needs; opaque to everyone else."""
    may_drop: bool = False
    """Whether ``num_rows`` is only what there is room for."""


class Transport(Protocol):
    """Brings tokens to the ranks of their experts and back.

    Both methods, and the backward of each, are collective: every rank of the group calls them, with
    any number of tokens, zero included. No state of a call lives on a transport.
    """

    num_ranks: int

    def dispatch(
        self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> Received:
        """What arrives; int32 ids of all E experts (-1: none), fp32 weights."""
        ...

    def combine(self, y_SD: torch.Tensor, handle: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """``y_TD``: the sum over ranks of what they give for each token, in fp32, rounded once."""
        ...


class ExpertParallelDispatcher:
    """A :class:`moetrain.models.Dispatcher` over the ranks that ``transport`` connects.

    Collective like its transport. What the experts get makes exactly the rows that they take.

    Raises:
        ValueError: a number of experts that the ranks cannot share equally.
    """

    def __init__(self, num_experts: int, transport: Transport, backend: Backend = "auto") -> None:
        self.num_local_experts = count_local_experts(num_experts, transport.num_ranks)
        self.transport = transport
        self.backend: Backend = backend

    def dispatch(
        self, x_TD: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Dispatched:
        """All ranks' tokens for the local experts; ids are those of all E experts."""
        arrived = self.transport.dispatch(x_TD, topk_ids_TK, topk_weights_TK)
        local = expert_indices(
            arrived.ids_SK, self.num_local_experts, self.backend, num_rows=arrived.num_rows
        )
        dropped = None
        if arrived.may_drop:
            dropped = (local.counts_E.sum(dtype=torch.int32) - arrived.num_rows).clamp(min=0)
        tokens, handle = (arrived.x_SD, arrived.weights_SK), arrived.handle
        return Dispatched(*tokens, local, handle, topk_ids_TK.numel(), dropped)

    def combine(self, y_SD: torch.Tensor, ctx: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """``y_TD``: the sum of what all ranks' experts made of each token."""
        return self.transport.combine(y_SD, ctx)


def count_local_experts(num_experts: int, num_ranks: int) -> int:
    """L.

    Raises:
        ValueError: the ranks cannot share the experts equally.
    """
    if num_experts % num_ranks:
        raise ValueError(
            f"{num_experts} experts cannot be shared equally by {num_ranks} expert parallel ranks; "
            "use a number of ranks that divides them"
        )
    return num_experts // num_ranks
