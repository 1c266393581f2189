"""The product of a matrix with its own transpose: half is computed, half filled in by symmetry.

    S = alpha X X^T + beta A          A symmetric, or none

S is symmetric too. So only tiles on and above the diagonal are computed: t (t + 1) / 2 of t x t, at
t = 6 (768 rows) 58 % of the FLOPs. Each is written twice, in place and transposed. With X = A the
result is alpha A A + beta A, since A A = A A^T (:mod:`moetrain.kernels.optim.muon`).

Worked example: X = [[1, 2], [3, 4]] gives X X^T = [[5, 11], [11, 25]], and with alpha 2, beta 1 and
A = [[0, 1], [1, 0]] it gives [[10, 23], [23, 50]].

A program computes one tile of one matrix, from X's first column to its last: S is exactly
symmetric, and the bits of a matrix depend on nothing but the matrix. Sums are in fp32.

Left out on purpose: gradients, and products of two matrices whose result happens to be symmetric.

Legend: B matrices, R rows, C columns.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import torch

from moetrain.runtime.backend import Backend, refusal, tl, triton, use_fast

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class _Launch(NamedTuple):
    """Launch settings of the kernel; ``scripts/bench_optimizer.py --sweep`` times others."""

    tile: int
    """Rows and columns of a tile."""
    depth: int
    """Columns of X that a step of the loop multiplies."""
    warps: int
    stages: int
    registers: int
    """Most registers a thread."""


_LAUNCH = _Launch(128, 64, 4, 3, 255)
_LAUNCH_ALONE = _LAUNCH._replace(stages=4)
"""Settings without an added matrix. Both are the fastest of eight on one H100. For 128 matrices of
768 x 2048 X X^T takes 0.43 ms and b A + c A A 0.25; a library takes 0.47 and 0.36."""
_MOST_ROWS = 46_340
"""Limit of rows: offsets in a result are 32-bit integers."""


def symmetric_product(
    x_BRC: torch.Tensor,
    added_BRR: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Return ``alpha x x^T + beta added``, contiguous [B, R, R] in the dtype of ``x_BRC``.

    Args:
        x_BRC: bf16, fp16 or fp32 of any strides; fast where one of R and C is contiguous and the
            other's stride a multiple of 16.
        added_BRR: symmetric matrices in the same dtype, contiguous; only one half of each is read.

    Raises ValueError: shapes or dtypes do not fit.
    """
    batch, rows, _ = sizes = x_BRC.shape if x_BRC.dim() == 3 else (0, 0, 0)
    fits = x_BRC.dim() == 3
    if added_BRR is not None:
        fits &= added_BRR.dtype == x_BRC.dtype and added_BRR.is_contiguous()
        fits &= added_BRR.shape == (batch, rows, rows)
    if not fits:
        takes = "[B, R, C] and a contiguous [B, R, R] in one dtype"
        raise refusal("symmetric_product", takes, x=x_BRC, added=added_BRR)
    if not use_fast(backend, x_BRC):
        if added_BRR is not None:
            return torch.baddbmm(added_BRR, x_BRC, x_BRC.mT, beta=beta, alpha=alpha)
        y_BRR = torch.bmm(x_BRC, x_BRC.mT)
        return y_BRR if alpha == 1 else y_BRR * alpha
    if x_BRC.dtype not in _DTYPES or 0 in sizes or rows > _MOST_ROWS:
        takes = f"bf16, fp16 or fp32 that is not empty, of at most {_MOST_ROWS} rows"
        raise refusal("symmetric_product", takes, x=x_BRC)
    return symmetric_product_op(x_BRC, added_BRR, alpha, beta)


@torch.library.custom_op("moetrain::symmetric_product", mutates_args=())
def symmetric_product_op(
    x_BRC: torch.Tensor,
    added_BRR: torch.Tensor | None,
    alpha: float,
    beta: float,
) -> torch.Tensor:
    batch, rows, columns = x_BRC.shape
    out_BRR = x_BRC.new_empty(batch, rows, rows)
    launch = _LAUNCH_ALONE if added_BRR is None else _LAUNCH
    tiles = triton.cdiv(rows, launch.tile)
    pairs = tiles * (tiles + 1) // 2
    # Products in fp32 have no tensor cores, and their loops are unrolled.
    depth = launch.depth if x_BRC.itemsize == 2 else 16
    _symmetric_kernel[(batch * pairs,)](
        x_BRC,
        added_BRR,
        out_BRR,
        pairs,
        rows,
        columns,
        *x_BRC.stride(),
        alpha,
        beta,
        TILE=launch.tile,
        DEPTH=depth,
        EVEN=rows % launch.tile == columns % depth == 0,
        num_warps=launch.warps,
        num_stages=launch.stages,
        maxnreg=launch.registers,
    )
    return out_BRR


@symmetric_product_op.register_fake
def _(
    x_BRC: torch.Tensor, added_BRR: torch.Tensor | None, alpha: float, beta: float
) -> torch.Tensor:
    batch, rows, _ = x_BRC.shape
    return x_BRC.new_empty(batch, rows, rows)


@triton.jit
def _symmetric_kernel(
    x,
    added,
    out,
    pairs,
    rows,
    columns,
    x_batch,
    x_row,
    x_column,
    alpha,
    beta,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
):
    matrix, pair = (tl.program_id(0) // pairs).to(tl.int64), tl.program_id(0) % pairs
    # Pairs (i, j) with i <= j: (0, 0), (0, 1), (1, 1), (0, 2), ...
    j = ((tl.sqrt_rn((8 * pair + 1).to(tl.float32)) - 1) / 2).to(tl.int32)
    i = pair - j * (j + 1) // 2
    within, depth = tl.arange(0, TILE), tl.arange(0, DEPTH)
    r, c = i * TILE + within, j * TILE + within
    x += matrix * x_batch
    offsets = within[:, None] * x_row + depth[None, :] * x_column
    left = x + (i * TILE).to(tl.int64) * x_row + offsets
    right = x + (j * TILE).to(tl.int64) * x_row + offsets
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, columns, DEPTH):
        if EVEN:
            a, b = tl.load(left), tl.load(right)
        else:
            valid = (depth < columns - start)[None, :]
            a = tl.load(left, (r < rows)[:, None] & valid, 0.0)
            b = tl.load(right, (c < rows)[:, None] & valid, 0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
        left += DEPTH * x_column
        right += DEPTH * x_column
    total *= alpha
    valid = (r < rows)[:, None] & (c < rows)[None, :]
    above, below = r[:, None] * rows + c[None, :], c[None, :] * rows + r[:, None]
    if added is not None:
        added += matrix * rows * rows
        total += beta * tl.load(added + above, valid, 0.0).to(tl.float32)
    value = total.to(out.dtype.element_ty)
    out += matrix * rows * rows
    if i == j:
        # On the diagonal each value is written to both places, since its mirror image may have been
        # summed in another order.
        tl.store(out + above, value, valid & (r[:, None] <= c[None, :]))
        tl.store(out + below, value, valid & (r[:, None] < c[None, :]))
    else:
        tl.store(out + above, value, valid)
        tl.store(out + below, value, valid)
