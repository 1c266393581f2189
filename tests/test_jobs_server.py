"""The job service as a process, behind HTTP: killed, cancelled, asked by many, and by strangers."""

import os
import random
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_jobs import WORDS, Course, adapter_of, run_alone

from moetrain.jobs.client import Client, RequestFailed

CANCELLED = (3, 10, 21, 32, 43, 48)
"""Of fifty."""


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Process:
    """The service in a process of its own, which can be killed and started again."""

    def __init__(self, folder, *words):
        self.folder, self.port = folder, free_port()
        self.words = [*WORDS, f"output_dir={folder}", f"jobs.port={self.port}", *words]
        self.client = Client(f"http://127.0.0.1:{self.port}", patience=60)
        self.start()

    def start(self):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "moetrain.jobs", *self.words]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    def wait(self):
        """Until it serves."""
        Client(self.client.url, patience=60).call("GET", "/health")

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start(tmp_path):
    """``start(*words)``: a :class:`Process` in ``tmp_path / "out"``, ended with the test."""
    started = []

    def begin(*words):
        started.append(Process(tmp_path / "out", *words))
        return started[-1]

    yield begin
    for one in started:
        one.kill()


def follow(client, seed, is_cancelled, counts):
    """One client's job from start to end, or to the middle; every answer is counted."""
    job = client.create(seed=seed)
    course = Course(seed, lambda kind, body: job.ask(kind, **body))
    while course.go_on():
        counts.append(seed)
        if is_cancelled and len(course.results) == 3:
            assert job.cancel()["status"] == "cancelled"
            with pytest.raises(RequestFailed, match="this job is cancelled"):
                job.optim_step(lr=1.0)
            if seed % 2:
                job.delete()
            return None
    return course.results, job.id


def test_fifty_jobs_with_kills_and_cancels_each_as_if_alone(start, tmp_path):
    service = start("jobs.max_loaded=4", "jobs.save_interval=4")
    service.wait()
    over, seeds, counts = threading.Event(), range(50), []

    killed = []

    def kill_now_and_then():
        """At moments that nobody has chosen, of a service that has got somewhere since the last."""
        while not over.wait(random.uniform(0.5, 1.5)):
            if len(counts) >= 80 * (len(killed) + 1):
                service.kill()
                killed.append(len(counts))
                service.start()

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    try:
        with ThreadPoolExecutor(10) as clients:
            parts = [
                clients.submit(follow, service.client, s, s in CANCELLED, counts) for s in seeds
            ]
            found = dict(zip(seeds, (part.result() for part in parts), strict=True))
    finally:
        over.set()
        killer.join()
    assert len(killed) >= 2, len(counts)
    assert [seed for seed in seeds if found[seed] is None] == list(CANCELLED)
    for seed in seeds:
        if found[seed] is not None:
            results, name = found[seed]
            mine = results, adapter_of(service.folder, name)
            assert mine == run_alone(tmp_path / f"alone-{seed}", seed), seed
    left = {path.name for path in (service.folder / "jobs").iterdir()}
    assert len(left) == 50 - sum(seed % 2 for seed in CANCELLED)
