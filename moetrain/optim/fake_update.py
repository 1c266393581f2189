"""Runs an update without a device, to find its launches (:mod:`moetrain.runtime.ahead`)."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from moetrain.config import Config
from moetrain.kernels.optim.adamw import Settings, adamw
from moetrain.kernels.optim.adamw_float8 import Float8Moments
from moetrain.kernels.optim.muon import muon_momentum, muon_update
from moetrain.kernels.optim.reduction import num_blocks, sum_chunks
from moetrain.kernels.optim.rounding import BLOCK
from moetrain.kernels.quant.groups import Form, widen_groups


@dataclass(frozen=True)
class FakeUpdate:
    """An update of a rank's shards, and where it will run."""

    config: Config
    device: torch.device
    dtype: torch.dtype
    """The compute dtype."""
    groups: frozenset[tuple[int, int]]
    """For every group of ranks that shards parameters: its size, and this rank's index in it."""
    copies: bool
    """Whether gradients travel among the ranks of a group by copy engines."""
    takes_turns: bool
    """Whether blocks' parameters are gathered in turns. Then updates of parameters that no peer
    copies write masters alone."""
    micro_batches: int
    """How many micro-batches a step has."""

    def run_widening(self, form: Form, dtype: torch.dtype) -> None:
        """Run the gather of parameters that are stored as ``form``, in ``dtype``."""
        size, empty = form.unit * BLOCK, partial(torch.empty, device=self.device)
        bytes_WB = empty(1, form.num_bytes(size), dtype=torch.uint8)
        table = form.table(self.device)
        out_N = empty(size, dtype=dtype)
        widen_groups(form, form.split(bytes_WB), table, out_N, 0, size)

    def run_update(
        self,
        dtype: torch.dtype,
        storage: torch.dtype,
        width: int,
    ) -> None:
        """Run the cast, the sums of gradients and updates, for a shard gathered in ``dtype``."""
        optim = self.config.optim
        size = 16 * BLOCK
        empty = partial(torch.empty, device=self.device)
        master_N = empty(size, dtype=storage)
        cast_N = None
        if dtype != master_N.dtype:
            cast_N = empty(size, dtype=dtype)
            sum_chunks(master_N[None], out_N=cast_N)
        gradient_N = empty(size, dtype=getattr(torch, optim.gradient_dtype))
        for ranks, rank in self.groups:
            self._run_sums(gradient_N, dtype, ranks, rank)
        outs = [cast_N, None] if cast_N is not None and self.takes_turns else [cast_N]
        settings = Settings(optim.beta1, optim.beta2, optim.eps, self.config.train.seed)
        if optim.state_dtype == "float8":
            moments = Float8Moments.of_whole((size // width, width), empty)
            for out_N in outs:
                moments.update(master_N, gradient_N, out_N, empty(7), settings, True)
            return
        avg_N, avg_sq_N = (empty(size, dtype=getattr(torch, optim.state_dtype)) for _ in range(2))
        decays_B = empty(size // BLOCK, dtype=torch.uint8)
        is_narrow = optim.state_dtype == "bfloat16"
        origins_B = empty(size // BLOCK, dtype=torch.int64) if is_narrow else None
        tensors = (master_N, gradient_N, avg_N, avg_sq_N, empty(7))
        for out_N in outs:
            adamw(*tensors, decays_B, settings, origins_B, out_N)
        if optim.name == "muon" and dtype == self.dtype:  # that of blocks' matrices
            how = (tensors[-1], optim.muon_momentum, settings.seed, origins_B)
            muon_momentum(gradient_N, avg_N, *how)
            for out_N in outs:
                muon_update(master_N, gradient_N, tensors[-1], decays_B, out_N)

    def _run_sums(
        self,
        gradient_N: torch.Tensor,
        dtype: torch.dtype,
        ranks: int,
        rank: int,
    ) -> None:
        config = self.config
        size = len(gradient_N)
        is_kept_back = config.parallel.reduce_at == "last" and ranks > 1
        accumulates = self.micro_batches > 1 and not is_kept_back
        chunks_RN = torch.empty(ranks, size, dtype=dtype, device=self.device)
        ways: list[dict[str, Any]] = []
        if self.copies and ranks > 1:
            ways.append({"own_N": chunks_RN[rank], "own": rank})
        if not ways or config.optim.offload_fraction:  # what the host keeps travels by collectives
            ways.append({})
        squares_B = torch.empty(num_blocks(size), device=self.device)
        for own in ways:
            for accumulate in (False, True)[: 1 + accumulates]:
                how = {"accumulate": accumulate, "squares_B": squares_B}
                sum_chunks(chunks_RN, out_N=gradient_N, **how, **own)
