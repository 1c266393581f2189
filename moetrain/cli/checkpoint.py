"""``python -m moetrain.checkpoint``: inspect, verify, convert and compare checkpoints, on a CPU.

    inspect PATH        print the model and every group of tensors; with --tensors every tensor
    verify PATH         read every byte, and compare it with what was written
    export-hf PATH OUT  write a Hugging Face checkpoint, as checkpoint.save_hf does
    import-hf PATH OUT  write a checkpoint of step 0 into OUT from a Hugging Face folder
    export-gguf PATH OUT
                        write the Hugging Face folder PATH to a file OUT for llama.cpp
    merge PATH BASE OUT merge the adapters in PATH into the model BASE, and write the result to OUT
    upcycle PATH OUT    write a mixture of experts that computes the same as the dense model PATH;
                        both are Hugging Face folders
    diff PATH OTHER     print the tensors that differ, and by how much

Except where a Hugging Face folder is named, PATH is a step-... folder, or the output_dir of a run,
which stands for its newest checkpoint. For merge it may also be a folder of adapters in PEFT's
format, and an output_dir stands for the adapters that its run exported, if there are any.

The commands need little host memory: export-hf, merge and upcycle hold one parameter and two files
at a time, import-hf one file, and diff one tensor of each checkpoint, in float64.

The exit code is 1 if a checkpoint is damaged, or if diff finds a difference. It is 2 after an error
in the input, which one line on standard error explains. Otherwise it is 0.
"""

import argparse
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import lru_cache, partial, reduce
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import get_args

import torch
from pydantic import ValidationError
from safetensors import SafetensorError

from moetrain.checkpoint import read
from moetrain.checkpoint.save import SavePlan, begin, commit, cut_to_files, write_tensors
from moetrain.cli.main import Parser, command
from moetrain.config import ConfigError, LoraSection
from moetrain.config.files import fsync
from moetrain.models.architecture import Architecture
from moetrain.models.families import FAMILIES
from moetrain.models.hf.config import architecture_from_hf, exported_config
from moetrain.models.hf.files import (
    CONFIG,
    HFSource,
    TokenizerFiles,
    listing,
    read_json,
    resolve,
)
from moetrain.models.hf.load import check_checkpoint, filled, opened
from moetrain.models.hf.packing import ExportFormat
from moetrain.models.hf.peft import merge_peft, num_rows
from moetrain.models.hf.save import Export
from moetrain.models.hf.upcycling import Upcycling
from moetrain.models.parts.lora import Adapter
from moetrain.models.rules import ADAPTERS
from moetrain.models.transformer import Transformer
from moetrain.parallel.mesh import TensorSlice

_Merge = Callable[[str, torch.Tensor], torch.Tensor]
"""Returns the merged value of a weight, from its name and its value in the base."""


@command
def main(argv: Sequence[str] | None) -> int:
    parser = Parser("checkpoint", __doc__)
    parser.add_argument("command", choices=list(COMMANDS))
    parser.add_argument("path", metavar="PATH", type=Path)
    parser.add_argument(
        "other",
        metavar="OUT",
        type=Path,
        nargs="?",
        help="folder to write (export-gguf: file to write); for diff it is the checkpoint OTHER; "
        "for merge it is the model BASE, a Hugging Face folder or hub id",
    )
    parser.add_argument(
        "out", metavar="OUT", type=Path, nargs="?", help="merge: new folder to write"
    )
    parser.add_argument("--tensors", action="store_true", help="inspect: list every tensor")
    dtypes = ["auto", "bfloat16", "float16", "float32"]
    parser.add_argument(
        "--dtype",
        choices=dtypes,
        default="auto",
        help="export-hf and merge: dtype of the written weights; auto (default): that of "
        "the model that training began from, or float32 for a preset",
    )
    parser.add_argument(
        "--format",
        choices=get_args(ExportFormat),
        default="plain",
        help="export-hf and merge: format in which matrices are quantised; plain (default): they "
        "are not",
    )
    parser.add_argument(
        "--gguf_type",
        choices=["bf16", "f16", "f32", "q8_0"],
        default="bf16",
        help="export-gguf: type in which matrices are stored; default bf16",
    )
    upcycle = parser.add_argument_group("upcycle")
    add = upcycle.add_argument
    add("--num_experts", type=int, default=8, help="number of experts in each layer; default 8")
    meaning = "number of experts that each token is sent to; default 2"
    add("--num_experts_per_token", type=int, default=2, help=meaning)
    meaning = "number of experts among which the width of one MLP is divided; default 1"
    add("--split", type=int, default=1, help=meaning)
    meaning = (
        "standard deviation of the noise on copies of experts, as a share of their own; default 0"
    )
    add("--noise", type=float, default=0.0, help=meaning)
    meaning = "model family to write; unset: the one with the same attention as the dense model"
    add("--family", help=meaning)
    words = parser.parse_args(argv)
    given = 1 + (words.other is not None) + (words.out is not None)
    wanted = {"inspect": 1, "verify": 1, "merge": 3}.get(words.command, 2)
    if given != wanted:
        paths = {1: "one path", 2: "two paths", 3: "three paths: the adapters, BASE and OUT"}
        raise ConfigError("checkpoint", f"{words.command} takes {paths[wanted]}, not {given}")
    try:
        return COMMANDS[words.command](words)
    except read.DamagedCheckpoint as error:
        print(f"damaged: {error.problem}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # standard output was closed; no file is at fault
        raise
    except (OSError, SafetensorError) as error:
        raise ConfigError("checkpoint", f"{error}; give another path, or make room") from None


def _open(path: Path) -> read.Checkpoint:
    try:
        return read.open_checkpoint(read.newest_in(path))
    except read.DamagedCheckpoint:
        raise
    except ConfigError as error:
        raise ConfigError("PATH", error.problem) from None


def _architecture(found: read.Checkpoint) -> Architecture:
    fields = found.state["architecture"]
    try:
        kind = FAMILIES[fields["family"]].architecture
        return kind.model_validate_json(json.dumps(fields))
    except (KeyError, ValidationError) as error:
        what = f"{str(found.folder)!r} has a model that this version of moetrain cannot build"
        raise ConfigError("checkpoint", f"{what}: {error}") from None


def _inspect(words: argparse.Namespace) -> int:
    found = _open(words.path)
    arch = _architecture(found)
    print(f"{found.folder}: step {found.state['step']:,}, {found.state['tokens']:,} tokens")
    print(f"{arch.family}, {arch.num_params():,} parameters, {arch.num_layers} layers")
    for group in found.contents.groups:
        tensors = found.group(group)
        size = sum(stored.shape.numel() * stored.dtype.itemsize for stored in tensors.values())
        pieces = sum(len(stored.entry.pieces) for stored in tensors.values())
        print(f"{group}: {len(tensors)} tensors in {pieces} pieces, {size / 2**30:.3f} GiB")
        for name, stored in tensors.items() if words.tensors else ():
            dtype = str(stored.dtype).removeprefix("torch.")
            print(f"  {name} {dtype} {list(stored.shape)}")
    return 0


def _verify(words: argparse.Namespace) -> int:
    found = _open(words.path)
    num_bytes, damaged = 0, False
    for group, name, stored in found.stored():
        try:
            stored.check()
        except read.DamagedCheckpoint as error:
            print(f"damaged: {group} {name}: {error.problem}", file=sys.stderr)
            damaged = True
        num_bytes += stored.shape.numel() * stored.dtype.itemsize
    if not damaged:
        print(f"{found.folder}: {num_bytes / 2**30:.3f} GiB of tensors are as written")
    return int(damaged)


def _diff(words: argparse.Namespace) -> int:
    one, two = (
        {(group, name): stored for group, name, stored in _open(path).stored()}
        for path in (words.path, words.other)
    )
    lines = []
    for path, mine, others in ((words.path, one, two), (words.other, two, one)):
        absent, groups = {*mine} - {*others}, {group for group, _ in others}
        for group, count in Counter(group for group, _ in absent).items():
            if group not in groups:  # such as optim
                lines.append(f"{group}: all {count} tensors are only in {path}")
        lines += [f"{group} {name}: only in {path}" for group, name in absent if group in groups]
    for key in one.keys() & two.keys():
        a, b, name = one[key], two[key], " ".join(key)
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            lines.append(f"{name}: {a.dtype} {list(a.shape)}, {b.dtype} {list(b.shape)}")
            continue
        x, y = a[()].double(), b[()].double()
        # Two equal infinities, or two NaNs, count as equal.
        apart = (x - y).masked_fill((x == y) | (x.isnan() & y.isnan()), 0.0)
        if apart.any():
            norm = x.nan_to_num(0.0, 0.0, 0.0).norm()
            largest = apart.abs().max().item()
            rest = apart.norm() / norm
            share = (apart != 0).double().mean().item()
            lines.append(
                f"{name}: differs by at most {largest:.3g}, in norm by {rest:.3g} of its own, in "
                f"{share:.1%} of its elements"
            )
    print("\n".join(sorted(lines)) or "no tensor differs")
    return int(bool(lines))


def _check_out(out: Path, source: Path) -> None:
    """Raise ConfigError if an export to ``out`` would overwrite files of a checkpoint or a run."""
    if out.resolve().is_relative_to(source.resolve()):
        raise ConfigError(
            "checkpoint", f"OUT {str(out)!r} is in the checkpoint itself; give another"
        )
    if read.list_checkpoints(out.resolve() / "checkpoints"):  # the run could not be resumed then
        problem = "is a run's output folder, whose config.json would be replaced; give another"
        raise ConfigError("checkpoint", f"OUT {str(out)!r} {problem}")


def _export_hf(words: argparse.Namespace) -> int:
    found = _open(words.path)
    _check_out(words.other, found.folder)
    arch = _architecture(found)
    with torch.device("meta"):
        model = Transformer(arch)
    stored = found.group("model")
    needed = dict.fromkeys(piece.parameter for piece in model.pieces())
    if absent := [name for name in needed if name not in stored]:
        raise ConfigError(
            "checkpoint",
            f"{str(found.folder)!r} lacks weights that were not trained ({listing(absent, 2)}); "
            f"add them by python -m moetrain.checkpoint merge {found.folder} BASE OUT, where BASE "
            "is the model that the run began from",
        )
    began = found.state["config"].get("model", {}).get("path")
    if began is not None:
        model.source = check_checkpoint(resolve(began), arch)
    tokenizer = _tokenizer(found)
    whole = lru_cache(1)(lambda parameter: stored[parameter][()])  # one parameter at a time
    # The source's files may have another layout, which the export keeps.
    weights = ((p.hf_name, whole(p.parameter)[p.place]) for p in model.pieces())
    export = Export(model, words.other, dtype=words.dtype, format=words.format, tokenizer=tokenizer)
    export.write(weights)
    print(f"{words.other}: the weights of {found.folder}")
    return 0


def _tokenizer(found: read.Checkpoint) -> TokenizerFiles | None:
    """Return the tokenizer of a checkpoint's run; None: it had none."""
    data = found.state["config"].get("data", {})
    if data.get("source") == "synthetic" or "tokenizer" not in data:
        return None
    from moetrain.data.tokenizer import load_tokenizer

    new = data.get("new_tokens", ())
    # The file that data.chat_template names may have changed since training.
    template = found.state.get("chat_template")
    return load_tokenizer(data["tokenizer"], new_tokens=new).export(template)


def _merge(words: argparse.Namespace) -> int:
    with _named({"model.path": "BASE", "lora.path": "PATH"}):
        base = resolve(words.other, field="BASE", for_adapters="give that model in place of {}")
        for source in (base, words.path):
            _check_out(words.out, source)
        if words.out.exists() and not (words.out.is_dir() and not any(words.out.iterdir())):
            raise ConfigError("OUT", f"{str(words.out)!r} is there already; give a new folder")
        arch = architecture_from_hf(read_json(base / CONFIG))
        folders = (words.path, words.path / "adapter")
        adapter = next((f for f in folders if (f / "adapter_config.json").is_file()), None)
        if adapter is None:
            found = _open(words.path)
            arch, tokenizer = _architecture(found), _tokenizer(found)
            make, name = partial(_merge_checkpoint, found), found.folder
        else:
            arch, tokenizer = _with_adapters_tokens(adapter, base, arch)
            make, name = partial(merge_peft, folder=adapter), adapter
        source = check_checkpoint(base, arch)
        with torch.device("meta"):
            model = Transformer(arch)
        model.source = source
        merge = make(model)
        new = begin(words.out)
        try:
            export = Export(model, new, dtype=words.dtype, format=words.format, tokenizer=tokenizer)
            export.write(_merged(model, source, merge, export))
            for path in (*new.rglob("*"), new):
                fsync(path)
            new.rename(words.out)
            fsync(words.out.absolute().parent)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    print(f"{words.out}: {base} with what {name} holds")
    return 0


def _merged(
    model: Transformer, source: HFSource, merge: _Merge, export: Export
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the files of ``source``, each with its name, after ``merge``.

    One parameter at a time is in memory, in fp32 or wider.

    Raises ConfigError: a merged weight exceeds the range of its dtype in the files.
    """
    dtypes = (source.stored[name].dtype for name in source.own)
    width = reduce(torch.promote_types, dtypes, torch.float32)
    shapes = {name: x.shape for name, x in (*model.named_parameters(), *model.named_buffers())}
    with opened(source, model.arch) as parts:
        for name, pieces in groupby(model.pieces(), attrgetter("parameter")):
            empty = torch.zeros(shapes[name], dtype=width)
            weight = merge(name, filled(parts, {name: empty})[name])
            if problem := export.misfit({name: lambda weight=weight: weight}):
                raise ConfigError("--dtype", problem)
            yield from ((piece.hf_name, weight[piece.place]) for piece in pieces)


def _with_adapters_tokens(
    adapter: Path, base: Path, arch: Architecture
) -> tuple[Architecture, TokenizerFiles | None]:
    """Return the architecture with rows for the adapters' new tokens, and their tokenizer.

    It is the base's tokenizer with additions, so an export keeps the ids that end texts in the
    base. It is None if the folder of the adapters has none; that of the base is then kept.
    """
    if not (adapter / "tokenizer.json").is_file():
        return arch, None
    from moetrain.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(adapter))
    rows = num_rows(adapter, tokenizer.vocab_size)
    arch = arch.model_copy(update={"vocab_size": max(rows, arch.vocab_size)})
    load_tokenizer(str(adapter), arch.vocab_size)  # raises if it has tokens without rows
    return arch, replace(tokenizer.export(), origin=base / "tokenizer.json")


def _merge_checkpoint(found: read.Checkpoint, model: Transformer) -> _Merge:
    """Return the function that merges what a run trained, adapters too, into a weight.

    Raises ConfigError: the run trained all weights.
    """
    stored = found.group("model")
    if all(name in stored for name, _ in model.named_parameters()):
        raise ConfigError(
            "PATH",
            f"{str(found.folder)!r} holds all weights, and no adapters; use export-hf",
        )
    lora = LoraSection.model_validate(found.state["config"].get("lora", {}))

    def merge(name: str, weight: torch.Tensor) -> torch.Tensor:
        if name in stored:
            return stored[name][()].to(weight.dtype)
        halves = [name + half for half in ADAPTERS]
        if halves[0] not in stored:
            return weight
        a, b, *magnitude = (stored[half][()].float() for half in halves if half in stored)
        return Adapter(a, b, lora.scale, 0.0, *magnitude).merged(weight)

    return merge


def _export_gguf(words: argparse.Namespace) -> int:
    from moetrain.cli.gguf_file import export_gguf

    with _named({"model.path": "PATH"}):
        folder = resolve(words.path, field="PATH")
        count = export_gguf(folder, words.other, words.gguf_type)
    print(f"{words.other}: {count} tensors of {folder}")
    return 0


@contextmanager
def _named(names: Mapping[str, str]) -> Iterator[None]:
    """Raise ConfigErrors on a setting in ``names`` as errors on the argument of that name."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(names.get(error.field, error.field), error.problem) from None


def _import_hf(words: argparse.Namespace) -> int:
    folder = resolve(words.path)
    arch = architecture_from_hf(read_json(folder / CONFIG))
    plan = SavePlan(root=words.other, step=0, keep=1)
    state = {
        **dict.fromkeys(("step", "tokens", "sample_index"), 0),
        "architecture": arch.model_dump(mode="json"),
        "config": {"model": {"path": str(folder.absolute())}},
    }
    rng = {"cpu": TensorSlice.all_of(torch.Generator().manual_seed(0).get_state())}
    new = begin(plan.path)
    try:
        reports = [read.Contents({}, {"model": {}, "optim": {}})]
        for number, parts in enumerate(_parameters(folder, arch)):
            path = new / f"model-00000-{number:02d}.safetensors"
            reports.append(write_tensors(path, "model", parts))
        reports.append(write_tensors(new / "rng-00000-00.safetensors", "rng", rng))
        commit(new, plan.path, read.Contents.together(reports), state)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    print(
        f"wrote {plan.path}; to begin from it, set checkpoint.resume to it and model.path {folder}"
    )
    return 0


def _parameters(folder: Path, arch: Architecture) -> Iterator[dict[str, TensorSlice]]:
    """Yield the tensors of a Hugging Face checkpoint, divided into the files to write."""
    source = check_checkpoint(folder, arch)
    with torch.device("meta"):
        model = Transformer(arch)
    rules = arch.plan().rules(model)
    empty = {
        name: TensorSlice.all_of(parameter.detach().to(rules[name].storage))
        for name, parameter in model.named_parameters()
    }
    empty |= {name: TensorSlice.all_of(buffer) for name, buffer in model.named_buffers()}
    with opened(source, arch) as parts:
        for group in cut_to_files(empty):
            # Zeros, since not all files hold the routers' biases.
            whole = {name: torch.zeros_like(p.tensor, device="cpu") for name, p in group.items()}
            values = filled(parts, whole)
            yield {name: TensorSlice.all_of(tensor) for name, tensor in values.items()}


def _upcycle(words: argparse.Namespace) -> int:
    folder = resolve(words.path)
    _check_out(words.other, folder)
    dense = architecture_from_hf(read_json(folder / CONFIG))
    if dense.num_labels:
        raise ConfigError("PATH", f"{words.path} is a reward model; upcycle a language model")
    made = Upcycling(**{field.name: getattr(words, field.name) for field in fields(Upcycling)})
    try:
        arch = made.architecture(dense)
        config = exported_config(arch, None)
    except ValueError as error:
        problem = error if isinstance(error, ConfigError) else ConfigError("family", str(error))
        raise problem from None
    source = check_checkpoint(folder, dense)
    width = reduce(torch.promote_types, (source.stored[name].dtype for name in source.own))
    with torch.device("meta"):
        model, before = Transformer(arch).to(width), Transformer(dense).to(width)
    ids = {key: value for key, value in source.config.items() if key.endswith("_token_id")}
    model.source = replace(source, config=config | ids, weight_map=None, extra=())
    with opened(source, dense) as parts:
        weights = made.weights(model, before, partial(filled, parts))
        Export(model, words.other).write(weights)
    print(f"{words.other}: {arch.family}, {arch.num_params():,} parameters, made of {folder}")
    return 0


_ALL = (_inspect, _verify, _export_hf, _export_gguf, _import_hf, _merge, _upcycle, _diff)
COMMANDS = {work.__name__.strip("_").replace("_", "-"): work for work in _ALL}
