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
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from moetrain.config import ConfigError
from moetrain.kernels.annotate import annotate
from moetrain.kernels.backend import Backend, use_fast, worth_saving
from moetrain.kernels.experts.copied_mlp import COPIERS, copied_expert_mlp, with_copies
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
        COPIERS[self.group_name] = self

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
        copies = copies_WN, self.group_name
        if not use_fast(self.backend, x_SD):
            matrices = with_copies(*matrices, *copies)
            return experts(x_SD, weights_SK, indices, sent.typical_rows, matrices)
        how = experts.precision, experts.activation
        return copied_expert_mlp(x_SD, weights_SK, indices, *matrices, *copies, *how)

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
    replicas, how = cast("Replicas", COPIERS[group]), cast("Backend", backend)
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
    return torch.empty_like(ids_TK), ids_TK.new_empty(cast("Replicas", COPIERS[group]).group.size(), spare)


# As in moetrain.parallel.expert.dispatch: a rank without tokens must still call.
torch.fx.has_side_effect(torch.ops.moetrain.assign_places.default)
worth_saving("routing", torch.ops.moetrain.assign_places.default)
