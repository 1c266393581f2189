"""The expert MLP over this device's experts and copies of other devices' experts.

It computes :func:`~moetrain.kernels.experts.mlp.expert_mlp`, or the same in e4m3, with L experts of
its own and N copies behind them. Copies are inputs like the experts: :func:`start_copies` fetches
them into tensors of their own, the MLP takes those, and autograd keeps them for the backward (or
they are fetched again, where it is recomputed). The backward returns one gradient, that of the own
experts, to which the gradients of the copies on all devices were added.

The products take one tensor with L + N experts. Where memory for N more lies behind the experts
(``room``), copies are laid there, which moves N experts in place of L + N. No tensor shows that
memory and nothing else reads it, so the ops change none of their inputs.

What travels between devices goes through a :class:`Courier`, which ops find by the name of the
process group, as collectives find theirs. It holds streams and memory, and nothing of a call.

The reference fetches and multiplies by a copy of all matrices.

Legend: T tokens, K experts a token, R rows, L experts here, N copies, W devices, D model width, F
expert width.
"""

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from moetrain.config.compute import Precision
from moetrain.kernels.experts.mlp import (
    _expert_mlp,
    _expert_mlp_backward,
    expert_mlp,
)
from moetrain.kernels.experts.mlp_fp8 import (
    _expert_mlp_fp8,
    _expert_mlp_fp8_backward,
    expert_mlp_fp8,
)
from moetrain.kernels.experts.permutation import ExpertIndices
from moetrain.kernels.experts.replicas import copy_used
from moetrain.runtime.backend import Backend, use_fast, worth_saving


class Courier(Protocol):
    """Moves experts between the devices of a process group, all of which call it alike."""

    rank: int

    def start_fetch(
        self,
        experts: Sequence[torch.Tensor],
        copies: Sequence[torch.Tensor],
        copies_WN: torch.Tensor,
    ) -> None:
        """Begin to write to ``copies`` the experts ``copies_WN`` (-1: none) of every device's
        places, which are rows of the devices' ``experts``."""

    def wait(self) -> None:
        """Let the current stream wait for everything that was begun."""

    def give_back(self, gradients: Sequence[torch.Tensor], copies_WN: torch.Tensor) -> None:
        """Begin to add the last N rows of ``gradients``, on every device, to those of the experts,
        and wait for it unless whoever reads gradients does."""


COURIERS: weakref.WeakValueDictionary[str, Courier] = weakref.WeakValueDictionary()
"""The couriers by the name of their process group."""


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
    """Sum each token's experts and copies, as ``kernels.precision`` says: ``y_TD``.

    Args:
        x_TD, weights_TK, indices: as :func:`~moetrain.kernels.experts.mlp.expert_mlp` takes them,
            of L + N experts.
        experts: ``w_gate_up_L2FD`` (or ``w_up_LFD``) and ``w_down_LDF``.
        copies: what :func:`start_copies` returned for them; empty where the reference computes.
        copies_WN: int32, the expert in each place of every device; -1: none.
        group: the name of the process group of the devices.
        room: whether memory for N more experts lies right behind both matrices, which no tensor
            shows.
    """
    if not use_fast(backend, x_TD):
        gate_up, down = _fetch(*experts, copies_WN, group)
        given = (x_TD, weights_TK, indices, gate_up, down, backend)
        if precision == "bf16":
            return expert_mlp(*given, activation=activation)
        return expert_mlp_fp8(*given, precision)
    tensors = x_TD, weights_TK, indices.slot_row_TK, indices.offsets_E, *experts, *copies
    tensors = (*(x.contiguous() for x in tensors), copies_WN)
    how = group, precision, activation, room, indices.row_slot_R.shape[0]
    return _expert_mlp_copied(*tensors, *how)[0]


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

    Copies ([N, ...] of each matrix) are complete once a stream has waited as ``Courier.wait`` does,
    which ops that take them do first. Places without an expert hold nothing. Tokens are sent by the
    places that are returned, so that no compiler begins to fetch after they were sent.
    """
    experts = (w_gate_up_L2FD, w_down_LDF)
    copies = [w.new_empty(copies_WN.shape[1], *w.shape[1:]) for w in experts]
    COURIERS[group].start_fetch(experts, copies, copies_WN)
    return copies[0], copies[1], places_TK.clone()


@start_copies.register_fake
def _(w_gate_up, w_down, places_TK, copies_WN, group):
    spare = copies_WN.shape[1]
    copies = (w.new_empty(spare, *w.shape[1:]) for w in (w_gate_up, w_down))
    return *copies, torch.empty_like(places_TK, memory_format=torch.contiguous_format)


def _whole(
    experts: torch.Tensor,
    copies: torch.Tensor,
    copies_WN: torch.Tensor,
    courier: Courier,
    room: bool,
) -> torch.Tensor:
    """Return experts with the copies behind them, [L + N, ...]."""
    if not room:
        return torch.cat((experts, copies))
    shape = (len(experts) + len(copies), *experts.shape[1:])
    # torch raises if that is more memory than there is, as behind a copy that a compiler made.
    whole = experts.detach().as_strided(shape, experts.stride(), experts.storage_offset())
    place = whole[len(experts) :].data.flatten(1)
    copy_used(place, copies.flatten(1), copies_WN, courier.rank, "triton")
    return whole


@torch.library.custom_op("moetrain::expert_mlp_copied", mutates_args=())
def _expert_mlp_copied(
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
    """The results of the op of ``precision`` for experts and copies."""
    courier = COURIERS[group]
    courier.wait()
    pairs = (w_gate_up_L2FD, copies_gate_up_N2FD), (w_down_LDF, copies_down_NDF)
    matrices = (_whole(*pair, copies_WN, courier, room) for pair in pairs)
    given = (x_TD, weights_TK, slot_row_TK, offsets_E, *matrices)
    if precision == "bf16":
        return _expert_mlp(*given, activation, num_rows)
    return _expert_mlp_fp8(*given, precision, num_rows)


@torch.library.custom_op("moetrain::expert_mlp_copied_backward", mutates_args=())
def _expert_mlp_copied_backward(
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
    """The gradients of x, weights and the experts here, as :func:`_expert_mlp_backward` has them.

    Where the courier is late, those of the experts are complete once it was waited for.
    """
    courier = COURIERS[group]
    pairs = (w_gate_up_L2FD, copies_gate_up_N2FD), (w_down_LDF, copies_down_NDF)
    matrices = (_whole(*pair, copies_WN, courier, room) for pair in pairs)
    given = (dy_TD, x_TD, weights_TK, slot_row_TK, offsets_E, *matrices, a_R2F)
    if precision == "bf16":
        found = _expert_mlp_backward(*given, activation, is_trained)
    else:
        found = _expert_mlp_fp8_backward(*given, precision, is_trained)
    dx_TD, d_weights_TK, d_gate_up, d_down = found
    if not is_trained:
        return found
    courier.give_back((d_gate_up, d_down), copies_WN)
    local = len(w_down_LDF)
    return dx_TD, d_weights_TK, d_gate_up[:local], d_down[:local]


@_expert_mlp_copied.register_fake
def _(x_TD, weights_TK, slot_row_TK, offsets_E, w_gate_up, w_down, c_gate_up, c_down, *how):
    return torch.empty_like(x_TD), x_TD.new_empty(how[-1], w_gate_up.shape[1])


@_expert_mlp_copied_backward.register_fake
def _(dy_TD, x_TD, weights_TK, slot_row_TK, offsets_E, w_gate_up, w_down, *how):
    matrices = (torch.empty_like(w) if how[-1] else w.new_empty(0) for w in (w_gate_up, w_down))
    return torch.empty_like(x_TD), torch.empty_like(weights_TK), *matrices


def _save_products(
    ctx: Any,
    inputs: tuple[Any, ...],
    output: tuple[torch.Tensor, ...],
) -> None:
    ctx.how = inputs[9:-1]
    ctx.save_for_backward(*inputs[:9], output[1])
    ctx.set_materialize_grads(False)  # the second result has no gradient


def _differentiate_products(ctx: Any, dy_TD: torch.Tensor | None, _: object):
    if dy_TD is None:
        return (None,) * 14
    is_trained = ctx.needs_input_grad[4] or ctx.needs_input_grad[5]
    given = (dy_TD.contiguous(), *ctx.saved_tensors, *ctx.how, is_trained)
    dx_TD, d_weights_TK, *matrices = _expert_mlp_copied_backward(*given)
    return dx_TD, d_weights_TK, None, None, *(matrices if is_trained else (None,) * 2), *[None] * 8


_expert_mlp_copied.register_autograd(_differentiate_products, setup_context=_save_products)


@torch.library.custom_op("moetrain::fetch_copies", mutates_args=())
def _fetch(
    w_gate_up_L2FD: torch.Tensor,
    w_down_LDF: torch.Tensor,
    copies_WN: torch.Tensor,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both matrices with the copies behind the experts, [L + N, ...]."""
    experts, spare = (w_gate_up_L2FD, w_down_LDF), copies_WN.shape[1]
    copies = [w.new_zeros(spare, *w.shape[1:]) for w in experts]
    courier = COURIERS[group]
    courier.start_fetch([w.contiguous() for w in experts], copies, copies_WN)
    courier.wait()
    gate_up, down = (torch.cat(pair) for pair in zip(experts, copies, strict=True))
    return gate_up, down


@_fetch.register_fake
def _(w_gate_up, w_down, copies_WN, group):
    spare = copies_WN.shape[1]
    return tuple(w.new_empty(len(w) + spare, *w.shape[1:]) for w in (w_gate_up, w_down))


@torch.library.custom_op("moetrain::give_back_gradients", mutates_args=())
def _give_back(
    d_gate_up_E2FD: torch.Tensor,
    d_down_EDF: torch.Tensor,
    copies_WN: torch.Tensor,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the first L rows of both, with those of copies on all devices."""
    dense = torch.contiguous_format
    gradients = (d_gate_up_E2FD.clone(memory_format=dense), d_down_EDF.clone(memory_format=dense))
    COURIERS[group].give_back(gradients, copies_WN)
    gate_up, down = (x[: len(x) - copies_WN.shape[1]] for x in gradients)
    return gate_up, down


@_give_back.register_fake
def _(first, second, copies_WN, group):
    spare = copies_WN.shape[1]
    return tuple(x.new_empty(len(x) - spare, *x.shape[1:]) for x in (first, second))


def _save(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    ctx.save_for_backward(inputs[2])
    ctx.group = inputs[3]


def _differentiate(
    ctx: Any,
    d_first: torch.Tensor,
    d_second: torch.Tensor,
):
    return *_give_back(d_first, d_second, *ctx.saved_tensors, ctx.group), None, None


_fetch.register_autograd(_differentiate, setup_context=_save)

# A device without tokens must still call: the compiler drops ops whose results are empty or unused.
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
worth_saving("experts", *_OPS[:2])  # what is computed again fetches again, and nothing else does
