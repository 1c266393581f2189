"""Generation over ranks that share experts: each rank's tokens are those of one process."""

import random

import pytest
import torch
import torch.distributed as dist
from distributed import spawn
from test_rollout import alone, draw_request, make_generator, make_model

from moetrain.data.tokenizer import ByteTokenizer
from moetrain.rollout.engine import Generator
from moetrain.rollout.request import Request, SamplingParams
from moetrain.rollout.steps import ExpertParallel


def shared_generator(seed=0, **settings):
    """This rank's, over the experts of all."""
    model = make_model(seed)
    experts = ExpertParallel(model, dist.group.WORLD, "auto")
    return Generator(model, ByteTokenizer(), experts=experts, **settings)


def requests_of(rank):
    """More for one rank than for another, and none for the last."""
    rng = random.Random(rank)
    number = 5 if rank == 0 else 2 if rank + 1 < dist.get_world_size() else 0
    return [draw_request(i, rng) for i in range(number)]


def serve():
    """What this rank generates, with one model's weights and then with another's."""
    generator = shared_generator(page_size=4, num_pages=40, max_tokens=16)
    experts = [p for n, p in generator.model.named_parameters() if "experts" in n]
    assert all(p.shape[0] == 6 // dist.get_world_size() for p in experts)
    mine = requests_of(dist.get_rank())
    first = [[c.tokens for c in completions] for completions in generator.generate(mine)]
    before = [p.data_ptr() for p in generator.model.parameters()]
    generator.update_weights(make_model(seed=1).named_parameters())
    assert [p.data_ptr() for p in generator.model.parameters()] == before
    second = [[c.tokens for c in completions] for completions in generator.generate(mine)]
    streamed = list(generator.stream(mine[:1]))
    assert bool(streamed) == bool(mine)
    assert generator.pages.num_available == 40
    return mine, first, second


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_with_more_and_fewer_and_no_requests(world):
    answers = spawn(world, serve, timeout=120)
    assert [len(mine) for mine, _, _ in answers] == [5, *[2] * (world - 2), 0]
    for mine, first, second in answers:
        for request, tokens, others in zip(mine, first, second, strict=True):
            assert tokens == alone(request)
            assert others == [c.tokens for c in make_generator(seed=1).generate([request])[0]]


def numbers_beside_training():
    """Log-probabilities on this rank, where another has other tokens or none."""
    generator = shared_generator()
    rank = dist.get_rank()
    params = SamplingParams(max_tokens=10, seed=rank, routes=True)
    requests = [Request("a", (3, 4, 5), params)] if rank == 0 else []
    return [(c.tokens, c.logprobs, c.routes.tolist()) for (c,) in generator.generate(requests)]


def test_log_probabilities_are_those_of_one_process():
    ((tokens, logprobs, routes),), nothing = spawn(2, numbers_beside_training, timeout=60)
    assert nothing == []
    params = SamplingParams(max_tokens=10, seed=0, routes=True)
    ((expected,),) = make_generator().generate([Request("a", (3, 4, 5), params)])
    assert tokens == expected.tokens
    assert routes == expected.routes.tolist()
    torch.testing.assert_close(
        torch.tensor(logprobs), torch.tensor(expected.logprobs), rtol=1e-5, atol=1e-5
    )
