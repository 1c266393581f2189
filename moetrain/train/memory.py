"""How much memory a run takes on one device: an estimate by part, before anything is built.

Weights, gradients and moments follow from the parameters' number and how they are sharded. What a
block keeps for its backward its parts say, tensor by tensor, as autograd (or the compiler's
partitioner) saves it; here it is added up. Two moments can be the peak: the start of the backward,
when every block's activations are there, and its end, when on a device that shards nothing every
gradient is. Where a run generates too, with a model and a cache beside the trainer's, there is a
third: while it does.

Against the allocator's peak on H200s: ``tests/test_memory.py``. What is left out on purpose: the
allocator's own fragmentation (1 to 3 GiB there), buffers that communication libraries allocate, and
uneven routing, which gives the fullest expert parallel rank more rows than the mean assumed here.
On a CPU it is a lower bound: the process itself and the plain reference kernels take more.

Bytes unless a name says otherwise. Legend: T tokens of a micro-batch, N those of one tensor
parallel rank, D model width, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, fields, replace

import torch

from moetrain.config import Config, ConfigError
from moetrain.config.hardware import GIB
from moetrain.config.rl import SleepName
from moetrain.kernels.loss.vocabulary_chunk import CHUNK_ELEMENTS
from moetrain.models.architecture import FP32, Architecture, Part, Workload
from moetrain.models.init import plan_model
from moetrain.models.rules import Rule
from moetrain.parallel.apply import resharded_blocks
from moetrain.parallel.fsdp.copy_engines import peer_bytes
from moetrain.parallel.mesh import ParallelDims
from moetrain.parallel.offload.activations import link_bytes
from moetrain.parallel.pipeline.stages import activations_in_flight, plan_stages

MARGIN = 0.1
"""Relative error of the estimate, as measured: a run is refused only if it cannot fit even so."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device at a step's peak, by part; they add up to :attr:`total`."""

    weights: float
    """Parameters, this rank's: fp32 where they are trained, else in the compute dtype."""
    gradients: float
    """Those there at the peak."""
    moments: float
    """AdamW's two, of what is trained."""
    gathered: float
    """Parameters in the compute dtype: gathered from other ranks, or cast for the backward."""
    activations: float
    """What the blocks keep for the backward."""
    logits: float
    """A chunk of logits, and the gradients that the loss makes in its forward."""
    working_set: float
    """What the largest block's backward holds while it runs."""
    peers: float = 0.0
    """What ranks of one machine read and write of one another's (``parallel.fsdp_transport``)."""
    generator: float = 0.0
    """Weights of generation's own, in the compute dtype."""
    cache: float = 0.0
    """Generation's keys and values."""
    host: float = 0.0
    """Activations in pinned host memory; no part of :attr:`total`."""

    @property
    def total(self) -> float:
        """The peak."""
        return sum(getattr(self, field.name) for field in fields(self)) - self.host

    def describe(self) -> str:
        """``65.1 GiB a device: weights 16.2, gradients 16.2, ...``."""
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
    """The peak of a training step; ``dtype`` is the compute dtype. Of pipeline ranks, the most.

    Args:
        sleep: what of a generator is gone while its run trains; None: nothing generates.
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
    """:func:`estimate_memory` of every pipeline rank."""
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
    """The numbers of every pipeline rank; arguments as those of :func:`estimate_memory`."""
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
    """Of weights that generation has beside training, which has those of the stages ``here``."""
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
    """``rl.sleep``, and for auto the least that fits into ``capacity`` bytes for sure."""
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
        ConfigError: it names what to change: the batch where that could help, else the layout.
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
    """The numbers that an estimate is made of, of one pipeline rank."""

    config: Config
    arch: Architecture
    dims: ParallelDims
    share: Workload
    layers: Counter[Layer]
    """The parts of blocks, and how many blocks have them; of this pipeline rank's."""
    passes: float
    """Of how many micro-batches these blocks' activations are there at once."""
    is_first: bool
    """Whether the embedding is here."""
    is_last: bool
    """Whether the head is here."""
    stored: float
    """Bytes of its parameters, as all ranks of a replica keep them."""
    trained: float
    """Numbers of those that are trained."""
    num_stages: int
    """Those of this pipeline rank."""
    share_trained: float
    """How many of them that are; wherever parts have to be told apart, all are taken for alike."""
    generator: float
    """Bytes of generation's weights, of every stage, that are not training's own."""
    peers: float
    """Bytes that other ranks copy from and to."""

    @property
    def is_alone(self) -> bool:
        """Then what is unsharded goes with its last use, and gradients come with their first."""
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

    # Parameters, as numbers on one rank: whole over FSDP ranks, cut over tensor and expert ranks.
    def numbers(self, layer: Layer) -> float:
        """Of one block."""
        return sum(part.numbers(self.share) for part in layer)

    def vocabulary_numbers(self) -> float:
        """Of the embedding, which is also that of the head."""
        return self.arch.vocab_size * self.arch.hidden_size / self.dims.tp

    def local_weights(self) -> float:
        """Bytes that this rank keeps: its share of everything."""
        hosted = self.config.optim.offload_fraction * self.trained * (FP32 - self.width)
        return (self.stored - hosted) / self.dims.sharding_ranks

    def local_updated(self) -> float:
        """How many numbers this rank's device updates."""
        return self.share_updated * self.trained / self.dims.sharding_ranks

    @property
    def share_updated(self) -> float:
        """Of what is trained, what the device updates and has gradients and moments of; of the rest
        (``optim.offload_fraction``) it has what it computes with."""
        return 1 - self.config.optim.offload_fraction

    def local_moments(self) -> float:
        """Bytes of AdamW's two."""
        return 2 * self.local_updated() * getattr(torch, self.config.optim.state_dtype).itemsize

    def gradients(self, numbers: float) -> float:
        """Bytes of so many that are kept, and of those that are still to travel."""
        itemsize = getattr(torch, self.config.optim.gradient_dtype).itemsize
        return itemsize * numbers + self.unreduced()

    @property
    def matrices(self) -> int:
        """Of the vocabulary: the embedding's, the head's; one if they are tied."""
        both = self.is_first + self.is_last
        return min(both, 1) if self.arch.tie_embeddings else both

    def unsharded(self, layer: Layer) -> float:
        """Bytes of one block's parameters as it uses them; 0: they are the master weights."""
        is_narrow = self.config.lora.base_dtype == "float8"
        used = 1.0 if is_narrow else 0.0 if self.uses_masters else self.unlike_kept
        return used * self.width * self.numbers(layer)

    @property
    def uses_masters(self) -> bool:
        """Whether one process computes in the dtype of its weights."""
        return self.is_alone and self.width == FP32

    @property
    def unlike_kept(self) -> float:
        """Which share of the parameters is used as something else than what this rank keeps."""
        return self.share_trained * self.share_updated if self.is_alone else 1.0

    def unsharded_blocks(self) -> float:
        """Of blocks, when all forwards are done."""
        blocks = self.layers.total()
        turns = resharded_blocks(self.config, self.dims.world_size, blocks)
        kept = self.all_layers(self.unsharded) * (blocks - turns) / blocks
        return kept + min(2, turns) * max(map(self.unsharded, self.layers))  # it and a neighbour

    def unsharded_vocabulary(self) -> float:
        """Of the embedding, and of the head if it has one of its own."""
        copies = 0 if self.uses_masters else self.matrices
        return copies * self.unlike_kept * self.width * self.vocabulary_numbers()

    def unreduced(self) -> float:
        """fp32 gradients that are still to travel."""
        adds_unsharded = self.is_accumulating and self.config.parallel.reduce_at == "last"
        if self.is_alone or not adds_unsharded:
            return 0.0
        vocabulary = self.matrices * self.vocabulary_numbers()
        return FP32 * self.share_trained * (self.all_layers(self.numbers) + vocabulary)

    # Generation's, on one rank.
    def cache(self) -> float:
        """Bytes of its keys and values."""
        rl = self.config.rl
        tokens = rl.cache_tokens or rl.max_sequences * self.config.data.seq_len
        each = sum(part.cached_numbers() for layer in self.arch.layers() for part in layer)
        return self.width * tokens * each

    # Activations, as bytes of one block.
    def activations(self, layer: Layer) -> float:
        """What one block keeps in all (``activation.policy none``).

        A norm keeps, beside its input: compiled its result, which the product after it keeps; eager
        also the input in fp32 and the normalised value.
        """
        w, is_compiled = self.width, self.share.is_compiled
        inputs = 2 * w + 2 * w if is_compiled else 2 * (FP32 + 2 * w)  # residuals, both norms
        kept = sum(part.activations(self.share) for part in layer)
        return self.share.own_tokens * self.arch.hidden_size * inputs + kept

    def saved(self, layer: Layer) -> float:
        """What one block keeps from its forward to its backward, by ``activation.policy``."""
        policy, names = self.config.activation.policy, self.config.activation.save
        if policy == "none":
            return self.activations(layer)
        block_input = self.share.own_tokens * self.arch.hidden_size * self.width
        if policy == "full":
            return block_input
        kept = [part.saved(self.share) for part in layer]
        return block_input + sum(k.get(name, 0.0) for k in kept for name in names)

    def away(self, layer: Layer) -> float:
        """What of that is on the host meanwhile (``activation.offload``)."""
        saved, offload = self.saved(layer), self.config.activation.offload
        if offload != "auto":
            return offload * saved
        return min(saved, link_bytes(layer, self.config.data.seq_len, self.share.own_tokens))

    def host(self) -> float:
        """Bytes of it, of all blocks but those that keep what they have."""
        most = max(map(self.away, self.layers))
        return max(0.0, self.passes * self.all_layers(self.away) - self.staying * most)

    @property
    def staying(self) -> float:
        """The last block of each pass over a stage, and the one that is on its way back."""
        return self.passes * self.num_stages + 1

    def all_activations(self) -> float:
        """Of every block, and of the final norm and the hidden states, which are never compiled."""
        tail = self.is_last * self.arch.hidden_size * (FP32 + 2 * self.width)
        kept = self.passes * (self.all_layers(self.saved) + self.share.own_tokens * tail)
        return kept - self.host()

    def backward_set(self, layer: Layer) -> float:
        """What one block's backward holds beside what was saved.

        Recomputed activations; the gradients of what is wider than the residual stream, and of the
        parameters in the compute dtype (fp32 where the weights are).
        """
        recomputed = self.activations(layer) - self.saved(layer)
        gradients = self.share_trained * self.width * self.numbers(layer)
        return recomputed + gradients + sum(part.working_set(self.share) for part in layer)

    def loss_gradients(self) -> float:
        """Of the head and the hidden states, made in the loss's forward."""
        hidden = self.share.tokens * self.arch.hidden_size
        head = self.share_trained * self.vocabulary_numbers()
        return self.is_last * self.width * (head + hidden)

    def logits_chunk(self) -> float:
        """The logits that are there at once."""
        numbers = self.share.tokens * self.arch.vocab_size / self.dims.tp
        return self.is_last * self.width * min(numbers, CHUNK_ELEMENTS)


def _start_of_backward(s: Sizes) -> MemoryEstimate:
    """Every block's activations; either the loss is at work or the last block's backward."""
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
    """Between updates. Buckets of gradients stay where ranks reduce into them, or are offloaded."""
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
    """The first block's backward, with the gradients of all others; the embedding's comes last."""
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
