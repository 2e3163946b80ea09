"""The process of a rank, `python -m aserve.parallel.rank`; its stdin is a socket to rank 0.

It runs the launches of rank 0 on its own part of the model, and ends when the socket closes or the
executor's thread ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import shutil
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import IO, assert_never, cast

import msgspec

from aserve import frames
from aserve.disagg.connect import HasKv
from aserve.engine_core import LocalExecutor
from aserve.errors import AserveError, BugError, ConfigError
from aserve.frames import FrameSplitter, framed
from aserve.host.environment import prepare_process
from aserve.host.logs import start_logging
from aserve.host.memory import collect_rarely, set_up_collector
from aserve.host.threads import Worker, in_thread, new_event_loop
from aserve.load import load_rank
from aserve.messages.executor import Ticket
from aserve.messages.results import StepFailed
from aserve.messages.step import Launch, Resync, Sample
from aserve.messages.transfers import HostKv
from aserve.parallel.topology import (
    Answer,
    Coordinates,
    KvDone,
    Patience,
    RankFailed,
    RankJobDone,
    RankLoaded,
    RankLost,
    RankUp,
    ReadKv,
    RunJob,
    SetPatience,
    StartRank,
    ToRank,
    WarmUp,
    WriteKv,
)
from aserve.processes.engine_process import socket_of_stdin
from aserve.program import end_process
from aserve.progress import ignore_stage

CLOSE_S = 3.0  # for the steps that were launched
PIECE_BYTES = 1 << 18
# The other end of a socket is closed. POLLHUP comes unasked, but for TCP only when this end is
# closed as well.
GONE = select.POLLHUP | (select.POLLRDHUP if sys.platform == "linux" else 0)

logger = logging.getLogger(__name__)


def main() -> int:
    """Returns the exit code: 0 when rank 0 has gone, 1 for a failure."""
    collect_rarely()
    sock = socket_of_stdin()
    with cast(IO[bytes], sock.makefile("rwb")) as stream:
        start = frames.receive(stream, StartRank)
        if start is None:
            return 0
        patience = Patience(start.resolved.machine.ranks_timeout)
        with _ending_with_leader(sock, start.coordinates):
            executor = _loaded(start, stream, patience)
    if executor is None:
        return 1
    set_up_collector()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(Follower(executor, sock, start.coordinates, patience).run())


@contextlib.contextmanager
def _ending_with_leader(sock: socket.socket, place: Coordinates) -> Iterator[None]:
    """Ends this process at once if rank 0 goes within the block, as one that is killed while it
    loads. This rank would wait for it for `meet_s`. Removes the folder by whose files ranks meet,
    which such a rank 0 leaves.
    """
    awake, waker = socket.socketpair()
    poll = select.poll()
    poll.register(sock, GONE)
    poll.register(awake, GONE)

    def watch() -> None:
        if any(number == sock.fileno() for number, _ in poll.poll()):
            if place.store:
                shutil.rmtree(os.path.dirname(place.store), ignore_errors=True)
            end_process(0)

    worker = Worker("leader", watch, on_end=lambda _: None)
    with awake:
        worker.start()
        try:
            with waker:
                yield
        finally:
            worker.join()


def _loaded(start: StartRank, stream: IO[bytes], patience: Patience) -> LocalExecutor | None:
    """Loads this rank's part, and tells rank 0 how it went."""
    os.chdir(start.directory)
    debug, place = start.resolved.debug, start.coordinates
    start_logging(debug.log_level or "warning", debug.log_format)
    prepare_process(start.resolved.machine.threads)

    def meet() -> Coordinates:
        frames.send(stream, RankUp())
        return place

    try:
        executor = load_rank(
            start.resolved,
            Path(start.model_dir),
            meet,
            patience=patience,
            on_stage=ignore_stage,
        )
    except AserveError as error:
        frames.send(stream, RankFailed(str(error), isinstance(error, ConfigError)))
        return None
    except RankLost as lost:
        logger.error("the rank ends: %s", lost)
        return None
    frames.send(stream, RankLoaded(tuple(group.num_pages for group in executor.spec.groups)))
    return executor


class Follower:
    """Runs what rank 0 sends. A rank with rows of its own answers each step and each Sample, in
    order; the results of others are those of rank 0, so nobody reads them."""

    def __init__(
        self, executor: LocalExecutor, sock: socket.socket, place: Coordinates, patience: Patience
    ) -> None:
        self._executor = executor
        self._samples = place.is_last_stage
        self._has_own_rows = place.has_own_rows
        self._sending = asyncio.Lock()
        self._patience = patience
        self._socket = sock
        self._splitter = FrameSplitter()
        self._decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
        self._launched: asyncio.Queue[Ticket] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._code = 0
        self._tasks: asyncio.TaskGroup
        self._loop: asyncio.AbstractEventLoop

    async def run(self) -> int:
        """Returns the exit code once the socket has closed or the executor has died."""
        loop = self._loop = asyncio.get_running_loop()
        self._executor.start(loop)
        self._executor.died.add_done_callback(self._on_death)
        self._patience.lost.add_done_callback(self._note_lost)
        self._socket.setblocking(False)
        loop.add_reader(self._socket, self._read)
        async with asyncio.TaskGroup() as self._tasks:
            watch = self._tasks.create_task(self._watch())
            await self._ended.wait()
            watch.cancel()
        loop.remove_reader(self._socket)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await in_thread(self._executor.close, name="close")
        return self._code

    def _read(self) -> None:
        try:
            piece = self._socket.recv(PIECE_BYTES)
        except OSError:
            piece = b""
        if not piece:
            self._ended.set()
        for frame in self._splitter.feed(piece):
            self._run(self._decoder.decode(frame))

    def _run(self, message: ToRank) -> None:
        match message:
            case Launch():
                self._launched.put_nowait(self._executor.launch(*message.batches))
            case Sample():
                if self._has_own_rows:
                    self._launched.put_nowait(self._executor.sample(message))
                elif self._samples:
                    self._executor.sample(message)
            case Resync():
                self._executor.resync(message)
            case WarmUp():
                self._tasks.create_task(self._warm_up())
            case RunJob():
                self._tasks.create_task(self._run_job(message))
            case SetPatience():
                self._patience.seconds = message.seconds
            case ReadKv() | WriteKv():
                self._move_kv(message)
            case StartRank():
                raise BugError("a rank starts once")
            case _:
                assert_never(message)

    async def _run_job(self, run: RunJob) -> None:
        error = await self._executor.run_job(run.job)
        await self._answer(RankJobDone(run.number, error))

    def _move_kv(self, message: ReadKv | WriteKv) -> None:
        """Reads or writes behind the launches before, and before those that follow."""
        assert isinstance(self._executor, HasKv)
        access = self._executor.kv_access()
        moved: Future[HostKv] | Future[None]
        if isinstance(message, ReadKv):
            moved = access.read(message.pages, message.first, message.stop, message.from_layer)
        else:
            values = memoryview(bytearray(message.values))  # torch takes only what may be written
            layers = range(message.from_layer, message.to_layer)
            moved = access.write(message.pages, message.first, message.token_ids, values, layers)
        loop, number = asyncio.get_running_loop(), message.number

        def tell(done: Future[HostKv] | Future[None]) -> None:
            loop.call_soon_threadsafe(self._note_moved, number, done)

        moved.add_done_callback(tell)

    def _note_moved(self, number: int, moved: Future[HostKv] | Future[None]) -> None:
        if self._ended.is_set():
            return
        if (error := moved.exception()) is not None:
            done = KvDone(number, b"", str(error))
        else:
            host = moved.result()
            done = KvDone(number, b"" if host is None else bytes(host()))
        self._tasks.create_task(self._answer(done))

    async def _answer(self, answer: Answer) -> None:
        frame = framed(msgspec.msgpack.encode(answer))
        with contextlib.suppress(OSError):  # rank 0 has gone, which is read as well
            async with self._sending:
                await asyncio.get_running_loop().sock_sendall(self._socket, frame)

    async def _warm_up(self) -> None:
        await self._executor.warm_up()
        self._patience.serve(has_own_rows=self._has_own_rows)

    async def _watch(self) -> None:
        """Answers by the outcomes of this rank's own rows. Ends the rank if a step fails before the
        last stage, which would await it in vain. One that fails in the last stage fails on rank 0
        as well, which tells the scheduler."""
        while True:
            outcome = await (await self._launched.get())
            if self._has_own_rows:
                await self._answer(outcome)
            elif isinstance(outcome, StepFailed) and not self._samples:
                self._end(f"step {outcome.iteration}: {outcome.error.message}")

    def _note_lost(self, lost: Future[str]) -> None:
        """Any thread may call it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end, lost.result())

    def _end(self, reason: str) -> None:
        logger.error("the rank ends: %s", reason)
        self._code = 1
        self._ended.set()

    def _on_death(self, died: asyncio.Future[BaseException]) -> None:
        if not died.cancelled():
            self._end(str(died.result()))


if __name__ == "__main__":
    end_process(main())
