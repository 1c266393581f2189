"""Random runs of the trainer equal transformers with torch's AdamW in fp64.

Each run is drawn by its number: a family, its sizes, a mesh of two processes and often another one
on which the run is resumed, frozen parameters, tokens with labels, short rows, batches, and
held-out rows. Every loss, gradient norm, held-out loss and exported weight is compared with the
plain loop's; frozen weights keep every bit. Other runs begin from an upcycled dense model, and must
have its losses on every mesh. ``RANDOM_TRAINING`` selects numbers; by default there are a few:

    RANDOM_TRAINING=100:1000 python -m pytest tests/system/test_random_training.py  100 from 1000 on

AdamW's epsilon is large beside gradients that are 0 up to rounding, as in test_everything.py.
"""

import copy
import math
import os
import random
import re
import shutil
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from moetrain import Trainer
from moetrain.cli.checkpoint import main as upcycle
from moetrain.config import Config, ConfigError
from moetrain.parallel import mesh
from moetrain.train.metrics import read_metrics
from tests.lib.distributed import spawn
from tests.lib.random_models import cached_groups, draw_mesh, draw_settings

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

FEW = "4:0"
PATTERNS = {
    "embed.*": r"embed_tokens",
    "lm_head.*": r"lm_head",
    "layers.0.*": r"layers\.0\.",
    "*norm*": r"norm",
    "*.attn.*": r"self_attn",
    "*.wq.*": r"q_proj",
    "*.router.*": r"mlp\.gate\.",
    "*.experts.*": r"\.experts\.",
    "layers.*": r"layers\.",
}
"""Values of train.freeze, and the parameters of transformers that they match."""
NO_DECAY = r"norm|bias|embed_tokens|mlp\.gate\."
LABELS = -100


class Drawn(NamedTuple):
    """One random run."""

    number: int
    family: str
    sizes: dict
    words: list[str]
    meshes: list[list[str]]
    """The meshes of the run until its stop, and until its end."""
    ends: list[int]
    """The steps at which these end."""
    freeze: list[str]
    rows: list[dict]
    sets: dict[str, list[dict]]
    """Held-out rows, by name."""
    eval_rows: int
    batch: int
    lr: float
    decay: float
    clip: float
    aux: float


def draw(number, world=2):
    """Return the run of this number; some are refused."""
    d = random.Random(number)
    family = d.choice(["llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_moe", "mixtral"])
    moe = family in ("qwen3_moe", "mixtral")
    sizes = {
        "vocab_size": d.choice([257, 260]),  # the tokenizer of bytes
        "hidden_size": d.choice([16, 24]),
        "num_hidden_layers": d.choice([2, 3]),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 8 * d.choice([1, 3]),
        "max_position_embeddings": 64,
        "tie_word_embeddings": d.random() < 0.4,
        "pad_token_id": None,
    }
    if family == "qwen2":
        del sizes["head_dim"]
    if moe:
        count = "num_experts" if family == "qwen3_moe" else "num_local_experts"
        sizes |= {count: 4, "num_experts_per_tok": d.choice([1, 2, 3]), "norm_topk_prob": True}
        sizes |= {"moe_intermediate_size": d.choice([8, 24])}
    seq_len = d.choice([7, 12, 13])
    micro, own = d.choice([1, 2, 3]), d.choice([2, 4])
    meshes = []
    for turn in range(d.choice([1, 2])):
        degrees = draw_mesh(d, number + turn, world, moe)
        if moe:
            degrees["ep"] = 2 if degrees["ep"] == 2 else 1
        meshes.append(draw_settings(d, degrees, sizes["num_hidden_layers"], None))
    batch = micro * own * world
    known = [p for p in PATTERNS if moe or p not in ("*.router.*", "*.experts.*")]
    known = [p for p in known if not (p == "lm_head.*" and sizes["tie_word_embeddings"])]
    freeze = d.sample(known, d.choice([1, 2])) if d.random() < 0.7 else []
    aux = d.choice([0.0, 0.0, 0.2]) if moe else 0.0
    lr, decay, clip = d.choice([1e-3, 1e-2]), d.choice([0.0, 0.3]), d.choice([0.2, 100.0])
    words = [
        f"data.seq_len={seq_len}",
        f"train.micro_batch_size={micro}",
        f"train.global_batch_size={batch}",
        f"activation.policy={d.choice(['none', 'none', 'selective', 'full'])}",
        f"optim.lr={lr}",
        f"optim.weight_decay={decay}",
        f"optim.max_grad_norm={clip}",
    ]
    if moe:
        words.append(f"moe.aux_loss_coef={aux}")
    if aux:
        words += ["moe.aux_loss_scope=global_batch", "moe.aux_loss_layers=pooled"]
    if freeze:
        words.append(f"train.freeze={','.join(freeze)}")
    rows = [draw_row(d, seq_len, sizes["vocab_size"]) for _ in range(batch + d.randrange(9))]
    sets = {
        name: [draw_row(d, seq_len, sizes["vocab_size"]) for _ in range(d.randint(1, 11))]
        for name in ("near", "far")[: d.choice([1, 2])]
    }
    ends = [2] if len(meshes) == 1 else [1, 3]
    eval_rows = d.choice([3, 100])
    words += [f"train.eval_rows={eval_rows}"]
    plain = (freeze, rows, sets, eval_rows, batch, lr, decay, clip, aux)
    return Drawn(number, family, sizes, words, meshes, ends, *plain)


def draw_row(d, seq_len, vocabulary):
    """Draw a row that may be short, with some tokens unlabelled."""
    length = d.choice([seq_len, seq_len, d.randint(2, seq_len)])
    tokens = [d.randrange(vocabulary) for _ in range(length)]
    share = d.choice([0.0, 0.3, 0.9])
    labels = [LABELS if d.random() < share else token for token in tokens]
    return {"input_ids": tokens, "labels": labels}


class InOrder:
    """Rows in a fixed order, repeated."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


# ---- the plain loop --------------------------------------------------------------------------


def make_theirs(drawn):
    config = AutoConfig.for_model(drawn.family, **drawn.sizes)
    torch.manual_seed(drawn.number)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if parameter.ndim > 1 else 0.1
            parameter.normal_(0, scale).add_(1.0 if "norm" in name else 0.0)
    return model


def sums_of(model, rows, size, aux):
    """Return (sum of the targets' losses, number of targets, the balancing loss) of rows."""
    width = max(len(row["input_ids"]) for row in rows)

    def padded(key, fill):
        return torch.tensor([row[key] + [fill] * (width - len(row[key])) for row in rows])

    tokens, labels = padded("input_ids", 0), padded("labels", LABELS)
    mask = torch.tensor([[i < len(row["input_ids"]) for i in range(width)] for row in rows]).long()
    more = {"output_router_logits": True} if aux else {}
    out = model(tokens, attention_mask=mask, use_cache=False, **more)
    logp = torch.log_softmax(out.logits[:, :-1], -1)
    targets = labels[:, 1:]
    losses = -logp.gather(2, targets.clamp(min=0)[..., None])[..., 0]
    is_target = targets != LABELS
    balance = out.aux_loss if aux else torch.zeros(())
    return (losses * is_target).sum(), int(is_target.sum()), balance


def plain_run(drawn, theirs):
    """Train ``theirs``; return (loss and gradient norm of each step, held-out losses by name)."""
    model = theirs.double()
    frozen = [PATTERNS[p] for p in drawn.freeze]
    trained = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if any(re.search(pattern, name) for pattern in frozen):
            parameter.requires_grad_(False)
        else:
            trained[re.search(NO_DECAY, name) is None].append(parameter)
    groups = [
        {"params": found, "weight_decay": drawn.decay * decays}
        for decays, found in trained.items()
        if found
    ]
    optimizer = torch.optim.AdamW(groups, lr=drawn.lr, betas=(0.9, 0.95), eps=1e-3)
    parameters = [*trained[True], *trained[False]]
    numbers = []
    for step in range(drawn.ends[-1]):
        places = range(step * drawn.batch, (step + 1) * drawn.batch)
        rows = [drawn.rows[i % len(drawn.rows)] for i in places]
        total, count, balance = sums_of(model, rows, drawn.batch, drawn.aux)
        loss = total / max(count, 1)
        optimizer.zero_grad(set_to_none=True)
        (loss + drawn.aux * balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, float("inf"))
        for parameter in parameters:
            if parameter.grad is None:  # an unused expert
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad *= min(1.0, drawn.clip / (norm.item() + 1e-30))
        optimizer.step()
        numbers.append((loss.item(), norm.item()))
    held_out = {}
    with torch.no_grad():
        for name, rows in drawn.sets.items():
            draws = np.random.Generator(np.random.PCG64(0))
            chosen = draws.choice(len(rows), min(drawn.eval_rows, len(rows)), replace=False)
            sums = [sums_of(model, [rows[i]], 1, 0.0)[:2] for i in chosen]
            count = sum(n for _, n in sums)
            held_out[name] = sum(x.item() for x, _ in sums) / count if count else float("nan")
    return numbers, held_out


# ---- the trainer -----------------------------------------------------------------------------


def train(drawn, folder, number):
    """Train on the ``number``-th mesh; return False if it is refused."""
    words = [
        f"model.path={folder / 'start'}",
        f"output_dir={folder / 'run'}",
        "data.tokenizer=byte",
        "train.device=cpu",
        "train.dtype=float32",
        "compile.enabled=no",
        "optim.schedule=constant",
        "optim.warmup_steps=0",
        "optim.eps=1e-3",
        "log.interval=1",
        "log.tensorboard=no",
        "train.sample_tokens=0",
        "train.eval_interval=0",
        "checkpoint.save_hf=yes",
        f"train.steps={drawn.ends[number]}",
        *drawn.words,
        *drawn.meshes[number],
    ]
    sets = drawn.sets if len(drawn.sets) > 1 else next(iter(drawn.sets.values()))
    try:
        config = Config.load(None, words, environ={})
        trainer = Trainer(config, data=InOrder(drawn.rows), eval_data=sets)
    except ConfigError as error:
        return str(error)
    trainer.fit()
    return ""


def train_all(runs, folder):
    """Return the refusals of all runs."""
    said = []
    with patch.object(mesh, "_Groups", cached_groups()):
        for drawn in runs:
            (Path(folder) / "running").write_text(describe(drawn))
            problem = ""
            for number in range(len(drawn.meshes)):
                problem = problem or train(drawn, Path(folder) / str(drawn.number), number)
            said.append(problem)
    return said


def describe(drawn):
    again = f"RANDOM_TRAINING=1:{drawn.number} pytest tests/system/test_random_training.py"
    shown = (again, drawn.family, drawn.sizes, *drawn.words, *drawn.meshes, *drawn[5:7], drawn[9:])
    return "\n    ".join(map(str, shown))


def differences(drawn, folder, theirs):
    """Describe differences of the trainer's results and weights from the plain loop's."""
    start = copy.deepcopy(theirs)
    numbers, held_out = plain_run(drawn, theirs)
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    found = {row["step"]: (row["loss"], row["grad_norm"]) for row in rows if "loss" in row}
    for step, wanted in enumerate(numbers, 1):
        if found[step] != pytest.approx(wanted, rel=2e-5, abs=1e-7):
            yield f"step {step}: loss and norm {found[step]}, not {wanted}"
    last = [row for row in rows if "eval_loss" in row][-1]
    # A loss that is NaN because no row has a label is null in JSON.
    last = {key: float("nan") if value is None else value for key, value in last.items()}
    # A set without labels has no loss, and is left out of the mean.
    measured = [value for value in held_out.values() if not math.isnan(value)]
    mean = sum(measured) / len(measured) if measured else float("nan")
    if last["eval_loss"] != pytest.approx(mean, rel=2e-5, nan_ok=True):
        yield f"held-out loss {last['eval_loss']}, not {mean}"
    for name, value in held_out.items() if len(held_out) > 1 else ():
        if last[f"eval_loss/{name}"] != pytest.approx(value, rel=2e-5, nan_ok=True):
            yield f"held-out loss of {name} {last[f'eval_loss/{name}']}, not {value}"
    exported = load_file(folder / "run" / "hf" / "model.safetensors")
    theirs.save_pretrained(folder / "theirs")
    start.save_pretrained(folder / "begun")
    wanted = load_file(folder / "theirs" / "model.safetensors")
    begun = load_file(folder / "begun" / "model.safetensors")
    if exported.keys() != wanted.keys():
        yield f"names {exported.keys() ^ wanted.keys()}"
        return
    for name, tensor in wanted.items():
        moved = (tensor - begun[name].double()).norm()
        error = (exported[name].double() - tensor).norm()
        if torch.equal(tensor, begun[name].double()):
            if not torch.equal(exported[name], begun[name]):
                yield f"{name} is frozen and moved by {error:.1e}"
        elif not error <= 2e-4 * moved + 2e-7 * tensor.norm():
            yield f"{name} moved by {moved:.1e} and is off by {error:.1e}"


@pytest.mark.tier("wide")
def test_training_is_the_plain_loops_whatever_the_mesh_and_what_is_frozen(tmp_path):
    count, first = map(int, os.environ.get("RANDOM_TRAINING", FEW).split(":"))
    runs, models = [draw(number) for number in range(first, first + count)], {}
    for drawn in runs:
        models[drawn.number] = make_theirs(drawn)
        models[drawn.number].save_pretrained(tmp_path / str(drawn.number) / "start")
    said = None
    try:
        said = spawn(2, train_all, runs, str(tmp_path), timeout=60 + 40 * count)[0]
    finally:
        if said is None:
            print("failed at", (tmp_path / "running").read_text())
    wrong = []
    for drawn, problem in zip(runs, said, strict=True):
        folder = tmp_path / str(drawn.number)
        if not problem:
            found = differences(drawn, folder, models[drawn.number])
            wrong += [f"{what}\n    {describe(drawn)}" for what in found]
        else:
            print("refused", drawn.number, problem)
        shutil.rmtree(folder)
    assert not wrong, "\n".join(wrong)
    assert said.count("") >= count / 2


# ---- upcycled models -------------------------------------------------------------------------


def draw_upcycled(number):
    """Return a run of one step with hardly any update, and the upcycling of its dense model."""
    d = random.Random(f"upcycled {number}")
    family = d.choice(["llama", "qwen2", "qwen3"])
    split = d.choice([1, 1, 2, 3])
    experts = split * d.choice([2, 4])
    chosen = split * d.randint(1, experts // split)
    sizes = {
        "vocab_size": 260,
        "hidden_size": d.choice([16, 24]),
        "num_hidden_layers": d.choice([2, 3]),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 8 * split * d.choice([1, 2]),
        "max_position_embeddings": 64,
        "tie_word_embeddings": d.random() < 0.4,
        "pad_token_id": None,
    }
    sizes |= {"head_dim": d.choice([8, 12])} if family != "qwen2" else {}
    how = ["--num_experts", experts, "--num_experts_per_token", chosen, "--split", split]
    degrees = draw_mesh(d, number, 2, moe=True)
    settings = draw_settings(d, degrees, sizes["num_hidden_layers"], None)
    seq_len, micro = 12, d.choice([1, 2, 3])
    batch = 4 * micro
    words = [
        f"data.seq_len={seq_len}",
        f"train.micro_batch_size={micro}",
        f"train.global_batch_size={batch}",
        "optim.lr=1e-12",
        "moe.aux_loss_coef=0",
        "moe.bias_update_rate=0",
    ]
    rows = [draw_row(d, seq_len, sizes["vocab_size"]) for _ in range(batch)]
    sets = {"held": [draw_row(d, seq_len, sizes["vocab_size"]) for _ in range(d.randint(2, 9))]}
    sets["held"][0]["labels"] = sets["held"][0]["input_ids"]
    plain = ([], rows, sets, 100, batch, 1e-12, 0.0, 1.0, 0.0)
    return Drawn(number, family, sizes, words, [settings], [1], *plain), [*map(str, how)]


def upcycled_differences(drawn, folder, theirs):
    """Describe differences of the upcycled model's losses from the dense one's."""
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    found = {key: value for row in rows for key, value in row.items() if key.endswith("loss")}
    with torch.no_grad():
        for key, own in {"loss": drawn.rows, "eval_loss": drawn.sets["held"]}.items():
            total, count, _ = sums_of(theirs.double(), own, len(own), 0.0)
            wanted = total.item() / max(count, 1)
            if found[key] != pytest.approx(wanted, rel=2e-5):
                yield f"{key} {found[key]}, not the dense model's {wanted}"


@pytest.mark.tier("long")
def test_upcycled_models_have_the_dense_models_losses_on_every_mesh(tmp_path):
    count, first = map(int, os.environ.get("RANDOM_TRAINING", FEW).split(":"))
    cases = [draw_upcycled(number) for number in range(first, first + count)]
    runs, models = [drawn for drawn, _ in cases], {}
    for drawn, how in cases:
        folder = tmp_path / str(drawn.number)
        models[drawn.number] = make_theirs(drawn)
        models[drawn.number].save_pretrained(folder / "dense")
        assert upcycle(["upcycle", str(folder / "dense"), str(folder / "start"), *how]) == 0
    said = spawn(2, train_all, runs, str(tmp_path), timeout=60 + 40 * count)[0]
    wrong = []
    for (drawn, how), problem in zip(cases, said, strict=True):
        found = upcycled_differences(drawn, tmp_path / str(drawn.number), models[drawn.number])
        wrong += [f"{what}\n    {how}\n    {describe(drawn)}" for what in found if not problem]
        shutil.rmtree(tmp_path / str(drawn.number))
    assert not wrong, "\n".join(wrong)
    assert said.count("") >= count / 2, said
