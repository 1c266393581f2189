"""Hugging Face checkpoints in and out: find the files, load them into a model, write them.

Loading streams: one tensor at a time goes from the memory-mapped file into the parameter that
already exists, so the process needs the model's own memory plus one tensor. (Measure that as
anonymous memory, ``RssAnon``: mapped file pages also count as resident, but the kernel drops them
whenever it wants the space.) Every name and shape is checked before the first byte is copied.

Left out on purpose: pickled weights (``.bin`` files run code when they are read), quantized
weights, tokenizers, and process groups: who downloads and how the others wait are arguments.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moetrain.config import ConfigError
from moetrain.models.hf_config import architecture_from_hf, architecture_to_hf, family_of
from moetrain.models.registry import build_model
from moetrain.models.transformer import Transformer
from moetrain.models.weight_map import Piece, Place, all_pieces

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
DEFAULT_SHARD_BYTES = 5 * 10**9
"""What ``transformers`` uses."""
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WritePiece = Callable[[str, Place, torch.Tensor], None]
_METADATA = {"format": "pt"}
"""``transformers`` refuses files that do not say which framework wrote them."""
_OUR_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_IGNORED = re.compile(r".*rotary_emb\.inv_freq")
"""Tensors of old checkpoints that follow from config.json."""

logger = logging.getLogger(__name__)


def resolve(
    path_or_hub_id: str | os.PathLike[str],
    *,
    is_downloader: bool = True,
    barrier: Callable[[], None] | None = None,
) -> Path:
    """The local folder of a checkpoint; a hub id is downloaded unless the cache has all of it.

    Args:
        is_downloader: whether this process may download: one a machine.
        barrier: returns when every process has called it. It is called once in every case, also
            when this process fails, so that no other process is left waiting.

    Raises:
        ConfigError: no such folder or id, or the hub cannot be reached (``HF_HUB_OFFLINE``).
    """
    name = os.fspath(path_or_hub_id)
    try:
        folder = _find_local(name)
        if folder is None and is_downloader:
            folder = _download(name)
    finally:
        if barrier is not None:
            barrier()
    folder = folder or _find_local(name)
    if folder is None:
        raise _error(name, "the process that downloads for this machine has not brought it")
    return folder


def read_checkpoint_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The parsed ``config.json`` of a checkpoint folder; ConfigError if there is none."""
    return _read_json(Path(folder) / CONFIG)


def load_weights(
    model: Transformer, folder: str | os.PathLike[str], write: WritePiece | None = None
) -> None:
    """Copies a checkpoint into the existing parameters of ``model``, in their dtype and device.

    ``write(name, place, tensor)`` puts one file tensor in its place of parameter ``name``; None:
    by :func:`write_piece`. Sharded parameters take what is theirs that way.

    Buffers keep their values. A ``lm_head.weight`` beside tied embeddings is taken if it equals
    the embedding, as it then says nothing new; a different one is an error, as the file
    contradicts itself.

    Raises:
        ConfigError: files missing or damaged; tensors missing, unexpected or of another shape.
    """
    folder = Path(folder)
    parameters = dict(model.named_parameters())
    pieces = {piece.hf_name: piece for piece in _pieces(model, parameters)}
    with ExitStack() as stack:
        files = {}
        for shard in _shards(folder):
            file = stack.enter_context(_open(shard))
            files |= dict.fromkeys(file.keys(), file)
        _drop_redundant_head(files, is_tied=model.arch.tie_embeddings, folder=folder)
        _check_names_and_shapes(files, pieces, parameters, folder)
        with torch.no_grad():
            for name, file in files.items():
                if name in pieces:
                    piece, tensor = pieces[name], file.get_tensor(name)
                    if write is None:
                        write_piece(parameters[piece.parameter], piece.place, tensor)
                    else:
                        write(piece.parameter, piece.place, tensor)


def write_piece(parameter: torch.Tensor, place: Place, tensor: torch.Tensor) -> None:
    """Copies one file tensor to its place in one parameter, converting dtype and device."""
    parameter[place].copy_(tensor)


def read_piece(parameter: torch.Tensor, place: Place) -> torch.Tensor:
    """The file tensor at one place of a parameter, contiguous: the inverse of write_piece."""
    return parameter.detach()[place].contiguous()


def save_weights(
    model: Transformer,
    folder: str | os.PathLike[str],
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Writes ``config.json`` and the weights, in the parameters' dtype, one shard at a time.

    Each file appears whole or not at all. An earlier export's files in ``folder`` are replaced,
    and those that this one does not have are removed at the end.

    Args:
        max_shard_bytes: upper size of a file; a larger single tensor gets a file of its own.

    Raises:
        ValueError: the family's format cannot express the model's architecture.
    """
    folder = Path(folder)
    config = architecture_to_hf(model.arch)
    parameters = dict(model.named_parameters())
    dtype = next(iter(parameters.values())).dtype
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    _warn_about_router_bias(model)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _plan_shards(_pieces(model, parameters), parameters, max_shard_bytes)
    written: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else SINGLE
        tensors = {p.hf_name: read_piece(parameters[p.parameter], p.place) for p in shard}
        _replace(folder / file, lambda temporary, t=tensors: save_file(t, temporary, _METADATA))
        written |= dict.fromkeys(tensors, file)
    keep = set(written.values())
    if len(shards) > 1:
        total = sum(p.numel() * p.element_size() for p in parameters.values())
        index = {"metadata": {"total_size": total}, "weight_map": written}
        _write_json(folder / INDEX, index)
        keep.add(INDEX)
    _write_json(folder / CONFIG, config)
    for path in folder.iterdir():
        if _OUR_FILES.fullmatch(path.name) and path.name not in keep:
            path.unlink()


def load_hf(
    path_or_hub_id: str | os.PathLike[str],
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Transformer:
    """The model of a checkpoint, its weights in ``dtype`` on ``device``.

    ``model(tokens_BS)`` gives logits ``[B, S, V]``. fp32, the default, holds bf16 and fp16
    checkpoints exactly; a narrower ``dtype`` rounds.

    Raises:
        ConfigError: as :func:`resolve`, :func:`architecture_from_hf` and :func:`load_weights`.
    """
    folder = resolve(path_or_hub_id)
    arch = architecture_from_hf(read_checkpoint_config(folder))
    with torch.device("meta"):
        model = build_model(arch)
    model.to(dtype).to_empty(device=device)
    load_weights(model, folder)
    return model


def save_hf(model: Transformer, folder: str | os.PathLike[str]) -> None:
    """Writes ``model`` as a checkpoint that ``transformers`` loads unchanged (no tokenizer)."""
    save_weights(model, folder)


def _error(what: str | os.PathLike[str], problem: str) -> ConfigError:
    return ConfigError("model.path", " ".join(f"{os.fspath(what)}: {problem}".split()))


def _pieces(model: Transformer, parameters: Mapping[str, torch.Tensor]) -> list[Piece]:
    table = family_of(model.arch.family).weight_map
    return all_pieces(table, {name: p.shape for name, p in parameters.items()})


# Finding files.
_DOWNLOADED = ["*.json", "*.safetensors"]


def _find_local(name: str) -> Path | None:
    """The folder, or the hub cache's snapshot if nothing of it is missing; never the network."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    try:
        snapshot = snapshot_download(name, allow_patterns=_DOWNLOADED, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    # An interrupted download, or another tool's, may have left only some of the files.
    return Path(snapshot) if _is_complete(Path(snapshot)) else None


def _download(name: str) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=_DOWNLOADED))
    except HFValidationError:
        raise _error(name, "no such folder, and not a hub id (owner/name)") from None
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise _error(name, f"no such folder, and not available from the hub: {error}") from None


def _is_complete(folder: Path) -> bool:
    try:
        _shards(folder)
    except ConfigError:
        return False
    return (folder / CONFIG).is_file()


def _shards(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint; ConfigError if one is missing."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        raise _error(folder, f"has neither {SINGLE} nor {INDEX} (other formats are not read)")
    weight_map = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise _error(folder / INDEX, "has no weight_map")
    files = sorted({str(file) for file in weight_map.values()})
    absent = [file for file in files if not (folder / file).is_file()]
    if absent:
        raise _error(folder, f"{INDEX} names {_listing(absent)}, absent from the folder")
    return [folder / file for file in files]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise _error(path.parent, f"no {path.name} in it")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _error(path, f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise _error(path, f"holds a {type(value).__name__}, not an object")
    return value


# Reading.
def _open(shard: Path) -> safe_open:
    try:
        return safe_open(shard, framework="pt")
    except SafetensorError as error:
        raise _error(shard, f"damaged or cut short ({error}); fetch it again") from None


def _drop_redundant_head(files: dict[str, safe_open], *, is_tied: bool, folder: Path) -> None:
    """Takes ``lm_head.weight`` out of a tied checkpoint, where it may only repeat the embedding."""
    if not is_tied or HEAD not in files or EMBED not in files:
        return
    if not torch.equal(files[HEAD].get_tensor(HEAD), files[EMBED].get_tensor(EMBED)):
        problem = f"config.json ties the embeddings, but {HEAD} differs from {EMBED}"
        raise _error(folder, f"{problem}; set tie_word_embeddings to false there to keep both")
    del files[HEAD]


def _check_names_and_shapes(
    files: Mapping[str, safe_open],
    pieces: Mapping[str, Piece],
    parameters: Mapping[str, torch.Tensor],
    folder: Path,
) -> None:
    missing = [name for name in pieces if name not in files]
    unexpected = [n for n in files if n not in pieces and not _IGNORED.fullmatch(n)]
    misshapen = []
    for name, piece in pieces.items():
        if name in files:
            got = files[name].get_slice(name).get_shape()
            want = list(parameters[piece.parameter][piece.place].shape)
            if got != want:
                misshapen.append(f"{name} {got}, not {want}")
    problems = [
        f"{what}: {_listing(names)}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", misshapen),
        )
        if names
    ]
    if problems:
        raise _error(folder, f"tensors do not fit config.json; {'; '.join(problems)}")


def _listing(names: Sequence[str], shown: int = 5) -> str:
    """``a, b, c and 7 more``."""
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")


# Writing.
def _plan_shards(
    pieces: Iterable[Piece], parameters: Mapping[str, torch.Tensor], max_shard_bytes: int
) -> list[list[Piece]]:
    """Pieces in order, cut wherever the next one would not fit."""
    shards: list[list[Piece]] = [[]]
    size = 0
    for piece in pieces:
        tensor = parameters[piece.parameter][piece.place]
        num_bytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(piece)
        size += num_bytes
    return shards


def _warn_about_router_bias(model: Transformer) -> None:
    """The selection bias steers routing and has no place in the file: the user must know."""
    lost = [n for n, b in model.named_buffers() if n.endswith("router.bias") and b.any()]
    if lost:
        logger.warning("Hugging Face files cannot hold %s: left out", _listing(lost))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2) + "\n"
    _replace(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Lets ``write`` fill a temporary file beside ``path``, then gives it that name at once."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
