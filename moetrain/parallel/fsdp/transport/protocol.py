"""The interface between a bucket and what carries its shards and gradients.

A bucket calls its :class:`Transport` to gather and to reduce. A transport that shares something
among buckets, such as memory or streams, has a :class:`Session`, which FSDP calls around its work.

Legend: W ranks of the bucket's group, N elements of one rank's shard.
"""

from collections.abc import Callable
from typing import Protocol

import torch

Wait = Callable[[], object]
"""Work under way. Calling it makes the current stream wait until the work is done.

After an error FSDP forgets such objects without calling them. The transport must finish the work
nevertheless, or later messages would wait behind it.
"""


class Transport(Protocol):
    """Carries one bucket's shards and gradients among the ranks of its group.

    Its results must have the same bits as those of the collectives. :meth:`reduce` meets this if it
    sums by :func:`~moetrain.kernels.optim.reduction.sum_chunks`.
    ``tests/parallel/fsdp/test_every_transport.py`` checks the bits of every entry of
    ``TRANSPORTS``, on meshes of two and four ranks: with frozen and offloaded buckets beside
    trained ones, in evaluations, after an error within the work, and after parameters were written,
    offloaded or loaded.
    """

    is_shared: bool
    """True: other ranks read the shard from memory that a session gave the bucket, while this rank
    does other work. The shard lies there itself (``Bucket.place``), or a copy does
    (``Bucket.share``), which is written by updates and before the session's barrier."""

    def gather(self, shard_N: torch.Tensor, out_WN: torch.Tensor) -> Wait | None:
        """Begin to write every rank's shard to ``out_WN``, in rank order.

        ``shard_N`` is this rank's, in the dtype that is gathered. Return None if nothing is under
        way.
        """
        ...

    def reduce(
        self,
        chunks_WN: torch.Tensor,
        *,
        out_N: torch.Tensor,
        accumulate: bool,
        squares_B: torch.Tensor | None,
    ) -> Wait | None:
        """Begin to sum, on rank r, row r of every rank's ``chunks_WN``.

        The sum is made in fp32 in rank order and rounded once. All ranks begin in the same order.

        Args:
            chunks_WN: bf16, fp16 or fp32, contiguous. It must not change before the work is done.
            out_N: fp32 or bf16, contiguous; the sum is written to it at the latest by the wait.
            accumulate: add the sum to the values that ``out_N`` has when the sum is written,
                instead of overwriting them.
            squares_B: as :func:`~moetrain.kernels.optim.reduction.sum_chunks` takes it.

        Returns:
            The wait for the sum; None if the sum is in ``out_N`` already.
        """
        ...


class Session(Protocol):
    """Calls of one transport around the work of all buckets that it carries."""

    def share(self) -> None:
        """Let other ranks read all shards as they are now, before the work begins. Collective."""
        ...

    def withdraw(self) -> None:
        """Wait, on the device, until no rank reads a shard, before shards change or move.
        Collective."""
        ...

    def finish(self) -> None:
        """Make the current stream wait for all that the session's streams do. Called after the
        work."""
        ...

    def release(self) -> None:
        """Free memory, except what shards lie in, until the next :meth:`share`. Collective."""
        ...
