"""Spread a model over a world of ranks. The order is the same for every model and layout:

plan -> this rank's stages -> sharded parameters -> hooks that share tokens -> dispatchers ->
values -> recomputation -> compile

The model stays single-device math. It is changed in four ways, all of them here:

1. Parameters become DTensors, which :class:`~moetrain.parallel.fsdp.fsdp.FSDP` unshards
   (``model.sharding``).
2. Parts get the hooks that their style in the plan asks for.
3. Routed parts get another ``dispatcher``.
4. The model gets another ``vocabulary``.

Values are drawn, or copied from a checkpoint's files.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import ceil
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from moetrain.config import Config, Fact, logger
from moetrain.kernels.optim.rounding import BLOCK
from moetrain.models.architecture import Architecture
from moetrain.models.hf.files import resolve
from moetrain.models.hf.load import load_weights
from moetrain.models.hf.peft import load_peft
from moetrain.models.layers import SelectsKeys
from moetrain.models.moe import Dispatcher
from moetrain.models.rules import ADAPTER, ADAPTERS, MAGNITUDE, SCORE, PartStyle, Rule
from moetrain.models.transformer import Transformer, compile_blocks, compute_dtype, plan_model
from moetrain.parallel.context import share_tokens
from moetrain.parallel.expert.deepep import DeepEP, DeepEPInside, StaticSizes, why_not
from moetrain.parallel.expert.dispatch import AllToAll, ExpertParallelDispatcher
from moetrain.parallel.expert.redundant import RedundantExperts
from moetrain.parallel.fsdp.bucket import Bucket, Copies, Member
from moetrain.parallel.fsdp.copies import ReplicaCopies, TiedCopy
from moetrain.parallel.fsdp.fsdp import FSDP
from moetrain.parallel.fsdp.storage.protocol import HostLink, ShardSpec
from moetrain.parallel.fsdp.storage.registry import make_storage
from moetrain.parallel.fsdp.transport.collectives import Collectives
from moetrain.parallel.fsdp.transport.registry import connect
from moetrain.parallel.mesh import ExpertHops, Layout, Sliced
from moetrain.parallel.pipeline.stages import Stages
from moetrain.parallel.tensor import ShardedVocabulary, TokenParts
from moetrain.parallel.world import World
from moetrain.runtime.typed import named_modules, split, vector_norm

_CHECKED_NUMBERS = 2**24
"""Elements of a tensor that a checksum sums at a time."""
_SUM_SQUARES = "sum_squares"
"""The attribute of norms over elements that tensor parallel ranks divide."""


def place_model(
    config: Config, arch: Architecture, world: World, stages: Stages
) -> tuple[Transformer, FSDP, Config]:
    """Build this rank's stages with values. Collective.

    Returns:
        The model, its sharding, and ``config``, in which settings that only a recipe proposed, and
        that the chosen dispatcher does not take, have their defaults again.

    Raises:
        ConfigError: model.path or lora.path does not load, or DeepEP cannot run here and a setting
            of the user's needs it.
    """
    dtype, dispatcher = compute_dtype(config, world.device), None
    if world.meshes.dims.ep > 1:
        meshes = world.meshes
        dispatcher, config = choose_dispatcher(
            config,
            arch,
            meshes.expert_parameters.get_group("ep"),
            world.device,
            dtype,
            meshes.expert_hops,
        )
    model, _ = plan_model(config, arch, dtype)
    model.compute_dtype = dtype
    fsdp = _parallelize(model, config, world, stages, dispatcher)
    draw_values(fsdp, config.model.init_std, config.train.seed, all=config.model.path is None)
    if config.model.path is not None:
        buffers = dict(model.named_buffers())

        def write(name: str, place: tuple[Any, ...], tensor: Sliced) -> None:
            if name in buffers:
                buffers[name][place].copy_(tensor[...])
            else:
                fsdp.write(name, place, tensor)

        load_weights(model, resolve(config.model.path), write)
    if config.lora.use_dora:
        _measure_rows(fsdp)
    if config.lora.path is not None:
        shapes = {n: e.shape for n, e in stages.table.items() if n + ADAPTER[0] in stages.table}
        for name, place, value in load_peft(config.lora.path, arch, config.lora, shapes):
            fsdp.write(name, place, value)
    model.set_recomputation(config.activation, stages.blocks)
    if config.compile.is_on:
        compile_blocks(model)
    return model, fsdp, config


def _parallelize(
    model: Transformer,
    config: Config,
    world: World,
    stages: Stages,
    dispatcher: ExpertParallelDispatcher | None,
) -> FSDP:
    """Cut ``model`` (built on meta), shard it and change its forward. It has no values yet."""
    meshes, device = world.meshes, world.device
    fsdp = FSDP(
        setting=config.parallel,
        device=device,
        world_size=world.size,
        frees=frees_memory(config, world.size),
        reshards=resharded_blocks(config, world.size, len(stages.blocks)),
        num_regions=shared_regions(config, world.size),
    )
    _shard_model(model, config, world, stages, fsdp)
    here = {name for name, module in named_modules(model) if [*module.parameters()]}
    all_styles = model.arch.plan().styles
    styles: dict[str, PartStyle] = {name: all_styles[name] for name in all_styles if name in here}
    fsdp.sessions = connect([*fsdp.buckets], config.parallel, device, fsdp.weights)
    model.sharding = fsdp
    if meshes.dims.tp > 1:
        group = meshes.dense.get_group("tp")
        parts = TokenParts(group)
        for name, style in styles.items():
            parts.share(model.get_submodule(name), style)
        for module in model.modules():
            if hasattr(module, _SUM_SQUARES):
                setattr(module, _SUM_SQUARES, parts.sum)
            if isinstance(module, SelectsKeys):
                module.sum_heads = parts.sum
        model.vocabulary = ShardedVocabulary(
            model.arch.vocab_size,
            group,
            backend=config.kernels.backend,
            softcap=model.arch.logit_softcap,
        )
    if meshes.dims.cp > 1:
        share_tokens(model, meshes.dense.get_group("cp"), meshes.dims.cp_method)
    if dispatcher is not None:
        set_dispatcher(model, styles, dispatcher)
        if (redundant := dispatcher.redundant) is not None:
            redundant.is_late, fsdp.before_reduce = True, redundant.wait
    return fsdp


def frees_memory(config: Config, world_size: int) -> bool:
    """Return True if a rank frees full parameters after their last use, and gradients after a
    step."""
    return world_size == 1 and config.compile.cuda_graphs is not True


def shared_regions(config: Config, world_size: int) -> int:
    """Return how many regions of memory resharded blocks share.

    Where parameters come from other ranks, or experts from the host, two form a double buffer: one
    is filled while the other is used.
    """
    return 1 if world_size == 1 and not config.lora.offload_experts else 2


def resharded_blocks(config: Config, world_size: int, num_blocks: int) -> int:
    """Return how many of a rank's blocks, its first ones, free their full parameters between their
    forward and their backward.

    ``activation.policy`` must be resolved, not auto. By default fully recomputed blocks do, unless
    there is a pipeline: it comes back to a block with every micro-batch, and so gathers the block's
    parameters only once. Selectively recomputed blocks do with one rank, whose second gather is
    only a cast.
    """
    is_staged, wanted = config.parallel.pp > 1, config.parallel.reshard_after_forward
    if wanted and wanted is not True:
        return min(wanted, num_blocks)
    recomputes = {"none": False, "selective": world_size == 1, "full": not is_staged}
    if config.lora.base_dtype != "auto":  # all blocks dequantised at once would save no memory
        return num_blocks
    if config.compile.cuda_graphs is True:  # graphs read parameters at fixed addresses
        return 0
    if wanted:
        return num_blocks
    return sum(recomputes[config.activation.of_block(place)] for place in range(num_blocks))


# ---- dispatchers --------------------------------------------------------------------------------


def choose_dispatcher(
    config: Config,
    arch: Architecture,
    group: dist.ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
    hops: ExpertHops | None = None,
) -> tuple[ExpertParallelDispatcher, Config]:
    """Make the dispatcher that ``moe.dispatcher`` asks for, and log the reason. Collective.

    Args:
        config: the run's settings.
        arch: the model.
        group: the expert parallel ranks.
        device: this rank's device.
        dtype: the compute dtype.
        hops: the groups of ``Meshes.expert_hops``; None: all ranks are on one machine.

    Returns:
        The dispatcher, and ``config``. Where DeepEP cannot run, settings of DeepEP that a recipe
        proposed have their defaults again.

    Raises:
        ConfigError: DeepEP cannot run here, and a setting of the user's needs it.
    """
    moe, kernels = config.moe, config.kernels
    inside, machines = (hops.inside, hops.across.size()) if hops else (group, 1)
    reason = "moe.dispatcher asks for it"
    if moe.dispatcher != "alltoall":
        reason = why_not(
            arch,
            group,
            device,
            dtype,
            precision=kernels.precision,
            spare=moe.redundant_experts,
            inside=inside,
        )
    redundant = None
    if spare := moe.redundant_experts:
        redundant = RedundantExperts(arch.num_experts, spare, group, device, kernels.backend)
    if reason is not None:
        config = config.fitted({Fact.DEEPEP: f"DeepEP cannot run: {reason}"})
        logger.info("tokens reach other ranks by all-to-all: %s", reason)
        dispatcher = AllToAll(
            arch.num_experts,
            group,
            hops=hops,
            backend=kernels.backend,
            precision=kernels.precision,
            redundant=redundant,
        )
        return dispatcher, config
    static = None
    if moe.dispatch_mode == "static":
        # Context and tensor parallel ranks each have a part of a micro-batch's tokens.
        tokens = config.train.micro_batch_size * config.data.seq_len
        static = StaticSizes.plan(
            ceil(tokens / (config.parallel.cp * config.parallel.tp)),
            capacity=moe.static_capacity,
            num_experts=arch.num_experts + moe.redundant_experts * group.size(),
            top_k=arch.num_experts_per_token,
            ranks=group.size(),
        )
    near = DeepEP(
        arch.num_experts // machines,
        inside,
        arch.sent_size,
        num_sms=moe.deepep_num_sms,
        static=static,
        backend=kernels.backend,
        precision=kernels.precision,
        redundant=redundant,
    )
    logger.info(
        "tokens reach other ranks%s by DeepEP on %d SMs, with %s sizes, in %s",
        " of a machine" * (machines > 1),
        near.num_sms,
        moe.dispatch_mode,
        kernels.precision,
    )
    if machines > 1:
        dispatcher = DeepEPInside(
            near,
            arch.num_experts,
            group,
            hops=hops,
            backend=kernels.backend,
            precision=kernels.precision,
            redundant=redundant,
        )
        return dispatcher, config
    return near, config


def set_dispatcher(
    model: Transformer, styles: Mapping[str, PartStyle], dispatcher: Dispatcher
) -> None:
    """Give every routed part of ``model`` the ``dispatcher``."""
    for name, style in styles.items():
        if style == "routed":
            part: Any = model.get_submodule(name)
            assert hasattr(part, "dispatcher"), f"{name} is routed, and has no dispatcher"
            part.dispatcher = dispatcher


def dispatcher_of(model: nn.Module) -> ExpertParallelDispatcher | None:
    """Return the dispatcher that carries tokens between ranks; None: there is none."""
    found = (getattr(module, "dispatcher", None) for module in model.modules())
    return next((x for x in found if isinstance(x, ExpertParallelDispatcher)), None)


# ---- shards -------------------------------------------------------------------------------------


class _Parameter(NamedTuple):
    """One parameter of a unit, before its bucket gives it storage."""

    name: str
    """The parameter's name in the model."""
    module: nn.Module
    """The module that holds it."""
    key: str
    """The parameter's name in that module."""
    layout: Layout
    rule: Rule
    share: float
    """The factor of :attr:`Member.share <moetrain.parallel.fsdp.bucket.Member>`."""
    spare: int
    """The extra rows of ``Member.spare``."""


def _shard_model(
    model: Transformer, config: Config, world: World, stages: Stages, fsdp: FSDP
) -> None:
    """Replace every parameter of this rank's stages of ``model`` (on meta) by a DTensor.

    Experts' matrices are large, and have a bucket each, so that a gather writes the parameter
    itself and no copy follows. Other parameters of a unit, experts' adapters too, share a bucket if
    the same ranks gather them in the same dtype from the same kind of storage.
    """
    # 1. Sort each unit's parameters into buckets.
    units = stages.cut(model)
    names = {id(p): name for name, p in model.named_parameters()}
    found: list[list[list[_Parameter]]] = []  # each unit's buckets, as lists of their parameters
    for modules in units:
        groups: dict[object, list[_Parameter]] = {}
        for owner in (owner for module in modules for owner in module.modules()):
            for key, parameter in owner.named_parameters(recurse=False):
                name = names[id(parameter)]
                rule = stages.rules[name]
                layout = Layout.of(parameter.shape, rule.style, world.meshes)
                is_large = rule.style == "expert" and not name.endswith(ADAPTERS)
                spare = config.moe.redundant_experts if is_large else 0
                if spare:
                    owner.room = spare  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
                alike = name if is_large else layout.group
                groups.setdefault((alike, *rule.of_bucket), []).append(
                    _Parameter(
                        name=name,
                        module=owner,
                        key=key,
                        layout=layout,
                        rule=rule,
                        share=1 / world.meshes.dims.tp if rule.style == "partial" else 1.0,
                        spare=spare,
                    )
                )
        found.append(list(groups.values()))
    # 2. Choose what is offloaded. A tied embedding is not: another rank updates its copy on the
    # device, and the copies would differ, since the host's arithmetic rounds in other places.
    tied = None if stages.tied_rank is None else model.embed
    trained = [g for unit in found for g in unit if g[0].rule.trainable]
    movable = [group for group in trained if all(m.module is not tied for m in group)]
    wanted = config.optim.offload_fraction * sum(_places(group)[-1] for group in trained)
    chosen = _chosen([_places(group)[-1] for group in movable], wanted)
    offloaded, link = {id(movable[i]) for i in chosen}, HostLink(fsdp.device)
    offloaded |= {id(group) for unit in found for group in unit if group[0].rule.is_offloaded}
    # 3. Make the buckets with their storage.
    blocks, members = set(model.layers), dict[str, Member]()
    for modules, unit in zip(units, found, strict=True):
        buckets = list[Bucket]()
        for group in unit:
            copies = list[Copies]()
            if (replicas := group[0].layout.replicas) is not None:
                copies.append(ReplicaCopies(replicas))
            if stages.tied_rank is not None and group[0].module is model.embed:
                copies.append(TiedCopy(stages.group, stages.tied_rank))
            bucket = _make_bucket(
                group, fsdp, config, link, is_offloaded=id(group) in offloaded, copies=copies
            )
            members.update(zip((p.name for p in group), bucket.members, strict=True))
            buckets.append(bucket)
        fsdp.add(buckets, modules, is_block=blocks.issuperset(modules))
    fsdp.members = {name: members[name] for name in names.values()}
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, torch.zeros_like(buffer, device=fsdp.device))


def _chosen(sizes: Sequence[int], wanted: float) -> set[int]:
    """Return indices of ``sizes``, which are in forward order, that sum to about ``wanted``.

    Sizes are taken from the end: the gradients of the last parameters are ready first, and their
    weights are needed last.
    Worked example: of (5, 1, 4), 4.4 takes only the 4, since with the 1 it would be further off.
    """
    chosen: set[int] = set()
    taken = 0
    for i, size in reversed(list(enumerate(sizes))):
        if taken + size / 2 <= wanted:
            chosen.add(i)
            taken += size
    return chosen


def _places(parameters: Sequence[_Parameter]) -> list[int]:
    """Return where parameters begin in their bucket, and the size of all, in elements."""
    # All elements of an update's block, and all that share scales, are of one parameter.
    quant_format = parameters[0].rule.quant_format
    unit = max(BLOCK, quant_format.unit if quant_format else 1)
    blocks = [-(-parameter.layout.padded_numel // unit) * unit for parameter in parameters]
    starts = list(accumulate(blocks[:-1], initial=0))
    return [*starts, starts[-1] + parameters[-1].layout.padded_numel]


def _make_bucket(
    parameters: Sequence[_Parameter],
    fsdp: FSDP,
    config: Config,
    link: HostLink,
    *,
    is_offloaded: bool,
    copies: Sequence[Copies],
) -> Bucket:
    """Make a bucket with its storage, and the parameters that are views of it.

    ``is_offloaded``: the fp32 master, or the quantised weights, are in host memory.
    """
    *starts, size = _places(parameters)
    rule, group = parameters[0].rule, parameters[0].layout.group
    gathered = rule.gather or compute_dtype(config, fsdp.device)
    gradient_dtype = getattr(torch, config.optim.gradient_dtype)
    # If blocks use the shard itself, copies of experts lie right after it.
    is_as_stored = rule.storage == gathered
    is_used = group.size() == 1 and is_as_stored
    spare = is_used * sum(p.spare * p.layout.shape[1:].numel() for p in parameters)
    storage = make_storage(
        ShardSpec(
            rule=rule,
            numel=size,
            dtype=gathered,
            is_offloaded=is_offloaded,
            may_be_read=group.size() > 1 and is_as_stored,
            spare_numel=spare,
            weights=fsdp.weights,
            link=link,
        )
    )
    members = list[Member]()
    for parameter, start in zip(parameters, starts, strict=True):
        layout, trainable = parameter.layout, parameter.rule.trainable
        here = local = layout.piece_of(storage.shard_N, start)
        if storage.source_N is not storage.shard_N:
            here = layout.piece_of(storage.source_N, start)
        value = nn.Parameter(layout.dtensor(here), requires_grad=trainable)
        if trainable:  # otherwise torch only takes a gradient in the parameter's own dtype
            local.grad_dtype = value.grad_dtype = gradient_dtype
        parameter.module.register_parameter(parameter.key, value)
        members.append(
            Member(
                module=parameter.module,
                name=parameter.key,
                parameter=value,
                local=local,
                layout=layout,
                rule=parameter.rule,
                start=start,
                share=parameter.share,
                storage=storage,
                spare=parameter.spare,
            )
        )
    return Bucket(
        members=members,
        storage=storage,
        transport=Collectives(group),
        dtype=gathered,
        gradients=fsdp.gradients,
        gradient_dtype=gradient_dtype,
        copies=copies,
    )


# ---- values -------------------------------------------------------------------------------------


@torch.no_grad()
def draw_values(fsdp: FSDP, std: float, seed: int, *, all: bool = True) -> None:
    """Draw this rank's pieces of the values that :meth:`Transformer.init_weights` draws.

    Without ``all`` it draws only what no language model's checkpoint has: adapters, and a reward
    model's head.
    """
    for name, member in fsdp.members.items():
        if not (all or name.endswith(ADAPTERS) or name == SCORE):
            continue
        layout, rule = member.layout, member.rule
        # Draw on the device, then store: the host's generator differs, and quantised shards cannot
        # be drawn into.
        values = torch.empty(layout.local_shape, dtype=rule.storage, device=fsdp.device)
        rule.draw(values, name, layout.shape, std, seed, layout.box)
        member.write(layout.box, values)


@torch.no_grad()
def _measure_rows(fsdp: FSDP) -> None:
    """Set DoRA's magnitudes to the norms of the matrices' rows, which no adapter changes yet."""
    for name, member in fsdp.members.items():
        if name.endswith(MAGNITUDE):
            matrix = fsdp.members[name.removesuffix(MAGNITUDE)]
            rows = matrix.layout.box[:1]
            member.write(rows, vector_norm(matrix.read().float(), dim=1))


def checksum(member: Member) -> torch.Tensor:
    """Return this rank's share (int64) of the parameter's checksum.

    The checksum is the sum, modulo 2^64, of each row's number times the sum of the row's fp32 bits.
    """
    local, number = member.read(), member.layout.box[0].start + 1
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    if not local.numel():
        return total
    for part in split(local, max(1, _CHECKED_NUMBERS // local[0].numel())):
        bits_RN = part.float().reshape(part.shape[0], -1).view(torch.int32)
        numbers_R = torch.arange(number, number + part.shape[0], device=local.device)
        total += (bits_RN.sum(1, dtype=torch.int64) * numbers_R).sum()
        number += part.shape[0]
    return total
