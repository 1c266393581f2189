"""One answer on every mesh: losses, every gradient and its norm equal the single process's.

All layouts of a world size run in one set of processes, each as a real training run of two steps
over packed documents of uneven length.
"""

import functools
import itertools
import json

import pytest
import torch
import torch.distributed as dist
from distributed import compile_by_turns, spawn
from safetensors.torch import load_file, save_file

import moetrain
from moetrain.config import Config
from moetrain.data.packing import IGNORE_INDEX
from moetrain.parallel import mesh
from moetrain.train.loop import Trainer
from moetrain.train.metrics import read_metrics
from moetrain.train.objectives import routing_losses

STEPS = 2  # the second is of updated weights; more would be the optimizer's
TOLERANCE = 1e-5

LAYOUTS = {
    2: {
        "dp": ["parallel.dp_shard=2"],
        "ddp": ["parallel.dp_replicate=2", "parallel.dp_shard=1"],
        "ep": ["parallel.ep=2"],
        "tp": ["parallel.tp=2"],
        "tp+ep": ["parallel.tp=2", "parallel.ep=2"],
        "cp": ["parallel.cp=2"],
        "cp+ep": ["parallel.cp=2", "parallel.ep=2"],
        "cp keys": ["parallel.cp=2", "parallel.cp_method=all_gather"],
    },
    4: {
        "dp": ["parallel.dp_shard=4"],
        "hsdp": ["parallel.dp_replicate=2"],
        "ep": ["parallel.ep=4"],
        "ep+efsdp": ["parallel.ep=2"],
        "hsdp+ep": ["parallel.dp_replicate=2", "parallel.ep=2"],
        "dp+tp": ["parallel.tp=2"],
        "dp+tp+ep": ["parallel.tp=2", "parallel.ep=4"],
        "hsdp+tp+ep": ["parallel.dp_replicate=2", "parallel.tp=2", "parallel.ep=2"],
        "dp+cp": ["parallel.cp=2"],
        "hsdp+cp+ep": ["parallel.dp_replicate=2", "parallel.cp=2", "parallel.ep=2"],
    },
}
VARIANTS = {
    "plain": [],
    "recompute": ["activation.policy=full"],
    "selective": ["activation.policy=selective"],
    "compile": ["compile.enabled=yes"],
    "compile+recompute": ["compile.enabled=yes", "activation.policy=full"],
    "compile+selective": ["compile.enabled=yes", "activation.policy=selective"],
    "compile+selective+reshard": [
        "compile.enabled=yes",
        "activation.policy=selective",
        "parallel.reshard_after_forward=yes",
    ],
    "compile+reshard": ["compile.enabled=yes", "parallel.reshard_after_forward=yes"],
    "reshard": ["parallel.reshard_after_forward=yes"],
    "accumulate": ["train.micro_batch_size=1"],
    "accumulate+last": ["train.micro_batch_size=1", "parallel.reduce_at=last"],
    "compile+accumulate": ["compile.enabled=yes", "train.micro_batch_size=1"],
}
# What a variant is about shows in these layouts; the others are with every one. Compiling a block
# takes ten times as long as a run, so that each graph is compiled in one world, the smallest that
# has it: what data-parallel ranks do lies outside of it, and four ranks only add experts that more
# share than tokens. (Several micro-batches are counted ahead, for which every block is compiled
# once more.)
ONLY = {
    2: {
        "recompute": ["ep", "tp", "cp keys"],
        "compile": [],
        "compile+recompute": ["tp+ep"],
        "accumulate+last": ["dp", "ep"],
        "compile+accumulate": ["tp"],
        "selective": ["ep"],
        "compile+selective": [],
        "compile+selective+reshard": ["ep"],
        "compile+reshard": [],  # on GPUs
        "reshard": ["dp", "ep"],
    },
    4: {
        "recompute": ["hsdp+ep", "dp+tp+ep"],
        "compile": ["dp+tp+ep"],
        "compile+recompute": [],
        # Each layout's axes accumulate on two ranks, or in one of these.
        "accumulate": ["ep", "hsdp+ep", "hsdp+tp+ep", "hsdp+cp+ep"],
        "accumulate+last": ["hsdp", "ep+efsdp", "dp+tp"],
        "compile+accumulate": [],
        "selective": ["ep+efsdp"],
        "compile+selective": [],
        "compile+selective+reshard": [],
        "compile+reshard": [],
        "reshard": ["dp", "ep+efsdp"],
    },
}
ONLY_DENSE = {2: {"compile+recompute": ["dp", "ddp", "tp"]}, 4: {"compile+recompute": []}}
DENSE = ["model.preset=qwen3-0.6b", "model.vocab_size=264"]


def words_of(tiny_words, *extra):
    """Sizes that no number of ranks divides, and every auxiliary loss and the bias switched on."""
    return [
        *tiny_words,
        "model.hidden_size=40",
        "model.num_heads=4",
        "model.num_kv_heads=2",
        "model.vocab_size=263",
        "train.global_batch_size=8",
        f"train.steps={STEPS}",
        "moe.aux_loss_coef=0.1",
        "moe.aux_loss_scope=global_batch",  # the one that no split changes
        "moe.z_loss_coef=0.01",
        "moe.bias_update_rate=0.01",
        "checkpoint.at_end=no",
        *extra,
    ]


def pad_rows(batches):
    """The batches with pads at their rows' ends, more or fewer by what a row begins with."""
    padded = []
    for batch in batches:
        tokens_BS = batch.tokens_BS
        real_B1 = tokens_BS.shape[1] - tokens_BS[:, :1] % 7
        column_S = torch.arange(tokens_BS.shape[1])
        targets_BS = batch.targets_BS.masked_fill(column_S >= real_B1 - 1, IGNORE_INDEX)
        padded.append(batch._replace(targets_BS=targets_BS, is_pad_BS=column_S >= real_B1))
    return padded


def auxiliary_losses(trainer, routing):
    """Of the whole batch; none for a dense model."""
    if routing is None:
        return []
    pooled = trainer.objective.is_pooled
    return routing_losses(routing.map(trainer.world.sum), pooled=pooled).values()


def run(words, pads=False):
    """Losses, norms, and the whole gradients of the first step (before clipping)."""
    trainer = Trainer(Config.load(None, words, environ={}))
    if pads:
        next_step = trainer.loader.next_step
        trainer.loader.next_step = lambda: pad_rows(next_step())
    gradients: dict[str, torch.Tensor] = {}

    def keep(optimizer, args, kwargs):
        if not gradients:
            for name, member in trainer.engine.fsdp.members.items():
                whole = member.layout.whole(member.local.grad)
                gradients[name] = whole.to("cpu", copy=True)

    trainer.optimizer.register_step_pre_hook(keep)
    results = [trainer.train_step() for _ in range(STEPS)]
    eager = [
        [
            r.loss,
            r.grad_norm,
            *auxiliary_losses(trainer, r.routing),
        ]
        for r in results
    ]
    biases = {n: b.cpu() for n, b in trainer.model.named_buffers()}
    return torch.tensor(eager), gradients, biases


def compiled_for(item):
    """What decides about a run's blocks: not how data-parallel ranks share parameters."""
    return [w for w in item[1] if not w.startswith(("parallel.dp_", "parallel.reshard"))]


def run_layouts(runs):
    """``run`` of every layout on this rank; rank 0's answers."""
    mesh._Groups = functools.cache(mesh._Groups)  # one cut's groups are every layout's
    answers = {}
    for _, alike in itertools.groupby(sorted(runs.items(), key=compiled_for), key=compiled_for):
        torch.compiler.reset()  # other layouts' graphs are no recompilations of these ones'
        for name, words in alike:
            if not torch.cuda.is_available():
                compile_by_turns(words)
            answers[name] = run(words, pads="pads" in name)
    return answers if dist.get_rank() == 0 else None


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


def plan_runs(world, words, layouts, variants, only=ONLY):
    """The words of every run, by layout and variant."""
    runs = {}
    for variant in variants:
        for layout in layouts:
            if layout in only.get(world, {}).get(variant, layouts):
                shares = sum(axis in layout for axis in ("tp", "cp"))
                ranks = world // 2**shares  # those with rows of their own
                whole = f"train.micro_batch_size={8 // ranks}"
                own = [*LAYOUTS[world][layout], *VARIANTS[variant]]
                runs[f"{layout} {variant}"] = [*words, whole, *own]
    return runs


def check(world, words, runs, tolerance, *, step_tolerance=None, device_type="cpu", pads=False):
    """Every run's numbers of all steps and gradients of the first against one process's."""
    expected = run([*words, "train.micro_batch_size=8"], pads)
    answers = spawn(world, run_layouts, runs, device_type=device_type, timeout=300)[0]
    assert set(answers) == set(runs)
    compare(answers, expected, tolerance, step_tolerance)


def compare(answers, expected, tolerance, step_tolerance=None):
    """The answers of all ``run`` against the one of a single process."""
    for name, (numbers, gradients, biases) in answers.items():
        torch.testing.assert_close(
            numbers,
            expected[0],
            rtol=step_tolerance or tolerance,
            atol=0,
            msg=lambda m, name=name: f"{name}: {m}",
        )
        assert set(gradients) == set(expected[1])
        for parameter, gradient in gradients.items():
            wanted = expected[1][parameter]
            error = (gradient - wanted).norm() / wanted.norm()
            assert error <= tolerance, f"{name}: gradient of {parameter} is off by {error:.1e}"
        for buffer, bias in biases.items():
            assert torch.equal(bias, expected[2][buffer]), f"{name}: {buffer}"


def test_kernels_beside_experts_of_several_ranks(tiny_words):
    """Compiled; with short rows, as their interpreter takes each token by itself."""
    words = words_of(tiny_words, "data.seq_len=4")
    own = ["kernels.backend=triton", "compile.enabled=yes", "train.micro_batch_size=4"]
    check(2, words, {"ep kernels": [*words, *LAYOUTS[2]["ep"], *own]}, TOLERANCE)


def test_pads_on_every_mesh(tiny_words):
    """Ranks with different numbers of tokens: what is not padding counts the same everywhere."""
    words = words_of(tiny_words)
    runs = plan_runs(2, words, ["dp", "ep", "tp+ep"], ["plain", "accumulate"])
    runs |= plan_runs(2, words, ["tp+ep"], ["compile"], only={})
    check(2, words, {f"{name} pads": w for name, w in runs.items()}, TOLERANCE, pads=True)


def test_without_auxiliary_losses_on_two_ranks(tiny_words):
    """Nothing then uses the routers' sums, and no gradient comes back to them."""
    off = ["moe.aux_loss_coef=0", "moe.aux_loss_scope=micro_batch", "moe.z_loss_coef=0"]
    words = words_of(tiny_words, *off)
    variants = ["plain", "reshard", "compile+selective", "accumulate"]
    check(2, words, plan_runs(2, words, ["ep"], variants, only={}), TOLERANCE)


@pytest.mark.parametrize("world", LAYOUTS)
def test_micro_batches_of_all_ranks_are_balanced_together(world, tiny_words):
    """Without the pass that counts ahead, W ranks with micro-batches of m rows are one process with
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
        ranks = world // (2 if "tp" in name else 1)  # those with rows of their own
        compare({name: answer}, expected[ranks], TOLERANCE)


def held_out_losses(runs):
    """The held-out loss before training and the first step's loss, of every run."""
    answers = {}
    for name, words in runs.items():
        trainer = Trainer(Config.load(None, words, environ={}))
        logged = {}
        trainer.report = logged.update
        trainer.evaluate()
        answers[name] = [logged["eval_loss"], trainer.train_step().loss.item()]
    return answers


def test_held_out_loss_on_every_mesh(tiny_words, tmp_path):
    """The same rows whatever the layout, fewer than a micro-batch too (which crashed under tp), of
    texts and of conversations, whose rows end in pads."""
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
    """The same on NCCL, in fp32, with the fast kernels."""
    words = words_of(tiny_words, "train.device=cuda", "train.dtype=float32")
    words += ["kernels.attention=reference"]  # in fp32 throughout
    eager = ["plain", "recompute", "selective", "reshard", "accumulate"]
    runs = plan_runs(world, words, LAYOUTS[world], eager)
    compiled = {2: ["tp+ep"], 4: ["ep+efsdp", "dp+tp+ep"]}[world]  # it takes most of the time
    runs |= plan_runs(world, words, compiled, ["compile+recompute", "compile+selective"], only={})
    check(world, words, runs, TOLERANCE, device_type="cuda")


@pytest.mark.gpu("world")
@pytest.mark.parametrize("world", LAYOUTS)
def test_every_mesh_in_bf16(world, tiny_words):
    """To bf16 rounding, with a routing that rounding cannot turn over."""
    words = words_of(tiny_words, "model.hidden_size=64", "model.moe_intermediate_size=32")
    words += ["model.head_dim=32", "train.device=cuda"]
    words += ["moe.force_balanced=yes", "moe.bias_update_rate=0"]
    runs = plan_runs(world, words, LAYOUTS[world], ["plain"])
    compiled = {2: "ep", 4: "ep+efsdp"}[world]
    runs |= plan_runs(world, words, [compiled], ["compile", "compile+reshard"], only={})
    check(world, words, runs, 0.05, step_tolerance=0.02, device_type="cuda")


def fit(words):
    """The losses that a run leaves behind, by step."""
    trainer = Trainer(Config.load(None, words, environ={}))
    trainer.fit()
    rows = read_metrics(trainer.folder / "metrics.jsonl")
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


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
    """Written behind the steps, by NCCL's ranks, from pinned memory."""
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
