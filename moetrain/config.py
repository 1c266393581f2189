"""Every setting of moetrain: its type, default, meaning and validation, in one file.

A :class:`Config` is built from four sources, weakest first: the defaults below, a recipe or TOML
file, environment variables (``MOETRAIN_PARALLEL__EP=8``) and the command line
(``--parallel.ep 8``). Unknown keys are errors, and so are two settings that contradict each other:
nothing a user set is overridden in silence. The docstring under a field is what ``--help`` prints.

Left out on purpose: anything that needs a device, a process group or the file system beyond the
TOML file itself. Those checks live where the thing is built and raise :class:`ConfigError` too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator

from moetrain.config_sources import (
    ConfigError,
    Place,
    hint,
    leaves,
    nest,
    read_cli,
    read_env,
    read_place,
    read_source,
    recipe_names,
)

__all__ = [
    "Config",
    "ConfigError",
    "Place",
    "launched_place",
    "recipe_names",
    "user_cache_dir",
]

DEFAULT_RECIPE = "debug"

SavedName = Literal["dispatch", "attention", "experts", "linear"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelSection(_Section):
    """Which model: a preset or a Hugging Face checkpoint, with optional size overrides."""

    preset: str | None = None
    """Named architecture with random weights: debug, qwen3-0.6b, qwen3-30b-a3b, ..."""
    path: str | None = None
    """Hugging Face checkpoint to start from: a local folder or a hub id. Excludes model.preset."""
    vocab_size: int | None = Field(default=None, gt=0)
    """Vocabulary size; unset: the preset's."""
    hidden_size: int | None = Field(default=None, gt=0)
    """Model width; unset: the preset's."""
    num_layers: int | None = Field(default=None, gt=0)
    """Number of transformer blocks; unset: the preset's."""
    num_heads: int | None = Field(default=None, gt=0)
    """Attention (query) heads; unset: the preset's."""
    num_kv_heads: int | None = Field(default=None, gt=0)
    """Key/value heads; unset: the preset's."""
    head_dim: int | None = Field(default=None, gt=0)
    """Width of one attention head; unset: the preset's."""
    intermediate_size: int | None = Field(default=None, gt=0)
    """Width of a dense MLP; unset: the preset's."""
    num_experts: int | None = Field(default=None, gt=0)
    """Experts in a MoE layer; unset: the preset's."""
    num_experts_per_token: int | None = Field(default=None, gt=0)
    """Experts a token is sent to; unset: the preset's."""
    moe_intermediate_size: int | None = Field(default=None, gt=0)
    """Width of one expert; unset: the preset's."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the normal distribution that random weights are drawn from."""

    def overrides(self) -> dict[str, int]:
        """The architecture fields that were set, by name."""
        own = {"preset", "path", "init_std"}
        return {k: v for k, v in self.model_dump(exclude_none=True).items() if k not in own}


class DataSection(_Section):
    """Where text comes from and how it becomes packed rows of tokens."""

    source: Literal["stdlib", "text", "jsonl", "synthetic"] = "stdlib"
    """stdlib: Python's own library sources; text: a file or folder; jsonl; synthetic: random."""
    path: str | None = None
    """File or folder for the sources text and jsonl."""
    eval_path: str | None = None
    """Held-out file or folder; unset: data.eval_fraction of the documents is held out."""
    eval_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Share of the documents held out for evaluation, chosen by a hash of their names or text."""
    text_field: str = "text"
    """Field of a jsonl line that holds its text (lines with `messages` are conversations)."""
    chat_template: str | None = None
    """Jinja file for `messages`; unset: the tokenizer's own template, else ChatML."""
    tokenizer: str = "byte"
    """byte (no files needed), or a tokenizer.json, a folder that holds one, or a hub id."""
    seq_len: int = Field(default=256, gt=1)
    """Tokens in one packed row."""
    cache_dir: str | None = None
    """Folder of the token cache; unset: the user's cache folder (XDG_CACHE_HOME/moetrain)."""
    num_documents: int = Field(default=1024, gt=0)
    """Length of the synthetic source, in rows."""


class TrainSection(_Section):
    """The run: its length, batches, precision and safety stops."""

    steps: int = Field(default=300, gt=0)
    """Optimizer steps."""
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
    max_bad_steps: int = Field(default=5, gt=0)
    """Steps in a row with a non-finite loss or gradient norm, each skipped, that end a run."""
    gc_interval: int = Field(default=50, gt=0)
    """Python's garbage collector runs every this many steps and never in between."""
    eval_interval: int = Field(default=100, ge=0)
    """Steps between evaluations on held-out rows; 0: only at the end."""
    eval_batches: int = Field(default=16, gt=0)
    """Micro-batches of one evaluation."""
    sample_tokens: int = Field(default=200, ge=0)
    """Tokens generated by the trained model at the end of the run; 0: none."""
    sample_prompt: str | None = None
    """Text that the sample continues; unset: the start of a held-out row."""


class OptimSection(_Section):
    """AdamW and its schedule."""

    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate as a share of the peak."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warmup: cosine decay; wsd: stable, then linear decay; constant."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps of linear warmup."""
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


class ParallelSection(_Section):
    """Degrees of parallelism: dp_replicate * dp_shard * tp * pp * cp is the number of processes."""

    dp_replicate: int = Field(default=1, gt=0)
    """Replicas of the sharded model (HSDP)."""
    dp_shard: int = Field(default=-1, ge=-1)
    """Ranks that shard parameters (FSDP); -1: what is left of the world."""
    tp: int = Field(default=1, gt=0)
    """Tensor parallel ranks."""
    pp: int = Field(default=1, gt=0)
    """Pipeline stages."""
    ep: int = Field(default=1, gt=0)
    """Expert parallel ranks, taken from those of dp_shard, cp and tp; divides their product."""
    cp: int = Field(default=1, gt=0)
    """Context parallel ranks."""
    reshard_after_forward: bool = False
    """Free a block's gathered parameters after its forward and gather them again, a block ahead,
    for its backward: less memory for one gather more. activation.policy full always does so."""
    reduce: Literal["fp32_accum", "fp32", "bf16"] = "fp32_accum"
    """How gradients are summed over ranks. fp32_accum: sent in the compute dtype, added in fp32;
    fp32: sent in fp32, twice the bytes; bf16: sent and rounded in the compute dtype."""


class MoeSection(_Section):
    """Routing, balancing and dispatch of MoE layers."""

    dispatcher: Literal["auto", "local", "alltoall", "deepep"] = "auto"
    """How tokens reach their experts; auto: local where parallel.ep is 1, else deepep where it can
    run, else alltoall."""
    deepep_num_sms: Literal["auto"] | int = "auto"
    """SMs DeepEP uses: auto (what was fastest for the number of ranks), or an even number."""
    dispatch_mode: Literal["exact", "static"] = "exact"
    """How DeepEP sizes what a rank receives. exact: the host waits for the counts, once a layer in
    the forward; static: for the most there can be, and nothing waits."""
    static_capacity: float = Field(default=2.0, ge=1)
    """Rows that static reserves for a rank's experts, as a multiple of an evenly loaded rank's. A
    rank has many experts, whose loads even out: twice is rare. Less than all there can be (which is
    parallel.ep, and reserves no more than that) may overflow; such a step is done again exactly."""
    overlap_chunks: int = Field(default=1, ge=1)
    """Parts that a rank's tokens are cut into, so that DeepEP moves one while the experts work on
    another; 1: it moves all of them, then they work. On four H200s 2 was 2% slower than 1."""
    force_balanced: bool = False
    """Ignore the router's choice and send every expert the same number of tokens (benchmarks)."""
    aux_loss_coef: float | None = Field(default=None, ge=0)
    """Weight of the load-balancing loss; unset: the model's own (router_aux_loss_coef)."""
    aux_loss_scope: Literal["global_batch", "micro_batch"] = "global_batch"
    """Whose expert counts that loss uses. With gradient accumulation, global_batch is exact at the
    price of one more forward pass a micro-batch; micro_batch is free, but depends on the split."""
    z_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the router z-loss (mean squared logsumexp of the router logits)."""
    bias_update_rate: float = Field(default=0.0, ge=0)
    """Step of the auxiliary-loss-free selection bias after every optimizer step; 0: no bias."""

    @field_validator("deepep_num_sms")
    @classmethod
    def _even_sms(cls, value: str | int) -> str | int:
        if isinstance(value, int) and (value <= 0 or value % 2):
            raise ValueError("SMs are used in pairs: give auto or a positive even number")
        return value


class KernelsSection(_Section):
    """Which implementations run."""

    backend: Literal["auto", "triton", "reference"] = "auto"
    """auto: the fast kernels on CUDA, plain torch elsewhere; triton or reference: that one."""
    attention: Literal["auto", "sdpa", "cudnn", "flex", "reference"] = "auto"
    """auto: sdpa (cuDNN first) for unpacked rows and on a CPU; for packed rows on CUDA, cuDNN's
    ragged attention if nvidia-cudnn-frontend is installed and the GPU is Hopper or newer, else
    flex."""


class CompileSection(_Section):
    """torch.compile, a block at a time. The whole model as one graph does not work: FSDP's gathers
    run a block ahead as asynchronous collectives, which cannot be traced. It also compiles longer
    with every layer (16, aot_eager on a CPU: 15 s; blocks share one graph: 1 s)."""

    enabled: bool = False
    """Compile every transformer block with fullgraph=True (on a CPU this needs a C++ compiler)."""


class ActivationSection(_Section):
    """What the forward pass keeps for the backward pass."""

    policy: Literal["none", "selective", "full"] = "none"
    """none: keep every activation; selective: recompute each block in the backward pass, except
    what activation.save names; full: recompute all of it (and gather its parameters again)."""
    save: tuple[SavedName, ...] = ("dispatch", "attention", "experts")
    """What selective keeps, with commas between: dispatch (what expert parallel ranks exchange),
    attention (its output), experts (grouped products' pre-activations), linear (dense products)."""

    @field_validator("save", mode="before")
    @classmethod
    def _split_names(cls, value: Any) -> Any:
        return [name for name in value.split(",") if name] if isinstance(value, str) else value


class CheckpointSection(_Section):
    """Saving and resuming."""

    interval: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0: only at the end and when stopped."""
    at_end: bool = True
    """Write a checkpoint at the end of the run."""
    keep: int = Field(default=2, gt=0)
    """Checkpoints kept; older ones are removed."""
    resume: str = "auto"
    """auto: the newest checkpoint of output_dir, if any; never; or a checkpoint's folder."""
    save_hf: bool = False
    """Write a Hugging Face checkpoint to output_dir/hf at the end: weights, config, tokenizer, and
    all that model.path holds besides (its other tensors and files)."""
    hf_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Of those weights. auto: as each tensor is in model.path; from a preset, float32."""


class LogSection(_Section):
    """What is printed and written while training."""

    interval: int = Field(default=10, gt=0)
    """Steps between logged lines."""
    tensorboard: bool = True
    """Write TensorBoard files to output_dir/tensorboard."""
    progress: bool = True
    """Draw a progress bar when standard output is a terminal."""


class LaunchSection(_Section):
    """Starting processes."""

    nproc: int | Literal["auto"] = 1
    """Processes to start on this machine; auto: one a GPU, or one on a CPU. Under torchrun or srun
    nothing is started: the run takes its place among their processes."""

    @field_validator("nproc")
    @classmethod
    def _positive(cls, value: str | int) -> str | int:
        if isinstance(value, int) and value < 1:
            raise ValueError("give auto or a positive number of processes")
        return value


class Config(_Section):
    """Every setting of a run. Build it with :meth:`load`; it is frozen afterwards."""

    model: ModelSection = ModelSection()
    """Which model to train."""
    data: DataSection = DataSection()
    """Where the tokens come from."""
    train: TrainSection = TrainSection()
    """Length, batches, precision."""
    optim: OptimSection = OptimSection()
    """Optimizer and schedule."""
    parallel: ParallelSection = ParallelSection()
    """Degrees of parallelism."""
    moe: MoeSection = MoeSection()
    """Routing, balancing, dispatch."""
    kernels: KernelsSection = KernelsSection()
    """Kernel implementations."""
    compile: CompileSection = CompileSection()
    """torch.compile."""
    activation: ActivationSection = ActivationSection()
    """Activation memory."""
    checkpoint: CheckpointSection = CheckpointSection()
    """Saving and resuming."""
    log: LogSection = LogSection()
    """Output while training."""
    launch: LaunchSection = LaunchSection()
    """Processes."""
    output_dir: str = "outputs/debug"
    """Folder for metrics, checkpoints, plots and the resolved config."""

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        overrides: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> Config:
        """The validated config of one run.

        Args:
            source: a recipe's name, a TOML file, or a nested mapping; None: the recipe ``debug``.
            overrides: command-line words, ``["--train.steps", "3"]`` or ``["train.steps=3"]``.
            environ: environment to read ``MOETRAIN_*`` from; None: the process's own.

        Raises:
            ConfigError: unknown or contradictory settings, wrong types, a missing file.
        """
        settings = _settings()
        name, base = read_source(DEFAULT_RECIPE if source is None else source)
        values: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for origin, layer in (
            (name, dict(leaves(base))),
            ("environment", read_env(os.environ if environ is None else environ, settings)),
            ("command line", read_cli(overrides, settings)),
        ):
            # model.path and model.preset are alternatives: naming one in a stronger source replaces
            # the other (a recipe's preset); naming both in one source is the user's contradiction.
            for one, other in (("model.path", "model.preset"), ("model.preset", "model.path")):
                if layer.get(one) is not None and other not in layer:
                    values.pop(other, None)
            values |= layer
            origins |= dict.fromkeys(layer, origin)
        try:
            config = cls(**nest(values))
        except ValidationError as error:
            raise _as_config_error(error) from None
        config._origins = origins
        config._check_contradictions()
        return config

    @property
    def origins(self) -> dict[str, str]:
        """Which source set each setting that has one, by dotted name."""
        return dict(self._origins)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested JSON-ready values."""
        return self.model_dump(mode="json")

    def describe(self) -> str:
        """One line for each non-default setting: name, value, and the source it came from."""
        default = dict(leaves(Config().to_dict()))
        rows = [
            f"  {key} = {json.dumps(value)}  ({self._origins.get(key, 'code')})"
            for key, value in leaves(self.to_dict())
            if value != default[key]
        ]
        return "\n".join(rows) or "  (all defaults)"

    def _check_contradictions(self) -> None:
        m, d, t = self.model, self.data, self.train
        if m.path is not None and m.preset is not None:
            raise ConfigError(
                "model.path", f"{m.path!r} contradicts model.preset {m.preset!r}; set one of them"
            )
        if m.path is not None and m.overrides():
            key, value = next(iter(m.overrides().items()))
            raise ConfigError(
                f"model.{key}",
                f"{value} contradicts model.path {m.path!r}, whose config.json decides; unset one",
            )
        if m.path is None and m.preset is None:
            raise ConfigError("model.preset", "not set; name a preset, or a checkpoint: model.path")
        if t.global_batch_size % t.micro_batch_size:
            raise ConfigError(
                "train.global_batch_size",
                f"{t.global_batch_size} is not a multiple of "
                f"train.micro_batch_size {t.micro_batch_size}",
            )
        if d.source in ("text", "jsonl") and d.path is None:
            raise ConfigError("data.path", f"not set, and data.source {d.source!r} needs it")
        a, e = self.activation, self.moe
        if a.policy != "selective" and a.save != ActivationSection().save:
            raise ConfigError(
                "activation.save",
                f"{','.join(a.save)!r} contradicts activation.policy {a.policy!r}",
            )
        if e.dispatch_mode != "static" and e.static_capacity != MoeSection().static_capacity:
            raise ConfigError(
                "moe.static_capacity",
                f"{e.static_capacity} contradicts moe.dispatch_mode {e.dispatch_mode!r}",
            )
        if e.deepep_num_sms != "auto" and e.dispatcher in ("local", "alltoall"):
            raise ConfigError(
                "moe.deepep_num_sms",
                f"{e.deepep_num_sms} contradicts moe.dispatcher {e.dispatcher!r}",
            )
        for field in ("path", "eval_path"):
            value = getattr(d, field)
            if d.source in ("stdlib", "synthetic") and value is not None:
                raise ConfigError(
                    f"data.{field}", f"{value!r} contradicts data.source {d.source!r}; unset one"
                )


def launched_place() -> Place | None:
    """This process's place among those that torchrun, srun or moetrain started; None: alone."""
    return read_place(os.environ)


def allocator_is_set() -> bool:
    """Whether the user has told torch how to allocate device memory."""
    return bool({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ))


def user_cache_dir() -> Path:
    """The user's cache folder of moetrain: under XDG_CACHE_HOME, else ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moetrain"


def _settings() -> dict[str, bool]:
    """Every dotted name, and whether it may be unset."""
    names = {}
    for name, field in Config.model_fields.items():
        section = field.default
        inner = type(section).model_fields if isinstance(section, _Section) else {"": field}
        for key, setting in inner.items():
            names[f"{name}.{key}".rstrip(".")] = type(None) in get_args(setting.annotation)
    return names


def _as_config_error(error: ValidationError) -> ConfigError:
    """The first of pydantic's complaints (a union's branches share one field) as one line."""
    first = error.errors()[0]
    known = _settings()
    name = ".".join(str(part) for part in first["loc"])
    field = next((k for k in known if name == k or name.startswith(k + ".")), name)
    if first["type"] == "extra_forbidden":
        return ConfigError(field, f"unknown setting{hint(field, known)}")
    messages = dict.fromkeys(
        e["msg"].removeprefix("Value error, ")
        for e in error.errors()
        if ".".join(map(str, e["loc"])).startswith(field)
    )
    return ConfigError(field, f"{first['input']!r}: {' or '.join(messages)}")
