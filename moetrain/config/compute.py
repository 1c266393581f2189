"""Sections of how a step is computed: ranks, experts, kernels, compilation, what is kept.

None of them changes what is computed, but for rounding and the balancing of experts.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from moetrain.config.sources import Section, split_words

SavedName = Literal["dispatch", "attention", "experts", "linear"]
AttentionName = Literal["auto", "sdpa", "cudnn", "exact", "flex", "reference"]
Precision = Literal["bf16", "fp8"]


class ParallelSection(Section):
    """Degrees of parallelism: dp_replicate * dp_shard * tp * pp * cp is the number of processes."""

    dp_replicate: int = Field(default=1, gt=0)
    """Replicas of the sharded model (HSDP)."""
    dp_shard: int = Field(default=-1, ge=-1)
    """Ranks that shard parameters (FSDP); -1: what is left of the world."""
    tp: int = Field(default=1, gt=0)
    """Tensor parallel ranks."""
    pp: int = Field(default=1, gt=0)
    """Pipeline ranks: the model's blocks are cut into stages, and each rank has some of them."""
    pp_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"] = "1f1b"
    """The order in which stages work on micro-batches. gpipe: all forwards first; 1f1b: each
    backward as soon as it can run, for less memory; interleaved_1f1b: the same with several stages
    a rank, for shorter waits; it takes micro-batches in multiples of pp."""
    pp_stages: Literal["auto"] | int = "auto"
    """Stages of each rank: 2 or more with interleaved_1f1b (auto: 2), else 1."""
    pp_split: tuple[int, ...] | None = None
    """How many blocks each stage has, with commas between, in the model's order; unset: such that
    the slowest rank has the least arithmetic, which for the last stage includes the head's."""
    ep: int = Field(default=1, gt=0)
    """Expert parallel ranks, taken from those of dp_shard, cp and tp; divides their product. With 1
    every rank gathers all experts of a block and sends no token, which was the fastest on four GPUs
    of one machine by 4 %. With more every token travels to its experts, which takes less memory."""
    cp: int = Field(default=1, gt=0)
    """Context parallel ranks. Not available yet: must be 1."""
    reshard_after_forward: bool | int = False
    """Free a block's gathered parameters after its forward and gather them again, a block ahead,
    for its backward: less memory for one gather more. A number: so many of a rank's first blocks
    do, and the last ones, whose backwards come first, keep theirs. activation.policy full always
    does so, in all blocks unless here is a number."""
    reduce: Literal["fp32_accum", "fp32", "bf16"] = "fp32_accum"
    """How gradients are summed over ranks. fp32_accum: sent in the compute dtype, added in fp32;
    fp32: sent in fp32, twice the bytes; bf16: sent and rounded in the compute dtype."""
    reduce_at: Literal["each", "last"] = "each"
    """With gradient accumulation, when gradients travel. each: every micro-batch's, while its
    backward runs; last: once a step, added up before in fp32 on the rank that made them, at 4 bytes
    for every parameter that it gathers."""

    fsdp_transport: Literal["auto", "nccl", "copy"] = "auto"
    """How FSDP's parameters and gradients travel. nccl: by torch's collectives (gloo's on CPUs);
    copy: within one machine copy engines read other ranks' shards and write gradients into their
    memory, which leaves all SMs to computing; the same bits, for 2 bytes more of each number that a
    rank holds and a bucket of gradients. What optim.offload_fraction keeps on the host, and sums of
    another parallel.reduce than fp32_accum, go by collectives all the same. auto: copy between GPUs
    of one machine that reach one another's memory."""

    @field_validator("pp_split", mode="before")
    @classmethod
    def _split_sizes(cls, value: Any) -> Any:
        return tuple(value.split(",")) if isinstance(value, str) else value

    @field_validator("reshard_after_forward")
    @classmethod
    def _of_two_blocks_at_least(cls, value: bool | int) -> bool | int:
        if not isinstance(value, bool) and value < 2:
            raise ValueError("give yes, no, or a number of blocks from 2 on")
        return value

    @field_validator("pp_split")
    @classmethod
    def _of_a_block_at_least(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and (not value or min(value) < 1):
            raise ValueError("a stage has one block at least")
        return value


class MoeSection(Section):
    """Routing, balancing and dispatch of MoE layers."""

    dispatcher: Literal["auto", "local", "alltoall", "deepep"] = "auto"
    """How tokens reach their experts; auto: local where parallel.ep is 1, else deepep where it can
    run, else alltoall."""
    deepep_num_sms: Literal["auto"] | int = "auto"
    """SMs DeepEP uses: auto (what was fastest for the number of ranks), or an even number."""
    dispatch_mode: Literal["exact", "static"] = "exact"
    """How DeepEP sizes what a rank receives. exact: the host waits for the counts, once a layer in
    the forward; static: for the most there can be, and nothing waits."""
    static_capacity: float = Field(default=2.0, ge=1)
    """Rows that static reserves for a rank's experts, as a multiple of an evenly loaded rank's. A
    rank has many experts, whose loads even out: twice is rare. Less than all there can be (which is
    parallel.ep, and reserves no more than that) may overflow; such a step is done again exactly."""
    force_balanced: bool = False
    """Ignore the router's choice and send every expert the same number of tokens (benchmarks)."""
    aux_loss_coef: float | None = Field(default=None, ge=0)
    """Weight of the load-balancing loss; unset: the model's own (router_aux_loss_coef)."""
    aux_loss_layers: Literal["auto", "each", "pooled"] = "auto"
    """each: every layer is balanced by itself, and the loss is the layers' mean; pooled: all layers
    together, as Hugging Face has it, where one may be as uneven as it likes; auto: each for random
    weights, pooled where a checkpoint's training goes on (model.path)."""
    aux_loss_scope: Literal["micro_batch", "global_batch"] = "micro_batch"
    """Whose expert counts that loss uses; without gradient accumulation the two are the same.
    micro_batch: those of one micro-batch of all ranks together, which costs nothing but is another
    loss for another split. global_batch: the whole step's, however it is split, for one more
    forward pass a micro-batch."""
    z_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the router z-loss (mean squared logsumexp of the router logits)."""
    bias_update_rate: float = Field(default=0.0, ge=0)
    """Step of the auxiliary-loss-free selection bias after every optimizer step; 0: no bias."""

    def pools_aux_loss(self, model_path: str | None) -> bool:
        """Resolve ``aux_loss_layers``, where auto depends on ``model.path``."""
        if self.aux_loss_layers == "auto":
            return model_path is not None
        return self.aux_loss_layers == "pooled"

    @field_validator("deepep_num_sms")
    @classmethod
    def _even_sms(cls, value: str | int) -> str | int:
        if isinstance(value, int) and (value <= 0 or value % 2):
            raise ValueError("SMs are used in pairs: give auto or a positive even number")
        return value


class KernelsSection(Section):
    """Which implementations run."""

    backend: Literal["auto", "triton", "reference"] = "auto"
    """auto: the fast kernels on CUDA, plain torch elsewhere; triton or reference: that one."""
    attention: AttentionName = "auto"
    """auto: in reinforcement learning exact, where it can run; elsewhere sdpa (cuDNN first) for
    unpacked rows and on a CPU; for packed rows on CUDA, cuDNN's
    ragged attention if nvidia-cudnn-frontend is installed and the GPU is Hopper or newer, else
    flex. exact: on Hopper in bfloat16, a forward whose every token has the same bits whatever it is
    computed beside, so that what generation reports is what training computes: attention with
    cudnn's backward, and norms, rotations and SwiGLU as ops that the compiler does not fuse."""
    precision: Precision = "bf16"
    """What products multiply. bf16: the compute dtype. fp8: routed experts and dense projections
    multiply e4m3, with a scale for each row, forward and for the gradients of their inputs; those
    of weights, the head, the router and attention stay. It takes a Hopper GPU (a CPU computes the
    same numbers, slower than without), and widths that are multiples of 16. Generation computes in
    bf16."""

    @property
    def batch_invariant(self) -> bool:
        return self.attention == "exact"


class CompileSection(Section):
    """torch.compile, a block at a time. The whole model as one graph does not work: FSDP's gathers
    run a block ahead as asynchronous collectives, which cannot be traced. It also compiles longer
    with every layer (16, aot_eager on a CPU: 15 s; blocks share one graph: 1 s)."""

    enabled: bool | Literal["auto"] = "auto"
    """Compile every transformer block with fullgraph=True. auto: on CUDA. On a CPU yes needs a C++
    compiler."""

    @property
    def is_on(self) -> bool:
        """True if blocks are compiled; ``auto`` must have been resolved (``resolve_run``)."""
        assert self.enabled != "auto"
        return self.enabled


class ActivationSection(Section):
    """What the forward pass keeps for the backward pass."""

    policy: Literal["none", "selective", "full"] = "none"
    """none: keep every activation; selective: recompute each block in the backward pass, except
    what activation.save names; full: recompute all of it (and gather its parameters again)."""
    save: tuple[SavedName, ...] = ("dispatch", "attention", "experts")
    """What selective keeps, with commas between: dispatch (what expert parallel ranks exchange),
    attention (its output), experts (grouped products' pre-activations), linear (dense products)."""
    offload: float | Literal["auto"] = 0.0
    """Share (0 to 1) of what blocks then keep that waits in pinned host memory, as far as it is in
    tensors of 8 MiB or more; it comes back a block ahead. auto: what the link to the host carries
    while blocks compute, at 50 GB/s for 450 TFLOP/s, so that nothing waits; a larger share costs
    time. Selective recomputation leaves less to be sent, and has to be compiled for it; full leaves
    nothing."""

    _split = field_validator("save", mode="before")(split_words)

    @field_validator("offload")
    @classmethod
    def _share(cls, value: float | str) -> float | str:
        if isinstance(value, float) and not 0 <= value <= 1:
            raise ValueError("give auto or a number from 0 to 1")
        return value
