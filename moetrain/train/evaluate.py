"""What a model in training shows: its loss on held-out rows. Every rank gets the same result."""

from __future__ import annotations

import math

import torch

from moetrain.config import TrainSection
from moetrain.data.loader import eval_batches
from moetrain.data.packing import Dataset
from moetrain.train.engine import Engine
from moetrain.train.objectives import CrossEntropy


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
