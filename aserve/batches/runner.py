"""Answers the lines of the open batches while the engine has nothing else to do.

Each line is a request of the lowest priority, so the scheduler admits it behind all others and
retracts it first. No more lines are under way than leave a quarter of the engine's rows free, and
lines of different batches take turns. A result is stored before its line counts as done: after a
restart, or a crash, a batch goes on with the lines that have none.

A batch is `validating` until its file is checked, `in_progress` while its lines are answered, and
`finalizing` while its files are written. One that is cancelled or expires keeps what it has.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
import uuid
from collections import deque

import msgspec

from aserve.actors.base import Actor
from aserve.batches.lines import InputLines, LineWork, check_lines
from aserve.batches.records import (
    BatchLine,
    BatchObject,
    BatchStatus,
    LineError,
    LineErrors,
    LineResponse,
    LineResult,
)
from aserve.batches.store import Owned, Store
from aserve.errors import CapacityError, EngineDead, ErrorInfo

FREE_ROWS = 4  # one in so many rows stays free for other requests
END_AGAIN_S = 10.0  # before a batch whose files could not be written is ended again

logger = logging.getLogger(__name__)


class Turns:
    """Bounds the lines under way. Batches that wait for a turn get theirs in order of arrival."""

    def __init__(self, work: LineWork) -> None:
        self._work = work
        self._num_taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def _most(self) -> int:
        num_rows = self._work.num_rows()
        num_others = max(0, self._work.num_open() - self._num_taken)
        return max(1, num_rows - num_others - num_rows // FREE_ROWS)

    async def take(self) -> None:
        if self._num_taken < self._most and not self._waiting:
            self._num_taken += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back()
            raise

    def give_back(self, _: object = None) -> None:
        """NOTE: as a callback of a line's task it also runs for one that is cancelled before it
        begins.
        """
        self._num_taken -= 1
        while self._waiting and self._num_taken < self._most:
            turn = self._waiting.popleft()
            if not turn.done():
                self._num_taken += 1
                turn.set_result(None)


class BatchRunner(Actor[Owned]):
    """Runs the batches that come to its inbox."""

    def __init__(self, work: LineWork, store: Store) -> None:
        super().__init__("batches")
        self._work = work
        self._store = store
        self._turns = Turns(work)
        self._runs: dict[str, _BatchRun] = {}
        self._is_dead = False

    def report_death(self, name: str, error: BaseException) -> None:
        """WHY: a death does not end the engine, as those of other actors do. The batch that may
        have caused it is still open after a restart, and would end each engine.
        """
        self._is_dead = True
        logger.critical("batches died cause=%r", error)

    def check_alive(self) -> None:
        if self._is_dead:
            raise EngineDead("batches have failed and are not taken; the server's log says why")

    async def run(self) -> None:
        """Goes on with the batches that were open when the server ended, and takes new ones."""
        self.handle(await self._store.call(self._store.open_batches))
        await super().run()

    def handle(self, events: list[Owned]) -> None:
        for owned in events:
            run = _BatchRun(owned, self._work, self._store, self._turns)
            self._runs[owned.batch.id] = run
            self.spawn_for(owned.batch.id, self._run(run))

    def end_request(self, request_id: str, error: ErrorInfo) -> None:
        run = self._runs[request_id]
        run.batch.status = "failed"
        run.batch.errors = LineErrors([LineError(error.code, error.message)])
        self.spawn(self._end(run))

    def open_batch(self, batch_id: str, owner: str) -> BatchObject | None:
        """Returns an open batch as it is now. The store has its last status, but not its counts."""
        run = self._runs.get(batch_id)
        return run.shown() if run is not None and run.owner == owner else None

    async def cancel(self, batch_id: str, owner: str) -> BatchObject | None:
        """Begins to cancel an open batch, and returns it, or None if it is not open."""
        run = self._runs.get(batch_id)
        if run is None or run.owner != owner:
            return None
        await run.cancel()
        return run.shown()

    async def _run(self, run: _BatchRun) -> None:
        await run.run()
        await self._end(run)

    async def _end(self, run: _BatchRun) -> None:
        """Ends a batch in the store. A disk that is full may have room later."""
        while True:
            try:
                await self._store.call(self._store.end_batch, run.batch, run.owner, now())
            except (CapacityError, sqlite3.Error) as error:
                logger.warning("batch=%s cannot be ended yet error=%r", run.batch.id, error)
                await asyncio.sleep(END_AGAIN_S)
            else:
                del self._runs[run.batch.id]
                return


class OwnerCancelled(Exception):
    """Ends the tasks of a batch that its owner cancels."""


class _BatchRun:
    """The life of one open batch in this process. The actor ends it in the store."""

    def __init__(self, owned: Owned, work: LineWork, store: Store, turns: Turns) -> None:
        self.batch = owned.batch
        self.owner = owned.owner
        self._caller = owned.caller
        self._work = work
        self._store = store
        self._turns = turns
        self._is_cancelled = asyncio.Event()

    async def run(self) -> None:
        """Returns when no more lines are to be answered."""
        batch = self.batch
        path = self._store.path_of(batch.input_file_id)
        lines = await self._store.call(check_lines, path, batch.endpoint, self._work)
        if not isinstance(lines, InputLines):
            batch.status, batch.errors = "failed", LineErrors(lines)
            return
        batch.request_counts.total = lines.num_lines
        if batch.status == "validating":
            await self._enter("in_progress")
        if batch.status == "in_progress":
            await self._answer_in_time(lines)

    async def cancel(self) -> None:
        if self.batch.status in ("validating", "in_progress"):
            self._is_cancelled.set()
            await self._enter("cancelling")

    def shown(self) -> BatchObject:
        """Returns the batch, which has not ended for clients before its files are written."""
        if self.batch.is_open:
            return self.batch
        return msgspec.structs.replace(self.batch, status="finalizing")

    async def _enter(self, status: BatchStatus) -> None:
        self.batch.enter(status, now())
        await self._store.call(self._store.save_batch, self.batch)

    async def _answer_in_time(self, lines: InputLines) -> None:
        """Answers the lines until they are all answered, the batch is cancelled, or it expires."""
        try:
            async with asyncio.timeout(self.batch.expires_at - time.time()):
                await self._answer_until_cancelled(lines)
        except TimeoutError:
            self.batch.status = "expired"
        if self.batch.status == "in_progress":
            await self._enter("finalizing")

    async def _answer_until_cancelled(self, lines: InputLines) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._end_when_cancelled())
                await self._answer(lines)
                watch.cancel()
        except* OwnerCancelled:
            pass  # its status says so

    async def _end_when_cancelled(self) -> None:
        await self._is_cancelled.wait()
        raise OwnerCancelled

    async def _answer(self, lines: InputLines) -> None:
        """NOTE: the group ends when all its tasks have, so no line outlives its batch."""
        finished = await self._store.call(self._store.finished_lines, self.batch.id)
        counts = self.batch.request_counts
        counts.completed = sum(finished.values())
        counts.failed = len(finished) - counts.completed
        async with asyncio.TaskGroup() as group:
            for index in range(lines.num_lines):
                if index not in finished:
                    await self._turns.take()
                    task = group.create_task(self._answer_one(lines, index))
                    task.add_done_callback(self._turns.give_back)

    async def _answer_one(self, lines: InputLines, index: int) -> None:
        line = await self._store.call(lines.read, index)
        result = await self._result_of(line)
        is_ok = result.response.status_code == 200
        data = msgspec.json.encode(result)
        await self._store.call(self._store.add_result, self.batch.id, index, is_ok, data)
        counts = self.batch.request_counts
        counts.completed += is_ok
        counts.failed += not is_ok

    async def _result_of(self, line: BatchLine) -> LineResult:
        while True:
            request_id = uuid.uuid4().hex
            answer = await self._work.answer(line, request_id, self._caller)
            if answer.retry_after_s is None:
                response = LineResponse(answer.status, request_id, msgspec.Raw(answer.body))
                return LineResult(f"batch_req_{request_id}", line.custom_id, response)
            await asyncio.sleep(answer.retry_after_s)


def now() -> int:
    return int(time.time())
