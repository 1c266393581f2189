"""How much memory a run takes on one device: an estimate by part, before anything is built.

Weights, gradients and moments follow from the parameters' number and how they are sharded. What a
block keeps for its backward is counted tensor by tensor, as autograd (or the compiler's
partitioner) saves it. Two moments can be the peak: the start of the backward, when every block's
activations are there, and its end, when on a device that shards nothing every gradient is.

Against the allocator's peak on H200s: ``tests/test_memory.py``. What is left out on purpose: the
allocator's own fragmentation (1 to 3 GiB there), buffers that communication libraries allocate, and
uneven routing, which gives the fullest expert parallel rank more rows than the mean assumed here.
On a CPU it is a lower bound: the process itself and the plain reference kernels take more.

Bytes unless a name says otherwise. Legend: T tokens of a micro-batch, N those of one tensor
parallel rank, D model width, F expert or MLP width, K experts a token, V vocabulary.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

import torch

from moetrain.config import ActivationSection, Config, ConfigError, SavedName
from moetrain.kernels.vocabulary_chunk import CHUNK_ELEMENTS
from moetrain.models import Architecture
from moetrain.parallel.apply import compute_dtype
from moetrain.parallel.mesh import ParallelDims
from moetrain.parallel.world import num_processes, plan_world

FP32 = 4
MARGIN = 0.1
"""Relative error of the estimate, as measured: a run is refused only if it cannot fit even so."""
GIB = 2**30


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device at a step's peak, by part; they add up to :attr:`total`."""

    weights: float
    """fp32 parameters, this rank's."""
    gradients: float
    """fp32, those there at the peak."""
    moments: float
    """AdamW's two, fp32."""
    gathered: float
    """Parameters in the compute dtype: gathered from other ranks, or cast for the backward."""
    activations: float
    """What the blocks keep for the backward."""
    logits: float
    """A chunk of logits, and the gradients that the loss makes in its forward."""
    working_set: float
    """What the largest block's backward holds while it runs."""

    @property
    def total(self) -> float:
        """The peak."""
        return sum(getattr(self, field.name) for field in fields(self))

    def describe(self) -> str:
        """``65.1 GiB a device: weights 16.2, gradients 16.2, ...``."""
        parts = ", ".join(
            f"{field.name.replace('_', ' ')} {getattr(self, field.name) / GIB:.1f}"
            for field in fields(self)
        )
        return f"{self.total / GIB:.1f} GiB a device: {parts}"


def estimate_memory(
    config: Config, arch: Architecture, dims: ParallelDims, dtype: torch.dtype
) -> MemoryEstimate:
    """The peak of a training step; ``dtype`` is the compute dtype."""
    sizes = _Sizes.of(config, arch, dims, dtype)
    start, end = _start_of_backward(sizes), _end_of_backward(sizes)
    return max(start, end, key=lambda estimate: estimate.total)


def check_memory(estimate: MemoryEstimate, config: Config, capacity: float) -> None:
    """Refuse a run that cannot fit into ``capacity`` bytes.

    Raises:
        ConfigError: it names what to change: the batch where that could help, else the layout.
    """
    if estimate.total * (1 - MARGIN) <= capacity:
        return
    problem = f"takes about {estimate.describe()}; this device has {capacity / GIB:.1f} GiB"
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


def plan_memory(config: Config, arch: Architecture) -> str:
    """The estimate in words, for as many devices as the settings speak of; needs none of them.

    A GPU is assumed unless ``train.device`` says cpu.

    Raises:
        ConfigError: the degrees do not fit the model or the number of processes.
    """
    p, nproc = config.parallel, config.launch.nproc
    named = p.dp_replicate * max(p.dp_shard, 1) * p.tp * p.pp * p.cp
    size = max(num_processes(config) if nproc == "auto" else nproc, named, p.ep)
    dims = plan_world(config, arch, size)
    on_cpu = config.train.device == "cpu"
    dtype = compute_dtype(config, torch.device("cpu" if on_cpu else "cuda"))
    found = estimate_memory(config, arch, dims, dtype)
    return f"memory on {size} x {'cpu' if on_cpu else 'GPU'}, estimated: {found.describe()}"


def device_capacity(device: torch.device) -> float:
    """Bytes of memory that ``device`` has in all; a CPU's is the machine's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


@dataclass(frozen=True)
class _Sizes:
    """The numbers that both moments are made of."""

    arch: Architecture
    activation: ActivationSection
    is_compiled: bool
    is_accumulating: bool
    is_sharded: bool
    """Over several ranks; one process casts its whole weights instead of gathering them."""
    reshards: bool
    dims: ParallelDims
    tokens: int
    """T."""
    width: int
    """Bytes of a number in the compute dtype."""

    @classmethod
    def of(
        cls, config: Config, arch: Architecture, dims: ParallelDims, dtype: torch.dtype
    ) -> _Sizes:
        t = config.train
        return cls(
            arch,
            config.activation,
            config.compile.enabled,
            t.global_batch_size > t.micro_batch_size * dims.data_ranks,
            dims.world_size > 1,
            config.parallel.reshard_after_forward,
            dims,
            t.micro_batch_size * config.data.seq_len,
            dtype.itemsize,
        )

    @property
    def part_tokens(self) -> int:
        """N."""
        return self.tokens // self.dims.tp

    def split_layers(self) -> tuple[int, int]:
        """MoE and dense blocks."""
        moe = self.arch.num_moe_layers
        return moe, self.arch.num_layers - moe

    # Parameters, as numbers on one rank: whole over FSDP ranks, cut over tensor and expert ranks.
    def expert_numbers(self) -> float:
        """Of one MoE block's experts here."""
        a = self.arch
        return 3 * a.num_experts * a.hidden_size * a.moe_intermediate_size / self.dims.ep

    def block_numbers(self, is_moe: bool) -> float:
        """Of one block."""
        a = self.arch
        attention = 2 * a.hidden_size * a.head_dim * (a.num_heads + a.num_kv_heads) / self.dims.tp
        if is_moe:
            return attention + a.num_experts * a.hidden_size + self.expert_numbers()
        return attention + 3 * a.hidden_size * a.intermediate_size / self.dims.tp

    def vocabulary_numbers(self) -> float:
        """Of the embedding, which is also that of the head."""
        return self.arch.vocab_size * self.arch.hidden_size / self.dims.tp

    def local_parameters(self) -> float:
        """Numbers that this rank keeps and updates: its share of everything."""
        a, d = self.arch, self.dims
        experts = 3 * a.num_experts * a.hidden_size * a.moe_intermediate_size * a.num_moe_layers
        rest = a.num_params() - experts
        return experts / (d.ep * d.efsdp) + rest / d.sharding_ranks

    def gathered_blocks(self) -> float:
        """Bytes of compute-dtype parameters of blocks that are there when all forwards are done."""
        moe, dense = self.split_layers()
        every = moe * self.block_numbers(True) + dense * self.block_numbers(False)
        if self.is_sharded:
            if not self.frees_parameters:
                return self.width * every
            return 2 * self.width * self.largest_block  # a block's, and its neighbour's gather
        # One process: casts that autograd keeps; they are made again with what is recomputed.
        if self.width == FP32:
            return 0
        return self.width * (every if self.activation.policy == "none" else self.largest_block)

    @property
    def frees_parameters(self) -> bool:
        """Whether gathered blocks are away between forward and backward."""
        return self.reshards or self.activation.policy == "full"

    @property
    def largest_block(self) -> float:
        """Numbers."""
        moe, dense = self.split_layers()
        return max(
            self.block_numbers(True) if moe else 0.0, self.block_numbers(False) if dense else 0.0
        )

    def gathered_vocabulary(self) -> float:
        """Bytes of the gathered embedding and head; one process reads the embedding itself."""
        if self.is_sharded:
            copies = 1 if self.arch.tie_embeddings else 2
        else:
            copies = 0 if self.width == FP32 else 1
        return copies * self.width * self.vocabulary_numbers()

    # Activations, as bytes of one block.
    def norm(self, size: int) -> int:
        """Bytes a token that one RMSNorm over ``size`` numbers keeps beside its input.

        Compiled: its result, which the product after it keeps; eager also the input in fp32 and
        the normalised value.
        """
        return size * (self.width if self.is_compiled else FP32 + 2 * self.width)

    def block_activations(self, is_moe: bool) -> float:
        """What one block keeps in all (``activation.policy none``)."""
        a, w, n = self.arch, self.width, self.part_tokens
        residual = 2 * a.hidden_size * w if self.is_compiled else 0
        inputs = residual + 2 * self.norm(a.hidden_size)
        return n * inputs + self.attention_activations() + self.feed_forward(is_moe)

    def attention_activations(self) -> float:
        """Queries, keys, values, result and its log-sum-exp, of all tokens and this rank's heads.

        With q/k norms, what comes out of the products is kept beside what goes into attention.
        """
        a, w = self.arch, self.width
        heads, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        values = w * (heads + kv)  # the result and the values
        values += w * (heads + kv)  # queries and keys as attention takes them
        if a.qk_norm:
            values += w * (heads + kv) if self.is_compiled else (FP32 + w) * (heads + kv)
        return self.tokens * (values + FP32 * a.num_heads) / self.dims.tp

    def feed_forward(self, is_moe: bool) -> float:
        """Rows and pre-activations of the experts, or of the dense MLP."""
        a, w = self.arch, self.width
        if not is_moe:
            tensors = 3 if self.is_compiled else 4
            return self.tokens * tensors * a.intermediate_size * w / self.dims.tp
        rows = a.num_experts_per_token * w * (a.hidden_size + 2 * a.moe_intermediate_size)
        return self.part_tokens * (rows + self.routing_bytes())

    def routing_bytes(self) -> int:
        """A token's logits, and its ids, weights and indices."""
        return FP32 * (self.arch.num_experts + 5 * self.arch.num_experts_per_token)

    def saved_activations(self, is_moe: bool) -> float:
        """What one block keeps from its forward to its backward, by ``activation.policy``."""
        policy = self.activation.policy
        if policy == "none":
            return self.block_activations(is_moe)
        block_input = self.part_tokens * self.arch.hidden_size * self.width
        if policy == "full":
            return block_input
        return block_input + sum(self.saved_by(name, is_moe) for name in self.activation.save)

    def saved_by(self, name: SavedName, is_moe: bool) -> float:
        """What one name of ``activation.save`` keeps in one block."""
        a, w, n, tp = self.arch, self.width, self.part_tokens, self.dims.tp
        heads, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        if name == "attention":
            return self.tokens * (w * heads + FP32 * a.num_heads) / tp
        if name == "linear":
            products = self.tokens * w * (heads + 2 * kv) / tp + n * w * a.hidden_size
            return products + (0 if is_moe else self.tokens * 2 * a.intermediate_size * w / tp)
        if not is_moe:
            return 0.0
        if name == "experts":
            pre = a.num_experts_per_token * w * 2 * a.moe_intermediate_size
            return n * (pre + self.routing_bytes())
        return self.received_tokens() * a.hidden_size * w  # dispatch

    def received_tokens(self) -> float:
        """Tokens that reach this rank, each once, if every expert is as likely as the next."""
        ep, k = self.dims.ep, self.arch.num_experts_per_token
        if ep == 1:
            return 0.0
        return self.part_tokens * ep * (1 - (1 - 1 / ep) ** k)

    def all_activations(self) -> float:
        """Of every block, and of the final norm and the hidden states, which are never compiled."""
        moe, dense = self.split_layers()
        blocks = moe * self.saved_activations(True) if moe else 0.0
        blocks += dense * self.saved_activations(False) if dense else 0.0
        tail = self.arch.hidden_size * (FP32 + 2 * self.width)
        return blocks + self.part_tokens * tail

    def backward_set(self, is_moe: bool) -> float:
        """What one block's backward holds beside what was saved.

        Recomputed activations; the gradients of the experts' rows, of their pre-activations and of
        the parameters in the compute dtype (fp32 where the weights are).
        """
        a, w = self.arch, self.width
        recomputed = self.block_activations(is_moe) - self.saved_activations(is_moe)
        gradients = w * self.block_numbers(is_moe)
        if is_moe:
            per_row = 2 * a.hidden_size + 3 * a.moe_intermediate_size
            rows = self.part_tokens * a.num_experts_per_token * w * per_row
            rows += 2 * self.received_tokens() * a.hidden_size * w
        else:
            rows = self.tokens * 3 * a.intermediate_size * w / self.dims.tp
        return recomputed + gradients + rows

    def largest_backward_set(self) -> float:
        """Of any block."""
        moe, dense = self.split_layers()
        kinds = [is_moe for is_moe, count in ((True, moe), (False, dense)) if count]
        return max(self.backward_set(is_moe) for is_moe in kinds)

    def loss_gradients(self) -> float:
        """Of the head and the hidden states, made in the loss's forward."""
        return self.width * (self.vocabulary_numbers() + self.tokens * self.arch.hidden_size)

    def logits_chunk(self) -> float:
        """The logits that are there at once."""
        numbers = self.tokens * self.arch.vocab_size / self.dims.tp
        return self.width * min(numbers, CHUNK_ELEMENTS)


def _start_of_backward(s: _Sizes) -> MemoryEstimate:
    """Every block's activations; either the loss is at work or the last block's backward."""
    parameters = FP32 * s.local_parameters()
    head = FP32 * s.vocabulary_numbers()
    holds_gradients = s.is_sharded or s.is_accumulating
    gradients = parameters if holds_gradients else head
    backward = s.largest_backward_set()
    chunk = s.logits_chunk()
    return MemoryEstimate(
        weights=parameters,
        gradients=gradients,
        moments=2 * parameters,
        gathered=s.gathered_blocks() + (s.gathered_vocabulary() if s.is_sharded else 0.0),
        activations=s.all_activations(),
        logits=s.loss_gradients() + max(0.0, chunk - backward),
        working_set=backward,
    )


def _end_of_backward(s: _Sizes) -> MemoryEstimate:
    """The first block's backward, with the gradients of all others; the embedding's comes last."""
    parameters = FP32 * s.local_parameters()
    is_moe = s.arch.is_moe_layer(0)
    still_to_come = 0.0
    if not (s.is_sharded or s.is_accumulating):
        still_to_come = FP32 * s.block_numbers(is_moe)
        still_to_come += 0.0 if s.arch.tie_embeddings else FP32 * s.vocabulary_numbers()
    block = s.width * s.block_numbers(is_moe)
    return MemoryEstimate(
        weights=parameters,
        gradients=parameters - still_to_come,
        moments=2 * parameters,
        gathered=(0.0 if s.width == FP32 and not s.is_sharded else block)
        + (s.gathered_vocabulary() if s.is_sharded else 0.0),
        activations=s.saved_activations(is_moe),
        logits=0.0,
        working_set=s.backward_set(is_moe),
    )
