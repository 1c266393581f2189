"""The unmodified ``tinker`` SDK as a client of the job service, in this process."""

import numpy as np
import pytest
import tinker
import torch
from safetensors.torch import load
from tinker import types

from moetrain.data.tokenizer import ByteTokenizer
from tests.lib.tinker_sdk import served, service

__all__ = ["served", "service"]  # fixtures

TOKENS = [*b"a text of bytes"]
ADAM = types.AdamParams(learning_rate=1e-2)


def created(client, **words):
    (model,) = client.get_server_capabilities().supported_models
    base = {"base_model": model.model_name, "rank": 8, "seed": 1}
    return client.create_lora_training_client(**base | words).result()


@pytest.fixture(scope="module")
def trained(served):
    """Return a training client after three steps, and its losses."""
    run, losses = created(served), []
    for _ in range(3):
        passed = run.forward_backward([datum(), datum()], "cross_entropy")
        stepped = run.optim_step(ADAM)  # before the pass is answered
        losses.append(passed.result().metrics["loss:sum"])
        assert stepped.result().metrics["skipped"] == 0
    return run, losses


def datum(tokens=TOKENS, **inputs):
    inputs = {"target_tokens": tokens[1:], **inputs}
    if set(inputs) == {"target_tokens"}:
        inputs["weights"] = [1.0] * (len(tokens) - 1)
    prompt = types.ModelInput.from_ints(tokens[:-1])
    return types.Datum(model_input=prompt, loss_fn_inputs=inputs)


def logprobs_of(run, one=None):
    (found,) = run.forward([one or datum()], "cross_entropy").result().loss_fn_outputs
    return found["logprobs"].to_torch()


def test_sdk_training_lowers_the_loss(trained):
    run, losses = trained
    assert losses[0] > losses[1] > losses[2]
    info = run.get_info()
    assert (info.lora_rank, info.model_id) == (8, run.model_id)
    assert run.get_tokenizer().encode("ab") == [97, 98]


def test_sdk_targets_and_weights_are_arbitrary(served):
    """They need not be the next tokens, and each has its own weight."""
    run = created(served)
    targets, weights = [5] * 14, torch.linspace(-1, 1, 14)
    one = datum(target_tokens=targets, weights=weights)
    logprobs = logprobs_of(run, one)
    assert not torch.equal(logprobs, logprobs_of(run))
    passed = run.forward_backward([one, datum()], "cross_entropy").result()
    assert torch.allclose(passed.loss_fn_outputs[0]["logprobs"].to_torch(), logprobs, atol=1e-4)
    expected = -(weights * logprobs).sum() - logprobs_of(run).sum()
    assert passed.metrics["loss:sum"] == pytest.approx(expected.item(), rel=1e-5)


pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # load_state is deprecated
LOSSES = {
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "cispo": {},
    "dro": {"beta": 0.3},
}


def formula(name, lp, old, advantage, config):
    ratio = torch.exp(lp - old)
    low, high = (
        config.get(f"clip_{side}_threshold", x) for side, x in (("low", 0.8), ("high", 1.2))
    )
    if name == "importance_sampling":
        return -(ratio * advantage).sum()
    if name == "ppo":
        return -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage).sum()
    if name == "cispo":
        return -(ratio.clamp(low, high).detach() * advantage * lp).sum()
    return -(advantage * lp - config["beta"] / 2 * (lp - old).square()).sum()


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_formula(served, name):
    """The gradient too: a custom loss with the same formula makes the same step."""
    one, other = created(served), created(served)
    lp = logprobs_of(one)
    generator = torch.Generator().manual_seed(0)
    old = lp + 0.3 * torch.randn(14, generator=generator)
    advantages = torch.randn(14, generator=generator)
    data = [datum(logprobs=old, advantages=advantages)]
    passed = one.forward_backward(data, name, LOSSES[name] or None).result()
    expected = formula(name, lp, old, advantages, LOSSES[name])
    assert passed.metrics["loss:sum"] == pytest.approx(expected.item(), rel=1e-4)

    def custom(data, logprobs):
        return formula(name, logprobs[0], old, advantages, LOSSES[name]), {"mine": 7.0}

    metrics = other.forward_backward_custom([datum()], custom).result().metrics
    assert metrics["mine"] == 7
    assert metrics["loss:sum"] == pytest.approx(expected.item(), rel=1e-4)
    steps = [run.optim_step(ADAM).result().metrics["grad_norm"] for run in (one, other)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-4)
    assert torch.allclose(logprobs_of(one), logprobs_of(other), atol=1e-3)
    assert not torch.allclose(logprobs_of(one), lp, atol=1e-3)


@pytest.mark.tier("long")
def test_sdk_optim_step_applies_the_adam_params(served):
    """The request sets Adam's parameters: each changes the step, and clipping bounds it."""
    found = []
    for change in ({}, {"beta1": 0.0}, {"beta2": 0.5}, {"eps": 1.0}, {"weight_decay": 9.0}, {}):
        run = created(served)
        for tokens in (TOKENS, TOKENS[::-1]):
            run.forward_backward([datum(tokens)], "cross_entropy")
            run.optim_step(types.AdamParams(learning_rate=1e-2, **change)).result()
        found.append(logprobs_of(run))
    assert torch.equal(found[0], found[-1])
    assert len({tuple(x.tolist()) for x in found}) == 5
    clipped = []
    for limit in (1e-3, 0.0):
        run = created(served)
        run.forward_backward([datum()], "cross_entropy")
        params = types.AdamParams(learning_rate=1e-2, eps=1.0, grad_clip_norm=limit)
        run.optim_step(params).result()
        clipped.append((logprobs_of(run) - logprobs_of(created(served))).abs().max().item())
    assert clipped[0] < 1e-3 < clipped[1]


@pytest.mark.tier("long")
def test_parts_of_a_large_batch_add_up_to_the_whole(served, service):
    """The SDK sends a large batch as several requests. The loss is a sum, so it is that of all."""
    one, other = created(served), created(served)
    many = [datum(TOKENS[i % 5 : i % 5 + 3]) for i in range(1030)]  # more than one message holds
    passed = one.forward_backward(many, "cross_entropy").result()
    assert len(passed.loss_fn_outputs) == 1030
    assert service.find(one.model_id).accepted == 2
    few = [datum(TOKENS[i : i + 3], weights=[206.0] * 2) for i in range(5)]
    expected = other.forward_backward(few, "cross_entropy").result().metrics["loss:sum"]
    assert service.find(other.model_id).accepted == 1
    assert passed.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)
    norms = [run.optim_step(ADAM).result().metrics["grad_norm"] for run in (one, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def test_samplers_keep_the_weights_that_they_were_made_of(served, trained):
    run, _ = trained
    prompt = types.ModelInput.from_ints(TOKENS)
    sampler = run.save_weights_and_get_sampling_client().result()
    before = sampler.compute_logprobs(prompt).result()
    assert before[0] is None
    assert np.allclose(before[1:], logprobs_of(run), atol=1e-4)
    named = run.save_weights_for_sampler("kept").result().path
    run.forward_backward([datum()], "cross_entropy")
    run.optim_step(ADAM).result()
    assert sampler.compute_logprobs(prompt).result() == before
    for other in (
        served.create_sampling_client(model_path=named).result(),
        run.create_sampling_client(named).result(),
    ):
        assert other.compute_logprobs(prompt).result() == before
    base = served.create_sampling_client(base_model=sampler.get_base_model()).result()
    fresh = base.compute_logprobs(prompt).result()
    assert np.allclose(fresh[1:], logprobs_of(created(served)), atol=1e-4)
    part = base.compute_logprobs(prompt, prompt_logprobs_last_n=3).result()
    assert part == [None] * 12 + fresh[12:]


def test_sdk_sampling_parameters(served):
    (model,) = served.get_server_capabilities().supported_models
    sampler = served.create_sampling_client(base_model=model.model_name).result()
    prompt = types.ModelInput.from_ints(TOKENS[:4])

    def sample(number=1, topk=0, **params):
        asked = types.SamplingParams(**{"max_tokens": 12, "seed": 3, **params})
        return sampler.sample(prompt, number, asked, topk_sample_logprobs=topk).result().sequences

    two = sample(2, topk=2)
    assert [len(one.tokens) for one in two] == [12, 12]
    assert two[0].tokens != two[1].tokens
    assert len({one.sequence_id for one in two}) == 2
    for one in two:
        assert [len(top) for top in one.topk_logprobs] == [2] * 12
        assert all(
            top[0][1] >= lp - 1e-4 for top, lp in zip(one.topk_logprobs, one.logprobs, strict=True)
        )
    assert [one.tokens for one in sample(2)] == [one.tokens for one in two]
    assert sample(seed=4)[0].tokens != two[0].tokens
    assert sample(temperature=0.0)[0].tokens == sample(temperature=0.0, seed=9)[0].tokens
    assert sample(top_k=1)[0].tokens == sample(temperature=0.0)[0].tokens
    assert sample(seed=None)[0].tokens != sample(seed=None)[0].tokens
    stop = two[0].tokens[3]
    (one,) = sample(stop=[stop])
    assert (one.stop_reason, one.tokens) == ("stop", two[0].tokens[: two[0].tokens.index(stop) + 1])
    (one,) = sample(stop=ByteTokenizer().decode([two[0].tokens[0]]))
    assert (one.stop_reason, len(one.tokens)) == ("stop", 1)
    with pytest.raises(tinker.BadRequestError, match="more than the"):
        sample(max_tokens=10**6)


@pytest.mark.tier("long")
def test_sdk_restores_saved_states(served, trained):
    run, _ = trained
    path = run.save_state("state", ttl_seconds=3600).result().path
    with_moments = served.create_training_client_from_state_with_optimizer(path).result()
    without = served.create_training_client_from_state(path).result()
    old = logprobs_of(run)
    for other in (with_moments, without):
        assert torch.equal(logprobs_of(other), old)
    for one in (run, with_moments, without):
        one.forward_backward([datum()], "cross_entropy")
        one.optim_step(ADAM).result()
    assert torch.equal(logprobs_of(run), logprobs_of(with_moments))
    assert not torch.equal(logprobs_of(run), logprobs_of(without))
    run.load_state(path).result()  # its moments are reset
    run.forward_backward([datum()], "cross_entropy")
    run.optim_step(ADAM).result()
    assert torch.equal(logprobs_of(run), logprobs_of(without))
    run.load_state_with_optimizer(path).result()
    assert torch.equal(logprobs_of(run), old)
    rest = served._rest_client()
    (found,) = [
        one
        for one in rest.list_checkpoints(run.model_id).result().checkpoints
        if one.tinker_path == path
    ]
    assert found.checkpoint_type == "training"
    assert (found.expires_at - found.time).total_seconds() == pytest.approx(3600)
    about = rest.get_training_run(run.model_id).result()
    assert (about.lora_rank, about.corrupted) == (8, False)
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(path).result()


def test_an_adapter_is_downloaded(served, trained):
    run, _ = trained
    path = run.save_weights_external("out").result().path
    urls = served._rest_client().get_external_weights_urls(path).result().urls
    import urllib.request

    with urllib.request.urlopen(urls["adapter_model.safetensors"]) as reply:
        tensors = load(reply.read())
    assert any(x.any() for name, x in tensors.items() if "lora_B" in name)


def test_sdk_requests_that_are_unsupported_fail_with_one_line(served):
    run = created(served)
    for ask, says in (
        (lambda: run.forward_backward([datum()], "gspo"), "loss_fn 'gspo' is not one of"),
        (lambda: run.forward_backward([datum()], "cross_entropy", {"a": 1}), "'a' is unknown"),
        (lambda: run.optim_step(ADAM), "no forward_backward since"),
        (lambda: run.optim_step(types.AdamParams(beta1=1.0)), "beta1: Input should be less"),
        (lambda: run.optim_step(types.DimuonParams(learning_rate=1.0)), "'optimizer_params' is"),
        (
            lambda: run.forward([datum(target_tokens=[[1, 2]] * 14)], "cross_entropy"),
            "more than one dim",
        ),
        (lambda: run.load_state(f"tinker://{run.model_id}/weights/x"), "there is no save"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=says) as failed:
            ask().result()
        assert failed.value.category == types.RequestErrorCategory.User
    assert logprobs_of(run).isfinite().all()  # the run continues
    for words, says in (
        ({"rank": 4}, "rank 4 is not this service's lora.rank; send 8"),
        ({"base_model": "x"}, "base_model 'x' is not"),
        ({"train_mlp": False}, "train_mlp is False, but"),
    ):
        with pytest.raises(tinker.BadRequestError, match=says):
            created(served, **words)
