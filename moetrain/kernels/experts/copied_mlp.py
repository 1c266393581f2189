"""The expert MLP over this device's experts and copies of other devices' experts.

It computes :func:`~moetrain.kernels.experts.mlp.expert_mlp`, or the same in e4m3, with L experts of
its own and N copies behind them. Copies are inputs like the experts: :func:`start_copies` fetches
them into tensors of their own, the MLP takes those, and autograd keeps them for the backward. A
block that is recomputed fetches them again. The backward returns one gradient, that of the own
experts, to which the gradients of the copies on all devices were added.

The products take one tensor with L + N experts. With ``room``, memory for N more lies behind the
experts, and only the copies are moved there; otherwise all L + N are moved. That memory is the op's
workspace: no tensor shows it and nothing else reads it, so the ops change none of their inputs.

Devices exchange experts through a :class:`Courier`. Ops find it by the name of its process group,
as collectives find theirs. It holds streams and memory, and nothing of a call.

The reference fetches copies and multiplies by a new tensor of all matrices.

Legend: T tokens, K experts a token, R rows, L experts here, N copies, E = L + N, W devices, D model
width, F expert width.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from moetrain.config.compute import Precision
from moetrain.kernels.experts.mlp import (
    expert_mlp,
    expert_mlp_backward_op,
    expert_mlp_op,
    gradient_shapes,
)
from moetrain.kernels.experts.permutation import ExpertIndices
from moetrain.kernels.experts.replicas import copy_used
from moetrain.runtime.backend import Backend, gradients, use_fast, worth_saving
from moetrain.runtime.typed import OpContext


class Courier(Protocol):
    """Moves experts between the devices of a process group, which all call it in one order."""

    rank: int

    def start_fetch(
        self,
        experts: Sequence[torch.Tensor],
        copies: Sequence[torch.Tensor],
        copies_WN: torch.Tensor,
    ) -> None:
        """Begin to write this device's ``copies``: rows of the devices' ``experts``.

        ``copies_WN`` has the expert in each place of every device, -1: none.
        """

    def wait(self) -> None:
        """Let the current stream wait for everything that was begun."""

    def give_back(self, gradients: Sequence[torch.Tensor], copies_WN: torch.Tensor) -> None:
        """Begin to add the last N rows of ``gradients``, on every device, to the experts' rows.

        The current stream waits for the sums, unless the courier leaves :meth:`wait` to the code
        that reads them.
        """


COURIERS: weakref.WeakValueDictionary[str, Courier] = weakref.WeakValueDictionary()
"""The couriers by the name of their process group."""


class _Matrices(NamedTuple):
    """The two matrices of this device's experts, and of the copies that it has."""

    w_gate_up_L2FD: torch.Tensor
    """The experts' first matrix; [L, F, D] without a gate."""
    w_down_LDF: torch.Tensor
    """The experts' second matrix."""
    copies_gate_up_N2FD: torch.Tensor
    """The copies' first matrix."""
    copies_down_NDF: torch.Tensor
    """The copies' second matrix."""
    copies_WN: torch.Tensor
    """int32, the expert in each place of every device; -1: none."""

    def joined(self, rank: int, room: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both matrices with the copies behind the experts, [E, ...].

        With ``room`` they are views of the experts' memory and of the N experts' behind it.
        """
        gate_up = self.w_gate_up_L2FD, self.copies_gate_up_N2FD
        down = self.w_down_LDF, self.copies_down_NDF
        if not room:
            return torch.cat(gate_up), torch.cat(down)
        return self._beside(*gate_up, rank), self._beside(*down, rank)

    def _beside(self, experts: torch.Tensor, copies: torch.Tensor, rank: int) -> torch.Tensor:
        shape = (len(experts) + len(copies), *experts.shape[1:])
        # torch raises if the storage is too small, for example if a compiler copied the experts.
        joined = experts.detach().as_strided(shape, experts.stride(), experts.storage_offset())
        room_NM = joined[len(experts) :].data.flatten(1)
        copy_used(room_NM, copies.flatten(1), self.copies_WN, rank, "triton")
        return joined


def copied_expert_mlp(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    indices: ExpertIndices,
    experts: Sequence[torch.Tensor],
    copies: Sequence[torch.Tensor],
    copies_WN: torch.Tensor,
    group: str,
    precision: Precision,
    activation: str,
    backend: Backend = "auto",
    *,
    room: bool = False,
) -> torch.Tensor:
    """Return ``y_TD``, the sum of each token's experts and copies.

    Args:
        x_TD, weights_TK, indices: as :func:`~moetrain.kernels.experts.mlp.expert_mlp` takes them,
            of L + N experts.
        experts: ``w_gate_up_L2FD`` (or ``w_up_LFD``) and ``w_down_LDF``.
        copies: those of :func:`start_copies`; empty for the reference, which fetches its own.
        copies_WN: int32, the expert in each place of every device; -1: none.
        group: the name of the process group of the devices.
        precision: the value of ``kernels.precision``.
        room: True: memory for N more experts, which no tensor shows, lies right behind both
            matrices.
    """
    gate_up, down = experts
    if not use_fast(backend, x_TD):
        gate_up, down = _fetch(gate_up, down, copies_WN, group)
        return expert_mlp(
            x_TD,
            weights_TK,
            indices,
            gate_up,
            down,
            backend,
            activation=activation,
            precision=precision,
        )
    copies_gate_up, copies_down = copies
    y_TD, _ = expert_mlp_copied_op(
        x_TD.contiguous(),
        weights_TK.contiguous(),
        indices.slot_row_TK.contiguous(),
        indices.offsets_E.contiguous(),
        gate_up.contiguous(),
        down.contiguous(),
        copies_gate_up.contiguous(),
        copies_down.contiguous(),
        copies_WN,
        group,
        precision,
        activation,
        room,
        indices.row_slot_R.shape[0],
    )
    return y_TD


# One op for both matrices: two that do not depend on each other could be ordered differently by the
# compilers of two devices.
@torch.library.custom_op("moetrain::start_copies", mutates_args=())
def start_copies(
    w_gate_up_L2FD: torch.Tensor,
    w_down_LDF: torch.Tensor,
    places_TK: torch.Tensor,
    copies_WN: torch.Tensor,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Begin to fetch copies of experts; return them, and a copy of ``places_TK``. Collective.

    Copies are [N, ...] of each matrix, and complete after ``Courier.wait``. The ops that take them
    wait first. Places without an expert are uninitialised. Tokens are dispatched by the returned
    places, so that no compiler can move the fetch behind the dispatch.
    """
    experts = (w_gate_up_L2FD, w_down_LDF)
    copies_gate_up, copies_down = copies = _empty_copies(w_gate_up_L2FD, w_down_LDF, copies_WN)
    COURIERS[group].start_fetch(experts, copies, copies_WN)
    return copies_gate_up, copies_down, places_TK.clone()


@start_copies.register_fake
def _(w_gate_up_L2FD, w_down_LDF, places_TK, copies_WN, group):
    copies_gate_up, copies_down = _empty_copies(w_gate_up_L2FD, w_down_LDF, copies_WN)
    places_TK = torch.empty_like(places_TK, memory_format=torch.contiguous_format)
    return copies_gate_up, copies_down, places_TK


def _empty_copies(
    w_gate_up_L2FD: torch.Tensor, w_down_LDF: torch.Tensor, copies_WN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensors for this device's copies of both matrices, [N, ...]."""
    spare = copies_WN.shape[1]
    return (
        w_gate_up_L2FD.new_empty(spare, *w_gate_up_L2FD.shape[1:]),
        w_down_LDF.new_empty(spare, *w_down_LDF.shape[1:]),
    )


@torch.library.custom_op("moetrain::expert_mlp_copied", mutates_args=())
def expert_mlp_copied_op(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_L2FD: torch.Tensor,
    w_down_LDF: torch.Tensor,
    copies_gate_up_N2FD: torch.Tensor,
    copies_down_NDF: torch.Tensor,
    copies_WN: torch.Tensor,
    group: str,
    precision: str,
    activation: str,
    room: bool,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of :func:`expert_mlp_op` for experts and copies."""
    courier = COURIERS[group]
    courier.wait()
    gate_up, down = _Matrices(
        w_gate_up_L2FD, w_down_LDF, copies_gate_up_N2FD, copies_down_NDF, copies_WN
    ).joined(courier.rank, room)
    tokens = x_TD, weights_TK, slot_row_TK, offsets_E
    return expert_mlp_op(*tokens, gate_up, down, activation, precision, num_rows)


@expert_mlp_copied_op.register_fake
def _(
    x_TD, weights_TK, slot_row_TK, offsets_E, w_gate_up_L2FD, w_down_LDF, copies_gate_up_N2FD,
    copies_down_NDF, copies_WN, group, precision, activation, room, num_rows,
):  # fmt: skip
    return torch.empty_like(x_TD), x_TD.new_empty(num_rows, w_gate_up_L2FD.shape[1])


@torch.library.custom_op("moetrain::expert_mlp_copied_backward", mutates_args=())
def expert_mlp_copied_backward_op(
    dy_TD: torch.Tensor,
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_L2FD: torch.Tensor,
    w_down_LDF: torch.Tensor,
    copies_gate_up_N2FD: torch.Tensor,
    copies_down_NDF: torch.Tensor,
    copies_WN: torch.Tensor,
    a_R2F: torch.Tensor,
    group: str,
    precision: str,
    activation: str,
    room: bool,
    is_trained: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, weights and the experts here (empty, unless ``is_trained``).

    The experts' gradients are complete when :meth:`Courier.give_back` says.
    """
    courier = COURIERS[group]
    gate_up, down = _Matrices(
        w_gate_up_L2FD, w_down_LDF, copies_gate_up_N2FD, copies_down_NDF, copies_WN
    ).joined(courier.rank, room)
    tokens = x_TD, weights_TK, slot_row_TK, offsets_E
    d_x_TD, d_weights_TK, d_gate_up, d_down = expert_mlp_backward_op(
        dy_TD, *tokens, gate_up, down, a_R2F, activation, precision, is_trained
    )
    if is_trained:
        courier.give_back((d_gate_up, d_down), copies_WN)
        local = len(w_down_LDF)
        d_gate_up, d_down = d_gate_up[:local], d_down[:local]
    return d_x_TD, d_weights_TK, d_gate_up, d_down


@expert_mlp_copied_backward_op.register_fake
def _(
    dy_TD, x_TD, weights_TK, slot_row_TK, offsets_E, w_gate_up_L2FD, w_down_LDF,
    copies_gate_up_N2FD, copies_down_NDF, copies_WN, a_R2F, group, precision, activation, room,
    is_trained,
):  # fmt: skip
    return gradient_shapes(x_TD, weights_TK, w_gate_up_L2FD, w_down_LDF, is_trained)


def _save_mlp(ctx: OpContext, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, ctx.group, ctx.precision, ctx.activation, ctx.room, _ = inputs
    _, a_R2F = output
    ctx.save_for_backward(*tensors, a_R2F)
    ctx.set_materialize_grads(False)  # the second result has no gradient


def _differentiate_mlp(ctx: OpContext, dy_TD: torch.Tensor | None, _: None) -> tuple[object, ...]:
    if dy_TD is None:
        return gradients(expert_mlp_copied_op)
    is_trained = any(ctx.needs_input_grad[4:6])
    d_x_TD, d_weights_TK, d_gate_up, d_down = expert_mlp_copied_backward_op(
        dy_TD.contiguous(),
        *ctx.saved_tensors,
        ctx.group,
        ctx.precision,
        ctx.activation,
        ctx.room,
        is_trained,
    )
    return gradients(
        expert_mlp_copied_op,
        x_TD=d_x_TD,
        weights_TK=d_weights_TK,
        w_gate_up_L2FD=d_gate_up if is_trained else None,
        w_down_LDF=d_down if is_trained else None,
    )


expert_mlp_copied_op.register_autograd(_differentiate_mlp, setup_context=_save_mlp)


@torch.library.custom_op("moetrain::fetch_copies", mutates_args=())
def _fetch(
    w_gate_up_L2FD: torch.Tensor,
    w_down_LDF: torch.Tensor,
    copies_WN: torch.Tensor,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both matrices with the copies behind the experts, [E, ...]."""
    experts, spare = (w_gate_up_L2FD, w_down_LDF), copies_WN.shape[1]
    copies = [w.new_zeros(spare, *w.shape[1:]) for w in experts]
    courier = COURIERS[group]
    courier.start_fetch([w.contiguous() for w in experts], copies, copies_WN)
    courier.wait()
    copies_gate_up, copies_down = copies
    return torch.cat((w_gate_up_L2FD, copies_gate_up)), torch.cat((w_down_LDF, copies_down))


@_fetch.register_fake
def _(w_gate_up_L2FD, w_down_LDF, copies_WN, group):
    spare = copies_WN.shape[1]
    gate_up, down = (
        w.new_empty(len(w) + spare, *w.shape[1:]) for w in (w_gate_up_L2FD, w_down_LDF)
    )
    return gate_up, down


@torch.library.custom_op("moetrain::give_back_gradients", mutates_args=())
def _give_back(
    d_gate_up_E2FD: torch.Tensor,
    d_down_EDF: torch.Tensor,
    copies_WN: torch.Tensor,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the first L rows of both, plus those of copies on all devices."""
    dense = torch.contiguous_format
    d_gate_up, d_down = (x.clone(memory_format=dense) for x in (d_gate_up_E2FD, d_down_EDF))
    COURIERS[group].give_back((d_gate_up, d_down), copies_WN)
    local = len(d_down) - copies_WN.shape[1]
    return d_gate_up[:local], d_down[:local]


@_give_back.register_fake
def _(d_gate_up_E2FD, d_down_EDF, copies_WN, group):
    local = len(d_down_EDF) - copies_WN.shape[1]
    d_gate_up, d_down = (x.new_empty(local, *x.shape[1:]) for x in (d_gate_up_E2FD, d_down_EDF))
    return d_gate_up, d_down


def _save_fetch(ctx: OpContext, inputs: tuple[Any, ...], output: object) -> None:
    _, _, copies_WN, ctx.group = inputs
    ctx.save_for_backward(copies_WN)


def _differentiate_fetch(
    ctx: OpContext, d_gate_up: torch.Tensor, d_down: torch.Tensor
) -> tuple[object, ...]:
    (copies_WN,) = ctx.saved_tensors
    d_gate_up, d_down = _give_back(d_gate_up, d_down, copies_WN, ctx.group)
    return gradients(_fetch, w_gate_up_L2FD=d_gate_up, w_down_LDF=d_down)


_fetch.register_autograd(_differentiate_fetch, setup_context=_save_fetch)

# A device without tokens must still run them. Compilers drop ops with empty or unused results.
_OPS = [
    getattr(torch.ops.moetrain, name).default
    for name in (
        "start_copies",
        "expert_mlp_copied",
        "expert_mlp_copied_backward",
        "fetch_copies",
        "give_back_gradients",
    )
]
for _op in _OPS:
    torch.fx.has_side_effect(_op)
worth_saving("experts", *_OPS[:2])  # kept or recomputed together; only a recompute fetches again
