"""AdamW on a rank's shards of the master weights, on the device and in offloaded buckets.

One kernel updates a bucket. Clipping and the decision to skip a non-finite step happen inside it:
the norm never comes back to the host, so the next step's kernels are queued while this one still
runs. The update also writes what the next gather sends, in the compute dtype
(:meth:`FSDP.updates`).

The moments of a bucket are flat tensors in the layout of its shard. ``optimizer.state`` shows
views of them, parameter by parameter.

Offloaded masters (``optim.offload_fraction``) are updated by the CPU, by torch's fused AdamW on all
threads, while the device continues. A thread waits for the clip factor and the gradients, updates
the buckets in the order of the next forward's gathers, and copies the weights to the device.
Training waits for an update only where the bucket is gathered. Until then the device runs its own
updates and the forward of the preceding blocks, which hide the CPU's work. So the first gather of a
bucket after its update is not prefetched: it starts after the preceding block, even if the update
is done. (Every rank must start collectives in the same order, and hosts are not equally fast.) The
cost is that no computation hides this gather if the update was done early. A prefetch would cost
more: if an update was late, the device would have no work until it was done.
"""

import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, NamedTuple

import torch

from moetrain.config import ConfigError, OptimSection
from moetrain.kernels.optim.adamw import OffloadedParameter, Rates, Settings, adamw, adamw_on_host
from moetrain.kernels.optim.adamw_float8 import Float8Moments, MomentPlace, moment_place
from moetrain.kernels.optim.muon import muon_update
from moetrain.kernels.optim.rounding import BLOCK
from moetrain.models.rules import Rule
from moetrain.parallel.fsdp.bucket import Bucket, Member
from moetrain.parallel.fsdp.fsdp import FSDP
from moetrain.parallel.fsdp.storage.offloaded import Offloaded
from moetrain.parallel.mesh import Sliceable, TensorSlice
from moetrain.parallel.pipeline.stages import Stages, check_like
from moetrain.runtime.arena import Arena
from moetrain.runtime.memory import LateValues


class BlockTable(NamedTuple):
    """Properties of each block of ``BLOCK`` elements of a bucket, for the kernels."""

    decays_B: torch.Tensor
    """uint8: 1 if the block's parameter has weight decay."""
    origins_B: torch.Tensor | None
    """int64: the index of the block's first element among the elements of all parameters, from
    which the kernel derives the random bits of rounding. None: moments are fp32, not rounded."""


class AdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) for this rank's shards of what ``fsdp`` trains.

    Moments in bf16 and float8 are rounded by random bits. These depend on the seed, the step, and
    an element's index in the whole parameter. So copies on several ranks stay equal, and a resumed
    run has the same bits, on another mesh too. There is one exception: bf16 moments may differ on
    another mesh if tensor parallel ranks cut a weight by columns, or if a shard begins at an index
    that is not a multiple of four.
    """

    MOMENTS: ClassVar = ("exp_avg", "exp_avg_sq")
    """Names of the moments, each of the parameter's shape. Float8 has ``Float8Moments.NAMES``."""

    def __init__(self, fsdp: FSDP, config: OptimSection, seed: int) -> None:
        self.fsdp, self.config = fsdp, config
        self.is_float8 = config.state_dtype == "float8"
        self.dtype: torch.dtype = getattr(torch, config.state_dtype, torch.uint8)
        """Dtype of the moments' tensors; uint8 for float8, since values and scales are bytes."""
        self.settings = Settings(config.beta1, config.beta2, config.eps, seed)
        self.steps = torch.zeros((), device=fsdp.device)
        """Number of updates that were not skipped; the ``step`` of every parameter."""
        self.arena = Arena("moments", fsdp.device)
        # Allocated by the first `begin`; they stay the same tensors as long as the optimizer lives.
        self._moments: dict[int, tuple[torch.Tensor, ...]] = {}
        """Flat moments by the bucket's id; empty with float8."""
        self._float8_moments: dict[int, Float8Moments] = {}
        """Moments by the member's id; empty without float8."""
        self._tables: dict[int, BlockTable] = {}
        """By the bucket's id; empty with float8."""
        self._states: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        """The content of :attr:`state` from the first step on."""
        masters = [bucket.storage for bucket in fsdp.buckets if bucket.storage.has_host_master]
        if others := {type(x).__name__ for x in masters if not isinstance(x, Offloaded)}:
            raise TypeError(f"{', '.join(others)}: a master in host memory derives from Offloaded")
        self._offloaded = [
            (bucket, bucket.storage)
            for bucket in fsdp.buckets
            if isinstance(bucket.storage, Offloaded)
        ]
        """Buckets whose master is in host memory."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moetrain-optim")
        members = {name: m for name, m in fsdp.members.items() if m.rule.trainable}
        for member in members.values():
            for key in self.moments_of(member.rule):
                _place(key, member)  # refuses what cannot be cut, before anything runs
        super().__init__([(n, m.local) for n, m in members.items()], {"lr": config.lr})

    # ---- moments -------------------------------------------------------------------------------

    def begin(self) -> None:
        """Reset to zero steps, and create or zero the moments."""
        self.forget()
        if not self._states:
            self._make()
        for moment in self._all_moments():
            moment.zero_()
        self.state.update(self._states)

    def forget(self) -> None:
        """Reset to zero steps, and empty :attr:`state`; the moments' memory is kept."""
        self.state.clear()
        self.steps.zero_()

    def moments_of(self, rule: Rule) -> tuple[str, ...]:
        """Return the names of the moments of a parameter."""
        if rule.is_orthogonal:
            return ("momentum",)
        return Float8Moments.NAMES if self.is_float8 else self.MOMENTS

    @property
    def memory(self) -> list[torch.Tensor]:
        """The step count and the moments' own tensors, of which :attr:`state` shows views."""
        return [self.steps, *self._all_moments()]

    def _all_moments(self) -> list[torch.Tensor]:
        flat = [*self._moments.values(), *self._float8_moments.values()]
        return [moment for moments in flat for moment in moments]

    def _make(self) -> None:
        names = {id(member): name for name, member in self.fsdp.members.items()}
        for bucket in self.fsdp.trained:
            if self.is_float8:
                for member in bucket.members:
                    first = _first_index(names[id(member)])
                    layout = member.layout
                    moments = Float8Moments(layout.shape, layout.box, first, self.arena.empty)
                    self._float8_moments[id(member)] = moments
                    self._states[member.local] = {"step": self.steps, **moments.tensors}
                continue
            empty = torch.empty if bucket.storage.has_host_master else self.arena.empty
            keys = self.moments_of(bucket.members[0].rule)
            flat = tuple(empty(bucket.shard_N.numel(), dtype=self.dtype) for _ in keys)
            self._moments[id(bucket)] = flat
            self._tables[id(bucket)] = self._table(bucket, names)
            for member in bucket.members:
                pieces = (member.piece_of(moment_N) for moment_N in flat)
                named = dict(zip(keys, pieces, strict=True))
                self._states[member.local] = {"step": self.steps, **named}

    def _table(self, bucket: Bucket, names: dict[int, str]) -> BlockTable:
        decays = torch.tensor([m.rule.decay for m in bucket.members], dtype=torch.uint8)
        counts = torch.tensor([_num_blocks(member) for member in bucket.members])
        decays_B = decays.repeat_interleave(counts).to(bucket.shard_N.device)
        origins_B = _origins(bucket, names) if self.dtype == torch.bfloat16 else None
        return BlockTable(decays_B, origins_B)

    # ---- the step ------------------------------------------------------------------------------

    @torch.no_grad()
    def step(  # pyright: ignore
        self, clip: torch.Tensor, skipped: torch.Tensor, lr: torch.Tensor | None = None
    ) -> None:
        """Update with gradients times ``clip``, or leave all as it is if ``skipped``.

        Both are 0-d (``skipped`` is bool), on the device, and the same on every rank.

        Args:
            lr: the learning rate, 0-d fp64 on the device; None: that of the parameter group, which
                offloaded buckets use in any case.
        """
        if not self.state:
            self.begin()
        self.steps += ~skipped
        (group,) = self.param_groups
        rates_S = self.settings.rates(
            # At least 1: else the rates of a skipped first step, though unused, would be infinite.
            steps=self.steps.clamp(min=1),
            clip=clip,
            skipped=skipped,
            lr=group["lr"] if lr is None else lr,
            weight_decay=self.config.weight_decay,
        )
        if self._offloaded:  # first, since they take longest
            self._start_on_host(rates_S, group["lr"])
        self._before_updates(rates_S)
        for bucket, out_N in self.fsdp.updates():
            assert bucket.gradient_N is not None  # the norm was computed from it
            if self.is_float8:
                self._update_float8(bucket, bucket.gradient_N, rates_S, out_N)
                continue
            table = self._tables[id(bucket)]
            if bucket.members[0].rule.is_orthogonal:
                muon_update(bucket.shard_N, bucket.gradient_N, rates_S, table.decays_B, out_N)
            else:
                avg_N, avg_sq_N = self._moments[id(bucket)]
                adamw(
                    bucket.shard_N,
                    bucket.gradient_N,
                    avg_N,
                    avg_sq_N,
                    rates_S,
                    table.decays_B,
                    self.settings,
                    origins_B=table.origins_B,
                    out_N=out_N,
                )
            self._after_update(bucket, out_N)

    def _update_float8(
        self,
        bucket: Bucket,
        gradient_N: torch.Tensor,
        rates_S: torch.Tensor,
        out_N: torch.Tensor | None,
    ) -> None:
        for member in bucket.members:
            self._float8_moments[id(member)].update(
                member.local,
                member.piece_of(gradient_N),
                out=None if out_N is None else member.piece_of(out_N),
                rates_S=rates_S,
                settings=self.settings,
                decays=member.rule.decay,
            )

    def _before_updates(self, rates_S: torch.Tensor) -> None:
        """Called before the device updates buckets; a subclass may change gradients here."""

    def _after_update(self, bucket: Bucket, out_N: torch.Tensor | None) -> None:
        """Called after ``bucket`` is updated; a subclass may change its new weights here.

        It must change their copy ``out_N`` too, if there is one. Offloaded buckets and float8
        moments do not call this.
        """

    # ---- offloaded buckets ---------------------------------------------------------------------

    def _start_on_host(self, rates_S: torch.Tensor, lr: float) -> None:
        """Start the updates of offloaded buckets. Copies of their gradients must have begun."""
        late_rates = LateValues(rates_S)
        for bucket, storage in self._offloaded:
            assert storage.has_gradient
            storage.update = self._thread.submit(
                self._update_on_host, bucket, storage, late_rates, lr
            )

    @torch.no_grad()
    def _update_on_host(
        self, bucket: Bucket, storage: Offloaded, late_rates: LateValues, lr: float
    ) -> None:
        # Once the rates are here, the device no longer uses the old weights.
        rates = Rates.unpack(late_rates.read())
        storage.await_gradient()
        if rates.skipped:
            return
        avg_N, avg_sq_N = self._moments[id(bucket)]
        for decays in (False, True):
            parameters = [
                OffloadedParameter(
                    param=member.local,
                    grad=member.piece_of(storage.gradient_N),
                    avg=member.piece_of(avg_N),
                    avg_sq=member.piece_of(avg_sq_N),
                )
                for member in bucket.members
                if member.rule.decay == decays and member.local.numel()
            ]
            adamw_on_host(
                parameters,
                self.settings,
                step=rates.step.item(),
                clip=rates.clip.item(),
                lr=lr,
                weight_decay=self.config.weight_decay if decays else 0.0,
            )
        storage.send()
        bucket.mark_fresh()

    # ---- checkpoints ---------------------------------------------------------------------------

    def parts(self, stages: Stages) -> dict[str, TensorSlice]:
        """Return this rank's slice of each ``"<parameter>.<moment>"``; none before a step."""
        parts: dict[str, TensorSlice] = {}
        for name, member in self.fsdp.members.items():
            for key, value in self.state.get(member.local, {}).items():
                if key == "step":  # a scalar, the same on every rank
                    part = member.layout.common(value)
                else:
                    place = _place(key, member)
                    part = member.layout.part(value)._replace(shape=place.shape, box=place.box)
                parts[f"{name}.{key}"] = stages.among(name, part)
        return parts

    def load_parts(self, stages: Stages, state: Mapping[str, Sliceable]) -> None:
        """Load what :meth:`parts` returned on any layout; every rank reads its part.

        An empty ``state`` comes from a run before its first step. The entry ``step`` must be the
        same for all parameters.

        Raises:
            ConfigError: the state belongs to other parameters or another optimizer, or a tensor
                has another shape or dtype.
        """
        if not state:
            self.forget()
            return
        members = {n: m for n, m in self.fsdp.members.items() if m.rule.trainable}
        wanted = {
            f"{name}.{key}"
            for name in stages.trained
            for key in ("step", *self.moments_of(stages.rules[name]))
        }
        if odd := set(state) ^ wanted:
            raise ConfigError(
                "checkpoint.resume",
                f"the checkpoint's optimizer state does not fit this model, optim.state_dtype "
                f"{self.config.state_dtype!r} and optim.name {self.config.name!r} "
                f"({sorted(odd)[:3]} differ); set these as they were, or set never",
            )
        for name, member in members.items():
            for key in self.moments_of(member.rule):
                moment, shape = f"{name}.{key}", _place(key, member).shape
                remedy = "; set optim.state_dtype to that, or set never"
                check_like(moment, state[moment], shape, self.dtype, remedy)
            check_like(f"{name}.step", state[f"{name}.step"], (), torch.float32)
        self.begin()
        for name, member in members.items():
            for key, value in self.state[member.local].items():
                value.copy_(state[f"{name}.{key}"][_place(key, member).box])


def _place(key: str, member: Member) -> MomentPlace:
    return moment_place(key, member.layout.shape, member.layout.box)


def _num_blocks(member: Member) -> int:
    return -(-member.layout.padded_numel // BLOCK)


def _first_index(name: str) -> int:
    """Return the index of a parameter's first element among the elements of all parameters.

    First indices of two parameters are at least 2^30 apart, unless their names have the same
    checksum.
    """
    return zlib.crc32(name.encode()) << 30


def _origins(bucket: Bucket, names: dict[int, str]) -> torch.Tensor:
    """Return the index of each block's first element among the elements of all parameters."""
    starts: list[torch.Tensor] = []
    for member in bucket.members:
        index = 0
        for size, part in zip(member.layout.shape, member.layout.box, strict=True):
            index = index * size + part.start
        index += _first_index(names[id(member)])
        blocks = torch.arange(_num_blocks(member), device=bucket.shard_N.device)
        starts.append(index + BLOCK * blocks)
    return torch.cat(starts)
