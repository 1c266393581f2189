"""Helpers of tests/jobs/test_jobs.py that other tests use too."""

import hashlib
import json
import secrets
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from moetrain.config import Config, Recipes
from moetrain.jobs.scheduler import Service
from moetrain.jobs.shared import SharedEngine
from moetrain.parallel import apply

WORDS = [
    "model.hidden_size=16",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.head_dim=8",
    "model.num_experts=4",
    "model.moe_intermediate_size=8",
    "model.vocab_size=50",
    "data.seq_len=64",
    "train.micro_batch_size=2",
    "train.global_batch_size=2",
    "train.device=cpu",
    "rl.max_sequences=4",
    "jobs.save_interval=3",
    "jobs.max_loaded=2",
]


def config_of(folder, *words):
    words = [*WORDS, f"output_dir={folder}", *words]
    return Config.load(None, words, environ={}, recipes=Recipes.JOBS)


def text_of(seed, length=9):
    return torch.randint(50, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def text(tokens, weights=None, **more):
    """Return a datum whose targets are the next tokens."""
    datum = {"tokens": tokens[:-1], "target_tokens": tokens[1:], **more}
    return datum if weights is None else {**datum, "weights": weights}


def texts(*several):
    return {"data": [text(tokens) for tokens in several]}


def rate(lr):
    return {"adam_params": {"learning_rate": lr}}


def prompting(tokens, max_tokens=6, sampler=0, seed=None, **more):
    asked = {"max_tokens": max_tokens} | ({} if seed is None else {"seed": seed})
    prompt = {"chunks": [{"tokens": tokens}]}
    return {"prompt": prompt, "sampling_params": asked, "sampler": sampler, **more}


def supervised(seed, steps=2):
    """Run a supervised job: a generator that yields requests and is sent their results."""
    for step in range(steps):
        for part in range(2):
            yield "forward_backward", texts(text_of(1000 * seed + 10 * step + part))
        yield "optim_step", rate(1e-2)
    yield "forward", texts(text_of(seed))
    yield "save_weights_external", {"path": "final"}


def policy(seed, steps=2):
    """Run an RL job, which is rewarded for even tokens: yields requests, is sent their results."""
    for step in range(steps):
        prompt, data = text_of(seed, 3), []
        yield "save_weights_for_sampler", {"sampling_session_seq_id": step}
        for given in (prompt, prompt[:2]):
            answer = yield "asample", prompting(given, sampler=step, num_samples=2)
            rewards = [sum(t % 2 == 0 for t in c["tokens"]) for c in answer["sequences"]]
            for completion, reward in zip(answer["sequences"], rewards, strict=True):
                new, before = completion["tokens"], [0.0] * (len(given) - 1)
                advantage = reward - sum(rewards) / len(rewards)
                advantages = before + [advantage] * len(new)
                logprobs = before + completion["logprobs"]
                data.append(text(given + new, logprobs=logprobs, advantages=advantages))
        name = ("ppo", "importance_sampling")[step % 2]
        config = {"clip_high_threshold": 1.3} if name == "ppo" else {}
        yield "forward_backward", {"data": data, "loss_fn": name, "loss_fn_config": config}
        yield "optim_step", rate(1e-2)
    yield "save_weights_external", {"path": "final"}


KINDS = (supervised, policy)


class Course:
    """One job and its progress, asked through any ``ask(kind, body)``."""

    def __init__(self, seed, ask):
        self.requests, self.ask, self.results = KINDS[seed % 2](seed), ask, []
        self.next = next(self.requests)

    def go_on(self):
        """Send the next request; return True if there is another."""
        self.results.append(self.ask(*self.next))
        try:
            self.next = self.requests.send(self.results[-1])
        except StopIteration:
            return False
        return True


def new(service, seed=0):
    """Create a job; return its id."""
    return service.create(f"{secrets.token_hex(16)}:train:0", seed).id


def target_of(name, kind, body):
    """Return the job and the body of a request; paths and samplers become the job's own."""
    session = name.partition(":")[0]
    if kind == "asample":
        return f"{session}:sample:{body['sampler']}", {
            k: x for k, x in body.items() if k != "sampler"
        }
    if kind == "load_weights" and isinstance(body.get("path"), str) and "/" not in body["path"]:
        body = {"optimizer": True, **body, "path": f"tinker://{name}/weights/{body['path']}"}
    return name, body


def answer_to(service, name, kind, body, number=None):
    """Return the answer to a request, without the job's id, which differs between runs."""
    job, body = target_of(name, kind, body)
    future = service.answer(job, service.submit(job, kind, body, number))
    while not future.done() or service.unfinished:
        service.turn()
    return json.loads(json.dumps(future.result()).replace(name.partition(":")[0], "SESSION"))


def asker(service, name):
    def ask_it(kind, body):
        answer = answer_to(service, name, kind, body)
        assert "result" in answer, answer
        return answer["result"]

    return ask_it


def file_of(folder, name, save="final"):
    saves = Path(folder) / "jobs" / name / "external_weights"
    return saves / save / "adapter_model.safetensors"


def adapter_of(folder, name, save="final"):
    return hashlib.sha256(file_of(folder, name, save).read_bytes()).hexdigest()


def run_alone(folder, seed, *words):
    """Return the results and the adapter of a job that has a service for itself."""
    with Service(config_of(folder, *words)) as service:
        name = new(service, seed)
        course = Course(seed, asker(service, name))
        while course.go_on():
            pass
    return course.results, adapter_of(folder, name)


def copies_to_host(monkeypatch):
    """Return a list that collects the ids of jobs whose states are moved to host memory."""
    moved, move_to_host = [], SharedEngine.move_to_host

    def note(engine, job):
        moved.append(job.id)
        move_to_host(engine, job)

    monkeypatch.setattr(SharedEngine, "move_to_host", note)
    return moved


@pytest.fixture
def compiled(monkeypatch):
    """Compile blocks by a cheap backend, and return it: it counts what it compiles."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(apply, "compile_blocks", partial(apply.compile_blocks, backend=counter))
    yield counter
    torch._dynamo.reset()
