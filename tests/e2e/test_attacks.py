"""What one client may do to a server and to its other clients, over HTTP.

The server runs in one process and in two. There is a test per finding of a review of hostile
input: it attacks as Mallory, checks what she sees, and often what Alice sees meanwhile. After each
test Alice must get her ordinary answer. What the HTTP server refuses by itself is in tests/http:
hosts, origins, keys, frames, what is no HTTP or no JSON, and answers that would be enormous.

The server records to a disk that is full, is started with its keys in a file, and ends by a hang-up
of its terminal. test_process_life.py has what needs a start of its own: closed standard streams and
a recording that cannot begin. test_cli.py has models that do not exist.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from aserve.bench.hostile_bodies import BODIES, HostileBody
from tests.e2e.server_process import ServerProcess, command
from tests.http.unread_client import UnreadClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
ALICE, MALLORY = "alice?key", "mallory-key"
ROWS = 16
MAX_CONNECTIONS = 96
# A message without text has no tokens.
TEMPLATE = (
    "{% for message in messages %}{% if message.content %}"
    "<|{{ message.role }}|>{{ message.content }}<|eot|>"
    "{% endif %}{% endfor %}<|assistant|>"
)
OPTIONS = {
    "--chat-template": TEMPLATE,
    "--dtype": "float32",
    "--log-level": "error",
    "--max-num-seqs": str(ROWS),
    "--max-queue": "48",
    "--max-connections": str(MAX_CONNECTIONS),
    "--header-timeout": "0.5",
    "--body-timeout": "5",
    "--write-timeout": "30",
    "--max-unread-bytes": str(1 << 17),
    "--grammar-mask-time": "0.3",
    "--grammar-timeout": "5",
    "--grammar-workers": "1",
}
SOON_S = 30.0  # on one slow core, beside other tests
MIB = 1 << 20

ORDINARY = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
REGEX = {"prompt": "a", "max_tokens": 20, "structured_outputs": {"regex": "[a-z]{10}[0-9]{5}"}}
# The ways to read an output of it grow with the cube of its length.
AMBIGUOUS = {
    "prompt": "Once upon a time",
    "n": ROWS,
    "max_tokens": 900,
    "temperature": 1,
    "ignore_eos": True,
    "structured_outputs": {"grammar": "root ::= s\ns ::= s s | [a-z ]"},
}


def exploding(number: int) -> dict[str, Any]:
    pattern = f"(((((a?){{50}}){{50}}){{50}}){{50}}){{{50 + number}}}"
    return {"prompt": "a", "structured_outputs": {"regex": pattern}}


@pytest.fixture(scope="module", params=["1", "2"], ids=["one-process", "two-processes"])
def processes(request: pytest.FixtureRequest) -> str:
    number: str = request.param
    return number


@pytest.fixture(scope="module")
def recording(processes: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attacks") / "recording"


@pytest.fixture(scope="module")
def server(processes: str, recording: Path) -> Iterator[ServerProcess]:
    """A limit of the size of files plays the full disk."""
    keys = recording.with_name("keys")
    keys.write_text(f"{ALICE}\n{MALLORY}\n")
    own = {"--processes": processes, "--api-key-file": str(keys), "--record": str(recording)}
    words = (word for pair in (OPTIONS | own).items() for word in pair)
    serve = command("serve", "--port", "0", *words)
    limited = ["/bin/sh", "-c", 'ulimit -f 64; trap "" XFSZ; exec "$@"', "sh", *serve]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    with ServerProcess(arguments=limited) as process:
        assert process.address, process.text
        yield process
        code, _ = process.end(signal.SIGHUP)
        assert code == 0, process.text
        assert "Traceback" not in process.text


class Client:
    def __init__(self, web: aiohttp.ClientSession) -> None:
        self.web = web

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """The status, and the error's code or the whole answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} | headers
        async with asyncio.timeout(SOON_S), self.web.post(path, data=data, headers=sent) as answer:
            found = await answer.json()
        return answer.status, found["error"]["code"] if answer.status >= 400 else found

    async def text(self, body: dict[str, Any]) -> str:
        status, answer = await self.post(COMPLETIONS, body)
        assert status == 200, answer
        text: str = answer["choices"][0]["text"]
        return text

    async def seconds(self, body: dict[str, Any]) -> float:
        start_s = time.monotonic()
        await self.text(body)
        return time.monotonic() - start_s


async def opened(server: ServerProcess, key: str) -> AsyncIterator[Client]:
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(server.address, headers=headers, connector=connector) as web:
        yield Client(web)


@pytest.fixture
async def mallory(server: ServerProcess) -> AsyncIterator[Client]:
    async for client in opened(server, MALLORY):
        yield client


@pytest.fixture
async def alice(server: ServerProcess) -> AsyncIterator[Client]:
    """She gets her ordinary answer before the attack and after it."""
    async for client in opened(server, ALICE):
        before = await client.text(ORDINARY)
        yield client
        assert await client.text(ORDINARY) == before
        assert server.process.poll() is None


@pytest.fixture(autouse=True)
async def _all_have_alice(alice: Client) -> None:
    pass


async def raw(server: ServerProcess, sent: bytes, *, size: int = -1) -> bytes:
    """What the server says until it closes the connection, or so many bytes of it. Nothing, if it
    closes before it has read what was sent.
    """
    host, port = server.address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    try:
        async with asyncio.timeout(SOON_S):
            return await reader.read(size)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def size_of(path: Path) -> int:
    return path.stat().st_size


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


# ------------------------------------------------------------ high


async def test_h1_an_ambiguous_grammar_ends_its_own_request_and_delays_no_other(
    alice: Client, mallory: Client
) -> None:
    await alice.text(REGEX)  # it is compiled
    alone_s = statistics.median([await alice.seconds(REGEX) for _ in range(5)])
    attack = asyncio.create_task(mallory.post(COMPLETIONS, AMBIGUOUS))
    beside_s: list[float] = []
    while not attack.done() and len(beside_s) < 8:
        beside_s.append(await alice.seconds(REGEX))
    assert await attack == (400, "grammar_too_complex")
    assert statistics.median(beside_s) < 3 * alone_s + 0.1
    assert max(beside_s) < 3 * alone_s + 3


async def test_h2_long_texts_are_refused_by_their_bytes_and_leave_no_memory(
    server: ServerProcess, alice: Client, mallory: Client
) -> None:
    text = b'{"prompt": "' + b"Once upon a time, " * (7 * MIB // 18) + b'", "timeout": 2}'
    before = server.memory_bytes()
    packed = mallory.post(COMPLETIONS, gzip.compress(text), **{"Content-Encoding": "gzip"})
    attack = asyncio.gather(packed, *(mallory.post(COMPLETIONS, text) for _ in range(4)))
    honest_s = await alice.seconds({"prompt": "to be " * 400, "max_tokens": 1})
    assert await attack == [
        (413, "request_too_large"),
        *[(400, "context_length_exceeded")] * 4,
    ]
    assert honest_s < 10
    # These five bodies once left more than a gigabyte. What an allocator keeps varies.
    assert server.memory_bytes() - before < 300 * MIB


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.name.replace(" ", "-"))
async def test_h3_a_body_of_many_values_is_refused_and_delays_nobody(
    alice: Client, mallory: Client, body: HostileBody
) -> None:
    data, headers = body.data(4 * MIB), body.headers
    attack = asyncio.gather(*(mallory.post(body.path, data, **headers) for _ in range(2)))
    delays_s = []
    while not attack.done():
        start_s = time.monotonic()
        async with alice.web.get("/health") as answer:
            await answer.read()
        delays_s.append(time.monotonic() - start_s)
    assert await attack == [(body.status, body.code)] * 2
    assert max(delays_s) < 5, "tests/http/test_hostile.py measures processor time"


async def test_h4_a_flood_does_not_make_another_client_wait_for_it(
    alice: Client, mallory: Client
) -> None:
    body = ORDINARY | {"max_tokens": 60}
    flood = [asyncio.create_task(mallory.post(COMPLETIONS, body)) for _ in range(3 * ROWS)]
    await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
    await alice.text(ORDINARY)
    assert sum(task.done() for task in flood) < 2 * ROWS + ROWS // 2
    assert {status for status, _ in await asyncio.gather(*flood)} == {200}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt": ["a"] * 4, "n": 128}, "too_many_sequences"),
        ({"prompt": "a", "n": ROWS + 1}, "too_many_sequences"),
        ({"prompt": "a", "priority": -1}, "priority_not_allowed"),
    ],
)
async def test_h4_nobody_takes_more_than_a_share(
    mallory: Client, fields: dict[str, Any], code: str
) -> None:
    assert await mallory.post(COMPLETIONS, fields) == (400, code)


async def num_cancelled(client: Client) -> float:
    async with client.web.get("/metrics") as answer:
        text = await answer.text()
    line = 'aserve_requests_ended_total{outcome="cancelled"'
    return sum(float(each.split()[-1]) for each in text.splitlines() if each.startswith(line))


async def test_h5_a_stream_that_nobody_reads_is_ended(server: ServerProcess, alice: Client) -> None:
    body = AMBIGUOUS | {"structured_outputs": None, "logprobs": 20, "stream": True}
    async with UnreadClient(server.address) as client, asyncio.timeout(SOON_S):
        before = await num_cancelled(alice)
        await client.post(COMPLETIONS, body, key=MALLORY)
        while await num_cancelled(alice) == before:
            pass  # each look is a request of its own
        received = await client.read_all()
    assert b"data: " in received
    assert b"[DONE]" not in received


# ------------------------------------------------------------ medium


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6])
async def test_m2_a_tiny_temperature_is_greedy(mallory: Client, temperature: float) -> None:
    drawn = await mallory.text(ORDINARY | {"temperature": temperature, "seed": 1})
    assert drawn == await mallory.text(ORDINARY)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
KEY = f"Authorization: Bearer {MALLORY}\r\n".encode()


async def test_m3_what_does_not_arrive_is_given_up(server: ServerProcess) -> None:
    body_head = HEAD + KEY + b"Content-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    sent = [b"", HEAD, body_head + b"{"] * 8
    received = await asyncio.gather(*(raw(server, data, size=13) for data in sent))
    assert received == [b"", b"HTTP/1.1 408 ", b"HTTP/1.1 408 "] * 8


async def test_m3_connections_have_a_bound(server: ServerProcess, alice: Client) -> None:
    """Where no request runs, the oldest ones make room."""
    received = await asyncio.gather(*(raw(server, HEAD) for _ in range(2 * MAX_CONNECTIONS)))
    codes = [data[9:12] for data in received]
    assert set(codes) == {b"408", b""}, "some were closed to make room for others"


async def test_m4_a_recording_that_fills_the_disk_ends_nothing(
    mallory: Client, recording: Path
) -> None:
    await asyncio.gather(*(mallory.text(ORDINARY | {"max_tokens": 200}) for _ in range(ROWS)))
    full = size_of(recording)
    await mallory.text(ORDINARY | {"max_tokens": 200})
    assert size_of(recording) == full > 0


async def test_m6_a_stored_response_of_many_items_is_read_page_by_page(mallory: Client) -> None:
    items = [{"role": "system", "content": ""}] * 15_000 + [{"role": "user", "content": "a"}]
    status, answer = await mallory.post(RESPONSES, {"input": items, "max_output_tokens": 2})
    assert status == 200, answer
    took_s: dict[str, list[float]] = {}
    for path in ["/health", f"{RESPONSES}/{answer['id']}/input_items?limit=1"] * 3:
        start_s = time.monotonic()
        async with mallory.web.get(path) as page:
            assert len((await page.json()).get("data", [0])) == 1
        took_s.setdefault(path, []).append(time.monotonic() - start_s)
    health_s, page_s = map(min, took_s.values())
    assert page_s < 10 * health_s + 0.2
    more = {"previous_response_id": answer["id"], "input": items}
    assert (await mallory.post(RESPONSES, more))[0] == 400


async def test_m7_exploding_grammars_do_not_delay_another_clients(
    alice: Client, mallory: Client
) -> None:
    bodies = [exploding(number) for number in range(10)]
    attack = [asyncio.create_task(mallory.post(COMPLETIONS, body)) for body in bodies]
    await asyncio.sleep(0.1)
    await alice.text({"prompt": "a", "structured_outputs": {"regex": "[0-9]{4}[a-f]{3}"}})
    assert not all(task.done() for task in attack)
    for task in attack:
        task.cancel()
    await asyncio.wait(attack)


async def test_m8_the_prefix_cache_tells_nobody_what_others_asked(
    alice: Client, mallory: Client
) -> None:
    body = {"prompt": "My secret is that I like the little red ball. " * 4, "max_tokens": 1}

    async def num_cached(client: Client) -> int:
        _, answer = await client.post(COMPLETIONS, body)
        number: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return number

    assert await num_cached(alice) == 0
    assert await num_cached(mallory) == 0
    assert await num_cached(alice) > 0


# ------------------------------------------------------------ low


async def test_low_a_stopped_engine_gets_no_more_requests_than_its_queue_holds(
    server: ServerProcess, mallory: Client
) -> None:
    """In one process whoever stops the engine stops the server, so there it runs on."""
    has_own_engine = server.engine_pid != server.process.pid
    if has_own_engine:
        os.kill(server.engine_pid, signal.SIGSTOP)
    try:
        asked = [asyncio.create_task(mallory.post(COMPLETIONS, ORDINARY)) for _ in range(90)]
        waiting = set(asked)
        async with asyncio.timeout(SOON_S):
            while len(waiting) > ROWS + 48 + 48 // 4:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        done = set(asked) - waiting
    finally:
        os.kill(server.engine_pid, signal.SIGCONT)
    if has_own_engine:
        assert {task.result() for task in done} == {(429, "queue_full")}
    assert {(await task)[0] for task in asked} == {200, 429}


def test_low_no_key_stands_in_the_list_of_processes(server: ServerProcess) -> None:
    for pid in {server.process.pid, server.engine_pid}:
        assert MALLORY.encode() not in cmdline(pid)


async def test_low_a_grammar_worker_that_the_system_kills_is_no_bug(
    server: ServerProcess, mallory: Client
) -> None:
    def workers() -> list[int]:
        """Those that compile: they have forked."""
        found = [pid for pid in children(server.engine_pid) if b"grammar.worker" in cmdline(pid)]
        return [pid for pid in found if children(pid)]

    async with asyncio.timeout(SOON_S):
        while workers():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        attack = asyncio.create_task(mallory.post(COMPLETIONS, exploding(100)))
        while not (found := workers()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    os.kill(found[0], signal.SIGKILL)
    assert await attack == (400, "grammar_out_of_memory")


async def test_low_a_schema_of_many_texts_compiles(mallory: Client) -> None:
    names = [f"p{number}" for number in range(500)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    body = {"prompt": "a", "max_tokens": 2, "structured_outputs": {"json": schema}}
    status, answer = await mallory.post(COMPLETIONS, body)
    assert status == 200, answer
