"""An engine and a generator that serve one job at a time.

A job's state is copied into the very tensors that the engine was built with, and out of them when
it is another job's turn (:mod:`moetrain.jobs.shared`). So one optimizer, one set of compiled blocks
and one generator serve all jobs, over one copy of the base model, which the generator shares.
Random numbers follow from a job's seed and the request's number, so a result depends on no other
job.

Of several ranks only the main one has jobs, their files and the HTTP server. Before it runs a
method that is decorated :func:`_together`, it broadcasts the name and the arguments, as JSON, to
the others, which wait in :meth:`JobSession.follow`. Then all report how it went: what has failed on
one rank has failed. Anything large lies in files, which all ranks see.

Left out on purpose: the order of jobs (:mod:`moetrain.jobs.scheduler`); a rank that fails in the
middle of a collective, for which the others wait until that gives up, as in any run.
"""

import gc
import json
import re
import shutil
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch

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
from moetrain.jobs.shared import JobState, SharedEngine
from moetrain.jobs.store import Job, SaveFolder
from moetrain.models.architecture import Architecture
from moetrain.runtime.memory import LateValues
from moetrain.train.preferences import score
from moetrain.train.run_folder import RunFolder
from moetrain.train.samples import DealtSamples, Sample
from moetrain.train.session import Session
from moetrain.train.state import Snapshots

_LOGPROB_BYTES = 32
"""JSON bytes of one likeliest token and its log-probability in an answer."""
_ROW_MULTIPLE = 64
"""Row lengths are multiples of it where nothing is compiled for one: pads are computed too."""
_GARBAGE_SECONDS = 60.0
_M = TypeVar("_M", bound=Callable[..., Any])
_R = TypeVar("_R")


def _together(method: _M) -> _M:
    """Decorate a method that the main rank calls, with JSON arguments, and every rank runs."""

    @wraps(method)
    def call(session: "JobSession", *args: Any) -> Any:
        if session.is_told or session.world.size == 1:
            return method(session, *args)
        session.world.broadcast(json.dumps([call.__name__, *args]))
        return session.run_here(method, *args)

    return call  # pyright: ignore[reportReturnType]


class JobSession:
    """The engine and generator of all jobs. One thread makes all calls.

    Attributes:
        limits: the largest requests that can be served.
        now: the job whose state is loaded, and how far it has come.
    """

    SAMPLERS = "samplers"
    """Folder of a run with weights that belong to one sampler each."""
    is_told = False
    """Whether every rank runs the method that is running now."""

    def __init__(self, config: Config, arch: Architecture) -> None:
        """Build everything; ConfigError for settings that do not fit the model or the device."""
        start = Session(config, arch, sleep="never")
        self.world = start.world
        config = self.config = start.config
        RunFolder(Path(config.output_dir)).check_shared(self.world)
        self.is_given_up: Callable[[], bool] = lambda: False
        """Called on the main rank while text is generated: whether to cancel the request."""
        self.engine = SharedEngine(config, arch, self.world)
        self.snapshots = Snapshots(self.engine)
        model, experts = replica(self.engine)
        pages, most = Pages.number_for(config), config.rl.max_sequences
        heads, self.leaders = sharing_heads(self.world, experts)
        sizes: dict[str, Any] = {"num_pages": pages, "max_sequences": most}
        named = config.is_set("data.tokenizer")
        tokenizer = load_tokenizer(config.data.tokenizer) if named else None
        self.generator = Generator(model, tokenizer, **sizes, experts=experts, heads=heads)
        self.update_weights = WeightUpdate(self.engine, self.generator)
        self.limits = api.Limits(
            arch.vocab_size,
            config.data.seq_len,
            self.generator.longest,
            config.jobs.max_completions,
            (config.jobs.max_request_mib << 20) // _LOGPROB_BYTES,
            () if tokenizer is None else end_ids(self.engine.model, tokenizer),
        )
        self._max_resident = self.engine.most_resident(start.room)
        self._held: dict[str, JobState] = {}
        """The states of jobs that were served last, the latest at the end."""
        self._aside = Path(config.output_dir) / "aside"
        """Folder for jobs that are in the middle of a step and have no room in memory."""
        if self.world.is_main:  # files of a killed process are of no use
            shutil.rmtree(self._aside, ignore_errors=True)
        self.world.barrier()
        self.base = {
            # Without what reward models have, of which there are no jobs.
            "architecture": arch.model_dump(mode="json", exclude={"num_labels", "pad_token_id"}),
            "frozen": self.engine.fingerprint,  # collective: now, when every rank is here
            "lora": config.lora.model_dump(mode="json", exclude={"save", "layout"}),
            "moments": config.optim.state_dtype,
        }
        """What the folder's jobs depend on."""
        self.now, self._tidied = JobState(), time.monotonic()
        adapted = "\n".join(self.engine.stages.trained)
        parts = {"unembed": "head", "mlp": "moe|mlp|expert", "attn": "attn"}
        self.trains = {part: bool(re.search(words, adapted)) for part, words in parts.items()}

    # ---- several ranks -------------------------------------------------------------------------

    def follow(self) -> None:
        """Run the methods that the main rank calls, until it calls :meth:`dismiss`."""
        while command := json.loads(self.world.broadcast("")):
            name, *args = command
            try:
                self.run_here(getattr(JobSession, name).__wrapped__, *args)
            except Exception as error:  # noqa: BLE001 - the main rank was told, and decides
                del error
            self.tidy()

    def tidy(self) -> None:
        """Collect Python's garbage, once a minute: to look through all that compiling has made
        takes 0.4 s."""
        if time.monotonic() > self._tidied + _GARBAGE_SECONDS:
            gc.collect()
            self._tidied = time.monotonic()

    def dismiss(self) -> None:
        """Let the other ranks return from :meth:`follow`. Called on the main rank, at the end."""
        if self.world.size > 1:
            self.world.broadcast("null")

    def run_here(self, method: Callable[..., _R], *args: Any) -> _R:
        """Run a method that every rank runs now; what fails on one rank fails on all."""
        before, self.is_told = self.is_told, True
        result, failed = None, list[Exception]()
        try:
            result = method(self, *args)
        except Exception as failure:  # noqa: BLE001 - raised below, when all ranks know of it
            failed.append(failure)
        finally:
            self.is_told = before
        others = self.world.any("".join(f"{type(error).__name__}: {error}" for error in failed))
        if failed:
            raise failed.pop()  # with a name here it would hold itself, and what the pass has made
        if others:
            raise RuntimeError(f"on another rank, {others}")
        return result  # pyright: ignore[reportReturnType]

    # ---- who sits here -------------------------------------------------------------------------

    def resident(self, job: str) -> JobState | None:
        """Return the state of ``job``, if it is on the device."""
        state = self.now if self.now.id == job else self._held.get(job)
        return state if state is not None and state.place == "device" else None

    def has_gradient(self, job: str) -> bool:
        """Whether ``job``, which is resident, is in the middle of a step."""
        is_now = self.now.id == job
        return not self.engine.is_between_steps if is_now else bool(self._held[job].since_step)

    @_together
    def sit(self, job: str, seed: int, folder: str, source: str | None = None) -> None:
        """Load the state of ``job``: as held, else from its newest checkpoint, else from its seed.

        A sampler's comes from ``source``, a checkpoint's path under the folder of jobs, if any.

        ConfigError: its checkpoints are damaged; RunFailed: there is no room for the job before it.
        """
        if self.now.id == job:
            return
        held = self._held.pop(job, None)
        self._leave()
        if held is not None:
            self.engine.enter(held)
            self.now = held
            return
        now = self.now = JobState(None, seed, Path(folder))  # nobody's, if that fails
        self.engine.enter(now)
        if Job(now.folder).is_sampler:
            now.kinds = ("model",)
            found = None if source is None else open_checkpoint(now.folder.parent / source)
        else:
            saved = RunFolder(now.folder, self.world)
            found = saved.open("auto", self.engine.arch, self.world)
        if found is not None:
            self.engine.restore(now, found, now.kinds)
        else:
            self.engine.begin(seed)
        now.saved, now.id = now.seen, job

    def _leave(self, more: int = 1) -> None:
        """Leave the current job, and hold its state on the device, if there is room for so many
        more jobs, or in host memory."""
        left, self.now = self.now, JobState()
        if left.id is None:
            self.engine.drop(left)
        else:
            self.engine.leave(left)
            self._held[left.id] = left
        resident = [held for held in self._held.values() if held.place == "device"]
        try:
            for held in resident[: max(0, len(resident) + more - self._max_resident)]:
                self.engine.copy_out(held)
        except RuntimeError as error:
            problem = f"there is no host memory for a job between its turns ({error})"
            raise RunFailed(f"{problem}; lower jobs.max_loaded") from None
        loaded = [job for job, held in self._held.items() if held.place == "host"]
        for job in loaded[: -self.config.jobs.max_loaded]:
            if not self._held[job].since_step:
                self._put_away(job)
                continue
            self._aside.mkdir(exist_ok=True)
            file = self._aside / f"{job}-{self.world.rank}.safetensors"
            if problem := self.world.any(self._held[job].put_down(file)):
                raise RunFailed(f"a job cannot be put aside, {problem}; raise jobs.max_loaded")

    def _put_away(self, job: str) -> None:
        """Save ``job``, a run that is not in the middle of a step, and hold it no longer."""
        held = self._held.pop(job)
        if not held.since_step and held.saved != held.seen and held.kinds == self.engine.GROUPS:
            self.engine.enter(held)
            self.now = held
            self.save()
            self.now = JobState()
        self.engine.drop(held)

    @_together
    def put_all_away(self) -> None:
        """Save all jobs, except those in the middle of a step, and hold none."""
        self._leave()
        for job in list(self._held):
            self._put_away(job)

    @_together
    def forget(self, job: str) -> None:
        """Drop the state of ``job``: it has ended, or the state may be inconsistent."""
        if self.now.id == job:
            self.engine.forget()
            self._held[job], self.now = self.now, JobState()
        if (held := self._held.pop(job, None)) is not None:
            self.engine.drop(held)

    def mark(self) -> LateValues:
        """Return a number that the device computes behind all that it was given before."""
        return LateValues(torch.ones(1, device=self.world.device).sum())

    def probe(self, mark: LateValues | None = None) -> None:
        """Wait for the device until it is at ``mark``; RunFailed: it has failed, as in a kernel."""
        try:
            (mark or self.mark()).read()
        except RuntimeError as error:
            problem = f"the device has failed ({error}); nothing is lost: start the service again"
            raise RunFailed(problem) from None

    # ---- saving --------------------------------------------------------------------------------

    @_together
    def save(self) -> int:
        """Write a checkpoint of the current job, between two steps; raises RunFailed.

        Returns how many requests every checkpoint of the job has seen.
        """
        assert self.engine.is_between_steps
        folder = RunFolder(self.now.folder).checkpoints
        self._write(folder)
        self.now.saved = self.now.seen
        kept = list_checkpoints(folder)
        return (step_of(kept[0]) or 0) if len(kept) == self.config.checkpoint.keep else 0

    def _write(self, root: Path, kinds: Sequence[str] = SharedEngine.GROUPS) -> None:
        now, settings = self.now, self.config.checkpoint
        progress = {"steps": now.steps, "tokens": now.tokens, "sample_index": 0}
        plan = SavePlan(
            root=root, step=now.seen, keep=settings.keep, keep_every=settings.keep_every
        )
        self.snapshots.save(plan, progress, {}, kinds)
        self.snapshots.wait()

    # ---- requests ------------------------------------------------------------------------------

    @_together
    def serve(self, number: int, waits: bool = False) -> Any:
        """Serve request ``number`` of the current job; return the result, or what waits for it,
        unless this ``waits`` or there are several ranks.

        Raises:
            Refused: the job's state does not allow it, and is unchanged.
            DamagedJob: the request's file is damaged.
            Exception: any other; call :meth:`forget` then.
        """
        entry = Job.request_in(self.now.folder, number)
        kind, request = entry["kind"], self.limits.parse(entry["kind"], entry["body"])
        torch.manual_seed(zlib.crc32(f"{self.now.seed}.{number}".encode()))  # dropout's
        if isinstance(request, api.Pass | api.OptimStep):
            (result,) = self._queued(kind, [self.now], [request])
        else:
            result = getattr(self, f"_{kind}")(request)
        self.now.seen = number + 1
        return result() if callable(result) and (waits or self.world.size > 1) else result

    @_together
    def pass_over(self, number: int, forgets_step: bool) -> None:
        if forgets_step:
            self.engine.forget()
        self.now.seen = number + 1

    def _unserved(self, request: Any) -> dict[str, Any]:
        raise api.Refused(request.problem)

    def serve_together(self, kind: str, asked: Mapping[str, tuple[int, Any]]) -> list[Any]:
        """Serve a small request each, with its number, of several jobs, which are resident, in one
        pass or by one update each. Returns what waits for each result."""
        self._leave(more=0)
        self._held |= {job: self._held.pop(job) for job in asked}
        jobs = [self._held[job] for job in asked]
        requests = [request for _, request in asked.values()]
        for job, (number, _) in zip(jobs, asked.values(), strict=True):
            job.seen = number + 1
        if kind == "optim_step":
            return self._queued(kind, jobs, requests)
        if self.config.compile.is_on:  # for one shape: further parts are empty
            missing = self.config.jobs.max_tenants - len(jobs)
            jobs += [JobState(tensors={**jobs[0].tensors}) for _ in range(missing)]
            requests += [requests[0].model_copy(update={"data": []})] * missing
        with self.engine.together(jobs):
            return self._queued(kind, jobs, requests)[: len(asked)]

    def _queued(self, kind: str, jobs: Sequence[JobState], requests: Sequence[Any]) -> list[Any]:
        """Queue a pass or the updates of ``jobs``; return what waits for each result."""
        if kind == "optim_step":
            late = cache(self.engine.update(jobs, requests))
        else:
            late = cache(self._pass(jobs, requests, kind == "forward_backward"))
        return [lambda i=i: late()[i] for i in range(len(jobs))]

    def _pass(
        self, jobs: Sequence[JobState], requests: Sequence[api.Pass], learns: bool
    ) -> Callable[[], list[dict[str, Any]]]:
        loss, *others = (api.ClientLoss.of(r.loss_fn, r.loss_fn_config) for r in requests)
        loss = replace(loss, others=tuple(others))
        samples = [datum.sample(i) for i, request in enumerate(requests) for datum in request.data]
        dealt = self._dealt(samples, len(requests))
        shows = (engine := self.engine).runner.pipeline is None  # other stages pass the loss by
        scored = [] if shows else score(engine, dealt.batches)
        run = engine.forward_backward if learns else engine.forward
        totals = self.run_here(lambda _: run(dealt.batches, loss))  # ranks go on together
        if shows:  # the last ones: a pass may have been run again
            scored = [x_BS.float() for x_BS in loss.seen[-len(dealt.batches) :]]
        loss.seen.clear()
        for job, request in zip(jobs, requests, strict=True):
            job.tokens += learns * sum(len(datum.tokens) for datum in request.data)
        late = [*map(LateValues, [*scored, torch.stack([*totals.terms.values()])])]

        def results() -> list[dict[str, Any]]:
            *logprobs_BS, losses = (numbers.read() for numbers in late)
            found = iter(dealt.by_sample(logprobs_BS, lambda x: api.finite(x[1:].tolist())))
            rows = zip(requests, api.finite(losses.tolist()), strict=True)
            return [{"logprobs": [next(found) for _ in r.data], "loss": x} for r, x in rows]

        return results

    def _dealt(self, samples: Sequence[Sample], parts: int = 1) -> DealtSamples:
        """Pack this rank's share of ``samples`` into rows that are no longer than they must be."""
        length, rows = self.config.data.seq_len, self.config.train.micro_batch_size
        most = max(len(sample.tokens) for sample in samples) - 1
        if parts > 1:
            rows, length = self.engine.part
            most = max(sum(len(s.targets) for s in samples if s.group == i) for i in range(parts))
        if not self.config.compile.is_on:
            length = min(length, -(-most // _ROW_MULTIPLE) * _ROW_MULTIPLE)
            rows = min(rows, -(-len(samples) // self.world.dims.data_ranks))
        return DealtSamples(
            self.engine,
            samples,
            order=range(len(samples)),
            seq_len=length,
            micro_batch_size=rows,
            num_parts=parts,
        )

    @_together
    def sample(self, first: int, count: int) -> list[dict[str, Any]] | None:
        """Serve requests of a sampler together, ``first`` and up to ``count`` in all.

        None: :attr:`is_given_up` said so.
        """
        self.update_weights()  # empties the cache, so that nothing depends on the job before
        generator, limits = self.generator, self.limits
        generator.wipe()  # diverged weights of a job before may have left NaN there
        generator.version = self.now.steps
        asked, requests, total, logprobs = list[api.Sampling](), [], 0, 0
        for number in range(first, first + count):
            entry = Job.request_in(self.now.folder, number)
            body = limits.parse("asample", entry["body"])
            assert isinstance(body, api.Sampling)
            seed = zlib.crc32(f"{self.now.seed}.{entry.get('key', number)}".encode())
            params = body.params(seed, limits)
            total += params.n
            logprobs += params.n * params.max_tokens * params.logprobs
            if asked and (total > limits.max_completions or logprobs > limits.max_logprobs):
                break
            asked.append(body)
            requests.append(Request(str(number - first), tuple(body.tokens), params))
        done: dict[tuple[int, int], dict[str, Any]] = {}
        leaders, rank = self.leaders, self.world.rank
        mine = requests[leaders.index(rank) :: len(leaders)] if rank in leaders else []
        try:
            generator.submit(*mine)
            while generator.goes_on(generator.is_busy):  # others may need this rank's experts
                for c in generator.step():
                    if c.finish_reason is not None:
                        i = int(c.request_id)
                        done[i, c.index] = asked[i].answer(c)
                if self.is_given_up():
                    for one in mine:
                        generator.abort(one.id)
        finally:
            for one in mine:
                generator.abort(one.id)
        parts = self.world.gather({} if self.is_given_up() else done)
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

    def _save_weights(self, request: api.Save) -> dict[str, Any]:
        if not self.engine.is_between_steps:
            raise api.Refused("a step is not over: its gradients are part of no save; step first")
        return self._keep(request, "weights", self._write)

    def _save_weights_for_sampler(self, request: api.SaveForSampler) -> dict[str, Any]:
        write = partial(self._write, kinds=("model",))
        if request.path is not None:
            return self._keep(request, "sampler_weights", write)
        number = str(request.sampling_session_seq_id)
        self._keep(request.model_copy(update={"path": number}), self.SAMPLERS, write)
        name = f"{str(self.now.id).partition(':')[0]}:sample:{number}"
        seed = zlib.crc32(f"{self.now.seed}.{number}".encode())
        new = {"name": name, "seed": seed, "source": f"{self.now.id}/{self.SAMPLERS}/{number}"}
        return {"sampling_session_id": name, "sampler": new}

    def _save_weights_external(self, request: api.Save) -> dict[str, Any]:
        return self._keep(request, "external_weights", self.engine.save_peft)

    def _keep(self, request: api.Save, kind: str, write: Callable[[Path], None]) -> dict[str, Any]:
        """Let ``write`` save the current job in the folder of a save; returns the save's path."""
        folder, seen = SaveFolder(self.now.folder / kind / str(request.path)), self.now.seen
        most = 2**31 if kind == self.SAMPLERS else self.config.jobs.max_saves
        is_main, room = self.world.is_main, partial(folder.make_room, seen, request.overwrite, most)
        problem = self.run_here(lambda _: room() if is_main else "")  # may be damaged
        if problem := self.world.broadcast(problem):
            raise api.Refused(problem)
        write(folder.path)
        if is_main:
            folder.write(seen, request.ttl_seconds)
        return {"path": f"tinker://{self.now.id}/{kind}/{request.path}"}

    def _load_weights(self, request: api.Load) -> dict[str, Any]:
        engine, path = self.engine, self.now.folder.parent / api.source_of(request.path)
        found = self.run_here(lambda _: open_checkpoint(SaveFolder(path).checkpoint()))
        engine.forget()
        engine.restore(self.now, found, engine.GROUPS if request.optimizer else ("model",))
        if not request.optimizer:
            engine.optimizer.begin()
            self.now.steps = 0
        return {"path": request.path, "model_id": self.now.id}
