"""The parts of scripts/speedrun.sh that no command of moetrain does: data, tasks, and the report.

    python scripts/speedrun.py write OUT                  # text, chats, sums and tasks
    python scripts/speedrun.py ask OUT NAME MODEL         # what MODEL answers to three questions
    python scripts/speedrun.py report OUT                 # report.md, figures.json and curves.png

``write`` downloads nothing. It reads Python's standard library and the docstrings of packages that
are installed, and ``sources.md`` names each with its version and licence:

- ``text.jsonl`` is for continued pretraining: a document for each module, of its functions' names,
  arguments and docstrings, the reference of the Python language, and the library's source.
- ``chats.jsonl`` asks what a function does, once or several times in a conversation, and has sums
  that are worked out one addition after the other.
- ``sums.jsonl`` and ``reward.py`` are for reinforcement learning.
- ``tasks`` has three tasks for lm-evaluation-harness: bits a byte of text that is in no file above,
  which of four sentences, of one package if it has as many, describes a function that no chat asks
  about (the text has its docstring), and sums that are in no file above.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import json
import random
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from demo_mismatch import KINDS, worked
from demo_smollm2 import LEFT_OUT, REWARD, described, series, talk, write_lines

from moetrain.train.metrics import read_metrics

PACKAGES = (
    *("torch", "transformers", "numpy", "scipy", "scikit-learn", "pandas", "sympy"),
    *("networkx", "statsmodels", "matplotlib", "peft"),
)
"""Distributions whose docstrings are read, as far as they are installed."""
ASKED = (
    "What does the Python function `textwrap.dedent(text)` do?",
    "What does the Python function `shutil.rmtree(path)` do?",
    "What is 47 + 85 + 19 + 30? Add one number after the other.",
)
"""Questions for the sample. The first two functions are held out, and so are sums of 47."""
HELD_OUT_FUNCTIONS = {"textwrap.dedent", "shutil.rmtree"}
HELD_OUT_SUMMAND = 47
SHORTEST, LONGEST = 200, 2000
"""Characters: the shortest document of a module, and what the task of text takes of a document."""
STAGES = {
    "dense": "SmolLM2-135M-Instruct",
    "dense-text": "the same, and text",
    "experts-text": "8 experts, and text",
    "chats": "8 experts, text and chats",
    "rewarded": "8 experts, text, chats and rewards",
}
"""Models that are measured, in the order of the table."""
SCORES = {
    "eval/documentation/bits_per_byte": "text, bits a byte",
    "eval/described/acc": "functions, of four",
    "eval/sums/exact_match/last": "sums",
}


class Module(NamedTuple):
    """A module of the standard library or of a package: its source, and what documents it.

    ``documented`` has a heading and a docstring of each part of the module, and ``functions`` name,
    signature and first sentence of each function that a caller may use.
    """

    package: str
    name: str
    source: str
    documented: list[tuple[str, str]]
    functions: list[tuple[str, str, str]]


# ---- text ----------------------------------------------------------------------------------------


def read_module(package: str, name: str, file: Path) -> Module | None:
    """Return a module, or None for a file that is no Python of this version."""
    try:
        source = file.read_text(encoding="utf-8")
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return None
    documented = []
    scopes: list[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef]] = [(name, tree)]
    for prefix, node in scopes:
        if text := ast.get_docstring(node):
            arguments = f"({ast.unparse(node.args)})" if isinstance(node, ast.FunctionDef) else ""
            documented.append((f"{prefix}{arguments}", text))
        if not isinstance(node, ast.FunctionDef):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.FunctionDef | ast.ClassDef):
                    scopes.append((f"{prefix}.{child.name}", child))
    is_private = any(part.startswith("_") for part in name.split("."))
    functions = [] if is_private else [*described(tree, name)]
    return Module(package, name, source, documented, functions)


def named_files(package: str, folder: Path, files: list[Path]) -> list[tuple[str, str, Path]]:
    """Return package, module and file of all ``files`` but tests and vendored packages."""
    skipped = {*LEFT_OUT, "benchmarks", "_examples", "externals", "vendored", "_vendor"}
    found = []
    for file in sorted(files):
        parts = file.relative_to(folder).with_suffix("").parts
        if file.suffix == ".py" and not skipped & {*parts}:
            found.append((package, ".".join(parts).removesuffix(".__init__"), file))
    return found


def files_of_library() -> list[tuple[str, str, Path]]:
    """Return the modules of the standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    return named_files("python", folder, [*folder.rglob("*.py")])


def files_of_package(package: str) -> list[tuple[str, str, Path]]:
    """Return the modules of an installed distribution."""
    found = importlib.metadata.distribution(package)
    folder = Path(str(found.locate_file("")))
    return named_files(package, folder, [folder / str(file) for file in found.files or []])


def read_modules(packages: Sequence[str]) -> list[Module]:
    """Return the modules of the standard library and of packages, read by all cores."""
    files = files_of_library()
    for package in packages:
        try:
            files += files_of_package(package)
        except importlib.metadata.PackageNotFoundError:
            print(f"{package} is not installed: its documentation is left out")
    with ProcessPoolExecutor() as pool:
        modules = pool.map(read_module, *zip(*files, strict=True), chunksize=32)
        return [module for module in modules if module is not None]


def language_reference() -> list[str]:
    """Return the topics of the Python language's reference, which ``help()`` shows."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def licence_of(package: str) -> tuple[str, str]:
    """Return a distribution's version and the name of its licence."""
    about = importlib.metadata.metadata(package)
    lines = about.get_all("Classifier") or []
    classified = [line.rpartition(" :: ")[2] for line in lines if line.startswith("License ::")]
    (expression, *_), (text, *_) = (
        about.get_all(key) or [""] for key in ("License-Expression", "License")
    )
    named = expression or ", ".join(classified) or text or "-"
    return about["Version"], named.partition("\n")[0][:120]


def is_held_out(name: str) -> bool:
    """Say whether a module's text is held out: one in 40, by its name."""
    return random.Random(name).randrange(40) == 0


def write_text(out: Path, modules: list[Module]) -> list[str]:
    """Write text.jsonl and sources.md; return the documents that are held out.

    A docstring that several places share is taken once.
    """
    seen: set[str] = set()
    rows, held_out = [], []
    sizes: dict[str, int] = {}
    for module in modules:
        parts = []
        for heading, text in module.documented:
            if text not in seen:
                seen.add(text)
                parts.append(f"{heading}\n\n{text}")
        texts = ["\n\n\n".join(parts)]
        if module.package == "python" and not is_held_out(module.name):
            texts.append(module.source)
        for text in texts:
            if len(text) < SHORTEST:
                continue
            if is_held_out(module.name):
                held_out.append(text[:LONGEST])
            else:
                sizes[module.package] = sizes.get(module.package, 0) + len(text)
                rows.append({"text": text})
    for text in language_reference():
        sizes["python"] += len(text)
        rows.append({"text": text})
    random.Random(0).shuffle(rows)
    write_lines(out / "text.jsonl", rows)
    table = ["| source | version | licence | million characters |", "|---|---|---|---|"]
    for package, size in sizes.items():
        version, licence = (
            (sys.version.split()[0], "PSF-2.0") if package == "python" else licence_of(package)
        )
        table.append(f"| {package} | {version} | {licence} | {size / 1e6:.1f} |")
    (out / "sources.md").write_text("\n".join(table) + "\n")
    return held_out


# ---- chats, sums, tasks --------------------------------------------------------------------------


def functions_of(modules: list[Module]) -> list[tuple[str, str, str]]:
    """Return name, question and answer of each documented function, in a random order.

    Functions of one description are one, so that no answer is both learned in a chat and held out.
    """
    found: dict[str, tuple[str, str]] = {}
    for name, signature, sentence in (row for module in modules for row in module.functions):
        is_prose = not any(mark in sentence for mark in ("==", "--", ">>>", "::"))
        if is_prose and len(signature) < 120:
            found[sentence] = (name, f"What does the Python function `{signature}` do?")
    rows = [(name, question, answer) for answer, (name, question) in sorted(found.items())]
    random.Random(0).shuffle(rows)
    return rows


def write_chats(
    out: Path, functions: list[tuple[str, str, str]], sums: list[tuple[int, ...]]
) -> None:
    """Write chats.jsonl: one to three questions about functions, or a sum, in each."""
    generator = random.Random(0)
    chats, rest = [], [*functions]
    while rest:
        count = generator.choice((1, 1, 2, 3))
        taken, rest = rest[:count], rest[count:]
        turns = [turn for _, question, answer in taken for turn in talk(question, answer)]
        chats.append({"messages": turns})
    chats += [{"messages": talk(asked(terms), worked([*terms]))} for terms in sums]
    generator.shuffle(chats)
    write_lines(out / "chats.jsonl", chats)


def asked(terms: tuple[int, ...]) -> str:
    return f"What is {' + '.join(map(str, terms))}? Add one number after the other."


def different_sums(count: int) -> list[tuple[int, ...]]:
    """Return ``count`` different sums of the kinds of demo_mismatch.py, none of the sample's."""
    generator = random.Random(0)
    sums: dict[tuple[int, ...], None] = {}
    while len(sums) < count:
        terms, below = KINDS[len(sums) % len(KINDS)]
        drawn = tuple(generator.randrange(below) for _ in range(terms))
        if HELD_OUT_SUMMAND not in drawn:
            sums[drawn] = None
    return [*sums]


COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
"""
TASKS = {
    "documentation": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
""",
    "described": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "sums": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
generation_kwargs: {until: ["<|im_end|>"], max_gen_toks: 96, do_sample: false}
filter_list:
  - name: last
    filter:
      - {function: regex, regex_pattern: "(\\\\d+)", group_select: -1}
      - {function: take_first}
metric_list: [{metric: exact_match}]
""",
}
"""Tasks of lm-evaluation-harness, in its own words."""


def write_tasks(
    out: Path,
    texts: list[str],
    functions: list[tuple[str, str, str]],
    sums: list[tuple[int, ...]],
) -> None:
    """Write tasks/*.yaml and their records."""
    generator = random.Random(0)
    choices = []
    for name, question, answer in functions:
        others = [(other, text) for other, _, text in functions if text != answer]
        package = name.partition(".")[0]
        near = [text for other, text in others if other.partition(".")[0] == package]
        wrong = generator.sample(near if len(near) >= 3 else [text for _, text in others], 3)
        place = generator.randrange(4)
        shown = [*wrong[:place], answer, *wrong[place:]]
        choices.append({"question": question, "choices": shown, "answer": place})
    records = {
        "documentation": [{"text": text} for text in texts],
        "described": choices,
        "sums": [{"question": asked(terms), "answer": str(sum(terms))} for terms in sums],
    }
    folder = out / "tasks"
    folder.mkdir(exist_ok=True)
    for name, rows in records.items():
        file = folder / f"{name}.jsonl"
        write_lines(file, rows)
        common = COMMON.replace("FILE", json.dumps(str(file)))
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{common}{TASKS[name]}")


def write(out: Path, words: argparse.Namespace) -> None:
    """Write everything that the speedrun trains and measures on."""
    out.mkdir(parents=True, exist_ok=True)
    modules = read_modules(words.packages)
    texts = write_text(out, modules)
    random.Random(0).shuffle(texts)
    functions = functions_of(modules)
    functions.sort(key=lambda row: row[0] not in HELD_OUT_FUNCTIONS)  # these come first
    functions, held_out = functions[words.held_out :], functions[: words.held_out]
    sums = different_sums(words.worked + words.rewarded + words.held_out)
    shown, rest = sums[: words.worked], sums[words.worked :]
    rewarded, measured = rest[: words.rewarded], rest[words.rewarded :]
    write_chats(out, functions, shown)
    rows = [{"messages": talk(asked(terms)), "answer": str(sum(terms))} for terms in rewarded]
    write_lines(out / "sums.jsonl", rows)
    (out / "reward.py").write_text(REWARD)
    write_tasks(out, texts[: words.held_out], held_out, measured)
    print((out / "sources.md").read_text())
    print(
        f"{len(functions)} functions and {len(shown)} sums are in chats, {len(rewarded)} sums are"
    )
    print(f"rewarded; {len(held_out)} functions, as many sums and {len(texts)} texts are held out")


# ---- report --------------------------------------------------------------------------------------


def ask(out: Path, name: str, model: Path) -> None:
    """Write the likeliest answers of ``model`` to :data:`ASKED` to ``answers-NAME.json``."""
    from moetrain.generate import request
    from moetrain.generate.engine import Generator, load_model

    loaded, tokenizer = load_model(str(model), "auto", "auto")
    params = request.SamplingParams(
        max_tokens=96,
        temperature=0,
        stop_ids=request.end_ids(loaded, tokenizer),
        stop=request.chat_stops(tokenizer),
    )
    questions = [
        request.Request(
            question, request.chat_ids(tokenizer, [{"role": "user", "content": question}]), params
        )
        for question in ASKED
    ]
    generator = Generator(loaded, tokenizer, num_pages=64)
    answers = {}
    for question, (completion,) in zip(ASKED, generator.generate(questions), strict=True):
        tokens = [token for token in completion.tokens if token not in params.stop_ids]
        answers[question] = tokenizer.decode(tokens).strip()
        print(f"{question}\n    {answers[question]}")
    (out / f"answers-{name}.json").write_text(json.dumps(answers, indent=1))


def curves_of(out: Path) -> dict[str, dict[str, Any]]:
    """Return the curves of the four runs, by folder and name."""
    names = ("loss", "eval_loss", "solved", "eval_solved", "elapsed_seconds")
    found = {}
    for run in ("dense-text", "experts-text", "chats", "rewarded"):
        rows = read_metrics(out / run / "metrics.jsonl")
        found[run] = {name: series(rows, name) for name in names}
    return found


def table_of(out: Path) -> list[str]:
    """Return the table of scores, a stage in each line."""
    lines = [f"| model | {' | '.join(SCORES.values())} |", f"|---|{'---|' * len(SCORES)}"]
    for stage, name in STAGES.items():
        found = json.loads((out / f"scores-{stage}.json").read_text())
        lines.append(f"| {name} | {' | '.join(f'{found[key]:.3f}' for key in SCORES)} |")
    return lines


def sample_of(out: Path) -> list[str]:
    """Return the questions with the first and the last model's answers."""
    first, last = (
        json.loads((out / f"answers-{name}.json").read_text()) for name in ("dense", "rewarded")
    )
    lines = []
    for question in ASKED:
        lines += [f"**{question}**", ""]
        lines += [f"- before: {' '.join(first[question].split())}"]
        lines += [f"- after: {' '.join(last[question].split())}", ""]
    return lines


def draw(file: Path, curves: dict[str, dict[str, Any]]) -> None:
    """Draw the losses on text, the loss on chats, and the share of sums that are right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    text, chats, sums = figure.subplots(1, 3)
    for number, (run, label) in enumerate((("dense-text", "dense"), ("experts-text", "8 experts"))):
        text.plot(*curves[run]["loss"], f"C{number}", alpha=0.3)
        text.plot(*curves[run]["eval_loss"], f"C{number}o-", ms=3, label=f"{label}, held out")
    chats.plot(*curves["chats"]["loss"], "C1", alpha=0.3)
    chats.plot(*curves["chats"]["eval_loss"], "C1o-", ms=3, label="held out")
    sums.plot(*curves["rewarded"]["solved"], "C1", alpha=0.3, label="training, sampled")
    sums.plot(*curves["rewarded"]["eval_solved"], "C1o-", ms=3, label="held out, greedy")
    titles = ("Text: loss, nats a token", "Chats: loss, nats a token", "Rewards: sums solved")
    for axes, title in zip((text, chats, sums), titles, strict=True):
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=120)


def report(out: Path) -> None:
    """Write report.md, figures.json and curves.png."""
    seconds = [line.split("\t") for line in (out / "seconds.tsv").read_text().splitlines()]
    minutes = sum(int(value) for _, value in seconds) / 60
    lines = [*table_of(out), "", *sample_of(out), f"{minutes:.1f} minutes, in seconds: "]
    lines[-1] += ", ".join(f"{name} {value}" for name, value in seconds)
    (out / "report.md").write_text("\n".join(lines) + "\n")
    curves = curves_of(out)
    (out / "figures.json").write_text(json.dumps({"seconds": dict(seconds), "curves": curves}))
    print("\n".join(lines))
    try:
        draw(out / "curves.png", curves)
    except ModuleNotFoundError:
        print("no picture: matplotlib is not installed")


def main() -> None:
    parser = argparse.ArgumentParser(description="The parts of speedrun.sh.", allow_abbrev=False)
    parts = parser.add_subparsers(dest="part", required=True)
    for name, meaning in (
        ("write", "write text, chats, sums and tasks"),
        ("ask", "ask a model three questions"),
        ("report", "write the table, the sample and the picture"),
    ):
        part = parts.add_parser(name, help=meaning, allow_abbrev=False)
        part.add_argument("out", type=lambda text: Path(text).resolve(), help="folder of all files")
        if name == "write":
            part.add_argument("--packages", nargs="*", default=PACKAGES)
            part.add_argument("--worked", type=int, default=500, help="sums in chats")
            part.add_argument("--rewarded", type=int, default=8000, help="sums for rewards")
            part.add_argument("--held_out", type=int, default=300, help="records of each task")
        if name == "ask":
            part.add_argument("name", help="name of the answers' file")
            part.add_argument("model", type=Path)
    words = parser.parse_args()
    if words.part == "write":
        write(words.out, words)
    elif words.part == "ask":
        ask(words.out, words.name, words.model)
    else:
        report(words.out)


if __name__ == "__main__":
    main()
