"""AdamW on fp32 master weights, one launch a bucket, and one guarded update.

Clipping and the decision to skip a non-finite step both ride inside the update: the norm never
comes back to the host, so the next step's kernels are queued while this one still runs. The update
also writes what the next gather sends, in the compute dtype (:meth:`FSDP.updates`).

Moments are one flat tensor a bucket, in which a parameter's lie as it does in its shard.
``optimizer.state`` shows them parameter by parameter.
"""

from __future__ import annotations

import zlib

import torch

from moetrain.config import OptimSection
from moetrain.kernels.optim.adamw import BLOCK, Settings, adamw, adamw_rates
from moetrain.optim.host import HostUpdates
from moetrain.parallel.fsdp.bucket import Bucket, Member
from moetrain.parallel.fsdp.fsdp import FSDP
from moetrain.parallel.offload.arena import Arena

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's tensors beside its step, each like its parameter."""


class AdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) of what ``fsdp`` trains; it updates this rank's pieces.

    Random bits, which moments in bf16 are rounded by, are of the seed, the step, and where in the
    whole parameter a number lies: copies of it on several ranks stay alike, a run that is resumed
    goes on with the same bits, and so does another mesh, except where tensor parallel ranks cut a
    weight by columns or a piece begins at no multiple of four numbers.
    """

    def __init__(self, fsdp: FSDP, config: OptimSection, seed: int) -> None:
        self.fsdp, self.config = fsdp, config
        self.dtype: torch.dtype = getattr(torch, config.state_dtype)
        """Of moments."""
        self.settings = Settings(config.beta1, config.beta2, config.eps, seed)
        self.steps = torch.zeros((), device=fsdp.device)
        """That changed something; what parameters have as their ``step``."""
        self.arena = Arena("moments", fsdp.device)
        self._flat: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Each bucket's moments: the same tensors for as long as the optimizer."""
        self._states: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        """What :attr:`state` is from the first step on."""
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        hosted = [bucket for bucket in fsdp.buckets if bucket.host is not None]
        self._host = HostUpdates(hosted, config)
        trained = [(n, m.local) for n, m in fsdp.members.items() if m.rule.trainable]
        super().__init__(trained, {"lr": config.lr})

    def begin(self) -> None:
        """Be as after no step, with moments that are zero."""
        self.forget()
        if not self._states:
            self._make()
        for flat in self._flat.values():
            for moment_N in flat:
                moment_N.zero_()
        self.state.update(self._states)

    def _make(self) -> None:
        names = {id(member): name for name, member in self.fsdp.members.items()}
        for bucket in self.fsdp.buckets:
            if not bucket.is_trained:
                continue
            numel = bucket.shard_N.numel()
            new = self.arena.empty if bucket.host is None else torch.empty
            flat = (new(numel, dtype=self.dtype), new(numel, dtype=self.dtype))
            self._flat[id(bucket)] = flat
            origins_B = _origins(bucket, names) if self.dtype == torch.bfloat16 else None
            self._tables[id(bucket)] = (_decays(bucket), origins_B)
            for member in bucket.members:
                pieces = (member.piece_of(moment_N) for moment_N in flat)
                moments = dict(zip(MOMENTS, pieces, strict=True))
                self._states[member.local] = {"step": self.steps, **moments}

    def forget(self) -> None:
        """Be as before the first step."""
        self.state.clear()
        self.steps.zero_()

    @torch.no_grad()
    def step(self, clip: torch.Tensor, skipped: torch.Tensor) -> None:  # pyright: ignore
        """Update with gradients times ``clip``, unless ``skipped`` (both 0-d, on the device)."""
        if not self.state:
            self.begin()
        self.steps += ~skipped
        (group,) = self.param_groups
        # A skipped first step is no step: its rates, which nobody reads, would be infinite.
        steps, decay = self.steps.clamp(min=1), self.config.weight_decay
        rates_S = adamw_rates(steps, clip, skipped, group["lr"], decay, self.settings)
        hosted = self._host.buckets
        if hosted:  # first, since it takes longest
            moments = [self._flat[id(bucket)] for bucket in hosted]
            self._host.start(rates_S, group["lr"], moments)
        for bucket, out_N in self.fsdp.updates():
            assert bucket.gradient_N is not None  # the norm is of all of them
            decays_B, origins_B = self._tables[id(bucket)]
            tensors = (bucket.shard_N, bucket.gradient_N, *self._flat[id(bucket)], rates_S)
            adamw(*tensors, decays_B, self.settings, origins_B, out_N)


def _blocks(member: Member) -> int:
    return -(-member.layout.padded_numel // BLOCK)


def _decays(bucket: Bucket) -> torch.Tensor:
    """uint8, 1 for each block of a member that decays."""
    flags = torch.tensor([m.rule.decay for m in bucket.members], dtype=torch.uint8)
    counts = torch.tensor([_blocks(member) for member in bucket.members])
    return flags.repeat_interleave(counts).to(bucket.shard_N.device)


def _origins(bucket: Bucket, names: dict[int, str]) -> torch.Tensor:
    """The place of each block's first number: in its parameter, and that among all others."""
    device, starts = bucket.shard_N.device, []
    for member in bucket.members:
        layout, place = member.layout, 0
        for size, part in zip(layout.shape, layout.box, strict=True):
            place = place * size + part.start
        place += zlib.crc32(names[id(member)].encode()) << 30
        starts.append(place + BLOCK * torch.arange(_blocks(member), device=device))
    return torch.cat(starts)


def build_optimizer(fsdp: FSDP, config: OptimSection, seed: int) -> AdamW:
    """The optimizer of what ``fsdp`` trains."""
    return AdamW(fsdp, config, seed)


def guarded_step(
    optimizer: AdamW, loss: torch.Tensor, norm: torch.Tensor, max_grad_norm: float
) -> torch.Tensor:
    """Clip to ``max_grad_norm`` and update, unless the loss or the gradient norm is not finite.

    Args:
        loss, norm: of the whole step (0-d, on the device), the same on every rank.

    Returns:
        Whether the step was skipped (0-d bool, on the device). A skipped step leaves weights and
        moments untouched.
    """
    skipped = ~(torch.isfinite(norm) & torch.isfinite(loss))
    optimizer.step((max_grad_norm / norm).clamp(max=1.0), skipped)
    return skipped
