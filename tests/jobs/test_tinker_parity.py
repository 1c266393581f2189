"""Steps by the unmodified ``tinker`` SDK equal those of our own loop, up to rounding."""

import pytest
import torch
from safetensors.torch import load_file
from tinker_parity import ALIKE, CLIPS, Client, curve, furthest, words_of

from moetrain.config import Config, Recipes
from moetrain.rl.loop import RlTrainer
from moetrain.train.metrics import read_metrics
from tests.lib.rl_runs import even
from tests.lib.tinker_sdk import served, service

assert even
assert served
assert service
STEPS = 3


def config_of(service, folder, loss, **more):
    """Return our loop's settings for the model of ``service``."""
    model = Client.model_of(service)
    settings = {
        **{**ALIKE, **CLIPS[loss]},
        "model.path": model,
        "data.tokenizer": model,
        "data.seq_len": 64,
        "lora.rank": 8,
        "train.steps": STEPS,
        "train.seed": 5,
        "train.micro_batch_size": 2,
        "train.global_batch_size": 24,
        "train.eval_interval": 0,
        "train.device": "cpu",
        # Adam's steps are then the gradients themselves, so that small gradients count.
        "optim.lr": 10.0,
        "optim.eps": 1.0,
        "rl.chat": False,
        "rl.group_size": 4,
        "rl.max_tokens": 7,
        "rl.eval_tasks": 5,
        "log.tensorboard": False,
        "output_dir": str(folder),
    }
    return Config.load(None, words_of(settings | more), environ={}, recipes=Recipes.RL)


@pytest.fixture
def taken(monkeypatch):
    """Return the trajectories of each step of our loop."""
    found, next_groups = [], RlTrainer.next_groups

    def kept(trainer, number):
        found.append(next_groups(trainer, number))
        return found[-1]

    monkeypatch.setattr(RlTrainer, "next_groups", kept)
    return found


@pytest.mark.tier("long")
@pytest.mark.parametrize("loss", CLIPS)
def test_steps_are_those_of_our_own_loop(loss, served, even, taken, tmp_path):
    """Tokens, rewards, gradients and adapters agree in every step."""
    config = config_of(served, tmp_path, loss, **even)
    RlTrainer(config).fit()
    client = Client(served, config, loss, "same")
    rows = []
    for trajectories in taken:
        rows.append(client.learn())
        tokens = [[*one.prompt, *one.tokens] for one in client.attempts]
        assert tokens == [t.tokens for t in trajectories]
        known = torch.tensor([lp for one in client.attempts for lp in one.logprobs])
        ours = [lp for t in trajectories for lp in t.logprobs[-t.num_written :]]
        assert torch.allclose(known, torch.tensor(ours), atol=1e-5)
    assert client.step == STEPS
    own = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "reward" in row]
    for name in ("reward", "length", "grad_norm"):
        assert curve(rows, name) == pytest.approx(curve(own, name), rel=1e-5)
    ours = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    found, fresh = client.adapter(), Client(served, config, loss, "same").adapter()
    for part in ("lora_A", "lora_B"):
        before, mine, theirs = (
            {name: x for name, x in one.items() if part in name} for one in (fresh, ours, found)
        )
        assert furthest(mine, before) > 0.1
        assert furthest(mine, theirs) < 1e-5


@pytest.mark.tier("long")
def test_groups_are_asked_for_at_once(served, even, tmp_path):
    """A group's answers come from one request, as in the recipes."""
    config = config_of(served, tmp_path, "ppo", **even)
    client = Client(served, config, "ppo", "groups")
    rows = list(client.fit(2))
    assert [("reward" in row, row["step"]) for row in rows] == [
        *((False, 0), (True, 1), (True, 2), (False, 2), (True, 3), (False, 3)),
    ]
    groups = {one.group for one in client.attempts}
    assert groups == set(range(12, 18))
    assert len({tuple(one.tokens) for one in client.attempts}) > 12
    assert client.sampled >= client.trained > 0
