"""Every transport of FSDP gives the bits of collectives, whatever comes in between.

A transport is tested here as soon as ``TRANSPORTS`` has its row.
"""

from typing import get_args

import pytest

from moetrain.config import ParallelSection
from moetrain.parallel.fsdp.transport.registry import TRANSPORTS
from tests.lib.fsdp_transports import GPU, RUNS, check


def test_every_transport_can_be_asked_for():
    taken = get_args(ParallelSection.model_fields["fsdp_transport"].annotation)
    assert sorted(taken) == sorted(["auto", "nccl", *TRANSPORTS])


@pytest.mark.tier("wide", long=[f"2-{name}" for name in TRANSPORTS])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", RUNS)
def test_every_transport_gives_the_bits_of_collectives(world, transport):
    check(transport, world, timeout=300)


@pytest.mark.gpu("world")
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", RUNS)
def test_every_transport_on_gpus(world, transport):
    check(transport, world, GPU, device_type="cuda", timeout=500)
