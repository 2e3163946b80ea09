"""The results of data-parallel ranks, joined into those of one engine.

Each rank samples its own rows, whose numbers differ from those of all others. A step has failed if
it has failed on one rank: what the others computed for its rows is not whole.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Generator, Sequence
from typing import Any

from aserve.errors import BugError
from aserve.gpu.step.ticket import RowTokens, StepTicket
from aserve.messages.base import array_i32
from aserve.messages.executor import Ticket
from aserve.messages.results import SeqLens, StepFailed, StepResult
from aserve.messages.step import Sample
from aserve.parallel.processes import RankProcess
from aserve.parallel.topology import Outcome


def joined(parts: Sequence[Outcome]) -> StepResult | StepFailed:
    """Returns the result of a step from those of all ranks, in their order."""
    steps: list[StepResult] = []
    for part in parts:
        if isinstance(part, StepFailed):
            return part
        if not isinstance(part, StepResult):
            raise BugError(f"a rank answered step {part.iteration} by the result of a Sample")
        steps.append(part)
    return StepResult(
        iteration=steps[0].iteration,
        rows=b"".join(step.rows for step in steps),
        counts=b"".join(step.counts for step in steps),
        tokens=b"".join(step.tokens for step in steps),
        logprobs=tuple(record for step in steps for record in step.logprobs),
        prompt_logprobs=tuple(record for step in steps for record in step.prompt_logprobs),
        embeddings=tuple(record for step in steps for record in step.embeddings),
        drafts=tuple(record for step in steps for record in step.drafts),
        took_us=max(step.took_us for step in steps),
        ran=steps[0].ran,
    )


class JoinedTicket:
    """Implements messages.Ticket. Awaiting it awaits all ranks."""

    __slots__ = ("_tickets", "iteration")

    def __init__(self, tickets: tuple[Ticket, ...]) -> None:
        self.iteration = tickets[0].iteration
        self._tickets = tickets

    @property
    def seq_lens(self) -> Awaitable[SeqLens]:
        """The lengths of rank 0's rows, because those of others do not travel."""
        return self._tickets[0].seq_lens

    def __getitem__(self, row: int) -> RowTokens:
        return RowTokens(self, row)

    def __await__(self) -> Generator[Any, None, StepResult | StepFailed]:
        return (yield from self._all().__await__())

    async def _all(self) -> StepResult | StepFailed:
        return joined([await ticket for ticket in self._tickets])


class RowsOfRanks:
    """Awaits the answers of the other ranks, each of which answers in the order of the calls."""

    __slots__ = ("_awaited", "_loop")

    def __init__(self, ranks: Sequence[RankProcess], loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._awaited: dict[int, deque[StepTicket]] = {rank.number: deque() for rank in ranks}

    def rank_of(self, sample: Sample) -> int:
        """Returns the rank that has the rows of a Sample."""
        return int(array_i32(sample.rows)[0] - 1) % (len(self._awaited) + 1)

    def joined(self, own: Ticket) -> JoinedTicket:
        """Returns the ticket of a step of all ranks, of which `own` is rank 0's."""
        others = [self.awaited(number, own.iteration) for number in self._awaited]
        return JoinedTicket((own, *others))

    def awaited(self, number: int, iteration: int) -> StepTicket:
        """Returns the ticket of a step, or of a Sample, of this rank alone."""
        ticket = StepTicket(iteration, self._loop)
        self._awaited[number].append(ticket)
        return ticket

    def complete(self, rank: RankProcess, outcome: Outcome) -> None:
        """Raises BugError for an answer that is not the next one."""
        awaited = self._awaited[rank.number]
        if not awaited or awaited[0].iteration != outcome.iteration:
            number = awaited[0].iteration if awaited else "nothing"
            raise BugError(f"rank {rank.number} answered step {outcome.iteration}, not {number}")
        awaited.popleft().complete(outcome)
