"""The engine alone: no data, no folder, no trainer; its tensors are made here."""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from moetrain.data.loader import Batch
from moetrain.data.packing import IGNORE_INDEX
from moetrain.losses.balancing import load_balancing_loss, router_z_loss
from moetrain.models.transformer import Inputs, Transformer
from moetrain.optim.adamw import AdamW
from moetrain.runtime.arena import OffloadedError
from moetrain.train.objectives import CrossEntropy, Term
from tests.lib.distributed import spawn
from tests.lib.engines import (
    DENSE,
    ROWS,
    SEQ_LEN,
    WORDS,
    assert_near,
    copy_of,
    make_batches,
    make_engine,
    make_rows,
    objective_of,
    train,
    weights_of,
)


def gradients_of(engine):
    """Return the step's gradients by name, and clear them."""
    engine.fsdp.gradient_norm()
    found = {name: m.local.grad.clone() for name, m in engine.fsdp.members.items()}
    engine.fsdp.clear_gradients()
    return found


def hand_loop(config, arch, steps, lr=1e-2):
    """Train by plain autograd and AdamW on whole batches, without a selection bias."""
    model = Transformer(arch)
    model.init_weights(config.model.init_std, config.train.seed)
    optim, rules = config.optim, arch.plan().rules(model)
    groups = [
        {"params": [p], "weight_decay": optim.weight_decay * rules[name].decay}
        for name, p in model.named_parameters()
    ]
    betas = (optim.beta1, optim.beta2)
    adamw = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=optim.eps, foreach=False)
    numbers = []
    for step in steps:
        tokens_BS, targets_BS = make_rows(step)
        hidden_BSD, routing = model.backbone(Inputs(tokens_BS))
        logits_TV = F.linear(hidden_BSD, model.head_weight).flatten(0, 1)
        loss = F.cross_entropy(logits_TV, targets_BS.flatten(), ignore_index=IGNORE_INDEX)
        tokens = tokens_BS.numel()
        balance = load_balancing_loss(routing.counts_LE, routing.prob_sum_LE, tokens)
        (loss + 0.1 * balance + 0.01 * router_z_loss(routing.z_sum_L, tokens)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.max_grad_norm)
        adamw.step()
        adamw.zero_grad()
        numbers.append((loss.item(), norm.item()))
    return numbers, dict(model.named_parameters())


@pytest.mark.parametrize("micro", [ROWS, 2])
def test_three_steps_on_tensors_equal_a_loop_by_hand(micro):
    words = ["moe.bias_update_rate=0", "moe.aux_loss_scope=global_batch"]
    engine = make_engine(*words, micro=micro)
    numbers = train(engine, range(3), micro)
    expected, weights = hand_loop(engine.config, engine.arch, range(3))
    for mine, theirs in zip(numbers, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert numbers[2][0] < numbers[0][0]
    assert_near(weights_of(engine), weights, 1e-5)


def test_forward_gives_the_same_totals_and_leaves_no_gradient():
    engine = make_engine(micro=2)
    batches, objective = make_batches(0, 2), objective_of(engine)
    seen = engine.forward(batches, objective)
    assert not any(bucket.has_gradient for bucket in engine.fsdp.buckets)
    learned = engine.forward_backward(batches, objective)
    assert all(bucket.has_gradient for bucket in engine.fsdp.buckets)
    assert list(seen.terms) == ["cross_entropy", "load_balancing", "router_z"]
    for name, value in learned.terms.items():
        assert seen.terms[name].item() == pytest.approx(value.item(), rel=1e-6), name
    coefficients = {"cross_entropy": 1, "load_balancing": 0.1, "router_z": 0.01}
    total = sum(coefficients[name] * value for name, value in seen.terms.items())
    assert seen.total.item() == pytest.approx(total.item(), rel=1e-6)
    assert torch.equal(seen.routing.counts_LE, learned.routing.counts_LE)
    assert seen.routing.num_tokens == ROWS * SEQ_LEN


def test_state_goes_on_bit_for_bit():
    first = make_engine()
    train(first, range(2))
    state = copy_of(first.state())
    straight = train(first, range(2, 4))
    second = make_engine("train.seed=9")
    second.load_state({"model": state["model"]})
    second.load_state({"optim": state["optim"]})
    assert train(second, range(2, 4)) == straight
    for (name, mine), (_, theirs) in zip(second.weights(), first.weights(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize(("base", "is_tied"), [(WORDS, False), (DENSE, True)])
def test_weights_are_the_models_or_a_files(base, is_tied, tmp_path):
    engine = make_engine(base=base)
    assert engine.arch.tie_embeddings == is_tied
    train(engine, range(1))
    ours = weights_of(engine)
    assert set(ours) == set(engine.model.state_dict())
    for name, weight in engine.model.state_dict().items():
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        assert torch.equal(ours[name], local), name
    engine.save_hf(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    theirs = weights_of(engine, hf=True)
    assert set(theirs) == set(saved)
    for name, weight in saved.items():
        assert torch.equal(theirs[name], weight), name


class Completions(NamedTuple):
    """A batch of another kind, with its own field."""

    tokens_BS: torch.Tensor
    targets_BS: torch.Tensor
    advantages_BS: torch.Tensor

    @property
    def inputs(self):
        return Inputs(self.tokens_BS)

    def to(self, device):
        return Completions(*(x.to(device) for x in self))


class PolicyGradient(CrossEntropy):
    """Cross-entropy with the advantages' policy gradient (REINFORCE)."""

    def sizes(self, batches: Any):
        return {**super().sizes(batches), "rows": sum(len(b.tokens_BS) for b in batches)}

    def terms(self, model: Any, outputs, batch: Any, sizes):
        targets_T, hidden_TD = batch.targets_BS.flatten(), outputs.hidden_BSD.flatten(0, 1)
        losses = model.vocabulary.token_losses(hidden_TD, model.head_weight, targets_T)
        policy = (batch.advantages_BS.flatten() * losses.loss_T).sum() / sizes["rows"]
        policy = policy * outputs.share
        (cross_entropy,) = super().terms(model, outputs, batch, sizes).values()
        return {
            "policy": Term(policy, 2.0),
            "cross_entropy": cross_entropy._replace(coefficient=0.5),
        }


def test_an_objective_and_a_batch_of_another_kind():
    engine = make_engine()
    tokens_BS, targets_BS = make_rows(0)
    advantages_BS = torch.randn(ROWS, SEQ_LEN, generator=torch.Generator().manual_seed(1))
    parts = zip(*(x.split(2) for x in (tokens_BS, targets_BS, advantages_BS)), strict=True)
    totals = engine.forward_backward([Completions(*part) for part in parts], PolicyGradient())
    gradients = gradients_of(engine)
    with engine.work():
        logits_TV = engine.model(tokens_BS).flatten(0, 1)
        loss_T = F.cross_entropy(
            logits_TV, targets_BS.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
        )
        policy = (advantages_BS.flatten() * loss_T).sum() / ROWS
        cross_entropy = loss_T.sum() / (targets_BS != IGNORE_INDEX).sum()
        (2.0 * policy + 0.5 * cross_entropy).backward()
    assert totals.terms["policy"].item() == pytest.approx(policy.item(), rel=1e-5)
    assert totals.terms["cross_entropy"].item() == pytest.approx(cross_entropy.item(), rel=1e-5)
    assert_near(gradients, gradients_of(engine), 1e-5)


def test_several_calls_make_one_step():
    def gradients(*calls):
        engine = make_engine()
        for batch in calls:
            engine.forward_backward([batch], CrossEntropy())
        return gradients_of(engine)

    first, second = make_batches(0, ROWS // 2)
    both, mine, other = gradients(first, second), gradients(first), gradients(second)
    assert_near(both, {name: mine[name] + other[name] for name in mine}, 1e-5)


class NoHeadWithoutTargets(CrossEntropy):
    """A common way to handle a batch without targets: the head then has no gradient."""

    def terms(self, model, outputs, batch, sizes):
        if bool((batch.targets_BS >= 0).any()):
            return super().terms(model, outputs, batch, sizes)
        return {"cross_entropy": Term(0 * outputs.hidden_BSD.sum())}


def learn_beside_a_rank_without_targets(layouts):
    """Return gradient norms of a step in which half of the ranks have no target."""
    found = []
    for words, rows in layouts:
        tokens_BS, targets_BS = make_rows(0)
        targets_BS[ROWS // 2 :] = IGNORE_INDEX
        for objective in (CrossEntropy(), NoHeadWithoutTargets()):
            engine = make_engine(*words, micro=rows)
            first = engine.world.data_rank * ROWS // engine.world.dims.data_ranks
            last = first + ROWS // engine.world.dims.data_ranks
            parts = zip(
                tokens_BS[first:last].split(rows), targets_BS[first:last].split(rows), strict=True
            )
            batches = [Batch(*part, None, None) for part in parts]
            engine.forward_backward(batches, objective)
            found.append(engine.step(1e-2).grad_norm.item())
    return found


def test_an_objective_may_leave_parameters_out_on_one_rank():
    # Tensor parallel ranks shard the head, which has its own bucket.
    layouts = [(["parallel.tp=2"], 4), (["parallel.tp=2", "parallel.reduce_at=last"], 2)]
    expected = learn_beside_a_rank_without_targets([([], ROWS)])[0]
    for norms in spawn(4, learn_beside_a_rank_without_targets, layouts):
        assert norms == pytest.approx([expected] * 4, rel=1e-5)


def test_a_step_without_a_finite_loss_changes_nothing():
    engine = make_engine()
    with pytest.raises(ValueError, match="no forward_backward"):
        engine.step(0.1)
    train(engine, range(1))
    before = weights_of(engine)

    class Endless(CrossEntropy):
        def terms(self, model, outputs, batch, sizes):
            terms = super().terms(model, outputs, batch, sizes)
            return {**terms, "endless": Term(torch.full((), torch.inf))}

    engine.forward_backward(make_batches(1), Endless())
    # A good step afterwards cannot save it.
    engine.forward_backward(make_batches(1), objective_of(engine))
    assert engine.step(0.1).skipped
    for name, weight in engine.weights():
        assert torch.equal(weight, before[name]), name
    assert len(train(engine, range(1, 2))) == 1


def test_a_call_that_fails_leaves_nothing_behind():
    class Failing(CrossEntropy):
        def terms(self, model, outputs, batch, sizes):
            if torch.equal(batch.tokens_BS, batches[1].tokens_BS):
                raise KeyError("the second micro-batch")
            return super().terms(model, outputs, batch, sizes)

    batches = make_batches(0, 2)
    first, second = make_engine(micro=2), make_engine(micro=2)
    first.forward_backward(batches, CrossEntropy())
    with pytest.raises(KeyError):
        first.forward_backward(batches, Failing())
    with pytest.raises(ValueError, match="no forward_backward"):
        first.step(0.1)
    assert all(isinstance(p, DTensor) for p in first.model.parameters())
    assert train(first, range(2), 2) == train(second, range(2), 2)
    with pytest.raises(ValueError, match="at least one micro-batch"):
        first.forward([], CrossEntropy())


def test_a_state_of_before_the_first_step_is_the_beginning():
    engine = make_engine()
    state = copy_of(engine.state())
    first = train(engine, range(2))
    engine.forward_backward(make_batches(2), CrossEntropy())
    engine.load_state(state)
    assert train(engine, range(2)) == first


def test_parameters_do_not_change_within_work():
    engine = make_engine()
    engine.forward_backward(make_batches(0), CrossEntropy())
    with engine.work():
        with pytest.raises(RuntimeError, match=r"within FSDP\.work"):
            engine.load_state(copy_of(engine.state()))
        with pytest.raises(RuntimeError, match=r"within FSDP\.work"):
            engine.step(0.1)
    assert not engine.step(0.1).skipped


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_follows_a_forward_in_inference_mode(dtype):
    first, second = make_engine(f"train.dtype={dtype}"), make_engine(f"train.dtype={dtype}")
    with torch.inference_mode():
        first.forward(make_batches(0), CrossEntropy())
    assert train(first, range(2)) == train(second, range(2))


def test_moments_leave_for_the_host_and_come_back():
    weights = []
    for leaves in (False, True):
        engine = make_engine()
        objective = objective_of(engine)
        addresses = [member.local.data_ptr() for member in engine.fsdp.members.values()]
        for step in range(4):
            if leaves:
                moments = [s[k] for s in engine.optimizer.state.values() for k in AdamW.MOMENTS]
                storages = [moment.untyped_storage() for moment in moments]
                engine.offload("moments", "workspaces")
                assert all(storage.nbytes() == 0 for storage in storages)
                assert bool(moments) == (step > 0)
                engine.forward(make_batches(step), objective)
                for call in (engine.state, partial(engine.load_state, {})):
                    with pytest.raises(OffloadedError, match="moments are offloaded"):
                        call()
                engine.reload()
                for moment, storage in zip(moments, storages, strict=True):
                    assert moment.untyped_storage().nbytes() == storage.nbytes() > 0
            before = dict(engine.weights())
            before = {name: weight.clone() for name, weight in before.items()}
            engine.forward_backward(make_batches(step), objective)
            engine.step(1e-2)
            changed = dict(engine.weights())
            assert all((changed[name] != weight).any() for name, weight in before.items())
        assert addresses == [member.local.data_ptr() for member in engine.fsdp.members.values()]
        weights.append({name: weight.clone() for name, weight in engine.weights()})
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


def weights_that_are_away():
    engine = make_engine("parallel.pp=2", micro=2)
    here = len(weights_of(engine))
    engine.offload("weights")
    with pytest.raises(OffloadedError, match="weights are offloaded"):
        weights_of(engine)
    engine.reload()
    return here == len(weights_of(engine))


def test_weights_that_are_away_are_so_on_every_stage():
    assert spawn(2, weights_that_are_away) == [True, True]


def test_released_memory_comes_back():
    first, second = make_engine("train.dtype=bfloat16"), make_engine("train.dtype=bfloat16")
    regions = [unit.region for unit in first.fsdp.units]
    first.forward(make_batches(0), CrossEntropy())
    assert sum(region.memory_in_use() for region in regions) > 0
    first.fsdp.release()
    assert sum(region.memory_in_use() for region in regions) == 0
    assert train(first, range(2)) == train(second, range(2))
    with first.work(), pytest.raises(RuntimeError, match=r"within FSDP\.work"):
        first.fsdp.release()


def train_on_ranks(runs):
    """Return losses, weights by our names and Hugging Face's, of every layout."""
    answers = {}
    for name, (words, micro) in runs.items():
        engine = make_engine(*words, micro=micro)
        numbers = train(engine, range(3), micro, lr=1e-3)
        # All ranks have the same rows, so each denominator grows by that factor.
        rows = Completions(*make_rows(0), torch.linspace(-1, 1, ROWS * SEQ_LEN).view(ROWS, -1))
        totals = engine.forward_backward([rows], PolicyGradient())
        numbers.append((totals.terms["policy"].item(), engine.fsdp.gradient_norm().item()))
        engine.fsdp.clear_gradients()
        answers[name] = numbers, weights_of(engine), weights_of(engine, hf=True)
    return answers


@pytest.mark.tier("long")
def test_ranks_give_one_processs_numbers_and_weights():
    (expected,) = train_on_ranks({"one": ([], 4)}).values()
    layouts = {
        "dp": (["parallel.dp_shard=2"], 2),
        "dp, not sharded": (["parallel.dp_replicate=2", "parallel.dp_shard=1"], 2),
        "ep": (["parallel.ep=2"], 2),
        "tp+ep": (["parallel.tp=2", "parallel.ep=2"], 4),
        "cp": (["parallel.cp=2", "parallel.cp_method=all_gather"], 4),
    }
    for answers in spawn(2, train_on_ranks, layouts, timeout=120):
        assert set(answers) == set(layouts)
        for numbers, *weights in answers.values():
            for mine, theirs in zip(numbers, expected[0], strict=True):
                assert mine == pytest.approx(theirs, rel=1e-5)
            for mine, theirs in zip(weights, expected[1:], strict=True):
                assert_near(mine, theirs, 1e-5)
