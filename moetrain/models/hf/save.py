"""Writes Hugging Face checkpoints: a model's weights, and the rest of its source checkpoint.

``config.json`` and ``generation_config.json`` are written again, because the architecture, the
dtype or the tokenizer may have changed. Keys that these do not affect keep their values. Other
files are copied.

Left out on purpose: process groups (the division of the work is an argument), and writing a run's
tokenizer to files (:mod:`moetrain.data.tokenizer`).
"""

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import mode
from typing import Literal, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moetrain.config import ConfigError, logger
from moetrain.config.files import remove_temporaries, write_atomically
from moetrain.models.architecture import ConfigJson, Fields
from moetrain.models.families import FAMILIES
from moetrain.models.family import Piece
from moetrain.models.hf import files as hf_files
from moetrain.models.hf.config import exported_config
from moetrain.models.hf.load import check_checkpoint
from moetrain.models.hf.packing import ExportFormat, Packing, packing_of
from moetrain.models.transformer import Transformer

ExportDtype = Literal["auto", "bfloat16", "float16", "float32"]
_METADATA = {"format": "pt"}
"""``transformers`` refuses files that do not name the framework that wrote them."""
_File = Path | str | ConfigJson
_EOS, _PAD = "eos_token_id", "pad_token_id"


class _Outgoing(NamedTuple):
    """A tensor to write."""

    name: str
    dtype: torch.dtype
    num_bytes: int
    read: Callable[[], torch.Tensor] | None = None
    """Reads the tensor; None: it is the model's own, and arrives with the stream."""
    pieces: Sequence[Piece] = ()
    """The pieces in which a tensor of the model arrives, in order."""
    shape: tuple[int, ...] = ()
    """The shape of a tensor of the model."""
    packing: Packing | None = None
    """The format in which the tensor is stored quantised; None: it is not quantised. ``dtype`` is
    then the one in which it is quantised."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors of the file."""
        return (self.name,) if self.packing is None else self.packing.names(self.name)


class Export:
    """Writes what :func:`save_hf` writes, from weights that arrive one by one.

    Several processes can share the work. Each needs host memory for two files, because it collects
    the next file while it writes one.
    """

    SHARD_BYTES = 5 * 10**9
    """The largest size of a file, as in ``transformers``."""

    def __init__(
        self,
        model: Transformer,
        folder: str | os.PathLike[str],
        *,
        dtype: ExportDtype = "auto",
        format: ExportFormat = "plain",
        tokenizer: hf_files.TokenizerFiles | None = None,
        max_shard_bytes: int = SHARD_BYTES,
        rank: int = 0,
        ranks: int = 1,
        wait: Callable[[], object] = lambda: None,
    ) -> None:
        """Plan the export; arguments as :func:`save_hf`.

        Args:
            model: names the parameters and the source; its values are not read.
            rank, ranks: this process writes every ``ranks``-th file, starting with file ``rank``.
            wait: a barrier over all processes.
        """
        self.model, self.folder, self.max_shard_bytes = model, Path(folder), max_shard_bytes
        self.tokenizer, self.rank, self.ranks, self.wait = tokenizer, rank, ranks, wait
        source, buffers = model.source, dict(model.named_buffers())
        parameters = dict(model.named_parameters()) | buffers
        self._own = list[_Outgoing]()
        for name, group in itertools.groupby(model.pieces(), attrgetter("hf_name")):
            pieces = [*group]
            parameter, shape = pieces[0].parameter, Piece.shape_of(pieces, parameters)
            # A bias of scores may be smaller than their rounding in a narrow dtype.
            is_kept = dtype == "auto" or parameter in buffers
            own = parameters[parameter].dtype if is_kept else getattr(torch, dtype)
            if dtype == "auto" and source is not None and name in source.own:
                own = source.stored[name].dtype
            num_bytes = math.prod(shape) * own.itemsize
            self._own.append(_Outgoing(name, own, num_bytes, pieces=pieces, shape=shape))
        # The pieces of a tensor must arrive one after another.
        assert len({outgoing.name for outgoing in self._own}) == len(self._own)
        default = None if source is not None and dtype == "auto" else self._own[0].dtype
        self._files = self._side_files(default)
        if (packing := packing_of(format)) is not None:
            self._pack(packing)

    def _pack(self, packing: Packing) -> None:
        """Plan to store matrices quantised; raises ConfigError as :meth:`Packing.chosen`."""
        chosen = packing.chosen(self.model, {x.name: x.shape for x in self._own})
        for i, outgoing in enumerate(self._own):
            if outgoing.name in chosen:
                num_bytes = packing.num_bytes(outgoing.shape)
                self._own[i] = outgoing._replace(
                    dtype=torch.float32, num_bytes=num_bytes, packing=packing
                )
        source = self.model.source
        names = [x.name for x in self._own] + ([] if source is None else [*source.extra])
        ending = ".weight"
        kept = [n.removesuffix(ending) for n in names if n.endswith(ending) and n not in chosen]
        config = self._files[hf_files.CONFIG]
        assert isinstance(config, Mapping)
        own = {"quantization_config": packing.settings(kept)}
        self._files[hf_files.CONFIG] = {**config, **own}

    def _side_files(self, dtype: torch.dtype | None) -> dict[str, _File]:
        """Make all files without weights, by name in the export; raises as :func:`save_hf`.

        ``dtype``: the dtype for config.json; None: as in the source.
        """
        source, tokenizer = self.model.source, self.tokenizer
        config = exported_config(self.model.arch, None if source is None else source.config)
        keys = [key for key in ("torch_dtype", "dtype") if key in config]
        if dtype is not None or not keys:
            dtypes = [] if source is None else [source.stored[n].dtype for n in source.own]
            name = str(dtype or mode(dtypes)).removeprefix("torch.")
            config |= dict.fromkeys(keys or ["torch_dtype"], name)
        generation: Fields = dict(source.generation or {}) if source is not None else {}
        files: dict[str, _File] = {}
        if source is not None:
            kept = (f for f in source.files if tokenizer is None or not tokenizer.has(f))
            files |= {name: source.folder / name for name in kept}
        if tokenizer is not None:
            files |= tokenizer.files
            ids = self._new_ids(tokenizer, config, generation)
            # A reward model's pad decides which token is scored, so it stays.
            is_reward_model = bool(self.model.arch.num_labels)
            config |= {k: v for k, v in ids.items() if not (is_reward_model and k == _PAD)}
            for key, value in ids.items():
                generation.pop(key, None)
                if value is not None:
                    generation[key] = value
        if generation:
            files[hf_files.GENERATION] = generation
        return files | {hf_files.CONFIG: config}

    def _new_ids(
        self, tokenizer: hf_files.TokenizerFiles, *configs: ConfigJson
    ) -> Mapping[str, int | None]:
        """Return the tokenizer's special ids to write to ``configs``.

        If the source has the same tokenizer, its configs keep their ids, which often list several
        tokens that end a text. The result is then empty, unless none of these is the token that
        ended every document in training: the result is then this token.
        """
        ids, source = tokenizer.ids, self.model.source
        if source is None or not tokenizer.is_in(source.folder):
            return ids
        ends = (config.get(_EOS) for config in configs)
        is_known = any(ids[_EOS] in (x if isinstance(x, list) else [x]) for x in ends)
        return {} if is_known else {_EOS: ids[_EOS]}

    @staticmethod
    def warn_about_router_bias(model: Transformer) -> None:
        """Warn if files of the family cannot hold the routers' selection biases."""
        family, source = FAMILIES[model.arch.family], model.source
        weight_map = None if source is None else source.weight_map
        buffers = ((name, x) for name, x in model.named_buffers() if x.any())
        if lost := [name for name, _ in buffers if not family.holds(name, weight_map)]:
            logger.warning(
                "Hugging Face files cannot hold %s, which are left out", hf_files.listing(lost)
            )

    def misfit(self, here: Mapping[str, Callable[[], torch.Tensor]]) -> str:
        """Describe the first parameter whose values exceed the dtype of the export; "": none do.

        ``here``: functions that return the parameters to check, by name.

        Raises ConfigError: the format cannot hold one of them.
        """
        for outgoing in self._own:
            for piece in outgoing.pieces:
                if outgoing.packing is not None and piece.parameter in here:
                    weight = here[piece.parameter]()
                    outgoing.packing.check(outgoing.name, weight[piece.place])
        # A parameter may go to several file tensors. Check it once for each dtype of these.
        names = {(p.parameter, x.dtype): x.name for x in self._own for p in x.pieces}
        for (parameter, dtype), name in names.items():
            weight = here[parameter]() if parameter in here else torch.empty(0)
            limit = torch.finfo(dtype).max
            if limit < torch.finfo(weight.dtype).max and weight.numel():
                largest = weight.abs().amax().item()
                if limit < largest < math.inf:
                    return (
                        f"{dtype} cannot hold {name}, whose largest weight is {largest:.3g}; use"
                        " bfloat16 or float32"
                    )
        return ""

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write the checkpoint.

        Args:
            tensors: every weight with its name in the files, in the order of
                ``Transformer.pieces``, on every process. A weight is valid until the next is
                requested.
        """
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_temporaries(self.folder)
        self.wait()
        source = self.model.source
        with ExitStack() as stack:
            extra, lost = ([], []) if source is None else _extra_tensors(source, stack)
            shards = _plan_shards([*self._own, *extra], self.max_shard_bytes)
            self._write_shards(shards, iter(tensors))
        self.wait()
        if self.rank > 0:
            return
        files = dict(self._files)
        if len(shards) > 1:
            sizes = (tensor.num_bytes for shard in shards.values() for tensor in shard)
            weight_map = {
                name: file
                for file, shard in shards.items()
                for tensor in shard
                for name in tensor.names
            }
            files[hf_files.INDEX] = {
                "metadata": {"total_size": sum(sizes)},
                "weight_map": weight_map,
            }
        lost += hf_files.write_files(self.folder, files)
        hf_files.remove_stale(self.folder, [*shards, *files])
        logger.info("Hugging Face checkpoint: %s", self.folder)
        if lost:
            problem = (
                f"gone or changed since it was read; {self.folder} lacks "
                f"{hf_files.listing(lost)}; put it back and save again"
            )
            if source is None:
                raise ConfigError("data.tokenizer", problem)
            raise hf_files.error(source.folder, problem)

    def _write_shards(
        self,
        shards: Mapping[str, Sequence[_Outgoing]],
        coming: Iterator[tuple[str, torch.Tensor]],
    ) -> None:
        """Write this process's files from the stream of the model's own weights."""
        with ThreadPoolExecutor(1) as thread:
            writing = thread.submit(lambda: None)
            for number, (name, shard) in enumerate(shards.items()):
                is_mine = number % self.ranks == self.rank
                values = self._collect(shard, coming, is_mine)
                if is_mine:
                    writing.result()
                    save = partial(save_file, values, metadata=_METADATA)
                    writing = thread.submit(write_atomically, self.folder / name, save)
            writing.result()

    def _collect(
        self,
        shard: Sequence[_Outgoing],
        coming: Iterator[tuple[str, torch.Tensor]],
        is_mine: bool,
    ) -> dict[str, torch.Tensor]:
        """Collect the tensors of one file in host memory; none if another process writes it."""
        values = {}
        for outgoing in shard:
            name, dtype = outgoing.name, outgoing.dtype
            if outgoing.read is not None:
                values |= {name: outgoing.read().to(dtype)} if is_mine else {}
                continue
            if is_mine and not outgoing.pieces[0].is_whole:
                values[name] = torch.empty(outgoing.shape, dtype=dtype)
            for piece in outgoing.pieces:
                came, tensor = next(coming)
                assert came == name  # both sides use the same table
                if is_mine and piece.is_whole:
                    # Copied, since the stream may reuse the tensor's memory.
                    values[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
                elif is_mine:
                    piece.of(values[name]).copy_(tensor.detach())
            if is_mine and outgoing.packing is not None:
                values |= outgoing.packing.packed(name, values.pop(name))
        return values


def save_hf(
    model: Transformer,
    folder: str | os.PathLike[str],
    *,
    dtype: ExportDtype = "auto",
    format: ExportFormat = "plain",
    tokenizer: hf_files.TokenizerFiles | None = None,
    max_shard_bytes: int = Export.SHARD_BYTES,
) -> None:
    """Write ``model`` as a checkpoint that ``transformers`` loads unchanged, shard by shard.

    If ``model.source`` names a checkpoint (:func:`load_hf` sets it), the export also has the rest
    of that checkpoint: the other keys of config.json and generation_config.json, the tokenizer and
    other small files (:func:`~moetrain.models.hf.files.small_files`), and the tensors that the
    model does not have. These tensors are read from the source now and copied bit for bit. Set
    ``model.source`` to None to save the model alone.

    Each file is written atomically. An earlier export's files in ``folder`` are replaced, and those
    that this export does not have are removed at the end.

    Args:
        dtype: dtype of the weights. ``auto`` keeps the dtype of each tensor in ``model.source``,
            or without a source that of the parameter.
        format: format in which matrices are stored quantised (:mod:`moetrain.models.hf.packing`);
            ``dtype`` then applies to the other tensors. ``plain``: nothing is quantised.
        tokenizer: replaces the source's tokenizer, and sets the ids of special tokens.
        max_shard_bytes: largest size of a file; a larger single tensor gets a file of its own.

    Raises:
        ConfigError: a weight exceeds the range of ``dtype``, or is not finite and ``format`` cannot
            hold it, or the family's files cannot have ``format``, and nothing was written; or files
            of the source are gone or have changed, and everything else was written.
        ValueError: the family's format cannot express the model's architecture.
    """
    export = Export(
        model,
        folder,
        dtype=dtype,
        format=format,
        tokenizer=tokenizer,
        max_shard_bytes=max_shard_bytes,
    )
    parameters = dict(model.named_parameters()) | dict(model.named_buffers())
    if problem := export.misfit({name: x.detach for name, x in parameters.items()}):
        raise ConfigError("checkpoint.hf_dtype", problem)
    export.warn_about_router_bias(model)
    export.write((p.hf_name, parameters[p.parameter][p.place]) for p in model.pieces())
    if model.source is not None and Path(folder).samefile(model.source.folder):
        model.source = check_checkpoint(folder, model.arch)


def _extra_tensors(
    source: hf_files.HFSource, stack: ExitStack
) -> tuple[list[_Outgoing], list[str]]:
    """List the source's extra tensors, and the names of those that are gone or have changed.

    Files stay open until ``stack`` is left, since saving may replace them.
    """
    stored = {name: source.stored[name] for name in source.extra}
    holding = {file for x in stored.values() for file in (x.file, *x.parts.values())}
    files = {f: stack.enter_context(hf_files.open_shard(f)) for f in source.intact() & holding}
    tensors, lost = [], []
    for name, tensor in stored.items():
        if files.keys() >= {tensor.file, *tensor.parts.values()}:
            read = partial(_read_whole, files, name, tensor)
            size = math.prod(tensor.shape) * tensor.dtype.itemsize
            tensors.append(_Outgoing(name, tensor.dtype, size, read=read))
        else:
            lost.append(name)
    return tensors, lost


def _read_whole(
    files: Mapping[Path, safe_open], name: str, tensor: hf_files.FileTensor
) -> torch.Tensor:
    return hf_files.find_in(files, name, tensor)[...]


def _plan_shards(tensors: Iterable[_Outgoing], max_bytes: int) -> dict[str, list[_Outgoing]]:
    """Divide tensors, in order, into files of at most ``max_bytes``; return them by name."""
    shards: list[list[_Outgoing]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    count = len(shards)
    if count == 1:
        return {hf_files.SINGLE: shards[0]}
    names = (f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1))
    return dict(zip(names, shards, strict=True))
