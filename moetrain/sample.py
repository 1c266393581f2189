"""Text from a model in training: plain sampling, one whole forward pass a token.

There is no key/value cache on purpose: this shows what a run has learned, a few hundred tokens at
its end. Rollout generation for post-training is another thing and another file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moetrain.data.tokenizer import Tokenizer
from moetrain.models import Transformer


class SampleError(ValueError):
    """No text can be sampled; the message says why."""


@torch.no_grad()
def next_logits(model: Transformer, ids: Sequence[int], *, multiple: int = 1) -> torch.Tensor:
    """Logits [V] of the token after ``ids``.

    The model's input is padded at its end to a ``multiple`` of tokens, which no expert and no token
    before it sees.
    """
    last, pads = len(ids) - 1, -len(ids) % multiple
    tokens_BS = torch.tensor([[*ids, *[0] * pads]], device=model.head_weight.device)
    is_pad_BS = torch.arange(len(ids) + pads, device=tokens_BS.device)[None] > last
    # One row of a growing length would compile again and again.
    with torch.compiler.set_stance("force_eager"):
        hidden_BSD, _ = model.backbone(tokens_BS, is_pad_BS=is_pad_BS if pads else None)
        return model.vocabulary.logits(hidden_BSD[:, last], model.head_weight)[0]


def generate(
    next_logits: Callable[[Sequence[int]], torch.Tensor],
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    max_len: int,
    temperature: float = 0.7,
    seed: int = 0,
) -> str:
    """``prompt`` (token ids) and up to ``num_tokens`` sampled after it, as text.

    ``next_logits``, given token ids, has the logits [V] of the token after them. It sees the last
    ``max_len`` tokens; sampling stops at the end-of-document token. Token ids that the tokenizer
    does not have are never sampled.

    Raises:
        SampleError: an empty prompt, or logits that are not finite.
    """
    if len(prompt) == 0:
        raise SampleError("the prompt has no tokens")
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(num_tokens):
        logits = next_logits(ids[-max_len:])[: tokenizer.vocab_size].float().cpu()
        if not torch.isfinite(logits).all():
            raise SampleError("the model's logits are not finite")
        token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        if token == tokenizer.eos_id:
            break
        ids.append(token)
    return tokenizer.decode(ids)
