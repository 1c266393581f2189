"""Helpers of tests/kernels/experts/test_grouped.py that other tests use too."""

import itertools

import numpy as np
import pytest

from moetrain.kernels.experts import grouped
from moetrain.kernels.experts import grouped_frame as frame
from moetrain.runtime.backend import triton
from tests.lib import gluon_threads as threads

SIZES = (0, 1, 63, 64, 65, 200, 0, 129, 300, 7)  # rows of each group
TAIL = 37  # rows past the last group's
ROWS = sum(SIZES)
ENDS = list(itertools.accumulate(SIZES))
GROUPS = [slice(*ends) for ends in zip([0, *ENDS], ENDS, strict=False)]
UNWRITTEN = -7.0


@pytest.fixture
def in_threads(monkeypatch):
    """Run the kernel's partitions as plain functions in threads."""
    for name in ("HALF", "COLUMNS", "DEPTH", "STAGES", "PART", "END"):
        monkeypatch.setattr(frame, name, getattr(frame, name).value)
    for name, value in [*vars(frame).items()]:
        if isinstance(value, triton.JITFunction):
            monkeypatch.setattr(frame, name, value.fn)
    monkeypatch.setattr(grouped, "_multiply", grouped._multiply.fn)
    monkeypatch.setattr(frame, "halves", lambda x: np.split(x, 2, axis=1))
    monkeypatch.setattr(frame, "fetch", threads.fetch)
    monkeypatch.setattr(frame, "store", threads.store)
    monkeypatch.setattr(frame, "reinterpret", threads.reinterpret)
    for module in (frame, grouped):
        monkeypatch.setattr(module, "gl", threads.GL)
        monkeypatch.setattr(module, "hopper", threads.HOPPER)
