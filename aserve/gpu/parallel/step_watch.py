"""What an executor tells the stage of a pipeline about its steps, beside running them.

A stage makes drafts before the turn of their step, and awaits messages of its neighbours before
anything of a step is written. So it is told when a step is launched and when its turn begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aserve.gpu.device.base import Event
from aserve.gpu.transfer.staging import DeviceArrays, HostArrays
from aserve.messages.step import ScheduleBatch


@dataclass(frozen=True, slots=True)
class TurnDevice:
    """The device of an executor's thread, for what is not part of its step."""

    stage: Callable[[HostArrays], DeviceArrays]  # copies host values to the device
    mark: Callable[[], Event]  # an event behind all that was asked of it


@dataclass(frozen=True, slots=True)
class StepWatch:
    """Is told of steps: of a launch on the event loop's thread, and of a turn on the executor's."""

    note_launch: Callable[[ScheduleBatch], None]
    begin: Callable[[ScheduleBatch, TurnDevice], None]


def ignore_launch(_batch: ScheduleBatch) -> None:
    pass


def ignore_turn(_batch: ScheduleBatch, _device: TurnDevice) -> None:
    pass


UNWATCHED = StepWatch(ignore_launch, ignore_turn)
