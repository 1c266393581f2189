"""A run that takes more memory than its device has: one line with figures and a remedy."""

import re

import pytest
import torch

from moetrain.cli.train import TRAIN, main

# Torch 2.11's own text; a run of Nemotron-3-Nano on four H200s gave it.
TEXT = (
    "CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 0 has a total capacity of 139.80 GiB "
    "of which 333.00 MiB is free. Including non-PyTorch memory, this process has {} GiB memory in "
    "use. "
    "Of the allocated memory 75.49 GiB is allocated by PyTorch, and 336.29 MiB is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
WORDS = ["--train.device", "cuda", "--launch.nproc", "1", "--launch.gpu", "h200"]
WORDS += [
    "--model.preset",
    "qwen3-30b-a3b",
    "--model.num_layers",
    "6",
    "--data.source",
    "synthetic",
]
WORDS += ["--data.seq_len", "4096", "--train.global_batch_size", "12"]


def failing(text):
    def run(config):
        raise torch.OutOfMemoryError(text)

    return TRAIN._replace(run=run)


def last_line(capsys, text, *words):
    assert main([*WORDS, *words], program=failing(text)) == 1
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize("policy", ["none", "auto"])
def test_the_line_has_figures_and_settings_that_take_a_tenth_less(policy, capsys):
    words = ["--train.micro_batch_size", "12", "--activation.policy", policy]
    line = last_line(capsys, TEXT.format("139.46"), *words)
    assert line.startswith("failed: out of the device's memory: 1024.00 MiB were asked for")
    assert "333.00 MiB of GPU 0's 139.80 GiB were free, and this process had 139.46 GiB" in line
    assert "other processes" not in line
    estimated = float(re.search(r"the estimate was ([\d.]+) GiB a device", line)[1])
    proposed = re.search(r"this should fit: (.*) \(([\d.]+) GiB\)", line)
    assert float(proposed[2]) <= 0.9 * estimated + 0.1
    assert set(proposed[1].split()[::2]) <= {
        "--train.micro_batch_size",
        "--activation.policy",
        "--optim.offload_fraction",
    }


def test_memory_of_other_processes_is_named(capsys):
    line = last_line(capsys, TEXT.format("70.00"), "--train.micro_batch_size", "1")
    assert "other processes had 69.5 GiB of it" in line


def test_a_text_without_figures_is_given_as_it_is(capsys):
    text = "cuMemCreate: CUDA error 2, out of memory"
    assert f": {text}; the estimate was" in last_line(capsys, text, "--train.micro_batch_size", "2")
