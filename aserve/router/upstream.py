"""The connections to one replica: HTTP requests, websockets and probes.

A replica is named by its address, `http://HOST:PORT` or `unix:PATH`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import hdrs
from yarl import URL

from aserve.config import RouterOptions
from aserve.errors import UNDECODABLE, ConfigError
from aserve.http.forwarding import SKIPPED, Headers
from aserve.options.option import is_host

UNIX = "unix:"
CONNECT_S = 5.0
PROBE_S = 5.0
# WHY: uvicorn, in front of vLLM and SGLang, closes an idle connection after 5 seconds.
KEEP_ALIVE_S = 4.0
CANNOT_CONNECT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
GONE = (aiohttp.ClientError, OSError, asyncio.TimeoutError)


def check_address(address: str) -> str:
    """Returns the address without a slash at its end. Raises ConfigError if it is none."""
    if address.startswith(UNIX) and len(address) > len(UNIX) and "\0" not in address:
        return address
    if not _is_url(address):
        raise ConfigError(
            f"{address!r} is no address of a replica: give http://HOST:PORT or unix:PATH"
        )
    return address.rstrip("/")


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
    """A request as every replica gets it. `data` is the body, or a stream that can be sent once."""

    method: str
    path: str  # with the query, percent-encoded
    headers: Headers
    data: Any = None


class Upstream:
    """`open` and `close` surround its use."""

    def __init__(self, address: str, options: RouterOptions) -> None:
        self.address = address
        self._base = "http://localhost" if address.startswith(UNIX) else address
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_S, sock_read=options.replica_timeout
        )
        key = options.upstream_api_key
        self._headers = {} if key is None else {hdrs.AUTHORIZATION: f"Bearer {key}"}

    def open(self) -> None:
        connector: aiohttp.BaseConnector
        if self.address.startswith(UNIX):
            path = self.address.removeprefix(UNIX)
            connector = aiohttp.UnixConnector(path, limit=0, keepalive_timeout=KEEP_ALIVE_S)
        else:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=self._timeout,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=SKIPPED,
        )

    async def close(self) -> None:
        await self._session.close()

    @contextlib.asynccontextmanager
    async def ask(self, call: Call) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session.closed:
            raise aiohttp.ClientConnectionError("the replica was removed")
        async with self._session.request(
            call.method,
            _url(self._base + call.path),
            headers=self._with_key(call.headers),
            data=call.data,
            allow_redirects=False,
        ) as answer:
            yield answer

    async def ask_whole(self, call: Call) -> Whole:
        async with self.ask(call) as answer:
            return Whole(answer.status, answer.content_type, await answer.read())

    async def connect(self, call: Call) -> aiohttp.ClientWebSocketResponse:
        return await self._session.ws_connect(
            _url(self._base + call.path),
            headers=self._with_key(call.headers),
            max_msg_size=0,
            compress=0,
        )

    async def probe(self) -> int | None:
        """Returns the number of open requests that the replica reports, if it does. Raises one of
        GONE if the replica is not ready.
        """
        timeout = aiohttp.ClientTimeout(total=PROBE_S)
        headers = self._headers
        async with self._session.get(
            f"{self._base}/health", timeout=timeout, headers=headers
        ) as answer:
            answer.raise_for_status()
        async with self._session.get(
            f"{self._base}/load", timeout=timeout, headers=headers
        ) as answer:
            return load_in(await answer.read()) if answer.status == 200 else None

    def _with_key(self, headers: Headers) -> Headers:
        if not self._headers:
            return headers
        kept = [each for each in headers if each[0].lower() not in ("authorization", "x-api-key")]
        return [*kept, *self._headers.items()]


@dataclass(frozen=True, slots=True)
class Whole:
    """An answer that has been read to its end."""

    status: int
    content_type: str
    body: bytes


class _Load(msgspec.Struct):
    server_load: int


def load_in(body: bytes) -> int | None:
    """Reads the answer of /load, which aserve and vLLM have."""
    try:
        return msgspec.json.decode(body, type=_Load).server_load
    except UNDECODABLE:
        return None


def _url(text: str) -> URL:
    """NOTE: the path is passed on as the client has encoded it."""
    return URL(text, encoded=True)
