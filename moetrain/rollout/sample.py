"""The sample at the end of a training run: a text that the generator continues.

The trainer finds :func:`write_sample` by name: it imports nothing of generation, a layer above it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from moetrain.config import TrainSection
from moetrain.data.loader import Data
from moetrain.rollout.engine import Generator
from moetrain.rollout.pages import Pages
from moetrain.rollout.request import Request, SamplingParams
from moetrain.rollout.weights import WeightUpdate, replica, replica_bytes
from moetrain.train.engine import Engine
from moetrain.train.metrics import MetricsLog

_PROMPT_TOKENS = 16  # the start of a held-out row, as the prompt
_TEMPERATURE = 0.7
_SPARE = 3 * 2**30
"""Bytes on a GPU beside the generator's weights: a sequence's cache, and two units in transit."""


class _SampleError(ValueError):
    """No text can be sampled; the message says why."""


def write_sample(engine: Engine, data: Data, file: Path, log: MetricsLog) -> None:
    """Continue ``train.sample_prompt``, or the start of a held-out row, into ``file``. Collective.

    The main rank writes it. If it cannot be made (the prompt is empty or no text, logits are not
    finite, memory is short, or the model has no generation), the log says why.
    """
    try:
        text = data.tokenizer.decode(_sample(engine, data))
    except _SampleError as error:  # the run itself has succeeded
        log.say(f"no sample: {error} (train.sample_prompt, train.sample_tokens)")
        return
    if engine.world.is_main:
        file.write_text(text, "utf-8")
        log.say("sample:\n" + text)


def _prompt(data: Data, text: str | None) -> list[int]:
    """Return the tokens to continue: of ``text``, else of the first held-out row."""
    if text is None:
        return (data.eval or data.train).row(0).tokens_S[:_PROMPT_TOKENS].tolist()
    try:
        return data.tokenizer.encode_prompt(text)
    except ValueError as error:
        raise _SampleError(str(error)) from None


def _sample(engine: Engine, data: Data) -> list[int]:
    """Return the prompt and its continuation. An error is raised on every rank or after all met."""
    train, seq_len = engine.config.train, engine.config.data.seq_len
    ids = _prompt(data, train.sample_prompt)
    if not ids:
        raise _SampleError("the prompt has no tokens")
    _check_memory(engine)
    model, experts = replica(engine)
    num_pages = -(-seq_len // Pages.SIZE)
    try:
        generator = Generator(model, data.tokenizer, num_pages=num_pages, experts=experts)
    except ValueError as error:
        raise _SampleError(str(error)) from None
    WeightUpdate(engine, generator)()
    window = min(seq_len, generator.longest)
    return _continued(generator, ids, train, window, data.tokenizer.eos_id)


def _check_memory(engine: Engine) -> None:
    """Raise :class:`_SampleError` on every rank if one has no room for the generator."""
    engine.fsdp.release()
    needed, device = replica_bytes(engine) + _SPARE, engine.world.device
    lacking = torch.tensor([float(_free_bytes(device) < needed)], device=device)
    if engine.world.sum_all(lacking).item() > 0:
        raise _SampleError(f"a device has not the {needed / 2**30:.1f} GiB that it takes")


def _free_bytes(device: torch.device) -> float:
    """Return a GPU's free memory; a CPU's is not counted."""
    if device.type != "cuda":
        return math.inf
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _continued(
    generator: Generator, prompt: Sequence[int], train: TrainSection, window: int, eos_id: int
) -> list[int]:
    """Return ``prompt`` and up to ``train.sample_tokens`` more; it ends before ``eos_id``.

    The model sees ``window`` tokens at most: when they are full, it goes on from their last half.
    Every rank makes the same requests.
    """
    ids, end = list(prompt), len(prompt) + train.sample_tokens

    def request() -> Request:
        seen = ids if len(ids) < window else ids[-(window // 2) :]
        params = SamplingParams(
            max_tokens=min(end - len(ids), window - len(seen)),
            temperature=_TEMPERATURE,
            # Each window has its own random numbers.
            seed=(train.seed + len(ids) - len(prompt)) % 2**63,
            stop_ids=(eos_id,),
        )
        return Request("sample", tuple(seen), params)

    is_finite = True
    for completion in generator.stream([request()]):
        reason = completion.finish_reason
        if reason is None:
            continue
        is_finite = all(map(math.isfinite, completion.logprobs))
        ids += completion.tokens[:-1] if reason == "stop" else completion.tokens
        if is_finite and reason == "length" and len(ids) < end:
            generator.submit(request())
    if not is_finite:
        raise _SampleError("the model's logits are not finite")
    return ids
