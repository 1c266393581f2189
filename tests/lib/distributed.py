"""Run a function on several processes: :func:`spawn`. For tests of anything that communicates.

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
"""By how much a timeout is longer where other tests have a part of the machine."""
PRELOAD = [
    "pytest",
    "torch",
    "torch.distributed.tensor",
    "torch.nn.attention.flex_attention",
    "moetrain.rl.loop",
]
if torch.version.cuda is None:  # else a backward begins threads for GPUs, which no fork survives
    PRELOAD += ["torch._inductor.compile_fx"]
    PRELOAD += ["tests.lib.compiled_once", "tests.lib.quick_interpreter"]
    PRELOAD += ["tests.lib.forked_python", "moetrain.cli.launch", "torch.distributed.run"]
    # Of files of tests, which every rank imports for its function: transformers' models, and a
    # client. They begin to use a GPU that they find.
    PRELOAD += ["tests.models.families.test_families", "openai"]


def spawn(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    device_type: str = "cpu",
    timeout: float = 60.0,
) -> list[Any]:
    """``fn(*args)`` on ``world`` ranks of one process group (gloo, or NCCL for "cuda").

    Args:
        fn: a function at the top level of a module, called with the default group initialised.
        args: anything that pickles.
        timeout: seconds for everything together, on a machine without other work.

    Returns:
        What ``fn`` returned (anything that pickles), by rank.

    Raises:
        Failed: a rank raised, died or ran past ``timeout``. A rank that was lost in a thread
            without Python, gloo's, is warned of, and all run once more (:class:`_LostInGloo`).
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

    Seen four times in some fifteen thousand worlds of loaded machines, each time in another test,
    with gloo's threads at work; valgrind finds no fault in one of these tests. What is ours would
    happen again.
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
    """The context of processes that have imported all this: its server runs.

    It imports by name, and finds the repository as what it is started with says.
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
    """Fail for ranks that died, if some did: peers raise because of it, and often earlier.

    ``value``: what a rank raised that did not die.
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
    """Have the blocks of a run of these settings compiled by one rank, the ``turn``-th, alone.

    It meets in every collective the others' plain blocks. To compile takes nearly all of the time
    of a test of what is compiled. All ranks do it where a backward computes again: compiled, it
    does so with other collectives.
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
    """One rank's process: what ``call`` answers, or how it failed, goes to ``pipe``.

    The answer goes before the group ends: a world of four was seen to lose a rank by SIGSEGV
    between its last barrier and that end, with the peers' connections closing.
    """
    trace = os.open(Path(folder, f"{rank}.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(trace, 2)  # where C++ says why it aborts
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
        dist.barrier()  # a rank that is done must not close connections others still use
    except BaseException:  # noqa: BLE001 - whatever ended this rank is the test's to report
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))
    if answer[0]:
        dist.destroy_process_group()
