"""Learning from preferences: DPO, IPO and KTO over pairs of answers to one prompt.

    Trainer(config, **preferences(config, pairs, "dpo", beta=0.1)).fit()

A pair is one row: the prompt with the chosen answer, then the prompt with the rejected one, as two
segments, which do not see each other. So batches, loaders and meshes are those of other rows. For
KTO a third segment has the prompt with another pair's chosen answer, from which the divergence from
the reference is estimated.

The reference is the model that the run begins from. Its log-probabilities of all pairs are computed
once, before the first step, and are kept in ``output_dir/reference.npz``; with LoRA that is the
model without its adapters, whose first product is zero. A resumed run reads them.

Left out on purpose: pairs that share a row, and a reference other than the first weights.

Legend: P pairs of a micro-batch, G segments of a pair (2, or 3 for KTO), T tokens, S of a row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from moetrain.config import Config, ConfigError
from moetrain.config.files import write_atomically
from moetrain.data.loader import Batch
from moetrain.data.packing import IGNORE_INDEX, Row
from moetrain.models.transformer import Transformer
from moetrain.train.callbacks import Callback, RunView
from moetrain.train.objectives import Outputs, Term

_KEYS = ("prompt", "chosen", "rejected")
_AGAIN = "give what the run began with, or set never to begin again"


class Scores(NamedTuple):
    """Log-probabilities of answers, in nats, and what they are compared with; all [P]."""

    chosen: torch.Tensor
    """Of the policy minus those of the reference, summed over the answer's tokens."""
    rejected: torch.Tensor
    num_chosen: torch.Tensor
    """Tokens of the answer."""
    num_rejected: torch.Tensor
    kl: torch.Tensor
    """0-d, at least 0: the divergence from the reference (KTO), without gradient."""


def _dpo(scores: Scores, beta: float) -> torch.Tensor:
    return -F.logsigmoid(beta * (scores.chosen - scores.rejected))


def _ipo(scores: Scores, beta: float) -> torch.Tensor:
    # A mean over tokens, as its authors compute it, so that long answers do not count for more.
    chosen, rejected = scores.chosen / scores.num_chosen, scores.rejected / scores.num_rejected
    return (chosen - rejected - 1 / (2 * beta)).square()


def _kto(scores: Scores, beta: float) -> torch.Tensor:
    liked = 1 - torch.sigmoid(beta * (scores.chosen - scores.kl))
    return (liked + 1 - torch.sigmoid(beta * (scores.kl - scores.rejected))) / 2


LOSSES: dict[str, Callable[[Scores, float], torch.Tensor]] = {
    "dpo": _dpo,  # arXiv 2305.18290
    "ipo": _ipo,  # arXiv 2310.12036
    "kto": _kto,  # arXiv 2402.01306, for as many liked as disliked answers
}
"""Each pair's loss [P] of its scores and ``beta``."""


@dataclass(frozen=True)
class Preference:
    """The mean loss of the pairs; their margins (rewards' difference) and accuracy are logged."""

    kind: str = "dpo"
    """A key of :data:`LOSSES`."""
    beta: float = 0.1
    """How much a reward, ``beta`` times the log-ratio of policy and reference, weighs."""
    balances: bool = False

    def sizes(self, batches: Sequence[Batch]) -> dict[str, int]:
        return {"pairs": sum(int((b.targets_BS >= 0).any(1).sum()) for b in batches)}

    def terms(
        self, model: Transformer, outputs: Outputs, batch: Batch, sizes: Mapping[str, torch.Tensor]
    ) -> dict[str, Term]:
        hidden_TD, targets_T = outputs.hidden_BSD.flatten(0, 1), batch.targets_BS.flatten()
        loss_T = model.vocabulary.token_losses(hidden_TD, model.head_weight, targets_T).loss_T
        assert batch.reference_BS is not None  # Pairs has it
        scores = self._scores(-loss_T - batch.reference_BS.flatten(), batch)
        is_pair_P = (batch.targets_BS >= 0).any(1)  # others fill up a batch of an evaluation
        margin_P = self.beta * (scores.chosen - scores.rejected).detach()
        found = {
            "preference": LOSSES[self.kind](scores, self.beta),
            "margin": margin_P,
            "accuracy": (margin_P > 0).float(),
        }
        share = outputs.share / sizes["pairs"]
        sums = {name: torch.where(is_pair_P, x, 0.0).sum() * share for name, x in found.items()}
        return {name: Term(x, float(name == "preference")) for name, x in sums.items()}

    def _scores(self, ratio_T: torch.Tensor, batch: Batch) -> Scores:
        """Sum log-ratios over the answers of each pair."""
        pairs, segments = len(batch.targets_BS), len(batch.cu_seqlens) - 1
        index_T = torch.arange(len(ratio_T), device=ratio_T.device)
        segment_T = torch.bucketize(index_T, batch.cu_seqlens[1:], right=True)
        learned_T = (batch.targets_BS.flatten() >= 0).float()
        both_T2 = torch.stack([ratio_T * learned_T, learned_T], 1)
        sums_P2 = both_T2.new_zeros(segments, 2).index_add(0, segment_T, both_T2)
        sums_PG2 = sums_P2.view(pairs, segments // pairs, 2)
        (chosen, rejected), numbers = sums_PG2[:, :2, 0].unbind(1), sums_PG2[:, :, 1]
        kl = chosen.new_zeros(())
        if self.kind == "kto":
            is_some = numbers[:, 2] > 0
            kl = sums_PG2[:, 2, 0].detach().sum() / is_some.sum().clamp(min=1)
        counted = numbers.clamp(min=1)
        return Scores(chosen, rejected, counted[:, 0], counted[:, 1], kl.clamp(min=0))


class Pairs(Callback):
    """Rows of pairs, with the reference's log-probabilities, which it computes as a callback.

    A pair is a mapping with ``prompt``, ``chosen`` and ``rejected``, lists of token ids.
    """

    def __init__(self, pairs: Sequence[Mapping[str, Any]], seq_len: int, kind: str = "dpo") -> None:
        """Take the pairs.

        Raises:
            ConfigError: an answer has no token, or a pair has no room in ``seq_len`` tokens.
        """
        self._pairs, self._seq_len, self._is_kto = pairs, seq_len, kind == "kto"
        content = json.dumps([[list(map(int, p[k])) for k in _KEYS] for p in pairs])
        digest = hashlib.sha256(content.encode()).hexdigest()
        self.identity: list[Any] = ["pairs", kind, seq_len, digest]
        self.reference_PS = np.zeros((len(pairs), seq_len), np.float32)
        for index in range(len(pairs)):
            self.row(index)

    def __len__(self) -> int:
        return len(self._pairs)

    def row(self, index: int) -> Row:
        pair = self._pairs[index]
        answers = [pair["chosen"], pair["rejected"]]
        if self._is_kto:
            answers.append(self._pairs[(index + 1) % len(self._pairs)]["chosen"])
        prompt, size = list(pair["prompt"]), self._seq_len
        segments = [[*prompt, *answer] for answer in answers]
        if not prompt or not all(map(len, answers)):
            problem = "has no prompt or an answer without a token; leave it out"
            raise ConfigError("data", f"pair {index} {problem}")
        if (needed := sum(map(len, segments))) > size:
            problem = f"{size} is less than the {needed} tokens of pair {index}, all answers"
            raise ConfigError("data.seq_len", f"{problem} together; raise it, or cut the pair")
        lengths = np.array([len(segment) for segment in segments])
        tokens_S, targets_S = np.zeros(size, np.int64), np.full(size, IGNORE_INDEX)
        positions_S, at = np.zeros(size, np.int64), 0
        for segment in segments:
            end, first = at + len(segment), at + len(prompt)
            tokens_S[at:end] = segment
            targets_S[first - 1 : end - 1] = tokens_S[first:end]
            positions_S[at:] = np.arange(size - at)
            at = end
        lengths[-1] += size - at
        is_pad_S = np.arange(size) >= at
        return Row(tokens_S, targets_S, positions_S, lengths, is_pad_S, self.reference_PS[index])

    def on_start(self, run: RunView) -> None:
        """Compute the reference's log-probabilities, or read them if the run was resumed.

        Raises:
            ConfigError: a resumed run's folder does not have them.
        """
        file = run.folder / "reference.npz"
        if run.step == 0:
            self.reference_PS[:] = self._computed(run)
            if run.world.is_main:
                buffer = BytesIO()
                np.savez(buffer, reference=self.reference_PS, identity=json.dumps(self.identity))
                write_atomically(file, lambda new: new.write_bytes(buffer.getvalue()))
            return
        try:
            with np.load(file) as kept:
                is_same = json.loads(str(kept["identity"])) == self.identity
                self.reference_PS[:] = kept["reference"] if is_same else np.nan
        except OSError as error:
            raise ConfigError("checkpoint.resume", f"{file}: {error.strerror}; {_AGAIN}") from None
        if not is_same:
            raise ConfigError("checkpoint.resume", f"{file} is of other pairs; {_AGAIN}")

    @torch.no_grad()
    def _computed(self, run: RunView) -> np.ndarray:
        """Return the log-probabilities of all targets by the weights as they are [pairs, S].

        Every rank computes all of them. Waits for the device.
        """
        engine, size = run.engine, run.config.train.micro_batch_size
        rows = [self.row(index) for index in range(len(self))]
        rows += [rows[-1]] * (-len(rows) % (size * engine.batch_multiple))
        batches = [Batch.of(rows[i : i + size]) for i in range(0, len(rows), size)]

        def finish(hidden_BSD: torch.Tensor, _: Any, batch: Batch) -> torch.Tensor:
            model, targets_T = engine.model, batch.targets_BS.flatten()
            hidden_TD = hidden_BSD.flatten(0, 1)
            found = model.vocabulary.token_losses(hidden_TD, model.head_weight, targets_T)
            return -found.loss_T.view(batch.targets_BS.shape).float()

        with engine.work(), engine.exact_sizes():
            shapes = [(size, self._seq_len)] * len(batches)
            found = engine.collect(batches, finish, shapes)
        return torch.cat(found)[: len(self)].cpu().numpy()


def preferences(
    config: Config, pairs: Sequence[Mapping[str, Any]], kind: str = "dpo", beta: float = 0.1
) -> dict[str, Any]:
    """Return the arguments of a trainer that learns from ``pairs`` (:class:`Pairs`).

    Raises:
        ConfigError: a pair is wrong, or ``kind`` is none of :data:`LOSSES`.
    """
    if kind not in LOSSES:
        raise ConfigError("kind", f"{kind!r} is none of {', '.join(LOSSES)}")
    rows = Pairs(pairs, config.data.seq_len, kind)
    return {"data": rows, "objective": Preference(kind, beta), "callbacks": [rows]}
