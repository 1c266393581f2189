"""Helpers of tests/config/test_needs.py that other tests use too."""

from collections.abc import Container, Iterable

from moetrain.config import Config, needs
from moetrain.config.sources import leaves

DEFAULTS = dict(leaves(Config().model_dump()))


def _named_in(values: Container[object]) -> list[object]:
    """Return the values that a condition of the table names."""
    named = values.excluded if isinstance(values, needs.Other) else values
    assert isinstance(named, Iterable), f"{named!r}: a set, a tuple or an Other of values"
    return sorted(named, key=repr)


_NAMED = [
    value
    for need in needs.NEEDS
    for values in (need.when, *need.requires.values())
    for value in _named_in(values)
]
PROBES = (None, 0, 1, 3, 0.5, True, False, (), ("x",), "x", *_NAMED)
"""Values that every setting of the table is tried with: all that the table names, and others."""


def names_of(need):
    return [name for name in DEFAULTS if need.covers(name)]


NEEDS_OF_ONE = [(need, name) for need in needs.NEEDS for name in names_of(need)]
