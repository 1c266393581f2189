"""Helpers of tests/models/hf/test_weights.py that other tests use too."""

from pathlib import Path

import torch
from safetensors.torch import load_file


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}


def assert_same_bits(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype, name
        assert torch.equal(got[name].view(torch.uint8), want[name].view(torch.uint8)), name
