"""Bodies of requests as models: JSON in general, and what OpenAI's protocol allows.

Models of both HTTP servers derive from :class:`JsonBody`. A parameter that a server does not know
is an error, since the client expects it to do something. SamplingParams says what the numbers may
be.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from moetrain.config.sources import shortened

_MOST_COMPLETIONS = 128
_MOST_LIKELIEST = 20
"""Likeliest tokens beside a chosen one, as OpenAI limits them for chats."""
_MOST_STOPS, _LONGEST_STOP = 16, 128
"""Number of stop texts, and characters of one: each token is checked against all of them."""
_MOST_TURNS = 4096
"""Turns of a chat: templates may take time that grows with their square."""

_Stop = Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]


class JsonBody(BaseModel):
    """A JSON object with exact types, and without unknown keys, infinities or NaNs.

    Lists have ``fail_fast``: a million complaints about a bad one would take gigabytes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_known_keys(cls, value: Any) -> Any:
        """Complain about one unknown key; pydantic alone would complain about each."""
        is_closed = cls.model_config.get("extra") == "forbid" and isinstance(value, dict)
        if is_closed and (unknown := value.keys() - cls.model_fields.keys()):
            raise ValueError(f"{shortened(min(unknown))} is not supported")
        return value


def complaint(error: ValidationError) -> str:
    """Describe the first of pydantic's errors in one line: where, what is wrong, and the value."""
    first = error.errors(include_url=False)[0]
    # The client's keys may be any text.
    name = shortened(".".join(map(str, first["loc"])))[1:-1]
    if first["type"] == "value_error":
        problem = first["msg"].removeprefix("Value error, ")
    else:
        problem = f"{first['msg']}, not {shortened(first['input'])}"
    return f"{name}: {problem}" if name else problem


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class _Asked(JsonBody):
    """The fields that completions and chats share; one that is null counts as left out."""

    model: str = ""
    """Ignored: the server has one model."""
    user: str = ""
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """None: a new one for each request."""
    n: int = Field(default=1, le=_MOST_COMPLETIONS)
    stop: Annotated[list[_Stop], BeforeValidator(_as_list)] = Field(
        [], max_length=_MOST_STOPS, fail_fast=True
    )
    stream: bool = False

    def sampling(self) -> dict[str, Any]:
        seed = uuid.uuid4().int % 2**63 if self.seed is None else self.seed
        same = self.model_dump(include={"temperature", "top_k", "top_p", "min_p", "n"})
        return same | {"stop": tuple(self.stop), "seed": seed}


class Completions(_Asked):
    """A request to continue texts."""

    prompt: Any
    logprobs: int | None = Field(default=None, ge=0, le=_MOST_LIKELIEST)

    @property
    def likeliest(self) -> int | None:
        """How many likeliest tokens go with each token's log-probability; None: there are none."""
        return self.logprobs

    @property
    def most_tokens(self) -> int | None:
        """Tokens of a completion at most; None: the default."""
        return self.max_tokens

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each text or token ids; raises ValueError."""
        prompt = self.prompt
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_ids(prompt)):
            prompt = [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise ValueError("prompt is neither text nor token ids, nor a list of either")
        if not all(isinstance(one, str) or _is_ids(one) for one in prompt):
            raise ValueError("prompt is a list of something else than texts or token ids")
        return prompt


class Chat(_Asked):
    """A request to answer the last turn of a chat."""

    messages: list[Any] = Field(max_length=_MOST_TURNS)
    """Objects, whose keys the template defines."""
    tools: Any = None
    documents: Any = None
    chat_template_kwargs: Any = None
    """These three go to the template, which defines what they may be."""
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=_MOST_LIKELIEST)

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def record(self) -> dict[str, Any]:
        names = ("tools", "documents", "chat_template_kwargs")
        return {name: getattr(self, name) for name in names}

    @property
    def most_tokens(self) -> int | None:
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @model_validator(mode="after")
    def _is_consistent(self) -> Chat:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens is max_completion_tokens by another name; send one")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs has no effect without logprobs true; send both")
        return self


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)
