"""Conversations: the tokens of a rendered chat that carry loss."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from moetrain.config import Config, ConfigError
from moetrain.data.chat import CHATML, BadLineError, ChatTemplate
from moetrain.data.loader import Data, build_data
from moetrain.data.packing import IGNORE_INDEX
from moetrain.http.tool_calls import parse_tools
from tests.lib.chats import CONVERSATION, bpe_tokenizer

# The template keeps thoughts in the last turn only, as Qwen3's does.
FORGETFUL = """\
{%- for m in messages %}
{{- '<' + m.role + '>' }}
{%- if m.role == 'assistant' and not loop.last %}
{{- m.content.split('</think>')[-1] }}
{%- else %}
{{- m.content }}
{%- endif %}
{{- '<end>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}"""


def build(tmp_path: Path, messages: object, seq_len: int, **data: object) -> Data:
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    settings = {
        "source": "jsonl",
        "path": str(tmp_path / "chat.jsonl"),
        "eval_fraction": 0,
        "seq_len": seq_len,
        "cache_dir": str(tmp_path / "cache"),
    }
    config = Config.load({"model": {"preset": "debug"}, "data": settings | data})
    return build_data(config, 1000)


def learned(data: Data) -> list[str]:
    """Return the texts of the first row's consecutive targets, byte by byte; EOS is ``$``."""
    text = ""
    for target in data.train.row(0).targets_S.tolist():
        text += "|" if target == IGNORE_INDEX else "$" if target == 256 else chr(target)
    return [run for run in text.replace("<|im_end|>", "<end>").split("|") if run]


def as_bytes(text: str) -> str:
    """Return ``text`` with one character for each of its UTF-8 bytes."""
    return text.encode().decode("latin-1")


def test_bytes_of_assistant_turns_only(tmp_path: Path):
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CONVERSATION)
    length = len(text.rstrip().encode()) + 1
    data = build(tmp_path, CONVERSATION, length)
    row = data.train.row(0)
    assert data.tokenizer.decode(row.tokens_S.tolist()) == text.rstrip()
    assert row.lengths.tolist() == [length]
    assert learned(data) == [as_bytes("Héllo, you.<end>"), "So long<end>$"]


def test_bpe_tokens_of_assistant_turns_only(tmp_path: Path):
    folder = bpe_tokenizer(tmp_path / "bpe", eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected_ids, expected_loss = [], []
    for part, loss in [
        ("<|im_start|>system\nBe brief.<|im_end|>\n", False),
        ("<|im_start|>user\nHi thére<|im_end|>\n<|im_start|>assistant\n", False),
        ("Héllo, you.<|im_end|>", True),  # é is two tokens, one character
        ("\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n", False),
        ("So long<|im_end|>", True),  # already ends in EOS: no second one
    ]:
        ids = tokenizer.encode(part).ids
        expected_ids += ids
        expected_loss += [loss] * len(ids)
    data = build(tmp_path, CONVERSATION, len(expected_ids), tokenizer=str(folder))
    row = data.train.row(0)
    assert row.tokens_S.tolist() == expected_ids
    assert row.targets_S.tolist() == [
        token if loss else IGNORE_INDEX
        for token, loss in zip(expected_ids[1:], expected_loss[1:], strict=True)
    ] + [IGNORE_INDEX]
    assert row.targets_S[-2] == data.tokenizer.eos_id


@pytest.mark.parametrize("where", ["config", "named list", "jinja file", "setting"])
def test_where_the_template_comes_from(tmp_path: Path, where: str):
    template = "{% for m in messages %}{{ bos_token }}{{ m.role }}:{{ m.content }}.{% endfor %}"
    template += "{% if add_generation_prompt %}{{ bos_token }}assistant:{% endif %}"
    special: dict[str, object] = {"eos_token": "<|endoftext|>", "bos_token": "<|im_start|>"}
    data: dict[str, object] = {}
    if where == "config":
        special["chat_template"] = template
    if where == "named list":
        special["chat_template"] = [
            {"name": "tool_use", "template": "wrong"},
            {"name": "default", "template": template},
        ]
    folder = bpe_tokenizer(tmp_path / "bpe", **special)
    if where == "jinja file":
        (folder / "chat_template.jinja").write_text(template)
    if where == "setting":
        (tmp_path / "mine.jinja").write_text(template)
        data["chat_template"] = str(tmp_path / "mine.jinja")
    built = build(tmp_path, CONVERSATION[1:3], 32, tokenizer=str(folder), **data)
    assert built.train.row(0).tokens_S[0] == 0  # <|im_start|>, the template's bos_token
    text = "".join(
        built.tokenizer.decode(built.train.row(i).tokens_S.tolist())
        for i in range(len(built.train))
    )
    assert text.startswith("user:Hi")


def test_a_changed_template_is_another_cache(tmp_path: Path):
    (tmp_path / "a.jinja").write_text(CHATML)
    (tmp_path / "b.jinja").write_text(FORGETFUL)
    rows = [
        build(tmp_path, CONVERSATION, 256, chat_template=str(tmp_path / name)).train.row(0)
        for name in ("a.jinja", "b.jinja")
    ]
    assert rows[0].tokens_S.tolist() != rows[1].tokens_S.tolist()


def test_a_template_that_rewrites_history_gives_a_document_a_turn():
    messages = [
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "t1</think>a1"},
        {"role": "user", "content": "q2"},
        {"role": "assistant", "content": "t2</think>a2"},
    ]
    documents = ChatTemplate(FORGETFUL, {}).documents(messages)
    assert [text for text, _ in documents] == [
        "<user>q1<end><assistant>t1</think>a1<end>",
        "<user>q1<end><assistant>a1<end><user>q2<end><assistant>t2</think>a2<end>",
    ]
    assert [[text[a:b] for a, b in spans] for text, spans in documents] == [
        ["t1</think>a1<end>"],
        ["t2</think>a2<end>"],
    ]


def test_turns_after_the_last_answer_and_answers_in_a_row():
    messages = [
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "never seen"},
    ]
    ((text, spans),) = ChatTemplate(CHATML, {}).documents(messages)
    assert [text[a:b] for a, b in spans] == ["one<|im_end|>", "<|im_end|>"]
    assert "never seen" not in text


@pytest.mark.parametrize("opens", ["", "<think>\\n"])
def test_a_conversation_may_begin_with_an_answer(opens: str):
    """Such templates read the first message, as Qwen3's does, and fail without any.

    ShareGPT's conversations were divided, and many parts begin so. The text is the template's own.
    """
    template = (
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '</>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>OPENS' }}{% endif %}"
    ).replace("OPENS", opens)
    turns = [("assistant", "A1"), ("user", "Q"), ("assistant", "A2")]
    messages = [{"role": role, "content": content} for role, content in turns]
    found = ChatTemplate(template, {}).documents(messages)
    text, spans = found[-1]
    assert text == "<assistant>A1</><user>Q</><assistant>A2</>"
    assert [text[a:b] for a, b in spans] == ["A1</>", "A2</>"]


def test_calls_in_chatml_are_read_back():
    """Tools and calls are written in Hermes' form, in which they are also read."""
    tools = [{"type": "function", "function": {"name": "rain", "parameters": {}}}]
    calls = [{"function": {"name": "rain", "arguments": {"where": w}}} for w in ("Köln", "Ulm")]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "no"},
        {"role": "assistant", "content": "Dry.", "tool_calls": calls[:1]},
    ]
    ((text, spans),) = ChatTemplate(CHATML, {}).documents(messages, {"tools": tools})
    system, *turns = text.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief.\n\n")
    assert json.dumps(tools[0]) in system
    assert [turn.split("\n")[0] for turn in turns] == ["user", "assistant", "tool", "assistant"]
    first, last = (text[a:b].removesuffix("<|im_end|>") for a, b in spans)
    asked = [json.dumps(call["function"]["arguments"]) for call in calls]
    found = [("rain", arguments) for arguments in asked]
    assert parse_tools(first, {"rain": {}}) == ("<think>\nhm\n</think>", found)
    assert parse_tools(last, {"rain": {}}) == ("Dry.", found[:1])


def test_plain_text_lines_beside_conversations_keep_their_loss(tmp_path: Path):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    path = tmp_path / "chat.jsonl"
    lines = [{"text": "xy"}, {"messages": turns}, {"text": "zw"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {"source": "jsonl", "path": str(path), "eval_fraction": 0, "seq_len": 9}
    settings |= {"cache_dir": str(tmp_path), "chat_template": str(tmp_path / "t.jinja")}
    config = Config.load({"model": {"preset": "debug"}, "data": settings})
    row = build_data(config, 257).train.row(0)
    none, eos = IGNORE_INDEX, 256
    assert row.tokens_S.tolist() == [*b"xy", eos, *b"qa", eos, *b"zw", eos]
    assert row.targets_S.tolist() == [ord("y"), eos, none, ord("a"), eos, none, ord("w"), eos, none]


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        ("{% for %}", ConfigError, r"data\.chat_template: line 1 of the template"),
        ("{{ x | no_such_filter }}", ConfigError, r"data\.chat_template: line 1 of the template"),
        ("{{ " + "9" * 5000 + " }}", ConfigError, r"data\.chat_template: the template cannot be"),
        ("{{ " + "(" * 5000 + " }}", ConfigError, r"data\.chat_template: "),
        (
            "{% for a in x %}" * 25 + "{% endfor %}" * 25,
            ConfigError,
            r"data\.chat_template: the template cannot be compiled: SyntaxError: too many",
        ),
        ("{{ raise_exception('roles must alternate') }}", BadLineError, "roles must alternate"),
        ("{{ messages.append(1) }}", BadLineError, "fails: .*unsafe"),
        ("{{ messages[9].role }}", BadLineError, "fails: .*has no element 9"),
        ("{{ messages[0].role + 1 }}", BadLineError, "fails: TypeError: "),
        ("{{ 1 // (messages | length - 1) }}", BadLineError, "fails: ZeroDivisionError: "),
        ("{{ messages | sort }}", BadLineError, "fails: TypeError: "),
        ("{{ '%d' | format(messages[0].role) }}", BadLineError, "fails: TypeError: "),
        ("{{ messages | map(attribute='role') | join | from_json }}", ConfigError, "line 1"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", BadLineError, "fails: RecursionError"),
        ("{% for i in range(10**9) %}{% endfor %}", BadLineError, "fails: OverflowError"),
        ("{% include 'x' %}", BadLineError, "fails: "),
        ("{{ messages | tojson(indent=messages) }}", BadLineError, "fails: "),
        (
            "{{ messages | length }}{{ add_generation_prompt }}",
            BadLineError,
            r"does not begin its rendering of messages\[1\]",
        ),
        ("", BadLineError, r"renders no text for messages\[1\], an assistant's turn"),
        ("{{ messages[0].content }}", BadLineError, r"renders no text for messages\[1\]"),
    ],
)
def test_templates_that_fail(template: str, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        ChatTemplate(template, {}).documents(CONVERSATION[1:3])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a folder", None, "is a folder and not a file"),
        ("latin.jinja", b"caf\xe9", "cannot be read as text: .*utf-8"),
        ("no such file", b"", "does not exist"),
        ("x" * 300, b"", "cannot be read as text: File name too long"),
        ("nul\0", b"", "has characters that are not text"),
        ("bad.jinja", b"a\n{% if %}", "line 2 of the template: "),
    ],
)
def test_template_files_are_checked_before_any_text(
    tmp_path: Path, name: str, content: bytes | None, message: str
):
    if content is None:
        (tmp_path / name).mkdir()
    elif content:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"data\.chat_template: .*{message}"):
        build(tmp_path, "this is not reached", 8, chat_template=str(tmp_path / name))


def test_a_template_that_renders_nothing_is_named_with_the_line(tmp_path: Path):
    """Such a template used to train on nothing, with a loss of 0.0000 and exit code 0."""
    (tmp_path / "t.jinja").write_text("{{ bos_token }}")
    with pytest.raises(ConfigError, match=r"data\.chat_template: .*chat\.jsonl:1: .* no text for"):
        build(tmp_path, CONVERSATION, 8, chat_template=str(tmp_path / "t.jinja"))


def test_conversations_without_anything_to_learn(tmp_path: Path):
    silent = [{"role": "user", "content": "q"}, {"role": "assistant", "content": " "}]
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    settings = {"chat_template": str(tmp_path / "t.jinja")}
    with pytest.raises(ConfigError, match=r"data\.chat_template: .*data\.path without any text"):
        build(tmp_path, silent, 8, **settings)
    with pytest.raises(ConfigError, match=r"data\.chat_template: .* without any text to learn"):
        build(tmp_path, silent, 2, packing="stream", **settings)
    with pytest.raises(ConfigError, match=r"data\.seq_len: 4: the 192 tokens .* make no row"):
        build(tmp_path, CONVERSATION, 4)


def write_chats(tmp_path: Path, count: int) -> Path:
    """Write ``count`` conversations of a few to a few hundred bytes."""
    path = tmp_path / "chats.jsonl"
    turns = (
        [
            {"role": "user", "content": f"question {i} " + "why " * (i % 23)},
            {"role": "assistant", "content": f"answer {i} " + "so " * (i * 7 % 41)},
        ]
        for i in range(count)
    )
    path.write_text("".join(json.dumps({"messages": t}) + "\n" for t in turns))
    return path


@pytest.mark.parametrize(("packing", "cut"), [("auto", False), ("whole", False), ("stream", True)])
def test_conversations_are_packed_whole(
    tmp_path: Path, packing: str, cut: bool, caplog: pytest.LogCaptureFixture
):
    settings = {"source": "jsonl", "path": str(write_chats(tmp_path, 400)), "packing": packing}
    settings |= {"eval_fraction": 0.1, "seq_len": 2048, "cache_dir": str(tmp_path / "cache")}
    config = Config.load({"model": {"preset": "debug"}, "data": settings})
    with caplog.at_level("INFO", logger="moetrain"):
        data = build_data(config, 257)
    assert data.eval is not None
    for rows in (data.train, data.eval):
        begins = set()
        for row in (rows.row(i) for i in range(len(rows))):
            begins |= set(row.tokens_S[np.cumsum(row.lengths) - row.lengths].tolist())
            assert (row.is_pad_S is None) == cut
        assert (begins != {ord("<")}) == cut
    lines = [r.getMessage() for r in caplog.records if "packed " in r.getMessage()]
    assert len(lines) == 2 * (not cut)
    if not cut:
        assert "conversations into" in lines[0]
        assert float(lines[0].split("(")[1].split("%")[0]) > 95
        assert "cut" not in lines[0]


def test_a_few_conversations_hold_out_the_last_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    settings = {"source": "jsonl", "path": str(write_chats(tmp_path, 5)), "eval_fraction": 1e-9}
    settings |= {"seq_len": 512, "cache_dir": str(tmp_path / "cache")}
    config = Config.load({"model": {"preset": "debug"}, "data": settings})
    with caplog.at_level("INFO", logger="moetrain"):
        data = build_data(config, 257)
    assert data.eval is not None
    texts = [
        data.tokenizer.decode(rows.row(0).tokens_S.tolist()) for rows in (data.train, data.eval)
    ]
    assert ["question 4" in text for text in texts] == [False, True]
    assert ["question 3" in text for text in texts] == [True, False]
    assert "held out are the last 1 of all 5 documents instead" in caplog.text
    one = config.model_copy(
        update={"data": config.data.model_copy(update={"path": str(write_chats(tmp_path, 1))})}
    )
    with pytest.raises(ConfigError, match=r"data\.eval_fraction: 1e-09: the 1 documents .* cannot"):
        build_data(one, 257)
