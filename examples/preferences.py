"""Learn from pairs of answers, or with KTO from single answers, given as token ids.

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
from moetrain.losses.preference import KINDS
from moetrain.train.preferences import Preference


def preferences(
    config: Config,
    pairs: Sequence[Mapping[str, Any]],
    kind: str = "dpo",
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    simpo_gamma: float = 0.5,
) -> dict[str, Any]:
    """Return the arguments of a trainer that learns from ``pairs``.

    ``pairs``: mappings with ``prompt``, ``chosen`` and ``rejected``, lists of token ids; for kto
    also with ``prompt``, ``completion`` and ``label``, which is true or false.

    Raises ConfigError: an answer has no token, a pair has no room in ``data.seq_len`` tokens, or
    ``kind`` is none of :data:`KINDS`.
    """
    if kind not in KINDS:
        raise ConfigError("kind", f"{kind!r} is none of {', '.join(KINDS)}")
    texts: list[list[int]] = []
    masks: list[list[int]] = []
    labels: list[int] = []
    for index, pair in enumerate(pairs):
        is_single = kind == "kto" and "completion" in pair
        keys = ("completion",) if is_single else ("chosen", "rejected")
        prompt, *answers = (list(map(int, pair[key])) for key in ("prompt", *keys))
        if not prompt or not all(answers):
            problem = "has no prompt or an answer without a token; leave it out"
            raise ConfigError("data", f"pair {index} {problem}")
        texts += [prompt + answer for answer in answers]
        masks += [[1] * len(prompt) + [0] * len(answer) for answer in answers]
        labels += [int(pair["label"])] if is_single else [-1, -1]
    tokens, masked = (np.array([x for text in y for x in text]) for y in (texts, masks))
    documents = np.cumsum([0, *map(len, texts)])
    targets = np.array([mask.count(0) for mask in masks])
    content = hashlib.sha256(json.dumps([texts, masks, labels]).encode()).hexdigest()
    cache = TokenCache(tokens, documents, targets, masked, content, np.array(labels))
    size = config.data.seq_len
    rows = PairDataset(cache, size, for_kto=kind == "kto")
    if len(rows) < len(pairs):
        index = int(np.argmax(rows.needed_P > size))
        problem = f"{size} is less than the {rows.needed_P[index]} tokens of pair {index}, all"
        raise ConfigError("data.seq_len", f"{problem} answers together; raise it, or cut the pair")
    objective = Preference(
        kind,
        beta,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
        simpo_gamma=simpo_gamma,
    )
    return {"data": rows, "objective": objective}
