"""Expert parallelism by all-to-all: every rank holds some experts, and rows travel to them.

Rank r of W holds experts ``[r * E/W, (r+1) * E/W)``, so rows sorted by expert are also sorted by
rank, and each rank's part of them is sent as it lies. Worked example with W=2, E=4, K=1::

                       rank 0               rank 1
    token's expert     [3, 0, 1]            [0, 3]
    sorted rows        0 1 | 3              0 | 3
    received           0 1   0              3   3         (from rank 0, then from rank 1)
    local expert       0 1   0              1   1

What arrives is sorted by source rank and then by expert; a second permutation sorts it by local
expert. An expert thus sees its rows in the order of the concatenated batch. Combining goes the same
way back.

Everything is an op that the compiler sees, with the number of received rows as an unknown size: a
block stays one graph whatever the routing. The host waits for the device once in a forward, for the
numbers of rows; they are then tensors on the host that the backward reuses, so it never waits. A
forward that is recomputed in the backward exchanges, and waits, again, unless the recomputation
policy keeps the results of ``exchange_counts`` and ``exchange_rows``.

Left out on purpose: sending a token once to a rank where it chose several experts, and hiding the
exchange behind compute.

Legend: W expert parallel ranks, E experts, L = E / W local experts, T tokens here, K experts a
token, R = T * K rows sorted here, S rows received (R in the terms of a ``Dispatcher``), D width.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from moetrain.kernels import Backend, ExpertIndices, expert_indices, permute, unpermute
from moetrain.models import Dispatched
from moetrain.parallel.collectives import all_to_all_single, resolve_group


class AllToAllDispatcher:
    """A :class:`moetrain.models.Dispatcher` over the ranks of ``group``.

    ``combine`` and ``dispatch``, and the backward of each, are collective: every rank of the group
    calls them, with any number of tokens, zero included. Ids of -1 are not sent. What is received
    has exactly as many rows as were sent here.

    Raises:
        ValueError: a number of experts that the ranks cannot share equally.
    """

    def __init__(
        self, num_experts: int, group: dist.ProcessGroup, backend: Backend = "auto"
    ) -> None:
        if num_experts % group.size():
            raise ValueError(
                f"{num_experts} experts cannot be shared equally by {group.size()} expert parallel "
                "ranks; use a number of ranks that divides them"
            )
        self.num_experts, self.num_ranks = num_experts, group.size()
        self.group_name: str = group.group_name
        self.backend: Backend = backend

    def dispatch(
        self, x_TD: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Dispatched:
        """Rows of the local experts from all ranks' tokens; ids are those of all E experts."""
        indices = expert_indices(topk_ids_TK, self.num_experts, self.backend)
        x_RD, weights_R = permute(x_TD, topk_weights_TK, indices, self.backend)
        ids_S, sent_W, received_W = _exchange_counts(
            indices.counts_E.view(self.num_ranks, -1), self.group_name
        )
        x_SD, weights_S = _exchange_rows(
            [x_RD, weights_R], sent_W, received_W, ids_S.shape[0], self.group_name
        )
        local = expert_indices(ids_S[:, None], self.num_experts // self.num_ranks, self.backend)
        x_SD, weights_S = permute(x_SD, weights_S[:, None], local, self.backend)
        ctx = (*indices, *local, sent_W, received_W)
        return Dispatched(x_SD, weights_S, local.offsets_E, ctx)

    def combine(self, y_RD: torch.Tensor, ctx: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """``y_TD``: the sum of each token's rows, wherever their experts are."""
        indices, local = ExpertIndices(*ctx[:4]), ExpertIndices(*ctx[4:8])
        sent_W, received_W = ctx[8:]
        y_SD = unpermute(y_RD, local, self.backend)
        (y_RD,) = _exchange_rows(
            [y_SD], received_W, sent_W, indices.row_slot_R.shape[0], self.group_name
        )
        return unpermute(y_RD, indices, self.backend)


@torch.library.custom_op("moetrain::exchange_counts", mutates_args=())
def _exchange_counts(
    counts_WL: torch.Tensor, group: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From the rows here of every rank's experts, what will arrive.

    Returns the local expert of each row to come (int32 [S], in order of arrival), and the rows to
    send to and to receive from every rank (int64 [W] on the host).
    """
    received_WL = torch.empty_like(counts_WL)
    all_to_all_single(received_WL, counts_WL, group=resolve_group(group))
    # The one wait for the device: memory for the rows cannot be reserved without their number.
    sent, received = torch.stack((counts_WL, received_WL)).sum(2).tolist()
    ranks, experts = counts_WL.shape
    experts_WL = torch.arange(experts, dtype=torch.int32, device=counts_WL.device).repeat(ranks)
    ids_S = experts_WL.repeat_interleave(received_WL.flatten(), output_size=sum(received))
    return ids_S, torch.tensor(sent), torch.tensor(received)


@_exchange_counts.register_fake
def _(counts_WL: torch.Tensor, group: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids_S = counts_WL.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int32)
    sent_W, received_W = (
        torch.empty(counts_WL.shape[0], dtype=torch.int64, device="cpu") for _ in range(2)
    )
    return ids_S, sent_W, received_W


# One op for all that travels together: two ops that do not depend on each other could be ordered
# differently by the compilers of two ranks.
@torch.library.custom_op("moetrain::exchange_rows", mutates_args=())
def _exchange_rows(
    rows: Sequence[torch.Tensor],
    sent_W: torch.Tensor,
    received_W: torch.Tensor,
    num_received: int,
    group: str,
) -> list[torch.Tensor]:
    """Sends the first rows of each tensor to rank 0, the next to rank 1, ...

    ``num_received`` is how many rows each result has; what is past the sum of ``received_W``, in
    results as in ``rows``, is unspecified.
    """
    sent, received = sent_W.tolist(), received_W.tolist()
    outputs = _exchange_rows_fake(rows, sent_W, received_W, num_received, group)
    works = [
        all_to_all_single(
            out[: sum(received)],
            given[: sum(sent)],
            received,
            sent,
            group=resolve_group(group),
            async_op=True,
        )
        for out, given in zip(outputs, rows, strict=True)
    ]
    for work in works:
        work.wait()
    return outputs


@_exchange_rows.register_fake
def _exchange_rows_fake(
    rows: Sequence[torch.Tensor],
    sent_W: torch.Tensor,
    received_W: torch.Tensor,
    num_received: int,
    group: str,
) -> list[torch.Tensor]:
    return [given.new_empty(num_received, *given.shape[1:]) for given in rows]


def _save_exchange(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    rows, sent_W, received_W, _, ctx.group = inputs
    ctx.save_for_backward(sent_W, received_W)
    ctx.num_sent = rows[0].shape[0]


def _differentiate_exchange(ctx: Any, d_outputs: list[torch.Tensor]):
    sent_W, received_W = ctx.saved_tensors
    d_outputs = [d.contiguous() for d in d_outputs]
    d_rows = _exchange_rows(d_outputs, received_W, sent_W, ctx.num_sent, ctx.group)
    return d_rows, None, None, None, None


_exchange_rows.register_autograd(_differentiate_exchange, setup_context=_save_exchange)

# The compiler drops ops whose results are unused or empty, as on a rank without tokens. The other
# ranks would wait for it for ever.
torch.fx.has_side_effect(torch.ops.moetrain.exchange_counts.default)
torch.fx.has_side_effect(torch.ops.moetrain.exchange_rows.default)
