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

Legend: W expert parallel ranks, E experts, L = E / W local experts, T tokens here, K experts a
token, N rows to send (room for T * min(K, W)), S tokens that arrive, R rows of the local experts,
D width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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

# torch has no public way back from a group's name; 2.13 gives names a type of their own.
_resolve_group: Callable[[Any], dist.ProcessGroup] = distributed_c10d._resolve_process_group


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

    Its two exchanges are opaque ops rather than functional collectives: how many rows travel is
    known on the host at run time alone, rows past these stay unspecified, several tensors travel
    together in one order on all ranks, and a rank without tokens must still take part. The compiler
    sees the numbers of tokens and rows that arrive as unknown sizes, so a block stays one graph
    whatever the routing. The host waits for the device once in a forward, for these numbers; the
    backward reuses them. A forward that is recomputed exchanges, and waits, again, unless the
    recomputation policy keeps the results of both ops.
    """

    def send(self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> Received:
        (tokens, slots), ranks = ids_TK.shape, self.num_ranks
        rank_TK = ids_TK // self.num_local_experts  # rounds down: -1 stays -1
        is_same_TKK = rank_TK[:, :, None] == rank_TK[:, None, :]
        first_TK = torch.where(is_same_TKK.tril(-1).any(2), -1, rank_TK)
        room = tokens * min(slots, ranks)
        route = expert_indices(first_TK, ranks, self.backend, num_rows=room)
        # One tensor for both, because each one is a message. Ids are exact in fp32, up to 2^24.
        routing_TC = torch.cat((weights_TK.float(), ids_TK.float()), dim=1)
        x_ND, _ = permute(x_TD, None, route, self.backend)
        routing_NC, _ = permute(routing_TC, None, route, self.backend)

        every_rank_W = torch.arange(ranks, dtype=rank_TK.dtype, device=rank_TK.device)
        slots_W = (rank_TK[..., None] == every_rank_W).sum((0, 1), dtype=torch.int32)
        tokens_S0, rows_R0, sent_W, received_W = _exchange_counts(
            torch.stack((route.counts_E, slots_W), dim=1), self.group_name
        )
        how = tokens_S0.shape[0], self.group_name, self.precision, "forward"
        x_SD, routing_SC = _exchange_rows([x_ND, routing_NC], sent_W, received_W, *how)
        weights_SK, ids_SK = routing_SC.split(slots, dim=1)
        local_SK = ids_SK.int() - self.rank * self.num_local_experts
        is_here_SK = (local_SK >= 0) & (local_SK < self.num_local_experts)
        return Received(
            x_SD,
            torch.where(is_here_SK, local_SK, -1),
            weights_SK,
            rows_R0.shape[0],
            handle=(*route, sent_W, received_W),
        )

    def combine(self, y_SD: torch.Tensor, ctx: tuple[torch.Tensor, ...]) -> torch.Tensor:
        route, (sent_W, received_W) = ExpertIndices(*ctx[:4]), ctx[4:]
        how = route.row_slot_R.shape[0], self.group_name, self.precision, "backward"
        (y_ND,) = _exchange_rows([y_SD], received_W, sent_W, *how)
        return unpermute(y_ND, route, self.backend)


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


# One op for all that travels together: two ops that do not depend on each other could be ordered
# differently by the compilers of two ranks.
@torch.library.custom_op("moetrain::exchange_rows", mutates_args=())
def _exchange_rows(
    rows: Sequence[torch.Tensor],
    sent_W: torch.Tensor,
    received_W: torch.Tensor,
    num_received: int,
    group: str,
    precision: str,
    narrow_pass: str,
) -> list[torch.Tensor]:
    """Send the first rows of each tensor to rank 0, the next to rank 1, ...

    ``num_received`` is how many rows each result has; what is past the sum of ``received_W``, in
    results as in ``rows``, is unspecified. In ``narrow_pass``, "forward" or "backward", the
    first tensor's rows travel as ``precision`` quantises them.
    """
    sent, received, first = sent_W.tolist(), received_W.tolist(), rows[0]
    recipe = RECIPES.get(precision) if narrow_pass == "forward" else None
    if recipe is not None:
        rows = [_pack(first, recipe), *rows[1:]]
    outputs = [given.new_empty(num_received, *given.shape[1:]) for given in rows]
    leaving = [given[: sum(sent)] for given in rows]
    with annotate("exchange_rows", *leaving):
        how: Any = {"group": _resolve_group(group), "async_op": True}
        works = [
            all_to_all_single(out[: sum(received)], given, received, sent, **how)
            for out, given in zip(outputs, leaving, strict=True)
        ]
        for work in works:
            work.wait()  # pyright: ignore[reportOptionalMemberAccess]
    if recipe is not None:
        outputs[0] = _unpack(outputs[0], first, recipe)
    return outputs


def _pack(x_ND: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Bytes of each row's numbers in e4m3, then those of its scales."""
    rows = recipe.rows(x_ND.contiguous())
    return torch.cat([x.view(torch.uint8) for x in (rows.values, rows.scales_by_row())], 1)


def _unpack(bytes_SC: torch.Tensor, like_ND: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    values, scales = (x.contiguous() for x in bytes_SC.tensor_split([like_ND.shape[1]], dim=1))
    rows = Quantised.received(values.view(E4M3), scales.view(torch.float32), recipe.tiled)
    return rows.to(like_ND.dtype, "auto")


@_exchange_rows.register_fake
def _(rows, sent_W, received_W, num_received, group, precision, narrow_pass):
    return [given.new_empty(num_received, *given.shape[1:]) for given in rows]


def _save_exchange(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    rows, sent_W, received_W, _, ctx.group, ctx.precision, ctx.narrow_pass = inputs
    ctx.save_for_backward(sent_W, received_W)
    ctx.num_sent = rows[0].shape[0]


def _differentiate_exchange(ctx: Any, d_outputs: list[torch.Tensor]):
    sent_W, received_W = ctx.saved_tensors
    d_outputs = [d.contiguous() for d in d_outputs]
    turned = "forward" if ctx.narrow_pass == "backward" else "backward"
    how = ctx.group, ctx.precision, turned
    d_rows = _exchange_rows(d_outputs, received_W, sent_W, ctx.num_sent, *how)
    return d_rows, *[None] * 6


_exchange_rows.register_autograd(_differentiate_exchange, setup_context=_save_exchange)

# The compiler drops ops whose results are unused or empty, as on a rank without tokens. The other
# ranks would wait for it for ever.
_EXCHANGES = (torch.ops.moetrain.exchange_counts.default, torch.ops.moetrain.exchange_rows.default)
for _op in _EXCHANGES:
    torch.fx.has_side_effect(_op)
worth_saving("dispatch", *_EXCHANGES)  # both ways: recomputed blocks send no token again
