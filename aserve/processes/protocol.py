"""The messages between the frontend and the engine process.

Start comes first, and Ready or LoadFailed answers it. Then the actors' own messages follow.
"""

from __future__ import annotations

from typing import TypeAlias

from aserve.config import Resolved
from aserve.messages.base import Message
from aserve.messages.executor import EngineSpec
from aserve.messages.output import DetokenizerEvent
from aserve.messages.requests import EngineEvent
from aserve.observability.reports import EngineReport


class Start(Message, frozen=True):
    """Asks the engine to load. Relative paths, as that of --record, start at `directory`."""

    resolved: Resolved
    model_dir: str
    directory: str


class Ready(Message, frozen=True):
    """The engine has loaded; `about` describes what it chose for this machine."""

    spec: EngineSpec
    about: str


class LoadFailed(Message, frozen=True):
    """The engine could not load; with `is_config` the user can correct the cause."""

    message: str
    is_config: bool


class Died(Message, frozen=True):
    """The last message of an engine that failed: the actor that died, and the reason."""

    name: str
    reason: str


ToEngine: TypeAlias = Start | EngineEvent
ToFrontend: TypeAlias = Ready | LoadFailed | Died | EngineReport | DetokenizerEvent
