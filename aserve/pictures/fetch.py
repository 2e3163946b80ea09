"""Fetches pictures from the domains that --allow-media-domains names.

A server that fetches what clients name can be made to reach hosts that only it can reach (SSRF).
Therefore:

- only hosts are asked that the operator named, and no host is given as an address;
- the addresses of a host are checked by the resolver that the connection uses, so that a name
  cannot point elsewhere in between (DNS rebinding). Only public addresses are connected to;
- redirects are errors, proxies of the environment are not asked, and cookies are not kept;
- the bytes of a file and of a request, the time, and the number of requests that fetch at once are
  bounded. Nothing is decompressed, so a small answer stays small.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from aserve.messages.requests import ChatPrompt, Prompt
from aserve.picture import PictureSource
from aserve.pictures.reader import PictureReader
from aserve.pictures.source import (
    MAX_BYTES,
    invalid_picture,
    is_remote,
    too_large,
)

TIMEOUT_S = 10.0  # of all pictures of one request
MAX_REQUEST_BYTES = 64 << 20  # of all pictures of one request
MAX_REQUESTS = 8  # that fetch, or have fetched and are not yet decoded
CHUNK_BYTES = 1 << 16
CONTENT_TYPES = ("image/", "application/octet-stream", "binary/octet-stream")
HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "aserve"}
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# Special-purpose networks that older versions of Python call global; a cloud has metadata in one.
SPECIAL = (ipaddress.IPv4Network("192.0.0.0/24"), ipaddress.IPv6Network("64:ff9b:1::/48"))


class MediaFetcher:
    """Adds the files to the pictures of prompts, which `reader` reads then. `resolver` is that of
    the operating system unless a test has another one. It runs on the event loop.
    """

    __slots__ = ("_reader", "_resolver", "_session", "_slots", "_timeout_s")

    def __init__(
        self,
        reader: PictureReader | None = None,
        *,
        resolver: AbstractResolver | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._reader = reader or PictureReader()
        self._resolver = resolver
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(MAX_REQUESTS)
        self._session: aiohttp.ClientSession | None = None

    def _fetches(self, prompt: Prompt) -> bool:
        return isinstance(prompt, ChatPrompt) and any(map(is_remote, prompt.pictures))

    @asynccontextmanager
    async def fetched(self, prompt: Prompt) -> AsyncIterator[Prompt]:
        """Yields the prompt with the files of its pictures, which are read before the block ends.
        Raises InvalidRequest if one cannot be fetched."""
        if not isinstance(prompt, ChatPrompt) or not self._fetches(prompt):
            yield prompt
            return
        self._reader.check(prompt)
        async with self._slots:
            pictures = await self._fetch_all(prompt.pictures)
            yield msgspec.structs.replace(prompt, pictures=pictures)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _fetch_all(self, sources: Sequence[PictureSource]) -> tuple[PictureSource, ...]:
        download = _Download(self._opened())
        try:
            async with asyncio.timeout(self._timeout_s), asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(download.file_of(source, self._reader.domains.url(source)))
                    for source in sources
                    if is_remote(source)
                ]
        except TimeoutError:
            remote = next(source for source in sources if is_remote(source))
            raise invalid_picture(
                remote, f"the pictures were not fetched within {self._timeout_s:g} seconds"
            ) from None
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        files = iter(tasks)
        return tuple(
            msgspec.structs.replace(source, url="", data=next(files).result())
            if is_remote(source)
            else source
            for source in sources
        )

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            resolver = PublicResolver() if self._resolver is None else self._resolver
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(resolver=resolver),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                headers=HEADERS,
                timeout=aiohttp.ClientTimeout(),  # see _fetch_all
            )
        return self._session


class _Download:
    """The files of one request, and how many bytes they may still have."""

    __slots__ = ("_left", "_session")

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._left = MAX_REQUEST_BYTES

    async def file_of(self, source: PictureSource, url: URL) -> bytes:
        try:
            async with self._session.get(url, allow_redirects=False) as answer:
                _check_answer(answer, source)
                return await self._read(answer, source)
        except NoPublicAddress:
            raise invalid_picture(source, f"its host '{url.host}' has no public address") from None
        except aiohttp.ClientConnectorDNSError:
            raise invalid_picture(source, f"its host '{url.host}' cannot be resolved") from None
        except aiohttp.ClientError as error:
            why = f"it could not be fetched from '{url.host}' ({type(error).__name__})"
            raise invalid_picture(source, why) from None

    async def _read(self, answer: aiohttp.ClientResponse, source: PictureSource) -> bytes:
        data = bytearray()
        async for chunk in answer.content.iter_chunked(CHUNK_BYTES):
            data += chunk
            self._left -= len(chunk)
            if len(data) > MAX_BYTES:
                raise too_large(source)
            if self._left < 0:
                raise invalid_picture(
                    source, f"the pictures of the request have more than {MAX_REQUEST_BYTES} bytes"
                )
        if not data:
            raise invalid_picture(source, "its file is empty")
        return bytes(data)


def _check_answer(answer: aiohttp.ClientResponse, source: PictureSource) -> None:
    """Raises for what can be refused before the body is read."""
    if 300 <= answer.status < 400:
        raise invalid_picture(
            source, f"its host redirects ({answer.status}); give the URL that it leads to"
        )
    if answer.status != 200:
        raise invalid_picture(source, f"its host answered with status {answer.status}")
    kind = answer.content_type.lower()
    if not kind.startswith(CONTENT_TYPES):
        raise invalid_picture(source, f"its content type is '{kind[:40]}'; expected image/...")
    encoding = answer.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise invalid_picture(source, f"its content encoding is '{encoding[:40]}'; expected none")
    if (answer.content_length or 0) > MAX_BYTES:
        raise too_large(source)


class NoPublicAddress(Exception):
    """Raised instead of an OSError, which aiohttp takes for a failure of DNS."""


class PublicResolver(AbstractResolver):
    """Resolves names to public addresses. A name that also has others keeps its public ones."""

    def __init__(self, inner: AbstractResolver | None = None) -> None:
        self._inner = aiohttp.ThreadedResolver() if inner is None else inner

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        public = [each for each in found if is_public(each["host"])]
        if not public:
            raise NoPublicAddress(host)
        return public

    async def close(self) -> None:
        await self._inner.close()


def is_public(address: str) -> bool:
    """Whether anybody may reach the address: it is not private, loopback, link-local (where clouds
    have their metadata), multicast or reserved, and it embeds no IPv4 address that is."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in NAT64:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        embedded = ip.ipv4_mapped or ip.sixtofour
        if embedded is not None:
            return is_public(str(embedded))
        if ip.teredo is not None or ip.is_site_local:
            return False
    is_special = ip.is_multicast or ip.is_reserved or any(ip in network for network in SPECIAL)
    return ip.is_global and not is_special
