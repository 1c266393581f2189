"""User errors on a command line: each is refused in one line that names the setting.

A row has the given words, the setting that the line names, and words of the line.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from pydantic import BaseModel

from moetrain.config import Config, ConfigError
from moetrain.config.elsewhere import TRAINERS
from tests.lib.command_lines import assert_refused

UNKNOWN = [  # words, field, hint
    ("--lr 3e-4", "lr", "did you mean --optim.lr?"),
    ("lr=3e-4", "lr", "did you mean optim.lr?"),
    ("--train.lr 1", "train.lr", "did you mean --optim.lr?"),
    ("--learning-rate 1", "learning-rate", "did you mean --optim.lr?"),
    ("--learning_rate=1", "learning_rate", "did you mean --optim.lr?"),
    ("--optim.learning_rate 1", "optim.learning_rate", "--optim.lr?"),
    ("--gpus 2", "gpus", "did you mean --launch.nproc?"),
    ("--lora.r 16", "lora.r", "did you mean --lora.rank?"),
    ("--steps 5", "steps", "did you mean --train.steps?"),
    ("--train.stepz 5", "train.stepz", "did you mean --train.steps?"),
    ("--train_steps 5", "train_steps", "did you mean --train.steps?"),
    ("--train-steps 5", "train-steps", "did you mean --train.steps?"),
    ("--Train.Steps 5", "Train.Steps", "did you mean --train.steps?"),
    ("--trian.steps 5", "trian.steps", "did you mean --train.steps?"),
    ("--max_steps 5", "max_steps", "did you mean --train.steps?"),
    ("--num_train_epochs 3", "num_train_epochs", "did you mean --train.epochs?"),
    ("--batch_size 3", "batch_size", "did you mean --train.global_batch_size?"),
    ("--micro-batch-size 3", "micro-batch-size", "did you mean --train.micro_batch_size?"),
    ("--model_name_or_path x", "model_name_or_path", "did you mean --model.path?"),
    ("--path x", "path", "did you mean --model.path or --data.path or --lora.path?"),
    ("--modle.path x", "modle.path", "did you mean --model.path?"),
    ("--max_seq_length 3", "max_seq_length", "did you mean --data.seq_len?"),
    ("--output x", "output", "did you mean --output_dir?"),
    ("--output-dir x", "output-dir", "did you mean --output_dir?"),
    ("--dry-run", "dry-run", "did you mean --dry_run?"),
    ("--dry_run=yes", "dry_run", "did you mean --dry_run?"),
    ("--model.lora_rank 8", "model.lora_rank", "did you mean --lora.rank?"),
    ("--adapter.width 8", "adapter.width", "unknown setting; --help lists them all"),
    ("--quux_project x", "quux_project", "unknown setting; --help lists them all"),
    ("--parallel.dp 2", "parallel.dp", "unknown setting; --help lists them all"),
    ("--train 3", "train", "unknown setting"),
    ("--train. 3", "train.", "unknown setting"),
    ("--.steps 3", ".steps", "did you mean --train.steps?"),
    ("--", "--", "unknown setting"),
    ("--=3", "--=3", "unknown setting"),
    ("=3", "=3", "unknown setting"),
    ("-v=3", "-v", "unknown setting"),
    ("--a.b.c.d.e 3", "a.b.c.d.e", "unknown setting"),
]

VALUES = [
    ("--train.steps many", "train.steps", "'many': give a valid integer"),
    ("--train.steps 1e400", "train.steps", "'1e400': give a valid integer"),
    ("--train.steps 1e19", "train.steps", "'1e19': is beyond 64 bits"),
    ("--train.steps 0", "train.steps", "'0': give a number greater than 0"),
    ("--train.steps -5", "train.steps", "greater than 0"),
    ("--train.steps 1.5", "train.steps", "'1.5'"),
    ("--train.steps 15e-1", "train.steps", "'15e-1': give a valid integer"),
    ("--train.steps 0x10", "train.steps", "'0x10'"),
    (
        "--train.steps 5 --train.epochs 2",
        "train.epochs",
        "contradicts train.steps 5",
    ),
    ("--train.steps none", "train.steps", "not set; give it, or train.epochs"),
    ("--train.steps 9223372036854775808", "train.steps", "beyond 64 bits"),
    (f"--train.steps {'9' * 5000}", "train.steps", r"'999+\.\.\.9+': Unable to parse"),
    ("--train.epochs 0", "train.epochs", "greater than 0"),
    ("--train.epochs -1", "train.epochs", "greater than 0"),
    ("--train.epochs inf", "train.epochs", "finite"),
    ("--train.seed -1", "train.seed", "greater than or equal to 0"),
    ("--train.seed 18446744073709551616", "train.seed", "beyond 64 bits"),
    ("--train.seed 1e400", "train.seed", "'1e400'"),
    ("--train.seed none", "train.seed", "'none'"),
    ("--train.micro_batch_size 0", "train.micro_batch_size", "greater than 0"),
    ("--train.global_batch_size 17", "train.global_batch_size", "not a multiple of .* 16"),
    ("--train.device tpu", "train.device", "'auto', 'cpu' or 'cuda'"),
    ("--train.dtype fp8", "train.dtype", "'float32'"),
    ("--train.deterministic maybe", "train.deterministic", "'maybe'"),
    ("--train.deterministic 2", "train.deterministic", "'2'"),
    ("--train.sample_tokens -1", "train.sample_tokens", "greater than or equal to 0"),
    ("--train.sample_prompt=", "train.sample_prompt", "'': is empty"),
    ("--train.max_bad_steps 0", "train.max_bad_steps", "greater than 0"),
    ("--optim.lr inf", "optim.lr", "finite"),
    ("--optim.lr nan", "optim.lr", "'nan'"),
    ("--optim.lr 0", "optim.lr", "greater than 0"),
    ("--optim.lr -1e-3", "optim.lr", "greater than 0"),
    ("--optim.lr 1,5", "optim.lr", "'1,5': give a valid number"),
    ("--optim.lr 1e999", "optim.lr", "finite"),
    ("--optim.lr=", "optim.lr", "''"),
    ("--optim.lr", "optim.lr", "has no value on the command line"),
    ("--optim.lr --train.steps 3", "optim.lr", "has no value on the command line"),
    ("--optim.eps inf", "optim.eps", "finite"),
    ("--optim.eps 0", "optim.eps", "greater than 0"),
    ("--optim.eps 1e-60", "optim.eps", "'1e-60': is 0 or infinite in fp32"),
    ("--optim.lr 1e39", "optim.lr", "'1e39': is 0 or infinite in fp32"),
    ("--optim.beta1 1", "optim.beta1", "less than 1"),
    ("--optim.beta2 1.1", "optim.beta2", "less than 1"),
    ("--optim.beta2 -infinity", "optim.beta2", "finite"),
    ("--optim.weight_decay -0.1", "optim.weight_decay", "greater than or equal to 0"),
    ("--optim.weight_decay inf", "optim.weight_decay", "finite"),
    ("--optim.max_grad_norm inf", "optim.max_grad_norm", "finite"),
    ("--optim.min_lr_ratio 2", "optim.min_lr_ratio", "less than or equal to 1"),
    ("--optim.schedule linear", "optim.schedule", "'cosine', 'wsd' or 'constant'"),
    ("--optim.decay_fraction 0.5", "optim.decay_fraction", "contradicts optim.schedule 'cosine'"),
    ("--optim.warmup_steps -1", "optim.warmup_steps", "greater than or equal to 0"),
    ("--optim.warmup_fraction 1", "optim.warmup_fraction", "less than 1"),
    (
        "--optim.warmup_fraction 0.1 --optim.warmup_steps 3",
        "optim.warmup_fraction",
        r"0.1 \(command line\) contradicts optim.warmup_steps 3",
    ),
    ("--data.source web", "data.source", "'stdlib', 'text', 'records', 'jsonl' or"),
    ("--data.source text", "data.path", "not set, and data.source 'text' needs it"),
    ("--data.source jsonl", "data.path", "not set, and data.source 'jsonl' needs it"),
    ("--data.path x.md", "data.source", "'x.md' ends in none .*; set text .* or records .*stdl"),
    ("--data.path a.txt --data.source stdlib", "data.path", "contradicts data.source 'stdlib'"),
    ("--data.eval_path x", "data.eval_path", "contradicts data.source 'stdlib'"),
    ("--data.text_field body", "data.text_field", "contradicts data.source 'stdlib'"),
    ("--data.chat_template x", "data.chat_template", "contradicts data.source 'stdlib'"),
    ("--data.num_documents 3", "data.num_documents", "contradicts data.source 'stdlib'"),
    ("--data.num_documents 4611686018427387904", "data.num_documents", "less than 2147483648"),
    ("--data.eval_fraction 1", "data.eval_fraction", "less than 1"),
    ("--data.eval_fraction nan", "data.eval_fraction", "finite"),
    ("--data.seq_len 1", "data.seq_len", "greater than 1"),
    ("--data.seq_len -256", "data.seq_len", "greater than 1"),
    ("--data.seq_len auto", "data.seq_len", "'auto'"),
    ("--data.tokenizer=", "data.tokenizer", "is empty"),
    ("--data.cache_dir=", "data.cache_dir", "is empty"),
    ("--parallel.tp 0", "parallel.tp", "greater than 0"),
    ("--parallel.tp two", "parallel.tp", "'two'"),
    ("--parallel.ep 0", "parallel.ep", "greater than 0"),
    ("--parallel.ep auto", "parallel.ep", "'auto'"),
    ("--parallel.dp_shard -2", "parallel.dp_shard", "give a positive number, or -1"),
    ("--parallel.pp_schedule gpipe", "parallel.pp_schedule", "'gpipe' contradicts parallel.pp 1"),
    ("--parallel.pp_stages 2", "parallel.pp_stages", "2 contradicts parallel.pp 1"),
    ("--parallel.pp_split 2,2", "parallel.pp_split", "'2,2' contradicts parallel.pp 1"),
    ("--moe.deepep_num_sms 7", "moe.deepep_num_sms", "positive even number"),
    ("--moe.deepep_num_sms 0", "moe.deepep_num_sms", "positive even number"),
    ("--moe.deepep_num_sms many", "moe.deepep_num_sms", "'many'"),
    ("--moe.deepep_num_sms 24", "moe.deepep_num_sms", "24 contradicts parallel.ep 1"),
    ("--moe.dispatch_mode static", "moe.dispatch_mode", "contradicts parallel.ep 1"),
    ("--moe.dispatcher deepep", "moe.dispatcher", "contradicts parallel.ep 1"),
    ("--moe.dispatcher local --parallel.ep 2", "moe.dispatcher", "contradicts parallel.ep 2"),
    ("--moe.dispatcher nccl", "moe.dispatcher", "'nccl'"),
    ("--moe.static_capacity 3", "moe.static_capacity", "contradicts moe.dispatch_mode 'exact'"),
    ("--moe.static_capacity 0.5", "moe.static_capacity", "greater than or equal to 1"),
    ("--moe.static_capacity inf", "moe.static_capacity", "finite"),
    ("--moe.aux_loss_coef inf", "moe.aux_loss_coef", "finite"),
    ("--moe.aux_loss_coef -1", "moe.aux_loss_coef", "greater than or equal to 0"),
    ("--moe.z_loss_coef inf", "moe.z_loss_coef", "finite"),
    ("--moe.bias_update_rate nan", "moe.bias_update_rate", "finite"),
    ("--activation.policy some", "activation.policy", "'some'"),
    ("--activation.save linear", "activation.save", "contradicts activation.policy 'none'"),
    ("--activation.policy selective --activation.save all", "activation.save", "'all'"),
    ("--kernels.backend cuda", "kernels.backend", "'auto', 'triton' or 'reference'"),
    ("--kernels.attention fast", "kernels.attention", "'fast'"),
    ("--compile.enabled perhaps", "compile.enabled", "'perhaps'"),
    ("--compile.enabled", "compile.enabled", "has no value .*; write --compile.enabled VALUE"),
    ("--checkpoint.keep 0", "checkpoint.keep", "greater than 0"),
    ("--checkpoint.interval -1", "checkpoint.interval", "greater than or equal to 0"),
    ("--checkpoint.resume=", "checkpoint.resume", "is empty"),
    ("--log.interval 0", "log.interval", "greater than 0"),
    ("--log.profile -1", "log.profile", "greater than or equal to 0"),
    ("--log.profile 5 --train.steps 3", "log.profile", "5, but the run has 3 steps and needs 10"),
    ("--log.profile_after 0", "log.profile_after", "greater than 0"),
    ("--launch.nproc 0", "launch.nproc", "positive number of processes"),
    ("--launch.nproc all", "launch.nproc", "'all': give a valid integer or 'auto'"),
    (
        "--launch.nproc 9999",
        "launch.nproc",
        r"9999 processes, .* has \d+ cores .*; use \d+ or fewer",
    ),
    ("--model.hidden_size 100000000", "model.hidden_size", "'100000000': .* or equal to 1048576"),
    (
        "--model.path x --data.path a.csv.zip",
        "data.source",
        "text .* or records .* data set of the hub",
    ),
    ("--model.num_layers 4611686018427387904", "model.num_layers", "less than or equal to 10000"),
    ("--model.num_layers 0", "model.num_layers", "greater than 0"),
    ("--model.init_std inf", "model.init_std", "finite"),
    ("--model.preset=", "model.preset", "is empty"),
    ("--model.path=", "model.path", "is empty"),
    ("--model.preset none", "model.preset", "not set; name a preset"),
    ("--model.path x --model.preset debug", "model.path", "contradicts model.preset 'debug'"),
    ("--model.path x --data.path y.txt --model.num_layers 2", "model.num_layers", "model.path 'x'"),
    ("--model.path x --data.path y.txt --model.init_std 1", "model.init_std", "model.path 'x'"),
    ("--model.path x", "data.path", "not set, and data.source 'text' needs it"),
    ("--model.path x --data.path a.md", "data.source", "not set, and data.path 'a.md' ends"),
    ("--output_dir=", "output_dir", "is empty"),
    ("--output_dir none", "output_dir", "'none': a run needs a folder"),
    ("--output_dir NULL", "output_dir", "'NULL': a run needs a folder"),
    ("sft", "model.preset", "name a preset, or set model.path to a checkpoint"),
    (
        "debug mine.toml",
        "'mine.toml'",
        "is not a setting: .* a recipe or file only as the first word",
    ),
    ("debug sft", "'sft'", "is not a setting: .* a recipe or file only as the first word"),
    ("debug train.steps 3", "'train.steps'", "is not a setting: write --section.key value"),
    ("--train.steps 3 4", "'4'", "is not a setting"),
    ("debugg", "recipe", "is not one of .*, debug, .* nor a"),
    ("DEBUG", "recipe", "is not one of .*, debug, .* nor a"),
    ("outputs/debug/config.json", "recipe", "nor a .toml file"),
    ("-x", "recipe", "'-x' is not one of"),
]


@pytest.mark.parametrize(
    ("source", "words", "name", "value"),
    [
        (None, ["--train.steps", "1e6"], "steps", 1_000_000),
        (None, ["train.seed=1.5E3"], "seed", 1500),
        ({"model": {"preset": "debug"}, "train": {"steps": 2e3}}, [], "steps", 2000),
    ],
)
def test_a_power_of_ten_is_an_integer_where_it_is_one(source, words, name, value):
    found = getattr(Config.load(source, words, environ={}).train, name)
    assert (found, type(found)) == (value, int)


@pytest.mark.parametrize(("name", "source"), [("a.jsonl", "jsonl"), ("b.TXT", "text")])
def test_a_path_alone_says_what_it_holds(name, source):
    """The default recipe's own source is only a proposal, and gives way."""
    config = Config.load(None, ["--data.path", name], environ={})
    assert (config.data.source, config.data.path) == (source, name)
    assert config.model.preset == "debug"


@pytest.mark.parametrize("module", ["train", "generate"])
def test_a_reader_that_leaves_is_no_error(module):
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", f"moetrain.{module}", "--help"]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(("words", "field", "says"), UNKNOWN)
def test_unknown_names(words: str, field: str, says: str, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(words.split(), field, re.escape(says), tmp_path, capsys)


@pytest.mark.parametrize(("words", "field", "says"), VALUES)
def test_values(words: str, field: str, says: str, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(words.split(), field, says, tmp_path, capsys)


@pytest.mark.parametrize(
    ("words", "field", "says"),
    [
        ([""], "recipe", "'' is not one of"),
        (["--train.sample_prompt", "  "], "train.sample_prompt", "is empty"),
        (["--output_dir", " "], "output_dir", "is empty"),
        (["--output_dir", "a\0b"], "output_dir", "not text"),
        (["--output_dir", "a\udcffb"], "output_dir", "not text"),
        (["--data.source", "text", "--data.path", "\udcff"], "data.path", "not text"),
        (["--optim.lr\nx", "3"], "optim.lr x", "unknown setting"),
        (["--train.\x1b[31m", "3"], r"train.\x1b[31m", "unknown setting"),
        (["two\nlines.toml"], "config file", r"'two\\nlines.toml' cannot be read"),
        (["\0.toml"], "config file", "null"),
        (["x" * 300 + ".toml"], "config file", "cannot be read as TOML: .*File name too long"),
        (["--" + "x" * 100_000, "3"], f"{'x' * 160}...{'x' * 20}", "unknown setting"),
        (["--train.dtype", "y" * 100_000], "train.dtype", r"'y+\.\.\.y+'"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_words_with_odd_characters(words, field, says, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(words, field, says, tmp_path, capsys)


# ---- names of other trainers
# -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(a, b) for names in TRAINERS.values() for a, b in names.items()],
    ids=lambda word: word,
)
def test_a_name_of_another_trainer_is_answered_by_the_setting_here(theirs, ours):
    known = known_settings()
    assert ours in known
    if theirs in known:
        return  # it is a setting here too
    with pytest.raises(ConfigError, match=r"unknown setting; did you mean ") as caught:
        Config.load(None, [f"--{theirs}", "1"], environ={})
    hints = re.findall(r"--([\w.]+)", str(caught.value).partition("did you mean")[2])
    assert ours in hints
    assert len(hints) <= 2


def known_settings():
    """Return the names of all settings."""
    named = set()
    for name, field in Config.model_fields.items():
        section = field.default
        keys = type(section).model_fields if isinstance(section, BaseModel) else {}
        named |= {f"{name}.{key}" for key in keys} or {name}
    return named
