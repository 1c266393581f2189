"""Renders chat templates in processes with limits (:mod:`moetrain.data.template_worker`).

A template that computes without end, or fills the memory, ends its own process and no other. A
conversation takes one round trip through a pipe for every :data:`_AT_ONCE` texts. A process starts
in about 100 ms and is used again. Each thread that renders has a process of its own. At most
:data:`_MOST_PROCESSES` threads render at the same time.
"""

import atexit
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from moetrain.data import template_worker
from moetrain.data.template_worker import (
    FAILED,
    LARGE,
    LENGTH,
    LIMITS,
    TEXT,
    WRONG,
    Answer,
    View,
)

_SECONDS = 1.0
"""Seconds of CPU time that a request may take."""
_SECONDS_A_TURN, _SECONDS_A_BYTE = 2e-3, 5e-7
"""Seconds of CPU time that each text of a request may take besides, for each turn and for each byte
of the conversation.

A template may look at all turns for each turn: with a thousand turns this takes one second.
"""
_MEMORY, _MEMORY_A_BYTE = 1 << 30, 32
"""Bytes of memory that a request may take, and bytes that it may take besides for each byte of the
conversation and each text."""
_CHARACTERS, _CHARACTERS_A_BYTE = 16 << 20, 8
"""Characters that a text may have, and how many more for each byte of the conversation."""
_AT_ONCE = 32
"""Most texts of one request. All texts of a long history at once would fill the memory."""
_MOST_PROCESSES = 8


class TemplateError(Exception):
    """A template fails. The message is one line of readable length."""


class TemplateSyntaxError(TemplateError):
    """A template cannot be compiled."""


class TemplateLimitError(TemplateError):
    """A template exceeds a limit."""


class _EndedError(Exception):
    """The process that renders has ended."""

    def __init__(self, code: int) -> None:
        """``code`` is the exit status of the process. Minus n means that signal n ended it."""
        super().__init__()
        self.code = code


class _Process:
    """A running :mod:`moetrain.data.template_worker`."""

    def __init__(self) -> None:
        paths = json.dumps([path for path in sys.path if os.path.isabs(path)])
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", template_worker.__file__, paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        _pool.all.add(self)

    def ask(self, request: bytes, num_texts: int) -> list[Answer]:
        """Return the answers to a request. The first one that is no text is the last.

        Raises _EndedError: the process ended before the last answer.
        """
        writer, reader = self._process.stdin, self._process.stdout
        assert writer is not None
        assert reader is not None
        answers: list[Answer] = []
        with suppress(BrokenPipeError, ConnectionResetError):
            writer.write(request)
            writer.flush()
            while len(answers) < num_texts and len(head := reader.read(LENGTH.size)) == LENGTH.size:
                data = reader.read(size := LENGTH.unpack(head)[0])
                if len(data) < size:
                    break
                answers.append((data[:1], data[1:].decode("utf-8", "surrogatepass")))
                if answers[-1][0] != TEXT:
                    return answers
        if len(answers) < num_texts:
            raise _EndedError(self.close())
        return answers

    def close(self) -> int:
        """End the process, unless it has ended. Return its exit status."""
        if not self._wait(0.5):  # its output may end before the process does
            self._process.kill()
        self.forget()
        return self._process.wait()

    def _wait(self, seconds: float) -> bool:
        """Close the input, so that the process ends. Return True if it ends within ``seconds``."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None

    def forget(self) -> None:
        """Close the pipes."""
        _pool.all.discard(self)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # closing writes what is left in the buffer
                pipe.close()

    def leave(self) -> None:
        """Forget the process. It belongs to the process that this one was forked from."""
        self.forget()
        self._process.returncode = 0


class _Pool:
    """The processes that render."""

    def __init__(self) -> None:
        self.idle: list[_Process] = []
        self.all: set[_Process] = set()
        self.slots = threading.BoundedSemaphore(_MOST_PROCESSES)

    def take(self) -> _Process:
        """Return an idle process, otherwise a new one."""
        try:
            return self.idle.pop()
        except IndexError:
            return _Process()

    def end(self) -> None:
        """End the idle processes."""
        while self.idle:
            self.idle.pop().close()

    def begin_in_child(self) -> None:
        """Forget all processes. They belong to the process that this one was forked from."""
        for process in [*self.all]:
            process.leave()
        self.idle.clear()
        self.slots = threading.BoundedSemaphore(_MOST_PROCESSES)


_pool = _Pool()
atexit.register(_pool.end)
os.register_at_fork(after_in_child=_pool.begin_in_child)


def render(
    source: str,
    turns: Sequence[Any],
    variables: Mapping[str, Any],
    now: datetime,
    views: Sequence[View],
) -> Iterator[str]:
    """Render views of a conversation.

    A request may take 1 s of CPU time and 1 GiB of memory, and a text may have 16 Mi characters.
    Each limit grows with the size of the conversation. Up to :data:`_AT_ONCE` views are rendered
    before the first text is yielded.

    Args:
        source: the template.
        turns: the conversation.
        variables: the template's other variables.
        now: the time that ``strftime_now`` writes.
        views: the texts to render.

    Yields:
        The text of each view.

    Raises:
        TemplateSyntaxError: the template cannot be compiled.
        TemplateLimitError: the template exceeds a limit.
        TemplateError: the template fails, or the conversation cannot be sent to its process.
    """
    for start in range(0, max(1, len(views)), _AT_ONCE):
        some = [*views[start : start + _AT_ONCE]]
        try:
            work = pickle.dumps((source, [*turns], {**variables}, now, [tuple(v) for v in some]))
        except (AttributeError, RecursionError, TypeError, pickle.PicklingError) as error:
            said = f"the conversation has values that are no JSON, or is nested too deeply: {error}"
            raise TemplateError(_line(said)) from None
        size = len(work)
        more = _SECONDS_A_BYTE * size + _SECONDS_A_TURN * len(turns)
        seconds = _SECONDS + more * len(some)
        memory = _MEMORY + _MEMORY_A_BYTE * size * len(some)
        most = _CHARACTERS + _CHARACTERS_A_BYTE * size
        request = LIMITS.pack(seconds, memory, most, size) + work
        try:
            answers = _answers(request, 1 + len(some))
        except _EndedError as ended:
            if ended.code == -signal.SIGPROF:
                said = f"it takes more than {seconds:.1f} s of CPU time"
                raise TemplateLimitError(said) from None
            said = f"its process ended (exit status {ended.code})"
            raise TemplateLimitError(said) from None
        for i, (kind, text) in enumerate(answers):
            if kind == TEXT and i == 0:
                continue  # the template is compiled
            if kind == TEXT:
                yield text
            elif kind == WRONG:
                raise TemplateSyntaxError(_line(text))
            elif kind == FAILED:
                raise TemplateError(_line(text))
            else:
                said = f"the limits are {most:,} characters of text and {memory >> 20:,} MiB"
                raise TemplateLimitError(f"it {_line(text)}; {said}")


def _answers(request: bytes, num_texts: int) -> list[Answer]:
    """Send a request to a process. If the process ends, send the request once more, to a new one.

    A machine that runs out of memory may end any process. It is certain that the template is at
    fault only if the process exceeded its CPU time. Then the request is not sent again.
    """
    with _pool.slots:
        try:
            return _asked(_pool.take(), request, num_texts)
        except _EndedError as ended:
            if ended.code == -signal.SIGPROF:
                raise
        return _asked(_Process(), request, num_texts)


def _asked(process: _Process, request: bytes, num_texts: int) -> list[Answer]:
    """Send a request to ``process``, and keep the process for the next request if possible."""
    try:
        answers = process.ask(request, num_texts)
    except BaseException:  # after an interrupt, the pipe may still hold answers to this request
        process.close()
        raise
    if answers[-1][0] == LARGE:  # its memory is fragmented
        process.close()
    else:
        _pool.idle.append(process)
    return answers


def _line(text: str, most: int = 500) -> str:
    """Return ``text`` as one line of about ``most`` characters."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
