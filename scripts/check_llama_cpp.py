"""Export a checkpoint to GGUF, and compare llama.cpp's greedy tokens with moetrain's.

    pip install -e '.[gguf,llamacpp]'
    python scripts/check_llama_cpp.py FOLDER --prompt "Once upon a time" --max_tokens 64

llama.cpp runs on one thread of the CPU, with keys and values in fp32 and without flash attention,
so that its rounding is that of fp32. Both libraries get the same text. The columns are the prompt's
tokens (and whether both libraries split it the same way), the tokens that were compared, the
largest difference of the chosen tokens' log-probabilities up to the first difference, and at a
difference the log-probability by which moetrain prefers its token to llama.cpp's. Such a margin is
below the rounding where rounding decided. The exit code is 1 if any tokens differ.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from moetrain import Generator
from moetrain.cli.gguf_file import export_gguf
from moetrain.generate.engine import load_model
from moetrain.generate.request import Request, SamplingParams, end_ids

PROMPTS = (
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Q: What is 17 + 25?\nA:",
    "It's 1234567 o'clock,\n\n  and we've  spaces\tand tabs.",
    "Ein Café in Zürich, 中文字, русский текст 🙂",
)


class Continued(NamedTuple):
    """A greedy continuation."""

    tokens: list[int]
    logprobs: list[float]
    """Log-probability of each token in nats, at temperature 1."""
    text: str


class LlamaCpp:
    """A model in llama.cpp, by the HTTP server inside the library ``xllamacpp``."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def post(self, path: str, **body: object) -> Any:
        """Send ``body`` to ``path``, and return the reply; urllib.error.HTTPError: it failed."""
        data, kind = json.dumps(body).encode(), {"content-type": "application/json"}
        request = urllib.request.Request(self._server.listening_address + path, data, kind)
        with urllib.request.urlopen(request, timeout=600) as reply:
            return json.load(reply)

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of ``text`` as a prompt."""
        said = {"content": text, "add_special": True, "parse_special": True}
        return self.post("/tokenize", **said)["tokens"]

    def continued(self, prompt: str | Sequence[int], max_tokens: int) -> Continued:
        """Continue ``prompt``, always by the likeliest token."""
        said = {"temperature": 0, "return_tokens": True, "n_probs": 1, "cache_prompt": False}
        found = self.post("/completion", prompt=prompt, n_predict=max_tokens, **said)
        logprobs = [one["logprob"] for one in found["completion_probabilities"]]
        return Continued(found["tokens"], logprobs, found["content"])

    def chat(self, messages: Sequence[dict[str, str]]) -> str:
        """Return the prompt that asks for an answer to ``messages``, by the chat template."""
        return self.post("/apply-template", messages=messages)["prompt"]


@contextmanager
def llama_cpp(file: Path, context: int = 1024) -> Iterator[LlamaCpp]:
    """Load ``file`` in llama.cpp. ``context``: the most tokens of a prompt and its continuation."""
    # No type checker sees into this compiled module of the extra llamacpp.
    xllamacpp: Any = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.n_gpu_layers = context, 1, 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup, params.verbosity = False, 1
    yield LlamaCpp(xllamacpp.Server(params))


class Row(NamedTuple):
    """How both libraries continued a prompt."""

    prompt_tokens: int
    same_prompt: bool
    """True: both split the prompt into the same tokens."""
    compared: int
    """The number of tokens up to the first difference."""
    logprob: float
    """The largest difference of a chosen token's log-probability, in nats, up to there."""
    margin: float | None
    """The log-probability by which moetrain prefers its token to llama.cpp's at the first
    difference, in nats; None: all tokens are the same."""
    same_text: bool


def compare(
    generator: Generator, theirs: LlamaCpp, prompts: Sequence[str], max_tokens: int
) -> list[Row]:
    """Continue ``prompts`` in both libraries."""
    tokenizer = generator.tokenizer
    assert tokenizer is not None
    split = [tuple(tokenizer.encode_prompt(prompt)) for prompt in prompts]
    stops = end_ids(generator.model, tokenizer)
    params = SamplingParams(max_tokens=max_tokens, temperature=0, stop_ids=stops, logprobs=20)
    ours = generator.generate([Request(str(i), ids, params) for i, ids in enumerate(split)])
    rows = []
    for prompt, ids, (own,) in zip(prompts, split, ours, strict=True):
        found = theirs.continued(prompt, max_tokens)
        same = [a == b for a, b in zip(own.tokens, found.tokens, strict=False)]
        apart = same.index(False) if False in same else len(same)
        margin = None
        if apart < max(len(own.tokens), len(found.tokens)):
            other = found.tokens[apart] if apart < len(found.tokens) else -1
            margin = own.logprobs[apart] - own.top_logprobs[apart].get(other, -math.inf)
        pairs = zip(own.logprobs[:apart], found.logprobs[:apart], strict=True)
        worst = max((abs(a - b) for a, b in pairs), default=0.0)
        is_split = theirs.tokens(prompt) == list(ids)
        kept = own.tokens[: -1 if own.tokens[-1] in stops else None]
        is_text = tokenizer.decode(kept) == found.text
        rows.append(Row(len(ids), is_split, apart, worst, margin, is_text))
    return rows


def main() -> None:
    """Print a line for each prompt, and their sum."""
    parser = argparse.ArgumentParser(description="Compare llama.cpp with moetrain.")
    parser.add_argument("folder", type=Path, help="Hugging Face folder")
    parser.add_argument("--prompt", action="append", help="text; may be given several times")
    parser.add_argument("--max_tokens", type=int, default=64)
    parser.add_argument("--gguf_type", default="f32")
    words = parser.parse_args()
    model, tokenizer = load_model(str(words.folder), "cpu", "float32")
    generator = Generator(model, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        export_gguf(words.folder, file, words.gguf_type)
        with llama_cpp(file) as theirs:
            rows = compare(generator, theirs, words.prompt or PROMPTS, words.max_tokens)
    print("prompt  same split  compared  logprob  margin  same text")
    for row in rows:
        print(*row)
    same = all(row.margin is None for row in rows)
    print(f"{sum(row.compared for row in rows)} tokens compared, all the same: {same}")
    sys.exit(not same)


if __name__ == "__main__":
    main()
