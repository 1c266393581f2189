"""Sparse attention: the sum of many tokens' gradients of one key, and the same bits in every run.

Values and gradients are those of plain torch in fp64 in test_kernels.py.
"""

import pytest
import torch

from moetrain.kernels.attention import sparse
from moetrain.kernels.attention.sparse import sparse_attention
from tests.lib.kernel_cases import devices, on_gpu
from tests.lib.small_models import relative_error
from tests.lib.specs.attention import SPARSE_ATTENTION
from tests.lib.specs.spec import evaluate, relative_errors, with_grad


def inputs_of(case, dtype=torch.float32, device="cpu"):
    return SPARSE_ATTENTION.make_inputs(case, dtype, torch.Generator(device).manual_seed(0))


@devices
@pytest.mark.parametrize("tokens", [4, 16])
def test_a_key_that_all_tokens_select_gets_the_sum_over_all_blocks_of_tokens(
    tokens, device, monkeypatch
):
    """The last block has fewer tokens than the others."""
    monkeypatch.setattr(sparse, "_TOKENS", tokens)
    case = {"lengths": (2, 9), "H": 2, "K": 3, "c": 16, "r": 16, "sink": True}
    inputs = inputs_of(case, device=device)
    keys_TK = inputs["keys_TK"]
    assert (keys_TK == 2).any(1).sum() == 9
    errors = relative_errors(SPARSE_ATTENTION, inputs)
    assert max(errors.values()) < 5e-6, errors


def test_formulas_of_the_gradients_by_hand():
    """The docstring's example: two keys of equal weight."""
    kv_Lw = torch.tensor([[1.0, 0.0], [3.0, 0.0], [5.0, 0.0]], requires_grad=True)
    q_THw = torch.zeros(1, 1, 2, requires_grad=True)
    keys_TK = torch.tensor([[0, 2]], dtype=torch.int32)
    out_THc = sparse_attention(q_THw, kv_Lw, keys_TK, 1.0, 1)
    dq_THw, dkv_Lw = torch.autograd.grad(out_THc.sum(), (q_THw, kv_Lw))
    assert out_THc.flatten().tolist() == [3.0]
    assert dq_THw.flatten().tolist() == [4.0, 0.0]
    assert dkv_Lw.tolist() == [[0.5, 0.0], [0.0, 0.0], [0.5, 0.0]]


@devices
def test_the_order_of_a_tokens_keys_and_places_without_one_change_little(device):
    case = {"lengths": (11,), "H": 3, "K": 6, "c": 16, "r": 16}
    inputs = inputs_of(case, device=device)
    keys_TK = inputs["keys_TK"]
    none_TK = torch.full_like(keys_TK, -1)
    moved_TK = torch.cat((none_TK, keys_TK.flip(1), none_TK), dim=1)
    want, got = (
        evaluate(
            SPARSE_ATTENTION,
            SPARSE_ATTENTION.fast,
            with_grad(SPARSE_ATTENTION, inputs | {"keys_TK": keys}),
            0.0,
        ).named()
        for keys in (keys_TK, moved_TK)
    )
    for name, x in want.items():
        assert relative_error(got[name], x) < 5e-6, name


@pytest.mark.gpu
@on_gpu[1]
@pytest.mark.parametrize("heads", [24, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_real_widths_on_a_gpu(dtype, heads):
    """Rows of several blocks of tokens have the values of fp64, and the same bits in three runs."""
    case = {"lengths": (90, 610), "H": heads, "K": 300, "c": 512, "r": 64, "sink": True}
    inputs = inputs_of(case, dtype, "cuda")
    errors = relative_errors(SPARSE_ATTENTION, inputs)
    assert max(errors.values()) < SPARSE_ATTENTION.tolerance[dtype], errors
    leaves = with_grad(SPARSE_ATTENTION, inputs)
    runs = [
        evaluate(SPARSE_ATTENTION, SPARSE_ATTENTION.fast, leaves, 0.0).named() for _ in range(3)
    ]
    for name, x in runs[0].items():
        assert all(torch.equal(run[name], x) for run in runs), name
