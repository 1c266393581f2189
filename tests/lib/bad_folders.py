"""Helpers of tests/checkpoint/test_bad_folders.py that other tests use too."""

from pathlib import Path

from moetrain.models.hf.files import INDEX
from moetrain.models.hf.save import save_hf
from moetrain.models.transformer import Transformer
from tests.lib.architectures import make_architecture


def write_good(folder: Path) -> Path:
    """Write a checkpoint of two shards."""
    arch = make_architecture(
        family="qwen3_moe",
        vocab_size=264,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=12,
        max_positions=64,
        qk_norm=True,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=8,
    )
    model = Transformer(arch)
    model.init_weights(std=0.1, seed=0)
    save_hf(model, folder, max_shard_bytes=40_000)
    assert (folder / INDEX).exists()
    return folder
