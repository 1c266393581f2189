"""The file systems of ``fsspec``, under the types that :mod:`moetrain.checkpoint.save` needs."""

from collections.abc import Sequence
from typing import Protocol, cast

from fsspec.core import url_to_fs


class FileSystem(Protocol):
    """Files at a URL. Methods raise OSError."""

    def invalidate_cache(self) -> None: ...
    def glob(self, path: str) -> list[str]: ...
    def makedirs(self, path: str, exist_ok: bool) -> None: ...
    def ls(self, path: str, *, detail: bool) -> list[str]: ...
    def exists(self, path: str) -> bool: ...
    def rm_file(self, path: str) -> None: ...
    def rm(self, path: str, recursive: bool) -> None: ...

    def put(self, ours: Sequence[str], theirs: Sequence[str], /) -> None:
        """Copy files from the disk."""
        ...

    def get(self, theirs: Sequence[str], ours: Sequence[str], /) -> None:
        """Copy files to the disk."""
        ...


def file_system(url: str) -> tuple[FileSystem, str]:
    """Return the file system of ``url``, and the path in it.

    Raises ValueError or ImportError: fsspec does not know such URLs, or needs a package for them.
    """
    files, root = url_to_fs(url)
    return cast("FileSystem", files), root
