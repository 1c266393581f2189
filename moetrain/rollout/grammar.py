"""Grammars that completions follow, by llguidance: which tokens may come next.

A grammar is a kind and a text: ``json_schema``, ``regex``, ``choice`` (a JSON list of texts) or
``grammar`` (Lark in llguidance's dialect, or GBNF). Legend: N chunks of a step, V tokens.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from moetrain.config import ConfigError
from moetrain.data.tokenizer import Tokenizer
from moetrain.rollout.pages import Chunk

_LARGEST_FACTOR = 10_000
_FACTORS = re.compile(r'"multipleOf"\s*:\s*(\d[\d.eE+-]*)')


class Grammars:
    """The grammars of one generator's requests."""

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int], known: int) -> None:
        """``ends``: tokens that end a text; ``known``: V. ConfigError: there is no llguidance."""
        try:
            import llguidance
        except ImportError:
            remedy = "install it: pip install 'moetrain[grammar]'"
            raise ConfigError("grammar", f"it takes llguidance; {remedy}") from None
        file = tokenizer.export().files["tokenizer.json"]
        content = file if isinstance(file, str) else file.read_text()
        self._library: Any = llguidance
        self.ends, self.known = [token for token in ends if token < known], known
        self._tokens = llguidance.LLTokenizer(content, eos_token=self.ends)

    def begin(self, kind: str, text: str) -> Any:
        """Return a matcher at the start of a text; ValueError: it is no such grammar."""
        if any(float(x) > _LARGEST_FACTOR for x in _FACTORS.findall(text)):
            raise ValueError(f"grammar: a multipleOf of more than {_LARGEST_FACTOR} takes too long")
        grammar = self._library.grammar_from(kind, text)
        matcher = self._library.LLMatcher(self._tokens, grammar, log_level=0)
        matcher.compute_bitmask()  # before, it is not known whether any text follows it
        if matcher.is_error():
            problem = " ".join(matcher.get_error().split())[:300]
            raise ValueError(f"grammar: {problem}, in this {kind}")
        return matcher

    def allowed(self, chunks: Sequence[Chunk]) -> np.ndarray:
        """Return the tokens that may follow each chunk, bool [N, V]; drafts count as chosen."""
        allowed_NV = np.ones((len(chunks), self.known), bool)
        for allowed_V, (sequence, start, number) in zip(allowed_NV, chunks, strict=True):
            if (matcher := sequence.matcher) is None:
                continue
            drafts = sequence.drafts[: max(0, start + number - len(sequence.tokens))]
            if drafts:
                matcher = matcher.deep_copy()
            # Behind a draft that may not follow, nothing is chosen.
            if matcher.try_consume_tokens(drafts) == len(drafts):
                bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
                allowed_V[:] = np.unpackbits(bits, bitorder="little")[: self.known]
                # Whose text a tokenizer may have as that of any other token.
                allowed_V[self.ends] &= matcher.is_accepting()
        return allowed_NV
