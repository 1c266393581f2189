"""``python -m moetrain.generate PATH --prompt TEXT``: continue a text with a model.

PATH is a Hugging Face folder (such as ``output_dir/hf`` of a run) or a hub id. The continuation is
written to standard output while it is generated. The exit code is 0, or 2 after an error in the
input, which one line on standard error explains.
"""

import sys
from collections.abc import Sequence

from moetrain.cli import quiet_imports
from moetrain.cli.main import Parser, command
from moetrain.config import ConfigError

_SAMPLING = {
    "temperature": (
        1.0,
        "temperature of sampling; 0: the likeliest token is always chosen; default 1",
    ),
    "top_k": (0, "number of likeliest tokens to sample from; 0: all tokens; default 0"),
    "top_p": (
        1.0,
        "sample from the fewest likeliest tokens whose probabilities add up to at least this; "
        "default 1",
    ),
    "min_p": (
        0.0,
        "smallest probability of a token to sample, as a share of the likeliest one's; default 0",
    ),
    "seed": (0, "seed of sampling; default 0"),
}
"""The default and the help text of each sampling option. Its name is that of SamplingParams."""


@command
def main(argv: Sequence[str] | None) -> None:
    parser = Parser("generate", __doc__)
    parser.add_model()
    add = parser.add_argument
    add(
        "--prompt",
        required=True,
        help="text to continue; with --chat, the user's message to answer",
    )
    add("--chat", action="store_true", help="format the prompt with the model's chat template")
    add(
        "--max_tokens",
        type=int,
        help="largest number of tokens to generate; default 256, or fewer if the model's context "
        "ends first",
    )
    add(
        "--special_tokens",
        action="store_true",
        help="print special tokens too, such as the marks between GPT-OSS's thoughts and answer",
    )
    add(
        "--stop",
        action="append",
        default=[],
        help="text that ends the continuation and is not printed; may be given several times",
    )
    for name, (default, meaning) in _SAMPLING.items():
        add(f"--{name}", type=type(default), default=default, help=meaning)
    args = parser.parse_args(argv)
    # Imported here: these imports take a second, which would delay --help and errors in options.
    with quiet_imports():
        from moetrain.generate import request
        from moetrain.generate.engine import Generator, load_model
        from moetrain.generate.pages import Pages

    block = args.draft if args.draft_by == "block" else 0
    model, tokenizer = load_model(args.path, args.device, args.dtype, args.adapter, block)
    stops = tuple(args.stop)
    if args.chat:
        stops += request.chat_stops(tokenizer)
        ids = request.chat_ids(tokenizer, [{"role": "user", "content": args.prompt}])
    else:
        try:
            ids = tuple(tokenizer.encode_prompt(args.prompt))
        except ValueError as error:
            raise ConfigError("prompt", str(error)) from None
    room = max(1, model.arch.max_positions - len(ids))
    most = min(request.SamplingParams.max_tokens, room)
    try:
        params = request.SamplingParams(
            max_tokens=most if args.max_tokens is None else args.max_tokens,
            stop_ids=request.end_ids(model, tokenizer),
            stop=stops,
            **{name: getattr(args, name) for name in _SAMPLING},
        )
    except ValueError as error:
        name, _, problem = request.JsonBody.complaint(error).partition(": ")
        raise ConfigError(name, problem) from None
    pages = -(-min(len(ids) + params.max_tokens, model.arch.max_positions) // Pages.SIZE)
    generator = Generator(
        model,
        tokenizer,
        num_pages=pages,
        draft=args.draft,
        draft_by=args.draft_by,
        cache=args.cache,
    )
    text = request.TextStream(
        tokenizer, params.stop, params.stop_ids, skip_special_tokens=not args.special_tokens
    )
    completion = request.Completion("prompt", 0)
    try:
        for completion in generator.stream([request.Request("prompt", ids, params)]):
            *tokens, last = completion.tokens[-completion.num_new :]
            new = "".join(map(text.push, tokens))
            new += text.push(last, is_last=completion.finish_reason is not None)
            print(new, end="", flush=True)
    except request.RequestError as error:
        raise ConfigError("max_tokens", str(error)) from None
    print()
    if args.draft:
        share = f"{completion.num_right} of {completion.num_drafted}"
        print(f"drafted tokens that were accepted: {share}", file=sys.stderr)
