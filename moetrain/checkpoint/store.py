"""Checkpoints in an object store, or in any other place whose URL fsspec knows.

Each rank copies what it has written to the disk, and the manifest follows when all is there. A
checkpoint without one is not looked at, and what is removed loses it first. A run that has lost its
disk fetches the newest. Left out on purpose: fetching only what a rank reads; runs without a disk.
"""

from collections.abc import Collection
from pathlib import Path, PurePosixPath

from fsspec.core import url_to_fs

from moetrain.checkpoint.read import MANIFEST, checkpoint_name, step_of
from moetrain.config import ConfigError


class Store:
    """The folder of checkpoints at a URL.

    Methods raise OSError: the place cannot be reached, or refuses.
    """

    def __init__(self, url: str) -> None:
        """Raises ConfigError: fsspec does not know such URLs, or needs a package for them."""
        try:
            self._files, self._root = url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ConfigError("checkpoint.store", f"{url!r}: {error}") from None

    def steps(self) -> list[int]:
        """Return the steps of its complete checkpoints, in order."""
        self._files.invalidate_cache()
        found = self._files.glob(f"{self._root}/step-*/{MANIFEST}")
        return sorted(step_of(Path(path).parent) or 0 for path in found)

    def put(self, folder: Path, pattern: str) -> str:
        """Copy the files of a checkpoint whose names match."""
        files, target = sorted(folder.glob(pattern)), f"{self._root}/{folder.name}"
        self._files.makedirs(target, exist_ok=True)
        self._files.put([str(file) for file in files], [f"{target}/{file.name}" for file in files])
        return ""

    def get(self, step: int, folder: Path) -> None:
        """Copy all files of a checkpoint to ``folder``."""
        there = self._files.ls(f"{self._root}/{checkpoint_name(step)}", detail=False)
        self._files.get(there, [str(folder / PurePosixPath(path).name) for path in there])

    def remove_but(self, kept: Collection[int]) -> str:
        """Remove all other checkpoints, and what is left of incomplete ones."""
        self._files.invalidate_cache()
        for path in self._files.glob(f"{self._root}/step-*"):
            if step_of(Path(path)) not in kept:
                if self._files.exists(manifest := f"{path}/{MANIFEST}"):
                    self._files.rm_file(manifest)
                self._files.rm(path, recursive=True)
        return ""
