"""Requests and completions as token ids, and their conversion from and to text.

The generator works on token ids only. :class:`JsonBody` is the base of the requests that clients
send to HTTP servers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator
from pydantic.dataclasses import dataclass as checked_dataclass

from moetrain.config import ConfigError, logger
from moetrain.config.sources import shortened
from moetrain.data.chat import BadLineError, ChatTemplate
from moetrain.data.tokenizer import Tokenizer
from moetrain.generate.sampling import FILTER_NAMES, STRICT, Filters
from moetrain.models.transformer import Transformer

_WINDOW = 32
"""Tokens in a stream's window: enough for many characters, few enough to decode each time."""

CHECKPOINT_PARAMS = ("temperature", *FILTER_NAMES)
"""Sampling parameters for which a checkpoint may recommend values (:func:`sampling_defaults`)."""

_FinishReason = Literal["stop", "length", "abort"]


class RequestError(ValueError):
    """The request can never be served. The message says what to change."""

    def __init__(self, request_id: str, problem: str) -> None:
        super().__init__(f"request {request_id!r}: {problem}")
        self.request_id, self.problem = request_id, problem


class BusyError(RequestError):
    """The request cannot be served now, but may succeed later."""


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class SamplingParams(Filters):
    """The parameters of one request. The sampling filters are those of :class:`Filters`.

    A value that is not allowed raises a ValueError that names it (:meth:`JsonBody.complaint`).
    Values are checked here because a wrong value in a step would fail all requests of the batch.
    """

    max_tokens: PositiveInt = 256
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0: always choose the likeliest token."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """The same seed gives the same tokens, whatever other requests are in the batch."""
    n: PositiveInt = 1
    """Number of completions."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a completion. Such a token is part of the completion."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a completion. The token that completes such a text is part of the
    completion."""
    grammar: tuple[Literal["json_schema", "regex", "choice", "grammar"], str] | None = None
    """The grammar that the text must follow (:mod:`moetrain.generate.grammars`). The grammar
    acts before the filters. The completion ends when the grammar allows no further token."""
    logprobs: Annotated[int, Field(ge=0)] = 0
    """Number of the likeliest tokens to report for each chosen one."""
    routes: bool = False
    """True: report the experts of each token."""
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    """Report the log-probability of every prompt token except the first, and this number of the
    likeliest tokens at its position; None: report nothing about the prompt."""
    tempered: bool = False
    """True: report log-probabilities at ``temperature``, which training at that temperature needs.
    False, or temperature 0: report log-probabilities at temperature 1. Filters do not change
    log-probabilities, so ``tempered`` excludes filters and grammars."""

    def __post_init__(self) -> None:
        if self.tempered and self.has_filters:
            raise ValueError("tempered log-probabilities ignore filters, so there must be none")

    @property
    def has_filters(self) -> bool:
        """True if a filter or a grammar rules out tokens. The choice then needs all logits."""
        return not self.is_neutral or self.grammar is not None

    @property
    def inverse_temperature(self) -> float:
        """1 / temperature, clamped so that products stay finite in fp32; 0: greedy choice."""
        return min(max(1 / self.temperature, 1e-30), 1e30) if self.temperature > 0 else 0.0

    @property
    def logprob_scale(self) -> float:
        """Factor of the logits in reported log-probabilities."""
        return (self.tempered and self.inverse_temperature) or 1.0

    def finish_reason(self, tokens: Sequence[int], *, has_stop_text: bool) -> _FinishReason | None:
        """Return why a completion with ``tokens`` ends after the last of them; None: it goes on.

        ``has_stop_text``: True if the text of ``tokens`` contains one of ``stop``
        (:attr:`TextStream.is_stopped`).
        """
        if tokens[-1] in self.stop_ids or has_stop_text:
            return "stop"
        return "length" if len(tokens) == self.max_tokens else None


@dataclass(frozen=True)
class Request:
    """Token ids to continue, and the parameters of the continuation."""

    id: str
    tokens: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    num_written: int = 0
    """Number of tokens at the end of ``tokens`` that belong to an interrupted completion. This
    request continues that completion, and a stop text may begin in these tokens."""


@dataclass
class Completion:
    """One continuation of a request. It grows while the request is served."""

    request_id: str
    index: int
    """Index of the completion, from 0 to ``n`` - 1."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each token in nats, before grammar and filters; at temperature 1 unless
    the request is ``tempered``."""
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    """The likeliest tokens at each position with their log-probabilities; empty: not asked for."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """Log-probability in nats of each prompt token except the first, at temperature 1; empty: not
    asked for."""
    prompt_top_logprobs: list[dict[int, float]] = field(default_factory=list)
    """For each of these prompt tokens, the likeliest tokens at its position, with their
    log-probabilities."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights that chose each token (:attr:`Generator.version`)."""
    routes: torch.Tensor | None = None
    """The experts of every token of prompt and completion except the last, which the model never
    reads: int32 [tokens that were read, MoE layers, K]; None: not asked for, or not finished. The
    experts are those of the last reading if a token was read again (preemption or an update)."""
    num_new: int = 0
    """Number of tokens that were added when the completion last grew."""
    num_drafted: int = 0
    """Number of draft tokens that the model has checked."""
    num_right: int = 0
    """Number of draft tokens that became part of the completion."""
    finish_reason: _FinishReason | None = None
    """Why the completion ended. stop: at a stop token or stop text, or where its grammar ends;
    length: at ``max_tokens``; abort: the request was aborted, or its grammar failed; None: not
    finished."""


class Update(NamedTuple):
    """One more token of a completion."""

    completion: Completion
    """The completion so far. It is complete when its last token has arrived."""
    token: int
    logprob: float
    top_logprobs: dict[int, float]
    """The likeliest tokens, as many as were asked for."""
    finish_reason: str | None
    """Why the completion ends with this token; None: more tokens will come."""


class JsonBody(BaseModel):
    """A JSON object with exact types, and without unknown keys, infinities or NaNs.

    The requests of both HTTP servers derive from it. An unknown key is an error, because the client
    expects it to have an effect. Lists have ``fail_fast``: a million errors about one long list
    would take gigabytes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_known_keys(cls, value: Any) -> Any:
        """Raise an error for one unknown key. Pydantic itself would report all of them."""
        if isinstance(value, dict) and (unknown := value.keys() - cls.model_fields.keys()):
            raise ValueError(f"{shortened(min(unknown))} is not supported")
        return value

    @staticmethod
    def complaint(error: ValueError) -> str:
        """Describe ``error``, or the first of several, in one line: field, problem and value."""
        if not isinstance(error, ValidationError):
            return str(error)
        first = error.errors(include_url=False)[0]
        # Keys come from the client and may be any text, so shorten them.
        name = shortened(".".join(map(str, first["loc"])))[1:-1]
        if first["type"] == "value_error":
            problem = first["msg"].removeprefix("Value error, ")
        else:
            problem = f"{first['msg']}, not {shortened(first['input'])}"
        return f"{name}: {problem}" if name else problem


def end_ids(model: Transformer, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end a text, according to the tokenizer, checkpoint and chat template.

    The template's tokens end an assistant's turn. A fine-tuned model has learned to end its answer
    with them.
    """
    named = None if model.source is None else (model.source.generation or {}).get("eos_token_id")
    ids = {tokenizer.eos_id, *(named if isinstance(named, list) else [named])}
    ids |= {tokenizer.added_tokens.get(text) for text in ChatTemplate.of(tokenizer).stops}
    return tuple(sorted(ids - {None}))


def chat_stops(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the texts that end an assistant's turn and are not a single token."""
    stops = ChatTemplate.of(tokenizer).stops
    return tuple(text for text in stops if text not in tokenizer.added_tokens)


def sampling_defaults(model: Transformer) -> dict[str, Any]:
    """Return the sampling parameters that the checkpoint's generation_config.json recommends.

    The result holds the :data:`CHECKPOINT_PARAMS` that the file has. A value that is not allowed is
    logged and left out. So is a repetition penalty, which the generator does not support.
    """
    named = (None if model.source is None else model.source.generation) or {}
    found: dict[str, Any] = {}
    for name in CHECKPOINT_PARAMS:
        if (value := named.get(name)) is None:
            continue
        try:
            SamplingParams(**{name: value})
        except ValidationError:
            problem = "which is not allowed, is not used"
            logger.warning("generation_config.json: %s %s, %s", name, shortened(value), problem)
        else:
            found[name] = value
    penalty = named.get("repetition_penalty")
    if penalty not in (None, 1):
        said = "generation_config.json: repetition_penalty %s is not used: it is not supported"
        logger.warning(said, shortened(penalty))
    return found


def chat_ids(
    tokenizer: Tokenizer,
    messages: object,
    record: Mapping[str, Any] = MappingProxyType({}),
    strict: bool = False,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> tuple[int, ...]:
    """Return the tokens of the prompt that asks for an assistant's answer to ``messages``.

    Args:
        record: more variables of the template, such as tools and documents
            (:meth:`~moetrain.data.chat.ChatTemplate.variables_of`).
        strict: True: refuse content that the template does not show; False: only log it.

    ``add_generation_prompt`` and ``continue_final_message`` mean the same as in
    :meth:`~moetrain.data.chat.ChatTemplate.prompt`.

    Raises ConfigError: ``messages`` are not a conversation, or the template refuses them.
    """
    try:
        variables = ChatTemplate.variables_of(record)
        text = ChatTemplate.of(tokenizer).prompt(
            messages,
            variables,
            strict,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
    except BadLineError as error:
        raise ConfigError("messages", str(error)) from None
    return tuple(tokenizer.encode_batch([text])[0].ids.tolist())


class TextStream:
    """Decodes a completion as it grows, up to a stop text, which is left out.

    The stream returns whole characters. The text of a token depends on its neighbours: the token
    may be half a character, and the first token of a text may lack its leading space. So each new
    token is decoded together with a window of the tokens before it. The window has between
    :data:`_WINDOW` and twice as many tokens. The window is longer for long stop texts, and while
    tokens give no text or no valid UTF-8.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        """``stop_ids``: tokens that are left out of the text if they end the completion."""
        self.tokenizer = tokenizer
        shown = partial(tokenizer.decode, skip_special_tokens=False)
        self.decode = tokenizer.decode if skip_special_tokens else shown
        self._stop = stop
        self._stop_ids = stop_ids
        self._held_back = max((len(text) - 1 for text in stop), default=0)
        """Number of characters held back at the end, since they may begin a stop text."""
        self._window = _WINDOW + 4 * self._held_back  # a character takes four tokens at most
        self._tokens: list[int] = []
        """The tokens of the window."""
        self._num_returned = 0
        """Number of characters of the window's text that were already returned."""
        self._num_wrong = 0
        """Number of characters at the window's start that differ from the whole text."""
        self.is_stopped = False
        """True: the text contains a stop text."""

    def text_of(self, token: int) -> str:
        """Return the text of a token by itself."""
        return self.decode([token])

    def push(self, *tokens: int, is_last: bool = False) -> str:
        """Return the text that ``tokens`` add; ``is_last``: also the text that was held back."""
        self._tokens += tokens[:-1] if is_last and tokens[-1] in self._stop_ids else tokens
        text = whole = self.decode(self._tokens)
        starts = [text.find(stop, self._num_wrong) for stop in self._stop]
        found = [start for start in starts if start >= 0]
        if found:
            text, self.is_stopped = text[: min(found)], True
        elif not is_last:
            text = text.rstrip("\ufffd")
            text = text[: max(0, len(text) - self._held_back)]
        new = text[self._num_returned :]
        self._num_returned = max(self._num_returned, len(text))
        if not found and len(self._tokens) >= 2 * self._window:
            self._shorten(whole)
        return new

    def _shorten(self, text: str) -> None:
        """Drop the start of the window if that does not change how later tokens are decoded.

        ``text``: the text of the whole window. The tokens that stay must give the same text for all
        characters that were not returned yet. The first token that stays must have a text of its
        own, so that no later token is decoded as the first of a text. It must not be a byte token,
        because a byte token may be in the middle of a character.
        """
        last = self._tokens[-self._window :]
        if last[0] in self.tokenizer.byte_ids or not self.decode(last[:1]):
            return
        short = self.decode(last)
        pairs = zip(reversed(short), reversed(text), strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if same > len(text) - self._num_returned:
            self._tokens, self._num_wrong = last, len(short) - same
            self._num_returned += len(short) - len(text)
