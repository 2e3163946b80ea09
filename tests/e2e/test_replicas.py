"""`aserve serve --replicas`: the processes are killed, added and removed while clients stream."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import ClientPayloadError, ClientSession, ClientTimeout

from tests.e2e.server_process import START_S, ServerProcess
from tests.e2e.test_attacks import children

KEY = {"Authorization": "Bearer root"}
OPTIONS = (
    *("--replicas", "2", "--dtype", "float64", "--num-pages", "1000", "--health-interval", "0.1"),
    *("--admin-api-key", "root", "--max-engine-restarts", "1000", "--drain-timeout", "600"),
)
RESTART_S = 2.5 * START_S  # of a server while others stream, on a busy machine
NUM_STREAMS = 32
NUM_TOKENS = 24
NUM_KILLS = 20 if os.environ.get("ASERVE_TEST_PROFILE") == "large" else 2


class Replicas(ServerProcess):
    def pids(self) -> list[int]:
        return [pid for pid in children(self.process.pid) if _is_replica(pid)]

    @asynccontextmanager
    async def session(self) -> AsyncIterator[ClientSession]:
        timeout = ClientTimeout(total=START_S)
        async with ClientSession(self.address, headers=KEY, timeout=timeout) as session:
            yield session


def _is_replica(pid: int) -> bool:
    return b"aserve.processes.replica" in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    process = Replicas(*OPTIONS)
    with process:
        assert process.address, process.text
        yield process


class Answer(msgspec.Struct):
    """`tokens` are the texts of a stream's chunks. `last` says how often it ended in which way."""

    tokens: list[str]
    last: list[str]


async def ask(
    session: ClientSession,
    number: int,
    on_token: Any = lambda: None,
    *,
    num_tokens: int = NUM_TOKENS,
) -> Answer:
    body = {
        "model": "aserve-tiny",
        "prompt": f"Once {number % 4}",
        "max_tokens": num_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    answer = Answer([], [])
    async with session.post("/v1/completions", json=body) as got:
        assert got.status == 200, await got.text()
        try:
            async for line in got.content:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    answer.last.append("done")
                elif b'"error"' in data:
                    answer.last.insert(0, "error")
                elif data.startswith(b"{"):
                    answer.tokens += [each["text"] for each in json.loads(data)["choices"]]
                    on_token()
        except ClientPayloadError:
            answer.last.append("cut")
    return answer


async def described(session: ClientSession) -> list[dict[str, Any]]:
    async with session.get("/admin/replicas") as got:
        listed: list[dict[str, Any]] = (await got.json())["data"]
        return listed


async def until(session: ClientSession, num_healthy: int) -> None:
    """Waits until so many replicas are healthy, and no other is there."""
    async with asyncio.timeout(RESTART_S):
        expected = ["healthy"] * num_healthy
        while [each["state"] for each in await described(session)] != expected:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


class Load:
    """Clients that stream one answer after the other until `stop`."""

    def __init__(self, session: ClientSession, *, num_streams: int) -> None:
        self.answers: list[tuple[int, Answer]] = []
        self.stop = False
        self._session = session
        self._num_streams = num_streams
        self._num_tokens = 0
        self._wanted = 0
        self._reached = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self._num_streams):
                group.create_task(self._client(number))

    async def after(self, num_tokens: int) -> None:
        """Waits for so many further tokens of all streams."""
        self._wanted = self._num_tokens + num_tokens
        self._reached.clear()
        await self._reached.wait()

    async def _client(self, number: int) -> None:
        while not self.stop:
            self.answers.append((number, await ask(self._session, number, self._count)))

    def _count(self) -> None:
        self._num_tokens += 1
        if self._num_tokens >= self._wanted:
            self._reached.set()


@pytest.mark.timeout(RESTART_S * (NUM_KILLS + 1))
async def test_killed_replicas_lose_and_double_no_token_and_come_back(replicas: Replicas) -> None:
    """In each round all streams begin together, and a replica is killed at one of their tokens."""
    rng = random.Random(5)
    hit = 0
    async with replicas.session() as session:
        expected = ["".join((await ask(session, number)).tokens) for number in range(4)]
        for _ in range(NUM_KILLS):
            await until(session, 2)
            victim = rng.choice(replicas.pids())
            answers = await _killed(session, victim, at_token=rng.randrange(1, NUM_STREAMS * 8))
            ends = [tuple(answer.last) for answer in answers]
            assert set(ends) <= {("done",), ("error", "done"), ("cut",)}
            hit += NUM_STREAMS - ends.count(("done",))
            for number, answer in enumerate(answers):
                text = "".join(answer.tokens)
                assert expected[number % 4].startswith(text)
                assert text == expected[number % 4] or answer.last != ["done"]
            assert sum(each["in_flight"] for each in await described(session)) == 0
        await until(session, 2)
    assert hit, "no stream was hit"
    assert len(replicas.pids()) == 2


async def _killed(session: ClientSession, pid: int, *, at_token: int) -> list[Answer]:
    """Returns the answers of all streams. The process is killed when they have so many tokens."""
    seen = itertools.count(1)

    def count() -> None:
        if next(seen) == at_token:
            os.kill(pid, signal.SIGKILL)

    return await asyncio.gather(*(ask(session, each, count) for each in range(NUM_STREAMS)))


@pytest.mark.timeout(3 * RESTART_S)
async def test_replicas_join_and_leave_under_load_without_a_failed_request(
    replicas: Replicas,
) -> None:
    async with replicas.session() as session, asyncio.timeout(2 * RESTART_S):
        await until(session, 2)
        before = {each["url"] for each in await described(session)}
        load = Load(session, num_streams=8)

        async def scale(count: int) -> None:
            async with session.put("/admin/replicas", json={"count": count}) as got:
                assert got.status == 200, await got.text()

        async with asyncio.TaskGroup() as group:
            group.create_task(load.run())
            await load.after(50)
            await scale(3)
            await until(session, 3)
            (new,) = {each["url"] for each in await described(session)} - before
            async with session.delete("/admin/replicas", json={"url": min(before)}) as got:
                assert got.status == 200
            await load.after(50)
            await until(session, 2)
            assert new in {each["url"] for each in await described(session)}
            load.stop = True
        assert {tuple(answer.last) for _, answer in load.answers} == {("done",)}
        async with session.put("/admin/replicas", json={"count": 0}) as got:
            assert got.status == 400
        while len(replicas.pids()) > 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def test_a_second_signal_ends_open_streams_and_all_processes(replicas: Replicas) -> None:
    pids = replicas.pids()
    begun: set[int] = set()
    num_tokens = itertools.count()  # since all streams have begun

    def count(number: int) -> None:
        """Sends the second signal while the streams go on after the first one."""
        begun.add(number)
        if len(begun) == NUM_STREAMS and next(num_tokens) in (0, NUM_STREAMS):
            replicas.process.send_signal(signal.SIGTERM)

    async def stream() -> list[Answer]:
        async with replicas.session() as session:
            await until(session, 2)
            asked = (
                ask(session, each, functools.partial(count, each), num_tokens=1000)
                for each in range(NUM_STREAMS)
            )
            return await asyncio.gather(*asked)

    answers = asyncio.run(stream())
    assert ["error", "done"] in [answer.last for answer in answers]
    assert replicas.end(None)[0] == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
