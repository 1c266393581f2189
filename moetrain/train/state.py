"""The state of a model in training: its weights and moments, spread over ranks, and checkpoints.

:class:`ModelState` builds them, reads and loads them in parts or whole, exports them, and moves
them to host memory and back. :class:`Snapshots` saves and restores them with a run's progress.
Ranks hold parts of tensors. Files hold pieces, and each piece records its place in the whole
tensor. So a run can resume from a checkpoint on any mesh, where each rank reads only its own part.
:mod:`moetrain.train.engine` does the training.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch

from moetrain.checkpoint.read import Checkpoint, DamagedCheckpoint
from moetrain.checkpoint.save import SavePlan, Saver, Staging
from moetrain.config import Config, ConfigError, logger
from moetrain.config.sources import leaves, shortened
from moetrain.models.architecture import Architecture
from moetrain.models.families import FAMILIES
from moetrain.models.hf.files import TokenizerFiles
from moetrain.models.hf.peft import save_peft
from moetrain.models.hf.save import Export, ExportDtype
from moetrain.models.parts.lora import Adapter
from moetrain.models.rules import ADAPTER, ADAPTERS, MAGNITUDE
from moetrain.models.transformer import Transformer
from moetrain.optim.adamw import AdamW
from moetrain.optim.muon import Muon
from moetrain.optim.qk_clip import QKClip
from moetrain.parallel.apply import checksum, place_model
from moetrain.parallel.mesh import Sliceable, TensorSlice
from moetrain.parallel.pipeline.stages import Stages, check_like
from moetrain.parallel.world import World
from moetrain.runtime.arena import aligned

StateKind = Literal["weights", "gradients", "moments", "workspaces"]
OFFLOADED: tuple[StateKind, ...] = get_args(StateKind)


class ModelState:
    """The weights of a model and the state of its optimizer, spread over the ranks of ``world``.

    Every method is collective: all ranks call them in the same order.

    Attributes:
        model, fsdp, stages, optimizer: the model, its sharding, its pipeline stages, its optimizer.
        before_change: called before weights or moments change. :class:`Snapshots` sets it if it
            saves from copies.
    """

    GROUPS: ClassVar = ("model", "optim")
    """The groups of tensors of a :meth:`state`."""

    def __init__(self, config: Config, arch: Architecture, world: World) -> None:
        """Build the model of ``arch``, with its weights.

        Raises ConfigError: ``model.path`` cannot be loaded.
        """
        self.arch = arch
        self.world = world
        self.stages = Stages(config, arch, world.meshes, world.device)
        self.model, self.fsdp, config = place_model(config, arch, world, self.stages)
        self.config = config
        self.clip = self._watched() if config.optim.muon_qk_clip else None
        if config.optim.name == "adamw":
            self.optimizer = AdamW(self.fsdp, config.optim, config.train.seed)
        else:
            self.optimizer = Muon(
                self.fsdp,
                config.optim,
                config.train.seed,
                group=world.meshes.shared_parameters.get_group(2),
                everyone=world.meshes.everyone,
                clip=self.clip,
            )
        arenas = (self.fsdp.weights, self.fsdp.gradients, self.optimizer.arena)
        self._arenas = {arena.name: arena for arena in arenas}
        self._link = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
        self.before_change: Callable[[], None] = lambda: None

    def work(self) -> AbstractContextManager[None]:
        """Allow calls of :attr:`model` in this context. Its parameters must not change there.

        Each method enters the context by itself. A context around several calls saves gathers of
        parameters.
        """
        return self.fsdp.work()

    def forget(self) -> None:
        """Forget the gradients of the step so far."""
        self.fsdp.clear_gradients()
        if self.clip is not None:
            self.clip.peaks_LH.zero_()

    def _watched(self) -> QKClip:
        dense, dims = self.world.meshes.dense, self.world.dims
        clip = QKClip(self.arch, self.config.optim.muon_qk_clip)
        index, count = dense.get_local_rank("tp"), dims.tp
        if dims.cp_method == "ulysses":
            index, count = index * dims.cp + dense.get_local_rank("cp"), count * dims.cp
        clip.watch(self.model, self.world.device, index, count)
        return clip

    # ---- in parts and whole --------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, TensorSlice]]:
        """Return groups ``model`` and ``optim``: this rank's own parts of tensors, not copied.

        Gradients and frozen weights are not included. Frozen weights are loaded from their source
        again, and :attr:`fingerprint` tells whether they are still the same.
        """
        self._need("weights", "moments")
        self.fsdp.settle()
        members, among = self.fsdp.members, self.stages.among
        model = {
            name: among(name, member.layout.part(member.local))
            for name, member in members.items()
            if member.rule.trainable
        }
        common = next(iter(members.values())).layout.common
        model |= {name: among(name, common(x)) for name, x in self.model.named_buffers()}
        return {"model": model, "optim": self.optimizer.parts(self.stages)}

    def state_bytes(self) -> int:
        """Return the bytes of a copy of this rank's :meth:`state`.

        If there are no moments yet, this call allocates them. They stay allocated for the first
        step.
        """
        is_new = not self.optimizer.state
        if is_new:
            self.optimizer.begin()
        groups = self.state().values()
        if is_new:
            self.optimizer.forget()
        parts = (part for group in groups for part in group.items())
        sizes = (part.tensor.nbytes for name, part in parts if part.is_written_here(name))
        return sum(map(aligned, sizes)) + (1 << 20)

    def load_state(self, groups: Mapping[str, Mapping[str, Sliceable]]) -> None:
        """Load the groups of a :meth:`state` that ranks of any layout have saved. Collective.

        Forgets the step's gradients.

        Raises ConfigError: the tensors have other names, shapes or dtypes.
        """
        self.fsdp.check_idle()
        self._need("weights", "gradients", "moments")
        self.fsdp.settle()
        self.fsdp.withdraw()
        self.before_change()
        self.forget()
        if "model" in groups:
            self._load_weights(groups["model"])
        if "optim" in groups:
            self.optimizer.load_parts(self.stages, groups["optim"])

    @torch.no_grad()
    def _load_weights(self, state: Mapping[str, Sliceable]) -> None:
        """Copy this rank's part of every trained parameter and buffer out of ``state``."""
        saved = self.stages.saved
        odd = state.keys() ^ saved.keys()
        if odd and all(name.endswith("router.bias") for name in odd):
            raise ConfigError(
                "moe.bias_update_rate",
                f"the checkpoint was trained with{'' if odd & state.keys() else 'out'} a selection "
                "bias; set it as it was, or start again with checkpoint.resume never",
            )
        if odd:
            problem = "the trained tensors of the checkpoint are not those of this run: only one "
            problem += f"of the two has {sorted(odd)[:3]}"
            remedy = "set model, lora and train.freeze as they were, or set never"
            raise ConfigError("checkpoint.resume", f"{problem}; {remedy}")
        for name, entry in saved.items():
            dtype = torch.float32 if entry.rule is None else entry.rule.storage
            check_like(name, state[name], entry.shape, dtype, "; set optim.weight_dtype as it was")
        for name, member in self.fsdp.members.items():
            if member.rule.trainable:
                member.local.copy_(state[name][member.layout.box])
        for name, buffer in self.model.named_buffers():
            buffer.copy_(state[name][()])

    @cached_property
    @torch.no_grad()
    def fingerprint(self) -> str:
        """Hash of the weights that are not trained. Collective at its first use.

        The hash is the same on any layout and in any dtype that holds the values. It is empty if
        all weights are trained. It does not withstand an adversary.
        """
        self._need("weights")
        stages, members = self.stages, self.fsdp.members
        frozen = {n: stages.table[n] for n, rule in stages.rules.items() if not rule.trainable}
        if not frozen:
            return ""
        sums = torch.zeros(len(frozen), dtype=torch.int64, device=self.world.device)
        for i, (name, entry) in enumerate(frozen.items()):
            if entry.holders[0] == stages.rank:
                member = members[name]
                is_first = member.layout.mesh.get_local_rank(0) == 0  # copies count once
                sums[i] = checksum(member) * is_first
        rows = zip(frozen.items(), self.world.sum_all(sums).tolist(), strict=True)
        lines = (f"{name} {list(entry.shape)} {total}" for (name, entry), total in rows)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @torch.no_grad()
    def weights(
        self, *, hf: bool = False, merged: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the whole tensor of every weight, on the device, one at a time.

        A tensor is valid until the next step. It has the dtype in which the weight is stored, to
        which quantised weights are dequantised: ``optim.weight_dtype`` for large trained matrices,
        fp32 for all else that is trained, and usually ``train.dtype`` for frozen weights.

        Args:
            hf: use the names and pieces of Hugging Face's files, without the buffers that these do
                not hold; otherwise use moetrain's names, with all buffers.
            merged: merge adapters into their weights, which are then fp32, and yield no adapters.
                ``hf`` implies it.
        """
        family, merged = FAMILIES[self.arch.family], merged or hf
        source = self.model.source
        weight_map = None if source is None else source.weight_map
        for name, entry in self.stages.table.items():
            is_left_out = hf and entry.rule is None and not family.holds(name, weight_map)
            if is_left_out or (merged and name.endswith(ADAPTERS)):
                continue
            whole = self._whole(name)
            if merged and (halves := self._adapter(name)) is not None:
                whole = halves.merged(whole.float())
            if hf:
                for piece in family.pieces({name: whole.shape}, self.arch, weight_map):
                    yield piece.hf_name, whole[piece.place]
            else:
                yield name, whole

    def _adapter(self, name: str) -> Adapter | None:
        """Return the adapter of the weight ``name``, whole. Collective."""
        halves = [name + half for half in ADAPTER]
        if halves[0] not in self.stages.table:
            return None
        a, b = (self._whole(half) for half in halves)
        lengths = name + MAGNITUDE
        magnitude = self._whole(lengths) if lengths in self.stages.table else None
        return Adapter(a, b, self.config.lora.scale, magnitude=magnitude)

    def _whole(self, name: str) -> torch.Tensor:
        self._need("weights")  # on every rank: if one alone raised, the others would wait

        def whole_here() -> torch.Tensor:  # collective over the ranks that have it
            member = self.fsdp.members.get(name)
            if member is None:
                return self.model.get_buffer(name)
            self.fsdp.settle()
            return member.layout.whole(member.read().to(self.world.device))

        return self.stages.whole(self.stages.table[name], whole_here).detach()

    @torch.no_grad()
    def save_peft(self, folder: Path) -> None:
        """Write the adapters and all other trained weights in PEFT's format. Collective.

        See :mod:`moetrain.models.hf.peft`.
        """
        adapters = []
        for name, entry in self.stages.table.items():
            if (adapter := self._adapter(name)) is not None and self.world.is_main:
                a, b, scale, _, magnitude = adapter
                lengths = None if magnitude is None else magnitude.cpu()
                kept = Adapter(a.cpu(), b.cpu(), scale, magnitude=lengths)
                adapters.append((name, entry.shape, kept))
        wholes = {}
        for name in self.stages.trained:
            if not name.endswith(ADAPTERS):
                whole = self._whole(name)
                wholes |= {name: whole.cpu()} if self.world.is_main else {}
        if self.world.is_main:
            base = self.config.model.path
            save_peft(folder, self.arch, self.config.lora, adapters, base, wholes)

    def save_hf(
        self,
        folder: Path,
        *,
        dtype: ExportDtype = "auto",
        tokenizer: TokenizerFiles | None = None,
        max_shard_bytes: int = Export.SHARD_BYTES,
    ) -> None:
        """Write the model, adapters merged, as :func:`moetrain.save_hf` does.

        All ranks write, or the main rank alone if machines share no folder.

        Raises ConfigError: a weight does not fit ``dtype``.
        """
        with torch.device("meta"):
            whole = Transformer(self.arch)
        whole.source, world = self.model.source, self.world
        self.fsdp.settle()
        writers = world.size if self.config.checkpoint.shared else 1
        export = Export(
            whole,
            folder,
            dtype=dtype,
            tokenizer=tokenizer,
            max_shard_bytes=max_shard_bytes,
            rank=world.rank,
            ranks=writers,
            wait=world.barrier,
        )
        here = {name: member.read for name, member in self.fsdp.members.items()}
        if problem := world.any(export.misfit(here)):
            raise ConfigError("checkpoint.hf_dtype", problem)
        if world.is_main:
            export.warn_about_router_bias(self.model)
        export.write(self.weights(hf=True))

    # ---- in host memory ------------------------------------------------------------------------

    def offload(self, *what: StateKind) -> None:
        """Move ``what`` (everything, if nothing is named) to host memory until :meth:`reload`.

        Tensors stay the same objects, and on a GPU keep their addresses, except shards that other
        ranks read from this rank's memory. Until :meth:`reload`, methods that need them raise
        :class:`~moetrain.runtime.arena.OffloadedError`, and no other code may touch them. The host
        memory is kept for the next call. Workspaces (gathered parameters) are only freed, and are
        allocated again at their next use.

        Raises:
            ValueError: a name is unknown.
            RuntimeError: called within :meth:`work`.
            RunFailed: the system does not provide enough pinned memory.
        """
        if odd := set(what) - set(OFFLOADED):
            raise ValueError(f"Engine.offload: {sorted(odd)} are none of {', '.join(OFFLOADED)}")
        self.fsdp.check_idle()
        if not self.fsdp.weights.is_offloaded:  # else there was no step since the last call
            self.fsdp.settle()
            self.fsdp.withdraw()
        self.before_change()
        what = what or OFFLOADED
        if "workspaces" in what:
            self.fsdp.release()
        for name, arena in self._arenas.items():
            if name in what and not arena.is_offloaded:
                keep = name != "gradients" or any(self.fsdp.marks)
                arena.offload(self._link, keep=keep)
        if self._link is not None:
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Move everything that is offloaded back to the device.

        After torch.OutOfMemoryError, call again once there is room.
        """
        for arena in self._arenas.values():  # in the order of their use in a step
            arena.reload(self._link)

    def _need(self, *what: StateKind) -> None:
        """Raise OffloadedError unless all of ``what`` is on the device."""
        for name in what:
            self._arenas[name].need()


class Snapshots(Saver):
    """Saves and restores a :class:`ModelState` with the progress of a run. Collective.

    With ``checkpoint.asynchronous``, checkpoints are written in the background, from copies.
    """

    def __init__(self, engine: ModelState) -> None:
        """Reserve host memory for copies; raises RunFailed if there is too little."""
        super().__init__(engine.world.own_rendezvous())
        self.engine, self.settings = engine, engine.config.checkpoint
        self.staging: Staging | None = None
        if self.settings.asynchronous:
            self.staging = Staging(engine.world.device)
            engine.before_change = self.staging.hold_changes
            # Reserving takes time, and no training step waits for it yet.
            saves = self.settings.interval or self.settings.minutes
            if saves or self.settings.memory_interval:
                self.staging.memory.reserve(engine.state_bytes())

    def save(
        self,
        plan: SavePlan,
        progress: Mapping[str, Any],
        tensors: Mapping[str, Mapping[str, TensorSlice]],
        kinds: Sequence[str] = ModelState.GROUPS,
    ) -> None:
        """Begin to write a checkpoint, once the previous one is written.

        The checkpoint is complete when :meth:`wait` returns. Unless it is written from copies, no
        tensor may change before that.

        Args:
            progress: the run's own values in ``state.json``.
            tensors: this rank's parts of groups besides the engine's.
            kinds: the engine's groups that are written.

        Raises RunFailed: this checkpoint or the previous one cannot be written.
        """
        self.wait()
        engine, rng = self.engine, {}
        if engine.world.is_main:  # after resuming, all ranks have the main rank's random numbers
            rng["cpu"] = TensorSlice.all_of(torch.get_rng_state())
            if engine.world.device.type == "cuda":
                rng["cuda"] = TensorSlice.all_of(torch.cuda.get_rng_state(engine.world.device))
        mine = engine.state()
        groups = {**{kind: mine[kind] for kind in kinds}, "rng": rng, **tensors}
        state = {
            "step": plan.step,
            **progress,
            "architecture": engine.arch.model_dump(mode="json"),
            "config": engine.config.to_dict(),
            "frozen": engine.fingerprint,
        }
        if self.staging is None:
            self.start(plan, groups, state)
        else:
            copies, ready = self.staging.copy(groups)
            self.start(plan, copies, state, ready)

    def restore(self, found: Checkpoint, data: str, total_steps: int) -> str:
        """Load ``found``. Each byte is read and checked by at least one rank.

        Args:
            data: hash of the run's data.
            total_steps: number of steps of the run.

        Returns:
            A text that describes the damage, the same on every rank, or an empty text. After damage
            the engine's state is undefined.

        Raises ConfigError: tensors have other names, shapes or dtypes, the frozen weights differ,
        or the run is over and data or ``model.path`` changed.
        """
        engine, world = self.engine, self.engine.world
        self._check_same_run(found, data, total_steps)
        self._check_same_frozen(found)
        damaged = ""
        try:
            for group in engine.GROUPS:  # one after the other: each may take most of the memory
                engine.load_state({group: found.group(group)})
            self._set_random_numbers(found)
            for name in found.contents.groups.keys() - {*engine.GROUPS, "rng"}:
                for stored in found.group(name).values():
                    stored.check(world.rank, world.size)
        except DamagedCheckpoint as error:
            damaged = error.problem
        if damaged := world.any(damaged):
            return damaged
        logger.info("resuming from %s", found.folder)
        before = dict(leaves(found.state["config"]))
        for name, value in leaves(engine.config.to_dict()):
            if before.get(name) != value:
                logger.info("  changed since: %s %r -> %r", name, before.get(name), value)
        return ""

    def _set_random_numbers(self, found: Checkpoint) -> None:
        rng, device = found.tensors("rng"), self.engine.world.device
        try:
            torch.set_rng_state(rng["cpu"])
            if device.type == "cuda" and "cuda" in rng:
                torch.cuda.set_rng_state(rng["cuda"], device)
        except (KeyError, TypeError, RuntimeError) as error:
            problem = f"{str(found.folder)!r} has no state of random numbers: {error}"
            raise ConfigError("checkpoint.resume", problem) from None

    def _check_same_frozen(self, found: Checkpoint) -> None:
        """Raise ConfigError unless the frozen weights, which ``found`` does not hold, are the
        same."""
        engine = self.engine
        if found.state.get("frozen", "") == engine.fingerprint:
            return
        path, seed = engine.config.model.path, engine.config.train.seed
        name, value = ("train.seed", seed) if path is None else ("model.path", shortened(path))
        raise ConfigError(
            "checkpoint.resume",
            f"{str(found.folder)!r} was trained beside other frozen weights than this run has "
            f"({name} {value}); set {name}, lora.rank, lora.base_dtype and train.freeze as they "
            "were, or checkpoint.resume never",
        )

    def _check_same_run(self, found: Checkpoint, data: str, total_steps: int) -> None:
        """Refuse to resume a finished run with other data, or from another ``model.path``.

        An unfinished run may go on with other data, and the folder that it began from may have been
        moved, so both only make the main rank warn. A finished run would never use the other data.
        """
        changed = []
        if found.state.get("data", data) != data:  # earlier versions did not record the hash
            changed.append("was trained on other data")
        began = dict(leaves(found.state["config"])).get("model.path")
        paths = {
            path and os.path.realpath(os.path.expanduser(str(path)))
            for path in (began, self.engine.config.model.path)
        }
        if len(paths) > 1:
            changed.append(f"began from model.path {shortened(began)}")
        what = " and ".join(changed)
        if changed and found.state["step"] >= total_steps:
            raise ConfigError(
                "output_dir",
                f"the run in it is over (step {found.state['step']}, {str(found.folder)!r}) and "
                f"{what}; choose another output_dir, set checkpoint.resume never to start again, "
                "or raise train.steps or train.epochs to go on with it",
            )
        if changed and self.engine.world.is_main:
            logger.warning("the run goes on from %s, which %s", found.folder, what)
