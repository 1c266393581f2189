"""Pipes, oversized and damaged files in an untrusted folder are refused in one line."""

import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from moetrain.checkpoint.read import open_checkpoint
from moetrain.config import ConfigError
from moetrain.config.files import open_regular, read_regular
from moetrain.data.chat import ChatTemplate
from moetrain.data.tokenizer import ByteTokenizer, load_tokenizer
from moetrain.models.hf.files import HFSource, small_files
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.peft import attach_peft
from tests.lib.bad_folders import write_good
from tests.lib.checkpoints import save_tensors
from tests.lib.data_files import word_tokenizer

MODEL = ("config.json", "generation_config.json", "model.safetensors.index.json")
WEIGHTS = ("model-00001-of-00002.safetensors", "adapter_model.safetensors")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
TEMPLATES = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")
ADAPTER = ("adapter_config.json",)


def link(path: Path) -> None:
    path.symlink_to(path.name)  # to itself


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def bind(path: Path) -> None:
    where = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as door:  # the names of sockets may have 108 bytes
        door.bind(f"/proc/self/fd/{where}/{path.name}")
    os.close(where)


KINDS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a socket": bind,
    "a folder": Path.mkdir,
    "a link to nothing": lambda path: path.symlink_to("gone"),
    "a link to itself": link,
    "a terabyte of nothing": sparse,
}
TEXTS: dict[str, bytes] = {
    "deep": b"[" * 200_000 + b"]" * 200_000,
    "deep objects": b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
    "no UTF-8": b'{"a": "\xff"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "a long number": b'{"a": ' + b"9" * 100_000 + b"}",
    "a list": b"[]",
    "cut": b'{"a": ',
    "empty": b"",
}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """Write the files of a model, a tokenizer and an adapter."""
    folder = write_good(tmp_path_factory.mktemp("good"))
    word_tokenizer(folder, "a", "</s>", eos_token="</s>")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """Make a folder of links to the files of ``good``."""
    for path in good.iterdir():
        os.link(path, tmp_path / path.name)
    (tmp_path / "additional_chat_templates").mkdir()
    return tmp_path


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """Fail where a read would wait forever."""

    def fail(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def read(folder: Path, name: str) -> None:
    """Read the part of the folder that ``name`` belongs to."""
    if name in ADAPTER + WEIGHTS[1:]:
        attach_peft(load_hf(folder), folder)
    elif name in TOKENIZER + TEMPLATES:
        load_tokenizer(str(folder))
    else:
        HFSource.read(folder)


def refused(folder: Path, name: str) -> ConfigError:
    """Return the one-line error, which names the file, and check its time and memory."""
    seconds = time.process_time()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError) as caught:
        read(folder, name)
    assert time.process_time() - seconds < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 500_000  # KiB
    said = str(caught.value)
    assert name in said
    assert "\n" not in said
    assert len(said) < 1000
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODEL + WEIGHTS + TOKENIZER + TEMPLATES + ADAPTER)
def test_file_of_a_model_folder_that_is_no_file_is_refused_at_once(name, kind, folder):
    (folder / name).unlink(missing_ok=True)
    KINDS[kind](folder / name)
    error = refused(folder, name)
    wanted = "data.tokenizer" if name in TOKENIZER + TEMPLATES else "model.path"
    assert error.field in (wanted, "lora.path")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", MODEL + TOKENIZER + ADAPTER)
def test_json_of_a_model_folder_that_is_a_bomb_is_one_line(name, text, folder):
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_bytes(TEXTS[text])
    refused(folder, name)


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_that_is_no_utf8_is_one_line(name, folder):
    (folder / name).write_bytes(b"{{ '\xff' }}")
    assert "UTF-8" in str(refused(folder, name))


@pytest.mark.parametrize("kind", KINDS)
def test_template_of_a_setting_that_is_no_file_is_refused_at_once(kind, tmp_path):
    KINDS[kind](tmp_path / "t.jinja")
    with pytest.raises(ConfigError, match=r"^data\.chat_template: .*t\.jinja' ") as caught:
        ChatTemplate.of(ByteTokenizer(), str(tmp_path / "t.jinja"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "a terabyte of nothing"])
def test_exports_leave_out_what_is_no_file(kind, folder):
    before = small_files(folder)
    KINDS[kind](folder / "NOTICE")
    assert small_files(folder) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model-00000-00.safetensors"])
def test_file_of_a_checkpoint_that_is_no_file_is_refused_at_once(name, kind, tmp_path):
    saved = save_tensors(tmp_path, 1, {"model": {"x": torch.ones(2)}})
    (saved / name).unlink()
    KINDS[kind](saved / name)
    with pytest.raises(ConfigError, match=name) as caught:
        open_checkpoint(saved)
    assert "\n" not in str(caught.value)


def test_open_regular_opens_devices_and_pipes_never(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), Path("/dev/tty"), tmp_path):
        with pytest.raises(OSError, match=r"it is a|No such device"):
            open_regular(path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="it is a device"):
        read_regular(Path("/dev/null"), 10)
    assert len(os.listdir("/proc/self/fd")) == before


def test_read_regular_reads_no_more_than_it_may(tmp_path):
    (tmp_path / "file").write_bytes(b"0123456789")
    assert read_regular(tmp_path / "file", 10) == b"0123456789"
    assert read_regular(tmp_path / "file", 4, first=4) == b"0123"
    assert read_regular(tmp_path / "file", 10, first=1 << 60) == b"0123456789"
    assert read_regular(tmp_path / "file", 10, first=-5) == b""
    with pytest.raises(OSError, match="it has 10 bytes, and at most 9 are read"):
        read_regular(tmp_path / "file", 9)


def test_tokenizer_whose_pattern_never_ends_is_one_line(good, tmp_path):
    """The library gives up after ten million steps within one match, and panics."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((good / name).read_bytes())
    settings = json.loads((tmp_path / "tokenizer.json").read_text())
    pattern = {"type": "Split", "pattern": {"Regex": "(a|aa)+b"}, "behavior": "Isolated"}
    settings["pre_tokenizer"] = pattern | {"invert": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(str(tmp_path))
    assert len(tokenizer.encode_batch(["aaab"])) == 1
    with pytest.raises(ConfigError, match=f"encode a text: {tmp_path}/tokenizer.json: ") as caught:
        tokenizer.encode_batch(["a" * 5000])
    assert "\n" not in str(caught.value)
