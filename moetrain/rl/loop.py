"""The loop of reinforcement learning: generate, reward, learn.

    step:  weights into the generator, in place -> trajectories of the next prompts -> advantages
           -> packed rows -> the trainer's own log-probabilities -> one update or several

The first ``rl.supervised_steps`` steps imitate demonstrations. Every rank generates for its own
prompts. All ranks know all trajectories, so groups, rows and what is left out do not depend on the
mesh. A checkpoint also holds unfinished trajectories, so a resumed run has the same bits. With
``rl.placement`` apart other ranks generate (:mod:`moetrain.rl.apart`), and the ranks here wait for
the trajectories that are due.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import groupby
from typing import Any

import torch

from moetrain.checkpoint.read import Checkpoint
from moetrain.config import Config, ConfigError, logger
from moetrain.config.sources import RunFailed, shortened
from moetrain.generate.engine import Generator
from moetrain.generate.ranks import sharing_heads
from moetrain.generate.request import end_ids
from moetrain.generate.weights import WeightUpdate, replica
from moetrain.optim.schedule import learning_rate
from moetrain.parallel.mesh import TensorSlice
from moetrain.rl.apart import Fleet, generate_if_apart
from moetrain.rl.collect import Collector
from moetrain.rl.learn import Learned, Learner
from moetrain.rl.losses import advantages, length_reward
from moetrain.rl.setup import Setup
from moetrain.rl.trajectories import Trajectory
from moetrain.train.callbacks import Callback, Result
from moetrain.train.checkpointer import Progress
from moetrain.train.engine import Engine
from moetrain.train.faults import compare_replicas
from moetrain.train.objectives import Pretraining
from moetrain.train.run import Run, claimed_folder
from moetrain.train.samples import Sample
from moetrain.train.session import Session, prepare

_EVAL_SEED = 0
"""Seed of evaluations. It is constant, like the held-out tasks, so that evaluations compare within
a run and between runs."""
HOPELESS_STEPS = 3
"""Steps in a row after which the run ends, if all of their trajectories failed for one reason. That
is time enough to restart a service that an environment asks."""
_NUM_SHOWN = 8
"""Completions of an evaluation that are written to a file."""
PARTS = ("generate", "rewards", "train", "weights", "offload", "evaluate", "other")
"""Parts of the time. generate: trajectories, and waiting for those of other ranks; rewards: waiting
for environments while there is nothing to generate; train: scoring and updates; weights: copying
them into the generator; offload: moving moments, and the generator's memory, off and onto the
device; other: checkpoints and reports."""


class _TimeSplit:
    """Seconds of the loop by part. Parts may nest: each second counts for the innermost one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.total: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._taken = dict(self.total)
        """Totals when :meth:`take` was last called."""
        self._part = "other"
        self._started = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside as ``name``. Waits for the device at both ends."""
        around = self._part
        self._switch_to(name)
        yield
        self._switch_to(around)

    def _switch_to(self, name: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.total[self._part] += now - self._started
        self._part, self._started = name, now

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        self._switch_to(self._part)
        taken = {name: seconds - self._taken[name] for name, seconds in self.total.items()}
        self._taken = dict(self.total)
        return taken


def failed_alike(trajectories: Sequence[Trajectory | None]) -> Trajectory | None:
    """Return the last of ``trajectories`` if all of them failed for one reason, else None."""
    faults = {None if t is None else t.fault for t in trajectories}
    return trajectories[-1] if len(faults) == 1 and None not in faults else None


def _figures(trajectories: Sequence[Trajectory], prefix: str = "") -> dict[str, float]:
    """Return metrics of ``trajectories``, at least one. A failed one has a reward of 0.

    ``solved`` is the share with a reward of 1 or more.
    """
    number = len(trajectories)
    rewards = [0.0 if t.fault else t.reward for t in trajectories]
    return {
        f"{prefix}reward": sum(rewards) / number,
        f"{prefix}solved": sum(reward >= 1 for reward in rewards) / number,
        f"{prefix}length": sum(t.num_written for t in trajectories) / number,
        f"{prefix}overlong": sum(t.is_overlong for t in trajectories) / number,
    }


class RlTrainer(Run):
    """One run of reinforcement learning: ``RlTrainer(config).fit()``."""

    def __init__(self, config: Config, *, callbacks: Sequence[Callback] = ()) -> None:
        """Build the run, and resume it if there is something to resume.

        On a rank that only generates, generate instead, and raise SystemExit at the end.

        Args:
            config: the settings.
            callbacks: what to call as the run goes along (:mod:`moetrain.train.callbacks`).

        Raises ConfigError: a setting is wrong, or the run cannot be built with it on this machine.
        """
        generate_if_apart(config)
        session = Session(*prepare(config), config.rl.sleep)
        config, arch, rl = session.config, session.arch, session.config.rl
        with claimed_folder(session) as (folder, found):
            self.setup = setup = Setup(config, arch, session.world.device.type)
            self.window, self.tokenizer, self.tasks = setup.window, setup.tokenizer, setup.tasks
            groups = f"{setup.num_groups} prompts x {rl.group_size}"
            super().__init__(
                session,
                folder,
                Engine(config, arch, session.world),
                callbacks=callbacks,
                total_steps=setup.total_steps,
                identity=setup.digest,
                trained_on=f"{rl.env}: {groups} trajectories a step",
                progress=self.progress,
                is_rl=True,
            )
            self.learner = Learner(config, self.engine)
            self.supervised = Pretraining.of(config, arch, is_rl=True)
            model, experts = replica(self.engine)
            num_pages, max_sequences = setup.num_pages, rl.max_sequences
            heads, self.leaders = sharing_heads(self.world, experts)
            if rl.apart:  # the generator here only has the copy of the weights that is sent
                num_pages, max_sequences, self.leaders = 1, 1, [0]
            self.generator = Generator(
                model,
                self.tokenizer,
                num_pages=num_pages,
                max_sequences=max_sequences,
                experts=experts,
                heads=heads,
                cache=rl.generator_cache,
            )
            self.update_weights = WeightUpdate(self.engine, self.generator)
            stop_ids = end_ids(self.engine.model, self.tokenizer)
            self.fleet = None
            if rl.apart:
                self.fleet = Fleet(
                    self.generator,
                    setup.environment,
                    rl,
                    stop_ids=stop_ids,
                    longest=config.data.seq_len,
                    world=self.world,
                    config=config,
                )
            self.collector = self.fleet or Collector(
                self.generator,
                setup.environment,
                rl,
                stop_ids=stop_ids,
                longest=config.data.seq_len,
            )
            self.weights_at = -1
            """The step whose weights the generator has; -1: it has none."""
            self.lr = 0.0
            self.time = _TimeSplit(self.device)
            self.generated = self.trained = 0
            """Tokens of all ranks since the run began or was resumed."""
            self.failed: deque[Trajectory | None] = deque(maxlen=HOPELESS_STEPS)
            """For each recent step: a trajectory, if all failed for one reason, else None."""
            self.rollout_row: dict[str, float] = {}
            """Metrics of the step's trajectories; empty while demonstrations are learned."""
            if found is not None:
                self.resume(found)
            self.began_at = self.logged_at = self.step

    # ---- the loop ------------------------------------------------------------------------------

    def fit(self) -> Result:
        """Train to ``train.steps``; raises as :meth:`Run.opened` says."""
        train = self.config.train
        self.time = _TimeSplit(self.device)  # time between building and running does not count
        with self.opened():
            with self.stop_signals():
                if self.step == 0 and train.eval_interval and train.eval_first:
                    self.evaluate()  # where the held-out curve starts
                self.start_clocks()
                while self.goes_on:
                    learned = self.train_step()
                    self.count_step(learned.skipped)
                    if self.is_log_due():
                        self.log_step(learned)
                    if self.due(train.compare_replicas):
                        compare_replicas(self.engine.fsdp, self.world)
                    if self.due(train.eval_interval):
                        self.watchdog.pause()
                        self.evaluate()
                    self.save_if_due()
                    self.end_step()
                self.end_steps()  # saves; leaves by SystemExit if a stop signal came
            self.finish()
        return self.result()

    def train_step(self) -> Learned:
        """Take one step: imitate demonstrations, or generate and reinforce.

        Raises RunFailed: all trajectories of :data:`HOPELESS_STEPS` steps failed for one reason.
        """
        rl, optim = self.config.rl, self.config.optim
        self.clock.stop()  # it counts the time of training alone
        if self.step < rl.supervised_steps:
            peak = optim.lr if rl.supervised_lr is None else rl.supervised_lr
            warm = optim.model_copy(update={"lr": peak, "schedule": "constant"})
            self.lr = learning_rate(self.step, rl.supervised_steps, warm)
            learned, self.rollout_row = self._imitate(), {}
        else:
            if self.window.taken == 0:  # before the first trajectory
                train = self.config.train
                if train.eval_interval and (self.step or train.eval_first):
                    self.evaluate()  # after the demonstrations, if there are any
                if rl.kl_coef and not self.learner.reference:
                    self.learner.keep_reference()
            self.sync_weights()
            done = self.step - rl.supervised_steps
            self.lr = learning_rate(done, self.total_steps - rl.supervised_steps, optim)
            learned = self._reinforce()
        self.step += 1
        last = failed_alike(self.failed) if len(self.failed) == HOPELESS_STEPS else None
        if last is not None:
            checkpoint = self.config.checkpoint
            saves = checkpoint.interval or checkpoint.minutes or checkpoint.at_end
            saved = f"; saved to {self.save()}" if saves else ""
            raise RunFailed(
                f"rl.env {shortened(rl.env)}: every trajectory of {HOPELESS_STEPS} steps in a row "
                f"failed ({last.fault}), and nothing was learned; one of task {last.task}: "
                f"{last.detail[:400]}{saved}"
            )
        return learned

    def _imitate(self) -> Learned:
        """Learn demonstrations of the next tasks."""
        size = self.config.train.global_batch_size
        numbers = range(self.step * size, (self.step + 1) * size)
        with self.time.part("rewards"):
            tasks = [self.tasks.trained(number) for number in numbers]
            shown = self.collector.demonstrations(tasks)
        samples = [
            Sample(demonstration.tokens, demonstration.mask, advantage=0.0, group=number)
            for number, demonstration in zip(numbers, shown, strict=True)
        ]
        if (longest := max(len(s.tokens) for s in samples)) > self.config.data.seq_len:
            problem = f"{self.config.data.seq_len} is less than a demonstration of {longest} tokens"
            raise ConfigError("data.seq_len", f"{problem}; raise it, or make the task smaller")
        with self._learning(samples):
            batches = self.learner.deal(samples).batches
            learned = self.learner.update(batches, self.supervised, self.lr)
        learned.row["loss"] = learned.row.pop("cross_entropy")
        return learned

    def _reinforce(self) -> Learned:
        """Generate the trajectories that are due, and learn from them."""
        with self.time.part("offload"):
            if self.config.rl.offload:  # only weights stay
                self.engine.offload("gradients", "moments", "workspaces")
            try:
                with self.time.part("generate"):
                    samples = self.roll_out()
            finally:
                if self.config.rl.offload:
                    self.engine.reload()
        if not samples:  # no update, so neither momentum nor decay moves the weights
            skipped = torch.zeros((), dtype=torch.bool, device=self.device)
            return Learned(skipped, None, {"loss": 0.0, "grad_norm": 0.0})
        with self._learning(samples):
            learned = self.learner.learn(samples, self.generator.version, self.lr)
        row = learned.row
        row["loss"], moved = row.pop("policy"), row.pop("moved")
        row.setdefault("kl", moved)
        return learned

    def sync_weights(self) -> None:
        """Copy the engine's weights to the generator, if they have changed. Collective."""
        if self.generator.is_asleep:
            with self.time.part("offload"):
                self.generator.wake()
        if self.weights_at != self.step:
            sends = self.fleet.updating(self.step) if self.fleet else nullcontext()
            with self.time.part("weights"), sends:
                self.update_weights()
            if self.engine.fsdp.frees:  # the generator needs its memory now
                self.engine.fsdp.release()
            self.weights_at = self.generator.version = self.step

    # ---- trajectories --------------------------------------------------------------------------

    def roll_out(self) -> list[Sample]:
        """Return the samples of the trajectories that are due, those of all ranks, in one order."""
        rl, first = self.config.rl, self.window.taken
        self.collector.reset_counts()
        found: list[Trajectory] = []
        useful: set[int] = set()
        # 1. Trajectories, until enough groups teach something.
        again = rl.resample
        while True:
            due = self.next_groups(self.setup.num_groups - len(useful))
            for t in due:
                t.reward += length_reward(t.num_written, rl)
            found += due
            worth = advantages(found, rl, self._kls(found))
            pairs = zip(found, worth.values, strict=True)
            trained = [(t, value) for t, value in pairs if value is not None]
            useful = {t.group for t, _ in trained}
            if len(useful) >= self.setup.num_groups or not again:
                break
            again -= 1
        # 2. Metrics.
        self.failed.append(failed_alike(found))
        seconds = self.collector.seconds
        self.time.total["generate"] -= seconds["environment"]
        self.time.total["rewards"] += seconds["environment"]
        generated = sum(self.world.gather(self.collector.generated))
        self.generated += generated
        rate = generated / max(1e-9, sum(seconds.values()))
        ages = [self.step - v for t in found for v in t.versions if v >= 0]
        self.rollout_row = _figures(found) | {
            "prompts": self.window.taken - first,
            "useful_groups": len(useful),
            "advantage_spread": worth.spread,
            "staleness_mean": sum(ages) / max(1, len(ages)),
            "staleness_max": max(ages, default=0),
            "generated_tokens_per_second": rate,
            "generated_tokens_per_second_per_device": rate / (rl.apart or self.world.size),
            **{f"left_out/{reason}": number for reason, number in worth.left_out.items()},
            **(self.fleet.figures() if self.fleet else {}),
        }
        return [sample for t, value in trained for sample in t.samples(value)]

    def next_groups(self, number: int) -> list[Trajectory]:
        """Begin the next prompts. Return the trajectories of the ``number`` prompts that are
        due."""
        begun, due = self.window.advance(number)
        size, seed = self.config.rl.group_size, self.config.train.seed
        for prompt in self._mine(begun):
            self.collector.start(prompt, self.tasks.trained(prompt), size, seed)
        return self._all_of(self._mine(due))

    def _kls(self, trajectories: Sequence[Trajectory]) -> list[float] | None:
        """Return each trajectory's KL from the reference; None: the reward does not contain it.

        A failed trajectory has 0.
        """
        if not (self.config.rl.kl_coef and self.config.rl.kl_in == "reward"):
            return None
        with self.time.part("train"):
            parts = [[] if t.fault else t.samples(0.0) for t in trajectories]
            kls = iter(self.learner.kl_sums([sample for part in parts for sample in part]))
        return [sum((next(kls) for _ in part), 0.0) for part in parts]

    def _mine(self, numbers: Iterable[int]) -> list[int]:
        """Return the prompts among ``numbers`` for which this rank generates."""
        return [n for n in numbers if self.leaders[n % len(self.leaders)] == self.world.rank]

    def _all_of(self, mine: Sequence[int]) -> list[Trajectory]:
        """Finish this rank's groups ``mine``, and return the trajectories of all ranks."""
        groups = self.collector.finish(mine)
        parts = self.world.gather([t for group in groups for t in group])
        return sorted((t for part in parts for t in part), key=lambda t: (t.group, t.member))

    # ---- evaluation and reports ----------------------------------------------------------------

    def evaluate(self) -> None:
        """Log the reward on ``rl.eval_tasks`` held-out tasks, and write their completions."""
        rl = self.config.rl
        if not rl.eval_tasks or self.evaluated_at == self.step:
            return
        self.sync_weights()
        with self.time.part("evaluate"):
            mine = self._mine(range(rl.eval_tasks))
            for index in mine:  # groups below 0, which training does not use
                task = self.tasks.held_out(index)
                self.collector.start(-1 - index, task, 1, _EVAL_SEED, rl.eval_temperature)
            found = self._all_of([-1 - index for index in mine])[::-1]
            self.evaluated_at = self.step
            self.report(_figures(found, "eval_"))
            if self.world.is_main:
                self._write_completions(found[:_NUM_SHOWN])

    def _write_completions(self, trajectories: Iterable[Trajectory]) -> None:
        """Write ``trajectories`` as text, with the policy's turns in double brackets."""
        parts = []
        for t in trajectories:
            said = []
            for acts, run in groupby(zip(t.is_action, t.tokens, strict=True), lambda pair: pair[0]):
                ids, skips = [token for _, token in run], self.config.rl.skip_special_tokens
                text = self.tokenizer.decode(ids, skip_special_tokens=skips)
                said.append(f"[[{text}]]" if acts else text)
            ending = t.fault or ("cut off" if t.is_overlong else "ended")
            parts.append(f"--- task {t.task}, reward {t.reward:g}, {ending}\n{''.join(said)}\n")
        file = self.folder / "completions" / f"step-{self.step:08d}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(parts), "utf-8")

    def log_step(self, result: Learned) -> None:
        steps, self.logged_at = max(1, self.step - self.logged_at), self.step
        seconds = {name: taken / steps for name, taken in self.time.take().items()}
        row: dict[str, float | None] = {
            **dict.fromkeys(("entropy", "kl", "mismatch") if self.rollout_row else ()),
            **result.row,
            **self.rollout_row,
            "lr": self.lr,
            "tokens": self.tokens,
            **self.clock.take(),
            "skipped_steps": self.stops.skipped(),
            "step_seconds": sum(seconds.values()),
            **{f"seconds/{name}": value for name, value in seconds.items()},
        }
        if result.routing is not None:
            row |= self.routing_row(result.routing.map(self.world.sum))
        self.report(row)
        whole = max(sum(seconds.values()), 1e-9)
        parts = (f"{n} {s:.2f} ({s / whole:.0%})" for n, s in seconds.items() if s >= whole / 100)
        self.say(f"  time {whole:.2f} s: {'  '.join(parts)}")

    def finish(self) -> None:
        """Evaluate, export the weights, and log where the time went."""
        self.evaluate()
        self.export(self.tokenizer, self.tokenizer.chat_template)
        self.time.take()
        total, size = self.time.total, self.world.size + self.config.rl.apart
        whole = max(sum(total.values()), 1e-9)
        generating = whole if self.fleet else total["generate"] + total["rewards"]
        rates = {
            "generation": self.generated / max(1e-9, generating),
            "training": self.trained / max(1e-9, total["train"]),
            "trained over all": self.trained / whole,
        }
        shown = ", ".join(f"{name} {rate / size:,.0f}" for name, rate in rates.items())
        compared, differing = self.learner.compared, self.learner.differing
        for line in (
            f"time of {self.step - self.began_at:,} steps: {whole:,.1f} s",
            *(f"  {n:<9}{s:>10.1f} s {s / whole:>7.1%}" for n, s in total.items()),
            f"tokens/s per device: {shown}",
            f"rl mismatch: compared {compared:,} tokens with the trainer's own, "
            f"differing {differing:,}",
        ):
            self.say(line)

    @contextmanager
    def _learning(self, samples: Sequence[Sample]) -> Iterator[None]:
        """Count time and tokens while ``samples`` are trained.

        The generator sleeps meanwhile if ``rl.sleep`` asks for it.
        """
        if self.session.sleep != "never" and not self.generator.is_asleep:
            with self.time.part("offload"):
                self.generator.sleep(weights=self.session.sleep == "all")
            if self.session.sleep == "all":
                self.weights_at = -1
        self.clock.start()
        with self.time.part("train"):
            yield
        self.clock.stop()
        tokens = sum(len(sample.tokens) - 1 for sample in samples)
        self.tokens += tokens
        self.trained += tokens
        self.clock.count(tokens // self.world.size)

    # ---- saving and resuming -------------------------------------------------------------------

    def progress(self) -> Progress:
        """Return which prompts are begun, the trajectories under way, and the reference."""
        parts = self.world.gather(self.collector.unfinished())
        rows, tensors = Trajectory.to_state(t for part in parts for t in part)
        state: dict[str, Any] = {"sample_index": self.window.taken, "begun": self.window.begun}
        state |= {"under_way": rows, "tasks": self.setup.identity}
        state["chat_template"] = self.tokenizer.given_template
        mine = tensors if self.world.is_main else {}  # every rank has them all
        groups = {"rollouts": {name: TensorSlice.all_of(tensor) for name, tensor in mine.items()}}
        if self.learner.reference:
            groups["reference"] = self.learner.reference_state()
        return Progress(state, groups)

    def resume(self, found: Checkpoint) -> None:
        """Go on from ``found``, or from an earlier checkpoint if it is damaged."""
        for name in self.setup.edited_since(found):
            if self.world.is_main:
                text = (
                    "%s: the code was edited since %s; the run goes on with the code as it is now"
                )
                logger.warning(text, name, found.folder)
        found = self.restore(found)
        if "under_way" not in found.state:
            raise ConfigError(
                "checkpoint.resume",
                f"{str(found.folder)!r} is of a run that generated nothing; to begin from its "
                "weights give its export (checkpoint.save_hf) as model.path",
            )
        has_reference = "reference" in found.contents.groups
        if self.config.rl.kl_coef and found.state["sample_index"] and not has_reference:
            raise ConfigError(
                "rl.kl_coef",
                f"{self.config.rl.kl_coef}, but {str(found.folder)!r} is of a run without "
                "rl.kl_coef and holds no reference; set 0, or begin again from its export",
            )
        self.window.taken, self.window.begun = found.state["sample_index"], found.state["begun"]
        if self.config.rl.kl_coef and has_reference:
            self.learner.load_reference(found.group("reference"))
        self.sync_weights()
        tensors = found.tensors("rollouts")
        for trajectory in Trajectory.from_state(found.state["under_way"], tensors):
            if self._mine([trajectory.group]):
                self.collector.resume(trajectory)
