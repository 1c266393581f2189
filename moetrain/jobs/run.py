"""``python -m moetrain.jobs``: the service as a process, behind HTTP.

Exit codes are those of :mod:`moetrain.train`. On SIGTERM or Ctrl-C the process saves the jobs in
memory, and answers the clients that wait with an error.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moetrain.config import Config, logger
from moetrain.config.environment import launched_place
from moetrain.http.access import Access
from moetrain.jobs.scheduler import Service
from moetrain.jobs.session import JobSession
from moetrain.jobs.shared import check_settings
from moetrain.models.architecture import Architecture
from moetrain.train.estimates.plan import plan_memory
from moetrain.train.session import garbage_collector_off, resolve_run, stop_signals

_IDLE_SECONDS = 0.1
"""Seconds between two checks for stop signals, while no request waits."""


class JobRun:
    """A run of the service as a process: ``JobRun(config).fit()``."""

    def __init__(self, config: Config) -> None:
        """Check ``config``. Raises ConfigError: the service cannot have these settings."""
        check_settings(config)
        self.access_of(config).check()
        self.config = config

    @classmethod
    def plan(cls, config: Config, arch: Architecture) -> str:
        """Describe the memory that a run takes. Raises ConfigError, as the constructor does."""
        return plan_memory(cls(config).config, arch)

    def fit(self) -> None:
        """Serve until SIGTERM or Ctrl-C.

        Raises:
            ConfigError: as :class:`Service`, or the server cannot listen at ``jobs.port``.
            RunFailed: the disk or the device fails.
            SystemExit: SIGTERM (143) or Ctrl-C (130) came; everything was saved.
        """
        place = launched_place()
        if place is not None and place.rank > 0:  # it performs the main rank's commands
            with stop_signals() as stop:  # the main rank says when to stop
                session = JobSession(*resolve_run(self.config))
                with garbage_collector_off():
                    session.follow()
        else:
            with (
                Service(self.config) as service,
                stop_signals() as stop,
                self.serving(service),
                garbage_collector_off(),
            ):
                settings = json.dumps(service.config.to_dict(), indent=2)
                (service.folder / "config.json").write_text(settings, "utf-8")
                logger.info("settings:\n%s", service.config.describe())
                work = sum(job.has_work for job in service.jobs.values())
                logger.info("%d jobs, %d of them with waiting requests", len(service.jobs), work)
                service.is_stopping = lambda: bool(stop)
                while not stop:
                    service.turn()
                    service.wait(_IDLE_SECONDS)
                    service.session.tidy()
            session = service.session
            session.dismiss()
        session.world.leave()
        if stop:
            raise SystemExit(128 + stop[0])

    @classmethod
    @contextmanager
    def serving(cls, service: Service) -> Iterator[None]:
        """Serve HTTP at ``jobs.port``, on another thread, while the context is open."""
        access = cls.access_of(service.config)
        from moetrain.jobs.server import JobRoutes  # needs the extra "jobs"

        server, listener = JobRoutes(service).listen(access)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            port = listener.getsockname()[1]
            print(f"serving jobs at http://{access.host}:{port}", flush=True)
            yield
        finally:
            service.refuse_waiting()
            server.should_exit = True
            thread.join()

    @staticmethod
    def access_of(config: Config) -> Access:
        """Return the address and the authentication of the server."""
        jobs = config.jobs
        return Access(
            jobs.host,
            jobs.port,
            jobs.auth,
            jobs.token_file,
            own_file=Path(config.output_dir) / "token",
            section="jobs.",
            packages=("starlette", "uvicorn", "tinker"),
        )
