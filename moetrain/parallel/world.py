"""Join the processes of a run: find this rank's device, make its process group and its meshes.

One process is a world of one, with meshes like any other.
"""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import lcm
from operator import attrgetter
from typing import TypeVar

import torch
import torch.distributed as dist

from moetrain.config import Config, ConfigError
from moetrain.config.environment import (
    GPUS_OF_MACHINE,
    allocator_is_set,
    launched_place,
    software,
)
from moetrain.config.sources import RankLost, leaves, shortened
from moetrain.kernels.experts.deepep import disconnect
from moetrain.models.architecture import Architecture
from moetrain.parallel import processes
from moetrain.parallel.collectives import (
    HashStore,
    Store,
    all_gather_object,
    all_reduce,
    barrier,
    default_store,
)
from moetrain.parallel.mesh import Meshes, ParallelDims, build_meshes
from moetrain.parallel.pipeline.stages import StagePlan
from moetrain.parallel.waits import waiting
from moetrain.runtime.ahead import compiler_started

_T = TypeVar("_T")

_BYTES_OF_TOKEN = 24
"""Bytes that a token of a batch takes on the host: its id, target and position."""
_OF_MACHINES = (
    *("launch.", "output_dir", "checkpoint.memory", "data.cache_dir"),
    *("log.tensorboard", "log.reporters", "log.project", "log.progress"),
    # These paths may differ, because a run compares the files' contents (moetrain.train.run).
    *("data.path", "data.eval_path", "data.tokenizer"),
)
"""Beginnings of the names of settings that may differ from machine to machine."""


@dataclass(frozen=True)
class World:
    """This process, its device and its place among all processes of the run."""

    rank: int
    """This process's number among those that train."""
    local_rank: int
    """The index of this process's GPU on its machine."""
    size: int
    """The number of processes that train."""
    device: torch.device
    """The device that this process computes on."""
    dims: ParallelDims
    """The degrees of parallelism."""
    meshes: Meshes
    """The meshes and process groups."""
    owns_group: bool
    """True: :meth:`leave` ends the default process group, which was made for this run."""
    rendezvous: processes.Rendezvous
    """Lets ranks wait for one another on the host."""
    store: Store | None = None
    """The store through which the processes of the run connect. It is also where generator ranks
    (``rl.generators``) meet the ranks that train. None: this run did not connect to one, because it
    is a single process, or because its process group existed already."""
    endings: list[Callable[[], object]] = field(
        default_factory=list[Callable[[], object]], compare=False
    )
    """Calls that :meth:`leave` makes first."""

    @property
    def data_rank(self) -> int:
        """The index of this rank's part of a global batch, below ``dims.data_ranks``."""
        return self.meshes.data.rank()

    @property
    def is_main(self) -> bool:
        """True: this rank prints, logs and writes for all."""
        return self.rank == 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``x``, such as a loss, over the ranks of this stage. Collective."""
        return _sum(x, self.meshes.tokens)

    def sum_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``x``, which counts whole batch rows, over ranks with different rows.

        Collective.
        """
        return _sum(x, self.meshes.data)

    def sum_all(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``x`` over every rank of the run. Collective."""
        return _sum(x, self.meshes.everyone)

    def gather(self, mine: _T) -> list[_T]:
        """Return every rank's object, by rank. Collective; the host waits."""
        if self.size == 1:
            return [mine]
        found = [mine] * self.size
        all_gather_object(found, mine)
        return found

    def barrier(self) -> None:
        """Wait until every rank has come here. Raises RunFailed if a rank is gone."""
        self.rendezvous.barrier()

    def broadcast(self, text: str) -> str:
        """Return the main rank's ``text`` on every rank. It waits as :meth:`barrier` does."""
        return self.rendezvous.broadcast(text)

    def any(self, text: str) -> str:
        """Return on all ranks the first ``text``, in rank order, that is not empty; "" if all are.

        It waits as :meth:`barrier` does.
        """
        return self.broadcast(next(filter(None, self.rendezvous.gather(text)), ""))

    def own_rendezvous(self) -> processes.Rendezvous:
        """Make another :attr:`rendezvous`, for a thread of its own. Collective."""
        return processes.Rendezvous(default_store(), self.rank, self.size)

    def leave(self) -> None:
        """End the process group after work that succeeded. Collective.

        Do not call it after an error: it would wait for ranks that will not come, or close their
        connections before this rank's error was reported.
        """
        for end in self.endings:
            end()
        self.barrier()  # the main rank may still be writing
        self.rendezvous.end()
        if self.owns_group and dist.is_initialized():  # a run of one process may go on after it
            disconnect()
            barrier()  # gloo's connections end at once, even if others still read from them
            dist.destroy_process_group()


def _sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = x.clone()
    if group.size() > 1:
        with waiting(x.device):
            all_reduce(x, group=group)
    return x


def join_world(config: Config, arch: Architecture) -> World:
    """Join the run: check the layout, then make and warm up the communicators.

    Collective over the world. A default process group that exists already is used as it is. The
    ranks of ``rl.generators``, which are the last, belong neither to the world nor to its groups.

    Raises:
        ConfigError: the layout does not fit, there is no GPU for this rank, a launcher's variables
            are wrong, or ranks have other settings, models or software than rank 0.
        RunFailed: other ranks did not come within ``launch.join_timeout``.
    """
    place = launched_place()
    # A process group of one rank does not tell this process's rank: an earlier run of this process
    # may have left it.
    if dist.is_initialized() and dist.get_world_size() > 1:
        rank, size = dist.get_rank(), dist.get_world_size()
        gpu = torch.cuda.current_device() if torch.cuda.is_available() else rank
    elif place is not None:
        rank, size, gpu = place.rank, place.world_size, place.local_rank
        nproc = config.launch.nproc
        if place.on_machine is not None and nproc not in ("auto", 1, place.on_machine):
            raise ConfigError(
                "launch.nproc",
                f"{nproc}, but a launcher has started {place.on_machine} processes on this "
                "machine; leave one of the two out",
            )
        if config.launch.max_restarts not in (0, place.max_restarts):
            raise ConfigError(
                "launch.max_restarts",
                f"{config.launch.max_restarts}, but the launcher that has started this process "
                f"restarts it at most {place.max_restarts} times; set it there (torchrun "
                "--max-restarts), or leave it out here",
            )
    else:
        rank, size, gpu = 0, processes.num_processes(config), 0
        if size > 1:
            raise ConfigError(
                "launch.nproc",
                f"{config.launch.nproc} means {size} processes, but this program is one; start it "
                "by python -m moetrain.train or torchrun, or leave launch.nproc out",
            )
    dims = plan_world(config, arch, size)
    owns_group, size, apart = not dist.is_initialized(), dims.world_size, config.rl.apart
    store = rendezvous = None
    if apart and not (place and owns_group and rank < size):
        problem = "'apart' needs processes that a launcher started, and a run that generates"
        raise ConfigError("rl.placement", f"{problem}; use together")
    device = claim_device(config, gpu)
    if config.compile.cuda_graphs:  # NCCL would try to register segments that grow, and fail
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    if owns_group and size == 1:  # nothing travels in a mesh of one, so it needs no GPU
        store = processes.find_ranks(place, config.launch.join_timeout) if place and apart else None
        dist.init_process_group("gloo", store=store or HashStore(), rank=0, world_size=1)
    elif owns_group:
        assert place is not None  # else the size is one
        with compiler_started(device) if config.compile.enabled is True else nullcontext():
            store = processes.find_ranks(place, config.launch.join_timeout)
            rendezvous = processes.Rendezvous(store, rank, size)
            _check_alike(config, arch, dims, rendezvous)
            try:
                dist.init_process_group(
                    "nccl" if device.type == "cuda" else "gloo",
                    store=store,
                    rank=rank,
                    world_size=size,
                    timeout=processes.TIMEOUT,
                    # Binding the device connects the communicator now, and lets others be split
                    # off it.
                    device_id=device if device.type == "cuda" else None,
                )
            except dist.DistNetworkError as error:
                raise RankLost(processes.lost(error)) from None
    if rendezvous is None:
        rendezvous = processes.Rendezvous(default_store(), rank, size)
        _check_alike(config, arch, dims, rendezvous)
    meshes = build_meshes(dims, device.type)
    if size > 1:
        meshes.warm_up(device)
    return World(
        rank=rank,
        local_rank=gpu,
        size=size,
        device=device,
        dims=dims,
        meshes=meshes,
        owns_group=owns_group,
        rendezvous=rendezvous,
        store=store,
    )


def _check_alike(
    config: Config, arch: Architecture, dims: ParallelDims, rendezvous: processes.Rendezvous
) -> None:
    """Raise ConfigError on every rank if one has other settings, another model or other software
    than rank 0.

    Otherwise ranks would hang in different collectives, or would train on, each by its own
    settings, and nobody would notice.
    """
    if rendezvous.size == 1:
        return
    settings = dict(leaves(config.to_dict()))
    mine = {
        "software": software(),
        "launch.gpus_per_machine": dims.per_machine,
        "settings": {k: v for k, v in settings.items() if not k.startswith(_OF_MACHINES)},
        "model": arch.model_dump(mode="json"),
    }
    texts = rendezvous.gather(json.dumps(mine, sort_keys=True))
    found = rendezvous.broadcast(json.dumps(_difference(texts)))
    if (difference := json.loads(found)) is not None:
        rendezvous.gather("")  # rank 0 serves the store, and ends once the others have read it
        raise ConfigError(*difference)


def _difference(texts: Sequence[str]) -> tuple[str, str] | None:
    """Compare the ``texts`` that :func:`_check_alike` gathered, one for each rank.

    Return a setting in which a rank differs from rank 0, and the problem; None: all are equal.
    """
    rank = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
    if rank is None:
        return None
    first, other = json.loads(texts[0]), json.loads(texts[rank])
    for name, version in first["software"].items():
        if (theirs := other["software"].get(name)) != version:
            problem = f"{name} is {version} on rank 0, but {theirs} on rank {rank}"
            return "software", f"{problem}; install the same on all machines"
    name = "launch.gpus_per_machine"
    if other[name] != first[name]:
        problem = f"auto is {first[name]} on rank 0, but {other[name]} on rank {rank}"
        return name, f"{problem}; start as many processes on each machine, or give a number"
    here, there = first["settings"], other["settings"]
    names = [name for name in here if here[name] != there.get(name)]
    if names:
        name, *more = names
        problem = f"{shortened(here[name])} on rank 0, but {shortened(there.get(name))} on rank"
        also = f" (also {', '.join(more[:4])}{', ...' * (len(more) > 4)})" if more else ""
        return name, f"{problem} {rank}; give all ranks the same settings{also}"
    here, there = first["model"], other["model"]
    name = next(name for name in here if here[name] != there.get(name))
    problem = f"{name} is {shortened(here[name])} on rank 0, but {shortened(there.get(name))} on"
    return "model.path", f"{problem} rank {rank}; give all machines the same files"


def plan_world(config: Config, arch: Architecture, size: int) -> ParallelDims:
    """Return the degrees of parallelism of the ranks that train, in a run of ``size`` processes.

    This only computes numbers and needs no process group. Raises ConfigError: the degrees do not
    fit.
    """
    if (apart := config.rl.apart) >= size:
        problem = f"{apart} of {size} processes leave none to train"
        raise ConfigError("rl.generators", f"{problem}; lower it, or start more (launch.nproc)")
    per_machine = _ranks_per_machine(config, size)
    dims = ParallelDims.resolve(config.parallel, size - apart, arch, per_machine)
    check_layout(config, arch, dims)
    return dims


def check_layout(config: Config, arch: Architecture, dims: ParallelDims) -> None:
    """Raise ConfigError where ``dims`` do not suit the settings, the model or host memory."""
    dims.check_model(arch)
    _check_machines(config, dims)
    t, seq_len = config.train, config.data.seq_len
    t.micro_batches(dims.data_ranks)
    rows = t.global_batch_size // dims.data_ranks
    need = rows * seq_len * _BYTES_OF_TOKEN / 2**30
    room = processes.device_capacity(torch.device("cpu")) / 2**30
    if need > room:
        raise ConfigError(
            "train.global_batch_size",
            f"{t.global_batch_size}: a step's {rows} rows of {seq_len} tokens take {need:,.0f} GiB "
            f"of host memory in each process, and this machine has {room:,.0f}; lower it to at "
            f"most {int(room / need * t.global_batch_size)}",
        )
    if config.lora.offload_experts and dims.efsdp > 1:
        problem = f"yes, but {dims.efsdp} ranks shard the same experts"
        remedy = f"use parallel.ep {dims.sharding_ranks}, or unset it"
        raise ConfigError("lora.offload_experts", f"{problem}; {remedy}")
    if dims.pp > 1:
        StagePlan(config, arch).check(dims)
    pieces = 2 * dims.cp if dims.cp_method == "all_gather" else dims.cp
    if (tokens := t.micro_batch_size * seq_len) % lcm(dims.token_ranks, pieces):
        raise ConfigError(
            "parallel.tp" if dims.cp == 1 else "parallel.cp",
            f"cp {dims.cp} x tp {dims.tp} does not divide the {tokens} tokens of a micro-batch "
            f"(train.micro_batch_size {t.micro_batch_size} x data.seq_len {seq_len}), which these "
            "ranks share"
            + ", each in two pieces of equal size" * (pieces > dims.cp)
            + f"; make data.seq_len a multiple of {lcm(dims.token_ranks, pieces)}",
        )


def _ranks_per_machine(config: Config, size: int) -> int:
    """Return how many of ``size`` ranks a machine has, as ``launch.gpus_per_machine`` says."""
    launch, place = config.launch, launched_place()
    if launch.gpus_per_machine != "auto":
        return launch.gpus_per_machine
    here = torch.cuda.device_count() if launch.nproc == "auto" else launch.nproc
    found = size * (size <= here) if place is None else place.on_machine
    return found if found and launch.gpus is None else GPUS_OF_MACHINE


def _check_machines(config: Config, dims: ParallelDims) -> None:
    """Raise ConfigError for a group of ranks that spans machines but cannot or should not."""
    size, ep = dims.per_machine, dims.ep
    shards = dims.sharding_ranks * (config.parallel.fsdp_transport == "copy")
    for name, ranks, remedy in (
        ("parallel.tp", dims.tp, f"a divisor of {size}"),
        ("parallel.ep", ep * (ep % size > 0), f"a divisor or a multiple of {size}"),
        ("parallel.fsdp_transport", shards, "auto, or parallel.dp_replicate -1"),
        ("moe.redundant_experts", ep * (config.moe.redundant_experts > 0), "0"),
        ("moe.dispatch_mode", ep * (config.moe.dispatch_mode == "static"), "exact"),
    ):
        if (machines := dims.machines(ranks or 1)) > 1:
            where = f"of {ranks} ranks on {machines} machines of {size}"
            problem = f"{attrgetter(name)(config)!r} {where} (launch.gpus_per_machine)"
            raise ConfigError(name, f"{problem} would leave a machine; use {remedy}")


def claim_device(config: Config, gpu: int) -> torch.device:
    """Return this process's device, and make it the current one. Raises ConfigError: there is
    none."""
    wanted, gpus = config.train.device, torch.cuda.device_count()
    if wanted == "cuda" and gpus == 0:
        raise ConfigError("train.device", "'cuda', but torch sees no CUDA device; use auto or cpu")
    if wanted == "cpu" or gpus == 0:
        return torch.device("cpu")
    if gpu >= gpus:
        problem = f"local rank {gpu} needs a GPU of its own and torch sees {gpus}"
        remedy = f"start {gpus} processes on this machine (launch.nproc auto), or use cpu"
        raise ConfigError("train.device", f"{wanted!r}, but {problem}; {remedy}")
    torch.cuda.set_device(gpu)
    if not allocator_is_set():
        # Routing changes the size of activations every step. Segments that grow in place fit every
        # size: torch reserved 121.0 GiB for 120.6 in use. Segments of fixed size were not measured.
        # Torch has no public function for this setting.
        torch._C._accelerator_setAllocatorSettings(  # pyright: ignore[reportPrivateUsage]
            "expandable_segments:True"
        )
    return torch.device("cuda", gpu)
