"""CUDA graphs of what a step computes: the host launches its thousands of kernels as one.

With small models and micro-batches a GPU waits for the host. :class:`Graphs` runs a function of
tensors, captures it at its second call with the same shapes, and replays it from then on: a replay
launches the same kernels with the same arguments, so it gives the same bits.

A graph knows memory by its address. So what outlives a step must stay where it is, inputs are
copied to fixed tensors, and results are copied out of the memory that all graphs share. Nothing of
Python runs in a replay: ``marks`` of the capture, which say what it did, are set again.

Several ranks capture, and replay, in the same steps: a collective in a graph is planned for one in
the others'. So they agree on the host, before each step, on how many documents micro-batches have
(:func:`alike`); where these differ in anything else, the step runs without graphs on all.

Left out on purpose: pipelines, and dispatch whose sizes the host must know. Tensor and context
parallelism were not shown to have the same bits.
"""

import gc
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from moetrain.config import ConfigError
from moetrain.kernels.attention.cudnn import document_bucket

_T = TypeVar("_T")
_B = TypeVar("_B")
_Replay = Callable[[], Any]
_MOST = 64
"""Keys that are kept; more come of objectives or shapes that are new in every step."""


class _Captured(NamedTuple):
    what: Any
    inputs: list[torch.Tensor]
    replay: _Replay
    """Launches the kernels; returns what the function returned, with values of this launch."""
    marks: Any


class Graphs:
    """Functions of tensors on ``device``, each by a key and its inputs' shapes.

    Args:
        marked: has the ``marks`` that Python notes of a step; these set again, it is as it was.
    """

    def __init__(self, device: torch.device, marked: Any) -> None:
        self.device, self.marked = device, marked
        self._pool: Any = None
        self._kept: dict[Hashable, Any] = {}
        """What was called, by key: its objects, whose ids stay theirs so, and what was captured."""

    def clear(self) -> None:
        """Forget all graphs: what they know the address of has moved."""
        self._kept.clear()
        self._pool = None

    def run(
        self,
        what: Sequence[Any],
        fn: Callable[[_T], Any],
        inputs: _T,
    ) -> Any:
        """Return ``fn(inputs)``: tensors, in any nesting.

        Args:
            what: objects that ``fn`` depends on beside its inputs, and that do not change.
            inputs: tensors on the device, in any nesting, beside plain values.

        Raises ConfigError: ``fn`` cannot be captured, or an input is neither.
        """
        leaves, spec = pytree.tree_flatten(inputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        key = (*map(id, what), self.marked.marks, repr(spec), *map(_shape, leaves))
        known = self._kept.get(key)
        if known is None:  # compiles, and allocates what stays
            if len(self._kept) >= _MOST:
                self.clear()
            self._kept[key] = [*what]
            return fn(inputs)
        if not isinstance(known, _Captured):
            fixed = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            given = pytree.tree_unflatten(fixed, spec)
            replay = self._capture(lambda: fn(given))
            places = [leaf for leaf in fixed if isinstance(leaf, torch.Tensor)]
            known = self._kept[key] = _Captured(known, places, replay, self.marked.marks)
        else:
            torch._foreach_copy_(known.inputs, tensors)
        self.marked.marks = known.marks
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, known.replay())

    def _capture(self, fn: Callable[[], Any]) -> _Replay:
        """Capture the kernels of ``fn`` without running them."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # what is left of the call before holds on to its stream
        try:
            # Other threads, of data and of checkpoints, may do as they like meanwhile.
            how = {"pool": self._pool, "capture_error_mode": "thread_local"}
            with torch.cuda.graph(graph, **how):
                results = fn()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            problem = f"true, and this run's step cannot be captured ({reason}); set no"
            raise ConfigError("compile.cuda_graphs", problem) from error

        def replay() -> Any:
            graph.replay()
            return results

        return replay


def _shape(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return leaf
    problem = f"true, and a micro-batch holds a {type(leaf).__name__}, which is no tensor; set no"
    raise ConfigError("compile.cuda_graphs", problem)


def alike(
    batches: Sequence[_B], agree: Callable[[torch.Tensor], object] | None = None
) -> list[_B] | None:
    """Give packed ``batches``, on the host, as many documents each, in buckets of powers of two.

    What is added are empty documents at the end, so that other documents need no other graph.

    ``agree`` sets int64 numbers on the host to the largest of all ranks. With it this is
    collective: as many documents on all ranks; or None: their shapes differ besides.
    """
    ends = [getattr(batch, "cu_seqlens", None) for batch in batches]
    counts = [end_N.shape[0] - 1 for end_N in ends if end_N is not None]
    most = document_bucket(max(counts)) if counts else 0
    if agree is not None:
        given: Any = [*batches]
        leaves, spec = pytree.tree_flatten([batch.to(torch.device("cpu")) for batch in given])
        others = [_shape(leaf) for leaf in leaves if not any(leaf is end_N for end_N in ends)]
        own = zlib.crc32(repr((spec, others)).encode())
        found = torch.tensor([most, own, -own])
        agree(found)
        most, largest, least = found.tolist()
        if largest != -least:
            return None
    padded: list[Any] = [*batches]
    for i, end_N in enumerate(ends):
        if end_N is not None:
            wider_N = F.pad(end_N, (0, most + 1 - end_N.shape[0]), value=int(end_N[-1]))
            padded[i] = padded[i]._replace(cu_seqlens=wider_N)
    return padded
