"""DeepEP: tokens reach other ranks' experts straight from GPU to GPU, over NVLink.

The package ``deep_ep`` does in one kernel each way what the all-to-all does: it copies tokens as
they lie into the other GPUs' memory, on some of the GPU's SMs. Nothing is sorted by rank, packed or
padded, and tokens arrive in the same order. Two modes size what is received:

    counted (``moe.dispatch_mode exact``)  The host waits once, in the forward, for the numbers of
            tokens and of rows; both are unknown sizes to the compiler, and the backward reuses them
            without waiting.
    static  Sizes come from the configuration and nothing waits. Memory past the received tokens is
            uninitialised, with ids of -1, so that no row of an expert is made from it. The experts'
            rows may be too few; the dispatcher sees that on the device, where it counts the ids.

The compiler sees the package's calls as ops, of which what shapes depend on is an argument, since
its caches do not see globals. A call's handle is six plain tensors, results of the dispatch that
combining and the two backwards take; nothing else survives a call::

    rank_prefix [W, W]    channel_prefix [W, C]    recv_channel_prefix [W, C]    (int32)
    source [S] int32      is_token_in_rank [T, W] bool      send_head [T, W] int32

Where ``precision`` is fp8 tokens are sent in e4m3 with their scales, and so are gradients in the
backward of combine. What arrives is at once what it stands for; experts in e4m3 make the same bits
of it.

Both generations of the package have the interface used here, with the same results; 2.x insists on
the NCCL that it was built with. Left out on purpose: several machines, and low-latency kernels.

Legend: W expert parallel ranks, E experts, L = E / W local experts, T tokens here, K experts a
token, S tokens received, R rows of the local experts, D width, C = num_sms / 2 channels.
"""

import ctypes
import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from itertools import product
from math import ceil
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from moetrain.config import ConfigError
from moetrain.config.compute import Precision
from moetrain.kernels.annotate import annotate
from moetrain.kernels.backend import Backend, worth_saving
from moetrain.kernels.quant.e4m3 import Quantised
from moetrain.kernels.quant.recipes import RECIPES
from moetrain.models.architecture import Architecture
from moetrain.parallel.expert.dispatch import ExpertParallelDispatcher, Received
from moetrain.parallel.expert.replicas import Replicas
from moetrain.parallel.processes import machine

_RANKS = (2, 4, 8)  # what the kernels within a machine are built for
_MAX_TOP_K = 32  # a lane of one warp each
_MAX_LOCAL_EXPERTS = 128  # a thread of the counting kernel each
# Half a token is one copy, of whole 16 bytes, through 8 KiB of shared memory.
_HIDDEN_MULTIPLE, _FP8_MULTIPLE = 16, 32
_MAX_HIDDEN = 8176

_AUTO_NUM_SMS = {2: 80, 4: 48, 8: 48}
"""By ranks, where nothing runs beside the communication: about as many as it takes to reach what
the links give (LOG.md)."""

_INSTALL = "pip install tokenspeed-deepep==1.2.1.post20251110"
_LIBRARIES = ("nvshmem/lib/libnvshmem_host.so.*", "nccl/lib/libnccl.so.*")


# ---- the dispatcher -----------------------------------------------------------------------------


class StaticSizes(NamedTuple):
    """Sizes that the static mode reserves."""

    max_tokens: int
    """The most tokens that a rank dispatches at once."""
    rows: int
    """Rows of the local experts."""

    @classmethod
    def plan(
        cls, max_tokens: int, *, capacity: float, num_experts: int, top_k: int, ranks: int
    ) -> "StaticSizes":
        """Reserve ``capacity`` times the rows of an evenly loaded rank, or all there can be."""
        most = ranks * max_tokens * min(top_k, num_experts // ranks)
        return cls(max_tokens, min(most, ceil(capacity * max_tokens * top_k)))


class DeepEP(ExpertParallelDispatcher):
    """Sends tokens by DeepEP over the ranks of ``group``, on one machine; made by all of them.

    ``static`` is None in the counted mode; :meth:`sized` changes it, on all ranks alike.

    Raises:
        ValueError: experts that the ranks cannot share equally.
        ConfigError: more SMs than this GPU has.
        ImportError: the package ``deep_ep`` is missing or broken; the message says what to do.
    """

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        hidden_size: int,
        backend: Backend = "auto",
        *,
        num_sms: Literal["auto"] | int = "auto",
        static: StaticSizes | None = None,
        precision: Precision = "bf16",
        replicas: Replicas | None = None,
    ) -> None:
        super().__init__(num_experts, group, backend, precision, replicas)
        self.num_sms = _AUTO_NUM_SMS[self.num_ranks] if num_sms == "auto" else num_sms
        self.static = static
        if torch.cuda.is_available():
            available = torch.cuda.get_device_properties().multi_processor_count
            if num_sms == "auto":
                self.num_sms = min(self.num_sms, available // 2 * 2)  # an H20 has 78
            if self.num_sms > available:
                raise ConfigError(
                    "moe.deepep_num_sms", f"{self.num_sms}, and this GPU has {available}; use auto"
                )
        _connect(group, hidden_size, self.num_sms)

    def counted(self) -> "DeepEP":
        """Make another over this connection, counted, that sends bf16 and copies no experts."""
        other = copy(self)
        other.static, other.precision = None, "bf16"
        if (replicas := self.replicas) is not None:
            other.replicas, other.num_experts = None, replicas.num_experts
            other.num_local_experts = replicas.num_local_experts
        return other

    @contextmanager
    def sized(self, static: StaticSizes | None) -> Iterator[None]:
        """Use these sizes inside; None is the counted mode."""
        before, self.static = self.static, static
        try:
            yield
        finally:
            self.static = before

    def send(self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> Received:
        """Raises ValueError for more tokens than the static mode was planned for."""
        max_tokens, rows = self.static or (0, 0)
        if self.static is not None and x_TD.shape[0] > max_tokens:
            raise ValueError(
                f"deepep: was given {x_TD.shape[0]} tokens; moe.dispatch_mode 'static' was planned "
                f"for {max_tokens} a rank"
            )
        x_SD, ids_SK, weights_SK, rows_R0, *handle = _dispatch(
            x_TD.contiguous(),
            ids_TK.contiguous(),
            weights_TK.contiguous(),
            self._send_counts(ids_TK),
            self.group_name,
            self.num_sms,
            self.num_ranks * max_tokens,
            rows,
            self.precision,
        )
        is_static = self.static is not None
        return Received(x_SD, ids_SK, weights_SK, rows_R0.shape[0], tuple(handle), is_static)

    def _send_counts(self, ids_TK: torch.Tensor) -> list[torch.Tensor]:
        """Count the tokens for each rank and the slots of each expert (int32), and tell whether a
        token goes to a rank. Compiled, it takes a seventh of the time that the package takes."""
        rank_TK = ids_TK // self.num_local_experts  # rounds down: -1 stays -1
        ranks_W, experts_E = (
            torch.arange(n, device=ids_TK.device, dtype=ids_TK.dtype)
            for n in (self.num_ranks, self.num_experts)
        )
        is_sent_TW = (rank_TK[:, :, None] == ranks_W).any(1)
        slots_E = (ids_TK[:, :, None] == experts_E).sum((0, 1), dtype=torch.int32)
        return [is_sent_TW.sum(0, dtype=torch.int32), slots_E, is_sent_TW]

    def combine(self, y_SD: torch.Tensor, ctx: tuple[torch.Tensor, ...]) -> torch.Tensor:
        how = self.group_name, self.num_sms, self.precision
        (y_TD,) = _combine([y_SD.contiguous()], list(ctx), *how)
        return y_TD


def why_not(
    arch: Architecture,
    group: dist.ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
    precision: Precision = "bf16",
    spare: int = 0,
) -> str | None:
    """Say, alike on every rank of ``group``, why DeepEP cannot run; None if it can. Collective."""
    mine = machine(), why_not_here(arch, group.size(), device, dtype, precision, spare)
    ranks = [mine] * group.size()
    dist.all_gather_object(ranks, mine, group=group)
    hosts = {host for host, _ in ranks}
    if len(hosts) > 1:
        return f"its {group.size()} expert parallel ranks are on {len(hosts)} machines, not on one"
    return next((reason for _, reason in ranks if reason), None)


def why_not_here(
    arch: Architecture,
    ranks: int,
    device: torch.device,
    dtype: torch.dtype,
    precision: Precision = "bf16",
    spare: int = 0,
) -> str | None:
    """Say as much of :func:`why_not` as a rank knows by itself."""
    local_experts, top_k = arch.num_experts // ranks + spare, arch.num_experts_per_token
    width = arch.sent_size
    multiple = _FP8_MULTIPLE if precision in RECIPES else _HIDDEN_MULTIPLE
    if ranks not in _RANKS:
        return f"parallel.ep is {ranks}, and it takes 2, 4 or 8"
    if device.type != "cuda":
        return f"it takes CUDA devices, and this run is on {device.type}"
    if dtype != torch.bfloat16:
        return f"it takes bfloat16, and this run computes in {str(dtype).removeprefix('torch.')}"
    if width % multiple or width > _MAX_HIDDEN:
        name = "hidden_size" if width == arch.hidden_size else "moe_latent_size"
        return (
            f"the model's {name} is {width}, and it takes multiples of {multiple} up to "
            f"{_MAX_HIDDEN}"
        )
    if top_k > _MAX_TOP_K:
        return f"the model sends a token to {top_k} experts, and it takes up to {_MAX_TOP_K}"
    if local_experts > _MAX_LOCAL_EXPERTS:
        what = "experts and copies" if spare else "experts"
        return f"a rank has {local_experts} {what}, and it takes up to {_MAX_LOCAL_EXPERTS}"
    try:
        _load_deep_ep()
    except ImportError as error:
        return str(error)
    return None


# ---- the package ---------------------------------------------------------------------------------


def _load_deep_ep() -> ModuleType:
    if importlib.util.find_spec("deep_ep") is None:
        raise ImportError(f"the package deep_ep is not installed; {_INSTALL}")
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    try:
        # The package links to libraries of other wheels without naming their place.
        for folder, pattern in product(folders, _LIBRARIES):
            for library in sorted(folder.glob(pattern)):
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        return importlib.import_module("deep_ep")
    # 2.x asserts that torch loaded the NCCL it was built with.
    except (ImportError, OSError, AssertionError) as error:
        raise ImportError(f"the package deep_ep does not load ({error}); {_INSTALL}") from error


_SEND_TOKENS = {2: (24, 16), 4: (16, 16)}
_RECEIVE_TOKENS = 256
"""Tokens that a channel sends at once in dispatch and in combine, by ranks, and tokens of each rank
that it has room for; for other numbers of ranks what the package takes, which on four H200s is 30%
slower at 24 SMs and 7 to 15% at 48 (LOG.md)."""


class _Connection(NamedTuple):
    """A buffer that a group's ranks map into each other, and how kernels over it are launched."""

    group: dist.ProcessGroup
    buffer: Any
    ids_dtype: torch.dtype
    dispatch_config: Any
    combine_config: Any


_CONNECTIONS: dict[tuple[str, int, int], _Connection] = {}


def _connect(group: dist.ProcessGroup, hidden_size: int, num_sms: int) -> None:
    """Make the connection for these sizes, unless there is one. Collective."""
    key = (group.group_name, hidden_size, num_sms)
    if key in _CONNECTIONS and _CONNECTIONS[key].group is group:
        return
    package = _load_deep_ep()
    ranks = group.size()
    if ranks in _SEND_TOKENS:
        configs = [package.Config(num_sms, n, _RECEIVE_TOKENS) for n in _SEND_TOKENS[ranks]]
    else:
        # The package makes configurations for the number of SMs that is set on the class.
        package.Buffer.set_num_sms(num_sms)
        configs = [package.Buffer.get_dispatch_config(ranks)]
        configs += [package.Buffer.get_combine_config(ranks)]
    width = hidden_size * torch.bfloat16.itemsize
    size = max(config.get_nvl_buffer_size_hint(width, ranks) for config in configs)
    # Destroyed by us or not at all: the destructor waits for ranks that may have died.
    buffer = package.Buffer(group, size, num_rdma_bytes=0, explicitly_destroy=True)
    _CONNECTIONS[key] = _Connection(group, buffer, package.topk_idx_t, *configs)


def disconnect() -> None:
    """Free every buffer. Collective; to be called before the process groups end."""
    while _CONNECTIONS:
        _CONNECTIONS.popitem()[1].buffer.destroy()


@contextmanager
def _connection(group: str, hidden_size: int, num_sms: int) -> Iterator[_Connection]:
    # Filling fresh memory, as deterministic torch does, would run beside the package's kernels, on
    # another stream: it allocates results after its stream has waited for ours.
    torch_setting: Any = torch.utils.deterministic
    fill, torch_setting.fill_uninitialized_memory = torch_setting.fill_uninitialized_memory, False
    try:
        yield _CONNECTIONS[group, hidden_size, num_sms]
    finally:
        torch_setting.fill_uninitialized_memory = fill


_TenTensors: Any = tuple[(torch.Tensor,) * 10]


@torch.library.custom_op("moetrain::deepep_dispatch", mutates_args=())
def _dispatch(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    send: Sequence[torch.Tensor],
    group: str,
    num_sms: int,
    worst_tokens: int,
    worst_rows: int,
    precision: str,
) -> _TenTensors:  # pyright: ignore[reportInvalidTypeForm]
    """Give what arrives (``x_SD``, ``ids_SK``, ``weights_SK``), ``rows_R0`` and the handle.

    ``send`` has the tokens for each rank, the slots that chose each expert (both int32), and
    whether a token goes to a rank. ``worst_tokens`` of 0 is the counted mode; else it is S and
    ``worst_rows`` is R. ``rows_R0`` holds nothing: its shape is how R comes out of an op.
    """
    tokens_W, slots_E, is_sent_TW = send
    with annotate("deepep send", x_TD), _connection(group, x_TD.shape[1], num_sms) as found:
        x_SD, ids_SK, weights_SK, counts, handle, _ = found.buffer.dispatch(
            _narrowed(x_TD, precision),
            topk_idx=ids_TK.to(found.ids_dtype),
            topk_weights=weights_TK,
            num_tokens_per_rank=tokens_W,
            num_tokens_per_expert=slots_E,
            is_token_in_rank=is_sent_TW,
            num_worst_tokens=worst_tokens,
            config=found.dispatch_config,
        )
    rows_R0 = x_TD.new_empty(worst_rows if worst_tokens else sum(counts), 0)
    *handle, is_sent_TW, send_head_TW = handle
    handle += is_sent_TW.clone(), send_head_TW  # none of the results may be an argument
    return _widened(x_SD, x_TD.dtype, precision), ids_SK.int(), weights_SK, rows_R0, *handle


def _narrowed(x_TD: torch.Tensor, precision: str) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Give tokens as the package takes them: e4m3 with any number of scales a token."""
    if precision not in RECIPES:
        return x_TD
    rows = RECIPES[precision].rows(x_TD)
    return rows.values, rows.scales_by_row()


def _widened(
    x_SD: torch.Tensor | tuple[torch.Tensor, ...], dtype: torch.dtype, precision: str
) -> torch.Tensor:
    if isinstance(x_SD, torch.Tensor):
        return x_SD
    values_SD, scales_SG = x_SD
    return Quantised.received(values_SD, scales_SG, RECIPES[precision].tiled).to(dtype, "auto")


@_dispatch.register_fake
def _(x_TD, ids_TK, weights_TK, send, group, num_sms, worst_tokens, worst_rows, precision):
    (tokens, width), top_k, ranks = x_TD.shape, ids_TK.shape[1], send[0].shape[0]
    integers, channels = partial(x_TD.new_empty, dtype=torch.int32), num_sms // 2
    received, rows = worst_tokens, worst_rows
    if not worst_tokens:
        received, rows = (torch.library.get_ctx().new_dynamic_size() for _ in range(2))
    return (
        x_TD.new_empty(received, width),
        x_TD.new_empty(received, top_k, dtype=torch.int32),
        weights_TK.new_empty(received, top_k),
        x_TD.new_empty(rows, 0),
        integers(ranks, ranks),
        integers(ranks, channels),
        integers(ranks, channels),
        integers(received),
        x_TD.new_empty(tokens, ranks, dtype=torch.bool),
        integers(tokens, ranks),
    )


@torch.library.custom_op("moetrain::deepep_combine", mutates_args=())
def _combine(
    sent: Sequence[torch.Tensor],
    handle: Sequence[torch.Tensor],
    group: str,
    num_sms: int,
    precision: str,
) -> list[torch.Tensor]:
    """Add up ``y_SD``, alone in ``sent``, where its tokens came from; ``precision`` is for its
    backward. That of dispatch also sends ``d_weights_SK``, 0 in slots of other ranks' experts."""
    *others, send_head_TW = handle
    # The package rewrites send_head in place: autograd still has it.
    handle, (x_SD, *weights) = (*others, send_head_TW.clone()), sent
    with annotate("deepep sum", x_SD), _connection(group, x_SD.shape[1], num_sms) as found:
        how = {"topk_weights": weights[0] if weights else None, "config": found.combine_config}
        return list(found.buffer.combine(x_SD, handle, **how)[: len(sent)])


@_combine.register_fake
def _(sent, handle, group, num_sms, precision):
    return [x.new_empty(handle[-1].shape[0], x.shape[1]) for x in sent]


@torch.library.custom_op("moetrain::deepep_combine_backward", mutates_args=())
def _combine_backward(
    d_y_TD: torch.Tensor, handle: Sequence[torch.Tensor], group: str, num_sms: int, precision: str
) -> torch.Tensor:
    sent, handle = _narrowed(d_y_TD, precision), tuple(handle)
    with annotate("deepep send", d_y_TD), _connection(group, d_y_TD.shape[1], num_sms) as found:
        d_y_SD = found.buffer.dispatch(sent, handle=handle, config=found.dispatch_config)[0]
    return _widened(d_y_SD, d_y_TD.dtype, precision)


@_combine_backward.register_fake
def _(d_y_TD, handle, group, num_sms, precision):
    return d_y_TD.new_empty(handle[3].shape[0], d_y_TD.shape[1])


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*output[4:])
    _, ids_TK, _, _, ctx.group, ctx.num_sms, *_ = inputs
    ctx.top_k = ids_TK.shape[1]
    ctx.set_materialize_grads(False)  # eight of the results are integers


def _differentiate_dispatch(
    ctx: Any, d_x_SD: torch.Tensor, d_ids: None, d_weights_SK: torch.Tensor | None, *_: None
):
    if d_weights_SK is None:
        d_weights_SK = d_x_SD.new_zeros(d_x_SD.shape[0], ctx.top_k, dtype=torch.float32)
    gradients, handle = [d_x_SD.contiguous(), d_weights_SK.contiguous()], list(ctx.saved_tensors)
    d_x_TD, d_weights_TK = _combine(gradients, handle, ctx.group, ctx.num_sms, "bf16")
    return d_x_TD, None, d_weights_TK, [None] * 3, *[None] * 5


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    _, handle, *ctx.how = inputs
    ctx.save_for_backward(*handle)


def _differentiate_combine(ctx: Any, gradients: list[torch.Tensor]):
    (d_y_TD,), handle = gradients, list(ctx.saved_tensors)
    d_y_SD = _combine_backward(d_y_TD.contiguous(), handle, *ctx.how)
    return [d_y_SD], [None] * len(handle), None, None, None


_dispatch.register_autograd(_differentiate_dispatch, setup_context=_save_dispatch)
_combine.register_autograd(_differentiate_combine, setup_context=_save_combine)

# As in moetrain.parallel.expert.dispatch: a rank without tokens must still call.
_OPS = [
    getattr(torch.ops.moetrain, f"deepep_{name}").default
    for name in ("dispatch", "combine", "combine_backward")
]
for _op in _OPS:
    torch.fx.has_side_effect(_op)
worth_saving("dispatch", *_OPS[:2])
