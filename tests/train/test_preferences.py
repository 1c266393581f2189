"""Preferences: trl's formulas, the reference, and a toy task with a growing margin."""

import json
import math
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from preferences import preferences

from moetrain.config import Config, ConfigError
from moetrain.data.loader import Batch, eval_batches
from moetrain.losses.preference import (
    KINDS,
    LOSSES,
    WITHOUT_REFERENCE,
    Scores,
    Segments,
    kto_losses,
)
from moetrain.models.rules import ADAPTER
from moetrain.train.loop import Trainer
from moetrain.train.metrics import read_metrics
from moetrain.train.preferences import Preference, Reference
from tests.lib.distributed import spawn
from tests.lib.preference_rows import whole

NO_EVAL = ["data.eval_fraction=0", "train.eval_rows=256"]
PAIRS = [
    {"prompt": [n, n + 1, n + 2], "chosen": [7] * (1 + n % 3), "rejected": [9] * (1 + n % 4)}
    for n in range(20, 33)
]


WITH = {kind: float(kind not in WITHOUT_REFERENCE) for kind in KINDS}
"""1 for kinds that have a reference."""
SINGLES = [
    {"prompt": [n, n + 1], "completion": [7] * (1 + n % 3), "label": n % 4 == 0}
    for n in range(20, 33)
]
"""Single answers, a quarter of which are desirable."""


GAMMA = 0.5
"""Margin of SimPO."""


def formula(kind, logps, references, numbers, kl, beta):
    """Compute trl's formulas: DPOTrainer with loss_type sigmoid, ipo and hinge, KTOTrainer with
    loss_type kto.

    SimPO is equation 6 of arXiv 2405.14734, ORPO equations 4 to 7 of arXiv 2403.07691.
    """
    if kind in WITHOUT_REFERENCE:
        means = [p / n for p, n in zip(logps, numbers, strict=True)]
        if kind == "simpo":
            return -F.sigmoid(beta * means[0] - beta * means[1] - GAMMA).log().mean()
        odds = [mean.exp() / (1 - mean.exp()) for mean in means]
        return (-means[0] - beta * F.sigmoid((odds[0] / odds[1]).log()).log()).mean()
    chosen, rejected = (p - r for p, r in zip(logps, references, strict=True))
    if kind == "dpo":
        return -F.logsigmoid(beta * (chosen - rejected)).mean()
    if kind == "hinge":
        return torch.relu(1 - beta * (chosen - rejected)).mean()
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
    if kind == "kto":
        labels = torch.tensor([1] * 7 + [-1] * 7)
        segments = Segments((mine - references).flatten(), numbers.flatten(), labels, labels)
        found = kto_losses(segments, kl, beta=0.3).mean()
    else:
        found = LOSSES[kind](Scores(*(mine - references * WITH[kind]), *numbers), 0.3, GAMMA).mean()
    found.backward()
    loss = formula(kind, theirs, references, numbers, kl, 0.3)
    loss.backward()
    assert found.item() == pytest.approx(loss.item(), abs=1e-9)
    torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-9, rtol=0)


def test_hinge_learns_no_pair_beyond_its_margin():
    """The margin is 1 / beta; a pair beyond it still counts in the mean."""
    chosen = torch.tensor([0.0, 1.0, 3.0, -2.0], requires_grad=True)
    rejected, one = torch.tensor([0.0, 0.0, 0.5, 1.0]), torch.ones(4)
    losses = LOSSES["hinge"](Scores(chosen, rejected, one, one), 0.5, GAMMA)
    assert losses.tolist() == [1.0, 0.5, 0.0, 2.5]
    losses.mean().backward()
    assert chosen.grad.tolist() == [-0.125, -0.125, 0.0, -0.125]


def test_ktos_weights_are_factors_of_each_kinds_losses():
    """trl's KTOTrainer has mean(cat(desirable_weight * chosen, undesirable_weight * rejected))."""
    ratios, labels = torch.tensor([0.5, -2.0, 1.0, 9.0]), torch.tensor([1, -1, -1, 0])
    segments = Segments(ratios, torch.ones(4), labels, labels)
    given = {"beta": 0.5, "desirable_weight": 3.0, "undesirable_weight": 0.25}
    wanted = [
        3.0 * (1 - 1 / (1 + math.exp(-0.5 * (0.5 - 0.2)))),
        0.25 * (1 - 1 / (1 + math.exp(-0.5 * (0.2 + 2.0)))),
        0.25 * (1 - 1 / (1 + math.exp(-0.5 * (0.2 - 1.0)))),
        0,
    ]
    found = kto_losses(segments, torch.tensor(0.2), **given)
    assert found.tolist() == pytest.approx(wanted, rel=1e-6)


def logp_of(model, prompt, answer):
    """Return the log-probability of an answer that goes through a plain model by itself."""
    ids = torch.tensor([[*prompt, *answer]])
    logp_T = model(ids)[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return logp_T[len(prompt) - 1 :].sum()


def padded(sequences):
    longest = max(map(len, sequences))
    return torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in sequences])


def sequences_for_trl(sides, prefix=""):
    """Return token ids and masks of answers, padded like trl's collators."""
    texts = [[*pair["prompt"], *answer] for pair, answer in sides]
    masks = [[0] * len(pair["prompt"]) + [1] * len(answer) for pair, answer in sides]
    names = ("input_ids", "attention_mask", "completion_mask")
    values = padded(texts), padded([[1] * len(text) for text in texts]), padded(masks)
    return {prefix + name: value for name, value in zip(names, values, strict=True)}


def for_trl(model):
    """Wrap ``model`` for trl: log-probabilities of labels, without a product over the head."""

    def called(input_ids, labels, **_):
        logp = model(input_ids)[:, :-1].log_softmax(-1)
        wanted = labels[:, 1:]
        logp = logp.gather(2, wanted.clamp(min=0)[..., None])[..., 0] * (wanted >= 0)
        shown = torch.zeros_like(logp)
        return SimpleNamespace(log_probs=logp, entropy=shown, mean_logits=shown, is_top1=shown > 0)

    return called


WEIGHTS = {"desirable_weight": 3.0, "undesirable_weight": 0.5}


def singles_by_formula(policy, reference, singles, beta):
    """Return KTO's loss of single answers that go through the models one at a time."""

    def ratios(shift):
        answers = [singles[(i + shift) % len(singles)]["completion"] for i in range(len(singles))]
        pairs = list(zip(singles, answers, strict=True))
        own = torch.stack([logp_of(policy, single["prompt"], x) for single, x in pairs])
        return own - torch.stack([logp_of(reference, s["prompt"], x) for s, x in pairs]).detach()

    kl = ratios(1).mean().clamp(min=0).detach()
    assert kl > 0  # otherwise the other answers prove nothing
    losses = [
        3.0 * (1 - F.sigmoid(beta * (ratio - kl)))
        if single["label"]
        else 0.5 * (1 - F.sigmoid(beta * (kl - ratio)))
        for ratio, single in zip(ratios(0), singles, strict=True)
    ]
    return torch.stack(losses).mean()


def by_formula(kind, policy, reference, pairs, beta):
    """Return the loss of answers that go through the models one by one, without caches."""
    if "label" in pairs[0]:
        return singles_by_formula(policy, reference, pairs, beta)

    def of_all(model, key, shift=0):
        answers = [pairs[(i + shift) % len(pairs)][key] for i in range(len(pairs))]
        found = [logp_of(model, pair["prompt"], x) for pair, x in zip(pairs, answers, strict=True)]
        return torch.stack(found)

    logps, references = (
        torch.stack([of_all(model, key) for key in ("chosen", "rejected")])
        for model in (policy, reference)
    )
    numbers = [torch.tensor([len(pair[key]) for pair in pairs]) for key in ("chosen", "rejected")]
    others = (of_all(model, "chosen", 1).detach() for model in (policy, reference))
    kl = torch.sub(*others).mean().clamp(min=0)
    assert kl > 0 or kind != "kto"  # otherwise the third segments prove nothing
    return formula(kind, logps, references.detach(), numbers, kl, beta)


def by_trl(kind, policy, reference, pairs, beta):
    """Return the same by trl's own function."""
    if kind in WITHOUT_REFERENCE:
        pytest.skip("trl's function is in none of these trainers")
    trainers = pytest.importorskip("trl.trainer")
    policy.is_gradient_checkpointing = False  # trl reads it
    is_single = "label" in pairs[0]
    if is_single:
        inputs = sequences_for_trl([(p, p["completion"]) for p in pairs])
        others = [(p, pairs[(i + 1) % len(pairs)]["completion"]) for i, p in enumerate(pairs)]
        inputs |= sequences_for_trl(others, "KL_")
        inputs["label"] = torch.tensor([p["label"] for p in pairs])
    else:
        answers = [(p, p["chosen"]) for p in pairs], [(p, p["rejected"]) for p in pairs]
        inputs = sequences_for_trl([*answers[0], *answers[1]])
    if kind == "kto" and not is_single:
        others = [(p, pairs[(i + 1) % len(pairs)]["chosen"]) for i, p in enumerate(pairs)]
        inputs |= sequences_for_trl(others, "KL_")
        inputs["label"] = torch.tensor([True] * len(pairs) + [False] * len(pairs))
    same = SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x)
    kept = {"dpo": "sigmoid", "ipo": "ipo", "hinge": "hinge", "kto": "kto"}[kind]
    settings = SimpleNamespace(
        model=policy,
        ref_model=for_trl(reference),
        accelerator=same,
        beta=beta,
        loss_type=kept,
        loss_types=[kept],
        loss_weights=[1.0],
        calculate_KL=True,
        desirable_weight=WEIGHTS["desirable_weight"] if is_single else 1.0,
        undesirable_weight=WEIGHTS["undesirable_weight"] if is_single else 1.0,
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        use_weighting=False,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    theirs = trainers.KTOTrainer if kind == "kto" else trainers.DPOTrainer
    settings._compute_kl_logps = partial(trainers.KTOTrainer._compute_kl_logps, settings)
    return theirs._compute_loss(settings, for_trl(policy), inputs, False)


@pytest.mark.parametrize("theirs", [by_formula, by_trl])
@pytest.mark.parametrize("kind", [*KINDS, "kto of single answers"])
def test_loss_and_every_gradient_through_a_model_are_trls(kind, theirs, own_words):
    """Packed pairs and a cached reference equal plain copies of the model and its reference."""
    config = config_of(own_words, "moe.aux_loss_coef=0", "optim.max_grad_norm=1e9")
    kind, _, is_single = kind.partition(" ")
    pairs = SINGLES[:4] if is_single else PAIRS[:4]
    given = preferences(config, pairs, kind, beta=0.5, **(WEIGHTS if is_single else {}))
    trainer = Trainer(config, **given)
    has_reference = any(isinstance(callback, Reference) for callback in trainer.callbacks)
    assert has_reference == bool(WITH[kind])
    if has_reference:
        Reference([given["data"]]).on_start(trainer)
    reference = whole(trainer.engine)
    with torch.no_grad():  # the policy differs from its reference
        for parameter in trainer.model.parameters():
            parameter.mul_(1.5 if kind != "kto" else 0.7)  # with kto nearer to uniform: kl > 0
    policy = whole(trainer.engine)
    batch = Batch.of([given["data"].row(i) for i in range(4)])
    loss = trainer.engine.forward_backward([batch], given["objective"]).terms["preference"]
    members = trainer.engine.fsdp.members
    trainer.engine.fsdp.gradient_norm()  # it waits for them
    expected = theirs(kind, policy, reference, pairs, 0.5)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    largest = max(float(p.grad.abs().max()) for p in policy.parameters())
    assert largest > 1e-3
    for name, parameter in policy.named_parameters():
        mine = members[name].layout.whole(members[name].local.grad)
        assert (mine - parameter.grad).abs().max() <= 1e-6 * max(1.0, largest), name


MESHES = {
    "alone, one micro-batch": (["train.micro_batch_size=4"], 1),
    "alone, two micro-batches": (["train.micro_batch_size=2"], 1),
    "alone, four micro-batches": (["train.micro_batch_size=1"], 1),
    "dp_shard": (["train.micro_batch_size=2", "parallel.dp_shard=2"], 2),
    "dp_shard, two micro-batches": (["train.micro_batch_size=1", "parallel.dp_shard=2"], 2),
    "dp_replicate": (["train.micro_batch_size=2", "parallel.dp_replicate=2"], 2),
    "ep": (["train.micro_batch_size=1", "parallel.dp_shard=2", "parallel.ep=2"], 2),
    "tp": (["train.micro_batch_size=2", "parallel.tp=2"], 2),
    "cp": (["train.micro_batch_size=2", "parallel.cp=2"], 2),
    "cp by gathering": (
        ["train.micro_batch_size=4", "parallel.cp=2", "parallel.cp_method=all_gather"],
        2,
    ),
    "pp": (["train.micro_batch_size=1", "parallel.pp=2"], 2),
}
"""Settings of 4 rows, and their numbers of processes."""


def moved(words, folder, pairs):
    """Return a trainer of 4 pairs whose weights differ from the reference, and its pairs."""
    config = config_of([*words, f"output_dir={folder}"])
    weights = WEIGHTS if "label" in pairs[0] else {}
    given = preferences(config, pairs, "kto", beta=0.5, **weights)
    trainer = Trainer(config, **given)
    Reference([given["data"]]).on_start(trainer)
    reference = whole(trainer.engine)
    generator = torch.Generator().manual_seed(5)
    values = {
        name: weight + 0.2 * torch.randn(weight.shape, generator=generator)
        for name, weight in trainer.engine.weights()
    }
    for name in trainer.engine.fsdp.members:
        trainer.engine.fsdp.write(name, (), values[name])
    return trainer, given, reference


def kto_on_meshes(words, meshes, folder, pairs):
    """Return loss, loss without gradients, and gradient norm of each mesh."""
    found = {}
    for name, mesh in meshes.items():
        trainer, given, _ = moved([*words, *mesh], f"{folder}/{name}", pairs)
        size, world = trainer.config.train.micro_batch_size, trainer.world
        rows = [given["data"].row(i) for i in range(4)]
        batches = [Batch.of(rows[i : i + size]) for i in range(0, 4, size)]
        given_here = batches[world.data_rank :: world.dims.data_ranks], given["objective"]
        losses = [
            run(*given_here).terms["preference"].item()
            for run in (trainer.engine.forward, trainer.engine.forward_backward)
        ]
        found[name] = [*losses, trainer.engine.step(0.0).grad_norm.item()]
    return found


@pytest.mark.tier("quick", long=["2-pairs"], wide=["2-single answers"])
@pytest.mark.parametrize("pairs", [PAIRS[:4], SINGLES[:4]], ids=["pairs", "single answers"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ktos_divergence_is_of_the_global_batch_on_every_mesh(ranks, pairs, own_words, tmp_path):
    """However the pairs are split, loss and gradient equal the formula in fp64.

    The third answers' log-ratios have both signs, so a mean over half of them is clamped.
    """
    words = [*own_words, "moe.aux_loss_coef=0", "model.num_kv_heads=2"]
    trainer, _, reference = moved(words, tmp_path / "formula", pairs)
    policy = whole(trainer.engine).double()
    expected = by_formula("kto", policy, reference.double(), pairs, 0.5)
    expected.backward()
    norm = torch.stack([p.grad.norm() for p in policy.parameters()]).norm().item()
    meshes = {name: own for name, (own, size) in MESHES.items() if size == ranks}
    given = words, meshes, str(tmp_path), pairs
    (found, *_) = [kto_on_meshes(*given)] if ranks == 1 else spawn(2, kto_on_meshes, *given)
    wanted = [pytest.approx(x, rel=1e-5) for x in (expected.item(), expected.item(), norm)]
    assert found == dict.fromkeys(meshes, wanted)


def losses_of(config, **given):
    result = Trainer(config, **given).fit()
    return [r for r in read_metrics(result.folder / "metrics.jsonl") if "loss" in r]


def trained(words, kind):
    config = Config.load(None, words, environ={})
    return losses_of(config, **preferences(config, PAIRS, kind))


@pytest.mark.tier("long")
@pytest.mark.parametrize("kind", KINDS)
def test_a_margin_grows(kind, own_words):
    rows = trained([*own_words, "train.steps=12", "optim.lr=2e-2"], kind)
    if first := {"dpo": math.log(2), "ipo": 25.0, "hinge": 1.0, "kto": 0.5}.get(kind):
        assert rows[0]["loss"] == pytest.approx(first, rel=1e-4)  # the policy is the reference
        assert rows[0]["margin"] == pytest.approx(0, abs=1e-5)
    assert rows[-1]["margin"] > 0.1
    assert rows[-1]["accuracy"] == 1
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.fixture
def pair_words(tiny_words, tmp_path):
    """Return the settings of a run on a file of pairs."""
    lines = [
        json.dumps({"prompt": f"Say {n}:", "chosen": " yes" + "!" * (n % 3), "rejected": " no"})
        for n in range(30)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    words = [w for w in tiny_words if not w.startswith(("data.source", "data.path"))]
    words += [f"data.path={tmp_path / 'pairs.jsonl'}", "data.format=preference", "data.seq_len=48"]
    words += ["model.num_kv_heads=2", "optim.lr=1e-2"]
    return [*words, "train.sample_tokens=0", "train.steps=6"]


@pytest.mark.tier("long")
def test_kto_learns_single_answers_from_a_file(pair_words, tmp_path):
    """Desirable answers gain over undesirable ones, and a run's first loss is the formula's.

    At first the policy is the reference, so each loss is its weight / 2.
    """
    lines = [
        {"prompt": f"Say {n}:", "completion": " no" if n % 4 else " yes", "label": n % 4 == 0}
        for n in range(32)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = [w for w in pair_words if not w.startswith("data.format")]
    words += ["train.objective=kto", "train.desirable_weight=3", "train.undesirable_weight=0.5"]
    words += ["train.global_batch_size=32", "train.steps=8", *NO_EVAL]
    rows = losses_of(config_of(words))
    assert rows[0]["loss"] == pytest.approx((8 * 3 + 24 * 0.5) / 32 / 2, rel=1e-5)
    assert rows[0]["margin"] == pytest.approx(0, abs=1e-5)
    assert rows[-1]["margin"] > rows[2]["margin"] > 0
    assert rows[-1]["accuracy"] == 1
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_rows_that_fill_up_an_evaluation_do_not_count():
    config = config_of(["model.preset=debug", "data.seq_len=32"])
    for rows, sizes in (
        (SINGLES[:3], {"rows": 3, "desirable": 1, "undesirable": 2, "answers": 3}),
        (PAIRS[:3], {"rows": 3, "desirable": 3, "undesirable": 3, "answers": 6}),
        ([*SINGLES[:1], *PAIRS[:2]], {"rows": 3, "desirable": 3, "undesirable": 2, "answers": 5}),
    ):
        given = preferences(config, rows, "kto")
        (batch,) = eval_batches(given["data"], num_rows=3, micro_batch_size=8)
        assert given["objective"].sizes([batch]) == sizes


def trained_of_settings(words):
    rows = losses_of(Config.load(None, words, environ={}))
    return [{k: row[k] for k in ("loss", "margin", "accuracy", "grad_norm")} for row in rows]


def trained_on_meshes(words, kinds, folder):
    """Return each kind's logged rows on each mesh of two ranks."""
    return {
        (kind, mesh): trained_of_settings(
            [*words, f"train.objective={kind}", mesh, f"output_dir={folder}/{kind}-{mesh}"]
        )
        for kind in kinds
        for mesh in ("parallel.dp_shard=2", "parallel.tp=2")
    }


@pytest.mark.tier("long")
def test_settings_alone_learn_from_a_file_on_every_mesh(pair_words, tmp_path):
    words = [*pair_words, "moe.aux_loss_scope=global_batch"]
    for found in spawn(2, trained_on_meshes, words, KINDS, str(tmp_path), timeout=120):
        for (kind, mesh), rows in found.items():
            out = f"output_dir={tmp_path / kind}"
            alone = trained_of_settings([*words, f"train.objective={kind}", out])
            for mine, expected in zip(rows, alone, strict=True):
                assert mine == pytest.approx(expected, rel=1e-5, abs=1e-5), (kind, mesh)
            if WITH[kind]:
                assert alone[0]["margin"] == pytest.approx(0, abs=1e-5)
                assert alone[1]["margin"] > 0
            assert (tmp_path / kind / "reference.npz").exists() == bool(WITH[kind])
            assert alone[-1]["margin"] > alone[1]["margin"]
        break  # every rank has the same file


def test_the_reference_has_the_adapters_that_were_loaded(own_words, tmp_path):
    """trl's DPOTrainer does the same: a PEFT model's reference is that model before training."""
    words, pairs = [*own_words, "lora.rank=8"], PAIRS[:4]
    config = config_of([*words, f"output_dir={tmp_path / 'adapters'}"])
    engine = Trainer(config, **preferences(config, pairs)).engine
    generator = torch.Generator().manual_seed(0)
    for name, member in engine.fsdp.members.items():
        if name.endswith(ADAPTER):
            value = 0.3 * torch.randn(member.layout.shape, generator=generator)
            engine.fsdp.write(name, (), value)
    engine.save_peft(tmp_path / "adapter")
    config = config_of([*words, f"lora.path={tmp_path / 'adapter'}"])
    given = preferences(config, pairs)
    trainer = Trainer(config, **given)
    Reference([given["data"]]).on_start(trainer)
    found = [given["data"].reference_PS[i].sum() for i in range(len(pairs))]
    merged, base = whole(trainer.engine, merged=True), whole(trainer.engine)

    def by(model):
        answers = [(p, p[key]) for p in pairs for key in ("chosen", "rejected")]
        logp = torch.stack([logp_of(model, pair["prompt"], answer) for pair, answer in answers])
        return logp.view(-1, 2).sum(1).tolist()

    with torch.no_grad():
        assert found == pytest.approx(by(merged), abs=1e-4)
        assert max(abs(a - b) for a, b in zip(by(merged), by(base), strict=True)) > 0.1
    first = losses_of(config, **preferences(config, pairs))[0]
    assert (first["loss"], first["margin"]) == pytest.approx((math.log(2), 0), abs=1e-5)


@pytest.mark.tier("long")
def test_a_resumed_run_has_the_reference_it_began_with(own_words):
    words = [*own_words, "optim.lr=2e-2", "train.steps=4"]
    trained(words, "dpo")
    config = config_of([*words, "train.steps=6"])
    given = preferences(config, PAIRS)
    rows = read_metrics(Trainer(config, **given).fit().folder / "metrics.jsonl")
    assert [row["step"] for row in rows if row["margin"] > 0.01][-2:] == [5, 6]
    config = config_of([*words, "train.steps=8"])
    trainer = Trainer(config, **preferences(config, PAIRS[1:]))
    with pytest.raises(
        ConfigError, match="was computed for other pairs; restore what the run began with"
    ):
        trainer.fit()


def test_a_pair_without_room_or_an_answer_is_named(own_words):
    with pytest.raises(
        ConfigError, match=r"data\.seq_len: 8 is less than the \d+ tokens of pair 0"
    ):
        preferences(config_of(own_words, "data.seq_len=8"), PAIRS)
    with pytest.raises(ConfigError, match="pair 0 has no prompt or an answer without a token"):
        preferences(Config(), [{"prompt": [1], "chosen": [], "rejected": [2]}])


def test_a_longer_pair_is_left_out_and_said(pair_words, tmp_path, caplog):
    with (tmp_path / "pairs.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"prompt": "a" * 60, "chosen": "b", "rejected": "c"}))
    with caplog.at_level("INFO", "moetrain"):
        words = [*pair_words, "train.objective=ipo", "train.steps=1", *NO_EVAL]
        assert losses_of(config_of(words))[0]["loss"] == pytest.approx(25.0)
    assert (
        "30 preference pairs, one in a row of 48; 1 left out: too long, or nothing to learn"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["data.format=messages"], "train.objective: 'dpo' contradicts data.format 'messages'"),
        (["data.format=text", "train.objective=kto"], "'kto' contradicts data.format 'text'"),
        (
            ["train.desirable_weight=2"],
            "train.desirable_weight: 2.0 contradicts train.objective 'dpo'",
        ),
        (["data.streaming=yes"], "train.objective: 'dpo' contradicts data.streaming 'yes'"),
        (["data.packing=whole"], "data.packing: 'whole' contradicts train.objective 'dpo'"),
        (
            ["data.seq_len=8", *NO_EVAL],
            "data.seq_len: 8: the 700 tokens of data.path make no row of this length to learn",
        ),
    ],
)
def test_settings_that_do_not_go_with_pairs_are_one_line(words, error, pair_words):
    words = [*pair_words, "train.objective=dpo", *words]
    with pytest.raises(ConfigError) as raised:
        Trainer(config_of(words))
    assert error in str(raised.value)


def test_an_objective_in_settings_and_another_are_one_too_many(pair_words):
    config = config_of([*pair_words, "train.objective=dpo"])
    with pytest.raises(ConfigError, match=r"train\.objective: 'dpo', but the program gives anothe"):
        Trainer(config, objective=Preference())
