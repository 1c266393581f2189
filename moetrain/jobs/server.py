"""The service behind HTTP: JSON, and nothing else on the wire. Who is served: moetrain.access.

    POST   /v1/jobs                       {"id", "seed"}: a new job
    GET    /v1/jobs/ID                    how it is doing
    POST   /v1/jobs/ID/cancel             give up what it has waiting
    DELETE /v1/jobs/ID                    remove it, and all that it has
    POST   /v1/jobs/ID/requests/KIND      a request of :mod:`moetrain.jobs.requests`
    GET    /v1/jobs/ID/answers/NUMBER     what came of it
    GET    /v1/jobs/ID/saves/NAME/FILE    a save's adapter, in PEFT's format

A request is answered when it is done, with its ``number`` and ``result``; or, after
``?wait=SECONDS`` (60), with its number alone and status 202: its answer can be asked for. With
``?number=N`` it is the job's request N, which can be sent again and is done once. What is refused
or has failed has an ``error``, one line.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from moetrain.config_sources import shortened
from moetrain.jobs.journal import Full
from moetrain.jobs.requests import NAME, BadRequest
from moetrain.jobs.service import STOPPED, Service, Unknown

LONGEST_WAIT = 600.0
"""Seconds in which an answer may be waited for at once."""
FILES = ("adapter_config.json", "adapter_model.safetensors")


class TooLarge(Exception):
    """The body of a request has too many bytes."""


def make_app(service: Service) -> Starlette:
    """The server of ``service``; who may ask it: :mod:`moetrain.access`."""
    return _Door(service).app


class _Door:
    def __init__(self, service: Service) -> None:
        self.service = service
        self.most_bytes = service.config.jobs.max_request_mib << 20
        job = "/v1/jobs/{job}"
        table = [
            ("/health", "GET", self.health),
            ("/v1/jobs", "POST", self.create),
            (job, "GET", self.describe),
            (job, "DELETE", self.delete),
            (job + "/cancel", "POST", self.cancel),
            (job + "/requests/{kind}", "POST", self.ask),
            (job + "/answers/{number}", "GET", self.answer),
            (job + "/saves/{name}/{file}", "GET", self.saved),
        ]
        self.app = Starlette(
            routes=[Route(p, self._answering(f), methods=[m]) for p, m, f in table]
        )

    def _answering(
        self, handler: Callable[[HTTPRequest], Awaitable[Response]]
    ) -> Callable[[HTTPRequest], Awaitable[Response]]:
        """``handler``, with errors as answers."""

        async def handle(request: HTTPRequest) -> Response:
            try:
                return await handler(request)
            except Unknown:
                return _error(404, "there is no such thing")
            except BadRequest as error:
                return _error(400, str(error))
            except Full as error:
                return _error(429, str(error))
            except TooLarge:
                return _error(413, f"more than jobs.max_request_mib, {self.most_bytes >> 20} MiB")
            except ClientDisconnect:
                return _error(400, "the body has no end")
            except OSError as error:
                return _error(507, f"it could not be kept, and was not taken up: {error.strerror}")

        return handle

    async def _body(self, request: HTTPRequest) -> Any:
        """The JSON that was sent; nothing is an empty object."""
        # A page in somebody's browser can send anything else to a server on the same machine, and
        # what has no type too.
        kind = request.headers.get("content-type", "").partition(";")[0]
        if kind.strip().lower() != "application/json":
            raise BadRequest("the body is not application/json")
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > self.most_bytes:
                raise TooLarge
        return await asyncio.to_thread(_parsed, bytes(data))

    # ---- routes --------------------------------------------------------------------------------

    async def health(self, request: HTTPRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def create(self, request: HTTPRequest) -> Response:
        body = await self._body(request)
        if not isinstance(body, dict):
            raise BadRequest("the body is no object")
        if odd := sorted(set(body) - {"id", "seed"}):
            raise BadRequest(f"{shortened(odd[0])} is not id or seed")
        name, seed = body.get("id"), body.get("seed", 0)
        if type(seed) is not int or not isinstance(name, str | None):
            raise BadRequest("id is a text, and seed a whole number")
        return JSONResponse(await asyncio.to_thread(self.service.create, name, seed), 201)

    async def describe(self, request: HTTPRequest) -> Response:
        name = request.path_params["job"]
        return JSONResponse(await asyncio.to_thread(self.service.describe, name))

    async def cancel(self, request: HTTPRequest) -> Response:
        name = request.path_params["job"]
        return JSONResponse(await asyncio.to_thread(self.service.cancel, name))

    async def delete(self, request: HTTPRequest) -> Response:
        gone = await asyncio.to_thread(self.service.delete, request.path_params["job"])
        await asyncio.wrap_future(gone)
        return JSONResponse({})

    async def ask(self, request: HTTPRequest) -> Response:
        name, kind = request.path_params["job"], request.path_params["kind"]
        wait, number = _wait_of(request), request.query_params.get("number")
        given = None if number is None else _number_of(number)
        body, service = await self._body(request), self.service
        taken = await asyncio.to_thread(service.submit, name, kind, body, given)
        return await self._answer(name, taken, wait)

    async def answer(self, request: HTTPRequest) -> Response:
        number = _number_of(request.path_params["number"])
        return await self._answer(request.path_params["job"], number, _wait_of(request))

    async def _answer(self, name: str, number: int, wait: float) -> Response:
        future: Future[dict[str, Any]]
        future = await asyncio.to_thread(self.service.answer, name, number)
        # Others may wait for the same: giving up must not end it.
        waiting = asyncio.shield(asyncio.wrap_future(future))
        try:
            answer = await asyncio.wait_for(waiting, wait)
        except TimeoutError:
            return JSONResponse({"number": number}, 202)
        if "result" in answer:
            return JSONResponse({"number": number, "result": answer["result"]})
        status = 503 if answer["error"] == STOPPED else 422
        return JSONResponse({"number": number, "error": answer["error"]}, status)

    async def saved(self, request: HTTPRequest) -> Response:
        name, save, file = (request.path_params[key] for key in ("job", "name", "file"))
        if file not in FILES or not re.fullmatch(NAME, save):
            raise Unknown(file)
        return FileResponse(await asyncio.to_thread(self.service.saved_file, name, save, file))


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data or b"{}")
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {shortened(str(error))}") from None


def _number_of(text: str) -> int:
    if not (text.isdecimal() and len(text) < 9):
        raise BadRequest(f"number {shortened(text)} is no number of a request")
    return int(text)


def _wait_of(request: HTTPRequest) -> float:
    text = request.query_params.get("wait", "60")
    try:
        wait = float(text)
    except ValueError:
        wait = -1.0
    if not 0 <= wait <= LONGEST_WAIT:
        raise BadRequest(f"wait {shortened(text)} is not 0 to {LONGEST_WAIT:.0f} seconds")
    return wait


def _error(status: int, problem: str) -> Response:
    return JSONResponse({"error": problem}, status)
