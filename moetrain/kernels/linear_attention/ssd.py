"""Mamba-2's recurrence over packed documents: linear attention with a decaying state.

Each head has a state S [K, V], zero at the start of every document. Token by token (state space
duality, arXiv 2405.21060)::

    S = exp(g) S + k u^T        o = S^T q

In Mamba-2's notation q, k and u are C, B and dt x, and g is dt A. This is the gated delta rule
without its correction, which subtracts what the state already holds for the key.

Worked example, K = V = 1, g = ln(1/2), k = q = 1, u = 1, 1: the state goes from 0 to 1 and 3/2,
which are also the outputs; a document that starts at the second token gives 1 again.

The fast path takes chunks of 64 tokens. With G the running sums of g in a chunk, D_ij = exp(G_i -
G_j) for j <= i, and S the state before it::

    O = diag(e^G) Q S + (D * Q K^T) U       S <- e^G_last S + (diag(e^(G_last - G)) K)^T U

The kernels are those of :mod:`moetrain.kernels.linear_attention.delta_kernels` without DELTA. The
backward computes the states again. States are rounded to the inputs' dtype where a product reads
them, and are carried in fp32.

Left out on purpose: the step sizes, the skip ``D x``, and the convolution before them, which the
compiler fuses.

Legend: T tokens, H heads of values, Q heads of queries and keys (Mamba-2's groups; each serves
H / Q heads of values), K width of a key (Mamba-2's state size), V width of a value, N documents, C
chunks of them, P parts of K.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import Any, NamedTuple

import torch

from moetrain.kernels.linear_attention.delta_kernels import (
    gate_gradients_kernel,
    input_gradients_kernel,
    local_kernel,
    outputs_kernel,
    state_gradients_kernel,
    states_kernel,
)
from moetrain.kernels.linear_attention.gated_delta import (
    CHUNK,
    WIDTHS,
    Carried,
    Documents,
    Launch,
    chunked,
    sizes_of,
)
from moetrain.runtime.backend import (
    Backend,
    gradients,
    refusal,
    require_contiguous,
    tl,
    triton,
    use_fast,
    worth_saving,
)
from moetrain.runtime.typed import OpContext


def ssd(
    q_TQK: torch.Tensor,
    k_TQK: torch.Tensor,
    u_THV: torch.Tensor,
    g_TH: torch.Tensor,
    documents: Documents,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Return ``o_THV`` in ``u``'s dtype; every input but ``documents`` gets a gradient.

    Args:
        q_TQK, k_TQK, u_THV: one dtype, contiguous; H is a multiple of Q.
        g_TH: fp32, at most 0: the log of the share of the state that is kept.
        documents: of all T tokens.
    """
    if not _is_fast(q_TQK, k_TQK, u_THV, g_TH, backend):
        return chunked(q_TQK, k_TQK, u_THV, g_TH, None, documents, 1.0)
    return ssd_op(q_TQK, k_TQK, u_THV, g_TH.float(), *documents)[0]


def ssd_continued(
    q_TQK: torch.Tensor,
    k_TQK: torch.Tensor,
    u_THV: torch.Tensor,
    g_TH: torch.Tensor,
    documents: Documents,
    carried: Carried,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Return :func:`ssd` of documents that continue from the states in ``carried``, no gradients.

    The states in ``carried`` are updated in place. Outputs of tokens outside the chunks are
    unspecified.
    """
    if not _is_fast(q_TQK, k_TQK, u_THV, g_TH, backend):
        return chunked(q_TQK, k_TQK, u_THV, g_TH, None, documents, 1.0, carried)
    return _launch_forward(q_TQK, k_TQK, u_THV, g_TH.float(), documents, carried).out_THV


def _is_fast(
    q_TQK: torch.Tensor,
    k_TQK: torch.Tensor,
    u_THV: torch.Tensor,
    g_TH: torch.Tensor,
    backend: Backend,
) -> bool:
    """Return True if the kernels run; raise ValueError for inputs that they do not take."""
    (T, Q, K), (_, H, V) = k_TQK.shape, u_THV.shape
    fits = q_TQK.shape == k_TQK.shape and u_THV.shape[0] == T and H % max(1, Q) == 0
    if not fits or g_TH.shape != (T, H):
        takes = "[T, Q, K] twice, [T, H, V] and [T, H]; Q divides H"
        raise refusal("ssd", takes, q=q_TQK, k=k_TQK, u=u_THV, g=g_TH)
    if not use_fast(backend, u_THV):
        return False
    if K not in WIDTHS or V not in WIDTHS or not q_TQK.dtype == k_TQK.dtype == u_THV.dtype:
        takes = f"one dtype, and widths of {', '.join(map(str, WIDTHS))}"
        raise refusal("ssd", takes, q=q_TQK, k=k_TQK, u=u_THV)
    require_contiguous("ssd", q=q_TQK, k=k_TQK, u=u_THV, g=g_TH)
    return True


# These are the settings of the gated delta rule, except _GATES and _INPUTS. They were not tuned
# again. Kernels that walk over chunks need two stages or more (see there).
_GATES = Launch(1, 1)
_STATES = Launch(4, 3, 32)
_OUTPUTS = Launch(4, 1, 128)
_LOCAL = Launch(4, 1)
_STATE_GRADS = Launch(4, 3, 32)
_INPUTS = Launch(4, 2, 64)


class _Forward(NamedTuple):
    """The results of the forward's kernels."""

    out_THV: torch.Tensor
    sums_TH: torch.Tensor
    """The running sums of ``g`` in their chunks."""


@torch.library.custom_op("moetrain::ssd", mutates_args=())
def ssd_op(
    q_TQK: torch.Tensor,
    k_TQK: torch.Tensor,
    u_THV: torch.Tensor,
    g_TH: torch.Tensor,
    bounds_N: torch.Tensor,
    starts_C: torch.Tensor,
    sizes_C: torch.Tensor,
    firsts_N: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the fields of :class:`_Forward`."""
    documents = Documents(bounds_N, starts_C, sizes_C, firsts_N)
    return _launch_forward(q_TQK, k_TQK, u_THV, g_TH, documents)


def _launch_forward(
    q_TQK: torch.Tensor,
    k_TQK: torch.Tensor,
    u_THV: torch.Tensor,
    g_TH: torch.Tensor,
    documents: Documents,
    carried: Carried | None = None,
) -> _Forward:
    starts_C, sizes_C = documents.starts_C, documents.sizes_C
    sizes = sizes_of(k_TQK, u_THV)
    H, C, V = u_THV.shape[1], starts_C.shape[0], u_THV.shape[2]
    sums_TH = torch.empty_like(g_TH)
    out_THV = torch.empty_like(u_THV)
    if out_THV.numel() == 0:
        return _Forward(out_THV, sums_TH)
    _sums_kernel[(C, H)](
        g_TH,
        starts_C,
        sizes_C,
        sums_TH,
        H=H,
        C=CHUNK,
        num_warps=_GATES.warps,
        num_stages=_GATES.stages,
    )
    states_CHKV = _states(k_TQK, u_THV, sums_TH, documents, carried)
    columns = min(_OUTPUTS.columns, V)
    outputs_kernel[(V // columns, H, C)](
        q_TQK,
        k_TQK,
        u_THV,
        sums_TH,
        states_CHKV,
        starts_C,
        sizes_C,
        out_THV,
        1.0,
        **sizes,
        BV=columns,
        num_warps=_OUTPUTS.warps,
        num_stages=_OUTPUTS.stages,
    )
    return _Forward(out_THV, sums_TH)


@ssd_op.register_fake
def _(
    q_TQK: torch.Tensor,
    k_TQK: torch.Tensor,
    u_THV: torch.Tensor,
    g_TH: torch.Tensor,
    bounds_N: torch.Tensor,
    starts_C: torch.Tensor,
    sizes_C: torch.Tensor,
    firsts_N: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(u_THV), torch.empty_like(g_TH)


worth_saving("attention", torch.ops.moetrain.ssd.default)


def _states(
    k_TQK: torch.Tensor,
    u_THV: torch.Tensor,
    sums_TH: torch.Tensor,
    documents: Documents,
    carried: Carried | None = None,
) -> torch.Tensor:
    """Return each chunk's first state, [C, H, K, V] in the inputs' dtype."""
    H, V, K = u_THV.shape[1], u_THV.shape[2], k_TQK.shape[2]
    bounds_N, starts_C, _, firsts_N = documents
    states_CHKV = k_TQK.new_empty(starts_C.shape[0], H, K, V)
    columns = min(_STATES.columns, V)
    states_kernel[(V // columns, H, firsts_N.shape[0] - 1)](
        k_TQK,
        u_THV,
        None,  # beta
        sums_TH,
        None,  # inverse
        bounds_N if carried is None else carried.begins_N,
        bounds_N[1:] if carried is None else carried.ends_N,
        firsts_N,
        None,  # new
        states_CHKV,
        None if carried is None else carried.states_PHKV,
        None if carried is None else carried.slots_N,
        None if carried is None else carried.is_new_N,
        None,  # writes
        **sizes_of(k_TQK, u_THV),
        CARRIED=carried is not None,
        DELTA=False,
        CHANNELS=False,
        BV=columns,
        num_warps=_STATES.warps,
        num_stages=_STATES.stages,
    )
    return states_CHKV


@torch.library.custom_op("moetrain::ssd_gradients", mutates_args=())
def ssd_gradients_op(
    do_THV: torch.Tensor,
    q_TQK: torch.Tensor,
    k_TQK: torch.Tensor,
    u_THV: torch.Tensor,
    g_TH: torch.Tensor,
    bounds_N: torch.Tensor,
    starts_C: torch.Tensor,
    sizes_C: torch.Tensor,
    firsts_N: torch.Tensor,
    sums_TH: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k, u and g."""
    documents = Documents(bounds_N, starts_C, sizes_C, firsts_N)
    sizes = sizes_of(k_TQK, u_THV)
    (T, H, V), (_, Q, K), C = u_THV.shape, k_TQK.shape, starts_C.shape[0]
    do_THV, du_THV, dg_TH = do_THV.contiguous(), torch.empty_like(u_THV), torch.empty_like(g_TH)
    if T * H == 0:
        return torch.zeros_like(q_TQK), torch.zeros_like(k_TQK), du_THV, dg_TH
    # 1. Compute the states again.
    states_CHKV = _states(k_TQK, u_THV, sums_TH, documents)
    # 2. Compute the part of dU that comes from the chunk's own outputs.
    d_states_CHKV = torch.empty_like(states_CHKV)
    local_kernel[(H, C)](
        q_TQK,
        k_TQK,
        do_THV,
        sums_TH,
        starts_C,
        sizes_C,
        du_THV,
        1.0,
        **sizes,
        num_warps=_LOCAL.warps,
        num_stages=_LOCAL.stages,
    )
    # 3. Compute the states' gradients, from each document's end, and the rest of dU.
    columns = min(_STATE_GRADS.columns, V)
    state_gradients_kernel[(V // columns, H, len(bounds_N) - 1)](
        q_TQK,
        k_TQK,
        do_THV,
        None,  # beta
        sums_TH,
        None,  # inverse
        bounds_N,
        firsts_N,
        du_THV,
        d_states_CHKV,
        None,  # writes
        1.0,
        **sizes,
        DELTA=False,
        CHANNELS=False,
        BV=columns,
        num_warps=_STATE_GRADS.warps,
        num_stages=_STATE_GRADS.stages_that_fit(k_TQK.dtype),
    )
    # 4. Compute the other inputs' gradients. Each part of K has a share of the sums' gradients.
    dq_THK, dk_THK = k_TQK.new_empty(T, H, K), k_TQK.new_empty(T, H, K)
    columns = min(_INPUTS.columns, K)
    parts = K // columns
    d_sums_PTH = g_TH.new_empty(parts, T, H)
    input_gradients_kernel[(parts, H, C)](
        q_TQK,
        k_TQK,
        None,  # v
        do_THV,
        u_THV,
        None,  # dr
        None,  # beta
        sums_TH,
        states_CHKV,
        d_states_CHKV,
        starts_C,
        sizes_C,
        dq_THK,
        dk_THK,
        None,  # dv
        d_sums_PTH,
        None,  # d_beta
        1.0,
        T,
        **sizes,
        DELTA=False,
        BK=columns,
        BV=min(64, V),
        num_warps=_INPUTS.warps,
        num_stages=_INPUTS.stages,
    )
    gate_gradients_kernel[(H, C)](
        d_sums_PTH,
        None,  # d_beta
        starts_C,
        sizes_C,
        dg_TH,
        None,  # dbeta
        T,
        H=H,
        C=CHUNK,
        P=parts,
        DELTA=False,
        num_warps=_GATES.warps,
        num_stages=_GATES.stages,
    )
    # Sum over the heads of values that share queries and keys.
    if H != Q:
        dq_THK, dk_THK = (
            x.unflatten(1, (Q, H // Q)).sum(2, dtype=torch.float32).to(k_TQK.dtype)
            for x in (dq_THK, dk_THK)
        )
    return dq_THK, dk_THK, du_THV, dg_TH


@ssd_gradients_op.register_fake
def _(
    do_THV: torch.Tensor,
    q_TQK: torch.Tensor,
    k_TQK: torch.Tensor,
    u_THV: torch.Tensor,
    g_TH: torch.Tensor,
    bounds_N: torch.Tensor,
    starts_C: torch.Tensor,
    sizes_C: torch.Tensor,
    firsts_N: torch.Tensor,
    sums_TH: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.empty_like(q_TQK),
        torch.empty_like(k_TQK),
        torch.empty_like(u_THV),
        torch.empty_like(g_TH),
    )


def _save(ctx: OpContext, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, sums_TH = output
    ctx.save_for_backward(*inputs, sums_TH)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: OpContext, do_THV: torch.Tensor | None, *_: object) -> tuple[object, ...]:
    if do_THV is None:
        return gradients(ssd_op)
    # All inputs, then the sums: the gradients' op has that order too.
    dq_TQK, dk_TQK, du_THV, dg_TH = ssd_gradients_op(do_THV, *ctx.saved_tensors)
    return gradients(ssd_op, q_TQK=dq_TQK, k_TQK=dk_TQK, u_THV=du_THV, g_TH=dg_TH)


ssd_op.register_autograd(_differentiate, setup_context=_save)


@triton.jit
def _sums_kernel(g_ptr, starts_ptr, sizes_ptr, sums_ptr, H: tl.constexpr, C: tl.constexpr):
    """Compute the running sums of g in one head of a chunk."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, C)
    valid = i < tl.load(sizes_ptr + chunk)
    gates = (tl.load(starts_ptr + chunk) + i).to(tl.int64) * H + head
    sums = tl.cumsum(tl.load(g_ptr + gates, mask=valid, other=0.0), axis=0)
    tl.store(sums_ptr + gates, sums, mask=valid)
