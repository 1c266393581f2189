"""Expert parallelism: every rank holds some experts, and tokens travel to them.

Rank r of W holds experts ``[r * E/W, (r+1) * E/W)``. Each token travels to every rank where it
chose an expert, once, and the sum of what these ranks made of it travels back. At home it is copied
to a row for each of its experts there. Worked example with W=2, E=4, K=2 (-: no expert)::

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

With ``kernels.precision`` fp8 tokens are sent in e4m3, and so are the gradients that go the same
way in the backward of ``combine``, each with its scales in the same message: half of the bytes.
Experts in e4m3 would round them so anyhow; their bits are the same. Sums travel unrounded.

Left out on purpose: hiding the exchange behind compute.

Legend: W expert parallel ranks, on M machines in G places, E experts, L = E / W local experts, T
tokens here, K experts a token, A tokens that come to this machine by this rank, S tokens that
arrive, R rows of the local experts, P places that tokens are sorted by, D width.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed import all_to_all_single

from moetrain.config.compute import Precision
from moetrain.kernels.experts import permutation
from moetrain.kernels.experts.routed import Routed
from moetrain.kernels.quant.e4m3 import E4M3, Quantised
from moetrain.kernels.quant.recipes import RECIPES, Recipe
from moetrain.models.moe import Dispatched, Dispatcher, Experts, MoEOutput
from moetrain.parallel.expert.replicas import Replicas
from moetrain.parallel.mesh import ExpertHops, resolve_group
from moetrain.parallel.waits import waiting
from moetrain.runtime.annotate import annotate
from moetrain.runtime.backend import Backend, worth_saving


class Received(NamedTuple):
    """The tokens that chose an expert of this rank, by source rank, then in token order."""

    x_SD: torch.Tensor
    ids_SK: torch.Tensor
    """int32: the local expert of each slot; -1 stands for none, or an expert of another rank."""
    weights_SK: torch.Tensor
    """fp32, differentiable; unspecified where the id is -1."""
    num_rows: int
    """R, the number of ids that are not -1; to the compiler a size that it does not know. Where
    sizes are fixed beforehand, the number of rows that there is room for."""
    handle: tuple[torch.Tensor, ...]
    """Tensors for ``combine``, opaque to everyone else."""
    may_drop: bool = False
    """Whether ``num_rows`` is only the room, which more rows may exceed."""


class ExpertParallelDispatcher(Dispatcher, ABC):
    """A :class:`moetrain.models.Dispatcher` over the ranks of ``group``.

    ``dispatch``, ``combine`` and the backward of each are collective: every rank of the group calls
    them, with any number of tokens, zero included. It makes exactly the rows that the local experts
    take. Subclasses say how tokens travel.

    Raises:
        ValueError: the ranks cannot share the experts equally.
    """

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        backend: Backend = "auto",
        precision: Precision = "bf16",
        replicas: Replicas | None = None,
    ) -> None:
        super().__init__(num_experts, backend)
        self.num_ranks, self.rank = group.size(), group.rank()
        if num_experts % self.num_ranks:
            problem = f"{num_experts} experts cannot be shared equally by {self.num_ranks} expert"
            raise ValueError(f"{problem} parallel ranks; use a number of ranks that divides them")
        self.num_local_experts = num_experts // self.num_ranks
        self.replicas = replicas
        if replicas is not None:  # what is dispatched to are experts and places for copies
            self.num_local_experts += replicas.spare
            self.num_experts = self.num_ranks * self.num_local_experts
        self.group_name: str = group.group_name
        self.precision: Precision = precision

    @abstractmethod
    def send(self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> Received:
        """Send tokens by int32 ids of all E experts (-1: none), with fp32 weights."""

    @abstractmethod
    def combine(self, y_SD: torch.Tensor, ctx: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Give ``y_TD``, the sum over ranks of their rows for each token, in fp32, rounded once."""

    def dispatch(
        self, x_TD: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Dispatched:
        """Bring all ranks' tokens to the local experts; ids are those of all E experts."""
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
        if self.replicas is None:
            return super().through(experts, x_TD, routed)
        places_TK, copies_WN = self.replicas.assign(routed.ids_TK)
        places_TK, copies = self.replicas.start(experts, x_TD, places_TK, copies_WN)
        sent = self.dispatch(x_TD, places_TK, routed.weights_TK)
        y_SD = self.replicas.compute(experts, sent, copies, copies_WN)
        return MoEOutput(self.combine(y_SD, sent.ctx), sent.dropped)


class AllToAll(ExpertParallelDispatcher):
    """Sends tokens by plain collectives, on every device.

    Tokens are sorted by the rank they go to, as :mod:`moetrain.kernels.experts.permutation` sorts
    by expert: of a token's choices that lead to one rank the first alone counts. With 8 of 128
    experts over 4 ranks that is 3.6 rows a token (2.7 of them for other ranks) instead of 8. A
    token's ids and weights travel with every copy, and the receiver picks its own.

    Its two exchanges are opaque ops rather than functional collectives: how many rows travel is
    known on the host at run time alone, rows past these stay unspecified, several tensors travel
    together in one order on all ranks, and a rank without tokens must still take part. The compiler
    sees the numbers of tokens and rows that arrive as unknown sizes, so a block stays one graph
    whatever the routing. The host waits for the device once in a forward, for these numbers; the
    backward reuses them. A forward that is recomputed exchanges, and waits, again, unless the
    recomputation policy keeps the results of both ops.

    Over several machines tokens take two ``hops``: over the ranks in this one's place on every
    machine, then over those of its own. A token thus comes to each machine once, and is passed on
    over the faster links inside (as DeepEP does, arXiv 2412.19437). Worked example, two machines of
    four::

        a token of rank 1, whose experts are on ranks 0, 4, 5, 7
        across   1 -> 1 (stays)   1 -> 5
        inside   1 -> 0           5 -> 4    5 -> 5 (stays)    5 -> 7

    What arrives is in the order of one hop. Every rank's sum comes straight home, to be added up
    there in one order: so all bits are those of one hop. Sums on the way would be rounded once
    more, and be grouped by machine.
    """

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        backend: Backend = "auto",
        precision: Precision = "bf16",
        replicas: Replicas | None = None,
        hops: ExpertHops | None = None,
    ) -> None:
        super().__init__(num_experts, group, backend, precision, replicas)
        self.hops = None if hops is None or min(hop.size() for hop in hops) == 1 else hops
        self.num_sms = 0  # no kernels of DeepEP

    def send(self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> Received:
        rank_TK = ids_TK // self.num_local_experts  # rounds down: -1 stays -1
        sizes, handle, hop = self._plan(rank_TK)
        if self.hops:  # sort what arrives by the places here that it is passed on to
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
        """One tensor for both, because each one is a message. Ids are exact in fp32, to 2^24."""
        return torch.cat((weights_TK.float(), ids_TK.float()), dim=1)

    @staticmethod
    def _local(ids_SK: torch.Tensor, part: int, size: int) -> torch.Tensor:
        """Number the experts of a part of ``size`` from 0 on (int32); others are -1."""
        local_SK = ids_SK.int() - part * size
        return torch.where((local_SK >= 0) & (local_SK < size), local_SK, -1)

    def _plan(self, rank_TK: torch.Tensor) -> tuple[list[int], list[torch.Tensor], Any]:
        """Tell all ranks what goes to them, by the ranks that tokens choose (-1: none).

        Returns the sizes (S, R, and with hops A and the rows that leave to be passed on), the
        handle but for the hop inside, and what this rank sends and gets in that hop (int64 [G, M]).
        """
        home, slots_W = self._route(rank_TK, self.num_ranks)
        counts, once = [home.counts_E[None], slots_W[None]], None
        machines, places = [hop.size() for hop in self.hops or ()] or (1, self.num_ranks)
        place = self.rank % places
        if self.hops:
            once, _ = self._route(rank_TK // places, machines)
            # Those in this one's place alone learn what comes to them, and whom to pass it on to.
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
        self, place_TK: torch.Tensor, places: int, room: int | None = None
    ) -> tuple[permutation.ExpertIndices, torch.Tensor]:
        """Sort tokens by the places that they go to, each once a place; count slots of each."""
        tokens, slots = place_TK.shape
        is_same_TKK = place_TK[:, :, None] == place_TK[:, None, :]
        first_TK = torch.where(is_same_TKK.tril(-1).any(2), -1, place_TK)
        room = tokens * min(slots, places) if room is None else room
        every_place_P = torch.arange(places, dtype=place_TK.dtype, device=place_TK.device)
        slots_P = (place_TK[..., None] == every_place_P).sum((0, 1), dtype=torch.int32)
        return permutation.expert_indices(first_TK, places, self.backend, num_rows=room), slots_P

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
        """The ``ways`` of the op: names of the group of all ranks and of the hops' groups."""
        return " ".join((self.group_name, *(hop.group_name for hop in self.hops or ())))


@torch.library.custom_op("moetrain::exchange_counts", mutates_args=())
def _exchange_counts(counts_CW: torch.Tensor, group: str) -> list[torch.Tensor]:
    """Tell every rank of ``group`` its C counts; the first is how many tokens come to it.

    Returns what is sent to and received from every rank (int64 [C, W] on the host), behind C
    tensors that hold nothing and have as many rows as were received in all: a shape is how a number
    comes out of an op as a size.
    """
    ranks = resolve_group(group)
    sent_WC = counts_CW.T.contiguous()
    received_WC = torch.empty_like(sent_WC)
    with waiting(counts_CW.device):
        all_to_all_single(received_WC, sent_WC, group=ranks)
    # The one wait for the device: memory for what arrives cannot be reserved without its size.
    both_CW = torch.stack((sent_WC, received_WC)).transpose(1, 2).cpu().long()
    sizes = (counts_CW.new_empty(size, 0) for size in both_CW[1].sum(1).tolist())
    return [*sizes, *(x.clone(memory_format=torch.contiguous_format) for x in both_CW)]


@_exchange_counts.register_fake
def _(counts_CW, group):
    ctx = torch.library.get_ctx()
    sizes = (counts_CW.new_empty(ctx.new_dynamic_size(), 0) for _ in counts_CW)
    counts = (torch.empty(counts_CW.shape, dtype=torch.int64, device="cpu") for _ in range(2))
    return [*sizes, *counts]


# One op for all that travels together: two ops that do not depend on each other could be ordered
# differently by the compilers of two ranks.
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
    """Bring rows of tokens to the ranks of their experts, or back, added up for each token.

    ``ways`` are the group of all, which rows come back over, and those of hops, if there are any.
    ``handle`` has for each the order of rows and the numbers sent and received. With ``num_sms``
    the last hop is DeepEP's, which knows the way by its own handle. ``num_rows`` is how many rows
    each result has. On the way there the first tensor's rows travel as ``precision`` quantises
    them. Each way is the other's backward.
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


@_exchange_rows.register_fake
def _(rows, handle, num_rows, is_back, ways, num_sms, precision, backend):
    return [x.new_empty(num_rows, *x.shape[1:]) for x in rows]


def _save_exchange(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    rows, handle, _, ctx.is_back, ctx.ways, ctx.num_sms, ctx.precision, ctx.backend = inputs
    ctx.save_for_backward(*handle)
    ctx.num_rows = rows[0].shape[0]


def _differentiate_exchange(ctx: Any, d_outputs: list[torch.Tensor]) -> tuple[Any, ...]:
    d_rows = _exchange_rows(
        [d.contiguous() for d in d_outputs],
        list(ctx.saved_tensors),
        num_rows=ctx.num_rows,
        is_back=not ctx.is_back,
        ways=ctx.ways,
        num_sms=ctx.num_sms,
        precision=ctx.precision,
        backend=ctx.backend,
    )
    d_handle = [None] * len(ctx.saved_tensors)
    no_gradients = dict.fromkeys(
        ("num_rows", "is_back", "ways", "num_sms", "precision", "backend"), None
    )
    return d_rows, d_handle, *no_gradients.values()


_exchange_rows.register_autograd(_differentiate_exchange, setup_context=_save_exchange)


def _travel(
    rows: Sequence[torch.Tensor],
    sent_GM: torch.Tensor,
    received_GM: torch.Tensor,
    group: str,
    room: int = 0,
) -> list[torch.Tensor]:
    """Send the first rows of each tensor to rank 0, the next to rank 1, ...

    What comes from a rank are rows of M machines in turn: they are sorted by machine, then by rank.
    With one machine results have ``room`` or more rows, which are unspecified past those received.
    """
    sent, received = ([sum(x) for x in each.tolist()] for each in (sent_GM, received_GM))
    arriving, leaving, ranks = sum(received), sum(sent), resolve_group(group)
    outputs = [x.new_empty(max(arriving, room), *x.shape[1:]) for x in rows]
    leaves = [x[:leaving] for x in rows]
    with annotate("exchange_rows", *leaves):
        works: list[Any] = [
            all_to_all_single(x[:arriving], y, received, sent, group=ranks, async_op=True)
            for x, y in zip(outputs, leaves, strict=True)
        ]
        with waiting(rows[0].device):
            for work in works:
                work.wait()
    return [permutation.transpose_blocks(x, received_GM) for x in outputs]


def _pack(x_ND: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Bytes of each row's numbers in e4m3, then those of its scales."""
    rows = recipe.rows(x_ND.contiguous())
    return torch.cat([x.view(torch.uint8) for x in (rows.values, rows.scales_by_row())], 1)


def _unpack(bytes_SC: torch.Tensor, like_ND: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    values, scales = (x.contiguous() for x in bytes_SC.tensor_split([like_ND.shape[1]], dim=1))
    rows = Quantised.received(values.view(E4M3), scales.view(torch.float32), recipe.tiled)
    return rows.to(like_ND.dtype, "auto")


# The compiler drops ops whose results are unused or empty, as on a rank without tokens. The other
# ranks would wait for it for ever.
_EXCHANGES = (torch.ops.moetrain.exchange_counts.default, torch.ops.moetrain.exchange_rows.default)
for _op in _EXCHANGES:
    torch.fx.has_side_effect(_op)
worth_saving("dispatch", *_EXCHANGES)  # both ways: recomputed blocks send no token again
