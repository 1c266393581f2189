"""A teacher that another process serves, asked over HTTP what it thinks of given tokens.

It is asked as vLLM is, ``/v1/completions`` with ``prompt_logprobs``, sample by sample. Of ranks
that have the same rows one asks, and all have its answer. JSON keeps every bit of the numbers.

Left out on purpose: probabilities at another temperature than 1, which such servers do not have.
"""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import torch

from moetrain.config import Config, ConfigError
from moetrain.config.environment import user_cache_dir
from moetrain.config.sources import RunFailed
from moetrain.data.packing import IGNORE_INDEX
from moetrain.data.tokenizer import Tokenizer
from moetrain.parallel.world import World
from moetrain.rl.rows import RolloutBatch

_AT_ONCE = 32
"""Micro-batches of a rank for which it asks at once."""
_BUSY = (None, 429, 502, 503)
"""Statuses of servers that are not there, begin, or have too much to do."""
_TEXT = "The quick brown fox: 0123456789 {}\n"


class ServedTeacher:
    """The server at ``rl.teacher``."""

    def __init__(self, config: Config, world: World | None = None) -> None:
        """``world``: whose ranks all call :meth:`judged`."""
        self.world, self.settings, self.seq_len = world, config.rl, config.data.seq_len
        self.number, self.patience, self.model = config.rl.teacher_top_k, 0.0, ""
        self._open = build_opener(ProxyHandler({})).open

    def check(self, tokenizer: Tokenizer) -> None:
        """Raise ConfigError if it cannot judge a row of ``tokenizer``'s tokens."""
        ids = tokenizer.encode_batch([_TEXT])[0].ids.tolist()
        row = [*(ids * self.seq_len)[: self.seq_len], tokenizer.vocab_size - 1]
        read, judged = self._scores(_TEXT, 0), self._scores(row, self.number)
        least, temperature = min(map(len, judged)), self.settings.temperature
        if [next(iter(scores)) for scores in read][1 - len(ids) :] != ids[1:]:
            problem = "has other tokens than data.tokenizer; serve one with the same tokenizer"
        elif least < self.number:
            problem = f"gives {least} likeliest tokens, less than rl.teacher_top_k {self.number}"
            problem += "; lower that"
        elif temperature != 1:
            problem = f"has probabilities at temperature 1, not rl.temperature {temperature}"
            problem += "; set 1, or name a checkpoint"
        else:
            return
        raise self._error(problem)

    def judged(self, batches: Sequence[RolloutBatch]) -> list[RolloutBatch]:
        """Add what the teacher thinks of every target. Collective; RunFailed: it is gone."""
        world, found = self.world, None
        assert world is not None  # given where there are batches
        first = world.gather(world.data_rank).index(world.data_rank)
        self.patience = self.settings.step_timeout  # it may be started again
        if world.rank == first:
            try:
                with ThreadPoolExecutor(_AT_ONCE) as pool:
                    found = list(pool.map(self._values, batches))
            except ConfigError as error:
                found = str(error)
        parts: list[Any] = world.gather(found)
        for part in parts:
            if isinstance(part, str):
                raise RunFailed(part)
        name = "teacher_BS2K" if self.number else "teacher_BS"
        return [b._replace(**{name: x}) for b, x in zip(batches, parts[first], strict=True)]

    def _values(self, batch: RolloutBatch) -> torch.Tensor:
        """Return fp32 [B, S] or [B, S, 2, K]; 0 where nothing is predicted."""
        tokens_T, targets_T = batch.tokens_BS.flatten(), batch.targets_BS.flatten()
        values = torch.zeros(len(tokens_T), *((2, self.number) if self.number else ()))
        for _, start, length in batch.places:
            text, last = tokens_T[start : start + length].tolist(), targets_T[start + length - 1]
            text += [] if last == IGNORE_INDEX else [int(last)]
            for i, scores in enumerate(self._scores(text, self.number)):
                top = sorted(scores, key=lambda token: -scores[token])[: self.number]
                pair = [top, [scores[token] for token in top]]
                values[start + i] = torch.tensor(pair if top else scores[text[i + 1]])
        return values.unflatten(0, batch.tokens_BS.shape)

    def _scores(self, prompt: str | list[int], number: int) -> list[dict[int, float]]:
        """Return log-probabilities of each token but the first, and of the ``number`` likeliest."""
        try:
            self.model = self.model or self._ask("models")["data"][0]["id"]
            asked = {"model": self.model, "prompt": prompt, "prompt_logprobs": number}
            reply = self._ask("completions", asked | {"max_tokens": 1, "temperature": 0})
            scored = reply["choices"][0]["prompt_logprobs"][1:]
            return [{int(token): x["logprob"] for token, x in one.items()} for one in scored]
        except (LookupError, TypeError, AttributeError):
            problem = "answers without prompt_logprobs; serve it by moetrain.serve or vLLM"
            raise self._error(problem) from None

    def _ask(self, path: str, body: object = None) -> Any:
        """Return the answer; ConfigError: there is none, for ``patience`` seconds if it is busy."""
        url = str(self.settings.teacher).rstrip("/").removesuffix("/v1")
        headers, file = {"Content-Type": "application/json"}, user_cache_dir() / "serve.token"
        if file.exists():
            headers["Authorization"] = f"Bearer {file.read_text('utf-8').strip()}"
        data, began = None if body is None else json.dumps(body).encode(), time.monotonic()
        while True:
            try:
                request = Request(f"{url}/v1/{path}", data, headers)
                with self._open(request, timeout=self.settings.step_timeout) as reply:
                    return json.load(reply)
            except (OSError, HTTPException, ValueError) as error:
                code = error.code if isinstance(error, HTTPError) else None
                problem = f"does not answer ({error}); serve it by python -m moetrain.serve"
                if isinstance(error, HTTPError):
                    said = " ".join(error.read(300).decode("utf-8", "replace").split())
                    asked = f"rows of data.seq_len {self.seq_len} with {self.number} likeliest"
                    problem = f"refuses {asked} tokens, with status {code}: {said}; serve what can"
                if code not in _BUSY or time.monotonic() - began > self.patience:
                    raise self._error(problem) from None
            time.sleep(1.0)

    def _error(self, problem: str) -> ConfigError:
        return ConfigError("rl.teacher", f"{self.settings.teacher!r} {problem}")
