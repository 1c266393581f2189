"""Experts over DeepEP in chunks of tokens: while one chunk is computed, others travel.

    communication    D1 | D2      C1 D3      C2      C3        D dispatch, C combine
    computation         | experts 1 | experts 2 | experts 3    backward: D and C change places

The first dispatch stays exposed, and so does the forward's last combine; the backward's runs beside
the gradients of the experts' weights, which come last because nothing waits for them. The number of
chunks weighs this against smaller products, and against the gradient of the experts' weights, which
is added up over chunks.

This is one op, and its backward another. What runs beside what is decided by the order in which
kernels are launched on two streams, and a compiler keeps no order but that of data: Inductor
reorders to save memory, and in the backward the order would be autograd's. Everything in here is an
opaque op by itself, so that nothing is left unfused. The communication's kernels need some SMs at
once, which those of the experts' products that run beside them leave free (``sparing_sms``). The
products that begin when nothing should be travelling take every SM: with 24 SMs free in all of them
a layer took 4 % longer.

Memory that one stream allocates and the other uses is given free by the package, in its
asynchronous calls, when both are done with it.

Left out on purpose: the reference kernels (they have no backward to call by hand), and hiding the
rest of a block.

Legend: W expert parallel ranks, E experts, L = E / W local experts, T tokens here, K experts a
token, S tokens received, R rows of the local experts, D model width, F expert width; sizes S and R
are a chunk's.
"""

from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

import torch

from moetrain.kernels import expert_indices, permute, unpermute
from moetrain.kernels.experts import mlp_row_grads, mlp_rows, mlp_weight_grads
from moetrain.parallel.deepep import DeepEP
from moetrain.parallel.deepep_ops import (
    HANDLE_SIZE,
    Layout,
    connection,
    empty_handle,
    own_handle,
    own_send_head,
)

ASYNC = {"async_finish": True, "allocate_on_comm_stream": True}


class OverlappedExperts:
    """Dispatch, experts and combine of an MoE layer as one call, in ``chunks`` (two or more).

    Collective, as ``transport`` is, and with its sizes. For CUDA and its kernels alone.
    """

    def __init__(self, transport: DeepEP, chunks: int) -> None:
        self.transport, self.chunks = transport, chunks

    def __call__(
        self,
        x_TD: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        w_gate_up_L2FD: torch.Tensor,
        w_down_LDF: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``y_TD``, and how many rows there was no room for (int32; None: there is for all)."""
        transport = self.transport
        transport.check_tokens(x_TD.shape[0])
        tokens = rows = 0
        if transport.static is not None:
            tokens = ceil(transport.static.max_tokens / self.chunks)
            rows = ceil(transport.static.rows * tokens / transport.static.max_tokens)
        layouts = [
            Layout.of(ids_TK[part], transport.num_experts, transport.num_ranks)
            for part in _parts(x_TD.shape[0], self.chunks)
        ]
        y_TD, *saved = overlapped_experts(
            x_TD.contiguous(),
            ids_TK.contiguous(),
            weights_TK.contiguous(),
            w_gate_up_L2FD.contiguous(),
            w_down_LDF.contiguous(),
            [tensor for layout in layouts for tensor in layout],
            transport.group_name,
            transport.num_sms,
            transport.num_ranks * tokens,
            rows,
        )
        if transport.static is None:
            return y_TD, None
        dropped = [
            (chunk.counts_L.sum(dtype=torch.int32) - rows).clamp(min=0) for chunk in _chunks(saved)
        ]
        return y_TD, torch.stack(dropped).sum(dtype=torch.int32)


class _Chunk(NamedTuple):
    """What the backward needs of a chunk, and the rows that were chosen."""

    x_RD: torch.Tensor
    a_R2F: torch.Tensor
    weights_R: torch.Tensor
    counts_L: torch.Tensor
    offsets_L: torch.Tensor
    slot_row_SK: torch.Tensor
    handle: Sequence[torch.Tensor]


CHUNK_TENSORS = len(_Chunk._fields) - 1 + HANDLE_SIZE


def _chunks(saved: Sequence[torch.Tensor]) -> list[_Chunk]:
    """``saved``, by chunk."""
    own = CHUNK_TENSORS - HANDLE_SIZE
    starts = range(0, len(saved), CHUNK_TENSORS)
    return [_Chunk._make((*saved[i : i + own], saved[i + own : i + CHUNK_TENSORS])) for i in starts]


def _parts(tokens: int, chunks: int) -> list[slice]:
    """Which tokens each chunk has: equally many, but for one."""
    return [slice(tokens * i // chunks, tokens * (i + 1) // chunks) for i in range(chunks)]


def _layouts(tensors: Sequence[torch.Tensor]) -> list[Layout]:
    """``tensors``, by chunk."""
    size = len(Layout._fields)
    return [Layout(*tensors[i : i + size]) for i in range(0, len(tensors), size)]


@torch.library.custom_op("moetrain::overlapped_experts", mutates_args=())
def overlapped_experts(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    w_gate_up_L2FD: torch.Tensor,
    w_down_LDF: torch.Tensor,
    layouts: Sequence[torch.Tensor],
    group: str,
    num_sms: int,
    worst_tokens: int,
    worst_rows: int,
) -> list[torch.Tensor]:
    """``y_TD``, then the tensors of each :class:`_Chunk`; sizes as for ``deepep_dispatch``."""
    by_chunk = _layouts(layouts)
    parts, saved, returning = _parts(x_TD.shape[0], len(by_chunk)), [], []
    with connection(group, x_TD.shape[1], num_sms) as found:
        buffer, ids_TK = found.buffer, ids_TK.to(found.ids_dtype)
        ready = buffer.capture()

        def send(i: int) -> Any:
            return buffer.dispatch(
                x_TD[parts[i]],
                topk_idx=ids_TK[parts[i]],
                topk_weights=weights_TK[parts[i]],
                **by_chunk[i].arguments(),
                num_worst_tokens=worst_tokens,
                config=found.dispatch_config,
                previous_event=ready,
                **ASYNC,
            )

        arriving = send(0)
        for i in range(len(parts)):
            x_SD, ids_SK, weights_SK, counts, handle, arrived = arriving
            arrived.current_stream_wait()
            local = expert_indices(
                ids_SK.int(),
                w_down_LDF.shape[0],
                "triton",
                num_rows=worst_rows if worst_tokens else sum(counts),
            )
            x_RD, weights_R = permute(x_SD, weights_SK, local, "triton")
            y_RD, a_R2F = mlp_rows(
                x_RD,
                local.offsets_E,
                w_gate_up_L2FD,
                w_down_LDF,
                weights_R,
                num_sms,  # for the next dispatch, and the combine before
            )
            y_SD = unpermute(y_RD, local, "triton")
            if i + 1 < len(parts):
                arriving = send(i + 1)  # only now: the host waits for its counts, not the device
            returning.append(
                buffer.combine(
                    y_SD,
                    own_send_head(handle),
                    config=found.combine_config,
                    previous_event=buffer.capture(),
                    **ASYNC,
                )
            )
            saved += [x_RD, a_R2F, weights_R, local.counts_E, local.offsets_E, local.slot_row_TK]
            saved += own_handle(handle)
        for *_, returned in returning:
            returned.current_stream_wait()
    return [torch.cat([y_TD for y_TD, *_ in returning]), *saved]


@overlapped_experts.register_fake
def _(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    w_gate_up_L2FD: torch.Tensor,
    w_down_LDF: torch.Tensor,
    layouts: Sequence[torch.Tensor],
    group: str,
    num_sms: int,
    worst_tokens: int,
    worst_rows: int,
) -> list[torch.Tensor]:
    (tokens, width), top_k = x_TD.shape, ids_TK.shape[1]
    local_experts, up_width, _ = w_gate_up_L2FD.shape
    by_chunk, saved = _layouts(layouts), []
    for part in _parts(tokens, len(by_chunk)):
        received, rows = worst_tokens, worst_rows
        if not worst_tokens:
            received, rows = (torch.library.get_ctx().new_dynamic_size() for _ in range(2))
        saved += [
            x_TD.new_empty(rows, width),
            x_TD.new_empty(rows, up_width),
            weights_TK.new_empty(rows),
            x_TD.new_empty(local_experts, dtype=torch.int32),
            x_TD.new_empty(local_experts, dtype=torch.int32),
            x_TD.new_empty(received, top_k, dtype=torch.int32),
            *empty_handle(
                x_TD, part.stop - part.start, received, len(by_chunk[0].tokens_W), num_sms
            ),
        ]
    return [torch.empty_like(x_TD), *saved]


@torch.library.custom_op("moetrain::overlapped_experts_backward", mutates_args=())
def _backward(
    d_y_TD: torch.Tensor,
    saved: Sequence[torch.Tensor],
    w_gate_up_L2FD: torch.Tensor,
    w_down_LDF: torch.Tensor,
    group: str,
    num_sms: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of tokens, routing weights, and the experts' weights."""
    chunks = _chunks(saved)
    parts, returning = _parts(d_y_TD.shape[0], len(chunks)), []
    d_experts: list[torch.Tensor] = []
    with connection(group, d_y_TD.shape[1], num_sms) as found:
        buffer = found.buffer
        ready = buffer.capture()

        def send(i: int) -> Any:
            return buffer.dispatch(
                d_y_TD[parts[i]],
                handle=tuple(chunks[i].handle),
                config=found.dispatch_config,
                previous_event=ready,
                **ASYNC,
            )

        arriving = send(0)
        for i, chunk in enumerate(chunks):
            last = i + 1 == len(chunks)
            d_y_SD, *_, arrived = arriving
            if not last:
                arriving = send(i + 1)
            arrived.current_stream_wait()
            d_y_RD = torch.ops.moetrain.permute_tokens(
                d_y_SD, chunk.slot_row_SK, chunk.x_RD.shape[0]
            )
            d_x_RD, d_weights_R, d_a_R2F, h_RF = mlp_row_grads(
                d_y_RD,
                chunk.offsets_L,
                w_gate_up_L2FD,
                w_down_LDF,
                chunk.weights_R,
                chunk.a_R2F,
                0 if last else num_sms,  # for the next dispatch
            )
            d_x_SD, d_weights_SK = torch.ops.moetrain.permute_backward(
                d_x_RD, d_weights_R, chunk.slot_row_SK
            )
            returning.append(
                buffer.combine(
                    d_x_SD,
                    own_send_head(chunk.handle),
                    topk_weights=d_weights_SK,
                    config=found.combine_config,
                    previous_event=buffer.capture(),
                    **ASYNC,
                )
            )
            d_weights = mlp_weight_grads(
                d_y_RD,
                chunk.x_RD,
                chunk.offsets_L,
                d_a_R2F,
                h_RF,
                num_sms,  # for the combine
            )
            if i == 0:
                d_experts = list(d_weights)
            else:
                torch._foreach_add_(d_experts, list(d_weights))
        for *_, returned in returning:
            returned.current_stream_wait()
    d_x_TD, d_weights_TK = (torch.cat(x) for x in list(zip(*returning, strict=True))[:2])
    return d_x_TD, d_weights_TK, d_experts[0], d_experts[1]


@_backward.register_fake
def _(
    d_y_TD: torch.Tensor,
    saved: Sequence[torch.Tensor],
    w_gate_up_L2FD: torch.Tensor,
    w_down_LDF: torch.Tensor,
    group: str,
    num_sms: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    chunk = _chunks(saved)[0]
    return (
        torch.empty_like(d_y_TD),
        chunk.weights_R.new_empty(d_y_TD.shape[0], chunk.slot_row_SK.shape[1]),
        torch.empty_like(w_gate_up_L2FD),
        torch.empty_like(w_down_LDF),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    _, _, _, w_gate_up_L2FD, w_down_LDF, layouts, ctx.group, ctx.num_sms, *_ = inputs
    ctx.num_layouts = len(layouts)
    ctx.save_for_backward(w_gate_up_L2FD, w_down_LDF, *output[1:])
    ctx.set_materialize_grads(False)  # what was saved has none


def _differentiate(ctx: Any, d_outputs: list[torch.Tensor]):
    w_gate_up_L2FD, w_down_LDF, *saved = ctx.saved_tensors
    d_x_TD, d_weights_TK, *d_weights = _backward(
        d_outputs[0].contiguous(), saved, w_gate_up_L2FD, w_down_LDF, ctx.group, ctx.num_sms
    )
    return d_x_TD, None, d_weights_TK, *d_weights, [None] * ctx.num_layouts, *[None] * 4


overlapped_experts.register_autograd(_differentiate, setup_context=_save)

torch.fx.has_side_effect(torch.ops.moetrain.overlapped_experts.default)
torch.fx.has_side_effect(torch.ops.moetrain.overlapped_experts_backward.default)
