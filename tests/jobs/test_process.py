"""The process of the service: garbage collection, and atomic files."""

import errno
import gc
import os
import signal
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from moetrain.config.files import write_durably
from moetrain.jobs import run as run_module
from moetrain.jobs import session as session_module
from moetrain.jobs.run import JobRun
from moetrain.jobs.scheduler import Service
from moetrain.jobs.session import Forget, JobSession
from moetrain.train.session import garbage_collector_off
from tests.lib.job_services import config_of


class Cycle:
    """An object that refers to itself."""

    itself: object


class Litter:
    """Makes garbage that only Python's collector finds, and moves the session's clock."""

    def __init__(self, monkeypatch):
        self.now, self.made, self.seen = 1000.0, 0, []
        monkeypatch.setattr(session_module.time, "monotonic", lambda: self.now)

    def drop(self):
        cycle, number = Cycle(), self.made
        cycle.itself, self.made = cycle, number + 1
        weakref.finalize(cycle, self.seen.append, f"{number} is gone")
        gc.collect(1)  # the cycle is old from here on, so only a full collection finds it


def test_garbage_is_collected_once_a_minute(monkeypatch):
    litter = Litter(monkeypatch)
    session, gone = SimpleNamespace(tidied_time=litter.now), {}
    with garbage_collector_off():
        for seconds in range(0, 140, 10):
            litter.now = 1000.0 + seconds
            litter.drop()
            JobSession.tidy(session)
            gone |= dict.fromkeys(litter.seen[len(gone) :], seconds)
    assert [*gone.values()] == [70] * 8  # the next is due at 131


def test_the_process_serves_with_the_collector_off_and_tidies_itself(tmp_path, monkeypatch):
    litter = Litter(monkeypatch)
    seen = litter.seen

    def turn(service):
        litter.drop()
        seen.append(gc.isenabled())
        litter.now += 61
        if litter.made == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return False

    monkeypatch.setattr(Service, "turn", turn)
    monkeypatch.setattr(JobRun, "serving", lambda *_: nullcontext())
    with pytest.raises(SystemExit) as stopped:
        JobRun(config_of(tmp_path)).fit()
    assert stopped.value.code == 143
    assert seen[:6] == [False, "0 is gone", False, "1 is gone", False, "2 is gone"]
    assert gc.isenabled()


def test_other_ranks_follow_with_the_collector_off_and_tidy_themselves(tmp_path, monkeypatch):
    litter = Litter(monkeypatch)
    seen = litter.seen
    commands = iter([Forget(job="fine").model_dump_json(), Forget(job="bad").model_dump_json(), ""])

    class Follower:
        world = SimpleNamespace(broadcast=lambda _: next(commands), leave=lambda: None)
        follow, tidy = JobSession.follow, JobSession.tidy
        tidied_time = litter.now

        def __init__(self, *_):
            self.agree = lambda work: work()

        def perform(self, command):
            litter.drop()
            litter.now += 61
            seen.append((command.job, gc.isenabled()))
            if command.job == "bad":
                raise ZeroDivisionError

    monkeypatch.setattr(run_module, "launched_place", lambda: SimpleNamespace(rank=1))
    for module in (run_module, session_module):
        monkeypatch.setattr(module, "JobSession", Follower)
    JobRun(config_of(tmp_path)).fit()
    assert seen == [("fine", False), "0 is gone", ("bad", False), "1 is gone"]
    assert gc.isenabled()


@pytest.mark.parametrize("size", [0, 1, 10, 1000])
def test_files_are_written_whole_and_forced_to_the_disk(tmp_path, monkeypatch, size):
    """They are written in parts if the system takes no more at once, and renamed when complete."""
    write, sync, log = os.write, os.fsync, []

    def note(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        log.append((path, sorted(os.listdir(tmp_path)), os.path.getsize(path)))
        sync(descriptor)

    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    monkeypatch.setattr(os, "fsync", note)
    data, path = os.urandom(size), tmp_path / "one"
    mask = os.umask(0o027)
    try:
        (tmp_path / f".one.{os.getpid()}.tmp").write_bytes(b"of a killed process" * 99)
        write_durably(path, data)
    finally:
        os.umask(mask)
    assert path.read_bytes() == data
    assert path.stat().st_mode & 0o777 == 0o640
    (temporary, *first), (folder, *second) = log
    assert temporary.endswith(".tmp")
    assert first == [[os.path.basename(temporary)], size]
    assert folder == str(tmp_path)
    assert second[0] == ["one"]


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_file_that_cannot_be_written_is_as_it_was(tmp_path, monkeypatch, call):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    path, before = tmp_path / "one", len(os.listdir("/proc/self/fd"))
    write_durably(path, b"old")
    owner = type(path) if call == "replace" else os
    monkeypatch.setattr(owner, call, full)
    with pytest.raises(OSError, match="No space"):
        write_durably(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["one"]
    assert len(os.listdir("/proc/self/fd")) == before
