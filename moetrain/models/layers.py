"""The dense parts of a decoder: norm, linear, vocabulary and MLP.

They are not torch's modules for one reason: parameters stay in their master dtype, and each module
casts its weight to the activations' dtype where it uses it. ``self.weight`` is read once per
forward, so code that stores it differently (sharded, say) supplies it in a single place.

Left out on purpose: dropout, and initial values (all are in :mod:`moetrain.models.rules`).

Legend: B batch, S sequence, T tokens, D model width, V vocabulary, F MLP width, L labels or keys, N
and K selected tokens, A heads with a mask of their own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from moetrain.config import KernelsSection, MoeSection
from moetrain.config.compute import Precision, SavedName
from moetrain.config.sections import IndexerMode
from moetrain.kernels import small_m
from moetrain.kernels.attention.attention import AttentionMask
from moetrain.kernels.experts.swiglu import gated, swiglu
from moetrain.kernels.linear_attention.gated_delta import Documents
from moetrain.kernels.linear_attention.reads import Reads
from moetrain.kernels.norm.rms_norm import add_rms_norm, fusible_rms_norm, rms_norm
from moetrain.kernels.quant.products import linears_fp8
from moetrain.kernels.small_m import add_low_rank, low_rank_products
from moetrain.kernels.vocabulary.chunk import soft_capped
from moetrain.kernels.vocabulary.linear_cross_entropy import (
    SummedLoss,
    TokenLosses,
    linear_cross_entropy,
    linear_cross_entropy_sum,
)
from moetrain.models.architecture import Part, Weight, Workload, linear
from moetrain.models.parts.lora import Adaptable
from moetrain.models.rules import COLWISE, ROWWISE
from moetrain.runtime.backend import Backend


class Vocabulary:
    """Computes with the vocabulary matrix ``w_VD``: the embedding's, or the head's.

    Here the matrix is whole. Where it is spread over devices, a subclass takes this one's place,
    and the model stays single-device code. Hidden states are those of ``Transformer.backbone``.
    Arguments and results are those of :mod:`moetrain.kernels.vocabulary.linear_cross_entropy`.
    """

    def __init__(
        self, backend: Backend = "auto", softcap: float = 0.0, precision: Precision = "bf16"
    ) -> None:
        self.backend: Backend = backend
        self.softcap = softcap
        self.fp8_grads = precision == "fp8_gradients"

    def embed(self, tokens_BS: torch.Tensor, w_VD: torch.Tensor) -> torch.Tensor:
        """Look up the tokens' rows of ``w_VD``: [B, S, D], or for this device's tokens alone."""
        return F.embedding(tokens_BS, w_VD)

    def logits(self, h_BSD: torch.Tensor, w_VD: torch.Tensor) -> torch.Tensor:
        """Compute ``h @ w^T`` over the whole vocabulary: [B, S, V]."""
        return soft_capped(F.linear(h_BSD, w_VD.to(h_BSD.dtype)), self.softcap)

    def logits_of(
        self, h_TD: torch.Tensor, w_VD: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Compute the logits [T, K], at least fp32, of the token ids ``tokens``.

        ``tokens`` is [K], the same ids for every row of ``h_TD``, or [T, K].
        """
        w = F.embedding(tokens, w_VD).to(h_TD.dtype)
        logits_TK = h_TD @ w.T if tokens.ndim == 1 else (w @ h_TD[..., None])[..., 0]
        wide = torch.promote_types(h_TD.dtype, torch.float32)
        return soft_capped(logits_TK.to(wide), self.softcap)

    def scores(
        self, h_TD: torch.Tensor, w_LD: torch.Tensor, places_N: torch.Tensor
    ) -> torch.Tensor:
        """Compute ``h @ w^T`` at the indices ``places_N`` (int64) of T: [N, L], at least fp32.

        ``w_LD`` is the whole head of a reward model. If several devices share a batch row, all get
        the same result. If each computes a loss from it, the loss must be divided by their number.
        """
        wide = torch.promote_types(h_TD.dtype, torch.float32)
        return F.linear(h_TD[places_N].to(wide), w_LD.to(wide))

    def token_losses(
        self,
        h_TD: torch.Tensor,
        w_VD: torch.Tensor,
        targets_T: torch.Tensor,
        *,
        temperature: float = 1.0,
    ) -> TokenLosses:
        """Compute each token's loss (its target's negative log-probability), lse and entropy."""
        return linear_cross_entropy(
            h_TD,
            w_VD.to(h_TD.dtype),
            targets_T,
            temperature=temperature,
            softcap=self.softcap,
            backend=self.backend,
        )

    def loss_sum(
        self,
        h_TD: torch.Tensor,
        w_VD: torch.Tensor,
        targets_T: torch.Tensor,
        weights_T: torch.Tensor,
    ) -> SummedLoss:
        """Sum the weighted losses; over several devices, return this device's share of the sum."""
        return linear_cross_entropy_sum(
            h_TD,
            w_VD.to(h_TD.dtype),
            targets_T,
            weights_T,
            softcap=self.softcap,
            backend=self.backend,
            fp8_grads=self.fp8_grads,
        )


_KERNELS = KernelsSection()


class KernelModule(nn.Module):
    """A module that computes as the settings ``kernels`` say.

    In generation it computes as :meth:`use_generation_kernels` says.
    """

    backend: Backend
    precision: Precision
    batch_invariant: bool
    """True: the module uses only ops whose results for a token have the same bits whatever other
    tokens are in the batch, and that the compiler does not fuse with others."""

    def use_kernels(self, kernels: KernelsSection) -> None:
        """Compute as ``kernels`` says."""
        self.backend = kernels.backend
        self.precision = kernels.precision
        self.batch_invariant = kernels.batch_invariant

    def use_generation_kernels(self, *, batch_invariant: bool) -> None:
        """Compute in bf16, not in fp8: generation spends most of its time on reading weights.

        The module becomes batch-invariant if ``batch_invariant`` is True, and stays so if it is.
        """
        self.precision = "bf16"
        self.batch_invariant = self.batch_invariant or batch_invariant


class RMSNorm(KernelModule):
    """Computes ``x / rms(x) * weight`` over the last dim (arXiv 1910.07467), in fp32.

    The quotient is rounded to ``x``'s dtype before it is multiplied by the weight, as Hugging Face
    does. With ``late`` the product is rounded instead. With ``zero_centred`` the factor is 1 + the
    weight, and rounding is late.
    """

    def __init__(
        self,
        dim: int,
        eps: float,
        kernels: KernelsSection = _KERNELS,
        *,
        zero_centred: bool = False,
        late: bool = False,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.use_kernels(kernels)
        self.zero_centred, self.late = zero_centred, late or zero_centred
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.with_stream(x)[1]

    def with_stream(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``x`` for the residual stream, and its norm.

        Unless :attr:`batch_invariant`, the kernel that computes the norm's gradient also adds the
        gradient of the returned ``x``.
        """
        weight = self._factor()
        if self.batch_invariant:
            return x, rms_norm(x, weight, self.eps, self.backend, late=self.late)
        return fusible_rms_norm(x, weight, self.eps, self.backend, late=self.late)

    def with_sum(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``x + y`` for the residual stream, and its norm."""
        if self.batch_invariant:
            return add_rms_norm(x, y, self._factor(), self.eps, self.backend, late=self.late)
        return self.with_stream(x + y)

    def _factor(self) -> torch.Tensor:
        """Return the factor of the quotient ``x / rms(x)``."""
        if not self.zero_centred:
            return self.weight
        return 1 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))


class WideNorm(RMSNorm):
    """An :class:`RMSNorm` whose ``x`` and weight may be split over devices.

    ``sum_squares`` is a plain attribute: tensor parallelism sets it where they are split. It adds
    up the devices' sums of squares [..., 1]. None: ``x`` is whole.
    """

    sum_squares: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sum_squares is None:
            return super().forward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = self.sum_squares(wide.square().sum(-1, keepdim=True))
        normed = wide * torch.rsqrt(squares / self.dim + self.eps)
        normed = normed if self.late else normed.to(x.dtype)
        return (normed * self.weight.to(normed.dtype)).to(x.dtype)


class SelectsKeys(nn.Module):
    """An attention module with an indexer, which may be trained (``train.indexer``)."""

    indexer_mode: IndexerMode = "frozen"
    """The value of ``train.indexer``."""
    sum_heads: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Adds up a tensor over the devices that divide the heads; tensor parallelism sets it. None:
    all heads are here."""


class Linear(KernelModule, Adaptable):
    """Computes ``x @ weight^T + bias``; ``weight`` is [out, in]."""

    can_drop = can_scale = True

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        kernels: KernelsSection = _KERNELS,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.use_kernels(kernels)
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim))
        self.bias = nn.Parameter(torch.empty(out_dim)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linears(x, (self,))[0]


def linears(x: torch.Tensor, modules: "Sequence[Linear]") -> "tuple[torch.Tensor, ...]":
    """Apply each of ``modules`` to ``x`` [..., in], and return one tensor [..., out] of each.

    The modules must have the same settings.
    """
    x_TD = x.flatten(0, -2)
    leading = x.shape[:-1]
    weights = [module.weight.to(x.dtype) for module in modules]
    biases = [None if module.bias is None else module.bias.to(x.dtype) for module in modules]
    if modules[0].precision != "bf16":
        products = linears_fp8(x_TD, weights, modules[0].backend, modules[0].precision)
        made = [y if b is None else y + b for y, b in zip(products, biases, strict=True)]
    elif small_m.runs_linears(x_TD, weights):
        made = small_m.linears(x_TD, weights, biases)
    else:
        product = small_m.invariant_linear if modules[0].batch_invariant else F.linear
        made = [product(x_TD, w, b) for w, b in zip(weights, biases, strict=True)]
    return tuple(torch.unflatten(y, 0, leading) for y in _adapted(x_TD, made, modules))


def _adapted(
    x_TD: torch.Tensor, made: "Sequence[torch.Tensor]", modules: "Sequence[Linear]"
) -> "Sequence[torch.Tensor]":
    """Add the results of the modules' adapters to ``made``, the modules' own results."""
    found = {i: m.adapter("weight", x_TD.dtype) for i, m in enumerate(modules)}
    adapters = {i: adapter for i, adapter in found.items() if adapter is not None}
    if not adapters:
        return made
    if torch.is_grad_enabled() and any(adapter.dropout for adapter in adapters.values()):
        dropped = [F.dropout(x_TD, adapter.dropout) for adapter in adapters.values()]
        pairs = zip(dropped, adapters.values(), strict=True)
        lows = [low_rank_products(x, [adapter.a])[0] for x, adapter in pairs]
    else:
        lows = low_rank_products(x_TD, [adapter.a for adapter in adapters.values()])
    made = list(made)
    for (i, adapter), u_TR in zip(adapters.items(), lows, strict=True):
        made[i] = add_low_rank(made[i], u_TR, adapter.b, adapter.scale)
        if adapter.magnitude is not None:
            factors, bias = adapter.factors(modules[i].weight).to(x_TD.dtype), modules[i].bias
            if bias is None:
                made[i] = made[i] * factors
            else:
                bias = bias.to(x_TD.dtype)
                made[i] = (made[i] - bias) * factors + bias
    return made


class Context(NamedTuple):
    """A block's inputs beside the residual stream; blocks of one kind share it."""

    rotation: tuple[torch.Tensor, torch.Tensor]
    """Cosine and sine of the positions' angles, fp32 [B or 1, S, 1, d/2]."""
    mask: AttentionMask
    """The mask of attention; in generation a
    :class:`~moetrain.kernels.attention.paged.PagedRows`."""
    cu_seqlens: torch.Tensor | None = None
    """int32 [documents + 1]: 0, then the documents' ends over the B * S tokens; None: every row is
    one document, or the ends are not known."""
    is_pad_BS: torch.Tensor | None = None
    """bool: padding tokens; None: there are none."""
    routes_BSK: torch.Tensor | None = None
    """int32: the experts of this layer to use again (-1: the router chooses); None: the router
    chooses for all tokens."""
    documents: Documents | Reads | None = None
    """The documents over the B * S tokens; in generation what a step reads. None: no layer carries
    a state from token to token."""
    place_T: torch.Tensor | None = None
    """Each token's place in its document, from 0. None: ``documents`` is None, or in generation."""
    whole: tuple[int, int] | None = None
    """Under context parallelism, B and S of the whole rows. ``mask`` is then for whole rows, and
    all other fields are for this device's tokens, as [1, N]. None: this device has all tokens."""
    query_scale: torch.Tensor | None = None
    """fp32 [B or 1, S, 1, 1]: a factor on the queries of each token; None: there is none."""
    parts: tuple[AttentionMask, ...] = ()
    """If context parallelism gathers keys: a mask for each of several equal parts of this device's
    queries, over the keys of all tokens. Else empty."""
    seen_BS2: torch.Tensor | None = None
    """int64: the index in its row of the first and of the last token that each token may see: the
    begin of its document, and itself. Under context parallelism indices count all tokens. None: no
    layer selects keys, or in generation."""
    selected_BSK: torch.Tensor | None = None
    """int32: the keys that an earlier layer has selected for each token, as
    :attr:`Selection.keys_BSK`. None: no layer has."""

    def showing(self, visible_BASL: torch.Tensor) -> "Context":
        """Return the context in which tokens see only the keys that the mask shows. No cache.

        Args:
            visible_BASL: bool; L counts all keys. A is 1, or the number of key/value heads.
        """
        backend = "reference" if self.mask.backend == "reference" else "sdpa"
        parts = visible_BASL.chunk(max(1, len(self.parts)), dim=2)
        masks = [AttentionMask(backend, dense_BSS=part) for part in parts]
        return self._replace(mask=masks[0], parts=tuple(masks) if self.parts else ())


class Selection(NamedTuple):
    """The keys to which a layer's tokens attend, for later layers that attend to the same ones."""

    keys_BSK: torch.Tensor | None
    """int32: the index of each key in its row (under context parallelism among all tokens, in
    generation in its sequence); -1: none. None: every token attends to all keys that it may see."""
    kl_sum: torch.Tensor | None = None
    """0-d, differentiable: the indexer's loss, summed over this device's tokens without padding.
    None: the indexer is not trained."""
    kept_sum: torch.Tensor | None = None
    """0-d: the share of attention to all keys that the selected keys have, summed likewise."""


@dataclass(frozen=True, kw_only=True)
class SwiGLU(Part):
    """Describes a gated feed-forward layer, SwiGLU or a variant of it (arXiv 2002.05202)."""

    divided: ClassVar[Mapping[str, str]] = {"intermediate_size": "tp"}

    intermediate_size: int
    mlp_bias: bool = False
    activation: str = "silu"
    """The activation of the gate, as ``Architecture.activation``."""

    def build(self, kernels: KernelsSection, moe: MoeSection) -> "DenseMLP":
        return DenseMLP(self, kernels)

    @property
    def weights(self) -> Mapping[str, Weight]:
        dim = self.hidden_size
        width = self.intermediate_size
        bias = self.mlp_bias
        found = linear("w_gate", width, dim, COLWISE, bias=bias)
        found |= linear("w_up", width, dim, COLWISE, bias=bias)
        return found | linear("w_down", dim, width, ROWWISE, bias=bias)

    def activations(self, share: Workload) -> float:
        return (3 if share.is_compiled else 4) * self._wide(share)

    def saved(self, share: Workload) -> Mapping[SavedName, float]:
        return {"linear": 2 * self._wide(share)}

    def working_set(self, share: Workload) -> float:
        return 3 * self._wide(share)

    def _wide(self, share: Workload) -> float:
        return share.tokens * self.intermediate_size * share.width / share.tp


class DenseMLP(KernelModule):
    """The module of :class:`SwiGLU`: ``w_down(silu(w_gate x) * w_up x)``, or another activation."""

    def __init__(self, sizes: SwiGLU, kernels: KernelsSection) -> None:
        super().__init__()
        self.use_kernels(kernels)
        dim = sizes.hidden_size
        width = sizes.intermediate_size
        bias = sizes.mlp_bias
        self.activation = sizes.activation
        self.w_gate = Linear(dim, width, kernels, bias=bias)
        self.w_up = Linear(dim, width, kernels, bias=bias)
        self.w_down = Linear(width, dim, kernels, bias=bias)

    def forward(self, x_BSD: torch.Tensor, context: Context) -> tuple[torch.Tensor, None]:
        """Return [B, S, D], and None for "no routing"."""
        gate, up = linears(x_BSD, (self.w_gate, self.w_up))
        if self.batch_invariant:
            both = torch.cat((gate, up), dim=-1)
            rows_T2F = both.flatten(0, -2)
            y_TF = swiglu(rows_T2F, backend=self.backend, activation=self.activation)
            y = torch.unflatten(y_TF, 0, gate.shape[:-1])
        else:
            y = gated(gate, up, self.activation)
        return self.w_down(y), None
