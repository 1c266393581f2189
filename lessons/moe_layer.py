# %% [markdown]
# # A MoE layer from the inside
#
# A Mixture-of-Experts layer has many small MLPs, its experts, and a router that chooses a few of
# them for each token. This lesson trains a small model for a moment, takes one of its MoE layers,
# and looks at each part: the router's probabilities, the loads of the experts, the loss that
# balances them, and the permutation that sorts tokens by expert. At the end a plain loop computes
# the same layer with the same numbers.

# %%
import inspect
import json
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import moetrain
from moetrain.kernels.experts.permutation import expert_indices
from moetrain.losses.balancing import load_balancing_loss

folder = Path("outputs/lessons/moe_layer")

# %% [markdown]
# ## A small model
#
# The recipe `debug` learns the source text of Python's standard library, byte by byte. Here the
# model has two layers with eight experts each, and every token uses two experts. Forty steps
# suffice for a router that has begun to prefer.

# %%
settings = {
    "model.num_layers": 2,
    "model.hidden_size": 64,
    "model.moe_intermediate_size": 64,
    "data.seq_len": 128,
    "train.steps": 40,
    "train.micro_batch_size": 8,
    "train.global_batch_size": 8,
    "train.eval_interval": 0,
    "train.sample_tokens": 0,
    "checkpoint.resume": "never",
    "checkpoint.save_hf": "yes",
    "log.interval": 20,
    "output_dir": folder / "run",
}
config = moetrain.Config.load("debug", [f"{key}={value}" for key, value in settings.items()])
moetrain.Trainer(config).fit()
model = moetrain.load_hf(str(folder / "run" / "hf"))

# %% [markdown]
# ## What the layer reads
#
# A token is a byte here. The layer reads what the rest of the model makes of the tokens: a vector
# of `D` numbers for each of `T` tokens. A hook keeps it. Names end with the letters of their
# dimensions: `x_TD` has `T` rows and `D` columns.

# %%
layer = model.layers[1].moe
seen = []
layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, 1)))


def read_by_layer(rows):
    """Return the vectors that the layer reads, one for each token of equally long texts."""
    seen.clear()
    with torch.no_grad():
        model(torch.tensor([list(row.encode()) for row in rows]))
    return seen[0]


text = "def add(a, b):\n    return a + b"
x_TD = read_by_layer([text])
print("x_TD", tuple(x_TD.shape))

# %% [markdown]
# ## Router probabilities
#
# The router is one matrix. Its product with a token gives a logit for each expert, and the softmax
# of the logits gives probabilities. The two largest are chosen, and their probabilities are
# divided by their sum: these are the weights of the two experts. `layer.router` returns the same
# choice.

# %%
with torch.no_grad():
    routed = layer.router(x_TD)
probs_TE = (x_TD @ layer.router.weight.T).softmax(-1)
top_TK, ids_TK = probs_TE.topk(2)
weights_TK = top_TK / top_TK.sum(-1, keepdim=True)

assert torch.equal(ids_TK, routed.ids_TK.long())
print("experts of the first three tokens:", ids_TK[:3].tolist())
print("their weights:", [[round(w, 3) for w in row] for row in weights_TK[:3].tolist()])
print("largest difference of weights:", (weights_TK - routed.weights_TK).abs().max().item())

# %%
figure, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
picture = axes.imshow(probs_TE.T.detach(), cmap="Blues", aspect="auto")
for token, experts in enumerate(ids_TK.tolist()):
    axes.plot([token, token], experts, "o", color="tab:orange", markersize=4)
axes.set_xticks(range(len(text)), [repr(c)[1:-1] if c != " " else "␣" for c in text], fontsize=8)
axes.set(yticks=range(8), xlabel="token", ylabel="expert")
axes.set_title("Router probabilities; dots are the two experts that a token uses")
figure.colorbar(picture, label="probability")
folder.mkdir(parents=True, exist_ok=True)
figure.savefig(folder / "router-probabilities.svg")

# %% [markdown]
# ## Loads of experts
#
# The load of an expert is the number of tokens that chose it. Experts that nobody chooses learn
# nothing, and on several GPUs the busiest expert decides how long a step takes. We count over a
# longer text, Python's own `json` module in rows of 128 bytes, which is how the model was trained.

# %%
source = inspect.getsource(json)
x_TD = read_by_layer([source[i : i + 128] for i in range(0, 8192, 128)])
with torch.no_grad():
    routed = layer.router(x_TD)
num_tokens, loads_E = len(x_TD), routed.counts_E
mean_prob_E = (x_TD @ layer.router.weight.T).softmax(-1).mean(0).detach()

figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
axes.bar(range(8), loads_E / loads_E.sum(), width=0.4, align="edge", label="share of the choices")
axes.bar(range(8), mean_prob_E, width=-0.4, align="edge", label="mean probability")
axes.axhline(1 / 8, color="black", linestyle="--", linewidth=1, label="equal shares")
axes.set(xticks=range(8), xlabel="expert", ylabel="share", title=f"Experts of {num_tokens} tokens")
axes.margins(y=0.3)
axes.legend(ncols=3)
figure.savefig(folder / "loads-of-experts.svg")
print("loads:", loads_E.tolist())

# %% [markdown]
# ## The loss that balances
#
# The load itself has no gradient, since a choice is a choice. The balancing loss multiplies each
# expert's load by its mean probability, which has one: `E * sum_e f_e * P_e`, where `f_e` is the
# share of tokens that chose expert `e` and `P_e` its mean probability. With equal loads it is the
# number of experts a token, here 2. If two experts got every token, it would be 8. The setting
# `moe.aux_loss_coef` is its weight in the loss of training.

# %%
by_hand = 8 * (loads_E / num_tokens * mean_prob_E).sum()
by_library = load_balancing_loss(loads_E[None], routed.prob_sum_E[None], num_tokens)
print(f"balancing loss: {by_hand:.6f} by hand, {by_library:.6f} by the library")
assert torch.allclose(by_hand, by_library)

# %% [markdown]
# ## The permutation
#
# An expert's MLP is two matrix products, which are fast if all its tokens lie together. So each
# token is copied once for each of its experts, and the copies are sorted by expert. The library's
# `expert_indices` makes both maps: `row_slot_R` says which copy is in a row, and `slot_row_TK` in
# which row the copies of a token are.

# %%
indices = expert_indices(routed.ids_TK, num_experts=8)
few = expert_indices(routed.ids_TK[:4], num_experts=8)
print("experts of four tokens:", routed.ids_TK[:4].tolist())
print("their rows:            ", few.slot_row_TK.tolist())
print("token of each row:     ", (few.row_slot_R // 2).tolist())

# %%
shown = expert_indices(routed.ids_TK[:60], num_experts=8)
token_R = shown.row_slot_R // 2
expert_R = routed.ids_TK[:60].flatten()[shown.row_slot_R.long()]
figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
axes.scatter(range(120), token_R, c=expert_R, cmap="tab10", vmin=0, vmax=9, s=14)
for expert, (end, count) in enumerate(zip(shown.offsets_E, shown.counts_E, strict=True)):
    axes.axvline(end - 0.5, color="lightgrey", linewidth=1, zorder=0)
    if count > 2:
        axes.text(end - count / 2, 63, str(expert), ha="center")
axes.set(xlabel="row, sorted by expert", ylabel="token", ylim=(-3, 70))
axes.set_title("Rows of 60 tokens: each token has two, the numbers name the experts")
figure.savefig(folder / "permutation.svg")

# %% [markdown]
# ## The same layer by a plain loop
#
# Nothing else is left. For each expert: take its tokens, compute its MLP (SwiGLU: the SiLU of the
# gate times the up projection, then the down projection), multiply by the weight, and add to the
# result of the token. The library computes all experts at once on the sorted rows.

# %%
experts = layer.experts


def by_loop(x_TD, routed):
    y_TD = torch.zeros_like(x_TD)
    for expert in range(8):
        tokens, slots = (routed.ids_TK == expert).nonzero(as_tuple=True)
        gate, up = (x_TD[tokens] @ experts.w_gate_up[expert].T).chunk(2, dim=-1)
        result = (torch.nn.functional.silu(gate) * up) @ experts.w_down[expert].T
        y_TD = y_TD.index_add(0, tokens, result * routed.weights_TK[tokens, slots, None])
    return y_TD


def by_library(x_TD, routed):
    return layer.through_experts(x_TD, routed).y_TD


found = {}
for compute in (by_loop, by_library):
    model.zero_grad()
    y_TD = compute(x_TD, layer.router(x_TD))
    y_TD.square().sum().backward()
    weights = experts.w_gate_up, experts.w_down, layer.router.weight
    found[compute] = [y_TD.detach(), *(weight.grad.clone() for weight in weights)]

names = ["result", "gradient of w_gate_up", "gradient of w_down", "gradient of the router"]
for name, loop, library in zip(names, found[by_loop], found[by_library], strict=True):
    difference = (loop - library).abs().max() / loop.abs().max()
    print(f"{name}: largest {loop.abs().max():.4f}, largest difference relative {difference:.1e}")
    assert difference < 1e-5

# %% [markdown]
# Results and gradients agree up to rounding in fp32, about seven digits.
#
# ## What to try next
#
# - Add `"moe.aux_loss_coef": 0` to the settings. Nothing balances the experts then: look at the
#   loads again, and at the balancing loss.
# - Set `"train.steps": 1`. The router has learned nothing yet: its probabilities are nearly equal.
# - Take the first layer, `model.layers[0].moe`. What it routes by is closer to the byte itself.
