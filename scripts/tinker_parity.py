"""Compare rewards of the unmodified ``tinker`` SDK on the job service with those of our own loop.

    pip install -e '.[jobs]'
    python scripts/tinker_parity.py outputs/parity --supervised 20         # on two CPU cores
    python scripts/tinker_parity.py outputs/parity --recipe rl-arithmetic \\
        --steps 30 --lr 5e-4 --at_once 3                                    # on one GPU

Both begin with the same weights, which ``moetrain.rl`` trains once on the recipe's demonstrations.
Then, for each seed, ``python -m moetrain.rl`` trains adapters on the recipe's rewards, and a client
of ``python -m moetrain.jobs`` does the same with the SDK alone. A step of the client is: a sampler
of the current weights, a group of answers to each prompt, advantages, ``forward_backward`` with the
loss that ``--loss`` names, and ``optim_step``. Prompts, adapters' first values and all settings are
the same. The loss is the same too. The SDK's is a sum over tokens, so the client divides advantages
by the number of trained tokens. Our loop clips as the SDK does, and has no auxiliary loss.

With ``--draws groups`` the client asks for a group at a time, with random numbers of its own, as
recipes of the SDK do. With ``--draws same`` it asks for each answer separately, with the seed that
our loop gives the answer. Then the two differ by rounding alone, until rounding changes a token. On
a GPU this happens soon, since products there depend on how many rows are generated together.

It prints mean rewards over seeds, smoothed over steps, the solved share of held-out tasks before
and after training, and the number of generated tokens whose log-probability differs in training.
The rows of all steps are in ``parity.jsonl``. The exit code is 1 if the rewards of the last
``--window`` steps, or the solved shares at the end, differ by more than ``--bar``.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain, groupby, product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load, load_file

import moetrain
from moetrain.config import Config, Recipes
from moetrain.data.tokenizer import load_tokenizer
from moetrain.rl.envs.shipped import open_environment
from moetrain.train.metrics import read_metrics

try:
    import tinker
    from tinker import types
except ModuleNotFoundError as error:
    sys.exit(f"error: the client is the tinker SDK's, and {error}; pip install 'moetrain[jobs]'")

ROOT = Path(__file__).parent.parent
CLIPS: dict[str, dict[str, float]] = {
    "importance_sampling": {"rl.clip_low": 1.0, "rl.clip_high": 1e9},
    "ppo": {"rl.clip_low": 0.2, "rl.clip_high": 0.2},
}
"""The bounds of our loop's clipping, by the SDK's name of the loss: no bounds, and the SDK's."""
ALIKE = {
    "rl.policy": "clip",
    "rl.ratio": "rollout",
    "rl.advantage": "dr_grpo",
    "rl.aggregation": "token",
    "rl.temperature": 1.0,
    "rl.supervised_steps": 0,
    "moe.aux_loss_coef": 0.0,
    "optim.schedule": "constant",
    "optim.warmup_steps": 0,
    "optim.weight_decay": 0.0,
}
"""Settings that give our loop the client's loss and steps."""
OF_JOBS = ("model.", "data.", "lora.", "kernels.", "compile.", "rl.max_seq", "rl.cache")
OF_JOBS += ("train.device", "train.dtype", "train.micro", "train.global")
"""Prefixes of settings that the service has too; the client's requests carry other settings."""


class Attempt(NamedTuple):
    """One answer to a prompt."""

    group: int
    prompt: tuple[int, ...]
    tokens: list[int]
    logprobs: list[float]
    reward: float


def advantages(attempts: Iterable[Attempt]) -> list[tuple[Attempt, float]]:
    """Return each attempt with its reward minus its group's mean.

    Groups whose rewards are all equal are left out.
    """
    found = []
    for _, members in groupby(attempts, key=lambda one: one.group):
        group = list(members)
        mean = fmean(one.reward for one in group)
        if len({one.reward for one in group}) > 1:
            found += [(one, one.reward - mean) for one in group]
    return found


class Client:
    """A training run on the task of ``config``, with the SDK alone."""

    def __init__(self, service: tinker.ServiceClient, config: Config, loss: Any, draws: str):
        self.service, self.config, self.loss, self.draws = service, config, loss, draws
        tokenizer = load_tokenizer(config.data.tokenizer)
        self.environment = open_environment(config.rl, tokenizer)
        base = {
            "base_model": self.model_of(service),
            "rank": config.lora.rank,
            "seed": config.train.seed,
        }
        self.run = service.create_lora_training_client(**base).result()
        self.step = self.sampled = self.trained = self.differing = 0
        """The number of steps, of sampled tokens, of trained tokens, and of trained tokens whose
        log-probability in the pass differed from the sampler's."""
        self.attempts: list[Attempt] = []
        """The attempts of the last step."""

    @staticmethod
    def model_of(service: tinker.ServiceClient) -> str:
        """Return the name of the base model of ``service``."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the SDK says that the call moves to another class
            (model,) = service.get_server_capabilities().supported_models
        assert model.model_name is not None
        return model.model_name

    def fit(self, every: int) -> Iterator[dict[str, float]]:
        """Train to the end; yield the row of each step and of each evaluation.

        Evaluations are before every ``every``-th step, from the first, and at the end.
        """
        for step in range(self.config.train.steps or 0):
            if step % every == 0:
                yield self.evaluate()
            yield self.learn()
        yield self.evaluate()

    def sampler(self) -> tinker.SamplingClient:
        """Return a sampler of the current weights."""
        return self.run.save_weights_and_get_sampling_client().result()

    def evaluate(self) -> dict[str, float]:
        """Answer the held-out tasks greedily; return the row: solved share and mean reward."""
        number = self.config.rl.eval_tasks
        asked = [(-1 - task, task, 1, 0) for task in range(number)]
        found = self.answers(self.sampler(), asked, 0.0)
        rewards = [one.reward for one in found]
        solved = sum(reward >= 1 for reward in rewards) / number
        return {"step": self.step, "eval_solved": solved, "eval_reward": fmean(rewards)}

    def learn(self) -> dict[str, float]:
        """Make one step: sample, compute advantages, pass forward and back, update.

        Returns the step's row.
        """
        rl, optim = self.config.rl, self.config.optim
        size, seed = rl.group_size, self.config.train.seed
        number = self.config.train.global_batch_size // size
        asked = []
        for group in range(self.step * number, (self.step + 1) * number):
            task = rl.eval_tasks + group  # the tasks before are held out
            if self.draws == "groups":
                asked.append((group, task, size, random.Random(f"{seed}/{group}").getrandbits(62)))
            for member in range(size if self.draws == "same" else 0):
                own = random.Random(f"{seed}/{group}/{member}").getrandbits(63)
                asked.append((group, task, 1, own))
        self.attempts = self.answers(self.sampler(), asked, rl.temperature)
        self.sampled += sum(len(one.tokens) for one in self.attempts)
        worth = advantages(self.attempts)
        # The longest come first, as in our loop's packing: then rows are the same too.
        worth.sort(key=lambda pair: -len(pair[0].prompt) - len(pair[0].tokens))
        total = sum(len(one.tokens) for one, _ in worth)
        row = {"grad_norm": 0.0, "loss": 0.0}
        if worth:
            data = [self.datum(one, advantage / total) for one, advantage in worth]
            passed = self.run.forward_backward(data, self.loss)
            params = types.AdamParams(
                learning_rate=optim.lr,
                beta1=optim.beta1,
                beta2=optim.beta2,
                eps=optim.eps,
                weight_decay=optim.weight_decay,
                grad_clip_norm=optim.max_grad_norm,
            )
            stepped = self.run.optim_step(params)
            outputs = passed.result().loss_fn_outputs
            row = {"loss": passed.result().metrics["loss:sum"], **(stepped.result().metrics or {})}
            self.compare([one for one, _ in worth], outputs)
        self.step += 1
        rewards = [one.reward for one in self.attempts]
        length = sum(len(one.tokens) for one in self.attempts) / len(self.attempts)
        return {"step": self.step, "reward": fmean(rewards), "length": length, **row}

    def answers(
        self,
        sampler: tinker.SamplingClient,
        asked: Sequence[tuple[int, int, int, int]],
        temperature: float,
    ) -> list[Attempt]:
        """Sample attempts at tasks, and return them in order.

        ``asked``: for each request its group, task, number of answers, and seed.
        """
        waiting: list[tuple[int, Any, tuple[int, ...], int, Any]] = []
        for group, task, number, seed in asked:
            episode = self.environment.episode(task)
            prompt: Any = episode.reset()
            params = types.SamplingParams(
                max_tokens=self.config.rl.max_tokens, seed=seed, temperature=temperature
            )
            given = types.ModelInput.from_ints([*prompt.tokens])
            future = sampler.sample(given, number, params)
            waiting.append((group, task, prompt.tokens, number, future))
        found = []
        for group, task, prompt, number, future in waiting:
            sequences = future.result().sequences
            assert len(sequences) == number
            for one in sequences:
                episode = self.environment.episode(task)
                episode.reset()
                turn: Any = episode.step(one.tokens)
                found.append(Attempt(group, prompt, one.tokens, one.logprobs, turn.reward))
        return found

    @staticmethod
    def datum(one: Attempt, advantage: float) -> types.Datum:
        """Return the datum of an attempt, for all tokens after the first.

        Log-probabilities and advantages of the prompt's tokens are 0.
        """
        tokens, unread = [*one.prompt, *one.tokens], len(one.prompt) - 1
        inputs = {
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * unread + one.logprobs,
            "advantages": [0.0] * unread + [advantage] * len(one.tokens),
        }
        prompt = types.ModelInput.from_ints(tokens[:-1])
        return types.Datum(model_input=prompt, loss_fn_inputs=inputs)  # pyright: ignore

    def compare(self, attempts: Sequence[Attempt], outputs: Sequence[Any]) -> None:
        """Count tokens whose log-probability in the pass differs from that of their sampling."""
        for one, output in zip(attempts, outputs, strict=True):
            told = output["logprobs"].to_numpy()[len(one.prompt) - 1 :]
            known = np.array(one.logprobs, np.float32)
            assert told.shape == known.shape
            self.trained += len(known)
            self.differing += int((told != known).sum())

    def adapter(self) -> dict[str, torch.Tensor]:
        """Save and download the adapter; return its tensors by PEFT's names."""
        path = self.run.save_weights_external(f"at-{self.step}").result().path
        urls = self.service._rest_client().get_external_weights_urls(path).result().urls
        with urllib.request.urlopen(urls["adapter_model.safetensors"]) as reply:
            return load(reply.read())


def furthest(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference between two adapters' elements, over the largest of ``one``."""
    assert one.keys() == other.keys()
    largest = max(x.abs().max().item() for x in one.values())
    return max((x - other[name]).abs().max().item() for name, x in one.items()) / largest


# ---- processes -----------------------------------------------------------------------------------


def words_of(settings: Mapping[str, Any]) -> list[str]:
    """Return ``settings`` as words of a command line."""
    values = {key: x if isinstance(x, str) else json.dumps(x) for key, x in settings.items()}
    return [f"{key}={value}" for key, value in values.items()]


def run(module: str, settings: Mapping[str, Any], log: Path) -> None:
    """Run ``python -m module``; if it fails, print the end of its output and exit."""
    with log.open("w") as out:
        command = [sys.executable, "-m", module, *words_of(settings)]
        code = subprocess.run(command, cwd=ROOT, stdout=out, stderr=out).returncode
    if code:
        sys.exit(f"error: {module} ended with code {code}\n{log.read_text()[-2000:]}")


@contextmanager
def serving(settings: Mapping[str, Any], log: Path) -> Iterator[tinker.ServiceClient]:
    """Run the job service while the context lasts, and yield a client of it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moetrain.jobs", *words_of(settings), f"jobs.port={port}"]
    with log.open("w") as out, subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out) as jobs:
        try:
            while f"http://127.0.0.1:{port}" not in log.read_text():
                if jobs.poll() is not None:
                    sys.exit(f"error: the service did not start\n{log.read_text()[-2000:]}")
                time.sleep(0.2)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                client = tinker.ServiceClient(
                    base_url=f"http://127.0.0.1:{port}", api_key="tml-any"
                )
            yield client
            client.close("success").result()
        finally:
            jobs.terminate()


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return the settings of nested tables by dotted name."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{before}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found


# ---- figures -------------------------------------------------------------------------------------


def curve(rows: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """Return the values of ``name`` in order, of the rows that have one."""
    return [row[name] for row in rows if row.get(name) is not None]


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return at each position the mean of the last ``window`` values."""
    return [fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def same_steps(one: Sequence[float], other: Sequence[float]) -> int:
    """Return the number of leading values that are equal up to the rounding of a mean."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((i for i, (x, y) in pairs if abs(x - y) > 1e-9), len(one))


def show(rows: Sequence[Mapping[str, Any]], window: int, bar: float) -> bool:
    """Print tables of ``rows``; return True if every client ends within ``bar`` of the loop."""
    keys = list(dict.fromkeys((row["how"], row["seed"]) for row in rows))
    parts = {key: [row for row in rows if (row["how"], row["seed"]) == key] for key in keys}
    curves = {key: smoothed(curve(part, "reward"), window) for key, part in parts.items()}
    seeds = list(dict.fromkeys(seed for _, seed in keys))
    hows = list(dict.fromkeys(how for how, _ in keys))
    means = {
        how: [fmean(step) for step in zip(*(curves[how, seed] for seed in seeds), strict=True)]
        for how in hows
    }
    others, steps = hows[1:], len(means["loop"])
    print(f"\nmean reward of {len(seeds)} seeds and the last {window} steps")
    print("  step" + "".join(f"{how:>14}" for how in hows) + "   apart so far, at most")
    every = max(1, steps // 10)
    for step in sorted({1, *range(every, steps + 1, every), steps}):
        found = [
            max(abs(x - y) for x, y in zip(means["loop"][:step], means[how][:step], strict=True))
            for how in others
        ]
        row = "".join(f"{means[how][step - 1]:>14.4f}" for how in hows)
        print(f"{step:>6}{row}   " + "  ".join(f"{x:.4f}" for x in found))
    print("\nseed  by             reward   held out: before     after")
    ends: dict[str, list[tuple[float, float]]] = {how: [] for how in hows}
    for how, seed in keys:
        solved, reward = curve(parts[how, seed], "eval_solved"), curves[how, seed][-1]
        ends[how].append((reward, solved[-1]))
        print(f"{seed:>4}  {how:<13}{reward:>8.4f}{solved[0]:>19.3f}{solved[-1]:>10.3f}")
    own, is_within = np.mean(ends["loop"], 0), True
    for how in others:
        apart = np.mean(ends[how], 0) - own
        is_within &= bool(np.abs(apart).max() <= bar)
        print(f"{how} - loop: reward {apart[0]:+.4f}, held out {apart[1]:+.4f}; bar {bar}")
        found = [
            same_steps(*(curve(parts[key, seed], "reward") for key in ("loop", how)))
            for seed in seeds
        ]
        print(f"  steps from the first whose rewards are the same: {found} of {steps}")
    return is_within


# ---- both runs, for every seed -------------------------------------------------------------------


def settings_of(args: argparse.Namespace, given: Sequence[str]) -> dict[str, Any]:
    """Train the weights that both start from, unless they exist; return our loop's settings."""
    if odd := [word for word in given if not (word.startswith("--") and "=" in word)]:
        sys.exit(f"error: {odd[0]!r} is neither an option nor --SECTION.KEY=VALUE")
    more = dict(word.removeprefix("--").split("=", 1) for word in given)
    file = Path(moetrain.__file__).parent / "recipes" / f"{args.recipe}.toml"
    recipe = {"rl.chat": False, **flat(tomllib.loads(file.read_text())), **more}
    number = recipe["rl.supervised_steps"] if args.supervised is None else args.supervised
    base = args.out / "start"
    if not (base / "hf" / "config.json").exists():
        print(f"the start: {number} supervised steps of {args.recipe}", flush=True)
        only = {"train.steps": number, "rl.supervised_steps": number, "checkpoint.save_hf": True}
        run("moetrain.rl", recipe | only | {"output_dir": str(base)}, args.out / "start.log")
    kept = {key: x for key, x in recipe.items() if not key.startswith(("model.", "rl.supervised"))}
    return {
        **kept,
        **ALIKE,
        **CLIPS[args.loss],
        "model.path": str(base / "hf"),
        "data.tokenizer": str(base / "hf"),
        "lora.rank": args.rank,
        "optim.lr": args.lr,
        "train.steps": args.steps,
        "train.eval_interval": args.every,
        "log.interval": 1,
        "checkpoint.interval": 0,
        "checkpoint.at_end": False,
        "checkpoint.save_hf": False,
        "checkpoint.resume": "never",
    }


def by_loop(settings: Mapping[str, Any], out: Path, seed: int) -> list[dict[str, Any]]:
    """Train with our own loop; return its rows."""
    started, log = time.monotonic(), out / f"loop-{seed}.log"
    own = {"train.seed": seed, "output_dir": str(out / f"loop-{seed}")}
    metrics = out / f"loop-{seed}" / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    run("moetrain.rl", {**settings, **own}, log)
    found = re.search(r"rl mismatch: (.*)", log.read_text())
    said = found[1] if found else "no tokens were compared"
    print(f"loop, seed {seed}: {time.monotonic() - started:.0f} s; {said}", flush=True)
    kept = ("step", "reward", "length", "grad_norm", "loss", "eval_solved", "eval_reward")
    return [
        {"how": "loop", "seed": seed, **{key: row[key] for key in kept if key in row}}
        for row in read_metrics(metrics)
    ]


def by_sdk(client: Client, out: Path, every: int) -> list[dict[str, Any]]:
    """Train with ``client``; return its rows."""
    started, seed = time.monotonic(), client.config.train.seed
    how = f"sdk, {client.draws}"
    rows: list[dict[str, Any]] = []
    for row in client.fit(every):
        rows.append({"how": how, "seed": seed, **row})
    said = f"{how}, seed {seed}: {time.monotonic() - started:.0f} s; sampled {client.sampled:,} "
    said += (
        f"tokens, compared {client.trained:,} with the trainer's, differing {client.differing:,}"
    )
    if client.draws == "same":
        own = load_file(out / f"loop-{seed}" / "adapter" / "adapter_model.safetensors")
        said += f"; adapters are apart by {furthest(own, client.adapter()):.1e}"
    print(said, flush=True)
    return rows


def main() -> int:
    """Train the start, run the loop and the client for every seed, and print the comparison."""
    parser = argparse.ArgumentParser(description="Compare rewards.", allow_abbrev=False)
    parser.add_argument("out", type=lambda text: Path(text).resolve(), help="folder of all files")
    parser.add_argument("--recipe", default="rl-sort", help="recipe with demonstrations")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60, help="steps of reinforcement learning")
    parser.add_argument("--supervised", type=int, help="steps of the start; unset: the recipe's")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--loss", choices=CLIPS, default="importance_sampling")
    parser.add_argument("--draws", choices=("groups", "same"), nargs="+", default=["groups"])
    parser.add_argument("--at_once", type=int, default=1, help="number of concurrent seeds")
    parser.add_argument("--window", type=int, default=10, help="steps over which means are taken")
    parser.add_argument("--every", type=int, default=20, help="steps between evaluations")
    parser.add_argument("--bar", type=float, default=0.1)
    args, given = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    settings = settings_of(args, given)
    served = {key: x for key, x in settings.items() if key.startswith(OF_JOBS)}
    served |= {"output_dir": str(args.out / f"jobs-{time.time_ns()}"), "jobs.max_queued": 8192}
    with ThreadPoolExecutor(args.at_once) as pool:
        parts = list(pool.map(partial(by_loop, settings, args.out), args.seeds))
        with serving(served, args.out / "jobs.log") as service:
            clients = []
            for how, seed in product(args.draws, args.seeds):
                words = words_of(settings | {"train.seed": seed, "output_dir": str(args.out)})
                config = Config.load(None, words, environ={}, recipes=Recipes.RL)
                clients.append(Client(service, config, args.loss, how))
            sdk = partial(by_sdk, out=args.out, every=args.every)
            parts += pool.map(sdk, clients)
    rows = [*chain.from_iterable(parts)]
    (args.out / "parity.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0 if show(rows, args.window, args.bar) else 1


if __name__ == "__main__":
    sys.exit(main())
