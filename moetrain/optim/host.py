"""AdamW of masters in host memory (``optim.offload_fraction``), while the device goes on.

A thread waits for the clip and for gradients, which are on their way down, updates bucket by bucket
in the order in which the next forward asks for them, and sends weights up. Training waits, if it
must, where a bucket is gathered: the device's own updates, and the forward of what comes before,
hide the rest. For that the first gather after an update is started after the block before it,
whether the update is done or not: every rank must start collectives in the same order, and hosts
are not equally fast. An update that was done early thus leaves one gather uncovered, once a step;
to gather before the block would leave the device without work for as long as a late update takes.
The update is torch's fused AdamW, vectorised and on all of torch's threads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from moetrain.config import OptimSection
from moetrain.parallel.fsdp.bucket import Bucket

Moments = tuple[torch.Tensor, torch.Tensor]


class HostUpdates:
    """Updates ``buckets``, in this order; all of them are :attr:`Bucket.host`'s."""

    def __init__(self, buckets: Sequence[Bucket], config: OptimSection) -> None:
        self.buckets, self.config = buckets, config
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moetrain-optim")

    def start(self, rates_S: torch.Tensor, lr: float, moments: Sequence[Moments]) -> None:
        """Begin an update with :func:`~moetrain.kernels.optim.adamw.adamw_rates` (on the device).

        Every gradient must have been taken. ``moments``: flat, of each bucket.
        """
        host_S, copied = rates_S.to("cpu", non_blocking=True), None
        if rates_S.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        for bucket, flat in zip(self.buckets, moments, strict=True):
            assert bucket.host is not None
            assert bucket.host.has_gradient
            task = (bucket, flat, host_S, copied, lr)
            bucket.host.update = self._thread.submit(self._update, *task)

    @torch.no_grad()
    def _update(
        self,
        bucket: Bucket,
        flat: Moments,
        rates_S: torch.Tensor,
        copied: torch.cuda.Event | None,
        lr: float,
    ) -> None:
        host = bucket.host
        assert host is not None
        if copied is not None:  # after which the device no longer uses the weights of before
            copied.synchronize()
        clip, *_, skipped, step = rates_S.tolist()
        host.await_gradient()
        if skipped:
            return
        start = time.perf_counter()
        for decays in (False, True):
            pieces = [
                [member.local, *(member.piece_of(x_N) for x_N in (host.gradient_N, *flat))]
                for member in bucket.members
                if member.rule.decay == decays and member.local.numel()
            ]
            if not pieces:
                continue
            params, gradients, averages, squares = map(list, zip(*pieces, strict=True))
            torch._fused_adamw_(
                params,
                gradients,
                averages,
                squares,
                [],
                [torch.tensor(step)] * len(params),
                lr=lr,
                beta1=self.config.beta1,
                beta2=self.config.beta2,
                weight_decay=self.config.weight_decay if decays else 0.0,
                eps=self.config.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=torch.tensor(1 / clip),
            )
        host.send()
        bucket.mark_fresh()
        host.link.busy_seconds += time.perf_counter() - start
