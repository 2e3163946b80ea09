"""API keys: several of them, from a file, exact bytes; who asks, and what it may ask for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from aserve.cli import make_parser
from aserve.config import ServerOptions
from aserve.errors import ConfigError
from aserve.http.auth import read_keys
from aserve.messages.requests import AdmitRequest
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import ask, bearer

KEYS = "sesame,open"
# Of every route that asks the engine, the least.
BODY: dict[str, Any] = {"prompt": "a", "input": "a", "messages": [{"role": "user", "content": "a"}]}


async def admitted(echo: EchoEngine, key: str, **fields: Any) -> AdmitRequest:
    answer = await ask(echo, "/v1/completions", {"prompt": "a"} | fields, headers=bearer(key))
    assert answer.status == 200, answer.text
    return echo.scheduler.admitted[-1]


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
    options: dict[str, Any] = {"api_key": KEYS, "api_key_file": str(file), "admin_api_key": "root"}
    async with EchoEngine(**options) as echo:
        for key in ("sesame", "open", "third", "fourth", "root"):
            assert (await ask(echo, "/v1/models", headers=bearer(key))).status == 200, key
        for key in (KEYS, "# for the team", "sesam", "sesamee", "", ","):
            assert (await ask(echo, "/v1/models", headers=bearer(key))).status == 401, key


@pytest.mark.parametrize(
    ("key", "sent", "status"),
    [
        ("se?ame", [b"se?ame"], 200),
        ("se?ame", [b"se\xffame"], 401),
        ("sésame", ["sésame".encode()], 200),
        ("sésame", ["sésame".encode("latin-1")], 401),
        ("sesame", [b"sesame", b"wrong"], 400),
        ("sesame", [b"sesame", b"sesame"], 400),
    ],
)
async def test_a_key_is_compared_byte_by_byte_and_may_not_be_repeated(
    key: str, sent: list[bytes], status: int
) -> None:
    async with EchoEngine(api_key=key) as echo:
        assert await status_of_raw(echo, *(b"Bearer " + each for each in sent)) == status


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
    async with EchoEngine(api_key=KEYS) as echo:
        first, second, third = [await admitted(echo, k) for k in ("sesame", "open", "sesame")]
        assert first.client == third.client != second.client
        assert "sesame" not in repr(first)


async def test_without_keys_the_address_identifies_the_client() -> None:
    async with EchoEngine() as echo:
        clients = []
        for address in ("127.0.0.1", "127.0.0.2", "127.0.0.1"):
            await echo.ask_from(address)
            clients.append((await admitted(echo, "any")).client)
        assert clients[0] == clients[2] != clients[1]
        assert {request.namespace for request in echo.scheduler.admitted} == {""}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize("is_shared", [False, True])
async def test_prefixes_are_cached_per_key_unless_they_are_to_be_shared(
    path: str, is_shared: bool
) -> None:
    async with EchoEngine(api_key=KEYS, shared_prefix_cache=is_shared) as echo:
        for key in ("sesame", "open", "sesame"):
            assert (await ask(echo, path, BODY, headers=bearer(key))).status == 200
        one, other, again = [request.namespace for request in echo.scheduler.admitted]
    assert one == again
    assert (one == other == "") is is_shared


async def test_a_salt_leads_into_no_other_clients_namespace() -> None:
    async with EchoEngine(api_key=KEYS) as echo:
        plain = (await admitted(echo, "sesame")).namespace
        salted = (await admitted(echo, "sesame", cache_salt="salt")).namespace
        tried = [
            (await admitted(echo, "open", cache_salt=salt)).namespace
            for salt in (plain, salted, f"../{plain}", "salt")
        ]
        assert len({plain, salted, *tried}) == 6


PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"]


@pytest.mark.parametrize(
    ("options", "key", "priority", "is_allowed"),
    [
        ({"api_key": "sesame", "admin_api_key": "root"}, "sesame", -1, False),
        ({"api_key": "sesame", "admin_api_key": "root"}, "sesame", 1, False),
        ({"api_key": "sesame", "admin_api_key": "root"}, "sesame", 0, True),
        ({"api_key": "sesame", "admin_api_key": "root"}, "root", -7, True),
        ({"admin_api_key": "root"}, "any", -1, False),
        ({"admin_api_key": "root"}, "root", -1, True),
        ({"enable_priority_scheduling": True}, "any", -1, True),
    ],
)
async def test_priority_needs_the_option_or_the_admin_key(
    options: dict[str, Any], key: str, priority: int, is_allowed: bool
) -> None:
    async with EchoEngine(**options) as echo:
        for path in PATHS:
            answer = await ask(echo, path, BODY | {"priority": priority}, headers=bearer(key))
            assert answer.status == (200 if is_allowed else 400), path
            if is_allowed:
                assert echo.scheduler.admitted[-1].priority == priority
            else:
                error = answer.error
                assert (error["code"], error["param"]) == ("priority_not_allowed", "priority")
                assert str(priority) in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "counts"),
    [
        ({"prompt": ["a"] * 4, "n": 3}, "n", "12 sequences (4 prompts x 3"),
        ({"prompt": "a", "best_of": 9}, "n", "9 sequences (1 prompts x 9"),
        ({"prompt": ["a"] * 9}, "prompt", "9 sequences (9 prompts x 1"),
        ({"prompt": ["a"] * 4, "n": 2}, None, ""),
    ],
)
async def test_a_request_has_at_most_as_many_sequences_as_run_at_once(
    echo: EchoEngine, body: dict[str, Any], param: str, counts: str
) -> None:
    echo.state.max_sequences = 8
    answer = await ask(echo, "/v1/completions", body)
    if param is None:
        assert answer.status == 200
        return
    assert answer.status == 400
    assert (answer.error["code"], answer.error["param"]) == ("too_many_sequences", param)
    assert counts in answer.error["message"]
    assert "at most 8" in answer.error["message"]


def test_a_repeated_key_option_adds_a_key() -> None:
    given = make_parser().parse_args(["serve", "--api-key", "a,b", "--api-key", "c"])
    assert given.api_key == "a,b,c"
