"""OpenAI's protocol: the requests for completions, chats and responses, and the form of replies.

As an extension every choice has its ``token_ids``. A streamed chat with tools sends the text of a
choice at the end, because only then are the tool calls in it known.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from moetrain.config.sources import shortened
from moetrain.data.chat import ChatTemplate
from moetrain.data.tokenizer import Tokenizer
from moetrain.generate.request import Completion, JsonBody, Update, chat_ids
from moetrain.http.tool_calls import call_grammar, parse_tools

_MOST_COMPLETIONS = 128
_MOST_LIKELIEST = 20
"""Most of the likeliest tokens to report for each chosen one: OpenAI's limit for chats."""
_MOST_STOPS, _LONGEST_STOP = 16, 128
"""Most stop texts, and most characters of one. Each new token is checked against all of them."""
_MOST_TURNS = 4096
"""Most turns of a chat. A template may take time that is quadratic in their number."""
_LEAST_LOGPROB = -9999.0
"""The protocol's log-probability of a token that is never chosen."""
_INSTEAD = {"messages": "input", "response_format": "text.format"}
_INSTEAD |= {"n": "a request for each answer"}
_INSTEAD |= dict.fromkeys(("logprobs", "top_logprobs"), "a chat, whose reply has them")
_INSTEAD |= dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens")
_INSTEAD |= dict.fromkeys(("previous_response_id", "conversation"), "the whole input")
"""Parameters that ``/v1/responses`` refuses, and what to send instead of each."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_tokens"), (0,)),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "best_of"), (1,)),
    **dict.fromkeys(("use_beam_search", "early_stopping"), (False,)),
    **dict.fromkeys(("include_stop_str_in_output", "return_tokens_as_token_ids"), (False,)),
    **dict.fromkeys(("add_special_tokens", "spaces_between_special_tokens"), (True,)),
    "logit_bias": ({},),
    "suffix": ("",),
    "top_k": (-1,),
    "truncation": ("disabled",),
}
"""Parameters of OpenAI and vLLM that clients send although they do not use them, with the values
that change nothing."""
_Token = Annotated[int, Field(ge=0)]
_Stop = Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]
_Stops = Annotated[list[_Stop], BeforeValidator(lambda x: [x] if isinstance(x, str) else x)]


class _Format(JsonBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Has ``schema``, and keys that only describe it."""


class _Asked(JsonBody):
    """The fields that completions and chats share. SamplingParams checks the bounds of numbers."""

    kind: ClassVar[str]
    """The value of ``object`` in a whole reply."""
    kind_of_parts: ClassVar = ""
    """The suffix of ``kind`` in the ``object`` of each part of a streamed reply."""
    counts: ClassVar = ("prompt_tokens", "completion_tokens")
    """The names of the two counts of ``usage``."""

    model: str = ""
    """Has no effect: the server has one model."""
    user: str = ""
    safety_identifier: str = ""
    prompt_cache_key: str = ""
    service_tier: str = ""
    """These four have no effect."""
    max_tokens: PositiveInt | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """None: a random one for each request."""
    n: int = Field(default=1, le=_MOST_COMPLETIONS)
    stop: _Stops = Field([], max_length=_MOST_STOPS, fail_fast=True)
    stop_token_ids: list[_Token] = Field([], max_length=_MOST_STOPS, fail_fast=True)
    """Tokens that end a completion besides those that end a text (as in vLLM)."""
    ignore_eos: bool = False
    """True: continue after a token that ends a text (as in vLLM)."""
    skip_special_tokens: bool = True
    """False: special tokens are part of the text (as in vLLM)."""
    stream: bool = False
    stream_options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Has no effect: the last part of a stream always has the usage."""
    response_format: _Format = _Format(type="text")
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(default=None, min_length=1, fail_fast=True)
    guided_grammar: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, body: Any) -> Any:
        """Remove what has no effect: null, and parameters with a value of :data:`_NEUTRAL`."""
        if not isinstance(body, dict):
            return body
        body = {key: value for key, value in body.items() if value is not None}
        for name in _NEUTRAL.keys() & body.keys():
            neutral = _NEUTRAL[name]
            if body[name] in neutral:
                del body[name]
            elif name not in cls.model_fields:
                said = f"{name!r} {shortened(body[name])} is not supported"
                raise ValueError(f"{said}; leave it out, or send {neutral[0]!r}")
        return body

    def grammars(self, tokenizer: Tokenizer) -> list[tuple[Any, Any]]:
        """Return kind and text of each requested grammar. A completion can follow only one."""
        form, schema = self.response_format, self.response_format.json_schema.get("schema")
        schemas = {"text": None, "json_object": {"type": "object"}, "json_schema": schema}
        if form.type == "json_schema" and schema is None:
            raise ValueError("response_format: json_schema has no schema; send one")
        given = [
            ("json_schema", schemas[form.type]),
            ("json_schema", self.guided_json),
            ("regex", self.guided_regex),
            ("choice", self.guided_choice),
            ("grammar", self.guided_grammar),
        ]
        return [(kind, text) for kind, text in given if text is not None]

    @property
    def limit(self) -> tuple[str, int | None]:
        """Name and value of the field that limits a completion's tokens; None: the default."""
        names = ("max_output_tokens", "max_completion_tokens", "max_tokens")
        given = ((name, getattr(self, name, None)) for name in names)
        return next((pair for pair in given if pair[1] is not None), ("max_tokens", None))

    @cached_property
    def head(self) -> dict[str, Any]:
        """The fields that every part of the reply begins with."""
        return {"id": f"{self.kind}-{uuid.uuid4().hex}", "created": int(time.time())}

    def reply(
        self, model: str, choices: list[dict[str, Any]], tokens: tuple[int, int] | None
    ) -> dict[str, Any]:
        """Return a reply, or a part of it if it is a stream.

        ``tokens``: number of tokens read and generated; None: this is not the last part.
        """
        kind = self.kind + self.kind_of_parts * self.stream
        reply = {**self.head, "object": kind, "model": model, "choices": choices}
        if tokens is not None:
            counts = dict(zip(self.counts, tokens, strict=True))
            reply["usage"] = counts | {"total_tokens": sum(tokens)}
        return reply

    def whole(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Return a whole reply in the form of its protocol."""
        return reply

    def writer(self) -> Callable[[dict[str, Any]], str]:
        """Return a function that turns the parts of a reply, in order, into server-sent events."""
        end = {True: "data: [DONE]\n\n", False: ""}
        return lambda part: f"data: {json.dumps(part, allow_nan=False)}\n\n{end['usage' in part]}"


class Completions(_Asked):
    """A request to continue texts."""

    kind: ClassVar = "text_completion"

    prompt: Any
    """A text or a list of token ids, or a list of either."""
    max_tokens: NonNegativeInt | None = None
    echo: bool = False
    """True: the text begins with the prompt, and the log-probabilities with those of the prompt."""
    logprobs: int | None = Field(default=None, ge=0, le=_MOST_LIKELIEST)
    prompt_logprobs: int | None = Field(default=None, ge=0)
    """Number of the likeliest tokens to report for each token of the prompt (as in vLLM); None:
    report nothing about the prompt. They are in the last part of a stream."""

    @model_validator(mode="after")
    def _asks_for_something(self) -> Completions:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError(
                "max_tokens 0 asks for nothing; raise it, or send echo true or prompt_logprobs"
            )
        return self

    @property
    def likeliest(self) -> int | None:
        """Number of the likeliest tokens to report with log-probabilities; None: report neither."""
        return self.logprobs

    def prompts(self, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
        """Return the tokens of every prompt. Raises ValueError: it is no prompt."""
        prompt = self.prompt
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_ids(prompt)):
            prompt = [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise ValueError("prompt is neither text nor token ids, nor a list of either")
        if not all(isinstance(one, str) or _is_ids(one) for one in prompt):
            raise ValueError("prompt is a list, but not of texts or token ids only")
        try:
            return [
                tuple(tokenizer.encode_prompt(one) if isinstance(one, str) else one)
                for one in prompt
            ]
        except ValueError as error:
            raise ValueError(f"prompt: {error}") from None

    def choice_fields(self, text: str, reason: str | None) -> dict[str, Any]:
        """Return the fields for ``text`` and the finish ``reason`` of a choice, or of its part."""
        return {"text": text, "finish_reason": reason}

    @staticmethod
    def scored(prompt: Sequence[int], done: Completion) -> list[dict[int, dict[str, float]] | None]:
        """Return ``prompt_logprobs``: each token and the likeliest ones in its place, by id.

        The first token has None.
        """
        found = zip(prompt[1:], done.prompt_logprobs, done.prompt_top_logprobs, strict=True)
        each = ({**top, token: logprob}.items() for token, logprob, top in found)
        return [None, *({t: {"logprob": max(p, _LEAST_LOGPROB)} for t, p in x} for x in each)]

    @staticmethod
    def logprobs_of_prompt(
        prompt: Sequence[int], done: Completion, name: Callable[[int], str]
    ) -> dict[str, Any]:
        """Return ``logprobs`` of a prompt's tokens. The first token has None.

        ``name`` gives a token's text.
        """
        return {
            "tokens": [name(token) for token in prompt],
            "token_logprobs": [None, *(max(p, _LEAST_LOGPROB) for p in done.prompt_logprobs)],
            "top_logprobs": [None, *(_by_name(top, name) for top in done.prompt_top_logprobs)],
        }

    def logprobs_of(self, updates: list[Update], name: Callable[[int], str]) -> dict[str, Any]:
        """Return ``logprobs`` of a choice. ``name`` gives a token's text."""
        return {
            "tokens": [name(update.token) for update in updates],
            "token_logprobs": [update.logprob for update in updates],
            "top_logprobs": [_by_name(update.top_logprobs, name) for update in updates],
        }


def _by_name(top: Mapping[int, float], name: Callable[[int], str]) -> dict[str, float]:
    """Return log-probabilities by the texts of tokens.

    If several tokens have the same text, the likeliest counts. All parts of characters have the
    text U+FFFD.
    """
    ascending = sorted(top.items(), key=lambda pair: pair[1])
    return {name(token): max(p, _LEAST_LOGPROB) for token, p in ascending}


class Chat(_Asked):
    """A request to answer the last turn of a chat."""

    prompt_logprobs: ClassVar = None
    echo: ClassVar = False

    kind: ClassVar = "chat.completion"
    kind_of_parts: ClassVar = ".chunk"

    messages: list[Any] = Field(max_length=_MOST_TURNS)
    """The turns, as :func:`~moetrain.data.messages.read_messages` reads them."""
    tools: Any = None
    tool_choice: Any = None
    documents: Any = None
    chat_template_kwargs: Any = None
    add_generation_prompt: bool = True
    """True: the template opens the assistant's turn (as in vLLM)."""
    continue_final_message: bool = False
    """True: continue the last message, which must be the assistant's (as in vLLM)."""
    reasoning_effort: str | None = None
    """This, ``tools``, ``documents`` and ``chat_template_kwargs`` are variables of the template."""
    parallel_tool_calls: bool = True
    store: bool = False
    metadata: Any = None
    """These three have no effect."""
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=_MOST_LIKELIEST)

    @model_validator(mode="after")
    def _is_consistent(self) -> Chat:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens mean the same; send only one")
        given = {"add_generation_prompt", "continue_final_message"} & self.model_fields_set
        if len(given) == 2 and self.add_generation_prompt and self.continue_final_message:
            problem = "add_generation_prompt and continue_final_message exclude each other"
            raise ValueError(f"{problem}; send one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs has no effect without logprobs true; send both")
        return self

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def grammars(self, tokenizer: Tokenizer) -> list[tuple[Any, Any]]:
        found = super().grammars(tokenizer)
        if self.tool_choice not in (None, "auto", "none"):
            template = ChatTemplate.of(tokenizer)
            template = (template.with_tools or template).source
            found.append(("grammar", call_grammar(self.tools, self.tool_choice, template)))
        return found

    def prompts(self, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
        ids = chat_ids(
            tokenizer,
            self.messages,
            self.record,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )
        return [ids]

    @property
    def record(self) -> dict[str, Any]:
        """The template's variables besides the messages."""
        tools = None if self.tool_choice == "none" else self.tools
        variables = self.chat_template_kwargs
        if self.reasoning_effort is not None and isinstance(variables, dict | None):
            variables = {"reasoning_effort": self.reasoning_effort, **(variables or {})}
        return {"tools": tools, "documents": self.documents, "chat_template_kwargs": variables}

    @cached_property
    def schemas(self) -> dict[str, Any]:
        """The JSON schema of the parameters of each tool that may be called, by its name."""
        tools = ChatTemplate.variables_of(self.record)["tools"] or ()
        functions = [f for tool in tools if isinstance(f := tool.get("function"), dict)]
        named = [f for f in functions if isinstance(f.get("name"), str)]
        return {f["name"]: f.get("parameters") or {} for f in named}

    def choice_fields(self, text: str, reason: str | None) -> dict[str, Any]:
        text, calls = parse_tools(text, self.schemas)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message |= {"content": text or None, "tool_calls": []}
            reason = "tool_calls" if reason == "stop" else reason
        for i, (name, arguments) in enumerate(calls):
            function = {"name": name, "arguments": arguments}
            call: dict[str, Any] = {"index": i} if self.stream else {}
            # The id is the same when a resumed agent gets this answer again.
            call |= {"id": f"call_{len(self.messages)}_{i}", "type": "function"}
            message["tool_calls"].append({**call, "function": function})
        return {"delta" if self.stream else "message": message, "finish_reason": reason}

    def logprobs_of(self, updates: list[Update], name: Callable[[int], str]) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            return {"token": name(token), "logprob": max(logprob, _LEAST_LOGPROB), "bytes": None}

        content = []
        for update in updates:
            top = [entry(*pair) for pair in update.top_logprobs.items()]
            content.append(entry(update.token, update.logprob) | {"top_logprobs": top})
        return {"content": content}


class Responses(Chat):
    """A request of ``/v1/responses``. It is converted to a chat request before it is checked.

    So it is checked, served and recorded like a chat. Left out on purpose: stored responses, tools
    that run on the server, and items of reasoning, since thoughts are part of the text.
    """

    kind: ClassVar = "response"
    kind_of_parts: ClassVar = ""
    counts: ClassVar = ("input_tokens", "output_tokens")

    max_output_tokens: PositiveInt | None = None
    text: dict[Literal["format"], dict[str, Any]] = Field({})

    @model_validator(mode="before")
    @classmethod
    def _as_chat(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name in sorted(_INSTEAD.keys() & body.keys()):
            raise ValueError(f"{name!r} is not supported; send {_INSTEAD[name]}")
        body = {key: value for key, value in body.items() if value != []}
        first, given = body.pop("instructions", None), body.pop("input", None)
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        body["messages"] = [] if first is None else [{"role": "system", "content": first}]
        body["messages"] += _turns_of(given if isinstance(given, list) else [given])
        if tools := body.get("tools"):
            body["tools"] = [_tool(x) for x in (tools if isinstance(tools, list) else [tools])]
        match body.get("tool_choice"):
            case {"name": name}:
                body["tool_choice"] = {"type": "function", "name": name, "function": {"name": name}}
        match body.get("reasoning"):
            case {"effort": effort, **others} if not any(others.values()):
                body["reasoning_effort"] = effort
                del body["reasoning"]
        match body.get("text"):
            case {"format": {**form}}:
                body["response_format"] = {"type": form.get("type"), "json_schema": form}
        return body

    def whole(self, reply: dict[str, Any]) -> dict[str, Any]:
        (choice,) = reply.pop("choices")
        text, calls = choice["message"]["content"], choice["message"].get("tool_calls", ())
        statuses = {None: "in_progress", "stop": "completed", "tool_calls": "completed"}
        status = statuses.get(choice["finish_reason"], "incomplete")
        is_long = choice["finish_reason"] == "length"
        output = [{"type": "function_call", "call_id": c["id"], **c["function"]} for c in calls]
        if text or not calls:
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
            output.insert(0, {"type": "message", "role": "assistant", "content": [part]})
        for i, item in enumerate(output):
            item |= {"id": f"{reply['id']}-{i}", "status": status}
        if "usage" in reply:
            reply["usage"]["input_tokens_details"] = {"cached_tokens": 0, "cache_write_tokens": 0}
            reply["usage"]["output_tokens_details"] = {"reasoning_tokens": 0}
        return reply | {
            "created_at": reply.pop("created"),
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_long else None,
            "output": output,
            "token_ids": choice["token_ids"],
            "tools": [{"type": "function", **tool["function"]} for tool in self.tools or ()],
            "tool_choice": self.tool_choice or "auto",
            "parallel_tool_calls": self.parallel_tool_calls,
        }

    def writer(self) -> Callable[[dict[str, Any]], str]:
        numbers, texts, tokens = count(), list[str](), list[int]()

        def event(kind: str, **fields: Any) -> str:
            fields = {"type": f"response.{kind}", "sequence_number": next(numbers), **fields}
            return f"event: {fields['type']}\ndata: {json.dumps(fields, allow_nan=False)}\n\n"

        def write(part: dict[str, Any]) -> str:
            (choice,) = part["choices"]
            is_first, is_last = not tokens, choice["finish_reason"] is not None
            texts.append(choice["delta"]["content"] or "")
            tokens.extend(choice["token_ids"])
            if not is_first and not is_last:
                at = {"item_id": f"{part['id']}-0", "output_index": 0, "content_index": 0}
                new = {"logprobs": [], "delta": texts[-1]}
                return "" if self.schemas else event("output_text.delta", **at, **new)
            said = {"message": choice["delta"] | {"content": "".join(texts)}, "token_ids": tokens}
            whole = self.whole(part | {"choices": [choice | said]})
            events = ""
            if is_first:
                events = event("created", response=whole | {"output": [], "status": "in_progress"})
            # With tools the items are known only at the end.
            for i, item in enumerate(whole["output"] if is_last or not self.schemas else ()):
                at = {"item_id": item["id"], "output_index": i}
                kind, key, holder = "function_call_arguments", "arguments", item
                if item["type"] == "message":
                    kind, key, holder = "output_text", "text", item["content"][0]
                    at |= {"content_index": 0, "logprobs": []}
                words, holder[key] = holder[key], ""
                if is_first or self.schemas:
                    events += event("output_item.added", output_index=i, item=item)
                new = words if self.schemas else texts[-1]
                events += event(f"{kind}.delta", **at, delta=new)
                holder[key] = words
                if is_last:
                    events += event(f"{kind}.done", **at, **{key: words})
                    events += event("output_item.done", output_index=i, item=item)
            return events + (event(whole["status"], response=whole) if is_last else "")

        return write


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _turns_of(items: list[Any]) -> list[Any]:
    """Return the messages of a chat. Calls become part of the assistant's turn before them."""
    turns: list[dict[str, Any]] = []
    for item in items:
        match item:
            case {"type": "function_call", "call_id": to, "name": name, "arguments": words}:
                if not turns or turns[-1]["role"] != "assistant":
                    turns.append({"role": "assistant"})
                function = {"name": name, "arguments": words}
                call = {"id": to, "type": "function", "function": function}
                turns[-1].setdefault("tool_calls", []).append(call)
            case {"type": "function_call_output", "call_id": to, "output": said}:
                turns.append({"role": "tool", "tool_call_id": to, "content": _joined(said)})
            case {"tool_calls": [_, *_]} | {"tool_call_id": str()}:
                problem = "is a chat message; send a function_call or function_call_output item"
                raise ValueError(f"input: {shortened(item)} {problem}")
            case {"role": role, "content": said} if item.get("type", "message") == "message":
                turns.append({"role": role, "content": _joined(said)})
            case _:
                problem = "is no message, function_call or function_call_output; send only these"
                raise ValueError(f"input: {shortened(item)} {problem}")
    return turns


def _joined(content: Any) -> Any:
    """Join the texts of ``content``, because templates do not know the types of its parts."""
    try:
        return "".join(part["text"] for part in content)
    except (LookupError, TypeError):  # the chat reads or refuses it
        return content


def _tool(tool: Any) -> dict[str, Any]:
    """Return a tool in the form of a chat. Templates write its keys in the order given here."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise ValueError(f"tools: {shortened(tool)} is not of type function; leave it out")
    names = ("name", "description", "parameters", "strict", *sorted(tool.keys() - {"type"}))
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}
