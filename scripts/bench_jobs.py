"""Time the job service on one device: what serving costs beside the engine that it serves with.

    python scripts/bench_jobs.py --output_dir OUT [--layers 24] [--section.key value ...]
    python scripts/bench_jobs.py --output_dir OUT --tenants 8 --rows 1 --data.seq_len 512

Random weights of ``qwen3-30b-a3b``, cut to ``--layers``, with adapters of rank 16 on attention and
experts. A step is a forward_backward of ``--rows`` rows of ``data.seq_len`` random tokens and an
optim_step. A line each for: the engine by itself; one job of the service; jobs that take turns, so
that each request has another's state to be copied out and its own copied in; generation; a save;
memory after the first and the last switch. Every step waits for the device.

With ``--tenants`` the lines are instead: one job with all rows of a micro-batch, and as many jobs
that share it, with ``--rows`` each, which all wait at once. A step of these has an optim_step of
each. A line below each says where its time goes: requests until they are on the disk; passes and
updates, each with the time until all is queued for the device, and how long that computes (its
kernels by the profiler, in one more step); answers until they are on the disk; all else of turns.
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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_train import device_name

from moetrain.config import Config, Recipes
from moetrain.jobs.api import ClientLoss, OptimStep, Pass
from moetrain.jobs.scheduler import Service

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

    def by_tenants(self, jobs: list[str]) -> None:
        """A step of all ``jobs``, among which the rows are dealt, and which wait together."""
        for kind in ("forward_backward", "optim_step"):
            self.requests(jobs, kind)

    def requests(self, jobs: list[str], kind: str) -> None:
        """A request of each of ``jobs``."""
        data, each = self.body["data"], len(self.body["data"]) // len(jobs)
        asked: list[object] = [STEP] * len(jobs)
        if kind == "forward_backward":
            asked = [{"data": data[i * each : (i + 1) * each]} for i in range(len(jobs))]
        started = time.perf_counter()
        with ThreadPoolExecutor(len(jobs)) as clients:
            kinds = [kind] * len(jobs)
            numbers = [*clients.map(self.service.submit, jobs, kinds, asked)]
        self.spent["requests"] += time.perf_counter() - started
        started = time.perf_counter()
        while self.service.turn():
            pass
        self.spent["turns"] += time.perf_counter() - started
        for job, number in zip(jobs, numbers, strict=True):
            if "error" in (answer := self.service.answer(job, number).result()):
                sys.exit(f"{kind}: {answer['error']}")

    def measure(self) -> None:
        """Note in :attr:`spent`, from now on, the seconds of each part of a turn."""

        def timed(owner: object, method: str, part: str) -> None:
            work = getattr(owner, method)

            def call(*args: Any, **kwargs: Any) -> Any:
                started = time.perf_counter()
                try:
                    return work(*args, **kwargs)
                finally:
                    self.spent[part] += time.perf_counter() - started

            setattr(owner, method, call)

        timed(self.session, "_pass", "pass")
        timed(self.session.engine, "forward_backward", "pass, queued")
        timed(self.session.engine, "update", "updates")
        timed(self.session.engine, "step", "updates, queued")
        timed(self.service, "_answer", "answers")

    def device_ms(self, jobs: list[str], kind: str) -> str:
        """How long the device computes for a request of each of ``jobs``."""
        if not torch.cuda.is_available():
            self.requests(jobs, kind)
            return "unknown"
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            self.requests(jobs, kind)
        return f"{sum(row.self_device_time_total for row in found.key_averages()) / 1e3:.1f}"

    def breakdown(self, jobs: list[str], steps: int) -> str:
        """Where the time of one of the last ``steps`` steps went, in ms."""
        ms = {part: f"{1e3 * took / steps:.1f}" for part, took in self.spent.items()}
        rest = self.spent["turns"] - sum(self.spent[x] for x in ("pass", "updates", "answers"))
        kinds = ("forward_backward", "optim_step")
        device = [self.device_ms(jobs, kind) for kind in kinds]
        return (
            f"  ms a step: requests {ms['requests']}; "
            f"pass {ms['pass']}, queued after {ms['pass, queued']}, device {device[0]}; "
            f"updates {ms['updates']}, queued after {ms['updates, queued']}, device {device[1]}; "
            f"answers {ms['answers']}; else {1e3 * rest / steps:.1f}"
        )

    def by_engine(self) -> None:
        """A step without the service."""
        session = self.session
        request = Pass.model_validate(self.body)
        batches = session._dealt([datum.sample(0) for datum in request.data]).batches
        loss = ClientLoss.of("cross_entropy", {})
        session.engine.forward_backward(batches, loss).total.item()  # waits, as a job does
        session._optim_step(OptimStep.model_validate(STEP))

    def by_jobs(self, jobs: list[str]) -> None:
        """A step of every job, request by request in turn."""
        for job in jobs:
            self.ask(job, "forward_backward", self.body)
        for job in jobs:
            self.ask(job, "optim_step", STEP)


def seconds_of(
    work: Callable[[], object], times: int, begin: Callable[[], object] = lambda: None
) -> float:
    """Of one ``work()``, after one that does not count, and ``begin()``."""
    work()
    begin()
    started = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - started) / times


def main() -> int:
    """Run, and print."""
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
    with Service(config) as service:
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
                work = partial(bench.by_tenants, who)
                rate = bench.tokens / seconds_of(work, args.steps, bench.spent.clear)
                one = one or rate
                name = "one job" if len(who) == 1 else f"{len(who)} jobs"
                each = f"{rows // len(who)} rows each"
                print(f"{name}, {each}: {rate:,.0f} tokens/s, {rate / one:.1%}", flush=True)
                print(bench.breakdown(who, args.steps), flush=True)
            return 0
        bench.by_jobs(jobs[:1])
        alone = seconds_of(bench.by_engine, args.steps)
        print(f"engine: {alone:.3f} s a step, {bench.tokens / alone:,.0f} tokens/s", flush=True)
        service.session.forget(jobs[0])  # it has seen steps that nobody asked for
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
