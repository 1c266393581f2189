"""Tasks of an environment of verifiers (https://github.com/PrimeIntellect-ai/verifiers).

    VERIFIERS_CONFIG=env.toml \\
        python -m moetrain.rl --rl.env agent:examples/verifiers_agent.py:run ...

The file has the table ``env`` in the form of verifiers' own programs: the taskset, its harness and
the harness's runtime. The policy is the model of every agent whose config names none, and the
reward is the trace's: the weighted sum of the task's rewards.

    [env.taskset]
    id = "my_taskset"
    [env.agent]
    harness.id = "null"
    runtime.type = "subprocess"

The task is an index into the taskset, modulo its length; or a line of ``rl.prompts`` that has the
index as ``idx``, so that held-out tasks can be chosen.

The library (``pip install verifiers``, of which this is the interface ``verifiers.v1``) brings
tasksets, harnesses and the client. Left out on purpose: environments with several traces in an
episode, because each would have its own reward.
"""

import asyncio
import os
import threading
import tomllib
from concurrent.futures import Future
from functools import cached_property
from typing import Any

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]


def run(task: Any, base_url: str) -> float:
    number = task["idx"] if isinstance(task, dict) else task
    return asyncio.run_coroutine_threadsafe(_HOST.play(number, base_url), _HOST.served()).result()


class _Host:
    """The environment, and an event loop for it and for the servers that its episodes share."""

    def __init__(self, file: str) -> None:
        with open(file, "rb") as opened:
            config = vf.resolve_env_config(tomllib.load(opened)["env"])
        self.env = vf.load_environment(config)
        self._coming, self._tasks = iter(self.env.taskset), []
        self._starting = threading.Lock()

    def served(self) -> asyncio.AbstractEventLoop:
        """Return the event loop; the first call starts it."""
        with self._starting:
            return self._served

    @cached_property
    def _served(self) -> asyncio.AbstractEventLoop:
        ready: Future[asyncio.AbstractEventLoop] = Future()

        async def serve() -> None:
            try:
                async with self.env.serving():
                    # An agent without a shared interception server starts its own, and closes it. A
                    # shared one would keep a client, with its connections, for every episode's
                    # address.
                    self.env._interception = None
                    ready.set_result(asyncio.get_running_loop())
                    await asyncio.Event().wait()
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                ready.set_exception(error)

        threading.Thread(target=asyncio.run, args=(serve(),), daemon=True).start()
        return ready.result()

    async def play(self, number: int, base_url: str) -> float:
        # No key is read from the environment, because none is needed.
        endpoint = vf.EvalClientConfig(base_url=base_url, api_key_var="NO_KEY_FOR_THE_POLICY")
        context = vf.ModelContext(model="policy", client=endpoint)
        episode = await self.env.run_episode(self._task(number), context)
        for error in (*episode.errors, *(e for trace in episode.traces for e in trace.errors)):
            raise RuntimeError(f"{error.type}: {error.message}")
        if len(episode.traces) != 1:
            raise RuntimeError(f"the episode has {len(episode.traces)} traces, not 1")
        return episode.traces[0].reward

    def _task(self, number: int) -> Any:
        while len(self._tasks) <= number and (task := next(self._coming, None)) is not None:
            self._tasks.append(task)
        return self._tasks[number % len(self._tasks)]


_HOST = _Host(os.environ["VERIFIERS_CONFIG"])
