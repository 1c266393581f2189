"""Streams that wait for words of memory."""

import time
from types import SimpleNamespace

import pytest
import torch

from moetrain.kernels import memory
from moetrain.kernels.memory import wait_for_word, write_word


def test_what_the_driver_refuses_is_an_error(monkeypatch):
    calls = []

    def refuse(*args):
        calls.append(list(args))
        return 801

    functions = dict.fromkeys(("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"), refuse)
    driver = SimpleNamespace(cuGetErrorString=lambda *_: 0, **functions)
    monkeypatch.setattr(memory, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    word = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="cuStreamWriteValue32_v2: CUDA error 801"):
        write_word(word, 2**32 + 5)
    with pytest.raises(RuntimeError, match="cuStreamWaitValue32_v2: CUDA error 801"):
        wait_for_word(word, 5)
    assert calls == [[7, word.data_ptr(), 5, 0]] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("first", [1, 2**31 - 1, 2**32 - 1])
def test_a_stream_goes_on_when_the_word_is_there(first):
    word, seen = torch.zeros(2, 1, dtype=torch.int32, device="cuda")
    there, waiting = torch.cuda.Event(), torch.cuda.Stream()
    seen.copy_(word)  # what is launched for the first time may wait for all that is under way
    torch.cuda._sleep(1)
    write_word(word, first - 1)
    torch.cuda.synchronize()
    with torch.cuda.stream(waiting):
        wait_for_word(word, first + 1)
        seen.copy_(word)
        there.record()
    for value, is_there in ((first, False), (first + 1, True)):
        late = torch.cuda.Event()
        torch.cuda._sleep(2**24)
        write_word(word, value)
        late.record()
        late.synchronize()
        torch.cuda._sleep(2**26)
        torch.cuda.current_stream().synchronize()
        assert there.query() == is_there
    torch.cuda.synchronize()
    assert (seen.item() - first - 1) % 2**32 == 0


@pytest.mark.gpu
def test_who_waits_takes_no_multiprocessor():
    word = torch.zeros(1, dtype=torch.int32, device="cuda")
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
        with torch.cuda.stream(torch.cuda.Stream()):
            write_word(word, len(waiting) > 0)
        torch.cuda.synchronize()
        assert went_on
        assert waited
        times.append(start.elapsed_time(end))
    assert times[1] < 1.1 * times[0]
