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

Legend: W expert parallel ranks, on M machines in G places, E experts, T tokens here, K experts a
token, L rows for machines, A rows that come from machines, N rows that are passed on, S tokens that
arrive, R rows of the local experts, D width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed import all_to_all_single, distributed_c10d

from moetrain.config.compute import Precision
from moetrain.kernels.annotate import annotate
from moetrain.kernels.backend import Backend, worth_saving
from moetrain.kernels.experts.permutation import ExpertIndices, expert_indices, permute, unpermute
from moetrain.kernels.experts.routed import Routed
from moetrain.kernels.quant.e4m3 import E4M3, Quantised
from moetrain.kernels.quant.recipes import RECIPES, Recipe
from moetrain.models.moe import Dispatched, Dispatcher, Experts
from moetrain.parallel.expert.replicas import Replicas
from moetrain.parallel.mesh import all_gather_start

# torch has no public way back from a group's name; 2.13 gives names a type of their own.
_resolve_group: Callable[[Any], dist.ProcessGroup] = distributed_c10d._resolve_process_group
_EightTensors: Any = tuple[(torch.Tensor,) * 8]


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
            raise ValueError(
                f"{num_experts} experts cannot be shared equally by {self.num_ranks} expert "
                "parallel ranks; use a number of ranks that divides them"
            )
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
        local = expert_indices(
            arrived.ids_SK, self.num_local_experts, self.backend, num_rows=arrived.num_rows
        )
        dropped = None
        if arrived.may_drop:
            dropped = (local.counts_E.sum(dtype=torch.int32) - arrived.num_rows).clamp(min=0)
        tokens = arrived.x_SD, arrived.weights_SK
        return Dispatched(*tokens, local, arrived.handle, topk_ids_TK.numel(), dropped)

    def through(
        self, experts: Experts, x_TD: torch.Tensor, routed: Routed
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.replicas is None:
            return super().through(experts, x_TD, routed)
        places_TK, copies_WN = self.replicas.assign(routed.ids_TK, experts)
        sent = self.dispatch(x_TD, places_TK, routed.weights_TK)
        y_SD = self.replicas.compute(experts, sent, copies_WN)
        return self.combine(y_SD, sent.ctx), sent.dropped


class AllToAll(ExpertParallelDispatcher):
    """Sends tokens by plain collectives, on every device.

    Tokens are sorted by the rank they go to, as :mod:`moetrain.kernels.experts.permutation` sorts
    by expert: of a token's choices that lead to one rank the first alone counts. With 8 of 128
    experts over 4 ranks that is 3.6 rows a token (2.7 of them for other ranks) instead of 8. A
    token's ids and weights travel with every copy, and the receiver picks its own.

    Its exchanges are opaque ops rather than functional collectives: how many rows travel is
    known on the host at run time alone, rows past these stay unspecified, several tensors travel
    together in one order on all ranks, and a rank without tokens must still take part. The compiler
    sees the numbers of tokens and rows that arrive as unknown sizes, so a block stays one graph
    whatever the routing. The host waits for the device once in a forward, for these numbers; the
    backward reuses them. A forward that is recomputed exchanges, and waits, again, unless the
    recomputation policy keeps the results of the ops.

    With ``machines`` (the ranks of ``group`` in this one's place on every machine, and those on its
    own) a token is sent to each machine once, to the rank in its own rank's place, which passes it
    on over the faster links inside (as DeepEP does between machines, arXiv 2412.19437)::

        token of rank 1, whose experts are on ranks 0, 4, 5, 7 (two machines of four)
        across   1 -> 1 (stays)   1 -> 5
        inside   1 -> 0           5 -> 4    5 -> 5 (stays)    5 -> 7

    The tokens of each source machine are passed on by a collective of their own, so that all arrive
    in the same order as without. Every rank's row comes back the same way by itself, and they are
    added up at home in the same order. Thus all bits are those of one machine: sums on the way
    would be rounded once more, or travel in fp32, and be grouped by machine. Of 8 experts a token,
    on 2 machines of 8 ranks, 1.0 rows cross instead of 3.3, in dispatch and in the backward of
    combine; in the other two 3.3 do.
    """

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        backend: Backend = "auto",
        machines: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
        **how: Any,
    ) -> None:
        super().__init__(num_experts, group, backend, **how)
        self.num_machines = 1 if machines is None else machines[0].size()
        ways = " ".join(x.group_name for x in machines or (group,))
        self._how = ways, self.precision, backend

    def send(self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> Received:
        route, slots_W = self._route(ids_TK, self.num_ranks)
        tokens_S0, rows_R0, *counts = self._count(ids_TK, route, slots_W)
        handle, received = [*route, *counts], tokens_S0.shape[0]
        # One tensor for both, because each one is a message. Ids are exact in fp32, up to 2^24.
        routing_TC = torch.cat((weights_TK.float(), ids_TK.float()), dim=1)
        both = [x_TD, routing_TC]
        x_SD, routing_SC = _exchange_rows(both, handle, received, False, *self._how)
        weights_SK, ids_SK = routing_SC.split(ids_TK.shape[1], dim=1)
        local_SK = ids_SK.int() - self.rank * self.num_local_experts
        is_here_SK = (local_SK >= 0) & (local_SK < self.num_local_experts)
        local_SK = torch.where(is_here_SK, local_SK, -1)
        return Received(x_SD, local_SK, weights_SK, rows_R0.shape[0], tuple(handle))

    def combine(self, y_SD: torch.Tensor, ctx: tuple[torch.Tensor, ...]) -> torch.Tensor:
        tokens = ExpertIndices(*ctx[:4]).slot_row_TK.shape[0]
        (y_TD,) = _exchange_rows([y_SD], list(ctx), tokens, True, *self._how)
        return y_TD

    def _route(self, ids_TK: torch.Tensor, places: int) -> tuple[ExpertIndices, torch.Tensor]:
        """Sort tokens by the ranks or machines that they go to, each once a place, and count the
        slots for each place (int32)."""
        tokens, slots = ids_TK.shape
        place_TK = ids_TK // (self.num_experts // places)  # rounds down: -1 stays -1
        is_same_TKK = place_TK[:, :, None] == place_TK[:, None, :]
        first_TK = torch.where(is_same_TKK.tril(-1).any(2), -1, place_TK)
        room = tokens * min(slots, places)
        route = expert_indices(first_TK, places, self.backend, num_rows=room)
        every_place = torch.arange(places, dtype=place_TK.dtype, device=place_TK.device)
        return route, (place_TK[..., None] == every_place).sum((0, 1), dtype=torch.int32)

    def _count(
        self, ids_TK: torch.Tensor, route: ExpertIndices, slots_W: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """Give the sizes of what arrives, as shapes, and what the exchange takes beside a route."""
        if self.num_machines == 1:
            counts_W2 = torch.stack((route.counts_E, slots_W), dim=1)
            return _exchange_counts(counts_W2, self.group_name)
        once, _ = self._route(ids_TK, self.num_machines)
        token_L = once.row_slot_R.clamp(min=0) // ids_TK.shape[1]
        counts = torch.cat((route.counts_E, slots_W, once.counts_E))
        how = self.num_local_experts, self.group_name, self._how[0], self.backend
        tokens_S0, rows_R0, *found = _exchange_passed(ids_TK[token_L], counts, *how)
        return tokens_S0, rows_R0, token_L, *found


@torch.library.custom_op("moetrain::exchange_counts", mutates_args=())
def _exchange_counts(
    counts_W2: torch.Tensor, group: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tell every rank the tokens for it and the rows that they become there.

    Returns two tensors that hold nothing and have S and R rows (a shape is how a number comes out
    of an op as a size), and the tokens to send to and to receive from every rank (int64 [W] on the
    host).
    """
    received_W2 = torch.empty_like(counts_W2)
    all_to_all_single(received_W2, counts_W2, group=_resolve_group(group))
    # The one wait for the device: memory for what arrives cannot be reserved without its size.
    sent_W2, received_W2 = torch.stack((counts_W2, received_W2)).cpu().long()
    tokens, rows = received_W2.sum(0).tolist()
    tokens_S0 = counts_W2.new_empty(tokens, 0)
    rows_R0 = counts_W2.new_empty(rows, 0)
    return tokens_S0, rows_R0, sent_W2[:, 0].clone(), received_W2[:, 0].clone()


@_exchange_counts.register_fake
def _(counts_W2, group):
    ctx = torch.library.get_ctx()
    sizes = (counts_W2.new_empty(ctx.new_dynamic_size(), 0) for _ in range(2))
    counts = (torch.empty(counts_W2.shape[0], dtype=torch.int64, device="cpu") for _ in range(2))
    return *sizes, *counts


@torch.library.custom_op("moetrain::exchange_passed", mutates_args=())
def _exchange_passed(
    ids_LK: torch.Tensor,
    counts: torch.Tensor,
    num_local_experts: int,
    group: str,
    ways: str,
    backend: str,
) -> _EightTensors:  # pyright: ignore[reportInvalidTypeForm]
    """Do over machines what :func:`_exchange_counts` does, and find the rows that a rank passes on.

    ``ids_LK`` (int32) are those of the rows for each machine; ``counts`` (int32) are this rank's
    rows for each rank, slots for each rank, and rows for each machine.

    Returns, behind the sizes, the rows (int32) to pass on of those that come from machines, by
    source machine, then by rank; and on the host (int64) the rows to and from every machine and
    those that come back here from each [M], and the rows that are passed on and that arrive in the
    end, by source machine and place [M, G].
    """
    everyone, (across, inside) = _resolve_group(group), ways.split()
    machines, places = _resolve_group(across).size(), _resolve_group(inside).size()
    ranks, me = everyone.size(), everyone.rank()
    machine, place = divmod(me, places)
    table, work = all_gather_start(counts, everyone)
    work.wait()
    # The one wait, as above.
    tokens, slots, once = table.cpu().long().split([ranks, ranks, machines], 1)
    tokens = tokens.view(machines, places, machines, places)
    once = once.view(machines, places, machines)
    leaving_M, coming_M = once[machine, place], once[:, place, machine]
    passed_MG, received_MG = tokens[:, place, machine], tokens[:, :, machine, place]
    on_host = leaving_M, coming_M, tokens[machine, place].sum(1), passed_MG, received_MG
    on_host = (x.clone(memory_format=torch.contiguous_format) for x in on_host)
    sizes = (counts.new_empty(int(x.sum()), 0) for x in (received_MG, slots[:, me]))

    (ids_AK,) = _travel([ids_LK], leaving_M, coming_M, across)
    places_G = torch.arange(places, dtype=torch.int32, device=ids_AK.device)
    place_AK = ids_AK // num_local_experts - machine * places
    is_for_AG = (place_AK[:, :, None] == places_G).any(1)
    source_A = torch.arange(machines).repeat_interleave(coming_M).to(places_G)
    key_AG = torch.where(is_for_AG, places * source_A[:, None] + places_G, -1)
    how = cast("Backend", backend)
    by_key = expert_indices(key_AG, ranks, how, num_rows=int(passed_MG.sum()))
    return *sizes, by_key.row_slot_R // places, *on_host


@_exchange_passed.register_fake
def _(ids_LK, counts, num_local_experts, group, ways, backend):
    ctx = torch.library.get_ctx()
    tokens, rows, passed = (ctx.new_dynamic_size() for _ in range(3))
    machines, places = (_resolve_group(name).size() for name in ways.split())
    shapes = [(machines,)] * 3 + [(machines, places)] * 2
    on_host = (torch.empty(shape, dtype=torch.int64, device="cpu") for shape in shapes)
    sizes = (counts.new_empty(size, 0) for size in (tokens, rows))
    return *sizes, ids_LK.new_empty(passed), *on_host


# One op for all that travels together: two ops that do not depend on each other could be ordered
# differently by the compilers of two ranks.
@torch.library.custom_op("moetrain::exchange_rows", mutates_args=())
def _exchange_rows(
    rows: Sequence[torch.Tensor],
    handle: Sequence[torch.Tensor],
    num_rows: int,
    is_back: bool,
    ways: str,
    precision: str,
    backend: str,
) -> list[torch.Tensor]:
    """Send each token's row of every tensor to its ranks, or bring the sums of their rows back.

    ``num_rows`` is how many rows each result has. Not on the way back, the first tensor's rows
    travel as ``precision`` quantises them. Each way is the other's backward.
    """
    route, kernels = ExpertIndices(*handle[:4]), cast("Backend", backend)
    passed, (sent, received) = handle[4:-2], handle[-2:]
    *far, near = ways.split()
    if is_back:
        if far:
            rows = _travel(rows, received, sent, near)
            received, sent, near = sent.sum(1), passed[-1], far[0]
        room = route.row_slot_R.shape[0]
        back = _travel(rows, received, sent, near, room=room)
        return [unpermute(x, route, kernels) for x in back]
    if far:
        token_L, row_N, leaving_M, coming_M, _ = passed
        leaving = [x[token_L] for x in rows]
        coming = _travel(leaving, leaving_M, coming_M, far[0], precision)
        leaving = [x[row_N] for x in coming]
    else:
        leaving = [permute(x, None, route, kernels)[0] for x in rows]
    return _travel(leaving, sent, received, near, precision)


@_exchange_rows.register_fake
def _(rows, handle, num_rows, is_back, ways, precision, backend):
    return [given.new_empty(num_rows, *given.shape[1:]) for given in rows]


def _save_exchange(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    rows, handle, _, ctx.is_back, *ctx.how = inputs
    ctx.save_for_backward(*handle)
    ctx.num_rows = rows[0].shape[0]


def _differentiate_exchange(ctx: Any, d_outputs: list[torch.Tensor]):
    handle, d_outputs = list(ctx.saved_tensors), [d.contiguous() for d in d_outputs]
    d_rows = _exchange_rows(d_outputs, handle, ctx.num_rows, not ctx.is_back, *ctx.how)
    return d_rows, [None] * len(handle), *[None] * 5


_exchange_rows.register_autograd(_differentiate_exchange, setup_context=_save_exchange)


def _travel(
    rows: Sequence[torch.Tensor],
    sent_W: torch.Tensor,
    received_W: torch.Tensor,
    group: str,
    precision: str = "bf16",
    room: int | None = None,
) -> list[torch.Tensor]:
    """Send the first rows of each tensor to rank 0, the next to rank 1, ...

    Counts [M, G] are of M such exchanges, whose rows follow one another on both sides. ``room`` is
    how many rows each result has, which are unspecified past those received.
    """
    ranks, first, recipe = _resolve_group(group), rows[0], RECIPES.get(precision)
    sent, received = (x.view(-1, ranks.size()).tolist() for x in (sent_W, received_W))
    if recipe is not None:
        rows = [_pack(first, recipe), *rows[1:]]
    total = int(received_W.sum()) if room is None else room
    outputs = [given.new_empty(total, *given.shape[1:]) for given in rows]
    leaving = [given[: int(sent_W.sum())] for given in rows]
    works: list[Any] = []
    with annotate("exchange_rows", *leaving):
        for out, given in zip(outputs, leaving, strict=True):
            blocks = _blocks(out, received), _blocks(given, sent), received, sent
            for block in zip(*blocks, strict=True):
                works.append(all_to_all_single(*block, group=ranks, async_op=True))
        for work in works:
            work.wait()
    if recipe is not None:
        outputs[0] = _unpack(outputs[0], first, recipe)
    return outputs


def _blocks(x: torch.Tensor, counts: Sequence[Sequence[int]]) -> Sequence[torch.Tensor]:
    sizes = [sum(each) for each in counts]
    return x[: sum(sizes)].split(sizes)


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
_OPS = [
    getattr(torch.ops.moetrain, f"exchange_{name}").default for name in ("counts", "passed", "rows")
]
for _op in _OPS:
    torch.fx.has_side_effect(_op)
worth_saving("dispatch", *_OPS)  # both ways: recomputed blocks send no token again
