"""Locks of folders after their holder was killed while its child lives on."""

import ctypes
import os
import signal
import threading
import time

import pytest

from moetrain.config import ConfigError
from moetrain.data import cache
from moetrain.train.run_folder import RunFolder

FORKS = {"none": lambda: 0, "python": os.fork, "c": ctypes.CDLL(None).fork}


class Process:
    """A fork of this process that runs ``work(tell)``; ``hear()`` returns what it tells."""

    def __init__(self, work):
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            try:
                work(lambda said: os.write(writing, f"{said}\n".encode()))
            finally:
                os._exit(0)
        os.close(writing)
        self.said = os.fdopen(reading)

    def hear(self):
        return self.said.readline().strip()

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.said.close()


@pytest.fixture
def killed(tmp_path):
    """Return ``killed(forks)``: the id of a killed holder of the folder, with a living child."""
    children = []

    def kill(forks):
        def hold(tell):
            with RunFolder(tmp_path / "out").claimed():
                child = FORKS[forks]()
                if child == 0 and forks != "none":
                    time.sleep(600)
                tell(child)
                time.sleep(600)

        holder = Process(hold)
        if child := int(holder.hear()):
            children.append(child)
        holder.kill()
        return holder.pid

    yield kill
    for child in children:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("forks", FORKS)
def test_a_folder_is_free_when_its_process_is_killed_whatever_children_it_leaves(
    forks, killed, tmp_path, caplog
):
    pid = killed(forks)
    for _ in range(2):
        with RunFolder(tmp_path / "out").claimed():
            says = (tmp_path / "out" / ".lock").read_text()
            assert says.startswith(f"process {os.getpid()} on ")
    assert caplog.text.count(f"process {pid} on ") == (forks == "c")
    assert os.listdir(tmp_path / "out") == [".lock"]


def test_a_folder_stays_claimed_when_its_process_forks(tmp_path):
    """Neither the child's end nor its release of inherited locks frees the parent's claim."""
    folder = RunFolder(tmp_path / "out")
    context = folder.claimed()
    context.__enter__()
    if (child := os.fork()) == 0:
        try:
            context.__exit__(None, None, None)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(ConfigError, match=f"another run .process {os.getpid()} on "):
        folder.claimed().__enter__()
    context.__exit__(None, None, None)
    with folder.claimed():
        pass


@pytest.mark.tier("long")
@pytest.mark.parametrize("forks", FORKS)
def test_of_many_that_take_a_killed_processs_folder_one_gets_it(forks, killed, tmp_path):
    killed(forks)
    gate, opened = os.pipe()

    def claim(tell):
        os.close(opened)
        os.read(gate, 1)  # returns once this process has closed its end
        try:
            with RunFolder(tmp_path / "out").claimed():
                tell("in")
                time.sleep(600)
        except ConfigError as error:
            tell(error)

    others = [Process(claim) for _ in range(12)]
    os.close(opened)
    os.close(gate)
    try:
        said = [other.hear() for other in others]
        assert said.count("in") == 1
        assert all("is being written by another run" in one for one in said if one != "in")
    finally:
        for other in others:
            other.kill()


def test_a_folder_of_a_process_that_cannot_be_looked_for_is_refused(killed, tmp_path):
    """A process in another container or on another machine may live, though its id is unknown."""
    killed("c")
    lock = tmp_path / "out" / ".lock"
    first, second = lock.read_text().splitlines()
    for text in ("", first, f"{first}\n4b76964c/4026531836 77", "\udcff"):
        lock.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(ConfigError, match="is being written by another run"):
            RunFolder(tmp_path / "out").claimed().__enter__()
    place, ticks = second.split()
    lock.write_text(f"process {os.getpid()} on here\n{place} {int(ticks) + 10**9}\n")
    with RunFolder(tmp_path / "out").claimed():  # another process has its id since
        pass


@pytest.mark.parametrize("forks", FORKS)
def test_a_token_cache_is_built_where_a_builder_was_killed(forks, tmp_path, monkeypatch):
    def build(documents, tokenizer, folder, advance):
        child = FORKS[forks]()
        if child or forks == "none":
            tell(child)
        time.sleep(600)

    def run(told):
        nonlocal tell
        tell = told
        monkeypatch.setattr(cache, "_write", build)
        cache._build([], None, tmp_path / "cache" / "tokens")

    tell, first = None, Process(run)
    child = int(first.hear())
    first.kill()
    monkeypatch.setattr(cache, "_write", lambda *given: {"num_documents": 0})
    done = threading.Thread(
        target=cache._build, args=([], None, tmp_path / "cache" / "tokens"), daemon=True
    )
    done.start()
    done.join(timeout=20)
    if child:
        os.kill(child, signal.SIGKILL)
    assert not done.is_alive()


def test_file_lock_keeps_threads_and_processes_apart(tmp_path):
    """Each holder reads a number, waits, and writes the next one: none is lost."""
    from moetrain.config.locks import file_lock

    count = tmp_path / "count"
    count.write_text("0")

    def add():
        for _ in range(3):
            with file_lock(tmp_path / "lock", waits=True):
                now = int(count.read_text())
                time.sleep(0.001)
                count.write_text(str(now + 1))

    def work(tell):
        threads = [threading.Thread(target=add) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tell("done")

    processes = [Process(work) for _ in range(3)]
    said = [process.hear() for process in processes]
    for process in processes:
        process.kill()
    assert said == ["done"] * 3
    assert count.read_text() == "27"
