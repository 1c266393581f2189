"""An engine and a generator that serve one job at a time.

What a job has learned, its adapter, moments and the gradients of a step that is not over, is copied
into the very tensors that the engine was built with, and out of them when another sits down: one
optimizer, one set of compiled blocks, one generator for all jobs there ever are, over one copy of
the base model, which the generator shares.

Every job's random numbers follow from its seed and a request's number, so what comes of it depends
on nobody else. A request that fails costs its job the gradients of its step, and nothing more.

Of several ranks each has a session, and does what the main one does (:mod:`moetrain.jobs.shared`).
Left out on purpose: who is next, and why (:mod:`moetrain.jobs.scheduler`).
"""

from __future__ import annotations

import shutil
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from moetrain.checkpoint.format import list_checkpoints, step_of
from moetrain.checkpoint.read import Checkpoint, open_checkpoint
from moetrain.config import Config
from moetrain.config.rl import RlSection
from moetrain.config.sources import RunFailed
from moetrain.jobs.api import (
    BadRequest,
    Forward,
    ForwardBackward,
    Limits,
    Load,
    OptimStep,
    Sampling,
    Save,
    finite,
    parse,
)
from moetrain.jobs.shared import Held, Progress, SharedEngine, copies_of, to_host, together
from moetrain.jobs.store import read
from moetrain.models.architecture import Architecture
from moetrain.models.rules import is_adapter
from moetrain.parallel.fsdp.shard import draw_values
from moetrain.rl.learn import by_sample, gather, packed
from moetrain.rl.losses import PolicyObjective, score
from moetrain.rl.rows import RolloutBatch, Sample, unpack
from moetrain.rl.setup import pages_of
from moetrain.rollout.engine import Generator
from moetrain.rollout.request import Completion, Request
from moetrain.rollout.weights import WeightUpdate, replica
from moetrain.train.objectives import Objective, Pretraining, RouterLosses
from moetrain.train.run_folder import CHECKPOINTS, check_shared
from moetrain.train.setup import Session
from moetrain.train.snapshot import ENGINE_GROUPS, Snapshots, find_snapshot

LOGPROB_BYTES = 32
"""That one of the likeliest tokens takes in an answer, as JSON."""
ROW_MULTIPLE = 64
"""Of which rows are, where nothing is compiled for one length: pads are computed too."""

ASIDE = "aside"
"""Folder of what jobs have in the middle of a step and memory has no room for."""


class Cancelled(Exception):
    """A request was given up while it was served."""


class JobSession:
    """Where jobs are worked at. One thread makes all calls.

    Attributes:
        config, limits: the settings as they are resolved; what can be served.
        job, progress, saved: who sits here (None: nobody), and how far it has come.
    """

    def __init__(self, config: Config, arch: Architecture) -> None:
        """Build all there is. ``config``: as :func:`moetrain.train.setup.resolve_run` gives it.

        Raises:
            ConfigError: settings that do not fit the model or the device.
        """
        start = Session(config, arch, sleep="never")
        self.world, self.config = start.world, start.config
        config = self.config
        check_shared(Path(config.output_dir), self.world)
        self.is_told = False
        """Whether what runs now is run by every rank."""
        self.is_given_up: Callable[[], bool] = lambda: False
        """Of the main rank: asked while text is generated."""
        self.engine = SharedEngine(config, arch, self.world)
        self.snapshots = Snapshots(self.engine)
        model, experts = replica(self.engine)
        pages, most = pages_of(config), config.rl.max_sequences
        self.generator = Generator(model, num_pages=pages, max_sequences=most, experts=experts)
        self.update_weights = WeightUpdate(self.engine, self.generator)
        self.limits = Limits(
            arch.vocab_size,
            config.data.seq_len,
            self.generator.longest,
            config.jobs.max_completions,
            (config.jobs.max_request_mib << 20) // LOGPROB_BYTES,
        )
        # An adapter from files is where every job begins; else each one's is drawn.
        is_drawn = is_adapter if config.lora.path is None else lambda _: False
        parts = self.engine.state()["model"]
        self._first = copies_of({k: part for k, part in parts.items() if not is_drawn(k)})
        """What every job begins with."""
        self._held: OrderedDict[str, Held] = OrderedDict()
        """Those that sat here last, the latest at the end."""
        self._aside = Path(config.output_dir) / ASIDE
        if self.world.is_main:  # whatever was killed left is of no use
            shutil.rmtree(self._aside, ignore_errors=True)
        self.world.barrier()
        self._objectives: dict[RlSection | None, Objective[Any]]
        # Kept, as pipelines tell ranks of each new one, and it has to be new on all of them.
        self._objectives = {None: Pretraining.of(config, arch)}
        self.fingerprint = self.engine.fingerprint
        self._nobody()

    def _nobody(self) -> None:
        self.job: str | None = None
        self.seed, self.folder = 0, Path()
        self.progress, self.saved = Progress(), 0

    # ---- who sits here -------------------------------------------------------------------------

    @together
    def sit(self, job: str, seed: int, folder: str) -> None:
        """Let ``job`` have the engine, as it was when it left; as its newest checkpoint has it, or
        as its seed begins it, if that is not known any more.

        Raises:
            ConfigError: its checkpoints are damaged.
            RunFailed: the host has no memory, or the disk no room, for who sat here before.
        """
        if self.job == job:
            return
        held = self._held.pop(job, None)
        self._leave()
        if held is not None:
            held.pick_up()
            self._take(held.state)
            self.engine.take_back(held.pending)
            self.progress, self.saved = held.progress, held.saved
        else:
            found = find_snapshot("auto", Path(folder), self.engine.arch, self.world)
            self.progress = Progress()
            if found is None:
                self._begin(seed)
            else:
                self._restore(found)
            self.saved = self.progress.seen
        self.job, self.seed, self.folder = job, seed, Path(folder)

    def _leave(self) -> None:
        """Let nobody sit here; whoever did is held in host memory, if there is room."""
        if self.job is None:
            return
        pending = self.engine.set_aside()
        held = Held(self._copies(), pending, self.progress, self.saved, self.folder)
        self._held[self.job] = held
        self._nobody()
        loaded = [job for job, held in self._held.items() if held.file is None]
        for job in loaded[: -self.config.jobs.max_loaded]:
            if self._held[job].pending is None:
                self._put_away(job)
            else:
                self._put_aside(job)

    def _put_away(self, job: str) -> None:
        """Save ``job``, unless a step of it is not over, and hold it no longer."""
        held = self._held.pop(job)
        held.drop()
        if held.pending is None and held.saved != held.progress.seen:
            self._take(held.state)
            self.job, self.progress, self.folder = job, held.progress, held.folder
            self.save()
            self._nobody()

    def _put_aside(self, job: str) -> None:
        """Hold ``job``, a step of which is not over, on the disk."""
        self._aside.mkdir(exist_ok=True)
        file = self._aside / f"{job}-{self.world.rank}.safetensors"
        if problem := self.world.any(self._held[job].put_down(file)):
            raise RunFailed(f"a job cannot be put aside, {problem}; raise jobs.max_loaded")

    @together
    def put_all_away(self) -> None:
        """Save everybody, unless a step of theirs is not over, and hold nobody."""
        self._leave()
        for job in list(self._held):
            self._put_away(job)

    @together
    def forget(self, job: str) -> None:
        """Have nothing of ``job`` in memory: it is over, or what is here may not be whole."""
        if (held := self._held.pop(job, None)) is not None:
            held.drop()
        if self.job == job:
            self.engine.forget()
            self._nobody()

    def probe(self) -> None:
        """Raise RunFailed if the device does nothing any more, as after an error of a kernel."""
        try:
            torch.ones(1, device=self.world.device).sum().item()
        except RuntimeError as error:
            problem = f"the device has failed ({error}); nothing is lost: start the service again"
            raise RunFailed(problem) from None

    @torch.no_grad()
    def _begin(self, seed: int) -> None:
        """Have the state of a job that has not begun."""
        for name, part in self.engine.state()["model"].items():
            if name in self._first:
                part.tensor.copy_(self._first[name].tensor)
        if self.config.lora.path is None:
            draw_values(self.engine.fsdp, self.config.model.init_std, seed, all=False)
        self.engine.optimizer.begin()

    def _copies(self) -> dict[str, torch.Tensor]:
        """The engine's state, in host memory; RunFailed: there is not enough."""
        try:
            copies = {name: to_host(tensor) for name, tensor in self._tensors()}
        except RuntimeError as error:
            problem = f"there is no host memory for a job between its turns ({error})"
            raise RunFailed(f"{problem}; lower jobs.max_loaded") from None
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        return copies

    @torch.no_grad()
    def _take(self, state: Mapping[str, torch.Tensor]) -> None:
        """Inverse of :meth:`_copies`: into the tensors that there are."""
        for name, tensor in self._tensors():
            tensor.copy_(state[name], non_blocking=True)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the engine has of a job."""
        for group, parts in self.engine.state().items():
            for name, part in parts.items():
                yield f"{group}/{name}", part.tensor

    def _restore(self, found: Checkpoint) -> None:
        """Take the state in ``found``, and how far it had come."""
        for group in ENGINE_GROUPS:  # one after the other: each takes host memory
            self.engine.load_state({group: found.group(group)})
        state = found.state
        self.progress = Progress(state["step"], state["steps"], state["tokens"])

    # ---- saving --------------------------------------------------------------------------------

    @together
    def save(self) -> None:
        """Write a checkpoint of who sits here, between two steps, to go on from.

        Raises:
            RunFailed: it cannot be written.
        """
        self._write(self.folder / CHECKPOINTS)
        self.saved = self.progress.seen

    def _write(self, root: Path) -> None:
        assert self.engine.is_between_steps
        seen, steps, tokens = self.progress
        progress = {"step": seen, "steps": steps, "tokens": tokens, "sample_index": 0}
        self.snapshots.save(root, progress, {}, failed=False)
        self.snapshots.wait()

    @property
    def oldest_saved(self) -> int:
        """Requests that every checkpoint of who sits here has seen."""
        kept = list_checkpoints(self.folder / CHECKPOINTS)
        return (step_of(kept[0]) or 0) if len(kept) == self.config.checkpoint.keep else 0

    # ---- requests ------------------------------------------------------------------------------

    @together
    def serve(self, number: int, name: str) -> dict[str, Any]:
        """What comes of request ``number``, the file ``name`` of the job that sits here, as JSON.

        Raises:
            BadRequest: it cannot be done as the job is, which stays so.
            Damaged: the file is.
            Exception: any other; the job is to be forgotten before it goes on.
        """
        entry = read(self.folder, name, kind=str, body=dict)
        request = parse(entry["kind"], entry["body"], self.limits)
        with self._request(number) as seed:
            match request:
                case ForwardBackward():
                    return self._forward_backward(request)
                case Forward():
                    return self._forward(request)
                case OptimStep():
                    return self._step(request.lr)
                case Sampling():
                    return self._sample(request, seed)
                case Save():
                    return self._save(request.name)
                case Load():
                    return self._load(request.name)
                case _:
                    raise TypeError(f"{type(request).__name__} is no request")

    @contextmanager
    def _request(self, number: int) -> Iterator[int]:
        """Meanwhile request ``number`` is served; gives what seeds its random numbers."""
        seed = zlib.crc32(f"{self.seed}.{number}".encode())
        torch.manual_seed(seed)  # dropout's
        yield seed
        self.progress = self.progress._replace(seen=number + 1)

    @together
    def forget_step(self) -> None:
        """Forget the gradients of the step so far."""
        self.engine.forget()

    @together
    def pass_over(self, number: int) -> None:
        """Request ``number`` is one that the state has seen now."""
        self.progress = self.progress._replace(seen=number + 1)

    def _forward_backward(self, request: ForwardBackward) -> dict[str, Any]:
        policy = request.policy()
        if policy is not None and policy not in self._objectives:
            routers = RouterLosses.of(self.config, self.engine.arch)
            self._objectives[policy] = PolicyObjective(policy, routers)
        objective = self._objectives[policy]
        samples = request.samples()
        tokens = sum(len(sample.tokens) - 1 for sample in samples)
        return self._learn(self._packed(samples), objective, tokens)

    def _learn(
        self, batches: Sequence[Any], objective: Objective[Any], tokens: int
    ) -> dict[str, Any]:
        """Add the gradients of ``objective`` over ``batches``, this rank's; its terms."""
        totals = self.engine.forward_backward(batches, objective)
        self.progress = self.progress._replace(tokens=self.progress.tokens + tokens)
        terms = {name: finite(value.item()) for name, value in totals.terms.items()}
        return {"loss": finite(totals.total.item()), "terms": terms}

    def _step(self, lr: float) -> dict[str, Any]:
        """Update by the gradients there are, unless they are not finite."""
        if self.engine.is_between_steps:
            raise BadRequest("there was no forward_backward since the last step")
        outcome = self.engine.step(lr)
        skipped = bool(outcome.skipped.item())
        steps = self.progress.steps + (not skipped)
        self.progress = self.progress._replace(steps=steps)
        return {"grad_norm": finite(outcome.grad_norm.item()), "skipped": skipped, "steps": steps}

    def _mine(self, number: int) -> list[int]:
        """Which of so many samples are this rank's."""
        return list(range(number))[self.world.data_rank :: self.world.dims.data_ranks]

    def _packed(self, samples: Sequence[Sample]) -> list[RolloutBatch]:
        """This rank's of ``samples``, in as many micro-batches as every rank has."""
        config, ranks = self.config, self.world.dims.data_ranks
        longest = max(len(sample.tokens) for sample in samples) - 1
        length = min(config.data.seq_len, -(-longest // ROW_MULTIPLE) * ROW_MULTIPLE)
        rows = min(config.train.micro_batch_size, -(-len(samples) // ranks))
        if config.compile.is_on:
            length, rows = config.data.seq_len, config.train.micro_batch_size
        mine = [samples[i] for i in self._mine(len(samples))]
        return packed(self.engine, mine, length, rows)

    def _forward(self, request: Forward) -> dict[str, Any]:
        samples = request.samples()
        batches = self._packed(samples)
        stats = score(self.engine, batches, request.temperature)
        mine = [x.tolist() for x in unpack(batches, [one.logprob for one in stats])]
        found = by_sample(self.world, self._mine(len(samples)), mine)
        return {"logprobs": [[finite(x) for x in logprobs] for logprobs in found]}

    def _sample(self, request: Sampling, seed: int) -> dict[str, Any]:
        self.update_weights()  # which forgets the cache, so that it never depends on who was here
        generator, requests = self.generator, request.requests(seed)
        generator.wipe()  # a job whose weights have blown up leaves NaN there
        generator.version = self.progress.steps
        done: dict[tuple[int, int], dict[str, Any]] = {}
        mine = requests[self.world.rank :: self.world.size]
        try:
            for one in mine:
                generator.submit(one)
            while generator.goes_on(generator.is_busy):  # others may need this rank's experts
                for c in generator.step():
                    if c.finish_reason is not None:
                        done[int(c.request_id), c.index] = _described(c, request)
                if self.is_given_up():
                    self._abort(mine)
        finally:
            self._abort(mine)
        if self.is_given_up():
            done.clear()
        parts = gather(self.world, done)
        if not all(parts[: len(requests)]):  # of the ranks that had any
            raise Cancelled
        found = {key: c for part in parts for key, c in part.items()}
        return {
            "completions": [[found[i, k] for k in range(request.n)] for i in range(len(requests))]
        }

    def _abort(self, requests: Sequence[Request]) -> None:
        for one in requests:
            self.generator.abort(one.id)

    def _save(self, name: str) -> dict[str, Any]:
        if not self.engine.is_between_steps:
            raise BadRequest("a step is not over: its gradients are part of no save; step first")
        root, seen = self.folder / "saves", self.progress.seen
        found = list_checkpoints(root / name)
        # One of this very request: it was saved, and its answer was not.
        if found and step_of(found[-1]) != seen:
            raise BadRequest(f"there is a save {name!r} already; choose another name")
        others = [path for path in root.iterdir() if path.name != name] if root.is_dir() else []
        if len(others) >= self.config.jobs.max_saves:
            raise BadRequest(f"this job has {len(others)} saves, as many as jobs.max_saves")
        self.engine.save_peft(root / name / "adapter")
        self._write(root / name)
        return {"name": name, "steps": self.progress.steps}

    def _load(self, name: str) -> dict[str, Any]:
        found = list_checkpoints(self.folder / "saves" / name)
        if not found:
            raise BadRequest(f"this job has no save {name!r}")
        self.engine.forget()
        self._restore(open_checkpoint(found[-1]))
        return {"name": name, "steps": self.progress.steps}


def _described(completion: Completion, request: Sampling) -> dict[str, Any]:
    """For its client."""
    row: dict[str, Any] = {
        "tokens": completion.tokens,
        "logprobs": [finite(x) for x in completion.logprobs],
        "finish_reason": completion.finish_reason,
    }
    if request.logprobs:  # the keys as JSON has them
        tops = completion.top_logprobs
        row["top_logprobs"] = [{str(k): finite(x) for k, x in top.items()} for top in tops]
    return row
