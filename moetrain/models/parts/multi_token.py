"""Multi-token prediction (MTP): blocks behind the model's own that predict later tokens.

For position i and depth k, with h_0 the hidden states after the final norm, t the tokens and E the
embedding (DeepSeek-V3, arXiv 2412.19437, section 2.2):

    h_k[i] = norm(block_k(W_k [norm(E(t[i + k])) ; norm(h_{k-1}[i])]))
    loss_k = mean over i of -log p(t[i + k + 1] | head(h_k[i]))

The blocks use the model's embedding and head. Where i + k lies past the end of its document,
position i has no target: experts treat it as padding, and statistics leave it out. Its input has a
token of the next document, but no position with a target sees it, since attention is causal. The
published models of these families have one such block.

The blocks are trained and written only if ``train.mtp_weight`` is set; otherwise an export copies
their tensors unchanged. Generation can draft with the first block
(:mod:`moetrain.generate.drafting`). The blocks are built for these two uses alone.

Files hold the blocks in one of two layouts, by the family: as layers behind the model's own, with
copies of embedding and head (DeepSeek, GLM, Hy: :func:`behind_layers`), or under ``mtp.`` (Qwen,
Mellum: :func:`under_mtp`).

Left out on purpose: pipelines, since the last stage would need the embedding too.

Legend: B batch, S sequence, T = B * S tokens, D model width, P = 2 * D.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from moetrain.config import ConfigError, KernelsSection, MoeSection
from moetrain.losses.balancing import RouterStats
from moetrain.models.architecture import Architecture, ConfigJson, Part, Weight, linear
from moetrain.models.family import Operation, Piece, Rename, WeightMap
from moetrain.models.hf.files import error
from moetrain.models.layers import Linear, RMSNorm
from moetrain.models.rules import NORM, ZERO_NORM, PartStyle, Rule

_COUNT = "num_nextn_predict_layers"
_WHOLE = Rule("replicate")  # every tensor parallel rank applies the matrix to its own tokens


@dataclass(frozen=True, kw_only=True)
class Join(Part):
    """Describes the input of an MTP block, W_k [norm(E(t)) ; norm(h)]."""

    name: ClassVar[str] = "join"
    norm: ClassVar[str] = ""
    style: ClassVar[PartStyle] = "own"

    norm_eps: float
    zero_centred_norms: bool = False

    def build(self, kernels: KernelsSection, moe: MoeSection) -> _Join:
        return _Join(self, kernels)

    @property
    def weights(self) -> Mapping[str, Weight]:
        norm = Weight((self.hidden_size,), ZERO_NORM if self.zero_centred_norms else NORM)
        proj = linear("proj", self.hidden_size, 2 * self.hidden_size, _WHOLE)
        return {"enorm.weight": norm, "hnorm.weight": norm, **proj}


class _Join(nn.Module):
    """The module of :class:`Join`."""

    def __init__(self, sizes: Join, kernels: KernelsSection) -> None:
        super().__init__()
        dim, eps, zero_centred = sizes.hidden_size, sizes.norm_eps, sizes.zero_centred_norms
        self.enorm = RMSNorm(dim, eps, kernels, zero_centred=zero_centred)
        self.hnorm = RMSNorm(dim, eps, kernels, zero_centred=zero_centred)
        self.proj = Linear(2 * dim, dim, kernels)

    def forward(self, pair_BSP: torch.Tensor) -> torch.Tensor:
        """Return [B, S, D] for pairs of an embedding and a hidden state, in this order."""
        embedded_BSD, hidden_BSD = pair_BSP.chunk(2, dim=-1)
        return self.proj(torch.cat((self.enorm(embedded_BSD), self.hnorm(hidden_BSD)), dim=-1))


@dataclass(frozen=True, kw_only=True)
class _Readout(Part):
    """Describes the norm between an MTP block and the head."""

    name: ClassVar[str] = "readout"
    norm: ClassVar[str] = ""
    style: ClassVar[PartStyle] = "gather"

    norm_eps: float
    zero_centred_norms: bool = False

    def build(self, kernels: KernelsSection, moe: MoeSection) -> RMSNorm:
        zero_centred = self.zero_centred_norms
        return RMSNorm(self.hidden_size, self.norm_eps, kernels, zero_centred=zero_centred)

    @property
    def weights(self) -> Mapping[str, Weight]:
        rule = ZERO_NORM if self.zero_centred_norms else NORM
        return {"weight": Weight((self.hidden_size,), rule)}


class MultiTokenDecoder(Architecture):
    """A decoder whose files may have MTP blocks, built if ``mtp_layers`` is set.

    An MTP block has the same parts as the last block of the model that has full attention, or that
    has a window (``mtp_has_window``).
    """

    mtp_has_window: ClassVar[bool] = False

    def multi_token_layers(self) -> tuple[tuple[Part, ...], ...]:
        if not self.mtp_layers:
            return ()
        mixers = {i: self.attention(i) for i in range(self.num_layers)}
        softmax = {i: part for i, part in mixers.items() if not part.carries_state}
        fit = [i for i, x in softmax.items() if (x.window is not None) == self.mtp_has_window]
        if not fit:
            kind = "a window" if self.mtp_has_window else "full attention"
            raise ValueError(f"mtp_layers is {self.mtp_layers}, but no block has {kind}")
        parts = mixers[fit[-1]], self.feed_forward(fit[-1]), Join.of(self), _Readout.of(self)
        return (parts,) * self.mtp_layers


def num_multi_token_layers(config: ConfigJson) -> int:
    """Read from ``config.json`` the number of layers behind the model's own that are MTP blocks.

    Raises ConfigError: it is not a whole number of 0 or more.
    """
    value = config.get(_COUNT)
    if value is not None and (type(value) is not int or value < 0):
        raise error("config.json", f"{_COUNT} is {value!r:.80}, expected 0 or more")
    return value or 0


def with_multi_token(
    arch: Architecture,
    config: ConfigJson,
    setting: str = "train.mtp_weight",
) -> Architecture:
    """Return ``arch`` with the number of MTP blocks that its ``config.json`` names.

    A config without that key (Qwen's, and the empty one of a preset) means one block.

    Args:
        setting: the name of the setting that asks for the blocks; the error names it.

    Raises:
        ConfigError: the model or its family has no MTP blocks.
    """
    count = num_multi_token_layers(config) if _COUNT in config else 1
    if not count or not isinstance(arch, MultiTokenDecoder):
        problem = f"this {arch.family} model has no multi-token prediction blocks; unset it"
        raise ConfigError(setting, problem)
    return type(arch).model_validate({**dict(arch), "mtp_layers": count})


# ---- forward -----------------------------------------------------------------------------------


def run_multi_token(
    model: Any, x_BSD: torch.Tensor, inputs: Any, rows: Any
) -> tuple[list[torch.Tensor], list[RouterStats]]:
    """Run the MTP blocks of a model, after its ``head``.

    Args:
        model: a ``Transformer``, whose module imports this one.
        x_BSD: the residual stream after the last block.
        inputs, rows: the model's ``Inputs``, and the ``Rows`` that it prepared from them.

    Returns:
        Hidden states of each depth, as ``Transformer.head`` returns them, and the MoE layers'
        statistics.
    """
    found: list[torch.Tensor] = []
    stats: list[RouterStats] = []
    tokens_BS = inputs.tokens_BS
    positions_BS = inputs.positions_BS
    # ``forward`` normalises this rank's tokens alone. Calling the module would run its hooks, which
    # gather the tokens of all tensor parallel ranks.
    hidden_BSD = model.norm.forward(x_BSD)
    for depth in range(1, model.arch.mtp_layers + 1):
        is_away_BS = ~reaches(tokens_BS.shape, positions_BS, depth, tokens_BS.device)
        if inputs.is_pad_BS is not None:
            is_away_BS = is_away_BS | inputs.is_pad_BS
        block = model.arch.num_layers + depth - 1
        context = rows.contexts[model.kinds[block]]._replace(is_pad_BS=rows.own(is_away_BS))
        embedded_BSD = model.embed(tokens_BS.roll(-depth, 1), model.vocabulary).to(x_BSD.dtype)
        pair_BSP = torch.cat((embedded_BSD, hidden_BSD), dim=-1)
        hidden_BSD, own, _ = model.through(block, pair_BSP, context)
        found.append(hidden_BSD.view(rows.batch, rows.seq_len, x_BSD.shape[-1]))
        stats += [] if own is None else [own]
    return found, stats


def reaches(
    shape: Sequence[int],
    positions_BS: torch.Tensor | None,
    depth: int,
    device: torch.device,
) -> torch.Tensor:
    """Return bool [B, S]: True where the token ``depth`` places later is in the same document.

    Positions 0 1 2 0 1 and depth 1 give True True False True False.
    """
    is_in_row_S = torch.arange(shape[1], device=device) < shape[1] - depth
    if positions_BS is None:
        return is_in_row_S.expand(tuple(shape))
    return is_in_row_S & (positions_BS.roll(-depth, 1) == positions_BS + depth)


class _Batch(Protocol):
    """A micro-batch with targets."""

    @property
    def inputs(self) -> Any: ...

    @property
    def targets_BS(self) -> torch.Tensor: ...


def multi_token_targets(batch: _Batch, depth: int) -> torch.Tensor:
    """Return the targets [B, S] of ``depth``; ``batch.targets_BS`` are the targets of depth 0."""
    targets_BS = batch.targets_BS
    positions_BS = batch.inputs.positions_BS
    is_there_BS = reaches(targets_BS.shape, positions_BS, depth, targets_BS.device)
    return torch.where(is_there_BS, targets_BS.roll(-depth, 1), -100)


def multi_token_sizes(batches: Sequence[_Batch], depths: int) -> dict[str, int]:
    """Count the targets of each depth from 1 to ``depths``, named ``mtp_1``, ``mtp_2``, ..."""
    return {
        f"mtp_{depth}": sum(int((multi_token_targets(b, depth) >= 0).sum()) for b in batches)
        for depth in range(1, depths + 1)
    }


def multi_token_loss(
    model: Any,
    hidden: Sequence[torch.Tensor],
    batch: _Batch,
    sizes: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Return the mean over depths of the mean cross-entropy (this device's share of it, 0-d).

    Args:
        model: a ``Transformer``.
        hidden: the hidden states of each depth, by :func:`run_multi_token`.
        sizes: :func:`multi_token_sizes` summed over the global batch.
    """
    losses = []
    for depth, hidden_BSD in enumerate(hidden, 1):
        targets_T = multi_token_targets(batch, depth).flatten()
        size = sizes[f"mtp_{depth}"] * len(hidden)
        # Each token's loss is weighted before the sum, so that gradients are rounded only once.
        weights_T = torch.ones_like(targets_T, dtype=torch.float32) * (1 / size)
        hidden_TD = hidden_BSD.flatten(0, 1)
        loss = model.vocabulary.loss_sum(hidden_TD, model.head_weight, targets_T, weights_T)
        losses.append(loss.total)
    return torch.stack(losses).sum()


# ---- files -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Repeated(Rename):
    """Maps a module of which files have a copy in each MTP layer."""

    copies: tuple[str, ...] = ()
    """Names of the copies, with ``{layer}``."""
    if_tied: tuple[str, ...] = ()
    """Names of further copies if embedding and head are tied."""

    def pieces(
        self, parameter: str, shape: Sequence[int], arch: Architecture | None
    ) -> list[Piece]:
        found = super().pieces(parameter, shape, arch)
        if not found or arch is None:
            return found
        names = self.copies + self.if_tied * arch.tie_embeddings
        layers = range(arch.num_layers, arch.num_layers + arch.mtp_layers)
        copies = (f"{name.format(layer=i)}.weight" for i in layers for name in names)
        return found + [Piece(name, parameter, (), is_copy=True) for name in copies]


_LAYER = "model.layers.{layer}"
_EMBED = f"{_LAYER}.embed_tokens"
_HEAD = f"{_LAYER}.shared_head.head"


def behind_layers(
    weight_map: WeightMap, readout: str = "shared_head.norm"
) -> tuple[WeightMap, WeightMap]:
    """Return two maps of files in which MTP blocks are layers behind the others.

    By the first map these layers have copies of embedding and head, by the second they have none.

    Args:
        readout: the files' name of the norm before the head.
    """

    def repeated(one: Operation) -> Operation:
        match one:
            case Rename(ours="embed"):
                return _Repeated("embed", one.theirs, copies=(_EMBED,), if_tied=(_HEAD,))
            case Rename(ours="lm_head"):
                return _Repeated("lm_head", one.theirs, copies=(_HEAD,))
        return one

    behind = (
        Rename("layers.{layer}.join.enorm", f"{_LAYER}.enorm"),
        Rename("layers.{layer}.join.hnorm", f"{_LAYER}.hnorm"),
        Rename("layers.{layer}.join.proj", f"{_LAYER}.eh_proj"),
        Rename("layers.{layer}.readout", f"{_LAYER}.{readout}"),
    )
    return (*map(repeated, weight_map), *behind), (*weight_map, *behind)


@dataclass(frozen=True)
class _Within:
    """Limits ``one`` to the model's own tensors, or to MTP blocks, which are in ``mtp.layers``."""

    one: Operation
    """Maps a block as if it were one of the model's own."""
    is_mtp: bool = False
    """True: only MTP blocks are mapped. False: only the other tensors."""

    def pieces(
        self, parameter: str, shape: Sequence[int], arch: Architecture | None
    ) -> list[Piece]:
        layer = re.match(r"layers\.(\d+)\.", parameter)
        number = -1 if layer is None or arch is None else int(layer[1]) - arch.num_layers
        if self.is_mtp != (number >= 0):
            return []
        pieces = self.one.pieces(parameter, shape, arch)
        if not self.is_mtp:
            return pieces
        start = re.compile(r".*?\blayers\.\d+\.")
        named = (start.sub(f"mtp.layers.{number}.", piece.hf_name, count=1) for piece in pieces)
        return [piece._replace(hf_name=name) for piece, name in zip(pieces, named, strict=True)]

    @property
    def modules(self) -> tuple[str, ...]:
        return () if self.is_mtp else self.one.modules


_UNDER = (
    Rename("layers.{layer}.join.enorm", "mtp.pre_fc_norm_embedding"),
    Rename("layers.{layer}.join.hnorm", "mtp.pre_fc_norm_hidden"),
    Rename("layers.{layer}.join.proj", "mtp.fc"),
    Rename("layers.{layer}.readout", "mtp.norm"),
)


def under_mtp(*maps: WeightMap) -> tuple[WeightMap, ...]:
    """Return maps of files in which one MTP block lies under ``mtp.``.

    Files may have the model's own blocks in the layout of one of ``maps``, and the MTP block in
    that of another. So all pairs are returned. Those of a map with itself come first.
    """
    pairs = [(own, mtp) for own in maps for mtp in maps]
    pairs.sort(key=lambda pair: pair[0] is not pair[1])
    return tuple(
        (*map(_Within, own), *(_Within(one, is_mtp=True) for one in (*mtp, *_UNDER)))
        for own, mtp in pairs
    )
