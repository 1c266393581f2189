"""One answer however a model is cut into stages: losses, every gradient, norms, checkpoints."""

import functools

import pytest
import torch
from distributed import spawn
from safetensors.torch import load_file
from test_parallel import (
    DENSE,
    STEPS,
    TOLERANCE,
    auxiliary_losses,
    compare,
    fit,
    pad_rows,
    words_of,
)

import moetrain
from moetrain.config import Config
from moetrain.parallel import apply
from moetrain.preflight import resolve_run
from moetrain.trainer import Trainer

BASE = ["train.micro_batch_size=1", "model.num_layers=4"]
LAYOUTS = {
    2: {
        "gpipe": ["parallel.pp_schedule=gpipe"],
        "1f1b": [],
        "interleaved": ["parallel.pp_schedule=interleaved_1f1b"],
        "zero_bubble": ["parallel.pp_schedule=zero_bubble"],
        "zbv": ["parallel.pp_schedule=zbv"],
        "merged": ["parallel.pp_schedule=merged_1f1b"],
        "merged recompute": ["parallel.pp_schedule=merged_1f1b", "activation.policy=full"],
        "merged compile": [
            "parallel.pp_schedule=merged_1f1b",
            "compile.enabled=yes",
            "parallel.reduce_at=last",
        ],
        "split": ["parallel.pp_split=1,3"],
        "recompute": ["activation.policy=full"],
        "selective": ["activation.policy=selective"],
        "reshard": ["parallel.reshard_after_forward=yes"],
        "last": ["parallel.reduce_at=last"],
        "compile": ["compile.enabled=yes"],
    },
    4: {
        "pp4": ["parallel.pp=4"],
        "pp4 zero_bubble": ["parallel.pp=4", "parallel.pp_schedule=zero_bubble"],
        "dp": [],
        "ep zbv reshard": [
            "parallel.ep=2",
            "parallel.pp_schedule=zbv",
            "parallel.reshard_after_forward=yes",
        ],
        "tp zero_bubble": ["parallel.tp=2", "parallel.pp_schedule=zero_bubble"],
        "ddp": ["parallel.dp_replicate=2"],
        "tp": ["parallel.tp=2"],
        "ep": ["parallel.ep=2"],
        "tp+ep": ["parallel.tp=2", "parallel.ep=2"],
        "tp+ep merged": ["parallel.tp=2", "parallel.ep=2", "parallel.pp_schedule=merged_1f1b"],
        "ep interleaved": ["parallel.ep=2", "parallel.pp_schedule=interleaved_1f1b"],
        "ep gpipe last": ["parallel.ep=2", "parallel.pp_schedule=gpipe", "parallel.reduce_at=last"],
    },
}


def run(words, pads=False):
    """Losses and norms of all steps; this rank's gradients of the first, and its biases."""
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


def run_layouts(runs):
    """``run`` of every layout on this rank."""
    apply.compile_blocks = functools.partial(apply.compile_blocks, backend="aot_eager")
    answers = {}
    for name, words in runs.items():
        torch.compiler.reset()
        answers[name] = run(words, pads="pads" in name)
    return answers


def check(world, words, layouts, micro_batch_size=8, pads=False):
    """Every layout's numbers against one process's, on every rank; copies of a tensor alike."""
    suffix = " pads" if pads else ""
    runs = {
        f"{name}{suffix}": [*words, *BASE, "parallel.pp=2", *LAYOUTS[world][name]]
        for name in layouts
    }
    one = [*words, *BASE, f"train.micro_batch_size={micro_batch_size}"]
    expected = run(one, pads)
    ranks = spawn(world, run_layouts, runs, timeout=300)
    for name in runs:
        gradients, biases = {}, {}
        for answers in ranks:
            numbers, mine, buffers = answers[name]
            for parameter, gradient in mine.items():
                twin = gradients.setdefault(parameter, gradient)
                assert torch.equal(twin, gradient), f"{name}: copies of {parameter} differ"
            biases |= buffers
            compare({name: (numbers, expected[1], {})}, expected, TOLERANCE)
        assert biases.keys() == expected[2].keys()
        assert len(ranks[0][name][1]) < len(gradients), "every rank has everything"
        compare({name: (numbers, gradients, biases)}, expected, TOLERANCE)


@pytest.mark.parametrize("world", LAYOUTS)
def test_every_pipeline_gives_the_single_process_answer(world, tiny_words):
    check(world, words_of(tiny_words), LAYOUTS[world])


@pytest.mark.parametrize(
    ("world", "layouts"), [(2, ["1f1b", "interleaved", "zbv"]), (4, ["pp4 zero_bubble", "tp"])]
)
def test_tied_embeddings_have_one_gradient(world, layouts, tiny_words):
    """Of a dense model, where nothing but the residual stream travels."""
    kept = [w for w in tiny_words if "expert" not in w and "moe_" not in w]
    words = [w for w in words_of(kept, *DENSE) if not w.startswith("moe.")]
    assert resolve_run(Config.load(None, words, environ={}))[1].tie_embeddings
    check(world, words, layouts)


@pytest.mark.parametrize(("world", "layouts"), [(2, ["1f1b", "interleaved"]), (4, ["ep", "tp+ep"])])
def test_pads_and_micro_batches_balanced_by_themselves(world, layouts, tiny_words):
    """Without a pass that counts ahead: ranks with rows of their own are one larger micro-batch."""
    words = words_of(tiny_words, "moe.aux_loss_scope=micro_batch")
    for layout in layouts:
        rows = world // 2 // (2 if "tp" in layout else 1)
        check(world, words, [layout], micro_batch_size=rows, pads=True)


def test_numbers_of_micro_batches_that_ranks_do_not_divide(tiny_words):
    """Seven on two ranks; and with three terms fewer, whose gradients then do not come back."""
    extra = ["train.global_batch_size=7", "moe.aux_loss_coef=0", "moe.z_loss_coef=0"]
    check(2, words_of(tiny_words, *extra), ["gpipe", "1f1b", "zbv"], micro_batch_size=7)


def test_pooled_layers_are_balanced_over_stages(tiny_words):
    check(2, words_of(tiny_words, "moe.aux_loss_layers=pooled"), ["1f1b"])


def test_a_checkpoint_goes_on_on_other_stages(tiny_words, tmp_path):
    words = words_of(tiny_words, "optim.schedule=constant", "checkpoint.at_end=yes", *BASE)
    words += ["train.eval_interval=2"]
    straight = fit([*words, "train.steps=6", f"output_dir={tmp_path / 'straight'}"])
    moved = [*words, f"output_dir={tmp_path / 'moved'}", "checkpoint.save_hf=yes"]
    interleaved = ["parallel.pp=2", "parallel.pp_schedule=interleaved_1f1b"]
    fit([*moved, "train.steps=2"])
    spawn(4, fit, [*moved, "train.steps=3", "parallel.pp=4"])
    spawn(4, fit, [*moved, "train.steps=4", *interleaved, "parallel.ep=2"])
    spawn(2, fit, [*moved, "train.steps=5", "parallel.pp=2", "parallel.pp_split=3,1"])
    early = load_file(tmp_path / "moved" / "hf" / "model.safetensors")
    losses = fit([*moved, "train.steps=6"])
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    for step, loss in straight.items():
        assert losses[step] == pytest.approx(loss, rel=TOLERANCE)
    late = load_file(tmp_path / "moved" / "hf" / "model.safetensors")
    whole = load_file(tmp_path / "straight" / "checkpoints" / "step-00000006" / "model.safetensors")
    saved = tmp_path / "moved" / "checkpoints" / "step-00000006" / "model.safetensors"
    for name, tensor in load_file(saved).items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-3, atol=1e-6)
    assert early.keys() == late.keys()


def test_stages_load_and_save_hugging_face_weights(tiny_words, tmp_path):
    words = words_of(tiny_words, "train.steps=1", *BASE)
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
