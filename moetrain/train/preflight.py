"""What a run needs, looked at before anything slow: each thing that is wrong is one line.

:func:`prepare` comes first, before a rank goes on or a data file is touched: the folder that the
run writes to, the settings that a checkpoint decides, the room on the disk.

Left out on purpose: what settings alone show (:mod:`moetrain.config`), and whether degrees, model
and batch fit the world (:func:`moetrain.parallel.world.plan_world`).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from moetrain.config import Config, ConfigError, c_compiler, launched_place
from moetrain.config.checks import CUDA, DEEPEP, DRY_RUN, EXPERTS
from moetrain.config.compute import AUTO
from moetrain.config.sources import shortened
from moetrain.kernels.attention import cudnn as cudnn_attention
from moetrain.kernels.backend import INTERPRETED
from moetrain.kernels.quant.rows import MULTIPLE
from moetrain.kernels.quant.scaled_mm import fp8_problem
from moetrain.models.architecture import Architecture
from moetrain.models.hf.files import export_in
from moetrain.models.planned import compute_dtype
from moetrain.models.presets import resolve_architecture
from moetrain.models.rules import ROUTER
from moetrain.parallel.expert.choose_ep import costs, describe
from moetrain.parallel.expert.deepep import why_not_here
from moetrain.parallel.pipeline.stages import SPLIT
from moetrain.parallel.processes import planned_machine
from moetrain.parallel.world import plan_world
from moetrain.train.memory import estimate_memory

logger = logging.getLogger("moetrain")

LONGEST_DEFAULT_ROW = 4096
"""Of a model that takes more: memory grows with the row, and most documents are shorter."""
CHECKPOINT_BYTES = 12
"""Of a parameter: the weight and AdamW's two moments, in fp32."""
EXPORT_BYTES = 4
LONGEST_BELOW = len("/checkpoints/.step-00000000.0000000000/model.safetensors")
"""What a run adds to the path of its folder, at most."""
FILES_OF_A_RUN = ("metrics.jsonl", "config.json", "loss.png", "sample.txt", "reward.png")
FOLDERS_OF_A_RUN = ("checkpoints", "tensorboard", "hf", "adapter", "completions", "profile")


def prepare(config: Config) -> tuple[Config, Architecture]:
    """The settings with what the checkpoint decides, and the model; before anything slow.

    Raises:
        ConfigError: the run cannot write to its folder, the model or the settings that depend on it
            are wrong, or there is no room for what will be written.
    """
    place = launched_place()
    writes = place is None or place.rank == 0
    folder = Path(config.output_dir)
    if writes:
        check_output_folder(folder)
        check_own_files_are_no_data(config)
        resume = config.checkpoint.resume
        if resume not in ("auto", "never") and not os.path.isdir(resume):
            raise ConfigError(
                "checkpoint.resume",
                f"{resume!r} is not a checkpoint: no such folder; name one, or auto, or never",
            )
    config, arch = resolve_run(config)
    if writes:
        check_room(folder, config, arch)
    return config, arch


def resolve_run(config: Config) -> tuple[Config, Architecture]:
    """``config`` with the values that its model decides where nobody else has, and the model.

    With ``model.path``, unset: ``data.tokenizer`` is the checkpoint's own, and ``data.seq_len``
    what the model takes, up to 4096.

    Raises:
        ConfigError: no such model, one without a tokenizer or without the experts that a setting
            is for, rows longer than it is made for.
    """
    arch = resolve_architecture(config.model)
    # A recipe may be made for another model; what a user sets is meant for this one.
    absent = None if arch.num_experts else f"{arch.family} has no experts"
    config = config.fitting({EXPERTS: absent})
    _check_widths(config, arch)
    if config.model.path is not None:
        config = config.filled(_of_model(config, config.model.path, arch), "model.path")
    if config.compile.enabled == "auto":
        splits = config.parallel.pp > 1 and config.parallel.pp_schedule in SPLIT
        is_on = runs_on_cuda(config) and not splits
        config = config.filled({"compile.enabled": is_on}, "auto, by the device and the schedule")
        config.check()
    if config.parallel.ep == AUTO:
        config = _with_expert_ranks(config, arch)
    # What a model with scaled rotary embeddings reaches; its config.json may say less.
    scaled = int(arch.rope.factor * (arch.rope.original_max_positions or 0))
    longest = max(arch.max_positions, scaled)
    if config.data.seq_len > longest:
        name = "preset" if config.model.path is None else "path"
        raise ConfigError(
            "data.seq_len",
            f"{config.data.seq_len} is more than the {longest} positions (max_position_embeddings) "
            f"of model.{name} {getattr(config.model, name)!r}; lower it",
        )
    return config, arch


def runs_on_cuda(config: Config) -> bool:
    """Whether ``train.device`` means a GPU, on this machine or on what is planned for."""
    device, is_planned = config.train.device, (config.launch.gpus or config.launch.gpu) is not None
    return device == "cuda" or (device == "auto" and (is_planned or torch.cuda.is_available()))


def _with_expert_ranks(config: Config, arch: Architecture) -> Config:
    """``parallel.ep`` auto: the fastest that the devices have room for."""
    machine, p = planned_machine(config), config.parallel
    size = machine.processes
    ranks = p.dp_shard * p.cp * p.tp if p.dp_shard > 0 else size // (p.dp_replicate * p.pp)
    here = config.filled({"train.device": machine.device.type}, "auto")
    # Experts are gathered, and tokens sent, within a machine: what is further was not measured.
    found = costs(here, arch, min(max(1, ranks), machine.on_machine))
    chosen, dtype = found[0], compute_dtype(config, machine.device)
    for cost in found:
        tried = here.filled({"parallel.ep": cost.ep}, "auto")
        dims = plan_world(tried, arch, size)
        if estimate_memory(tried, arch, dims, dtype).total <= machine.capacity:
            chosen = cost
            break
    if launched_place() is None:
        logger.info("%s", describe(chosen.ep, found))
    return config.filled({"parallel.ep": chosen.ep}, "auto, by measured rates")


def _check_widths(config: Config, arch: Architecture) -> None:
    if config.kernels.precision != "fp8":
        return
    for part in arch.parts():
        for name, weight in part.weights.items():
            is_product = len(weight.shape) > 1 and weight.rule != ROUTER
            if is_product and any(width % MULTIPLE for width in weight.shape[-2:]):
                problem = f"takes widths that are multiples of {MULTIPLE}, and {part.name}.{name}"
                raise ConfigError(
                    "kernels.precision",
                    f"'fp8' {problem} is {list(weight.shape[-2:])}; use bf16, or other sizes",
                )


def _of_model(config: Config, path: str, arch: Architecture) -> dict[str, Any]:
    """The settings that the checkpoint ``path`` decides, as nobody has set them."""
    values: dict[str, Any] = {}
    if not config.is_set("data.seq_len"):
        values["data.seq_len"] = min(arch.max_positions, LONGEST_DEFAULT_ROW)
    # The synthetic source needs none: it only shows samples in it, of which there are none.
    if not config.is_set("data.tokenizer") and config.data.source != "synthetic":
        folder = Path(path).expanduser()
        if folder.is_dir():
            folder = export_in(folder)
        if folder.is_dir() and not (folder / "tokenizer.json").is_file():
            raise ConfigError(
                "data.tokenizer",
                f"not set, and model.path {path!r} holds no tokenizer.json; name the tokenizer "
                "that the model was trained with",
            )
        values["data.tokenizer"] = str(folder) if folder.is_dir() else path  # else a hub id
    return values


def check_output_folder(folder: Path) -> None:
    """Whether a run can write to ``folder``; leaves nothing behind, and so makes nothing.

    Raises:
        ConfigError: it, or what a run keeps in it, is or lies under what is no folder, is too long,
            or cannot be written to.
    """

    def error(problem: str) -> ConfigError:
        return ConfigError("output_dir", f"{shortened(str(folder))} {problem}; choose another")

    try:
        there = Path(os.path.abspath(folder))
        while not os.path.lexists(there):
            there = there.parent
        if not there.exists():
            raise error(f"cannot be made: {shortened(str(there))} is a link to nothing")
        if not there.is_dir():
            raise error(f"cannot be made: {shortened(str(there))} is not a folder")
        missing = Path(os.path.abspath(folder)).relative_to(there).parts
        longest_name = os.pathconf(there, "PC_NAME_MAX")
        if any(len(os.fsencode(part)) > longest_name for part in missing):
            raise error(f"has a name of more than {longest_name} bytes")
        longest_path = os.pathconf(there, "PC_PATH_MAX")
        if len(os.fsencode(os.path.abspath(folder))) + LONGEST_BELOW >= longest_path:
            raise error(f"leaves too little of {longest_path} bytes for the names of its files")
        with tempfile.TemporaryFile(dir=there):
            pass
        for name in FILES_OF_A_RUN:
            if (folder / name).is_dir():
                raise error(f"cannot be used: its {name} is a folder")
        if not _is_of_a_run(folder / "config.json"):
            raise error("cannot be used: its config.json is no run's, and would be replaced")
        for name in FOLDERS_OF_A_RUN:
            if os.path.lexists(folder / name) and not (folder / name).is_dir():
                raise error(f"cannot be used: its {name} is not a folder")
    except OSError as failure:
        raise error(f"cannot be written to: {failure.strerror}") from None


def _is_of_a_run(file: Path) -> bool:
    """Whether a run may replace ``file``, its ``config.json``; not: it is a checkpoint's, say."""
    if not file.exists():
        return True
    try:
        settings = json.loads(file.read_bytes())
    except (ValueError, RecursionError):  # a run was killed while it wrote this
        return True
    return isinstance(settings, dict) and "output_dir" in settings


def check_own_files_are_no_data(config: Config) -> None:
    """Whether what is trained on, what is evaluated on and what the run writes lie apart.

    Raises:
        ConfigError: the next run would read this one's files as data, or no row is held out.
    """
    data = config.data
    given = {"path": data.path, "eval_path": data.eval_path}
    folders = {name: os.path.realpath(path) for name, path in given.items() if path is not None}
    if len(folders) == 2 and folders["path"] == folders["eval_path"]:
        raise ConfigError(
            "data.eval_path",
            f"{data.eval_path!r} is data.path itself: what is trained on tells nothing when it is "
            "evaluated; name other data, or leave it out, and data.eval_fraction is held out",
        )
    output = Path(os.path.realpath(config.output_dir))
    for name, folder in folders.items():
        if os.path.isdir(folder) and output.is_relative_to(folder):
            if any(part.startswith(".") for part in output.relative_to(folder).parts):
                continue  # where data is not looked for
            raise ConfigError(
                "output_dir",
                f"{shortened(config.output_dir)} lies in data.{name} {given[name]!r}: the next run "
                "would read what this one writes as data; choose one outside",
            )


def check_room(folder: Path, config: Config, arch: Architecture) -> None:
    """Whether the disk of ``folder`` holds what the run will write.

    Raises:
        ConfigError: it names the bytes there are, those that are needed, and for what.
    """
    checkpoint, steps = config.checkpoint, config.train.steps
    saves = int(checkpoint.at_end)
    if checkpoint.interval:
        saves += checkpoint.keep if steps is None else (steps - 1) // checkpoint.interval
    if checkpoint.minutes:  # how many there will be is not known
        saves += checkpoint.keep if steps is None else min(checkpoint.keep, steps - 1)
    milestones = 0
    if checkpoint.keep_every and steps is not None:
        milestones = steps // checkpoint.keep_every
    # The oldest goes when the newest is complete.
    copies = min(saves, checkpoint.keep + 1 + milestones)
    one = arch.num_params() * CHECKPOINT_BYTES
    export = arch.num_params() * EXPORT_BYTES * checkpoint.save_hf
    # New checkpoints take the place of these.
    going = 0 if checkpoint.resume == "never" else _bytes_of_checkpoints(folder / "checkpoints")
    while not folder.exists():
        folder = Path(os.path.abspath(folder)).parent
    total, _, free = shutil.disk_usage(folder)
    if not total or free + going >= copies * one + export:  # remote ones may not know their size
        return
    what = [f"{copies} checkpoint{'s' * (copies > 1)} of {_gib(one)}"] * (copies > 0)
    what += [f"checkpoint.save_hf's {_gib(export)}"] * (export > 0)
    raise ConfigError(
        "output_dir",
        f"{config.output_dir!r} has room for {_gib(free)}, and the run will write "
        f"{_gib(copies * one + export)}: {' and '.join(what)}; choose another, or "
        "write less (checkpoint.keep, checkpoint.interval, checkpoint.minutes, checkpoint.at_end)",
    )


def _bytes_of_checkpoints(root: Path) -> int:
    """Without the lock: another run may be removing some meanwhile; links count for themselves."""
    total = 0
    for path, _, names in os.walk(root):  # which passes over a folder that is gone
        for name in names if os.path.basename(path).startswith("step-") else ():
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(path, name)).st_size
    return total


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"


def check_what_can_run(config: Config, arch: Architecture, device: torch.device) -> None:
    """Reject what this device or this layout cannot run.

    Raises:
        ConfigError: it names the setting, the value and what to use instead.
    """
    if config.kernels.attention == "flex" and device.type == "cpu":
        raise ConfigError("kernels.attention", "'flex' has no backward on a CPU; use auto or sdpa")
    needs_cudnn = config.kernels.batch_invariant and device.type == "cuda"
    if config.kernels.attention == "cudnn" or needs_cudnn:
        try:
            cudnn_attention.require(device, compute_dtype(config, device), arch.head_dim)
        except ValueError as error:
            raise ConfigError("kernels.attention", str(error)) from None
    if config.kernels.backend == "triton" and device.type == "cpu" and not INTERPRETED:
        raise ConfigError("kernels.backend", "'triton' takes a CUDA device; use auto or reference")
    if config.kernels.precision == "fp8" and device.type == "cuda":
        problem = fp8_problem(device, compute_dtype(config, device))
        if problem is not None:
            raise ConfigError("kernels.precision", f"'fp8' {problem}; use bf16")
    _check_compilers(config, device)
    check_effects(config, device)
    facts: dict[str, str | None] = {DRY_RUN: "this is a run, which takes the machine as it is"}
    if config.parallel.ep > 1:  # said again, for the group, where it is put to use
        dtype, precision = compute_dtype(config, device), config.kernels.precision
        reason = why_not_here(arch, config.parallel.ep, device, dtype, precision)
        facts |= {DEEPEP: reason and f"DeepEP cannot run: {reason}"}
    config.fitting(facts)


def check_effects(config: Config, device: torch.device) -> None:
    """Reject what a user has set that has no effect on ``device``, which need not be here.

    Raises:
        ConfigError: it names the setting and the value.
    """
    config.fitting({CUDA: None if device.type == "cuda" else "this run is on a CPU"})


def _check_compilers(config: Config, device: torch.device) -> None:
    if device.type == "cuda":
        uses = "compile.enabled" if config.compile.is_on else "kernels.backend"
        triton = config.compile.is_on or config.kernels.backend != "reference"
        if triton and c_compiler() is None:
            raise ConfigError(
                uses, "Triton needs a C compiler on this machine; install gcc, or name one in CC"
            )
    elif config.compile.is_on:
        from torch._inductor.cpp_builder import get_cpp_compiler  # a second to import
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise ConfigError(
                "compile.enabled",
                "true, which on a CPU needs a C++ compiler, and there is none; install g++, name "
                "one in CXX, or leave it off",
            ) from None
