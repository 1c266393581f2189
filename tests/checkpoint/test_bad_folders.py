"""A bad checkpoint folder is refused in one line, soon, and never with a traceback.

Bad names and shapes of tensors are in test_hf_weights.py and test_hf_export.py.
"""

import json
import os
import re
import shutil
import struct
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants as hub_constants
from safetensors.torch import load_file, save_file

from moetrain.cli.train import main
from moetrain.config import ConfigError, ModelSection
from moetrain.models.hf import files
from moetrain.models.hf.files import CONFIG, GENERATION, INDEX
from moetrain.models.hf.load import resolve_architecture
from tests.lib.bad_folders import write_good

SIZES = {
    "vocab_size": 264,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 12,
    "max_position_embeddings": 64,
}
MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return write_good(tmp_path_factory.mktemp("good"))


@pytest.fixture
def copy(good, tmp_path) -> Path:
    """Copy the folder ``good``, for a test to damage."""
    return Path(shutil.copytree(good, tmp_path / "checkpoint"))


def refused(path: str | Path) -> str:
    """Return the one line of error about ``path``, which must come within seconds."""
    start = time.process_time()
    with pytest.raises(ConfigError) as caught:
        # The path is not checked: the settings have their own rules for it.
        resolve_architecture(ModelSection.model_construct(path=str(path)))
    assert time.process_time() - start < 5
    assert caught.value.field == "model.path"
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    return caught.value.problem


def test_undamaged_folder_is_read(copy):
    arch = resolve_architecture(ModelSection(path=str(copy)))
    assert arch.num_experts == 4


# config.json
HUGE = 10**18
SIZE_KEYS = [k for k in (*SIZES, *MOE) if k != "model_type"]
BAD_VALUES = [-1, 0, HUGE, 2.0, True, "2", [2], {"a": 2}, "NaN", "Infinity", "-Infinity"]
# Null has a meaning there: the number of query heads, or width / heads.
NULL_MEANS_SOMETHING = {"num_key_value_heads", "head_dim"}


def config_text(change: dict) -> str:
    """Return JSON of a config; "NaN" and the like become bare literals, as Python's json takes."""
    text = json.dumps({**SIZES, **MOE, **change})
    for literal in ("-Infinity", "Infinity", "NaN"):
        text = text.replace(f'"{literal}"', literal)
    return text


@pytest.mark.parametrize("key", SIZE_KEYS)
def test_config_json_with_bad_sizes_is_refused(key, copy):
    for value in [*BAD_VALUES, *([] if key in NULL_MEANS_SOMETHING else [None])]:
        if (key, value) == ("num_experts", 0):
            continue  # a dense model, which contradicts the weights
        (copy / CONFIG).write_text(config_text({key: value}))
        assert f"{key} is " in refused(copy), (key, value)


OTHER_VALUES = {
    "norm": {"rms_norm_eps": -1.0},
    "norm NaN": {"rms_norm_eps": "NaN"},
    "norm text": {"rms_norm_eps": "1e-6"},
    "theta": {"rope_theta": 0},
    "theta infinite": {"rope_theta": "Infinity"},
    "theta beyond floats": {"rope_theta": 10**400},
    "theta null": {"rope_theta": None},
    "coefficient": {"router_aux_loss_coef": -0.1},
    "coefficient NaN": {"router_aux_loss_coef": "NaN"},
    "tie": {"tie_word_embeddings": "no"},
    "tie number": {"tie_word_embeddings": 1},
    "bias null": {"attention_bias": None},
    "step zero": {"decoder_sparse_step": 0},
    "step negative": {"decoder_sparse_step": -2},
    "step text": {"decoder_sparse_step": "1"},
    "dense layers a number": {"mlp_only_layers": 3},
    "dense layers text": {"mlp_only_layers": "01"},
    "window zero": {"use_sliding_window": True, "sliding_window": 0},
    "window negative": {"use_sliding_window": True, "sliding_window": -4},
    "window text": {"use_sliding_window": True, "sliding_window": "4"},
    "use of windows": {"use_sliding_window": "yes"},
    "two spellings": {"num_local_experts": 8},
    "more chosen than there are": {"num_experts_per_tok": 5},
    "no expert": {"num_experts": 0},
    "heads too many": {"num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": None},
    "odd head": {"head_dim": 7},
    "key/value heads": {"num_attention_heads": 2, "num_key_value_heads": 3},
    "model type a list": {"model_type": ["qwen3_moe"]},
    "model type an object": {"model_type": {}},
    "model type unknown": {"model_type": "qwen9"},
    "activation": {"hidden_act": ["silu"]},
    "rope a list": {"rope_scaling": [1, 2]},
    "rope text": {"rope_scaling": "yarn"},
    "rope type a list": {"rope_scaling": {"rope_type": ["yarn"]}},
    "rope type null": {"rope_scaling": {"rope_type": None}},
    "rope factor": {"rope_scaling": {"rope_type": "yarn", "factor": -4.0}},
    "rope factor NaN": {"rope_scaling": {"rope_type": "linear", "factor": "NaN"}},
    "rope factor bool": {"rope_scaling": {"rope_type": "linear", "factor": True}},
    "rope origin": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": -1}
    },
    "rope origin a float": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64.0}
    },
    "rope bands": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 4.0,
            "high_freq_factor": 4.0,
        }
    },
    "quantized": {"quantization_config": {}},
    "extra layers": {"num_nextn_predict_layers": -1},
    "extra layers bool": {"num_nextn_predict_layers": True},
    "all sizes large": dict.fromkeys(("vocab_size", "hidden_size", "head_dim"), 2**31 - 1),
    "as many layers as may be": {"num_hidden_layers": 10_000, "num_experts": 65_536},
    "another vocabulary": {"vocab_size": 265},
}


@pytest.mark.parametrize("case", OTHER_VALUES)
def test_config_json_with_bad_values_is_refused(case, copy):
    (copy / CONFIG).write_text(config_text(OTHER_VALUES[case]))
    refused(copy)


@pytest.mark.parametrize("types", [5, "full_attention", [1, 2], [None, {}], ["full_attention"] * 3])
def test_config_json_with_bad_layer_types_is_refused(types, copy):
    config = {**SIZES, "model_type": "qwen3", "layer_types": types}
    (copy / CONFIG).write_text(json.dumps(config))
    assert "layer" in refused(copy) or "sliding" in refused(copy)


# Each function damages a folder; the words are in the error about it.
def write(name: str, content: bytes | str):
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return spoil


def link(name: str, target: str):
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return spoil


def as_folder(name: str):
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return spoil


def pipe(folder: Path) -> None:
    (folder / CONFIG).unlink()
    os.mkfifo(folder / CONFIG)


def first_shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def spoil_shard(change):
    """Apply ``change(content)`` to the bytes of the first shard."""

    def spoil(folder: Path) -> None:
        file = first_shard(folder)
        content = file.read_bytes()
        file.unlink()
        file.write_bytes(change(content))

    return spoil


def header(value: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(value)) + value + data


def in_index(file: object, tensor: str = "model.norm.weight"):
    def spoil(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][tensor] = file
        (folder / INDEX).write_text(json.dumps(index))

    return spoil


def outside(folder: Path) -> None:
    """Check that a file beside the folder is still there, and intact."""
    save_file({"model.norm.weight": torch.ones(16)}, folder.parent / "outside.safetensors")
    in_index("../outside.safetensors")(folder)


def twice(folder: Path) -> None:
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    tensors = load_file(second)
    name, tensor = next(iter(load_file(first).items()))
    second.unlink()
    save_file({**tensors, name: tensor}, second)


def quantized(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        tensors = {k: v.to(torch.float8_e4m3fn) for k, v in load_file(file).items()}
        file.unlink()
        save_file(tensors, file)


DEEP = "[" * 200_000
BAD_FILES = {
    "empty config": (write(CONFIG, ""), "not JSON"),
    "deep config": (write(CONFIG, '{"a": ' + DEEP), "not JSON"),
    "huge integer": (write(CONFIG, '{"vocab_size": ' + "9" * 5000 + "}"), "not JSON"),
    "not UTF-8": (write(CONFIG, b'{"a": "\xff\xfe"}'), "not JSON"),
    "UTF-16": (write(CONFIG, '{"a": 1}'.encode("utf-16")), "not JSON"),
    "zero bytes": (write(CONFIG, bytes(100)), "not JSON"),
    "null": (write(CONFIG, "null"), "holds a NoneType"),
    "text": (write(CONFIG, '"qwen3"'), "holds a str"),
    "empty object": (write(CONFIG, "{}"), "model_type None"),
    "config is a folder": (as_folder(CONFIG), r"config\.json: .*it is a folder and not a file"),
    "config links to nothing": (link(CONFIG, "nowhere"), r"config\.json: .*a link to nothing"),
    "config links to itself": (link(CONFIG, CONFIG), r"config\.json: .*symbolic links"),
    "config is a pipe": (pipe, r"config\.json: .*it is a pipe and not a file"),
    "no config": (lambda f: (f / CONFIG).unlink(), r"no config\.json in it"),
    "generation config": (
        lambda f: (f / GENERATION).write_text(DEEP),
        r"generation_config\.json: not JSON",
    ),
    "deep index": (write(INDEX, '{"weight_map": ' + DEEP), "not JSON"),
    "index is a list": (write(INDEX, "[]"), "holds a list"),
    "map is a list": (write(INDEX, '{"weight_map": ["x"]}'), "no weight_map"),
    "map is empty": (write(INDEX, '{"weight_map": {}}'), "no weight_map"),
    "index is a folder": (as_folder(INDEX), "neither"),
    "file is a number": (in_index(3), "is in 3, not a file of this folder"),
    "file is null": (in_index(None), "is in None, not"),
    "file is a list": (in_index(["a"]), "not a file of this folder"),
    "file is an object": (in_index({}), "not a file of this folder"),
    "file is nothing": (in_index(""), "not a file of this folder"),
    "file is the folder": (in_index("."), "not a file of this folder"),
    "file outside": (outside, r"'\.\./outside\.safetensors', not a file of this folder"),
    "file far outside": (in_index("a/../../b"), "not a file of this folder"),
    "absolute file": (in_index("/etc/passwd"), "not a file of this folder"),
    "file with NUL": (in_index("a\0b"), "not a file of this folder"),
    "file from Windows": (in_index("..\\x"), "not a file of this folder"),
    "file with a long name": (in_index("x" * 5000), "absent from the folder"),
    "file no file system can name": (in_index("\ud800"), "absent from the folder"),
    "file is absent": (in_index("other.safetensors"), "absent from the folder"),
    "file is the config": (in_index(CONFIG), "damaged or cut short"),
    "tensor in no file": (
        in_index("model-00001-of-00002.safetensors", "mtp.weight"),
        "names mtp.weight, which no file holds",
    ),
    "shard links to nothing": (lambda f: link(first_shard(f).name, "no")(f), "absent"),
    "shard is a folder": (lambda f: as_folder(first_shard(f).name)(f), "absent"),
    "shard of zeros": (spoil_shard(lambda c: bytes(len(c))), "damaged or cut short"),
    "shard of text": (spoil_shard(lambda c: b"<html>not found</html>"), "damaged or cut short"),
    "shard cut in its data": (spoil_shard(lambda c: c[:-1]), "damaged or cut short"),
    "shard cut in its header": (spoil_shard(lambda c: c[:50]), "damaged or cut short"),
    "shard with more": (spoil_shard(lambda c: c + b"more"), "damaged or cut short"),
    "header too long": (spoil_shard(lambda c: b"\xff" * 8 + c[8:]), "damaged or cut short"),
    "header not JSON": (spoil_shard(lambda c: header(b"{" * 100)), "damaged or cut short"),
    "header deep": (spoil_shard(lambda c: header(DEEP.encode())), "damaged or cut short"),
    "header not UTF-8": (spoil_shard(lambda c: header(b'{"\xff": 1}')), "damaged or cut short"),
    "negative shape": (
        spoil_shard(
            lambda c: header(b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', c)
        ),
        "damaged or cut short",
    ),
    "shape overflows": (
        spoil_shard(
            lambda c: header(
                b'{"x": {"dtype": "F32", "shape": [9223372036854775807, 4], '
                b'"data_offsets": [0, 4]}}',
                bytes(4),
            )
        ),
        "damaged or cut short",
    ),
    "offsets overlap": (
        spoil_shard(
            lambda c: header(
                b'{"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, '
                b'"y": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}}',
                bytes(6),
            )
        ),
        "damaged or cut short",
    ),
    "unknown dtype": (
        spoil_shard(
            lambda c: header(b'{"x": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}')
        ),
        "damaged or cut short",
    ),
    "dtype that torch lacks": (
        spoil_shard(
            lambda c: header(
                b'{"x": {"dtype": "F8_E8M0", "shape": [1], "data_offsets": [0, 1]}}', bytes(1)
            )
        ),
        "x is of dtype F8_E8M0, which is not read",
    ),
    "dtype that weights are packed in": (
        spoil_shard(
            lambda c: header(
                b'{"x": {"dtype": "U32", "shape": [1], "data_offsets": [0, 4]}}', bytes(4)
            )
        ),
        "x is of dtype U32, which is not read",
    ),
    "twice": (twice, "is in model-00001-of-.* and model-00002-of-"),
    "quantized weights": (quantized, "dtype that cannot be trained: .* float8_e4m3fn"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_damaged_files_are_refused(case, copy):
    spoil, message = BAD_FILES[case]
    spoil(copy)
    said = refused(copy)
    assert re.search(message, said), said


def test_a_config_that_cannot_be_read(copy, monkeypatch):
    def fail(path: Path, most: int) -> bytes:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(files, "read_regular", fail)
    assert "cannot be read (Input/output error)" in refused(copy)


@pytest.mark.parametrize("name", ["", CONFIG, INDEX, "model-00001-of-00002.safetensors"])
def test_files_without_read_permission_are_refused(name, good):
    # Only this user can read pytest's own folders.
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        folder = Path(root) / "checkpoint"
        shutil.copytree(good, folder)
        folder.chmod(0o755)
        for path in folder.iterdir():
            path.chmod(0o644)
        assert resolve_architecture(ModelSection(path=str(folder))).num_experts == 4
        (folder / name).chmod(0)
        user = os.geteuid()
        if user == 0:  # permissions do not bind root
            os.seteuid(65534)
        try:
            said = refused(folder)
        finally:
            os.seteuid(user)
            folder.chmod(0o755)
        opened = "cannot be opened" if not name else "cannot be read ("
        assert opened in said
        assert "Permission denied" in said
        assert str(folder / name) in said


# model.path itself.
PATHS = {
    "": "''",
    " ": "' '",
    ".": "no config.json",
    "a\0b": "a\\x00b",
    "x" * 300: "too long",
    "x/" * 3000: "too long",
    "~nobody-has-this-name/x": "cannot be opened",
    "no/such/folder/at all": "neither a folder nor a hub id",
    "https://example.org/model": "neither a folder nor a hub id",
    "\ud800": "neither a folder nor a hub id",
    "\n": "'\\n'",
}


@pytest.mark.parametrize("path", PATHS, ids=range(len(PATHS)))
def test_model_path_that_does_not_exist_is_refused(path, monkeypatch, tmp_path):
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    assert PATHS[path] in refused(path)


def test_a_path_to_something_else_than_a_folder(copy, tmp_path):
    assert "a file; give the folder" in refused(copy / CONFIG)
    assert "a file; give the folder" in refused(first_shard(copy))
    (tmp_path / "dangling").symlink_to("nowhere")
    assert "a link to nothing" in refused(tmp_path / "dangling")
    (tmp_path / "loop").symlink_to("loop")
    assert "loop" in refused(tmp_path / "loop")


@pytest.mark.parametrize("case", ["heads", "deep config", "file outside", "shard cut in its data"])
def test_train_refuses_a_bad_folder_before_it_writes(case, copy, tmp_path, capsys, monkeypatch):
    if case == "heads":
        (copy / CONFIG).write_text(config_text({"num_attention_heads": 0}))
    else:
        BAD_FILES[case][0](copy)
    monkeypatch.setattr("moetrain.train.loop.build_data", lambda *args: sys.exit("too late"))
    words = ["--model.path", str(copy), "--output_dir", str(tmp_path / "out")]
    words += ["--data.source", "text", "--data.path", __file__, "--train.device", "cpu"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: model.path: ")
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()
