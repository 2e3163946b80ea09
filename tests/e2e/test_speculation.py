"""A server with `--speculative-algorithm EAGLE3` and no path: its answers are those of one without
it, and acceptance is in the usage and the metrics.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.slow

CHAT: dict[str, Any] = {
    "model": "aserve-tiny",
    "messages": [{"role": "user", "content": "Write a story about a cat at the lake."}],
    "max_tokens": 60,
}


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1.0, "seed": 3}])
async def test_a_bundled_drafter_needs_no_path_and_changes_no_answer(
    fields: dict[str, Any], client: AsyncOpenAI
) -> None:
    expected = (await client.chat.completions.create(**CHAT, **fields)).choices[0].message.content
    options = ("--speculative-algorithm", "EAGLE3", "--dtype", "float64")
    with ServerProcess(*options) as process:
        assert process.address, process.text
        async with process.client() as drafting:
            # How many windows there are follows from the times of steps: a busy machine has few,
            # and an answer may have none.
            timings: dict[str, Any] = {}
            for _ in range(10):
                answer = await drafting.chat.completions.create(
                    **CHAT, extra_body={"include_timings": True}, **fields
                )
                assert answer.choices[0].message.content == expected
                timings = (answer.usage.model_extra or {})["timings"] if answer.usage else {}
                if "accept_len" in timings:
                    break
        metrics = await asyncio.to_thread(process.get, "/metrics")
    assert timings["accept_len"] > 1
    assert sum(timings["accept_histogram"]) == timings["draft_windows"] > 0
    for name, value in (
        ("aserve_draft_windows_total", timings["draft_windows"]),
        ("aserve_draft_window_accepted_tokens_sum", timings["draft_n_accepted"]),
    ):
        assert f"{name} {float(value)}" in metrics.decode()
