"""Spread one model over a world of ranks; the order is the same for every model and layout.

plan -> sharded parameters -> tensor parallel layers -> dispatchers -> gathers around the units ->
values -> recomputation -> compile

What the model is stays single-device math: it gets DTensors for parameters, another dispatcher in
its MoE layers, another vocabulary, hooks around its attention and dense MLPs, and another way to
call a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from moetrain.config import Config, ConfigError
from moetrain.models import (
    Architecture,
    Transformer,
    build_model,
    compile_blocks,
    find_family,
    init_weights,
    initial_value,
    load_weights,
    save_hf,
    set_recomputation,
)
from moetrain.models.hf import ExportDtype, resolve, warn_about_router_bias
from moetrain.models.hf_files import TokenizerFiles
from moetrain.models.moe import MoE
from moetrain.parallel.deepep import DeepEP, choose_transport
from moetrain.parallel.expert import ExpertParallelDispatcher, Transport
from moetrain.parallel.fsdp import FSDP
from moetrain.parallel.mesh import Meshes
from moetrain.parallel.placed import Placed, ShardedModel, WholeModel, check_like
from moetrain.parallel.shard import shard_model
from moetrain.parallel.tensor import TokenParts, gather_after, split_layers
from moetrain.parallel.vocabulary import ShardedVocabulary
from moetrain.parallel.world import World


def parallelize(
    model: Transformer, meshes: Meshes, *, device: torch.device, dtype: torch.dtype, config: Config
) -> FSDP:
    """Shard ``model`` (built on meta) and wire its forward; values are still to come.

    ``dtype``: the compute dtype, in which parameters are gathered.
    """
    plan = find_family(model.arch).plan(model.arch)
    head = [model.norm] if model.lm_head is None else [model.norm, model.lm_head]
    units = [[model.embed], *([block] for block in model.layers), head]
    fsdp = shard_model(
        model, plan, units, meshes, device=device, dtype=dtype, mode=config.parallel.reduce
    )
    if meshes.dims.tp > 1:
        group = meshes.dense.get_group("tp")
        parts = TokenParts.of(group)
        split_layers(model.layers, parts)
        gather_after(model.norm, parts)
        model.vocabulary = ShardedVocabulary(model.arch.vocab_size, group, config.kernels.backend)
    if meshes.dims.ep > 1:
        group = meshes.expert_parameters.get_group("ep")
        transport = choose_transport(config, model.arch, group, device, dtype)
        _send_tokens_by(transport, model, config)
    # Recomputed blocks gather their parameters again by themselves.
    recomputes = config.activation.policy == "full"
    fsdp.reshard = config.parallel.reshard_after_forward and not recomputes
    model.run_block = fsdp.run
    # The embedding and the head stay open until the backward is over: a tied head is the
    # embedding's matrix, and the loss reads the head's outside its module.
    model.embed.register_forward_pre_hook(fsdp.open)
    model.norm.register_forward_pre_hook(fsdp.open)
    return fsdp


def _send_tokens_by(transport: Transport, model: Transformer, config: Config) -> None:
    for module in model.modules():
        if not isinstance(module, MoE):
            continue
        module.dispatcher = ExpertParallelDispatcher(
            model.arch.num_experts, transport, config.kernels.backend
        )


def static_transport(model: nn.Module) -> DeepEP | None:
    """What carries tokens between ranks in buffers of fixed sizes, if anything does."""
    for module in model.modules():
        if isinstance(module, MoE) and isinstance(module.dispatcher, ExpertParallelDispatcher):
            transport = module.dispatcher.transport
            return transport if isinstance(transport, DeepEP) and transport.static else None
    return None


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """What ``train.dtype`` means on ``device``."""
    if config.train.dtype != "auto":
        return getattr(torch, config.train.dtype)
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def place_model(config: Config, arch: Architecture, world: World) -> tuple[Transformer, Placed]:
    """The model of a run on this rank's device, with values, ready to train.

    Raises:
        ConfigError: ``model.path`` cannot be loaded.
    """
    dtype = compute_dtype(config, world.device)
    with torch.device("meta"):
        model = build_model(arch, kernels=config.kernels, moe=config.moe)
    std, seed, path = config.model.init_std, config.train.seed, config.model.path
    if world.meshes is None:
        model.to_empty(device=world.device)
        init_weights(model, std, seed)
        placed, write = WholeModel(model), None
    else:
        fsdp = parallelize(model, world.meshes, device=world.device, dtype=dtype, config=config)
        placed = ShardedModel(model, fsdp)
        draw_values(placed, std, seed)
        write = placed.write
    if path is not None:
        folder = resolve(path, is_downloader=world.is_first_on_machine, barrier=world.wait)
        load_weights(model, folder, write)
    model.compute_dtype = dtype
    set_recomputation(model, config.activation)
    if config.compile.enabled:
        compile_blocks(model)
    return model, placed


@torch.no_grad()
def draw_values(placed: ShardedModel, std: float, seed: int) -> None:
    """The values that :func:`moetrain.models.init_weights` gives on one device, shard by shard."""
    for name, member in placed.members.items():
        whole = initial_value(name, member.parameter.shape, std, seed, member.local.device)
        member.local.copy_(placed.part(name, whole))


@torch.no_grad()
def whole_state(model: nn.Module, placed: Placed, *, keep: bool) -> dict[str, torch.Tensor]:
    """Every parameter and buffer whole, in host memory where ``keep`` is set. Collective."""
    state = {}
    for name, part in placed.parts.items():
        whole = placed.whole(name, part)
        if keep:
            state[name] = whole.detach().to("cpu", copy=True)  # not the live one
    if keep:
        state |= {n: b.to("cpu", copy=True) for n, b in model.named_buffers()}
    return state


@torch.no_grad()
def load_whole_state(model: nn.Module, placed: Placed, state: Mapping[str, torch.Tensor]) -> None:
    """Copy this rank's part of everything in ``state``, the inverse of :func:`whole_state`.

    Raises:
        ConfigError: names other than the model's, or another shape or dtype.
    """
    buffers = dict(model.named_buffers())
    odd = set(state) ^ (set(placed.parts) | set(buffers))
    if odd and all(name.endswith("router.bias") for name in odd):
        raise ConfigError(
            "moe.bias_update_rate",
            f"the checkpoint was trained with{'' if odd & set(state) else 'out'} a selection bias; "
            "set it as it was, or start again with checkpoint.resume never",
        )
    if odd:
        raise ConfigError("checkpoint.resume", f"it is of another model: {sorted(odd)[:3]}")
    for name, shape in {**placed.shapes, **{n: b.shape for n, b in buffers.items()}}.items():
        check_like(name, state[name], shape)
    for name, part in placed.parts.items():
        part.copy_(placed.part(name, state[name]))
    for name, buffer in buffers.items():
        buffer.copy_(state[name])


def save_whole_model(
    model: Transformer,
    placed: Placed,
    folder: Path,
    *,
    write: bool,
    dtype: ExportDtype = "auto",
    tokenizer: TokenizerFiles | None = None,
) -> None:
    """:func:`moetrain.models.save_hf` by the rank that has ``write``. Collective."""
    state = whole_state(model, placed, keep=write)
    if write:
        with torch.device("meta"):
            whole = build_model(model.arch)
        parameters = {name: state[name] for name, _ in whole.named_parameters()}
        whole.load_state_dict(parameters, assign=True)
        whole.source = model.source
        warn_about_router_bias(model)
        save_hf(whole, folder, dtype=dtype, tokenizer=tokenizer)
