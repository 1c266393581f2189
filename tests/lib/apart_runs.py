"""Helpers of tests/rl/test_apart.py that other tests use too."""

import os
import socket
import time

import torch

from moetrain.cli.train import run_rl
from moetrain.rl import apart
from tests.lib.checkpoints import tensors_of
from tests.lib.distributed import fork_server
from tests.lib.rl_runs import lines_of

OWN = ("generators_lost", "trajectories_restarted", "generator/")


def be_rank(rank, world, port, words, silence):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    apart.SILENCE_SECONDS, apart.MAX_IN_VAIN = silence, 3
    os._exit(run_rl(words))


def launched(world, words, *, silence=8.0, timeout=60, kill_at=None):
    """Return the exit codes of a run's ranks, started as a launcher starts them.

    ``kill_at``: a function; the main learner is killed once it returns true.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [
        fork_server().Process(target=be_rank, args=(rank, world, port, words, silence))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    try:
        while kill_at is not None and not kill_at():
            time.sleep(0.05)
        if kill_at is not None:
            ranks[0].kill()
        for process in ranks:
            process.join(timeout if process is ranks[0] else 10)
        return [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()


def rows_of(folder):
    rows = lines_of(folder)
    return [{k: v for k, v in row.items() if not k.startswith(OWN)} for row in rows]


def weights_of(folder):
    return tensors_of(sorted((folder / "checkpoints").iterdir())[-1])["model"]


def assert_same_bits(one, other):
    assert rows_of(one) == rows_of(other)
    mine, theirs = weights_of(one), weights_of(other)
    assert all(torch.equal(theirs[name], weight) for name, weight in mine.items())
