"""The ranks of an engine: their coordinates, the messages between them, and how one is lost.

Rank 0 runs in the engine's process and has the scheduler. Each other rank is a process that gets
the same launches in the same order and samples the same tokens by the same noise; it answers
nothing while it serves. Messages travel as length-prefixed msgpack over one socket for each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from aserve.config import Resolved
from aserve.messages.base import Message
from aserve.messages.step import Launch, Resync, Sample


class Coordinates(msgspec.Struct, frozen=True):
    """The place of a rank among all of them, and the file in which they find each other.

    There is one axis now, of the ranks among which heads, experts or both are divided. It stays the
    innermost one, so that the ranks that talk most are neighbours.
    """

    rank: int = 0
    num_ranks: int = 1
    store: str = ""

    @property
    def is_alone(self) -> bool:
        return self.num_ranks == 1


# Called when a rank has imported its libraries, before it meets the others.
Meet: TypeAlias = Callable[[], Coordinates]


class StartRank(Message, frozen=True):
    """The first message to a rank. Relative paths start at `directory`."""

    resolved: Resolved
    model_dir: str
    directory: str
    coordinates: Coordinates


class WarmUp(Message, frozen=True):
    """Asks for the steps of `LocalExecutor.warm_up`."""


class RankUp(Message, frozen=True):
    """The rank has its libraries, and now meets the others."""


class RankLoaded(Message, frozen=True):
    """The rank has loaded its part of the model."""

    num_pages: tuple[int, ...]  # of each layer group


class RankFailed(Message, frozen=True):
    """The last message of a rank that could not load."""

    message: str
    is_config: bool  # the user can correct the cause


ToRank: TypeAlias = StartRank | WarmUp | Launch | Sample | Resync
FromRank: TypeAlias = RankUp | RankLoaded | RankFailed


class RankLost(BaseException):
    """Another rank has ended, or has not come to a collective in time.

    NOTE: it is no Exception, so that no handler takes it for the failure of one step. It ends the
    executor's thread, and so the engine.
    """
