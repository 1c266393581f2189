"""Helpers of tests/serve/test_server.py that other tests use too."""

import contextlib
import threading
import time

import openai
import uvicorn

from moetrain.serve.server import CompletionServer


@contextlib.contextmanager
def serving(generator, **settings):
    """Serve in this process; yield an HTTP client and the uvicorn server."""
    app = CompletionServer(generator, "tiny", **settings).app
    served = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    thread = threading.Thread(target=served.run)
    thread.start()
    try:
        wait_until(lambda: served.started, 30)
        port = served.servers[0].sockets[0].getsockname()[1]
        at = f"http://127.0.0.1:{port}/v1"
        yield openai.OpenAI(base_url=at, api_key="none", timeout=60, max_retries=0), served
    finally:
        served.should_exit = True
        thread.join(30)


def wait_until(is_so, seconds):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)
