"""``parallel.ep`` auto: the arithmetic against what was measured, and what it may not choose."""

import json
import logging

import pytest

from moetrain.cli.train import main
from moetrain.config import Config, ConfigError
from moetrain.models.hf.load import resolve_architecture
from moetrain.parallel.expert.choose_ep import costs
from moetrain.parallel.mesh import ParallelDims
from moetrain.train.setup import resolve_run

COMMON = ["data.source=synthetic", "data.seq_len=4096", "parallel.reshard_after_forward=yes"]


def order(ranks, *words, rows=5):
    sizes = [f"train.micro_batch_size={rows}", f"train.global_batch_size={rows * ranks}"]
    words = ["train.device=cuda", "parallel.ep=auto", *COMMON, *sizes, *words]
    config = Config.load("qwen3-30b-a3b-24l", words)
    return [cost.ep for cost in costs(config, resolve_architecture(config.model), ranks)]


def test_the_order_is_the_measured_one():
    assert order(4) == [1, 2, 4]  # 642, 652 and 670 ms a step
    assert order(4, "parallel.fsdp_transport=nccl")[0] == 2  # 29,190; 27,993 with 1, 27,698 with 4
    assert order(2) == [2, 1]  # 52,767 and 52,143 tokens/s


def test_few_tokens_travel_and_frozen_experts_are_gathered():
    assert order(4, "data.seq_len=512", rows=1) == [4, 2, 1]
    assert order(8, "lora.rank=16")[0] == 1


def test_gradients_in_bf16_move_less_memory():
    words = ["train.device=cuda", "parallel.ep=4", "launch.nproc=4"]
    arch = resolve_architecture(Config.load("qwen3-30b-a3b-24l", words).model)
    wide, narrow = (
        costs(Config.load("qwen3-30b-a3b-24l", [*words, *more]), arch, 4)
        for more in ([], ["optim.gradient_dtype=bfloat16"])
    )
    for mine, theirs in zip(sorted(narrow), sorted(wide), strict=True):
        assert mine.memory < theirs.memory
        assert mine._replace(memory=theirs.memory) == theirs


def test_what_cannot_be_is_not_chosen():
    assert order(3) == [1]
    assert order(6) in ([1, 2], [2, 1])
    assert 1 not in order(4, "moe.dispatcher=alltoall")
    assert order(4, "moe.dispatcher=local") == [1]
    with pytest.raises(ConfigError, match=r"parallel.ep: 'auto', and none .* 'deepep'; set"):
        order(3, "moe.dispatcher=deepep")
    assert order(4, "train.device=cpu") == [1]


@pytest.mark.parametrize("word", ["auto", "AUTO", "-1"])
def test_a_run_has_the_number_and_shows_the_arithmetic(word, capsys, caplog):
    caplog.set_level(logging.INFO, "moetrain")
    words = ["qwen3-30b-a3b-24l", "--launch.gpus", "4", "--parallel.ep", word, "--dry_run"]
    words += ["--train.micro_batch_size", "5", "--train.global_batch_size", "20"]
    words += ["--launch.gpu", "h200"]
    for extra in (["--moe.dispatcher", "alltoall"], []):
        assert main([*words, *extra, *(f"--{x}" for x in COMMON)]) == 0
        said = caplog.messages[-1]
        chosen = json.loads(capsys.readouterr().out)["parallel"]["ep"]
        assert said.startswith(f"parallel.ep auto: {chosen}; estimated ms of a block")
        assert f"ep {chosen} " in said
        assert (chosen == 1) == (not extra)


def test_nothing_is_built_before_it_is_found():
    config = Config.load("debug", ["parallel.ep=auto"])
    assert resolve_run(config)[0].parallel.ep == 1
    with pytest.raises(ValueError, match="resolve_run"):
        ParallelDims.resolve(config.parallel, 1, resolve_run(config)[1])


@pytest.mark.parametrize("bad", ["0", "-2", "most"])
def test_other_words_are_errors(bad):
    with pytest.raises(ConfigError, match=r"parallel\.ep"):
        Config.load("debug", [f"parallel.ep={bad}"])
