"""OpenAI's protocol: what a client may ask, as models of JSON bodies, and how it is told of errors.

A parameter that this server does not know is an error, since who sends it expects it to do
something; one that is null is as good as left out. What the numbers may be: SamplingParams.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from moetrain.rollout.bodies import FIRST, JsonBody, complaint

MOST_COMPLETIONS = 128
"""Of one prompt, as OpenAI has it."""
MOST_LIKELIEST = 20
"""Tokens beside a chosen one, as OpenAI has it for chats."""
MOST_STOPS, LONGEST_STOP = 16, 128
"""Texts, and characters of one: the last tokens are read again for them at each further one."""
MOST_TURNS = 4096
"""Of a chat: templates may take time that grows with their square."""

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "n")
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class Asked(JsonBody):
    """What both kinds of request have: they add prompts and how log-probabilities are asked for."""

    model: str = ""
    """There is one."""
    user: str = ""
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """None: another one each time."""
    n: int = Field(default=1, le=MOST_COMPLETIONS)
    stop: Annotated[list[Stop], FIRST, BeforeValidator(_as_list)] = Field([], max_length=MOST_STOPS)
    stream: bool = False

    def sampling(self) -> dict[str, Any]:
        """Of SamplingParams, what has the same name."""
        seed = uuid.uuid4().int % 2**63 if self.seed is None else self.seed
        return {name: getattr(self, name) for name in _SAMPLING} | {
            "stop": tuple(self.stop),
            "seed": seed,
        }


class Completions(Asked):
    """Continue texts."""

    prompt: Any
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LIKELIEST)

    @property
    def has_logprobs(self) -> bool:
        """Whether each token's log-probability is told."""
        return self.logprobs is not None

    @property
    def top(self) -> int:
        """How many of the likeliest tokens are told beside each one."""
        return self.logprobs or 0

    @property
    def most_tokens(self) -> int | None:
        """Tokens of a completion; None: as many as is usual."""
        return self.max_tokens

    def prompts(self) -> list[str | list[int]]:
        """Texts, or token ids; raises ValueError."""
        prompt = self.prompt
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_ids(prompt)):
            prompt = [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise ValueError("prompt is neither text nor token ids, nor a list of either")
        if not all(isinstance(one, str) or _is_ids(one) for one in prompt):
            raise ValueError("prompt is a list of something else than texts or token ids")
        return prompt


class Chat(Asked):
    """Answer the last turn of a chat."""

    messages: list[Any] = Field(max_length=MOST_TURNS)
    """Objects; the template says which of their keys there are."""
    tools: Any = None
    documents: Any = None
    chat_template_kwargs: Any = None
    """These three go to the template, which says what they may be."""
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LIKELIEST)

    @property
    def has_logprobs(self) -> bool:
        """As of :class:`Completions`."""
        return self.logprobs

    @property
    def top(self) -> int:
        """As of :class:`Completions`."""
        return self.top_logprobs or 0

    @property
    def record(self) -> dict[str, Any]:
        """What comes with the messages and goes to the template, by name."""
        names = ("tools", "documents", "chat_template_kwargs")
        return {name: getattr(self, name) for name in names}

    @property
    def most_tokens(self) -> int | None:
        """As of :class:`Completions`; by either of its names."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @model_validator(mode="after")
    def _is_consistent(self) -> Chat:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens is max_completion_tokens by another name; send one")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs has no effect without logprobs true; send both")
        return self


ASKED: Mapping[str, type[Completions | Chat]] = {
    "text_completion": Completions,
    "chat.completion": Chat,
}


def validated(model: type[Completions | Chat], body: object) -> Completions | Chat:
    """``body`` as ``model`` has it; raises ValueError with one line."""
    if isinstance(body, dict):
        body = {key: value for key, value in body.items() if value is not None}
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise ValueError(complaint(error)) from None


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_body(status: int, problem: str) -> dict[str, Any]:
    """The protocol's error object."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": problem, "type": kind, "param": None, "code": None}}


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)
