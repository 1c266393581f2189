"""The objects around a run's steps: folder, reports, checkpoints, callbacks, requests to stop.

:class:`moetrain.train.loop.Trainer` and :class:`moetrain.rl.loop.RlTrainer` are such runs. Each has
its own loop, in its ``fit``. This module has only the objects that a loop uses, and the actions on
them. Nothing here calls the loop. Within a step nothing waits for the device.
"""

import gc
import json
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from moetrain.checkpoint.read import Checkpoint
from moetrain.checkpoint.save import Saved
from moetrain.config import ConfigError
from moetrain.config.sources import RunFailed
from moetrain.data.tokenizer import Tokenizer
from moetrain.losses.balancing import RoutingStats
from moetrain.models.hf.files import write_files
from moetrain.train.callbacks import Best, Callback, Callbacks, Profile, Result, reporters_of
from moetrain.train.checkpointer import Checkpointer, Progress
from moetrain.train.engine import Engine
from moetrain.train.metrics import RankWatch, RoutingWatch, Throughput
from moetrain.train.objectives import router_loss
from moetrain.train.reporter import Reporter
from moetrain.train.run_folder import RunFolder
from moetrain.train.session import Session, garbage_collector_off, stop_signals
from moetrain.train.stops import BadSteps, StopRequests, Watchdog


@contextmanager
def claimed_folder(session: Session) -> Iterator[tuple[RunFolder, Checkpoint | None]]:
    """Claim the output folder while a run is built, and find the checkpoint that it resumes.

    Collective. Raises ConfigError: the folder cannot be used by all ranks, has no room, or holds no
    checkpoint that the run could resume.
    """
    config, world, arch = session.config, session.world, session.arch
    folder = RunFolder(Path(config.output_dir), world, config.checkpoint)
    folder.check_room(config, arch, session.saved)
    with folder.claimed():
        folder.check_shared(world, ", or set checkpoint.shared no")
        folder.open_memory(world)
        yield folder, folder.find_resumed(arch, world)
        world.barrier()  # every rank must have read the folder before its files are moved


class Run:
    """The objects of a run, and what its loop does with them.

    Attributes:
        config: the settings, final.
        world, device: this process among all, and its device.
        engine, model, optimizer: what is trained.
        folder: ``output_dir``.
        step, tokens: steps done and tokens trained on, since the run began.
        total_steps: the step at which the run ends.
        evaluated_at: the step of the last evaluation; -1: there was none.
        clock: measures the time of training, without evaluation and checkpoints.
        callbacks: what is called as the run goes along, :attr:`best` among them.
        reporter: writes metrics.jsonl and the terminal.
        stops: requests to stop or save, and skipped steps.
        watchdog: ends the process if a step hangs.
        checkpointer: saves and restores.
        expert_counts_LE: as :class:`~moetrain.train.callbacks.RunView` says.
    """

    step: int
    tokens: int
    evaluated_at: int

    def __init__(
        self,
        session: Session,
        folder: RunFolder,
        engine: Engine,
        *,
        callbacks: Sequence[Callback],
        total_steps: int,
        identity: str,
        trained_on: str,
        progress: Callable[[], Progress],
        is_rl: bool = False,
    ) -> None:
        """Make the objects; the run is at step 0 until :meth:`restore`.

        Args:
            session: the joined processes.
            folder: as :func:`claimed_folder` gives it.
            engine: the model and its optimizer.
            callbacks: the user's (:mod:`moetrain.train.callbacks`).
            total_steps: the length of the run.
            identity: hash of the data or tasks that are trained on.
            trained_on: the data or tasks that are trained on, in words for people.
            progress: returns what a checkpoint holds of the loop, such as the data's position.
            is_rl: the run learns by reinforcement.

        Raises ConfigError: the settings of ``log`` do not suit the run, or ranks have read other
        data than rank 0.
        """
        self.session, self.world, self.device = session, session.world, session.world.device
        self.config = config = engine.config
        self.engine, self.model, self.optimizer = engine, engine.model, engine.optimizer
        self.folder, self.run_folder = folder.path, folder
        self.step, self.tokens, self.evaluated_at = 0, 0, -1
        self.total_steps, self.identity, self.trained_on = total_steps, identity, trained_on
        self.is_rl = is_rl
        self._check_alike()
        config.log.check(total_steps)
        arch = engine.arch
        is_frozen = config.lora.rank > 0
        flops = arch.flops_per_token(config.data.seq_len, is_frozen=is_frozen)
        self.clock = Throughput(flops, self.device)
        self.best = Best()
        shown = reporters_of(config.log) if self.world.is_main else []
        self.callbacks = Callbacks([self.best, *shown, *callbacks, Profile()])
        self.reporter = Reporter(folder.path, config.log, is_main=self.world.is_main)
        self.rank_watch = RankWatch(self.world.gather, self.say)
        self.moe_layers = arch.moe_layer_indices
        self.routing_watch = RoutingWatch(self.moe_layers)
        self.expert_counts_LE: torch.Tensor | None = None
        self.stops = StopRequests(self.world, config.train.max_bad_steps)
        self.watchdog = Watchdog(config.launch.hang_seconds, self.world.rank, self.world.size)
        self._progress = progress
        self.checkpointer = Checkpointer(
            engine, folder, self.clock, progress=self._all_progress, on_saved=self._say_saved
        )

    def _check_alike(self) -> None:
        """Raise ConfigError on every rank if one has read other data, or other tasks, than rank 0.

        Each rank reads all data and trains on its share. Without this check the ranks would train
        on a wrong mixture, and nothing would fail.
        """
        main, rank = self.world.broadcast(self.identity), self.world.rank
        if found := self.world.any("" if self.identity == main else str(rank)):
            self.world.barrier()  # rank 0 may host the store, so the others must get this first
            name, what = "data.path", "files, or those of the tokenizer, differ"
            if self.is_rl:
                name, what = "rl.env", "tasks (rl.env, rl.prompts, rl.reward, tokenizer) differ"
            problem = f"the {what} on rank {found} from those on rank 0"
            raise ConfigError(name, f"{problem}; give all machines the same")

    def restore(self, found: Checkpoint) -> Checkpoint:
        """Load engine, step, tokens and callbacks from ``found``, and return what was loaded.

        The loop's own progress, which ``progress`` returned, is left to the caller. Raises as
        :meth:`Checkpointer.restore`.
        """
        found = self.checkpointer.restore(found, self.identity, self.total_steps)
        self.step, self.tokens = found.state["step"], found.state["tokens"]
        self.callbacks.load_state(found.state)
        return found

    # ---- around the loop -----------------------------------------------------------------------

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open the run's folder and log; at the end, leave the process group.

        Raises:
            RunFailed: too many steps in a row were not finite (a checkpoint of them is marked as
                failed, and ``auto`` does not resume it), or a checkpoint cannot be written.
            SystemExit: the run was stopped by SIGTERM (status 143) or Ctrl-C (status 130), and a
                checkpoint was written.
        """
        with self.run_folder.claimed():
            try:
                self.run_folder.set_aside(self.checkpointer.newest, self.step, self.world)
                self.reporter.open(self.total_steps, self.step)
                if self.world.is_main:
                    self.announce()
                self.run_folder.open_memory(self.world, self.step)
                with self.callbacks.running(self):
                    yield
                    self.checkpointer.wait()
                self.world.leave()
            except BadSteps as failure:
                saved = self.checkpointer.save_failed(self.step, self.best.step)
                raise RunFailed(f"{failure}; {saved}") from None
            finally:
                self.watchdog.pause()  # the calling program may catch the error and go on
                self.reporter.close()

    @contextmanager
    def stop_signals(self) -> Iterator[None]:
        """Collect stop signals while inside, and leave garbage collection to the loop."""
        with stop_signals() as self.stops.signals, garbage_collector_off():
            yield
        self.reporter.end_progress()

    def start_clocks(self) -> None:
        """Start to measure training, and the time to the next checkpoint."""
        self.clock.start()
        self.checkpointer.start_clock()

    @property
    def goes_on(self) -> bool:
        """True: the next step is taken."""
        return self.step < self.total_steps and not self.stops.asked_to_end

    def due(self, interval: int) -> bool:
        """Return whether something done every ``interval`` steps (0: never) is due now."""
        return interval > 0 and self.step % interval == 0

    def is_log_due(self) -> bool:
        """Return whether this step is logged: by ``log.interval``, the first, and the last."""
        return self.due(self.config.log.interval) or self.step in (1, self.total_steps)

    def count_step(self, skipped: torch.Tensor) -> None:
        """Count a step that was queued: for the watchdog, callbacks, requests and bad steps.

        Args:
            skipped: 0-d bool, the same on every rank.

        Raises BadSteps: the steps before this one reached ``train.max_bad_steps``.
        """
        self.watchdog.restart()
        if self.checkpointer.is_time():
            self.ask_to_save()
        self.callbacks.on_update(self)
        self.stops.count(skipped)

    def save_if_due(self) -> None:
        """Begin a checkpoint if it is time for one, and report one that is complete."""
        kind = self.checkpointer.due(self.step, asked=self.stops.asked_to_save)
        if kind and self.stops.skipped_in_row():  # its checkpoint would replace a good one
            self.say(
                f"step {self.step} was skipped because it was not finite, so it has no checkpoint"
            )
        elif kind:
            if kind == "disk":
                self.watchdog.pause()  # a disk may take long
            else:
                self.watchdog.restart()
            self.begin_save(in_memory=kind == "memory")
        self.checkpointer.poll()

    def end_step(self) -> None:
        """End a step whose logs, evaluation and checkpoint are done, if they were due."""
        self.callbacks.on_step(self)
        if self.due(self.config.train.gc_interval):
            gc.collect()
        self.watchdog.restart()

    def end_steps(self) -> None:
        """Write the last checkpoint, and leave if any rank has received a stop signal.

        Raises SystemExit: a rank has received a stop signal, and the checkpoint is written.
        """
        self.watchdog.pause()
        self.stops.check(is_over=True)
        if self.config.checkpoint.at_end:
            self.save()  # first, while stop signals are still collected: what follows takes long
        self.checkpointer.wait()
        if self.stops.is_signalled():
            self.save()
            signals = self.stops.signals
            number = signals[0] if signals else signal.SIGTERM  # another rank received it
            self.say(f"stopped by {signal.Signals(number).name} at step {self.step}")
            self.world.leave()
            raise SystemExit(128 + number)
        self.callbacks.on_last_step(self)

    def export(self, tokenizer: Tokenizer | None, chat_template: str | None) -> None:
        """Write ``output_dir/hf`` and ``output_dir/adapter``, where settings ask for them.

        With ``checkpoint.best`` the weights of the best evaluation are loaded into the model and
        exported. Otherwise the exports have the weights of the last step.

        Raises RunFailed: the checkpoint of the best evaluation cannot be read.
        """
        has_adapter = self.config.lora.rank and self.config.lora.save
        written = ["adapter"] * bool(has_adapter) + ["hf"] * self.config.checkpoint.save_hf
        if not written:
            return
        self._choose_weights(" and ".join(written))
        if has_adapter:
            self.engine.save_peft(self.folder / "adapter")
            if self.config.data.new_tokens and tokenizer is not None and self.world.is_main:
                write_files(self.folder / "adapter", tokenizer.export(chat_template).files)
            self.world.barrier()
        if not self.config.checkpoint.save_hf:
            return
        self.engine.save_hf(
            self.folder / "hf",
            dtype=self.config.checkpoint.hf_dtype,
            tokenizer=None if tokenizer is None else tokenizer.export(chat_template),
        )
        self.world.barrier()  # ranks wait here, since waiting in a collective would time out

    def _choose_weights(self, written: str) -> None:
        """Load the weights of the best evaluation if ``checkpoint.best`` asks for them.

        ``written``: the folders that are written, in words for messages.
        """
        best = self.best
        if best.step in (None, self.step):
            return
        if not self.config.checkpoint.best:
            if self.config.train.patience:
                self.say(
                    f"{written}: the weights of step {self.step}, the last; those of the best "
                    f"evaluation, step {best.step}, are kept and exported with checkpoint.best yes"
                )
            return
        path = best.path(self.run_folder.checkpoints)
        assert path is not None  # there is a best step
        if problem := self.checkpointer.load_weights(path):
            raise RunFailed(
                f"{written}: the best evaluation was at step {best.step}, and {problem}; "
                f"checkpoint export-hf {shlex.quote(str(self.folder))} writes the last step"
            )
        self.say(f"{written}: the weights of step {best.step}, the best evaluation")

    def result(self) -> Result:
        """Return the outcome of the run so far."""
        best, is_kept = self.best, self.config.checkpoint.best
        return Result(
            step=self.step,
            reason=self.stops.reason or self._length,
            loss=self.reporter.loss,
            best_step=best.step,
            best_value=best.value,
            best=best.path(self.run_folder.checkpoints) if is_kept else None,
            checkpoint=self.checkpointer.newest,
            folder=self.folder,
        )

    # ---- what callbacks may ask for ------------------------------------------------------------

    def end(self, reason: str, *, everywhere: bool = False) -> None:
        """End the run after this step, as if it were its last.

        Args:
            reason: the cause, which is printed and which :meth:`result` returns.
            everywhere: True: all ranks call this at the same step, and the run ends with it. False:
                any rank may call this, and all ranks end together at most two steps later.
        """
        if not self.stops.reason:
            self.say(f"ended at step {self.step}: {reason}")
        self.stops.end(reason, everywhere=everywhere)

    def say(self, text: str) -> None:
        """Print a line on the main rank, while the run is open."""
        self.reporter.say(text)

    def ask_to_save(self) -> None:
        """Ask all ranks to save, at most two steps later. Only the main rank's call counts."""
        self.stops.ask_to_save()

    def begin_save(self, *, in_memory: bool = False) -> Path:
        """Begin a checkpoint of this step (:meth:`Checkpointer.begin`)."""
        return self.checkpointer.begin(self.step, best=self.best.step, in_memory=in_memory)

    def save(self) -> Path:
        """Write this step's checkpoint, unless it exists, and wait for it.

        Raises RunFailed: the checkpoint cannot be written.
        """
        path = self.begin_save()
        self.checkpointer.wait()
        return path

    def report(self, row: Mapping[str, float | None]) -> None:
        """Log the values of a step or an evaluation, which are the same on every rank."""
        clean = {"step": self.step, **self.reporter.write(self.step, row)}
        self.callbacks.on_log(self, clean)
        if any(name.startswith("eval_") for name in clean):
            self.callbacks.on_evaluate(self, clean)

    def routing_row(self, routing: RoutingStats) -> dict[str, float]:
        """Return metrics of a step's routing over all ranks, and print warnings if it is uneven."""
        self.expert_counts_LE = routing.counts_LE
        for text in self.routing_watch.update(routing):  # every rank finds the same
            self.say(text)
        return self.routing_watch.health(routing)

    def announce(self) -> None:
        """Say what is about to run, and write ``config.json``."""
        config, arch, say = self.config, self.model.arch, self.say
        settings = json.dumps(config.to_dict(), indent=2)
        (self.folder / "config.json").write_text(settings, "utf-8")
        dtype = str(self.model.compute_dtype).removeprefix("torch.")
        say(
            f"moetrain: {arch.family}, {arch.num_params():,} parameters "
            f"({arch.num_active_params():,} active a token) on {self.world.size} x "
            f"{self.device.type}, {dtype}; {self.trained_on}; output in {config.output_dir}"
        )
        say(f"settings:\n{config.describe()}")
        if arch.moe_layer_indices:
            balance = router_loss(config, arch, is_rl=self.is_rl)
            say(f"load-balancing loss: coefficient {balance.coefficient:g} ({balance.origin})")
        say(f"{self.total_steps:,} steps, by {self._length}")
        if self.step >= self.total_steps:
            say(
                f"already trained to step {self.step}, nothing is left to do: raise "
                f"{self._length} to go on, set checkpoint.resume never to start again, or choose "
                "another output_dir"
            )

    @property
    def _length(self) -> str:
        """The setting that says how long the run is."""
        return "train.steps" if self.config.train.epochs is None else "train.epochs"

    def _all_progress(self) -> Progress:
        """Return the progress of this run, its loop and its callbacks."""
        own = self._progress()
        state = {"tokens": self.tokens, "data": self.identity}
        return Progress(state | own.state | self.callbacks.state(), own.tensors)

    def _say_saved(self, saved: Saved) -> None:
        self.say(f"checkpoint: {saved.path} ({saved.seconds:.1f} s)")
        self.callbacks.on_checkpoint(self, saved.path)
