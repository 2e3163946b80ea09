"""What the frontend and the engine's process say to each other, beside what their actors say.

Must not know sockets. First comes Start, which Ready or LoadFailed answers; then whatever happens.
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
    """`directory` is where relative paths begin, such as that of a recording."""

    resolved: Resolved
    model_dir: str
    directory: str


class Ready(Message, frozen=True):
    """What the frontend must know of the engine; `about` says what was chosen for this machine."""

    spec: EngineSpec
    about: str


class LoadFailed(Message, frozen=True):
    """`is_config`: the user can mend it."""

    message: str
    is_config: bool


class Died(Message, frozen=True):
    """The last message of an engine that met an error: who died, and of what."""

    name: str
    reason: str


ToEngine: TypeAlias = Start | EngineEvent
ToFrontend: TypeAlias = Ready | LoadFailed | Died | EngineReport | DetokenizerEvent
