"""A server that is killed in the middle of a batch, and started again, finishes it."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from openai import AsyncOpenAI
from openai.types import Batch

from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.slow

IS_LARGE = os.environ.get("ASERVE_TEST_PROFILE") == "large"
NUM_LINES = 40
KILLED_AT = 10  # lines that are answered


def content() -> bytes:
    """Lines of very different length, so that many are under way at any time."""
    bodies = [
        {"prompt": f"Once {i}", "max_tokens": 5 + i * 37 % 120, "seed": i, "ignore_eos": True}
        for i in range(NUM_LINES)
    ]
    lines = [
        {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    return b"\n".join(json.dumps(line).encode() for line in lines)


async def reached(client: AsyncOpenAI, batch_id: str, num_answered: int) -> Batch:
    async with asyncio.timeout(60):
        while True:
            batch = await client.batches.retrieve(batch_id)
            counts = batch.request_counts
            answered = 0 if counts is None else counts.completed + counts.failed
            if batch.status == "completed" or answered >= num_answered:
                return batch
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("num_processes", [1, 2] if IS_LARGE else [2])
async def test_each_line_of_a_killed_batch_is_answered_once(
    tmp_path: Path, num_processes: int
) -> None:
    options = ("--files-dir", str(tmp_path), "--processes", str(num_processes))
    batch_id = ""
    for num_answered in (KILLED_AT, NUM_LINES + 1):
        with ServerProcess(*options) as server:  # killed on leaving
            assert server.address, server.text
            async with server.client() as client:
                if not batch_id:
                    file = await client.files.create(file=("in", content()), purpose="batch")
                    batch = await client.batches.create(
                        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
                    )
                    batch_id = batch.id
                batch = await reached(client, batch_id, num_answered)
                if num_answered <= NUM_LINES:
                    assert batch.status == "in_progress", "it is killed in the middle"
                    continue
                assert (batch.status, batch.error_file_id) == ("completed", None)
                assert batch.output_file_id is not None
                answers = (await client.files.content(batch.output_file_id)).text.splitlines()
    assert [json.loads(line)["custom_id"] for line in answers] == [
        f"c{i}" for i in range(NUM_LINES)
    ]
