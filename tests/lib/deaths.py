"""A process that dies before one of its writes, without being one: for tests of what is left."""

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
    """As no process says before it does; nothing catches it."""


@contextmanager
def dying(monkeypatch, after):
    """Meanwhile every write, rename or removal but the first ``after`` ends this life."""
    left = [after]

    def mortal(original):
        def write(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:  # and who cleans up behind a death dies too
                raise Died
            return original(*args, **kwargs)

        return write

    with monkeypatch.context() as patch, suppress(Died):
        for owner, name in WRITES:
            patch.setattr(owner, name, mortal(getattr(owner, name)))
        yield
