"""Tensor parallel parts by themselves: vocabulary over ranks, biases, impossible layouts.

tests/system/test_parallel.py compares whole runs with a single process.
"""

import pytest
import torch
import torch.distributed as dist

import moetrain
from moetrain.config import Config, ConfigError
from moetrain.kernels.vocabulary.chunk import soft_capped
from moetrain.kernels.vocabulary.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_sum,
)
from moetrain.models.hf.load import resolve_architecture
from moetrain.models.transformer import Transformer
from moetrain.parallel.tensor import ShardedVocabulary
from moetrain.parallel.world import plan_world
from tests.lib.architectures import make_architecture
from tests.lib.distributed import spawn
from tests.lib.one_answer import run, words_of

RANKS, VOCABULARY, WIDTH, TEMPERATURE = 3, 11, 16, 0.7  # 4, 4 and 3 rows
ROWS = 2, 6  # tokens


def make_case(dtype):
    generator = torch.Generator().manual_seed(0)
    tokens = ROWS[0] * ROWS[1]
    h_TD = torch.randn(tokens, WIDTH, generator=generator, dtype=dtype)
    w_VD = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=dtype)
    targets_T = torch.randint(VOCABULARY, (tokens,), generator=generator)
    targets_T[3] = -100
    # Each rank's weights of (loss, lse, entropy) of each token.
    slopes_R3T = torch.randn(RANKS, 3, tokens, generator=generator, dtype=dtype)
    return h_TD, w_VD, targets_T, slopes_R3T


def leaf(x):
    return x.clone().requires_grad_()


def close(got, want, tolerance=1e-12):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * want.abs().max().item())


def summed(x):
    dist.all_reduce(x)
    return x


def check_vocabulary(softcap):
    rank, group, how = dist.get_rank(), dist.group.WORLD, {"softcap": softcap}
    vocabulary = ShardedVocabulary(VOCABULARY, group, "auto", **how)
    rows = slice(4 * rank, min(4 * rank + 4, VOCABULARY))
    assert vocabulary.rows == rows
    h_TD, w_VD, targets_T, slopes_R3T = make_case(torch.float64)

    # Per-token results are equal everywhere; gradients for different weights add up. The backward
    # runs twice, because it must leave saved tensors unchanged.
    h, w = leaf(h_TD), leaf(w_VD)
    how |= {"temperature": TEMPERATURE, "backend": "reference"}
    want = linear_cross_entropy(h, w, targets_T, **how)
    (torch.stack(want) * slopes_R3T.sum(0)).sum().backward()
    mine_h, mine_w = leaf(h_TD), leaf(w_VD[rows])
    got = vocabulary.token_losses(mine_h, mine_w, targets_T, temperature=TEMPERATURE)
    close(torch.stack(got), torch.stack(want))
    objective = (torch.stack(got) * slopes_R3T[rank]).sum()
    for _ in range(2):
        mine_h.grad = mine_w.grad = None
        objective.backward(retain_graph=True)
        close(summed(mine_h.grad.clone()), h.grad)
        close(mine_w.grad, w.grad[rows])

    # Logits
    h, w = leaf(h_TD), leaf(w_VD)
    slopes_RTV = torch.stack([(r + 1) * torch.arange(11.0).sin().double() for r in range(RANKS)])
    want = soft_capped(h @ w.T, softcap)
    (want * slopes_RTV.sum(0)).sum().backward()
    mine_h, mine_w = leaf(h_TD.float()), leaf(w_VD[rows].float())
    got = vocabulary.logits(mine_h.view(*ROWS, WIDTH), mine_w)
    assert got.shape == (*ROWS, VOCABULARY)
    close(got.flatten(0, 1), want.float(), 1e-5)
    (got * slopes_RTV[rank].float()).sum().backward()
    close(summed(mine_h.grad), h.grad.float(), 1e-5)
    close(mine_w.grad, w.grad[rows].float(), 1e-5)

    # The embedding: this rank's tokens; gradients of its rows come from every rank.
    tokens_BS = targets_T.clamp(min=0).view(ROWS)
    w = leaf(w_VD.float())
    part = slice(4 * rank, 4 * rank + 4)  # of 12 tokens
    slope_TD = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1))
    want = w[tokens_BS.flatten()]
    (want * slope_TD).sum().backward()
    mine_w = leaf(w_VD[rows].float())
    got = vocabulary.embed(tokens_BS, mine_w)
    close(got[0], want[part], 1e-6)
    (got[0] * slope_TD[part]).sum().backward()
    close(mine_w.grad, w.grad[rows], 1e-6)


def check_loss_sum(backend, softcap):
    how = {"softcap": softcap}
    vocabulary = ShardedVocabulary(VOCABULARY, dist.group.WORLD, backend, **how)
    h_TD, w_VD, targets_T, slopes_R3T = make_case(torch.float32)
    weights_T = slopes_R3T[0, 0].abs()
    h, w = leaf(h_TD), leaf(w_VD)
    want = linear_cross_entropy_sum(h, w, targets_T, weights_T, backend="reference", **how)
    (3 * want.total).backward()
    mine_h, mine_w = leaf(h_TD), leaf(w_VD[vocabulary.rows])
    got = vocabulary.loss_sum(mine_h, mine_w, targets_T, weights_T)
    (3 * got.total).backward()
    tolerance = 1e-5
    close(summed(got.total.detach().clone()), want.total.detach(), tolerance)
    for mine, whole in zip(got[1:], want[1:], strict=True):
        assert not mine.requires_grad
        close(mine, whole, tolerance)
    close(summed(mine_h.grad), h.grad, tolerance)
    close(mine_w.grad, w.grad[vocabulary.rows], tolerance)
    with torch.no_grad():
        share = vocabulary.loss_sum(h_TD, w_VD[vocabulary.rows], targets_T, weights_T).total
    close(share, got.total.detach(), tolerance)


def vocabulary_on_a_rank():
    for softcap in (0.0, 1.5):
        check_vocabulary(softcap)
        check_loss_sum("reference", softcap)
        if not torch.cuda.is_available():
            check_loss_sum("triton", softcap)


def test_a_vocabulary_over_three_ranks():
    spawn(RANKS, vocabulary_on_a_rank)


# Vocabulary, ranks and tokens; ranks hold different numbers of rows, down to one.
UNEVEN = [(5, 2, 128), (5, 3, 65), (7, 2, 200), (7, 4, 130), (151, 3, 64), (151, 4, 129), (5, 2, 1)]


def uneven_vocabularies_on_a_rank():
    """Check chunk sizes: they follow the rank with fewest rows, and the others would want more."""
    groups = {size: dist.new_group(range(size)) for size in {size for _, size, _ in UNEVEN}}
    for vocab_size, size, tokens in UNEVEN:
        if dist.get_rank() >= size:
            continue
        fewest = vocab_size - (size - 1) * -(-vocab_size // size)
        vocabulary = ShardedVocabulary(vocab_size, groups[size], "triton", tokens * fewest)
        generator = torch.Generator().manual_seed(0)
        h_TD = torch.randn(tokens, 16, generator=generator)
        w_VD = torch.randn(vocab_size, 16, generator=generator)
        targets_T = torch.randint(vocab_size, (tokens,), generator=generator)
        h, w = leaf(h_TD), leaf(w_VD)
        want = linear_cross_entropy(h, w, targets_T, backend="reference")
        want.loss_T.sum().backward()
        for whole_sum in (True, False):  # gradients in the forward, and in the backward
            mine_h, mine_w = leaf(h_TD), leaf(w_VD[vocabulary.rows])
            if whole_sum:
                weights_T = torch.ones(tokens)
                total = vocabulary.loss_sum(mine_h, mine_w, targets_T, weights_T).total
            else:
                total = vocabulary.token_losses(mine_h, mine_w, targets_T).loss_T.sum() / size
            total.backward()
            dist.all_reduce(mine_h.grad, group=groups[size])
            close(total.detach() * size, want.loss_T.sum().detach(), 1e-5)
            close(mine_h.grad, h.grad, 1e-5)
            close(mine_w.grad, w.grad[vocabulary.rows], 1e-5)


@pytest.mark.tier("long")
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
def test_ranks_with_different_numbers_of_rows_take_the_same_chunks():
    spawn(4, uneven_vocabularies_on_a_rank, timeout=180)


def run_on_a_rank(words):
    answer = run(words)
    return answer if dist.get_rank() == 0 else None


def test_biases_of_matrices_that_are_cut_or_added_up(tiny_words, tmp_path):
    arch = make_architecture(
        family="llama",
        vocab_size=264,
        hidden_size=16,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=12,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )
    model = Transformer(arch)
    model.init_weights(std=0.3, seed=0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    moetrain.save_hf(model, tmp_path / "hf")
    words = [w for w in words_of(tiny_words) if not w.startswith(("model.", "moe."))]
    words += [f"model.path={tmp_path / 'hf'}", "data.tokenizer=byte", "train.micro_batch_size=8"]
    numbers, gradients, _ = run(words)
    got, mine, _ = spawn(2, run_on_a_rank, [*words, "parallel.tp=2"])[0]
    torch.testing.assert_close(got, numbers, rtol=1e-5, atol=0)
    assert sum(name.endswith("bias") for name in gradients) == 2 * 7
    for name, gradient in gradients.items():
        close(mine[name], gradient, 1e-5)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train.micro_batch_size=1", "data.seq_len=33"], "does not divide the 33 tokens"),
        (["model.num_kv_heads=1"], "does not divide the model's num_kv_heads 1"),
    ],
)
def test_a_layout_that_does_not_fit_is_one_line(words, named, tiny_words):
    sizes = {"model.num_heads": 4, "model.num_kv_heads": 2}
    words = [*tiny_words, *(f"{k}={v}" for k, v in sizes.items()), "parallel.tp=2", *words]
    config = Config.load(None, words, environ={})
    arch = resolve_architecture(config.model)
    with pytest.raises(ConfigError, match=named) as caught:
        plan_world(config, arch, 2)
    assert caught.value.field == "parallel.tp"
