"""Imports and look-ups that any compilation needs; the fork server of tests makes them once.

Without this, every process that compiles spends two seconds on them. Their objects are frozen, and
garbage is collected less often than after every 700 objects: a compiler makes millions of objects,
and collections took a sixth of its time.
"""

import gc

import torch
import tqdm
from torch._dynamo import config
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from moetrain.models.transformer import Inputs, Transformer, compile_blocks
from tests.lib.architectures import TINY_MOE, make_architecture

# A process with threads must not be forked.
torch.set_num_threads(1)
tqdm.tqdm.monitor_interval = 0
_LINEAR = torch.nn.Linear(2, 2)


def _recomputed(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(_LINEAR, x, use_reentrant=False)


torch.compile(_recomputed, backend="aot_eager", fullgraph=True)(torch.ones(3, 2)).sum().backward()
_MODEL = Transformer(make_architecture(**TINY_MOE, num_layers=1))
_MODEL.init_weights(std=0.1, seed=0)
# The earlier values are restored at the end.
with config.patch(do_not_emit_runtime_asserts=False, recompile_limit=8):
    compile_blocks(_MODEL, "aot_eager")
    _MODEL.backbone(Inputs(torch.zeros(2, 3, dtype=torch.long)))[0].sum().backward()
del _MODEL
torch.compiler.reset()
counters.clear()
gc.collect()
gc.freeze()
gc.freeze = gc.unfreeze = lambda: None  # as in conftest's keep_frozen
gc.set_threshold(100_000, 50, 1000)
