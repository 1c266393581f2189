"""Helpers of tests/models/hf/test_export.py that other tests use too."""

from pathlib import Path

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

TEXT = "the cat sat on a mat. a dog and the cat sat down, 3 times."
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"


def make_tokenizer(folder: Path, seed_text: str = TEXT) -> None:
    """Write a byte-level BPE with special tokens and a template by ``transformers``."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "</s>", "<pad>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([seed_text] * 3, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
