"""The sections of the settings: each one's type, default, meaning and validation by itself.

Those of how a step is computed are in :mod:`moetrain.config.compute`.

The docstring under a field is what ``--help`` prints. What spans settings is in
:mod:`moetrain.config`.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, field_validator

from moetrain.config.hardware import GpuName
from moetrain.config.sources import ConfigError, Section, from_home, split_words

_LARGEST = 2**20
"""Limit of a model's sizes: more than any known model has, so that what exceeds it is a slip."""


class ModelSection(Section):
    """Which model: a preset or a Hugging Face checkpoint, with optional size overrides."""

    preset: str | None = None
    """Named architecture with random weights: debug, qwen3-0.6b, qwen3-30b-a3b, ..."""
    path: str | None = None
    """Hugging Face checkpoint to start from: a local folder or a hub id. Excludes model.preset."""
    vocab_size: int | None = Field(default=None, gt=0, le=_LARGEST)
    """Vocabulary size; unset: the preset's."""
    hidden_size: int | None = Field(default=None, gt=0, le=_LARGEST)
    """Model width; unset: the preset's."""
    num_layers: int | None = Field(default=None, gt=0, le=10_000)
    """Number of transformer blocks; unset: the preset's."""
    num_heads: int | None = Field(default=None, gt=0, le=_LARGEST)
    """Attention (query) heads; unset: the preset's."""
    num_kv_heads: int | None = Field(default=None, gt=0, le=_LARGEST)
    """Key/value heads; unset: the preset's."""
    head_dim: int | None = Field(default=None, gt=0, le=_LARGEST)
    """Width of one attention head; unset: the preset's."""
    intermediate_size: int | None = Field(default=None, gt=0, le=_LARGEST)
    """Width of a dense MLP; unset: the preset's."""
    num_experts: int | None = Field(default=None, gt=0, le=_LARGEST)
    """Experts in a MoE layer; unset: the preset's."""
    num_experts_per_token: int | None = Field(default=None, gt=0, le=_LARGEST)
    """Experts a token is sent to; unset: the preset's."""
    moe_intermediate_size: int | None = Field(default=None, gt=0, le=_LARGEST)
    """Width of one expert; unset: the preset's."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the normal distribution that random weights are drawn from."""

    def overrides(self) -> dict[str, int]:
        """The architecture fields that were set, by name."""
        own = {"preset", "path", "init_std"}
        return {k: v for k, v in self.model_dump(exclude_none=True).items() if k not in own}


class DataSection(Section):
    """Where text comes from and how it becomes packed rows of tokens."""

    source: Literal["stdlib", "text", "jsonl", "synthetic"] = "stdlib"
    """stdlib: Python's own library sources; text: a file or folder; jsonl; synthetic: random."""
    path: str | None = None
    """File or folder for the sources text and jsonl."""
    eval_path: str | None = None
    """Held-out file or folder; unset: data.eval_fraction of the documents is held out."""
    eval_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Share of the documents held out for evaluation, chosen by a hash of their names or text;
    where they are too few for that, the same share of the tokens, at their end."""
    text_field: str = "text"
    """Field of a jsonl line that holds its text (lines with `messages` are conversations)."""
    chat_template: str | None = None
    """Jinja file for `messages`; unset: the tokenizer's own template, else ChatML."""
    tokenizer: str = "byte"
    """byte (no files needed), or a tokenizer.json, a folder that holds one, or a hub id; unset,
    with model.path: that one's own."""
    seq_len: int = Field(default=256, gt=1)
    """Tokens in one packed row; unset, with model.path: as many as it takes, up to 4096."""
    packing: Literal["auto", "whole", "stream"] = "auto"
    """whole: documents are fitted into rows uncut, and what is left of a row is padding; a
    conversation longer than a row loses its end, a longer text is cut in parts. stream: documents
    end to end, cut at every row's end. auto: whole where there are conversations, else stream."""
    cache_dir: str | None = None
    """Folder of the token cache; unset: the user's cache folder (XDG_CACHE_HOME/moetrain)."""
    num_documents: int = Field(default=1024, gt=0, lt=2**31)
    """Length of the synthetic source, in rows."""

    _from_home = field_validator("path", "eval_path", "chat_template", "tokenizer", "cache_dir")(
        from_home
    )


class TrainSection(Section):
    """The run: its length, batches, precision and safety stops."""

    steps: int | None = Field(default=300, gt=0)
    """Optimizer steps. Excludes train.epochs."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the data, and parts of one: another way to give the steps."""
    seed: int = Field(default=0, ge=0)
    """Seeds weights and the order of the data."""
    micro_batch_size: int = Field(default=8, gt=0)
    """Rows (sequences) in one forward pass on one device."""
    global_batch_size: int = Field(default=8, gt=0)
    """Rows in one optimizer step, over all devices and accumulation."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is a GPU."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute dtype (weights stay fp32); auto: bfloat16 on CUDA, float32 on CPU."""
    deterministic: bool = False
    """Only bitwise-reproducible algorithms: a rerun gives the same bits."""
    freeze: tuple[str, ...] = ()
    """Patterns of the parameters that are not trained, with commas between (layers.0.*,
    *.router.*): they lie in the compute dtype, without gradients or moments."""
    max_bad_steps: int = Field(default=5, gt=0)
    """Steps in a row with a non-finite loss or gradient norm, each skipped, that end a run."""
    gc_interval: int = Field(default=50, gt=0)
    """Python's garbage collector runs every this many steps and never in between."""
    eval_interval: int = Field(default=100, ge=0)
    """Steps between evaluations on held-out rows; 0: only at the end."""
    eval_rows: int = Field(default=256, gt=0)
    """Held-out rows of one evaluation, drawn over all of them: the same ones at every evaluation,
    whatever train.seed, micro-batch and layout; all of them where there are fewer."""
    sample_tokens: int = Field(default=200, ge=0)
    """Tokens generated by the trained model at the end of the run; 0: none."""
    sample_prompt: str | None = None
    """Text that the sample continues; unset: the start of a held-out row."""

    _split = field_validator("freeze", mode="before")(split_words)

    def micro_batches(self, data_ranks: int = 1) -> int:
        """Micro-batches that each of ``data_ranks`` ranks makes of its part of a global batch.

        Raises:
            ConfigError: they do not make up the global batch.
        """
        rows = self.micro_batch_size * data_ranks
        if self.global_batch_size % rows:
            ranks = f" x {data_ranks} ranks with data (dp_replicate x dp_shard) = {rows}"
            share, rest = divmod(self.global_batch_size, data_ranks)
            fits = [f"train.global_batch_size {-(-self.global_batch_size // rows) * rows}"]
            if share and not rest:
                fits.append(f"train.micro_batch_size {math.gcd(share, self.micro_batch_size)}")
            raise ConfigError(
                "train.global_batch_size",
                f"{self.global_batch_size} is not a multiple of train.micro_batch_size "
                f"{self.micro_batch_size}{ranks * (data_ranks > 1)}; set {' or '.join(fits)}",
            )
        return self.global_batch_size // rows

    def total_steps(self, num_rows: int) -> int:
        """The length of a run over ``num_rows`` rows; what is left over makes one more step."""
        if self.epochs is not None:
            return math.ceil(self.epochs * num_rows / self.global_batch_size)
        assert self.steps is not None  # Config.load has seen to it
        return self.steps


class LoraSection(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685) beside the weights, which are then frozen."""

    rank: int = Field(default=0, ge=0, le=1024)
    """Width between an adapter's two matrices, of which routed experts take multiples of 8; 0: no
    adapters. With adapters nothing else is trained: weights lie frozen in the compute dtype."""
    alpha: float = Field(default=32.0, gt=0)
    """What adapters give is multiplied by alpha / rank."""
    rs: bool = False
    """Multiply by alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that are dropped while it learns. Of routed experts and routers
    none can be."""
    targets: tuple[str, ...] = ("auto",)
    """Patterns of the modules that have adapters, with commas between: *.attn.*, *.wq, *.mlp.*,
    layers.1.moe.experts, *.router. auto: attention, and routed experts or, in a model that has
    none, the MLPs."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """How the first matrix is drawn (the second is 0). kaiming: uniformly within 1 / sqrt(inputs);
    gaussian: normally, with a standard deviation of 1 / rank."""

    base_dtype: Literal["auto", "float8"] = "auto"
    """What blocks' frozen matrices are stored in. auto: what they are used in, train.dtype; float8:
    e4m3 with a scale for each 32 numbers (MXFP8), for half the memory of bf16 and half of what is
    gathered. Each is widened when its block runs, in the forward and again in the backward."""
    path: str | None = None
    """Folder of adapters in PEFT's format to start from, of this very rank and these targets."""
    save: bool = True
    """Write the adapters in PEFT's format to output_dir/adapter at the end."""
    layout: Literal["auto", "per_expert", "fused"] = "auto"
    """Of routed experts in those files. per_expert: a module for each expert; fused: PEFT's
    target_parameters; auto: as servers of the model's family load them."""

    _from_home = field_validator("path")(from_home)
    _split = field_validator("targets", mode="before")(split_words)

    @property
    def scale(self) -> float:
        """What adapters give is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rs else self.rank)


StateDtype = Literal["float32", "bfloat16"]


class OptimSection(Section):
    """AdamW and its schedule."""

    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate as a share of the peak."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warmup: cosine decay; wsd: stable, then linear decay; constant."""
    warmup_steps: int | None = Field(default=20, ge=0)
    """Steps of linear warmup. Excludes optim.warmup_fraction."""
    warmup_fraction: float | None = Field(default=None, ge=0, lt=1)
    """Share of the steps that warm up: another way to give them."""
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """Share of the steps that wsd spends decaying."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices; norms, biases, embeddings and routers have none."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this global 2-norm."""
    state_dtype: StateDtype = "float32"
    """Of AdamW's two moments. bfloat16: 4 bytes a parameter instead of 8, rounded stochastically,
    by bits that depend on train.seed; a run goes on only with what it began with."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the part of gradients that a rank keeps until the step. bfloat16: 2 bytes a parameter
    instead of 4. Ranks' gradients are added up in fp32, and so is what is there already; each such
    sum is rounded to nearest. Of many micro-batches small ones are lost beside the sum, unless
    ranks add them up before they send any: parallel.reduce_at last."""

    offload_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of what is trained, in bytes, whose fp32 weights and moments live in host memory, where
    the CPU updates them while the device goes on: of a parameter's 12 bytes and its gradient's 4
    the device has the 2 that it computes with, the host (in every process) all 16."""

    def warmup(self, total_steps: int) -> int:
        """Steps of linear warmup in a run of ``total_steps``."""
        if self.warmup_fraction is None:
            return self.warmup_steps or 0
        return round(self.warmup_fraction * total_steps)

    def check(self) -> None:
        """Raise ConfigError for moments, or gradients, that the host's update does not take."""
        for name in ("state_dtype", "gradient_dtype"):
            if self.offload_fraction and getattr(self, name) != "float32":
                raise ConfigError(
                    "optim.offload_fraction",
                    f"{self.offload_fraction}, and the update on the host knows no optim.{name} "
                    f"{getattr(self, name)!r}; use float32, or no offload_fraction",
                )


class CheckpointSection(Section):
    """Saving and resuming."""

    interval: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0: they are saved by time (checkpoint.minutes), at the end and
    when the run is stopped."""
    minutes: float = Field(default=30, ge=0)
    """Save as well when so many minutes have passed since the last checkpoint, so that a power cut
    loses no more, whatever checkpoint.interval is; 0: never by time."""
    at_end: bool = True
    """Write a checkpoint at the end of the run."""
    keep: int = Field(default=2, gt=0)
    """Checkpoints kept; older ones are removed."""
    keep_every: int = Field(default=0, ge=0)
    """Besides those, checkpoints at multiples of so many steps are kept for good; 0: none are."""
    asynchronous: bool = False
    """Write while training goes on, from a copy in host memory (pinned, with a GPU): as much in
    every process as its part of weights and moments, 12 bytes a parameter in all (8 with moments
    in bfloat16)."""
    resume: str = "auto"
    """auto: the newest checkpoint of output_dir, if any; never; or a checkpoint's folder."""
    save_hf: bool = False
    """Write a Hugging Face checkpoint to output_dir/hf at the end: weights, config, tokenizer, and
    all that model.path holds besides (its other tensors and files)."""
    hf_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Of those weights. auto: as each tensor is in model.path; from a preset, float32."""

    def check(self) -> None:
        """Raise ConfigError for milestones that would never come."""
        if self.keep_every and (not self.interval or self.keep_every % self.interval):
            raise ConfigError(
                "checkpoint.keep_every",
                f"{self.keep_every} is no multiple of checkpoint.interval {self.interval}: nothing "
                "is saved then; make it one",
            )

    _from_home = field_validator("resume")(from_home)


WARM_PROFILE_STEPS = 1
"""Traced and thrown away: what traces is loaded in them."""


class LogSection(Section):
    """What is printed and written while training."""

    interval: int = Field(default=10, gt=0)
    """Steps between logged lines."""
    tensorboard: bool = True
    """Write TensorBoard files to output_dir/tensorboard."""
    progress: bool = True
    """Draw a progress bar when standard output is a terminal."""
    profile: int = Field(default=0, ge=0)
    """Steps of which each rank writes a trace (of Chrome's format, for ui.perfetto.dev) and, on
    CUDA, a history of memory (for pytorch.org/memory_viz) to output_dir/profile; 0: none. They are
    slower, the others are not."""
    profile_after: int = Field(default=4, gt=0)
    """Steps of this process before them; one more is traced and thrown away."""
    profile_as: Literal["trace", "nvtx"] = "trace"
    """nvtx: in the place of a trace, ranges for a profiler that runs this one, between the calls
    that nsys profile --capture-range=cudaProfilerApi waits for."""

    def check(self, steps: int) -> None:
        """Raise ConfigError unless a run of ``steps`` has as many as are to be traced."""
        needed = self.profile_after + WARM_PROFILE_STEPS + self.profile
        if self.profile and needed > steps:
            raise ConfigError(
                "log.profile",
                f"{self.profile}, but the run has {steps} steps, and {needed} are needed: "
                f"log.profile_after {self.profile_after}, one to warm up, and those; lower it, or "
                "train longer",
            )


class LaunchSection(Section):
    """Starting processes."""

    nproc: int | Literal["auto"] = 1
    """Processes to start on this machine; auto: one a GPU, or one on a CPU. Under torchrun or srun
    nothing is started: the run takes its place among their processes."""
    join_timeout: float = Field(default=300.0, gt=0)
    """Seconds in which all processes of a run must have come to where they meet."""
    max_restarts: int = Field(default=0, ge=0)
    """Times that a run which failed is started again, from its newest checkpoint, when a process of
    it was killed or has failed. torchrun has a setting of its own: --max-restarts."""

    gpus: int | None = Field(default=None, gt=0)
    """GPUs that --dry_run plans for; unset: those of this run, on this machine or under a launcher,
    or as many as the degrees in parallel multiply to."""
    gpu: GpuName | None = None
    """The kind of GPU that --dry_run plans for; unset: this machine's, and where there is none, but
    launch.gpus or train.device asks for GPUs, h100."""

    @field_validator("nproc")
    @classmethod
    def _positive(cls, value: str | int) -> str | int:
        if isinstance(value, int) and value < 1:
            raise ValueError("give auto or a positive number of processes")
        return value


class JobsSection(Section):
    """Job service (python -m moetrain.jobs): its HTTP server and its limits."""

    host: str = "127.0.0.1"
    """Address that the HTTP server listens on; by default from this machine alone."""
    port: int = Field(default=8100, ge=1, le=65535)
    """Port of the HTTP server."""
    auth: Literal["auto", "token", "none"] = "auto"
    """Who is served. token: whoever sends the bearer token of jobs.token_file; none: everybody who
    can connect; auto: none where jobs.host is a loopback address, else token."""
    token_file: str | None = None
    """File with the bearer token; unset: output_dir/token, which is made if there is none."""
    max_jobs: int = Field(default=256, gt=0)
    """Jobs that clients may have at once; further ones are refused until some are deleted."""
    max_queued: int = Field(default=64, gt=0)
    """Requests of one job that may wait at once."""
    max_request_mib: int = Field(default=64, gt=0, le=1024)
    """Size of one request, MiB."""
    max_completions: int = Field(default=1024, gt=0)
    """Completions that one sample request may ask for, over all its prompts."""
    max_saves: int = Field(default=16, gt=0)
    """Named saves of one job."""
    max_loaded: int = Field(default=8, gt=0)
    """Jobs whose adapters and moments stay in host memory between their turns, 12 bytes a trained
    parameter each, and 16 in the middle of a step; others are read from the disk at each turn."""
    save_interval: int = Field(default=20, gt=0)
    """Requests of a job between two of its checkpoints. What came after the last one is in its log
    of requests, and is computed again after a restart."""

    _from_home = field_validator("token_file")(from_home)
