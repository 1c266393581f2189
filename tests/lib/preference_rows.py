"""Helpers of tests/train/test_preferences.py that other tests use too."""

import torch

from moetrain.models.rules import ADAPTER
from moetrain.models.transformer import Transformer


def whole(engine, merged=False):
    """Return the engine's model as a plain module with gradients, without adapters or merged."""
    model = Transformer(engine.arch)
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, weight in engine.weights(merged=merged):
            if not name.endswith(ADAPTER):
                own[name].copy_(weight)
    return model
