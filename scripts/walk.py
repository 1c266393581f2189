"""Print four walks through the package: files to open in order, and what to read in each.

    python scripts/walk.py [batch] [gradient] [token] [request] [--check | --write]

Each walk is taken from a run, not from the text of the code. A tiny model trains, generates or
serves a job's request in this process, on a CPU. Whenever the run reaches a landmark
(:data:`WALKS`), the call stack is recorded: the functions of moetrain through which the run came
to it. These stacks make the walk.

    1. The first stack lists its files from the outermost call to the landmark.
    2. Each later stack adds the files that are not listed yet, at the end.
    3. A call that leads to a file further up in the list comes back to a file that the reader has
       left. That file is listed again, and marked so.

The functions of a file are printed together, where the file is opened; the numbers of landmarks
tell the order of time. So whoever opens the files from top to bottom, and reads in each the
functions that are printed for it, meets every call of the walk before the function that it leads
to, and opens no file twice unless it is marked. ``--check`` exits with 1 if a file is marked.
``--write`` writes docs/walks.md.

A thread that takes work over from another begins a stack of its own, and a landmark may name the
function at which its stack begins. Left out on purpose: calls that have returned when a landmark is
reached, and :data:`SKIPPED`. So a walk shows the way to its landmarks, and not all that lies beside
it. More landmarks would make two files come twice: ``models/layers.py``, for the norms of blocks
and for the loss, and ``parallel/fsdp/fsdp.py``, where ``AdamW.step`` asks for the next bucket. The
model runs without a compiler, on one rank.
"""

import argparse
import inspect
import io
import json
import re
import socket
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent.resolve()
sys.path.insert(0, str(ROOT))  # walks are of this checkout, wherever the package is installed
PAGE = ROOT / "docs" / "walks.md"
SKIPPED = {"moetrain.runtime.annotate"}
"""Modules whose functions only name other calls in traces."""
TRAIN_STEP = "train.loop:Trainer.train_step"
TURN = "jobs.scheduler:Service.turn"
ANSWERED_SECONDS = 60.0
"""Longest time that the client of the walk ``request`` waits for an answer of the service."""
TRAINING = {
    "train.device": "cpu",
    "train.steps": 1,
    "train.micro_batch_size": 2,
    "train.global_batch_size": 2,
    "train.eval_interval": 0,
    "train.sample_tokens": 0,
    "data.source": "text",
    "data.seq_len": 32,
    "checkpoint.save_hf": "yes",
}
"""Settings of the run of one step, beside the recipe ``debug``."""
JOBS = {
    "train.device": "cpu",
    "train.micro_batch_size": 1,
    "train.global_batch_size": 1,
    "data.seq_len": 32,
    "jobs.auth": "none",
}
"""Settings of the service, beside the recipe ``jobs-debug``."""


class Landmark(NamedTuple):
    """A function that a run must call, and what the run does there."""

    what: str
    function: str
    """``MODULE:NAME``, without ``moetrain.``."""
    since: str | None = None
    """The function on the stack at which the recorded stack begins; None: the outermost."""


class Walk(NamedTuple):
    """A walk: its landmarks in the order of time, of which the last is its target."""

    title: str
    landmarks: tuple[Landmark, ...]
    run: Callable[[Path], None]
    """Runs, in an empty folder, a command or a service that reaches the landmarks."""


# ---- what is run ---------------------------------------------------------------------------------


def train(folder: Path) -> None:
    """Train the recipe ``debug`` for one step by the command, and export it to ``folder/hf``."""
    from moetrain.cli.train import main

    text = folder / "text.txt"
    text.write_text("A walk opens every file once.\n" * 40)
    settings = {**TRAINING, "data.path": text, "data.cache_dir": folder, "output_dir": folder}
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    if main(["debug", *words]):
        raise SystemExit("walk: the training run failed")


def generate(folder: Path) -> None:
    """Train, and continue a prompt with the export by the command."""
    from moetrain.cli.generate import main

    train(folder)
    if main([str(folder / "hf"), "--prompt", "A walk", "--max_tokens", "2", "--device", "cpu"]):
        raise SystemExit("walk: the generation failed")


def serve(folder: Path) -> None:
    """Serve jobs over HTTP until a client has the answer to a pass over one text."""
    from moetrain.config import Config, Recipes
    from moetrain.jobs.run import JobRun
    from moetrain.jobs.scheduler import Service

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {**JOBS, "jobs.port": port, "output_dir": folder}
    words = [f"{key}={value}" for key, value in settings.items()]
    config = Config.load("jobs-debug", words, recipes=Recipes.JOBS)
    with (
        Service(config) as service,
        JobRun.serving(service),
        ThreadPoolExecutor(1) as clients,
    ):
        answered = clients.submit(ask, f"http://127.0.0.1:{port}/api/v1")
        while not answered.done():
            service.turn()
            service.wait(0.01)
        answered.result()


def ask(url: str) -> None:
    """Create a job at the service at ``url``, ask for a pass over one text, and await the answer.

    The requests are those that the ``tinker`` SDK would send.
    """
    from tinker import types
    from tinker.proto.request_conv import forward_backward_request_to_proto

    def post(route: str, body: dict[str, Any] | bytes) -> bytes:
        kind = "application/x-protobuf" if isinstance(body, bytes) else "application/json"
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"{url}/{route}", data, {"content-type": kind})
        with urllib.request.urlopen(request, timeout=ANSWERED_SECONDS) as answer:
            return answer.read()

    session = json.loads(post("create_session", {}))["session_id"]
    job = {"session_id": session, "model_seq_id": 0}
    post("create_model", {**job, "base_model": "debug", "lora_config": {"rank": 8}})
    inputs: Any = {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]}
    text = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)
    given = types.ForwardBackwardInput(data=[text], loss_fn="cross_entropy")
    asked = types.ForwardBackwardRequest(
        forward_backward_input=given, model_id=f"{session}:train:0", seq_id=1
    )
    message = forward_backward_request_to_proto(asked).SerializeToString()
    future = json.loads(post("forward_backward", message))["request_id"]
    post("retrieve_future", {"request_id": future})


# ---- the walks -----------------------------------------------------------------------------------

WALKS = {
    "batch": Walk(
        "A batch, from the command `python -m moetrain.train` to its loss",
        (
            Landmark("the settings are read", "config.sources:Reader.read"),
            Landmark("the text is read", "data.containers:Files.reading"),
            Landmark("the text becomes tokens", "data.tokenizer:ByteTokenizer.encode_batch"),
            Landmark("the model is made and distributed", "parallel.apply:place_model"),
            Landmark("a row of the batch is cut", "data.packing:StreamDataset.row"),
            Landmark("the tokens attend", "kernels.attention.attention:attention"),
            Landmark("the experts compute", "kernels.experts.mlp:expert_mlp"),
            Landmark(
                "the loss is computed",
                "kernels.vocabulary.linear_cross_entropy:linear_cross_entropy",
            ),
        ),
        train,
    ),
    "gradient": Walk(
        "A gradient, from the backward of a loss to the updated parameter",
        (
            Landmark("the backward begins", "train.passes:Pass.backward", TRAIN_STEP),
            Landmark(
                "the gradients of ranks are added", "kernels.optim.reduction:sum_chunks", TRAIN_STEP
            ),
            Landmark(
                "the norm is computed, by which the update clips",
                "parallel.fsdp.bucket:Bucket.complete_gradient",
                TRAIN_STEP,
            ),
            Landmark("the parameters are updated", "kernels.optim.adamw:adamw", TRAIN_STEP),
        ),
        train,
    ),
    "token": Walk(
        "A token, from a prompt of `moetrain generate` to the next token",
        (
            Landmark("the command begins", "cli.generate:main"),
            Landmark("the prompt becomes tokens", "data.tokenizer:Tokenizer.encode_prompt"),
            Landmark("the request is queued", "generate.engine:Generator.submit"),
            Landmark("its tokens get pages of the cache", "generate.pages:Pages.allocate"),
            Landmark("its tokens get a slot of the step", "generate.slots:HostSlots.fill"),
            Landmark("the tokens attend to the cache", "kernels.attention.paged:attend_over_pages"),
            Landmark("the experts compute", "kernels.experts.mlp:expert_mlp"),
            Landmark("the next token is sampled", "kernels.vocabulary.gumbel:gumbel_argmax"),
        ),
        generate,
    ),
    "request": Walk(
        "A job's request, from HTTP to its answer",
        (
            Landmark("the client is let in", "http.access:Access.refusal"),
            Landmark("the body is read", "http.json_server:JsonServer.read"),
            Landmark("the body becomes a request", "jobs.api:Limits.parse"),
            Landmark("the request is on the disk", "jobs.store:Job.accept"),
            Landmark("the job is active", "jobs.shared:SharedEngine.activate", TURN),
            Landmark("its loss is computed", "jobs.losses:JobsObjective.terms", TURN),
            Landmark("the answer is on the disk", "jobs.store:Job.answer"),
            Landmark("the answer is encoded for the client", "jobs.server:_pass_message"),
        ),
        serve,
    ),
}


# ---- recording -----------------------------------------------------------------------------------


class Call(NamedTuple):
    """A function on the stack."""

    module: str
    name: str
    """The function; if it is defined inside another one, the outer function."""

    @classmethod
    def of(cls, frame: FrameType) -> "Call":
        module = frame.f_globals.get("__name__", "")
        return cls(module, frame.f_code.co_qualname.partition(".<locals>")[0])

    @property
    def is_shown(self) -> bool:
        return self.module.startswith("moetrain.") and self.module not in SKIPPED

    @property
    def path(self) -> str:
        """The file, from the root of the repository."""
        file = Path(str(sys.modules[self.module].__file__)).resolve()
        return file.relative_to(ROOT).as_posix()

    @property
    def sentence(self) -> str:
        """The first sentence of the function's docstring, in one line; "": it has none."""
        text = inspect.cleandoc(resolve_name(f"{self.module}:{self.name}").__doc__ or "")
        return re.split(r"(?<=\.)\s|\n\n", text, maxsplit=1)[0].replace("\n", " ")


class Recorder:
    """Records the stacks of ``landmarks``, each at the first call after the landmark before it."""

    def __init__(self, landmarks: Sequence[Landmark]) -> None:
        self.landmarks = landmarks
        self.stacks: list[list[Call]] = []
        self._lock = threading.Lock()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Look at an event of Python's profiler, in any thread."""
        if event != "call" or len(self.stacks) == len(self.landmarks):
            return
        landmark = self.landmarks[len(self.stacks)]
        if frame.f_code.co_qualname != landmark.function.partition(":")[2]:
            return
        with self._lock:
            if ":".join(Call.of(frame)) == f"moetrain.{landmark.function}":
                self.stacks.append(self._stack(frame, landmark.since))

    @staticmethod
    def _stack(frame: FrameType, since: str | None) -> list[Call]:
        """Return the calls that led to ``frame``, outermost first."""
        calls: list[Call] = []
        above: FrameType | None = frame
        while above is not None:
            if (call := Call.of(above)).is_shown:
                calls.append(call)
                if since is not None and ":".join(call) == f"moetrain.{since}":
                    break
            above = above.f_back
        return calls[::-1]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Look at all calls inside, of this thread and of those that start meanwhile."""
        before = sys.getprofile()
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(None)


# ---- reducing ------------------------------------------------------------------------------------


@dataclass
class Stop:
    """A file of a walk, and what to read there."""

    path: str
    calls: dict[Call, list[str]] = field(default_factory=dict)
    """The functions, each with the descriptions of the landmarks that it is; empty for most."""
    is_again: bool = False
    """True: the file is in the list further up."""


def stops_of(stacks: Mapping[str, Sequence[Call]]) -> list[Stop]:
    """Return the files of ``stacks`` in the order in which they are to be opened.

    ``stacks``: for each landmark what is done there, and the stack, in the order of time.
    """
    stops: list[Stop] = []
    place: dict[str, int] = {}
    """The index of each file in ``stops``, the later one of a file that comes again."""
    for what, stack in stacks.items():
        here = -1
        for call in stack:
            path = call.path
            is_above = path in place and place[path] < here
            if path not in place or is_above:
                place[path] = len(stops)
                stops.append(Stop(path, is_again=is_above))
            here = place[path]
            stops[here].calls.setdefault(call, [])
        stops[here].calls[stack[-1]].append(what)
    return stops


def record(walk: Walk) -> dict[str, list[Call]]:
    """Run ``walk``, and return for each landmark what is done there, and the stack.

    Raises SystemExit: a landmark was not reached.
    """
    recorder, output = Recorder(walk.landmarks), io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(output),
        redirect_stderr(output),
        recorder.recording(),
    ):
        walk.run(Path(folder))
    if len(recorder.stacks) < len(walk.landmarks):
        missing = walk.landmarks[len(recorder.stacks)].function
        raise SystemExit(f"walk: no call of {missing}, in:\n{output.getvalue()}")
    whats = (f"{i}. {landmark.what}" for i, landmark in enumerate(walk.landmarks, 1))
    return dict(zip(whats, recorder.stacks, strict=True))


# ---- printing ------------------------------------------------------------------------------------


def walked(name: str) -> list[Stop]:
    """Run the walk ``name`` and return its files in order."""
    return stops_of(record(WALKS[name]))


def again(stops: Sequence[Stop]) -> list[str]:
    """Return the files that come twice."""
    return [stop.path for stop in stops if stop.is_again]


def printed(name: str, stops: Sequence[Stop]) -> str:
    """Return a walk in lines: each file, its functions with their first sentences, landmarks."""
    lines = [f"{name}: {WALKS[name].title}"]
    for number, stop in enumerate(stops, 1):
        lines.append(f"{number:3}. {stop.path}{' (again)' if stop.is_again else ''}")
        for call, whats in stop.calls.items():
            lines.append(f"       {call.name}: {call.sentence}".rstrip(": "))
            lines += [f"         -> {what}" for what in whats]
    twice = again(stops)
    lines.append(f"     {len(stops)} files, of which twice: {', '.join(twice) or 'none'}")
    return "\n".join(lines)


def section(name: str, stops: Sequence[Stop]) -> str:
    """Return a walk as a section of the page: its files, names of functions, and landmarks."""
    lines = [f"## {WALKS[name].title}", ""]
    for number, stop in enumerate(stops, 1):
        names = [
            f"`{call.name}`" + "".join(f" (**{what}**)" for what in whats)
            for call, whats in stop.calls.items()
        ]
        mark = " (again)" if stop.is_again else ""
        lines.append(f"{number}. [{stop.path}](../{stop.path}){mark}: {', '.join(names)}")
    return "\n".join(lines)


HEAD = """\
# Walks

Written by `scripts/walk.py --write`, which runs a tiny model on a CPU and records the functions
through which the run comes to each landmark (**bold**, numbered in the order of time). Open the
files of a walk from top to bottom, and read in each the functions that are named: each of them is
called from the same file or from one further up, or begins a thread. So no file is opened twice.
`python scripts/walk.py` prints the first sentence of each function, too. Its docstring says what is
recorded and what is left out. [Architecture](architecture.md) tells the same in sentences.
"""


def render(walks: Sequence[tuple[str, Sequence[Stop]]]) -> str:
    """Return the whole page as Markdown."""
    return "\n\n".join([HEAD.rstrip(), *(section(name, stops) for name, stops in walks)]) + "\n"


def main() -> int:
    """Print walks, or write the page; return 1 if ``--check`` finds a file that comes twice."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "walks", nargs="*", metavar="WALK", help=f"{', '.join(WALKS)}; default: all"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a file comes twice")
    parser.add_argument("--write", action="store_true", help="write docs/walks.md, with all walks")
    args = parser.parse_args()
    if unknown := {*args.walks} - {*WALKS}:
        parser.error(
            f"there is no walk {', '.join(sorted(unknown))}; choose from {', '.join(WALKS)}"
        )
    names = list(WALKS) if args.write else args.walks or list(WALKS)
    walks = [(name, walked(name)) for name in names]
    if args.write:
        PAGE.write_text(render(walks), "utf-8")
        print(PAGE)
    else:
        print("\n\n".join(printed(name, stops) for name, stops in walks))
    return int(args.check and any(again(stops) for _, stops in walks))


if __name__ == "__main__":
    sys.exit(main())
