"""Architectures by their fields, and weights for generators of them."""

import torch

from moetrain.models.families import FAMILIES


def make_architecture(*, family, **fields):
    """An architecture in its family's own class."""
    return FAMILIES[family].architecture(family=family, **fields)


@torch.no_grad()
def put_weights(generator, weights):
    """Copy whole ``weights``, pairs with names, of which a rank may have its own experts alone."""
    targets = dict(generator.model.named_parameters()) | dict(generator.model.named_buffers())
    for name, weight in weights:
        target = targets.pop(name)
        if target.shape != weight.shape:
            group = generator.experts.group
            weight = weight.chunk(group.size())[group.rank()]
        target.copy_(weight)
    assert not targets
    generator.weights_changed()
