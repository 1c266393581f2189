"""Runs a Gluon kernel for Hopper on a CPU: its partitions are threads with real barriers.

Triton's interpreter does not run Gluon. Here the Python of a kernel's partitions runs unchanged,
with numpy arrays as shared memory. Rings that overflow, barriers that two partitions count
differently, and wrong rows and columns all show as a wrong result or as a partition that waits
forever. It does not show layouts, nor Triton's code generation.
"""

import threading
import time
from types import SimpleNamespace

import numpy as np
import torch

PATIENCE = 60.0
"""Seconds that a partition waits at a barrier before the test fails."""
_CHANGED = threading.Condition()
_FAILED: list[Exception] = []


class Barrier:
    """An mbarrier: a phase ends when all threads have arrived, and all expected bytes too."""

    def __init__(self, count):
        self.count = self.missing = count
        self.bytes = self.phases = 0

    def settle(self, arrived, expected):
        with _CHANGED:
            self.missing -= arrived
            self.bytes += expected
            assert self.missing >= 0, "more arrivals than a phase has"
            if self.missing == self.bytes == 0:
                self.phases, self.missing = self.phases + 1, self.count
                _CHANGED.notify_all()

    def wait(self, parity):
        """Wait until the phase of this parity has ended; older phases are not tracked."""
        with _CHANGED:
            _CHANGED.wait_for(lambda: _FAILED or self.phases % 2 != parity % 2, PATIENCE)
            assert self.phases % 2 != parity % 2, "a part waits in vain"


class Barriers:
    """An array of barriers in shared memory."""

    def __init__(self, length, count):
        self.all = [Barrier(count) for _ in range(length)]

    def index(self, i):
        return self.all[int(i)]


class Memory:
    """Shared memory, or the part of it that a view covers."""

    def __init__(self, array):
        self.array = array
        self.type = SimpleNamespace(shape=array.shape)

    def index(self, i):
        return Memory(self.array[int(i)])

    def slice(self, start, length):
        return Memory(self.array[start : start + length])

    def reshape(self, shape):
        return Memory(self.array.reshape([int(n) for n in shape]))

    def permute(self, order):
        return Memory(self.array.transpose(order))

    def store(self, value):
        self.array[...] = value

    def load(self, layout):
        return self.array.copy()


class Tile(np.ndarray):
    """Values in registers; casts do not round."""

    def to(self, dtype):
        return self

    @property
    def type(self):
        return SimpleNamespace(layout=None)


class Pointer:
    """An address in global memory."""

    def __init__(self, array, at=0):
        self.array, self.at = array, at

    def __add__(self, n):
        return Pointer(self.array, self.at + n)


class Descriptor:
    """TMA descriptor: blocks of a matrix. With four coordinates the bounds move with a group."""

    dtype = None

    def __init__(self, array, block):
        self.array, self.block = array, block[-2:]

    def window(self, at):
        rows, width = self.array.shape
        row, column = int(at[-2]), int(at[-1])
        if len(at) == 4:  # a group ends at row 2^30
            rows = int(at[1])
            row += rows - int(at[0])
        assert min(row, column) >= 0
        tall, wide = self.block
        return slice(row, min(row + tall, rows)), slice(column, min(column + wide, width))


def fetch(descriptor, at, barrier, memory, pred=True):
    """Load a block, with zeros out of bounds; the barrier counts its bytes, two per element."""
    if pred:
        found = descriptor.array[descriptor.window(at)]
        block = np.zeros(descriptor.block, np.float32)
        block[: found.shape[0], : found.shape[1]] = found
        memory.array[...] = block.reshape(memory.array.shape)
        barrier.settle(0, -2 * block.size)


def store(descriptor, at, memory):
    """Store the part of a block within bounds."""
    window = descriptor.window(at)
    block = memory.array.reshape(descriptor.block)
    rows, columns = (max(0, s.stop - s.start) for s in window)
    descriptor.array[window] = block[:rows, :columns]


def _read(pointer, mask=None, other=0.0):
    if mask is None:
        return pointer.array[pointer.at]
    at = np.where(mask, pointer.at, 0)
    return np.where(mask, pointer.array[at], other).view(Tile)


def _add(pointer, value):
    with _CHANGED:
        old = int(pointer.array[pointer.at])
        pointer.array[pointer.at] += value
        return old


def _multiply(a, b, sums, is_async, use_acc=True):
    time.sleep(0)  # lets another part run
    return sums * use_acc + a.array @ b.array


def reinterpret(memory, dtype, shape, layout):
    """View memory of codes, two in each uint16, as the values that they encode."""
    codes = memory.array.astype(np.uint16).view(np.uint8)
    values = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float().numpy()
    return Memory(values.reshape(shape))


HOPPER = SimpleNamespace(
    mbarrier=SimpleNamespace(
        wait=lambda barrier, parity: barrier.wait(int(parity)),
        arrive=lambda barrier, count, pred=True: barrier.settle(count, 0) if pred else None,
        expect=lambda barrier, size, pred: barrier.settle(1, size) if pred else None,
    ),
    tma=SimpleNamespace(store_wait=lambda pendings: None),
    warpgroup_mma=_multiply,
    warpgroup_mma_wait=lambda outstanding, deps: deps[0],
    fence_async_shared=lambda: None,
)
GL = SimpleNamespace(
    constexpr=None,
    float32=None,
    int32=None,
    BlockedLayout=lambda *_: None,
    NVMMADistributedLayout=lambda *_: None,
    NVMMASharedLayout=SimpleNamespace(get_default_for=lambda *_: None),
    float8e4nv=None,
    SliceLayout=lambda *_: None,
    static_range=range,
    to_tensor=lambda x: x,
    where=lambda condition, x, y: x if condition else y,
    zeros=lambda shape, *_: np.zeros(shape, np.float32).view(Tile),
    full=lambda shape, value, *_: np.full(shape, value),
    arange=lambda start, end, layout: np.arange(start, end),
    expand_dims=np.expand_dims,
    exp=np.exp,
    max=lambda x, axis: int(x.max()),
    load=_read,
    atomic_add=_add,
)


def run(programs, parts_of):
    """Run the partitions of all programs; ``parts_of()`` lists a program's functions and args."""
    _FAILED.clear()

    def part(function, arguments):
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001 - raised below, in the test's thread
            with _CHANGED:
                _FAILED.append(error)
                _CHANGED.notify_all()

    threads = [
        threading.Thread(target=part, args=pair, daemon=True)
        for _ in range(programs)
        for pair in parts_of()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if _FAILED:
        raise _FAILED[0]
