"""Settings of the section ``model``: each changes the model that is built, or is refused."""

import json
import math
from functools import partial
from itertools import product

import pytest
import torch
from transformers import AutoConfig

from moetrain.config import Config, ConfigError
from moetrain.config.sections import ModelSection
from moetrain.models.families import PRESETS
from moetrain.models.hf.load import resolve_architecture
from moetrain.models.transformer import Transformer
from moetrain.train.session import resolve_run
from tests.lib.family_cases import CASES, FAMILY_CASES, SIZES

SETTINGS = [name for name in ModelSection.model_fields if name not in ("preset", "path")]
SIZES_OF_MODEL = [x for x in SETTINGS if x not in ("max_positions", "rope", "init_std")]


def resolved(preset, **values):
    return resolve_architecture(ModelSection(preset=preset, **values))


def tried(make, **values):
    """Return the result of ``make`` and None, or None and the setting that it refuses."""
    try:
        return make(**values), None
    except ConfigError as error:
        return None, error.field


def made_of(arch):
    """Return names and shapes of all parameters, and the arithmetic of a token's experts."""
    with torch.device("meta"):
        model = Transformer(arch)
    return {n: p.shape for n, p in model.named_parameters()}, arch.num_active_params()


def other_values(arch, name):
    """Return values that differ from the preset's: double, half and, for 0, a few others."""
    value = getattr(arch, name)
    return [value * 2, value // 2] if value > 1 else [4, 8]


# One preset of each architecture's class suffices: others differ only in sizes.
OF_FAMILY = {type(arch): name for name, arch in sorted(PRESETS.items())}.values()


@pytest.mark.parametrize("preset", OF_FAMILY)
def test_a_size_changes_what_a_preset_builds_or_is_refused(preset):
    few = {"num_layers": min(6, PRESETS[preset].num_layers)}
    plain = resolved(preset, **few)
    built, took = made_of(plain), set()
    for name in SIZES_OF_MODEL:
        for value in other_values(plain, name):
            other, refused = tried(partial(resolved, preset), **{**few, name: value})
            assert refused in (None, f"model.{name}")
            if other is not None:
                assert made_of(other) != built, name
                took.add(name)
    assert took >= {"vocab_size", "hidden_size", "num_layers"}


@pytest.mark.parametrize("preset", ["debug", "minimax-m2", "olmoe-1b-7b", "hunyuan-a13b"])
def test_a_width_of_layers_that_are_not_there_is_refused(preset):
    problem = f"'{preset}' has no layer that uses it; unset it"
    with pytest.raises(ConfigError, match=rf"model\.intermediate_size: 64, but preset {problem}"):
        resolved(preset, intermediate_size=64)


def logits_of(arch):
    """Return a model's logits at positions beyond its trained range."""
    model = Transformer(arch)
    model.init_weights(0.2, seed=0)
    with torch.no_grad():
        return model(torch.arange(96)[None] % arch.vocab_size)


ROPES = ["yarn", "linear"]
BY_LAYER = ("gemma4_text", "laguna", "step3p5")
UNROTATED = ("nemotron_h", "granitemoehybrid", "kimi_linear")
ROPE_REFUSED = {*product((*UNROTATED, *BY_LAYER, "hunyuan_v1_moe"), ROPES)}
ROPE_REFUSED |= {("gpt_oss", "linear"), ("mistral4", "linear")}
"""Architectures that cannot stretch their rotary embeddings: heads of UNROTATED do not rotate,
those of BY_LAYER rotate differently by layer, HunYuan is stretched already, by NTK, and
GPT-OSS and Mistral 4 by yarn."""


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("case", FAMILY_CASES)
def test_rope_changes_a_familys_logits_or_is_refused(case, rope, tmp_path):
    config = AutoConfig.for_model(case, **{**SIZES, **CASES[case]})
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))

    def made(**values):
        section = ModelSection(path=str(tmp_path), **values)
        return resolve_architecture(section, needs_weights=False)

    plain = made()
    stretched, refused = tried(made, max_positions=4 * plain.reach, rope=rope)
    assert refused == ("model.rope" if (case, rope) in ROPE_REFUSED else None)
    if stretched is not None:
        assert (logits_of(stretched) - logits_of(plain)).abs().max() > 1e-3


@pytest.mark.parametrize("preset", OF_FAMILY)
def test_max_positions_bounds_rows(preset):
    words = [f"model.preset={preset}", "model.max_positions=64", "data.source=synthetic"]
    words += ["train.device=cpu", "data.eval_fraction=0"]
    resolve_run(Config.load(None, [*words, "data.seq_len=64"], environ={}))
    with pytest.raises(ConfigError, match=r"data\.seq_len: 65 is more than the 64 positions"):
        resolve_run(Config.load(None, [*words, "data.seq_len=65"], environ={}))


def test_rows_of_a_model_without_rotary_embeddings_may_be_longer_than_it_says():
    preset = "nemotron-3-nano-30b-a3b"
    longest = PRESETS[preset].max_positions
    assert resolved(preset, max_positions=2 * longest).max_positions == 2 * longest
    with pytest.raises(ConfigError, match=r"model\.rope: 'yarn', but .* no rotary .* unset it"):
        resolved(preset, max_positions=2 * longest, rope="yarn")
    words = [f"model.preset={preset}", f"data.seq_len={longest + 1}", "data.source=synthetic"]
    with pytest.raises(ConfigError, match=r"lower it, or raise model\.max_positions$"):
        resolve_run(Config.load(None, words, environ={}))


@pytest.mark.parametrize("preset", OF_FAMILY)
def test_init_std_is_what_every_familys_matrices_are_drawn_with(preset):
    rules = PRESETS[preset].plan().parameters
    drawn = [name for name, rule in rules.items() if rule.init == "normal"]
    assert {"embed.weight"} < {*drawn}
    # Norms and biases are not drawn.
    assert math.isclose(len(drawn) / len(rules), 0.5, abs_tol=0.45)


_OF_BOTH = ("max_positions", "rope", "vocab_size")


@pytest.mark.parametrize("name", [x for x in SETTINGS if x not in _OF_BOTH])
def test_a_checkpoint_decides_its_sizes_itself(name):
    words = ["model.path=no/such/model", f"model.{name}=8", "data.source=synthetic"]
    with pytest.raises(ConfigError, match=rf"model\.{name}: 8(\.0)? contradicts model\.path"):
        Config.load(None, words, environ={})
