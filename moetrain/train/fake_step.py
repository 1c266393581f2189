"""A step without a device: finds the kernels that a step launches, to compile them ahead.

The compiler then works while weights are read (:mod:`moetrain.runtime.ahead`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch

from moetrain.config import Config, logger
from moetrain.config.environment import launched_place
from moetrain.models.architecture import Architecture
from moetrain.models.rules import Rule
from moetrain.models.transformer import Inputs, Transformer, compute_dtype, plan_model
from moetrain.optim.fake_update import FakeUpdate
from moetrain.parallel.apply import resharded_blocks
from moetrain.parallel.fsdp.transport.peers import wants_copies
from moetrain.parallel.world import World
from moetrain.runtime.ahead import can_compile_ahead, compile_ahead, launches_of


def compile_step_ahead(config: Config, arch: Architecture, world: World) -> None:
    """Begin to compile the kernels of a step. Others are compiled at their first launch."""
    device, launched = world.device, launched_place()
    if not can_compile_ahead(device):
        return
    rank, size = 0, 1
    if launched is not None and launched.on_machine is not None:
        rank, size = launched.local_rank, launched.on_machine
    try:
        launches = launches_of(FakeStep.of(config, arch, world).run)
        compile_ahead(launches, device, rank, size)
    except Exception as error:  # noqa: BLE001 - nothing is lost but seconds
        logger.warning(
            "kernels could not be compiled ahead, so each is compiled at its first launch: %s",
            error,
        )


@dataclass(frozen=True)
class FakeStep(FakeUpdate):
    """A step without a device. Running it shows which kernels the real step will launch.

    Left out on purpose: the kernels of dispatch, even those that index a rank's own experts, and
    the few kernels that are compiled for a tensor parallel rank's part of the heads.
    """

    arch: Architecture

    @classmethod
    def of(cls, config: Config, arch: Architecture, world: World) -> Self:
        """Describe a step of this rank, as far as is known before anything is built.

        Ranks that share parameters are assumed to reach one another's memory if they are on one
        machine.
        """
        dims = world.dims
        is_near = dims.machines(dims.sharding_ranks) == 1
        return cls(
            config,
            world.device,
            compute_dtype(config, world.device),
            world.meshes.sharding,
            copies=is_near and wants_copies(config.parallel, world.device.type),
            shares_region=resharded_blocks(config, world.size, arch.num_layers) > 0,
            micro_batches=config.train.micro_batches(dims.data_ranks),
            arch=arch,
        )

    def run(self) -> None:
        """Run a micro-batch through a block of each kind, and an update; call in FakeTensorMode."""
        config = self.config
        # Attention other than ``exact`` runs kernels of a library or of the compiler, which are not
        # compiled ahead. ``reference`` stands in for it.
        if config.kernels.attention != "exact":
            kernels = config.kernels.model_copy(update={"attention": "reference"})
            config = config.model_copy(update={"kernels": kernels})
        model, rules = plan_model(config, self.arch, self.dtype)
        widths = {n: math.gcd(math.prod(x.shape[1:]), 16) for n, x in model.named_parameters()}
        self._run_micro_batch(model, rules)
        trained = ((widths[name], rule) for name, rule in rules.items() if rule.trainable)
        for kind in {(rule.gather or self.dtype, rule.storage, width) for width, rule in trained}:
            self.run_update(*kind)
        for format, dtype in {(x.quant_format, x.gather or self.dtype) for x in rules.values()}:
            if format is not None:
                self.run_dequantise(format, dtype)

    def _run_micro_batch(self, model: Transformer, rules: Mapping[str, Rule]) -> None:
        # The layers of multi-token prediction launch no further kernels.
        own = model.arch.layers()[: model.arch.num_layers]
        kinds = {part: i for i, part in reversed(list(enumerate(own)))}
        seen = tuple(f"layers.{i}." for i in kinds.values())
        for name, parameter in list(model.named_parameters()):
            if name.startswith("layers.") and not name.startswith(seen):
                continue
            parent, _, last = name.rpartition(".")
            dtype = rules[name].gather or self.dtype
            whole = torch.empty(parameter.shape, dtype=dtype, device=self.device)
            made = torch.nn.Parameter(whole, requires_grad=rules[name].trainable)
            setattr(model.get_submodule(parent), last, made)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty_like(buffer, device=self.device))
        model.compute_dtype = self.dtype
        shape = (self.config.train.micro_batch_size, self.config.data.seq_len)
        tokens_BS = torch.empty(shape, dtype=torch.int64, device=self.device)
        x_BSD, rows = model.embed_tokens(tokens_BS), model.prepare(Inputs(tokens_BS))
        losses: list[torch.Tensor] = []
        for i in kinds.values():
            x_BSD, statistics = model.run(x_BSD, rows, i, i + 1)
            found = (x for one in statistics for x in one if x is not None)
            losses += [x.sum() for x in found if x.requires_grad]
        hidden_TD = model.head(x_BSD, rows).flatten(0, 1)
        targets_T = tokens_BS.flatten()
        if model.score is not None:
            losses.append(model.vocabulary.scores(hidden_TD, model.head_weight, targets_T).sum())
        else:
            weights_T = torch.ones_like(targets_T, dtype=torch.float32)
            losses.append(
                model.vocabulary.loss_sum(hidden_TD, model.head_weight, targets_T, weights_T)[0]
            )
        torch.autograd.backward(losses)
