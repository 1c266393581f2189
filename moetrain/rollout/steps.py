"""Runs the model over pages: a step reads tokens of some sequences and samples each one's next.

When every sequence reads one token (most steps, once prompts are read), shapes are fixed: on CUDA
such a step is a graph, captured at the first use of its size, with the sequences in lanes, some of
which may be empty. One row of numbers describes a lane. Other steps run eagerly.

Legend: T tokens of a step, N sequences, L lanes, M pages of a sequence at most, C = 5 + M numbers
of a lane, D model width, K experts a token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from moetrain.kernels.loss.vocabulary_chunk import sample_tokens
from moetrain.models.attention import Attention, masked_attention
from moetrain.models.layers import Context
from moetrain.models.moe import Router
from moetrain.models.transformer import Rows, Transformer
from moetrain.rollout.expert_parallel import ExpertParallel
from moetrain.rollout.pages import PagedAttention, PagedRows, Pages
from moetrain.rollout.sampling import keys_of
from moetrain.rollout.scheduler import Running

Planned = Sequence[tuple[Running, int]]
"""Sequences of one step and how many tokens of each it reads, those that read one first."""

_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1025, 32))
"""Numbers of lanes that graphs are captured for."""
_TOKEN, _POSITION, _STREAM, _INVERSE, _SCALE, _PAGES = range(6)  # columns of a lane


class Step(NamedTuple):
    """The result of one step; on the device, and valid until the next."""

    hidden_ND: torch.Tensor
    """Hidden states of each sequence's last token that was read, after the final norm."""
    chosen_2N: torch.Tensor
    """fp64: the next token of each and its log-probability. Filters have not been applied."""
    routes: list[torch.Tensor]
    """The experts of every token [T, K], one tensor a MoE layer; empty if not asked for."""


class _CapturedStep(NamedTuple):
    graph: torch.cuda.CUDAGraph
    lanes_LC: torch.Tensor
    step: Step


class Steps:
    """Runs ``model`` with paged attention in place of its own."""

    def __init__(
        self, model: Transformer, pages: Pages, known: int, experts: ExpertParallel | None
    ) -> None:
        self.model, self.pages, self.known, self.experts = model, pages, known, experts
        most = min(model.arch.max_positions, pages.num_pages * pages.page_size)
        self.pages_per_sequence = -(-most // pages.page_size)
        if self.device.type == "cuda" and model.kernels.backend == "reference":
            raise ValueError("kernels.backend 'reference' has no generation on CUDA; use auto")
        self.caches: list[PagedAttention] = []
        for window, block in zip(model.windows, model.layers, strict=True):
            attention = getattr(block, "attn", None)
            core = getattr(attention, "core", None)
            if core is not masked_attention and not isinstance(core, PagedAttention):
                raise ValueError(f"{model.arch.family} attends in a way that has no cache here")
            assert isinstance(attention, Attention)
            attention.core = PagedAttention(pages.num_pages, pages.page_size, window)
            self.caches.append(attention.core)
        for module in model.modules():
            if hasattr(module, "precision"):  # with few rows, reading weights takes the time
                setattr(module, "precision", "bf16")  # noqa: B010
            if hasattr(module, "batch_invariant") and self.device.type == "cuda":
                setattr(module, "batch_invariant", True)  # noqa: B010
        self._routers = [m for m in model.modules() if isinstance(m, Router)]
        self._graphs: dict[int, _CapturedStep] = {}
        self._no_pages = np.zeros(self.pages_per_sequence, np.int32)
        self._lanes_LC = torch.zeros(0, _PAGES + self.pages_per_sequence, dtype=torch.int32)

    @property
    def device(self) -> torch.device:
        return self.model.embed.weight.device

    @property
    def has_graphs(self) -> bool:
        """Whether steps can be captured: the experts' product of fp32 asks the device for sizes."""
        return self.device.type == "cuda" and self.model.embed.weight.dtype == torch.bfloat16

    def free(self) -> None:
        """Free the cache's memory, and the graphs that hold its addresses."""
        self._graphs.clear()
        for cache in self.caches:
            cache.free()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    @torch.no_grad()
    def warm_up(self, most: int) -> None:
        """Capture the graphs for up to ``most`` sequences. Collective over ranks of experts."""
        if self.has_graphs and (self.experts is None or self.experts.can_fix_sizes):
            for size in reversed(_SIZES[: bisect_left(_SIZES, most) + 1]):  # later ones fit into it
                if size not in self._graphs:
                    self._capture(size)

    @torch.no_grad()
    def run(self, planned: Planned, *, routes: bool) -> Step | None:
        """Take a step; None: no rank that shares experts had anything to read.

        Collective over those ranks.
        """
        size, is_mixed = len(planned), any(number > 1 for _, number in planned)
        if self.experts is not None:
            size, is_mixed = self.experts.agree(size, is_mixed, self.device)
        if size == 0:
            return None
        if is_mixed:
            return self._read_chunks(planned, routes)
        if not self.has_graphs or size > _SIZES[-1]:
            return self._decode(self._fill(planned, len(planned)).to(self.device), routes)
        size = _SIZES[bisect_left(_SIZES, size)]
        if self.experts is not None and not self.experts.can_fix_sizes:
            return _of(self._decode(self._fill(planned, size).to(self.device), routes), planned)
        graph = self._graphs.get(size) or self._capture(size)
        graph.lanes_LC.copy_(self._fill(planned, size))  # synchronous: the next step overwrites it
        graph.graph.replay()
        return _of(graph.step, planned)

    # ---- steps of any shape --------------------------------------------------------------------

    def _read_chunks(self, planned: Planned, routes: bool) -> Step:
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[np.ndarray] = []
        ends, size = [0], self.pages.page_size
        for sequence, number in planned:
            read = range(sequence.num_read, sequence.num_read + number)
            tokens += sequence.tokens[read.start : read.stop]
            positions += read
            at = np.arange(read.start, read.stop, dtype=np.int32)
            slots.append(sequence.table[at // size] * size + at % size)
            ends.append(ends[-1] + number)
        integers = [
            np.array(tokens, np.int64),
            np.array(positions, np.int64),
            np.concatenate([np.zeros(0, np.int32), *slots]),
            np.array(ends, np.int32),
            np.array([sequence.num_read for sequence, _ in planned], np.int32),
            np.array([sequence.stream for sequence, _ in planned], np.int32),
            np.array([[s.inverse for s, _ in planned], [s.scale for s, _ in planned]], np.float32),
            np.stack([self._no_pages, *(sequence.table for sequence, _ in planned)])[1:],
        ]
        tokens_T, positions_T, slots_T, ends_N, seen_N, streams_N, how_2N, pages_NM = (
            torch.from_numpy(x).to(self.device) for x in integers
        )
        rows = PagedRows(
            slots_T,
            ends_N,
            seen_N,
            pages_NM,
            num_single=sum(number == 1 for _, number in planned),
        )
        with self._noted(routes) as chosen:
            hidden_TD = self._read(tokens_T, positions_T, rows, None)
        last_N = ends_N[1:].long() - 1
        return self._choose(hidden_TD[last_N], streams_N, positions_T[last_N], how_2N, chosen)

    def _read(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        rows: PagedRows,
        is_pad_T: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return hidden states [T, D]; stores keys and values of the tokens."""
        model, rotation = self.model, self.model.rope(positions_T[None])
        is_pad_BS = None if is_pad_T is None else is_pad_T[None]
        context = Context(rotation, rows, is_pad_BS=is_pad_BS)  # pyright: ignore[reportArgumentType]
        contexts = Rows(1, tokens_T.shape[0], dict.fromkeys(model.windows, context))
        x_BSD, _ = model.run(model.embed_tokens(tokens_T[None]), contexts)
        return model.head(x_BSD, contexts)[0]

    def _choose(
        self,
        hidden_ND: torch.Tensor,
        streams_N: torch.Tensor,
        positions_N: torch.Tensor,
        how_2N: torch.Tensor,
        routes: list[torch.Tensor],
    ) -> Step:
        keys_N, model = keys_of(streams_N, positions_N + 1), self.model
        backend, head_VD = model.kernels.backend, model.head_weight
        inverse_N, scales_N = how_2N
        chosen = sample_tokens(hidden_ND, head_VD, keys_N, inverse_N, scales_N, self.known, backend)
        return Step(hidden_ND, torch.stack([x.double() for x in chosen]), routes)

    @contextmanager
    def _noted(self, wanted: bool) -> Iterator[list[torch.Tensor]]:
        """Collect the routers' choices inside, if ``wanted``."""
        chosen: list[torch.Tensor] = []
        hooks = [
            router.register_forward_hook(lambda module, args, routed: chosen.append(routed.ids_TK))
            for router in (self._routers if wanted else ())
        ]
        try:
            yield chosen
        finally:
            for hook in hooks:
                hook.remove()

    # ---- one token of each sequence ------------------------------------------------------------

    def _fill(self, planned: Planned, size: int) -> torch.Tensor:
        """Write ``planned`` to lanes [size, C] in host memory; lanes behind it are empty."""
        if self._lanes_LC.shape[0] < size:
            shape = (size, self._lanes_LC.shape[1])
            pinned = self.device.type == "cuda"
            self._lanes_LC = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)
        rows, used = self._lanes_LC.numpy(), len(planned)
        sequences = [sequence for sequence, _ in planned]
        rows[:used, _TOKEN] = [sequence.tokens[sequence.num_read] for sequence in sequences]
        rows[:used, _POSITION] = [sequence.num_read for sequence in sequences]
        rows[:used, _STREAM] = [sequence.stream for sequence in sequences]
        how = np.array([[s.inverse for s in sequences], [s.scale for s in sequences]], np.float32)
        rows[:used, _INVERSE:_PAGES] = how.view(np.int32).T
        for row, sequence in zip(rows, sequences, strict=False):
            row[_PAGES:] = sequence.table
        rows[used:size] = 0
        rows[used:size, _POSITION] = -1
        return self._lanes_LC[:size]

    def _decode(self, lanes_LC: torch.Tensor, routes: bool) -> Step:
        """Read one token a lane. Shapes do not depend on the content of ``lanes_LC``."""
        tokens_L, positions_L, streams_L = lanes_LC[:, :_INVERSE].unbind(1)
        how_2L = lanes_LC[:, _INVERSE:_PAGES].T.contiguous().view(torch.float32)
        is_empty_L, size = positions_L < 0, self.pages.page_size
        positions_L = positions_L.clamp(min=0)
        pages_LM = lanes_LC[:, _PAGES:]
        page_L = pages_LM.gather(1, (positions_L // size).long()[:, None])[:, 0]
        slots_L = torch.where(is_empty_L, -1, page_L * size + positions_L % size)
        lanes = lanes_LC.shape[0]
        ends = torch.arange(lanes + 1, dtype=torch.int32, device=lanes_LC.device)
        rows = PagedRows(slots_L, ends, positions_L.contiguous(), pages_LM, num_single=lanes)
        with self._noted(routes) as chosen:
            hidden_LD = self._read(tokens_L.long(), positions_L.long(), rows, is_empty_L)
        return self._choose(hidden_LD, streams_L, positions_L, how_2L, chosen)

    def _capture(self, size: int) -> _CapturedStep:
        """Capture the graph of ``size`` lanes. Collective: the warm-up sends tokens as steps do."""
        shape = (size, _PAGES + self.pages_per_sequence)
        lanes_LC = torch.zeros(shape, dtype=torch.int32, device=self.device)
        lanes_LC[:, _POSITION] = -1
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        fixed = nullcontext if self.experts is None else partial(self.experts.fixed_sizes, size)
        with torch.cuda.stream(stream), fixed():
            self._decode(lanes_LC, True)  # compiles kernels, makes the cache
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).graph.pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool), fixed():
            step = self._decode(lanes_LC, True)
        self._graphs[size] = _CapturedStep(graph, lanes_LC, step)
        return self._graphs[size]


def _of(step: Step, planned: Planned) -> Step:
    """Return ``step`` without its empty lanes."""
    used = len(planned)
    return Step(
        step.hidden_ND[:used], step.chosen_2N[:, :used], [ids[:used] for ids in step.routes]
    )
