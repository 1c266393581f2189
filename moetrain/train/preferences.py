"""Learning from preferences: from pairs of answers, and in KTO from single answers too.

A pair, or a single answer with its label, is one row
(:class:`~moetrain.data.packing.PairDataset`). For KTO a row has one more segment: its prompt with
the answer of the next row. From these segments KTO estimates how far the policy has moved from the
reference. The estimate is a mean over the whole global batch, all micro-batches of all ranks
(``Preference.batch_sums``).

The reference is the model that the run begins from, including the adapters of ``lora.path`` if this
is set. Its log-probabilities are computed once, before the first step, and kept in
``output_dir/reference.npz`` for a resumed run. SimPO and ORPO use no reference, and its
log-probabilities stay 0.

Left out on purpose: several preferences in one row, and a reference other than the initial weights.

Legend: P rows of a micro-batch, N segments, T tokens, S of a row.
"""

import json
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from moetrain.config import Config, ConfigError, logger
from moetrain.config.files import write_atomically
from moetrain.config.sources import shortened
from moetrain.data.loader import Batch, Data
from moetrain.data.packing import Mixture, PairDataset, Shuffled
from moetrain.losses.preference import (
    LOSSES,
    WITHOUT_REFERENCE,
    Scores,
    Segments,
    divergence,
    divergence_sums,
    kto_losses,
)
from moetrain.models.transformer import Transformer
from moetrain.train import objectives
from moetrain.train.callbacks import Callback, RunView
from moetrain.train.engine import Engine
from moetrain.train.reward import Reward

_DAMAGED = (ValueError, KeyError, TypeError, EOFError, BadZipFile, zlib.error, struct.error)
_DAMAGED += (RuntimeError, OverflowError, SyntaxError)
"""Errors of numpy and zipfile for a damaged file. Damage may look like encryption, or like a later
version of the format."""
_AGAIN = "restore what the run began with, or set checkpoint.resume never to start again"


@dataclass(frozen=True)
class Preference:
    """The mean loss of pairs, or for KTO of answers. Margins and accuracy are logged beside it.

    A margin is the mean reward of chosen or desirable answers minus that of the others. A row is
    accurate if its chosen answer has more reward than its rejected one. A row with a single answer
    is accurate if the reward has the sign of the label.
    """

    kind: str = "dpo"
    """One of :data:`~moetrain.losses.preference.KINDS`."""
    beta: float = 0.1
    """Factor of the log-ratio of policy and reference in a reward."""
    balances: bool = False
    desirable_weight: float = 1.0
    """Factor of the loss of KTO's desirable answers."""
    undesirable_weight: float = 1.0
    simpo_gamma: float = 0.5
    """The margin that SimPO wants between the rewards of the two answers."""

    @property
    def needs_reference(self) -> bool:
        """True: the loss needs the reference's log-probabilities. False: they stay 0."""
        return self.kind not in WITHOUT_REFERENCE

    def sizes(self, batches: Sequence[Batch]) -> dict[str, int]:
        found = {"rows": sum(int((b.targets_BS >= 0).any(1).sum()) for b in batches)}
        if self.kind == "kto":
            labels = [_segments(torch.zeros_like(b.targets_BS.flatten()), b).label for b in batches]
            found["desirable"] = sum(int((label_N > 0).sum()) for label_N in labels)
            found["undesirable"] = sum(int((label_N < 0).sum()) for label_N in labels)
            found["answers"] = found["desirable"] + found["undesirable"]
        return found

    @property
    def batch_sums(self) -> Callable[..., dict[str, torch.Tensor]] | None:
        """For KTO, the function of the divergence's sums over the whole global batch, which its
        losses need; None: the loss needs no such sums."""
        return self._divergence_sums if self.kind == "kto" else None

    def _divergence_sums(
        self, model: Transformer, outputs: objectives.Outputs, batch: Batch
    ) -> dict[str, torch.Tensor]:
        sums = divergence_sums(_segments(_log_ratios(model, outputs, batch), batch))
        return {name: x * outputs.share for name, x in sums.items()}

    def terms(
        self, model: Transformer, outputs: objectives.Outputs, batch: Batch, sizes: objectives.Sizes
    ) -> dict[str, objectives.Term]:
        segments = _segments(_log_ratios(model, outputs, batch), batch)
        if self.kind == "kto":
            found = self._of_answers(segments, divergence(outputs.batch_sums), batch, sizes)
        else:
            found = self._of_pairs(segments, batch, sizes)
        sums = {name: x * outputs.share for name, x in found.items()}
        return {name: objectives.Term(x, float(name == "preference")) for name, x in sums.items()}

    def _of_pairs(
        self, segments: Segments, batch: Batch, sizes: objectives.Sizes
    ) -> dict[str, torch.Tensor]:
        scores = Scores.of_pairs(segments)
        is_pair_P = (batch.targets_BS >= 0).any(1)  # an evaluation may pad a batch with empty rows
        sums = scores.chosen, scores.rejected
        chosen_P, rejected_P = scores.means if self.kind in WITHOUT_REFERENCE else sums
        margin_P = self.beta * (chosen_P - rejected_P).detach()
        found = {
            "preference": LOSSES[self.kind](scores, self.beta, self.simpo_gamma),
            "margin": margin_P,
            "accuracy": (margin_P > 0).float(),
        }
        return {k: torch.where(is_pair_P, x, 0.0).sum() / sizes["rows"] for k, x in found.items()}

    def _of_answers(
        self, segments: Segments, kl: torch.Tensor, batch: Batch, sizes: objectives.Sizes
    ) -> dict[str, torch.Tensor]:
        label_N = segments.label
        losses_N = kto_losses(
            segments,
            kl,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
        # An undesirable answer should have a negative reward.
        signed_N = self.beta * label_N * segments.ratio.detach()
        margin_P = signed_N.new_zeros(len(batch.targets_BS)).index_add(0, segments.row, signed_N)
        means = (
            torch.where(label_N == label, signed_N, 0.0).sum() / sizes[name]
            for label, name in ((1, "desirable"), (-1, "undesirable"))
        )
        return {
            "preference": losses_N.sum() / sizes["answers"],
            "margin": torch.stack([*means]).sum(),
            "accuracy": (margin_P > 0).float().sum() / sizes["rows"],
        }


def _segments(ratio_T: torch.Tensor, batch: Batch) -> Segments:
    return Segments.of(ratio_T, batch.targets_BS, batch.cu_seqlens, batch.extra.get("label"))


def _log_ratios(model: Transformer, outputs: objectives.Outputs, batch: Batch) -> torch.Tensor:
    """Return log(policy / reference) of every target, [T]."""
    loss_T = objectives.token_losses(model, outputs.hidden_BSD, batch).loss_T
    return -loss_T - batch.extra["reference"].flatten()


class Reference(Callback):
    """Computes the reference's log-probabilities before the first step; a resumed run reads
    them."""

    def __init__(self, datasets: Sequence[PairDataset]) -> None:
        self._datasets = datasets

    def on_start(self, run: RunView) -> None:
        """Compute the reference's log-probabilities for all rows, or read them if the run resumes.

        Raises ConfigError: a resumed run's file is missing, damaged, or of other pairs.
        """
        file, identity = run.folder / "reference.npz", [x.identity for x in self._datasets]
        if run.step == 0:
            pairs = sum(map(len, self._datasets))
            logger.info("the reference reads %s rows of preferences", f"{pairs:,}")
            for dataset in self._datasets:
                _fill(dataset, run)
            if run.world.is_main:
                arrays = [dataset.reference_PS for dataset in self._datasets]
                write_atomically(file, partial(_write, identity=identity, arrays=arrays))
            return
        try:
            with np.load(file) as kept:
                if json.loads(str(kept["identity"])) != identity:
                    problem = f"{file} was computed for other pairs; {_AGAIN}"
                    raise ConfigError("checkpoint.resume", problem)
                for i, dataset in enumerate(self._datasets):
                    dataset.reference_PS[:] = kept[f"arr_{i}"]
        except ConfigError:
            raise
        except _DAMAGED as error:
            problem = f"{file} is damaged ({shortened(str(error))}); {_AGAIN}"
            raise ConfigError("checkpoint.resume", problem) from None
        except OSError as error:
            raise ConfigError("checkpoint.resume", f"{file}: {error.strerror}; {_AGAIN}") from None


def _write(file: Path, identity: Any, arrays: Sequence[np.ndarray]) -> None:
    with file.open("wb") as opened:
        np.savez(opened, *arrays, identity=json.dumps(identity))


def score(
    engine: Engine, batches: Sequence[objectives.MicroBatch], temperature: float = 1.0
) -> list[torch.Tensor]:
    """Return the log-probability of each batch's targets under the engine's weights, fp32 [B, S].

    They are log softmax(h @ head^T / temperature) at the targets, on the CPU; 0 where there is no
    target. ``Engine.forward_backward`` computes the same values. It has the same bits too if blocks
    are not compiled: a compiled forward without a backward may round at other places. Collective;
    waits for the device.
    """

    def finish(hidden_BSD: torch.Tensor, _: Any, batch: objectives.MicroBatch) -> torch.Tensor:
        loss_T = objectives.token_losses(engine.model, hidden_BSD, batch, temperature).loss_T
        return -loss_T.view(batch.targets_BS.shape).float()

    return engine.collect(batches, finish, [batch.targets_BS.shape for batch in batches])


@torch.no_grad()
def _fill(dataset: PairDataset, run: RunView) -> None:
    """Compute the log-probabilities of a dataset's targets under the present weights.

    Data parallel ranks share the work. Collective; waits for the device.
    """
    engine, world, size = run.engine, run.world, run.config.train.micro_batch_size
    a_rank = size * engine.stages.plan.batch_multiple
    with engine.work():
        for first in range(0, len(dataset), a_rank * world.dims.data_ranks):
            start = first + a_rank * world.data_rank
            places = [min(start + i, len(dataset) - 1) for i in range(a_rank)]
            rows = [dataset.row(place) for place in places]
            batches = [Batch.of(rows[i : i + size]) for i in range(0, a_rank, size)]
            mine_AS = torch.cat(score(engine, batches)).to(world.device)
            whole_RAS = mine_AS.new_zeros(world.dims.data_ranks, *mine_AS.shape)
            whole_RAS[world.data_rank] = mine_AS
            whole_PS = world.sum_rows(whole_RAS).flatten(0, 1).cpu().numpy()
            dataset.reference_PS[first : first + len(whole_PS)] = whole_PS[: len(dataset) - first]


def pair_datasets(data: Data) -> list[PairDataset]:
    """Return the rows of preferences of ``data``, the training rows first."""
    train = [data.train]
    if isinstance(data.train, Mixture):
        train = [part.rows for part in data.train.parts.values() if isinstance(part, Shuffled)]
    held_out = [rows for rows, _ in data.sources.values()] or [data.eval]
    return [rows for rows in (*train, *held_out) if isinstance(rows, PairDataset)]


def chosen_objective(
    config: Config, pairs: Sequence[PairDataset], own: objectives.Objective[Any] | None
) -> objectives.Objective[Any]:
    """Return the objective, without the routers' losses.

    Args:
        pairs: the data's rows of preferences; empty: it has none.
        own: the program's objective; None: ``train.objective`` decides.

    Raises ConfigError: the settings and the program each give an objective, or the data does not
    suit the objective.
    """
    name = config.train.objective
    if own is not None:
        if config.is_set("train.objective"):
            problem = f"{name!r}, but the program gives another (objective=)"
            raise ConfigError("train.objective", f"{problem}; leave one of them out")
        return own
    if name == "next_token":
        return objectives.CrossEntropy()
    if not pairs:
        problem = f"{name!r}, but the rows that were given are not preferences"
        raise ConfigError("train.objective", f"{problem}; leave it out")
    if name == "reward":
        return Reward(config.train.reward_centering)
    return Preference(
        name,
        config.train.beta,
        desirable_weight=config.train.desirable_weight,
        undesirable_weight=config.train.undesirable_weight,
        simpo_gamma=config.train.simpo_gamma,
    )
