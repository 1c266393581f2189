"""SmolLM3 of Hugging Face (https://huggingface.co/HuggingFaceTB/SmolLM3-3B).

It is Llama's dense decoder, some of whose layers have no rotary embeddings: those with a 0 in
``no_rope_layers``, or without this list every ``no_rope_layer_interval``-th. Where windows are in
use, the layers that ``layer_types`` names have them, or without it those without rotary embeddings.

Left out on purpose: dropout of attention (``attention_dropout``), which is a setting of training.
An export keeps its key.
"""

from moetrain.models.architecture import Architecture, ConfigJson, Fields
from moetrain.models.decoders import COMMON_DEFAULTS, DENSE, DenseDecoder
from moetrain.models.families.qwen import read_windows, write_windows
from moetrain.models.family import Family, register
from moetrain.models.hf.files import error
from moetrain.models.parts.layer_types import FULL, SLIDING

_LIST = "no_rope_layers"
_INTERVAL = "no_rope_layer_interval"
_PAD = 128_004
"""The ``pad_token_id`` of a file that does not name one."""


def _read_rope_layers(config: ConfigJson) -> tuple[bool, ...]:
    """Return ``Architecture.rope_layers``; ConfigError: the list or the interval is impossible.

    As in ``transformers``, the list may have more entries than there are layers.
    """
    count, entries, interval = config["num_hidden_layers"], config[_LIST], config[_INTERVAL]
    if entries is None:
        if interval < 1:
            problem = f"{_INTERVAL} is {interval}, expected 1 or more"
            raise error("config.json", f"{problem}; name each layer in {_LIST}")
        return tuple((i + 1) % interval != 0 for i in range(count))
    if len(entries) < count:
        problem = f"{_LIST} has {len(entries)} entries, but num_hidden_layers is {count}"
        raise error("config.json", f"{problem}; give one for each layer")
    if wrong := [entry for entry in entries if type(entry) is not int or entry not in (0, 1)]:
        problem = f"{_LIST} has {wrong[0]!r:.80}, expected 0 (no rotary embedding) or 1"
        raise error("config.json", f"{problem} for each layer")
    return tuple(entry == 1 for entry in entries[:count])


def _read_layers(config: ConfigJson) -> Fields:
    """Read which layers have rotary embeddings, and which have windows."""
    rotated, types = _read_rope_layers(config), config["layer_types"]
    if types is None:
        is_windowed = config["use_sliding_window"] and config["sliding_window"] is not None
        types = [SLIDING if is_windowed and not rotates else FULL for rotates in rotated]
    return {"rope_layers": rotated, **read_windows({**config, "layer_types": types})}


def _write_layers(arch: Architecture) -> Fields:
    rotated = arch.rope_layers or (True,) * arch.num_layers
    return {
        _LIST: [int(rotates) for rotates in rotated],
        **write_windows(arch),
        # transformers refuses a token of padding that the vocabulary lacks.
        **({"pad_token_id": None} if arch.vocab_size <= _PAD else {}),
    }


register(
    Family(
        name="smollm3",
        architecture=DenseDecoder,
        hf_class="SmolLM3ForCausalLM",
        defaults={
            **COMMON_DEFAULTS,
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 11_008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "layer_types": None,
            _LIST: None,
            _INTERVAL: 4,
        },
        weight_map=DENSE,
        nullable={"sliding_window": int, "layer_types": list, _LIST: list},
        read_layers=_read_layers,
        write_layers=_write_layers,
        presets={
            "smollm3-3b": DenseDecoder(
                family="smollm3",
                vocab_size=128_256,
                hidden_size=2048,
                num_layers=36,
                num_heads=16,
                num_kv_heads=4,
                head_dim=128,
                intermediate_size=11_008,
                max_positions=65_536,
                tie_embeddings=True,
                rope_theta=5e6,
                rope_layers=(True, True, True, False) * 9,
            )
        },
    )
)
