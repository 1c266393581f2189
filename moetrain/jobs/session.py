"""An engine and a generator that serve one job at a time, or several in one pass.

A job's state lies in memory of its own, and the engine's tensors point at the active job's
(:mod:`moetrain.jobs.shared`). So one optimizer, one set of compiled blocks and one generator serve
all jobs, over one copy of the base model, which the generator shares. Random numbers follow from a
job's seed and the request's number, so a result depends on no other job.

Only the main rank has jobs, their files and the HTTP server. What all ranks do is a
:data:`Command`. The main rank broadcasts it as JSON, and the others wait for it in
:meth:`JobSession.follow`. Then all ranks report whether they have failed: a command that fails on
one rank fails on all. Requests may be large, so the other ranks read them from their files.

Left out on purpose: the order of jobs (:mod:`moetrain.jobs.scheduler`), and recovery from a rank
that fails inside a collective. As in any run, the others wait until the collective times out.
"""

import gc
import re
import shutil
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, Field, TypeAdapter

from moetrain.checkpoint.read import list_checkpoints, open_checkpoint, step_of
from moetrain.checkpoint.save import SavePlan
from moetrain.config import Config
from moetrain.config.sources import RunFailed
from moetrain.data.tokenizer import load_tokenizer
from moetrain.generate.engine import Generator
from moetrain.generate.pages import Pages
from moetrain.generate.ranks import sharing_heads
from moetrain.generate.request import Request, end_ids
from moetrain.generate.weights import WeightUpdate, replica
from moetrain.jobs import api
from moetrain.jobs.losses import ClientLoss, JobsObjective
from moetrain.jobs.shared import JobState, SharedEngine
from moetrain.jobs.store import SAMPLERS, Job, Sampler, SaveFolder, StoredRequest, read_request
from moetrain.models.architecture import Architecture
from moetrain.runtime.memory import LateValues
from moetrain.train.preferences import score
from moetrain.train.run_folder import RunFolder
from moetrain.train.samples import DealtSamples, Sample
from moetrain.train.session import Session
from moetrain.train.state import Snapshots

_LOGPROB_BYTES = 32
"""Bytes of JSON of one likeliest token and its log-probability in an answer."""
_ROW_MULTIPLE = 64
"""Row lengths are multiples of this unless blocks are compiled. Pads are computed too, so rows are
as short as the samples allow."""
_GARBAGE_SECONDS = 60.0
_R = TypeVar("_R")

Result = dict[str, Any]
"""The JSON of a request's result."""
LateResult = Callable[[], Result]
"""Waits for the device, and returns the result."""


# ---- commands ------------------------------------------------------------------------------------


class Activate(BaseModel):
    """Make a job active: from its state in memory, else its newest checkpoint, else its seed."""

    type: Literal["activate"] = "activate"
    job: str
    seed: int
    folder: Path
    source: str | None
    """Path of a sampler's checkpoint, under the folder of jobs; None: the base model."""


class Serve(BaseModel):
    """Serve a request of the active job."""

    type: Literal["serve"] = "serve"
    number: int
    waits: bool


class Generate(BaseModel):
    """Serve requests of the active sampler together."""

    type: Literal["generate"] = "generate"
    first: int
    """Number of the first request."""
    count: int


class Skip(BaseModel):
    """Count a request as seen without serving it."""

    type: Literal["skip"] = "skip"
    number: int
    forgets_step: bool
    """True: the gradients of the unfinished step are dropped."""


class SaveJob(BaseModel):
    """Write a checkpoint of the active job."""

    type: Literal["save"] = "save"


class Forget(BaseModel):
    """Drop the state of a job."""

    type: Literal["forget"] = "forget"
    job: str


class EvictAll(BaseModel):
    """Save the jobs that are not in the middle of a step, and drop the states of all jobs."""

    type: Literal["evict_all"] = "evict_all"


Command = Activate | Serve | Generate | Skip | SaveJob | Forget | EvictAll
_COMMANDS = TypeAdapter[Command](Annotated[Command, Field(discriminator="type")])


class JobSession:
    """The engine and generator of all jobs. One thread makes all calls.

    Attributes:
        limits: the largest requests that can be served.
        now: the state of the active job.
        held: states of the jobs that were active before, the least recently active first.
        base: what the jobs of the folder depend on, as JSON.
        trains: by the SDK's name of a part of the model, True if the part has adapters.
    """

    def __init__(self, config: Config, arch: Architecture) -> None:
        """Build everything; ConfigError for settings that do not fit the model or the device."""
        start = Session(config, arch, sleep="never")
        self.world = start.world
        config = self.config = start.config
        RunFolder(Path(config.output_dir)).check_shared(self.world)
        self.is_cancelled: Callable[[], bool] = lambda: False
        """Called on the main rank while text is generated. True: the request is cancelled."""
        self.engine = SharedEngine(config, arch, self.world)
        self.snapshots = Snapshots(self.engine)
        model, experts = replica(self.engine)
        heads, self.leaders = sharing_heads(self.world, experts)
        has_tokenizer = config.is_set("data.tokenizer")
        tokenizer = load_tokenizer(config.data.tokenizer) if has_tokenizer else None
        self.generator = Generator(
            model,
            tokenizer,
            num_pages=Pages.number_for(config),
            max_sequences=config.rl.max_sequences,
            experts=experts,
            heads=heads,
            cache=config.rl.generator_cache,
        )
        self.update_weights = WeightUpdate(self.engine, self.generator)
        self.limits = api.Limits(
            vocab_size=arch.vocab_size,
            longest_row=config.data.seq_len,
            longest_text=self.generator.longest,
            max_completions=config.jobs.max_completions,
            max_logprobs=(config.jobs.max_request_mib << 20) // _LOGPROB_BYTES,
            end_ids=() if tokenizer is None else end_ids(self.engine.model, tokenizer),
        )
        self._max_resident = self.engine.max_resident(start.room)
        self.held: dict[str, JobState] = {}
        self._aside = Path(config.output_dir) / "aside"
        """Folder for jobs that are in the middle of a step and have no room in memory."""
        if self.world.is_main:  # files of a killed process are of no use
            shutil.rmtree(self._aside, ignore_errors=True)
        self.world.barrier()
        self.base = {
            "architecture": arch.model_dump(mode="json"),
            "frozen": self.engine.fingerprint,  # collective: now, when every rank is here
            "lora": config.lora.model_dump(mode="json", exclude={"save", "layout"}),
            "moments": config.optim.state_dtype,
        }
        self.now = JobState()
        self.tidied_time = time.monotonic()
        adapted = "\n".join(self.engine.stages.trained)
        parts = {"unembed": "head", "mlp": "moe|mlp|expert", "attn": "attn"}
        self.trains = {part: bool(re.search(words, adapted)) for part, words in parts.items()}

    # ---- several ranks -------------------------------------------------------------------------

    def follow(self) -> None:
        """Perform the main rank's commands until it calls :meth:`dismiss`."""
        while text := self.world.broadcast(""):
            with suppress(Exception):  # the main rank knows of it, and decides
                self.agree(partial(self.perform, _COMMANDS.validate_json(text)))
            self.tidy()

    def dismiss(self) -> None:
        """Let the other ranks return from :meth:`follow`. Called on the main rank, at the end."""
        if self.world.size > 1:
            self.world.broadcast("")

    def tidy(self) -> None:
        """Collect Python's garbage, once a minute.

        A collection visits all objects that compilation has made, which takes 0.4 s.
        """
        if time.monotonic() > self.tidied_time + _GARBAGE_SECONDS:
            gc.collect()
            self.tidied_time = time.monotonic()

    def agree(self, work: Callable[[], _R]) -> _R:
        """Return ``work()``, which all ranks do now. If it fails on one rank it fails on all."""
        result, failed = None, list[Exception]()
        try:
            result = work()
        except Exception as failure:  # noqa: BLE001 - raised below, when all ranks know of it
            failed.append(failure)
        others = self.world.any("".join(f"{type(error).__name__}: {error}" for error in failed))
        if failed:
            raise failed.pop()  # a name here would keep it, and the pass's tensors, alive
        if others:
            raise RuntimeError(f"on another rank, {others}")
        return result  # pyright: ignore[reportReturnType]

    def _run(self, command: Command, requests: Sequence[StoredRequest] = ()) -> Any:
        """Perform ``command`` on all ranks. Called on the main rank, which has its ``requests``."""
        if self.world.size == 1:
            return self.perform(command, requests)
        self.world.broadcast(command.model_dump_json())
        return self.agree(partial(self.perform, command, requests))

    def perform(self, command: Command, requests: Sequence[StoredRequest] = ()) -> Any:
        """Do this rank's part of ``command``; its ``requests`` are read from files if missing."""
        match command:
            case Activate():
                return self._activate(command)
            case Serve(number=number):
                request = requests[0] if requests else self._read(number)
                return self._serve(number, request.request, command.waits)
            case Generate(first=first, count=count):
                return self._generate(requests or [self._read(first + i) for i in range(count)])
            case Skip():
                if command.forgets_step:
                    self.engine.forget()
                self.now.seen = command.number + 1
            case SaveJob():
                return self._save()
            case Forget():
                self._forget(command.job)
            case EvictAll():
                self.deactivate()
                for job in list(self.held):
                    self._evict(job)

    def _read(self, number: int) -> StoredRequest:
        return read_request(self.now.folder, number, self.limits)

    # ---- the active job ------------------------------------------------------------------------

    def resident(self, job: str) -> JobState | None:
        """Return the state of ``job`` if it is on the device."""
        state = self.now if self.now.id == job else self.held.get(job)
        return state if state is not None and state.place == "device" else None

    def has_gradient(self, job: str) -> bool:
        """Return whether ``job``, which is resident, is in the middle of a step."""
        is_now = self.now.id == job
        return not self.engine.is_between_steps if is_now else bool(self.held[job].since_step)

    def activate(self, job: str, seed: int, folder: Path, source: str | None = None) -> None:
        """Perform :class:`Activate`.

        ConfigError: the job's checkpoints are damaged; RunFailed: there is no room for the job
        that was active before.
        """
        self._run(Activate(job=job, seed=seed, folder=folder, source=source))

    def _activate(self, command: Activate) -> None:
        """Do this rank's part of :class:`Activate`."""
        if self.now.id == command.job:
            return
        held = self.held.pop(command.job, None)
        self.deactivate()
        if held is not None:
            self.engine.activate(held)
            self.now = held
            return
        now = self.now = JobState(None, command.seed, command.folder)  # no id: this may fail
        self.engine.activate(now)
        if Job(now.folder).is_sampler:
            now.kinds = ("model",)
            source = command.source
            found = None if source is None else open_checkpoint(now.folder.parent / source)
        else:
            run_folder = RunFolder(now.folder, self.world)
            found = run_folder.open("auto", self.engine.arch, self.world)
        if found is not None:
            self.engine.restore(now, found, now.kinds)
        else:
            self.engine.initialise(command.seed)
        now.saved, now.id = now.seen, command.job

    def deactivate(self, num_coming: int = 1) -> None:
        """Deactivate the active job, and hold its state.

        States stay on the device while it has room for ``num_coming`` more jobs beside them. Else
        those of the least recently active jobs move to host memory, and from there to the disk.
        """
        last, self.now = self.now, JobState()
        if last.id is None:
            self.engine.drop(last)
        else:
            self.engine.deactivate(last)
            self.held[last.id] = last
        # 1. From the device to host memory.
        resident = [held for held in self.held.values() if held.place == "device"]
        try:
            for held in resident[: max(0, len(resident) + num_coming - self._max_resident)]:
                self.engine.move_to_host(held)
        except RuntimeError as error:
            raise RunFailed(
                f"host memory has no room for a job between its turns ({error}); "
                "lower jobs.max_loaded"
            ) from None
        # 2. From there into checkpoints, or, in the middle of a step, into files of this process.
        loaded = [job for job, held in self.held.items() if held.place == "host"]
        for job in loaded[: -self.config.jobs.max_loaded]:
            if not self.held[job].since_step:
                self._evict(job)
                continue
            self._aside.mkdir(exist_ok=True)
            file = self._aside / f"{job}-{self.world.rank}.safetensors"
            if problem := self.world.any(self.held[job].move_to_file(file)):
                raise RunFailed(
                    f"a job cannot be written to disk between its turns: {problem}; raise "
                    "jobs.max_loaded"
                )

    def _evict(self, job: str) -> None:
        """Drop the state of ``job``. Save it first, unless it is a sampler or is within a step."""
        held = self.held.pop(job)
        if not held.since_step and held.saved != held.seen and held.kinds == self.engine.GROUPS:
            self.engine.activate(held)
            self.now = held
            self._save()
            self.now = JobState()
        self.engine.drop(held)

    def evict_all(self) -> None:
        """Perform :class:`EvictAll`."""
        self._run(EvictAll())

    def forget(self, job: str) -> None:
        """Perform :class:`Forget`: ``job`` has ended, or its state may be inconsistent."""
        self._run(Forget(job=job))

    def _forget(self, job: str) -> None:
        if self.now.id == job:
            self.engine.forget()
            self.held[job], self.now = self.now, JobState()
        if (held := self.held.pop(job, None)) is not None:
            self.engine.drop(held)

    def mark(self) -> LateValues:
        """Queue a number on the device, which is computed after all work that is queued already."""
        return LateValues(torch.ones(1, device=self.world.device).sum())

    def wait_for_device(self, mark: LateValues | None = None) -> None:
        """Wait until the device has computed ``mark``, by default a new one.

        RunFailed: the device has failed, as in a kernel.
        """
        try:
            (mark or self.mark()).read()
        except RuntimeError as error:
            raise RunFailed(
                f"the device has failed ({error}); nothing is lost: start the service again"
            ) from None

    # ---- saving --------------------------------------------------------------------------------

    def save(self) -> int:
        """Write a checkpoint of the active job, which is between two steps; raises RunFailed.

        Returns the number of requests that the oldest kept checkpoint has seen, or 0 while there
        are fewer than ``checkpoint.keep``.
        """
        return self._run(SaveJob())

    def _save(self) -> int:
        assert self.engine.is_between_steps
        folder = RunFolder(self.now.folder).checkpoints
        self.write(folder)
        self.now.note_saved()
        kept = list_checkpoints(folder)
        return (step_of(kept[0]) or 0) if len(kept) == self.config.checkpoint.keep else 0

    def write(self, root: Path, kinds: Sequence[str] = SharedEngine.GROUPS) -> None:
        """Write a checkpoint of the active job's groups ``kinds`` under ``root``."""
        now, settings = self.now, self.config.checkpoint
        progress = {"steps": now.steps, "tokens": now.tokens, "sample_index": 0}
        plan = SavePlan(
            root=root, step=now.seen, keep=settings.keep, keep_every=settings.keep_every
        )
        self.snapshots.save(plan, progress, {}, kinds)
        self.snapshots.wait()

    # ---- requests ------------------------------------------------------------------------------

    def serve(self, number: int, request: StoredRequest, waits: bool = False) -> LateResult:
        """Serve ``request``, number ``number`` of the active job, and return its late result.

        If ``waits``, or if there are several ranks, the result is computed before this returns.

        Raises:
            Refused: the job's state does not allow it, and is unchanged.
            Exception: any other; call :meth:`forget` then.
        """
        return self._run(Serve(number=number, waits=waits), [request])

    def _serve(self, number: int, request: api.JobRequest, waits: bool) -> LateResult:
        """Do this rank's part of :class:`Serve`."""
        torch.manual_seed(zlib.crc32(f"{self.now.seed}.{number}".encode()))  # of dropout
        late = self._queue(request)
        self.now.seen = number + 1
        if waits or self.world.size > 1:
            result = late()
            return lambda: result
        return late

    def _queue(self, request: api.JobRequest) -> LateResult:
        """Queue, on the device, the work of a request to a training run."""
        match request:
            case api.Forward() | api.ForwardBackward():
                (late,) = self.queue_pass([self.now], [request])
                return late
            case api.OptimStep():
                (late,) = self.queue_updates([self.now], [request])
                return late
            case api.SaveForSampler():
                result = self._save_for_sampler(request)
            case api.SavePeft():
                result = self._keep(request, "external_weights", self.engine.save_peft)
            case api.Save():
                if not self.engine.is_between_steps:
                    raise api.Refused(
                        "gradients of an unfinished step cannot be saved; send optim_step first"
                    )
                result = self._keep(request, "weights", self.write)
            case api.Load():
                result = self._load(request)
            case api.Unserved():
                raise api.Refused(request.problem)
            case api.Sampling():
                raise AssertionError("a training run has no such request")
        return lambda: result

    def skip(self, number: int, forgets_step: bool) -> None:
        """Perform :class:`Skip`."""
        self._run(Skip(number=number, forgets_step=forgets_step))

    def serve_batch(
        self, asked: Mapping[str, tuple[int, api.Forward | api.ForwardBackward | api.OptimStep]]
    ) -> list[LateResult]:
        """Serve a small request of each of several jobs in one pass, or by one update each.

        ``asked``: the number and the request of each job, by id. The jobs are resident, and their
        requests are of one type. Only for one rank.
        """
        self.deactivate(num_coming=0)
        self.held |= {job: self.held.pop(job) for job in asked}
        jobs = [self.held[job] for job in asked]
        for job, (number, _) in zip(jobs, asked.values(), strict=True):
            job.seen = number + 1
        updates = [request for _, request in asked.values() if isinstance(request, api.OptimStep)]
        if updates:
            return self.queue_updates(jobs, updates)
        passes = [request for _, request in asked.values() if isinstance(request, api.Pass)]
        if self.config.compile.is_on:  # compiled for max_tenants parts: the rest are empty
            missing = self.config.jobs.max_tenants - len(jobs)
            jobs += [JobState(tensors={**jobs[0].tensors}) for _ in range(missing)]
            passes += [passes[0].model_copy(update={"data": []})] * missing
        with self.engine.batched(jobs):
            return self.queue_pass(jobs, passes)[: len(asked)]

    def queue_updates(
        self, jobs: Sequence[JobState], requests: Sequence[api.OptimStep]
    ) -> list[LateResult]:
        """Queue an update of each job, and return their late results."""
        return _late_results(self.engine.update(jobs, requests), len(jobs))

    def queue_pass(
        self, jobs: Sequence[JobState], requests: Sequence[api.Pass]
    ) -> list[LateResult]:
        """Queue one pass over the texts of all ``requests``, and return their late results."""
        engine = self.engine
        # 1. The texts as rows, and the losses of the jobs.
        samples = [datum.sample(i) for i, request in enumerate(requests) for datum in request.data]
        dealt = self.deal(samples, len(requests))
        losses = [ClientLoss.of(r.loss_fn, r.loss_fn_config) for r in requests]
        objective = JobsObjective(tuple(losses))
        # 2. The pass. In a pipeline only the last stage computes the loss, so all ranks get the
        #    log-probabilities from a separate pass.
        has_logprobs = engine.runner.pipeline is None
        logprobs_BS = [] if has_logprobs else score(engine, dealt.batches)
        learns = isinstance(requests[0], api.ForwardBackward)
        run = engine.forward_backward if learns else engine.forward
        totals = self.agree(lambda: run(dealt.batches, objective))  # fails on all ranks or none
        if has_logprobs:  # the last ones: a pass may have been run again
            logprobs_BS = [x_BS.float() for x_BS in objective.logprobs[-len(dealt.batches) :]]
        objective.logprobs.clear()
        for job, request in zip(jobs, requests, strict=True):
            job.tokens += learns * sum(len(datum.tokens) for datum in request.data)
        # 3. Results, when the device has computed them.
        late_logprobs = [LateValues(x_BS) for x_BS in logprobs_BS]
        late_losses = LateValues(torch.stack([*totals.terms.values()]))

        def results() -> list[Result]:
            read = [late.read() for late in late_logprobs]
            found = iter(dealt.by_sample(read, lambda x: api.finite(x[1:].tolist())))
            values = api.finite(late_losses.read().tolist())
            return [
                {"logprobs": [next(found) for _ in request.data], "loss": loss}
                for request, loss in zip(requests, values, strict=True)
            ]

        return _late_results(results, len(requests))

    def deal(self, samples: Sequence[Sample], num_parts: int = 1) -> DealtSamples:
        """Pack this rank's share of ``samples`` into rows that are as short as possible.

        ``num_parts``: number of jobs that share the pass; ``group`` of a sample is its job's index.
        """
        seq_len, rows = self.config.data.seq_len, self.config.train.micro_batch_size
        longest = max(len(sample.tokens) for sample in samples) - 1
        if num_parts > 1:
            rows, seq_len = self.engine.part_rows, self.engine.part_seq_len
            tokens_of_jobs = [0] * num_parts
            for sample in samples:
                tokens_of_jobs[sample.group] += len(sample.targets)
            longest = max(tokens_of_jobs)
        if not self.config.compile.is_on:
            seq_len = min(seq_len, -(-longest // _ROW_MULTIPLE) * _ROW_MULTIPLE)
            rows = min(rows, -(-len(samples) // self.world.dims.data_ranks))
        return DealtSamples(
            self.engine,
            samples,
            order=range(len(samples)),
            seq_len=seq_len,
            micro_batch_size=rows,
            num_parts=num_parts,
        )

    # ---- sampling ------------------------------------------------------------------------------

    def generate(self, first: int, requests: Sequence[StoredRequest]) -> list[Result] | None:
        """Serve ``requests`` of the active sampler together, or as many as one answer may hold.

        ``first``: number of the first one. None: :attr:`is_cancelled` returned True.
        """
        return self._run(Generate(first=first, count=len(requests)), requests)

    def _generate(self, stored: Sequence[StoredRequest]) -> list[Result] | None:
        # 1. The sampler's weights; no cache or NaN of another job stays.
        self.update_weights()  # empties the cache
        generator = self.generator
        generator.wipe()  # diverged weights of a job before may have left NaN there
        generator.version = self.now.steps
        # 2. This rank's share of the requests.
        asked, requests = self._admitted(stored)
        rank, leaders = self.world.rank, self.leaders
        mine = requests[leaders.index(rank) :: len(leaders)] if rank in leaders else []
        # 3. Generation, until all ranks are done: others may need this rank's experts.
        done: dict[tuple[int, int], Result] = {}
        try:
            generator.submit(*mine)
            while generator.goes_on(generator.is_busy):
                for c in generator.step():
                    if c.finish_reason is not None:
                        i = int(c.request_id)
                        done[i, c.index] = asked[i].answer(c)
                if self.is_cancelled():
                    for request in mine:
                        generator.abort(request.id)
        finally:
            for request in mine:
                generator.abort(request.id)
        # 4. Results of all ranks.
        parts = self.world.gather({} if self.is_cancelled() else done)
        found = {key: c for part in parts for key, c in part.items()}
        if len(found) < sum(one.num_samples for one in asked):
            return None
        return [
            {
                "prompt_logprobs": found[i, 0].pop("prompt_logprobs", None),
                "sequences": [found[i, k] for k in range(one.num_samples)],
            }
            for i, one in enumerate(asked)
        ]

    def _admitted(
        self, stored: Sequence[StoredRequest]
    ) -> tuple[list[api.Sampling], list[Request]]:
        """Return as many of the first requests as one answer may hold.

        Each is returned as the client sent it, and as the generator's :class:`Request`.
        """
        limits, asked, requests = self.limits, list[api.Sampling](), list[Request]()
        completions = logprobs = 0
        for key, body in stored:
            assert isinstance(body, api.Sampling)
            params = body.params(zlib.crc32(f"{self.now.seed}.{key}".encode()), limits)
            completions += params.n
            logprobs += params.n * params.max_tokens * params.logprobs
            is_full = completions > limits.max_completions or logprobs > limits.max_logprobs
            if asked and is_full:
                break
            requests.append(Request(str(len(asked)), tuple(body.tokens), params))
            asked.append(body)
        return asked, requests

    # ---- saves ---------------------------------------------------------------------------------

    def _save_for_sampler(self, request: api.SaveForSampler) -> Result:
        write = partial(self.write, kinds=("model",))
        if request.path is not None:
            return self._keep(request, "sampler_weights", write)
        number = request.sampling_session_seq_id
        assert number is not None  # it has one of the two
        self._keep(request.model_copy(update={"path": str(number)}), SAMPLERS, write)
        sampler = Sampler.of_run(str(self.now.id), self.now.seed, number)
        return {"sampling_session_id": sampler.id}

    def _keep(self, request: api.Save, kind: str, write: Callable[[Path], None]) -> Result:
        """Let ``write`` save the active job in the folder of a save; return the save's path."""
        seen, is_main = self.now.seen, self.world.is_main
        folder = SaveFolder(self.now.folder / kind / str(request.path))
        max_saves = 2**31 if kind == SAMPLERS else self.config.jobs.max_saves

        def make_room() -> str:
            """Return why there is no room, "" if there is some; raises DamagedJob."""
            return folder.make_room(seen, request.overwrite, max_saves) if is_main else ""

        if problem := self.world.broadcast(self.agree(make_room)):
            raise api.Refused(problem)
        write(folder.path)
        if is_main:
            folder.write(seen, request.ttl_seconds)
        return {"path": f"tinker://{self.now.id}/{kind}/{request.path}"}

    def _load(self, request: api.Load) -> Result:
        engine, path = self.engine, self.now.folder.parent / api.source_of(request.path)
        found = self.agree(lambda: open_checkpoint(SaveFolder(path).checkpoint()))
        engine.forget()
        engine.restore(self.now, found, engine.GROUPS if request.optimizer else ("model",))
        if not request.optimizer:
            engine.optimizer.begin()
            self.now.steps = 0
        self.now.has_loaded = True
        return {"path": request.path, "model_id": self.now.id}


def _late_results(results: Callable[[], list[Result]], number: int) -> list[LateResult]:
    """Return one function per result; together they call ``results`` at most once."""
    once = cache(results)
    return [lambda i=i: once()[i] for i in range(number)]
