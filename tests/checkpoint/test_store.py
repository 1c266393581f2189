"""Checkpoints in an object store: they are complete or absent, and fetched if the disk is lost."""

import shutil
from importlib.util import find_spec

import fsspec
import pytest

from moetrain.checkpoint.read import MANIFEST, STATE
from moetrain.checkpoint.save import Store
from moetrain.config import Config, ConfigError
from moetrain.config.sources import RunFailed
from moetrain.train.loop import Trainer
from tests.lib.checkpointed_runs import losses, names
from tests.lib.checkpoints import tensors_of
from tests.lib.command_lines import settled
from tests.lib.distributed import spawn

WORDS = [
    "train.sample_tokens=0",
    "optim.schedule=constant",
    "checkpoint.minutes=0",
    "checkpoint.interval=1",
]
URL = "memory://bucket/run"
STORED = [*WORDS, f"checkpoint.store={URL}"]
FILES = fsspec.filesystem("memory")


@pytest.fixture(autouse=True)
def _empty():
    FILES.store.clear()
    FILES.pseudo_dirs[:] = [""]


@pytest.mark.tier("long")
def test_a_run_that_lost_its_disk_goes_on_from_the_store(tiny, tmp_path):
    Trainer(tiny(*STORED, "train.steps=4")).fit()
    assert Store(URL).steps() == [3, 4]
    before = tensors_of(tmp_path / "out" / "checkpoints" / "step-00000004")
    shutil.rmtree(tmp_path / "out")
    second = Trainer(tiny(*STORED, "train.steps=6"))
    assert second.step == 4
    fetched = tensors_of(tmp_path / "out" / "checkpoints" / "step-00000004")
    assert fetched.keys() == before.keys()
    for group, tensors in before.items():
        assert all((fetched[group][name] == x).all() for name, x in tensors.items())
    second.fit()
    Trainer(tiny(*WORDS, "train.steps=6", f"output_dir={tmp_path / 'straight'}")).fit()
    straight = losses(tmp_path / "straight")
    assert losses(tmp_path / "out") == {step: straight[step] for step in (5, 6)}
    assert Store(URL).steps() == [5, 6]


@pytest.mark.tier("long")
def test_the_store_keeps_what_the_disk_does(tiny, tmp_path):
    Trainer(tiny(*STORED, "train.steps=7", "checkpoint.keep=1", "checkpoint.keep_every=3")).fit()
    assert Store(URL).steps() == [3, 6, 7]
    assert names(tmp_path / "out" / "checkpoints") == [f"step-0000000{n}" for n in (3, 6, 7)]
    there = {path.rsplit("/", 2)[1] for path in FILES.store}
    assert there == {f"step-0000000{n}" for n in (3, 6, 7)}


def test_incomplete_checkpoint_in_the_store_is_removed(tiny, tmp_path):
    Trainer(tiny(*STORED, "train.steps=4")).fit()
    FILES.rm_file(f"/bucket/run/step-00000004/{MANIFEST}")
    shutil.rmtree(tmp_path / "out")
    trainer = Trainer(tiny(*STORED, "train.steps=6"))
    assert trainer.step == 3
    trainer.fit()
    assert Store(URL).steps() == [5, 6]
    assert all("step-00000005" in path or "step-00000006" in path for path in FILES.store)


def test_the_manifest_comes_last_and_a_failure_ends_the_run(tiny, tmp_path, monkeypatch):
    put = FILES.put.__func__

    def refuse(self, sources, targets, **more):
        if "step-00000003" in targets[0] and targets[0].endswith(STATE):
            raise PermissionError("the bucket is closed")
        return put(self, sources, targets, **more)

    monkeypatch.setattr(type(FILES), "put", refuse)
    with pytest.raises(
        RunFailed, match=r"cannot copy .*step-00000003 to checkpoint.store: the bucket is closed"
    ):
        Trainer(tiny(*STORED, "train.steps=4")).fit()
    assert Store(URL).steps() == [1, 2]
    assert names(tmp_path / "out" / "checkpoints")[-1] == "step-00000003"  # it is on the disk


def test_a_step_that_is_saved_again_is_complete_at_no_wrong_instant(tiny, tmp_path, monkeypatch):
    trainer = Trainer(tiny(*STORED, "train.steps=2"))
    trainer.fit()
    seen = []
    put = Store.put
    monkeypatch.setattr(
        Store, "put", lambda self, *a: (seen.append(self.steps()), put(self, *a))[1]
    )
    shutil.rmtree(tmp_path / "out")
    again = Trainer(tiny(*STORED, "train.steps=2"))
    again.checkpointer.saved_at = -1
    again.save()
    assert seen == [[1], [1], [1]]
    assert Store(URL).steps() == [1, 2]


def test_an_older_or_failed_copy_is_left_alone(tiny, tmp_path):
    Trainer(tiny(*STORED, "train.steps=2")).fit()
    Trainer(tiny(*WORDS, "train.steps=3")).fit()
    trainer = Trainer(tiny(*STORED, "train.steps=4"))  # the disk's checkpoint is newer
    assert trainer.step == 3
    assert names(tmp_path / "out" / "checkpoints") == ["step-00000002", "step-00000003"]
    trainer.checkpointer.save_failed(3, None)
    assert Store(URL).steps() == [1, 2]


def test_damage_in_the_store_is_passed_over(tiny, tmp_path):
    Trainer(tiny(*STORED, "checkpoint.interval=2", "train.steps=4")).fit()
    path = next(p for p in FILES.store if "step-00000004/model" in p)
    FILES.pipe_file(path, flipped(FILES.cat_file(path)))
    shutil.rmtree(tmp_path / "out")
    trainer = Trainer(tiny(*STORED, "train.steps=5", "checkpoint.keep=1"))
    assert trainer.step == 2
    trainer.train_step()
    trainer.save()
    assert Store(URL).steps() == [3]


def flipped(data):
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("spoiled", [flipped, lambda data: data[:-1]], ids=["flipped", "cut"])
def test_damaged_file_on_the_disk_is_fetched_from_the_store(spoiled, tiny, tmp_path):
    Trainer(tiny(*STORED, "train.steps=4")).fit()
    file = tmp_path / "out" / "checkpoints" / "step-00000004" / "model-00000-00.safetensors"
    whole = file.read_bytes()
    file.write_bytes(spoiled(whole))
    assert Trainer(tiny(*STORED, "train.steps=6")).step == 4
    assert file.read_bytes() == whole
    for path in (name for name in FILES.store if "step-00000004/model" in name):
        FILES.pipe_file(path, spoiled(FILES.cat_file(path)))
    file.write_bytes(spoiled(whole))
    assert Trainer(tiny(*STORED, "train.steps=6")).step == 3


def ranks(words):
    trainer = Trainer(Config.load(None, words, environ={}))
    began = trainer.step
    trainer.fit()
    return began


@pytest.mark.tier("long")
def test_each_rank_copies_its_own_files(tiny_words, tmp_path):
    words = [*tiny_words, *WORDS, f"checkpoint.store=file://{tmp_path / 'store'}"]
    assert spawn(2, ranks, settled([*words, "train.steps=3"])) == [0, 0]
    disk, store = tmp_path / "out" / "checkpoints", tmp_path / "store"
    assert names(store) == names(disk) == ["step-00000002", "step-00000003"]
    assert names(store / "step-00000003") == names(disk / "step-00000003")
    assert any("-00001-" in name for name in names(store / "step-00000003"))
    shutil.rmtree(tmp_path / "out")
    assert spawn(2, ranks, settled([*words, "train.steps=4"])) == [3, 3]


@pytest.mark.parametrize(
    ("url", "words"),
    [("nowhere://x", "'nowhere://x': Protocol not known"), ("s3://b/x", "Install s3fs")],
)
def test_a_url_that_cannot_be_used_is_named(url, words, tiny):
    if url.startswith("s3") and find_spec("s3fs"):
        pytest.skip("s3fs is here")
    with pytest.raises(ConfigError, match=f"checkpoint.store: .*{words}"):
        Trainer(tiny(*WORDS, f"checkpoint.store={url}"))


def test_a_run_that_does_not_go_on_from_the_store_does_not_mix_with_it(tiny):
    Trainer(tiny(*STORED, "train.steps=2")).fit()
    with pytest.raises(ConfigError, match=r"holds step 2, but checkpoint\.resume is never"):
        Trainer(tiny(*STORED, "train.steps=2", "checkpoint.resume=never"))
