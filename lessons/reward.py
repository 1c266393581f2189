# %% [markdown]
# # A reward and a curve
#
# In reinforcement learning nobody shows the model what to write. It writes, a program says how
# good that was, and the model makes what was better than average likelier. This lesson defines a
# task with a reward, trains a small model on it from scratch, and draws the reward over the steps.
# Then it asks whether the probabilities with which the model wrote are those that training
# computes.

# %%
from pathlib import Path

import matplotlib.pyplot as plt

from moetrain import Config
from moetrain.rl.loop import RlTrainer
from moetrain.train.metrics import read_metrics

folder = Path("outputs/lessons/reward")
folder.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## An environment of one's own
#
# A task is a prompt and a way to score what follows it. Here every task is the same: write as many
# different small letters as eight bytes hold. The reward is their number divided by eight. A model
# that knows nothing chooses among 264 tokens and gets about 0.1. No answer is shown to it, and
# there is no single right one.
#
# The environment is a file, so that every process of a run can import it.

# %%
(folder / "letters.py").write_text('''
from moetrain.rl.envs import Problem, TextEnvironment


class Letters(TextEnvironment):
    """Rewards the share of eight bytes that are small letters, each counted once."""

    def problem(self, task: int) -> Problem:
        return Problem(f"{task}: ")

    def score(self, problem: Problem, answer: str) -> float:
        return len({letter for letter in answer if "a" <= letter <= "z"}) / 8
''')

# %% [markdown]
# ## Training
#
# A step takes 8 prompts, writes 16 answers to each, and compares the answers to one prompt with
# each other. The settings lie over those of the recipe `rl-sort`; there are no demonstrations
# here, so `rl.supervised_steps` is 0.

# %%
settings = {
    "model.num_layers": 2,
    "model.hidden_size": 64,
    "model.moe_intermediate_size": 64,
    "data.seq_len": 64,
    "rl.env": f"{folder / 'letters.py'}:Letters",
    "rl.supervised_steps": 0,
    "rl.max_tokens": 8,
    "rl.group_size": 16,
    "rl.eval_tasks": 16,
    "rl.eval_temperature": 1,
    "train.steps": 40,
    "train.micro_batch_size": 8,
    "train.global_batch_size": 128,
    "train.eval_interval": 10,
    "optim.lr": 3e-3,
    "checkpoint.resume": "never",
    "log.interval": 1,
    "output_dir": folder / "run",
}
words = [f"{key}={value}" for key, value in settings.items()]
RlTrainer(Config.load("rl-sort", words)).fit()

# %% [markdown]
# ## The reward
#
# A policy that draws each byte from the 26 letters, without a look at what it has written already,
# gets `26 * (1 - (25 / 26) ** 8) / 8` on average. That is the dashed line. To go beyond it the
# model has to look back.

# %%
rows = read_metrics(folder / "run" / "metrics.jsonl")
trained = [row for row in rows if "reward" in row]
held_out = [row for row in rows if "eval_reward" in row]
blind = 26 * (1 - (25 / 26) ** 8) / 8


def curve(rows, key):
    return [row["step"] for row in rows], [row[key] for row in rows]


figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
axes.plot(*curve(trained, "reward"), label="training")
axes.plot(*curve(held_out, "eval_reward"), "o", label="held-out prompts")
axes.axhline(blind, color="black", linestyle="--", linewidth=1, label="any letters")
axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="Different letters, of eight")
axes.legend(loc="lower right")
figure.savefig(folder / "reward.svg")
print(f"reward: {trained[0]['reward']:.2f} in step 1, {trained[-1]['reward']:.2f} in the last")

# %% [markdown]
# The run writes some held-out answers at each evaluation. What the policy wrote is in brackets.

# %%
for step in (0, 40):
    text = (folder / "run" / "completions" / f"step-{step:08}.txt").read_text()
    shown = "".join(c if c.isprintable() or c == "\n" else "·" for c in text)
    print(f"step {step}:", *[line for line in shown.split("\n") if "[[" in line][:4], sep="\n  ")

# %% [markdown]
# ## Does generation match training?
#
# The update assumes that the answers were drawn with the probabilities that training computes.
# Many systems generate with one engine and train with another, which differ; then the update is of
# another policy than the one that wrote. Here both run the same model. Each step compares the
# log-probability that generation reported for a token with the trainer's own: `mismatch` is the KL
# divergence between them in nats a token, and `mismatch_share` the share of tokens whose two
# values differ in any bit.
#
# On a Hopper GPU in bf16 both are exactly 0: a token has the same bits there whatever else is in
# the batch, and 0 of 149,682 log-probabilities of a real model differed
# ([how](../precision.md#rollouts-with-trainings-bits)). The matrix products of a CPU do not keep
# this: they add in an order that depends on the size of the batch. What is left here is the
# rounding of fp32 in the last bits.

# %%
compared = [row for row in trained if row["mismatch"] is not None]
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
axes.plot(*curve(compared, "mismatch"), label="generation and training")
axes.axhline(1e-3, color="tab:red", linestyle="--", label="still healthy")
axes.set_yscale("symlog", linthresh=1e-15)
axes.set(xlabel="step", ylabel="KL, nats a token", ylim=(0, 1), title="Mismatch")
axes.set_yticks([0, 1e-15, 1e-12, 1e-9, 1e-6, 1e-3, 1])
axes.legend(loc="center right")
figure.savefig(folder / "mismatch.svg")
largest = max(row["mismatch"] for row in compared)
share = sum(row["mismatch_share"] for row in compared) / len(compared)
print(f"largest mismatch {largest:.1e} nats a token; tokens with other bits: {share:.1%}")
assert largest < 1e-6

# %% [markdown]
# ## What to try next
#
# - Replace the set `{letter for ...}` by a list: letters count as often as they come. How does the
#   model earn its reward now?
# - Set `"train.steps": 200`. Does the reward pass the dashed line?
# - Set `"rl.generator_dtype": "nf4"`: the generator has its experts in four bits. What does that
#   do to the mismatch, and to the reward? The last assertion then fails, as it should.
