"""The decoder that every family shares: embedding, blocks, final norm, vocabulary projection.

A family supplies the blocks. What all blocks need (rotary angles, attention masks) is computed once
per forward, outside them, so that each block is one compiled graph that the next one reuses.

Left out on purpose: the loss (it never needs all logits at once), text generation, and everything
about devices.

Legend: B batch, S sequence, D model width, V vocabulary.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moetrain.config import KernelsSection
from moetrain.kernels import attention_mask
from moetrain.models.architecture import Architecture
from moetrain.models.layers import Embedding, Linear, RMSNorm, RotaryEmbedding
from moetrain.models.moe import RouterStats, RoutingStats
from moetrain.models.vocabulary import Vocabulary, WholeVocabulary

if TYPE_CHECKING:
    from moetrain.models.hf_files import HFSource


class Inputs(NamedTuple):
    """What the model sees of a micro-batch: the arguments of :meth:`Transformer.backbone`."""

    tokens_BS: torch.Tensor
    positions_BS: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    is_pad_BS: torch.Tensor | None = None


class Transformer(nn.Module):
    """A decoder-only language model; built by :func:`moetrain.models.build_model`.

    Attributes:
        compute_dtype: dtype of the activations; None: the embedding's own.
        recompute: whether the backward pass recomputes each block instead of keeping what it needs.
        run_block: how a block is called, ``run_block(block, *inputs)``; sharding wraps it.
        source: what else the checkpoint holds that the weights came from; None: there was none.
        vocabulary: how the embedding's and the head's matrices are used; sharding replaces it.
    """

    def __init__(
        self, arch: Architecture, blocks: Sequence[nn.Module], kernels: KernelsSection
    ) -> None:
        super().__init__()
        self.arch, self.kernels = arch, kernels
        self.compute_dtype: torch.dtype | None = None
        self.recompute = False
        self.run_block: Callable[..., Any] = _call
        self.source: HFSource | None = None
        self.vocabulary: Vocabulary = WholeVocabulary(kernels.backend)
        self.embed = Embedding(arch.vocab_size, arch.hidden_size)
        self.rope = RotaryEmbedding(arch)
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.lm_head = None if arch.tie_embeddings else Linear(arch.hidden_size, arch.vocab_size)

    @property
    def head_weight(self) -> torch.Tensor:
        """The vocabulary matrix [V, D], tied or not."""
        return (self.embed if self.lm_head is None else self.lm_head).weight

    def forward(
        self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [B, S, V] in the compute dtype; arguments as in :meth:`backbone`."""
        hidden_BSD, _ = self.backbone(tokens_BS, positions_BS)
        return self.vocabulary.logits(hidden_BSD, self.head_weight)

    def backbone(
        self,
        tokens_BS: torch.Tensor,
        positions_BS: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        is_pad_BS: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, RoutingStats | None]:
        """Hidden states after the final norm, and routing statistics (None: no MoE layer).

        Args:
            tokens_BS: integer token ids.
            positions_BS: position of each token in its document; a 0 starts a document, and no
                token sees another document. None: one document a row.
            cu_seqlens: the same documents as ends over the B * S tokens, int32, from 0; cuDNN's
                packed attention needs them, the other backends do not.
            is_pad_BS: bool, tokens that only fill up a row, behind its documents or each of them:
                no expert sees them and no statistics count them. Attention takes them for the end
                of the document before. They should have no targets. None: there are none.
        """
        batch, seq_len = tokens_BS.shape
        windows = [self.arch.window(i) for i in range(self.arch.num_layers)]
        masks = {
            window: attention_mask(
                positions_BS,
                batch=batch,
                seq_len=seq_len,
                device=tokens_BS.device,
                window=window,
                backend=self.kernels.attention,
                cu_seqlens=None if positions_BS is None else cu_seqlens,
                dtype=self.compute_dtype or self.embed.weight.dtype,
            )
            for window in dict.fromkeys(windows)
        }
        if positions_BS is None:
            positions_BS = torch.arange(seq_len, device=tokens_BS.device)[None]
        rotation = self.rope(positions_BS)
        x_BSD = self.embed(tokens_BS, self.vocabulary)
        x_BSD = x_BSD.to(self.compute_dtype or x_BSD.dtype)
        layer_stats: list[RouterStats] = []
        for block, window in zip(self.layers, windows, strict=True):
            inputs = (x_BSD, rotation, masks[window], is_pad_BS)
            if self.recompute:
                # No block draws random numbers.
                x_BSD, stats = checkpoint(
                    self.run_block, block, *inputs, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x_BSD, stats = self.run_block(block, *inputs)
            if stats is not None:
                layer_stats.append(stats)
        routing = RoutingStats.of_layers(layer_stats, self.arch.num_experts_per_token)
        return self.norm(x_BSD).view(batch, seq_len, -1), routing


def _call(block: nn.Module, *inputs: Any) -> Any:
    return block(*inputs)


@torch.no_grad()
def init_weights(model: nn.Module, std: float, seed: int) -> None:
    """Random initial values in place; parameters must have storage (``to_empty``)."""
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_value(name, parameter.shape, std, seed, parameter.device))
    for buffer in model.buffers():  # only router biases: see Router
        buffer.zero_()


def initial_value(
    name: str, shape: Sequence[int], std: float, seed: int, device: torch.device
) -> torch.Tensor:
    """Parameter ``name`` at random (fp32): matrices ~ N(0, std^2), norms one, biases zero.

    Every parameter has a generator of its own, seeded by ``seed`` and its name: no value depends on
    the other parameters, their order, or how they are sharded.
    """
    value = torch.zeros(shape, device=device)
    if name.endswith("norm.weight"):
        return value.fill_(1.0)
    if name.endswith(".bias"):
        return value
    generator = torch.Generator(device)
    # One hash of both: the CPU's generator keeps 32 bits of a seed.
    generator.manual_seed(zlib.crc32(f"{seed}.{name}".encode()))
    return value.normal_(0.0, std, generator=generator)


def compile_blocks(model: Transformer, backend: str | Callable[..., Callable] = "inductor") -> None:
    """Compiles every block as one graph; blocks of one kind share the compiled code."""
    prepare_compiler()
    for block in model.layers:
        block.compile(fullgraph=True, backend=backend)


def prepare_compiler() -> None:
    """The compiler settings (of the whole process) that graphs with dispatch in them need."""
    from torch._dynamo import config as dynamo_config  # a second to import

    # Sizes that the compiler does not know come from ops of ours. Asserting in the graph that they
    # are not negative tells nothing, and torch 2.11 fails on what selective recomputation makes of
    # it: "Unsupported inductor graph input type".
    dynamo_config.do_not_emit_runtime_asserts = True
