"""Compares what an older version of moetrain wrote with what this one has."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python


def with_defaults(kind: type[BaseModel], dumped: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``dumped`` with the default of each field of ``kind`` that it does not name.

    A version that did not have a field yet behaved as its default does.

    Args:
        kind: the class of what was dumped.
        dumped: a dump of one, in JSON's types. Fields that this version lacks are kept.
    """
    defaults = {
        name: to_jsonable_python(field.get_default(call_default_factory=True))
        for name, field in kind.model_fields.items()
        if not (field.is_required() or field.exclude)
    }
    return {**defaults, **dumped}
