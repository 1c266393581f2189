"""A script that runs llguidance in limited processes, one for each grammar.

:mod:`moetrain.generate.grammars` starts the script. Grammars come from untrusted clients. Compiling
a grammar may overflow the stack. Compiling it, and computing masks with it, may take any amount of
time and memory. So the script loads the tokenizer and then forks a process for each grammar. That
process compiles the grammar and tracks the texts of all completions that follow it. The process has
limits on time, memory and stack, and the server loses nothing when the process dies or is killed.

The script imports neither torch nor moetrain, so it starts quickly and its forks are small. It
reads a JSON object from standard input: ``tokenizer`` (the content of a tokenizer.json), ``ends``
(the tokens that end a text), ``seconds`` and ``mib`` (the limits of one grammar). Its argument is
the file descriptor of a socket. The script first sends an error message to the socket, empty on
success, and a zero byte. It then reads orders of nine bytes, a letter and a number of eight bytes:

- ``N`` forks process ``number`` for the socket that comes with the order.
- ``K`` kills process ``number``.
- ``Q`` kills all processes and ends the script. A closed socket does the same.

The server and a grammar's process send each other messages of ``multiprocessing.Connection``. The
first message is ``[kind, text]``, and its answer is an error message, empty on success. All later
messages are JSON:

- ``["new", i]`` starts text ``i``, and ``["end", i]`` deletes it. They have no answer.
- ``["mask", [[i, drafts], ...]]`` asks which tokens may follow text ``i`` and its drafts. For
  each of these texts, the answer has a byte that is 1 if there is a mask, a byte that is 1 if the
  text may end after its drafts, and the bits of the mask.
- ``["take", [[i, tokens], ...]]`` appends tokens. The answer is ``[[n, is_error], ...]``. ``n`` is
  the number of the token that ended the text, from 1, or 0 if the text goes on. After the answer
  the process computes the texts' next masks, while the model runs.
"""

import json
import os
import resource
import select
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

_STACK = 64 << 20
"""Size of the stack in bytes. Linux keeps at least 128 MiB free below the main thread's stack."""
_BURST, _SECONDS_A_MASK = 1.0, 0.02
"""The texts of one grammar share an allowance of CPU seconds. It begins at ``_BURST`` and never
exceeds it. Each mask adds ``_SECONDS_A_MASK``. llguidance's own limits allow about 20 ms for most
masks, but some take longer."""


def _limit(kind: int, most: float) -> None:
    """Set a soft limit, as far as the hard one allows."""
    hard = resource.getrlimit(kind)[1]
    most = int(most)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _address_space() -> int:
    """Return the size of this process's address space in bytes; 0 if the system has no /proc."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return 0


def _compile(tokens: Any, kind: str, text: str) -> Any:
    """Return a matcher at the start of a text. Raises ValueError: the grammar is not valid."""
    import llguidance

    try:
        grammar = llguidance.grammar_from(kind, text)  # pyright: ignore[reportArgumentType]
    except (TypeError, RecursionError) as error:  # choices that are not texts; deeply nested GBNF
        raise ValueError(str(error)) from None
    matcher = llguidance.LLMatcher(tokens, grammar, log_level=0)
    matcher.compute_bitmask()  # llguidance finds only now that no text can follow the grammar
    if matcher.is_error():
        # The state of the parser comes after this mark. It says nothing at the start of a text.
        problem = matcher.get_error().partition("<state>")[0].strip()
        raise ValueError(f"{problem}, in this {kind}")
    return matcher


class _Texts:
    """The texts that follow one grammar, by number."""

    def __init__(self, first: Any) -> None:
        """Start without texts. ``first`` is a matcher at the start of a text, and stays there."""
        self.first = first
        self.matchers: dict[int, Any] = {}
        self.masks: dict[int, bytes] = {}
        """The mask of each text, if it has been computed."""
        self.due: list[int] = []
        """The texts whose masks the server will ask for."""
        self.size = len(first.compute_bitmask())

    def mask(self, text: int) -> bytes:
        """Return the answer about ``text`` without drafts, and keep it until tokens are added."""
        found = self.masks.get(text)
        if found is None:
            found = self.masks[text] = self._described(self.matchers[text])
        return found

    def _described(self, matcher: Any) -> bytes:
        bits = matcher.compute_bitmask()
        return bytes((not matcher.is_error(), matcher.is_accepting())) + bits

    def after(self, text: int, drafts: list[int]) -> bytes:
        """Return the answer about ``text`` and ``drafts``, with no mask if drafts are refused."""
        if not drafts:
            return self.mask(text)
        matcher = self.matchers[text].deep_copy()
        if matcher.try_consume_tokens(drafts) == len(drafts):
            return self._described(matcher)
        return bytes(2 + self.size)

    def take(self, text: int, tokens: list[int]) -> tuple[int, bool]:
        """Append ``tokens``. Return the number of the token that ended the text, from 1 (0: none),
        and whether an error ended it."""
        matcher = self.matchers[text]
        self.masks.pop(text, None)
        for number, token in enumerate(tokens, 1):
            matcher.consume_token(token)
            if matcher.is_stopped():
                return number, matcher.is_error()
        self.due.append(text)
        return 0, False


def _follow(connection: Connection, matcher: Any) -> None:
    """Answer messages until the server hangs up or the texts have spent their allowance."""
    texts = _Texts(matcher)
    allowance, used = _BURST, time.process_time()
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    while True:
        while texts.due and not poll.poll(0):
            text = texts.due.pop()
            if text in texts.matchers:
                texts.mask(text)
        order, about = json.loads(connection.recv_bytes())
        if order == "new":
            texts.matchers[about] = texts.first.deep_copy()
        elif order == "end":
            texts.matchers.pop(about, None)
            texts.masks.pop(about, None)
        elif order == "take":
            found = [texts.take(text, tokens) for text, tokens in about]
            connection.send_bytes(json.dumps(found).encode())
        else:
            texts.due.clear()
            masks = b"".join([texts.after(text, drafts) for text, drafts in about])
            now = time.process_time()
            allowance = min(_BURST, allowance + _SECONDS_A_MASK * len(about)) - (now - used)
            used = now
            if allowance < 0:
                return
            connection.send_bytes(masks)


def _serve(connection: Connection, tokens: Any, seconds: float, mib: int) -> None:
    """Compile the grammar of the first message and answer the messages after it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # llguidance prints its panics there
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_STACK, _STACK)
    if size := _address_space():
        _limit(resource.RLIMIT_AS, size + (mib << 20))
    # The server measures the time. This limit acts if the server is gone.
    _limit(resource.RLIMIT_CPU, seconds + 2)
    kind, text = json.loads(connection.recv_bytes())
    try:
        matcher = _compile(tokens, kind, text)
    except ValueError as error:
        problem = " ".join(str(error).split())[:300] or "it is not valid"
        connection.send_bytes(problem.encode(errors="replace"))
        return
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
    connection.send_bytes(b"")
    _follow(connection, matcher)


def _run(orders: socket.socket, about: dict[str, Any], tokens: Any) -> None:
    """Fork and kill processes on the server's orders. Kill all when the server is gone."""
    server = os.getppid()
    processes: dict[bytes, int] = {}
    poll = select.poll()
    poll.register(orders, select.POLLIN)
    # A child that the server forked may keep the socket open, so look at the parent too.
    while os.getppid() == server:
        is_there = poll.poll(1000 if processes else 5000)
        for number, process in [*processes.items()]:
            if os.waitpid(process, os.WNOHANG)[0]:
                del processes[number]
        if not is_there:
            continue
        order, files, *_ = socket.recv_fds(orders, 9, 1)
        if len(order) < 9 or order[:1] == b"Q":
            break
        kind, number = order[:1], order[1:]
        if kind == b"K":
            if number in processes:
                os.kill(processes[number], signal.SIGKILL)
            continue
        try:
            process = os.fork()
        except OSError as error:  # too many processes, or too little memory
            print(f"no process for a grammar: {error}", file=sys.stderr, flush=True)
            os.close(files[0])
            continue
        if process == 0:
            orders.close()
            try:
                _serve(Connection(files[0]), tokens, about["seconds"], about["mib"])
            except (EOFError, OSError, MemoryError):  # the server hung up, or a limit was reached
                pass
            finally:
                os._exit(0)
        processes[number] = process
        os.close(files[0])
    for process in processes.values():
        os.kill(process, signal.SIGKILL)


def main() -> None:
    """Load the tokenizer and serve orders until the server is gone."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    about = json.load(sys.stdin.buffer)
    import llguidance

    try:
        tokens = llguidance.LLTokenizer(about["tokenizer"], eos_token=about["ends"])
    except ValueError as error:
        orders.sendall(str(error).encode(errors="replace") + b"\0")
        return
    orders.sendall(b"\0")
    _run(orders, about, tokens)


if __name__ == "__main__":
    main()
