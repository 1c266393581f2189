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
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, fields, replace

import torch

from moetrain.config import Config, ConfigError
from moetrain.config.environment import GIB
from moetrain.config.rl import SleepName
from moetrain.kernels.loss.vocabulary_chunk import CHUNK_ELEMENTS
from moetrain.models.architecture import FP32, Architecture, Part, Workload
from moetrain.models.rules import Rule
from moetrain.models.transformer import plan_model
from moetrain.parallel.apply import resharded_blocks
from moetrain.parallel.fsdp.copy_engines import peer_bytes
from moetrain.parallel.mesh import ParallelDims
from moetrain.parallel.offload.activations import link_bytes
from moetrain.parallel.pipeline.stages import activations_in_flight, plan_stages

MARGIN = 0.1
"""Measured relative error of the estimate: a run is refused only if it cannot fit despite it."""


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
    ranks = estimate_ranks(config, arch, dims, dtype, sleep)
    return max(ranks, key=lambda estimate: estimate.total)


def estimate_ranks(
    config: Config,
    arch: Architecture,
    dims: ParallelDims,
    dtype: torch.dtype,
    sleep: SleepName | None = None,
) -> list[MemoryEstimate]:
    """Estimate the peak of every pipeline rank, as :func:`estimate_memory`."""
    found = []
    for sizes in sizes_of_ranks(config, arch, dims, dtype):
        there = {"peers": sizes.peers}
        if sleep is not None:
            there |= {"generator": sizes.generator * (sleep != "all")}
            there |= {"cache": sizes.cache() * (sleep == "never")}
        working = (_start_of_backward(sizes), _end_of_backward(sizes))
        moments = [replace(moment, **there) for moment in working]
        if sleep is not None:
            peers = sizes.peers * (not config.rl.offload)
            moments.append(replace(_generating(sizes), peers=peers))
        found.append(max(moments, key=lambda estimate: estimate.total))
    return found


def sizes_of_ranks(
    config: Config, arch: Architecture, dims: ParallelDims, dtype: torch.dtype
) -> Iterator[Sizes]:
    """Yield the sizes of every pipeline rank, from the arguments of :func:`estimate_memory`."""
    tokens = config.train.micro_batch_size * config.data.seq_len
    share = Workload(tokens, dims.tp, dims.ep, dtype.itemsize, config.compile.is_on)
    plan = plan_stages(config, arch)
    model, rules = plan_model(config, arch, dtype)
    numels = {name: parameter.numel() for name, parameter in model.named_parameters()}
    for rank, in_flight in enumerate(activations_in_flight(config, dims)):
        layers = Counter(arch.layers()[i] for i in plan.blocks_of(rank))
        stages = len(plan.stages_of(rank))
        passes = in_flight / stages
        is_first, is_last = (plan.rank_of_stage[end] == rank for end in (0, -1))
        tied = arch.tie_embeddings
        mine = [n for n in numels if rank in plan.holders(n, is_tied=tied)]
        stored = sum(numels[name] * rules[name].stored_bytes for name in mine)
        trained = sum(numels[name] for name in mine if rules[name].trainable)
        place = (layers, passes, is_first, is_last)
        kept = (stored, trained, stages, trained / sum(numels[name] for name in mine))
        generator = _generator_bytes(numels, rules, set(mine), dims, dtype)
        peers = peer_bytes(config, numels, rules, mine, dims, dtype)
        yield Sizes(config, arch, dims, share, *place, *kept, generator, peers)


def _generator_bytes(
    numels: Mapping[str, int],
    rules: Mapping[str, Rule],
    here: Container[str],
    dims: ParallelDims,
    dtype: torch.dtype,
) -> float:
    """Count the weights that generation copies, as training has others or only those ``here``."""
    total = 0
    for name, rule in rules.items():
        used, is_expert = rule.gather or dtype, rule.style == "expert"
        is_cut = (dims.efsdp if is_expert else dims.sharding_ranks) > 1
        if rule.trainable or is_cut or rule.storage != used or rule.is_narrow or name not in here:
            total += numels[name] // (dims.ep if is_expert else 1) * used.itemsize
    return total


def least_sleep(
    config: Config, arch: Architecture, dims: ParallelDims, dtype: torch.dtype, capacity: float
) -> SleepName:
    """Return ``rl.sleep``, where auto is the least that surely fits into ``capacity`` bytes."""
    if config.rl.sleep != "auto":
        return config.rl.sleep
    ways: tuple[SleepName, ...] = ("never", "cache")
    for sleep in ways:
        if estimate_memory(config, arch, dims, dtype, sleep).total * (1 + MARGIN) <= capacity:
            return sleep
    return "all"


def check_memory(estimate: MemoryEstimate, config: Config, capacity: float) -> None:
    """Refuse a run that cannot fit into ``capacity`` bytes.

    Raises:
        ConfigError: it names the batch if a smaller one could help, else the model.
    """
    if estimate.total * (1 - MARGIN) <= capacity:
        return
    problem = f"takes about {estimate.describe()}; this device has {capacity / GIB:.1f} GiB"
    others = estimate.total - estimate.cache
    if estimate.cache > capacity or others * (1 - MARGIN) <= capacity:
        field = "max_sequences" if config.rl.cache_tokens is None else "cache_tokens"
        raise ConfigError(f"rl.{field}", f"{getattr(config.rl, field)} {problem}. Lower it")
    state = estimate.weights + estimate.moments
    if state > capacity or config.train.micro_batch_size == 1:
        field = "model.path" if config.model.path is not None else "model.preset"
        name = config.model.path or config.model.preset
        raise ConfigError(field, f"{name!r} {problem}. Use more devices or a smaller model")
    raise ConfigError(
        "train.micro_batch_size",
        f"{config.train.micro_batch_size} {problem}. Lower it, or recompute activations "
        "(activation.policy full)",
    )


Layer = tuple[Part, ...]


@dataclass(frozen=True)
class Sizes:
    """The sizes of one pipeline rank, from which its estimate is made."""

    config: Config
    arch: Architecture
    dims: ParallelDims
    share: Workload
    layers: Counter[Layer]
    """How many of this rank's blocks have the same parts."""
    passes: float
    """Micro-batches whose activations these blocks hold at once."""
    is_first: bool
    """Whether this rank has the embedding."""
    is_last: bool
    """Whether this rank has the head."""
    stored: float
    """Bytes of its parameters over all ranks of a replica."""
    trained: float
    """How many of its parameters are trained."""
    num_stages: int
    """Stages of this pipeline rank."""
    share_trained: float
    """Share of its parameters that is trained, taken to be the same in every part."""
    generator: float
    """Bytes of weights that generation has for itself, over all stages."""
    peers: float
    """Bytes of buffers that other ranks copy from and to."""

    @property
    def is_alone(self) -> bool:
        """Whether there is one process: it frees unsharded values after their last use, and
        allocates gradients at their first."""
        return self.dims.world_size == 1

    @property
    def is_accumulating(self) -> bool:
        """Whether a step has several micro-batches."""
        return self.config.train.micro_batches(self.dims.data_ranks) > 1

    @property
    def width(self) -> int:
        """Bytes of a number in the compute dtype."""
        return self.share.width

    def all_layers(self, of_one: Callable[[Layer], float]) -> float:
        return sum(count * of_one(layer) for layer, count in self.layers.items())

    # Counts of parameters are of one rank: whole over FSDP ranks, split over tensor or expert ones.
    def numbers(self, layer: Layer) -> float:
        """Count the parameters of one block."""
        return sum(part.numbers(self.share) for part in layer)

    def vocabulary_numbers(self) -> float:
        """Count the parameters of the embedding, or of the head."""
        return self.arch.vocab_size * self.arch.hidden_size / self.dims.tp

    def local_weights(self) -> float:
        """Bytes of the weights that this rank keeps, its share of all."""
        hosted = self.config.optim.offload_fraction * self.trained * (FP32 - self.width)
        return (self.stored - hosted) / self.dims.sharding_ranks

    def local_updated(self) -> float:
        """Count the parameters that this rank's device updates."""
        return self.share_updated * self.trained / self.dims.sharding_ranks

    @property
    def share_updated(self) -> float:
        """Share of the trained parameters that the device updates, with gradients and moments; of
        the rest (``optim.offload_fraction``) it has the compute values alone."""
        return 1 - self.config.optim.offload_fraction

    def local_moments(self) -> float:
        """Bytes of AdamW's two moments."""
        return 2 * self.local_updated() * getattr(torch, self.config.optim.state_dtype).itemsize

    def gradients(self, numbers: float) -> float:
        """Bytes of ``numbers`` gradients that are kept, and of those that have yet to travel."""
        itemsize = getattr(torch, self.config.optim.gradient_dtype).itemsize
        return itemsize * numbers + self.unreduced()

    @property
    def matrices(self) -> int:
        """Number of vocabulary matrices here: embedding and head, or one if they are tied."""
        both = self.is_first + self.is_last
        return min(both, 1) if self.arch.tie_embeddings else both

    def unsharded(self, layer: Layer) -> float:
        """Bytes of one block's parameters in the form it computes with, beside the kept weights."""
        is_narrow = self.config.lora.base_dtype == "float8"
        used = 1.0 if is_narrow else 0.0 if self.uses_masters else self.unlike_kept
        return used * self.width * self.numbers(layer)

    @property
    def uses_masters(self) -> bool:
        """Whether one process computes in the dtype of its weights."""
        return self.is_alone and self.width == FP32

    @property
    def unlike_kept(self) -> float:
        """Share of the parameters whose compute value is not the tensor that this rank keeps."""
        return self.share_trained * self.share_updated if self.is_alone else 1.0

    def unsharded_blocks(self) -> float:
        """Bytes of blocks' unsharded parameters when all forwards are done."""
        blocks = self.layers.total()
        turns = resharded_blocks(self.config, self.dims.world_size, blocks)
        kept = self.all_layers(self.unsharded) * (blocks - turns) / blocks
        return kept + min(2, turns) * max(map(self.unsharded, self.layers))  # it and a neighbour

    def unsharded_vocabulary(self) -> float:
        """Bytes of the unsharded embedding, and of the head unless it is tied."""
        copies = 0 if self.uses_masters else self.matrices
        return copies * self.unlike_kept * self.width * self.vocabulary_numbers()

    def unreduced(self) -> float:
        """Bytes of fp32 gradients that have yet to travel."""
        adds_unsharded = self.is_accumulating and self.config.parallel.reduce_at == "last"
        if self.is_alone or not adds_unsharded:
            return 0.0
        vocabulary = self.matrices * self.vocabulary_numbers()
        return FP32 * self.share_trained * (self.all_layers(self.numbers) + vocabulary)

    # Generation's, on one rank.
    def cache(self) -> float:
        """Bytes of one rank's keys and values."""
        rl = self.config.rl
        tokens = rl.cache_tokens or rl.max_sequences * self.config.data.seq_len
        each = sum(part.cached_numbers() for layer in self.arch.layers() for part in layer)
        return self.width * tokens * each

    # Activations, as bytes of one block.
    def activations(self, layer: Layer) -> float:
        """Bytes that one block keeps without recomputation (``activation.policy none``).

        Beside its input, a compiled norm keeps its result, which the product after it keeps too; an
        eager norm also keeps its input in fp32 and the normalised value.
        """
        w, is_compiled = self.width, self.share.is_compiled
        inputs = 2 * w + 2 * w if is_compiled else 2 * (FP32 + 2 * w)  # residuals, both norms
        kept = sum(part.activations(self.share) for part in layer)
        return self.share.own_tokens * self.arch.hidden_size * inputs + kept

    def saved(self, layer: Layer) -> float:
        """Bytes that one block keeps for its backward, by ``activation.policy``."""
        policy, names = self.config.activation.policy, self.config.activation.save
        if policy == "none":
            return self.activations(layer)
        block_input = self.share.own_tokens * self.arch.hidden_size * self.width
        if policy == "full":
            return block_input
        kept = [part.saved(self.share) for part in layer]
        return block_input + sum(k.get(name, 0.0) for k in kept for name in names)

    def away(self, layer: Layer) -> float:
        """Bytes of those that wait on the host (``activation.offload``)."""
        saved, offload = self.saved(layer), self.config.activation.offload
        if offload != "auto":
            return offload * saved
        return min(saved, link_bytes(layer, self.config.data.seq_len, self.share.own_tokens))

    def host(self) -> float:
        """Bytes on the host, of all blocks except those that keep theirs on the device."""
        most = max(map(self.away, self.layers))
        return max(0.0, self.passes * self.all_layers(self.away) - self.staying * most)

    @property
    def staying(self) -> float:
        """Blocks that do: the last of each pass over a stage, and the one on its way back."""
        return self.passes * self.num_stages + 1

    def all_activations(self) -> float:
        """Bytes kept by all blocks, the final norm and the hidden states, which are never
        compiled."""
        tail = self.is_last * self.arch.hidden_size * (FP32 + 2 * self.width)
        kept = self.passes * (self.all_layers(self.saved) + self.share.own_tokens * tail)
        return kept - self.host()

    def backward_set(self, layer: Layer) -> float:
        """Bytes of one block's backward beside what was saved.

        They are recomputed activations, gradients of whatever is wider than the residual stream,
        and gradients of the parameters in the compute dtype (fp32 if the weights are).
        """
        recomputed = self.activations(layer) - self.saved(layer)
        gradients = self.share_trained * self.width * self.numbers(layer)
        return recomputed + gradients + sum(part.working_set(self.share) for part in layer)

    def loss_gradients(self) -> float:
        """Bytes of the gradients of head and hidden states, which the loss's forward makes."""
        hidden = self.share.tokens * self.arch.hidden_size
        head = self.share_trained * self.vocabulary_numbers()
        return self.is_last * self.width * (head + hidden)

    def logits_chunk(self) -> float:
        """Bytes of the logits that exist at once."""
        numbers = self.share.tokens * self.arch.vocab_size / self.dims.tp
        return self.is_last * self.width * min(numbers, CHUNK_ELEMENTS)


def _start_of_backward(s: Sizes) -> MemoryEstimate:
    """Estimate the start of the backward, in the loss or in the last block, with all
    activations."""
    head = s.share_updated * s.share_trained * s.vocabulary_numbers()
    reduced = head if s.is_alone and not s.is_accumulating else s.local_updated()
    backward = max(map(s.backward_set, s.layers))
    return MemoryEstimate(
        weights=s.local_weights(),
        gradients=s.gradients(reduced),
        moments=s.local_moments(),
        gathered=s.unsharded_blocks() + s.unsharded_vocabulary(),
        activations=s.all_activations(),
        logits=s.loss_gradients() + max(0.0, s.logits_chunk() - backward),
        working_set=backward,
        host=s.host(),
    )


def _generating(s: Sizes) -> MemoryEstimate:
    """Estimate generation, between updates; buckets of gradients stay unless they are offloaded."""
    is_offloaded = s.config.rl.offload
    gathered = 0.0 if s.is_alone or is_offloaded else s.unsharded_blocks()
    return MemoryEstimate(
        weights=s.local_weights(),
        gradients=0.0 if s.is_alone or is_offloaded else s.gradients(s.local_updated()),
        moments=0.0 if is_offloaded else s.local_moments(),
        gathered=gathered,
        activations=0.0,
        logits=0.0,
        working_set=0.0,
        generator=s.generator,
        cache=s.cache(),
    )


def _end_of_backward(s: Sizes) -> MemoryEstimate:
    """Estimate the first block's backward, with the gradients of all others but the embedding."""
    first, still_to_come = next(iter(s.layers)), 0.0
    if s.is_alone and not s.is_accumulating:
        vocabulary = 0.0 if s.arch.tie_embeddings else s.vocabulary_numbers()
        still_to_come = s.share_updated * s.share_trained * (s.numbers(first) + vocabulary)
    gathered = s.unsharded_blocks() + s.unsharded_vocabulary()
    if s.is_alone:  # its own, and the embedding
        matrices = 1 if s.arch.tie_embeddings else 2
        gathered = s.unsharded(first) + s.unsharded_vocabulary() / matrices
    return MemoryEstimate(
        weights=s.local_weights(),
        gradients=s.gradients(s.local_updated() - still_to_come),
        moments=s.local_moments(),
        gathered=gathered,
        activations=s.saved(first),
        logits=0.0,
        working_set=s.backward_set(first),
        host=s.host(),
    )
