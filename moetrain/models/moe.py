"""The Mixture-of-Experts layer: router, dispatcher, experts, and the balancing rules around them.

    y_t = sum over the K chosen experts e of  w_te * expert_e(x_t)  [+ g_t * shared experts(x_t)]

The layer is single-device math. A subclass of :class:`Dispatcher` sends tokens to experts on other
devices. A layer returns its routing statistics instead of counting into buffers, since
recomputation would count twice.

Legend: B batch, S sequence (with B: x_BSD) or tokens sent to this device's experts (without: x_SD),
T = B * S tokens, D model width, F expert width, E experts, K experts a token, R routed rows, L MoE
layers.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from moetrain.config import ConfigError, KernelsSection, MoeSection
from moetrain.config.compute import SavedName
from moetrain.kernels.experts.few_tokens import few_tokens_counters, few_tokens_mlp, fits_few_tokens
from moetrain.kernels.experts.mlp import adapted_expert_mlp, expert_mlp
from moetrain.kernels.experts.permutation import ExpertIndices, expert_indices
from moetrain.kernels.experts.products import router_logits
from moetrain.kernels.experts.routed import Routed, balanced_ids, rerouted
from moetrain.kernels.experts.router import router_topk
from moetrain.kernels.norm.elementwise import sigmoid
from moetrain.kernels.quant.groups import QuantFormat, QuantisedMatrices
from moetrain.kernels.quant.recipes import RECIPES
from moetrain.kernels.small_m import is_few
from moetrain.losses.balancing import RouterStats
from moetrain.models.architecture import FP32, Part, RouterScore, Weight, Workload
from moetrain.models.layers import Context, KernelModule, Linear, SwiGLU
from moetrain.models.parts.lora import Adaptable
from moetrain.models.rules import EXPERT, PartStyle, Rule
from moetrain.runtime.backend import Backend

_SHARED = Rule("replicate")
"""The rule of shared experts: replicated over tensor parallel ranks, applied to a rank's tokens."""
_ROUTER = replace(_SHARED, decay=False, gather=torch.float32)
_GATE = replace(_SHARED, gather=torch.float32)  # a single row, too narrow for products in fp8


@dataclass(frozen=True, kw_only=True)
class RoutedExperts(Part):
    """Describes an MoE layer of SwiGLU experts, or of a variant: a router chooses some for each
    token, and every token also uses the shared ones."""

    name: ClassVar[str] = "moe"
    style: ClassVar[PartStyle] = "routed"
    aligned: ClassVar[tuple[str, ...]] = ("hidden_size", "moe_intermediate_size")
    divided: ClassVar[Mapping[str, str]] = {"num_experts": "ep"}

    num_experts: int
    num_experts_per_token: int
    moe_intermediate_size: int
    norm_topk_prob: bool = True
    router_score: RouterScore = "softmax"
    router_min_sum: float = 0.0
    router_sum_eps: float = 0.0
    router_fp32: bool = False
    selection_bias: bool = False
    num_expert_groups: int = 1
    topk_expert_groups: int = 1
    best_of_group: bool = False
    routed_scaling_factor: float = 1.0
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    activation: str = "silu"
    """The activation of the gate, as ``Architecture.activation``."""

    def __post_init__(self) -> None:
        if self.num_experts_per_token > self.num_experts:
            problem = f"num_experts_per_token {self.num_experts_per_token} is more than"
            raise ValueError(f"{problem} num_experts {self.num_experts}")
        for name in ("num_experts_per_token", "moe_intermediate_size"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} is 0, but num_experts is {self.num_experts}")
        groups, chosen = self.num_expert_groups, self.topk_expert_groups
        if self.num_experts % groups or not chosen <= groups:
            problem = f"topk_expert_groups {chosen} of num_expert_groups {groups} is not possible"
            raise ValueError(f"{problem} with num_experts {self.num_experts}")
        if self.num_experts // groups * chosen < self.num_experts_per_token:
            problem = f"num_experts_per_token {self.num_experts_per_token} is more than the experts"
            raise ValueError(f"{problem} in topk_expert_groups {chosen}")

    @property
    def shared(self) -> Part | None:
        """The shared experts, as one dense layer; None: there are none."""
        if not self.shared_intermediate_size:
            return None
        return SwiGLU(
            hidden_size=self.hidden_size,
            intermediate_size=self.shared_intermediate_size,
            activation=self.activation,
        )

    def build(self, kernels: KernelsSection, moe: MoeSection) -> "MoE":
        return MoE(self, moe, kernels)

    @property
    def weights(self) -> Mapping[str, Weight]:
        e = self.num_experts
        dim = self.hidden_size
        width = self.moe_intermediate_size
        found = {
            # The router computes in fp32, whatever the compute dtype is.
            "router.weight": Weight((e, dim), _ROUTER),
            "experts.w_gate_up": Weight((e, 2 * width, dim), replace(EXPERT, stacked=2)),
            "experts.w_down": Weight((e, dim, width), EXPERT),
        }
        if self.shared is not None:
            for leaf, weight in self.shared.weights.items():
                found[f"shared_experts.{leaf}"] = Weight(weight.shape, _SHARED)
            if self.shared_gate:
                found["shared_expert_gate.weight"] = Weight((1, dim), _GATE)
        return found

    def num_active_params(self) -> int:
        expert = 3 * self.hidden_size * self.moe_intermediate_size
        return self.num_params() - (self.num_experts - self.num_experts_per_token) * expert

    def products_per_token(self, seq_len: int) -> float:
        return self.num_active_params()

    def activations(self, share: Workload) -> float:
        """Return the bytes of received tokens, pre-activations, routing and shared experts."""
        kept = self.saved(share)["experts"] + self._received(share)
        if self.router_fp32 and not share.is_compiled:  # the router's input in fp32
            kept += share.own_tokens * self.hidden_size * FP32
        return kept if self.shared is None else kept + self.shared.activations(_own(share))

    def saved(self, share: Workload) -> Mapping[SavedName, float]:
        pre = self.num_experts_per_token * share.width * 2 * self.moe_intermediate_size
        # A token's logits, ids, weights and indices.
        routing = FP32 * (self.num_experts + 5 * self.num_experts_per_token)
        return {
            "experts": share.own_tokens * (pre + routing),
            "dispatch": self._received(share),
            **({} if self.shared is None else self.shared.saved(_own(share))),
        }

    def working_set(self, share: Workload) -> float:
        # A row's gradient, those of both products and of the activation, and the activation.
        row = share.width * (self.hidden_size + 4 * self.moe_intermediate_size)
        rows = share.own_tokens * self.num_experts_per_token * row
        # Shared experts' gradients are computed before or after those of the rows.
        shared = 0.0 if self.shared is None else self.shared.working_set(_own(share))
        return max(rows + 2 * self._received(share), shared)

    def _received(self, share: Workload) -> float:
        """Return the bytes of the tokens sent to this rank, if all experts are equally likely.

        A token counts once, however many of its experts are here.
        """
        if share.ep == 1:
            return 0.0
        reached = 1 - (1 - 1 / share.ep) ** self.num_experts_per_token
        return share.own_tokens * share.ep * reached * self.hidden_size * share.width


def _own(share: Workload) -> Workload:
    """Return the workload of a layer that every rank has whole and applies to its own tokens."""
    return replace(share, tokens=share.own_tokens, tp=1)


class Dispatched(NamedTuple):
    """The tokens sent to the experts of this device."""

    x_SD: torch.Tensor
    """The tokens, in the activations' dtype. A token is here once, even if several of its experts
    are on this device."""
    weights_SK: torch.Tensor
    """fp32 routing weights, with any values where a slot's expert is not on this device. They
    travel with the token, because the experts apply them before their down projection, so that
    combining is a plain sum. Gradients flow back to them."""
    indices: ExpertIndices
    """Maps the tokens' slots to rows of the local experts."""
    ctx: tuple[torch.Tensor, ...]
    """Passed to ``combine``, and opaque to all other code."""
    typical_rows: int
    """R under balanced routing, known to the host."""
    dropped: torch.Tensor | None = None
    """int32: the number of rows for which there was no room; None: there is room for all. If it is
    above 0, the step is run again. Tokens that a rule such as a capacity drops are not counted."""


class MoEOutput(NamedTuple):
    """The result of an MoE layer's experts."""

    y_TD: torch.Tensor
    """The weighted sum of each token's experts."""
    dropped: torch.Tensor | None
    """int32: the number of rows for which there was no room; None: there is room for all."""


class Dispatcher:
    """Sends tokens to their experts and back; this class serves a device that has all experts.

    ``x_TD`` are the tokens of a rank's own batch rows, in order. Under context and tensor
    parallelism they are the rank's share of these tokens, in the same order.

    No per-call state lives on a dispatcher: the context is an immutable tuple of tensors, so calls
    re-enter safely under recomputation, pipelining and overlap.

    To drop tokens by a rule of your own, such as a capacity, write a subclass whose ``dispatch``
    sets the ids of dropped slots to -1 and then calls this one. For few tokens, :class:`MoE` skips
    the dispatcher if it is of exactly this class, so a subclass is always called.
    """

    def __init__(self, num_experts: int, backend: Backend = "auto") -> None:
        self.num_experts = num_experts
        self.backend: Backend = backend

    def dispatch(
        self, x_TD: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Dispatched:
        """Send tokens to their experts, by int32 global ids (-1: none); return those sent here."""
        indices = expert_indices(topk_ids_TK, self.num_experts, self.backend)
        return Dispatched(
            x_SD=x_TD,
            weights_SK=topk_weights_TK,
            indices=indices,
            ctx=(),
            typical_rows=topk_ids_TK.numel(),
        )

    def combine(self, y_SD: torch.Tensor, ctx: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return ``y_TD``, the sum of each token's results, in the order of ``dispatch``."""
        return y_SD

    def through(self, experts: "Experts", x_TD: torch.Tensor, routed: Routed) -> MoEOutput:
        """Dispatch the tokens, run ``experts`` (the local ones), and combine."""
        sent = self.dispatch(x_TD, routed.ids_TK, routed.weights_TK)
        y_SD = experts(sent.x_SD, sent.weights_SK, sent.indices, sent.typical_rows)
        return MoEOutput(self.combine(y_SD, sent.ctx), sent.dropped)


class Router(Adaptable):
    """Chooses K experts for each token by fp32 logits, whatever the activations' dtype.

    With ``selection_bias`` or ``moe.bias_update_rate`` > 0 there is a ``bias`` (fp32 buffer [E]).
    It is added to the scores when experts are chosen, but not to the scores that weight them.
    :func:`update_router_bias` changes it between steps. It stays fp32 when the model is cast.
    """

    bias: torch.Tensor | None
    is_frozen = False
    """True: neither the weight nor the bias is trained."""

    def __init__(self, sizes: RoutedExperts, moe: MoeSection, backend: Backend) -> None:
        super().__init__()
        self.sizes, self.top_k = sizes, sizes.num_experts_per_token
        self.backend: Backend = backend
        self.is_balanced = moe.force_balanced
        self.weight = nn.Parameter(torch.empty(sizes.num_experts, sizes.hidden_size))
        has_bias = sizes.selection_bias or moe.bias_update_rate > 0
        zeros_E = torch.zeros(sizes.num_experts, dtype=torch.float32) if has_bias else None
        self.register_buffer("bias", zeros_E)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Router":
        before_E = self.bias
        # Torch's method has no types.
        super()._apply(fn, recurse)  # pyright: ignore[reportUnknownMemberType]
        if before_E is not None and self.bias is not None and self.bias.dtype != before_E.dtype:
            self.bias = before_E.to(self.bias.device)
        return self

    def forward(
        self,
        x_TD: torch.Tensor,
        is_pad_T: torch.Tensor | None = None,
        ids_TK: torch.Tensor | None = None,
    ) -> Routed:
        """Route ``x_TD`` (any float dtype); pads get no expert and count nowhere.

        ``ids_TK``: experts to use whatever the scores are; -1: the router chooses.
        """
        sizes, logits_TE = self.sizes, self.logits(x_TD)
        routed = router_topk(
            logits_TE,
            self.top_k,
            score=sizes.router_score,
            normalize=sizes.norm_topk_prob,
            bias_E=self.bias,
            is_pad_T=is_pad_T,
            num_groups=sizes.num_expert_groups,
            topk_groups=sizes.topk_expert_groups,
            best_of_group=sizes.best_of_group,
            scale=sizes.routed_scaling_factor,
            min_sum=sizes.router_min_sum,
            sum_eps=sizes.router_sum_eps,
            backend=self.backend,
        )
        if self.is_balanced:  # the router runs first, so that measurements include its cost
            ids_TK = balanced_ids(logits_TE, self.top_k)
        elif ids_TK is not None:
            ids_TK = torch.where(ids_TK >= 0, ids_TK, routed.ids_TK)
        else:
            return routed
        return rerouted(
            routed,
            logits_TE,
            ids_TK,
            score=sizes.router_score,
            normalize=sizes.norm_topk_prob,
            is_pad_T=is_pad_T,
            scale=sizes.routed_scaling_factor,
            min_sum=sizes.router_min_sum,
            sum_eps=sizes.router_sum_eps,
        )

    def logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Compute ``logits_TE`` in fp32."""
        adapter = self.adapter("weight", self.weight.dtype)
        weight_ED = self.weight if adapter is None else adapter.merged(self.weight)  # it is small
        return router_logits(x_TD, weight_ED, self.backend, wide=self.sizes.router_fp32)


class Experts(KernelModule, Adaptable):
    """All experts' SwiGLU weights, stacked; the gate's F rows come before the up projection's."""

    weights = ("w_gate_up", "w_down")
    activation: str
    """A name of :data:`~moetrain.kernels.experts.projections.ACTIVATIONS`."""
    quant_format: QuantFormat | None = None
    """The format in which the matrices are stored, uint8 [E, bytes] each; None: unquantised."""
    room: int = 0
    """The number of redundant experts that fit in the memory right behind each stacked matrix. That
    memory belongs to no tensor."""

    def __init__(self, sizes: RoutedExperts, kernels: KernelsSection) -> None:
        super().__init__()
        num_experts, dim, width = sizes.num_experts, sizes.hidden_size, sizes.moe_intermediate_size
        self.use_kernels(kernels)
        self.check_width(width)
        self.activation = sizes.activation
        self.w_gate_up = nn.Parameter(torch.empty(num_experts, 2 * width, dim))
        self.w_down = nn.Parameter(torch.empty(num_experts, dim, width))
        self.counters: torch.Tensor | None = None

    def check_width(self, width: int) -> None:
        """Raise ConfigError if the precision's kernels do not take experts of this width."""
        if self.precision in RECIPES and width % (multiple := RECIPES[self.precision].multiple):
            raise ConfigError(
                "kernels.precision",
                f"{self.precision!r} needs experts whose width is a multiple of {multiple}, and "
                f"these have {width}; use bf16",
            )

    def store_as(self, quant_format: QuantFormat) -> None:
        """Store the matrices in ``quant_format`` from now on, without values and gradients."""
        self.quant_format = quant_format
        self._shapes: dict[str, torch.Size] = {}
        for name in self.weights:
            whole = self.get_parameter(name)
            self._shapes[name] = whole.shape[1:]
            size = quant_format.num_bytes(whole.shape[1:].numel())
            bytes_EB = whole.new_empty((len(whole), size), dtype=torch.uint8)
            self.register_parameter(name, nn.Parameter(bytes_EB, requires_grad=False))

    def stored(self, name: str, dtype: torch.dtype) -> torch.Tensor | QuantisedMatrices:
        """Return the matrices ``name`` as they are stored, for products in ``dtype``."""
        weight = getattr(self, name)
        if self.quant_format is None:
            return weight.to(dtype)
        return QuantisedMatrices(self.quant_format, weight, self._shapes[name], dtype)

    def matrices(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrices ``name``, dequantised: [E, out, in] in ``dtype``."""
        stored = self.stored(name, dtype)
        return stored.dequantise() if isinstance(stored, QuantisedMatrices) else stored

    def forward(
        self,
        x_SD: torch.Tensor,
        weights_SK: torch.Tensor,
        indices: ExpertIndices,
        typical_rows: int | None = None,
    ) -> torch.Tensor:
        """Return ``y_SD``, the weighted sum of each token's local experts."""
        (first, second), dtype = self.weights, x_SD.dtype
        up, down = self.adapter(first, dtype), self.adapter(second, dtype)
        if up is not None and down is not None:
            return adapted_expert_mlp(
                x_SD,
                weights_SK,
                indices,
                self.matrices(first, dtype),
                self.matrices(second, dtype),
                a_gate_up_ErD=up.a,
                b_gate_up_E2Fr=up.b,
                a_down_ErF=down.a,
                b_down_EDr=down.b,
                scale=up.scale,
                backend=self.backend,
                activation=self.activation,
                precision=self.precision,
            )
        return expert_mlp(
            x_SD,
            weights_SK,
            indices,
            self.stored(first, dtype),
            self.stored(second, dtype),
            backend=self.backend,
            typical_rows=typical_rows,
            activation=self.activation,
            precision=self.precision,
        )

    def of_few(self, x_TD: torch.Tensor, routed: Routed) -> torch.Tensor | None:
        """Return the weighted sum of each token's experts, computed by the kernel for few tokens.

        All experts must be local. None: the kernel does not support these tokens or experts.
        """
        is_swiglu = type(self) is Experts and self.activation == "silu"
        is_plain = self.precision == "bf16" and self.quant_format is None
        if not (is_few(x_TD) and is_swiglu and is_plain):
            return None
        has_adapters = any(self.adapter(name, x_TD.dtype) is not None for name in self.weights)
        if has_adapters or not fits_few_tokens(self.w_gate_up, self.w_down):
            return None
        if self.counters is None:
            self.counters = few_tokens_counters(self.w_down, routed.ids_TK.shape[1])
        return few_tokens_mlp(
            x_TD,
            routed.ids_TK,
            routed.weights_TK,
            w_gate_up_E2FD=self.w_gate_up,
            w_down_EDF=self.w_down,
            counters=self.counters,
        )


class MoE(nn.Module):
    """Router, dispatcher, routed and shared experts as one feed-forward layer.

    ``dispatcher`` is a plain attribute: expert parallelism replaces it.
    """

    kinds: ClassVar[tuple[type[Router], type[Experts]]] = (Router, Experts)
    """The classes of its router and its experts."""

    def __init__(self, sizes: RoutedExperts, moe: MoeSection, kernels: KernelsSection) -> None:
        super().__init__()
        router, experts = self.kinds
        self.router = router(sizes, moe, kernels.backend)
        self.experts = experts(sizes, kernels)
        self.shared_experts = None if sizes.shared is None else sizes.shared.build(kernels, moe)
        has_gate = sizes.shared is not None and sizes.shared_gate
        gate = Linear(sizes.hidden_size, 1, kernels.without_fp8) if has_gate else None
        self.shared_expert_gate = gate
        self.dispatcher = Dispatcher(sizes.num_experts, kernels.backend)

    def forward(self, x_BSD: torch.Tensor, context: Context) -> tuple[torch.Tensor, RouterStats]:
        """Return ``y_BSD`` in ``x_BSD``'s dtype, and the routing statistics.

        Pads use the shared experts alone.
        """
        x_TD = x_BSD.flatten(0, 1)
        is_pad_BS = context.is_pad_BS
        routes_BSK = context.routes_BSK
        routed = self.router(
            x_TD,
            None if is_pad_BS is None else is_pad_BS.flatten(),
            None if routes_BSK is None else routes_BSK.reshape(-1, routes_BSK.shape[-1]),
        )
        y_TD, dropped = self.results(x_TD, routed, context)
        stats = RouterStats(
            counts_E=routed.counts_E,
            prob_sum_E=routed.prob_sum_E,
            z_sum=routed.z_sum,
            entropy_sum=routed.entropy_sum,
            dropped=dropped,
        )
        return y_TD.view_as(x_BSD), stats

    def results(self, x_TD: torch.Tensor, routed: Routed, context: Context) -> MoEOutput:
        """Return the sum of each token's experts and the shared ones."""
        y_TD, dropped = self.through_experts(x_TD, routed)
        if self.shared_experts is not None:
            shared_TD, _ = self.shared_experts(x_TD, context)
            if self.shared_expert_gate is not None:
                fusible = not self.shared_expert_gate.batch_invariant
                shared_TD = sigmoid(self.shared_expert_gate(x_TD), fusible=fusible) * shared_TD
            y_TD = y_TD + shared_TD
        return MoEOutput(y_TD, dropped)

    def through_experts(self, x_TD: torch.Tensor, routed: Routed) -> MoEOutput:
        """Return the weighted sum of each token's routed experts.

        The layers of all families come through here, and so do those of a generator.
        """
        few_TD = self.experts.of_few(x_TD, routed) if type(self.dispatcher) is Dispatcher else None
        if few_TD is not None:
            return MoEOutput(few_TD, dropped=None)
        return self.dispatcher.through(self.experts, x_TD, routed)


@torch.no_grad()
def update_router_bias(
    model: nn.Module, counts_LE: Iterable[torch.Tensor], rate: torch.Tensor | float
) -> None:
    """Raise the selection bias of underused experts and lower the others', by ``rate``.

    Auxiliary-loss-free balancing (arXiv 2408.15664). ``counts_LE`` counts the choices over the
    whole batch, for ``model``'s MoE layers in order. A frozen router's bias stays as it is, since
    moving it would change the choice of experts.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router, counts_E in zip(routers, counts_LE, strict=True):
        assert router.bias is not None  # as moe.bias_update_rate builds it
        if router.is_frozen:
            continue
        router.bias += rate * torch.sign(counts_E.float().mean() - counts_E)
