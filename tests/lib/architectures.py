"""Architectures by their fields, and weights for generators of them."""

import torch

from moetrain.models.families import FAMILIES


def make_architecture(*, family, **fields):
    """Make an architecture of its family's own class."""
    return FAMILIES[family].architecture(family=family, **fields)


TINY_MOE = {
    "family": "qwen3_moe",
    "vocab_size": 40,
    "hidden_size": 16,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "qk_norm": True,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 8,
}


def own_part(experts, weight, target):
    """Return the part of ``weight`` that a rank has in ``target``: all, or its own experts."""
    if weight.shape == target.shape:
        return weight
    dispatcher = experts._dispatcher  # experts.group may have more ranks
    return weight.chunk(dispatcher.num_ranks)[dispatcher.rank]


@torch.no_grad()
def put_weights(generator, weights):
    """Copy whole ``weights`` (pairs of name and tensor); a rank may keep its own experts only."""
    targets = dict(generator.model.named_parameters()) | dict(generator.model.named_buffers())
    for name, weight in weights:
        target = targets.pop(name)
        target.copy_(own_part(generator.experts, weight, target))
    assert not targets
    generator.weights_changed()
