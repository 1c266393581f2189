"""Streams that wait for words in memory."""

import ctypes
import time
from types import SimpleNamespace

import pytest
import torch

from moetrain.runtime import memory
from moetrain.runtime.memory import on_words


def write_word(word, value):
    on_words([("write", word, value)])()


def wait_for_word(word, value):
    on_words([("wait", word, value)])()


def pinned_word():
    """Return a word of 0 that the host can write: its writes wait for nothing on the device."""
    return torch.zeros(1, dtype=torch.int32).pin_memory()


def test_what_the_driver_refuses_is_an_error(monkeypatch):
    calls = []

    def refuse(stream, count, array, flags):
        each = [(x.operation, x.address, x.value, x.flags) for x in array]
        calls.append((stream, count, each, flags))
        return 801

    driver = SimpleNamespace(cuGetErrorString=lambda *_: 0, cuStreamBatchMemOp_v2=refuse)
    monkeypatch.setattr(memory, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    word = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="cuStreamBatchMemOp_v2: CUDA error 801"):
        on_words([("wait", word, 2**32 + 5), ("write", word, 0)])()
    assert calls == [(7, 2, [(1, word.data_ptr(), 5, 0), (2, word.data_ptr(), 0, 0)], 0)]
    assert ctypes.sizeof(memory._OnWord) == 48


@pytest.mark.gpu
def test_a_graph_waits_anew_in_each_replay():
    word, seen = pinned_word(), torch.zeros(1, dtype=torch.int32, device="cuda")
    turn = on_words([("wait", word, 1), ("write", word, 0)])
    seen.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        turn()
        seen.add_(1)
    for replay in range(3):
        graph.replay()
        time.sleep(0.05)
        assert not torch.cuda.current_stream().query()
        word.fill_(1)
        torch.cuda.synchronize()
        assert (seen.item(), word.item()) == (replay + 2, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("first", [1, 2**31 - 1, 2**32 - 1])
def test_a_stream_goes_on_when_the_word_is_there(first):
    word, stream = pinned_word(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        write_word(word, first - 1)
    stream.synchronize()
    assert (word.item() - first + 1) % 2**32 == 0
    with torch.cuda.stream(stream):
        wait_for_word(word, first + 1)
    for value, is_there in ((first, False), (first + 1, True)):
        word.fill_((value + 2**31) % 2**32 - 2**31)  # as int32
        deadline = time.monotonic() + (30 if is_there else 0.1)
        while not stream.query() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert stream.query() == is_there


@pytest.mark.gpu
@pytest.mark.alone
def test_waiting_stream_occupies_no_multiprocessor():
    word = pinned_word()
    a_NN = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for waiting in ([], [torch.cuda.Stream(priority=-1) for _ in range(3)]):
        for stream in waiting:
            with torch.cuda.stream(stream):
                wait_for_word(word, 1)
        for step in range(40):
            if step == 20:
                start.record()
            a_NN @ a_NN
        end.record()
        deadline = time.monotonic() + 30
        while not end.query() and time.monotonic() < deadline:
            time.sleep(0.01)
        went_on, waited = end.query(), not any(stream.query() for stream in waiting)
        word.fill_(1)
        torch.cuda.synchronize()
        word.fill_(0)
        assert went_on
        assert waited
        times.append(start.elapsed_time(end))
    assert times[1] < 1.1 * times[0]
