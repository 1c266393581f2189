"""Text from a model in training: plain sampling, one whole forward pass a token.

There is no key/value cache on purpose: this shows what a run has learned, a few hundred tokens at
its end. Rollout generation for post-training is another thing and another file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moetrain.data.tokenizer import Tokenizer
from moetrain.models import Transformer


@torch.no_grad()
def generate(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    max_len: int,
    temperature: float = 0.7,
    seed: int = 0,
    after_forward: Callable[[], None] = lambda: None,
) -> str:
    """``prompt`` (token ids) and up to ``num_tokens`` sampled after it, as text.

    The model sees the last ``max_len`` tokens; sampling stops at the end-of-document token. Token
    ids that the tokenizer does not have are never sampled. ``after_forward`` is called after each
    forward pass, with nothing of it needed any more.
    """
    device = model.head_weight.device
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    model.eval()
    # One row of a growing length would compile again and again.
    with torch.compiler.set_stance("force_eager"):
        for _ in range(num_tokens):
            window = torch.tensor([ids[-max_len:]], device=device)
            hidden_BSD, _ = model.backbone(window)
            head_VD = model.head_weight[: tokenizer.vocab_size].to(hidden_BSD.dtype)
            logits = (hidden_BSD[0, -1] @ head_VD.T).float().cpu()
            after_forward()
            token = int(
                torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            )
            if token == tokenizer.eos_id:
                break
            ids.append(token)
    return tokenizer.decode(ids)
