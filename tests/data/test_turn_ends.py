"""The learned part of an assistant's turn, in templates of every kind.

Each template is our own, with the features of a published family. Texts are written by hand, with
the learned parts in ``[...]``.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from moetrain.data.chat import BadLineError, ChatTemplate
from moetrain.data.warned import SEEN
from tests.lib.turn_ends import (
    ANSWERS,
    DROPS,
    EMPTY,
    NO_END,
    OPENS,
    QUESTIONS,
    THOUGHTS,
    THREE,
    WORDS,
)

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALLS = [
    QUESTIONS[1],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "5"},
    ANSWERS[1],
]
INLINE = [
    QUESTIONS[1],
    {"role": "assistant", "content": "<think>\nt1\n</think>\n\na1"},
    QUESTIONS[2],
    {"role": "assistant", "content": "t2\n</think>\n\na2"},
]

# An answer drops the analysis of the calls before it, although its prompt has it (as in GPT-OSS).
ANALYSIS = """\
{%- for m in messages -%}
{%- set is_last = loop.last and not add_generation_prompt -%}
{%- if m.tool_calls -%}
{%- set answers = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') %}
{%- if m.reasoning_content and not answers | rejectattr('tool_calls', 'defined') | list -%}
<|start|>assistant<|analysis|>{{ m.reasoning_content }}<|end|>
{%- endif -%}
<|start|>assistant to={{ m.tool_calls[0].function.name }}<|message|>
{{- m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' -%}
{%- if m.reasoning_content and is_last -%}
<|start|>assistant<|analysis|>{{ m.reasoning_content }}<|end|>
{%- endif -%}
<|start|>assistant<|final|>{{ m.content + ('<|return|>' if is_last else '<|end|>') }}
{%- else -%}<|start|>{{ m.role }}<|message|>{{ m.content | tojson }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""

# Only the first calls begin like an answer; results are closed in generation prompts and before
# answers alone (as in DeepSeek-V3).
ROUNDS = """\
{%- set n = namespace(has_called=false, is_result=false) -%}
{%- for m in messages -%}
{%- if m.tool_calls -%}
{{- '\\n' if n.has_called else '<|answer|><|calls|>' }}<|call|>
{{- m.tool_calls[0].function.name ~ (m.tool_calls[0].function.arguments | tojson) }}<|done|>
{%- set n.has_called = true %}{% set n.is_result = false -%}
{%- elif m.role == 'assistant' -%}
{{- ('<|closed|>' if n.is_result else '<|answer|>') + m.content }}<|done|>
{%- set n.is_result = false -%}
{%- elif m.role == 'tool' -%}<|result|>{{ m.content }}{% set n.is_result = true -%}
{%- else -%}<|{{ m.role }}|>{{ m.content }}
{%- endif -%}
{%- endfor -%}
{{- '<|closed|>' if n.is_result }}
{%- if add_generation_prompt and not n.is_result -%}<|answer|>{%- endif -%}"""


# A result's last newline is missing if no generation prompt follows (as in Hermes-3).
LINES = """\
{%- for m in messages -%}
{%- if m.tool_calls -%}{{ '<|start|>assistant\n' + m.tool_calls[0].function.name -}}
{{- m.tool_calls[0].function.arguments | tojson }}<|end|>
{%- elif m.role == 'tool' -%}<|start|>tool\n{{ m.content + ('</result>' if loop.last
    else '</result>\n') }}<|end|>
{%- else -%}<|start|>{{ m.role + '\n' + m.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant\n' }}{%- endif -%}"""


def calls_in_rounds(thoughts: bool) -> list[dict]:
    """Return two consecutive calls, an answer, and another question."""
    thought = {"reasoning_content": "t"} if thoughts else {}
    call = {"role": "assistant", "content": None, "tool_calls": [CALL], **thought}
    results = [{"role": "tool", "content": f"r{i}"} for i in (1, 2)]
    answer = {**ANSWERS[1], **thought}
    return [QUESTIONS[1], call, results[0], call, results[1], answer, QUESTIONS[2], ANSWERS[2]]


_CALLED = '<|start|>assistant to=add<|message|>{"a": 2}<|call|>'
_THOUGHT = "<|analysis|>t<|end|>"
_RESULTS = [f'<|start|>tool<|message|>"r{i}"<|end|>' for i in (1, 2)]

CASES = {
    "an answer drops the analysis of calls": (
        ANALYSIS,
        calls_in_rounds(thoughts=True),
        [
            f'<|start|>user<|message|>"q1"<|end|><|start|>assistant[{_THOUGHT}{_CALLED}]'
            f"{_RESULTS[0]}<|start|>assistant[{_THOUGHT}{_CALLED}]{_RESULTS[1]}"
            f"<|start|>assistant[{_THOUGHT}<|start|>assistant<|final|>a1<|return|>]",
            f'<|start|>user<|message|>"q1"<|end|>{_CALLED}{_RESULTS[0]}{_CALLED}{_RESULTS[1]}'
            '<|start|>assistant<|final|>a1<|end|><|start|>user<|message|>"q2"<|end|>'
            "<|start|>assistant[<|final|>a2<|return|>]",
        ],
    ),
    "results are not closed before calls": (
        ROUNDS,
        calls_in_rounds(thoughts=False),
        [
            '<|user|>q1<|answer|>[<|calls|><|call|>add{"a": 2}<|done|>]<|result|>r1<|closed|>'
            '[\n<|call|>add{"a": 2}<|done|>]',
            '<|user|>q1<|answer|><|calls|><|call|>add{"a": 2}<|done|><|result|>r1\n<|call|>add'
            '{"a": 2}<|done|><|result|>r2<|closed|>[a1<|done|>]<|user|>q2<|answer|>[a2<|done|>]',
        ],
    ),
    "a result is closed otherwise before an answer": (
        LINES,
        CALLS,
        [
            '<|start|>user\nq1<|end|><|start|>assistant\n[add{"a": 2}<|end|>]<|start|>tool\n'
            "5</result><|end|><|start|>assistant\n[a1<|end|>]",
        ],
    ),
    "no end, three turns": (
        NO_END,
        THREE,
        [
            "<bos><|user|>\nq1<|answer|>[<think></think>a1<|user|>]\nq2<|answer|>"
            "[<think></think>a2<|user|>]\nq3<|answer|>[<think></think>a3<|user|>]"
        ],
    ),
    "no end, system": (
        NO_END,
        [{"role": "system", "content": "s"}, *THREE[:2], {"role": "system", "content": "z"}],
        ["<bos><|system|>\ns<|user|>\nq1<|answer|>[<think></think>a1<|system|>]"],
    ),
    "no end, a call": (
        NO_END,
        [*CALLS, *THREE[2:4]],
        [
            '<bos><|user|>\nq1<|answer|>[<think></think><call>add{"a": 2}<|result|>]\n5<|answer|>'
            "[<think></think>a1<|user|>]\nq2<|answer|>[<think></think>a2<|user|>]"
        ],
    ),
    "no end, thoughts": (
        NO_END,
        THOUGHTS,
        [
            "<bos><|user|>\nq1<|answer|>[<think>t1</think>a1<|user|>]",
            "<bos><|user|>\nq1<|answer|><think></think>a1<|user|>\nq2<|answer|>"
            "[<think>t2</think>a2<|user|>]",
        ],
    ),
    "two answers in a row": (
        NO_END,
        [*THREE[:2], ANSWERS[2]],
        [
            "<bos><|user|>\nq1<|answer|>[<think></think>a1]<|answer|>[<think></think>a2<|user|>]",
        ],
    ),
    "words": (
        WORDS,
        THREE,
        [
            "User: q1\n\nAssistant:[ a1\n\nUser:] q2\n\nAssistant:[ a2\n\nUser:] q3\n\n"
            "Assistant:[ a3\n\nUser:]"
        ],
    ),
    "drops thoughts, plain": (
        DROPS,
        THREE,
        [
            "<|user|>q1<|answer|>[a1<|end|>]<|user|>q2<|answer|>[a2<|end|>]<|user|>q3<|answer|>"
            "[a3<|end|>]"
        ],
    ),
    "drops thoughts, of their own": (
        DROPS,
        THOUGHTS,
        [
            "<|user|>q1<|answer|><think>\n[t1\n</think>\n\na1<|end|>]",
            "<|user|>q1<|answer|>a1<|end|><|user|>q2<|answer|><think>\n[t2\n</think>\n\na2<|end|>]",
        ],
    ),
    "drops thoughts, inline": (
        DROPS,
        INLINE,
        [
            "<|user|>q1<|answer|><think>\n[t1\n</think>\n\na1<|end|>]",
            "<|user|>q1<|answer|>\n\na1<|end|><|user|>q2<|answer|><think>\n"
            "[t2\n</think>\n\na2<|end|>]",
        ],
    ),
    "drops thoughts, where the answer has the same words": (
        DROPS,
        [QUESTIONS[1], {"role": "assistant", "content": "<think>a</think>a <b>"}],
        ["<|user|>q1<|answer|>[<think>a</think>a <b><|end|>]"],
    ),
    "opens a thought, plain": (
        OPENS,
        THREE,
        [
            "<|user|>\nq1<|end|>\n<|assistant|>\n[<think></think>a1<|end|>]\n<|user|>\nq2<|end|>\n"
            "<|assistant|>\n[<think></think>a2<|end|>]\n<|user|>\nq3<|end|>\n<|assistant|>\n"
            "[<think></think>a3<|end|>]"
        ],
    ),
    "opens a thought, thoughts": (
        OPENS,
        THOUGHTS,
        [
            "<|user|>\nq1<|end|>\n<|assistant|>\n<think>\n[t1\n</think>\na1<|end|>]",
            "<|user|>\nq1<|end|>\n<|assistant|>\n<think></think>a1<|end|>\n<|user|>\nq2<|end|>\n"
            "<|assistant|>\n<think>\n[t2\n</think>\na2<|end|>]",
        ],
    ),
    "opens an empty thought": (
        EMPTY,
        THREE[:4],
        [
            "<|user|>\nq1<|end|>\n<|assistant|>\n<think>\n[\n</think>\n\na1<|end|>]\n<|user|>\nq2"
            "<|end|>\n<|assistant|>\n<think>\n[\n</think>\n\na2<|end|>]"
        ],
    ),
}


def without_tags(text: str) -> str:
    """Write thoughts between marks that are no tags, as Cohere does."""
    return text.replace("<think>", "<|START_THINKING|>").replace("</think>", "<|END_THINKING|>")


def with_suffixes(text: str) -> str:
    """Write the tags of thoughts as Hy3 does."""
    return text.replace("think>", "think:x>")


for _name in [
    "opens a thought, plain",
    "opens a thought, thoughts",
    "drops thoughts, plain",
    "drops thoughts, of their own",
]:
    for _others in (without_tags, with_suffixes):
        _source, _messages, _texts = CASES[_name]
        CASES[f"{_name}, {_others.__name__}"] = (
            _others(_source),
            _messages,
            [*map(_others, _texts)],
        )


def template_of(source: str) -> ChatTemplate:
    """Return ``source`` with a tokenizer in which each ``<|...|>`` is a token."""
    return ChatTemplate(source, {}, added_tokens=frozenset(re.findall(r"<\|\w+\|>", source)))


@pytest.mark.parametrize(("source", "messages", "expected"), CASES.values(), ids=list(CASES))
def test_learned_spans_of_a_turn_under_each_template(
    source: str, messages: list[dict[str, object]], expected: list[str]
):
    found = []
    for text, spans in template_of(source).documents(messages):
        for start, end in reversed(spans):
            text = f"{text[:start]}[{text[start:end]}]{text[end:]}"
        found.append(text)
    assert found == expected


# Thinking is off by default, and the prompt says so (as in DeepSeek-V3.1).
OFF = """\
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}<|answer|></think>{{ m.content.split('</think>')[-1] }}<|end|>
{%- else -%}<|user|>{{ m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|answer|>{{ '<think>' if thinking else '</think>' }}
{%- endif -%}"""


# Answers never have a thought, and prompts close one.
PLAIN = OFF.replace("<|answer|></think>", "<|answer|>")

# The template marks what is learned, and its prompts open or close a thought (as TRL's for Qwen3).
MARKED = """\
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}<|answer|>
{%- generation -%}
{{- '<think>' + m.reasoning_content + '</think>' if m.reasoning_content }}{{ m.content }}<|end|>
{%- endgeneration -%}
{%- else -%}<|user|>{{ m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|answer|>{{ {true: '<think>', false: '<think></think>'}.get(enable_thinking) or '' }}
{%- endif -%}"""

WITHOUT = "answers without a thought are learned as the chat template writes them"
WITH = "answers with a thought are learned, which no such prompt begins"
OTHERWISE = "answers are learned as they are written, without this beginning"
PLAINLY, THINKS = {"content": "a"}, {"content": "a", "reasoning_content": "t"}
ON, NO_THINKING = {"enable_thinking": True}, {"enable_thinking": False}


@pytest.mark.parametrize(
    ("source", "variables", "turn", "expected", "warning"),
    [
        (OPENS, {}, PLAINLY, "[<think></think>a<|end|>]", WITHOUT),
        (OPENS, {}, {**PLAINLY, "reasoning_content": ""}, "[<think></think>a<|end|>]", WITHOUT),
        (OPENS, {}, THINKS, "<think>\n[t\n</think>\na<|end|>]", None),
        (OPENS, NO_THINKING, PLAINLY, "<think></think>[a<|end|>]", None),
        (OPENS, NO_THINKING, THINKS, "[<think>\nt\n</think>\na<|end|>]", WITH),
        (OFF, {}, PLAINLY, "</think>[a<|end|>]", None),
        (OFF, {}, {"content": "<think>t</think>a"}, "[<think>t</think>a<|end|>]", WITH),
        (OFF, {"thinking": True}, {"content": "t</think>a"}, "<think>[t</think>a<|end|>]", None),
        (OFF, {"thinking": True}, THINKS, "<think>[t</think>a<|end|>]", None),
        (PLAIN, {}, PLAINLY, "[a<|end|>]", OTHERWISE),
        (DROPS, {}, {"content": "<think>t</think>a"}, "[<think>t</think>a<|end|>]", OTHERWISE),
        (MARKED, {}, THINKS, "[<think>t</think>a<|end|>]", None),
        (MARKED, ON, THINKS, "[<think>t</think>a<|end|>]", None),
        (MARKED, ON, PLAINLY, "[a<|end|>]", WITHOUT),
        (MARKED, NO_THINKING, THINKS, "[<think>t</think>a<|end|>]", WITH),
        (MARKED, NO_THINKING, PLAINLY, "[a<|end|>]", OTHERWISE),
    ],
)
def test_turns_that_no_generation_prompt_begins_are_named(
    source: str,
    variables: dict[str, bool],
    turn: dict[str, str],
    expected: str,
    warning: str | None,
    caplog: pytest.LogCaptureFixture,
):
    """There is a warning if the text of the turn does not begin with ``transformers``' prompt."""
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", **turn}]
    SEEN.clear()
    with caplog.at_level("WARNING", logger="moetrain"):
        ((text, ((start, end),)),) = template_of(source).documents(messages, variables)
    marked = f"{text[:start]}[{text[start:end]}]"
    assert re.split(r"<\|(?:answer|assistant)\|>\n?", marked)[1] == expected
    given: dict[str, Any] = {"add_generation_prompt": True, **variables}
    (prompt,), _ = render_jinja_template([messages[:1]], chat_template=source, **given)
    assert text.startswith(prompt) == (warning is None)
    said = [line for line in caplog.messages if line.startswith("generation prompts end with")]
    assert [(warning or "none") in line for line in said] == [True] * (warning is not None)


@pytest.mark.parametrize(
    ("source", "stops"),
    [
        (NO_END, ("<|user|>", "<|system|>", "<|result|>")),
        (WORDS, ("\n\nUser:", "\n\nSystem:", "\n\nTool:")),
        (DROPS, ("<|end|>",)),
        (EMPTY, ("<|end|>",)),
        ("{% for m in messages %}{{ m.content }}.{% endfor %}", ()),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ()),
        ("{{ raise_exception('no') }}", ()),
        ("{% for %}", ()),
    ],
)
def test_stops_are_the_ends_that_were_learned(source: str, stops: tuple[str, ...]):
    assert template_of(source).stops == stops


@pytest.mark.parametrize(
    "source",
    [
        ROUNDS.replace("<|closed|>' if n.is_result }}", "<|shut|>' if n.is_result }}"),
        ROUNDS.replace("if add_generation_prompt and not n.is_result", "if add_generation_prompt"),
    ],
    ids=["answers begin otherwise", "the prompt begins a turn"],
)
def test_calls_that_the_prompt_does_not_begin_are_refused(source: str):
    with pytest.raises(BadLineError, match=r"does not begin its rendering of messages\[3\]"):
        template_of(source).documents(calls_in_rounds(thoughts=False)[:4])


@pytest.mark.parametrize("says", [str, without_tags])
def test_a_template_that_begins_another_turn_behind_each_answer_is_refused(says: Callable):
    """It writes the generation prompt even if not asked (as Cohere's Command R7B does)."""
    source = says(OPENS.replace("if add_generation_prompt", "if true"))
    with pytest.raises(BadLineError, match=r"begins another turn behind messages\[1\]"):
        template_of(source).documents(THREE[:2])
