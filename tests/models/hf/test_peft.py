"""Adapters are written and read in PEFT's files, merged into weights, and unmerged."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from moetrain.config import ConfigError
from moetrain.models.families import PRESETS
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.peft import attach_peft
from moetrain.models.rules import ADAPTER
from tests.lib.adapter_files import TOKENS_BS, logits_of, save_adapters, save_base
from tests.lib.adapters import BASE, EVERYTHING, MICRO, adapted, base_of
from tests.lib.distributed import spawn
from tests.lib.engines import WORDS, make_engine, train, weights_of
from tests.lib.family_cases import FAMILY_CASES, architecture_of

LAYOUTS = ["per_expert", "fused"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("moe", [EVERYTHING, "lora.layout=per_expert", "lora.rs=yes"]),
        ("moe", [EVERYTHING, "lora.layout=fused"]),
        ("moe", ["lora.targets=layers.1.moe.experts"]),
        ("dense", ["lora.targets=*.attn.wq,*.mlp.*"]),
    ],
)
def test_peft_loads_what_is_written(name, words, tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = base_of(name)
    engine = adapted(*words, base=base)
    plain = save_base(base, tmp_path / "hf")
    engine.save_peft(tmp_path / "adapter")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
    with torch.no_grad():
        got, want = model(TOKENS_BS).logits, logits_of(engine)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert (want - plain).abs().max() > 0.05
    # PEFT's own files of it are read.
    model.save_pretrained(tmp_path / "theirs")
    again = load_hf(tmp_path / "hf")
    if "lora.layout=fused" in words:
        attach_peft(again, tmp_path / "theirs")
        torch.testing.assert_close(again(TOKENS_BS), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_training_adapters_changes_no_other_parameter_or_buffer(case, monkeypatch):
    """Otherwise base and adapters, loaded elsewhere, would not be the trained model."""
    arch = architecture_of(case)
    monkeypatch.setitem(PRESETS, case, arch)
    base = [w for w in WORDS if not w.startswith(("model.", "moe."))]
    words = [f"model.preset={case}", "lora.rank=8"]
    if arch.num_experts:
        words += ["moe.aux_loss_coef=0.1", "moe.z_loss_coef=0.01"]
    engine = make_engine(*words, base=base)
    before = weights_of(engine)
    assert {*before} == {*dict(engine.model.named_parameters())} | {
        *dict(engine.model.named_buffers())
    }
    train(engine, range(2))
    moved = {name for name, x in weights_of(engine).items() if not torch.equal(x, before[name])}
    assert moved == {name for name in before if name.endswith(ADAPTER)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_save_peft_writes_pefts_shapes_and_names(layout, tmp_path):
    engine = adapted("lora.targets=*.wo,*.experts", f"lora.layout={layout}", "model.path=None")
    engine.save_peft(tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["lora_dropout"]) == (8, 4, 0)
    shapes = {
        n: list(x.shape) for n, x in load_file(tmp_path / "adapter_model.safetensors").items()
    }
    layer = "base_model.model.model.layers.1."
    own = {n.removeprefix(layer): s for n, s in shapes.items() if n.startswith(layer)}
    wanted = {"self_attn.o_proj.lora_A.weight": [8, 16], "self_attn.o_proj.lora_B.weight": [16, 8]}
    if layout == "fused":
        assert settings["target_modules"] == ["o_proj"]
        assert settings["target_parameters"] == [
            "mlp.experts.down_proj",
            "mlp.experts.gate_up_proj",
        ]
        wanted |= {
            "mlp.experts.base_layer.lora_A.weight": [32, 16],
            "mlp.experts.base_layer.lora_B.weight": [16, 32],
            "mlp.experts.lora_A.weight": [32, 8],
            "mlp.experts.lora_B.weight": [16, 32],
        }
    else:
        assert settings["target_modules"] == ["down_proj", "gate_proj", "o_proj", "up_proj"]
        for e in range(4):
            for name, (out, into) in {"gate": (8, 16), "up": (8, 16), "down": (16, 8)}.items():
                site = f"mlp.experts.{e}.{name}_proj"
                wanted[f"{site}.lora_A.weight"] = [8, into]
                wanted[f"{site}.lora_B.weight"] = [out, 8]
    assert own == wanted


def write_and_read(words, written, read):
    save_adapters([*words, "parallel.tp=2", "parallel.ep=2"], written)
    engine = make_engine(*words, "parallel.pp=2", f"lora.path={read}", base=BASE, micro=MICRO)
    return {name: x for name, x in weights_of(engine).items() if name.endswith(ADAPTER)}


def test_ranks_write_and_read_what_one_process_does(tmp_path):
    words = [EVERYTHING, "lora.layout=fused"]
    engine = adapted(*words)
    engine.save_peft(tmp_path / "one")
    wanted = {name: x for name, x in weights_of(engine).items() if name.endswith(ADAPTER)}
    for mine in spawn(2, write_and_read, words, tmp_path / "two", tmp_path / "one"):
        assert mine.keys() == wanted.keys()
        assert all(torch.equal(x, wanted[name]) for name, x in mine.items())
    one, two = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(x, two[name]) for name, x in one.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_begins_with_adapters_of_another_scale(layout, tmp_path):
    first = adapted(EVERYTHING, f"lora.layout={layout}")
    first.save_peft(tmp_path)
    words = [EVERYTHING, f"lora.path={tmp_path}", "lora.rs=yes"]
    second = make_engine(*words, base=BASE, micro=MICRO)
    torch.testing.assert_close(logits_of(second), logits_of(first), rtol=0, atol=1e-6)


def without(tensors, part):
    return {name: x for name, x in tensors.items() if part not in name}


def narrowed(tensors, part):
    """A single row would broadcast to any number of them."""
    name = next(n for n in tensors if part in n)
    return {**tensors, name: tensors[name][:1].clone()}


def unshared(tensors):
    name = next(n for n in tensors if ".up_proj.lora_A" in n)
    return {**tensors, name: tensors[name] + 1}


@pytest.mark.parametrize(
    ("words", "change", "problem"),
    [
        (["lora.rank=16"], None, r"lora\.rank: 16, but lora\.path .* has rank 8"),
        (["lora.targets=*.wq"], None, r"of no lora\.targets: .*experts.* and \d+ more"),
        ([], partial(without, part="experts.3.down_proj"), r"not in it: .*experts\.3\.down_proj"),
        (["lora.rank=8"], unshared, r"lora\.rank: 8, but lora\.path .* has rank 16 at .*w_gate_up"),
        ([], {"use_qalora": True}, "use_qalora is True, not supported"),
        ([], {"r": "8"}, "adapter_config.json: r is '8', not a rank"),
        ([], {"lora_alpha": None}, "lora_alpha is None, not a number"),
        ([], {"lora_alpha": float("nan")}, "lora_alpha is nan, not a number"),
        ([], {"r": 16}, r"rank 16|has shape \[8, "),
        ([], partial(narrowed, part="q_proj.lora_A"), r"q_proj.lora_A.weight has shape \[1, "),
        (
            [],
            partial(narrowed, part="experts.1.gate_proj.lora_B"),
            r"lora_B.weight has shape \[1, ",
        ),
    ],
)
@pytest.mark.parametrize("attached", [False, True])
def test_bad_peft_adapters_are_refused_in_one_line(words, change, problem, attached, tmp_path):
    if attached and (words or "no lora.targets" in problem):
        pytest.skip("has no settings of its own")
    adapted().save_peft(tmp_path)
    if isinstance(change, dict):
        file = tmp_path / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    elif change is not None:
        file = tmp_path / "adapter_model.safetensors"
        save_file(change(load_file(file)), file)
    if attached:
        save_base(BASE, tmp_path / "hf")
        model = load_hf(tmp_path / "hf", dtype=torch.float32)
        with pytest.raises(ConfigError, match=problem):
            attach_peft(model, tmp_path)
        return
    with pytest.raises(ConfigError, match=problem):
        make_engine(f"lora.path={tmp_path}", *words, base=BASE, micro=MICRO)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_equals_unmerged(dtype, tmp_path):
    save_base(BASE, tmp_path / "hf")
    engine = adapted(EVERYTHING)
    engine.save_peft(tmp_path / "adapter")
    engine.save_hf(tmp_path / "merged")
    model = load_hf(tmp_path / "hf", dtype=dtype)
    plain = set(model.state_dict())
    attach_peft(model, tmp_path / "adapter")
    apart = model(TOKENS_BS)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(apart.float(), logits_of(engine), rtol=0, atol=tolerance)
    merged = load_hf(tmp_path / "merged", dtype=dtype)
    torch.testing.assert_close(merged(TOKENS_BS), apart, rtol=0, atol=tolerance)
    assert merged.state_dict().keys() == plain


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_of_a_wider_model_are_refused(layout, tmp_path):
    save_base(BASE, tmp_path / "hf")
    wider = ["model.hidden_size=48", EVERYTHING, f"lora.layout={layout}"]
    make_engine(*wider, base=BASE, micro=MICRO).save_peft(tmp_path / "adapter")
    model = load_hf(tmp_path / "hf", dtype=torch.float32)
    with pytest.raises(
        ConfigError, match=r"lora_[AB].weight has shape \[.*\], but this model needs \["
    ):
        attach_peft(model, tmp_path / "adapter")


def test_adapters_that_do_nothing_are_adapters(tmp_path):
    """An adapter scaled by 0 may serve for comparisons with the base model."""
    save_base(BASE, tmp_path / "hf")
    adapted().save_peft(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 0}))
    model = load_hf(tmp_path / "hf", dtype=torch.float32)
    expected = model(TOKENS_BS)
    attach_peft(model, tmp_path)
    assert torch.equal(model(TOKENS_BS), expected)
