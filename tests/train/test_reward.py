"""Reward models: the formula over transformers in fp64, on every mesh, and their files."""

import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import moetrain
from moetrain.config import Config, ConfigError
from moetrain.data.loader import Batch
from moetrain.models.hf.files import CONFIG, read_json
from moetrain.models.rules import ADAPTER
from moetrain.models.transformer import Transformer
from moetrain.train.loop import Trainer
from moetrain.train.metrics import read_metrics
from moetrain.train.reward import last_places
from tests.lib.distributed import spawn
from tests.lib.reward_models import EOS, FAMILIES, make

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
PAIRS = [
    {
        "prompt": f"Say {n}:",
        "chosen": " yes" + "!" * (n % 3),
        "rejected": " no" + "?" * (n % 4),
        **({"margin": n / 8} if n % 2 else {}),
    }
    for n in range(8)
]
CENTERING = 0.25


@pytest.fixture
def pairs_file(tmp_path):
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    return tmp_path / "pairs.jsonl"


@pytest.fixture
def words(pairs_file, tmp_path, token_cache):
    return [
        *(f"data.path={pairs_file}", f"data.cache_dir={token_cache}", "data.tokenizer=byte"),
        *("data.seq_len=48", "data.eval_fraction=0", "train.objective=reward", "train.steps=1"),
        *("train.micro_batch_size=2", "train.global_batch_size=8", "train.device=cpu"),
        *("compile.enabled=no", "log.interval=1", "log.tensorboard=no", "optim.warmup_steps=0"),
        *("optim.max_grad_norm=1e9", "checkpoint.at_end=no", "checkpoint.save_hf=no"),
        *(f"output_dir={tmp_path / 'out'}", "log.progress=no"),
    ]


def config_of(words, *more):
    return Config.load(None, [*words, *more], environ={})


def ids_of(pair, key):
    return [*(pair["prompt"] + pair[key]).encode(), EOS]


def by_formula(model, centering=CENTERING):
    """Compute TRL's RewardTrainer over transformers' forward, one text at a time, in fp64."""
    chosen, rejected = (
        torch.stack([model(torch.tensor([ids_of(pair, key)])).logits[0, 0] for pair in PAIRS])
        for key in ("chosen", "rejected")
    )
    margins = torch.tensor([pair.get("margin", 0.0) for pair in PAIRS])
    apart = chosen - rejected
    loss = -F.logsigmoid(apart - margins).mean()
    total = loss + centering * (chosen + rejected).square().mean()
    return total, loss, apart.mean().item(), (apart > 0).double().mean().item()


def whole_gradient(member):
    return member.layout.whole(member.local.grad)


def learned(words, folder):
    """Return terms, the whole gradients by their names in files, and their norm."""
    trainer = Trainer(config_of(words, f"output_dir={folder}"))
    engine, world, size = trainer.engine, trainer.world, trainer.config.train.micro_batch_size
    rows = [trainer.data.train.row(i) for i in range(len(PAIRS))]
    batches = [Batch.of(rows[i : i + size]) for i in range(0, len(rows), size)]
    here = batches[world.data_rank :: world.dims.data_ranks]
    terms = engine.forward_backward(here, trainer.objective).terms
    found = {name: value.item() for name, value in terms.items()}
    forward = {k: v.item() for k, v in engine.forward(here, trainer.objective).terms.items()}
    engine.fsdp.gradient_norm()  # it waits for them
    gradients = {name: whole_gradient(member) for name, member in engine.fsdp.members.items()}
    norm = engine.step(0.0).grad_norm.item()
    return found, forward, gradients, norm


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_are_trls_over_transformers_model(family, words, tmp_path):
    theirs = make(AutoModelForSequenceClassification, tmp_path / "model", family, num_labels=1)
    theirs = theirs.double()
    total, loss, margin, accuracy = by_formula(theirs)
    total.backward()
    more = [f"model.path={tmp_path / 'model'}", f"train.reward_centering={CENTERING}"]
    found, forward, gradients, norm = learned([*words, *more], tmp_path / "out")
    assert 0 < accuracy < 1
    wanted = {"reward": loss.item(), "margin": margin, "accuracy": accuracy}
    assert {k: found[k] for k in wanted} == pytest.approx(wanted, abs=1e-5)
    assert found["reward"] + CENTERING * found["centering"] == pytest.approx(total.item(), rel=1e-5)
    assert {k: forward[k] for k in found} == pytest.approx(found, rel=1e-6)
    grads = [p.grad for p in theirs.parameters()]
    assert norm == pytest.approx(torch.stack([g.norm() for g in grads]).norm().item(), rel=1e-5)
    own = dict(theirs.named_parameters())
    assert gradients.keys() >= {"score.weight", "embed.weight"}
    assert "lm_head.weight" not in gradients
    for name, hf_name in (
        ("score.weight", "score.weight"),
        ("embed.weight", "model.embed_tokens.weight"),
        ("norm.weight", "model.norm.weight"),
        ("layers.0.attn.wq.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("layers.1.attn.wo.weight", "model.layers.1.self_attn.o_proj.weight"),
    ):
        scale = own[hf_name].grad.abs().max()
        torch.testing.assert_close(
            gradients[name].double(), own[hf_name].grad, rtol=0, atol=1e-5 * float(scale), msg=name
        )


MESHES = {
    "ep": ["parallel.dp_shard=2", "parallel.ep=2"],
    "tp": ["parallel.tp=2"],
    "cp": ["parallel.cp=2"],
    "cp by gathering": ["parallel.cp=2", "parallel.cp_method=all_gather"],
    "pp": ["parallel.pp=2"],
}


def learned_on_meshes(words, folder):
    return {name: learned([*words, *mesh], f"{folder}/{name}") for name, mesh in MESHES.items()}


@pytest.mark.tier("long")
def test_every_mesh_has_one_devices_loss_and_gradients(words, tmp_path):
    make(AutoModelForSequenceClassification, tmp_path / "model", num_labels=1)
    words = [*words, f"model.path={tmp_path / 'model'}", f"train.reward_centering={CENTERING}"]
    words += ["moe.aux_loss_coef=0"]
    alone, forward, gradients, norm = learned(words, tmp_path / "alone")
    assert forward == pytest.approx(alone, rel=1e-5)
    here, other = spawn(2, learned_on_meshes, words, str(tmp_path), timeout=120)
    for mesh, (found, found_forward, own, found_norm) in here.items():
        assert found == pytest.approx(alone, rel=1e-5, abs=1e-5), mesh
        assert found_forward == pytest.approx(alone, rel=1e-5, abs=1e-5), mesh
        assert found_norm == pytest.approx(norm, rel=1e-5), mesh
        own = {**other[mesh][2], **own}
        assert own.keys() == gradients.keys()
        for name, gradient in gradients.items():
            limit = 2e-5 * max(1.0, float(gradient.abs().max()))
            assert (own[name] - gradient).abs().max() <= limit, (mesh, name)


def scores_by_transformers(folder, **how):
    theirs = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, **how)
    texts = [ids_of(pair, key) for pair in PAIRS for key in ("chosen", "rejected")]
    longest = max(map(len, texts))
    assert theirs.config.num_labels == 1
    pad = theirs.config.get_text_config().pad_token_id
    rows = torch.tensor([[*ids, *[pad] * (longest - len(ids))] for ids in texts])
    with torch.no_grad():
        return theirs(rows, attention_mask=(rows != pad).long()).logits[:, 0]


@pytest.mark.tier("wide", long=["qwen3_moe"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_language_model_becomes_a_reward_model_that_transformers_loads(family, words, tmp_path):
    """It is trained, exported, scored alike by transformers and the run, and loaded again."""
    before = make(AutoModelForCausalLM, tmp_path / "model", family)
    more = [f"model.path={tmp_path / 'model'}", "train.steps=12", "optim.lr=1e-2"]
    trainer = Trainer(config_of(words, *more, "checkpoint.save_hf=yes", "model.init_std=0.02"))
    score_1D = dict(trainer.engine.weights())["score.weight"]
    assert score_1D.std().item() == pytest.approx(0.02, rel=0.5)  # as transformers draws it
    result = trainer.fit()
    rows = [r for r in read_metrics(result.folder / "metrics.jsonl") if "accuracy" in r]
    assert rows[-1]["accuracy"] == 1
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["margin"] > 1
    folder = tmp_path / "out" / "hf"
    config = read_json(folder / CONFIG)
    name = type(before).__name__.replace("CausalLM", "SequenceClassification")
    assert config["architectures"] == [name]
    assert config["pad_token_id"] == EOS
    wanted = scores_by_transformers(folder)
    ours = moetrain.load_hf(folder)
    assert sum(p.numel() for p in ours.parameters()) == ours.arch.num_params()
    for pair, both in zip(PAIRS, wanted.view(-1, 2), strict=True):
        for key, score in zip(("chosen", "rejected"), both, strict=True):
            found = ours(torch.tensor([ids_of(pair, key)[:-1]]))[0, -1, 0]
            assert found.item() == pytest.approx(score.item(), rel=1e-4, abs=1e-4)
    moetrain.save_hf(ours, tmp_path / "again")
    assert read_json(tmp_path / "again" / CONFIG) == config
    torch.testing.assert_close(scores_by_transformers(tmp_path / "again"), wanted)
    again = Trainer(config_of(words, f"model.path={folder}", f"output_dir={tmp_path / 'two'}"))
    batch = Batch.of([again.data.train.row(i) for i in range(len(PAIRS))])
    terms = again.engine.forward([batch], again.objective).terms
    assert terms["margin"].item() == pytest.approx(
        (wanted[::2] - wanted[1::2]).mean().item(), rel=1e-4
    )


def test_last_places_are_transformers():
    """GenericForSequenceClassification takes the rightmost token that is not PAD."""
    tokens = torch.tensor([[5, 6, 0, 7, 8, 0], [0, 0, 3, 0, 4, 0]])
    ends = torch.tensor([0, 3, 6, 8, 12], dtype=torch.int32)
    is_pad = torch.tensor([[0] * 6, [0, 0, 0, 0, 0, 1]]).bool()
    assert last_places(tokens, ends, is_pad, 0).tolist() == [1, 4, 6, 10]
    assert last_places(tokens, ends, is_pad, None).tolist() == [2, 5, 7, 10]
    assert last_places(tokens, ends, None, 4).tolist() == [2, 5, 7, 11]


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (["data.format=messages"], "train.objective: 'reward' contradicts data.format 'messages'"),
        (["train.beta=0.5"], "train.beta: 0.5 contradicts train.objective 'reward'"),
        (["train.sample_tokens=9"], "train.sample_tokens: 9 contradicts train.objective 'reward'"),
        (
            ["train.objective=dpo", "train.reward_centering=0.1"],
            "train.reward_centering: 0.1 contradicts train.objective 'dpo'",
        ),
        (
            ["train.objective=next_token", "data.source=synthetic"],
            "is a reward model, whose head predicts no token; name a language model",
        ),
    ],
)
def test_settings_that_do_not_go_with_a_reward_model_are_one_line(more, error, words, tmp_path):
    make(AutoModelForSequenceClassification, tmp_path / "model", "llama", num_labels=1)
    words = [*words, f"model.path={tmp_path / 'model'}"]
    if "data.source=synthetic" in more:
        words = [w for w in words if not w.startswith(("data.path", "data.tok", "data.eval"))]
    with pytest.raises(ConfigError) as raised:
        Trainer(config_of(words, *more))
    assert error in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"id2label": {"0": "no", "1": "yes"}}, "with 2 labels; only one, a reward, is supported"),
        ({"id2label": None}, "with 2 labels"),
        ({"pad_token_id": -1}, "pad_token_id is -1, expected an id or null"),
    ],
)
def test_a_classifier_that_is_no_reward_model_is_refused(change, error, tmp_path):
    make(AutoModelForSequenceClassification, tmp_path, "llama", num_labels=1)
    config = {**read_json(tmp_path / CONFIG), **change}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=error):
        moetrain.load_hf(tmp_path)


def test_a_reward_model_generates_nothing(tmp_path):
    make(AutoModelForSequenceClassification, tmp_path, "llama", num_labels=1)
    with pytest.raises(ConfigError, match="a reward model, whose head predicts no token"):
        moetrain.Generator(moetrain.load_hf(tmp_path))


MARGINS = ["much", True, [1], 10**400, float("nan")]


@pytest.mark.parametrize("margin", MARGINS, ids=range(len(MARGINS)))
def test_a_margin_that_is_no_number_is_named(margin, words, pairs_file, tmp_path):
    make(AutoModelForCausalLM, tmp_path / "model", "llama")
    with pairs_file.open("a") as file:
        file.write("\n" + json.dumps({**PAIRS[0], "margin": margin}))
    with pytest.raises(ConfigError, match=r"jsonl:9: `margin` is .*; write a number, or leave"):
        Trainer(config_of(words, f"model.path={tmp_path / 'model'}"))


@pytest.mark.tier("long")
def test_adapters_and_the_head_are_trained_and_peft_scores_as_the_export(words, tmp_path):
    peft = pytest.importorskip("peft")
    make(AutoModelForCausalLM, tmp_path / "model", "llama")
    lora = ["lora.rank=8", "lora.targets=*.attn.*", "lora.alpha=64", "train.steps=12"]
    words = [*words, f"model.path={tmp_path / 'model'}", *lora, "optim.lr=1e-2"]
    trainer = Trainer(config_of(words, "checkpoint.save_hf=yes"))
    before = dict(trainer.engine.weights())["score.weight"].clone()
    rules = trainer.engine.stages.trained
    assert {name for name in rules if not name.endswith(ADAPTER)} == {"score.weight"}
    result = trainer.fit()
    rows = [r for r in read_metrics(result.folder / "metrics.jsonl") if "accuracy" in r]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert (dict(trainer.engine.weights())["score.weight"] - before).abs().max() > 1e-3
    wanted = scores_by_transformers(tmp_path / "out" / "hf")
    base = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "model", num_labels=1, dtype=torch.float32
    )
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "out" / "adapter"))
    with torch.no_grad():
        texts = [ids_of(pair, key) for pair in PAIRS for key in ("chosen", "rejected")]
        found = torch.stack([theirs(torch.tensor([ids])).logits[0, 0] for ids in texts])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert wanted.abs().max() > 1
    more = [f"lora.path={tmp_path / 'out' / 'adapter'}", f"output_dir={tmp_path / 'two'}"]
    again = Trainer(config_of(words, *more))
    batch = Batch.of([again.data.train.row(i) for i in range(len(PAIRS))])
    margin = again.engine.forward([batch], again.objective).terms["margin"].item()
    assert margin == pytest.approx((wanted[::2] - wanted[1::2]).mean().item(), rel=1e-3)


def test_a_head_may_be_frozen_but_beside_adapters(words, tmp_path):
    make(AutoModelForSequenceClassification, tmp_path / "model", "llama", num_labels=1)
    words = [*words, f"model.path={tmp_path / 'model'}", "train.freeze=score.*"]
    assert "score.weight" not in Trainer(config_of(words)).engine.stages.trained
    with pytest.raises(
        ConfigError, match=r"train\.freeze: 'score\.\*' freezes score\.weight, the r"
    ):
        Trainer(config_of(words, "lora.rank=8"))


def test_peft_classifiers_adapters_are_read_and_others_refused(words, tmp_path):
    """PEFT itself wrote the accepted adapters, for a classifier with one label."""
    peft = pytest.importorskip("peft")
    model = make(AutoModelForSequenceClassification, tmp_path / "model", "llama", num_labels=1)
    settings = peft.LoraConfig(
        task_type="SEQ_CLS", r=8, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False
    )
    theirs = peft.get_peft_model(model, settings)
    with torch.no_grad():
        theirs.base_model.model.score.modules_to_save["default"].weight.normal_()
        wanted = theirs(torch.tensor([ids_of(PAIRS[0], "chosen")])).logits.item()
    theirs.save_pretrained(tmp_path / "adapter")
    words = [*words, f"model.path={tmp_path / 'model'}", "lora.rank=8", "lora.alpha=8"]
    words += ["lora.targets=*.wq", f"lora.path={tmp_path / 'adapter'}"]
    engine = Trainer(config_of(words)).engine
    ours = Transformer(engine.arch)
    with torch.no_grad():
        for name, weight in engine.weights(merged=True):
            ours.get_parameter(name).copy_(weight)
        found = ours(torch.tensor([ids_of(PAIRS[0], "chosen")[:-1]]))[0, -1, 0].item()
    assert found == pytest.approx(wanted, rel=1e-4)
    other = [w for w in words if not w.startswith("train.objective")]
    make(AutoModelForCausalLM, tmp_path / "model", "llama")
    with pytest.raises(
        ConfigError, match=r"lora\.path: .*has score\.weight, .*set train\.objective reward, or"
    ):
        Trainer(config_of(other))
