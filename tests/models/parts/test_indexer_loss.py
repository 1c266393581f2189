"""The loss of indexers: its value and gradients, what it trains, its metrics, and refusals."""

import json
import math

import pytest
import torch
from torch.nn.functional import layer_norm

from moetrain.config import Config, ConfigError
from moetrain.kernels.attention.index_keys import index_scores, visible_keys
from moetrain.kernels.attention.paged import as_mask
from moetrain.models.layers import Selection
from moetrain.models.parts import indexer_loss
from moetrain.models.parts.indexer import Indexed, select_keys
from moetrain.models.parts.indexer_loss import attention_weights, divergence
from moetrain.models.transformer import Inputs, Transformer, plan_model
from moetrain.train.loop import Trainer
from tests.lib.family_cases import architecture_of, random_reference, tokens
from tests.lib.family_ranks import check, drawn
from tests.lib.selected_keys import rows_of

MODES = ("joint", "warmup")


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make(topk, seed=0):
    """Return indexed tokens (leaves), attention's queries and keys, and places, of 2 rows of 9."""
    shapes = (2, 9, 3, 4), (2, 9, 4), (2, 9, 3)
    leaves = [normal(*shape, seed=seed + i).requires_grad_() for i, shape in enumerate(shapes)]
    seen_BS2 = rows_of([0, 4], 9).expand(2, -1, -1)
    q_BSHe, k_BLHe = normal(2, 9, 5, 6, seed=7), normal(2, 9, 5, 6, seed=8)
    indexed = Indexed(*leaves)
    keys_BSK = None if topk is None else select_keys(indexed, seen_BS2, topk)
    return indexed, leaves, q_BSHe, k_BLHe, seen_BS2, keys_BSK


def by_formula(indexed, q_BSHe, k_BLHe, scale, seen_BS2, keys_BSK, is_limited):
    """Return each token's loss and share of kept attention, token by token with autograd."""
    found, kept = [], []
    visible_BSL = visible_keys(seen_BS2, 9)
    for row in range(2):
        for query in range(9):
            seen = visible_BSL[row, query].nonzero()[:, 0]
            own = seen
            if keys_BSK is not None:
                own = torch.tensor(sorted({*keys_BSK[row, query].tolist()} - {-1}))
            among = own if is_limited else seen
            attention_HL = torch.einsum("he,lhe->hl", q_BSHe[row, query], k_BLHe[row]) * scale
            p_L = attention_HL[:, among].softmax(-1).mean(0)
            products_hL = indexed.q_BShd[row, query] @ indexed.k_BLd[row, among].T / 2
            score_L = indexed.w_BSh[row, query] @ products_hL.relu()
            found.append((p_L * (p_L.log() - score_L.log_softmax(-1))).sum())
            dense_HL = torch.zeros(5, 9, dtype=torch.float64)
            dense_HL[:, seen] = attention_HL[:, seen].softmax(-1)
            kept.append(dense_HL[:, own].sum(-1).mean())
    return torch.stack(found).view(2, 9), torch.stack(kept).view(2, 9)


@pytest.mark.parametrize("block", [2**27, 2 * 5 * 9 * 4])
@pytest.mark.parametrize("is_limited", [True, False])
@pytest.mark.parametrize("topk", [None, 1, 3, 9])
def test_loss_and_gradients_are_those_of_the_formula(topk, is_limited, block, monkeypatch):
    monkeypatch.setattr(indexer_loss, "_BLOCK_SCORES", block)
    indexed, leaves, q_BSHe, k_BLHe, seen_BS2, keys_BSK = make(topk)
    scale, counts_BS = 0.3, normal(2, 9, seed=9).abs()
    want_BS, kept_BS = by_formula(indexed, q_BSHe, k_BLHe, scale, seen_BS2, keys_BSK, is_limited)
    want = (want_BS * counts_BS).sum()
    found = attention_weights(q_BSHe, k_BLHe, seen_BS2, keys_BSK, scale, is_limited) / 5
    keys = keys_BSK if is_limited else None
    got = divergence(indexed, found[..., :-1], seen_BS2, keys, counts_BS)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(found[..., -1], kept_BS)
    torch.testing.assert_close(found[..., :-1].sum(-1), torch.ones(2, 9, dtype=torch.float64))
    wanted = torch.autograd.grad(want * 1.7, leaves)
    for one, other in zip(torch.autograd.grad(got * 1.7, leaves), wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_ops_are_as_they_declare():
    indexed, _, q_BSHe, k_BLHe, seen_BS2, keys_BSK = make(3)
    given = q_BSHe, k_BLHe, seen_BS2, keys_BSK, 0.3, True
    torch.library.opcheck(torch.ops.moetrain.attention_weights.default, given)
    weights_BSL = attention_weights(*given)[..., :-1] / 5
    own = indexed.q_BShd, indexed.k_BLd, indexed.w_BSh
    inputs = *own, weights_BSL, seen_BS2, keys_BSK, torch.ones(2, 9, dtype=torch.float64)
    torch.library.opcheck(torch.ops.moetrain.indexer_divergence.default, inputs)
    plain = [x.detach() for x in own]
    torch.library.opcheck(torch.ops.moetrain.select_keys.default, (*plain, seen_BS2, 3, False))


def model_of(case, mode, dtype=torch.float64):
    model = Transformer(architecture_of(case)).to(dtype)
    model.init_weights(std=0.3, seed=0)
    model.train_indexers(mode)
    return model


def sums_of(model, tokens_BS, positions_BS, is_pad_BS=None):
    found: dict[int, Selection] = {}
    inputs = Inputs(tokens_BS, positions_BS, is_pad_BS=is_pad_BS)
    hidden_BSD, _ = model.backbone(inputs, selections=found)
    return hidden_BSD, found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["deepseek_v32", "glm_moe_dsa"])
def test_the_model_computes_the_loss_of_each_layer(case, mode):
    """The scores are recomputed from a layer's inputs by the formulas, in fp64, with pads."""
    model, tokens_BS = model_of(case, mode), tokens(2, 23)
    positions_BS = torch.cat((torch.arange(9), torch.arange(14))).expand(2, -1)
    is_pad_BS = torch.zeros(2, 23, dtype=torch.bool)
    is_pad_BS[1, 19:] = True
    inputs = {}
    for i, block in enumerate(model.layers):
        block.attn.register_forward_pre_hook(lambda _, args, i=i: inputs.setdefault(i, args))
    _, found = sums_of(model, tokens_BS, positions_BS, is_pad_BS)
    owners = [i for i in range(3) if model.arch.has_indexer(i)]
    assert [*found] == owners
    for i in owners:
        x_BSD, context = inputs[i]
        attn = model.layers[i].attn
        expanded = attn.expand(x_BSD, context)
        indexed = attn.indexer(x_BSD, expanded.query_latent_BSc, context)
        visible_BSL = visible_keys(context.seen_BS2, 23)
        selected_BSL = as_mask(select_keys(indexed, context.seen_BS2, 4), 23)
        among_BSL = selected_BSL if mode == "joint" else visible_BSL
        scores_BSHL = torch.einsum("bshe,blhe->bshl", expanded.q_BSHd, expanded.k_BSHd)
        scores_BSHL = scores_BSHL * attn.scale

        def softmax(mask_BSL, scores_BSHL=scores_BSHL):
            hidden = ~mask_BSL[:, :, None]
            return scores_BSHL.masked_fill(hidden, -torch.inf).softmax(-1).mean(2)

        p_BSL = softmax(among_BSL)
        scores_BSL = index_scores(indexed.q_BShd, indexed.k_BLd, indexed.w_BSh)
        logs_BSL = scores_BSL.masked_fill(~among_BSL, -torch.inf).log_softmax(-1)
        kl_BS = torch.nn.functional.kl_div(logs_BSL, p_BSL, reduction="none").nansum(-1)
        kept_BS = (softmax(visible_BSL) * selected_BSL).sum(-1)
        torch.testing.assert_close(found[i].kl_sum, kl_BS[~is_pad_BS].sum())
        torch.testing.assert_close(found[i].kept_sum, kept_BS[~is_pad_BS].sum())
        assert 0.3 < kept_BS.mean() < 0.99
        assert found[i].keys_BSK is None or mode == "joint"


@pytest.mark.parametrize("mode", MODES)
def test_only_indexers_learn_by_it_and_only_by_it(mode):
    """Inputs are detached: the loss of the indexers has no gradient for the model, and that of the
    model none for the indexers."""
    model, tokens_BS = model_of("glm_moe_dsa", mode), tokens(2, 23)
    hidden_BSD, found = sums_of(model, tokens_BS, None)
    sum(one.kl_sum for one in found.values()).backward(retain_graph=True)
    learned = {name for name, p in model.named_parameters() if p.grad is not None}
    assert learned == {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert all(model.get_parameter(name).grad.abs().max() > 1e-9 for name in learned)
    model.zero_grad()
    hidden_BSD.square().sum().backward()
    others = {name for name, p in model.named_parameters() if p.grad is not None}
    assert not learned & others


def test_warmup_attends_to_all_keys():
    warm, tokens_BS = model_of("glm_moe_dsa", "warmup"), tokens(2, 23)
    dense = Transformer(architecture_of("glm_moe_dsa", index_topk=23)).double()
    dense.load_state_dict(warm.state_dict())
    assert torch.equal(warm(tokens_BS), dense(tokens_BS))
    sparse = model_of("glm_moe_dsa", "joint")
    frozen = model_of("glm_moe_dsa", "frozen")
    assert torch.equal(sparse(tokens_BS), frozen(tokens_BS))
    assert not torch.equal(sparse(tokens_BS), warm(tokens_BS))


def test_short_rows_keep_all_attention():
    model = model_of("deepseek_v32", "joint")
    _, found = sums_of(model, tokens(2, 4), None)
    for one in found.values():
        torch.testing.assert_close(one.kept_sum, torch.tensor(8.0, dtype=torch.float64))
        assert one.kl_sum > 0
        assert one.keys_BSK is None


def test_norm_and_weights_of_keys_are_those_of_the_formula():
    """LayerNorm with a bias and an epsilon of 1e-6, then the rotation of the first elements."""
    indexer = model_of("deepseek_v32", "joint").layers[0].attn.indexer
    x_BSD = normal(1, 9, 32)
    with torch.no_grad():
        for parameter in (indexer.k_norm.weight, indexer.k_norm.bias):
            parameter.copy_(normal(10, seed=4))
    want = layer_norm(x_BSD @ indexer.wk.weight.T, (10,), *indexer.k_norm.parameters(), 1e-6)
    torch.testing.assert_close(indexer.k_norm(indexer.wk(x_BSD)), want)


@pytest.mark.parametrize("mode", ["frozen", *MODES])
def test_modes_say_what_is_trained(mode):
    config = Config.load("debug", [f"train.indexer={mode}"], environ={})
    arch = architecture_of("glm_moe_dsa", mtp_layers=1)
    model, rules = plan_model(config, arch, torch.float32)
    trained = {name for name, rule in rules.items() if rule.trainable}
    indexers = {name for name in rules if ".indexer." in name and not name.startswith("layers.3.")}
    assert {model.layers[i].attn.indexer_mode for i in range(4)} == {mode}
    assert not any(rules[n].trainable for n in rules if n.startswith("layers.3.attn.indexer."))
    if mode == "warmup":
        assert trained == indexers
    else:
        assert trained & indexers == (indexers if mode == "joint" else set())
        assert {name for name in rules if ".indexer." not in name} <= trained


def train(folder, mode, *words):
    random_reference("deepseek_v32").save_pretrained(folder / "in")
    given = {
        "model.path": folder / "in",
        "data.source": "synthetic",
        "data.num_documents": 8,
        "data.seq_len": 24,
        "train.steps": 12,
        "train.micro_batch_size": 2,
        "train.global_batch_size": 4,
        "train.device": "cpu",
        "train.sample_tokens": 0,
        "train.indexer": mode,
        "optim.lr": 0.02,
        "compile.enabled": "no",
        "log.interval": 1,
        "output_dir": folder / "run",
    }
    config = Config.load(None, [*(f"{k}={v}" for k, v in given.items()), *words], environ={})
    Trainer(config).fit()
    rows = (folder / "run/metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, rows) if "loss" in row]


@pytest.mark.tier("long")
@pytest.mark.parametrize("mode", MODES)
def test_a_run_lowers_the_divergence_and_logs_each_layer(mode, tmp_path):
    # A model that moves fast moves its attention, too.
    fixed = ["train.freeze=embed.*,*.attn.w*,*.moe.*,*.mlp.*"] if mode == "joint" else []
    rows = train(tmp_path, mode, *fixed)
    keys = {f"indexer_{kind}/layer_{i}" for kind in ("kl", "kept") for i in range(3)}
    assert all(keys | {"indexer_kl"} <= row.keys() for row in rows)
    assert rows[-1]["indexer_kl"] < 0.8 * rows[0]["indexer_kl"]
    for row in rows:
        mean = sum(row[f"indexer_kl/layer_{i}"] for i in range(3)) / 3
        assert math.isclose(row["indexer_kl"], mean, rel_tol=1e-5)
        assert all(0 < row[f"indexer_kept/layer_{i}"] < 1 for i in range(3))
    losses = [row["loss"] for row in rows]
    assert (max(losses) - min(losses) < 0.2) == (mode == "warmup")


@pytest.mark.tier("long")
@pytest.mark.parametrize("mode", MODES)
def test_modes_give_the_single_process_answer_on_meshes(mode, tmp_path):
    meshes = [{"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "ep": 2}, {"tp": 2, "ep": 2}, {"cp": 2}]
    runs = []
    for i, degrees in enumerate(meshes):
        policy = ("none", "full", "selective")[i % 3]
        case = ("deepseek_v32", "glm_moe_dsa")[i % 2]
        one = drawn(i, 2, case, degrees, policy)
        runs.append(one._replace(words=[*one.words, f"train.indexer={mode}"]))
    check(2, runs, tmp_path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["parallel.pp=2"], "train.indexer: 'joint' contradicts parallel.pp 2 (the last stage"),
        (["lora.rank=8"], "train.indexer: 'joint' contradicts lora.rank 8 (PEFT's files hold"),
        (
            ["train.indexer=warmup", "train.mtp_weight=0.1"],
            "train.indexer: 'warmup' contradicts train.mtp_weight 0.1 (everything but",
        ),
        (
            ["model.path=", "model.preset=deepseek-v2-lite"],
            "train.indexer: 'joint', but deepseek_v2 has no indexers",
        ),
    ],
)
def test_bad_settings_of_indexers_are_refused_in_one_line(words, says, tmp_path):
    random_reference("deepseek_v32").save_pretrained(tmp_path)
    given = [f"model.path={tmp_path}", "data.source=synthetic", "train.indexer=joint", *words]
    if "model.path=" in given:
        given = [word for word in given if not word.startswith("model.path=")]
    with pytest.raises(ConfigError) as caught:
        Trainer(Config.load(None, given, environ={}))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
