"""The Triton kernels of ``router.py``, in their own file for length; its docstring has the maths.

They know nothing of torch: ``router.py`` checks, allocates and launches.
"""

# Triton's language is not Python to a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from moetrain.kernels.backend import tl, triton

_TAKEN = tl.constexpr(-(2**63))  # below the key of every score


@triton.jit
def _keys(score, col, C: tl.constexpr):
    """int64 keys whose order is (score, lower column first): a plain maximum breaks ties."""
    # + 0.0 turns -0.0 into 0.0; the xor orders negative floats as signed integers.
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (C - 1 - col).to(tl.int64)


@triton.jit
def _column(key, C: tl.constexpr):
    """The column that :func:`_keys` put into ``key``."""
    return (C - 1 - (key & 0xFFFFFFFF)).to(tl.int32)


@triton.jit
def _drop_groups(
    choice, is_expert, topk_groups, B: tl.constexpr, GP: tl.constexpr, MP: tl.constexpr
):
    """``choice`` [B, GP * MP] with -inf outside each row's best ``topk_groups`` groups."""
    member = tl.arange(0, MP)
    group = tl.arange(0, GP)
    keys = tl.where(is_expert, _keys(choice, tl.arange(0, GP * MP)[None, :] % MP, MP), _TAKEN)
    keys = tl.reshape(keys, (B, GP, MP))
    best = tl.max(keys, axis=2)
    rest = tl.where(keys == best[:, :, None], _TAKEN, keys)
    second = tl.max(rest, axis=2)
    values = tl.reshape(choice, (B, GP, MP))
    is_best = member[None, None, :] == _column(best, MP)[:, :, None]
    is_second = member[None, None, :] == _column(second, MP)[:, :, None]
    # A group of one expert has no second, a padding group nothing at all.
    score = tl.sum(tl.where(is_best, values, 0.0), axis=2)
    score += tl.where(
        second == _TAKEN, 0.0, tl.sum(tl.where(is_second & ~is_best, values, 0.0), axis=2)
    )
    group_keys = tl.where(best == _TAKEN, _TAKEN, _keys(score, group[None, :], GP))
    kept = tl.zeros((B, GP), tl.int32)
    for _ in range(topk_groups):
        hit = group_keys == tl.max(group_keys, axis=1)[:, None]
        kept = tl.where(hit, 1, kept)
        group_keys = tl.where(hit, _TAKEN, group_keys)
    values = tl.where(kept[:, :, None] != 0, values, float("-inf"))
    return tl.reshape(values, (B, GP * MP))


@triton.jit
def route_kernel(
    logits_ptr, bias_ptr, is_pad_ptr, ids_ptr, weights_ptr, counts_ptr, sums_ptr,
    T, row_stride, topk_groups, scale,
    K: tl.constexpr, E: tl.constexpr, G: tl.constexpr, M: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, DROP_GROUPS: tl.constexpr,
    B: tl.constexpr, GP: tl.constexpr, MP: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Tiles of B tokens, every num_programs-th one; sums [P, E + 2]: p, then z and entropy."""
    C: tl.constexpr = GP * MP
    program = tl.program_id(0)
    col = tl.arange(0, C)
    slot = tl.arange(0, S)
    expert = col // MP * M + col % MP
    is_expert = ((col // MP < G) & (col % MP < M))[None, :]
    counts = tl.zeros((B, C), tl.int32)
    prob_sums = tl.zeros((B, C), tl.float32)
    z_sums = tl.zeros((B,), tl.float32)
    entropy_sums = tl.zeros((B,), tl.float32)
    for start in range(program * B, T, tl.num_programs(0) * B):
        row = start + tl.arange(0, B)
        in_range = row < T
        # Rows past the end repeat the last one and are left out of every store and sum.
        row = tl.minimum(row, T - 1).to(tl.int64)
        row_ptr = logits_ptr + row * row_stride
        logits = tl.load(row_ptr[:, None] + expert[None, :], mask=is_expert, other=float("-inf"))
        largest = tl.max(logits, axis=1)
        exps = tl.exp(logits - largest[:, None])
        total = tl.sum(exps, axis=1)
        probs = exps / total[:, None]
        lse = largest + tl.log(total)

        choice = tl.sigmoid(logits) if SIGMOID else probs
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + expert, mask=(col // MP < G) & (col % MP < M), other=0.0)
            choice += bias[None, :]
        if DROP_GROUPS:
            choice = _drop_groups(choice, is_expert, topk_groups, B, GP, MP)
        keys = tl.where(is_expert, _keys(choice, col[None, :], C), _TAKEN)
        ids = tl.zeros((B, S), tl.int32)
        for j in range(K):
            best = tl.max(keys, axis=1)
            keys = tl.where(keys == best[:, None], _TAKEN, keys)
            chosen = _column(best, C)
            ids = tl.where(slot[None, :] == j, (chosen // MP * M + chosen % MP)[:, None], ids)

        in_slots = (slot < K)[None, :]
        picked = tl.load(row_ptr[:, None] + ids, mask=in_slots, other=float("-inf"))
        weights = tl.exp(picked - largest[:, None]) / total[:, None]
        if SIGMOID:
            weights = tl.sigmoid(picked)
        if NORMALIZE:
            weights = weights / tl.sum(weights, axis=1)[:, None]
        is_counted = in_range
        if is_pad_ptr is not None:
            is_pad = tl.load(is_pad_ptr + row) != 0
            ids = tl.where(is_pad[:, None], -1, ids)
            weights = tl.where(is_pad[:, None], 0.0, weights)
            is_counted = in_range & (is_pad == 0)
        slot_index = row[:, None] * K + slot[None, :]
        tl.store(ids_ptr + slot_index, ids, mask=in_range[:, None] & in_slots)
        tl.store(weights_ptr + slot_index, weights * scale, mask=in_range[:, None] & in_slots)

        counted = is_counted[:, None] & is_expert
        counts += (counted & (keys == _TAKEN)).to(tl.int32)
        prob_sums += tl.where(counted, probs, 0.0)
        z_sums += tl.where(is_counted, lse * lse, 0.0)
        # sum of -p log p = lse - sum of p * logit
        mean = tl.sum(tl.where(is_expert, probs * logits, 0.0), axis=1)
        entropy_sums += tl.where(is_counted, lse - mean, 0.0)

    columns = (col // MP < G) & (col % MP < M)
    tl.store(counts_ptr + program * E + expert, tl.sum(counts, axis=0), mask=columns)
    sums_ptr += program * (E + 2)
    tl.store(sums_ptr + expert, tl.sum(prob_sums, axis=0), mask=columns)
    tl.store(sums_ptr + E, tl.sum(z_sums, axis=0))
    tl.store(sums_ptr + E + 1, tl.sum(entropy_sums, axis=0))


@triton.jit
def sum_programs_kernel(
    counts_in_ptr, sums_in_ptr, counts_ptr, prob_sum_ptr, z_sum_ptr, entropy_sum_ptr,
    P, E: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add the programs' partial sums, always in the same order."""
    col = tl.program_id(0) * C + tl.arange(0, C)
    counts = tl.zeros((B, C), tl.int32)
    sums = tl.zeros((B, C), tl.float32)
    for start in range(0, P, B):
        row = start + tl.arange(0, B)[:, None]
        counts += tl.load(
            counts_in_ptr + row * E + col[None, :], mask=(row < P) & (col < E)[None, :], other=0
        )
        sums += tl.load(
            sums_in_ptr + row * (E + 2) + col[None, :],
            mask=(row < P) & (col < E + 2)[None, :],
            other=0.0,
        )
    total = tl.sum(sums, axis=0)
    tl.store(counts_ptr + col, tl.sum(counts, axis=0), mask=col < E)
    tl.store(prob_sum_ptr + col, total, mask=col < E)
    tl.store(z_sum_ptr + col * 0, total, mask=col == E)
    tl.store(entropy_sum_ptr + col * 0, total, mask=col == E + 1)


@triton.jit
def route_backward_kernel(
    logits_ptr, ids_ptr, grad_weights_ptr, grad_prob_sum_ptr, grad_z_sum_ptr, grad_logits_ptr,
    T, row_stride, scale,
    K: tl.constexpr, E: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    B: tl.constexpr, C: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """With ds the gradient of the scores and dp that of the probabilities (prob_sum's):

    softmax: ds joins dp;  dlogits = p * (dp - sum(p * dp)) + 2 * dz * lse * p
    sigmoid: dlogits gains s * (1 - s) * ds
    """
    row = tl.program_id(0) * B + tl.arange(0, B)
    in_range = row < T
    row = tl.minimum(row, T - 1).to(tl.int64)
    col = tl.arange(0, C)
    slot = tl.arange(0, S)
    in_slots = (slot < K)[None, :]
    row_ptr = logits_ptr + row * row_stride
    logits = tl.load(row_ptr[:, None] + col[None, :], mask=(col < E)[None, :], other=float("-inf"))
    largest = tl.max(logits, axis=1)
    exps = tl.exp(logits - largest[:, None])
    total = tl.sum(exps, axis=1)
    probs = exps / total[:, None]
    lse = largest + tl.log(total)

    slot_index = row[:, None] * K + slot[None, :]
    ids = tl.load(ids_ptr + slot_index, mask=in_slots, other=-1)
    is_pad = tl.max(ids, axis=1) < 0
    grad = tl.load(grad_weights_ptr + slot_index, mask=in_slots, other=0.0) * scale
    picked = tl.load(row_ptr[:, None] + ids, mask=ids >= 0, other=float("-inf"))
    scores = tl.exp(picked - largest[:, None]) / total[:, None]
    if SIGMOID:
        scores = tl.sigmoid(picked)
    if NORMALIZE:
        sum_chosen = tl.sum(scores, axis=1)[:, None]
        grad = (grad - tl.sum(grad * scores, axis=1)[:, None] / sum_chosen) / sum_chosen
    if SIGMOID:
        grad = grad * scores * (1.0 - scores)

    # Slots to columns, one slot at a time: a token's ids differ, so nothing is added twice.
    spread = tl.zeros((B, C), tl.float32)
    for j in range(K):
        is_slot = slot[None, :] == j
        id_j = tl.sum(tl.where(is_slot, ids, 0), axis=1)
        grad_j = tl.sum(tl.where(is_slot, grad, 0.0), axis=1)
        spread = tl.where(col[None, :] == id_j[:, None], grad_j[:, None], spread)

    grad_probs = tl.load(grad_prob_sum_ptr + col, mask=col < E, other=0.0)[None, :]
    if not SIGMOID:
        grad_probs += spread
    mean = tl.sum(probs * grad_probs, axis=1)
    grad_lse = 2.0 * tl.load(grad_z_sum_ptr) * lse
    grad_logits = probs * (grad_probs + (grad_lse - mean)[:, None])
    if SIGMOID:
        grad_logits += spread
    grad_logits = tl.where(is_pad[:, None], 0.0, grad_logits)
    tl.store(
        grad_logits_ptr + row[:, None] * E + col[None, :],
        grad_logits,
        mask=in_range[:, None] & (col < E)[None, :],
    )
