"""DeepEP's kernels as ops that the compiler sees: dispatch, combine, and their backwards.

Everything on which shapes depend is an argument of each op, since the compiler's caches do not see
globals. A call's handle is six plain tensors. Dispatch returns them, combine and the two backwards
take them, and nothing else survives a call::

    rank_prefix [W, W]    channel_prefix [W, C]    recv_channel_prefix [W, C]    (int32)
    source [S] int32      is_token_in_rank [T, W] bool      send_head [T, W] int32

If ``precision`` is fp8, tokens are sent in e4m3 with their scales, and so are gradients in the
backward of combine. They are dequantised as they arrive. Experts in e4m3 quantise them again, to
the same bits.

Versions 1.x and 2.x of the package ``deep_ep`` have the interface used here, with the same results.
2.x requires the NCCL that it was built with. Left out on purpose: several machines, and low-latency
kernels. :mod:`moetrain.parallel.expert.deepep` decides what is sent.

Legend: W expert parallel ranks, T tokens here, K experts a token, S tokens received, R rows of the
local experts, D width, C = num_sms / 2 channels.
"""

import ctypes
import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch

from moetrain.kernels.experts.permutation import transpose_blocks
from moetrain.kernels.quant.e4m3 import Quantised
from moetrain.kernels.quant.recipes import RECIPES
from moetrain.runtime.annotate import annotate
from moetrain.runtime.backend import gradients, worth_saving
from moetrain.runtime.typed import OpContext

INSTALL = "pip install tokenspeed-deepep==1.2.1.post20251110"
"""The command that installs the package."""
_LIBRARIES = ("nvshmem/lib/libnvshmem_host.so.*", "nccl/lib/libnccl.so.*")


def load_deep_ep() -> ModuleType:
    """Import the package ``deep_ep``.

    Raises:
        ImportError: it is not installed, or does not load.
    """
    if importlib.util.find_spec("deep_ep") is None:
        raise ImportError(f"the package deep_ep is not installed; {INSTALL}")
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    try:
        # The package links to libraries of other wheels without naming their folders.
        for folder, pattern in product(folders, _LIBRARIES):
            for library in sorted(folder.glob(pattern)):
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        return importlib.import_module("deep_ep")
    # 2.x asserts that torch loaded the NCCL it was built with.
    except (ImportError, OSError, AssertionError) as error:
        raise ImportError(f"the package deep_ep does not load ({error}); {INSTALL}") from error


_SEND_TOKENS = {2: (24, 16), 4: (16, 16)}
"""Tokens that a channel sends at once in dispatch and in combine, by number of ranks. For other
numbers the package's own settings are taken. On four H200s the package's settings are 30% slower at
24 SMs, and 7 to 15% slower at 48 (docs/log/dispatch.md)."""
_RECEIVE_TOKENS = 256
"""Tokens of each rank for which a channel has room."""


_Tokens = torch.Tensor | tuple[torch.Tensor, ...]
"""Tokens, or their values and scales."""


class _Group(Protocol):
    """A process group."""

    @property
    def group_name(self) -> str: ...

    def size(self) -> int: ...


class _Buffer(Protocol):
    """A ``deep_ep.Buffer``."""

    def dispatch(
        self, x: _Tokens, /, **options: object
    ) -> tuple[
        _Tokens, torch.Tensor, torch.Tensor, list[int], tuple[torch.Tensor, ...], object
    ]: ...

    def combine(
        self, x_SD: torch.Tensor, handle: tuple[torch.Tensor, ...], /, **options: object
    ) -> tuple[torch.Tensor, ...]: ...

    def destroy(self) -> None: ...


class _Connection(NamedTuple):
    """A buffer that a group's ranks map into each other, and the settings of kernels over it."""

    group: _Group
    buffer: _Buffer
    ids_dtype: torch.dtype
    """The dtype in which the package takes ids of experts."""
    dispatch_config: object
    """The ``deep_ep.Config`` of dispatch."""
    combine_config: object
    """The ``deep_ep.Config`` of combine."""


_CONNECTIONS: dict[tuple[str, int, int], _Connection] = {}


def connect(group: _Group, hidden_size: int, num_sms: int) -> None:
    """Make the connection of a process group for these sizes, if there is none. Collective."""
    key = (group.group_name, hidden_size, num_sms)
    if key in _CONNECTIONS and _CONNECTIONS[key].group is group:
        return
    package = load_deep_ep()
    ranks = group.size()
    if ranks in _SEND_TOKENS:
        dispatch_config, combine_config = (
            package.Config(num_sms, n, _RECEIVE_TOKENS) for n in _SEND_TOKENS[ranks]
        )
    else:
        # The package makes configurations for the number of SMs that is set on the class.
        package.Buffer.set_num_sms(num_sms)
        dispatch_config = package.Buffer.get_dispatch_config(ranks)
        combine_config = package.Buffer.get_combine_config(ranks)
    width = hidden_size * torch.bfloat16.itemsize
    configs = dispatch_config, combine_config
    size = max(config.get_nvl_buffer_size_hint(width, ranks) for config in configs)
    # Only disconnect destroys it: a destructor would wait for ranks that may have died.
    buffer = package.Buffer(group, size, num_rdma_bytes=0, explicitly_destroy=True)
    _CONNECTIONS[key] = _Connection(
        group=group,
        buffer=buffer,
        ids_dtype=package.topk_idx_t,
        dispatch_config=dispatch_config,
        combine_config=combine_config,
    )


def disconnect() -> None:
    """Free every buffer. Collective; to be called before the process groups end."""
    while _CONNECTIONS:
        _CONNECTIONS.popitem()[1].buffer.destroy()


@contextmanager
def _connection(
    group: str,
    hidden_size: int,
    num_sms: int,
) -> Iterator[_Connection]:
    """Yield the connection of these sizes, with the filling of fresh memory switched off.

    With deterministic algorithms torch fills new tensors on our stream. The package allocates its
    results after its own stream has waited for ours, so the filling would run at the same time as
    the package's kernels and could overwrite what they write.
    """
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
    precision: str,
    worst_tokens: int | None,
    worst_rows: int,
    came_WM: torch.Tensor | None,
) -> _TenTensors:  # pyright: ignore[reportInvalidTypeForm]
    """Return the arriving ``x_SD``, ``ids_SK`` and ``weights_SK``, ``rows_R0`` and the handle.

    ``rows_R0`` is empty: its shape tells the compiler the number R.

    Args:
        send: the number of tokens for each rank, int32 [W]; the number of slots that chose each
            expert, int32 [E]; and bool [T, W], True if a token goes to a rank.
        worst_tokens: a fixed S, of which some rows may stay unused; None: the package counts S.
        worst_rows: a fixed R, if ``worst_tokens`` is given.
        came_WM: integers on the host: the number of tokens that come here from each rank and, on
            that rank, from each of M machines. Tokens arrive ordered by rank, then by machine. With
            ``came_WM`` they are returned ordered by machine, then by rank.
    """
    tokens_W, slots_E, is_sent_TW = send
    with annotate("deepep send", x_TD), _connection(group, x_TD.shape[1], num_sms) as found:
        x_SD, ids_SK, weights_SK, counts, handle, _ = found.buffer.dispatch(
            _quantised(x_TD, precision),
            topk_idx=ids_TK.to(found.ids_dtype),
            topk_weights=weights_TK,
            num_tokens_per_rank=tokens_W,
            num_tokens_per_expert=slots_E,
            is_token_in_rank=is_sent_TW,
            # The package counts if this is 0.
            num_worst_tokens=0 if worst_tokens is None else max(1, worst_tokens),
            config=found.dispatch_config,
        )
    rows_R0 = x_TD.new_empty(sum(counts) if worst_tokens is None else worst_rows, 0)
    *prefixes, source_S, is_sent_TW, send_head_TW = handle
    # No result of an op may be one of its arguments.
    handle = *prefixes, source_S[:worst_tokens], is_sent_TW.clone(), send_head_TW
    x_SD = _dequantised(x_SD, x_TD.dtype, precision)
    arrived = [x[:worst_tokens] for x in (x_SD, ids_SK.int(), weights_SK)]
    if came_WM is not None:
        arrived = [transpose_blocks(x, came_WM) for x in arrived]
    return *arrived, rows_R0, *handle


def _quantised(x_TD: torch.Tensor, precision: str) -> _Tokens:
    """Return tokens as the package takes them: as they are, or e4m3 values and scales by token."""
    if precision not in RECIPES:
        return x_TD
    rows = RECIPES[precision].rows(x_TD)
    return rows.values, rows.scales_by_row()


def _dequantised(
    x_SD: _Tokens,
    dtype: torch.dtype,
    precision: str,
) -> torch.Tensor:
    if isinstance(x_SD, torch.Tensor):
        return x_SD
    values_SD, scales_SG = x_SD
    return Quantised.received(values_SD, scales_SG, RECIPES[precision].tiled).to(dtype, "auto")


@_dispatch.register_fake
def _(
    x_TD, ids_TK, weights_TK, send, group, num_sms, precision, worst_tokens, worst_rows, came_WM
):  # fmt: skip
    (tokens, width), top_k, ranks = x_TD.shape, ids_TK.shape[1], send[0].shape[0]
    integers, channels = partial(x_TD.new_empty, dtype=torch.int32), num_sms // 2
    received, rows = worst_tokens, worst_rows
    if worst_tokens is None:
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
    """Send results back to the ranks of their tokens, and add them up there.

    Args:
        sent: ``y_SD`` alone. The backward of dispatch sends ``d_x_SD`` and ``d_weights_SK``, which
            is 0 in slots of other ranks' experts.
        precision: how the backward sends gradients.
    """
    *others, send_head_TW = handle
    # The package overwrites send_head, which autograd has saved.
    copied = (*others, send_head_TW.clone())
    x_SD, *weights = sent
    with annotate("deepep sum", x_SD), _connection(group, x_SD.shape[1], num_sms) as found:
        sums = found.buffer.combine(
            x_SD,
            copied,
            topk_weights=weights[0] if weights else None,
            config=found.combine_config,
        )
        return list(sums[: len(sent)])


@_combine.register_fake
def _(sent, handle, group, num_sms, precision):
    return [x.new_empty(handle[-1].shape[0], x.shape[1]) for x in sent]


@torch.library.custom_op("moetrain::deepep_combine_backward", mutates_args=())
def _combine_backward(
    d_y_TD: torch.Tensor,
    handle: Sequence[torch.Tensor],
    group: str,
    num_sms: int,
    precision: str,
    came_WM: torch.Tensor | None = None,
) -> torch.Tensor:
    """Send each token's gradient in ``d_y_TD`` to the ranks to which dispatch sent the token."""
    sent, handle = _quantised(d_y_TD, precision), tuple(handle)
    with annotate("deepep send", d_y_TD), _connection(group, d_y_TD.shape[1], num_sms) as found:
        d_y_SD = found.buffer.dispatch(sent, handle=handle, config=found.dispatch_config)[0]
    d_y_SD = _dequantised(d_y_SD, d_y_TD.dtype, precision)
    return d_y_SD if came_WM is None else transpose_blocks(d_y_SD, came_WM)


@_combine_backward.register_fake
def _(d_y_TD, handle, group, num_sms, precision, came_WM=None):
    return d_y_TD.new_empty(handle[3].shape[0], d_y_TD.shape[1])


def _save_dispatch(
    ctx: OpContext,
    inputs: tuple[Any, ...],
    output: tuple[torch.Tensor, ...],
) -> None:
    _, ids_TK, _, send, ctx.group, ctx.num_sms, *_ = inputs
    _, _, _, _, *handle = output
    ctx.save_for_backward(*handle)
    ctx.top_k, ctx.num_sent = ids_TK.shape[1], len(send)
    ctx.set_materialize_grads(False)  # eight of the results are integers


def _differentiate_dispatch(
    ctx: OpContext,
    d_x_SD: torch.Tensor,
    d_ids: None,
    d_weights_SK: torch.Tensor | None,
    *_: None,
):
    if d_weights_SK is None:
        d_weights_SK = d_x_SD.new_zeros(d_x_SD.shape[0], ctx.top_k, dtype=torch.float32)
    d_x_TD, d_weights_TK = _combine(
        [d_x_SD.contiguous(), d_weights_SK.contiguous()],
        list(ctx.saved_tensors),
        ctx.group,
        ctx.num_sms,
        "bf16",
    )
    return gradients(_dispatch, x_TD=d_x_TD, weights_TK=d_weights_TK, send=[None] * ctx.num_sent)


def _save_combine(
    ctx: OpContext,
    inputs: tuple[Any, ...],
    output: list[torch.Tensor],
) -> None:
    _, handle, ctx.group, ctx.num_sms, ctx.precision = inputs
    ctx.save_for_backward(*handle)


def _differentiate_combine(ctx: OpContext, d_sums: list[torch.Tensor]) -> tuple[object, ...]:
    (d_y_TD,) = d_sums
    handle = list(ctx.saved_tensors)
    d_y_SD = _combine_backward(d_y_TD.contiguous(), handle, ctx.group, ctx.num_sms, ctx.precision)
    return gradients(_combine, sent=[d_y_SD], handle=[None] * len(handle))


_dispatch.register_autograd(_differentiate_dispatch, setup_context=_save_dispatch)
_combine.register_autograd(_differentiate_combine, setup_context=_save_combine)

# The ops are collective, so a rank without tokens must call them too. Without this mark the
# compiler drops ops whose results are empty or unused.
_OPS = [
    getattr(torch.ops.moetrain, f"deepep_{name}").default
    for name in ("dispatch", "combine", "combine_backward")
]
for _op in _OPS:
    torch.fx.has_side_effect(_op)
worth_saving("dispatch", *_OPS[:2])
