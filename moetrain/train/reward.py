"""The objective of a reward model: a pair's chosen answer is to score higher than its rejected one.

The model's head has one row (:meth:`~moetrain.models.architecture.Architecture.scoring`). The
reward of a text is the product of that row with the hidden state of the text's last token, as in
transformers' ``*ForSequenceClassification``. The loss is that of TRL's RewardTrainer, with
``margin`` and ``center_rewards_coefficient``.

Left out on purpose: more than one row (rewards by aspect), and rewards of single steps.

Legend: P pairs, one in a row; N segments, two in a row; T tokens; D model width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moetrain.data.loader import Batch
from moetrain.losses.preference import reward_losses
from moetrain.models.transformer import Transformer
from moetrain.train.objectives import Outputs, Sizes, Term


@dataclass(frozen=True)
class Reward:
    """The mean loss of the pairs; margins and accuracy are logged.

    A pair's margin is the chosen answer's reward minus the rejected one's. Accuracy is the share of
    pairs with a positive margin. If ``centering`` is not 0, the mean square of the sum of both
    rewards, times ``centering``, is added to the loss.
    """

    centering: float = 0.0
    """Weight of ``centering`` in what is minimised (arXiv 2312.09244)."""
    balances = False
    needs_reference = False

    def sizes(self, batches: Sequence[Batch]) -> dict[str, int]:
        return {"rows": sum(int((b.targets_BS >= 0).any(1).sum()) for b in batches)}

    def terms(
        self, model: Transformer, outputs: Outputs, batch: Batch, sizes: Sizes
    ) -> dict[str, Term]:
        chosen_P, rejected_P = text_scores(model, outputs.hidden_BSD, batch).view(-1, 2).unbind(1)
        apart_P = (chosen_P - rejected_P).detach()
        margin = batch.extra["margin"][:, 0] if "margin" in batch.extra else 0.0
        found = {
            "reward": reward_losses(chosen_P, rejected_P, margin),
            "margin": apart_P,
            "accuracy": (apart_P > 0).float(),
        }
        weights = {"reward": 1.0}
        if self.centering:
            found["centering"] = (chosen_P + rejected_P).square()
            weights["centering"] = self.centering
        is_pair_P = (batch.targets_BS >= 0).any(1)  # other rows fill up an evaluation's batch
        share = outputs.share / sizes["rows"]
        sums = {name: torch.where(is_pair_P, x, 0.0).sum() * share for name, x in found.items()}
        return {name: Term(x, weights.get(name, 0.0)) for name, x in sums.items()}


def text_scores(model: Transformer, hidden_BSD: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return a reward model's score of each segment of ``batch``: [N], at least in fp32.

    ``hidden_BSD`` is as ``Transformer.backbone`` returns it. If several devices share the batch,
    all get the same result (:meth:`~moetrain.models.layers.Vocabulary.scores`).
    """
    places_N = last_places(
        batch.tokens_BS, batch.cu_seqlens, batch.is_pad_BS, model.arch.pad_token_id
    )
    hidden_TD = hidden_BSD.flatten(0, 1)
    return model.vocabulary.scores(hidden_TD, model.head_weight, places_N)[:, 0]


def last_places(
    tokens_BS: torch.Tensor,
    cu_seqlens: torch.Tensor,
    is_pad_BS: torch.Tensor | None,
    pad_token_id: int | None,
) -> torch.Tensor:
    """Return the position of each segment's last token that is no pad, among all B * S: int64 [N].

    As in transformers, a token of the text that has the id of PAD counts as a pad, and a segment of
    nothing but pads has its first position. With PAD 0, segments (5 6 0) (7 8) give 1 and 4.
    """
    tokens_T = tokens_BS.flatten()
    index_T = torch.arange(len(tokens_T), device=tokens_T.device)
    is_text_T = torch.ones_like(tokens_T, dtype=torch.bool)
    if is_pad_BS is not None:
        is_text_T &= ~is_pad_BS.flatten()
    if pad_token_id is not None:
        is_text_T &= tokens_T != pad_token_id
    segment_T = torch.bucketize(index_T, cu_seqlens[1:], right=True)
    starts_N = cu_seqlens[:-1].long()
    found_T = torch.where(is_text_T, index_T, 0)
    return starts_N.scatter_reduce(0, segment_T, found_T, "amax", include_self=True)
