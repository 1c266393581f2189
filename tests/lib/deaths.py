"""A simulated death of the process before one of its writes, for tests of the remaining files."""

import os
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path

WRITES = (
    (os, "fsync"),
    (os, "replace"),
    (Path, "replace"),
    (Path, "rename"),
    (Path, "unlink"),
    (shutil, "rmtree"),
)


class Died(BaseException):
    """Simulated death of the process; no code catches it."""


@contextmanager
def dying(monkeypatch, after):
    """Raise Died at every write, rename or removal after the first ``after`` of them."""
    left = [after]

    def mortal(original):
        def write(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:  # clean-up code that runs after a death fails too
                raise Died
            return original(*args, **kwargs)

        return write

    with monkeypatch.context() as patch, suppress(Died):
        for owner, name in WRITES:
            patch.setattr(owner, name, mortal(getattr(owner, name)))
        yield
