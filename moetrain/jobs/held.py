"""What a job has learned while another sits at the session: in host memory, and then on the disk.

Between two steps a job is put away as a checkpoint. In the middle of one it has gradients besides,
which are of this layout alone and of no use to another process; each rank keeps its part of all in
a file of its own, as it is. A process that is killed leaves such files for the next to remove, and
that computes the beginning of the step again, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from moetrain.jobs.shared import Pending


class Progress(NamedTuple):
    """How far a job's state has come."""

    seen: int = 0
    """Requests."""
    steps: int = 0
    """Optimizer steps."""
    tokens: int = 0
    """That were learned from."""


@dataclass
class Held:
    """A job's state between its turns."""

    state: dict[str, torch.Tensor]
    """By name; empty while it is in :attr:`file`, as are gradients."""
    pending: Pending | None
    progress: Progress
    saved: int
    """Of what was seen, what the newest checkpoint has seen; 0: there is none."""
    folder: Path
    file: Path | None = None
    """Where tensors are; None: in memory."""

    def put_down(self, file: Path) -> str:
        """Let tensors be in ``file`` instead; returns what is wrong, or nothing."""
        gradients = self.pending.gradients if self.pending else {}
        tensors = {f"state {name}": x.contiguous() for name, x in self.state.items()}
        tensors |= {f"gradient {name}": x for name, x in gradients.items()}
        try:
            save_file(tensors, file)
        except (OSError, SafetensorError) as error:
            return f"{file}: {error}"
        self.state.clear()
        gradients.clear()
        self.file = file
        return ""

    def pick_up(self) -> None:
        """Have tensors in memory again."""
        if self.file is None:
            return
        for name, tensor in load_file(self.file).items():
            kind, _, key = name.partition(" ")
            if kind == "state":
                self.state[key] = tensor
            elif self.pending is not None:
                self.pending.gradients[key] = tensor
        self.drop()

    def drop(self) -> None:
        """Have no file."""
        if self.file is not None:
            self.file.unlink()
            self.file = None
