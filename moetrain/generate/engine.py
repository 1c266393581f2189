"""The generator: a model that serves requests step by step.

    generator = Generator(model)
    completions = generator.generate([Request("a", (1, 2, 3))])    # or a step at a time:
    generator.submit(request); generator.step(); ...

The generator runs the trainer's own model, with attention over a paged cache
(:mod:`moetrain.generate.paged_attention`), and computes log-probabilities with the function that
the loss uses. On Hopper in bf16 they equal those of training with ``kernels.attention = "exact"``
bit for bit. On other devices, where projections have biases or layers carry states, and with a
cache of latents, they agree up to rounding. There is no tensor parallelism yet.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

import torch

from moetrain.config import ConfigError, logger
from moetrain.config.rl import CacheName
from moetrain.config.sources import shortened
from moetrain.data.tokenizer import Tokenizer, load_tokenizer
from moetrain.generate.drafting import DraftBy, check_drafting, most_drafts
from moetrain.generate.grammars import (
    Compiled,
    GrammarLimits,
    Grammars,
    Matcher,
    TooManyGrammarsError,
)
from moetrain.generate.pages import Pages
from moetrain.generate.ranks import ExpertParallel, HeadParallel
from moetrain.generate.request import (
    BusyError,
    Completion,
    Request,
    RequestError,
    TextStream,
    end_ids,
)
from moetrain.generate.scheduler import Chunk, Running, Scheduled, Scheduler
from moetrain.generate.slots import Choice, unpack_choices
from moetrain.generate.steps import Step, Steps
from moetrain.kernels.attention.batch_invariant import BLOCK
from moetrain.kernels.experts.products import width_multiple
from moetrain.models.architecture import Architecture
from moetrain.models.hf.config import architecture_from_hf
from moetrain.models.hf.files import CONFIG, EXPORT, read_json, resolve
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.peft import attach_peft
from moetrain.models.transformer import Transformer


class Generator:
    """A model, its cache, and the requests that it serves.

    Attributes:
        version: number of updates of the weights so far.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None = None,
        *,
        num_pages: int | None = None,
        page_size: int = Pages.SIZE,
        max_sequences: int = 64,
        max_tokens: int = 2048,
        experts: ExpertParallel | None = None,
        heads: HeadParallel | None = None,
        draft: int = 0,
        draft_by: DraftBy = "block",
        cache: CacheName = "expanded",
        grammar_limits: GrammarLimits | None = None,
    ) -> None:
        """Take over ``model``, which from then on serves only generation.

        Args:
            model: the model, on one device, with its weights loaded.
            tokenizer: needed for stop texts and grammars. Token ids that it does not have are never
                chosen.
            num_pages, page_size: the cache holds num_pages * page_size tokens of all running
                sequences together; num_pages None: most of the device's free memory, or 16,384
                tokens on a CPU.
            max_sequences: largest number of sequences that run at once. Others wait.
            max_tokens: largest number of tokens that one step reads. Longer prompts are read in
                chunks.
            experts: the ranks that share the experts of ``model``; None: this rank has all.
            heads: the ranks that share the cache by heads, and so serve the same requests. The
                first of them takes the requests.
            draft: number of tokens in a draft, the same on all ranks; 0 if ranks share heads.
            draft_by: source of drafts. block: the model's MTP block; ngram: the text so far.
            cache: content of the cache for layers with latent attention. expanded: keys and values,
                which have the bits of training; latent: latents, which take less memory. Ranks that
                share heads keep all latents each.
            grammar_limits: limits on the requests' grammars; None: the defaults.

        Raises:
            ConfigError: ``model`` is a reward model, a layer has no cache here, drafts cannot be
                made, or the cache is to hold latents and ``model`` has none.
            ValueError: a number is not positive, pages on CUDA are no multiple of 64 tokens, or no
                page fits in the free memory.
        """
        sizes = {"num_pages": num_pages, "page_size": page_size}
        sizes |= {"max_sequences": max_sequences, "max_tokens": max_tokens}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ValueError(f"{name} {size} is not positive; choose 1 or more")
        if model.embed.weight.is_cuda and page_size % BLOCK:
            raise ValueError(
                f"page_size {page_size} is not a multiple of {BLOCK}, as CUDA needs; choose one"
            )
        if model.arch.num_labels:
            problem = "a reward model, whose head predicts no token"
            raise ConfigError("model", f"{problem}; moetrain.score scores texts by it")
        check_drafting(model, draft, draft_by)
        keeps_latents = cache == "latent"
        if keeps_latents and not model.arch.has_latents:
            problem = f"'latent', but {model.arch.family} has no latent attention"
            raise ConfigError("cache", f"{problem}; use expanded")
        self.model = model
        self.tokenizer = tokenizer
        self.experts = experts
        if heads is not None and draft:
            raise ConfigError("draft", f"{draft}, but ranks that share heads do not draft; use 0")
        ranks = 1 if heads is None else heads.group.size()
        num_pages = num_pages or Pages.number_that_fits(
            model, page_size, max_sequences, ranks, keeps_latents=keeps_latents
        )
        self.pages = Pages(num_pages, page_size)
        known = model.arch.vocab_size if tokenizer is None else tokenizer.vocab_size
        known = min(known, model.arch.vocab_size)
        self.steps = Steps(
            model=model,
            pages=self.pages,
            known=known,
            experts=experts,
            max_sequences=max_sequences,
            heads=heads,
            draft=draft,
            has_block=draft_by == "block",
            keeps_latents=keeps_latents,
        )
        self.scheduler = Scheduler(
            self.pages, max_sequences, max_tokens, shares=not model.carries_state
        )
        ends = () if tokenizer is None else end_ids(model, tokenizer)
        self.grammars = Grammars(tokenizer, ends, known, grammar_limits or GrammarLimits())
        self.version = 0
        self.is_asleep = False
        self._asleep: list[tuple[torch.UntypedStorage, int]] = []
        """Storages of parameters whose memory was freed, with their sizes in bytes."""
        self.borrowed: set[str] = set()
        """Names of parameters that share memory with the trainer's frozen parameters."""
        self._live: dict[str, list[Running]] = {}
        """The sequences of every unfinished request, by its id."""

    def warm_up(self) -> None:
        """Compile kernels and capture graphs now (on CUDA), so that the first steps are fast."""
        self.steps.warm_up(self.scheduler.max_sequences * (1 + self.steps.draft))

    # ---- requests ------------------------------------------------------------------------------

    def submit(self, *requests: Request) -> None:
        """Queue ``requests``, or queue none of them and raise RequestError.

        The call waits until their grammars are compiled. A caller that must not wait uses
        :meth:`compile` first.
        """
        begun: dict[str, list[Running]] = {}
        compiled: list[Compiled] = []
        try:
            for request in requests:
                if request.id in self._live or request.id in begun:
                    raise RequestError(request.id, "a request of this id is being served")
                self._check(request)
                begun[request.id] = [self.steps.begin(request, i) for i in range(request.params.n)]
                if request.params.stop:
                    assert self.tokenizer is not None  # self._check ensures it
                    written = request.tokens[len(request.tokens) - request.num_written :]
                    for sequence in begun[request.id]:
                        sequence.text_so_far = TextStream(self.tokenizer, request.params.stop)
                        sequence.text_so_far.push(*written)
            for request in requests:
                if request.params.grammar is not None:
                    compiled.append(self.compile(request))
                    try:
                        for sequence in begun[request.id]:
                            sequence.matcher = self.grammars.begin(compiled[-1])
                    except ValueError as error:
                        raise self.refusal(request, error) from None
        except BaseException:
            for sequences in begun.values():
                for sequence in sequences:
                    if sequence.matcher is not None:
                        self.grammars.end(sequence.matcher)
            raise
        finally:
            for one in compiled:
                self.grammars.release(one)
        self._live |= begun
        for sequences in begun.values():
            self.scheduler.waiting += sequences

    def compile(self, request: Request) -> Compiled:
        """Start to compile the grammar of ``request``, which must have one, on another thread.

        Any thread may call this. The caller must give the result to ``grammars.release`` later.

        Raises:
            BusyError: too many grammars are in use now.
            RequestError: grammars cannot be used here.
        """
        assert request.params.grammar is not None
        try:
            return self.grammars.acquire(*request.params.grammar)
        except ValueError as error:
            raise self.refusal(request, error) from None

    @staticmethod
    def refusal(request: Request, error: ValueError) -> RequestError:
        """Return the error for a request whose grammar raised ``error``."""
        kind = BusyError if isinstance(error, TooManyGrammarsError) else RequestError
        return kind(request.id, str(error))

    def abort(self, request_id: str) -> list[Completion]:
        """End a request now. Return its completions so far; none if it is not being served."""
        sequences = self._live.get(request_id, [])
        for sequence in sequences:
            if sequence.completion.finish_reason is None:
                sequence.completion.finish_reason = "abort"
                self._finish(sequence)
        return [sequence.completion for sequence in sequences]

    @property
    def is_busy(self) -> bool:
        """True while requests run or wait."""
        return bool(self._live)

    @torch.no_grad()
    def step(self) -> list[Completion]:
        """Run the model once. Return the completions that have grown, each by ``num_new`` tokens.

        Collective over the ranks that share experts or heads.
        """
        if self.is_asleep:
            raise RuntimeError("the generator sleeps; call wake() first")
        # 1. Plan: sequences that read one token come first.
        planned = sorted(self.scheduler.plan(), key=lambda part: part.num_tokens > 1)
        chunks = [chunk for sequence, number in planned for chunk in sequence.chunks(number)]
        # 2. Run the model.
        wants_routes = any(sequence.params.routes for sequence, _ in planned)
        step = self.steps.run(chunks, routes=wants_routes)
        if step is None:
            return []
        self._score_prompts(chunks, step.read_TD)
        for sequence, number in planned:
            self.scheduler.mark_read(sequence, number)
        routes: Sequence[torch.Tensor] = ()
        if wants_routes and step.routes:
            routes_TLK = torch.stack(step.routes, 1).cpu()
            routes = routes_TLK.split([chunk.num_tokens for chunk in chunks])
        # 3. Choose the next tokens, and let grammars follow them.
        choices = self._choose(chunks, step)
        self._advance_grammars(planned, choices)
        # 4. Extend the sequences that were read to their end.
        grown, first = [], 0
        for sequence, _ in planned:
            own = slice(first, first + 1 + len(sequence.drafts))
            own_routes = routes[own] if sequence.params.routes else ()
            sequence.routes += own_routes[:1]
            if sequence.num_unread == 0:
                self._extend(sequence, choices[own], own_routes)
                grown.append(sequence.completion)
            first = own.stop
        return grown

    def _choose(self, chunks: Sequence[Chunk], step: Step) -> list[Choice]:
        """Return the choice after each chunk; an empty list if no sequence was read to its end."""
        due = [i for i, chunk in enumerate(chunks) if chunk.sequence.num_unread == 0]
        if not due:
            return []
        # The host waits here, once a step: the next step reads these tokens.
        choices = unpack_choices(step.choices_RN)
        params = {i: chunks[i].sequence.params for i in due}
        # Filters, grammars and likeliest tokens need all logits.
        special = [i for i, own in params.items() if own.has_filters or own.logprobs]
        if not special:
            return choices
        some = [chunks[i] for i in special]
        allowed_NV = None
        if any(chunk.sequence.matcher is not None for chunk in some):
            texts = [
                (chunk.sequence.matcher, chunk.sequence.drafts[: chunk.num_drafts])
                for chunk in some
            ]
            allowed_NV = self.grammars.allowed(texts)
        found = self.steps.choose_from_logits(some, step.hidden_ND[special], allowed_NV)
        for i, choice in zip(special, found, strict=True):
            plain = choices[i]
            if not params[i].has_filters:  # keep the step's own choice
                choices[i] = plain._replace(likeliest=choice.likeliest)
            elif choice.token == plain.token:  # keep the draft, which follows this token
                choices[i] = choice._replace(drafts=plain.drafts)
            else:
                choices[i] = choice
        return choices

    def _advance_grammars(self, planned: Sequence[Scheduled], choices: Sequence[Choice]) -> None:
        """Append the chosen tokens to the texts that follow grammars.

        The first chosen token that differs from its draft is the last one appended.
        """
        added: dict[Matcher, list[int]] = {}
        first = 0
        for sequence, _ in planned:
            if sequence.matcher is not None and sequence.num_unread == 0:
                own = choices[first : first + 1 + len(sequence.drafts)]
                tokens = [choice.token for choice in own]
                pairs = zip(tokens, sequence.drafts, strict=False)
                right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                added[sequence.matcher] = tokens[: right + 1]
            first += 1 + len(sequence.drafts)
        if added:
            self.grammars.take(added)

    def _extend(
        self, sequence: Running, choices: Sequence[Choice], routes: Sequence[torch.Tensor]
    ) -> None:
        """Append the choice after the last known token, and those after accepted draft tokens."""
        completion, params, drafts = sequence.completion, sequence.params, sequence.drafts
        completion.num_new = 0
        if not completion.tokens:
            self._report_scores(sequence)
        for i, choice in enumerate(choices):
            if i:  # after a draft token, which is accepted if it was chosen before
                if completion.finish_reason is not None or sequence.tokens[-1] != drafts[i - 1]:
                    break
                self.scheduler.mark_read(sequence, 1)
                sequence.routes += routes[i : i + 1]
            sequence.tokens.append(choice.token)
            completion.tokens.append(choice.token)
            completion.logprobs.append(choice.logprob)
            completion.top_logprobs += [choice.likeliest] if params.logprobs else []
            completion.versions.append(self.version)
            if (text := sequence.text_so_far) is not None:
                text.push(choice.token)
            has_stop_text = text is not None and text.is_stopped
            completion.finish_reason = params.finish_reason(
                completion.tokens, has_stop_text=has_stop_text
            )
            if sequence.matcher is not None and sequence.matcher.end == i + 1:
                completion.finish_reason = "abort" if sequence.matcher.has_failed else "stop"
            completion.num_new, sequence.drafts = i + 1, choice.drafts
        if self.steps.draft and not self.steps.has_block:
            sequence.drafts = sequence.lookup.draft(sequence.tokens, self.steps.draft)
        completion.num_drafted += len(drafts)
        completion.num_right += completion.num_new - 1
        position, left = len(sequence.tokens) - 1, params.max_tokens - len(completion.tokens)
        del sequence.drafts[most_drafts(position, left, self.model.carries_state) :]
        if completion.finish_reason is not None:
            self._finish(sequence)

    def _score_prompts(self, chunks: Sequence[Chunk], read_TD: torch.Tensor) -> None:
        """Score the prompt tokens that ``chunks`` predict, for requests that ask for scores."""
        first = 0
        for chunk in chunks:
            sequence = chunk.sequence
            after = sequence.request.tokens[chunk.start + 1 :][: chunk.num_tokens]
            most = sequence.params.prompt_logprobs
            if after and most is not None:
                read_ND = read_TD[first : first + len(after)]
                sequence.prompt_scores += self.steps.score(read_ND, after, most)
            first += chunk.num_tokens

    def stream(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Serve ``requests``, and yield a completion of any request whenever it has grown."""
        self.submit(*requests)
        while self.goes_on(self.is_busy):
            yield from self.step()

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Return the finished completions of every request. Other requests are served meanwhile."""
        if self.is_asleep:
            raise RuntimeError("the generator sleeps; call wake() before generate()")
        self.submit(*requests)
        mine = [self._live[request.id] for request in requests]
        served = [sequence.completion for sequences in mine for sequence in sequences]
        while self.goes_on(any(completion.finish_reason is None for completion in served)):
            self.step()
        return [[sequence.completion for sequence in sequences] for sequences in mine]

    def goes_on(self, is_busy: bool) -> bool:
        """Return True if another step is needed: ``is_busy`` is True on any of the ranks.

        Collective over the ranks that share experts or heads.
        """
        is_busy = self.steps.from_leader(is_busy)
        if self.experts is None:
            return is_busy
        return self.experts.agree(0, is_busy, self.model.embed.weight.device)[1]

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence that can be served, with its prompt."""
        return min(self.model.arch.max_positions, self.pages.num_tokens)

    def _check(self, request: Request) -> None:
        params, arch, heads = request.params, self.model.arch, self.steps.heads
        if heads is not None and not heads.leads:
            raise RequestError(
                request.id, "only the first of the ranks that share heads takes requests"
            )
        if not request.tokens:
            raise RequestError(request.id, "it has no tokens to continue")
        if not 0 <= min(request.tokens) <= max(request.tokens) < arch.vocab_size:
            raise RequestError(request.id, f"it has a token outside of 0 to {arch.vocab_size - 1}")
        number, what = len(request.tokens), "the model's positions"
        if self.longest < arch.max_positions:
            what = "the cache"
        if number + params.max_tokens > self.longest:
            problem = f"{number} tokens and max_tokens {shortened(params.max_tokens)} are more than"
            remedy = "shorten it, or lower max_tokens"
            raise RequestError(request.id, f"{problem} {what} ({self.longest}); {remedy}")
        if params.stop and self.tokenizer is None:
            raise RequestError(request.id, "stop texts need a tokenizer; use stop_ids")

    # ---- weights and memory --------------------------------------------------------------------

    def weights_changed(self, *, keeps_cache: bool = False) -> None:
        """Clear the cache and count a new version, after weights were changed in place.

        Unfinished completions go on with the new weights. All their tokens are read again, unless
        ``keeps_cache`` is True.
        """
        self.scheduler.start_over(keeps_cache)
        self.version += 1

    def wipe(self) -> None:
        """Fill the cache with zeros. There must be no unfinished requests.

        Diverged weights may have left NaNs in pages, and 0 times NaN is NaN: attention weights of 0
        do not hide them.
        """
        assert not self.is_busy
        for cache in self.steps.caches:
            cache.wipe()

    def sleep(self, *, weights: bool = False) -> None:
        """Free the memory of the cache; with ``weights`` also that of the generator's own weights.

        The values of these weights are lost. Unfinished completions go on after :meth:`wake`.
        """
        self.scheduler.start_over()
        if weights:
            for name, parameter in self.model.named_parameters():
                if name in self.borrowed:
                    continue
                storage = parameter.untyped_storage()
                self._asleep.append((storage, storage.nbytes()))
                storage.resize_(0)
        self.steps.free()  # also frees the graphs, which hold addresses
        self.is_asleep = True

    def wake(self) -> None:
        """Allocate freed parameters again. They need new values before the next step."""
        for storage, num_bytes in self._asleep:
            storage.resize_(num_bytes)
        self._asleep.clear()
        self.is_asleep = False

    def _finish(self, sequence: Running) -> None:
        """Remove a sequence whose completion has a ``finish_reason``."""
        completion = sequence.completion
        if sequence.params.routes:
            completion.routes = torch.cat(sequence.routes) if sequence.routes else None
        self._report_scores(sequence)
        if sequence.matcher is not None:
            self.grammars.end(sequence.matcher)
        self.scheduler.remove(sequence)
        others = self._live[completion.request_id]
        if all(other.completion.finish_reason is not None for other in others):
            del self._live[completion.request_id]

    @staticmethod
    def _report_scores(sequence: Running) -> None:
        """Copy the scores of the prompt, from its latest reading, into the completion."""
        completion, scores = sequence.completion, sequence.prompt_scores
        completion.prompt_logprobs = [score.logprob for score in scores]
        completion.prompt_top_logprobs = [score.likeliest for score in scores]


def _check_widths(path: str, arch: Architecture, dtype: torch.dtype) -> None:
    """Raise ConfigError if kernels on a GPU do not take the widths of ``path`` in ``dtype``."""
    multiple, given = width_multiple(dtype), str(dtype).removeprefix("torch.")
    if (odd := arch.odd_width(multiple)) is not None:
        name, width = odd
        problem = f"'cuda', but {path!r} has {name} {width}, which is not a multiple of {multiple}"
        raise ConfigError("device", f"{problem}, as a GPU's kernels need in {given}; use cpu")


def load_model(
    path: str, device: str, dtype: str, adapter: str | None = None, draft: int = 0
) -> tuple[Transformer, Tokenizer]:
    """Load the model and the tokenizer of ``path``, a Hugging Face folder or a hub id.

    Args:
        adapter: folder of adapters in PEFT's format, used beside the weights.
        draft: if not 0, also load the MTP block, by which a :class:`Generator` drafts tokens.
        device: auto, cpu or cuda.
        dtype: dtype of weights and arithmetic; auto: bfloat16 on CUDA, float32 on a CPU.

    Raises ConfigError: the checkpoint cannot be loaded, there is no such device, or the device's
    kernels do not take the model's widths.
    """
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ConfigError("device", "'cuda', but torch sees no CUDA device; use auto or cpu")
    on_gpu = has_gpu and device != "cpu"
    auto = torch.bfloat16 if on_gpu else torch.float32
    folder = resolve(path, field="path", for_adapters="give it, and {} as --adapter")
    if folder.name == EXPORT and Path(path).expanduser() == folder.parent:
        logger.warning("%s is the output folder of a run; its export %s is used", path, folder)
    tokenizer = load_tokenizer(str(folder))  # first, because it loads faster than the model
    wanted = auto if dtype == "auto" else getattr(torch, dtype)
    if on_gpu:
        _check_widths(path, architecture_from_hf(read_json(folder / CONFIG)), wanted)
    model = load_hf(
        folder,
        dtype=wanted,
        device="cuda" if on_gpu else "cpu",
        multi_token="draft" if draft else None,
    )
    if adapter is not None:
        try:
            attach_peft(model, adapter)
        except ConfigError as error:
            raise ConfigError("adapter", error.problem) from None
    return model, tokenizer
