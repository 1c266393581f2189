"""Run a schedule on this rank's stages. One loop over actions and transfers runs any schedule.

For each micro-batch, a stage sends two things to the next stage: the residual stream, and the
routing sums of all MoE layers so far, one fp32 row [N] a layer. So the last stage has the hidden
states and the routing of the whole model, and an objective needs to know nothing of stages. The
gradients of balancing losses travel back the same way. Every rank has every batch, so it knows the
shapes of what it receives.

The host never waits for the device while a schedule runs. The device waits for a received tensor
where it uses it. A sent tensor is kept for as many batches of transfers as can pass before its
receiver answers.

Left out on purpose: splitting what is sent among tensor parallel ranks (each sends only its own
tokens already), and freeing a stage's output between its sending and its backward.

Legend: B batch, S sequence, D model width, E experts, L MoE layers of all stages so far,
N the width of their rows (``RouterStats.packed_size``).
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moetrain.losses.balancing import RouterStats, RoutingStats
from moetrain.models.transformer import Transformer
from moetrain.parallel.fsdp.fsdp import FSDP
from moetrain.parallel.pipeline.schedules import Action, Schedule, Step
from moetrain.parallel.pipeline.stages import Stages
from moetrain.runtime.annotate import annotate

_B = TypeVar("_B")
Finish = Callable[[torch.Tensor, RoutingStats | None, _B], torch.Tensor]
"""Takes hidden states [B, S, D], the routing and a batch on the device. Returns the 0-d loss."""
_Tensors = tuple[torch.Tensor, ...]
"""A residual stream, and routing sums [L, N] unless L is 0; or the gradients of both."""


class Pipeline:
    """Runs this rank's stages, and talks to the ranks before and after them."""

    REMEMBERED = 8
    """Number of objectives whose term names all ranks keep. A run has one or two objectives."""

    def __init__(self, model: Transformer, fsdp: FSDP, stages: Stages) -> None:
        self.model = model
        self.fsdp = fsdp
        self.stages = stages
        self.plan = lru_cache(self._plan)
        # A name that is not kept costs a collective. So all ranks must drop the same entries at the
        # same call, which weak references and garbage collection would not ensure.
        self._names_of = lru_cache(self.REMEMBERED)(self._tell_names)

    def _plan(self, micro_batches: int, learns: bool) -> tuple[Schedule, list[Step]]:
        """Return the schedule of a call, and this rank's steps of it. Raises ConfigError."""
        plan = self.stages.plan
        if learns:
            schedule = plan.schedule(micro_batches)
        else:
            schedule = Schedule.forward_only(plan.rank_of_stage, micro_batches)
        return schedule, schedule.steps()[self.stages.rank]

    def run(self, batches: Sequence[Any], finish: Finish[Any], *, learns: bool) -> None:
        """Run every stage of this rank on all ``batches``, within :meth:`FSDP.work`. Collective.

        Args:
            finish: returns the loss. It is called on the last stage's rank alone, in the order
                of the micro-batches.
            learns: True: run the backwards too.
        """
        schedule, steps = self.plan(len(batches), learns)
        _Run(self, schedule, batches, finish, learns).run(steps)

    def broadcast_names(self, objective: object, names: list[str]) -> list[str]:
        """Return the names of ``objective``'s terms, which the last stage's rank knows. Collective.

        Only the first call for an objective communicates, and waits for the device.
        """
        self._names = names
        return self._names_of(objective)

    def _tell_names(self, objective: object) -> list[str]:
        found: list[Any] = [self._names]
        last, group = self.stages.plan.rank_of_stage[-1], self.stages.group
        dist.broadcast_object_list(found, group=group, group_src=last)
        return found[0]

    def broadcast_sums(
        self, count: int, sums: torch.Tensor | None, routing: RoutingStats | None
    ) -> tuple[torch.Tensor, RoutingStats | None]:
        """Return the last stage's ``count`` sums (fp64) and routing statistics, on all ranks.

        One broadcast carries both. Collective.
        """
        arch, last = self.stages.arch, self.stages.plan.rank_of_stage[-1]
        layers, flat_N = len(arch.moe_layer_indices), None
        if sums is not None:
            rows = () if routing is None else (routing.packed().flatten(),)
            flat_N = torch.cat([sums.double(), *rows])
        size = count + layers * RouterStats.packed_size(arch.num_experts)
        flat_N = self.stages.broadcast(last, flat_N, (size,), torch.float64)
        found = map(RouterStats.of_packed, flat_N[count:].view(layers, -1) if layers else ())
        return flat_N[:count], RoutingStats.of_layers([*found], arch.num_experts_per_token)


@dataclass
class _Run:
    pipeline: Pipeline
    schedule: Schedule
    batches: Sequence[Any]
    finish: Finish[Any]
    learns: bool
    made: dict[tuple[Action, int], _Tensors] = field(default_factory=dict)
    """The tensors that an action made for a stage, on this rank or on another."""
    arriving: dict[tuple[Action, int], list[dist.Work]] = field(default_factory=dict)
    """The receives under way, for entries of :attr:`made`."""
    graphs: dict[tuple[int, int], tuple[_Tensors, _Tensors]] = field(default_factory=dict)
    """The inputs and outputs of each (stage, micro-batch) forward, kept until its backward."""
    sent: deque[tuple[list[dist.Work], list[torch.Tensor]]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.model = self.pipeline.model
        self.fsdp = self.pipeline.fsdp
        self.stages = self.pipeline.stages
        self.backwards_left = sum(a.kind == "B" for a in self.schedule.actions[self.stages.rank])

    def run(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, list):
                self.transfer(step)
            elif step.kind == "F":
                self.forward(step)
            else:
                self.backward(step)
        while self.sent:
            _wait_for(self.sent.popleft()[0])

    # ---- actions -------------------------------------------------------------------------------

    def forward(self, action: Action) -> None:
        """Compute a stage's outputs from its inputs. The last stage's output is the loss."""
        model, stage = self.model, action.stage
        inputs = self.take(action._replace(stage=stage - 1), stage) if stage > 0 else ()
        batch = self.batches[action.micro_batch].to(self.stages.device)
        rows = model.prepare(batch.inputs)
        x = inputs[0] if inputs else model.embed_tokens(batch.inputs.tokens_BS)
        blocks = self.stages.plan.ranges[stage]
        x, layers = model.run(x, rows, blocks.start, blocks.stop)
        assert isinstance(x, torch.Tensor)  # blocks defer in generation alone
        counts = [*inputs[1:], *(layer.packed()[None] for layer in layers)]
        stats = (torch.cat(counts),) if counts else ()
        outputs: _Tensors = (x, *stats)
        if stage == self.schedule.num_stages - 1:
            if model.arch.tie_embeddings and stage > 0:
                self.fsdp.open(model.embed)  # whose matrix is also the head's
            hidden_BSD = model.head(x, rows)
            layers = [RouterStats.of_packed(row_N) for stats_LN in stats for row_N in stats_LN]
            outputs = (self.finish(hidden_BSD, model.routing(layers), batch),)
        else:
            self.made[action, stage + 1] = tuple(y.detach() for y in outputs)
        if self.learns:
            self.graphs[action[1:]] = inputs, outputs

    def backward(self, action: Action) -> None:
        """Compute the gradients of a stage's parameters and of its inputs."""
        inputs, outputs = self.graphs.pop(action[1:])
        is_last_stage = action.stage == self.schedule.num_stages - 1
        after = action._replace(stage=action.stage + 1)
        gradients = None if is_last_stage else self.take(after, action.stage)
        self.backwards_left -= 1
        self.fsdp.backward(outputs, gradients, is_last=self.backwards_left == 0)
        if action.stage > 0:
            # An input that nothing differentiable used has no gradient; its sender expects one.
            self.made[action, action.stage - 1] = tuple(
                torch.zeros_like(x) if x.grad is None else x.grad for x in inputs
            )

    def take(self, made: Action, stage: int) -> _Tensors:
        """Return the tensors that the action ``made`` produced for ``stage``.

        The outputs of a forward become leaves of autograd's graph if gradients are wanted.
        """
        _wait_for(self.arriving.pop((made, stage), []))
        found = self.made.pop((made, stage))
        is_leaf = made.kind == "F" and self.learns
        return tuple(x.requires_grad_() for x in found) if is_leaf else found

    # ---- transfers -----------------------------------------------------------------------------

    def transfer(self, batch: list[Any]) -> None:
        ops, sent, received = [], [], []
        for made, receiver, source, target in batch:
            if source == self.stages.rank:
                tensors, op, peer = self.made.pop((made, receiver)), dist.isend, target
                tensors = tuple(x.contiguous() for x in tensors)
                sent += tensors
            else:
                tensors, op, peer = self.empty_like(made, receiver), dist.irecv, source
                self.made[made, receiver] = tensors
                received.append((made, receiver))
            group = self.stages.group
            ops += [dist.P2POp(op, x, group=group, group_peer=peer) for x in tensors]
        with annotate("pp_transfer", *(op.tensor for op in ops)):
            works = dist.batch_isend_irecv(ops)
        self.arriving.update((key, works) for key in received)
        self.sent.append((works, sent))
        # The longest way from a message to an answer goes over all ranks and back.
        if len(self.sent) > 2 * self.schedule.num_ranks:
            _wait_for(self.sent.popleft()[0])  # on a GPU only later work waits, not the host

    def empty_like(self, made: Action, receiver: int) -> _Tensors:
        """Allocate the tensors in which ``receiver`` receives what the action ``made`` produces."""
        arch, plan = self.stages.arch, self.stages.plan
        boundary = min(made.stage, receiver)
        tokens_BS = self.batches[made.micro_batch].inputs.tokens_BS
        device, ranks = self.stages.device, self.stages.token_ranks
        leading = tokens_BS.shape if ranks == 1 else (1, tokens_BS.numel() // ranks)
        x = torch.empty(*leading, arch.hidden_size, dtype=self.model.compute_dtype, device=device)
        before = plan.ranges[boundary].stop
        num_layers = sum(i < before for i in arch.moe_layer_indices)
        if not num_layers:
            return (x,)
        width = RouterStats.packed_size(arch.num_experts)
        return x, torch.empty(num_layers, width, device=device)


def _wait_for(works: list[dist.Work]) -> None:
    """Wait for each work, and only once: with gloo, a second wait waits for the next message."""
    while works:
        works.pop().wait()
