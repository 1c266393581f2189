"""``python -m moetrain.serve PATH``: serve a model over HTTP in OpenAI's protocol.

PATH is a Hugging Face folder (such as ``output_dir/hf`` of a run) or a hub id. SIGTERM and Ctrl-C
stop the server, which then has two seconds to answer the requests that it has begun. Requests that
are not answered by then get status 503, and streams end with an error event. The exit code is 0,
or 2 after an error in the input, which one line on standard error explains.
"""

import argparse
from collections.abc import Sequence

from moetrain.cli import quiet_imports
from moetrain.cli.main import Parser, command
from moetrain.config import ConfigError
from moetrain.config.environment import user_cache_dir
from moetrain.http.access import Access

_NUMBERS = {
    "cache_tokens": (2**16, "number of tokens that the key/value cache holds"),
    "max_sequences": (64, "largest number of completions that are generated at once"),
    "max_step_tokens": (2048, "largest number of tokens in one forward pass"),
    "max_queue": (
        1024,
        "number of completions that may run or wait; requests beyond that get status 429",
    ),
    "max_request_mib": (4, "size of the largest request body, in MiB"),
    "max_grammars": (
        64,
        "number of different grammars in use at once; requests beyond that get status 429",
    ),
    "grammar_seconds": (5, "largest number of seconds to compile a grammar"),
    "grammar_mib": (512, "largest memory of one grammar, in MiB"),
}
"""Options whose values are 1 or more, each with its default and meaning."""


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("serve", __doc__)
    parser.add_model()
    add = parser.add_argument
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on; default 127.0.0.1, which only this machine reaches",
    )
    add(
        "--port",
        type=int,
        default=8000,
        help="port to listen on; 0: any free port, which is printed; default 8000",
    )
    add(
        "--auth",
        choices=["auto", "token", "none"],
        default="auto",
        help="which clients are served; token: those that send the bearer token; none: everybody "
        "who can connect; auto (default): none if --host is a loopback address, else token",
    )
    add(
        "--token_file",
        help="file with the bearer token, whose path is printed; unset: a file in the user's cache "
        "folder, which is created at the first start",
    )
    add("--name", help="name of the model in requests and responses; default PATH")
    for name, (default, meaning) in _NUMBERS.items():
        add(f"--{name}", type=int, default=default, help=f"{meaning}; default {default}")
    args = parser.parse_args(argv)
    for name in _NUMBERS:
        if getattr(args, name) < 1:
            raise ConfigError(name, f"{getattr(args, name)} is not positive; choose 1 or more")
    return args


@command
def main(argv: Sequence[str] | None) -> None:
    args = _parse(argv)
    own_file = user_cache_dir() / "serve.token"
    access = Access(args.host, args.port, args.auth, args.token_file, own_file)
    access.check()
    with quiet_imports():
        from moetrain.generate.engine import Generator, load_model
        from moetrain.generate.grammars import GrammarLimits
        from moetrain.generate.pages import Pages
        from moetrain.serve.server import CompletionServer

    block = args.draft if args.draft_by == "block" else 0
    model, tokenizer = load_model(args.path, args.device, args.dtype, args.adapter, block)
    generator = Generator(
        model,
        tokenizer,
        num_pages=-(-args.cache_tokens // Pages.SIZE),
        max_sequences=args.max_sequences,
        max_tokens=args.max_step_tokens,
        draft=args.draft,
        draft_by=args.draft_by,
        cache=args.cache,
        grammar_limits=GrammarLimits(args.grammar_seconds, args.grammar_mib, args.max_grammars),
    )
    generator.warm_up()
    name = args.name or args.path
    limits = {"max_queue": args.max_queue, "max_request_mib": args.max_request_mib}
    server, listener = CompletionServer(generator, name, **limits).listen(access)
    print(f"serving {name} at http://{args.host}:{listener.getsockname()[1]}", flush=True)
    server.run(sockets=[listener])
