"""Benchmarks of EleutherAI's lm-evaluation-harness while a model trains, on our generator.

    from lm_evaluation import Benchmarked

    Trainer(config, callbacks=[Benchmarked(("arc_easy", "gsm8k"), interval=1000)]).fit()

or, with settings as ``python -m moetrain.train`` takes them:

    python examples/lm_evaluation.py arc_easy,gsm8k --interval 1000 --model.path MODEL ...

A checkpoint is measured without training, and its scores go to a file if one is named:

    python examples/lm_evaluation.py arc_easy,gsm8k --weights MODEL --scores scores.json

:class:`~moetrain.generate.engine.Generator` writes answers, and scores texts by their
log-probabilities as prompts. With several ranks each serves its share of the requests, and all
ranks get every answer.

The library (``pip install lm-eval``) brings tasks, prompts and scores. Left out on purpose: tasks
that change while they run, and models that are no generator.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.evaluator import simple_evaluate  # pyright: ignore[reportMissingImports]
from lm_eval.tasks import TaskManager, get_task_dict  # pyright: ignore[reportMissingImports]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # pyright: ignore[reportMissingImports]

from moetrain.cli.main import command, leave
from moetrain.config import Config, ConfigError
from moetrain.config.sources import shortened
from moetrain.data.chat import ChatTemplate
from moetrain.data.tokenizer import Tokenizer
from moetrain.generate.engine import Generator, load_model
from moetrain.generate.request import Completion, Request, SamplingParams
from moetrain.generate.weights import WeightUpdate, generator_of
from moetrain.parallel.world import World
from moetrain.train.callbacks import Callback, RunView
from moetrain.train.loop import Trainer

_MOST_TOKENS = 256
"""Tokens of an answer for tasks without a limit."""
_NO_SEEDS: Any = dict.fromkeys(
    ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
)
"""The library would seed the process, which would affect training."""


class Benchmarked(Callback):
    """Logs the scores of ``tasks`` every ``interval`` steps (0: never), and when the run ends."""

    def __init__(
        self,
        tasks: Sequence[str],
        *,
        interval: int = 0,
        limit: int | None = None,
        num_fewshot: int | None = None,
        chat: bool = False,
        task_folder: str | None = None,
    ) -> None:
        """Load the tasks and their data, or raise ConfigError.

        Args:
            limit: number of questions of each task; None: all.
            num_fewshot: solved examples before each question; None: as many as the task says.
            chat: ask by the chat template.
            task_folder: folder of further tasks, YAML files in the library's format.
        """
        self.tasks, self.interval, self._done_at = tasks, interval, -1
        self._how: Any = {"num_fewshot": num_fewshot, "limit": limit, "apply_chat_template": chat}
        self._manager = TaskManager(include_path=task_folder)
        if unknown := sorted({*tasks} - {*self._manager.all_tasks}):
            problem = f"{unknown[0]!r} is no task of lm-eval's"
            raise ConfigError("tasks", f"{problem}, nor of the folder of tasks")
        try:
            get_task_dict([*tasks], self._manager)
        except Exception as error:  # noqa: BLE001 - of any library that loads its data
            problem = f"the data of {', '.join(tasks)} cannot be loaded"
            raise ConfigError("tasks", f"{problem}: {shortened(str(error))}") from None

    def scores(
        self, generator: Generator, tokenizer: Tokenizer, world: World | None = None
    ) -> dict[str, float]:
        """Return every score by ``eval/TASK/METRIC``. Collective over the ranks of ``world``."""
        found: Any = simple_evaluate(
            model=_Model(generator, tokenizer, world),
            tasks=[*self.tasks],
            **self._how,
            task_manager=self._manager,
            log_samples=False,
            bootstrap_iters=0,
            **_NO_SEEDS,
        )
        return {
            f"eval/{task}/{metric.removesuffix(',none').replace(',', '/')}": float(value)
            for task, row in found["results"].items()
            for metric, value in row.items()
            if isinstance(value, (int, float)) and "_stderr" not in metric and "," in metric
        }

    def on_step(self, run: RunView) -> None:
        if self.interval and run.step % self.interval == 0:
            self._measure(run)

    def on_end(self, run: RunView, error: BaseException | None) -> None:
        if error is None and self._done_at < run.step:
            self._measure(run)

    def _measure(self, run: RunView) -> None:
        assert isinstance(run, Trainer)
        self._done_at = run.step
        run.clock.stop()
        tokenizer = run.data.tokenizer
        try:
            generator = generator_of(run.engine, tokenizer)
        except ValueError as error:
            run.say(f"no benchmark: {error}")
        else:
            WeightUpdate(run.engine, generator)()
            scores = self.scores(generator, tokenizer, run.world)
            generator.sleep(weights=True)
            run.report(scores)
            run.say(", ".join(f"{name} {value:.4g}" for name, value in scores.items()))
        run.clock.start()


class _Model(TemplateLM):
    """A generator with the library's interface of a model."""

    def __init__(self, generator: Generator, tokenizer: Tokenizer, world: World | None) -> None:
        super().__init__()
        self.generator = generator
        self.text = tokenizer
        self.world = world

    @property
    def eot_token_id(self) -> int:
        return self.text.eos_id

    @property
    def tokenizer_name(self) -> str:
        return type(self.text).__name__

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        ids, bos = self.text.encode_batch([string])[0].ids.tolist(), [*self.text.bos_ids]
        is_begun = ids[: len(bos)] == bos  # a conversation's template has written it already
        return ids if add_special_tokens is False or is_begun else [*bos, *ids]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return None  # the checkpoint's template, in apply_chat_template

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return ChatTemplate.of(self.text).prompt(chat_history, {})

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        made: list[Request] = []
        for number, (context, how) in enumerate(request.args for request in requests):
            until = how.get("until") or []
            most = int(how.get("max_gen_toks", how.get("max_tokens", _MOST_TOKENS)))
            most = min(most, self.generator.longest - 1)
            params = SamplingParams(
                max_tokens=most,
                temperature=float(how.get("temperature", 0)) if how.get("do_sample") else 0.0,
                top_p=float(how.get("top_p") or 1),
                top_k=int(how.get("top_k") or 0),
                stop=tuple(filter(None, [until] if isinstance(until, str) else until)),
                stop_ids=(self.text.eos_id,),
            )
            ids = self.tok_encode(context)[-(self.generator.longest - most) :]
            made.append(Request(str(number), tuple(ids), params))
        answers = self._served(made, self._text)
        for number, request in enumerate(made):
            for stop in request.params.stop:
                answers[number] = answers[number].partition(stop)[0]
        return answers

    def _text(self, completion: Completion) -> str:
        tokens = completion.tokens
        return self.text.decode(tokens[:-1] if tokens[-1] == self.text.eos_id else tokens)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return self._scores([([*before, *after], len(after)) for _, before, after in requests])

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        window = self.generator.longest - 1
        parts, counts = [], []
        for (text,) in (request.args for request in requests):
            ids = self.tok_encode(text, add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, window - 1, 1)
            pairs = [make_disjoint_window(pair) for pair in windows]
            parts += [([*before, *after], len(after)) for before, after in pairs]
            counts.append(len(pairs))
        scores = iter(self._scores(parts))
        return [sum(logprob for logprob, _ in islice(scores, count)) for count in counts]

    def _scores(self, parts: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Return the log-probability of the last tokens of each text, and True if all are the
        likeliest.

        A text that is too long for the cache loses its beginning.

        ``parts``: texts, each with the number of its last tokens to score.
        """
        asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
        window = self.generator.longest - 1
        made = [Request(str(i), tuple(ids[-window:]), asked) for i, (ids, _) in enumerate(parts)]
        found = self._served(made, lambda done: [done.prompt_logprobs, done.prompt_top_logprobs])
        scores: list[tuple[float, bool]] = []
        for request, (_, count), (logprobs, tops) in zip(made, parts, found, strict=True):
            first = max(len(logprobs) - count, 0)
            likeliest = [token for top in tops[first:] for token in top]
            is_greedy = likeliest == [*request.tokens[first + 1 :]]
            scores.append((sum(logprobs[first:]), is_greedy))
        return scores

    def _served(self, requests: list[Request], pick: Callable[[Completion], Any]) -> list[Any]:
        """Serve ``requests``, a share on each rank, and return ``pick`` of each completion."""
        rank, size = (0, 1) if self.world is None else (self.world.rank, self.world.size)
        done = self.generator.generate(requests[rank::size])
        found = [pick(completion) for (completion,) in done]
        answers: list[Any] = [None] * len(requests)
        for other, part in enumerate([found] if self.world is None else self.world.gather(found)):
            answers[other::size] = part
        return answers


@command
def main(argv: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("tasks", help="names of tasks, with commas between")
    parser.add_argument("--interval", type=int, default=0, help="steps between; 0: at the end")
    parser.add_argument("--limit", type=int, help="the first so many questions of each task")
    parser.add_argument("--num_fewshot", type=int, help="solved examples before each question")
    parser.add_argument("--chat", action="store_true", help="ask by the chat template")
    parser.add_argument("--task_folder", help="folder of further tasks")
    parser.add_argument(
        "--weights", help="measure this Hugging Face folder or hub id, train nothing"
    )
    parser.add_argument("--scores", type=Path, help="with --weights, write the scores to this file")
    given, words = parser.parse_known_args(argv)
    own = vars(given) | {"tasks": given.tasks.split(",")}
    weights, file = own.pop("weights"), own.pop("scores")
    if weights is None:
        if file is not None:
            parser.error("--scores: a run writes its scores to its metrics; drop it")
        Trainer(Config.load(None, words), callbacks=[Benchmarked(**own)]).fit()
        return
    if words or given.interval:
        parser.error(f"--weights: nothing is trained, so drop {words or '--interval'}")
    model, tokenizer = load_model(weights, "auto", "auto")
    scores = Benchmarked(**own).scores(Generator(model, tokenizer), tokenizer)
    print("\n".join(f"{name} {value:.4g}" for name, value in scores.items()))
    if file is not None:
        file.write_text(json.dumps(scores, indent=1))


if __name__ == "__main__":
    leave(main())
