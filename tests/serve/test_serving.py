"""Asynchronous generation gives the synchronous tokens, whoever listens, hangs up or fails."""

import asyncio
import threading
from dataclasses import replace

import pytest
import torch

from moetrain.generate.request import Request, RequestError, SamplingParams
from moetrain.serve.serving import Serving
from tests.lib.generators import alone, draw_request, make_generator


async def serve(work, **settings):
    """Run ``work(serving)`` and close; check that nothing stays in the cache."""
    serving = Serving(make_generator(**settings))
    try:
        return await work(serving)
    finally:
        await serving.close()
        pages = serving.generator.pages
        assert pages.num_available == pages.num_pages
        assert not serving.generator.is_busy


async def complete(serving, request):
    """Return the finished completions of ``request``."""
    ended = {}
    async for update in serving.stream(request):
        if update.finish_reason is not None:
            ended[update.completion.index] = update.completion
    return [ended[index] for index in range(request.params.n)]


def test_requests_beside_each_other_have_the_tokens_they_have_alone():
    requests = [draw_request(i) for i in range(8)]

    async def work(serving):
        return await asyncio.gather(*(complete(serving, request) for request in requests))

    for request, completions in zip(requests, asyncio.run(serve(work)), strict=True):
        assert [c.tokens for c in completions] == alone(request)
        assert all(c.finish_reason for c in completions)


def test_hanging_up_aborts_only_that_request():
    long = Request("long", (1, 2), SamplingParams(max_tokens=100, seed=1))
    other = Request("other", (3,), SamplingParams(max_tokens=40, seed=2))

    async def work(serving):
        beside = asyncio.create_task(complete(serving, other))
        seen = []
        stream = serving.stream(long)
        async for update in stream:
            seen.append(update.token)
            if len(seen) == 5:
                break
        await stream.aclose()
        cancelled = asyncio.create_task(complete(serving, Request("cut", (9,), long.params)))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        completions = await beside
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await serving.call(lambda: None)  # after the aborts
        assert not serving.generator.is_busy
        assert seen == alone(long)[0][:5]
        return completions[0].tokens

    assert asyncio.run(serve(work)) == alone(other)[0]


def test_request_cancelled_in_the_queue_is_not_served():
    request = Request("a", (1,), SamplingParams(max_tokens=100))

    async def work(serving):
        started, go_on = threading.Event(), threading.Event()
        submit = serving.generator.submit

        def slowly(request):
            started.set()
            go_on.wait(30)
            submit(request)

        serving.generator.submit = slowly
        waiting = asyncio.create_task(complete(serving, request))
        assert await asyncio.to_thread(started.wait, 30)
        behind = asyncio.create_task(complete(serving, replace(request, id="b")))
        await asyncio.sleep(0)  # it is in the thread's queue
        for task in (waiting, behind):
            task.cancel()
        await asyncio.gather(waiting, behind, return_exceptions=True)
        go_on.set()
        assert await serving.call(lambda: list(serving.generator._live)) == []

    asyncio.run(serve(work))


def test_close_raises_in_listeners():
    request = Request("a", (1,), SamplingParams(max_tokens=100))

    async def work(serving):
        seen = []

        async def listen():
            async for update in serving.stream(request):
                seen.append(update)

        listening = asyncio.create_task(listen())
        while not seen:
            await asyncio.sleep(0.001)
        await serving.close()
        with pytest.raises(RuntimeError, match="'a': generation was closed"):
            await asyncio.wait_for(listening, 30)

    asyncio.run(serve(work))


def test_completions_are_the_generators():
    request = draw_request(0)
    request = replace(request, params=replace(request.params, routes=True, logprobs=2))
    (expected,) = make_generator().generate([request])

    async def work(serving):
        return await complete(serving, request)

    for found, wanted in zip(asyncio.run(serve(work)), expected, strict=True):
        assert found.routes is not None
        assert wanted.routes is not None
        assert torch.equal(found.routes, wanted.routes)
        assert replace(found, routes=None) == replace(wanted, routes=None)


def test_serving_errors_reach_their_request():
    good = Request("good", (1,), SamplingParams(max_tokens=3))

    async def work(serving):
        with pytest.raises(RequestError, match="'bad': it has no tokens"):
            await complete(serving, Request("bad", ()))
        await complete(serving, good)
        serving.generator.step = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            await complete(serving, good)
        del serving.generator.step
        return (await complete(serving, good))[0].tokens

    assert asyncio.run(serve(work)) == alone(good)[0]
