"""Files are read ahead once, by several threads, and not at all where they would not stay."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from aserve.gpu.weights import read_ahead
from aserve.gpu.weights.read_ahead import NUM_THREADS, ReadAhead
from aserve.tiny import MODEL_DIR
from tests.load_model import load_model

SIZES = [10_000, 1, 4_096, 33_333]
Advice = tuple[str, int, int]


class Advised(list[Advice]):
    """What the kernel was told: the file, and the first and last byte. It answers when as many
    threads have come as `parties`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, parties: int) -> None:
        self._together = threading.Barrier(parties)
        self.threads: set[int] = set()
        monkeypatch.setattr(os, "posix_fadvise", self.take)

    def take(self, fd: int, offset: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        thread = threading.get_ident()
        if thread not in self.threads:
            self.threads.add(thread)
            self._together.wait(20)
        self.append((Path(os.readlink(f"/proc/self/fd/{fd}")).name, offset, offset + size))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(read_ahead, "SLICE_BYTES", 4_096)
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", 1_000)
    paths = [tmp_path / f"{number}.safetensors" for number in range(len(SIZES))]
    for path, size in zip(paths, SIZES, strict=True):
        path.write_bytes(bytes(size))
    return paths


def test_each_byte_is_read_once_and_by_several_threads(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    advised = Advised(monkeypatch, NUM_THREADS)
    reading = ReadAhead(files)
    reading.__enter__()
    reading._threads.shutdown()
    reading.__exit__(None, None, None)
    assert len(advised.threads) == NUM_THREADS
    for path, size in zip(files, SIZES, strict=True):
        own = sorted((start, stop) for name, start, stop in advised if name == path.name)
        ends = [0, *(stop for _, stop in own)]
        assert [start for start, _ in own] == ends[:-1]
        assert ends[-1] == size
        assert all(stop - start <= 1_000 for start, stop in own)


def test_whoever_leaves_stops_the_threads(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread is in its first advice until then."""
    reading, num_calls = ReadAhead(files), itertools.count()

    def advise(*_: int) -> None:
        next(num_calls)
        assert reading._is_over.wait(20)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    with reading:
        pass
    assert next(num_calls) <= NUM_THREADS


def test_a_checkpoint_larger_than_half_of_the_memory_is_not_read_ahead(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "available_memory_bytes", lambda: 2 * sum(SIZES) - 1)
    advised = Advised(monkeypatch, 1)
    reading = ReadAhead(files)
    reading.__enter__()
    reading._threads.shutdown()
    assert not advised


def test_a_model_reads_its_file_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads may take as long as they like, although the model is loaded before."""
    advised, leave = Advised(monkeypatch, 1), ReadAhead.__exit__

    def leave_late(reading: ReadAhead, *raised: Any) -> None:
        reading._threads.shutdown()
        leave(reading, *raised)

    monkeypatch.setattr(ReadAhead, "__exit__", leave_late)
    load_model(MODEL_DIR)
    assert ("model.safetensors", 0) in {(name, start) for name, start, _ in advised}
