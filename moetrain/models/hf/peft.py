"""Reads and writes adapters as PEFT's ``adapter_config.json`` and ``adapter_model.safetensors``.

Adapters of routed experts have one of two layouts. They are read in both, and written in the one
that has an effect in PEFT for the family, unless ``lora.layout`` names the other:

    per_expert  ``mlp.experts.3.gate_proj.lora_A.weight`` [r, in]. Each expert has modules of its
                own. Gate and up projection share A, which is written for both.
    fused       ``mlp.experts.lora_A.weight`` [E * r, in] and ``lora_B`` [out, r * E]. Expert e has
                the r rows of A from ``e * r`` on, and the columns e, e + E, e + 2 E, ... of B.

The files may also hold the whole embedding and head (``modules_to_save``), under their own names.
If these are tied, the matrix is written twice, since PEFT would untie them otherwise. Or the files
hold some rows of the embedding and head (``trainable_token_indices``), which PEFT ties by itself:

    model.embed_tokens.token_adapter.trainable_tokens_delta  [N, D], the rows themselves

Reading is strict. A tensor of the file without a weight here is an error, and so is a weight
without its tensors in the file: nothing else would show that an adapter has no effect. An unknown
setting is refused too, unless it is off.

Left out on purpose: all variants but plain LoRA and DoRA, and all that change the base model's
weights besides (biases, PiSSA).

Legend: r rank, E experts, N tokens, D model width.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from pydantic_core import SchemaError, SchemaValidator, core_schema
from safetensors.torch import save_file

from moetrain.config import ConfigError, LoraSection, logger
from moetrain.config.files import write_atomically
from moetrain.models.architecture import Architecture
from moetrain.models.families import FAMILIES
from moetrain.models.hf.files import follow, listing, open_shard, read_json, write_files
from moetrain.models.parts.lora import Adaptable, Adapter, adaptable, add_adapters
from moetrain.models.rules import ADAPTER, MAGNITUDE, SAVED_MODULES, SCORE
from moetrain.models.transformer import Transformer

_SETTINGS = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LENGTHS = ".lora_magnitude_vector"
_HALVES = (".lora_A.weight", ".lora_B.weight")
_FUSED = {
    "w_gate_up": (".base_layer", "gate_up_proj"),
    "w_up": (".base_layer", "up_proj"),
    "w_down": ("", "down_proj"),
}
"""The module in which PEFT nests each stacked weight, and the weight's name in ``transformers``."""
_TAKEN_FOR_EXPERTS = ("gate_proj", "up_proj", "down_proj")
"""Names of modules that PEFT takes for those of routed experts, wherever they are. It does so in
families with ``mlp.experts`` whose experts it renames. In others the layout is ``fused``."""
_TOWERS = r".*\.(vision|visual|audio).*"
"""The pattern of modules beside a language model. They may have names that it has too, and would
get adapters from PEFT."""
_MAX_RANK = 1024
"""The largest rank, that of ``lora.rank`` too."""
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
_READ |= {"target_modules", "target_parameters", "exclude_modules", "layers_to_transform"}
_READ |= {"use_dora", "modules_to_save", "ensure_weight_tying", "trainable_token_indices"}
_ROWS = ".token_adapter.trainable_tokens_delta"
_WITH_NEW_TOKENS = "use its merged model, or train with the same data.new_tokens"
_RESIZED = ("modules_to_save.weight", "original_module.weight", "token_adapter.base_layer.weight")
"""Endings of the names of further tensors. PEFT writes these if the embedding was resized."""
_WITHOUT_EFFECT = {"base_model_name_or_path", "revision", "task_type", "inference_mode"}
_WITHOUT_EFFECT |= {"auto_mapping", "peft_version", "runtime_config", "lora_dropout"}
_WITHOUT_EFFECT |= {"megatron_core", "qalora_group_size"}
# These are options of some values of ``init_lora_weights``. The values that change more than the
# first values of an adapter are refused below.
_WITHOUT_EFFECT |= {"loftq_config", "eva_config", "corda_config", "lora_ga_config"}
_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "layers_pattern": (None, "", [], "layers", ["layers"]),
    # All other values change the base model's weights, both when adapters are made and when they
    # are loaded.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""For settings of ``adapter_config.json``, the values with which adapters are plain LoRA. Any
setting may also be off, that is null or false. One that is in none of these tables must be."""

_Index = tuple[int | slice | None, ...]
_Matches = Callable[[str], bool]
"""Returns True if a name is selected."""


class _Site(NamedTuple):
    """A module of PEFT's model, and the part of one of our adapters that it holds."""

    module: str
    """Its name in the files, with PEFT's prefix."""
    a: _Index
    """The index of its part in our A."""
    b: _Index
    """The index of its part in our B."""
    key: str
    """The name that the settings' patterns match."""
    experts: int | None = None
    """The number of experts whose adapters it holds, stacked; None: it is not a stack."""
    order: torch.Tensor = torch.empty(0)
    """For each row of such an expert's B, the number of the row in our B."""
    has_lengths: bool = False
    """True: the module also has DoRA's magnitude vector."""

    @classmethod
    def of(cls, arch: Architecture, name: str, shape: torch.Size) -> list[_Site]:
        """List the modules that hold the adapter of the weight ``name``, one for each expert.

        The list is empty if the weight is only a part of the weight of PEFT's module.
        """
        family, sites = FAMILIES[arch.family], []
        for piece in family.pieces({name: shape}, arch, family.modules):
            key = piece.hf_name.removesuffix(".weight")
            if piece.is_whole:
                sites.append(cls(_PREFIX + key, a=piece.place[:1], b=piece.place, key=key))
        return sites

    @classmethod
    def fused(cls, arch: Architecture, name: str, shape: torch.Size) -> _Site:
        """Return the module that holds all experts' adapters of the stacked weight ``name``.

        The module has the name that it has if both stacked weights have adapters.
        """
        family, order = FAMILIES[arch.family], torch.arange(shape[1])
        for piece in family.pieces({name: shape}, arch):
            if piece.place[:1] == (0,) and piece.within:
                order[piece.within[1]] = torch.arange(shape[1])[piece.place[1]]
        _, layer, *_, leaf = name.split(".")
        experts = f"{family.language_model}.layers.{layer}.{family.experts}"
        nested, theirs = _FUSED[leaf]
        key = f"{experts}.{theirs}"
        module = _PREFIX + experts + nested
        return cls(module, a=(), b=(), key=key, experts=shape[0], order=order)

    @property
    def tensors(self) -> list[str]:
        """The names of its tensors: A, B and, with DoRA, the magnitude."""
        leaves = (*_HALVES, *((_LENGTHS,) * self.has_lengths))
        return [self.module + leaf for leaf in leaves]

    @property
    def kind(self) -> str:
        """The last part of the module's name, the same for all experts."""
        return self.module.rpartition(".")[2]


def save_peft(
    folder: str | os.PathLike[str],
    arch: Architecture,
    lora: LoraSection,
    adapters: Iterable[tuple[str, torch.Size, Adapter]],
    base: str | None,
    wholes: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Write adapters as PEFT's files.

    Args:
        adapters: the name and shape of each adapted weight, and its adapter.
        base: path or hub id of the model that they adapt.
        wholes: weights that were trained themselves, by name. With ``lora.token_ids`` only these
            rows of the embedding and the head are written.

    Raises ConfigError: the layout cannot hold the adapter of a weight.
    """
    folder = Path(folder)
    family = FAMILIES[arch.family]
    layout = family.lora_layout if lora.layout == "auto" else lora.layout
    is_converted = family.experts == "mlp.experts" and family.lora_layout == "per_expert"
    taken = _TAKEN_FOR_EXPERTS if is_converted else ()
    tensors: dict[str, torch.Tensor] = {}
    modules: set[str] = set()
    parameters: set[str] = set()
    unread: list[str] = []
    for name, shape, adapter in adapters:
        a, b = adapter.a, adapter.b
        if len(shape) == 3 and layout == "fused":
            site = _Site.fused(arch, name, shape)
            wide = b[:, site.order.to(b.device)].permute(1, 2, 0).flatten(1)
            parameters.add(site.key.split(".", 3)[3])
            tensors |= _written(site.module, a.flatten(0, 1), wide)
            continue
        if not (sites := _Site.of(arch, name, shape)):
            raise ConfigError(
                "lora.layout", f"{layout!r} cannot hold adapters of {name}; use fused"
            )
        for site in sites:
            tensors |= _written(site.module, a[site.a], b[site.b])
            if adapter.magnitude is not None:
                tensors[site.module + _LENGTHS] = adapter.magnitude[site.b[:1]].clone()
            modules.add(site.kind)
            if len(shape) == 2 and arch.num_experts and site.kind in taken:
                unread.append(site.key)
    if unread:
        problem = (
            "PEFT 0.21 does not load these adapters, because it takes their names for those of"
        )
        advice = "load them with moetrain, or export the merged model"
        logger.warning("%s: %s routed experts: %s; %s", folder, problem, listing(unread), advice)
    saved: set[str] = set()
    indices: dict[str, list[int]] = {}
    for name, weight in wholes.items():
        weight, sites = weight.detach().cpu(), _vocabulary_sites(arch, name)
        if name != SCORE and (ids := [*lora.token_ids]):
            indices[sites[0].kind] = ids
            tensors[sites[0].module + _ROWS] = weight[ids]
            continue
        for site in sites:
            saved.add(site.kind)
            tensors[f"{site.module}.weight"] = weight.clone()
    excluded = (_TOWERS if family.section else "", family.unadapted)
    settings = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if arch.num_labels else "CAUSAL_LM",
        "inference_mode": True,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "modules_to_save": sorted(saved) or None,
        "ensure_weight_tying": bool(saved) and arch.tie_embeddings,
        "trainable_token_indices": indices or None,
        "use_rslora": False,
        "use_dora": lora.use_dora,
        "base_model_name_or_path": base,
        "r": lora.rank,
        # PEFT divides this by the rank, which gives our scale, also for rank-stabilised LoRA.
        "lora_alpha": lora.scale * lora.rank,
        "target_modules": sorted(modules),
        "exclude_modules": "|".join(filter(None, excluded)) or None,
        "target_parameters": sorted(parameters) or None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt"}
    write_atomically(folder / _TENSORS, lambda temporary: save_file(tensors, temporary, metadata))
    write_files(folder, {_SETTINGS: settings})


def _vocabulary(arch: Architecture) -> dict[str, torch.Size]:
    """Return the shapes of the embedding and, unless it is tied, of the head, by our names.

    A reward model's head (``score``) takes the place of the language model's.
    """
    shape = torch.Size((arch.vocab_size, arch.hidden_size))
    shapes = dict.fromkeys(SAVED_MODULES.values(), shape)
    if arch.tie_embeddings or arch.num_labels:
        del shapes[SAVED_MODULES["lm_head"]]
    return shapes | ({SCORE: torch.Size((1, arch.hidden_size))} if arch.num_labels else {})


def _vocabulary_sites(arch: Architecture, name: str) -> list[_Site]:
    """List the modules of PEFT's model that have the matrix ``name``, the embedding or the head.

    If these are tied, both modules have it.
    """
    sites = _Site.of(arch, name, _vocabulary(arch)[name])
    if arch.tie_embeddings:
        sites.append(sites[0]._replace(module=f"{_PREFIX}lm_head", key="lm_head"))
    return sites


def _written(module: str, *halves: torch.Tensor) -> dict[str, torch.Tensor]:
    pairs = zip(_HALVES, halves, strict=True)
    return {module + leaf: half.detach().to("cpu", copy=True).contiguous() for leaf, half in pairs}


def load_peft(
    folder: str | os.PathLike[str],
    arch: Architecture,
    lora: LoraSection,
    shapes: Mapping[str, torch.Size],
) -> Iterator[tuple[str, tuple[slice, ...], torch.Tensor]]:
    """Yield the values of a file: the name of each parameter, the index in it, and the value.

    The parameters are the adapters of the weights ``shapes``, the weights or rows that
    ``lora.modules_to_save`` and ``lora.trainable_tokens`` name, and a reward model's head. ``B`` is
    multiplied by the ratio of the file's scale to that of ``lora``.

    Raises ConfigError: the files hold other adapters or other shapes, or settings that are not
    supported.
    """
    files = _AdapterFiles(folder, arch)
    if files.settings.has_lengths != lora.use_dora:
        ours, theirs = ("yes" if x else "no" for x in (lora.use_dora, files.settings.has_lengths))
        problem = f"{ours}, but lora.path {str(folder)!r} was trained with {theirs}; set {theirs}"
        raise ConfigError("lora.use_dora", problem)
    sites = files.matched(shapes, "of no lora.targets", is_partial=False)
    if arch.num_labels and SCORE not in files.saved:
        problem = f"{_TENSORS} has no {SCORE}, the head of a reward model"
        raise _error(files.folder, f"{problem}; merge it into its base, and set model.path to that")
    wanted = {SAVED_MODULES[module] for module in lora.modules_to_save}
    wanted |= {SCORE} & files.saved.keys()
    if odd := sorted(wanted ^ files.saved.keys()):
        has = "holds" if odd[0] in files.saved else "does not hold"
        names = ",".join(module for module, own in SAVED_MODULES.items() if own in files.saved)
        remedy = f"set {names}" if names else "unset it"
        problem = f"lora.path {str(folder)!r} {has} a whole {odd[0]}; {remedy}"
        raise ConfigError("lora.modules_to_save", problem)
    own = [name for name in SAVED_MODULES.values() if name in files.own]
    rows = dict.fromkeys(own, lora.token_ids) if lora.token_ids else {}
    if {name: tuple(sorted(tokens)) for name, tokens in files.rows.items()} != rows:
        problem = f"lora.path {str(folder)!r} holds rows of other tokens: {files.rows or 'none'}"
        raise ConfigError("lora.trainable_tokens", f"{problem:.300}; name the same tokens")
    yield from files.values()
    for name, shape in shapes.items():
        a, b = files.read(sites[name], shape)
        if a.shape[-2] != lora.rank:
            problem = f"{lora.rank}, but lora.path {str(folder)!r} has rank {a.shape[-2]} at {name}"
            raise ConfigError("lora.rank", f"{problem}; set {a.shape[-2]}")
        yield name + ADAPTER[0], (), a
        yield name + ADAPTER[1], (), b / lora.scale
        for place, lengths in files.lengths(sites[name]):
            yield name + MAGNITUDE, place, lengths


def attach_peft(model: Transformer, folder: str | os.PathLike[str]) -> None:
    """Add the adapters in ``folder`` to ``model``, which must not be sharded.

    If the folder also holds weights or rows that were trained themselves, they replace the model's.
    Adapters get the dtype and the device of the weights.

    Raises ConfigError: the files are not supported, do not fit the model, or hold no adapters; or
    an adapter is for a module that cannot have one.
    """
    files = _AdapterFiles(folder, model.arch)
    modules = dict(_adaptable(model))
    shapes = _shapes(modules)
    sites = files.sites(shapes)
    halves = {name: files.read(own, shapes[name]) for name, own in sites.items()}
    values = list(files.values())
    # Everything is read and checked before the model is changed. All weights get the largest rank
    # in the file, rounded up to a multiple of 8 for the experts' kernels. Adapters of a smaller
    # rank are filled up with zeros.
    rank = -(-max(a.shape[-2] for a, _ in halves.values()) // 8) * 8
    if rank > _MAX_RANK:
        raise _error(files.folder, f"it needs rank {rank}, but at most {_MAX_RANK} is supported")
    adapted = dict.fromkeys(name.rpartition(".")[0] for name in halves)
    lengths = {name: list(files.lengths(own)) for name, own in sites.items()}
    settings = LoraSection(
        rank=rank, alpha=rank, targets=tuple(adapted), use_dora=files.settings.has_lengths
    )
    add_adapters(model.layers, settings)
    with torch.no_grad():
        for name, place, value in values:
            model.get_parameter(name)[place] = value.to(model.get_parameter(name))
        for name in (f"{module}.{leaf}" for module in adapted for leaf in modules[module].weights):
            halves_here = [model.get_parameter(name + half).zero_() for half in ADAPTER]
            for half, value in zip(halves_here, halves.get(name, ()), strict=False):
                half[..., : value.shape[-2], : value.shape[-1]] = value
            if files.settings.has_lengths:
                own = model.get_parameter(name + MAGNITUDE)
                own.copy_(model.get_parameter(name).float().norm(dim=1))
                for place, value in lengths.get(name, ()):
                    own[place] = value.to(own)


def merge_peft(
    model: Transformer, folder: str | os.PathLike[str]
) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Return a function that merges the adapters in ``folder`` into a weight of ``model``.

    The function takes the weight's name and value, in fp32 or wider, and may change the value in
    place. It adds ``scale * (B @ A)`` module by module, as PEFT's ``merge_and_unload`` does in
    fp32, or returns a weight that was trained itself. Other weights are returned as they are. The
    files are read when the function is called, one weight at a time.

    Args:
        model: names the weights; its values are not read.

    Raises ConfigError: as :func:`attach_peft`.
    """
    files = _AdapterFiles(folder, model.arch)
    sites = files.sites(_shapes(dict(_adaptable(model))))
    for _ in files.values():  # checks them before anything is written
        pass

    def merge(name: str, weight: torch.Tensor) -> torch.Tensor:
        for site in sites.get(name, ()):
            weight[site.b] = files.adapter(site, weight.shape).merged(weight[site.b])
        if name in files.saved or name in files.rows:
            for own, place, value in files.values():
                if own == name:
                    weight[place] = value.to(weight)
        return weight

    return merge


def num_rows(folder: str | os.PathLike[str], tokens: int) -> int:
    """Return the number of tokens that a model needs for the adapters in ``folder``; 0: any.

    ``tokens``: those of the tokenizer beside the adapters. They count if the adapters hold rows of
    the embedding or of the head.

    Raises ConfigError: the settings cannot be read.
    """
    settings = read_json(Path(folder) / _SETTINGS, "lora.path")
    has_rows = settings.get("modules_to_save") or settings.get("trainable_token_indices")
    return tokens if has_rows else 0


def _adaptable(model: Transformer) -> Iterator[tuple[str, Adaptable]]:
    """Iterate over the modules for which PEFT's files can hold adapters."""
    return adaptable(model.layers[: model.arch.num_layers])  # PEFT knows no others


def _shapes(modules: Mapping[str, Adaptable]) -> dict[str, torch.Size]:
    """Return the shapes of the weights of ``modules`` by their names."""
    return {
        f"{name}.{leaf}": module.get_parameter(leaf).shape
        for name, module in modules.items()
        for leaf in module.weights
    }


class _AdapterFiles:
    def __init__(self, folder: str | os.PathLike[str], arch: Architecture) -> None:
        self.folder, self.arch = Path(folder).expanduser(), arch
        self.settings = _Settings(self.folder, read_json(self.folder / _SETTINGS))
        self.file = open_shard(follow(self.folder / _TENSORS, self.folder))
        self.own = {name: _vocabulary_sites(arch, name) for name in _vocabulary(arch)}
        """PEFT's modules that have the embedding and the head, by the weights' names."""
        self.saved = self._find_saved()
        """Names of the tensors that hold whole trained weights, by the weights' names."""
        self.rows = self._find_rows()
        """The tokens whose rows were trained, by the weights' names."""

    def _find_saved(self) -> dict[str, list[str]]:
        stored, found = set(self.file.keys()), dict[str, list[str]]()
        if not self.arch.num_labels and f"{_PREFIX}{SCORE}" in stored:
            problem = f"{_TENSORS} has {SCORE}, a reward model's head, but this is a language model"
            raise _error(
                self.folder, f"{problem}; set train.objective reward, or score texts by it"
            )
        # PEFT also names a module "classifier", which these models do not have.
        known = {"classifier"} if self.arch.num_labels else set[str]()
        for name, sites in self.own.items():
            tensors = [f"{site.module}.weight" for site in sites]
            known |= {x for site in sites for x in (site.kind, site.key)}
            if own := [tensor for tensor in tensors if tensor in stored]:
                found[name] = own
                if len(own) < len(tensors) and not self.settings.ties:
                    problem = f"has {own[0]} alone, where this model's head is its embedding"
                    raise _error(self.folder, f"{_TENSORS} {problem}; merge it with PEFT")
        self.settings.check_saved(known)
        return found

    def _find_rows(self) -> dict[str, tuple[int, ...]]:
        """Read ``trainable_token_indices``: tokens of the embedding, or a list for each module."""
        indices, found = self.settings.values.get("trainable_token_indices"), {}
        if isinstance(indices, list):
            indices = {self.own["embed.weight"][0].kind: indices}
        if not isinstance(indices, dict | None):
            raise self.settings.bad("trainable_token_indices", "not tokens, nor tokens by module")
        for key, tokens in (indices or {}).items():
            names = [n for n, own in self.own.items() if any(key in (x.kind, x.key) for x in own)]
            is_list = isinstance(tokens, list) and all(type(i) is int and i >= 0 for i in tokens)
            if not (names and is_list):
                raise self.settings.bad("trainable_token_indices", "not tokens of this model")
            if any(i >= (count := self.arch.vocab_size) for i in tokens):
                problem = (
                    f"but this model has {count} tokens: the adapter was trained with new tokens"
                )
                raise self.settings.bad("trainable_token_indices", f"{problem}; {_WITH_NEW_TOKENS}")
            found[names[0]] = tuple(tokens)
        return found

    def values(self) -> Iterator[tuple[str, tuple[slice, ...], torch.Tensor]]:
        """Yield the weights and rows that were trained themselves: name, index and value.

        Raises ConfigError: a tensor has another shape than the model's, or the two tensors of a
        tied weight differ.
        """
        for name, tokens in self.rows.items():
            tensor = self.own[name][0].module + _ROWS
            wanted = [len(tokens), self.arch.hidden_size]
            if (found := list(self.file.get_slice(tensor).get_shape())) != wanted:
                raise _error(self.folder, f"{tensor} has shape {found}, not {wanted}")
            for token, row_D in zip(tokens, self.file.get_tensor(tensor), strict=True):
                yield name, (slice(token, token + 1),), row_D[None]
        for name, tensors in self.saved.items():
            wanted = [*_vocabulary(self.arch)[name]]
            for tensor in tensors:
                if (found := list(self.file.get_slice(tensor).get_shape())) != wanted:
                    problem = f"{tensor} has shape {found}, but this model needs {wanted}"
                    if found[1:] == wanted[1:] and found[0] > wanted[0]:
                        problem += f": the adapter was trained with new tokens; {_WITH_NEW_TOKENS}"
                    raise _error(self.folder, problem)
            first, *others = map(self.file.get_tensor, tensors)
            if any(not torch.equal(first, other) for other in others):
                problem = f"{' and '.join(tensors)} differ, but this model ties them"
                raise _error(self.folder, f"{problem}; merge it with PEFT")
            yield name, (), first

    def _sites(self, name: str, shape: torch.Size) -> list[_Site]:
        """List the modules of the weight ``name`` that the settings target."""
        if len(shape) == 3:
            site = _Site.fused(self.arch, name, shape)
            outer = site.key.rpartition(".")[0]
            keys = [f"{outer}.{theirs}" for _, theirs in _FUSED.values()]
            targeted = [key for key in keys if self.settings.is_parameter(key)]
            if site.key in targeted:
                is_nested = len(targeted) == 2
                return [site if is_nested else site._replace(module=_PREFIX + outer)]
        sites = []
        for site in _Site.of(self.arch, name, shape):
            if self.settings.is_parameter(weight := f"{site.key}.weight"):
                sites.append(site._replace(key=weight))
            elif self.settings.is_module(site.key):
                sites.append(site)
        return [site._replace(has_lengths=self.settings.has_lengths) for site in sites]

    def matched(
        self, shapes: Mapping[str, torch.Size], others: str, *, is_partial: bool
    ) -> dict[str, list[_Site]]:
        """Return, for each weight that has an adapter in the file, the sites of the adapter.

        Args:
            shapes: the weights that may have adapters.
            others: describes tensors without a site, for the error.
            is_partial: True: the file may lack all tensors of a weight, or of one kind of its
                modules, such as the experts' gates. Settings often target more modules than have
                adapters, such as those of every layer.

        Raises ConfigError: a site's tensors are missing, or tensors have no site.
        """
        stored, found = set(self.file.keys()), dict[str, list[_Site]]()
        wanted: dict[str, None] = {}  # in order
        for name, shape in shapes.items():
            own = self._sites(name, shape)
            kinds = {site.kind for site in own if not stored.isdisjoint(site.tensors)}
            found[name] = [site for site in own if site.kind in kinds or not is_partial]
            names = [tensor for site in found[name] for tensor in site.tensors]
            wanted |= dict.fromkeys(names if own or is_partial else [name])
        saved = {tensor for tensors in self.saved.values() for tensor in tensors}
        rows = {self.own[name][0].module + _ROWS for name in self.rows}
        wanted |= dict.fromkeys(sorted(rows))
        problems = {
            "not in it": [tensor for tensor in wanted if tensor not in stored],
            f"not targeted by its {_SETTINGS}, or {others}": sorted(stored - wanted.keys() - saved),
        }
        for what, names in problems.items():
            if names:
                problem = f"its adapters are not those of this run; {what}: {listing(names)}"
                if any(name.endswith(_RESIZED) for name in names):
                    problem += "; save it in PEFT with save_embedding_layers=False, or merge it"
                raise _error(self.folder, problem)
        return {name: own for name, own in found.items() if own}

    def sites(self, shapes: Mapping[str, torch.Size]) -> dict[str, list[_Site]]:
        """Return the sites of the weights ``shapes`` that have adapters in the file.

        Raises ConfigError: there are none, or one has no counterpart in ``shapes``.
        """
        found = self.matched(shapes, "of modules that have none here", is_partial=True)
        if not found:
            raise _error(self.folder, f"{_TENSORS} holds no adapters")
        return found

    def read(self, sites: Sequence[_Site], shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
        """Read A [..., rank, in] and scale * B [..., out, rank] of a weight, in fp32.

        If the modules that make up the weight have different A, these are stacked. Each module's B
        then has zeros in the columns of the other A:
        [B_gate 0; 0 B_up] @ [A_gate; A_up] = [B_gate A_gate; B_up A_up].
        """
        *stack, out_dim, in_dim = shape
        rows: dict[_Index, list[torch.Tensor]] = defaultdict(list)
        columns: list[tuple[_Index, int, torch.Tensor]] = []
        for site in sites:
            adapter = self.adapter(site, shape)
            own_a, own_b = adapter.a, adapter.scale * adapter.b
            first = 0
            for other in rows[site.a]:
                if torch.equal(other, own_a):  # an expert's gate and up projection share it
                    break
                first += other.shape[-2]
            else:
                rows[site.a].append(own_a)
            columns.append((site.b, first, own_b))
        rank = max(sum(a.shape[-2] for a in own) for own in rows.values())
        a = torch.zeros(*stack, rank, in_dim)
        b = torch.zeros(*stack, out_dim, rank)
        for place, own in rows.items():
            whole = torch.cat(own, -2)
            a[place][..., : whole.shape[-2], :] = whole
        for place, first, own_b in columns:
            b[place][..., first : first + own_b.shape[-1]] = own_b
        return a, b

    def lengths(self, sites: Sequence[_Site]) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
        """Yield DoRA's magnitudes of ``sites``, each with its index in the weight's magnitude."""
        for site in sites:
            if (lengths := self._lengths(site)) is not None:
                yield site.b[:1], lengths

    def _lengths(self, site: _Site) -> torch.Tensor | None:
        """Read the magnitudes of one module; None: it has none."""
        if not site.has_lengths:
            return None
        _, b, name = site.tensors
        found, rows = (list(self.file.get_slice(x).get_shape()) for x in (name, b))
        if found != rows[:1]:
            raise _error(self.folder, f"{name} has shape {found}, not {rows[:1]}")
        return self.file.get_tensor(name).float()

    def adapter(self, site: _Site, shape: torch.Size) -> Adapter:
        """Read the adapter of one module, in fp32; ``shape`` is that of the whole weight."""
        rank, scale = self.settings.rank_and_scale(site.key)
        out_dim, in_dim = torch.empty(shape, device="meta")[site.b].shape[-2:]
        wide = rank * (site.experts or 1)
        shapes = (wide, in_dim), (out_dim, wide)
        halves = site.tensors[:2]
        for name, wanted in zip(halves, shapes, strict=True):
            found = tuple(self.file.get_slice(name).get_shape())
            if found != wanted:  # a single row would broadcast to any number
                problem = f"{name} has shape {[*found]}, but this model needs {[*wanted]}"
                raise _error(self.folder, problem)
        a, b = (self.file.get_tensor(name).float() for name in halves)
        if site.experts is not None:
            a = a.view(site.experts, rank, in_dim)
            b = b.view(out_dim, rank, site.experts).permute(2, 0, 1)[:, torch.argsort(site.order)]
        return Adapter(a, b, scale, magnitude=self._lengths(site))


class _Settings:
    """The settings of ``adapter_config.json``, interpreted by PEFT's rules.

    Raises ConfigError unless they describe plain LoRA or DoRA. The embedding and the head may have
    been trained besides.
    """

    def __init__(self, folder: Path, values: Mapping[str, Any]) -> None:
        self.folder = folder
        self.values = values
        if values.get("peft_type") != "LORA":
            raise self.bad("peft_type", "but only LORA is supported")
        for key in sorted(values.keys() - _READ - _WITHOUT_EFFECT):
            if values[key] not in (None, False, *_ALLOWED.get(key, ())):
                raise self.bad(key, "not supported; merge the adapter into its base with PEFT")
        layers = values.get("layers_to_transform")
        self._layers = {*map(str, layers if isinstance(layers, list) else [layers])} - {"None"}
        self._targeted = self._names("target_modules")
        self._excluded = self._names("exclude_modules")
        self.is_parameter = self._names("target_parameters")
        self.has_lengths = values.get("use_dora") is True
        if values.get("use_dora") not in (None, False, True):
            raise self.bad("use_dora", "not true or false")
        if self.has_lengths and values.get("target_parameters"):
            raise self.bad("target_parameters", "which is not supported with use_dora")
        largest = torch.finfo(torch.float32).max
        self._ranks = self._by_pattern(
            "rank_pattern",
            default="r",
            is_good=lambda x: type(x) is int and 1 <= x <= _MAX_RANK,
            wanted=f"a rank to {_MAX_RANK}",
        )
        self._alphas = self._by_pattern(
            "alpha_pattern",
            default="lora_alpha",
            is_good=lambda x: type(x) in (int, float) and abs(x) <= largest,
            wanted="a number",
        )

    @property
    def ties(self) -> bool:
        """True: PEFT keeps embedding and head tied when it trains them whole."""
        return self.values.get("ensure_weight_tying") is True

    def check_saved(self, known: Container[str]) -> None:
        """Raise ConfigError if a module in ``modules_to_save`` is not among the names ``known``."""
        names = self.values.get("modules_to_save") or []
        if not isinstance(names, list) or any(name not in known for name in names):
            raise self.bad("modules_to_save", "but only embedding and head are supported")

    def is_module(self, name: str) -> bool:
        """Return True if the module ``name`` has an adapter."""
        if self._excluded(name) or not self._targeted(name):
            return False
        layer = name.removeprefix("model.layers.").partition(".")[0]
        is_named = name in (self.values.get("target_modules") or ())
        return not self._layers or is_named or layer in self._layers

    def rank_and_scale(self, name: str) -> tuple[int, float]:
        """Return rank and scale of the adapter of the module ``name``."""
        rank, alpha = (
            next(value for matches, value in values if matches(name))
            for values in (self._ranks, self._alphas)
        )
        return rank, alpha / (rank**0.5 if self.values.get("use_rslora") else rank)

    def _names(self, key: str) -> _Matches:
        """Return the test of names that ``key`` describes: a list of endings, or a pattern."""
        value = self.values.get(key) or []
        if key == "target_modules" and str(value).lower() == "all-linear":
            return lambda name: True
        if isinstance(value, str) and key != "target_parameters":
            return self._pattern(key, value)
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.bad(key, "not a list of names")
        return lambda name: any(f".{name}".endswith(f".{end}") for end in value)

    def _by_pattern(
        self, key: str, *, default: str, is_good: Callable[[Any], bool], wanted: str
    ) -> list[tuple[_Matches, Any]]:
        """List the values of ``key`` with their patterns, then the value of ``default``.

        The first pattern that matches a name decides.
        """
        values = self.values.get(key) or {}
        if not isinstance(values, dict) or not all(map(is_good, values.values())):
            raise self.bad(key, f"not patterns of names, each with {wanted}")
        if not is_good(self.values.get(default)):
            raise self.bad(default, f"not {wanted}")
        found = [(self._pattern(key, rf"(.*\.)?({p})"), value) for p, value in values.items()]
        return [*found, (lambda name: True, self.values[default])]

    def _pattern(self, key: str, pattern: str) -> _Matches:
        # The file may be a stranger's, whose pattern could run for ever in Python's engine. This
        # one is Rust's, and takes linear time.
        try:
            schema = core_schema.str_schema(pattern=f"^(?:{pattern})$")
            return SchemaValidator(schema).isinstance_python
        except SchemaError:
            raise self.bad(key, f"in which {pattern!r:.80} is not a valid pattern") from None

    def bad(self, key: str, problem: str) -> ConfigError:
        return _error(self.folder, f"{_SETTINGS}: {key} is {self.values.get(key)!r:.80}, {problem}")


def _error(folder: Path, problem: str) -> ConfigError:
    return ConfigError("lora.path", f"{str(folder)!r}: {problem}")
