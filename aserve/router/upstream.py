"""The connections to one replica: HTTP requests, websockets and probes.

A replica is named by its address, `http://HOST:PORT` or `unix:PATH`. An address may have a login,
`http://USER:PASSWORD@HOST:PORT`, which the name has not: names are shown, in metrics and the log.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from urllib.parse import urlsplit

import aiohappyeyeballs
import aiohttp
import msgspec
from aiohappyeyeballs import AddrInfoType
from aiohttp import hdrs
from multidict import MultiMapping
from yarl import URL

from aserve.config import RouterOptions
from aserve.errors import UNDECODABLE, ConfigError
from aserve.http.cut_streams import media_type
from aserve.http.frontend_requests import SKIPPED, Headers
from aserve.options.option import is_host
from aserve.router.replica_connection import (
    ANY_BYTES,
    Answer,
    AnswerBroken,
    ReplicaConnection,
)

UNIX = "unix:"
CONNECT_S = 5.0
RESOLVED_S = 10.0  # for which the addresses of a name are used
NEXT_ADDRESS_S = 0.25  # before another address of the same name is tried as well
PROBE_S = 5.0
# WHY: uvicorn, in front of vLLM and SGLang, closes an idle connection after 5 seconds.
KEEP_ALIVE_S = 4.0
# Methods of requests that may be sent twice (RFC 9110, 9.2.2).
IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
HAS_BODY = frozenset({"POST", "PUT", "PATCH"})


class CannotConnect(ConnectionError):
    """Nothing listens at the replica's address, or it does not accept in time."""


class CannotServe(ConnectionError):
    """The replica says that it is not ready."""


CANNOT_CONNECT = (CannotConnect, aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
GONE = (aiohttp.ClientError, OSError, TimeoutError)


def check_address(address: str) -> str:
    """Returns the address without a slash at its end. Raises ConfigError if it is none."""
    if address.startswith(UNIX) and len(address) > len(UNIX) and "\0" not in address:
        return address
    if not _is_url(address):
        raise ConfigError(
            f"{address!r} is no address of a replica: give http://HOST:PORT or unix:PATH"
        )
    return address.rstrip("/")


def name_of(address: str) -> str:
    """Returns the address of a replica without its login."""
    if address.startswith(UNIX):
        return address
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _is_url(address: str) -> bool:
    """Returns whether a connection to it can be tried: name resolution encodes hosts by IDNA."""
    try:
        parts = urlsplit(address)
        has_host = is_host(parts.hostname or "") and parts.port != 0
    except ValueError:
        return False
    return has_host and parts.scheme in ("http", "https") and not parts.query


@dataclass(frozen=True, slots=True)
class Call:
    """A request as every replica gets it. `data` is its body, or a stream that can be sent once."""

    method: str
    path: str  # with the query, percent-encoded
    headers: Headers = field(default_factory=list)
    data: bytes | aiohttp.StreamReader | None = None


class Upstream:
    """`open` and `close` surround its use. Its idle connections are used again, the last one first.

    aiohttp's client carries the websockets alone: `replica_connection` says why.
    """

    def __init__(self, address: str, options: RouterOptions) -> None:
        self.name = name_of(address)
        self._unix_path = address.removeprefix(UNIX) if address.startswith(UNIX) else None
        url = URL(address if self._unix_path is None else "http://localhost")
        self._url = url.with_user(None)
        self._timeout_s = options.replica_timeout
        self._tls = ssl.create_default_context() if self._url.scheme == "https" else None
        self._tls_name = (url.host or "").rstrip(".") if self._tls is not None else None
        self._headers: dict[str, str] = {}
        self._key = options.upstream_api_key
        if self._key is not None:
            self._headers[hdrs.AUTHORIZATION] = f"Bearer {self._key}"
        self.use_login(address)
        self._idle: deque[tuple[float, ReplicaConnection]] = deque()  # by the time of last use
        self._awaited: set[Answer] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._resolving = asyncio.Lock()
        self._found: Sequence[AddrInfoType] = ()
        self._resolved_until_s = 0.0

    def use_login(self, address: str) -> None:
        """Sends the login of the address, if it has one and no key goes in its place."""
        login = aiohttp.BasicAuth.from_url(URL(address))
        if login is not None and self._key is None:
            self._headers[hdrs.AUTHORIZATION] = login.encode()

    def open(self) -> None:
        connector: aiohttp.BaseConnector
        redirects = aiohttp.TraceConfig()
        redirects.on_request_redirect.append(_refuse_redirect)
        if self._unix_path is not None:
            connector = aiohttp.UnixConnector(self._unix_path, limit=0)
        else:
            connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_S, sock_read=self._timeout_s
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=SKIPPED,
            trace_configs=[redirects],
        )

    async def close(self) -> None:
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        self._close_idle()
        await self._session.close()

    def fail_all(self, error: Exception) -> None:
        """Ends all answers that have not come to their end by this error."""
        for answer in self._awaited:
            answer.fail(error)

    async def ask(self, call: Call) -> Answer:
        """Returns the answer when its head has come; `release` must follow. Raises one of GONE."""
        # WHY: a replica may have closed an idle connection while the request was on its way.
        may_repeat = call.method in IDEMPOTENT and not isinstance(call.data, aiohttp.StreamReader)
        head = self._head(call)
        while True:
            connection, is_new = await self._take()
            answer = connection.send(head, call.data or b"", timeout_s=self._timeout_s)
            self._awaited.add(answer)
            has_head = False
            try:
                await answer.head()
                has_head = True
                return answer
            except AnswerBroken as error:
                if error.has_begun or is_new or not may_repeat:
                    raise
            finally:
                if not has_head:
                    await self.release(answer)

    async def release(self, answer: Answer) -> None:
        """Ends the exchange, also in the middle of the answer."""
        self._awaited.discard(answer)
        connection = answer.connection
        await connection.end()
        if self._is_closed or not connection.is_idle:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        self._idle.append((loop.time(), connection))
        if self._sweep is None:
            self._sweep = loop.call_later(KEEP_ALIVE_S, self._close_idle)

    async def ask_whole(self, call: Call) -> Whole:
        answer = await self.ask(call)
        try:
            return Whole(answer.status, answer.headers, await answer.read())
        finally:
            await self.release(answer)

    async def connect(self, call: Call, heartbeat_s: float) -> aiohttp.ClientWebSocketResponse:
        return await self._session.ws_connect(
            # The path stays as the client has encoded it.
            URL(f"{str(self._url).rstrip('/')}{call.path}", encoded=True),
            headers=self._with_key(call.headers),
            heartbeat=heartbeat_s,
            max_msg_size=0,
            compress=0,
        )

    async def reach(self) -> None:
        """Raises one of GONE if the replica does not answer at once, be it ready or not."""
        async with asyncio.timeout(PROBE_S):
            await self.ask_whole(Call(hdrs.METH_GET, "/health"))

    async def keep_reaching(self) -> None:
        """Raises TimeoutError when the replica has not answered twice in a row."""
        num_missed = 0
        while num_missed < 2:
            await asyncio.sleep(PROBE_S)
            try:
                await self.reach()
                num_missed = 0
            except GONE:
                num_missed += 1
        raise TimeoutError

    async def probe(self) -> int | None:
        """Returns the number of open requests that the replica reports, if it does. Raises one of
        GONE if the replica is not ready.
        """
        async with asyncio.timeout(PROBE_S):
            health = await self.ask_whole(Call(hdrs.METH_GET, "/health"))
            if health.status >= 300:
                raise CannotServe(f"the replica's /health is {health.status}")
            load = await self.ask_whole(Call(hdrs.METH_GET, "/load"))
        return load_in(load.body) if load.status == 200 else None

    async def _take(self) -> tuple[ReplicaConnection, bool]:
        """Returns a connection, and whether it is a new one."""
        if self._is_closed:
            raise CannotConnect("the replica was removed")
        oldest_s = asyncio.get_running_loop().time() - KEEP_ALIVE_S
        while self._idle:
            used_s, connection = self._idle.pop()
            if connection.is_idle and used_s > oldest_s:
                return connection, False
            connection.close()
        return await self._connect(), True

    async def _connect(self) -> ReplicaConnection:
        loop = asyncio.get_running_loop()
        try:
            if (path := self._unix_path) is not None:
                async with asyncio.timeout(CONNECT_S):
                    _, connection = await loop.create_unix_connection(ReplicaConnection, path)
                return connection
            found = await self._resolved()
            async with asyncio.timeout(CONNECT_S):
                sock = await aiohappyeyeballs.start_connection(
                    found, happy_eyeballs_delay=NEXT_ADDRESS_S, interleave=1
                )
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _, connection = await loop.create_connection(
                    ReplicaConnection, sock=sock, ssl=self._tls, server_hostname=self._tls_name
                )
            return connection
        except OSError as error:
            self._resolved_until_s = 0.0  # the name may have another address now
            why = str(error) or f"it has not accepted within {CONNECT_S:g} seconds"
            raise CannotConnect(f"cannot connect to the replica: {why}") from error

    async def _resolved(self) -> Sequence[AddrInfoType]:
        """Returns the addresses of the name, of which some may be dead (RFC 8305). Those that ask
        at the same time share a lookup, which may be slow without the replica being down.
        """
        loop = asyncio.get_running_loop()
        async with self._resolving:
            if loop.time() >= self._resolved_until_s:
                self._found = await loop.getaddrinfo(
                    self._url.host,
                    self._url.port,
                    type=socket.SOCK_STREAM,
                    proto=socket.IPPROTO_TCP,
                )
                self._resolved_until_s = loop.time() + RESOLVED_S
            return self._found

    def _close_idle(self) -> None:
        """Closes the connections that nobody has used for a while, and comes again for others."""
        loop = asyncio.get_running_loop()
        oldest_s = loop.time() - KEEP_ALIVE_S
        while self._idle and (self._is_closed or self._idle[0][0] <= oldest_s):
            self._idle.popleft()[1].close()
        self._sweep = None
        if self._idle:
            self._sweep = loop.call_at(self._idle[0][0] + KEEP_ALIVE_S, self._close_idle)

    def _head(self, call: Call) -> bytes:
        lines = [
            f"{call.method} {self._url.raw_path.rstrip('/')}{call.path} HTTP/1.1",
            f"Host: {self._url.host_port_subcomponent}",
            *(f"{name}: {value}" for name, value in self._with_key(call.headers)),
        ]
        if isinstance(call.data, aiohttp.StreamReader):
            lines.append("Transfer-Encoding: chunked")
        elif call.data or call.method in HAS_BODY:
            lines.append(f"Content-Length: {len(call.data or b'')}")
        return "\r\n".join([*lines, "\r\n"]).encode(*ANY_BYTES)

    def _with_key(self, headers: Headers) -> Headers:
        if not self._headers:
            return headers
        kept = [each for each in headers if each[0].lower() not in ("authorization", "x-api-key")]
        return [*kept, *self._headers.items()]


async def _refuse_redirect(
    _: aiohttp.ClientSession, __: SimpleNamespace, params: aiohttp.TraceRequestRedirectParams
) -> None:
    """WHY: aiohttp follows redirects of upgrades, to wherever a replica says."""
    answer = params.response
    answer.close()
    raise aiohttp.WSServerHandshakeError(
        answer.request_info, answer.history, status=answer.status, headers=answer.headers
    )


@dataclass(frozen=True, slots=True)
class Whole:
    """An answer that has been read to its end."""

    status: int
    headers: MultiMapping[str]
    body: bytes

    @property
    def content_type(self) -> str:
        return media_type(self.headers)


class _Load(msgspec.Struct):
    server_load: int


def load_in(body: bytes) -> int | None:
    """Reads the answer of /load, which aserve and vLLM have."""
    try:
        return msgspec.json.decode(body, type=_Load).server_load
    except UNDECODABLE:
        return None
