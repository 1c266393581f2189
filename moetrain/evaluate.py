"""What a model in training knows: its loss on held-out rows, and a text that it continues.

Every rank takes part in both, and gets the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from moetrain.config import Config, TrainSection
from moetrain.data import Data, Dataset, eval_batches
from moetrain.generate import SampleError, generate
from moetrain.loss import cross_entropy_sum
from moetrain.models import Transformer
from moetrain.parallel.fsdp import FSDP
from moetrain.parallel.world import World

PROMPT_TOKENS = 16  # of a held-out row, given to the sample

ExactSizes = Callable[[], AbstractContextManager[None]]
"""A context in which no dispatcher drops rows, whatever the routing."""


@torch.no_grad()
def held_out_loss(
    model: Transformer,
    fsdp: FSDP,
    world: World,
    rows: Dataset,
    train: TrainSection,
    exactly: ExactSizes,
) -> float:
    """The mean loss of ``train.eval_rows`` of ``rows``, nats a token. Waits for the device."""
    model.eval()
    batches = eval_batches(
        rows, train.eval_rows, train.micro_batch_size, world.data_rank, world.dims.data_ranks
    )
    # In fp64, which counts exactly; a few numbers cost nothing.
    sum_loss, targets = torch.zeros(2, dtype=torch.float64, device=world.device).unbind()
    for batch in batches:
        batch = batch.to(world.device)
        with exactly(), fsdp.work():
            sum_loss += cross_entropy_sum(model, batch)[0]
        targets += (batch.targets_BS >= 0).sum()
    return (world.sum(sum_loss) / world.sum_rows(targets)).item()


def sample_text(
    model: Transformer,
    fsdp: FSDP,
    world: World,
    data: Data,
    config: Config,
    exactly: ExactSizes,
) -> str:
    """``train.sample_prompt`` or the start of a held-out row, continued by the model.

    Raises:
        SampleError: the prompt is empty or no text, or the model's logits are not finite.
    """
    with exactly(), fsdp.work():
        return generate(
            model,
            data.tokenizer,
            prompt_ids(data, config.train.sample_prompt),
            config.train.sample_tokens,
            max_len=config.data.seq_len,
            seed=config.train.seed,
            multiple=world.dims.tp,
        )


def prompt_ids(data: Data, text: str | None) -> list[int]:
    """The tokens that a sample continues: of ``text``, else of the first held-out row."""
    if text is None:
        return (data.eval or data.train).row(0).tokens_S[:PROMPT_TOKENS].tolist()
    try:
        return data.tokenizer.encode_prompt(text)
    except ValueError as error:
        raise SampleError(str(error)) from None
