"""Runs the model over pages: a step reads tokens of some sequences and samples each one's next.

A step reads chunks of prompts, one token of each sequence that is continued, and drafts behind it
(:mod:`moetrain.generate.drafting`), each as a chunk of one token. When all chunks have one
token (most steps, once prompts are read), shapes are fixed: on CUDA such a step is a graph,
captured at the first use of its size, with the tokens in lanes, some of which may be empty. One row
of numbers describes a chunk or a lane. Other steps run eagerly.

The noise is a hash of seed, completion, position and token id, and of nothing else, so that neither
the batch, nor preemption, nor earlier requests change a request's tokens. With several ranks
(:mod:`moetrain.generate.ranks`) all take a step of the same form.

Legend: T tokens of a step, N chunks, L lanes, M pages of a sequence at most, C = 9 + M numbers of a
lane, D model width, K experts a token, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from moetrain.config import ConfigError
from moetrain.generate.drafting import Chunks, draft_tokens
from moetrain.generate.pages import PagedAttention, Pages
from moetrain.generate.ranks import ExpertParallel, HeadParallel, SplitAttention
from moetrain.generate.request import Request
from moetrain.generate.sampling import sample_filtered
from moetrain.generate.scheduler import Chunk, Running
from moetrain.kernels.attention.paged import PagedRows
from moetrain.kernels.linear_attention.reads import Reads
from moetrain.kernels.vocabulary.chunk import sample_tokens
from moetrain.kernels.vocabulary.gumbel import noise_keys, stream_of
from moetrain.models.architecture import AttentionPart
from moetrain.models.attention import masked_attention
from moetrain.models.layers import Context
from moetrain.models.moe import Router
from moetrain.models.transformer import Rows, Transformer

_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1025, 32))
_TOKEN, _POSITION, _STREAM, _INVERSE, _SCALE, _SLOT, _DEPTH, _NEXT, _LIMIT, _PAGES = range(10)
"""Columns of a lane, or of a chunk's last token: how many drafts there are up to it, the token
behind it or -1, and how many tokens its sequence has pages for."""

_ROWS = 128


class Step(NamedTuple):
    """The result of one step; on the device, and valid until the next."""

    read_TD: torch.Tensor
    """Hidden states of every token that was read, after the final norm."""
    hidden_ND: torch.Tensor
    """Those of each chunk's last token."""
    chosen_RN: torch.Tensor
    """fp64: the next token of each, its log-probability, and drafts of the tokens behind that if
    the chunk is the last right one of its sequence. Filters have not been applied."""
    routes: list[torch.Tensor]
    """The experts of every token [T, K], one tensor a MoE layer; empty if not asked for."""

    def first(self, number: int) -> Step:
        """Return what concerns the first ``number`` lanes; the others are empty."""
        routes = [ids_TK[:number] for ids_TK in self.routes]
        hidden_ND = self.hidden_ND[:number]
        return Step(hidden_ND, hidden_ND, self.chosen_RN[:, :number], routes)


class _CapturedStep(NamedTuple):
    graph: torch.cuda.CUDAGraph
    lanes_LC: torch.Tensor
    step: Step


@dataclass(eq=False)
class Steps:
    """Runs ``model`` with paged attention in place of its own."""

    model: Transformer
    pages: Pages
    known: int
    experts: ExpertParallel | None
    max_sequences: int
    heads: HeadParallel | None
    draft: int
    has_block: bool
    """Whether the model's MTP block drafts."""

    def __post_init__(self) -> None:
        model, pages, heads = self.model, self.pages, self.heads
        self.told: Any = heads.told if heads else lambda given: given
        most = min(model.arch.max_positions, pages.num_tokens)
        self._pages_per_sequence = -(-most // pages.page_size)
        if self.device.type == "cuda" and model.kernels.backend == "reference":
            raise ValueError("kernels.backend 'reference' has no generation on CUDA; use auto")
        self.caches: list[Any] = []
        """What each layer keeps of the sequences; ``free`` frees its memory, ``wipe`` zeroes it."""
        layers = model.arch.layers()[: model.arch.num_layers + (self.draft > 0 and self.has_block)]
        parts = ((i, part) for i, parts in enumerate(layers) for part in parts)
        for i, part in parts:
            if not isinstance(part, AttentionPart):
                continue
            mixer: Any = model.get_submodule(f"layers.{i}.{part.name}")
            core = getattr(mixer, "core", None)
            if core is masked_attention or isinstance(core, PagedAttention):
                kind = PagedAttention if heads is None else partial(SplitAttention, heads.group)
                mixer.core = kind(pages.num_pages, pages.page_size, part.window)
                mixer.rotate = mixer.core.rotate
                self.caches.append(mixer.core)
            elif hasattr(mixer, "keep_states"):
                self.caches.append(mixer.keep_states(self.max_sequences + 1, self.draft))
            else:
                problem = "has layers that have no cache here, so it cannot generate"
                problem = f"{model.arch.family} {problem}; other programs can serve its export"
                raise ConfigError("model", problem)
        for module in model.modules():
            if hasattr(module, "precision"):  # with few rows, reading weights takes the time
                setattr(module, "precision", "bf16")  # noqa: B010
            if hasattr(module, "batch_invariant") and self.device.type == "cuda":
                setattr(module, "batch_invariant", True)  # noqa: B010
        for block in model.layers[: model.arch.num_layers]:
            setattr(block, "defers", True)  # noqa: B010
        self._routers = [m for m in model.modules() if isinstance(m, Router)]
        self._graphs: dict[int, _CapturedStep] = {}
        self._lanes_LC = torch.zeros(0, _PAGES + self._pages_per_sequence, dtype=torch.int32)

    def begin(self, request: Request, index: int) -> Running:
        stream = stream_of(request.params.seed, index)
        return Running(request, index, self._pages_per_sequence, stream)

    @property
    def device(self) -> torch.device:
        return self.model.embed.weight.device

    @property
    def has_graphs(self) -> bool:
        """Whether steps can be captured: the experts' product of fp32 asks the device for sizes."""
        weight = self.model.embed.weight
        return self.heads is None and weight.is_cuda and weight.dtype == torch.bfloat16

    def free(self) -> None:
        self._graphs.clear()
        for cache in self.caches:
            cache.free()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    @torch.no_grad()
    def warm_up(self, most: int) -> None:
        """Capture the graphs for up to ``most`` lanes. Collective over ranks of experts."""
        if self.has_graphs and (self.experts is None or self.experts.can_fix_sizes):
            for size in reversed(_SIZES[: bisect_left(_SIZES, most) + 1]):  # later ones fit into it
                if size not in self._graphs:
                    self._capture(size)

    @torch.no_grad()
    def run(self, planned: Sequence[Chunk], *, routes: bool) -> Step | None:
        """Take a step, collectively; None: no rank that shares experts had anything to read."""
        size, is_mixed = self.told((len(planned), any(number > 1 for *_, number in planned)))
        if self.experts is not None:
            size, is_mixed = self.experts.agree(size, is_mixed, self.device)
        if size == 0:
            return None
        if is_mixed:
            return self._read_chunks(planned, routes)
        if not self.has_graphs or size > _SIZES[-1]:
            lanes_LC = self.told(self._fill(planned, len(planned)))
            return self._decode(lanes_LC.to(self.device), routes)
        size = _SIZES[bisect_left(_SIZES, size)]
        if self.experts is not None and not self.experts.can_fix_sizes:
            step = self._decode(self._fill(planned, size).to(self.device), routes)
            return step.first(len(planned))
        graph = self._graphs.get(size) or self._capture(size)
        graph.lanes_LC.copy_(self._fill(planned, size))  # synchronous: the next step overwrites it
        graph.graph.replay()
        return graph.step.first(len(planned))

    # ---- steps of any shape --------------------------------------------------------------------

    def _read_chunks(self, planned: Sequence[Chunk], routes: bool) -> Step:
        tokens: list[int] = []
        positions, slots = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
        seen: dict[int, tuple[int, int, int]] = {}
        ends, size = [0], self.pages.page_size
        for chunk in planned:
            sequence, start, number = chunk
            tokens += chunk.tokens
            positions.append(np.arange(start, start + number))
            slots.append(sequence.page_table[positions[-1] // size] * size + positions[-1] % size)
            ends.append(ends[-1] + number)
            first = seen.get(sequence.state_slot, (sequence.state_slot, start))[1]
            seen[sequence.state_slot] = (sequence.state_slot, first, start + number - first)
        integers = [
            np.array(tokens, np.int64),
            np.concatenate(positions),
            np.concatenate(slots).astype(np.int32),
            np.array(ends, np.int32),
            np.array([start for _, start, _ in planned], np.int32),
            self._fill(planned, len(planned)).numpy(),
        ]
        num_single = sum(number == 1 for *_, number in planned)
        integers, num_single, read_now = self.told((integers, num_single, [*seen.values()]))
        tokens_T, positions_T, slots_T, ends_N, seen_N, chunks_NC = (
            torch.from_numpy(x).to(self.device) for x in integers
        )
        rows = PagedRows(slots_T, ends_N, seen_N, chunks_NC[:, _PAGES:], num_single)
        reads = Reads.of(read_now, self.device) if self.model.carries_state else None
        read = self._lay_out(positions_T, rows, None, reads)
        last_N = ends_N[1:].long() - 1
        return self._read(tokens_T, read, last_N, chunks_NC, routes)

    def _lay_out(
        self,
        positions_T: torch.Tensor,
        rows: PagedRows,
        is_pad_T: torch.Tensor | None,
        reads: Reads | None = None,
    ) -> Rows:
        is_pad_BS = None if is_pad_T is None else is_pad_T[None]
        how: Any = {"mask": rows, "is_pad_BS": is_pad_BS, "documents": reads}
        angles = self.model.rotate(positions_T[None])
        contexts = {kind: Context(own, **how) for kind, own in angles.items()}
        return Rows(1, positions_T.shape[0], contexts)

    def _lay_out_singles(
        self,
        positions_L: torch.Tensor,
        is_empty_L: torch.Tensor,
        pages_LM: torch.Tensor,
        reads: Reads | None = None,
    ) -> Rows:
        """Lay out one token a lane; empty ones are at position 0."""
        page_L = pages_LM.gather(1, (positions_L // self.pages.page_size).long()[:, None])[:, 0]
        slots_L = page_L * self.pages.page_size + positions_L % self.pages.page_size
        slots_L = torch.where(is_empty_L, -1, slots_L)
        lanes = positions_L.shape[0]
        ends = torch.arange(lanes + 1, dtype=torch.int32, device=positions_L.device)
        rows = PagedRows(slots_L, ends, positions_L.contiguous(), pages_LM, lanes)
        return self._lay_out(positions_L.long(), rows, is_empty_L, reads)

    def _read(
        self,
        tokens_T: torch.Tensor,
        read: Rows,
        last_N: torch.Tensor | slice,
        chunks_NC: torch.Tensor,
        routes: bool,
    ) -> Step:
        """Read tokens, of which ``last_N`` end chunks, and choose the next token of each chunk."""
        model, softcap = self.model, self.model.arch.logit_softcap
        with self._noted(routes) as experts:
            x_BSD, _ = model.run(model.embed_tokens(tokens_T[None]), read)
            read_TD = model.head(x_BSD, read)[0]
        last_tokens_N, positions_N, streams_N = chunks_NC[:, :_INVERSE].unbind(1)
        inverse_N, scales_N = chunks_NC[:, _INVERSE:_SLOT].T.contiguous().view(torch.float32)
        keys_N, hidden_ND = noise_keys(streams_N, positions_N + 1), read_TD[last_N]
        words = keys_N, inverse_N, scales_N, self.known, model.kernels.backend, softcap
        tokens_N, logprobs_N = sample_tokens(hidden_ND, model.head_weight, *words)
        chosen_RN = torch.stack((tokens_N.double(), logprobs_N.double()))
        if self.draft and self.has_block:
            depths_N, next_N, limits_N = chunks_NC[:, _DEPTH:_PAGES].unbind(1)
            places = last_tokens_N, positions_N, depths_N, next_N, limits_N
            chunks = Chunks(last_N, *places, tokens_N)
            lay_out = partial(self._lay_out_singles, pages_LM=chunks_NC[:, _PAGES:])
            how = self.draft, self.known, read, lay_out
            drafts_KN = draft_tokens(model, read_TD, tokens_T, chunks, *how)
            chosen_RN = torch.cat((chosen_RN, drafts_KN.double()))
        return Step(read_TD, hidden_ND, chosen_RN, experts)

    @contextmanager
    def _noted(self, wanted: bool) -> Iterator[list[torch.Tensor]]:
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

    # ---- one token of each chunk ---------------------------------------------------------------

    def _fill(self, planned: Sequence[Chunk], size: int) -> torch.Tensor:
        """Write the ends of ``planned`` to [size, C] in host memory; lanes behind are empty."""
        if self._lanes_LC.shape[0] < size:
            shape = (size, self._lanes_LC.shape[1])
            pinned = self.device.type == "cuda"
            self._lanes_LC = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)
        rows, used = self._lanes_LC.numpy(), len(planned)
        numbers, how = [], []
        for row, (sequence, start, number) in zip(rows, planned, strict=False):
            end, tokens = start + number, sequence.tokens
            depth, after = max(0, end - len(tokens)), tokens[end : end + 1] or (-1,)
            token = sequence.drafts[depth - 1] if depth else tokens[end - 1]
            numbers += token, end - 1, sequence.stream
            numbers += sequence.state_slot, depth, *after, len(sequence.pages)
            how += sequence.inverse_temperature, sequence.logprob_scale
            row[_PAGES:] = sequence.page_table
        numbers_U7 = np.array(numbers, np.int32).reshape(used, 7)
        rows[:used, _TOKEN:_INVERSE] = numbers_U7[:, :3]
        rows[:used, _INVERSE:_SLOT] = np.array(how, np.float32).view(np.int32).reshape(used, 2)
        rows[:used, _SLOT:_PAGES] = numbers_U7[:, 3:]
        rows[:used, _LIMIT] *= self.pages.page_size
        rows[used:size] = 0
        rows[used:size, _POSITION] = -1
        return self._lanes_LC[:size]

    def _decode(self, lanes_LC: torch.Tensor, routes: bool) -> Step:
        """Read one token a lane. Shapes do not depend on the content of ``lanes_LC``."""
        tokens_L, positions_L = lanes_LC[:, :_STREAM].unbind(1)
        is_empty_L, positions_L = positions_L < 0, positions_L.clamp(min=0)
        reads = None
        if self.model.carries_state:  # those of empty lanes go to slot 0
            reads = Reads.of_singles(lanes_LC[:, _SLOT], positions_L, lanes_LC[:, _DEPTH])
        read = self._lay_out_singles(positions_L, is_empty_L, lanes_LC[:, _PAGES:], reads)
        return self._read(tokens_L.long(), read, slice(None), lanes_LC, routes)

    def _capture(self, size: int) -> _CapturedStep:
        """Capture the graph of ``size`` lanes. Collective: the warm-up sends tokens as steps do."""
        shape = (size, _PAGES + self._pages_per_sequence)
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

    # ---- tokens of prompts, and tokens chosen from all logits ----------------------------------

    def score(
        self, hidden_ND: torch.Tensor, tokens: Sequence[int], most: int
    ) -> list[tuple[float, dict[int, float]]]:
        """Return each token's log-probability behind ``hidden_ND``, and ``most`` likeliest there.

        For these the logits of 128 rows exist at once.
        """
        model, tokens_N = self.model, torch.tensor(tokens, device=self.device)
        losses = model.vocabulary.token_losses(hidden_ND, model.head_weight, tokens_N)
        tops: list[dict[int, float]] = [] if most else [{}] * len(tokens)
        parts = hidden_ND.split(_ROWS), losses.lse_T.split(_ROWS)
        for part_ND, lse_N in zip(*parts, strict=True) if most else ():
            logits_NV = model.vocabulary.logits(part_ND[None], model.head_weight)[0]
            top = logits_NV[:, : self.known].float().topk(min(most, self.known))
            values = (top.values - lse_N[:, None]).tolist()
            tops += map(dict, map(zip, top.indices.tolist(), values))
        return list(zip((-losses.loss_T).tolist(), tops, strict=True))

    def consider(
        self, planned: Sequence[Chunk], hidden_ND: torch.Tensor, allowed_NV: np.ndarray | None
    ) -> list[tuple[int, float, dict[int, float]]]:
        """Choose from all logits: token, log-probability and likeliest tokens of each chunk.

        ``allowed_NV``: what grammars allow; None: there are none.
        """
        sequences, model = [sequence for sequence, *_ in planned], self.model
        params = [sequence.params for sequence in sequences]
        logits_NV = model.vocabulary.logits(hidden_ND[None], model.head_weight)[0].float()
        device, known = logits_NV.device, self.known
        keys_N = noise_keys(
            torch.tensor([sequence.stream for sequence in sequences], device=device),
            torch.tensor([start + number for _, start, number in planned], device=device),
        )
        own_NV = logits_NV[:, :known]
        if allowed_NV is not None:
            own_NV = own_NV.masked_fill(~torch.from_numpy(allowed_NV).to(device), -torch.inf)
        inverses = [sequence.inverse_temperature for sequence in sequences]
        chosen_N = sample_filtered(own_NV, keys_N, inverses, params)
        losses = model.vocabulary.token_losses(hidden_ND, model.head_weight, chosen_N)
        most = min(max(p.logprobs for p in params), known)
        # A stable sort: which of two equals topk takes depends on its k, which is the batch's.
        scales_N = torch.tensor([sequence.logprob_scale for sequence in sequences], device=device)
        scaled_NV = logits_NV * scales_N[:, None]
        logprobs_NV = scaled_NV.log_softmax(-1)[:, :known]
        top = logprobs_NV.sort(dim=-1, descending=True, stable=True)
        ids, values = top.indices[:, :most].tolist(), top.values[:, :most].tolist()
        tokens, logprobs = chosen_N.tolist(), (-losses.loss_T).tolist()
        likeliest = [
            dict(list(zip(*pair, strict=True))[: p.logprobs])
            for p, *pair in zip(params, ids, values, strict=True)
        ]
        return list(zip(tokens, logprobs, likeliest, strict=True))
