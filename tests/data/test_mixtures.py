"""Mixtures of sources: the rows of a pass, at any point of a run and on any number of ranks."""

import gzip
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from moetrain import Trainer
from moetrain.config import Config, ConfigError
from moetrain.data.loader import Batch, Data, Loader, build_data
from moetrain.data.packing import Mixture, Row, Samples, Shuffled, SyntheticDataset
from moetrain.train.metrics import read_metrics
from tests.lib.command_lines import settled
from tests.lib.data_files import BYTE_VOCAB, write_lines
from tests.lib.distributed import spawn

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def written(
    folder: Path, text: Callable[[str, int], str] = lambda letter, i: letter * 15
) -> list[dict[str, object]]:
    """Write a table, compressed lines and a saved data set; return their entries of a mixture."""
    texts = {letter: [{"text": text(letter, i)} for i in range(40)] for letter in "abc"}
    parquet.write_table(pa.Table.from_pylist(texts["a"]), folder / "a.parquet")
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(record) + "\n" for record in texts["b"])
    datasets.Dataset.from_list(texts["c"]).save_to_disk(folder / "c")
    return [{"path": str(folder / name)} for name in ("a.parquet", "b.jsonl.gz", "c")]


def mixed(tmp_path: Path, entries: list[dict[str, object]], **data: object) -> Data:
    settings = {"mix": entries, "seq_len": 16, "cache_dir": str(tmp_path / "cache")}
    settings |= {"eval_fraction": 0}
    config = Config.load({"model": {"preset": "debug"}, "data": settings | data})
    return build_data(config, BYTE_VOCAB)


def letters(samples: Samples, start: int, stop: int) -> list[str]:
    return [chr(samples.sample(i).tokens_S[0]) for i in range(start, stop)]


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ([{}, {}, {}], {"a": 40, "b": 40, "c": 40}),
        ([{"repeat": 3}, {"limit": 7}, {}], {"a": 120, "b": 7, "c": 40}),
        ([{"weight": 2}, {"weight": 1}, {"weight": 1}], {"a": 40, "b": 20, "c": 20}),
        ([{"weight": 2, "repeat": 2}, {"weight": 1}, {"weight": 1}], {"a": 80, "b": 40, "c": 40}),
        (
            [{"weight": 0.5}, {"weight": 0.3}, {"weight": 0.2, "limit": 4}],
            {"a": 10, "b": 6, "c": 4},
        ),
    ],
)
def test_a_pass_has_the_shares_that_weights_repeats_and_limits_ask_for(
    changes: list[dict], counts: dict[str, int], tmp_path: Path
):
    entries = [entry | change for entry, change in zip(written(tmp_path), changes, strict=True)]
    train = mixed(tmp_path, entries).train
    assert isinstance(train, Mixture)
    size = sum(counts.values())
    assert len(train) == size
    found = letters(train, 0, 2 * size)
    assert Counter(found[:size]) == Counter(found[size:]) == counts
    assert found[:size] != found[size:]


class Numbered(Shuffled):
    """Rows whose token is their own number, from ``first`` on."""

    def __init__(self, size: int, first: int = 0) -> None:
        super().__init__(SyntheticDataset(size, 2, 2, seed=0), seed=0)
        self.first = first

    def sample(self, number: int) -> Row:
        token = np.array([self.first + self.index(number)])
        return Row(tokens_S=token, targets_S=token, positions_S=None, lengths=np.array([1]))


def test_later_passes_take_the_other_rows_of_a_larger_source():
    train = Mixture({"large": Numbered(10), "small": Numbered(2, first=10)}, [5, 2], 0)
    found = [int(train.sample(i).tokens_S[0]) for i in range(14)]
    assert sorted(found) == [*range(10), 10, 10, 11, 11]


@pytest.mark.parametrize("done", [1, 5, 13])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_resumed_mixture_gives_the_same_samples_on_other_ranks(
    done: int, ranks: int, tmp_path: Path
):
    entries = [{**entry, "weight": i + 1.0} for i, entry in enumerate(written(tmp_path))]
    train = mixed(tmp_path, entries).train
    whole = Loader(train, 8, 2, seed=0)
    for _ in range(done):
        whole.next_step()
    state = json.loads(json.dumps(whole.state()))
    assert state == {"sample_index": 8 * done}
    want = [batch.tokens_BS.tolist() for batch in whole.next_step()]
    again = mixed(tmp_path, entries).train
    found = []
    for rank in range(ranks):
        loader = Loader(again, 8, 2, seed=0, rank=rank, world_size=ranks)
        loader.resume(state)
        found.append([batch.tokens_BS.tolist() for batch in loader.next_step()])
    assert [found[i % ranks][i // ranks] for i in range(4)] == want


@pytest.mark.tier("long")
def test_a_run_over_a_mixture_resumes_and_evaluates_each_source(tmp_path: Path):
    table = "".join(
        f'[[data.mix]]\npath = "{entry["path"]}"\nweight = {i + 1}\nrepeat = 9\n'
        for i, entry in enumerate(written(tmp_path))
    )
    (tmp_path / "run.toml").write_text(table)
    words = "model.preset=debug data.seq_len=16 data.eval_fraction=0.3 train.micro_batch_size=2 "
    words += "train.global_batch_size=4 model.num_layers=1 train.sample_tokens=0 log.interval=1 "
    words += f"data.cache_dir={tmp_path}/cache"

    def train(name: str, steps: int) -> list[dict]:
        folder = tmp_path / name
        overrides = settled([*words.split(), f"output_dir={folder}", f"train.steps={steps}"])
        Trainer(Config.load(tmp_path / "run.toml", overrides)).fit()
        return read_metrics(folder / "metrics.jsonl")

    whole = train("whole", 6)
    train("halves", 3)
    again = train("halves", 6)
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in (whole, again)]
    assert len(losses[0]) == 6
    assert losses[0][3:] == losses[1][3:]
    last = [row for row in whole if "eval_loss" in row][-1]
    parts = [last[f"eval_loss/{name}"] for name in "abc"]
    assert last["eval_loss"] == pytest.approx(np.average(parts, weights=[1, 2, 3]), rel=0.1)
    assert len(set(parts)) == 3


def noted(words: list[str], notes: Path, dies_behind: int) -> int:
    """Train, with a line in ``notes`` for the rows of each step; SIGKILL after one of them."""
    read, train = Loader.next_step, Trainer.train_step
    rank = dist.get_rank()

    def next_step(loader: Loader) -> list[Batch]:
        batches = read(loader)
        line = [loader.sample_index, [batch.tokens_BS.tolist() for batch in batches]]
        with (notes / str(rank)).open("a") as file:
            file.write(json.dumps(line) + "\n")
        return batches

    def train_step(trainer: Trainer) -> object:
        result = train(trainer)
        if trainer.step == dies_behind and rank == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    patch = pytest.MonkeyPatch()
    patch.setattr(Loader, "next_step", next_step)
    patch.setattr(Trainer, "train_step", train_step)
    return Trainer(Config.load(None, settled(words), environ={})).fit().step


def read_notes(notes: Path) -> list[tuple[int, list]]:
    """Return the samples by the number of samples before them; ranks alternate in micro-batches."""
    of_ranks = [
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted(notes.iterdir())
    ]
    # One rank may have begun another step when the last was killed.
    steps = zip(*of_ranks, strict=False)
    found = [(step[0][0], zip(*(batches for _, batches in step), strict=True)) for step in steps]
    return [(number, [batch for turn in turns for batch in turn]) for number, turns in found]


@pytest.mark.tier("wide", long=["no"])
@pytest.mark.parametrize("streaming", ["no", "yes"])
def test_a_killed_run_reads_on_what_it_would_have_read(
    streaming: str, tiny_words: list[str], tmp_path: Path
):
    """The sources are a table, compressed lines and a saved data set; the run exceeds a pass over
    the smallest.

    Two ranks together read what one uninterrupted process reads.
    """
    ranks = 2
    entries = written(tmp_path, lambda letter, i: f"{letter}{i:013d}\n")
    mix = [{**entry, "weight": i + 1.0} for i, entry in enumerate(entries)]
    words = [word for word in tiny_words if "eval_" not in word and "data.p" not in word]
    words += ["data.source=records", f"data.mix={json.dumps(mix)}", "data.eval_fraction=0"]
    words += [f"data.streaming={streaming}", f"data.cache_dir={tmp_path}/cache"]
    words += ["data.seq_len=16", "train.steps=40", "checkpoint.interval=10", "optim.lr=1e-3"]
    words += ["train.micro_batch_size=2", "train.global_batch_size=8", "train.sample_tokens=0"]
    words += ["data.workers=0"] if streaming == "yes" else []
    folders = [tmp_path / name for name in ("straight", "killed", "resumed")]
    for folder in folders:
        folder.mkdir()
    straight, killed, resumed = folders
    assert spawn(1, noted, [*words, f"output_dir={tmp_path}/1"], straight, 0) == [40]
    words += [f"parallel.dp_shard={ranks}", f"output_dir={tmp_path}/2"]
    with pytest.raises(pytest.fail.Exception):
        spawn(ranks, noted, words, killed, 25)
    shutil.rmtree(tmp_path / "cache")
    assert spawn(ranks, noted, words, resumed, 0) == [40] * ranks
    want = dict(read_notes(straight))
    before, after = read_notes(killed), read_notes(resumed)
    assert len(want) == 40
    assert len({json.dumps(batches) for batches in want.values()}) == 40
    assert [number for number, _ in before] == list(range(8, 8 * 25 + 1, 8))
    first = after[0][0]
    assert first in (88, 168)  # the save of step 20 may not have finished
    assert [number for number, _ in after] == list(range(first, 8 * 40 + 1, 8))
    assert all(batches == want[number] for number, batches in [*before, *after])


@pytest.mark.parametrize(
    ("mix", "says"),
    [
        ("[{", r"data\.mix: .*give a list of tables in JSON"),
        ('[{"name": "x"}]', r"data\.mix: .*Field required|data\.mix"),
        ('[{"path": "x.md"}]', r"data\.source: not set, and data\.mix 'x\.md' ends in none of"),
        ('[{"path": "x", "wait": 1}]', r"data\.mix: "),
        ('[{"path": "x", "weight": 0}]', r"data\.mix: 0: give a number greater than 0"),
        (
            '[{"path": "x", "weight": 1}, {"path": "y"}]',
            r"data\.mix: only some entries have a weight",
        ),
        ('[{"path": "a/x"}, {"path": "b/x"}]', r"data\.mix: two entries have the same name"),
    ],
)
def test_bad_mixtures_are_refused(mix: str, says: str):
    with pytest.raises(ConfigError, match=says):
        Config.load(overrides=["--data.mix", mix])


def test_a_mixture_and_a_path_are_two_things(tmp_path: Path):
    path = write_lines(tmp_path / "x.jsonl", {"text": "x"})
    mix = json.dumps([{"path": str(path)}])
    with pytest.raises(ConfigError, match=r"data\.mix: .* contradicts data\.path"):
        Config.load(overrides=["--data.mix", mix, "--data.path", "x.jsonl"])
    config = Config.load(overrides=["--data.mix", mix])
    assert (config.data.source, list(config.data.sources())) == ("records", ["x"])
    assert Config.load(config.to_dict()).data == config.data
