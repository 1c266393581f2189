"""GPUs: memory and peak rate of each kind, and the rates that were measured on one of them.

Dry runs, the split into pipeline stages, ``activation.offload`` auto and MFU share this table. Left
out on purpose: rates of kinds that nobody has measured with this code.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

GIB = 2**30


class _Gpu(NamedTuple):
    """Memory and peak rate of a kind of GPU."""

    memory_gib: float
    """Memory that torch sees (``total_memory``), which is less than the name promises."""
    peak_flops: float
    """Dense bf16 FLOP/s by the vendor's datasheet."""


GpuName = Literal["a100", "l40s", "h100", "h800", "h200", "b200"]
GPUS: dict[GpuName, _Gpu] = {
    "b200": _Gpu(178.3, 2250e12),
    "h200": _Gpu(139.8, 989e12),
    "h100": _Gpu(79.1, 989e12),  # of 80 GB; the A100 too
    "h800": _Gpu(79.1, 989e12),
    "a100": _Gpu(79.1, 312e12),
    "l40s": _Gpu(44.3, 362e12),
}
DEFAULT_GPU: GpuName = "h100"
"""Kind that a dry run plans for if GPUs are asked for, none is here and none is named."""

# Measured on H200s of one machine. For other kinds only the ratios of the rates are used.
PRODUCTS = 640e12
"""FLOP/s of large matrix products in bf16."""
BLOCK = 450e12
"""FLOP/s of a whole block of a MoE model at best."""
MEMORY = 4.26e12
"""Bytes/s that a copy reads and writes."""
HOST_LINK = 50e9
"""Bytes/s to pinned host memory and back, over PCIe 5.0 x16."""


def kind_of(name: str) -> GpuName | None:
    """Return the kind of a device that calls itself ``name`` ("NVIDIA H200"), or None."""
    return next((kind for kind in GPUS if kind.upper() in name), None)
