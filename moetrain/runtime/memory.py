"""Memory besides torch's allocators: pinned on the host, and from CUDA's driver on the device.

The driver's functions are called through ctypes, since torch uses them only inside its allocator,
or not at all:

    AddressRange        addresses that stay, while memory behind them is mapped and unmapped
    DeviceBytes         counts memory that did not come from torch's allocator
    on_words            stream memory operations: signal and wait without occupying an SM
"""

import ctypes
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any, ClassVar

import torch

from moetrain.config.sources import RunFailed

# ---- on the host --------------------------------------------------------------------------------


class HostMemory:
    """Host memory (:attr:`bytes`, uint8, of any content), pinned if ``device`` is a GPU.

    The memory lives as long as this object, because pinning takes far longer than a copy.

    Args:
        wanted_by: who takes the memory, for the error.
        remedy: what to do about it, for the error.
    """

    def __init__(self, device: torch.device, wanted_by: str, remedy: str) -> None:
        self.device, self.wanted_by, self.remedy = device, wanted_by, remedy
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._unpin: Callable[[], object] = lambda: None

    def reserve(self, size: int) -> torch.Tensor:
        """Return :attr:`bytes`, which then has at least ``size`` bytes.

        If it was smaller, it is replaced by new memory, and its content is lost.

        Raises:
            RunFailed: the system cannot pin that much memory.
        """
        if size <= self.bytes.numel():
            return self.bytes
        self._unpin()
        self.bytes = torch.empty(0, dtype=torch.uint8)  # freed before more is allocated
        memory = torch.empty(size, dtype=torch.uint8)
        if self.device.type == "cuda":
            # Not torch's own pinned memory, whose sizes are rounded up to powers of two.
            memory.zero_()  # by all threads; pinning would touch every page in one thread
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


class LateValues:
    """Values that the device is still computing.

    :meth:`read` waits for them, but not for work that was queued after them.
    """

    def __init__(self, values: torch.Tensor) -> None:
        on_cuda = values.device.type == "cuda"
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_cuda)
        self._host.copy_(values, non_blocking=True)
        self._copied = torch.cuda.Event() if on_cuda else None
        if self._copied is not None:
            self._copied.record()

    @property
    def is_ready(self) -> bool:
        """True if :meth:`read` returns, or raises, at once."""
        try:
            return self._copied is None or self._copied.query()
        except RuntimeError:  # the device has failed, and reading raises
            return True

    def read(self) -> torch.Tensor:
        """Return the values, on the host. Raises RuntimeError if the device has failed."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


def _cudart() -> Any:
    return torch.cuda.cudart()  # typed as None where there is no CUDA


# ---- CUDA's driver ------------------------------------------------------------------------------

_PINNED, _ON_DEVICE, _READ_AND_WRITE = 1, 1, 3
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE"""
_OUT_OF_MEMORY = 2
_HAS_VIRTUAL_MEMORY = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"""


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Allocation(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("flags", c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


class _OnWord(ctypes.Structure):
    """CUstreamBatchMemOpParams."""

    _fields_ = (
        ("operation", c_uint),
        ("address", c_uint64),
        ("value", c_uint64),
        ("flags", c_uint),
        ("alias", c_uint64),
        ("unused", c_uint64),
    )


_SIGNATURES = {
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuGetErrorString": (c_int, POINTER(ctypes.c_char_p)),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_Allocation), c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(_Allocation), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(_Access), c_size_t),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuStreamBatchMemOp_v2": (c_void_p, c_uint, POINTER(_OnWord), c_uint),
}


@cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    for name, types in _SIGNATURES.items():
        getattr(library, name).argtypes = types
    return library


def _call_driver(name: str, *arguments: Any) -> None:
    """Call the driver's function ``name``. Raises RuntimeError, or torch.OutOfMemoryError."""
    code = getattr(_driver(), name)(*arguments)
    if code == 0:
        return
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(code, byref(text))
    kind = torch.OutOfMemoryError if code == _OUT_OF_MEMORY else RuntimeError
    raise kind(f"{name}: CUDA error {code}, {(text.value or b'unknown').decode()}")


@cache
def can_map(device: torch.device) -> bool:
    """Return True if ``device`` has virtual memory management; some virtual GPUs do not."""
    if device.type != "cuda":
        return False
    torch.cuda.init()
    found = c_int()
    _call_driver("cuDeviceGetAttribute", byref(found), _HAS_VIRTUAL_MEMORY, _index(device))
    return bool(found.value)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class DeviceBytes:
    """Counts memory that did not come from torch's allocator, by device index.

    The counts are global, like that allocator's own, which do not include this memory.
    """

    _now: ClassVar[Counter[int]] = Counter()
    _peaks: ClassVar[Counter[int]] = Counter()
    """The largest sum of :attr:`_now` and torch's allocated bytes, up to the last change of
    :attr:`_now`."""

    @classmethod
    def peak(cls, device: torch.device) -> int:
        """Return the most bytes on ``device`` at once: torch's and those of :meth:`add`."""
        index = _index(device)
        return max(cls._peaks[index], torch.cuda.max_memory_allocated(index) + cls._now[index])

    @classmethod
    def forget_peak(cls, device: torch.device) -> None:
        """Reset :meth:`peak`."""
        cls._peaks[_index(device)] = 0
        torch.cuda.reset_peak_memory_stats(device)

    @classmethod
    def add(cls, device: torch.device, num_bytes: int) -> None:
        """Count memory taken from the driver, or given back if negative. Resets torch's peak."""
        index = _index(device)
        cls._peaks[index] = cls.peak(device)
        torch.cuda.reset_peak_memory_stats(index)
        cls._now[index] += num_bytes


class AddressRange:
    """A range of as many addresses as ``device`` has memory; memory is mapped on demand.

    Sizes and starts are in bytes, multiples of :attr:`granularity`. The addresses and the memory
    are freed once this object and all of its tensors are gone.
    """

    def __init__(self, device: torch.device) -> None:
        index = _index(device)
        self.device = device = torch.device("cuda", index)
        torch.empty(1, device=device)  # the driver's functions take a device that is in use
        location = _Location(_ON_DEVICE, index)
        self._kind = _Allocation(_PINNED, 0, location)
        self._access = _Access(location, _READ_AND_WRITE)
        granularity = c_size_t()
        _call_driver("cuMemGetAllocationGranularity", byref(granularity), byref(self._kind), 0)
        self.granularity = granularity.value
        size = torch.cuda.get_device_properties(index).total_memory
        self.size = -(-size // self.granularity) * self.granularity
        base = c_uint64()
        _call_driver("cuMemAddressReserve", byref(base), self.size, 0, 0, 0)
        self.base = base.value
        self._backed: dict[int, int] = {}
        """The sizes of parts with memory, by their starts."""
        release = weakref.finalize(self, _release, device, self.base, self.size, self._backed)
        release.atexit = False  # the driver frees it

    def back(self, start: int, size: int) -> None:
        """Map memory, of any content, behind ``size`` bytes from ``start``, unless it is mapped.

        Raises:
            torch.OutOfMemoryError: there is too little, even after torch's allocator has freed its
                cache.
        """
        if start in self._backed:  # mapped by a reload that failed later
            return
        handle = c_uint64()
        address = self.base + start
        try:
            _call_driver("cuMemCreate", byref(handle), size, byref(self._kind), 0)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            _call_driver("cuMemCreate", byref(handle), size, byref(self._kind), 0)
        try:
            _call_driver("cuMemMap", address, size, 0, handle, 0)
        finally:
            _call_driver("cuMemRelease", handle)  # mapped memory stays until it is unmapped
        self._backed[start] = size
        DeviceBytes.add(self.device, size)
        _call_driver("cuMemSetAccess", address, size, byref(self._access), 1)

    def free(self, start: int) -> None:
        """Unmap what :meth:`back` mapped at ``start``; nothing on the device may still use it."""
        size = self._backed.pop(start)
        _call_driver("cuMemUnmap", self.base + start, size)
        DeviceBytes.add(self.device, -size)

    def tensor(self, start: int, size: int) -> torch.Tensor:
        """Return ``size`` bytes from ``start`` as uint8 [size]; memory must be mapped there."""
        return torch.as_tensor(_Span(self, start, size), device=self.device)


class _Span:
    """Bytes of a range, as torch reads them. The tensor keeps the span, and so the range, alive."""

    def __init__(self, owner: AddressRange, start: int, size: int) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (owner.base + start, False),
            "strides": None,
            "version": 3,
        }


def _release(device: torch.device, base: int, size: int, backed: dict[int, int]) -> None:
    torch.cuda.synchronize(device)
    for start, length in backed.items():
        _call_driver("cuMemUnmap", base + start, length)
        DeviceBytes.add(device, -length)
    _call_driver("cuMemAddressFree", base, size)


# ---- words of memory ----------------------------------------------------------------------------


_WAIT, _WRITE = 1, 2
"""CU_STREAM_MEM_OP_WAIT_VALUE_32 and CU_STREAM_MEM_OP_WRITE_VALUE_32"""
_OPERATIONS = {"wait": _WAIT, "write": _WRITE}


def on_words(operations: Sequence[tuple[str, torch.Tensor, int]]) -> Callable[[], None]:
    """Return a call that enqueues ``operations`` on the current stream, in this order.

    A word is an int32 tensor of one element. ``write`` sets a word, here or in a peer's memory, to
    the value once every GPU sees all work before it. ``wait`` waits until a word of this device, or
    of pinned host memory, is at least the value. The call raises RuntimeError if the driver
    refuses. CUDA graphs may capture it.

    Args:
        operations: (``wait`` or ``write``, word, value) of each.
    """
    # Waits have the flag 0 (CU_STREAM_WAIT_VALUE_GEQ): the difference, as int32, is 0 or more.
    each = [
        _OnWord(_OPERATIONS[name], word.data_ptr(), value & 0xFFFFFFFF, 0, 0, 0)
        for name, word, value in operations
    ]
    array = (_OnWord * len(each))(*each)

    def call() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        _call_driver("cuStreamBatchMemOp_v2", stream, len(each), array, 0)

    return call
