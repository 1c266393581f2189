"""Random models on random meshes, with all combinations of settings, equal one process.

A configuration is drawn by its number: sizes, family, mesh, schedule, recomputation, resharding,
frozen parts, adapters, offloading, packing, and the ranks with targets. Two processes (or as many
as are asked for) train it for two steps, and every loss, gradient norm and weight is compared with
one process's, in fp32. ``EVERYTHING`` selects configurations; by default there are a few:

    EVERYTHING=200:1000 python -m pytest tests/system/test_everything.py  200 from number 1000 on
    EVERYTHING=100:5000:4 python -m pytest tests/system/test_everything.py      on four processes

Some gradients are 0 up to rounding: keys' biases, a window of one token, a router that takes every
expert, an adapter whose other half is 0. AdamW would move these parameters by the learning rate, in
a direction that rounding decides. So its epsilon is far above any gradient here: the divisor is
nearly constant, and such parameters stay in place. No parameter begins as 0, so that each has a
size to compare its error with. Every third configuration without adapters has Muon, which adds the
epsilon to its matrices' norms. The optimizers themselves are tested in tests/optim/test_optim.py
and tests/optim/test_muon.py.
"""

import os
import random

from tests.lib.distributed import spawn
from tests.lib.random_models import (
    Drawn,
    assert_agree,
    draw_mesh,
    draw_settings,
    is_refused,
    run_all,
)

FEW = "8:0:2"
"""Two configurations for each kind of mesh of two processes."""


def draw(number, world):
    """Return the configuration of this number, which may be impossible."""
    d = random.Random(number)
    moe = d.random() < 0.7
    family = d.choice(["qwen3_moe", "mixtral"] if moe else ["llama", "qwen2", "qwen3"])
    degrees = draw_mesh(d, number, world, moe)
    sizes = draw_sizes(d, family, moe, degrees)
    own = degrees["dp_replicate"] * degrees["dp_shard"]
    micro = d.choice([1, 2, 3])
    count = d.choice([1, 2, 3]) if degrees["pp"] == 1 else d.choice([2, 4, 6])
    rows = own * micro * count
    seq_len = d.choice([6, 7, 9, 12, 13])
    words = {
        "data.seq_len": seq_len,
        "train.global_batch_size": rows,
        "activation.policy": d.choice(["none", "none", "selective", "full"]),
        "optim.max_grad_norm": d.choice([1.0, 100.0]),
        "optim.weight_decay": d.choice([0.0, 0.1]),
        "train.seed": number,
    }
    if moe:
        words |= {
            "moe.aux_loss_coef": d.choice([0.0, 0.1]),
            "moe.aux_loss_scope": d.choice(["micro_batch", "global_batch"]),
            "moe.aux_loss_layers": d.choice(["each", "pooled"]),
            "moe.z_loss_coef": d.choice([0.0, 0.01]),
            "moe.bias_update_rate": d.choice([0.0, 0.01]),
        }
    if d.random() < 0.3:
        words |= {"lora.rank": 8, "lora.rs": d.choice(["yes", "no"])}
        words |= {"moe.bias_update_rate": 0.0} if moe else {}
        whole = "layers.0.*,*.wv"  # also shared experts, whose names this family does not have
        whole = "layers.0.attn.*,*.wv" if sizes.get("shared_intermediate_size") else whole
        words["lora.targets"] = d.choice(["auto", "*.attn.*", "*.wq,*.wo", whole])
    elif d.random() < 0.4:
        patterns = [
            "embed.*",
            "layers.0.*",
            "lm_head.*",
            "*norm*",
            "*.attn.*",
            "*.w*",
            "*.router.*",
        ]
        words["train.freeze"] = ",".join(d.sample(patterns, d.choice([1, 2])))
    if number % 3 == 1 and "lora.rank" not in words:
        words["optim.name"] = "muon"
    # With the scope micro_batch the loss depends on the split: one process then has equal
    # micro-batches. Otherwise it has all rows in one.
    is_split = words.get("moe.aux_loss_coef") and words["moe.aux_loss_scope"] == "micro_batch"
    idle = d.randrange(own)
    last = {row for row in range(rows) if row // micro % own == idle}
    targetless = last if own > 1 and d.random() < 0.3 else {0} if rows > 1 else set()
    return Drawn(
        number,
        world,
        sizes,
        [f"{key}={value}" for key, value in words.items()],
        [
            f"train.micro_batch_size={micro}",
            *draw_settings(d, degrees, sizes["num_layers"], words.get("optim.name")),
        ],
        [f"train.micro_batch_size={micro * own if is_split else rows}"],
        rows,
        tuple(sorted(targetless)),
        d.random() < 0.5,
        d.random() < 0.4,
    )


def draw_sizes(d, family, moe, degrees):
    """Draw sizes that are odd where possible."""
    tp, layers = degrees["tp"], d.choice([1, 2, 3, 5] if degrees["pp"] == 1 else [2, 3, 5])
    cp = degrees["cp"]
    groups = tp * d.choice([1, 2, 3] if cp == 1 else [1, cp, 2 * cp, 3])
    whole = cp if groups % (tp * cp) else 1  # with fewer key heads than ranks, each rank has a copy
    sizes = {
        "family": family,
        "vocab_size": d.choice([37, 41, 50, 131]),
        "hidden_size": d.choice([8, 24, 40] if moe else [10, 23, 36]),
        "num_layers": layers,
        "num_heads": groups * whole * d.choice([1, 2, 3]),
        "num_kv_heads": groups,
        "head_dim": d.choice([2, 4, 6, 10]),
        "intermediate_size": tp * d.choice([5, 11, 14]),
        "tie_embeddings": d.random() < 0.4,
        "qk_norm": family.startswith("qwen3"),
        "qkv_bias": family == "qwen2" or d.random() < 0.2,
        "out_bias": family == "llama" and d.random() < 0.3,
        "mlp_bias": family == "llama" and d.random() < 0.3,
    }
    if sizes["qk_norm"]:  # a norm over two elements near 0 magnifies any rounding
        sizes["head_dim"] = max(4, sizes["head_dim"])
    windows = [d.choice([None, None, 1, 3]) for _ in range(layers)]
    if family == "mixtral":
        windows = windows[:1] * layers
    sizes["sliding_windows"] = () if family == "llama" else tuple(windows)
    if moe:
        experts = degrees["ep"] * d.choice([1, 2, 3, 5])
        sizes |= {
            "num_experts": experts,
            "num_experts_per_token": d.randint(1, min(experts, 4)),
            "moe_intermediate_size": d.choice([8, 24]),
        }
    if family == "qwen3_moe":
        sizes["norm_topk_prob"] = d.random() < 0.5
        routed = [d.random() < 0.7 for _ in range(layers)]
        sizes["moe_layers"] = tuple(routed) if any(routed) else ()
        sizes |= draw_variant(d, sizes)
    return sizes


def draw_variant(d, sizes):
    """Draw features of other families of mixtures of experts, one by one or together."""
    groups = d.choice([n for n in (1, 1, 2, 3) if sizes["num_experts"] % n == 0])
    size, chosen = sizes["num_experts"] // groups, sizes["num_experts_per_token"]
    return {
        "router_score": d.choice(["softmax", "sigmoid"]),
        "router_min_sum": d.choice([0.0, 0.0, 1e-20, 0.7]),
        "router_sum_eps": d.choice([0.0, 0.0, 1e-6, 0.3]),
        "router_fp32": d.random() < 0.5,
        "selection_bias": d.random() < 0.5,
        "num_expert_groups": groups,
        "topk_expert_groups": d.randint(-(-chosen // size), groups),
        "routed_scaling_factor": d.choice([1.0, 2.5]),
        "shared_intermediate_size": d.choice([0, 0, 3, 24]),
        "shared_gate": d.random() < 0.5,
        "qk_norm": d.random() < 0.7,
        "qk_norm_of": d.choice(["head", "width", "rotated"]),
        "partial_rotary_factor": d.choice([1.0, 2 / sizes["head_dim"]]),
        "rope_interleaved": d.random() < 0.3,
    }


def test_everything_together_gives_the_single_process_answer(tmp_path):
    count, first, world = map(int, f"{os.environ.get('EVERYTHING', FEW)}:2".split(":")[:3])
    drawn, number = [], first
    while len(drawn) < count:
        one = draw(number, world)
        number += 1
        drawn += [] if is_refused(one) else [one]
        assert number - first < 10 * count + 10, "nearly all are refused"
    note, answers = tmp_path / "running", []
    try:
        answers = spawn(world, run_all, drawn, str(note), timeout=40 + 5 * count)[0]
    finally:
        if not answers:
            print("failed at", note.read_text() if note.exists() else "the start")
    assert_agree(drawn, answers)
    agree = sum(found is not None for found in answers)
    print(f"{agree} configurations agree; {number - first - agree} were refused")
    assert agree >= count / 2
