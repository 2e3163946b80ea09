"""The actor's own promises: order, death, and nothing left running."""

from __future__ import annotations

import asyncio

from aserve.actors.base import Actor


class Recorder(Actor[int]):
    """Keeps what it gets; a negative number kills it."""

    def __init__(self) -> None:
        super().__init__("recorder")
        self.seen: list[list[int]] = []
        self.deaths: list[tuple[str, str]] = []
        self.died = asyncio.Event()

    def handle(self, events: list[int]) -> None:
        if min(events) < 0:
            raise ValueError(f"got {min(events)}")
        self.seen.append(events)

    def note_death(self, name: str, error: BaseException) -> None:
        self.deaths.append((name, str(error)))
        self.died.set()

    async def fail_at_the_end(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise RuntimeError("its cleanup failed")

    async def fail_later(self, wanted: asyncio.Event) -> None:
        await wanted.wait()
        raise RuntimeError("a side task failed")


async def turn(times: int = 3) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


async def test_messages_sent_together_arrive_as_one_batch_in_order() -> None:
    actor = Recorder()
    actor.start(actor.note_death)
    for value in (3, 1, 2):
        actor.inbox.send(value)
    await turn()
    actor.inbox.send(4)
    await turn()
    assert actor.seen == [[3, 1, 2], [4]]
    await actor.stop()


async def test_an_exception_in_handle_is_reported_once_with_the_actors_name() -> None:
    actor = Recorder()
    actor.start(actor.note_death)
    actor.inbox.send(-1)
    await actor.died.wait()
    assert actor.deaths == [("recorder", "got -1")]
    await actor.stop()


async def test_a_failing_spawned_task_kills_its_actor_and_only_the_first_death_counts() -> None:
    actor = Recorder()
    wanted = asyncio.Event()
    actor.start(actor.note_death)
    actor.spawn(actor.fail_later(wanted))
    actor.spawn(actor.fail_later(wanted))
    wanted.set()
    await actor.died.wait()
    await turn()
    assert actor.deaths == [("recorder", "a side task failed")]
    await actor.stop()


async def test_what_is_sent_to_a_dead_actor_does_not_kill_the_sender() -> None:
    actor = Recorder()
    actor.start(actor.note_death)
    actor.inbox.send(-1)
    await actor.died.wait()
    actor.inbox.send(1)
    await actor.stop()


async def test_stop_ends_every_task_and_is_no_death() -> None:
    before = asyncio.all_tasks()
    actor = Recorder()
    actor.start(actor.note_death)
    actor.spawn(actor.fail_later(asyncio.Event()))
    actor.spawn(actor.fail_at_the_end())
    await turn()
    await actor.stop()
    await turn()
    assert asyncio.all_tasks() == before
    assert actor.deaths == []
    actor.inbox.send(1)  # a neighbour that stops later may still send: nothing happens


async def test_an_actor_stopped_before_its_first_turn_leaves_no_coroutine_behind() -> None:
    actor = Recorder()
    actor.start(actor.note_death)  # its task has not run yet: a lost coroutine would warn
    await actor.stop()
    assert actor.deaths == []


async def test_the_heartbeat_shows_progress_and_what_is_waiting() -> None:
    actor = Recorder()
    actor.inbox.send(1)
    before = actor.heartbeat()
    assert (before.num_beats, before.backlog) == (0, 1)
    actor.start(actor.note_death)
    await turn()
    after = actor.heartbeat()
    assert (after.num_beats, after.backlog) == (1, 0)
    await actor.stop()
