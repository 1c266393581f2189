"""A family unknown to the package, from a Hugging Face folder to an export."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import moetrain
from moetrain.cli.machines import main as machines
from moetrain.cli.train import main
from moetrain.config import Config, ConfigError
from moetrain.models.architecture import Architecture, Weight
from moetrain.models.attention import GroupedQueryAttention
from moetrain.models.families import FAMILIES, register
from moetrain.models.hf.load import resolve_architecture
from moetrain.models.moe import MoE, RoutedExperts
from moetrain.models.rules import COLWISE
from moetrain.train.estimates.plan import plan_memory
from moetrain.train.loop import Trainer
from moetrain.train.metrics import read_metrics
from tests.lib import toy_family
from tests.lib.command_lines import settled
from tests.lib.distributed import spawn

ROOT = Path(__file__).parents[3]
FROZEN = "model.layers.{}.ffn.in.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Write a folder like another program's."""
    d, ffn, vocab, layers = 16, 12, 264, range(2)
    shapes = {"model.embed_tokens.weight": (vocab, d), "lm_head.weight": (vocab, d)}
    shapes |= {"model.norm.weight": (d,)}
    for i in layers:
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}{name}layernorm.weight": (d,) for name in ("input_", "post_attention_")}
        shapes |= {f"{layer}self_attn.{x}_proj.weight": (d, d) for x in "qo"}
        shapes |= {f"{layer}self_attn.{x}_proj.weight": (d // 2, d) for x in "kv"}
        shapes |= {f"{layer}ffn.in.weight": (ffn, d), f"{layer}ffn.out.weight": (d, ffn)}
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.3 + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    for i in layers:
        tensors[FROZEN.format(i)] = tensors[FROZEN.format(i)].bfloat16()
    folder = tmp_path_factory.mktemp("toy")
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "toy", "hidden_act": "relu2", "d_ffn": ffn, "hidden_size": d}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def words(tiny_words, checkpoint):
    own = [f"model.path={checkpoint}", "data.tokenizer=byte", "checkpoint.save_hf=yes"]
    own += ["checkpoint.interval=2", "checkpoint.keep=5", "train.global_batch_size=4"]
    return [*(w for w in tiny_words if not w.startswith("model.")), *own]


def train(words, folder):
    """Train into ``folder``; return losses and gradient norms."""
    trainer = Trainer(Config.load(None, [*words, f"output_dir={folder}"], environ={}))
    trainer.fit()
    frozen = trainer.engine.fsdp.members["layers.0.mlp.w_in.weight"].local
    assert (frozen.dtype, frozen.requires_grad) == (torch.bfloat16, False)
    lines = [line for line in read_metrics(trainer.folder / "metrics.jsonl") if "loss" in line]
    return torch.tensor([[line["loss"], line["grad_norm"]] for line in lines])


def weights(folder):
    return load_file(folder / "hf" / "model.safetensors")


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def test_toy_family_is_read_and_written_bit_for_bit(checkpoint, tmp_path):
    model = moetrain.load_hf(checkpoint)
    assert isinstance(model.arch, toy_family.Toy)
    assert model.arch.num_features == 12
    assert sum(p.numel() for p in model.parameters()) == model.arch.num_params()
    assert model(torch.arange(9)[None]).isfinite().all()
    moetrain.save_hf(model, tmp_path)
    got, want = (load_file(folder / "model.safetensors") for folder in (tmp_path, checkpoint))
    assert_same(got, want)
    again = json.loads((tmp_path / "config.json").read_text())
    assert again["d_ffn"] == 12


@pytest.mark.tier("wide")
def test_training_is_the_same_on_every_layout_and_goes_on_where_it_was(words, checkpoint, tmp_path):
    numbers = train(words, tmp_path / "one")
    before, after = load_file(checkpoint / "model.safetensors"), weights(tmp_path / "one")
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) == name.endswith("ffn.in.weight"), name
    for layout in ("dp_shard=2", "tp=2"):
        run = [*words, f"parallel.{layout}"]
        whole, resumed = tmp_path / layout, tmp_path / f"{layout} resumed"
        got = spawn(2, train, run, whole)[0]
        torch.testing.assert_close(got, numbers, rtol=1e-5, atol=0)
        first = f"checkpoint.resume={whole / 'checkpoints' / 'step-00000002'}"
        rest = spawn(2, train, [*run, first], resumed)[0]
        assert torch.equal(rest, got[2:])
        assert_same(weights(resumed), weights(whole))
        moetrain.save_hf(moetrain.load_hf(whole / "hf"), tmp_path / f"{layout} again")
        assert_same(load_file(tmp_path / f"{layout} again" / "model.safetensors"), weights(whole))


class Thawed(toy_family.Features):
    @property
    def weights(self):
        return {**super().weights, "w_in.weight": Weight((12, 16), COLWISE)}


class Mixed(toy_family.Toy):
    def feed_forward(self, layer):
        return (Thawed if layer else toy_family.Features).of(self)


def test_each_layer_has_the_rules_of_its_own_parts(checkpoint):
    model = moetrain.load_hf(checkpoint)
    rules = Mixed(**model.arch.model_dump()).plan().rules(model)
    w_in = [rules[f"layers.{i}.mlp.w_in.weight"] for i in range(model.arch.num_layers)]
    assert w_in[1:] == [COLWISE] * len(w_in[1:])
    assert w_in[0] != COLWISE


class Forgetful(toy_family.Toy):
    def feed_forward(self, layer):
        part = super().feed_forward(layer)
        return NoWeights.of(self) if layer == 1 else part


class NoWeights(toy_family.Features):
    weights = {"w_more.weight": Weight((12, 16), COLWISE)}  # noqa: RUF012


def test_a_part_must_know_the_parameters_of_its_module(checkpoint):
    model = moetrain.load_hf(checkpoint)
    names = (
        r"plan: parts and modules differ in layers\.1\.mlp\.w_in\.weight, layers\.1\.mlp\.w_more"
    )
    with pytest.raises(ValueError, match=names):
        Forgetful(**model.arch.model_dump()).plan().rules(model)


def test_parallel_degrees_are_checked_by_the_parts_of_a_family(words, checkpoint):
    config = Config.load(None, [*words, "parallel.tp=8", "launch.nproc=8"], environ={})
    arch = resolve_architecture(config.model)
    with pytest.raises(ConfigError, match="does not divide the model's num_heads 4"):
        plan_memory(config, arch)
    config = Config.load(None, [*words, "parallel.ep=2", "launch.nproc=2"], environ={})
    with pytest.raises(ConfigError, match="toy has no experts"):
        plan_memory(config, arch)
    with pytest.raises(ValueError, match="family 'toy': toy is there already"):
        register(FAMILIES[arch.family])


class OwnRouted(nn.Module):
    """Module of a routed part that is no MoE: sharding only requires ``dispatcher``."""

    def __init__(self, part, kernels, moe):
        super().__init__()
        built = RoutedExperts.build(part, kernels, moe)
        self.router, self.experts, self.dispatcher = built.router, built.experts, built.dispatcher
        self.shared_experts = None

    forward, results, through_experts = MoE.forward, MoE.results, MoE.through_experts


class OwnExperts(RoutedExperts):
    def build(self, kernels, moe):
        return OwnRouted(self, kernels, moe)


class Routed(Architecture):
    kinds = (GroupedQueryAttention, OwnExperts)


def own_routed_loss(words):
    """Return the first step's loss and norm of a family with its own routed module."""
    sizes = {"vocab_size": 264, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "head_dim": 8}
    sizes |= {"num_kv_heads": 2, "intermediate_size": 8, "num_experts": 4}
    sizes |= {"num_experts_per_token": 2, "moe_intermediate_size": 8}
    arch = Routed(family="own_routed", **sizes)
    own = {"name": "own_routed", "architecture": Routed, "presets": {"own-routed": arch}}
    register(replace(FAMILIES["qwen3_moe"], **own))
    trainer = Trainer(Config.load(None, words, environ={}))
    result = trainer.train_step()
    ways = {type(layer.moe.dispatcher).__name__ for layer in trainer.model.layers}
    return ways, result.loss.item(), result.grad_norm.item()


def test_a_routed_module_of_ones_own_sends_its_tokens(tiny_words, tmp_path):
    words = [*(w for w in tiny_words if not w.startswith("model.")), "model.preset=own-routed"]
    words += ["train.global_batch_size=4"]
    # It runs in its own process, so that this one's registry is unchanged.
    local, *want = spawn(1, own_routed_loss, [*words, f"output_dir={tmp_path / 'one'}"])[0]
    apart = [*words, "parallel.ep=2", f"output_dir={tmp_path / 'two'}"]
    sent, *got = spawn(2, own_routed_loss, apart)[0]
    assert (local, sent) == ({"Dispatcher"}, {"AllToAll"})
    assert got == pytest.approx(want, rel=1e-5)


def test_launch_refuses_a_family_registered_in_one_process(words, capsys):
    assert main(settled([*words, "launch.nproc=2"])) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: launch.nproc: 2, but family 'toy' was registered in this proce")
    assert "start your script by torchrun --nproc-per-node 2" in error
    assert error.count("\n") == 1


def run_apart(module, words, folder):
    """Run a command in a process of its own, which has not registered the family."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("MOETRAIN_IMPORT", None)
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_import_gives_every_rank_a_family(checkpoint, words, tmp_path):
    imported = ["--import", toy_family.__file__]
    run = [*settled(words), "train.steps=1", "checkpoint.interval=0", "checkpoint.save_hf=no"]
    run = settled([*run, "launch.nproc=2", "train.device=cpu", f"output_dir={tmp_path}/run"])
    code, _, error = run_apart("moetrain.train", run, tmp_path)
    assert code == 2
    assert "toy" in error
    code, _, error = run_apart("moetrain.train", [*run, *imported], tmp_path)
    assert code == 0, error


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "'FILE.py' is not an existing file; give a FILE.py"),
        ("1/0", "cannot load '.*FILE.py': ZeroDivisionError: 'division by zero'"),
    ],
)
def test_import_of_a_bad_file_is_one_line(text, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOETRAIN_IMPORT", "")
    if text is not None:
        (tmp_path / "FILE.py").write_text(text)
    assert main(["debug", "--dry_run", "--import=FILE.py"]) == 2
    error = capsys.readouterr().err
    assert re.match(f"error: --import: {says}", error), error
    assert error.count("\n") == 1


def test_a_written_job_has_the_imported_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOETRAIN_IMPORT", "")
    (tmp_path / "mine.py").write_text("")
    words = ["slurm", "qwen3-30b-a3b", "--nodes", "1", "--dry_run", "--import", "mine.py"]
    words += ["--train.global_batch_size", "16"]
    assert machines(words) == 0
    assert f"--import {tmp_path}/mine.py" in capsys.readouterr().out
