"""Small files of JSON that are there whole or not at all, whatever the process dies of.

Each has a checksum as its last key, by which a file that was changed since is known; those that
earlier versions wrote have none, and are only looked at for what must be in them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moetrain.checkpoint.format import holds_seal, sealed
from moetrain.config.files import fsync
from moetrain.jobs.requests import BadRequest


class DamagedJob(BadRequest):
    """A file of a job is not what was written; the message names it, and is for the client."""

    def __init__(self, name: str, why: object) -> None:
        super().__init__(f"{name} is damaged: {' '.join(str(why).split())}")


def write_durably(path: Path, value: Mapping[str, Any], **more: str) -> None:
    """Let ``path`` hold ``value``, which is not empty, as JSON, and ``more``, which is JSON
    already: whole and on the disk when this returns.

    Raises:
        OSError: it cannot be written, and ``path`` is as it was.
    """
    text = json.dumps(value, allow_nan=False)
    for key, part in more.items():
        text = f"{text[:-1]}, {json.dumps(key)}: {part}}}"
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.write(sealed(text))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync(path.parent)


def read(folder: Path, name: str, **fields: type | tuple[type, ...]) -> dict[str, Any]:
    """What :func:`write_durably` wrote to ``folder / name``.

    Raises:
        DamagedJob: it cannot be read, is not what was written, or lacks one of ``fields``, of so a
            type; or it is not there.
    """
    try:
        data = (folder / name).read_bytes()
        if holds_seal(data) is False:
            raise ValueError("its checksum differs")
        value = json.loads(data.decode())
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}, not an object")
        for field, kind in fields.items():
            if not isinstance(value.get(field, ...), kind):
                raise ValueError(f"it has no {field}, or one of another type")
    except FileNotFoundError:
        raise DamagedJob(name, "it is not there") from None
    except OSError as error:
        raise DamagedJob(name, f"it cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedJob(name, error) from None
    value.pop("crc32", None)
    return value
