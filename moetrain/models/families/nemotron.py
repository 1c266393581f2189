"""Nemotron-3 (``nemotron_h``): a hybrid of Mamba-2 mixers, experts and some attention.

A block has one part: a Mamba-2 mixer, attention without positional embeddings, experts with squared
ReLU and DeepSeek-V3's router, or a dense layer with squared ReLU. A config.json lists the parts in
``layers_block_type``, or, as published ones do, in ``hybrid_override_pattern``.

As in transformers, a Mamba time step dt is at least ``time_step_min``, and ``time_step_limit`` has
no effect. A ``time_step_limit`` that would clip steps is refused. When transformers generates one
token from its cache, dt has no lower bound; here generation uses the same formulas as training.
Multi-token prediction is not supported, but an export copies its tensors (``mtp``).
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from moetrain.models.architecture import Architecture, ConfigJson, Fields, Part
from moetrain.models.attention import GroupedQueryAttention
from moetrain.models.decoders import COMMON_DEFAULTS, StackExperts, renamed
from moetrain.models.family import Family, Rename, WeightMap, register
from moetrain.models.hf.files import error
from moetrain.models.parts.deepseek_router import DEEPSEEK_FIELDS, SIGMOID_ROUTER
from moetrain.models.parts.mamba import Mamba2, check_step_limit, mamba_map
from moetrain.models.parts.squared_relu import SquaredReLU, SquaredReLUExperts

_Mixer = Literal["mamba", "attention", "moe", "mlp"]
_LETTERS: Mapping[str, _Mixer] = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
"""The letters of ``hybrid_override_pattern``."""
_NEWER: Mapping[str, _Mixer] = {"linear_attention": "mamba", "full_attention": "attention"}
"""The names that transformers 5 writes in ``layers_block_type``."""
_DEFAULT = ["mamba", "moe", "attention", "mlp"]


class _NemotronH(Architecture):
    """A decoder with one part in each block."""

    kinds = (GroupedQueryAttention, SquaredReLUExperts, SquaredReLU, Mamba2)

    mixers: tuple[_Mixer, ...] = ()
    """The part of each block; empty: attention in all blocks."""
    mamba_num_heads: int = 0
    mamba_head_dim: int = 0
    mamba_num_groups: int = 0
    mamba_state_dim: int = 0
    mamba_conv_kernel_dim: int = 0
    mamba_conv_bias: bool = True
    mamba_min_step: float = 0.0
    moe_latent_size: int = 0

    def block(self, layer: int) -> tuple[Part, ...]:
        if len(self.mixers) not in (0, self.num_layers):
            problem = f"mixers names {len(self.mixers)} layers"
            raise ValueError(f"{problem}, but num_layers is {self.num_layers}")
        mixer = self.mixers[layer] if self.mixers else "attention"
        if mixer in ("mamba", "attention"):
            kind = Mamba2 if mixer == "mamba" else GroupedQueryAttention
            return (kind.of(self, window=None),)
        return ((SquaredReLUExperts if mixer == "moe" else SquaredReLU).of(self),)

    @property
    def sent_size(self) -> int:
        return self.moe_latent_size or self.hidden_size


# ---- config.json -------------------------------------------------------------------------------

_OFF = ("use_bias", "mlp_bias", "attention_bias", "mamba_proj_bias", "tie_word_embeddings")
_OFF += ("residual_in_fp32", "sliding_window")
"""Keys that must be false or null."""
_GIVEN: Fields = {"n_shared_experts": 1, "mamba_hidden_act": "silu"}
"""Keys with a single supported value."""


def _read_layers(config: ConfigJson) -> Fields:
    """Read the blocks' parts, and refuse unsupported values."""
    for key in _OFF:
        if config.get(key):
            problem = f"{key} {config[key]!r:.80} is not supported"
            raise error("config.json", f"{problem}; use a model without")
    for key, value in _GIVEN.items():
        if config[key] != value:
            problem = f"{key} {config[key]!r:.80} is not supported, only {value!r}"
            raise error("config.json", problem)
    check_step_limit(config)
    if config["moe_shared_expert_intermediate_size"] == 0:
        raise error("config.json", "moe_shared_expert_intermediate_size is 0, expected 1 or more")
    types = config["layers_block_type"]
    pattern = config["hybrid_override_pattern"]
    if types is None:
        types = _DEFAULT if pattern is None else [_LETTERS.get(x, x) for x in pattern]
    mixers = tuple(_NEWER.get(x, x) if isinstance(x, str) else repr(x) for x in types)
    unknown = sorted(set(mixers) - set(get_args(_Mixer)))
    if unknown or not mixers:
        found = ", ".join(unknown) or "without blocks"
        raise error("config.json", f"layers_block_type {found:.80} are not supported")
    none = {} if "moe" in mixers else {"num_experts": 0}
    latent = config["moe_latent_size"] or 0
    return {"num_layers": len(mixers), "mixers": mixers, "moe_latent_size": latent} | none


def _write_layers(arch: Architecture) -> Fields:
    assert isinstance(arch, _NemotronH)
    letters = {mixer: letter for letter, mixer in _LETTERS.items()}
    mixers = arch.mixers or ("attention",) * arch.num_layers
    return {
        "hybrid_override_pattern": "".join(letters[mixer] for mixer in mixers),
        "moe_latent_size": arch.moe_latent_size or None,
        "mlp_hidden_act": "relu2",
    }


# ---- weights -----------------------------------------------------------------------------------

_OURS = "layers.{layer}"
_THEIRS = "backbone.layers.{layer}"
_MIXER = f"{_THEIRS}.mixer"
_EXPERT = f"{_MIXER}.experts.{{expert}}"


_MAP: WeightMap = (
    Rename("embed", "backbone.embeddings"),
    Rename(f"{_OURS}.attn_norm", f"{_THEIRS}.norm"),
    Rename(f"{_OURS}.mlp_norm", f"{_THEIRS}.norm"),
    *(Rename(f"{_OURS}.attn.w{x}", f"{_MIXER}.{x}_proj") for x in "qkvo"),
    *(Rename(f"{_OURS}.mlp.w_{x}", f"{_MIXER}.{x}_proj") for x in ("up", "down")),
    *mamba_map(f"{_OURS}.mamba", _MIXER, lambda arch: Mamba2.of(arch, window=None)),
    Rename(f"{_OURS}.moe.router.weight", f"{_MIXER}.gate.weight"),
    Rename(f"{_OURS}.moe.router.bias", f"{_MIXER}.gate.e_score_correction_bias"),
    *(
        Rename(f"{_OURS}.moe.shared_experts.w_{x}", f"{_MIXER}.shared_experts.{x}_proj")
        for x in ("up", "down")
    ),
    Rename(f"{_OURS}.moe.to_latent", f"{_MIXER}.fc1_latent_proj"),
    Rename(f"{_OURS}.moe.from_latent", f"{_MIXER}.fc2_latent_proj"),
    *(
        StackExperts(f"{_OURS}.moe.experts.w_{x}", (f"{_EXPERT}.{x}_proj.weight",))
        for x in ("up", "down")
    ),
    Rename("norm", "backbone.norm_f"),
    Rename("lm_head", "lm_head"),
)

# ---- the family --------------------------------------------------------------------------------

_FIXED: Fields = {**SIGMOID_ROUTER, "partial_rotary_factor": 0.0, "tie_embeddings": False}
_COMMON = {key: COMMON_DEFAULTS[key] for key in COMMON_DEFAULTS if key != "rms_norm_eps"}


def _preset(pattern: str, **sizes: Any) -> _NemotronH:
    return _NemotronH(
        family="nemotron_h",
        vocab_size=131_072,
        num_layers=len(pattern),
        mixers=tuple(_LETTERS[letter] for letter in pattern),
        num_heads=32,
        num_kv_heads=2,
        head_dim=128,
        max_positions=262_144,
        norm_eps=1e-5,
        mamba_head_dim=64,
        mamba_num_groups=8,
        mamba_state_dim=128,
        mamba_conv_kernel_dim=4,
        mamba_min_step=0.001,
        **sizes,
        **_FIXED,
    )


register(
    Family(
        name="nemotron_h",
        architecture=_NemotronH,
        hf_class="NemotronHForCausalLM",
        defaults={
            **_COMMON,
            "hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "vocab_size": 131072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 21504,
            "max_position_embeddings": 4096,
            "layer_norm_epsilon": 1e-5,
            "layers_block_type": None,
            "hybrid_override_pattern": None,
            **dict.fromkeys(("use_bias", "mlp_bias", "attention_bias", "mamba_proj_bias"), False),
            "residual_in_fp32": False,
            "sliding_window": None,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "time_step_min": 0.001,
            "time_step_limit": None,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "moe_latent_size": None,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        },
        weight_map=_MAP,
        fields={
            **DEEPSEEK_FIELDS,
            "norm_eps": "layer_norm_epsilon",
            "shared_intermediate_size": "moe_shared_expert_intermediate_size",
            "mamba_num_heads": "mamba_num_heads",
            "mamba_head_dim": "mamba_head_dim",
            "mamba_num_groups": "n_groups",
            "mamba_state_dim": "ssm_state_size",
            "mamba_conv_kernel_dim": "conv_kernel",
            "mamba_conv_bias": "use_conv_bias",
            "mamba_min_step": "time_step_min",
        },
        fixed={**_FIXED, "qkv_bias": False, "out_bias": False, "mlp_bias": False},
        aliases={"num_local_experts": "n_routed_experts", "mlp_hidden_act": "hidden_act"},
        nullable={
            "layers_block_type": list,
            "hybrid_override_pattern": str,
            "time_step_limit": list,
            "sliding_window": int,
            "moe_latent_size": int,
        },
        lora_layout="fused",
        modules=renamed(_MAP, lambda name: name.replace("backbone.", "model.", 1)),
        experts="mixer.experts",
        unadaptable="*.mamba.wo.weight",
        activation="relu2",
        read_layers=_read_layers,
        write_layers=_write_layers,
        # The sizes are from memory, and Super's order of blocks is that of NVIDIA's scripts. The
        # totals are the published ones: 31.6 billion, 3.2 of them active (3.6 with the embedding),
        # and 120.67 billion, 12.2 of them active (12.8).
        presets={
            "nemotron-3-nano-30b-a3b": _preset(
                "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
                hidden_size=2688,
                intermediate_size=1856,
                mamba_num_heads=64,
                num_experts=128,
                num_experts_per_token=6,
                moe_intermediate_size=1856,
                shared_intermediate_size=3712,
                routed_scaling_factor=2.5,
            ),
            "nemotron-3-super-120b-a12b": _preset(
                "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*"
                "EMEMEMEME",
                hidden_size=4096,
                intermediate_size=2688,
                mamba_num_heads=128,
                num_experts=512,
                num_experts_per_token=22,
                moe_intermediate_size=2688,
                moe_latent_size=1024,
                shared_intermediate_size=5376,
                routed_scaling_factor=5.0,
            ),
        },
    )
)
