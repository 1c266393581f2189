"""Spread one model over a world of ranks, in an order that is the same for every model and layout.

plan -> this rank's stages -> sharded parameters -> hooks that share tokens -> dispatchers ->
values -> recomputation -> offloading -> compile

The model stays single-device math. It is changed in four ways, all of them here: parameters are
DTensors that :class:`~moetrain.parallel.fsdp.fsdp.FSDP` unshards (``model.sharding``); parts get
the hooks that their style in the plan asks for; routed parts get another ``dispatcher``; the model
gets another ``vocabulary``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from moetrain.config import Config
from moetrain.models.architecture import Architecture
from moetrain.models.hf.files import resolve
from moetrain.models.hf.load import load_weights
from moetrain.models.hf.peft import load_peft
from moetrain.models.moe import Dispatcher
from moetrain.models.rules import ADAPTER, PartStyle
from moetrain.models.transformer import Transformer, compile_blocks, compute_dtype, plan_model
from moetrain.parallel.expert.deepep import choose_dispatcher
from moetrain.parallel.expert.dispatch import ExpertParallelDispatcher
from moetrain.parallel.fsdp.fsdp import FSDP
from moetrain.parallel.fsdp.shard import draw_values, shard_model
from moetrain.parallel.offload.activations import offload_activations
from moetrain.parallel.pipeline.stages import Stages
from moetrain.parallel.tensor import ShardedVocabulary, TokenParts
from moetrain.parallel.world import World


def place_model(
    config: Config, arch: Architecture, world: World, stages: Stages
) -> tuple[Transformer, FSDP]:
    """Build this rank's stages of a run's model, with values, ready to train.

    Raises:
        ConfigError: ``model.path`` or ``lora.path`` cannot be loaded.
    """
    dtype = compute_dtype(config, world.device)
    model, _ = plan_model(config, arch, dtype)
    fsdp = _parallelize(model, config, world, stages, dtype)
    draw_values(fsdp, config.model.init_std, config.train.seed, all=config.model.path is None)
    if config.model.path is not None:
        folder = resolve(
            config.model.path, is_downloader=world.is_first_on_machine, barrier=world.barrier
        )
        load_weights(model, folder, fsdp.write)
    if config.lora.path is not None:
        shapes = {n: e.shape for n, e in stages.table.items() if n + ADAPTER[0] in stages.table}
        for name, half in load_peft(config.lora.path, arch, config.lora, shapes):
            fsdp.write(name, (), half)
    model.compute_dtype = dtype
    model.set_recomputation(config.activation)
    if offload := config.activation.offload:
        ranges = stages.plan.ranges
        seq_len = config.data.seq_len
        offload_activations(model, offload, ranges, seq_len, world.device)
    if config.compile.is_on:
        compile_blocks(model)
    return model, fsdp


def _parallelize(
    model: Transformer, config: Config, world: World, stages: Stages, dtype: torch.dtype
) -> FSDP:
    """Cut ``model`` (built on meta), shard it and change its forward; it has no values yet."""
    meshes = world.meshes
    device = world.device
    parallel = config.parallel
    styles = model.arch.plan().styles(model)
    units = stages.cut(model)
    here = {
        name for name, module in model.named_modules() if any(True for _ in module.parameters())
    }
    for name in styles.keys() - here:
        del styles[name]
    fsdp = FSDP(
        parallel.reduce,
        device,
        is_alone=world.size == 1,
        reshard=resharded_blocks(config, world.size, len(units)),
        reduce_last=parallel.reduce_at == "last",
    )
    shard_model(
        model,
        stages.rules,
        units,
        meshes,
        fsdp,
        dtype,
        gradient_dtype=getattr(torch, config.optim.gradient_dtype),
        host_share=config.optim.offload_fraction,
        shared=None if stages.tied_rank is None else model.embed,
    )
    if stages.tied_rank is not None:
        (bucket,) = (b for b in fsdp.buckets if b.members[0].module is model.embed)
        bucket.tied = stages.group, stages.tied_rank
    fsdp.connect(parallel, meshes.everyone)
    model.sharding = fsdp
    if meshes.dims.tp > 1:
        group = meshes.dense.get_group("tp")
        parts = TokenParts.of(group)
        for name, style in styles.items():
            parts.share(model.get_submodule(name), style)
        model.vocabulary = ShardedVocabulary(model.arch.vocab_size, group, config.kernels.backend)
    if meshes.dims.ep > 1:
        experts = meshes.expert_parameters.get_group("ep")
        dispatcher = choose_dispatcher(config, model.arch, experts, device, dtype)
        set_dispatcher(model, styles, dispatcher)
    return fsdp


def resharded_blocks(config: Config, world_size: int, num_blocks: int) -> int:
    """Count the blocks of a rank, its first ones, that free their full parameters between a block's
    forward and its backward.

    By default recomputed blocks do: with one rank a second gather is but a cast. A pipeline comes
    back to a block with every micro-batch, and gathers its parameters once.
    """
    is_staged, wanted = config.parallel.pp > 1, config.parallel.reshard_after_forward
    if wanted and wanted is not True:
        return min(wanted, num_blocks)
    recomputes = {"none": False, "selective": world_size == 1, "full": not is_staged}
    is_widened = config.lora.base_dtype == "float8"  # all blocks at once would be as large as ever
    return num_blocks * bool(wanted or is_widened or recomputes[config.activation.policy])


def set_dispatcher(
    model: Transformer, styles: Mapping[str, PartStyle], dispatcher: Dispatcher
) -> None:
    """Let every routed part of ``model`` send its tokens by ``dispatcher``.

    Raises:
        ValueError: a routed part has no dispatcher to be replaced.
    """
    for name, style in styles.items():
        if style == "routed":
            part: Any = model.get_submodule(name)
            if not hasattr(part, "dispatcher"):
                raise ValueError(f"plan: {name} is routed, and has no dispatcher to be replaced")
            part.dispatcher = dispatcher


def dispatcher_of(model: nn.Module) -> ExpertParallelDispatcher | None:
    """Give the dispatcher that carries tokens between ranks, if there is one."""
    for module in model.modules():
        dispatcher = getattr(module, "dispatcher", None)
        if isinstance(dispatcher, ExpertParallelDispatcher):
            return dispatcher
    return None
