"""Time the attention layer of GLM-5 or DeepSeek-V3.2 in its dense and in its sparse form.

    python scripts/bench_sparse_attention.py [--preset glm-5] [--lengths 2048 4096 8192 16384 32768]
    python scripts/bench_sparse_attention.py --tune

A row says, for one length of a row of tokens and one form, the milliseconds of forward and backward
of the whole layer (its projections are the same in both forms, and so are the selected keys), the
memory that the two took at most beside weights and inputs, and for the sparse form the same
milliseconds of its op alone. Each token selects 2,048 keys at random, the first one of the row and
the last 64 among them. At 4,096 tokens errors against the plain formulas in fp32 are printed, and
whether a second run has the same bits. A last row for each length has the milliseconds of the
indexer's scores and selection.

Rows are printed as they come. What has not begun after ``--seconds`` is left out. ``--tune`` times
the op with other launch settings. Everything is bf16, and times are medians of device milliseconds.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton

from moetrain.config import KernelsSection, MoeSection
from moetrain.kernels.attention import sparse
from moetrain.kernels.attention.attention import AttentionMask
from moetrain.models.families import PRESETS
from moetrain.models.layers import Context
from moetrain.models.parts.indexer import Indexed, select_keys
from moetrain.models.parts.sparse_attention import SparseLatentAttention

CHECKED = 4096
"""The length at which results are compared."""
NEAR = 64
"""The last keys that every token selects."""
_BEGUN = time.monotonic()


def device_ms(function: Callable[[], object], seconds: float = 0.6) -> float:
    """Return the median device milliseconds of a call, from up to ten calls of ``seconds``."""
    function()
    times: list[float] = []
    while len(times) < 10 and sum(times) < 1e3 * seconds:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def selected(tokens: int, topk: int, device: str) -> torch.Tensor:
    """Return int32 [1, S, K]: random keys of each token; -1: none."""
    generator = torch.Generator(device).manual_seed(1)
    index_S = torch.arange(tokens, device=device)
    parts: list[torch.Tensor] = []
    for own_s in index_S.split(1024):
        scores_sS = torch.rand(len(own_s), tokens, generator=generator, device=device)
        distance_sS = own_s[:, None] - index_S
        scores_sS[:, 0] = 2
        scores_sS.masked_fill_(distance_sS < NEAR, 2).masked_fill_(distance_sS < 0, -1)
        found = scores_sS.topk(topk)
        parts.append(found.indices.masked_fill(found.values < 0, -1).int())
    return torch.cat(parts)[None]


class Layer:
    """An attention layer of a preset that is given its keys."""

    def __init__(self, part: SparseLatentAttention, form: str, device: str = "cuda") -> None:
        """``form``: dense, sparse, or exact: the dense form by plain formulas in fp32."""
        self.is_exact = form == "exact"
        kernels = KernelsSection(sparse_attention="dense" if self.is_exact else form)  # pyright: ignore[reportArgumentType]
        if self.is_exact:
            kernels = kernels.model_copy(update={"backend": "reference", "attention": "reference"})
        with torch.device(device):
            self.module = part.without_indexer.build(kernels, MoeSection())
        generator = torch.Generator(device).manual_seed(0)
        with torch.no_grad():
            for weight in self.module.parameters():
                if weight.dim() == 1:
                    weight.fill_(1.0)
                else:
                    weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
        self.module.bfloat16()
        if self.is_exact:  # of the same rounded weights
            self.module.float()
        self.part = part

    def context(self, keys_1SK: torch.Tensor | None, tokens: int, device: str) -> Context:
        pairs = self.part.qk_rope_head_dim // 2
        frequency_p = 1e6 ** -(torch.arange(pairs, device=device) / pairs)
        angles_1S1p = (torch.arange(tokens, device=device)[:, None] * frequency_p)[None, :, None]
        mask = AttentionMask("reference" if self.is_exact else "sdpa")
        rotation = (angles_1S1p.cos(), angles_1S1p.sin())
        if self.is_exact and keys_1SK is None:
            mask = AttentionMask.of(
                None, batch=1, seq_len=tokens, device=torch.device(device), backend="reference"
            )
        return Context(rotation=rotation, mask=mask, selected_BSK=keys_1SK)

    def __call__(self, x_1SD: torch.Tensor, context: Context) -> torch.Tensor:
        return self.module(x_1SD, context)[0]

    def gradients(
        self, x_1SD: torch.Tensor, context: Context, upstream_1SD: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the outputs and all gradients."""
        x_1SD = x_1SD.to(torch.float32 if self.is_exact else x_1SD.dtype).requires_grad_()
        y_1SD = self(x_1SD, context)
        names, weights = zip(*self.module.named_parameters(), strict=True)
        found = torch.autograd.grad(y_1SD, (x_1SD, *weights), upstream_1SD.to(y_1SD.dtype))
        return {"y": y_1SD.detach(), **dict(zip(("x", *names), found, strict=True))}


def inputs_of(part: SparseLatentAttention, tokens: int, device: str) -> list[torch.Tensor]:
    """Return the layer's inputs and its upstream gradients."""
    generator = torch.Generator(device).manual_seed(2)
    shape = (1, tokens, part.hidden_size)
    return [torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(2)]


def row(part: SparseLatentAttention, form: str, tokens: int) -> str:
    """Return the row of one form at one length."""
    keys = selected(tokens, part.index_topk, "cuda") if tokens > part.index_topk else None
    if keys is None and form == "sparse":
        return "every token selects all keys, so the layer is dense"
    layer, (x, upstream) = Layer(part, form), inputs_of(part, tokens, "cuda")
    context = layer.context(keys, tokens, "cuda")
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layer.gradients(x, context, upstream)
    extra = (torch.cuda.max_memory_allocated() - held) / 2**30
    with torch.no_grad():
        forward = device_ms(lambda: layer(x, context))
    both = device_ms(lambda: layer.gradients(x, context, upstream))
    words = f"forward {forward:.2f}, forward + backward {both:.2f} ms, {extra:.2f} GiB"
    if form == "sparse":
        assert keys is not None
        words += f"; the op alone {of_op(part, keys[0])}"
    return words


def of_op(part: SparseLatentAttention, keys_TK: torch.Tensor) -> str:
    """Return the times of the op alone, and the rates of its products."""
    q, kv, upstream = op_inputs(part, len(keys_TK))
    scale, c = part.scale, part.kv_lora_rank
    with torch.no_grad():
        forward = device_ms(lambda: sparse.sparse_attention(q, kv, keys_TK, scale, c))
    out = sparse.sparse_attention(q, kv, keys_TK, scale, c)
    backward = device_ms(lambda: torch.autograd.grad(out, (q, kv), upstream, retain_graph=True))
    pairs = 2 * part.num_heads * int((keys_TK >= 0).sum())
    w = q.shape[2]
    rates = [pairs * n / ms / 1e9 for n, ms in ((w + c, forward), (3 * w + 2 * c, backward))]
    return (
        f"{forward:.2f} + {backward:.2f} ms ({rates[0]:.0f} and {rates[1]:.0f} TFLOP/s of the "
        "products that are needed)"
    )


def op_inputs(part: SparseLatentAttention, tokens: int) -> list[torch.Tensor]:
    """Return queries, latents and upstream gradients of the op."""
    generator = torch.Generator("cuda").manual_seed(3)
    heads, c = part.num_heads, part.kv_lora_rank
    w = c + part.qk_rope_head_dim
    shapes = (tokens, heads, w), (tokens, w), (tokens, heads, c)
    found = [torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes]
    return [*(x.requires_grad_() for x in found[:2]), found[2]]


class Errors:
    """The errors of both forms against fp32, and whether a rerun has the same bits."""

    def __init__(self, part: SparseLatentAttention, tokens: int, device: str = "cuda") -> None:
        self.part, self.device = part, device
        self.keys = selected(tokens, part.index_topk, device)
        self.x, self.upstream = inputs_of(part, tokens, device)
        self.exact: dict[str, torch.Tensor] = {}

    def run(self, form: str) -> dict[str, torch.Tensor]:
        layer = Layer(self.part, form, self.device)
        context = layer.context(self.keys, self.x.shape[1], self.device)
        return layer.gradients(self.x, context, self.upstream)

    def row(self, form: str) -> str:
        """Return the row of one form."""
        first, second = self.run(form), self.run(form)
        self.exact = self.exact or self.run("exact")
        off = {
            n: (a.float() - self.exact[n]).norm() / self.exact[n].norm() for n, a in first.items()
        }
        unlike = [n for n, a in first.items() if not torch.equal(a, second[n])]
        listed = ", ".join(f"{name} {error.item():.1e}" for name, error in off.items())
        bits = f"other bits in {', '.join(unlike)}" if unlike else "the same bits"
        return f"errors {listed}; a second run has {bits}"


def selection(part: SparseLatentAttention, tokens: int) -> str:
    """Return the row of the indexer's scores and selection."""
    generator = torch.Generator("cuda").manual_seed(4)
    sizes = part.indexer
    heads, width = sizes.num_heads, sizes.head_dim
    shapes = (1, tokens, heads, width), (1, tokens, width), (1, tokens, heads)
    q, k, w = (torch.randn(shape, generator=generator, device="cuda") for shape in shapes)
    indexed = Indexed(q.bfloat16(), k.bfloat16(), w)
    last_1S = torch.arange(tokens, device="cuda")[None]
    seen_1S2 = torch.stack((torch.zeros_like(last_1S), last_1S), dim=-1)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ms = device_ms(lambda: select_keys(indexed, seen_1S2, sizes.topk))
    extra = (torch.cuda.max_memory_allocated() - held) / 2**30
    return f"{ms:.2f} ms, {extra:.2f} GiB"


def guarded(make: Callable[[], str]) -> str:
    """Return the row, or that memory does not suffice for it."""
    try:
        return make()
    except torch.cuda.OutOfMemoryError as error:
        return f"out of memory: {str(error).partition('. ')[0]}"
    finally:
        torch.cuda.empty_cache()


_FORWARD = ((8, 3, 64, 64), (8, 2, 64, 64), (8, 3, 64, 32), (8, 2, 64, 32), (8, 3, 32, 64))
_QUERIES = ((8, 3, 64, 32), (8, 2, 64, 32), (8, 1, 64, 64), (8, 3, 64, 16))
_TERMS = ((4, 2, 128, 64), (4, 2, 64, 64), (4, 2, 64, 128), (8, 2, 128, 128), (4, 3, 128, 64))


def tuned(part: SparseLatentAttention, tokens: int) -> Iterator[str]:
    """Yield the times of the op with other launch settings."""
    own: Any = sparse
    keys_TK = selected(tokens, part.index_topk, "cuda")[0]
    kept, launch, size = own._NARROW, own._Launch, own._TOKENS
    tries: list[tuple[str, Any]] = [
        *((f"forward {n}", kept._replace(forward=launch(*n))) for n in _FORWARD),
        *((f"queries {n}", kept._replace(queries=launch(*n, 64))) for n in _QUERIES),
        *((f"terms {n}", kept._replace(terms=launch(n[0], n[1], 0, *n[2:]))) for n in _TERMS),
    ]
    for name, launches in tries:
        own._NARROW = launches
        try:
            yield f"{name}: {of_op(part, keys_TK)}"
        except triton.runtime.errors.OutOfResources as error:
            yield f"{name}: {error}"
    own._NARROW = kept
    for number in (128, 256, 512, 1024):
        own._TOKENS = number
        yield f"tokens {number}: {of_op(part, keys_TK)}"
    own._TOKENS = size


def rows(preset: str, lengths: list[int], tune: bool) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield what each row is about, and what makes it."""
    part: Any = PRESETS[preset].attention(0)
    if tune:
        found = tuned(part, 8192)
        for number in range(len((*_FORWARD, *_QUERIES, *_TERMS)) + 4):
            yield f"setting {number}", lambda: next(found)
        return
    if CHECKED in lengths:
        checked = Errors(part, CHECKED)
        for form in ("sparse", "dense"):
            yield f"{CHECKED} tokens, {form}", lambda form=form: checked.row(form)
        del checked
    for tokens in lengths:
        for form in ("sparse", "dense"):
            yield f"{tokens} tokens, {form}", lambda form=form, n=tokens: row(part, form, n)
        yield f"{tokens} tokens, selection", lambda n=tokens: selection(part, n)


def main() -> int:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", default="glm-5", choices=("glm-5", "deepseek-v3.2"))
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16_384, 32_768]
    )
    parser.add_argument("--seconds", type=float, default=90, help="begin no row after these")
    parser.add_argument("--tune", action="store_true", help="time other launch settings")
    given = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    for name, make in rows(given.preset, given.lengths, given.tune):
        late = time.monotonic() - _BEGUN > given.seconds
        print(f"{name}: {'left out, for lack of time' if late else guarded(make)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
