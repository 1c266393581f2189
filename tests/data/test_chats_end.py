"""Memorised chats of three turns are reproduced, and their answers end by themselves.

Each template is our own, and ends a turn like the family in its name.
"""

import json
from pathlib import Path

import pytest
import tokenizers
from transformers import AutoTokenizer

from moetrain import Config, Generator, Trainer
from moetrain.cli.generate import main as generate
from moetrain.data.tokenizer import ByteTokenizer
from moetrain.generate import request
from moetrain.generate.engine import load_model

CHATML = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""A turn ends with its own token."""
GLM = """\
{{- '[gMASK]<sop>' }}
{%- for m in messages %}{{- '<|' + m.role + '|>\\n' + m.content }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif %}"""
"""A turn ends with the mark of the next role."""
HARMONY = """\
{%- for m in messages %}
{{- '<|start|>' + m.role }}
{{- '<|channel|>final' if m.role == 'assistant' }}{{- '<|message|>' + m.content }}
{{- '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""
"""The last turn ends with another token than the turns before it."""
LLAMA3 = """\
{{- bos_token }}
{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
"""The token that ends a turn differs from the one that ends a text."""
TEMPLATES = {
    "Qwen3": (CHATML, "<|im_start|> <|im_end|>", "<|im_end|>"),
    "GLM": (GLM, "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|endoftext|>", "<|endoftext|>"),
    "GPT-OSS": (HARMONY, "<|start|> <|channel|> <|message|> <|end|> <|return|>", "<|return|>"),
    "Llama-3": (
        LLAMA3,
        "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>",
        "<|end_of_text|>",
    ),
}
"""Each template, its marks, and the token that ends a text."""
ASKED = ["sun", "moon", "star", "sky", "sea", "rain"]
CHATS = [
    [
        turn
        for i in (0, 2, 1)
        for turn in (
            {"role": "user", "content": f"{ASKED[(k + i) % 6]}?"},
            {"role": "assistant", "content": ASKED[(k + i + 3) % 6].upper() + "!" * (i + 1)},
        )
    ]
    for k in range(4)
]


def make_tokenizer(folder: Path, template: str, marks: str, eos: str) -> None:
    """Write a tokenizer of bytes with the template's marks as special tokens."""
    folder.mkdir()
    backend = tokenizers.Tokenizer.from_str(str(ByteTokenizer().export().files["tokenizer.json"]))
    backend.add_special_tokens(marks.split())
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": eos, "chat_template": template, "bos_token": marks.split()[0]}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.tier("long")
@pytest.mark.parametrize("family", TEMPLATES)
def test_chats_that_were_learned_are_answered_and_end(family, tiny_words, tmp_path, capsys):
    make_tokenizer(tmp_path / "own", *TEMPLATES[family])
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"messages": x}) for x in CHATS))
    words = [word for word in tiny_words if not word.startswith(("data.", "train.", "model.hid"))]
    words += ["model.hidden_size=64", "model.moe_intermediate_size=64", "model.vocab_size=272"]
    words += ["data.source=records", f"data.path={tmp_path}/a.jsonl", "data.eval_fraction=0"]
    words += [f"data.tokenizer={tmp_path}/own", "data.seq_len=160", "train.steps=120"]
    words += ["train.micro_batch_size=4", "train.global_batch_size=4", "train.device=cpu"]
    words += ["train.sample_tokens=0", "optim.lr=1e-2", f"data.cache_dir={tmp_path}/cache"]
    words += ["checkpoint.save_hf=yes", "checkpoint.at_end=no", "optim.weight_decay=0"]
    result = Trainer(Config.load(None, words, environ={})).fit()
    hf = str(result.folder / "hf")
    theirs = AutoTokenizer.from_pretrained(hf)

    def said(turns: list[dict[str, str]]) -> list[int]:
        """Return transformers' tokens of the last turn, without blanks at its end."""
        asked = theirs.apply_chat_template(turns[:-1], tokenize=False, add_generation_prompt=True)
        text = theirs.apply_chat_template(turns, tokenize=False)
        assert text.startswith(asked)
        return theirs.encode(text[len(asked) :].rstrip(), add_special_tokens=False)

    capsys.readouterr()
    # The command answers the first turn.
    for chat in CHATS[:2]:
        asked = ["--chat", "--prompt", chat[0]["content"]]
        assert generate([hf, *asked, "--temperature", "0", "--max_tokens", "40"]) == 0
        wanted = theirs.decode(said(chat[:2]), skip_special_tokens=True)
        assert capsys.readouterr().out.rstrip("\n") == wanted
        assert chat[1]["content"] in wanted
    # Each turn is answered after the turns before it.
    model, tokenizer = load_model(hf, "cpu", "auto")
    params = request.SamplingParams(
        max_tokens=40,
        temperature=0,
        stop_ids=request.end_ids(model, tokenizer),
        stop=request.chat_stops(tokenizer),
    )
    asked = {
        f"{k} {i}": request.Request(f"{k} {i}", request.chat_ids(tokenizer, chat[:i]), params)
        for k, chat in enumerate(CHATS)
        for i in (1, 3, 5)
    }
    found = Generator(model, tokenizer).generate([*asked.values()])
    for name, (completion,) in zip(asked, found, strict=True):
        k, i = map(int, name.split())
        wanted = said(CHATS[k][: i + 1])
        assert completion.tokens[: len(wanted)] == wanted
        assert completion.finish_reason == "stop"
        # If the template writes no end, the mark of the next role is the end.
        ends = [] if wanted[-1] in theirs.added_tokens_decoder else theirs.encode("<|user|>")
        assert completion.tokens[len(wanted) :] == ends
