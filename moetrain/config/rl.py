"""The sections ``rl`` (the objective and the loop of reinforcement learning) and ``jobs``.

The formulas behind the choices are in :mod:`moetrain.losses.policy`.
"""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from moetrain.config.sections import MaybePath, Section

_PolicyName = Literal["clip", "gspo", "cispo", "dppo_tv", "dppo_kl", "reinforce"]
SleepName = Literal["never", "cache", "all"]
CacheName = Literal["expanded", "latent"]

# The bounds of the ratio are 1 - low and 1 + high. clip has PPO's lower bound and DAPO's upper
# bound, which is higher. gspo has GSPO's bounds, for means over a sequence. cispo has no lower
# bound, and ScaleRL's upper bound. dppo has DPPO's bounds of the divergence, downwards and upwards.
# reinforce clips nothing. It is given the bounds of clip, and does not use them.
_CLIP_RANGES: dict[_PolicyName, tuple[float, float]] = {
    "clip": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
    "dppo_tv": (0.15, 0.15),
    "dppo_kl": (0.05, 0.05),
}
_MASK_RANGES = {
    "none": (0.0, float("inf")),
    "token": (0.5, 5.0),  # the bounds of IcePop
    "sequence": (0.0, 2.0),
    "geometric": (0.999, 1.001),
}


class RlSection(Section):
    """Reinforcement learning: loss, advantages, environment and training loop (python -m
    moetrain.rl)."""

    policy: _PolicyName = "clip"
    """Loss of the policy. There is no critic; rl.advantage names the baseline. clip: the clipped
    ratio of PPO and GRPO, for each token; gspo: a clipped ratio of whole sequences; cispo: every
    token is trained, weighted by its clipped ratio; dppo_tv, dppo_kl: the ratio without clipping,
    but tokens are left out if their probability has already moved too far in the direction of the
    advantage, by total variation or KL (DPPO; its paper uses rl.ratio rollout); reinforce:
    log-probability times advantage, without a ratio."""
    clip_low: float | None = Field(default=None, ge=0, le=1)
    """Ratios below 1 - clip_low are clipped. dppo leaves out tokens of negative advantage whose
    probability has fallen too far: their divergence is above clip_low. Unset: 0.2 for clip, 3e-4
    for gspo, 1 (never) for cispo, 0.15 for dppo_tv, 0.05 for dppo_kl."""
    clip_high: float | None = Field(default=None, ge=0)
    """Ratios above 1 + clip_high are clipped. dppo leaves out tokens of positive advantage whose
    probability has risen too far: their divergence is above clip_high. Unset: 0.28 for clip, 4e-4
    for gspo, 4 for cispo, 0.15 for dppo_tv, 0.05 for dppo_kl."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Largest ratio for tokens of negative advantage, with rl.policy clip; larger ratios count as
    this one. Unset: no bound. 3 is common."""
    ratio: Literal["current", "proximal", "rollout"] = "proximal"
    """Denominator of the ratio. current: the current probabilities, so that the ratio is 1 (for one
    update per rollout); proximal: the trainer's probabilities before the update, which take one
    more forward pass if generation's bits differ from the trainer's; rollout: the probabilities
    that generation reported."""
    importance: Literal["auto", "none", "token", "sequence"] = "auto"
    """Importance weights (proximal probability / rollout probability), which correct for generation
    whose bits differ from the trainer's. none: no weights; token: one weight for each token;
    sequence: the product of these over a sample; auto: token, or none with rl.ratio rollout, whose
    ratio contains them."""
    importance_high: float = Field(default=2.0, gt=0)
    """Upper bound of the importance weights. Larger weights are clipped to it."""
    mask: Literal["none", "token", "sequence", "geometric"] = "none"
    """Leave out tokens whose ratio of proximal to rollout probability is below rl.mask_low or above
    rl.mask_high. They are neither trained nor counted. token: by the ratio of each token; sequence,
    geometric: by the product or the geometric mean of the ratios of a sample, which is left out as
    a whole."""
    mask_low: float | None = Field(default=None, ge=0, le=1)
    """Smallest ratio that rl.mask keeps; unset: 0.5 for token, 0 for sequence, 0.999 for
    geometric."""
    mask_high: float | None = Field(default=None, ge=1)
    """Largest ratio that rl.mask keeps; unset: 5 for token, 2 for sequence, 1.001 for geometric."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference policy, which has the initial weights; 0: no
    KL."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL, with d = log(policy / reference). k1: d; k2: d^2 / 2; k3: exp(-d) - 1 +
    d."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Place where the KL divergence enters. loss: it is a term of the loss; reward: it is
    subtracted from each trajectory's reward before advantages are computed."""
    teacher: MaybePath = None
    """Model with the same tokenizer that judges each token that the policy writes (on-policy
    distillation). It teaches in addition to the rewards or, with rl.advantage none, alone. The
    value is a folder or hub id, which is loaded and split on the policy's ranks like the policy, or
    the URL http://HOST:PORT of a server (python -m moetrain.serve, vLLM)."""
    teacher_coef: float = Field(default=1.0, gt=0)
    """Weight of the KL divergence of the policy from the teacher."""
    teacher_top_k: NonNegativeInt = 0
    """0: the log-ratio of policy to teacher is subtracted from each token's advantage. k: the loss
    has the divergence over the teacher's k likeliest tokens, where all other tokens count as
    one."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy in the loss, which maximises it; 0: the entropy is only logged."""
    aggregation: Literal["token", "sequence", "fixed"] = "token"
    """Formula that combines the losses of tokens. token: the mean over all tokens of the global
    batch; sequence: the mean over samples of each sample's own mean; fixed: the sum over tokens /
    (samples x rl.max_tokens), which favours no length (Dr. GRPO)."""
    advantage: Literal[
        "dr_grpo", "grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "none"
    ] = "dr_grpo"
    """Formula that makes advantages of rewards. dr_grpo: reward minus the group's mean; grpo: as
    dr_grpo, divided by the group's standard deviation; rloo: reward minus the mean of the group's
    other rewards; reinforce_pp: reward normalised over the global batch, without regard to groups;
    reinforce_pp_baseline: reward minus the group's mean, then normalised over the global batch;
    none: rewards are only logged, and rl.teacher teaches alone."""
    overlong: Literal["keep", "mask", "drop"] = "keep"
    """Treatment of trajectories that rl.max_tokens cut off. keep: they are treated like others;
    mask: they count for advantages but are not trained; drop: they do neither. Failed trajectories
    are always dropped."""
    overlong_buffer: NonNegativeInt = 0
    """Length of the zone below rl.max_tokens in which long trajectories are punished (DAPO's soft
    overlong punishment, arXiv 2503.14476). For each token that the policy writes beyond
    rl.max_tokens - N, 1 / N is subtracted from the trajectory's reward before advantages are
    computed: 1 at rl.max_tokens. Logged rewards of training contain this, evaluations do not. At
    most rl.max_tokens; 0: no punishment."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of sampling, and of the probabilities that are trained."""
    max_tokens: PositiveInt = 64
    """Largest number of tokens that the policy writes in one trajectory."""
    env: str = "sort"
    """Environment to learn in. sort, arithmetic: tasks that are made up on demand; jsonl: tasks
    from the lines of rl.prompts; reasoning-gym:TASK; agent:FILE.py:NAME: a function that takes a
    task (a line of rl.prompts, or a number) and the base URL of an OpenAI endpoint, and returns the
    reward; FILE.py:NAME: a callable that takes a moetrain.rl.envs.Prompts and the arguments of
    rl.env_args, and returns an Environment."""
    env_args: str | None = None
    """Arguments of the environment, as a JSON object such as {"most": 6}."""
    prompts: str | None = None
    """File of tasks for rl.env jsonl or agent. Each line has a prompt or messages, and what the
    reward needs."""
    reward: str | None = None
    """Reward for rl.env jsonl. exact: 1 if the text equals the line's answer; math: 1 if it has the
    same value (by math-verify; an answer that is an expression as a whole is read as LaTeX); zero:
    always 0, for rl.advantage none; FILE.py:FUNCTION: what the function returns for the line and
    the text."""
    chat: bool = False
    """Format prompts as a user's turn with the tokenizer's chat template."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the texts that rewards see. no: rewards see special tokens as the
    chat template writes them, such as the marks of GPT-OSS's channels and the end of a turn."""
    step_timeout: float = Field(default=60.0, gt=0, le=1e6)  # locks have a largest timeout
    """Seconds within which an environment must answer. If it does not, the trajectory is
    dropped."""
    max_turns: PositiveInt = 8
    """Largest number of turns that the policy has in one trajectory."""
    group_size: PositiveInt = 8
    """Number of trajectories for each prompt. Each update of a step takes train.global_batch_size
    trajectories."""
    updates_per_rollout: PositiveInt = 1
    """Number of optimizer steps in one step of the run. Each of them trains on a part of the step's
    groups."""
    max_staleness: NonNegativeInt = 0
    """Number of steps by which generation may run ahead of training. 0: every trajectory is
    generated by the weights that it then trains; s: prompts begin s steps early, and their
    generation goes on across the updates in between. That keeps the generator full, and keeps
    separate generators busy while the other ranks train."""
    placement: Literal["together", "apart"] = "together"
    """Ranks that generate. together: all ranks, which generate and train by turns; apart: the last
    rl.generators ranks, while the others train."""
    generators: PositiveInt = 1
    """Number of ranks that generate with rl.placement apart. Each has a copy of the weights."""
    keep_cache: bool = False
    """After an update, keep the keys and values of trajectories that are still being generated,
    instead of reading their tokens again with the new weights (in-flight updates, arXiv
    2509.19128). rl.importance and rl.mask correct for tokens that were read with older weights."""
    generator_dtype: Literal["auto", "float8", "mxfp4", "nf4", "nvfp4"] = "auto"
    """Storage of routed experts' matrices in the generator's copy of the weights. auto: the dtype
    of its computation; float8, mxfp4, nf4, nvfp4: quantised to 8 or 4 bits with scales at every
    update, which takes a half or a quarter of the memory. The generator's log-probabilities then
    differ from the trainer's; rl.importance and rl.mask correct for that."""
    generator_cache: CacheName = "expanded"
    """Content of the generator's cache for layers with latent attention (DeepSeek, Kimi, GLM-4.7
    Flash, GLM-5, Ling, Mistral-4). expanded: keys and values of all heads, which have the bits of
    training; latent: the latents from which they are computed, which take a small part of the
    memory. The generator's log-probabilities then differ from the trainer's; rl.importance and
    rl.mask correct for that. The ranks of parallel.cp divide expanded keys and values, but each
    keeps all latents."""
    resample: NonNegativeInt = 0
    """Largest number of rounds in a step in which new prompts replace groups whose rewards are all
    equal, because such groups teach nothing (dynamic sampling, arXiv 2503.14476)."""
    supervised_steps: NonNegativeInt = 0
    """Number of steps at the start of the run that learn from the environment's demonstrations."""
    supervised_lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of the supervised steps; unset: optim.lr."""
    eval_tasks: NonNegativeInt = 64
    """Number of held-out tasks on which the policy is evaluated every train.eval_interval steps."""
    eval_temperature: float = Field(default=0.0, ge=0)
    """Temperature of sampling in evaluations; 0: the likeliest token is always chosen."""
    offload: bool = False
    """During generation, keep the optimizer's moments in host memory and free the gradients. For
    each trained parameter that a device holds, this frees 8 bytes of AdamW's moments in float32
    and, with several devices, 4 more for its gradient. It costs the time to copy the moments."""
    routing_replay: bool = False
    """Train with the experts that generation chose for each token (arXiv 2510.11370), weighted by
    the router's current scores. This helps where generation's bits differ from the trainer's."""
    max_sequences: PositiveInt = 64
    """Largest number of trajectories that one rank, or the ranks of parallel.cp together, generate
    at once."""
    cache_tokens: int | None = Field(default=None, gt=0)
    """Number of tokens in one rank's key/value cache; unset: enough for rl.max_sequences rows of
    data.seq_len."""
    sleep: Literal["auto", "never", "cache", "all"] = "auto"
    """Memory of generation that is freed while weights are updated. never: none; cache: keys and
    values; all: also its copy of the weights; auto: the least that makes room for training, by the
    estimate of memory. On CUDA, a generator that freed memory captures its graphs again at each
    step."""

    @property
    def is_teacher_served(self) -> bool:
        return (self.teacher or "").startswith(("http://", "https://"))

    @property
    def clip_range(self) -> tuple[float, float]:
        """The smallest and the largest ratio that are not clipped; for dppo, signed divergences."""
        low, high = _CLIP_RANGES.get(self.policy, _CLIP_RANGES["clip"])
        low = low if self.clip_low is None else self.clip_low
        middle = 0 if self.policy.startswith("dppo") else 1
        return middle - low, middle + (high if self.clip_high is None else self.clip_high)

    @property
    def mask_range(self) -> tuple[float, float]:
        """The smallest and the largest ratio that ``mask`` keeps."""
        low, high = _MASK_RANGES[self.mask]
        low = low if self.mask_low is None else self.mask_low
        return low, high if self.mask_high is None else self.mask_high

    @property
    def apart(self) -> int:
        """Number of ranks that generate and do not train."""
        return self.generators if self.placement == "apart" else 0

    @property
    def importance_of(self) -> Literal["none", "token", "sequence"]:
        """The value of ``importance``. If it is auto, ``ratio`` decides."""
        if self.importance == "auto":
            return "none" if self.ratio == "rollout" else "token"
        return self.importance


class JobsSection(Section):
    """The job service (python -m moetrain.jobs): its HTTP server and its limits."""

    host: str = "127.0.0.1"
    """Address that the HTTP server listens on. The default is reachable from this machine only."""
    port: int = Field(default=8100, ge=0, le=65535)
    """Port of the HTTP server; 0: any free port, which is printed."""
    auth: Literal["auto", "token", "none"] = "auto"
    """Clients that are served. token: those that send the bearer token of jobs.token_file; none:
    everybody who can connect; auto: none if jobs.host is a loopback address, else token."""
    token_file: MaybePath = None
    """File with the bearer token, which is the API key; unset: output_dir/token, which is created
    if it is missing."""
    max_jobs: PositiveInt = 256
    """Number of training runs and samplers that may exist at once. Requests for more are
    refused."""
    max_queued: PositiveInt = 1024
    """Number of requests that may wait at once for one training run or one sampler."""
    max_request_mib: int = Field(default=64, gt=0, le=1024)
    """Size of the largest request, in MiB."""
    max_completions: PositiveInt = 1024
    """Largest number of completions in one sample request, and in one batch of requests to a
    sampler."""
    max_saves: PositiveInt = 16
    """Largest number of saves of each kind for a training run, and of samplers for a session. A new
    sampler beyond that replaces the one that has been idle for longest."""
    max_tenants: PositiveInt = 1
    """Number of jobs that may share one forward or forward_backward pass, each with one small
    request. A request is small if it fits in its equal part of a micro-batch."""
    max_resident: PositiveInt | Literal["auto"] = "auto"
    """Number of jobs that stay on the device between their turns, so that a change between them
    copies nothing. auto: as many as fit beside a step, or jobs.max_tenants on a CPU."""
    max_loaded: PositiveInt = 8
    """Number of other jobs that stay in host memory between their turns. Each takes 12 bytes for
    each trained parameter, or 16 in the middle of a step. Jobs beyond that are read from disk at
    each turn."""
    save_interval: PositiveInt = 20
    """Number of requests of a job between its checkpoints, which are also written by time
    (checkpoint.minutes). After a restart, requests since the last checkpoint are computed again
    from the job's log."""
