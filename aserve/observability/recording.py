"""Records all events of the scheduler in a file, from which `aserve replay` repeats them exactly.

The file is a sequence of frames (frames.py): a header with the EngineSpec; then for each tick its
events, written before the scheduler gets them, and a digest of the effects, written afterwards. If
the last digest is missing, the process ended in that tick. `Recorder` writes the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from aserve.errors import UNDECODABLE, ConfigError
from aserve.frames import FrameSplitter, framed
from aserve.messages.executor import EngineSpec, SchedulerEffect, SchedulerEvent

FORMAT = "aserve scheduler recording 1"

logger = logging.getLogger(__name__)


class Header(msgspec.Struct, frozen=True, tag=True):
    format: str
    spec: EngineSpec


class Events(msgspec.Struct, frozen=True, tag=True):
    events: list[SchedulerEvent]


class Effects(msgspec.Struct, frozen=True, tag=True):
    digest: bytes
    skipped: tuple[str, ...] = ()  # requests that the scheduler could not consider


@dataclass(frozen=True, slots=True)
class RecordedTick:
    events: list[SchedulerEvent]
    digest: bytes | None  # None if the recording ends within this tick
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Recording:
    spec: EngineSpec
    ticks: tuple[RecordedTick, ...]


def digest_of(effects: list[SchedulerEffect]) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(effects), digest_size=8).digest()


class Recorder:
    """Writes each frame without a buffer, so the file has the events that crashed the process.

    A full disk ends the recording, but not the engine.
    """

    def __init__(self, path: Path, *, spec: EngineSpec) -> None:
        self._path = path
        self._encoder = msgspec.msgpack.Encoder()
        self._file: io.FileIO | None = None
        self._skipped: list[str] = []
        try:
            # WHY: a buffered file would repeat a failed write when it is closed
            self._file = io.FileIO(path, "w")
            self._write_all(Header(FORMAT, spec))
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot record to {path}: {error.strerror}") from None

    def begin(self, events: list[SchedulerEvent]) -> None:
        self._skipped.clear()
        self._write(Events(events))

    def skip(self, request_id: str) -> None:
        """Notes a request of this tick that raised an exception, which ended this request alone."""
        self._skipped.append(request_id)

    def finish(self, effects: list[SchedulerEffect]) -> None:
        if self._file is not None:
            self._write(Effects(digest_of(effects), tuple(self._skipped)))

    def close(self) -> None:
        """NOTE: some file systems report a full disk only when the file is closed."""
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                file.close()

    def _write(self, frame: Events | Effects) -> None:
        try:
            self._write_all(frame)
        except OSError as error:
            logger.warning(
                "recording to %s stopped: %s; the part that was written can be replayed",
                *(self._path, error.strerror),
            )
            self.close()

    def _write_all(self, frame: Header | Events | Effects) -> None:
        """NOTE: a nearly full disk may take only a part of a frame."""
        if self._file is None:
            return
        rest = memoryview(framed(self._encoder.encode(frame)))
        while rest:
            rest = rest[self._file.write(rest) :]


def read_recording(path: Path) -> Recording:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the recording {path}: {error.strerror}") from None
    decoder = msgspec.msgpack.Decoder(Header | Events | Effects)
    try:
        frames = [decoder.decode(frame) for frame in FrameSplitter().feed(data)]
    except UNDECODABLE as error:
        raise ConfigError(f"{path} is not a recording of this version: {error}") from None
    if not frames or not isinstance(frames[0], Header) or frames[0].format != FORMAT:
        raise ConfigError(f"{path} is not a recording: it does not begin with {FORMAT!r}")
    return Recording(frames[0].spec, tuple(_ticks(frames[1:])))


def _ticks(frames: list[Header | Events | Effects]) -> Iterator[RecordedTick]:
    for index, frame in enumerate(frames):
        if isinstance(frame, Events):
            after = frames[index + 1] if index + 1 < len(frames) else None
            if isinstance(after, Effects):
                yield RecordedTick(frame.events, after.digest, after.skipped)
            else:
                yield RecordedTick(frame.events, None)
