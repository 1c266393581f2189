"""JSON bodies as both HTTP servers check them: exact types, known keys, one line of complaint.

Models of bodies derive from :class:`JsonBody`. Lists are marked :data:`FIRST`, so that a hostile
body makes one complaint and not a million, which would take gigabytes.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError, model_validator

from moetrain.config.sources import shortened


class _First(FailFast):
    """Validation of a list stops at the first bad item."""

    # Unions want one, which pydantic's does not have.
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]


FIRST = _First()


class JsonBody(BaseModel):
    """A JSON object of the very types, without unknown keys, infinities or NaNs."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_known_keys(cls, value: Any) -> Any:
        """Complain of one unknown key; pydantic alone would complain of each."""
        is_closed = cls.model_config.get("extra") == "forbid" and isinstance(value, dict)
        if is_closed and (unknown := value.keys() - cls.model_fields.keys()):
            raise ValueError(f"{shortened(min(unknown))} is not supported")
        return value


def complaint(error: ValidationError) -> str:
    """The first of pydantic's complaints as one line: where, what is wrong, and the value."""
    first = error.errors(include_url=False)[0]
    # A key of the client's may be any text.
    name = shortened(".".join(map(str, first["loc"])))[1:-1]
    if first["type"] == "value_error":
        problem = first["msg"].removeprefix("Value error, ")
    else:
        problem = f"{first['msg']}, not {shortened(first['input'])}"
    return f"{name}: {problem}" if name else problem
