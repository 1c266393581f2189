"""DoRA: PEFT's logits and gradients on every mesh, and PEFT's files in both directions."""

import pytest
import torch

from moetrain.config import Config, ConfigError
from moetrain.jobs.shared import check_settings
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.peft import attach_peft
from moetrain.models.rules import ADAPTER, ADAPTERS, MAGNITUDE
from tests.lib.adapter_files import TOKENS_BS, logits_of, save_base
from tests.lib.adapters import MICRO, adapted, base_of, compare, learn, learn_all, value_of
from tests.lib.distributed import spawn
from tests.lib.engines import copy_of, make_engine, train, weights_of
from tests.lib.whole_modules import PARTS, base_for, check_logits, gradients_beside, pefts

peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")

WORDS = ["lora.use_dora=yes", "lora.targets=*.attn.*"]


def drawn(name, *words):
    """Return an engine whose adapters and row magnitudes change results."""
    engine = adapted(*WORDS, *words, base=base_for(name))
    for parameter, entry in engine.stages.table.items():
        if parameter.endswith(MAGNITUDE):
            engine.fsdp.write(parameter, (), value_of(parameter, entry.shape).abs() + 0.1)
    return engine


def pefts_name(name: str) -> str:
    _, layer, _, part, leaf = name.split(".")
    module = f"base_model.model.model.layers.{layer}.self_attn.{PARTS[part]}"
    ends = {ADAPTER[0]: "lora_A", ADAPTER[1]: "lora_B", MAGNITUDE: "lora_magnitude_vector"}
    return f"{module}.{ends[leaf.removeprefix('weight')]}.default.weight"


@pytest.mark.parametrize("name", ["moe", "dense"])
def test_logits_and_gradients_are_pefts(name, tmp_path):
    engine = drawn(name)
    model = pefts(engine, name, tmp_path)
    check_logits(engine, model, tmp_path, atol=1e-5, apart=0.05)
    theirs, ours = gradients_beside(engine, model)
    assert {pefts_name(n) for n in ours} == set(theirs)
    assert any(n.endswith(MAGNITUDE) for n in ours)
    for parameter, gradient in ours.items():
        wanted = theirs[pefts_name(parameter)]
        assert (gradient - wanted).norm() <= 1e-4 * wanted.norm(), parameter


def test_biases_are_not_scaled(tmp_path):
    """Qwen2's queries, keys and values have biases."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": 40}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen2", **sizes)
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, x in base.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(x)
    base.save_pretrained(tmp_path / "hf")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=True)
    model = peft.get_peft_model(base, config)
    for name, x in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.uniform_(x, 0.1, 0.5)
    model.save_pretrained(tmp_path / "adapter")
    ours = load_hf(tmp_path / "hf")
    attach_peft(ours, tmp_path / "adapter")
    want = model.base_model.model(TOKENS_BS).logits
    torch.testing.assert_close(ours(TOKENS_BS), want, rtol=0, atol=1e-5)


def test_a_run_begins_as_its_base_and_goes_on_from_its_state_and_files(tmp_path):
    base = base_for("moe")
    engine = make_engine(*WORDS, base=base, micro=MICRO)
    plain = save_base(base, tmp_path / "hf")
    torch.testing.assert_close(logits_of(engine), plain, rtol=0, atol=1e-6)
    before = weights_of(engine)
    train(engine, range(2), MICRO)
    after = weights_of(engine)
    changed = {n for n, x in after.items() if not torch.equal(x, before[n])}
    assert changed == {n for n in before if n.endswith(ADAPTERS)}
    again = make_engine(*WORDS, base=base, micro=MICRO)
    again.load_state(copy_of(engine.state()))
    assert train(again, range(2, 4), MICRO) == train(engine, range(2, 4), MICRO)
    engine.save_peft(tmp_path / "adapter")
    words = [*WORDS, f"lora.path={tmp_path}/adapter"]
    later, mine = make_engine(*words, base=base, micro=MICRO), weights_of(engine)
    for name, weight in weights_of(later).items():
        torch.testing.assert_close(weight, mine[name], rtol=0, atol=1e-7, msg=name)
    with pytest.raises(ConfigError, match=r"lora\.use_dora: no, but lora\.path .* with yes; set"):
        make_engine(*words, "lora.use_dora=no", base=base, micro=MICRO)


def test_it_begins_as_its_base_in_bf16_too():
    """Rounded magnitudes would scale each row slightly."""
    words = ["train.dtype=bfloat16", "lora.targets=*.attn.*"]
    plain, scaled = (
        make_engine(*words, more, base=base_for("moe"), micro=MICRO)
        for more in ("lora.use_dora=no", "lora.use_dora=yes")
    )
    assert torch.equal(logits_of(plain), logits_of(scaled))


RUNS = {
    "dp": [*WORDS, "parallel.reshard_after_forward=yes"],
    "ep": [*WORDS, "parallel.ep=2", "activation.policy=full"],
    "pp": [*WORDS, "parallel.pp=2"],
}


@pytest.mark.tier("wide")
def test_every_mesh_learns_the_same():
    expected = learn(WORDS, base_of("moe"))
    for answers in spawn(2, learn_all, RUNS, timeout=200):
        for name in RUNS:
            compare(name, answers[name], expected)


@pytest.mark.tier("long")
def test_compiled_dora_equals_eager():
    runs = {"compiled": [*WORDS, "compile.enabled=yes", "activation.policy=selective"]}
    compare("compiled", learn_all(runs)["compiled"], learn(WORDS, base_of("moe")))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["lora.targets=*.experts"],
            r"lora\.use_dora: yes, but layers\.0\.moe\.experts does not support",
        ),
        (
            ["lora.targets=*.router"],
            r"lora\.use_dora: yes, but layers\.0\.moe\.router does not support",
        ),
        (["lora.dropout=0.1"], r"lora\.use_dora: True contradicts lora\.dropout 0\.1"),
        (["parallel.tp=2"], r"lora\.use_dora: True contradicts parallel\.tp 2"),
    ],
)
def test_dora_refuses_unsupported_settings_in_one_line(words, problem):
    with pytest.raises(ConfigError, match=problem):
        make_engine(*WORDS, *words, base=base_of("moe"), micro=MICRO)


def test_jobs_train_plain_adapters():
    with pytest.raises(ConfigError, match=r"lora\.use_dora: yes, but jobs train plain adapters"):
        check_settings(Config.load("jobs-debug", ["lora.use_dora=yes"], environ={}))
