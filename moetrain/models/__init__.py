"""Models: single-device mathematics that never asks how it is spread over devices."""

from moetrain.models.architecture import Architecture, RopeScaling
from moetrain.models.hf import attach_peft, load_hf, load_weights, save_hf
from moetrain.models.init import init_weights
from moetrain.models.lora import merge, unmerge
from moetrain.models.moe import (
    Dispatched,
    Dispatcher,
    LocalDispatcher,
    RoutingStats,
    load_balancing_loss,
    router_z_loss,
    update_router_bias,
)
from moetrain.models.planned import compute_dtype, plan_model
from moetrain.models.presets import resolve_architecture
from moetrain.models.recompute import set_recomputation
from moetrain.models.registry import PRESETS, find_family, make_architecture, register
from moetrain.models.transformer import Inputs, Transformer, build_model, compile_blocks

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
    "attach_peft",
    "build_model",
    "compile_blocks",
    "compute_dtype",
    "find_family",
    "init_weights",
    "load_balancing_loss",
    "load_hf",
    "load_weights",
    "make_architecture",
    "merge",
    "plan_model",
    "register",
    "resolve_architecture",
    "router_z_loss",
    "save_hf",
    "set_recomputation",
    "unmerge",
    "update_router_bias",
]
