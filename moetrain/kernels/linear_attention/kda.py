"""Kimi Delta Attention over packed documents: the gated delta rule with a gate for each channel.

Each head has a state S [K, V], zero at the start of every document. Token by token (Kimi Linear,
arXiv 2510.26692), with g a vector of K channels::

    S' = diag(e^g) S        u = beta (v - S'^T k)        S = S' + k u^T        o = scale S^T q

Where a token's gates are equal, this is :mod:`moetrain.kernels.linear_attention.gated_delta`.

Worked example, K = 2, V = 1, scale 1, beta = 1, k = q = (1, 0), v = 1, 1: the state is (1, 0) after
either token, whatever g is, and both outputs are 1. With a query of (0, 1) they are 0.

The fast path takes chunks of 64 tokens. With G the running sums of g in a chunk, a vector for each
token, and S the state before the chunk::

    A_ij = sum_d k_id k_jd e^(G_id - G_jd), j < i       B_ij: the same with q_id, j <= i
    T = (1 + diag(beta) A)^-1      R = diag(beta) (V - (K * e^G) S)      U = T R
    O = scale ((Q * e^G) S + B U)      S <- diag(e^G_last) S + (K * e^(G_last - G))^T U

K * e^-G is never formed: at -5 a step it has e^320, which no fp32 holds. A and B are computed level
by level instead. Level w cuts the chunk into blocks of w = 2, 4, ... 64 tokens. It takes the pairs
whose later token i is in the second half of a block and whose earlier token j is in the first half
of the same block, so every pair belongs to one level. With a the first token of the second half,
the anchor::

    e^(G_i - G_j) = e^(G_i - G_a) e^(G_a - G_j)

Both exponents are at most 0, and one factor for each token makes all of a level's pairs a product
of two matrices. The backward goes through the same levels.

In the backward, dR = T^T dU is the gradient of R, and dL = -dR U^T below the diagonal that of
diag(beta) A. Each term of the forward has e^G of a row or of a read of S, or e^-G of a column or of
a write to S. So G's gradient is that term's gradient times its own q or k, with that sign, and
needs no products of its own. G_last gets the sum of the writes' terms, and e^G_last sum_v S dS of
each channel. G, the decayed vectors, U and the states are computed again; T and B are kept.

Left out on purpose: the norms of q and k, the gates' own formulas, and the convolution before them,
which the compiler fuses. A bound of the gate is not used.

Legend: T tokens, H heads, K width of a key, V width of a value, N documents, C chunks of them, P
parts of K.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import Any, NamedTuple

import torch

from moetrain.kernels.linear_attention.delta_kernels import state_gradients_kernel, states_kernel
from moetrain.kernels.linear_attention.gated_delta import (
    CHUNK,
    WIDTHS,
    Carried,
    Documents,
    Launch,
    chunked,
    sizes_of,
)
from moetrain.kernels.linear_attention.kda_kernels import (
    kda_input_gradients_kernel,
    own_gradients_kernel,
    pairs_kernel,
    read_kernel,
    vectors_kernel,
)
from moetrain.runtime.backend import (
    Backend,
    gradients,
    refusal,
    require_contiguous,
    use_fast,
    worth_saving,
)
from moetrain.runtime.typed import OpContext


class _RuleInputs(NamedTuple):
    """The inputs of :func:`kda`."""

    q_THK: torch.Tensor
    k_THK: torch.Tensor
    v_THV: torch.Tensor
    g_THK: torch.Tensor
    beta_TH: torch.Tensor


def kda(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_THK: torch.Tensor,
    beta_TH: torch.Tensor,
    documents: Documents,
    scale: float,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Return ``o_THV`` in ``v``'s dtype; every input but ``documents`` gets a gradient.

    Args:
        q_THK, k_THK, v_THV: one dtype, contiguous. Keys are expected to have norms of about one:
            the rule diverges where ``beta |k|^2`` passes two.
        g_THK: fp32, at most 0: the logs of the factors by which the state's rows decay.
        beta_TH: any floating dtype: how far the state moves towards the value, 0 to 1.
        documents: of all T tokens.
        scale: the factor of the outputs.

    Raises ValueError: shapes, dtypes or strides do not fit.
    """
    inputs = _RuleInputs(q_THK, k_THK, v_THV, g_THK, beta_TH)
    if not _is_fast(inputs, backend):
        return chunked(*inputs, documents, scale)
    return kda_op(*_with_fp32_gates(inputs), *documents, scale)[0]


def kda_continued(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_THK: torch.Tensor,
    beta_TH: torch.Tensor,
    documents: Documents,
    carried: Carried,
    scale: float,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Return :func:`kda` of documents that go on from ``carried``, without gradients.

    The states in ``carried`` are updated in place. Outputs of tokens outside the chunks are
    unspecified.
    """
    inputs = _RuleInputs(q_THK, k_THK, v_THV, g_THK, beta_TH)
    if not _is_fast(inputs, backend):
        return chunked(*inputs, documents, scale, carried)
    return _launch_forward(_with_fp32_gates(inputs), documents, scale, carried).out_THV


def _is_fast(inputs: _RuleInputs, backend: Backend) -> bool:
    """Return True if the kernels run; raise ValueError for inputs that are not taken."""
    q_THK, k_THK, v_THV, g_THK, beta_TH = inputs
    (T, H, K), V = k_THK.shape, v_THV.shape[2]
    fits = q_THK.shape == k_THK.shape == g_THK.shape and v_THV.shape[:2] == (T, H)
    if not fits or beta_TH.shape != (T, H):
        takes = "[T, H, K] for q, k and g, [T, H, V] and [T, H]"
        raise refusal("kda", takes, q=q_THK, k=k_THK, v=v_THV, g=g_THK, beta=beta_TH)
    if not use_fast(backend, v_THV):
        return False
    if K not in WIDTHS or V not in WIDTHS or not q_THK.dtype == k_THK.dtype == v_THV.dtype:
        takes = f"one dtype, and widths of {', '.join(map(str, WIDTHS))}"
        raise refusal("kda", takes, q=q_THK, k=k_THK, v=v_THV)
    require_contiguous("kda", q=q_THK, k=k_THK, v=v_THV, g=g_THK, beta=beta_TH)
    return True


def _with_fp32_gates(inputs: _RuleInputs) -> _RuleInputs:
    return inputs._replace(g_THK=inputs.g_THK.float(), beta_TH=inputs.beta_TH.float())


# The fastest that were tried on one H200, bf16, K = V = 128 (docs/log/attention.md). Kernels with
# loops need two stages or more (see the gated delta rule).
_VECTORS = Launch(4, 1, 64)
_PAIRS = Launch(4, 2, 64)
_STATES = Launch(4, 3, 32)
_READ = Launch(4, 1, 128)
_OWN = Launch(4, 1)
_STATE_GRADS = Launch(4, 3, 32)
_INPUTS = Launch(4, 2, 32)


def _sizes_of(k_THK: torch.Tensor, v_THV: torch.Tensor) -> dict[str, Any]:
    """Return :func:`sizes_of` without Q, which is H."""
    sizes = sizes_of(k_THK, v_THV)
    del sizes["Q"]
    return sizes


class _Vectors(NamedTuple):
    """The gates' sums, and the vectors that read and write states."""

    sums_THK: torch.Tensor
    """G, fp32."""
    q_reads_THK: torch.Tensor
    """scale q e^G."""
    k_reads_THK: torch.Tensor
    """k e^G."""
    writes_THK: torch.Tensor
    """k e^(G_last - G)."""
    factors_CHK: torch.Tensor
    """e^G_last, fp32."""


class _Forward(NamedTuple):
    """The results of the forward's kernels."""

    out_THV: torch.Tensor
    inverse_CHII: torch.Tensor
    """T of every chunk."""
    scores_CHII: torch.Tensor
    """scale B of every chunk."""


@torch.library.custom_op("moetrain::kda", mutates_args=())
def kda_op(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_THK: torch.Tensor,
    beta_TH: torch.Tensor,
    bounds_N: torch.Tensor,
    starts_C: torch.Tensor,
    sizes_C: torch.Tensor,
    firsts_N: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return :class:`_Forward`."""
    documents = Documents(bounds_N, starts_C, sizes_C, firsts_N)
    inputs = _RuleInputs(q_THK, k_THK, v_THV, g_THK, beta_TH)
    return _launch_forward(inputs, documents, scale)


@kda_op.register_fake
def _(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_THK: torch.Tensor,
    beta_TH: torch.Tensor,
    bounds_N: torch.Tensor,
    starts_C: torch.Tensor,
    sizes_C: torch.Tensor,
    firsts_N: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inverse_CHII = k_THK.new_empty(starts_C.shape[0], v_THV.shape[1], CHUNK, CHUNK)
    return torch.empty_like(v_THV), inverse_CHII, torch.empty_like(inverse_CHII)


worth_saving("attention", torch.ops.moetrain.kda.default)


def _launch_forward(
    inputs: _RuleInputs, documents: Documents, scale: float, carried: Carried | None = None
) -> _Forward:
    q_THK, k_THK, v_THV, _, beta_TH = inputs
    starts_C, sizes_C = documents.starts_C, documents.sizes_C
    (_, H, K), C, V = k_THK.shape, starts_C.shape[0], v_THV.shape[2]
    sizes = _sizes_of(k_THK, v_THV)
    inverse_CHII = k_THK.new_empty(C, H, CHUNK, CHUNK)
    scores_CHII = torch.empty_like(inverse_CHII)
    out_THV = torch.empty_like(v_THV)
    if out_THV.numel() == 0:
        return _Forward(out_THV, inverse_CHII, scores_CHII)
    vectors = _vectors(inputs, documents, scale)
    pairs_kernel[(H, C)](
        q_THK,
        k_THK,
        beta_TH,
        vectors.sums_THK,
        starts_C,
        sizes_C,
        inverse_CHII,
        scores_CHII,
        scale,
        **sizes,
        BK=min(_PAIRS.columns, K),
        num_warps=_PAIRS.warps,
        num_stages=_PAIRS.stages,
    )
    new_THV, states_CHKV = _states(inputs, vectors, documents, inverse_CHII, carried)
    columns = min(_READ.columns, V)
    read_kernel[(V // columns, H, C)](
        vectors.q_reads_THK,
        new_THV,
        scores_CHII,
        states_CHKV,
        starts_C,
        sizes_C,
        out_THV,
        **sizes,
        BV=columns,
        num_warps=_READ.warps,
        num_stages=_READ.stages,
    )
    return _Forward(out_THV, inverse_CHII, scores_CHII)


def _vectors(inputs: _RuleInputs, documents: Documents, scale: float) -> _Vectors:
    q_THK, k_THK, v_THV, g_THK, _ = inputs
    C, (_, H, K) = documents.starts_C.shape[0], k_THK.shape
    vectors = _Vectors(
        sums_THK=torch.empty_like(g_THK),
        q_reads_THK=torch.empty_like(q_THK),
        k_reads_THK=torch.empty_like(k_THK),
        writes_THK=torch.empty_like(k_THK),
        factors_CHK=g_THK.new_empty(C, H, K),
    )
    columns = min(_VECTORS.columns, K)
    vectors_kernel[(K // columns, H, C)](
        q_THK,
        k_THK,
        g_THK,
        documents.starts_C,
        documents.sizes_C,
        *vectors,
        scale,
        **_sizes_of(k_THK, v_THV),
        BK=columns,
        num_warps=_VECTORS.warps,
        num_stages=_VECTORS.stages,
    )
    return vectors


def _states(
    inputs: _RuleInputs,
    vectors: _Vectors,
    documents: Documents,
    inverse_CHII: torch.Tensor,
    carried: Carried | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return U [T, H, V] and each chunk's first state [C, H, K, V], in the inputs' dtype."""
    _, k_THK, v_THV, _, beta_TH = inputs
    bounds_N, starts_C, _, firsts_N = documents
    H, K, V = v_THV.shape[1], k_THK.shape[2], v_THV.shape[2]
    new_THV = torch.empty_like(v_THV)
    states_CHKV = k_THK.new_empty(starts_C.shape[0], H, K, V)
    columns = min(_STATES.columns, V)
    states_kernel[(V // columns, H, firsts_N.shape[0] - 1)](
        vectors.k_reads_THK,
        v_THV,
        beta_TH,
        vectors.factors_CHK,
        inverse_CHII,
        bounds_N if carried is None else carried.begins_N,
        bounds_N[1:] if carried is None else carried.ends_N,
        firsts_N,
        new_THV,
        states_CHKV,
        None if carried is None else carried.states_PHKV,
        None if carried is None else carried.slots_N,
        None if carried is None else carried.is_new_N,
        vectors.writes_THK,
        **sizes_of(k_THK, v_THV),
        BV=columns,
        CARRIED=carried is not None,
        DELTA=True,
        CHANNELS=True,
        num_warps=_STATES.warps,
        num_stages=_STATES.stages_that_fit(k_THK.dtype),
    )
    return new_THV, states_CHKV


@torch.library.custom_op("moetrain::kda_gradients", mutates_args=())
def kda_gradients_op(
    do_THV: torch.Tensor,
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_THK: torch.Tensor,
    beta_TH: torch.Tensor,
    bounds_N: torch.Tensor,
    starts_C: torch.Tensor,
    sizes_C: torch.Tensor,
    firsts_N: torch.Tensor,
    inverse_CHII: torch.Tensor,
    scores_CHII: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k, v, g and beta."""
    documents = Documents(bounds_N, starts_C, sizes_C, firsts_N)
    inputs = _RuleInputs(q_THK, k_THK, v_THV, g_THK, beta_TH)
    sizes = _sizes_of(k_THK, v_THV)
    (T, H, V), K, C = v_THV.shape, k_THK.shape[2], starts_C.shape[0]
    do_THV, dv_THV = do_THV.contiguous(), torch.empty_like(v_THV)
    dq_THK, dk_THK = torch.empty_like(q_THK), torch.empty_like(k_THK)
    dg_THK = torch.empty_like(g_THK)
    if T * H == 0:
        return dq_THK, dk_THK, dv_THV, dg_THK, torch.empty_like(beta_TH)
    # 1. G, the decayed vectors, U and the states again.
    vectors = _vectors(inputs, documents, scale)
    new_THV, states_CHKV = _states(inputs, vectors, documents, inverse_CHII)
    # 2. The part of dU from the chunk's own outputs, which the next kernel overwrites by dR.
    du_THV = torch.empty_like(v_THV)
    d_states_CHKV = torch.empty_like(states_CHKV)
    own_gradients_kernel[(H, C)](
        do_THV,
        scores_CHII,
        starts_C,
        sizes_C,
        du_THV,
        **sizes,
        num_warps=_OWN.warps,
        num_stages=_OWN.stages,
    )
    # 3. dR and the states' gradients, from each document's end.
    columns = min(_STATE_GRADS.columns, V)
    state_gradients_kernel[(V // columns, H, len(bounds_N) - 1)](
        vectors.q_reads_THK,
        vectors.k_reads_THK,
        do_THV,
        beta_TH,
        vectors.factors_CHK,
        inverse_CHII,
        bounds_N,
        firsts_N,
        du_THV,
        d_states_CHKV,
        vectors.writes_THK,
        1.0,  # the scale is in the vectors
        **sizes_of(k_THK, v_THV),
        DELTA=True,
        CHANNELS=True,
        BV=columns,
        num_warps=_STATE_GRADS.warps,
        num_stages=_STATE_GRADS.stages_that_fit(k_THK.dtype),
    )
    # 4. The inputs' gradients. Each part of K has a share of beta's.
    columns = min(_INPUTS.columns, K)
    parts = K // columns
    d_beta_PTH = beta_TH.new_empty(parts, T, H)
    kda_input_gradients_kernel[(parts, H, C)](
        q_THK,
        k_THK,
        v_THV,
        do_THV,
        new_THV,
        du_THV,
        beta_TH,
        vectors.sums_THK,
        states_CHKV,
        d_states_CHKV,
        starts_C,
        sizes_C,
        dq_THK,
        dk_THK,
        dv_THV,
        dg_THK,
        d_beta_PTH,
        scale,
        T,
        **sizes,
        BK=columns,
        BV=min(64, V),
        num_warps=_INPUTS.warps,
        num_stages=_INPUTS.stages,
    )
    return dq_THK, dk_THK, dv_THV, dg_THK, d_beta_PTH.sum(0)


@kda_gradients_op.register_fake
def _(
    do_THV: torch.Tensor,
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_THK: torch.Tensor,
    beta_TH: torch.Tensor,
    bounds_N: torch.Tensor,
    starts_C: torch.Tensor,
    sizes_C: torch.Tensor,
    firsts_N: torch.Tensor,
    inverse_CHII: torch.Tensor,
    scores_CHII: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.empty_like(q_THK),
        torch.empty_like(k_THK),
        torch.empty_like(v_THV),
        torch.empty_like(g_THK),
        torch.empty_like(beta_TH),
    )


def _save(ctx: OpContext, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, ctx.scale = inputs
    _, inverse_CHII, scores_CHII = output
    ctx.save_for_backward(*tensors, inverse_CHII, scores_CHII)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: OpContext, do_THV: torch.Tensor | None, *_: object) -> tuple[object, ...]:
    if do_THV is None:
        return gradients(kda_op)
    # All inputs but the scale, then the forward's results: the gradients' op has that order too.
    dq_THK, dk_THK, dv_THV, dg_THK, dbeta_TH = kda_gradients_op(
        do_THV, *ctx.saved_tensors, ctx.scale
    )
    return gradients(
        kda_op, q_THK=dq_THK, k_THK=dk_THK, v_THV=dv_THV, g_THK=dg_THK, beta_TH=dbeta_TH
    )


kda_op.register_autograd(_differentiate, setup_context=_save)
