"""Embedding and head trained whole beside adapters: PEFT's gradients and logits, on every mesh."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from moetrain.config import Config, ConfigError
from moetrain.data.tokenizer import load_tokenizer
from moetrain.jobs.shared import check_settings
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.peft import attach_peft
from moetrain.models.rules import ADAPTER
from tests.lib.adapters import MICRO, adapted, base_of, compare, learn, value_of
from tests.lib.distributed import spawn
from tests.lib.engines import copy_of, make_engine, train, weights_of
from tests.lib.new_tokens import NEW, make_checkpoint, words_for
from tests.lib.whole_modules import PARTS, base_for, check_logits, gradients_beside, pefts

peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")

BOTH = "lora.modules_to_save=embed_tokens,lm_head"
WORDS = {
    "moe": [BOTH, "lora.targets=*.attn.*"],
    "dense": ["lora.modules_to_save=embed_tokens", "lora.targets=*.attn.*"],
}


def drawn(name, *words):
    """Return an engine whose adapters, embedding and head differ from those of its base."""
    engine = adapted(*WORDS[name], *words, base=base_for(name))
    for parameter in ("embed.weight", "lm_head.weight"):
        if parameter in engine.stages.trained:
            shape = engine.stages.table[parameter].shape
            engine.fsdp.write(parameter, (), value_of(parameter, shape))
    return engine


def pefts_name(name: str) -> str:
    """Return the name of a trained parameter in PEFT's model."""
    whole = {"embed.weight": "model.embed_tokens", "lm_head.weight": "lm_head"}
    if name in whole:
        return f"base_model.model.{whole[name]}.modules_to_save.default.weight"
    _, layer, _, part, leaf = name.split(".")
    half = "lora_A" if leaf.endswith(ADAPTER[0]) else "lora_B"
    module = f"base_model.model.model.layers.{layer}.self_attn.{PARTS[part]}"
    return f"{module}.{half}.default.weight"


@pytest.mark.parametrize("name", WORDS)
def test_logits_and_gradients_are_pefts(name, tmp_path):
    engine = drawn(name)
    model = pefts(engine, name, tmp_path)
    check_logits(engine, model, tmp_path, atol=1e-4, apart=0.5)
    theirs, ours = gradients_beside(engine, model)
    assert {pefts_name(n) for n in ours} == set(theirs)
    for parameter, gradient in ours.items():
        wanted = theirs[pefts_name(parameter)]
        assert (gradient - wanted).norm() <= 1e-4 * wanted.norm(), parameter


def test_only_what_is_named_is_trained_and_saved_and_a_run_goes_on_from_it(tmp_path):
    engine = drawn("moe")
    before = weights_of(engine)
    train(engine, range(1), MICRO)
    state = copy_of(engine.state())
    wholes = {"embed.weight", "lm_head.weight"}
    assert {n for n in state["model"] if not n.endswith(ADAPTER)} == wholes
    changed = {n for n, x in weights_of(engine).items() if not torch.equal(x, before[n])}
    assert changed == set(state["model"])
    again = adapted(*WORDS["moe"], base=base_for("moe"))
    again.load_state(state)
    assert train(again, range(1, 3), MICRO) == train(engine, range(1, 3), MICRO)
    engine.save_peft(tmp_path)
    later = make_engine(*WORDS["moe"], f"lora.path={tmp_path}", base=base_for("moe"), micro=MICRO)
    mine = weights_of(engine)
    for name, weight in weights_of(later).items():
        assert torch.equal(weight, mine[name]), name


def learn_all(runs):
    return {key: learn([*WORDS[key[0]], *words], base_of(key[0])) for key, words in runs.items()}


@pytest.mark.tier("long")
def test_every_mesh_learns_the_same():
    axes = {"moe": (("tp", "ep"), ("dp_shard",)), "dense": (("tp",), ("pp",))}
    runs = {(name, axis): [f"parallel.{x}=2" for x in axis] for name in axes for axis in axes[name]}
    expected = {name: learn(WORDS[name], base_of(name)) for name in axes}
    for answers in spawn(2, learn_all, runs, timeout=200):
        for (name, axis), answer in answers.items():
            compare(axis, answer, expected[name])


@pytest.mark.parametrize("tied", [True, False])
def test_new_tokens_are_learned_beside_adapters(tied, tmp_path):
    """PEFT's base has as many tokens, resized by ``transformers``."""
    count = make_checkpoint(tmp_path / "old", tied=tied)
    words = ["lora.rank=8", "lora.targets=*.attn.*", WORDS["dense"][0] if tied else BOTH]
    engine = make_engine(base=words_for(tmp_path / "old", *words), micro=2)
    train(engine, range(2), 2)
    engine.save_peft(tmp_path / "adapter")
    load = transformers.AutoModelForCausalLM.from_pretrained
    base = load(tmp_path / "old", dtype=torch.float32)
    base.resize_token_embeddings(count + 3)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    tokens = torch.tensor([[1, 2, 3, count, count + 1, 7, count + 2]])
    with torch.no_grad(), engine.work():
        torch.testing.assert_close(engine.model(tokens), model(tokens).logits, rtol=0, atol=1e-5)
    with pytest.raises(ConfigError, match=r"with new tokens; use its merged model"):
        attach_peft(load_hf(tmp_path / "old"), tmp_path / "adapter")
    tokenizer = load_tokenizer(str(tmp_path / "old"), new_tokens=NEW)
    engine.save_hf(tmp_path / "merged", tokenizer=tokenizer.export())
    merged = load(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(merged(tokens).logits, model(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "words", "problem"),
    [
        (
            "dense",
            [BOTH],
            r"lora\.modules_to_save: 'lm_head', but this model has no head",
        ),
        (
            "moe",
            [BOTH, "train.freeze=embed.*"],
            r"train\.freeze: 'embed\.\*' freezes embed\.weight",
        ),
        (
            "moe",
            ["lora.rank=0", "lora.alpha=32", BOTH],
            r"modules_to_save: .*contradicts lora",
        ),
        ("moe", ["lora.modules_to_save=norm"], r"lora\.modules_to_save"),
    ],
)
def test_bad_whole_modules_are_refused_in_one_line(name, words, problem):
    with pytest.raises(ConfigError, match=problem):
        make_engine(*words, base=base_for(name), micro=MICRO)


def test_jobs_train_adapters_alone():
    config = Config.load("jobs-debug", [BOTH], environ={})
    with pytest.raises(ConfigError, match=r"lora\.modules_to_save: .*jobs train adapters alone"):
        check_settings(config)
    config = Config.load("jobs-debug", [BOTH, "data.new_tokens=<a>"], environ={})
    with pytest.raises(ConfigError, match=r"unset it and data\.new_tokens$"):
        check_settings(config)


def test_files_with_more_or_less_than_the_settings_say_are_refused(tmp_path):
    drawn("moe").save_peft(tmp_path / "whole")
    adapted("lora.targets=*.attn.*", base=base_for("moe")).save_peft(tmp_path / "plain")
    words = ["lora.targets=*.attn.*", f"lora.path={tmp_path}/whole"]
    problem = r"lora\.modules_to_save: .*holds a whole embed\.weight; set embed_tokens,lm_head"
    with pytest.raises(ConfigError, match=problem):
        make_engine(*words, base=base_for("moe"), micro=MICRO)
    with pytest.raises(ConfigError, match=r"does not hold a whole embed\.weight; unset it"):
        make_engine(*words, BOTH, f"lora.path={tmp_path}/plain", base=base_for("moe"), micro=MICRO)


def test_tied_weights_that_peft_unties_are_refused(tmp_path):
    engine = drawn("dense")
    model = pefts(engine, "dense", tmp_path)
    model.peft_config["default"].ensure_weight_tying = False
    model.save_pretrained(tmp_path / "untied")
    file = tmp_path / "untied" / "adapter_model.safetensors"
    tensors = load_file(file)
    del tensors["base_model.model.lm_head.weight"]
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"alone, where this model's head is its embedding"):
        attach_peft(load_hf(tmp_path / "hf"), tmp_path / "untied")
