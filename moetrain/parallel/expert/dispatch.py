"""Expert parallelism: every rank holds some experts, and tokens travel to them.

Rank r of W holds experts ``[r * E/W, (r+1) * E/W)``. Each token travels once to every rank that has
an expert it chose, and there it is copied to a row for each such expert. The sum of these rows'
results travels back. Worked example with W=2, E=4, K=2 (-: no expert)::

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
dtype before it is sent, and once more after the sums of all ranks are added.

With ``kernels.precision`` fp8, tokens are sent in e4m3 with their scales in the same message, which
halves the bytes. The gradients that travel to the experts in the backward of ``combine`` are sent
in the same way. The experts would round both to e4m3 in any case, so the results have the same
bits. Sums are not quantised.

Left out on purpose: overlapping the exchange with compute.

Legend: W expert parallel ranks, G on each of M machines, E experts, L = E / W local experts, T
tokens of this rank, K experts a token, A tokens that reach this machine through this rank, S tokens
that arrive, R rows of the local experts, P destinations that tokens are sorted by, D width.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from moetrain.config.compute import Precision
from moetrain.kernels.experts import permutation
from moetrain.kernels.experts.routed import Routed
from moetrain.kernels.quant.e4m3 import E4M3, Quantised
from moetrain.kernels.quant.recipes import RECIPES, Recipe
from moetrain.models.moe import Dispatched, Dispatcher, Experts, MoEOutput
from moetrain.parallel.collectives import all_to_all_single, resolve_group
from moetrain.parallel.expert.redundant import RedundantExperts
from moetrain.parallel.mesh import ExpertHops
from moetrain.parallel.waits import waiting
from moetrain.runtime.annotate import annotate
from moetrain.runtime.backend import Backend, gradients, worth_saving
from moetrain.runtime.typed import (
    OpContext,
    fake_of,
    ints,
    register_gradient,
    rows_of_ints,
    unknown_size,
)


class Received(NamedTuple):
    """The tokens that chose an expert of this rank, by source rank, then in token order."""

    x_SD: torch.Tensor
    """The tokens."""
    ids_SK: torch.Tensor
    """int32: the local expert of each slot; -1: none, or an expert of another rank."""
    weights_SK: torch.Tensor
    """Routing weights, fp32 and differentiable. They are unspecified where the id is -1."""
    num_rows: int
    """R, the number of ids that are not -1. The compiler treats it as an unknown size. Where sizes
    are fixed beforehand, it is the number of rows that there is room for."""
    handle: tuple[torch.Tensor, ...]
    """Tensors that only ``combine`` interprets."""
    may_drop: bool = False
    """True: ``num_rows`` is the number of rows that there is room for. If more arrive, the others
    are dropped."""


class ExpertParallelDispatcher(Dispatcher, ABC):
    """A :class:`~moetrain.models.moe.Dispatcher` over the ranks of ``group``.

    ``dispatch``, ``combine`` and the backward of each are collective: every rank of the group calls
    them, with any number of tokens, zero included. Subclasses implement how tokens travel.

    Raises:
        ValueError: the ranks cannot share the experts equally.
    """

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        backend: Backend = "auto",
        precision: Precision = "bf16",
        redundant: RedundantExperts | None = None,
    ) -> None:
        super().__init__(num_experts, backend)
        self.num_ranks, self.rank = group.size(), group.rank()
        if num_experts % self.num_ranks:
            problem = f"{num_experts} experts cannot be shared equally by {self.num_ranks} expert"
            raise ValueError(f"{problem} parallel ranks; use a number of ranks that divides them")
        self.num_local_experts = num_experts // self.num_ranks
        self.redundant = redundant
        if redundant is not None:  # tokens are dispatched to experts and to slots for copies
            self.num_local_experts += redundant.spare
            self.num_experts = self.num_ranks * self.num_local_experts
        self.group_name: str = group.group_name
        self.precision: Precision = precision

    @abstractmethod
    def send(self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> Received:
        """Send tokens to the ranks of their experts. Collective.

        Args:
            x_TD: this rank's tokens.
            ids_TK: int32, of all E experts; -1: none.
            weights_TK: fp32.
        """

    @abstractmethod
    def combine(self, y_SD: torch.Tensor, ctx: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return ``y_TD``: each token's sum over ranks, added in fp32 and rounded once. Collective.

        Args:
            y_SD: for each token that arrived, the sum of its local experts' results.
            ctx: the handle that :meth:`send` returned.
        """

    def dispatch(
        self, x_TD: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Dispatched:
        """Return the tokens of all ranks that chose local experts. Collective.

        ``topk_ids_TK``: ids of all E experts, not of local ones.
        """
        arrived = self.send(x_TD, topk_ids_TK, topk_weights_TK)
        local = permutation.expert_indices(
            arrived.ids_SK, self.num_local_experts, self.backend, num_rows=arrived.num_rows
        )
        dropped = None
        if arrived.may_drop:
            dropped = (local.counts_E.sum(dtype=torch.int32) - arrived.num_rows).clamp(min=0)
        return Dispatched(
            x_SD=arrived.x_SD,
            weights_SK=arrived.weights_SK,
            indices=local,
            ctx=arrived.handle,
            typical_rows=topk_ids_TK.numel(),
            dropped=dropped,
        )

    def through(self, experts: Experts, x_TD: torch.Tensor, routed: Routed) -> MoEOutput:
        if self.redundant is None:
            return super().through(experts, x_TD, routed)
        slots_TK, copies_WN = self.redundant.assign(routed.ids_TK)
        slots_TK, copies = self.redundant.start(experts, x_TD, slots_TK, copies_WN)
        sent = self.dispatch(x_TD, slots_TK, routed.weights_TK)
        y_SD = self.redundant.compute(experts, sent, copies, copies_WN)
        return MoEOutput(self.combine(y_SD, sent.ctx), sent.dropped)


class AllToAll(ExpertParallelDispatcher):
    """Sends tokens by plain collectives, on every device.

    Tokens are sorted by destination rank, as :mod:`moetrain.kernels.experts.permutation` sorts by
    expert. If several of a token's experts are on one rank, the token is sent there once. With 8 of
    128 experts over 4 ranks that is 3.6 rows a token (2.7 of them for other ranks) instead of 8.
    All ids and weights of a token travel with every copy, and the receiver picks those of its own
    experts.

    The two exchanges are opaque ops rather than functional collectives, for four reasons. The
    number of rows that travel is known only at run time, on the host. Rows past this number stay
    unspecified. Several tensors travel together, in one order on all ranks. And a rank without
    tokens must still take part. The compiler treats the numbers of tokens and rows that arrive as
    unknown sizes, so a block stays one graph whatever the routing. The host waits for the device
    once in a forward, for these numbers, and the backward reuses them. A forward that is recomputed
    exchanges and waits again, unless the recomputation policy keeps the results of both ops.

    With several machines tokens take two ``hops``: first to the rank with the same index in the
    other machine, then to the ranks inside that machine. A token thus crosses to each machine once,
    and is passed on over the faster links inside (as in DeepEP, arXiv 2412.19437). Worked example
    with two machines of four ranks::

        a token of rank 1, whose experts are on ranks 0, 4, 5, 7
        across   1 -> 1 (stays)   1 -> 5
        inside   1 -> 0           5 -> 4    5 -> 5 (stays)    5 -> 7

    Tokens arrive in the same order as with one hop. Every rank sends its sums directly to the
    source rank, which adds them in a fixed order. So the results have the same bits as with one
    hop. Adding up inside each machine first would round once more, and group sums by machine.
    """

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        backend: Backend = "auto",
        precision: Precision = "bf16",
        redundant: RedundantExperts | None = None,
        hops: ExpertHops | None = None,
    ) -> None:
        super().__init__(num_experts, group, backend, precision, redundant)
        self.hops = None if hops is None or min(hop.size() for hop in hops) == 1 else hops
        self.num_sms = 0  # DeepEP has no part in it

    def send(self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> Received:
        rank_TK = ids_TK // self.num_local_experts  # rounds down: -1 stays -1
        sizes, handle, hop = self._plan(rank_TK)
        if self.hops:  # sort arriving tokens by the rank of this machine that gets them next
            across, places = self.hops.across, self.hops.inside.size()
            (rank_AK,) = _exchange_rows(
                [rank_TK],
                handle[6:],
                num_rows=sizes[2],
                is_back=False,
                ways=across.group_name,
                num_sms=0,
                precision="bf16",
                backend=self.backend,
            )
            place_AK = self._local(rank_AK, across.rank(), places)
            handle += [*self._route(place_AK, places, sizes[3])[0], *hop]
        rows = [x_TD, self._routing(ids_TK, weights_TK)]
        x_SD, routing_SC = self._exchange(rows, handle, sizes[0], is_back=False)
        weights_SK, ids_SK = routing_SC.chunk(2, dim=1)
        local_SK = self._local(ids_SK, self.rank, self.num_local_experts)
        return Received(x_SD, local_SK, weights_SK, sizes[1], tuple(handle))

    def combine(self, y_SD: torch.Tensor, ctx: tuple[torch.Tensor, ...]) -> torch.Tensor:
        home = permutation.ExpertIndices(*ctx[:4])
        (y_TD,) = self._exchange([y_SD], ctx, home.slot_row_TK.shape[0], is_back=True)
        return y_TD

    @staticmethod
    def _routing(ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """Return weights and ids as one fp32 tensor [T, 2K], to send both in one message.

        Ids up to 2^24 are exact in fp32.
        """
        return torch.cat((weights_TK.float(), ids_TK.float()), dim=1)

    @staticmethod
    def _local(ids_SK: torch.Tensor, part: int, size: int) -> torch.Tensor:
        """Return ids (int32) within the part-th range of ``size`` experts; others are -1."""
        local_SK = ids_SK.int() - part * size
        return torch.where((local_SK >= 0) & (local_SK < size), local_SK, -1)

    def _plan(self, rank_TK: torch.Tensor) -> tuple[list[int], list[torch.Tensor], Any]:
        """Exchange the numbers of tokens and rows that go to each rank. Collective.

        Args:
            rank_TK: the rank that each choice leads to; -1: none.

        Returns:
            The sizes (S and R; with hops also A, and the number of rows that this rank passes on
            inside its machine), the handle without the hop inside the machine, and the numbers of
            rows that this rank sends and receives in that hop (two int64 [G, M]; None without
            hops).
        """
        home, slots_W = self._route(rank_TK, self.num_ranks)
        counts, once = [home.counts_E[None], slots_W[None]], None
        machines, places = [hop.size() for hop in self.hops or ()] or (1, self.num_ranks)
        place = self.rank % places
        if self.hops:
            once, _ = self._route(rank_TK // places, machines)
            # Ranks with this rank's index learn how much comes from here, and where to pass it on.
            # All other ranks get zeros.
            hops_CM = torch.cat((once.counts_E[None], home.counts_E.view(machines, places).T))
            is_place_G = torch.arange(places, device=rank_TK.device) == place
            counts.append((hops_CM[:, :, None] * is_place_G).flatten(1))
        *sizes, sent_CW, received_CW = _exchange_counts(torch.cat(counts), self.group_name)
        tokens, rows, *others = (x.shape[0] for x in sizes)
        handle = [*home, sent_CW[:1].T, received_CW[:1].T]
        if once is None:
            return [tokens, rows], handle, None
        sent_CMG, received_CMG = (x.view(-1, machines, places) for x in (sent_CW, received_CW))
        handle += [*once, sent_CMG[2, :, place, None], received_CMG[2, :, place, None]]
        hop = received_CMG[3:, :, place], received_CMG[0].T
        return [tokens, rows, others[0], sum(others[1:])], handle, hop

    def _route(
        self, target_TK: torch.Tensor, targets: int, room: int | None = None
    ) -> tuple[permutation.ExpertIndices, torch.Tensor]:
        """Sort tokens by destination, each token once for each of its destinations.

        Args:
            target_TK: the destination of each slot; -1: none.
            targets: P, the number of destinations.
            room: the number of rows of the order; None: as many as there can be.

        Returns:
            The order, and the number of slots that lead to each destination, int32 [P].
        """
        tokens, slots = target_TK.shape
        is_same_TKK = target_TK[:, :, None] == target_TK[:, None, :]
        first_TK = torch.where(is_same_TKK.tril(-1).any(2), -1, target_TK)
        room = tokens * min(slots, targets) if room is None else room
        every_target_P = torch.arange(targets, dtype=target_TK.dtype, device=target_TK.device)
        slots_P = (target_TK[..., None] == every_target_P).sum((0, 1), dtype=torch.int32)
        return permutation.expert_indices(first_TK, targets, self.backend, num_rows=room), slots_P

    def _exchange(
        self,
        rows: Sequence[torch.Tensor],
        handle: Sequence[torch.Tensor],
        num_rows: int,
        *,
        is_back: bool,
    ) -> list[torch.Tensor]:
        return _exchange_rows(
            rows,
            list(handle),
            num_rows=num_rows,
            is_back=is_back,
            ways=self._ways,
            num_sms=self.num_sms,
            precision=self.precision,
            backend=self.backend,
        )

    @property
    def _ways(self) -> str:
        """Names of the group of all ranks and of the hops' groups, as the op takes them."""
        return " ".join((self.group_name, *(hop.group_name for hop in self.hops or ())))


@torch.library.custom_op("moetrain::exchange_counts", mutates_args=())
def _exchange_counts(counts_CW: torch.Tensor, group: str) -> list[torch.Tensor]:
    """Exchange C counts between every pair of ranks of ``group``. Collective.

    An op can return a size only as a shape. So the first C results are tensors [sum, 0] without
    elements: the number of rows of each is the sum of one received count over all ranks. Two more
    results are the counts sent to, and received from, every rank, int64 [C, W] on the host.
    """
    ranks = resolve_group(group)
    sent_WC = counts_CW.T.contiguous()
    received_WC = torch.empty_like(sent_WC)
    with waiting(counts_CW.device):
        all_to_all_single(received_WC, sent_WC, group=ranks)
    # The host waits for the device only here: it needs the sizes to allocate what arrives.
    both_CW = torch.stack((sent_WC, received_WC)).transpose(1, 2).cpu().long()
    sizes = (counts_CW.new_empty(size, 0) for size in ints(both_CW[1].sum(1)))
    return [*sizes, *(x.clone(memory_format=torch.contiguous_format) for x in both_CW)]


@fake_of(_exchange_counts)
def _(counts_CW: torch.Tensor, group: str) -> list[torch.Tensor]:
    sizes = (counts_CW.new_empty(unknown_size(), 0) for _ in counts_CW)
    counts = (torch.empty(counts_CW.shape, dtype=torch.int64, device="cpu") for _ in range(2))
    return [*sizes, *counts]


# One op sends all tensors that travel together. The compilers of two ranks could order two
# independent ops differently, and the ranks would then wait for each other for ever.
@torch.library.custom_op("moetrain::exchange_rows", mutates_args=())
def _exchange_rows(
    rows: Sequence[torch.Tensor],
    handle: Sequence[torch.Tensor],
    num_rows: int,
    is_back: bool,
    ways: str,
    num_sms: int,
    precision: str,
    backend: str,
) -> list[torch.Tensor]:
    """Send rows of tokens to the ranks of their experts, or send results back and add them up.

    Each direction is the backward of the other.

    Args:
        rows: tensors whose rows travel together.
        handle: for each of ``ways``, the order of rows and the numbers sent and received.
        num_rows: the number of rows of each result.
        is_back: True: rows return to their source ranks, which add them up for each token.
        ways: names of groups, separated by spaces: first the group of all ranks, over which rows
            return, then the groups of the hops, if there are any.
        num_sms: above 0, DeepEP makes the last hop on this number of SMs, with a handle of its own.
        precision: the precision in which the first tensor's rows travel to the experts.
        backend: the backend of the kernels that sort and add up.
    """
    kernels, recipe, first = cast("Backend", backend), RECIPES.get(precision), rows[0]
    steps = [(way, *handle[6 * i : 6 * i + 6]) for i, way in enumerate(ways.split())]
    if is_back:
        way, *route, sent, received = steps[0]
        home = permutation.ExpertIndices(*route)
        rows = _travel(rows, received, sent, way, home.row_slot_R.shape[0])
        return [permutation.unpermute(x, home, kernels) for x in rows]
    if recipe is not None:
        rows = [_pack(first, recipe), *rows[1:]]
    near = steps.pop() if num_sms else None
    for way, *route, sent, received in steps[1:] or steps:
        by_rank = permutation.ExpertIndices(*route)
        leaving = [permutation.permute(x, None, by_rank, kernels)[0] for x in rows]
        rows = _travel(leaving, sent, received, way)
    rows = list(rows)
    if recipe is not None:
        rows[0] = _unpack(rows[0], first, recipe)
    if near is not None:
        way, *known = near
        came_GM = handle[5].view(len(handle[11]), -1).T
        again = torch.ops.moetrain.deepep_combine_backward
        rows = [again(x, known, way, num_sms, precision, came_GM) for x in rows]
    return rows


@fake_of(_exchange_rows)
def _(
    rows: Sequence[torch.Tensor],
    handle: Sequence[torch.Tensor],
    num_rows: int,
    is_back: bool,
    ways: str,
    num_sms: int,
    precision: str,
    backend: str,
) -> list[torch.Tensor]:
    return [x.new_empty(num_rows, *x.shape[1:]) for x in rows]


def _save_exchange(ctx: OpContext, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    rows, handle, _, ctx.is_back, ctx.ways, ctx.num_sms, ctx.precision, ctx.backend = inputs
    ctx.save_for_backward(*handle)
    ctx.num_rows = rows[0].shape[0]


def _differentiate_exchange(ctx: OpContext, d_outputs: list[torch.Tensor]) -> tuple[object, ...]:
    handle = list(ctx.saved_tensors)  # once: recomputed tensors cannot be unpacked again
    d_rows = _exchange_rows(
        [d.contiguous() for d in d_outputs],
        handle,
        num_rows=ctx.num_rows,
        is_back=not ctx.is_back,
        ways=ctx.ways,
        num_sms=ctx.num_sms,
        precision=ctx.precision,
        backend=ctx.backend,
    )
    return gradients(_exchange_rows, rows=d_rows, handle=[None] * len(handle))


register_gradient(_exchange_rows, _differentiate_exchange, _save_exchange)


def _travel(
    rows: Sequence[torch.Tensor],
    sent_GM: torch.Tensor,
    received_GM: torch.Tensor,
    group: str,
    room: int = 0,
) -> list[torch.Tensor]:
    """Send the first rows of each tensor to rank 0, the next to rank 1, and so on.

    Each rank sends rows that originate on all M machines. The result is sorted by machine of
    origin, then by sending rank. With one machine it has at least ``room`` rows; rows past those
    received are unspecified.

    Args:
        sent_GM, received_GM: int64 on the host, the number of rows sent to and received from each
            rank of ``group``, by machine of origin.
    """
    sent, received = ([sum(x) for x in rows_of_ints(each)] for each in (sent_GM, received_GM))
    arriving, leaving, ranks = sum(received), sum(sent), resolve_group(group)
    outputs = [x.new_empty(max(arriving, room), *x.shape[1:]) for x in rows]
    leaves = [x[:leaving] for x in rows]
    with annotate("exchange_rows", *leaves):
        works = [
            all_to_all_single(x[:arriving], y, received, sent, group=ranks, async_op=True)
            for x, y in zip(outputs, leaves, strict=True)
        ]
        with waiting(rows[0].device):
            for work in works:
                work.wait()
    return [permutation.transpose_blocks(x, received_GM) for x in outputs]


def _pack(x_ND: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Return the bytes of each row in e4m3, followed by those of its scales."""
    rows = recipe.rows(x_ND.contiguous())
    return torch.cat([x.view(torch.uint8) for x in (rows.values, rows.scales_by_row())], 1)


def _unpack(bytes_SC: torch.Tensor, like_ND: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    values, scales = (x.contiguous() for x in bytes_SC.tensor_split([like_ND.shape[1]], dim=1))
    rows = Quantised.received(values.view(E4M3), scales.view(torch.float32), recipe.tiled)
    return rows.to(like_ND.dtype, "auto")


# The compiler drops ops with unused or empty results, as on a rank without tokens. The other ranks
# would then wait for ever.
_EXCHANGES = (torch.ops.moetrain.exchange_counts.default, torch.ops.moetrain.exchange_rows.default)
for _op in _EXCHANGES:
    torch.fx.has_side_effect(_op)
worth_saving("dispatch", *_EXCHANGES)  # in both directions: recomputed blocks send no token again
