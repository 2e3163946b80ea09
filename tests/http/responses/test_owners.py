"""A stored response is its API key's alone: to every other key it is as if it had never been."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from tests.fakes.echo_engine import EchoEngine

ASK = {"type": "response.create", "input": "a secret", "max_output_tokens": 2}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def made_by(session: aiohttp.ClientSession, key: str, **body: Any) -> Any:
    async with session.post("/v1/responses", json=ASK | body, headers=bearer(key)) as answer:
        return await answer.json()


async def socket_answer(session: aiohttp.ClientSession, key: str, **body: Any) -> Any:
    async with session.ws_connect("/v1/responses", headers=bearer(key)) as socket:
        await socket.send_json(ASK | body)
        while True:
            event = await socket.receive_json()
            if event["type"] in ("error", "response.completed", "response.incomplete"):
                return event


ROUTES = [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")]


@pytest.mark.parametrize("thief", ["open", "root"])
async def test_no_other_key_reads_deletes_cancels_or_continues_a_response(thief: str) -> None:
    async with (
        EchoEngine(api_key="sesame,open", admin_api_key="root") as echo,
        aiohttp.ClientSession(echo.url) as session,
    ):
        response_id = (await made_by(session, "sesame"))["id"]
        path = f"/v1/responses/{response_id}"
        for method, end in ROUTES:
            async with session.request(method, path + end, headers=bearer(thief)) as answer:
                error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (404, "response_not_found"), (method, end)
        for asking in (made_by, socket_answer):
            answered = await asking(session, thief, previous_response_id=response_id)
            assert answered["error"]["code"] == "previous_response_not_found"
        async with session.get(path, headers=bearer("sesame")) as answer:
            assert (answer.status, (await answer.json())["id"]) == (200, response_id)
        mine = await made_by(session, "sesame", previous_response_id=response_id)
        assert mine["previous_response_id"] == response_id


async def test_no_other_key_sees_or_cancels_a_response_that_runs() -> None:
    async with (
        EchoEngine(api_key="sesame,open") as echo,
        aiohttp.ClientSession(echo.url) as session,
        session.ws_connect("/v1/responses", headers=bearer("sesame")) as socket,
    ):
        echo.scheduler.is_paused = True
        await socket.send_json(ASK)
        await echo.scheduler.changed.wait()
        (admitted,) = echo.scheduler.admitted
        path = f"/v1/responses/resp_{admitted.request_id.rpartition('-')[0]}"
        for method, end in (("GET", ""), ("POST", "/cancel")):
            async with session.request(method, path + end, headers=bearer("open")) as answer:
                assert answer.status == 404, (method, end)
        async with session.post(f"{path}/cancel", headers=bearer("sesame")) as answer:
            assert (answer.status, (await answer.json())["status"]) == (200, "cancelled")


async def test_without_keys_all_clients_are_the_same_owner() -> None:
    async with EchoEngine() as echo:
        ids: list[str] = []
        for address in ("127.0.0.1", "127.0.0.2"):
            connector = aiohttp.TCPConnector(local_addr=(address, 0))
            async with aiohttp.ClientSession(echo.url, connector=connector) as session:
                ids = ids or [(await made_by(session, "any"))["id"]]
                async with session.get(f"/v1/responses/{ids[0]}") as answer:
                    assert answer.status == 200
