"""AdamW and Muon on master weights, updates on the host, and learning-rate schedules.

One kernel updates a bucket. Clipping and the decision to skip a non-finite step both ride inside
the update: the norm never comes back to the host, so the next step's kernels are queued while this
one still runs. The update also writes what the next gather sends, in the compute dtype
(:meth:`FSDP.updates`).

Moments are one flat tensor per bucket, in which a parameter's lie as it does in its shard.
``optimizer.state`` shows them parameter by parameter.

Masters in host memory (``optim.offload_fraction``) are updated there while the device continues. A
thread waits for the clip factor and for gradients, which are on their way down, updates bucket by
bucket in the order in which the next forward gathers them, and sends weights up. Training waits, if
it must, where a bucket is gathered: the device's own updates, and the forward of the blocks before,
hide the rest. For that the first gather after an update starts after the block before it, whether
the update is done or not: every rank must start collectives in the same order, and hosts are not
equally fast. An update that was done early thus leaves one gather uncovered, once a step; to gather
before the block would leave the device without work for as long as a late update takes. The update
is torch's fused AdamW, vectorised and on all of torch's threads.
"""

import math
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from moetrain.config import ConfigError, OptimSection
from moetrain.kernels.optim.adamw import Settings, adamw, adamw_on_host
from moetrain.kernels.optim.adamw_float8 import Float8Moments, moment_place
from moetrain.kernels.optim.muon import Matrices, muon_momentum, muon_update
from moetrain.kernels.optim.rounding import BLOCK
from moetrain.models.rules import Rule
from moetrain.optim.qk_clip import QKClip
from moetrain.parallel.fsdp.bucket import Bucket, Member
from moetrain.parallel.fsdp.fsdp import FSDP
from moetrain.parallel.mesh import Sliceable, TensorSlice
from moetrain.parallel.pipeline.stages import Stages, check_like
from moetrain.runtime.arena import Arena
from moetrain.runtime.memory import LateNumbers


class AdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) for this rank's shards of what ``fsdp`` trains.

    Moments in bf16 and float8 are rounded by random bits. These depend on the seed, the step, and a
    number's place in the whole parameter. So copies on several ranks stay equal, and a resumed run
    has the same bits, on another mesh too, except, in bf16, where tensor parallel ranks cut a
    weight by columns or a shard begins at no multiple of four numbers.
    """

    MOMENTS: ClassVar = ("exp_avg", "exp_avg_sq")
    """Names of the moments, each of which has its parameter's shape; in float8 there are others."""

    def __init__(self, fsdp: FSDP, config: OptimSection, seed: int) -> None:
        self.fsdp, self.config = fsdp, config
        self.dtype: torch.dtype = getattr(torch, config.state_dtype, torch.uint8)
        """Dtype of the moments; uint8: codes, and the scales that are beside them in float8."""
        self.settings = Settings(config.beta1, config.beta2, config.eps, seed)
        self.steps = torch.zeros((), device=fsdp.device)
        """Number of updates that were not skipped; the ``step`` of every parameter."""
        self.arena = Arena("moments", fsdp.device)
        self._flat: dict[int, Any] = {}
        """Each bucket's moments, which stay the same tensors as long as the optimizer lives."""
        self._states: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        """The content of :attr:`state` from the first step on."""
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._hosted = [bucket for bucket in fsdp.buckets if bucket.host is not None]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moetrain-optim")
        members = {n: m for n, m in fsdp.members.items() if m.rule.trainable}
        # Refuses what cannot be cut, before anything runs.
        _ = [moment_place(k, m.layout) for m in members.values() for k in self.moments_of(m.rule)]
        super().__init__([(n, m.local) for n, m in members.items()], {"lr": config.lr})

    def begin(self) -> None:
        """Reset to zero steps, and create or zero the moments."""
        self.forget()
        if not self._states:
            self._make()
        for flat in self._flat.values():
            for moment_N in flat:
                moment_N.zero_()
        self.state.update(self._states)

    def _make(self) -> None:
        names = {id(member): name for name, member in self.fsdp.members.items()}
        for bucket in self.fsdp.trained:
            if self.dtype == torch.uint8:
                for member in bucket.members:
                    key = zlib.crc32(names[id(member)].encode()) << 30
                    moments = Float8Moments(member.layout, key, self.arena.empty)
                    self._flat[id(member)] = moments
                    self._states[member.local] = {"step": self.steps, **moments.tensors}
                continue
            numel, device = bucket.shard_N.numel(), bucket.shard_N.device
            new = self.arena.empty if bucket.host is None else torch.empty
            keys = self.moments_of(bucket.members[0].rule)
            flat = tuple(new(numel, dtype=self.dtype) for _ in keys)
            self._flat[id(bucket)] = flat
            # Whether each block is of a parameter with weight decay.
            decays = torch.tensor([m.rule.decay for m in bucket.members], dtype=torch.uint8)
            counts = torch.tensor([_blocks(member) for member in bucket.members])
            decays_B = decays.repeat_interleave(counts).to(device)
            origins_B = _origins(bucket, names) if self.dtype == torch.bfloat16 else None
            self._tables[id(bucket)] = (decays_B, origins_B)
            for member in bucket.members:
                pieces = (member.piece_of(moment_N) for moment_N in flat)
                moments = dict(zip(keys, pieces, strict=True))
                self._states[member.local] = {"step": self.steps, **moments}

    @property
    def memory(self) -> list[torch.Tensor]:
        """The tensors that hold all of it, of which :attr:`state` shows views."""
        return [self.steps, *(moment_N for flat in self._flat.values() for moment_N in flat)]

    def moments_of(self, rule: Rule) -> tuple[str, ...]:
        """Return the names of the moments of a parameter."""
        names = self.MOMENTS if self.dtype != torch.uint8 else Float8Moments.NAMES
        return ("momentum",) if rule.is_orthogonal else names

    def forget(self) -> None:
        """Reset to zero steps, without moments."""
        self.state.clear()
        self.steps.zero_()

    @torch.no_grad()
    def step(  # pyright: ignore
        self, clip: torch.Tensor, skipped: torch.Tensor, lr: torch.Tensor | None = None
    ) -> None:
        """Update with gradients times ``clip``, or leave all as it is if ``skipped``.

        Both are 0-d, on the device, and the same on every rank.
        ``lr``: the group's learning rate, 0-d fp64 on the device; None: it is taken from there.
        """
        if not self.state:
            self.begin()
        self.steps += ~skipped
        (group,) = self.param_groups
        # A skipped first step is no step: its rates, which nobody reads, would be infinite.
        steps = self.steps.clamp(min=1)
        decay = self.config.weight_decay
        rate = group["lr"] if lr is None else lr
        rates_S = self.settings.rates(steps, clip, skipped, rate, decay)
        if self._hosted:  # first, since it takes longest
            self._start_on_host(rates_S, group["lr"])
        self._prepare(rates_S)
        for bucket, out_N in self.fsdp.updates():
            assert bucket.gradient_N is not None  # the norm is of all of them
            if self.dtype == torch.uint8:
                for member in bucket.members:
                    out = None if out_N is None else member.piece_of(out_N)
                    tensors = (member.local, member.piece_of(bucket.gradient_N), out, rates_S)
                    self._flat[id(member)].update(*tensors, self.settings, member.rule.decay)
                continue
            decays_B, origins_B = self._tables[id(bucket)]
            if bucket.members[0].rule.is_orthogonal:
                muon_update(bucket.shard_N, bucket.gradient_N, rates_S, decays_B, out_N)
            else:
                avg_N, avg_sq_N = self._flat[id(bucket)]
                tensors = (bucket.shard_N, bucket.gradient_N, avg_N, avg_sq_N, rates_S)
                adamw(*tensors, decays_B, self.settings, origins_B, out_N)
            self._finish(bucket, out_N)

    def _start_on_host(self, rates_S: torch.Tensor, lr: float) -> None:
        """Start the updates of masters in host memory; gradients must be on their way."""
        rates = LateNumbers(rates_S)
        for bucket in self._hosted:
            assert bucket.host is not None
            assert bucket.host.has_gradient
            bucket.host.update = self._thread.submit(self._update_on_host, bucket, rates, lr)

    @torch.no_grad()
    def _update_on_host(self, bucket: Bucket, rates: LateNumbers, lr: float) -> None:
        host = bucket.host
        assert host is not None
        # Once they are here, the device no longer uses the weights of before.
        clip, *_, skipped, step, _ = rates.read().tolist()
        host.await_gradient()
        if skipped:
            return
        of_numbers = (host.gradient_N, *self._flat[id(bucket)])
        for decays in (False, True):
            pieces = [
                [member.local, *(member.piece_of(x_N) for x_N in of_numbers)]
                for member in bucket.members
                if member.rule.decay == decays and member.local.numel()
            ]
            weight_decay = self.config.weight_decay if decays else 0.0
            adamw_on_host(pieces, self.settings, step, clip, lr, weight_decay)
        host.send()
        bucket.mark_fresh()

    def _prepare(self, rates_S: torch.Tensor) -> None:
        """Do what comes before the updates of single buckets."""

    def _finish(self, bucket: Bucket, out_N: torch.Tensor | None) -> None:
        """Do what comes after the update of ``bucket``, and write ``out_N`` too if it is given."""

    def parts(self, stages: Stages) -> dict[str, TensorSlice]:
        """Return this rank's slice of each ``"<parameter>.<moment>"``; none before a step."""
        return {
            # The step is a scalar, the same on every rank.
            f"{name}.{key}": stages.among(
                name,
                member.layout.common(value)
                if key == "step"
                else member.layout.part(value)._replace(**moment_place(key, member.layout)),
            )
            for name, member in self.fsdp.members.items()
            for key, value in self.state.get(member.local, {}).items()
        }

    def load_parts(self, stages: Stages, state: Mapping[str, Sliceable]) -> None:
        """Load what :meth:`parts` returned on any layout; every rank reads its part.

        An empty ``state`` is that of a run before its first step. All parameters have the same
        step.

        Raises:
            ConfigError: the state is of other parameters or another optimizer, or a tensor has
                another shape or dtype.
        """
        if not state:
            self.forget()
            return
        members, keys = self.fsdp.members.items(), self.moments_of
        trained = {name: member for name, member in members if member.rule.trainable}
        wanted = {f"{n}.{k}" for n in stages.trained for k in ("step", *keys(stages.rules[n]))}
        if odd := set(state) ^ wanted:
            how = f"{self.config.state_dtype!r} and optim.name {self.config.name!r}"
            problem = f"its optimizer state is not of this model, optim.state_dtype {how}"
            remedy = f"set these as they were, or set never; {sorted(odd)[:3]} differ"
            raise ConfigError("checkpoint.resume", f"{problem}; {remedy}")
        for name, member in trained.items():
            for key in keys(member.rule):
                moment, shape = f"{name}.{key}", moment_place(key, member.layout)["shape"]
                remedy = "; set optim.state_dtype to that, or set never"
                check_like(moment, state[moment], shape, self.dtype, remedy)
            check_like(f"{name}.step", state[f"{name}.step"], (), torch.float32)
        self.begin()
        for name, member in trained.items():
            for key, value in self.state[member.local].items():
                value.copy_(state[f"{name}.{key}"][moment_place(key, member.layout)["box"]])


class Muon(AdamW):
    """Muon (:mod:`moetrain.kernels.optim.muon`) for blocks' matrices, and AdamW for the rest.

    Ranks of ``group`` hold a replica's parameters together; they exchange parts of matrices. With
    ``clip``, heads are scaled by the largest scores that ``everyone`` has seen.
    """

    def __init__(
        self,
        fsdp: FSDP,
        config: OptimSection,
        seed: int,
        group: dist.ProcessGroup,
        everyone: dist.ProcessGroup,
        clip: QKClip | None = None,
    ) -> None:
        super().__init__(fsdp, config, seed)
        self._clip = clip
        self._largest = partial(dist.all_reduce, op=dist.ReduceOp.MAX, group=everyone)
        self._scaled = {
            id(member): clip.scaled[name].part(member.layout.box[0], fsdp.device)
            for name, member in fsdp.members.items()
            if clip is not None and name in clip.scaled
        }
        exchange = partial(functional.all_to_all_single, group=group)
        members = [m for m in fsdp.members.values() if m.rule.is_orthogonal]
        boxes = [
            [None if m.rule.style == "expert" else m.layout.box_of(rank) for m in members]
            for rank in dist.get_process_group_ranks(group)
        ]
        shapes: Any = [(*m.layout.shape[-2:], m.rule.stacked) for m in members]
        self._members = members
        self._matrices = Matrices(shapes, boxes, group.rank(), exchange)

    def _prepare(self, rates_S: torch.Tensor) -> None:
        """Update the momentum of matrices, and replace their gradients by orthogonal matrices."""
        for bucket in self.fsdp.buckets:
            if bucket.members[0].rule.is_orthogonal:
                assert bucket.gradient_N is not None
                (momentum_N,), (_, origins_B) = self._flat[id(bucket)], self._tables[id(bucket)]
                how = (self.config.muon_momentum, self.settings.seed, origins_B)
                muon_momentum(bucket.gradient_N, momentum_N, rates_S, *how)
        pieces: Any = [member.local.grad for member in self._members]
        how = (self.config.muon_iterations, self.config.eps, self.config.muon_scale)
        self._matrices.orthogonalise(pieces, *how)
        if self._clip is not None:
            gamma_LH = self._clip.take(self._largest)
            self._gamma_LH = torch.where(rates_S[4] != 0, 1.0, gamma_LH)  # a skipped step has none

    def _finish(self, bucket: Bucket, out_N: torch.Tensor | None) -> None:
        for member in bucket.members:
            if (rows := self._scaled.get(id(member))) is not None:
                factor_R = rows.factor(self._gamma_LH)
                member.local.mul_(factor_R.view(-1, *[1] * (member.local.dim() - 1)))
                if out_N is not None:
                    member.piece_of(out_N).copy_(member.local)


def _blocks(member: Member) -> int:
    return -(-member.layout.padded_numel // BLOCK)


def _origins(bucket: Bucket, names: dict[int, str]) -> torch.Tensor:
    """Return the place of each block's first number, unique over all parameters."""
    device, starts = bucket.shard_N.device, []
    for member in bucket.members:
        layout, place = member.layout, 0
        for size, part in zip(layout.shape, layout.box, strict=True):
            place = place * size + part.start
        place += zlib.crc32(names[id(member)].encode()) << 30
        starts.append(place + BLOCK * torch.arange(_blocks(member), device=device))
    return torch.cat(starts)


def learning_rate(step: int, total_steps: int, config: OptimSection) -> float:
    """Return the learning rate of optimizer step ``step`` (from 0) out of ``total_steps``.

    Linear warmup, then ``cosine`` (arXiv 1608.03983), ``wsd`` (warmup-stable-decay, arXiv
    2404.06395, with a linear decay over the last ``decay_fraction``) or ``constant``.
    """
    warmup = config.warmup(total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    floor = config.lr * config.min_lr_ratio
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "wsd":
        decay_steps = max(1, round(config.decay_fraction * total_steps))
        left = min(1.0, (total_steps - step) / decay_steps)
        return floor + (config.lr - floor) * left
    progress = (step - warmup) / max(1, total_steps - warmup)
    return floor + (config.lr - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
