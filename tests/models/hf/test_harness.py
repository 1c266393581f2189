"""Benchmarks: scores on our generator equal those of lm-evaluation-harness's own model."""

import json
from functools import partial

import pytest
import torch

from moetrain import Trainer
from moetrain.cli.main import main
from moetrain.config import Config, ConfigError
from moetrain.data.tokenizer import load_tokenizer
from moetrain.generate.engine import Generator
from moetrain.models.hf.load import load_hf
from moetrain.train.metrics import read_metrics
from tests.lib.distributed import spawn

pytest.importorskip("lm_eval")
import lm_evaluation
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_evaluation import Benchmarked

COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
doc_to_text: "{{question}}"
"""
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "texts": """
output_type: generate_until
doc_to_target: "{{text}}"
generation_kwargs: {until: ["e", "\\n\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "perplexity": """
output_type: loglikelihood_rolling
doc_to_target: "{{long}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Write a folder of tasks over one file of questions."""
    folder = tmp_path_factory.mktemp("tasks")
    questions = [
        {
            "question": f"def value_{n}(self):\n    return " * (1 + n % 3),
            "choices": ["self", "None", f"value_{n}", " "],
            "answer": n % 4,
            "text": "s",
            "long": f"import os, sys  # {n}\n" * (1 + 5 * (n % 4)),
        }
        for n in range(11)
    ]
    file = folder / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, questions)))
    for name, text in TASKS.items():
        common = COMMON.replace("FILE", str(file))
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{common}{text}")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Export a model that has learned a little."""
    folder = tmp_path_factory.mktemp("run")
    words = ["--train.steps", "6", "--checkpoint.save_hf", "yes", "--data.seq_len", "64"]
    words += ["--train.eval_interval", "0", "--train.sample_tokens", "0"]
    assert main(["train", "debug", *words, "--output_dir", str(folder)]) == 0
    return folder / "hf"


@pytest.fixture(scope="module")
def expected(tasks, checkpoint):
    model = HFLM(str(checkpoint), device="cpu", dtype="float32", batch_size=1, max_length=126)
    manager = TaskManager(include_path=str(tasks))
    return simple_evaluate(model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)


@pytest.mark.tier("long")
def test_scores_are_those_of_its_own_model(tasks, checkpoint, expected):
    before = torch.get_rng_state()
    generator = Generator(
        load_hf(checkpoint, dtype=torch.float32), num_pages=8, page_size=16, max_tokens=24
    )
    generator.tokenizer = load_tokenizer(str(checkpoint))
    assert generator.longest == 128
    found = Benchmarked(tuple(TASKS), task_folder=str(tasks)).scores(generator, generator.tokenizer)
    assert torch.equal(torch.get_rng_state(), before)
    theirs = {
        f"eval/{task}/{metric.removesuffix(',none')}": value
        for task, row in expected["results"].items()
        for metric, value in row.items()
        if metric.endswith(",none") and "stderr" not in metric
    }
    assert set(found) == set(theirs)
    assert {name.rpartition("/")[2] for name in found} == {
        *("acc", "acc_norm", "exact_match", "word_perplexity", "bits_per_byte")
    }
    assert found == pytest.approx(theirs, rel=1e-4)
    assert 0 < found["eval/choices/acc"] < 1


def run_of(words, **asked):
    """Return the logged rows of a run, from its main rank."""
    callbacks = [Benchmarked(**asked)] if asked else []
    trainer = Trainer(Config.load("debug", words, environ={}), callbacks=callbacks)
    trainer.fit()
    return read_metrics(trainer.reporter.log.path) if trainer.world.is_main else []


@pytest.mark.tier("long")
def test_a_run_measures_itself_and_trains_as_without(tasks, tiny_words, tmp_path):
    words = [*tiny_words, "train.steps=4", "train.sample_tokens=0", "model.num_layers=1"]
    asked = {"tasks": ["choices", "texts"], "task_folder": str(tasks), "interval": 2, "limit": 5}
    plain = run_of([*words, f"output_dir={tmp_path / 'plain'}"])
    rows = run_of([*words, f"output_dir={tmp_path / 'one'}"], **asked)
    scores = [row for row in rows if any(key.startswith("eval/") for key in row)]
    assert [row["step"] for row in scores] == [2, 4]
    assert set(scores[0]) >= {"eval/choices/acc", "eval/texts/exact_match"}
    losses = [[row["loss"] for row in found if "loss" in row] for found in (plain, rows)]
    assert losses[0] == losses[1]
    more = ["parallel.ep=2", f"output_dir={tmp_path / 'two'}"]
    ranks = spawn(2, partial(run_of, **asked), [*words, *more])
    both = [row for row in ranks[0] if any(key.startswith("eval/") for key in row)]
    for mine, theirs in zip(both, scores, strict=True):
        assert mine == pytest.approx(theirs)


@pytest.mark.tier("long")
def test_a_checkpoint_is_measured_without_training(
    tasks, checkpoint, expected, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "scores.json"
    asked = ["choices", "--task_folder", str(tasks), "--weights", str(checkpoint)]
    assert lm_evaluation.main([*asked, "--scores", str(file)]) == 0
    theirs = {
        f"eval/choices/{m}": expected["results"]["choices"][f"{m},none"]
        for m in ("acc", "acc_norm")
    }
    assert json.loads(file.read_text()) == pytest.approx(theirs, rel=1e-4)
    assert f"eval/choices/acc {theirs['eval/choices/acc']:.4g}" in capsys.readouterr().out
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--weights", "x", "--train.steps", "3"], "--weights: nothing is trained"),
        (["--weights", "x", "--interval", "3"], "--weights: nothing is trained"),
        (["--scores", "x"], "--scores: a run writes its scores to its metrics"),
    ],
)
def test_words_without_effect_are_refused(words, problem, capsys):
    with pytest.raises(SystemExit) as ended:
        lm_evaluation.main(["choices", *words])
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err


def test_a_task_that_there_is_not_is_one_line():
    with pytest.raises(ConfigError, match="tasks: 'choses' is no task of lm-eval's"):
        Benchmarked(["choses"])
