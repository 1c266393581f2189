"""Helpers of tests/train/test_engine.py that other tests use too."""

import torch

from moetrain.config import Config
from moetrain.data.loader import Batch
from moetrain.data.packing import IGNORE_INDEX
from moetrain.parallel.world import join_world
from moetrain.train.engine import Engine
from moetrain.train.objectives import Pretraining
from moetrain.train.session import resolve_run

ROWS, SEQ_LEN, VOCAB = 8, 12, 50
WORDS = [
    "model.hidden_size=16",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "model.head_dim=8",
    "model.num_experts=4",
    "model.num_experts_per_token=2",
    "model.moe_intermediate_size=8",
    f"model.vocab_size={VOCAB}",
    f"data.seq_len={SEQ_LEN}",
    "data.source=text",
    "data.path=no/such/data",
    "output_dir=/no/such/folder",
    "train.device=cpu",
    "compile.enabled=no",
    f"train.global_batch_size={ROWS}",
    "moe.aux_loss_coef=0.1",
    "moe.z_loss_coef=0.01",
    "moe.bias_update_rate=0.01",
]
DENSE = [w for w in WORDS if "expert" not in w and "moe" not in w] + ["model.preset=qwen3-0.6b"]


def make_engine(*words, micro=ROWS, base=WORDS):
    """Make an engine on the ranks of the current world."""
    words = [*base, f"train.micro_batch_size={micro}", *words]
    config, arch = resolve_run(Config.load(None, words, environ={}))
    return Engine(config, arch, join_world(config, arch))


def make_rows(step):
    """Return tokens and targets of one step's rows, which count up; row 0 lacks some targets."""
    first_B = torch.randint(0, VOCAB, (ROWS,), generator=torch.Generator().manual_seed(step))
    tokens_BS = (first_B[:, None] + torch.arange(SEQ_LEN)) % VOCAB
    targets_BS = (tokens_BS + 1) % VOCAB
    targets_BS[0, :7] = IGNORE_INDEX
    return tokens_BS, targets_BS


def make_batches(step, micro=ROWS, rank=0, ranks=1):
    """Return a rank's micro-batches of ``micro`` rows."""
    parts = zip(*(x_BS.split(micro) for x_BS in make_rows(step)), strict=True)
    ends = torch.arange(0, micro * SEQ_LEN + 1, SEQ_LEN, dtype=torch.int32)
    return [Batch(tokens, targets, None, ends) for tokens, targets in parts][rank::ranks]


def objective_of(engine):
    return Pretraining.of(engine.config, engine.arch)


def train(engine, steps, micro=ROWS, lr=1e-2):
    """Train, and return the cross-entropy and gradient norm of each step."""
    world, numbers = engine.world, []
    for step in steps:
        batches = make_batches(step, micro, world.data_rank, world.dims.data_ranks)
        totals = engine.forward_backward(batches, objective_of(engine))
        outcome = engine.step(lr)
        assert not outcome.skipped
        numbers.append((totals.terms["cross_entropy"].item(), outcome.grad_norm.item()))
    return numbers


def weights_of(engine, **kwargs):
    return {name: weight.clone() for name, weight in engine.weights(**kwargs)}


def assert_near(mine, theirs, tolerance):
    assert set(mine) == set(theirs)
    for name, weight in theirs.items():
        assert (mine[name] - weight).norm() <= tolerance * weight.norm(), name


def copy_of(state):
    """Copy an engine's state; it needs one rank, which has whole tensors."""
    return {g: {name: part.tensor.clone() for name, part in x.items()} for g, x in state.items()}
