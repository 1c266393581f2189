"""Where AdamW's moments lie: in one arena, each the same tensor for as long as its optimizer."""

from __future__ import annotations

import torch

from moetrain.optim.adamw import MOMENTS
from moetrain.parallel.arena import Arena

State = dict[str, torch.Tensor]


class Moments:
    """Gives ``optimizer`` its state, in place of tensors that it would make itself."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self.arena = Arena("moments", device)
        self._states: dict[torch.Tensor, State] = {}

    @torch.no_grad()
    def begin(self) -> None:
        """Give whatever has no state that of before the first step."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in self.optimizer.state:
                    for tensor in self.state_of(parameter).values():
                        tensor.zero_()

    def state_of(self, parameter: torch.Tensor) -> State:
        """The optimizer's own of ``parameter``, of any values if there was none."""
        if parameter not in self._states:
            state = {"step": torch.empty((), device=parameter.device)}
            for key in MOMENTS:
                flat = self.arena.empty(parameter.numel(), parameter.dtype)
                state[key] = flat.view(parameter.shape)
            self._states[parameter] = state
        self.optimizer.state[parameter] = self._states[parameter]
        return self._states[parameter]
