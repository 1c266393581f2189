"""Faults that a rehearsal of GPU tests finds, and faults that it ignores."""

import pytest
import torch

from moetrain import Trainer
from moetrain.config import Config, ConfigError
from tests.lib.distributed import spawn
from tests.lib.engines import make_engine
from tests.lib.rehearsal import rehearse

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="GPU tests run here")
VARIANTS = {"plain": [], "wide": ["model.hidden_size=32"], "odd": ["parallel.tp=3"]}
ON_GPU = ["train.device=cuda", "train.steps=2", "data.source=synthetic"]


def step_on_ranks(runs):
    """Make one step of the engine of each run."""
    engines = {n: make_engine("train.device=cuda", *words, micro=2) for n, words in runs.items()}
    return {name: engine.step(1e-3) for name, engine in engines.items()}


def test_rehearse_counts_the_runs_of_a_body():
    def body():
        words = [*ON_GPU, "kernels.precision=fp8", "model.hidden_size=128"]
        words += ["model.head_dim=32", "model.moe_intermediate_size=128"]
        trainer = Trainer(Config.load("debug", words))
        assert torch.tensor([trainer.train_step().loss.item() for _ in range(2)]).sum() > 0
        spawn(2, step_on_ranks, {"plain": [], "dp": ["parallel.dp_shard=2"]}, device_type="cuda")

    assert rehearse(body) == 3
    assert not torch.cuda.is_available()


def test_rehearse_raises_for_a_variant_without_a_name():
    with pytest.raises(KeyError, match="compile"):
        rehearse(lambda: make_engine("train.device=cuda", *VARIANTS["compile"]))

    def after_a_run():
        make_engine("train.device=cuda").step(1e-3)
        make_engine("train.device=cuda", *VARIANTS["compile"])

    with pytest.raises(KeyError, match="compile"):
        rehearse(after_a_run)


def test_rehearse_raises_for_a_setting_that_a_gpu_would_refuse():
    with pytest.raises(ConfigError, match="multiple of 128, and these have 8"):
        rehearse(lambda: make_engine("train.device=cuda", "kernels.precision=fp8_blocks"))


def test_rehearse_raises_for_a_layout_of_one_of_several_runs_that_ranks_would_refuse():
    """Neither the other runs nor code that uses their results hides the refusal."""
    runs = {name: VARIANTS[name] for name in ("plain", "odd", "wide")}
    with pytest.raises(ConfigError, match=r"parallel\.tp: .*tp 3 .*world of 2"):
        rehearse(lambda: spawn(2, step_on_ranks, runs, device_type="cuda")[0]["plain"].numpy())


def test_rehearse_raises_for_a_command_line_that_would_be_refused():
    import subprocess
    import sys

    command = [sys.executable, "-m", "moetrain.train", *ON_GPU, "parallel.ep=3", "launch.nproc=2"]
    with pytest.raises(ConfigError, match=r"parallel\.ep: 3"):
        rehearse(lambda: subprocess.run(command, check=True))


def test_rehearse_lets_pass_what_comes_of_having_no_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert rehearse(lambda: torch.empty(3, device="cuda")) == 0
    assert (
        rehearse(lambda: make_engine("train.device=cuda").state()["model"].data_ptr().sort()) == 1
    )


def test_rehearse_leaves_the_constructors_that_torch_keeps():
    """Torch keeps them at the first use of a device as a context, which may be a rehearsed one."""
    torch.utils._device._device_constructors.cache_clear()

    def body():
        with torch.device("meta"):
            torch.zeros(1)

    rehearse(body)
    with torch.device("meta"):
        assert torch.tensor(0).is_meta
