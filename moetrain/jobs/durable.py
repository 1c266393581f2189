"""Small files of JSON that are there whole or not at all, whatever the process dies of."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moetrain.checkpoint.folder import fsync


def write_durably(path: Path, value: Mapping[str, Any], **more: str) -> None:
    """Let ``path`` hold ``value`` as JSON, and ``more``, which is JSON already: whole and on the
    disk when this returns.

    Raises:
        OSError: it cannot be written, and ``path`` is as it was.
    """
    text = json.dumps(value, allow_nan=False)
    for key, part in more.items():
        text = f"{text[:-1]}, {json.dumps(key)}: {part}}}"
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync(path.parent)


def read(path: Path) -> dict[str, Any]:
    """What :func:`write_durably` wrote."""
    return json.loads(path.read_text("utf-8"))
