"""Time the training steps of transformers with FSDP2, on the model of one of our presets.

    python scripts/peer_transformers.py PRESET [--layers N] [--rows 2] [--seq-len 4096] [--steps 8]
        [--attention sdpa] [--no-compile] [--checkpoint]
    torchrun --nproc-per-node 2 scripts/peer_transformers.py ... [--context-parallel]

It does what a user of transformers alone would write. ``fully_shard`` is applied to each layer and
to the whole model. Parameters and AdamW's moments are fp32, products are bf16, experts use
``grouped_mm``, every layer is compiled, and the model itself computes the loss. Weights and tokens
are random. The last line holds ``<number> tok/s/gpu``, which ``scripts/bench_train.py --peer``
reads.

With ``--context-parallel`` all ranks share each row by torch's own context parallelism. The loss is
then computed in pieces, since the logits of long rows would not fit.
"""

import argparse
import contextlib
import os
import statistics
import sys
import time
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from moetrain.config.sections import ModelSection
from moetrain.models.hf.config import exported_config
from moetrain.models.hf.load import resolve_architecture

WARM_UP = 3
PIECES = 32  # pieces of the loss, with context parallelism


def loss_in_pieces(
    model: Any, input_ids: torch.Tensor, labels: torch.Tensor, **how: Any
) -> torch.Tensor:
    """Compute the mean loss of these tokens, in pieces: only one piece's logits exist at a time."""

    def piece(hidden_BSD: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        logits = model.lm_head(hidden_BSD).float().flatten(0, 1)
        return F.cross_entropy(logits, labels_BS.flatten(), reduction="sum")

    hidden_BSD = model.model(input_ids=input_ids, **how).last_hidden_state
    pairs = zip(hidden_BSD.chunk(PIECES, 1), labels.chunk(PIECES, 1), strict=True)
    losses = [checkpoint(piece, *pair, use_reentrant=False) for pair in pairs]
    return torch.stack(losses).sum() / labels.numel()


def model_of(
    preset: str, layers: int | None, attention: str, compiles: bool, in_pieces: bool
) -> Any:
    """Build the preset in transformers, sharded over all ranks, with random weights."""
    arch = resolve_architecture(ModelSection(preset=preset, num_layers=layers))
    values = exported_config(arch, None)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config._attn_implementation = attention
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).float()
    if in_pieces:
        model.forward = MethodType(loss_in_pieces, model)
        # Without this, transformers takes positions out of order for packed rows, and makes an
        # S x S mask.
        module: Any = sys.modules[type(model).__module__]
        module.create_causal_mask = lambda **_: None
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


@contextlib.contextmanager
def row_parts(tokens: torch.Tensor) -> Any:
    """Yield this rank's part of the rows. Within the context attention sees all parts."""
    from torch.distributed.tensor.experimental import context_parallel

    positions = torch.arange(tokens.shape[1], device="cuda").expand(tokens.shape).contiguous()
    parts = {"input_ids": tokens.clone(), "labels": tokens.roll(-1, 1), "position_ids": positions}
    buffers = [*parts.values()]
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    with context_parallel(
        mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
    ):
        yield parts


def main() -> int:
    """Print each step's time, and tokens per second and GPU by the median without the warm-up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("preset")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rows", type=int, default=2, help="rows on each GPU")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--checkpoint", action="store_true", help="recompute layers")
    parser.add_argument("--context-parallel", action="store_true")
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
    shares = args.context_parallel
    model = model_of(args.preset, args.layers, args.attention, not args.no_compile, shares)
    if args.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    vocabulary = model.lm_head.out_features
    tokens = torch.randint(0, vocabulary, (args.rows, args.seq_len), device="cuda")
    own = tokens.numel() / (dist.get_world_size() if shares else 1)
    seconds = []
    for step in range(args.steps):
        begun = time.perf_counter()
        with row_parts(tokens) if shares else contextlib.nullcontext() as parts:
            given = parts or {"input_ids": tokens, "labels": tokens}
            found = model(**given, use_cache=False)
            loss = found if shares else found.loss
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
        rate = own / statistics.median(seconds[WARM_UP:])
        how = "FSDP2, context parallel" if shares else "FSDP2"
        print(f"transformers {transformers.__version__}, {how}: {rate:.0f} tok/s/gpu", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
