"""Tokenizers compared with Hugging Face's: first tokens of texts, and damaged files."""

import hashlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers, processors
from transformers.utils.chat_template_utils import render_jinja_template

from moetrain.config import Config, ConfigError
from moetrain.data import cache, sources
from moetrain.data.cache import TokenCache
from moetrain.data.chat import BadLineError, ChatTemplate
from moetrain.data.loader import build_data
from moetrain.data.tokenizer import ByteTokenizer, load_tokenizer
from tests.lib.tokenizer_files import WORDS, save, save_letters

BOS, EOS = WORDS.index("<s>"), WORDS.index("</s>")
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def template(single: str) -> processors.TemplateProcessing:
    specials = [(word, WORDS.index(word)) for word in ("<s>", "</s>", "[SEP]") if word in single]
    return processors.TemplateProcessing(single=single, special_tokens=specials)


POST_PROCESSORS = {
    "bos": (template("<s> $A"), (BOS,)),  # as in Llama's
    "bos and eos": (template("<s> $A </s>"), (BOS,)),
    "two": (template("<s> [SEP] $A"), (BOS, 3)),
    "eos": (template("$A </s>"), ()),
    "none": (None, ()),
    "roberta": (processors.RobertaProcessing(("</s>", EOS), ("<s>", BOS)), (BOS,)),
    "sequence": (processors.Sequence([processors.ByteLevel(), template("<s> $A")]), (BOS,)),
}


def text_source(path: Path) -> sources.Source:
    settings = {"source": "text", "path": str(path), "eval_fraction": 0}
    data = Config.load({"model": {"preset": "debug"}, "data": settings}, environ={}).data
    return sources.Source.of(data, ByteTokenizer())


@pytest.mark.parametrize("name", POST_PROCESSORS)
def test_texts_begin_as_hugging_faces_call_has_them_begin(tmp_path: Path, name: str):
    post, bos_ids = POST_PROCESSORS[name]
    folder = save(tmp_path / "t", post)
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.bos_ids == bos_ids
    peer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("a b", "[SEP] a", ""):
        theirs = peer(text)["input_ids"]
        if text or bos_ids:
            ours = tokenizer.encode_prompt(text)
            assert ours == theirs[: len(ours)]
    text = tmp_path / "one.txt"
    text.write_text("a b c")
    source = text_source(text)
    built = TokenCache.of(source, tokenizer, tmp_path / "cache")
    theirs = peer("a b c")["input_ids"]
    assert built.tokens.tolist() == theirs + [EOS] * (theirs[-1] != EOS)
    assert built.targets.tolist() == [len(built.tokens) - 1]


@pytest.mark.parametrize("begin", ["<s> ", "<s> [SEP] "])
def test_a_text_that_begins_with_its_bos_gets_no_second_one(tmp_path: Path, begin: str):
    """The right tokens are those of Hugging Face's call on the text without its own BOS."""
    folder = save(tmp_path / "t", template(f"{begin}$A"))
    tokenizer = load_tokenizer(str(folder))
    right = transformers.AutoTokenizer.from_pretrained(folder)("a b")["input_ids"]
    assert tokenizer.encode_prompt("a b") == tokenizer.encode_prompt(f"{begin}a b") == right
    path = tmp_path / "texts.jsonl"
    records: list[object] = [{"text": f"{begin}a b"}, {"text": "a b"}]
    records.insert(1, {"prompt": f"{begin}a ", "completion": "b"})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {"source": "jsonl", "path": str(path), "eval_fraction": 0}
    data = Config.load({"model": {"preset": "debug"}, "data": settings}, environ={}).data
    built = TokenCache.of(sources.Source.of(data, tokenizer), tokenizer, tmp_path / "cache")
    assert built.tokens.tolist() == [*right, EOS] * 3
    assert built.targets.tolist() == [len(right), 2, len(right)]


@pytest.mark.parametrize("trims", [True, False])
def test_blanks_at_the_end_of_what_is_learned_have_loss(tmp_path: Path, trims: bool):
    """All characters of the completion are learned, however offsets are trimmed."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = {letter: i for i, letter in enumerate(["Ċ", "Ġ", "a", "b", "</s>"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = level
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    record = {"prompt": "a ", "completion": " b \n "}
    (tmp_path / "texts.jsonl").write_text(json.dumps(record) + "\n")
    settings = {"source": "jsonl", "path": str(tmp_path / "texts.jsonl"), "eval_fraction": 0}
    data = Config.load({"model": {"preset": "debug"}, "data": settings}, environ={}).data
    loaded = load_tokenizer(str(tmp_path))
    built = TokenCache.of(sources.Source.of(data, loaded), loaded, tmp_path / "cache")
    assert built.tokens.tolist() == [2, 1, 1, 3, 1, 0, 1, 4]
    assert built.masked is not None
    assert built.masked.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


def test_bos_that_only_the_config_asks_for(tmp_path: Path):
    asked = load_tokenizer(str(save(tmp_path / "t", add_bos_token=True)))
    assert asked.bos_ids == (BOS,)
    other = load_tokenizer(str(save(tmp_path / "u", add_bos_token=False)))
    assert other.bos_ids == ()
    assert asked.fingerprint != other.fingerprint  # other tokens need another cache
    with pytest.raises(ConfigError, match=r"has no token '<bos>', its bos_token"):
        load_tokenizer(str(save(tmp_path / "v", add_bos_token=True, bos_token="<bos>")))


def test_special_tokens_that_an_older_checkpoint_names_in_a_file_of_their_own(tmp_path: Path):
    folder = save(tmp_path, eos_token=None)
    content = json.dumps({"eos_token": "<unk>", "bos_token": {"content": "</s>"}})
    (folder / "special_tokens_map.json").write_text(content)
    ours, theirs = load_tokenizer(str(folder)), transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.special_tokens["eos_token"] == theirs.eos_token == "<unk>"
    assert ours.special_tokens["bos_token"] == theirs.bos_token == "</s>"


def test_a_text_read_in_pieces_begins_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "_PART_BYTES", 16)
    monkeypatch.setattr(cache, "_BATCH_CHARACTERS", 40)
    for name in ("1.txt", "2.txt"):
        (tmp_path / name).write_text("a b c a b c\n" * 20)
    source = text_source(tmp_path)
    tokenizer = load_tokenizer(str(save(tmp_path / "t", template("<s> $A"))))
    tokens = TokenCache.of(source, tokenizer, tmp_path / "cache").tokens
    assert np.flatnonzero(tokens == BOS).tolist() == [0, 122]
    assert np.flatnonzero(tokens == EOS).tolist() == [121, 243]


@pytest.mark.parametrize(
    ("chat_template", "begins"),
    [
        ("{{ bos_token }} {% for m in messages %}{{ m.content }} {% endfor %}", [BOS, 4]),
        ("{% for m in messages %}{{ m.content }} {% endfor %}", [4, 5]),
        (None, [BOS, 0]),  # the built-in ChatML, whose markers are not in this vocabulary
    ],
)
def test_conversations_begin_as_their_template_says(
    tmp_path: Path, chat_template: str | None, begins: list[int]
):
    folder = save(tmp_path / "t", template("<s> $A"), chat_template=chat_template)
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": TURNS}) + "\n")
    settings = {"source": "jsonl", "path": str(path), "eval_fraction": 0, "seq_len": 8}
    settings |= {"cache_dir": str(tmp_path / "cache"), "tokenizer": str(folder)}
    config = Config.load({"model": {"preset": "debug"}, "data": settings})
    row = build_data(config, 20).train.row(0)
    assert row.tokens_S[:2].tolist() == begins
    if chat_template is not None:
        peer = transformers.AutoTokenizer.from_pretrained(folder)
        theirs = peer.apply_chat_template(TURNS, return_dict=False)
        assert row.tokens_S[: row.is_pad_S.argmax()].tolist() == [*theirs, EOS]
    assert row.targets_S[row.targets_S >= 0].tolist()[-1] == EOS


WRITES_EOS = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"


def test_a_template_writes_the_eos_of_bytes_as_in_transformers(tmp_path: Path):
    """It is a text of bytes like others. EOS itself ends the document."""
    for name, content in ByteTokenizer().export(WRITES_EOS).files.items():
        write(tmp_path, name, str(content))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    template = ChatTemplate(WRITES_EOS, ByteTokenizer().special_tokens)
    ((text, _),) = template.documents(TURNS)
    assert text == theirs.apply_chat_template(TURNS, tokenize=False)
    ids = ByteTokenizer().encode_batch([text])[0].ids.tolist()
    assert ids == theirs.apply_chat_template(TURNS, return_dict=False)


@pytest.mark.parametrize(
    ("template", "kwargs", "remedy"),
    [
        (
            WRITES_EOS.replace("m.content +", "bos_token + m.content +"),
            {"bos_token": "<s>"},
            "'bos_token' is undefined; name a tokenizer that has it in data.tokenizer or "
            'model.path, or set it in data.chat_template_kwargs, such as {"bos_token": "..."}',
        ),
        (
            WRITES_EOS.replace("m.content +", "(date + ' ' + m.content) +"),
            {"date": "today"},
            '\'date\' is undefined; set it in data.chat_template_kwargs, such as {"date": "..."}',
        ),
        ("{{ messages[0].name + '' }}", {}, "fails: 'dict object' has no attribute 'name'"),
    ],
)
def test_a_variable_that_is_not_defined_is_named_with_its_cure(
    template: str, kwargs: dict[str, str], remedy: str
):
    special = ByteTokenizer().special_tokens
    with pytest.raises(BadLineError) as error:
        ChatTemplate(template, special).documents(TURNS)
    assert str(error.value).endswith(remedy)
    if kwargs:
        cured = ChatTemplate(template, special, kwargs=kwargs)
        ((text, _),) = cured.documents(TURNS)
        given: dict[str, Any] = {**special, **kwargs}
        want, _ = render_jinja_template([TURNS], chat_template=template, **given)
        assert [text] == want
        assert cured.stops == ("<|endoftext|>",)


@pytest.mark.parametrize(("text", "problem"), [("", "has no tokens"), ("\udcff", "is not text")])
def test_prompts_that_nothing_can_be_sampled_from(tmp_path: Path, text: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        ByteTokenizer().encode_prompt(text)
    assert load_tokenizer(str(save(tmp_path / "t", template("<s> $A")))).encode_prompt("") == [BOS]


# Files that are wrong


def write(folder: Path, name: str, content: str | bytes) -> None:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def change(folder: Path, **fields: object) -> None:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def added(**fields: object) -> list[dict[str, object]]:
    token = {"id": 3, "content": "[SEP]", "single_word": False, "lstrip": False, "rstrip": False}
    return [token | {"normalized": False, "special": True} | fields]


def replace_by(folder: Path, name: str, target: str | None = None) -> None:
    """Return a function that replaces a file by a link to ``target``; None: by a folder."""
    (folder / name).unlink(missing_ok=True)
    if target is None:
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to(target)


EMPTY = {"type": "WordLevel", "vocab": {}, "unk_token": "<unk>"}
NO_UNK = {"type": "WordLevel", "vocab": {"</s>": 0}, "unk_token": "<unk>"}
DEEP = "[" * 100_000 + "]" * 100_000
WRONG = {
    "truncated": lambda f: write(f, "tokenizer.json", (f / "tokenizer.json").read_bytes()[:200]),
    "empty file": lambda f: write(f, "tokenizer.json", ""),
    "binary": lambda f: write(f, "tokenizer.json", os.urandom(1000)),
    "list": lambda f: write(f, "tokenizer.json", "[]"),
    "number": lambda f: write(f, "tokenizer.json", "1"),
    "deep": lambda f: write(f, "tokenizer.json", DEEP),
    "no model": lambda f: write(f, "tokenizer.json", "{}"),
    "model of no known type": lambda f: change(f, model={"type": "Magic"}),
    "model is a list": lambda f: change(f, model=[]),
    "no tokens": lambda f: change(f, model=EMPTY, added_tokens=[]),
    "id is negative": lambda f: change(f, added_tokens=added(id=-1)),
    "id is huge": lambda f: change(f, added_tokens=added(id=2**40, content="[NEW]")),
    "id is text": lambda f: change(f, added_tokens=added(id="3")),
    "vocabulary id is negative": lambda f: change(f, model=EMPTY | {"vocab": {"</s>": -2}}),
    "a panic in the library": lambda f: change(
        f, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    ),
    "a folder": lambda f: replace_by(f, "tokenizer.json"),
    "a device": lambda f: replace_by(f, "tokenizer.json", target="/dev/zero"),
    "a dangling link": lambda f: replace_by(f, "tokenizer.json", "gone"),
    "config is a dangling link": lambda f: replace_by(f, "tokenizer_config.json", "gone"),
    "config is a folder": lambda f: replace_by(f, "tokenizer_config.json"),
    "config is cut": lambda f: write(f, "tokenizer_config.json", '{"eos_token": "<'),
    "config is binary": lambda f: write(f, "tokenizer_config.json", b"\xff\xfe\x00"),
    "config is deep": lambda f: write(f, "tokenizer_config.json", DEEP),
    "config is a list": lambda f: write(f, "tokenizer_config.json", "[]"),
    "eos is a number": lambda f: save(f, eos_token=3),
    "eos is a list": lambda f: save(f, eos_token=["</s>"]),
    "eos is unknown": lambda f: save(f, eos_token="<stop>"),
    "bos has no content": lambda f: save(f, bos_token={"text": "<s>"}),
    "extra tokens are a number": lambda f: save(f, extra_special_tokens=3),
    "an extra token is a number": lambda f: save(f, extra_special_tokens=[3]),
    "added tokens are a list": lambda f: save(f, added_tokens_decoder=["</s>"]),
    "an added token has no id": lambda f: save(f, added_tokens_decoder={"x": {"content": "<x>"}}),
    "an added token is no token": lambda f: save(f, added_tokens_decoder={"9": {"lstrip": True}}),
    "a flag is text": lambda f: save(
        f, added_tokens_decoder={"9": {"content": "<x>", "lstrip": "no"}}
    ),
    "template is a number": lambda f: save(f, chat_template=3),
    "template is an object": lambda f: save(f, chat_template={"default": "x"}),
    "templates without default": lambda f: save(
        f, chat_template=[{"name": "rag", "template": "x"}]
    ),
    "templates are texts": lambda f: save(f, chat_template=["x"]),
    "template has no text": lambda f: save(f, chat_template=[{"name": "default"}]),
    "template is binary": lambda f: write(f, "chat_template.jinja", b"\xff\xfe"),
    "template is a folder": lambda f: replace_by(f, "chat_template.jinja"),
    "template is a dangling link": lambda f: replace_by(f, "chat_template.jinja", "gone"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files_are_one_line(tmp_path: Path, case: str):
    folder = save(tmp_path / "t")
    load_tokenizer(str(folder))  # it was intact
    WRONG[case](folder)
    settings = {"model": {"preset": "debug"}, "data": {"tokenizer": str(folder)}}
    settings["data"]["cache_dir"] = str(tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"^data\.tokenizer: ") as raised:
        build_data(Config.load(settings), 1000)
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize("name", ["", "\0", "x" * 5000, "a/b/c", "no such thing!"])
def test_names_of_no_tokenizer(name: str):
    with pytest.raises(ConfigError, match=r"^data\.tokenizer: "):
        load_tokenizer(name)


def test_a_text_that_the_tokenizer_cannot_encode(tmp_path: Path):
    """A word-level model without an unknown token raises at the first unknown word."""
    folder = save(tmp_path / "t")
    change(folder, model=NO_UNK, added_tokens=[])
    tokenizer = load_tokenizer(str(folder))
    with pytest.raises(ConfigError, match=r"data\.tokenizer: the tokenizer cannot encode a text: "):
        tokenizer.encode_batch(["a"])


def test_the_end_of_a_text_is_no_part_of_it(tmp_path):
    """transformers agrees, even if tokenizer.json does not call it special: our byte tokenizer."""
    for name, content in ByteTokenizer().export().files.items():
        (tmp_path / name).write_text(content)
    tokenizer = load_tokenizer(str(tmp_path))
    ids = [*"aé".encode(), tokenizer.eos_id]
    assert tokenizer.decode(ids) == ByteTokenizer().decode(ids) == "aé"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.decode(ids, skip_special_tokens=True) == "aé"
    assert tokenizer.decode(b"<|endoftext|>") == "<|endoftext|>"


def listed(content: str, **fields: bool) -> dict[str, object]:
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    return {"content": content} | flags | fields


def marked(content: str, **fields: bool) -> dict[str, object]:
    return {"__type": "AddedToken"} | listed(content, **fields)


DECODER = {"258": listed("<tool>"), "257": listed("</s>", special=True), "259": listed("<b>")}
ONLY_BESIDE: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "extra": ({"extra_special_tokens": ["<tool>", "<b>"]}, {}),
    "extra with flags": ({"extra_special_tokens": [marked("<tool>", lstrip=True), "<b>"]}, {}),
    "extra by name": ({"extra_special_tokens": {"tool_token": "<tool>"}}, {}),
    "a name of its own": ({"tool_token": "<tool>", "b_token": marked("<b>")}, {}),
    "additional": ({"additional_special_tokens": ["<tool>"]}, {}),
    "by id": ({"added_tokens_decoder": DECODER}, {}),
    "by id, extra and named": (
        {
            "added_tokens_decoder": DECODER,
            "extra_special_tokens": ["<c>", "<b>"],
            "pad_token": "<pad>",
            "bos_token": "<b>",
        },
        {},
    ),
    "in the vocabulary": ({"pad_token": "[PLAIN]"}, {}),
    "split": ({"extra_special_tokens": ["<tool>"], "split_special_tokens": True}, {}),
    "plain ones are not split": (
        {"added_tokens_decoder": DECODER, "split_special_tokens": True},
        {},
    ),
    "older files": (
        {},
        {
            "added_tokens": {"<tool>": 258, "<b>": 259},
            "special_tokens_map": {"additional_special_tokens": ["<b>", "<c>"], "pad_token": "<b>"},
        },
    ),
}


@pytest.mark.parametrize("case", ONLY_BESIDE)
def test_tokens_of_the_config_alone_have_the_ids_of_transformers(case: str, tmp_path: Path):
    config, files = ONLY_BESIDE[case]
    folder = save_letters(tmp_path / "t", config, **files)
    ours, theirs = load_tokenizer(str(folder)), transformers.AutoTokenizer.from_pretrained(folder)
    text = "a<tool>x </tool> <b> <tool><c> <pad>é [PLAIN]</s><|x|>"
    ids = ours.encode_prompt(text)
    assert ids == theirs(text)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocab_size == len(theirs)
    assert pickle.loads(pickle.dumps(ours)).encode_prompt(text) == ids  # in a stream's worker
    # Readers of tokenizer.json alone, such as grammars, have the same tokens.
    alone = tokenizers.Tokenizer.from_str(ours.whole_json())
    assert alone.get_vocab() == theirs.get_vocab()
    plain = save_letters(tmp_path / "plain", {})
    assert ours.fingerprint != load_tokenizer(str(plain)).fingerprint


def test_a_template_reads_the_names_that_a_model_gives_its_tokens(tmp_path: Path):
    config = {"extra_special_tokens": {"tool_token": "<tool>"}, "b_token": "<b>"}
    config["chat_template"] = "{{ tool_token }}{{ b_token }}{{ eos_token }}"
    folder = save_letters(tmp_path / "t", config)
    ours = load_tokenizer(str(folder)).special_tokens
    theirs = transformers.AutoTokenizer.from_pretrained(folder).special_tokens_map
    assert ours == theirs == {"eos_token": "</s>", "tool_token": "<tool>", "b_token": "<b>"}


def test_files_that_contradict_each_other_about_an_id_are_named(tmp_path: Path, caplog):
    decoder = {"257": listed("<tool>"), "400": listed("<b>")}
    load_tokenizer(str(save_letters(tmp_path / "t", {"added_tokens_decoder": decoder})))
    [line] = [r.getMessage() for r in caplog.records if "gives" in r.getMessage()]
    assert "'<tool>' the id 257" in line
    assert "gives it 258" in line
    assert line.endswith("(2 such)")


def test_tokens_of_the_config_that_the_model_has_no_row_for_are_refused(tmp_path: Path):
    folder = save_letters(tmp_path / "t", {"pad_token": "<pad>"})
    assert load_tokenizer(str(folder), 259).special_ids["pad_token"] == 258
    wanted = "more than the model's vocabulary of 258: tokenizer_config.json alone adds '<pad>' "
    with pytest.raises(ConfigError, match=wanted) as raised:
        load_tokenizer(str(folder), 258)
    remedy = "; remove these there, or set model.vocab_size 259, which gives each token a row"
    assert str(raised.value).endswith(remedy)
    write(folder, "tokenizer_config.json", '{"eos_token": "</s>"}')
    assert load_tokenizer(str(folder), 258).vocab_size == 258


def test_tokens_that_the_config_repeats_change_nothing(tmp_path: Path):
    """So caches and streams of earlier runs stay valid."""
    repeated = {"added_tokens_decoder": {"257": listed("</s>", special=True)}}
    plain, other = (
        load_tokenizer(str(save_letters(tmp_path / name, config)))
        for name, config in (("plain", {}), ("other", repeated))
    )
    assert plain.fingerprint == other.fingerprint
    content = (tmp_path / "plain" / "tokenizer.json").read_bytes()
    special = json.dumps([{"eos_token": "</s>"}, []], sort_keys=True).encode()
    assert plain.fingerprint == hashlib.sha256(content + special).hexdigest()
