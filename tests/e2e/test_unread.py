"""A stream that nobody reads, against the real server: its memory is bounded and all comes back."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.server_process import ServerProcess
from tests.http.unread_client import UnreadClient

SHORT = {"prompt": "a", "max_tokens": 1}
STREAM = {
    "prompt": "Once upon a time",
    "n": 60,
    "logprobs": 20,
    "max_tokens": 900,
    "temperature": 1,
    "ignore_eos": True,
    "stream": True,
}
LIMITS = ("--processes", "2", "--max-unread-bytes", str(1 << 20), "--write-timeout", "600")


@pytest.mark.slow
async def test_a_stream_that_nobody_reads_is_ended_and_its_pages_are_freed() -> None:
    with ServerProcess(*LIMITS) as server:
        server.post("/v1/completions", SHORT).read()
        before = server.memory_bytes()
        async with UnreadClient(server.address) as client, asyncio.timeout(100):
            await client.post("/v1/completions", STREAM)
            while await asyncio.to_thread(server.metric, "aserve_requests_ended_total") < 2:
                pass  # each look is a request of its own
            assert b"[DONE]" not in await client.read_all()
        assert server.metric('aserve_requests_ended_total{outcome="cancelled"') == 1
        server.post("/v1/completions", SHORT).read()
        assert server.metric("aserve_requests_received_total") == 3
        assert server.metric("aserve_requests_ended_total") == 3
        assert server.metric("aserve_requests_in_flight") == 0
        assert server.metric("aserve_sequences_running") <= 1, "as of the last launch"
        assert server.memory_bytes() - before < 150 << 20
