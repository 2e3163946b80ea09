"""The connections to a replica: what is read from them, when they are used again, and flow control.

The replica is written as bytes, and the router's `Upstream` asks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
from aiohttp import StreamReader, web
from aiohttp.base_protocol import BaseProtocol

from aserve.config import Facts, Raw, RouterOptions, resolve
from aserve.router import upstream as upstream_module
from aserve.router.replica_connection import (
    MAX_HEAD_BYTES,
    Answer,
    AnswerBroken,
    ReplicaConnection,
)
from aserve.router.upstream import Call, CannotConnect, Upstream
from tests.router.routed import CHUNKED, OK

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
POST = Call("POST", "/x", [("X-Own", "1")], b"{}")
GET = Call("GET", "/x")
TLS_DIR = Path(__file__).parents[1] / "http" / "tls"
LAST_CHUNK = b"0\r\nX-T: 1\r\n\r\n"


def options(**given: object) -> RouterOptions:
    return resolve(Raw(command_line=given), Facts(default_model="none")).router


@asynccontextmanager
async def asking(serve: Serve, *, at: str = "", **given: object) -> AsyncIterator[Upstream]:
    """Yields the connections to a replica that `serve` is, for each connection."""

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await serve(reader, writer)
        writer.close()

    server = await asyncio.start_server(run, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    upstream = Upstream(f"http://{at.partition('|')[0]}127.0.0.1:{port}{at.partition('|')[2]}",
                        options(**given))  # fmt: skip
    upstream.open()
    yield upstream
    await upstream.close()
    server.close()


async def request_of(reader: asyncio.StreamReader) -> bytes:
    """Returns the head of a request, whose body of two bytes is dropped."""
    head = await reader.readuntil(b"\r\n\r\n")
    if b"Content-Length: 2\r\n" in head:
        await reader.readexactly(2)
    return head


class Scripted:
    """Answers the requests of each connection with the next of its `answers`, and then closes it.
    An empty one closes it at once. `heads` are the requests.
    """

    def __init__(self, *connections: list[bytes]) -> None:
        self._left = list(connections)
        self.heads: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in self._left.pop(0):
            self.heads.append(await request_of(reader))
            writer.write(answer)


class Kept:
    """Answers one request, and leaves its connection open. `closed` is set when the router closes
    it. `ends` are the last bytes of the request.
    """

    def __init__(self, answer: bytes, *, ends: bytes = b"\r\n\r\n{}") -> None:
        self.closed = asyncio.Event()
        self._answer = answer
        self._ends = ends

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(self._ends)
        writer.write(self._answer)
        await reader.read()
        self.closed.set()


async def whole(upstream: Upstream, call: Call = POST) -> tuple[int, str, bytes]:
    answer = await upstream.ask(call)
    try:
        return answer.status, answer.reason, await answer.read()
    finally:
        await upstream.release(answer)


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n",
        b"",
    ],
    ids=("informational", "plain"),
)
@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"Content-Length: 3\r\nX-A: 1\r\n\r\nabc", b"abc"),
        (b"X-A: 1\r\nTransfer-Encoding: chunked\r\n\r\n1;n=v\r\na\r\n2\r\nbc\r\n" + LAST_CHUNK,
         b"abc"),
        (b"X-A: 1\r\n\r\nabc", b"abc"),
    ],
    ids=("length", "chunked", "close"),
)  # fmt: skip
async def test_an_answer_that_is_cut_anywhere_is_the_same(
    sent: bytes, answer: bytes, body: bytes
) -> None:
    data = sent + b"HTTP/1.1 201 Made it\r\n" + answer

    ends_by_close = b"Content-Length" not in answer and b"chunked" not in answer

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            cut = int((await request_of(reader)).split()[1].lstrip(b"/"))
            writer.write(data[:cut])
            await asyncio.sleep(1e-3)
            writer.write(data[cut:])
            if ends_by_close:
                writer.close()

    async with asking(serve) as upstream:
        for cut in range(len(data) + 1):
            got = await upstream.ask(Call("POST", f"/{cut}", [], b"{}"))
            assert (got.status, got.reason, got.headers.getall("X-A")) == (201, "Made it", ["1"])
            assert "X-T" not in got.headers, "it came behind the body"
            assert (await got.read(), await got.read_some()) == (body, b"")
            await upstream.release(got)


@pytest.mark.parametrize(
    ("answer", "is_used_again"),
    [
        (OK, True),
        (CHUNKED + b"2\r\nok\r\n0\r\n\r\n", True),
        (b"HTTP/1.1 204 Nothing\r\n\r\n", True),
        (OK.replace(b"Content", b"Connection: close\r\nContent"), False),
        (OK.replace(b"1.1", b"1.0"), False),
        (OK + OK, False),
        (OK + b"rest", False),
    ],
    ids=("length", "chunked", "204", "close", "1.0", "second answer", "rest"),
)
async def test_a_connection_is_used_again_if_the_answer_has_ended(
    answer: bytes, is_used_again: bool
) -> None:
    replica = Scripted([answer, OK], [OK])
    async with asking(replica) as upstream:
        assert (await whole(upstream))[2] == (b"" if b"204" in answer else b"ok")
        await asyncio.sleep(0.01)
        assert (await whole(upstream))[:2] == (200, "OK")
        assert len(replica._left) == is_used_again
    assert b"POST /x HTTP/1.1\r\nHost: 127.0.0.1:" in replica.heads[0]
    assert replica.heads[0].endswith(b"X-Own: 1\r\nContent-Length: 2\r\n\r\n")


async def test_an_answer_to_head_has_no_body() -> None:
    async with asking(Scripted([OK[:-2]], [OK])) as upstream:
        assert await whole(upstream, Call("HEAD", "/x")) == (200, "OK", b"")
        assert (await whole(upstream))[2] == b"ok"


async def test_what_may_be_sent_twice_is_sent_again_if_an_idle_connection_was_closed() -> None:
    replica = Scripted([OK, b""], [OK], [OK, b""])
    async with asking(replica) as upstream:
        assert (await whole(upstream, GET))[2] == b"ok"
        assert (await whole(upstream, GET))[2] == b"ok"
        assert len(replica.heads) == 3
    async with asking(Scripted([OK, b""])) as upstream:
        await whole(upstream)
        with pytest.raises(AnswerBroken) as failed:
            await whole(upstream)
        assert not failed.value.has_begun


async def test_idle_connections_are_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_module, "KEEP_ALIVE_S", 0.05)
    replica = Kept(OK)

    async with asking(replica) as upstream, asyncio.timeout(5):
        await whole(upstream)
        await replica.closed.wait()


@pytest.mark.parametrize(
    ("answer", "has_begun"),
    [
        (b"", False),
        (b"HTTP/1.1 2", True),
        (b"no http\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * MAX_HEAD_BYTES, True),
        (b"HTTP/1.1 101 Go\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab", True),
        (CHUNKED + b"2\r\nab\r\nz\r\n", True),
        (CHUNKED + b"2\r\nab\r\n", True),
    ],
    ids=("nothing", "part", "no http", "long", "101", "two lengths", "short", "bad", "cut"),
)
async def test_a_broken_answer_is_an_error(answer: bytes, has_begun: bool) -> None:
    async with asking(Scripted([answer])) as upstream:
        with pytest.raises(AnswerBroken) as failed:
            await whole(upstream)
        assert failed.value.has_begun == has_begun


@pytest.mark.parametrize("piece", [b"a: b\r\n", b"a"], ids=("many", "one"))
async def test_trailers_are_bounded(piece: bytes) -> None:
    data = CHUNKED + b"2\r\nab\r\n0\r\n" + (b"" if len(piece) > 1 else b"x: ")
    async with asking(Scripted([data + piece * (4 * MAX_HEAD_BYTES // len(piece))])) as upstream:
        with pytest.raises(AnswerBroken, match="headers"):
            await whole(upstream)


async def test_no_connection_stays_when_its_answer_breaks_with_its_head() -> None:
    replica = Kept(CHUNKED + b"zz\r\n")

    async with asking(replica) as upstream, asyncio.timeout(5):
        with pytest.raises(AnswerBroken):
            await upstream.ask(POST)
        await replica.closed.wait()


async def test_no_connection_stays_when_its_client_goes_as_the_head_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = Kept(CHUNKED)
    receive = ReplicaConnection.data_received

    def received(connection: ReplicaConnection, data: bytes) -> None:
        receive(connection, data)
        asked.cancel()

    monkeypatch.setattr(ReplicaConnection, "data_received", received)
    async with asking(replica) as upstream, asyncio.timeout(5):
        asked = asyncio.create_task(upstream.ask(POST))
        with pytest.raises(asyncio.CancelledError):
            await asked
        await replica.closed.wait()


async def test_no_connection_stays_when_its_client_goes_at_the_end() -> None:
    replica = Kept(OK, ends=b"0\r\n\r\n")

    async with asking(replica) as upstream, asyncio.timeout(5):
        answer = await upstream.ask(Call("POST", "/x", [], body_of(b"ab")))
        assert await answer.read() == b"ok"
        ending = asyncio.create_task(upstream.release(answer))
        await asyncio.sleep(0)
        ending.cancel()
        await asyncio.wait([ending])
        assert ending.cancelled()
        await replica.closed.wait()


async def test_of_a_name_with_a_dead_address_the_other_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The dead one has a full backlog: it drops what would begin a connection."""
    async with asking(Scripted([OK])) as upstream, asyncio.timeout(4):
        upstream._url = upstream._url.with_host("replica.test")
        port = upstream._url.port
        assert port is not None
        with socket.create_server(("127.0.0.2", port), backlog=0) as dead, ExitStack() as stack:
            for _ in range(4):
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(dead.getsockname())
            kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
            found = [(*kind, (host, port)) for host in ("127.0.0.2", "127.0.0.1")]
            monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
            assert (await whole(upstream))[2] == b"ok"


async def test_the_beginning_of_a_broken_answer_can_be_read() -> None:
    async with asking(Scripted([CHUNKED + b"2\r\nab\r\n"])) as upstream:
        answer = await upstream.ask(POST)
        assert await answer.read_some() == b"ab"
        with pytest.raises(AnswerBroken):
            await answer.read_some()
        await upstream.release(answer)


async def test_a_silent_replica_is_given_up() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        for piece in (CHUNKED, b"1\r\na\r\n", b"1\r\nb\r\n"):
            writer.write(piece)
            await asyncio.sleep(0.3)
        await reader.read()

    pieces: list[bytes] = []

    def note(piece: bytes) -> bool:
        pieces.append(piece)
        return True

    async with asking(serve, replica_timeout=0.8) as upstream:
        answer = await upstream.ask(POST)
        with pytest.raises(TimeoutError):
            await answer.pipe(note)
        assert pieces == [b"a", b"b"]
        await upstream.release(answer)


async def test_a_sink_that_is_full_stops_the_replica_and_is_no_silence() -> None:
    """The replica's bytes stay in the two sockets, and the time limit is not the client's."""
    total = 0
    writing = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal total
        await request_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (64 << 20))
        for _ in range(64):
            writer.write(bytes(1 << 20))
            await writer.drain()
            total += 1 << 20
        writing.set()

    taken: list[bytes] = []

    def full(piece: bytes) -> bool:
        taken.append(piece)
        return False

    def wide(piece: bytes) -> bool:
        taken.append(piece)
        return True

    async with asking(serve, replica_timeout=0.5) as upstream, asyncio.timeout(60):
        answer = await upstream.ask(POST)
        await asyncio.sleep(0.7)  # unread: the head has come, and nobody reads on
        assert answer._num_unread < 1 << 20
        assert not await answer.pipe(full)
        before = sum(map(len, taken))
        await asyncio.sleep(0.7)
        assert sum(map(len, taken)) == before < 1 << 20
        assert total < 48 << 20
        assert await answer.pipe(wide)
        await writing.wait()
        assert sum(map(len, taken)) == 64 << 20
        await upstream.release(answer)


async def test_a_replica_that_stops_to_read_a_body_is_given_up() -> None:
    done = asyncio.Event()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cast(asyncio.Transport, writer.transport).pause_reading()
        await done.wait()

    async with asking(serve, replica_timeout=0.1) as upstream, asyncio.timeout(5):
        body = body_of(*[bytes(1 << 20)] * 32)
        with pytest.raises(TimeoutError):
            await upstream.ask(Call("POST", "/x", [], body))
        done.set()


async def test_a_client_that_sends_slowly_leaves_the_replica_its_time() -> None:
    """The time limit begins anew when the body has come."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"0\r\n\r\n")
        await asyncio.sleep(0.5)
        writer.write(OK)
        await reader.read()

    async with asking(serve, replica_timeout=1.0) as upstream:
        body = body_of(b"ab", ends=False)
        asked = asyncio.create_task(whole(upstream, Call("POST", "/x", [], body)))
        await asyncio.sleep(0.8)
        body.feed_eof()
        assert (await asked)[2] == b"ok"


class Client:
    """The protocol of a client's connection, which a body's reader may pause."""

    connected = True
    _reading_paused = False

    def pause_reading(self) -> None: ...
    def resume_reading(self, resume_parser: bool = True) -> None: ...


def body_of(*pieces: bytes, ends: bool = True) -> StreamReader:
    protocol = cast(BaseProtocol, Client())
    reader = StreamReader(protocol, 1 << 16, loop=asyncio.get_running_loop())
    for piece in pieces:
        reader.feed_data(piece)
    if ends:
        reader.feed_eof()
    return reader


async def test_a_body_that_still_arrives_is_sent_as_chunks() -> None:
    got = b""

    has_part = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal got
        got = await reader.readuntil(b"ab\r\n")
        has_part.set()
        got += await reader.readuntil(b"0\r\n\r\n")
        writer.write(OK)
        await reader.read()

    async with asking(serve) as upstream, asyncio.timeout(20):
        body = body_of(b"ab", ends=False)
        asked = asyncio.create_task(whole(upstream, Call("POST", "/x", [], body)))
        await has_part.wait()
        body.feed_data(b"c")
        body.feed_eof()
        assert (await asked)[2] == b"ok"
        assert len(upstream._idle) == 1
    assert got.partition(b"\r\n\r\n")[2] == b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
    assert b"Transfer-Encoding: chunked\r\n" in got
    assert b"Content-Length" not in got


async def test_a_body_that_breaks_is_the_clients_error() -> None:
    async def serve(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with asking(serve) as upstream:
        body = body_of(b"ab", ends=False)
        asked = asyncio.create_task(whole(upstream, Call("POST", "/x", [], body)))
        await asyncio.sleep(0.01)
        body.set_exception(ConnectionResetError("gone"))
        with pytest.raises(web.RequestPayloadError):
            await asked
        assert not upstream._idle


async def test_an_answer_before_the_end_of_the_body_ends_the_sending() -> None:
    refusal = OK.replace(b"200 OK", b"413 Large")
    async with asking(Scripted([refusal], [OK])) as upstream:
        body = body_of(b"ab", ends=False)
        assert await whole(upstream, Call("POST", "/x", [], body)) == (413, "Large", b"ok")
        assert not upstream._idle
        body.feed_data(b"c")
        assert await body.readany() == b"abc"[2:], "nobody else reads it any more"


async def test_a_cancelled_request_closes_its_connection() -> None:
    asked_for, closed = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked_for.set()
        await reader.read()
        closed.set()

    async with asking(serve) as upstream, asyncio.timeout(20):
        for body in (b"{}", body_of(b"ab", ends=False)):
            asked_for.clear()
            closed.clear()
            asked = asyncio.create_task(whole(upstream, Call("POST", "/x", [], body)))
            await asked_for.wait()
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            await closed.wait()
        assert not upstream._idle


async def test_the_replicas_address_may_have_a_path_and_a_login() -> None:
    replica = Scripted([OK], [OK])
    call = Call("POST", "/x?y=%20z", [("Authorization", "Bearer of the client")], b"{}")
    async with asking(replica, at="u:p%40@|/base/") as upstream:
        await whole(upstream, call)
    async with asking(replica, upstream_api_key="k") as upstream:
        await whole(upstream, call)
    assert b"POST /base/x?y=%20z HTTP/1.1\r\nHost: 127.0.0.1:" in replica.heads[0]
    assert b"Authorization: Basic dTpwQA==\r\n" in replica.heads[0]
    assert b"Authorization: Bearer k\r\n" in replica.heads[1]
    assert b"of the client" not in b"".join(replica.heads)


async def test_a_replica_may_speak_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its certificate must be one that this machine trusts."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(TLS_DIR / "cert.pem", TLS_DIR / "key.pem")
    large = OK.replace(b"2\r\n\r\nok", b"%d\r\n\r\n%b" % (1 << 22, bytes(1 << 22)))
    server = await asyncio.start_server(Scripted([OK, large, OK]), "127.0.0.1", 0, ssl=context)
    address = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    stranger = Upstream(address, options())
    with pytest.raises(CannotConnect, match="certificate"):
        await stranger.ask(POST)
    monkeypatch.setenv("SSL_CERT_FILE", str(TLS_DIR / "cert.pem"))
    upstream = Upstream(address, options())
    upstream.open()
    for size in (2, 1 << 22, 2):
        assert len((await whole(upstream))[2]) == size
    await upstream.close()
    server.close()


async def test_a_replica_may_listen_on_a_unix_socket(tmp_path: Path) -> None:
    replica = Scripted([OK, OK])
    server = await asyncio.start_unix_server(replica, tmp_path / "s")
    upstream = Upstream(f"unix:{tmp_path / 's'}", options())
    upstream.open()
    assert (await whole(upstream))[2] == (await whole(upstream))[2] == b"ok"
    assert b"\r\nHost: localhost\r\n" in replica.heads[1]
    await upstream.close()
    server.close()


async def test_bytes_of_a_head_pass_unchanged() -> None:
    replica = Scripted([OK.replace(b"Content", b"X-Own: \xff\xc3\xa4\r\nContent")])
    async with asking(replica) as upstream:
        text = b"\xff\xc3\xa4".decode("utf-8", "surrogateescape")
        answer: Answer = await upstream.ask(Call("GET", f"/{text}", [("X-Own", text)]))
        assert answer.headers["X-Own"] == text
        await upstream.release(answer)
    assert replica.heads[0].startswith(b"GET /\xff\xc3\xa4 HTTP/1.1\r\n")
    assert b"X-Own: \xff\xc3\xa4\r\n" in replica.heads[0]


async def test_after_its_end_nothing_is_sent_to_a_replica() -> None:
    async with asking(Scripted([OK])) as upstream:
        answer = await upstream.ask(POST)
        await upstream.close()
        await upstream.release(answer)
        assert not upstream._idle
        with pytest.raises(CannotConnect, match="removed"):
            await upstream.ask(POST)
