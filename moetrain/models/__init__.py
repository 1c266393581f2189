"""Models: single-device mathematics that never asks how it is spread over devices."""

from moetrain.models.architecture import Architecture, RopeScaling
from moetrain.models.hf import load_hf, load_weights, save_hf
from moetrain.models.moe import (
    Dispatched,
    Dispatcher,
    LocalDispatcher,
    RoutingStats,
    load_balancing_loss,
    router_z_loss,
    update_router_bias,
)
from moetrain.models.presets import PRESETS, resolve_architecture
from moetrain.models.recompute import set_recomputation
from moetrain.models.registry import build_model, find_family
from moetrain.models.transformer import (
    Inputs,
    Transformer,
    compile_blocks,
    init_weights,
    initial_value,
)

__all__ = [
    "PRESETS",
    "Architecture",
    "Dispatched",
    "Dispatcher",
    "Inputs",
    "LocalDispatcher",
    "RopeScaling",
    "RoutingStats",
    "Transformer",
    "build_model",
    "compile_blocks",
    "find_family",
    "init_weights",
    "initial_value",
    "load_balancing_loss",
    "load_hf",
    "load_weights",
    "resolve_architecture",
    "router_z_loss",
    "save_hf",
    "set_recomputation",
    "update_router_bias",
]
