"""On a GPU: attention backends agree, blocks compile whole, and the trainer trains in bf16."""

import pytest
import torch
import triton

from moetrain.config import Config
from moetrain.kernels import (
    attention,
    attention_mask,
    expert_indices,
    permute,
    swiglu,
    unpermute,
)
from moetrain.metrics import read_metrics
from moetrain.trainer import Trainer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["sdpa", "flex", "auto"])
def test_attention_backends_agree_with_fp32(backend, packed, window):
    batch, seq_len = 2, 256
    generator = torch.Generator("cuda").manual_seed(0)

    def random(heads):
        shape = (batch, seq_len, heads, 64)
        return torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16)

    positions = None
    if packed:
        positions = torch.cat([torch.arange(n) for n in (100, 156, 1, 255)]).view(batch, seq_len)
        positions = positions.cuda()
    inputs, upstream = [random(8), random(2), random(2)], random(8)
    results = {}
    for name, dtype in ((backend, torch.bfloat16), ("reference", torch.float32)):
        mask = attention_mask(
            positions,
            batch=batch,
            seq_len=seq_len,
            device=torch.device("cuda"),
            window=window,
            backend=name,
        )
        leaves = [x.detach().clone().to(dtype).requires_grad_() for x in inputs]
        out = attention(*leaves, mask)
        out.backward(upstream.to(dtype))
        results[name] = [out, *(x.grad for x in leaves)]
    for got, want in zip(results[backend], results["reference"], strict=True):
        assert (got.float() - want).norm() < 1e-2 * want.norm()


def train(folder, *words):
    """The logged losses of 20 steps of the debug model."""
    common = ["train.steps=20", "train.eval_interval=0", "train.sample_tokens=0", "log.interval=1"]
    common += [f"output_dir={folder}", f"data.cache_dir={folder.parent / 'cache'}"]
    trainer = Trainer(Config.load(None, [*common, *words], environ={}))
    assert trainer.device.type == "cuda"
    assert trainer.model.compute_dtype == torch.bfloat16
    trainer.fit()
    return torch.tensor([r["loss"] for r in read_metrics(trainer.log.path) if "loss" in r])


@pytest.mark.parametrize("source", ["stdlib", "synthetic"])
def test_compiled_bf16_training_follows_eager(source, tmp_path):
    eager = train(tmp_path / "eager", f"data.source={source}")
    compiled = train(tmp_path / "compiled", f"data.source={source}", "compile.enabled=yes")
    assert (eager - compiled).abs().max() < 0.02 * eager.max()
    if source == "stdlib":
        assert eager[-1] < 0.7 * eager[0]


@pytest.mark.parametrize("compiled", ["no", "yes"])
def test_the_kernels_follow_their_references(compiled, tmp_path):
    words = [f"compile.enabled={compiled}", "moe.z_loss_coef=0.001", "moe.bias_update_rate=0.001"]
    fast = train(tmp_path / "fast", *words)
    reference = train(
        tmp_path / "reference", *words, "kernels.backend=reference", "kernels.attention=flex"
    )
    assert (fast - reference).abs().max() < 0.02 * reference.max()


def test_deterministic_reruns_are_bitwise_equal(tmp_path):
    try:
        one, two = (train(tmp_path / name, "train.deterministic=yes") for name in ("one", "two"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(one, two)


def test_kernels_whose_sizes_routing_changes_are_compiled_once(monkeypatch):
    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **known: compiled.append(known["fn"])
    )
    generator = torch.Generator("cuda").manual_seed(0)
    for step, tokens in enumerate((1, 2, 15, 16, 17, 4096, 4100)):
        for dropped in (0, 1, 5, 8):
            ids_TK = torch.randint(16, (tokens, 8), device="cuda", generator=generator).int()
            num_rows = 8 * tokens - dropped
            indices = expert_indices(ids_TK, 16, num_rows=num_rows)
            x_TD = torch.randn(tokens, 64, device="cuda", requires_grad=True)
            x_RD, _ = permute(x_TD, torch.rand(tokens, 8, device="cuda"), indices)
            unpermute(swiglu(x_RD.repeat(1, 2), None), indices).sum().backward()
            if (step, dropped) == (0, 0):
                compiled.clear()
    assert not compiled
