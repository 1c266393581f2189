"""Sampling of the next token: head, softmax and draw in one, without storing logits.

    chosen = argmax over v of  logit[v] / temperature + noise[v]     (no noise at temperature 0)

Gumbel noise makes that a draw from the softmax (the Gumbel-max trick). The noise is a hash of a key
and the token id, ``-log(-log u)`` with u in (0, 1), so no generator has a state. It lies between
-2.82 and 22.9, so a score of -inf stays -inf. The log-probability is that
of the loss (:mod:`moetrain.kernels.loss.linear_cross_entropy`) at a temperature of each row's own,
with the loss's bits on the same device.

Legend: N rows, D width, V vocabulary.
"""

from typing import TypeVar

import torch

from moetrain.kernels.backend import Backend, use_fast
from moetrain.kernels.loss.vocabulary_chunk import check_fast, sample_chunk

MASK = 2**32 - 1
_Words = TypeVar("_Words", int, torch.Tensor)


def sample_tokens(
    h_ND: torch.Tensor,
    w_VD: torch.Tensor,
    keys_N: torch.Tensor,
    inverse_temperatures_N: torch.Tensor,
    scales_N: torch.Tensor,
    known: int,
    backend: Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample each row's token (int64) and return its log-probability (fp32), without gradient.

    Args:
        keys_N: int32, any bits; they determine the noise.
        inverse_temperatures_N: fp32; 0 stands for temperature 0, the likeliest token.
        scales_N: fp32, above 0: 1 / the temperature of the log-probability.
        known: tokens from this id on are never chosen.
    """
    rows = keys_N, inverse_temperatures_N, scales_N
    if use_fast(backend, h_ND):
        check_fast(h_ND, w_VD)
        return sample_chunk(h_ND, w_VD, *rows, known)
    return sample_tokens_reference(h_ND, w_VD, *rows, known)


def sample_tokens_reference(
    h_ND: torch.Tensor,
    w_VD: torch.Tensor,
    keys_N: torch.Tensor,
    inverse_temperatures_N: torch.Tensor,
    scales_N: torch.Tensor,
    known: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute :func:`sample_tokens` from logits held whole."""
    logits_NV = (h_ND @ w_VD.T).float()
    chosen_N = gumbel_argmax(logits_NV[:, :known], gumbel(keys_N, known), inverse_temperatures_N)
    scaled_NV = logits_NV * scales_N[:, None]
    return chosen_N, scaled_NV.gather(1, chosen_N[:, None])[:, 0] - scaled_NV.logsumexp(-1)


def gumbel_argmax(
    logits_NV: torch.Tensor, noise_NV: torch.Tensor, inverse_temperatures_N: torch.Tensor
) -> torch.Tensor:
    """Return each row's token with the largest score."""
    inverse_N1 = inverse_temperatures_N[:, None]
    scores_NV = torch.where(inverse_N1 > 0, logits_NV * inverse_N1 + noise_NV, logits_NV)
    return scores_NV.argmax(-1)


def gumbel(keys_N: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return the noise [N, V] in fp32."""
    keys_N1 = (keys_N.long() & MASK)[:, None]
    ids_V = torch.arange(vocabulary, device=keys_N.device) * 0x9E3779B1
    return noise_of(mix(mix(keys_N1 ^ (ids_V & MASK)) ^ keys_N1))


def noise_of(bits: torch.Tensor) -> torch.Tensor:
    """Return the noise, in fp32, of 32 random bits (int64, not negative)."""
    return -exponential_of(bits).log()


def exponential_of(bits: torch.Tensor) -> torch.Tensor:
    """Map 32 random bits to -log u, in fp32, where u is spread evenly over (0, 1).

    u is the middle of one of 2^23 equal parts: it has 24 binary digits, as many as fp32 keeps. Of
    2^24 parts fp32 would round the last middle to 1, and its noise would be infinite.

    The uppermost 2^8 parts are divided by the nine bits that are left. A token is chosen by its
    small -log u alone, and one with a share of 1e-8 needs a u above the last of 2^23 middles: it
    would be chosen a third as often as it should be. There ``1 - u`` stands for ``-log u``, which
    is larger by 1.5e-5 of itself at most.
    """
    from_above = MASK - bits
    middle = ((bits >> 9).float() + 0.5) / 2**23
    return torch.where(from_above < 2**17, (from_above.float() + 0.5) / 2**32, -middle.log())


def mix(x: _Words) -> _Words:
    """Apply MurmurHash3's finalizer to 32-bit numbers in int64; products are cut to 32 bits."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B & MASK
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & MASK
    return x ^ (x >> 16)
