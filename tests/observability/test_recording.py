"""A recording gives back the very events, also after a crash in the middle of a turn."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from aserve.errors import ConfigError
from aserve.messages.base import pack_i32
from aserve.messages.executor import EngineSpec, GroupSpec
from aserve.messages.output import Retired
from aserve.messages.requests import AdmitRequest, Cancel, SamplingParams
from aserve.observability.recording import Recorder, digest_of, read_recording

SPEC = EngineSpec(
    page_size=2,
    groups=(GroupSpec("full", 8), GroupSpec("window", 4, window=3)),
    max_rows=4,
    max_model_len=16,
    max_batched_tokens=8,
    vocab_size=32,
)
ADMIT = AdmitRequest("a", prompt_ids=pack_i32([1, 2]), sampling=SamplingParams(seed=3))
CANCEL = Cancel("a", None, 0, "cancelled")
RETIRED = Retired("a", 0, "cancelled", 0)


def recorded(path: Path) -> Path:
    recorder = Recorder(path, spec=SPEC)
    recorder.begin([ADMIT])
    recorder.finish([])
    recorder.begin([CANCEL])
    recorder.finish([RETIRED])
    recorder.close()
    return path


def test_what_was_recorded_is_read_back(tmp_path: Path) -> None:
    recording = read_recording(recorded(tmp_path / "r"))
    assert recording.spec == SPEC
    assert [tick.events for tick in recording.ticks] == [[ADMIT], [CANCEL]]
    assert [tick.digest for tick in recording.ticks] == [digest_of([]), digest_of([RETIRED])]


def test_the_events_of_a_turn_that_crashed_are_in_the_file(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r", spec=SPEC)
    recorder.begin([ADMIT])  # then the process dies: no finish, no close
    (tick,) = read_recording(tmp_path / "r").ticks
    assert (tick.events, tick.digest) == ([ADMIT], None)
    recorder.close()


@pytest.mark.parametrize("num_cut", [1, 20])
def test_a_file_that_was_cut_off_is_read_up_to_the_cut(tmp_path: Path, num_cut: int) -> None:
    path = recorded(tmp_path / "r")
    path.write_bytes(path.read_bytes()[:-num_cut])
    turns = read_recording(path).ticks
    assert [tick.events for tick in turns] == [[ADMIT], [CANCEL]]
    assert turns[-1].digest is None


@pytest.mark.parametrize("data", [None, b"", b"{}", b"\x02\x00\x00\x00{}", b"\xff" * 64])
def test_what_is_no_recording_is_one_clear_error(tmp_path: Path, data: bytes | None) -> None:
    if data is not None:
        (tmp_path / "r").write_bytes(data)
    with pytest.raises(ConfigError, match="recording"):
        read_recording(tmp_path / "r")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/no/such/folder/r", "cannot record to"),
        # Linux gives /dev/full to whoever wants to see a write fail.
        ("/dev/full", "cannot record to /dev/full: No space left on device"),
    ],
)
def test_a_recording_that_cannot_be_written_is_one_clear_error(path: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Recorder(Path(path), spec=SPEC)


def test_a_disk_that_fills_up_ends_the_recording_with_one_warning_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path / "r", spec=SPEC)
    recorder.begin([ADMIT])
    recorder.finish([])
    room = (tmp_path / "r").stat().st_size + 5
    with _limited_files(room):
        for _ in range(3):
            recorder.begin([CANCEL])
            recorder.finish([RETIRED])
    recorder.close()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert str(tmp_path / "r") in record.getMessage()
    assert "File too large" in record.getMessage()
    assert [tick.events for tick in read_recording(tmp_path / "r").ticks] == [[ADMIT]]


@contextlib.contextmanager
def _limited_files(size_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond that size: as on a full disk, a write is first cut short
    and then refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
