"""Helpers of tests/data/test_new_tokens.py that other tests use too."""

from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.lib.exports import make_tokenizer

NEW = ["<|tool|>", "<|result|>", "<|over|>"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64}
SIZES |= {"bos_token_id": 0, "eos_token_id": [1, 3], "pad_token_id": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
BASE = ["train.device=cpu", "compile.enabled=no", "data.source=text", "data.path=no/such/data"]
BASE += ["output_dir=/no/such/folder", "data.seq_len=12", "train.global_batch_size=8"]


def make_checkpoint(folder: Path, *, tied: bool = False, rows: int = 0) -> int:
    """Write a model and a tokenizer with ``transformers``; return the number of tokens."""
    make_tokenizer(folder)
    tokens = len(AutoTokenizer.from_pretrained(folder))
    about = {**SIZES, "vocab_size": rows or tokens, "tie_word_embeddings": tied}
    kind, about = ("qwen3", about) if tied else ("qwen3_moe", about | EXPERTS)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **about)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return tokens


def words_for(folder: Path, *words: str) -> list[str]:
    return [*BASE, f"model.path={folder}", f"data.new_tokens={','.join(NEW)}", *words]
