"""Helpers of tests/models/test_compile.py that other tests use too."""

import torch
from torch._dynamo.testing import CompileCounterWithBackend

from moetrain.config import KernelsSection, MoeSection
from moetrain.models.architecture import Architecture
from moetrain.models.transformer import Inputs, Transformer, compile_blocks
from tests.lib.architectures import TINY_MOE, make_architecture

ROWS, SEQ_LEN = 2, 24
MOE = make_architecture(**TINY_MOE, num_layers=4)


def fresh_model(arch: Architecture, attention="auto", **moe) -> Transformer:
    model = Transformer(arch, kernels=KernelsSection(attention=attention), moe=MoeSection(**moe))
    model.init_weights(std=0.3, seed=0)
    return model


def compile_counting(model: Transformer) -> CompileCounterWithBackend:
    """Run ``compile_blocks`` with a cheap backend that counts what it compiles."""
    counter = CompileCounterWithBackend("aot_eager")
    compile_blocks(model, backend=counter)
    return counter


def batch(step: int) -> Inputs:
    """Return random tokens in documents whose ends differ in every step and row."""
    generator = torch.Generator().manual_seed(step)
    tokens_BS = torch.randint(0, 40, (ROWS, SEQ_LEN), generator=generator)
    starts_BS = torch.rand(ROWS, SEQ_LEN, generator=generator) < 0.2
    starts_BS[:, 0] = True
    index = torch.arange(SEQ_LEN)
    return Inputs(tokens_BS, index - torch.where(starts_BS, index, 0).cummax(1).values)
