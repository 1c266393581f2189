"""Multi-token prediction compared with transformers, over documents, on meshes, in files."""

import itertools
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from moetrain.cli.checkpoint import main
from moetrain.config import Config, ConfigError, KernelsSection, MoeSection
from moetrain.data.loader import Batch
from moetrain.models.families import FAMILIES
from moetrain.models.hf.load import check_checkpoint, load_hf, load_weights
from moetrain.models.hf.save import save_hf
from moetrain.models.parts.multi_token import (
    multi_token_loss,
    multi_token_sizes,
    multi_token_targets,
    reaches,
)
from moetrain.models.transformer import Inputs, Transformer
from moetrain.parallel.world import plan_world
from moetrain.train.loop import Trainer
from moetrain.train.session import resolve_run
from tests.lib.checkpoints import tensors_of
from tests.lib.estimates import estimate_memory
from tests.lib.family_cases import architecture_of, random_reference, tokens
from tests.lib.family_ranks import MESHES, check, drawn, run_on_two_ranks
from tests.lib.multi_token_models import with_multi_token
from tests.lib.small_models import relative_error

CASES = ["glm4_moe", "glm4_moe groups", "qwen3_next", "qwen3_5_moe_text", "qwen3_5_text"]
CASES += ["deepseek_v3", "deepseek_v3 no latent queries", "deepseek_v3 yarn", "glm4_moe_lite"]
CASES += ["mellum", "mellum yarn", "hy_v3", "deepseek_v32"]
LINEAR = {"qwen3_next", "qwen3_5_moe_text", "qwen3_5_text"}


def random_model(arch, seed=0):
    """Return a model with random norms, in which no routing choice is nearly tied."""
    model = Transformer(arch)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            is_norm = "norm" in name or "readout" in name
            spread = 0.5 if "router.weight" in name else 0.1
            tensor.normal_(float(is_norm), spread, generator=generator)
    return model


def save_with_multi_token(case, folder, *, without=(), **changes):
    """Write a random model of ``case`` with an MTP block, in its family's files."""
    model = random_model(with_multi_token(architecture_of(case, **changes)))
    save_hf(model, folder)
    if without:
        stored = load_file(folder / "model.safetensors")
        kept = {name: x for name, x in stored.items() if not name.endswith(tuple(without))}
        assert len(kept) < len(stored)
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return model


def ours(folder):
    """Load the model in ``folder`` with its MTP block."""
    model = Transformer(with_multi_token(load_hf(folder).arch))
    load_weights(model, folder)
    return model


def theirs(folder):
    """Load transformers' model in ``folder``, and its MTP model."""
    path = folder / "model.safetensors"
    names = {name: name.replace("final_layernorm", "shared_head.norm") for name in load_file(path)}
    if names.keys() != {*names.values()}:  # transformers does not know Hy3's name of it
        renamed = {names[name]: tensor for name, tensor in load_file(path).items()}
        folder = shutil.copytree(folder, folder / "renamed")
        save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    main_model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").train()
    config = main_model.config
    config.num_mtp_layers = 1
    if getattr(config, "layer_types", None) is not None:
        has_window = config.model_type == "mellum"
        config.mtp_layer_types = ["sliding_attention" if has_window else "full_attention"]
    if getattr(config, "mlp_layer_types", None) is not None:
        config.mtp_mlp_layer_types = ["sparse"]
    # transformers' classes of GLM know the published numbers of layers alone.
    patterns = [rf"model\.layers\.{config.num_hidden_layers}\..*", r"^mtp.*"]
    main_model._keys_to_ignore_on_load_unexpected = patterns
    mtp_model = MtpModel.from_pretrained(main_model).train()
    assert mtp_model.config._attn_implementation == "eager"
    return main_model, mtp_model


def batch_of(tokens_BS):
    """Return rows that are documents."""
    last_BS = tokens_BS.new_full((len(tokens_BS), 1), -100)
    return Batch(tokens_BS, torch.cat((tokens_BS[:, 1:], last_BS), 1), None, None)


def our_name(name):
    """Return transformers' name of an MTP parameter, as the files name it."""
    parts = {"enorm": "join.enorm", "hnorm": "join.hnorm", "eh_proj": "join.proj"}
    name = name.removeprefix("layers.0.")
    first, _, rest = name.partition(".")
    if first in parts:
        return f"{parts[first]}.{rest}"
    return name.replace("post_norm.", "readout.") if first == "post_norm" else name


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_and_gradients_are_those_of_transformers(case, tmp_path):
    save_with_multi_token(case, tmp_path)
    model, (main_model, mtp_model) = ours(tmp_path), theirs(tmp_path)
    tokens_BS = tokens(2, 23)
    found = []
    hidden_BSD, _ = model.backbone(Inputs(tokens_BS), multi_token=found)

    before = main_model.model(tokens_BS, use_cache=False).last_hidden_state
    positions_BS = torch.arange(22).expand(2, -1)
    want = mtp_model.forward_layer(
        0, before[:, :-1], positions_BS, None, input_ids=tokens_BS[:, 1:]
    )
    assert relative_error(hidden_BSD, before) < 1e-5
    assert relative_error(found[0][:, :-1], want) < 1e-5

    logits = [main_model.lm_head(before)[:, :-1], main_model.lm_head(want)[:, :-1]]
    targets = [tokens_BS[:, 1:], tokens_BS[:, 2:]]
    pairs = zip(logits, targets, strict=True)
    losses = [cross_entropy(x.flatten(0, 1), y.flatten()) for x, y in pairs]
    (losses[0] + 0.3 * losses[1]).backward()

    batch = batch_of(tokens_BS)
    loss = multi_token_loss(model, found, batch, {"mtp_1": torch.tensor(42.0)})
    assert relative_error(loss, losses[1]) < 1e-5
    logits_BSV = model.vocabulary.logits(hidden_BSD, model.head_weight)
    (cross_entropy(logits_BSV[:, :-1].flatten(0, 1), targets[0].flatten()) + 0.3 * loss).backward()

    limit = 3e-4 if case in LINEAR else 1e-5
    number, family = model.arch.num_layers, FAMILIES[model.arch.family]
    theirs_by_name = {our_name(n): p for n, p in mtp_model.named_parameters()}
    compared = 0
    for name, parameter in model.named_parameters():
        if not name.startswith(f"layers.{number}."):
            continue
        own = name.removeprefix(f"layers.{number}.")
        plain = f"layers.0.{own}"
        if own.startswith(("join", "readout")):
            there = theirs_by_name[own]
        elif own.startswith("moe.experts."):
            leaf = {"w_gate_up": "gate_up_proj", "w_down": "down_proj"}[own.rpartition(".")[2]]
            there = theirs_by_name[f"mtp_block.mlp.experts.{leaf}"]
        else:
            (piece,) = family.pieces({plain: parameter.shape}, model.arch, family.modules)
            key = piece.hf_name.partition("layers.0.")[2]
            there = theirs_by_name[f"mtp_block.{key}"]
        if ".indexer." in name:
            assert parameter.grad is None
            assert there.grad is None
        else:
            assert relative_error(parameter.grad, there.grad) < limit, name
        compared += 1
    assert compared == len([n for n in theirs_by_name if n.startswith(("join", "readout", "mtp"))])
    head = "embed" if model.lm_head is None else "lm_head"
    assert relative_error(model.head_weight.grad, main_model.lm_head.weight.grad) < limit, head
    embedding = main_model.get_input_embeddings().weight
    assert relative_error(model.embed.weight.grad, embedding.grad) < limit


def test_documents_end_where_positions_begin_again():
    positions_BS = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [2, 3, 4, 5, 0, 0, 1]])
    want = {1: ["1101110", "1110010"], 2: ["1001100", "1100000"], 7: ["0000000", "0000000"]}
    for depth, rows in want.items():
        found = reaches((2, 7), positions_BS, depth, torch.device("cpu"))
        assert ["".join(map(str, row.int().tolist())) for row in found] == rows
    found = reaches((2, 7), None, 2, torch.device("cpu"))
    assert found.int().tolist() == [[1] * 5 + [0] * 2] * 2


def test_targets_lie_as_far_ahead_as_the_depth():
    tokens_BS, positions_BS = torch.arange(10, 17)[None], torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    targets_BS = torch.tensor([[-100, 12, 13, -100, 15, 16, -100]])
    batch = Batch(tokens_BS, targets_BS, positions_BS, None)
    assert multi_token_targets(batch, 1).tolist() == [[12, 13, -100, -100, 16, -100, -100]]
    assert multi_token_targets(batch, 2).tolist() == [[13, -100, -100, -100, -100, -100, -100]]


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_documents_in_one_row_do_not_see_each_other(case):
    model = random_model(with_multi_token(architecture_of(case))).double()
    first, second = tokens(2, 20).split([7, 13], dim=1)
    positions_BS = torch.cat((torch.arange(7), torch.arange(13))).expand(2, -1)
    alone, routings = [], []
    for tokens_BS in (first, second):
        found = []
        routings.append(model.backbone(Inputs(tokens_BS), multi_token=found)[1])
        alone.append(found[0][:, :-1])
    found = []
    _, routing = model.backbone(
        Inputs(torch.cat((first, second), dim=1), positions_BS), multi_token=found
    )
    together = torch.cat((found[0][:, :6], found[0][:, 7:-1]), dim=1)
    torch.testing.assert_close(together, torch.cat(alone, dim=1), rtol=1e-6, atol=1e-6)
    if routing is not None:  # tokens after a document's end do not count
        counts = sum(one.counts_LE for one in routings)
        assert torch.equal(routing.counts_LE, counts)
        top_k = model.arch.num_experts_per_token
        assert routing.counts_LE.sum(1).tolist()[-2:] == [40 * top_k, 36 * top_k]


@pytest.mark.parametrize("case", CASES)
def test_parts_know_parameters_and_products(case):
    arch, seq_len = with_multi_token(architecture_of(case)), 16
    model = Transformer(arch, kernels=KernelsSection(attention="reference"))
    assert arch.num_params() == sum(p.numel() for p in model.parameters())
    rules = arch.plan().rules(model)
    for name in ("join.proj.weight", "join.enorm.weight", "readout.weight"):
        assert rules[f"layers.{arch.num_layers}.{name}"].style == "replicate"
    for part in arch.parts():
        module = part.build(KernelsSection(), MoeSection())
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        assert {name: weight.shape for name, weight in part.weights.items()} == shapes
    model.init_weights(std=0.02, seed=0)
    tokens_BS = torch.zeros(1, seq_len, dtype=torch.long)
    counts, plain = [], arch.model_copy(update={"mtp_layers": 0})
    for found in (None, []):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            hidden_BSD, _ = model.backbone(Inputs(tokens_BS), multi_token=found)
            for one in (hidden_BSD, *(found or ())):
                model.vocabulary.logits(one, model.head_weight)
        found = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
        counts.append(sum(found.values()) - found.get("aten.bmm", 0))
    experts = 0
    if arch.num_experts:  # opaque to the counter
        used = arch.num_experts_per_token * (seq_len if arch.num_experts else 0)
        experts = 6 * used * arch.hidden_size * arch.moe_intermediate_size
    widths = arch.head_dim + getattr(arch, "v_head_dim", arch.head_dim)
    part = arch.layers()[-1][0]
    window = min(part.window or part.most_keys or seq_len, seq_len)
    keys = 2 * window * (1 - window / (2 * seq_len))
    pairs = arch.num_heads * widths * seq_len * keys
    if part.most_keys is not None:  # index scores of all visible keys
        pairs += part.index_num_heads * (part.index_head_dim + 1) * seq_len**2
    more = (arch.flops_per_token(seq_len) - plain.flops_per_token(seq_len)) * seq_len / 3
    assert counts[1] - counts[0] + experts + pairs == pytest.approx(more, rel=1e-12)


@torch.no_grad()
def test_experts_of_a_block_see_neither_pads_nor_the_ends_of_documents():
    """Documents of four tokens, one, and eight; three pads are behind the second."""
    model = random_model(with_multi_token(architecture_of("glm4_moe")))
    positions_BS = torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2], [*range(8)]])
    is_pad_BS = torch.tensor([[False] * 5 + [True] * 3, [False] * 8])
    inputs = Inputs(tokens(2, 8), positions_BS, is_pad_BS=is_pad_BS)
    _, routing = model.backbone(inputs, multi_token=[])
    top_k = model.arch.num_experts_per_token
    assert routing.counts_LE.sum(1).tolist()[-2:] == [13 * top_k, (3 + 0 + 7) * top_k]


# ---- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_files_there_and_back_are_the_same_bits(case, tmp_path):
    made = save_with_multi_token(case, tmp_path / "in")
    model = ours(tmp_path / "in")
    assert model.source.extra == ()
    for (name, x), y in zip(made.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(x, y), name
    save_hf(model, tmp_path / "out")
    want, got = (load_file(tmp_path / f / "model.safetensors") for f in ("in", "out"))
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    configs = [json.loads((tmp_path / f / "config.json").read_text()) for f in ("in", "out")]
    assert configs[0] == configs[1]
    # Unless requested, the same tensors are carried along.
    plain = load_hf(tmp_path / "in")
    assert plain.arch.mtp_layers == 0
    save_hf(plain, tmp_path / "plain")
    kept = load_file(tmp_path / "plain" / "model.safetensors")
    assert want.keys() == kept.keys()
    assert all(torch.equal(want[name], kept[name]) for name in want)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_5"])
@torch.no_grad()
def test_beside_a_vision_tower_they_lie_at_the_top(family, tmp_path):
    arch = architecture_of(f"{family}_text").model_copy(update={"family": family})
    made = random_model(with_multi_token(arch))
    save_hf(made, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "mtp.layers.0.self_attn.q_proj.weight" in stored
    outside = [n for n in stored if not n.startswith(("mtp.", "model.language_model."))]
    assert outside == ["lm_head.weight"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["text_config"]["mtp_num_hidden_layers"] == 1
    for (name, x), y in zip(made.named_parameters(), ours(tmp_path).parameters(), strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("case", ["glm4_moe", "deepseek_v3"])
@torch.no_grad()
def test_copies_of_embedding_and_head_are_written_and_not_read(case, tmp_path):
    made = save_with_multi_token(case, tmp_path / "in")
    stored = load_file(tmp_path / "in" / "model.safetensors")
    copies = {
        "model.layers.3.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.3.shared_head.head.weight": "lm_head.weight",
    }
    for copy, whole in copies.items():
        assert torch.equal(stored[copy], stored[whole])
        stored[copy] += 1
    save_file(stored, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    model = ours(tmp_path / "in")
    assert torch.equal(model.embed.weight, made.embed.weight)
    assert torch.equal(model.lm_head.weight, made.lm_head.weight)
    model.embed.weight *= 2
    model.lm_head.weight *= 3
    save_hf(model, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    for copy, whole in copies.items():
        assert torch.equal(written[copy], written[whole])
    assert torch.equal(written["model.embed_tokens.weight"], 2 * made.embed.weight)


@pytest.mark.parametrize("case", ["glm4_moe", "glm4_moe_lite"])
@torch.no_grad()
def test_files_without_copies_stay_without(case, tmp_path):
    ends = ("3.embed_tokens.weight", "3.shared_head.head.weight")
    save_with_multi_token(case, tmp_path / "in", without=ends)
    model = ours(tmp_path / "in")
    save_hf(model, tmp_path / "out")
    want, got = (load_file(tmp_path / f / "model.safetensors") for f in ("in", "out"))
    assert want.keys() == got.keys()


@torch.no_grad()
def test_a_tied_embedding_is_the_mtp_heads_copy_too(tmp_path):
    save_with_multi_token("glm4_moe no dense layer", tmp_path / "in")
    stored = load_file(tmp_path / "in" / "model.safetensors")
    assert "lm_head.weight" not in stored
    for name in ("embed_tokens", "shared_head.head"):
        copy = stored[f"model.layers.3.{name}.weight"]
        assert torch.equal(copy, stored["model.embed_tokens.weight"])


@torch.no_grad()
def test_packed_experts_beside_unpacked_ones(tmp_path):
    """Qwen3.5's files hold packed experts, and those of the MTP block one by one."""
    made = random_model(with_multi_token(architecture_of("qwen3_5_moe_text")))
    save_hf(made, tmp_path / "in")
    stored = load_file(tmp_path / "in" / "model.safetensors")
    for name, parameter in made.named_parameters():
        if ".experts." not in name or int(name.split(".")[1]) == made.arch.num_layers:
            continue
        layer = name.split(".")[1]
        leaf = {"w_gate_up": "gate_up_proj", "w_down": "down_proj"}[name.rpartition(".")[2]]
        stored[f"model.layers.{layer}.mlp.experts.{leaf}"] = parameter.detach().clone()
    experts = [n for n in stored if n.startswith("model.layers") and ".experts." in n]
    for name in experts:
        if name.split(".experts.")[1][0].isdigit():
            del stored[name]
    save_file(stored, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    model = ours(tmp_path / "in")
    for (name, x), y in zip(made.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(x, y), name
    save_hf(model, tmp_path / "out")
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert again.keys() == stored.keys()
    assert "mtp.layers.0.mlp.experts.1.up_proj.weight" in again


# ---- runs --------------------------------------------------------------------------------------


def multi_token_case(number, world, case, degrees, policy):
    one = drawn(number, world, case, degrees, policy)
    return one._replace(words=[*one.words, "train.mtp_weight=0.3"])


@pytest.mark.tier("wide", long=["2"])
@pytest.mark.parametrize("world", MESHES)
def test_every_mesh_gives_the_single_process_answer(world, tmp_path):
    policies = itertools.cycle(["none", "full", "selective"])
    meshes = [degrees for degrees in MESHES[world].values() if "pp" not in degrees]
    pairs = [("glm4_moe", mesh) for mesh in meshes]
    pairs += [("deepseek_v3", meshes[-1]), ("glm4_moe_lite", meshes[0])]
    pairs += [("qwen3_next", meshes[-1]), ("qwen3_5_text", meshes[1])]
    runs = [multi_token_case(i, world, *mesh, next(policies)) for i, mesh in enumerate(pairs)]
    runs[0] = runs[0]._replace(words=[*runs[0].words, "parallel.reshard_after_forward=yes"])
    answers = check(world, runs, tmp_path)
    # CE, balance of experts or none, MTP, total and norm.
    assert [numbers.shape[1] for numbers, _ in answers] == [5] * (len(runs) - 1) + [4]


@pytest.mark.tier("wide")
@pytest.mark.parametrize(
    ("case", "axis"),
    [
        ("glm4_moe", "dp_shard"),
        ("qwen3_next", "tp"),
        ("deepseek_v3", "tp"),
        ("glm4_moe_lite", "dp_shard"),
    ],
)
def test_a_run_trains_them_and_writes_them_back(case, axis, tmp_path):
    save_with_multi_token(case, tmp_path / "in")
    words = {f"parallel.{axis}": 2, "train.mtp_weight": 0.3, "log.interval": 1}
    run_on_two_ranks(tmp_path, **words)
    assert main(["export-hf", str(tmp_path / "run"), str(tmp_path / "again")]) == 0
    assert main(["import-hf", str(tmp_path / "in"), str(tmp_path / "began")]) == 0
    folders = [tmp_path / f for f in ("in", "run/hf", "again")]
    before, after, again = (load_file(folder / "model.safetensors") for folder in folders)
    assert before.keys() == after.keys() == again.keys()
    assert all(torch.equal(after[name], again[name]) for name in after)
    own = [n for n in before if n.startswith(("mtp.", "model.layers.3.")) or "embed" in n]
    fixed = {n for n in own if torch.equal(before[n], after[n])}
    assert {n for n in fixed if "correction_bias" not in n} == set()
    for end in ("embed_tokens", "shared_head.head") if case != "qwen3_next" else ():
        whole = "model.embed_tokens" if end == "embed_tokens" else "lm_head"
        assert torch.equal(after[f"model.layers.3.{end}.weight"], after[f"{whole}.weight"])
    rows = [json.loads(row) for row in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(4 < row["mtp_loss"] < 8 for row in rows if "loss" in row)
    assert tensors_of(tmp_path / "began" / "step-00000000")["model"].keys()


@pytest.mark.tier("long")
def test_a_loss_falls_from_a_presets_random_weights(tiny_words, tmp_path, monkeypatch):
    arch = architecture_of("glm4_moe").model_copy(update={"vocab_size": 264})
    monkeypatch.setitem(__import__("moetrain.models.families").models.families.PRESETS, "g", arch)
    words = [w for w in tiny_words if not w.startswith(("model.", "train.steps", "train.sample"))]
    words += ["model.preset=g", "train.mtp_weight=0.3", "train.steps=40", "optim.lr=0.01"]
    words += ["train.sample_tokens=8"]
    trainer = Trainer(Config.load(None, words, environ={}))
    results = [trainer.train_step() for _ in range(40)]
    first, last = results[0].terms["mtp_loss"].item(), results[-1].terms["mtp_loss"].item()
    assert 5 < first < 6
    assert last < first - 1
    assert trainer.held_out_terms(trainer.data.eval).terms.keys() == {"loss"}


def test_the_estimate_of_memory_counts_them():
    words = ["model.preset=glm-4.5-air", "model.num_layers=2", "data.seq_len=4096"]
    words += ["data.source=synthetic", "train.micro_batch_size=64", "train.global_batch_size=64"]
    found = []
    for more in ([], ["train.mtp_weight=0.3"]):
        config, arch = resolve_run(Config.load(None, [*words, *more], environ={}))
        dims = plan_world(config, arch, 1)
        estimate = estimate_memory(config, arch, dims, torch.bfloat16)
        assert estimate.weights == 4 * arch.num_params()
        found.append((arch, estimate))
    (plain, before), (arch, after) = found
    join = 2 * arch.hidden_size**2 + 5 * arch.hidden_size
    block = sum(part.num_params() for part in plain.layers()[1])
    assert arch.num_params() - plain.num_params() == block + join
    assert after.activations > 1.3 * before.activations
    assert after.logits > 1.5 * before.logits


def test_depths_follow_each_other():
    """The hidden states of the second block come from the first one."""
    model = random_model(with_multi_token(architecture_of("glm4_moe"), 2))
    tokens_BS, found = tokens(2, 11), []
    model.backbone(Inputs(tokens_BS), multi_token=found)
    assert len(found) == 2
    one = Transformer(with_multi_token(architecture_of("glm4_moe"), 1))
    state = {n: x for n, x in model.state_dict().items() if not n.startswith("layers.4.")}
    one.load_state_dict(state)
    first = []
    one.backbone(Inputs(tokens_BS), multi_token=first)
    torch.testing.assert_close(first[0], found[0])
    batch = batch_of(tokens_BS)
    assert multi_token_sizes([batch], 2) == {"mtp_1": 18, "mtp_2": 16}
    sizes = {"mtp_1": torch.tensor(18.0), "mtp_2": torch.tensor(16.0)}
    loss = multi_token_loss(model, found, batch, sizes)
    losses = []
    for depth, hidden_BSD in enumerate(found, 1):
        logits = model.vocabulary.logits(hidden_BSD[:, : -depth - 1], model.head_weight)
        losses.append(cross_entropy(logits.flatten(0, 1), tokens_BS[:, depth + 1 :].flatten()))
    torch.testing.assert_close(loss, torch.stack(losses).mean())
    loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if ".join." in n)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["parallel.pp=2"],
            "train.mtp_weight: 0.3 contradicts parallel.pp 2 (the last stage holds",
        ),
        (
            ["lora.rank=8"],
            "train.mtp_weight: 0.3 contradicts lora.rank 8 (PEFT adapts no multi-token",
        ),
        (["train.objective=dpo", "data.source=records", "data.path=x.jsonl"], "train.mtp_weight"),
        (["model.path=", "model.preset=debug"], "this qwen3_moe model has no multi"),
        (
            ["model.path=", "model.preset=deepseek-v2-lite"],
            "this deepseek_v2 model has no multi-token",
        ),
    ],
)
def test_bad_settings_of_mtp_are_refused_in_one_line(words, says, tmp_path):
    save_with_multi_token("glm4_moe", tmp_path)
    given = [f"model.path={tmp_path}", "data.source=synthetic", "train.mtp_weight=0.3", *words]
    given = [w for w in given if not w.endswith("path=")]
    if any(w.startswith("model.preset") for w in given):
        given = given[1:]
    with pytest.raises(ConfigError) as caught:
        resolve_run(Config.load(None, given, environ={}))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_lack_them_are_one_line(tmp_path):
    random_reference("glm4_moe").save_pretrained(tmp_path / "none")  # num_nextn_predict_layers 0
    save_with_multi_token("glm4_moe", tmp_path / "part", without=("3.eh_proj.weight",))
    random_reference("qwen3_next").save_pretrained(tmp_path / "lost")
    words = ["data.source=synthetic", "train.mtp_weight=0.3"]
    for name, says in {
        "none": "this glm4_moe model has no multi-token prediction blocks; unset it",
        "part": "missing: model.layers.3.eh_proj.weight",
        "lost": "missing: mtp.",
    }.items():
        path = f"model.path={tmp_path / name}"
        with pytest.raises(ConfigError) as caught:
            resolve_run(Config.load(None, [path, *words], environ={}))
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


def test_two_depths_take_one_tensor_parallel_rank(tmp_path):
    model = random_model(with_multi_token(architecture_of("glm4_moe"), 2))
    save_hf(model, tmp_path)
    assert check_checkpoint(tmp_path, model.arch).extra == ()
    words = [f"model.path={tmp_path}", "data.source=synthetic", "train.mtp_weight=0.3"]
    assert resolve_run(Config.load(None, words, environ={}))[1].mtp_layers == 2
    with pytest.raises(ConfigError, match=r"parallel.tp: 2 is not supported with 2 multi-token"):
        resolve_run(Config.load(None, [*words, "parallel.tp=2"], environ={}))
