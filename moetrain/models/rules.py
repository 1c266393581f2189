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

Adapters (:mod:`moetrain.models.lora`) need no patterns: how they are cut follows from what they
adapt. What is not trained after all, :func:`train_only` says of the whole table.

Matching is strict both ways: a pattern that matches nothing and a name that no pattern covers are
errors, since either is a plan that does not describe the model.
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
    """All that one parameter needs said."""

    style: ParameterStyle
    init: Literal["normal", "ones", "zeros", "kaiming", "gaussian"] = "normal"
    """normal: N(0, ``model.init_std``^2). kaiming, gaussian: as ``lora.init`` says of an adapter's
    first matrix [..., rank, in]."""
    decay: bool = True
    """Whether weight decay applies."""
    gather: torch.dtype | None = None
    """What it is gathered and used in; None: the compute dtype."""
    storage: torch.dtype = torch.float32
    """What a rank's shard is stored in; other than fp32 only if it is not trained."""
    trainable: bool = True
    is_narrow: bool = False
    """Whether a rank's shard is codes of 8 bits, with scales, and is but read in ``storage``."""

    @property
    def stored_bytes(self) -> float:
        """Of a number."""
        return 1 + 1 / SCALED if self.is_narrow else self.storage.itemsize

    def __post_init__(self) -> None:
        if self.trainable and self.storage != torch.float32:
            raise ValueError(f"a parameter stored in {self.storage} cannot be trained")


class ShardingPlan(NamedTuple):
    """Patterns for every parameter and every part of one model; the first that matches decides."""

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
    """What ``patterns`` say of each name.

    Raises:
        ValueError: an unused pattern or an uncovered name.
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
"""What the adapter of a parameter is called, behind its name: [..., rank, in], [..., out, rank]."""
_ADAPTER_STYLES: Mapping[ParameterStyle, tuple[ParameterStyle, ParameterStyle]] = {
    "replicate": ("replicate", "replicate"),
    # Every rank has all inputs, and its part of the outputs.
    "colwise": ("replicate", "colwise"),
    # Every rank has its part of the inputs, and of what is added up.
    "rowwise": ("rowwise", "replicate"),
    "expert": ("expert", "expert"),
}


def is_adapter(name: str) -> bool:
    """Whether the parameter ``name`` is half of another's adapter."""
    return name.endswith(ADAPTER)


def parameter_rules(plan: ShardingPlan, model: nn.Module) -> dict[str, Rule]:
    """The rule of every parameter of ``model``, by name; ValueError as :func:`match`."""
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
    """``rules`` of what is trained then: not what a pattern of ``freeze`` matches, and with
    adapters nothing else. The rest is stored in what it is used in, ``dtype`` unless its rule says
    otherwise.

    Raises:
        ConfigError: a pattern that matches nothing, or nothing is left to train.
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
    """``rules`` with frozen matrices of blocks narrow: neither norms and biases, which are small,
    nor routers, embedding and head, whose rounding costs most (as QLoRA leaves them)."""
    return {
        name: replace(rule, is_narrow=True)
        if name.startswith("layers.") and is_matrix(rule) and not rule.trainable
        else rule
        for name, rule in rules.items()
    }


def is_matrix(rule: Rule) -> bool:
    """Whether it is of a product's weights, in the compute dtype."""
    return rule.init == "normal" and rule.decay and rule.gather is None


def part_styles(plan: ShardingPlan, model: nn.Module) -> dict[str, PartStyle]:
    """The style of every part of ``model``, by name: what holds parameters, in blocks and beside.

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
