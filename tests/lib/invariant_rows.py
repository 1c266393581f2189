"""Helpers of tests/generate/test_batch_invariant.py that other tests use too."""

import pytest

from moetrain.runtime.backend import INTERPRETED

PLACES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
