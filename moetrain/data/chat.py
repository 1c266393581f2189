"""Renders conversations to text, with the spans that a model learns: the assistant's turns.

For each assistant's turn, a template renders the conversation before the turn (with the generation
prompt), and then the conversation with the turn. The text that the second rendering adds is the
turn. So any Jinja chat template works without marks. A template that marks the text to learn with
``{% generation %}`` is rendered once, as for ``transformers``' assistant mask. A template may
rewrite history: Qwen3's drops the thoughts of earlier turns. Then one text cannot hold every turn
as the model will see it, and the conversation becomes several texts. With a template that marks the
text to learn, a conversation becomes several texts only if the one rendering drops thoughts.

Left out on purpose: turns after the last turn that is learned, which have no loss, and white space
at the end of a turn, which is layout.
"""

import json
import os
import pickle
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from moetrain.config import ConfigError
from moetrain.config.files import read_regular
from moetrain.config.sources import shortened
from moetrain.data.lost import refuse_attached
from moetrain.data.messages import (
    REASONING,
    BadLineError,
    Form,
    Message,
    Piece,
    are_listed,
    begins_with_system,
    forms_of,
    in_order_of_calls,
    is_role,
    is_said,
    lost_keys,
    lost_thought,
    marked,
    parse_json,
    read_messages,
    result_without_call,
    text_of,
    undeclared_call,
    unknown_roles,
    without_tags,
    words_of,
)
from moetrain.data.template_worker import View
from moetrain.data.templates import (
    TemplateError,
    TemplateLimitError,
    TemplateSyntaxError,
    render,
)
from moetrain.data.tokenizer import Tokenizer
from moetrain.data.tools import are_tools, read_tools, without_filled
from moetrain.data.turn_ends import TurnEnds, turn_ends
from moetrain.data.warned import warn_once

CHATML = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'There are these tools:\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- 'Call one with <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": ' + call.function.name | tojson }}
{{- ', "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
"""The template of tokenizers that have none: ChatML, with tools and calls as in Hermes' format."""

_KWARGS = "data.chat_template_kwargs"
_MAX_BYTES = 1 << 20
"""Most bytes of a template's file. Published templates have at most 30 KB."""
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt"}
"""Names that chat_template_kwargs cannot set: the variables that records set, and the arguments of
``apply_chat_template`` in ``transformers`` that are not variables of a template."""
_RESERVED |= {"conversation", "chat_template", "continue_final_message", "tokenize", "padding"}
_RESERVED |= {"sanitize_control_tokens", "truncation", "max_length", "return_tensors"}
_RESERVED |= {"return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
_MARK = secrets.token_hex(8)
"""A secret that no conversation contains."""
_OPEN, _CLOSE = f"<{_MARK}>", f"</{_MARK}>"
"""Marks around text to learn."""

_READS_PARTS = re.compile(
    r"content is (not )?(string|iterable|mapping)|\.type\b|\[['\"]type['\"]\]"
)
"""Matches a template that may read ``content`` as a list of parts."""
_READS_CHANNELS = re.compile(r"\.channel\b|['\"]channel['\"]")
"""Matches a template that reads the ``channel`` of a message. GPT-OSS's template writes channels,
but does not read this key."""

_TAG = r"(?:\w+:)?(?:think|thought)\w*(?::\w+)?"
_PAIRS = {"<|channel>thought": "<channel|>", "<|START_THINKING|>": "<|END_THINKING|>"}
"""Marks around thoughts that are not tags like ``<think>``: Gemma's and Cohere's."""
_OPENED = rf"[<\[◁]{_TAG}[>\]▷]|(?-i:{'|'.join(map(re.escape, _PAIRS))})"
_CLOSED = rf"[<\[◁]/{_TAG}[>\]▷]|(?-i:{'|'.join(map(re.escape, _PAIRS.values()))})"
_OPENING = re.compile(rf"(?:(?P<open>{_OPENED})(?P<blanks>\s*))?(?P<closed>{_CLOSED})?\s*$", re.I)
"""Matches the end of a generation prompt, which may open a thought, or close an empty thought."""
_LONGEST_OPENING = 100
"""Number of characters at the end of a prompt that are searched for _OPENING."""
_THOUGHT = re.compile(rf"\s*(?P<open>{_OPENED})?(?P<thought>.*)(?P<close>{_CLOSED})", re.I | re.S)
"""Matches a content from its beginning to the end of its thought."""


class Rendered(NamedTuple):
    """A conversation, or a part of one, as text."""

    text: str
    spans: list[tuple[int, int]]
    """The characters ``start:end`` to learn."""


def chosen_turns(turns: Sequence[Mapping[str, Any]], *, train_on: str, num_given: int) -> list[int]:
    """Return the indices of the assistant's turns that ``data.train_on`` chooses.

    Their weights do not matter. The first ``num_given`` turns are a prompt.
    """
    chosen = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    if train_on == "last":
        chosen = chosen[-1:]
    if train_on == "completion" and chosen:
        asked = (i for i in range(chosen[-1]) if turns[i]["role"] == "user")
        num_given = max(num_given, *asked, 0)
    return [i for i in chosen if i >= num_given]


@dataclass
class ChatTemplate:
    """A Jinja chat template.

    A template comes from an untrusted checkpoint, so it runs in Jinja's sandbox and in a process
    with limits of time and memory (:mod:`moetrain.data.templates`).

    An error of the tokenizer's template is raised at the first conversation, because a corpus
    without conversations needs no valid template. :meth:`of` checks the template of a named file.
    """

    source: str
    """The text of the template."""
    special_tokens: Mapping[str, str]
    """Variables of the template: ``bos_token``, ..."""
    with_tools: "ChatTemplate | None" = None
    """The template for conversations that have tools. None: this one."""
    now: datetime = field(default_factory=datetime.now)
    """The time that ``strftime_now`` writes. It is the same for all texts."""
    file: str | None = None
    """The file that holds the template, for messages."""
    added_tokens: frozenset[str] = frozenset()
    """The tokenizer's added tokens. Some of them may end a turn."""
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further variables. A conversation's own variables take precedence."""

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, file_name: str | None = None, kwargs: str | None = None
    ) -> Self:
        """Make the template of the file ``file_name``, or the tokenizer's, or else ChatML.

        ``kwargs`` is data.chat_template_kwargs. None: the tokenizer's variables are taken.

        Raises ConfigError: the file cannot be read or is no template, or ``kwargs`` is malformed.
        """
        special = tokenizer.special_tokens
        own_kwargs = dict(tokenizer.chat_template_kwargs)
        make = partial(
            cls,
            special_tokens=special,
            added_tokens=frozenset(tokenizer.added_tokens),
            kwargs=own_kwargs if kwargs is None else _read_kwargs(kwargs),
        )
        if file_name is not None:
            template = make(_read(file_name), file=file_name)
            list(template._rendered([], {}, []))  # a named file is checked at once
            return template
        if tokenizer.chat_template is not None:
            tools = tokenizer.tool_template
            files = tokenizer.template_files
            with_tools = None if tools is None else make(tools, file=files[1])
            return make(tokenizer.chat_template, with_tools=with_tools, file=files[0])
        # Templates write BOS themselves. So does ChatML here, if the model's texts begin with BOS.
        has_bos = tokenizer.bos_ids and "bos_token" in special
        return make("{{- bos_token }}" * bool(has_bos) + CHATML)

    def identity(self) -> list[str]:
        """Return texts that differ if conversations are rendered differently.

        Special tokens are not among these texts.
        """
        found = [self.source, *(self.with_tools.identity() if self.with_tools else ())]
        return [*found, json.dumps({**self.kwargs})] if self.kwargs else found

    @classmethod
    def put_in(cls, tokenizer: Tokenizer, file_name: str | None, kwargs: str | None) -> None:
        """Replace the tokenizer's template by ``file_name``, and its variables by ``kwargs``.

        None: the tokenizer keeps its own. Raises ConfigError as :meth:`of`.
        """
        template = cls.of(tokenizer, file_name, kwargs)
        tokenizer.chat_template_kwargs = template.kwargs
        if file_name is not None:
            tokenizer.chat_template = tokenizer.given_template = template.source
            tokenizer.tool_template, tokenizer.template_files = None, (file_name, "")

    def documents(
        self,
        messages: object,
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        train_on: str = "all",
        num_given: int = 0,
        adds_ends: bool = True,
        strict: bool = True,
    ) -> list[Rendered]:
        """Render a conversation to its texts, each with the spans of its assistant turns.

        Args:
            messages: ``[{"role": "user", "content": "..."}, ...]``, or another form that
                :func:`~moetrain.data.messages.read_messages` reads. Other keys go to the template.
            variables: further variables of the template (:meth:`variables_of`).
            train_on: the assistant's turns that are learned: ``all``, the ``last`` one, or those
                behind the last user's turn before it (``completion``).
            num_given: number of messages at the beginning that are a prompt. They are not learned.
            adds_ends: True: a turn without an end in the template ends with the beginning of the
                next one (:class:`~moetrain.data.turn_ends.TurnEnds`).
            strict: True: refuse a conversation if the template does not show all of it.

        Returns:
            The texts. Every learned turn has loss in exactly one text, which shows the turn as the
            model writes it. There are none if all turns to learn have weight 0.

        Raises:
            BadLineError: ``messages`` has another shape or no assistant's turn to learn, the
                template fails, or ``strict`` is True and the template does not show all of the
                conversation. The template may drop the reasoning of earlier turns.
            ConfigError: the template itself is wrong.
        """
        turns, num_given = self._read(messages, num_given, strict=strict)
        turns = without_filled(turns, variables.get("tools"))
        variables = _with_tools_once(turns, variables) if strict else variables
        if self.with_tools is not None and variables.get("tools") is not None:
            return self.with_tools.documents(
                turns,
                variables,
                train_on=train_on,
                num_given=num_given,
                adds_ends=adds_ends,
                strict=strict,
            )
        learned = chosen_turns(turns, train_on=train_on, num_given=num_given)
        if learned and not any(turns[i].get("weight", 1) for i in learned):
            return []
        learned = [i for i in learned if turns[i].get("weight", 1)]
        if not learned:
            said = "`messages` has no assistant turn to learn from"
            remedy = (
                "leave such records out, or let a policy answer them for a reward: moetrain rl "
            )
            remedy += "reads `messages` or `conversations` from rl.prompts"
            if roles := unknown_roles(turns):
                names = ", ".join(map(repr, roles))
                said_of = f"its roles {names} are" if len(roles) > 1 else f"its role {names} is"
                remedy = (
                    f"{said_of} not known: write assistant in place of the role that is to be "
                    "learned, tool in place of that of a tool's results, and user in place of "
                    "that of questions; thoughts are `reasoning_content` and calls `tool_calls` "
                    "of the assistant's turn"
                )
            raise BadLineError(f"{said}: {shortened(messages)}; {remedy}")
        if strict:
            self._check_turns(turns, learned, variables)
        # Render the turns in the form that the template shows most of.
        view = View(learned[-1] + 1, add_generation_prompt=False)
        form, lost = self._find_form(turns, variables, view, learned)
        documents = self._documents(form.of(turns), variables, learned, adds_ends=adds_ends)
        # Refuse lost pieces. A dropped thought is not lost if _learned_from added it to the text.
        said = "".join(text[a:b] for text, spans in documents for a, b in spans)
        lost = [piece for piece in lost if (_thought_of(piece, turns) or _OPEN) not in said]
        if lost and strict:
            _refuse(lost[0], turns)
        if strict:
            _warn_of_names(turns, "".join(text for text, _ in documents))
        return documents

    def _check_turns(
        self,
        turns: Sequence[Mapping[str, Any]],
        learned: Sequence[int],
        variables: Mapping[str, Any],
    ) -> None:
        """Warn of undeclared tools, unknown roles and a system's text that is shown twice.

        Raises BadLineError: the template does not read the channel of a thought, or a key that
        holds a tool, a call, the text of an answer, a thought or a file.
        """
        name = undeclared_call(turns, learned, variables.get("tools") or ())
        if name is not None:
            _warn_of_undeclared(name)
        if (given := result_without_call(turns)) is not None:
            warn_once(
                "results without a call",
                "results of tools follow turns without a call, such as that with "
                f"{given}: they are shown as they are; write the call as `tool_calls` of the "
                "turn before them",
            )
        for role in unknown_roles(turns)[:1]:
            _warn_of_role(role)
        if begins_with_system(turns):
            warn_once(
                "a system's text twice",
                "questions begin with the text of the system's turn, which is shown twice: leave "
                "it out of one of them",
            )
        refuse_attached(turns[: learned[-1] + 1], variables, self._reads_key)
        for i, turn in enumerate(turns):
            for key, remedy in lost_keys(turn):
                # A template reads `arguments` of calls, not of turns.
                if key == "arguments" or not self._reads_key(key):
                    said = f"messages[{i}].{key} is not read by the chat template"
                    said = f"{said}: {shortened(turn[key])}"
                    raise BadLineError(f"{said}; {remedy}")
        for i in learned:
            key = lost_thought(turns[i])
            if key is not None and not self._reads_key(key):
                said = f"messages[{i}].{key} is a thought that the chat template does not read"
                said = f"{said}: {shortened(turns[i][key])}"
                raise BadLineError(f"{said}; write it as `reasoning_content`, or leave it out")
            channel = turns[i].get("channel")
            if channel in ("analysis", "commentary") and not _READS_CHANNELS.search(self.source):
                said = f"messages[{i}].channel is {channel!r}, which the chat template does not "
                said += "read: it would be learned as an answer; give thoughts as "
                said += "`reasoning_content` of the turn that they begin, and calls as `tool_calls`"
                raise BadLineError(said)

    def warn_of_variables(self, record: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Warn of fields of ``record`` that have the name of a variable of the template.

        ``given`` are the variables of the record (:meth:`variables_of`): templates get no others.
        """
        known = {"messages", "tools", "documents", "functions", *self.special_tokens}
        for key, value in record.items():
            is_switch = isinstance(value, bool | int | float | str) and value != ""
            if not is_switch or key in known or key in given:
                continue
            if _has_variable(self.source, key):
                warn_once(
                    f"a field {key} as a variable",
                    f"`{key}` of records is not given to the chat template, which reads a variable "
                    "of this name: write it in `chat_template_kwargs` of the record, or for the "
                    "whole run in data.chat_template_kwargs",
                )

    def _reads_key(self, key: str) -> bool:
        """Return whether the template seems to read ``key`` of a turn."""
        key = re.escape(key)
        reads = rf"\.{key}\b|[\[(]\s*['\"]{key}['\"]|['\"]{key}['\"]\s+in\b"
        return re.search(reads, self.source) is not None

    def _documents(
        self,
        turns: list[Message],
        variables: Mapping[str, Any],
        learned: Sequence[int],
        *,
        adds_ends: bool,
    ) -> list[Rendered]:
        """Render ``turns``, which have the form that the template takes, to texts with spans."""
        if re.search(r"{%[-+]?\s*generation\b", self.source):
            self._check_openings(turns, variables, learned)
            return self._marked_documents(turns, variables, learned)
        documents: list[Rendered] = []
        views = [
            View(size, add_generation_prompt=is_prompt)
            for i in learned
            for size, is_prompt in ((i, True), (i + 1, False))
        ]
        first = [self._first_prompt(turns[0], variables)] if learned[0] == 0 else []
        texts = chain(first, self._rendered(turns, variables, views[len(first) :]))
        for i in learned:
            prompt, text = next(texts), next(texts)
            start, text = self._learned_from(prompt, text, turns[: i + 1], variables)
            content = turns[i].get("content", "")
            content = content.strip() if isinstance(content, str) else content
            if start == len(text) and (content or turns[i].get("tool_calls")):
                said = f"renders no text for messages[{i}], an assistant's turn"
                problem = f"the chat template {said}; give another one"
                raise BadLineError(problem, "data.chat_template")
            if adds_ends:
                following = turns[i + 1]["role"] if i + 1 < len(turns) else None
                text += self.turn_ends.behind(turns[i], following)
            # A text that continues the text before it replaces that one, and has the spans of both.
            goes_on = bool(documents) and text.startswith(documents[-1].text)
            spans = documents.pop().spans if goes_on else []
            documents.append(Rendered(text, [*spans, (start, len(text))]))
        return documents

    def _first_prompt(self, turn: Message, variables: Mapping[str, Any]) -> str:
        """Return the text that the model continues where ``turn``, an answer, is the first one.

        It is the generation prompt of a conversation without turns. Qwen3's template reads the
        first message, and cannot render that. Then the prompt behind a question tells how an answer
        begins.

        Raises BadLineError: the template fails, or begins such an answer otherwise.
        """
        with suppress(BadLineError):
            return next(self._rendered([], variables, [View(0, add_generation_prompt=True)]))
        (text,) = self._rendered([turn], variables, [View(1, add_generation_prompt=False)])
        asked: list[Message] = [{"role": "user", "content": _MARK}]
        views = [View(1, add_generation_prompt=opens) for opens in (False, True)]
        ended, opened = self._rendered(asked, variables, views)
        opens = opened.removeprefix(ended)
        opening = _OPENING.search(opens)
        head = opens[: opening.start()] if opening is not None and opening[0].strip() else opens
        before, found, _ = text.partition(head)
        if not head.strip() or not found or _MARK in opens:
            said = "messages[0] is the assistant's, and the chat template does not tell where it "
            raise BadLineError(f"{said}begins; begin with the user's turn, or leave it out")
        return before + opens

    @property
    def turn_ends(self) -> TurnEnds:
        """The texts that end an assistant's turn."""
        texts = {key: value for key, value in self.kwargs.items() if isinstance(value, str)}
        variables = tuple(sorted({**self.special_tokens, **texts}.items()))
        return turn_ends(self.source, variables, self.added_tokens)

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an assistant's turn, with and without tools. Most are one token each."""
        others = self.with_tools.stops if self.with_tools is not None else ()
        return tuple(dict.fromkeys([*self.turn_ends.stops, *others]))

    def _learned_from(
        self, prompt: str, text: str, turns: list[Message], variables: Mapping[str, Any]
    ) -> tuple[int, str]:
        """Return the character from which the last of ``turns`` is learned, and the whole text.

        The model continues the generation prompt, so the prompt itself is not learned. If the
        prompt opens a thought (``<think>``) that the turn does not have, the turn is learned from
        the place where the thought would begin. If the template leaves out the thought of even the
        last turn, the thought is added to the text.

        Args:
            prompt: the conversation up to the turn, with the generation prompt.
            text: the conversation with the turn.
            turns: the turns of ``text``.
            variables: further variables of the template.

        Raises BadLineError: the text does not begin with the prompt, and does not tell where the
        turn begins; or the template begins another turn behind the last one.
        """
        opening = _opening_in(prompt)
        head = prompt[: opening.start()] if opening[0].strip() else prompt
        thought = _Thought.of(turns[-1], opening)
        turn = f"messages[{len(turns) - 1}]"
        if opening["open"] and text.rstrip().endswith(opening[0].strip()):
            said = f"the chat template begins another turn behind {turn}, an assistant's"
            raise BadLineError(f"{said}; give another one", "data.chat_template")
        if thought is not None and not self._shows(thought, text[len(head) :], turns, variables):
            _, found, behind = self._changed(turns, variables, {"content": _OPEN}).rpartition(_OPEN)
            text = head + thought.said + behind if found else text
        if not text.startswith(head):
            own = self._own_text(turns, variables)
            if own is None:
                said = (
                    f"the chat template's generation prompt does not begin its rendering of {turn}"
                )
                raise BadLineError(f"{said}; give another template in data.chat_template")
            text = prompt + own
        start = len(prompt) if text.startswith(prompt) else len(head)
        if start < len(prompt):
            _warn_of_opening(opening, thought)
        return start, text[:start] + text[start:].rstrip()

    def _check_openings(
        self, turns: list[Message], variables: Mapping[str, Any], learned: Sequence[int]
    ) -> None:
        """Warn of learned turns whose generation prompt ends with a thought that they do not have.

        For templates that mark the text to learn, whose prompts are not rendered otherwise.
        """
        switches = {**self.special_tokens, **self.kwargs, **variables, "tools": None}
        switches = json.dumps({**switches, "documents": None}, default=str)
        if not _opens_thoughts(self.source, switches):
            return
        for i in learned:
            views = [View(i, add_generation_prompt=True), View(i + 1, add_generation_prompt=False)]
            with suppress(BadLineError):  # the marked text may be rendered nevertheless
                prompt, text = self._rendered(turns, variables, views)
                opening = _opening_in(prompt)
                begins = text.startswith(prompt[: opening.start()])
                if begins and opening[0].strip() and not text.startswith(prompt):
                    _warn_of_opening(opening, _Thought.of(turns[i], opening))

    def _own_text(self, turns: list[Message], variables: Mapping[str, Any]) -> str | None:
        """Return the text that the template writes for the last of ``turns`` alone.

        A template may write the earlier turns differently once the last turn follows. GPT-OSS's
        template drops the analysis of calls as soon as there is an answer, but a model that writes
        the answer still sees the analysis. DeepSeek-V3's template closes results at the end of a
        generation prompt, and leaves them open before further calls. Hermes-3's template ends the
        line of a result that is not the last one. So a mark replaces the content of the turn
        before the last, and the text behind the mark in the generation prompt is compared with the
        text behind the mark in the whole conversation.

        None: the texts do not tell where the turn begins.
        """
        asked = turns[-2].get("content") if len(turns) > 1 else None
        if not isinstance(asked, str) or not asked.strip():
            return None
        turns = [*turns[:-2], {**turns[-2], "content": _MARK}, turns[-1]]
        size = len(turns)
        views = [
            View(size - 1, add_generation_prompt=True),
            View(size - 1, add_generation_prompt=False),
            View(size, add_generation_prompt=False),
        ]
        behind = [text.rpartition(_MARK) for text in self._rendered(turns, variables, views)]
        if not all(found for _, found, _ in behind):
            return None
        prompt, closed, said = (rest for *_, rest in behind)
        if said.startswith(prompt):
            return said[len(prompt) :]
        opens = prompt.removeprefix(closed)
        before, found, own = said.partition(opens) if opens.strip() else (said, "", "")
        if found and "".join(before.split()) == "".join(closed.split()):
            return own  # only whitespace differs before the turn begins
        answer = {"role": "assistant", "content": "x"}
        view = View(size, add_generation_prompt=False)
        (answered,) = self._rendered([*turns[:-1], answer], variables, [view])
        if prompt != closed or not answered.rpartition(_MARK)[2].startswith(prompt):
            return None  # the prompt begins no turn, or not the turn that the template writes
        # Both texts have the end of the turn before the last. The turn begins where they differ, or
        # if they differ within a token, at the beginning of this token.
        pairs = enumerate(zip(prompt, said, strict=False))
        parting = next((i for i, (a, b) in pairs if a != b), min(len(prompt), len(said)))
        tokens = "|".join(map(re.escape, sorted(self.added_tokens, key=len, reverse=True)))
        found = re.finditer(tokens or "(?!)", said)
        within = (token.start() for token in found if token.start() < parting < token.end())
        return said[next(within, parting) :]

    def _shows(
        self,
        thought: "_Thought",
        text: str,
        turns: list[Message],
        variables: Mapping[str, Any],
    ) -> bool:
        """Return whether ``text``, a rendering of ``turns``, shows the thought of the last one."""
        if re.search(rf"{re.escape(thought.text)}\s*(?:{_CLOSED})", text, re.I):
            return True
        return _OPEN in self._changed(turns, variables, thought.marked)

    def _changed(
        self, turns: list[Message], variables: Mapping[str, Any], changes: dict[str, str]
    ) -> str:
        """Render a conversation with ``changes`` in its last turn."""
        turns = [*turns[:-1], {**turns[-1], **changes}]
        view = View(len(turns), add_generation_prompt=False)
        return next(self._rendered(turns, variables, [view]))

    def _marked_documents(
        self, turns: list[Message], variables: Mapping[str, Any], learned: Sequence[int]
    ) -> list[Rendered]:
        """Render a conversation by a template that marks the text to learn.

        One text is enough if it shows all that is learned. If the template drops the thought of an
        earlier turn, this turn is learned in a text that ends with it.

        Returns:
            The texts, each up to its last span. The spans are those that the template marks,
            except in assistant's turns that are not in ``learned``.

        Raises BadLineError: the template marks no text, or other spans if texts change.
        """
        text, spans = self._with_marks(turns, variables)
        num_answers = sum(turn["role"] == "assistant" for turn in turns)
        probes = [_Probe.of(turn, i) for i, turn in enumerate(turns)]
        thoughtful = [i for i in learned if probes[i].thought and i + 1 < len(turns)]
        documents: list[Rendered] = []
        if len(learned) < num_answers or thoughtful:
            # Find the turn that each span belongs to, and the thoughts that are dropped.
            probed, found = self._with_marks([probe.turn for probe in probes], variables)
            if len(found) != len(spans):
                said = "the chat template marks other spans with {% generation %} if texts change"
                raise BadLineError(f"{said}; give another one", "data.chat_template")
            seen = "".join(probed[a:b] for a, b in found)
            dropped = [i for i in thoughtful if probes[i].thought not in seen]
            for i in dropped:
                documents += self._marked_documents(turns[: i + 1], variables, [i])
            kept = {*learned}.difference(dropped)
            owners = [_owner(probed, span, turns) for span in found]
            of_others = [turns[i]["role"] == "assistant" and i not in kept for i in owners]
            spans = [span for span, other in zip(spans, of_others, strict=True) if not other]
            if not kept:
                return documents
        if not spans:
            problem = "the chat template marks no text with {% generation %}, though there is an "
            problem += "assistant's turn; give another one"
            raise BadLineError(problem, "data.chat_template")
        return [*documents, Rendered(text[: spans[-1][1]], spans)]

    def _with_marks(self, turns: list[Message], variables: Mapping[str, Any]) -> Rendered:
        """Return the rendering of ``turns``, with the spans that the template marks."""
        view = View(len(turns), add_generation_prompt=False, marks=(_OPEN, _CLOSE))
        (marked,) = self._rendered(turns, variables, [view])
        return self._marks(marked)

    @staticmethod
    def _marks(marked: str) -> Rendered:
        """Return the text without marks, and the spans between them."""
        text, spans, starts = "", [], []
        for piece in re.split(f"({_OPEN}|{_CLOSE})", marked):
            if piece == _OPEN:
                starts.append(len(text))
            elif piece == _CLOSE:
                start = starts.pop()
                if not starts and start < len(text):
                    spans.append((start, len(text)))
            else:
                text += piece
        return Rendered(text, spans)

    def prompt(
        self,
        messages: object,
        variables: Mapping[str, Any] = MappingProxyType({}),
        strict: bool = False,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Render the text that the assistant's next turn continues. Raises as :meth:`documents`.

        Args:
            messages: as in :meth:`documents`.
            variables: as in :meth:`documents`.
            strict: True: refuse a conversation if the template does not show all of it.
                False: warn once for each kind of text that it does not show.
            add_generation_prompt: True: the text ends with the beginning of an assistant's turn,
                as in ``transformers``.
            continue_final_message: True: the text ends with the content of the last message, which
                is the assistant's, and without the end of its turn, as in ``transformers``.
        """
        turns, variables = self._prompt_read(messages, variables, strict)
        if self.with_tools is not None and variables.get("tools") is not None:
            return self.with_tools.prompt(
                turns,
                variables,
                strict,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
        turns = self._prompt_turns(turns, variables, strict)
        opens = add_generation_prompt and not continue_final_message
        view = View(len(turns), add_generation_prompt=opens)
        text = next(self._rendered(turns, variables, [view]))
        return self._cut_behind_content(text, turns[-1]) if continue_final_message else text

    @staticmethod
    def _cut_behind_content(text: str, turn: Mapping[str, Any]) -> str:
        """Return ``text`` up to the end of the content of ``turn``, the last turn in it.

        Raises BadLineError: ``turn`` is no text by the assistant, or the template rewrites it.
        """
        content = turn.get("content") or ""
        if isinstance(content, list):
            content = content[-1]["text"]
        if turn["role"] != "assistant" or not content.strip():
            said = "continue_final_message: the last message is not a text by the assistant"
            raise BadLineError(f"{said}; send one, or leave this out")
        start = text.rfind(content.strip())
        if start < 0:
            said = "continue_final_message: the chat template rewrites the last message"
            raise BadLineError(f"{said}; leave this out")
        # Whitespace at the end of the content is part of it, unless the template strips it.
        if text[start:].startswith(content.lstrip()):
            return text[: start + len(content.lstrip())]
        return text[: start + len(content.strip())]

    def check_prompt(self, messages: object, variables: Mapping[str, Any]) -> None:
        """Raise the errors of a strict :meth:`prompt`.

        Conversations that differ only in their texts are rendered once.
        """
        turns, variables = self._prompt_read(messages, variables, strict=True)
        if self.with_tools is not None and variables.get("tools") is not None:
            return self.with_tools.check_prompt(turns, variables)
        self._prompt_turns(turns, variables, strict=True)
        return None

    def _prompt_read(
        self, messages: object, variables: Mapping[str, Any], strict: bool
    ) -> tuple[list[Message], Mapping[str, Any]]:
        """Return the turns of :meth:`prompt` and their variables."""
        turns, _ = self._read(messages, strict=strict)
        turns = without_filled(turns, variables.get("tools"))
        return turns, _with_tools_once(turns, variables) if strict else variables

    def _prompt_turns(
        self, turns: list[Message], variables: Mapping[str, Any], strict: bool
    ) -> list[Message]:
        """Return the turns of :meth:`prompt` in the form that the template takes."""
        if strict:
            refuse_attached(turns, variables, self._reads_key)
        view = View(len(turns), add_generation_prompt=True)
        form, lost = self._find_form(turns, variables, view)
        for piece in lost:
            if strict:
                _refuse(piece, turns)
            _warn_of_unshown(piece.kind)
        return form.of(turns)

    @staticmethod
    def variables_of(record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables that a conversation's record has beside ``messages``.

        ``tools`` and ``documents`` are lists of objects, ``chat_template_kwargs`` an object of
        other variables (``{"enable_thinking": false}``), as in TRL's data sets and vLLM's requests.
        ``functions`` is read if there is no ``tools``. Each may be JSON as text, as in tables. An
        empty text counts as no value. The template gets no other keys. Tools get the form that
        ``transformers`` takes (:func:`~moetrain.data.tools.read_tools`).

        Raises BadLineError: a value has another type, or a variable has a reserved name.
        """
        found = {key: record.get(key) for key in ("tools", "documents", "chat_template_kwargs")}
        if found["tools"] is None:
            found["tools"] = record.get("functions")
        for key, value in found.items():
            found[key] = _parsed(value, f"`{key}`") if value != "" else None
        variables = found.pop("chat_template_kwargs")
        if not isinstance(variables, dict | None):
            said = f"`chat_template_kwargs` is not an object: {shortened(variables)}"
            raise BadLineError(f'{said}; give one such as {{"enable_thinking": false}}')
        if taken := sorted(_RESERVED.intersection(variables or {})):
            problem = f"has {taken[0]!r}, which cannot be set there; leave it out"
            raise BadLineError(f"`chat_template_kwargs` {problem}")
        for key, value in found.items():
            if not isinstance(value, list | None):
                said = f"`{key}` is not a list of objects: {shortened(value)}"
                raise BadLineError(f"{said}; give such a list, or its JSON as text")
            entries = [_parsed(x, f"{key}[{i}]") for i, x in enumerate(value or ())]
            for i, entry in enumerate(entries):
                if not isinstance(entry, dict):
                    said = f"{key}[{i}] is not an object: {shortened(entry)}"
                    raise BadLineError(f"{said}; give one, or its JSON as text")
            found[key] = None if value is None else entries
        if found["tools"] is not None:
            found["tools"] = read_tools(found["tools"])
        return {**(variables or {}), **found}

    def _read(
        self, messages: object, num_given: int = 0, *, strict: bool
    ) -> tuple[list[Message], int]:
        """Read the messages. Return the turns, and how many of them are the given prompt.

        The first ``num_given`` messages are the given prompt. If ``strict`` is True, results that
        cannot be put into the order of their calls are refused.
        """
        turns = read_messages(messages, num_given=num_given, strict=strict)
        if num_given and isinstance(messages, list):
            num_given = len(read_messages(messages[:num_given], strict=strict))
        if "<tool_response>" in self.source:
            untagged = [*map(without_tags, turns)]
            if untagged != turns:
                _warn_of_tags()
            turns = untagged
        if not _reads(self.source, "tool_call_id"):
            try:
                turns = in_order_of_calls(turns)
            except BadLineError:
                if strict:
                    raise
        return turns, num_given

    def _find_form(
        self,
        turns: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        view: View,
        learned: Sequence[int] | None = None,
    ) -> tuple[Form, Sequence[Piece]]:
        """Find the form of ``turns`` that the template shows most of.

        The conversation is rendered with marks in place of its texts, so the result holds for all
        conversations that differ only in their texts.

        Args:
            turns: the conversation.
            variables: further variables of the template.
            view: the rendering that has to show everything.
            learned: the turns that are learned. A rendering that ends with one of them has to show
                its reasoning. None: this holds for all turns.

        Returns:
            The form, and the pieces that the template does not show.

        Raises BadLineError: the template does not read a variable that seems to hold a text.
        """
        reads_parts = _READS_PARTS.search(self.source) is not None
        knows_developers = "developer" in self.source
        forms = forms_of(turns, reads_parts=reads_parts, knows_developers=knows_developers)
        needed = range(view.num_turns) if learned is None else learned
        found = marked(turns[: view.num_turns], variables, {*needed})
        all_variables = {**self.special_tokens, **self.kwargs, **found.variables}
        for name in {*self.kwargs, *variables} - {"tools", "documents"}:
            if all_variables[name] and not _reads(self.source, name):
                is_text = name in variables and not words_of(name).isdisjoint(_OF_TEXTS)
                if is_text and not _is_written(variables[name], turns, variables.get("tools")):
                    raise BadLineError(
                        f"the chat template does not read {name!r} of chat_template_kwargs: "
                        f"{shortened(variables[name])}; write it as a system turn or as `tools`, "
                        "or name a template that reads it in data.chat_template"
                    )
                _warn_of_unread(name)
        shape = _Shape(
            turns=found.turns,
            variables=all_variables,
            pieces=found.pieces,
            forms=forms,
            view=view,
            learned=learned,
        )
        try:
            pickled = pickle.dumps(shape)
        except (AttributeError, RecursionError, TypeError, pickle.PicklingError):
            return forms[0], ()  # rendering it fails too, with an error
        with self._naming_errors():
            return _best_form(self.source, pickled)

    def _rendered(
        self,
        turns: list[Message],
        variables: Mapping[str, Any],
        views: Sequence[View],
    ) -> Iterator[str]:
        """Render views of ``turns``. Raises as :meth:`_naming_errors`."""
        all_variables = {**self.special_tokens, **self.kwargs, **variables}
        with self._naming_errors():
            yield from render(self.source, turns, all_variables, self.now, views)

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        """Turn errors of the template into those of :meth:`documents`, and name its file.

        A template that cannot be compiled becomes a ConfigError, any other error a BadLineError.
        """
        try:
            yield
        except TemplateSyntaxError as error:
            where = f"{self.file}: " if self.file else ""
            raise ConfigError("data.chat_template", f"{where}{error}") from None
        except TemplateError as error:
            name = f"chat template {self.file}" if self.file else "chat template"
            raise BadLineError(f"the {name} fails: {error}{_remedy_for(error)}") from None


def _remedy_for(error: TemplateError) -> str:
    """Return what to do about a variable that a template reads and nothing defines, else ""."""
    undefined = re.fullmatch(r"'(\w+)' is undefined", str(error))
    if undefined is None:
        return ""
    remedy = f'set it in {_KWARGS}, such as {{"{undefined[1]}": "..."}}'
    if undefined[1].endswith("_token"):
        remedy = f"name a tokenizer that has it in data.tokenizer or model.path, or {remedy}"
    return f"; {remedy}"


class _Thought(NamedTuple):
    """The thought of an assistant's turn."""

    text: str
    """The thought itself."""
    said: str
    """The thought and the turn's content, as a model writes both."""
    marked: dict[str, str]
    """The keys of the turn that hold the thought, with a mark in its place."""

    @classmethod
    def of(cls, turn: Mapping[str, Any], opening: re.Match[str]) -> Self | None:
        """Return the thought of ``turn``.

        A thought within the content stays as it is. A thought under a key of its own is written as
        a model would continue ``opening``, the end of a generation prompt. Its closing tag stands
        on a line of its own if its opening tag does.

        None: the turn has no thought, or the prompt does not tell how to write one.
        """
        content, reasoning = turn.get("content", ""), turn.get("reasoning_content")
        if not isinstance(content, str):
            return None
        begin = opening["open"] or _opening_of(opening["closed"] or "")
        blanks = opening["blanks"] or ""
        if isinstance(reasoning, str) and begin:
            thought, line = reasoning.strip(), "\n" if "\n" in blanks else ""
            close = _PAIRS.get(begin) or f"{begin[0]}/{begin[1:]}"
            said = f"{begin}{blanks}{thought}{line}{close}{line}{line}{content}"
            return cls(thought, said, dict.fromkeys(REASONING, _OPEN))
        if (found := _THOUGHT.match(content)) is None:
            return None
        marked = {"content": f"{found['open'] or ''}{_OPEN}{content[found.start('close') :]}"}
        said = content if found["open"] else f"{begin}{blanks}{content}"
        return cls(found["thought"].strip(), said, marked)


def _opening_of(closing: str) -> str:
    """Return the tag or mark that opens a thought which ``closing`` closes."""
    opens = {close: open for open, close in _PAIRS.items()}
    return opens.get(closing) or closing.replace("/", "", 1)


class _Probe(NamedTuple):
    """A turn with marks in place of its texts. A mark in a span tells which turn the span shows."""

    turn: Message
    """The turn with marks."""
    thought: str
    """The mark of the thought. Empty: the turn has none."""

    @classmethod
    def of(cls, turn: Mapping[str, Any], i: int) -> Self:
        """Put marks into ``turn``, which has the index ``i`` in its conversation."""
        made, thought = {**turn}, f"{_MARK}thought{i:06d}"
        content, reasoning = turn.get("content"), turn.get("reasoning_content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        before, closes, answer = "".join(part["text"] for part in parts).rpartition("</think>")
        is_inline = turn["role"] == "assistant" and before.replace("<think>", "").strip() != ""
        if turn["role"] != "assistant":
            before, closes, answer = "", "", before + closes + answer
        if is_inline:
            opens = "<think>" if "<think>" in before else ""
            before = f"{opens}\n{thought}\n"
        if answer.strip():
            answer = f"\n\n{_MARK}{i:06d}" if closes else f"{_MARK}{i:06d}"
        if isinstance(content, list):
            made["content"] = [{"type": "text", "text": before + closes + answer}]
        elif content:
            made["content"] = before + closes + answer
        has_own = isinstance(reasoning, str) and reasoning.strip() != ""
        if has_own:
            made |= {key: thought for key in REASONING if key in turn}
        return cls(made, thought if has_own or is_inline else "")


def _owner(probed: str, span: tuple[int, int], turns: Sequence[Mapping[str, Any]]) -> int:
    """Return the index of the turn that a marked span belongs to.

    Args:
        probed: a rendering of the turns' :class:`_Probe`.
        span: the characters of ``probed`` that the template marks.
        turns: the conversation.

    Returns:
        The turn whose text is in the span. A span without such a text (a call, the end of a turn)
        belongs to the last turn whose text stands before it if this is the assistant's, otherwise
        to the assistant's next turn.
    """
    texts = f"{_MARK}(?:thought)?([0-9]{{6}})"
    if own := re.findall(texts, probed[slice(*span)]):
        return int(own[-1])
    before = re.findall(texts, probed[: span[0]])
    start = int(before[-1]) if before else 0
    answers = (i for i in range(start, len(turns)) if turns[i]["role"] == "assistant")
    return next(answers, start)


def _opening_in(prompt: str) -> re.Match[str]:
    """Return the end of a generation prompt that opens or closes a thought. It may be empty."""
    opening = _OPENING.search(prompt, max(0, len(prompt) - _LONGEST_OPENING))
    assert opening is not None  # the match may be empty
    return opening


@lru_cache(maxsize=1024)
def _opens_thoughts(source: str, variables: str) -> bool:
    """Return whether a generation prompt of the template ``source`` opens or closes a thought.

    ``variables`` are the template's variables, in JSON. A prompt that fails counts as True.
    """
    turns = [{"role": "user", "content": "x"}]
    views = [View(1, add_generation_prompt=True)]
    try:
        prompt = next(render(source, turns, json.loads(variables), datetime.now(), views))
    except TemplateError:
        return True
    return _opening_in(prompt)[0].strip() != ""


def _warn_of_opening(opening: re.Match[str], thought: "_Thought | None") -> None:
    """Warn that a turn with ``thought`` is learned, which does not begin as ``opening`` does."""
    has_thought = thought is not None and thought.text != ""
    if opening["closed"] and has_thought:
        _warn_of_thoughts(
            opening[0],
            "answers with a thought are learned, which no such prompt begins; ask the model for "
            "such answers with thinking on (data.chat_template_kwargs), or leave their thoughts "
            "out",
        )
    elif not opening["closed"] and not has_thought:
        _warn_of_thoughts(
            opening[0],
            "answers without a thought are learned as the chat template writes them, without a "
            "thought; ask the model for such answers with thinking off, or give thoughts as "
            "reasoning_content",
        )
    else:
        _warn_of_thoughts(
            opening[0],
            "answers are learned as they are written, without this beginning; give their thoughts "
            "as reasoning_content, or a template in data.chat_template whose answers begin as its "
            "prompts end",
        )


def _warn_of_thoughts(opening: str, learned: str) -> None:
    """Warn of ``learned``, answers that do not begin with ``opening``, the end of prompts."""
    kind = f"thoughts {opening} {learned}"
    warn_once(kind, f"generation prompts end with {opening!r}, and {learned}")


_MOST_SHAPES = 1024
"""Number of shapes whose form is cached. Conversations of a shape differ only in their texts."""


class _Shape(NamedTuple):
    """A conversation with marks in place of its texts. Conversations of one shape share it."""

    turns: list[Message]
    variables: dict[str, Any]
    pieces: Sequence[Piece]
    """The texts that the marks stand for."""
    forms: Sequence[Form]
    """The forms to try, the usual ones first."""
    view: View
    """The rendering that has to show everything."""
    learned: Sequence[int] | None
    """The turns that are learned. None: all (:meth:`ChatTemplate._find_form`)."""


@lru_cache(maxsize=_MOST_SHAPES)
def _best_form(source: str, pickled: bytes) -> tuple[Form, Sequence[Piece]]:
    """Return the first form that the template ``source`` shows whole, or else shows most of.

    ``pickled`` is a pickled :class:`_Shape`: bytes can be a key of the cache.

    Returns:
        The form, and the pieces that the template does not show.

    Raises TemplateLimitError: the template exceeds a limit.
    """
    shape: _Shape = pickle.loads(pickled)
    found: list[tuple[Form, Sequence[Piece]]] = []
    for form in shape.forms:
        # Forms that differ in nothing but calls are tried only if calls were lost.
        has_lost_calls = not found or any(x.kind == "`tool_calls`" for x in found[0][1])
        if not has_lost_calls and form.is_alike_without_calls(found[0][0]):
            continue
        rendered = partial(render, source, form.of(shape.turns), shape.variables, datetime.now())
        try:
            lost = _lost(rendered, shape, form)
        except TemplateLimitError:
            raise
        except TemplateError:
            continue
        if not lost:
            return form, ()
        found.append((form, lost))
    # If the template fails for each form, choose one in which `content` is always there. Then the
    # template's error does not only say that the content is missing.
    usual = min(shape.forms, key=lambda form: form.empty != "text")
    return min(found, key=lambda pair: len(pair[1]), default=(usual, ()))


def _lost(
    rendered: Callable[[list[View]], Iterator[str]], shape: _Shape, form: Form
) -> list[Piece]:
    """Return the pieces that the template does not show.

    A piece of an assistant's turn may be missing from ``shape.view`` if a rendering that ends with
    its turn has it, since templates change earlier turns on purpose. In assistant's turns that are
    not learned, the first lost piece of each kind decides for all lost pieces of this kind.
    """
    (text,) = rendered([shape.view])
    lost = [piece for piece in shape.pieces if not piece.is_in(text, form)]
    # Group the lost pieces of assistant's turns into cases. One rendering decides a whole case.
    cases = {
        piece: piece if piece.turn in (shape.learned or ()) else piece.kind
        for piece in lost
        if piece.turn is not None and shape.turns[piece.turn]["role"] == "assistant"
    }
    asked = {case: piece for piece, case in reversed(cases.items())}
    views = [
        View(piece.turn + 1, add_generation_prompt=False)
        for piece in asked.values()
        if piece.turn is not None
    ]
    pairs = zip(asked.items(), rendered(views), strict=True)
    shown = {case for (case, piece), own in pairs if piece.is_in(own, form)}
    return [piece for piece in lost if cases.get(piece) not in shown]


def _thought_of(piece: Piece, turns: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the reasoning that ``piece`` stands for. None: it stands for something else."""
    if piece.kind != "reasoning" or piece.turn is None:
        return None
    turn = turns[piece.turn]
    thought = turn.get("reasoning_content") or str(turn["content"]).rpartition("</think>")[0]
    return thought.strip().removeprefix("<think>").strip()


def _refuse(piece: Piece, turns: Sequence[Mapping[str, Any]]) -> None:
    """Raise a BadLineError that names ``piece``."""
    role = None if piece.turn is None else turns[piece.turn]["role"]
    said = f"the chat template does not show {piece.place}"
    said += "" if role is None else f", of role {shortened(role)}"
    remedy = "leave it out"
    if role is not None and not is_role(role):  # Olmo's `environment` has results of tools
        remedy = "write `tool` as the role of a tool's result, and `user` as that of what is said"
    raise BadLineError(f"{said}; {remedy}, or name a template that shows it in data.chat_template")


_OF_TEXTS = {"instructions", "instruction", "tools", "system", "prompt"}
"""Words in the names of variables that hold texts or tools, such as SmolLM3's
``custom_instructions`` and ``xml_tools``. What they hold must not be lost. Other variables are
switches."""


def _is_written(
    value: Any, turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> bool:
    """Return whether each text, or each tool, of a variable is also in a turn or in ``tools``.

    ``tools`` are in OpenAI's form. SmolTalk2's ``xml_tools`` is a list of tools as texts of JSON.
    """
    entries = value if isinstance(value, list) else [value]
    texts = [x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for x in entries]
    shown = [text_of(turn) for turn in turns]
    return all(is_said(x, shown) or _is_declared(x, turns, tools) for x in texts)


def _is_declared(
    text: str, turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> bool:
    """Return whether ``text`` is the JSON of tools in ``tools`` or in the system's turn."""
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        return False
    entries = entries if isinstance(entries, list) else [entries]
    if not entries or not are_tools(entries):
        return False
    found = read_tools(entries)
    if tools is not None and all(tool in tools for tool in found):
        return True
    with suppress(BadLineError):  # the system's turn has some of the tools
        return are_listed(found, turns)
    return False


@lru_cache(maxsize=1024)
def _reads(source: str, name: str) -> bool:
    """Return whether the template ``source`` contains the word ``name``."""
    return re.search(rf"\b{re.escape(name)}\b", source) is not None


@lru_cache(4096)
def _has_variable(source: str, name: str) -> bool:
    """Return whether the template ``source`` seems to read a variable that it is given.

    The first statement with the name tells: it may set the name without reading it.
    """
    read = re.compile(rf"(?<![\w.]){re.escape(name)}\b(?!\s*[=(])")
    for code in re.findall(r"\{[{%][-+]?(.*?)[-+]?[%}]\}", source, re.S):
        code = re.sub(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", "''", code)
        code = re.sub(r"\|\s*\w+|\bis\s+(?:not\s+)?\w+", " , ", code)  # filters, tests
        given = re.match(r"\s*(?:set\s+([^=]*)=|for\s(.*?)\sin\b|macro\s(.*))", code, re.S)
        if read.search(code[given.end() :] if given else code):
            return name != "loop"
        if given and name in re.findall(r"\w+", given[0]):
            return False
    return False


def _warn_of_unread(name: str) -> None:
    warn_once(
        f"unread {name}",
        f"the chat template does not read {name!r}, which chat_template_kwargs or a request sets: "
        "it changes nothing",
    )


def _parsed(value: Any, what: str) -> Any:
    """Return ``value``, or the JSON in it if it is text. Raises BadLineError: it is not JSON."""
    return parse_json(value, what) if isinstance(value, str) else value


def _with_tools_once(
    turns: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return ``variables`` without ``tools`` if the system's turn lists them already.

    In such records (NousResearch's hermes-function-calling) ``tools`` repeats the text of the turn.
    The model sees the tools as the turn writes them.

    Raises BadLineError: the two lists differ.
    """
    if not are_listed(variables.get("tools") or (), turns):
        return variables
    _warn_of_repeated_tools()
    return {**variables, "tools": None}


def _warn_of_repeated_tools() -> None:
    warn_once(
        "repeated tools",
        "records list their tools in the system's turn and in `tools`: they are shown once, as the "
        "turn has them; to show them as the template writes them, leave the list out of the turn",
    )


def _warn_of_undeclared(name: str) -> None:
    warn_once(
        "undeclared tools",
        f"records call a tool that they do not declare, such as {name!r}: a model learns to call "
        "what it is not shown; give the tools of each record in `tools`",
    )


def _warn_of_role(role: str) -> None:
    warn_once(
        f"role {role}",
        f"the role {role!r} is none of system, developer, user, assistant and tool: such turns are "
        "rendered as the chat template writes them, and are not learned",
    )


def _warn_of_names(turns: Iterable[Mapping[str, Any]], text: str) -> None:
    """Warn of the first speaker's ``name`` that ``text``, the rendered turns, does not have."""
    speakers = (turn.get("name") for turn in turns if turn["role"] in ("user", "assistant"))
    for name in speakers:
        if isinstance(name, str) and name.strip() and name.strip() not in text:
            warn_once(
                "names of speakers",
                f"the chat template does not show the `name` of a turn, such as {shortened(name)}: "
                "write it in the `content`, or leave it out",
            )
            return


def _warn_of_tags() -> None:
    warn_once(
        "tags of results",
        "results of tools have <tool_response> tags around them, which the chat template writes "
        "too: the tags are written once",
    )


def _warn_of_unshown(kind: str) -> None:
    warn_once(
        f"not shown {kind}",
        f"the chat template does not show {kind}, which requests have: the model does not see it",
    )


def _read_kwargs(text: str) -> dict[str, Any]:
    """Read data.chat_template_kwargs.

    Raises ConfigError: ``text`` is no JSON object, or sets a reserved name.
    """
    try:
        kwargs: Any = json.loads(text)
    except (ValueError, RecursionError):
        problem = f"{shortened(text)} is not JSON; write an object such as"
        raise ConfigError(_KWARGS, f'{problem} {{"enable_thinking": false}}') from None
    if not isinstance(kwargs, dict):
        problem = f"{shortened(text)} is no JSON object; write one such as"
        raise ConfigError(_KWARGS, f'{problem} {{"enable_thinking": false}}')
    if taken := sorted(_RESERVED.intersection(kwargs)):
        raise ConfigError(_KWARGS, f"has {taken[0]!r}, which cannot be set there; leave it out")
    return kwargs


def _read(file_name: str) -> str:
    """Read the file of a template. Raises ConfigError: it cannot be read as text."""
    try:
        return read_regular(Path(file_name), _MAX_BYTES).decode()
    except (FileNotFoundError, NotADirectoryError):
        links = os.path.lexists(file_name)
        problem = "is a link to nothing" if links else "does not exist"
    except (OSError, ValueError) as error:  # a null byte in the name, or text that is not UTF-8
        said = error.strerror if isinstance(error, OSError) else error
        problem = f"cannot be read as text: {said}"
    raise ConfigError("data.chat_template", f"{file_name!r} {problem}")
