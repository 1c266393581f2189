"""Episodes that an agent runs: any program that talks to OpenAI's client.

    rl.env = "agent:FILE.py:run"
    def run(task, base_url) -> float: ...        # plain or async; returns the reward

Each episode runs the function in a thread, with a ``base_url`` of its own at a server in this
process. A request there is the environment's turn, and its answer is the policy's. So the tokens
that are trained are those that were generated, and nothing is tokenised again. If the messages of a
request go on from the last answer, only the text that the chat template puts behind that answer is
tokenised, and appended. Other messages begin a new segment: those of an agent that rewrites its
history, or of several agents in one.

A request's sampling parameters (``temperature``, ``top_k``, ``top_p``, ``min_p``, ``seed``) have no
effect, since the run's settings decide how to sample. A stream sends a turn token by token. If its
client goes away, the turn is generated to its end all the same, and trained.
"""

import asyncio
import copy
import inspect
import os
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from pydantic import model_validator
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moetrain.config import ConfigError
from moetrain.data.chat import BadLineError, ChatTemplate
from moetrain.generate.request import Completion, TextStream, Update
from moetrain.http.access import Access
from moetrain.http.answers import Answer, OpenAIServer
from moetrain.http.protocol import Chat, Responses
from moetrain.rl.envs import Environment, Episode, Prompts, Turn

_NOT_IN_EPISODES = ("stop_token_ids", "ignore_eos", "skip_special_tokens")
_NOT_IN_EPISODES += ("add_generation_prompt", "continue_final_message")
"""Fields of a chat that would change what is sampled. Only the run's settings may."""
_GUIDED = {"guided_json", "guided_regex", "guided_choice", "guided_grammar"}
_OVER = "no episode has this address, or it is over"


class _AgentChat(Chat):
    """A chat that an agent may ask for."""

    tool_choice: Literal["auto", "none"] = "auto"

    @model_validator(mode="after")
    def _is_served(self) -> "_AgentChat":
        if self.n != 1 or self.logprobs:
            raise ValueError("an episode needs n 1 and logprobs false; send these")
        fields = type(self).model_fields
        if changed := [x for x in _NOT_IN_EPISODES if getattr(self, x) != fields[x].default]:
            raise ValueError(
                f"{changed[0]}: the run's settings decide this in an episode; leave it out"
            )
        if self.response_format.type != "text" or self.model_fields_set & _GUIDED:
            raise ValueError("an episode supports no response_format and no guided_*; ask in words")
        return self


class _AgentResponses(_AgentChat, Responses):
    """A request of ``/v1/responses`` that an agent may send."""


class _AgentAnswer(Answer):
    """A request of an agent, and its answer: the policy's next turn."""

    def __init__(self, episode: "_AgentEpisode", body: _AgentChat) -> None:
        """Raises ValueError: the chat template refuses the messages."""
        tokenizer = episode.environment.prompts.tokenizer
        (self.prompt,) = body.prompts(tokenizer)
        texts = [TextStream(tokenizer, body.stop)]
        super().__init__(episode.environment, body, body.model, texts, len(self.prompt))
        self.episode, self.body = episode, body
        self.turn = Completion(episode.name, 0)
        self.news: asyncio.Queue[Update | Exception] = asyncio.Queue()
        """Tokens of the turn that were not sent yet, or an error."""

    def on_tokens(self, tokens: Sequence[int], reason: str | None = None) -> None:
        """Send the client more tokens of the turn; ``reason``: why the turn ends with them."""
        self.turn.tokens += tokens
        for i, token in enumerate(tokens, 1):
            end = reason if i == len(tokens) else None
            self.news.put_nowait(Update(self.turn, token, 0.0, {}, end))

    async def updates(self) -> AsyncGenerator[tuple[int, Update], None]:
        episode = self.episode
        if episode.name not in episode.environment.episodes:
            raise HTTPException(404, _OVER)
        episode.waiting.add(self)
        episode.events.put_nowait(self)
        try:
            update = None
            while update is None or update.finish_reason is None:
                update = await self.news.get()
                if isinstance(update, Exception):
                    raise update
                yield 0, update
        finally:
            episode.waiting.discard(self)


class AgentEnvironment(OpenAIServer, Environment):
    """Tasks of an agent, the lines of a file or numbers, and the server of all its episodes."""

    connections = 1 << 16  # agents keep theirs open while they wait for their turns

    def __init__(
        self, prompts: Prompts, run: Callable[[Any, str], Any], lines: Sequence[Any] | None
    ) -> None:
        """Raises ConfigError: ``run`` does not take a task and a base URL."""
        try:
            inspect.signature(run).bind(0, "")
        except TypeError as error:
            problem = f"the agent must take a task and a base_url ({error}); let it take these two"
            raise ConfigError("rl.env", problem) from None
        self.prompts, self.run, self.lines = prompts, run, lines
        self.num_tasks = None if lines is None else len(lines)
        self.episodes: dict[str, _AgentEpisode] = {}
        """Episodes that run now, by name."""
        self.loop, self._starting = asyncio.new_event_loop(), threading.Lock()
        self.address: str | None = None
        """The server's address; None: it is started with the first episode."""
        kinds = {"chat/completions": _AgentChat, "responses": _AgentResponses}
        routes = [
            Route(f"/{{name}}/v1/{path}", partial(self.answer, kind), methods=["POST"])
            for path, kind in kinds.items()
        ]
        models = (Route(f"/{{name}}/v1/models{end}", self.models) for end in ("", "/{model:path}"))
        super().__init__([*routes, *models], 4, "a request")

    def episode(self, task: int) -> Episode:
        with self._starting:
            if self.address is None:
                access = Access(
                    "127.0.0.1", port=0, auth="auto", token_file=None, own_file=Path(os.devnull)
                )
                server, listener = self.listen(access)
                self.address = f"http://127.0.0.1:{listener.getsockname()[1]}"
                serve = partial(self.loop.run_until_complete, server.serve([listener]))
                threading.Thread(target=serve, daemon=True).start()
        return _AgentEpisode(self, task if self.lines is None else copy.deepcopy(self.lines[task]))

    async def models(self, request: Request) -> Response:
        """List the policy as a model, or describe it. It has any name that is asked for."""
        wanted = request.path_params.get("model")
        return self.reply(self.described(wanted or "policy", wanted))

    async def answer(self, kind: type[_AgentChat], request: Request) -> Response:
        episode = self.episodes.get(request.path_params["name"])
        if episode is None:
            raise HTTPException(404, _OVER)
        asked = await self.read(request, partial(self.parsed, kind, partial(_AgentAnswer, episode)))
        return await asked.response(request)


class _AgentEpisode(Episode):
    """One run of the agent.

    Methods with an underscore run on the environment's event loop, or in a thread for it.
    """

    def __init__(self, environment: AgentEnvironment, task: Any) -> None:
        self.environment, self.task, self.name = environment, task, uuid4().hex
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        """Requests, and at the end the agent's result or error."""
        self.waiting: set[_AgentAnswer] = set()
        """Requests with a client that still waits."""
        self.asked: _AgentAnswer | None = None
        """The last request."""
        self.history: list[Any] = []
        """Its messages and its answer."""

    async def reset(self) -> Turn:
        self.environment.episodes[self.name] = self
        threading.Thread(target=self.work, daemon=True).start()
        return await self.on_loop(self._turn())

    async def step(self, action: Sequence[int]) -> Turn:
        return await self.on_loop(self._step(action))

    def close(self) -> None:
        self.environment.loop.call_soon_threadsafe(self._close)

    async def on_loop(self, work: Any) -> Turn:
        """Run ``work`` on the environment's event loop; the episode is closed if it is over."""
        is_done = True
        try:
            future = asyncio.run_coroutine_threadsafe(work, self.environment.loop)
            turn = await asyncio.wrap_future(future)
            is_done = turn.done
            return turn
        finally:
            if is_done:
                self.close()

    def work(self) -> None:
        """Run the agent. Its result, or any error, becomes an event."""
        try:
            result = self.environment.run(self.task, f"{self.environment.address}/{self.name}/v1")
            if inspect.isawaitable(result):
                result = asyncio.run(asyncio.wait_for(result, None))
        except Exception as error:  # noqa: BLE001
            result = error
        except BaseException as error:  # noqa: BLE001 - raised there, it would end the event loop
            result = RuntimeError(f"the agent ended with {type(error).__name__}: {error}")
        self.environment.loop.call_soon_threadsafe(self.events.put_nowait, result)

    def _close(self) -> None:
        self.environment.episodes.pop(self.name, None)
        for asked in self.waiting:
            asked.news.put_nowait(HTTPException(404, _OVER))

    async def _step(self, action: Sequence[int]) -> Turn:
        asked = self.asked
        assert asked is not None
        said, reason = await asyncio.to_thread(self._message, asked.body, action)
        self.history = [*asked.body.messages, said["delta" if asked.body.stream else "message"]]
        asked.on_tokens(action[len(asked.turn.tokens) :], reason)
        return await self._turn(action[-1])

    def _message(self, body: _AgentChat, action: Sequence[int]) -> tuple[dict[str, Any], str]:
        """Return the reply's choice with the policy's turn as a message, and why the turn ended."""
        tokenizer = self.environment.prompts.tokenizer
        is_ended = self._is_end(action[-1])
        is_ended |= any(stop in tokenizer.decode(action) for stop in body.stop)
        reason = "stop" if is_ended else "length"
        text = TextStream(tokenizer, body.stop).push(*action, is_last=True)
        return body.choice_fields(text, reason), reason

    def _is_end(self, token: int | None) -> bool:
        """Return whether ``token`` ends a turn: the end of a text, or a special token."""
        tokenizer = self.environment.prompts.tokenizer
        return token is not None and (token == tokenizer.eos_id or not tokenizer.decode([token]))

    async def _turn(self, last: int | None = None) -> Turn:
        """Wait for the next request with a client that waits, or for the agent's result.

        ``last``: the last token of the policy's turn before; None: there was none.
        """
        event = await self.events.get()
        while isinstance(event, _AgentAnswer) and event not in self.waiting:
            event = await self.events.get()
        if isinstance(event, Exception):
            raise event
        if not isinstance(event, _AgentAnswer):
            return Turn(reward=event, done=True)
        added = await asyncio.to_thread(self._added, event, last)
        self.asked, body = event, event.body
        send: Any = partial(self.environment.loop.call_soon_threadsafe, event.on_tokens)
        return Turn(
            event.prompt if added is None else added,
            new_segment=added is None,
            max_tokens=body.limit[1],
            stop=tuple(body.stop),
            on_tokens=send if body.stream else None,
        )

    def _added(self, asked: _AgentAnswer, last: int | None) -> tuple[int, ...] | None:
        """Return the tokens that ``asked`` adds to the last answer; None: it does not go on there.

        ``last``: the last answer's last token. If that ends a turn, the template's end mark is not
        added again. Else (after a limit or a stop text) it is added here.
        """
        before, said, now = self.asked, self.history, asked.body.messages
        if before is None or len(now) <= len(said) or before.body.record != asked.body.record:
            return None
        if any(_key(one) != _key(other) for one, other in zip(said, now, strict=False)):
            return None
        prompts, turns = self.environment.prompts, asked.body.messages
        template = ChatTemplate.of(prompts.tokenizer)
        with suppress(BadLineError):  # messages that the template refuses
            variables = ChatTemplate.variables_of(asked.body.record)
            text, _ = template.documents(
                turns[: len(said)], variables, train_on="last", adds_ends=False, strict=False
            )[-1]
            whole = template.prompt(turns, variables)
            if whole.startswith(text):
                more, mark = prompts.text(whole[len(text) :]), prompts.text(text)[-1]
                if self._is_end(last):
                    return more[more[:1] == (last,) :]
                return (mark, *more) if self._is_end(mark) else more
        return None


def _key(message: Mapping[str, Any]) -> Any:
    """Return the fields that identify a message, whatever else clients add to it."""
    content, calls = message.get("content") or "", message.get("tool_calls") or ()
    if isinstance(content, list):
        content = "".join(part if isinstance(part, str) else part["text"] for part in content)
    calls = [(call.get("id"), call.get("function")) for call in calls]
    return message.get("role"), content, calls, message.get("tool_call_id")
