"""What a Hugging Face export holds beside weights: configs, tokenizer, and what the source had.

``config.json`` and ``generation_config.json`` are written anew, since the architecture, the dtype
or the tokenizer may have changed; everything in them that none of these decide stays. Other files
are copies.

Left out on purpose: the weights (:mod:`moetrain.models.hf.save`), and how a run's tokenizer becomes
files (:mod:`moetrain.data.tokenizer_files`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moetrain.models.architecture import Architecture
from moetrain.models.hf.config import exported_config
from moetrain.models.hf.files import (
    CONFIG,
    GENERATION,
    TokenizerFiles,
    copy_file,
    is_tokenizer_file,
    write_json,
    write_text,
)
from moetrain.models.source import HFSource

SideFile = Path | str | Mapping[str, Any]
"""A file to copy, text to write, or an object to write as JSON."""
_EOS = "eos_token_id"


def side_files(
    arch: Architecture,
    source: HFSource | None,
    tokenizer: TokenizerFiles | None,
    dtype: torch.dtype | None,
) -> dict[str, SideFile]:
    """Everything but weights, by name in the export.

    Args:
        tokenizer: replaces that of ``source``, its special tokens' ids too.
        dtype: for config.json; None: what ``source`` says.

    Raises:
        ValueError: the family's format cannot express ``arch``.
    """
    config = exported_config(arch, None if source is None else source.config)
    keys = [key for key in ("torch_dtype", "dtype") if key in config]
    if dtype is not None or not keys:
        name = str(dtype or _most_common(source)).removeprefix("torch.")
        config |= dict.fromkeys(keys or ["torch_dtype"], name)
    generation: dict[str, Any] = dict(source.generation or {}) if source is not None else {}
    files: dict[str, SideFile] = {}
    if source is not None:
        kept = (f for f in source.files if tokenizer is None or not is_tokenizer_file(f))
        files |= {name: source.folder / name for name in kept}
    if tokenizer is not None:
        files |= tokenizer.files
        _set_ids(config, generation, tokenizer, source)
    if generation:
        files[GENERATION] = generation
    return files | {CONFIG: config}


def write_side_files(folder: Path, files: Mapping[str, SideFile]) -> list[str]:
    """Writes them into ``folder``; the names of those that were to be copied and are gone."""
    lost = []
    for name, content in files.items():
        if isinstance(content, Path):
            try:
                copy_file(content, folder / name)
            except FileNotFoundError:
                lost.append(name)
        elif isinstance(content, str):
            write_text(folder / name, content)
        else:
            write_json(folder / name, content)
    return lost


def _most_common(source: HFSource | None) -> torch.dtype:
    assert source is not None  # or there would be a dtype
    dtypes = list(source.dtypes.values())
    return max(set(dtypes), key=dtypes.count)


def _set_ids(
    config: dict[str, Any],
    generation: dict[str, Any],
    tokenizer: TokenizerFiles,
    source: HFSource | None,
) -> None:
    """Puts the tokenizer's special ids in place, unless ``source`` had the same tokenizer.

    Even then the token that ended every document in training must be among those that end a text:
    a chat model's checkpoint often lists more than one.
    """
    ids = tokenizer.ids()
    if source is not None and _is_same_tokenizer(tokenizer, source.folder):
        known = [x for value in (config, generation) for x in _as_list(value.get(_EOS))]
        if ids[_EOS] in known:
            return
        ids = {_EOS: ids[_EOS]}
    config |= ids
    for key, value in ids.items():
        generation.pop(key, None)
        if value is not None:
            generation[key] = value


def _is_same_tokenizer(tokenizer: TokenizerFiles, folder: Path) -> bool:
    ours, theirs = tokenizer.files.get("tokenizer.json"), folder / "tokenizer.json"
    if not isinstance(ours, Path) or not (ours.is_file() and theirs.is_file()):
        return False
    return ours.samefile(theirs) or ours.read_bytes() == theirs.read_bytes()


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]
