"""Two frontend processes before one engine: whichever a client meets, the server is one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from aserve.tiny import MODEL_DIR
from tests.e2e.server_process import ServerProcess, run
from tests.fakes.lora_adapters import Recipe, write_adapter, write_merged

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ROOT = {"Authorization": "Bearer root"}
NUM_STREAMS = 16
NUM_TRIES = 64  # connections, until both frontends have had one
BODY: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0.9, "ignore_eos": True}
URL = "/v1/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    adapter = tmp_path_factory.mktemp("lora") / "a"
    write_adapter(adapter, Recipe(1))
    options = ("--dtype", "float64", "--frontends", "2", "--max-engine-restarts", "1000")
    with ServerProcess(
        *options, "--admin-api-key", "root", "--lora-modules", f"a={adapter}"
    ) as process:
        assert process.address, process.text
        yield process
        code, _ = process.end()
        assert code == 0, process.text
        assert "Traceback" not in process.text


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[aiohttp.ClientSession]:
    """Each request has a connection of its own, so that any of the frontends gets it. Answers that
    a test leaves unread are closed after it.
    """
    answers: list[aiohttp.ClientResponse] = []

    async def keep(_: object, __: object, ended: aiohttp.TraceRequestEndParams) -> None:
        answers.append(ended.response)

    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(keep)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(
        server.address, connector=connector, trace_configs=[trace]
    ) as opened:
        yield opened
        for answer in answers:
            answer.close()


def frontend_pids(server: ServerProcess) -> list[int]:
    return [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if parent_of(path.parent) == server.process.pid
        and b"aserve.processes.frontend" in path.read_bytes()
    ]


def parent_of(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


class Stream:
    """A stream that has begun. `is_further` tells whether a further frontend serves it."""

    def __init__(self, answer: aiohttp.ClientResponse, *, seed: int) -> None:
        self.seed = seed
        self.id = answer.headers["X-Request-Id"]
        self.is_further = "." in self.id
        self.is_whole = False  # its end has come
        self._answer = answer

    async def texts(self) -> AsyncIterator[str]:
        async for line in self._answer.content:
            self.is_whole = self.is_whole or line == b"data: [DONE]\n"
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                assert "error" not in event, event
                yield event["choices"][0]["text"]


async def begin(client: aiohttp.ClientSession, seed: int, **more: Any) -> Stream:
    answer = await client.post(URL, json=BODY | {"seed": seed, "stream": True} | more)
    assert answer.status == 200, await answer.text()
    return Stream(answer, seed=seed)


async def begin_on_both(client: aiohttp.ClientSession, **more: Any) -> tuple[Stream, Stream]:
    """Returns a stream of the first frontend, and one of a further one."""
    found: dict[bool, Stream] = {}
    for seed in range(NUM_TRIES):
        stream = await begin(client, seed, **more)
        found.setdefault(stream.is_further, stream)
        if len(found) == 2:
            return found[False], found[True]
    raise AssertionError("one frontend got all connections")


async def begin_on_a_further_one(client: aiohttp.ClientSession, **more: Any) -> Stream:
    """Returns the one stream that is left."""
    for seed in range(NUM_TRIES):
        stream = await begin(client, seed, **more)
        if stream.is_further:
            return stream
        await abort_all(client)
    raise AssertionError("one frontend got all connections")


async def get(client: aiohttp.ClientSession, path: str, **given: Any) -> tuple[int, Any]:
    async with client.get(path, **given) as answer:
        return answer.status, await answer.json()


async def abort_all(client: aiohttp.ClientSession) -> int:
    async with client.post("/abort_request", json={"abort_all": True}, headers=ROOT) as answer:
        num_aborted: int = (await answer.json())["num_aborted"]
    return num_aborted


async def until_idle(client: aiohttp.ClientSession) -> dict[str, float]:
    """Returns the metrics of the idle server."""
    held = ("requests_in_flight", "sequences_running", "kv_pages_used")
    return await until(client, lambda values: not any(values[f"aserve_{name}"] for name in held))


async def until(
    client: aiohttp.ClientSession, condition: Callable[[dict[str, float]], bool]
) -> dict[str, float]:
    async with asyncio.timeout(30):
        while True:
            async with client.get("/metrics") as answer:
                lines = (await answer.text()).splitlines()
            pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
            values = {name: float(value) for name, value in pairs}
            if condition(values):
                return values
            await asyncio.sleep(0.05)


async def test_an_engine_that_is_killed_changes_no_stream_of_any_frontend(
    server: ServerProcess, client: aiohttp.ClientSession
) -> None:
    async def ask(seed: int, reached: asyncio.Semaphore) -> tuple[str, bool]:
        stream = await begin(client, seed, max_tokens=48)
        text = ""
        async for each in stream.texts():
            text += each
            reached.release()
        return text, stream.is_further

    whole = await asyncio.gather(*(ask(seed, asyncio.Semaphore(0)) for seed in range(NUM_STREAMS)))
    reached = asyncio.Semaphore(0)
    answers = asyncio.gather(*(ask(seed, reached) for seed in range(NUM_STREAMS)))
    for _ in range(3 * NUM_STREAMS):
        await reached.acquire()
    os.kill(server.engine_pid, signal.SIGKILL)
    resumed = await answers
    assert [text for text, _ in resumed] == [text for text, _ in whole]
    assert {is_further for _, is_further in resumed} == {False, True}
    values = await until_idle(client)
    assert values["aserve_engine_restarts_total"] == 1
    ended = [v for name, v in values.items() if name.startswith("aserve_requests_ended_total")]
    assert values["aserve_requests_received_total"] == sum(ended) >= 2 * NUM_STREAMS
    assert values["aserve_request_seconds_count"] == sum(ended)
    assert values["aserve_queue_seconds_count"] == sum(ended), "each has heard of its admission"


async def test_any_frontend_knows_the_requests_and_streams_of_all(
    client: aiohttp.ClientSession,
) -> None:
    await get(client, "/live")  # somebody watches
    first, further = await begin_on_both(client, max_tokens=400, resumable=True, n=1)
    for _ in range(8):
        for stream in (first, further):
            status, state = await get(client, f"/v1/requests/{stream.id}")
            assert (status, state["id"]) == (200, stream.id)
            assert (await get(client, f"/v1/requests/{'0' * 32}"))[0] == 404
        _, listed = await get(client, "/v1/requests")
        assert {first.id, further.id} <= set(listed["data"])
        async with client.get(f"/v1/streams/cmpl-{further.id}") as answer:
            assert f"id: cmpl-{further.id}:0".encode() in await answer.content.readline()
    assert await abort_all(client) >= 2
    await until_idle(client)
    _, live = await get(client, "/live")
    spans = {record["request_id"]: record["spans"] for record in live["requests"]}
    for stream in (first, further):
        states = {state for state, *_ in spans[f"{stream.id}-0"]}
        assert states >= {"tokenize", "prefill", "decode"}
    assert live["steps"]


async def test_what_only_the_first_frontend_has_is_reached_from_all(
    client: aiohttp.ClientSession,
) -> None:
    responses: list[str] = []
    for _ in range(8):
        more = {"previous_response_id": responses[-1]} if responses else {}
        body = {"input": "Hello", "max_output_tokens": 1} | more
        async with client.post("/v1/responses", json=body) as answer:
            assert answer.status == 200, await answer.text()
            responses.append((await answer.json())["id"])
    for _ in range(8):
        async with client.ws_connect("/v1/responses") as socket:
            await socket.send_json(
                {"type": "response.create", "input": "Hello", "max_output_tokens": 1}
            )
            assert (await socket.receive_json())["type"] == "response.created"
        forged = {"X-Aserve-Forwarded": "guess 10.0.0.1"}
        assert (await get(client, f"/v1/responses/{responses[0]}", headers=forged))[0] == 200
        async with client.post(URL, json=BODY | {"model": "a", "max_tokens": 1}) as answer:
            assert answer.status == 200, await answer.text()
            assert (await answer.json())["model"] == "a"
        async with client.post(URL, json=BODY | {"model": "nobody"}) as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]["code"] == "model_not_found"


async def test_a_pause_and_a_flush_hold_in_all_frontends(client: aiohttp.ClientSession) -> None:
    async def statuses() -> set[int]:
        asked = [client.post(URL, json=BODY | {"max_tokens": 1}) for _ in range(NUM_STREAMS)]
        return {answer.status for answer in await asyncio.gather(*asked)}

    async def post(path: str, **body: Any) -> Any:
        async with client.post(path, json=body, headers=ROOT) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    def cached(values: dict[str, float]) -> float:
        return values["aserve_cached_tokens_total"]

    streams = await begin_on_both(client, max_tokens=400)
    aborted = await post("/abort_requests", request_ids=[stream.id for stream in streams])
    assert aborted == {"num_aborted": 2}
    await begin_on_both(client, max_tokens=400)
    assert await post("/pause_generation", mode="abort") == {"is_paused": True, "num_running": 0}
    assert await statuses() == {503}
    await post("/flush_cache")
    assert await statuses() == {503}, "a flush does not end the pause"
    assert not (await post("/continue_generation"))["is_paused"]
    before = cached(await until_idle(client))
    long = {"prompt": "Once upon a time there was a cat. " * 9, "max_tokens": 1}
    for _ in range(NUM_STREAMS):
        async with client.post(URL, json=long) as answer:
            num_tokens = (await answer.json())["usage"]["prompt_tokens"]
    hits = cached(await until_idle(client)) - before
    page_tokens = (num_tokens - 1) // 16 * 16
    assert hits == (NUM_STREAMS - 1) * page_tokens, "all frontends share the new namespace"


async def test_a_prediction_counts_whichever_frontend_it_comes_by(
    client: aiohttp.ClientSession,
) -> None:
    async def ask(**more: Any) -> tuple[str, dict[str, Any]]:
        """Returns the text and the usage."""
        body = BODY | {"seed": 8, "max_tokens": 40} | more
        async with client.post(URL, json=body) as answer:
            assert answer.status == 200, await answer.text()
            by_frontend.add("." in answer.headers["X-Request-Id"])
            found = await answer.json()
        return found["choices"][0]["text"], found["usage"]

    by_frontend: set[bool] = set()
    text, _ = await ask()
    by_frontend.clear()
    while len(by_frontend) < 2:
        again, usage = await ask(prediction={"type": "content", "content": text})
        assert again == text
        assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > 30


async def test_new_weights_hold_in_all_frontends(
    client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """A request of a further frontend ends on the old weights, or keeps them."""

    async def update(**body: Any) -> int:
        url = "/update_weights_from_disk"
        async with client.post(url, json=body, headers=ROOT) as answer:
            return answer.status

    async def answers() -> set[tuple[str, str]]:
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        body = {"text": "Once upon a time", "sampling_params": sampling}
        asked = [client.post("/generate", json=body) for _ in range(NUM_STREAMS)]
        found = [await answer.json() for answer in await asyncio.gather(*asked)]
        return {(each["text"], each["meta_info"]["weight_version"]) for each in found}

    [(before, version)] = await answers()
    assert version == "default"
    other = str(write_merged(tmp_path / "b", write_adapter(tmp_path / "a", Recipe(1)), Recipe(1)))
    running = await begin_on_a_further_one(client, max_tokens=400)
    assert await update(model_path=other, timeout=0.01) == 400
    assert await answers() == {(before, version)}
    updated = asyncio.ensure_future(update(model_path=other, weight_version="b"))
    assert len([text async for text in running.texts()]) > 20
    assert running.is_whole
    assert await updated == 200
    [(after, version)] = await answers()
    assert (version, after == before) == ("b", False)
    assert await update(model_path=str(MODEL_DIR)) == 200
    assert await answers() == {(before, "default")}


async def test_streams_of_all_frontends_go_on_after_a_sleep_of_the_engine(
    server: ServerProcess, client: aiohttp.ClientSession
) -> None:
    async def post(path: str) -> dict[str, Any]:
        async with client.post(path, headers=ROOT) as answer:
            assert answer.status == 200, await answer.text()
            found: dict[str, Any] = await answer.json()
            return found

    async def read(stream: Stream) -> str:
        return "".join([text async for text in stream.texts()])

    restarts = (await until_idle(client))["aserve_engine_restarts_total"]
    streams = await begin_on_both(client, max_tokens=300)
    pid = server.engine_pid
    assert (await post("/sleep?level=1"))["is_sleeping"]
    assert not parent_of(Path(f"/proc/{pid}")), "all of its memory is free"
    for _ in range(NUM_STREAMS):
        async with client.post(URL, json=BODY | {"max_tokens": 1}) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (
                503,
                "server_sleeping",
            )
    assert (await get(client, "/readyz"))[1]["status"] == "sleeping"
    assert (await get(client, "/is_sleeping", headers=ROOT))[1]["is_sleeping"]
    assert not (await post("/resume_memory_occupation"))["is_sleeping"]
    texts = await asyncio.gather(*map(read, streams))
    again = [await begin(client, stream.seed, max_tokens=300) for stream in streams]
    assert await asyncio.gather(*map(read, again)) == texts
    assert (await until_idle(client))["aserve_engine_restarts_total"] == restarts


async def test_a_sleep_and_a_wake_up_go_on_without_their_clients(
    server: ServerProcess, client: aiohttp.ClientSession
) -> None:
    """Whichever frontend has got them."""

    async def leave(path: str, until_so: Callable[[], Any]) -> None:
        call = asyncio.ensure_future(client.post(path, headers=ROOT))
        async with asyncio.timeout(30):
            while not await until_so():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert not call.done(), "it would show nothing"
        call.cancel()

    async def sleeps() -> bool:
        return bool((await get(client, "/is_sleeping", headers=ROOT))[1]["is_sleeping"])

    async def starts() -> bool:
        return server.engine_pid != server.process.pid

    await until_idle(client)
    for _ in range(3):
        await leave("/sleep", sleeps)
        async with client.post("/sleep", headers=ROOT) as answer:  # waits for the first one
            assert answer.status == 200
        assert await sleeps()
        await leave("/wake_up", starts)
        async with client.post("/wake_up", headers=ROOT) as answer:
            assert answer.status == 200, await answer.text()
        async with client.post(URL, json=BODY | {"max_tokens": 2}) as answer:
            assert answer.status == 200, await answer.text()


async def test_a_frontend_that_is_killed_leaves_nothing_in_the_engine_and_is_started_again(
    server: ServerProcess, client: aiohttp.ClientSession
) -> None:
    def has_lost(values: dict[str, float]) -> bool:
        """The metrics of the dead frontend are gone, and so are its rows in the engine."""
        num_open = values["aserve_requests_in_flight"]
        return 0 < num_open == values["aserve_sequences_running"] < num_before

    first, further = await begin_on_both(client, max_tokens=900)
    (pid,) = frontend_pids(server)
    values = await until(client, lambda values: bool(values["aserve_sequences_running"]))
    num_before = values["aserve_requests_in_flight"]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(aiohttp.ClientError):
        _ = [text async for text in further.texts()]
    iteration = values["aserve_forward_iteration"]
    values = await until(client, has_lost)
    assert values["aserve_forward_iteration"] < iteration + 400, "they were cancelled"
    num_texts = 0
    async for _ in first.texts():
        num_texts += 1
        if num_texts == 40:
            break
    async with asyncio.timeout(30):
        _, again = await begin_on_both(client, max_tokens=8)
    assert again.id.rpartition(".")[2] != further.id.rpartition(".")[2]
    assert frontend_pids(server) != [pid]
    await abort_all(client)
    await until_idle(client)


async def test_a_pause_holds_in_a_frontend_from_its_first_connection_on(
    server: ServerProcess, client: aiohttp.ClientSession
) -> None:
    """The first frontend stands still, so a new one can hear nothing of the pause."""

    async def ask() -> int:
        async with client.post(URL, json=BODY | {"max_tokens": 1}) as answer:
            return answer.status

    sockets = directory_of(server.process.pid)
    before = {*os.listdir(sockets)}
    async with client.post("/pause_generation", json={}, headers=ROOT) as answer:
        assert answer.status == 200
    (killed,) = frontend_pids(server)
    os.kill(killed, signal.SIGKILL)
    async with asyncio.timeout(30):
        while frontend_pids(server) in ([], [killed]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(30):
            while {*os.listdir(sockets)} <= before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        asked = [asyncio.ensure_future(ask()) for _ in range(NUM_TRIES)]
        await asyncio.wait(asked, timeout=1)
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    assert {*await asyncio.gather(*asked)} == {503}
    async with client.post("/continue_generation", headers=ROOT) as answer:
        assert answer.status == 200
    assert await ask() == 200


async def test_a_pause_outlasts_what_the_first_frontend_shares_meanwhile(
    server: ServerProcess, client: aiohttp.ClientSession
) -> None:
    """The first frontend tells of a flush behind the pause of the other one, and before its own."""
    (further,) = (name for name in os.listdir(directory_of(server.process.pid)) if name[0] != "0")
    connector = aiohttp.UnixConnector(f"{directory_of(server.process.pid)}/{further}")
    async with aiohttp.ClientSession(server.address, connector=connector, headers=ROOT) as admin:
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            calls = []
            for path in ("/flush_cache", "/pause_generation"):
                calls.append(asyncio.ensure_future(admin.post(path, json={})))
                await asyncio.wait(calls, timeout=0.5)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        assert [answer.status for answer in await asyncio.gather(*calls)] == [200, 200]
        body = BODY | {"max_tokens": 1}
        asked = [client.post(URL, json=body) for _ in range(NUM_TRIES)]
        assert {answer.status for answer in await asyncio.gather(*asked)} == {503}
        async with admin.post("/continue_generation") as answer:
            assert not (await answer.json())["is_paused"]


async def test_a_server_that_ends_finishes_the_streams_of_a_further_frontend(
    server: ServerProcess, client: aiohttp.ClientSession
) -> None:
    """The fixture looks at the exit code."""
    stream = await begin_on_a_further_one(client, max_tokens=300)
    server.process.send_signal(signal.SIGTERM)
    assert len([text async for text in stream.texts()]) > 20
    assert stream.is_whole


async def test_no_other_server_gets_the_port_and_nothing_outlives_the_first_frontend() -> None:
    with ServerProcess("--frontends", "2", "--dtype", "float64") as server:
        port = server.address.rpartition(":")[2]
        second = run("serve", "--frontends", "2", "--port", port)
        assert "address already in use" in second.stdout + second.stderr
        pids = [*frontend_pids(server), server.engine_pid]
        assert len(pids) == 2
        sockets = Path(directory_of(server.process.pid))
        server.end(signal.SIGKILL)
        await asyncio.wait_for(asyncio.to_thread(wait_for_end, pids, sockets), 10)


def wait_for_end(pids: list[int], directory: Path) -> None:
    while directory.exists() or any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.01)


def directory_of(pid: int) -> str:
    """The directory of the sockets on which a process listens."""
    inodes = {
        os.readlink(path).removeprefix("socket:[").removesuffix("]")
        for path in Path(f"/proc/{pid}/fd").iterdir()
    }
    for line in Path("/proc/net/unix").read_text().splitlines():
        fields = line.split()
        if len(fields) == 8 and fields[6] in inodes and fields[7].endswith(".sock"):
            return os.path.dirname(fields[7])
    raise AssertionError("no socket")
