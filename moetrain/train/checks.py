"""Checks of a run's settings: against each other, the model, the layout and the device.

    check_model(config, arch)                 without processes or devices, as for a dry run
    check_run(config, arch, dims, device)     all of it, on a rank of a run

The commands check when they start, before anything slow. :class:`moetrain.train.engine.Engine`
checks again when it is built, so that a program which builds its own engine gets the same errors as
a command.

Left out on purpose: memory, which :mod:`moetrain.train.session` estimates, and questions that only
a trial answers, such as whether DeepEP runs here.
"""

import torch

from moetrain.config import Config, ConfigError, Fact
from moetrain.config.environment import c_compiler
from moetrain.kernels.attention import cudnn as cudnn_attention
from moetrain.kernels.experts.products import width_multiple
from moetrain.kernels.quant.e4m3 import MULTIPLE
from moetrain.models.architecture import Architecture
from moetrain.models.hf.load import stretched_by
from moetrain.models.transformer import compute_dtype
from moetrain.optim.qk_clip import QKClip
from moetrain.parallel.mesh import ParallelDims
from moetrain.parallel.world import check_layout
from moetrain.runtime.backend import INTERPRETED


def check_run(
    config: Config, arch: Architecture, dims: ParallelDims, device: torch.device
) -> Config:
    """Check ``config`` for a run; return it without a recipe's settings that have no effect.

    Args:
        config: settings that are resolved, as by :func:`moetrain.train.session.resolve_run`.
        arch: the model that is trained.
        dims: the degrees of parallelism.
        device: the device of this rank.

    Raises ConfigError: a setting that a user gave has no effect, settings contradict each other,
    or this model, layout or device cannot run them.
    """
    config = check_model(config, arch)
    config.check()
    check_layout(config, arch, dims)
    return check_device(config, arch, device)


def check_model(config: Config, arch: Architecture) -> Config:
    """Check ``config`` for ``arch``; return it without a recipe's settings that have no effect.

    Raises ConfigError: a setting that a user gave has no effect or contradicts another one, or
    ``arch`` cannot be trained with the settings.
    """
    # A recipe may be made for another model, so its settings may be dropped. A user's settings are
    # meant for this one, so they are refused if they have no effect.
    facts: dict[str, str | None] = {
        Fact.EXPERTS: None if arch.num_experts else f"{arch.family} has no experts",
        Fact.LATENTS: None if arch.has_latents else f"{arch.family} has no latent attention",
    }
    config = config.fitted().fitted(facts)
    if arch.mtp_layers > 1 and config.parallel.tp > 1:
        problem = (
            f"{config.parallel.tp} is not supported with {arch.mtp_layers} multi-token prediction"
        )
        raise ConfigError("parallel.tp", f"{problem} blocks; use 1, or unset train.mtp_weight")
    _check_selections(config, arch)
    check_widths(config, arch)
    if config.optim.muon_qk_clip:
        QKClip(arch, config.optim.muon_qk_clip)  # raises for models that it does not suit
    spare = config.moe.redundant_experts
    if spare and any(n.startswith("experts.b_") for part in arch.parts() for n in part.weights):
        problem = f"{spare}, but this model's experts have biases, which are not copied; set 0"
        raise ConfigError("moe.redundant_experts", problem)
    if config.kernels.attention == "sdpa" and any(part.needs_lse for part in arch.attentions()):
        problem = "'sdpa' has no log-sum-exp, which attention with sinks needs; use auto"
        raise ConfigError("kernels.attention", problem)
    longest = config.model.max_positions or arch.reach
    if config.data.seq_len > longest:
        name = "preset" if config.model.path is None else "path"
        kind = stretched_by(arch)
        remedy = f", or raise model.max_positions with model.rope {kind}" if kind else ""
        if not arch.has_rotary:
            remedy = ", or raise model.max_positions"
        raise ConfigError(
            "data.seq_len",
            f"{config.data.seq_len} is more than the {longest} positions (max_position_embeddings) "
            f"of model.{name} {getattr(config.model, name)!r}; lower it{remedy}",
        )
    return config


def _check_selections(config: Config, arch: Architecture) -> None:
    """Raise ConfigError for settings that do not suit how the layers select keys, if they do."""
    found = [part.most_keys for part in arch.attentions()]
    most = min((number for number in found if number is not None), default=None)
    if (mode := config.train.indexer) != "frozen" and not any(
        part.has_indexer_loss for part in arch.attentions()
    ):
        lacks = "no indexers, which" if most is None else "no loss for its indexers, which"
        problem = f"{mode!r}, but {arch.family} has {lacks} select attention's keys"
        raise ConfigError("train.indexer", f"{problem}; use frozen")
    form = config.kernels.sparse_attention
    has_form = any(part.has_sparse_form for part in arch.attentions())
    if most is not None and form == "sparse" and not has_form:
        problem = (
            f"{form!r}, but there is no kernel for the keys that layers of {arch.family} select"
        )
        raise ConfigError("kernels.sparse_attention", f"{problem}; use auto")
    backend, length = config.kernels.attention, config.data.seq_len
    if most is not None and length > most and backend not in ("auto", "sdpa", "reference"):
        problem = f"{backend!r} takes no mask, by which layers of {arch.family} select {most} keys"
        raise ConfigError("kernels.attention", f"{problem} of data.seq_len {length}; use auto")


def check_widths(config: Config, arch: Architecture) -> None:
    """Raise ConfigError where a part or a matrix's widths do not suit ``kernels.precision``."""
    precision = config.kernels.precision
    if precision == "bf16":
        return
    for part in arch.parts():
        with torch.device("meta"):
            part.build(config.kernels, config.moe)
        for name, weight in part.weights.items():
            is_product = len(weight.shape) > 1 and weight.rule.is_matrix
            if is_product and any(width % MULTIPLE for width in weight.shape[-2:]):
                problem = f"takes widths that are multiples of {MULTIPLE}, and {part.name}.{name}"
                problem = f"{precision!r} {problem} is {list(weight.shape[-2:])}"
                raise ConfigError("kernels.precision", f"{problem}; use bf16, or other sizes")


def check_rows(config: Config, arch: Architecture, device: torch.device) -> None:
    """Raise ConfigError if kernels on ``device`` cannot read the rows of a matrix of ``arch``."""
    if device.type == "cpu" and config.kernels.backend != "triton":
        return
    dtype = compute_dtype(config, device)
    multiple = width_multiple(dtype)
    is_fast = config.kernels.backend != "reference"
    if (odd := arch.odd_width(multiple, is_fast=is_fast)) is not None:
        (name, width), dtype_name = odd, str(dtype).removeprefix("torch.")
        problem = f"is not a multiple of {multiple}, as a GPU's kernels need in {dtype_name}"
        field, remedy = f"model.{name}", "set train.device cpu"
        if config.model.path is not None:
            field, problem = "model.path", f"its {name} is {width}, which {problem}"
        else:
            lower, upper = width // multiple * multiple, -(-width // multiple) * multiple
            sizes = " or ".join(str(x) for x in (lower, upper) if x)
            problem, remedy = f"{width} {problem}", f"use {sizes}, or {remedy}"
        raise ConfigError(field, f"{problem}; {remedy}")


def check_device(config: Config, arch: Architecture, device: torch.device) -> Config:
    """Check ``config`` for ``device``; return it without a recipe's settings that have no effect.

    Raises ConfigError: a setting that a user gave has no effect on ``device``, or cannot run there.
    """
    check_rows(config, arch, device)
    dtype = compute_dtype(config, device)
    no_cuda = None if device.type == "cuda" else "this run is on a CPU"
    dry_run = "only --dry_run uses it"
    config = config.fitted({Fact.CUDA: no_cuda, Fact.DRY_RUN: dry_run})
    if config.kernels.attention == "flex" and device.type == "cpu":
        raise ConfigError("kernels.attention", "'flex' has no backward on a CPU; use auto or sdpa")
    wants_documents = config.optim.muon_qk_clip > 0 and config.kernels.attention == "auto"
    needs_cudnn = config.kernels.batch_invariant or wants_documents
    if config.kernels.attention == "cudnn" or (needs_cudnn and device.type == "cuda"):
        try:
            cudnn_attention.require(device, dtype, arch.widest_head())
        except ValueError as error:
            if (name := config.kernels.attention) != "auto":
                setting, problem = "kernels.attention", f"{name!r}: {error}, or use auto"
            elif wants_documents:
                clip = config.optim.muon_qk_clip
                setting, problem = "optim.muon_qk_clip", f"{clip:g}: {error}, or set 0"
            else:
                setting, problem = "kernels.attention", str(error)
            raise ConfigError(setting, problem) from None
    if config.kernels.backend == "triton" and device.type == "cpu" and not INTERPRETED:
        raise ConfigError("kernels.backend", "'triton' takes a CUDA device; use auto or reference")
    if (precision := config.kernels.precision) != "bf16" and device.type == "cuda":
        problem = None
        if torch.cuda.get_device_capability(device) < (9, 0):
            name = torch.cuda.get_device_name(device)
            problem = f"needs a Hopper GPU or later, but this is a {name}"
        elif dtype != torch.bfloat16:
            problem = f"needs train.dtype bfloat16, but this run computes in {dtype}"
        if problem is not None:
            raise ConfigError("kernels.precision", f"{precision!r} {problem}; use bf16")
    check_compilers(config, device)
    return config


def check_compilers(config: Config, device: torch.device) -> None:
    if device.type == "cuda":
        uses = "compile.enabled" if config.compile.is_on else "kernels.backend"
        triton = config.compile.is_on or config.kernels.backend != "reference"
        if triton and c_compiler() is None:
            problem = "Triton needs a C compiler on this machine; install gcc, or name one in CC"
            raise ConfigError(uses, problem)
    elif config.compile.is_on:
        from torch._inductor.cpp_builder import get_cpp_compiler  # a second to import
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise ConfigError(
                "compile.enabled",
                "true, which on a CPU needs a C++ compiler, but there is none; install g++, name "
                "one in CXX, or leave it off",
            ) from None
