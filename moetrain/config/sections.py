"""Sections of settings: model, data, run length, adapters, checkpoints, logs.

Each setting has its type, default, meaning and own validation here; the docstring under a field is
what ``--help`` prints. How a step is computed is in :mod:`moetrain.config.compute`, reinforcement
learning and jobs are in :mod:`moetrain.config.rl`, checks that span sections in
:mod:`moetrain.config`.
"""

import json
import math
import os
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from moetrain.config.sources import ConfigError, is_list, is_tuple, source_by_suffix

_POWER_OF_TEN = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d{1,4}")
_FP32_LEAST, _FP32_MOST = 2.0**-126, 2.0**128


class Section(BaseModel):
    """A frozen group of settings, without unknown keys, infinities or NaNs."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        """Convert 1e6 to an integer (Python and TOML read a float), and the text a,b to a tuple."""
        kind = cls.model_fields[info.field_name or ""].annotation
        kinds = get_args(kind) or (kind,)
        if tuple in map(get_origin, (kind, *kinds)):
            words: object = value
            if isinstance(value, str):
                words = value.split(",") if value.strip() else []
            if is_list(words) and any(isinstance(x, str) and not x.strip() for x in words):
                raise ValueError("an entry is empty; leave it out")
            return tuple(words) if is_list(words) else words
        if int not in kinds or float in kinds:
            return value
        is_text = isinstance(value, str) and _POWER_OF_TEN.fullmatch(value.strip())
        number = Decimal(value.strip()) if is_text else value
        # Neither NaN nor inf, nor a number of a thousand digits.
        is_small = isinstance(number, float | Decimal) and abs(number) < 2**64
        return int(number) if is_small and number == int(number) else value

    @field_validator("*")
    @classmethod
    def _can_be_used(cls, value: Any) -> Any:
        """Refuse text that cannot be a file's name, and numbers that torch cannot hold."""
        if isinstance(value, str) and not value.strip():
            raise ValueError("is empty; leave it out")
        # Surrogates: bytes that are not UTF-8, or half a character.
        if isinstance(value, str) and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
            raise ValueError("has characters that are not text; leave them out")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError("is beyond 64 bits; give a number nearer to 0")
        if isinstance(value, float) and value and not _FP32_LEAST <= abs(value) < _FP32_MOST:
            remedy = "nearer to 0" if abs(value) > 1 else "farther from 0"
            problem = "is 0 or infinite in fp32, in which weights are updated"
            raise ValueError(f"{problem}; give a number {remedy}")
        return value


_FROM_HOME = AfterValidator(lambda path: path and os.path.expanduser(path))
GivenPath = Annotated[str, _FROM_HOME]
"""A path in which ~ is expanded: no shell does that in a file or after =."""
MaybePath = Annotated[str | None, _FROM_HOME]


def checked(is_right: Callable[[Any], bool], remedy: str) -> AfterValidator:
    """Return a validator that raises ValueError(``remedy``) unless ``is_right(value)``."""

    def check(value: Any) -> Any:
        if not is_right(value):
            raise ValueError(remedy)
        return value

    return AfterValidator(check)


_SIZE = Field(default=None, gt=0, le=2**20)
"""A size of a model. The limit is above the sizes of all known models: more must be a mistake."""


class ModelSection(Section):
    """The model to train: a preset, whose sizes can be overridden, or a Hugging Face checkpoint."""

    preset: str | None = None
    """Architecture that starts with random weights: debug, qwen3-0.6b, qwen3-30b-a3b, ..."""
    path: str | None = None
    """Hugging Face checkpoint to start from, a local folder or a hub id, instead of a preset."""
    vocab_size: int | None = _SIZE
    """Vocabulary size; unset: the preset's, or the checkpoint's plus the rows that data.new_tokens
    needs. If it is larger than the checkpoint's, embedding and head get further rows, which begin
    as the mean of the others."""
    hidden_size: int | None = _SIZE
    """Model width; unset: the preset's."""
    num_layers: int | None = Field(default=None, gt=0, le=10_000)
    """Number of transformer blocks; unset: the preset's."""
    num_heads: int | None = _SIZE
    """Attention (query) heads; unset: the preset's."""
    num_kv_heads: int | None = _SIZE
    """Key/value heads; unset: the preset's."""
    head_dim: int | None = _SIZE
    """Width of one attention head; unset: the preset's."""
    intermediate_size: int | None = _SIZE
    """Width of a dense MLP; unset: the preset's."""
    num_experts: int | None = _SIZE
    """Experts in a MoE layer; unset: the preset's."""
    num_experts_per_token: int | None = _SIZE
    """Experts that each token is sent to; unset: the preset's."""
    moe_intermediate_size: int | None = _SIZE
    """Width of one expert; unset: the preset's."""
    max_positions: PositiveInt | None = None
    """Tokens of the longest row that the model takes; unset: the model's own limit. A larger value
    than that limit needs model.rope, unless the model has no rotary embeddings (Nemotron-3)."""
    rope: Literal["yarn", "linear"] | None = None
    """The method that stretches rotary embeddings to model.max_positions: yarn (arXiv 2309.00071)
    or linear (arXiv 2306.15595). The factor is model.max_positions over the model's own length, and
    exports contain it. Unset: the model's own method. Neither is possible for models without rotary
    embeddings, or with several (Gemma-4)."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the normal distribution that random weights are drawn from."""

    def overrides(self) -> dict[str, int]:
        """Return the architecture fields that were set, by name."""
        own = {"preset", "path", "init_std", "max_positions", "rope"}
        return {k: v for k, v in self.model_dump(exclude_none=True).items() if k not in own}


class MixEntry(Section):
    """One source of a mixture, a table [[data.mix]]. Unset fields are those of the section data."""

    path: GivenPath
    """File, folder, pattern or OWNER/NAME on a hub to read."""
    name: str | None = None
    """Its name in metrics (eval_loss/NAME); unset: the last part of its path."""
    weight: float | None = Field(default=None, gt=0)
    """Share of the rows, relative to the weights of all sources. If no entry sets it, a pass has
    all rows of each source."""
    repeat: PositiveInt = 1
    """Passes over its rows in one pass over the mixture; with weights, the most passes."""
    limit: PositiveInt | None = None
    """Number of its first records or files to read; unset: all."""
    source: Literal["text", "records"] | None = None
    """Kind of data; unset: the suffix of its path decides."""
    eval_path: MaybePath = None
    """File or folder to evaluate on; unset: data.eval_fraction of the entry is held out."""
    split: str | None = None
    subset: str | None = None
    format: str | None = None
    text_field: str | None = None

    def __str__(self) -> str:
        """Return the path, by which messages name the entry."""
        return self.path

    def label(self) -> str:
        """Return the entry's name."""
        return self.name or os.path.basename(os.path.normpath(self.path)).partition(".")[0]


class DataSection(Section):
    """The source of text, and how it becomes packed rows of tokens."""

    source: Literal["stdlib", "text", "records", "jsonl", "synthetic"] = "stdlib"
    """Kind of data. stdlib: the source code of Python's standard library; text: a text file, or a
    folder of them; records: files of records (.jsonl, .jsonl.gz, .jsonl.zst, .csv, .parquet,
    .arrow), a data set that `datasets` saved, or one on the Hugging Face hub; jsonl: another name
    for records; synthetic: random tokens. Unset: the suffix of data.path decides."""
    path: MaybePath = None
    """File, folder or pattern (data/*.parquet) to read, or OWNER/NAME of a data set on the hub."""
    mix: tuple[MixEntry, ...] | None = None
    """Sources of a mixture, instead of data.path: tables [[data.mix]] with path, name, weight,
    repeat, limit and others of this section; on a command line a list in JSON."""
    split: str = "train"
    """Split to read, of a saved data set or of one on the hub."""
    subset: str | None = None
    """Configuration (subset) to read of a data set on the hub; unset: its default."""
    format: Literal[
        "auto", "messages", "sharegpt", "preference", "completion", "alpaca", "text"
    ] = "auto"
    """Form of the records. messages: chats; sharegpt: `conversations`; preference: `chosen` and
    `rejected`; completion: `prompt` and `completion`; alpaca: `instruction` and `output`; text:
    data.text_field. auto: by the fields of each record."""
    train_on: Literal["all", "completion", "last"] = "all"
    """Turns of the assistant that are learned. all: all of them; completion: those after the user's
    last turn; last: the last one. Of records with a prompt and a completion, only the completion is
    learned in any case."""
    eval_path: MaybePath = None
    """File or folder to evaluate on; unset: data.eval_fraction of the documents is held out."""
    eval_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Share of the documents that is held out for evaluation, chosen by a hash of their names or
    text. With too few documents, the last tokens are held out instead, in the same share."""
    text_field: str = "text"
    """Field that holds the text of a record that is no conversation."""
    chat_template: MaybePath = None
    """Jinja file that formats `messages`; unset: the tokenizer's own template, else ChatML."""
    chat_template_kwargs: str | None = None
    """More variables of the chat template, for all conversations, as a JSON object such as
    {"enable_thinking": false}. A record's own variables take precedence."""
    tokenizer: GivenPath = "byte"
    """The tokenizer: byte (no file), a tokenizer.json, a folder that holds one, or a hub id. Unset
    with model.path: that checkpoint's own."""
    new_tokens: Annotated[
        tuple[str, ...],
        checked(lambda x: len({*x}) == len(x), "names a token twice; once is enough"),
    ] = ()
    """Texts that become special tokens of the tokenizer, one each, separated by commas
    (<|tool|>,<|result|>). If embedding and head have too few rows, they get further ones
    (model.vocab_size). Exports contain the tokens."""
    seq_len: int = Field(default=256, gt=1)
    """Tokens in one packed row. Unset with model.path: as many as the model takes, up to 4096."""
    packing: Literal["auto", "whole", "stream"] = "auto"
    """The way in which documents fill rows. whole: rows have padding, and a document that fits in a
    row is not cut. Longer texts are cut into parts; for longer conversations data.overlong decides.
    stream: documents follow one another and are cut at the end of each row. auto: whole for
    conversations, else stream."""
    overlong: Literal["cut", "drop", "error"] = "cut"
    """Conversations that are longer than a row. cut: they lose their end; drop: they are left out;
    error: they end the run. The log says how many. Preference pairs cannot be cut: they are left
    out, or end the run."""
    bad_records: Literal["error", "skip"] = "error"
    """Records that are not JSON, too large, of no known form, or that the chat template refuses,
    and rows of a .csv file with more or fewer cells than its first row. error: the first one ends
    the run; skip: they are left out, and the log has their number, and the first one of each
    kind."""
    streaming: Literal["auto", "yes", "no"] = "auto"
    """Begin to train while later blocks of the data are tokenised. The number of rows in a pass
    over a stream is estimated from its first block. auto: yes for more than 64 MiB of files. A
    source of data.mix with a limit is never streamed."""
    workers: NonNegativeInt | None = None
    """Processes of each rank that tokenise a stream ahead; unset: as many as the rank's share of
    the cores, up to 8."""
    cache_dir: MaybePath = None
    """Folder of the token cache; unset: the user's cache folder (XDG_CACHE_HOME/moetrain)."""
    num_documents: int = Field(default=1024, gt=0, lt=2**31)
    """Rows of the synthetic source."""

    @field_validator("mix", mode="before")
    @classmethod
    def _read_tables(cls, value: object) -> object:
        try:
            tables: object = json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError(f"give a list of tables in JSON ({error})") from None
        if tables is None or is_list(tables) or is_tuple(tables):
            return tables
        raise ValueError("give a list of tables")

    @property
    def skips_bad(self) -> bool:
        """True: bad records are left out (``bad_records skip``)."""
        return self.bad_records == "skip"

    def check(self) -> None:
        """Raise ConfigError unless the source has what it reads."""
        if self.source in ("text", "records", "jsonl") and not (self.path or self.sources()):
            raise ConfigError(
                "data.path", f"not set, and data.source {self.source!r} needs it; set it"
            )

    def sources(self) -> dict[str, Self]:
        """Return the settings of each source of the mixture by name; raises ConfigError."""
        entries = {entry.label(): entry for entry in self.mix or ()}
        if len(entries) < len(self.mix or ()):
            raise ConfigError("data.mix", "two entries have the same name; give each its own")
        if len({entry.weight is None for entry in entries.values()}) > 1:
            raise ConfigError(
                "data.mix", "only some entries have a weight; give one to all entries, or to none"
            )
        own = ("path", "eval_path", "split", "subset", "format", "text_field")
        return {
            name: self.model_copy(
                update={
                    "source": entry.source or source_by_suffix(entry.path, "data.mix"),
                    **{key: x for key in own if (x := getattr(entry, key)) is not None},
                }
            )
            for name, entry in entries.items()
        }


class TrainSection(Section):
    """The run: its length, batches, precision, evaluations and safety stops."""

    steps: int | None = Field(default=300, gt=0)
    """Optimizer steps. Give this or train.epochs."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the data; a fraction is allowed. Give this or train.steps."""
    objective: Literal["next_token", "dpo", "ipo", "kto", "simpo", "orpo", "reward"] = "next_token"
    """The loss. next_token learns the next token of the text. The others learn which of two
    answers is preferred, from records of data.format preference: dpo, ipo and kto compare the model
    with the one that the run begins from, simpo and orpo have no reference. kto also learns from
    single answers with a `label`, true or false. reward trains a reward model: a head that scores
    a text by its last token takes the vocabulary's place, and the chosen answer is to score higher
    than the rejected one (Bradley-Terry), by the record's `margin` if it has one."""
    reward_centering: float = Field(default=0.0, ge=0)
    """In objective reward, weight of a second loss that keeps rewards around 0: the mean square of
    the sum of both answers' rewards (TRL's center_rewards_coefficient; 0.01 is usual). 0: none."""
    beta: float = Field(default=0.1, gt=0)
    """Weight of the log-ratio of model and reference in dpo, ipo and kto: the larger, the closer
    the model stays to the reference. In simpo: weight of the mean log-probabilities (2 to 10 is
    usual). In orpo: weight of the odds ratio, which is added to the chosen answer's loss."""
    simpo_gamma: float = Field(default=0.5, ge=0)
    """Margin by which the rewards of the two answers are to differ in simpo."""
    desirable_weight: float = Field(default=1.0, gt=0)
    """Factor of kto's loss of chosen answers and of answers with the label true."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """Factor of kto's loss of rejected answers and of answers with the label false."""
    mtp_weight: float = Field(default=0.0, ge=0)
    """Weight of the multi-token prediction loss, usually 0.3 or 0.1. It trains the blocks after the
    model's own (DeepSeek's, GLM's, Qwen's) to predict further tokens. 0: these blocks are not
    trained."""
    seed: NonNegativeInt = 0
    """Seed of the initial weights, of the order of the data and of sampling."""
    micro_batch_size: PositiveInt = 8
    """Rows in one forward pass of one device."""
    global_batch_size: PositiveInt = 8
    """Rows in one optimizer step, over all devices and all accumulated micro-batches."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The kind of device to train on; auto: cuda if there is a GPU."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of computation. auto: bfloat16 on CUDA, float32 on a CPU. Frozen weights are stored in
    it too, or as lora.base_dtype says; trained ones as optim.weight_dtype says."""
    deterministic: bool = False
    """Use only reproducible algorithms, so that a rerun gives the same bits."""
    freeze: tuple[str, ...] = ()
    """Patterns of parameters that are not trained, separated by commas (layers.0.*,*.router.*).
    They are stored in the compute dtype, without gradients or moments. The selection bias of a
    frozen router does not move either (moe.bias_update_rate)."""
    max_bad_steps: PositiveInt = 5
    """A step whose loss or gradient norm is not finite is skipped. This many in a row end the
    run."""
    compare_replicas: NonNegativeInt = 0
    """Steps between checks that ranks with the same weights hold the same bits. A difference is a
    machine's fault: it ends the run and names the rank. 0: no checks."""
    gc_interval: PositiveInt = 50
    """Steps between runs of Python's garbage collector. It never runs in between."""
    eval_interval: NonNegativeInt = 100
    """Steps between evaluations on held-out rows; 0: only at the end."""
    eval_rows: PositiveInt = 256
    """Held-out rows that each evaluation uses; all of them if there are fewer. They are the same at
    every evaluation, whatever train.seed and the number of ranks are."""
    patience: NonNegativeInt = 0
    """End the run after this many evaluations in a row that do not improve the best held-out loss
    (in reinforcement learning, the best held-out reward); 0: never. The evaluation before the first
    step does not count."""
    sample_tokens: NonNegativeInt = 200
    """Tokens that the trained model generates at the end of the run, as a sample; 0: no sample. A
    program of your own gets the sample from the callback ``moetrain.generate.weights.Sampled``."""
    sample_prompt: str | None = None
    """Text that the sample continues; unset: the start of a held-out row."""

    def micro_batches(self, data_ranks: int = 1) -> int:
        """Return how many micro-batches each of ``data_ranks`` ranks has in an optimizer step.

        Raises ConfigError: the global batch is not a multiple of the ranks' micro-batches.
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
        """Return the steps of a run over ``num_rows`` rows; a remainder makes one more step."""
        if self.epochs is not None:
            return math.ceil(self.epochs * num_rows / self.global_batch_size)
        assert self.steps is not None  # Config.check demands it
        return self.steps


class LoraSection(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685) beside frozen weights."""

    rank: int = Field(default=0, ge=0, le=1024)
    """Rank of the adapters, for routed experts a multiple of 8; 0: no adapters. With adapters, only
    these, lora.modules_to_save, lora.trainable_tokens and a reward model's head are trained. All
    other weights are frozen, and stored in the compute dtype."""
    alpha: float = Field(default=32.0, gt=0)
    """The output of an adapter is multiplied by alpha / rank."""
    rs: bool = False
    """Multiply by alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732)."""
    use_dora: bool = False
    """Also train the length of each row of the adapted matrices (DoRA, arXiv 2402.09353). Linear
    layers support it; routed experts and routers do not."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that is dropped in training. Adapters of routed experts and
    routers do not support it."""
    targets: tuple[str, ...] = ("auto",)
    """Patterns of the modules that get adapters, separated by commas: *.attn.*, *.wq, *.mlp.*,
    layers.1.moe.experts, *.router. auto: attention without its gates, and the routed experts,
    or the MLPs if there are none."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """The distribution of an adapter's first matrix; the second starts at 0. kaiming: uniformly
    within 1 / sqrt(inputs); gaussian: normally, with standard deviation 1 / rank."""
    base_dtype: Literal["auto", "float8", "mxfp4", "nf4"] = "auto"
    """Storage of the blocks' frozen matrices. auto: in train.dtype; float8 (MXFP8), mxfp4 and nf4
    (QLoRA's): quantised to 8, 4 and 4 bits with scales, which takes 0.52, 0.27 and 0.26 of bf16's
    memory. They are dequantised whenever a block runs."""
    offload_experts: bool = False
    """Keep quantised frozen routed experts in host memory, pinned if there is a GPU. While one
    block runs, in forward and backward, the experts of the next one are copied to the device."""
    modules_to_save: tuple[Literal["embed_tokens", "lm_head"], ...] = ()
    """Modules that are trained whole beside the adapters, and saved with them: embed_tokens,
    lm_head, or both, separated by commas. Tied embeddings are embed_tokens."""
    trainable_tokens: tuple[str, ...] = ()
    """Tokens whose rows of embedding and head are trained beside the adapters, by id or text,
    separated by commas (151669,<|tool|>). All other rows stay as they are. The adapter's files hold
    only these rows."""
    path: MaybePath = None
    """Folder of adapters in PEFT's format to start from; rank, targets, modules_to_save and
    trainable_tokens must be the same."""
    save: bool = True
    """Write the adapters in PEFT's format to output_dir/adapter at the end of the run."""
    layout: Literal["auto", "per_expert", "fused"] = "auto"
    """Layout of routed experts' adapters in files in PEFT's format. per_expert: one module for each
    expert; fused: PEFT's target_parameters; auto: the layout that has an effect in PEFT for the
    model's family. vLLM and SGLang may need the other one (docs/checkpoints.md)."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of ``trainable_tokens``, once they are resolved to ids, in ascending order."""
        return tuple(sorted({int(token) for token in self.trainable_tokens}))

    @property
    def scale(self) -> float:
        """The factor of an adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.rs else self.rank)


class CheckpointSection(Section):
    """Saving, resuming and exporting."""

    interval: NonNegativeInt = 0
    """Steps between checkpoints; 0: only by time (checkpoint.minutes), at the end and when the run
    is stopped."""
    minutes: float = Field(default=30, ge=0)
    """Save when this many minutes have passed since the last checkpoint, so that a power cut loses
    no more; 0: never by time."""
    at_end: bool = True
    """Write a checkpoint at the end of the run."""
    keep: PositiveInt = 2
    """Checkpoints that are kept; older ones are removed."""
    keep_every: NonNegativeInt = 0
    """Keep checkpoints at multiples of this many steps for good, besides the newest; 0: none."""
    best: bool = False
    """Save at an evaluation that is the best so far, and keep that checkpoint besides the newest;
    checkpoints/best is a link to it. The exports at the end of the run (checkpoint.save_hf,
    lora.save) have its weights."""
    asynchronous: bool = False
    """Write checkpoints while training goes on, from a copy of weights and moments in host memory
    (pinned if there is a GPU). Over all processes the copy takes 12 bytes a parameter, or 8 with
    moments in bfloat16."""
    memory_interval: NonNegativeInt = 0
    """Steps between checkpoints in the machines' memory, from which a run that starts again can
    resume; 0: none. The two newest are kept, and removed at the end of the run."""
    memory: GivenPath = "/dev/shm"
    """Folder for checkpoints in memory, local to each machine."""
    replicas: PositiveInt = 1
    """Number of machines that hold each file of a checkpoint; all machines, if there are fewer. It
    applies to checkpoints in memory (checkpoint.memory_interval) and to machines with an output_dir
    of their own (checkpoint.shared no). With 2, one machine may be lost."""
    shared: bool = True
    """All machines share output_dir. no: each machine has a folder of its own, with its part of
    each checkpoint; metrics and exports are written on the first machine."""
    store: str | None = None
    """URL in an object store (s3://, gs:// or another that fsspec knows) to which checkpoints are
    copied. With checkpoint.resume auto a run fetches the newest one, unless output_dir has one that
    is at least as new."""
    resume: GivenPath = "auto"
    """The checkpoint to resume from. auto: the newest checkpoint of output_dir or in memory, if
    there is one; never: start anew; or the folder of a checkpoint."""
    save_hf: bool = False
    """Write a Hugging Face checkpoint to output_dir/hf at the end of the run: weights (of the best
    evaluation with checkpoint.best, else of the last step), config, tokenizer, and the other
    tensors and files of model.path."""
    hf_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Dtype of the weights that checkpoint.save_hf writes. auto: that of each tensor in model.path;
    for a preset, float32."""

    def check(self) -> None:
        """Raise ConfigError if a multiple of ``keep_every`` would have no checkpoint."""
        if self.keep_every and not self.interval:
            raise ConfigError(
                "checkpoint.keep_every",
                f"{self.keep_every}, but checkpoint.interval 0 saves at none of its multiples; "
                f"set checkpoint.interval {self.keep_every}",
            )
        if self.keep_every and self.keep_every % self.interval:
            raise ConfigError(
                "checkpoint.keep_every",
                f"{self.keep_every} is not a multiple of checkpoint.interval {self.interval}, so "
                "some of its multiples would have no checkpoint; set "
                f"{-(-self.keep_every // self.interval) * self.interval}",
            )


class LogSection(Section):
    """The output of a run while it trains."""

    WARM_STEPS: ClassVar[int] = 1
    """Steps that are traced and thrown away, since the profiler itself loads in them."""

    interval: PositiveInt = 10
    """Steps between logged lines."""
    tensorboard: bool = True
    """Write TensorBoard files to output_dir/tensorboard."""
    reporters: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Programs that logged values are also sent to: wandb (Weights & Biases, offline with
    WANDB_MODE=offline) or tensorboard."""
    project: str = "moetrain"
    """Name of the project for log.reporters. The run's own name is that of the output folder."""
    progress: bool = True
    """Draw a progress bar when standard output is a terminal."""
    profile: NonNegativeInt = 0
    """Steps to profile; 0: none. Only these steps are slower. Each rank writes a trace (for
    ui.perfetto.dev) and on CUDA a history of memory (for pytorch.org/memory_viz) to
    output_dir/profile."""
    profile_after: PositiveInt = 4
    """Steps of this process before the profile. One more step then warms up the profiler, and the
    profiled steps follow."""

    find_nan: bool = False
    """If a step's loss or gradient is not finite, compute the step again, and name the first tensor
    that is not finite, with its module and rank. Each step then waits for the device."""

    def check(self, steps: int) -> None:
        """Raise ConfigError if a run of ``steps`` ends before the steps to profile."""
        needed = self.profile_after + self.WARM_STEPS + self.profile
        if self.profile and needed > steps:
            raise ConfigError(
                "log.profile",
                f"{self.profile}, but the run has {steps} steps and needs {needed}: "
                f"{self.profile_after} before (log.profile_after), {self.WARM_STEPS} to warm up "
                f"the profiler, and {self.profile} to profile; lower it, or train longer",
            )
