"""``python -m moetrain.jobs``: the service as a process, behind HTTP or over files.

Exit codes are those of :mod:`moetrain.train`. A signal stops it in order: what is in memory is
saved, who waits is told. Killed, it loses nothing that anybody was told of.

Of several processes (torchrun, ``launch.nproc``) the main one has the jobs and the door.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import resource
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moetrain.config import Config, ConfigError, RunFailed, launched_place
from moetrain.config_sources import shortened
from moetrain.jobs.desk import Desk
from moetrain.jobs.files import Course
from moetrain.jobs.ranks import dismiss, follow
from moetrain.jobs.service import Service
from moetrain.memory import plan_memory
from moetrain.models import Architecture
from moetrain.preflight import resolve_run
from moetrain.run_control import stop_signals

logger = logging.getLogger("moetrain")

CONNECTIONS = 1024
"""At once, or half as many as this process may have files open; further ones are closed."""
IDLE_SECONDS = 0.1
"""Between looks at stop signals, while nobody has anything to do."""


class JobRun:
    """One run of the service. ``JobRun(config).fit()`` is all there is to call."""

    def __init__(self, config: Config) -> None:
        check_settings(config)
        self.config = config

    def fit(self) -> None:
        """Serve until SIGTERM or Ctrl-C, or, without a port, until all files are done.

        Raises:
            ConfigError: as :class:`Service`; or nobody can listen at ``jobs.port``.
            RunFailed: a job that is a file has failed, or the disk does.
            SystemExit: SIGTERM (143) or Ctrl-C (130) came; all there is was saved.
        """
        place = launched_place()
        if place is not None and place.rank > 0:
            self._help()
            return
        with Service(self.config) as service, stop_signals() as stop, serving(service):
            self.announce(service)
            service.is_stopping = lambda: bool(stop)
            while not stop and (service.turn() or self.config.jobs.port is not None):
                service.wait(IDLE_SECONDS)
        dismiss(service.desk)
        service.desk.world.leave()
        if stop:
            raise SystemExit(128 + stop[0])
        files = [job for job in service.jobs.values() if isinstance(job.log, Course)]
        failed = [f"{job.id} ({job.error})" for job in files if job.status == "failed"]
        if failed:
            raise RunFailed(f"{len(failed)} of {len(files)} jobs: {', '.join(failed)}")

    def _help(self) -> None:
        """Of other ranks than the main one: do as it does."""
        with stop_signals() as stop:  # it says when to stop
            desk = Desk(*resolve_run(self.config))
            follow(desk)
        desk.world.leave()
        if stop:
            raise SystemExit(128 + stop[0])

    def announce(self, service: Service) -> None:
        """Say what is about to run and write ``config.json``."""
        settings = json.dumps(service.config.to_dict(), indent=2)
        (service.folder / "config.json").write_text(settings, "utf-8")
        logger.info("settings:\n%s", service.config.describe())
        work = sum(job.has_work for job in service.jobs.values())
        logger.info("%d jobs, of which %d have something to do", len(service.jobs), work)


@contextmanager
def serving(service: Service) -> Iterator[None]:
    """Meanwhile ``jobs.port``, if there is one, is listened at by a thread of its own."""
    jobs = service.config.jobs
    if jobs.port is None:
        yield
        return
    import uvicorn

    from moetrain.jobs.server import make_app

    token = token_of(service.config)
    listener = _listen(jobs.host, jobs.port)
    # Who waits for an answer has been told that it will not come.
    settings: dict[str, Any] = {"log_level": "warning", "timeout_graceful_shutdown": 2}
    settings["http"] = _bounded()
    server = uvicorn.Server(uvicorn.Config(make_app(service, token), **settings))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        print(f"serving jobs at http://{jobs.host}:{jobs.port}", flush=True)
        yield
    finally:
        service.tell_stopped()
        server.should_exit = True
        thread.join()


def _bounded() -> type[asyncio.Protocol]:
    """HTTP of a number of connections: each takes a file of this process, as what jobs write does,
    and anybody who can connect makes them."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = CONNECTIONS if files == resource.RLIM_INFINITY else min(CONNECTIONS, files // 2)

    class Bounded(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().connection_made(transport)
            if len(self.connections) > most:
                transport.abort()

    return Bounded


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except (OSError, UnicodeError) as error:
        raise ConfigError("jobs.host", f"{host!r} is no address: {error}") from None
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        problem = f"{port} at {host} cannot be listened at: {error.strerror}; choose another"
        raise ConfigError("jobs.port", problem) from None


def token_of(config: Config) -> str | None:
    """What who is served must send; None: nothing.

    Raises:
        ConfigError: the file that holds it cannot be read, or holds nothing.
    """
    jobs = config.jobs
    if jobs.auth == "none" or (jobs.auth == "auto" and is_loopback(jobs.host)):
        return None
    path = Path(jobs.token_file or Path(config.output_dir) / "token")
    try:
        if jobs.token_file is None and not path.exists():
            _write_secret(path, secrets.token_urlsafe(32))
        token = path.read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        problem = f"{shortened(str(path))} cannot be read: {error}"
        raise ConfigError("jobs.token_file", problem) from None
    if not token:
        raise ConfigError("jobs.token_file", f"{shortened(str(path))} holds no token")
    print(f"the bearer token is in {path}", flush=True)
    return token


def _write_secret(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text + "\n")
    temporary.replace(path)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_settings(config: Config) -> None:
    """Raise ConfigError for settings that a service cannot have."""
    if not config.lora.rank:
        raise ConfigError("lora.rank", "0, but jobs train adapters beside one model; set it")
    if config.optim.offload_fraction:
        problem = f"{config.optim.offload_fraction}, but jobs take turns at one optimizer's state"
        raise ConfigError("optim.offload_fraction", f"{problem}, on the device; leave it 0")
    jobs = config.jobs
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if jobs.port is not None and missing:
        problem = f"{' and '.join(missing)} is not installed; pip install 'moetrain[serve]', or"
        raise ConfigError("jobs.port", f"{jobs.port}, but {problem} set it none")
    if jobs.port is None:
        if not jobs.files:
            problem = "none, and there are no jobs.files: nothing is to be done; set one of them"
            raise ConfigError("jobs.port", problem)
        for name in ("host", "auth", "token_file"):
            if config.is_set(f"jobs.{name}"):
                problem = f"{getattr(jobs, name)!r} contradicts jobs.port none; unset one"
                raise ConfigError(f"jobs.{name}", problem)
    if jobs.auth == "none" and jobs.token_file is not None:
        problem = f"{jobs.token_file!r} contradicts jobs.auth 'none'; unset one"
        raise ConfigError("jobs.token_file", problem)


def inspect(config: Config, arch: Architecture) -> None:
    """Before several processes are started: :func:`check_settings`."""
    check_settings(config)


def plan(config: Config, arch: Architecture) -> str:
    """For a dry run: refuse what a service would refuse; the memory that it takes, in words."""
    check_settings(config)
    return plan_memory(config, arch)
