"""The process in which chat templates run: a program that renders what it is sent on its input.

A template comes with a stranger's checkpoint, and Jinja's sandbox bounds neither time nor memory:
``{{ 10 ** 10 ** 8 }}`` is one operation of C that no check between operations can interrupt. So
templates run here, where the kernel stops them: a timer of CPU time whose signal ends the process,
and a limit of the address space.

:mod:`moetrain.data.templates` starts this file as a program of its own. It imports only Jinja and
the standard library, because a worker has to start quickly and stay small.

A request is :data:`LIMITS` (seconds of CPU time, bytes of address space, characters of a text,
bytes of what follows) and the pickled arguments of :func:`render`. Each :data:`Answer` is
:data:`LENGTH`, one byte for its kind, and its text in UTF-8. The first that is no :data:`TEXT` is
the last. Answers are not pickled, because the trainer must not unpickle what comes from here.
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
else:  # a process that was started without the site's folders gets those of its parent
    sys.path[:] = json.loads(sys.argv[1])
    import jinja2

from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

LIMITS, LENGTH = struct.Struct("<dQQQ"), struct.Struct("<Q")
TEXT, FAILED, WRONG, LARGE = b"t", b"f", b"w", b"l"
"""Kinds of answers: a rendering; why the template failed; why it cannot be compiled; too large."""

_ERRORS = (jinja2.TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError)
_ERRORS += (OSError, RuntimeError, StopIteration, TypeError, ValueError)
"""The errors that a template may raise. RecursionError is a RuntimeError."""


class View(NamedTuple):
    """One text to render."""

    num_turns: int
    """The first turns of the conversation, which it shows."""
    add_generation_prompt: bool
    marks: tuple[str, str] | None = None
    """Put around what the template marks as text to learn."""


Answer = tuple[bytes, str]
"""A kind, and a text."""


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}`` renders its content, with marks on request."""

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
"""Name of the variable with the marks around text to learn; no template can write that name."""


@lru_cache(maxsize=16)  # compiling takes milliseconds
def compiled(source: str) -> jinja2.Template:
    """Compile a template for the environment that ``transformers`` gives chat templates."""
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

    Returns:
        An empty text for the template, and one for each view.
    """
    try:
        template = compiled(source)
    except jinja2.TemplateSyntaxError as error:
        yield WRONG, f"line {error.lineno} of the template: {error.message}"
        return
    except (SyntaxError, *_ERRORS) as error:  # of the Python that it becomes
        yield WRONG, f"the template cannot be compiled: {_say(error)}"
        return
    yield TEXT, ""
    # As `transformers` has them where none are given.
    given = {"strftime_now": now.strftime, "tools": None, "documents": None, **variables}
    for num_turns, add_generation_prompt, marks in views:
        own = {"messages": turns[:num_turns], MARKS: marks}
        own["add_generation_prompt"] = add_generation_prompt
        try:
            yield TEXT, template.render({**given, **own})
        except _ERRORS as error:
            yield FAILED, _say(error)
            return


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more."""
    # The end of the input ends this process. Signals that are sent to all processes of a terminal
    # or a job are meant for the trainer, which may want to finish a line.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _, most_memory = resource.getrlimit(resource.RLIMIT_AS)
    while len(head := requests.read(LIMITS.size)) == LIMITS.size:
        seconds, memory, most, size = LIMITS.unpack(head)
        if most_memory != resource.RLIM_INFINITY:
            memory = min(memory, most_memory)
        resource.setrlimit(resource.RLIMIT_AS, (memory, most_memory))
        data = requests.read(size)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # whose signal ends the process
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
    """Describe an error: Jinja's messages speak for themselves, Python's need their class."""
    text = str(error)[:2000]  # the template may have written it
    return text if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {text}"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    """Write JSON as ``transformers`` does; Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
