"""Replays a recording through the scheduler, and checks that it returns the same effects.

It needs neither device nor model nor clock, because a recording holds all events of the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from aserve.errors import BugError
from aserve.messages.base import array_i32
from aserve.messages.executor import SchedulerEffect, SchedulerEvent
from aserve.messages.output import Refused, Retired
from aserve.messages.requests import AdmitRequest
from aserve.messages.step import Launch, Resync, Sample, ScheduleBatch
from aserve.observability.recording import RecordedTick, digest_of, read_recording
from aserve.scheduling.scheduler import Scheduler


class ReplayDiffers(BugError):
    """The effects differ from those in the recording."""


def replay(path: Path) -> Iterator[str]:
    """Yields one line per effect. Raises ReplayDiffers, or what the scheduler raises."""
    recording = read_recording(path)
    scheduler = Scheduler(recording.spec, debug_checks=True)
    yield f"spec {recording.spec}"
    for number, tick in enumerate(recording.ticks, start=1):
        effects = scheduler.step([event for event in tick.events if not _is_skipped(event, tick)])
        for request_id in tick.skipped:
            yield f"tick {number} skipped request={request_id}, which raised an exception"
        for effect in effects:
            yield f"tick {number} {_described(effect)}"
        _compare(number, tick, effects)
    yield f"replayed ticks={len(recording.ticks)} idle={scheduler.is_idle}"


def _is_skipped(event: SchedulerEvent, tick: RecordedTick) -> bool:
    return isinstance(event, AdmitRequest) and event.request_id in tick.skipped


def _compare(number: int, tick: RecordedTick, effects: list[SchedulerEffect]) -> None:
    """The last tick has no digest if the scheduler raised in it."""
    if tick.digest is not None and tick.digest != digest_of(effects):
        raise ReplayDiffers(f"tick {number} gave other effects than when it was recorded")


def _described(effect: SchedulerEffect) -> str:
    match effect:
        case Launch():
            return "; ".join(map(_described_batch, effect.batches))
        case Sample():
            return f"sample iteration={effect.iteration} rows={_ids(effect.rows)}"
        case Resync():
            return f"resync iteration={effect.iteration}"
        case Retired():
            return (
                f"retired request={effect.request_id} child={effect.child} "
                f"reason={effect.reason} outputs={effect.num_outputs}"
            )
        case Refused():
            return f"refused request={effect.request_id} reason={effect.error.message}"
        case _:
            return type(effect).__name__


def _described_batch(batch: ScheduleBatch) -> str:
    query_lens = zip(array_i32(batch.rows), array_i32(batch.query_lens), strict=True)
    rows = " ".join(f"{row}:{query_len}" for row, query_len in query_lens)
    samples, held = _ids(batch.sample_rows), _ids(batch.held_rows)
    return f"launch iteration={batch.iteration} rows=[{rows}] {samples=!s} {held=!s}"


def _ids(data: bytes) -> str:
    return "[" + " ".join(str(row) for row in array_i32(data)) + "]"
