"""Families that transformers does not know, with the layers and the files of one that it knows.

A family is tested here as soon as it is registered: its base has the same architecture class and
the same weight map.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moetrain.models.families import FAMILIES
from moetrain.models.hf.config import exported_config
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.save import save_hf
from moetrain.models.transformer import Transformer
from tests.lib import family_cases, small_models

CASES = {name.split()[0]: case for name, case in reversed(small_models.CASES.items())}
CASES |= {name: family_cases.CASES[name] for name in family_cases.FAMILY_CASES}
"""A small model of each family that transformers knows."""


def base_of(name):
    """Return the family that ``name`` is a copy of; None: it has layers or files of its own."""
    own = FAMILIES[name].architecture, FAMILIES[name].weight_map
    found = (x for x in CASES if (FAMILIES[x].architecture, FAMILIES[x].weight_map) == own)
    return next(found, None)


COPIES = {name: base_of(name) for name in FAMILIES if name not in CONFIG_MAPPING}


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name, base in COPIES.items() if base is not None])
def test_a_copy_is_its_base_by_another_name(name, tmp_path):
    """It has the logits of the base with the copy's fields, and writes the files that it read."""
    torch.manual_seed(0)
    sizes = {**family_cases.SIZES, **CASES[COPIES[name]]}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(COPIES[name], **sizes)).save_pretrained(
        tmp_path / "in"
    )
    base = load_hf(tmp_path / "in")
    path = tmp_path / "in" / "config.json"
    config = {**json.loads(path.read_text()), "model_type": name, "auto_map": {"a": "b"}}
    path.write_text(json.dumps(config))
    model = load_hf(tmp_path / "in")
    fields = {key: value for key, value in model.arch if key != "family"}
    reference = Transformer(base.arch.model_copy(update=fields))
    reference.load_state_dict(base.state_dict())
    tokens_BS = family_cases.tokens(2, 9)
    assert torch.equal(model(tokens_BS), reference(tokens_BS))
    save_hf(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    want, got = (load_file(tmp_path / f / "model.safetensors") for f in ("in", "out"))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)
    changed = exported_config(model.arch.model_copy(update={"max_positions": 99}), config)
    assert changed["model_type"] == name
    assert changed[FAMILIES[name].keys["max_positions"]] == 99
