"""Helpers of tests/jobs/test_tenants.py that other tests use too."""

import json
from itertools import cycle

from safetensors.torch import load_file

from moetrain.jobs.scheduler import Service
from tests.lib.job_services import config_of, file_of, new, rate, text, text_of

WORDS = ["data.seq_len=256", "train.micro_batch_size=4", "train.global_batch_size=4"]
WORDS += ["jobs.save_interval=4"]
KINDS = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")


def body_of(seed, kind="cross_entropy", count=2, length=30):
    """Return a request with ``count`` texts."""
    more = {"logprobs": [-3.0] * (length - 1), "advantages": [seed % 3 - 0.5] * (length - 1)}
    texts = [text_of(100 * seed + i, length) for i in range(count)]
    data = [text(tokens, **({} if kind == "cross_entropy" else more)) for tokens in texts]
    return {"data": data, "loss_fn": kind}


def program(seed, steps=2):
    """Return the requests of a job, with any loss."""
    kinds = cycle(KINDS[seed % 5 :] + KINDS[: seed % 5])
    for step in range(steps):
        yield "forward_backward", body_of(seed + step, next(kinds))
        yield "forward_backward", body_of(seed - step, next(kinds), count=1 + seed % 2)
        yield "optim_step", rate(1e-2)
        yield "forward", body_of(seed, next(kinds))
    yield "save_weights_external", {"path": "final"}


class Passes:
    """Counts the passes of a service, and the jobs in each."""

    def __init__(self, service):
        engine = service.session.engine
        self.tenants, self.shapes, forward_backward = [], set(), engine.forward_backward

        def count(batches, loss):
            self.tenants.append(len(loss.losses))
            self.shapes |= {batch.tokens_BS.shape for batch in batches}
            return forward_backward(batches, loss)

        engine.forward_backward = count


def without_id(result, name):
    """Return a result without its job's session, which differs between runs."""
    return json.loads(json.dumps(result).replace(name.partition(":")[0], "SESSION"))


def serve_all(service, names, requests):
    """Return the results of requests that all wait at once."""
    asked = zip(names, requests, strict=True)
    futures = [service.answer(name, service.submit(name, *request)) for name, request in asked]
    while service.turn():
        pass
    return [
        without_id(future.result()["result"], name)
        for name, future in zip(names, futures, strict=True)
    ]


def run(folder, seeds, *words, one_by_one=False):
    """Return results, adapters and passes of jobs."""
    with Service(config_of(folder, *WORDS, *words)) as service:
        names, results, passes = [new(service, seed) for seed in seeds], [], Passes(service)
        for requests in zip(*map(program, seeds), strict=True):
            if one_by_one:
                for name, request in zip(names, requests, strict=True):
                    results += serve_all(service, [name], [request])
            else:
                results += serve_all(service, names, requests)
    return results, [load_file(file_of(folder, name)) for name in names], passes
