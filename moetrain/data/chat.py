"""Conversations to text, with the spans of that text a model should learn: assistant turns.

The template is rendered once up to each assistant turn (with the generation prompt) and once
after it; what the second rendering adds is the turn. So any Jinja chat template works unmarked.

A template may rewrite history: Qwen3's drops the thoughts of earlier turns. Then one text cannot
hold every turn as the model will see it, and the conversation becomes several texts, each with
loss on the turns that are in their final form there.

Left out on purpose: turns after the last assistant turn (they carry no loss), trailing white space
of a turn (layout, not speech), and Hugging Face's non-standard ``{% generation %}`` tag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moetrain.config import ConfigError

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

Span = tuple[int, int]
"""Characters ``start:end`` of a text."""


# What templates raise: programs, if small ones.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,  # RecursionError too
    TypeError,
    ValueError,
)


class BadLineError(Exception):
    """A line's content is wrong; whoever knows the file and line number reports both."""

    def __init__(self, problem: str, field: str | None = None) -> None:
        """``field`` is the setting at fault, if that is not the one that named the file."""
        super().__init__(problem)
        self.field = field


class ChatTemplate:
    """A Jinja chat template, run in a sandbox: it comes with checkpoints from strangers."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, check: bool = False
    ) -> None:
        """``special_tokens`` (``bos_token``, ...) become variables of the template.

        Raises:
            ConfigError: with ``check``, the template is malformed. Without, that is found at the
                first conversation: a corpus without any needs no valid template.
        """
        self.source = source
        self._special_tokens = special_tokens
        if check:
            _ = self._template

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.filters["tojson"] = _to_json
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                "data.chat_template", f"line {error.lineno} of the template: {error.message}"
            ) from None
        except (SyntaxError, *_TEMPLATE_ERRORS) as error:  # of the Python that it becomes
            raise ConfigError(
                "data.chat_template", f"the template cannot be compiled: {_say(error)}"
            ) from None

    def documents(self, messages: object) -> list[tuple[str, list[Span]]]:
        """The texts of one conversation, each with the spans of its assistant turns.

        Args:
            messages: ``[{"role": "user", "content": "..."}, ...]``; other keys go to the template.

        Raises:
            BadLineError: ``messages`` has another shape, no assistant turn, or the template fails.
            ConfigError: the template itself is wrong.
        """
        turns = _checked(messages)
        documents: list[tuple[str, list[Span]]] = []
        for i, message in enumerate(turns):
            if message["role"] != "assistant":
                continue
            prompt = self._render(turns[:i], add_generation_prompt=True)
            text = self._render(turns[: i + 1], add_generation_prompt=False)
            if not text.startswith(prompt):
                raise BadLineError(
                    f"the chat template's generation prompt does not begin its rendering of "
                    f"messages[{i}]; give another template in data.chat_template"
                )
            text = prompt + text[len(prompt) :].rstrip()
            if len(text) == len(prompt) and message["content"].strip():
                raise BadLineError(
                    f"the chat template renders no text for messages[{i}], an assistant's turn; "
                    "give another one",
                    "data.chat_template",
                )
            spans: list[Span] = []
            if documents and text.startswith(documents[-1][0]):
                spans = documents.pop()[1]
            documents.append((text, [*spans, (len(prompt), len(text))]))
        if not documents:
            raise BadLineError("`messages` has no assistant turn to learn from")
        return documents

    def prompt(self, messages: object) -> str:
        """The text that an assistant's next turn continues.

        Raises:
            BadLineError, ConfigError: as :meth:`documents`.
        """
        return self._render(_checked(messages), add_generation_prompt=True)

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        template = self._template  # its own error is no line's
        try:
            return template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,  # as Hugging Face has them where none are given
                documents=None,
                **self._special_tokens,
            )
        except (MemoryError, *_TEMPLATE_ERRORS) as error:  # all that is made here is the template's
            raise BadLineError(f"the chat template fails: {_say(error)}") from None


def _checked(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise BadLineError("`messages` is not a list of turns")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadLineError(f"messages[{i}] is not an object")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise BadLineError(f"messages[{i}].{key} is missing or not text")
    return messages


def _say(error: Exception) -> str:
    """Jinja's messages speak for themselves; Python's need their class."""
    if isinstance(error, jinja2.TemplateError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _raise_exception(message: str) -> None:
    """How templates refuse a conversation."""
    raise jinja2.TemplateError(message)


def _to_json(value: object, indent: int | None = None) -> str:
    """Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
