# %% [markdown]
# # A loss of one's own
#
# An objective is a small class that turns the model's hidden states into named terms of a loss.
# This lesson writes the focal loss (arXiv 1708.02002), checks its value and its gradient against
# the formula, trains with it, and compares the result with a model trained by the usual
# cross-entropy.

# %%
import json
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from moetrain import Config, Engine, Trainer, load_hf
from moetrain.data.loader import Batch
from moetrain.models.transformer import Transformer
from moetrain.parallel.world import join_world
from moetrain.train.metrics import read_metrics
from moetrain.train.objectives import CrossEntropy, Term, token_losses
from moetrain.train.session import resolve_run

folder = Path("outputs/lessons/own_loss")

# %% [markdown]
# ## The objective
#
# The cross-entropy of a token is `-log p`, where `p` is the probability that the model gave it.
# The focal loss is `-(1 - p)^gamma log p`: tokens that are already sure hardly count.
# `token_losses` returns `-log p` for each token, without keeping the logits of the whole
# vocabulary in memory.
#
# Two rules make the loss independent of how a batch is split over micro-batches and processes. A
# term is a sum over the micro-batch divided by a count of the whole batch, which `sizes` has
# counted (`CrossEntropy` counts the targets). And a term is multiplied by `outputs.share`.


# %%
class Focal(CrossEntropy):
    """The focal loss, and the cross-entropy beside it, which is logged but not learned."""

    def __init__(self, gamma=2.0):
        self.gamma = gamma

    def terms(self, model, outputs, batch, sizes):
        loss_T = token_losses(model, outputs.hidden_BSD, batch).loss_T
        focal = ((1 - (-loss_T).exp()) ** self.gamma * loss_T).sum() * outputs.share
        plain = loss_T.detach().sum() * outputs.share
        return {
            "focal": Term(focal / sizes["targets"]),
            "cross_entropy": Term(plain / sizes["targets"], coefficient=0.0),
        }


# %% [markdown]
# ## Checked against its formula
#
# The right value comes from elsewhere: plain logits in double precision, and the formula written
# with torch's own functions. `Engine` runs two micro-batches, the formula all rows at once. The
# norm of the whole gradient says whether the gradients agree too.

# %%
sizes = {
    "model.num_layers": 2,
    "model.hidden_size": 64,
    "model.moe_intermediate_size": 64,
    "data.seq_len": 128,
    "train.micro_batch_size": 8,
    "train.global_batch_size": 8,
    "moe.aux_loss_coef": 0,
}
words = [f"{key}={value}" for key, value in sizes.items()]
config, arch = resolve_run(Config.load("debug", words))
engine = Engine(config, arch, join_world(config, arch))

tokens_BS = torch.randint(0, 256, (4, 65), generator=torch.Generator().manual_seed(0))
inputs_BS, targets_BS = tokens_BS[:, :-1], tokens_BS[:, 1:]
ends = torch.tensor([0, 64, 128], dtype=torch.int32)
halves = [Batch(inputs_BS[i : i + 2], targets_BS[i : i + 2], None, ends) for i in (0, 2)]
totals = engine.forward_backward(halves, Focal())
grad_norm = engine.step(lr=0.0).grad_norm

model = Transformer(arch)
model.load_state_dict(dict(engine.weights()))
logits_BSV = model(inputs_BS).double()
p_BS = logits_BSV.softmax(-1).gather(-1, targets_BS[..., None])[..., 0]
formula = (-((1 - p_BS) ** 2) * p_BS.log()).mean()
formula.backward()
right_norm = torch.stack([w.grad.double().norm() for w in model.parameters()]).norm()

print(f"focal loss      {totals.terms['focal'].item():.8f}, by the formula {formula.item():.8f}")
print(f"norm of its gradient {grad_norm.item():.8f}, by the formula {right_norm.item():.8f}")
assert torch.allclose(totals.terms["focal"], formula, rtol=1e-6)
assert torch.allclose(grad_norm.double(), right_norm, rtol=1e-5)

# %% [markdown]
# ## Trained
#
# `Trainer` takes the objective. The same steps are run twice, once by the usual loss. Both runs
# log `cross_entropy`, in the usual one under the name `loss`.

# %%
runs = {"cross_entropy": CrossEntropy(), "focal": Focal()}
for name, objective in runs.items():
    more = {
        "train.steps": 100,
        "train.eval_interval": 0,
        "train.sample_tokens": 0,
        "checkpoint.resume": "never",
        "checkpoint.save_hf": "yes",
        "log.interval": 5,
        "output_dir": folder / name,
    }
    config = Config.load("debug", [*words, *(f"{key}={value}" for key, value in more.items())])
    result = Trainer(config, objective=objective).fit()

# %%
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for name in runs:
    rows = [row for row in read_metrics(folder / name / "metrics.jsonl") if "loss" in row]
    curve = [row.get("cross_entropy", row["loss"]) for row in rows]
    axes.plot([row["step"] for row in rows], curve, label=f"learned by {name.replace('_', '-')}")
axes.set(xlabel="step", ylabel="cross-entropy, nats a byte", title="The same measure for both")
axes.legend()
figure.savefig(folder / "cross-entropy-of-both.svg")

# %% [markdown]
# The focal loss cares less about what is nearly sure, so its model is less sure of itself. On the
# source of one module we compare the probability of the likeliest byte with how often that byte is
# right.

# %%
text = (Path(json.__file__).parent / "decoder.py").read_bytes()[: 64 * 129]
rows = torch.tensor(list(text)).view(64, 129)

figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for name in runs:
    model = load_hf(str(folder / name / "hf"))
    with torch.no_grad():
        p_BS, best_BS = model(rows[:, :-1]).softmax(-1).max(-1)
    is_right = best_BS == rows[:, 1:]
    accuracy, confidence = is_right.float().mean(), p_BS.mean()
    print(f"{name:14} accuracy {accuracy:.3f}, mean probability {confidence:.3f}")
    axes.hist(p_BS.flatten(), bins=40, range=(0, 1), histtype="step", label=name.replace("_", "-"))
axes.set(
    xlabel="probability of the likeliest byte", ylabel="bytes", title="How sure both models are"
)
axes.legend()
figure.savefig(folder / "how-sure-both-models-are.svg")

# %% [markdown]
# ## What to try next
#
# - Set `Focal(gamma=0)`: the focal loss is the cross-entropy then, and both curves lie on each
#   other.
# - Set `coefficient=0.5` for the term `cross_entropy`, and remove `detach()`: the loss is a sum of
#   both. The check of the gradient then fails until the formula has the new term too.
# - Set `"train.micro_batch_size": 4`: two micro-batches make a step, and the losses stay the same,
#   because the terms are sums over a count of the whole batch.
