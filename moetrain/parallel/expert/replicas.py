"""Exact balance: busy experts are copied to idle ranks, for one forward and its backward.

With ``moe.redundant_experts`` N a rank has N places for copies behind its own experts. A layer's
forward gathers all ranks' counts, plans on the device which copies go where
(:mod:`moetrain.kernels.experts.replicas`), and dispatchers then see ``W * (L + N)`` places in place
of E experts. The products take copies as they take experts: matrices have N more rows, which hold
something only while an expert's op runs. Copies are on their way while tokens are dispatched.
For the backward they are kept as an op's result is, or fetched again where that is recomputed:
the rows may be another layer's or micro-batch's meanwhile. Gradients of copies are on their way
back until FSDP reduces those of the block.

All pass through memory that the ranks of one machine share, one expert's size a place. Barriers
on the device, as FSDP's, keep its writers and readers apart, and one stream has all in one order.

Legend: W expert parallel ranks, E experts, L = E / W local experts, N places for copies, T tokens,
K experts a token, S tokens that arrive.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist

from moetrain.config import ConfigError
from moetrain.kernels.annotate import annotate
from moetrain.kernels.backend import Backend, use_fast, worth_saving
from moetrain.kernels.experts.copied_mlp import COPIERS, copied_expert_mlp
from moetrain.kernels.experts.permutation import expert_indices
from moetrain.kernels.experts.replicas import FETCH, GIVE_BACK, place_ids, plan_replicas
from moetrain.models.moe import Dispatched, Experts
from moetrain.parallel.fsdp import transport
from moetrain.parallel.mesh import all_gather_start


@dataclass(eq=False)
class Replicas:
    """``spare`` places for copies on every rank of ``group``, of ``num_experts`` in all.

    Raises:
        ConfigError: ranks do not reach one another's memory. Collective.
    """

    least_rows: ClassVar = 1024
    """The fewest rows that are worth a copy: what travels, and a row's products, both take longer
    the larger an expert is. At 330 GB/s and 500 TFLOP/s an expert there and back is 1,000 rows."""

    num_experts: int
    spare: int
    group: dist.ProcessGroup
    device: torch.device
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        reason = transport.why_apart(self.group, self.device)
        if reason is not None:
            raise ConfigError("moe.redundant_experts", f"{self.spare}, but {reason}; set 0")
        self.num_local_experts = self.num_experts // self.group.size()
        self.rank, self.group_name = self.group.rank(), str(self.group.group_name)
        self.is_late = False
        """Whether a backward leaves gradients on their way, which :meth:`finish` waits for."""
        self._streams = transport.CopyStreams(self.device)
        self._arrival: transport.Wait | None = None
        self._return: transport.Wait | None = None
        self._memory: Any = None
        self._places: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        """Of each matrix, every rank's shared memory [N, M], and where that begins."""
        COPIERS[self.group_name] = self

    def assign(self, ids_TK: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
        """Plan copies of ``experts``, and let them travel; give the places (int32) of the experts
        that tokens chose (int32, -1: none), and the ones copied, [W, N], -1: none. Collective."""
        matrices = [getattr(experts, name).detach() for name in experts.weights]
        if not use_fast(self.backend, ids_TK):
            matrices = []  # they are copied within the reference
        how = self.num_experts, self.spare, self.group_name, self.least_rows, self.backend
        return _assign(ids_TK.contiguous(), matrices, *how)

    def compute(self, experts: Experts, sent: Dispatched, copies_WN: torch.Tensor) -> torch.Tensor:
        """Give ``y_SD`` of experts and copies; matrices have N rows more than experts."""
        first, second = (getattr(experts, name).to(sent.x_SD.dtype) for name in experts.weights)
        how = self.group_name, experts.precision, experts.activation, self.backend
        return copied_expert_mlp(*sent[:3], first, second, copies_WN, *how)

    # ---- within ops ----------------------------------------------------------------------------

    def start(self, matrices: Sequence[torch.Tensor], copies_WN: torch.Tensor) -> None:
        """Begin to write the experts that are copied here behind the rank's own in every matrix."""
        self._arrival = self._through_memory(matrices, copies_WN, *FETCH)

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
        self._return = self._through_memory(gradients, copies_WN, *GIVE_BACK)
        if not self.is_late:
            self.finish()

    def finish(self) -> None:
        """Let the current stream wait for gradients that are on their way."""
        if self._return is not None:
            self._return()
            self._return = None

    def _through_memory(
        self,
        matrices: Sequence[torch.Tensor],
        copies_WN: torch.Tensor,
        write: Callable[..., None],
        read: Callable[..., None],
    ) -> transport.Wait:
        """Begin ``write`` for every matrix, and then, when all ranks have come as far, ``read``."""
        memory, stream = self._shared(matrices), self._streams.push
        # Through .data, which has a version counter of its own: autograd would else take copies for
        # a change of what it saved.
        rows = [m.data.view(len(m), -1).tensor_split([-self.spare]) for m in matrices]
        places = [(copies_WN, self.rank, *found, self.backend) for found in self._places]
        with self._streams.behind(stream), annotate("expert_copies"):
            memory.wait(transport.FREE)
            for own_and_copies, place in zip(rows, places, strict=True):
                write(*own_and_copies, *place)
            memory.arrive(transport.WRITTEN)
            memory.wait(transport.WRITTEN)
            for own_and_copies, place in zip(rows, places, strict=True):
                read(*own_and_copies, *place)
            memory.arrive(transport.FREE)
        return self._streams.end(stream, kept=(*matrices, copies_WN))

    def _shared(self, matrices: Sequence[torch.Tensor]) -> Any:
        """Give the shared memory, which is made at the first use. Collective."""
        if self._memory is None:
            sizes = [self.spare * math.prod(m.shape[1:]) * m.element_size() for m in matrices]
            self._memory = self._streams.shared(sum(sizes), self.group)
            pieces = [part.split(sizes) for part in self._memory.parts]
            for i, matrix in enumerate(matrices):
                parts = [p[i].view(matrix.dtype).view(self.spare, -1) for p in pieces]
                addresses = torch.tensor([p.data_ptr() for p in parts], device=self.device)
                self._places.append((parts, addresses))
        for matrix, (parts, _) in zip(matrices, self._places, strict=True):  # all layers are alike
            assert (matrix.dtype, matrix[0].numel()) == (parts[0].dtype, parts[0].shape[1])
        return self._memory


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
    indices = expert_indices(ids_TK, num_experts, how)
    counts_WE, work = all_gather_start(indices.counts_E, replicas.group)
    work.wait()
    plan = plan_replicas(counts_WE, spare, replicas.rank, least, how)
    if matrices:
        replicas.start(matrices, plan.experts_WN)
    return place_ids(ids_TK, indices, plan, replicas.rank, how), plan.experts_WN


@_assign.register_fake
def _(ids_TK, matrices, num_experts, spare, group, least, backend):
    ranks = cast("Replicas", COPIERS[group]).group.size()
    return torch.empty_like(ids_TK), ids_TK.new_empty(ranks, spare)


# As in moetrain.parallel.expert.dispatch: a rank without tokens must still call.
torch.fx.has_side_effect(torch.ops.moetrain.assign_places.default)
worth_saving("routing", torch.ops.moetrain.assign_places.default)
