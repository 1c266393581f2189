"""A checkpoint resumes on any mesh: five layouts, each to each, and moves into tensor parallelism.

One uninterrupted process gives the expected losses. Each world is spawned once to save and once to
resume, whatever the number of moves.
"""

import itertools
from pathlib import Path

import pytest
import torch

from moetrain.config import Config
from moetrain.optim.adamw import AdamW
from moetrain.train import state as state_module
from moetrain.train.loop import Trainer
from tests.lib.checkpoints import tensors_of
from tests.lib.distributed import spawn
from tests.lib.one_answer import TOLERANCE, words_of

LAYOUTS = {
    "one": (1, []),
    "dp4": (4, []),
    "tp2+ep2": (4, ["parallel.tp=2", "parallel.ep=2"]),
    "pp2+dp2": (4, ["parallel.pp=2"]),
    "ep4": (4, ["parallel.ep=4"]),
    "dp2": (2, ["parallel.dp_shard=2"]),
    "tp2": (2, ["parallel.tp=2"]),
    "ddp2+tp2+ep2": (4, ["parallel.dp_replicate=2", "parallel.tp=2", "parallel.ep=2"]),
}
BEFORE, AFTER = 2, 2  # the second step uses the moments of the first
EACH = ("one", "dp4", "tp2+ep2", "pp2+dp2", "ep4")
OTHERS = [("one", "tp2"), ("tp2", "tp2"), ("dp2", "tp2"), ("tp2", "ddp2+tp2+ep2")]
MOVES = [*itertools.product(EACH, EACH), *OTHERS]


def unfused(fsdp, config, seed):
    """Return our optimizer whose state torch's AdamW updates, parameter by parameter."""
    optimizer = AdamW(fsdp, config, seed)
    members = list(fsdp.members.values())
    plain = torch.optim.AdamW(
        [
            {"params": [m.local], "weight_decay": config.weight_decay * m.rule.decay}
            for m in members
        ],
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=False,
        foreach=False,
    )

    def step(clip, skipped, lr):
        assert not skipped
        if not optimizer.state:
            optimizer.begin()
        for group, member in zip(plain.param_groups, members, strict=True):
            group["lr"] = optimizer.param_groups[0]["lr"]
            member.local.grad.mul_(clip)
            state = optimizer.state[member.local]
            plain.state[member.local] = state | {"step": state["step"].clone()}
        plain.step()
        optimizer.steps += 1

    optimizer.step = step
    return optimizer


def train(words, steps, is_fused):
    """Return a trainer that has made ``steps`` steps, and their losses."""
    state_module.AdamW = AdamW if is_fused else unfused
    trainer = Trainer(Config.load(None, words, environ={}))
    if trainer.step:
        check_moments(trainer, trainer.config.checkpoint.resume)
    return trainer, [trainer.train_step().loss.item() for _ in range(steps)]


def check_moments(trainer, source):
    """Check that moments have their parameters' layout, separate memory, and the saved values."""
    saved = tensors_of(Path(source))["optim"]
    for name, member in trainer.engine.fsdp.members.items():
        part = member.local
        for key, moment in trainer.optimizer.state[part].items():
            whole = moment
            if moment.ndim:
                assert (moment.shape, moment.stride()) == (part.shape, part.stride()), name
                assert moment.storage_offset() == part.storage_offset(), name
                memory, weights = moment.untyped_storage(), part.untyped_storage()
                assert memory.nbytes() == weights.nbytes(), name
                assert memory.data_ptr() != weights.data_ptr(), name
                whole = member.layout.whole(moment)
            assert torch.equal(whole, saved.pop(f"{name}.{key}")), name
    elsewhere = trainer.engine.stages.trained.keys() - trainer.engine.fsdp.members.keys()
    assert {name.rpartition(".")[0] for name in saved} == elsewhere


def save_all(jobs):
    """Train and save every (words, is_fused)."""
    for words, is_fused in jobs:
        trainer, _ = train(words, BEFORE, is_fused)
        trainer.save()


def go_on_all(jobs):
    """Return the losses after every move, by its name."""
    return {name: train(words, AFTER, is_fused)[1] for name, (words, is_fused) in jobs.items()}


def everywhere(jobs_of_world, function):
    """Call ``function`` on each world's jobs, in that world; return rank 0's answers."""
    answers = []
    for world, jobs in jobs_of_world.items():
        if world == 1:
            answers.append(function(jobs))
        else:
            answers.append(spawn(world, function, jobs, timeout=300)[0])
    return answers


@pytest.mark.tier("long")
def test_moves_between_meshes_go_on_exactly(tiny_words, tmp_path, monkeypatch):
    monkeypatch.setattr(state_module, "AdamW", AdamW)  # undone at the end
    moves = [(*move, True) for move in MOVES] + [(*move, False) for move in OTHERS[:2]]
    base = words_of(tiny_words, "optim.schedule=constant", "train.steps=100", "optim.lr=0.01")
    base = [*base, "train.micro_batch_size=2", "model.num_layers=2"]
    straight = {}
    for is_fused in (True, False):
        words = [*base, f"output_dir={tmp_path / f'straight{is_fused}'}"]
        straight[is_fused] = train(words, BEFORE + AFTER, is_fused)[1][BEFORE:]

    def folder(layout, is_fused):
        return tmp_path / f"{layout}-{is_fused}"

    sources: dict[int, list] = {1: [], 2: [], 4: []}
    for layout, is_fused in sorted({(source, fused) for source, _, fused in moves}):
        world, words = LAYOUTS[layout]
        words = [*base, *words, f"output_dir={folder(layout, is_fused)}"]
        sources[world].append((words, is_fused))
    everywhere(sources, save_all)
    targets: dict[int, dict] = {1: {}, 2: {}, 4: {}}
    for number, (source, target, is_fused) in enumerate(moves):
        world, words = LAYOUTS[target]
        checkpoint = folder(source, is_fused) / "checkpoints" / f"step-{BEFORE:08d}"
        words = [*base, *words, f"checkpoint.resume={checkpoint}"]
        words.append(f"output_dir={tmp_path / f'moved{number}'}")
        name = f"{source} -> {target}, {'fused' if is_fused else 'unfused'}"
        targets[world][name] = (words, is_fused)
    losses = {k: v for answer in everywhere(targets, go_on_all) for k, v in answer.items()}
    assert len(losses) == len(moves)
    for name, found in losses.items():
        expected = straight["unfused" not in name]
        assert found == pytest.approx(expected, rel=TOLERANCE), name
