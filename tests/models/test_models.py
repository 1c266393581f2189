"""Models compared with transformers; formulas, packing, initial values."""

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from moetrain.config import ConfigError, KernelsSection, ModelSection, MoeSection
from moetrain.kernels.vocabulary.linear_cross_entropy import linear_cross_entropy
from moetrain.losses.balancing import load_balancing_loss
from moetrain.models.families import PRESETS
from moetrain.models.hf.config import architecture_from_hf
from moetrain.models.hf.load import load_hf, resolve_architecture
from moetrain.models.hf.save import save_hf
from moetrain.models.rope_scaling import RotaryEmbedding
from moetrain.models.transformer import Inputs, Transformer
from tests.lib.architectures import make_architecture
from tests.lib.small_models import (
    CASES,
    LINEAR,
    LLAMA3,
    SIZES,
    YARN,
    gradients_as_checkpoint,
    relative_error,
)

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": LINEAR,
    "yarn": YARN,
    "yarn, real-valued range": {**YARN, "truncate": False, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn, mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, attention factor": {**YARN, "attention_factor": 0.9},
    "yarn, a step": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "llama3": LLAMA3,
    "llama3, no original length": {**LLAMA3, "original_max_position_embeddings": None},
}

MOE = make_architecture(
    family="qwen3_moe",
    vocab_size=48,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=40,
    qk_norm=True,
    num_experts=6,
    num_experts_per_token=2,
    moe_intermediate_size=24,
)
VARIANTS = {
    "moe": MOE,
    "some dense layers": MOE.model_copy(update={"moe_layers": (True, False, True)}),
    "dense, every bias, tied": make_architecture(
        **{
            **MOE.model_dump(),
            "family": "llama",
            "num_experts": 0,
            "num_experts_per_token": 0,
            "qkv_bias": True,
            "out_bias": True,
            "mlp_bias": True,
            "qk_norm": False,
            "tie_embeddings": True,
        }
    ),
}


def random_reference(case: str) -> torch.nn.Module:
    """Return transformers' own model of ``case`` with random weights, norms and biases."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(case.split()[0], **{**SIZES, **CASES[case]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.1)
    return model


def our_loss(model: Transformer, tokens_BS: torch.Tensor) -> torch.Tensor:
    """Return the mean next-token loss plus the weighted load-balancing loss, as in transformers."""
    hidden_BSD, routing = model.backbone(Inputs(tokens_BS))
    losses = linear_cross_entropy(
        hidden_BSD[:, :-1].flatten(0, 1), model.head_weight, tokens_BS[:, 1:].flatten()
    )
    loss = losses.loss_T.mean()
    if routing is not None:
        balance = load_balancing_loss(
            routing.counts_LE, routing.prob_sum_LE, routing.num_tokens, pooled=True
        )
        loss = loss + model.arch.router_aux_loss_coef * balance
    return loss


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_every_gradient_match_transformers(case, tmp_path):
    theirs = random_reference(case)
    theirs.save_pretrained(tmp_path / "weights")
    ours = load_hf(tmp_path / "weights")
    tokens_BS = torch.randint(0, SIZES["vocab_size"], (2, 23))

    reference = theirs(tokens_BS, labels=tokens_BS)
    reference.loss.backward()
    loss = our_loss(ours, tokens_BS)
    loss.backward()
    assert relative_error(ours(tokens_BS), reference.logits) < 1e-5
    assert relative_error(loss, reference.loss) < 1e-5

    want = gradients_as_checkpoint(theirs, theirs.save_pretrained, tmp_path / "theirs")
    got = gradients_as_checkpoint(ours, lambda folder: save_hf(ours, folder), tmp_path / "ours")
    assert got.keys() == want.keys()
    errors = {name: relative_error(got[name], want[name]) for name in want}
    assert {name: error for name, error in errors.items() if not error < 1e-5} == {}


@pytest.mark.parametrize("rope", ROPES)
def test_rope_frequencies_match_transformers(rope):
    parameters = {k: v for k, v in ROPES[rope].items() if v is not None}
    config = AutoConfig.for_model("llama", **SIZES, head_dim=64, rope_parameters=parameters)
    theirs = transformers.LlamaModel(config).rotary_emb
    ours = RotaryEmbedding(architecture_from_hf(config.to_dict()).rotation(0))
    torch.testing.assert_close(ours.inv_freq, theirs.inv_freq, rtol=1e-6, atol=0)
    assert ours.scale == pytest.approx(theirs.attention_scaling, rel=1e-12)


# Formulas.
@pytest.mark.parametrize("name", VARIANTS)
def test_parts_know_the_parameters_of_their_modules(name):
    for part in VARIANTS[name].parts():
        module = part.build(KernelsSection(), MoeSection())
        want = {name: tuple(p.shape) for name, p in module.named_parameters()}
        assert {name: weight.shape for name, weight in part.weights.items()} == want


@pytest.mark.parametrize("name", VARIANTS)
def test_parameter_formulas_count_the_built_model(name):
    arch = VARIANTS[name]
    parameters = dict(Transformer(arch).named_parameters())
    active = [
        p.numel() * arch.num_experts_per_token / arch.num_experts if "experts" in n else p.numel()
        for n, p in parameters.items()
    ]
    assert arch.num_params() == sum(p.numel() for p in parameters.values())
    assert arch.num_active_params() == sum(active)


@pytest.mark.parametrize("name", VARIANTS)
def test_flop_formula_counts_the_built_model(name):
    arch, seq_len = VARIANTS[name], 16
    model = Transformer(arch, kernels=KernelsSection(attention="reference"))
    model.init_weights(std=0.02, seed=0)
    expert_flops = 0.0

    def count(experts, inputs, output):  # grouped products are opaque to torch's counter
        nonlocal expert_flops
        rows = int(inputs[2].offsets_E[-1])
        expert_flops += 2.0 * rows * (experts.w_gate_up[0].numel() + experts.w_down[0].numel())

    hooks = [
        module.register_forward_hook(count)
        for n, module in model.named_modules()
        if n.endswith("moe.experts")
    ]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, seq_len, dtype=torch.long))
    assert len(hooks) == len(arch.moe_layer_indices)
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    attention = counts.pop("aten.bmm")  # all S x S pairs; the causal half is useful
    assert attention == arch.num_layers * 4 * seq_len**2 * arch.num_heads * arch.head_dim
    forward = sum(counts.values()) + expert_flops + attention / 2
    assert 3 * forward == pytest.approx(arch.flops_per_token(seq_len) * seq_len, rel=1e-12)
    # Frozen matrices multiply twice; the formula includes norms and biases, 1 % of these.
    frozen = 2 * (forward - attention / 2) + 3 * attention / 2
    found = arch.flops_per_token(seq_len, is_frozen=True) * seq_len
    assert found == pytest.approx(frozen, rel=0.02)


def test_window_flops_count_visible_keys():
    seq_len, window = 4096, 512
    arch = MOE.model_copy(update={"sliding_windows": (window, None, window)})
    pairs = sum(min(i + 1, window) for i in range(seq_len))
    full = sum(i + 1 for i in range(seq_len))
    saved = 12 * arch.num_heads * arch.head_dim * 2 * (full - pairs) / seq_len
    difference = MOE.flops_per_token(seq_len) - arch.flops_per_token(seq_len)
    assert difference == pytest.approx(saved, rel=1e-3)


@pytest.mark.parametrize(("layers", "gigaflops"), [(48, 23.0), (24, 12.5), (6, 4.5)])
def test_flops_of_qwen3_30b_a3b(layers, gigaflops):
    arch = resolve_architecture(ModelSection(preset="qwen3-30b-a3b", num_layers=layers))
    assert arch.flops_per_token(4096) / 1e9 == pytest.approx(gigaflops, rel=0.005)


@pytest.mark.tier("long")
def test_sizes_of_presets():
    arch = PRESETS["qwen3-30b-a3b"]
    assert arch.num_params() / 1e9 == pytest.approx(30.5, abs=0.05)
    assert arch.num_active_params() / 1e9 == pytest.approx(3.35, abs=0.01)
    assert PRESETS["qwen3-0.6b"].num_params() / 1e9 == pytest.approx(0.596, abs=0.001)
    assert 1e6 < PRESETS["debug"].num_params() < 3e6
    for arch in PRESETS.values():
        with torch.device("meta"):
            assert sum(p.numel() for p in Transformer(arch).parameters()) == arch.num_params()


# Packing.
@pytest.mark.tier(
    "long",
    quick=["flex-windows", "reference-windows", "sdpa-windows", "reference-full", "sdpa-full"],
)
@pytest.mark.parametrize("windows", [(), (5, None, 5)], ids=["full", "windows"])
@pytest.mark.parametrize("attention", ["sdpa", "reference", "flex"])
@torch.no_grad()  # flex has no backward on a CPU
def test_packed_equals_unpacked(attention, windows):
    arch = MOE.model_copy(update={"sliding_windows": windows})
    model = Transformer(arch, kernels=KernelsSection(attention=attention))
    model.init_weights(std=0.3, seed=0)
    first, second = torch.randint(0, arch.vocab_size, (2, 33)).split([12, 21], dim=1)
    packed_BS = torch.cat((first, second), dim=1)
    positions_BS = torch.cat((torch.arange(12), torch.arange(21))).expand(2, -1)

    alone = torch.cat((model(first), model(second)), dim=1)
    together = model(packed_BS, positions_BS)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(model(packed_BS), alone, atol=1e-2)  # as one document

    def loss_sum(logits_BSV: torch.Tensor, tokens_BS: torch.Tensor) -> torch.Tensor:
        log_probs = logits_BSV[:, :-1].log_softmax(-1)
        return -log_probs.gather(2, tokens_BS[:, 1:, None]).sum()

    separate = loss_sum(alone[:, :12], first) + loss_sum(alone[:, 12:], second)
    inside = loss_sum(together[:, :12], first) + loss_sum(together[:, 12:], second)
    torch.testing.assert_close(inside / (2 * 31), separate / (2 * 31), rtol=1e-6, atol=0)


def test_attention_backends_agree_on_gradients():
    tokens_BS = torch.randint(0, MOE.vocab_size, (2, 17))
    positions_BS = torch.cat((torch.arange(9), torch.arange(8))).expand(2, -1)
    gradients = []
    for attention in ("sdpa", "reference"):
        model = Transformer(MOE, kernels=KernelsSection(attention=attention))
        model.init_weights(std=0.1, seed=0)
        model(tokens_BS, positions_BS).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, want in gradients[1].items():
        assert relative_error(gradients[0][name], want) < 1e-5, name


# Initial values and dtypes.
def test_initial_values_depend_on_the_name_and_the_seed_alone():
    small, deep = (Transformer(MOE.model_copy(update={"num_layers": n})) for n in (1, 2))
    with torch.device("meta"):
        late = Transformer(MOE)
    late.to_empty(device="cpu")
    for model in (small, deep, late):
        model.init_weights(std=0.02, seed=3)
    deep_values, late_values = deep.state_dict(), late.state_dict()
    for name, value in small.state_dict().items():
        assert torch.equal(value, deep_values[name]), name
        assert torch.equal(value, late_values[name]), name
    first, second = (deep_values[f"layers.{i}.attn.wq.weight"] for i in (0, 1))
    assert not torch.equal(first, second)
    small.init_weights(std=0.02, seed=4)
    assert not torch.equal(small.state_dict()["layers.0.attn.wq.weight"], first)


def test_initial_values_by_kind():
    arch = VARIANTS["dense, every bias, tied"].model_copy(update={"qk_norm": True})
    model = Transformer(arch)
    model.init_weights(std=0.02, seed=0)
    for name, p in model.named_parameters():
        if "norm" in name:
            assert (p == 1).all(), name
        elif name.endswith("bias"):
            assert (p == 0).all(), name
        else:
            assert p.std().item() == pytest.approx(0.02, rel=0.15), name


@pytest.mark.parametrize("name", VARIANTS)
def test_model_computes_in_its_compute_dtype(name):
    model = Transformer(VARIANTS[name])
    model.init_weights(std=0.1, seed=0)
    tokens_BS = torch.randint(0, 48, (2, 9))
    exact = model(tokens_BS)
    model.compute_dtype = torch.bfloat16
    rounded = model(tokens_BS)
    assert (exact.dtype, rounded.dtype) == (torch.float32, torch.bfloat16)
    assert relative_error(rounded.float(), exact) < 0.03
    rounded.float().square().mean().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_a_narrower_model_keeps_exact_rotary_frequencies():
    model = Transformer(MOE)
    before = model.ropes[model.kinds[0].rotation].inv_freq.clone()
    model.to(torch.bfloat16).to_empty(device="cpu")
    assert torch.equal(model.ropes[model.kinds[0].rotation].inv_freq, before)


# Choosing an architecture.
def test_preset_with_overrides():
    arch = resolve_architecture(ModelSection(preset="debug", num_layers=2, hidden_size=64))
    assert arch == PRESETS["debug"].model_copy(update={"num_layers": 2, "hidden_size": 64})


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"preset": "gpt-5"}, "model.preset", ["gpt-5", "gpt-oss-20b", "docs/families.md"]),
        ({"preset": "debug", "num_heads": 3}, "model.num_heads", ["3", "num_kv_heads 2"]),
        ({"preset": "debug", "head_dim": 7}, "model.head_dim", ["7"]),
        ({"preset": "debug", "num_experts": 1}, "model.num_experts", ["1", "2"]),
        ({"preset": "qwen3-0.6b", "num_experts": 4}, "model.num_experts", ["4", "qwen3-0.6b"]),
    ],
)
def test_bad_overrides(settings, field, words):
    with pytest.raises(ConfigError) as error:
        resolve_architecture(ModelSection(**settings))
    assert error.value.field == field
    assert all(word in error.value.problem for word in words)


def test_architecture_of_a_checkpoint(tmp_path):
    random_reference("qwen3_moe").save_pretrained(tmp_path)
    assert resolve_architecture(ModelSection(path=str(tmp_path))) == load_hf(tmp_path).arch
    with pytest.raises(ConfigError, match=r"model\.path"):
        resolve_architecture(ModelSection(path=str(tmp_path / "absent")))
