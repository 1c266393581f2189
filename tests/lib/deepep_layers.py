"""Helpers of tests/parallel/expert/test_deepep.py that other tests use too."""

import sys

from tests.lib import fake_deep_ep


def use_fake() -> None:
    sys.modules["deep_ep"] = fake_deep_ep
    fake_deep_ep.calls.clear()
