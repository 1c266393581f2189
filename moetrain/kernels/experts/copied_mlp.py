"""The expert MLP where the last N experts are copies of other devices', which ops fetch themselves.

It computes :func:`~moetrain.kernels.experts.mlp.expert_mlp`, or the same in e4m3, of matrices with
[L + N, ...] rows. The last N hold nothing between ops: the forward lets a :class:`_Copier` fill
them and returns what it got, for the backward to put there again, as they may be another layer's or
micro-batch's meanwhile; the backward lets it bring the copies' gradients to the experts'. Autograd
keeps N experts of a layer, or none where the op is recomputed and fetches again.

The reference multiplies by a copy of all matrices, for autograd keeps what it multiplies by.

Legend: T tokens, K experts a token, R rows, E = L + N experts here and copies, W devices, D model
width, F expert width.
"""

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from moetrain.config.compute import Precision
from moetrain.kernels.backend import Backend, use_fast, worth_saving
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


class _Copier(Protocol):
    """Moves experts between devices, all of which call it alike."""

    rank: int

    def fetch(self, matrices: Sequence[torch.Tensor], copies_WN: torch.Tensor) -> None:
        """Fill the last N rows of ``matrices`` by ``copies_WN``, the experts (-1: none) of each
        device's places."""

    def give_back(self, gradients: Sequence[torch.Tensor], copies_WN: torch.Tensor) -> None:
        """Add the last N rows, on every device, to those of the experts."""


COPIERS: weakref.WeakValueDictionary[str, _Copier] = weakref.WeakValueDictionary()
"""By the name that ops take."""


def copied_expert_mlp(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    indices: ExpertIndices,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    copies_WN: torch.Tensor,
    copier: str,
    precision: Precision,
    activation: str,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Sum each token's experts and copies, as ``kernels.precision`` says: ``y_TD``."""
    if not use_fast(backend, x_TD):
        gate_up, down = _fetch(w_gate_up_E2FD, w_down_EDF, copies_WN, copier)
        given = (x_TD, weights_TK, indices, gate_up, down, backend)
        if precision == "bf16":
            return expert_mlp(*given, activation=activation)
        return expert_mlp_fp8(*given, precision)
    tensors = (x_TD, weights_TK, indices.slot_row_TK, indices.offsets_E, w_gate_up_E2FD, w_down_EDF)
    how = copier, precision, activation, indices.row_slot_R.shape[0]
    return _expert_mlp_copied(*(x.contiguous() for x in tensors), copies_WN, *how)[0]


@torch.library.custom_op("moetrain::expert_mlp_copied", mutates_args=())
def _expert_mlp_copied(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    copies_WN: torch.Tensor,
    copier: str,
    precision: str,
    activation: str,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The results of the op of ``precision``, and copies of both matrices' last N rows, which it
    fills first; they are no results."""
    matrices = (w_gate_up_E2FD, w_down_EDF)
    COPIERS[copier].fetch(matrices, copies_WN)
    kept = [m.new_empty(copies_WN.shape[1], *m.shape[1:]) for m in matrices]
    _keep(kept, matrices, copies_WN, copier)
    given = (x_TD, weights_TK, slot_row_TK, offsets_E, *matrices)
    if precision == "bf16":
        y_TD, a_R2F = _expert_mlp(*given, activation, num_rows)
    else:
        y_TD, a_R2F = _expert_mlp_fp8(*given, precision, num_rows)
    return y_TD, a_R2F, kept[0], kept[1]


def _keep(
    kept: Sequence[torch.Tensor],
    matrices: Sequence[torch.Tensor],
    copies_WN: torch.Tensor,
    copier: str,
    *,
    is_back: bool = False,
) -> None:
    """Copy what this device's places hold, behind its own experts, to ``kept``, or back."""
    for part, matrix in zip(kept, matrices, strict=True):
        pair = [part.flatten(1), matrix[-len(part) :].flatten(1)]
        target, source = reversed(pair) if is_back else pair
        copy_used(target, source, copies_WN, COPIERS[copier].rank, "triton")


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
    copier: str,
    precision: str,
    activation: str,
    is_trained: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    matrices = (w_gate_up_E2FD, w_down_EDF)
    _keep((kept_gate_up_N2FD, kept_down_NDF), matrices, copies_WN, copier, is_back=True)
    given = (dy_TD, x_TD, weights_TK, slot_row_TK, offsets_E, *matrices, a_R2F)
    if precision == "bf16":
        found = _expert_mlp_backward(*given, activation, is_trained)
    else:
        found = _expert_mlp_fp8_backward(*given, precision, is_trained)
    if is_trained:
        COPIERS[copier].give_back(found[2:], copies_WN)
    return found


@_expert_mlp_copied.register_fake
def _(x_TD, weights_TK, slot_row_TK, offsets_E, w_gate_up, w_down, copies_WN, *how):
    kept = (w.new_empty(copies_WN.shape[1], *w.shape[1:]) for w in (w_gate_up, w_down))
    return torch.empty_like(x_TD), x_TD.new_empty(how[-1], w_gate_up.shape[1]), *kept


@_expert_mlp_copied_backward.register_fake
def _(dy_TD, x_TD, weights_TK, slot_row_TK, offsets_E, w_gate_up, w_down, *how):
    matrices = (torch.empty_like(w) if how[-1] else w.new_empty(0) for w in (w_gate_up, w_down))
    return torch.empty_like(x_TD), torch.empty_like(weights_TK), *matrices


def _save_products(
    ctx: Any,
    inputs: tuple[Any, ...],
    output: tuple[torch.Tensor, ...],
) -> None:
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


@torch.library.custom_op("moetrain::fetch_copies", mutates_args=())
def _fetch(
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    copies_WN: torch.Tensor,
    copier: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    dense = torch.contiguous_format
    matrices = w_gate_up_E2FD.clone(memory_format=dense), w_down_EDF.clone(memory_format=dense)
    COPIERS[copier].fetch(matrices, copies_WN)
    return matrices


@torch.library.custom_op("moetrain::give_back_gradients", mutates_args=())
def _give_back(
    d_gate_up_E2FD: torch.Tensor,
    d_down_EDF: torch.Tensor,
    copies_WN: torch.Tensor,
    copier: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    dense = torch.contiguous_format
    gradients = (d_gate_up_E2FD.clone(memory_format=dense), d_down_EDF.clone(memory_format=dense))
    COPIERS[copier].give_back(gradients, copies_WN)
    return gradients


@_fetch.register_fake
@_give_back.register_fake
def _(first, second, copies_WN, copier):
    dense = torch.contiguous_format
    return tuple(torch.empty_like(x, memory_format=dense) for x in (first, second))


def _save(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    ctx.save_for_backward(inputs[2])
    ctx.copier = inputs[3]


def _differentiate(
    ctx: Any,
    d_first: torch.Tensor,
    d_second: torch.Tensor,
):
    return *_give_back(d_first, d_second, *ctx.saved_tensors, ctx.copier), None, None


_fetch.register_autograd(_differentiate, setup_context=_save)

# A device without tokens must still call: the compiler drops ops whose results are empty or unused.
_OPS = [
    getattr(torch.ops.moetrain, name).default
    for name in (
        "expert_mlp_copied",
        "expert_mlp_copied_backward",
        "fetch_copies",
        "give_back_gradients",
    )
]
for _op in _OPS:
    torch.fx.has_side_effect(_op)
worth_saving("experts", _OPS[0])
