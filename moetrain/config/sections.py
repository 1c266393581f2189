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

IndexerMode = Literal["frozen", "joint", "warmup"]
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
    """Name of an architecture that starts with random weights: debug, qwen3-0.6b, qwen3-30b-a3b,
    ..."""
    path: str | None = None
    """Hugging Face checkpoint to start from instead of a preset: a local folder or a hub id."""
    vocab_size: int | None = _SIZE
    """Vocabulary size; unset: the preset's, or the checkpoint's plus the rows that data.new_tokens
    needs. If it is larger than the checkpoint's, embedding and head get more rows. Each new row
    begins as the mean of the old ones."""
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
    """Length of the longest row that the model accepts, in tokens; unset: the model's own limit. A
    value above that limit needs model.rope, unless the model has no rotary embeddings
    (Nemotron-3, Granite 4)."""
    rope: Literal["yarn", "linear"] | None = None
    """Method that stretches rotary embeddings to model.max_positions: yarn (arXiv 2309.00071) or
    linear (arXiv 2306.15595). Its factor is model.max_positions divided by the model's original
    length, and exports contain it. Unset: the model's own method. Models without rotary embeddings,
    and models whose layers have different rotary angles (Gemma-4), support neither."""
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
    """Passes over its rows in one pass over the mixture. With weights it is the largest number of
    passes."""
    limit: PositiveInt | None = None
    """Number of records or files to read, from the first on; unset: all."""
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
    """The source of text, and how the text becomes packed rows of tokens."""

    source: Literal["stdlib", "text", "records", "jsonl", "synthetic"] = "stdlib"
    """Kind of data. stdlib: the source code of Python's standard library; text: a text file, or a
    folder of them; records: files of records (.jsonl, .jsonl.gz, .jsonl.zst, .csv, .parquet,
    .arrow), a data set that `datasets` saved, or one on the Hugging Face hub; jsonl: another name
    for records; synthetic: random tokens. If this is unset and data.path is set, the suffix of
    data.path decides."""
    path: MaybePath = None
    """File, folder or pattern (data/*.parquet) to read, or OWNER/NAME of a data set on the hub."""
    mix: tuple[MixEntry, ...] | None = None
    """Sources of a mixture, which replace data.path. In a TOML file each source is a table
    [[data.mix]] with path, name, weight, repeat, limit and some other settings of this section. On
    a command line the value is a list in JSON."""
    split: str = "train"
    """Split to read of a saved data set, or of one on the hub."""
    subset: str | None = None
    """Subset (configuration) to read of a data set on the hub; unset: its default subset."""
    format: Literal[
        "auto", "messages", "sharegpt", "preference", "completion", "alpaca", "segments", "text"
    ] = "auto"
    """Format of the records. messages: chats; sharegpt: chats in `conversations`; preference: pairs
    of `chosen` and `rejected`; completion: pairs of `prompt` and `completion`; alpaca: pairs of
    `instruction` and `output`; segments: texts with a `label` that says whether each is learned;
    text: plain text in data.text_field; auto: the fields of each record
    decide."""
    train_on: Literal["all", "completion", "last"] = "all"
    """Turns of the assistant that the model learns. all: all of them; completion: those after the
    user's last turn; last: the last one. From a record with a prompt and a completion, the model
    always learns the completion alone."""
    eval_path: MaybePath = None
    """File or folder to evaluate on; unset: data.eval_fraction of the documents is held out."""
    eval_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Share of the documents that is held out for evaluation. A hash of a document's name or text
    decides whether it is held out. If training or evaluation would get no row, the last documents
    (with data.packing stream, the last rows) are held out instead, in the same share. With
    data.streaming that is an error instead."""
    text_field: str = "text"
    """Field that holds the text of a record in data.format text."""
    chat_template: MaybePath = None
    """Jinja file that formats `messages`; unset: the tokenizer's own template, else ChatML."""
    chat_template_kwargs: str | None = None
    """Additional variables that the chat template gets for every conversation, as a JSON object
    such as {"enable_thinking": false}. A record's own variables take precedence."""
    tokenizer: GivenPath = "byte"
    """Tokenizer: byte (no file), a tokenizer.json, a folder that holds one, or a hub id. Unset with
    model.path: the checkpoint's own tokenizer."""
    new_tokens: Annotated[
        tuple[str, ...],
        checked(lambda x: len({*x}) == len(x), "names a token twice; once is enough"),
    ] = ()
    """Texts that each become a special token of the tokenizer, separated by commas
    (<|tool|>,<|result|>). If embedding and head have too few rows, they get more
    (model.vocab_size). Exports contain the tokens."""
    seq_len: int = Field(default=256, gt=1)
    """Number of tokens in one packed row. Unset with model.path: the model's limit, but at most
    4096."""
    packing: Literal["auto", "whole", "stream"] = "auto"
    """Method by which documents fill rows. whole: a document that fits in a row is not cut, and
    rows have padding. Longer texts are cut into parts; data.overlong decides about longer
    conversations. stream: documents follow one another, and are cut at the end of each row. auto:
    whole for conversations and for completions of prompts, else stream."""
    overlong: Literal["cut", "drop", "error"] = "cut"
    """Treatment of conversations that are longer than a row. cut: their end is cut off; drop:
    they are left out; error: they end the run. The log says how many there are. Preference pairs
    cannot be cut; pairs that are too long are left out unless the value is error."""
    bad_records: Literal["error", "skip"] = "error"
    """Treatment of bad records. Records are bad if they are not JSON, are too large, have an
    unknown format, or are refused by the chat template, and rows of a .csv file if they have more
    or fewer cells than its first row. error: the first bad record ends the run; skip: bad records
    are left out, and the log has their number and the first one of each kind."""
    streaming: Literal["auto", "yes", "no"] = "auto"
    """Start training while later blocks of the data are still being tokenised. The number of rows
    in a pass is then estimated from the first block. auto: yes if the data is estimated to have
    more than 64 MiB. A source of data.mix with a limit is never streamed."""
    workers: NonNegativeInt | None = None
    """Number of processes of each rank that tokenise a stream ahead of training; unset: the rank's
    share of the CPU cores, but at most 8."""
    cache_dir: MaybePath = None
    """Folder of the token cache; unset: the user's cache folder (XDG_CACHE_HOME/moetrain)."""
    num_documents: int = Field(default=1024, gt=0, lt=2**31)
    """Number of rows to train on with data.source synthetic."""

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
    objective: Literal["next_token", "dpo", "ipo", "hinge", "kto", "simpo", "orpo", "reward"] = (
        "next_token"
    )
    """Loss of the run. next_token learns to predict the next token of a text. The other objectives
    learn which of two answers is preferred, from records in data.format preference. dpo, ipo,
    hinge (SLiC's) and kto compare the model with the model that the run begins from; simpo and orpo
    need no such reference. kto also learns from single answers with a `label`, true or false.
    reward trains a reward model: a head that scores a text at its last token replaces the head over
    the vocabulary. It learns to score the chosen answer higher than the rejected one
    (Bradley-Terry), by the record's `margin` if it has one."""
    reward_centering: float = Field(default=0.0, ge=0)
    """Weight of a second loss of objective reward, which keeps rewards near 0: the mean square of
    the sum of both answers' rewards (TRL's center_rewards_coefficient; 0.01 is usual). 0: no such
    loss."""
    beta: float = Field(default=0.1, gt=0)
    """Weight of the log-ratio of model and reference in dpo, ipo, hinge and kto; a larger weight
    keeps the model closer to the reference. In hinge a pair is learned until the log-ratios of its
    answers differ by 1 / beta. In simpo it is the weight of the mean log-probabilities (2 to 10
    is usual). In orpo it is the weight of the odds ratio, which is added to the chosen answer's
    loss."""
    simpo_gamma: float = Field(default=0.5, ge=0)
    """Margin of simpo: the reward of the chosen answer should exceed that of the rejected answer by
    this much."""
    desirable_weight: float = Field(default=1.0, gt=0)
    """Weight of kto's loss of chosen answers and of answers with the label true."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """Weight of kto's loss of rejected answers and of answers with the label false."""
    mtp_weight: float = Field(default=0.0, ge=0)
    """Weight of the multi-token prediction loss; 0.1 and 0.3 are usual. The loss trains the
    additional blocks behind the model's last one (DeepSeek's, GLM's, Qwen's) to predict the tokens
    after the next one. 0: these blocks are not trained."""
    indexer: IndexerMode = "frozen"
    """Training of the indexers that select attention's keys (DeepSeek-V3.2, GLM-5), which the loss
    of the language model does not train. frozen: they are not trained. joint: a loss of their own
    trains them beside the model, to score the selected keys as attention weighs them. warmup: this
    loss trains the indexers alone, over all keys, and attention has all keys."""
    seed: NonNegativeInt = 0
    """Seed of the initial weights, of the order of the data, and of sampling."""
    micro_batch_size: PositiveInt = 8
    """Rows in one forward pass of one device."""
    global_batch_size: PositiveInt = 8
    """Rows in one optimizer step, over all devices and all accumulated micro-batches."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Kind of device to train on; auto: cuda if there is a GPU."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of computation. auto: bfloat16 on CUDA, float32 on a CPU. Frozen weights are stored in
    this dtype too, or as lora.base_dtype says. Trained weights are stored as optim.weight_dtype
    says."""
    deterministic: bool = False
    """Use only reproducible algorithms, so that the same run gives the same bits again."""
    freeze: tuple[str, ...] = ()
    """Patterns of parameters that are not trained, separated by commas (layers.0.*,*.router.*).
    They are stored in the compute dtype, without gradients or moments. The selection bias of a
    frozen router is not updated either (moe.bias_update_rate)."""
    max_bad_steps: PositiveInt = 5
    """Number of bad steps in a row that ends the run. A step is bad, and is skipped, if its loss or
    gradient norm is not finite."""
    compare_replicas: NonNegativeInt = 0
    """Steps between checks that ranks with the same weights hold the same bits. A difference means
    that a machine is faulty. It ends the run, and the error names the rank. 0: no checks."""
    gc_interval: PositiveInt = 50
    """Steps between runs of Python's garbage collector, which does not run at any other time during
    training."""
    eval_interval: NonNegativeInt = 100
    """Steps between evaluations on held-out rows. The model is also evaluated before the first step
    (unless train.eval_first is no) and at the end of the run. 0: only at the end."""
    eval_first: bool = True
    """Evaluate on held-out data (in reinforcement learning, on held-out tasks) before the first
    step, if train.eval_interval is not 0. no: the first evaluation is the next one, which
    train.eval_interval or the end of the run asks for. Training computes the same either way."""
    eval_rows: PositiveInt = 256
    """Number of held-out rows in each evaluation; if there are fewer, all of them are used. Every
    evaluation uses the same rows, whatever train.seed and the number of ranks are."""
    patience: NonNegativeInt = 0
    """End the run after this many evaluations in a row without a better held-out loss (in
    reinforcement learning, without a better held-out reward); 0: never. The evaluation before the
    first step does not count."""
    target_loss: float | None = Field(default=None, gt=0)
    """End the run at the first evaluation with a held-out loss (``eval_loss``, in nats) of at most
    this; unset: never. The evaluation before the first step does not count."""
    sample_tokens: NonNegativeInt = 200
    """Number of tokens that the trained model generates at the end of the run, as a sample; 0: no
    sample. In a Python program the callback ``moetrain.generate.weights.Sampled`` writes the
    sample."""
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
    """Rank of the adapters; 0: no adapters. For routed experts it must be a multiple of 8. With
    adapters, a run trains only the adapters, lora.modules_to_save, lora.trainable_tokens and a
    reward model's head. All other weights are frozen, and stored in the compute dtype or in
    lora.base_dtype."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the adapters: the output of an adapter is multiplied by alpha / rank."""
    rs: bool = False
    """Multiply the output by alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732)."""
    use_dora: bool = False
    """Also train the length of each row of the adapted matrices (DoRA, arXiv 2402.09353). Linear
    layers support it; routed experts and routers do not."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that is dropped in training. Adapters of routed experts and of
    routers do not support dropout."""
    targets: tuple[str, ...] = ("auto",)
    """Patterns of the modules that get adapters, separated by commas: *.attn.*, *.wq, *.mlp.*,
    layers.1.moe.experts, *.router. auto: attention without its gates, and the routed experts, or
    the MLPs if the model has no routed experts."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """Distribution of an adapter's first matrix; the second one starts at 0. kaiming: uniform
    within 1 / sqrt(inputs); gaussian: normal with standard deviation 1 / rank."""
    base_dtype: Literal["auto", "float8", "mxfp4", "nf4", "nvfp4"] = "auto"
    """Storage of the blocks' frozen matrices. auto: train.dtype. float8 (MXFP8), mxfp4, nf4
    (QLoRA's) and nvfp4 quantise them to 8, 4, 4 and 4 bits with scales, which takes 0.52, 0.27,
    0.26 and 0.28 of bf16's memory. The matrices are dequantised whenever a block runs."""
    offload_experts: bool = False
    """Keep quantised frozen routed experts in host memory, pinned if there is a GPU. While a block
    runs, in the forward and in the backward, the experts of the next block are copied to the
    device."""
    modules_to_save: tuple[Literal["embed_tokens", "lm_head"], ...] = ()
    """Modules that are trained in full beside the adapters, and saved with them: embed_tokens,
    lm_head, or both, separated by commas. If both share one matrix, name it embed_tokens."""
    trainable_tokens: tuple[str, ...] = ()
    """Tokens whose rows of embedding and head are trained beside the adapters, given by id or text
    and separated by commas (151669,<|tool|>). All other rows stay as they are. The adapter's files
    hold only these rows."""
    path: MaybePath = None
    """Folder of adapters in PEFT's format to start from. Their rank, targets, modules_to_save and
    trainable_tokens must be those of this section."""
    save: bool = True
    """Write the adapters in PEFT's format to output_dir/adapter at the end of the run."""
    layout: Literal["auto", "per_expert", "fused"] = "auto"
    """Layout of routed experts' adapters in files in PEFT's format. per_expert: one module for each
    expert; fused: PEFT's target_parameters; auto: the layout that PEFT can apply to the model's
    family. vLLM and SGLang may need the other layout (docs/checkpoints.md)."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of ``trainable_tokens``, once they are resolved to ids, in ascending order."""
        return tuple(sorted({int(token) for token in self.trainable_tokens}))

    @property
    def scale(self) -> float:
        """The factor of an adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.rs else self.rank)


class CheckpointSection(Section):
    """Checkpoints, resuming and exports."""

    interval: NonNegativeInt = 0
    """Steps between checkpoints. A run also saves by time (checkpoint.minutes), at its end, and
    when it is stopped. 0: no checkpoints by steps."""
    minutes: float = Field(default=30, ge=0)
    """Save when this many minutes have passed since the last checkpoint, so that a power cut loses
    no more than that; 0: never by time."""
    at_end: bool = True
    """Write a checkpoint at the end of the run."""
    keep: PositiveInt = 2
    """Number of the newest checkpoints to keep; older ones are removed."""
    keep_every: NonNegativeInt = 0
    """Never remove checkpoints at multiples of this many steps; 0: remove them like others."""
    best: bool = False
    """Save at an evaluation that is the best so far, and keep that checkpoint in addition to the
    newest ones. The link checkpoints/best points to it. The exports at the end of the run
    (checkpoint.save_hf, lora.save) have its weights."""
    asynchronous: bool = False
    """Write checkpoints while training goes on, from a copy of weights and moments in host memory
    (pinned if there is a GPU). Over all processes the copy takes 12 bytes for each trained
    parameter with AdamW, or 8 with moments in bfloat16."""
    memory_interval: NonNegativeInt = 0
    """Steps between checkpoints in the memory of the machines, from which a restarted run can
    resume; 0: none. The two newest are kept. They are removed at the end of the run."""
    memory: GivenPath = "/dev/shm"
    """Folder for checkpoints in memory, local to each machine."""
    replicas: PositiveInt = 1
    """Number of machines that hold each file of a checkpoint; all machines, if there are fewer. It
    applies to checkpoints in memory (checkpoint.memory_interval) and to machines that each have
    their own output_dir (checkpoint.shared no). With 2, the files survive the loss of one
    machine."""
    shared: bool = True
    """yes: all machines share output_dir. no: each machine has its own folder with its part of each
    checkpoint, and the first machine writes metrics and exports."""
    store: str | None = None
    """URL in an object store (s3://, gs:// or another that fsspec supports) to which checkpoints
    are copied. With checkpoint.resume auto, a run fetches the newest one from there, unless
    output_dir has one that is at least as new."""
    resume: GivenPath = "auto"
    """Checkpoint to resume from. auto: the newest one in output_dir or in memory, if there is one;
    never: none, and the run starts anew. Any other value is the folder of a checkpoint."""
    save_hf: bool = False
    """Write a Hugging Face checkpoint to output_dir/hf at the end of the run. It has the weights of
    the last step (with checkpoint.best, of the best evaluation), the config, the tokenizer, and the
    other tensors and files of model.path."""
    hf_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Dtype of the weights that checkpoint.save_hf writes. auto: the dtype of each tensor in
    model.path, or float32 for a preset."""

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
    """What a run logs while it trains."""

    WARM_STEPS: ClassVar[int] = 1
    """Steps that are traced and thrown away, since the profiler itself loads in them."""

    interval: PositiveInt = 10
    """Steps between logged lines."""
    tensorboard: bool = True
    """Write TensorBoard files to output_dir/tensorboard."""
    reporters: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Programs that also get the logged values: wandb (Weights & Biases; WANDB_MODE=offline keeps
    it offline) or tensorboard."""
    project: str = "moetrain"
    """Name of the project for log.reporters. The name of the run is that of its output folder."""
    progress: bool = True
    """Draw a progress bar when standard output is a terminal."""
    profile: NonNegativeInt = 0
    """Number of steps to profile; 0: none. Only these steps and the one before them are slower.
    Each rank writes a trace (for ui.perfetto.dev), and on CUDA a history of memory (for
    pytorch.org/memory_viz), to output_dir/profile."""
    profile_after: PositiveInt = 4
    """Number of steps that this process takes before the profile. After them, one step warms up the
    profiler, and then the profiled steps follow."""

    find_nan: bool = False
    """If the loss or the gradient of a step is not finite, compute the step again, and name the
    first tensor that is not finite, with its module and rank. With this setting, each step waits
    for the device."""

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
