"""What a user can get wrong, in tables: each is one line that names the setting, and exit code 2.

Nothing here trains: a bad input is found before that, or this module would take long. In a row of
:data:`FILES`, ``{tmp}`` is an empty folder, ``{text}`` one of text files, ``{hf}`` a checkpoint of
which there is only its config.json.

A row is what is given, the setting that the line names, and words that it has.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moetrain.cli.checkpoint import main as checkpoint
from moetrain.cli.generate import main as generate
from moetrain.cli.train import main
from moetrain.cli.train import run_rl as rl
from moetrain.config import Config, ConfigError
from moetrain.models.hf.config import architecture_from_hf
from moetrain.models.hf.save import save_hf
from moetrain.models.transformer import Transformer

HF_CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
}

# ---- the command line ---------------------------------------------------------------------------

UNKNOWN = [  # words, field, what the hint says
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
    ("--model.lora_rank 8", "model.lora_rank", "unknown setting; --help lists them all"),
    ("--adapter.width 8", "adapter.width", "unknown setting; --help lists them all"),
    ("--wandb_project x", "wandb_project", "unknown setting; --help lists them all"),
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
    ("--data.source web", "data.source", "'stdlib', 'text', 'jsonl' or 'synthetic'"),
    ("--data.source text", "data.path", "not set, and data.source 'text' needs it"),
    ("--data.source jsonl", "data.path", "not set, and data.source 'jsonl' needs it"),
    ("--data.path x", "data.source", "'x' is neither .jsonl nor .txt; set text .* or jsonl .*stdl"),
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
    ("--parallel.dp_shard -2", "parallel.dp_shard", "greater than or equal to -1"),
    ("--parallel.reduce fp16", "parallel.reduce", "'fp16'"),
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
    ("--log.profile 5 --train.steps 3", "log.profile", "5, but the run has 3 steps, and 10 are"),
    ("--log.profile_as nvtx", "log.profile_as", "'nvtx' contradicts log.profile 0"),
    ("--log.profile_after 0", "log.profile_after", "greater than 0"),
    ("--activation.offload 1.1", "activation.offload", "auto or a number from 0 to 1"),
    ("--activation.offload nan", "activation.offload", "'nan'.*finite"),
    (
        "--activation.offload auto --activation.policy full",
        "activation.offload",
        "'auto' contradicts activation.policy 'full'",
    ),
    ("--launch.nproc 0", "launch.nproc", "positive number of processes"),
    ("--launch.nproc all", "launch.nproc", "'all': give a valid integer or give 'auto'"),
    (
        "--launch.nproc 9999",
        "launch.nproc",
        r"9999 processes, .* has \d+ cores .*; use \d+ or fewer",
    ),
    ("--model.hidden_size 100000000", "model.hidden_size", "'100000000': .* or equal to 1048576"),
    ("--model.path x --data.path owner/name", "data.source", "text .* jsonl .* a hub's data sets"),
    ("--model.path x --data.path a.jsonl.gz", "data.source", "compressed .* write them as .jsonl"),
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
    (
        "--model.path x --data.path chats",
        "data.source",
        "neither .jsonl nor .txt; set text",
    ),
    ("--model.path x --data.path a.json", "data.source", "not set, and data.path 'a.json' is nei"),
    ("--model.path x --data.path a.parquet", "data.source", "not set, and data.path 'a.parquet'"),
    ("--output_dir=", "output_dir", "is empty"),
    ("--output_dir none", "output_dir", "'none': a run needs a folder"),
    ("--output_dir NULL", "output_dir", "'NULL': a run needs a folder"),
    ("sft", "model.preset", "name a preset, or a checkpoint: model.path"),
    (
        "debug mine.toml",
        "'mine.toml'",
        "is a recipe or file, of which a run takes one",
    ),
    ("debug sft", "'sft'", "a recipe or file, of which a run takes one, .*; leave the rest out"),
    ("debug train.steps 3", "'train.steps'", "is not a setting; write --section.key value"),
    ("--train.steps 3 4", "'4'", "is not a setting"),
    ("debugg", "recipe", r"did you mean debug\?"),
    ("DEBUG", "recipe", r"did you mean debug\?"),
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
    """The default recipe's own source is but a proposal."""
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
        (["two\nlines.toml"], "config file", r"'two\\nlines.toml' does not exist"),
        (["\0.toml"], "config file", "null"),
        (["x" * 300 + ".toml"], "config file", "cannot be read: File name too long"),
        (["--" + "x" * 100_000, "3"], f"{'x' * 160}...{'x' * 20}", "unknown setting"),
        (["--train.dtype", "y" * 100_000], "train.dtype", r"'y+\.\.\.y+'"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_words_with_odd_characters(words, field, says, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(words, field, says, tmp_path, capsys)


# ---- the environment ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "value", "field", "says"),
    [
        ("MOETRAIN_TRAIN__LR", "1", "MOETRAIN_TRAIN__LR", "did you mean MOETRAIN_OPTIM__LR"),
        ("MOETRAIN_LR", "1", "MOETRAIN_LR", "did you mean MOETRAIN_OPTIM__LR"),
        ("MOETRAIN_TRAIN_STEPS", "1", "MOETRAIN_TRAIN_STEPS", "mean MOETRAIN_TRAIN__STEPS"),
        ("MOETRAIN_TRAIN__STEPZ", "1", "MOETRAIN_TRAIN__STEPZ", "mean MOETRAIN_TRAIN__STEPS"),
        ("MOETRAIN_", "1", "MOETRAIN_", "unknown setting"),
        ("MOETRAIN_DEBUG", "1", "MOETRAIN_DEBUG", "--help lists them all"),
        ("moetrain_optim__lr", "fast", "optim.lr", "'fast'"),
        ("MOETRAIN_OPTIM__LR", "", "optim.lr", "''"),
        ("MOETRAIN_OPTIM__EPS", "inf", "optim.eps", "finite"),
        ("MOETRAIN_OUTPUT_DIR", "", "output_dir", "is empty"),
        ("MOETRAIN_OUTPUT_DIR", "none", "output_dir", "needs a folder"),
        ("MOETRAIN_TRAIN__SEED", str(2**64), "train.seed", "beyond 64 bits"),
        ("MOETRAIN_COMPILE__ENABLED", "2", "compile.enabled", "'2'"),
        ("MOETRAIN_MODEL__PATH", "x", "data.path", "not set"),
    ],
)
def test_environment(variable, value, field, says, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(variable, value)
    monkeypatch.chdir(tmp_path)
    assert_refused([], field, says, tmp_path, capsys)


@pytest.mark.parametrize(
    ("variables", "field", "says"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "MASTER_ADDR", "not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "MASTER_PORT", "not set"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "http"},
            "MASTER_PORT",
            "'http' is not a number",
        ),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_LAUNCH_NODE_IPADDR", "not set"),
    ],
    ids=repr,
)
def test_a_launchers_variables(variables, field, says, tmp_path, capsys, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert_refused([], field, says, tmp_path, capsys)


# ---- TOML files ---------------------------------------------------------------------------------

DEBUG = '[model]\npreset = "debug"\n'

TOML = [
    ("not TOML", "steps", "config file", "is not TOML"),
    ("a tab that is no TOML", "[train\nsteps = 3", "config file", "is not TOML"),
    ("twice", "[train]\nsteps = 3\nsteps = 4", "config file", "is not TOML"),
    ("latin-1", b'[model]\npreset = "d\xe9bug"', "config file", "is not UTF-8: .* at byte 19"),
    ("UTF-16", '[model]\npreset = "debug"'.encode("utf-16"), "config file", "is not UTF-8"),
    ("binary", bytes(range(256)), "config file", "is not (TOML|UTF-8)"),
    ("deep arrays", "a = " + "[" * 100_000, "config file", "is nested too deeply"),
    ("deep tables", "a." * 20_000 + "b = 1", "config file", "is nested too deeply"),
    ("a number of 5,000 digits", f"[train]\nsteps = {'9' * 5000}", "config file", "digits"),
    ("a number of 65 bits", "[train]\nseed = 18446744073709551616", "train.seed", "64 bits"),
    ("a huge hexadecimal", f"[train]\nseed = 0x{'f' * 9000}", "train.seed", "36000 bits"),
    ("true for a number", "[train]\nsteps = true", "train.steps", "True: .* valid integer"),
    ("true for a float", "[optim]\nlr = true", "optim.lr", "True: .* valid number"),
    ("true in a union", "[launch]\nnproc = true", "launch.nproc", "True"),
    ("1 for a truth value", "[compile]\nenabled = 1", "compile.enabled", "1: give yes or no"),
    ("text for a truth value", '[compile]\nenabled = "yes"', "compile.enabled", "'yes'"),
    ("text for a number", '[train]\nsteps = "10"', "train.steps", "'10'"),
    ("text for a float", '[optim]\nlr = "1e-4"', "optim.lr", "'1e-4'"),
    ("10.5 for an integer", "[train]\nsteps = 10.5", "train.steps", "10.5: give a valid integer"),
    (
        "a word for an integer",
        '[train]\nsteps = "many"',
        "train.steps",
        "'many': give a valid inte",
    ),
    ("a setting of no section", 'steps = "many"', "steps", "did you mean train.steps"),
    ("a number for text", "[data]\ntokenizer = 3", "data.tokenizer", "3: .* valid string"),
    ("a date for text", "[data]\ntokenizer = 2026-01-01", "data.tokenizer", "date"),
    ("a list for text", '[data]\ntokenizer = ["byte"]', "data.tokenizer", "valid string"),
    ("a list for a number", "[train]\nsteps = [3]", "train.steps", r"\[3\]"),
    ("a table for a number", "[train.steps]\na = 3", "train.steps.a", "unknown setting"),
    ("inf", "[optim]\neps = inf", "optim.eps", "inf: .* finite"),
    ("nan", "[moe]\nz_loss_coef = nan", "moe.z_loss_coef", "finite"),
    ("NUL", '[data]\ntokenizer = "a\\u0000"', "data.tokenizer", "not text"),
    ("NUL in the folder", 'output_dir = "a\\u0000"', "output_dir", "not text"),
    ("an empty folder", 'output_dir = ""', "output_dir", "is empty"),
    ("no folder", 'output_dir = "none"', "output_dir", "needs a folder"),
    ("an unknown key", "[train]\nspeed = 3", "train.speed", "unknown setting"),
    ("a key of elsewhere", "[train]\nlr = 3", "train.lr", "did you mean optim.lr"),
    ("an unknown section", "[trian]\nsteps = 3", "trian.steps", "did you mean train.steps"),
    ("an empty unknown section", "[adapter]", "adapter", "unknown setting"),
    ("a section as a value", "train = 3", "train", r"3 is given for a section; .*\[train\]"),
    ("a list of sections", "[[train]]\nsteps = 3", "train", "is given for a section"),
    ("two that contradict", "[train]\nsteps = 3\nepochs = 1", "train.epochs", "train.steps 3"),
    ("both models", DEBUG + 'path = "x"', "model.path", "contradicts model.preset 'debug'"),
    ("no model", "[train]\nsteps = 3", "model.preset", "not set"),
    ("what is saved", '[activation]\nsave = ["x"]', "activation.save", "'x'"),
    ("numbers that are saved", "[activation]\nsave = [3]", "activation.save", "3"),
]


@pytest.mark.parametrize(
    ("text", "field", "says"), [row[1:] for row in TOML], ids=[row[0] for row in TOML]
)
def test_toml(text: str | bytes, field: str, says: str, tmp_path, capsys, monkeypatch):
    file = tmp_path / "mine.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.chdir(tmp_path)
    assert_refused([str(file)], field, says, tmp_path, capsys)


def test_files_that_cannot_be_read(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "link.toml").symlink_to(tmp_path / "nothing")
    (tmp_path / "loop.toml").symlink_to(tmp_path / "loop.toml")
    (tmp_path / "file").write_text("")
    for name, says in (
        ("folder.toml", "cannot be read: Is a directory"),
        ("link.toml", "does not exist"),
        ("loop.toml", "cannot be read: Too many levels"),
        ("no/such.toml", "does not exist"),
        ("file/below.toml", "cannot be read: Not a directory"),
    ):
        assert_refused([name], "config file", says, tmp_path, capsys)


def test_a_file_that_may_not_be_read(tmp_path, capsys, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)  # root may read anything
    assert_refused(["a.toml"], "config file", "cannot be read: Permission denied", tmp_path, capsys)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    file = tmp_path / "windows.toml"
    file.write_bytes(b'\xef\xbb\xbf[model]\r\npreset = "debug"\r\n[train]\r\nsteps = 7\r\n')
    assert Config.load(file, environ={}).train.steps == 7


# ---- mappings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "overrides", "message"),
    [
        ({"train": {"steps": True}}, [], r"train\.steps: True"),
        ({"train": {"steps": "3"}}, [], r"train\.steps: '3'"),
        ({"train": {"steps": 2**70}}, [], r"train\.steps: 1180\d+: is beyond 64 bits"),
        ({"train": {"steps": None}}, [], r"train\.steps: not set"),
        ({"train": {"seed": None}}, [], r"train\.seed: None"),
        ({"train": None}, [], "train: None is given for a section"),
        ({"train": 3}, [], "train: 3 is given for a section"),
        ({"train": {"steps": {}}}, [], r"train\.steps: {}"),
        ({"train.stepz": 3}, [], r"train\.stepz: unknown setting; did you mean train\.steps"),
        ({3: 4}, [], "3: unknown setting"),
        ({"optim": {"eps": float("inf")}}, [], r"optim\.eps: inf"),
        ({"output_dir": ""}, [], "output_dir: '': is empty"),
        (
            {"train": {"steps": 3}},
            ["train.epochs=1"],
            r"epochs: 1\.0 \(command.*\(mapping\)",
        ),
        (
            {"train": {"epochs": 3}},
            ["train.steps=1"],
            r"epochs: 3 \(mapping\) contra.*steps 1",
        ),
        (
            {},
            ["model.path=x", "data.path=y.txt"],
            r"'x' \(command line\) .* 'debug' \(mapping\)",
        ),
    ],
    ids=repr,
)
def test_mappings(source, overrides, message):
    with pytest.raises(ConfigError, match=message):
        Config.load({"model": {"preset": "debug"}} | source, overrides, environ={})


def test_a_mapping_that_contains_itself():
    tree: dict = {"model": {"preset": "debug"}}
    tree["train"] = tree
    with pytest.raises(ConfigError, match="config file: 'mapping' is nested too deeply"):
        Config.load(tree, environ={})


# ---- what only looking at files, folders and the machine shows ----------------------------------

PP = "--launch.nproc 2 --parallel.pp 2 --train.micro_batch_size 4"
HF = "--model.path {hf} --data.source text --data.path {text}"

FILES = [
    # The output folder.
    ("--output_dir {file}", "output_dir", "is not a folder; choose another"),
    ("--output_dir {file}/below/it", "output_dir", "'.*/file' is not a folder"),
    ("--output_dir {link}", "output_dir", "is a link to nothing"),
    ("--output_dir {link}/below", "output_dir", "is a link to nothing"),
    ("--output_dir {loop}", "output_dir", "link|Too many levels"),
    ("--output_dir /proc/moetrain", "output_dir", "cannot be written to"),
    ("--output_dir {tmp}/" + "n" * 300, "output_dir", "has a name of more than 255 bytes"),
    ("--output_dir {tmp}/" + "é" * 130, "output_dir", "has a name of more than 255 bytes"),
    ("--output_dir {tmp}" + "/n" * 2030, "output_dir", "of 4096 bytes for the names of its files"),
    ("--output_dir {tmp}" + "/n" * 3000, "output_dir", "too long|of 4096 bytes"),
    ("--output_dir {used}", "output_dir", "its metrics.jsonl is a folder"),
    ("--output_dir {used2}", "output_dir", "its checkpoints is not a folder"),
    ("--checkpoint.resume " + "n" * 300, "checkpoint.resume", "is not a checkpoint"),
    ("--checkpoint.resume {tmp}/no", "checkpoint.resume", "is not a checkpoint"),
    # The model.
    ("--model.preset gpt-5", "model.preset", "'gpt-5' is not one of debug.* give model.path"),
    ("--model.preset qwen3-235b-a22b", "model.preset", r"did you mean qwen3-30b-a3b\?"),
    ("--model.num_heads 3", "model.num_heads", "not a multiple"),
    ("--model.head_dim 7", "model.head_dim", "odd"),
    ("--model.num_experts 1", "model.num_experts", "more than"),
    ("--model.moe_intermediate_size 9", "model.moe_intermediate_size", "multiple of 8"),
    (
        "--model.path {tmp} --data.source text --data.path {text}",
        "model.path",
        "no config.json",
    ),
    ("--model.path {file} --data.source text --data.path {text}", "model.path", ""),
    # What the model decides.
    (HF, "data.tokenizer", "not set, and model.path '.*hf' holds no tokenizer.json"),
    (
        HF + " --data.tokenizer byte --data.seq_len 65",
        "data.seq_len",
        r"65 is more than the 64 positions \(max_position_embeddings\) of model.path '.*hf'",
    ),
    (
        HF + " --data.tokenizer byte --moe.z_loss_coef 0.1",
        "moe.z_loss_coef",
        "0.1, but qwen3 has no experts; unset it",
    ),
    ("--model.preset qwen3-0.6b --moe.force_balanced yes", "moe.force_balanced", "no experts"),
    ("--data.seq_len 4097", "data.seq_len", "more than the 4096 positions .* model.preset 'debug'"),
    # The layout.
    ("--parallel.pp 2", "parallel.pp", "world of 1 process"),
    ("--parallel.cp 2", "parallel.cp", "2: this version has no context parallelism; use 1"),
    ("--parallel.tp 2", "parallel.tp", "world of 1 process"),
    ("--parallel.ep 2", "parallel.ep", "2 does not divide"),
    ("--parallel.dp_replicate 2", "parallel.dp_replicate", "world of 1"),
    ("--launch.nproc 2 --parallel.pp 2", "parallel.pp", "2 is more than the 1 micro-batches"),
    (PP + " --parallel.pp_schedule 2f2b", "parallel.pp_schedule", "'gpipe', '1f1b' or 'int"),
    (PP + " --model.num_layers 1", "parallel.pp", "2 stages, and the model has 1 blocks; use 1 or"),
    (
        PP + " --parallel.pp_schedule interleaved_1f1b --model.num_layers 3",
        "parallel.pp",
        "use 1 or fewer, or fewer stages",
    ),
    (PP + " --parallel.pp_stages 2", "parallel.pp_stages", "2 stages a rank, where .*1f1b takes 1"),
    (PP + " --parallel.pp_split 1,2,3", "parallel.pp_split", "give 2 numbers that add up to"),
    (PP + " --parallel.pp_split 1,x", "parallel.pp_split", "integer"),
    (PP + " --parallel.pp_split 0,4", "parallel.pp_split", "one block at least"),
    (
        "--launch.nproc 4 --parallel.pp 2 --parallel.ep 2 --train.micro_batch_size 4 "
        "--moe.dispatch_mode static --moe.dispatcher deepep",
        "moe.dispatch_mode",
        "use exact",
    ),
    (
        "--parallel.reshard_after_forward -3",
        "parallel.reshard_after_forward",
        "give yes, no, or a number of blocks from 2 on",
    ),
    (
        "--launch.nproc 2 --parallel.pp 2 --parallel.pp_schedule interleaved_1f1b "
        "--train.global_batch_size 3 --train.micro_batch_size 1 --model.num_layers 4",
        "parallel.pp_schedule",
        "3 micro-batches, where interleaved_1f1b takes a multiple of its 2 ranks; gpipe, 1f1b",
    ),
    ("--launch.nproc 3", "train.global_batch_size", "3 ranks .* = 48; set .*global_batch_size 48$"),
    ("--launch.nproc 2", "train.global_batch_size", "size 16 x 2 .* = 32; set .* 32 or .*_size 8$"),
    ("--train.global_batch_size 1e11", "train.global_batch_size", "GiB of host memory .* lower it"),
    (
        "--launch.nproc 4 --parallel.tp 4 --model.vocab_size 5 --model.num_kv_heads 4",
        "parallel.tp",
        "too much for the model's vocab_size 5",
    ),
    ("--train.device cuda --launch.nproc 1", "train.device", "no CUDA device"),
    # The kernels.
    ("--kernels.attention flex", "kernels.attention", "no backward on a CPU"),
    ("--kernels.attention cudnn", "kernels.attention", ""),
]


COMMANDS = [  # the command, its words, the field, words that the line has
    (checkpoint, "inspect {tmp}/no", "PATH", "no such folder; give a step-... folder, or the out"),
    (
        checkpoint,
        "verify {text}",
        "PATH",
        "no manifest.json; give a step-... folder, or",
    ),
    (checkpoint, "diff {hf} {tmp}", "PATH", "a Hugging Face one: .* import-hf"),
    (checkpoint, "inspect", "checkpoint", "required: PATH; see --help"),
    (checkpoint, "look {tmp}", "checkpoint", "'look' .choose from 'inspect'"),
    (generate, "{run} --prompt a", "model.path", "no export: .* export-hf {run} {run}/hf writes"),
    (generate, "{adapted} --prompt a", "model.path", "adapters alone: .*{adapted}/adapter as adap"),
    (generate, "{tmp} --prompt a", "model.path|data.tokenizer", "no tokenizer.json"),
    (rl, "debug", "recipe", "'debug' is for another command: it sets data.source, .* is rl-sort"),
    (generate, "{hf}", "generate", "required: --prompt; see --help"),
]


@pytest.mark.parametrize(("run", "words", "field", "says"), COMMANDS)
def test_other_commands(run, words, field, says, places, capsys):
    for name, place in places.items():
        words, says = (text.replace("{" + name + "}", place) for text in (words, says))
    assert run(words.split()) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1), error
    assert re.match(f"error: ({field}): ", error), error
    assert re.search(says, error), error


# ---- kinds that nobody had listed ---------------------------------------------------------------

# Found by trying, as a user would who reads nothing: what is given, the files there are (by name,
# {} for a folder), the setting that the line names, and words that it has.
JSONL = "--data.source jsonl --data.path a.jsonl"
TEXT = "--data.source text --data.path a.txt"
CHAT = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}\n'
SOME_TEXT = {"a.txt": "some text. " * 100}
SAVED_DATASET = {"x/state.json": "{}", "x/dataset_info.json": "{}", "x/data-0.arrow": "ARROW1\0"}
BPE = '{"model": {"type": "BPE", "vocab": {"a": 0, "</s>": 1}, "merges": []}, "added_tokens": []}'


def _template(text: str) -> dict[str, str]:
    return {"a.jsonl": CHAT, "t.jinja": text}


def _tokenizer(config: str, tokenizer: str = BPE) -> dict[str, str]:
    return {**SOME_TEXT, "t/tokenizer.json": tokenizer, "t/tokenizer_config.json": config}


UNLISTED: list[tuple[str, dict[str, str | bytes], str, str]] = [
    # Folders that lie in each other, data that is two things at once.
    ("--output_dir x", {"x/config.json": '{"model_type": "qwen3"}'}, "output_dir", "is no run's"),
    ("--output_dir .", {"config.json": "[]"}, "output_dir", "config.json is no run's"),
    ("--data.source text --data.path .", SOME_TEXT, "output_dir", "lies in data.path '.': the nex"),
    ("--data.source text --data.path x", {"x/a.txt": "x"}, "data.seq_len", "of the 2 tokens"),
    (
        TEXT + " --data.eval_path . --output_dir outputs",
        SOME_TEXT,
        "output_dir",
        "lies in data.eval_path '.'",
    ),
    (TEXT + " --data.eval_path ./a.txt", SOME_TEXT, "data.eval_path", "is data.path itself"),
    (
        TEXT + " --data.eval_path b.txt --data.eval_fraction 0.5",
        SOME_TEXT,
        "data.eval_fraction",
        "0.5 contradicts data.eval_path 'b.txt'",
    ),
    ("--data.source synthetic --data.packing whole", {}, "data.packing", "contradicts data.source"),
    # Lists, patterns and addresses for a path.
    ("--data.source jsonl --data.path *.jsonl", {"a.jsonl": CHAT}, "data.path", "does not exist"),
    ("--data.source text --data.path a.txt,b.txt", SOME_TEXT, "data.path", "does not exist"),
    ("--data.source jsonl --data.path https://a.b/c.jsonl", {}, "data.path", "does not exist"),
    ("--data.source jsonl --data.path /dev/zero", {}, "data.path", "neither a file nor a folder"),
    ("--data.source jsonl --data.path x", {"x/a.json": "{}"}, "data.path", "holds no .jsonl files"),
    ("--data.source text --data.path x", {"x/.a": "text"}, "data.path", "holds no text files"),
    # Data sets that are no text, and folders of them.
    (
        "--data.source text --data.path x",
        SAVED_DATASET,
        "data.path",
        "data-0.arrow.*as .jsonl",
    ),
    ("--data.source jsonl --data.path x", SAVED_DATASET, "data.path", "write its rows as .jsonl"),
    ("--data.source text --data.path a.parquet", {"a.parquet": "PAR1"}, "data.path", "as .jsonl"),
    ("--data.source jsonl --data.path a.jsonl.gz", {"a.jsonl.gz": "x"}, "data.path", "unpack it"),
    # Text that is none.
    (TEXT, {"a.txt": "some text".encode("utf-16")}, "data.path", "holds no text"),
    (TEXT, {"a.txt": b"\xef\xbb\xbf"}, "data.path", "nothing to predict"),
    (TEXT, {"a.txt": "tiny"}, "data.seq_len", "256 is too long .* 5 tokens .* lower it, add text"),
    # Other trainers' lines.
    (JSONL, {"a.jsonl": f"[{CHAT.strip()}]"}, "data.path", "a.jsonl:1: not a JSON object"),
    (JSONL, {"a.jsonl": "{\n" + CHAT[1:]}, "data.path", "a.jsonl:1: not JSON"),
    (JSONL, {"a.jsonl": CHAT.replace("\n", "\r") * 2}, "data.path", "a.jsonl:1: not JSON: Extra"),
    (JSONL, {"a.jsonl": CHAT + CHAT[:30]}, "data.path", "a.jsonl:2: not JSON"),
    (JSONL, {"a.jsonl": b"\x1f\x8b\x08\x00\xff"}, "data.path", "a.jsonl:1: not (JSON|UTF-8)"),
    (JSONL, {"a.jsonl": '{"conversations": []}'}, "data.path", "no 'text' and no 'messages'"),
    (JSONL, {"a.jsonl": '{"prompt": "a", "completion": "b"}'}, "data.path", "data.text_field"),
    (JSONL, {"a.jsonl": '{"messages": "hi"}'}, "data.path", "not a list of turns"),
    (JSONL, {"a.jsonl": '{"messages": ["hi"]}'}, "data.path", r"messages\[0\] is not an object"),
    (JSONL, {"a.jsonl": CHAT.replace('"ho"', "null")}, "data.path", "content is missing or not te"),
    (JSONL, {"a.jsonl": CHAT.replace("assistant", "Assistant")}, "data.path", "no assistant turn"),
    (JSONL, {"a.jsonl": '{"text": NaN}'}, "data.path", "'text' is not text"),
    (JSONL, {"a.jsonl": '{"text": "a", "text": 5}'}, "data.path", "'text' is not text"),
    (JSONL, {"a.jsonl": CHAT}, "data.eval_fraction", "of the 1 documents .* add documents"),
    (
        JSONL + " --data.seq_len 4",
        {"a.jsonl": CHAT * 9},
        "data.eval_fraction",
        "in rows of data.seq_len 4; raise that",
    ),
    # Templates that are programs.
    (JSONL, _template("{% include 'x' %}"), "data.path", "template fails: .* no loader"),
    (JSONL, _template("{{ ''.__class__.__mro__ }}"), "data.path", "template fails: .* unsafe"),
    (JSONL, _template("{{ 'a' * 10**15 }}"), "data.path", "template fails: MemoryError"),
    (JSONL, _template("{{ range(10**12) }}"), "data.path", "template fails: .* too big"),
    (JSONL, _template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), "data.path", "Recursion"),
    (JSONL, _template("{{ raise_exception('two\nlines') }}"), "data.path", "fails: two lines"),
    (JSONL, _template("{{ messages | tojson }}"), "data.path", "does not begin its rendering"),
    (JSONL, _template("{% generation %}"), "data.chat_template", "'endgeneration'"),
    (JSONL, _template("{{ " + "(" * 5000), "data.chat_template", "line 1|cannot be compiled"),
    # Tokenizers.
    (TEXT, _tokenizer('{"eos_token": 5}'), "data.tokenizer", "eos_token 5 is no token"),
    (TEXT, _tokenizer('{"eos_token": "<zz>"}'), "data.tokenizer", "no token '<zz>', its eos_token"),
    (TEXT, _tokenizer("[" * 100_000), "data.tokenizer", "not JSON .maximum recursion"),
    (TEXT, _tokenizer("{}", BPE.replace("BPE", "No")), "data.tokenizer", "is not a tokenizer"),
    (TEXT, _tokenizer("{}", BPE.replace("0", "-1")), "data.tokenizer", "is not a tokenizer"),
    (TEXT, _tokenizer("{}", BPE.replace("0", "9999")), "data.tokenizer", "has 10000 tokens, more"),
    (TEXT, _tokenizer("{}", BPE.replace("</s>", "b")), "data.tokenizer", "no known end-of-text"),
]


@pytest.mark.parametrize(
    ("words", "files", "field", "says"),
    UNLISTED,
    ids=[f"{i}-{row[3][:30]}" for i, row in enumerate(UNLISTED)],
)
def test_kinds_that_nobody_had_listed(
    words, files, field, says, tmp_path, tmp_path_factory, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    cache = tmp_path_factory.getbasetemp() / "unlisted-cache"
    words = [*words.split(), "--train.device", "cpu", "--data.cache_dir", str(cache)]
    words += ["--data.chat_template", "t.jinja"] * ("t.jinja" in files)
    words += ["--data.tokenizer", "t"] * ("t/tokenizer.json" in files)
    assert_refused(words, field, says, tmp_path, capsys)
    for name, content in files.items():
        assert Path(name).read_bytes() in (content, str(content).encode())


def test_paths_from_home_wherever_they_are_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.toml").write_text(
        '[model]\npreset = "debug"\n[data]\nsource = "text"\npath = "~/a"\neval_path = "~/b"\n'
        'tokenizer = "~/t"\ncache_dir = "~/c"\n[checkpoint]\nresume = "~/s"'
    )
    config = Config.load(tmp_path / "mine.toml", ["--output_dir=~/o"], environ={})
    data = config.data
    given = data.path, data.eval_path, data.tokenizer, data.cache_dir, config.checkpoint.resume
    assert [*given, config.output_dir] == [str(tmp_path / name) for name in "abtcso"]


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    """Where the rows above point."""
    root = tmp_path_factory.mktemp("places")
    places = {name: str(root / name) for name in ("tmp", "text", "hf", "used", "used2")}
    for folder in places.values():
        os.mkdir(folder)
    (root / "used" / "metrics.jsonl").mkdir()
    (root / "used2" / "checkpoints").write_text("")
    (root / "text" / "a.txt").write_text("some text. " * 100)
    save_hf(Transformer(architecture_from_hf(HF_CONFIG)), root / "hf")
    for name, inside in (("run", "checkpoints"), ("adapted", "adapter")):
        places[name] = str(root / name)
        (root / name / inside).mkdir(parents=True)
    for name in ("file", "link", "loop"):
        places[name] = str(root / name)
    (root / "file").write_text("")
    (root / "link").symlink_to(root / "nothing")
    (root / "loop").symlink_to(root / "loop")
    return places


@pytest.mark.parametrize(("words", "field", "says"), FILES, ids=[row[0][:60] for row in FILES])
def test_files_folders_and_layouts(words, field, says, places, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, place in places.items():
        words = words.replace("{" + name + "}", place)
    if "train.device" not in words:
        words += " --train.device cpu"
    if "output_dir" not in words:
        words += " --output_dir out"
    assert_refused(words.split(), field, says, tmp_path, capsys)


NEVER_BY_TIME = "checkpoint.minutes=0"


def test_a_folder_that_may_not_be_written_to(tmp_path, capsys, monkeypatch):
    def refuse(**_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    words = [f"--output_dir={tmp_path / 'out'}"]
    says = "cannot be written to: Read-only file system; choose another"
    assert_refused(words, "output_dir", says, tmp_path, capsys)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "0.06 GiB: 3 checkpoints of 0.02 GiB;"),  # by time: how many is not known
        (["train.steps=2"], "0.04 GiB: 2 checkpoints of 0.02 GiB;"),
        ([NEVER_BY_TIME], "the run will write 0.02 GiB: 1 checkpoint of 0.02 GiB;"),
        ([NEVER_BY_TIME, "checkpoint.interval=100"], "0.06 GiB: 3 checkpoints of 0.02 GiB;"),
        ([NEVER_BY_TIME, "checkpoint.interval=400"], "0.04 GiB: 2 checkpoints of 0.02 GiB;"),
        (["checkpoint.interval=100", "checkpoint.keep_every=300"], "4 checkpoints of 0.02 GiB;"),
        (
            [NEVER_BY_TIME, "checkpoint.at_end=no", "checkpoint.save_hf=yes"],
            "0.01 GiB: checkpoint.save_hf's",
        ),
    ],
    ids=repr,
)
def test_no_room_for_what_will_be_written(words, says, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    words = [f"--output_dir={tmp_path / 'out'}", *words]
    assert_refused(words, "output_dir", f"has room for 0.00 GiB, and .*{says}", tmp_path, capsys)


def test_no_compiler(tmp_path, capsys):
    from torch._inductor import config

    words = ["compile.enabled=yes", f"output_dir={tmp_path / 'out'}", "train.device=cpu"]
    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert_refused(
            words, "compile.enabled", "on a CPU needs a C\\+\\+ compiler", tmp_path, capsys
        )


def test_no_compiler_beside_a_gpu(monkeypatch):
    import torch

    from moetrain.train.setup import _check_compilers

    monkeypatch.setenv("CC", "no-such-compiler")
    config = Config.load("debug", ["compile.enabled=no"], environ={})
    with pytest.raises(ConfigError, match=r"kernels\.backend: Triton needs a C compiler"):
        _check_compilers(config, torch.device("cuda"))


def assert_refused(words: list[str], field: str, says: str, folder: Path, capsys) -> None:
    """One line on standard error that begins and reads so, exit code 2, and no file was made."""
    before = sorted(folder.rglob("*"))
    assert main(words) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1, error
    assert error.startswith(f"error: {field}: "), error
    assert re.search(says, error), error
    assert len(error) < 700, error
    assert sorted(folder.rglob("*")) == before
