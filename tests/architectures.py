"""Architectures by their fields."""

from moetrain.models.families import FAMILIES


def make_architecture(*, family, **fields):
    """An architecture in its family's own class."""
    return FAMILIES[family].architecture(family=family, **fields)
