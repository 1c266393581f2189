"""Estimates the memory that a run takes on one device, by part, before anything is built.

Weights, gradients and moments follow from the number of parameters and how they are sharded. The
parts of a block say what they keep for the backward, as autograd or the compiler's partitioner
saves it; it is added up here. The peak comes at one of two moments: the start of the backward, when
all blocks' activations exist, or its end, when a device that shards nothing has all gradients. If
only a rank's first blocks recompute, the backward of the last of these is another moment. In a run
that generates too, with a model and a cache beside the trainer's, generation is one more.

``tests/train/estimates/test_memory.py`` compares the estimate with the allocator's peak on H200s.
Left out on purpose: fragmentation (1 to 3 GiB there), buffers of communication libraries, and
uneven routing, which gives the fullest expert parallel rank more rows than the mean that is assumed
here. On a CPU the estimate is a lower bound: the process itself and the plain reference kernels
take more.

All sizes are in bytes unless a name says otherwise.
"""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch.distributed.tensor import Shard

from moetrain.config import Config, ConfigError, OptimSection
from moetrain.config.compute import LESS, BlockPolicy
from moetrain.config.environment import GIB
from moetrain.config.rl import RlSection, SleepName
from moetrain.config.sections import ModelSection, TrainSection
from moetrain.kernels.optim.muon import orthogonalising_bytes
from moetrain.kernels.quant.e4m3 import SCALED
from moetrain.kernels.vocabulary.chunk import CHUNK_ELEMENTS
from moetrain.models.architecture import FP32, Architecture, AttentionPart, Part, Workload
from moetrain.models.hf.load import resolve_architecture
from moetrain.models.rules import ADAPTERS, Rule
from moetrain.models.transformer import plan_model
from moetrain.parallel.apply import frees_memory, resharded_blocks, shared_regions
from moetrain.parallel.fsdp.transport.peers import wants_copies
from moetrain.parallel.mesh import STYLES, ParallelDims
from moetrain.parallel.pipeline.stages import StagePlan

_HOSTED_BYTES = 16
"""Bytes of a parameter that is updated on the host: weight, gradient and both moments, in fp32."""

AUTO_MARGIN = 0.05
"""Share of the estimate that ``activation.policy auto`` leaves free."""

_Layer = tuple[Part, ...]


class BlockKind(NamedTuple):
    """Blocks that need the same memory and the same time."""

    layer: _Layer
    policy: BlockPolicy
    """The activation policy of these blocks: it says what their backward recomputes."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device at a step's peak, by part; they add up to :attr:`total`."""

    MARGIN: ClassVar = 0.1
    """Measured relative error. A run is refused only if it cannot fit even with this error."""

    weights: float = 0.0
    """This rank's parameters: in fp32 or bf16 if they are trained, else in the compute dtype."""
    gradients: float = 0.0
    """Gradients that exist at the peak."""
    moments: float = 0.0
    """AdamW's two moments of the trained parameters, or Muon's one."""
    gathered: float = 0.0
    """Parameters in the compute dtype: gathered from other ranks, or cast for the backward."""
    activations: float = 0.0
    """Activations that blocks keep for the backward."""
    logits: float = 0.0
    """A chunk of logits, and the gradients that the loss makes in its forward."""
    working_set: float = 0.0
    """Tensors of the largest block's backward while it runs."""
    peers: float = 0.0
    """This rank's buffers that other ranks of the machine read and write
    (``parallel.fsdp_transport``)."""
    generator: float = 0.0
    """Generation's own copy of weights, in the formats in which it stores them."""
    cache: float = 0.0
    """Generation's keys, values and states."""
    teacher: float = 0.0
    """This rank's parameters of ``rl.teacher``."""

    @property
    def total(self) -> float:
        """Bytes at the peak."""
        return sum(vars(self).values())

    def surely_fits(self, capacity: float, margin: float = MARGIN) -> bool:
        """Return True if ``capacity`` bytes are enough for ``1 + margin`` times the estimate."""
        return self.total * (1 + margin) <= capacity

    def may_fit(self, capacity: float) -> bool:
        """Return True if ``capacity`` bytes may be enough, given the estimate's error."""
        return self.total * (1 - self.MARGIN) <= capacity

    def check(self, config: Config, capacity: float) -> None:
        """Raise ConfigError, with the setting to change, if ``capacity`` bytes cannot be enough."""
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
        remedy = "Lower it"
        if config.activation.policy != "full":
            remedy += ", or recompute activations (activation.policy full)"
        size = config.train.micro_batch_size
        raise ConfigError("train.micro_batch_size", f"{size} {problem}. {remedy}")

    def describe(self) -> str:
        """Write ``65.1 GiB a device: weights 16.2, gradients 16.2, ...``."""
        optional = ("peers", "generator", "cache", "teacher")
        sizes = {name: size for name, size in vars(self).items() if size or name not in optional}
        parts = ", ".join(
            f"{name.replace('_', ' ')} {size / GIB:.1f}" for name, size in sizes.items()
        )
        return f"{self.total / GIB:.1f} GiB a device: {parts}"


@lru_cache(maxsize=1)
def teacher_of(path: str) -> Architecture:
    """Return the model that ``rl.teacher`` names; ConfigError: there is none."""
    try:
        arch = resolve_architecture(ModelSection(path=path))
    except ConfigError as error:
        raise ConfigError("rl.teacher", error.problem) from None
    if arch.num_labels:
        problem = f"{path!r} is a reward model, whose head predicts no token"
        raise ConfigError("rl.teacher", f"{problem}; name a language model")
    return arch


@lru_cache(maxsize=4)
def _parameters(
    config: Config, arch: Architecture, dtype: torch.dtype
) -> tuple[dict[str, int], dict[str, Rule]]:
    """Return the number of elements of every parameter, and its rule, by name."""
    model, rules = plan_model(config, arch, dtype)
    return {name: parameter.numel() for name, parameter in model.named_parameters()}, rules


class Recomputation(NamedTuple):
    """Values of ``activation.policy`` and ``activation.blocks``."""

    policy: BlockPolicy
    blocks: int | Literal["all"]

    def of(self, config: Config) -> Config:
        """Return ``config`` with these values."""
        values = {"activation.policy": self.policy, "activation.blocks": self.blocks}
        return config.filled(values, "activation.policy auto")

    def describe(self) -> str:
        """Write ``full in a rank's first 43 blocks, selective in others``."""
        if self.policy == "none":
            return "none in all blocks"
        blocks = "block" if self.blocks == 1 else f"{self.blocks} blocks"
        return f"{self.policy} in a rank's first {blocks}, {LESS[self.policy]} in others"


class _Block(NamedTuple):
    numbers: float
    """Number of parameters that the block computes with."""
    unsharded: float
    """Bytes of these parameters when unsharded, without the weights that are kept anyway."""
    saved: float
    """Bytes kept for the backward (``activation.policy``)."""
    backward: float
    """Bytes that the block's backward needs beside ``saved``."""
    copies: float
    """Bytes of the slots for redundant experts (``moe.redundant_experts``)."""


class RankSizes:
    """The sizes of one pipeline rank, the base of its estimates.

    A block's number of parameters is what it computes with: all FSDP ranks' shards, but only one
    rank's part under tensor or expert parallelism.
    """

    @classmethod
    def of_ranks(
        cls, config: Config, arch: Architecture, dims: ParallelDims, dtype: torch.dtype
    ) -> list[Self]:
        """Size every pipeline rank; ``dtype`` is the compute dtype."""
        # Parameters depend on these settings alone. The key leaves out all others, so that
        # all plans of a run share one count.
        train = TrainSection(freeze=config.train.freeze)
        sections = {"kernels": config.kernels, "moe": config.moe, "lora": config.lora}
        sections["rl"] = RlSection(generator_dtype=config.rl.generator_dtype)
        optim = {name: getattr(config.optim, name) for name in ("name", "weight_dtype")}
        sections |= {"optim": OptimSection(**optim)}
        key: Any = Config().model_copy(update={**sections, "train": train})
        parameters = _parameters(key, arch, dtype)  # pyright: ignore[reportArgumentType] - frozen
        plan = StagePlan(config, arch)
        return [
            cls(plan, dims, dtype, rank, in_flight, *parameters)
            for rank, in_flight in enumerate(plan.in_flight(dims))
        ]

    @staticmethod
    def least_sleep(ranks: "Sequence[RankSizes]", room: float) -> SleepName:
        """Return ``rl.sleep``; for auto, what frees least and surely fits into ``room`` bytes."""
        asked = ranks[0].config.rl.sleep
        if asked != "auto":
            return asked
        ways: tuple[SleepName, ...] = ("never", "cache")
        for sleep in ways:
            fits = all(rank.peak(sleep).surely_fits(room) for rank in ranks)
            if fits or ranks[0].config.rl.apart:
                return sleep
        return "all"

    @classmethod
    def least_recomputation(
        cls,
        config: Config,
        arch: Architecture,
        dims: ParallelDims,
        dtype: torch.dtype,
        capacity: float,
        sleep: SleepName | Literal["auto"] | None,
    ) -> Recomputation:
        """Return what ``activation.policy auto`` means with ``capacity`` bytes a device.

        It is the first that fits of: none; selective in one block of each pipeline rank, in two and
        so on; full in one, two and so on. If nothing fits, it is full in all.

        ``sleep``: as the setting ``rl.sleep``; None: the run does not generate.
        """
        plan = StagePlan(config, arch)
        most = max(len(plan.blocks_of(rank)) for rank in range(dims.pp))
        ways = [Recomputation("none", "all")]
        ways += [Recomputation("selective", n + 1) for n in range(most)]
        ways += [Recomputation("full", n + 1) for n in range(most)]

        def fits(way: Recomputation) -> bool:
            ranks = cls.of_ranks(way.of(config), arch, dims, dtype)
            asleep = cls.least_sleep(ranks, capacity) if sleep == "auto" else sleep
            return all(rank.peak(asleep).surely_fits(capacity, AUTO_MARGIN) for rank in ranks)

        return ways[min(bisect_left(ways, True, key=fits), len(ways) - 1)]

    def __init__(
        self,
        plan: StagePlan,
        dims: ParallelDims,
        dtype: torch.dtype,
        rank: int,
        in_flight: int,
        numels: Mapping[str, int],
        rules: Mapping[str, Rule],
    ) -> None:
        """Add up the memory of pipeline rank ``rank``.

        Args:
            in_flight: the most (stage, micro-batch) pairs whose activations the rank holds at once.
            numels, rules: of every parameter of the model, by name.
        """
        config, arch = plan.config, plan.arch
        self.config = config
        self.arch = arch
        self.dims = dims
        tokens = config.train.micro_batch_size * config.data.seq_len // dims.cp
        self.share = Workload(
            tokens=tokens,
            tp=dims.tp,
            ep=dims.ep,
            width=dtype.itemsize,
            is_compiled=config.compile.is_on,
            cp=dims.cp,
            gathers_keys=dims.cp_method == "all_gather",
            seq_len=config.data.seq_len,
            sparse_attention=config.kernels.sparse_form,
        )
        self.residual_bytes = self.share.own_tokens * arch.hidden_size * dtype.itemsize
        """Bytes of a micro-batch's residual stream."""
        layers = arch.layers()
        self.sequence = [
            BlockKind(layers[i], config.activation.of_block(place))
            for place, i in enumerate(plan.blocks_of(rank))
        ]
        """The kinds of this rank's blocks, in their order."""
        self.blocks = Counter(self.sequence)
        """Number of this rank's blocks of each kind."""
        self.turns = resharded_blocks(config, dims.world_size, self.blocks.total())
        """Number of blocks whose unsharded parameters share one or two buffers (double
        buffering)."""
        self.num_stages = len(plan.stages_of(rank))
        self._passes = in_flight / self.num_stages
        """Micro-batches for which these blocks hold activations at once."""
        is_first, self.is_last = (plan.rank_of_stage[end] == rank for end in (0, -1))
        both = is_first + self.is_last
        self.matrices = min(both, 1) if arch.tie_embeddings else both
        if arch.num_labels:  # a reward model: the head is one row
            self.matrices = int(is_first)
        """Vocabulary matrices here: embedding and head, or one if they are tied."""
        self.vocabulary_numbers = arch.vocab_size * arch.hidden_size / dims.tp
        rows = arch.num_labels or arch.vocab_size / dims.tp
        self.head_numbers = rows * arch.hidden_size

        mine = {name: n for name, n in numels.items() if rank in plan.holders(name)}
        owned = [(n, rules[name]) for name, n in mine.items()]
        self._stored = sum(n * rule.stored_bytes for n, rule in owned)
        """Bytes of its parameters over all ranks of a replica."""
        self.trained = sum(n for n, rule in owned if rule.trainable)
        self.share_trained = self.trained / sum(mine.values())
        """Share of its parameters that is trained, assumed to be the same in every part."""
        # The device has only the compute values of parameters that the host updates.
        self._hosted = config.optim.offload_fraction * self.trained / dims.sharding_ranks
        self._updated = self.trained / dims.sharding_ranks - self._hosted
        """Number of parameters that this rank's device updates, with gradients and moments."""
        self.orthogonal = sum(n for n, rule in owned if rule.is_orthogonal) / dims.sharding_ranks
        """Number of these that Muon updates."""
        self._share_updated = self.share_trained * (1 - config.optim.offload_fraction)
        ep = 1 if config.rl.apart else dims.ep  # the copy that is sent has all experts
        self._generator = sum(
            _copied_bytes(numels[name], rule, dims, ep, dtype, is_here=name in mine)
            for name, rule in rules.items()
        )
        """Bytes of generation's own copy of weights, over all stages."""
        codes: Counter[str] = Counter()
        widened: Counter[str] = Counter()
        for name, numel in numels.items():
            rule, layer = rules[name], name.split(".")[1]
            if rule.generated is not None and not config.rl.apart:
                widened[layer] += numel // ep * dtype.itemsize
            if rule.quant_format is not None and rule.is_offloaded and name in mine:
                codes[layer] += rule.quant_format.num_bytes(numel // dims.sharding_ranks)
        self._widened = max(widened.values(), default=0)
        """Bytes of one layer's experts, dequantised for generation; 0: it stores none quantised."""
        self._hosted_codes, self._staged = codes.total(), 2 * max(codes.values(), default=0)
        """Bytes of quantised experts on the host, and on the device (a block's and the next
        one's)."""
        self._regions = shared_regions(config, dims.world_size)
        self._peers = self._shared_bytes(mine, rules, dtype)
        """Bytes of buffers that other ranks copy from and to; 0 if the ranks are on several
        machines."""

        self.is_alone = dims.world_size == 1
        self._frees = frees_memory(config, dims.world_size)
        self._is_accumulating = config.train.micro_batches(dims.data_ranks) > 1
        self._allocates_late = self._frees and not self._is_accumulating
        """True: gradients are allocated at their first use."""
        self._unlike_kept = 1.0
        """Share of the parameters that are computed with in another tensor than this rank keeps."""
        if self.is_alone:
            wide = {n for n, rule in rules.items() if rule.trainable and rule.storage != dtype}
            share = sum(mine[name] for name in wide & mine.keys()) / sum(mine.values())
            self._unlike_kept = share * (1 - config.optim.offload_fraction)
        stays = dims.efsdp == 1 and not self.is_alone
        adapters = {n for n in rules if n.endswith(ADAPTERS)}
        experts = [
            rule for n, rule in rules.items() if rule.style == "expert" and n not in adapters
        ]
        is_used_so = all(rule.storage == dtype and not rule.quant_format for rule in experts)
        self._experts_stay = stays and is_used_so
        """True: experts are used as this rank keeps them, while other parameters are gathered."""
        gathered = {  # adapters of experts stay like experts, if they are stored as they are used
            n
            for n in adapters & mine.keys()
            if not (stays and rules[n].style == "expert" and rules[n].storage == dtype)
        }
        adapted = (mine[n] / (dims.ep if rules[n].style == "expert" else 1) for n in gathered)
        self._adapters = sum(adapted) / self.blocks.total()
        """Number of a block's adapters that are gathered. They are no matrices of its parts."""
        self._blocks = {kind: self._block(*kind) for kind in self.blocks}
        self._peers += max(block.copies for block in self._blocks.values())

    def _shared_bytes(
        self, mine: Mapping[str, int], rules: Mapping[str, Rule], dtype: torch.dtype
    ) -> float:
        """Count bytes of :attr:`~moetrain.parallel.fsdp.transport.peers.Peers.workspace`."""
        config, dims = self.config, self.dims
        device_type = "cpu" if config.train.device == "cpu" else "cuda"
        is_near = dims.machines(dims.sharding_ranks) == 1
        if not (is_near and wants_copies(config.parallel, device_type)):
            return 0.0
        copies, inboxes = 0.0, defaultdict[object, float](float)
        for name, numel in mine.items():
            rule = rules[name]
            by_style = dims.ep if rule.style == "expert" else dims.tp
            cut = by_style if isinstance(STYLES[rule.style], Shard) else 1
            if dims.sharding_ranks == cut or rule.quant_format:  # nobody copies it
                continue
            gathered = rule.gather or dtype
            size = numel * gathered.itemsize / cut
            on_device = 1 - config.optim.offload_fraction * rule.trainable
            if rule.storage != gathered:  # else others read the shard where it lies
                copies += on_device * size * cut / dims.sharding_ranks
            if rule.trainable and on_device:  # the gradients of a whole bucket arrive at once
                is_large = rule.style == "expert" and not name.endswith(ADAPTERS)
                unit = name if is_large else (*name.split(".")[:2], rule.style == "expert")
                inboxes[unit, rule.of_bucket] += size
        return copies + max(inboxes.values(), default=0.0)

    def _block(self, layer: _Layer, policy: BlockPolicy) -> _Block:
        share, width, names = self.share, self.share.width, self.config.activation.save
        numbers = sum(part.matrix_elements(share) for part in layer)
        is_narrow = self.config.lora.base_dtype != "auto"
        weights = [w for part in layer for w in part.weights.values()]
        experts = sum(math.prod(w.shape) for w in weights if w.rule.style == "expert")
        others = numbers - self._experts_stay * experts / share.ep + self._adapters
        copies = self.config.moe.redundant_experts / max(1, self.arch.num_experts) * experts * width
        unsharded = (1.0 if is_narrow else self._unlike_kept) * width * others + copies
        # Beside its input, a compiled norm keeps its result, which the product after it keeps too;
        # an eager norm also keeps its input in fp32 and the normalised value.
        inputs = 2 * width if share.is_compiled else FP32 + 2 * width
        normed = inputs * share.own_tokens * self.arch.hidden_size
        made = [normed * (len(part.norms) or 1) + part.activations(share) for part in layer]
        saved = sum(made) if policy == "none" else self.residual_bytes
        is_kept = policy == "selective" and "experts" in names
        saved += copies * (policy == "none" or is_kept)
        # The tensors that each part recomputes, and gradients wider than the residual stream.
        working = [part.working_set(share) for part in layer]
        backward = sum(made) - saved + sum(working)
        if policy == "selective":
            kept = [
                sum(size for name, size in part.saved(share).items() if name in names)
                for part in layer
            ]
            saved += sum(kept)
            backward -= sum(kept)
            if share.is_compiled:  # recomputed part by part
                backward = max(m - k + w for m, k, w in zip(made, kept, working, strict=True))
        # Also the gradients of parameters in the compute dtype (fp32 if the weights are fp32).
        backward += self.share_trained * (width * numbers + copies)
        return _Block(numbers, unsharded, saved, backward, copies)

    def peak(self, sleep: SleepName | None) -> MemoryEstimate:
        """Estimate the moment of a training step that needs most memory.

        ``sleep``: memory of generation that is freed during updates; None: nothing generates.
        """
        masters = self._hosted * (FP32 - self.share.width)  # they lie on the host
        weights = self._stored / self.dims.sharding_ranks - masters - self._hosted_codes
        kept = MemoryEstimate(weights, moments=self.moment_bytes(), peers=self._peers)
        rl = self.config.rl
        if sleep is not None and rl.teacher is not None and not rl.is_teacher_served:
            teacher = teacher_of(rl.teacher).num_params() * self.share.width
            kept = replace(kept, teacher=teacher / self.dims.sharding_ranks)
        training = kept
        generation = {"generator": self._generator, "cache": self._cache()}
        if sleep is not None:
            awake = {"generator": sleep != "all", "cache": sleep == "never"}
            training = replace(training, **{k: v * awake[k] for k, v in generation.items()})
        moments = [self._backward(training, policy) for policy in self._policies()]
        moments.append(self._end_of_backward(training))
        if self.orthogonal:  # all gradients exist by then
            late = {"gradients": self._gradients(self._updated), "activations": 0.0}
            parts = (part for kind in self.blocks for part in kind.layer)
            weights = (w for part in parts for w in part.weights.values())
            late["working_set"] = orthogonalising_bytes(
                self.orthogonal,
                largest=max(math.prod(weight.shape[-2:]) for weight in weights),
                width=self.share.width,
                is_dealt=not self.is_alone,
            )
            moments.append(replace(moments[-1], **late))
        if sleep is not None:  # between updates, where buckets stay unless they are offloaded
            if self.config.rl.offload:
                kept = replace(kept, moments=0.0, peers=0.0)
            elif not self._frees:
                gradients = self._gradients(self._updated)
                kept = replace(kept, gradients=gradients, gathered=self._unsharded_blocks())
            moments.append(replace(kept, working_set=self._widened, **generation))
        return max(moments, key=lambda estimate: estimate.total)

    def on_host(self) -> Counter[str]:
        """Return the bytes of host memory of one process, by the setting that asks for them."""
        wanted = {
            "optim.offload_fraction": int(_HOSTED_BYTES * self._hosted),
            "lora.offload_experts": int(self._hosted_codes),
            "rl.offload": int(self.config.rl.offload * self.moment_bytes()),
        }
        return +Counter(wanted)  # without zeros

    def _backward(self, kept: MemoryEstimate, policy: BlockPolicy) -> MemoryEstimate:
        """Estimate the backward of the last block with ``policy``; if no block follows it, the
        larger of the loss and that backward."""
        backward = max(self._blocks[kind].backward for kind in self.blocks if kind.policy == policy)
        policies = self._policies()
        if policy == policies[-1]:
            return self._start_of_backward(kept, backward)
        # Blocks after it are done: their activations are freed, and their gradients exist.
        done = policies[policies.index(policy) + 1 :]
        freed = self._of_all(lambda block: block.saved, done)
        updated = self._updated
        if self._allocates_late:
            updated = self._of_all(lambda block: block.numbers, done) + self.head_numbers
            updated *= self._share_updated
        return replace(
            kept,
            gradients=self._gradients(updated),
            gathered=self._unsharded_blocks() + self._unsharded_vocabulary(),
            activations=self._passes * self._of_all(lambda block: block.saved) - freed,
            working_set=backward,
        )

    def _policies(self) -> list[BlockPolicy]:
        """Return the policies of this rank's blocks, that of its first ones first."""
        found: dict[BlockPolicy, None] = {kind.policy: None for kind in self.blocks}
        return [*found]

    def _start_of_backward(self, kept: MemoryEstimate, backward: float) -> MemoryEstimate:
        """Estimate the loss, or the last block's ``backward``, with all activations."""
        width, tokens = self.share.width, self.share.tokens
        updated = self._updated
        if self._allocates_late:
            updated = self._share_updated * self.head_numbers
        # The loss's forward makes the gradients of head and hidden states.
        gradients = self.share_trained * self.head_numbers + tokens * self.arch.hidden_size
        gradients *= 1 + self.arch.mtp_layers
        rows = self.head_numbers / self.arch.hidden_size
        chunk = min(tokens * rows, CHUNK_ELEMENTS)
        chunk *= width
        if (
            self.config.kernels.precision == "fp8_gradients"
        ):  # quantised values; the matrix; the next term of the sum
            chunk = 1.75 * chunk + (1 + width) * self.head_numbers
        logits = width * gradients + max(0.0, chunk - backward)
        # The final norm, which is never compiled, and the hidden states.
        tail = self.is_last * self.arch.hidden_size * (FP32 + 2 * width) * self.share.own_tokens
        saved = self._passes * (self._of_all(lambda block: block.saved) + tail)
        return replace(
            kept,
            gradients=self._gradients(updated),
            gathered=self._unsharded_blocks() + self._unsharded_vocabulary(),
            activations=saved,
            logits=self.is_last * logits,
            working_set=backward,
        )

    def _end_of_backward(self, kept: MemoryEstimate) -> MemoryEstimate:
        """Estimate the first block's backward, with all other gradients but the embedding's."""
        first, updated = next(iter(self._blocks.values())), self._updated
        tied = self.arch.tie_embeddings
        if self._allocates_late:
            vocabulary = 0.0 if tied else self.vocabulary_numbers
            updated -= self._share_updated * (first.numbers + vocabulary)
        gathered = self._unsharded_blocks() + self._unsharded_vocabulary()
        if self._frees:  # its own, and the embedding
            gathered = self._regions * first.unsharded + self._staged
            gathered += self._unsharded_vocabulary() / (1 if tied else 2)
        return replace(
            kept,
            gradients=self._gradients(updated),
            gathered=gathered,
            activations=first.saved,
            working_set=first.backward,
        )

    def received(self) -> Counter[str]:
        """Return the bytes that this rank receives for context parallelism in the forward of one
        micro-batch, for each value of ``parallel.cp_method``."""
        total: Counter[str] = Counter()
        for kind, count in self.blocks.items():
            for part in kind.layer:
                if isinstance(part, AttentionPart):
                    found = part.exchanged(self.share)
                    total.update({name: int(count * size) for name, size in found.items()})
        return total

    def _of_all(
        self, of_one: Callable[[_Block], float], policies: Collection[BlockPolicy] | None = None
    ) -> float:
        """Add up a size of all blocks, or of those with ``policies``."""
        return sum(
            count * of_one(self._blocks[kind])
            for kind, count in self.blocks.items()
            if policies is None or kind.policy in policies
        )

    def moment_bytes(self) -> float:
        """Count bytes of the moments that this rank's device updates."""
        each = {"float32": 4, "bfloat16": 2, "float8": 1 + 1 / SCALED}
        return (2 * self._updated - self.orthogonal) * each[self.config.optim.state_dtype]

    def saved_bytes(self) -> float:
        """Count this rank's bytes of a checkpoint: parameters and moments, no gradients."""
        each = getattr(torch, self.config.optim.weight_dtype).itemsize
        return each * self._updated + self.moment_bytes() + (_HOSTED_BYTES - FP32) * self._hosted

    def _gradients(self, updated: float) -> float:
        """Count bytes of ``updated`` gradients, and of the fp32 ones that are not yet reduced."""
        kept = getattr(torch, self.config.optim.gradient_dtype).itemsize * updated
        adds_unsharded = self._is_accumulating and self.config.parallel.reduce_at == "last"
        if self.is_alone or not adds_unsharded:
            return kept
        vocabulary = self.matrices * self.vocabulary_numbers
        numbers = self._of_all(lambda block: block.numbers) + vocabulary
        return kept + FP32 * self.share_trained * numbers

    def _unsharded_blocks(self) -> float:
        """Count bytes of blocks' unsharded parameters when all forwards are done."""
        blocks, turns = self.blocks.total(), self.turns
        kept = self._of_all(lambda block: block.unsharded) * (blocks - turns) / blocks
        largest = max(block.unsharded for block in self._blocks.values())
        return kept + min(self._regions, turns) * largest + self._staged  # it and a neighbour

    def _unsharded_vocabulary(self) -> float:
        numbers = self.matrices * self.vocabulary_numbers
        return self._unlike_kept * self.share.width * numbers

    def _cache(self) -> float:
        """Count bytes of one rank's keys, values and states; one slot belongs to no sequence."""
        rl, cp = self.config.rl, self.config.parallel.cp
        if rl.apart:  # other processes have the cache
            return 0.0
        tokens = rl.cache_tokens or rl.max_sequences * self.config.data.seq_len
        width, parts = self.share.width, [part for layer in self.arch.layers() for part in layer]
        states = (rl.max_sequences + 1) * sum(part.state_bytes(width) for part in parts)
        latent = rl.generator_cache == "latent"
        return width * tokens * self.arch.cached_elements(cp, latent=latent) + states


def _copied_bytes(
    numel: int, rule: Rule, dims: ParallelDims, ep: int, dtype: torch.dtype, *, is_here: bool
) -> float:
    """Count the bytes of generation's copy of a weight; 0 if generation uses training's tensor.

    Generation needs a copy of a weight that training updates, shards, quantises or stores in
    another dtype, and of a weight that training does not have on this rank (``is_here``).
    """
    used, is_expert = rule.gather or dtype, rule.style == "expert"
    if rule.generated is not None:
        return numel // ep * rule.generated.bytes_per_element
    is_cut = (dims.efsdp * dims.ep // ep if is_expert else dims.sharding_ranks) > 1
    if rule.trainable or is_cut or rule.storage != used or rule.quant_format or not is_here:
        return numel // (ep if is_expert else 1) * used.itemsize
    return 0
