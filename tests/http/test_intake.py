"""Bodies are decompressed within bounds, in time, within a bound of memory, and off the loop."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import zlib
from collections.abc import Callable
from typing import Any, cast

import pytest
from aiohttp.web import Request

from aserve.http import body as body_module
from aserve.http.decompress import FREE_BYTES, MAX_MEMBERS, MAX_RATIO, decompress
from aserve.http.errors import RequestFailed
from aserve.http.intake import HELD_BODIES, INLINE_BYTES, INTAKE, SMALL_BYTES
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import Answer, ask

RIGHT = json.dumps({"prompt": "hello", "max_tokens": 3}).encode()


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


async def posted(echo: EchoEngine, data: bytes, encoding: str = "identity") -> Answer:
    return await ask(echo, "/v1/completions", data, headers={"Content-Encoding": encoding})


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        ("GZIP", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", raw_deflate),
        ("identity", bytes),
        ("gzip", lambda data: gzip.compress(data[:5]) + gzip.compress(data[5:])),
    ],
)
async def test_compressed_bodies_are_read(
    echo: EchoEngine, encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    answer = await posted(echo, pack(RIGHT), encoding)
    assert answer.status == 200, answer.text


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("gzip", RIGHT),
        ("gzip", gzip.compress(RIGHT)[:-9]),
        ("gzip", b""),
        ("deflate", zlib.compress(RIGHT)[:-6]),
        ("gzip", gzip.compress(b"") * (MAX_MEMBERS + 1) + gzip.compress(RIGHT)),
    ],
    ids=("plain", "cut", "empty", "deflate cut", "too many members"),
)
async def test_a_body_that_is_not_encoded_as_it_says_is_a_400(
    echo: EchoEngine, encoding: str, data: bytes
) -> None:
    answer = await posted(echo, data, encoding)
    assert (answer.status, answer.error["code"]) == (400, "bad_request"), answer


async def test_an_unsupported_encoding_is_a_415_with_the_supported_ones(echo: EchoEngine) -> None:
    answer = await posted(echo, RIGHT, "br")
    assert (answer.status, "gzip or deflate" in answer.error["message"]) == (415, True)


async def test_a_body_that_grows_too_much_is_a_413(echo: EchoEngine) -> None:
    """7 MB in 7 KB; and in more bytes, so that it passes the size, not the ratio."""
    plain = b'{"prompt": "' + b"a" * (7 << 20) + b'"}'
    answer = await posted(echo, gzip.compress(plain), "gzip")
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")
    assert f"{MAX_RATIO} times" in answer.error["message"]
    text = ("%x" * 9 % tuple(range(9))).encode()
    large = b"".join(text + str(i).encode() for i in range(600_000))
    answer = await posted(echo, gzip.compress(large, compresslevel=1), "gzip")
    assert (answer.status, f"more than {8 << 20} bytes" in answer.error["message"]) == (413, True)


def test_decompression_stops_at_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = gzip.compress(b"a" * (64 << 20))
    assert len(bomb) * MAX_RATIO > FREE_BYTES
    num_made, real = 0, zlib.decompressobj

    class Counted:
        """zlib's decompressor, which is asked again and again."""

        def __init__(self, wbits: int) -> None:
            self._real = real(wbits)

        def decompress(self, data: bytes, max_length: int) -> bytes:
            nonlocal num_made
            piece = self._real.decompress(data, max_length)
            num_made += len(piece)
            return piece

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

    monkeypatch.setattr("aserve.http.decompress.zlib.decompressobj", Counted)
    with pytest.raises(RequestFailed, match="grows more than 100 times"):
        decompress(bomb, "gzip", max_size=1 << 30)
    assert FREE_BYTES < num_made < 2 * MAX_RATIO * len(bomb)


async def test_a_text_that_compresses_well_is_read_to_the_end() -> None:
    text = json.dumps({"prompt": "to be or not to be " * 3000, "max_tokens": 1}).encode()
    assert decompress(gzip.compress(text), "gzip", max_size=1 << 20) == text


async def test_large_and_compressed_bodies_are_decoded_off_the_loop(
    echo: EchoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    parse = body_module.parse_body

    def watched(data: bytes, *arguments: Any, **named: Any) -> Any:
        threads.append((len(data), threading.current_thread() is threading.main_thread()))
        return parse(data, *arguments, **named)

    monkeypatch.setattr(body_module, "parse_body", watched)
    large = json.dumps({"prompt": "hello", "max_tokens": 3, "user": "x" * INLINE_BYTES}).encode()
    assert (await posted(echo, RIGHT)).status == 200
    assert (await posted(echo, large)).status == 200
    assert (await posted(echo, gzip.compress(RIGHT), "gzip")).status == 200
    on_loop = {size: is_on_loop for size, is_on_loop in threads if size == len(large)}
    assert on_loop == {len(large): False}
    assert [each for size, each in threads if size == len(RIGHT)] == [True, True, False, False]


def head(size: int) -> bytes:
    return (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {size}\r\n\r\n"
    ).encode()


async def connected(echo: EchoEngine) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    port = int(echo.url.rpartition(":")[2])
    return await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize("sent", [b"", b'{"prompt"'])
async def test_a_body_that_does_not_arrive_is_a_408_and_the_connection_ends(sent: bytes) -> None:
    async with EchoEngine(body_timeout=0.05) as echo:
        reader, writer = await connected(echo)
        writer.write(head(1000) + sent)
        async with asyncio.timeout(60):
            answer = await reader.readuntil(b"}}")
            writer.write_eof()
            assert await reader.read() == b"", "the server closes"
        assert answer.startswith(b"HTTP/1.1 408 "), answer
        assert b"request_timeout" in answer
        assert f"{len(sent)} bytes".encode() in answer
        writer.close()


async def test_the_memory_of_bodies_is_bounded_and_small_ones_pass() -> None:
    async with EchoEngine(max_body_size=2 * SMALL_BYTES) as echo:
        intake = echo.server._app[INTAKE]
        max_held = HELD_BODIES * 2 * SMALL_BYTES
        half_sent = []
        for _ in range(HELD_BODIES + 1):
            reader, writer = await connected(echo)
            writer.write(head(2 * SMALL_BYTES) + b" " * (2 * SMALL_BYTES - 1))
            half_sent.append((reader, writer))
        async with asyncio.timeout(60):
            answers = [asyncio.create_task(reader.readline()) for reader, _ in half_sent]
            done, waiting = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in done] == [b"HTTP/1.1 429 Too Many Requests\r\n"]
        assert intake.held_bytes <= max_held
        assert (await posted(echo, RIGHT)).status == 200
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for reader, writer in half_sent:
            writer.write_eof()
            await reader.read()  # until the server has given the request up
            writer.close()
    assert intake.held_bytes == 0


async def test_a_client_that_has_gone_before_its_body_is_read_is_no_bug(echo: EchoEngine) -> None:
    class Gone:
        transport = None

    intake = echo.server._app[INTAKE]
    with intake.hold() as held, pytest.raises(ConnectionResetError):
        await intake.receive(cast(Request, Gone()), held)
