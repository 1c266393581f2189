"""OLMo-2 (arXiv 2501.00656): Flex-OLMo's attention, with one gated feed-forward in each layer.

As there, norms follow attention and the feed-forward and none precedes them, and queries and keys
are normalised over all heads together.

Left out on purpose: ``clip_qkv`` of the first OLMo, which no OLMo-2 has (``transformers`` would
ignore it; here such a file is refused), and dropout of attention (``attention_dropout``), which is
a setting of training. An export keeps its key.
"""

from dataclasses import dataclass
from typing import ClassVar

from moetrain.models.architecture import Architecture, ConfigJson, Fields
from moetrain.models.decoders import COMMON_DEFAULTS
from moetrain.models.families.flex_olmo import DENSE_THEN_NORMS, FIXED, AttentionThenNorm
from moetrain.models.family import Family, register
from moetrain.models.hf.files import error
from moetrain.models.layers import SwiGLU


@dataclass(frozen=True, kw_only=True)
class _SwiGLUThenNorm(SwiGLU):
    norm: ClassVar[str] = ""
    after: ClassVar[str] = "mlp_norm"


class _Olmo2(Architecture):
    """Attention and SwiGLU in every layer, each followed by its norm."""

    kinds = (AttentionThenNorm, _SwiGLUThenNorm)


def _read_layers(config: ConfigJson) -> Fields:
    """Read nothing; ConfigError: queries, keys and values are clipped."""
    if (limit := config.get("clip_qkv")) is not None:
        problem = f"clip_qkv {limit!r:.80} is not supported; use a model that has null there"
        raise error("config.json", problem)
    return {}


register(
    Family(
        name="olmo2",
        architecture=_Olmo2,
        hf_class="Olmo2ForCausalLM",
        defaults={
            **COMMON_DEFAULTS,
            "vocab_size": 50_304,
            "intermediate_size": 11_008,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
        },
        weight_map=DENSE_THEN_NORMS,
        fixed=FIXED,
        read_layers=_read_layers,
        presets={
            "olmo2-7b": _Olmo2(
                family="olmo2",
                vocab_size=100_352,
                hidden_size=4096,
                num_layers=32,
                num_heads=32,
                num_kv_heads=32,
                head_dim=128,
                intermediate_size=11_008,
                max_positions=4096,
                norm_eps=1e-6,
                rope_theta=500_000.0,
                **FIXED,
            )
        },
    )
)
