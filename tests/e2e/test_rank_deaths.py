"""kill -9 of each rank at random moments under 32 streams: all ranks are started again, and each
stream goes on with the very same answer. Ranks are those of tensor parallelism, of a pipeline, with
drafts that travel from its last stage to its first one, of data parallel attention, and of expert
parallelism.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import time
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from aserve.host.threads import in_thread
from tests.e2e.server_process import ServerProcess
from tests.e2e.test_engine_restarts import IS_LARGE, Crowd
from tools.train_models.folder import MODELS_DIR, complete_folder

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NUM_STREAMS = 32
NUM_RANKS = 2
PIPELINE = ("-pp", "2", "--overlap-depth", "2")
DRAFTS = ("--speculative-algorithm", "EAGLE3")
LAYOUTS = {
    "tensor": ("-tp", "2"),
    "pipeline": PIPELINE,
    "pipeline with drafts": (*PIPELINE, *DRAFTS),
    "pipeline with draft trees": (
        *(*PIPELINE, *DRAFTS),
        *("--speculative-topk", "3", "--speculative-num-steps", "3"),
    ),
    "data": ("--enable-dp-attention", "--data-parallel-size", "2"),
    "expert": ("-ep", "2"),
}
# The others take no other way when a rank is lost.
EVERY_DAY = ("tensor", "pipeline with draft trees")
NUM_KILLS = int(os.environ.get("ASERVE_TEST_KILLS", "100" if IS_LARGE else "1"))
END_S = 10.0  # the rest of an engine whose rank has died ends within it
KILLS_PER_CROWD = 2  # a request with which the engine dies a third time in a row is ended


@pytest.mark.parametrize("layout", LAYOUTS if IS_LARGE else EVERY_DAY)
async def test_killed_ranks_change_nothing_of_32_streams(layout: str, tmp_path: Path) -> None:
    rng = random.Random(int(os.environ.get("ASERVE_TEST_SEED", "0")))
    took_s: list[Recovery] = []
    options = ("--dtype", "float64", "--processes", "2", "--max-engine-restarts", "1000")
    ranks = (*LAYOUTS[layout], "--grammar-workers", "1")
    if layout == "expert":
        folder = complete_folder(MODELS_DIR / "moe", tmp_path / "model")
        ranks = (*ranks, "--model", str(folder), "--served-model-name", "aserve-tiny")
    with ServerProcess(*options, *ranks) as server:
        assert server.address, server.text
        async with aiohttp.ClientSession(server.address) as client:
            crowd = Crowd(client)
            whole = await asyncio.gather(*map(crowd.ask, range(NUM_STREAMS)))
            quarter = crowd.num_events // 4
            while len(took_s) < NUM_KILLS:
                crowd = Crowd(client)
                answers = asyncio.gather(*map(crowd.ask, range(NUM_STREAMS)))
                for part in range(min(KILLS_PER_CROWD, NUM_KILLS - len(took_s))):
                    await crowd.until_events(part * quarter + rng.randrange(quarter))
                    took_s.append(await killed(server, crowd, rank=1 - len(took_s) % NUM_RANKS))
                assert await answers == whole
        assert server.metric("aserve_engine_restarts_total") == len(took_s)
        received = server.metric("aserve_requests_received_total")
        assert received == server.metric("aserve_requests_ended_total")
        assert server.metric("aserve_requests_in_flight") == 0
        if "--speculative-algorithm" in ranks:
            assert server.metric("aserve_draft_tokens_accepted_total") > 0
        code, _ = server.end()
    assert code == 0, server.text
    assert "Traceback" not in server.text
    for name, times in zip(Recovery._fields, zip(*took_s, strict=True), strict=True):
        ordered = sorted(times)
        middle, last = ordered[len(ordered) // 2], ordered[-1]
        logger.info("%s: %s: median %.2f s, longest %.2f s", layout, name, middle, last)


class Recovery(NamedTuple):
    """Seconds from a kill until all ranks of the old engine have ended, until the new one has its
    ranks, and until the streams go on.
    """

    ended_s: float
    started_s: float
    went_on_s: float


async def killed(server: ServerProcess, crowd: Crowd, *, rank: int) -> Recovery:
    pids = server.rank_pids
    assert len(pids) == NUM_RANKS
    began_s = time.monotonic()
    os.kill(pids[rank], signal.SIGKILL)
    await in_thread(lambda: wait_for_end(pids), name="wait")
    ended_s = time.monotonic() - began_s
    assert ended_s < END_S
    # The old engine's last messages are read long before a new one has its ranks.
    await in_thread(lambda: wait_for_ranks(server, besides=set(pids)), name="wait")
    started_s = time.monotonic() - began_s
    await crowd.until_events(crowd.num_events + 1)
    return Recovery(ended_s, started_s, time.monotonic() - began_s)


def wait_for_end(pids: list[int]) -> None:
    """NOTE: a process that has ended may be known until its parent asks for it."""
    ends_s = time.monotonic() + 60
    while any(map(is_alive, pids)):
        assert time.monotonic() < ends_s, pids
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "XZ"
    return False


def wait_for_ranks(server: ServerProcess, *, besides: set[int]) -> None:
    ends_s = time.monotonic() + 60
    while len(set(server.rank_pids) - besides - {server.process.pid}) < NUM_RANKS:
        assert time.monotonic() < ends_s, server.text
        time.sleep(0.02)
