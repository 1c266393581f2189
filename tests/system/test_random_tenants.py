"""Random concurrent jobs equal PEFT, torch's AdamW and the losses' formulas in fp64.

Each case is drawn by its number: the number of jobs, the requests of each (texts, weights,
advantages, losses and their bounds, the optimizer's settings), and the service's sizes. All
requests wait at once, so the service decides which of them share a pass. Every returned
log-probability and every final adapter is compared with a loop for one job alone.
``RANDOM_TENANTS`` selects cases; by default there are a few:

    RANDOM_TENANTS=50:1000 python -m pytest tests/system/test_random_tenants.py  50 from 1000 on
"""

import math
import os
import random

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from moetrain.config import Config, Recipes
from moetrain.jobs.scheduler import Service
from tests.lib.command_lines import settled
from tests.lib.job_services import WORDS, file_of, new

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCABULARY = 260
KINDS = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")


def draw_loss(d):
    kind, config = d.choice(KINDS), {}
    if kind in ("ppo", "cispo") and d.random() < 0.6:
        config = {"clip_low_threshold": d.choice([0.5, 0.9]), "clip_high_threshold": 1.05}
    if kind == "dro" and d.random() < 0.6:
        config = {"beta": d.choice([0.0, 0.4])}
    return kind, config


def draw_pass(d):
    """Draw a request: one to four texts, some of whose tokens have no weight."""
    kind, config = draw_loss(d)
    data = []
    for _ in range(d.randint(1, 4)):
        size = d.randint(1, 20)
        tokens = [d.randrange(VOCABULARY) for _ in range(size + 1)]
        datum = {"tokens": tokens[:-1], "target_tokens": tokens[1:]}
        numbers = [d.choice([0.0, 1.0, d.gauss(0, 1)]) for _ in range(size)]
        if kind != "cross_entropy":
            datum["logprobs"] = [-4 + d.gauss(0, 0.5) for _ in range(size)]
            datum["advantages"] = numbers
        elif d.random() < 0.7:
            datum["weights"] = numbers
        if d.random() < 0.2:  # targets may be any tokens
            d.shuffle(datum["target_tokens"])
        data.append(datum)
    return {"data": data, "loss_fn": kind, "loss_fn_config": config}


def draw_requests(d):
    for _ in range(d.choice([1, 2, 3])):
        for _ in range(d.choice([1, 1, 2])):
            yield "forward_backward", draw_pass(d)
        params = {
            "learning_rate": d.choice([1e-2, 3e-2]),
            "beta1": d.choice([0.9, 0.5]),
            "beta2": d.choice([0.95, 0.8]),
            "eps": 1e-2,
            "weight_decay": d.choice([0.0, 0.0, 0.5]),
            "grad_clip_norm": d.choice([0.0, 0.1, 10.0]),
        }
        yield "optim_step", {"adam_params": params}
        if d.random() < 0.5:
            yield "forward", draw_pass(d)
    yield "save_weights_external", {"path": "final"}


# ---- one job in its own loop -------------------------------------------------------------------


def plain_loss(kind, config, datum, logp):
    """Return the sum over a text's targets, by the SDK's documented formulas."""
    total = torch.zeros((), dtype=torch.float64)
    low = config.get("clip_low_threshold", 0.8)
    high = config.get("clip_high_threshold", 1.2)
    for i, now in enumerate(logp):
        if kind == "cross_entropy":
            total = total - datum.get("weights", [1.0] * len(logp))[i] * now
            continue
        old, advantage = datum["logprobs"][i], datum["advantages"][i]
        ratio = torch.exp(now - old)
        if kind == "importance_sampling":
            total = total - ratio * advantage
        elif kind == "ppo":
            total = total - torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        elif kind == "cispo":
            total = total - ratio.detach().clamp(low, high) * advantage * now
        else:
            beta = config.get("beta", 0.05)
            total = total - (advantage * now - beta / 2 * (now - old) ** 2)
    return total


class Alone:
    """One job's adapter, trained by the plain loop."""

    def __init__(self, base, first):
        model = AutoModelForCausalLM.from_pretrained(
            base, attn_implementation="eager", experts_implementation="eager"
        )
        self.model = peft.PeftModel.from_pretrained(model, first, is_trainable=True).double()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0)

    def ask(self, kind, body):
        if kind == "optim_step":
            return self.step(**body["adam_params"])
        found, total = [], 0.0
        for datum in body["data"]:
            logits = self.model(torch.tensor([datum["tokens"]]), use_cache=False).logits[0]
            targets = torch.tensor(datum["target_tokens"])[:, None]
            logp = torch.log_softmax(logits, -1).gather(1, targets)[:, 0]
            loss = plain_loss(body["loss_fn"], body["loss_fn_config"], datum, logp)
            if kind == "forward_backward":
                loss.backward()
            total += loss.item()
            found.append(logp.tolist())
        return found, total

    def step(self, learning_rate, beta1, beta2, eps, weight_decay, grad_clip_norm):
        for p in self.parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in self.parameters))
        if 0 < grad_clip_norm < norm:
            for p in self.parameters:
                p.grad *= grad_clip_norm / norm
        (group,) = self.optimizer.param_groups
        group |= {"lr": learning_rate, "betas": (beta1, beta2), "eps": eps}
        group["weight_decay"] = weight_decay
        self.optimizer.step()
        self.optimizer.zero_grad()


# ---- the service -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Make a random model of two layers."""
    folder = tmp_path_factory.mktemp("base")
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        moe_intermediate_size=8,
        max_position_embeddings=128,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.3).add_("norm" in name)
    model.save_pretrained(folder)
    return folder


def serve(folder, base, d, programs):
    """Return the answers to all requests of each job, and its first and last adapters."""
    words = [
        f"model.path={base}",
        f"data.seq_len={d.choice([24, 64, 200])}",
        f"train.micro_batch_size={d.choice([1, 2, 4])}",
        f"jobs.max_tenants={d.choice([1, 2, 4])}",
        f"jobs.max_loaded={d.choice([1, 2, 9])}",
        "lora.targets=*.attn.*",
        "lora.rank=4",
        "train.global_batch_size=4",
        "data.tokenizer=byte",
    ]
    with Service(config_with(folder, words)) as service:
        names = [new(service, seed) for seed in range(len(programs))]
        for name in names:
            ask_all(service, [(name, ("save_weights_external", {"path": "first"}))])
        # the order between jobs is random; within a job it is fixed
        order = [number for number, program in enumerate(programs) for _ in program]
        d.shuffle(order)
        iterators = [iter(program) for program in programs]
        asked = [(names[number], next(iterators[number])) for number in order]
        answers = {name: [] for name in names}
        for (name, _), answer in zip(asked, ask_all(service, asked), strict=True):
            answers[name].append(answer)
    files = [(file_of(folder, name, "first"), file_of(folder, name)) for name in names]
    return [answers[name] for name in names], files


def config_with(folder, words):
    """Return the settings of test_jobs.py with ``words``, and without the model's sizes."""
    kept = [word for word in WORDS if not word.startswith("model.")]
    words = settled([*kept, *words, f"output_dir={folder}"])
    return Config.load(None, words, environ={}, recipes=Recipes.JOBS)


def ask_all(service, asked):
    futures = [service.answer(name, service.submit(name, *request)) for name, request in asked]
    while service.turn():
        pass
    return [future.result() for future in futures]


def compare(number, base, folder):
    d = random.Random(number)
    programs = [list(draw_requests(d)) for _ in range(d.choice([1, 2, 3, 4]))]
    answers, files = serve(folder, base, d, programs)
    for program, found, (first, last) in zip(programs, answers, files, strict=True):
        plain = Alone(base, first.parent)
        for request, answer in zip(program, found, strict=True):
            assert "result" in answer, answer
            if request[0] == "save_weights_external":
                continue
            wanted = plain.ask(*request)
            if wanted is not None:
                for mine, theirs in zip(answer["result"]["logprobs"], wanted[0], strict=True):
                    assert mine == pytest.approx(theirs, rel=2e-4, abs=2e-4), request
                assert answer["result"]["loss"] == pytest.approx(wanted[1], rel=1e-3, abs=1e-3)
        begun, ended = load_file(first), load_file(last)
        theirs = {n: p for n, p in plain.model.named_parameters() if p.requires_grad}
        assert len(theirs) == len(ended)
        for name, tensor in ended.items():
            other = theirs[name.replace(".weight", ".default.weight")]
            moved = (other - begun[name].double()).norm()
            error = (tensor.double() - other).norm()
            assert error <= 2e-3 * moved + 1e-6, (name, error.item(), moved.item())


@pytest.mark.tier("long")
def test_random_jobs_are_what_each_is_alone_by_the_formulas(base, tmp_path):
    count, first = map(int, os.environ.get("RANDOM_TENANTS", "3:0").split(":"))
    for number in range(first, first + count):
        try:
            compare(number, base, tmp_path / str(number))
        except AssertionError:
            again = f"RANDOM_TENANTS=1:{number} pytest tests/system/test_random_tenants.py"
            print(again)
            raise
