"""Sections on how a step is computed: ranks, optimizer, experts, kernels, memory, processes.

They change results only by rounding, except for the optimizer and the balancing of experts.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt

from moetrain.config.environment import GpuName
from moetrain.config.sections import Section, checked

SavedName = Literal["dispatch", "attention", "experts", "linear"]
AttentionName = Literal["auto", "sdpa", "cudnn", "exact", "flex", "reference"]
Precision = Literal["bf16", "fp8", "fp8_gradients", "fp8_blocks", "fp8_blocks_ue8m0"]


_PositiveOrRest = Annotated[
    int, checked(lambda n: n == -1 or n > 0, "give a positive number, or -1")
]


class ParallelSection(Section):
    """Degrees of parallelism: dp_replicate * dp_shard * tp * pp * cp is the number of processes."""

    dp_replicate: _PositiveOrRest = 1
    """Replicas of the sharded model (HSDP). -1: if parallel.dp_shard is given, as many as the ranks
    allow; else one for each machine (launch.gpus_per_machine)."""
    dp_shard: _PositiveOrRest = -1
    """Ranks that shard parameters (FSDP); -1: all ranks that the other degrees leave."""
    tp: PositiveInt = 1
    """Tensor parallel ranks."""
    pp: PositiveInt = 1
    """Pipeline ranks. The model's blocks are cut into stages, and each rank holds some of them."""
    pp_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"] = "1f1b"
    """The order in which stages work on micro-batches. gpipe: all forwards first; 1f1b: each
    backward as soon as it can run, for less memory; interleaved_1f1b: the same with several stages
    a rank, for shorter waits; the number of micro-batches must then be a multiple of
    parallel.pp."""
    pp_stages: Literal["auto"] | int = "auto"
    """Stages of each rank: 2 or more with interleaved_1f1b (auto: 2), else 1."""
    pp_split: Annotated[
        tuple[int, ...] | None,
        checked(
            lambda sizes: sizes is None or min(sizes, default=0) > 0,
            "a stage has at least one block; give positive numbers",
        ),
    ] = None
    """Numbers of blocks in each stage in order, separated by commas; the last stage also has the
    head. Unset: a split that gives the slowest rank the least arithmetic."""
    ep: PositiveInt = 1
    """Expert parallel ranks; must divide dp_shard * cp * tp. 1: every rank gathers all experts of a
    block, which was the fastest on four GPUs of one machine (by 4 %). More: tokens travel to the
    ranks of their experts, which takes less memory."""
    cp: PositiveInt = 1
    """Context parallel ranks, which share the tokens of the same rows."""
    cp_method: Literal["auto", "ulysses", "all_gather"] = "auto"
    """The way in which context parallel ranks share attention. ulysses: each rank computes all
    tokens of some heads, so cp * tp must divide the number of query heads, and the number of key
    and value heads must be a multiple or a divisor of cp * tp; all_gather: each rank keeps the
    queries of its tokens and gathers all keys and values; auto: ulysses where the numbers of heads
    allow it. In layers with a recurrent state each rank always computes some heads, so cp * tp must
    divide their number."""
    reshard_after_forward: Annotated[
        bool | int,
        checked(
            lambda n: isinstance(n, bool) or n > 1, "give yes, no, or a number of blocks, 2 or more"
        ),
    ] = False
    """Free a block's gathered parameters after its forward, and gather them again one block ahead
    of its backward. This takes less memory and one more gather. A number N: only the first N blocks
    of a rank do so. The last blocks keep theirs, because their backward comes first. Even with the
    value no, all blocks do so with activation.policy full outside of a pipeline, and with
    lora.base_dtype."""
    reduce_at: Literal["each", "last"] = "each"
    """When gradients are reduced over ranks. each: after every micro-batch, while its backward
    runs; last: once a step. Until then each rank adds up its own gradients in fp32, which takes 4
    bytes for every parameter that it gathers."""
    fsdp_transport: Literal["auto", "nccl", "copy"] = "auto"
    """The transport of FSDP's parameters and gradients; results have the same bits. nccl: torch's
    collectives (gloo on CPUs); copy: copy engines, within one machine; auto: copy between GPUs that
    can access one another's memory, else nccl. Copy engines leave all SMs to computation. They take
    more memory: one bucket of gradients, and 2 bytes for each element that a rank stores in fp32
    and sends in bf16. Parameters that optim.offload_fraction keeps on the host always use
    collectives."""


class OptimSection(Section):
    """The optimizer, and the schedule of its learning rate."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw: AdamW for all parameters; muon: Muon for matrices of blocks, each expert's by itself,
    and AdamW for embedding, head, norms, biases and routers. Both take the same learning rates."""
    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end of the run, as a share of the peak."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """The course of the learning rate after the warmup. cosine: cosine decay; wsd: constant, then a
    linear decay; constant: no decay."""
    warmup_steps: int | None = Field(default=20, ge=0)
    """Steps of linear warmup. Give this or optim.warmup_fraction."""
    warmup_fraction: float | None = Field(default=None, ge=0, lt=1)
    """Share of the steps that warm up. Give this or optim.warmup_steps."""
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """Share of the steps in which the learning rate decays, with optim.schedule wsd."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of AdamW's first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay rate of AdamW's second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Epsilon, which is added to the root of AdamW's second moment and to the norm of Muon's
    matrices."""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """Decay rate of Muon's momentum (Nesterov's), which replaces both moments of AdamW."""
    muon_iterations: int = Field(default=5, ge=1, le=20)
    """Newton-Schulz iterations that orthogonalise a matrix."""
    muon_scale: float = Field(default=0.2, gt=0)
    """Root mean square of Muon's updates at learning rate 1; 0.2 is near that of AdamW's."""
    muon_qk_clip: float = Field(default=0.0, ge=0)
    """The largest attention score that a head may have; weights of its queries and keys are scaled
    down after a step with a larger one (QK-clip). 0: off; Kimi K2 used 100."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices. Norms, biases, embeddings and routers do not decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this global 2-norm."""
    state_dtype: Literal["float32", "bfloat16", "float8"] = "float32"
    """Dtype of AdamW's two moments and of Muon's momentum. bfloat16 takes half the bytes. float8,
    for AdamW alone, stores values of 8 bits with a scale for every 32. Both round stochastically
    (by train.seed). A run keeps the dtype it began with."""
    weight_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which ranks keep trained matrices. With bfloat16, which needs state_dtype float8,
    there is no fp32 master copy: updates are rounded stochastically. A run keeps the dtype it began
    with."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the gradients that a rank keeps until the step. bfloat16 takes 2 bytes a parameter
    instead of 4; sums are made in fp32 and rounded to nearest. With many micro-batches small
    gradients are lost beside the sum, unless parallel.reduce_at is last."""
    offload_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of the trained parameters, in bytes, whose fp32 weights and moments live in host
    memory, where the CPU updates them while the device goes on. For each such parameter the device
    holds the 2 bytes that it computes with, and the host 16: weight, moments and gradient."""

    def warmup(self, total_steps: int) -> int:
        """Return the steps of linear warmup in a run of ``total_steps``."""
        if self.warmup_fraction is None:
            return self.warmup_steps or 0
        return round(self.warmup_fraction * total_steps)


class MoeSection(Section):
    """Routing, balancing and dispatch of MoE layers."""

    dispatcher: Literal["auto", "local", "alltoall", "deepep"] = "auto"
    """The way in which tokens reach their experts. auto: local if parallel.ep is 1, else deepep
    where it runs, else alltoall."""
    deepep_num_sms: Annotated[
        Literal["auto"] | int,
        checked(
            lambda n: n == "auto" or (n > 0 and n % 2 == 0),
            "SMs are used in pairs: give auto or a positive even number",
        ),
    ] = "auto"
    """SMs that DeepEP uses: an even number, or auto for the fastest at the number of ranks."""
    dispatch_mode: Literal["exact", "static"] = "exact"
    """The size of a rank's receive buffers for DeepEP. exact: the number of received tokens, for
    which the host waits once a layer in the forward; static: by moe.static_capacity, without a
    wait."""
    static_capacity: float = Field(default=2.0, ge=1)
    """Rows that moe.dispatch_mode static reserves for a rank's experts, as a multiple of an even
    share. A rank rarely receives more than twice that share. A step that overflows runs again in
    mode exact. If the value is that of parallel.ep, no step can overflow."""
    redundant_experts: int = Field(default=0, ge=0)
    """Slots that each rank has for copies of other ranks' experts. While a layer computes, its
    busiest experts are copied to idle ranks, so that all ranks compute equally many rows. The
    gradients of copies are sent back to their experts, and only the order of sums changes. 4 slots
    are enough for four ranks of 32 experts each, if the busiest rank has 2.4 times the mean load:
    they reached 98 % of the speed of even routing on four H200s. A slot takes up to twice an
    expert's memory in every layer."""
    force_balanced: bool = False
    """Ignore the router's choice and send every expert equally many tokens, for benchmarks."""
    aux_loss_coef: float | None = Field(default=None, ge=0)
    """Weight of the load-balancing loss; unset: router_aux_loss_coef of the preset, or of
    config.json if output_router_logits is true there, else 0. With adapters, and in reinforcement
    learning, unset means 0."""
    aux_loss_layers: Literal["auto", "each", "pooled"] = "auto"
    """The way in which layers share the load-balancing loss. each: the mean of a loss for every
    layer; pooled: one loss for all layers together, as in Hugging Face's models, so that a single
    layer may stay uneven; auto: each for random weights, pooled with model.path."""
    aux_loss_scope: Literal["micro_batch", "global_batch"] = "micro_batch"
    """The tokens whose expert counts the load-balancing loss uses. micro_batch: one micro-batch of
    all ranks, so that the loss depends on how the batch is split; global_batch: the whole step,
    which takes one more forward pass of each micro-batch, unless there is only one."""
    z_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the router z-loss, the mean squared logsumexp of the router's logits."""
    bias_update_rate: float = Field(default=0.0, ge=0)
    """Step by which the selection bias of auxiliary-loss-free balancing (arXiv 2408.15664) moves
    after each optimizer step; 0: the bias of a model that has one stays as it is. With adapters
    (lora.rank) it must be 0, since their files hold no bias."""


class KernelsSection(Section):
    """Implementations and precision of kernels."""

    backend: Literal["auto", "triton", "reference"] = "auto"
    """Implementation of kernels. auto: Triton on CUDA and plain torch elsewhere; triton: an error
    where a kernel cannot run; reference: plain torch."""
    attention: AttentionName = "auto"
    """Implementation of attention. sdpa: torch's own, cuDNN first; cudnn: cuDNN's ragged attention;
    flex: FlexAttention; reference: plain torch; exact: batch-invariant attention. auto: for
    unpacked rows and on a CPU sdpa; for packed rows on CUDA cudnn, if nvidia-cudnn-frontend is
    installed and the GPU is Hopper or newer, else flex; in reinforcement learning exact where it
    runs. Attention with sinks (GPT-OSS) never takes sdpa; on CUDA auto takes flex for heads wider
    than 256 (Gemma-4). With exact (Hopper, bfloat16) a token's forward has the same bits whatever
    it is computed beside, so training computes the log-probabilities that generation reported. Its
    backward is cudnn's, and the compiler does not fuse norms, rotations and SwiGLU."""
    precision: Precision = "bf16"
    """Precision of matrix products. bf16: the compute dtype. fp8: routed experts and dense
    projections multiply e4m3 values with a scale for each row, in the forward and for the gradients
    of their inputs; all else keeps the compute dtype. fp8_gradients: as fp8, and also for the
    gradients of experts' weights (in e4m3) and of the head of next-token losses (in e5m2).
    fp8_blocks: as fp8, with DeepSeek-V3's scales, one for each 128 elements of a row and each
    128 x 128 of a weight, and with the gradients of experts' weights in e4m3; fp8_blocks_ue8m0: the
    same with powers of two as weights' scales, as in DeepSeek-V3.1. All but bf16 need a Hopper GPU
    or later (a CPU computes the same values, slowly) and widths that are multiples of 16 (with
    fp8_blocks, for experts, of 128). Generation computes in bf16."""

    @property
    def batch_invariant(self) -> bool:
        return self.attention == "exact"

    @property
    def without_fp8(self) -> Self:
        """This section with precision bf16, for products that are too narrow for fp8."""
        return self.model_copy(update={"precision": "bf16"})


class CompileSection(Section):
    """torch.compile of one block at a time. The compiler cannot trace FSDP's gathers, which run one
    block ahead, and equal blocks share one graph. 16 layers compile in 1 s; as one graph they would
    take 15 s (aot_eager on a CPU)."""

    enabled: bool | Literal["auto"] = "auto"
    """Compile every transformer block, with fullgraph=True. auto: on CUDA. On a CPU, yes needs a
    C++ compiler."""
    cuda_graphs: bool | Literal["auto"] = False
    """Capture forward, backward and update as CUDA graphs, each of which the host launches at once.
    There is one for each number of micro-batches and each rounded-up number of documents. The bits
    are the same. This speeds up small models, whose steps the host limits. On one GPU it keeps
    memory for gradients and compute copies of weights that would otherwise be freed. auto: if a
    micro-batch takes less than 2 TFLOP a layer, the run fits in half of the GPU's memory, it
    generates nothing, and no other setting prevents it."""

    @property
    def is_on(self) -> bool:
        """True if blocks are compiled. ``resolve_run`` must have resolved ``auto`` before."""
        assert self.enabled != "auto"
        return self.enabled


BlockPolicy = Literal["none", "selective", "full"]
"""The part of a block that its backward computes again: nothing, all but the values that
``activation.save`` names, or everything."""
LESS: Mapping[BlockPolicy, BlockPolicy] = {
    "none": "none",
    "selective": "none",
    "full": "selective",
}
"""The policy of the blocks that ``activation.blocks`` leaves out, by the policy of the others."""


class ActivationSection(Section):
    """Activations that the forward pass keeps for the backward pass."""

    policy: Literal["none", "selective", "full", "auto"] = "none"
    """Recomputation in the backward pass. none: nothing; selective: each block, except what
    activation.save names; full: the whole block, whose parameters are gathered again, except in a
    pipeline. auto: the least that fits by the estimate of memory: none, or selective or full in as
    few blocks as possible (activation.blocks)."""
    blocks: Annotated[
        int | Literal["all"],
        checked(lambda n: n == "all" or n > 0, "give all or a positive number of blocks"),
    ] = "all"
    """Number of blocks that recompute as activation.policy says, the first ones of each pipeline
    rank. The other blocks recompute nothing if the policy is selective, and are selective if it is
    full."""
    save: tuple[SavedName, ...] = ("dispatch", "attention", "experts")
    """The values that selective keeps, separated by commas: dispatch (tokens that expert parallel
    ranks exchange), attention (its output), experts (pre-activations of the grouped products),
    linear (results of dense products)."""

    def of_block(self, place: int) -> BlockPolicy:
        """Return how the block at ``place``, counted from 0 among a rank's blocks, recomputes.

        Raises ValueError: the policy is auto, which the estimate of memory has to resolve first.
        """
        if self.policy == "auto":
            raise ValueError("activation.policy auto is not resolved")
        if self.blocks == "all" or place < self.blocks:
            return self.policy
        return LESS[self.policy]


class LaunchSection(Section):
    """Processes of a run, and the machines that --dry_run plans for."""

    nproc: Annotated[
        int | Literal["auto"],
        checked(lambda n: n == "auto" or n > 0, "give auto or a positive number of processes"),
    ] = 1
    """Processes to start on this machine; auto: one for each GPU, or one on a CPU. Under torchrun
    or srun nothing is started, because this process is one of theirs already."""
    join_timeout: float = Field(default=300.0, gt=0)
    """Seconds within which all processes of a run must have joined."""
    max_restarts: NonNegativeInt = 0
    """Most restarts of a run, each from its newest checkpoint, after one of its processes failed or
    was killed. Under torchrun give torchrun's own option --max-restarts instead."""
    hang_seconds: float = Field(default=0.0, ge=0)
    """Seconds that a step may take. After that the process prints where each thread is and exits,
    and its launcher can start the run again; 0: no limit. A process's first step, evaluations and
    checkpoints on disk have no limit."""
    gpus: int | None = Field(default=None, gt=0)
    """GPUs that --dry_run plans for; unset: those of this run, on this machine or under a launcher,
    or as many as the degrees in parallel multiply to."""
    gpu: GpuName | None = None
    """Kind of GPU that --dry_run plans for; unset: this machine's, or h100 if it has none and
    launch.gpus or train.device asks for GPUs."""
    gpus_per_machine: Annotated[
        int | Literal["auto"],
        checked(lambda n: n == "auto" or n > 0, "give auto or a positive number of GPUs"),
    ] = "auto"
    """GPUs (or processes) that fast links such as NVLink connect; they have consecutive ranks.
    Communication made for such links (parallel.tp, DeepEP, copy engines) stays among them, and a
    token is sent to another machine only once, however many of its experts it goes to. auto: as
    many as this run or its launcher starts on a machine; 8 if that number is not known, or if
    launch.gpus is given."""
