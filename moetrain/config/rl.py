"""The section ``rl``: what reinforcement learning optimises, and how its loop runs.

A file of its own, as the other sections are about training of any kind. The formulas that the
choices stand for are in :mod:`moetrain.rl.losses` and :mod:`moetrain.rl.advantages`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from moetrain.config.sources import ConfigError, Section

PolicyName = Literal["clip", "gspo", "cispo", "reinforce"]
SleepName = Literal["never", "cache", "all"]
AdvantageName = Literal["dr_grpo", "grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"]

# 1 - low and 1 + high bound the ratio. Clip: PPO's, with DAPO's higher upper one; GSPO's are of
# means over a sequence; CISPO has no lower bound, and the upper one of ScaleRL.
CLIP_RANGES: dict[PolicyName, tuple[float, float]] = {
    "clip": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
    "reinforce": (1.0, 4.0),  # bounds nothing; what the clip share then counts
}


class RlSection(Section):
    """Reinforcement learning: loss, advantages and loop."""

    policy: PolicyName = "clip"
    """The policy's loss. clip: PPO's and GRPO's clipped ratio, a token at a time; gspo: a ratio of
    whole sequences; cispo: every token learns, with its ratio clipped as a weight; reinforce: log-
    probability times advantage, no ratio."""
    clip_low: float | None = Field(default=None, ge=0, le=1)
    """Ratios below 1 - this are clipped; unset: 0.2 of clip, 3e-4 of gspo, 1 (none) of cispo."""
    clip_high: float | None = Field(default=None, ge=0)
    """Ratios above 1 + this are clipped; unset: 0.28 of clip, 4e-4 of gspo, 4 of cispo."""
    dual_clip: float | None = Field(default=None, gt=1)
    """clip alone: with a negative advantage the ratio counts for no more than this; unset: no
    bound (3 is common)."""
    ratio: Literal["current", "proximal", "rollout"] = "proximal"
    """What probabilities are divided by. current: themselves, so the ratio is 1 (one update a
    rollout); proximal: the trainer's own before the update (a forward pass more where generation's
    bits differ from the trainer's); rollout: those that generation reported."""
    importance: Literal["auto", "none", "token", "sequence"] = "auto"
    """Weights proximal / rollout probability, where generation's differ from the trainer's. token:
    each token's; sequence: the product over a sample; auto: token, or none with rl.ratio rollout,
    whose ratio has them already."""
    importance_how: Literal["truncate", "mask"] = "truncate"
    """truncate: weights above rl.importance_high count as that; mask: what lies outside
    [rl.importance_low, rl.importance_high] is not trained and leaves every denominator."""
    importance_low: float = Field(default=0.0, ge=0)
    """The smallest weight that mask keeps."""
    importance_high: float = Field(default=2.0, gt=0)
    """The largest weight."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference policy (the initial weights); 0: none."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Its estimator, of d = log(policy / reference). k1: d; k2: d^2 / 2; k3: exp(-d) - 1 + d."""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: a term of its own; reward: taken off each trajectory's reward, before advantages."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy, which is then maximised too."""
    aggregation: Literal["token", "sequence", "fixed"] = "token"
    """How tokens make a loss. token: mean over all of the global batch; sequence: mean over samples
    of the mean over each one's tokens; fixed: sum over tokens / (samples x rl.max_tokens), which
    favours no length (Dr. GRPO)."""
    advantage: AdvantageName = "dr_grpo"
    """A reward's advantage over its group. dr_grpo: over the mean; grpo: that over the standard
    deviation; rloo: over the mean of the others; reinforce_pp: normalised over the global batch,
    whatever the group; reinforce_pp_baseline: over the group's mean, and then that."""
    overlong: Literal["keep", "mask", "drop"] = "keep"
    """Trajectories that reached rl.max_tokens before their end. mask: they count for their group's
    advantages and are not trained; drop: neither. Failed ones are always dropped."""
    temperature: float = Field(default=1.0, gt=0)
    """Of sampling, and of the probabilities that are trained."""
    max_tokens: int = Field(default=64, gt=0)
    """Tokens that the policy may write in one trajectory."""

    env: str = "sort"
    """What is learned. yes_no_maybe, sort, arithmetic, calculator: made up as they are asked for;
    jsonl: the lines of rl.prompts; reasoning-gym:TASK; or FILE.py:NAME, called with a
    moetrain.rl.envs.Prompts and the arguments of rl.env_args: an Environment."""
    env_args: str | None = None
    """Arguments of the environment, as a JSON object: {"most": 6}."""
    prompts: str | None = None
    """jsonl file of rl.env jsonl: lines with prompt or messages, and what the reward needs."""
    reward: str | None = None
    """Reward of rl.env jsonl. exact: equal to the line's answer; math: of the same value (by
    math-verify); or FILE.py:FUNCTION, called with the line and the text of the answer."""
    chat: bool = False
    """Give prompts as a user's turn, by the tokenizer's chat template."""
    step_timeout: float = Field(default=60.0, gt=0, le=1e6)  # a lock's wait ends somewhere
    """Seconds in which an environment must answer; else its trajectory is dropped."""
    max_turns: int = Field(default=8, gt=0)
    """Turns of the policy in one trajectory."""
    group_size: int = Field(default=8, gt=0)
    """Trajectories of one prompt. A step has train.global_batch_size trajectories for each of its
    updates."""
    updates_per_rollout: int = Field(default=1, gt=0)
    """Optimizer steps in one step of the run, each on a part of its groups."""
    max_staleness: int = Field(default=0, ge=0)
    """Steps by which generation may run ahead. 0: every trajectory is made by the weights that it
    trains; s: prompts are begun s steps before theirs and go on over the updates between. Training
    and generation take turns on the same devices all the same: what this gives is that a step does
    not wait with few sequences for its longest one, as those of later steps are generated beside
    it."""
    resample: int = Field(default=0, ge=0)
    """Rounds in which groups that teach nothing (rewards all equal) are replaced by further prompts
    (dynamic sampling, arXiv 2503.14476)."""
    supervised_steps: int = Field(default=0, ge=0)
    """Of train.steps, the first ones, which learn the environment's demonstrations."""
    supervised_lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of these; unset: optim.lr."""
    eval_tasks: int = Field(default=64, ge=0)
    """Tasks held out, on which the policy is evaluated every train.eval_interval steps."""
    eval_temperature: float = Field(default=0.0, ge=0)
    """Of sampling in evaluations; 0: the likeliest token, always."""
    offload: bool = False
    """Keep the optimizer's moments in host memory while trajectories are generated, and give the
    memory of gradients back: 8 bytes, and with several devices 12, for every parameter of a
    device's share, for the time that copying the moments takes."""
    routing_replay: bool = False
    """Train with the experts that generation chose for each token (arXiv 2510.11370), weighted by
    the router's scores as they are: for generation whose bits are not the trainer's."""
    max_sequences: int = Field(default=64, gt=0)
    """Trajectories that one rank generates at once; others wait."""
    cache_tokens: int | None = Field(default=None, gt=0)
    """Tokens in one rank's key/value cache; unset: rl.max_sequences rows of data.seq_len."""
    sleep: Literal["auto", "never", "cache", "all"] = "auto"
    """What of generation's memory is given back while weights are updated. cache: keys and values;
    all: its copy of the weights too; auto: the least with which the estimate fits the device. On
    CUDA what comes back lies elsewhere, so graphs are captured again at every step."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """The least and the largest ratio that is not clipped."""
        low, high = CLIP_RANGES[self.policy]
        low = low if self.clip_low is None else self.clip_low
        return 1 - low, 1 + (high if self.clip_high is None else self.clip_high)

    @property
    def importance_of(self) -> Literal["none", "token", "sequence"]:
        """What ``importance`` means with ``ratio``."""
        if self.importance == "auto":
            return "none" if self.ratio == "rollout" else "token"
        return self.importance

    def check(self) -> None:
        """What contradicts within the section.

        Raises:
            ConfigError: two settings exclude each other.
        """
        if self.policy == "reinforce" and (self.clip_low, self.clip_high) != (None, None):
            name = "clip_high" if self.clip_low is None else "clip_low"
            raise ConfigError(
                f"rl.{name}",
                f"{getattr(self, name)} contradicts rl.policy 'reinforce', which has no ratio to "
                "clip; unset one",
            )
        if self.ratio == "rollout" and self.importance_of != "none":
            raise ConfigError(
                "rl.importance",
                f"{self.importance!r} contradicts rl.ratio 'rollout', which has these weights in "
                "it already; use none or auto, or another rl.ratio",
            )
        if self.importance_low >= self.importance_high:
            raise ConfigError(
                "rl.importance_low",
                f"{self.importance_low} is not below rl.importance_high {self.importance_high}",
            )
        for name in ("kl", "kl_in"):
            value = getattr(self, name)
            if not self.kl_coef and value != type(self).model_fields[name].default:
                raise ConfigError(
                    f"rl.{name}", f"{value!r} contradicts rl.kl_coef 0, no KL; unset one"
                )
        if self.kl == "k1" and self.kl_in == "loss":
            raise ConfigError(
                "rl.kl",
                "'k1' contradicts rl.kl_in 'loss': its gradient is 0 in expectation; use k2 or k3, "
                "or rl.kl_in reward",
            )
        if self.group_size == 1 and self.advantage != "reinforce_pp":
            raise ConfigError(
                "rl.group_size",
                f"1 contradicts rl.advantage {self.advantage!r}, which compares within a group; "
                "use 2 or more, or reinforce_pp",
            )
