"""Time QLoRA with transformers, PEFT and bitsandbytes, on the model of one of our presets.

    python scripts/peer_qlora.py PRESET [--layers N] [--rows 1] [--seq-len 4096] [--steps 8]
        [--lora-rank 16] [--bf16-experts] [--device cuda]

It does what a user of these libraries would write. Linear layers are ``Linear4bit`` in nf4 with
double quantisation, and experts' stacked matrices are quantised by bitsandbytes'
``replace_parameter_4bit``. Adapters are on the attention's projections, layers are recomputed, and
the compute dtype is bf16. Weights and tokens are random. The last line holds
``<number> tok/s/gpu``, which ``scripts/bench_train.py --peer`` reads.

bitsandbytes is not a dependency of moetrain: ``pip install bitsandbytes``.
"""

import argparse
import statistics
import sys
import time
from typing import Any

import bitsandbytes as bnb  # pyright: ignore[reportMissingImports] - no dependency
import peft
import torch
import transformers
from bitsandbytes.nn.parametrize import (  # pyright: ignore[reportMissingImports]
    replace_parameter_4bit,
)
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from moetrain.config.sections import ModelSection
from moetrain.models.hf.config import exported_config
from moetrain.models.hf.load import resolve_architecture

WARM_UP = 3
NF4: dict[str, Any] = {"compress_statistics": True, "quant_type": "nf4"}


def model_of(preset: str, layers: int | None, device: str, *, experts_in_4bit: bool) -> Any:
    """Build the preset with random weights, and quantise its layers to nf4 one after another."""
    arch = resolve_architecture(ModelSection(preset=preset, num_layers=layers))
    values = exported_config(arch, None)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).bfloat16()
    for layer in model.model.layers:
        fill(layer, device)
        for owner in list(layer.modules()):
            for name, child in list(owner.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(owner, name, linear_4bit(child, device))
        experts = layer.mlp.experts if hasattr(layer.mlp, "experts") else None
        if experts is not None and experts_in_4bit:
            for name in ("gate_up_proj", "down_proj"):
                replace_parameter_4bit(experts, name, **NF4)
    fill(model, device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model


def fill(module: nn.Module, device: str) -> None:
    """Give parameters that are on the meta device random values on ``device``."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter.is_meta:
                values = torch.empty_like(parameter, device=device)
                values.fill_(1.0) if values.dim() < 2 else values.normal_(0, 0.02)
                setattr(owner, name, nn.Parameter(values, requires_grad=False))


def linear_4bit(plain: nn.Linear, device: str) -> nn.Module:
    """Return a linear layer quantised to nf4, on ``device``."""
    made = bnb.nn.Linear4bit(
        plain.in_features, plain.out_features, plain.bias is not None, torch.bfloat16, **NF4
    )
    made.weight = bnb.nn.Params4bit(plain.weight.data, requires_grad=False, **NF4)
    if plain.bias is not None:
        made.bias = nn.Parameter(plain.bias.data, requires_grad=False)
    return made.to(device)


def main() -> int:
    """Print each step's time, and tokens per second by the median without the warm-up steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("preset")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--bf16-experts", action="store_true", help="leave experts in bf16")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    model = model_of(args.preset, args.layers, args.device, experts_in_4bit=not args.bf16_experts)
    vocabulary = model.config.vocab_size
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    how = peft.LoraConfig(r=args.lora_rank, lora_alpha=32, target_modules=targets)
    model = peft.get_peft_model(model, how).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    tokens = torch.randint(0, vocabulary, (args.rows, args.seq_len), device=args.device)
    on_cuda, seconds = args.device == "cuda", []
    for step in range(args.steps):
        begun = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if on_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
        gib = torch.cuda.max_memory_allocated() / 2**30 if on_cuda else 0.0
        said = f"step {step}: {seconds[-1]:.3f} s, loss {loss.item():.3f}, {gib:.1f} GiB"
        print(said, flush=True)
    rate = tokens.numel() / statistics.median(seconds[WARM_UP:])
    versions = f"transformers {transformers.__version__}, PEFT {peft.__version__}"
    versions += f", bitsandbytes {bnb.__version__}"
    print(f"{versions}: {rate:.0f} tok/s/gpu", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
