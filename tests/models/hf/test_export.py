"""Complete exports: what a checkpoint holds beside our weights is written back unchanged."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import moetrain
from moetrain.config import ConfigError
from moetrain.data.tokenizer import ByteTokenizer, load_tokenizer
from moetrain.models.hf.config import architecture_from_hf
from moetrain.models.hf.files import CONFIG, GENERATION, INDEX, SINGLE, TokenizerFiles, write_files
from moetrain.models.hf.save import save_hf
from moetrain.models.transformer import Transformer
from moetrain.train.loop import Trainer
from tests.lib.exports import TEXT, make_tokenizer
from tests.lib.hf_configs import QWEN3_EXPERTS, SIZES
from tests.lib.hf_weights import assert_same_bits, tensors_in

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
VOCABULARY = 300


EXTRA = {
    "mtp.layers.0.mlp.gate.weight": torch.bfloat16,
    "model.visual.patch_embed.weight": torch.float32,
    "model.layers.3.eh_proj.weight": torch.float16,  # a layer of num_nextn_predict_layers
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.float32,
    "audio.steps": torch.int64,
}
ROUTERS = [f"model.layers.{i}.mlp.gate.weight" for i in range(3)]
COPIED = {
    "LICENSE": "do as you like",
    "README.md": "# a model",
    "preprocessor_config.json": '{"size": 3}',
    "modeling_own.py": "pass",
    "additional_chat_templates/tools.jinja": "tools",
}
LEFT = ("pytorch_model.bin", "optimizer.pt", ".gitattributes", "pytorch_model.bin.index.json")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Write a bf16 mixture of experts with fp32 routers, and all that a hub folder may hold."""
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe",
        **{**SIZES, "vocab_size": VOCABULARY, "head_dim": 8, "norm_topk_prob": True},
        **QWEN3_EXPERTS,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=0, eos_token_id=[3, 1], pad_token_id=2, do_sample=True, temperature=0.6
    )
    model.save_pretrained(folder)
    make_tokenizer(folder)
    tensors = load_file(folder / SINGLE)
    tensors |= {name: (tensors[name].float() + 1e-6) for name in ROUTERS}
    for name, dtype in EXTRA.items():
        tensors[name] = (torch.randn(4, 3) * 100).to(dtype)
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    change_json(folder / CONFIG, num_nextn_predict_layers=1, an_unknown_key={"a": [1, None]})
    (folder / "additional_chat_templates").mkdir()
    for name, text in COPIED.items():
        (folder / name).write_text(text)
    for name in LEFT:
        (folder / name).write_text("not to be copied")
    return folder


def change_json(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def read(path: Path):
    return json.loads(path.read_text())


def assert_complete(out: Path, source: Path) -> None:
    """Assert that ``out`` holds all of ``source``, weights and extra tensors bit for bit."""
    assert_same_bits(tensors_in(out), tensors_in(source))
    for name in (CONFIG, GENERATION):
        assert read(out / name) == read(source / name)
    names = {p.name for p in source.iterdir() if p.is_file()} - {*LEFT, SINGLE, *EXTRA}
    names -= {CONFIG, GENERATION, INDEX}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names
    for name in [*names, *COPIED]:
        assert (out / name).read_bytes() == (source / name).read_bytes(), name
    for name in LEFT:
        assert not (out / name).exists()


def greedy(model, prompt: list[int], num_tokens: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids


def assert_transformers_agrees(out: Path, ours) -> None:
    """Assert equal logits, and an equal greedy continuation of a prompt read by AutoTokenizer."""
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)
    prompt = tokenizer("the cat sat")["input_ids"]
    tokens_BS = torch.tensor([prompt])
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens_BS), theirs(tokens_BS).logits, rtol=1e-4, atol=1e-4)
    got = theirs.generate(
        tokens_BS, max_new_tokens=8, min_new_tokens=8, do_sample=False, use_cache=False
    )
    ends = theirs.generation_config.eos_token_id
    ids = greedy(ours, prompt, 8)
    # transformers draws no end before the eighth token
    assert not set(ids[len(prompt) :]) & set(ends if isinstance(ends, list) else [ends])
    assert got[0].tolist() == ids


def test_load_and_save_keep_everything(checkpoint, tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO", "moetrain")
    monkeypatch.chdir(checkpoint.parent)
    model = moetrain.load_hf(checkpoint.name)
    monkeypatch.chdir(tmp_path)
    assert "5 tensors are not trained here" in caplog.text
    assert all(name in caplog.text for name in EXTRA)
    moetrain.save_hf(model, tmp_path / "out")
    assert_complete(tmp_path / "out", checkpoint)
    assert_transformers_agrees(tmp_path / "out", model)
    # This can be repeated, also in shards, and over the folder itself.
    again = moetrain.load_hf(tmp_path / "out")
    save_hf(again, tmp_path / "out", max_shard_bytes=20_000)
    assert (tmp_path / "out" / INDEX).exists()
    moetrain.save_hf(again, tmp_path / "out")
    assert_complete(tmp_path / "out", checkpoint)


def test_a_run_from_a_checkpoint_exports_everything(checkpoint, tiny_words, tmp_path):
    """One step with a learning rate of 0 leaves all bits unchanged."""
    words = [w for w in tiny_words if not w.startswith("model.")]
    words += [f"model.path={checkpoint}", f"data.tokenizer={checkpoint}", "train.steps=1"]
    words += ["checkpoint.save_hf=yes", "optim.lr=1e-30", "train.sample_tokens=0"]
    trainer = Trainer(moetrain.Config.load(None, words, environ={}))
    trainer.fit()
    out = tmp_path / "out" / "hf"
    assert_complete(out, checkpoint)
    with trainer.engine.fsdp.work():
        assert_transformers_agrees(out, trainer.model.eval())


@pytest.mark.parametrize("keys", [[], ["dtype"], ["torch_dtype"], ["dtype", "torch_dtype"]])
def test_the_keys_that_say_the_dtype(keys, checkpoint, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    config = read(source / CONFIG)
    del config["dtype"]
    config |= dict.fromkeys(keys, "bfloat16")
    (source / CONFIG).write_text(json.dumps(config))
    model = moetrain.load_hf(source)
    for dtype in ("auto", "float32"):
        moetrain.save_hf(model, tmp_path / dtype, dtype=dtype)
        got = read(tmp_path / dtype / CONFIG)
        want = "bfloat16" if dtype == "auto" else dtype
        assert got == config | dict.fromkeys(keys or ["torch_dtype"], want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_dtype_that_was_asked_for(dtype, checkpoint, tmp_path):
    moetrain.save_hf(moetrain.load_hf(checkpoint), tmp_path, dtype=dtype)
    got, want = tensors_in(tmp_path), tensors_in(checkpoint)
    assert read(tmp_path / CONFIG)["dtype"] == dtype
    for name, tensor in want.items():
        expected = tensor if name in EXTRA else tensor.float().to(getattr(torch, dtype))
        assert_same_bits({name: got[name]}, {name: expected})


def test_a_weight_that_the_dtype_cannot_hold(checkpoint, tmp_path):
    model = moetrain.load_hf(checkpoint)
    with torch.no_grad():
        model.layers[1].attn.wq.weight[0, 0] = 7e4
    with pytest.raises(ConfigError, match=r"float16 cannot hold .*layers\.1.*q_proj.* 7e\+04") as e:
        moetrain.save_hf(model, tmp_path / "out", dtype="float16")
    assert e.value.field == "checkpoint.hf_dtype"
    assert not (tmp_path / "out").exists()
    moetrain.save_hf(model, tmp_path / "out")


def test_a_changed_architecture_is_written_over_the_sources(checkpoint, tmp_path):
    model = moetrain.load_hf(checkpoint)
    model.arch = model.arch.model_copy(update={"max_positions": 128, "rope_theta": 5e5})
    moetrain.save_hf(model, tmp_path)
    config = read(tmp_path / CONFIG)
    assert (config["max_position_embeddings"], config["rope_theta"]) == (128, 5e5)
    assert config["an_unknown_key"] == {"a": [1, None]}
    assert moetrain.load_hf(tmp_path).arch == model.arch
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"] == 5e5


# These tensors contradict config.json.
CONTRADICTIONS = [
    "model.layers.0.self_attn.q_proj.bias",
    "model.layers.0.mlp.experts.5.gate_proj.weight",
    "model.layers.0.mlp.gate.e_score_correction_bias",
    "model.layers.0.mlp.shared_expert.up_proj.weight",
    "model.layers.1.self_attn.k_proj.weight_scale_inv",
    # Num_nextn_predict_layers allows a fourth, but no fifth.
    "model.layers.4.self_attn.q_proj.weight",
    "model.layers.-1.x",
    "model.layers.9999999999999999999999.x",
    "model.norm.bias",
    "lm_head.bias",
]


def test_tensors_that_contradict_config_json_are_refused(checkpoint, tmp_path):
    for file in (CONFIG, SINGLE):
        shutil.copy(checkpoint / file, tmp_path / file)
    tensors = load_file(checkpoint / SINGLE)
    for name in CONTRADICTIONS:
        save_file({**tensors, name: torch.ones(2)}, tmp_path / SINGLE)
        with pytest.raises(ConfigError, match=r"config\.json; unexpected: ") as caught:
            moetrain.load_hf(tmp_path)
        assert name in caught.value.problem
    change_json(tmp_path / CONFIG, num_nextn_predict_layers=None)
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(ConfigError, match=r"unexpected: model\.layers\.3\.eh_proj\.weight$"):
        moetrain.load_hf(tmp_path)


@pytest.mark.parametrize("how", ["gone", "changed"])
def test_a_source_that_is_no_longer_there(how, checkpoint, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(checkpoint, source)
    model = moetrain.load_hf(source)
    if how == "gone":
        shutil.rmtree(source)
    else:
        save_file(tensors_in(checkpoint), source / SINGLE, {"format": "np"})
    with pytest.raises(ConfigError, match=r"gone or changed since it was read; .*mtp") as caught:
        moetrain.save_hf(model, out)
    assert caught.value.field == "model.path"
    assert str(source) in caught.value.problem
    own = {k: v for k, v in tensors_in(checkpoint).items() if k not in EXTRA}
    assert_same_bits(tensors_in(out), own)  # the trained weights are safe
    assert read(out / CONFIG) == read(checkpoint / CONFIG)


def test_a_tokenizer_that_is_no_longer_there(checkpoint, tmp_path):
    make_tokenizer(tmp_path / "tokenizer")
    files = load_tokenizer(str(tmp_path / "tokenizer")).export()
    shutil.rmtree(tmp_path / "tokenizer")
    model = moetrain.load_hf(checkpoint)
    model.source = None
    with pytest.raises(ConfigError, match=r"gone .* lacks .*tokenizer\.json") as caught:
        moetrain.save_hf(model, tmp_path / "out", tokenizer=files)
    assert caught.value.field == "data.tokenizer"
    assert moetrain.load_hf(tmp_path / "out").arch == model.arch


def test_an_export_removes_what_an_earlier_one_left(checkpoint, tmp_path):
    model = moetrain.load_hf(checkpoint)
    save_hf(model, tmp_path, max_shard_bytes=20_000)
    (tmp_path / "notes.txt").write_text("mine")
    # Left by a killed process.
    (tmp_path / ".model-00001-of-00007.safetensors.4711.tmp").write_text("half of it")
    (tmp_path / "model-00009-of-00009.safetensors").write_text("another program's weights")
    model.source = None
    moetrain.save_hf(model, tmp_path)
    files = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert files == {CONFIG, SINGLE, ".moetrain-export.json", "notes.txt"}
    assert {t.dtype for t in tensors_in(tmp_path).values()} == {torch.float32}


# Tokenizers that do not come with the weights.
def test_another_tokenizer_replaces_the_sources(checkpoint, tmp_path):
    make_tokenizer(tmp_path / "other", "quite another text, of other words")
    (tmp_path / "other" / "chat_template.jinja").unlink()
    tokenizer = load_tokenizer(str(tmp_path / "other"))
    ids = {"bos_token_id": None, "eos_token_id": 3, "pad_token_id": 2}
    files = TokenizerFiles(tokenizer.export().files, ids)
    moetrain.save_hf(moetrain.load_hf(checkpoint), tmp_path / "out", tokenizer=files)
    out = tmp_path / "out"
    assert (out / "tokenizer.json").read_bytes() == (
        tmp_path / "other" / "tokenizer.json"
    ).read_bytes()
    assert not (out / "chat_template.jinja").exists()
    assert not (out / "additional_chat_templates").exists()
    assert (out / "LICENSE").exists()
    config, generation = read(out / CONFIG), read(out / GENERATION)
    assert {k: config[k] for k in ids} == ids
    assert {k: generation.get(k) for k in ids} == ids
    assert generation["temperature"] == 0.6


def test_the_token_that_ended_documents_ends_generation(checkpoint, tmp_path):
    """With the same tokenizer and another end, only that id changes."""
    tokenizer = load_tokenizer(str(checkpoint))
    files = tokenizer.export()
    assert files.ids == {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    other = TokenizerFiles(files.files, {**files.ids, "eos_token_id": 7})
    moetrain.save_hf(moetrain.load_hf(checkpoint), tmp_path, tokenizer=other)
    assert read(tmp_path / CONFIG) == {**read(checkpoint / CONFIG), "eos_token_id": 7}
    want = {**read(checkpoint / GENERATION), "eos_token_id": 7}
    assert read(tmp_path / GENERATION) == want


def test_a_run_from_a_preset_exports_its_tokenizer(tiny_words, tmp_path):
    make_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "pytorch_model.bin").write_text("no part of a tokenizer")
    words = [
        *tiny_words,
        f"model.vocab_size={VOCABULARY + 4}",
        f"data.tokenizer={tmp_path / 'tokenizer'}",
        "train.steps=1",
        "train.sample_tokens=0",
        "checkpoint.save_hf=yes",
        "checkpoint.hf_dtype=bfloat16",
    ]
    trainer = Trainer(moetrain.Config.load(None, words, environ={}))
    trainer.fit()
    out = tmp_path / "out" / "hf"
    theirs = AutoTokenizer.from_pretrained(out)
    assert theirs(TEXT)["input_ids"] == trainer.data.tokenizer.encode_batch([TEXT])[0].ids.tolist()
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    assert read(out / GENERATION) == ids
    config = read(out / CONFIG)
    assert {k: config[k] for k in ids} == ids
    assert config["torch_dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert not (out / "pytorch_model.bin").exists()
    assert_transformers_agrees(out, moetrain.load_hf(out))


def test_the_chat_template_that_was_trained_with(tmp_path):
    make_tokenizer(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    chat = [{"role": "user", "content": "hello"}]
    for template, want in (
        (None, "<user>hello</s>"),
        (tokenizer.chat_template, "<user>hello</s>"),
        ("{{ messages[0].content }}!", "hello!"),
    ):
        write_files(tmp_path, tokenizer.export(template).files)
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        assert theirs.apply_chat_template(chat, tokenize=False) == want


def test_a_bare_tokenizer_json_is_completed(tmp_path):
    make_tokenizer(tmp_path / "from")
    (tmp_path / "my.json").write_bytes((tmp_path / "from" / "tokenizer.json").read_bytes())
    files = load_tokenizer(str(tmp_path / "my.json")).export()
    assert files.ids["eos_token_id"] == 1  # "</s>", guessed
    arch = architecture_from_hf({"model_type": "llama", **SIZES, "vocab_size": VOCABULARY})
    model = Transformer(arch)
    model.init_weights(std=0.1, seed=0)
    moetrain.save_hf(model, tmp_path / "out", tokenizer=files)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.eos_token_id == 1
    want = AutoTokenizer.from_pretrained(tmp_path / "from")
    assert theirs(TEXT)["input_ids"] == want(TEXT)["input_ids"]


def random_text(rng: random.Random) -> str:
    kinds = [(0, 0x80), (0x80, 0x800), (0x800, 0xD800), (0xE000, 0x10000), (0x10000, 0x110000)]
    words = ["<|endoftext|>", "  \n\t ", "\0", "é", "\u200d", " the"]
    length = rng.choice([0, 1, 2, 30, 500])
    return "".join(
        rng.choice(words) if rng.random() < 0.1 else chr(rng.randrange(*rng.choice(kinds)))
        for _ in range(length)
    )


def test_the_byte_tokenizer_is_exported_exactly(tmp_path):
    files = ByteTokenizer().export()
    for name, text in files.files.items():
        (tmp_path / name).write_text(text)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), ByteTokenizer()
    assert (theirs.eos_token_id, len(theirs)) == (ours.eos_id, ours.vocab_size)
    backend, rng = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), random.Random(0)
    for _ in range(200):
        text = random_text(rng)
        want = ours.encode_batch([text])[0].ids.tolist()
        assert theirs(text)["input_ids"] == want
        assert backend.encode(text).ids == want
        assert load_tokenizer(str(tmp_path)).encode_batch([text])[0].ids.tolist() == want
        ids = [rng.randrange(257) for _ in range(20)]
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
