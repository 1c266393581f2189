"""Which families there are, and how a model of one is built.

A new family is one new file that exports a :class:`Family`, and its name in :data:`FAMILIES`: the
only list of families.
"""

from moetrain.config import ConfigError, KernelsSection, MoeSection
from moetrain.models import qwen3, qwen3_moe
from moetrain.models.architecture import Architecture
from moetrain.models.family import Family
from moetrain.models.transformer import Transformer

FAMILIES: tuple[Family, ...] = (qwen3.FAMILY, qwen3_moe.FAMILY)

_KERNELS, _MOE = KernelsSection(), MoeSection()


def build_model(
    arch: Architecture, *, kernels: KernelsSection = _KERNELS, moe: MoeSection = _MOE
) -> Transformer:
    """A model of ``arch`` on the current default device, in the default dtype.

    Its parameters are not initialised: call :func:`init_weights` or load a checkpoint. Built on
    ``torch.device("meta")`` it takes no memory; ``to_empty`` then gives it storage.

    Raises:
        ConfigError: no family builds ``arch.family``.
    """
    make_block = find_family(arch).make_block
    blocks = [make_block(arch, i, kernels, moe) for i in range(arch.num_layers)]
    return Transformer(arch, blocks, kernels)


def find_family(arch: Architecture) -> Family:
    """The family that builds ``arch``; ConfigError if there is none."""
    for family in FAMILIES:
        if arch.family in family.hf:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.hf)
    raise ConfigError("model", f"family {arch.family!r} is not one of {known}")
