"""Host memory that a GPU copies to and from at the speed of the link."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from moetrain.config.sources import RunFailed


class HostMemory:
    """Bytes of host memory (:attr:`bytes`, uint8, of any content), pinned if ``device`` is a GPU.

    They are kept: pinning takes far longer than a copy.
    """

    def __init__(self, device: torch.device, wanted_by: str, remedy: str) -> None:
        """``wanted_by``, ``remedy``: for the message where there is not as much pinned memory."""
        self.device, self.wanted_by, self.remedy = device, wanted_by, remedy
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._unpin: Callable[[], object] = lambda: None

    def reserve(self, size: int) -> torch.Tensor:
        """:attr:`bytes`, at least ``size``; if they are more than before, others than before.

        Raises:
            RunFailed: the system does not give as much pinned memory.
        """
        if size <= self.bytes.numel():
            return self.bytes
        self._unpin()
        self.bytes = torch.empty(0, dtype=torch.uint8)  # before there is more
        memory = torch.empty(size, dtype=torch.uint8)
        if self.device.type == "cuda":
            # Not torch's own pinned memory, which comes in powers of two.
            memory.zero_()  # in all threads; pinning would touch every page in one
            address = memory.data_ptr()
            code = _cudart().cudaHostRegister(address, size, 0)
            if int(code) != 0:
                raise RunFailed(
                    f"{self.wanted_by} takes {size / 2**30:.1f} GiB of pinned host memory in this "
                    f"process, which cannot be had (CUDA error {int(code)}); {self.remedy}"
                )
            self._unpin = weakref.finalize(self, lambda: _cudart().cudaHostUnregister(address))
            self._unpin.atexit = False
        self.bytes = memory
        return memory


def _cudart() -> Any:
    return torch.cuda.cudart()  # None, says its type, where there is no CUDA
