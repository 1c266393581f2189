"""The plan of a model: the rule of each parameter and the style of each part, as tables.

A family has a :class:`ShardingPlan`: shell-style patterns over dotted names that map a parameter to
a :class:`Rule`, and a part (what of a block, or of the model, sees activations) to a word. It is
put together from what each part says of itself (:mod:`moetrain.models.architecture`). All that
differs from parameter to parameter is said there and nowhere else: how it is cut, initialised,
decayed, stored and gathered, and whether it is trained.

Styles of parameters, over tensor parallel (``expert``: expert parallel) ranks:

    replicate  one value on every rank
    partial    the same, for a bias whose results are added up over ranks: each uses its share
    colwise    rows (output features) are split
    rowwise    columns (input features) are split
    expert     experts are split

On top of that FSDP splits every parameter's first dim. Styles of parts, where ranks share tokens:

    own        computes on this rank's tokens
    all        computes on all tokens with its part of the weights; results are added up
    routed     computes on this rank's tokens, and sends them to their experts
    gather     computes on this rank's tokens; all ranks' results are gathered
    vocabulary goes through ``Transformer.vocabulary``

Adapters (:mod:`moetrain.models.lora`) need no patterns: how they are cut follows from the weights
that they adapt. :func:`train_only` then marks what a run freezes.

Matching is strict both ways: a pattern that matches nothing and a name that no pattern covers are
errors, since such a plan does not describe the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import nn

from moetrain.config import ConfigError
from moetrain.kernels.quant.e4m3 import SCALED

ParameterStyle = Literal["replicate", "partial", "colwise", "rowwise", "expert"]
PartStyle = Literal["own", "all", "routed", "gather", "vocabulary"]


@dataclass(frozen=True)
class Rule:
    """How one parameter is cut, initialised, decayed, stored and gathered."""

    style: ParameterStyle
    init: Literal["normal", "ones", "zeros", "kaiming", "gaussian"] = "normal"
    """normal: N(0, ``model.init_std``^2). kaiming and gaussian are for an adapter's first matrix
    [..., rank, in], by ``lora.init``."""
    decay: bool = True
    """Whether weight decay applies."""
    gather: torch.dtype | None = None
    """The dtype in which it is gathered and used; None: the compute dtype."""
    storage: torch.dtype = torch.float32
    """The dtype of a rank's shard; one that is trained is fp32."""
    trainable: bool = True
    is_narrow: bool = False
    """Whether a rank's shard is stored as 8-bit codes with scales, and read in ``storage``."""

    @property
    def stored_bytes(self) -> float:
        """Bytes that one number takes in a rank's shard."""
        return 1 + 1 / SCALED if self.is_narrow else self.storage.itemsize

    def __post_init__(self) -> None:
        if self.trainable and self.storage != torch.float32:
            raise ValueError(f"a parameter stored in {self.storage} cannot be trained")


class ShardingPlan(NamedTuple):
    """Patterns for every parameter and part of a model; the first that matches a name decides."""

    parameters: Mapping[str, Rule]
    parts: Mapping[str, PartStyle]


COLWISE, ROWWISE, EXPERT = Rule("colwise"), Rule("rowwise"), Rule("expert")
NORM = Rule("replicate", init="ones", decay=False)
BIAS = Rule("colwise", init="zeros", decay=False)
SHARED_BIAS = replace(BIAS, style="partial")
EMBEDDING = Rule("colwise", decay=False)
ROUTER = Rule("replicate", decay=False, gather=torch.float32)  # computed in fp32 whatever the dtype


T = TypeVar("T")


def match(patterns: Mapping[str, T], names: Iterable[str]) -> dict[str, T]:
    """Map each name to the value of the first pattern that matches it.

    Raises:
        ValueError: a pattern matches no name, or a name matches no pattern.
    """
    unused, found, uncovered = set(patterns), {}, []
    for name in names:
        pattern = next((p for p in patterns if fnmatchcase(name, p)), None)
        if pattern is None:
            uncovered.append(name)
        else:
            found[name] = patterns[pattern]
            unused.discard(pattern)
    if uncovered:
        raise ValueError(f"plan: no pattern covers {', '.join(uncovered[:5])}")
    if unused:
        raise ValueError(f"plan: nothing matches {', '.join(sorted(unused))}")
    return found


ADAPTER = ("_lora_a", "_lora_b")
"""Suffixes of the adapter's two parameters: [..., rank, in] and [..., out, rank]."""
_ADAPTER_STYLES: Mapping[ParameterStyle, tuple[ParameterStyle, ParameterStyle]] = {
    "replicate": ("replicate", "replicate"),
    # Every rank has all inputs, and its part of the outputs.
    "colwise": ("replicate", "colwise"),
    # Every rank has its part of the inputs, and of what is added up.
    "rowwise": ("rowwise", "replicate"),
    "expert": ("expert", "expert"),
}


def is_adapter(name: str) -> bool:
    """Return whether the parameter ``name`` is one half of another's adapter."""
    return name.endswith(ADAPTER)


def parameter_rules(plan: ShardingPlan, model: nn.Module) -> dict[str, Rule]:
    """Return the rule of every parameter of ``model``, by name; ValueError as :func:`match`."""
    names = [name for name, _ in model.named_parameters()]
    rules = match(plan.parameters, [name for name in names if not is_adapter(name)])
    return {name: rules[name] if name in rules else _adapter_rule(rules, name) for name in names}


def _adapter_rule(rules: Mapping[str, Rule], name: str) -> Rule:
    half = next(i for i, suffix in enumerate(ADAPTER) if name.endswith(suffix))
    adapted = rules[name.removesuffix(ADAPTER[half])]
    rule = Rule(_ADAPTER_STYLES[adapted.style][half], decay=adapted.decay, gather=adapted.gather)
    return replace(rule, init="zeros" if half else "kaiming")


def train_only(
    rules: Mapping[str, Rule], freeze: Sequence[str], dtype: torch.dtype
) -> dict[str, Rule]:
    """Freeze what the patterns of ``freeze`` match and, if there are adapters, all but these.

    A frozen parameter is stored in the dtype in which it is used: ``dtype``, unless its rule says
    otherwise.

    Raises:
        ConfigError: a pattern matches nothing, or nothing is left to train.
    """
    has_adapters = any(map(is_adapter, rules))
    frozen = {name for name in rules if has_adapters and not is_adapter(name)}
    for pattern in freeze:
        matched = {name for name in rules if fnmatchcase(name, pattern)}
        if not matched:
            problem = f"{pattern!r} matches no parameter; they have names like {list(rules)[-1]}"
            raise ConfigError("train.freeze", problem)
        frozen |= matched
    if all(name in frozen or not rule.trainable for name, rule in rules.items()):
        raise ConfigError("train.freeze", f"{','.join(freeze)!r} leaves nothing to train")
    return {
        name: replace(rule, trainable=False, storage=rule.gather or dtype)
        if name in frozen and rule.trainable
        else rule
        for name, rule in rules.items()
    }


def narrowed(rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Store the frozen matrices of blocks as 8-bit codes.

    Norms and biases are left out because they are small, and routers, embedding and head because
    their rounding costs most (QLoRA leaves them too).
    """
    return {
        name: replace(rule, is_narrow=True)
        if name.startswith("layers.") and _is_matrix(rule) and not rule.trainable
        else rule
        for name, rule in rules.items()
    }


def _is_matrix(rule: Rule) -> bool:
    """Return whether the parameter is the matrix of a product in the compute dtype."""
    return rule.init == "normal" and rule.decay and rule.gather is None


def part_styles(plan: ShardingPlan, model: nn.Module) -> dict[str, PartStyle]:
    """Return the style of every part of ``model`` (in or beside blocks, with parameters), by name.

    Raises:
        ValueError: as :func:`match`.
    """
    parts = []
    for name, child in model.named_children():
        found = {name: child}
        if isinstance(child, nn.ModuleList):
            blocks = child.named_children()
            found = {f"{name}.{i}.{k}": part for i, b in blocks for k, part in b.named_children()}
        parts += [name for name, part in found.items() if any(True for _ in part.parameters())]
    return match(plan.parts, parts)
