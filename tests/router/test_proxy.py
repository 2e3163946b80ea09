"""What the router passes on, what it retries, and what it answers itself."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from hashlib import sha256
from typing import Any

import pytest
from aiohttp import (
    ClientPayloadError,
    ClientSession,
    FormData,
)

from aserve.errors import ConfigError
from aserve.http.control.weights import ELSEWHERE
from aserve.http.routes import ROUTES
from aserve.router import joined_answers, upstream
from aserve.router.upstream import check_address
from tests.fakes.echo_engine import EchoEngine
from tests.http.unread_client import UnreadClient
from tests.router.routed import ADMIN, CHUNKED, OK, StandIn, routed, written

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hello"}]}
HEAD_200 = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 7\r\nContent-Length: 4\r\n\r\nbusy"

REFUSED = b"HTTP/1.1 401 No\r\nWWW-Authenticate: Bearer\r\nContent-Length: 0\r\n\r\n"


def answered(body: bytes, *, status: bytes = b"200 OK", kind: bytes = b"application/json") -> Any:
    head = b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
    return written(head % (status, kind, len(body)) + body)


async def post(client: ClientSession, path: str = CHAT, **fields: Any) -> tuple[int, bytes]:
    async with client.post(path, json=BODY | fields) as answer:
        return answer.status, await answer.read()


@pytest.mark.parametrize(
    "failure",
    [
        written(closes=True),
        written(b"HTTP/1.1 200", closes=True),
        written(b"not http at all\r\n\r\n", closes=True),
        written(HEAD_200, closes=True),
        written(CHUNKED, closes=True),
        written(BUSY),
    ],
    ids=("closed", "half a head", "no http", "no body", "no chunk", "503"),
)
async def test_a_request_without_a_first_byte_is_sent_to_another_replica(failure: Any) -> None:
    bad, good = StandIn(failure), StandIn()
    async with routed(bad, good) as (client, server):
        answers = [await post(client) for _ in range(4)]
        assert answers == [(200, b"ok")] * 4
        assert len(good.asked) == 4
        assert 1 <= len(bad.asked) <= 3, "the breaker opens after three failures"
        assert {asked.body for asked in bad.asked} == {asked.body for asked in good.asked}
        bad.server.close()
        assert await post(client) == (200, b"ok")
        assert server.router.proxy.num_open == 0


async def test_the_only_replica_is_asked_again_once_if_it_closes_the_connection() -> None:
    replica = StandIn()

    async def answer(writer: asyncio.StreamWriter) -> None:
        await (written(OK) if len(replica.asked) == 2 else written(closes=True))(writer)

    replica.answer = answer
    async with routed(replica) as (client, _):
        assert await post(client) == (200, b"ok")
        assert (await post(client))[0] == 502
    assert len(replica.asked) == 4


async def test_the_only_replica_is_not_asked_again_if_its_answer_had_begun() -> None:
    replica = StandIn(written(HEAD_200, closes=True))
    async with routed(replica) as (client, _):
        assert (await post(client))[0] == 502
    assert len(replica.asked) == 1


async def test_an_answer_that_has_begun_is_never_sent_again() -> None:
    piece = b"5\r\ndata:\r\n"
    bad, good = StandIn(written(CHUNKED + piece, closes=True)), StandIn()
    async with routed(bad, good) as (client, server):
        broken = 0
        for _ in range(2):
            try:
                assert await post(client) == (200, b"ok")
            except ClientPayloadError:
                broken += 1
        assert (broken, len(bad.asked), len(good.asked)) == (1, 1, 1)
        assert [each.in_flight for each in server.router.balancer.replicas()] == [0, 0]


SSE = b'data: {"id":"chatcmpl-123456"}\n\n'
EVENTS = CHUNKED + b"%x\r\n%s\r\n" % (len(SSE), SSE)
DONE = b"data: [DONE]\n\n"
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


@pytest.mark.parametrize(
    ("path", "rest", "ends"),
    [
        (CHAT, b"", b'"code":"replica_failed"}}\n\n' + DONE),
        ("/v1/messages", b"", b',"type":"error"}\n\n'),
        ("/v1/responses", b"", b'"param":null,"sequence_number":0}\n\n'),
        (CHAT, DONE, SSE + DONE),
        ("/v1/messages", STOP, SSE + STOP),
    ],
)
async def test_a_stream_of_a_dead_replica_ends_with_exactly_one_last_event(
    path: str, rest: bytes, ends: bytes
) -> None:
    more = b"%x\r\n%s\r\n" % (len(rest), rest) if rest else b""
    async with routed(StandIn(written(EVENTS, more, closes=True))) as (client, server):
        status, body = await post(client, path)
        assert status == 200
        assert body.startswith(SSE)
        assert body.endswith(ends)
        assert (body + DONE).count(DONE) == 1 + body.endswith(DONE)
        assert body.count(b"replica ended") == (not rest)
        assert server.router.proxy.num_open == 0


async def test_a_stream_that_is_cut_within_an_event_breaks_the_connection() -> None:
    async with routed(StandIn(written(EVENTS, b"4\r\ndata\r\n", closes=True))) as (client, _):
        with pytest.raises(ClientPayloadError):
            await post(client)


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (written(CHUNKED, b"%x\r\n%s\r\n" % (len(SSE), SSE), b"0\r\n\r\n"), 200, SSE),
        (written(CHUNKED + b"3\r\nabc\r\n", b"1\r", b"\nd\r\n0\r\n\r", b"\n"), 200, b"abcd"),
        (written(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nto the end", closes=True), 200,
         b"to the end"),
        (written(b"HTTP/1.1 200 OK\r\nContent-Length: 3000000\r\n\r\n", b"x" * 3_000_000), 200,
         b"x" * 3_000_000),
        (written(b"HTTP/1.1 204 No Content\r\n\r\n"), 204, b""),
        (written(b"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n"), 302, b""),
        (written(b"HTTP/1.1 429 Slow\r\nRetry-After: 3\r\nContent-Length: 4\r\n\r\nslow"), 429,
         b"slow"),
        (written(b"HTTP/1.1 500 Bug\r\nContent-Length: 3\r\n\r\nbug"), 500, b"bug"),
    ],
    ids=("sse", "cut", "close", "large", "204", "302", "429", "500"),
)  # fmt: skip
async def test_answers_pass_unchanged(answer: Any, status: int, body: bytes) -> None:
    replica = StandIn(answer)
    async with routed(replica) as (client, _):
        for _ in range(2):
            async with client.post(CHAT, json=BODY, allow_redirects=False) as got:
                assert (got.status, await got.read()) == (status, body)
                assert got.headers["Server"] == "aserve"


async def test_requests_pass_with_their_headers_query_and_body() -> None:
    replica = StandIn()
    body = gzip.compress(json.dumps(BODY).encode())
    headers = {"Content-Encoding": "gzip", "Authorization": "Bearer k", "X-Own": "1"}
    async with routed(replica) as (client, _):
        async with client.post("/v1/x%2Fy?a=%20b", data=body, headers=headers) as got:
            assert got.status == 200
        async with client.head("/v1/models/m") as got:
            assert got.status == 200
    asked = replica.asked[0]
    assert asked.line == "POST /v1/x%2Fy?a=%20b HTTP/1.1"
    assert asked.body == body
    for line in ("Authorization: Bearer k", "X-Own: 1", "X-Forwarded-For: 127.0.0.1"):
        assert f"\r\n{line}\r\n" in asked.head
    assert f"Host: {replica.url.removeprefix('http://')}\r\n" in asked.head


async def test_a_client_of_http_1_0_sees_the_end_of_a_stream() -> None:
    """Without a length only the close ends an answer, also if the client keeps connections."""
    events = written(CHUNKED, b"5\r\nabcde\r\n", b"0\r\n\r\n")
    async with routed(StandIn(events), keep_alive_timeout=60) as (_, server):
        port = int(server.address.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\n"
            b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
        )
        async with asyncio.timeout(10):
            assert (await reader.read()).endswith(b"\r\n\r\nabcde")
        writer.close()


async def test_headers_of_one_connection_do_not_pass() -> None:
    own = b"Connection: X-Own\r\nx-own: 1\r\nX-Kept: 1\r\n"
    replica = StandIn(written(OK.replace(b"Content", own + b"Content")))
    head = b"TE: trailers\r\nProxy-Connection: close\r\nX-Forwarded-For: 1.1.1.1\r\n" + own
    head += b"Connection: close, x-other\r\nX-Other: 1\r\nX-Forwarded-For: 2.2.2.2\r\n"
    async with routed(replica) as (_, server):
        answer = await sent(server.address, b"GET /x HTTP/1.1\r\n" + head)
    asked = {line.partition(":")[0].lower(): line for line in replica.asked[0].head.split("\r\n")}
    dropped = {"te", "proxy-connection", "x-own", "x-other", "connection"}
    assert "x-kept" in asked
    assert not dropped & asked.keys()
    assert asked["x-forwarded-for"] == "X-Forwarded-For: 1.1.1.1, 2.2.2.2, 127.0.0.1"
    assert b"X-Kept: 1\r\n" in answer
    assert b"x-own" not in answer.lower()


@pytest.mark.parametrize("query", ["", "?c=%20d"])
async def test_a_whole_url_may_have_no_path(query: str) -> None:
    """A server and the router found no route for it."""
    replica = StandIn()
    head = b"GET http://localhost%s HTTP/1.1\r\n" % query.encode()
    async with routed(replica) as (_, server):
        assert b" 200 OK" in await sent(server.address, head)
    assert replica.asked[0].line == f"GET /{query} HTTP/1.1"
    async with EchoEngine() as engine:
        assert b" 200 OK" in await sent(engine.url, head)


@pytest.mark.parametrize("target", ["/v1/a%2Fb?c=%20d", "http://localhost/v1/a%2Fb?c=%20d"])
async def test_a_target_may_be_a_whole_url(target: str) -> None:
    replica = StandIn()
    async with routed(replica) as (_, server):
        assert b" 200 OK" in await sent(server.address, b"GET %s HTTP/1.1\r\n" % target.encode())
        for path in ("v1/models", "server_info"):
            head = b"GET http://localhost/%s HTTP/1.1\r\n" % path.encode()
            answer = await sent(server.address, head)
            assert answer.startswith(b"HTTP/1.1 200")
    lines = [asked.line for asked in replica.asked]
    paths = ["/v1/a%2Fb?c=%20d", "/v1/models", "/server_info"]
    assert lines == [f"GET {path} HTTP/1.1" for path in paths]


async def sent(address: str, head: bytes) -> bytes:
    """Sends a request as it is, and returns what comes back until the connection is closed."""
    reader, writer = await asyncio.open_connection(*address[7:].split(":"))
    writer.write(head + b"Host: localhost\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ("Content-Length: 2\r\nExpect: 100-continue", b"HTTP/1.1 100 Continue\r\n"),
        ("Content-Length: 99999999999\r\nExpect: 100-continue", b"HTTP/1.1 413 "),
        ("Content-Length: 2\r\nExpect: wonders", b"HTTP/1.1 417 "),
    ],
)
async def test_the_router_asks_for_a_body_when_it_has_checked_the_head(
    fields: str, line: bytes
) -> None:
    async with routed(StandIn()) as (_, server):
        port = int(server.address.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{fields}\r\n\r\n".encode()
        )
        async with asyncio.timeout(10):
            assert (await reader.readline()).startswith(line)
        writer.close()


async def test_a_compressed_answer_passes_as_it_is() -> None:
    data = gzip.compress(b'{"id":"x"}' * 100, mtime=0)
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(data)
    async with (
        routed(StandIn(written(head + data))) as (_, server),
        ClientSession(server.address, auto_decompress=False) as client,
        client.post(CHAT, json=BODY) as got,
    ):
        assert got.headers["Content-Encoding"] == "gzip"
        assert await got.read() == data


async def test_an_upload_is_streamed_and_a_json_body_is_bounded() -> None:
    replica = StandIn()
    data = bytes(range(256)) * 40_000
    async with routed(replica, max_body_size=1 << 16) as (client, _):
        form = FormData()
        form.add_field("file", data, filename="f")
        async with client.post("/v1/files", data=form) as got:
            assert got.status == 200
        assert sha256(data).digest() == sha256(_part(replica.asked[0].body)).digest()
        async with client.post(CHAT, json={"prompt": "x" * (1 << 17)}) as got:
            assert (got.status, (await got.json())["error"]["code"]) == (413, "request_too_large")
        assert len(replica.asked) == 1


def _part(body: bytes) -> bytes:
    return body.partition(b"\r\n\r\n")[2].rpartition(b"\r\n--")[0]


async def test_without_a_replica_a_client_is_told_when_to_come_again() -> None:
    async with routed() as (client, _):
        async with client.post(CHAT, json=BODY) as got:
            assert (got.status, (await got.json())["error"]["code"]) == (503, "no_replica")
            assert int(got.headers["Retry-After"]) > 0
        async with client.get("/health") as got:
            assert got.status == 503
        async with client.get("/livez") as got:
            assert got.status == 200


async def test_a_client_that_goes_ends_its_request_at_the_replica() -> None:
    replica = StandIn(written(CHUNKED + b"1\r\na\r\n"))
    async with routed(replica) as (client, server):
        async with client.post(CHAT, json=BODY) as got:
            assert await got.content.readany() == b"a"
            got.close()
        async with asyncio.timeout(5):
            await replica.closed.wait()
            await server.router.proxy.idle.wait()


async def test_an_upload_that_breaks_is_no_failure_of_the_replica() -> None:
    replica = StandIn()
    head = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data\r\n"
    async with routed(replica) as (client, server):
        chunk = b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n"
        for framing in (chunk, b"Content-Length: 9\r\n\r\nab"):
            for ends in (asyncio.StreamWriter.close, lambda writer: writer.transport.abort()):
                _, writer = await asyncio.open_connection(*server.address[7:].split(":"))
                writer.write(head + framing)
                await asyncio.sleep(0.01)
                ends(writer)
        assert await post(client) == (200, b"ok")
        async with asyncio.timeout(5):
            await server.router.proxy.idle.wait()
        assert [each.failures for each in server.router.balancer.replicas()] == [0]


@pytest.mark.parametrize("head", [CHUNKED, OK.partition(b"C")[0] + b"Content-Length: %d\r\n\r\n"])
async def test_a_client_that_does_not_read_holds_back_the_replica(head: bytes) -> None:
    sent = 0
    piece = b"data: x\n\n" * (1 << 14)
    chunk = b"%x\r\n%b\r\n" % (len(piece), piece) if head == CHUNKED else piece

    async def answer(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(head if head == CHUNKED else head % (len(piece) * 400))
        for _ in range(400):
            writer.write(chunk)
            await writer.drain()
            sent += 1
        if head == CHUNKED:
            writer.write(b"0\r\n\r\n")

    async with routed(StandIn(answer)) as (client, _), client.post(CHAT, json=BODY) as got:
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.3)
        assert sent < 400, "what the sockets hold is less"
        async with asyncio.timeout(60):
            assert await got.read() == piece * 400


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
async def test_the_end_of_the_router_ends_a_stream_by_an_error(path: str) -> None:
    replica = StandIn(written(CHUNKED, b"9\r\ndata: x\n\n\r\n"))
    async with routed(replica) as (client, server), client.post(path, json=BODY) as got:
        assert await got.content.readany() == b"data: x\n\n"
        server.end()
        server.end()
        async with asyncio.timeout(5):
            last = await got.read()
    assert b"The router shuts down." in last
    assert last.startswith(b"data:" if path == CHAT else b"event: error\n")
    assert last.endswith(b"data: [DONE]\n\n") is (path == CHAT)


async def test_the_end_of_the_router_answers_who_still_waits() -> None:
    replica = StandIn(written())
    async with routed(replica) as (client, server):
        asking = asyncio.create_task(post(client))
        await replica.asked_more(1)
        server.end()
        server.end()
        async with asyncio.timeout(5):
            status, body = await asking
    assert status == 503
    assert b"server_draining" in body


async def test_replicas_join_and_leave_under_load_without_a_failed_request() -> None:
    first, second = StandIn(), StandIn()
    await second.start()
    async with routed(first) as (client, server):
        stop = asyncio.Event()

        async def ask() -> list[int]:
            found = []
            while not stop.is_set():
                found.append((await post(client))[0])
            return found

        async def change(method: str, url: str, path: str = "/admin/replicas") -> None:
            async with client.request(method, path, json={"url": url}, headers=ADMIN) as got:
                assert got.status == 200, await got.text()

        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            asking = [group.create_task(ask()) for _ in range(8)]
            await change("POST", second.url)
            await second.asked_more(20)
            await change("POST", first.url, "/admin/replicas/drain")
            await change("DELETE", first.url)
            num_before = len(first.asked)
            await second.asked_more(20)
            stop.set()
        statuses = [status for task in asking for status in task.result()]
        assert set(statuses) == {200}
        assert len(first.asked) <= num_before + 8
        assert [each.name for each in server.router.balancer.replicas()] == [second.url]
    second.server.close()


async def test_the_administrators_routes_need_the_key() -> None:
    async with routed(StandIn()) as (client, _):
        for headers in ({}, {"Authorization": "Bearer other"}):
            async with client.get("/admin/replicas", headers=headers) as got:
                assert got.status == 401


@pytest.mark.parametrize(
    "address",
    [
        *("ftp://x", "http://", "http://a..b:80", f"http://{'a' * 64}.com", "http://h:99999"),
        *("http://h:x", "http://[::1", "http://h:0", "unix:", "unix:/a\0b"),
    ],
)
async def test_an_address_that_no_connection_can_be_made_to_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address of a replica"):
        check_address(address)
    async with routed() as (client, server):
        async with client.post("/admin/replicas", json={"url": address}, headers=ADMIN) as got:
            assert (got.status, (await got.json())["error"]["param"]) == (400, "url")
        assert server.router.balancer.replicas() == []


@pytest.mark.parametrize("body", [b"", b"{}", b'{"url":"\xff"}', b'{"url":' + b"[" * 100_000])
async def test_a_body_without_an_address_is_refused(body: bytes) -> None:
    async with (
        routed() as (client, _),
        client.post("/admin/replicas", data=body, headers=ADMIN) as got,
    ):
        assert got.status == 400


async def test_a_replica_whose_probe_cannot_be_sent_ends_no_router() -> None:
    async with routed(StandIn(), health_interval=0.05) as (client, server):
        server.router.add("http://a..b:80")
        bad = server.router.balancer.replicas()[-1]
        while bad.failures < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await post(client) == (200, b"ok")


async def test_the_log_says_once_why_a_replica_is_not_healthy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Such as that its certificate is not trusted; nothing said so."""
    async with routed(StandIn(), health_interval=0.1) as (_, server):
        server.router.add("http://127.0.0.1:9")
        replica = server.router.balancer.replicas()[-1]
        while replica.failures < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    told = [line for line in caplog.messages if "127.0.0.1:9 " in line]
    assert len(told) == 1
    assert "probe failed" in told[0]
    assert "cannot connect to the replica" in told[0]


async def test_a_body_that_is_nested_too_deeply_is_left_to_the_replica() -> None:
    async with (
        routed(StandIn()) as (client, _),
        client.post(CHAT, data=b'{"user":' + b"[" * 100_000) as got,
    ):
        assert got.status == 200


async def test_state_is_asked_of_the_replica_that_has_it() -> None:
    made = b'{"id":"resp_abcdef"}'
    own = written(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(made), made))
    unknown = written(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
    owner, other = StandIn(own), StandIn(unknown)
    async with routed(owner, other) as (client, server):
        while not owner.asked:
            await post(client, "/v1/responses")
        num_other = len(other.asked)
        for _ in range(3):
            async with client.get("/v1/responses/resp_abcdef") as got:
                assert got.status == 200
            assert (await post(client, "/v1/responses", previous_response_id="resp_abcdef"))[
                0
            ] == 200
        assert len(other.asked) == num_other
        server.router.proxy.owners.forget(owner.url)
        async with client.get("/v1/responses/resp_abcdef") as got:
            assert (got.status, await got.read()) == (200, made)
        async with client.get("/v1/responses/resp_unknown") as got:
            assert got.status == 200  # this stand-in knows every id
        assert server.router.proxy.owners.find(["resp_unknown"]) == owner.url
        assert server.router.proxy.owners.find(["resp_abcdef"]) == owner.url


async def test_lists_of_replicas_that_differ_are_joined_as_far_as_they_can_be() -> None:
    left = StandIn(answered(b'{"data":[{"id":["x"]}],"n":null,"m":1,"k":"a"}'))
    right = StandIn(answered(b'{"data":[{"id":"b"}],"n":3,"m":"?","k":2,"total":4,"created":1}'))
    async with routed(left, right) as (client, _):
        async with client.get("/v1/models") as got:
            assert await got.json() == {
                "data": [{"id": ["x"]}, {"id": "b"}],
                "n": 3,
                "m": 1,
                "k": "a",
                "total": 4,
                "created": 1,
            }
        right.answer = answered(b"no JSON")
        async with client.get("/v1/models") as got:
            assert (await got.json())["data"] == [{"id": ["x"]}]
        left.answer = answered(b"ok", kind=b"text/html")
        async with client.get("/v1/models") as got:
            assert (got.status, await got.read()) == (200, b"ok")


@pytest.mark.parametrize("body", [b"ok", b"[]", b'{"router":1}'])
async def test_server_info_is_the_routers_alone_where_a_replica_has_none(body: bytes) -> None:
    async with routed(StandIn(answered(body))) as (client, _), client.get("/server_info") as got:
        assert (got.status, list(await got.json())) == (200, ["router"])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        (route.method, route.path)
        for route in ROUTES
        if route.admin and route.method != "GET" and route.path not in ELSEWHERE
    ],
)
async def test_what_an_administrator_changes_is_changed_on_all_replicas(
    method: str, path: str
) -> None:
    replicas = [StandIn(answered(b'{"success":true}')) for _ in range(2)]
    async with (
        routed(*replicas) as (client, _),
        client.request(method, path, json={}, headers=ADMIN) as got,
    ):
        assert (got.status, await got.json()) == (200, {"success": True})
    assert [[each.line for each in replica.asked] for replica in replicas] == [
        [f"{method} {path} HTTP/1.1"]
    ] * 2


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_a_change_that_a_replica_has_no_part_in_ends_with_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_stopped: bool,
) -> None:
    """When it comes back it serves with its old state."""
    monkeypatch.setattr(upstream, "PROBE_S", 0.1)
    replica = StandIn(answered(b'{"success":true}'))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if is_stopped:
            listener.listen(8)
        absent = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with routed(replica) as (client, server):
            server.router.add(absent)
            async with client.post("/flush_cache", headers=ADMIN) as got:
                error = (await got.json())["error"]
            assert (got.status, error["code"]) == (503, "replicas_missing")
            assert absent in error["message"]
            for path in ("/is_paused", "/abort_request", "/v1/models"):
                async with client.get(path) as got:
                    assert got.status == 200, "nothing changes"
            replica.answer = written(REFUSED)
            async with client.post("/flush_cache", headers=ADMIN) as got:
                assert got.status == 401, "the other one has not done it"
            assert got.headers["WWW-Authenticate"] == "Bearer"
            server.router.balancer.remove(absent)
            replica.answer = answered(b'{"success":true}')
            async with client.post("/flush_cache", headers=ADMIN) as got:
                assert got.status == 200


NOT_LOADED = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("path", "answers", "status"),
    [
        ("/unload_lora_adapter", (b'{"success":true}', None), 200),
        ("/v1/unload_lora_adapter", (None, b'{"success":true}'), 200),
        ("/unload_lora_adapter", (None, None), 404),
        ("/load_lora_adapter", (b'{"success":true}', None), 404),
    ],
)
async def test_a_repeated_unload_is_done_when_no_replica_has_the_adapter_any_more(
    path: str, answers: tuple[bytes | None, ...], status: int
) -> None:
    replicas = [StandIn(answered(each) if each else written(NOT_LOADED)) for each in answers]
    async with (
        routed(*replicas) as (client, _),
        client.post(path, json={"lora_name": "a"}, headers=ADMIN) as got,
    ):
        assert got.status == status


async def test_an_unload_is_not_done_while_a_replica_that_may_have_the_adapter_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream, "PROBE_S", 0.1)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        async with routed(StandIn(written(NOT_LOADED))) as (client, server):
            server.router.add(f"http://127.0.0.1:{listener.getsockname()[1]}")
            async with client.post("/unload_lora_adapter", json={}, headers=ADMIN) as got:
                assert (await got.json())["error"]["code"] == "replicas_missing"


async def test_a_replica_that_stands_still_within_a_change_does_not_hold_up_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A change that takes longer than probes is awaited from a replica that answers these."""
    monkeypatch.setattr(upstream, "PROBE_S", 0.05)
    may_end = asyncio.Event()

    async def slow(writer: asyncio.StreamWriter) -> None:
        await may_end.wait()
        await answered(b'{"success":true}')(writer)

    quick, late = StandIn(answered(b'{"success":true}')), StandIn(slow)
    async with routed(quick, late) as (client, _):
        asked = asyncio.ensure_future(client.post("/flush_cache", headers=ADMIN))
        await late.asked_more(1)
        await asyncio.wait([asked], timeout=0.5)
        assert not asked.done()
        late.is_stopped = True
        async with asyncio.timeout(5), await asked as got:
            error = (await got.json())["error"]
        assert (got.status, error["code"]) == (503, "replicas_missing")
        assert late.url in error["message"]
        may_end.set()


async def test_a_change_reaches_a_replica_that_does_not_serve() -> None:
    """Such as one that sleeps, and is to wake."""
    serves, sleeps = (StandIn(answered(b'{"is_sleeping":false}')) for _ in range(2))
    async with routed(serves, sleeps) as (client, server):
        server.router.balancer.failed(sleeps.url, is_down=True)
        async with client.post("/wake_up", headers=ADMIN) as got:
            assert got.status == 200
    assert len(sleeps.asked) == 1


async def test_the_entity_tag_of_changed_settings_passes() -> None:
    body = b'{"version":2}'
    tagged = b'HTTP/1.1 200 OK\r\nETag: "2"\r\nContent-Length: %d\r\n\r\n%s' % (len(body), body)
    async with (
        routed(StandIn(written(tagged))) as (client, _),
        client.patch("/settings", json={"max_queue": 5}, headers=ADMIN) as got,
    ):
        assert (got.headers["ETag"], await got.read()) == ('"2"', body)


@pytest.mark.parametrize("path", ["/settings", "/configure_logging"])
async def test_settings_of_replicas_are_not_added_up(path: str) -> None:
    settings = b'{"version":2,"max_queue":512}'
    replicas = [StandIn(answered(settings)) for _ in range(2)]
    async with routed(*replicas) as (client, _):
        method = "PATCH" if path == "/settings" else "POST"
        async with client.request(method, path, json={"max_queue": 512}) as got:
            assert await got.read() == settings
        async with client.get(path) as got:
            assert await got.read() == settings
    assert sorted(len(each.asked) for each in replicas) == [1, 2], "one of them is read"


async def test_lists_and_metrics_of_all_replicas_are_joined() -> None:
    def listed(*names: str) -> Any:
        text = json.dumps({"object": "list", "data": [{"id": name} for name in names]}).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        return written(head % len(text) + text)

    left, right = StandIn(listed("m", "l")), StandIn(listed("m", "r"))
    async with routed(left, right) as (client, _):
        async with client.get("/v1/models") as got:
            assert [each["id"] for each in (await got.json())["data"]] == ["m", "l", "r"]
        text = b"# TYPE x_total counter\nx_total 3.0\n"
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n"
        left.answer = right.answer = written(head % len(text) + text)
        async with client.get("/metrics") as got:
            lines = (await got.text()).splitlines()
        assert "x_total 6.0" in lines
        assert f'aserve_router_replica_healthy{{replica="{left.url}"}} 1.0' in lines
        for body in (b"<html>", b"x_total{ 1\n", b"\xff"):
            left.answer = answered(body)
            async with client.get("/metrics") as got:
                assert "x_total 3.0" in (await got.text()).splitlines(), "the other replica's alone"


async def test_a_replica_that_stands_still_does_not_hold_up_what_the_others_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Models and metrics came after --replica-timeout, which is ten minutes."""
    monkeypatch.setattr(joined_answers, "ANSWER_S", 0.2)
    silent, other = StandIn(written()), StandIn()
    async with asyncio.timeout(20), routed(silent, other) as (client, _):
        for path in ("/v1/models", "/metrics", "/server_info"):
            async with client.get(path) as got:
                assert got.status == 200
    assert (len(silent.asked), len(other.asked)) == (3, 3)


async def test_an_answer_of_the_router_that_its_client_does_not_read_is_closed() -> None:
    async with (
        asyncio.timeout(20),
        routed(StandIn(), write_timeout=0.2) as (_, server),
        UnreadClient(server.address) as client,
    ):
        with pytest.raises(ConnectionError):
            await client.send_for_ever("/health")


async def test_a_client_over_its_rate_gets_429_with_the_time_to_wait() -> None:
    usage = b'{"usage":{"total_tokens":90}}'
    replica = StandIn(
        written(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(usage), usage))
    )
    async with routed(replica, requests_per_minute=100, tokens_per_minute=100) as (client, _):
        async with client.post(CHAT, json=BODY | {"max_tokens": 50}) as got:
            assert got.headers["x-ratelimit-limit-tokens"] == "100"
        async with client.post(CHAT, json=BODY | {"max_tokens": 50}) as got:
            assert got.status == 429, "the usage was charged, not the estimate"
            assert (await got.json())["error"]["code"] == "rate_limit_exceeded"
            assert 20 < int(got.headers["Retry-After"]) < 60
        async with client.post(CHAT, json=BODY, headers={"X-Api-Key": "other"}) as got:
            assert got.status == 429  # keys that nobody has checked are no new client


@pytest.mark.parametrize(
    ("answer", "max_tokens", "remaining"),
    [
        (answered(b"{}", status=b"400 Bad Request"), 10**9, 1000),
        (answered(b"{}", status=b"400 Bad Request"), 10**400, 1000),
        (written(BUSY), 500, 1000),
        (written(closes=True), 500, 1000),
        (answered(b'{"usage":{"total_tokens":90}}'), 500, 910),
        (answered(SSE * 20 + DONE, kind=b"text/event-stream"), 10**9, 979),
        (answered(b"x" * 400), 10**9, 900),
        (answered(b"x" * 400), 50, 950),
    ],
    ids=("400", "400 digits", "503", "502", "usage", "a stream without", "without", "at most"),
)
async def test_a_request_is_charged_for_what_it_used_and_not_if_it_failed(
    answer: Any, max_tokens: int, remaining: int
) -> None:
    async with routed(StandIn(answer), tokens_per_minute=1000) as (client, server):
        async with client.post(CHAT, json={"max_tokens": max_tokens}) as got:
            assert b'"bug"' not in await got.read()
        (bucket,) = (each["tokens"] for each in server.router.rates._clients.values())
        level = bucket.level(bucket._at_s)
        assert level == pytest.approx(remaining, abs=0.5)


async def test_a_request_to_a_silent_replica_is_given_up_and_not_sent_again() -> None:
    silent, other = StandIn(written()), StandIn()
    async with routed(other, silent, replica_timeout=0.2) as (client, _):
        async with client.post(CHAT, json=BODY) as got:
            assert (got.status, (await got.json())["error"]["code"]) == (504, "replica_timeout")
        assert (len(silent.asked), len(other.asked)) == (1, 0)


async def test_a_stream_that_its_client_does_not_read_is_closed() -> None:
    is_over = asyncio.Event()

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        try:
            while True:
                writer.write(b"2710\r\n%b\r\n" % (10_000 * b"a"))
                await writer.drain()
        finally:
            is_over.set()

    async with (
        asyncio.timeout(20),
        routed(StandIn(answer), write_timeout=0.2) as (_, server),
        UnreadClient(server.address) as client,
    ):
        await client.post(CHAT, BODY)
        await is_over.wait()
        assert not (await client.read_all()).endswith(b"\r\n0\r\n\r\n")
        await server.router.proxy.idle.wait()
