"""Pages of KV in files: in a folder, or in whatever fsspec opens, which engines may share.

A file is named by its page's key, and lies in a folder that is named by everything else on which
the KV depends (connect.py). It begins with a checksum, because a changed byte would change answers
and nothing else. Files may be deleted at any time. All functions block, and raise OSError.
"""

from __future__ import annotations

import contextlib
import os
import uuid
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from aserve.errors import ConfigError
from aserve.tiers.page_layout import ArrayU8
from aserve.tiers.storage_limit import StorageLimit

MAGIC = b"aserve-kv 1\n"
HEAD_BYTES = len(MAGIC) + 4


class Folder(Protocol):
    def read(self, name: str) -> bytes | None:
        """Returns None if there is no such file."""

    def write(self, name: str, data: bytes) -> None:
        """Readers see the whole file or none."""

    def has(self, name: str) -> bool: ...

    def close(self) -> None: ...


class LocalFolder:
    def __init__(self, path: Path, limit: StorageLimit | None = None) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = path
        self._limit = limit
        if limit is not None:
            limit.start()

    def read(self, name: str) -> bytes | None:
        try:
            data = (self._path / name).read_bytes()
        except FileNotFoundError:
            return None
        with contextlib.suppress(OSError):  # the disk may be full, or only be read
            os.utime(self._path / name)  # the time of its last use
        return data

    def write(self, name: str, data: bytes) -> None:
        path = self._path / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = path.with_name(f"{uuid.uuid4().hex}.part")
        try:
            part.write_bytes(data)
            os.replace(part, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                part.unlink()
        if self._limit is not None:
            self._limit.note(len(data))

    def has(self, name: str) -> bool:
        return (self._path / name).exists()

    def close(self) -> None:
        if self._limit is not None:
            self._limit.close()


class RemoteFolder:
    """A URL for fsspec. Object stores write a file as a whole."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError:
            raise ConfigError(
                f"--hicache-storage {url}: a URL needs fsspec; pip install 'aserve[storage]'"
            ) from None
        files: Any
        try:
            files, path = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"--hicache-storage {url}: {error}") from None
        self._files, self._path = files, path.rstrip("/")

    def read(self, name: str) -> bytes | None:
        try:
            with _as_os_error():
                data: bytes = self._files.cat_file(f"{self._path}/{name}")
        except FileNotFoundError:
            return None
        return data

    def write(self, name: str, data: bytes) -> None:
        path = f"{self._path}/{name}"
        with _as_os_error():
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, data)

    def has(self, name: str) -> bool:
        with _as_os_error():
            return bool(self._files.exists(f"{self._path}/{name}"))

    def close(self) -> None:
        pass


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """WHY: each store behind fsspec has exceptions of its own."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"the store failed: {error!r}") from error


def open_folder(place: str, name: str, max_bytes: int | None = None) -> Folder:
    """Opens the folder `name` in a directory or below a URL. All folders of a directory share its
    `max_bytes`. Raises ConfigError.
    """
    if "://" in place:
        if max_bytes is not None:
            raise ConfigError(
                "--hicache-storage-size is for a directory; give a store behind a URL a rule that "
                "deletes old objects"
            )
        return RemoteFolder(f"{place.rstrip('/')}/{name}")
    limit = None if max_bytes is None else StorageLimit(Path(place), max_bytes)
    try:
        return LocalFolder(Path(place) / name, limit)
    except OSError as error:
        raise ConfigError(f"--hicache-storage {place}: {error}") from None


class PageFiles:
    def __init__(self, folder: Folder, *, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self._folder = folder

    def close(self) -> None:
        self._folder.close()

    def write(self, key: bytes, page: ArrayU8) -> None:
        data = page.tobytes()
        self._folder.write(_name(key), MAGIC + zlib.crc32(data).to_bytes(4, "little") + data)

    def read(self, keys: Sequence[bytes]) -> list[ArrayU8]:
        """Returns the pages of the first keys, as far as their files are there and sound."""
        pages: list[ArrayU8] = []
        for key in keys:
            data = self._folder.read(_name(key))
            if data is None or len(data) != HEAD_BYTES + self.page_bytes:
                break
            checksum = int.from_bytes(data[len(MAGIC) : HEAD_BYTES], "little")
            page = memoryview(data)[HEAD_BYTES:]
            if data[: len(MAGIC)] != MAGIC or zlib.crc32(page) != checksum:
                break
            pages.append(np.frombuffer(page, np.uint8))
        return pages

    def num_there(self, keys: Sequence[bytes]) -> int:
        """Returns how many of the first keys have files, where the files of a longer prefix come
        with those of a shorter one.
        """
        low, high = 0, min(1, len(keys))
        while low < high and self._folder.has(_name(keys[high - 1])):
            if high == len(keys):
                return high
            low, high = high, min(2 * high, len(keys))
        high = max(low, high - 1)
        while low < high:
            middle = (low + high + 1) // 2
            if self._folder.has(_name(keys[middle - 1])):
                low = middle
            else:
                high = middle - 1
        return low


def _name(key: bytes) -> str:
    return f"{key[:1].hex()}/{key.hex()}"
