"""Helpers of tests/models/hf/test_peft.py that other tests use too."""

import torch

from tests.lib.adapters import MICRO, adapted
from tests.lib.engines import make_engine

TOKENS_BS = torch.arange(24).view(2, 12)


def logits_of(engine):
    with engine.work(), torch.no_grad():
        return engine.model(TOKENS_BS)


def save_base(words, folder):
    """Write the model that the adapters belong to, without adapters."""
    plain = [w for w in words if not w.startswith("lora.")]
    engine = make_engine(base=plain, micro=MICRO)
    engine.save_hf(folder)
    return logits_of(engine)


def save_adapters(words, folder):
    adapted(*words).save_peft(folder)
