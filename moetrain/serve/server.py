"""An HTTP server that speaks OpenAI's protocol: completions and chats, whole or as streams.

Generation for a client stops when it disconnects (:class:`~moetrain.serve.serving.Serving`).
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, ClassVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from moetrain.config import logger
from moetrain.config.sources import shortened
from moetrain.data.tokenizer import Tokenizer
from moetrain.generate.engine import Generator
from moetrain.generate.request import (
    CHECKPOINT_PARAMS,
    BusyError,
    Request,
    RequestError,
    SamplingParams,
    TextStream,
    Update,
    chat_stops,
    end_ids,
    sampling_defaults,
)
from moetrain.http.answers import Answer, ChoiceUpdate, OpenAIServer
from moetrain.http.protocol import Chat, Completions, Responses
from moetrain.serve.serving import Serving, ServingClosedError

_MOST_LOGPROBS = 1 << 20
"""Most log-probabilities in one reply, of tokens and alternatives; each takes some 100 bytes."""
_NOT_FINITE = "the model's probabilities are not finite numbers: its weights are damaged"


class CompletionServer(OpenAIServer):
    """The HTTP server of a generator, which must have a tokenizer."""

    BODIES: ClassVar[dict[str, type[Completions | Chat]]] = {
        "/v1/completions": Completions,
        "/v1/chat/completions": Chat,
        "/v1/responses": Responses,
    }
    """The routes that generate, and the class of requests of each."""

    def __init__(
        self, generator: Generator, name: str, *, max_queue: int = 1024, max_request_mib: int = 4
    ) -> None:
        """Prepare to serve ``generator`` as the model ``name``.

        Args:
            max_queue: completions that may run or wait. Requests for more get status 429.
            max_request_mib: size of the largest body, in MiB.
        """
        assert generator.tokenizer is not None
        self.tokenizer: Tokenizer = generator.tokenizer
        self.generator = generator
        self.name = name
        self.max_queue = max_queue
        self.stop_ids = end_ids(generator.model, self.tokenizer)
        self.chat_stops = chat_stops(self.tokenizer)
        self.sampling = sampling_defaults(generator.model)
        """The checkpoint's recommended parameters, for requests that leave them out."""
        if self.sampling:
            logger.info("requests are sampled with generation_config.json's %s", self.sampling)
        routes = [Route("/v1/models", self.models), Route("/v1/models/{model:path}", self.models)]
        for path, kind in self.BODIES.items():
            routes.append(Route(path, partial(self.answer, kind), methods=["POST"]))
        super().__init__(routes, max_request_mib, "max_request_mib", lifespan=self.lifespan)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Run the generator inside, and abort all requests at the end."""
        self.serving = Serving(self.generator)
        yield
        await self.serving.close()

    async def models(self, request: HTTPRequest) -> Response:
        """Answer ``/v1/models``, and ``/v1/models/NAME``."""
        wanted = request.path_params.get("model")
        if wanted not in (None, self.name):
            raise HTTPException(404, f"no model {shortened(wanted)} is here; ask for {self.name!r}")
        most = self.generator.longest
        return self.reply(self.described(self.name, wanted, max_model_len=most))

    async def answer(self, kind: type[Completions | Chat], request: HTTPRequest) -> Response:
        """Answer a request of class ``kind``."""
        answer = await self.read(request, partial(self.parsed, kind, partial(_Served, self)))
        return await answer.response(request)


class _Served(Answer):
    """The answer to one request, whose prompts the generator serves in one batch."""

    def __init__(self, server: CompletionServer, asked: Completions | Chat) -> None:
        """Check the request. Raises ValueError: a prompt or a parameter is impossible."""
        self.server = server
        prompts = asked.prompts(server.tokenizer)
        longest, most = max(map(len, prompts)), server.generator.longest
        if longest >= most:
            problem = f"a prompt of {longest} tokens leaves no room for an answer"
            raise ValueError(f"{problem}: both together may have {most}; shorten the prompt")
        (limit, wanted), grammars = asked.limit, asked.grammars(server.tokenizer)
        if len(grammars) > 1:
            problem = "a text can follow only one of them; send one"
            raise ValueError(f"response_format, guided_* and tool_choice: {problem}")
        kind, text = grammars[0] if grammars else (None, None)
        self.is_empty = wanted == 0
        """True: the request asks only about its prompt. One token is chosen, and dropped."""
        default = min(SamplingParams.max_tokens, most - longest)
        ends = server.chat_stops if isinstance(asked, Chat) and not asked.ignore_eos else ()
        scored = asked.prompt_logprobs, asked.likeliest if asked.echo else None
        sampling = asked.model_dump(include=asked.model_fields_set.intersection(CHECKPOINT_PARAMS))
        params = self.params = SamplingParams(
            max_tokens=default if wanted is None else max(wanted, 1),
            seed=uuid.uuid4().int % 2**63 if asked.seed is None else asked.seed,
            stop=(*asked.stop, *ends),
            stop_ids=(*asked.stop_token_ids, *(() if asked.ignore_eos else server.stop_ids)),
            logprobs=asked.likeliest or 0,
            prompt_logprobs=max((number for number in scored if number is not None), default=None),
            grammar=(kind, text if isinstance(text, str) else json.dumps(text)) if kind else None,
            n=asked.n,
            **server.sampling | sampling,
        )
        count = len(prompts) * params.n
        if count > server.max_queue:
            problem = f"{len(prompts)} prompts x n {params.n} are more completions than "
            raise ValueError(f"{problem}max_queue {server.max_queue} allows; ask in parts")
        read, number = sum(map(len, prompts)), 0
        if asked.likeliest is not None:
            number += count * params.max_tokens * (1 + params.logprobs)
        if params.prompt_logprobs is not None:
            number += read * params.n * (1 + params.prompt_logprobs)
        if number > _MOST_LOGPROBS:
            problem = f"{number} log-probabilities are more than {_MOST_LOGPROBS}"
            raise ValueError(f"logprobs: {problem}; lower {limit}, or ask in parts")
        self.requests = [
            Request(f"{asked.head['id']}-{i}", prompt, params) for i, prompt in enumerate(prompts)
        ]
        stops = params.stop, params.stop_ids
        skips = asked.skip_special_tokens
        texts = [
            TextStream(server.tokenizer, *stops, skip_special_tokens=skips) for _ in range(count)
        ]
        self._unechoed = set(range(count)) if asked.echo else set[int]()
        """Numbers of the choices whose prompt is still to be echoed."""
        super().__init__(server, asked, server.name, texts, read)
        self.drafts = server.generator.steps.draft > 0

    def _choice(self, number: int, text: str, updates: list[Update]) -> dict[str, Any]:
        asked, done = self.asked, updates[-1].completion
        prompt = self.requests[number // self.params.n].tokens
        choice = super()._choice(number, text, updates)
        if self.is_empty:
            choice |= {"text": "", "token_ids": [], "finish_reason": "length"}
            choice |= {"logprobs": asked.logprobs_of([], str)} if "logprobs" in choice else {}
        if number in self._unechoed:
            self._unechoed.remove(number)
            stream = self.texts[number]
            choice |= {"text": stream.decode(prompt) + choice["text"]}
            choice |= {"token_ids": [*prompt, *choice["token_ids"]]}
            if "logprobs" in choice:
                first = Completions.logprobs_of_prompt(prompt, done, stream.text_of)
                choice["logprobs"] = {k: first[k] + v for k, v in choice["logprobs"].items()}
        if asked.prompt_logprobs is not None and updates[-1].finish_reason:
            choice["prompt_logprobs"] = Completions.scored(prompt, done)
        return choice

    async def updates(self) -> AsyncGenerator[ChoiceUpdate, None]:
        serving, most = self.server.serving, self.server.max_queue
        if serving.num_open + len(self.texts) > most:
            problem = f"{serving.num_open} completions run or wait, of max_queue {most}"
            raise HTTPException(429, f"{problem}; ask again later")
        first = {request.id: i * self.params.n for i, request in enumerate(self.requests)}
        try:
            async with aclosing(serving.stream(*self.requests)) as stream:
                async for update in stream:
                    if not math.isfinite(update.logprob):
                        logger.error("%s", _NOT_FINITE)
                        raise HTTPException(500, _NOT_FINITE)
                    number = first[update.completion.request_id] + update.completion.index
                    yield number, update
        except RequestError as error:
            problem = error.problem.replace("max_tokens", self.asked.limit[0])
            status = 429 if isinstance(error, BusyError) else 400
            raise HTTPException(status, problem) from None
        except ServingClosedError:
            raise HTTPException(503, self.server.STOPPED) from None
        except HTTPException:
            raise
        except Exception as error:  # noqa: BLE001 - a failed step fails all that it served
            logger.error("generation failed", exc_info=error)
            raise HTTPException(500, self.server.FAILED) from None
