"""Requests to generate and their completions, and the text that goes in and out of them.

Token ids are all that a generator knows. :class:`JsonBody` is how clients send requests.
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
from moetrain.models.transformer import Transformer

_KEPT = 32
"""Tokens in the window of a stream: many characters, yet few enough to decode at each token."""

_FinishReason = Literal["stop", "length", "abort"]


class RequestError(ValueError):
    """A request can never be served; the message says what to change."""

    def __init__(self, request_id: str, problem: str) -> None:
        super().__init__(f"request {request_id!r}: {problem}")
        self.request_id, self.problem = request_id, problem


class BusyError(RequestError):
    """A request cannot be served now, but may succeed later."""


@checked_dataclass(frozen=True, config=ConfigDict(strict=True, allow_inf_nan=False))
class SamplingParams:
    """How one request's tokens are sampled.

    Impossible values raise a ValueError that names them (:meth:`JsonBody.complaint`): in a step
    they would fail every request that is served beside them.

    The filters act one after the other on the probabilities at ``temperature``: ``top_k``, then
    ``top_p`` (the fewest tokens that have so much together, arXiv 1904.09751), then ``min_p`` (at
    least this share of the likeliest token's probability, arXiv 2407.01082).
    """

    max_tokens: PositiveInt = 256
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0: always the likeliest token."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """0: all tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """The same seed gives the same tokens, whatever is generated beside the request."""
    n: PositiveInt = 1
    """Number of completions."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a completion, and are part of it."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a completion, with the token that completes one."""
    grammar: tuple[Literal["json_schema", "regex", "choice", "grammar"], str] | None = None
    """The grammar that the text must follow (:mod:`moetrain.generate.grammars`). It acts before the
    filters. Where it allows no further token, the completion ends."""
    logprobs: Annotated[int, Field(ge=0)] = 0
    """How many of the likeliest tokens to report beside each chosen one."""
    routes: bool = False
    """Whether to report which experts each token was sent to."""
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    """How many of the likeliest tokens to report beside the log-probability of every token of the
    prompt but the first; None: neither."""
    tempered: bool = False
    """Report log-probabilities at ``temperature``, as training at it needs; otherwise, and at
    temperature 0, they are those at 1. They ignore filters, so there must be none."""

    def __post_init__(self) -> None:
        if self.tempered and self.has_filters:
            raise ValueError("tempered log-probabilities ignore filters, so there must be none")

    @property
    def has_filters(self) -> bool:
        """Whether filters or a grammar rule out tokens, which takes all logits."""
        return bool(self.top_k or self.top_p < 1 or self.min_p or self.grammar)

    @property
    def inverse(self) -> float:
        """1 / temperature, clamped so that products stay finite in fp32; 0: greedy choice."""
        return min(max(1 / self.temperature, 1e-30), 1e30) if self.temperature > 0 else 0.0

    @property
    def scale(self) -> float:
        """Factor of the logits in reported log-probabilities."""
        return (self.tempered and self.inverse) or 1.0

    def reason(self, tokens: Sequence[int], *, has_stop_text: bool) -> _FinishReason | None:
        """Return why a completion of ``tokens`` has ended; None: it goes on.

        ``has_stop_text``: whether the text of ``tokens`` contains one of ``stop``
        (:attr:`TextStream.is_stopped`).
        """
        if tokens[-1] in self.stop_ids or has_stop_text:
            return "stop"
        return "length" if len(tokens) == self.max_tokens else None


@dataclass(frozen=True)
class Request:
    """Token ids to continue."""

    id: str
    tokens: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    num_written: int = 0
    """How many of the last ``tokens`` an interrupted completion has written, which this one goes on
    with. A stop text may begin in them."""


@dataclass
class Completion:
    """One continuation of a request so far."""

    request_id: str
    index: int
    """Number of the completion, from 0 to ``n`` - 1."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each token, nats: before grammar and filters, and at temperature 1 unless
    ``tempered``."""
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    """The likeliest tokens at each position and their log-probabilities; empty: not asked for."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """Log-probability of each token of the prompt but the first, nats, at temperature 1; empty: not
    asked for."""
    prompt_top_logprobs: list[dict[int, float]] = field(default_factory=list)
    """The likeliest tokens in the place of each of those, and their log-probabilities."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights that chose each token: how often they had been updated."""
    routes: torch.Tensor | None = None
    """int32 [tokens that were read, MoE layers, K]: the experts of every token of prompt and
    completion except the last, which was never read; None: not asked for, or not finished. Tokens
    that were read again (after preemption or an update) have the experts of the last time."""
    num_new: int = 0
    """How many tokens the last step has added that added any."""
    num_drafted: int = 0
    """Drafts that were read."""
    num_right: int = 0
    """How many of them became tokens."""
    finish_reason: _FinishReason | None = None
    """None: not finished. stop: at a stop token or text; length: at ``max_tokens``; abort."""


class Update(NamedTuple):
    """One more token of a completion."""

    completion: Completion
    """The completion so far; it is whole with its last token."""
    token: int
    logprob: float
    top_logprobs: dict[int, float]
    """The likeliest tokens, as many as were asked for."""
    finish_reason: str | None
    """Why the completion ends with this token; None: more tokens will come."""


class JsonBody(BaseModel):
    """A JSON object with exact types, and without unknown keys, infinities or NaNs.

    The bodies of both HTTP servers' requests derive from it. A key that a server does not know is
    an error, since the client expects it to do something. Lists have ``fail_fast``: a million
    complaints about a bad one would take gigabytes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_known_keys(cls, value: Any) -> Any:
        """Complain about one unknown key; pydantic alone would complain about each."""
        if isinstance(value, dict) and (unknown := value.keys() - cls.model_fields.keys()):
            raise ValueError(f"{shortened(min(unknown))} is not supported")
        return value

    @staticmethod
    def complaint(error: ValueError) -> str:
        """Describe ``error``, of pydantic's the first, in one line: where, what, and the value."""
        if not isinstance(error, ValidationError):
            return str(error)
        first = error.errors(include_url=False)[0]
        # The client's keys may be any text.
        name = shortened(".".join(map(str, first["loc"])))[1:-1]
        if first["type"] == "value_error":
            problem = first["msg"].removeprefix("Value error, ")
        else:
            problem = f"{first['msg']}, not {shortened(first['input'])}"
        return f"{name}: {problem}" if name else problem


def end_ids(model: Transformer, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end a text: the tokenizer's, the checkpoint's, and the template's.

    The template's end an assistant's turn, and are what a fine-tuned model learned to end it with.
    """
    named = None if model.source is None else (model.source.generation or {}).get("eos_token_id")
    ids = {tokenizer.eos_id, *(named if isinstance(named, list) else [named])}
    ids |= {tokenizer.added_tokens.get(text) for text in ChatTemplate.of(tokenizer).stops}
    return tuple(sorted(ids - {None}))


def chat_stops(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the texts that end an assistant's turn where the template ends it with no token."""
    stops = ChatTemplate.of(tokenizer).stops
    return tuple(text for text in stops if text not in tokenizer.added_tokens)


def sampling_defaults(model: Transformer) -> dict[str, Any]:
    """Return the sampling parameters that the checkpoint's generation_config.json recommends.

    They are those of ``temperature``, ``top_k``, ``top_p`` and ``min_p`` that it has. One that is
    no possible value is left out, as is a penalty, which a generator does not have; the log says
    so.
    """
    named = (None if model.source is None else model.source.generation) or {}
    found: dict[str, Any] = {}
    for name in ("temperature", "top_k", "top_p", "min_p"):
        if (value := named.get(name)) is None:
            continue
        try:
            SamplingParams(**{name: value})
        except ValidationError:
            problem = "which is no possible value, is not used"
            logger.warning("generation_config.json: %s %s, %s", name, shortened(value), problem)
        else:
            found[name] = value
    penalty = named.get("repetition_penalty")
    if penalty not in (None, 1):
        said = "generation_config.json: repetition_penalty %s is not used: there are no penalties"
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
    """Return the tokens that an assistant's answer to ``messages`` continues.

    ``record``: further variables of the template, such as tools and documents
    (:meth:`~moetrain.data.chat.ChatTemplate.variables_of`). ``strict``: refuse what the template
    does not show, of which otherwise the log says so. The others are those of
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
    """Decodes a completion as it grows: whole characters, up to a stop text, which is left out.

    The text of a token depends on its neighbours: it may be half a character, or lack a space that
    only the first token lacks. So a window of the last tokens is decoded again with each new one:
    :data:`_KEPT` to twice as many, and more where stop texts are long, or while tokens give no text
    or no valid UTF-8.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        """``stop_ids``: tokens that are no text where they are last."""
        self.tokenizer = tokenizer
        shown = partial(tokenizer.decode, skip_special_tokens=False)
        self.decode = tokenizer.decode if skip_special_tokens else shown
        self._stop = stop
        self._stop_ids = stop_ids
        self._held_back = max((len(text) - 1 for text in stop), default=0)
        self._kept = _KEPT + 4 * self._held_back  # a character takes four tokens at most
        self._tokens: list[int] = []
        """The window; the first ``_given`` characters of its text were returned already."""
        self._given = 0
        self._false = 0
        """Characters at the window's start that differ from the whole text."""
        self.is_stopped = False
        """True: the text contains a stop text."""

    def text_of(self, token: int) -> str:
        """Return the text of a token by itself."""
        return self.decode([token])

    def push(self, *tokens: int, is_last: bool = False) -> str:
        """Return the text that ``tokens`` add; ``is_last``: with all that was held back."""
        self._tokens += tokens[:-1] if is_last and tokens[-1] in self._stop_ids else tokens
        text = whole = self.decode(self._tokens)
        starts = [text.find(stop, self._false) for stop in self._stop]
        found = [start for start in starts if start >= 0]
        if found:
            text, self.is_stopped = text[: min(found)], True
        elif not is_last:
            text = text.rstrip("\ufffd")
            text = text[: max(0, len(text) - self._held_back)]
        new, self._given = text[self._given :], max(self._given, len(text))
        if not found and len(self._tokens) >= 2 * self._kept:
            self._shorten(whole)
        return new

    def _shorten(self, text: str) -> None:
        """Drop the start of the window, whose text is ``text``, if later text reads the same then.

        The last tokens must read as they do in ``text``, from what was returned on. Their first
        must have a text, so that later tokens are not first, and must end a run of byte tokens.
        """
        last = self._tokens[-self._kept :]
        if last[0] in self.tokenizer.byte_ids or not self.decode(last[:1]):
            return
        short = self.decode(last)
        pairs = zip(reversed(short), reversed(text), strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if same > len(text) - self._given:
            self._tokens, self._false = last, len(short) - same
            self._given += len(short) - len(text)
