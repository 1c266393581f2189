"""Settings of the smallest run, and what a run does with settings before its first step."""

from __future__ import annotations

from typing import Any

import torch

from moetrain.config import Config
from moetrain.data.loader import build_data
from moetrain.models.transformer import plan_model
from moetrain.rl.setup import Setup
from moetrain.train.session import prepare, resolve_run

UNSET = object()
"""Marker that leaves a setting out."""

TEXT = "some words of text. " * 40
TINY = {
    "model.hidden_size": 16,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.head_dim": 8,
    "model.num_experts": 4,
    "model.moe_intermediate_size": 8,
    "data.source": "synthetic",
    "data.seq_len": 16,
    "train.steps": 1,
    "train.micro_batch_size": 2,
    "train.global_batch_size": 2,
    "train.device": "cpu",
    "compile.enabled": "no",
    "log.tensorboard": "no",
}


def use(settings: dict[str, Any]) -> None:
    """Do everything that a run does before its first step, except for weights."""
    given = {k: v for k, v in settings.items() if v is not UNSET}
    if "model.path" not in given:
        given = {"model.preset": "debug"} | given
    config = Config.load(None, [f"{k}={v}" for k, v in given.items()], environ={})
    if any(name.startswith("rl.") for name in given):
        Setup(*resolve_run(config), "cpu").environment.episode(0).reset()
        return
    config, arch = prepare(config)
    if config.data.source == "synthetic":
        plan_model(config, arch, torch.float32)
    else:
        build_data(config, arch.vocab_size)


def made(settings: dict[str, Any]) -> Config:
    words = [f"{k}={v}" for k, v in settings.items() if v is not UNSET]
    return Config.load("debug", words, environ={})
