"""Renders conversations to text, with the spans that a model learns: the assistant's turns.

A template is rendered once up to each assistant turn (with the generation prompt) and once after
it; what the second rendering adds is the turn. So any Jinja chat template works unmarked. One that
marks what to learn with ``{% generation %}`` is rendered once, as for ``transformers``' assistant
mask. A template may rewrite history (Qwen3's drops the thoughts of earlier turns). Then one text
cannot hold every turn as the model will see it, and the conversation becomes several. Of marked
templates that holds for thoughts that the one rendering drops.

Left out on purpose: turns after the last assistant turn (they carry no loss), and trailing white
space of a turn (layout, not speech).
"""

import json
import os
import pickle
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from moetrain.config import ConfigError
from moetrain.config.files import read_regular
from moetrain.config.sources import shortened
from moetrain.data.messages import (
    REASONING,
    BadLineError,
    Form,
    Piece,
    are_listed,
    forms_of,
    in_order_of_calls,
    marked,
    parse_json,
    read_messages,
    undeclared_call,
    unknown_role,
    without_tags,
)
from moetrain.data.template_worker import View
from moetrain.data.templates import (
    TemplateError,
    TemplateLimitError,
    TemplateSyntaxError,
    render,
)
from moetrain.data.tokenizer import Tokenizer
from moetrain.data.turn_ends import TurnEnds, turn_ends
from moetrain.data.warned import warn_once

_CHATML = """\
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
"""ChatML, with tools and calls as Hermes has them."""

_KWARGS = "data.chat_template_kwargs"
_MAX_BYTES = 1 << 20
"""The largest size of a template file in bytes. Published templates have at most 30 KB."""
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt"}
# Other arguments of ``apply_chat_template``, which there are no variables of the template.
_RESERVED |= {"conversation", "chat_template", "continue_final_message", "tokenize", "padding"}
_RESERVED |= {"sanitize_control_tokens", "truncation", "max_length", "return_tensors"}
_RESERVED |= {"return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
# Marks around text to learn, with a secret that no conversation can contain.
_MARK = secrets.token_hex(8)
_OPEN, _CLOSE = f"<{_MARK}>", f"</{_MARK}>"

_READS_PARTS = re.compile(
    r"content is (not )?(string|iterable|mapping)|\.type\b|\[['\"]type['\"]\]"
)
"""How a template looks that takes ``content`` as a list of parts."""
_READS_CHANNELS = re.compile(r"\.channel\b|['\"]channel['\"]")
"""Matches a template that reads the ``channel`` of a message. GPT-OSS's writes channels, and reads
none."""


_TAG = r"(?:\w+:)?(?:think|thought)\w*(?::\w+)?"
_PAIRS = {"<|channel>thought": "<channel|>", "<|START_THINKING|>": "<|END_THINKING|>"}
"""Marks around thoughts that are no tags: Gemma's and Cohere's."""
_OPENED = rf"[<\[◁]{_TAG}[>\]▷]|(?-i:{'|'.join(map(re.escape, _PAIRS))})"
_CLOSED = rf"[<\[◁]/{_TAG}[>\]▷]|(?-i:{'|'.join(map(re.escape, _PAIRS.values()))})"
_OPENING = re.compile(rf"(?:(?P<open>{_OPENED})(?P<blanks>\s*))?(?P<closed>{_CLOSED})?\s*$", re.I)
"""The end of a generation prompt: it may open a thought, or say that there is none."""
_LONGEST_OPENING = 100
"""Characters at the end of a prompt in which it is looked for."""
_THOUGHT = re.compile(rf"\s*(?P<open>{_OPENED})?(?P<thought>.*)(?P<close>{_CLOSED})", re.I | re.S)
"""The beginning of a content that has a thought."""


@dataclass
class ChatTemplate:
    """A Jinja chat template.

    It comes with strangers' checkpoints, so it runs in Jinja's sandbox and in a process with limits
    of time and memory (:mod:`moetrain.data.templates`).

    What is wrong with it is found at the first conversation: a corpus without any needs no valid
    template.
    """

    source: str
    special_tokens: Mapping[str, str]
    """Variables of the template: ``bos_token``, ..."""
    with_tools: "ChatTemplate | None" = None
    """The template for conversations that have tools; None: the same one."""
    now: datetime = field(default_factory=datetime.now)
    """One time for all texts, by ``strftime_now``."""
    file: str | None = None
    """The file that holds it, for messages."""
    added_tokens: frozenset[str] = frozenset()
    """The tokenizer's, of which one may end a turn."""
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further variables; those of a conversation come before them."""

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, file_name: str | None = None, kwargs: str | None = None
    ) -> Self:
        """Read ``file_name``, else take the tokenizer's, else ChatML.

        ``kwargs`` is data.chat_template_kwargs; None: the tokenizer's.

        Raises ConfigError: a file cannot be read, or is no template, or ``kwargs`` is malformed.
        """
        special = tokenizer.special_tokens
        given = dict(tokenizer.chat_template_kwargs) if kwargs is None else _read_kwargs(kwargs)
        added = frozenset(tokenizer.added_tokens)
        make = partial(cls, special_tokens=special, added_tokens=added, kwargs=given)
        if file_name is not None:
            template = make(_read(file_name), file=file_name)
            list(template._rendered([], {}, []))  # whoever names a file hears of its mistakes
            return template
        if tokenizer.chat_template is not None:
            tools = tokenizer.tool_template
            files = tokenizer.template_files
            with_tools = None if tools is None else make(tools, file=files[1])
            return make(tokenizer.chat_template, with_tools=with_tools, file=files[0])
        # Templates write their own BOS: so does this one, where the model knows texts to begin so.
        has_bos = tokenizer.bos_ids and "bos_token" in special
        return make("{{- bos_token }}" * bool(has_bos) + _CHATML)

    def identity(self) -> list[str]:
        """Return what decides the texts of conversations, apart from special tokens."""
        found = [self.source, *(self.with_tools.identity() if self.with_tools else ())]
        return [*found, json.dumps({**self.kwargs})] if self.kwargs else found

    @classmethod
    def put_in(cls, tokenizer: Tokenizer, file_name: str | None, kwargs: str | None) -> None:
        """Let ``file_name`` and ``kwargs`` be the tokenizer's own template and its variables.

        None: as they are. Raises as :meth:`of`.
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
        train_on: str = "all",
        given: int = 0,
        *,
        adds_ends: bool = True,
        strict: bool = True,
    ) -> list[tuple[str, list[tuple[int, int]]]]:
        """Render a conversation to its texts, each with the spans of its assistant turns.

        Args:
            messages: ``[{"role": "user", "content": "..."}, ...]``, or another form that
                :func:`~moetrain.data.messages.read_messages` reads; other keys go to the template.
            variables: further variables of the template; see :meth:`variables_of`.
            train_on: which of the assistant's turns are learned: ``all``, those behind the last
                turn of the user (``completion``), or the ``last`` one.
            given: first messages of which none is learned, since they are a prompt.
            adds_ends: whether a turn that the template writes no end for ends with the beginning
                of the next one (:class:`~moetrain.data.turn_ends.TurnEnds`).
            strict: refuse what the template does not show.

        Returns:
            Texts, and characters ``(start, end)`` of each. Every learned turn has loss in one text,
            where it is in its final form. None if all turns have weight 0.

        Raises:
            BadLineError: ``messages`` has another shape, no assistant turn, or the template fails
                or does not show something of it. Templates may drop earlier turns' reasoning.
            ConfigError: the template itself is wrong.
        """
        turns, given = self._read(messages, given, strict=strict)
        variables = _with_tools_once(turns, variables) if strict else variables
        if self.with_tools is not None and variables.get("tools") is not None:
            return self.with_tools.documents(
                turns, variables, train_on, given, adds_ends=adds_ends, strict=strict
            )
        learned = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        if train_on == "last":
            learned = learned[-1:]
        if train_on == "completion" and learned:
            asked = (i for i in range(learned[-1]) if turns[i]["role"] == "user")
            given = max(given, *asked, 0)
        learned = [i for i in learned if i >= given]
        if learned and not any(turns[i].get("weight", 1) for i in learned):
            return []
        learned = [i for i in learned if turns[i].get("weight", 1)]
        if not learned:
            said = "`messages` has no assistant turn to learn from"
            remedy = (
                "leave such records out, or let a policy answer them for a reward: moetrain rl "
            )
            remedy += "reads `messages` from rl.prompts"
            raise BadLineError(f"{said}: {shortened(messages)}; {remedy}")
        if strict:
            self._check_turns(turns, learned, variables)
        view = View(learned[-1] + 1, False)
        form, lost = self._find_form(turns, variables, view, learned)
        documents = self._documents(form.of(turns), variables, learned, adds_ends=adds_ends)
        said = "".join(text[a:b] for text, spans in documents for a, b in spans)
        # Thoughts that no rendering shows may have been added to what is learned.
        lost = [piece for piece in lost if (_thought_of(piece, turns) or _OPEN) not in said]
        if lost and strict:
            _refuse(lost[0], turns)
        return documents

    def _check_turns(
        self,
        turns: Sequence[Mapping[str, Any]],
        learned: Sequence[int],
        variables: Mapping[str, Any],
    ) -> None:
        """Warn of what is shown as it is written and may not be meant; refuse channels."""
        name = undeclared_call(turns, learned, variables.get("tools") or ())
        if name is not None:
            _warn_of_undeclared(name)
        role = unknown_role(turns)
        if role is not None:
            _warn_of_role(role)
        for i in learned:
            channel = turns[i].get("channel")
            if channel in ("analysis", "commentary") and not _READS_CHANNELS.search(self.source):
                said = f"messages[{i}].channel is {channel!r}, which the chat template does not "
                said += "read: it would be learned as an answer; give thoughts as "
                said += "`reasoning_content` of the turn that they begin, and calls as `tool_calls`"
                raise BadLineError(said)

    def _documents(
        self,
        turns: list[dict[str, Any]],
        variables: Mapping[str, Any],
        learned: Sequence[int],
        *,
        adds_ends: bool,
    ) -> list[tuple[str, list[tuple[int, int]]]]:
        """Return as :meth:`documents`, of turns in the form that the template takes."""
        if re.search(r"{%[-+]?\s*generation\b", self.source):
            return self._marked_documents(turns, variables, learned)
        documents: list[tuple[str, list[tuple[int, int]]]] = []
        views = [view for i in learned for view in (View(i, True), View(i + 1, False))]
        texts = self._rendered(turns, variables, views)
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
            goes_on = bool(documents) and text.startswith(documents[-1][0])
            spans = documents.pop()[1] if goes_on else []
            documents.append((text, [*spans, (start, len(text))]))
        return documents

    @property
    def turn_ends(self) -> TurnEnds:
        """The texts that end an assistant's turn."""
        variables = tuple(sorted(self.special_tokens.items()))
        return turn_ends(self.source, variables, self.added_tokens)

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts at which an assistant's turn is over, with tools too: mostly one token each."""
        others = self.with_tools.stops if self.with_tools is not None else ()
        return tuple(dict.fromkeys([*self.turn_ends.stops, *others]))

    def _learned_from(
        self, prompt: str, text: str, turns: list[dict[str, Any]], variables: Mapping[str, Any]
    ) -> tuple[int, str]:
        """Return where the last of ``turns`` begins to be learned, and the conversation's text.

        The model continues the generation prompt, so what that has is not learned. A prompt may
        open a thought (``<think>``) that the turn does not have: such a turn is learned from where
        the thought would begin. A template may leave thoughts out even of the last turn: what is
        learned has them.

        Args:
            prompt: the conversation up to the turn, with the generation prompt.
            text: the conversation with the turn.
            turns: the turns of ``text``.
            variables: further variables of the template.

        Raises BadLineError: the turn does not begin as the prompt does.
        """
        opening = _OPENING.search(prompt, max(0, len(prompt) - _LONGEST_OPENING))
        assert opening is not None  # it may be empty
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
        if start < len(prompt) and thought is None and not opening["closed"]:
            _warn_of_thoughts(opening[0])
        return start, text[:start] + text[start:].rstrip()

    def _own_text(self, turns: list[dict[str, Any]], variables: Mapping[str, Any]) -> str | None:
        """Return what the template writes for the last of ``turns`` alone; None: nothing tells.

        A template may write what comes before a turn otherwise once the turn follows. GPT-OSS's
        drops the analysis of calls as soon as there is an answer, which a model that writes the
        answer still sees. DeepSeek-V3's closes results where a generation prompt ends, and leaves
        them open before further calls. Hermes-3's ends the line of a result that is not the last.
        So the turn before has a mark as its content, and the texts behind the mark are compared:
        that of the prompt, and that of the whole conversation.
        """
        given = turns[-2].get("content") if len(turns) > 1 else None
        if not isinstance(given, str) or not given.strip():
            return None
        turns = [*turns[:-2], {**turns[-2], "content": _MARK}, turns[-1]]
        size = len(turns)
        views = [View(size - 1, True), View(size - 1, False), View(size, False)]
        behind = [text.rpartition(_MARK) for text in self._rendered(turns, variables, views)]
        if not all(found for _, found, _ in behind):
            return None
        prompt, closed, said = (rest for *_, rest in behind)
        if said.startswith(prompt):
            return said[len(prompt) :]
        opens = prompt.removeprefix(closed)
        before, found, own = said.partition(opens) if opens.strip() else (said, "", "")
        if found and "".join(before.split()) == "".join(closed.split()):
            return own  # blanks are all that differs before the turn begins
        answer = {"role": "assistant", "content": "x"}
        (answered,) = self._rendered([*turns[:-1], answer], variables, [View(size, False)])
        if prompt != closed or not answered.rpartition(_MARK)[2].startswith(prompt):
            return None  # the prompt begins no turn of the model, or another one
        # The texts part behind the end of the turn before, which both have, and within no token.
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
        turns: list[dict[str, Any]],
        variables: Mapping[str, Any],
    ) -> bool:
        """Return whether the template writes the thought of the last of ``turns`` in ``text``."""
        if re.search(rf"{re.escape(thought.text)}\s*(?:{_CLOSED})", text, re.I):
            return True
        return _OPEN in self._changed(turns, variables, thought.marked)

    def _changed(
        self, turns: list[dict[str, Any]], variables: Mapping[str, Any], changes: dict[str, str]
    ) -> str:
        """Render a conversation with ``changes`` in its last turn."""
        turns = [*turns[:-1], {**turns[-1], **changes}]
        return next(self._rendered(turns, variables, [View(len(turns), False)]))

    def _marked_documents(
        self, turns: list[dict[str, Any]], variables: Mapping[str, Any], learned: Sequence[int]
    ) -> list[tuple[str, list[tuple[int, int]]]]:
        """Render a conversation with marks around what is learned of it, once if that shows all.

        An earlier turn whose thought the template drops then is learned in a text that ends with
        it, as :meth:`documents` has turns that are not in their final form.

        Returns:
            Texts up to the last mark that is learned, and the marked spans, except for those of
            turns that are not ``learned``.
        """
        text, spans = self._with_marks(turns, variables)
        num_answers = sum(turn["role"] == "assistant" for turn in turns)
        probes = [_Probe.of(turn, i) for i, turn in enumerate(turns)]
        thoughtful = [i for i in learned if probes[i].thought and i + 1 < len(turns)]
        documents: list[tuple[str, list[tuple[int, int]]]] = []
        if len(learned) < num_answers or thoughtful:
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
        return [*documents, (text[: spans[-1][1]], spans)]

    def _with_marks(
        self, turns: list[dict[str, Any]], variables: Mapping[str, Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendering of ``turns``, and the spans that the template marks."""
        (marked,) = self._rendered(turns, variables, [View(len(turns), False, (_OPEN, _CLOSE))])
        return self._marks(marked)

    @staticmethod
    def _marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
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
        return text, spans

    def prompt(
        self,
        messages: object,
        variables: Mapping[str, Any] = MappingProxyType({}),
        strict: bool = False,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Render what the assistant's next turn continues; raises as :meth:`documents`.

        Args:
            strict: refuse what the template does not show; otherwise the log says so, once for
                each kind.
            add_generation_prompt: end with the beginning of an assistant's turn, as
                ``transformers`` has it.
            continue_final_message: end with the text of the last message, which is the assistant's,
                and without the end of its turn, as ``transformers`` has it.
        """
        turns, variables = self._prompt_given(messages, variables, strict)
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
        text = next(self._rendered(turns, variables, [View(len(turns), opens)]))
        return self._cut_behind_content(text, turns[-1]) if continue_final_message else text

    @staticmethod
    def _cut_behind_content(text: str, turn: Mapping[str, Any]) -> str:
        """Return ``text`` up to the end of the content of ``turn``, its last one."""
        content = turn.get("content") or ""
        if isinstance(content, list):
            content = content[-1]["text"]
        if turn["role"] != "assistant" or not content.strip():
            said = "continue_final_message: the last message is not a text of the assistant's"
            raise BadLineError(f"{said}; send one, or leave this out")
        start = text.rfind(content.strip())
        if start < 0:
            said = "continue_final_message: the chat template rewrites the last message"
            raise BadLineError(f"{said}; leave this out")
        # Blanks at its end are part of it, unless the template strips them.
        if text[start:].startswith(content.lstrip()):
            return text[: start + len(content.lstrip())]
        return text[: start + len(content.strip())]

    def check_prompt(self, messages: object, variables: Mapping[str, Any]) -> None:
        """Raise as a strict :meth:`prompt`; only the first conversation of a shape is rendered."""
        turns, variables = self._prompt_given(messages, variables, strict=True)
        if self.with_tools is not None and variables.get("tools") is not None:
            return self.with_tools.check_prompt(turns, variables)
        self._prompt_turns(turns, variables, strict=True)
        return None

    def _prompt_given(
        self, messages: object, variables: Mapping[str, Any], strict: bool
    ) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
        """Read what is given to :meth:`prompt`."""
        turns, _ = self._read(messages, strict=strict)
        return turns, _with_tools_once(turns, variables) if strict else variables

    def _prompt_turns(
        self, turns: list[dict[str, Any]], variables: Mapping[str, Any], strict: bool
    ) -> list[dict[str, Any]]:
        """Return the turns of :meth:`prompt` in the form that the template takes."""
        form, lost = self._find_form(turns, variables, View(len(turns), True))
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
        Each may be the text of its JSON, as tables have it; the template gets no other keys. Tools
        are written as ``transformers`` takes them: ``{"type": "function", "function": {...}}`` for
        a function alone, and OpenAI's older ``functions``. An empty text is none.

        Raises BadLineError: one is of another kind, or a variable has the name of something else.
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
                raise BadLineError(f"{said}; give such a list, as JSON or in JSON's text")
            entries = [_parsed(x, f"{key}[{i}]") for i, x in enumerate(value or ())]
            for i, entry in enumerate(entries):
                if not isinstance(entry, dict):
                    said = f"{key}[{i}] is not an object: {shortened(entry)}"
                    raise BadLineError(f"{said}; give one, as JSON or in JSON's text")
            found[key] = None if value is None else entries
        if found["tools"] is not None:
            found["tools"] = [*map(_as_function, found["tools"])]
        return {**(variables or {}), **found}

    def _read(
        self, messages: object, given: int = 0, *, strict: bool
    ) -> tuple[list[dict[str, Any]], int]:
        """Read the messages; return turns, and how many are of the first ``given`` messages.

        ``strict``: refuse results that cannot be in the order of their calls.
        """
        turns = read_messages(messages, num_given=given)
        if given and isinstance(messages, list):
            given = len(read_messages(messages[:given]))
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
        return turns, given

    def _find_form(
        self,
        turns: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        view: View,
        learned: Sequence[int] | None = None,
    ) -> tuple[Form, Sequence[Piece]]:
        """Find the form of ``turns`` of which the template shows most.

        It is rendered with marks in the places of texts, so conversations of one shape have one
        form.

        Args:
            view: what has to be shown.
            learned: the turns that are learned, whose reasoning has to be shown in a rendering that
                ends with them; None: it has to be shown of all turns, if they were the last.

        Returns:
            The form, and what the template does not show.
        """
        reads_parts = _READS_PARTS.search(self.source) is not None
        knows_developers = "developer" in self.source
        forms = forms_of(turns, reads_parts=reads_parts, knows_developers=knows_developers)
        needed = range(view.num_turns) if learned is None else learned
        found = marked(turns[: view.num_turns], variables, {*needed})
        given = {**self.special_tokens, **self.kwargs, **found.variables}
        for name in {*self.kwargs, *variables} - {"tools", "documents"}:
            if given[name] and not _reads(self.source, name):
                _warn_of_unread(name)
        try:
            work = pickle.dumps((found.turns, given, found.pieces, forms, view, learned))
        except (AttributeError, RecursionError, TypeError, pickle.PicklingError):
            return forms[0], ()  # which cannot be rendered either
        with self._naming_errors():
            return _best_form(self.source, work)

    def _rendered(
        self,
        turns: list[dict[str, Any]],
        variables: Mapping[str, Any],
        views: Sequence[View],
    ) -> Iterator[str]:
        given = {**self.special_tokens, **self.kwargs, **variables}
        with self._naming_errors():
            yield from render(self.source, turns, given, self.now, views)

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        """Raise errors of the template as those of :meth:`documents`, with its file's name."""
        try:
            yield
        except TemplateSyntaxError as error:  # which is no line's
            where = f"{self.file}: " if self.file else ""
            raise ConfigError("data.chat_template", f"{where}{error}") from None
        except TemplateError as error:
            name = f"chat template {self.file}" if self.file else "chat template"
            raise BadLineError(f"the {name} fails: {error}") from None


class _Thought(NamedTuple):
    """The thought of an assistant's turn."""

    text: str
    said: str
    """The turn's content with the thought, as a model writes both."""
    marked: dict[str, str]
    """Keys of the turn with a mark in place of the thought."""

    @classmethod
    def of(cls, turn: Mapping[str, Any], opening: re.Match[str]) -> Self | None:
        """Return the thought of ``turn``; None: it has none, or nothing tells how it is written.

        A thought in the content stays as it is. One of its own key is written as the model
        continues ``opening``, the end of a generation prompt: what closes it stands in a line of
        its own if what opens it does.
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
    """Return what opens a thought that ``closing`` closes."""
    opens = {close: open for open, close in _PAIRS.items()}
    return opens.get(closing) or closing.replace("/", "", 1)


class _Probe(NamedTuple):
    """A turn with marks in place of its texts, which tell whose a span of a rendering is."""

    turn: dict[str, Any]
    thought: str
    """The mark of its thought; an empty text: it has none."""

    @classmethod
    def of(cls, turn: Mapping[str, Any], i: int) -> Self:
        """Put marks into turn ``i`` of a conversation."""
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
    """Return the turn that a marked span belongs to.

    Args:
        probed: a rendering of the turns' :class:`_Probe`.
        span: characters of it, which the template marks.
        turns: the conversation.

    Returns:
        The turn whose text is in the span. One without any (a call, the end of a turn) belongs to
        the assistant that speaks there.
    """
    texts = f"{_MARK}(?:thought)?([0-9]{{6}})"
    if own := re.findall(texts, probed[slice(*span)]):
        return int(own[-1])
    before = re.findall(texts, probed[: span[0]])
    start = int(before[-1]) if before else 0
    answers = (i for i in range(start, len(turns)) if turns[i]["role"] == "assistant")
    return next(answers, start)


def _warn_of_thoughts(opening: str) -> None:
    """Warn that answers are learned that no generation prompt begins."""
    warn_once(
        f"thoughts {opening}",
        f"generation prompts end with {opening!r}, and answers without a thought are learned as "
        "the chat template writes them, without it; ask the model for such answers with thinking "
        "off, or give thoughts as reasoning_content",
    )


_MOST_SHAPES = 1024
"""Shapes of conversations whose form is remembered."""


@lru_cache(maxsize=_MOST_SHAPES)
def _best_form(source: str, work: bytes) -> tuple[Form, Sequence[Piece]]:
    """Return the first form of which the template shows all, else the one that it shows most of.

    ``work`` is pickled: the marked turns and variables, the pieces, the forms, and the last two
    arguments of :meth:`ChatTemplate._find_form`. Raises TemplateLimitError.
    """
    turns, variables, pieces, forms, view, learned = pickle.loads(work)
    found: list[tuple[Form, Sequence[Piece]]] = []
    for form in forms:
        has_lost_calls = not found or any(x.kind == "`tool_calls`" for x in found[0][1])
        if not has_lost_calls and form[2:] == found[0][0][2:]:
            continue  # calls are all that these forms differ in
        rendered = partial(render, source, form.of(turns), variables, datetime.now())
        try:
            lost = _lost(rendered, turns, pieces, form, view, learned)
        except TemplateLimitError:
            raise
        except TemplateError:
            continue
        if not lost:
            return form, ()
        found.append((form, lost))
    # No form works. The template's error for one with `content` says more than that it is missing.
    usual = min(forms, key=lambda form: form.empty != "text")
    return min(found, key=lambda pair: len(pair[1]), default=(usual, ()))


def _lost(
    rendered: Callable[[list[View]], Iterator[str]],
    turns: Sequence[Mapping[str, Any]],
    pieces: Sequence[Piece],
    form: Form,
    view: View,
    learned: Sequence[int] | None,
) -> list[Piece]:
    """Return the pieces that are neither in ``view`` nor in one that ends with their own turn.

    The second is for assistants' turns, since templates change earlier ones by design. Of turns
    that are not learned the first of each kind speaks for the others.
    """
    (text,) = rendered([view])
    lost = [piece for piece in pieces if not piece.is_in(text, form)]
    cases = {
        piece: piece if piece.turn in (learned or ()) else piece.kind
        for piece in lost
        if piece.turn is not None and turns[piece.turn]["role"] == "assistant"
    }
    asked = {case: piece for piece, case in reversed(cases.items())}
    views = [View(piece.turn + 1, False) for piece in asked.values() if piece.turn is not None]
    pairs = zip(asked.items(), rendered(views), strict=True)
    shown = {case for (case, piece), own in pairs if piece.is_in(own, form)}
    return [piece for piece in lost if cases.get(piece) not in shown]


def _thought_of(piece: Piece, turns: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the reasoning that ``piece`` stands for; None: it is something else."""
    if piece.kind != "reasoning" or piece.turn is None:
        return None
    turn = turns[piece.turn]
    thought = turn.get("reasoning_content") or str(turn["content"]).rpartition("</think>")[0]
    return thought.strip().removeprefix("<think>").strip()


def _refuse(piece: Piece, turns: Sequence[Mapping[str, Any]]) -> None:
    role = "" if piece.turn is None else f", of role {shortened(turns[piece.turn]['role'])}"
    said = f"the chat template does not show {piece.place}{role}"
    raise BadLineError(
        f"{said}; leave it out, or name a template that shows it in data.chat_template"
    )


@lru_cache(maxsize=1024)
def _reads(source: str, name: str) -> bool:
    """Return whether the template ``source`` has a variable of this name."""
    return re.search(rf"\b{re.escape(name)}\b", source) is not None


def _warn_of_unread(name: str) -> None:
    warn_once(
        f"unread {name}",
        f"the chat template does not read {name!r}, which chat_template_kwargs or a request sets: "
        "it changes nothing",
    )


def _parsed(value: Any, what: str) -> Any:
    """Return ``value``, or what its JSON says if it is a text; BadLineError: it is not JSON."""
    return parse_json(value, what) if isinstance(value, str) else value


def _as_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool that is a function alone as an object of OpenAI's ``tools``."""
    is_alone = isinstance(tool.get("name"), str) and tool.get("type", "function") == "function"
    if "function" in tool or not is_alone:
        return {**tool}
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _with_tools_once(
    turns: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return ``variables`` without tools that the system's turn has already.

    Such records (NousResearch's hermes-function-calling) repeat in ``tools`` what their text says,
    so the text is what a model sees. Raises BadLineError: the two lists differ.
    """
    if not are_listed(variables.get("tools") or (), turns):
        return variables
    _warn_of_repeated_tools()
    return {**variables, "tools": None}


def _warn_of_repeated_tools() -> None:
    warn_once(
        "repeated tools",
        "records list their tools in the system's turn and in `tools`: they are shown once, as the "
        "turn has them; leave the list out of the turn for the template's",
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
        "as the chat template writes them, and not learned",
    )


def _warn_of_tags() -> None:
    warn_once(
        "tags of results",
        "results of tools have <tool_response> around them, which the chat template writes too: it "
        "is written once",
    )


def _warn_of_unshown(kind: str) -> None:
    warn_once(
        f"not shown {kind}",
        f"the chat template does not show {kind}, which requests have: the model does not see it",
    )


def _read_kwargs(text: str) -> dict[str, Any]:
    try:
        kwargs: Any = json.loads(text)
    except (ValueError, RecursionError):
        problem = f"{shortened(text)} is not JSON; write an object such as"
        raise ConfigError(_KWARGS, f'{problem} {{"enable_thinking": false}}') from None
    if not isinstance(kwargs, dict):
        problem = f"{shortened(text)} is no JSON object; write one such as"
        raise ConfigError(_KWARGS, f'{problem} {{"enable_thinking": false}}')
    if taken := sorted(_RESERVED.intersection(kwargs)):
        raise ConfigError(_KWARGS, f"has {taken[0]!r}, which records have; leave it out")
    return kwargs


def _read(file_name: str) -> str:
    try:
        return read_regular(Path(file_name), _MAX_BYTES).decode()
    except (FileNotFoundError, NotADirectoryError):
        links = os.path.lexists(file_name)
        problem = "is a link to nothing" if links else "does not exist"
    except (OSError, ValueError) as error:  # of a name with a null byte, of text that is not UTF-8
        said = error.strerror if isinstance(error, OSError) else error
        problem = f"cannot be read as text: {said}"
    raise ConfigError("data.chat_template", f"{file_name!r} {problem}")
