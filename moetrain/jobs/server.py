"""The service as an HTTP server that speaks the protocol of the ``tinker`` SDK (0.38).

:class:`JobRoutes` has the routes. A request to a training run or a sampler is accepted under the
client's number for it (``seq_id``) and answered with the id of a future; ``retrieve_future`` waits
for the result. A refused request uses up its number too, and its future gives the reason. Requests
for passes over texts are protobuf messages; so are the results of passes and samples. All other
bodies are JSON.

A client that knows the id of a session may use its jobs, and no route lists ids. The ids of
samplers follow from their session's. :mod:`moetrain.http.access` authenticates clients.
"""

import asyncio
import math
import re
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from os.path import dirname
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from pydantic import BaseModel
from starlette.requests import Request as HTTPRequest
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from tinker import types
from tinker.proto import tinker_public_pb2 as wire

from moetrain.config.sources import shortened
from moetrain.http.json_server import JsonServer
from moetrain.jobs.api import JOB_ID, MOST_TEXTS, Refused, Unserved, source_of
from moetrain.jobs.scheduler import Service

_PROTOBUF = "application/x-protobuf"
_WAIT_SECONDS = 20.0
"""Time that a request waits for a future: less than the 45 s that the SDK waits for an answer."""
_CHUNK_BYTES = 5_000_000
"""Largest part of a batch that the SDK sends at once, in bytes by its own estimate."""
_FILES = ("adapter_config.json", "adapter_model.safetensors")
_FUTURE = re.compile(rf"({JOB_ID.pattern}):(new|[0-9]{{1,8}})")
_DTYPES = {wire.DTYPE_FLOAT32: "<f4", wire.DTYPE_INT64: "<i8", wire.DTYPE_INT32: "<i4"}
_MOST_KEYS = 64
"""Most keys of an object that is given to the SDK's types: their errors name each unknown key."""
_ADDRESS = ("base_model", "model_id", "model_seq_id", "optimizer_config", "sampling_session_id")
_ADDRESS += ("seq_id", "session_id", "type", "user_metadata")
"""Keys of a body that say which job it is for; the others make the request."""
_T = TypeVar("_T", bound=BaseModel)


class JobRoutes(JsonServer):
    """The HTTP application of a service. Most routes are functions for :meth:`call`."""

    @staticmethod
    def error_body(status: int, problem: str) -> dict[str, str]:
        return {"error": problem}

    def __init__(self, service: Service) -> None:
        self.service, self.config = service, service.config
        self.model = self.config.model.path or self.config.model.preset
        """The base model's name for clients."""
        lora, jobs = self.config.lora, self.config.jobs
        self.about = {"base_model": self.model, "is_lora": True, "lora_rank": lora.rank}
        longest = min(service.session.limits.longest_text, self.config.data.seq_len)
        known = {"model_name": self.model, "max_context_length": longest}
        most = min(_CHUNK_BYTES, jobs.max_request_mib << 19)
        sizes = {"parallel_fwdbwd_chunks": False, "fwdbwd_max_chunk_bytes_count": most}
        kinds = ("optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external")
        table: dict[str, Callable[..., Any]] = {
            "POST client/config": lambda body: sizes,
            "POST client/dynamic_config": lambda body: {},
            "POST telemetry": lambda body: {"status": "accepted"},
            "POST session_heartbeat": lambda body: {},
            "POST create_session": lambda body: {"session_id": secrets.token_hex(16)},
            "POST sessions/{session}/finish": lambda body, session: service.finish(session),
            "POST create_model": self.create_model,
            "POST load_weights": self.load_weights,
            "POST create_sampling_session": self.create_sampler,
            **{f"POST {kind}": partial(self.ask, kind) for kind in kinds},
            "POST asample": self.sample,
            "POST get_info": self.info,
            "GET get_server_capabilities": lambda: {"supported_models": [known]},
            "GET samplers/{job}": self.sampler,
            "GET training_runs/{job}": self.run,
            "DELETE training_runs/{name}": service.delete,
            "GET training_runs/{job}/checkpoints": self.saves,
            "DELETE training_runs/{name}/checkpoints/{save:path}": service.remove_save,
        }
        saves = "/api/v1/training_runs/{job}/checkpoints/external_weights"
        routes = [Route("/api/v1/retrieve_future", self.retrieve, methods=["POST"])]
        learn = partial(self.call, self.forward_backward, wanted=_PROTOBUF)
        routes.append(Route("/api/v1/forward_backward", learn, methods=["POST"]))
        routes.append(Route(f"{saves}/{{save}}/{{file}}", self.external))
        for place, work in table.items():
            method, path = place.split()
            handler = partial(self.call, work)
            routes.append(Route(f"/api/v1/{path}", handler, methods=[method]))
        refusals = {
            Refused: lambda error: (error.status, str(error)),
            OSError: lambda error: (507, f"the disk cannot hold it: {error.strerror}"),
        }
        super().__init__(routes, jobs.max_request_mib, "jobs.max_request_mib", refusals)

    # ---- jobs of a session ---------------------------------------------------------------------

    def create_model(self, body: Any) -> dict[str, Any]:
        """Create a training run."""
        new = _parsed(types.CreateModelRequest, body)
        self._check_base(new.base_model, new.optimizer_config)
        rank, lora = self.config.lora.rank, new.lora_config or types.LoraConfig(rank=0)
        if lora.rank != rank:
            raise Refused(
                f"rank {shortened(lora.rank)} is not this service's lora.rank; send {rank}"
            )
        for part, is_trained in self.service.session.trains.items():
            if is_trained and not getattr(lora, f"train_{part}"):
                raise Refused(
                    f"train_{part} is False, but this service trains these weights; send True"
                )
        name = f"{new.session_id}:train:{new.model_seq_id}"
        self.service.create(name, lora.seed)
        return {"request_id": f"{name}:new"}

    def _check_base(self, base: str | None, optimizer: Any = None) -> None:
        if base not in (None, self.model):
            raise Refused(f"base_model {shortened(base)} is not this service's {self.model!r}")
        if optimizer is not None and optimizer.type != "adamw":
            raise Refused(f"optimizer {shortened(optimizer.type)} is not supported, only 'adamw'")

    def load_weights(self, body: Any) -> dict[str, Any]:
        """Let a training run load a save. A body with the id of a session is for a new run."""
        if not isinstance(body, dict) or "session_id" not in body:
            return self.ask("load_weights", body)
        # The first request of a new run.
        new = _parsed(types.LoadWeightsRequest, body)
        self._check_base(new.base_model, new.optimizer_config)
        name = f"{new.session_id}:train:{new.model_seq_id}"
        request = self.service.session.limits.parse("load_weights", _request_of(body))
        self.service.create(name, None, source_of(new.path))
        number = self.service.accept(name, request, 0)
        return {"request_id": f"{name}:{number}"}

    def create_sampler(self, body: Any) -> dict[str, Any]:
        """Create a sampler of a save, or of the base model."""
        new = _parsed(types.CreateSamplingSessionRequest, body)
        self._check_base(new.base_model)
        if new.base_model is None and new.model_path is None:
            raise Refused("a sampling session needs base_model or model_path")
        name = f"{new.session_id}:sample:{new.sampling_session_seq_id}"
        source = None if new.model_path is None else source_of(new.model_path)
        self.service.create(name, None, source)
        return {"sampling_session_id": name}

    # ---- requests and futures ------------------------------------------------------------------

    def ask(self, kind: str, body: Any) -> dict[str, Any]:
        """Accept a request ``kind`` to a training run."""
        asked = _request_of(body)
        return self._accept(kind, body.get("model_id"), body.get("seq_id"), lambda: asked)

    def forward_backward(self, data: bytes) -> dict[str, Any]:
        """Accept a pass of a training run, with or without its backward."""
        try:
            message = wire.ForwardBackwardRequest.FromString(data)
        except DecodeError as error:
            raise Refused(f"the body is not a ForwardBackwardRequest: {error}") from None
        kind = "forward" if message.forward_only else "forward_backward"
        return self._accept(kind, message.model_id, message.seq_id, lambda: body_of_pass(message))

    def _accept(self, kind: str, name: Any, seq: Any, body: Callable[[], object]) -> dict[str, Any]:
        """Accept a request to a training run, or, if it is wrong, a record of its refusal."""
        job = self.service.find(str(name))
        first = int(job.source is None)  # number 0 is the load with which a run began
        if type(seq) is not int or not first <= seq < 10**8:
            raise Refused(f"seq_id {shortened(seq)} is not a whole number from {first} on")
        try:
            self.service.submit(job.id, kind, body(), seq - first)
        except Refused as error:
            if error.status != 400:
                raise
            self.service.accept(job.id, Unserved(problem=str(error)), seq - first)
        return {"request_id": f"{job.id}:{seq - first}"}

    def sample(self, body: Any) -> dict[str, Any]:
        """Accept a request to a sampler."""
        asked = _request_of(body)
        name, seq = str(body.get("sampling_session_id")), body.get("seq_id")
        if type(seq) is not int or not 0 <= seq < 2**63:
            raise Refused(f"seq_id {shortened(seq)} is not a whole number from 0 on")
        number = self.service.submit(name, "asample", asked, seq)
        ids = [f"{name}:{seq}:{i}" for i in range(asked.get("num_samples", 1))]
        return {"request_id": f"{name}:{number}", "sample_sequence_ids": ids}

    async def retrieve(self, request: HTTPRequest) -> Response:
        """Answer with a future's result, or after some seconds that the client may try again."""
        asked = await self.read(request, partial(_parsed, types.FutureRetrieveRequest))
        if (found := _FUTURE.fullmatch(asked.request_id)) is None:
            raise Refused("there is no such request", 404)
        name, number = found[1], found[5]
        if number == "new":
            return self.reply({"model_id": self.service.find(name).id})
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

    def info(self, body: Any) -> dict[str, Any]:
        """Describe a training run's model."""
        job = self.service.find(_parsed(types.GetInfoRequest, body).model_id)
        tokenizer = self.config.data.tokenizer if self.config.is_set("data.tokenizer") else None
        data = {"model_name": self.model, "tokenizer_id": tokenizer}
        return {"model_id": job.id, "model_data": data, **self.about}

    def sampler(self, job: str) -> dict[str, Any]:
        """Describe a sampler."""
        source = self.service.find(job).source
        path = None if source is None else f"tinker://{dirname(source)}"
        return {"sampler_id": job, "base_model": self.model, "model_path": path}

    def run(self, job: str) -> dict[str, Any]:
        """Describe a training run."""
        known = self.service.find(job)
        asked = _time((known.folder / "requests").stat().st_mtime)
        state = {"corrupted": known.status == "failed", "last_request_time": asked}
        return {**self.about, "training_run_id": job, "model_owner": "", **state}

    def saves(self, job: str) -> dict[str, Any]:
        """List the saves of a training run, the oldest first."""
        kinds = {"weights": "training", "sampler_weights": "sampler"}
        found = [
            {
                "checkpoint_id": path,
                "checkpoint_type": kinds.get(path.partition("/")[0], "external"),
                "time": _time(save["time"]),
                "tinker_path": f"tinker://{job}/{path}",
                "expires_at": None if save["expires"] is None else _time(save["expires"]),
            }
            for path, save in self.service.find(job).saves.items()
        ]
        return {"checkpoints": found}

    async def external(self, request: HTTPRequest) -> Response:
        """Answer with a file of a save in PEFT's format, or with the URLs of its files."""
        job, save, file = (request.path_params[name] for name in ("job", "save", "file"))
        folder = await asyncio.to_thread(self.service.folder_of, job, f"external_weights/{save}")
        if file in _FILES:
            return FileResponse(folder / file)
        if file != "external_weights_urls":
            raise Refused("there is no such file", 404)
        here = f"{request.base_url}{dirname(request.url.path)[1:]}"
        urls = {one: f"{here}/{one}" for one in _FILES}
        return self.reply({"urls": urls, "expires": _time(time.time() + 3600)})


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


# ---- messages -----------------------------------------------------------------------------------


def _parsed(kind: type[_T], body: Any) -> _T:
    """Parse a request as the SDK defines it, with exact types."""
    parts = (body, *body.values()) if isinstance(body, dict) else ()
    if any(isinstance(one, dict) and len(one) > _MOST_KEYS for one in parts):
        raise Refused(f"an object has more than {_MOST_KEYS} keys")
    return kind.model_validate(body, strict=True)


def _request_of(body: Any) -> dict[str, Any]:
    """Return ``body`` without the keys that say which job it is for."""
    if not isinstance(body, dict):
        raise Refused("the body is not an object")
    return {key: value for key, value in body.items() if key not in _ADDRESS}


def body_of_pass(message: Any) -> dict[str, Any]:
    """Return a message's pass as the body of a :class:`moetrain.jobs.api.Pass`; raises Refused."""
    values, config = message.loss_fn_config_v2, {**message.loss_fn_config}  # the latter: older SDKs
    if any(one.WhichOneof("value") == "text" for one in values.values()):
        raise Refused("loss_fn_config has a text, but the losses here take only numbers")
    config |= {key: one.number for key, one in values.items()}
    data = []
    for i, datum in enumerate(islice(message.data, MOST_TEXTS + 1)):
        chunks = [chunk.encoded_text.tokens for chunk in datum.model_input]
        try:
            if any(chunk.WhichOneof("chunk") != "encoded_text" for chunk in datum.model_input):
                raise ValueError("its model_input has a chunk that is not text")
            one = {name: _numbers(tensor) for name, tensor in datum.loss_fn_inputs.items()}
            data.append({**one, "tokens": np.frombuffer(b"".join(chunks), "<i4").tolist()})
        except ValueError as error:
            raise Refused(f"data[{i}]: {error}") from None
    return {"data": data, "loss_fn": message.loss_fn, "loss_fn_config": config}


def _numbers(tensor: Any) -> list[Any]:
    """Return the values of a tensor of one dimension; ValueError: it has another form."""
    if tensor.WhichOneof("encoding") == "sparse_csr" or len(tensor.shape) > 1:
        raise ValueError("a tensor has more than one dimension, but each position takes one number")
    if tensor.dtype not in _DTYPES:
        raise ValueError("a tensor's dtype is not int32, int64 or float32")
    return np.frombuffer(tensor.dense, _DTYPES[tensor.dtype]).tolist()


def _floats(values: list[float | None]) -> bytes:
    """Return fp32 bytes of ``values``, with NaN for None."""
    return np.array(values, np.float64).astype("<f4").tobytes()


def _pass_message(result: dict[str, Any]) -> bytes:
    """Return the result of a pass as the SDK's message."""
    message = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics["loss:sum"] = math.nan if result["loss"] is None else result["loss"]
    texts = result["logprobs"]
    record = message.loss_fn_outputs.add(num_datums=len(texts)).fields["logprobs"]
    record.data = b"".join(map(_floats, texts))
    record.offsets = np.cumsum([0, *(4 * len(x) for x in texts)]).astype("<i8").tobytes()
    record.dtype = wire.DTYPE_FLOAT32
    return message.SerializeToString()


def _samples_message(result: dict[str, Any]) -> bytes:
    """Return the result of a request to a sampler as the SDK's message."""
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
        if rows := one.get("topk"):  # pairs of a token and its log-probability
            tops = sequence.topk_sampled_logprobs
            tops.k, tops.length = len(rows[0]), len(rows)
            tops.token_ids = np.array([[k for k, _ in row] for row in rows], "<i4").tobytes()
            tops.logprobs = b"".join(_floats([x for _, x in row]) for row in rows)
    return message.SerializeToString()
