"""Learn from pairs of answers, given as token ids, by DPO, IPO or KTO.

Trainer(config, **preferences(config, pairs, "dpo", beta=0.1)).fit()
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moetrain.config import Config, ConfigError
from moetrain.data.cache import TokenCache
from moetrain.data.packing import PairDataset
from moetrain.kernels.loss.preference import LOSSES
from moetrain.train.preferences import Preference


def preferences(
    config: Config, pairs: Sequence[Mapping[str, Any]], kind: str = "dpo", beta: float = 0.1
) -> dict[str, Any]:
    """Return the arguments of a trainer that learns from ``pairs``.

    ``pairs``: mappings with ``prompt``, ``chosen`` and ``rejected``, lists of token ids.

    Raises ConfigError: an answer has no token, a pair has no room in ``data.seq_len`` tokens, or
    ``kind`` is none of :data:`LOSSES`.
    """
    if kind not in LOSSES:
        raise ConfigError("kind", f"{kind!r} is none of {', '.join(LOSSES)}")
    texts: list[list[int]] = []
    masks: list[list[int]] = []
    for index, pair in enumerate(pairs):
        prompt, *answers = (list(map(int, pair[key])) for key in ("prompt", "chosen", "rejected"))
        if not prompt or not all(answers):
            problem = "has no prompt or an answer without a token; leave it out"
            raise ConfigError("data", f"pair {index} {problem}")
        texts += [prompt + answer for answer in answers]
        masks += [[1] * len(prompt) + [0] * len(answer) for answer in answers]
    tokens, masked = (np.array([x for text in y for x in text]) for y in (texts, masks))
    documents = np.cumsum([0, *map(len, texts)])
    targets = np.array([mask.count(0) for mask in masks])
    content = hashlib.sha256(json.dumps([texts, masks]).encode()).hexdigest()
    cache, size = TokenCache(tokens, documents, targets, masked, content), config.data.seq_len
    rows = PairDataset(cache, size, kind == "kto")
    if len(rows) < len(pairs):
        index = int(np.argmax(rows.needed_P > size))
        problem = f"{size} is less than the {rows.needed_P[index]} tokens of pair {index}, all"
        raise ConfigError("data.seq_len", f"{problem} answers together; raise it, or cut the pair")
    return {"data": rows, "objective": Preference(kind, beta)}
