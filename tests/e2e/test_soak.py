"""Many requests of every kind through one engine, and nothing is left of them."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from collections import Counter
from typing import Any

import pytest

from aserve.actors.detokenizer import DetokenizerActor
from aserve.actors.masks import MaskActor
from aserve.actors.scheduler import SchedulerActor
from aserve.actors.tokenizer import TokenizerActor
from aserve.engine import Engine, GenerationError
from aserve.frontend import Frontend
from tests.parity.real_model import engine

pytestmark = pytest.mark.slow

NUM_REQUESTS = 300 if os.environ.get("ASERVE_TEST_PROFILE") == "large" else 150
NUM_CLIENTS = 40
# Room for a few long ones at once, and one waits for the other's pages.
TIGHT: dict[str, Any] = {
    "page_size": 8,
    "num_pages": 130,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 64,
}
GROWTH = 2000  # objects; a request that stays takes about 50


class Client:
    """Asks one request after the other, of random length, and leaves every third of them early."""

    def __init__(self, running: Engine, rng: random.Random) -> None:
        self._running = running
        self._rng = rng
        self.outcomes: Counter[str] = Counter()

    async def ask(self, count: int) -> None:
        for _ in range(count):
            self.outcomes[await self._ask()] += 1

    async def _ask(self) -> str:
        rng = self._rng
        prompt = [rng.randrange(300, 2000)] * rng.randrange(1, 20) + [7] * rng.randrange(1, 90)
        chunks = self._running.generate(prompt, **self._fields())
        num_read = rng.randrange(4) if rng.random() < 0.3 else 1000
        try:
            for _ in range(num_read):
                if (await anext(chunks, None)) is None:
                    return "finished"
        except GenerationError as error:
            return error.reason.code or ""
        finally:
            await chunks.aclose()
        return "left"

    def _fields(self) -> dict[str, Any]:
        rng = self._rng
        return {
            "max_tokens": rng.randrange(1, 60),
            "temperature": rng.choice([0, 0.8, 1.2]),
            "seed": rng.randrange(1000),
            "n": rng.choice([1, 1, 1, 2, 3]),
            "priority": rng.randrange(-1, 2),
            "timeout": rng.choice([0.03, 60, 60, 60, 60]),
            "logprobs": rng.choice([None, None, 2]),
            "ignore_eos": rng.random() < 0.5,
            "stop": rng.choice([None, "e", " the"]),
        }


async def test_of_many_requests_nothing_is_left() -> None:
    threads_before, tasks_before = set(threading.enumerate()), asyncio.all_tasks()
    async with engine(**TIGHT) as running:
        await crowd(running, NUM_CLIENTS, seed=0)  # what is made once is made here
        frontend = running._frontend
        await idle(frontend)
        tasks, threads = asyncio.all_tasks(), thread_names()
        objects = num_objects(frontend)
        outcomes = await crowd(running, NUM_REQUESTS, seed=1)
        await idle(frontend)
        assert outcomes.total() == NUM_REQUESTS
        # Which of the two a deadline ends with depends on the machine's speed.
        num_late = outcomes.pop("deadline_exceeded", 0) + outcomes.pop("deadline_unreachable", 0)
        assert set(outcomes) == {"finished", "left"}
        assert min(num_late, *outcomes.values()) >= 5
        assert asyncio.all_tasks() == tasks
        assert thread_names() == threads
        assert num_objects(frontend) - objects < GROWTH
    assert asyncio.all_tasks() == tasks_before
    for thread in set(threading.enumerate()) - threads_before:
        if thread.name.startswith("asyncio"):
            continue  # it ends with the event loop
        thread.join(5)  # the one that closed the executor has only just said so
        assert not thread.is_alive()


async def crowd(running: Engine, num_requests: int, *, seed: int) -> Counter[str]:
    clients = [Client(running, random.Random(seed * 1000 + i)) for i in range(NUM_CLIENTS)]
    shares = [
        num_requests // NUM_CLIENTS + (i < num_requests % NUM_CLIENTS) for i in range(NUM_CLIENTS)
    ]
    await asyncio.gather(
        *(client.ask(share) for client, share in zip(clients, shares, strict=True))
    )
    return sum((client.outcomes for client in clients), Counter())


async def idle(frontend: Frontend) -> None:
    """Returns once nothing is owned by anybody; then every row and page is where it was."""
    assert frontend.gateway.num_open == 0
    assert frontend._running is not None
    detokenizer, _, masks, scheduler, _, tokenizer = frontend._running.supervisor._actors
    assert isinstance(detokenizer, DetokenizerActor)
    assert isinstance(masks, MaskActor)
    assert isinstance(scheduler, SchedulerActor)
    assert isinstance(tokenizer, TokenizerActor)
    async with asyncio.timeout(60):
        while not scheduler._scheduler.is_idle or detokenizer.num_requests:  # noqa: ASYNC110
            await asyncio.sleep(0)
    state = scheduler._scheduler.state
    assert (len(state.running), len(state.waiting), len(state.samples)) == (0, 0, 0)
    assert state.rows.num_free == state.spec.max_rows
    assert state.cache.num_used(0) == 0
    state.cache.check([])
    assert len(scheduler._timers) == 0
    assert tokenizer._preparing == {}
    assert masks._requests == {}


def thread_names() -> list[str]:
    """Without those that begin when they are first needed: the tokenizer's two for long texts, and
    the event loop's own, which trims the heap.
    """
    names = (thread.name for thread in threading.enumerate())
    return sorted(name for name in names if not name.startswith(("tokenize", "asyncio")))


def num_objects(frontend: Frontend) -> int:
    """Without the stories of past requests, which are kept on purpose, up to a number."""
    frontend._trace._stories.clear()
    gc.collect()
    return len(gc.get_objects())
