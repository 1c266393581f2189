"""Memory besides torch's allocators: pinned on the host, and by CUDA's driver on the device.

The driver's functions are called through ctypes, since torch has them inside its allocator alone,
or not at all:

    AddressRange        addresses that stay, behind which memory is put and taken away again
    DeviceBytes         counts memory that did not come from torch's allocator
    on_words            streams write and wait for words of memory, which takes no SM
"""

import ctypes
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from ctypes import (
    POINTER,
    byref,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_uint64,
    c_void_p,
)
from functools import cache
from typing import Any, ClassVar

import torch

from moetrain.config.sources import RunFailed

# ---- on the host --------------------------------------------------------------------------------


class HostMemory:
    """Bytes of host memory (:attr:`bytes`, uint8, of any content), pinned if ``device`` is a GPU.

    They are kept until the object goes: pinning takes far longer than a copy.
    """

    def __init__(
        self,
        device: torch.device,
        wanted_by: str,
        remedy: str,
    ) -> None:
        # The words are for the message where pinned memory is lacking.
        self.device, self.wanted_by, self.remedy = device, wanted_by, remedy
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._unpin: Callable[[], object] = lambda: None

    def reserve(self, size: int) -> torch.Tensor:
        """Give :attr:`bytes`, at least ``size``; where that is more than before, new ones.

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


class LateNumbers:
    """Numbers that the device is still computing; reading waits for them and nothing later."""

    def __init__(self, numbers: torch.Tensor) -> None:
        on_cuda = numbers.device.type == "cuda"
        self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=on_cuda)
        self._host.copy_(numbers, non_blocking=True)
        self._copied = torch.cuda.Event() if on_cuda else None
        if self._copied is not None:
            self._copied.record()

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`read` returns, or raises, at once."""
        try:
            return self._copied is None or self._copied.query()
        except RuntimeError:  # the device has failed, which reading tells
            return True

    def read(self) -> torch.Tensor:
        """Return the numbers, on the host; RuntimeError: the device has failed."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


def _cudart() -> Any:
    return torch.cuda.cudart()  # None, says its type, where there is no CUDA


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
    """Tell whether ``device`` has virtual memory management; some virtual GPUs have not."""
    if device.type != "cuda":
        return False
    torch.cuda.init()
    found = c_int()
    _call_driver("cuDeviceGetAttribute", byref(found), _HAS_VIRTUAL_MEMORY, _number(device))
    return bool(found.value)


def _number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class DeviceBytes:
    """Counts memory that did not come from torch's allocator, by device number.

    It is as global as that allocator, which does not count what the driver gives to others.
    """

    _now: ClassVar[Counter[int]] = Counter()
    _peaks: ClassVar[Counter[int]] = Counter()
    """The most that both counted together until :attr:`_now` last changed."""

    @classmethod
    def peak(cls, device: torch.device) -> int:
        """Give the most memory that torch's allocator and all others had on ``device``."""
        number = _number(device)
        return max(cls._peaks[number], torch.cuda.max_memory_allocated(number) + cls._now[number])

    @classmethod
    def forget_peak(cls, device: torch.device) -> None:
        """Start :meth:`peak` anew."""
        cls._peaks[_number(device)] = 0
        torch.cuda.reset_peak_memory_stats(device)

    @classmethod
    def add(cls, device: torch.device, num_bytes: int) -> None:
        """Count memory got from the driver; negative: given back. Starts torch's peak anew."""
        number = _number(device)
        cls._peaks[number] = cls.peak(device)
        torch.cuda.reset_peak_memory_stats(number)
        cls._now[number] += num_bytes


class AddressRange:
    """As many addresses of ``device`` as it has memory, without memory behind them at first.

    Sizes and places are multiples of :attr:`granularity`. The addresses and the memory are freed
    with the last tensor.
    """

    def __init__(self, device: torch.device) -> None:
        number = _number(device)
        self.device = device = torch.device("cuda", number)
        torch.empty(1, device=device)  # the driver's functions take a device that is in use
        location = _Location(_ON_DEVICE, number)
        self._kind = _Allocation(_PINNED, 0, location)
        self._access = _Access(location, _READ_AND_WRITE)
        granularity = c_size_t()
        _call_driver("cuMemGetAllocationGranularity", byref(granularity), byref(self._kind), 0)
        self.granularity = granularity.value
        size = torch.cuda.get_device_properties(number).total_memory
        self.size = -(-size // self.granularity) * self.granularity
        base = c_uint64()
        _call_driver("cuMemAddressReserve", byref(base), self.size, 0, 0, 0)
        self.base = base.value
        self._backed: dict[int, int] = {}
        """The sizes of parts with memory, by their places."""
        gone = weakref.finalize(self, _give_up, device, self.base, self.size, self._backed)
        gone.atexit = False  # the driver sees to it

    def back(self, start: int, size: int) -> None:
        """Put memory, of any content, behind ``size`` bytes from ``start``, unless it is there.

        Raises:
            torch.OutOfMemoryError: there is too little, even without what torch's allocator keeps.
        """
        if start in self._backed:  # a reload that failed came this far
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
            _call_driver("cuMemRelease", handle)  # what is mapped stays until it is no longer
        self._backed[start] = size
        DeviceBytes.add(self.device, size)
        _call_driver("cuMemSetAccess", address, size, byref(self._access), 1)

    def free(self, start: int) -> None:
        """Invert :meth:`back` for the same ``start``; nothing on the device may still use it."""
        size = self._backed.pop(start)
        _call_driver("cuMemUnmap", self.base + start, size)
        DeviceBytes.add(self.device, -size)

    def tensor(self, start: int, size: int) -> torch.Tensor:
        """Give the bytes there as uint8; they must have memory now."""
        return torch.as_tensor(_Span(self, start, size), device=self.device)


class _Span:
    """Bytes of a range by the interface torch reads; the tensor keeps it, and so the range."""

    def __init__(self, owner: AddressRange, start: int, size: int) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (owner.base + start, False),
            "strides": None,
            "version": 3,
        }


def _give_up(
    device: torch.device,
    base: int,
    size: int,
    backed: dict[int, int],
) -> None:
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
    """Return a call that lets the current stream do ``operations``, one after another.

    Each is ``wait`` or ``write``, the word, and a value.

    A stream writes a value to a word (int32 of one element, here or in a peer's memory) once every
    GPU sees all work before it, and waits until a word of this device is at least a value. The call
    raises RuntimeError if the driver refuses. CUDA graphs may hold it.
    """
    # A flag of 0 to wait (CU_STREAM_WAIT_VALUE_GEQ): the difference, as int32, is 0 or more.
    each = [
        _OnWord(_OPERATIONS[name], word.data_ptr(), value & 0xFFFFFFFF, 0, 0, 0)
        for name, word, value in operations
    ]
    array = (_OnWord * len(each))(*each)

    def call() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        _call_driver("cuStreamBatchMemOp_v2", stream, len(each), array, 0)

    return call
