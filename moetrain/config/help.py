"""Descriptions of the values that settings take, for ``--help`` and docs/settings.md."""

from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from moetrain.config.sections import MixEntry
from moetrain.config.sources import is_tuple

_TYPES = {bool: "yes or no", int: "a whole number", float: "a number", str: "text"}


def values_in_words(annotation: Any, quote: str = "") -> str:
    """Describe the values that a setting of this type takes. ``quote`` surrounds named values."""
    if get_origin(annotation) is Annotated:  # a number with bounds
        return values_in_words(get_args(annotation)[0], quote)
    if annotation in _TYPES:
        return _TYPES[annotation]
    if get_origin(annotation) is Literal:
        return ", ".join(f"{quote}{value}{quote}" for value in get_args(annotation))
    if get_origin(annotation) is tuple:
        inner = get_args(annotation)[0]
        if inner is MixEntry:
            return "tables"
        return ("whole numbers" if inner is int else "words") + " with commas between"
    kinds = [values_in_words(x, quote) for x in get_args(annotation) if x is not NoneType]
    return " or ".join(kinds)


def as_typed(value: object) -> str:
    """Return a default as a person types it on the command line."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if is_tuple(value):
        return ",".join(map(str, value)) or "(none)"
    return str(value)
