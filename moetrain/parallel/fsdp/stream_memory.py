"""Words of GPU memory that streams write and wait for, without a kernel.

A kernel that waits for another GPU holds a multiprocessor for as long, and what computes beside it
goes on with one less: a grouped product, which begins one program on each, takes until that one is
free. These are done by what feeds the GPU its work, so that waiting takes nothing from anybody.

Nothing times out here: a rank that died leaves the others waiting until who started them ends them,
or, where nobody did, torch's monitor of NCCL: some time after its timeout, by SIGABRT.

Method: CUDA's stream memory operations (the driver's cuStreamWriteValue32, cuStreamWaitValue32).
"""

from __future__ import annotations

import ctypes
import functools

import torch

_AT_LEAST = 0
"""CU_STREAM_WAIT_VALUE_GEQ: the difference, as int32, is 0 or more; so counts may wrap around."""


def write_word(word: torch.Tensor, value: int) -> None:
    """Let the current stream write ``value`` to ``word`` when all before it is done, and is to be
    seen by every GPU.

    Args:
        word: int32 of one element, in the memory of this device or of a peer.

    Raises:
        RuntimeError: the driver says no.
    """
    _call("cuStreamWriteValue32_v2", word, value, 0)


def wait_for_word(word: torch.Tensor, value: int) -> None:
    """Let the current stream go on when ``word``, int32 of one element in the memory of this
    device, is at least ``value``.

    Raises:
        RuntimeError: the driver says no.
    """
    _call("cuStreamWaitValue32_v2", word, value, _AT_LEAST)


def _call(name: str, word: torch.Tensor, value: int, flags: int) -> None:
    stream = torch.cuda.current_stream().cuda_stream
    arguments = ctypes.c_void_p(stream), ctypes.c_uint64(word.data_ptr())
    error = _driver()[name](*arguments, ctypes.c_uint32(value & 0xFFFFFFFF), flags)
    if error:
        raise RuntimeError(f"{name} failed: CUresult {error}")


@functools.cache
def _driver() -> ctypes.CDLL:
    """The one that torch has loaded."""
    return ctypes.CDLL("libcuda.so.1")
