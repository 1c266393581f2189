"""DeepEP: tokens reach other ranks' experts straight from GPU to GPU, over NVLink.

The package ``deep_ep`` replaces the all-to-all by one kernel for each direction. The kernel runs on
some of the GPU's SMs, and copies tokens from where they are directly into the other GPUs' memory.
Tokens need not be sorted by rank, packed or padded, and arrive in the same order as from the
all-to-all. There are two modes, which differ in how the memory for received tokens is sized:

    counted (``moe.dispatch_mode exact``)  The host waits once, in the forward, for the numbers of
            tokens and rows that arrive. The compiler treats both as unknown sizes. The backward
            reuses them without waiting.
    static  Sizes come from the configuration, and nothing waits. Memory past the received tokens is
            uninitialised. Its ids are -1, so that no expert reads it. If more rows arrive than
            there is room for, some are dropped. The dispatcher counts them on the device, by their
            ids, so that the pass can be run again.

The package's calls are the ops of :mod:`moetrain.kernels.experts.deepep`. The package's kernels for
several machines are not used, because they need a compiler. Instead NCCL sends a token once to each
machine, and DeepEP passes it on to the ranks there.

Legend: W expert parallel ranks, G on each of M machines, E experts, T tokens of this rank, K
experts a token, A tokens that reach this machine through this rank, S tokens received, R rows of
the local experts, D width.
"""

from collections.abc import Generator
from contextlib import contextmanager
from copy import copy
from math import ceil
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from moetrain.config import ConfigError
from moetrain.config.compute import Precision
from moetrain.kernels.experts.deepep import connect, load_deep_ep
from moetrain.kernels.quant.recipes import RECIPES
from moetrain.kernels.small_m import multiprocessors
from moetrain.models.architecture import Architecture
from moetrain.parallel.collectives import all_gather_object
from moetrain.parallel.expert.dispatch import AllToAll, ExpertParallelDispatcher, Received
from moetrain.parallel.expert.redundant import RedundantExperts
from moetrain.parallel.mesh import ExpertHops
from moetrain.parallel.processes import machine
from moetrain.runtime.backend import Backend
from moetrain.runtime.typed import OpContext

_ops: Any = torch.ops.moetrain
_RANKS = (2, 4, 8)  # the kernels within a machine are built for these
_MAX_TOP_K = 32  # each choice has a lane of one warp
_MAX_LOCAL_EXPERTS = 128  # each has a thread of the counting kernel
# The kernel copies half a token at a time, in units of 16 bytes, through 8 KiB of shared memory.
_HIDDEN_MULTIPLE, _FP8_MULTIPLE = 16, 32
_MAX_HIDDEN = 8176

_AUTO_NUM_SMS = {2: 80, 4: 48, 8: 48}
"""SMs by the number of ranks: about as many as it takes to use the links fully, where nothing runs
beside the communication (docs/log/dispatch.md)."""


class StaticSizes(NamedTuple):
    """The sizes that the static mode reserves."""

    max_tokens: int
    """The most tokens that a rank dispatches at once."""
    rows: int
    """Rows of the local experts that there is room for."""

    @classmethod
    def plan(
        cls, max_tokens: int, *, capacity: float, num_experts: int, top_k: int, ranks: int
    ) -> "StaticSizes":
        """Plan for ``capacity`` times the rows of an evenly loaded rank.

        The plan never exceeds the most rows that can arrive.
        """
        most = ranks * max_tokens * min(top_k, num_experts // ranks)
        return cls(max_tokens, min(most, ceil(capacity * max_tokens * top_k)))


class DeepEP(ExpertParallelDispatcher):
    """Sends tokens by DeepEP over the ranks of ``group``, on one machine. Making it is collective.

    ``static`` is None in the counted mode. :meth:`sized` changes it, on all ranks alike.

    Raises:
        ValueError: the ranks cannot share the experts equally.
        ConfigError: ``num_sms`` is more than this GPU has.
        ImportError: the package ``deep_ep`` is missing or broken; the message says what to do.
    """

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        hidden_size: int,
        *,
        num_sms: Literal["auto"] | int = "auto",
        static: StaticSizes | None = None,
        backend: Backend = "auto",
        precision: Precision = "bf16",
        redundant: RedundantExperts | None = None,
    ) -> None:
        super().__init__(num_experts, group, backend, precision, redundant)
        self.num_sms = _AUTO_NUM_SMS[self.num_ranks] if num_sms == "auto" else num_sms
        self.static = static
        if torch.cuda.is_available():
            available = multiprocessors(torch.device("cuda"))
            if num_sms == "auto":
                self.num_sms = min(self.num_sms, available // 2 * 2)  # an H20 has 78
            if self.num_sms > available:
                problem = f"{self.num_sms}, but this GPU has {available} SMs; use auto"
                raise ConfigError("moe.deepep_num_sms", problem)
        connect(group, hidden_size, self.num_sms)

    def counted(self) -> "DeepEP":
        """Return a dispatcher over the same connection, in the counted mode.

        It sends tokens in bf16 and uses no redundant experts.
        """
        other = copy(self)
        other.static, other.precision = None, "bf16"
        if (redundant := self.redundant) is not None:
            other.redundant, other.num_experts = None, redundant.num_experts
            other.num_local_experts = redundant.num_local_experts
        return other

    @contextmanager
    def sized(self, static: StaticSizes | None) -> Generator[None]:
        """Use these sizes inside; None: the counted mode."""
        before, self.static = self.static, static
        try:
            yield
        finally:
            self.static = before

    def send(self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> Received:
        """Send tokens. Raises ValueError: there are more than the static mode was planned for."""
        max_tokens, rows = self.static or (0, 0)
        if self.static is not None and x_TD.shape[0] > max_tokens:
            problem = f"was given {x_TD.shape[0]} tokens; moe.dispatch_mode 'static' was planned"
            raise ValueError(f"deepep: {problem} for {max_tokens} a rank")
        x_SD, ids_SK, weights_SK, rows_R0, *handle = _ops.deepep_dispatch(
            x_TD.contiguous(),
            ids_TK.contiguous(),
            weights_TK.contiguous(),
            send=self.send_counts(ids_TK),
            group=self.group_name,
            num_sms=self.num_sms,
            precision=self.precision,
            worst_tokens=None if self.static is None else self.num_ranks * max_tokens,
            worst_rows=rows,
            came_WM=None,
        )
        return Received(
            x_SD=x_SD,
            ids_SK=ids_SK,
            weights_SK=weights_SK,
            num_rows=rows_R0.shape[0],
            handle=tuple(handle),
            may_drop=self.static is not None,
        )

    def send_counts(self, ids_TK: torch.Tensor) -> list[torch.Tensor]:
        """Count what this rank sends.

        Compiled, this takes a seventh of the time of the package's own function.

        Returns:
            The number of tokens for each rank (int32 [W]), the number of slots that name each
            expert (int32 [E]), and which tokens go to which ranks (bool [T, W]).
        """
        rank_TK = ids_TK // self.num_local_experts  # rounds down: -1 stays -1
        ranks_W, experts_E = (
            torch.arange(n, device=ids_TK.device, dtype=ids_TK.dtype)
            for n in (self.num_ranks, self.num_experts)
        )
        is_sent_TW = (rank_TK[:, :, None] == ranks_W).any(1)
        slots_E = (ids_TK[:, :, None] == experts_E).sum((0, 1), dtype=torch.int32)
        return [is_sent_TW.sum(0, dtype=torch.int32), slots_E, is_sent_TW]

    def combine(self, y_SD: torch.Tensor, ctx: tuple[torch.Tensor, ...]) -> torch.Tensor:
        (y_TD,) = _ops.deepep_combine(
            [y_SD.contiguous()],
            list(ctx),
            group=self.group_name,
            num_sms=self.num_sms,
            precision=self.precision,
        )
        return y_TD


class DeepEPInside(AllToAll):
    """The all-to-all across machines, with a :class:`DeepEP` of the machine for the hop inside.

    DeepEP delivers tokens sorted by the rank that passed them on, and the tokens of one such rank
    by their machine of origin. The op reorders them by source rank. In the backward of ``combine``
    the gradients of sums take the same two hops with the same handle. The sums themselves return in
    one hop, as in :class:`AllToAll`, so the results have the same bits as with one hop. The host
    knows every size from the exchange of counts, and does not wait again.
    """

    def __init__(
        self,
        near: DeepEP,
        num_experts: int,
        group: dist.ProcessGroup,
        *,
        hops: ExpertHops | None,
        backend: Backend = "auto",
        precision: Precision = "bf16",
        redundant: RedundantExperts | None = None,
    ) -> None:
        super().__init__(num_experts, group, backend, precision, redundant, hops)
        self._near, self.num_sms = near, near.num_sms

    def send(self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> Received:
        sizes, handle, (_, came_GM) = self._plan(ids_TK // self.num_local_experts)
        assert self.hops is not None  # there are several machines, with several ranks each
        across, near = self.hops.across, self._near
        x_AD, routing_AC = _ops.exchange_rows(
            [x_TD.detach(), self._routing(ids_TK, weights_TK).detach()],
            handle[6:],
            num_rows=sizes[2],
            is_back=False,
            ways=across.group_name,
            num_sms=0,
            precision=self.precision,
            backend=self.backend,
        )
        weights_AK, ids_AK = (x.contiguous() for x in routing_AC.chunk(2, dim=1))
        ids_AK = self._local(ids_AK, across.rank(), near.num_experts)
        x_SD, ids_SK, weights_SK, _, *known = _ops.deepep_dispatch(
            x_AD,
            ids_AK,
            weights_AK,
            send=near.send_counts(ids_AK),
            group=near.group_name,
            num_sms=self.num_sms,
            precision=self.precision,
            worst_tokens=sizes[0],
            worst_rows=sizes[1],
            came_WM=came_GM,
        )
        handle += known
        x_SD, weights_SK = _Arrived.apply(
            x_TD,
            weights_TK.float(),
            x_SD,
            weights_SK,
            self._ways,
            self.num_sms,
            self.precision,
            self.backend,
            *handle,
        )
        return Received(x_SD, ids_SK, weights_SK, num_rows=sizes[1], handle=tuple(handle))


class _Arrived(torch.autograd.Function):
    """Connects ``x_SD`` and ``weights_SK``, which DeepEP delivered, to the tensors that were sent.

    The backward returns their gradients to the source ranks in one hop, over the group of all
    ranks.
    """

    if TYPE_CHECKING:  # torch's has no types

        @classmethod
        def apply(cls, *args: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]: ...

    @staticmethod
    def forward(
        ctx: OpContext,
        x_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        x_SD: torch.Tensor,
        weights_SK: torch.Tensor,
        ways: str,
        num_sms: int,
        precision: str,
        backend: str,
        *handle: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(*handle)
        ctx.num_rows, ctx.ways = x_TD.shape[0], ways
        ctx.num_sms, ctx.precision, ctx.backend = num_sms, precision, backend
        return x_SD.view_as(x_SD), weights_SK.view_as(weights_SK)

    @staticmethod
    def backward(ctx: OpContext, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_x_SD, d_weights_SK = gradients
        handle = list(ctx.saved_tensors)  # once: recomputed tensors cannot be unpacked again
        d_x_TD, d_weights_TK = _ops.exchange_rows(
            [d_x_SD.contiguous(), d_weights_SK.contiguous()],
            handle,
            num_rows=ctx.num_rows,
            is_back=True,
            ways=ctx.ways,
            num_sms=ctx.num_sms,
            precision=ctx.precision,
            backend=ctx.backend,
        )
        no_gradients = dict.fromkeys(
            ("x_SD", "weights_SK", "ways", "num_sms", "precision", "backend"), None
        )
        return d_x_TD, d_weights_TK, *no_gradients.values(), *[None] * len(handle)


def why_not(
    arch: Architecture,
    group: dist.ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
    precision: Precision = "bf16",
    spare: int = 0,
    inside: dist.ProcessGroup | None = None,
) -> str | None:
    """Return why DeepEP cannot run, the same on every rank of ``group``; None: it can. Collective.

    ``inside``: the group of this machine's ranks, if the run has several machines; None: the run
    has one.
    """
    near = inside or group
    reason = why_not_here(
        arch,
        near.size(),
        device,
        dtype,
        precision=precision,
        spare=spare,
        machines=group.size() // near.size(),
    )
    mine = machine(), dist.get_process_group_ranks(near), reason
    ranks = [mine] * group.size()
    all_gather_object(ranks, mine, group=group)
    hosts = (len({host for host, near, _ in ranks if near == each}) for _, each, _ in ranks)
    if (most := max(hosts)) > 1:
        of = "" if near.size() == group.size() else " of a machine (launch.gpus_per_machine)"
        return f"the {near.size()} expert parallel ranks{of} are on {most} machines, not on one"
    return next((reason for *_, reason in ranks if reason), None)


def why_not_here(
    arch: Architecture,
    ranks: int,
    device: torch.device,
    dtype: torch.dtype,
    precision: Precision = "bf16",
    spare: int = 0,
    machines: int = 1,
) -> str | None:
    """Return the reasons of :func:`why_not` that a rank can check alone.

    Args:
        ranks: the number of expert parallel ranks on one machine.
        spare: the number of slots for copies of experts on each rank.
        machines: the number of machines that share the experts.
    """
    local_experts = arch.num_experts // (ranks * machines) + spare
    top_k, width = arch.num_experts_per_token, arch.sent_size
    multiple = _FP8_MULTIPLE if precision in RECIPES else _HIDDEN_MULTIPLE
    if ranks not in _RANKS:
        has = f"a machine has {ranks} of parallel.ep's ranks"
        return f"{has if machines > 1 else f'parallel.ep is {ranks}'}, but DeepEP takes 2, 4 or 8"
    if device.type != "cuda":
        return f"DeepEP takes CUDA devices, but this run is on {device.type}"
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        return f"DeepEP takes bfloat16, but this run computes in {name}"
    if width % multiple or width > _MAX_HIDDEN:
        name = "hidden_size" if width == arch.hidden_size else "moe_latent_size"
        return (
            f"the model's {name} is {width}, but DeepEP takes multiples of {multiple} up to "
            f"{_MAX_HIDDEN}"
        )
    if top_k > _MAX_TOP_K:
        return f"the model sends a token to {top_k} experts, but DeepEP takes up to {_MAX_TOP_K}"
    if local_experts > _MAX_LOCAL_EXPERTS:
        what = "experts and copies" if spare else "experts"
        return f"a rank has {local_experts} {what}, but DeepEP takes up to {_MAX_LOCAL_EXPERTS}"
    try:
        load_deep_ep()
    except ImportError as error:
        return str(error)
    return None
