"""Start-up: resolves a user's settings, joins the processes, and checks that they can run.

    prepare(config)         the model, and every setting that it or the device decides
    Session(config, arch)   joins the processes, and checks device, compilers and memory

A setting that nobody has set is decided in this order: ``Config.load`` (sources), ``prepare`` (the
model), ``Session`` (devices and memory), ``Engine`` (the dispatcher). ``engine.config`` is final.

Training, reinforcement learning and the job service all begin this way; each then builds its engine
on ``session.world``. Every check comes before anything slow and raises one line. Signals and
garbage collection during the steps are here too.

Left out on purpose: contradictions between settings, model, layout and device
(:mod:`moetrain.train.checks`), which an engine checks too.
"""

import gc
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, cast

import torch

from moetrain.config import Config, ConfigError, Fact, logger
from moetrain.config.environment import launched_place
from moetrain.config.rl import SleepName
from moetrain.config.sources import shortened
from moetrain.data.tokenizer import Tokenizer, load_tokenizer
from moetrain.kernels.attention import cudnn as cudnn_attention
from moetrain.models.architecture import Architecture
from moetrain.models.hf.files import export_in, listing, resolve
from moetrain.models.hf.load import resolve_architecture
from moetrain.models.rules import SAVED_MODULES
from moetrain.models.transformer import compute_dtype
from moetrain.parallel.processes import device_capacity
from moetrain.parallel.world import join_world
from moetrain.train.callbacks import reporters_of
from moetrain.train.checks import check_model, check_run
from moetrain.train.estimates.memory import RankSizes
from moetrain.train.estimates.plan import check_host
from moetrain.train.run_folder import RunFolder

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that ask a run to save and stop."""
_WORK_FOR_GRAPHS = 2e12
"""FLOPs of one layer for a micro-batch. With fewer, the host takes longer to launch the layer than
the GPU to compute it: these take 5 ms at 400 TFLOP/s, and hosts took 5.9 ms to launch a dense layer
and 8.3 ms for one with experts (docs/benchmarks.md)."""
_LONGEST_DEFAULT_ROW = 4096
"""Upper bound of the default of data.seq_len: memory grows with the row, and most documents are
shorter."""


class Session:
    """The joined processes of a run, after all checks. Collective.

    Attributes:
        config: the settings, with ``kernels.attention`` resolved where the run generates.
        world: this process among all.
        sleep: the part of generation's memory that is freed while weights are updated; None: the
            run does not generate.
        room: bytes of this device that the run surely leaves free.
        saved: bytes of a checkpoint.
    """

    def __init__(
        self, config: Config, arch: Architecture, sleep: SleepName | Literal["auto"] | None = None
    ) -> None:
        """Join the processes and check devices, compilers, device memory and host memory.

        Args:
            config, arch: as :func:`prepare` or :func:`resolve_run` returns them.
            sleep: as the setting ``rl.sleep``; None: the run does not generate.

        Raises:
            ConfigError: the settings cannot run here, or need more memory than there is.
            RunFailed: other ranks did not come in time.
        """
        self.arch = arch
        self.world = join_world(config, arch)
        device = self.world.device
        config = check_run(config, arch, self.world.dims, device)
        dtype, capacity = compute_dtype(config, device), device_capacity(device)
        graphs = config.compile.cuda_graphs
        if graphs is True and sleep is not None:
            raise ConfigError(
                "compile.cuda_graphs",
                "true, but a run that generates cannot use CUDA graphs; set no",
            )
        config = self._with_recomputation(config, dtype, capacity, sleep)
        ranks = RankSizes.of_ranks(config, arch, self.world.dims, dtype)
        if sleep == "auto":
            # All ranks choose the same, since capturing graphs again sends tokens to other ranks.
            mine = RankSizes.least_sleep(ranks, capacity)
            sleep = cast("SleepName", self.world.broadcast(mine))
        self.sleep = sleep
        peaks = [rank.peak(sleep) for rank in ranks]
        peak = max(peaks, key=lambda estimate: estimate.total)
        peak.check(config, capacity)
        self.room = capacity - peak.total * (1 + peak.MARGIN)
        check_host(ranks, self.world)
        self.saved = self.world.dims.sharding_ranks * sum(rank.saved_bytes() for rank in ranks)
        if graphs == "auto":
            tokens = config.train.micro_batch_size * config.data.seq_len / arch.num_layers
            pays = arch.flops_per_token(config.data.seq_len) * tokens < _WORK_FOR_GRAPHS
            wanted = pays and sleep is None and peak.surely_fits(capacity / 2)
            wanted = self.world.broadcast("yes" if wanted else "no") == "yes"  # cards may differ
            # This counts as a recipe's setting, so that fitted drops it where it has no effect.
            config = config.filled({"compile.cuda_graphs": wanted}, "recipe auto")
            config = config.fitted({Fact.CUDA: None if device.type == "cuda" else "no GPU"})
        kernels = config.kernels
        # If generation has other weights or another formula, bits differ in any case.
        generates = sleep is not None and not config.generation_differs
        runs = cudnn_attention.runs(device, dtype, arch.widest_head())
        if generates and kernels.attention == "auto" and runs:
            # Training then computes the same bits as generation.
            exact = kernels.model_copy(update={"attention": "exact"})
            config = config.model_copy(update={"kernels": exact})
        self.config = config

    def _with_recomputation(
        self,
        config: Config,
        dtype: torch.dtype,
        capacity: float,
        sleep: SleepName | Literal["auto"] | None,
    ) -> Config:
        """Resolve ``activation.policy auto``, on all ranks alike. Collective."""
        if config.activation.policy != "auto":
            return config
        least = min(self.world.gather(capacity))
        chosen = RankSizes.least_recomputation(
            config, self.arch, self.world.dims, dtype, least, sleep
        )
        if self.world.is_main:
            logger.info("activation.policy auto: %s", chosen.describe())
        return chosen.of(config)


def prepare(config: Config, *, needs_text: bool = True) -> tuple[Config, Architecture]:
    """Resolve the settings and the model, and check the output folder, before anything slow.

    ``needs_text`` is as in :func:`resolve_run`.

    Raises ConfigError: the run cannot write to its folder, or the model or the settings that depend
    on it are wrong.
    """
    place, shared = launched_place(), config.checkpoint.shared
    writes = place is None or (place.rank if shared else place.local_rank) == 0
    if writes:
        RunFolder(Path(config.output_dir)).check_usable()
        reporters_of(config.log)  # raises if a reporter's library is missing
        _check_data_lies_apart(config)
        resume = config.checkpoint.resume
        if shared and resume not in ("auto", "never") and not os.path.isdir(resume):
            problem = f"{resume!r} is not a checkpoint: no such folder"
            raise ConfigError("checkpoint.resume", f"{problem}; name one, or auto, or never")
    return resolve_run(config, needs_text=needs_text)


def _check_data_lies_apart(config: Config) -> None:
    """Raise ConfigError if evaluation data is training data, or output lies in a data folder."""
    data = config.data
    paths = {"path": data.path, "eval_path": data.eval_path}
    folders = {name: os.path.realpath(path) for name, path in paths.items() if path is not None}
    if len(folders) > len(set(folders.values())):
        raise ConfigError(
            "data.eval_path",
            f"{data.eval_path!r} is data.path itself: evaluating on training data tells "
            "nothing; name other data, or leave it out, so that data.eval_fraction is held out",
        )
    output = Path(os.path.realpath(config.output_dir))
    for name, folder in folders.items():
        if os.path.isdir(folder) and output.is_relative_to(folder):
            if any(part.startswith(".") for part in output.relative_to(folder).parts):
                continue  # data is not looked for in hidden folders
            raise ConfigError(
                "output_dir",
                f"{shortened(config.output_dir)} lies in data.{name} {paths[name]!r}: the next run "
                "would read what this one writes as data; choose one outside",
            )


def resolve_run(
    config: Config, *, needs_weights: bool = True, needs_text: bool = True
) -> tuple[Config, Architecture]:
    """Return ``config``, with the unset settings that its model decides, and the architecture.

    With ``model.path``, an unset ``data.tokenizer`` becomes the checkpoint's own, and an unset
    ``data.seq_len`` the positions of the model, at most 4096. If the model has fewer tokens than
    ``data.new_tokens`` need, an unset ``model.vocab_size`` becomes what they need. Without
    ``needs_weights`` the checkpoint's ``config.json`` is enough. Without ``needs_text`` the
    checkpoint may have no tokenizer; ``data.tokenizer`` then stays unset.

    Raises ConfigError: there is no such model; it has no tokenizer; it has no experts, though a
    setting is for experts; rows are longer than the model is made for.
    """
    multi_token = config.train.mtp_weight > 0
    arch = resolve_architecture(config.model, needs_weights=needs_weights, multi_token=multi_token)
    if config.model.path is not None:
        found = _set_by_checkpoint(config, config.model.path, arch, needs_text)
        config = config.filled(found, "model.path")
    data = config.data
    # Loaded once, and only if a setting needs it: a large tokenizer takes a second.
    tokenizer = cache(partial(load_tokenizer, data.tokenizer, new_tokens=data.new_tokens))
    if data.new_tokens and config.model.vocab_size is None:
        tokens = tokenizer().vocab_size
        if tokens > arch.vocab_size:
            config = config.filled({"model.vocab_size": tokens}, "data.new_tokens")
            arch = arch.model_copy(update={"vocab_size": tokens})
    if config.train.objective == "reward":
        has_text = needs_text or config.is_set("data.tokenizer")
        arch = arch.scoring(_pad_of(tokenizer()) if has_text and needs_weights else None)
    elif arch.num_labels:
        problem = f"{config.model.path!r} is a reward model, whose head predicts no token; name a"
        raise ConfigError("model.path", f"{problem} language model (or train.objective reward)")
    if config.lora.trainable_tokens:
        ids = tuple(str(i) for i in _token_ids(config, arch, tokenizer))
        config = config.filled({"lora.trainable_tokens": ids}, "ids by data.tokenizer")
    _check_new_rows(config, arch, tokenizer)
    if config.compile.enabled == "auto":
        device = config.train.device
        is_planned = (config.launch.gpus or config.launch.gpu) is not None
        on_gpu = device == "auto" and (is_planned or torch.cuda.is_available())
        found = {"compile.enabled": device == "cuda" or on_gpu}
        config = config.filled(found, "auto, by the device").fitted()
    return check_model(config, arch), arch


def _pad_of(tokenizer: Tokenizer) -> int:
    """Return the tokenizer's PAD, or its EOS if it has none, as TRL's RewardTrainer pads."""
    pad = tokenizer.special_ids.get("pad_token")
    return tokenizer.eos_id if pad is None else pad


def _token_ids(config: Config, arch: Architecture, tokenizer: Callable[[], Tokenizer]) -> list[int]:
    """Return the ids of ``lora.trainable_tokens``; ``tokenizer()`` loads the tokenizer.

    Raises ConfigError: a text is not one token, or an id is none of the model's.
    """
    tokens, field = config.lora.trainable_tokens, "lora.trainable_tokens"
    ids = {token: [int(token)] for token in tokens if token.isascii() and token.isdecimal()}
    if texts := [token for token in tokens if token not in ids]:
        found = tokenizer().encode_batch(texts)
        ids |= {text: encoded.ids.tolist() for text, encoded in zip(texts, found, strict=True)}
    for token in tokens:
        if len(ids[token]) != 1:
            problem = f"{token!r} is {len(ids[token])} tokens of data.tokenizer"
            raise ConfigError(field, f"{problem}; name one token, or add it to data.new_tokens")
        if ids[token][0] >= arch.vocab_size:
            problem = f"{token!r}, but the model's tokens are 0 to {arch.vocab_size - 1}"
            raise ConfigError(field, f"{problem}; leave it out, or raise model.vocab_size")
    return [ids[token][0] for token in tokens]


def _check_new_rows(config: Config, arch: Architecture, tokenizer: Callable[[], Tokenizer]) -> None:
    """Raise ConfigError if ``lora.trainable_tokens`` leaves out new tokens, whose rows would never
    be trained, and stay all alike. If it is unset, warn unless ``lora.modules_to_save`` trains
    them."""
    model, data, lora = config.model, config.data, config.lora
    if not (
        lora.rank and config.is_set("data.tokenizer") and (data.new_tokens or model.vocab_size)
    ):
        return
    found = tokenizer().encode_batch([*data.new_tokens])
    new = {int(x.ids[0]): text for text, x in zip(data.new_tokens, found, strict=True)}
    if model.path is not None and model.vocab_size is not None:
        section = model.model_copy(update={"vocab_size": None})
        own = resolve_architecture(section, needs_weights=False).vocab_size
        beyond = range(own, min(arch.vocab_size, tokenizer().vocab_size))
        new |= {i: str(i) for i in beyond if i not in new}
    left = [new[i] for i in sorted(new.keys() - set(lora.token_ids))]
    if lora.token_ids and left:
        problem = f"rows of the other new tokens {listing(left)} would not be trained"
        raise ConfigError("lora.trainable_tokens", f"{problem}; name these too")
    has_head = not (arch.tie_embeddings or arch.num_labels)
    matrices = [*SAVED_MODULES] if has_head else ["embed_tokens"]
    frozen = [name for name in matrices if name not in lora.modules_to_save]
    if left and frozen:
        said = (
            "rows of the new tokens %s are not trained in %s; to train them, set "
            "lora.modules_to_save %s, or name the tokens in lora.trainable_tokens"
        )
        logger.warning(said, listing(left), " and ".join(frozen), ",".join(matrices))


def _set_by_checkpoint(
    config: Config, path: str, arch: Architecture, needs_text: bool
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if not config.is_set("data.seq_len"):
        values["data.seq_len"] = min(arch.max_positions, _LONGEST_DEFAULT_ROW)
    # The synthetic source needs no tokenizer: it has no text to sample.
    if not config.is_set("data.tokenizer") and config.data.source != "synthetic":
        folder = Path(path).expanduser() if needs_text else resolve(path)
        if folder.is_dir():
            folder = export_in(folder)
        if folder.is_dir() and not (folder / "tokenizer.json").is_file():
            if not needs_text:
                return values
            raise ConfigError(
                "data.tokenizer",
                f"not set, and model.path {path!r} holds no tokenizer.json; name the tokenizer "
                "that the model was trained with",
            )
        values["data.tokenizer"] = str(folder) if folder.is_dir() else path  # else a hub id
    return values


@contextmanager
def stop_signals() -> Generator[list[int]]:
    """Collect SIGTERM and SIGINT in a list while inside; a second Ctrl-C interrupts at once.

    SIGUSR1, which batch systems send some time before the end, counts as SIGTERM.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread may set handlers; its owner decides what stops it
        return

    def note(number: int, frame: Any) -> None:
        received.append(signal.SIGTERM if number == signal.SIGUSR1 else number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        logger.info("stopping; a checkpoint will be written (Ctrl-C again: stop without it)")

    before = {s: signal.signal(s, note) for s in _STOPS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def garbage_collector_off() -> Generator[None]:
    """Disable automatic garbage collection while inside, and exclude objects made before from
    it."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
