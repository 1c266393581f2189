"""Rows of single tokens trained beside adapters: PEFT's gradients and logits, on every mesh."""

import json

import pytest
import torch

from moetrain.config import Config, ConfigError
from moetrain.data.tokenizer import load_tokenizer
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.peft import attach_peft
from moetrain.models.rules import ADAPTER
from moetrain.train.loop import Trainer
from moetrain.train.session import resolve_run
from tests.lib.adapter_files import TOKENS_BS
from tests.lib.adapters import MICRO, adapted, base_of, compare, learn, value_of
from tests.lib.distributed import spawn
from tests.lib.engines import copy_of, make_batches, make_engine, objective_of, train, weights_of
from tests.lib.new_tokens import NEW, make_checkpoint, words_for
from tests.lib.whole_modules import base_for, check_logits, gradients_beside, pefts

peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")

IDS = [3, 7, 8, 19, 41]
WORDS = ["lora.targets=*.attn.wq", f"lora.trainable_tokens={','.join(map(str, reversed(IDS)))}"]
MATRICES = {"embed.weight": "model.embed_tokens", "lm_head.weight": "lm_head"}


def drawn(name, *words):
    """Return an engine whose adapters and rows differ from those of its base."""
    engine = adapted(*WORDS, *words, base=base_for(name))
    for parameter in MATRICES.keys() & engine.stages.trained.keys():
        shape = engine.stages.table[parameter].shape
        for token in IDS:
            value = value_of(f"{parameter}{token}", shape[1:])[None]
            engine.fsdp.write(parameter, (slice(token, token + 1),), value)
    return engine


@pytest.mark.parametrize("name", ["moe", "dense"])
def test_logits_and_gradients_are_pefts(name, tmp_path):
    engine = drawn(name)
    model = pefts(engine, name, tmp_path)
    check_logits(engine, model, tmp_path, atol=1e-4, apart=0.5)
    theirs, ours = gradients_beside(engine, model)
    theirs = {n: x for n, x in theirs.items() if "delta" in n}
    rows = {n: x for n, x in ours.items() if not n.endswith(ADAPTER)}
    assert len(rows) == len(theirs) == (2 if name == "moe" else 1)
    for parameter, gradient in rows.items():
        (wanted,) = (x for n, x in theirs.items() if f".{MATRICES[parameter]}." in n)
        assert (gradient[IDS] - wanted).norm() <= 1e-4 * wanted.norm(), parameter
        gradient[IDS] = 0
        assert not gradient.any()


def test_other_rows_stay_bit_for_bit_and_a_run_goes_on(tmp_path):
    words = [*WORDS, "optim.weight_decay=0.1"]
    engine = drawn("moe", "optim.weight_decay=0.1")
    before = weights_of(engine)
    train(engine, range(2), MICRO)
    after = weights_of(engine)
    others = [i for i in range(50) if i not in IDS]
    for name in MATRICES:
        assert torch.equal(after[name][others], before[name][others])
        assert (after[name][IDS] - before[name][IDS]).norm(dim=1).min() > 1e-3
    state = copy_of(engine.state())
    again = make_engine(*words, base=base_for("moe"), micro=MICRO)
    again.load_state(state)
    assert train(again, range(2, 4), MICRO) == train(engine, range(2, 4), MICRO)
    engine.save_peft(tmp_path)
    later = make_engine(*words, f"lora.path={tmp_path}", base=base_for("moe"), micro=MICRO)
    mine = weights_of(engine)
    for name, weight in weights_of(later).items():
        assert torch.equal(weight, mine[name]), name


def learn_all(runs):
    return {key: learn([*WORDS, *words], base_of(key[0])) for key, words in runs.items()}


@pytest.mark.tier("long")
def test_every_mesh_learns_the_same():
    axes = {"moe": (("tp", "ep"), ("dp_shard",)), "dense": (("tp",), ("pp",))}
    runs = {(name, axis): [f"parallel.{x}=2" for x in axis] for name in axes for axis in axes[name]}
    expected = {name: learn(WORDS, base_of(name)) for name in axes}
    for answers in spawn(2, learn_all, runs, timeout=200):
        for (name, axis), answer in answers.items():
            compare(axis, answer, expected[name])


@pytest.mark.parametrize("tied", [True, False])
def test_new_tokens_alone_are_learned(tied, tmp_path):
    count = make_checkpoint(tmp_path / "old", tied=tied)
    words = ["lora.rank=8", "lora.targets=*.attn.*", f"lora.trainable_tokens={','.join(NEW)}"]
    words = words_for(tmp_path / "old", *words)
    config, _ = resolve_run(Config.load(None, words, environ={}))
    assert config.lora.token_ids == (count, count + 1, count + 2)
    engine = make_engine(base=words, micro=2)
    begun = weights_of(engine)["embed.weight"]
    batches = [
        b._replace(tokens_BS=b.tokens_BS + count - 47, targets_BS=b.targets_BS.clamp(min=0))
        for b in make_batches(0, 2)
    ]
    engine.forward_backward(batches, objective_of(engine))
    engine.step(1e-2)
    ended = weights_of(engine)["embed.weight"]
    assert torch.equal(ended[:count], begun[:count])
    assert (ended - begun)[count:].norm(dim=1).min() > 1e-3
    engine.save_peft(tmp_path / "adapter")
    load = transformers.AutoModelForCausalLM.from_pretrained
    base = load(tmp_path / "old", dtype=torch.float32)
    base.resize_token_embeddings(count + 3)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    tokens = torch.tensor([[1, 2, 3, count, count + 1, 7, count + 2]])
    with torch.no_grad(), engine.work():
        torch.testing.assert_close(engine.model(tokens), model(tokens).logits, rtol=0, atol=1e-5)
    assert load_tokenizer(str(tmp_path / "old"), count + 3, NEW).vocab_size == count + 3


def test_a_run_writes_adapters_with_the_tokenizer(tmp_path):
    """They are loaded as docs/finetune.md says, and equal the merged model."""
    make_checkpoint(tmp_path / "old", tied=True)
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": NEW[0]}]
    (tmp_path / "a.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 16)
    words = ["train.device=cpu", "compile.enabled=no", f"model.path={tmp_path}/old"]
    words += [f"data.path={tmp_path}/a.jsonl", f"data.new_tokens={','.join(NEW)}"]
    words += ["data.seq_len=32", "lora.rank=4", f"lora.trainable_tokens={','.join(NEW)}"]
    words += [f"data.cache_dir={tmp_path}/cache", "train.sample_tokens=2", "optim.lr=0.1"]
    words += ["train.micro_batch_size=2", "train.global_batch_size=2", "log.tensorboard=no"]
    words += ["train.epochs=None", "train.steps=3", f"output_dir={tmp_path}/out"]
    Trainer(Config.load(None, words, environ={})).fit()
    adapter, load = tmp_path / "out" / "adapter", transformers.AutoModelForCausalLM.from_pretrained
    tokenizer = transformers.AutoTokenizer.from_pretrained(adapter)
    model = load(tmp_path / "old", dtype=torch.float32)
    assert len(tokenizer) > model.get_input_embeddings().num_embeddings
    model.resize_token_embeddings(len(tokenizer))
    model = peft.PeftModel.from_pretrained(model, adapter)
    merged = load(tmp_path / "out" / "hf", dtype=torch.float32)
    tokens = torch.tensor([tokenizer(f"the cat{''.join(NEW)}").input_ids])
    assert tokens.max() == len(tokenizer) - 1
    torch.testing.assert_close(merged(tokens).logits, model(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["lora.trainable_tokens=<|none|>"], r"'<\|none\|>' is \d+ tokens .* to data\.new_tokens"),
        (["lora.trainable_tokens=1,5000"], r"'5000', but the model's tokens are 0 to \d+; leave"),
        (
            ["lora.trainable_tokens=3"],
            r"rows of the other new tokens <\|tool\|>, <\|r.* would not be trained; name these",
        ),
        (
            ["lora.modules_to_save=lm_head"],
            r"trainable_tokens: .* contradicts lora\.mod",
        ),
        (
            ["optim.offload_fraction=0.5"],
            r"trainable_tokens: .*contradicts optim",
        ),
    ],
)
def test_bad_lora_tokens_are_refused_in_one_line(words, problem, tmp_path):
    make_checkpoint(tmp_path)
    base = words_for(tmp_path, "lora.rank=8", f"lora.trainable_tokens={','.join(NEW)}")
    with pytest.raises(ConfigError, match=problem):
        resolve_run(Config.load(None, [*base, *words], environ={}))


def test_files_of_other_tokens_are_refused(tmp_path):
    drawn("moe").save_peft(tmp_path)
    words = [*WORDS, f"lora.path={tmp_path}", "lora.trainable_tokens=3"]
    with pytest.raises(ConfigError, match=r"lora\.trainable_tokens: .*rows of other tokens"):
        make_engine(*words, base=base_for("moe"), micro=MICRO)


def warnings_of(caplog, words):
    caplog.clear()
    resolve_run(Config.load(None, words, environ={}))
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_new_tokens_that_stay_as_they_begin_are_told(tied, tmp_path, caplog):
    count = make_checkpoint(tmp_path / "old", tied=tied)
    both = "embed_tokens" if tied else "embed_tokens,lm_head"
    base = words_for(tmp_path / "old", "lora.rank=8")
    assert not warnings_of(caplog, [*base, f"lora.modules_to_save={both}"])
    if not tied:
        (said,) = warnings_of(caplog, [*base, "lora.modules_to_save=embed_tokens"])
        assert said.startswith(f"rows of the new tokens {', '.join(NEW)} are not trained in lm_")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "old")
    tokenizer.add_tokens(["more", "yet more"])
    tokenizer.save_pretrained(tmp_path / "more")
    base = [w for w in base if not w.startswith("data.new_tokens")]
    base += [f"data.tokenizer={tmp_path}/more", f"model.vocab_size={count + 8}"]
    (said,) = warnings_of(caplog, base)
    assert f"new tokens {count}, {count + 1} are not trained in embed_tokens" in said
    assert said.endswith(
        f"lora.modules_to_save {both}, or name the tokens in lora.trainable_tokens"
    )
    assert not warnings_of(caplog, [*base, f"lora.trainable_tokens={count},{count + 1}"])
    assert not warnings_of(caplog, [*base, "lora.rank=0"])
    with pytest.raises(ConfigError, match=rf"other new tokens {count + 1} would not"):
        resolve_run(Config.load(None, [*base, f"lora.trainable_tokens={count}"], environ={}))


def test_files_of_tokens_that_the_model_has_not_say_so(tmp_path):
    make_checkpoint(tmp_path / "old", tied=True)
    words = ["lora.rank=8", "lora.targets=*.attn.*", f"lora.trainable_tokens={','.join(NEW)}"]
    engine = make_engine(base=words_for(tmp_path / "old", *words), micro=2)
    engine.save_peft(tmp_path / "adapter")
    wanted = r"has \d+ tokens: the adapter was trained with new tokens; use its merged model, or "
    with pytest.raises(ConfigError, match=wanted):
        attach_peft(load_hf(tmp_path / "old"), tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    settings = json.loads(file.read_text())
    for odd in (5, "3,4", {"embed_tokens": [True]}, {"norm": [3]}, [-1]):
        file.write_text(json.dumps({**settings, "trainable_token_indices": odd}))
        with pytest.raises(ConfigError, match=r"trainable_token_indices is .*, not tokens"):
            attach_peft(load_hf(tmp_path / "old"), tmp_path / "adapter")


@pytest.mark.parametrize("how", [{"modules_to_save": ["embed_tokens"]}, {}])
def test_what_peft_saves_of_a_resized_embedding_is_refused_with_a_remedy(how, tmp_path):
    """The remedy works: the same adapters, saved as it says, are read."""
    count = make_checkpoint(tmp_path / "old", tied=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "old")
    base.resize_token_embeddings(count + 3)
    how = how or {"trainable_token_indices": [*range(count, count + 3)]}
    how |= {"ensure_weight_tying": True, "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 8}
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, **how)
    model = peft.get_peft_model(base, config)
    model.save_pretrained(tmp_path / "adapter")
    words = words_for(tmp_path / "old", "lora.rank=8", "lora.alpha=8", "lora.targets=*.wq")
    is_whole = "modules_to_save" in how
    words += [f"lora.path={tmp_path}/adapter"]
    words += (
        ["lora.modules_to_save=embed_tokens"]
        if is_whole
        else [f"lora.trainable_tokens={','.join(NEW)}"]
    )
    with pytest.raises(ConfigError, match=r"; save it in PEFT with save_embedding_layers=False"):
        make_engine(base=words, micro=2)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    engine = make_engine(base=words, micro=2)
    with torch.no_grad(), engine.work():
        want = model(TOKENS_BS).logits
        torch.testing.assert_close(engine.model(TOKENS_BS), want, rtol=0, atol=1e-3)
