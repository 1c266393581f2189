"""CUDA graphs of what a step computes: the host launches its thousands of kernels as one.

With small models and micro-batches a GPU waits for the host. :class:`Graphs` runs a function of
tensors, captures it at its second call with the same shapes, and replays it from then on: a replay
launches the same kernels with the same arguments, so it gives the same bits.

A graph knows memory by its address. So tensors that outlive a step must stay where they are, inputs
are copied to fixed tensors, and results are copied out of the memory that all graphs share. A
replay runs no Python. So it restores ``marks``, the record of what the captured Python code did.

All ranks must capture, and replay, in the same steps, because a collective inside a graph waits for
the other ranks' graphs. So before each step the ranks agree, on the host, on a number of documents
to which all pad their micro-batches (:func:`pad_documents`). If the ranks' shapes differ in
anything else, all of them run the step without graphs.

Left out on purpose: pipelines, and dispatch whose sizes the host must know. It was not shown that
replays give the same bits with tensor or context parallelism.
"""

import gc
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from moetrain.config import ConfigError

_T = TypeVar("_T")
_R = TypeVar("_R")
_B = TypeVar("_B")
_MAX_KEYS = 64
"""Most keys that are kept. One more makes :meth:`Graphs.run` forget all graphs: objectives or
shapes that are new in every step would otherwise fill the memory."""
_MIN_DOCUMENTS = 16
"""Rounding up to this costs no time: 16,384 tokens on one H200 take the same time within 1 % for
all numbers of documents up to 64."""


def document_bucket(documents: int) -> int:
    """Return ``documents`` rounded up to a power of two, at least 16.

    CUDA graphs, and cuDNN's graphs of attention, are built for that many documents.
    """
    return max(_MIN_DOCUMENTS, 1 << (documents - 1).bit_length())


class Marked(Protocol):
    """Keeps the state, beside tensors, that a step's Python code changes."""

    marks: Any
    """A hashable record of that state. Assigning a record restores the state."""


class Captured(NamedTuple):
    """A captured call."""

    objects: list[object]
    """The objects that its key names by id. They are kept so that no others get their ids."""
    inputs: list[torch.Tensor]
    """The tensors that the graph reads."""
    replay: Callable[[], object]
    """Launches the kernels; returns what the function returned, with values of this launch."""
    marks: Any
    """The marks after the call."""


class Graphs:
    """Captured functions of tensors on ``device``.

    A function is found again by the objects that it depends on, the marks, and the shapes of its
    inputs.

    Args:
        marked: keeps the marks of a step.
    """

    def __init__(self, device: torch.device, marked: Marked) -> None:
        self.device, self.marked = device, marked
        self._pool: Any = None
        self._kept: dict[Hashable, Captured | list[object]] = {}
        """By key: a captured call, or the objects of one that has run once."""

    def clear(self) -> None:
        """Forget all graphs. Call this after tensors that they know by address have moved."""
        self._kept.clear()
        self._pool = None

    @property
    def captured(self) -> list[Captured]:
        """All captured calls."""
        return [known for known in self._kept.values() if isinstance(known, Captured)]

    def run(self, objects: Sequence[object], fn: Callable[[_T], _R], inputs: _T) -> _R:
        """Return ``fn(inputs)``: tensors, in any nesting.

        Args:
            objects: the objects that ``fn`` depends on beside its inputs. They must not change.
            inputs: tensors on the device, in any nesting, beside plain values.

        Raises:
            ConfigError: ``fn`` cannot be captured, or an input is neither tensor nor plain value.
        """
        leaves, spec = pytree.tree_flatten(inputs)
        key = (*map(id, objects), self.marked.marks, repr(spec), *map(_shape, leaves))
        known = self._kept.get(key)
        # First call: run it. That compiles, and allocates what stays.
        if known is None:
            if len(self._kept) >= _MAX_KEYS:
                self.clear()
            self._kept[key] = [*objects]
            return fn(inputs)
        # Second call: capture it on fixed inputs.
        if not isinstance(known, Captured):
            fixed = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            fixed_inputs = pytree.tree_unflatten(fixed, spec)
            known = Captured(
                objects=known,
                inputs=[leaf for leaf in fixed if isinstance(leaf, torch.Tensor)],
                replay=self.capture(lambda: fn(fixed_inputs)),
                marks=self.marked.marks,
            )
            self._kept[key] = known
        # Later calls: copy the inputs.
        else:
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            torch._foreach_copy_(known.inputs, tensors)
        self.marked.marks = known.marks
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, known.replay())

    def capture(self, fn: Callable[[], _R]) -> Callable[[], _R]:
        """Capture the kernels of ``fn`` without running them.

        Return a function that replays them and returns what ``fn`` returned.
        """
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # garbage of the previous call would keep its stream in use
        try:
            # thread_local: other threads, of data and of checkpoints, may use CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                results = fn()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            problem = f"true, but this run's step cannot be captured ({reason}); set no"
            raise ConfigError("compile.cuda_graphs", problem) from error

        def replay() -> _R:
            graph.replay()
            return results

        return replay


def _shape(leaf: object) -> Hashable:
    """Return the part of a graph's key that an input gives.

    It is a tensor's shape and dtype, or a plain value itself.
    """
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return leaf
    problem = f"true, but a micro-batch holds a {type(leaf).__name__}, not a tensor; set no"
    raise ConfigError("compile.cuda_graphs", problem)


def pad_documents(
    batches: Sequence[_B], max_over_ranks: Callable[[torch.Tensor], object] | None = None
) -> list[_B] | None:
    """Return packed ``batches``, on the host, padded to one :func:`document_bucket` of documents.

    Empty documents are added at the end, so that few graphs serve all numbers of documents.

    Args:
        max_over_ranks: replaces an int64 tensor on the host by its maximum over all ranks. With it
            the call is collective, and all ranks get the same number of documents, or None if their
            shapes differ in anything else.
    """
    ends = [getattr(batch, "cu_seqlens", None) for batch in batches]
    counts = [end_N.shape[0] - 1 for end_N in ends if end_N is not None]
    documents = document_bucket(max(counts)) if counts else 0
    if max_over_ranks is not None:
        # A hash of all other shapes; its maximum and minimum are equal if those of all ranks are.
        movable: list[Any] = [*batches]
        on_host = [batch.to(torch.device("cpu")) for batch in movable]
        leaves, spec = pytree.tree_flatten(on_host)
        others = [_shape(leaf) for leaf in leaves if not any(leaf is end_N for end_N in ends)]
        own = zlib.crc32(repr((spec, others)).encode())
        found = torch.tensor([documents, own, -own])
        max_over_ranks(found)
        documents, largest, smallest = found.tolist()
        if largest != -smallest:
            return None
    padded: list[Any] = [*batches]
    for i, end_N in enumerate(ends):
        if end_N is not None:
            wider_N = F.pad(end_N, (0, documents + 1 - end_N.shape[0]), value=int(end_N[-1]))
            padded[i] = padded[i]._replace(cu_seqlens=wider_N)
    return padded
