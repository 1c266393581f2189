"""Time the job service on one device, beside its engine alone.

    python scripts/bench_jobs.py --output_dir OUT [--layers 24] [--section.key value ...]
    python scripts/bench_jobs.py --output_dir OUT --tenants 8 --rows 1 --data.seq_len 512

The model is ``qwen3-30b-a3b`` with random weights, cut to ``--layers``, with adapters of rank 16 on
attention and experts. A step is a forward_backward of ``--rows`` rows of ``data.seq_len`` random
tokens and an optim_step. There is a line for each of these: the engine by itself; one job of the
service; jobs that take turns, so that each request swaps another job's state out and its own in;
memory before and after the timed switches; generation; a save. Every step waits for the device.

With ``--tenants N`` there are two lines instead: one job with all rows of a micro-batch, and N jobs
that share the micro-batch, with ``--rows`` rows each. In both cases every client, in its own
thread, submits the forward_backward and the optim_step of step n + 1 before it waits for the
answers of step n. The line below each of them divides the time of the serving thread: queueing
passes and updates for the device; waiting for earlier turns; the rest of turns; time without a
turn. The device's own time comes from the profiler, in further steps. Meanwhile the clients'
threads write requests to the disk and read answers.

``--model.preset debug --layers 2 --data.seq_len 64`` runs on a laptop.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from bench_train import device_name

from moetrain.config import Config, Recipes
from moetrain.jobs.api import ForwardBackward, OptimStep
from moetrain.jobs.losses import ClientLoss, JobsObjective
from moetrain.jobs.scheduler import Service
from moetrain.train.session import garbage_collector_off

GIB = 2**30
STEP = {"adam_params": {"learning_rate": 1e-5}}


class Bench:
    """A service, and rows for its jobs."""

    def __init__(self, service: Service, rows: int) -> None:
        self.service, self.session = service, service.session
        self.spent: defaultdict[str, float] = defaultdict(float)
        arch, length = self.session.engine.arch, service.config.data.seq_len
        draws = random.Random(0)
        texts = [[draws.randrange(arch.vocab_size) for _ in range(length + 1)] for _ in range(rows)]
        data = [{"tokens": text[:-1], "target_tokens": text[1:]} for text in texts]
        self.body = {"data": data}
        self.tokens = rows * length

    def ask(self, job: str, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        future = self.service.answer(job, self.service.submit(job, kind, body))
        while not future.done():
            self.service.turn()
        answer = future.result()
        if "error" in answer:
            sys.exit(f"{kind}: {answer['error']}")
        return answer["result"]

    def by_tenants(self, jobs: list[str], steps: int) -> None:
        """Run ``steps`` steps of all ``jobs``, which divide the rows; clients submit ahead."""
        data, each = self.body["data"], len(self.body["data"]) // len(jobs)
        parts = [{"data": data[i * each : (i + 1) * each]} for i in range(len(jobs))]
        with ThreadPoolExecutor(len(jobs)) as clients:
            asked = zip(jobs, parts, strict=True)
            working = [clients.submit(self.client, *each, steps) for each in asked]
            while not all(client.done() for client in working):
                self.service.turn()
                started = time.perf_counter()
                self.service.wait(0.01)
                self.spent["idle"] += time.perf_counter() - started
            for client in working:
                client.result()

    def client(self, job: str, body: dict[str, Any], steps: int) -> None:
        """Ask for ``steps`` steps of ``job``, with up to two steps in flight."""
        asked: list[list[tuple[str, int]]] = []
        for step in range(steps + 1):
            if step < steps:
                started = time.perf_counter()
                kinds = [("forward_backward", body), ("optim_step", STEP)]
                asked.append([(kind, self.service.submit(job, kind, x)) for kind, x in kinds])
                self.spent["requests"] += time.perf_counter() - started
            for kind, number in asked.pop(0) if step else ():
                answer = self.service.answer(job, number).result()
                if "error" in answer:
                    sys.exit(f"{kind}: {answer['error']}")

    def measure(self) -> None:
        """From now on, add the seconds of each part of a turn to :attr:`spent`."""

        def timed(owner: object, method: str, part: str) -> None:
            work = getattr(owner, method)

            def call(*args: Any, **kwargs: Any) -> Any:
                started = time.perf_counter()
                try:
                    return work(*args, **kwargs)
                finally:
                    self.spent[part] += time.perf_counter() - started

            setattr(owner, method, call)

        timed(self.session, "queue_pass", "passes")
        timed(self.session.engine, "update", "updates")
        timed(self.service, "drain", "waits")
        timed(self.service, "turn", "turns")

    def device_ms(self, jobs: list[str], steps: int) -> str:
        """Return the device's milliseconds for a step of all ``jobs``."""
        if not torch.cuda.is_available():
            return "unknown"
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            self.by_tenants(jobs, steps)
        total = sum(row.self_device_time_total for row in found.key_averages())
        return f"{total / 1e3 / steps:.1f}"

    def breakdown(self, jobs: list[str], steps: int, seconds: float) -> str:
        """Return a line that divides the time of a step, in ms.

        ``seconds`` is the mean time of the last ``steps`` steps, of which :attr:`spent` has the
        parts.
        """
        spent = dict(self.spent)
        named = ("passes", "updates", "waits")
        spent["else"] = spent["turns"] - sum(spent[part] for part in named)
        ms = {part: f"{1e3 * took / steps:.1f}" for part, took in spent.items()}
        return (
            f"  ms a step: {1e3 * seconds:.1f}, device {self.device_ms(jobs, steps)}; "
            f"turns: passes queued {ms['passes']}, updates queued {ms['updates']}, "
            f"turns waited for {ms['waits']}, else {ms['else']}; "
            f"no turn {ms['idle']}; requests of all clients {ms['requests']}"
        )

    def by_engine(self) -> None:
        """Make a step without the service."""
        session = self.session
        request = ForwardBackward.model_validate(self.body)
        batches = session.deal([datum.sample(0) for datum in request.data]).batches
        objective = JobsObjective([ClientLoss.of("cross_entropy", {})])
        session.engine.forward_backward(batches, objective).total.item()  # waits, as a job does
        session.queue_updates([session.now], [OptimStep.model_validate(STEP)])[0]()

    def by_jobs(self, jobs: list[str]) -> None:
        """Make a step of every job; the jobs' requests alternate."""
        for job in jobs:
            self.ask(job, "forward_backward", self.body)
        for job in jobs:
            self.ask(job, "optim_step", STEP)


def seconds_of(work: Callable[[], object], times: int) -> float:
    """Return the mean seconds of ``work()``, after one call that does not count."""
    work()
    started = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - started) / times


def main() -> int:
    """Run the benchmark, and print its lines."""
    parser = argparse.ArgumentParser(description="Time the job service.", allow_abbrev=False)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--tenants", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, required=True)
    args, words = parser.parse_known_args()
    settings = {
        "model.preset": "qwen3-30b-a3b",
        "model.num_layers": args.layers,
        "data.seq_len": 4096,
        "train.micro_batch_size": 1,
        "train.global_batch_size": 1,
        "lora.rank": 16,
        "rl.max_sequences": 64,
        "jobs.save_interval": 10**6,
        "output_dir": args.output_dir,
    }
    if args.tenants:
        size = args.tenants * args.rows
        settings |= {"train.micro_batch_size": size, "train.global_batch_size": size}
        settings["jobs.max_tenants"] = args.tenants
    given = [f"{key}={value}" for key, value in settings.items()]
    config = Config.load({}, [*given, *words], recipes=Recipes.JOBS)
    started = time.perf_counter()
    with Service(config) as service, garbage_collector_off():  # like the service's own process
        rows = args.rows * max(1, args.tenants)
        bench, on_gpu = Bench(service, rows), torch.cuda.is_available()
        device = service.session.world.device

        def memory() -> str:
            return f"{torch.cuda.memory_allocated(device) / GIB:.2f} GiB" if on_gpu else "unknown"

        state = service.session.engine.state()
        size = sum(part.tensor.nbytes for parts in state.values() for part in parts.values())
        print(f"{device_name(device)}: {args.layers} layers, {rows} rows", flush=True)
        print(f"built in {time.perf_counter() - started:.1f} s; a job's state {size / GIB:.3f} GiB")
        count = 1 + args.tenants if args.tenants else args.jobs
        jobs = [service.create(f"{seed:032x}:train:0", seed).id for seed in range(count)]
        if args.tenants:
            bench.measure()
            one = 0.0
            for who in (jobs[:1], jobs[1:]):
                bench.by_tenants(who, 2)
                bench.spent.clear()
                started = time.perf_counter()
                bench.by_tenants(who, args.steps)
                seconds = (time.perf_counter() - started) / args.steps
                rate = bench.tokens / seconds
                one = one or rate
                name = "one job" if len(who) == 1 else f"{len(who)} jobs"
                each = f"{rows // len(who)} rows each"
                print(f"{name}, {each}: {rate:,.0f} tokens/s, {rate / one:.1%}", flush=True)
                print(bench.breakdown(who, args.steps, seconds), flush=True)
            return 0
        bench.by_jobs(jobs[:1])
        alone = seconds_of(bench.by_engine, args.steps)
        print(f"engine: {alone:.3f} s a step, {bench.tokens / alone:,.0f} tokens/s", flush=True)
        service.session.forget(jobs[0])  # its state has steps that no client asked for
        one = seconds_of(lambda: bench.by_jobs(jobs[:1]), args.steps)
        print(f"one job: {one:.3f} s a step, {one / alone - 1:+.1%}", flush=True)
        bench.by_jobs(jobs)
        before = memory()
        several = seconds_of(lambda: bench.by_jobs(jobs), args.steps) / len(jobs)
        switch = (several - one) / 2
        rate = 2 * size / GIB / max(1e-9, switch)
        print(
            f"{len(jobs)} jobs in turn: {several:.3f} s a step, {several / alone - 1:+.1%}; "
            f"a switch {switch * 1e3:.0f} ms, {rate:.1f} GiB/s out and in"
        )
        switches = 2 * len(jobs) * (args.steps + 1)
        print(f"memory: {before} before, {memory()} after {switches} switches", flush=True)
        bench.ask(jobs[0], "save_weights_for_sampler", {"sampling_session_seq_id": 0})
        sampler, asked = jobs[0].replace("train", "sample"), {"max_tokens": 128}
        prompts = [text["tokens"][:64] for text in bench.body["data"]] * (64 // args.rows)

        def sample() -> None:
            for prompt in prompts:
                body = {"prompt": {"chunks": [{"tokens": prompt}]}, "sampling_params": asked}
                service.submit(sampler, "asample", body)
            while service.turn():
                pass

        took = seconds_of(sample, 2)
        print(f"sample: {len(prompts) * 128 / took:,.0f} tokens/s, {len(prompts)} at once")
        started = time.perf_counter()
        bench.ask(jobs[0], "save_weights", {"path": "bench"})
        print(f"a save: {time.perf_counter() - started:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
