"""Stochastic rounding of optimizer states to bf16, and the launch settings of their kernels.

    round(x) = the top 16 bits of (x + noise)        noise: 16 random bits below those of bf16

with x and the noise added as 32-bit integers, so that the mean of the rounded value is x. Philox
(Salmon et al. 2011, ten rounds) makes the random bits from the seed, the step and the element's
index. So they are the same in a rerun, and in another layout. Worked example: 1 + 2^-9 becomes
1 + 2^-7, the next bf16 value, for one in four values of the bits.

Kernels of other files call :func:`random_bits` and :func:`round_by` on one block of elements. The
functions named ``_reference`` do the same in plain torch.

Legend: N elements of a shard, B blocks of :data:`BLOCK` of them, each of one parameter.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch

from moetrain.runtime.backend import tl, triton

BLOCK = 1024  # measured on one H200: 2,048 and 4,096 are 1 to 3 % slower
WARPS = 4
STATE_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of gradients and of an optimizer's state."""
OUT_DTYPES = (*STATE_DTYPES, torch.float16)
"""Dtypes of the copy that an update writes."""


def round_by_reference(x_N: torch.Tensor, noise_N: torch.Tensor) -> torch.Tensor:
    """Round fp32 to bf16 by 16 random bits."""
    bits_N = x_N.view(torch.int32) + noise_N.to(torch.int32)
    return (bits_N & -65536).view(torch.float32).bfloat16()


def random_bits_reference(
    origins_B: torch.Tensor, step: torch.Tensor, seed: int, block: int = BLOCK
) -> torch.Tensor:
    """Return 32 random bits (int64) for each element of blocks of ``block`` elements.

    Args:
        origins_B: int64, the index of each block's first element.
        step: 0-d, the number of the step.
    """
    # Each group of four elements takes the four words of one Philox block: its counter is the
    # group's index (two words) and the step, its key the seed.
    mask = 0xFFFFFFFF
    groups = origins_B[:, None] // 4 + torch.arange(block // 4, device=origins_B.device)
    c0 = groups & mask
    c1 = (groups >> 32) & mask
    c2 = step.long().expand_as(groups)
    c3 = torch.zeros_like(groups)
    k0, k1 = seed & mask, (seed >> 32) & mask
    for _ in range(10):
        # Products wrap in int64; their lower 64 bits are those of unsigned products.
        product0 = c0 * 0xD2511F53
        product2 = c2 * 0xCD9E8D57
        c0, c2 = ((product2 >> 32) & mask) ^ c1 ^ k0, ((product0 >> 32) & mask) ^ c3 ^ k1
        c1 = product2 & mask
        c3 = product0 & mask
        k0 = (k0 + 0x9E3779B9) & mask
        k1 = (k1 + 0xBB67AE85) & mask
    return torch.stack([c0, c1, c2, c3], dim=-1).flatten()


@triton.jit
def round_by(x, noise):
    """Round fp32 to values that bf16 has, by 16 random bits; the dtype stays fp32."""
    bits = x.to(tl.int32, bitcast=True) + noise
    return (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def random_bits(origin, step, seed, BLOCK: tl.constexpr):
    """Return 32 random bits (int32) for each element of the block that begins at ``origin``."""
    group = (origin >> 2) + tl.arange(0, BLOCK // 4)
    low, high = group.to(tl.int32), (group >> 32).to(tl.int32)
    zero = low * 0
    r0, r1, r2, r3 = tl.philox(seed, low, high, zero + step, zero)
    bits = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))  # r0, r1, r2, r3, r0, ...
    return bits.to(tl.int32, bitcast=True)
