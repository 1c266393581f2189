"""Preferences: trl's formulas, the reference, and a toy whose margin grows."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from distributed import spawn

from moetrain.config import Config, ConfigError
from moetrain.train.metrics import read_metrics
from moetrain.train.preferences import LOSSES, Pairs, Scores, preferences
from moetrain.train.trainer import Trainer

KINDS = list(LOSSES)
PAIRS = [
    {"prompt": [n, n + 1, n + 2], "chosen": [7] * (1 + n % 3), "rejected": [9] * (1 + n % 4)}
    for n in range(20, 33)
]


def formula(kind, logps, references, numbers, kl, beta):
    """trl's: DPOTrainer with loss_type sigmoid and ipo, KTOTrainer with loss_type kto."""
    chosen, rejected = (p - r for p, r in zip(logps, references, strict=True))
    if kind == "dpo":
        return -F.logsigmoid(beta * (chosen - rejected)).mean()
    if kind == "ipo":
        apart = chosen / numbers[0] - rejected / numbers[1]
        return ((apart - 1 / (2 * beta)) ** 2).mean()
    losses = [1 - F.sigmoid(beta * (chosen - kl)), 1 - F.sigmoid(beta * (kl - rejected))]
    return torch.cat(losses).mean()


@pytest.fixture
def own_words(tiny_words):
    left_out = ("data.source", "data.path", "data.eval_fraction")
    words = [w for w in tiny_words if not w.startswith(left_out)]
    return words


def config_of(words, *more):
    return Config.load(None, [*words, *more], environ={})


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_is_trls_with_its_gradient(kind):
    torch.manual_seed(0)
    logps, references = -5 * torch.rand(2, 7).double(), -5 * torch.rand(2, 7).double()
    numbers, kl = torch.randint(1, 9, (2, 7)), torch.tensor(0.3).double()
    mine, theirs = (logps.clone().requires_grad_() for _ in range(2))
    scores = Scores(*(mine - references), *numbers, kl)
    LOSSES[kind](scores, 0.3).mean().backward()
    loss = formula(kind, theirs, references, numbers, kl, 0.3)
    loss.backward()
    assert LOSSES[kind](scores, 0.3).mean().item() == pytest.approx(loss.item(), abs=1e-9)
    torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_trls_loss_of_whole_sequences(kind, own_words):
    """Pairs that go through the model one answer at a time, without packing or caches."""
    config = config_of(own_words, "moe.aux_loss_coef=0")
    given = preferences(config, PAIRS[:4], kind, beta=0.5)
    trainer, rows = Trainer(config, **given), given["data"]
    rows.on_start(trainer)
    noise = np.random.default_rng(1).normal(size=rows.reference_PS.shape)
    with torch.no_grad():  # another policy than its reference
        for parameter in trainer.model.parameters():
            parameter.mul_(1.5)
    rows.reference_PS += noise.astype(np.float32)
    trainer.loader.global_batch_size = trainer.loader.micro_batch_size = 4
    (batch,) = trainer.loader.next_step()
    totals = trainer.engine.forward([batch], given["objective"])
    logps, references, kls = [[], []], [[], []], []
    with trainer.engine.work(), torch.no_grad():
        for i in range(4):
            pair, row = PAIRS[i], rows.row(i)
            answers = [pair["chosen"], pair["rejected"], PAIRS[(i + 1) % 4]["chosen"]]
            at = 0
            for side, answer in enumerate(answers[: 3 if kind == "kto" else 2]):
                ids = torch.tensor([[*pair["prompt"], *answer]])
                logits = trainer.model(ids)[0, :-1].double().log_softmax(-1)
                logp = logits.gather(1, ids[0, 1:, None])[len(pair["prompt"]) - 1 :].sum()
                first = at + len(pair["prompt"]) - 1
                reference = float(row.reference_S[first : first + len(answer)].sum())
                at += ids.shape[1]
                if side < 2:
                    logps[side].append(logp)
                    references[side].append(torch.tensor(reference).double())
                else:
                    kls.append(logp - reference)
    stacked = (torch.stack([torch.stack(side) for side in x]) for x in (logps, references))
    numbers = [torch.tensor([len(p[k]) for p in PAIRS[:4]]) for k in ("chosen", "rejected")]
    kl = torch.stack(kls).mean().clamp(min=0) if kls else None
    expected = formula(kind, *stacked, numbers, kl, 0.5)
    assert totals.terms["preference"].item() == pytest.approx(expected.item(), abs=1e-5)


def trained(words, kind):
    config = Config.load(None, words, environ={})
    result = Trainer(config, **preferences(config, PAIRS, kind)).fit()
    return [r for r in read_metrics(result.folder / "metrics.jsonl") if "loss" in r]


@pytest.mark.parametrize("kind", KINDS)
def test_a_margin_grows(kind, own_words):
    rows = trained([*own_words, "train.steps=12", "optim.lr=2e-2"], kind)
    first = {"dpo": math.log(2), "ipo": 25.0, "kto": 0.5}[kind]
    assert rows[0]["loss"] == pytest.approx(first, rel=1e-4)  # the policy is the reference
    assert rows[0]["margin"] == pytest.approx(0, abs=1e-5)
    assert rows[-1]["margin"] > 0.1
    assert rows[-1]["accuracy"] == 1
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_two_ranks_learn_the_same(own_words, tmp_path):
    words = [*own_words, "train.steps=6", "optim.lr=2e-2"]
    alone = trained([*words, f"output_dir={tmp_path / 'alone'}"], "dpo")
    for rows in spawn(2, trained, [*words, "parallel.dp_shard=2"], "dpo"):
        for mine, expected in zip(rows, alone, strict=True):
            assert mine["margin"] == pytest.approx(expected["margin"], rel=1e-3, abs=1e-4)
    assert alone[-1]["margin"] > alone[1]["margin"]


def test_a_resumed_run_has_the_reference_it_began_with(own_words):
    words = [*own_words, "optim.lr=2e-2", "train.steps=4"]
    trained(words, "dpo")
    config = config_of([*words, "train.steps=6"])
    given = preferences(config, PAIRS)
    rows = read_metrics(Trainer(config, **given).fit().folder / "metrics.jsonl")
    assert [row["step"] for row in rows if row["margin"] > 0.01][-2:] == [5, 6]
    config = config_of([*words, "train.steps=8"])
    trainer = Trainer(config, **preferences(config, PAIRS[1:]))
    with pytest.raises(ConfigError, match="is of other pairs; give what the run began with"):
        trainer.fit()


def test_a_pair_without_room_or_an_answer_is_named():
    with pytest.raises(
        ConfigError, match=r"data\.seq_len: 8 is less than the \d+ tokens of pair 0"
    ):
        Pairs(PAIRS, 8)
    with pytest.raises(ConfigError, match="pair 0 has no prompt or an answer without a token"):
        Pairs([{"prompt": [1], "chosen": [], "rejected": [2]}], 8)
