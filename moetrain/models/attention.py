"""Grouped-query attention; the function that mixes queries, keys and values is injected.

Legend: B batch, S sequence, T = B * S tokens, D model width, H query heads, G key/value heads,
d head width, v width of a value, p pairs of elements that rotate.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from moetrain.config import KernelsSection, MoeSection
from moetrain.config.compute import SavedName
from moetrain.kernels.attention.attention import attention
from moetrain.kernels.attention.sinks import attention_with_sinks
from moetrain.kernels.norm.elementwise import sigmoid
from moetrain.kernels.norm.rotary import rotary
from moetrain.models.architecture import FP32, AttentionPart, QKNormed, Weight, Workload, linear
from moetrain.models.generation import AttentionCache, Caches, LayerCache
from moetrain.models.layers import Context, KernelModule, Linear, RMSNorm, WideNorm, linears
from moetrain.models.rules import COLWISE, NORM, ROWWISE, WIDE_NORM, ZERO_NORM


@dataclass(frozen=True, kw_only=True)
class GroupedQueryAttention(AttentionPart):
    """Describes causal attention whose query heads share keys and values (arXiv 2305.13245)."""

    divided: ClassVar[Mapping[str, str]] = {"num_heads": "tp", "num_kv_heads": "tp"}

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    """True: queries and keys are normalised."""
    qk_norm_of: QKNormed = "head"
    attention_multiplier: float | None = None
    """The factor of the scores; None: d^-1/2."""
    partial_rotary_factor: float = 1.0
    rope_interleaved: bool = False
    output_gate: bool = False
    """True: each head's result is multiplied by a sigmoid of a projection of the token. For each
    head ``wq`` has the rows of the query, then those of its gate."""
    zero_centred_norms: bool = False
    late_norms: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary embeddings need pairs")
        width = self.head_dim * self.partial_rotary_factor
        if abs(width - self.rotary_dim) > 1e-6 or self.rotary_dim % 2:
            raise ValueError(
                f"partial_rotary_factor {self.partial_rotary_factor} of head_dim {self.head_dim}"
                f" is {width:g}, which is not an even number"
            )

    def build(self, kernels: KernelsSection, moe: MoeSection) -> "Attention":
        return Attention(self, kernels)

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of all query heads together, and of all key heads."""
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """v, the width of a value and of a head's result."""
        return self.head_dim

    @property
    def value_widths(self) -> tuple[int, int]:
        """Widths of all heads' results together, and of all values."""
        return self.num_heads * self.value_dim, self.num_kv_heads * self.value_dim

    @property
    def query_width(self) -> int:
        """Width of ``wq``'s result: all query heads, and their gates."""
        return self.widths[0] * (2 if self.output_gate else 1)

    @property
    def widest_head(self) -> int:
        return max(self.head_dim, self.value_dim)

    @property
    def rotary_dim(self) -> int:
        return round(self.head_dim * self.partial_rotary_factor)

    @property
    def weights(self) -> Mapping[str, Weight]:
        dim, (q_dim, kv_dim) = self.hidden_size, self.widths
        y_dim, v_dim = self.value_widths
        found: dict[str, Weight] = {}
        for name, out_dim in {"wq": self.query_width, "wk": kv_dim, "wv": v_dim}.items():
            found |= linear(name, out_dim, dim, COLWISE, bias=self.qkv_bias)
        found |= linear("wo", dim, y_dim, ROWWISE, bias=self.out_bias)
        if self.qk_norm:
            rule = ZERO_NORM if self.zero_centred_norms else NORM
            for name, width in zip(("q_norm", "k_norm"), (q_dim, kv_dim), strict=True):
                if self.qk_norm_of == "width":
                    found[f"{name}.weight"] = Weight((width,), WIDE_NORM)
                else:
                    found[f"{name}.weight"] = Weight((self.head_dim,), rule)
        return found

    def products_per_token(self, seq_len: int) -> float:
        window = min(self.window or seq_len, seq_len)
        keys = window * (1 - window / (2 * seq_len))
        scores_and_values = (self.widths[0] + self.value_widths[0]) * keys
        return super().products_per_token(seq_len) + scores_and_values

    def activations(self, share: Workload) -> float:
        """Return the bytes of queries, keys, values, the result and its log-sum-exp.

        A tensor parallel rank has all tokens of its rows, and its own heads. With q/k norms, the
        results of the projections are kept as well as the normalised queries and keys.
        """
        w = share.width
        elements = sum(self.widths)
        # Result and values; queries and keys as attention takes them.
        values = w * (sum(self.value_widths) + elements)
        if self.qk_norm:
            values += (w if share.is_compiled else FP32 + w) * elements
        if self.output_gate:  # the gates, and the gated result
            values += 2 * w * self.value_widths[0]
        others = share.key_tokens - share.tokens  # tokens of other ranks whose keys are here
        others = min(others, 2 * self.window) if self.window else others
        gathered = w * (self.widths[1] + self.value_widths[1]) * others
        return (share.tokens * (values + FP32 * self.num_heads) + gathered) / share.tp

    def exchanged(self, share: Workload) -> dict[str, float]:
        keys_and_values = self.widths[1] + self.value_widths[1]
        copies = max(1.0, share.cp * share.tp / self.num_kv_heads)
        spread = self.widths[0] + self.value_widths[0] + keys_and_values * copies
        all_of_one = share.tokens * max(1, share.cp - 1)
        # A rank has two pieces of a row, each of which sees a window before it.
        seen = min(1.0, 2 * (self.window or all_of_one) / share.tokens)
        return share.received(spread / share.tp, keys_and_values * seen / share.tp)

    def cached_elements(self, ranks: int = 1) -> int:
        elements = self.widths[1] + self.value_widths[1]
        return elements // (1 if self.num_kv_heads % ranks else ranks)

    def saved(self, share: Workload) -> Mapping[SavedName, float]:
        w, (y_dim, v_dim) = share.width, self.value_widths
        products = share.tokens * w * (self.query_width + self.widths[1] + v_dim) / share.tp
        return {
            "attention": share.tokens * (w * y_dim + FP32 * self.num_heads) / share.tp,
            "linear": products + share.own_tokens * w * self.hidden_size,
        }


class Core(Protocol):
    """Mixes tokens, inside the compiled block.

    Context parallelism wraps the core, generation replaces it by attention over a key/value cache,
    and a family may have a core with other scores.
    """

    def __call__(
        self,
        q_BSHd: torch.Tensor,
        k_BSGd: torch.Tensor,
        v_BSGv: torch.Tensor,
        context: Context,
        scale: float | None = None,
        *,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return one value for each token and query head, [B, S, H, v].

        Under tensor parallelism H counts this rank's heads alone. Under context parallelism S
        counts this rank's tokens alone.

        Args:
            q_BSHd, k_BSGd: rotated queries and keys.
            scale: the factor of the scores; None: d^-1/2.
            sinks_H: the heads' sinks; None: there are none.
        """
        ...


def masked_attention(
    q_BSHd: torch.Tensor,
    k_BSGd: torch.Tensor,
    v_BSGv: torch.Tensor,
    context: Context,
    scale: float | None = None,
    *,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend over whole rows: softmax over the keys that the mask shows and, if given, the sink."""
    if sinks_H is not None:
        return attention_with_sinks(q_BSHd, k_BSGd, v_BSGv, context.mask, sinks_H, scale)
    return attention(q_BSHd, k_BSGd, v_BSGv, context.mask, scale)


class CoreAttention(KernelModule):
    """The base of attention modules.

    ``core`` is a plain attribute: context parallelism and QK-clip wrap it, and generation replaces
    it by attention over a cache.
    """

    def __init__(self, kernels: KernelsSection, core: Core = masked_attention) -> None:
        super().__init__()
        self.use_kernels(kernels)
        self.core = core
        self.is_watched = False
        """True: QK-clip watches the scores, for which :attr:`core` must be called."""
        self.cache: AttentionCache | None = None
        """The keys and values of generation; None: this module trains."""

    def for_generation(self, caches: Caches, window: int | None) -> LayerCache | None:
        """Attend over a cache from now on, and return the cache.

        Returns None, and changes nothing, if the module has a core of its family, which cannot be
        replaced.
        """
        if self.cache is None and self.core is not masked_attention:
            return None
        self.core = self.cache = caches.make_attention(window)
        return self.cache


def _qk_norm(sizes: GroupedQueryAttention, width: int, kernels: KernelsSection) -> RMSNorm:
    """Make the norm of queries or keys; all their heads together have ``width`` elements."""
    if sizes.qk_norm_of == "width":
        return WideNorm(width, sizes.norm_eps, kernels, late=sizes.late_norms)
    return RMSNorm(
        sizes.head_dim,
        sizes.norm_eps,
        kernels,
        zero_centred=sizes.zero_centred_norms,
        late=sizes.late_norms,
    )


class Attention(CoreAttention):
    """The module of :class:`GroupedQueryAttention`; positions rotate unless ``rotary_dim`` is 0."""

    def __init__(
        self,
        sizes: GroupedQueryAttention,
        kernels: KernelsSection,
        core: Core = masked_attention,
    ) -> None:
        super().__init__(kernels, core)
        self.head_dim, self.value_dim = sizes.head_dim, sizes.value_dim
        self.interleaved, self.scale = sizes.rope_interleaved, sizes.attention_multiplier
        self.norm_of, self.output_gate = sizes.qk_norm_of, sizes.output_gate
        self.rotates = sizes.rotary_dim > 0
        dim, (q_dim, kv_dim) = sizes.hidden_size, sizes.widths
        y_dim, v_dim = sizes.value_widths
        self.wq = Linear(dim, sizes.query_width, kernels, bias=sizes.qkv_bias)
        self.wk = Linear(dim, kv_dim, kernels, bias=sizes.qkv_bias)
        self.wv = Linear(dim, v_dim, kernels, bias=sizes.qkv_bias)
        self.wo = Linear(y_dim, dim, kernels, bias=sizes.out_bias)
        self.q_norm = self.k_norm = None
        if sizes.qk_norm:
            self.q_norm = _qk_norm(sizes, q_dim, kernels)
            self.k_norm = _qk_norm(sizes, kv_dim, kernels)

    def forward(self, x_BSD: torch.Tensor, context: Context) -> torch.Tensor:
        """Mix tokens; returns [B, S, D] in ``x_BSD``'s dtype."""
        q, k, v = linears(x_BSD, (self.wq, self.wk, self.wv))
        gate = None
        if self.output_gate:
            both = torch.unflatten(q, -1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
            q, gate = (half.flatten(-2) for half in both)
        y = self.attend(q, k, v, context).flatten(-2)
        if gate is not None:
            y = y * sigmoid(gate, fusible=not self.batch_invariant)
        return self.wo(y)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context
    ) -> torch.Tensor:
        """Return the heads' results [B, S, H, v], from the projections of all heads [B, S, ...]."""
        q_BSHd, k_BSGd = (torch.unflatten(x, -1, (-1, self.head_dim)) for x in (q, k))
        v_BSGv = torch.unflatten(v, -1, (-1, self.value_dim))
        norm, cache = self.q_norm, self.cache
        # The kernel that stores into a cache also normalises and rotates. It knows one order only:
        # the norm of each head, then the rotation.
        is_plain = norm is None or (self.norm_of == "head" and not norm.late)
        if cache is not None and cache.rotates and q.is_cuda and self.rotates and is_plain:
            q_BSHd, context = cache.rotate(
                q_BSHd,
                k_BSGd,
                v_BSGv,
                context,
                q_norm=norm,
                k_norm=self.k_norm,
                interleaved=self.interleaved,
            )
        else:
            q_BSHd = self._rotated(q, self.q_norm, context)
            k_BSGd = self._rotated(k, self.k_norm, context)
        return self.mix(q_BSHd, k_BSGd, v_BSGv, context)

    def mix(
        self,
        q_BSHd: torch.Tensor,
        k_BSGd: torch.Tensor,
        v_BSGd: torch.Tensor,
        context: Context,
    ) -> torch.Tensor:
        """Call :attr:`core`."""
        if self.scale is None:  # cores of families elsewhere may not take one
            return self.core(q_BSHd, k_BSGd, v_BSGd, context)
        return self.core(q_BSHd, k_BSGd, v_BSGd, context, self.scale)

    def _rotated(self, x: torch.Tensor, norm: RMSNorm | None, context: Context) -> torch.Tensor:
        """Normalise and rotate queries or keys ``x`` [B, S, H * d]; returns them as [B, S, H, d].

        A norm of each head or of the whole width comes before the rotation, one of ``rotated``
        heads after it.
        """
        if norm is not None and self.norm_of == "width":
            x, norm = norm(x), None
        weight, eps = None, 0.0
        x_THd = torch.unflatten(x.flatten(0, 1), -1, (-1, self.head_dim))
        if not self.rotates:
            y_THd = x_THd if norm is None else norm(x_THd)
            return torch.unflatten(y_THd, 0, x.shape[:2])
        if norm is not None and self.norm_of == "head":
            if norm.late:  # the norm inside rotary rounds before it multiplies by the weight
                x_THd = norm(x_THd)
            else:
                weight, eps = norm.weight, norm.eps
        cos_Sp, sin_Sp = (angles.flatten(0, 2) for angles in context.rotation)
        y_THd = rotary(
            x_THd,
            cos_Sp,
            sin_Sp,
            weight,
            eps,
            self.backend,
            interleaved=self.interleaved,
            fusible=not self.batch_invariant,
        )
        if norm is not None and self.norm_of == "rotated":
            y_THd = norm(y_THd)
        return torch.unflatten(y_THd, 0, x.shape[:2])
