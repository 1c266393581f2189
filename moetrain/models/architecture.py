"""The sizes of a model, and the parts that its layers are made of.

One flat, frozen :class:`Architecture` holds every number that decides a model's parameters and its
arithmetic. A family's subclass of it names a :class:`Part` for each sub-layer. A part builds its
module and states its parameters and costs, so no other code needs its sizes. The parameters and
costs of a model are the sums over its parts, and tests compare them with built models. Each kind of
part is defined beside the module that it builds.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import nn

from moetrain.config import KernelsSection, MoeSection
from moetrain.config.compute import SavedName, SparseAttentionName
from moetrain.models.rope_scaling import QueryScaling, RopeScaling, Rotation
from moetrain.models.rules import COLWISE, NORM, SCORE, ZERO_NORM, PartStyle, Rule, ShardingPlan

ConfigJson = Mapping[str, Any]
"""A parsed ``config.json`` of a checkpoint, or some of its keys."""
Fields = dict[str, Any]
"""Values by name: fields of an architecture, or keys of a ``config.json``."""

FP32 = 4
"""Bytes of an fp32 element."""


class Weight(NamedTuple):
    """One parameter of a part."""

    shape: tuple[int, ...]
    rule: Rule


def linear(
    name: str, out_dim: int, in_dim: int, rule: Rule, *, bias: bool = False
) -> dict[str, Weight]:
    """Return the parameters of a :class:`~moetrain.models.layers.Linear` called ``name``.

    The results of a ``ROWWISE`` matrix are added up over tensor parallel ranks. Its bias has the
    style "partial" then: each rank adds a share of it.
    """
    found = {f"{name}.weight": Weight((out_dim, in_dim), rule)}
    if bias:
        style = "colwise" if rule.style == "colwise" else "partial"
        found[f"{name}.bias"] = Weight((out_dim,), Rule(style, init="zeros", decay=False))
    return found


@dataclass(frozen=True)
class Workload:
    """One rank's part of a micro-batch, and how the rank computes it."""

    tokens: int
    """T, the tokens of its rows; tensor parallel ranks share them."""
    tp: int
    """Degree of tensor parallelism."""
    ep: int
    """Degree of expert parallelism."""
    width: int
    """Bytes of an element in the compute dtype."""
    is_compiled: bool
    """True: blocks are compiled."""
    cp: int = 1
    """Degree of context parallelism."""
    gathers_keys: bool = False
    """True: attention has the keys and values of all context parallel ranks' tokens."""
    seq_len: int = 0
    """Tokens of a whole row; 0: not known."""
    sparse_attention: SparseAttentionName = "dense"
    """The form of attention to selected keys, as ``kernels.sparse_attention``."""

    @property
    def own_tokens(self) -> int:
        """N, the tokens that this tensor parallel rank processes alone."""
        return self.tokens // self.tp

    @property
    def key_tokens(self) -> int:
        """The number of tokens whose keys and values attention on this rank has."""
        return self.tokens * (self.cp if self.gathers_keys else 1)

    def received(self, spread: float, gathered: float) -> dict[str, float]:
        """Return the bytes that a context parallel rank receives in a part's forward.

        Args:
            spread: elements a token that ``ulysses`` exchanges among the ranks.
            gathered: elements a token that ``all_gather`` sends to every rank.

        Returns:
            The bytes for each value of ``parallel.cp_method``.
        """
        each, others = self.tokens * self.width, self.cp - 1
        return {"ulysses": each * spread * others / self.cp, "all_gather": each * gathered * others}


@dataclass(frozen=True, kw_only=True)
class Part(ABC):
    """Describes one sub-layer: its sizes, its parameters and its costs.

    Equal parts build equal modules. A field has the name of the architecture's field that it is
    read from. Impossible sizes raise a ValueError that names them.
    """

    name: ClassVar[str] = "mlp"
    """Name of the block's attribute that holds the module."""
    norm: ClassVar[str] = "mlp_norm"
    """Name of the block's attribute that holds the norm before it; empty: it has none."""
    after: ClassVar[str] = ""
    """Name of the block's attribute that holds the norm after it; empty: it has none. A block calls
    only parts that have a norm before or after them."""
    style: ClassVar[PartStyle] = "all"
    aligned: ClassVar[tuple[str, ...]] = ()
    """Names of fields that are widths of matrix products. On a GPU, such a width in the compute
    dtype must take a multiple of 16 bytes."""
    divided: ClassVar[Mapping[str, str]] = {}
    """For names of fields, the mesh axis (``tp`` or ``ep``) whose degree must divide the field."""

    hidden_size: int

    @property
    def norms(self) -> list[str]:
        """The names of the block's norms before and after it."""
        return [name for name in (self.norm, self.after) if name]

    @classmethod
    def of(cls, arch: object, **overrides: Any) -> Self:
        """Make the part from the fields of ``arch``, except for those in ``overrides``."""
        names = [field.name for field in fields(cls) if field.name not in overrides]
        return cls(**{name: getattr(arch, name) for name in names}, **overrides)

    @abstractmethod
    def build(self, kernels: KernelsSection, moe: MoeSection) -> nn.Module:
        """Build the module; :class:`moetrain.models.transformer.Block` shows how it is called."""

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, Weight]:
        """Every parameter of the module, by its name in the module."""

    # Arithmetic.
    def num_params(self) -> int:
        """Count the parameters."""
        return sum(math.prod(weight.shape) for weight in self.weights.values())

    def num_active_params(self) -> int:
        """Count the parameters that one token uses."""
        return self.num_params()

    def products_per_token(self, seq_len: int) -> float:
        """Count the multiply-adds of matrix products in one token's forward."""
        return sum(math.prod(weight.shape) for weight in self._matrices())

    # Memory.
    def matrix_elements(self, share: Workload) -> float:
        """Count the elements of its matrices on one rank, unsharded over FSDP ranks."""
        ranks = {"colwise": share.tp, "rowwise": share.tp, "expert": share.ep}
        return sum(math.prod(w.shape) / ranks.get(w.rule.style, 1) for w in self._matrices())

    def activations(self, share: Workload) -> float:
        """Return the bytes kept for the backward, without the input, if nothing is recomputed.

        The default counts the results of all matrix products.
        """
        elements = sum(weight.shape[0] for weight in self._matrices())
        return share.tokens * share.width * elements / share.tp

    def saved(self, share: Workload) -> Mapping[SavedName, float]:
        """Return the bytes of :meth:`activations` that each name of ``activation.save`` keeps."""
        return {}

    def working_set(self, share: Workload) -> float:
        """Return the bytes of the backward's gradients that are wider than the residual stream."""
        return 0.0

    def cached_elements(self, ranks: int = 1) -> int:
        """Count the elements that generation caches for a token on one rank.

        ``ranks``: the number of ranks that share the cache.
        """
        return 0

    @property
    def cached_latents(self) -> int | None:
        """The elements that a cache of latents holds for a token, on every rank; None: the part has
        no latents, and its cache is :meth:`cached_elements` in any case."""
        return None

    def state_bytes(self, width: int) -> float:
        """Return the bytes of the state that generation keeps for a sequence.

        ``width``: bytes of an element in the compute dtype.
        """
        return 0.0

    def _matrices(self) -> Iterator[Weight]:
        return (weight for weight in self.weights.values() if len(weight.shape) > 1)


@dataclass(frozen=True, kw_only=True)
class AttentionPart(Part):
    """Describes a sub-layer that mixes tokens: ``module(x_BSD, context) -> y_BSD``."""

    name = "attn"
    norm = "attn_norm"

    carries_state: ClassVar[bool] = False
    """True: it carries a state from token to token, and so needs ``Context.documents``."""
    needs_lse: ClassVar[bool] = False
    """True: its mask's backend must compute the log-sum-exp."""
    has_indexer_loss: ClassVar[bool] = False
    """True: ``train.indexer`` can train its indexer."""
    has_sparse_form: ClassVar[bool] = False
    """True: ``kernels.sparse_attention`` chooses between two forms of it."""

    window: int | None = None
    """The number of tokens that a token attends to, itself included; None: all tokens up to it."""

    @property
    def rotary_dim(self) -> int:
        """The number of a head's elements that rotate with the position."""
        return 0

    @property
    def widest_head(self) -> int:
        """The largest head width that its mask's backend must support."""
        return 0

    @property
    def most_keys(self) -> int | None:
        """The most keys that it selects for a token among those that the token may see; None: it
        attends to all of them. A part that selects keys needs ``Context.seen_BS2``."""
        return None

    @property
    def follows_selection(self) -> bool:
        """True: it attends to keys that an earlier block has selected, so no pipeline stage can
        begin with it."""
        return False

    def exchanged(self, share: Workload) -> dict[str, float]:
        """Return the bytes that a context parallel rank receives, as :meth:`Workload.received`.

        By default the part exchanges nothing.
        """
        return share.received(0, 0)


# These limits are far above real models. They refuse a damaged config.json at once, before counting
# its parameters or building it on the meta device would take long.
_MAX_LAYERS, _MAX_EXPERTS, _MAX_SIZE, _MAX_PARAMS = 10_000, 2**16, 2**31 - 1, 10**15

_Size = Annotated[int, Field(gt=0, le=_MAX_SIZE)]
_Count = Annotated[int, Field(ge=0, le=_MAX_SIZE)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


QKNormed = Literal["head", "width", "rotated"]
"""The elements over which queries and keys are normalised. ``head``: each head by itself, before
the rotation; ``width``: all heads together, before it; ``rotated``: each head by itself, after
it."""
RouterScore = Literal["softmax", "sigmoid"]


class LayerKind(NamedTuple):
    """The properties by which blocks share masks and rotary angles: equal kinds share both."""

    window: int | None
    """The attention window, as :attr:`AttentionPart.window`."""
    rotation: Rotation
    """The rotary embeddings."""


class Architecture(BaseModel):
    """The sizes and switches of one decoder-only transformer.

    Each family has a subclass of its own (``Family.architecture``), which names the kinds of its
    parts and may add fields. Fields that no part of a family reads keep their defaults.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kinds: ClassVar[tuple[type[AttentionPart], type[Part], *tuple[type[Part], ...]]]
    """The kinds of parts in the family's layers: the first two, unless :meth:`attention` and
    :meth:`feed_forward` choose otherwise for some layers."""

    activation: ClassVar[str] = "silu"
    """The activation of the gates of the family's feed-forward layers and experts, a name of
    :data:`moetrain.kernels.experts.swiglu.GATES`."""

    by_layer: ClassVar[Mapping[str, bool | None]] = {
        "sliding_windows": None,
        "rope_layers": True,
        "moe_layers": True,
        "linear_layers": False,
    }
    """The names of fields that have an entry for each layer, and the entry that all layers have if
    the field is empty."""

    family: str
    """Hugging Face ``model_type``, a key of :data:`moetrain.models.families.FAMILIES`."""
    vocab_size: _Size
    hidden_size: _Size
    num_layers: int = Field(gt=0, le=_MAX_LAYERS)
    num_heads: _Size
    num_kv_heads: _Size
    head_dim: _Size
    intermediate_size: _Size
    max_positions: _Size = 4096
    norm_eps: _NonNegative = 1e-6
    tie_embeddings: bool = False
    rope_theta: _Positive = 10000.0
    rope: RopeScaling = RopeScaling()
    partial_rotary_factor: float = Field(default=1.0, ge=0, le=1)
    """The share of a head's elements, from the first on, that rotate with the position."""
    rope_interleaved: bool = False
    """True: neighbouring elements rotate together, instead of those half the rotating width
    apart."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_of: QKNormed = "head"
    output_gate: bool = False
    """True: attention's results are multiplied by a sigmoid of a projection of the token."""
    zero_centred_norms: bool = False
    """True: norms multiply by 1 + their weights."""
    late_norms: bool = False
    """True: norms multiply by their weights first and round the product. False: they round first.
    Zero-centred norms always multiply first."""
    layer_scalars: bool = False
    """True: each block multiplies its result by a scalar of its own, which is not trained."""
    scaled_embeddings: bool = False
    """True: the embedding's rows are multiplied by the root of ``hidden_size``."""
    embedding_multiplier: _Positive = 1.0
    """A factor on the embedding's rows, by itself or beside :attr:`scaled_embeddings`."""
    residual_multiplier: _Positive = 1.0
    """A factor on the result of each part, before it is added to the residual stream."""
    attention_multiplier: _Positive | None = None
    """The factor of attention's scores; None: the head width to the power -1/2."""
    logits_scaling: _Positive = 1.0
    """The divisor of logits. The input of a reward model's head is not divided."""
    logit_softcap: _NonNegative = 0.0
    """The bound ``c`` of soft-capped logits ``c * tanh(logits / c)``; 0: logits are not capped."""
    sliding_windows: tuple[_Size | None, ...] = ()
    """Attention window of each layer in tokens (None: full); empty: full attention everywhere."""
    rope_layers: tuple[bool, ...] = ()
    """False for each layer whose attention has no rotary embeddings; empty: no layer is without."""
    num_experts: int = Field(default=0, ge=0, le=_MAX_EXPERTS)
    """Experts in each MoE layer; 0: the model is dense."""
    num_experts_per_token: _Count = 0
    moe_intermediate_size: _Count = 0
    moe_layers: tuple[bool, ...] = ()
    """True for each MoE layer; empty: all layers are MoE if there are experts."""
    linear_layers: tuple[bool, ...] = ()
    """True for each layer with linear attention or a short convolution; empty: no layer has it."""
    linear_num_key_heads: _Count = 0
    linear_num_value_heads: _Count = 0
    linear_key_head_dim: _Count = 0
    linear_value_head_dim: _Count = 0
    linear_conv_kernel_dim: _Count = 0
    norm_topk_prob: bool = True
    """True: the chosen experts' weights are renormalised to sum to one."""
    router_score: RouterScore = "softmax"
    """The function that turns logits into scores."""
    router_min_sum: _NonNegative = 0.0
    """The least sum of weights that renormalisation divides by."""
    router_sum_eps: _NonNegative = 0.0
    """The number that renormalisation adds to this sum."""
    router_fp32: bool = False
    """True: the router's weight is used in fp32; False: rounded to the compute dtype first."""
    selection_bias: bool = False
    """True: checkpoints hold a bias for each expert. It is added to the scores when experts are
    chosen, but not to the weights of the chosen ones."""
    num_expert_groups: _Size = 1
    """The number of equal groups of consecutive experts."""
    topk_expert_groups: _Size = 1
    """The number of groups from which a token chooses its experts."""
    best_of_group: bool = False
    """True: the score of a group is that of its best expert; False: the sum of its two best."""
    routed_scaling_factor: _Positive = 1.0
    """The factor on the chosen experts' weights."""
    shared_intermediate_size: _Count = 0
    """Width of all shared experts together; 0: there are none."""
    shared_gate: bool = False
    """True: the shared experts' result is multiplied by a sigmoid of a projection of the token."""
    router_aux_loss_coef: _NonNegative = 0.0
    """The weight of the load-balancing loss."""
    output_router_logits: bool = Field(default=False, exclude=True)
    """True: the config.json asks for the load-balancing loss in training, in the sense of
    ``transformers``. This field is not dumped, since it does not change the model."""
    mtp_layers: _Count = 0
    """The number of MTP blocks (:mod:`moetrain.models.parts.multi_token`)."""
    # The next two are None where an older checkpoint does not name them.
    num_labels: Literal[1] | None = None
    """1: a reward model, whose head has one row and scores a text by its last token; None: a
    language model."""
    pad_token_id: int | None = Field(default=None, ge=0, le=_MAX_SIZE)
    """The token of a reward model that never counts as a text's last one; None: there is none."""

    @model_validator(mode="after")
    def _consistent(self) -> Architecture:
        for name in self.by_layer:
            value = getattr(self, name)
            if value and len(value) != self.num_layers:
                problem = f"{name} has {len(value)} entries, but num_layers is {self.num_layers}"
                raise ValueError(problem)
        if self.num_labels and (self.tie_embeddings or self.mtp_layers):
            problem = (
                "a reward model has neither a tied embedding nor multi-token prediction blocks"
            )
            raise ValueError(f"num_labels {self.num_labels}: {problem}")
        if self.num_params() > _MAX_PARAMS:  # making the parts also checks their sizes
            problem = f"these sizes make a model of {self.num_params():.1e} parameters"
            raise ValueError(f"{problem}, more than the {_MAX_PARAMS:.0e} that are supported")
        return self

    def scoring(self, pad_token_id: int | None) -> Self:
        """Return the architecture of a reward model with the same blocks.

        A reward model returns itself. ``pad_token_id`` is the field of this name.
        """
        if self.num_labels:
            return self
        changes = {
            "num_labels": 1,
            "pad_token_id": pad_token_id,
            "tie_embeddings": False,
            "mtp_layers": 0,
        }
        return type(self).model_validate({**dict(self), **changes})

    def attention(self, layer: int) -> AttentionPart:
        """Return the attention part of block ``layer``, counted from 0."""
        own: Fields = {"window": self.sliding_windows[layer] if self.sliding_windows else None}
        if self.rope_layers and not self.rope_layers[layer]:
            own["partial_rotary_factor"] = 0.0
        return self.kinds[0].of(self, **own)

    def feed_forward(self, layer: int) -> Part:
        """Return the feed-forward part of block ``layer``."""
        return self.kinds[1].of(self)

    def block(self, layer: int) -> tuple[Part, ...]:
        """Return the parts of block ``layer``; in some families a block has one part."""
        return self.attention(layer), self.feed_forward(layer)

    def multi_token_layers(self) -> tuple[tuple[Part, ...], ...]:
        """Return the parts of each MTP block; most families have no such blocks."""
        return ()

    def layers(self) -> list[tuple[Part, ...]]:
        """Return the parts of every block, MTP blocks last."""
        return list(_layers_of(self))  # pyright: ignore[reportArgumentType] - it is frozen

    def parts(self) -> list[Part]:
        """Return each distinct part, in the order of layers."""
        return list(dict.fromkeys(self._every_part()))

    def odd_width(self, multiple: int, *, is_fast: bool = True) -> tuple[str, int] | None:
        """Return the name and value of a width that is not a multiple of ``multiple``.

        Only widths of matrix products on a GPU are checked (:attr:`Part.aligned`), and with
        ``is_fast`` also ``hidden_size``, for the loss's fast path. None: all are multiples.
        """
        widths = {"hidden_size": self.hidden_size} if is_fast else {}
        widths |= {name: getattr(part, name) for part in self.parts() for name in part.aligned}
        return next(((k, width) for k, width in widths.items() if width % multiple), None)

    def attentions(self) -> list[AttentionPart]:
        """Return the attention parts among :meth:`parts`."""
        return [part for part in self.parts() if isinstance(part, AttentionPart)]

    def plan(self) -> ShardingPlan:
        """Collect the rules and styles of all parts, the embedding, the norms and the head."""
        norm = ZERO_NORM if self.zero_centred_norms else NORM
        rules = {"embed.weight": replace(COLWISE, decay=False), "norm.weight": norm}
        styles: dict[str, PartStyle] = {"embed": "vocabulary", "norm": "gather"}
        if self.num_labels:
            # fp32, because bf16 has three digits and would make close rewards equal.
            rules[SCORE] = Rule("replicate", gather=torch.float32)
            styles["score"] = "vocabulary"
        elif not self.tie_embeddings:
            rules["lm_head.weight"], styles["lm_head"] = COLWISE, "vocabulary"
        for i, parts in enumerate(self.layers()):
            if self.layer_scalars:
                rules[f"layers.{i}.scalar"] = replace(NORM, trainable=False)
            for part in parts:
                for name in part.norms:
                    rules[f"layers.{i}.{name}.weight"], styles[f"layers.{i}.{name}"] = norm, "own"
                name = f"layers.{i}.{part.name}"
                rules |= {f"{name}.{leaf}": weight.rule for leaf, weight in part.weights.items()}
                styles[name] = part.style
        return ShardingPlan(rules, styles)

    def window(self, layer: int) -> int | None:
        """Return the sliding attention window of block ``layer`` in tokens; None: unlimited."""
        mixers = (part for part in self.layers()[layer] if isinstance(part, AttentionPart))
        return next((mixer.window for mixer in mixers), None)

    def rotation(self, layer: int) -> Rotation:
        """Return the rotary embeddings of block ``layer``; by default all blocks share them."""
        dim = max((mixer.rotary_dim for mixer in self.attentions()), default=0)
        return Rotation(dim, self.rope_theta, self.rope, self.max_positions)

    @property
    def query_scaling(self) -> QueryScaling | None:
        """The factor on queries by their positions; None: most families have none."""
        return None

    def widest_head(self, *windows: int | None) -> int:
        """Return the largest head width of the attention parts with one of ``windows``.

        Without ``windows`` all attention parts count.
        """
        kept = [mixer for mixer in self.attentions() if not windows or mixer.window in windows]
        return max((mixer.widest_head for mixer in kept), default=0)

    @property
    def has_latents(self) -> bool:
        """True: generation can keep latents in place of keys and values in some layer."""
        return any(mixer.cached_latents is not None for mixer in self.attentions())

    def cached_elements(self, ranks: int = 1, *, latent: bool = False) -> int:
        """Count the elements that generation caches for a token on one rank, in all layers.

        Args:
            ranks: the number of ranks that share the cache.
            latent: layers with latents cache these, in place of keys and values.
        """
        found = 0
        for part in chain.from_iterable(self.layers()):
            kept = part.cached_latents if latent else None
            found += part.cached_elements(ranks) if kept is None else kept
        return found

    @property
    def has_rotary(self) -> bool:
        """True: some layer has rotary embeddings."""
        return any(mixer.rotary_dim > 0 for mixer in self.attentions())

    @property
    def sent_size(self) -> int:
        """The number of elements of a token that are sent to its experts."""
        return self.hidden_size

    @property
    def reach(self) -> int:
        """The number of positions that the model supports: ``max_positions``, or more where scaled
        rotary embeddings reach further."""
        original = self.rope.original_max_positions or 0
        return max(self.max_positions, int(self.rope.factor * original))

    @property
    def moe_layer_indices(self) -> list[int]:
        """The indices of the MoE blocks."""
        layers = enumerate(self.layers())
        return [i for i, parts in layers if any(part.style == "routed" for part in parts)]

    def num_params(self) -> int:
        """Count the parameters of the model, tied embeddings once."""
        return self._frame() + sum(part.num_params() for part in self._every_part())

    def num_active_params(self) -> int:
        """Count the parameters that one token uses, with only its chosen experts."""
        return self._frame() + sum(part.num_active_params() for part in self._every_part())

    def flops_per_token(self, seq_len: int, *, is_frozen: bool = False) -> float:
        """Compute the training FLOPs of one token in a causal row of ``seq_len`` tokens.

        Forward plus backward (3 x forward), 2 FLOPs a multiply-add, matrix products only: no
        recomputation, norms, embedding lookups or biases. Causal attention counts the average
        number of keys a query sees, ``seq_len / 2`` (less with a window). With
        ``is_frozen`` the gradients of weights are not counted. Adapters are never counted.
        """
        products = sum(part.products_per_token(seq_len) for part in self._every_part())
        rows = self.num_labels or self.vocab_size
        head = (1 + self.mtp_layers) * rows * self.hidden_size
        with_weights = sum(part.num_active_params() for part in self._every_part()) + head
        return 6.0 * (products + head) - 2.0 * with_weights * is_frozen

    def _every_part(self) -> Iterator[Part]:
        return chain.from_iterable(self.layers())

    def _frame(self) -> int:
        """Count the parameters outside the parts: those of the vocabulary and of norms."""
        head = 0 if self.tie_embeddings else self.num_labels or self.vocab_size
        norms = sum(len(part.norms) for part in self._every_part()) + 1
        scalars = self.num_layers * self.layer_scalars
        return self.hidden_size * (self.vocab_size + head + norms) + scalars


@lru_cache(maxsize=8)
def _layers_of(arch: Architecture) -> tuple[tuple[Part, ...], ...]:
    """Make the parts once and cache them, since plans ask for them hundreds of times."""
    return *(arch.block(i) for i in range(arch.num_layers)), *arch.multi_token_layers()
