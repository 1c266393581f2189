"""The plan of a model: the rule of each parameter and the style of each part, as tables.

A parameter's :class:`Rule` holds everything that differs from parameter to parameter: how it is
sharded, initialised, decayed and stored. Parts name the rules of their own parameters
(:mod:`moetrain.models.architecture`). The rules of adapters follow from the weights that they
adapt.
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
"""The layout of a parameter over tensor parallel (``expert``: expert parallel) ranks. FSDP splits
every parameter's first dim on top of that.

    replicate  one value on every rank
    partial    one value on every rank, a bias of results that are added up: each adds its share
    colwise    rows (output features) are split
    rowwise    columns (input features) are split
    expert     experts are split
"""
_Init = Literal["normal", "ones", "zeros", "kaiming", "gaussian"]
PartStyle = Literal["own", "all", "routed", "gather", "vocabulary"]
"""The way a part computes where tensor parallel ranks share tokens.

    own        computes on this rank's tokens
    all        computes on all tokens with its part of the weights; results are added up
    routed     computes on this rank's tokens and sends them to their experts
    gather     computes on this rank's tokens; all ranks' results are gathered
    vocabulary computes through ``Transformer.vocabulary``
"""

_BLOCK_ELEMENTS = 2**24
"""About how many elements are drawn from one random seed."""


@dataclass(frozen=True)
class Rule:
    """The rule of one parameter: its sharding, initialisation, decay, storage and gathering."""

    style: ParameterStyle
    """The layout over tensor or expert parallel ranks."""
    init: _Init | Callable[[torch.Tensor, torch.Generator], torch.Tensor] = "normal"
    """The initial values. normal: N(0, ``model.init_std``^2). kaiming and gaussian are for an
    adapter's first matrix [..., rank, in], by ``lora.init``. A function fills a block of rows, for
    one family's parameters."""
    decay: bool = True
    """True: weight decay applies."""
    gather: torch.dtype | None = None
    """The dtype in which the parameter is gathered and used; None: the compute dtype."""
    storage: torch.dtype = torch.float32
    """The dtype of a rank's shard; a trained one is fp32 or bf16."""
    trainable: bool = True
    """False: the parameter is frozen."""
    quant_format: QuantFormat | None = None
    """The format of a quantised shard, which is dequantised to ``storage``; None: the shard is not
    quantised."""
    is_offloaded: bool = False
    """True: a quantised shard lies in host memory, and is copied to the device at each use."""
    generated: QuantFormat | None = None
    """The format of generation's quantised copy; None: generation uses the compute dtype."""
    stacked: int = 1
    """The number of matrices stacked in the parameter's rows: 2 for gate and up projection."""
    has_own_loss: bool = False
    """True: the model's loss has no gradient for the parameter. It is frozen, unless a setting asks
    for a loss of its own."""
    rows: tuple[int, ...] | None = None
    """The rows that are trained; the other rows are frozen. None: all rows are trained."""
    is_orthogonal: bool = False
    """True: Muon updates the parameter, each matrix by itself; False: AdamW does."""

    @property
    def of_bucket(self) -> tuple[object, ...]:
        """The fields that all parameters of a bucket must share.

        One storage holds the bucket, one gather collects it, and one update changes it.
        """
        return (self.gather, self.storage, self.quant_format, self.trainable, self.is_orthogonal)

    @property
    def stored_bytes(self) -> float:
        """The bytes of an element as its shard is stored, for the estimate of memory."""
        return self.quant_format.bytes_per_element if self.quant_format else self.storage.itemsize

    @property
    def is_matrix(self) -> bool:
        """True: the parameter is the matrix of a product in the compute dtype."""
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

        Values are drawn in blocks of rows. The seed of a block is a hash of ``seed``, the name and
        the block's number. So no value depends on other parameters or on the sharding, and a rank
        draws only the blocks of which it holds rows.

        Args:
            out: all of the parameter, or its part in ``box``.
            shape: the shape of the whole parameter.
            std: the standard deviation for ``init`` "normal".
            box: slices of the dims of the whole parameter; empty: all of it.
        """
        if self.init in ("ones", "zeros"):
            out.fill_(1.0 if self.init == "ones" else 0.0)
            return
        per_block = max(1, _BLOCK_ELEMENTS // max(1, math.prod(shape[1:])))
        first = box[0].start if box else 0
        stop = first + out.shape[0] if out.numel() else first
        for start in range(first - first % per_block, stop, per_block):
            size = min(per_block, shape[0] - start)
            generator = torch.Generator(out.device)
            # One hash of all three, since the CPU's generator keeps 32 bits of a seed.
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
"""The rule of a norm that multiplies by 1 + its weight."""
WIDE_NORM = Rule("colwise", init="ones", decay=False)
"""The rule of a norm over elements that tensor parallel ranks divide."""

SCORE = "score.weight"
"""Name of a reward model's head."""
ADAPTER = ("_lora_a", "_lora_b")
"""Suffixes of the adapter's two parameters: [..., rank, in] and [..., out, rank]."""
MAGNITUDE = "_lora_magnitude"
"""Suffix of DoRA's magnitudes (``lora.use_dora``): the norm of each row of a matrix, [out]."""
ADAPTERS = (*ADAPTER, MAGNITUDE)
"""Suffixes of all parameters of adapters."""
_ADAPTER_STYLES: Mapping[ParameterStyle, tuple[ParameterStyle, ParameterStyle]] = {
    "replicate": ("replicate", "replicate"),
    # Every rank has all inputs and its part of the outputs.
    "colwise": ("replicate", "colwise"),
    # Every rank has its part of the inputs, and results are added up.
    "rowwise": ("rowwise", "replicate"),
    "expert": ("expert", "expert"),
}


SAVED_MODULES = {"embed_tokens": "embed.weight", "lm_head": "lm_head.weight"}
"""The parameters that ``lora.modules_to_save`` names, by PEFT's usual names of their modules."""


class ShardingPlan(NamedTuple):
    """The rule of every parameter and the style of every part, by name."""

    parameters: Mapping[str, Rule]
    """The rules of the model's own parameters, without adapters."""
    styles: dict[str, PartStyle]
    """The styles of parts, norms, the embedding and the head."""

    def rules(self, model: nn.Module) -> dict[str, Rule]:
        """Return the rule of every parameter of ``model``, by name.

        Raises ValueError: the parameters of ``model`` are not those of the plan.
        """
        names = [name for name, _ in model.named_parameters()]
        own = {name for name in names if not name.endswith(ADAPTERS)}
        if odd := sorted(own ^ self.parameters.keys()):
            raise ValueError(f"plan: parts and modules differ in {', '.join(odd[:5])}")
        return {n: self.parameters.get(n) or _adapter_rule(self.parameters, n) for n in names}

    def rules_of_run(self, model: nn.Module, config: Config, dtype: torch.dtype) -> dict[str, Rule]:
        """Return :meth:`rules` with the changes that the settings of a run make.

        A frozen parameter is stored in the dtype in which it is used, unless its rule says
        otherwise.

        Args:
            dtype: the compute dtype.

        Raises:
            ConfigError: a pattern of ``train.freeze`` matches nothing, or a parameter that other
                settings train, or leaves nothing to train; ``lora.modules_to_save`` names a module
                that the model does not have.
        """
        rules = self.rules(model)
        tokens = config.lora.token_ids or None
        saved = _saved(rules, config.lora.modules_to_save)
        if tokens is not None:
            saved = {name for name in SAVED_MODULES.values() if name in rules}
        frozen = _frozen(rules, config.train.freeze, saved)
        own = {name for name, rule in rules.items() if rule.has_own_loss}
        by_mode = {"frozen": own, "joint": set[str](), "warmup": rules.keys() - own}
        frozen |= by_mode[config.train.indexer]
        for name, rule in rules.items():
            if rule.init == "kaiming":
                rule = replace(rule, init=config.lora.init)
            if name in frozen and rule.trainable:
                rule = replace(rule, trainable=False, storage=rule.gather or dtype)
            if name in saved and tokens is not None:
                rule = replace(rule, rows=tokens, decay=False)  # decay would move the other rows
            # Only matrices of blocks are quantised. Norms and biases are small, and rounding
            # routers, embedding and head costs most accuracy (QLoRA keeps them unquantised too).
            is_hidden = name.startswith("layers.") and rule.is_matrix
            if is_hidden and not rule.trainable:
                quant_format = QUANT_FORMATS.get(config.lora.base_dtype)
                is_offloaded = config.lora.offload_experts and rule.style == "expert"
                rule = replace(rule, quant_format=quant_format, is_offloaded=is_offloaded)
            if is_hidden and rule.style == "expert":
                rule = replace(rule, generated=QUANT_FORMATS.get(config.rl.generator_dtype))
            # Norms, biases and adapters are small, so they stay in fp32.
            is_large = rule.init == "normal" and rule.gather is None
            if config.optim.weight_dtype == "bfloat16" and rule.trainable and is_large:
                rule = replace(rule, storage=torch.bfloat16)
            if config.optim.name == "muon" and is_hidden and rule.trainable:
                rule = replace(rule, is_orthogonal=True)
            rules[name] = rule
        return rules


def _adapter_rule(rules: Mapping[str, Rule], name: str) -> Rule:
    """Return the rule of an adapter's parameter, from the rule of the weight that it adapts."""
    if name.endswith(MAGNITUDE):  # its initial values are computed from the matrix
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
    """Return the names of frozen parameters.

    These are the names that ``freeze`` matches. If there are adapters, all parameters of the base
    model are frozen too, except ``saved`` and a reward model's head: the checkpoint of the base
    does not have this head, so it must be trained.
    """
    has_adapters = any(name.endswith(ADAPTERS) for name in rules)
    frozen = {name for name in rules if has_adapters and not name.endswith(ADAPTERS)} - saved
    frozen.discard(SCORE)
    for pattern in freeze:
        matched = {name for name in rules if fnmatchcase(name, pattern)}
        if not matched:
            problem = (
                f"{pattern!r} matches no parameter; parameters have names like {list(rules)[-1]}"
            )
            raise ConfigError("train.freeze", problem)
        if both := matched & saved:
            problem = f"{pattern!r} freezes {min(both)}, which settings of lora train"
            raise ConfigError("train.freeze", f"{problem}; name it in one of the two only")
        if has_adapters and SCORE in matched:
            problem = f"{pattern!r} freezes {SCORE}, the reward, which is trained beside adapters"
            raise ConfigError("train.freeze", f"{problem}; leave it out")
        frozen |= matched
    if all(name in frozen or not rule.trainable for name, rule in rules.items()):
        problem = f"{','.join(freeze)!r} leaves nothing to train"
        raise ConfigError("train.freeze", f"{problem}; leave some patterns out")
    return frozen
