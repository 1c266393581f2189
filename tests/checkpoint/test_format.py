"""Checkpoint files: pieces of tensors are found by any box, and every damage is detected."""

import itertools
import json
import os
import random
import re
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moetrain.checkpoint import read as checkpoint_read
from moetrain.checkpoint import save as checkpoint_save
from moetrain.checkpoint.read import DamagedCheckpoint, open_checkpoint
from moetrain.checkpoint.save import SavePlan, Saver
from moetrain.config import ConfigError
from moetrain.parallel.mesh import TensorSlice
from moetrain.train.run_folder import RunFolder
from tests.lib.checkpoints import alone, save, save_tensors, state_of, tensors_of

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.float64]


class Friends:
    """A rendezvous of ranks that save one after the other, the main one last."""

    def __init__(self):
        self.reports, self.rank, self.folder = [], 0, ""

    def broadcast(self, text):
        if text:
            self.folder = text
        return self.folder

    def gather(self, text):
        self.reports.append(text)
        return self.reports[-1:] + self.reports[:-1]


def grid(shape, cuts, random_):
    """Return disjoint boxes that fill ``shape``: each dim in ``cuts`` uneven parts."""
    edges = [
        sorted({0, size, *(random_.randrange(size + 1) for _ in range(cut - 1))})
        for size, cut in zip(shape, cuts, strict=True)
    ]
    spans = [list(itertools.pairwise(edge)) for edge in edges]
    return [tuple(slice(*span) for span in spans) for spans in itertools.product(*spans)]


@pytest.fixture
def small_chunks(monkeypatch):
    """Make checksums cover 64 bytes and files hold 300, so that small checkpoints have many."""
    set_chunks(monkeypatch, 64)


def set_chunks(monkeypatch, size):
    monkeypatch.setattr(checkpoint_read, "CHUNK", size)
    monkeypatch.setattr(checkpoint_save, "FILE_BYTES", 300)


def begin_at(monkeypatch, folder):
    """Let every rank write into ``folder``."""
    monkeypatch.setattr(checkpoint_save, "begin", lambda final: folder)


@pytest.mark.parametrize("seed", range(12))
def test_any_box_is_read_from_any_pieces(seed, small_chunks, tmp_path, monkeypatch):
    drawn, dtype = random.Random(seed), DTYPES[seed % len(DTYPES)]
    dims = seed % 4
    shape = [drawn.randrange(1, 12) for _ in range(dims)]
    whole = (torch.rand(shape) * 100).to(dtype)
    boxes = grid(shape, [drawn.randrange(1, 4) for _ in shape], drawn)
    drawn.shuffle(boxes)
    ranks = [{} for _ in boxes]
    for rank, box in enumerate(boxes):
        ranks[rank]["x"] = TensorSlice(whole[box].contiguous(), shape, box)
        ranks[rank]["all"] = TensorSlice.all_of(whole)._replace(copy=rank, copies=len(boxes))
        ranks[rank]["nothing"] = TensorSlice.all_of(torch.empty(0, 3))
    new = tmp_path / "new"
    new.mkdir()
    begin_at(monkeypatch, new)
    friends = Friends()
    for rank in reversed(range(len(ranks))):
        friends.rank = rank
        if rank:
            friends.folder = json.dumps({"value": str(new)})
        saver = Saver(friends)
        plan = SavePlan(root=tmp_path, step=1, keep=2)
        saver.start(plan, {"model": ranks[rank], "none": {}}, state_of(1))
        saver.wait()
    found = open_checkpoint(tmp_path / "step-00000001")
    assert [*found.contents.groups] == ["model", "none"]
    stored = found.group("model")
    assert set(stored) == {"x", "all"}  # tensors without elements are not stored
    assert sum(f.size for f in found.contents.files.values()) > 0
    assert len(found.contents.groups["model"]["all"].pieces) == 1  # although all ranks have it
    for name in stored:
        assert (stored[name].shape, stored[name].dtype) == (whole.shape, dtype)
        assert torch.equal(stored[name][()], whole)
        for _ in range(20):
            box = tuple(slice(*sorted(drawn.choices(range(n + 1), k=2))) for n in shape)
            assert torch.equal(stored[name][box], whole[box]), (name, box)
    for file in found.contents.files:  # other programs can read the files themselves
        if file.endswith(".safetensors"):
            with safe_open(found.folder / file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  not a mapping
                    assert opened.get_tensor(name).dtype == dtype


def test_rank_reads_only_its_own_pieces(small_chunks, tmp_path, monkeypatch):
    x = torch.arange(10_000.0).view(100, 100)
    stored = open_checkpoint(save_tensors(tmp_path, 1, {"model": {"x": x}})).group("model")["x"]
    read, sizes, empty = os.preadv, [], torch.empty

    def count(descriptor, buffers, offset):
        sizes.append(sum(len(b) for b in buffers))
        return read(descriptor, buffers, offset)

    made = []

    def note(*shape, **kwargs):
        made.append(empty(*shape, **kwargs))
        return made[-1]

    monkeypatch.setattr(os, "preadv", count)
    monkeypatch.setattr(checkpoint_read.torch, "empty", note)
    assert torch.equal(stored[slice(50, 60), slice(0, 100)], x[50:60])
    assert 4000 <= sum(sizes) <= 4000 + 2 * 64
    assert sum(tensor.nbytes for tensor in made) == 4000
    sizes.clear()
    assert torch.equal(stored[slice(50, 60), slice(3, 9)], x[50:60, 3:9])
    assert sum(sizes) <= 4000 + 2 * 64
    sizes.clear()
    assert stored[slice(7, 7), slice(0, 100)].shape == (0, 100)
    assert sizes == []


def test_the_first_format_is_refused_in_one_line(tmp_path):
    root = tmp_path / "checkpoints"
    folder = root / "step-00000003"
    folder.mkdir(parents=True)
    save_file({"x": torch.zeros(3)}, folder / "model.safetensors")
    (folder / "state.json").write_text(json.dumps(state_of(3)))
    with pytest.raises(ConfigError, match=r"format 1.*reads only 2.*export") as caught:
        open_checkpoint(folder)
    assert not isinstance(caught.value, DamagedCheckpoint)
    assert len(str(caught.value).splitlines()) == 1
    save(root, 2)
    with pytest.raises(ConfigError, match="format 1"):  # an older checkpoint does not replace it
        RunFolder(tmp_path).find("auto")


def test_another_version_is_one_line_that_names_the_way_out(tmp_path):
    folder = save(tmp_path, 1)
    data = (folder / "manifest.json").read_bytes().replace(b'"format": 2', b'"format": 3')
    body = data[: -checkpoint_read._SEAL_BYTES]
    seal = f', "crc32": "{checkpoint_read.crc_of(body)}"}}\n'
    (folder / "manifest.json").write_bytes(body + seal.encode())
    with pytest.raises(ConfigError, match=r"format 3.*reads only 2.*export") as caught:
        open_checkpoint(folder)
    assert not isinstance(caught.value, DamagedCheckpoint)


def test_a_tensor_that_no_rank_has_whole_is_not_saved(tmp_path):
    part = TensorSlice(torch.zeros(3), [6], (slice(0, 3),))
    saver = Saver(alone())
    saver.start(SavePlan(root=tmp_path, step=1, keep=2), {"model": {"x": part}}, state_of(1))
    with pytest.raises(ValueError, match="lacks parts of"):
        saver.wait()
    assert list(tmp_path.iterdir()) == []


# ---- damage -------------------------------------------------------------------------------------


def mutate(data, drawn):
    """Return a damaged copy of ``data``, with typical accidents."""
    at, kind = drawn.randrange(len(data)), drawn.randrange(6)
    if kind == 0:  # cut short
        return data[:at] + bytes([data[at] ^ 1 << drawn.randrange(8)]) + data[at + 1 :]
    if kind == 1:  # cut short
        return data[:at]
    if kind == 2:  # written twice
        return data[:at] + data[max(0, at - 9) : at + 1] + data[at:]
    if kind == 3:  # a hole
        return data[:at] + bytes(min(64, len(data) - at)) + data[at + 64 :]
    if kind == 4:  # random bytes
        return data[:at] + drawn.randbytes(min(8, len(data) - at)) + data[at + 8 :]
    to = drawn.randrange(len(data))  # a misplaced stretch
    stretch = data[at : at + 32]
    rest = data[:at] + data[at + 32 :]
    return rest[:to] + stretch + rest[to:]


@pytest.mark.tier("long")
def test_every_one_of_10_000_mutations_is_found(tmp_path, monkeypatch):
    set_chunks(monkeypatch, 400)
    groups = {
        "model": {"w": torch.randn(20, 7), "b": torch.randn(5)},
        "optim": {"w.step": torch.tensor(3.0), "w.exp_avg": torch.randn(20, 7).bfloat16()},
    }
    folder = save_tensors(tmp_path, 1, groups)
    files = {path: path.read_bytes() for path in folder.iterdir()}
    assert len(files) >= 5
    drawn, found = random.Random(0), 0
    paths = sorted(files)
    while found < 10_000:
        path = paths[found % len(paths)]
        data = mutate(files[path], drawn)
        if data == files[path]:  # zeros written over zeros
            continue
        path.write_bytes(data)
        with pytest.raises(DamagedCheckpoint) as caught:
            tensors_of(folder)
        assert str(folder) in caught.value.problem
        path.write_bytes(files[path])
        found += 1
    tensors_of(folder)


@pytest.mark.parametrize("kind", ["missing", "folder", "unreadable", "link"])
def test_every_file_is_missed(kind, tmp_path):
    folder = save(tmp_path / "a", 1)
    for path in sorted(folder.iterdir()):
        broken = tmp_path / "b" / folder.name
        shutil.rmtree(broken.parent, ignore_errors=True)
        shutil.copytree(folder, broken)
        (broken / path.name).unlink()
        if kind == "folder":
            (broken / path.name).mkdir()
        elif kind == "link":
            (broken / path.name).symlink_to("nowhere")
        elif kind == "unreadable":
            os.mkfifo(broken / path.name)
        with pytest.raises(DamagedCheckpoint, match=re.escape(path.name)) as caught:
            tensors_of(broken)
        assert len(str(caught.value).splitlines()) == 1


def test_save_into_a_read_only_folder_keeps_earlier_files(tmp_path, monkeypatch):
    first = save(tmp_path, 1)
    real = os.mkdir

    def refuse(path, *args, **kwargs):
        if "step-00000002" in str(path):
            raise PermissionError(30, "Read-only file system", str(path))
        real(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", refuse)  # root may write anywhere
    with pytest.raises(RuntimeError, match=r"cannot write the checkpoint .*Read-only"):
        save(tmp_path, 2)
    assert list(tmp_path.iterdir()) == [first]
    tensors_of(first)
