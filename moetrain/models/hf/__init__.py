"""Hugging Face checkpoints: read, checked, loaded and written."""

from moetrain.models.hf.files import CONFIG, GENERATION, INDEX, SINGLE, resolve
from moetrain.models.hf.load import check_checkpoint, load_hf, load_weights
from moetrain.models.hf.peft import attach_peft
from moetrain.models.hf.save import save_hf

__all__ = [
    "CONFIG",
    "GENERATION",
    "INDEX",
    "SINGLE",
    "attach_peft",
    "check_checkpoint",
    "load_hf",
    "load_weights",
    "resolve",
    "save_hf",
]
