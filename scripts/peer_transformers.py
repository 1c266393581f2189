"""Time the training steps of transformers with FSDP2, on the model of one of our presets.

    python scripts/peer_transformers.py PRESET [--layers N] [--rows 2] [--seq-len 4096] [--steps 8]
        [--attention sdpa] [--no-compile]
    torchrun --nproc-per-node 2 scripts/peer_transformers.py ...

What a user would write with transformers alone: ``fully_shard`` a layer and the whole, parameters
and AdamW's moments in fp32, products in bf16, experts by ``grouped_mm``, every layer compiled, and
the loss that the model itself computes. Weights and tokens are random. The last line holds
``<number> tok/s/gpu``, which ``scripts/bench_train.py --peer`` reads.
"""

import argparse
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from moetrain.config.sections import ModelSection
from moetrain.models.hf.config import exported_config
from moetrain.models.hf.load import resolve_architecture

WARM_UP = 3


def model_of(preset: str, layers: int | None, attention: str, compiles: bool) -> Any:
    """Build the preset in transformers, sharded over all ranks, with random weights."""
    arch = resolve_architecture(ModelSection(preset=preset, num_layers=layers))
    values = exported_config(arch, None)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config._attn_implementation = attention
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        if compiles:
            layer.compile()
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cuda")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local()
            local.fill_(1.0) if "norm" in name else local.normal_(0, 0.02)
        for buffer in model.buffers():
            buffer.zero_()
    angles = type(model.model.rotary_emb)(config)
    for name, buffer in angles.named_buffers():
        model.model.rotary_emb.get_buffer(name).copy_(buffer)
    return model.train()


def main() -> int:
    """Print the time of each step, and tokens a second of each GPU by the median of those timed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("preset")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rows", type=int, default=2, help="of each GPU")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    rank = int(os.environ.setdefault("RANK", "0"))
    for name, value in {
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29417",
    }.items():
        os.environ.setdefault(name, value)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl")
    model = model_of(args.preset, args.layers, args.attention, not args.no_compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    vocabulary = model.lm_head.out_features
    tokens = torch.randint(0, vocabulary, (args.rows, args.seq_len), device="cuda")
    seconds = []
    for step in range(args.steps):
        begun = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
        if rank == 0:
            gib = torch.cuda.max_memory_allocated() / 2**30
            print(
                f"step {step}: {seconds[-1]:.3f} s, loss {loss.item():.3f}, {gib:.1f} GiB",
                flush=True,
            )
    if rank == 0:
        rate = tokens.numel() / statistics.median(seconds[WARM_UP:])
        print(f"transformers {transformers.__version__}, FSDP2: {rate:.0f} tok/s/gpu", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
