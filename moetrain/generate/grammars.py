"""Grammars that completions follow. llguidance compiles and applies them in separate processes.

A grammar is a kind and a text. The kinds are ``json_schema``, ``regex``, ``choice`` (a JSON list of
texts) and ``grammar`` (Lark in llguidance's dialect, or GBNF). Untrusted clients send grammars to a
server, so llguidance never runs in the generator's process
(:mod:`moetrain.generate.grammar_process`):

- A grammar's process compiles it within limits on time and memory, while the generator goes on.
  All completions that follow the same grammar at the same time share the process. Compiling is
  cancelled when no request waits for it any more.
- In each step the generator asks all processes at once which tokens may come next. They have
  computed these masks while the model ran. The generator kills a process that does not answer in
  time, and the completions that follow its grammar end with ``abort``.

A few processes stay after their last completion, so that a later completion with the same grammar
need not compile it again.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from moetrain.config import ConfigError
from moetrain.data.tokenizer import Tokenizer
from moetrain.generate import grammar_process

_IDLE = 8
"""Number of compiled grammars that are kept although no completion follows them."""
_PATIENCE = 0.6
"""Seconds that a step waits for masks, and again for the answers to its new tokens."""
_LONGEST_WAIT = 30
"""Seconds after which a grammar that still waits to be compiled is refused."""
_STARTED = 120
"""Seconds that llguidance may take to load the tokenizer."""


class TooManyGrammarsError(ValueError):
    """Too many grammars are in use now. The same request may succeed later."""


@dataclass(frozen=True)
class GrammarLimits:
    """Limits on the grammars of one generator.

    Attributes:
        seconds: time that compiling one grammar may take.
        mib: memory of one grammar's process, in MiB.
        number: number of different grammars that may be in use or being compiled at once.
    """

    seconds: float = 5.0
    mib: int = 512
    number: int = 64


class Compiled:
    """A grammar and its process.

    Attributes:
        ready: a future that is done once the grammar is compiled. It raises a ValueError if the
            grammar is refused.
    """

    ready: "Future[None]"

    def __init__(self, grammar: tuple[str, str], number: int) -> None:
        self.grammar = grammar
        self.number = number.to_bytes(8)
        self.asked = time.monotonic()
        self.users = 0
        """Number of requests that wait for the grammar, plus texts that follow it."""
        self.is_usable = True
        """False once the grammar's process is killed, dies or refuses the grammar."""
        self.is_compiled = False
        self.connection: Connection | None = None
        self.texts = count()


class Matcher:
    """The state of one text that follows a grammar.

    Attributes:
        end: position, from 1, of the token that ended the text, among the tokens that
            :meth:`Grammars.take` appended last. It is 0 if the text goes on.
        has_failed: whether the text ended because its process failed or reached a limit.
    """

    def __init__(self, compiled: Compiled) -> None:
        self.compiled, self.number = compiled, next(compiled.texts)
        self.end, self.has_failed = 0, False


class Grammars:
    """The grammars of one generator.

    :meth:`acquire` and :meth:`release` may be called on any thread. All other methods must be
    called on the generator's thread.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, ends: Sequence[int], known: int, limits: GrammarLimits
    ) -> None:
        """Store the arguments. No process starts before the first grammar.

        Args:
            tokenizer: the tokenizer of the generator. None: every grammar is refused.
            ends: ids of the tokens that end a text.
            known: number of token ids, V.
        """
        self.limits = limits
        self.ends, self.known = [token for token in ends if token < known], known
        self._tokenizer = tokenizer
        self._numbers = count(1)
        self._live: dict[tuple[str, str], Compiled] = {}
        """Usable grammars by kind and text. Grammars without users are in order of last use."""
        self._lock = threading.RLock()
        """Guards ``_live``, the state of its grammars, and the socket of orders."""
        self._starting = threading.Lock()
        """Held while the forking process starts. ``_lock`` is free meanwhile."""
        # The generator needs a core too.
        compilers = max(1, min(4, (os.cpu_count() or 1) // 2))
        self._compilers = ThreadPoolExecutor(compilers, "grammar")
        self._forking: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        """The process that forks the grammars' processes, and the socket of its orders."""

    # ---- compiling, on any thread --------------------------------------------------------------

    def acquire(self, kind: str, text: str) -> Compiled:
        """Return a grammar, and start to compile it if it is new.

        Each call needs a call of :meth:`release` later.

        Raises:
            ConfigError: the generator has no tokenizer, or llguidance is not installed.
            TooManyGrammarsError: ``limits.number`` other grammars are in use.
        """
        if self._tokenizer is None:
            problem = "a grammar needs a generator with a tokenizer; build it with one (tokenizer=)"
            raise ConfigError("grammar", problem)
        if find_spec("llguidance") is None:
            remedy = "pip install 'moetrain[grammar]'"
            raise ConfigError(
                "grammar", f"grammars need llguidance, which is not installed; {remedy}"
            )
        with self._lock:
            compiled = self._live.get((kind, text))
            if compiled is None:
                most = self.limits.number
                idle = next((one for one in self._live.values() if not one.users), None)
                if len(self._live) >= most and idle is not None:
                    self._drop(idle)
                if len(self._live) >= most:
                    problem = f"{most} other grammars are in use, and that is the limit"
                    raise TooManyGrammarsError(f"grammar: {problem}; ask again later")
                compiled = Compiled((kind, text), next(self._numbers))
                self._live[compiled.grammar] = compiled
                compiled.ready = self._compilers.submit(self._compile, compiled)
            compiled.users += 1
            return compiled

    def release(self, compiled: Compiled) -> None:
        """Give back a grammar. Compiling it is cancelled if nobody else waits for it."""
        with self._lock:
            compiled.users -= 1
            if compiled.users or not compiled.is_usable:
                return
            if not compiled.is_compiled:
                self._drop(compiled)
                return
            self._live[compiled.grammar] = self._live.pop(compiled.grammar)
            idle = [one for one in self._live.values() if not one.users]
            for one in idle[:-_IDLE]:
                self._drop(one)

    def _drop(self, compiled: Compiled) -> None:
        """Kill a grammar's process, or prevent its start, and forget the grammar."""
        with self._lock:
            if not compiled.is_usable:
                return
            compiled.is_usable = False
            del self._live[compiled.grammar]
            compiled.ready.cancel()
            if compiled.connection is None:
                return
            with suppress(OSError):  # the forking process has died
                self._order(b"K", compiled)
            if compiled.is_compiled:  # otherwise the thread that compiles closes it
                compiled.connection.close()

    def _compile(self, compiled: Compiled) -> None:
        """Compile a grammar. Runs on a thread of ``_compilers``."""
        try:
            if time.monotonic() - compiled.asked > _LONGEST_WAIT:
                problem = f"the server has compiled other grammars for {_LONGEST_WAIT} s"
                raise TooManyGrammarsError(f"grammar: {problem}; ask again later")
            connection = self._fork(compiled)
            problem = self._send_grammar(connection, compiled.grammar)
            if problem:
                raise ValueError(f"grammar: {problem}")
            with self._lock:
                if not compiled.is_usable:  # it was cancelled just now
                    raise ValueError("grammar: the requests for it were cancelled")
                compiled.is_compiled = True
        except BaseException:
            self._drop(compiled)
            if compiled.connection is not None:
                compiled.connection.close()
            raise

    def _send_grammar(self, connection: Connection, grammar: tuple[str, str]) -> str:
        """Send ``grammar`` to its process. Return the problem, or an empty text if it compiles."""
        seconds, mib = self.limits.seconds, self.limits.mib
        try:
            connection.send_bytes(json.dumps(grammar).encode())
            if not connection.poll(seconds):
                return f"compiling it takes more than {seconds:g} s; make it smaller"
            return connection.recv_bytes().decode()
        except (EOFError, OSError):
            limits = f"{mib} MiB or {seconds:g} s"
            return f"it is nested too deeply, or takes more than {limits}; make it smaller"

    def _fork(self, compiled: Compiled) -> Connection:
        """Start a grammar's process and return the connection to it."""
        with self._starting:
            if self._forking is None or self._forking[0].poll() is not None:
                self._start()
        with self._lock:
            ours, its = socket.socketpair()
            with its:
                compiled.connection = Connection(ours.detach())
                if compiled.is_usable:  # otherwise reading from the connection fails at once
                    self._order(b"N", compiled, its.fileno())
            return compiled.connection

    def _order(self, kind: bytes, compiled: Compiled, *files: int) -> None:
        assert self._forking is not None
        socket.send_fds(self._forking[1], [kind + compiled.number], files)

    def _start(self) -> None:
        """Start the process that forks others."""
        assert self._tokenizer is not None
        about = {
            "tokenizer": self._tokenizer.whole_json(),
            "ends": self.ends,
            "seconds": self.limits.seconds,
            "mib": self.limits.mib,
        }
        ours, its = socket.socketpair()
        with tempfile.TemporaryFile() as given, its:
            given.write(json.dumps(about).encode())
            given.seek(0)
            # -P keeps the modules beside the script out of its path. A session of its own keeps
            # Ctrl-C from the script, because the server still answers open requests after Ctrl-C.
            command = [sys.executable, "-P", grammar_process.__file__, str(its.fileno())]
            process = subprocess.Popen(
                command,
                stdin=given,
                stdout=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
        finish = weakref.finalize(self, _finish, process, ours)
        ours.settimeout(_STARTED)  # seconds
        message = b""  # an error or an empty text, then a zero byte
        with suppress(TimeoutError):
            while not message.endswith(b"\0") and (part := ours.recv(4096)):
                message += part
        if not message.endswith(b"\0"):
            finish()
            raise RuntimeError("the process that compiles grammars did not start; see its errors")
        if message != b"\0":
            finish()
            problem = "llguidance cannot read this model's tokenizer"
            raise ValueError(f"grammar: {problem}: {message[:-1].decode()[:300]}")
        self._forking = process, ours

    # ---- texts, on the generator's thread ------------------------------------------------------

    def begin(self, compiled: Compiled) -> Matcher:
        """Start a text that follows the grammar ``compiled``, once the grammar is ready.

        Each call needs a call of :meth:`end` later. Raises the exception of ``compiled.ready``.
        """
        compiled.ready.result()
        with self._lock:
            compiled.users += 1
        matcher = Matcher(compiled)
        self._send(compiled, "new", matcher.number)
        return matcher

    def end(self, matcher: Matcher) -> None:
        """Delete a text."""
        self._send(matcher.compiled, "end", matcher.number)
        self.release(matcher.compiled)

    def allowed(self, texts: Sequence[tuple[Matcher | None, Sequence[int]]]) -> np.ndarray:
        """Return which tokens may come after each text and its drafts, bool [N, V].

        All tokens may come after a text without a grammar (None). All tokens may also come after
        drafts that violate the grammar, because no token is chosen there. Only a token that ends a
        text may come after a text whose process has failed.
        """
        allowed_NV = np.ones((len(texts), self.known), bool)
        rows: dict[Compiled, list[int]] = {}
        for row, (matcher, _) in enumerate(texts):
            if matcher is not None:
                rows.setdefault(matcher.compiled, []).append(row)
        asked: dict[Compiled, list[Any]] = {
            compiled: [(texts[row][0].number, list(texts[row][1])) for row in own]  # pyright: ignore[reportOptionalMemberAccess]
            for compiled, own in rows.items()
        }
        answers = self._exchange("mask", asked)
        for compiled, own in rows.items():
            if (answer := answers.get(compiled)) is None:
                if self.ends:
                    allowed_NV[own] = False
                    allowed_NV[np.ix_(own, self.ends)] = True
                continue
            masks_NM = np.frombuffer(answer, np.uint8).reshape(len(own), -1)
            bits_NV = np.unpackbits(masks_NM[:, 2:], axis=1, bitorder="little")[:, : self.known]
            own_NV = bits_NV.astype(bool)
            # The grammar may allow the letters of an end token's name, such as "</s>".
            own_NV[:, self.ends] &= masks_NM[:, 1:2].astype(bool)
            own_NV |= masks_NM[:, :1] == 0
            allowed_NV[own] = own_NV
        return allowed_NV

    def take(self, added: Mapping[Matcher, Sequence[int]]) -> None:
        """Append tokens to texts and set their ``end`` and ``has_failed``."""
        matchers: dict[Compiled, list[Matcher]] = {}
        for matcher in added:
            matchers.setdefault(matcher.compiled, []).append(matcher)
        asked = {
            compiled: [(matcher.number, list(added[matcher])) for matcher in own]
            for compiled, own in matchers.items()
        }
        answers = self._exchange("take", asked)
        for compiled, own in matchers.items():
            answer = answers.get(compiled)
            found = json.loads(answer) if answer is not None else [(1, True)] * len(own)
            for matcher, (end, is_error) in zip(own, found, strict=True):
                matcher.end, matcher.has_failed = end, is_error

    def _send(self, compiled: Compiled, order: str, about: object) -> bool:
        """Send a message to a grammar's process. Return whether the grammar is usable."""
        if not compiled.is_usable or compiled.connection is None:
            return False
        try:
            compiled.connection.send_bytes(json.dumps([order, about]).encode())
        except OSError:
            self._drop(compiled)
        return compiled.is_usable

    def _exchange(self, order: str, asked: Mapping[Compiled, list[Any]]) -> dict[Compiled, bytes]:
        """Send a message to each process and return the answers. Kill processes that are late."""
        waiting: dict[Connection, Compiled] = {}
        for compiled, about in asked.items():
            if self._send(compiled, order, about):
                assert compiled.connection is not None  # the message went through it
                waiting[compiled.connection] = compiled
        answers: dict[Compiled, bytes] = {}
        until = time.monotonic() + _PATIENCE
        while waiting and (found := wait([*waiting], max(0.0, until - time.monotonic()))):
            for connection in found:
                assert isinstance(connection, Connection)
                compiled = waiting.pop(connection)
                try:
                    answers[compiled] = connection.recv_bytes()
                except (EOFError, OSError):
                    self._drop(compiled)
        for compiled in waiting.values():
            self._drop(compiled)
        return answers


def _finish(process: "subprocess.Popen[bytes]", orders: socket.socket) -> None:
    """End the forking process, which first kills the processes that it forked."""
    with orders, suppress(OSError):  # the process has ended already
        orders.sendall(b"Q" + bytes(8))
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
