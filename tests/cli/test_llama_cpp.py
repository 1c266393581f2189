"""``export-gguf``: llama.cpp itself computes what moetrain and transformers do."""

import pytest
import torch
import transformers
from check_llama_cpp import compare, llama_cpp
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from moetrain import Generator
from moetrain.cli import generate
from moetrain.cli.checkpoint import main
from moetrain.generate.engine import load_model
from tests.lib.exports import make_tokenizer
from tests.lib.gguf_models import CASES, LLAMA3, YARN, write

gguf = pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")

MODELS = {case: (case, {}) for case in CASES} | {
    "llama 3.1": ("llama", {"rope_parameters": YARN | LLAMA3 | {"rope_type": "llama3"}}),
    "llama, linear": ("llama", {"rope_parameters": YARN | {"rope_type": "linear"}}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": YARN}),
}
"""Model types, and sizes of configs in addition to those of :data:`CASES`."""
PROMPTS = [
    "the cat sat",
    "a dog 3 times.",
    "on a mat.\n\n  a dog and the cat sat down, 3 times. <|im_end|> it's 12345, naïve 中文 🙂",
]


def export(case, folder, **sizes):
    """Write a random model whose likeliest tokens are printable, and export it; return the file."""
    model = write(case, folder, num_hidden_layers=4, **sizes)
    with_decoder(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = tokenizer.batch_decode([[i] for i in range(SIZE)], skip_special_tokens=True)
    is_dull = [not text or not text.isascii() or not text.isprintable() for text in texts]
    with torch.no_grad():
        model.get_output_embeddings().weight[is_dull] = 0.0  # the logit 0 is never the largest
    model.save_pretrained(folder)
    file = folder / "model.gguf"
    assert main(["export-gguf", str(folder), str(file), "--gguf_type", "f32"]) == 0
    return file


SIZE = 290
"""The vocabulary of the models."""


def with_decoder(folder):
    """Let the tokenizer decode bytes."""
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(file))


@pytest.mark.tier("long")
@pytest.mark.parametrize("case", MODELS)
def test_llama_cpp_continues_as_moetrain(case, tmp_path, capsys):
    kind, sizes = MODELS[case]
    file = export(kind, tmp_path, **sizes)
    model, tokenizer = load_model(str(tmp_path), "cpu", "float32")
    with llama_cpp(file, context=128) as theirs:
        rows = compare(Generator(model, tokenizer), theirs, PROMPTS, 40)
        text = theirs.continued(PROMPTS[0], 40).text
    for row in rows:
        assert row.same_prompt
        assert row.same_text
        assert row.margin is None
        assert row.compared == 40
        assert row.logprob < 1e-4  # both compute in fp32
    words = ["--temperature", "0", "--max_tokens", "40", "--device", "cpu", "--dtype", "float32"]
    capsys.readouterr()
    assert generate.main([str(tmp_path), "--prompt", PROMPTS[0], *words]) == 0
    assert capsys.readouterr().out == text + "\n"


_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_QWEN = rf"{_SHORT}|{_FIRST}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_ENDS}"
SPLITS = {
    "gpt-2": None,
    "smollm": pre_tokenizers.Digits(individual_digits=True),
    "qwen2": _QWEN,
    "llama-bpe": _QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),
    "gpt-4o": rf"{_FIRST}{_UPPER}*{_LOWER}+{_SHORT}?|{_FIRST}{_UPPER}+{_LOWER}*{_SHORT}?|"
    rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}",
}
"""The published tokenizers' splits, by llama.cpp's names."""
TEXTS = [
    "It's 1234567 o'clock, we'VE  spaces\tand tabs \n\n  and\r\nlines",
    "Ein Café in Zürich: ΑΒΓ, русский текст, 中文字 🙂👩‍👩‍👧 x²",
    "def f(x):\n    return x**2  # HTTPServer camelCase //path/\n\n\n",
    "a <|im_end|> b</s> <pad>",
    " ",
    "   leading and trailing   ",
]


@pytest.mark.parametrize("split", SPLITS)
def test_llama_cpp_splits_texts_as_the_tokenizer(split, tmp_path):
    write("qwen3", tmp_path, vocab_size=600, num_hidden_layers=1)
    tokenizer = retrained(tmp_path, split)
    file = tmp_path / "model.gguf"
    assert main(["export-gguf", str(tmp_path), str(file)]) == 0
    with llama_cpp(file, context=128) as theirs:
        for text in TEXTS:
            assert theirs.tokens(text) == tokenizer.encode(text).ids, text


def retrained(folder, split):
    """Write a tokenizer with the split of this name, and return it."""
    first = SPLITS[split]
    if isinstance(first, str):
        first = pre_tokenizers.Split(Regex(first), "isolated")
    last = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=first is None or split == "smollm"
    )
    backend = Tokenizer(models.BPE(ignore_merges=split == "llama-bpe"))
    backend.pre_tokenizer = last if first is None else pre_tokenizers.Sequence([first, last])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>", "<pad>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    make_tokenizer(folder)  # the other files
    backend.save(str(folder / "tokenizer.json"))
    return backend


@pytest.mark.tier("long")
def test_llama_cpp_applies_the_chat_template_and_ends_turns(tmp_path):
    export("qwen3", tmp_path)
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    file = tmp_path / "chat.gguf"
    assert main(["export-gguf", str(tmp_path), str(file)]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "Is 7 prime?"}]
    want = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    with llama_cpp(file, context=128) as theirs:
        assert theirs.chat(messages) == want
    fields = {name: x.contents() for name, x in gguf.GGUFReader(file).fields.items()}
    assert fields["tokenizer.ggml.eot_token_id"] == 3  # the template ends turns by another token
