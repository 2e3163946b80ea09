"""The router before two real servers, of which one is killed."""

from __future__ import annotations

import asyncio
from collections import Counter

from openai import APIError

from tests.e2e.server_process import ServerProcess, command

OPTIONS = ("--dtype", "float64", "--processes", "1")
NUM_STREAMS = 16
NUM_TOKENS = 48


async def test_a_killed_replica_breaks_only_the_streams_that_it_had_begun() -> None:
    """Streams of the other replica get all their tokens, and later requests find it."""
    with ServerProcess(*OPTIONS) as left, ServerProcess(*OPTIONS) as right:
        addresses = (left.address, right.address)
        options = ("--policy", "round_robin", "--health-interval", "0.1", "--port", "0")
        with ServerProcess(arguments=command("route", *addresses, *options)) as router:
            router.read_until(f"{left.address} state=healthy")
            if f"{right.address} state=healthy" not in router.text:
                router.read_until(f"{right.address} state=healthy")
            async with router.client() as client:

                async def stream(number: int) -> str:
                    created = await client.completions.create(
                        model="aserve-tiny",
                        prompt=f"Once {number % 4}",
                        max_tokens=NUM_TOKENS,
                        temperature=0,
                        stream=True,
                        extra_body={"ignore_eos": True},
                    )
                    text = ""
                    try:
                        async for chunk in created:
                            text += chunk.choices[0].text if chunk.choices else ""
                            seen[number] += 1
                            if sum(seen.values()) == NUM_STREAMS:
                                left.process.kill()
                    except (APIError, OSError):
                        return "broken"
                    return text

                seen: Counter[int] = Counter()
                texts = await asyncio.gather(*map(stream, range(NUM_STREAMS)))
                again = await asyncio.gather(*map(stream, range(4)))
        assert "broken" not in again
        whole = [text for text in texts if text != "broken"]
        assert len(whole) >= NUM_STREAMS // 2
        assert set(whole) <= set(again)
