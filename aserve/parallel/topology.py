"""The ranks of an engine: their coordinates, the messages between them, and how one is lost.

Rank 0 runs in the engine's process and has the scheduler. Each other rank is a process that gets
the same launches in the same order. It samples the same tokens by the same noise, or has rows of
its own and answers each step by their outcome. Apart from that, it answers jobs alone while it
serves. Messages travel as length-prefixed msgpack over one socket for each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from aserve.config import Resolved
from aserve.errors import ErrorInfo
from aserve.messages.base import Message
from aserve.messages.changes import CheckWeights, LoadLora, LoadWeights
from aserve.messages.results import SampleResult, StepFailed, StepResult
from aserve.messages.step import Launch, Resync, Sample

SHARED_FOLDER = "/dev/shm"  # files in it are memory


class Coordinates(msgspec.Struct, frozen=True):
    """The place of a rank among all of them, and the file in which they find each other.

    A pipeline has stages, and each stage has the ranks among which heads, experts or both are
    divided. Their axis is the innermost one, so that the ranks that talk most are neighbours. The
    stages count down: rank 0, which has the scheduler, is in the last stage, where tokens are
    sampled, so no result travels.
    """

    rank: int = 0
    num_ranks: int = 1  # of a stage
    store: str = ""
    num_stages: int = 1
    has_own_rows: bool = False  # a data-parallel rank

    @property
    def num_processes(self) -> int:
        return self.num_ranks * self.num_stages

    @property
    def stage(self) -> int:
        return self.num_stages - 1 - self.rank // self.num_ranks

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def is_alone(self) -> bool:
        return self.num_ranks == 1

    @property
    def in_stage(self) -> Coordinates:
        """The place among the ranks of one stage."""
        rank = self.rank % self.num_ranks
        return Coordinates(rank, self.num_ranks, f"{self.store}.stage{self.stage}")

    @property
    def among_all(self) -> Coordinates:
        """The place among the ranks of all stages, as if they were of one."""
        return Coordinates(self.rank, self.num_processes, f"{self.store}.all")


class Patience:
    """Says how many seconds a rank waits in a collective for the others. They load at different
    speeds, and a first step may compile. Later steps begin at about the same time on all ranks, and
    take about as long; but ranks with rows of their own wait for each other's prompts and kernels.
    """

    __slots__ = ("seconds",)

    def __init__(self, seconds: float = 600.0) -> None:
        self.seconds = seconds

    def serve(self, *, has_own_rows: bool) -> None:
        """The first steps have been run."""
        self.seconds = 60.0 if has_own_rows else 5.0


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


class RunJob(Message, frozen=True):
    """Asks for new weights, an adapter or a check of weights. `number` is that of the answer."""

    number: int
    job: LoadLora | LoadWeights | CheckWeights


class RankJobDone(Message, frozen=True):
    """The rank has done a job, or could not."""

    number: int
    error: ErrorInfo | None


ToRank: TypeAlias = StartRank | WarmUp | Launch | Sample | Resync | RunJob
Outcome: TypeAlias = StepResult | SampleResult | StepFailed
Answer: TypeAlias = RankJobDone | Outcome  # of a rank that serves; outcomes of its own rows
FromRank: TypeAlias = RankUp | RankLoaded | RankFailed | RankJobDone


class RankLost(BaseException):
    """Another rank has ended, or has not come to a collective in time.

    NOTE: it is no Exception, so that no handler takes it for the failure of one step. It ends the
    executor's thread, and so the engine.
    """
