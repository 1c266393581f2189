"""What a model in training shows: its loss on held-out rows, and a text that it continues.

Every rank takes part in both, and gets the same result.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from moetrain.config import TrainSection
from moetrain.data import Data, Dataset, eval_batches
from moetrain.engine import Engine
from moetrain.loss import CrossEntropy
from moetrain.metrics import MetricsLog
from moetrain.sample import SampleError, generate

PROMPT_TOKENS = 16  # of a held-out row, given to the sample


def held_out_loss(engine: Engine, rows: Dataset, train: TrainSection) -> float:
    """The mean loss of ``train.eval_rows`` of ``rows``, nats a token; nan: no row has a target.

    Waits for the device.
    """
    world = engine.world
    batches = eval_batches(
        rows, train.eval_rows, train.micro_batch_size, world.data_rank, world.dims.data_ranks
    )
    batches, objective = list(batches), CrossEntropy()
    loss = engine.forward(batches, objective).terms["cross_entropy"].item()
    targets = torch.full((), objective.sizes(batches)["targets"], device=world.device)
    return loss if world.sum_rows(targets).item() > 0 else math.nan


def write_sample(engine: Engine, data: Data, file: Path, log: MetricsLog) -> None:
    """``train.sample_prompt`` or the start of a held-out row, continued by the model.

    Into ``file``, by the main rank. Where it cannot be made (the prompt is empty or no text, or the
    model's logits are not finite), the log says why.
    """
    train, seq_len = engine.config.train, engine.config.data.seq_len
    try:
        text = generate(
            engine.next_logits,
            data.tokenizer,
            prompt_ids(data, train.sample_prompt),
            train.sample_tokens,
            max_len=seq_len,
            seed=train.seed,
        )
    except SampleError as error:  # the run did what it was for
        log.say(f"no sample: {error} (train.sample_prompt, train.sample_tokens)")
        return
    if engine.world.is_main:
        file.write_text(text, "utf-8")
        log.say("sample:\n" + text)


def prompt_ids(data: Data, text: str | None) -> list[int]:
    """The tokens that a sample continues: of ``text``, else of the first held-out row."""
    if text is None:
        return (data.eval or data.train).row(0).tokens_S[:PROMPT_TOKENS].tolist()
    try:
        return data.tokenizer.encode_prompt(text)
    except ValueError as error:
        raise SampleError(str(error)) from None
