"""Qwen3, dense: q/k norms, windows in some layers."""

from moetrain.models.families.qwen2 import DEFAULTS, NULLABLE, read_windows, write_windows
from moetrain.models.family import ATTENTION_BIAS, DENSE, DenseDecoder, Family, HFFamily

FAMILY = Family(
    name="qwen3",
    architecture=DenseDecoder,
    hf=HFFamily(
        hf_class="Qwen3ForCausalLM",
        defaults={**DEFAULTS, "head_dim": 128, "attention_bias": False},
        weight_map=DENSE,
        fields=ATTENTION_BIAS,
        fixed={"qk_norm": True},
        nullable=NULLABLE,
        read_layers=read_windows,
        write_layers=write_windows,
    ),
    presets={
        "qwen3-0.6b": DenseDecoder(
            family="qwen3",
            vocab_size=151_936,
            hidden_size=1024,
            num_layers=28,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=3072,
            max_positions=40_960,
            tie_embeddings=True,
            rope_theta=1e6,
            qk_norm=True,
        )
    },
)
