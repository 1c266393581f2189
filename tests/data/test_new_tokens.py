"""New tokens: their rows equal those of transformers' resized model; files; every mesh."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from moetrain.cli.checkpoint import main as checkpoint_command
from moetrain.config import Config, ConfigError
from moetrain.data.tokenizer import load_tokenizer
from moetrain.train.loop import Trainer
from moetrain.train.session import resolve_run
from tests.lib.distributed import spawn
from tests.lib.engines import make_batches, make_engine, objective_of, weights_of
from tests.lib.exports import TEMPLATE, TEXT
from tests.lib.new_tokens import BASE, NEW, make_checkpoint, words_for

TOKENS_BS = torch.arange(38).view(2, 19) * 7  # old and new tokens: 0 to 259


@pytest.mark.parametrize("tied", [False, True])
def test_rows_are_those_of_a_model_that_transformers_resized(tied, tmp_path):
    count = make_checkpoint(tmp_path / "old", tied=tied)
    engine = make_engine(base=words_for(tmp_path / "old"))
    tokenizer = load_tokenizer(str(tmp_path / "old"), new_tokens=NEW)
    engine.save_hf(tmp_path / "new", tokenizer=tokenizer.export())

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "old")
    before = model.get_input_embeddings().weight.detach().clone()
    model.resize_token_embeddings(count + 3, mean_resizing=True)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "new", output_loading_info=True)
    assert not any(info.values())
    assert again.config.vocab_size == engine.arch.vocab_size == count + 3
    assert again.config.eos_token_id == [1, 3]
    theirs = dict(model.named_parameters())
    for name, weight in again.named_parameters():
        # transformers draws new rows around the mean with 3e-5 of the others' standard deviation.
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=1e-5, msg=name)
    embedding = again.get_input_embeddings().weight
    assert torch.equal(embedding[:count], before)
    mean_D = before.double().mean(0).float()
    assert torch.equal(embedding[count:], mean_D.expand(3, -1))
    tokens = torch.cat((TOKENS_BS.flatten(), torch.tensor([count, count + 1, count + 2])))[None]
    with torch.no_grad(), engine.work():
        ours = engine.model(tokens)
        torch.testing.assert_close(ours, again(tokens).logits, rtol=0, atol=1e-5)
        theirs = model(tokens).logits
        close = {"rtol": 0, "atol": 1e-5}
        torch.testing.assert_close(ours[:, :-3, :count], theirs[:, :-3, :count], **close)
        # The norm of a small mean enlarges transformers' random deviation from it.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)


def test_texts_are_read_as_by_the_tokenizer_that_transformers_extended(tmp_path):
    count = make_checkpoint(tmp_path / "old")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "old")
    theirs.add_special_tokens({"extra_special_tokens": NEW})
    ours = load_tokenizer(str(tmp_path / "old"), count + 3, NEW)
    make_engine(base=words_for(tmp_path / "old")).save_hf(tmp_path / "new", tokenizer=ours.export())
    again = AutoTokenizer.from_pretrained(tmp_path / "new")
    text = "the cat<|tool|>sat <|result|> on<|tool|><|over|></s>"
    wanted = theirs(text, add_special_tokens=False).input_ids
    assert {count, count + 1, count + 2} < set(wanted)
    assert ours.encode_batch([text])[0].ids.tolist() == wanted
    assert again(text, add_special_tokens=False).input_ids == wanted
    for skip in (False, True):
        decoded = theirs.decode(wanted, skip_special_tokens=skip)
        assert ours.decode(wanted, skip_special_tokens=skip) == decoded
        assert again.decode(wanted, skip_special_tokens=skip) == decoded
    assert len(again) == len(theirs) == ours.vocab_size
    assert again.eos_token == "</s>"
    # A run with the same settings that begins from there adds none.
    later = load_tokenizer(str(tmp_path / "new"), count + 3, NEW)
    assert later.encode_batch([text])[0].ids.tolist() == wanted
    plain = load_tokenizer(str(tmp_path / "old"))
    assert len({plain.fingerprint, ours.fingerprint}) == 2


def test_rows_that_are_there_are_taken(tmp_path):
    count = make_checkpoint(tmp_path, rows=300)
    engine = make_engine(base=words_for(tmp_path))
    assert engine.arch.vocab_size == 300
    stored = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(weights_of(engine)["embed.weight"], stored)
    ids = load_tokenizer(str(tmp_path), 300, NEW).encode_batch(["".join(NEW)])[0].ids
    assert ids.tolist() == [count, count + 1, count + 2]


def test_a_tokenizer_that_has_them_and_rows_for_more(tmp_path):
    """The tokenizer was extended by ``transformers``, with rows rounded up to a multiple."""
    make_checkpoint(tmp_path / "old")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "old")
    tokenizer.add_special_tokens({"extra_special_tokens": NEW})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    words = [*BASE, f"model.path={tmp_path}/old", f"data.tokenizer={tmp_path}/tokenizer"]
    (tmp_path / "a.txt").write_text(TEXT)
    words += [f"data.path={tmp_path}/a.txt"]
    with pytest.raises(
        ConfigError, match=r"data\.tokenizer: .*has (\d+) tokens.*model\.vocab_size \1,"
    ):
        Trainer(Config.load(None, words, environ={}))
    engine = make_engine("model.vocab_size=320", base=words)
    assert engine.model.embed.weight.shape == engine.model.lm_head.weight.shape == (320, 16)


def learn(words: list[str]):
    """Return the first weights, those after a step, and the step's losses and norm."""
    engine = make_engine(base=words, micro=2)
    before = weights_of(engine)
    world = engine.world
    batches = make_batches(0, 2, world.data_rank, world.dims.data_ranks)
    top = engine.arch.vocab_size - 50  # tokens 0 to 49, the last of which are new
    batches = [b._replace(tokens_BS=b.tokens_BS + top, targets_BS=shifted(b, top)) for b in batches]
    totals = engine.forward_backward(batches, objective_of(engine))
    norm, _ = engine.step(1e-2)
    return before, totals.total.item(), norm.item(), weights_of(engine)


def shifted(batch, top):
    return torch.where(batch.targets_BS < 0, batch.targets_BS, batch.targets_BS + top)


def learn_all(runs):
    return {name: learn(words) for name, words in runs.items()}


@pytest.mark.tier("long")
def test_every_mesh_begins_from_the_same_bits_and_learns_the_same(tmp_path):
    runs, wanted = {}, {}
    for kind, tied in (("tied", True), ("apart", False)):
        make_checkpoint(tmp_path / kind, tied=tied)
        wanted[kind] = learn(words_for(tmp_path / kind))
        for axis in ("tp", "pp" if tied else "dp_shard"):
            runs[f"{kind} {axis}"] = words_for(tmp_path / kind, f"parallel.{axis}=2")
    for answers in spawn(2, learn_all, runs, timeout=200):
        for name, (before, total, norm, after) in answers.items():
            begun, *numbers, ended = wanted[name.split()[0]]
            assert all(torch.equal(x, begun[n]) for n, x in before.items()), name
            assert [total, norm] == pytest.approx(numbers, rel=1e-5), name
            for parameter in ("embed.weight", "lm_head.weight"):
                if parameter in ended:
                    moved = (ended[parameter] - begun[parameter])[-3:]
                    assert moved.norm(dim=1).min() > 1e-3  # new tokens are learned
                    close = {"rtol": 0, "atol": 1e-4}
                    torch.testing.assert_close(after[parameter], ended[parameter], **close)


def test_a_run_on_chats_with_new_tokens(tmp_path):
    """The run is trained, stopped, resumed and exported, and transformers loads both exports."""
    count = make_checkpoint(tmp_path / "old", tied=True)
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    (tmp_path / "a.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 16)
    (tmp_path / "t.jinja").write_text(
        TEMPLATE.replace("<{{", "<|tool|>{{").replace(">{{ m.c", "{{ m.c")
    )
    words = [
        w for w in words_for(tmp_path / "old") if not w.startswith(("data.", "output", "train.g"))
    ]
    words += [
        f"data.path={tmp_path}/a.jsonl",
        f"data.new_tokens={','.join(NEW)}",
        "data.seq_len=32",
    ]
    words += [f"data.chat_template={tmp_path}/t.jinja", f"data.cache_dir={tmp_path}/cache"]
    words += ["train.micro_batch_size=2", "train.global_batch_size=2", "train.sample_tokens=2"]
    words += ["train.epochs=None", "optim.lr=0.01", "checkpoint.interval=1", "log.tensorboard=no"]

    def run(folder: str, steps: int) -> Path:
        given = [*words, f"output_dir={tmp_path / folder}", f"train.steps={steps}"]
        Trainer(Config.load(None, given, environ={})).fit()
        return tmp_path / folder

    whole = run("whole", 2)
    run("parts", 1)
    parts = run("parts", 2)
    assert checkpoint_command(["export-hf", str(whole), str(tmp_path / "later")]) == 0
    exports = [
        load_file(f / "model.safetensors") for f in (whole / "hf", parts / "hf", tmp_path / "later")
    ]
    for other in exports[1:]:
        assert all(torch.equal(x, other[name]) for name, x in exports[0].items())
    stored = load_file(tmp_path / "old" / "model.safetensors")["model.embed_tokens.weight"]
    embedding = exports[0]["model.embed_tokens.weight"]
    mean_D = stored.double().mean(0).float()
    assert (embedding[count] - mean_D).norm() > 1e-3
    for folder in (whole / "hf", tmp_path / "later"):
        model, tokenizer = (
            kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer)
        )
        assert model.config.vocab_size == len(tokenizer) == count + 3
        assert tokenizer("".join(NEW), add_special_tokens=False).input_ids[0] == count
    tokenizer = AutoTokenizer.from_pretrained(whole / "hf")
    ids = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
    assert ids.count(count) == 2


def test_tensors_that_are_carried_on_get_rows_too(tmp_path):
    """In some files MTP blocks have copies of embedding and head."""
    count = make_checkpoint(tmp_path / "old")
    file = tmp_path / "old" / "model.safetensors"
    copy = "model.layers.2.embed_tokens.weight"
    tensors = load_file(file)
    tensors |= {
        copy: tensors["model.embed_tokens.weight"].bfloat16(),
        "mtp.x": torch.ones(count, 2),
    }
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    make_engine(base=words_for(tmp_path / "old")).save_hf(tmp_path / "new")
    written = load_file(tmp_path / "new" / "model.safetensors")
    assert torch.equal(written["mtp.x"], tensors["mtp.x"])
    assert written[copy].dtype == torch.bfloat16
    assert torch.equal(written[copy][:count], tensors[copy])
    mean_D = tensors[copy].double().mean(0).bfloat16()
    assert torch.equal(written[copy][count:], mean_D.expand(3, -1))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["model.vocab_size=99"], r"model\.vocab_size: 99, but model.path .* has \d+ rows .*unset"),
        (["data.tokenizer=byte"], r"data\.new_tokens: .*is 'byte', which has bytes alone; name"),
        (["lora.rank=8"], r"data\.new_tokens: .* contradicts lora\.rank 8"),
        (["data.new_tokens=<a>,<a>"], r"data\.new_tokens: .*names a token twice"),
        (["data.source=synthetic"], r"data\.new_tokens: .* contradicts data\.source 'synthetic'"),
    ],
)
def test_bad_new_tokens_are_refused_in_one_line(words, problem, tmp_path):
    make_checkpoint(tmp_path)
    if "data.source=synthetic" in words:
        words = [*words, "data.path=None"]
    with pytest.raises(ConfigError, match=problem):
        resolve_run(Config.load(None, words_for(tmp_path, *words), environ={}))


def test_a_tokenizer_that_splits_special_tokens_takes_none(tmp_path):
    make_checkpoint(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"split_special_tokens": True}))
    with pytest.raises(ConfigError, match=r"data\.new_tokens: .* sets split_special_tokens"):
        load_tokenizer(str(tmp_path), new_tokens=NEW)


def test_files_with_fewer_rows_than_their_config_says_are_refused(tmp_path):
    count = make_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": count + 3}))
    with pytest.raises(ConfigError, match=r"of another shape: model\.embed_tokens"):
        make_engine(base=words_for(tmp_path))
