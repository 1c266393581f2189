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
SparseAttentionName = Literal["auto", "dense", "sparse"]
Precision = Literal["bf16", "fp8", "fp8_gradients", "fp8_blocks", "fp8_blocks_ue8m0"]


_PositiveOrRest = Annotated[
    int, checked(lambda n: n == -1 or n > 0, "give a positive number, or -1")
]


class ParallelSection(Section):
    """Degrees of parallelism. The number of processes is dp_replicate * dp_shard * tp * pp * cp."""

    dp_replicate: _PositiveOrRest = 1
    """Number of replicas of the sharded model (HSDP). -1: as many as the ranks allow if
    parallel.dp_shard is given, else one for each machine (launch.gpus_per_machine)."""
    dp_shard: _PositiveOrRest = -1
    """Number of ranks that shard parameters (FSDP); -1: all ranks that the other degrees leave."""
    tp: PositiveInt = 1
    """Number of tensor parallel ranks."""
    pp: PositiveInt = 1
    """Number of pipeline ranks. The model's blocks are cut into stages, and each rank holds some of
    them."""
    pp_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"] = "1f1b"
    """Order in which stages work on micro-batches. gpipe: all forwards, then all backwards; 1f1b:
    each backward as soon as it can run, which takes less memory; interleaved_1f1b: as 1f1b but with
    several stages on each rank, so that ranks wait less. With interleaved_1f1b the number of
    micro-batches must be a multiple of parallel.pp."""
    pp_stages: Literal["auto"] | int = "auto"
    """Number of stages on each rank: 2 or more with interleaved_1f1b (auto: 2), else 1."""
    pp_split: Annotated[
        tuple[int, ...] | None,
        checked(
            lambda sizes: sizes is None or min(sizes, default=0) > 0,
            "a stage has at least one block; give positive numbers",
        ),
    ] = None
    """Number of blocks in each stage, from the first stage to the last, separated by commas. The
    last stage also has the head. Unset: a split that gives the slowest rank the least
    arithmetic."""
    ep: PositiveInt = 1
    """Number of expert parallel ranks, which must divide dp_shard * cp * tp. 1: every rank gathers
    all experts of a block. This was the fastest choice on four GPUs of one machine (by 4 %). More:
    tokens are sent to the ranks of their experts, which takes less memory."""
    cp: PositiveInt = 1
    """Number of context parallel ranks, which share the tokens of the same rows."""
    cp_method: Literal["auto", "ulysses", "all_gather"] = "auto"
    """Method by which context parallel ranks share attention. ulysses: each rank computes all
    tokens of some heads. So cp * tp must divide the number of query heads, and the number of key
    and value heads must be a multiple or a divisor of cp * tp. all_gather: each rank keeps the
    queries of its tokens, and gathers all keys and values. auto: ulysses if the numbers of heads
    allow it, else all_gather. In layers with a recurrent state each rank always computes some
    heads, so cp * tp must divide their number."""
    reshard_after_forward: Annotated[
        bool | int,
        checked(
            lambda n: isinstance(n, bool) or n > 1, "give yes, no, or a number of blocks, 2 or more"
        ),
    ] = False
    """Free a block's gathered parameters after its forward, and gather them again one block ahead
    of its backward. This takes less memory and one more gather. A number N: only the first N blocks
    of a rank do so. The last blocks keep theirs, because their backward comes first. With the value
    no, some blocks still do so: all blocks with lora.base_dtype, and outside of a pipeline those
    that activation.policy full recomputes."""
    reduce_at: Literal["each", "last"] = "each"
    """Times at which gradients are reduced over ranks. each: after every micro-batch, while its
    backward runs; last: once a step. With last, each rank first sums its own gradients in fp32,
    which takes 4 bytes for every parameter that it gathers."""
    fsdp_transport: Literal["auto", "nccl", "copy"] = "auto"
    """Transport of parameters and gradients in FSDP. All give the same bits. nccl: by torch's
    collectives (gloo on CPUs); copy: by copy engines, within one machine; auto: copy between GPUs
    that can access each other's memory, else nccl. Copy engines leave all SMs to computation, but
    take more memory: one bucket of gradients, and 2 bytes for each element that a rank stores in
    fp32 and sends in bf16. Parameters that optim.offload_fraction keeps on the host are always sent
    by collectives."""


class OptimSection(Section):
    """The optimizer, and the schedule of its learning rate."""

    name: Literal["adamw", "muon"] = "adamw"
    """Optimizer. adamw: AdamW for all parameters; muon: Muon for the matrices of blocks, where each
    expert's matrix is updated by itself, and AdamW for embedding, head, norms, biases and routers.
    Both work with the same learning rates."""
    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end of the run, as a share of the peak, with optim.schedule cosine or
    wsd."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Course of the learning rate after the warmup. cosine: cosine decay; wsd: constant at first,
    then a linear decay; constant: no decay."""
    warmup_steps: int | None = Field(default=20, ge=0)
    """Steps of linear warmup. Give this or optim.warmup_fraction."""
    warmup_fraction: float | None = Field(default=None, ge=0, lt=1)
    """Share of the steps that are linear warmup. Give this or optim.warmup_steps."""
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """Share of the steps, at the end of the run, in which the learning rate decays with
    optim.schedule wsd."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of AdamW's first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay rate of AdamW's second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Small number that is added to the root of AdamW's second moment and to the norm of Muon's
    matrices."""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """Decay rate of Muon's momentum (Nesterov's), which takes the place of AdamW's two moments."""
    muon_iterations: int = Field(default=5, ge=1, le=20)
    """Number of Newton-Schulz iterations that orthogonalise a matrix."""
    muon_scale: float = Field(default=0.2, gt=0)
    """Root mean square of Muon's updates at learning rate 1. With 0.2 it is close to that of
    AdamW's updates."""
    muon_qk_clip: float = Field(default=0.0, ge=0)
    """Largest attention score that a head should reach. After a step with a larger score, the
    weights of the head's queries and keys are scaled down (QK-clip). 0: off. Kimi K2 used 100."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices. Norms, biases, embeddings and routers do not decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Largest global 2-norm of the gradients. Larger gradients are scaled down to it."""
    state_dtype: Literal["float32", "bfloat16", "float8"] = "float32"
    """Dtype of AdamW's two moments and of Muon's momentum. bfloat16 takes half the memory of
    float32. float8, for AdamW alone, stores 8-bit values with a scale for every 32 of them. Both
    round stochastically (seed: train.seed). A run keeps the dtype that it began with."""
    weight_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which ranks keep trained matrices. bfloat16 needs optim.state_dtype float8. There is
    then no fp32 master copy, and updates are rounded stochastically. A run keeps the dtype that it
    began with."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the gradients that a rank keeps until the step. bfloat16 takes 2 bytes for each
    parameter instead of 4. Sums are computed in fp32 and rounded to nearest. With many
    micro-batches, small gradients are lost when they are added to a large sum, unless
    parallel.reduce_at is last."""
    offload_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of the trained parameters, in bytes, whose fp32 weights and moments stay in host
    memory. The CPU updates them while the device goes on. Each such parameter takes 2 bytes on the
    device, for computation, and 16 on the host, for weight, moments and gradient."""

    def warmup(self, total_steps: int) -> int:
        """Return the steps of linear warmup in a run of ``total_steps``."""
        if self.warmup_fraction is None:
            return self.warmup_steps or 0
        return round(self.warmup_fraction * total_steps)


class MoeSection(Section):
    """Routing, balancing and dispatch of MoE layers."""

    dispatcher: Literal["auto", "local", "alltoall", "deepep"] = "auto"
    """Transport of tokens to their experts. auto: local if parallel.ep is 1, else deepep where it
    can run, else alltoall."""
    deepep_num_sms: Annotated[
        Literal["auto"] | int,
        checked(
            lambda n: n == "auto" or (n > 0 and n % 2 == 0),
            "SMs are used in pairs: give auto or a positive even number",
        ),
    ] = "auto"
    """Number of SMs that DeepEP uses, an even number; auto: the fastest choice for the number of
    ranks."""
    dispatch_mode: Literal["exact", "static"] = "exact"
    """Size of a rank's receive buffers for DeepEP. exact: the number of received tokens, for which
    the host waits once in each layer's forward; static: a fixed size (moe.static_capacity), for
    which nothing waits."""
    static_capacity: float = Field(default=2.0, ge=1)
    """Number of rows that moe.dispatch_mode static reserves for a rank's experts, as a multiple of
    an even share. A rank rarely receives more than twice that share. A step that overflows runs
    again in mode exact. If the value equals parallel.ep, no step can overflow."""
    redundant_experts: int = Field(default=0, ge=0)
    """Number of slots on each rank for copies of other ranks' experts. While a layer computes, its
    busiest experts are copied to idle ranks, so that all ranks compute equally many rows. The
    gradients of copies are sent back to their experts, and only the order of sums changes. On four
    H200s with 32 experts each, where the busiest rank had 2.4 times the mean load, 4 slots reached
    98 % of the speed of even routing. A slot takes up to twice an expert's memory in every
    layer."""
    force_balanced: bool = False
    """Ignore the router's choice, and send every expert the same number of tokens. This is for
    benchmarks."""
    aux_loss_coef: float | None = Field(default=None, ge=0)
    """Weight of the load-balancing loss. Unset: router_aux_loss_coef of the preset, or that of
    config.json if output_router_logits is true there, else 0. With adapters and in reinforcement
    learning, unset means 0."""
    aux_loss_layers: Literal["auto", "each", "pooled"] = "auto"
    """Division of the load-balancing loss among layers. each: every layer has a loss, and their
    mean counts; pooled: all layers together have one loss, as in Hugging Face's models, so that a
    single layer may stay uneven; auto: each for random weights, pooled with model.path."""
    aux_loss_scope: Literal["micro_batch", "global_batch"] = "micro_batch"
    """Tokens from which the load-balancing loss counts how often each expert was chosen.
    micro_batch: one micro-batch of all ranks, so that the loss depends on how the batch is split;
    global_batch: all tokens of the step, which takes one more forward pass of each micro-batch,
    unless there is only one."""
    z_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the router z-loss, the mean squared logsumexp of the router's logits."""
    bias_update_rate: float = Field(default=0.0, ge=0)
    """Amount by which the selection bias of auxiliary-loss-free balancing (arXiv 2408.15664)
    changes after each optimizer step; 0: the bias of a model that has one stays as it is. With
    adapters (lora.rank) it must be 0, because their files hold no bias."""


class KernelsSection(Section):
    """Implementation and precision of kernels."""

    backend: Literal["auto", "triton", "reference"] = "auto"
    """Implementation of kernels. auto: Triton on CUDA, plain torch elsewhere; triton: Triton, with
    an error where a kernel cannot run; reference: plain torch."""
    attention: AttentionName = "auto"
    """Implementation of attention. sdpa: torch's own, which tries cuDNN first; cudnn: cuDNN's
    ragged attention; flex: FlexAttention; reference: plain torch; exact: batch-invariant attention.
    auto: sdpa for unpacked rows and on a CPU. For packed rows on CUDA it is cudnn if
    nvidia-cudnn-frontend is installed and the GPU is Hopper or newer, else flex. In reinforcement
    learning it is exact where that can run. Attention with sinks (GPT-OSS) never uses sdpa, and for
    heads wider than 256 (Gemma-4) auto uses flex on CUDA. With exact (Hopper, bfloat16) the forward
    of a token has the same bits whatever else is in its batch, so training computes the
    log-probabilities that generation reported. The backward of exact is cudnn's, and the compiler
    does not fuse norms, rotations and SwiGLU."""
    sparse_attention: SparseAttentionName = "auto"
    """Attention to the keys that an indexer selects (DeepSeek-V3.2, GLM-5), in training and
    evaluation, where rows have more than index_topk tokens. dense: torch's attention over all keys
    of a row, those masked that are not selected; sparse: a kernel over the latents of the selected
    keys, whose results and gradients have the same bits in every run (on a CPU it is plain torch).
    auto: sparse on CUDA if kernels.attention is auto and masked attention would take longer, which
    is in rows of more than 9,409 tokens for DeepSeek-V3.2 and 5,881 for GLM-5; else dense.
    auto is dense, too, with optim.muon_qk_clip, with dropout of an adapter on wkv_b, and for widths
    that the kernel does not take."""
    precision: Precision = "bf16"
    """Precision of matrix products. bf16: the compute dtype. fp8: routed experts and dense
    projections multiply e4m3 values with a scale for each row, in the forward and for the gradients
    of their inputs; everything else keeps the compute dtype. fp8_gradients: as fp8, and also for
    the gradients of experts' weights (in e4m3) and of the head of next-token losses (in e5m2).
    fp8_blocks: as fp8, but with DeepSeek-V3's scales (one for every 128 elements of a row, and one
    for every 128 x 128 block of a weight), and also for the gradients of experts' weights (in
    e4m3). fp8_blocks_ue8m0: as fp8_blocks, with powers of two as the scales of weights, as in
    DeepSeek-V3.1. All but bf16 need a Hopper GPU or newer (a CPU computes the same values, slowly)
    and widths that are multiples of 16 (with fp8_blocks, for experts, of 128). Generation always
    computes in bf16."""

    @property
    def sparse_form(self) -> SparseAttentionName:
        """``sparse_attention``, which is dense instead of auto beside a chosen ``attention``."""
        is_chosen = self.sparse_attention == "auto" and self.attention != "auto"
        return "dense" if is_chosen else self.sparse_attention

    @property
    def batch_invariant(self) -> bool:
        return self.attention == "exact"

    @property
    def without_fp8(self) -> Self:
        """This section with precision bf16, for products that are too narrow for fp8."""
        return self.model_copy(update={"precision": "bf16"})


class CompileSection(Section):
    """torch.compile of one block at a time. The compiler cannot trace FSDP's gathers, which run one
    block ahead. Blocks of the same kind share one graph: 16 layers compile in 1 s, and would take
    15 s as one graph (aot_eager on a CPU)."""

    enabled: bool | Literal["auto"] = "auto"
    """Compile every transformer block, with fullgraph=True. auto: yes on CUDA, else no. On a CPU,
    yes needs a C++ compiler."""
    cuda_graphs: bool | Literal["auto"] = False
    """Capture forward, backward and update as CUDA graphs, each of which the host launches at once.
    There is one graph for each number of micro-batches and each rounded-up number of documents. The
    results have the same bits. Graphs speed up small models, whose steps are limited by the host.
    On one GPU they keep memory for gradients and compute copies of weights that would otherwise be
    freed. auto: yes if a micro-batch takes less than 2 TFLOP in a layer, the run fits in half of
    the GPU's memory, it generates nothing, and no other setting prevents it."""

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
    """Blocks that the backward pass recomputes. none: nothing; selective: each block, except what
    activation.save names; full: the whole block, whose parameters are gathered again, except in a
    pipeline; auto: as little as fits by the estimate of memory, which is none, or selective or full
    in as few blocks as possible (activation.blocks)."""
    blocks: Annotated[
        int | Literal["all"],
        checked(lambda n: n == "all" or n > 0, "give all or a positive number of blocks"),
    ] = "all"
    """Number of blocks of each pipeline rank, counted from its first, to which activation.policy
    applies. The other blocks recompute nothing if the policy is selective, and are selective if it
    is full."""
    save: tuple[SavedName, ...] = ("dispatch", "attention", "experts")
    """Values that selective keeps, separated by commas: dispatch (tokens that expert parallel ranks
    exchange), attention (its output), experts (pre-activations of the grouped products), linear
    (results of dense products)."""

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
    """The processes of a run, and the machines that --dry_run plans for."""

    nproc: Annotated[
        int | Literal["auto"],
        checked(lambda n: n == "auto" or n > 0, "give auto or a positive number of processes"),
    ] = 1
    """Number of processes to start on this machine; auto: one for each GPU, or one on a CPU. Under
    torchrun or srun nothing is started, because the launcher has started the processes already."""
    join_timeout: float = Field(default=300.0, gt=0)
    """Seconds within which all processes of a run must join."""
    max_restarts: NonNegativeInt = 0
    """Largest number of restarts of a run after one of its processes failed or was killed. Each
    restart resumes from the newest checkpoint. Under torchrun use torchrun's own option
    --max-restarts instead."""
    hang_seconds: float = Field(default=0.0, ge=0)
    """Seconds that a step may take; 0: no limit. A process that takes longer prints where each of
    its threads is, and exits. Its launcher can then start the run again. The first step of a
    process, evaluations and checkpoints on disk have no limit."""
    gpus: int | None = Field(default=None, gt=0)
    """Number of GPUs that --dry_run plans for; unset: those of this run, on this machine or under a
    launcher, or as many as the degrees in parallel multiply to."""
    gpu: GpuName | None = None
    """Kind of GPU that --dry_run plans for; unset: this machine's, or h100 if it has none and
    launch.gpus or train.device asks for GPUs."""
    gpus_per_machine: Annotated[
        int | Literal["auto"],
        checked(lambda n: n == "auto" or n > 0, "give auto or a positive number of GPUs"),
    ] = "auto"
    """Number of GPUs (or processes) that fast links such as NVLink connect. They have consecutive
    ranks. Communication that needs such links (parallel.tp, DeepEP, copy engines) stays among them.
    A token is sent to another machine only once, even if several of its experts are there. auto:
    the number that this run or its launcher starts on a machine, or 8 if that is not known or
    launch.gpus is given."""
