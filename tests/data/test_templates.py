"""Untrusted chat templates: their limits of time and memory, and what runs beside them."""

import json
import os
import resource
import signal
import threading
import time
from datetime import datetime
from pathlib import Path

import pytest

from moetrain.config import ConfigError
from moetrain.data import template_worker, templates
from moetrain.data.chat import BadLineError, ChatTemplate
from moetrain.data.template_worker import View
from moetrain.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

MESSAGES = [{"role": "user", "content": "x" * 40}, {"role": "assistant", "content": "y"}]
# Each takes minutes, or more memory than a machine has, in `transformers`' sandbox.
BOMBS = {
    "nested loops": "{% for a in range(99999) %}" * 2 + "{% endfor %}" * 2,
    "loops over a product": "{% for a in range(9999) %}" * 3 + "{% endfor %}" * 3,
    "a macro that calls itself twice": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}"
    ),
    "a recursive loop": (
        "{% for a in [[1, 1]] recursive %}{% if loop.depth < 90 %}{{ loop([a, a]) }}{% endif %}"
        "{% endfor %}"
    ),
    "blocks": "{% block a %}{% if 0 %}{% endif %}{{ self.b() }}{{ self.b() }}{% endblock %}"
    "{% block b %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% endblock %}",
    "a power": "{{ 10 ** (messages | length * 10 ** 8) % 7 }}",
    "a power of constants": "{{ 9 ** (9 ** 9) % 7 }}",
    "powers": "{% set n = namespace(x=9) %}{% for i in range(99) %}"
    "{% set n.x = n.x ** 9 %}{% endfor %}{{ n.x % 7 }}",
    "lipsum": "{{ lipsum(n=10 ** 8) }}",
    "a text times": "{{ (messages[0].content * 10 ** 11) | length }}",
    "a list times": "{{ ([messages] * 10 ** 11) | length }}",
    "doubling": "{% set n = namespace(x='x') %}{% for i in range(64) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "a text of lists in lists": "{% set n = namespace(x=[1]) %}{% for i in range(64) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "equality of lists in lists": "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(64) %}"
    "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
    "a hash of tuples in tuples": "{% set n = namespace(x=(1,)) %}{% for i in range(64) %}"
    "{% set n.x = (n.x, n.x) %}{% endfor %}{{ {n.x: 1} | length }}",
    "JSON of lists in lists": "{% set n = namespace(x=[1]) %}{% for i in range(64) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}",
    "wordwrap": "{{ ('x ' * 10 ** 7) | wordwrap(1, wrapstring='y' * 10 ** 6) }}",
    "center": "{{ 'x' | center(10 ** 11) }}",
    "indent": "{{ ('x\n' * 10 ** 6) | indent('y' * 10 ** 6) }}",
    "format": "{{ '%99999999999d' | format(1) }}",
    "a format string": "{{ '{:99999999999}'.format(1) }}",
    "replace": "{{ ('x' * 10 ** 6) | replace('x', 'y' * 10 ** 6) }}",
    "join": "{{ range(99999) | join('y' * 10 ** 7) }}",
    "a sum of lists": "{{ ([range(99999) | list] * 99999) | sum(start=[]) | length }}",
    "batch": "{{ [1] | batch(10 ** 11, 'x') | list }}",
    "expandtabs": "{{ ('\t' * 10 ** 6).expandtabs(10 ** 6) }}",
    "bytes of a number": "{{ (1).to_bytes(10 ** 11, 'big') | length }}",
    "output": "{% for a in range(99999) %}{{ 'y' * 9999 }}{% endfor %}",
    "brackets": "{{ " + "[" * 100_000 + "]" * 100_000 + " }}",
    "signs": "{{ " + "-" * 200_000 + "1 }}",
}


def folder_with(template: str, folder: Path, name: str = "chat_template.jinja") -> Path:
    """Write a folder with a tokenizer and a template."""
    for file, content in ByteTokenizer().export().files.items():
        (folder / file).write_text(str(content))
    if name == "tokenizer_config.json":
        config = json.loads((folder / name).read_text()) | {"chat_template": template}
        (folder / name).write_text(json.dumps(config))
    else:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / "chat_template.jinja").write_text("{{ messages | length }}")
        (folder / name).write_text(template)
    return folder


def cpu_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def refusal(tokenizer: Tokenizer) -> str:
    """Return the one-line refusal of the template of ``tokenizer``."""
    with pytest.raises((BadLineError, ConfigError)) as raised:
        ChatTemplate.of(tokenizer).prompt(MESSAGES)
    said = str(raised.value)
    assert "\n" not in said
    assert len(said) < 1000
    return said


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=list(BOMBS))
def test_chat_template_that_is_a_bomb_is_refused_in_its_time(
    bomb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(templates, "_SECONDS", 0.2)
    templates._pool.end()  # a process is counted when it has ended
    before = cpu_seconds_of_children()
    said = refusal(load_tokenizer(str(folder_with(bomb, tmp_path))))
    templates._pool.end()
    assert cpu_seconds_of_children() - before < 1.2
    assert str(tmp_path / "chat_template.jinja") in said


def test_chat_template_that_is_a_bomb_is_refused_within_two_seconds(tmp_path: Path):
    tokenizer = load_tokenizer(str(folder_with(BOMBS["a power"], tmp_path)))
    templates._pool.end()
    before = cpu_seconds_of_children()
    assert "takes more than 1.0 s of CPU time" in refusal(tokenizer)
    assert cpu_seconds_of_children() - before < 2


@pytest.mark.parametrize(
    ("file", "tools"),
    [
        ("chat_template.jinja", None),
        ("tokenizer_config.json", None),
        ("additional_chat_templates/tool_use.jinja", [{"name": "f"}]),
    ],
)
def test_chat_template_that_fails_is_named_by_its_file(file: str, tools: object, tmp_path: Path):
    template = ChatTemplate.of(load_tokenizer(str(folder_with("{{ 1 // 0 }}", tmp_path, file))))
    if tools:
        assert template.prompt(MESSAGES) == "2"
    with pytest.raises(BadLineError) as raised:
        template.prompt(MESSAGES, {"tools": tools} if tools else {})
    said = f"the chat template {tmp_path / file} fails: ZeroDivisionError"
    assert str(raised.value).startswith(said)
    template = ChatTemplate.of(load_tokenizer(str(folder_with("{% if %}", tmp_path, file))))
    with pytest.raises(ConfigError, match=f"{tmp_path / file}: line 1 of the template"):
        template.prompt(MESSAGES, {"tools": tools} if tools else {})


def test_chat_template_may_render_a_long_conversation():
    """The conversation has half a million words in 500 turns, and each turn loops over all."""
    source = "{% for m in messages %}{% for n in messages %}{% if n.role == 'x' %}{% endif %}"
    source += "{% endfor %}{{ m.content }}{% endfor %}"
    texts = [f"{i} " + "word " * 1000 for i in range(500)]
    turns = [{"role": "user", "content": text} for text in texts]
    assert ChatTemplate(source, {}).prompt(turns) == "".join(texts)


def test_chat_template_renders_text_with_lone_surrogates():
    messages = [{"role": "user", "content": "a\ud800b\0é\U0001f600"}]
    assert ChatTemplate("{{ messages[0].content }}", {}).prompt(messages) == messages[0]["content"]


def test_chat_template_does_not_wait_for_a_bomb_of_another_thread():
    """The bomb is a single operation in C, which used to hold the interpreter's lock."""
    ended: list[float] = []

    def explode() -> None:
        with pytest.raises(BadLineError, match="CPU time"):
            ChatTemplate(BOMBS["a power"], {}).prompt(MESSAGES)
        ended.append(time.monotonic())

    template = ChatTemplate("{{ messages | length }}", {})
    template.prompt(MESSAGES)  # a process has started
    thread = threading.Thread(target=explode)
    thread.start()
    for _ in range(20):
        assert template.prompt(MESSAGES) == "2"
    rendered = time.monotonic()
    thread.join()
    assert rendered < ended[0]


def test_rendering_survives_the_end_of_its_process():
    """The kernel may kill the process when memory runs out; the rendering is then repeated."""
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    turns = [{"role": role, "content": role} for role in ("user", "assistant")]
    assert template.prompt(turns) == "userassistant"
    for process in templates._pool.idle:
        os.kill(process._process.pid, signal.SIGKILL)
    assert template.prompt(turns) == "userassistant"


def test_rendering_in_a_forked_process_has_a_process_of_its_own():
    template = ChatTemplate("{{ messages[0].content }}", {})
    texts = [f"{i}" * 100 for i in range(50)]
    template.prompt([{"role": "user", "content": "x"}])
    child = os.fork()
    right = [template.prompt([{"role": "user", "content": text}]) for text in texts] == texts
    if not child:
        templates._pool.end()
        os._exit(0 if right else 1)
    assert right
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_template_process_ignores_the_signals_of_a_job_and_ends_with_its_input():
    ChatTemplate("", {}).prompt(MESSAGES)
    process = templates._pool.idle[-1]._process
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(process.pid, number)
    assert ChatTemplate("{{ 1 }}", {}).prompt(MESSAGES) == "1"
    assert process.poll() is None
    templates._pool.end()
    assert process.returncode == 0


def test_worker_compiles_a_template_once_and_each_reader_has_its_own_time():
    source = "{{ messages[0]['content'] }} in {{ strftime_now('%Y') }}, said once"
    template_worker.compiled.cache_clear()
    for year in (1999, 2031):
        turns, now, views = [{"content": "x"}], datetime(year, 1, 1), [View(1, True)]
        _, answer = template_worker.render(source, turns, {}, now, views)
        assert answer == (template_worker.TEXT, f"x in {year}, said once")
    assert template_worker.compiled.cache_info().misses == 1


def test_conversation_that_cannot_be_sent_is_one_line():
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(BadLineError, match="the chat template fails: the conversation has values"):
        ChatTemplate("", {}).prompt([{"role": "user", "content": "x", "more": nested}])
