"""Adapters as files of PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``.

Routed experts are written in one of two layouts, by what the family's servers load:

    per_expert  ``mlp.experts.3.gate_proj.lora_A.weight`` [r, in], one module an expert; that gate
                and up share A is lost on nobody: it is written twice
    fused       ``mlp.experts.lora_A.weight`` [E * r, in] and ``lora_B`` [out, r * E], of which
                expert e has rows ``e * r`` on of A, and every E-th column of B from e on

Reading takes either, and is strict: tensors that the run has no adapters for, and adapters that the
files have no tensors for, are errors. Nothing else tells that an adapter does nothing.

Left out on purpose: biases, DoRA, and ranks that differ between modules.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moetrain.config import ConfigError, LoraSection
from moetrain.models.architecture import Architecture
from moetrain.models.family import HFFamily
from moetrain.models.hf.files import listing, open_shard, read_json, replace, write_json
from moetrain.models.lora import Adapter, adaptable, add_adapters
from moetrain.models.registry import find_family
from moetrain.models.rules import ADAPTER
from moetrain.models.transformer import Transformer
from moetrain.models.weight_map import Place, all_pieces

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_HALVES = (".lora_A.weight", ".lora_B.weight")
_FUSED = {"w_gate_up": ("base_layer.", "gate_up_proj"), "w_down": ("", "down_proj")}
"""Of a stacked weight: where PEFT nests it, and what transformers calls it."""
_REFUSED = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias")
_FIXED: Mapping[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "inference_mode": True,
    "bias": "none",
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "lora_dropout": 0.0,
    "modules_to_save": None,
    "use_rslora": False,
}


class _Site(NamedTuple):
    """One module of PEFT, and which part of an adapter is its."""

    module: str
    a: Place
    b: Place


def _sites(hf: HFFamily, name: str, shape: torch.Size) -> list[_Site]:
    """Where the adapter of the weight ``name`` lies, one expert a module."""
    return [
        _Site(f"{_PREFIX}{hf_name.removesuffix('.weight')}", place[:1], place)
        for hf_name, _, place in all_pieces(hf.weight_map, {name: shape})
    ]


def _fused_module(name: str) -> str:
    """The module that has the adapters of all experts, for the stacked weight ``name``."""
    _, layer, *_, leaf = name.split(".")
    nested = _FUSED[leaf][0]
    return f"{_PREFIX}model.layers.{layer}.mlp.experts.{nested}".removesuffix(".")


def save_peft(
    folder: str | os.PathLike[str],
    arch: Architecture,
    lora: LoraSection,
    adapters: Iterable[tuple[str, torch.Size, Adapter]],
    base: str | None,
) -> None:
    """Write ``adapters``: names of weights, their shapes, and what is beside them.

    Args:
        base: where the weights that they adapt are from.
    """
    folder, hf = Path(folder), find_family(arch).hf
    layout = hf.lora_layout if lora.layout == "auto" else lora.layout
    tensors: dict[str, torch.Tensor] = {}
    modules: set[str] = set()
    parameters: set[str] = set()
    for name, shape, adapter in adapters:
        a, b = adapter.a, adapter.b
        if len(shape) == 3 and layout == "fused":
            module, rank = _fused_module(name), a.shape[1]
            wide = b.permute(1, 2, 0).reshape(shape[1], rank * shape[0])
            parameters.add(f"mlp.experts.{_FUSED[name.rpartition('.')[2]][1]}")
            tensors |= _written(module, a.flatten(0, 1), wide)
            continue
        for site in _sites(hf, name, shape):
            tensors |= _written(site.module, a[site.a], b[site.b])
            modules.add(site.module.rpartition(".")[2])
    settings = {
        **_FIXED,
        "base_model_name_or_path": base,
        "r": lora.rank,
        # Whatever rank the reader makes of it, the product stays what it is: rs is in it.
        "lora_alpha": lora.scale * lora.rank,
        "target_modules": sorted(modules),
        "target_parameters": sorted(parameters) or None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt"}
    replace(folder / TENSORS, lambda temporary: save_file(tensors, temporary, metadata))
    write_json(folder / SETTINGS, settings)


def _written(module: str, *halves: torch.Tensor) -> dict[str, torch.Tensor]:
    pairs = zip(_HALVES, halves, strict=True)
    return {module + leaf: half.detach().to("cpu", copy=True).contiguous() for leaf, half in pairs}


def load_peft(
    folder: str | os.PathLike[str],
    arch: Architecture,
    lora: LoraSection,
    shapes: Mapping[str, torch.Size],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The halves of the adapters of weights ``shapes``, by name, one after the other.

    ``B`` takes up what the file's scale is more than that of ``lora``.

    Raises:
        ConfigError: other adapters than these, or of other shapes; what is not supported.
    """
    folder, hf = Path(folder).expanduser(), find_family(arch).hf
    rank, scale = _rank_and_scale(folder, read_json(folder / SETTINGS))
    if rank != lora.rank:
        problem = f"{lora.rank}, but lora.path {str(folder)!r} has rank {rank}"
        raise ConfigError("lora.rank", problem)
    with open_shard(folder / TENSORS) as file:
        stored = set(file.keys())
        wanted: set[str] = set()
        found: dict[str, list[_Site] | str] = {}
        for name, shape in shapes.items():
            fused = _fused_module(name) if len(shape) == 3 else ""
            if fused + _HALVES[0] in stored:
                found[name], modules = fused, [fused]
            else:
                sites = found[name] = _sites(hf, name, shape)
                modules = [site.module for site in sites]
            wanted |= {f"{module}{half}" for module in modules for half in _HALVES}
        _check_names(folder, stored, wanted)
        for name, shape in shapes.items():
            where = found[name]
            if isinstance(where, str):
                a, b = _read_fused(file, folder, where, shape, lora.rank)
            else:
                a, b = _read_sites(file, folder, where, shape, lora.rank)
            yield name + ADAPTER[0], a
            yield name + ADAPTER[1], scale / lora.scale * b


def attach_peft(model: Transformer, folder: str | os.PathLike[str]) -> None:
    """Give ``model``, which has its parameters whole, the adapters in ``folder``.

    In the dtype and on the device of the weights; not trained, unless somebody lets them be.

    Raises:
        ConfigError: as :func:`load_peft`, or adapters of what the model has none for.
    """
    folder, hf = Path(folder).expanduser(), find_family(model.arch).hf
    rank, scale = _rank_and_scale(folder, read_json(folder / SETTINGS))
    with open_shard(folder / TENSORS) as file:
        stored = set(file.keys())
    targets: list[str] = []
    shapes: dict[str, torch.Size] = {}
    for name, module in adaptable(model.layers):
        own = {f"{name}.{leaf}": module.get_parameter(leaf).shape for leaf in module.weights}
        sites = {site.module for key, shape in own.items() for site in _sites(hf, key, shape)}
        sites |= {_fused_module(key) for key, shape in own.items() if len(shape) == 3}
        if any(module + _HALVES[0] in stored for module in sites):
            targets.append(name)
            shapes |= own
    alpha = abs(scale) * rank or rank  # a setting is positive; B takes up what it is not
    lora = LoraSection(rank=rank, alpha=alpha, targets=tuple(targets) or ("nothing",))
    halves = list(load_peft(folder, model.arch, lora, shapes))  # before the model is changed
    add_adapters(model.layers, lora)
    with torch.no_grad():
        for name, half in halves:
            model.get_parameter(name).copy_(half)


def _read_fused(
    file: safe_open, folder: Path, module: str, shape: torch.Size, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    experts, out_dim, in_dim = shape
    shapes = (experts * rank, in_dim), (out_dim, rank * experts)
    a, b = (
        _read(file, folder, module + half, wanted)
        for half, wanted in zip(_HALVES, shapes, strict=True)
    )
    return a.view(experts, rank, in_dim), b.view(out_dim, rank, experts).permute(2, 0, 1)


def _read_sites(
    file: safe_open, folder: Path, sites: list[_Site], shape: torch.Size, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    *stack, out_dim, in_dim = shape
    a, b = torch.empty(*stack, rank, in_dim), torch.empty(*stack, out_dim, rank)
    seen: set[Place] = set()
    for site in sites:
        own = _read(file, folder, site.module + _HALVES[0], a[site.a].shape)
        if site.a in seen and not torch.equal(a[site.a], own):
            problem = f"{site.module} has another A than the expert's gate; here they share one"
            raise _error(folder, f"{problem}, so such adapters cannot be read")
        a[site.a] = own
        b[site.b] = _read(file, folder, site.module + _HALVES[1], b[site.b].shape)
        seen.add(site.a)
    return a, b


def _read(file: safe_open, folder: Path, name: str, shape: Sequence[int]) -> torch.Tensor:
    """fp32, of the very shape: a single row would do for any number of them."""
    found = file.get_tensor(name)
    if tuple(found.shape) != tuple(shape):
        problem = f"{name} is {list(found.shape)}, and this model's {list(shape)}"
        raise _error(folder, problem)
    return found.float()


def _rank_and_scale(folder: Path, settings: Mapping[str, Any]) -> tuple[int, float]:
    """Of the file's adapters, and by what they are multiplied."""
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if settings.get("peft_type") != "LORA" or type(rank) is not int or rank < 1:
        raise _error(folder, f"{SETTINGS} is of no LoRA adapter with a rank")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise _error(folder, f"{SETTINGS}: lora_alpha is {alpha!r:.80}, not a number")
    for key in _REFUSED:
        if settings.get(key):
            raise _error(folder, f"{SETTINGS}: {key} is {settings[key]!r:.80}, not supported")
    return rank, alpha / (rank**0.5 if settings.get("use_rslora") else rank)


def _check_names(folder: Path, stored: set[str], wanted: set[str]) -> None:
    problems = {"not in it": sorted(wanted - stored), "of no lora.targets": sorted(stored - wanted)}
    for what, names in problems.items():
        if names:
            raise _error(folder, f"its adapters are not this run's: {what}: {listing(names)}")


def _error(folder: Path, problem: str) -> ConfigError:
    return ConfigError("lora.path", f"{str(folder)!r}: {problem}")
