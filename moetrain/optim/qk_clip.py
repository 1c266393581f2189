"""QK-clip of MuonClip (Kimi K2, arXiv 2507.20534): no head's scores grow beyond a threshold.

    gamma[h] = min(1, tau / S[h])        S[h]: head h's largest score over all tokens of a step

After the step the weights that make the head's queries and keys are scaled, so that the scores are
those of before times gamma. What other heads read too stays as it is, and the queries that meet it
take all of the factor:

    keys of one head (H = G)        rows of wq and wk times sqrt(gamma)
    keys shared by several heads    rows of wq times gamma; wk stays
    latent attention                queries and keys without a position, rows of wq_b (or wq) and
                                    wkv_b, times sqrt(gamma); rotating queries times gamma, since
                                    all heads share the rotating key; wkv_a and values stay

The paper has latent attention alone; its rule for the shared rotating key is taken for the keys of
grouped-query attention, where to scale them would change heads that are not too large. Biases are
scaled like the weights' rows, gates of queries are not. Norms of queries and keys would undo all of
it, and bound scores anyway: such models are refused.

Scores are watched in forwards that keep a graph (:class:`_WatchedCore`), not in evaluations. They
are those before the update, of all tokens of the step, pads included.

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


class _WatchedCore:
    """Attention ``core`` that raises ``peaks_H``, of the heads that it is given, as it runs."""

    def __init__(
        self,
        core: Core,
        peaks_H: torch.Tensor,
        backend: Backend,
    ) -> None:
        self.core, self.peaks_H = core, peaks_H
        self.backend: Backend = backend

    def __call__(
        self,
        q_BSHd: torch.Tensor,
        k_BSGd: torch.Tensor,
        v_BSGv: torch.Tensor,
        context: Context,
        scale: float | None = None,
        **how: Any,
    ) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise_peaks(self.peaks_H, q_BSHd, k_BSGd, context.mask, scale, self.backend)
        return self.core(q_BSHd, k_BSGd, v_BSGv, context, scale, **how)


class _ScaledRows(NamedTuple):
    """What becomes of the rows of a weight, or of some of them."""

    layer: int
    """Its place among attention layers."""
    head_R: torch.Tensor
    """int64: the head whose gamma scales a row."""
    power_R: torch.Tensor
    """fp32: the power of gamma that does; 0: the row stays as it is."""

    def part(self, rows: slice, device: torch.device) -> "_ScaledRows":
        """Return those of ``rows``, on ``device``."""
        return _ScaledRows(self.layer, self.head_R[rows].to(device), self.power_R[rows].to(device))

    def factor(self, gamma_LH: torch.Tensor) -> torch.Tensor:
        """Return what each row is multiplied by."""
        return gamma_LH[self.layer][self.head_R] ** self.power_R


class QKClip:
    """The attention layers of a model, their heads' largest scores, and what is scaled by them."""

    def __init__(self, arch: Architecture, threshold: float) -> None:
        """Find what to watch.

        Raises:
            ConfigError: a layer's queries and keys are normalised, or none has any.
        """
        self.threshold = threshold
        self.parts: dict[str, Any] = {
            f"layers.{i}.{part.name}": part
            for i, parts in enumerate(arch.layers())
            for part in parts
            if isinstance(part, AttentionPart) and not part.carries_state
        }
        if not self.parts:
            raise _refusal(threshold, f"{arch.family} has no layer with queries and keys")
        if any(getattr(part, "qk_norm", False) for part in self.parts.values()):
            problem = f"{arch.family} normalises queries and keys, whose scores no weight scales"
            raise _refusal(threshold, problem)
        self.scaled: dict[str, _ScaledRows] = {}
        for layer, (path, part) in enumerate(self.parts.items()):
            for name, pattern in _patterns(part).items():
                power_R = torch.cat([torch.full((n,), power) for n, power in pattern])
                head_R = torch.arange(part.num_heads).repeat_interleave(len(power_R))
                rows = _ScaledRows(layer, head_R, power_R.repeat(part.num_heads))
                self.scaled |= {f"{path}.{name}.{kind}": rows for kind in ("weight", "bias")}
        most = max(part.num_heads for part in self.parts.values())
        self.peaks_LH = torch.zeros(len(self.parts), most)
        """Of the heads that were watched here; 0 elsewhere, and where no score was larger."""

    def watch(
        self,
        model: nn.Module,
        device: torch.device,
        index: int,
        count: int,
    ) -> None:
        """Watch the layers that ``model`` has; its ``core`` is given part ``index`` of ``count``
        equal parts of the heads."""
        self.peaks_LH = self.peaks_LH.to(device)
        here: dict[str, Any] = dict(model.named_modules())
        for peaks_H, (path, part) in zip(self.peaks_LH, self.parts.items(), strict=True):
            if (holder := here.get(path)) is None:
                continue
            heads = part.num_heads // count
            backend = holder.backend
            own_H = peaks_H[index * heads : (index + 1) * heads]
            while hasattr(holder.core, "core"):  # what brings heads or tokens together
                holder = holder.core
            holder.core = _WatchedCore(holder.core, own_H, backend)

    def take(self, biggest: Callable[[torch.Tensor], object]) -> torch.Tensor:
        """Return gamma_LH of what was watched since the last call, and begin anew.

        Args:
            biggest: replaces a tensor by the largest numbers over all ranks.
        """
        biggest(self.peaks_LH)
        gamma_LH = self.threshold / self.peaks_LH.clamp(min=self.threshold)
        self.peaks_LH.zero_()
        return gamma_LH


def _refusal(threshold: float, problem: str) -> ConfigError:
    return ConfigError("optim.muon_qk_clip", f"{threshold:g}, but {problem}; set it to 0")


def _patterns(part: Any) -> Mapping[str, list[tuple[int, float]]]:
    """Give, by weight, how many rows of each head are scaled by which powers of gamma, in order."""
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
