"""Asks all replicas at once for state that any of them may have: a response, a file, a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from aiohttp import web

from aserve.router.failures import UNKNOWN, NotAnswered, RouterEnds
from aserve.router.replica_connection import Answer


@dataclass(frozen=True, slots=True)
class Begun:
    """An answer whose first bytes have come. `opened` ends the exchange with the replica."""

    name: str
    answer: Answer
    first: bytes
    opened: AsyncExitStack

    @property
    def is_success(self) -> bool:
        return self.answer.status < web.HTTPBadRequest.status_code

    @property
    def is_unknown(self) -> bool:
        return self.answer.status == web.HTTPNotFound.status_code


class Search:
    """The first replica that answers without an error has the state, and the others are asked no
    more. If none does, the best answer is an error of another kind than 404 (its state may be that
    of a batch that has ended), and then a failure, whose replica may have the state.
    """

    def __init__(self, ask: Callable[[str], Awaitable[Begun]]) -> None:
        self._ask = ask
        self._tasks: list[asyncio.Task[None]] = []
        self._begun: list[Begun] = []
        self._failures: list[NotAnswered | RouterEnds] = []

    async def best(self, names: Sequence[str]) -> Begun:
        """Returns an answer that is still open. Raises NotAnswered, or RouterEnds, if there is
        none.
        """
        best: Begun | None = None
        try:
            async with asyncio.TaskGroup() as group:
                self._tasks += [group.create_task(self._ask_one(name)) for name in names]
            best = self._choice()
        finally:
            for each in self._begun:
                if each is not best:
                    await each.opened.aclose()
        return best

    async def _ask_one(self, name: str) -> None:
        try:
            begun = await self._ask(name)
        except (NotAnswered, RouterEnds) as error:
            self._failures.append(error)
            return
        self._begun.append(begun)
        if begun.is_success:
            for task in self._tasks:
                if task is not asyncio.current_task():
                    task.cancel()

    def _choice(self) -> Begun:
        others = [each for each in self._begun if not each.is_unknown]
        if others:
            return min(others, key=lambda each: not each.is_success)
        if self._failures:
            raise self._failures[0]
        if not self._begun:
            raise NotAnswered(UNKNOWN)
        return self._begun[0]
