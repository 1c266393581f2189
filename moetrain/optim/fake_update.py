"""An update on tensors without memory, to find which kernels it launches.

These kernels are compiled before the first step (:mod:`moetrain.runtime.ahead`).
"""

from dataclasses import dataclass
from functools import partial

import torch

from moetrain.config import Config
from moetrain.kernels.optim.adamw import Rates, Settings, adamw
from moetrain.kernels.optim.adamw_float8 import Float8Moments
from moetrain.kernels.optim.muon import muon_momentum, muon_update
from moetrain.kernels.optim.reduction import num_blocks, sum_chunks
from moetrain.kernels.optim.rounding import BLOCK
from moetrain.kernels.quant.groups import QuantFormat, dequantise_groups


@dataclass(frozen=True)
class FakeUpdate:
    """A rank's gathers, sums of gradients and updates, as the config will have them run."""

    config: Config
    device: torch.device
    dtype: torch.dtype
    """The compute dtype."""
    groups: frozenset[tuple[int, int]]
    """(size, this rank's index) of every group of ranks that shards parameters."""
    copies: bool
    """True: ranks of a group exchange gradients by copy engines."""
    shares_region: bool
    """True: blocks share buffers for gathered parameters. Then the update of a parameter writes
    only its master, unless other ranks copy the parameter from this one."""
    micro_batches: int
    """Micro-batches a step."""

    def run_dequantise(self, format: QuantFormat, dtype: torch.dtype) -> None:
        """Run the gather of parameters that are stored as ``format``, in ``dtype``."""
        size, empty = format.unit * BLOCK, partial(torch.empty, device=self.device)
        bytes_WB = empty(1, format.num_bytes(size), dtype=torch.uint8)
        table = format.table(self.device)
        out_N = empty(size, dtype=dtype)
        dequantise_groups(format, format.split(bytes_WB), table, out_N, 0, size)

    def run_update(self, dtype: torch.dtype, storage: torch.dtype, width: int) -> None:
        """Run cast, sums of gradients and update of one shard.

        Args:
            dtype: the dtype in which the parameter is gathered.
            storage: the dtype of the master.
            width: the number of elements in a row of the parameter.
        """
        optim = self.config.optim
        size = 16 * BLOCK  # any: kernels are compiled for all sizes that 16 divides
        empty = partial(torch.empty, device=self.device)
        master_N = empty(size, dtype=storage)
        cast_N = None
        if dtype != master_N.dtype:
            cast_N = empty(size, dtype=dtype)
            sum_chunks(master_N[None], out_N=cast_N)
        gradient_N = empty(size, dtype=getattr(torch, optim.gradient_dtype))
        for ranks, rank in self.groups:
            self._run_sums(gradient_N, dtype, ranks, rank)
        outs = [cast_N, None] if cast_N is not None and self.shares_region else [cast_N]
        settings = Settings(optim.beta1, optim.beta2, optim.eps, self.config.train.seed)
        rates_S = empty(len(Rates._fields))
        if optim.state_dtype == "float8":
            moments = Float8Moments.of_whole((size // width, width), empty)
            for out_N in outs:
                moments.update(
                    master_N,
                    gradient_N,
                    out=out_N,
                    rates_S=rates_S,
                    settings=settings,
                    decays=True,
                )
            return
        avg_N, avg_sq_N = (empty(size, dtype=getattr(torch, optim.state_dtype)) for _ in range(2))
        decays_B = empty(size // BLOCK, dtype=torch.uint8)
        is_narrow = optim.state_dtype == "bfloat16"
        origins_B = empty(size // BLOCK, dtype=torch.int64) if is_narrow else None
        for out_N in outs:
            adamw(
                master_N,
                gradient_N,
                avg_N,
                avg_sq_N,
                rates_S,
                decays_B,
                settings,
                origins_B=origins_B,
                out_N=out_N,
            )
        if optim.name == "muon" and dtype == self.dtype:  # the dtype of blocks' matrices
            momentum, seed = optim.muon_momentum, settings.seed
            muon_momentum(gradient_N, avg_N, rates_S, momentum, seed, origins_B)
            for out_N in outs:
                muon_update(master_N, gradient_N, rates_S, decays_B, out_N)

    def _run_sums(
        self, gradient_N: torch.Tensor, dtype: torch.dtype, ranks: int, rank: int
    ) -> None:
        """Run the sums of a group's gradients, sent in ``dtype``, into ``gradient_N``."""
        config = self.config
        size = len(gradient_N)
        is_kept_back = config.parallel.reduce_at == "last" and ranks > 1
        accumulates = self.micro_batches > 1 and not is_kept_back
        chunks_RN = torch.empty(ranks, size, dtype=dtype, device=self.device)
        squares_B = torch.empty(num_blocks(size), device=self.device)
        by_copies = self.copies and ranks > 1
        # With ``copies`` too, gradients of offloaded parameters are sent by collectives.
        by_collectives = not by_copies or config.optim.offload_fraction > 0
        for accumulate in (False, True) if accumulates else (False,):
            sum_all = partial(
                sum_chunks, chunks_RN, out_N=gradient_N, accumulate=accumulate, squares_B=squares_B
            )
            if by_copies:
                sum_all(own_N=chunks_RN[rank], own=rank)
            if by_collectives:
                sum_all()
