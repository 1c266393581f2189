"""Hugging Face checkpoints: read, checked, loaded and written."""

from moetrain.models.hf.files import CONFIG, GENERATION, INDEX, SINGLE, resolve
from moetrain.models.hf.load import check_checkpoint, load_hf, load_weights, read_checkpoint_config
from moetrain.models.hf.save import save_hf

__all__ = [
    "CONFIG",
    "GENERATION",
    "INDEX",
    "SINGLE",
    "check_checkpoint",
    "load_hf",
    "load_weights",
    "read_checkpoint_config",
    "resolve",
    "save_hf",
]
