"""``python -m moetrain.serve PATH``: serve a checkpoint over HTTP in OpenAI's protocol.

PATH is a Hugging Face folder (such as ``output_dir/hf`` of a run) or a hub id. SIGTERM and Ctrl-C
stop the server once it has answered the requests that it has begun. Exit codes: 0, or 2 and one
line that says what is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import get_args

from moetrain.cli.command import Parser, run_command
from moetrain.config import ConfigError
from moetrain.config.environment import user_cache_dir
from moetrain.rollout.access import Access, Auth


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own) and return its exit code."""
    return run_command(_run, argv)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("serve", __doc__)
    parser.add_model()
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port, which is printed")
    parser.add_argument(
        "--auth",
        choices=get_args(Auth),
        default="auto",
        help="token: serve those who send the bearer token; none: serve everybody who can connect; "
        "auto: none where --host is a loopback address, else token",
    )
    parser.add_argument(
        "--token_file", help="file with the bearer token; unset: one is made and named"
    )
    parser.add_argument("--name", help="model's name in replies; default PATH")
    parser.add_argument(
        "--cache_tokens", type=int, default=2**16, help="tokens in the key/value cache"
    )
    parser.add_argument(
        "--max_sequences", type=int, default=64, help="completions generated at once"
    )
    parser.add_argument("--max_step_tokens", type=int, default=2048, help="most tokens in one step")
    parser.add_argument(
        "--max_queue",
        type=int,
        default=1024,
        help="completions that may run or wait; requests for more are answered with 429",
    )
    parser.add_argument(
        "--max_request_mib", type=int, default=4, help="largest body of a request, in MiB"
    )
    args = parser.parse_args(argv)
    numbers = ("cache_tokens", "max_sequences", "max_step_tokens", "max_queue", "max_request_mib")
    for name in numbers:
        if getattr(args, name) < 1:
            raise ConfigError(name, f"{getattr(args, name)} is not positive; choose 1 or more")
    return args


def _run(argv: Sequence[str] | None) -> None:
    args = _parse(argv)
    own_file = user_cache_dir() / "serve.token"
    access = Access(args.host, args.port, args.auth, args.token_file, own_file)
    access.check()
    from moetrain.rollout.engine import Generator
    from moetrain.rollout.pages import PAGE_SIZE
    from moetrain.rollout.protocol import error_body
    from moetrain.rollout.server import make_app
    from moetrain.rollout.text import load_model

    model, tokenizer = load_model(args.path, args.device, args.dtype, args.adapter)
    generator = Generator(
        model,
        tokenizer,
        num_pages=-(-args.cache_tokens // PAGE_SIZE),
        max_sequences=args.max_sequences,
        max_tokens=args.max_step_tokens,
    )
    generator.warm_up()
    name = args.name or args.path
    app = make_app(generator, name, max_queue=args.max_queue, max_request_mib=args.max_request_mib)
    server, listener = access.server(app, error_body)
    print(f"serving {name} at http://{args.host}:{listener.getsockname()[1]}", flush=True)
    server.run(sockets=[listener])


if __name__ == "__main__":
    sys.exit(main())
