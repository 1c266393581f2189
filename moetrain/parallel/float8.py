"""A frozen shard in OCP's MXFP8: e4m3, and a scale for each 32 numbers (``lora.base_dtype``).

What is not trained needs no more precision than its product has, and half the memory. QLoRA (arXiv
2305.14314) stores 4 bits, by a table and with scales of scales; here it is a cast and a product.
Codes and scales are what is gathered, half the bytes. They are widened into the memory where the
parameters lie gathered, which blocks take turns at.

A scale is a power of two, the least with which its group's largest number is in range. So widening
rounds nothing, what is widened and written again has the same values, and in a group that is
written in parts each number is rounded once, but for those below the smallest normal code.

Groups are of neighbours in a rank's shard: the same on any layout that leaves every rank's part of
a row a multiple of 32 numbers.

Legend: N numbers of whole groups, G groups, W ranks.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from moetrain.kernels.quantise import E4M3, quantise_rows_reference
from moetrain.models.rules import SCALED
from moetrain.parallel.arena import Arena
from moetrain.parallel.collectives import all_gather_start

BAD = 255
"""Scale of a group with a number that is not finite, of which all are NaN then."""


def quantise(x_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N] (e4m3) and scales [G] (uint8: fp32's exponents) of ``x_N`` (floating).

    Worked example, groups of 2: of (3, 1000) the scale is 4, since 1000 > 2 x 448, and codes are
    0.75 and 256 (250 is between 240 and 256, and nearer to this): what is stored is (3, 1024).
    """
    x_GS = x_N.float().view(-1, SCALED)
    is_bad_G = ~x_GS.isfinite().all(1)
    codes_GS, scales_G = quantise_rows_reference(x_GS.masked_fill(is_bad_G[:, None], 0.0))
    bytes_G = (scales_G.view(torch.int32) >> 23).masked_fill(is_bad_G, BAD)
    return codes_GS.view(-1), bytes_G.to(torch.uint8)


def _values_of(scales_G: torch.Tensor) -> torch.Tensor:
    """The powers of two, fp32."""
    return (scales_G.int() << 23).view(torch.float32)


class Float8Shard:
    """One rank's shard of one bucket, ``numel`` numbers that are used in ``dtype``."""

    def __init__(self, numel: int, dtype: torch.dtype, weights: Arena) -> None:
        self.dtype = dtype
        self._codes = -(-numel // SCALED) * SCALED
        self.bytes = weights.empty(self._codes + self._codes // SCALED, torch.uint8).zero_()
        """All that is gathered: codes, and behind them scales."""
        self.codes_N = self.bytes[:numel].view(E4M3)

    def _apart(self, bytes_W: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes_WN, scales_WG = bytes_W[:, : self._codes], bytes_W[:, self._codes :]
        return codes_WN.view(E4M3), scales_WG

    # ---- for whoever reads and writes values ----------------------------------------------------

    def read(self, start: int, shape: torch.Size, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A copy of the tensor that begins at number ``start``, in ``dtype`` or as it is used."""
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.bytes.device)
        self.widen(out.view(-1), self.bytes[None], start, out.numel())
        return out

    @torch.no_grad()
    def write(
        self,
        start: int,
        shape: torch.Size,
        place: tuple[int | slice, ...],
        values: torch.Tensor,
    ) -> None:
        """``tensor[place] = values``, as nearly as can be; the tensor begins at ``start``."""
        rows, *columns = place
        first, last = (rows, rows + 1) if isinstance(rows, int) else (rows.start, rows.stop)
        # The groups that hold these rows; they begin and end within the tensor's own.
        size = math.prod(shape[1:])
        begin, numel = start + first * size, (last - first) * size
        outer = begin // SCALED * SCALED
        end = -(-(begin + numel) // SCALED) * SCALED
        wide_N = self.read(outer, torch.Size([end - outer]), torch.float32)
        part = wide_N[begin - outer :][:numel].view(last - first, *shape[1:])
        part[0 if isinstance(rows, int) else slice(None), *columns].copy_(values)
        codes_WN, scales_WG = self._apart(self.bytes[None])
        codes_N, scales_G = quantise(wide_N)
        codes_WN[0, outer:end].copy_(codes_N)
        scales_WG[0, outer // SCALED : end // SCALED].copy_(scales_G)

    # ---- gathering -----------------------------------------------------------------------------

    def start_gather(self, group: dist.ProcessGroup, staging: torch.Tensor) -> dist.Work | None:
        """Begin to bring every rank's codes and scales to ``staging``."""
        if group.size() == 1:
            return None
        return all_gather_start(self.bytes, group, self.gathered(group.size(), staging))[1]

    def gathered(self, ranks: int, staging: torch.Tensor) -> torch.Tensor:
        """Where they lie then: [W, bytes]."""
        if ranks == 1:
            return self.bytes[None]
        return staging[: ranks * self.bytes.numel()].view(ranks, -1)

    def widen(self, out_N: torch.Tensor, bytes_W: torch.Tensor, start: int, numel: int) -> None:
        """Write ``numel`` numbers from ``start`` on of each rank's ``bytes_W``, one rank's behind
        the other's, to ``out_N``; the last ranks may have less."""
        first, last = start // SCALED, -(-(start + numel) // SCALED)
        whole = slice(first * SCALED, last * SCALED)
        codes_WN, scales_WG = self._apart(bytes_W)
        codes_WN, scales_WG = codes_WN[:, whole], scales_WG[:, first:last]
        # Straight to where it belongs, if that is whole groups of every rank.
        is_whole = codes_WN.shape == (len(bytes_W), numel) and codes_WN.numel() == len(out_N)
        wide_WN = out_N.view_as(codes_WN) if is_whole else out_N.new_empty(codes_WN.shape)
        wide_WN.copy_(codes_WN)
        wide_WN.view(*scales_WG.shape, SCALED).mul_(_values_of(scales_WG)[..., None])
        if not is_whole:
            wide_WN = wide_WN[:, start - whole.start :][:, :numel]
            out_N.copy_(wide_WN.reshape(-1)[: len(out_N)])
