"""A client that asks and does not read: a plain socket with little room for what comes."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit


class UnreadClient:
    """Connects to `url` and leaves all that the server sends in the kernel, until `read_all`."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 0)
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.setblocking(False)

    async def __aenter__(self) -> UnreadClient:
        await asyncio.get_running_loop().sock_connect(self._socket, self._address)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    async def post(
        self, path: str, body: dict[str, Any], *, key: str = "any", close: bool = False
    ) -> None:
        """`close`: the server closes the connection after the answer."""
        data = json.dumps(body).encode()
        connection = "close" if close else "keep-alive"
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Connection: {connection}\r\n"
            f"Authorization: Bearer {key}\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        await self.send(head.encode() + data)

    async def open_websocket(self, path: str) -> None:
        """Reads the upgrade's answer and nothing else."""
        key = base64.b64encode(b"0" * 16).decode()
        await self.send(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += await self.read(1)
        assert b" 101 " in head.splitlines()[0], head

    async def send_event(self, event: dict[str, Any]) -> None:
        """As one masked text frame; the mask is zero, so the payload stays as it is."""
        data = json.dumps(event).encode()
        assert 126 <= len(data) < 1 << 16
        await self.send(b"\x81\xfe" + len(data).to_bytes(2, "big") + b"\0\0\0\0" + data)

    async def send_for_ever(self, path: str) -> None:
        """Sends one request after the other. Raises ConnectionError when the server closes."""
        while True:
            await self.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * 1000)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def read(self, max_bytes: int) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self._socket, max_bytes)

    async def read_all(self) -> bytes:
        """What had come until the server closed the connection."""
        received = bytearray()
        while True:
            try:
                data = await self.read(1 << 20)
            except ConnectionResetError:
                return bytes(received)
            if not data:
                return bytes(received)
            received += data
