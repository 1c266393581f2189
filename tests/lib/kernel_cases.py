"""Helpers of tests/kernels/test_kernels.py that other tests use too."""

import pytest
import torch

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is off")
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=on_cpu), pytest.param("cuda", marks=on_gpu)]
)
