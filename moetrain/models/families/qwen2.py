"""Qwen2: dense, biases on queries, keys and values, windows in some layers.

Qwen3 writes its layers down in the same keys.
"""

from typing import Any

from moetrain.models.architecture import Architecture
from moetrain.models.family import (
    COMMON_DEFAULTS,
    DENSE,
    DenseDecoder,
    Family,
    HFConfig,
    HFFamily,
    config_error,
)

_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_windows(config: HFConfig) -> dict[str, Any]:
    """Read windows from ``layer_types``, else use full attention below ``max_window_layers``."""
    window = config["sliding_window"] if config["use_sliding_window"] else None
    types = config["layer_types"]
    if types is None:
        first = config["max_window_layers"]
        layers = range(config["num_hidden_layers"])
        return {"sliding_windows": tuple(window if i >= first else None for i in layers)}
    unknown = sorted({str(kind) for kind in types} - {_SLIDING, _FULL})
    if unknown:
        raise config_error(f"layer_types {', '.join(unknown)} are not supported")
    if _SLIDING in types and window is None:
        raise config_error(f"layer_types name {_SLIDING}, but no sliding_window is in use")
    return {"sliding_windows": tuple(window if kind == _SLIDING else None for kind in types)}


def write_windows(arch: Architecture) -> dict[str, Any]:
    """Invert :func:`read_windows`."""
    windows = [arch.window(i) for i in range(arch.num_layers)]
    window = next((w for w in windows if w is not None), None)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": [_FULL if w is None else _SLIDING for w in windows],
    }


DEFAULTS: HFConfig = {
    **COMMON_DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
NULLABLE = {"sliding_window": int, "layer_types": list}

FAMILY = Family(
    name="qwen2",
    architecture=DenseDecoder,
    hf=HFFamily(
        hf_class="Qwen2ForCausalLM",
        defaults=DEFAULTS,
        weight_map=DENSE,
        fixed={"qkv_bias": True},
        nullable=NULLABLE,
        read_layers=read_windows,
        write_layers=write_windows,
    ),
)
