"""The process of the service: garbage collection, and atomic files."""

import errno
import gc
import os
import signal
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from moetrain.config.files import write_durably
from moetrain.jobs import run as run_module
from moetrain.jobs import session as session_module
from moetrain.jobs.run import JobRun
from moetrain.jobs.scheduler import Service
from moetrain.jobs.session import Forget, JobSession
from tests.lib.job_services import config_of


def test_garbage_is_collected_once_a_minute(monkeypatch):
    now, collected = [1000.0], []
    monkeypatch.setattr(session_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(gc, "collect", lambda: collected.append(now[0]))
    session = SimpleNamespace(tidied_time=now[0])
    for seconds in range(0, 130, 10):
        now[0] = 1000.0 + seconds
        JobSession.tidy(session)
    assert collected == [1070.0]
    now[0] = 1131.0
    JobSession.tidy(session)
    assert collected == [1070.0, 1131.0]


def test_the_process_serves_with_the_collector_off_and_tidies_itself(tmp_path, monkeypatch):
    seen = []

    def turn(service):
        seen.append(gc.isenabled())
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return False

    monkeypatch.setattr(Service, "turn", turn)
    monkeypatch.setattr(JobSession, "tidy", lambda _: seen.append("tidy"))
    monkeypatch.setattr(JobRun, "serving", lambda *_: nullcontext())
    with pytest.raises(SystemExit) as stopped:
        JobRun(config_of(tmp_path)).fit()
    assert stopped.value.code == 143
    assert seen == [False, "tidy"] * 2
    assert gc.isenabled()


def test_other_ranks_follow_with_the_collector_off_and_tidy_themselves(tmp_path, monkeypatch):
    seen = []
    commands = iter([Forget(job="fine").model_dump_json(), Forget(job="bad").model_dump_json(), ""])

    class Follower:
        world = SimpleNamespace(broadcast=lambda _: next(commands), leave=lambda: None)
        follow = JobSession.follow

        def __init__(self, *_):
            self.agree, self.tidy = lambda work: work(), lambda: seen.append("tidy")

        def perform(self, command):
            seen.append((command.job, gc.isenabled()))
            if command.job == "bad":
                raise ZeroDivisionError

    monkeypatch.setattr(run_module, "launched_place", lambda: SimpleNamespace(rank=1))
    for module in (run_module, session_module):
        monkeypatch.setattr(module, "JobSession", Follower)
    JobRun(config_of(tmp_path)).fit()
    assert seen == [("fine", False), "tidy", ("bad", False), "tidy"]
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
