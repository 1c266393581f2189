"""Moments in host memory for a while."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moetrain.optim.adamw import MOMENTS


class HostMoments:
    """Moments in host memory for a while, so that their device memory serves something else.

    A moment stays the tensor that the optimizer knows, and its storage the same object: what comes
    and goes is the storage's memory, which may lie elsewhere afterwards. Host buffers (pinned for a
    GPU) are kept, for pinning takes longer than a copy.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.away: list[torch.Tensor] = []
        """Moments whose values are in host memory alone."""
        self._hosts: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def leave(self) -> None:
        """Copy every moment to host memory and free its own."""
        known = {state[key] for state in self.optimizer.state.values() for key in MOMENTS}
        self._hosts = {moment: host for moment, host in self._hosts.items() if moment in known}
        for moment in known:
            if moment not in self._hosts:
                self._hosts[moment] = torch.empty_like(
                    moment, device="cpu", pin_memory=moment.is_cuda
                )
            self._hosts[moment].copy_(moment, non_blocking=True)
        self.away = list(known)
        _wait(self.away)
        for moment in self.away:
            moment.untyped_storage().resize_(0)

    @torch.no_grad()
    def come_back(self) -> None:
        """Inverse of :meth:`leave`."""
        for moment in self.away:
            moment.untyped_storage().resize_(moment.nbytes)
            moment.copy_(self._hosts[moment], non_blocking=True)
        _wait(self.away)  # before anybody changes the host's copies
        self.away = []


def _wait(tensors: Sequence[torch.Tensor]) -> None:
    """For copies to and from them."""
    if tensors and tensors[0].is_cuda:
        torch.cuda.synchronize(tensors[0].device)
