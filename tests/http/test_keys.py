"""API keys: several of them, from a file, exact bytes; who asks, and what it may ask for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from aserve.cli import make_parser
from aserve.config import ServerOptions
from aserve.errors import ConfigError
from aserve.http.auth import read_keys
from tests.fakes.echo_engine import EchoEngine

KEYS = "sesame,open"


async def error_of(answer: aiohttp.ClientResponse) -> dict[str, str | None]:
    body: dict[str, dict[str, str | None]] = await answer.json()
    return body["error"]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def status_of_raw(echo: EchoEngine, *authorizations: bytes) -> int:
    """With headers as bytes, which no HTTP client would send."""
    host, _, port = echo.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = [b"GET /v1/models HTTP/1.1", b"Host: localhost", b"Connection: close"]
    lines += [b"Authorization: " + value for value in authorizations]
    writer.write(b"\r\n".join([*lines, b"", b""]))
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return int(answer.split()[1])


async def test_each_of_several_keys_opens_and_others_do_not(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# for the team\n  third \n\nfourth\n")
    async with (
        EchoEngine(api_key=KEYS, api_key_file=str(file), admin_api_key="root") as echo,
        aiohttp.ClientSession(echo.url) as session,
    ):
        for key in ("sesame", "open", "third", "fourth", "root"):
            async with session.get("/v1/models", headers=bearer(key)) as answer:
                assert answer.status == 200, key
        for key in (KEYS, "# for the team", "sesam", "sesamee", "", ","):
            async with session.get("/v1/models", headers=bearer(key)) as answer:
                assert answer.status == 401, key


async def test_keys_are_compared_byte_by_byte() -> None:
    async with EchoEngine(api_key="se?ame") as echo:
        assert await status_of_raw(echo, b"Bearer se?ame") == 200
        assert await status_of_raw(echo, b"Bearer se\xffame") == 401
    async with EchoEngine(api_key="sésame") as echo:
        assert await status_of_raw(echo, "Bearer sésame".encode()) == 200
        assert await status_of_raw(echo, "Bearer sésame".encode("latin-1")) == 401


async def test_a_repeated_authorization_header_is_refused() -> None:
    async with EchoEngine(api_key="sesame") as echo:
        assert await status_of_raw(echo, b"Bearer sesame", b"Bearer wrong") == 400
        assert await status_of_raw(echo, b"Bearer sesame", b"Bearer sesame") == 400


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot read"), (b"# none\n\n", "contains no key"), (b"\xff\xfe", "not UTF-8")],
)
def test_a_key_file_without_keys_is_an_error(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_keys(ServerOptions(api_key_file=str(file)))


@pytest.mark.parametrize("keys", [",", " , "])
def test_a_key_option_without_a_key_is_an_error(keys: str) -> None:
    with pytest.raises(ConfigError, match="contains no key"):
        read_keys(ServerOptions(api_key=keys))


async def test_a_request_carries_who_asks_and_never_the_key() -> None:
    async with (
        EchoEngine(api_key=KEYS) as echo,
        aiohttp.ClientSession(echo.url) as session,
    ):
        for key in ("sesame", "open", "sesame"):
            async with session.post(
                "/v1/completions", json={"prompt": "a"}, headers=bearer(key)
            ) as answer:
                assert answer.status == 200
        first, second, third = echo.scheduler.admitted
        assert first.client == third.client != second.client
        assert "sesame" not in repr(first)


async def test_without_keys_the_address_identifies_the_client() -> None:
    async with EchoEngine() as echo:
        clients = []
        for address in ("127.0.0.1", "127.0.0.2", "127.0.0.1"):
            connector = aiohttp.TCPConnector(local_addr=(address, 0))
            async with (
                aiohttp.ClientSession(echo.url, connector=connector) as session,
                session.post("/v1/completions", json={"prompt": "a"}) as answer,
            ):
                assert answer.status == 200
            clients.append(echo.scheduler.admitted[-1].client)
        assert clients[0] == clients[2] != clients[1]
        assert {admitted.namespace for admitted in echo.scheduler.admitted} == {""}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_prefixes_are_cached_per_key_unless_they_are_to_be_shared(path: str) -> None:
    async def namespaces(*, is_shared: bool) -> list[str]:
        async with (
            EchoEngine(api_key=KEYS, shared_prefix_cache=is_shared) as echo,
            aiohttp.ClientSession(echo.url) as session,
        ):
            for key in ("sesame", "open", "sesame"):
                body = {"prompt": "a", "input": "a"}
                async with session.post(path, json=body, headers=bearer(key)) as answer:
                    assert answer.status == 200
            return [admitted.namespace for admitted in echo.scheduler.admitted]

    one, other, again = await namespaces(is_shared=False)
    assert one == again != other
    assert await namespaces(is_shared=True) == ["", "", ""]


async def test_a_salt_leads_into_no_other_clients_namespace() -> None:
    async with (
        EchoEngine(api_key=KEYS) as echo,
        aiohttp.ClientSession(echo.url) as session,
    ):

        async def namespace(key: str, salt: str | None) -> str:
            body = {"prompt": "a", "cache_salt": salt}
            async with session.post("/v1/completions", json=body, headers=bearer(key)) as answer:
                assert answer.status == 200
            return echo.scheduler.admitted[-1].namespace

        plain = await namespace("sesame", None)
        salted = await namespace("sesame", "salt")
        tried = [await namespace("open", salt) for salt in (plain, salted, f"../{plain}", "salt")]
        assert len({plain, salted, *tried}) == 6


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
async def test_priority_needs_the_option_or_the_admin_key(path: str, body: dict[str, str]) -> None:
    async def status(echo: EchoEngine, priority: int, key: str) -> int:
        async with (
            aiohttp.ClientSession(echo.url) as session,
            session.post(path, json={**body, "priority": priority}, headers=bearer(key)) as answer,
        ):
            if answer.status == 400:
                error = await error_of(answer)
                assert (error["code"], error["param"]) == ("priority_not_allowed", "priority")
                assert str(priority) in str(error["message"])
            return answer.status

    async with EchoEngine(api_key="sesame", admin_api_key="root") as echo:
        assert await status(echo, -1, "sesame") == 400
        assert await status(echo, 1, "sesame") == 400
        assert await status(echo, 0, "sesame") == 200
        assert await status(echo, -7, "root") == 200
        assert echo.scheduler.admitted[-1].priority == -7
    async with EchoEngine(admin_api_key="root") as echo:
        assert await status(echo, -1, "any") == 400
        assert await status(echo, -1, "root") == 200
    async with EchoEngine(enable_priority_scheduling=True) as echo:
        assert await status(echo, -1, "any") == 200


@pytest.mark.parametrize(
    ("body", "param", "counts"),
    [
        ({"prompt": ["a"] * 4, "n": 3}, "n", "12 sequences (4 prompts x 3"),
        ({"prompt": "a", "best_of": 9}, "n", "9 sequences (1 prompts x 9"),
        ({"prompt": ["a"] * 9}, "prompt", "9 sequences (9 prompts x 1"),
    ],
)
async def test_a_request_has_at_most_as_many_sequences_as_run_at_once(
    body: dict[str, object], param: str, counts: str
) -> None:
    async with EchoEngine() as echo, aiohttp.ClientSession(echo.url) as session:
        echo.state.max_sequences = 8
        async with session.post("/v1/completions", json=body) as answer:
            assert answer.status == 400
            error = await error_of(answer)
        assert (error["code"], error["param"]) == ("too_many_sequences", param)
        assert counts in str(error["message"])
        assert "at most 8" in str(error["message"])
        async with session.post("/v1/completions", json={"prompt": ["a"] * 4, "n": 2}) as answer:
            assert answer.status == 200


def test_a_repeated_key_option_adds_a_key() -> None:
    given = make_parser().parse_args(["serve", "--api-key", "a,b", "--api-key", "c"])
    assert given.api_key == "a,b,c"
