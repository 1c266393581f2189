"""Pipeline parallelism gives one process's losses, gradients, norms and checkpoints on any stages.

All runs of a world size share its processes.
"""

import functools
import gc
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import moetrain
from moetrain.config import Config
from moetrain.parallel import apply
from moetrain.parallel.mesh import TensorSlice
from moetrain.parallel.pipeline.executor import Pipeline
from moetrain.parallel.pipeline.stages import Stages
from moetrain.train.loop import Trainer
from moetrain.train.session import resolve_run
from tests.lib.checkpoints import tensors_of
from tests.lib.distributed import spawn
from tests.lib.one_answer import (
    DENSE,
    TOLERANCE,
    auxiliary_losses,
    compare,
    fit,
    pad_rows,
    words_of,
)

SCRIPTS = Path(__file__).parents[3] / "scripts"
STEPS = 2
BASE = ["train.micro_batch_size=1", "model.num_layers=4", "parallel.pp=2"]


def schedule(name, **settings):
    """Return the settings of a schedule, and further ones of ``parallel``."""
    return [f"parallel.{key}={value}" for key, value in ({"pp_schedule": name} | settings).items()]


class Case(NamedTuple):
    """Runs that must equal one process."""

    words: list[str]
    """Settings of all runs."""
    layouts: dict[str, list[str]]
    rows: int = 8
    """Micro-batch rows of one process; by default the whole batch."""
    pads: bool = False


def cases(world, tiny_words):
    words = words_of(tiny_words)
    kept = [w for w in tiny_words if "expert" not in w and "moe_" not in w]
    tied = [w for w in words_of(kept, *DENSE) if not w.startswith("moe.")]
    assert resolve_run(Config.load(None, tied, environ={}))[1].tie_embeddings
    # Without a pass that counts ahead, data-parallel ranks are balanced as one larger batch.
    by_batch = words_of(tiny_words, "moe.aux_loss_scope=micro_batch")
    if world == 2:
        # Without auxiliary losses, no gradients of the routers' sums come back.
        seven = ["train.global_batch_size=7", "moe.aux_loss_coef=0", "moe.z_loss_coef=0"]
        seven += ["moe.aux_loss_scope=micro_batch"]
        interleaved = schedule("interleaved_1f1b")
        return {
            "moe": Case(
                words,
                {
                    "gpipe selective": [*schedule("gpipe"), "activation.policy=selective"],
                    "1f1b split recompute": ["parallel.pp_split=1,3", "activation.policy=full"],
                    "1f1b compile": ["compile.enabled=yes"],
                    "interleaved reshard": schedule(
                        "interleaved_1f1b", reshard_after_forward="yes"
                    ),
                    "interleaved recompute": [*interleaved, "activation.policy=full"],
                    "1f1b compile last": ["compile.enabled=yes", "parallel.reduce_at=last"],
                },
            ),
            "tied": Case(tied, {"1f1b": [], "interleaved": interleaved}),
            "pads": Case(by_batch, {"1f1b": [], "interleaved": interleaved}, 1, pads=True),
            "seven": Case(words_of(tiny_words, *seven), {"1f1b": []}, 7),
            "pooled": Case(words_of(tiny_words, "moe.aux_loss_layers=pooled"), {"1f1b": []}),
        }
    both = {"tp": 2, "ep": 2}
    return {
        "moe": Case(
            words,
            {
                "pp4": schedule("1f1b", pp=4),
                "dp": [],
                "ep reshard": schedule("1f1b", ep=2, reshard_after_forward="yes"),
                "tp": schedule("1f1b", tp=2),
                "ddp": ["parallel.dp_replicate=2"],
                "ep interleaved": schedule("interleaved_1f1b", ep=2),
                "ep gpipe last": schedule("gpipe", ep=2, reduce_at="last"),
                "tp+ep": schedule("1f1b", **both),
            },
        ),
        "tied": Case(tied, {"pp4": ["parallel.pp=4"], "tp": ["parallel.tp=2"]}),
        "pads ep": Case(by_batch, {"ep": ["parallel.ep=2"]}, 2, pads=True),
        "pads tp+ep": Case(by_batch, {"tp+ep": schedule("1f1b", **both)}, 1, pads=True),
    }


def run(words, pads=False):
    """Return losses and norms of all steps; this rank's first gradients, and its biases."""
    trainer = Trainer(Config.load(None, words, environ={}))
    if pads:
        next_step = trainer.loader.next_step
        trainer.loader.next_step = lambda: pad_rows(next_step())
    gradients: dict[str, torch.Tensor] = {}

    def keep(optimizer, args, kwargs):
        if not gradients:
            for name, member in trainer.engine.fsdp.members.items():
                gradients[name] = member.layout.whole(member.local.grad).to("cpu", copy=True)

    trainer.optimizer.register_step_pre_hook(keep)
    results = [trainer.train_step() for _ in range(STEPS)]
    numbers = [[r.loss, r.grad_norm, *auxiliary_losses(trainer, r.routing)] for r in results]
    biases = {n: b.cpu() for n, b in trainer.model.named_buffers()}
    return torch.tensor(numbers), gradients, biases


def run_all(runs):
    """Call :func:`run` for each on this rank; all schedules share their compiled graphs."""
    apply.compile_blocks = functools.partial(apply.compile_blocks, backend="aot_eager")
    return {name: run(*how) for name, how in runs.items()}


@pytest.mark.tier("wide", long=["2"])
@pytest.mark.parametrize("world", [2, 4])
def test_every_pipeline_gives_the_single_process_answer(world, tiny_words):
    check_cases(world, cases(world, tiny_words))


@pytest.mark.gpu("world")
@pytest.mark.parametrize("world", [2, 4])
def test_every_pipeline_gives_the_single_gpu_answer(world, tiny_words):
    """The runs are in fp32 with fast kernels, beside expert parallel ranks on four GPUs."""
    words = [*tiny_words, "train.device=cuda", "train.dtype=float32", "kernels.attention=reference"]
    words += ["compile.enabled=no"]  # except where a case enables it
    check_cases(world, cases(world, words), "cuda")


def check_cases(world, found, device_type="cpu"):
    """Check every layout of every case on ``world`` ranks against one process."""
    runs = {
        (case, name): ([*one.words, *BASE, *layout], one.pads)
        for case, one in found.items()
        for name, layout in one.layouts.items()
    }
    ranks = spawn(world, run_all, runs, device_type=device_type, timeout=400)
    for case, one in found.items():
        plain = [*one.words, *BASE, "parallel.pp=1", f"train.micro_batch_size={one.rows}"]
        expected = run(plain, one.pads)
        for name in one.layouts:
            check(f"{case}: {name}", [answers[case, name] for answers in ranks], expected)


LARGER = {
    4: {
        "tp+ep": {"tp": 4, "ep": 4},
        "tp+ep+efsdp": {"tp": 4, "ep": 2},
        "cp": {"cp": 4},
        "cp+tp+ep": {"cp": 2, "tp": 2, "ep": 4},
        "pp+cp+ep": {"pp": 2, "cp": 2, "ep": 2},
    },
    8: {
        "ep": {"ep": 8},
        "ep+efsdp": {"ep": 4},
        "dp+tp+ep": {"tp": 4, "ep": 8},
        "hsdp+tp+ep": {"dp_replicate": 2, "tp": 2, "ep": 4},
        "pp+dp+tp": {"pp": 2, "tp": 2},
        "pp+hsdp+ep": {"pp": 2, "dp_replicate": 2, "ep": 2, "pp_schedule": "gpipe"},
        "pp+tp+ep": {"pp": 2, "tp": 4, "ep": 4, "pp_schedule": "interleaved_1f1b"},
        "pp4+ep": {"pp": 4, "ep": 2},
        "dp+cp+tp+ep": {"cp": 2, "tp": 2, "ep": 4},
        "pp+cp+tp": {"pp": 2, "cp": 2, "tp": 2, "pp_schedule": "interleaved_1f1b"},
    },
}


@pytest.mark.tier("long")
@pytest.mark.parametrize("world", LARGER)
def test_larger_worlds_give_the_single_process_answer(world, tiny_words):
    words = words_of(tiny_words, "model.num_kv_heads=4", "model.num_experts=8")
    words += ["train.micro_batch_size=1"]
    depths = {name: ["model.num_layers=4"] * ("pp" in name) for name in LARGER[world]}
    runs = {
        name: ([*words, *depths[name], *(f"parallel.{axis}={n}" for axis, n in layout.items())],)
        for name, layout in LARGER[world].items()
    }
    ranks = spawn(world, run_all, runs, timeout=600)
    whole = "train.micro_batch_size=8"
    staged, expected = run([*words, "model.num_layers=4", whole]), run([*words, whole])
    for name in runs:
        answers = [one[name] for one in ranks]
        if "pp" in name:
            check(name, answers, staged)
        else:
            compare(
                {f"{name}, rank {i}": one for i, one in enumerate(answers)}, expected, TOLERANCE
            )


def check(name, answers, expected):
    """Check the results of all ranks against one process's; copies of a tensor are equal."""
    gradients, biases = {}, {}
    for numbers, mine, buffers in answers:
        for parameter, gradient in mine.items():
            copy = gradients.setdefault(parameter, gradient)
            assert torch.equal(copy, gradient), f"{name}: copies of {parameter} differ"
        biases |= buffers
        compare({name: (numbers, expected[1], {})}, expected, TOLERANCE)
    assert biases.keys() == expected[2].keys()
    assert len(answers[0][1]) < len(gradients), "every rank has everything"
    compare({name: (numbers, gradients, biases)}, expected, TOLERANCE)


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("holders", [(1,), (0, 3)])
def test_each_copy_of_a_tied_embedding_is_one_of_which_one_writes(holders, copies):
    """Each holder has ``copies`` replicas. All of these ranks share the names."""
    part = TensorSlice.all_of(torch.zeros(1))
    table = {"embed.weight": SimpleNamespace(holders=holders)}
    of_ranks = [
        Stages.among(
            SimpleNamespace(rank=rank, table=table),
            "embed.weight",
            part._replace(copy=copy, copies=copies),
        )
        for rank in holders
        for copy in range(copies)
    ]
    written = [[one.is_written_here(f"embed.weight.{i}") for one in of_ranks] for i in range(200)]
    assert all(sum(by_rank) == 1 for by_rank in written)
    assert all(sum(of_rank) > 0 for of_rank in zip(*written, strict=True))


def fit_all(runs):
    """Return the losses of every run, one after another."""
    return [fit(words) for words in runs][-1]


@pytest.mark.tier("wide")
def test_a_checkpoint_goes_on_on_other_stages(tiny_words, tmp_path):
    words = words_of(tiny_words, "optim.schedule=constant", "checkpoint.at_end=yes", *BASE)
    words += ["train.eval_interval=2", "parallel.pp=1"]
    straight = fit([*words, "train.steps=6", f"output_dir={tmp_path / 'straight'}"])
    moved = [*words, f"output_dir={tmp_path / 'moved'}", "checkpoint.save_hf=yes"]
    steps = [
        ["train.steps=3", "parallel.pp=4"],
        ["train.steps=4", *schedule("interleaved_1f1b", pp=2, ep=2)],
        ["train.steps=5", *schedule("gpipe", pp=2, pp_split="3,1")],
    ]
    fit([*moved, "train.steps=2"])
    spawn(4, fit_all, [[*moved, *step] for step in steps], timeout=200)
    early = load_file(tmp_path / "moved" / "hf" / "model.safetensors")
    losses = fit([*moved, "train.steps=6"])
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    for step, loss in straight.items():
        assert losses[step] == pytest.approx(loss, rel=TOLERANCE)
    late = load_file(tmp_path / "moved" / "hf" / "model.safetensors")
    whole, saved = (
        tensors_of(tmp_path / name / "checkpoints" / "step-00000006")["model"]
        for name in ("straight", "moved")
    )
    assert saved.keys() == whole.keys()
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-3, atol=1e-6)
    assert early.keys() == late.keys()


@pytest.mark.tier("long")
def test_stages_load_and_save_hugging_face_weights(tiny_words, tmp_path):
    words = words_of(tiny_words, "train.steps=1", *BASE, "parallel.pp=1")
    fit([*words, "checkpoint.save_hf=yes", f"output_dir={tmp_path / 'out'}"])
    saved = tmp_path / "out" / "hf"
    words = [w for w in words if not w.startswith("model.")]
    words += [f"model.path={saved}", "data.tokenizer=byte", "optim.lr=1e-30", "parallel.pp=2"]
    spawn(2, fit, [*words, "checkpoint.save_hf=yes", f"output_dir={tmp_path / 'again'}"])
    want, got = moetrain.load_hf(saved), moetrain.load_hf(tmp_path / "again" / "hf")
    for (name, x), y in zip(want.state_dict().items(), got.state_dict().values(), strict=True):
        assert torch.equal(x, y), name
    text = (tmp_path / "again" / "metrics.jsonl").read_text()
    assert "grad_norm" in text


BENCHMARK = {"data.seq_len": "16", "train.device": "cpu", "launch.nproc": "2"}
SETTINGS = [word for key, value in BENCHMARK.items() for word in (f"--{key}", value)]


def measured(names, folder):
    """Return the benchmark's rows of these names."""
    sys.path.insert(0, str(SCRIPTS))
    import bench_pipeline  # scripts/ is no package

    args = Namespace(recipe="debug", layers=2, sequences=4, steps=1, profile=False)
    layouts = {one.name: one for one in bench_pipeline.layouts(2)}
    rows = []
    for name in names:
        config = bench_pipeline.config_of(args, SETTINGS, layouts[name], 2, folder)
        rows.append({"row": name, **(bench_pipeline.bench(config, args) or {})})
    plain, row = rows
    return None if "losses" not in row else row | bench_pipeline.compared(row, plain, TOLERANCE)


@pytest.mark.tier("long")
def test_the_benchmark_holds_a_schedule_against_none_and_the_simulator(tmp_path):
    row, nothing = spawn(2, measured, ["pp1", "pp2-ep1-1f1b"], str(tmp_path), timeout=100)
    assert nothing is None
    assert row["equal"]
    assert set(row["times"]) == {"F0", "B0", "F1", "B1"}
    assert 0 < row["simulated"] < 1
    assert 0 < row["bubble"] < 1
    assert len(row["idle"]) == 2


@pytest.mark.tier("long")
def test_the_benchmark_outlives_a_row_that_fails(tmp_path, monkeypatch, capsys):
    results = tmp_path / "results.jsonl"
    words = ["bench_pipeline.py", "--recipe", "debug", *SETTINGS, "--timeout", "300"]
    words += ["--layers", "2", "--sequences", "4", "--only", "interleaved"]
    words += ["--results", str(results)]
    monkeypatch.syspath_prepend(SCRIPTS)
    import bench_pipeline  # scripts/ is no package

    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert bench_pipeline.main() == 1
    (row,) = map(json.loads, results.read_text().splitlines())
    assert "parallel.pp: 2 ranks with 2 stages each are 4 stages" in row["error"]
    assert capsys.readouterr().out.splitlines()[-1] == f"{row['row']:22} {row['error']}"


def names_of_equal_objectives(rank_that_keeps):
    """Return the names that two ranks get for equal objectives, when one rank forgets the first."""
    told, kept = [], []
    stages = Namespace(plan=Namespace(rank_of_stage=[0, 1]), group=dist.group.WORLD)
    pipeline = Pipeline(None, None, stages)
    for number in range(3 * Pipeline.REMEMBERED):
        objective = (number // 2,)  # each twice in a row, as another object
        if dist.get_rank() == rank_that_keeps:
            kept.append(objective)
        names = [f"term {number // 2}"] if dist.get_rank() == 1 else []
        told.append(pipeline.broadcast_names(objective, names))
        del objective
        gc.collect()
    return told


@pytest.mark.tier("long")
def test_ranks_remember_the_same_objectives():
    answers = spawn(2, names_of_equal_objectives, 0, timeout=30)
    assert answers[0] == answers[1] == [[f"term {n // 2}"] for n in range(3 * Pipeline.REMEMBERED)]
