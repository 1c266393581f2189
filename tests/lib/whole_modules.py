"""Helpers of tests/models/parts/test_lora_whole.py that other tests use too."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from moetrain.models.hf.load import load_hf
from moetrain.models.hf.peft import attach_peft
from tests.lib.adapter_files import TOKENS_BS, logits_of, save_base
from tests.lib.adapters import MICRO, base_of, gradients_of
from tests.lib.engines import make_batches, objective_of

peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
PARTS = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}


def base_for(name):
    """Return the base settings without router losses, which PEFT lacks."""
    base = [w for w in base_of(name) if not w.startswith(("moe.aux", "moe.z"))]
    return [*base, "moe.aux_loss_coef=0", "moe.z_loss_coef=0"] if name == "moe" else base


def pefts(engine, name: str, folder: Path):
    """Load the files of ``engine`` as PEFT's model."""
    save_base(base_for(name), folder / "hf")
    engine.save_peft(folder / "adapter")
    load = transformers.AutoModelForCausalLM.from_pretrained
    base = load(folder / "hf", dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)


def check_logits(engine, model, folder: Path, atol: float, apart: float):
    """Check that the logits of ``model`` (:func:`pefts`), the engine and all readers agree.

    They differ from the base's by more than ``apart``.
    """
    want = model(TOKENS_BS).logits
    close = {"rtol": 0, "atol": atol}
    torch.testing.assert_close(logits_of(engine), want, **close)
    assert (load_hf(folder / "hf")(TOKENS_BS) - want).abs().max() > apart
    model.save_pretrained(folder / "theirs")
    for name in ("adapter", "theirs"):
        again = load_hf(folder / "hf")
        attach_peft(again, folder / name)
        torch.testing.assert_close(again(TOKENS_BS), want, **close)
    engine.save_hf(folder / "merged")
    load = transformers.AutoModelForCausalLM.from_pretrained
    for merged in (
        load_hf(folder / "merged")(TOKENS_BS),
        load(folder / "merged", dtype=torch.float32)(TOKENS_BS).logits,
    ):
        torch.testing.assert_close(merged, want, **close)


def gradients_beside(engine, model):
    """Return the gradients of one batch by PEFT's names in ``model``, and by ours in ``engine``."""
    (batch,) = make_batches(0)
    logits_TV = model(batch.tokens_BS).logits.flatten(0, 1)
    F.cross_entropy(logits_TV.double(), batch.targets_BS.flatten(), ignore_index=-100).backward()
    theirs = {n: x.grad for n, x in model.named_parameters() if x.requires_grad}
    engine.forward_backward(make_batches(0, MICRO), objective_of(engine))
    return theirs, gradients_of(engine)[1]
