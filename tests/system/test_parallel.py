"""On every mesh losses, every gradient and its norm equal the single process's.

All layouts of a world size run in one set of processes, each as a real training run of two steps
over packed documents of uneven length.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import moetrain
from moetrain.config import Config
from moetrain.train.loop import Trainer
from tests.lib.distributed import spawn
from tests.lib.one_answer import (
    DENSE,
    LAYOUTS,
    ONLY,
    TOLERANCE,
    VARIANTS,
    compare,
    fit,
    plan_runs,
    run,
    run_layouts,
    words_of,
)

ONLY_DENSE = {2: {"compile+recompute": ["dp", "ddp", "tp"]}, 4: {"compile+recompute": []}}


@pytest.mark.tier("long")
@pytest.mark.parametrize("family", ["moe", "dense"])
@pytest.mark.parametrize("world", LAYOUTS)
def test_every_mesh_gives_the_single_process_answer(world, family, tiny_words):
    if family == "dense":
        kept = [w for w in tiny_words if "expert" not in w and "moe_" not in w]
        words = [w for w in words_of(kept, *DENSE) if not w.startswith("moe.")]
        variants, only = ["plain", "compile+recompute"], ONLY_DENSE
    else:
        words, variants, only = words_of(tiny_words), VARIANTS, ONLY
    layouts = [layout for layout in LAYOUTS[world] if family == "moe" or "ep" not in layout]
    check(world, words, plan_runs(world, words, layouts, variants, only), TOLERANCE)


def check(world, words, runs, tolerance, *, step_tolerance=None, device_type="cpu", pads=False):
    """Compare every run's losses of all steps and first gradients with one process's."""
    expected = run([*words, "train.micro_batch_size=8"], pads)
    answers = spawn(world, run_layouts, runs, device_type=device_type, timeout=300)[0]
    assert set(answers) == set(runs)
    compare(answers, expected, tolerance, step_tolerance)


@pytest.mark.tier("long")
def test_kernels_beside_experts_of_several_ranks(tiny_words):
    """The blocks are compiled; rows are short, because the interpreter is slow."""
    words = words_of(tiny_words, "data.seq_len=4")
    own = ["kernels.backend=triton", "compile.enabled=yes", "train.micro_batch_size=4"]
    check(2, words, {"ep kernels": [*words, *LAYOUTS[2]["ep"], *own]}, TOLERANCE)


@pytest.mark.tier("wide")
def test_pads_on_every_mesh(tiny_words):
    """Ranks have different numbers of tokens: each real token counts the same everywhere."""
    words = words_of(tiny_words)
    runs = plan_runs(2, words, ["dp", "ep", "tp+ep"], ["plain", "accumulate"])
    runs |= plan_runs(2, words, ["tp+ep"], ["compile"], only={})
    check(2, words, {f"{name} pads": w for name, w in runs.items()}, TOLERANCE, pads=True)


@pytest.mark.tier("wide")
def test_without_auxiliary_losses_on_two_ranks(tiny_words):
    """The routers' sums are then unused, and no gradient comes back to them."""
    off = ["moe.aux_loss_coef=0", "moe.aux_loss_scope=micro_batch", "moe.z_loss_coef=0"]
    words = words_of(tiny_words, *off)
    variants = ["plain", "reshard", "compile+selective", "accumulate"]
    check(2, words, plan_runs(2, words, ["ep"], variants, only={}), TOLERANCE)


@pytest.mark.tier("wide", long=["4"])
@pytest.mark.parametrize("world", LAYOUTS)
def test_micro_batches_of_all_ranks_are_balanced_together(world, tiny_words):
    """Without a pass that counts ahead, W ranks with micro-batches of m rows are one process with
    micro-batches of W * m."""
    words = words_of(tiny_words, "moe.aux_loss_scope=micro_batch")
    expected = {
        ranks: run([*words, f"train.micro_batch_size={ranks}"], pads=True)
        for ranks in ((1, 2) if world == 2 else (2, 4))
    }
    one, other = (gradients for _, gradients, _ in expected.values())
    router = next(name for name in one if "router" in name)
    assert (one[router] - other[router]).norm() > 10 * TOLERANCE * one[router].norm()
    layouts = {2: ["dp", "ddp", "ep", "tp+ep"], 4: ["ep+efsdp", "hsdp+tp+ep"]}[world]
    runs = {
        f"{layout} pads": [*words, *LAYOUTS[world][layout], "train.micro_batch_size=1"]
        for layout in layouts
    }
    answers = spawn(world, run_layouts, runs, timeout=300)[0]
    for name, answer in answers.items():
        ranks = world // (2 if "tp" in name else 1)  # data-parallel ranks
        compare({name: answer}, expected[ranks], TOLERANCE)


def held_out_losses(runs):
    """Return every run's held-out loss before training, and its first loss."""
    answers = {}
    for name, words in runs.items():
        trainer = Trainer(Config.load(None, words, environ={}))
        logged = {}
        trainer.report = logged.update
        trainer.evaluate()
        answers[name] = [logged["eval_loss"], trainer.train_step().loss.item()]
    return answers


@pytest.mark.tier("long")
def test_held_out_loss_on_every_mesh(tiny_words, tmp_path):
    """All layouts evaluate the same rows, even if fewer than a micro-batch (which once crashed
    under tp), of texts and of conversations whose rows end in pads."""
    lines = []
    for i in range(60):
        turns = [("user", f"Say {'go ' * (i % 5)}{i}"), ("assistant", f"{'gone ' * (i % 7)}{i}")]
        messages = [{"role": role, "content": content} for role, content in turns]
        lines.append(json.dumps({"messages": messages}) + "\n")
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    base = words_of(tiny_words, "model.vocab_size=300")
    chats = ["data.source=jsonl", f"data.path={tmp_path / 'chats.jsonl'}", "data.seq_len=160"]
    sources = {
        "text": [*base, "train.eval_rows=7"],
        "few": [*base, "train.eval_rows=1"],
        "chats": [*base, *chats],
    }
    expected = held_out_losses({k: [*w, "train.micro_batch_size=8"] for k, w in sources.items()})
    layouts = ["dp", "tp", "tp+ep", "cp keys"]
    runs = {
        f"{kind} {layout}": [*words, *LAYOUTS[2][layout], "train.micro_batch_size=4"]
        for kind, words in sources.items()
        for layout in layouts
    }
    for answers in spawn(2, held_out_losses, runs, timeout=200):
        for name, losses in answers.items():
            assert losses == pytest.approx(expected[name.split()[0]], rel=TOLERANCE), name


@pytest.mark.gpu("world")
@pytest.mark.parametrize("world", LAYOUTS)
def test_every_mesh_gives_the_single_gpu_answer(world, tiny_words):
    """The runs use NCCL, in fp32, with the fast kernels."""
    words = words_of(tiny_words, "train.device=cuda", "train.dtype=float32")
    words += ["kernels.attention=reference"]  # fp32 throughout
    eager = ["plain", "recompute", "selective", "reshard", "accumulate"]
    runs = plan_runs(world, words, LAYOUTS[world], eager)
    compiled = {2: ["tp+ep"], 4: ["ep+efsdp", "dp+tp+ep"]}[world]  # it takes most of the time
    runs |= plan_runs(world, words, compiled, ["compile+recompute", "compile+selective"], only={})
    check(world, words, runs, TOLERANCE, device_type="cuda")


@pytest.mark.gpu("world")
@pytest.mark.parametrize("world", LAYOUTS)
def test_every_mesh_in_bf16(world, tiny_words):
    """They agree up to bf16's rounding, with a routing that rounding cannot change."""
    words = words_of(tiny_words, "model.hidden_size=64", "model.moe_intermediate_size=32")
    words += ["model.head_dim=32", "train.device=cuda"]
    words += ["moe.force_balanced=yes", "moe.bias_update_rate=0"]
    runs = plan_runs(world, words, LAYOUTS[world], ["plain"])
    compiled = {2: "ep", 4: "ep+efsdp"}[world]
    runs |= plan_runs(world, words, [compiled], ["compile", "compile+reshard"], only={})
    check(world, words, runs, 0.05, step_tolerance=0.02, device_type="cuda")


@pytest.mark.tier("wide")
def test_a_checkpoint_goes_on_on_another_mesh(tiny_words, tmp_path):
    words = words_of(tiny_words, "optim.schedule=constant", "checkpoint.at_end=yes")
    straight = fit([*words, "train.steps=6", f"output_dir={tmp_path / 'straight'}"])
    moved = [*words, f"output_dir={tmp_path / 'moved'}"]
    fit([*moved, "train.steps=2"])
    spawn(4, fit, [*moved, "train.steps=4", "parallel.ep=2"])  # one process to four
    on_two = ["parallel.cp=2", "parallel.cp_method=all_gather"]
    spawn(2, fit, [*moved, "train.steps=5", *on_two])  # four to two
    losses = fit([*moved, "train.steps=6", "checkpoint.save_hf=yes"])  # and back to one
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    for step, loss in straight.items():
        assert losses[step] == pytest.approx(loss, rel=TOLERANCE)


@pytest.mark.gpu(2)
def test_a_checkpoint_goes_on_on_other_gpus(tiny_words, tmp_path):
    """It is written in the background, by NCCL's ranks, from pinned memory."""
    words = words_of(tiny_words, "optim.schedule=constant", "checkpoint.at_end=yes")
    words += ["train.device=cuda", "train.dtype=float32", "kernels.attention=reference"]
    words += ["checkpoint.interval=1", "checkpoint.asynchronous=yes", "compile.enabled=no"]
    straight = fit([*words, "train.steps=6", f"output_dir={tmp_path / 'straight'}"])
    moved = [*words, f"output_dir={tmp_path / 'moved'}"]
    fit([*moved, "train.steps=2"])
    for step, layout in ((3, "ep"), (4, "tp"), (5, "pp")):
        on_two = [*moved, f"train.steps={step}", f"parallel.{layout}=2"]
        spawn(2, fit, on_two, device_type="cuda", timeout=120)
    losses = fit([*moved, "train.steps=6"])
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    for step, loss in straight.items():
        assert losses[step] == pytest.approx(loss, rel=TOLERANCE)


@pytest.mark.tier("long")
def test_sharded_ranks_load_and_save_hugging_face_weights(tiny_words, tmp_path):
    words = words_of(tiny_words, "train.steps=1", f"output_dir={tmp_path / 'out'}")
    fit([*words, "checkpoint.save_hf=yes"])
    saved = tmp_path / "out" / "hf"
    extra = {"mtp.weight": torch.randn(5).bfloat16()}
    file = saved / "model.safetensors"
    save_file({**load_file(file), **extra}, file, {"format": "pt"})
    words = [w for w in words if not w.startswith("model.")]
    words += [f"model.path={saved}", "data.tokenizer=byte", "train.steps=1", "optim.lr=1e-30"]
    for world, layout in ((2, []), (4, ["parallel.ep=2"])):
        folder = tmp_path / f"again{world}"
        spawn(world, fit, [*words, *layout, "checkpoint.save_hf=yes", f"output_dir={folder}"])
        want, got = moetrain.load_hf(saved), moetrain.load_hf(folder / "hf")
        for (name, x), y in zip(want.state_dict().items(), got.state_dict().values(), strict=True):
            assert torch.equal(x, y), name
        carried = load_file(folder / "hf" / file.name)["mtp.weight"]
        assert torch.equal(carried, extra["mtp.weight"])
