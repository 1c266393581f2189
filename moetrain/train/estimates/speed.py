"""An estimate of the time of a training step, from counts of its work and from measured rates.

For each pipeline rank, the estimate counts matrix products, the bytes that other kernels move, the
update and messages. It divides each count by the rate that a GPU reaches, a measured share of the
rate in its datasheet. Gathers and reductions of parameters overlap the computation of the
neighbouring block, and count only as far as they take longer. Tensor parallel collectives and
dispatch overlap nothing. Pipelines are simulated by their schedule.

The shares were measured on H200s (docs/benchmarks.md: where the step of 24 layers goes) and are
assumed to be the same on other GPUs. Nothing was measured between machines.

Left out on purpose: hosts that start kernels more slowly than the GPU runs them, which is so at a
micro-batch of one row with expert parallelism (47 % too high), data loading, evaluation,
checkpoints, updates on the host, activations that are copied to the host, and eager blocks.

Times are in seconds unless a name says otherwise.
"""

import math
from collections.abc import Sequence

import torch

from moetrain.config import ConfigError
from moetrain.config.compute import BlockPolicy
from moetrain.config.environment import GPUS, NETWORK_RATE, Gpu, GpuName
from moetrain.kernels.attention.cudnn import MAX_HEAD_DIM
from moetrain.kernels.optim.muon import newton_schulz_flops
from moetrain.models.architecture import FP32, AttentionPart, Part
from moetrain.parallel.pipeline.stages import StagePlan
from moetrain.train.estimates.memory import BlockKind, RankSizes

# Shares of peak_flops (bf16) that products reach in whole steps of a hot H200.
_EXPERTS, _ATTENTION, _PROJECTIONS, _HEAD = (x / 989 for x in (482, 431, 665, 669))
_WIDE_ATTENTION = 79 / 989
"""FlexAttention with heads of width 512: 175 TFLOP/s forward and 65 backward, alone on an H200."""
_FASTER = {"bf16": 1.0, "fp8": 1.2, "fp8_gradients": 1.3, "fp8_blocks": 1.1}
"""Speed-up of a block's products by a precision, quantisation included. Measured with 12 and 24
layers on two and four H200s. fp8_gradients speeds up the head as much."""
_MEMORY = 4.26 / 4.8
"""Share of memory_rate that a copy reaches."""
LINK = 0.6
"""Share of link_rate that messages reach: 273 GB/s in dispatch, 274 in reductions, of 450."""
_PASSES = 33
"""Reads and writes of a residual stream by the norms, rotations, residuals and indices of a part,
in forward and backward together. Measured: 63 ms for 24 layers of 40,960 tokens of 4 KiB."""
_MIXES = 33
"""Reads and writes of what a linear attention keeps for its backward, by its convolutions, chunks
and gates, in forward and backward together. Measured: 250 ms for the 30 of ``qwen3.6-35b-a3b`` with
16,384 tokens, and 200 ms for the 23 of ``nemotron-3-nano-30b-a3b`` with 20,480."""
IDLE, WAITING = 19 / 1131, 14 / 1131
"""Share of a step in which a GPU computes nothing, and share in which it waits for the slowest of
several GPUs."""
_IMBALANCE = 0.1
"""Excess of the fullest expert parallel rank over the mean, for each doubling of ranks."""
_FORWARD, _ATTENTION_FORWARD = 1 / 3, 468 / 608 / 3
"""The forward's share of the time of forward and backward: by FLOPs, and in cuDNN's attention."""
_ADAPTING = 30e-3 / 24
"""Seconds that a block of two parts with adapters waits for the host. Measured with 24 layers
(docs/log/quantisation.md, 407cd65)."""


def step_seconds(ranks: Sequence[RankSizes], gpu: GpuName) -> float:
    """Estimate a step's seconds from every pipeline rank.

    Raises ConfigError: a setting has a value whose time was not measured.
    """
    config, dims = ranks[0].config, ranks[0].dims
    for name, value in {
        "optim.offload_fraction": config.optim.offload_fraction,
        "compile.enabled": None if config.compile.is_on else False,
    }.items():
        if value or value is False:
            raise ConfigError(name, f"{value}: its time is not estimated; leave it out")
    clocks = [StepClock(rank, GPUS[gpu]) for rank in ranks]
    number = config.train.micro_batches(dims.data_ranks)
    busy = number * clocks[0].micro_batch()
    if dims.pp > 1:
        plan = StagePlan(config, ranks[0].arch)
        each = [clock.micro_batch() / clock.rank.num_stages / 3 for clock in clocks]
        units = [each[rank] for rank in plan.rank_of_stage]
        border = clocks[0].travel(2.0 * ranks[0].residual_bytes, 2, dims.world_size)
        timeline = plan.schedule(number).simulate(lambda x: x.unit_time * units[x.stage], border)
        busy = timeline.makespan
    waiting = WAITING * (dims.world_size > 1)
    return (busy + max(clock.update() for clock in clocks)) / (1 - IDLE - waiting)


class StepClock:
    """One pipeline rank's times on a kind of GPU."""

    def __init__(self, rank: RankSizes, gpu: Gpu) -> None:
        self.rank = rank
        self.share = rank.share
        self.config, self.dims = rank.config, rank.dims
        self.memory, self.link = _MEMORY * gpu.memory_rate, LINK * gpu.link_rate
        self.flops = gpu.peak_flops
        self.number = self.config.train.micro_batches(self.dims.data_ranks)
        self.gradient = getattr(torch, self.config.optim.gradient_dtype).itemsize
        self.times = 4 + 2 * rank.share_trained
        """FLOPs of forward and backward together for each multiply-add of the forward."""
        self.parts: list[tuple[Part, BlockPolicy, int]] = [
            (part, kind.policy, n) for kind, n in rank.blocks.items() for part in kind.layer
        ]
        """This rank's parts, how their blocks recompute, and their numbers."""
        sizes = [(n, *self._sizes(kind)) for kind, n in rank.blocks.items()]
        self.experts = sum(n * experts for n, experts, _ in sizes)
        """Number of the experts' parameters that a rank computes with. :attr:`others` counts all
        other parameters."""
        self.others = sum(n * others for n, _, others in sizes)
        self.others += rank.matrices * rank.vocabulary_numbers

    def travel(self, size: float, ranks: int, span: int) -> float:
        """Return the seconds in which ``ranks`` among ``span`` neighbours receive ``size``
        bytes."""
        machines = min(ranks, self.dims.machines(span))
        across = size * (1 - 1 / machines) / NETWORK_RATE
        return max(size * (1 - 1 / ranks) / self.link, across)

    def micro_batch(self) -> float:
        """Estimate the forward and the backward of all the rank's blocks, and of the head.

        A block's parameters are gathered while the block that comes before it computes, in the
        forward and in the backward alike. While a block's backward computes, the gradients of the
        block before it in the backward are reduced too. What takes longer than the computation
        beside it is exposed: blocks with few FLOPs hide little of their neighbour's experts.
        """
        exposed, dims = sum(self.weights_moved()), self.dims
        for part, policy, count in self.parts:
            for axis, size, times in self.exchanges(part, policy):
                ranks = getattr(dims, axis)
                span = dims.token_ranks if axis == "cp" else ranks
                exposed += count * sum(times) * self.travel(size, ranks, span)
        gathers, again, reduces = self._collectives()
        seconds = {kind: self._block(kind) for kind in self.rank.blocks}
        forwards = [seconds[kind][0] for kind in self.rank.sequence]
        backwards = [seconds[kind][1] for kind in self.rank.sequence]
        moved = [seconds[kind][2] for kind in self.rank.sequence]
        head, vocabulary = (
            self.head(),
            self._gathered(0.0, self.rank.matrices * self.rank.vocabulary_numbers),
        )
        # The order in which blocks compute: forwards, the head, backwards.
        computing = [*forwards, head, *reversed(backwards)]
        arriving = [*(gathers * x for x in moved[1:]), gathers * vocabulary, again * moved[-1]]
        arriving += [again * x for x in reversed(moved[:-1])] + [0.0]
        leaving = [0.0] * len(forwards) + [0.0, reduces * vocabulary]
        leaving += [reduces * x for x in reversed(moved[1:])]
        overlapped = zip(computing, arriving, leaving, strict=True)
        return exposed + sum(max(time, came + left) for time, came, left in overlapped)

    def _block(self, kind: BlockKind) -> tuple[float, float, float]:
        """Estimate a block's forward, its backward, and one gather of its parameters."""
        times = [self.part(part, kind.policy) for part in kind.layer]
        forward, backward = (sum(each) for each in zip(*times, strict=True))
        return forward, backward, self._gathered(*self._sizes(kind))

    def _sizes(self, kind: BlockKind) -> tuple[float, float]:
        """Count the experts' and the other parameters that a rank computes with in a block."""
        sizes = [(part.style == "routed", part.matrix_elements(self.share)) for part in kind.layer]
        experts = sum(size for is_routed, size in sizes if is_routed)
        return experts, sum(size for _, size in sizes) - experts

    def head(self) -> float:
        """Estimate the head and the loss; the forward of the loss makes its gradients too."""
        is_narrow = self.config.kernels.precision == "fp8_gradients"
        rate = _HEAD * (_FASTER["fp8_gradients"] if is_narrow else 1.0) * self.flops
        products = self.rank.is_last * self.share.tokens * self.rank.vocabulary_numbers
        return self.times * products / rate

    def update(self) -> float:
        """Estimate the update of the rank's shard, and the sum of gradients over replicas."""
        optim, numbers = self.config.optim, self.rank.trained / self.dims.sharding_ranks
        gradient, master = self.gradient, getattr(torch, optim.weight_dtype).itemsize
        # Master weights and moments are read and written, the gradient is read, and a copy of the
        # weights is written. Muon also turns the gradient into a direction, and the direction into
        # an orthogonal matrix.
        copy = self.share.width * (master != self.share.width)
        moved = numbers * (2 * master + gradient + copy) + 2 * self.rank.moment_bytes()
        moved += self.rank.orthogonal * 4 * gradient
        seconds, ranks = moved / self.memory, self.dims.sharding_ranks
        seconds += self.travel(2 * FP32 * numbers, self.dims.dp_replicate, self.dims.world_size)
        if not self.rank.orthogonal:
            return seconds
        weights = ((n, w) for part, _, n in self.parts for w in part.weights.values())
        found = ((n, w.shape, w.rule.stacked) for n, w in weights if w.rule.is_matrix)
        flops = sum(
            n * newton_schulz_flops(shape, optim.muon_iterations, stacked)
            for n, shape, stacked in found
        )
        seconds += self.rank.share_trained * flops / ranks / (_EXPERTS * self.flops)
        # Muon gathers each sharded matrix on one rank, and sends the parts back.
        return seconds + self.travel(2 * self.share.width * self.others / ranks, ranks, ranks)

    # ---- of one micro-batch --------------------------------------------------------------------

    def part(self, part: Part, policy: BlockPolicy) -> tuple[float, float]:
        """Estimate a part's forward and backward, without the movement of weights.

        ``policy`` is how its block recomputes.
        """
        seq_len = self.config.data.seq_len
        own = self.share.tokens / self.dims.tp
        kept = self.config.activation.save if policy == "selective" else ()
        again = policy != "none"
        twice = {x: 2.0 * (again and x not in kept) for x in ("attention", "linear", "experts")}
        matrices = Part.products_per_token(part, seq_len)
        products = part.products_per_token(seq_len)
        faster = _FASTER[self.config.kernels.precision.removesuffix("_ue8m0")]
        if part.style == "routed":
            is_uneven = not self.config.moe.force_balanced
            fullest = 1 + is_uneven * _IMBALANCE * math.log2(self.dims.ep)
            each = own * products * fullest / (_EXPERTS * faster * self.flops)
            forward, backward = 2 * each, (self.times - 2 + twice["experts"]) * each
        else:
            linear = own * matrices / (_PROJECTIONS * faster * self.flops)
            rate = _WIDE_ATTENTION if getattr(part, "widest_head", 0) > MAX_HEAD_DIM else _ATTENTION
            mixing = own * (products - matrices) / (rate * self.flops)
            forward = 2 * linear + 6 * _ATTENTION_FORWARD * mixing
            backward = (self.times - 2 + twice["linear"]) * linear
            backward += (6 * (1 - _ATTENTION_FORWARD) + twice["attention"]) * mixing
        adapters, moved = self._adapters(part), _PASSES * self.rank.residual_bytes / self.memory
        if part.state_bytes(self.share.width):
            moved += _MIXES * part.activations(self.share) / self.memory
        backward += (1 - _FORWARD) * (adapters + moved) + again * _FORWARD * moved
        return forward + _FORWARD * (adapters + moved), backward

    def _adapters(self, part: Part) -> float:
        """Estimate the time of adapters on every matrix of a part.

        Forward and backward together read or write a matrix's inputs four times, and its results as
        often.
        """
        lora_rank, own = self.config.lora.rank, self.share.tokens / self.dims.tp
        matrices = (w for w in part.weights.values() if len(w.shape) > 1 and not w.rule.gather)
        widths = sum(sum(w.shape[-2:]) for w in matrices)
        rows = own * getattr(part, "num_experts_per_token", 1)
        seconds = 4 * self.share.width / self.memory + 6 * lora_rank / (_EXPERTS * self.flops)
        return (lora_rank > 0) * (rows * widths * seconds + _ADAPTING / 2)

    def exchanges(
        self, part: Part, policy: BlockPolicy
    ) -> list[tuple[str, float, tuple[int, int]]]:
        """List a part's messages: mesh axis, bytes, and how many forward and backward send."""
        dims, stream = self.dims, self.rank.residual_bytes
        if part.style == "routed":
            top_k = getattr(part, "num_experts_per_token", 1)
            reached = dims.ep * (1 - (1 - 1 / dims.ep) ** top_k)
            return [("ep", reached * stream, (2, 2))]  # dispatch and combine
        found: list[tuple[str, float, tuple[int, int]]] = [("tp", dims.tp * stream, (2, 2))]
        if dims.cp > 1 and isinstance(part, AttentionPart):
            received = part.exchanged(self.share)[dims.cp_method] * dims.cp / (dims.cp - 1)
            found.append(("cp", received, (1, 1 + (policy != "none"))))
        return found

    def weights_moved(self) -> tuple[float, float]:
        """Estimate how long forward and backward move weights and gradients within the device."""
        rank, width = self.rank, self.share.width
        casts = (FP32 + width) * (rank.is_alone and rank.turns > 0)
        sums = rank.trained / self.dims.sharding_ranks * self.gradient * (1 + (self.number > 1))
        each, numbers = width + casts, self.experts + self.others
        written = numbers * 2 * width * rank.share_trained + sums
        return numbers * each / self.memory, (numbers * each + written) / self.memory

    def _gathered(self, experts: float, others: float) -> float:
        """Estimate one gather of these numbers of experts' and of other parameters."""
        dims, width = self.dims, self.share.width
        seconds = self.travel(width * experts, dims.efsdp, dims.sharding_ranks)
        ranks = dims.dp_shard * dims.cp
        return seconds + self.travel(width * others, ranks, dims.sharding_ranks)

    def _collectives(self) -> tuple[float, float, float]:
        """Return how often a micro-batch gathers parameters in its forward and in its backward, and
        reduces gradients, which takes as long as a gather."""
        first = 1 / self.number
        reduces = first if self.config.parallel.reduce_at == "last" else 1.0
        gathers, again = (1.0, 1.0) if self.rank.turns else (first, 0.0)
        return gathers, again, reduces * self.rank.share_trained
