"""The decoder that every family shares, in stages: prepare, embed, run (a range of blocks), head.

The family's architecture names the parts of each block. ``prepare`` computes what all blocks need
(rotary angles, attention masks) once per forward, and blocks take it as an input. So all blocks of
a kind share one compiled graph, a pipeline stage is a range of blocks, and generation can pass
masks of its own.

Left out on purpose: the loss (it never needs all logits at once), text generation, and everything
about devices.

Legend: B batch, S sequence, D model width, V vocabulary, N selected tokens, L labels or MoE layers,
K experts a token.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from fnmatch import fnmatchcase
from functools import partial
from types import MethodType
from typing import NamedTuple

import torch
from torch import nn

from moetrain.config import ActivationSection, Config, ConfigError, KernelsSection, MoeSection
from moetrain.config.sections import IndexerMode
from moetrain.kernels.attention.attention import AttentionMask
from moetrain.kernels.linear_attention.gated_delta import Documents, documents_of
from moetrain.losses.balancing import RouterStats, RoutingStats
from moetrain.models.architecture import Architecture, AttentionPart, LayerKind
from moetrain.models.families import FAMILIES
from moetrain.models.family import Piece
from moetrain.models.generation import Caches, CachingMixer, LayerCache
from moetrain.models.hf.files import HFSource
from moetrain.models.layers import (
    Context,
    KernelModule,
    Linear,
    RMSNorm,
    Selection,
    SelectsKeys,
    Vocabulary,
)
from moetrain.models.parts.lora import add_adapters
from moetrain.models.parts.multi_token import run_multi_token
from moetrain.models.rope_scaling import RotaryEmbedding
from moetrain.models.rules import ADAPTER, Rule
from moetrain.runtime.ahead import cache_compiled_blocks, prepare_compiler
from moetrain.runtime.annotate import annotate, annotate_backward
from moetrain.runtime.recompute import forward_keeping, recomputed
from moetrain.runtime.typed import compile_module

Stream = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""The residual stream [B, S, D], or two tensors that add up to it (:attr:`Block.defers`)."""

BlockOutputs = tuple[Stream, RouterStats | None, Selection | None]
"""The residual stream after a block, the routing statistics (None: not MoE), and the keys that the
block has selected (None: it selects none)."""

CallBlock = Callable[..., BlockOutputs]
"""Calls its first argument, a block, with the other arguments."""

_RunPart = Callable[
    [torch.Tensor, Context],
    torch.Tensor | tuple[torch.Tensor, RouterStats | None] | tuple[torch.Tensor, Selection],
]

_KERNELS = KernelsSection()
_MOE = MoeSection()


def _norm(arch: Architecture, kernels: KernelsSection) -> RMSNorm:
    """Make a norm of the model's width, as the family has it."""
    return RMSNorm(
        arch.hidden_size,
        arch.norm_eps,
        kernels,
        zero_centred=arch.zero_centred_norms,
        late=arch.late_norms,
    )


class Block(nn.Module):
    """A transformer block: attention, then a feed-forward layer, or one of the two.

    A part has a norm before it, after it, or both, and its result is added to the residual stream,
    in some families with a factor.
    The module of a part is an attribute with the part's name: ``attn``, and ``mlp`` or ``moe``.
    """

    scalar: nn.Parameter | None
    defers = False
    """True: the block returns the residual stream and its last part's result as two tensors, so
    that the next norm can add them in its own kernel. Generation sets it."""

    def __init__(
        self, arch: Architecture, layer: int, kernels: KernelsSection, moe: MoeSection
    ) -> None:
        super().__init__()
        parts = arch.layers()[layer]
        self.parts = tuple((part.norm, part.name, part.after) for part in parts if part.norms)
        for part in parts:
            for name in part.norms:
                self.add_module(name, _norm(arch, kernels))
            self.add_module(part.name, part.build(kernels, moe))
        self.multiplier = arch.residual_multiplier
        one = nn.Parameter(torch.empty(1), requires_grad=False) if arch.layer_scalars else None
        self.register_parameter("scalar", one)

    def forward(self, stream: Stream, context: Context) -> BlockOutputs:
        """Return the residual stream after this block, and what its parts report."""
        # y_BSD is the last part's result. The next norm adds it to the stream x_BSD, in one kernel.
        x_BSD: torch.Tensor
        y_BSD: torch.Tensor | None
        x_BSD, y_BSD = stream if isinstance(stream, tuple) else (stream, None)
        stats: RouterStats | None = None
        selection: Selection | None = None
        for before, part, after in self.parts:
            norm: RMSNorm | None = getattr(self, before) if before else None
            if norm is None:
                x_BSD = normed_BSD = x_BSD if y_BSD is None else x_BSD + y_BSD
            elif y_BSD is None:
                x_BSD, normed_BSD = norm.with_stream(x_BSD)
            else:
                x_BSD, normed_BSD = norm.with_sum(x_BSD, y_BSD)
            run: _RunPart = getattr(self, part)
            result = run(normed_BSD, context)
            if isinstance(result, tuple):
                result, report = result
                if isinstance(report, Selection):
                    selection = report
                else:
                    stats = report
            y_BSD = self._added(getattr(self, after)(result) if after else result)
        assert y_BSD is not None  # a block has a part
        if self.defers and self.scalar is None:
            return (x_BSD, y_BSD), stats, selection
        x_BSD = x_BSD + y_BSD
        if self.scalar is not None:
            x_BSD = x_BSD * self.scalar.to(x_BSD.dtype)
        return x_BSD, stats, selection

    def _added(self, y_BSD: torch.Tensor) -> torch.Tensor:
        """Return what is added to the residual stream for a part's result."""
        return y_BSD if self.multiplier == 1 else y_BSD * self.multiplier


class MultiTokenBlock(Block):
    """A block of multi-token prediction (:mod:`moetrain.models.parts.multi_token`)."""

    join: nn.Module
    readout: nn.Module

    def forward(self, stream: Stream, context: Context) -> BlockOutputs:
        """Return hidden states [B, S, D] for pairs of an embedding and a hidden state."""
        x_BSD, stats, selection = super().forward(self.join(stream), context)
        return self.readout(x_BSD), stats, selection


class _Embedding(nn.Module):
    """The embedding: looks up rows of ``weight`` [V, D], in the parameter's dtype."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))

    def forward(self, tokens_BS: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
        return vocabulary.embed(tokens_BS, self.weight)


@dataclass(frozen=True)
class Inputs:
    """The inputs of a model."""

    tokens_BS: torch.Tensor
    """Integer token ids."""
    positions_BS: torch.Tensor | None = None
    """Position of each token in its document. A 0 starts a document, and no token sees another
    document; None: each row is one document."""
    _: KW_ONLY
    cu_seqlens: torch.Tensor | None = None
    """int32 [N + 1]: 0, then the end of each of the N documents among the B * S tokens. The
    attention backends ``cudnn`` and ``exact`` need it for packed rows. Linear attention would
    otherwise wait for the device to find the documents in ``positions_BS``."""
    is_pad_BS: torch.Tensor | None = None
    """bool: True for a padding token. Padding follows the last document of a row, or each document.
    Experts do not compute padding, statistics do not count it, and attention treats it as part of
    the document before it. It should have no targets. None: there is no padding."""
    routes_BSLK: torch.Tensor | None = None
    """int32: routing replay (arXiv 2507.18071, 2510.11370): the experts, chosen by an earlier pass,
    that each MoE layer uses for each token. Their weights come from the router's present scores.
    -1: the router chooses. None: the router chooses for all tokens."""


class Rows(NamedTuple):
    """The rows of one forward pass, in the form that blocks need."""

    batch: int
    """B of the hidden states after the final norm."""
    seq_len: int
    """S of the hidden states after the final norm."""
    contexts: dict[LayerKind, Context]
    """The context of blocks of each kind."""
    routes_BSLK: torch.Tensor | None = None
    """The experts to use again, as in :class:`Inputs`."""
    own: Callable[[torch.Tensor], torch.Tensor] = lambda x_BS: x_BS
    """Selects this device's tokens from [B, S, ...]."""


class Sharding:
    """The interface by which a model asks for its parameters. Here all of them are whole already.

    :class:`moetrain.parallel.fsdp.fsdp.FSDP` implements it for sharded parameters.
    """

    def unsharded(self, block: nn.Module) -> AbstractContextManager[None]:
        """Give ``block`` its whole parameters inside the context."""
        return nullcontext()

    def reopen(self, block: nn.Module, outputs: BlockOutputs) -> BlockOutputs:
        """Return ``outputs`` of ``block``; their backward first unshards the block again."""
        return outputs

    def open(self, module: nn.Module) -> None:
        """Unshard the parameters of ``module``: the embedding, or the norm with the head."""


class Transformer(nn.Module):
    """A decoder-only language model.

    It is built on the current default device, in the default dtype, and its parameters have no
    values yet: call :meth:`init_weights` or load a checkpoint. Built on ``torch.device("meta")`` it
    takes no memory; ``to_empty`` then allocates.

    Attributes:
        compute_dtype: dtype of the activations; None: the embedding's own.
        call_block: calls a block with its inputs; recomputation replaces it.
        sharding: unshards parameters where they are used; FSDP replaces it.
        source: the rest of the checkpoint that the weights came from; None: there was none.
        vocabulary: computes embeddings, logits and losses from the matrices of the embedding and
            the head; tensor and context parallelism replace it.
        cut_rows: selects this device's tokens; context parallelism replaces it.
        cuts_queries: True: ``cut_rows`` cuts the queries alone, and attention has all keys.
    """

    def __init__(
        self, arch: Architecture, *, kernels: KernelsSection = _KERNELS, moe: MoeSection = _MOE
    ) -> None:
        super().__init__()
        self.arch = arch
        self.kernels = kernels
        classes = [Block] * arch.num_layers + [MultiTokenBlock] * arch.mtp_layers
        blocks = [make(arch, i, kernels, moe) for i, make in enumerate(classes)]
        self.compute_dtype: torch.dtype | None = None
        self.call_block: CallBlock = nn.Module.__call__
        self.sharding = Sharding()
        self.source: HFSource | None = None
        self.vocabulary = Vocabulary(kernels.backend, arch.logit_softcap, kernels.precision)
        self.cut_rows: Callable[[Rows], Rows] = lambda rows: rows
        self.cuts_queries = False
        self.embed = _Embedding(arch.vocab_size, arch.hidden_size)
        mixers = arch.attentions()
        layers = range(len(arch.layers()))
        self.kinds = [LayerKind(arch.window(i), arch.rotation(i)) for i in layers]
        self.widths = {mixer.window: arch.widest_head(mixer.window) for mixer in mixers}
        self.carries_state = any(mixer.carries_state for mixer in mixers)
        self.needs_lse = any(mixer.needs_lse for mixer in mixers)
        self.selects_keys = any(mixer.most_keys is not None for mixer in mixers)
        rotations = dict.fromkeys(kind.rotation for kind in self.kinds)
        self.ropes = {rotation: RotaryEmbedding(rotation) for rotation in rotations}
        self.layers = nn.ModuleList(blocks)
        self.norm = _norm(arch, kernels)
        has_own = not arch.tie_embeddings and not arch.num_labels
        self.lm_head = Linear(arch.hidden_size, arch.vocab_size) if has_own else None
        self.score = Linear(arch.hidden_size, arch.num_labels) if arch.num_labels else None

    @property
    def head_weight(self) -> torch.Tensor:
        """The head's matrix [V, D], tied or not; in a reward model [L, D]."""
        return (self.score or self.lm_head or self.embed).weight

    def forward(
        self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute logits [B, S, V] in the compute dtype; arguments as in :class:`Inputs`.

        A reward model computes scores [B, S, 1], at least in fp32: for each token, the score of the
        text up to it.
        """
        hidden_BSD, _ = self.backbone(Inputs(tokens_BS, positions_BS))
        if self.score is not None:
            every_token_N = torch.arange(tokens_BS.numel(), device=tokens_BS.device)
            hidden_TD = hidden_BSD.flatten(0, 1)
            scores_N1 = self.vocabulary.scores(hidden_TD, self.head_weight, every_token_N)
            return scores_N1.view(*tokens_BS.shape, -1)
        logits = self.vocabulary.logits(hidden_BSD, self.head_weight)
        return logits.reshape(*tokens_BS.shape, -1)

    def train_indexers(self, mode: IndexerMode) -> None:
        """Let the blocks' indexers learn as ``train.indexer`` says; those of MTP blocks never do.

        Call it before :func:`compile_blocks`.
        """
        for module in self.modules():
            if isinstance(module, SelectsKeys):
                module.indexer_mode = mode

    def backbone(
        self,
        inputs: Inputs,
        *,
        multi_token: list[torch.Tensor] | None = None,
        selections: dict[int, Selection] | None = None,
    ) -> tuple[torch.Tensor, RoutingStats | None]:
        """Run all stages.

        Args:
            multi_token: receives the hidden states of the MTP blocks, by depth; None: these blocks
                do not run.
            selections: receives the selection of each block that selects keys.

        Returns:
            Hidden states [B, S, D] after the final norm, and routing statistics; None: no layer is
            MoE.
        """
        rows = self.prepare(inputs)
        x_BSD = self.embed_tokens(inputs.tokens_BS)
        x_BSD, layer_stats = self.run(x_BSD, rows, selections=selections)
        hidden_BSD = self.head(x_BSD, rows)
        if multi_token is not None:
            assert isinstance(x_BSD, torch.Tensor)  # blocks defer in generation alone
            found, more = run_multi_token(self, x_BSD, inputs, rows)
            multi_token += found
            layer_stats += more
        return hidden_BSD, self.routing(layer_stats)

    def for_generation(self, caches: Caches, *, with_mtp: bool = False) -> list[LayerCache]:
        """Change the model into its generation form, in place; it cannot be changed back.

        A generator then calls :meth:`run` with :class:`Rows` of its own. On a GPU, a token gets the
        same bits in every batch.

        Args:
            with_mtp: True: the first MTP block drafts tokens, so it gets a cache too.

        Returns:
            The layers' caches, in order.

        Raises ConfigError: a layer has no generation form.
        """
        found: list[LayerCache] = []
        count = self.arch.num_layers + with_mtp
        for block, parts in zip(self.layers[:count], self.arch.layers()[:count], strict=True):
            for part in parts:
                if not isinstance(part, AttentionPart):
                    continue
                mixer = block.get_submodule(part.name)
                cache = None
                if isinstance(mixer, CachingMixer):
                    cache = mixer.for_generation(caches, part.window)
                if cache is None:
                    raise ConfigError(
                        "model",
                        f"{self.arch.family} cannot generate here, because some of its layers have "
                        "no cache; serve its export with another program",
                    )
                found.append(cache)
        for module in self.modules():
            if isinstance(module, KernelModule):
                module.use_generation_kernels(batch_invariant=self.embed.weight.is_cuda)
        for block in self.layers[: self.arch.num_layers]:
            assert isinstance(block, Block)
            block.defers = True
        return found

    def prepare(self, inputs: Inputs) -> Rows:
        """Compute the masks and angles that all blocks share; no parameters are used."""
        tokens_BS = inputs.tokens_BS
        positions_BS = inputs.positions_BS
        cu_seqlens = None if positions_BS is None else inputs.cu_seqlens
        batch, seq_len = tokens_BS.shape
        masks = {
            window: AttentionMask.of(
                positions_BS,
                batch=batch,
                seq_len=seq_len,
                device=tokens_BS.device,
                window=window,
                backend=self.kernels.attention,
                cu_seqlens=cu_seqlens,
                dtype=self.compute_dtype or self.embed.weight.dtype,
                needs_lse=self.needs_lse,
                width=self.widths.get(window, 0),
                is_cut=self.cuts_queries,
            )
            for window in dict.fromkeys(kind.window for kind in self.kinds)
        }
        documents: Documents | None = None
        place_T: torch.Tensor | None = None
        if self.carries_state:
            shape = (batch, seq_len)
            documents, place_T = documents_of(positions_BS, cu_seqlens, shape, tokens_BS.device)
        seen_BS2 = None
        if self.selects_keys:
            seen_BS2 = _seen(positions_BS, (batch, seq_len), tokens_BS.device)
        if positions_BS is None:
            positions_BS = torch.arange(seq_len, device=tokens_BS.device)[None]
        query_scale = self.query_scale(positions_BS)
        contexts = {
            kind: Context(
                rotation=angles,
                mask=masks[kind.window],
                cu_seqlens=cu_seqlens,
                is_pad_BS=inputs.is_pad_BS,
                documents=documents,
                place_T=place_T,
                query_scale=query_scale,
                seen_BS2=seen_BS2,
            )
            for kind, angles in self.rotate(positions_BS).items()
        }
        return self.cut_rows(Rows(batch, seq_len, contexts, inputs.routes_BSLK))

    def rotate(
        self, positions_BS: torch.Tensor
    ) -> dict[LayerKind, tuple[torch.Tensor, torch.Tensor]]:
        """Return the cosine and sine of the positions' angles, for blocks of each kind."""
        angles = {rotation: rope(positions_BS) for rotation, rope in self.ropes.items()}
        return {kind: angles[kind.rotation] for kind in self.kinds}

    def query_scale(self, positions_BS: torch.Tensor) -> torch.Tensor | None:
        """Return :attr:`Context.query_scale` of the positions."""
        scaling = self.arch.query_scaling
        return None if scaling is None else scaling.factors(positions_BS)

    def embed_tokens(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Return the residual stream [B, S, D] before the first block, in the compute dtype."""
        self.sharding.open(self.embed)
        x_BSD = self.embed(tokens_BS, self.vocabulary)
        x_BSD = x_BSD.to(self.compute_dtype or x_BSD.dtype)
        if self.arch.embedding_multiplier != 1:
            x_BSD = x_BSD * self.arch.embedding_multiplier
        if not self.arch.scaled_embeddings:
            return x_BSD
        scale = torch.tensor(self.arch.hidden_size**0.5, dtype=x_BSD.dtype, device="cpu")
        return x_BSD * scale.item()  # rounded to x's dtype first, as Hugging Face does

    def run(
        self,
        x_BSD: Stream,
        rows: Rows,
        start: int = 0,
        stop: int | None = None,
        *,
        selections: dict[int, Selection] | None = None,
    ) -> tuple[Stream, list[RouterStats]]:
        """Run blocks ``start:stop``; return the residual stream and MoE layers' statistics.

        ``selections`` is as in :meth:`backbone`.
        """
        layer_stats: list[RouterStats] = []
        selected_BSK: torch.Tensor | None = None
        for i in range(start, self.arch.num_layers if stop is None else stop):
            context = rows.contexts[self.kinds[i]]._replace(selected_BSK=selected_BSK)
            if rows.routes_BSLK is not None and i in self.arch.moe_layer_indices:
                layer = self.arch.moe_layer_indices.index(i)
                context = context._replace(routes_BSK=rows.routes_BSLK[:, :, layer])
            x_BSD, stats, selection = self.through(i, x_BSD, context)
            if stats is not None:
                layer_stats.append(stats)
            if selection is not None:
                selected_BSK = selection.keys_BSK
                if selections is not None:
                    selections[i] = selection
        return x_BSD, layer_stats

    def through(self, i: int, x_BSD: Stream, context: Context) -> BlockOutputs:
        """Call block ``i`` with its parameters unsharded."""
        block = self.layers[i]
        with annotate(f"layer {i} forward"):
            with self.sharding.unsharded(block):
                outputs = self.call_block(block, x_BSD, context)
            x_BSD, stats, selection = self.sharding.reopen(block, outputs)
        return annotate_backward(x_BSD, f"layer {i} backward"), stats, selection

    def head(self, x_BSD: Stream, rows: Rows) -> torch.Tensor:
        """Return [B, S, D], the input of ``vocabulary`` with :attr:`head_weight`.

        This is the final norm, which is divided in place of logits, so that all that computes with
        the vocabulary gets divided logits.
        """
        self.sharding.open(self.norm)
        y_BSD = self.norm.with_sum(*x_BSD)[1] if isinstance(x_BSD, tuple) else self.norm(x_BSD)
        if self.arch.logits_scaling != 1 and not self.arch.num_labels:
            y_BSD = y_BSD / self.arch.logits_scaling
        return y_BSD.view(rows.batch, rows.seq_len, y_BSD.shape[-1])

    def pieces(self) -> list[Piece]:
        """List the tensors of Hugging Face's files that hold the model, and their places in it."""
        family = FAMILIES[self.arch.family]
        shapes = {name: parameter.shape for name, parameter in self.named_parameters()}
        weight_map = None if self.source is None else self.source.weight_map
        buffers = self.named_buffers()
        shapes |= {name: x.shape for name, x in buffers if family.holds(name, weight_map)}
        return family.pieces(shapes, self.arch, weight_map)

    @torch.no_grad()
    def init_weights(self, std: float, seed: int) -> None:
        """Draw initial values in place; parameters must have storage."""
        rules = self.arch.plan().rules(self)
        for name, parameter in self.named_parameters():
            rules[name].draw(parameter, name, parameter.shape, std, seed)
        for buffer in self.buffers():  # only routers' biases are buffers
            buffer.zero_()

    def set_recomputation(
        self, activation: ActivationSection, blocks: Sequence[int] | None = None
    ) -> None:
        """Choose what blocks keep for their backward; call it before :func:`compile_blocks`.

        ``blocks`` are those of this rank, in the order of ``activation.blocks``; None: all.

        The policy ``none`` keeps every tensor that a gradient needs. ``full`` keeps the block's
        inputs, and the backward runs the whole block again. ``selective`` also keeps the routing
        and the results of the ops in the groups ``activation.save``
        (:mod:`moetrain.runtime.backend`).

        ``full`` wraps the block's call, but ``selective`` is inside the block's forward. So it is
        compiled with the block, and decides what the compiled forward keeps for the compiled
        backward. ``selective`` cannot keep the results of two kinds of attention: FlexAttention in
        eager mode on a GPU, which is compiled by itself and hides its op, and ``reference``, which
        consists of ordinary products.
        """
        # With dropout, the recomputation must draw the same random numbers.
        draws = any(getattr(module, "lora_dropout", 0) for module in self.modules())
        forward = forward_keeping(activation.save, draws)
        whole: set[nn.Module] = set()
        for place, i in enumerate(range(len(self.layers)) if blocks is None else blocks):
            block, policy = self.layers[i], activation.of_block(place)
            if policy == "full":
                whole.add(block)
            elif policy == "selective":
                block.forward = MethodType(forward, block)
        if whole:
            self.call_block = partial(recomputed, whole=frozenset(whole), draws=draws)

    def routing(self, layer_stats: Sequence[RouterStats]) -> RoutingStats | None:
        """Stack the statistics of all MoE layers; None: the model has none."""
        return RoutingStats.of_layers(layer_stats, self.arch.num_experts_per_token)


def _seen(
    positions_BS: torch.Tensor | None, shape: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """Return ``Context.seen_BS2`` of rows of ``shape``; ``positions_BS`` as in :class:`Inputs`."""
    last_BS = torch.arange(shape[1], device=device).expand(shape)
    if positions_BS is None:
        return torch.stack((torch.zeros_like(last_BS), last_BS), dim=-1)
    first_BS = last_BS.where(positions_BS == 0, 0).cummax(1).values
    return torch.stack((first_BS, last_BS), dim=-1)


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Return the dtype that ``train.dtype`` means on ``device``."""
    if config.train.dtype != "auto":
        return getattr(torch, config.train.dtype)
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def plan_model(
    config: Config, arch: Architecture, dtype: torch.dtype
) -> tuple[Transformer, dict[str, Rule]]:
    """Build, on meta, the model of ``arch`` that ``config`` trains; return it and its rules.

    ``dtype`` is the compute dtype.

    Raises ConfigError: patterns of ``lora.targets`` or ``train.freeze`` match nothing, or the model
    cannot be trained with these settings.
    """
    with torch.device("meta"):
        model = Transformer(arch, kernels=config.kernels, moe=config.moe)
    if config.lora.rank:
        add_adapters(model.layers, config.lora)
        _check_adapters(model, config.lora.layout)
    model.train_indexers(config.train.indexer)
    return model, arch.plan().rules_of_run(model, config, dtype)


def _check_adapters(model: Transformer, layout: str) -> None:
    """Raise ConfigError for an adapter that PEFT's files cannot hold."""
    weights = [name for name, _ in model.named_parameters() if name.endswith(ADAPTER[0])]
    weights = [name.removesuffix(ADAPTER[0]) for name in weights]
    family = FAMILIES[model.arch.family]
    for name in weights:
        shape = model.get_parameter(name).shape
        piece = family.pieces({name: shape}, model.arch, family.modules)[0]
        if fnmatchcase(name, family.unadaptable):
            problem = f"PEFT does not load an adapter of {name} in {family.name} models"
            raise ConfigError("lora.targets", f"{problem}; leave it out")
        if piece.is_whole:
            continue
        if len(shape) == 2:
            problem = (
                f"{name} is only some rows of {piece.hf_name}, and PEFT cannot adapt these alone"
            )
            raise ConfigError("lora.targets", f"{problem}; leave it out")
        if layout == "per_expert":
            problem = f"'per_expert', but {piece.hf_name} is one tensor of all experts; use fused"
            raise ConfigError("lora.layout", problem)


def compile_blocks(
    model: Transformer, backend: str | Callable[..., Callable[..., object]] = "inductor"
) -> None:
    """Compile every block as one graph; blocks of one kind share the compiled code."""
    prepare_compiler()
    if backend == "inductor":
        cache_compiled_blocks()
    options: dict[str, bool] | None = None
    if model.kernels.batch_invariant and backend == "inductor":
        # Fused operations then round as separate ones do. Generation runs them separately, and must
        # get the same bits.
        options = {"emulate_precision_casts": True}
    for block in model.layers:
        compile_module(block, fullgraph=True, backend=backend, options=options)
