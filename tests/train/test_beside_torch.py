"""A run's updates, learning rates and metrics equal torch's own and formulas written out here.

No expected value comes from moetrain: weights are updated by ``torch.optim.AdamW`` after
``clip_grad_norm_``, learning rates come from torch's schedulers, and the parameters with weight
decay are a list of names.
"""

import functools
import time
import weakref

import pytest
import torch
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from moetrain.cli.train import main
from moetrain.config import Config
from moetrain.data.loader import Batch
from moetrain.data.packing import IGNORE_INDEX
from moetrain.models.transformer import Transformer
from moetrain.optim.adamw import AdamW
from moetrain.optim.schedule import learning_rate
from moetrain.train.loop import Trainer
from moetrain.train.metrics import Throughput, read_metrics
from tests.lib.distributed import spawn
from tests.lib.engines import make_batches, make_engine, objective_of, train

DECAYED = {"wq", "wk", "wv", "wo", "w_gate_up", "w_down", "lm_head"}
"""Parameters with weight decay, by the last part of their names; no others have it."""
STRONG = [  # every setting is far from its default, and matters beside the others
    "optim.beta1=0.6",
    "optim.beta2=0.7",
    "optim.eps=0.002",
    "optim.weight_decay=0.5",
    "optim.max_grad_norm=0.3",
]
MOMENTS = ("exp_avg", "exp_avg_sq")


class Beside:
    """torch's AdamW, which gets every gradient that our optimizer gets.

    ``with Beside(): ...`` follows every optimizer inside, on each rank with the whole model.
    """

    def __init__(self, follow_moments=False):
        self.follow_moments = follow_moments
        """True: our moments are copied before each step, because ours are rounded."""
        self.weights, self.norms, self.rates, self.torchs = {}, [], [], None

    def __enter__(self):
        self.handle = register_optimizer_step_pre_hook(self.before_step)
        return self

    def __exit__(self, *failure):
        self.handle.remove()

    def begin(self, ours):
        config = ours.config
        for name, member in self.members:
            whole = member.layout.whole(member.local.detach()).clone()
            self.weights[name] = torch.nn.Parameter(whole)
        self.torchs = torch.optim.AdamW(
            [
                {"params": [weight], "weight_decay": config.weight_decay * decays(name)}
                for name, weight in self.weights.items()
            ],
            betas=(config.beta1, config.beta2),
            eps=config.eps,
        )

    def before_step(self, ours, args, kwargs):
        if not isinstance(ours, AdamW):
            return
        self.members = [(n, m) for n, m in ours.fsdp.members.items() if m.rule.trainable]
        if self.torchs is None:
            self.begin(ours)
        for name, member in self.members:
            weight = self.weights[name]
            weight.grad = member.layout.whole(gradient_of(member, ours)).float().clone()
            if self.follow_moments and self.torchs.state:
                for key in MOMENTS:
                    moment = member.layout.whole(ours.state[member.local][key])
                    self.torchs.state[weight][key].copy_(moment)
        limit = ours.config.max_grad_norm
        self.norms.append(torch.nn.utils.clip_grad_norm_(self.weights.values(), limit).item())
        (rate,) = {group["lr"] for group in ours.param_groups}
        self.rates.append(rate)
        for group in self.torchs.param_groups:
            group["lr"] = rate
        self.torchs.step()


def gradient_of(member, ours):
    """Return this rank's piece of a gradient, wherever it is stored."""
    if member.local.grad is not None:
        return member.local.grad
    member.storage.await_gradient()
    return member.piece_of(member.storage.gradient_N)


def decays(name):
    return name.removesuffix(".weight").split(".")[-1] in DECAYED


def assert_same_moments(ours, torchs):
    """Compare the moments of the last step; in bf16 ours may be a neighbouring value of torch's."""
    for name, member in torchs.members:
        for key in MOMENTS:
            moment = member.layout.whole(ours.state[member.local][key])
            tolerance = 2**-7 if moment.dtype == torch.bfloat16 else 1e-5
            expected = torchs.torchs.state[torchs.weights[name]][key]
            scale = expected.abs().max().item()
            # Gradients were summed in fp32, and may cancel.
            torch.testing.assert_close(
                moment.float(), expected, rtol=tolerance, atol=1e-6 * scale, msg=name
            )


def check_steps(cases):
    """Make five steps with each case's settings, with different learning rates."""
    for words in cases:
        small = "optim.state_dtype=bfloat16" in words
        engine = make_engine(*words, micro=2)
        with Beside(follow_moments=small) as beside:
            found = []
            for step, lr in enumerate([0.03, 0.01, 0.02, 0.001, 0.005]):
                found += [norm for _, norm in train(engine, [step], micro=2, lr=lr)]
        assert found == pytest.approx(beside.norms, rel=1e-5), words
        assert beside.rates == [0.03, 0.01, 0.02, 0.001, 0.005]
        # So that clipping has an effect.
        assert min(found) > 0.3 or "optim.max_grad_norm=100" in words
        for name, weight in engine.weights():
            if name in beside.weights:
                # The first step alone changes a weight by 0.01 and more.
                torch.testing.assert_close(
                    weight, beside.weights[name], rtol=1e-5, atol=1e-5, msg=f"{words} {name}"
                )
        assert_same_moments(engine.optimizer, beside)
    return True


STEPS = {
    1: [
        STRONG,
        [*STRONG, "optim.max_grad_norm=100"],
        [*STRONG, "optim.offload_fraction=1"],
        [*STRONG, "optim.offload_fraction=0.5", "train.dtype=bfloat16"],
        [*STRONG, "optim.state_dtype=bfloat16"],
    ],
    2: [
        STRONG,
        [*STRONG, "parallel.tp=2", "optim.state_dtype=bfloat16"],
        [*STRONG, "parallel.ep=2", "optim.offload_fraction=0.5"],
    ],
}


@pytest.mark.tier("long")
def test_updates_are_those_of_torchs_adamw():
    assert check_steps(STEPS[1])


@pytest.mark.tier("long")
def test_updates_on_two_ranks_are_those_of_torchs_adamw():
    assert spawn(2, check_steps, STEPS[2], timeout=240) == [True, True]


# ---- learning rates ----------------------------------------------------------------------------


def rates_of(make_scheduler, peak, steps):
    """Return the learning rates of torch's scheduler for this many steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler, rates = make_scheduler(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def torch_rates(schedule, total, warmup, decaying, peak=0.01, ratio=0.25):
    """Return the rates of a whole run; ``decaying`` is the number of decay steps of wsd."""
    to_peak = functools.partial(
        lr_scheduler.LinearLR, start_factor=1 / max(warmup, 1), total_iters=max(warmup - 1, 1)
    )
    rates, left = rates_of(to_peak, peak, warmup), total - warmup
    if schedule == "cosine":
        cosine = functools.partial(lr_scheduler.CosineAnnealingLR, T_max=left, eta_min=ratio * peak)
        return rates + rates_of(cosine, peak, left)
    flat = left if schedule == "constant" else left - decaying
    down = functools.partial(
        lr_scheduler.LinearLR, start_factor=1.0, end_factor=ratio, total_iters=decaying
    )
    return rates + [peak] * flat + rates_of(down, peak, left - flat)


@pytest.mark.parametrize(("total", "warmup"), [(10, 3), (10, 0), (10, 1), (2000, 20)])
@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_learning_rates_are_those_of_torchs_schedulers(schedule, total, warmup):
    config = Config.load(None, [*rate_words(schedule), f"optim.warmup_steps={warmup}"], environ={})
    found = [learning_rate(step, total, config.optim) for step in range(total)]
    assert found == pytest.approx(torch_rates(schedule, total, warmup, total * 2 // 5), rel=1e-9)


def rate_words(schedule):
    floor, decay = "optim.min_lr_ratio=0.25", "optim.decay_fraction=0.4"
    more = {"cosine": [floor], "wsd": [floor, decay], "constant": []}
    return [f"optim.schedule={schedule}", "optim.lr=0.01", *more[schedule]]


# ---- what a run writes -------------------------------------------------------------------------


@pytest.mark.tier("long")
@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_a_runs_metrics_are_those_of_torch(schedule, tiny_words, tmp_path):
    words = [*tiny_words, *STRONG, *rate_words(schedule), "optim.warmup_steps=3", "train.steps=10"]
    words += ["train.sample_tokens=0"]
    with Beside() as beside:
        # Each setting counts once: the last of these words that names it.
        assert main(list({word.partition("=")[0]: word for word in words}.values())) == 0
    rows = [row for row in read_metrics(tmp_path / "out/metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 11))
    rates = torch_rates(schedule, 10, 3, 4)
    assert [row["lr"] for row in rows] == pytest.approx(rates, rel=1e-9)
    assert beside.rates == pytest.approx(rates, rel=1e-9)
    assert [row["grad_norm"] for row in rows] == pytest.approx(beside.norms, rel=1e-5)
    tokens = 4 * 32  # train.global_batch_size, data.seq_len
    assert [row["tokens"] for row in rows] == [tokens * step for step in range(1, 11)]
    for row in rows:
        rate = row["tokens_per_second_per_device"]
        assert rate * row["step_seconds"] == pytest.approx(tokens, rel=1e-6)


def test_rates_are_of_the_seconds_that_training_took(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Throughput(flops_per_token=6e9, device=torch.device("cpu"))
    clock.peak = 1e12
    for _ in range(2):
        for training, tokens in ((3.0, 500), (1.0, 300)):
            clock.start()
            for part, share in (("data", 0.25), ("", 0.125), ("update", 0.5), ("data", 0.125)):
                now[0] += training * share
                clock.mark(part)
            clock.count(tokens)
            clock.stop()
            now[0] += 7.0  # an evaluation
        row = clock.take()
        assert row["tokens_per_second_per_device"] == pytest.approx(200)
        assert row["tflops_per_device"] == pytest.approx(1.2)
        assert row["mfu"] == pytest.approx(1.2)
        assert row["step_seconds"] == pytest.approx(2)
        parts = {name: row[f"seconds/{name}"] for name in ("data", "update", "other")}
        assert parts == pytest.approx({"data": 0.75, "update": 1.0, "other": 0.25})


# ---- settings that are heeded ------------------------------------------------------------------


class Cycle:
    """Garbage that only Python's collector finds."""

    def __init__(self):
        self.itself = self


@pytest.mark.tier("long")
def test_the_garbage_collector_runs_when_it_is_told_to(tiny, monkeypatch):
    died, plain = {}, Trainer.train_step

    def train_step(self):
        made = self.step + 1
        weakref.finalize(Cycle(), lambda: died.setdefault(made, self.step))
        return plain(self)

    monkeypatch.setattr(Trainer, "train_step", train_step)
    Trainer(tiny("train.gc_interval=3", "train.steps=8", "train.sample_tokens=0")).fit()
    assert {made: at for made, at in died.items() if made <= 6} == {
        1: 3,
        2: 3,
        3: 3,
        4: 6,
        5: 6,
        6: 6,
    }


def test_a_deterministic_run_refuses_what_is_not(tiny):
    def scatter():
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))

    Trainer(tiny())
    scatter()
    try:
        Trainer(tiny("train.deterministic=yes"))
        with pytest.raises(RuntimeError, match="deterministic"):
            scatter()
    finally:
        torch.use_deterministic_algorithms(False)


# ---- the balancing loss ------------------------------------------------------------------------


def test_the_balancing_loss_weighs_micro_batches_by_their_tokens():
    """Each has its own E * sum_e f_e * P_e; with pads, their numbers of tokens differ."""
    engine = make_engine("moe.aux_loss_coef=3", "moe.z_loss_coef=0", micro=4)
    is_pad_BS = torch.zeros(4, 12, dtype=torch.bool)
    is_pad_BS[:, 3:] = True
    whole, short = make_batches(0, micro=4)
    short = Batch(
        short.tokens_BS,
        short.targets_BS.masked_fill(is_pad_BS, IGNORE_INDEX),
        None,
        short.cu_seqlens,
        is_pad_BS,
    )
    whole = whole._replace(is_pad_BS=torch.zeros_like(is_pad_BS))
    model = Transformer(engine.arch, moe=engine.config.moe)
    model.init_weights(engine.config.model.init_std, engine.config.train.seed)
    targets = sum(int((batch.targets_BS >= 0).sum()) for batch in (whole, short))
    tokens = 4 * 12 + 4 * 3
    for batch, own in ((whole, 4 * 12), (short, 4 * 3)):
        hidden_BSD, routing = model.backbone(batch.inputs)
        logits_TV = F.linear(hidden_BSD, model.head_weight).flatten(0, 1)
        loss = F.cross_entropy(
            logits_TV, batch.targets_BS.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
        balance = 0
        for counts_E, prob_sum_E in zip(routing.counts_LE, routing.prob_sum_LE, strict=True):
            balance += len(counts_E) * (counts_E / own * (prob_sum_E / own)).sum()
        (loss / targets + 3 * own / tokens * balance / len(routing.counts_LE)).backward()
    engine.forward_backward([whole, short], objective_of(engine))
    engine.fsdp.gradient_norm()
    for name, weight in model.named_parameters():
        gradient = engine.fsdp.members[name].local.grad
        assert (gradient - weight.grad).norm() <= 1e-5 * weight.grad.norm(), name
