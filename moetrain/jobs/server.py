"""The service as an HTTP server that speaks the protocol of the ``tinker`` SDK (0.38).

:class:`JobRoutes` has the routes. What a training run or a sampler is asked is taken up, numbered
by the client (``seq_id``), and answered with the id of a future; ``retrieve_future`` waits for it.
A request that is refused takes its number all the same: its future says why. Passes over texts
come as protobuf messages, and their results and samples leave as such; all else is JSON.

Whoever knows the id of a session may use its jobs, and no route lists ids. A sampler's ids are its
session's. :mod:`moetrain.rollout.access` authenticates clients.
"""

import asyncio
import math
import re
import secrets
import time
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from tinker.proto import tinker_public_pb2 as wire

from moetrain.config.sources import shortened
from moetrain.jobs.api import JOB_ID, Refused, source_of
from moetrain.jobs.scheduler import Service
from moetrain.rollout.http_json import JsonServer
from moetrain.rollout.request import JsonBody

_NOT_KEPT = "it was not taken up: it cannot be kept"
_PROTOBUF = "application/x-protobuf"
_WAIT_SECONDS = 20.0
"""Time that a future is waited for, less than the 45 that the SDK waits for an answer."""
_CHUNK_BYTES = 5_000_000
"""Largest part of a batch that the SDK sends at once, by its own estimate."""
_FILES = ("adapter_config.json", "adapter_model.safetensors")
_NO_LOGPROB = -99999.0
"""What the SDK takes for an empty place among likeliest tokens."""
_FUTURE = re.compile(rf"({JOB_ID.pattern}):(new|[0-9]{{1,8}})")
_DTYPES = {wire.DTYPE_FLOAT32: "<f4", wire.DTYPE_INT64: "<i8", wire.DTYPE_INT32: "<i4"}
_UNLISTED = {
    "training_runs": {"training_runs": [], "cursor": {"offset": 0, "limit": 0, "total_count": 0}},
    "checkpoints": {"checkpoints": []},
    "sessions": {"sessions": []},
}
"""Answers of the routes that would list ids."""


class _LoraConfig(JsonBody):
    rank: int
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class _Optimizer(JsonBody):
    type: str


class _New(JsonBody):
    """A request for a new job of a session."""

    session_id: str = Field(pattern="^[0-9a-f]{32}$")
    model_seq_id: int = Field(default=0, ge=0, lt=10**9)
    sampling_session_seq_id: int = Field(default=0, ge=0, lt=10**9)
    base_model: str | None = None
    model_path: str | None = None
    path: str | None = None
    optimizer: bool = False
    user_metadata: dict[str, Any] | None = Field(default=None, max_length=64)
    lora_config: _LoraConfig | None = None
    optimizer_config: _Optimizer = _Optimizer(type="adamw")
    weights_access_token: None = None
    type: str = ""


class _Retrieve(JsonBody):
    request_id: str
    allow_metadata_only: bool = False


class _About(JsonBody):
    model_id: str = ""
    tinker_path: str = ""
    type: str = ""


class JobRoutes(JsonServer):
    """The HTTP application of a service."""

    @staticmethod
    def error_body(status: int, problem: str) -> dict[str, str]:
        return {"error": problem}

    def __init__(self, service: Service) -> None:
        self.service, self.config = service, service.config
        self.model = self.config.model.path or self.config.model.preset
        """The base model's name for clients."""
        lora = self.config.lora
        self.about = {"base_model": self.model, "is_lora": True, "lora_rank": lora.rank}
        self.trains = service.session.trains
        most = min(_CHUNK_BYTES, self.config.jobs.max_request_mib << 19)
        table: dict[str, Any] = {
            "POST client/config": {
                "parallel_fwdbwd_chunks": False,
                "fwdbwd_max_chunk_bytes_count": most,
            },
            "POST client/dynamic_config": {},
            "POST telemetry": {"status": "accepted"},
            "POST session_heartbeat": {},
            "POST create_session": self.create_session,
            "POST sessions/{session}/finish": self.finish,
            "POST create_model": self.create_model,
            "POST load_weights": self.load_weights,
            "POST create_sampling_session": self.create_sampler,
            "POST forward_backward": self.forward_backward,
            "POST optim_step": partial(self.ask, "optim_step"),
            "POST save_weights": partial(self.ask, "save_weights"),
            "POST save_weights_for_sampler": partial(self.ask, "save_weights_for_sampler"),
            "POST save_weights_external": partial(self.ask, "save_weights_external"),
            "POST asample": self.sample,
            "POST retrieve_future": self.retrieve,
            "POST get_info": self.info,
            "POST weights_info": self.weights_info,
            "GET healthz": {"status": "ok"},
            "GET get_server_capabilities": {"supported_models": [self._capabilities()]},
            "GET sessions/{session}": self.session,
            "GET samplers/{job}": self.sampler,
            "GET training_runs/{job}": self.run,
            "DELETE training_runs/{job}": self.delete,
            "GET training_runs/{job}/checkpoints": self.saves,
            "GET training_runs/{job}/checkpoints/{save:path}/external_weights_urls": self.urls,
            "DELETE training_runs/{job}/checkpoints/{save:path}": self.remove_save,
            "GET training_runs/{job}/files/{name}/{file}": self.file,
            **{f"GET {name}": answer for name, answer in _UNLISTED.items()},
        }
        routes = []
        for place, answer in table.items():
            method, path = place.split()
            handler = answer if callable(answer) else partial(self._say, answer)
            routes.append(Route(f"/api/v1/{path}", handler, methods=[method]))
        super().__init__(
            routes,
            self.config.jobs.max_request_mib,
            "jobs.max_request_mib",
            {
                Refused: lambda error: (error.status, str(error)),
                OSError: lambda error: (507, f"{_NOT_KEPT}: {error.strerror}"),
            },
        )

    def _capabilities(self) -> dict[str, Any]:
        longest = min(self.service.session.limits.longest_text, self.config.data.seq_len)
        known = {"model_name": self.model, "max_context_length": longest}
        return {**known, "trainable": True, "sampleable": True}

    async def _say(self, answer: object, request: HTTPRequest) -> Response:
        """Give the same answer to whatever JSON."""
        if request.method == "POST":
            await self.read(request, lambda body: None)
        return self.reply(answer)

    # ---- sessions and their jobs ---------------------------------------------------------------

    async def create_session(self, request: HTTPRequest) -> Response:
        await self.read(request, lambda body: None)
        return self.reply({"session_id": secrets.token_hex(16)})

    async def finish(self, request: HTTPRequest) -> Response:
        await self.read(request, lambda body: None)
        await asyncio.to_thread(self.service.finish, request.path_params["session"])
        return self.reply({})

    async def session(self, request: HTTPRequest) -> Response:
        jobs = [*self.service.of_session(request.path_params["session"])]
        samplers = [job.id for job in jobs if job.is_sampler]
        return self.reply(
            {
                "training_run_ids": [job.id for job in jobs if not job.is_sampler],
                "sampler_ids": samplers,
            }
        )

    async def create_model(self, request: HTTPRequest) -> Response:
        new = await self.read(request, _New.model_validate)
        self._check_base(new)
        rank, lora = self.config.lora.rank, new.lora_config or _LoraConfig(rank=0)
        if lora.rank != rank:
            raise Refused(f"lora_config.rank {lora.rank}, but lora.rank of this service is {rank}")
        for part in ("unembed", "mlp", "attn"):
            if self.trains[part] and not getattr(lora, f"train_{part}"):
                raise Refused(f"train_{part} False, but lora.targets of this service has such")
        name = f"{new.session_id}:train:{new.model_seq_id}"
        seed = zlib.crc32(name.encode()) if lora.seed is None else lora.seed
        await asyncio.to_thread(self.service.create, name, seed)
        return self.reply({"request_id": f"{name}:new"})

    def _check_base(self, new: _New) -> None:
        if new.base_model not in (None, self.model):
            raise Refused(f"base_model {shortened(new.base_model)} is not {self.model!r}")
        if new.optimizer_config.type != "adamw":
            raise Refused(f"optimizer {shortened(new.optimizer_config.type)} is not 'adamw'")

    async def load_weights(self, request: HTTPRequest) -> Response:
        def take(body: Any) -> str:
            if not isinstance(body, dict) or "session_id" not in body:
                return self._taken("load_weights", body)
            new = _New.model_validate(body)
            self._check_base(new)
            name = f"{new.session_id}:train:{new.model_seq_id}"
            source = "/".join(source_of(str(new.path)))
            self.service.create(name, zlib.crc32(name.encode()), source)
            load = {"path": new.path, "optimizer": new.optimizer}
            return f"{name}:{self.service.submit(name, 'load_weights', load, 0)}"

        return self.reply({"request_id": await self.read(request, take)})

    async def create_sampler(self, request: HTTPRequest) -> Response:
        new = await self.read(request, _New.model_validate)
        self._check_base(new)
        if new.base_model is None and new.model_path is None:
            raise Refused("a sampling session needs base_model or model_path")
        name = f"{new.session_id}:sample:{new.sampling_session_seq_id}"
        source = None if new.model_path is None else "/".join(source_of(new.model_path))
        await asyncio.to_thread(self.service.create, name, zlib.crc32(name.encode()), source)
        return self.reply({"sampling_session_id": name})

    # ---- requests and futures ------------------------------------------------------------------

    def _taken(self, kind: str, body: Any) -> str:
        """Take up a request of JSON, and return its future's id; raises Refused."""
        if not isinstance(body, dict):
            raise Refused("the body is not an object")
        own = {
            key: value for key, value in body.items() if key not in ("model_id", "seq_id", "type")
        }
        return self._numbered(kind, body.get("model_id"), body.get("seq_id"), lambda: own)

    def _numbered(self, kind: str, name: Any, seq: Any, body: Callable[[], object]) -> str:
        known = self.service.describe(str(name))
        first = int(known["source"] is None)  # of a run that begins with a load, that is 0
        if type(seq) is not int or not first <= seq < 10**8:
            raise Refused(f"seq_id {shortened(seq)} is not a number from {first}")
        number = seq - first
        try:
            self.service.submit(known["id"], kind, body(), number)
        except Refused as error:
            if error.status != 400:
                raise
            self.service.submit(known["id"], "unserved", {"problem": str(error)}, number)
        return f"{known['id']}:{number}"

    async def ask(self, kind: str, request: HTTPRequest) -> Response:
        return self.reply({"request_id": await self.read(request, partial(self._taken, kind))})

    async def forward_backward(self, request: HTTPRequest) -> Response:
        def take(data: bytes) -> str:
            try:
                message = wire.ForwardBackwardRequest.FromString(data)
            except DecodeError as error:
                raise HTTPException(400, f"the body is no such message: {error}") from None
            kind = "forward" if message.forward_only else "forward_backward"
            return self._numbered(kind, message.model_id, message.seq_id, lambda: _pass(message))

        return self.reply({"request_id": await self.read(request, take, _PROTOBUF)})

    async def sample(self, request: HTTPRequest) -> Response:
        def take(body: Any) -> dict[str, Any]:
            own = dict(body) if isinstance(body, dict) else {}
            name, seq, _ = (own.pop(key, None) for key in ("sampling_session_id", "seq_id", "type"))
            if type(seq) is not int or not 0 <= seq < 2**63:
                raise Refused(f"seq_id {shortened(seq)} is not a number")
            number = self.service.submit(str(name), "asample", own, key=str(seq))
            ids = [f"{name}:{seq}:{i}" for i in range(own.get("num_samples", 1))]
            return {"request_id": f"{name}:{number}", "sample_sequence_ids": ids}

        return self.reply(await self.read(request, take))

    async def retrieve(self, request: HTTPRequest) -> Response:
        asked = await self.read(request, _Retrieve.model_validate)
        if (found := _FUTURE.fullmatch(asked.request_id)) is None:
            raise Refused("there is no such thing", 404)
        name, number = found[1], found[5]
        if number == "new":
            await asyncio.to_thread(self.service.describe, name)
            return self.reply({"model_id": name, "type": "create_model"})
        future = await asyncio.to_thread(self.service.answer, name, int(number))
        # Others may wait for the same future: a timeout here must not cancel it.
        waiting = asyncio.shield(asyncio.wrap_future(future))
        try:
            answer = await asyncio.wait_for(waiting, _WAIT_SECONDS)
        except TimeoutError:
            again = {"type": "try_again", "request_id": asked.request_id, "queue_state": "active"}
            return self.reply(again)
        if "error" in answer:
            if answer["error"] == Service.STOPPED:
                raise Refused(Service.STOPPED, 503)
            category = "user" if answer.get("refused") else "server"
            return self.reply({"error": answer["error"], "category": category})
        result = answer["result"]
        for key, encode in (("sequences", _samples_message), ("logprobs", _pass_message)):
            if key in result:
                data = await asyncio.to_thread(encode, result)
                return Response(data, media_type=_PROTOBUF)
        return self.reply(result)

    # ---- what there is -------------------------------------------------------------------------

    async def info(self, request: HTTPRequest) -> Response:
        asked = await self.read(request, _About.model_validate)
        known = await asyncio.to_thread(self.service.describe, asked.model_id)
        named = self.config.is_set("data.tokenizer") and self.config.data.tokenizer != "byte"
        tokenizer = self.config.data.tokenizer if named else None
        data = {"model_name": self.model, "tokenizer_id": tokenizer}
        return self.reply({"model_id": known["id"], "model_data": data, **self.about})

    async def weights_info(self, request: HTTPRequest) -> Response:
        asked = await self.read(request, _About.model_validate)
        name, *save = source_of(asked.tinker_path)
        if "/".join(save) not in await asyncio.to_thread(self.service.saves, name):
            raise Refused("there is no such thing", 404)
        trains = {f"train_{part}": known for part, known in self.trains.items()}
        return self.reply({**self.about, **trains})

    async def sampler(self, request: HTTPRequest) -> Response:
        known = await asyncio.to_thread(self.service.describe, request.path_params["job"])
        path = None if known["source"] is None else f"tinker://{known['source']}"
        return self.reply({"sampler_id": known["id"], "base_model": self.model, "model_path": path})

    async def run(self, request: HTTPRequest) -> Response:
        name = request.path_params["job"]
        known = await asyncio.to_thread(self.service.describe, name)
        saves = self._checkpoints(name)
        newest = {save["checkpoint_type"]: save for save in saves}
        return self.reply(
            {
                **self.about,
                "training_run_id": known["id"],
                "model_owner": "",
                "corrupted": known["status"] == "failed",
                "last_request_time": _time(known["time"]),
                "last_checkpoint": newest.get("training"),
                "last_sampler_checkpoint": newest.get("sampler"),
            }
        )

    def _checkpoints(self, name: str) -> list[dict[str, Any]]:
        kinds = {"weights": "training", "sampler_weights": "sampler"}
        return [
            {
                "checkpoint_id": path,
                "checkpoint_type": kinds.get(path.partition("/")[0], "external"),
                "time": _time(save["time"]),
                "tinker_path": f"tinker://{name}/{path}",
                "user_metadata": save["user_metadata"],
                "expires_at": None if save["expires"] is None else _time(save["expires"]),
            }
            for path, save in self.service.saves(name).items()
        ]

    async def saves(self, request: HTTPRequest) -> Response:
        found = await asyncio.to_thread(self._checkpoints, request.path_params["job"])
        return self.reply({"checkpoints": found})

    async def remove_save(self, request: HTTPRequest) -> Response:
        where = request.path_params["job"], request.path_params["save"]
        await asyncio.to_thread(self.service.remove_save, *where)
        return self.reply({})

    async def delete(self, request: HTTPRequest) -> Response:
        gone = await asyncio.to_thread(self.service.delete, request.path_params["job"])
        await asyncio.wrap_future(gone)
        return self.reply({})

    async def urls(self, request: HTTPRequest) -> Response:
        name, save = request.path_params["job"], request.path_params["save"]
        found = await asyncio.to_thread(self.service.saves, name)
        kind, _, path = save.partition("/")
        if kind != "external_weights" or save not in found:
            raise Refused("there is no such thing", 404)
        root = f"{request.base_url}api/v1/training_runs/{name}/files/{path}"
        urls = {file: f"{root}/{file}" for file in _FILES}
        return self.reply({"urls": urls, "expires": _time(time.time() + 3600)})

    async def file(self, request: HTTPRequest) -> Response:
        name, save, file = (request.path_params[key] for key in ("job", "name", "file"))
        known = await asyncio.to_thread(self.service.saves, name)
        if file not in _FILES or f"external_weights/{save}" not in known:
            raise Refused("there is no such thing", 404)
        folder = self.service.folder / "jobs" / name / "external_weights" / save
        return FileResponse(folder / file)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


# ---- messages -----------------------------------------------------------------------------------


def _pass(message: Any) -> dict[str, Any]:
    """Return a message's pass over texts as :class:`moetrain.jobs.api.Pass` has it; or Refused."""
    config = {key: one.number for key, one in message.loss_fn_config_v2.items()}
    if any(one.WhichOneof("value") == "text" for one in message.loss_fn_config_v2.values()):
        raise Refused("loss_fn_config has a text, and no loss here takes one")
    data = []
    for i, datum in enumerate(message.data):
        try:
            texts = [_ints(chunk) for chunk in datum.model_input]
            one = {name: _numbers(tensor) for name, tensor in datum.loss_fn_inputs.items()}
        except ValueError as error:
            raise Refused(f"data[{i}]: {error}") from None
        data.append({"tokens": [token for text in texts for token in text], **one})
    return {"data": data, "loss_fn": message.loss_fn, "loss_fn_config": config}


def _ints(chunk: Any) -> list[int]:
    if chunk.WhichOneof("chunk") != "encoded_text":
        raise ValueError("its model_input has a chunk that is not text")
    return np.frombuffer(chunk.encoded_text.tokens, "<i4").tolist()


def _numbers(tensor: Any) -> list[Any]:
    if tensor.WhichOneof("encoding") == "sparse_csr" or len(tensor.shape) > 1:
        raise ValueError("a tensor has two dimensions, and each position takes one number")
    if tensor.dtype not in _DTYPES:
        raise ValueError("a tensor is not of int32, int64 or float32")
    return np.frombuffer(tensor.dense, _DTYPES[tensor.dtype]).tolist()


def _floats(values: list[float | None]) -> bytes:
    return np.array(values, np.float64).astype("<f4").tobytes()  # None: NaN


def _pass_message(result: dict[str, Any]) -> bytes:
    message = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics["loss:sum"] = math.nan if result["loss"] is None else result["loss"]
    texts = result["logprobs"]
    record = message.loss_fn_outputs.add(num_datums=len(texts))
    ends = np.cumsum([0, *(4 * len(logprobs) for logprobs in texts)])
    record.fields["logprobs"].CopyFrom(
        wire.BatchedTensor(
            data=b"".join(map(_floats, texts)),
            offsets=ends.astype("<i8").tobytes(),
            dtype=wire.DTYPE_FLOAT32,
        )
    )
    return message.SerializeToString()


def _samples_message(result: dict[str, Any]) -> bytes:
    message = wire.SampleResponse()
    if result["prompt_logprobs"] is not None:
        message.prompt_logprobs = _floats(result["prompt_logprobs"])
    for one in result["sequences"]:
        is_stop = one["stop_reason"] == "stop"
        sequence = message.sequences.add(
            stop_reason=wire.STOP_REASON_STOP if is_stop else wire.STOP_REASON_LENGTH,
            tokens=np.array(one["tokens"], "<i4").tobytes(),
            logprobs=_floats(one["logprobs"]),
        )
        if rows := one.get("topk"):
            width = max(map(len, rows))
            filled = [[*row, *[[0, _NO_LOGPROB]] * (width - len(row))] for row in rows]
            sequence.topk_sampled_logprobs.CopyFrom(
                wire.TopkLogprobs(
                    token_ids=np.array([[k for k, _ in r] for r in filled], "<i4").tobytes(),
                    logprobs=b"".join(_floats([x for _, x in row]) for row in filled),
                    k=width,
                    length=len(rows),
                )
            )
    return message.SerializeToString()
