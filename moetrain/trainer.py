"""The trainer: build, step, fit. Read it top to bottom.

:class:`Trainer` builds everything from a :class:`~moetrain.config.Config`, resumes if there is
something to resume from, and trains. Inside a step the host never waits for the device: clipping
and the skip decision happen in the fused update (``optim.guarded_step``), and skipped steps are
counted on the device and looked at one step late.
"""

from __future__ import annotations

import gc
import json
import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moetrain.checkpoint import find_checkpoint, list_checkpoints, save_checkpoint
from moetrain.config import Config, ConfigError
from moetrain.data import Batch, Loader, build_data, eval_batches
from moetrain.generate import generate
from moetrain.loss import GlobalBatch, LossCoefficients, cross_entropy_sum, micro_batch_loss
from moetrain.metrics import MetricsLog, Throughput, plot_losses, routing_health
from moetrain.models import (
    Architecture,
    RoutingStats,
    Transformer,
    build_model,
    compile_blocks,
    init_weights,
    load_weights,
    resolve_architecture,
    save_hf,
    update_router_bias,
)
from moetrain.models.hf import resolve
from moetrain.optim import (
    build_optimizer,
    guarded_step,
    learning_rate,
    load_named_optimizer_state,
    named_optimizer_state,
    set_learning_rate,
)
from moetrain.run_control import (
    RunFailed,
    SkipWatch,
    garbage_collector_off,
    make_deterministic,
    stop_signals,
)

logger = logging.getLogger("moetrain")

PROMPT_TOKENS = 16  # of a held-out row, given to the sample


class StepResult(NamedTuple):
    """One optimizer step's numbers, still on the device (0-d unless said otherwise)."""

    loss: torch.Tensor
    """Mean cross-entropy over the global batch's targets, nats a token."""
    grad_norm: torch.Tensor
    skipped: torch.Tensor
    load_balancing: torch.Tensor
    router_z: torch.Tensor
    routing: RoutingStats | None
    """Summed over the micro-batches."""


class Trainer:
    """One training run. ``Trainer(config).fit()`` is all there is to call."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.device = _pick_device(config)
        if config.train.deterministic:
            make_deterministic()
        self.folder = Path(config.output_dir)
        arch = resolve_architecture(config.model)
        _check_what_can_run(config, arch, self.device)
        self.data = build_data(config, arch.vocab_size)
        self.loader = Loader(
            self.data.train,
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=config.train.micro_batch_size,
            seed=config.train.seed,
        )
        self.model = _build_model(config, arch, self.device)
        self.names = {p: name for name, p in self.model.named_parameters()}
        self.optimizer = build_optimizer(self.model.named_parameters(), config.optim)
        aux = config.moe.aux_loss_coef
        self.coefficients = LossCoefficients(
            arch.router_aux_loss_coef if aux is None else aux, config.moe.z_loss_coef
        )
        self.step, self.tokens, self.evaluated_at, self.saved_at = 0, 0, -1, -1
        self.skips = SkipWatch(self.device, config.train.max_bad_steps)
        self.clock = Throughput(arch.flops_per_token(config.data.seq_len), self.device)
        self.resume()

    # ---- the run -------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train to ``train.steps``.

        Raises:
            RunFailed: too many non-finite steps in a row, after a checkpoint.
            SystemExit: SIGTERM (143) or Ctrl-C (130) came, after a checkpoint.
        """
        config = self.config
        self.log = MetricsLog(self.folder, config.log, config.train.steps, self.step)
        self.announce()
        try:
            with stop_signals() as stop, garbage_collector_off():
                if self.step == 0 and config.train.eval_interval:
                    self.evaluate()  # where the held-out curve starts
                self.clock.start()
                while self.step < config.train.steps and not stop:
                    result = self.train_step()
                    self.skips.update(result.skipped)
                    if self.due(config.log.interval) or self.step == 1:
                        self.log_step(result)
                    if self.due(config.train.eval_interval):
                        self.evaluate()
                    if self.due(config.checkpoint.interval):
                        self.save()
                    if self.due(config.train.gc_interval):
                        gc.collect()
                self.skips.check()
                if stop:
                    self.save()
                    self.log.say(f"stopped by {signal.Signals(stop[0]).name} at step {self.step}")
                    raise SystemExit(128 + stop[0])
            self.finish()
        except RunFailed:
            self.save()
            raise
        finally:
            self.log.close()

    def due(self, interval: int) -> bool:
        """Whether something done every ``interval`` steps (0: never) is to be done now."""
        return interval > 0 and self.step % interval == 0

    # ---- one step ------------------------------------------------------------------------------

    def train_step(self) -> StepResult:
        """Forward, backward and update over one global batch; queues work, waits for nothing."""
        batches = self.loader.next_step()
        sizes = GlobalBatch(
            # Counted where the batches are made, on the host, before they travel.
            num_targets=max(1, sum(int((b.targets_BS >= 0).sum()) for b in batches)),
            num_tokens=sum(b.tokens_BS.numel() for b in batches),
        )
        batches = [self.to_device(b) for b in batches]
        self.model.train()
        counts_LE = self.count_experts(batches)
        losses = []
        for batch in batches:
            loss = micro_batch_loss(
                self.model, batch, sizes, self.coefficients, self.config.kernels, counts_LE
            )
            loss.total.backward()
            losses.append(loss._replace(total=loss.total.detach()))
        lr = learning_rate(self.step, self.config.train.steps, self.config.optim)
        set_learning_rate(self.optimizer, lr)
        total, loss, balance, z = (
            torch.stack(terms).sum(0) for terms in zip(*(m[:4] for m in losses), strict=True)
        )
        norm, skipped = guarded_step(self.optimizer, total, self.config.optim.max_grad_norm)
        self.optimizer.zero_grad(set_to_none=True)
        routing = _sum_routing([m.routing for m in losses])
        if routing is not None and self.config.moe.bias_update_rate:
            rate = self.config.moe.bias_update_rate * ~skipped
            update_router_bias(self.model, routing.counts_LE, rate)
        self.step += 1
        self.tokens += sizes.num_tokens
        self.clock.count(sizes.num_tokens)
        return StepResult(loss, norm, skipped, balance, z, routing)

    def count_experts(self, batches: list[Batch]) -> torch.Tensor | None:
        """Expert counts [L, E] of the whole batch by a forward pass without gradients.

        None where no extra pass is needed: one micro-batch is the whole batch, or nothing uses it.
        """
        if (
            len(batches) == 1
            or self.model.arch.num_moe_layers == 0
            or self.coefficients.load_balancing == 0
            or self.config.moe.aux_loss_scope == "micro_batch"
        ):
            return None
        with torch.no_grad():
            routings = [
                self.model.backbone(b.tokens_BS, b.positions_BS, b.cu_seqlens)[1] for b in batches
            ]
        routing = _sum_routing(routings)
        assert routing is not None  # the model has MoE layers
        return routing.counts_LE

    def to_device(self, batch: Batch) -> Batch:
        """The batch on the device, without waiting for the copy."""
        tensors = {k: v for k, v in batch._asdict().items() if isinstance(v, torch.Tensor)}
        moved = {k: v.to(self.device, non_blocking=True) for k, v in tensors.items()}
        return batch._replace(**moved)

    # ---- evaluation and reports ----------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self) -> None:
        """Log the mean held-out loss, nats a token."""
        if self.data.eval is None or self.evaluated_at == self.step:
            return
        self.pause_clock()
        self.model.eval()
        t = self.config.train
        total, targets = 0.0, 0
        for batch in eval_batches(self.data.eval, t.micro_batch_size, t.eval_batches):
            loss, _ = cross_entropy_sum(self.model, self.to_device(batch), self.config.kernels)
            total += loss.item()  # evaluation may wait for the device
            targets += int((batch.targets_BS >= 0).sum())
        self.evaluated_at = self.step
        self.log.log(self.step, {"eval_loss": total / max(1, targets)})
        self.clock.start()

    def log_step(self, result: StepResult) -> None:
        """Log the step just done; this waits for the device."""
        self.pause_clock()
        row: dict[str, float | None] = {
            "loss": result.loss.item(),
            "grad_norm": result.grad_norm.item(),
            "lr": self.optimizer.param_groups[0]["lr"],
            "tokens": self.tokens,
            **self.clock.take(),
            "skipped_steps": self.skips.total(),
        }
        if result.routing is not None:
            row |= {
                "load_balancing_loss": result.load_balancing.item(),
                "router_z_loss": result.router_z.item(),
                **routing_health(result.routing),
            }
        self.log.log(self.step, row)
        self.clock.start()

    def pause_clock(self) -> None:
        """Wait for the device and stop counting time as training."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.clock.stop()

    def announce(self) -> None:
        """Say what is about to run and write ``config.json``."""
        arch, config = self.model.arch, self.config
        (self.folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2), "utf-8")
        self.log.say(
            f"moetrain: {arch.family}, {arch.num_params():,} parameters "
            f"({arch.num_active_params():,} active a token) on {self.device}, "
            f"{str(self.model.compute_dtype).removeprefix('torch.')}; "
            f"{len(self.data.train):,} rows of {config.data.seq_len} tokens; "
            f"output in {self.folder}"
        )
        self.log.say(f"settings:\n{config.describe()}")
        if self.step >= config.train.steps:
            self.log.say(
                f"already trained to step {self.step}: raise train.steps to go on, "
                "or set checkpoint.resume never to start again"
            )

    def finish(self) -> None:
        """What a run leaves behind: a last evaluation, checkpoint, plot and sample."""
        self.evaluate()
        if self.config.checkpoint.at_end:
            self.save()
        plot_losses(self.log.path, self.folder / "loss.png")
        if self.config.checkpoint.save_hf:
            save_hf(self.model, self.folder / "hf")
        if self.config.train.sample_tokens and self.config.data.source != "synthetic":
            self.log.say("sample:\n" + self.sample())

    def sample(self) -> str:
        """``train.sample_prompt`` or the start of a held-out row, continued by the model."""
        t, tokenizer = self.config.train, self.data.tokenizer
        if t.sample_prompt is not None:
            prompt = tokenizer.encode_batch([t.sample_prompt])[0].ids
        else:
            prompt = (self.data.eval or self.data.train).row(0).tokens_S[:PROMPT_TOKENS]
        text = generate(
            self.model,
            tokenizer,
            [int(token) for token in prompt],
            t.sample_tokens,
            max_len=self.config.data.seq_len,
            seed=t.seed,
        )
        (self.folder / "sample.txt").write_text(text, "utf-8")
        return text

    # ---- saving and resuming -------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint of the current step, unless there is one already."""
        if self.saved_at == self.step:
            return
        self.pause_clock()
        rng = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.device)
        path = save_checkpoint(
            self.folder / "checkpoints",
            self.step,
            {
                "model": self.model.state_dict(),
                "optim": named_optimizer_state(self.optimizer, self.names),
                "rng": rng,
            },
            {
                "step": self.step,
                "tokens": self.tokens,
                "sample_index": self.loader.sample_index,
                "architecture": self.model.arch.model_dump(mode="json"),
                "config": self.config.to_dict(),
            },
            keep=self.config.checkpoint.keep,
        )
        self.saved_at = self.step
        self.log.say(f"checkpoint: {path}")
        self.clock.start()

    def resume(self) -> None:
        """Take up where ``checkpoint.resume`` says, if anywhere."""
        root = self.folder / "checkpoints"
        found = find_checkpoint(self.config.checkpoint.resume, root)
        if found is None:
            _set_aside(self.folder, root)
            return
        mine = self.model.arch.model_dump(mode="json")
        theirs = found.state["architecture"]
        if mine != theirs:
            key = next(k for k in {**mine, **theirs} if mine.get(k) != theirs.get(k))
            raise ConfigError(
                "checkpoint.resume",
                f"{str(found.folder)!r} is of another model ({key} {theirs.get(key)!r}, this run's "
                f"{mine.get(key)!r}); choose another output_dir, or checkpoint.resume never",
            )
        self.model.load_state_dict(found.tensors("model"))
        load_named_optimizer_state(self.optimizer, self.names, found.tensors("optim"))
        rng = found.tensors("rng")
        torch.set_rng_state(rng["cpu"])
        if self.device.type == "cuda" and "cuda" in rng:
            torch.cuda.set_rng_state(rng["cuda"], self.device)
        self.step = self.saved_at = found.state["step"]
        self.tokens = found.state["tokens"]
        self.loader.sample_index = found.state["sample_index"]
        logger.info("resuming from %s", found.folder)
        for line in _changed_settings(found.state["config"], self.config.to_dict()):
            logger.info("  changed since: %s", line)


def _build_model(config: Config, arch: Architecture, device: torch.device) -> Transformer:
    """Plan on the meta device, then storage, then values, then how the blocks run."""
    with torch.device("meta"):
        model = build_model(arch, kernels=config.kernels, moe=config.moe)
    model.to_empty(device=device)
    init_weights(model, config.model.init_std, config.train.seed)
    if config.model.path is not None:
        load_weights(model, resolve(config.model.path))
    model.compute_dtype = _compute_dtype(config, device)
    model.recompute = config.activation.policy == "full"
    if config.compile.enabled:
        compile_blocks(model)
    return model


def _sum_routing(stats: list[RoutingStats | None]) -> RoutingStats | None:
    """The statistics of several micro-batches together; None: a dense model's."""
    routed = [s for s in stats if s is not None]
    if not routed:
        return None
    counts, probs, z, entropy = (
        torch.stack(parts).sum(0) for parts in zip(*(s[:4] for s in routed), strict=True)
    )
    return RoutingStats(counts, probs, z, entropy, sum(s.num_tokens for s in routed))


def _pick_device(config: Config) -> torch.device:
    wanted, has_cuda = config.train.device, torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ConfigError("train.device", "'cuda', but torch sees no CUDA device; use auto or cpu")
    return torch.device("cuda", 0) if has_cuda and wanted != "cpu" else torch.device("cpu")


def _compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    if config.train.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, config.train.dtype)


def _check_what_can_run(config: Config, arch: Architecture, device: torch.device) -> None:
    """Reject what this device cannot run, or needs several processes."""
    for name, degree in config.parallel.model_dump().items():
        if degree not in (1, -1):
            raise ConfigError(
                f"parallel.{name}", f"{degree} needs several processes; this version trains in one"
            )
    if config.kernels.attention == "flex" and device.type == "cpu":
        raise ConfigError("kernels.attention", "'flex' has no backward on a CPU; use auto or sdpa")
    if config.train.dtype == "float32" and device.type == "cuda" and arch.num_moe_layers:
        raise ConfigError(
            "train.dtype", "'float32' experts do not run on CUDA; use bfloat16, or train.device cpu"
        )
    if config.moe.dispatcher in ("alltoall", "deepep"):
        raise ConfigError(
            "moe.dispatcher",
            f"{config.moe.dispatcher!r} needs several processes; this version has auto and local",
        )
    if config.launch.nproc not in (1, "auto"):
        raise ConfigError(
            "launch.nproc", f"{config.launch.nproc} processes; this version trains in one"
        )


def _set_aside(folder: Path, root: Path) -> None:
    """Move an earlier run's checkpoints and metrics out of a fresh run's way; delete nothing."""
    if not list_checkpoints(root):
        return
    number = 1
    while (old := folder / f"earlier-{number}").exists():
        number += 1
    old.mkdir()
    for path in (root, folder / "metrics.jsonl", folder / "tensorboard"):
        if path.exists():
            path.rename(old / path.name)
    logger.info("an earlier run's checkpoints and metrics were moved to %s", old)


def _changed_settings(then: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    for section, values in now.items():
        if isinstance(values, dict):
            for key, value in values.items():
                before = then.get(section, {}).get(key)
                if before != value:
                    yield f"{section}.{key} {before!r} -> {value!r}"
