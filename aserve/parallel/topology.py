"""The ranks of an engine: their coordinates, the messages between them, and how one is lost.

Rank 0 runs in the engine's process and has the scheduler. Each other rank is a process that gets
the same launches in the same order. It samples the same tokens by the same noise, or has rows of
its own and answers each step by their outcome. Apart from that, it answers jobs alone while it
serves. Messages travel as length-prefixed msgpack over one socket for each rank: a socket pair on
one machine, and TCP between machines.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import TypeAlias

import msgspec

from aserve.config import Resolved
from aserve.errors import ErrorInfo
from aserve.messages.base import Message
from aserve.messages.changes import CheckWeights, LoadLora, LoadWeights
from aserve.messages.results import SampleResult, StepFailed, StepResult
from aserve.messages.step import Launch, Resync, Sample

LONG_S = 600.0
MEET_S = 60.0  # at least, for a rank to import its libraries and meet the others
SHARED_FOLDER = "/dev/shm"  # files in it are memory


class Cluster(msgspec.Struct, frozen=True):
    """The machines of ranks that do not all share one. Ranks of different machines find each other
    by a store of torch.distributed, and exchange over TCP."""

    nodes: tuple[int, ...]  # the machine of each rank
    host: str  # the address of this rank's machine
    store_host: str
    store_port: int

    def part(self, first: int, num_ranks: int) -> Cluster | None:
        """The cluster of some of the ranks. None: they share a machine."""
        nodes = self.nodes[first : first + num_ranks]
        return None if len(set(nodes)) == 1 else msgspec.structs.replace(self, nodes=nodes)


class Coordinates(msgspec.Struct, frozen=True):
    """The place of a rank among all of them, and the file in which those of its machine find each
    other.

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
    cluster: Cluster | None = None  # None: all ranks share a machine
    meet_s: float = MEET_S  # in which all ranks must have met

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
    def num_on_node(self) -> int:
        """The ranks that share the machine of this one."""
        return sum(self.shares_node(other) for other in range(self.num_processes))

    @property
    def local_rank(self) -> int:
        """The number of this rank among those of its machine."""
        return sum(self.shares_node(other) for other in range(self.rank))

    def shares_node(self, other: int) -> bool:
        """Whether another rank is on the machine of this one."""
        nodes = self.cluster.nodes if self.cluster else (0,) * self.num_processes
        return nodes[other] == nodes[self.rank]

    @property
    def in_stage(self) -> Coordinates:
        """The place among the ranks of one stage."""
        rank = self.rank % self.num_ranks
        part = self.cluster and self.cluster.part(self.rank - rank, self.num_ranks)
        store = f"{self.store}.stage{self.stage}"
        return Coordinates(rank, self.num_ranks, store, cluster=part, meet_s=self.meet_s)

    @property
    def among_all(self) -> Coordinates:
        """The place among the ranks of all stages, as if they were of one."""
        store = f"{self.store}.all"
        return Coordinates(
            self.rank, self.num_processes, store, cluster=self.cluster, meet_s=self.meet_s
        )


def family_of(host: str) -> socket.AddressFamily:
    """Whether a host is reached by IPv4 or IPv6. Raises OSError for one that is not known."""
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


class Patience:
    """Says how many `seconds` a rank waits in a collective for the others: `long_s` while they
    load, at different speeds, run their first steps, which may compile, or profile. Later steps
    begin at about the same time on all ranks, and take about as long; but ranks with rows of their
    own wait for each other's prompts and kernels.

    A thread that waits for its device, which waits for another rank, may never come back. So `lost`
    completes with the reason when somebody else has noticed it.
    """

    __slots__ = ("long_s", "lost", "seconds")

    def __init__(self, long_s: float = LONG_S) -> None:
        self.long_s = self.seconds = long_s
        self.lost: Future[str] = Future()

    def end(self, reason: str) -> None:
        """The ranks wait in vain. The first reason counts."""
        with contextlib.suppress(InvalidStateError):
            self.lost.set_result(reason)

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


class SetPatience(Message, frozen=True):
    """Says for how long the rank waits for the others from its next wait on."""

    seconds: float


class RankJobDone(Message, frozen=True):
    """The rank has done a job, or could not."""

    number: int
    error: ErrorInfo | None


class ReadKv(Message, frozen=True):
    """Asks for the KV of tokens, as `LayeredKvAccess.read`. `number` is that of the answer."""

    number: int
    pages: tuple[bytes, ...]
    first: int
    stop: int
    from_layer: int


class WriteKv(Message, frozen=True):
    """Gives KV of layers `from_layer` to `to_layer` - 1, as `LayeredKvAccess.write`. `number` is
    that of the answer."""

    number: int
    pages: tuple[bytes, ...]
    first: int
    token_ids: bytes
    values: bytes
    from_layer: int
    to_layer: int


class KvDone(Message, frozen=True):
    """The rank has read or written KV, or could not."""

    number: int
    values: bytes  # that were read
    error: str = ""


ToRank: TypeAlias = (
    StartRank | WarmUp | Launch | Sample | Resync | RunJob | SetPatience | ReadKv | WriteKv
)
Outcome: TypeAlias = StepResult | SampleResult | StepFailed
Answer: TypeAlias = (
    RankJobDone | KvDone | Outcome
)  # of a rank that serves; outcomes of its own rows
FromRank: TypeAlias = RankUp | RankLoaded | RankFailed | RankJobDone


class RankLost(BaseException):
    """Another rank has ended, or has not come to a collective in time.

    NOTE: it is no Exception, so that no handler takes it for the failure of one step. It ends the
    executor's thread, and so the engine.
    """
