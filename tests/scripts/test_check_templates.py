"""The table of chat templates: equal, refused and faulty cases."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")
import check_templates

TURNS = """\
{%- for m in messages %}{{ '<|' + m.role + '|>' }}
{%- if m.role == 'assistant' %}MARKED
{%- else %}{{ m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
PLAIN = TURNS.replace("MARKED", "{{ m.content + '<|end|>' }}")
MARKED = TURNS.replace("MARKED", "{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}")
MARKS_A_PART = TURNS.replace(
    "MARKED",
    "{{ m.content[:4] }}{% generation %}{{ m.content[4:] + '<|end|>' }}{% endgeneration %}",
)


def cells(folder: Path, capsys: pytest.CaptureFixture[str], **templates: str):
    """Return the exit code, the row's cells by case, and the first reason."""
    for name, source in templates.items():
        (folder / f"{name}.jinja").write_text(source)
    code = check_templates.main([str(folder), "--only", "plain"])
    header, _, row, _, reason, *_ = capsys.readouterr().out.splitlines()
    split = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in (header, row)]
    return code, dict(zip(*split, strict=True)), reason


def test_a_template_is_equal_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, row, reason = cells(tmp_path, capsys, plain=PLAIN, plain_training=MARKED)
    assert code == 0
    assert reason.startswith("1. the chat template does not show messages[i].tool_calls[0].name")
    refused = ("calls, text", "calls, objects", "reasoning_content")
    equal = [case for case in check_templates.CASES if case not in refused]
    assert {row[case.replace("<", r"\<")] for case in equal} == {"equal"}
    assert [row[case] for case in refused] == ["refused 1", "refused 1", "refused 2"]


def test_what_the_training_template_does_not_mark_is_a_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code, row, _ = cells(tmp_path, capsys, plain=PLAIN, plain_training=MARKS_A_PART)
    assert code == 1
    assert row["one turn"].startswith("FAULT: messages[1]: learned 'Answer 1")
    assert "and marked is 'er 1" in row["one turn"]
