"""Objectives beside the cross-entropy: classification, distillation, rows with further fields."""

import json
from itertools import chain, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from classification import Classification
from distillation import Distillation

from moetrain.config import Config, ConfigError
from moetrain.data.packing import IGNORE_INDEX, Row
from moetrain.models.families import PRESETS
from moetrain.models.transformer import Transformer
from moetrain.train.loop import Trainer
from moetrain.train.metrics import read_metrics
from moetrain.train.objectives import CrossEntropy, Outputs, Term, token_losses
from tests.lib.distributed import spawn
from tests.lib.preference_rows import whole

SIZE, K, CLASSES = 32, 5, (ord("y"), ord("n"), ord("?"))


def config_of(words, *more):
    words = [w for w in words if not w.startswith(("data.source", "data.path", "data.eval_frac"))]
    return Config.load(None, [*words, *more], environ={})


def teacher(rng, length, k=K):
    """Return a teacher's candidates for each token, with log-probabilities that lack some mass."""
    ids = np.stack([rng.permutation(256)[:k] for _ in range(length)])
    logprobs = np.log(rng.dirichlet(np.ones(k), length) * 0.9)
    return {"teacher_ids": ids, "teacher_logprobs": logprobs}


def distilled(number, seed=0):
    """Return rows of several lengths, in which some tokens are not learned."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(number):
        ids = rng.integers(0, 256, SIZE - i % 7)
        labels = np.where(rng.random(len(ids)) < 0.3, IGNORE_INDEX, ids)
        rows.append({"input_ids": ids, "labels": labels, **teacher(rng, len(ids))})
    return rows


def labelled(number):
    """Return rows that end with a class, the only learned token."""
    rng, rows = np.random.default_rng(1), []
    for i in range(number):
        ids = [*rng.integers(0, 256, 3 + i % 11).tolist(), CLASSES[i % 3]]
        rows.append({"input_ids": ids, "labels": [IGNORE_INDEX] * (len(ids) - 1) + ids[-1:]})
    return rows


class PackedTeacher:
    """Rows of three documents each."""

    identity = ("packed",)

    def __len__(self):
        return 4

    def row(self, index):
        rng = np.random.default_rng(index)
        lengths, tokens_S = np.array([7, 20, 5]), rng.integers(0, 256, SIZE)
        targets_S = np.append(tokens_S[1:], IGNORE_INDEX)
        targets_S[np.cumsum(lengths) - 1] = IGNORE_INDEX
        positions_S = np.concatenate([np.arange(n) for n in lengths])
        fields = teacher(rng, SIZE)
        fields["teacher_logprobs"] = fields["teacher_logprobs"].astype(np.float32)
        # The teacher gives no probability.
        fields["teacher_logprobs"][np.cumsum(lengths) - 1] = -np.inf
        return Row(tokens_S, targets_S, positions_S, lengths, None, fields)


def by_document(model, batch):
    """Return logits of a plain model that sees one document at a time."""
    tokens_T, ends = batch.tokens_BS.flatten(), batch.cu_seqlens.tolist()
    return torch.cat([model(tokens_T[None, a:b])[0] for a, b in pairwise(ends)])


def classified(logits_TV, batch):
    """Compute the loss and the accuracy label by label."""
    losses, right = [], []
    for logits_V, target in zip(logits_TV, batch.targets_BS.flatten().tolist(), strict=True):
        if target in CLASSES:
            chosen_K = logits_V[list(CLASSES)]
            losses.append(-chosen_K.log_softmax(0)[CLASSES.index(target)])
            right.append(float(chosen_K.argmax() == CLASSES.index(target)))
    assert len(set(right)) == 2  # otherwise the accuracy proves nothing
    return {"classification": torch.stack(losses).mean(), "accuracy": torch.tensor(right).mean()}


def divergence(logits_TV, batch):
    """Compute KL(teacher || model) position by position, with normalised teacher probabilities."""
    targets_T = batch.targets_BS.flatten()
    ids_TK = batch.extra["teacher_ids"].flatten(0, 1)
    logprobs_TK = batch.extra["teacher_logprobs"].flatten(0, 1)
    losses = []
    for t in (targets_T >= 0).nonzero()[:, 0].tolist():
        p_V = torch.zeros(logits_TV.shape[1])
        p_V[ids_TK[t]] = logprobs_TK[t].exp() / logprobs_TK[t].exp().sum()
        losses.append(F.kl_div(logits_TV[t].log_softmax(0), p_V, reduction="sum"))
    cross_entropy = F.cross_entropy(logits_TV, targets_T)
    return {"distillation": torch.stack(losses).mean(), "cross_entropy": cross_entropy}


@pytest.fixture
def packed_labels(tmp_path):
    """Write a file of texts with classes, several of which share a row."""
    rng, file = np.random.default_rng(2), tmp_path / "labels.jsonl"
    texts = ["".join(map(chr, rng.integers(97, 123, 3 + i % 5))) for i in range(40)]
    records = [{"prompt": x, "completion": "yn?"[i % 3]} for i, x in enumerate(texts)]
    file.write_text("\n".join(map(json.dumps, records)))
    return [f"data.path={file}", "data.eval_fraction=0.1"]


@pytest.mark.parametrize("kind", ["classes", "packed classes", "teacher", "packed teacher"])
def test_loss_and_every_gradient_are_the_formulas(kind, tiny_words, packed_labels):
    """One process has two micro-batches; the reference is a plain copy of the model."""
    is_file = kind == "packed classes"
    words = ["moe.aux_loss_coef=0", "optim.max_grad_norm=1e9", *packed_labels * is_file]
    given = {"classes": labelled(8), "teacher": distilled(8), "packed teacher": PackedTeacher()}
    if kind.endswith("classes"):
        objective, formula, weights = Classification(CLASSES), classified, [1.0, 0.0]
    else:
        objective, formula, weights = Distillation(0.3), divergence, [1.0, 0.3]
    trainer = Trainer(config_of(tiny_words, *words), data=given.get(kind), objective=objective)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.5)
    engine, copy = trainer.engine, whole(trainer.engine)
    batches = trainer.loader.next_step()
    assert len(batches) == 2
    found = engine.forward_backward(batches, objective).terms
    engine.fsdp.gradient_norm()  # it waits for them
    logits_TV = torch.cat([by_document(copy, batch) for batch in batches])
    fields = {name: torch.cat([b.extra[name] for b in batches]) for name in batches[0].extra}
    targets_BS = torch.cat([batch.targets_BS for batch in batches])
    expected = formula(logits_TV, batches[0]._replace(targets_BS=targets_BS, extra=fields))
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].item() == pytest.approx(float(value.detach()), abs=1e-6), name
    sum(w * x for w, x in zip(weights, expected.values(), strict=True) if w).backward()
    members = engine.fsdp.members
    for name, parameter in copy.named_parameters():
        mine = members[name].layout.whole(members[name].local.grad)
        assert (mine - parameter.grad).abs().max() <= 1e-6, name


@pytest.mark.parametrize("kind", ["classes", "teacher"])
@torch.no_grad()
def test_four_ranks_that_have_all_tokens_add_up_to_the_formula(kind):
    model = Transformer(PRESETS["debug"])
    model.init_weights(std=0.3, seed=0)
    rng = np.random.default_rng(3)
    hidden_BSD = torch.randn(2, SIZE, model.arch.hidden_size, generator=torch.manual_seed(0))
    targets_S = torch.tensor([*CLASSES, 5] * (SIZE // 4))
    fields = teacher(rng, 2 * SIZE)
    fields["teacher_logprobs"] = fields["teacher_logprobs"].astype(np.float32)
    extra = {name: torch.tensor(x).view(2, SIZE, K) for name, x in fields.items()}
    batch = SimpleNamespace(targets_BS=torch.stack((targets_S, targets_S.flip(0))), extra=extra)
    if kind == "classes":
        objective, formula = Classification(CLASSES), classified
    else:
        objective, formula = Distillation(0.3), divergence
    sizes = {name: torch.tensor(n) for name, n in objective.sizes([batch]).items()}
    terms = objective.terms(model, Outputs(hidden_BSD, None, None, share=1 / 4), batch, sizes)
    expected = formula((hidden_BSD @ model.head_weight.T).flatten(0, 1), batch)
    assert terms.keys() == expected.keys()
    for name, term in terms.items():
        assert 4 * term.value.item() == pytest.approx(float(expected[name]), rel=1e-5), name


def trained(words):
    """Return the logged rows of both objectives, with the routers' losses of the settings."""
    found = []
    given = (labelled(12), Classification(CLASSES)), (distilled(12), Distillation(0.5))
    for data, objective in given:
        config = config_of(words, "train.eval_interval=3", "train.steps=3", "optim.lr=1e-2")
        config = config.filled({"output_dir": f"{config.output_dir}-{len(found)}"}, "test")
        result = Trainer(config, data=data, eval_data=data[:5], objective=objective).fit()
        names = ("loss", "accuracy", "cross_entropy", "grad_norm")
        names += tuple(f"eval_{name}" for name in names)
        rows = read_metrics(result.folder / "metrics.jsonl")
        found.append([{k: row[k] for k in names if k in row} for row in rows])
    return found


def trained_on_meshes(words):
    meshes = ("parallel.dp_shard=2", "parallel.tp=2", "parallel.pp=2")
    return [trained([*words, mesh, f"output_dir=MESH-{mesh}"]) for mesh in meshes]


@pytest.mark.tier("wide")
def test_two_ranks_learn_what_one_does(tiny_words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*tiny_words, "model.num_kv_heads=2", "moe.aux_loss_scope=global_batch"]
    alone = trained(words)
    for rows, name in zip(alone, ("eval_accuracy", "eval_cross_entropy"), strict=True):
        assert rows[-1]["eval_loss"] < rows[0]["eval_loss"]
        assert name in rows[-1]
    (found, *_) = spawn(2, trained_on_meshes, words, timeout=120)
    for on_mesh in found:
        for mine, expected in zip(chain(*on_mesh), chain(*alone), strict=True):
            assert mine == pytest.approx(expected, rel=1e-5, abs=1e-5)


# ---- rows with further fields ------------------------------------------------------------------


class Weighted(CrossEntropy):
    """The cross-entropy with a weight for each token."""

    def terms(self, model, outputs, batch, sizes):
        loss_T = token_losses(model, outputs.hidden_BSD, batch).loss_T
        total = (loss_T * batch.extra["weight"].flatten()).sum() * outputs.share
        return {"weighted": Term(total / sizes["targets"])}


def test_an_objective_reads_a_field_where_its_token_is_predicted(tiny_words):
    ids = [5, 6, 7, 8]
    row = {"input_ids": ids, "weight": [9.0, 1.0, 0.5, 2.0], "text": "abc", "index": 3}
    trainer = Trainer(config_of(tiny_words), data=[row], objective=Weighted())
    (batch, *_) = trainer.loader.next_step()
    assert set(batch.extra) == {"weight"}
    assert batch.extra["weight"][0, :4].tolist() == [1.0, 0.5, 2.0, 0.0]
    with torch.no_grad():
        logits_SV = whole(trainer.engine)(torch.tensor([ids]))[0, :-1]
    losses = F.cross_entropy(logits_SV, torch.tensor(ids[1:]), reduction="none")
    expected = float((losses * torch.tensor([1.0, 0.5, 2.0])).mean())
    assert trainer.train_step().loss.item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"weight": [1.0, 2.0]}, r"row \d, field 'weight' has 2 entries for 3 tokens; give one"),
        ({"weight": [[1], [2, 3], []]}, r"row \d, field 'weight': .*inhomogeneous.*; give as many"),
        ({"teacher_ids": [[1], [2], [999_999]]}, r"row \d has token 999999; the model's are 0 to"),
        ({"weight": [[1.0]] * 3}, r"a row has fields of shapes .*, and another of .*; give all"),
        ({}, r"rows have no field 'teacher_ids', which distillation learns from; give it"),
    ],
)
def test_a_field_that_is_none_is_named(field, says, tiny_words):
    row = {"input_ids": [1, 2, 3], "weight": [1.0] * 3, **field}
    other = {"input_ids": [1, 2, 3], "weight": [1.0] * 3}
    rows = [row, other] * 2 if field else [other]
    config = config_of(tiny_words, "train.micro_batch_size=4")
    with pytest.raises(ConfigError, match=says):
        Trainer(config, data=rows, objective=Distillation()).fit()
