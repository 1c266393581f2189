"""An engine that a program builds refuses the same settings as the train command, in the same line.

A command line and a program reach the engine by different paths. The program here follows
docs/quickstart.md, but changes its settings after they were loaded (``filled``), so that only the
engine itself can refuse them.
"""

import ast
import traceback
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from moetrain.cli.train import main, run_jobs
from moetrain.config import Config, ConfigError, Fact
from moetrain.config.sources import leaves
from moetrain.generate.engine import load_model
from moetrain.jobs.shared import SharedEngine
from moetrain.models.hf.load import resolve_architecture
from moetrain.models.hf.save import save_hf
from moetrain.models.transformer import Transformer
from moetrain.parallel import world as world_module
from moetrain.parallel.world import join_world
from moetrain.train import checks
from moetrain.train.engine import Engine
from moetrain.train.estimates.plan import plan_memory
from moetrain.train.session import resolve_run
from tests.lib.command_lines import settled
from tests.lib.data_files import word_tokenizer
from tests.lib.needs_table import DEFAULTS, NEEDS_OF_ONE, PROBES

GOOD = [
    "model.preset=debug",
    "model.num_layers=2",
    "model.hidden_size=16",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.head_dim=8",
    "model.num_experts=4",
    "model.moe_intermediate_size=8",
    "data.source=synthetic",
    "data.seq_len=32",
    "train.device=cpu",
    "train.steps=1",
    "train.global_batch_size=4",
    "train.micro_batch_size=2",
    "train.sample_tokens=0",
    "train.eval_interval=0",
    "compile.enabled=no",
]
DENSE = [w for w in GOOD if "expert" not in w and "moe" not in w] + ["model.preset=qwen3-0.6b"]
GPT_OSS = ["model.preset=gpt-oss-20b", *GOOD[1:]]
SPARSE = [w for w in DENSE if "_heads" not in w and "head_dim" not in w and "preset" not in w]
SPARSE += ["model.preset=glm-5", "model.num_heads=2", "model.num_kv_heads=2"]
BLOCKS = [w for w in GOOD if "_heads" not in w and "num_layers" not in w and "preset" not in w]
BLOCKS += ["model.preset=minimax-m3", "model.num_layers=4"]
BLOCKS += ["model.num_heads=4", "model.num_kv_heads=4"]
OTHERS = ("model.vocab_size=64",)


@cache
def good_config(*words):
    return Config.load(None, settled([*words, *OTHERS]), environ={})


def said_by_command(words, folder, capsys, program=main):
    """Return the line with which the command ends; nothing has run."""
    assert program(settled([*words, f"output_dir={folder / 'out'}"])) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert not (folder / "out").exists()
    return error.removesuffix("\n")


def said_by_engine(base, values, kind=Engine, device="cpu"):
    """Return the engine's error for settings that a program changed to ``values``, and its line."""
    good = good_config(*base)
    config = good.filled(values, "a program")
    arch = resolve_architecture((good if config.model.path else config).model)
    world = join_world(good, resolve_architecture(good.model))
    with pytest.raises(ConfigError) as caught:
        kind(config, arch, replace(world, device=torch.device(device)))
    return f"error: {caught.value}", caught.value


# ---- settings that need others ------------------------------------------------------------------


def can_be(values):
    try:
        return good_config(*GOOD).filled(values, "a program")
    except ConfigError:
        return None


def lacking(need, name):
    """Return values with which ``name`` has no effect by a row of the table, or None."""
    others = [other for other in need.requires if other in DEFAULTS]
    wrong = {}
    for other in others:
        fits = [x for x in PROBES if x not in need.requires[other] and can_be({other: x})]
        if not fits:
            return None
        wrong[other] = DEFAULTS[other] if DEFAULTS[other] not in need.requires[other] else fits[0]
    values = (x for x in PROBES if x in need.when and x != DEFAULTS[name])
    return next((wrong | {name: x} for x in values if can_be(wrong | {name: x})), None)


def as_words(values):
    def text(x):
        return "none" if x is None else ",".join(map(str, x)) if isinstance(x, tuple) else str(x)

    return [f"{name}={text(value)}" for name, value in values.items()]


@pytest.mark.parametrize(
    ("need", "name"),
    NEEDS_OF_ONE,
    ids=[f"{name}-{'-'.join(x.requires)}" for x, name in NEEDS_OF_ONE],
)
def test_an_engine_refuses_a_setting_without_effect_as_the_command_does(
    need, name, tmp_path, capsys
):
    facts = [other for other in need.requires if other in list(Fact)]
    if Fact.DEEPEP in facts:
        pytest.skip("whether DeepEP can run shows as the dispatcher is made")
    values = lacking(need, name)
    if values is None or "data.mix" in values:
        pytest.skip("no probe is such a value")
    base = DENSE if Fact.EXPERTS in facts else GOOD
    by_engine, _ = said_by_engine(base, values)
    assert by_engine.startswith("error: ")
    if "model.path" in values:  # a command line takes no sizes beside it
        assert "contradicts model.path 'x'" in by_engine
    elif any(x.startswith("rl.") for x in values):  # another command takes these
        words = [*base, *OTHERS, *as_words(values)]
        with pytest.raises(ConfigError) as caught:
            resolve_run(Config.load(None, settled(words), environ={}))
        assert by_engine == f"error: {caught.value}"
    else:
        found = said_by_command([*base, *OTHERS, *as_words(values)], tmp_path, capsys)
        assert by_engine == found


# ---- the model, the layout and the device -------------------------------------------------------


def two_more_blocks(stack):
    find = resolve_architecture

    def found(*args, **kwargs):
        return find(*args, **kwargs).model_copy(update={"mtp_layers": 2})

    stack.enter_context(patch("moetrain.train.session.resolve_architecture", found))
    stack.enter_context(patch(f"{__name__}.resolve_architecture", found))


def no_interpreter(stack):
    stack.enter_context(patch.object(checks, "INTERPRETED", False))


def no_cpp_compiler(stack):
    from torch._inductor import config

    stack.enter_context(config.patch({"cpp.cxx": ("no-such-compiler",)}))


def on_gpu(stack, capability=(9, 0)):
    """Let checks see a GPU on every rank."""
    cuda, build = torch.device("cuda"), world_module.build_meshes
    stack.enter_context(patch.object(world_module, "claim_device", lambda *_: cuda))
    stack.enter_context(patch.object(world_module, "build_meshes", lambda d, _: build(d, "cpu")))
    stack.enter_context(patch.object(torch.cuda, "get_device_capability", lambda _: capability))
    stack.enter_context(patch.object(torch.cuda, "get_device_name", lambda _: "A100"))


def on_old_gpu(stack):
    on_gpu(stack, (8, 0))


def on_gpu_without_compiler(stack):
    on_gpu(stack)
    stack.enter_context(patch.object(checks, "c_compiler", lambda: None))


FP8 = {"kernels.precision": "fp8"}
WIDE = [*GOOD, "model.hidden_size=128", "model.head_dim=32", "model.moe_intermediate_size=128"]
CASES = {
    "tp with several MTP blocks": (GOOD, {"parallel.tp": 2}, two_more_blocks, "parallel.tp"),
    "copies of biased experts": (
        GPT_OSS,
        {"parallel.ep": 2, "moe.redundant_experts": 1},
        None,
        "moe.redundant_experts",
    ),
    "sdpa with sinks": (GPT_OSS, {"kernels.attention": "sdpa"}, None, "kernels.attention"),
    "no indexers": (GOOD, {"train.indexer": "joint"}, None, "train.indexer"),
    "exact attention to selected keys": (
        SPARSE,
        {"kernels.attention": "exact", "data.seq_len": 4096},
        None,
        "kernels.attention",
    ),
    "sparse form of selected blocks": (
        BLOCKS,
        {"kernels.sparse_attention": "sparse"},
        None,
        "kernels.sparse_attention",
    ),
    "rows too long": (GOOD, {"data.seq_len": 2**20}, None, "data.seq_len"),
    "fp8 of odd widths": (GOOD, FP8 | {"model.hidden_size": 24}, None, "kernels.precision"),
    "fp8 of narrow experts with biases": (GPT_OSS, FP8, None, "kernels.precision"),
    "fp8 blocks of narrow experts": (
        WIDE,
        {"kernels.precision": "fp8_blocks", "model.moe_intermediate_size": 64},
        None,
        "kernels.precision",
    ),
    "QK-clip of normalised heads": (
        GOOD,
        {"optim.name": "muon", "optim.muon_qk_clip": 100.0},
        None,
        "optim.muon_qk_clip",
    ),
    "a step beyond host memory": (
        GOOD,
        {"train.global_batch_size": 10**12, "train.micro_batch_size": 1},
        None,
        "train.global_batch_size",
    ),
    "flex on a CPU": (GOOD, {"kernels.attention": "flex"}, None, "kernels.attention"),
    "cudnn on a CPU": (GOOD, {"kernels.attention": "cudnn"}, None, "kernels.attention"),
    "graphs on a CPU": (GOOD, {"compile.cuda_graphs": True}, None, "compile.cuda_graphs"),
    "a planned machine": (GOOD, {"launch.gpu": "h100"}, None, "launch.gpu"),
    "triton on a CPU": (
        GOOD,
        {"kernels.backend": "triton"},
        no_interpreter,
        "kernels.backend",
    ),
    "no compiler on a CPU": (GOOD, {"compile.enabled": True}, no_cpp_compiler, "compile.enabled"),
    "fp8 on an old GPU": (WIDE, FP8, on_old_gpu, "kernels.precision"),
    "fp8 of fp32": (WIDE, FP8 | {"train.dtype": "float32"}, on_gpu, "kernels.precision"),
    "odd experts on a GPU": (
        GOOD,
        {"model.moe_intermediate_size": 12},
        on_gpu,
        "model.moe_intermediate_size",
    ),
    "an odd model on a GPU": (DENSE, {"model.hidden_size": 20}, on_gpu, "model.hidden_size"),
    "no compiler on a GPU": (GOOD, {}, on_gpu_without_compiler, "kernels.backend"),
}


@pytest.mark.parametrize("case", CASES)
def test_an_engine_refuses_a_run_that_cannot_be_as_the_command_does(case, tmp_path, capsys):
    base, values, prepare, setting = CASES[case]
    with ExitStack() as stack:
        if prepare is not None:
            prepare(stack)
        is_gpu = prepare in (on_gpu, on_old_gpu, on_gpu_without_compiler)
        by_engine, _ = said_by_engine(base, values, device="cuda" if is_gpu else "cpu")
        assert by_engine.startswith(f"error: {setting}: ")
        assert by_engine == said_by_command([*base, *OTHERS, *as_words(values)], tmp_path, capsys)


def test_every_refusal_of_the_checks_is_among_the_cases():
    """Every raising line of the checks is reached by a case above."""
    path = Path(checks.__file__)
    wanted = {x.lineno for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.Raise)}
    reached = set()
    for base, values, prepare, _ in CASES.values():
        with ExitStack() as stack:
            if prepare is not None:
                prepare(stack)
            is_gpu = prepare in (on_gpu, on_old_gpu, on_gpu_without_compiler)
            _, error = said_by_engine(base, values, device="cuda" if is_gpu else "cpu")
        reached |= {
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(path)
        }
    assert wanted <= reached, f"{path.name}: lines {sorted(wanted - reached)} refuse in no case"


ODD_WIDTHS = [
    ("qwen3-0.6b", {"hidden_size": 20}, {}, "model.hidden_size: 20 is not a multiple of 8"),
    ("debug", {"moe_intermediate_size": 12}, {}, "use 8 or 16, or set train.device cpu"),
    ("debug", {"moe_intermediate_size": 4}, {}, "use 8, or set train.device cpu"),
    ("debug", {"moe_intermediate_size": 12}, {"train.dtype": "float32"}, None),
    ("debug", {"moe_intermediate_size": 10}, {"train.dtype": "float32"}, "10 .* use 8 or 12"),
    ("nemotron-3-nano-30b-a3b", {"moe_intermediate_size": 12}, {}, "model.moe_intermediate_size"),
    ("debug", {"moe_intermediate_size": 10}, {"train.device": "cpu"}, None),
    ("qwen3-0.6b", {"hidden_size": 20}, {"kernels.backend": "reference"}, None),
    ("debug", {"hidden_size": 20}, {"kernels.backend": "reference"}, "use 16 or 24"),
]


@pytest.mark.parametrize(("preset", "sizes", "values", "says"), ODD_WIDTHS)
def test_a_plan_for_gpus_refuses_widths_that_their_kernels_do_not_take(preset, sizes, values, says):
    words = [f"model.preset={preset}", "data.source=synthetic", "data.seq_len=32"]
    words += [f"model.{name}={value}" for name, value in sizes.items()]
    if "train.device" not in values:
        words.append("launch.gpus=1")
    config, arch = resolve_run(Config.load(None, [*words, *as_words(values)], environ={}))
    with nullcontext() if says is None else pytest.raises(ConfigError, match=says):
        plan_memory(config, arch)


def test_a_checkpoint_of_odd_widths_is_refused_for_a_gpu_by_its_name(tmp_path):
    arch = resolve_architecture(good_config(*GOOD, "model.moe_intermediate_size=12").model)
    model = Transformer(arch).to(torch.bfloat16)
    save_hf(model, tmp_path)
    config = Config.load(None, [f"model.path={tmp_path}", "data.source=synthetic"], environ={})
    line = r"^model\.path: its moe_intermediate_size is 12, which is not a multiple of 8"
    with pytest.raises(ConfigError, match=line):
        checks.check_rows(config, arch, torch.device("cuda"))
    checks.check_rows(config, arch, torch.device("cpu"))
    word_tokenizer(tmp_path, "a", eos_token="a")
    has_gpu = patch.object(torch.cuda, "is_available", lambda: True)
    with has_gpu, pytest.raises(ConfigError, match=r"^device: 'cuda', but .* use cpu"):
        load_model(str(tmp_path), "auto", "auto")


@pytest.mark.parametrize(
    "values", [{"lora.rank": 0}, {"lora.rank": 4, "optim.offload_fraction": 0.5}]
)
def test_an_engine_of_jobs_refuses_what_the_service_does(values, tmp_path, capsys):
    by_engine, _ = said_by_engine(GOOD, values, SharedEngine)
    words = [w for w in GOOD if w.startswith("model.") or "device" in w or "compile" in w]
    words += [*OTHERS, *as_words(values)]
    assert by_engine == said_by_command(words, tmp_path, capsys, run_jobs)


def test_an_engine_computes_reproducibly_if_it_is_asked_to():
    config = Config.load(None, [*GOOD, *OTHERS, "train.deterministic=yes"], environ={})
    arch = resolve_architecture(config.model)
    try:
        Engine(config, arch, join_world(config, arch))
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_settings_of_the_cases_are_good_but_for_what_they_change():
    """Otherwise a case would be refused for another reason than its own."""
    for base in (GOOD, DENSE, GPT_OSS, WIDE):
        config = good_config(*base)
        arch = resolve_architecture(config.model)
        changed = checks.check_run(config, arch, join_world(config, arch).dims, torch.device("cpu"))
        before, after = (dict(leaves(c.to_dict())) for c in (config, changed))
        assert {k: v for k, v in before.items() if v != after[k] and config.is_users(k)} == {}
