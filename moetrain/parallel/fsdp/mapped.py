"""Reserve addresses on a GPU, and put memory behind them or take it away.

This is CUDA's virtual memory management (driver API, section "Virtual Memory Management"), called
through ctypes, since torch has it inside its allocator alone. Tensors at the addresses are ordinary
ones whose storage cannot be resized, and must not be touched while they have no memory: the device
would fault.

Left out on purpose: memory that other processes or devices may open.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import Counter
from ctypes import POINTER, byref, c_int, c_size_t, c_ubyte, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch

_PINNED, _ON_DEVICE, _READ_AND_WRITE = 1, 1, 3
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE"""
_OUT_OF_MEMORY = 2
_HAS_VIRTUAL_MEMORY = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"""

_mapped: Counter[int] = Counter()
"""Bytes behind all ranges by device number; torch's allocator, which does not count them, is just
as global."""
_peaks: Counter[int] = Counter()
"""The most that both counted together until :data:`_mapped` last changed, by device number."""


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
}


@cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    for name, types in _SIGNATURES.items():
        getattr(library, name).argtypes = types
    return library


def _call(name: str, *arguments: Any) -> None:
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
    _call("cuDeviceGetAttribute", byref(found), _HAS_VIRTUAL_MEMORY, _number(device))
    return bool(found.value)


def peak_bytes(device: torch.device) -> int:
    """Give the most memory that torch's allocator and ranges together had on ``device``."""
    number = _number(device)
    now = torch.cuda.max_memory_allocated(number) + _mapped[number]
    return max(_peaks[number], now)


def count_bytes(device: torch.device, num_bytes: int) -> None:
    """Let :func:`peak_bytes` count memory got elsewhere from the driver; negative: given back."""
    _change(_number(device), num_bytes)


def forget_peak(device: torch.device) -> None:
    """Start :func:`peak_bytes` anew."""
    _peaks[_number(device)] = 0
    torch.cuda.reset_peak_memory_stats(device)


def _change(number: int, num_bytes: int) -> None:
    """Count mapped bytes (negative: unmapped) and start torch's own peak anew."""
    _peaks[number] = peak_bytes(torch.device("cuda", number))
    torch.cuda.reset_peak_memory_stats(number)
    _mapped[number] += num_bytes


def _number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class AddressRange:
    """As many addresses of ``device`` as it has memory, without memory behind them at first.

    Sizes and places are multiples of :attr:`granularity`. The addresses and the memory are freed
    with the last tensor.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, number = device, _number(device)
        torch.empty(1, device=device)  # the driver's functions take a device that is in use
        location = _Location(_ON_DEVICE, number)
        self._kind = _Allocation(_PINNED, 0, location)
        self._access = _Access(location, _READ_AND_WRITE)
        granularity = c_size_t()
        _call("cuMemGetAllocationGranularity", byref(granularity), byref(self._kind), 0)
        self.granularity = granularity.value
        size = torch.cuda.get_device_properties(number).total_memory
        self.size = -(-size // self.granularity) * self.granularity
        base = c_uint64()
        _call("cuMemAddressReserve", byref(base), self.size, 0, 0, 0)
        self.base = base.value
        self._backed: dict[int, int] = {}
        """The sizes of parts with memory, by their places."""
        gone = weakref.finalize(self, _give_up, number, self.base, self.size, self._backed)
        gone.atexit = False  # the driver sees to it

    def back(self, start: int, size: int) -> None:
        """Put memory, of any content, behind ``size`` bytes from ``start``.

        Raises:
            torch.OutOfMemoryError: there is too little, even without what torch's allocator keeps.
        """
        handle, address = c_uint64(), self.base + start
        try:
            _call("cuMemCreate", byref(handle), size, byref(self._kind), 0)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            _call("cuMemCreate", byref(handle), size, byref(self._kind), 0)
        try:
            _call("cuMemMap", address, size, 0, handle, 0)
        finally:
            _call("cuMemRelease", handle)  # what is mapped stays until it is no longer
        self._backed[start] = size
        _change(_number(self.device), size)
        _call("cuMemSetAccess", address, size, byref(self._access), 1)

    def free(self, start: int) -> None:
        """Invert :meth:`back` for the same ``start``; nothing on the device may still use it."""
        size = self._backed.pop(start)
        _call("cuMemUnmap", self.base + start, size)
        _change(_number(self.device), -size)

    def is_backed(self, start: int) -> bool:
        """Tell whether :meth:`back` has put memory there."""
        return start in self._backed

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


def _give_up(number: int, base: int, size: int, backed: dict[int, int]) -> None:
    torch.cuda.synchronize(number)
    for start, length in backed.items():
        _call("cuMemUnmap", base + start, length)
        _change(number, -length)
    _call("cuMemAddressFree", base, size)
