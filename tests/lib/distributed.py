""":func:`spawn` runs a function on several processes, for tests of anything that communicates.

Processes come from a fork server that has imported torch and moetrain once, so a world of four
starts in about a second. A rank that raises or dies fails the test with that rank's traceback, and
the others are killed; nothing can outlive the timeout. Results travel by value (plain pickle), not
through shared memory that would vanish with the process that made it.
"""

from __future__ import annotations

import faulthandler
import functools
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

SHARED = 3 if "PYTEST_XDIST_WORKER" in os.environ else 1
"""Factor of a timeout where other tests use the machine at the same time."""
PRELOAD = [
    "pytest",
    "torch",
    "torch.distributed.tensor",
    "torch.nn.attention.flex_attention",
    "moetrain.rl.loop",
]
# With CUDA, a backward starts threads for GPUs, and a process with threads must not be forked.
if torch.version.cuda is None:
    PRELOAD += ["torch._inductor.compile_fx"]
    PRELOAD += ["tests.lib.compiled_once", "tests.lib.quick_interpreter"]
    PRELOAD += ["tests.lib.forked_python", "moetrain.cli.launch", "torch.distributed.run"]
    # Modules of test files that every rank imports for its function (transformers' models, a
    # client). They initialise a GPU if they find one.
    PRELOAD += ["tests.models.families.test_families", "openai"]


def spawn(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    device_type: str = "cpu",
    timeout: float = 60.0,
) -> list[Any]:
    """Call ``fn(*args)`` on ``world`` ranks of one process group (gloo, or NCCL for "cuda").

    Args:
        fn: a function at the top level of a module, called with the default group initialised.
        args: anything that pickles.
        timeout: seconds for everything together, on a machine without other work.

    Returns:
        The values that ``fn`` returned (anything that pickles), by rank.

    Raises:
        Failed: a rank raised, died or ran past ``timeout``. If a rank died in one of gloo's
            threads, all ranks run once more, with a warning (:class:`_LostInGloo`).
    """
    timeout *= SHARED
    call = pickle.dumps((fn, args))
    try:
        return _run(world, device_type, timeout, call)
    except _LostInGloo as lost:
        warnings.warn(f"all ranks run again: {lost}", stacklevel=2)
    try:
        return _run(world, device_type, timeout, call)
    except _LostInGloo as lost:
        pytest.fail(str(lost))


class _LostInGloo(Exception):
    """A rank died by a memory fault, or aborted, in a thread that runs no Python.

    This was seen four times in some fifteen thousand worlds on loaded machines, each time in
    another test, in gloo's threads; valgrind finds no fault in one of these tests. A fault of our
    code would happen in the second run too.
    """


def _run(world: int, device_type: str, timeout: float, call: bytes) -> list[Any]:
    context = fork_server()
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], {}
        for rank in range(world):
            Path(folder, f"{rank}.txt").touch()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=rank_main, args=(rank, world, device_type, folder, timeout, call, theirs)
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes[ours] = rank
        try:
            end = time.monotonic() + timeout
            return _collect(pipes, processes, end, Path(folder), device_type == "cpu")
        finally:
            for process in processes:
                process.kill()
                process.join()


@functools.cache
def fork_server() -> Any:
    """Return the context of a running fork server, whose processes have imported all this.

    The server imports by name, and finds the repository by the PYTHONPATH that it is started with.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    path = os.environ.get("PYTHONPATH")
    root = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [path])])
    try:
        forkserver.ensure_running()
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path
    return context


def _collect(
    pipes: dict[Connection, int],
    processes: list[Any],
    deadline: float,
    folder: Path,
    is_on_cpu: bool,
) -> list[Any]:
    results: dict[int, Any] = {}
    pending = dict(pipes)
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            pytest.fail(f"timed out; no answer from ranks {sorted(pending.values())}")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pending.pop(pipe)
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                succeeded, value = False, "it died"
            if not succeeded:
                _look_for_dead(processes, folder, value, is_on_cpu)
                pytest.fail(f"rank {rank} raised\n{value}", pytrace=False)
            results[rank] = value
    return [results[rank] for rank in sorted(results)]


def _look_for_dead(processes: list[Any], folder: Path, value: str, is_on_cpu: bool) -> None:
    """Fail the test if a rank died: the exceptions of its peers, which often arrive first, follow
    from that.

    ``value``: the exception of a rank that did not die.
    """
    end = time.monotonic() + 1.0
    while not (dead := [rank for rank, one in enumerate(processes) if one.exitcode]):
        if time.monotonic() > end:
            return
        time.sleep(0.02)
    codes = {rank: processes[rank].exitcode for rank in dead}
    traces = {rank: (folder / f"{rank}.txt").read_text() for rank in dead}
    died = "\n".join(f"rank {r} died with exit code {codes[r]}\n{traces[r]}" for r in dead)
    are_faults = {*codes.values()} <= {-signal.SIGSEGV, -signal.SIGABRT}
    is_outside = ("Fatal Python error" in x and "Current thread" not in x for x in traces.values())
    if is_on_cpu and are_faults and all(is_outside):
        raise _LostInGloo(f"{died}\n{value}")
    pytest.fail(f"{died}\n{value}")


def compile_by_turns(words: list[str], turn: int = 1) -> None:
    """Compile the blocks of a run with these settings on one rank only, the ``turn``-th.

    Its collectives meet those of the other ranks' eager blocks. Compilation takes nearly all the
    time of such a test. All ranks compile if the backward recomputes: a compiled recompute calls
    other collectives.
    """
    from moetrain.models.transformer import compile_blocks
    from moetrain.parallel import apply

    policies = [word for word in words if word.startswith("activation.policy=")]
    is_plain = dist.is_initialized() and dist.get_rank() != turn % dist.get_world_size()
    if is_plain and policies[-1:] in ([], ["activation.policy=none"]):
        apply.compile_blocks = Mock()
    else:
        apply.compile_blocks = functools.partial(compile_blocks, backend="aot_eager")


def rank_main(
    rank: int,
    world: int,
    device_type: str,
    folder: str,
    timeout: float,
    call: bytes,
    pipe: Connection,
) -> None:
    """Run one rank's process: send the result of ``call``, or its failure, to ``pipe``.

    The result is sent before the group ends: a world of four was seen to lose a rank by SIGSEGV
    between its last barrier and that end, while the peers closed their connections.
    """
    trace = os.open(Path(folder, f"{rank}.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(trace, 2)  # C++ writes there why it aborts
    faulthandler.enable()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # a test machine's host name may not resolve
    torch.set_num_threads(1)
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    try:
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
            device_id=torch.device("cuda", rank) if device_type == "cuda" else None,
        )
        fn, args = pickle.loads(call)
        answer = (True, fn(*args))
        dist.barrier()  # a rank that is done must not close connections that others still use
    except BaseException:  # noqa: BLE001 - whatever ended this rank is the test's to report
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))
    if answer[0]:
        dist.destroy_process_group()
