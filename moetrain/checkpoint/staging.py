"""Copies of a rank's state in host memory, made while the next step already runs.

On CUDA the copies go over a stream of their own into pinned memory, which is kept for the next
save: pinning takes far longer than a copy. They take as much of it as the rank's parts are long.
Whoever is about to change the state must let :meth:`Staging.hold_changes` come first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from moetrain.parallel.fsdp.bucket import aligned
from moetrain.parallel.layout import TensorSlice
from moetrain.parallel.offload.pinned import HostMemory


class Staging:
    """Host memory for one save at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory = HostMemory(device, "checkpoint.asynchronous", "set it no")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None

    def reserve(self, size: int) -> None:
        """Have ``size`` bytes; what was copied before is lost.

        Raises:
            RunFailed: the system does not give as much pinned memory.
        """
        self._memory.reserve(size)

    def copy(
        self, groups: Mapping[str, Mapping[str, TensorSlice]]
    ) -> tuple[dict[str, dict[str, TensorSlice]], Callable[[], object]]:
        """``groups`` as they are at this point of the device's work, in this memory.

        Valid until the next copy, and once the function that comes with them has returned.
        """
        parts = [part for named in groups.values() for part in named.values()]
        self.reserve(sum(aligned(part.tensor.nbytes) for part in parts))
        start = 0
        staged: dict[str, dict[str, TensorSlice]] = {}
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for group, named in groups.items():
                staged[group] = {}
                for name, part in named.items():
                    tensor = part.tensor.detach()
                    flat = self._memory.bytes[start : start + tensor.nbytes].view(tensor.dtype)
                    host = flat.view(tensor.shape).copy_(tensor, non_blocking=True)
                    staged[group][name] = part._replace(tensor=host)
                    start += aligned(tensor.nbytes)
        if self._stream is None:
            return staged, lambda: None
        self._copied = copied = torch.cuda.Event()
        copied.record(self._stream)
        return staged, copied.synchronize

    def hold_changes(self) -> None:
        """Let what the device is given from here on come after the copies."""
        copied, self._copied = self._copied, None
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)
