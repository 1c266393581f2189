"""The plan of a model: the rule of each parameter and the style of each part, as tables.

All that differs from parameter to parameter is said in its :class:`Rule` and nowhere else. Parts
name the rules of their own parameters (:mod:`moetrain.models.architecture`). Adapters need no
patterns: how they are cut follows from the weights that they adapt.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import torch
from torch import nn

from moetrain.config import Config, ConfigError
from moetrain.kernels.quant.groups import QUANT_FORMATS, QuantFormat

ParameterStyle = Literal["replicate", "partial", "colwise", "rowwise", "expert"]
"""How a parameter lies on tensor parallel (``expert``: expert parallel) ranks; on top of that FSDP
splits every parameter's first dim.

    replicate  one value on every rank
    partial    the same, for a bias whose results are added up over ranks: each uses its share
    colwise    rows (output features) are split
    rowwise    columns (input features) are split
    expert     experts are split
"""
_Init = Literal["normal", "ones", "zeros", "kaiming", "gaussian"]
PartStyle = Literal["own", "all", "routed", "gather", "vocabulary"]
"""What a part does where ranks share tokens.

    own        computes on this rank's tokens
    all        computes on all tokens with its part of the weights; results are added up
    routed     computes on this rank's tokens, and sends them to their experts
    gather     computes on this rank's tokens; all ranks' results are gathered
    vocabulary goes through ``Transformer.vocabulary``
"""

_BLOCK_NUMBERS = 2**24


@dataclass(frozen=True)
class Rule:
    """How one parameter is cut, initialised, decayed, stored and gathered."""

    style: ParameterStyle
    init: _Init | Callable[[torch.Tensor, torch.Generator], torch.Tensor] = "normal"
    """normal: N(0, ``model.init_std``^2). kaiming and gaussian are for an adapter's first matrix
    [..., rank, in], by ``lora.init``. A function fills some rows, for one family's parameters."""
    decay: bool = True
    """Whether weight decay applies."""
    gather: torch.dtype | None = None
    """The dtype in which it is gathered and used; None: the compute dtype."""
    storage: torch.dtype = torch.float32
    """The dtype of a rank's shard; one that is trained is fp32, or bf16."""
    trainable: bool = True
    quant_format: QuantFormat | None = None
    """How codes and scales of a rank's shard are stored, to be read in ``storage``; None: it is
    stored as it is."""
    is_hosted: bool = False
    """Whether these lie in host memory, and are copied to the device wherever they are used."""
    generated: QuantFormat | None = None
    """How codes and scales of the copy that generation has are stored; None: as it is used."""
    stacked: int = 1
    """How many matrices of a product lie one above the other in its rows."""
    rows: tuple[int, ...] | None = None
    """The rows that are trained, while the others stay as they are; None: all of them."""
    is_orthogonal: bool = False
    """Whether Muon updates it, each matrix by itself; else AdamW does."""

    @property
    def is_matrix(self) -> bool:
        """Whether the parameter is the matrix of a product in the compute dtype."""
        return self.init == "normal" and self.decay and self.gather is None

    def draw(
        self,
        out: torch.Tensor,
        name: str,
        shape: Sequence[int],
        std: float,
        seed: int,
        box: tuple[slice, ...] = (),
    ) -> None:
        """Fill ``out`` with initial values of the parameter ``name``, or of its part in ``box``.

        Numbers are seeded by ``seed`` and the name, so no value depends on other parameters or on
        how this one, of ``shape``, is cut. They are drawn in blocks of rows, each with a seed of
        its own: a rank draws the blocks that it holds some rows of, and never the whole.
        """
        if self.init in ("ones", "zeros"):
            out.fill_(1.0 if self.init == "ones" else 0.0)
            return
        per_block = max(1, _BLOCK_NUMBERS // max(1, math.prod(shape[1:])))
        first = box[0].start if box else 0
        stop = first + out.shape[0] if out.numel() else first
        for start in range(first - first % per_block, stop, per_block):
            size = min(per_block, shape[0] - start)
            generator = torch.Generator(out.device)
            # One hash of all: the CPU's generator keeps 32 bits of a seed.
            block = f".{start // per_block}" if start else ""
            generator.manual_seed(zlib.crc32(f"{seed}.{name}{block}".encode()))
            values = torch.empty(size, *shape[1:], device=out.device)
            if not isinstance(self.init, str):
                values = self.init(values, generator)
            elif self.init == "kaiming":
                values.uniform_(-(shape[-1] ** -0.5), shape[-1] ** -0.5, generator=generator)
            else:
                width = 1 / shape[-2] if self.init == "gaussian" else std
                values.normal_(0.0, width, generator=generator)
            low = max(first, start)
            high = min(stop, start + size)
            kept = values[(slice(low - start, high - start), *box[1:])]
            out[low - first : high - first] = kept


COLWISE = Rule("colwise")
ROWWISE = Rule("rowwise")
EXPERT = Rule("expert")
NORM = Rule("replicate", init="ones", decay=False)
ZERO_NORM = replace(NORM, init="zeros")
"""Of a norm whose weight is what is added to 1."""
WIDE_NORM = Rule("colwise", init="ones", decay=False)
"""Of a norm over numbers that tensor parallel ranks divide."""

SCORE = "score.weight"
"""The parameter that is a reward model's head."""
ADAPTER = ("_lora_a", "_lora_b")
"""Suffixes of the adapter's two parameters: [..., rank, in] and [..., out, rank]."""
MAGNITUDE = "_lora_magnitude"
"""Suffix of the lengths of a matrix's rows [out], which ``lora.use_dora`` trains."""
ADAPTERS = (*ADAPTER, MAGNITUDE)
"""Suffixes of all that adapters have."""
_ADAPTER_STYLES: Mapping[ParameterStyle, tuple[ParameterStyle, ParameterStyle]] = {
    "replicate": ("replicate", "replicate"),
    # Every rank has all inputs, and its part of the outputs.
    "colwise": ("replicate", "colwise"),
    # Every rank has its part of the inputs, and of what is added up.
    "rowwise": ("rowwise", "replicate"),
    "expert": ("expert", "expert"),
}


SAVED_MODULES = {"embed_tokens": "embed.weight", "lm_head": "lm_head.weight"}
"""The parameters that ``lora.modules_to_save`` names, by PEFT's usual names of their modules."""


class ShardingPlan(NamedTuple):
    """The rule of every parameter and the style of every part in or beside blocks, by name."""

    parameters: Mapping[str, Rule]
    """The rules of the model's own parameters, without adapters."""
    styles: dict[str, PartStyle]

    def rules(self, model: nn.Module) -> dict[str, Rule]:
        """Return the rule of every parameter of ``model``, by name.

        Raises ValueError: the parts that made the plan have not the parameters of ``model``.
        """
        names = [name for name, _ in model.named_parameters()]
        own = {name for name in names if not name.endswith(ADAPTERS)}
        if odd := sorted(own ^ self.parameters.keys()):
            raise ValueError(f"plan: parts and modules differ in {', '.join(odd[:5])}")
        return {n: self.parameters.get(n) or _adapter_rule(self.parameters, n) for n in names}

    def rules_of_run(self, model: nn.Module, config: Config, dtype: torch.dtype) -> dict[str, Rule]:
        """Return :meth:`rules` as a run of ``config`` trains them; ``dtype``: the compute dtype.

        A frozen parameter is stored in the dtype in which it is used, unless its rule says
        otherwise.

        Raises:
            ConfigError: a pattern of ``train.freeze`` matches nothing, or what is to be trained, or
                nothing is left to train; ``lora.modules_to_save`` names what the model has not.
        """
        rules = self.rules(model)
        tokens = config.lora.token_ids or None
        saved = _saved(rules, config.lora.modules_to_save)
        if tokens is not None:
            saved = {name for name in SAVED_MODULES.values() if name in rules}
        frozen = _frozen(rules, config.train.freeze, saved)
        for name, rule in rules.items():
            if rule.init == "kaiming":
                rule = replace(rule, init=config.lora.init)
            if name in frozen and rule.trainable:
                rule = replace(rule, trainable=False, storage=rule.gather or dtype)
            if name in saved and tokens is not None:
                rule = replace(rule, rows=tokens, decay=False)  # which would move the others
            # Norms and biases are left out because they are small, and routers, embedding and head
            # because their rounding costs most (QLoRA leaves them too).
            is_hidden = name.startswith("layers.") and rule.is_matrix
            if is_hidden and not rule.trainable:
                hosted = config.lora.offload_experts and rule.style == "expert"
                quant_format = QUANT_FORMATS.get(config.lora.base_dtype)
                rule = replace(rule, quant_format=quant_format, is_hosted=hosted)
            if is_hidden and rule.style == "expert":
                rule = replace(rule, generated=QUANT_FORMATS.get(config.rl.generator_dtype))
            # Norms, biases and adapters are small.
            is_large = rule.init == "normal" and rule.gather is None
            if config.optim.weight_dtype == "bfloat16" and rule.trainable and is_large:
                rule = replace(rule, storage=torch.bfloat16)
            if config.optim.name == "muon" and is_hidden and rule.trainable:
                rule = replace(rule, is_orthogonal=True)
            rules[name] = rule
        return rules


def _adapter_rule(rules: Mapping[str, Rule], name: str) -> Rule:
    if name.endswith(MAGNITUDE):  # its values follow from those of the matrix, and divide like ones
        return Rule("replicate", init="zeros", decay=False, gather=torch.float32)
    half = next(i for i, suffix in enumerate(ADAPTER) if name.endswith(suffix))
    adapted = rules[name.removesuffix(ADAPTER[half])]
    style, init = _ADAPTER_STYLES[adapted.style][half], "zeros" if half else "kaiming"
    return Rule(style, init=init, decay=adapted.decay, gather=adapted.gather)


def _saved(rules: Mapping[str, Rule], modules: Sequence[str]) -> set[str]:
    """Return the names of the parameters of ``lora.modules_to_save``."""
    if absent := [module for module in modules if SAVED_MODULES[module] not in rules]:
        problem = f"{absent[0]!r}, but this model has no head of its own; name embed_tokens alone"
        raise ConfigError("lora.modules_to_save", problem)
    return {SAVED_MODULES[module] for module in modules}


def _frozen(rules: Mapping[str, Rule], freeze: Sequence[str], saved: set[str]) -> set[str]:
    """Return the names that ``freeze`` matches and, if there are adapters, all but theirs,
    ``saved``, and a reward model's head, which no checkpoint of its base has."""
    has_adapters = any(name.endswith(ADAPTERS) for name in rules)
    frozen = {name for name in rules if has_adapters and not name.endswith(ADAPTERS)} - saved
    frozen.discard(SCORE)
    for pattern in freeze:
        matched = {name for name in rules if fnmatchcase(name, pattern)}
        if not matched:
            problem = f"{pattern!r} matches no parameter; they have names like {list(rules)[-1]}"
            raise ConfigError("train.freeze", problem)
        if both := matched & saved:
            problem = f"{pattern!r} freezes {min(both)}, which settings of lora are to train"
            raise ConfigError("train.freeze", f"{problem}; leave it out of one of the two")
        if has_adapters and SCORE in matched:
            problem = f"{pattern!r} freezes {SCORE}, the reward, which is trained beside adapters"
            raise ConfigError("train.freeze", f"{problem}; leave it out")
        frozen |= matched
    if all(name in frozen or not rule.trainable for name, rule in rules.items()):
        problem = f"{','.join(freeze)!r} leaves nothing to train"
        raise ConfigError("train.freeze", f"{problem}; leave patterns out")
    return frozen
