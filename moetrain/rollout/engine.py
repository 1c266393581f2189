"""The generator: a model that serves requests, a step at a time.

    generator = Generator(model)
    completions = generator.generate([Request("a", (1, 2, 3))])    # or, of many at once:
    generator.submit(request); generator.step(); ...

It is the trainer's own model: the same stages, with attention over a paged cache
(:mod:`moetrain.rollout.cache`) put in place of its core. The log-probability that is reported for a
token is computed by the function that the loss is made of.

Left out so far: tensor parallelism, CUDA graphs, and the equality of bits between this and training
(on one device in fp32 they agree to rounding).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from moetrain.data.tokenizer import Tokenizer
from moetrain.models import Transformer
from moetrain.models.attention import Attention, masked_attention
from moetrain.models.layers import Context
from moetrain.models.moe import Router
from moetrain.models.transformer import Rows
from moetrain.rollout.cache import PagedAttention, PagedRows, Span
from moetrain.rollout.expert_parallel import ExpertParallel
from moetrain.rollout.pages import Pages
from moetrain.rollout.request import Completion, FinishReason, Request, RequestError
from moetrain.rollout.sampling import Draw, choose
from moetrain.rollout.scheduler import Running, Scheduler

Planned = Sequence[tuple[Running, int]]
"""Sequences of one step, and how many tokens of each it reads."""


class Generator:
    """A model, its cache, and the requests that it is serving.

    Attributes:
        version: how often the weights have been updated.
        paused: while it is set, :meth:`step` does nothing; requests stay as they are.
        pages, scheduler: who has which part of the cache, and who is next.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None = None,
        *,
        num_pages: int = 256,
        page_size: int = 16,
        max_sequences: int = 64,
        max_tokens: int = 2048,
        experts: ExpertParallel | None = None,
    ) -> None:
        """Takes ``model``, on one device and with weights, for generation alone.

        Args:
            tokenizer: for stop texts; requests that have none need none. Token ids that it does
                not have are never chosen.
            num_pages, page_size: of the cache; all sequences that run share num_pages * page_size
                tokens, and a single one cannot be longer than that.
            max_sequences: that run at once; others wait.
            max_tokens: that one step reads; longer prompts are read in chunks.
            experts: which ranks share the experts of ``model``. All of them take every step, each
                with requests of its own or none; None: this rank has all experts.

        Raises:
            ValueError: an attention of another kind than that which has a cache.
        """
        self.experts = experts
        self.model, self.tokenizer = model, tokenizer
        self.pages = Pages(num_pages, page_size)
        self.scheduler = Scheduler(self.pages, max_sequences, max_tokens)
        self.version, self.paused, self.is_asleep = 0, False, False
        self._live: dict[str, list[Running]] = {}
        """Every request's completions, until all of them are finished."""
        self._caches: list[PagedAttention] = []
        for window, block in zip(model.windows, model.layers, strict=True):
            attention = getattr(block, "attn", None)
            core = getattr(attention, "core", None)
            if core is not masked_attention and not isinstance(core, PagedAttention):
                raise ValueError(f"{model.arch.family} attends in a way that has no cache here")
            assert isinstance(attention, Attention)
            attention.core = PagedAttention(num_pages, page_size, window)
            self._caches.append(attention.core)
        self._routers = [m for m in model.modules() if isinstance(m, Router)]

    # ---- requests ------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Let ``request`` be served by the next steps.

        Raises:
            RequestError: it can never be served, or one of its id is being served.
        """
        self._check(request)
        self._live[request.id] = [
            Running(request, Completion(request.id, index)) for index in range(request.params.n)
        ]
        for sequence in self._live[request.id]:
            self.scheduler.add(sequence)

    def abort(self, request_id: str) -> list[Completion]:
        """End a request now; its completions, as far as they have come (none: nobody serves it)."""
        sequences = self._live.get(request_id, [])
        for sequence in sequences:
            if sequence.completion.finish_reason is None:
                self._finish(sequence, "abort")
        return [sequence.completion for sequence in sequences]

    @property
    def is_busy(self) -> bool:
        """Whether any request is being served."""
        return bool(self._live)

    @torch.no_grad()
    def step(self) -> list[Completion]:
        """Read some tokens of every sequence that is its turn; the completions that went on.

        Such a completion has one token more. Of a finished one ``finish_reason`` says why.
        Collective over the ranks that share experts: who has nothing to read helps the others.
        """
        if self.is_asleep:
            raise RuntimeError("the generator sleeps; call wake() first")
        if self.paused:
            return []
        planned = self.scheduler.plan()
        if not planned and self.experts is None:
            return []
        hidden_TD = self._read(planned)
        ends = torch.tensor([number for _, number in planned]).cumsum(0).to(hidden_TD.device) - 1
        for sequence, number in planned:
            self.scheduler.was_read(sequence, number)
        due = [i for i, (sequence, _) in enumerate(planned) if sequence.num_unread == 0]
        if due:
            self._continue([planned[i][0] for i in due], hidden_TD[ends[due]])
        return [planned[i][0].completion for i in due]

    def stream(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Serve ``requests`` and what is being served besides; each completion as it goes on."""
        for request in requests:
            self.submit(request)
        while self.goes_on(self.is_busy and not self.paused):
            yield from self.step()

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Every request's completions, finished; others that are being served go on meanwhile.

        Raises:
            RequestError: as :meth:`submit`; then none of ``requests`` is served.
        """
        for name, times in Counter(request.id for request in requests).items():
            if times > 1:
                raise RequestError(name, f"{times} requests have this id; give each its own")
        for request in requests:
            self._check(request)
        for request in requests:
            self.submit(request)
        mine = [self._live[request.id] for request in requests]
        if self.paused:
            raise RuntimeError("the generator is paused: generate() would never end")
        served = [sequence.completion for sequences in mine for sequence in sequences]
        while self.goes_on(any(completion.finish_reason is None for completion in served)):
            self.step()
        return [[sequence.completion for sequence in sequences] for sequences in mine]

    def goes_on(self, is_busy: bool) -> bool:
        """Whether another step must be taken, for this rank or for one that shares experts."""
        if self.experts is None:
            return is_busy
        return self.experts.is_any(is_busy, self.model.embed.weight.device)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that can be served, prompt and completion."""
        room = self.pages.num_pages * self.pages.page_size
        return min(self.model.arch.max_positions, room)

    def _check(self, request: Request) -> None:
        params, arch = request.params, self.model.arch
        if request.id in self._live:
            raise RequestError(request.id, "a request of this id is being served")
        if not request.tokens:
            raise RequestError(request.id, "it has no tokens to go on from")
        vocabulary = arch.vocab_size
        if not 0 <= min(request.tokens) <= max(request.tokens) < vocabulary:
            raise RequestError(request.id, f"its tokens are not all of 0 to {vocabulary - 1}")
        length = len(request.tokens) + params.max_tokens
        room = self.pages.num_pages * self.pages.page_size
        for most, what in ((arch.max_positions, "the model's positions"), (room, "the cache")):
            if length > most:
                raise RequestError(
                    request.id,
                    f"{len(request.tokens)} tokens and max_tokens {params.max_tokens} are more "
                    f"than {what} ({most}); shorten it, or lower max_tokens",
                )
        if params.stop and self.tokenizer is None:
            raise RequestError(request.id, "stop texts need a tokenizer; use stop_ids")

    # ---- weights and memory --------------------------------------------------------------------

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take other weights, in place: every parameter whole by its name, in any dtype.

        What the cache holds is forgotten. Completions under way go on from where they are: what
        they have is read anew, and ``Completion.versions`` says which weights chose what.

        Raises:
            ValueError: a name or shape that the model does not have, or parameters left out.
        """
        parameters = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        missing = set(parameters)
        for name, weight in weights:
            if self.experts is not None:
                weight = self.experts.part(name, weight)
            if name not in parameters or parameters[name].shape != weight.shape:
                raise ValueError(f"update_weights: the model has no {name!r} {list(weight.shape)}")
            parameters[name].copy_(weight)
            missing.discard(name)
        if missing:
            raise ValueError(f"update_weights: not given: {', '.join(sorted(missing)[:3])}")
        self.weights_changed()

    def weights_changed(self) -> None:
        """What :meth:`update_weights` does beside copying; for who has copied them in place."""
        self.scheduler.preempt_all()
        self.pages.forget()
        self.version += 1

    def sleep(self) -> None:
        """Give the cache's memory back; completions under way go on after :meth:`wake`."""
        self.scheduler.preempt_all()
        self.pages.forget()
        for cache in self._caches:
            cache.free()
        self.is_asleep = True

    def wake(self) -> None:
        """Serve again; the cache has memory from the next step on."""
        self.is_asleep = False

    # ---- a step --------------------------------------------------------------------------------

    def _read(self, planned: Planned) -> torch.Tensor:
        """Hidden states [T, D] of the planned tokens, whose keys and values lie in pages then."""
        device = self.model.embed.weight.device
        size, start = self.pages.page_size, 0
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans = []
        for sequence, number in planned:
            read = range(sequence.num_read, sequence.num_read + number)
            tokens += sequence.tokens[read.start : read.stop]
            positions += read
            slots += [sequence.pages[i // size] * size + i % size for i in read]
            pages = torch.tensor(sequence.pages[: -(-read.stop // size)], device=device)
            spans.append(Span(start, start + number, read.start, pages))
            start += number
        model = self.model
        rows = PagedRows(tuple(spans), torch.tensor(slots, dtype=torch.int64, device=device))
        rotation = model.rope(torch.tensor([positions], dtype=torch.int64, device=device))
        context = Context(rotation, rows)  # pyright: ignore[reportArgumentType]
        contexts = Rows(1, start, dict.fromkeys(model.windows, context))
        tokens_BS = torch.tensor([tokens], dtype=torch.int64, device=device)
        with self._routes(planned):
            x_BSD, _ = model.run(model.embed_tokens(tokens_BS), contexts)
        return model.head(x_BSD, contexts)[0]

    @contextmanager
    def _routes(self, planned: Planned) -> Iterator[None]:
        """Meanwhile the routers' choices are noted, for sequences that ask for them."""
        if not any(sequence.request.params.routes for sequence, _ in planned):
            yield
            return
        chosen: list[torch.Tensor] = []
        hooks = [
            router.register_forward_hook(lambda module, args, routed: chosen.append(routed.ids_TK))
            for router in self._routers
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        routes_TLK = torch.stack(chosen, 1).cpu()  # waits; only where somebody asked for it
        for (sequence, _), part in zip(
            planned, routes_TLK.split([number for _, number in planned]), strict=True
        ):
            if sequence.request.params.routes:
                sequence.routes.append(part)

    def _continue(self, sequences: Sequence[Running], hidden_ND: torch.Tensor) -> None:
        """Choose the next token of each, from the hidden states of its last."""
        model = self.model
        logits_NV = model.vocabulary.logits(hidden_ND[None], model.head_weight)[0].float()
        known = model.arch.vocab_size if self.tokenizer is None else self.tokenizer.vocab_size
        allowed_NV = logits_NV[:, :known]
        draws = [Draw(s.request.params, s.completion.index, s.num_read) for s in sequences]
        chosen_N = choose(allowed_NV, draws)
        losses = model.vocabulary.token_losses(hidden_ND, model.head_weight, chosen_N)
        most = max(sequence.request.params.logprobs for sequence in sequences)
        top = logits_NV.log_softmax(-1).topk(min(most, known)) if most else None
        # The host waits here, once a step: what is read next are these tokens.
        logprobs = (-losses.loss_T).tolist()
        for i, (sequence, token) in enumerate(zip(sequences, chosen_N.tolist(), strict=True)):
            completion, number = sequence.completion, sequence.request.params.logprobs
            completion.tokens.append(token)
            completion.logprobs.append(logprobs[i])
            completion.versions.append(self.version)
            if top is not None and number:
                pairs = zip(top.indices[i].tolist(), top.values[i].tolist(), strict=True)
                completion.top_logprobs.append(dict(list(pairs)[:number]))
            if (reason := self._reason(sequence)) is not None:
                self._finish(sequence, reason)

    def _reason(self, sequence: Running) -> FinishReason | None:
        params, tokens = sequence.request.params, sequence.completion.tokens
        if tokens[-1] in params.stop_ids:
            return "stop"
        if params.stop:
            assert self.tokenizer is not None  # _check has seen to it
            text = self.tokenizer.decode(tokens)
            if any(stop in text for stop in params.stop):
                return "stop"
        return "length" if len(tokens) == params.max_tokens else None

    def _finish(self, sequence: Running, reason: FinishReason) -> None:
        completion = sequence.completion
        completion.finish_reason = reason
        if sequence.request.params.routes and self._routers:
            completion.routes = torch.cat(sequence.routes) if sequence.routes else None
        self.scheduler.remove(sequence)
        others = self._live[completion.request_id]
        if all(other.completion.finish_reason is not None for other in others):
            del self._live[completion.request_id]
