"""Tensor parallelism with sequence parallelism (arXiv 1909.08053, 2205.05198), put on from outside.

Between matrix products every rank has its own part of the tokens: norms, routers, experts and the
residual stream do no work twice. Attention and dense MLPs see all tokens, with their part of the
heads or of the width:

    x_ND --gather--> x_TD --wq wk wv--> 1/W of the heads --wo--> partial y_TD --scatter--> y_ND

``gather`` hands every rank all tokens, ``scatter`` adds up the ranks' partial results and gives
each its tokens; each is the other's backward. Both are functional collectives, which the compiler
sees. Torch's own autograd form of a gather is not used: its backward adds up in the tensors' dtype,
in the order of NCCL's ring. Here sums are made in fp32 in rank order and rounded once.

Tokens are cut as one row [1, T, D], so that a rank's part lies in one piece: rank 1 of 2 with B=2
rows of S=3 tokens has the second row. The plan of the family says which matrices are cut; the
gradients of those that are not are added up by FSDP (see ``Meshes.shared_parameters``).

Left out on purpose: hiding these collectives behind the products next to them.

Legend: W tensor parallel ranks, B batch, S sequence, T = B * S tokens, N = T / W, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moetrain.models.rules import PartStyle
from moetrain.parallel.collectives import all_gather_rows, sum_scatter_rows


@dataclass(frozen=True)
class TokenParts:
    """How the tensor parallel ranks of one group share tokens."""

    ranks: int
    rank: int
    group: str

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> TokenParts:
        return cls(group.size(), group.rank(), group.group_name)

    def part(self, x_T: torch.Tensor) -> torch.Tensor:
        """This rank's part [N, ...] of what every rank has of all tokens."""
        return x_T.view(self.ranks, -1, *x_T.shape[1:])[self.rank]

    def gather(self, x_ND: torch.Tensor) -> torch.Tensor:
        """All tokens, from every rank's; leading dims of any kind become one of 1."""
        return _GatherTokens.apply(x_ND.flatten(0, -2).contiguous(), self.ranks, self.group)[None]

    def scatter(self, y_TD: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of the sum of every rank's ``y_TD``; [1, N, D]."""
        return _ScatterTokens.apply(y_TD.flatten(0, -2).contiguous(), self.ranks, self.group)[None]


def share_tokens(part: nn.Module, style: PartStyle, parts: TokenParts) -> None:
    """Let ``part`` of a model do what ``style`` says (:mod:`moetrain.models.rules`).

    Its inputs are ``(x, context)`` in a block; its output a tensor, or a tuple that begins with it.
    """
    hooks = {
        "own": (None, None),
        "vocabulary": (None, None),
        "all": (_gather_input, _scatter_output),
        "routed": (_cut_context, None),
        "gather": (None, _gather_output),
    }
    before, after = hooks[style]
    if before is not None:
        part.register_forward_pre_hook(partial(before, parts))
    if after is not None:
        part.register_forward_hook(partial(after, parts))


def _gather_input(parts: TokenParts, part: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x_ND, context = args
    return parts.gather(x_ND).view(-1, context.rotation.cos.shape[1], x_ND.shape[-1]), context


def _scatter_output(parts: TokenParts, part: nn.Module, args: tuple[Any, ...], y: Any) -> Any:
    return (parts.scatter(y[0]), *y[1:]) if isinstance(y, tuple) else parts.scatter(y)


def _cut_context(parts: TokenParts, part: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x_ND, context = args
    if context.is_pad_BS is not None:
        context = context._replace(is_pad_BS=parts.part(context.is_pad_BS.flatten()))
    if context.routes_BSK is not None:
        context = context._replace(routes_BSK=parts.part(context.routes_BSK.flatten(0, 1)))
    return x_ND, context


def _gather_output(
    parts: TokenParts, part: nn.Module, args: tuple[Any, ...], x_ND: torch.Tensor
) -> torch.Tensor:
    return parts.gather(x_ND)


class _GatherTokens(torch.autograd.Function):
    """[W * N, D] of every rank's [N, D]."""

    @staticmethod
    def forward(ctx: Any, x_ND: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
        ctx.place = ranks, group
        return all_gather_rows(x_ND, group)

    @staticmethod
    def backward(ctx: Any, d_x_TD: torch.Tensor):
        return sum_scatter_rows(d_x_TD.contiguous(), *ctx.place), None, None


class _ScatterTokens(torch.autograd.Function):
    """[T / W, D] of the sum of every rank's [T, D]."""

    @staticmethod
    def forward(ctx: Any, y_TD: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
        ctx.group = group
        return sum_scatter_rows(y_TD, ranks, group)

    @staticmethod
    def backward(ctx: Any, d_y_ND: torch.Tensor):
        return all_gather_rows(d_y_ND.contiguous(), ctx.group), None, None
