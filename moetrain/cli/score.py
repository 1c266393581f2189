"""``python -m moetrain.score PATH RECORDS``: score answers with a reward model.

PATH is a Hugging Face folder of a reward model (such as ``output_dir/hf`` of a run with
train.objective reward) or a hub id. RECORDS is a file or folder of records, or a data set. Each
record has `prompt` and `completion`, or `messages` that end with an answer. For each record the
command prints a line of JSON, with the record's own fields and its `score`. The exit code is 0, or
2 after an error in the input, which one line on standard error explains.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from moetrain.cli import quiet_imports
from moetrain.cli.main import Parser, command
from moetrain.config import ConfigError

_AT_ONCE = 256
"""Number of records that are read and then scored together."""


@command
def main(argv: Sequence[str] | None) -> None:
    parser = Parser("score", __doc__)
    add = parser.add_argument
    add("path", metavar="PATH", help="Hugging Face folder or hub id of a reward model")
    add(
        "records",
        metavar="RECORDS",
        help="file, folder or pattern of records, or OWNER/NAME on the hub",
    )
    add(
        "--device",
        default="auto",
        help="auto, cpu, cuda or cuda:N; auto (default): cuda if there is a GPU",
    )
    meaning = "dtype of weights and computation; auto (default): bfloat16 on CUDA, float32 on a CPU"
    add("--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help=meaning)
    add(
        "--max_tokens",
        type=int,
        default=16384,
        help="largest number of tokens in one forward pass; default 16384",
    )
    args = parser.parse_args(argv)
    # These imports take seconds, which would delay --help and errors in options.
    with quiet_imports():
        from moetrain.data.messages import BadLineError
        from moetrain.generate.scoring import RewardModel

    raws = _records(args.records)
    model = RewardModel(args.path, device=args.device, dtype=args.dtype, max_tokens=args.max_tokens)
    while some := list(islice(raws, _AT_ONCE)):
        texts, records = [], []
        for raw in some:
            try:
                records.append(record := raw.value())
                texts.append(model.encode(record))
            except BadLineError as error:
                raise ConfigError("records", f"{raw.where}: {error}") from None
        for record, score in zip(records, model.score_tokens(texts), strict=True):
            print(json.dumps({**record, "score": score}, ensure_ascii=False, default=str))


def _records(path: str) -> Iterator[Any]:
    """Yield the records of ``path``. Raises ConfigError: it has no files, or one is unreadable."""
    from moetrain.data.containers import Files, find_records

    files = Files("records", path, *find_records("records", path, "train", None))
    return (raw for piece in files.pieces() for raw in files.records(piece))
