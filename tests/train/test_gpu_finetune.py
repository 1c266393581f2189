"""GPU tests: fine-tuning's objectives and adapters, compiled, follow the references."""

import json

import pytest
import torch

from moetrain.config import Config
from moetrain.losses.preference import KINDS
from moetrain.train.loop import Trainer
from moetrain.train.metrics import read_metrics

PAIRS = [
    {"prompt": f"Say {n}:", "chosen": " yes" + "!" * (n % 3), "rejected": " no" * (1 + n % 2)}
    for n in range(32)
]
SINGLES = [
    {"prompt": f"Say {n}:", "completion": " no" if n % 4 else " yes", "label": n % 4 == 0}
    for n in range(32)
]
ADAPTERS = ["lora.rank=8", "moe.bias_update_rate=0"]
ATTENTION = [*ADAPTERS, "lora.targets=*.attn.*"]
CHANGES = {
    "all weights": [],
    "DoRA": [*ATTENTION, "lora.use_dora=yes"],
    "embedding and head": [*ATTENTION, "lora.modules_to_save=embed_tokens,lm_head"],
    "rows of tokens": [*ATTENTION, "lora.trainable_tokens=32,101,111"],
    "experts": [*ADAPTERS, "lora.targets=*.attn.*,*.moe.experts"],
}
"""Settings of what is trained. The ids of single bytes are rows of the debug embedding."""
OBJECTIVES = {
    "next_token": ["data.format=completion"],
    **{kind: [f"train.objective={kind}", "data.format=preference"] for kind in KINDS},
    "kto of singles": ["train.objective=kto", "train.undesirable_weight=0.5"],
    "reward": ["train.objective=reward", "data.format=preference"],
}
CASES = [("next_token", change) for change in CHANGES]
CASES += [(objective, "all weights") for objective in OBJECTIVES if objective != "next_token"]
CASES += [("dpo", "experts"), ("kto of singles", "DoRA"), ("reward", "experts")]


def words_of(objective, change, folder):
    """Return the settings of 12 steps, and their data."""
    rows = SINGLES if objective == "kto of singles" else PAIRS
    if objective == "next_token":
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["data.source=records", f"data.path={folder / 'rows.jsonl'}", "data.seq_len=64"]
    words += [f"data.cache_dir={folder / 'cache'}", "data.eval_fraction=0", "optim.lr=1e-3"]
    words += ["train.steps=12", "train.sample_tokens=0", "log.interval=1", "checkpoint.at_end=no"]
    words += [
        "train.global_batch_size=16",
        "train.micro_batch_size=8",
    ]
    return words + OBJECTIVES[objective] + CHANGES[change]


def settings_of(name, objective, change, folder):
    """Return a run's configuration: ``plain`` compiles nothing and has reference kernels."""
    words = [*words_of(objective, change, folder), "train.device=cuda"]
    words += [f"output_dir={folder / name}"]
    if name == "plain":
        words += ["compile.enabled=no", "kernels.backend=reference"]
        words += ["kernels.attention=flex"]
    else:
        words += ["compile.enabled=yes", "kernels.backend=triton"]
    return Config.load(None, words, environ={})


def curve(config):
    """Return the logged losses and gradient norms of a run."""
    trainer = Trainer(config)
    trainer.fit()
    rows = [row for row in read_metrics(trainer.reporter.log.path) if "loss" in row]
    return torch.tensor([[row["loss"], row["grad_norm"]] for row in rows]).T


@pytest.mark.gpu
@pytest.mark.parametrize(("objective", "change"), CASES, ids=[" of ".join(case) for case in CASES])
def test_compiled_training_follows_the_references(objective, change, tmp_path):
    """Twelve steps run in bf16 with compiled blocks and kernels, and with neither."""
    plain, fast = (
        curve(settings_of(name, objective, change, tmp_path)) for name in ("plain", "fast")
    )
    assert plain[0, -1] < 0.98 * plain[0, 0]
    assert (fast[0] - plain[0]).abs().max() < 0.02 * plain[0].max()
    assert (fast[1] - plain[1]).abs().median() < 0.05 * plain[1].median()
