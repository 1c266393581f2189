"""Helpers of tests/jobs/test_turns.py that other tests use too."""

import threading
from contextlib import contextmanager

from moetrain.jobs.scheduler import Service
from tests.lib.job_services import config_of, rate, text_of, texts
from tests.lib.tenants import WORDS

TENANTS = [*WORDS, "jobs.max_tenants=3", "jobs.max_resident=4", "data.seq_len=512"]
RESIDENT = [*WORDS, "jobs.max_resident=4"]
SELDOM = "jobs.save_interval=100"
LEARN = ("forward_backward", texts(text_of(1)))
STEP = ("optim_step", rate(1e-2))


class Slow:
    """A device that finishes a turn when the service waits for it, or ``turns`` turns later."""

    def __init__(self, service, turns=20):
        self.log, self.turns, session = [], turns, service.session
        marks, drain, turn = [], service.drain, service.turn

        def compute(*late):
            for one in [one for one in late if not one.is_ready]:
                self.log.append("computed")
                one.computed.set()

        def mark():
            marks.append(_Mark())
            return marks[-1]

        def drain_slowly(most=0):
            unfinished = service.unfinished[: max(0, len(service.unfinished) - most)]
            compute(*(turn.mark for turn in unfinished))
            drain(most)

        def look_and_turn():
            for late in marks:
                late.turns += 1
            compute(*(late for late in marks if late.turns >= self.turns))
            return turn()

        def begun(serve):
            def call(*args):
                self.log.append("begun")
                return serve(*args)

            return call

        def die():
            for late in marks:
                late.is_lost = not late.is_ready
                late.computed.set()

        self.die = die
        session.mark, service.drain, service.turn = mark, drain_slowly, look_and_turn
        session.serve, session.serve_batch = map(begun, (session.serve, session.serve_batch))

    def told(self, future):
        future.add_done_callback(lambda _: self.log.append("told"))
        return future


class _Mark:
    is_lost = False

    def __init__(self):
        self.computed, self.turns = threading.Event(), 0

    @property
    def is_ready(self):
        return self.computed.is_set()

    def read(self):
        # A wait in the main thread computes now.
        if threading.current_thread() is threading.main_thread():
            self.computed.set()
        assert self.computed.wait(60)
        if self.is_lost:
            raise RuntimeError


@contextmanager
def slow(folder, *words):
    with Service(config_of(folder, *words)) as service:
        yield service, Slow(service)


def serve(service):
    while service.turn():
        pass


def submit_all(service, requests):
    return [service.answer(x, service.submit(x, *request)) for x, request in requests]


def answers_of(service, requests):
    """Return the answers to requests that all wait at once."""
    futures = submit_all(service, requests)
    serve(service)
    return [future.result(0) for future in futures]
