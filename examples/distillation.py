"""Learning from a teacher's predictions: an example of an objective that reads fields of the rows.

    from distillation import Distillation

    Trainer(config, data=rows, objective=Distillation(label_weight=0.1)).fit()

Left out on purpose: computing the predictions. Inference servers do that.

Legend: B rows, S tokens of a row, T = B * S, D model width, K candidates of the teacher.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moetrain.config import ConfigError
from moetrain.models.transformer import Transformer
from moetrain.train.objectives import CrossEntropy, Outputs, Sizes, Term, token_losses


@dataclass(frozen=True)
class Distillation:
    """The mean divergence KL(teacher || model) over a teacher's likeliest tokens, in nats a token.

    Rows have the fields ``teacher_ids`` and ``teacher_logprobs``: K candidates for each token. The
    teacher's probabilities are normalised over these candidates (arXiv 1503.02531).
    """

    label_weight: float = 0.0
    """Weight of the cross-entropy of the targets, beside the divergence."""
    balances: bool = False

    def sizes(self, batches: Sequence[Any]) -> dict[str, int]:
        if missing := {"teacher_ids", "teacher_logprobs"} - {*batches[0].extra}:
            problem = f"rows have no field {min(missing)!r}, which distillation learns from"
            raise ConfigError("data", f"{problem}; give it")
        return CrossEntropy().sizes(batches)

    def terms(
        self, model: Transformer, outputs: Outputs, batch: Any, sizes: Sizes
    ) -> dict[str, Term]:
        ids_TK = batch.extra["teacher_ids"].flatten(0, 1)
        p_BSK = batch.extra["teacher_logprobs"].softmax(2)
        p_TK = torch.where(batch.targets_BS[..., None] >= 0, p_BSK, 0).flatten(0, 1)
        hidden_TD = outputs.hidden_BSD.flatten(0, 1)
        logits_TK = model.vocabulary.logits_of(hidden_TD, model.head_weight, ids_TK)
        losses = token_losses(model, outputs.hidden_BSD, batch)
        surprise_TK = losses.lse_T[:, None] - logits_TK
        divergence = (p_TK * surprise_TK - torch.special.entr(p_TK)).sum()
        share = outputs.share / sizes["targets"]
        cross_entropy = Term(losses.loss_T.sum() * share, self.label_weight)
        return {"distillation": Term(divergence * share), "cross_entropy": cross_entropy}
