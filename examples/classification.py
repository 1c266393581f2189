"""Classification by the language model's own head: an example of a custom objective.

    from classification import Classification

    Trainer(config, data=rows, objective=Classification([token_of_yes, token_of_no])).fit()

A trainer takes any object with ``balances`` and these two methods (docs/library.md). Left out on
purpose: a separate head, because the model could then be neither exported nor served.

Legend: B rows, S tokens of a row, T = B * S, D model width, K classes.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from moetrain.models.transformer import Transformer
from moetrain.train.objectives import MicroBatch, Outputs, Sizes, Term


class Classification:
    """The mean cross-entropy of class labels, and the accuracy.

    A class is a token of the vocabulary, and a label is a target that is one of these tokens. So
    the vocabulary's head is the classifier's head: there are no new weights, and it is exported as
    usual.
    """

    balances = False

    def __init__(self, classes: Sequence[int]) -> None:
        """Distinguish ``classes``, each given by its token."""
        self._classes_K = self._there_K = torch.tensor(classes)

    def sizes(self, batches: Sequence[MicroBatch]) -> dict[str, int]:
        return {
            "labels": sum(int(torch.isin(b.targets_BS, self._classes_K).sum()) for b in batches)
        }

    def terms(
        self, model: Transformer, outputs: Outputs, batch: MicroBatch, sizes: Sizes
    ) -> dict[str, Term]:
        hidden_TD, targets_T = outputs.hidden_BSD.flatten(0, 1), batch.targets_BS.flatten()
        self._there_K = self._there_K.to(targets_T.device)  # waits for the device once in a run
        logits_TK = model.vocabulary.logits_of(hidden_TD, model.head_weight, self._there_K)
        is_class_TK = targets_T[:, None] == self._there_K
        is_label_T, label_T = is_class_TK.any(1), is_class_TK.int().argmax(1)
        loss_T = F.cross_entropy(logits_TK, label_T, reduction="none")
        found = {"classification": loss_T, "accuracy": (logits_TK.argmax(1) == label_T).float()}
        share = outputs.share / sizes["labels"]
        sums = {name: torch.where(is_label_T, x, 0).sum() * share for name, x in found.items()}
        return {name: Term(x, float(name == "classification")) for name, x in sums.items()}
