"""The actor's own promises: order, death, and nothing left running."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from aserve.actors.base import Actor
from aserve.errors import BugError, ErrorInfo, QueueFull


class Recorder(Actor[int]):
    """Keeps what it gets; a negative number kills it."""

    def __init__(self) -> None:
        super().__init__("recorder")
        self.seen: list[list[int]] = []
        self.deaths: list[tuple[str, str]] = []

    def handle(self, events: list[int]) -> None:
        if min(events) < 0:
            raise ValueError(f"got {min(events)}")
        self.seen.append(events)

    def note_death(self, name: str, error: BaseException) -> None:
        self.deaths.append((name, str(error)))

    async def fail_at_the_end(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise RuntimeError("its cleanup failed")

    async def fail_later(self) -> None:
        await asyncio.sleep(0)
        raise RuntimeError("a side task failed")


async def tick(times: int = 3) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


async def test_messages_sent_together_arrive_as_one_batch_in_order() -> None:
    actor = Recorder()
    actor.start(actor.note_death)
    for value in (3, 1, 2):
        actor.inbox.send(value)
    await tick()
    actor.inbox.send(4)
    await tick()
    assert actor.seen == [[3, 1, 2], [4]]
    await actor.stop()


async def test_a_heartbeat_tells_how_long_ago_the_last_batch_came_and_what_waits() -> None:
    actor = Recorder()
    actor.start(actor.note_death)
    actor.inbox.send(1)
    await tick()
    actor.inbox.send(2)
    heartbeat = actor.heartbeat()
    assert (heartbeat.num_beats, heartbeat.backlog) == (1, 1)
    assert 0 <= heartbeat.age_s < 60
    await actor.stop()


async def test_an_exception_in_handle_is_reported_once_and_later_messages_do_no_harm() -> None:
    actor = Recorder()
    actor.start(actor.note_death)
    actor.inbox.send(-1)
    await tick()
    actor.inbox.send(-2)
    await tick()
    assert actor.deaths == [("recorder", "got -1")]
    await actor.stop()


async def test_a_failing_spawned_task_kills_its_actor_and_only_the_first_death_counts() -> None:
    actor = Recorder()
    actor.start(actor.note_death)
    actor.spawn(actor.fail_later())
    actor.spawn(actor.fail_later())
    await tick(5)
    assert actor.deaths == [("recorder", "a side task failed")]
    await actor.stop()


async def test_stop_ends_every_task_and_is_no_death() -> None:
    before = asyncio.all_tasks()
    actor = Recorder()
    actor.start(actor.note_death)
    actor.spawn(asyncio.sleep(3600))
    actor.spawn(actor.fail_at_the_end())
    await tick()
    await actor.stop()
    await tick()
    assert asyncio.all_tasks() == before
    assert actor.deaths == []
    actor.inbox.send(1)  # a neighbour that stops later may still send: nothing happens


class RustPanic(BaseException):
    """A panic of a Rust library derives from BaseException, not from Exception."""


def no_memory() -> None:
    raise MemoryError


def no_unicode() -> None:
    "\ud800".encode()


def no_luck() -> None:
    raise RuntimeError("the secret of the inside")


def panic() -> None:
    raise RustPanic("called `Option::unwrap()` on a `None` value")


UNEXPECTED = [no_memory, no_unicode, no_luck, panic]


class Worker(Actor[str]):
    """Work of each request in `attempt`; the request "guilty" raises."""

    def __init__(self, guilt: Callable[[], None], *, is_beside: bool = False) -> None:
        super().__init__("worker", story=lambda request_id: f"the story of {request_id}")
        self.guilt = guilt
        self.is_beside = is_beside
        self.done: list[str] = []
        self.ended: list[tuple[str, ErrorInfo]] = []
        self.deaths: list[str] = []

    def handle(self, events: list[str]) -> None:
        for request_id in events:
            if self.is_beside:
                self.spawn_for(request_id, self.work_beside(request_id))
            else:
                self.attempt(request_id, self.work, request_id)

    def work(self, request_id: str) -> None:
        if request_id == "guilty":
            self.guilt()
        self.done.append(request_id)

    async def work_beside(self, request_id: str) -> None:
        await asyncio.sleep(0)
        self.work(request_id)

    def end_request(self, request_id: str, error: ErrorInfo) -> None:
        self.ended.append((request_id, error))
        if error.code == "queue_full":
            raise ValueError("nobody can be told")


async def worked(worker: Worker) -> None:
    """Sixteen requests in one batch, and one more afterwards."""
    worker.start(lambda name, _: worker.deaths.append(name))
    names = [f"r{i}" for i in range(15)]
    for request_id in (*names[:7], "guilty", *names[7:]):
        worker.inbox.send(request_id)
    await tick(6)
    worker.inbox.send("later")
    await tick(6)
    await worker.stop()
    assert worker.done == [*names, "later"]
    assert worker.deaths == []
    assert [request_id for request_id, _ in worker.ended] == ["guilty"]


@pytest.mark.parametrize("is_beside", [False, True])
@pytest.mark.parametrize("guilt", UNEXPECTED)
async def test_what_one_requests_work_raises_ends_that_request_alone(
    guilt: Callable[[], None], is_beside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(guilt, is_beside=is_beside)
    with caplog.at_level(logging.ERROR):
        await worked(worker)
    ((_, error),) = worker.ended
    assert (error.code, error.status) == ("bug", 500)
    assert "secret" not in error.message
    assert "unwrap" not in error.message
    assert "the story of guilty" in caplog.text
    assert guilt.__name__ in caplog.text  # the traceback


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (QueueFull("the queue is full"), "queue_full", "the queue is full"),
        (BugError("row 3 was named twice"), "bug", "an unexpected error"),
    ],
)
async def test_the_client_is_told_an_error_of_the_tree_but_no_bugs_own_words(
    raised: Exception, code: str, message: str
) -> None:
    def guilt() -> None:
        raise raised

    worker = Worker(guilt)
    await worked(worker)
    ((_, error),) = worker.ended
    assert error.code == code
    assert message in error.message
    assert "row 3" not in error.message


async def test_what_is_stopped_before_its_first_turn_leaves_no_coroutine_behind() -> None:
    actor = Recorder()
    actor.start(actor.note_death)  # its task has not run yet: a lost coroutine would warn
    await actor.stop()
    worker = Worker(no_luck)
    worker.start(lambda name, _: worker.deaths.append(name))
    worker.spawn_for("begun", asyncio.sleep(3600))
    await tick()
    worker.spawn_for("r", worker.work_beside("r"))  # has not run yet: a lost coroutine would warn
    await worker.stop()
    assert (worker.ended, worker.deaths) == ([], [])
