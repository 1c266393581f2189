"""The gated delta rule over packed documents: linear attention with a decaying, corrected state.

Each head has a state S [K, V], zero at the start of every document. Token by token (Gated DeltaNet,
arXiv 2412.06464)::

    S' = exp(g) S        u = beta (v - S'^T k)        S = S' + k u^T        o = scale S^T q

Worked example, K = V = 1, scale 1, g = 0, beta = 1/2, k = q = 1, v = 1, 1: the state goes from 0 to
1/2 and 3/4, which are also the outputs; a document that starts at the second token gives 1/2 again.

The fast path takes chunks of 64 tokens. With G the running sums of g in a chunk, D_ij = exp(G_i -
G_j) for j <= i, S the state before the chunk, and L_ij = beta_i D_ij k_i.k_j for j < i::

    T = (1 + L)^-1      R = diag(beta) (V - diag(e^G) K S)      U = T R
    O = scale (diag(e^G) Q S + (D * Q K^T) U)       S <- e^G_last S + (diag(e^(G_last - G)) K)^T U

In the backward, dR = T^T dU is the gradient of R, and -dR U^T that of L. Five kernels run in turn.
They compute U and the states again from T; the part of dU that comes from a chunk's own outputs; dR
and the states' gradients, chunk after chunk from a document's end; from these the gradients of q, k
and v, and shares of the gates' gradients; and the gates' gradients from these shares. States are
rounded to the inputs' dtype where a product reads them, and are carried in fp32.

Left out on purpose: the norms of q and k, the gates' own formulas, and the convolution before them,
which the compiler fuses.

Legend: T tokens, H heads of values, Q heads of queries and keys (each serves H / Q of the former),
K width of a key, V width of a value, N documents, C chunks of them, P parts of K.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from moetrain.kernels.linear_attention.delta_kernels import (
    gate_gradients_kernel,
    input_gradients_kernel,
    local_kernel,
    outputs_kernel,
    prepare_kernel,
    state_gradients_kernel,
    states_kernel,
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

CHUNK = 64
"""Tokens of a chunk. Larger chunks need more products within them, smaller ones more states."""
WIDTHS = (64, 128)
"""Widths of keys and of values that the kernels take: their tiles divide them."""


class Documents(NamedTuple):
    """Packed documents, cut into chunks; each document begins a new chunk."""

    bounds_N: torch.Tensor
    """int32 [N + 1]: 0, each document's end, ..., T. Documents may be empty."""
    starts_C: torch.Tensor
    """int32: the first token of each chunk. C is at least the number of chunks."""
    sizes_C: torch.Tensor
    """int32: the tokens of each chunk, at most ``CHUNK``; 0 past the last chunk."""
    firsts_N: torch.Tensor
    """int32 [N + 1]: the index of each document's first chunk, then the number of chunks."""

    @classmethod
    def of(cls, bounds_N: torch.Tensor, tokens: int) -> "Documents":
        """Cut ``tokens`` tokens at ``bounds_N``, without waiting for the device."""
        ends_N = ((bounds_N.diff() + CHUNK - 1) // CHUNK).cumsum(0)
        most_chunks = -(-tokens // CHUNK) + ends_N.shape[0]
        at_C = torch.arange(most_chunks, device=bounds_N.device)
        # Empty documents end where the one before does, and get no chunk.
        doc_C = torch.searchsorted(ends_N, at_C, right=True).clamp(max=ends_N.shape[0] - 1)
        firsts_N = F.pad(ends_N, (1, 0))
        starts_C = bounds_N[doc_C] + (at_C - firsts_N[doc_C]) * CHUNK
        sizes_C = (bounds_N[doc_C + 1] - starts_C).clamp(0, CHUNK)
        return cls(bounds_N, starts_C.int(), sizes_C.int(), firsts_N.int())


class _RuleInputs(NamedTuple):
    """The inputs of :func:`gated_delta`."""

    q_TQK: torch.Tensor
    k_TQK: torch.Tensor
    v_THV: torch.Tensor
    g_TH: torch.Tensor
    beta_TH: torch.Tensor


def documents_of(
    positions_BS: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    shape: tuple[int, int],
    device: torch.device,
) -> tuple[Documents, torch.Tensor]:
    """Return the documents of B rows laid end to end, and each token's place in its document.

    A row's first token begins a document, whatever its position. Places are [B * S].

    Args:
        positions_BS: each token's position in its document; None: each row is one document.
        cu_seqlens: int32, 0 and the documents' ends; None: they are found from the positions.
        shape: B and S.
    """
    batch, seq_len = shape
    if positions_BS is None:
        bounds_N = torch.arange(0, (batch + 1) * seq_len, max(1, seq_len), device=device)
    elif cu_seqlens is not None:
        bounds_N = cu_seqlens
    else:  # the number of documents depends on the values, so the host waits for the device
        is_first_BS = positions_BS == 0
        is_first_BS[:, 0] = True
        starts_N = is_first_BS.flatten().nonzero()[:, 0]
        bounds_N = torch.cat((starts_N, starts_N.new_tensor([batch * seq_len])))
    index_T = torch.arange(batch * seq_len, device=device)
    place_T = index_T - bounds_N[torch.bucketize(index_T, bounds_N[1:], right=True)]
    return Documents.of(bounds_N.int(), batch * seq_len), place_T


class Carried(NamedTuple):
    """States that documents begin with, and that they leave for later calls.

    Documents need not be adjacent, so ``Documents.bounds_N`` is not read where this is given. No
    document is empty.
    """

    states_PHKV: torch.Tensor
    """fp32 (or wider, as the inputs), [slots, H, K, V], contiguous; written in place: a document
    leaves the state after its last full chunk."""
    slots_N: torch.Tensor
    """int32: each document's slot."""
    is_new_N: torch.Tensor
    """int32: 1 where a document begins with zeros, whatever its slot holds."""
    begins_N: torch.Tensor
    """int32: each document's first token."""
    ends_N: torch.Tensor
    """int32: each document's end."""


def gated_delta(
    q_TQK: torch.Tensor,
    k_TQK: torch.Tensor,
    v_THV: torch.Tensor,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    documents: Documents,
    scale: float,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Return ``o_THV`` in ``v``'s dtype; every input but ``documents`` gets a gradient.

    Args:
        q_TQK, k_TQK, v_THV: one dtype, contiguous; H is a multiple of Q. Keys are expected to have
            norms of about one: the rule diverges where ``beta |k|^2`` passes two.
        g_TH: fp32, at most 0: the log of the factor by which the state decays.
        beta_TH: any floating dtype: how far the state moves towards the value, 0 to 1.
        documents: of all T tokens.
        scale: the factor of the outputs.
    """
    inputs = _RuleInputs(q_TQK, k_TQK, v_THV, g_TH, beta_TH)
    _check(inputs)
    if not use_fast(backend, v_THV):
        return chunked(*inputs, documents, scale)
    return gated_delta_op(*_fast_inputs(inputs), *documents, scale)[0]


def continued(
    q_TQK: torch.Tensor,
    k_TQK: torch.Tensor,
    v_THV: torch.Tensor,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    documents: Documents,
    carried: Carried,
    scale: float,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Return :func:`gated_delta` of documents that go on from ``carried``, without gradients.

    Outputs of tokens outside the chunks are unspecified.
    """
    inputs = _RuleInputs(q_TQK, k_TQK, v_THV, g_TH, beta_TH)
    _check(inputs)
    if not use_fast(backend, v_THV):
        return chunked(*inputs, documents, scale, carried)
    return _launch_forward(_fast_inputs(inputs), documents, scale, carried).out_THV


def _check(inputs: _RuleInputs) -> None:
    """Raise ValueError unless shapes fit."""
    q_TQK, k_TQK, v_THV, g_TH, beta_TH = inputs
    (T, Q, _), (_, H, _) = k_TQK.shape, v_THV.shape
    fits = q_TQK.shape == k_TQK.shape and v_THV.shape[0] == T and H % max(1, Q) == 0
    if not fits or g_TH.shape != (T, H) or beta_TH.shape != (T, H):
        takes = "[T, Q, K] twice, [T, H, V], [T, H] twice; Q divides H"
        raise refusal("gated_delta", takes, q=q_TQK, k=k_TQK, v=v_THV, g=g_TH, beta=beta_TH)


def _fast_inputs(inputs: _RuleInputs) -> _RuleInputs:
    """Return the inputs with gates in fp32; raise ValueError unless the kernels take them."""
    q_TQK, k_TQK, v_THV, g_TH, beta_TH = inputs
    K, V = k_TQK.shape[2], v_THV.shape[2]
    if K not in WIDTHS or V not in WIDTHS or not q_TQK.dtype == k_TQK.dtype == v_THV.dtype:
        takes = f"one dtype, and widths of {', '.join(map(str, WIDTHS))}"
        raise refusal("gated_delta", takes, q=q_TQK, k=k_TQK, v=v_THV)
    require_contiguous("gated_delta", q=q_TQK, k=k_TQK, v=v_THV, g=g_TH, beta=beta_TH)
    return inputs._replace(g_TH=g_TH.float(), beta_TH=beta_TH.float())


def chunked(
    q_TQK: torch.Tensor,
    k_TQK: torch.Tensor,
    v_THV: torch.Tensor,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor | None,
    documents: Documents,
    scale: float,
    carried: Carried | None = None,
) -> torch.Tensor:
    """Compute the chunks' formulas in plain torch, in fp32 or wider.

    Without ``beta`` this is the rule of :mod:`moetrain.kernels.linear_attention.ssd`: U = V. With
    ``g`` of [T, H, K] it is the rule of :mod:`moetrain.kernels.linear_attention.kda`.
    """
    T = len(v_THV)
    heads = v_THV.shape[1] // k_TQK.shape[1]
    if T == 0:  # an empty result, which still has gradients
        inputs = (x for x in (q_TQK, k_TQK, g_TH, beta_TH) if x is not None)
        return v_THV * sum(x.sum() for x in inputs)
    wide = torch.promote_types(v_THV.dtype, torch.float32)
    i = torch.arange(CHUNK, device=v_THV.device)
    token_CI = (documents.starts_C[:, None] + i).clamp(max=T - 1)
    valid_CI = i < documents.sizes_C[:, None]

    def chunks(x: torch.Tensor) -> torch.Tensor:
        """Lay tokens out as [C, heads, 64, ...], zeros past a chunk's end."""
        x = x.to(wide)[token_CI]
        mask = valid_CI.view(*valid_CI.shape, *[1] * (x.dim() - 2))
        return x.masked_fill(~mask, 0).transpose(1, 2)

    # The products of keys, and of queries and keys, with the decay between their tokens.
    q, k = (chunks(x).repeat_interleave(heads, 1) for x in (q_TQK, k_TQK))
    u, sums = chunks(v_THV), chunks(g_TH).cumsum(2)
    below = i[:, None] >= i
    if g_TH.dim() == 2:
        decay = (sums[..., :, None] - sums[..., None, :]).masked_fill(~below, -torch.inf).exp()
        kk, qk = decay * (k @ k.mT), decay * (q @ k.mT)
        sums = sums[..., None]
    else:
        kk, qk = _decayed_products(q, k, sums)
    grown = sums.exp()
    # Solve (1 + L) [W, U] = diag(beta) [diag(e^G) K, V], so that U - W S is the formulas' U.
    w = None
    if beta_TH is not None:
        beta = chunks(beta_TH)[..., None]
        lower = (beta * kk).masked_fill(i[:, None] <= i, 0)
        right = torch.cat((k * beta * grown, u * beta), -1)
        lower = lower + torch.eye(CHUNK, dtype=wide, device=u.device)
        solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
        w, u = solved.split((k.shape[-1], u.shape[-1]), -1)
    final = sums[..., -1:, :]  # past a chunk's end g is 0
    # Walk over the chunks; a document's first begins with zeros, or with the state carried to it.
    at_C = torch.arange(len(u), device=u.device)
    is_first_C = torch.isin(at_C, documents.firsts_N)
    is_full_C = documents.sizes_C == CHUNK
    state = u.new_zeros(u.shape[1], k.shape[-1], u.shape[-1])
    states: list[torch.Tensor] = []
    """The state before each chunk."""
    news: list[torch.Tensor] = []
    """U of each chunk."""
    ended: list[torch.Tensor] = []
    """For each chunk, the state after the full chunks of its document so far."""
    start_C = [torch.zeros_like(state)] * len(u)
    if carried is not None:
        first_N = carried.states_PHKV[carried.slots_N.long()].to(wide)
        first_N = first_N.masked_fill(carried.is_new_N.bool()[:, None, None, None], 0)
        doc_C = torch.searchsorted(documents.firsts_N, at_C, right=True) - 1
        start_C = first_N[doc_C.clamp(max=len(first_N) - 1)]
    for c in range(len(u)):
        state = torch.where(is_first_C[c], start_C[c], state)
        states.append(state)
        news.append(u[c] if w is None else u[c] - w[c] @ state)
        kept = k[c] * (final[c] - sums[c]).exp()
        after = state * final[c].exp().mT + kept.mT @ news[c]
        state = torch.where(is_full_C[c], after, state)
        ended.append(state)
    # Leave the states of full chunks for later calls.
    if carried is not None:
        last_N = torch.stack(ended)[documents.firsts_N[1:].long() - 1]
        carried.states_PHKV[carried.slots_N.long()] = last_N.to(carried.states_PHKV.dtype)
    # The outputs, and back from chunks to tokens.
    out = (q * grown) @ torch.stack(states) + qk @ torch.stack(news)
    rows = (scale * out).transpose(1, 2).flatten(0, 1)  # zeros past a chunk's end, as q has
    o_THV = rows.new_zeros(T, *rows.shape[1:])
    token = token_CI.flatten()
    valid = valid_CI.flatten()
    if carried is not None:  # chunks may share tokens, which have one result
        return o_THV.index_copy(0, token[valid], rows[valid]).to(v_THV.dtype)
    return o_THV.index_add(0, token, rows).to(v_THV.dtype)


def _decayed_products(
    q: torch.Tensor, k: torch.Tensor, sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sum_d k_id k_jd e^(G_id - G_jd) for j < i, and that of ``q`` and ``k`` for j <= i.

    Other elements are 0. :mod:`moetrain.kernels.linear_attention.kda` explains the levels.

    Args:
        q, k, sums: [..., 64, K].
    """
    i = torch.arange(CHUNK, device=q.device)
    kk = q.new_zeros(*q.shape[:-1], CHUNK)
    qk = (q * k).sum(-1).diag_embed()
    width = 2
    while width <= CHUNK:
        is_late = i % width >= width // 2
        anchors = sums[..., i // width * width + width // 2, :]
        factor = torch.where(is_late[:, None], sums - anchors, anchors - sums).exp()
        is_pair = (i[:, None] // width == i // width) & is_late[:, None] & ~is_late
        kept = (k * factor).mT
        kk = kk + ((k * factor) @ kept).masked_fill(~is_pair, 0)
        qk = qk + ((q * factor) @ kept).masked_fill(~is_pair, 0)
        width *= 2
    return kk, qk


class Launch(NamedTuple):
    """Launch settings of a kernel; docs/log/attention.md lists others that were tried."""

    warps: int
    stages: int
    columns: int = 0
    """Columns of V, or in the inputs' gradients of K, that a program takes."""

    def stages_that_fit(self, dtype: torch.dtype) -> int:
        """Return the stages of a kernel that walks over chunks.

        Three stages of fp32 tiles do not fit into a multiprocessor's shared memory.
        """
        return min(self.stages, 8 // dtype.itemsize)


# The fastest on one H100, bf16, K = V = 128. With one stage Triton 3.6 miscompiles the kernels that
# walk over chunks (states are wrong by their own size); with two and more it does not.
_PREPARE = Launch(4, 2)
_STATES = Launch(4, 3, 32)
_OUTPUTS = Launch(4, 1, 128)
_LOCAL = Launch(4, 1)
_STATE_GRADS = Launch(4, 3, 32)
_INPUTS = Launch(8, 2, 128)


def sizes_of(k_TQK: torch.Tensor, v_THV: torch.Tensor) -> dict[str, Any]:
    """Return the arguments that every kernel is compiled for."""
    (_, Q, K), (_, H, V) = k_TQK.shape, v_THV.shape
    # With fp32 inputs the products' error must be below the inputs' own.
    precision = "tf32x3" if k_TQK.dtype == torch.float32 else "tf32"
    return {"H": H, "Q": Q, "K": K, "V": V, "C": CHUNK, "PRECISION": precision}


class _Forward(NamedTuple):
    """The results of the forward's kernels."""

    out_THV: torch.Tensor
    inverse_CHII: torch.Tensor
    """T of every chunk."""
    sums_TH: torch.Tensor
    """The running sums of ``g`` in their chunks."""


@torch.library.custom_op("moetrain::gated_delta", mutates_args=())
def gated_delta_op(
    q_TQK: torch.Tensor,
    k_TQK: torch.Tensor,
    v_THV: torch.Tensor,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    bounds_N: torch.Tensor,
    starts_C: torch.Tensor,
    sizes_C: torch.Tensor,
    firsts_N: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return :class:`_Forward`."""
    documents = Documents(bounds_N, starts_C, sizes_C, firsts_N)
    inputs = _RuleInputs(q_TQK, k_TQK, v_THV, g_TH, beta_TH)
    return _launch_forward(inputs, documents, scale)


def _launch_forward(
    inputs: _RuleInputs, documents: Documents, scale: float, carried: Carried | None = None
) -> _Forward:
    q_TQK, k_TQK, v_THV, g_TH, beta_TH = inputs
    starts_C, sizes_C = documents.starts_C, documents.sizes_C
    sizes = sizes_of(k_TQK, v_THV)
    H, C, V = v_THV.shape[1], starts_C.shape[0], v_THV.shape[2]
    inverse_CHII = k_TQK.new_empty(C, H, CHUNK, CHUNK)
    sums_TH = torch.empty_like(g_TH)
    out_THV = torch.empty_like(v_THV)
    if out_THV.numel() == 0:
        return _Forward(out_THV, inverse_CHII, sums_TH)
    prepare_kernel[(C, H)](
        k_TQK,
        g_TH,
        beta_TH,
        starts_C,
        sizes_C,
        inverse_CHII,
        sums_TH,
        **sizes,
        num_warps=_PREPARE.warps,
        num_stages=_PREPARE.stages,
    )
    new_THV, states_CHKV = _states(k_TQK, v_THV, beta_TH, documents, inverse_CHII, sums_TH, carried)
    columns = min(_OUTPUTS.columns, V)
    outputs_kernel[(V // columns, H, C)](
        q_TQK,
        k_TQK,
        new_THV,
        sums_TH,
        states_CHKV,
        starts_C,
        sizes_C,
        out_THV,
        scale,
        **sizes,
        BV=columns,
        num_warps=_OUTPUTS.warps,
        num_stages=_OUTPUTS.stages,
    )
    return _Forward(out_THV, inverse_CHII, sums_TH)


@gated_delta_op.register_fake
def _(
    q_TQK: torch.Tensor,
    k_TQK: torch.Tensor,
    v_THV: torch.Tensor,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    bounds_N: torch.Tensor,
    starts_C: torch.Tensor,
    sizes_C: torch.Tensor,
    firsts_N: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inverse_CHII = k_TQK.new_empty(starts_C.shape[0], v_THV.shape[1], CHUNK, CHUNK)
    return torch.empty_like(v_THV), inverse_CHII, torch.empty_like(g_TH)


worth_saving("attention", torch.ops.moetrain.gated_delta.default)


def _states(
    k_TQK: torch.Tensor,
    v_THV: torch.Tensor,
    beta_TH: torch.Tensor,
    documents: Documents,
    inverse_CHII: torch.Tensor,
    sums_TH: torch.Tensor,
    carried: Carried | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return U [T, H, V] and each chunk's first state [C, H, K, V], in the inputs' dtype."""
    bounds_N, starts_C, _, firsts_N = documents
    H, K, V = v_THV.shape[1], k_TQK.shape[2], v_THV.shape[2]
    new_THV = torch.empty_like(v_THV)
    states_CHKV = k_TQK.new_empty(starts_C.shape[0], H, K, V)
    columns = min(_STATES.columns, V)
    states_kernel[(V // columns, H, firsts_N.shape[0] - 1)](
        k_TQK,
        v_THV,
        beta_TH,
        sums_TH,
        inverse_CHII,
        bounds_N if carried is None else carried.begins_N,
        bounds_N[1:] if carried is None else carried.ends_N,
        firsts_N,
        new_THV,
        states_CHKV,
        None if carried is None else carried.states_PHKV,
        None if carried is None else carried.slots_N,
        None if carried is None else carried.is_new_N,
        None,  # writes
        **sizes_of(k_TQK, v_THV),
        BV=columns,
        CARRIED=carried is not None,
        DELTA=True,
        CHANNELS=False,
        num_warps=_STATES.warps,
        num_stages=_STATES.stages,
    )
    return new_THV, states_CHKV


@torch.library.custom_op("moetrain::gated_delta_gradients", mutates_args=())
def gated_delta_gradients_op(
    do_THV: torch.Tensor,
    q_TQK: torch.Tensor,
    k_TQK: torch.Tensor,
    v_THV: torch.Tensor,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    bounds_N: torch.Tensor,
    starts_C: torch.Tensor,
    sizes_C: torch.Tensor,
    firsts_N: torch.Tensor,
    inverse_CHII: torch.Tensor,
    sums_TH: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k, v, g and beta."""
    documents = Documents(bounds_N, starts_C, sizes_C, firsts_N)
    sizes = sizes_of(k_TQK, v_THV)
    (T, H, V), (_, Q, K), C = v_THV.shape, k_TQK.shape, starts_C.shape[0]
    do_THV, dv_THV = do_THV.contiguous(), torch.empty_like(v_THV)
    dg_TH = torch.empty_like(g_TH)
    dbeta_TH = torch.empty_like(beta_TH)
    if T * H == 0:
        return torch.zeros_like(q_TQK), torch.zeros_like(k_TQK), dv_THV, dg_TH, dbeta_TH
    # 1. U and the states again.
    new_THV, states_CHKV = _states(k_TQK, v_THV, beta_TH, documents, inverse_CHII, sums_TH)
    # 2. The part of dU from the chunk's own outputs, which the next kernel overwrites by dR.
    du_THV = torch.empty_like(v_THV)
    d_states_CHKV = torch.empty_like(states_CHKV)
    local_kernel[(H, C)](
        q_TQK,
        k_TQK,
        do_THV,
        sums_TH,
        starts_C,
        sizes_C,
        du_THV,
        scale,
        **sizes,
        num_warps=_LOCAL.warps,
        num_stages=_LOCAL.stages,
    )
    # 3. dR and the states' gradients, from each document's end.
    columns = min(_STATE_GRADS.columns, V)
    state_gradients_kernel[(V // columns, H, len(bounds_N) - 1)](
        q_TQK,
        k_TQK,
        do_THV,
        beta_TH,
        sums_TH,
        inverse_CHII,
        bounds_N,
        firsts_N,
        du_THV,
        d_states_CHKV,
        None,  # writes
        scale,
        **sizes,
        DELTA=True,
        CHANNELS=False,
        BV=columns,
        num_warps=_STATE_GRADS.warps,
        num_stages=_STATE_GRADS.stages_that_fit(k_TQK.dtype),
    )
    # 4. The inputs' gradients. Each part of K has a share of the gates' gradients.
    dq_THK, dk_THK = k_TQK.new_empty(T, H, K), k_TQK.new_empty(T, H, K)
    columns = min(_INPUTS.columns, K)
    parts = K // columns
    d_sums_PTH, d_beta_PTH = g_TH.new_empty(parts, T, H), g_TH.new_empty(parts, T, H)
    input_gradients_kernel[(parts, H, C)](
        q_TQK,
        k_TQK,
        v_THV,
        do_THV,
        new_THV,
        du_THV,
        beta_TH,
        sums_TH,
        states_CHKV,
        d_states_CHKV,
        starts_C,
        sizes_C,
        dq_THK,
        dk_THK,
        dv_THV,
        d_sums_PTH,
        d_beta_PTH,
        scale,
        T,
        **sizes,
        DELTA=True,
        BK=columns,
        BV=min(64, V),
        num_warps=_INPUTS.warps,
        num_stages=_INPUTS.stages,
    )
    gate_gradients_kernel[(H, C)](
        d_sums_PTH,
        d_beta_PTH,
        starts_C,
        sizes_C,
        dg_TH,
        dbeta_TH,
        T,
        H=H,
        C=CHUNK,
        P=parts,
        DELTA=True,
        num_warps=1,
    )
    # Sum over the heads of values that share queries and keys.
    if H != Q:
        dq_THK, dk_THK = (
            x.unflatten(1, (Q, H // Q)).sum(2, dtype=torch.float32).to(k_TQK.dtype)
            for x in (dq_THK, dk_THK)
        )
    return dq_THK, dk_THK, dv_THV, dg_TH, dbeta_TH


@gated_delta_gradients_op.register_fake
def _(
    do_THV: torch.Tensor,
    q_TQK: torch.Tensor,
    k_TQK: torch.Tensor,
    v_THV: torch.Tensor,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    bounds_N: torch.Tensor,
    starts_C: torch.Tensor,
    sizes_C: torch.Tensor,
    firsts_N: torch.Tensor,
    inverse_CHII: torch.Tensor,
    sums_TH: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.empty_like(q_TQK),
        torch.empty_like(k_TQK),
        torch.empty_like(v_THV),
        torch.empty_like(g_TH),
        torch.empty_like(beta_TH),
    )


def _save(ctx: OpContext, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, ctx.scale = inputs
    _, inverse_CHII, sums_TH = output
    ctx.save_for_backward(*tensors, inverse_CHII, sums_TH)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: OpContext, do_THV: torch.Tensor | None, *_: object) -> tuple[object, ...]:
    if do_THV is None:
        return gradients(gated_delta_op)
    # All inputs but the scale, then the forward's results: the gradients' op has that order too.
    dq_TQK, dk_TQK, dv_THV, dg_TH, dbeta_TH = gated_delta_gradients_op(
        do_THV, *ctx.saved_tensors, ctx.scale
    )
    return gradients(
        gated_delta_op, q_TQK=dq_TQK, k_TQK=dk_TQK, v_THV=dv_THV, g_TH=dg_TH, beta_TH=dbeta_TH
    )


gated_delta_op.register_autograd(_differentiate, setup_context=_save)
