"""``python -m moetrain.generate PATH --prompt TEXT``: continue a text with a checkpoint.

PATH is a Hugging Face folder (``output_dir/hf`` of a run, say) or a hub id. The continuation goes
to standard output as it is made. Exit codes: 0, or 2 with one line for what is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from moetrain.config import ConfigError

if TYPE_CHECKING:
    from moetrain.data.tokenizer import Tokenizer
    from moetrain.rollout import Generator, SamplingParams

DEFAULT_TOKENS = 256


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError("generate", f"{message}; see --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own) and return its exit code."""
    try:
        return _run(_parse(argv))
    except ConfigError as error:
        print(" ".join(f"error: {error}".split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="python -m moetrain.generate", description=__doc__, allow_abbrev=False)
    parser.add_argument("path", metavar="PATH", help="a Hugging Face folder or a hub id")
    parser.add_argument("--prompt", required=True, help="the text; with --chat, the user's turn")
    parser.add_argument("--chat", action="store_true", help="by the checkpoint's chat template")
    parser.add_argument("--max_tokens", type=int, help=f"default {DEFAULT_TOKENS}, or what fits")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: the likeliest token")
    parser.add_argument("--top_k", type=int, default=0, help="0: all")
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--min_p", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="append", default=[], help="a text to end at")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    return parser.parse_args(argv)


def _run(args: argparse.Namespace) -> int:
    import torch  # a second, which --help and a misspelt option need not wait for

    from moetrain.data.tokenizer import load_tokenizer
    from moetrain.models import load_hf
    from moetrain.models.hf.files import resolve
    from moetrain.rollout import Generator

    has_gpu = torch.cuda.is_available()
    if args.device == "cuda" and not has_gpu:
        raise ConfigError("device", "'cuda', but torch sees no CUDA device; use auto or cpu")
    on_gpu = has_gpu and args.device != "cpu"
    auto = torch.bfloat16 if on_gpu else torch.float32
    dtype = auto if args.dtype == "auto" else getattr(torch, args.dtype)
    folder = resolve(args.path)
    tokenizer = load_tokenizer(str(folder))
    ids = _prompt_ids(args, tokenizer)
    model = load_hf(folder, dtype=dtype, device="cuda" if on_gpu else "cpu")
    room = model.arch.max_positions - len(ids)
    length = args.max_tokens if args.max_tokens is not None else max(1, min(DEFAULT_TOKENS, room))
    ends = (model.source.generation or {}).get("eos_token_id") if model.source else None
    stop_ids = {tokenizer.eos_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    params = _params(args, max_tokens=length, stop_ids=tuple(stop_ids), stop=tuple(args.stop))
    pages = -(-(len(ids) + length) // 16)
    _print(Generator(model, tokenizer, num_pages=pages, page_size=16), ids, params)
    return 0


def _prompt_ids(args: argparse.Namespace, tokenizer: Tokenizer) -> tuple[int, ...]:
    from moetrain.data.chat import BadLineError
    from moetrain.data.sources import chat_template

    try:
        if not args.chat:
            return tuple(tokenizer.encode_prompt(args.prompt))
        text = chat_template(None, tokenizer).prompt([{"role": "user", "content": args.prompt}])
        return tuple(tokenizer.encode_batch([text])[0].ids.tolist())
    except (ValueError, BadLineError) as error:
        raise ConfigError("prompt", str(error)) from None


def _params(args: argparse.Namespace, **others: object) -> SamplingParams:
    from moetrain.rollout import SamplingParams

    given = {
        name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")
    }
    try:
        return SamplingParams(**given, **others)  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        name, _, problem = str(error).partition(" ")
        raise ConfigError(name, problem) from None


def _print(generator: Generator, ids: tuple[int, ...], params: SamplingParams) -> None:
    """The continuation, as far as its characters are whole."""
    from moetrain.rollout import Request, RequestError

    tokenizer, printed, text = generator.tokenizer, 0, ""
    assert tokenizer is not None  # it was given
    try:
        for completion in generator.stream([Request("prompt", ids, params)]):
            text = _before(tokenizer.decode(completion.tokens), params.stop)
            if not text.endswith("\ufffd"):
                print(text[printed:], end="", flush=True)
                printed = len(text)
    except RequestError as error:
        raise ConfigError("max_tokens", str(error)) from None
    print(text[printed:])


def _before(text: str, stops: Sequence[str]) -> str:
    """``text`` up to the first of ``stops`` in it."""
    found = [text.index(stop) for stop in stops if stop in text]
    return text[: min(found)] if found else text


if __name__ == "__main__":
    sys.exit(main())
