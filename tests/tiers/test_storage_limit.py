"""A directory with a size: the least recently used pages go, and nothing that is not a page."""

from __future__ import annotations

import os
import queue
import threading
import uuid
from pathlib import Path

import pytest

from aserve.errors import ConfigError
from aserve.tiers.page_files import open_folder
from aserve.tiers.storage_limit import trim

SIZE = 1000
MODELS = tuple(uuid.UUID(int=number).hex for number in (1, 2))


def page(folder: Path, number: int, *, used_s: float) -> Path:
    path = folder / MODELS[number % 2] / f"{number:02x}" / f"{number:064x}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(SIZE))
    os.utime(path, (used_s, used_s))
    return path


def test_the_least_recently_used_pages_of_all_models_go_first(tmp_path: Path) -> None:
    used = [5, 1, 9, 3, 7, 2, 8, 4, 6, 0]
    pages = [page(tmp_path, number, used_s=1e9 + used_s) for number, used_s in enumerate(used)]
    assert trim(tmp_path, 10 * SIZE) == 10 * SIZE  # exactly full
    assert trim(tmp_path, 10 * SIZE - 1) == 8 * SIZE
    assert [used[number] for number, path in enumerate(pages) if not path.exists()] == [1, 0]


def test_only_pages_and_old_parts_are_deleted(tmp_path: Path) -> None:
    mine = [
        tmp_path / "notes.txt",
        tmp_path / "a" / "b" / "c",
        tmp_path / MODELS[0] / "ab" / "x.txt",
    ]
    parts = [tmp_path / MODELS[0] / "ab" / f"{name}.part" for name in MODELS]
    for path in (*mine, *parts):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(SIZE))
    for path in (*mine, parts[0]):
        os.utime(path, (1e9, 1e9))
    old = page(tmp_path, 1, used_s=1e9)
    assert trim(tmp_path, 1) == 0
    assert [path.exists() for path in (*mine, *parts, old)] == [True] * 3 + [False, True, False]


def test_two_servers_trim_one_directory_at_once(tmp_path: Path) -> None:
    for number in range(200):
        page(tmp_path, number, used_s=1e9 + number)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            trim(tmp_path, 20 * SIZE)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(int(path.name, 16) for path in left) == [*range(182, 200)]


def test_a_folder_is_trimmed_as_it_is_written_and_reading_is_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr("aserve.tiers.storage_limit.trim", lambda *given: sizes.put(trim(*given)))
    folder = open_folder(str(tmp_path), MODELS[0], 20 * SIZE)
    assert sizes.get(timeout=10) == 0
    names = [f"ab/{number:064x}" for number in range(21)]
    data = bytes(SIZE)
    for number, name in enumerate(names):
        folder.write(name, data)
        size = sizes.get(timeout=10)
        if number < 20:
            os.utime(tmp_path / MODELS[0] / name, (1e9 + number, 1e9 + number))
        if number == 19:
            assert size == 20 * SIZE
            assert folder.read(names[0]) == data  # it was used just now
    assert size == 18 * SIZE
    assert [number for number, name in enumerate(names) if not folder.has(name)] == [1, 2, 3]
    folder.close()
    for thread in threading.enumerate():
        if thread.name == "kv-trim":
            thread.join(10)
            assert not thread.is_alive()


def test_a_size_is_for_directories() -> None:
    with pytest.raises(ConfigError, match="a rule that deletes old objects"):
        open_folder("memory://x", "model", 1)
