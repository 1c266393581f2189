"""Redundant experts: busy experts are copied to idle ranks, for one forward and its backward.

With ``moe.redundant_experts`` N a rank has N slots for copies after its own experts. The forward of
an MoE layer:

1. gathers the number of tokens of each expert from all ranks, and plans on the device which copies
   go where (:mod:`moetrain.kernels.experts.replicas`);
2. fetches the copies while tokens are dispatched; dispatchers see ``W * (L + N)`` slots instead of
   E experts;
3. multiplies by experts and copies alike. Behind the experts' matrices there is room for N more.
   Copies are there only while an expert's op runs; afterwards another layer may use the room.

For the backward, autograd keeps the copies as it keeps other tensors, or a recomputed block fetches
them again. The gradients of copies are sent back and added to the experts' gradients, before FSDP
reduces those of the block.

Copies and gradients pass through memory that the ranks of one machine share: one expert's size for
each slot. Barriers on the device, like FSDP's, keep writers and readers apart. All transfers are
queued on one stream, so they keep their order.

Legend: W expert parallel ranks, E experts, L = E / W local experts, N slots for copies, T tokens, K
experts a token, S tokens that arrive.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist

from moetrain.config import ConfigError
from moetrain.kernels.experts.copied_mlp import COURIERS, copied_expert_mlp, start_copies
from moetrain.kernels.experts.permutation import expert_indices
from moetrain.kernels.experts.replicas import (
    Exchange,
    add_gradients,
    place_ids,
    plan_replicas,
    send_experts,
    show_gradients,
    take_copies,
)
from moetrain.models.moe import Dispatched, Experts
from moetrain.parallel.collectives import resolve_group
from moetrain.parallel.fsdp.transport import peers
from moetrain.parallel.mesh import all_gather_start
from moetrain.runtime.annotate import annotate
from moetrain.runtime.backend import Backend, use_fast, worth_saving
from moetrain.runtime.typed import fake_of, split


@dataclass(eq=False)
class RedundantExperts:
    """Copies busy experts, of ``num_experts``, to ``spare`` slots on every rank of ``group``.

    The constructor is collective.

    Raises:
        ConfigError: ranks do not reach one another's memory.
    """

    least_rows: ClassVar = 1024
    """The fewest rows that are worth a copy. At 330 GB/s and 500 TFLOP/s, sending an expert and
    returning its gradient takes as long as the products of 1,000 rows. Both times are proportional
    to the expert's size."""

    num_experts: int
    spare: int
    group: dist.ProcessGroup
    device: torch.device
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        reason = peers.why_apart(self.group, self.device)
        if reason is not None:
            raise ConfigError("moe.redundant_experts", f"{self.spare}, but {reason}; set 0")
        self.num_local_experts = self.num_experts // self.group.size()
        self.rank, self.group_name = self.group.rank(), str(self.group.group_name)
        self.is_late = False
        """True: a backward returns while gradients are in flight; call :meth:`wait` before using
        them."""
        self._streams = peers.CopyStreams(self.device)
        self._memory: Any = None
        self._shared_rows: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        """For each matrix, the shared memory [N, M] of every rank, and its addresses."""
        COURIERS[self.group_name] = self

    def assign(self, ids_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Plan copies of experts. Collective.

        Args:
            ids_TK: the experts that the tokens chose (int32, -1: none).

        Returns:
            The slots that the tokens are sent to (int32 [T, K], -1: none), and the expert that is
            copied to each slot (int32 [W, N], -1: none).
        """
        return _assign(
            ids_TK.contiguous(),
            self.num_experts,
            self.spare,
            self.group_name,
            self.least_rows,
            self.backend,
        )

    def start(
        self, experts: Experts, x_TD: torch.Tensor, slots_TK: torch.Tensor, copies_WN: torch.Tensor
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Begin to fetch copies, so that they arrive while tokens are sent. Collective.

        Returns the slots to send tokens to, and the copies for :meth:`compute`. There are no copies
        if the reference op is used, which fetches them itself.
        """
        if not use_fast(self.backend, x_TD):  # the reference op fetches copies itself
            return slots_TK, ()
        first, second = (w.detach().contiguous() for w in self._matrices(experts, x_TD.dtype))
        *copies, slots_TK = start_copies(first, second, slots_TK, copies_WN, self.group_name)
        return slots_TK, copies

    def compute(
        self,
        experts: Experts,
        sent: Dispatched,
        copies: Sequence[torch.Tensor],
        copies_WN: torch.Tensor,
    ) -> torch.Tensor:
        """Return ``y_SD``, computed by this rank's experts and by copies."""
        dtype = sent.x_SD.dtype
        held = [getattr(experts, name) for name in experts.weights]
        has_room = experts.room == self.spare and all(w.dtype == dtype for w in held)
        return copied_expert_mlp(
            sent.x_SD,
            sent.weights_SK,
            sent.indices,
            self._matrices(experts, dtype),
            copies,
            copies_WN,
            self.group_name,
            experts.precision,
            experts.activation,
            self.backend,
            room=has_room,
        )

    @staticmethod
    def _matrices(experts: Experts, dtype: torch.dtype) -> list[torch.Tensor]:
        return [getattr(experts, name).to(dtype) for name in experts.weights]

    # ---- within ops ----------------------------------------------------------------------------

    def start_fetch(
        self,
        experts: Sequence[torch.Tensor],
        copies: Sequence[torch.Tensor],
        copies_WN: torch.Tensor,
    ) -> None:
        """Begin to write to ``copies`` the experts that ``copies_WN`` has for this rank's slots."""
        rows = [(w.flatten(1), c.flatten(1)) for w, c in zip(experts, copies, strict=True)]
        self._through_memory(rows, copies_WN, write=send_experts, read=take_copies)

    def wait(self) -> None:
        """Make the current stream wait for all copies and gradients that are in flight."""
        self._streams.wait(self._streams.push)

    def give_back(self, gradients: Sequence[torch.Tensor], copies_WN: torch.Tensor) -> None:
        """Begin to add the gradients of copies, the last N rows on every rank, to the experts'.

        The current stream waits for the sums, unless :attr:`is_late`.
        """
        rows = [g.flatten(1).tensor_split([-self.spare]) for g in gradients]
        self._through_memory(rows, copies_WN, write=show_gradients, read=add_gradients)
        if not self.is_late:
            self.wait()

    def _through_memory(
        self,
        rows: Sequence[Sequence[torch.Tensor]],
        copies_WN: torch.Tensor,
        *,
        write: Callable[[Exchange], None],
        read: Callable[[Exchange], None],
    ) -> None:
        """Begin ``write`` for every matrix and, once all ranks have written, ``read``.

        ``rows``: for each matrix, this rank's experts [L, M] and its copies [N, M].
        """
        memory, stream = self._shared([copies for _, copies in rows]), self._streams.push
        exchanges = [
            Exchange(
                experts_LM=own_LM,
                copies_NM=copies_NM,
                experts_WN=copies_WN,
                rank=self.rank,
                parts=parts,
                addresses_W=addresses_W,
                backend=self.backend,
            )
            for (own_LM, copies_NM), (parts, addresses_W) in zip(
                rows, self._shared_rows, strict=True
            )
        ]
        with self._streams.behind(stream), annotate("expert_copies"):
            memory.wait(peers.FREE)
            for exchange in exchanges:
                write(exchange)
            memory.arrive(peers.WRITTEN)
            memory.wait(peers.WRITTEN)
            for exchange in exchanges:
                read(exchange)
            memory.arrive(peers.FREE)
        if stream is not None:
            # A tensor that is freed before the wait must not be reused meanwhile.
            for tensor in (copies_WN, *(x for pair in rows for x in pair)):
                tensor.record_stream(stream)

    def _shared(self, copies: Sequence[torch.Tensor]) -> Any:
        """Return the shared memory. The first call allocates it, and is collective."""
        if self._memory is None:
            sizes = [c.nbytes for c in copies]
            self._memory = self._streams.shared(sum(sizes), self.group)
            pieces = [split(part, sizes) for part in self._memory.parts]
            for i, matrix in enumerate(copies):
                parts = [p[i].view(matrix.dtype).view(self.spare, -1) for p in pieces]
                addresses = torch.tensor([p.data_ptr() for p in parts], device=self.device)
                self._shared_rows.append((parts, addresses))
        # All layers share this memory, so their experts must have the same sizes.
        for matrix, (parts, _) in zip(copies, self._shared_rows, strict=True):
            assert (matrix.dtype, matrix.shape) == (parts[0].dtype, parts[0].shape)
        return self._memory


@torch.library.custom_op("moetrain::assign_places", mutates_args=())
def _assign(
    ids_TK: torch.Tensor,
    num_experts: int,
    spare: int,
    group: str,
    least: int,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    ranks, kernels = resolve_group(group), cast("Backend", backend)
    indices = expert_indices(ids_TK, num_experts, kernels)
    counts_WE, work = all_gather_start(indices.counts_E, ranks)
    work.wait()
    plan = plan_replicas(counts_WE, spare, ranks.rank(), least, kernels)
    return place_ids(ids_TK, indices, plan, ranks.rank(), kernels), plan.experts_WN


@fake_of(_assign)
def _(
    ids_TK: torch.Tensor,
    num_experts: int,
    spare: int,
    group: str,
    least: int,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(ids_TK), ids_TK.new_empty(resolve_group(group).size(), spare)


# The op is collective, so a rank without tokens must call it too, and the compiler may not drop it
# (as in moetrain.parallel.expert.dispatch).
torch.fx.has_side_effect(torch.ops.moetrain.assign_places.default)
worth_saving("routing", torch.ops.moetrain.assign_places.default)
