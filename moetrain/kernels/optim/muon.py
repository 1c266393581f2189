"""Muon: each matrix is updated by its orthogonalised momentum: all directions move about equally.

For a parameter p with R rows and C columns, gradient g and momentum m (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon):

    m <- mu m + (1 - mu) g clip          u = mu m + (1 - mu) g clip       (Nesterov's)
    X = u / (|u| + eps)                  |u|: the Frobenius norm; X with R <= C, else transposed
    A = X X^T                            X <- a X + (b A + c A A) X       some five times
    p <- p - decay p - lr scale sqrt(max(R, C)) X

An iteration maps every singular value s in (0, 1] to a s + b s^3 + c s^5. Five iterations bring all
from 0.002 on to between about 0.7 and 1.2. (a, b, c) were chosen to raise small singular values
fast, by a factor of 3.4 in each iteration, and not to converge to 1. The factor of the last line
and the decay are those of Moonlight (arXiv 2502.16982): with a scale of 0.2 an update's root mean
square is that of AdamW's, so AdamW's learning rates carry over.

Worked example: u = [[3, 0], [0, 4]] has |u| = 5, so X = diag(0.6, 0.8) and, after one iteration,
diag(0.6 a + 0.6^3 b + 0.6^5 c, ...) = diag(1.193, 0.977).

:func:`muon_momentum` and :func:`muon_update` are one pass over a flat shard each. They read the
rates of :func:`~moetrain.kernels.optim.adamw.adamw`, and round a momentum in bf16 by the same
random bits. The products between these passes are batched over many matrices. On a GPU they are in
bf16, with sums in fp32. A and b A + c A A are symmetric, so only half of each is computed if it is
large (:mod:`moetrain.kernels.optim.symmetric`); the last product is a library's. On a CPU products
are in fp32, one matrix after the other, since there the bits of a batched product depend on the
batch. So the bits of a result depend on nothing but its matrix.

Left out on purpose: other coefficients.

Legend: N elements of a shard, B blocks of ``BLOCK`` of them, or matrices in a batch, R rows, C
columns, S rates.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from moetrain.kernels.optim.adamw import Rates
from moetrain.kernels.optim.rounding import (
    BLOCK,
    OUT_DTYPES,
    STATE_DTYPES,
    WARPS,
    random_bits,
    random_bits_reference,
    round_by,
    round_by_reference,
)
from moetrain.kernels.optim.symmetric import symmetric_product
from moetrain.runtime.backend import Backend, refusal, tl, triton, use_fast

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c: the factors of X, A X and A A X."""
_SYMMETRIC_FROM = 256
"""Length of the shorter side from which a GPU computes only half of a symmetric product;
math.inf: never."""
_BATCH_ELEMENTS = 2**26
"""Elements of the matrices that are orthogonalised together: 42 of 768 x 2048 fill a GPU."""
_COPIES = 5
"""Tensors of that size that exist at once: the batch, X before and after, A, and A A."""


# ---- orthogonalisation --------------------------------------------------------------------------


def newton_schulz(
    x_BRC: torch.Tensor,
    iterations: int,
    eps: float,
    symmetric_from: float = _SYMMETRIC_FROM,
) -> torch.Tensor:
    """Orthogonalise each of B matrices; the result has the dtype of ``x_BRC``.

    Args:
        x_BRC: fp32 or bf16; products are computed in this dtype, with sums in fp32.
        iterations: the number of Newton-Schulz iterations.
        eps: added to each Frobenius norm; a matrix of zeros gives zeros.
        symmetric_from: length of the shorter side from which only half of a symmetric product is
            computed.
    """
    if x_BRC.device.type == "cpu" and len(x_BRC) > 1:
        # Cloned, since the bits depend on the alignment too.
        each = [
            newton_schulz(x_1RC.clone(), iterations, eps, symmetric_from)
            for x_1RC in x_BRC.split(1)
        ]
        return torch.cat(each)
    # Make the rows the shorter side.
    is_tall = x_BRC.shape[1] > x_BRC.shape[2]
    x_BRC = x_BRC.mT if is_tall else x_BRC
    # Bring the singular values into (0, 1].
    norm_B11 = torch.linalg.vector_norm(x_BRC, dim=(1, 2), keepdim=True, dtype=torch.float32)
    factor_B11 = (norm_B11 + eps).reciprocal()
    x_BRC = torch.mul(x_BRC, factor_B11, out=torch.empty_like(x_BRC))
    backend = "auto" if x_BRC.shape[1] >= symmetric_from else "reference"
    a, b, c = _COEFFICIENTS
    # Iterate X <- a X + (b A + c A A) X with A = X X^T.
    for _ in range(iterations):
        gram_BRR = symmetric_product(x_BRC, backend=backend)
        sum_BRR = symmetric_product(gram_BRR, gram_BRR, c, b, backend)
        x_BRC = torch.baddbmm(x_BRC, sum_BRR, x_BRC, beta=a)
    return x_BRC.mT if is_tall else x_BRC


def newton_schulz_reference(x_RC: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Return :func:`newton_schulz` of one matrix by the formula, in fp64."""
    x_RC = x_RC.double()
    x_RC = x_RC / (x_RC.square().sum().sqrt() + eps)
    a, b, c = _COEFFICIENTS
    for _ in range(iterations):
        # Not transposed if it is tall: X (X^T X) is (X X^T) X.
        gram_RR = x_RC @ x_RC.T
        x_RC = a * x_RC + b * gram_RR @ x_RC + c * gram_RR @ gram_RR @ x_RC
    return x_RC


def _matrix_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which matrices are sent and orthogonalised."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def orthogonalise(
    stacks: Sequence[torch.Tensor],
    iterations: int,
    eps: float,
    scale: float,
    limit: int = _BATCH_ELEMENTS,
) -> None:
    """Replace every matrix by ``scale sqrt(max(R, C))`` times the orthogonalised matrix.

    Matrices of one shape form batches of at most ``limit`` elements, or of a single matrix.

    Args:
        stacks: each [B, R, C] of any float dtype.
        iterations, eps: as :func:`newton_schulz` takes them.
    """
    # Fill a batch of each shape, and orthogonalise it when the next part would not fit.
    waiting: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
    for stack_BRC in stacks:
        if not stack_BRC.numel():
            continue
        most = max(1, limit // stack_BRC[0].numel())
        for part_BRC in stack_BRC.split(most):
            batch = waiting[part_BRC.shape[1:]]
            if sum(map(len, batch)) + len(part_BRC) > most:
                _orthogonalise(batch, iterations, eps, scale)
                batch.clear()
            batch.append(part_BRC)
    for batch in waiting.values():
        _orthogonalise(batch, iterations, eps, scale)


def _orthogonalise(
    parts: Sequence[torch.Tensor], iterations: int, eps: float, scale: float
) -> None:
    """Orthogonalise parts [b, R, C] that share R and C as one batch, in place."""
    sizes = [len(part_BRC) for part_BRC in parts]
    first_BRC = parts[0]
    dtype = _matrix_dtype(first_BRC.device)
    x_BRC = first_BRC.new_empty((sum(sizes), *first_BRC.shape[1:]), dtype=dtype)
    for part_BRC, copy_BRC in zip(parts, x_BRC.split(sizes), strict=True):
        copy_BRC.copy_(part_BRC)
    done_BRC = newton_schulz(x_BRC, iterations, eps)
    for part_BRC, new_BRC in zip(parts, done_BRC.split(sizes), strict=True):
        torch.mul(new_BRC, scale * max(new_BRC.shape[1:]) ** 0.5, out=part_BRC)


def newton_schulz_flops(shape: Sequence[int], iterations: int, stacked: int = 1) -> int:
    """Return the FLOPs to orthogonalise a parameter [..., K * R, C] of K ``stacked`` matrices."""
    *batch, rows, columns = shape
    short, long = sorted((rows // stacked, columns))
    return math.prod(batch) * stacked * 2 * iterations * short * short * (2 * long + short)


def orthogonalising_bytes(elements: float, largest: float, width: int, is_dealt: bool) -> float:
    """Return the peak memory of orthogonalising matrices with ``elements`` in all, in bytes.

    Args:
        largest: the elements of the largest matrix.
        width: bytes of an element of :func:`_matrix_dtype`.
        is_dealt: True if matrices are assembled from the parts of several ranks. That takes the
            parts that are sent, those that are received, and the whole.
    """
    batch = max(largest, min(elements, _BATCH_ELEMENTS))
    return width * batch * (_COPIES + 3 * is_dealt)


_Box = tuple[slice, ...]
"""A part of a matrix: ``matrix[box]``."""
_Exchange = Callable[[torch.Tensor, list[int], list[int]], torch.Tensor]
"""``exchange(x_N, received, sent)`` is an all-to-all. ``sent`` and ``received`` are the elements
that go to and come from each rank; both tensors are in rank order."""


class MatrixShape(NamedTuple):
    """The last two dims of a parameter: K matrices, one above the other."""

    rows: int
    """Rows of all K matrices together."""
    columns: int
    stacked: int
    """K."""


class _Round(NamedTuple):
    """Parameters that are assembled and orthogonalised at the same time, over all ranks."""

    order: list[int]
    """Indices of the parameters, sorted by the rank that each is dealt to."""
    own: list[int]
    """Indices of the parameters that are dealt to this rank."""
    boxes: list[list[_Box]]
    """For each rank, its parts of this rank's parameters ``own``."""
    sent: list[int]
    """For each rank r, how many elements this rank holds of the parameters that are dealt to r."""
    received: list[int]
    """For each rank r, how many elements r holds of the parameters that are dealt to this rank."""


class Matrices:
    """Parameters whose matrices are orthogonalised, over the ranks that hold them.

    A parameter is [..., K * R, C], with K matrices one above the other. Some parameters have only
    whole matrices on every rank. The others are cut: they are dealt to the ranks by their work,
    assembled there, orthogonalised, and the ranks get their parts back.
    """

    def __init__(
        self,
        shapes: Sequence[MatrixShape],
        boxes: Sequence[Sequence[_Box | None]],
        rank: int,
        exchange: _Exchange,
        limit: int = _BATCH_ELEMENTS,
    ) -> None:
        """Deal matrices, the same way on every rank.

        Args:
            shapes: of each parameter.
            boxes: for each rank, its part of each parameter, which may be empty; None: ranks have
                whole matrices of it.
            rank: this rank.
            limit: elements that a rank orthogonalises at a time, unless a matrix has more.
        """
        self._shapes = [(shape.rows // shape.stacked, shape.columns) for shape in shapes]
        """(R, C) of each parameter's matrices."""
        self._exchange, self._limit = exchange, limit
        first = [None if len(boxes) == 1 else box for box in boxes[0]]
        self._whole = [i for i, box in enumerate(first) if box is None]
        """Indices of the parameters with whole matrices."""
        cut = [i for i, box in enumerate(first) if box is not None]
        self._cut_shapes = {i: (shapes[i].rows, shapes[i].columns) for i in cut}
        held = [[part[i] or () for i in cut] for part in boxes]
        self._rounds: list[_Round] = []
        # Below, k is an index in ``cut``.
        for dealt in _deal(list(self._cut_shapes.values()), len(boxes), limit):
            own_boxes = [[part[k] for k in dealt[rank]] for part in held]
            self._rounds.append(
                _Round(
                    order=[cut[k] for of_rank in dealt for k in of_rank],
                    own=[cut[k] for k in dealt[rank]],
                    boxes=own_boxes,
                    sent=[sum(_numel(held[rank][k]) for k in of_rank) for of_rank in dealt],
                    received=[sum(map(_numel, part)) for part in own_boxes],
                )
            )

    def orthogonalise(
        self, pieces: Sequence[torch.Tensor], *, iterations: int, eps: float, scale: float
    ) -> None:
        """Do what :func:`orthogonalise` does to this rank's ``pieces`` of all parameters.

        Collective, in as many rounds as cut matrices take.
        """
        orthogonalise_all = partial(
            orthogonalise, iterations=iterations, eps=eps, scale=scale, limit=self._limit
        )
        orthogonalise_all([pieces[i].view(-1, *self._shapes[i]) for i in self._whole])
        for round_ in self._rounds:
            # Send the parts to the ranks that their matrices are dealt to.
            mine = [pieces[i] for i in round_.order]
            dtype = _matrix_dtype(mine[0].device)
            sent_N = torch.cat([piece.flatten().to(dtype) for piece in mine])
            received_N = self._exchange(sent_N, round_.received, round_.sent)
            # Assemble this rank's matrices.
            wholes = [sent_N.new_empty(self._cut_shapes[i]) for i in round_.own]
            parts = [
                whole[box]
                for boxes in round_.boxes
                for whole, box in zip(wholes, boxes, strict=True)
            ]
            _fill(parts, received_N)
            # Orthogonalise them, and send the parts back.
            orthogonalise_all(
                [x.view(-1, *self._shapes[i]) for i, x in zip(round_.own, wholes, strict=True)]
            )
            back_N = torch.cat([received_N[:0], *(part.flatten() for part in parts)])
            _fill(mine, self._exchange(back_N, round_.sent, round_.received))


def _numel(box: _Box) -> int:
    return math.prod(part.stop - part.start for part in box)


def _fill(tensors: Sequence[torch.Tensor], x_N: torch.Tensor) -> None:
    """Copy ``x_N`` into ``tensors``, one after the other."""
    for tensor, part_N in zip(tensors, x_N.split([x.numel() for x in tensors]), strict=True):
        tensor.copy_(part_N.view(tensor.shape))


def _deal(
    shapes: Sequence[tuple[int, int]], ranks: int, limit: int = _BATCH_ELEMENTS
) -> list[list[list[int]]]:
    """Deal matrices of ``shapes`` to ``ranks`` by their work, in rounds.

    A round has matrices of at most ``limit`` elements a rank on average, or a single matrix.
    Matrices are dealt in the order of falling work, each to the rank with the least work so far in
    this round (the first of several). So every rank computes the same answer.

    Returns:
        For each round the matrices of each rank, as indices in ``shapes``. Worked example: three
        squares of 8 and one of 4 over two ranks are [[[0, 2], [1, 3]]].
    """
    work = [newton_schulz_flops(shape, 1) for shape in shapes]
    rounds: list[list[list[int]]] = []
    loads: list[int] = []
    elements = 0
    for i in sorted(range(len(shapes)), key=lambda i: -work[i]):
        size = shapes[i][0] * shapes[i][1]
        if not rounds or elements + size > limit * ranks:
            rounds.append([[] for _ in range(ranks)])
            loads, elements = [0] * ranks, 0
        rank = loads.index(min(loads))
        rounds[-1][rank].append(i)
        loads[rank] += work[i]
        elements += size
    return rounds


# ---- passes over a shard -------------------------------------------------------------------------


def muon_momentum(
    grad_N: torch.Tensor,
    momentum_N: torch.Tensor,
    rates_S: torch.Tensor,
    momentum: float,
    seed: int,
    origins_B: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Update ``momentum_N``, and replace ``grad_N`` by the u that is to be orthogonalised.

    A skipped step leaves both as they are. All tensors over N are contiguous.

    Args:
        grad_N: fp32 or bf16.
        momentum_N: fp32 or bf16.
        rates_S: made by :meth:`moetrain.kernels.optim.adamw.Settings.rates`.
        momentum: mu.
        seed: the seed of the random bits of stochastic rounding.
        origins_B: int64, the index of each block's first element, from which its random bits are
            drawn; given with a momentum in bf16, and only with that.
    """
    flat = {"grad": grad_N, "momentum": momentum_N}
    blocks = -(-grad_N.numel() // BLOCK)
    _check("muon_momentum", flat, dict.fromkeys(flat, STATE_DTYPES))
    if (origins_B is None) == (momentum_N.dtype == torch.bfloat16):
        takes = f"int64 [{blocks}] with a momentum in bf16, and with that alone"
        raise refusal("muon_momentum", takes, momentum=momentum_N.dtype, origins=origins_B)
    if use_fast(backend, grad_N):
        muon_momentum_op(grad_N, momentum_N, rates_S, origins_B, momentum, 1 - momentum, seed)
        return
    rates = Rates.unpack(rates_S)
    wide = torch.promote_types(grad_N.dtype, torch.float32)
    # Update the average of clipped gradients.
    g_N = grad_N.to(wide) * rates.clip * (1 - momentum)
    m_N = momentum * momentum_N.to(wide) + g_N
    # Nesterov: look ahead by one more average.
    u_N = momentum * m_N + g_N
    if origins_B is not None:
        bits_N = random_bits_reference(origins_B, rates.step, seed)[: grad_N.numel()]
        m_N = round_by_reference(m_N, bits_N & 0xFFFF)
    is_kept = rates.skipped != 0
    for old_N, new_N in ((momentum_N, m_N), (grad_N, u_N)):
        old_N.copy_(torch.where(is_kept, old_N, new_N))


def muon_update(
    param_N: torch.Tensor,
    update_N: torch.Tensor,
    rates_S: torch.Tensor,
    decays_B: torch.Tensor,
    out_N: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Decay ``param_N``, subtract ``lr * update_N``, and write ``out_N`` if it is given.

    All tensors over N are contiguous.

    Args:
        param_N: fp32.
        update_N: fp32 or bf16, what :func:`orthogonalise` leaves.
        rates_S: made by :meth:`moetrain.kernels.optim.adamw.Settings.rates`.
        decays_B: uint8, 1 where weight decay applies.
        out_N: of any float dtype: the new parameters, rounded to nearest.
    """
    flat = {"param": param_N, "update": update_N} | ({} if out_N is None else {"out": out_N})
    dtypes = {"param": (torch.float32,), "update": STATE_DTYPES, "out": OUT_DTYPES}
    _check("muon_update", flat, dtypes)
    blocks = -(-param_N.numel() // BLOCK)
    if decays_B.shape != (blocks,) or decays_B.dtype != torch.uint8:
        takes = f"uint8 [{blocks}] with {param_N.numel()} elements"
        raise refusal("muon_update", takes, decays=decays_B)
    if use_fast(backend, param_N):
        # In torch 2.11 an argument that an op writes must be a tensor.
        out_N = param_N.new_empty(0) if out_N is None else out_N
        muon_update_op(param_N, out_N, update_N, rates_S, decays_B)
        return
    rates = Rates.unpack(rates_S)
    decays_N = (rates.decay * decays_B).repeat_interleave(BLOCK)[: param_N.numel()]
    p_N = param_N - decays_N * param_N - rates.lr * update_N.to(param_N.dtype)
    param_N.copy_(torch.where(rates.skipped != 0, param_N, p_N))
    if out_N is not None:
        out_N.copy_(param_N)


def _check(
    kernel: str, flat: dict[str, torch.Tensor], allowed: dict[str, tuple[torch.dtype, ...]]
) -> None:
    """Raise ValueError unless all tensors are contiguous, in the first one's shape, and in an
    allowed dtype. All may be fp64, for the reference."""
    shape = next(iter(flat.values())).shape
    is_fp64 = all(tensor.dtype == torch.float64 for tensor in flat.values())
    for name, tensor in flat.items():
        dtypes = (torch.float64,) if is_fp64 else allowed[name]
        if tensor.shape != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
            takes = f"a contiguous {tuple(shape)} of {' or '.join(map(str, dtypes))}"
            raise refusal(kernel, takes, **{name: tensor})


@torch.library.custom_op("moetrain::muon_momentum", mutates_args=("grad_N", "momentum_N"))
def muon_momentum_op(
    grad_N: torch.Tensor,
    momentum_N: torch.Tensor,
    rates_S: torch.Tensor,
    origins_B: torch.Tensor | None,
    momentum: float,
    rest: float,
    seed: int,
) -> None:
    if size := grad_N.numel():
        _momentum_kernel[(triton.cdiv(size, BLOCK),)](
            grad_N,
            momentum_N,
            rates_S,
            origins_B,
            size,
            momentum,
            rest,
            seed,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


@muon_momentum_op.register_fake
def _(
    grad_N: torch.Tensor,
    momentum_N: torch.Tensor,
    rates_S: torch.Tensor,
    origins_B: torch.Tensor | None,
    momentum: float,
    rest: float,
    seed: int,
) -> None:
    """Write in place; there is nothing to return."""


@torch.library.custom_op("moetrain::muon_update", mutates_args=("param_N", "out_N"))
def muon_update_op(
    param_N: torch.Tensor,
    out_N: torch.Tensor,
    update_N: torch.Tensor,
    rates_S: torch.Tensor,
    decays_B: torch.Tensor,
) -> None:
    """Update in place; an empty ``out_N`` stands for none."""
    if size := param_N.numel():
        _update_kernel[(triton.cdiv(size, BLOCK),)](
            param_N,
            update_N,
            out_N if out_N.numel() else None,
            rates_S,
            decays_B,
            size,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


@muon_update_op.register_fake
def _(
    param_N: torch.Tensor,
    out_N: torch.Tensor,
    update_N: torch.Tensor,
    rates_S: torch.Tensor,
    decays_B: torch.Tensor,
) -> None:
    """Write in place; there is nothing to return."""


@triton.jit(do_not_specialize=["seed"])
def _momentum_kernel(
    grad,
    momentum,
    rates,
    origins,
    size,
    mu,
    rest,
    seed,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    if tl.load(rates + 4) == 0.0:
        g = tl.load(grad + at, mask, 0.0).to(tl.float32) * tl.load(rates) * rest
        m = mu * tl.load(momentum + at, mask, 0.0).to(tl.float32) + g
        u = mu * m + g
        if origins is not None:
            step = tl.load(rates + 5).to(tl.int32)
            bits = random_bits(tl.load(origins + block), step, seed, BLOCK)
            m = round_by(m, bits & 0xFFFF)
        tl.store(momentum + at, m.to(momentum.dtype.element_ty), mask)
        tl.store(grad + at, u.to(grad.dtype.element_ty), mask)


@triton.jit
def _update_kernel(param, update, out, rates, decays, size, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    p = tl.load(param + at, mask, 0.0)
    if tl.load(rates + 4) == 0.0:
        x = tl.load(update + at, mask, 0.0).to(tl.float32)
        p -= tl.load(rates + 1) * tl.load(decays + block).to(tl.float32) * p
        p -= tl.load(rates + 6) * x
        tl.store(param + at, p, mask)
    if out is not None:
        tl.store(out + at, p.to(out.dtype.element_ty), mask)
