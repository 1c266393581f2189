"""Compare the learned spans of chat templates with transformers' renderings, and print a table.

    python scripts/check_templates.py FOLDER [--only NAME ...]

FOLDER has files ``NAME.jinja``, such as those of TRL's package:

    pip install --no-deps --target /tmp/trl trl
    python scripts/check_templates.py /tmp/trl/trl/chat_templates

Each file is a row, and so is moetrain's own ChatML. Each column is a conversation: one turn, three
turns, calls whose arguments are JSON text or objects, thoughts in ``reasoning_content`` or in the
content, a system's and a developer's message, and three answers of which one has weight 0. A cell
says ``equal``, ``refused`` with the number of the reason below the table, or ``FAULT`` and what
differs. Templates with equal cells share a row. The exit code is 1 if there is a fault. The right
values are:

- The text up to a learned turn equals what ``transformers`` renders for the same messages. These
  can be given in several forms (arguments as objects or text; no content, null or ""; contents as
  texts or parts; developer or system). The text must agree with a form for which the template
  shows everything that was written.
- For a template with ``{% generation %}``, the spans of ``transformers``' mask are learned.
  Otherwise, if FOLDER has ``NAME_training.jinja``, the learned part of a turn is what that template
  marks, without the generation prompt. Otherwise it is what the template writes after the
  generation prompt. If the generation prompt opens a thought, it may also be what the template
  writes after the part of the prompt before that opening.
- In each case everything that the assistant wrote is learned, except turns of weight 0, and nothing
  that others wrote.
- A refusal is right if no form shows everything, if the generation prompt does not begin the turn,
  or if the template begins another turn behind each answer.

Letters behind ``equal`` name what else holds:

- **s**: the conversation is several texts, since the template rewrites earlier turns.
- **t**: the learned turn has its thought, which the template (or NAME_training) leaves out.
- **e**: the template writes no end, and the beginning of the next turn is learned as the end.
- **p**: the text before the turn is as in the generation prompt, and not as in the rendering.
- **m**: NAME_training marks less, though a model has to write it: the token that ends a call, or
  the turn's first token, which the generation prompt lacks.

Left out on purpose: images, parallel calls, and tokens (texts alone are compared).
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from moetrain.config import ConfigError
from moetrain.data.chat import ChatTemplate
from moetrain.data.messages import BadLineError
from moetrain.data.tokenizer import ByteTokenizer

Message = dict[str, Any]
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
_BAR = "[|\uff5c]"  # the usual one, and DeepSeek's
_TOKEN = re.compile(rf"<{_BAR}[^<>|\uff5c\s]+{_BAR}>|<[|]\w+>|<\w+[|]>|</?[\w:]+>|\[/?[A-Z_]+\]")
"""Form of tokens in published templates."""
_MARKS = re.compile(r"{%[-+]?\s*generation\b")

# ---- the conversations --------------------------------------------------------------------------

_ARGUMENTS = {"city": 'Zürich & "Umland"', "days": 3}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "says the weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "a place"},
                    "days": {"type": "integer", "description": "a number"},
                },
                "required": ["city"],
            },
        },
    }
]


def _user(i: int) -> Message:
    return {"role": "user", "content": f"Question {i} <b>of 'mine'</b>?"}


def _answer(i: int, **more: Any) -> Message:
    return {"role": "assistant", "content": f'Answer {i} is "so".\n\n    And more.', **more}


def _calls(arguments: object) -> list[Message]:
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "abcdefgh1", "type": "function", "function": function}
    return [
        _user(1),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefgh1", "name": "get_weather", "content": "Rain 7"},
        _answer(1),
        _user(2),
        _answer(2),
    ]


def _thoughts(inline: bool) -> list[Message]:
    turns: list[Message] = []
    for i in (1, 2):
        thought, answer = f"Thought {i}:\nso it is.", _answer(i)
        if inline:
            answer["content"] = f"<think>\n{thought}\n</think>\n\n{answer['content']}"
        else:
            answer["reasoning_content"] = thought
        turns += [_user(i), answer]
    return turns


_THREE = [turn for i in (1, 2, 3) for turn in (_user(i), _answer(i))]

CASES: dict[str, list[Message]] = {
    "one turn": _THREE[:2],
    "three turns": _THREE,
    "calls, text": _calls(json.dumps(_ARGUMENTS, ensure_ascii=False)),
    "calls, objects": _calls(_ARGUMENTS),
    "reasoning_content": _thoughts(inline=False),
    "<think>": _thoughts(inline=True),
    "system": [{"role": "system", "content": "System's rule 1."}, *_THREE[:4]],
    "developer": [{"role": "developer", "content": "Developer's rule 1."}, *_THREE[:4]],
    "weight 0": [*_THREE[:2], _user(2), _answer(2, weight=0), *_THREE[4:]],
}

# ---- what transformers renders ------------------------------------------------------------------


class _Fault(Exception):
    """The learned text differs from the right one; the message says how."""


@dataclass
class _Theirs:
    """A template rendered by transformers, for messages in one form."""

    source: str
    form: Sequence[Message]
    variables: Mapping[str, Any]
    _made: dict[tuple[int, bool], str] = field(default_factory=dict[tuple[int, bool], str])

    def text(self, num_turns: int, *, asks: bool = False) -> str:
        """Render the first turns; ``asks``: with the generation prompt."""
        if (num_turns, asks) not in self._made:
            turns: Any = copy.deepcopy([self.form[:num_turns]])
            given = {"chat_template": self.source, "add_generation_prompt": asks, **self.variables}
            self._made[num_turns, asks] = render_jinja_template(turns, **given)[0][0]
        return self._made[num_turns, asks]

    def marked(self, num_turns: int) -> tuple[str, list[tuple[int, int]]]:
        """Render the first turns, and return the text and the spans that are marked."""
        turns: Any = copy.deepcopy([self.form[:num_turns]])
        given = {"chat_template": self.source, "return_assistant_tokens_mask": True}
        texts: Any
        spans: Any
        texts, spans = render_jinja_template(turns, **given, **self.variables)
        return texts[0], [(a, b) for a, b in spans[0] if a < b]


def _forms(turns: Sequence[Message]) -> Iterator[list[Message]]:
    """Write messages in each form that templates take, the usual ones first."""
    for as_parts, role, as_text, empty in product(
        (False, True), ("developer", "system"), (False, True), ("", None, "absent")
    ):
        made = copy.deepcopy([*turns])
        for turn in made:
            turn.pop("weight", None)
            turn["role"] = role if turn["role"] == "developer" else turn["role"]
            for call in turn.get("tool_calls", ()):
                written = json.dumps(_ARGUMENTS, ensure_ascii=False)
                call["function"]["arguments"] = written if as_text else _ARGUMENTS
                turn["content"] = empty
            if turn["content"] == "absent":
                del turn["content"]
            elif as_parts and turn["content"]:
                turn["content"] = [{"type": "text", "text": turn["content"]}]
        yield made


def _written(turn: Message) -> Iterator[tuple[str, ...]]:
    """Yield the texts of ``turn``, each with the ways in which a template may write it."""
    thoughts, closes, content = turn["content"].rpartition("</think>")
    yield from ((text.strip(),) for text in (content,) if text.strip())
    thought = thoughts.removeprefix("<think>").strip() if closes else turn.get("reasoning_content")
    if thought:
        yield (thought,)
    for call in turn.get("tool_calls", ()):
        yield (call["function"]["name"],)
        for name, value in _ARGUMENTS.items():
            yield (name,)
            yield str(value), json.dumps(value, ensure_ascii=False), json.dumps(value)


def _shows(text: str, ways: tuple[str, ...]) -> bool:
    # Templates may show results as JSON, and may indent.
    return any(way in text or json.dumps(way)[1:-1] in text for way in ways)


def _shows_thoughts(turn: Message) -> bool:
    return "reasoning_content" in turn or "</think>" in turn["content"]


def _lost(theirs: _Theirs, turns: Sequence[Message]) -> list[str]:
    """Return the texts of ``turns`` that transformers does not show; thoughts may be lost."""
    lost = []
    for i, turn in enumerate(turns):
        views = [len(turns)] + [i + 1] * (turn["role"] == "assistant")
        texts = [theirs.text(view) for view in views]
        for ways in _written(turn):
            is_thought = _shows_thoughts(turn) and ways[0].startswith("Thought")
            if not is_thought and not any(_shows(text, ways) for text in texts):
                lost.append(ways[0])
    text = theirs.text(len(turns))
    called = any("tool_calls" in turn for turn in turns)
    if called and "says the weather" not in text:
        lost.append("tools")
    # The text may be JSON within JSON, or objects as Python writes them.
    if called and ('{\\"city' in text or str(_ARGUMENTS) in text):
        lost.append("arguments")
    return lost


def _right_forms(source: str, turns: Sequence[Message], variables: Any) -> list[_Theirs] | str:
    """Return the forms in which the template shows everything, or why there is none."""
    found, reasons = [], []
    for form in _forms(turns):
        theirs = _Theirs(source, form, variables)
        try:
            lost = _lost(theirs, turns)
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            reasons.append(f"fails: {error}")
            continue
        if not lost:
            found.append(theirs)
        else:
            reasons.append(f"does not show {lost[0]!r}")
    return found or reasons[0]


# ---- the comparison -----------------------------------------------------------------------------

_OPENING = re.compile(
    r"[<\[◁]/?(?:\w+:)?think\w*(?::\w+)?[>\]▷]\s*(?:</think[:\w]*>\s*)?|<\|channel>thought\s*(?:<channel\|>)?"
    r"|<\|START_THINKING\|>(?:<\|END_THINKING\|>)?"
)
"""Endings of generation prompts that open a thought, or say that there is none."""


def _compare_marked(
    found: Sequence[tuple[str, list[tuple[int, int]]]], theirs: _Theirs, turns: Sequence[Message]
) -> str:
    """Compare the learned spans of a template with marks with transformers' masks."""
    learned = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    learned = [i for i in learned if turns[i].get("weight", 1)]
    text, spans = theirs.marked(len(turns))
    of_turn = {i: _spans_of(text, spans, turns, i) for i in learned}
    expected: list[tuple[str, list[tuple[int, int]]]] = []
    for i in learned:
        said = "".join(text[a:b] for a, b in of_turn[i])
        if i + 1 < len(turns) and not all(_shows(said, ways) for ways in _written(turns[i])):
            own, marks = theirs.marked(i + 1)
            marks = _spans_of(own, marks, turns, i)
            expected.append((own[: marks[-1][1]], marks))
            del of_turn[i]
    if rest := sorted(span for spans in of_turn.values() for span in spans):
        expected.append((text[: rest[-1][1]], rest))
    if len(found) != len(expected):
        raise _Fault(f"{len(found)} texts, not {len(expected)}")
    for (said, own), (right, marks) in zip(found, expected, strict=True):
        if said != right:
            raise _Fault(f"another text: {_parting(said, right)}")
        if own != marks:
            marked = [right[a:b] for a, b in marks]
            raise _Fault(f"learned {[said[a:b] for a, b in own]}, not {marked}")
    _check_written("".join(said[a:b] for said, own in found for a, b in own), turns)
    return "s" * (len(found) > 1)


def _spans_of(
    text: str, spans: Sequence[tuple[int, int]], turns: Sequence[Message], i: int
) -> list[tuple[int, int]]:
    """Return the spans between the turns around turn ``i``."""
    start = text.index(turns[i - 1]["content"])
    after = text.find(turns[i + 1]["content"]) if i + 1 < len(turns) else -1
    return [(a, b) for a, b in spans if start < a and (after < 0 or b <= after)]


def _compare(
    found: Sequence[tuple[str, list[tuple[int, int]]]],
    theirs: _Theirs,
    training: _Theirs | None,
    turns: Sequence[Message],
) -> str:
    """Compare the learned spans of a template without marks; return the letters of the rules."""
    learned = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    learned = [i for i in learned if turns[i].get("weight", 1)]
    spans = [(text, start, end) for text, spans in found for start, end in spans]
    if len(spans) != len(learned):
        raise _Fault(f"{len(spans)} turns are learned, not {len(learned)}")
    letters = "s" * (len(found) > 1)
    for i, (text, start, end) in zip(learned, spans, strict=True):
        try:
            letters += _compare_turn(text[:start], text[start:end], theirs, training, turns, i)
        except _Fault as fault:
            raise _Fault(f"messages[{i}]: {fault}") from None
    _check_written("".join(text[start:end] for text, start, end in spans), turns)
    return "".join(sorted({*letters}))


def _compare_turn(
    before: str,
    said: str,
    theirs: _Theirs,
    training: _Theirs | None,
    turns: Sequence[Message],
    i: int,
) -> str:
    """Compare one learned turn; return the letters of the rules by which it is right."""
    letters = ""
    prompt, own = theirs.text(i, asks=True), theirs.text(i + 1).rstrip()
    rest = prompt.removeprefix(before)
    if (before + said).startswith(prompt) and rest:
        raise _Fault(f"{rest!r} is learned, which the prompt has")
    if not prompt.startswith(before) or (rest.strip() and not _OPENING.fullmatch(rest)):
        raise _Fault(f"it does not begin behind the prompt: {_parting(before, prompt)}")
    opening = re.search(f"(?:{_OPENING.pattern})$", before)
    opened = opening[0] if opening else ""
    end = "" if _writes_ends(theirs) else _end_of(theirs, turns, i)
    letters += "e" * bool(end)
    if end and not said.endswith(end):
        raise _Fault(f"it does not end with {end!r}: {said[-40:]!r}")
    body = said[: len(said) - len(end)]
    heads = [x for x in (before, before.removesuffix(opened)) if own.startswith(x)]
    behind = own[len(heads[0]) :] if heads else ""
    behind = re.sub(rf"^\s*(?:{_OPENING.pattern})", "", behind).lstrip()
    if before + body == own:
        pass
    elif heads and _is_thought_before(behind, body, turns[i]):
        letters += "t"
    elif before == prompt and own.endswith(body):
        letters += "p"
    else:
        raise _Fault(f"another text: {_parting(before + body, own)}")
    _check_written(said, [turns[i]])
    for k, turn in enumerate(turns):
        is_learned = turn["role"] == "assistant" and turn.get("weight", 1)
        if k != i and not is_learned and turn["content"] in said:
            raise _Fault(f"{turn['content']!r} is learned")
    if training is not None:
        letters += _compare_with_marks(said, body, training, turns, i)
    return letters


def _compare_with_marks(
    said: str, body: str, training: _Theirs, turns: Sequence[Message], i: int
) -> str:
    """Compare a turn with the spans that the training variant marks in it.

    ``body``: the learned text of the turn without the beginning of the next one.
    """
    text, spans = training.marked(i + 1)
    asked = turns[i - 1]["content"]
    start = text.rindex(asked) + len(asked)
    marked = "".join(text[a:b] for a, b in spans if a >= start)
    prompt = training.text(i, asks=True)
    prompts = (prompt, _OPENING.sub("", prompt[-40:]))
    tails = (each[k:] for each in prompts for k in range(len(each)) if marked.startswith(each[k:]))
    right = marked.removeprefix(next(tails, "")).rstrip()
    if right in (said, body) or marked.rstrip() in (said, body):
        return ""
    if right and _is_thought_before(right.lstrip(), body, turns[i]):
        return "t"
    header, found, end = body.partition(right)
    if found and all(not each or _TOKEN.match(each.strip()) for each in (header, end)):
        return "m"
    raise _Fault(f"learned {body!r}, and marked is {right!r}")


def _is_thought_before(behind: str, body: str, turn: Message) -> bool:
    """Return True if ``body`` is the thought of ``turn``, with its marks, and then ``behind``."""
    if not _shows_thoughts(turn) or not body.endswith(behind):
        return False
    first = body.removesuffix(behind)
    for thought, *_ in _written(turn):
        if thought.startswith("Thought"):
            first = first.replace(thought, "")
    return not _TOKEN.sub("", _OPENING.sub("", first)).strip()


def _writes_ends(theirs: _Theirs) -> bool:
    """Return True if the template writes something after an answer."""
    form: list[Message] = copy.deepcopy(_THREE[:2])
    for turn in form:
        if isinstance(theirs.form[-1]["content"], list):
            turn["content"] = [{"type": "text", "text": turn["content"]}]
    text = _Theirs(theirs.source, form, theirs.variables).text(2)
    return not text.rstrip().endswith(str(_THREE[1]["content"]))


def _end_of(theirs: _Theirs, turns: Sequence[Message], i: int) -> str:
    """Return how the next turn begins: its first token, or everything before its content."""
    following = turns[i + 1] if i + 1 < len(turns) else {"role": "user", "content": "Next?"}
    form = [*theirs.form[: i + 1], {**following}]
    text = _Theirs(theirs.source, form, theirs.variables).text(i + 2)
    own = theirs.text(i + 1).rstrip()
    last = turns[i]["content"].rpartition("</think>")[2].strip() or own[-20:]
    between = text.rpartition(last)[2].partition(following["content"])[0]
    token = _TOKEN.match(between.strip())
    blanks = between[: len(between) - len(between.lstrip())]
    return blanks + (token[0] if token else between.strip())


def _check_written(said: str, turns: Sequence[Message]) -> None:
    """Raise _Fault unless ``said`` has everything that the assistant wrote."""
    for turn in turns:
        if turn["role"] == "assistant" and turn.get("weight", 1):
            for ways in _written(turn):
                if not _shows(said, ways):
                    raise _Fault(f"{ways[0]!r} is not learned")


def _parting(ours: str, theirs: str) -> str:
    """Show two texts from their first difference."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    at = max(0, at - 20)
    return f"...{ours[at : at + 80]!r}, not ...{theirs[at : at + 80]!r}"


def check(source: str, training: str | None, turns: Sequence[Message]) -> str:
    """Compare a conversation under a template, and return its cell.

    Args:
        source: the template.
        training: its variant with marks around learned text; None if there is none.
        turns: the conversation.
    """
    variables = {"tools": _TOOLS} if any("tool_calls" in turn for turn in turns) else {}
    right = _right_forms(source, turns, {**SPECIAL, **variables})
    template = ChatTemplate(source, SPECIAL, added_tokens=_tokens_of(source))
    try:
        found = template.documents(copy.deepcopy([*turns]), variables)
    except (BadLineError, ConfigError) as refusal:
        reason = str(refusal).partition(";")[0]
        if isinstance(right, str) or not any(_is_learnable(each, turns) for each in right):
            return f"refused: {reason}"
        return f"FAULT: refused, though transformers shows it: {reason}"
    if isinstance(right, str):
        return f"FAULT: not refused, though transformers {right}"
    faults: list[str] = []
    for theirs in right:
        marks = None if training is None else _Theirs(training, theirs.form, theirs.variables)
        try:
            if _MARKS.search(source):
                letters = _compare_marked(found, theirs, turns)
            else:
                letters = _compare(found, theirs, marks, turns)
        except _Fault as fault:
            faults.append(str(fault))
        else:
            return f"equal ({letters})" if letters else "equal"
    return f"FAULT: {faults[0]}"


@lru_cache
def _tokens_of(source: str) -> frozenset[str]:
    """Return the tokens in a template's source and in its renderings; some are only in one."""
    shown = ""
    for turns, more in [(_THREE, {}), (_calls(_ARGUMENTS), {"tools": _TOOLS})]:
        forms = _right_forms(source, turns, {**SPECIAL, **more})
        shown += "" if isinstance(forms, str) else forms[0].text(len(turns))
    return frozenset(_TOKEN.findall(source + shown))


def _is_learnable(theirs: _Theirs, turns: Sequence[Message]) -> bool:
    """Return whether each answer is shown with its thought, behind its generation prompt."""
    for i, turn in enumerate(turns):
        if turn["role"] == "assistant":
            text, prompt = theirs.text(i + 1), theirs.text(i, asks=True)
            opening = re.search(f"(?:{_OPENING.pattern})$", prompt)
            head = prompt[: opening.start()] if opening else prompt
            begins_another = opening and text.rstrip().endswith(opening[0].strip())
            if begins_another or not text.startswith(head):
                return False
            if not all(_shows(text, ways) for ways in _written(turn)):
                return False
    return True


def rows(templates: Mapping[str, str], names: Iterable[str]) -> Iterator[list[str]]:
    """Yield the rows of the table for the templates ``names``: a name, and a cell for each case."""
    for name in names:
        training = templates.get(f"{name}_training")
        yield [name, *(check(templates[name], training, turns) for turns in CASES.values())]


def table(found: Sequence[list[str]]) -> Iterator[str]:
    """Yield the lines of Markdown: rows with equal cells together, and numbered reasons below."""
    reasons: list[str] = []
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in found:
        shown: list[str] = []
        for cell in cells:
            begin, refused, reason = cell.partition("refused: ")
            if refused and not begin:
                reason = re.sub(r"messages\[\d+\]", "messages[i]", reason)
                reasons += [] if reason in reasons else [reason]
                cell = f"refused {1 + reasons.index(reason)}"
            shown.append(cell)
        names.setdefault(tuple(shown), []).append(name)
    yield _line(["template", *CASES])
    yield _line(["---"] * (1 + len(CASES)))
    yield from (_line([", ".join(each), *cells]) for cells, each in names.items())
    yield ""
    yield from (f"{i}. {_escaped(reason)}" for i, reason in enumerate(reasons, 1))


def _line(cells: Iterable[str]) -> str:
    """Return a line of Markdown's table."""
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "\\<")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; exit code 1 if there is a fault."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", help="names of templates")
    given = parser.parse_args(arguments)
    templates = {path.stem: path.read_text() for path in sorted(given.folder.glob("*.jinja"))}
    templates["moetrain's ChatML"] = ChatTemplate.of(ByteTokenizer()).source
    found = [*rows(templates, given.only or templates)]
    print(*table(found), sep="\n")
    faults = sum(cell.startswith("FAULT") for _, *cells in found for cell in cells)
    print(f"\n{len(found)} templates, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # moetrain's own messages about each template
    sys.exit(main())
