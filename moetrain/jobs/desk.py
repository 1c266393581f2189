"""An engine and a generator, at which one job sits at a time.

What a job has learned, its adapter, moments and the gradients of a step that is not over, is copied
into the very tensors that the engine was built with, and out of them when another sits down: one
optimizer, one set of compiled blocks, one generator for all jobs there ever are, over one copy of
the base model, which the generator shares.

Every job's random numbers follow from its seed and a request's number, so what comes of it depends
on nobody else. A request that fails costs its job the gradients of its step, and nothing more.

Left out on purpose: who is next, and why (:mod:`moetrain.jobs.service`).
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moetrain.checkpoint import Checkpoint, list_checkpoints, open_checkpoint, step_of
from moetrain.config import Config, ConfigError, RunFailed
from moetrain.engine import Engine
from moetrain.jobs.requests import (
    BadRequest,
    Body,
    Forward,
    ForwardBackward,
    Limits,
    Load,
    OptimStep,
    Sampling,
    Save,
    finite,
)
from moetrain.loss import Objective, Pretraining, RouterLosses
from moetrain.memory import check_memory, device_capacity, estimate_memory
from moetrain.models import Architecture, compute_dtype
from moetrain.models.rules import is_adapter
from moetrain.parallel.apply import draw_values
from moetrain.parallel.layout import Part
from moetrain.parallel.world import World, join_world
from moetrain.passes import Totals
from moetrain.preflight import check_what_can_run
from moetrain.rl.losses import PolicyObjective
from moetrain.rl.rows import RolloutBatch, Sample, pack, unpack
from moetrain.rl.setup import pages_of
from moetrain.rl.token_stats import score
from moetrain.rl.trainer import with_training_bits
from moetrain.rollout import Generator
from moetrain.rollout.weights import WeightUpdate, replica
from moetrain.run_control import make_deterministic
from moetrain.run_folder import CHECKPOINTS
from moetrain.snapshot import ENGINE_GROUPS, Snapshots, find_snapshot

ROW_MULTIPLE = 64
"""Of which rows are, where nothing is compiled for one length: pads are computed too."""

Groups = Mapping[str, Mapping[str, Part]]


class Cancelled(Exception):
    """A request was given up while it was served."""


class Pending(NamedTuple):
    """What forward_backward has left for the next step; tensors are in host memory."""

    gradients: list[tuple[torch.Tensor, torch.Tensor] | None]
    """Each bucket's, and its squares; None: it has none yet."""
    since_step: list[Totals]


class SharedEngine(Engine):
    """An engine whose trained values are one job's at a time, in the same tensors for all."""

    def __init__(self, config: Config, arch: Architecture, world: World) -> None:
        super().__init__(config, arch, world)
        self.optimizer.begin()  # else it would at its first step, and have nothing to be copied to

    @property
    def is_between_steps(self) -> bool:
        """Whether there are no gradients that wait for a step."""
        return not self._since_step

    @torch.no_grad()
    def set_aside(self) -> Pending | None:
        """The gradients of the step so far, which the engine forgets; None: there are none."""
        if self.is_between_steps:
            return None
        kept = []
        for bucket in self.fsdp.buckets:
            tensors = (bucket.gradient_N, bucket.squares_B) if bucket.has_gradient else ()
            found = [_to_host(tensor) for tensor in tensors if tensor is not None]
            kept.append((found[0], found[1]) if found else None)
        pending = Pending(kept, self._since_step)
        self._forget()
        return pending

    @torch.no_grad()
    def take_back(self, pending: Pending | None) -> None:
        """Inverse of :meth:`set_aside`."""
        self._forget()
        if pending is None:
            return
        for bucket, kept in zip(self.fsdp.buckets, pending.gradients, strict=True):
            if kept is not None:
                gradient_N, squares_B = kept
                if bucket.gradient_N is None:
                    bucket.gradient_N = bucket.gradients.empty(gradient_N.numel(), torch.float32)
                if bucket.squares_B is None:
                    bucket.squares_B = torch.empty_like(squares_B, device=bucket.shard_N.device)
                bucket.gradient_N.copy_(gradient_N, non_blocking=True)
                bucket.squares_B.copy_(squares_B, non_blocking=True)
                bucket.has_gradient = True
        self._since_step = list(pending.since_step)

    def forget(self) -> None:
        """Forget the gradients of the step so far."""
        self._forget()


class Progress(NamedTuple):
    """How far a job's state has come."""

    seen: int = 0
    """Requests."""
    steps: int = 0
    """Optimizer steps."""
    tokens: int = 0
    """That were learned from."""


@dataclass
class Held:
    """A job's state in host memory."""

    state: dict[str, dict[str, Part]]
    pending: Pending | None
    progress: Progress
    saved: int
    """Of what was seen, what the newest checkpoint has seen; 0: there is none."""
    folder: Path


class Desk:
    """Where jobs are worked at. One thread makes all calls.

    Attributes:
        config, limits: the settings as they are resolved; what can be served.
        job, progress, saved: who sits here (None: nobody), and how far it has come.
    """

    def __init__(self, config: Config, arch: Architecture) -> None:
        """Build all there is. ``config``: as :func:`moetrain.preflight.resolve_run` gives it.

        Raises:
            ConfigError: settings that do not fit the model or the device.
        """
        self.world = join_world(config, arch)
        if self.world.size > 1:
            problem = f"{self.world.size} processes, and the job service is one so far; start one"
            raise ConfigError("launch.nproc", problem)
        device = self.world.device
        check_what_can_run(config, arch, device)
        dtype = compute_dtype(config, device)
        estimate = estimate_memory(config, arch, self.world.dims, dtype, "never")
        check_memory(estimate, config, device_capacity(device))
        if config.train.deterministic:
            make_deterministic()
        self.config = config = with_training_bits(config, device)
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
        )
        # An adapter from files is where every job begins; else each one's is drawn.
        is_drawn = is_adapter if config.lora.path is None else lambda _: False
        parts = self.engine.state()["model"]
        self._first = _copies_of({k: part for k, part in parts.items() if not is_drawn(k)})
        """What every job begins with."""
        self._held: OrderedDict[str, Held] = OrderedDict()
        """Those that sat here last, the latest at the end."""
        self._nobody()

    def _nobody(self) -> None:
        self.job: str | None = None
        self.seed, self.folder = 0, Path()
        self.progress, self.saved = Progress(), 0

    # ---- who sits here -------------------------------------------------------------------------

    def sit(self, job: str, seed: int, folder: Path) -> None:
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
            self._take(held.state)
            self.engine.take_back(held.pending)
            self.progress, self.saved = held.progress, held.saved
        elif (found := find_snapshot("auto", folder, self.engine.arch, self.world)) is not None:
            self._restore(found)
            self.saved = self.progress.seen
        else:
            self._begin(seed)
        self.job, self.seed, self.folder = job, seed, folder

    def _leave(self) -> None:
        """Let nobody sit here; whoever did is held in host memory, if there is room."""
        if self.job is None:
            return
        pending = self.engine.set_aside()
        held = Held(self._copies(), pending, self.progress, self.saved, self.folder)
        self._held[self.job] = held
        self._nobody()
        while len(self._held) > self.config.jobs.max_loaded:
            self._put_away(next(iter(self._held)))

    def _put_away(self, job: str) -> None:
        """Save ``job``, unless a step of it is not over, and hold it no longer."""
        held = self._held.pop(job)
        if held.pending is None and held.saved != held.progress.seen:
            self._take(held.state)
            self.job, self.progress, self.folder = job, held.progress, held.folder
            self.save()
            self._nobody()

    def put_all_away(self) -> None:
        """Save everybody, unless a step of theirs is not over, and hold nobody."""
        self._leave()
        for job in list(self._held):
            self._put_away(job)

    def forget(self, job: str) -> None:
        """Have nothing of ``job`` in memory: it is over, or what is here may not be whole."""
        self._held.pop(job, None)
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

    def _copies(self) -> dict[str, dict[str, Part]]:
        """The engine's state, in host memory; RunFailed: there is not enough."""
        groups = self.engine.state()
        try:
            copies = {group: _copies_of(parts) for group, parts in groups.items()}
        except RuntimeError as error:
            problem = f"there is no host memory for a job between its turns ({error})"
            raise RunFailed(f"{problem}; lower jobs.max_loaded") from None
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        return copies

    @torch.no_grad()
    def _take(self, state: Groups) -> None:
        """Inverse of :meth:`_copies`: into the tensors that there are."""
        for group, parts in self.engine.state().items():
            for name, part in parts.items():
                part.tensor.copy_(state[group][name].tensor, non_blocking=True)

    def _restore(self, found: Checkpoint) -> None:
        """Take the state in ``found``, and how far it had come."""
        for group in ENGINE_GROUPS:  # one after the other: each takes host memory
            self.engine.load_state({group: found.group(group)})
        state = found.state
        self.progress = Progress(state["step"], state["steps"], state["tokens"])

    # ---- saving --------------------------------------------------------------------------------

    def save(self, root: Path | None = None) -> None:
        """Write a checkpoint of who sits here, between two steps; None: its own, to go on from.

        Raises:
            RunFailed: it cannot be written.
        """
        assert self.engine.is_between_steps
        seen, steps, tokens = self.progress
        progress = {"step": seen, "steps": steps, "tokens": tokens, "sample_index": 0}
        self.snapshots.save(root or self.folder / CHECKPOINTS, progress, {}, failed=False)
        self.snapshots.wait()
        if root is None:
            self.saved = seen

    @property
    def oldest_saved(self) -> int:
        """Requests that every checkpoint of who sits here has seen."""
        kept = list_checkpoints(self.folder / CHECKPOINTS)
        return (step_of(kept[0]) or 0) if len(kept) == self.config.checkpoint.keep else 0

    # ---- requests ------------------------------------------------------------------------------

    def serve(
        self, number: int, request: Body, is_given_up: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """What comes of request ``number`` of the job that sits here, as JSON.

        After any other error than these, the job is to be forgotten before it goes on.

        Args:
            is_given_up: asked while text is generated.

        Raises:
            BadRequest: it cannot be done as the job is, which stays so.
            Cancelled: ``is_given_up``, and the job is as it was.
        """
        with self.request(number) as seed:
            match request:
                case ForwardBackward():
                    return self._forward_backward(request)
                case Forward():
                    return self._forward(request)
                case OptimStep():
                    return self.step(request.lr)
                case Sampling():
                    return self._sample(request, seed, is_given_up)
                case Save():
                    return self._save(request.name)
                case Load():
                    return self._load(request.name)
                case _:
                    raise TypeError(f"{type(request).__name__} is no request")

    @contextmanager
    def request(self, number: int) -> Iterator[int]:
        """Meanwhile request ``number`` is served; gives what seeds its random numbers."""
        seed = zlib.crc32(f"{self.seed}.{number}".encode())
        torch.manual_seed(seed)  # dropout's
        yield seed
        self.pass_over(number)

    def pass_over(self, number: int) -> None:
        """Request ``number`` is one that the state has seen now."""
        self.progress = self.progress._replace(seen=number + 1)

    def _forward_backward(self, request: ForwardBackward) -> dict[str, Any]:
        policy, arch = request.policy(), self.engine.arch
        objective: Objective[Any] = Pretraining.of(self.config, arch)
        if policy is not None:
            objective = PolicyObjective(policy, RouterLosses.of(self.config, arch))
        return self.learn(self._packed(request.samples()), objective)

    def learn(self, batches: Sequence[Any], objective: Objective[Any]) -> dict[str, Any]:
        """Add the gradients of ``objective`` over ``batches``; its terms."""
        totals = self.engine.forward_backward(batches, objective)
        tokens = sum(batch.num_tokens for batch in batches)
        self.progress = self.progress._replace(tokens=self.progress.tokens + tokens)
        terms = {name: finite(value.item()) for name, value in totals.terms.items()}
        return {"loss": finite(totals.total.item()), "terms": terms}

    def step(self, lr: float) -> dict[str, Any]:
        """Update by the gradients there are, unless they are not finite."""
        if self.engine.is_between_steps:
            raise BadRequest("there was no forward_backward since the last step")
        outcome = self.engine.step(lr)
        skipped = bool(outcome.skipped.item())
        steps = self.progress.steps + (not skipped)
        self.progress = self.progress._replace(steps=steps)
        return {"grad_norm": finite(outcome.grad_norm.item()), "skipped": skipped, "steps": steps}

    def _packed(self, samples: Sequence[Sample]) -> list[RolloutBatch]:
        config = self.config
        longest = max(len(sample.tokens) for sample in samples) - 1
        length = min(config.data.seq_len, -(-longest // ROW_MULTIPLE) * ROW_MULTIPLE)
        rows = min(config.train.micro_batch_size, len(samples))
        if config.compile.enabled:
            length, rows = config.data.seq_len, config.train.micro_batch_size
        return pack(samples, length, rows)

    def _forward(self, request: Forward) -> dict[str, Any]:
        batches = self._packed(request.samples())
        stats = score(self.engine, batches, request.temperature)
        found = unpack(batches, [one.logprob for one in stats])
        return {"logprobs": [[finite(x) for x in logprobs.tolist()] for logprobs in found]}

    def _sample(
        self, request: Sampling, seed: int, is_given_up: Callable[[], bool]
    ) -> dict[str, Any]:
        generator, requests = self.generator, request.requests(seed)
        self.update_weights()  # which forgets the cache, so that it never depends on who was here
        generator.version = self.progress.steps
        done: dict[tuple[int, int], dict[str, Any]] = {}
        try:
            for one in requests:
                generator.submit(one)
            while generator.is_busy:
                if is_given_up():
                    raise Cancelled
                for c in generator.step():
                    if c.finish_reason is not None:
                        done[int(c.request_id), c.index] = {
                            "tokens": c.tokens,
                            "logprobs": [finite(x) for x in c.logprobs],
                            "finish_reason": c.finish_reason,
                            **({"top_logprobs": c.top_logprobs} if request.logprobs else {}),
                        }
        finally:
            for one in requests:
                generator.abort(one.id)
        numbers = range(len(requests))
        return {"completions": [[done[i, k] for k in range(request.n)] for i in numbers]}

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
        self.save(root / name)
        return {"name": name, "steps": self.progress.steps}

    def _load(self, name: str) -> dict[str, Any]:
        found = list_checkpoints(self.folder / "saves" / name)
        if not found:
            raise BadRequest(f"this job has no save {name!r}")
        self.engine.forget()
        self._restore(open_checkpoint(found[-1]))
        return {"name": name, "steps": self.progress.steps}


def _copies_of(parts: Mapping[str, Part]) -> dict[str, Part]:
    return {name: part._replace(tensor=_to_host(part.tensor)) for name, part in parts.items()}


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, pinned if ``tensor`` is on CUDA; it is whole when the device has come so far."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
    return host.copy_(tensor.detach(), non_blocking=True)
