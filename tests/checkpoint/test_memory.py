"""Machines' folders: on how many machines a file lies, and which step all machines have alike.

A machine is a thread with a folder of its own. Nothing is sent between them.
"""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from moetrain.checkpoint.memory import Folders
from moetrain.checkpoint.read import Contents, FileSum
from tests.lib.checkpoints import save


@pytest.fixture(autouse=True)
def no_group(monkeypatch):
    group = Mock(spec=dist.ProcessGroup)
    monkeypatch.setattr(dist, "new_group", lambda **settings: group)


@pytest.mark.parametrize("copies", [1, 2, 3, 4, 9])
def test_as_many_machines_hold_each_ranks_files_as_replicas_asks_for(copies, tmp_path):
    """Four machines have two ranks each. The next machines hold copies; the last is followed by
    the first."""
    places = [f"machine {rank // 2}" for rank in range(8)]
    folders = Folders(tmp_path, gather=lambda mine: places, copies=copies)
    names = [f"model-{rank:05d}-00.safetensors" for rank in range(8)]
    sums = {name: FileSum(100 + rank, 0, "") for rank, name in enumerate(names)}
    moves = folders.copies(Contents(sums, {}))
    for rank, name in enumerate(names):
        mine = [move for move in moves if move.name == name]
        assert all((move.source, move.size) == (rank, 100 + rank) for move in mine)
        next_machines = [(rank // 2 + step) % 4 for step in range(1, min(copies, 4))]
        assert [move.target for move in mine] == [2 * machine for machine in next_machines]


def on_machines(roots, act):
    """Call ``act`` with the folders of each machine at once; return the answers."""
    met, told = threading.Barrier(len(roots), timeout=30), [None] * len(roots)

    def run(rank):
        def gather(mine):
            told[rank] = mine
            met.wait()
            found = [*told]
            met.wait()  # until all have read it
            return found

        return act(Folders(roots[rank], rank=rank, gather=gather, copies=2))

    with ThreadPoolExecutor(len(roots)) as pool:
        return list(pool.map(run, range(len(roots))))


@pytest.mark.parametrize("is_alike", [True, False])
def test_a_step_is_passed_over_if_machines_have_different_ones(is_alike, tmp_path):
    """Both are whole: the machines went on from the same step, each by itself."""
    roots = [tmp_path / "0", tmp_path / "1"]
    save(roots[0], 1)
    shutil.copytree(roots[0], roots[1])
    for number, root in enumerate(roots):
        save(root, 2, 0.0 if is_alike else float(number))
    answers = on_machines(roots, Folders.newest)
    for root, (path, problems) in zip(roots, answers, strict=True):
        assert path == root / f"step-{1 + is_alike:08d}"
        said = f"{root / 'step-00000002'}: its manifest differs between machines"
        assert problems == [] if is_alike else [said]
