"""Runs the model's steps over a paged cache: a step reads tokens and chooses the next ones.

A step reads chunks of tokens. A chunk is a part of a prompt, the last token of a sequence that is
being continued, or one draft token after it (:mod:`moetrain.generate.drafting`). The step chooses a
token after each chunk. If every chunk has one token, as in most steps once prompts are read, shapes
are fixed. On CUDA such a step is then a CUDA graph. The graph of a size is captured when the size
is first used, and some of its slots may be empty (:mod:`moetrain.generate.slots`). Other steps run
eagerly.

The noise of a choice is a hash of seed, completion, position and token id, and of nothing else. So
neither the batch, nor preemption, nor earlier requests change a request's tokens. If several ranks
generate together (:mod:`moetrain.generate.ranks`), all ranks take steps of the same size, and of
the same kind: fixed or any shape.

Legend: T tokens of a step, N chunks, B slots, C columns of a slot, M pages of a sequence at most, D
model width, K experts of a token, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from moetrain.generate.drafting import Chunks, draft_tokens
from moetrain.generate.paged_attention import PagedAttention, PagedTokens
from moetrain.generate.pages import Pages
from moetrain.generate.ranks import ExpertParallel, HeadParallel, SplitAttention
from moetrain.generate.request import Request
from moetrain.generate.sampling import sample_filtered
from moetrain.generate.scheduler import Chunk, Running, TokenScore
from moetrain.generate.slots import Choice, HostSlots, Slots, empty_slots, pack_choices
from moetrain.kernels.attention.paged import PagedRows
from moetrain.kernels.linear_attention.reads import Reads
from moetrain.kernels.vocabulary.chunk import sample_tokens
from moetrain.kernels.vocabulary.gumbel import noise_keys, stream_of
from moetrain.models.generation import Caches
from moetrain.models.layers import Context
from moetrain.models.moe import Router
from moetrain.models.transformer import Rows, Transformer

# Numbers of slots for which a step is captured.
_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1025, 32))
_SCORED = 128
"""Number of prompt tokens whose logits exist at once."""


class Step(NamedTuple):
    """The result of one step. It is on the device, and valid until the next step."""

    read_TD: torch.Tensor
    """Hidden states of every token that was read, after the final norm."""
    hidden_ND: torch.Tensor
    """The row of ``read_TD`` of each chunk's last token."""
    choices_RN: torch.Tensor
    """The choice after each chunk, without filters
    (:func:`~moetrain.generate.slots.unpack_choices`). With the MTP block, rows of drafts
    follow. Only the draft after a sequence's last right chunk
    (:meth:`~moetrain.generate.drafting.Chunks.last_right`) is meant to be used."""
    routes: list[torch.Tensor]
    """The experts of every token [T, K], one tensor a MoE layer; empty if not asked for."""

    def first(self, number: int) -> Step:
        """Return the results of the first ``number`` slots. The others are empty."""
        hidden_ND = self.hidden_ND[:number]
        return Step(
            read_TD=hidden_ND,
            hidden_ND=hidden_ND,
            choices_RN=self.choices_RN[:, :number],
            routes=[ids_TK[:number] for ids_TK in self.routes],
        )


class _CapturedStep(NamedTuple):
    graph: torch.cuda.CUDAGraph
    slots_BC: torch.Tensor
    """The graph's fixed input."""
    step: Step


class _MixedStep(NamedTuple):
    """A step of any shape, in host memory."""

    tokens_T: np.ndarray
    positions_T: np.ndarray
    cache_slots_T: np.ndarray
    """The slot of each token's key and value, counted over all pages."""
    ends_N: np.ndarray
    """The chunks' ends among the T tokens, from 0."""
    starts_N: np.ndarray
    """Position of each chunk's first token."""
    slots_NC: np.ndarray
    num_single: int
    """Number of chunks with one token, which come first."""
    longest: int
    """Position after the last token of any chunk."""
    read: list[tuple[int, int, int]]
    """For each sequence: its state slot, and the numbers of tokens read before and read now."""


@dataclass(eq=False)
class Steps:
    """Runs the steps of ``model``, whose attention reads and writes ``pages``."""

    model: Transformer
    pages: Pages
    known: int
    """Number of known token ids. Ids from this one on are never chosen."""
    experts: ExpertParallel | None
    """The ranks that share the model's experts; None: this rank has all of them."""
    max_sequences: int
    heads: HeadParallel | None
    """The ranks that share the cache by heads; None: this rank has all heads."""
    draft: int
    """Length of a draft; 0: there are no drafts."""
    has_block: bool
    """True: the model's MTP block makes drafts. False: drafts come from the text so far."""
    keeps_latents: bool = False
    """True: layers with latent attention cache latents in place of keys and values."""

    def __post_init__(self) -> None:
        model, pages, heads = self.model, self.pages, self.heads
        self.from_leader: Callable[[Any], Any] = heads.from_leader if heads else lambda own: own
        """Returns the value of the first rank of ``heads``."""
        longest = min(model.arch.max_positions, pages.num_tokens)
        self._max_pages = -(-longest // pages.page_size)
        if self.device.type == "cuda" and model.kernels.backend == "reference":
            raise ValueError("kernels.backend 'reference' has no generation on CUDA; use auto")
        kind = PagedAttention if heads is None else partial(SplitAttention, heads.group)
        caches = Caches(
            make_attention=partial(kind, pages.num_pages, pages.page_size),
            make_tokens=partial(PagedTokens, pages.num_pages, pages.page_size),
            slots=self.max_sequences + 1,
            drafts=self.draft,
            keeps_latents=self.keeps_latents,
        )
        with_mtp = self.draft > 0 and self.has_block
        self.caches = model.for_generation(caches, with_mtp=with_mtp)
        """The keys, values and states that each layer keeps of the sequences."""
        self._routers = [m for m in model.modules() if isinstance(m, Router)]
        self._graphs: dict[int, _CapturedStep] = {}
        self._host_slots = HostSlots(
            pages.page_size, self._max_pages, pinned=self.device.type == "cuda"
        )

    def begin(self, request: Request, index: int) -> Running:
        """Return a new sequence for completion ``index`` of ``request``."""
        stream = stream_of(request.params.seed, index)
        return Running(request, index, self._max_pages, stream)

    @property
    def device(self) -> torch.device:
        """The device of the model and the cache."""
        return self.model.embed.weight.device

    @property
    def has_graphs(self) -> bool:
        """True if steps can be captured: on CUDA, in bf16, and with all heads on this rank.

        In fp32 the experts' product waits for the device, which a graph cannot contain.
        """
        weight = self.model.embed.weight
        return self.heads is None and weight.is_cuda and weight.dtype == torch.bfloat16

    def free(self) -> None:
        """Free the memory of the cache, and the graphs, which hold its addresses."""
        self._graphs.clear()
        for cache in self.caches:
            cache.free()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    @torch.no_grad()
    def warm_up(self, most: int) -> None:
        """Capture the graphs for up to ``most`` slots. Collective over ranks of experts."""
        if self.has_graphs and (self.experts is None or self.experts.can_fix_sizes):
            # The largest size first: the others can then reuse its memory.
            for size in reversed(_SIZES[: bisect_left(_SIZES, most) + 1]):
                if size not in self._graphs:
                    self._capture(size)

    @torch.no_grad()
    def run(self, chunks: Sequence[Chunk], *, routes: bool) -> Step | None:
        """Take a step; return None if no rank that shares experts has anything to read.

        Collective over the ranks that share experts or heads.
        """
        is_mixed = any(chunk.num_tokens > 1 for chunk in chunks)
        size, is_mixed = self.from_leader((len(chunks), is_mixed))
        if self.experts is not None:
            size, is_mixed = self.experts.agree(size, is_mixed, self.device)
        if size == 0:
            return None
        if is_mixed:
            return self._read_chunks(chunks, routes)
        if not self.has_graphs or size > _SIZES[-1]:
            slots_BC = self.from_leader(self._host_slots.fill(chunks, len(chunks)))
            return self._decode(slots_BC.to(self.device), routes)
        size = _SIZES[bisect_left(_SIZES, size)]
        if self.experts is not None and not self.experts.can_fix_sizes:
            step = self._decode(self._host_slots.fill(chunks, size).to(self.device), routes)
            return step.first(len(chunks))
        graph = self._graphs.get(size) or self._capture(size)
        # A synchronous copy, because the next step overwrites the slots in host memory.
        graph.slots_BC.copy_(self._host_slots.fill(chunks, size))
        graph.graph.replay()
        return graph.step.first(len(chunks))

    # ---- steps of any shape --------------------------------------------------------------------

    def _read_chunks(self, chunks: Sequence[Chunk], routes: bool) -> Step:
        """Take a step over ``chunks`` of any lengths."""
        step: _MixedStep = self.from_leader(self._mixed_step(chunks))
        tokens_T, positions_T, cache_slots_T, ends_N, starts_N, slots_NC = (
            torch.from_numpy(x).to(self.device)
            for x in (
                step.tokens_T,
                step.positions_T,
                step.cache_slots_T,
                step.ends_N,
                step.starts_N,
                step.slots_NC,
            )
        )
        slots = Slots(slots_NC)
        rows = PagedRows(
            cache_slots_T,
            ends_N,
            starts_N,
            slots.pages_BM,
            step.num_single,
            longest=step.longest,
        )
        reads = Reads.of(step.read, self.device) if self.model.carries_state else None
        read = self._lay_out(positions_T, rows, None, reads)
        return self._read(tokens_T, read, ends_N[1:].long() - 1, slots, routes)

    def _mixed_step(self, chunks: Sequence[Chunk]) -> _MixedStep:
        """Lay out the tokens of ``chunks`` one after another, in arrays of the host."""
        tokens: list[int] = []
        positions, cache_slots = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
        read: dict[int, tuple[int, int, int]] = {}
        ends, size = [0], self.pages.page_size
        for chunk in chunks:
            own, table = np.arange(chunk.start, chunk.end), chunk.sequence.page_table
            tokens += chunk.tokens
            positions.append(own)
            cache_slots.append(table[own // size] * size + own % size)
            ends.append(ends[-1] + chunk.num_tokens)
            # A sequence's chunks follow each other, so together they are one range of positions.
            slot = chunk.sequence.state_slot
            first = read.get(slot, (slot, chunk.start))[1]
            read[slot] = (slot, first, chunk.end - first)
        return _MixedStep(
            tokens_T=np.array(tokens, np.int64),
            positions_T=np.concatenate(positions),
            cache_slots_T=np.concatenate(cache_slots).astype(np.int32),
            ends_N=np.array(ends, np.int32),
            starts_N=np.array([chunk.start for chunk in chunks], np.int32),
            slots_NC=self._host_slots.fill(chunks, len(chunks)).numpy(),
            num_single=sum(chunk.num_tokens == 1 for chunk in chunks),
            longest=max((chunk.end for chunk in chunks), default=0),
            read=[*read.values()],
        )

    def _lay_out(
        self,
        positions_T: torch.Tensor,
        rows: PagedRows,
        is_pad_T: torch.Tensor | None,
        reads: Reads | None = None,
    ) -> Rows:
        """Lay out the tokens of a step as one row; ``is_pad_T``: those of empty slots."""
        is_pad_BS = None if is_pad_T is None else is_pad_T[None]
        paged: Any = rows  # PagedAttention takes these rows in place of a mask
        angles = self.model.rotate(positions_T[None])
        query_scale = self.model.query_scale(positions_T[None])
        contexts = {
            kind: Context(
                rotation=own,
                mask=paged,
                is_pad_BS=is_pad_BS,
                documents=reads,
                query_scale=query_scale,
            )
            for kind, own in angles.items()
        }
        return Rows(1, positions_T.shape[0], contexts)

    def _lay_out_singles(
        self,
        positions_B: torch.Tensor,
        is_empty_B: torch.Tensor,
        pages_BM: torch.Tensor,
        reads: Reads | None = None,
    ) -> Rows:
        """Lay out one token for each slot. Empty slots have position 0."""
        page_B = pages_BM.gather(1, (positions_B // self.pages.page_size).long()[:, None])[:, 0]
        cache_slots_B = page_B * self.pages.page_size + positions_B % self.pages.page_size
        cache_slots_B = torch.where(is_empty_B, -1, cache_slots_B)
        number = positions_B.shape[0]
        ends = torch.arange(number + 1, dtype=torch.int32, device=positions_B.device)
        rows = PagedRows(cache_slots_B, ends, positions_B.contiguous(), pages_BM, number)
        return self._lay_out(positions_B.long(), rows, is_empty_B, reads)

    def _read(
        self,
        tokens_T: torch.Tensor,
        read: Rows,
        last_N: torch.Tensor | slice,
        slots: Slots,
        routes: bool,
    ) -> Step:
        """Read tokens, and choose the next token after each chunk.

        ``last_N``: the indices of the chunks' last tokens among ``tokens_T``.
        """
        model, softcap = self.model, self.model.arch.logit_softcap
        # 1. Read the tokens.
        with self._record_routes(routes) as experts:
            x_BSD, _ = model.run(model.embed_tokens(tokens_T[None]), read)
            read_TD = model.head(x_BSD, read)[0]
        # 2. Choose a token after each chunk, with the noise of its position.
        inverse_N, scales_N = slots.floats()
        keys_N, hidden_ND = noise_keys(slots["stream"], slots["position"] + 1), read_TD[last_N]
        chosen_N, logprobs_N = sample_tokens(
            hidden_ND,
            model.head_weight,
            keys_N,
            inverse_N,
            scales_N,
            self.known,
            model.kernels.backend,
            softcap,
        )
        choices_RN = pack_choices(chosen_N, logprobs_N)
        # 3. Draft the tokens after the choices.
        if self.draft and self.has_block:
            chunks = Chunks(
                last_N=last_N,
                end_token_N=slots["token"],
                positions_N=slots["position"],
                num_drafts_N=slots["num_drafts"],
                next_N=slots["next_token"],
                limits_N=slots["limit"],
                chosen_N=chosen_N,
            )
            drafts_KN = draft_tokens(
                model,
                read_TD,
                tokens_T,
                chunks,
                number=self.draft,
                known=self.known,
                rows=read,
                lay_out=partial(self._lay_out_singles, pages_BM=slots.pages_BM),
            )
            choices_RN = torch.cat((choices_RN, drafts_KN.double()))
        return Step(read_TD, hidden_ND, choices_RN, experts)

    @contextmanager
    def _record_routes(self, wanted: bool) -> Iterator[list[torch.Tensor]]:
        """Record the experts that routers choose inside, layer by layer, if ``wanted``."""
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

    def _decode(self, slots_BC: torch.Tensor, routes: bool) -> Step:
        """Read one token a slot. Shapes do not depend on the content of ``slots_BC``."""
        slots = Slots(slots_BC)
        tokens_B, positions_B = slots["token"], slots["position"]
        is_empty_B, positions_B = positions_B < 0, positions_B.clamp(min=0)
        reads = None
        if self.model.carries_state:  # empty slots write their states to state slot 0
            reads = Reads.of_singles(slots["state_slot"], positions_B, slots["num_drafts"])
        read = self._lay_out_singles(positions_B, is_empty_B, slots.pages_BM, reads)
        return self._read(tokens_B.long(), read, slice(None), slots, routes)

    def _capture(self, size: int) -> _CapturedStep:
        """Capture the graph of ``size`` slots.

        Collective over ranks of experts: the warm-up dispatches tokens as every step does.
        """
        slots_BC = empty_slots(size, self._max_pages).to(self.device)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        fixed = nullcontext if self.experts is None else partial(self.experts.fixed_sizes, size)
        # The first run compiles kernels and allocates the cache.
        with torch.cuda.stream(stream), fixed():
            self._decode(slots_BC, True)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).graph.pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool), fixed():
            step = self._decode(slots_BC, True)
        self._graphs[size] = _CapturedStep(graph, slots_BC, step)
        return self._graphs[size]

    # ---- scores of prompts, and tokens that are chosen from all logits -------------------------

    def score(
        self, hidden_ND: torch.Tensor, tokens: Sequence[int], num_likeliest: int
    ) -> list[TokenScore]:
        """Return the scores of ``tokens``, each predicted by one row of ``hidden_ND``."""
        model, tokens_N = self.model, torch.tensor(tokens, device=self.device)
        losses = model.vocabulary.token_losses(hidden_ND, model.head_weight, tokens_N)
        likeliest: list[dict[int, float]] = [] if num_likeliest else [{}] * len(tokens)
        parts = hidden_ND.split(_SCORED), losses.lse_T.split(_SCORED)
        for part_ND, lse_N in zip(*parts, strict=True) if num_likeliest else ():
            logits_NV = model.vocabulary.logits(part_ND[None], model.head_weight)[0]
            top = logits_NV[:, : self.known].float().topk(min(num_likeliest, self.known))
            values = (top.values - lse_N[:, None]).tolist()
            likeliest += map(dict, map(zip, top.indices.tolist(), values))
        return list(map(TokenScore, (-losses.loss_T).tolist(), likeliest))

    def choose_from_logits(
        self, chunks: Sequence[Chunk], hidden_ND: torch.Tensor, allowed_NV: np.ndarray | None
    ) -> list[Choice]:
        """Choose the token after each chunk with its request's filters, and list the likeliest.

        Args:
            hidden_ND: the hidden state of each chunk's last token.
            allowed_NV: the tokens that grammars allow, bool; None: there are no grammars.
        """
        sequences, model = [chunk.sequence for chunk in chunks], self.model
        params = [sequence.params for sequence in sequences]
        logits_NV = model.vocabulary.logits(hidden_ND[None], model.head_weight)[0].float()
        device, known = logits_NV.device, self.known
        # 1. Choose, with the noise that the step itself would use.
        keys_N = noise_keys(
            torch.tensor([sequence.stream for sequence in sequences], device=device),
            torch.tensor([chunk.end for chunk in chunks], device=device),
        )
        own_NV = logits_NV[:, :known]
        if allowed_NV is not None:
            own_NV = own_NV.masked_fill(~torch.from_numpy(allowed_NV).to(device), -torch.inf)
        inverses = [sequence.inverse_temperature for sequence in sequences]
        chosen_N = sample_filtered(own_NV, keys_N, inverses, params)
        losses = model.vocabulary.token_losses(hidden_ND, model.head_weight, chosen_N)
        # 2. Rank all tokens. The sort is stable, unlike topk: its choice among equal values depends
        #    on k, and k depends on the batch, so other requests would change the result.
        most = min(max(p.logprobs for p in params), known)
        scales_N = torch.tensor([sequence.logprob_scale for sequence in sequences], device=device)
        scaled_NV = logits_NV * scales_N[:, None]
        logprobs_NV = scaled_NV.log_softmax(-1)[:, :known]
        top = logprobs_NV.sort(dim=-1, descending=True, stable=True)
        ids, values = top.indices[:, :most].tolist(), top.values[:, :most].tolist()
        likeliest = [
            dict(list(zip(*pair, strict=True))[: p.logprobs])
            for p, *pair in zip(params, ids, values, strict=True)
        ]
        tokens, logprobs = chosen_N.tolist(), (-losses.loss_T).tolist()
        return [
            Choice(token=token, logprob=logprob, drafts=[], likeliest=own)
            for token, logprob, own in zip(tokens, logprobs, likeliest, strict=True)
        ]
