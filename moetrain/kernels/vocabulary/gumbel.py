"""Gumbel noise, hashed from a key and the token id, to sample tokens from logits.

The token with the largest sum of logit and noise is a sample of the softmax. The noise is
``-log(-log u)`` with u in (0, 1). It lies between -2.82 and 22.9, so that a logit of -inf stays
-inf. The Triton functions return the same bits as the torch functions, except for the last bit of
a logarithm.

Legend: N rows.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from typing import TypeVar

import torch

from moetrain.runtime.backend import Backend, tl, triton, use_fast

MASK = 2**32 - 1
SALT = 0x9E3779B9
"""Added before hashing, so that zero is not hashed to zero."""
_SALT = tl.constexpr(SALT)
_Words = TypeVar("_Words", int, torch.Tensor)


def gumbel_argmax(
    logits_NV: torch.Tensor, keys_N: torch.Tensor, inverse_temperatures_N: torch.Tensor
) -> torch.Tensor:
    """Sample each row's token from its logits: int64 [N].

    The other arguments are those of :func:`~moetrain.kernels.vocabulary.chunk.sample_tokens`.
    """
    inverse_N1 = inverse_temperatures_N[:, None]
    noise_NV = gumbel_noise(keys_N, logits_NV.shape[1])
    scores_NV = torch.where(inverse_N1 > 0, logits_NV * inverse_N1 + noise_NV, logits_NV)
    return scores_NV.argmax(-1)


def stream_of(seed: int, completion: int) -> int:
    """Return the stream of a completion's noise: a hash, as a signed 32-bit integer."""
    stream = 0
    for word in (seed & MASK, seed >> 32, completion):
        stream = mix(stream ^ mix((word + SALT) & MASK))
    return stream - (stream >> 31 << 32)


def noise_keys(
    streams_N: torch.Tensor, positions_N: torch.Tensor, backend: Backend = "auto"
) -> torch.Tensor:
    """Return the int32 key of the noise for each pair of a stream and a position (integers)."""
    if not use_fast(backend, streams_N):
        salted_N = (positions_N.long() + SALT) & MASK
        return mix((streams_N.long() & MASK) ^ mix(salted_N)).int()
    rows = streams_N.shape[0]
    keys_N = streams_N.new_empty(rows, dtype=torch.int32)
    if rows:
        _keys_kernel[(triton.cdiv(rows, 128),)](
            streams_N,
            positions_N,
            keys_N,
            rows,
            streams_N.stride(0),
            positions_N.stride(0),
            BLOCK=128,
        )
    return keys_N


@triton.jit(do_not_specialize=["N", "streams_stride", "positions_stride"])
def _keys_kernel(
    streams_ptr,
    positions_ptr,
    keys_ptr,
    N,
    streams_stride,
    positions_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < N
    stream = tl.load(streams_ptr + row * streams_stride, mask=mask, other=0).to(tl.uint32)
    position = tl.load(positions_ptr + row * positions_stride, mask=mask, other=0).to(tl.uint32)
    key = _tl_mix(stream ^ _tl_mix(position + _SALT))
    tl.store(keys_ptr + row, key.to(tl.int32, bitcast=True), mask=mask)


def gumbel_noise(keys_N: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return the noise [N, V] in fp32."""
    keys_N1 = (keys_N.long() & MASK)[:, None]
    ids_V = torch.arange(vocabulary, device=keys_N.device) * 0x9E3779B1
    return noise_of(mix(mix(keys_N1 ^ (ids_V & MASK)) ^ keys_N1))


def noise_of(bits: torch.Tensor) -> torch.Tensor:
    """Return the noise, in fp32, of 32 random bits (int64, not negative)."""
    return -exponential_of(bits).log()


def exponential_of(bits: torch.Tensor) -> torch.Tensor:
    """Map 32 random bits to -log u, in fp32, with u uniform over (0, 1).

    u is the middle of one of 2^23 equal parts: it has 24 binary digits, as many as fp32 keeps. With
    2^24 parts fp32 would round the last middle to 1, and its noise would be infinite.

    The uppermost 2^8 parts are divided further by the other nine bits. Without them, a token of
    probability 1e-8 would be chosen a third as often as it should be, because it needs a u above
    the last of the 2^23 middles. In these parts ``1 - u`` replaces ``-log u``; it is smaller by at
    most 1.5e-5 of ``-log u``.
    """
    from_above = MASK - bits
    middle = ((bits >> 9).float() + 0.5) / 2**23
    return torch.where(from_above < 2**17, (from_above.float() + 0.5) / 2**32, -middle.log())


def mix(x: _Words) -> _Words:
    """Apply MurmurHash3's finalizer to 32-bit integers in int64; products are cut to 32 bits."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B & MASK
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & MASK
    return x ^ (x >> 16)


@triton.jit
def tl_gumbel(key, token):
    """Return :func:`gumbel_noise` for a uint32 ``key`` and ``token``."""
    key = key.to(tl.uint32)
    return tl_noise(_tl_mix(_tl_mix(key ^ (token.to(tl.uint32) * 0x9E3779B1)) ^ key))


@triton.jit
def tl_noise(bits):
    return -tl.log(tl_exponential(bits))


@triton.jit
def tl_exponential(bits):
    """Return :func:`exponential_of` for uint32."""
    from_above = ~bits
    middle = ((bits >> 9).to(tl.float32) + 0.5) * (1 / 2**23)
    near_one = (from_above.to(tl.float32) + 0.5) * (1 / 2**32)
    return tl.where(from_above < 2**17, near_one, -tl.log(middle))


@triton.jit
def _tl_mix(x):
    """Return :func:`mix` for uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
