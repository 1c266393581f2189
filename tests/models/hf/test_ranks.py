"""Hugging Face checkpoints on several ranks: each reads its part and writes its own files."""

import re
import threading
from pathlib import Path

import pytest
import torch

from moetrain.config import Config
from moetrain.models.families import PRESETS
from moetrain.models.hf.save import save_hf
from moetrain.models.transformer import Transformer
from moetrain.parallel.world import join_world
from moetrain.train.engine import Engine
from moetrain.train.session import resolve_run
from tests.lib.distributed import spawn
from tests.lib.engines import WORDS
from tests.lib.hf_weights import tensors_in

SHARD_BYTES = 10_000_000


def anonymous():
    """Return the bytes of anonymous memory: mapped files are evicted if the system needs memory."""
    return 1024 * int(re.search(r"RssAnon:\s*(\d+)", Path("/proc/self/status").read_text())[1])


class Peak:
    """Measures the peak of :func:`anonymous` beyond its initial value."""

    def __enter__(self):
        self.start = self.most = anonymous()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()
        return self

    def sample(self):
        while not self.done.wait(0.0005):
            self.most = max(self.most, anonymous())

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()
        self.most = max(self.most, anonymous()) - self.start


def load_and_export(words, folder):
    """Return the bytes of the load, this rank's part of the model, and its written files."""
    config, arch = resolve_run(Config.load(None, words, environ={}))
    world = join_world(config, arch)
    with Peak() as peak:
        engine = Engine(config, arch, world)
    part = sum(member.local.nbytes for member in engine.fsdp.members.values())
    engine.save_hf(folder, max_shard_bytes=SHARD_BYTES)
    with torch.no_grad():
        next(iter(engine.fsdp.members.values())).local.fill_(7e4 if world.rank else 0.0)
    try:  # all ranks must learn of one rank's error
        engine.save_hf(folder, dtype="float16")
    except ValueError as error:
        return peak.most, part, str(error)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_rank_loads_its_part_alone_and_all_export(tmp_path):
    sizes = {"vocab_size": 4096, "hidden_size": 512, "moe_intermediate_size": 512}
    model = Transformer(PRESETS["debug"].model_copy(update=sizes)).bfloat16()
    model.init_weights(std=0.02, seed=0)
    save_hf(model, tmp_path / "source", max_shard_bytes=SHARD_BYTES)
    source = tensors_in(tmp_path / "source")
    words = [w for w in WORDS if not w.startswith("model.")]
    words += ["parallel.ep=2", "parallel.tp=2"]
    words += [f"model.path={tmp_path / 'source'}", "train.micro_batch_size=2"]
    words += ["data.tokenizer=byte"]
    found = spawn(2, load_and_export, words, tmp_path / "out", timeout=200)
    largest = 2 * max(tensor.nbytes for tensor in source.values())  # as fp32
    whole = 4 * sum(tensor.numel() for tensor in source.values())
    for peak, part, error in found:
        assert part < 0.52 * whole
        assert peak < 1.2 * part + largest
        assert re.match(r"checkpoint\.hf_dtype: .*float16 cannot hold .* 7e\+04", error)
    exported = tensors_in(tmp_path / "out")
    assert exported.keys() == source.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in source.items())
    files = {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert files == {path.name for path in (tmp_path / "source").glob("*.safetensors")}
    assert len(files) > 4
