"""Every family of mixtures of experts equals transformers', in odd geometries.

Logits, loss and gradients; packed rows; files there and back bit for bit; greedy generation;
adapters against PEFT. Other files test the parts that all families share.
"""

import json
import math

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Qwen2MoeConfig,
)
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from moetrain.cli.checkpoint import main
from moetrain.config import (
    Config,
    ConfigError,
    KernelsSection,
    LoraSection,
    ModelSection,
    MoeSection,
)
from moetrain.generate.engine import Generator
from moetrain.generate.request import Request, SamplingParams
from moetrain.kernels.attention import cudnn
from moetrain.kernels.attention.attention import AttentionMask
from moetrain.kernels.linear_attention.gated_delta import Documents
from moetrain.models.architecture import Workload
from moetrain.models.attention import GroupedQueryAttention
from moetrain.models.families import FAMILIES, PRESETS
from moetrain.models.hf.config import architecture_from_hf, exported_config
from moetrain.models.hf.load import load_hf, resolve_architecture
from moetrain.models.hf.peft import attach_peft
from moetrain.models.hf.save import save_hf
from moetrain.models.layers import Context
from moetrain.models.moe import RoutedExperts
from moetrain.models.parts.block_attention import BlockSparseAttention
from moetrain.models.parts.gated_delta import GatedDeltaNet
from moetrain.models.parts.gemma_layers import GemmaExperts
from moetrain.models.parts.kimi_delta import KimiDelta
from moetrain.models.parts.latent_attention import LatentAttention
from moetrain.models.parts.mamba import Mamba2
from moetrain.models.parts.short_convolution import ShortConvolution
from moetrain.models.parts.sparse_attention import SparseLatentAttention
from moetrain.models.parts.squared_relu import SquaredReLU, SquaredReLUExperts
from moetrain.models.transformer import Inputs, Transformer, compile_blocks, plan_model
from moetrain.train.checks import check_model, check_widths
from tests.lib.checkpoints import tensors_of
from tests.lib.families_beside_transformers import save_adapters
from tests.lib.family_cases import (
    CASES,
    CONVOLVED,
    FAMILY_CASES,
    GEMMA,
    LINEAR,
    MIXERS,
    NEXT,
    ROUTED_CASES,
    SIZES,
    STATES,
    TURNS,
    YARN,
    architecture_of,
    limits,
    random_reference,
    save_reference,
    tokens,
)
from tests.lib.small_models import gradients_as_checkpoint, relative_error


def gradients(case, tmp_path):
    """Check that logits, the loss and every gradient equal transformers'."""
    theirs = random_reference(case)
    theirs.save_pretrained(tmp_path / "weights")
    ours = load_hf(tmp_path / "weights")
    tokens_BS = tokens(2, 23)
    reference = theirs(tokens_BS, labels=tokens_BS, use_cache=False)
    logits_BSV = ours(tokens_BS)
    loss = cross_entropy(logits_BSV[:, :-1].flatten(0, 1), tokens_BS[:, 1:].flatten())
    for_logits, for_gradients = limits(case)
    assert relative_error(logits_BSV, reference.logits) < for_logits
    assert relative_error(loss, reference.loss) < 1e-5

    for model, total in ((ours, loss), (theirs, reference.loss)):
        for parameter in model.parameters():  # an unused expert has none
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        total.backward()
        for fixed in (p for p in model.parameters() if not p.requires_grad):
            fixed.grad = fixed.detach().clone()
    want = gradients_as_checkpoint(theirs, theirs.save_pretrained, tmp_path / "theirs")
    got = gradients_as_checkpoint(ours, lambda folder: save_hf(ours, folder), tmp_path / "ours")
    assert got.keys() == want.keys()
    errors = {name: relative_error(got[name], want[name]) for name in want}
    assert {name: error for name, error in errors.items() if not error < for_gradients} == {}


@torch.no_grad()
def files(case, tmp_path):
    """Check that loading and saving keeps all bits, MTP heads too; transformers reads the files."""
    save_reference(case, tmp_path / "in")
    model = load_hf(tmp_path / "in")
    save_hf(model, tmp_path / "out")
    want, got = (load_file(tmp_path / folder / "model.safetensors") for folder in ("in", "out"))
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert tensor.dtype == got[name].dtype, name
        assert torch.equal(tensor, got[name]), name
    configs = [json.loads((tmp_path / f / "config.json").read_text()) for f in ("in", "out")]
    assert configs[0] == configs[1]
    # Without the source everything is written anew, with the same meaning.
    model.source = None
    save_hf(model, tmp_path / "bare")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "bare", attn_implementation="eager")
    tokens_BS = tokens(1, 9)
    logits_BSV = again(tokens_BS, use_cache=False).logits
    assert relative_error(model(tokens_BS), logits_BSV) < limits(case)[0]


@torch.no_grad()
def packing(case, tmp_path):
    """Check that documents in one row do not see each other."""
    random_reference(case).save_pretrained(tmp_path)
    model = load_hf(tmp_path, dtype=torch.float64)
    first, second = tokens(2, 20).split([7, 13], dim=1)
    positions_BS = torch.cat((torch.arange(7), torch.arange(13))).expand(2, -1)
    alone = torch.cat((model(first), model(second)), dim=1)
    together = model(torch.cat((first, second), dim=1), positions_BS)
    # Angles of positions are always fp32.
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-6)


def test_states_decay_at_rates_of_the_papers_at_first():
    model = Transformer(architecture_of("qwen3_next", linear_num_value_heads=2000))
    model.init_weights(std=0.02, seed=0)
    layer = model.layers[0].linear_attn
    rates = layer.a_log.detach().exp()
    assert 0 < rates.min() < 0.1 < 15.9 < rates.max() < 16
    assert rates.mean() == pytest.approx(8, rel=0.05)
    assert layer.dt_bias.eq(1).all()
    assert layer.norm.weight.eq(1).all()
    assert 0.49 < layer.conv_v.abs().max() <= 0.5  # with four taps
    zero_centred = [model.norm, model.layers[3].attn.q_norm, model.layers[0].mlp_norm]
    assert not any(norm.weight.any() for norm in zero_centred)


EXPERTS = {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 32}
KEEPING = {
    "gemma": GemmaExperts(
        hidden_size=64, **EXPERTS, intermediate_size=48, norm_eps=1e-6, activation="gelu"
    ),
    "mamba": Mamba2(
        hidden_size=64,
        mamba_num_heads=4,
        mamba_head_dim=64,
        mamba_num_groups=2,
        mamba_state_dim=64,
        mamba_conv_kernel_dim=4,
    ),
    "kda": KimiDelta(
        hidden_size=96,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_conv_kernel_dim=4,
        low_rank_gates=True,
        decay_bound=None,
    ),
    "bounded kda": KimiDelta(
        hidden_size=96,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_conv_kernel_dim=4,
        low_rank_gates=False,
        decay_bound=-5.0,
    ),
    "dense": SquaredReLU(hidden_size=64, intermediate_size=48),
    "convolution": ShortConvolution(hidden_size=64, conv_kernel_dim=3),
    "experts": SquaredReLUExperts(hidden_size=64, **EXPERTS, shared_intermediate_size=40),
    "latent": SquaredReLUExperts(hidden_size=64, **EXPERTS, moe_latent_size=32),
}


@pytest.mark.parametrize("name", KEEPING)
def test_parts_keep_for_their_backward_what_they_say(name):
    """The run is eager, with the kernels, whose ops list the tensors that they keep."""
    part, seq_len = KEEPING[name], 256
    module = part.build(KernelsSection(backend="triton"), MoeSection())
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x_BSD = torch.randn(1, seq_len, part.hidden_size, requires_grad=True)
    bounds_N, place_T = torch.tensor([0, seq_len]).int(), torch.arange(seq_len)
    mask = AttentionMask.of(None, batch=1, seq_len=seq_len, device="cpu")
    own = {"documents": Documents.of(bounds_N, seq_len), "place_T": place_T}
    given = {x.untyped_storage().data_ptr() for x in (x_BSD, *module.parameters())}
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        module(x_BSD, Context((x_BSD, x_BSD), mask, **own))
    total = sum(x.untyped_storage().nbytes() for at, x in kept.items() if at not in given)
    share = Workload(seq_len, tp=1, ep=1, width=4, is_compiled=False)
    assert total == pytest.approx(part.activations(share), rel=0.03)


def test_gates_of_kimi_delta_attention_are_those_of_transformers_at_first():
    """Rates are uniform in 1 to 16, and steps log-uniform in 0.001 to 0.1."""
    model = Transformer(architecture_of("kimi_linear", linear_num_value_heads=2000))
    model.init_weights(std=0.02, seed=0)
    layer = model.layers[0].linear_attn
    rates = layer.a_log.detach().exp()
    assert 0.99 < rates.min() < 1.1 < 15.9 < rates.max() < 16.01
    steps = torch.nn.functional.softplus(layer.dt_bias.detach())
    assert 0.99e-3 < steps.min() < 1.1e-3 < 0.09 < steps.max() < 0.101
    assert steps.log().mean() == pytest.approx(math.log(1e-2), rel=0.01)
    assert layer.norm.weight.eq(1).all()


@torch.no_grad()
def test_published_files_of_kimi_linear_have_dense_layers_under_mlp(tmp_path):
    """transformers writes them under ``block_sparse_moe``; either layout is kept."""
    theirs, tokens_BS = random_reference("kimi_linear"), tokens(2, 9)
    theirs.save_pretrained(tmp_path / "in")
    stored = load_file(tmp_path / "in" / "model.safetensors")
    published = {
        name.replace("block_sparse_moe", "mlp") if ".layers.0." in name else name: tensor
        for name, tensor in stored.items()
    }
    assert published.keys() - stored.keys() == {
        f"model.layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down")
    }
    save_file(published, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    model = load_hf(tmp_path / "in")
    assert relative_error(model(tokens_BS), theirs(tokens_BS, use_cache=False).logits) < 1e-5
    save_hf(model, tmp_path / "out")
    model.source = None
    save_hf(model, tmp_path / "bare")
    for folder in ("out", "bare"):
        got = load_file(tmp_path / folder / "model.safetensors")
        assert got.keys() == published.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in published.items())


def test_mamba_steps_are_those_of_the_paper_at_first():
    arch = architecture_of("nemotron_h", mamba_num_heads=2000)
    model = Transformer(arch)
    model.init_weights(std=0.02, seed=0)
    mixer = model.layers[0].mamba
    steps = torch.nn.functional.softplus(mixer.dt_bias.detach())
    assert 9.9e-4 < steps.min() < 1.1e-3
    assert 0.09 < steps.max() < 0.101
    assert steps.log().mean() == pytest.approx(math.log(0.01), abs=0.1)  # the middle of the range
    assert 0 < mixer.a_log.detach().exp().min() < 0.1
    assert mixer.d.eq(1).all()
    assert mixer.norm.eq(1).all()
    assert not mixer.conv_b_bias.any()
    assert 0.49 < mixer.conv_x.abs().max() <= 0.5  # with four taps


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_mamba_on_a_gpu_is_the_reference(is_compiled):
    """Logits and every gradient agree in fp32, over documents of more than one chunk."""
    sizes = {"mamba_head_dim": 64, "mamba_state_dim": 128, "mamba_num_groups": 2}
    mixers = {"mixers": ("mamba", "moe", "mamba", "mlp"), "num_layers": 4}
    arch = architecture_of("nemotron_h", **sizes, **mixers)
    positions_BS = torch.cat((torch.arange(70), torch.arange(131))).expand(2, -1).cuda()
    tokens_BS, found = tokens(2, 201).cuda(), []
    for backend in ("reference", "auto"):
        with torch.device("cuda"):
            model = Transformer(arch, kernels=KernelsSection(backend=backend))
        model.init_weights(std=0.1, seed=0)
        if is_compiled and backend == "auto":
            compile_blocks(model)
        logits_BSV = model(tokens_BS, positions_BS)
        logits_BSV.square().sum().backward()
        found.append({"logits": logits_BSV} | {n: p.grad for n, p in model.named_parameters()})
    want, got = found
    errors = {name: relative_error(got[name], want[name]) for name in want}
    assert {name: error for name, error in errors.items() if not error < 1e-4} == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_wide_heads_on_a_gpu_are_the_reference(is_compiled, is_packed):
    """A Gemma-4 in fp32, with full layers too wide for cuDNN: every gradient agrees."""
    sizes = {"head_dim": 64, "global_head_dim": 512, "global_num_kv_heads": 1}
    arch = architecture_of("gemma4_text", **sizes)
    positions_BS = torch.cat((torch.arange(70), torch.arange(131))).expand(2, -1).cuda()
    tokens_BS, found = tokens(2, 201).cuda(), []
    for backend, attention in (("reference", "reference"), ("auto", "auto")):
        kernels = KernelsSection(backend=backend, attention=attention)
        with torch.device("cuda"):
            model = Transformer(arch, kernels=kernels)
        model.init_weights(std=0.1, seed=0)
        if is_compiled and backend == "auto":
            compile_blocks(model)
        logits_BSV = model(tokens_BS, positions_BS if is_packed else None)
        logits_BSV.square().sum().backward()
        trained = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        found.append({"logits": logits_BSV, **trained})
    want, got = found
    errors = {name: relative_error(got[name], want[name]) for name in want}
    assert {name: error for name, error in errors.items() if not error < 1e-4} == {}


def test_blocks_of_one_part_have_one_norm():
    model = Transformer(architecture_of("nemotron_h"))
    names = [[name for name, _ in block.named_children()] for block in model.layers]
    assert names[:4] == [
        ["attn_norm", "mamba"],
        ["mlp_norm", "moe"],
        ["attn_norm", "attn"],
        ["mlp_norm", "mlp"],
    ]


def test_hubs_letters_name_the_blocks():
    config = AutoConfig.for_model("nemotron_h", **SIZES, **CASES["nemotron_h"]).to_dict()
    want = architecture_from_hf(config)
    for spelled in ({"hybrid_override_pattern": "ME*-ME"}, {"layers_block_type": MIXERS}):
        given = {key: value for key, value in config.items() if key != "layers_block_type"}
        assert architecture_from_hf(given | spelled) == want
    assert exported_config(want, None)["hybrid_override_pattern"] == "ME*-ME"
    assert architecture_from_hf(exported_config(want, None)) == want


@torch.no_grad()
def test_states_begin_with_documents_however_these_are_told(tmp_path):
    random_reference("qwen3_next").save_pretrained(tmp_path)
    model, tokens_BS = load_hf(tmp_path, dtype=torch.float64), tokens(2, 9)
    positions_BS = torch.tensor([[*range(4), *range(5)], [*range(3, 9), *range(3)]])
    told = model(tokens_BS, positions_BS)
    ends = torch.tensor([0, 4, 9, 15, 18], dtype=torch.int32)
    hidden_BSD, _ = model.backbone(Inputs(tokens_BS, positions_BS, cu_seqlens=ends))
    assert torch.equal(told, model.vocabulary.logits(hidden_BSD, model.head_weight))
    # A row that begins within a document sees nothing of the row before.
    alone = model(tokens_BS[1:], positions_BS[1:])
    torch.testing.assert_close(told[1:], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "case",
    [
        "glm4_moe",
        "dots1",
        "ernie4_5_moe",
        "minimax_m2",
        "deepseek_v3",
        "nemotron_h",
        "afmoe",
        "lfm2_moe",
        "kimi_linear",
    ],
)
def test_a_selection_bias_stays_fp32_and_steers(case, tmp_path):
    random_reference(case).save_pretrained(tmp_path)
    model = load_hf(tmp_path, dtype=torch.bfloat16)
    biases = dict(model.named_buffers())
    assert len(biases) == len(model.arch.moe_layer_indices)
    stored = load_file(tmp_path / "model.safetensors")
    for piece in model.pieces():
        if piece.parameter in biases:
            bias_E = biases[piece.parameter]
            assert bias_E.dtype == torch.float32
            assert torch.equal(bias_E[piece.place], stored[piece.hf_name])
    save_hf(model, tmp_path / "narrow", dtype="bfloat16")
    written = load_file(tmp_path / "narrow" / "model.safetensors")
    for name, tensor in written.items():
        is_bias = name.endswith(("e_score_correction_bias", "expert_bias"))
        assert tensor.dtype == (torch.float32 if is_bias else torch.bfloat16), name
        assert not is_bias or torch.equal(tensor, stored[name])
    model.double()
    assert {bias.dtype for bias in dict(model.named_buffers()).values()} == {torch.float32}


@torch.no_grad()
def test_files_of_axk1_hold_no_biases_and_a_norm_too_many(tmp_path, caplog):
    """Biases are zero then, and left out again, which is told if they have moved."""
    theirs, end = random_reference("axk1"), ".e_score_correction_bias"
    for name, bias_E in theirs.named_buffers():
        if name.endswith(end):
            bias_E.zero_()
    theirs.save_pretrained(tmp_path / "in")
    stored = load_file(tmp_path / "in" / "model.safetensors")
    stored = {name: tensor for name, tensor in stored.items() if not name.endswith(end)}
    stored["model.layers.0.post_mlp_layernorm.weight"] = torch.randn(32)  # of a dense layer
    save_file(stored, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    model, tokens_BS = load_hf(tmp_path / "in"), tokens(2, 9)
    assert relative_error(model(tokens_BS), theirs(tokens_BS, use_cache=False).logits) < 1e-5
    assert main(["import-hf", str(tmp_path / "in"), str(tmp_path / "began")]) == 0
    began = tensors_of(tmp_path / "began" / "step-00000000")["model"]
    assert not any(began[f"layers.{i}.moe.router.bias"].any() for i in (1, 2))
    for value in (0.0, 0.5):
        model.layers[2].moe.router.bias.fill_(value)
        save_hf(model, tmp_path / "out")
        got = load_file(tmp_path / "out" / "model.safetensors")
        assert got.keys() == stored.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in stored.items())
        assert ("cannot hold layers.2.moe.router.bias" in caplog.text) == (value > 0)


@torch.no_grad()
def test_experts_of_mistral4_may_have_files_tensors_of_their_own(tmp_path):
    theirs = random_reference("mistral4")
    theirs.save_pretrained(tmp_path / "in")
    stored = load_file(tmp_path / "in" / "model.safetensors")
    for name in [name for name in stored if ".experts." in name]:
        prefix, _, leaf = name.rpartition(".")
        for expert, matrix in enumerate(stored.pop(name)):
            names = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else [leaf]
            for one, own in zip(names, matrix.chunk(len(names)), strict=True):
                stored[f"{prefix}.{expert}.{one}.weight"] = own.contiguous()
    save_file(stored, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    model, tokens_BS = load_hf(tmp_path / "in"), tokens(2, 9)
    assert relative_error(model(tokens_BS), theirs(tokens_BS, use_cache=False).logits) < 1e-5
    save_hf(model, tmp_path / "out")
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got.keys() == stored.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in stored.items())


@torch.no_grad()
def generation(case, tmp_path):
    """Check that greedy tokens equal transformers'."""
    theirs = random_reference(case).eval()
    for parameter in theirs.parameters():  # otherwise texts would repeat one token
        parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    if case.startswith("gemma4"):  # scaled and tied: each token would be its own successor
        theirs.get_input_embeddings().weight.mul_(0.1)
    theirs.save_pretrained(tmp_path)
    generator = Generator(load_hf(tmp_path), num_pages=20, page_size=4, max_tokens=7)
    requests, expected = [], []
    for i, length in enumerate((1, 12)):
        prompt = tokens(1, length)
        how = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        # transformers' cache of linear layers alone has no length.
        types = getattr(theirs.config, "layer_types", None) or STATES
        how["use_cache"] = any(x.endswith("attention") and x != STATES[0] for x in types)
        how["use_cache"] &= "least steps" not in case  # its step with a cache lacks the bound
        made = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **how)
        expected.append(made[0, length:].tolist())
        params = SamplingParams(max_tokens=10, temperature=0)
        requests.append(Request(str(i), tuple(prompt[0].tolist()), params))
    found = [completions[0].tokens for completions in generator.generate(requests)]
    assert found == expected
    assert len({token for text in found for token in text}) > 3


def formulas(case, tmp_path):
    """Check that parts know the parameters, rules and products of their modules."""
    arch, seq_len = architecture_of(case), 16
    assert type(arch).model_validate_json(json.dumps(arch.model_dump())) == arch  # a checkpoint's
    for part in arch.parts():
        module = part.build(KernelsSection(), MoeSection())
        want = {name: tuple(p.shape) for name, p in module.named_parameters()}
        assert {name: weight.shape for name, weight in part.weights.items()} == want
    model = Transformer(arch, kernels=KernelsSection(attention="reference"))
    rules, styles = arch.plan().rules(model), arch.plan().styles
    assert set(rules) == {name for name, _ in model.named_parameters()}
    routed = {style for name, style in styles.items() if name.endswith(".moe")}
    assert routed == ({"routed"} if arch.num_experts else set())
    unused = arch.num_experts - arch.num_experts_per_token
    idle = sum(
        unused * p[0].numel() for n, p in model.named_parameters() if n.split(".")[-2] == "experts"
    )
    assert arch.num_params() - arch.num_active_params() == idle
    model.init_weights(std=0.02, seed=0)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, seq_len, dtype=torch.long))
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    attention = counts.pop("aten.bmm", 0)  # all S x S pairs; a window or the causal half is useful
    parts = [part for layer in arch.layers() for part in layer]
    stacked = sum(  # opaque to the counter
        math.prod(weight.shape) / part.num_experts
        for part in parts
        for name, weight in part.weights.items()
        if name.startswith("experts.") and len(weight.shape) == 3
    )
    experts = 2 * stacked * arch.num_experts_per_token * seq_len
    mixers = [part for part in parts if isinstance(part, (GroupedQueryAttention, LatentAttention))]
    sparse = [part for part in mixers if isinstance(part, SparseLatentAttention)]
    most = [part.window or part.most_keys for part in mixers]
    kept = [min(n or seq_len, seq_len) for n in most]
    widths = [
        part.num_heads * (part.head_dim + getattr(part, "v_head_dim", part.head_dim))
        for part in mixers
    ]
    keys = sum(n * (1 - n / (2 * seq_len)) * width for n, width in zip(kept, widths, strict=True))
    scored = [part for part in sparse if part.has_indexer and part.index_topk < seq_len]
    keys += sum(part.index_num_heads * (part.index_head_dim + 1) for part in scored) * seq_len / 2
    # A token sees half of its own block on average.
    in_blocks = [
        (i, part) for i, part in enumerate(mixers) if isinstance(part, BlockSparseAttention)
    ]
    for i, part in in_blocks:
        past = 1 - kept[i] / seq_len
        keys -= past * part.index_block_size / 2 * widths[i]
        keys += (past > 0) * part.index_num_heads * part.index_head_dim * seq_len / 2
    pairs = 2 * keys
    each_state = {
        GatedDeltaNet: lambda part: 6 * part.widths[1] * part.linear_key_head_dim,
        KimiDelta: lambda part: 6 * part.width * part.linear_key_head_dim,
        Mamba2: lambda part: 4 * part.widths[0] * part.mamba_state_dim,
    }
    states = sum(
        count(part)
        for kind, count in each_state.items()
        for part in parts
        if isinstance(part, kind)
    )
    found = arch.flops_per_token(seq_len) / 3 - pairs - states
    assert sum(counts.values()) + experts == pytest.approx(found * seq_len, rel=1e-12)
    if not states:  # states have products of the same kind
        assert attention == 2 * seq_len**2 * sum(widths)


CHECKS = {f.__name__: f for f in (gradients, files, packing, generation, formulas)}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", FAMILY_CASES)
def test_every_family(case, check, tmp_path):
    CHECKS[check](case, tmp_path)


@pytest.mark.tier(
    "quick",
    long=[
        "afmoe-formulas",
        "afmoe-gradients",
        "afmoe-packing",
        "axk1-files",
        "axk1-formulas",
        "axk1-generation",
        "axk1-gradients",
        "axk1-packing",
        "bailing_hybrid-files",
        "bailing_hybrid-generation",
        "bailing_hybrid-gradients",
        "deepseek_v32-formulas",
        "deepseek_v32-gradients",
        "deepseek_v32-packing",
        "dots1-files",
        "dots1-formulas",
        "dots1-generation",
        "dots1-gradients",
        "dots1-packing",
        "ernie4_5_moe-files",
        "ernie4_5_moe-formulas",
        "ernie4_5_moe-generation",
        "ernie4_5_moe-gradients",
        "ernie4_5_moe-packing",
        "exaone_moe-files",
        "exaone_moe-formulas",
        "exaone_moe-generation",
        "exaone_moe-gradients",
        "exaone_moe-packing",
        "flex_olmo-files",
        "flex_olmo-formulas",
        "flex_olmo-gradients",
        "flex_olmo-packing",
        "gemma4_text-formulas",
        "gemma4_text-packing",
        "glm4_moe-files",
        "glm4_moe-formulas",
        "glm4_moe-gradients",
        "glm4_moe-packing",
        "glm4_moe_lite-gradients",
        "glm_moe_dsa-formulas",
        "glm_moe_dsa-gradients",
        "glm_moe_dsa-packing",
        "gpt_oss-files",
        "gpt_oss-formulas",
        "gpt_oss-generation",
        "gpt_oss-gradients",
        "gpt_oss-packing",
        "granitemoehybrid-formulas",
        "granitemoehybrid-gradients",
        "granitemoehybrid-packing",
        "granitemoeshared-formulas",
        "granitemoeshared-gradients",
        "granitemoeshared-packing",
        "hunyuan_v1_moe-files",
        "hunyuan_v1_moe-formulas",
        "hunyuan_v1_moe-gradients",
        "hunyuan_v1_moe-packing",
        "hy_v3-files",
        "hy_v3-formulas",
        "hy_v3-generation",
        "hy_v3-gradients",
        "hy_v3-packing",
        "kimi_linear-files",
        "kimi_linear-generation",
        "kimi_linear-gradients",
        "kimi_linear-packing",
        "laguna-formulas",
        "laguna-gradients",
        "laguna-packing",
        "lfm2_moe-gradients",
        "lfm2_moe-packing",
        "mellum-files",
        "mellum-formulas",
        "mellum-generation",
        "mellum-gradients",
        "mellum-packing",
        "mimo_v2_flash-formulas",
        "mimo_v2_flash-gradients",
        "mimo_v2_flash-packing",
        "minimax_m2-files",
        "minimax_m2-formulas",
        "minimax_m2-generation",
        "minimax_m2-gradients",
        "minimax_m2-packing",
        "minimax_m3_vl_text-formulas",
        "minimax_m3_vl_text-gradients",
        "minimax_m3_vl_text-packing",
        "mistral4-formulas",
        "mistral4-gradients",
        "mistral4-packing",
        "olmoe-files",
        "olmoe-formulas",
        "olmoe-generation",
        "olmoe-gradients",
        "olmoe-packing",
        "qwen2_moe-files",
        "qwen2_moe-generation",
        "qwen2_moe-gradients",
        "qwen3_5_moe_text-formulas",
        "qwen3_5_text-formulas",
        "qwen3_5_text-packing",
        "qwen3_next-formulas",
        "qwen3_next-packing",
        "sarvam_mla-files",
        "sarvam_mla-formulas",
        "sarvam_mla-generation",
        "sarvam_mla-gradients",
        "sarvam_mla-packing",
        "sarvam_moe-files",
        "sarvam_moe-formulas",
        "sarvam_moe-generation",
        "sarvam_moe-gradients",
        "sarvam_moe-packing",
        "solar_open-files",
        "solar_open-formulas",
        "solar_open-generation",
        "solar_open-gradients",
        "solar_open-packing",
        "step3p5-formulas",
        "step3p5-gradients",
        "step3p5-packing",
    ],
    wide=[
        "afmoe-files",
        "afmoe-generation",
        "deepseek_v2-generation",
        "deepseek_v3-files",
        "deepseek_v3-generation",
        "deepseek_v3-gradients",
        "deepseek_v3-packing",
        "flex_olmo-generation",
        "gemma4_text-files",
        "gemma4_text-generation",
        "gemma4_text-gradients",
        "glm4_moe-generation",
        "glm4_moe_lite-files",
        "glm4_moe_lite-generation",
        "granitemoehybrid-files",
        "granitemoehybrid-generation",
        "granitemoeshared-files",
        "granitemoeshared-generation",
        "hunyuan_v1_moe-generation",
        "deepseek_v32-files",
        "deepseek_v32-generation",
        "glm_moe_dsa-files",
        "glm_moe_dsa-generation",
        "laguna-files",
        "laguna-generation",
        "lfm2_moe-files",
        "lfm2_moe-generation",
        "mimo_v2_flash-files",
        "mimo_v2_flash-generation",
        "minimax_m3_vl_text-files",
        "minimax_m3_vl_text-generation",
        "mistral4-files",
        "mistral4-generation",
        "nemotron_h-files",
        "nemotron_h-generation",
        "nemotron_h-gradients",
        "qwen3_5_moe_text-files",
        "qwen3_5_moe_text-generation",
        "qwen3_5_moe_text-gradients",
        "qwen3_5_moe_text-packing",
        "qwen3_5_text-files",
        "qwen3_5_text-generation",
        "qwen3_5_text-gradients",
        "qwen3_next-files",
        "qwen3_next-generation",
        "qwen3_next-gradients",
        "step3p5-files",
        "step3p5-generation",
    ],
)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("family", FAMILY_CASES)
def test_odd_geometries(family, check, tmp_path):
    odd = [case for case in CASES if case.startswith(f"{family} ")]
    assert len(odd) > 10
    for case in odd:
        CHECKS[check](case, tmp_path / case)


@pytest.mark.parametrize("case", ROUTED_CASES)
@torch.no_grad()
def test_experts_that_are_used_again_have_the_same_weights(case, tmp_path):
    random_reference(case).save_pretrained(tmp_path)
    model = load_hf(tmp_path)
    router = model.layers[-1].moe.router
    x_TD = torch.randn(9, model.arch.hidden_size)
    routed = router(x_TD)
    again = router(x_TD, None, routed.ids_TK)
    assert torch.equal(again.ids_TK, routed.ids_TK)
    assert torch.equal(again.counts_E, routed.counts_E)
    torch.testing.assert_close(again.weights_TK, routed.weights_TK, rtol=1e-6, atol=0)


@pytest.mark.parametrize("is_fp32", [True, False])
@torch.no_grad()
def test_a_router_keeps_its_weight_in_fp32_where_the_family_does(is_fp32):
    own = {"router_fp32": is_fp32, "num_experts": 16, "num_experts_per_token": 16}
    (_, part), *_ = architecture_of("hunyuan_v1_moe", **own).layers()
    router = part.build(KernelsSection(), MoeSection()).router
    router.weight.normal_()
    x_TD = torch.randn(33, part.hidden_size).bfloat16()
    routed = router(x_TD)
    weight_ED = router.weight if is_fp32 else router.weight.bfloat16().float()
    want_TE = (x_TD.float() @ weight_ED.T).softmax(-1)
    got_TE = torch.empty_like(want_TE).scatter(1, routed.ids_TK.long(), routed.weights_TK)
    torch.testing.assert_close(got_TE, want_TE, rtol=1e-5, atol=0)


def test_gated_shared_experts_are_those_of_transformers():
    """Output and every gradient of Qwen2-MoE's layer, which has the gate, agree."""
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        hidden_size=32,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )
    theirs = Qwen2MoeSparseMoeBlock(config)
    sizes = {"num_experts": 6, "num_experts_per_token": 2, "moe_intermediate_size": 24}
    part = RoutedExperts(hidden_size=32, **sizes, shared_intermediate_size=40, shared_gate=True)
    ours = part.build(KernelsSection(), MoeSection())
    names = {
        "router.weight": "gate.weight",
        "experts.w_gate_up": "experts.gate_up_proj",
        "experts.w_down": "experts.down_proj",
        "shared_experts.w_gate.weight": "shared_expert.gate_proj.weight",
        "shared_experts.w_up.weight": "shared_expert.up_proj.weight",
        "shared_experts.w_down.weight": "shared_expert.down_proj.weight",
        "shared_expert_gate.weight": "shared_expert_gate.weight",
    }
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(theirs.get_parameter(names[name]).normal_(0.0, 0.4))
    x_BSD = torch.randn(2, 7, 32)
    context = Context((x_BSD, x_BSD), AttentionMask.of(None, batch=2, seq_len=7, device="cpu"))
    got, want = ours(x_BSD, context)[0], theirs(x_BSD)
    assert relative_error(got, want) < 1e-5
    for y in (got, want):
        y.square().sum().backward()
    for name, parameter in ours.named_parameters():
        assert relative_error(parameter.grad, theirs.get_parameter(names[name]).grad) < 1e-5, name


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "is_packed"), [("Qwen3_5", False), ("Qwen3_5Moe", False), ("Qwen3_5Moe", True)]
)
def test_a_vision_tower_is_carried_on(kind, is_packed, tmp_path):
    """The language model of a multimodal model is trained, and everything else is kept."""
    torch.manual_seed(1)
    text = {**SIZES, **(NEXT if kind.endswith("Moe") else LINEAR), "pad_token_id": None}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"out_hidden_size": 32, "num_position_embeddings": 16}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision)
    theirs = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    for tensor in theirs.state_dict().values():
        tensor.normal_(0.0, 0.1)
    theirs.save_pretrained(tmp_path / "in")
    stored = load_file(tmp_path / "in" / "model.safetensors")
    stored["mtp.fc.weight"] = torch.randn(4, 8)
    if is_packed:
        for name in [name for name in stored if ".experts.0.gate_proj." in name]:
            prefix = name.removesuffix("0.gate_proj.weight")
            found = {
                leaf: [stored.pop(f"{prefix}{e}.{leaf}_proj.weight") for e in range(6)]
                for leaf in ("gate", "up", "down")
            }
            pairs = zip(found["gate"], found["up"], strict=True)
            stored[f"{prefix}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
            stored[f"{prefix}down_proj"] = torch.stack(found["down"])
    save_file(stored, tmp_path / "in" / "model.safetensors", {"format": "pt"})

    model, tokens_BS = load_hf(tmp_path / "in"), tokens(2, 9)
    reference = theirs(tokens_BS, use_cache=False).logits
    assert relative_error(model(tokens_BS), reference) < limits("qwen3_next")[0]
    save_hf(model, tmp_path / "out")
    configs = [json.loads((tmp_path / f / "config.json").read_text()) for f in ("in", "out")]
    assert configs[0] == configs[1]
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got.keys() == stored.keys()
    assert any(name.startswith("model.visual.") for name in got)
    assert all(torch.equal(got[name], tensor) for name, tensor in stored.items())
    # A change of the architecture is written where it was read; everything else stays.
    changed = model.arch.model_copy(update={"max_positions": 99})
    configs[0]["text_config"]["mtp_num_hidden_layers"] = 1
    written = exported_config(changed, configs[0])
    assert written["text_config"]["max_position_embeddings"] == 99
    assert written["text_config"]["mtp_num_hidden_layers"] == 1
    assert written["vision_config"] == configs[0]["vision_config"]
    assert architecture_from_hf(written) == changed


def test_towers_beside_a_gemma_are_carried_on(tmp_path):
    torch.manual_seed(1)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    vision |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    sound = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    towers = {"vision_config": vision, "audio_config": sound | {"output_proj_dims": 16}}
    config = Gemma4Config(text_config={**SIZES, **GEMMA, "pad_token_id": 0}, **towers)
    theirs = Gemma4ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for tensor in theirs.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_(0.0, 0.1)
    theirs.save_pretrained(tmp_path / "in")
    stored, tokens_BS = load_file(tmp_path / "in" / "model.safetensors"), tokens(2, 9)
    model = load_hf(tmp_path / "in")
    assert relative_error(model(tokens_BS), theirs(tokens_BS, use_cache=False).logits) < 1e-5
    save_hf(model, tmp_path / "out")
    configs = [json.loads((tmp_path / f / "config.json").read_text()) for f in ("in", "out")]
    assert configs[0] == configs[1]
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got.keys() == stored.keys()
    for tower in ("vision_tower", "audio_tower", "language_model"):
        assert any(name.startswith(f"model.{tower}.") for name in got)
    assert all(torch.equal(got[name], tensor) for name, tensor in stored.items())
    written = exported_config(model.arch.model_copy(update={"max_positions": 99}), configs[0])
    assert written["text_config"]["max_position_embeddings"] == 99
    assert written["audio_config"] == configs[0]["audio_config"]


@torch.no_grad()
def test_every_use_of_the_vocabulary_caps_its_logits(tmp_path):
    random_reference("gemma4_text").save_pretrained(tmp_path)
    model, tokens_BS = load_hf(tmp_path, dtype=torch.float64), tokens(1, 9)
    hidden_TD, targets_T = model.backbone(Inputs(tokens_BS))[0][0], tokens_BS[0]
    logits_TV = model(tokens_BS)[0]
    plain_TV = hidden_TD @ model.head_weight.T
    assert (logits_TV - plain_TV).abs().max() > 0.1
    torch.testing.assert_close(logits_TV, 3 * (plain_TV / 3).tanh())
    own = (hidden_TD, model.head_weight)
    some = torch.tensor([5, 2, 200])
    torch.testing.assert_close(model.vocabulary.logits_of(*own, some), logits_TV[:, some])
    losses = model.vocabulary.token_losses(*own, targets_T, temperature=0.7)
    torch.testing.assert_close(
        losses.loss_T, cross_entropy(logits_TV / 0.7, targets_T, reduction="none")
    )
    total = model.vocabulary.loss_sum(*own, targets_T, torch.ones(9)).total
    torch.testing.assert_close(total, cross_entropy(logits_TV, targets_T, reduction="sum"))


def test_fewer_layers_of_a_gemma_end_with_full_attention():
    arch = resolve_architecture(ModelSection(preset="gemma-4-26b-a4b", num_layers=4))
    assert arch.sliding_windows == (1024, 1024, 1024, None)
    assert architecture_from_hf(exported_config(arch, None)) == arch
    section = ModelSection(preset="gemma-4-31b", max_positions=2**20, rope="yarn")
    with pytest.raises(
        ConfigError, match="layers of a gemma4_text have different rotary angles; unset"
    ):
        resolve_architecture(section)


@pytest.mark.parametrize("layout", ["per_expert", "fused"])
@pytest.mark.parametrize("case", FAMILY_CASES)
@torch.no_grad()
def test_adapters_are_those_of_peft(case, layout, tmp_path):
    peft = pytest.importorskip("peft")
    if layout == "per_expert" and FAMILIES[case].lora_layout == "fused":
        pytest.skip("PEFT gives such adapters no effect, or has no place for them")
    random_reference(case).save_pretrained(tmp_path / "base")
    model, tokens_BS = load_hf(tmp_path / "base"), tokens(2, 13)
    lora = LoraSection(rank=8, alpha=4, layout=layout)
    want = save_adapters(model, lora, tmp_path / "adapter", tokens_BS)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    assert relative_error(theirs(tokens_BS, use_cache=False).logits, want) < limits(case)[0]
    folders = ["adapter"]
    if layout == "fused":  # with stacked experts, PEFT would write another rank
        theirs.save_pretrained(tmp_path / "theirs")
        folders.append("theirs")
    for folder in folders:
        again = load_hf(tmp_path / "base")
        attach_peft(again, tmp_path / folder)
        assert relative_error(again(tokens_BS), want) < 1e-5


@pytest.mark.parametrize(
    ("preset", "target", "problem"),
    [
        ("qwen3.5-35b-a3b", "*.linear_attn.wq", "in_proj_qkv.weight"),
        ("qwen3.5-35b-a3b", "*.conv_q", "matches no module"),
        ("nemotron-3-nano-30b-a3b", "*.mamba.wx", "in_proj.weight"),
        ("lfm2-8b-a1b", "*.conv.wx", "in_proj.weight"),
        ("granite-4.0-h-tiny", "*.shared_experts.w_up", "input_linear.weight"),
        (
            "nemotron-3-nano-30b-a3b",
            "*.mamba.wo",
            "PEFT does not load an adapter of layers.0.mamba.wo",
        ),
    ],
)
def test_adapters_that_peft_cannot_express_are_refused(preset, target, problem):
    words = [f"model.preset={preset}", "model.num_layers=2", "data.source=synthetic"]
    words += ["lora.rank=8", f"lora.targets={target}"]
    config = Config.load(None, words, environ={})
    arch = resolve_architecture(config.model)
    with pytest.raises(ConfigError, match=problem):
        plan_model(config, arch, torch.float32)


@pytest.mark.parametrize(
    ("case", "targets"),
    [
        ("qwen3_next", ("*.linear_attn.wo",)),
        ("qwen3_5_text", ("*.linear_attn.wo",)),
        ("qwen3_5_moe_text", ("*.shared_experts.*", "*.moe.experts")),
        ("qwen2_moe", ("*.shared_experts.*",)),
        ("qwen2_moe dense layers", ("*.shared_experts.*", "*.mlp.*", "*.moe.experts")),
        ("granitemoehybrid", ("*.mamba.wo", "*.shared_experts.w_down", "*.moe.experts")),
        ("lfm2_moe", ("*.conv.wo", "*.mlp.*", "*.moe.experts")),
        ("nemotron_h", ("*.to_latent", "*.from_latent", "*.shared_experts.*")),
        ("hy_v3", ("*.shared_experts.*", "*.mlp.*", "*.moe.experts")),
        ("axk1", ("*.shared_experts.*", "*.mlp.*", "*.attn.*")),
        ("sarvam_moe", ("*.shared_experts.*", "*.attn.wq", "*.attn.wo")),
        ("laguna", ("*.attn.wg", "*.shared_experts.*", "*.mlp.*", "*.moe.experts")),
        ("step3p5", ("*.attn.wg", "*.shared_experts.*", "*.mlp.*", "*.moe.experts")),
        ("kimi_linear", ("*.linear_attn.*", "*.shared_experts.*", "*.mlp.*", "*.moe.experts")),
        ("bailing_hybrid", ("*.linear_attn.*", "*.attn.*", "*.shared_experts.*", "*.moe.experts")),
    ],
)
@torch.no_grad()
def test_adapters_of_other_projections_are_those_of_peft(case, targets, tmp_path, caplog):
    peft = pytest.importorskip("peft")
    random_reference(case).save_pretrained(tmp_path / "base")
    lora = LoraSection(rank=8, targets=targets)
    model, tokens_BS = load_hf(tmp_path / "base"), tokens(2, 13)
    want = save_adapters(model, lora, tmp_path / "adapter", tokens_BS)
    assert "does not load" not in caplog.text
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    assert relative_error(theirs(tokens_BS, use_cache=False).logits, want) < limits(case)[0]


@torch.no_grad()
def test_adapters_of_shared_experts_are_read_and_named(tmp_path, caplog):
    random_reference("glm4_moe").save_pretrained(tmp_path / "base")
    model, tokens_BS = load_hf(tmp_path / "base"), tokens(2, 13)
    lora = LoraSection(rank=8, targets=("*.attn.*", "*.shared_experts.*", "*.moe.experts"))
    want = save_adapters(model, lora, tmp_path / "adapter", tokens_BS)
    assert "layers.1.mlp.shared_experts.gate_proj" in caplog.text
    again = load_hf(tmp_path / "base")
    attach_peft(again, tmp_path / "adapter")
    assert relative_error(again(tokens_BS), want) < 1e-5


def test_a_gate_of_one_row_is_no_product_in_fp8():
    words = ["kernels.precision=fp8", "train.device=cpu", "data.source=synthetic"]
    config = Config.load(None, ["model.preset=qwen3-30b-a3b", *words], environ={})
    gated = {"shared_intermediate_size": 256, "shared_gate": True}
    check_widths(config, PRESETS["qwen3-30b-a3b"].model_copy(update=gated))
    odd = PRESETS["qwen3-30b-a3b"].model_copy(update={"shared_intermediate_size": 100})
    with pytest.raises(ConfigError, match=r"shared_experts\.w_gate"):
        check_widths(config, odd)


# Published totals in billions, with the MTP heads if the files have them. The figures are those
# that the hub shows for each checkpoint, from memory.
PUBLISHED = {
    "glm-4.5-air": 110,
    "glm-4.5": 358,
    "dots.llm1": 143,
    "ernie-4.5-21b-a3b": 21.8,
    "ernie-4.5-300b-a47b": 300,
    "hunyuan-a13b": 80.4,
    "gemma-4-26b-a4b": 25.2,
    "gemma-4-31b": 30.7,
    "olmoe-1b-7b": 6.92,
    "flex-olmo-7x7b": 33.3,
    "minimax-m2": 229,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "qwen3-next-80b-a3b": 79.7,  # without the MTP heads, 1.6
    "qwen3.5-35b-a3b": 34.7,  # without the MTP heads and the tower
    "deepseek-v3": 671,  # without the MTP heads, like the next four
    "kimi-k2": 1026,
    "deepseek-v2-lite": 15.7,
    "moonlight-16b-a3b": 16.0,
    "glm-4.7-flash": 30,
    "nemotron-3-nano-30b-a3b": 31.6,
    "qwen3-coder-next": 79.67,
    "intellect-3": 106.85,  # its files hold no MTP head
    "minimax-m2.5": 228.7,
    "minimax-m2.7": 228.7,
    "qwen3.5-27b": 26.90,  # without the MTP heads and the tower, like the next
    "qwen3.8-27b": 26.90,
    "nemotron-3-super-120b-a12b": 120.67,
    "solar-open-100b": 102.65,
    "hy3-preview": 295.03,  # without the MTP blocks, like the next two
    "mellum2-12b-a2.5b": 12.15,
    "k-exaone-236b-a23b": 236.57,
    "a.x-k1": 518.98,
    "sarvam-30b": 32.15,
    "sarvam-105b": 106.03,
    "trinity-nano": 6.12,
    "trinity-mini": 26.12,
    "trinity-large": 398.6,
    "laguna-xs-2.1": 33.4,
    "laguna-s-2.1": 117.6,
    "step-3.5-flash": 196.96,  # without the MTP heads, like the next
    "mimo-v2-flash": 308.8,
    "mistral-small-4-119b": 118.97,
    "granite-4.0-h-small": 32.21,
    "granite-4.0-h-tiny": 6.94,
    "lfm2-8b-a1b": 8.34,
    "lfm2-24b-a2b": 23.84,
    "deepseek-v3.2": 671.9,  # without the MTP block, like the next two
    "glm-5": 743.9,
    "glm-5.2": 743.4,
    "kimi-linear-48b-a3b": 49.12,
    "ling-3.0-flash": 124.41,  # without the MTP block
    "minimax-m3": 426.17,  # without the tower; all of it is counted in test_block_attention.py
    "seed-oss-36b": 36.15,
    "smollm3-3b": 3.08,
    "olmo2-7b": 7.3,
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_the_published_sizes(preset):
    arch = PRESETS[preset]
    total = arch.num_params()
    if preset in ("glm-4.5-air", "glm-4.5"):  # one more block, an embedding, a head, a projection
        width = arch.hidden_size
        block = sum(part.num_params() for part in arch.layers()[-1])
        total += block + 2 * arch.vocab_size * width + 2 * width * width
    assert total / 1e9 == pytest.approx(PUBLISHED[preset], rel=0.005)


@pytest.mark.parametrize(("preset", "billions"), [("gpt-oss-20b", 3.6), ("gpt-oss-120b", 5.1)])
def test_a_token_uses_the_published_number_of_parameters(preset, billions):
    arch = PRESETS[preset]
    embedding = arch.vocab_size * arch.hidden_size  # a token uses a single row of it
    assert (arch.num_active_params() - embedding) / 1e9 == pytest.approx(billions, abs=0.05)


@pytest.mark.parametrize("name", ["input_layernorm", "norm"])
def test_norms_of_gpt_oss_round_as_those_of_transformers(name):
    model = Transformer(architecture_of("gpt_oss"))
    theirs = random_reference("gpt_oss").model
    ours = model.norm if name == "norm" else model.layers[0].attn_norm
    theirs = theirs.norm if name == "norm" else theirs.layers[0].input_layernorm
    with torch.no_grad():
        theirs.weight.normal_(1.0, 0.3)
        ours.weight.copy_(theirs.weight)
        x_TD = torch.randn(50, 32).bfloat16()
        assert torch.equal(ours(x_TD), theirs(x_TD))


@torch.no_grad()
def test_a_layout_without_a_place_for_an_adapter_is_refused(tmp_path):
    model = Transformer(architecture_of("gpt_oss"))
    model.init_weights(std=0.2, seed=0)
    lora = LoraSection(rank=8, layout="per_expert")
    with pytest.raises(
        ConfigError, match=r"'per_expert' cannot hold adapters of .*w_gate_up; use fused"
    ):
        save_adapters(model, lora, tmp_path, tokens(1, 5))


def test_what_gpt_oss_has_no_kernels_for_is_refused_in_one_line():
    words = ["model.preset=gpt-oss-20b", "data.source=synthetic", "train.device=cpu"]

    def check(config):
        arch = resolve_architecture(config.model)
        plan_model(config, arch, torch.float32)
        check_model(config, arch)

    def problem(*more):
        config = Config.load(None, [*words, *more], environ={})
        with pytest.raises(ConfigError) as caught:
            check(config)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    # Experts are 2,880 wide, which no block of 128 divides.
    assert "multiple of 128, and these have 2880; use bf16" in problem(
        "kernels.precision=fp8_blocks"
    )
    assert "one tensor of all experts; use fused" in problem(
        "lora.rank=8", "lora.layout=per_expert"
    )
    assert "which attention with sinks needs; use auto" in problem("kernels.attention=sdpa")


def test_gemmas_widest_head_is_refused_by_cudnn_alone():
    words = ["model.preset=gemma-4-26b-a4b", "data.source=synthetic", "train.device=cpu"]
    arch = resolve_architecture(Config.load(None, words, environ={}).model)
    cuda = torch.device("cuda")
    with pytest.raises(ValueError, match="head width 512; it takes multiples of 8 to 256"):
        cudnn.require(cuda, torch.bfloat16, arch.widest_head())
    assert not cudnn.runs(cuda, torch.bfloat16, arch.widest_head())


_TURNS = [0, 1, 1, 1] * 11 + [0]
_PATTERN = [int(i > 0 and (i + 1) % 6 > 0) for i in range(48)]
_HEADS_OF_STEP = {"num_attention_heads": 96, "num_attention_groups": 8, "head_dim": 128}
_ROPE_OF_STEP = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}
_ROPE_OF_STEP |= {"high_freq_factor": 32.0, "original_max_position_embeddings": 131_072}
_ROPES_OF_LAGUNA = {
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 8192,
        "beta_fast": 64.0,
        "beta_slow": 1.0,
        "partial_rotary_factor": 0.5,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
PUBLISHED_KEYS = {
    "granite-4.0-h-small": {
        "vocab_size": 100_352,
        "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "position_embedding_type": "nope",
        "embedding_multiplier": 12,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0078125,
        "logits_scaling": 16,
        "intermediate_size": 768,
        "shared_intermediate_size": 1536,
        "num_local_experts": 72,
        "num_experts_per_tok": 10,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "rope_theta": 10_000,
        "rope_scaling": None,
    },
    "lfm2-8b-a1b": {
        "layer_types": [CONVOLVED[i in (2, 6, 10, 14, 18, 21)] for i in range(24)],
        "num_hidden_layers": 24,
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "use_expert_bias": True,
        "max_position_embeddings": 128_000,
    },
    "trinity-mini": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 1024,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "num_dense_layers": 2,
        "max_position_embeddings": 131_072,
        "mup_enabled": True,
        "route_norm": True,
        "route_scale": 2.826,
        "score_func": "sigmoid",
        "num_expert_groups": 1,
        "num_limited_groups": 1,
        "rope_theta": 10000,
        "rope_scaling": None,
        "sliding_window": 2048,
    },
    "laguna-xs-2.1": {
        "gating": "per-head",
        "layer_types": [TURNS[i % 4 == 0] for i in range(40)],
        "num_attention_heads_per_layer": [(48, 64, 64, 64)[i % 4] for i in range(40)],
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
        "moe_routed_scaling_factor": 2.5,
        "max_position_embeddings": 262_144,
        "rope_parameters": _ROPES_OF_LAGUNA,
        "router_aux_loss_coef": 0.0,
    },
    "step-3.5-flash": {
        "vocab_size": 128_896,
        "num_attention_groups": 8,
        "moe_num_experts": 288,
        "moe_top_k": 8,
        "moe_layers_enum": ",".join(map(str, range(3, 45))),
        "num_nextn_predict_layers": 3,
        "layer_types": [TURNS[1 - i] for i in [*_TURNS, 1, 1, 1]],
        "attention_other_setting": _HEADS_OF_STEP,
        "rope_theta": [(5e6, 1e4)[i] for i in [*_TURNS, 1, 1, 1]],
        "partial_rotary_factors": [(0.5, 1.0)[i] for i in [*_TURNS, 1, 1, 1]],
        "rope_scaling": _ROPE_OF_STEP,
        "yarn_only_types": ["full_attention"],
        "swiglu_limits": [0.0] * 43 + [7.0] * 2 + [0.0] * 3,
        "swiglu_limits_shared": [0.0] * 43 + [16.0] * 2 + [0.0] * 3,
        "moe_router_scaling_factor": 3.0,
        "moe_router_activation": "sigmoid",
        "sliding_window": 512,
        "max_position_embeddings": 262_144,
        "zero_centered": True,
    },
    "mimo-v2-flash": {
        "hybrid_layer_pattern": _PATTERN,
        "moe_layer_freq": [0] + [1] * 47,
        "partial_rotary_factor": 0.334,
        "rope_theta": 5_000_000,
        "swa_rope_theta": 10_000,
        "swa_num_key_value_heads": 8,
        "sliding_window": 128,
        "sliding_window_size": 128,
        "layernorm_epsilon": 1e-5,
        "n_shared_experts": None,
        "routed_scaling_factor": None,
        "add_swa_attention_sink_bias": True,
        "max_position_embeddings": 262_144,
    },
    "deepseek-v3.2": {
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 2048,
        "max_position_embeddings": 163_840,
        "moe_layer_freq": 1,
        "n_group": 8,
        "num_nextn_predict_layers": 1,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
    },
    "glm-5.2": {
        "first_k_dense_replace": 3,
        "head_dim": 64,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_topk": 2048,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "indexer_rope_interleave": True,
        "max_position_embeddings": 1_048_576,
        "num_nextn_predict_layers": 1,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 8_000_000, "rope_type": "default"},
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "kimi-linear-48b-a3b": {
        "head_dim": 72,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "kda_layers": [i for i in range(1, 28) if i not in (4, 8, 12, 16, 20, 24, 27)],
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
        "first_k_dense_replace": 1,
        "mla_use_nope": True,
        "model_max_length": 1_048_576,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.446,
        "use_grouped_topk": True,
    },
    "ling-3.0-flash": {
        "first_k_dense_replace": 2,
        "kda_lower_bound": -5.0,
        "kda_safe_gate": True,
        "layer_group_size": 6,
        "num_nextn_predict_layers": 1,
        "rope_scaling": None,
        "short_conv_kernel_size": 4,
    },
    "seed-oss-36b": {
        "attention_bias": True,
        "attention_dropout": 0.1,
        "attention_out_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 27_648,
        "max_position_embeddings": 524_288,
        "mlp_bias": False,
        "num_attention_heads": 80,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "residual_dropout": 0.1,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"rope_type": "default"},
        "rope_theta": 1e7,
        "tie_word_embeddings": False,
        "vocab_size": 155_136,
    },
    "smollm3-3b": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65_536,
        "max_window_layers": 28,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 5e6,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 128_256,
    },
    "olmo2-7b": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 5e5,
        "tie_word_embeddings": False,
        "vocab_size": 100_352,
    },
}
"""Keys of published files, from memory."""


@pytest.mark.parametrize("preset", PUBLISHED_KEYS)
def test_published_keys_describe_the_preset(preset):
    want = PRESETS[preset]
    got = architecture_from_hf({"model_type": want.family, **PUBLISHED_KEYS[preset]})
    differing = {name for name, value in got if value != getattr(want, name)}
    assert differing <= {"router_aux_loss_coef"}
    again = architecture_from_hf(exported_config(want, None))
    assert again.model_dump() == want.model_dump()


def test_fewer_or_more_blocks_of_a_pattern():
    arch = resolve_architecture(ModelSection(preset="nemotron-3-nano-30b-a3b", num_layers=6))
    assert arch.mixers == ("mamba", "moe", "mamba", "moe", "mamba", "attention")
    with pytest.raises(ValueError, match="mixers names 6 layers, but num_layers is 5"):
        type(arch).model_validate({**arch.model_dump(), "num_layers": 5})


@pytest.mark.parametrize(
    "preset", ["gpt-oss-20b", "gemma-4-26b-a4b", "nemotron-3-nano-30b-a3b", "minimax-m3"]
)
def test_experts_of_other_activations_take_fp8(preset):
    words = [f"model.preset={preset}", "kernels.precision=fp8", "data.source=synthetic"]
    config = Config.load(None, words, environ={})
    arch = resolve_architecture(config.model)
    plan_model(config, arch, torch.bfloat16)
    check_model(config, arch)


def test_fewer_or_more_layers_of_a_preset():
    for count, routed in ((2, (False, False)), (5, (False,) * 3 + (True,) * 2)):
        arch = resolve_architecture(ModelSection(preset="glm-4.5", num_layers=count))
        assert arch.moe_layers == routed
    arch = resolve_architecture(ModelSection(preset="glm-4.5", num_layers=100))
    assert arch.moe_layers == (False,) * 3 + (True,) * 97


@pytest.mark.parametrize(
    ("family", "change", "problem"),
    [
        ("glm4_moe", {"partial_rotary_factor": 0.4}, "partial_rotary_factor 0.4 .* even number"),
        ("glm4_moe", {"n_group": 4}, "n_group 4 .* n_routed_experts 6"),
        ("glm4_moe", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (
            "glm4_moe",
            {"n_group": 3, "num_experts_per_tok": 3},
            "num_experts_per_tok 3 .* topk_group 1",
        ),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias true is not supported; use"),
        ("ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval is 0"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported; use"),
        ("hunyuan_v1_moe", {"moe_topk": [1, 2, 1]}, "moe_topk is .* one number for all layers"),
        ("hunyuan_v1_moe", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "needs alpha"),
        ("minimax_m2", {"rotary_dim": 5}, "which is not an even number"),
        ("minimax_m2", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("gpt_oss", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention are not"),
        ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu_limit is 0.0: Input should be greater than 0"),
        ("gpt_oss", {"rope_parameters": None}, "rope_parameters is None, expected"),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "awq"}},
            "such quantized weights are not read",
        ),
        ("gpt_oss", {"quantization_config": []}, "such quantized weights are not read"),
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias True is not supported; use a model without"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings True is not supported"),
        ("nemotron_h", {"hidden_act": "silu"}, "hidden_act 'silu' is not supported"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act 'gelu' is not supported"),
        ("nemotron_h", {"n_shared_experts": 2}, "n_shared_experts 2 is not supported, only 1"),
        ("nemotron_h", {"time_step_limit": [0.0, 0.1]}, "time_step_limit .*, only 0 to infinity"),
        ("nemotron_h", {"layers_block_type": ["moe", "cnn"]}, "layers_block_type cnn are not supp"),
        ("nemotron_h", {"n_groups": 3}, "mamba_num_heads 4 is not a multiple of n_groups 3"),
        ("nemotron_h", {"ssm_state_size": 0}, "ssm_state_size is 0"),
        (
            "gemma4_text",
            {"hidden_size_per_layer_input": 8},
            "hidden_size_per_layer_input 8 .*; use",
        ),
        (
            "gemma4_text",
            {"num_kv_shared_layers": 1},
            "num_kv_shared_layers 1 .* not supported; use",
        ),
        (
            "gemma4_text",
            {"use_bidirectional_attention": "all"},
            "use_bidirectional_attention 'all'",
        ),
        ("gemma4_text", {"hidden_act": "silu"}, "hidden_act 'silu' is not supported"),
        ("gemma4_text", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention are not"),
        ("gemma4_text", {"per_layer_config": {"0": {"head_dim": 6}}}, "per_layer_config differs"),
        ("gemma4_text", {"top_k_experts": None}, "top_k_experts is None, expected a number"),
        ("gemma4_text", {"top_k_experts": 7}, "top_k_experts 7 is more than num_experts 6"),
        ("gemma4_text", {"rope_parameters": {}}, "rope_parameters of sliding_attention are None"),
        (
            "gemma4_text",
            {"rope_parameters": {"sliding_attention": YARN}},
            "rope_parameters of sliding_attention .*, expected .* default or proportional",
        ),
        ("gemma4_text", {"global_head_dim": 7}, "head_dim 7 is odd"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 of a llama"),
        ("seed_oss", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 of a seed_oss"),
        ("seed_oss", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only 'silu'"),
        ("seed_oss", {"attention_out_bias": None}, "attention_out_bias is None, expected a value"),
        ("seed_oss", {"mlp_bias": 1}, "mlp_bias is 1, expected a value like False"),
        (
            "smollm3",
            {"no_rope_layers": [1, 0]},
            "no_rope_layers has 2 entries, but .* is 3",
        ),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, "no_rope_layers has 2, expected 0 .* or 1"),
        ("smollm3", {"no_rope_layers": 4}, "no_rope_layers is 4, expected a value of type list"),
        (
            "smollm3",
            {"no_rope_layers": None, "no_rope_layer_interval": 0},
            "no_rope_layer_interval is 0, expected 1 or more",
        ),
        ("smollm3", {"layer_types": ["sliding_attention"] * 3}, "no sliding_window is in use"),
        (
            "smollm3",
            {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 3},
            "no sliding_window is in use",
        ),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported; use"),
        ("olmo2", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only 'silu'"),
        ("olmo2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 of a olmo2"),
        ("hy_v3", {"mlp_bias": True}, "mlp_bias True is not supported, only False"),
        ("hy_v3", {"route_norm": False}, "route_norm False is not supported, only True"),
        ("hy_v3", {"mlp_layer_types": ["cnn"] * 3}, "mlp_layer_types cnn are not supported"),
        ("mellum", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention are not"),
        ("mellum", {"mtp_layer_types": TURNS[1:]}, "mtp_layer_types .* is not supported"),
        ("mellum", {"sliding_window": None}, "no sliding_window is in use"),
        ("mellum", {"rope_parameters": YARN}, "rope_parameters of full_attention are None"),
        (
            "mellum",
            {"rope_parameters": {key: {**YARN, "rope_type": "longrope"} for key in TURNS}},
            "rope_parameters of full_attention: rope type 'longrope' is not supported",
        ),
        (
            "mellum",
            {"rope_parameters": {key: {**YARN, "partial_rotary_factor": 0.5} for key in TURNS}},
            "rope_parameters of full_attention .* for whole heads",
        ),
        ("axk1", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("axk1", {"q_lora_rank": None}, "q_lora_rank is None, expected a value like 1536"),
        ("axk1", {"moe_layer_freq": 0}, "moe_layer_freq is 0, expected 1 or more"),
        ("sarvam_moe", {"use_bias": True}, "use_bias True is not supported, only False"),
        ("sarvam_moe", {"use_qkv_bias": True}, "use_qkv_bias True is not supported, only False"),
        ("sarvam_moe", {"n_routed_experts": 7}, "n_routed_experts 7 contradicts num_experts 6"),
        ("sarvam_mla", {"score_function": "softmax"}, "score_function 'softmax' is not supported"),
        ("exaone_moe", {"swiglu_limits": [7.0] * 3}, "swiglu_limits .* is not supported"),
        ("exaone_moe", {"sliding_windows": [5] * 3}, "sliding_windows .* is not supported"),
        ("exaone_moe", {"is_moe_layer": [True] * 3}, "is_moe_layer .* contradicts"),
        ("exaone_moe", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern is 'LLLG'"),
        ("solar_open", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 of a solar_open"),
        ("solar_open", {"first_k_dense_replace": 1}, "first_k_dense_replace 1 is not .* only 0"),
        ("solar_open", {"use_qk_norm": True}, "use_qk_norm True is not supported, only False"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0, expected 1 or more"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "intermediate_size is 0, expected 1"),
        ("qwen2_moe", {"layer_types": ["sliding_attention"] * 3}, "no sliding_window is in use"),
        (
            "qwen2_moe",
            {"use_sliding_window": True, "sliding_window": None},
            "no sliding_window is in use",
        ),
        ("qwen2_moe", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention are not"),
        ("afmoe", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention are not"),
        ("afmoe", {"sliding_window": None}, "sliding_window is null, but .*; give the window"),
        ("afmoe", {"global_attn_every_n_layers": 0}, "every_n_layers is 0, expected 1 or more"),
        ("afmoe", {"num_shared_experts": 0}, "num_shared_experts is 0, expected 1 or more"),
        ("afmoe", {"score_func": "softmax"}, "score_func 'softmax' is not supported, only 'sig"),
        ("afmoe", {"num_expert_groups": 4}, "num_expert_groups 4 is not supported, only 1 or"),
        ("laguna", {"num_attention_heads_per_layer": [4, 6, 4]}, "differs between layers of slid"),
        ("laguna", {"num_attention_heads_per_layer": [4, 6]}, "has 2 entries, but num_hidden_lay"),
        ("laguna", {"num_attention_heads_per_layer": [4, 3, 3]}, "3 is not a multiple of num_key"),
        ("laguna", {"mlp_layer_types": ["dense", "moe", "sparse"]}, "mlp_layer_types moe are not"),
        ("laguna", {"gating": False}, "gating False is not supported, only True or 'per-head'"),
        ("laguna", {"shared_expert_intermediate_size": 0}, "intermediate_size is 0, expected 1"),
        ("laguna", {"moe_apply_router_weight_on_input": True}, "input True is not supported"),
        ("laguna", {"rope_parameters": {}}, "rope_parameters of full_attention are None, expected"),
        (
            "laguna",
            {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": "a"}}},
            "rope_parameters of sliding_attention are .*, expected a rope_theta; use",
        ),
        ("lfm2_moe", {"conv_bias": True}, "conv_bias True is not supported, only False; use"),
        ("lfm2_moe", {"layer_types": None}, "layer_types is null, expected a list of 'conv' and"),
        ("lfm2_moe", {"layer_types": ["sliding_attention"] * 3}, "sliding_attention are not supp"),
        ("lfm2_moe", {"layer_types": ["conv"] * 2}, "has 2 entries, but num_hidden_layers is 3"),
        ("lfm2_moe", {"conv_L_cache": 0}, "conv_L_cache is 0, but a layer is a short convolution"),
        ("lfm2_moe", {"tie_embedding": True}, "tie_embedding True contradicts tie_word_embeddings"),
        ("granitemoehybrid", {"mamba_proj_bias": True}, "mamba_proj_bias True is not supported"),
        (
            "granitemoehybrid",
            {"position_embedding_type": "alibi"},
            "'alibi' is not supported",
        ),
        ("granitemoehybrid", {"time_step_limit": [0.0, 0.1]}, "time_step_limit .* 0 to infinity"),
        ("granitemoehybrid", {"shared_intermediate_size": 0}, "intermediate_size is 0, expected 1"),
        ("granitemoehybrid", {"layer_types": ["conv"] * 3}, "layer_types conv are not supported"),
        (
            "granitemoehybrid",
            {"mamba_d_head": 5},
            "mamba_d_head is 5, but 8 heads have",
        ),
        (
            "granitemoehybrid",
            {"mamba_n_groups": 3},
            "mamba_n_heads 8 is not a multiple",
        ),
        ("granitemoeshared", {"num_local_experts": 0}, "num_local_experts is 0, expected 1 or mo"),
        ("granitemoeshared", {"residual_multiplier": 0.0}, "residual_multiplier is 0.0: Input sho"),
        ("mistral4", {"partial_rotary_factor": 0.5}, "factor 0.5 is not supported, only 0.375"),
        (
            "mistral4",
            {"rope_parameters": YARN},
            "rope_parameters has llama_4_scaling_beta None, expected a number; use a published",
        ),
        (
            "mistral4",
            {"rope_parameters": {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1}},
            "rope_parameters has original_max_position_embeddings None, expected a number; use",
        ),
        (
            "mistral4",
            {"num_key_value_heads": 2},
            "num_key_value_heads 2 is not num_attention_heads",
        ),
        ("mimo_v2_flash", {"swa_head_dim": 8}, "swa_head_dim 8 is not supported, only 12; use"),
        ("mimo_v2_flash", {"n_shared_experts": 1}, "n_shared_experts 1 is not supported, only No"),
        (
            "mimo_v2_flash",
            {"add_full_attention_sink_bias": True},
            "add_full_attention_sink_bias True is not supported, only False; use a model that",
        ),
        (
            "mimo_v2_flash",
            {"layer_types": None, "hybrid_layer_pattern": [0, 1, 2]},
            "hybrid_layer_pattern is .*, expected a list of 0 and 1",
        ),
        ("mimo_v2_flash", {"rope_parameters": {}}, "rope_parameters of full_attention are None"),
        (
            "mimo_v2_flash",
            {"partial_rotary_factor": 0.3},
            "partial_rotary_factor 0.25 of head_dim 12 is 3, which is not an even number",
        ),
        ("mimo_v2_flash", {"rope_scaling": YARN}, "rope_scaling {.* is not supported, only None"),
        (
            "deepseek_v32",
            {"rope_interleave": False},
            "rope_interleave False is not supported",
        ),
        (
            "deepseek_v32",
            {"indexer_rope_interleave": True},
            "indexer_rope_interleave True is not",
        ),
        ("deepseek_v32", {"scoring_func": "softmax"}, "'softmax' is not supported, only 'sigmoid"),
        (
            "deepseek_v32",
            {"layer_types": ["full_attention"] * 3},
            "layer_types full_attention are not supported, only indexed_attention; use",
        ),
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank"),
        ("deepseek_v32", {"index_topk": 0}, "index_topk"),
        ("deepseek_v32", {"index_head_dim": 4}, "index_head_dim 4 is less than qk_rope_head_dim 6"),
        (
            "glm_moe_dsa",
            {"indexer_rope_interleave": False},
            "False is not supported, only True; use",
        ),
        (
            "glm_moe_dsa",
            {"indexer_types": ["shared", "full", "full"]},
            "indexer_types begin with 'shared', but layer 0 has no layer before it; give it 'full'",
        ),
        (
            "glm_moe_dsa",
            {"indexer_types": ["full"] * 2},
            "indexer_types describe 2 layers, but num_hidden_layers is 3; give one for each",
        ),
        (
            "glm_moe_dsa",
            {"indexer_types": ["full", "none", "full"]},
            "indexer_types is .*, expected 'full' or 'shared' for each layer; use",
        ),
        (
            "glm_moe_dsa",
            {"indexer_types": None, "index_topk_pattern": "FXS"},
            "index_topk_pattern is .*, expected 'full' or 'shared' for each layer; use",
        ),
        (
            "glm_moe_dsa",
            {"indexer_types": None, "index_topk_freq": "4"},
            "index_topk_freq is '4', expected a whole number",
        ),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope False is not supported, only True"),
        (
            "kimi_linear",
            {
                "layer_types": None,
                "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [3]},
            },
            "linear_attn_config has .*, which are not the layers 1 to 3; name each of them once",
        ),
        ("kimi_linear", {"layer_types": TURNS}, "layer_types sliding_attention are not supported"),
        ("kimi_linear", {"layer_types": STATES}, "linear_layers has 2 entries, but num_hidden_lay"),
        ("kimi_linear", {"linear_num_heads": 0}, "linear_num_heads is 0, but a layer has linear"),
        ("kimi_linear", {"linear_attn_config": 3}, "linear_attn_config is 3, expected a value of"),
        ("bailing_hybrid", {"kda_lower_bound": 0.0}, "kda_lower_bound is 0.0, expected a number"),
        (
            "bailing_hybrid",
            {"layer_types": None, "layer_group_size": 0},
            "layer_group_size is 0, expected 1 or more",
        ),
        ("bailing_hybrid", {"layer_types": TURNS}, "layer_types sliding_attention are not supp"),
        ("bailing_hybrid", {"linear_head_dim": "6"}, "linear_head_dim is '6', expected 1 or more"),
        ("step3p5", {"mlp_bias": True}, "mlp_bias True is not supported, only False; use"),
        ("step3p5", {"moe_router_activation": "softmax"}, "'softmax' is not supported, only 'sig"),
        ("step3p5", {"share_expert_dim": 0}, "share_expert_dim is 0, expected 1 or more"),
        ("step3p5", {"query_pre_attn_scalar": 5}, "query_pre_attn_scalar 5 is not supported, onl"),
        ("step3p5", {"layer_types": TURNS}, "layer_types is .*, expected a list of num_hidden"),
        ("step3p5", {"swiglu_limits": [0.5]}, "swiglu_limits is .*, expected a list of num_hidd"),
        ("step3p5", {"swiglu_limits": [0, -1.0, 0]}, "an entry that is not above 0"),
        (
            "step3p5",
            {"per_layer_config": {"2": {"num_attention_heads": 6}}},
            "per_layer_config differs from num_sliding_attention_heads 6 .*; use published",
        ),
        (
            "step3p5",
            {"attention_other_setting": {"head_dim": 16}},
            "attention_other_setting head_dim 16 differs from 12, .*; use a published model",
        ),
        (
            "step3p5",
            {"rope_parameters": None, "rope_theta": [1e4, 1e3, 1e2]},
            "rope_theta differs between layers of sliding_attention, .*; use a published model",
        ),
        (
            "minimax_m3_vl_text",
            {"scoring_func": "softmax"},
            "'softmax' is not supported, only 'sig",
        ),
        (
            "minimax_m3_vl_text",
            {"n_shared_experts": 2},
            "n_shared_experts 2 is not supported, only",
        ),
        ("minimax_m3_vl_text", {"hidden_act": "gelu"}, "hidden_act 'gelu' .* only 'swigluoai'"),
        ("minimax_m3_vl_text", {"shared_intermediate_size": 0}, "is 0, expected 1 or more"),
        ("minimax_m3_vl_text", {"layer_types": TURNS}, "layer_types sliding_attention are not"),
        (
            "minimax_m3_vl_text",
            {"layer_types": ["minimax_m3_sparse"]},
            "sparse_layers has 1 entries, but num_hidden_layers is 3",
        ),
        (
            "minimax_m3_vl_text",
            {"mlp_layer_types": None, "moe_layer_freq": [0, 1]},
            r"moe_layer_freq is \[0, 1\], expected a list of num_hidden_layers 3; give an entry",
        ),
        (
            "minimax_m3_vl_text",
            {"layer_types": None, "sparse_attention_config": {"sparse_attention_freq": 1}},
            "sparse_attention_freq is 1, expected a list of num_hidden_layers 3",
        ),
        (
            "minimax_m3_vl_text",
            {"sparse_attention_config": {"sparse_score_type": "sum"}},
            "sparse_score_type 'sum' is not supported, only 'max'; use a model that has it",
        ),
        (
            "minimax_m3_vl_text",
            {"sparse_attention_config": {"sparse_disable_index_value": [0, 0, 1]}},
            r"sparse_disable_index_value \[0, 0, 1\] has a 0 in a sparse layer, .* published model",
        ),
        (
            "minimax_m3_vl_text",
            {"index_n_heads": 3},
            "index_n_heads 3 is not num_key_value_heads 2",
        ),
        (
            "minimax_m3_vl_text",
            {"index_head_dim": 4},
            "index_head_dim 4 is less than the 6 elements",
        ),
        ("minimax_m3_vl_text", {"index_local_blocks": 3}, "3 is more than index_topk_blocks 2"),
        ("minimax_m3_vl_text", {"index_topk_blocks": 0}, "index_topk_blocks is 0: "),
    ],
)
def test_unsupported_configs_of_families_are_refused_in_one_line(family, change, problem, tmp_path):
    own = next((CASES[case] for case in CASES if case.split()[0] == family), {})
    given = {**SIZES, **own, **change}
    named = {key for other, key in FAMILIES[family].aliases.items() if other in given}
    defaults = {key: x for key, x in FAMILIES[family].defaults.items() if key not in named}
    config = {**defaults, "model_type": family, **given}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=problem) as caught:
        load_hf(tmp_path)
    assert "\n" not in str(caught.value)
