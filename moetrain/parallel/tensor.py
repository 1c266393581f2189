"""Tensor parallelism with sequence parallelism (arXiv 1909.08053, 2205.05198), by hooks.

Between matrix products every rank has its own part of the tokens, so norms, routers, experts and
the residual stream do no work twice. Attention and dense MLPs see all tokens, with this rank's part
of the heads or of the width:

    x_ND --gather--> x_TD --wq wk wv--> 1/W of the heads --wo--> partial y_TD --scatter--> y_ND

``gather`` gives every rank all tokens. ``scatter`` adds up the ranks' partial results, in fp32 in
rank order, and gives each rank its tokens. Each is the other's backward. Tokens are cut as one row
[1, T, D], so that a rank's part lies in one piece: rank 1 of 2 with B=2 rows of S=3 tokens has the
second row. FSDP adds up the gradients of matrices that are not cut (``Meshes.shared_parameters``).

:class:`ShardedVocabulary` computes the embedding, the logits and the losses. Rank r holds rows
``[r * ceil(V/W), ...)`` of the vocabulary matrix, and sees all tokens. For a loss no rank needs a
token's logits over the whole vocabulary. Each rank computes the log-sum-exp (lse) and the mean of
its part of the logits, and the target's logit if it has the target. The ranks exchange these three
numbers for each token (:mod:`moetrain.kernels.vocabulary.shard`), so every rank gets the same
per-token results. The run's loss is the sum of all ranks' losses, so a loss that every rank
computes alike is divided by W.

Left out on purpose: hiding these collectives behind the products next to them.

Legend: W tensor parallel ranks, B batch, S sequence, T = B * S tokens, N = T / W, D model width,
V vocabulary, L rows of the vocabulary matrix on this rank (its ``w_VD`` is [L, D]).
"""

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn import functional as F

from moetrain.kernels.optim.reduction import sum_chunks
from moetrain.kernels.vocabulary.chunk import CHUNK_ELEMENTS, ChunkStats
from moetrain.kernels.vocabulary.shard import VocabularyShard
from moetrain.models.layers import Vocabulary
from moetrain.models.rules import PartStyle
from moetrain.parallel.mesh import all_gather_start, chunk_of
from moetrain.runtime.backend import Backend
from moetrain.runtime.typed import OpContext

# The ops of functional collectives, which the compiler sees inside blocks. They are called without
# torch's functions around them, which wrap a result in a tensor that waits at its first use. The
# code here waits at once, so such a tensor would wait twice.
_ops: Any = torch.ops._c10d_functional


class TokenParts:
    """Exchanges the parts of all tokens that the tensor parallel ranks of one group have."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = group.size()
        self.rank = group.rank()
        self.group = group.group_name

    def part(self, x_T: torch.Tensor) -> torch.Tensor:
        """Return this rank's part [N, ...] of ``x_T`` [T, ...], which every rank has."""
        return x_T.view(self.ranks, -1, *x_T.shape[1:])[self.rank]

    def gather(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return [1, T, D], all ranks' tokens. Leading dims of ``x_ND`` are flattened."""
        return self._exchanged(x_ND, "gather")

    def scatter(self, y_TD: torch.Tensor) -> torch.Tensor:
        """Return [1, N, D], this rank's tokens of the sum of every rank's ``y_TD``."""
        return self._exchanged(y_TD, "scatter")

    def swap(self, x_WNc: torch.Tensor) -> torch.Tensor:
        """Send ``x[r]`` to rank r, and return what each rank sent here, by rank."""
        return self._exchanged(x_WNc, "swap")[0].view(x_WNc.shape)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' ``x``, the same on every rank.

        The backward adds up all ranks' gradients, since each rank uses the sum.
        """
        return self._exchanged(x, "sum").view(x.shape)

    def _exchanged(self, x_TD: torch.Tensor, kind: str) -> torch.Tensor:
        rows_TD = x_TD.flatten(0, -2).contiguous()
        return _Exchange.apply(rows_TD, kind, self.ranks, self.group)[None]

    def share(self, part: nn.Module, style: PartStyle) -> None:
        """Register the hooks on ``part`` that its ``style`` asks for.

        In a block the inputs of ``part`` are ``(x, context)``. Its output is a tensor, or a tuple
        that begins with one.
        """
        if style == "all":
            part.register_forward_pre_hook(self._gather_input)
            part.register_forward_hook(self._scatter_output)
        elif style == "routed":
            part.register_forward_pre_hook(self._cut_context)
        elif style == "gather":
            part.register_forward_hook(self._gather_output)

    def _gather_input(self, part: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x_ND, context = args
        return self.gather(x_ND).view(-1, context.rotation[0].shape[1], x_ND.shape[-1]), context

    def _scatter_output(self, part: nn.Module, args: tuple[Any, ...], y: Any) -> Any:
        return (self.scatter(y[0]), *y[1:]) if isinstance(y, tuple) else self.scatter(y)

    def _gather_output(self, part: nn.Module, args: tuple[Any, ...], x_ND: torch.Tensor) -> Any:
        return self.gather(x_ND)

    def _cut_context(self, part: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x_ND, context = args
        if context.is_pad_BS is not None:
            context = context._replace(is_pad_BS=self.part(context.is_pad_BS.flatten()))
        if context.routes_BSK is not None:
            context = context._replace(routes_BSK=self.part(context.routes_BSK.flatten(0, 1)))
        return x_ND, context


_BACKWARD = {"gather": "scatter", "scatter": "gather", "swap": "swap", "sum": "sum"}


class _Exchange(torch.autograd.Function):
    """Exchanges rows, with a backward.

    Gathering every rank's rows and scattering their sum are each other's backward. Swapping parts
    of the rows, and giving every rank the sum, are each their own backward.
    """

    @staticmethod
    def forward(
        ctx: OpContext, x_TD: torch.Tensor, kind: str, ranks: int, group: str
    ) -> torch.Tensor:
        ctx.backward_kind, ctx.ranks, ctx.group = _BACKWARD[kind], ranks, group
        return _exchange(x_TD, kind, ranks, group)

    @staticmethod
    def backward(ctx: OpContext, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (d_y_TD,) = gradients
        d_x_TD = _exchange(d_y_TD.contiguous(), ctx.backward_kind, ctx.ranks, ctx.group)
        return d_x_TD, None, None, None  # kind, ranks and group have no gradients


def _exchange(x_TD: torch.Tensor, kind: str, ranks: int, group: str) -> torch.Tensor:
    if kind in ("gather", "sum"):
        all_TD = functional.wait_tensor(_ops.all_gather_into_tensor(x_TD, ranks, group))
        return all_TD if kind == "gather" else all_TD.view(ranks, *x_TD.shape).sum(0)
    sizes = [x_TD.shape[0] // ranks] * ranks
    arriving_TD = functional.wait_tensor(_ops.all_to_all_single(x_TD, sizes, sizes, group))
    if kind == "swap":
        return arriving_TD
    out_N = x_TD.new_empty(x_TD.numel() // ranks)
    # The sum is made in fp32 in rank order, and rounded once.
    return sum_chunks(arriving_TD.view(ranks, -1), out_N=out_N).view(-1, x_TD.shape[1])


# ---- the vocabulary ----------------------------------------------------------------------------


class ShardedVocabulary(Vocabulary):
    """A :class:`~moetrain.models.layers.Vocabulary` over the ranks of ``group``.

    A rank holds about ``chunk_elements`` logits at once, the same number on every rank.
    """

    def __init__(
        self,
        vocab_size: int,
        group: dist.ProcessGroup,
        backend: Backend,
        chunk_elements: int = CHUNK_ELEMENTS,
        softcap: float = 0.0,
    ) -> None:
        super().__init__(backend, softcap)
        self.vocab_size, self.group, self.tokens = vocab_size, group, TokenParts(group)
        self.rows = chunk_of(vocab_size, group.size(), group.rank())
        self.most_rows = math.ceil(vocab_size / group.size())
        self.shard = VocabularyShard(
            ranks=group.size(),
            first=self.rows.start,
            most_rows=self.most_rows,
            join=self._join,
            all_reduce=partial(dist.all_reduce, group=group),
            backend=backend,
            softcap=softcap,
            chunk_elements=chunk_elements,
        )
        self.token_losses = self.shard.token_losses  # pyright: ignore
        self.loss_sum = self.shard.loss_sum  # pyright: ignore

    def embed(self, tokens_BS: torch.Tensor, w_VD: torch.Tensor) -> torch.Tensor:
        """Return [1, N, D], the embeddings of this rank's tokens."""
        local_T = tokens_BS.flatten() - self.rows.start
        is_here_T = (local_T >= 0) & (local_T < w_VD.shape[0])
        x_TD = F.embedding(torch.where(is_here_T, local_T, 0), w_VD)
        return self.tokens.scatter(torch.where(is_here_T[:, None], x_TD, 0))

    def logits(self, h_BSD: torch.Tensor, w_VD: torch.Tensor) -> torch.Tensor:
        """Return ``h @ w^T`` over the whole vocabulary, the same on every rank."""
        parts_TL = super().logits(h_BSD.flatten(0, -2), w_VD)
        padding = self.most_rows - w_VD.shape[0]
        logits_VT = self.tokens.gather(F.pad(parts_TL, (0, padding)).T)[0]
        return logits_VT[: self.vocab_size].T.unflatten(0, h_BSD.shape[:-1])

    def logits_of(
        self, h_TD: torch.Tensor, w_VD: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits [T, K] of a few tokens, the same on every rank."""
        local = tokens - self.rows.start
        is_here = (local >= 0) & (local < w_VD.shape[0])
        mine_TK = super().logits_of(h_TD, w_VD, torch.where(is_here, local, 0))
        return self.tokens.gather(self.tokens.scatter(torch.where(is_here, mine_TK, 0)))[0]

    def _join(self, stats: ChunkStats) -> None:
        """Turn this rank's stats into those of the whole vocabulary, in place. Collective."""
        parts_N, work = all_gather_start(torch.cat(stats), self.group)
        work.wait()
        lse_WC, target_WC, mean_WC = parts_N.view(self.group.size(), 3, -1).unbind(1)
        lse_C = lse_WC.logsumexp(0)
        stats.mean_C.copy_((torch.exp(lse_WC - lse_C) * mean_WC).sum(0))
        stats.target_logit_C.copy_(target_WC.sum(0))
        stats.lse_C.copy_(lse_C)
