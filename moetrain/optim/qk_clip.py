"""QK-clip of MuonClip (Kimi K2, arXiv 2507.20534): no head's scores grow beyond a threshold.

    gamma[h] = min(1, tau / S[h])        S[h]: head h's largest score over all tokens of a step

After the step, the weights that make the head's queries and keys are scaled, so that its scores are
gamma times as large. Weights that other heads use too stay as they are, and the weights of the
queries then take the whole factor:

    keys of one head (H = G)        rows of wq and wk times sqrt(gamma)
    keys shared by several heads    rows of wq times gamma; wk stays
    latent attention                queries and keys without a position, rows of wq_b (or wq) and
                                    wkv_b, times sqrt(gamma); rotating queries times gamma, since
                                    all heads share the rotating key; wkv_a and values stay

The paper has only latent attention. Its rule for the shared rotating key is applied here to shared
keys of grouped-query attention, since scaling such keys would also change heads whose scores are
not too large.
Biases are scaled like the weights' rows; gates of queries are not. Models that normalise queries
and keys are refused: the norms would undo the scaling, and bound scores anyway.

Scores are watched in forwards with gradients (:class:`_WatchedCore`), not in evaluations. They are
those before the update, of all tokens of the step, padding included.

Worked example with tau = 100, H = 2 and G = 1: S = [400, 50] gives gamma = [0.25, 1], and the first
head's rows of wq become a quarter. With G = 2 its rows of wq and wk become a half.

Legend: L attention layers, H query heads (of the layer with the most), G key heads, R rows of a
weight.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from moetrain.config import ConfigError
from moetrain.kernels.attention.peaks import raise_peaks
from moetrain.models.architecture import Architecture, AttentionPart
from moetrain.models.attention import Core, GroupedQueryAttention
from moetrain.models.layers import Context
from moetrain.models.parts.latent_attention import LatentAttention
from moetrain.runtime.backend import Backend
from moetrain.runtime.typed import named_modules


class _WatchedCore:
    """Attention ``core`` that keeps the largest score of each of its heads in ``peaks_H``."""

    def __init__(self, core: Core, peaks_H: torch.Tensor, backend: Backend) -> None:
        self.core, self.peaks_H = core, peaks_H
        self.backend: Backend = backend

    def __call__(
        self,
        q_BSHd: torch.Tensor,
        k_BSGd: torch.Tensor,
        v_BSGv: torch.Tensor,
        context: Context,
        scale: float | None = None,
        **options: Any,
    ) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise_peaks(self.peaks_H, q_BSHd, k_BSGd, context.mask, scale, self.backend)
        return self.core(q_BSHd, k_BSGd, v_BSGv, context, scale, **options)


class ScaledRows(NamedTuple):
    """The scaling of the rows of a weight: ``gamma_LH[layer, head_R] ** power_R``."""

    layer: int
    """Index among the attention layers."""
    head_R: torch.Tensor
    """int64: the head of each row."""
    power_R: torch.Tensor
    """fp32: 1, 0.5, or 0 where the row stays as it is."""

    def part(self, rows: slice, device: torch.device) -> "ScaledRows":
        """Return the scaling of ``rows`` of these rows, on ``device``."""
        return ScaledRows(self.layer, self.head_R[rows].to(device), self.power_R[rows].to(device))

    def factor(self, gamma_LH: torch.Tensor) -> torch.Tensor:
        """Return the factor of each row."""
        return gamma_LH[self.layer][self.head_R] ** self.power_R


class QKClip:
    """The largest scores of a model's heads, and the rows of weights that they scale."""

    def __init__(self, arch: Architecture, threshold: float) -> None:
        """Find the attention layers and their rows.

        Raises:
            ConfigError: a layer normalises queries and keys, or no layer has any.
        """
        self.threshold = threshold
        """tau"""
        self.parts: dict[str, Any] = {
            f"layers.{i}.{part.name}": part
            for i, parts in enumerate(arch.layers())
            for part in parts
            if isinstance(part, AttentionPart) and not part.carries_state
        }
        """The attention layers by path."""
        if not self.parts:
            raise _refusal(threshold, f"{arch.family} has no layer with queries and keys")
        if any(getattr(part, "qk_norm", False) for part in self.parts.values()):
            raise _refusal(
                threshold,
                f"{arch.family} normalises queries and keys, so no weight scales their scores",
            )
        self.scaled: dict[str, ScaledRows] = {}
        """By the parameter's name."""
        for layer, (path, part) in enumerate(self.parts.items()):
            for name, pattern in _patterns(part).items():
                power_R = torch.cat([torch.full((n,), power) for n, power in pattern])
                head_R = torch.arange(part.num_heads).repeat_interleave(len(power_R))
                rows = ScaledRows(layer, head_R, power_R.repeat(part.num_heads))
                self.scaled |= {f"{path}.{name}.{kind}": rows for kind in ("weight", "bias")}
        most = max(part.num_heads for part in self.parts.values())
        self.peaks_LH = torch.zeros(len(self.parts), most)
        """The largest scores of the heads that this rank watches; 0 for other heads, and where no
        score was larger."""

    def watch(self, model: nn.Module, device: torch.device, index: int, count: int) -> None:
        """Watch the attention layers of ``model``, which may have only some of all layers.

        Args:
            index, count: this rank's ``core`` gets part ``index`` of ``count`` equal parts of the
                heads.
        """
        self.peaks_LH = self.peaks_LH.to(device)
        here: dict[str, Any] = dict(named_modules(model))
        for peaks_H, (path, part) in zip(self.peaks_LH, self.parts.items(), strict=True):
            if (holder := here.get(path)) is None:
                continue
            heads = part.num_heads // count
            backend, holder.is_watched = holder.backend, True
            own_H = peaks_H[index * heads : (index + 1) * heads]
            while hasattr(holder.core, "core"):  # wrappers that exchange heads or tokens
                holder = holder.core
            holder.core = _WatchedCore(holder.core, own_H, backend)

    def take(self, reduce_max: Callable[[torch.Tensor], object]) -> torch.Tensor:
        """Return gamma_LH from the scores since the last call, and reset these.

        Args:
            reduce_max: replaces a tensor by its element-wise maximum over all ranks.
        """
        reduce_max(self.peaks_LH)
        gamma_LH = self.threshold / self.peaks_LH.clamp(min=self.threshold)
        self.peaks_LH.zero_()
        return gamma_LH


def _refusal(threshold: float, problem: str) -> ConfigError:
    return ConfigError("optim.muon_qk_clip", f"{threshold:g}, but {problem}; set it to 0")


def _patterns(part: Any) -> Mapping[str, list[tuple[int, float]]]:
    """Return, by weight, the (number of rows, power of gamma) of a head's rows, in order."""
    if isinstance(part, LatentAttention):
        query = "wq_b" if part.q_lora_rank else "wq"
        nope = (part.qk_nope_head_dim, 0.5)
        rope = (part.qk_rope_head_dim, 1.0)
        return {query: [nope, rope], "wkv_b": [nope, (part.v_head_dim, 0.0)]}
    assert isinstance(part, GroupedQueryAttention)  # there are no others
    shares = part.num_heads > part.num_kv_heads
    queries = [(part.head_dim, 1.0 if shares else 0.5)]
    queries += [(part.head_dim, 0.0)] * part.output_gate
    return {"wq": queries} | ({} if shares else {"wk": [(part.head_dim, 0.5)]})
