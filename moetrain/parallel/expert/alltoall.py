"""Tokens to their experts' ranks by all-to-all: plain collectives, on every device.

Tokens are sorted by the rank they go to, as :mod:`moetrain.kernels.experts.permutation` sorts by
expert,
with the ranks in the place of the experts: a token has a slot for each choice, and of those that
lead to one rank the first alone counts. With 8 of 128 experts over 4 ranks that is 3.6 rows a token
(2.7 of them for other ranks) in the place of 8. A token's ids and weights travel with every copy,
and the receiver picks its own. ``combine`` goes the same way back.

Everything is an op that the compiler sees, with the numbers of tokens and rows that arrive as
unknown sizes: a block stays one graph whatever the routing. The host waits for the device once in a
forward, for these numbers; they are then tensors on the host that the backward reuses, so it never
waits. A forward that is recomputed in the backward exchanges, and waits, again, unless the
recomputation policy keeps the results of ``exchange_counts`` and ``exchange_rows``.

With ``kernels.precision`` fp8 tokens are sent in e4m3, and so are the gradients that go the same
way in the backward of ``combine``, each with its scale in the same message: half of the bytes.
Experts in e4m3 would round them so anyhow; their bits are the same. Sums come back as they were.

Left out on purpose: hiding the exchange behind compute.

Legend: W expert parallel ranks, L local experts, T tokens here, K experts a token, N rows to send
(room for T * min(K, W)), S tokens that arrive, R rows of the local experts, D width.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from moetrain.config.compute import Precision
from moetrain.kernels.annotate import annotate
from moetrain.kernels.backend import Backend, worth_saving
from moetrain.kernels.experts.permutation import (
    ExpertIndices,
    expert_indices,
    permute_tokens,
    unpermute,
)
from moetrain.kernels.quant.e4m3 import E4M3, Quantised, dequantise, quantise_rows
from moetrain.models.architecture import FP32
from moetrain.parallel.collectives import all_to_all_single, resolve_group
from moetrain.parallel.expert.expert import Received, count_local_experts


class AllToAll:
    """A :class:`moetrain.parallel.expert.expert.Transport` over the ranks of ``group``.

    Raises:
        ValueError: a number of experts that the ranks cannot share equally.
    """

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        backend: Backend = "auto",
        precision: Precision = "bf16",
    ) -> None:
        self.num_ranks, self.precision = group.size(), precision
        self.num_local_experts = count_local_experts(num_experts, group.size())
        self.first_expert = group.rank() * self.num_local_experts
        self.group_name: str = group.group_name
        self.backend: Backend = backend

    def dispatch(
        self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> Received:
        """What arrives here of all ranks' tokens; ids are those of all E experts."""
        (tokens, slots), ranks = ids_TK.shape, self.num_ranks
        rank_TK = ids_TK // self.num_local_experts  # rounds down: -1 stays -1
        route = expert_indices(
            first_slots(rank_TK), ranks, self.backend, num_rows=tokens * min(slots, ranks)
        )
        # One tensor for both, because each one is a message. Ids are exact in fp32, up to 2^24.
        routing_TC = torch.cat((weights_TK.float(), ids_TK.float()), dim=1)
        x_ND = permute_tokens(x_TD, route, self.backend)
        routing_NC = permute_tokens(routing_TC, route, self.backend)

        every_rank_W = torch.arange(ranks, dtype=rank_TK.dtype, device=rank_TK.device)
        slots_W = (rank_TK[..., None] == every_rank_W).sum((0, 1), dtype=torch.int32)
        tokens_S0, rows_R0, sent_W, received_W = _exchange_counts(
            torch.stack((route.counts_E, slots_W), dim=1), self.group_name
        )
        x_SD, routing_SC = _exchange_rows(
            [x_ND, routing_NC],
            sent_W,
            received_W,
            tokens_S0.shape[0],
            self.group_name,
            "forward" if self.precision == "fp8" else "",
        )
        weights_SK, ids_SK = routing_SC.split(slots, dim=1)
        local_SK = ids_SK.int() - self.first_expert
        is_here_SK = (local_SK >= 0) & (local_SK < self.num_local_experts)
        return Received(
            x_SD,
            torch.where(is_here_SK, local_SK, -1),
            weights_SK,
            rows_R0.shape[0],
            handle=(*route, sent_W, received_W),
        )

    def combine(self, y_SD: torch.Tensor, handle: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """``y_TD``: the sum over ranks of each token's rows, in fp32, rounded once."""
        route, (sent_W, received_W) = ExpertIndices(*handle[:4]), handle[4:]
        (y_ND,) = _exchange_rows(
            [y_SD],
            received_W,
            sent_W,
            route.row_slot_R.shape[0],
            self.group_name,
            "backward" if self.precision == "fp8" else "",
        )
        return unpermute(y_ND, route, self.backend)


def first_slots(rank_TK: torch.Tensor) -> torch.Tensor:
    """``rank_TK`` with -1 wherever an earlier slot of the token has the same rank."""
    is_same_TKK = rank_TK[:, :, None] == rank_TK[:, None, :]
    return torch.where(is_same_TKK.tril(-1).any(2), -1, rank_TK)


@torch.library.custom_op("moetrain::exchange_counts", mutates_args=())
def _exchange_counts(
    counts_W2: torch.Tensor, group: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """From the tokens for every rank and the rows that they become there, what will arrive.

    Returns two tensors that hold nothing and have S and R rows (a shape is how a number comes out
    of an op as a size), and the tokens to send to and to receive from every rank (int64 [W] on the
    host).
    """
    received_W2 = torch.empty_like(counts_W2)
    all_to_all_single(received_W2, counts_W2, group=resolve_group(group))
    # The one wait for the device: memory for what arrives cannot be reserved without its size.
    sent_W2, received_W2 = torch.stack((counts_W2, received_W2)).cpu().long()
    tokens, rows = received_W2.sum(0).tolist()
    tokens_S0, rows_R0 = counts_W2.new_empty(tokens, 0), counts_W2.new_empty(rows, 0)
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
    narrow: str,
) -> list[torch.Tensor]:
    """Sends the first rows of each tensor to rank 0, the next to rank 1, ...

    ``num_received`` is how many rows each result has; what is past the sum of ``received_W``, in
    results as in ``rows``, is unspecified. ``narrow`` says which way the first tensor's rows travel
    in e4m3: "forward", "backward" or neither.
    """
    sent, received = sent_W.tolist(), received_W.tolist()
    first = rows[0]
    if narrow == "forward":
        rows = [_packed(first), *rows[1:]]
    outputs = [given.new_empty(num_received, *given.shape[1:]) for given in rows]
    leaving = [given[: sum(sent)] for given in rows]
    with annotate("exchange_rows", *leaving):
        works = [
            all_to_all_single(
                out[: sum(received)],
                given,
                received,
                sent,
                group=resolve_group(group),
                async_op=True,
            )
            for out, given in zip(outputs, leaving, strict=True)
        ]
        for work in works:
            work.wait()
    if narrow == "forward":
        outputs[0] = _unpacked(outputs[0], first.dtype)
    return outputs


def _packed(x_ND: torch.Tensor) -> torch.Tensor:
    """Bytes of each row's numbers in e4m3, then those of its scale."""
    values_ND, scales_N = quantise_rows(x_ND.contiguous())
    return torch.cat((values_ND.view(torch.uint8), scales_N.view(torch.uint8).view(-1, FP32)), 1)


def _unpacked(bytes_SC: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    values, scales = (x.contiguous() for x in bytes_SC.tensor_split([-FP32], dim=1))
    return dequantise(Quantised(values.view(E4M3), scales.view(torch.float32)[:, 0]), dtype)


@_exchange_rows.register_fake
def _(rows, sent_W, received_W, num_received, group, narrow):
    return [given.new_empty(num_received, *given.shape[1:]) for given in rows]


def _save_exchange(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    rows, sent_W, received_W, _, ctx.group, ctx.narrow = inputs
    ctx.save_for_backward(sent_W, received_W)
    ctx.num_sent = rows[0].shape[0]


def _differentiate_exchange(ctx: Any, d_outputs: list[torch.Tensor]):
    sent_W, received_W = ctx.saved_tensors
    d_outputs = [d.contiguous() for d in d_outputs]
    narrow = "forward" if ctx.narrow == "backward" else ""
    d_rows = _exchange_rows(d_outputs, received_W, sent_W, ctx.num_sent, ctx.group, narrow)
    return d_rows, *[None] * 5


_exchange_rows.register_autograd(_differentiate_exchange, setup_context=_save_exchange)

# The compiler drops ops whose results are unused or empty, as on a rank without tokens. The other
# ranks would wait for it for ever.
_EXCHANGES = (torch.ops.moetrain.exchange_counts.default, torch.ops.moetrain.exchange_rows.default)
for _op in _EXCHANGES:
    torch.fx.has_side_effect(_op)
worth_saving("dispatch", *_EXCHANGES)  # both ways: recomputed blocks send no token again
