"""Runs a schedule on this rank's stages: any of them, by one loop over its actions and transfers.

Between stages travel a micro-batch's residual stream and what its routers have counted so far, one
fp32 row [2E + 2] a MoE layer. So the last stage has the whole model's hidden states and routing, an
objective needs to know nothing of stages, and the gradients of balancing losses come back the way
the counts came, with no pass of their own. Batches are there on every rank: positions, document
ends and pads are not sent, and each rank knows the shapes of what it receives.

Nothing here waits for the device. What is received is waited for, on the device, where it is used;
what is sent is kept until as many batches later as pass before its receiver answers.

A pair's halves run block by block by turns, on a GPU on two streams: while the one waits for its
tokens to travel, or the host for how many come, the other computes. For that a micro-batch's graph
is cut between blocks.

Left out on purpose: sending a tensor parallel rank's part alone (it is a part already), and freeing
a stage's output between its sending and its backward.

Legend: B batch, S sequence, D model width, E experts, L MoE layers of all stages so far.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from moetrain.config import Config
from moetrain.kernels.annotate import annotate
from moetrain.models.moe import RouterStats, RoutingStats
from moetrain.models.transformer import Transformer
from moetrain.parallel.fsdp.fsdp import FSDP
from moetrain.parallel.mesh import ParallelDims
from moetrain.parallel.pipeline.schedules import RECIPES, Action, Schedule, Work, forward_only
from moetrain.parallel.pipeline.split import SplitBackward
from moetrain.parallel.pipeline.stages import PAIRS, SPLIT, Stages, schedule_of
from moetrain.parallel.pipeline.transfers import Step, Transfers, programs

REMEMBERED = 8
"""Objectives whose terms' names are known everywhere; a run has one or two."""

Finish = Callable[[torch.Tensor, RoutingStats | None, Any], torch.Tensor]
"""``finish(hidden_BSD, routing, batch)``: what is minimised, 0-d; ``batch`` is on the device."""

Tensors = tuple[torch.Tensor, ...]
"""A residual stream, and [L, 2E + 2] unless L is 0; or their gradients."""


class Pipeline:
    """This rank's stages, and the ranks before and after them."""

    def __init__(
        self, config: Config, dims: ParallelDims, model: Transformer, fsdp: FSDP, stages: Stages
    ) -> None:
        self.config, self.dims = config, dims
        self.model, self.fsdp, self.stages = model, fsdp, stages
        self.program = lru_cache(self._program)
        self.pairs = config.parallel.pp_schedule in PAIRS
        has_streams = self.pairs and stages.device.type == "cuda"
        self.streams = [torch.cuda.Stream(stages.device) for _ in range(2 * has_streams)]
        """Of micro-batches with even and odd numbers; none: all are on the current one."""
        self.watch: Callable[[Work], AbstractContextManager[Any]] = lambda _: nullcontext()
        """Entered around each thing that this rank does, once what it needs is there."""
        fsdp.splits = config.parallel.pp_schedule in SPLIT
        self._names: OrderedDict[object, list[str]] = OrderedDict()
        """Of objectives, the latest last. Held here, for all ranks must forget the same ones: when
        nobody else holds one, each rank's collector finds in its own time."""

    @property
    def batch_multiple(self) -> int:
        """Of which the number of micro-batches that the schedule takes is a multiple."""
        return self.dims.pp if RECIPES[self.config.parallel.pp_schedule].by_rounds else 1

    def _program(self, micro_batches: int, learns: bool) -> tuple[Schedule, list[Step]]:
        """The schedule of a call, and this rank's part of it.

        Raises:
            ConfigError: the schedule cannot do with so many.
        """
        if learns:
            schedule = schedule_of(self.config, self.dims, micro_batches)
        else:
            schedule = forward_only(self.stages.plan.rank_of_stage, micro_batches)
        return schedule, programs(schedule)[self.stages.rank]

    def run(self, batches: Sequence[Any], finish: Finish, *, learns: bool) -> None:
        """Every stage of this rank on all ``batches``; ``finish`` is called on the last stage's
        rank alone, in the order of the micro-batches.

        ``learns``: their backwards too; within :meth:`FSDP.work`. Collective.
        """
        schedule, steps = self.program(len(batches), learns)
        _Pass(self, schedule, batches, finish, learns).over(steps)

    def share_names(self, objective: object, names: list[str]) -> list[str]:
        """The names of ``objective``'s terms, which the last stage's rank has, on all. Collective.

        Waits for the device, but only the first time, as an objective's names are always the same.
        """
        if objective in self._names:
            self._names.move_to_end(objective)
        else:
            found: list[Any] = [names]
            last, group = self.stages.plan.rank_of_stage[-1], self.stages.group
            dist.broadcast_object_list(found, group=group, group_src=last)
            self._names[objective] = found[0]
            while len(self._names) > REMEMBERED:
                self._names.popitem(last=False)
        return self._names[objective]

    def share_sums(
        self, count: int, sums: torch.Tensor | None, routing: RoutingStats | None
    ) -> tuple[torch.Tensor, RoutingStats | None]:
        """``count`` sums (fp64) and the routing statistics of the last stage's rank, on all.

        One broadcast. Collective.
        """
        arch, last = self.stages.arch, self.stages.plan.rank_of_stage[-1]
        layers, experts = len(arch.moe_layer_indices), arch.num_experts
        shapes = [(layers, experts), (layers, experts), (layers,), (layers,), ()] if layers else []
        sizes = [count, *map(math.prod, shapes)]
        flat_N = None
        if sums is not None:
            parts = [] if routing is None else [x for x in routing if x is not None]
            flat_N = torch.cat([x.double().flatten() for x in (sums, *parts)])
        flat_N = self.stages.share(last, flat_N, (sum(sizes),), torch.float64)
        sums, *parts = flat_N.split(sizes)
        if not parts:
            return sums, None
        dtypes = (torch.int32, *[torch.float32] * 3, torch.int64)
        together = zip(parts, shapes, dtypes, strict=True)
        return sums, RoutingStats(*(x.view(shape).to(dtype) for x, shape, dtype in together))


class _Pass:
    """One call of :meth:`Pipeline.run`."""

    def __init__(
        self,
        pipeline: Pipeline,
        schedule: Schedule,
        batches: Sequence[Any],
        finish: Finish,
        learns: bool,
    ) -> None:
        self.pipeline = pipeline
        self.model, self.fsdp, self.stages = pipeline.model, pipeline.fsdp, pipeline.stages
        self.schedule, self.batches = schedule, batches
        self.finish, self.learns = finish, learns
        self.made: dict[tuple[Action, int], Tensors] = {}
        """What actions of this or another rank made for a stage of this or another."""
        self.works: dict[tuple[Action, int], list[dist.Work]] = {}
        """Of what is arriving."""
        self.kept: dict[tuple[int, int], _StageGraph] = {}
        """Of each (stage, micro-batch), until its backward."""
        self.sent: deque[tuple[list[dist.Work], list[torch.Tensor]]] = deque()
        self.halves: dict[tuple[int, int], Callable[..., None]] = {}
        """Those of weights that are still to come."""
        mine = [part for work in schedule.actions[self.stages.rank] for part in work.parts]
        self.num_left = sum(action.kind in ("B", "W") for action in mine)

    def over(self, steps: Sequence[Step]) -> None:
        """All of this rank's steps."""
        for step in steps:
            if isinstance(step, Transfers):
                self.transfer(step)
            else:
                self.work(step)
        while self.sent:
            self.wait_for_oldest()

    def work(self, work: Work) -> None:
        """An action. Or the blocks of a pair's halves by turns: first one of the backward, which is
        queued as a whole, then one of the forward, whose host may wait for how it is routed."""
        run = {"F": self.forward, "B": self.backward, "I": self.inputs, "W": self.weights}
        parts = work.parts[::-1]
        halves = [run[part.kind](part) for part in parts]
        for half in halves:
            next(half)  # once what it needs has arrived
        with self.pipeline.watch(work), self.side_by_side():
            for _ in zip_longest(*map(self.on_its_stream, parts, halves)):
                pass

    # ---- streams -------------------------------------------------------------------------------

    @contextmanager
    def side_by_side(self) -> Iterator[None]:
        """Meanwhile streams run what was queued before, and afterwards what is queued next waits
        for them: so whatever goes from one to another is in order, memory that is free as well."""
        streams = self.pipeline.streams
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        yield
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    def on_its_stream(self, action: Action, half: Iterator[None]) -> Iterator[None]:
        """``half``, a part at a time."""
        is_done = None
        while not is_done:
            with self.stream_of(action.micro_batch):
                is_done = next(half, True)
            yield

    def stream_of(self, micro_batch: int) -> AbstractContextManager[Any]:
        """All of a micro-batch is on one: autograd runs a backward where its forward was, and what
        its backward frees nobody else takes. A pair's are an odd number apart."""
        streams = self.pipeline.streams
        return torch.cuda.stream(streams[micro_batch % 2]) if streams else nullcontext()

    # ---- actions: generators, which first take what has arrived, and rest between blocks --------

    def forward(self, action: Action) -> Iterator[None]:
        """A stage's outputs from what it gets; the last stage's output is what is minimised."""
        model, stage = self.model, action.stage
        got = self.take(action._replace(stage=stage - 1), stage) if stage > 0 else ()
        yield
        batch = self.batches[action.micro_batch].to(self.stages.device)
        rows = model.prepare(batch.inputs)
        graph = _StageGraph(got, is_cut=self.learns and self.pipeline.pairs)
        x, counts = got[0] if got else model.embed_tokens(batch.inputs.tokens_BS), list(got[1:])
        for i in self.stages.plan.ranges[stage]:
            x, layers = model.run(x, rows, i, i + 1)
            x, *more = graph.cut(x, *map(_packed, layers))
            counts += more
            yield
        stats = (torch.cat(counts),) if counts else ()
        graph.gave = (x, *stats)
        if stage == self.schedule.num_stages - 1:
            if model.lm_head is None and stage > 0:
                self.fsdp.open(model.embed)  # whose matrix is also the head's
            hidden_BSD = model.head(x, rows)
            layers = [_unpacked(row_N) for stats_LN in stats for row_N in stats_LN]
            graph.gave = (self.finish(hidden_BSD, model.routing(layers), batch),)
        else:
            self.made[action, stage + 1] = tuple(y.detach() for y in graph.gave)
        if self.learns:
            self.kept[action[1:]] = graph

    def backward(self, action: Action) -> Iterator[None]:
        """Gradients of a stage's parameters, and of what it got."""
        graph, gradients = self.kept.pop(action[1:]), self.gradients(action)
        yield
        self.num_left -= 1
        is_last = self.num_left == 0
        self.fsdp.backward(graph.gave, gradients, is_last=is_last)
        while graph.cuts:
            yield
            outputs, gradients = graph.last_cut()
            self.fsdp.backward(outputs, gradients, is_last=is_last)
        if self.pipeline.streams:
            self.fsdp.finish_reductions()  # where they began
        if action.stage > 0:
            self.give_back(action, graph.got, [x.grad for x in graph.got])

    def inputs(self, action: Action) -> Iterator[None]:
        """Gradients of what a stage got; of the first stage, which got nothing, there are none."""
        graph, gradients = self.kept.pop(action[1:]), self.gradients(action)
        yield
        if action.stage == 0:
            self.halves[action[1:]] = partial(self.fsdp.backward, graph.gave, gradients)
            return
        halves = SplitBackward(graph.gave, graph.got)
        self.give_back(action, graph.got, halves.inputs(gradients))
        self.halves[action[1:]] = partial(halves.weights, self.fsdp)

    def weights(self, action: Action) -> Iterator[None]:
        """Gradients of a stage's parameters, after :meth:`inputs`."""
        yield
        self.num_left -= 1
        self.halves.pop(action[1:])(is_last=self.num_left == 0)

    def gradients(self, action: Action) -> Tensors | None:
        """Of what ``action``'s stage gave; None: it is the last one."""
        if action.stage == self.schedule.num_stages - 1:
            return None
        return self.take(action._replace(stage=action.stage + 1), action.stage)

    def give_back(
        self, action: Action, got: Tensors, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """What the stage before is to have."""
        pairs = zip(got, gradients, strict=True)
        back = (torch.zeros_like(x) if gradient is None else gradient for x, gradient in pairs)
        self.made[action, action.stage - 1] = tuple(back)

    def take(self, made: Action, stage: int) -> Tensors:
        """What ``made`` has for ``stage``; that of a forward as leaves of a graph of its own."""
        _wait_for(self.works.pop((made, stage), []))
        found = self.made.pop((made, stage))
        is_leaf = made.kind == "F" and self.learns
        return tuple(x.requires_grad_() for x in found) if is_leaf else found

    # ---- transfers -----------------------------------------------------------------------------

    def transfer(self, batch: Transfers) -> None:
        """Begin to send and receive all of ``batch``."""
        ops, sent, arriving = [], [], []
        for made, receiver, source, target in batch.transfers:
            if source == self.stages.rank:
                tensors, op, peer = self.made.pop((made, receiver)), dist.isend, target
                tensors = tuple(x.contiguous() for x in tensors)
                sent += tensors
            else:
                with self.stream_of(made.micro_batch):  # whose memory it is to be
                    tensors = self.like(made, receiver)
                op, peer = dist.irecv, source
                self.made[made, receiver] = tensors
                arriving.append((made, receiver))
            group = self.stages.group
            ops += [dist.P2POp(op, x, group=group, group_peer=peer) for x in tensors]
        with annotate("pp_transfer", *(op.tensor for op in ops)):
            works = dist.batch_isend_irecv(ops)
        self.works.update((key, works) for key in arriving)
        self.sent.append((works, sent))
        # The longest way from a sending to an answer to it goes over all ranks and back.
        if len(self.sent) > 2 * self.schedule.num_ranks:
            self.wait_for_oldest()

    def wait_for_oldest(self) -> None:
        """Let go of what was sent first; on a GPU it is only what is queued next that waits."""
        works, _ = self.sent.popleft()
        _wait_for(works)

    def like(self, made: Action, receiver: int) -> Tensors:
        """Memory for what ``made`` has for the stage ``receiver``."""
        arch, plan = self.stages.arch, self.stages.plan
        boundary = min(made.stage, receiver)
        tokens_BS = self.batches[made.micro_batch].inputs.tokens_BS
        device, tp = self.stages.device, self.stages.tp
        leading = tokens_BS.shape if tp == 1 else (1, tokens_BS.numel() // tp)
        x = torch.empty(*leading, arch.hidden_size, dtype=self.model.compute_dtype, device=device)
        before = plan.ranges[boundary].stop
        num_layers = sum(i < before for i in arch.moe_layer_indices)
        if not num_layers:
            return (x,)
        return x, torch.empty(num_layers, 2 * arch.num_experts + 2, device=device)


class _StageGraph:
    """What a stage made of a micro-batch, for its backward: one graph of autograd, or several."""

    def __init__(self, got: Tensors, *, is_cut: bool) -> None:
        self.got, self.gave = got, got
        self.is_cut = is_cut
        self.cuts: list[tuple[Tensors, Tensors]] = []
        """What a block gave, and the leaves that stand for it in the next one's graph."""

    def cut(self, *outputs: torch.Tensor) -> Tensors:
        """``outputs`` of a block, as those that come after it get them."""
        if not self.is_cut:
            return outputs
        leaves = tuple(y.detach().requires_grad_(y.requires_grad) for y in outputs)
        self.cuts.append((outputs, leaves))
        return leaves

    def last_cut(self) -> tuple[Tensors, Tensors]:
        """Outputs of the last block whose backward is still to come, and their gradients."""
        pairs = [(y, leaf.grad) for y, leaf in zip(*self.cuts.pop(), strict=True)]
        found = [(y, gradient) for y, gradient in pairs if gradient is not None]
        return tuple(y for y, _ in found), tuple(gradient for _, gradient in found)


def _wait_for(works: list[dist.Work]) -> None:
    """Once each: gloo would take a second wait for one on the next message."""
    while works:
        works.pop().wait()


def _packed(stats: RouterStats) -> torch.Tensor:
    """[1, 2E + 2], fp32: exact for counts of up to 2^24, of one micro-batch on one rank."""
    sums = torch.stack([stats.z_sum, stats.entropy_sum])
    return torch.cat([stats.counts_E.to(sums.dtype), stats.prob_sum_E, sums])[None]


def _unpacked(row_N: torch.Tensor) -> RouterStats:
    """Inverse of :func:`_packed`, of one row."""
    num_experts = (row_N.shape[0] - 2) // 2
    counts_E, prob_sum_E, z_sum, entropy_sum = row_N.split([num_experts, num_experts, 1, 1])
    counts_E = counts_E.detach().to(torch.int32)
    return RouterStats(counts_E, prob_sum_E, z_sum[0], entropy_sum[0].detach())
