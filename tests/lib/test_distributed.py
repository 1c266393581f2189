"""Tests of how :func:`distributed.spawn` handles ranks that die."""

import ctypes
import time

import pytest
import torch.distributed as dist

from tests.lib.distributed import spawn


def crash_in_a_thread_without_python(aborts=False):
    libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
    nowhere = libc.abort if aborts else ctypes.c_void_p(16)
    libc.pthread_create(ctypes.byref(thread), None, nowhere, None)
    time.sleep(60)


def crash_until(file, aborts):
    """Return an answer if ``file`` exists; otherwise rank 1 dies."""
    if dist.get_rank() == 1 and not file.exists():
        file.touch()
        crash_in_a_thread_without_python(aborts)
    dist.barrier()
    return dist.get_rank()


def crash(in_python):
    if dist.get_rank() == 1:
        ctypes.string_at(0) if in_python else crash_in_a_thread_without_python()
    dist.barrier()


@pytest.mark.tier("long")
def test_a_world_that_lost_a_rank_in_gloo_runs_once_more_and_says_so(tmp_path):
    with pytest.warns(UserWarning, match="run again: rank 1 died with exit code -11"):
        assert spawn(2, crash_until, tmp_path / "fault", False) == [0, 1]
    with pytest.warns(UserWarning, match="run again: rank 1 died with exit code -6"):
        assert spawn(2, crash_until, tmp_path / "abort", True) == [0, 1]
    with (
        pytest.warns(UserWarning, match="run again"),
        pytest.raises(pytest.fail.Exception, match="rank 1 died with exit code -11"),
    ):
        spawn(2, crash, False)


def test_a_crash_within_python_fails_at_once(recwarn):
    with pytest.raises(pytest.fail.Exception, match="Current thread"):
        spawn(2, crash, True)
    assert not [warning for warning in recwarn if "run again" in str(warning.message)]
