"""Exact balance: busy experts are copied to idle ranks, for one forward and its backward.

With ``moe.redundant_experts`` N a rank has N places for copies behind its own experts. A layer's
forward gathers all ranks' counts, plans on the device which copies go where
(:mod:`moetrain.kernels.experts.replicas`), and dispatchers then see ``W * (L + N)`` places in place
of E experts. The products take copies as they take experts: matrices have N more rows, which hold
something only while an op of this file runs. Copies are on their way while tokens are dispatched.
For the backward they are kept as an op's result is, or fetched again where that is recomputed:
the rows may be another layer's or micro-batch's meanwhile. Gradients of copies are on their way
back until FSDP reduces those of the block.

All pass through memory that the ranks of one machine share, one expert's size a place. Two
barriers on the device, as in :mod:`moetrain.parallel.fsdp.transport`, keep its writers and readers
apart, and one stream has all of it in one order. Left out on purpose: several machines.

Legend: W expert parallel ranks, E experts, L = E / W local experts, N places for copies, T tokens,
K experts a token, S tokens that arrive.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from moetrain.config import ConfigError
from moetrain.kernels.backend import Backend, use_fast, worth_saving
from moetrain.kernels.annotate import annotate
from moetrain.kernels.experts.mlp import _expert_mlp, _expert_mlp_backward
from moetrain.kernels.experts.mlp_fp8 import _expert_mlp_fp8, _expert_mlp_fp8_backward
from moetrain.kernels.experts.permutation import expert_indices
from moetrain.kernels.experts.replicas import (
    add_gradients,
    place_ids,
    plan_replicas,
    send_copies,
)
from moetrain.models.moe import Dispatched, Experts
from moetrain.parallel.fsdp.transport import CopyStreams, Wait, shared_memory, why_apart
from moetrain.parallel.mesh import all_gather_start

_FREE, _WRITTEN = range(2)
_BY_GROUP: "weakref.WeakValueDictionary[str, Replicas]" = weakref.WeakValueDictionary()


class Replicas:
    """``spare`` places for copies on every rank of ``group``, of ``num_experts`` in all.

    Raises:
        ConfigError: ranks do not reach one another's memory. Collective.
    """

    least_rows = 1024
    """The fewest rows that are worth a copy. Its weights travel twice and its gradient once, a row
    is multiplied three times: both take longer the larger an expert is."""

    def __init__(
        self,
        num_experts: int,
        spare: int,
        group: dist.ProcessGroup,
        device: torch.device,
        backend: Backend = "auto",
    ) -> None:
        reason = why_apart(group, device)
        if reason is not None:
            raise ConfigError("moe.redundant_experts", f"{spare}, but {reason}; set 0")
        self.num_experts, self.spare, self.group = num_experts, spare, group
        self.device, self.backend = device, backend
        self.num_local_experts = num_experts // group.size()
        self.group_name: str = group.group_name
        self.is_late = False
        """Whether gradients of copies may be on their way after a backward, until :meth:`finish`."""
        self._streams = CopyStreams(device)
        self._arrival: Wait | None = None
        self._return: Wait | None = None
        self._memory: Any = None
        self._places: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        """Of each matrix, every rank's shared memory [N, M], and where that begins."""
        _BY_GROUP[self.group_name] = self

    def assign(
        self, ids_TK: torch.Tensor, experts: Experts | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Plan copies of ``experts``, and let them travel; give the places (int32) of the experts
        that tokens chose (int32, -1: none), and the ones copied, [W, N], -1: none. Collective."""
        matrices: list[torch.Tensor] = []
        if experts is not None and use_fast(self.backend, ids_TK):
            matrices = [getattr(experts, name).detach() for name in experts.weights]
        how = self.num_experts, self.spare, self.group_name, self.least_rows, self.backend
        return _assign(ids_TK.contiguous(), matrices, *how)

    def compute(self, experts: Experts, sent: Dispatched) -> torch.Tensor:
        """Give ``y_SD`` of experts and copies; matrices have N rows more than experts."""
        x_SD, weights_SK, indices, copies_WN = *sent[:3], sent.copies_WN
        assert copies_WN is not None  # the dispatcher has planned them
        matrices = [getattr(experts, name).to(x_SD.dtype) for name in experts.weights]
        if not use_fast(self.backend, x_SD):
            matrices = _fetch(*matrices, copies_WN, self.group_name)
            return experts(x_SD, weights_SK, indices, sent.typical_rows, matrices)
        given = (x_SD, weights_SK, indices.slot_row_TK, indices.offsets_E, *matrices)
        how = self.group_name, experts.precision, experts.activation, indices.row_slot_R.shape[0]
        return _expert_mlp_copied(*(x.contiguous() for x in given), copies_WN, *how)[0]

    # ---- within ops ----------------------------------------------------------------------------

    def start(self, matrices: Sequence[torch.Tensor], copies_WN: torch.Tensor) -> None:
        """Begin to write the experts that are copied here behind the rank's own in every matrix."""
        memory, wholes = self._shared(matrices), _rows_of(matrices)
        local, rank, stream = self.num_local_experts, self.group.rank(), self._streams.push
        with self._streams.behind(stream), annotate("expert_copies"):
            memory.wait(_FREE)
            for whole, places in zip(wholes, self._places, strict=True):
                send_copies(whole[:local], copies_WN, rank, *places, self.backend)
            memory.arrive(_WRITTEN)
            memory.wait(_WRITTEN)
            for whole, (parts, _) in zip(wholes, self._places, strict=True):
                whole[local:].copy_(parts[rank])
            memory.arrive(_FREE)
        self._arrival = self._streams.end(stream, kept=copies_WN)

    def fetch(self, matrices: Sequence[torch.Tensor], copies_WN: torch.Tensor) -> None:
        """Wait for what was begun last, or begin now."""
        if self._arrival is None:
            self.start(matrices, copies_WN)
        assert self._arrival is not None
        self._arrival()
        self._arrival = None

    def give_back(self, gradients: Sequence[torch.Tensor], copies_WN: torch.Tensor) -> None:
        """Add gradients of copies, the last N rows on every rank, to those of the experts."""
        self.finish()
        memory, wholes = self._shared(gradients), _rows_of(gradients)
        local, rank, stream = self.num_local_experts, self.group.rank(), self._streams.push
        with self._streams.behind(stream), annotate("expert_copies"):
            memory.wait(_FREE)
            for whole, (parts, _) in zip(wholes, self._places, strict=True):
                parts[rank].copy_(whole[local:])
            memory.arrive(_WRITTEN)
            memory.wait(_WRITTEN)
            for whole, places in zip(wholes, self._places, strict=True):
                add_gradients(whole[:local], copies_WN, rank, *places, self.backend)
            memory.arrive(_FREE)
        self._return = self._streams.end(stream, kept=(*gradients, copies_WN))
        if not self.is_late:
            self.finish()

    def finish(self) -> None:
        """Let the current stream wait for gradients that are on their way."""
        if self._return is not None:
            self._return()
            self._return = None

    def _shared(self, matrices: Sequence[torch.Tensor]) -> Any:
        """Give the shared memory, which is made at the first use. Collective."""
        if self._memory is None:
            sizes = [self.spare * math.prod(m.shape[1:]) * m.element_size() for m in matrices]
            self._memory = shared_memory(sum(sizes), self.group, self.device)
            pieces = [part.split(sizes) for part in self._memory.parts]
            for i, matrix in enumerate(matrices):
                parts = [p[i].view(matrix.dtype).view(self.spare, -1) for p in pieces]
                addresses = torch.tensor([p.data_ptr() for p in parts], device=self.device)
                self._places.append((parts, addresses))
        return self._memory


def _rows_of(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    # Through .data, which has a version counter of its own: autograd would else take copies for a
    # change of what it saved.
    return [m.data.view(len(m), -1) for m in matrices]


@torch.library.custom_op("moetrain::assign_places", mutates_args=())
def _assign(
    ids_TK: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    num_experts: int,
    spare: int,
    group: str,
    least: int,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    replicas, how = _BY_GROUP[group], cast("Backend", backend)
    ranks = replicas.group
    indices = expert_indices(ids_TK, num_experts, how)
    counts_WE, work = all_gather_start(indices.counts_E, ranks)
    work.wait()
    plan = plan_replicas(counts_WE, spare, ranks.rank(), least, how)
    if matrices:
        replicas.start(matrices, plan.experts_WN)
    return place_ids(ids_TK, indices, plan, ranks.rank(), how), plan.experts_WN


@_assign.register_fake
def _(ids_TK, matrices, num_experts, spare, group, least, backend):
    return torch.empty_like(ids_TK), ids_TK.new_empty(_BY_GROUP[group].group.size(), spare)


@torch.library.custom_op("moetrain::expert_mlp_copied", mutates_args=())
def _expert_mlp_copied(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    copies_WN: torch.Tensor,
    group: str,
    precision: str,
    activation: str,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The results of the op of ``precision``, and copies of both matrices' last N rows, which it
    fills first; they are no results."""
    matrices = (w_gate_up_E2FD, w_down_EDF)
    _BY_GROUP[group].fetch(matrices, copies_WN)
    kept = (m[-copies_WN.shape[1] :].clone() for m in matrices)
    given = (x_TD, weights_TK, slot_row_TK, offsets_E, *matrices)
    if precision == "bf16":
        return *_expert_mlp(*given, activation, num_rows), *kept
    return *_expert_mlp_fp8(*given, precision == "fp8_gradients", num_rows), *kept


@torch.library.custom_op("moetrain::expert_mlp_copied_backward", mutates_args=())
def _expert_mlp_copied_backward(
    dy_TD: torch.Tensor,
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    a_R2F: torch.Tensor,
    kept_gate_up_N2FD: torch.Tensor,
    kept_down_NDF: torch.Tensor,
    copies_WN: torch.Tensor,
    group: str,
    precision: str,
    activation: str,
    is_trained: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    matrices = (w_gate_up_E2FD, w_down_EDF)
    for matrix, kept in zip(matrices, (kept_gate_up_N2FD, kept_down_NDF), strict=True):
        matrix.data[-len(kept) :].copy_(kept)
    given = (dy_TD, x_TD, weights_TK, slot_row_TK, offsets_E, *matrices, a_R2F)
    if precision == "bf16":
        found = _expert_mlp_backward(*given, activation, is_trained)
    else:
        found = _expert_mlp_fp8_backward(*given, precision == "fp8_gradients", is_trained)
    if is_trained:
        _BY_GROUP[group].give_back(found[2:], copies_WN)
    return found


@_expert_mlp_copied.register_fake
def _(x_TD, weights_TK, slot_row_TK, offsets_E, w_gate_up, w_down, copies_WN, *how):
    kept = (w.new_empty(copies_WN.shape[1], *w.shape[1:]) for w in (w_gate_up, w_down))
    return torch.empty_like(x_TD), x_TD.new_empty(how[-1], w_gate_up.shape[1]), *kept


@_expert_mlp_copied_backward.register_fake
def _(dy_TD, x_TD, weights_TK, slot_row_TK, offsets_E, w_gate_up, w_down, *how):
    matrices = (torch.empty_like(w) if how[-1] else w.new_empty(0) for w in (w_gate_up, w_down))
    return torch.empty_like(x_TD), torch.empty_like(weights_TK), *matrices


def _save_products(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.how = inputs[7:-1]
    ctx.save_for_backward(*inputs[:6], *output[1:], inputs[6])
    ctx.set_materialize_grads(False)  # results beside the first have no gradient


def _differentiate_products(ctx: Any, dy_TD: torch.Tensor | None, *_: None):
    if dy_TD is None:
        return (None,) * 11
    is_trained = ctx.needs_input_grad[4] or ctx.needs_input_grad[5]
    given = (dy_TD.contiguous(), *ctx.saved_tensors, *ctx.how, is_trained)
    dx_TD, d_weights_TK, *matrices = _expert_mlp_copied_backward(*given)
    return dx_TD, d_weights_TK, None, None, *(matrices if is_trained else (None,) * 2), *[None] * 5


_expert_mlp_copied.register_autograd(_differentiate_products, setup_context=_save_products)


# What plain torch multiplies are copies of all, for autograd saves what a product takes.
@torch.library.custom_op("moetrain::fetch_copies", mutates_args=())
def _fetch(
    w_gate_up_E2FD: torch.Tensor, w_down_EDF: torch.Tensor, copies_WN: torch.Tensor, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    matrices = w_gate_up_E2FD.clone(), w_down_EDF.clone()
    _BY_GROUP[group].fetch(matrices, copies_WN)
    return matrices


@torch.library.custom_op("moetrain::give_back_gradients", mutates_args=())
def _give_back(
    d_gate_up_E2FD: torch.Tensor, d_down_EDF: torch.Tensor, copies_WN: torch.Tensor, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    dense = torch.contiguous_format
    gradients = (d_gate_up_E2FD.clone(memory_format=dense), d_down_EDF.clone(memory_format=dense))
    _BY_GROUP[group].give_back(gradients, copies_WN)
    return gradients


@_fetch.register_fake
@_give_back.register_fake
def _(first, second, copies_WN, group):
    return torch.empty_like(first), torch.empty_like(second)


def _save(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    ctx.save_for_backward(inputs[2])
    ctx.group = inputs[3]


def _differentiate(ctx: Any, d_first: torch.Tensor, d_second: torch.Tensor):
    return *_give_back(d_first, d_second, *ctx.saved_tensors, ctx.group), None, None


_fetch.register_autograd(_differentiate, setup_context=_save)

# As in moetrain.parallel.expert.dispatch: a rank without tokens must still call.
_OPS = [
    getattr(torch.ops.moetrain, name).default
    for name in (
        "assign_places",
        "expert_mlp_copied",
        "expert_mlp_copied_backward",
        "fetch_copies",
        "give_back_gradients",
    )
]
for _op in _OPS:
    torch.fx.has_side_effect(_op)
worth_saving("routing", _OPS[0])
worth_saving("experts", _OPS[1])
