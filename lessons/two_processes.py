# %% [markdown]
# # Two processes, one answer
#
# A mesh says how a model and its batches are spread over processes. It may change how fast a run
# is and how much memory it takes, but not what it computes. This lesson trains the same model for
# the same steps in one process and in two, spread in two different ways, and compares the losses.

# %%
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from moetrain.train.metrics import read_metrics

folder = Path("outputs/lessons/two_processes")

# %% [markdown]
# ## One run
#
# The command is that of the quickstart, with a smaller model. `train.global_batch_size` is the
# number of rows in a step over all processes, so a step reads the same rows however many there
# are. One process computes them in two micro-batches of four rows, two processes in one each.
#
# One loss would see this difference: the experts' balancing loss multiplies two means over a
# micro-batch. `moe.aux_loss_scope global_batch` takes them over the whole step.

# %%
settings = {
    "model.num_layers": 2,
    "model.hidden_size": 64,
    "model.moe_intermediate_size": 64,
    "data.seq_len": 128,
    "train.steps": 20,
    "train.micro_batch_size": 4,
    "train.global_batch_size": 8,
    "train.eval_interval": 0,
    "train.sample_tokens": 0,
    "checkpoint.resume": "never",
    "moe.aux_loss_scope": "global_batch",
    "log.interval": 1,
}


def train(name, *more):
    """Train in a process of its own; return its loss and its gradient norm in each step."""
    words = [f"--{key}={value}" for key, value in settings.items()]
    words += [f"--output_dir={folder / name}", *more]
    command = [sys.executable, "-m", "moetrain.train", "debug", *words]
    subprocess.run(command, check=True, capture_output=True)
    rows = [row for row in read_metrics(folder / name / "metrics.jsonl") if "loss" in row]
    return [row["loss"] for row in rows], [row["grad_norm"] for row in rows]


runs = {"one process": train("one")}

# %% [markdown]
# ## Two processes, by FSDP
#
# `--launch.nproc 2` starts two processes. By default each reads half of the rows and keeps half of
# every weight, of its gradient and of its moments. A block's weights are gathered before it runs,
# and its gradients are summed afterwards.

# %%
runs["two, FSDP"] = train("fsdp", "--launch.nproc=2")

# %% [markdown]
# ## Two processes, by expert parallelism
#
# With `--parallel.ep 2` each process has four whole experts of the eight of a layer. Tokens travel
# to the process of their experts, and the results travel back.

# %%
runs["two, expert parallelism"] = train("experts", "--launch.nproc=2", "--parallel.ep=2")

# %% [markdown]
# ## The losses, and what is left between them
#
# Sums of floating point numbers depend on their order, and two processes add in another order than
# one. So losses need not have the same bits, but they differ by no more than what fp32 rounds
# away, which is 6e-8 of a number. The lower picture has the differences, each relative to the loss
# of one process.

# %%
figure, (above, below) = plt.subplots(2, 1, figsize=(7, 5), sharex=True, layout="constrained")
losses = {name: loss for name, (loss, _) in runs.items()}
one = losses["one process"]
for (name, loss), style in zip(losses.items(), ("-", "--", ":"), strict=True):
    above.plot(range(1, len(loss) + 1), loss, style, label=name, linewidth=2)
    if name != "one process":
        differences = [a / b - 1 for a, b in zip(loss, one, strict=True)]
        below.plot(range(1, len(loss) + 1), differences, style, marker="o", label=name)
        largest = max(abs(difference) for difference in differences)
        print(f"{name}: the largest relative difference is {largest:.1e}")
        assert largest < 1e-4
above.set(xticks=range(0, 21, 5), ylabel="loss, nats a byte", title="Three runs, one curve")
below.set(xlabel="step", ylabel="relative difference", ylim=(-5e-7, 5e-7))
above.legend()
below.legend()
figure.savefig(folder / "losses-and-differences.svg")

# %% [markdown]
# The gradients agree as well. Their norms over all weights, in the first step:

# %%
for name, (_, norms) in runs.items():
    print(f"{name:24} {norms[0]:.7f}")
    assert abs(norms[0] / runs["one process"][1][0] - 1) < 1e-5

# %% [markdown]
# The project's tests compare the loss, every gradient and the norm of many meshes with one process
# in this way ([parallelism](../parallelism.md)).
#
# ## What to try next
#
# - Replace `"--parallel.ep=2"` by `"--parallel.tp=2"` (tensor parallelism), `"--parallel.cp=2"`
#   (context parallelism) or `"--parallel.pp=2"` (a pipeline of two stages).
# - Remove `"moe.aux_loss_scope"`. The balancing loss is then that of each micro-batch, so the
#   losses part by up to 5e-4 within thirty steps. A mistake in a mesh looks like this, or worse.
# - Set `"train.dtype": "bfloat16"`: how large are the differences now?
