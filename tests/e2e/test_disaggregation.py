"""Prefill and decode in two servers, whose pages differ in size: the answers are those of one."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from tests.disagg.test_nixl import needs_nixl
from tests.e2e.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

OPTIONS = ("--dtype", "float64", "--debug-checks", "--speculative-algorithm", "NGRAM")
KEY = ("--disaggregation-key", "secret")
STORY = "Once upon a time there was a little robot who lived in a garden. " * 4
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled, three of one prompt": {"temperature": 0.8, "n": 3},
    "penalties and logprobs": {"temperature": 1.2, "frequency_penalty": 1.0, "logprobs": 3},
    "a grammar": {"structured_outputs": {"choice": ["the garden was red", "the garden was blue"]}},
    "scores of the prompt": {"echo": True, "logprobs": 1, "max_tokens": 2},
    "the prompt alone": {"echo": True, "max_tokens": 0},
    "drafts": {"prompt": "red blue green " * 30},
    "less than a page": {"prompt": "a b"},
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module", params=["auto", pytest.param("nixl", marks=needs_nixl)])
def backend(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return "--disaggregation-transfer-backend", request.param


@pytest.fixture(scope="module")
def prefill(port: int, backend: tuple[str, ...]) -> Iterator[ServerProcess]:
    role = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port))
    options = ("--page-size", "16", "--max-num-batched-tokens", "64", "--grammar-workers", "1")
    with ServerProcess(*OPTIONS, *KEY, *role, *backend, *options) as process:
        assert process.address, process.text
        yield process


@pytest.fixture(scope="module")
def decode(port: int, backend: tuple[str, ...], prefill: ServerProcess) -> Iterator[ServerProcess]:
    role = ("--disaggregation-mode", "decode", "--disaggregation-prefill", f"127.0.0.1:{port}")
    options = ("--page-size", "4", "--processes", "2", "--grammar-workers", "1")
    with ServerProcess(*OPTIONS, *KEY, *role, *backend, *options) as process:
        assert process.address, process.text
        yield process
        code, _ = process.end()
        assert code == 0, process.text
        assert "Traceback" not in process.text


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


async def ask(
    session: aiohttp.ClientSession, server: ServerProcess, **body: object
) -> list[tuple[str, object]]:
    body = {"prompt": STORY, "max_tokens": 24, "seed": 5, "ignore_eos": True, **body}
    async with session.post(f"{server.address}/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    return [(choice["text"], choice["logprobs"]) for choice in answer["choices"]]


async def received(session: aiohttp.ClientSession, server: ServerProcess, outcome: str) -> int:
    async with session.get(f"{server.address}/metrics") as response:
        text = await response.text()
    labels = rf'direction="received",outcome="{outcome}"'
    found = re.search(rf"aserve_kv_transfer_seconds_count{{{labels}}} (\S+)", text)
    return int(float(found[1])) if found else 0


@pytest.mark.parametrize("name", BODIES)
async def test_answers_are_those_of_one_server(
    name: str, prefill: ServerProcess, decode: ServerProcess, session: aiohttp.ClientSession
) -> None:
    body = BODIES[name]
    before = await received(session, decode, "ok")
    there = await ask(session, prefill, **{"prompt": f"{name}. {STORY}", **body})
    here = await ask(session, decode, **{"prompt": f"{name}. {STORY}", **body})
    assert here == there
    is_fetched = name not in {"scores of the prompt", "the prompt alone", "less than a page"}
    assert await received(session, decode, "ok") == before + is_fetched


async def test_two_servers_on_one_machine_share_memory(
    backend: tuple[str, ...],
    prefill: ServerProcess,
    decode: ServerProcess,
    session: aiohttp.ClientSession,
) -> None:
    expected = {"auto": "shm", "nixl": "nixl"}[backend[1]]
    await ask(session, decode, prompt=f"shared memory {STORY}")
    for server, direction in ((prefill, "sent"), (decode, "received")):
        async with session.get(f"{server.address}/metrics") as response:
            text = await response.text()
        labels = rf'direction="{direction}",transport="(\w+)"'
        found = re.findall(rf"aserve_kv_transfer_bytes_total{{{labels}}} (\S+)", text)
        assert [(transport, float(size) > 0) for transport, size in found] == [(expected, True)]


async def test_kv_of_many_prompts_comes_while_others_decode_or_leave(
    prefill: ServerProcess, decode: ServerProcess, session: aiohttp.ClientSession
) -> None:
    prompts = [f"{number} {STORY}" for number in range(12)]
    alone = [await ask(session, prefill, prompt=prompt, temperature=0.7) for prompt in prompts]
    leaving = [
        asyncio.create_task(
            ask(session, decode, prompt=f"{number} leaves. {STORY}", max_tokens=500)
        )
        for number in range(6)
    ]
    asked = [
        asyncio.create_task(ask(session, decode, prompt=prompt, temperature=0.7))
        for prompt in prompts
    ]
    await asyncio.sleep(0.05)
    for task in leaving:
        task.cancel()
    assert [await task for task in asked] == alone


@pytest.mark.parametrize("ranks", [("2", "1"), ("1", "2")], ids=["two to one", "one to two"])
async def test_both_sides_may_have_different_numbers_of_ranks(
    ranks: tuple[str, str], session: aiohttp.ClientSession
) -> None:
    port = str(free_port())
    there = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", port)
    here = ("--disaggregation-mode", "decode", "--disaggregation-prefill", f"127.0.0.1:{port}")
    sizes = (*there, "-tp", ranks[0], "--page-size", "16"), (*here, "-tp", ranks[1])
    shared = (*OPTIONS, *KEY, "--grammar-workers", "1")
    with ServerProcess(*shared, *sizes[0]) as prefill, ServerProcess(*shared, *sizes[1]) as decode:
        assert prefill.address, prefill.text
        assert decode.address, decode.text
        names = ["greedy", "sampled, three of one prompt", "a grammar", "drafts"]
        for number, name in enumerate(names):
            body = {"prompt": f"{name}. {STORY}", **BODIES[name]}
            assert await ask(session, decode, **body) == await ask(session, prefill, **body)
            assert await received(session, decode, "ok") == number + 1


async def test_the_decode_side_computes_what_a_dead_prefill_engine_does_not(
    prefill: ServerProcess, decode: ServerProcess, session: aiohttp.ClientSession
) -> None:
    prompts = [f"It ends {number}. {STORY}" for number in range(8)]
    alone = [await ask(session, prefill, prompt=prompt) for prompt in prompts]
    asked = [asyncio.create_task(ask(session, decode, prompt=prompt)) for prompt in prompts[:4]]
    await asyncio.sleep(0)
    prefill.process.kill()
    assert [await task for task in asked] == alone[:4]
    assert [await ask(session, decode, prompt=prompt) for prompt in prompts[4:]] == alone[4:]
    assert await received(session, decode, "failed") > 0
