"""Muon for the matrices of blocks, and AdamW for all other parameters."""

from functools import partial

import torch
import torch.distributed as dist

from moetrain.config import OptimSection
from moetrain.kernels.optim.adamw import Rates
from moetrain.kernels.optim.muon import Matrices, MatrixShape, muon_momentum
from moetrain.optim.adamw import AdamW
from moetrain.optim.qk_clip import QKClip, ScaledRows
from moetrain.parallel.collectives import all_reduce, new_all_to_all_single
from moetrain.parallel.fsdp.bucket import Bucket
from moetrain.parallel.fsdp.fsdp import FSDP


class Muon(AdamW):
    """Muon (:mod:`moetrain.kernels.optim.muon`) for the parameters whose rule is orthogonal.

    A step updates the momenta, replaces the gradients of these parameters by orthogonal matrices,
    and then updates bucket by bucket as AdamW does.
    """

    def __init__(
        self,
        fsdp: FSDP,
        config: OptimSection,
        seed: int,
        group: dist.ProcessGroup,
        everyone: dist.ProcessGroup,
        clip: QKClip | None = None,
    ) -> None:
        """Assign the matrices to the ranks of ``group``.

        Args:
            group: the ranks that together hold one copy of the parameters. They exchange parts of
                matrices.
            everyone: all ranks. With ``clip`` they agree on the largest scores.
            clip: scales the weights of queries and keys after each update.
        """
        super().__init__(fsdp, config, seed)
        self._clip = clip
        self._gamma_LH: torch.Tensor | None = None
        """Factor of each attention layer's heads in this step; None without ``clip``."""
        self._reduce_max = partial(all_reduce, op=dist.ReduceOp.MAX, group=everyone)
        self._scaled: dict[int, ScaledRows] = {}
        """The rows that QK-clip scales, by the member's id."""
        if clip is not None:
            for name, member in fsdp.members.items():
                if name in clip.scaled:
                    rows = clip.scaled[name].part(member.layout.box[0], fsdp.device)
                    self._scaled[id(member)] = rows
        self._members = [m for m in fsdp.members.values() if m.rule.is_orthogonal]
        self._matrices = Matrices(
            [
                MatrixShape(m.layout.shape[-2], m.layout.shape[-1], m.rule.stacked)
                for m in self._members
            ],
            [
                [None if m.rule.style == "expert" else m.layout.box_of(rank) for m in self._members]
                for rank in dist.get_process_group_ranks(group)
            ],
            rank=group.rank(),
            exchange=partial(new_all_to_all_single, group=group),
        )

    def _before_updates(self, rates_S: torch.Tensor) -> None:
        # 1. Update the momenta, and overwrite the gradients with the matrices to orthogonalise.
        for bucket in self.fsdp.buckets:
            if not bucket.members[0].rule.is_orthogonal:
                continue
            assert bucket.gradient_N is not None
            (momentum_N,) = self._moments[id(bucket)]
            muon_momentum(
                bucket.gradient_N,
                momentum_N,
                rates_S,
                momentum=self.config.muon_momentum,
                seed=self.settings.seed,
                origins_B=self._tables[id(bucket)].origins_B,
            )
        # 2. Orthogonalise, over the ranks that share matrices.
        gradients: list[torch.Tensor] = []
        for member in self._members:
            assert member.local.grad is not None
            gradients.append(member.local.grad)
        self._matrices.orthogonalise(
            gradients,
            iterations=self.config.muon_iterations,
            eps=self.config.eps,
            scale=self.config.muon_scale,
        )
        # 3. QK-clip: compute factors from the largest scores over all ranks; 1 in a skipped step.
        if self._clip is not None:
            gamma_LH = self._clip.take(self._reduce_max)
            is_skipped = Rates.unpack(rates_S).skipped != 0
            self._gamma_LH = torch.where(is_skipped, 1.0, gamma_LH)

    def _after_update(self, bucket: Bucket, out_N: torch.Tensor | None) -> None:
        for member in bucket.members:
            rows = self._scaled.get(id(member))
            if rows is None:
                continue
            assert self._gamma_LH is not None
            factor_R = rows.factor(self._gamma_LH)
            member.local.mul_(factor_R.view(-1, *[1] * (member.local.dim() - 1)))
            if out_N is not None:
                member.piece_of(out_N).copy_(member.local)
