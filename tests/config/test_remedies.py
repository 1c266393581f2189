"""Each remedy that an error offers is applied here, and the settings are then accepted.

A row of the table has files, refused settings, the error's text, and for each remedy in it the
settings or files that follow it.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import pytest
from pydantic import BaseModel

from moetrain.cli.checkpoint import COMMANDS as checkpoint_commands
from moetrain.cli.checkpoint import main as export
from moetrain.cli.main import COMMANDS
from moetrain.cli.train import JOBS, TRAIN
from moetrain.cli.train import RL as REINFORCE
from moetrain.config import Config, ConfigError, Fact
from moetrain.config.needs import unmet
from moetrain.config.sources import Reader, leaves
from moetrain.data.chat import CHATML, ChatTemplate
from moetrain.data.documents import Document
from moetrain.data.messages import BadLineError
from moetrain.data.records import RecordReader
from moetrain.data.tokenizer import ByteTokenizer
from moetrain.http.access import Access
from moetrain.http.protocol import Chat, Completions, Responses
from moetrain.jobs.api import Limits
from moetrain.models.hf.files import resolve
from moetrain.parallel.world import plan_world
from moetrain.train.loop import Trainer
from moetrain.train.session import resolve_run
from tests.lib.needs_table import NEEDS_OF_ONE
from tests.lib.tried_settings import TEXT, TINY, UNSET, made, use

ROOT = Path(__file__).parents[2]

DEFAULTS = dict(leaves(Config().model_dump()))
SECTIONS = {name.partition(".")[0] for name in DEFAULTS if "." in name}


class Row(NamedTuple):
    """Refused settings, and their remedies."""

    files: dict[str, str]
    settings: dict[str, Any]
    says: str
    remedies: list[dict[str, Any]]
    """Settings of each remedy, and its rewritten files under ``files``; None removes one."""


def chat(*said: str) -> str:
    roles = ["user", "assistant"] * len(said)
    turns = [{"role": r, "content": s} for r, s in zip(roles, said, strict=False)]
    return json.dumps({"messages": turns}) + "\n"


CHATS = "".join(chat(f"{i}?", f"{i}!") for i in range(9))
PAIR = json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n"
LABELLED = json.dumps({"prompt": "a", "completion": "b", "label": True}) + "\n"
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 257,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}


def model(**config: Any) -> dict[str, str]:
    """Write the folder of a model that lacks only weights."""
    files = {f"model/{name}": str(text) for name, text in ByteTokenizer().export().files.items()}
    return files | {"model/config.json": json.dumps(CONFIG | config)}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 16
BYTES = {"model.path": "model", "data.seq_len": 32, "data.tokenizer": UNSET, "data.path": "a.txt"}
ENVIRONMENT = """class Own:
    def __init__(self, prompts):
        self.prompts = prompts
    def episode(self, task):
        return self
    def reset(self):
        return ""
"""
SYNTHETIC: dict[str, Any] = {"data.source": "synthetic"}
STRETCHED = {"model.max_positions": 64, "model.rope": "yarn", "data.seq_len": 32}
NEMOTRON = {"model.preset": "nemotron-3-nano-30b-a3b"}
OF_TEXT = {"data.path": "a.txt"}
OF_CHATS = {"data.path": "a.jsonl"}
RL = {"rl.env": "jsonl", "rl.prompts": "p.jsonl", "rl.reward": "exact"}

UNLEARNED = '{"messages": [{"role": "user", "content": "q"}, '
UNLEARNED += '{"role": "assistant", "content": "a", "weight": 0}]}\n'
ROWS = {
    # ---- the model and its tokenizer
    "vocabulary of a preset": Row(
        {"a.txt": TEXT},
        {**OF_TEXT, "model.vocab_size": 60},
        "data.tokenizer: 'byte' has 257 tokens, more than the model's vocabulary of 60; use the "
        "model's own, or set model.vocab_size 257, which gives each token a row",
        [{"model.vocab_size": 257}],
    ),
    "vocabulary of a checkpoint": Row(
        {"a.txt": TEXT, **model(), "b/tokenizer.json": "", "b/tokenizer_config.json": ""},
        {**BYTES, "data.tokenizer": "b"},
        "data.tokenizer: 'b' has 301 tokens, more than the model's vocabulary of 257; use the "
        "model's own, or set model.vocab_size 301, which gives each token a row",
        [{"data.tokenizer": UNSET}, {"data.tokenizer": "model"}, {"model.vocab_size": 301}],
    ),
    "no end of text": Row(
        {"a.txt": TEXT, "t/tokenizer.json": "no eos"},
        {**OF_TEXT, "data.tokenizer": "t"},
        "t/tokenizer.json has no known end-of-text token; name one as eos_token in a "
        "tokenizer_config.json beside it",
        [{"files": {"t/tokenizer_config.json": '{"eos_token": "a"}'}}],
    ),
    "no tokenizer": Row(
        {"a.txt": TEXT, **{k: v for k, v in model().items() if k.endswith("/config.json")}},
        BYTES,
        "data.tokenizer: not set, and model.path 'model' holds no tokenizer.json; name the tok",
        [{"data.tokenizer": "byte"}],
    ),
    "rows beyond a model": Row(
        {"a.txt": TEXT, **model()},
        {**BYTES, "data.seq_len": 96},
        "data.seq_len: 96 is more than the 64 positions .*; lower it, or raise "
        "model.max_positions with model.rope yarn",
        [{"data.seq_len": 64}, {"model.max_positions": 96, "model.rope": "yarn"}],
    ),
    "rows beyond a stretched model": Row(
        {"a.txt": TEXT, **model(rope_scaling={"rope_type": "linear", "factor": 2.0})},
        {**BYTES, "data.seq_len": 200},
        "data.seq_len: 200 is more than the .* positions .*; lower it, or raise "
        "model.max_positions with model.rope linear",
        [{"data.seq_len": 64}, {"model.max_positions": 200, "model.rope": "linear"}],
    ),
    "rows beyond a model that cannot be stretched": Row(
        {"a.txt": TEXT, **model(rope_scaling=LLAMA3)},
        {**BYTES, "data.seq_len": 200},
        "data.seq_len: 200 is more than the .* positions .*; lower it$",
        [{"data.seq_len": 64}],
    ),
    "positions beyond a model": Row(
        {"a.txt": TEXT, **model()},
        {**BYTES, "model.max_positions": 96, "data.seq_len": 64},
        "model.max_positions: 96 is more than the 64 positions that the model is made for; lower "
        "it, or set model.rope yarn",
        [{"model.max_positions": 64}, {"model.rope": "yarn"}],
    ),
    "positions of layers that differ": Row(
        {"a.txt": TEXT},
        {**OF_TEXT, "model.preset": "gemma-4-31b", "model.max_positions": 10**6},
        "model.max_positions: 1000000 is more than the .*; lower it$",
        [{"model.max_positions": 4096, "data.tokenizer": "byte"}],
    ),
    "a size that no layer has": Row(
        {"a.txt": TEXT},
        {**OF_TEXT, "model.preset": "qwen3-0.6b", "model.num_experts": 8},
        "model.num_experts: 8, but preset 'qwen3-0.6b' has no layer that uses it; unset it",
        [{"model.num_experts": UNSET}],
    ),
    "no such preset": Row(
        model(),
        SYNTHETIC | {"model.preset": "gpt-2", "data.seq_len": 32},
        "model.preset: 'gpt-2' is not one of gpt-.*; for other models give model.path, a Hug",
        [{"model.preset": "debug"}, {"model.preset": UNSET, "model.path": "model"}],
    ),
    "no model": Row(
        model(),
        SYNTHETIC | {"model.preset": "none", "data.seq_len": 32},
        "model.preset: not set; name a preset, or set model.path to a checkpoint",
        [{"model.preset": "debug"}, {"model.preset": UNSET, "model.path": "model"}],
    ),
    "a model that is a file": Row(
        model(),
        SYNTHETIC | {"model.path": "model/config.json", "data.seq_len": 32},
        "model.path: model/config.json: a file; give the folder that holds config.json and the w",
        [{"model.path": "model"}],
    ),
    "rope of a model without": Row(
        {},
        SYNTHETIC | NEMOTRON | {"model.max_positions": 2**22, "model.rope": "yarn"},
        "model.rope: 'yarn', but this .* has no rotary embeddings to stretch; unset it: model.max_",
        [{"model.rope": UNSET}],
    ),
    "rope of layers that differ": Row(
        {},
        SYNTHETIC | {"model.preset": "gemma-4-31b"} | STRETCHED | {"model.max_positions": 2**20},
        "model.rope: 'yarn', but the layers of a .* have different rotary angles; unset it",
        [{"model.rope": UNSET, "model.max_positions": UNSET}],
    ),
    "rope of rows that are short enough": Row(
        {},
        SYNTHETIC | {"model.preset": "qwen3-0.6b"} | STRETCHED,
        "model.rope: 'yarn', but the model has .* positions, and model.max_positions is 64; unset",
        [{"model.rope": UNSET}],
    ),
    "sdpa with sinks": Row(
        {},
        SYNTHETIC | {"model.preset": "gpt-oss-20b", "kernels.attention": "sdpa"},
        "kernels.attention: 'sdpa' has no log-sum-exp, which attention with sinks needs; use auto",
        [{"kernels.attention": "auto"}],
    ),
    "copies of biased experts": Row(
        {},
        SYNTHETIC | {"model.preset": "gpt-oss-20b", "parallel.ep": 2, "moe.redundant_experts": 1},
        "moe.redundant_experts: 1, but this model's experts have biases, .*; set 0",
        [{"moe.redundant_experts": 0}],
    ),
    "fp8 of odd widths": Row(
        {},
        SYNTHETIC | {"kernels.precision": "fp8", "model.hidden_size": 24},
        "kernels.precision: 'fp8' takes widths that are multiples of 16, .*; use bf16, or other",
        [{"kernels.precision": "bf16"}, {"model.hidden_size": 32}],
    ),
    "fp8 in blocks of experts 2,880 wide": Row(
        {},
        SYNTHETIC | {"model.preset": "gpt-oss-20b", "kernels.precision": "fp8_blocks"},
        "kernels.precision: .*; use bf16",
        [{"kernels.precision": "bf16"}, {"kernels.precision": "fp8"}],
    ),
    "QK-clip of normalised heads": Row(
        {},
        SYNTHETIC | {"optim.name": "muon", "optim.muon_qk_clip": 100},
        "optim.muon_qk_clip: 100, but .*; set it to 0",
        [{"optim.muon_qk_clip": 0}],
    ),
    "no MTP blocks": Row(
        {},
        SYNTHETIC | {"train.mtp_weight": 0.3},
        "train.mtp_weight: this .* model has no multi-token prediction blocks; unset it",
        [{"train.mtp_weight": UNSET}],
    ),
    "no indexers": Row(
        {},
        SYNTHETIC | {"train.indexer": "warmup"},
        "train.indexer: 'warmup', but .* has no indexers, which select .*; use frozen",
        [{"train.indexer": "frozen"}],
    ),
    # ---- what is trained
    "adapters of an odd rank": Row(
        {},
        SYNTHETIC | {"lora.rank": 12},
        "lora.rank: 12 is not a multiple of 8, which layers.0.moe.experts needs; use 16",
        [{"lora.rank": 16}],
    ),
    "adapters of nothing": Row(
        {},
        SYNTHETIC | {"lora.rank": 8, "lora.targets": "*.nothing"},
        "lora.targets: '\\*.nothing' matches no module; the modules of a layer are attn.wq, ",
        [{"lora.targets": "*.attn.wq"}],
    ),
    "dropout of experts": Row(
        {},
        SYNTHETIC | {"lora.rank": 8, "lora.dropout": 0.1},
        "lora.dropout: 0.1, but layers.0.moe.experts does not support dropout .*; use 0, or",
        [{"lora.dropout": 0}, {"lora.targets": "*.attn.*"}],
    ),
    "adapters of each expert where they are one": Row(
        {},
        SYNTHETIC | {"model.preset": "gpt-oss-20b", "lora.rank": 8, "lora.layout": "per_expert"},
        "lora.layout: 'per_expert', but .* is one tensor of all experts; use fused",
        [{"lora.layout": "fused"}],
    ),
    "nothing to train": Row(
        {},
        SYNTHETIC | {"train.freeze": "*,embed*"},
        r"train.freeze: '\*,embed\*' leaves nothing to train; leave some patterns out",
        [{"train.freeze": "embed*"}],
    ),
    "nothing is frozen": Row(
        {},
        SYNTHETIC | {"train.freeze": "*nowhere*"},
        "train.freeze: .* matches no parameter; parameters have names like ",
        [{"train.freeze": "embed*"}],
    ),
    # ---- settings that contradict each other
    "rows of a step": Row(
        {"a.txt": TEXT},
        {**OF_TEXT, "train.global_batch_size": 12, "train.micro_batch_size": 8},
        "train.global_batch_size: 12 is not a multiple of train.micro_batch_size 8; set "
        "train.global_batch_size 16 or train.micro_batch_size 4",
        [{"train.global_batch_size": 16}, {"train.micro_batch_size": 4}],
    ),
    "steps and epochs": Row(
        {"a.txt": TEXT},
        {**OF_TEXT, "train.steps": 3, "train.epochs": 1},
        "train.epochs: 1.0 .* contradicts train.steps 3 .*; set one of them",
        [{"train.steps": UNSET}, {"train.epochs": UNSET}],
    ),
    "kept checkpoints": Row(
        {"a.txt": TEXT},
        {**OF_TEXT, "checkpoint.interval": 4, "checkpoint.keep_every": 6},
        "checkpoint.keep_every: 6 is not a multiple of checkpoint.interval 4, .*; set 8",
        [{"checkpoint.keep_every": 8}],
    ),
    "profiled steps": Row(
        {"a.txt": TEXT},
        {**OF_TEXT, "log.profile": 8, "train.steps": 8},
        "log.profile: 8, but the run has 8 steps and needs 13: .*; lower it, or train longer",
        [{"log.profile": 3}, {"train.steps": 13}],
    ),
    "a need": Row(
        {"a.jsonl": CHATS},
        {**OF_CHATS, "data.workers": 2, "data.streaming": "no", "data.eval_fraction": 0},
        "data.workers: 2 contradicts data.streaming 'no'; unset it, or set data.streaming auto or",
        [{"data.workers": UNSET}, {"data.streaming": "auto"}, {"data.streaming": "yes"}],
    ),
    "an empty value": Row(
        {"a.txt": TEXT},
        {**OF_TEXT, "data.cache_dir": ""},
        "data.cache_dir: '': is empty; leave it out",
        [{"data.cache_dir": UNSET}],
    ),
    # ---- where data lies
    "an unknown end": Row(
        {"a.md": TEXT, "a.ndjson": CHATS},
        {"data.path": "a.md"},
        r"data.source: not set, and data.path 'a.md' ends in none of .*; set text \(.*\) or rec",
        [{"data.source": "text"}, {"data.source": "records", "data.path": "a.ndjson"}],
    ),
    "a table of text": Row(
        {"a.tsv": "text\n" + TEXT, "a.jsonl": CHATS},
        {"data.path": "a.tsv"},
        "data.source: not set, and data.path 'a.tsv' is a table that is not read as records; "
        "convert it to .jsonl or .parquet, or set text to learn the file as it is",
        [{"data.path": "a.jsonl"}, {"data.source": "text"}],
    ),
    "a compressed text": Row(
        {"a.gz": "", "a": TEXT},
        {"data.path": "a.gz", "data.source": "text"},
        "data.path: 'a.gz' cannot be read: it is no text but .gz; unpack it",
        [{"data.path": "a"}],
    ),
    "a folder of texts and others": Row(
        {"d/a.txt": TEXT, "d/README.md": "about"},
        {"data.path": "d"},
        r"data.path: 'd' holds no .jsonl files, .*; it holds .txt files: name them as "
        r"'d/\*\*/\*.txt'",
        [{"data.path": "d/**/*.txt"}],
    ),
    "a folder of texts without an end": Row(
        {"d/wiki_00": TEXT, "d/wiki_01": TEXT, "d/LICENSE": "all"},
        {"data.path": "d"},
        "data.path: 'd' holds no .jsonl files, .*; set data.source text to learn each of its files "
        r"as it is, or some of them alone, such as 'd/\*\*/wiki_\*'",
        [
            {"data.source": "text"},
            {"data.path": "d/**/wiki_*"},
            {"data.source": "text", "data.path": "d/**/wiki_*"},
        ],
    ),
    "a folder of documents": Row(
        {"d/a.txt": TEXT, "d/e/b.md": TEXT, "d/e/c.md": "[a link](b.md) ", "d/f.ipynb": "{}"},
        {"data.path": "d"},
        "data.path: 'd' holds no .jsonl files, .*; set data.source text to learn each of its files "
        r"as it is, or some of them alone, such as 'd/\*\*/\*.md'$",
        [{"data.source": "text"}, {"data.path": "d/**/*.md"}],
    ),
    "a folder of tables of text": Row(
        {"d/a.tsv": "text\n" + TEXT, "d/b.tsv": "text\n" + TEXT},
        {"data.path": "d"},
        "data.path: 'd' holds no .jsonl files, .*; set data.source text to learn each of its files "
        r"as it is, or some of them alone, such as 'd/\*\*/\*.tsv' with data.source text$",
        [{"data.source": "text"}, {"data.source": "text", "data.path": "d/**/*.tsv"}],
    ),
    "a pattern of texts that begin as JSON": Row(
        {"d/a.md": "[a link](b.md) " + TEXT},
        {"data.path": "d/*.md"},
        r"data.source: not set, and data.path 'd/\*.md' ends in none of .*; set text \(.*\) or rec",
        [{"data.source": "text"}],
    ),
    "a folder of records without an end": Row(
        {"d/wiki_00": CHATS, "d/wiki_01": CHATS, "d/README": "about"},
        {"data.path": "d"},
        "data.path: 'd' holds no .jsonl files, .*; name its files with records, such as "
        r"'d/\*\*/wiki_\*', with data.source records",
        [{"data.source": "records", "data.path": "d/**/wiki_*"}],
    ),
    "a text without an end": Row(
        {"text8": " anarchism originated as a term of abuse first used " * 200},
        {"data.path": "text8"},
        "data.source: not set, and data.path 'text8' is a text without a known extension; set text "
        "to learn it as it is",
        [{"data.source": "text"}],
    ),
    "an empty folder": Row(
        {"d/a.png": "", "e/a.jsonl": CHATS},
        {"data.path": "d", "data.source": "records"},
        "data.path: 'd' holds no .jsonl files, .*; name a file, or a folder with some",
        [{"data.path": "e/a.jsonl"}, {"data.path": "e"}],
    ),
    "what is trained on is evaluated": Row(
        {"a.txt": TEXT, "b.txt": TEXT},
        {**OF_TEXT, "data.eval_path": "a.txt"},
        "data.eval_path: 'a.txt' is data.path itself: .*; name other data, or leave it out",
        [{"data.eval_path": "b.txt"}, {"data.eval_path": UNSET}],
    ),
    "an output within the data": Row(
        {"d/a.txt": TEXT},
        {"data.path": "d", "output_dir": "d/out"},
        "output_dir: 'd/out' lies in data.path 'd': .*; choose one outside",
        [{"output_dir": "out"}],
    ),
    "sources of one name": Row(
        {"a/x.jsonl": CHATS, "b/x.jsonl": CHATS},
        {"data.mix": '[{"path": "a/x.jsonl"}, {"path": "b/x.jsonl"}]'},
        "data.mix: two entries have the same name; give each its own",
        [{"data.mix": '[{"path": "a/x.jsonl", "name": "a"}, {"path": "b/x.jsonl", "name": "b"}]'}],
    ),
    "a weight of one": Row(
        {"a.jsonl": CHATS, "b.jsonl": CHATS},
        {"data.mix": '[{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl"}]'},
        "data.mix: only some entries have a weight; give one to all entries, or to none",
        [
            {"data.mix": '[{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl", "weight": 2}]'},
            {"data.mix": '[{"path": "a.jsonl"}, {"path": "b.jsonl"}]'},
        ],
    ),
    # ---- records
    "objects over several lines": Row(
        {"a.jsonl": '{\n"text": "a"}\n'},
        {"data.path": "a.jsonl"},
        r"a.jsonl:1: not JSON: .*; give each object one line, or all in one array: \[.*\]; or give "
        "each file one object, and a name that ends in .json",
        [
            {"files": {"a.jsonl": CHATS}},
            {"files": {"a.jsonl": f"[{CHATS.strip()}]".replace("\n", ",")}},
            {
                "files": {"a.json": '{\n"instruction": "a", "output": "' + "b " * 200 + '"}\n'},
                "data.path": "a.json",
                "data.eval_fraction": 0,
            },
        ],
    ),
    "no object": Row(
        {"a.jsonl": '"a"\n'},
        OF_CHATS,
        "a.jsonl:1: not a JSON object: 'a'; give each object one line, or all in one array: ",
        [
            {"files": {"a.jsonl": CHATS}},
            {"files": {"a.jsonl": f"[\n{chat('a', 'b')},\n{chat('c', 'd')}]"}},
        ],
    ),
    "a record of no known form": Row(
        {"a.jsonl": '{"body": "some text"}\n' * 60},
        OF_CHATS,
        "a.jsonl:1: no 'text' and no 'messages': .*: fill or rename its fields, leave the file "
        "out if it holds no records, or name the field of a text in data.text_field",
        [{"files": {"a.jsonl": '{"text": "some text"}\n' * 60}}, {"data.text_field": "body"}],
    ),
    "a text that is none": Row(
        {"a.jsonl": '{"text": 3, "body": "some text"}\n' * 60},
        OF_CHATS,
        "'text' is not text: 3; write texts there, or name another data.text_field",
        [{"files": {"a.jsonl": '{"text": "some text"}\n' * 60}}, {"data.text_field": "body"}],
    ),
    "tools that are no list": Row(
        {"a.jsonl": CHATS[:-2] + ', "tools": 3}\n'},
        OF_CHATS,
        "a.jsonl:9: `tools` is not a list of objects: 3; give such a list, or its JSON as text",
        [
            {"files": {"a.jsonl": CHATS[:-2] + ', "tools": []}\n'}},
            {"files": {"a.jsonl": CHATS[:-2] + ', "tools": "[]"}\n'}},
        ],
    ),
    "a template that learns nothing": Row(
        {"a.jsonl": CHATS, "t.jinja": "{{ messages[0].content }}", "u.jinja": ""},
        {**OF_CHATS, "data.chat_template": "t.jinja"},
        "chat_template.*; give another",
        [{"data.chat_template": UNSET}],
    ),
    "chats longer than a row": Row(
        {"a.jsonl": CHATS + chat("a", "b" * 300)},
        {**OF_CHATS, "data.seq_len": 128, "data.overlong": "error", "data.eval_fraction": 0},
        r"data.overlong: 'error', and 1 are longer than data.seq_len 128, the longest has 362 "
        "tokens; raise data.seq_len to 362, or set data.overlong drop",
        [{"data.seq_len": 362}, {"data.overlong": "drop"}, {"data.overlong": "cut"}],
    ),
    "no object of variables": Row(
        {"a.jsonl": CHATS},
        {**OF_CHATS, "data.chat_template_kwargs": "{'a': 1}"},
        "data.chat_template_kwargs: .* is not JSON; write an object such as {.enable_thinking",
        [{"data.chat_template_kwargs": '{"enable_thinking": false}'}],
    ),
    "a list of variables": Row(
        {"a.jsonl": CHATS},
        {**OF_CHATS, "data.chat_template_kwargs": "[1]"},
        "data.chat_template_kwargs: .* is no JSON object; write one such as {.enable_thinking",
        [{"data.chat_template_kwargs": '{"enable_thinking": false}'}],
    ),
    "a variable that records have": Row(
        {"a.jsonl": CHATS},
        {**OF_CHATS, "data.chat_template_kwargs": '{"tools": [], "a": 1}'},
        "data.chat_template_kwargs: has 'tools', which cannot be set there; leave it out",
        [{"data.chat_template_kwargs": '{"a": 1}'}],
    ),
    "a template that marks nothing": Row(
        {"a.jsonl": CHATS, "t.jinja": "{% if 0 %}{% generation %}{% endgeneration %}{% endif %}a"},
        {**OF_CHATS, "data.chat_template": "t.jinja"},
        "data.chat_template: .*: the chat template marks no text with {% generation %}, though .*; "
        "give another one",
        [{"data.chat_template": UNSET}],
    ),
    "a template of users alone": Row(
        {"a.jsonl": CHATS, "t.jinja": "{% for m in messages[::2] %}{{ m.content }}{% endfor %}"},
        {**OF_CHATS, "data.chat_template": "t.jinja"},
        r"data.chat_template: .*: the chat template renders no text for messages\[1\], an .* turn; "
        "give another one",
        [{"data.chat_template": UNSET}],
    ),
    "a template whose prompt begins nothing": Row(
        {
            "a.jsonl": CHATS,
            "t.jinja": "{% for m in messages %}{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}answer:{% endif %}",
        },
        {**OF_CHATS, "data.chat_template": "t.jinja"},
        "the chat template's generation prompt does not begin its rendering of .*; give another "
        "template in data.chat_template",
        [{"data.chat_template": UNSET}],
    ),
    "texts beside pairs": Row(
        {"a.jsonl": PAIR * 9},
        {
            "data.mix": '[{"path": "a.jsonl", "format": "messages"}]',
            "train.objective": "dpo",
            "data.format": "auto",
        },
        "data.format: 'messages', and train.objective learns from pairs alone; set preference",
        [{"data.mix": '[{"path": "a.jsonl", "format": "preference"}]'}],
    ),
    "texts beside labels": Row(
        {"a.jsonl": LABELLED * 9},
        {"data.mix": '[{"path": "a.jsonl", "format": "text"}]', "train.objective": "kto"},
        "data.format: 'text', and train.objective kto learns from answers with a label; set auto",
        [
            {"data.mix": '[{"path": "a.jsonl", "format": "auto"}]'},
            {"data.mix": '[{"path": "a.jsonl", "format": "completion"}]'},
        ],
    ),
    "a mixture that is no list": Row(
        {"a.jsonl": CHATS},
        {"data.mix": '{"path": "a.jsonl"}'},
        "data.mix: .*: give a list of tables$",
        [{"data.mix": '[{"path": "a.jsonl"}]'}],
    ),
    # ---- rows
    "no path": Row(
        {"a.txt": TEXT},
        {"data.source": "text"},
        "data.path: not set, and data.source 'text' needs it; set it",
        [OF_TEXT],
    ),
    "no such file": Row(
        {"d/a.txt": TEXT},
        {"data.path": "gone.txt"},
        "data.path: 'gone.txt' cannot be read: .*; name a file or folder of this machine",
        [{"data.path": "d/a.txt"}, {"data.path": "d"}],
    ),
    "a folder without a tokenizer": Row(
        {"a.txt": TEXT, **model()},
        {**OF_TEXT, "data.tokenizer": "."},
        r"data.tokenizer: '\.' holds no tokenizer.json; name a folder that holds one",
        [{"data.tokenizer": "model"}],
    ),
    "a stream whose held-out file has nothing to learn": Row(
        {"a.jsonl": CHATS, "b.jsonl": CHATS, "c.jsonl": UNLEARNED},
        {**OF_CHATS, "data.streaming": "yes", "data.eval_path": "c.jsonl"},
        r"data\.eval_path: 'c\.jsonl': its first blocks have no row with anything to learn; name",
        [{"data.eval_path": "b.jsonl"}],
    ),
    "a stream that holds out too little": Row(
        {"a.jsonl": CHATS, "b.jsonl": CHATS},
        {**OF_CHATS, "data.streaming": "yes", "data.eval_fraction": 1e-6},
        "data.eval_fraction: 1e-06: the first blocks of data.path hold out too little; raise it, "
        "name data in data.eval_path instead, or set it to 0",
        [
            {"data.eval_fraction": 0.5},
            {"data.eval_path": "b.jsonl", "data.eval_fraction": UNSET},
            {"data.eval_fraction": 0},
        ],
    ),
    "no row of text": Row(
        {"a.txt": "tiny"},
        {**OF_TEXT, "data.eval_fraction": 0},
        "data.seq_len: 128: the 5 tokens of data.path make no row .*; lower it or add text",
        [{"data.seq_len": 5}, {"files": {"a.txt": TEXT}}],
    ),
    "no row of text, and something is held out": Row(
        {"a.txt": "tiny"},
        OF_TEXT,
        "data.seq_len: 128: the 5 tokens of data.path make no row .*; lower it or add text",
        [{"data.seq_len": 2}, {"files": {"a.txt": TEXT}}],
    ),
    "one row of text": Row(
        {"a.txt": TEXT[:40], "b.txt": TEXT},
        {**OF_TEXT, "data.seq_len": 32},
        "data.eval_fraction: 0.02: the 1 rows .*; lower data.seq_len to 20, add data, name some "
        "in data.eval_path instead, or set it to 0",
        [
            {"data.seq_len": 20},
            {"files": {"a.txt": TEXT}},
            {"data.eval_path": "b.txt"},
            {"data.eval_fraction": 0},
        ],
    ),
    "one chat": Row(
        {"a.jsonl": chat("a", "b"), "b.jsonl": CHATS},
        {**OF_CHATS, "data.seq_len": 128},
        "data.eval_fraction: 0.02: the 1 documents .* to learn; add data, name some in "
        "data.eval_path instead, or set it to 0",
        [
            {"files": {"a.jsonl": CHATS}},
            {"data.eval_path": "b.jsonl"},
            {"data.eval_fraction": 0},
        ],
    ),
    "chats whose answers lie behind the row": Row(
        {"a.jsonl": chat("a", "b") + chat("a" * 200, "b")},
        {**OF_CHATS, "data.seq_len": 128},
        "data.eval_fraction: 0.02: the 2 documents .* to learn; raise data.seq_len to 262, add",
        [{"data.seq_len": 262}, {"data.eval_fraction": 0}],
    ),
    "no answer within a row": Row(
        {"a.jsonl": chat("a" * 200, "b") * 3},
        {**OF_CHATS, "data.seq_len": 128, "data.eval_fraction": 0},
        "data.seq_len: 128: the .* tokens of data.path make no row of this length to learn; raise",
        [{"data.seq_len": 300}],
    ),
    # ---- reinforcement learning
    "tools beside a text": Row(
        {"p.jsonl": '{"prompt": "a", "answer": "b", "tools": [{}]}\n'},
        RL,
        "line 1: `tools` would be lost, as no chat template formats `prompt`; set rl.chat yes, or "
        "give `messages`",
        [
            {"rl.chat": "yes"},
            {"files": {"p.jsonl": '{"messages": [{"role": "user", "content": "a"}], "answer": 1}'}},
        ],
    ),
    "no prompt": Row(
        {"p.jsonl": '{"question": "a", "answer": "b"}\n'},
        RL,
        r"p.jsonl:1: has no `prompt` \(a text or a list of messages\) and no `messages`",
        [
            {"files": {"p.jsonl": '{"prompt": "a", "answer": 1}'}},
            {"files": {"p.jsonl": '{"prompt": [{"role": "user", "content": "a"}], "answer": 1}'}},
        ],
    ),
    "no answer": Row(
        {"p.jsonl": '{"prompt": "a", "result": "b"}\n'},
        RL,
        "rl.prompts: .* line 1: no answer, which exact needs; give it as `answer`, or another rl.",
        [{"files": {"p.jsonl": '{"prompt": "a", "answer": "b"}'}}, {"rl.reward": "zero"}],
    ),
    "no prompts": Row(
        {"p.jsonl": "\n", "q.jsonl": '{"prompt": "a", "answer": 1}'},
        RL,
        "rl.prompts: 'p.jsonl' has no lines; write one prompt a line",
        [{"files": {"p.jsonl": '{"prompt": "a", "answer": 1}'}}],
    ),
    "no file of prompts": Row(
        {"p.jsonl": '{"prompt": "a", "answer": 1}'},
        RL | {"rl.prompts": UNSET},
        "rl.prompts: not set, and rl.env 'jsonl' needs it; set it",
        [{"rl.prompts": "p.jsonl"}],
    ),
    "no reward": Row(
        {"p.jsonl": '{"prompt": "a", "answer": 1}'},
        RL | {"rl.reward": UNSET},
        "rl.reward: not set, and rl.env 'jsonl' needs it; set it",
        [{"rl.reward": "exact"}],
    ),
    "a reward of one argument": Row(
        {
            "p.jsonl": '{"prompt": "a"}',
            "r.py": "def score(line):\n    return 0.0\nHALF = 0.5\n",
            "r.txt": "def score(line, text):\n    return 0.0\n",
        },
        RL | {"rl.reward": "r.py:score"},
        "rl.reward: .* takes .line., but is called with a line and an answer: .*; let it take thes",
        [{"files": {"r.py": "def score(line, text):\n    return 0.0\n"}}],
    ),
    "a reward that is a number": Row(
        {
            "p.jsonl": '{"prompt": "a"}',
            "r.py": "HALF = 0.5\ndef score(line, text):\n    return HALF\n",
        },
        RL | {"rl.reward": "r.py:HALF"},
        "rl.reward: .* is a float, which cannot be called; name a function or a class",
        [{"rl.reward": "r.py:score"}],
    ),
    "a reward of no Python": Row(
        {
            "p.jsonl": '{"prompt": "a"}',
            "r.txt": "def score(line, text):\n    return 0.0\n",
            "r.py": "def score(line, text):\n    return 0.0\n",
        },
        RL | {"rl.reward": "r.txt:score"},
        "rl.reward: 'r.txt' is not a Python file; its name must end in .py",
        [{"rl.reward": "r.py:score"}],
    ),
    "an environment of no tasks": Row(
        {"e.py": ENVIRONMENT + "    num_tasks = 0\n"},
        {"rl.env": "e.py:Own"},
        "its num_tasks is 0; make it None .without end., or 1 or more",
        [
            {"files": {"e.py": ENVIRONMENT + "    num_tasks = None\n"}},
            {"files": {"e.py": ENVIRONMENT + "    num_tasks = 1\n"}},
        ],
    ),
    "an environment of no episodes": Row(
        {"e.py": ENVIRONMENT.replace("episode", "play") + "    num_tasks = 1\n"},
        {"rl.env": "e.py:Own"},
        r"rl.env: 'e.py:Own' has no method episode\(task\); give it one",
        [{"files": {"e.py": ENVIRONMENT + "    num_tasks = 1\n"}}],
    ),
    "arguments that are no JSON": Row(
        {},
        {"rl.env_args": "{'most': 6}"},
        "rl.env_args: .* is not JSON: .*; write one such as '{.most.: 6}'",
        [{"rl.env_args": '{"most": 6}'}],
    ),
    "arguments that are a list": Row(
        {},
        {"rl.env_args": "[6]"},
        "rl.env_args: .* is not a JSON object; write one such as '{.most.: 6}'",
        [{"rl.env_args": '{"most": 6}'}],
    ),
    "digits that are a half": Row(
        {},
        {"rl.env_args": '{"most": 4.5}'},
        "rl.env_args: most 4.5 is not a whole number; give one",
        [{"rl.env_args": '{"most": 5}'}],
    ),
    "too many digits": Row(
        {},
        {"rl.env_args": '{"most": 11}'},
        "rl.env_args: least 4, most 11: there are 10 digits; give 1 <= least <= most <= 10",
        [{"rl.env_args": '{"least": 1, "most": 10}'}],
    ),
    "too many terms": Row(
        {},
        {"rl.env": "arithmetic", "rl.env_args": '{"terms": 201}'},
        "rl.env_args: terms 201: give 1 to 200",
        [{"rl.env_args": '{"terms": 1}'}, {"rl.env_args": '{"terms": 200}'}],
    ),
    "divisions": Row(
        {},
        {"rl.env": "arithmetic", "rl.env_args": '{"operations": "/"}'},
        r"rl.env_args: operations '/': give some of \+ - \*",
        [{"rl.env_args": '{"operations": "*"}'}, {"rl.env_args": '{"operations": "+-*"}'}],
    ),
    "special tokens for nobody": Row(
        {
            "p.jsonl": '{"prompt": "a", "answer": 1}',
            "r.py": "def score(line, text):\n    return 0.0\n",
        },
        RL | {"rl.skip_special_tokens": "no"},
        "rl.skip_special_tokens: no, but only a reward or an environment of your own can read .*; "
        "set yes, or give one",
        [{"rl.skip_special_tokens": "yes"}, {"rl.reward": "r.py:score"}],
    ),
    "steps that are epochs": Row(
        {},
        {"rl.env": "sort", "train.steps": UNSET, "train.epochs": 1},
        "train.epochs: 1.0, but reinforcement learning counts steps; set train.steps instead",
        [{"train.epochs": UNSET, "train.steps": 3}],
    ),
    "demonstrations of more steps": Row(
        {},
        {"rl.env": "sort", "rl.supervised_steps": 101},
        "rl.supervised_steps: 101 is more than train.steps 100, the whole run; lower it, or raise",
        [{"rl.supervised_steps": 100}, {"train.steps": 101}],
    ),
    "a loss of rewards": Row(
        {},
        {"rl.env": "sort", "train.target_loss": 1.5},
        "train.target_loss: 1.5, but evaluations measure rewards, not a loss; unset it",
        [{"train.target_loss": UNSET}],
    ),
    "a punishment of more tokens": Row(
        {},
        {"rl.env": "sort", "rl.overlong_buffer": 65},
        "rl.overlong_buffer: 65 is more than rl.max_tokens 64; lower it, or raise rl.max_tokens",
        [{"rl.overlong_buffer": 64}, {"rl.max_tokens": 65}],
    ),
    "demonstrations of nobody": Row(
        {"e.py": ENVIRONMENT + "    num_tasks = 1\n"},
        {"rl.env": "e.py:Own", "rl.supervised_steps": 3},
        "rl.supervised_steps: 3, but rl.env .* has no demonstrations; set 0, or give the environm",
        [
            {"rl.supervised_steps": 0},
            {
                "files": {
                    "e.py": ENVIRONMENT
                    + "    num_tasks = 1\n    def demonstrate(self, task):\n        return 'a'\n"
                }
            },
        ],
    ),
    "groups of other sizes": Row(
        {},
        {"rl.env": "sort", "rl.group_size": 7},
        "rl.group_size: 7 does not divide the 16 trajectories of a step .* update; make train.glob",
        [{"train.global_batch_size": 21, "train.micro_batch_size": 1}],
    ),
    "groups of half an update": Row(
        {},
        {"rl.env": "sort", "rl.group_size": 32, "rl.updates_per_rollout": 2},
        "rl.group_size: 32 does not divide the 32 .*; make train.global_batch_size a multiple of",
        [{"train.global_batch_size": 32}],
    ),
    "tasks held out of few": Row(
        {"p.jsonl": '{"prompt": "a", "answer": 1}\n' * 3},
        RL | {"rl.eval_tasks": 3},
        "rl.eval_tasks: 3 of 3 tasks leave none to train; lower it",
        [{"rl.eval_tasks": 2}, {"rl.eval_tasks": 0}],
    ),
    "a cache of less than a row": Row(
        {},
        {"rl.env": "sort", "rl.cache_tokens": 100},
        "rl.cache_tokens: 100, in pages of .*, do not hold a row of data.seq_len 128; raise it",
        [{"rl.cache_tokens": 256}],
    ),
    "precision of generation": Row(
        {},
        {"rl.env": "sort", "kernels.precision": "fp8", "model.hidden_size": 128},
        "kernels.precision: 'fp8', but trajectories are generated in bf16; unset it",
        [{"kernels.precision": UNSET}],
    ),
}


def write(files: Mapping[str, str | None]) -> None:
    letters = ByteTokenizer().export().files
    for name, content in files.items():
        path = Path(name)
        path.parent.mkdir(exist_ok=True)
        if name.endswith("tokenizer.json") and content in ("", "no eos"):
            about = json.loads(str(letters["tokenizer.json"]))
            vocabulary = about["model"]["vocab"]
            if content:
                vocabulary["a sign that ends nothing"] = vocabulary.pop("<|endoftext|>")
            else:
                vocabulary |= {f"a word {i}": 257 + i for i in range(44)}
            content = json.dumps(about)
        elif name.endswith("tokenizer_config.json") and content == "":
            content = str(letters["tokenizer_config.json"])
        path.write_text(content or "")


@pytest.mark.parametrize("case", ROWS)
def test_what_an_error_advises_works(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("moetrain.models.hf.load.check_checkpoint", lambda folder, arch: None)
    files, settings, says, remedies = ROWS[case]
    settings = {"data.seq_len": 128, "train.steps": 100, "log.tensorboard": "no"} | settings
    settings = {"data.cache_dir": "cache", "train.sample_tokens": 0, **settings}
    if any(name.startswith("rl.") for name in settings):
        settings = {"rl.eval_tasks": 0, "rl.env": "sort"} | settings
    elif settings.get("train.epochs"):
        settings["train.steps"] = 3
    write(files)
    with pytest.raises(ConfigError) as raised:
        use(settings)
    assert re.search(says, str(raised.value)), str(raised.value)
    for remedy in remedies:
        write(files)
        write(remedy.get("files", {}))
        use(settings | {k: v for k, v in remedy.items() if k != "files"})


# ---- settings that need others: each remedy of the table, with each of its values ----------------

FIELDS = {
    f"{section}.{key}": field
    for section, of in Config.model_fields.items()
    if isinstance(of.default, BaseModel)
    for key, field in type(of.default).model_fields.items()
}
PROBES = [None, 0, 1, 2, 4, 0.5, 1.5, True, False, "x", ("wandb",), ("experts",), (1, 1)]
PROBES += [({"path": "a.jsonl"},)]
BESIDE = {"lora.": {"lora.rank": 8}, "moe.": {"parallel.ep": 2}, "rl.kl": {"rl.kl_coef": 0.1}}
"""Settings that a user would set beside these."""


@functools.cache
def possible(name: str) -> list[Any]:
    """Return values of a setting: each choice, or some of PROBES."""
    kinds = [FIELDS[name].annotation, *get_args(FIELDS[name].annotation)]
    found = [x for kind in kinds if get_origin(kind) is Literal for x in get_args(kind)]
    return [x for x in [*found, *PROBES, DEFAULTS[name]] if can_be(name, x)]


def can_be(name: str, value: Any) -> bool:
    try:
        return Config().filled({name: value}, "a test") is not None
    except ConfigError:
        return False


def read(name: str, text: str) -> Any:
    """Return the value of ``name`` for ``text`` on a command line."""
    return dict(leaves(Reader(Config).build({name: text}, strict=False).model_dump()))[name]


def ways(name: str, advice: str, values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield settings that follow ``advice`` on ``name``: each alternative with each value."""
    for way in re.split(r",? or (?=set |raise |unset |use |in )", advice):
        verb, _, rest = way.partition(" ")
        target, _, texts = rest.partition(" ")
        if way == "use 2 or more":
            yield from ({name: x} for x in (2, 7))
        elif way == "set it to 0":
            yield {name: 0}
        elif verb == "use" and target == "another":
            yield from ({texts: x} for x in possible(texts) if x != values[texts])
        elif verb == "use":
            yield from ({name: read(name, x)} for x in rest.split(" or "))
        elif verb == "unset":
            target = name if target == "it" else target
            yield {target: DEFAULTS[target]}
        elif verb == "raise":
            more = [x for x in possible(target) if x is not None and x > (values[target] or 0)]
            yield from ({target: x} for x in more)
        else:
            assert verb == "set", f"nothing here follows {way!r}"
            known = [x for x in possible(target) if x is not None]
            yield from ({target: x} for x in (texts and re.split(", | or ", texts)) or known)


_SETTING = re.compile(rf"\b(?:{'|'.join(SECTIONS)})\.[a-z_0-9]+")


def complaints(values: dict[str, Any]) -> dict[tuple[str, ...], str]:
    """Return the advice of each complaint about ``values``, by the settings that it names."""
    config = Config().filled(values, "a test")
    found = unmet(dict(leaves(config.model_dump())), DEFAULTS, {})
    return {(name, *_SETTING.findall(why)): advice for name, why, advice in found}


OF_SETTINGS = [(need, name) for need, name in NEEDS_OF_ONE if not {*need.requires} & {*Fact}]


@pytest.mark.parametrize(
    ("need", "name"), OF_SETTINGS, ids=[f"{name}-{'-'.join(x.requires)}" for x, name in OF_SETTINGS]
)
def test_what_the_error_of_a_need_advises_works(need, name):
    """Following the advice ends this complaint, and causes no other."""
    beside = {"data.source": "records", "data.path": "a.jsonl"}
    beside |= {
        k: v for start, of in BESIDE.items() if name.startswith(start) for k, v in of.items()
    }
    values = {k: v for k, v in beside.items() if k not in need.requires}
    for other, fitting in need.requires.items():
        refused = [x for x in possible(other) if x not in fitting]
        values[other] = DEFAULTS[other] if DEFAULTS[other] in refused else refused[0]
    for value in (x for x in possible(name) if x in need.when and x != DEFAULTS[name]):
        before = complaints(values | {name: value})
        advice = before[name, *need.requires]
        followed = [*ways(name, advice, values)]
        assert len(followed) > advice.count(" or ") - advice.count("use 2 or more")
        for way in followed:
            way = {k: read(k, v) if isinstance(v, str) else v for k, v in way.items()}
            after = complaints(values | {name: value} | way)
            assert (name, *need.requires) not in after, f"{advice}: {way}"
            assert after.keys() <= before.keys(), f"{advice}: {way}"


# ---- refused values
# -------------------------------------------------------------------------------

GIVEN = {
    r"'(\w+)'": lambda name: [name],
    r"yes or no": lambda: ["yes", "no"],
    r"yes, no, or a number of blocks, 2 or more": lambda: ["yes", "no", "2", "3"],
    r"a valid integer": lambda: ["2"],
    r"a (?:valid|finite) number|a number (?:nearer to|farther from) 0": lambda: ["2", "0.5"],
    r"a number greater than ([\d.-]+)": lambda least: [str(int(least) + 1)],
    r"a number greater than or equal to ([\d.-]+)": lambda least: [least],
    r"a number less than ([\d.-]+)": lambda most: [str(int(most) - 1)],
    r"a number less than or equal to ([\d.-]+)": lambda most: [most],
    r"a positive number, or -1": lambda: ["1", "-1"],
    r"positive numbers": lambda: ["1,2"],
    r"auto or a positive (?:even )?number": lambda: ["auto", "2"],
    r"all or a positive number": lambda: ["all", "2"],
    r"a table|a list of tables(?: in JSON)?": lambda: ['[{"path": "a.jsonl"}]'],
}
"""Phrases of messages that ask for a value, and texts that follow them."""
WRONG = ["", "x", "-5", "0", "1.5", "1e300", "1e-60", str(10**20), "yes", "[1]", "nan", "a\0", "5"]


def refusal(name: str, text: str) -> str:
    try:
        Reader(Config).build({name: text}, strict=False)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", [*FIELDS, "output_dir"])
def test_what_the_error_of_a_value_says_to_give_is_taken(name):
    for wrong in WRONG:
        error = refusal(name, wrong)
        if not error or error.endswith(("; leave it out", "; leave them out")):
            continue  # it asks for no value
        advice = error.rpartition("give ")[2]
        texts = [
            text
            for pattern, made in GIVEN.items()
            for found in re.finditer(rf"{pattern}(?= or |, '|\W*$| \(| of )", advice)
            for text in made(*found.groups())
        ]
        assert texts, error
        taken = [text for text in texts if not refusal(name, text)]
        is_any = re.search("valid number|finite|nearer|farther", advice)
        assert taken if is_any else taken == texts, error


# ---- records: the refused record, how it is read, the error, and a record for each remedy --------

ASKED = {"role": "user", "content": "a?"}
SAID = {"role": "assistant", "content": "a!"}
OTHER = {"role": "assistant", "content": "no"}
CHAT = {"messages": [ASKED, SAID]}
CALL = {"name": "f", "arguments": {"x": 1}}
PAIRS = {"reads_pairs": True}
LABELS = {"reads_pairs": True, "reads_labels": True}
FUNCTION = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}


def turns(*changed: dict[str, Any]) -> dict[str, Any]:
    """Return a conversation that ends with an answer, with further turns before it."""
    return {"messages": [ASKED, *changed, SAID]}


def called(call: Any) -> dict[str, Any]:
    return turns({"role": "assistant", "content": "", "tool_calls": call}, ASKED) | {
        "tools": [FUNCTION]
    }


RECORDS: dict[str, tuple[Any, dict[str, Any], str, list[Any]]] = {
    "no turns": (
        {"messages": []},
        {},
        "`messages` is empty: it is a chat without turns; leave such records out",
        [None],
    ),
    "turns of text": (
        {"messages": ["a?", "a!"]},
        {},
        r"messages\[0\] is not an object: 'a\?'; give {\"role\": ..., \"content\": ...}",
        [CHAT],
    ),
    "no role": (
        turns({"content": "b"}),
        {},
        r'messages\[1\].role is missing or not text: .*; give {"role": ..., "content": ...}',
        [turns({"role": "user", "content": "b"})],
    ),
    "no content": (
        turns({"role": "user"}),
        {},
        r"messages\[1\].content is missing or not text: .*; give text",
        [turns({"role": "user", "content": "b"})],
    ),
    "an image": (
        turns({"role": "user", "content": [{"type": "image", "url": "x"}]}),
        {},
        "content has a part that is no text: .*; leave such records out: the answer is about it",
        [None],
    ),
    "no answer": (
        {"messages": [ASKED]},
        {},
        "no assistant turn to learn from: .*; leave such records out",
        [None],
    ),
    "weights of two names": (
        {"messages": [ASKED, SAID | {"weight": 1, "train": False}]},
        {},
        "has 'weight' and 'train', which contradict each other; leave one of them out",
        [{"messages": [ASKED, SAID | {"weight": 1}]}, {"messages": [ASKED, SAID | {"train": 0}]}],
    ),
    "a weight of a user": (
        {"messages": [ASKED | {"weight": 1}, SAID]},
        {},
        r"messages\[0\] has `weight` and asks to learn a turn of role 'user'.*leave `weight` out",
        [CHAT],
    ),
    "a weight of a half": (
        CHAT | {"weight": 0.5},
        {},
        r"`weight` is 0.5, and a weight is 0 \(not learned\) or 1 \(learned\); give one of these",
        [CHAT | {"weight": 0}, CHAT | {"weight": 1}],
    ),
    "calls of other weights": (
        {
            "messages": [
                ASKED,
                SAID,
                {"role": "tool_call", "content": json.dumps(CALL), "weight": 0},
            ],
            "tools": [FUNCTION],
        },
        {},
        "is part of the turn before it, whose weight differs; give both the same",
        [
            {
                "messages": [
                    ASKED,
                    SAID | {"weight": weight},
                    {"role": "tool_call", "content": json.dumps(CALL), "weight": weight},
                ],
                "tools": [FUNCTION],
            }
            for weight in (0, 1)
        ],
    ),
    "a call without a name": (
        called([{"arguments": {}}]),
        {},
        'has no function with a name: .*; give {"name": ..., "arguments": {...}}',
        [called([CALL])],
    ),
    "arguments that are a list": (
        called([{"name": "f", "arguments": [1]}]),
        {},
        "`arguments` is not an object: .*; give an object, or its JSON as text",
        [called([CALL]), called([CALL | {"arguments": json.dumps(CALL["arguments"])}])],
    ),
    "arguments that are no JSON": (
        called([{"name": "f", "arguments": "{'x': 1}"}]),
        {},
        "`arguments` is text that is not JSON: .*; write it with a JSON library",
        [called([{"name": "f", "arguments": json.dumps({"x": 1})}])],
    ),
    "tools that are texts": (
        CHAT | {"tools": [3]},
        {},
        r"tools\[0\] is not an object: 3; give one, or its JSON as text",
        [CHAT | {"tools": [FUNCTION]}, CHAT | {"tools": [json.dumps(FUNCTION)]}],
    ),
    "variables that are a list": (
        CHAT | {"chat_template_kwargs": [1]},
        {},
        r'`chat_template_kwargs` is not an object: .*; give one such as {"enable_thinking": false}',
        [CHAT | {"chat_template_kwargs": {"enable_thinking": False}}],
    ),
    "a variable that is another thing": (
        CHAT | {"chat_template_kwargs": {"messages": []}},
        {},
        "`chat_template_kwargs` has 'messages', which cannot be set there; leave it out",
        [CHAT | {"chat_template_kwargs": {}}],
    ),
    "what the template does not show": (
        CHAT | {"documents": [{"text": "d"}]},
        {},
        "the chat template does not show .*; leave it out, or name a template that shows it in dat",
        [CHAT, {"template": "{{ documents[0].text }}" + CHATML}],
    ),
    "a form that was named": (
        CHAT,
        {"form": "alpaca"},
        "no 'instruction', which data.format 'alpaca' needs; give it, or set data.format auto",
        [{"instruction": "a", "output": "b"}, {"form": "auto"}],
    ),
    "a row of OASST": (
        {"text": "a", "role": "prompter", "parent_id": None},
        {},
        "a turn of a dialogue and no document: .*; give whole dialogues as `messages`",
        [CHAT],
    ),
    "two systems": (
        CHAT | {"system": "a", "system_prompt": "b"},
        {},
        "`system` and `system_prompt` differ; leave one of them out",
        [CHAT | {"system": "a"}, CHAT | {"system_prompt": "b"}],
    ),
    "a history that is none": (
        {"instruction": "a", "output": "b", "history": ["c"]},
        {},
        "`history` has 'c', which is no question with its answer; write a list of two texts",
        [{"instruction": "a", "output": "b", "history": [["c", "d"]]}],
    ),
    "an answer to avoid": (
        {"prompt": "a", "completion": "b", "label": False},
        {},
        "`label` is False: .*; set train.objective kto, leave such records out, or rename",
        [LABELS, None, {"prompt": "a", "completion": "b", "class": False}],
    ),
    "a mask of a turn": (
        {"messages": [ASKED, {**SAID, "train_detail": [{"train": False}]}, ASKED, SAID]},
        {},
        r"messages\[1\].train_detail is .*; write \"weight\": 0 in turns that are not learned",
        [{"messages": [ASKED, {**SAID, "weight": 0}, ASKED, SAID]}],
    ),
    "a mask of a record": (
        {"prompt": "a", "completion": "b", "loss_mask": [0]},
        {},
        r"`loss_mask` is .*; write \"weight\": 0 in records or turns that",
        [None, CHAT],
    ),
    # ---- pairs
    "a pair of two kinds": (
        {"prompt": "a", "chosen": "b", "rejected": [OTHER]},
        PAIRS,
        "neither two texts nor two dialogues: .*; write all as texts, or all as lists of messages",
        [
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"prompt": [ASKED], "chosen": [SAID], "rejected": [OTHER]},
        ],
    ),
    "a prompt that is a number": (
        {"prompt": 3, "chosen": "b", "rejected": "c"},
        PAIRS,
        "`prompt` is neither a text nor a list of messages: .*; write one of these",
        [
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"prompt": [ASKED], "chosen": [SAID], "rejected": [OTHER]},
        ],
    ),
    "a system that is a number": (
        {"prompt": "a", "system": 3, "chosen": "b", "rejected": "c"},
        PAIRS,
        "`system` is not text: 3; write a text there",
        [{"prompt": "a", "system": "s", "chosen": "b", "rejected": "c"}],
    ),
    "a question that would be lost": (
        {"prompt": "a", "question": "b", "chosen": "c", "rejected": "d"},
        PAIRS,
        "`question` is not in `prompt`, beside which it would be lost: .*; write both in `prompt`, "
        "or leave `question` out",
        [
            {"prompt": "a\n\nb", "chosen": "c", "rejected": "d"},
            {"prompt": "a", "chosen": "c", "rejected": "d"},
        ],
    ),
    "answers in lists of one text": (
        {"chosen": ["a"], "rejected": ["b"], "prompt": "c"},
        PAIRS,
        r"`chosen` and `rejected` are lists of one text: \['a'\]; write the text itself in each$",
        [{"chosen": "a", "rejected": "b", "prompt": "c"}],
    ),
    "several answers on both sides": (  # RewardBench-2's ties
        {"chosen": ["a", "b"], "rejected": ["c", "d", "e"], "prompt": "q"},
        PAIRS,
        r"`rejected` has several answers, a list of texts: \['c', 'd', 'e'\]; write a record "
        "of each text of `chosen` with each text of `rejected`$",
        [{"chosen": a, "rejected": b, "prompt": "q"} for a in "ab" for b in "cde"],
    ),
    "several answers on one side": (
        {"chosen": "a", "rejected": ["b", "c"], "prompt": "q"},
        PAIRS,
        r"`rejected` has several answers, a list of texts: \['b', 'c'\]; write a record "
        "of `chosen` with each text of `rejected`$",
        [{"chosen": "a", "rejected": b, "prompt": "q"} for b in "bc"],
    ),
    "turns that are texts": (
        {"chosen": ["q", "a"], "rejected": ["q", "b"]},
        PAIRS,
        r"`chosen` has several answers, .*, or, if they are the turns of a dialogue, \{'role': ",
        [{"chosen": [ASKED, SAID], "rejected": [ASKED, OTHER]}],
    ),
    "several completions": (
        {"prompt": "q", "completion": ["a", "b"]},
        {},
        r"`completion` has several answers, a list of texts: \['a', 'b'\]; write a record of each, "
        "or of two the better one as `chosen`, the other as `rejected`$",
        [
            {"prompt": "q", "completion": "a"},
            {"prompt": "q", "completion": "b"},
            {"prompt": "q", "chosen": "a", "rejected": "b"},
        ],
    ),
    "several completions where pairs are learned": (
        {"prompt": "q", "completion": ["a", "b"]},
        PAIRS | {"form": "preference"},
        "it has several answers in `completion`; write the better one as `chosen`, another as `rej",
        [{"prompt": "q", "chosen": "a", "rejected": "b"}],
    ),
    "a prompt that is not in the dialogues": (
        {"prompt": "else", "chosen": [ASKED, SAID], "rejected": [ASKED, OTHER]},
        PAIRS,
        "`prompt` is not in the dialogues beside it: .*; leave it out, or begin the dialogues with",
        [
            {"chosen": [ASKED, SAID], "rejected": [ASKED, OTHER]},
            {
                "prompt": "else",
                "chosen": [ASKED | {"content": "else"}, SAID],
                "rejected": [ASKED | {"content": "else"}, OTHER],
            },
        ],
    ),
    "an answer without text": (
        {"prompt": "a", "chosen": " ", "rejected": "b"},
        PAIRS,
        "`chosen` has no text to learn; leave such records out",
        [None],
    ),
    "a pair with an empty side": (
        {"prompt": "a", "chosen": [ASKED, SAID], "rejected": []},
        PAIRS,
        r"`rejected` is empty \(\[\]\), but a pair has one text for each answer; leave such",
        [None],
    ),
    "no pair": (
        CHAT,
        PAIRS | {"form": "preference"},
        "no 'chosen', so it is no pair of answers: .*; known forms are `prompt`, `question`, `mess",
        [
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"question": "a", "chosen": "b", "rejected": "c"},
            {"instruction": "a", "input": "x", "system": "s", "chosen": "b", "rejected": "c"},
            {"messages": [ASKED], "chosen": [SAID], "rejected": [OTHER]},
            {"chosen": [ASKED, SAID], "rejected": [ASKED, OTHER]},
            {
                "chosen": "\n\nHuman: a\n\nAssistant: b",
                "rejected": "\n\nHuman: a\n\nAssistant: c",
            },
        ],
    ),
    "a pair without a prompt": (
        {"chosen": "b", "rejected": "c"},
        PAIRS,
        "no prompt is found in .*; known forms are `prompt`",
        [{"prompt": "a", "chosen": "b", "rejected": "c"}],
    ),
    "an answer without a label": (
        {"prompt": "a", "completion": "b"},
        LABELS,
        "no answer with a `label` that is true or false: .*; known forms are `label`",
        [
            {"prompt": "a", "completion": "b", "label": True},
            CHAT | {"label": False},
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
            | {"label": True},
            {"instruction": "a", "output": "b", "label": False},
            {"prompt": "a", "chosen": "b", "rejected": "c"},
        ],
    ),
    "a labelled answer without text": (
        {"prompt": "a", "completion": " ", "label": True},
        LABELS,
        "the answer has no text to learn: .*; leave such records out",
        [None],
    ),
}
"""A remedy is another record, or another way to read it; None: there is none to try."""


@pytest.mark.parametrize("case", RECORDS)
def test_what_the_error_of_a_record_advises_works(case):
    def documents(record: dict[str, Any], template: str = CHATML, **how: Any) -> list[Document]:
        return RecordReader(ChatTemplate(template, {}), **how).documents(record)

    record, how, says, remedies = RECORDS[case]
    with pytest.raises(BadLineError) as raised:
        documents(record, **how)
    assert re.search(says, str(raised.value)), str(raised.value)
    for remedy in filter(None, remedies):
        if remedy.keys() <= {"template", "form", "reads_pairs", "reads_labels"}:
            assert documents(record, **how | remedy)
        else:
            assert isinstance(documents(remedy, **how), list)


# ---- layouts: settings, processes, the error, and for each remedy settings and processes --------

LAYOUTS = {
    "a degree too many": (
        ["parallel.dp_shard=3"],
        4,
        "parallel.dp_shard: .* leave dp_shard at -1, or start 3 processes",
        [(["parallel.dp_shard=-1"], 4), (["parallel.dp_shard=3", "train.global_batch_size=12"], 3)],
    ),
    "more than there are": (
        ["parallel.tp=2", "parallel.dp_replicate=2"],
        2,
        "parallel.dp_shard: .* lower one, or start a multiple of 4 processes",
        [(["parallel.tp=2"], 2), (["parallel.tp=2", "parallel.dp_replicate=2"], 8)],
    ),
    "experts of none": (
        ["parallel.ep=2", "model.preset=qwen3-0.6b"],
        2,
        "parallel.ep: 2 .*, but qwen3 has no experts; use 1",
        [(["parallel.ep=1", "model.preset=qwen3-0.6b"], 2)],
    ),
    "heads of cp": (
        [
            "parallel.cp=8",
            "parallel.cp_method=ulysses",
            "model.num_heads=4",
            "model.num_kv_heads=2",
        ],
        8,
        "parallel.cp: 8 .*; let cp x tp divide num_heads, and num_kv_heads be a multiple or a "
        "divisor of it, or use parallel.cp_method all_gather",
        [
            (["parallel.cp=4", "parallel.cp_method=ulysses", "model.num_kv_heads=2"], 4),
            (["parallel.cp=8", "parallel.cp_method=all_gather"], 8),
            (["parallel.cp=4", "parallel.cp_method=ulysses", "model.num_kv_heads=4"], 4),
        ],
    ),
    "too many stages": (
        ["parallel.pp=16", "train.micro_batch_size=1"],
        16,
        "parallel.pp: 16 ranks with 1 stage each are 16 stages, but the model has 8 blocks; use 8",
        [(["parallel.pp=8", "train.micro_batch_size=1"], 8)],
    ),
    "a split of other stages": (
        ["parallel.pp=2", "parallel.pp_split=1,2"],
        2,
        "parallel.pp_split: 1,2 are 2 stages of 3 blocks; give 2 numbers that add up to .* 8",
        [(["parallel.pp=2", "parallel.pp_split=3,5"], 2)],
    ),
    "too few micro-batches": (
        ["parallel.pp=4", "train.micro_batch_size=8"],
        4,
        "parallel.pp: 4 is more than the 2 micro-batches of a step.*; raise train.global_batch_size"
        ", or lower train.micro_batch_size or parallel.pp",
        [
            (["parallel.pp=4", "train.global_batch_size=32", "train.micro_batch_size=8"], 4),
            (["parallel.pp=4", "train.micro_batch_size=4"], 4),
            (["parallel.pp=2", "train.micro_batch_size=8"], 2),
        ],
    ),
    "rows of ranks": (
        ["train.micro_batch_size=8"],
        4,
        "train.global_batch_size: 16 is not a multiple of .*; set train.global_batch_size 32 or "
        "train.micro_batch_size 4",
        [
            (["train.global_batch_size=32", "train.micro_batch_size=8"], 4),
            (["train.micro_batch_size=4"], 4),
        ],
    ),
    "heads of tp": (
        ["parallel.tp=4", "model.num_heads=4", "model.num_kv_heads=2"],
        4,
        "parallel.tp: 4 .* does not divide the model's num_kv_heads 2; use 2",
        [(["parallel.tp=2", "model.num_heads=4", "model.num_kv_heads=2"], 4)],
    ),
    "experts of ep": (
        ["parallel.ep=4", "model.num_experts=6"],
        4,
        "parallel.ep: 4 .* does not divide the model's num_experts 6; use 2",
        [(["parallel.ep=2", "model.num_experts=6"], 4)],
    ),
    "ranks of ep": (
        ["parallel.ep=4"],
        6,
        "parallel.ep: 4 does not divide dp_shard 6 .* ranks of the world of 6; use 2",
        [(["parallel.ep=2", "train.global_batch_size=24"], 6)],
    ),
    "a vocabulary of tp": (
        ["parallel.tp=8", "model.num_heads=8", "model.num_kv_heads=8", "model.vocab_size=9"],
        8,
        "parallel.tp: 8 .* is too much for the model's vocab_size 9: .*; use 2",
        [
            (
                [
                    f"parallel.tp={tp}",
                    "model.num_heads=8",
                    "model.num_kv_heads=8",
                    "model.vocab_size=9",
                    "train.micro_batch_size=2",
                ],
                8,
            )
            for tp in (2, 1)
        ],
    ),
    "a layer with a state": (
        ["parallel.cp=3", "model.preset=qwen3-next-80b-a3b", "model.num_layers=8"],
        3,
        "parallel.cp: 3 .* cannot share the .* of a layer with a recurrent state; let cp x tp div",
        [(["parallel.cp=2", "model.preset=qwen3-next-80b-a3b", "model.num_layers=8"], 2)],
    ),
    "tokens of cp": (
        ["parallel.cp=3", "parallel.cp_method=all_gather", "data.seq_len=128"],
        3,
        "parallel.cp: cp 3 x tp 1 does not divide .*; make data.seq_len a multiple of 6",
        [(["parallel.cp=3", "parallel.cp_method=all_gather", "data.seq_len=132"], 3)],
    ),
    "an interleaved pipeline of odd micro-batches": (
        ["parallel.pp=4", "parallel.pp_schedule=interleaved_1f1b", "train.global_batch_size=24"],
        4,
        "parallel.pp_schedule: 6 micro-batches, but .* needs a multiple of its 4 ranks; use gpip"
        "e or 1f1b, which take any number",
        [
            (["parallel.pp=4", f"parallel.pp_schedule={x}", "train.global_batch_size=24"], 4)
            for x in ("gpipe", "1f1b")
        ],
    ),
    "stages of a schedule": (
        ["parallel.pp=2", "parallel.pp_stages=2"],
        2,
        "parallel.pp_stages: 2 stages a rank, but parallel.pp_schedule 1f1b takes 1; set auto",
        [(["parallel.pp=2", "parallel.pp_stages=auto"], 2)],
    ),
    "too many stages a rank": (
        ["parallel.pp=4", "parallel.pp_schedule=interleaved_1f1b", "parallel.pp_stages=4"],
        4,
        "parallel.pp: 4 ranks with 4 stages each are 16 stages, but the model has 8 blocks; use 2 "
        r"or fewer, or fewer stages \(parallel.pp_schedule, parallel.pp_stages\)",
        [
            (["parallel.pp=2", "parallel.pp_schedule=interleaved_1f1b", "parallel.pp_stages=4"], 2),
            (["parallel.pp=4", "parallel.pp_schedule=interleaved_1f1b", "parallel.pp_stages=2"], 4),
            (["parallel.pp=4", "parallel.pp_schedule=1f1b"], 4),
        ],
    ),
    "generators of all ranks": (
        ["rl.placement=apart", "rl.generators=2"],
        2,
        r"rl.generators: 2 of 2 .* none to train; lower it, or start more \(launch.nproc\)",
        [
            (["rl.placement=apart", "rl.generators=1"], 2),
            (["rl.placement=apart", "rl.generators=2"], 4),
        ],
    ),
    "tp over machines": (
        ["parallel.tp=4", "launch.gpus_per_machine=2", "model.num_heads=4", "model.num_kv_heads=4"],
        4,
        "parallel.tp: 4 of 4 ranks on 2 machines .* would leave a machine; use a divisor of 2",
        [(["parallel.tp=2", "launch.gpus_per_machine=2", "train.micro_batch_size=2"], 4)],
    ),
    "ep over machines": (
        ["parallel.ep=3", "launch.gpus_per_machine=2", "model.num_experts=6"],
        6,
        "parallel.ep: 3 .* would leave a machine; use a divisor or a multiple of 2",
        [
            (["parallel.ep=2", "launch.gpus_per_machine=2", "train.global_batch_size=24"], 6),
            (
                [
                    "parallel.ep=6",
                    "launch.gpus_per_machine=2",
                    "train.global_batch_size=24",
                    "model.num_experts=6",
                ],
                6,
            ),
        ],
    ),
    "copies over machines": (
        ["parallel.fsdp_transport=copy", "launch.gpus_per_machine=2"],
        4,
        "parallel.fsdp_transport: 'copy' .*; use auto, or parallel.dp_replicate -1",
        [
            (["parallel.fsdp_transport=auto", "launch.gpus_per_machine=2"], 4),
            (
                [
                    "parallel.fsdp_transport=copy",
                    "launch.gpus_per_machine=2",
                    "parallel.dp_replicate=-1",
                ],
                4,
            ),
        ],
    ),
    "redundant experts over machines": (
        ["parallel.ep=4", "launch.gpus_per_machine=2", "moe.redundant_experts=1"],
        4,
        "moe.redundant_experts: 1 .* would leave a machine; use 0",
        [(["parallel.ep=4", "launch.gpus_per_machine=2", "moe.redundant_experts=0"], 4)],
    ),
    "static sizes over machines": (
        ["parallel.ep=4", "launch.gpus_per_machine=2", "moe.dispatch_mode=static"],
        4,
        "moe.dispatch_mode: 'static' .* would leave a machine; use exact",
        [(["parallel.ep=4", "launch.gpus_per_machine=2", "moe.dispatch_mode=exact"], 4)],
    ),
    "offloaded experts that ranks shard": (
        ["lora.rank=8", "lora.base_dtype=nf4", "lora.offload_experts=yes"],
        2,
        "lora.offload_experts: yes, but 2 ranks shard .*; use parallel.ep 2, or unset it",
        [
            (
                ["lora.rank=8", "lora.base_dtype=nf4", "lora.offload_experts=yes", "parallel.ep=2"],
                2,
            ),
            (["lora.rank=8", "lora.base_dtype=nf4"], 2),
        ],
    ),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_what_an_error_of_a_layout_advises_works(case):
    def plan(words: list[str], size: int) -> None:
        base = ["data.source=synthetic", "model.num_layers=8", "data.seq_len=128"]
        base += ["train.global_batch_size=16", "train.micro_batch_size=4"]
        given = {word.partition("=")[0]: word for word in [*base, *words]}
        config = Config.load("debug", [*given.values()], environ={})
        plan_world(*resolve_run(config), size)

    words, size, says, remedies = LAYOUTS[case]
    with pytest.raises(ConfigError, match=says):
        plan(words, size)
    for remedy in remedies:
        plan(*remedy)


# ---- resumed runs --------------------------------------------------------------------------------

AGAIN = {
    "another model": (
        {"model.hidden_size": 24},
        "checkpoint.resume: .* is of another model .*; choose another output_dir, or "
        "checkpoint.resume never",
        [{"output_dir": "other"}, {"checkpoint.resume": "never"}],
    ),
    "other data": (
        {"train.seed": 3},
        "output_dir: the run in it is over .* and was trained on other data; choose another "
        "output_dir, set checkpoint.resume never .*, or raise train.steps or train.epochs to go on",
        [
            {"output_dir": "other"},
            {"checkpoint.resume": "never"},
            {"train.steps": 2},
            {"train.steps": UNSET, "train.epochs": 1},
        ],
    ),
    "other moments": (
        {"optim.state_dtype": "bfloat16"},
        "checkpoint.resume: .*set optim.state_dtype to that, or set never",
        [{"optim.state_dtype": "float32"}, {"checkpoint.resume": "never"}],
    ),
    "other weights": (
        {"optim.name": "muon"},
        "checkpoint.resume: .*optim.name 'muon' .*; set these as they were, or set never",
        [{"optim.name": "adamw"}, {"checkpoint.resume": "never"}],
    ),
    "other parts": (
        {"train.freeze": "*router*"},
        r"was trained beside other frozen weights than this run has \(train.seed 0\); set "
        "train.seed, lora.rank, lora.base_dtype and train.freeze as they were, or checkpoint.res",
        [{"train.freeze": UNSET}, {"checkpoint.resume": "never"}],
    ),
    "adapters": (
        {"lora.rank": 8},
        "was trained beside other frozen weights .*; set train.seed, lora.rank, lora.base_dtype an",
        [{"lora.rank": UNSET}, {"checkpoint.resume": "never"}],
    ),
    "other dtypes of weights": (
        {"optim.state_dtype": "float8", "optim.weight_dtype": "bfloat16"},
        "checkpoint.resume: its .* is float32 .*, but this run has bfloat16 .*; set optim.weight"
        "_dtype as it was",
        [{"optim.weight_dtype": UNSET, "optim.state_dtype": "float32"}],
    ),
    "a folder of checkpoints": (
        {"checkpoint.resume": "."},
        "checkpoint.resume: .* is not a checkpoint: .*; give a step-... folder, or the output_dir ",
        [
            {"checkpoint.resume": "out/checkpoints/step-00000001"},
            {"checkpoint.resume": "out"},
        ],
    ),
    "no selection bias": (
        {"moe.bias_update_rate": 0.1},
        "moe.bias_update_rate: .* without a selection bias; set it as it was, or start again with "
        "checkpoint.resume never",
        [{"moe.bias_update_rate": 0}, {"checkpoint.resume": "never"}],
    ),
    "no such checkpoint": (
        {"checkpoint.resume": "nowhere"},
        "checkpoint.resume: 'nowhere' is not a checkpoint: no such folder; name one, or auto, or",
        [
            {"checkpoint.resume": "out/checkpoints/step-00000001"},
            {"checkpoint.resume": "auto"},
            {"checkpoint.resume": "never"},
        ],
    ),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the run of one step in ``out``."""
    folder = tmp_path_factory.mktemp("trained")
    Trainer(made(TINY | {"output_dir": folder / "out"})).fit()
    return folder


@pytest.mark.parametrize("case", AGAIN)
def test_what_an_error_of_a_run_that_goes_on_advises_works(case, trained, tmp_path, monkeypatch):
    change, says, remedies = AGAIN[case]
    settings = TINY | {"output_dir": "out"} | change
    monkeypatch.chdir(shutil.copytree(trained, tmp_path / "0"))
    with pytest.raises(ConfigError) as raised:
        Trainer(made(settings))
    assert re.search(says, str(raised.value)), str(raised.value)
    for number, remedy in enumerate(remedies, 1):
        monkeypatch.chdir(shutil.copytree(trained, tmp_path / str(number)))
        Trainer(made(settings | remedy))


def test_what_the_errors_of_a_run_folder_advise_works(trained, tmp_path, monkeypatch, capsys):
    """A run's folder is no model until it is exported, and a model is no run."""
    monkeypatch.chdir(shutil.copytree(trained, tmp_path / "0"))
    with pytest.raises(ConfigError) as raised:
        resolve("out")
    says = r"no export: python -m moetrain\.checkpoint (export-hf \S+ \S+) writes one now"
    found = re.search(says, str(raised.value))
    assert found is not None, str(raised.value)
    assert export(found[1].split()) == 0
    assert resolve("out") == Path("out/hf")
    with pytest.raises(ConfigError) as raised:
        Trainer(made(TINY | {"output_dir": "new", "checkpoint.resume": "out/hf"}))
    says = "is not a run's checkpoint but a Hugging Face one: give it as model.path, or make one of"
    assert says in str(raised.value)
    sizes = [name for name in TINY if name.startswith("model.")]
    settings = TINY | dict.fromkeys(sizes, UNSET) | {"model.path": "out/hf", "output_dir": "new"}
    words = [f"{k}={v}" for k, v in settings.items() if v is not UNSET]
    Trainer(Config.load(None, words, environ={}))
    assert export(["import-hf", "out/hf", "imported"]) == 0
    resumed = settings | {"checkpoint.resume": "imported", "output_dir": "newer"}
    words = [f"{k}={v}" for k, v in resumed.items() if v is not UNSET]
    Trainer(Config.load(None, words, environ={}))
    capsys.readouterr()


# ---- requests to servers: the reader, the body, the error, and bodies that follow its advice -----

PROMPT = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 4}}
DATUM = {"tokens": [1, 2], "target_tokens": [2, 3]}
LIMITS = Limits(
    vocab_size=9, longest_row=4, longest_text=8, max_completions=2, max_logprobs=20, end_ids=()
)
SCORED = DATUM | {"logprobs": [-1.0, -1.0], "advantages": [1.0, 1.0]}


def passed(datum: dict[str, Any], loss: str = "cross_entropy") -> dict[str, Any]:
    return {"data": [datum], "loss_fn": loss}


def completions(body: dict[str, Any]) -> None:
    asked = Completions.model_validate({"model": "m", "prompt": "a"} | body)
    asked.grammars(ByteTokenizer())


def chats(body: dict[str, Any]) -> None:
    asked = Chat.model_validate({"model": "m", "messages": [ASKED]} | body)
    asked.grammars(ByteTokenizer())


def responses(body: dict[str, Any]) -> None:
    Responses.model_validate({"model": "m", "input": "a"} | body)


def job(kind: str) -> Any:
    return lambda body: LIMITS.parse(kind, body)


REQUESTS: list[tuple[Any, dict[str, Any], str, list[dict[str, Any]]]] = [
    (
        completions,
        {"frequency_penalty": 1},
        "'frequency_penalty' 1 is not supported; leave it out, or send 0",
        [{}, {"frequency_penalty": 0}],
    ),
    (completions, {"logit_bias": {"1": 2}}, "leave it out, or send {}", [{}, {"logit_bias": {}}]),
    (
        completions,
        {"max_tokens": 0},
        "max_tokens 0 asks for nothing; raise it, or send echo true",
        [{"max_tokens": 1}, {"max_tokens": 0, "echo": True}],
    ),
    (
        completions,
        {"response_format": {"type": "json_schema"}},
        "response_format: json_schema has no schema; send one",
        [{"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}],
    ),
    (
        chats,
        {"max_tokens": 3, "max_completion_tokens": 3},
        "max_tokens and max_completion_tokens mean the same; send only one",
        [{"max_tokens": 3}, {"max_completion_tokens": 3}],
    ),
    (
        chats,
        {"add_generation_prompt": True, "continue_final_message": True},
        "exclude each other; send one of them",
        [{"add_generation_prompt": True}, {"continue_final_message": True}],
    ),
    (
        chats,
        {"top_logprobs": 2},
        "top_logprobs has no effect without logprobs true; send both",
        [{"top_logprobs": 2, "logprobs": True}],
    ),
    (responses, {"messages": [ASKED]}, "'messages' is not supported; send input", [{"input": "a"}]),
    (
        responses,
        {"response_format": {"type": "json_object"}},
        "'response_format' is not supported; send text.format",
        [{"text": {"format": {"type": "json_object"}}}],
    ),
    (
        responses,
        {"max_tokens": 3},
        "'max_tokens' is not supported; send max_output_tokens",
        [{"max_output_tokens": 3}],
    ),
    (
        responses,
        {"previous_response_id": "x"},
        "'previous_response_id' is not supported; send the whole input",
        [{"input": [ASKED, SAID, ASKED]}],
    ),
    (
        responses,
        {"input": [{"type": "reasoning", "summary": []}]},
        "is no message, function_call or function_call_output; send only these",
        [
            {"input": [ASKED | {"type": "message"}]},
            {
                "input": [
                    ASKED,
                    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "1", "output": "a"},
                ]
            },
        ],
    ),
    (
        responses,
        {"tools": [{"type": "web_search"}]},
        "tools: .* is not of type function; leave it out",
        [{"tools": []}],
    ),
    (
        job("forward"),
        passed({"tokens": [], "target_tokens": []}),
        r"data\[0\] has no tokens; send one or more",
        [passed(DATUM)],
    ),
    (
        job("forward"),
        passed({"tokens": [1] * 5, "target_tokens": [1] * 5}),
        "has 5 tokens, more than the 4 of a row \\(data.seq_len\\); shorten it",
        [passed({"tokens": [1] * 4, "target_tokens": [1] * 4})],
    ),
    (job("forward"), passed(DATUM, "gspo"), "loss_fn 'gspo' is not one of cross_entropy", []),
    (
        job("forward"),
        passed(DATUM, "ppo"),
        "has no logprobs, which loss 'ppo' needs; send them",
        [passed(SCORED, "ppo")],
    ),
    (
        job("forward"),
        passed(SCORED),
        "has logprobs, which loss 'cross_entropy' does not use; leave them out",
        [passed(DATUM)],
    ),
    (
        job("forward"),
        passed(DATUM | {"weights": [1.0]}),
        "has 1 weights for 2 tokens; send one for each",
        [passed(DATUM | {"weights": [1.0, 0.0]})],
    ),
    (
        job("asample"),
        PROMPT | {"sampling_params": {"max_tokens": 7}},
        "2 tokens and max_tokens 7 are more than the 8 .*; shorten it, or lower max_tokens",
        [
            PROMPT | {"sampling_params": {"max_tokens": 6}},
            {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 7}},
        ],
    ),
    (
        job("asample"),
        PROMPT | {"num_samples": 3},
        "num_samples 3 is more than jobs.max_completions 2; ask in parts",
        [PROMPT | {"num_samples": 2}],
    ),
    (
        job("asample"),
        PROMPT | {"prompt_logprobs_last_n": 1},
        "prompt_logprobs_last_n has no effect without prompt_logprobs; send both",
        [PROMPT | {"prompt_logprobs_last_n": 1, "prompt_logprobs": True}],
    ),
    (
        job("asample"),
        PROMPT | {"sampling_params": {"max_tokens": 4, "stop": "x"}},
        r"stop: stop texts need a tokenizer \(data.tokenizer\); send token ids",
        [PROMPT | {"sampling_params": {"max_tokens": 4, "stop": [3]}}],
    ),
    (
        job("asample"),
        PROMPT | {"topk_sample_logprobs": 6},
        "topk_sample_logprobs 6 for every token makes .*; lower it, or ask in parts",
        [PROMPT | {"topk_sample_logprobs": 6, "sampling_params": {"max_tokens": 3}}],
    ),
    (job("save_weights"), {}, "path is missing; send a name for the save", [{"path": "a"}]),
]


@pytest.mark.parametrize(
    ("parse", "body", "says", "remedies"), REQUESTS, ids=[row[2][:40] for row in REQUESTS]
)
def test_what_the_error_of_a_request_advises_works(parse, body, says, remedies):
    with pytest.raises(ValueError, match=says):
        parse(body)
    for remedy in remedies:
        parse(remedy)


def test_what_the_error_of_a_servers_doors_advises_works(tmp_path):
    def access(**changed: Any) -> Access:
        usual = {"host": "127.0.0.1", "port": 0, "auth": "auto", "token_file": None}
        found = Access(**usual | {"own_file": tmp_path / "own"} | changed, packages=())
        found.check()
        return found

    with pytest.raises(ConfigError, match=r"port: 65536 is not a port, 1 to 65535 .0: any free"):
        access(port=65536)
    for port in (0, 1, 65535):
        access(port=port)
    for auth in ("auto", "none"):
        given = {"token_file": str(tmp_path / "mine"), "auth": auth}
        with pytest.raises(ConfigError, match=r"contradicts auth .*; unset it, or set auth token$"):
            access(**given)
        access(**given | {"token_file": None})
        access(**given | {"auth": "token"})
    empty = tmp_path / "empty"
    empty.write_text(" ")
    with pytest.raises(ConfigError, match="holds no token; write one there, or unset token_file"):
        access(token_file=str(empty), auth="token").token()
    empty.write_text("secret")
    assert access(token_file=str(empty), auth="token").token() == "secret"
    assert access(auth="token").token()
    listener = access().listen()
    port = listener.getsockname()[1]
    try:
        with pytest.raises(
            ConfigError, match=f"port: {port}: cannot listen at 127.0.0.1: .*; choose"
        ):
            access(port=port).listen()
        access().listen().close()
    finally:
        listener.close()
    with pytest.raises(ConfigError, match=r"host: 'no such' is not an address: .*; choose another"):
        access(host="no such").listen()


# ---- names in all messages -----------------------------------------------------------------------


@functools.cache
def texts() -> dict[str, str]:
    """Return every string of the package except docstrings, by its place, with ``{}`` for formatted
    parts.

    The ``--help`` texts of settings are included.
    """
    found = {}
    for file in sorted((ROOT / "moetrain").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                skipped |= {id(part) for part in node.values}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                text = "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "{}"
                    for part in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            else:
                continue
            if id(node) not in skipped:
                found[f"{file.relative_to(ROOT)}:{node.lineno}:{node.col_offset}"] = text
    helped = {f"--help of {k}": " ".join((f.description or "").split()) for k, f in FIELDS.items()}
    return found | helped


_NAMED = re.compile(rf"(?<![\w.'/`])({'|'.join(sorted(SECTIONS))})\.([a-z_]+[a-z0-9_]*)(?![\w(./])")


UNUSED = [
    *((REINFORCE, f"train.objective {x}", "") for x in ("dpo", "reward", "kto")),
    (REINFORCE, "train.beta 0.2", ""),
    (REINFORCE, 'data.mix [{"path":"a.jsonl"}]', ""),
    (REINFORCE, "data.train_on last", ""),
    (REINFORCE, "data.bad_records skip", ""),
    (REINFORCE, "train.target_loss 1.5", ""),
    (JOBS, "train.objective dpo", ""),
    (JOBS, "train.target_loss 1.5", ""),
    (JOBS, "data.chat_template a.jinja", ""),
    (JOBS, "data.streaming yes", ""),
    (TRAIN, "rl.kl k1", ""),
    (
        REINFORCE,
        'data.chat_template_kwargs {"a":1}',
        "contradicts rl.chat False and rl.env 'sort'; unset it, or set rl.chat yes, or use another "
        "rl.env",
    ),
    (TRAIN, "data.chat_template a.jinja", "unset it, or set data.source records or jsonl"),
]


@pytest.mark.parametrize(
    ("program", "words", "says"), UNUSED, ids=[f"{x.name}-{words}" for x, words, _ in UNUSED]
)
def test_no_error_of_a_command_advises_a_setting_that_it_does_not_use(
    program, words, says, monkeypatch, tmp_path
):
    """Leaving the setting out works, and so does each other remedy."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jinja").write_text(CHATML)
    (tmp_path / "a.jsonl").write_text(CHATS)
    name, value = words.split(" ", 1)
    with pytest.raises(ConfigError) as raised:
        program.load(None, [f"{name}={value}"])
    complaint = str(raised.value)
    assert complaint.startswith(f"{name}: ")
    assert complaint.endswith(says or "does not use it; leave it out")
    program.load(None, [])
    advised = complaint.partition("; ")[2]
    if "rl.chat" in advised:
        program.load(None, [f"{name}={value}", "rl.chat=yes"])
        program.load(None, [f"{name}={value}", "rl.env=a.py:Own"])
    if "data.source" in advised:
        for source in ("records", "jsonl"):
            program.load(None, [f"{name}={value}", f"data.source={source}", "data.path=a.jsonl"])


def test_every_setting_that_a_message_names_is_one():
    wrong = []
    for place, text in texts().items():
        if " " not in text:
            continue  # a name alone is a key of a table, or a module
        for section, name in _NAMED.findall(text):
            known = f"{section}.{name}" in DEFAULTS
            is_start = any(key.startswith(f"{section}.{name}") for key in DEFAULTS)
            is_more = text.partition(f"{section}.{name}")[2][:1] in ("{", "*")
            if not known and not (is_start and is_more):
                wrong.append(f"{place}: {section}.{name}")
    assert wrong == []


_VALUED = re.compile(rf"(?:set|use|with|or|unless) ({'|'.join(map(re.escape, FIELDS))}) '?(\w+)")
_ELSE = {"as", "that", "to", "and", "or", "is", "are", "asks", "names", "decides", "keeps", "each"}


def test_every_value_that_a_message_names_for_a_setting_is_one_of_its_choices():
    named, wrong = 0, []
    for place, text in texts().items():
        for name, value in _VALUED.findall(text):
            kinds = [FIELDS[name].annotation, *get_args(FIELDS[name].annotation)]
            has_choices = bool in kinds or any(get_origin(kind) is Literal for kind in kinds)
            if has_choices and value not in _ELSE:
                named += 1
                wrong += [f"{place}: {name} {value}"] * bool(refusal(name, value))
    assert wrong == []
    assert named >= 15


def test_every_command_that_a_message_names_is_one():
    named, wrong = 0, []
    for place, text in texts().items():
        for name, rest in re.findall(r"python -m moetrain\.(\w+) ?([\w-]*)", text):
            named += 1
            is_one = rest in checkpoint_commands if name == "checkpoint" else name in COMMANDS
            wrong += [f"{place}: {name} {rest}"] * (not is_one)
    assert wrong == []
    assert named >= 4


def test_every_file_of_the_repository_that_the_package_names_is_there():
    """The names are in messages, docstrings and comments; a docs page may have a heading."""
    pattern = r"(?<![\w/.{-])((?:docs|examples|scripts|tests)/[\w./-]*\w\.(?:md|py|sh|txt))"
    named = {
        (str(file.relative_to(ROOT)), name)
        for file in (ROOT / "moetrain").rglob("*.py")
        for name in re.findall(pattern, file.read_text())
    }
    assert [(place, name) for place, name in named if not (ROOT / name).exists()] == []
    assert len(named) > 5


def test_every_extra_that_a_message_says_to_install_is_one():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    named = {x for text in texts().values() for x in re.findall(r"moetrain\[(\w+)\]", text)}
    assert named <= extras.keys()
    assert len(named) >= 4
