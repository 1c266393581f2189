"""The program in which chat templates run. It reads requests, and answers with texts.

A template comes from an untrusted checkpoint. Jinja's sandbox limits neither time nor memory:
``{{ 10 ** 10 ** 8 }}`` is one operation in C that no check between operations can interrupt. So
templates run in a process that the kernel can stop. A timer of CPU time sends a signal that ends
the process, and the size of its address space is limited.

:mod:`moetrain.data.templates` starts this file as a program. The program imports only Jinja and the
standard library, because a worker has to start quickly and stay small.

A request on the standard input is :data:`LIMITS` (seconds of CPU time, bytes of address space,
characters of a text, bytes of the rest) and the pickled arguments of :func:`render`. An
:data:`Answer` is written to the standard output as :data:`LENGTH`, one byte for its kind, and its
text in UTF-8. Behind an answer that is not of the kind :data:`TEXT` there is no other one. Answers
are not pickled, because the trainer must not unpickle data that a template can change.
"""

import json
import pickle
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

if TYPE_CHECKING or __name__ != "__main__":
    import jinja2
else:  # the process starts without site-packages, and gets its parent's path
    sys.path[:] = json.loads(sys.argv[1])
    import jinja2

from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

LIMITS, LENGTH = struct.Struct("<dQQQ"), struct.Struct("<Q")
TEXT, FAILED, WRONG, LARGE = b"t", b"f", b"w", b"l"
"""Kinds of answers: a rendering, an error of rendering, an error of compiling the template, and a
text or memory that is too large."""

_ERRORS = (jinja2.TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError)
_ERRORS += (OSError, RuntimeError, StopIteration, TypeError, ValueError)
"""The errors that a template may raise. RecursionError is a RuntimeError."""


class View(NamedTuple):
    """A text to render."""

    num_turns: int
    """Number of turns that the text shows, from the first turn of the conversation on."""
    add_generation_prompt: bool
    """True: the text ends with the beginning of an assistant's turn."""
    marks: tuple[str, str] | None = None
    """Texts to put around each part that the template marks as text to learn. None: no marks."""


Answer = tuple[bytes, str]
"""A kind, and a text."""


class _Generation(Extension):
    """The tag ``{% generation %} ... {% endgeneration %}``.

    It renders its content, and puts the view's marks around it if there are any.
    """

    tags = {"generation"}  # noqa: RUF012  as the base class has it

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    @jinja2.pass_context
    def _marked(self, context: jinja2.runtime.Context, caller: Callable[[], str]) -> str:
        marks = context.get(MARKS)
        return f"{marks[0]}{caller()}{marks[1]}" if marks else caller()


MARKS = " marks"
"""Name of the variable that holds the marks. No template can write this name."""


@lru_cache(maxsize=16)  # compiling takes milliseconds
def compiled(source: str) -> jinja2.Template:
    """Compile a template in the environment that ``transformers`` has for chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.filters["tojson"] = _to_json
    return environment.from_string(source)


def render(
    source: str,
    turns: list[Any],
    variables: Mapping[str, Any],
    now: datetime,
    views: list[View],
) -> Iterator[Answer]:
    """Compile a template, and render ``views`` of a conversation up to the first that fails.

    Yields:
        An empty text for the template itself, and an answer for each view.
    """
    try:
        template = compiled(source)
    except jinja2.TemplateSyntaxError as error:
        yield WRONG, f"line {error.lineno} of the template: {error.message}"
        return
    except (SyntaxError, *_ERRORS) as error:  # Jinja made invalid Python of the template
        yield WRONG, f"the template cannot be compiled: {_say(error)}"
        return
    yield TEXT, ""
    # Tools and documents are null if there are none, as in `transformers`.
    shared = {"strftime_now": now.strftime, "tools": None, "documents": None, **variables}
    for num_turns, add_generation_prompt, marks in views:
        own = {"messages": turns[:num_turns], MARKS: marks}
        own["add_generation_prompt"] = add_generation_prompt
        try:
            yield TEXT, template.render({**shared, **own})
        except _ERRORS as error:
            yield FAILED, _say(error)
            return


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until the input ends."""
    # The process ends with its input. Signals that all processes of a terminal or a job get are
    # meant for the trainer, which may still need this process, so they are ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _, most_memory = resource.getrlimit(resource.RLIMIT_AS)
    while len(head := requests.read(LIMITS.size)) == LIMITS.size:
        seconds, memory, most, size = LIMITS.unpack(head)
        if most_memory != resource.RLIM_INFINITY:
            memory = min(memory, most_memory)
        resource.setrlimit(resource.RLIMIT_AS, (memory, most_memory))
        data = requests.read(size)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        try:
            source, turns, variables, now, views = pickle.loads(data)
            for kind, text in render(source, turns, variables, now, views):
                if len(text) > most:
                    kind, text = LARGE, f"renders {len(text):,} characters"
                encoded = text.encode("utf-8", "surrogatepass")
                answers.write(LENGTH.pack(1 + len(encoded)) + kind + encoded)
                if kind == LARGE:
                    break
        except MemoryError:
            said = b"needs too much memory"
            answers.write(LENGTH.pack(1 + len(said)) + LARGE + said)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.flush()


def _say(error: BaseException) -> str:
    """Describe an error in at most 2,000 characters, with the class of a Python error."""
    text = str(error)[:2000]  # the template may have written it
    return text if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {text}"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    """Write JSON as ``transformers`` does. Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
