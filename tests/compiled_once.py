"""Imported by the fork server of tests: what compiling anything brings in and looks up once.

Else every process that compiles would take a second for it. What is there then is nothing that
garbage is looked for in, process by process, nor is it looked for after every 700 objects: a
compiler makes millions, and that was a sixth of its time.
"""

import gc

import torch
import tqdm
from torch.utils.checkpoint import checkpoint

# No process with threads may be forked.
torch.set_num_threads(1)
tqdm.tqdm.monitor_interval = 0
_LINEAR = torch.nn.Linear(2, 2)


def _recomputed(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(_LINEAR, x, use_reentrant=False)


torch.compile(_recomputed, backend="aot_eager", fullgraph=True)(torch.ones(3, 2)).sum().backward()
torch.compiler.reset()
gc.collect()
gc.freeze()
gc.set_threshold(100_000, 50, 1000)
