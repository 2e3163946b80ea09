"""A router in the test's own process, in front of stand-ins whose answers are written as bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from aiohttp import ClientSession

from aserve.config import Facts, Raw, resolve
from aserve.router.run import RouterServer

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
ADMIN = {"Authorization": "Bearer root"}
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"
)


def written(*pieces: bytes, closes: bool = False) -> Answer:
    """Answers with these bytes, a turn of the loop between two pieces."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)
        if closes:
            writer.close()

    return answer


@dataclass(frozen=True, slots=True)
class Asked:
    line: str
    head: str
    body: bytes


class StandIn:
    """A replica on a port of its own. `asked` are the requests but for probes. It answers nothing
    while it `is_stopped`.
    """

    def __init__(self, answer: Answer | None = None) -> None:
        self.answer = answer or written(OK)
        self.asked: list[Asked] = []
        self.is_stopped = False
        self.closed = asyncio.Event()  # a connection was closed by the router
        self._reached = asyncio.Event()
        self._wanted = 0

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def asked_more(self, number: int) -> None:
        """Waits for so many further requests."""
        self._wanted = len(self.asked) + number
        self._reached.clear()
        await self._reached.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                line = head.partition("\r\n")[0]
                body = await _body(reader, head.lower())
                if self.is_stopped:
                    continue
                if line.startswith("GET /health "):
                    writer.write(OK)
                elif line.startswith("GET /load "):
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                elif line.startswith("HEAD "):
                    writer.write(OK[:-2])
                else:
                    self.asked.append(Asked(line, head, body))
                    if len(self.asked) >= self._wanted:
                        self._reached.set()
                    await self.answer(writer)
        self.closed.set()
        writer.close()


async def _body(reader: asyncio.StreamReader, head: str) -> bytes:
    if "content-length: " in head:
        return await reader.readexactly(int(head.partition("content-length: ")[2].split()[0]))
    body = b""
    if "transfer-encoding: chunked" in head:
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    return body


@asynccontextmanager
async def routed(
    *stand_ins: StandIn, **options: object
) -> AsyncIterator[tuple[ClientSession, RouterServer]]:
    """Yields a client and the router. Every stand-in counts as healthy from the start."""
    given = {"port": 0, "policy": "round_robin", "health_interval": 60, "admin_api_key": "root"}
    resolved = resolve(Raw(command_line=given | options), Facts(default_model="none"))
    async with AsyncExitStack() as stack:
        for stand_in in stand_ins:
            await stand_in.start()
            stack.callback(stand_in.server.close)
        server = RouterServer(resolved, [stand_in.url for stand_in in stand_ins])
        await server.start()
        serving = asyncio.create_task(server.serve())
        for stand_in in stand_ins:
            server.router.balancer.probed(stand_in.url, load=None)
        async with ClientSession(server.address) as client:
            yield client, server
        server.end()
        server.end()
        await serving
        await server.stop()
