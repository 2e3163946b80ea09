"""What a server listens on: HTTPS, with certificates of clients or without, and a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from aserve.config import ServerOptions
from aserve.errors import ConfigError
from aserve.http.tls import tls_context
from tests.fakes.echo_engine import EchoEngine

# Self-signed for localhost, until 2126; it is its own authority.
CERTIFICATE, KEY = (str(Path(__file__).parent / "tls" / name) for name in ("cert.pem", "key.pem"))
FIRST = Path(CERTIFICATE).read_bytes() + Path(KEY).read_bytes()
RENEWED = str(Path(CERTIFICATE).parent / "renewed.pem")  # with its key
SECOND = Path(RENEWED).read_bytes()
TLS: dict[str, Any] = {"ssl_certfile": CERTIFICATE, "ssl_keyfile": KEY}


async def answered(url: str, connector: aiohttp.BaseConnector) -> str:
    async with aiohttp.ClientSession(connector=connector) as client:
        body = {"prompt": "hello"}
        async with client.post(f"{url}/v1/completions", json=body) as answer:
            text: str = (await answer.json())["choices"][0]["text"]
            return text


def trusting(*, has_certificate: bool = False) -> aiohttp.TCPConnector:
    context = ssl.create_default_context(cafile=CERTIFICATE)
    if has_certificate:
        context.load_cert_chain(CERTIFICATE, KEY)
    return aiohttp.TCPConnector(ssl=context)


async def test_a_certificate_makes_the_port_https() -> None:
    async with EchoEngine(**TLS) as echo:
        assert echo.url.startswith("https://127.0.0.1:")
        assert await answered(echo.url, trusting()) == "hello"
        with pytest.raises(aiohttp.ClientError):
            await answered(echo.url.replace("https", "http"), trusting())


async def test_an_address_that_is_no_host_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on a\.\.b:0: 'a\.\.b' is no host name"):
        async with EchoEngine(host="a..b"):
            pass


async def test_with_authorities_a_client_needs_a_certificate() -> None:
    async with EchoEngine(**TLS, ssl_ca_certs=CERTIFICATE) as echo:
        assert await answered(echo.url, trusting(has_certificate=True)) == "hello"
        with pytest.raises(aiohttp.ClientError):
            await answered(echo.url, trusting())


@pytest.mark.parametrize("needs_certificate", [False, True])
async def test_a_renewed_certificate_is_taken_and_a_broken_one_is_not(
    tmp_path: Path, needs_certificate: bool
) -> None:
    own = tmp_path / "own.pem"

    def write(data: bytes, changed_s: int) -> None:
        own.write_bytes(data)
        os.utime(own, (changed_s, changed_s))

    async def presented(echo: EchoEngine) -> str:
        return await asyncio.to_thread(
            ssl.get_server_certificate, ("127.0.0.1", int(echo.url.rpartition(":")[2]))
        )

    write(FIRST, 1)
    authorities: dict[str, Any] = {"ssl_ca_certs": CERTIFICATE} if needs_certificate else {}
    async with EchoEngine(ssl_certfile=str(own), **authorities) as echo:
        connector = trusting(has_certificate=needs_certificate)
        assert await answered(echo.url, connector) == "hello"
        write(b"broken", 2)
        assert (await presented(echo)).strip().encode() in FIRST
        write(SECOND, 3)
        assert (await presented(echo)).strip().encode() in SECOND
        with pytest.raises(aiohttp.ClientError):
            await answered(echo.url, trusting(has_certificate=needs_certificate))


async def test_a_unix_socket_is_served_replaced_when_stale_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "aserve.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    assert path.exists()
    echo = EchoEngine(uds=str(path))
    try:
        assert await echo.server.start() == f"unix:{path}"
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as client:
            async with client.get("http://localhost/health") as answer:
                assert answer.status == 200
            async with client.get("http://evil.example/health") as answer:
                assert answer.status == 403
    finally:
        await echo.server.stop()
        echo.tokenize_service.close()
    assert not path.exists()


async def test_a_second_server_does_not_take_the_unix_socket_of_the_first(tmp_path: Path) -> None:
    path = str(tmp_path / "aserve.sock")
    first, second = EchoEngine(uds=path), EchoEngine(uds=path)
    try:
        await first.server.start()
        with pytest.raises(ConfigError, match=r"cannot listen on .*: address already in use"):
            await second.server.start()
        connector = aiohttp.UnixConnector(path)
        async with (
            aiohttp.ClientSession(connector=connector) as client,
            client.get("http://localhost/health") as answer,
        ):
            assert answer.status == 200
    finally:
        for echo in (first, second):
            await echo.server.stop()
            echo.tokenize_service.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ssl_keyfile": KEY}, "need --ssl-certfile"),
        ({"ssl_certfile": "missing.pem"}, "missing.pem cannot be read: No such file"),
        (TLS | {"ssl_keyfile": "missing.pem"}, "files: missing.pem cannot be read: No such file"),
        ({"ssl_certfile": CERTIFICATE}, "cert.pem has no private key .--ssl-keyfile. in PEM form"),
        ({"ssl_certfile": KEY}, "key.pem has no certificate in PEM form"),
        (TLS | {"ssl_ca_certs": KEY}, "key.pem has no certificate in PEM form"),
        (TLS | {"ssl_keyfile": RENEWED}, "renewed.pem is not the private key of the .*/cert.pem"),
        (TLS | {"ssl_ca_certs": str(Path(KEY).parent)}, "tls: Is a directory"),
    ],
)
def test_files_that_do_not_work_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tls_context(ServerOptions(**options))


# A key of 256 bits, encrypted with the password "secret".
ENCRYPTED = """\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAiyckNI1uAiawICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEASoEEAQI//0Kj+/Mf8bsfqxNI8EEgZCO
2rkSDNuXJOjHZ6SqjcEeXbeoaIhT4JK1874J++bk3oxMkBb0BtUngdQYpUCns8Pm
DP8hAd57RotRurzU9iscujzhUNQAMJBKpPKmU80PMhWuXX0m0WHQzynCphXC9p4X
GV2iuDs5x+My3KdKELy+spqanKbZP13ifEuRS/j/ivQUiI/Y/Reibqnl+ZCwL80=
-----END ENCRYPTED PRIVATE KEY-----
"""


def test_an_encrypted_key_is_refused_and_no_password_is_asked_for(tmp_path: Path) -> None:
    """OpenSSL asked the terminal, and a server waited for the answer while it served."""
    key = tmp_path / "encrypted.pem"
    key.write_text(ENCRYPTED)
    with pytest.raises(ConfigError, match=r"private key in .*encrypted.pem is encrypted; decrypt"):
        tls_context(ServerOptions(**TLS | {"ssl_keyfile": str(key)}))


@pytest.mark.parametrize("beginning", [b"", b"\x16\x03\x01\x02\x00"])
async def test_a_handshake_that_is_not_finished_ends_after_the_header_timeout(
    beginning: bytes,
) -> None:
    """Such connections, which no limit counts, were held for a minute."""
    async with EchoEngine(**TLS, header_timeout=0.2) as echo:
        host, port = echo.url.removeprefix("https://").split(":")
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(beginning)
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()
        assert await answered(echo.url, trusting()) == "hello"
