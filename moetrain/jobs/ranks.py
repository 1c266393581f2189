"""Several ranks at one session: what the main one calls, all of them run.

The main rank alone has the jobs, their logs and the door. Before it runs a method of the session
that is :func:`together`, it tells the others, who wait for that in :func:`follow`, through the
store in
which ranks meet: a name and arguments, as JSON. Then all say how it went, since what has failed on
one has failed. Whatever is large lies in files, which all ranks see.

Left out on purpose: a rank that fails in the middle of a collective, for which the others wait
until that gives up, as in any run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from moetrain.parallel.world import World


class Spread(Protocol):
    """What has methods that all ranks run."""

    world: World
    is_told: bool
    """Whether what runs now is run by every rank."""


D = TypeVar("D", bound=Spread)
P = ParamSpec("P")
R = TypeVar("R")


class FailedElsewhere(RuntimeError):
    """What went well here has failed on another rank."""


def together(method: Callable[Concatenate[D, P], R]) -> Callable[Concatenate[D, P], R]:
    """A method that the main rank calls, with arguments of JSON, and every rank runs."""

    @wraps(method)
    def call(session: D, *args: P.args, **kwargs: P.kwargs) -> R:
        if session.is_told or session.world.size == 1:
            return method(session, *args, **kwargs)
        assert not kwargs
        session.world.broadcast(json.dumps([method.__name__, *args]))
        return _run(session, method, *args)

    return call


def _run(session: Any, method: Callable[..., R], *args: Any) -> R:
    session.is_told, result, error = True, None, None
    try:
        result = method(session, *args)
    except Exception as failure:  # noqa: BLE001 - raised below, when all ranks know of it
        error = failure
    finally:
        session.is_told = False
    others = session.world.any("" if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    if others:
        raise FailedElsewhere(others)
    return result  # pyright: ignore[reportReturnType]


def follow(session: Any) -> None:
    """Run what the main rank calls, until :func:`dismiss`."""
    while command := json.loads(session.world.broadcast("")):
        name, *args = command
        try:
            _run(session, getattr(type(session), name).__wrapped__, *args)
        except Exception as error:  # noqa: BLE001 - the main rank was told, and decides
            del error


def dismiss(session: Spread) -> None:
    """Let the other ranks go; of the main one, at the end."""
    if session.world.size > 1:
        session.world.broadcast("null")
