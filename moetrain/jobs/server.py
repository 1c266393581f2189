"""The service as an HTTP server of JSON. :mod:`moetrain.rollout.access` authenticates clients.

:class:`JobRoutes` has the routes, which docs/jobs.md describes. A request is answered when it is
done, with its ``number`` and ``result``, or an ``error`` of one line; after ``?wait=SECONDS`` (60),
with its number alone and status 202. With ``?number=N`` it is the job's request N, which can be
sent again and is done once.
"""

import asyncio
from concurrent.futures import Future
from functools import partial
from typing import Any, Self

from pydantic import BaseModel, Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from moetrain.jobs.api import Refused, Save
from moetrain.jobs.scheduler import Service
from moetrain.rollout.http_json import JsonServer
from moetrain.rollout.request import JsonBody

_NOT_KEPT = "it was not taken up: it cannot be kept"
_FILES = ("adapter_config.json", "adapter_model.safetensors")


class _NewJob(JsonBody):
    id: str | None = None
    """None: the service draws one."""
    seed: int = 0


class _Query(BaseModel):
    """What a request's path or query may say beside a name."""

    number: int | None = Field(default=None, ge=0, lt=10**8)
    wait: float = Field(default=60.0, ge=0, le=600)
    """Seconds that the HTTP request may wait for an answer."""

    @classmethod
    def of(cls, request: HTTPRequest) -> Self:
        return cls.model_validate({**request.query_params, **request.path_params})


class JobRoutes(JsonServer):
    """The HTTP application of a service."""

    @staticmethod
    def error_body(status: int, problem: str) -> dict[str, str]:
        return {"error": problem}

    def __init__(self, service: Service) -> None:
        self.service = service
        job = "/v1/jobs/{job}"
        table = [
            ("/v1/jobs", "POST", self.create),
            (job, "GET", self.describe),
            (job, "DELETE", self.delete),
            (job + "/cancel", "POST", self.cancel),
            (job + "/requests/{kind}", "POST", self.ask),
            (job + "/answers/{number}", "GET", self.answer),
            (job + "/saves/{name}/{file}", "GET", self.saved),
        ]
        routes = [Route(path, handler, methods=[method]) for path, method, handler in table]
        super().__init__(
            routes,
            service.config.jobs.max_request_mib,
            "jobs.max_request_mib",
            {
                Refused: lambda error: (error.status, str(error)),
                OSError: lambda error: (507, f"{_NOT_KEPT}: {error.strerror}"),
            },
        )

    # ---- routes --------------------------------------------------------------------------------

    async def create(self, request: HTTPRequest) -> Response:
        new = await self.read(request, _NewJob.model_validate)
        return self.reply(await asyncio.to_thread(self.service.create, new.id, new.seed), 201)

    async def describe(self, request: HTTPRequest) -> Response:
        known = await asyncio.to_thread(self.service.describe, request.path_params["job"])
        return self.reply(known)

    async def cancel(self, request: HTTPRequest) -> Response:
        await self.read(request, JsonBody.model_validate)  # which has no keys
        known = await asyncio.to_thread(self.service.cancel, request.path_params["job"])
        return self.reply(known)

    async def delete(self, request: HTTPRequest) -> Response:
        gone = await asyncio.to_thread(self.service.delete, request.path_params["job"])
        await asyncio.wrap_future(gone)
        return self.reply({})

    async def ask(self, request: HTTPRequest) -> Response:
        name, kind = request.path_params["job"], request.path_params["kind"]
        query = _Query.of(request)
        take = partial(self.service.submit, name, kind, number=query.number)
        return await self._answer(name, await self.read(request, take), query.wait)

    async def answer(self, request: HTTPRequest) -> Response:
        query = _Query.of(request)
        assert query.number is not None  # it is in the path
        return await self._answer(request.path_params["job"], query.number, query.wait)

    async def _answer(self, name: str, number: int, wait: float) -> Response:
        future: Future[dict[str, Any]]
        future = await asyncio.to_thread(self.service.answer, name, number)
        # Others may wait for the same future: a timeout here must not cancel it.
        waiting = asyncio.shield(asyncio.wrap_future(future))
        try:
            answer = await asyncio.wait_for(waiting, wait)
        except TimeoutError:
            return self.reply({"number": number}, 202)
        if "result" in answer:
            return self.reply({"number": number, "result": answer["result"]})
        status = 503 if answer["error"] == Service.STOPPED else 422
        return self.reply({"number": number, "error": answer["error"]}, status)

    async def saved(self, request: HTTPRequest) -> Response:
        name, save, file = (request.path_params[key] for key in ("job", "name", "file"))
        if file not in _FILES or not Save.may_be_named(save):
            raise Refused("there is no such thing", 404)
        return FileResponse(await asyncio.to_thread(self.service.saved_file, name, save, file))
