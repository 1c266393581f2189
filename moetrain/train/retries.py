"""Runs passes with gradients, eagerly or as replays of CUDA graphs.

With ``moe.dispatch_mode`` static, tokens travel in buffers of fixed sizes. Rows that find no room
there are dropped and counted. A pass that dropped rows is run again, with exact sizes.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moetrain.config import Config
from moetrain.runtime.graphs import Graphs, pad_documents
from moetrain.train.objectives import MicroBatch, Objective
from moetrain.train.passes import ModelRunner, Pass, Totals

_B = TypeVar("_B", bound=MicroBatch)


class GradientPasses:
    """Runs the passes with gradients of a step.

    Attributes:
        num_retried: passes that were run again because rows were dropped.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: Config,
        graphs: Graphs | None,
        work: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Prepare to run passes. Collective.

        Args:
            runner: runs the model.
            config: the settings of the run.
            graphs: captures and replays passes (``compile.cuda_graphs``); None: they run eagerly.
            work: returns a context in which the model may be called.
        """
        self.runner, self.config, self.graphs, self._work = runner, config, graphs, work
        self.num_retried = 0
        self._agree: Any = None
        if graphs is not None and runner.world.size > 1:
            hosts: Any = dist.new_group(backend="gloo")
            self._agree = partial(dist.all_reduce, op=dist.ReduceOp.MAX, group=hosts)

    def run(
        self,
        batches: Sequence[_B],
        objective: Objective[_B],
        sizes: Mapping[str, torch.Tensor],
        *,
        is_first: bool,
    ) -> Totals:
        """Add the gradients of ``objective`` over ``batches`` to those of the step.

        Args:
            sizes: the objective's denominators over the whole global batch.
            is_first: the step has no gradients of earlier passes. Only then may rows be dropped,
                because running the pass again clears the gradients of the whole step. A later pass
                therefore has exact sizes from the beginning.
        """
        run = self.run_now if self.graphs is None else self._replay
        return run(batches, objective, sizes, is_first=is_first)

    def run_now(
        self,
        batches: Sequence[_B],
        objective: Objective[_B],
        sizes: Mapping[str, torch.Tensor],
        *,
        is_first: bool,
    ) -> Totals:
        """Do what :meth:`run` does, without a graph."""
        with nullcontext() if is_first else self.runner.exact_sizes():
            done = self._pass(batches, objective, sizes)
        # Only with fixed sizes: this waits for the last forward, while its backward runs.
        if done.dropped is not None and done.dropped.read() > 0:
            done = self._run_again(batches, objective, sizes)
        return done.totals()

    def _replay(
        self,
        batches: Sequence[_B],
        objective: Objective[_B],
        sizes: Mapping[str, torch.Tensor],
        *,
        is_first: bool,
    ) -> Totals:
        assert self.graphs is not None
        runner = self.runner
        same = pad_documents(batches, self._agree)
        if same is None or (runner.static is not None and not is_first):
            with runner.exact_sizes():
                return self._pass(batches, objective, sizes).totals()

        def learn(inputs: Any) -> tuple[Totals, torch.Tensor | None]:
            done = self._pass(inputs[0], objective, inputs[1])
            return done.totals(), done.lost

        runner.before_forward()
        runner.fsdp.refresh()
        inputs = [batch.to(runner.world.device) for batch in same], dict(sizes)
        totals, lost = self.graphs.run([objective], learn, inputs)
        # Only with fixed sizes: this waits for the replay.
        if lost is not None and lost.item() > 0:
            return self._run_again(batches, objective, sizes).totals()
        return totals

    def _run_again(
        self, batches: Sequence[_B], objective: Objective[_B], sizes: Mapping[str, torch.Tensor]
    ) -> Pass[_B]:
        """Replace the gradients of a pass that dropped rows: run it again, with exact sizes."""
        self.num_retried += 1
        self.runner.fsdp.clear_gradients()
        with self.runner.exact_sizes():
            return self._pass(batches, objective, sizes)

    def _pass(
        self, batches: Sequence[_B], objective: Objective[_B], sizes: Mapping[str, torch.Tensor]
    ) -> Pass[_B]:
        """Run one pass with gradients eagerly, whether or not it drops rows."""
        drops = self.config.lora.dropout > 0
        with self._work(), self._own_draws() if drops else nullcontext():
            return Pass(
                self.runner,
                objective,
                sizes,
                learns=True,
                balances_globally=self.config.moe.aux_loss_scope == "global_batch",
                reads_dropped=self.graphs is None,
            ).run(batches)

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        """Use random numbers within the context that no other rank and no other call has.

        They follow from one number that each call draws from torch's random state. So a run that
        resumes with the saved state draws the same ones.
        """
        world = self.runner.world
        key = f"{self.config.train.seed}.{world.data_rank}.{self.runner.stages.rank}"
        call = int(torch.randint(2**31, ()))
        with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
            torch.manual_seed(zlib.crc32(f"{key}.{call}".encode()))
            yield
