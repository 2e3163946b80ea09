"""An id that the router does not know is asked of all replicas at once."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import FormData
from aiohttp.test_utils import make_mocked_request

from aserve.http.errors import RequestFailed
from aserve.router.policies import Demand
from aserve.router.proxy import Exchange
from aserve.router.upstream import Call
from tests.router.routed import OK, StandIn, routed, written

MADE = b'HTTP/1.1 200 OK\r\nContent-Length: 21\r\n\r\n{"id":"resp_unknown"}'
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
ERROR = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 5\r\n\r\nended"
NOT_READY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"


async def never(_: asyncio.StreamWriter) -> None:
    """Answers nothing."""


async def test_an_unknown_id_is_asked_of_all_replicas_at_once() -> None:
    slow, owner = StandIn(never), StandIn(written(MADE))
    async with routed(slow, owner) as (client, server):
        async with client.post("/v1/responses/resp_unknown/cancel", data=b"{}") as got:
            assert (got.status, await got.read()) == (200, MADE[-21:])
        await slow.closed.wait()
        await server.router.proxy.idle.wait()
        assert server.router.proxy.owners.find(["resp_unknown"]) == owner.url
    assert [each.body for each in (*slow.asked, *owner.asked)] == [b"{}", b"{}"]


@pytest.mark.parametrize(
    ("answers", "status", "text"),
    [
        ((NOT_FOUND, ERROR), 400, "ended"),
        ((ERROR, NOT_FOUND, OK), 200, "ok"),
        ((NOT_FOUND, NOT_READY), 503, "No other replica is ready"),
        ((NOT_FOUND, NOT_FOUND), 404, ""),
        ((NOT_READY, ERROR), 400, "ended"),
    ],
)
async def test_the_answer_to_a_search_is_the_one_that_tells_most(
    answers: tuple[bytes, ...], status: int, text: str
) -> None:
    async with (
        routed(*(StandIn(written(each)) for each in answers)) as (client, server),
        client.get("/v1/responses/resp_unknown") as got,
    ):
        assert (got.status, text in await got.text()) == (status, True)
    assert server.router.proxy.num_open == 0


async def test_an_upload_to_an_unknown_id_reaches_every_replica_whole() -> None:
    first, owner = StandIn(written(NOT_FOUND)), StandIn()
    form = FormData(default_to_multipart=True)
    form.add_field("file", b"x" * 200_000, filename="x")
    async with (
        routed(first, owner) as (client, _),
        client.post("/v1/files/file-unknown", data=form) as got,
    ):
        assert got.status == 200
    assert [len(each.body) > 200_000 for each in (*first.asked, *owner.asked)] == [True, True]


async def test_a_search_ends_with_the_router() -> None:
    slow = [StandIn(never), StandIn(never)]
    async with routed(*slow) as (client, server):
        asking = asyncio.create_task(client.get("/v1/responses/resp_unknown"))
        await asyncio.gather(*(each.asked_more(1) for each in slow))
        server.end()
        server.end()  # at once
        async with await asking as got:
            assert (got.status, "shuts down" in await got.text()) == (503, True)


async def test_a_replica_that_has_left_is_not_searched() -> None:
    async with routed(StandIn()) as (_, server):
        request = make_mocked_request("GET", "/v1/responses/resp_unknown")
        exchange = Exchange(request, Call("GET", "/v1/responses/resp_unknown"), Demand())
        with pytest.raises(RequestFailed, match="No replica knows this id"):
            await server.router.proxy.search(exchange, ["http://gone"])
