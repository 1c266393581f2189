"""Hugging Face weights in both directions, compared with transformers, and every bad checkpoint."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import constants as hub_constants
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moetrain.config import ConfigError
from moetrain.models.families import FAMILIES, PRESETS
from moetrain.models.family import Piece
from moetrain.models.hf import files, save
from moetrain.models.hf.files import CONFIG, GENERATION, INDEX, SINGLE, resolve
from moetrain.models.hf.load import FilePiece, load_hf, load_weights
from moetrain.models.hf.save import save_hf
from moetrain.models.parts.clamped_experts import InterleavedExperts
from moetrain.models.transformer import Transformer
from tests.lib.hf_configs import CASES, SIZES, config_of
from tests.lib.hf_weights import assert_same_bits, tensors_in

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def save_reference(case: str, folder: Path, dtype=torch.float32, **how) -> torch.nn.Module:
    """Save a random model of ``case`` by transformers (biases and norms random too)."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(case), dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder, **how)
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    tokens_BS = torch.arange(2 * 9).reshape(2, 9) * 7 % SIZES["vocab_size"]
    with torch.no_grad():
        return model(tokens_BS).logits


# Weights.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_load_hf_and_save_hf_round_trip(case, dtype, tmp_path):
    reference = save_reference(case, tmp_path / "in", dtype)
    model = load_hf(tmp_path / "in", dtype=dtype)
    save_hf(model, tmp_path / "out")
    assert_same_bits(tensors_in(tmp_path / "out"), tensors_in(tmp_path / "in"))
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert again.dtype == dtype == getattr(torch, config["dtype"])
    assert torch.equal(logits(again), logits(reference))


@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral"])
def test_experts_are_stacked_as_transformers_stacks_them(case, tmp_path):
    theirs = dict(save_reference(case, tmp_path).named_parameters())
    ours = dict(load_hf(tmp_path).named_parameters())
    for i in range(SIZES["num_hidden_layers"]):
        experts = f"model.layers.{i}.mlp.experts"
        for name, their_name in (("w_gate_up", "gate_up_proj"), ("w_down", "down_proj")):
            parameter = ours[f"layers.{i}.moe.experts.{name}"]
            assert torch.equal(parameter, theirs[f"{experts}.{their_name}"])


def test_bf16_checkpoint_is_exact_in_fp32(tmp_path):
    save_reference("qwen3_moe", tmp_path / "in", torch.bfloat16)
    model = load_hf(tmp_path / "in")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    save_hf(model, tmp_path / "out")
    narrowed = {k: v.bfloat16() for k, v in tensors_in(tmp_path / "out").items()}
    assert_same_bits(narrowed, tensors_in(tmp_path / "in"))


def test_load_and_save_of_sharded_files(tmp_path):
    save_reference("qwen3_moe", tmp_path / "in", max_shard_size="8KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 3
    model = load_hf(tmp_path / "in")
    out = tmp_path / "out"
    save_hf(model, out, max_shard_bytes=8000)
    index = json.loads((out / INDEX).read_text())
    files = sorted(out.glob("*.safetensors"))
    assert [f.name for f in files] == sorted(set(index["weight_map"].values()))
    for file in files:
        shard = load_file(file)
        assert all(index["weight_map"][name] == file.name for name in shard)
        assert sum(t.nbytes for t in shard.values()) <= 8000 or len(shard) == 1
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_in(out).values())
    assert_same_bits(tensors_in(out), tensors_in(tmp_path / "in"))
    _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info


def test_saving_again_leaves_no_stale_file(tmp_path):
    save_reference("llama", tmp_path / "in")
    model, out = load_hf(tmp_path / "in"), tmp_path / "out"
    save_hf(model, out)
    (out / "tokenizer.json").write_text("{}")
    save_hf(model, out, max_shard_bytes=8000)
    assert not (out / SINGLE).exists()  # a reader would prefer it to the shards
    save_hf(model, out)
    written = {CONFIG, GENERATION, SINGLE, ".moetrain-export.json"}
    assert {f.name for f in out.iterdir()} == {*written, "tokenizer.json"}


def test_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    save_reference("llama", tmp_path / "in")
    model, out = load_hf(tmp_path / "in"), tmp_path / "out"
    save_hf(model, out)
    before = {f.name: f.read_bytes() for f in out.iterdir()}

    def fail(tensors, path, metadata):
        Path(path).write_bytes(b"half a file")
        raise OSError("disk full")

    monkeypatch.setattr(save, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_hf(model, out)
    assert {f.name: f.read_bytes() for f in out.iterdir()} == before


def test_router_bias_is_kept_on_load_and_named_on_save(tmp_path, caplog):
    save_reference("qwen3_moe", tmp_path)
    model = load_hf(tmp_path)
    bias_E = torch.arange(5.0)
    model.get_submodule("layers.0.moe.router").register_buffer("bias", bias_E.clone())
    load_weights(model, tmp_path)
    assert torch.equal(model.get_buffer("layers.0.moe.router.bias"), bias_E)
    save_hf(model, tmp_path / "out")
    assert "layers.0.moe.router.bias" in caplog.text
    assert_same_bits(tensors_in(tmp_path / "out"), tensors_in(tmp_path))


def test_redundant_head_of_a_tied_checkpoint(tmp_path):
    save_reference("qwen2 tied", tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, tmp_path / SINGLE)
    model = load_hf(tmp_path)
    assert model.lm_head is None
    assert torch.equal(model.embed.weight, head)
    head[0, 0] += 1
    save_file({**tensors, "lm_head.weight": head}, tmp_path / SINGLE)
    with pytest.raises(ConfigError, match=r"^model\.path: .*lm_head\.weight differs"):
        load_hf(tmp_path)


def test_rotary_frequencies_in_a_file_are_skipped(tmp_path):
    save_reference("llama", tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**tensors, **extra}, tmp_path / SINGLE)
    load_hf(tmp_path)


_MEASURE = """
import sys, threading
import torch
from moetrain.models.hf.files import CONFIG
from moetrain.models.hf.files import GENERATION
from moetrain.models.hf.files import INDEX
from moetrain.models.hf.files import SINGLE
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.load import load_weights
from moetrain.models.hf.files import resolve
from moetrain.models.hf.save import save_hf

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

def sample():
    global peak
    while not done.wait(0.0005):
        peak = max(peak, anonymous())

torch.zeros(1000).bfloat16().float().sum()
torch.empty_like(torch.empty(2, device="meta"), device="cpu")  # imports sympy
done, start = threading.Event(), anonymous()
peak = start
thread = threading.Thread(target=sample)
thread.start()
model = load_hf(sys.argv[1])
done.set()
thread.join()
print(max(peak, anonymous()) - start, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.tier("wide")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_loading_needs_the_model_and_one_tensor(tmp_path):
    arch = PRESETS["debug"].model_copy(
        update={"vocab_size": 16384, "hidden_size": 512, "moe_intermediate_size": 512}
    )
    model = Transformer(arch).bfloat16()
    model.init_weights(std=0.02, seed=0)
    save_hf(model, tmp_path, max_shard_bytes=20_000_000)
    largest = max(t.nbytes for t in tensors_in(tmp_path).values())
    command = [sys.executable, "-c", _MEASURE, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    peak, model_bytes = map(int, run.stdout.split())
    assert model_bytes > 150e6
    assert 0.9 * model_bytes < peak < model_bytes + largest + 8e6  # 8 MB: the process itself


# Bad checkpoints.
def _edit_tensors(edit):
    def apply(folder: Path) -> None:
        tensors = load_file(folder / SINGLE)
        edit(tensors)
        save_file(tensors, folder / SINGLE)

    return apply


def _shard_then(action):
    def apply(folder: Path) -> None:
        save_hf(load_hf(folder), folder, max_shard_bytes=8000)
        action(folder)

    return apply


def _drop_experts(tensors):
    for name in [n for n in tensors if ".experts.3." in n]:
        del tensors[name]


def _truncate(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


Q_BIAS = "model.layers.0.self_attn.q_proj.bias"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
BAD_FOLDERS = {
    "missing": (
        _edit_tensors(_drop_experts),
        r"missing: model\.layers\.0\.mlp\.experts\.3\.gate_proj\.weight, .* and 4 more$",
    ),
    "unexpected": (
        _edit_tensors(lambda t: t.update({Q_BIAS: torch.ones(48)})),
        rf"unexpected: {re.escape(Q_BIAS)}$",
    ),
    "shape": (
        _edit_tensors(lambda t: t.update({K_PROJ: torch.ones(3, 24)})),
        r"another shape: model\.layers\.1\.self_attn\.k_proj\.weight \[3, 24\], not \[16, 24\]$",
    ),
    "several": (
        _edit_tensors(lambda t: t.update({Q_BIAS: t.pop(K_PROJ)})),
        rf"missing: model\.layers\.1\.self_attn\.k_proj\.weight; unexpected: {re.escape(Q_BIAS)}$",
    ),
    "truncated data": (lambda f: _truncate(f / SINGLE, 9000), "damaged or cut short"),
    "truncated header": (lambda f: _truncate(f / SINGLE, 100), "damaged or cut short"),
    "empty file": (lambda f: _truncate(f / SINGLE, 0), "damaged or cut short"),
    "no weights": (lambda f: (f / SINGLE).unlink(), "neither model.safetensors nor"),
    "absent shard": (
        _shard_then(lambda f: next(f.glob("*-00002-of-*")).unlink()),
        r"names model-00002-of-\d+\.safetensors, absent",
    ),
    "truncated index": (_shard_then(lambda f: _truncate(f / INDEX, 50)), "not JSON"),
    "index of nothing": (_shard_then(lambda f: (f / INDEX).write_text("{}")), "no weight_map"),
    "no config": (lambda f: (f / CONFIG).unlink(), r"no config\.json"),
    "truncated config": (lambda f: _truncate(f / CONFIG, 50), "not JSON"),
    "config is a list": (lambda f: (f / CONFIG).write_text("[]"), "holds a list"),
}


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    save_reference("qwen3_moe", folder)
    return folder


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_bad_folder_is_one_clear_error(case, good_folder, tmp_path):
    for file in good_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    spoil, message = BAD_FOLDERS[case]
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        load_hf(tmp_path)
    assert caught.value.field == "model.path"
    assert str(tmp_path) in caught.value.problem
    assert "\n" not in str(caught.value)


def test_nothing_is_copied_before_everything_is_checked(good_folder, tmp_path):
    model = load_hf(good_folder)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    (tmp_path / CONFIG).write_bytes((good_folder / CONFIG).read_bytes())
    tensors = {k: torch.zeros_like(v) for k, v in load_file(good_folder / SINGLE).items()}
    del tensors[K_PROJ]
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(ConfigError, match="missing"):
        load_weights(model, tmp_path)
    assert_same_bits(model.state_dict(), before)


# Finding checkpoints.
class FakeHub:
    """Replaces snapshot_download by a cache and a hub, each a folder or None."""

    def __init__(self, cache: Path | None, hub: Path | None) -> None:
        self.cache, self.hub, self.downloads = cache, hub, 0

    def __call__(self, name, *, allow_patterns, local_files_only=False):
        assert name == "org/name"
        if local_files_only:
            found = self.cache
        else:
            self.downloads += 1
            found = self.cache = self.hub
        if found is None:
            raise LocalEntryNotFoundError("no\nsuch thing")
        return str(found)


@pytest.fixture
def use_hub(monkeypatch):
    def use(cache: Path | None, hub: Path | None) -> FakeHub:
        fake = FakeHub(cache, hub)
        monkeypatch.setattr(files.hub, "snapshot_download", fake)
        return fake

    return use


def test_resolve_fetches_only_what_is_not_there(good_folder, tmp_path, use_hub):
    hub = use_hub(cache=good_folder, hub=None)
    assert resolve("org/name") == good_folder
    assert hub.downloads == 0
    (tmp_path / CONFIG).write_text("{}")  # the cache holds no weights
    hub = use_hub(cache=tmp_path, hub=good_folder)
    assert resolve("org/name") == good_folder
    assert hub.downloads == 1
    assert resolve(str(good_folder)) == good_folder
    assert hub.downloads == 1


def test_a_failed_download_is_named_in_one_line(use_hub):
    use_hub(cache=None, hub=None)
    with pytest.raises(ConfigError) as caught:
        resolve("org/name")
    assert "org/name" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["/no/such/folder", "no/such/folder", "no-org/no-name", "no name"])
def test_unknown_path_or_id(name, monkeypatch, tmp_path):
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    says = r"^model\.path: .*(no such folder|neither a folder nor a hub id)"
    with pytest.raises(ConfigError, match=says) as caught:
        resolve(name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


# The weight map alone.
def test_weight_map_example():
    family = FAMILIES["qwen3_moe"]
    pieces = family.pieces({"layers.7.moe.experts.w_gate_up": (2, 6, 4)}, None)
    prefix = "model.layers.7.mlp.experts"
    ours = "layers.7.moe.experts.w_gate_up"
    assert pieces == [
        Piece(f"{prefix}.0.gate_proj.weight", ours, (0, slice(0, 3))),
        Piece(f"{prefix}.0.up_proj.weight", ours, (0, slice(3, 6))),
        Piece(f"{prefix}.1.gate_proj.weight", ours, (1, slice(0, 3))),
        Piece(f"{prefix}.1.up_proj.weight", ours, (1, slice(3, 6))),
    ]


@pytest.mark.parametrize(
    ("within", "is_transposed"),
    [
        ((), True),
        ((slice(1, 3),), False),
        ((slice(1, 3),), True),
        ((2,), True),
        ((2, slice(0, 6, 2)), True),
        ((0, slice(1, 6, 2)), True),
        ((slice(0, 4), slice(1, 6, 3)), False),
        ((1, slice(2, 5), slice(0, 7, 7)), True),
    ],
)
def test_a_part_of_a_file_is_read_where_it_is_indexed(within, is_transposed, tmp_path):
    """Its slices are those of that part of the whole tensor, which writing fills."""
    whole = torch.arange(4 * 7 * 6).view(4, 7, 6)
    if not is_transposed:
        whole = whole.mT.contiguous()
    save_file({"x": whole}, tmp_path / SINGLE)
    piece = Piece("x", "ours", (), within, is_transposed)
    want = piece.of(whole)
    with safe_open(tmp_path / SINGLE, "pt") as file:
        part = FilePiece(file.get_slice("x"), piece)
        assert torch.equal(part[...], want)
        ranges = [[slice(i, j) for i in range(n) for j in range(i, n + 1)] for n in want.shape]
        for index in itertools.product(*ranges):
            assert torch.equal(part[index], want[index]), index
        assert torch.equal(part[slice(1, 2)], want[1:2])
    least = piece.least_shape(want)
    assert all(found <= n for found, n in zip(least, whole.shape, strict=True))
    copied = torch.zeros_like(whole)
    piece.of(copied).copy_(want)
    assert torch.equal(piece.of(copied), want)
    assert copied.count_nonzero() == want.count_nonzero()


def test_interleaved_experts_example():
    both = InterleavedExperts("layers.{layer}.w", "{layer}.wide", parts=2)
    w = torch.arange(2 * 4 * 3).view(2, 4, 3)
    pieces = both.pieces("layers.5.w", w.shape, None)
    assert Piece.shape_of(pieces, {"layers.5.w": w}) == (2, 3, 4)
    file = torch.empty(2, 3, 4, dtype=torch.long)
    for piece in pieces:
        assert piece.hf_name == "5.wide"
        piece.of(file).copy_(w[piece.place])
    for column, row in enumerate((0, 2, 1, 3)):  # g0, u0, g1, u1
        assert torch.equal(file[:, :, column], w[:, row])
    assert both.pieces("layers.5.other", w.shape, None) == []


def test_unknown_parameter_is_a_fault_of_the_table():
    with pytest.raises(ValueError, match="0 weight map operations cover parameter 'layers"):
        FAMILIES["llama"].pieces({"layers.0.moe.router.weight": (2, 4)}, None)
