"""An estimate, by part, of the memory that a run takes on one device, before anything is built.

Weights, gradients and moments follow from the number of parameters and how they are sharded. The
parts of a block say what they keep for the backward, tensor by tensor, as autograd or the
compiler's partitioner saves it; it is added up here. The peak comes at one of two moments: the
start of the backward, when all blocks' activations exist, or its end, when a device that shards
nothing has all gradients. In a run that generates too, with a model and a cache beside the
trainer's, generation is a third.

``tests/test_memory.py`` compares it with the allocator's peak on H200s. Left out on purpose:
fragmentation (1 to 3 GiB there), buffers of communication libraries, and uneven routing, which
gives the fullest expert parallel rank more rows than the mean that is assumed here. On a CPU it is
a lower bound: the process itself and the plain reference kernels take more.

Bytes unless a name says otherwise. Legend: T tokens of a micro-batch, N those of one tensor
parallel rank, D model width, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch

from moetrain.config import Config, ConfigError
from moetrain.config.environment import GIB
from moetrain.config.rl import SleepName
from moetrain.config.sections import TrainSection
from moetrain.kernels.loss.vocabulary_chunk import CHUNK_ELEMENTS
from moetrain.models.architecture import FP32, Architecture, Part, Workload
from moetrain.models.rules import Rule
from moetrain.models.transformer import plan_model
from moetrain.parallel.apply import resharded_blocks
from moetrain.parallel.fsdp.peers import peer_bytes
from moetrain.parallel.mesh import ParallelDims
from moetrain.parallel.offload.activations import link_bytes
from moetrain.parallel.pipeline.stages import StagePlan

MARGIN = 0.1
"""Measured relative error of the estimate: a run is refused only if it cannot fit despite it."""
_HOSTED_BYTES = 16
"""Bytes of a parameter that is updated on the host: weight, gradient and both moments, in fp32."""

_Layer = tuple[Part, ...]


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device at a step's peak, by part; they add up to :attr:`total`."""

    weights: float
    """This rank's parameters: in fp32 if they are trained, else in the compute dtype."""
    gradients: float
    """Gradients that exist at the peak."""
    moments: float
    """AdamW's two moments of the trained parameters."""
    gathered: float
    """Parameters in the compute dtype: gathered from other ranks, or cast for the backward."""
    activations: float
    """Activations that blocks keep for the backward."""
    logits: float
    """A chunk of logits, and the gradients that the loss makes in its forward."""
    working_set: float
    """Tensors of the largest block's backward while it runs."""
    peers: float = 0.0
    """Buffers that ranks of one machine read and write of each other
    (``parallel.fsdp_transport``)."""
    generator: float = 0.0
    """Weights that generation has for itself, in the compute dtype."""
    cache: float = 0.0
    """Generation's keys and values."""
    host: float = 0.0
    """Activations in pinned host memory, which :attr:`total` leaves out."""

    @property
    def total(self) -> float:
        """Bytes at the peak."""
        return sum(getattr(self, field.name) for field in fields(self)) - self.host

    def surely_fits(self, capacity: float) -> bool:
        """Return whether ``capacity`` bytes are enough, whatever the estimate's error."""
        return self.total * (1 + MARGIN) <= capacity

    def may_fit(self, capacity: float) -> bool:
        """Return whether ``capacity`` bytes may be enough."""
        return self.total * (1 - MARGIN) <= capacity

    def check(self, config: Config, capacity: float) -> None:
        """Refuse a run that cannot fit into ``capacity`` bytes.

        Raises:
            ConfigError: it names the batch if a smaller one could help, else the model.
        """
        if self.may_fit(capacity):
            return
        problem = f"takes about {self.describe()}; this device has {capacity / GIB:.1f} GiB"
        if self.cache > capacity or replace(self, cache=0.0).may_fit(capacity):
            field = "max_sequences" if config.rl.cache_tokens is None else "cache_tokens"
            raise ConfigError(f"rl.{field}", f"{getattr(config.rl, field)} {problem}. Lower it")
        state = self.weights + self.moments
        if state > capacity or config.train.micro_batch_size == 1:
            field = "model.path" if config.model.path is not None else "model.preset"
            name = config.model.path or config.model.preset
            raise ConfigError(field, f"{name!r} {problem}. Use more devices or a smaller model")
        raise ConfigError(
            "train.micro_batch_size",
            f"{config.train.micro_batch_size} {problem}. Lower it, or recompute activations "
            "(activation.policy full)",
        )

    def describe(self) -> str:
        """Write ``65.1 GiB a device: weights 16.2, gradients 16.2, ...``."""
        parts = ", ".join(
            f"{field.name.replace('_', ' ')} {getattr(self, field.name) / GIB:.1f}"
            for field in fields(self)
            if (getattr(self, field.name) or field.default != 0.0) and field.name != "host"
        )
        host = f"; activations on the host {self.host / GIB:.1f}" * (self.host > 0)
        return f"{self.total / GIB:.1f} GiB a device: {parts}{host}"


def estimate_memory(
    config: Config,
    arch: Architecture,
    dims: ParallelDims,
    dtype: torch.dtype,
    sleep: SleepName | None = None,
) -> MemoryEstimate:
    """Estimate the peak of a training step on the pipeline rank that takes most.

    Args:
        dtype: the compute dtype.
        sleep: memory of generation that is freed during updates; None: nothing generates.
    """
    ranks = [sizes.peak(sleep) for sizes in sizes_of_ranks(config, arch, dims, dtype)]
    return max(ranks, key=lambda estimate: estimate.total)


def least_sleep(
    config: Config, arch: Architecture, dims: ParallelDims, dtype: torch.dtype, capacity: float
) -> SleepName:
    """Return ``rl.sleep``, where auto is the least that surely fits into ``capacity`` bytes."""
    if config.rl.sleep != "auto":
        return config.rl.sleep
    ways: tuple[SleepName, ...] = ("never", "cache")
    for sleep in ways:
        if estimate_memory(config, arch, dims, dtype, sleep).surely_fits(capacity):
            return sleep
    return "all"


def sizes_of_ranks(
    config: Config, arch: Architecture, dims: ParallelDims, dtype: torch.dtype
) -> list[RankSizes]:
    """Return the sizes of every pipeline rank, from the arguments of :func:`estimate_memory`."""
    # What decides on its parameters alone, so that many plans of one run count them once.
    train = TrainSection(freeze=config.train.freeze)
    sections = {"kernels": config.kernels, "moe": config.moe, "lora": config.lora, "train": train}
    key: Any = Config().model_copy(update=sections)
    numels, rules = _parameters(key, arch, dtype)  # pyright: ignore[reportArgumentType] - frozen
    plan = StagePlan(config, arch)
    return [
        RankSizes(config, plan, dims, dtype, rank, in_flight, numels, rules)
        for rank, in_flight in enumerate(plan.in_flight(dims))
    ]


@lru_cache(maxsize=4)
def _parameters(
    config: Config, arch: Architecture, dtype: torch.dtype
) -> tuple[dict[str, int], dict[str, Rule]]:
    """Return how many numbers every parameter has, and its rule, by name."""
    model, rules = plan_model(config, arch, dtype)
    return {name: parameter.numel() for name, parameter in model.named_parameters()}, rules


class RankSizes:
    """The sizes of one pipeline rank, from which its estimates are made.

    Counts of parameters are whole over FSDP ranks, and split over tensor or expert ones.
    """

    def __init__(
        self,
        config: Config,
        plan: StagePlan,
        dims: ParallelDims,
        dtype: torch.dtype,
        rank: int,
        in_flight: int,
        numels: Mapping[str, int],
        rules: Mapping[str, Rule],
    ) -> None:
        """Add up what lies on pipeline rank ``rank``.

        Args:
            in_flight: micro-batches whose activations one of its stages holds at once, over all
                stages.
            numels, rules: of every parameter of the model, by name.
        """
        arch = plan.arch
        self.config, self.arch, self.dims, self.width = config, arch, dims, dtype.itemsize
        tokens = config.train.micro_batch_size * config.data.seq_len
        self.share = Workload(tokens, dims.tp, dims.ep, dtype.itemsize, config.compile.is_on)
        self.residual_bytes = self.share.own_tokens * arch.hidden_size * dtype.itemsize
        """Bytes of a micro-batch's residual stream."""
        layers = arch.layers()
        self.layers: Counter[_Layer] = Counter(layers[i] for i in plan.blocks_of(rank))
        """How many of this rank's blocks have the same parts."""
        self.turns = resharded_blocks(config, dims.world_size, self.layers.total())
        """How many of them take turns in two regions for their unsharded parameters."""
        self.num_stages = len(plan.stages_of(rank))
        self.passes = in_flight / self.num_stages
        """Micro-batches whose activations these blocks hold at once."""
        is_first, self.is_last = (plan.rank_of_stage[end] == rank for end in (0, -1))
        both = is_first + self.is_last
        self.matrices = min(both, 1) if arch.tie_embeddings else both
        """Vocabulary matrices here: embedding and head, or one if they are tied."""
        self.vocabulary_numbers = arch.vocab_size * arch.hidden_size / dims.tp

        # Asking for each would take most of the time of a plan of many layouts.
        is_all = plan.config.parallel.pp == 1
        mine = [n for n in numels if is_all or rank in plan.holders(n)]
        self.stored = sum(numels[name] * rules[name].stored_bytes for name in mine)
        """Bytes of its parameters over all ranks of a replica."""
        self.trained = sum(numels[name] for name in mine if rules[name].trainable)
        self.share_trained = self.trained / sum(numels[name] for name in mine)
        """Share of its parameters that is trained, taken to be the same in every part."""
        self.share_updated = 1 - config.optim.offload_fraction
        """Share of these that the device updates, with gradients and moments; of the rest it has
        the compute values alone."""

        def copied() -> float:
            here = set(mine)
            return sum(
                _copied_bytes(numels[name], rule, dims, dtype, is_here=name in here)
                for name, rule in rules.items()
            )

        self.generator = copied
        """Count the bytes of weights that generation has for itself, over all stages."""
        self.peers = peer_bytes(config, numels, rules, mine, dims, dtype)
        """Bytes of buffers that other ranks copy from and to."""

        self.is_alone = dims.world_size == 1
        """Whether there is one process: it frees unsharded values after their last use, and
        allocates gradients at their first."""
        self.is_accumulating = config.train.micro_batches(dims.data_ranks) > 1
        self.uses_masters = self.is_alone and self.width == FP32
        """Whether one process computes in the dtype of its weights."""
        self.unlike_kept = self.share_trained * self.share_updated if self.is_alone else 1.0
        """Share of the parameters whose compute value is not the tensor that this rank keeps."""

    def peak(self, sleep: SleepName | None) -> MemoryEstimate:
        """Estimate the moment that takes most; ``sleep`` as in :func:`estimate_memory`."""
        moments = [self._start_of_backward(), self._end_of_backward()]
        if sleep is not None:
            generator, cache = (
                self.generator() * (sleep != "all"),
                self._cache() * (sleep == "never"),
            )
            moments = [replace(moment, generator=generator, cache=cache) for moment in moments]
            moments.append(self._generating())
        return max(moments, key=lambda estimate: estimate.total)

    def on_host(self) -> dict[str, float]:
        """Return the bytes of host memory of one process, by the setting that asks for them."""
        config = self.config
        hosted = config.optim.offload_fraction * self.trained / self.dims.sharding_ranks
        wanted = {
            "optim.offload_fraction": _HOSTED_BYTES * hosted,
            "activation.offload": self._host(),
            "rl.offload": config.rl.offload * self._moments(),
        }
        return {name: size for name, size in wanted.items() if size}

    # ---- three moments -------------------------------------------------------------------------

    def _start_of_backward(self) -> MemoryEstimate:
        """Estimate the loss or the last block's backward, with all activations."""
        head = self.share_updated * self.share_trained * self.vocabulary_numbers
        reduced = head if self.is_alone and not self.is_accumulating else self._updated()
        backward = max(map(self._backward_set, self.layers))
        # The loss's forward makes the gradients of head and hidden states.
        hidden = self.share.tokens * self.arch.hidden_size
        gradients = self.share_trained * self.vocabulary_numbers + hidden
        logits = self.share.tokens * self.arch.vocab_size / self.dims.tp
        chunk = self.is_last * self.width * min(logits, CHUNK_ELEMENTS)
        return MemoryEstimate(
            weights=self._weights(),
            gradients=self._gradients(reduced),
            moments=self._moments(),
            gathered=self._unsharded_blocks() + self._unsharded_vocabulary(),
            activations=self._activations(),
            logits=self.is_last * self.width * gradients + max(0.0, chunk - backward),
            working_set=backward,
            peers=self.peers,
            host=self._host(),
        )

    def _end_of_backward(self) -> MemoryEstimate:
        """Estimate the first block's backward, with all other gradients but the embedding's."""
        first, still_to_come = next(iter(self.layers)), 0.0
        tied = self.arch.tie_embeddings
        if self.is_alone and not self.is_accumulating:
            vocabulary = 0.0 if tied else self.vocabulary_numbers
            numbers = self._numbers(first) + vocabulary
            still_to_come = self.share_updated * self.share_trained * numbers
        gathered = self._unsharded_blocks() + self._unsharded_vocabulary()
        if self.is_alone:  # its own, and the embedding
            gathered = self._unsharded(first) + self._unsharded_vocabulary() / (1 if tied else 2)
        return MemoryEstimate(
            weights=self._weights(),
            gradients=self._gradients(self._updated() - still_to_come),
            moments=self._moments(),
            gathered=gathered,
            activations=self._saved(first),
            logits=0.0,
            working_set=self._backward_set(first),
            peers=self.peers,
            host=self._host(),
        )

    def _generating(self) -> MemoryEstimate:
        """Estimate generation between updates; buckets stay unless they are offloaded."""
        is_offloaded = self.config.rl.offload
        is_freed = self.is_alone or is_offloaded
        return MemoryEstimate(
            weights=self._weights(),
            gradients=0.0 if is_freed else self._gradients(self._updated()),
            moments=0.0 if is_offloaded else self._moments(),
            gathered=0.0 if is_freed else self._unsharded_blocks(),
            activations=0.0,
            logits=0.0,
            working_set=0.0,
            peers=self.peers * (not is_offloaded),
            generator=self.generator(),
            cache=self._cache(),
        )

    # ---- weights, gradients and moments --------------------------------------------------------

    def _of_all(self, of_one: Callable[[_Layer], float]) -> float:
        return sum(count * of_one(layer) for layer, count in self.layers.items())

    def _numbers(self, layer: _Layer) -> float:
        """Count the parameters of one block."""
        return sum(part.numbers(self.share) for part in layer)

    def _weights(self) -> float:
        hosted = self.config.optim.offload_fraction * self.trained * (FP32 - self.width)
        return (self.stored - hosted) / self.dims.sharding_ranks

    def _updated(self) -> float:
        """Count the parameters that this rank's device updates."""
        return self.share_updated * self.trained / self.dims.sharding_ranks

    def _moments(self) -> float:
        return 2 * self._updated() * getattr(torch, self.config.optim.state_dtype).itemsize

    def _gradients(self, numbers: float) -> float:
        """Count bytes of ``numbers`` gradients, and of the fp32 ones that have yet to travel."""
        kept = getattr(torch, self.config.optim.gradient_dtype).itemsize * numbers
        adds_unsharded = self.is_accumulating and self.config.parallel.reduce_at == "last"
        if self.is_alone or not adds_unsharded:
            return kept
        vocabulary = self.matrices * self.vocabulary_numbers
        return kept + FP32 * self.share_trained * (self._of_all(self._numbers) + vocabulary)

    def _unsharded(self, layer: _Layer) -> float:
        """Count bytes of a block's parameters as it computes with them, beside the kept weights."""
        is_narrow = self.config.lora.base_dtype == "float8"
        used = 1.0 if is_narrow else 0.0 if self.uses_masters else self.unlike_kept
        return used * self.width * self._numbers(layer)

    def _unsharded_blocks(self) -> float:
        """Count bytes of blocks' unsharded parameters when all forwards are done."""
        blocks, turns = self.layers.total(), self.turns
        kept = self._of_all(self._unsharded) * (blocks - turns) / blocks
        return kept + min(2, turns) * max(map(self._unsharded, self.layers))  # it and a neighbour

    def _unsharded_vocabulary(self) -> float:
        copies = 0 if self.uses_masters else self.matrices
        return copies * self.unlike_kept * self.width * self.vocabulary_numbers

    def _cache(self) -> float:
        """Count bytes of one rank's keys and values."""
        rl = self.config.rl
        tokens = rl.cache_tokens or rl.max_sequences * self.config.data.seq_len
        each = sum(part.cached_numbers() for layer in self.arch.layers() for part in layer)
        return self.width * tokens * each

    # ---- activations, of one block unless said otherwise ---------------------------------------

    def _unrecomputed(self, layer: _Layer) -> float:
        """Count what is kept without recomputation (``activation.policy none``).

        Beside its input, a compiled norm keeps its result, which the product after it keeps too; an
        eager norm also keeps its input in fp32 and the normalised value.
        """
        w, is_compiled = self.width, self.share.is_compiled
        inputs = 2 * w + 2 * w if is_compiled else 2 * (FP32 + 2 * w)  # residuals, both norms
        kept = sum(part.activations(self.share) for part in layer)
        return self.share.own_tokens * self.arch.hidden_size * inputs + kept

    def _saved(self, layer: _Layer) -> float:
        """Count what is kept for the backward, by ``activation.policy``."""
        policy, names = self.config.activation.policy, self.config.activation.save
        if policy == "none":
            return self._unrecomputed(layer)
        block_input = self.residual_bytes
        if policy == "full":
            return block_input
        kept = [part.saved(self.share) for part in layer]
        return block_input + sum(k.get(name, 0.0) for k in kept for name in names)

    def _away(self, layer: _Layer) -> float:
        """Count what of it waits on the host (``activation.offload``)."""
        saved, offload = self._saved(layer), self.config.activation.offload
        if offload != "auto":
            return offload * saved
        return min(saved, link_bytes(layer, self.config.data.seq_len, self.share.own_tokens))

    def _host(self) -> float:
        """Count bytes of all blocks on the host."""
        # The last block of each pass over a stage keeps its own, and the one on its way back.
        staying = self.passes * self.num_stages + 1
        most = max(map(self._away, self.layers))
        return max(0.0, self.passes * self._of_all(self._away) - staying * most)

    def _activations(self) -> float:
        """Count bytes of all blocks, the final norm and the hidden states on the device."""
        # The last two are never compiled.
        tail = self.is_last * self.arch.hidden_size * (FP32 + 2 * self.width)
        kept = self.passes * (self._of_all(self._saved) + self.share.own_tokens * tail)
        return kept - self._host()

    def _backward_set(self, layer: _Layer) -> float:
        """Count what the backward needs beside what was saved.

        It is recomputed activations, gradients of whatever is wider than the residual stream, and
        gradients of the parameters in the compute dtype (fp32 if the weights are).
        """
        recomputed = self._unrecomputed(layer) - self._saved(layer)
        gradients = self.share_trained * self.width * self._numbers(layer)
        return recomputed + gradients + sum(part.working_set(self.share) for part in layer)


def _copied_bytes(
    numel: int, rule: Rule, dims: ParallelDims, dtype: torch.dtype, *, is_here: bool
) -> float:
    """Count what generation copies of a weight, where training has another or none ``is_here``."""
    used, is_expert = rule.gather or dtype, rule.style == "expert"
    is_cut = (dims.efsdp if is_expert else dims.sharding_ranks) > 1
    if rule.trainable or is_cut or rule.storage != used or rule.is_narrow or not is_here:
        return numel // (dims.ep if is_expert else 1) * used.itemsize
    return 0
