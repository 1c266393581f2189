"""Links in a checkpoint's folder are followed within it and its hub cache only."""

import json
import os
from pathlib import Path

import pytest

from moetrain.config import ConfigError
from moetrain.data.tokenizer import load_tokenizer
from moetrain.models.hf.files import CONFIG, INDEX
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.save import save_hf
from tests.lib.bad_folders import write_good
from tests.lib.data_files import word_tokenizer

SECRET = '{"private": "key"}'


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return write_good(tmp_path_factory.mktemp("good"))


@pytest.fixture
def secret(tmp_path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "id_rsa").write_text(SECRET)
    return folder / "id_rsa"


def plain(good: Path, folder: Path) -> Path:
    folder.mkdir(parents=True)
    for file in good.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "LICENSE").write_text("MIT")
    return folder


def cached(good: Path, root: Path) -> Path:
    """Lay the files out like the hub's cache."""
    folder = plain(good, root / "models--o--n" / "snapshots" / "0123abcd")
    blobs = root / "models--o--n" / "blobs"
    blobs.mkdir()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    for file in [path for path in folder.rglob("*") if path.is_file()]:
        blob = blobs / f"hash-of-{file.name}"
        file.rename(blob)
        file.symlink_to(os.path.relpath(blob, file.parent))
    return folder


def published(folder: Path) -> str:
    """Return all text that an export of the checkpoint holds."""
    out = folder.parent / "export"
    save_hf(load_hf(folder), out)
    kept = [p for p in out.rglob("*") if p.is_file() and p.suffix != ".safetensors"]
    return " ".join(path.read_text() for path in kept)


def test_the_hubs_cache_is_read_and_exported(good, tmp_path):
    text = published(cached(good, tmp_path))
    assert "MIT" in text
    assert "{{ tools }}" in text


def test_links_within_the_folder_are_followed(good, tmp_path):
    folder = plain(good, tmp_path / "model")
    (folder / "COPYING").symlink_to("LICENSE")
    (folder / "NOTICE").symlink_to(folder / "COPYING")  # a chain, and absolute
    (tmp_path / "mine").symlink_to(folder)  # the user's own link to the folder
    assert published(tmp_path / "mine").count("MIT") == 3


def instead(name: str):
    def spoil(folder: Path, secret: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(secret)

    return spoil


def relative(folder: Path, secret: Path) -> None:
    (folder / "README.md").symlink_to(os.path.relpath(secret, folder))


def chain(folder: Path, secret: Path) -> None:
    (folder / ".hidden").symlink_to(secret)
    (folder / "README.md").symlink_to(".hidden")


def linked_folder(folder: Path, secret: Path) -> None:
    (folder / "additional_chat_templates").symlink_to(secret.parent)


def through_a_folder(folder: Path, secret: Path) -> None:
    (folder / ".there").symlink_to(secret.parent)
    (folder / "README.md").symlink_to(f".there/{secret.name}")


def shard(folder: Path, secret: Path) -> None:
    file = min(folder.glob("*.safetensors"))
    file.rename(secret.parent / "mine.safetensors")
    file.symlink_to(secret.parent / "mine.safetensors")


def shard_in_a_folder(folder: Path, secret: Path) -> None:
    file = min(folder.glob("*.safetensors"))
    file.rename(secret.parent / file.name)
    (folder / "sub").symlink_to(secret.parent)
    index = (folder / INDEX).read_text().replace(f'"{file.name}', f'"sub/{file.name}')
    (folder / INDEX).write_text(index)


@pytest.mark.parametrize(
    "spoil",
    [
        *(instead(n) for n in ("LICENSE", CONFIG, "generation_config.json", INDEX)),
        *(instead(n) for n in ("tokenizer.json", "chat_template.jinja")),
        *(relative, chain, linked_folder, through_a_folder, shard, shard_in_a_folder),
    ],
)
def test_links_that_lead_out_are_refused(spoil, good, secret, tmp_path):
    folder = plain(good, tmp_path / "model")
    spoil(folder, secret)
    with pytest.raises(ConfigError, match=r"model\.path: .* links to .*/home/.*, outside of"):
        published(folder)


def test_a_cache_that_leads_out_is_refused(good, secret, tmp_path):
    folder = cached(good, tmp_path)
    blob = tmp_path / "models--o--n" / "blobs" / "hash-of-LICENSE"
    blob.unlink()
    blob.symlink_to(secret)
    with pytest.raises(ConfigError, match=r"LICENSE links to .*id_rsa, outside of"):
        published(folder)


def test_a_blobs_folder_that_is_a_link_is_refused(good, secret, tmp_path):
    folder = cached(good, tmp_path)
    blobs = tmp_path / "models--o--n" / "blobs"
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="outside of"):
        published(folder)


def test_other_files_of_the_cache_are_not_the_checkpoints(good, secret, tmp_path):
    folder = cached(good, tmp_path)
    (tmp_path / "models--o--private").mkdir()
    (tmp_path / "models--o--private" / "blobs").write_text(SECRET)
    (folder / "README.md").symlink_to("../../../models--o--private/blobs")
    with pytest.raises(ConfigError, match="outside of"):
        published(folder)


def test_a_file_that_becomes_a_link_is_not_copied(good, secret, tmp_path):
    folder = plain(good, tmp_path / "model")
    model = load_hf(folder)
    instead("LICENSE")(folder, secret)
    with pytest.raises(ConfigError, match=r"gone or changed .* lacks LICENSE"):
        save_hf(model, tmp_path / "out")
    assert not (tmp_path / "out" / "LICENSE").exists()


def test_an_export_neither_writes_nor_deletes_through_links(good, secret, tmp_path):
    model = load_hf(plain(good, tmp_path / "model"))
    out = tmp_path / "out"
    out.mkdir()
    (out / "sub").symlink_to(secret.parent)
    (out / ".moetrain-export.json").write_text(json.dumps({"files": [f"sub/{secret.name}"]}))
    save_hf(model, out)
    assert secret.read_text() == SECRET
    templates = tmp_path / "model" / "additional_chat_templates"
    templates.mkdir()
    (templates / "id_rsa").write_text("mine")
    (out / templates.name).symlink_to(secret.parent)
    with pytest.raises(ConfigError, match="additional_chat_templates links to"):
        save_hf(load_hf(tmp_path / "model"), out)
    assert secret.read_text() == SECRET


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_tokenizers_links_that_lead_out_are_refused(name, secret, tmp_path):
    folder = word_tokenizer(tmp_path / "tokenizer", "<unk>", "</s>", "a", eos_token="</s>")
    load_tokenizer(str(folder))
    instead(name)(folder, secret)
    with pytest.raises(ConfigError, match=rf"data\.tokenizer: .*{name} links to .*, outside of"):
        load_tokenizer(str(folder))
