"""``python -m moetrain.checkpoint merge``: the files are those of PEFT's ``merge_and_unload``."""

import copy
import json
import re
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moetrain.cli.checkpoint import main
from moetrain.config import Config
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.save import Export, save_hf
from moetrain.train.loop import Trainer
from tests.lib.adapter_files import save_adapters
from tests.lib.adapters import EVERYTHING
from tests.lib.family_cases import random_reference
from tests.lib.new_tokens import NEW, make_checkpoint
from tests.lib.peft_adapters import ATTENTION, CASES, DOWN, GATE_UP, load_bases, write
from tests.lib.quantised_files import quantised

peft = pytest.importorskip("peft")
LOAD = transformers.AutoModelForCausalLM.from_pretrained


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Return a dense and a routed model: folder, and ``transformers``' model."""
    return load_bases({name: tmp_path_factory.mktemp(name) for name in ("moe", "dense")})


@pytest.fixture(scope="module")
def plain(bases, tmp_path_factory):
    """Return the folder of an adapter of the routed model, written by PEFT."""
    folder = tmp_path_factory.mktemp("adapter")
    write(bases["moe"][1], folder, {"target_modules": ATTENTION})
    return folder


def merge(adapter, base, out, *words):
    assert main(["merge", str(adapter), str(base), str(out), *words]) == 0
    return tensors_of(out)


def tensors_of(folder):
    files = folder.glob("*.safetensors")
    return {name: x for path in files for name, x in load_file(path).items()}


def merged_by_peft(model, adapter, folder):
    """Return the tensors, by their names in files, of PEFT's merged ``model`` in fp32."""
    model = peft.PeftModel.from_pretrained(copy.deepcopy(model), adapter).merge_and_unload()
    model.save_pretrained(folder)
    return tensors_of(folder)


def assert_same(ours, theirs, base):
    """Check that ours are theirs bit for bit, in the dtypes of ``base``, and are not the base."""
    # PEFT also writes a head that is tied to the embedding.
    assert base.keys() == ours.keys() <= theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == base[name].dtype, name
        assert torch.equal(tensor, theirs[name].to(tensor.dtype)), name
    assert any(not torch.equal(tensor, base[name]) for name, tensor in ours.items())


QUICK = ["rslora", "float alpha", "patterns", "both", "tied whole", "dora of rslora", "rows"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.tier("long", quick=[f"{name}-fp32" for name in QUICK] + ["everything-bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("kind", "config"), [(b, c) for b, _, c in CASES], ids=[c[1] for c in CASES]
)
def test_weights_are_those_of_pefts_merge_in_fp32(kind, config, dtype, bases, tmp_path):
    folder, model = bases[kind]
    if dtype == torch.bfloat16:
        save_hf(load_hf(folder), tmp_path / "base", dtype="bfloat16")
        folder, model = tmp_path / "base", LOAD(tmp_path / "base", dtype=torch.float32)
    write(model, tmp_path / "adapter", config)
    ours = merge(tmp_path / "adapter", folder, tmp_path / "out")
    theirs = merged_by_peft(model, tmp_path / "adapter", tmp_path / "theirs")
    assert_same(ours, theirs, tensors_of(folder))


FAMILIES = {
    "gpt_oss": {"target_modules": ATTENTION, "target_parameters": [GATE_UP, DOWN]},
    "olmoe": {"target_modules": ["k_proj"], "target_parameters": [DOWN, GATE_UP]},
    "deepseek_v3": {"target_modules": ["q_b_proj", "kv_b_proj", "o_proj"]},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", FAMILIES)
def test_other_families_are_merged_as_by_peft(case, tmp_path):
    """GPT-OSS's files have experts transposed; DeepSeek-V3's attention is latent."""
    model = random_reference(case).eval()
    model.save_pretrained(tmp_path / "base")
    write(model, tmp_path / "adapter", {**FAMILIES[case], "use_rslora": True, "lora_alpha": 3})
    ours = merge(tmp_path / "adapter", tmp_path / "base", tmp_path / "out")
    theirs = merged_by_peft(model, tmp_path / "adapter", tmp_path / "theirs")
    assert_same(ours, theirs, tensors_of(tmp_path / "base"))


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_base_is_merged_in_bf16(tmp_path):
    stored = quantised(tmp_path)
    model = LOAD(tmp_path / "wide", dtype=torch.float32)
    write(model, tmp_path / "adapter", FAMILIES["gpt_oss"])
    ours = merge(tmp_path / "adapter", tmp_path / "in", tmp_path / "out")
    assert_same(ours, merged_by_peft(model, tmp_path / "adapter", tmp_path / "theirs"), stored)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["fused", "per_expert"])
def test_our_adapters_are_merged_as_by_peft(layout, bases, tmp_path):
    """PEFT makes one adapter of rank 2 r of an expert's gate and up; its sums have more terms."""
    folder, model = bases["moe"]
    save_adapters([EVERYTHING, f"lora.layout={layout}"], tmp_path / "adapter")
    ours = merge(tmp_path / "adapter", folder, tmp_path / "out")
    theirs = merged_by_peft(model, tmp_path / "adapter", tmp_path / "theirs")
    if layout == "fused":
        assert_same(ours, theirs, tensors_of(folder))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=2**-23, atol=2**-24)


RUN = ["train.device=cpu", "compile.enabled=no", "data.seq_len=32", "train.sample_tokens=0"]
RUN += ["train.micro_batch_size=2", "train.global_batch_size=2", "log.tensorboard=no"]
RUN += ["train.epochs=None", "train.steps=2", "optim.lr=0.1", "checkpoint.save_hf=yes"]
TRAINED = {
    "adapters": ["lora.rank=8"],
    "dora": ["lora.rank=8", "lora.use_dora=yes", "lora.targets=*.attn.*"],
    "new tokens": [
        *("lora.rank=8", f"data.new_tokens={','.join(NEW)}"),
        f"lora.trainable_tokens={','.join(NEW)}",
    ],
    "whole": ["lora.rank=8", "lora.modules_to_save=lm_head"],
    "frozen": ["train.freeze=layers.0.*"],
}


@pytest.mark.tier("long", quick=["whole"])
@pytest.mark.parametrize("case", TRAINED)
def test_a_run_is_merged_as_it_exports_itself(case, tmp_path):
    """Its export's weights are tested against PEFT's model (test_peft.py)."""
    make_checkpoint(tmp_path / "base")
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": NEW[0]}]
    (tmp_path / "a.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 16)
    words = [f"model.path={tmp_path}/base", f"data.path={tmp_path}/a.jsonl", *TRAINED[case]]
    words += [f"data.cache_dir={tmp_path}/cache", f"output_dir={tmp_path}/out"]
    Trainer(Config.load(None, [*RUN, *words], environ={})).fit()
    want = files_of(tmp_path / "out" / "hf")
    step = tmp_path / "out" / "checkpoints" / "step-00000002"
    for number, source in enumerate([step, tmp_path / "out", tmp_path / "out" / "adapter"]):
        if case == "frozen" and number == 2:
            continue  # it has none
        merge(source, tmp_path / "base", tmp_path / str(number))
        assert files_of(tmp_path / str(number)) == want, source
    assert want["model.safetensors"] != files_of(tmp_path / "base")["model.safetensors"]


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def drop(folder, part):
    tensors = load_file(folder / "adapter_model.safetensors")
    kept = {name: x for name, x in tensors.items() if part not in name}
    save_file(kept, folder / "adapter_model.safetensors")


def widen(folder):
    file = folder / "adapter_model.safetensors"
    save_file({n: torch.cat((x, x), -1) for n, x in load_file(file).items()}, file)


REFUSED = {
    "shapes": (widen, "error: PATH: '{adapter}': .*has shape .* but this model needs "),
    "names": (
        lambda folder: drop(folder, "layers.1.self_attn.q_proj.lora_A"),
        "error: PATH: .*not in it: .*layers.1.self_attn.q_proj.lora_A",
    ),
    "kind": (
        lambda folder: change(folder / "adapter_config.json", use_qalora=True),
        "use_qalora is True, not supported; merge the adapter into its base with PEFT",
    ),
    "not LoRA": (
        lambda folder: change(folder / "adapter_config.json", peft_type="IA3"),
        "peft_type is 'IA3', but only LORA is supported",
    ),
    "bias": (lambda folder: change(folder / "adapter_config.json", bias="all"), "bias is 'all'"),
    "nothing": (lambda folder: shutil.rmtree(folder), "error: PATH: .* is not a checkpoint"),
    "damage": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"a" * 99),
        "damaged or cut short",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(case, plain, bases, tmp_path, capsys):
    adapter = shutil.copytree(plain, tmp_path / "adapter")
    spoil, says = REFUSED[case]
    spoil(adapter)
    refuse([adapter, bases["moe"][0], tmp_path / "out"], says, capsys)
    assert {path.name for path in tmp_path.iterdir()} <= {"adapter"}


def refuse(words, says, capsys):
    """Check that merging with ``words`` is an error of one line that ``says`` matches."""
    capsys.readouterr()
    assert main(["merge", *map(str, words)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert re.search(says.replace("{adapter}", str(words[0])), error), error


def test_other_models_and_places_are_refused_in_one_line(plain, bases, tmp_path, capsys):
    base, out = bases["moe"][0], tmp_path / "out"
    random_reference("olmoe").save_pretrained(tmp_path / "wider")
    refuse([plain, tmp_path / "wider", out], "error: PATH: .*this model needs", capsys)
    refuse([plain, tmp_path / "nowhere", out], "error: BASE: .*nowhere", capsys)
    refuse([plain, plain, out], "error: BASE: .*holds adapters without", capsys)
    refuse([base, base, out], "error: PATH: .* is not a run's checkpoint", capsys)
    refuse([plain, base], "takes three paths: the adapters, BASE and OUT, not 2", capsys)
    refuse([plain, base, plain / "in"], "is in the checkpoint itself", capsys)
    out.mkdir()
    (out / "mine").write_text("mine")
    refuse([plain, base, out], "error: OUT: .*is there already; give a new folder", capsys)
    assert files_of(out) == {"mine": b"mine"}
    assert main(["inspect", str(plain), str(out), str(out)]) == 2


def test_weights_too_large_for_the_dtype_are_refused(plain, bases, tmp_path, capsys):
    change(shutil.copytree(plain, tmp_path / "a") / "adapter_config.json", lora_alpha=1e7)
    words = [tmp_path / "a", bases["moe"][0], tmp_path / "out", "--dtype", "float16"]
    refuse(words, "float16 cannot hold .*_proj.*; use bfloat16 or float32", capsys)
    assert not (tmp_path / "out").exists()


def test_out_appears_whole_or_not_at_all(plain, bases, tmp_path, monkeypatch, capsys):
    """A disk that fills after the first file leaves nothing."""
    real, written = Export._collect, []

    def collect(self, shard, coming, is_mine):
        if written:
            raise OSError(28, "No space left on device")
        written.append(self.folder)
        return real(self, shard, coming, is_mine)

    monkeypatch.setattr(Export, "_collect", collect)
    monkeypatch.setattr("moetrain.models.hf.save._plan_shards", two_files)
    refuse([plain, bases["moe"][0], tmp_path / "out"], "No space left on device", capsys)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(Export, "_collect", real)
    assert merge(plain, bases["moe"][0], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert len([*(tmp_path / "out").glob("*.safetensors")]) == 2
    assert LOAD(tmp_path / "out").num_parameters() > 0


def test_merged_weights_can_be_quantised(plain, bases, tmp_path):
    """transformers' values of this format are in test_packing.py."""
    ours = merge(plain, bases["moe"][0], tmp_path / "fp8", "--format", "fp8")
    merge(plain, bases["moe"][0], tmp_path / "plain")
    save_hf(load_hf(tmp_path / "plain"), tmp_path / "want", format="fp8")
    assert any(name.endswith("_scale_inv") for name in ours)
    assert files_of(tmp_path / "fp8") == files_of(tmp_path / "want")


def two_files(tensors, max_bytes):
    tensors = [*tensors]
    halves = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
    return {f"model-0000{i + 1}-of-00002.safetensors": half for i, half in enumerate(halves)}
