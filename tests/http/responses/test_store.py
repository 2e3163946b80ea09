"""What is kept of responses: bounded, to its own API key alone, and shown page by page."""

from __future__ import annotations

from collections import UserList
from typing import Any

import msgspec
import pytest

from aserve.errors import InvalidRequest
from aserve.http.openai.call import Origin
from aserve.http.responses.body import InputItem, ResponseBody
from aserve.http.responses.call import response_call
from aserve.http.responses.conversation import MAX_ITEMS, Message
from aserve.http.responses.handlers import PageQuery, page_of
from aserve.http.responses.records import OutputMessage, OutputText
from aserve.http.responses.store import ResponseKey, ResponseStore, StoredResponse
from tests.fakes.echo_engine import EchoEngine
from tests.fakes.history import FakeHistory
from tests.http.asking import ask, bearer
from tests.http.responses.test_events import HEADING


def stored(response_id: str, text: str = "a") -> StoredResponse:
    response = msgspec.structs.replace(HEADING, id=response_id)
    return StoredResponse(response, (Message(f"msg_{response_id}_0", "user", (text,)),))


def key(response_id: str) -> ResponseKey:
    return ResponseKey("", response_id)


def ids_in(store: ResponseStore, *response_ids: str) -> list[str]:
    return [each for each in response_ids if store.get(key(each)) is not None]


def test_the_least_recently_used_goes_first() -> None:
    store = ResponseStore(max_count=2, max_bytes=1 << 20)
    store.put(stored("a"))
    store.put(stored("b"))
    assert store.get(key("a")) is not None
    store.put(stored("c"))
    assert ids_in(store, "a", "b", "c") == ["a", "c"]


def test_the_bytes_of_the_store_are_bounded_and_freed() -> None:
    size = stored("a").size_bytes
    store = ResponseStore(max_count=100, max_bytes=3 * size)
    for name in "abcdefg":
        store.put(stored(name))
    assert ids_in(store, *"abcdefg") == ["e", "f", "g"]
    assert store.delete(key("f"))
    assert not store.delete(key("f"))
    store.put(stored("h"))
    assert ids_in(store, *"abcdefgh") == ["e", "g", "h"]


def test_a_response_larger_than_the_store_evicts_nothing() -> None:
    store = ResponseStore(max_count=100, max_bytes=3 * stored("a").size_bytes)
    store.put(stored("a"))
    assert not store.put(stored("b", "x" * 10_000))
    assert not store.put(stored("a", "x" * 10_000))
    assert ids_in(store, "a", "b") == ["a"]


def test_a_record_that_replaces_another_frees_its_bytes() -> None:
    store = ResponseStore(max_count=100, max_bytes=3 * stored("a").size_bytes)
    for name in "aabaab":
        assert store.put(stored(name))
    assert ids_in(store, *"ab") == ["a", "b"]
    assert store.put(stored("c"))
    assert ids_in(store, *"abc") == ["a", "b", "c"]


def test_the_answer_is_part_of_what_the_next_turn_continues() -> None:
    item = OutputMessage("msg_1", "completed", (OutputText("b"),))
    response = msgspec.structs.replace(HEADING, output=(item,))
    turn = StoredResponse(response, stored("a").items)
    assert turn.conversation == (
        *stored("a").items,
        Message("msg_1", "assistant", ("b",)),
    )


ASK = {"type": "response.create", "input": "a secret", "max_output_tokens": 2}


async def made_by(echo: EchoEngine, key: str, **body: Any) -> Any:
    return (await ask(echo, "/v1/responses", ASK | body, headers=bearer(key))).json


async def socket_answer(echo: EchoEngine, key: str, **body: Any) -> Any:
    async with echo.web.ws_connect("/v1/responses", headers=bearer(key)) as socket:
        await socket.send_json(ASK | body)
        while True:
            event = await socket.receive_json()
            if event["type"] in ("error", "response.completed", "response.incomplete"):
                return event


ROUTES = [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")]


@pytest.mark.parametrize("thief", ["open", "root"])
async def test_no_other_key_reads_deletes_cancels_or_continues_a_response(thief: str) -> None:
    async with EchoEngine(api_key="sesame,open", admin_api_key="root") as echo:
        response_id = (await made_by(echo, "sesame"))["id"]
        path = f"/v1/responses/{response_id}"
        for method, end in ROUTES:
            answer = await ask(echo, path + end, method=method, headers=bearer(thief))
            assert (answer.status, answer.error["code"]) == (404, "response_not_found"), end
        for asking in (made_by, socket_answer):
            answered = await asking(echo, thief, previous_response_id=response_id)
            assert answered["error"]["code"] == "previous_response_not_found"
        assert (await ask(echo, path, headers=bearer("sesame"))).json["id"] == response_id
        mine = await made_by(echo, "sesame", previous_response_id=response_id)
        assert mine["previous_response_id"] == response_id


async def test_no_other_key_sees_or_cancels_a_response_that_runs() -> None:
    async with (
        EchoEngine(api_key="sesame,open") as echo,
        echo.web.ws_connect("/v1/responses", headers=bearer("sesame")) as socket,
    ):
        echo.scheduler.is_paused = True
        await socket.send_json(ASK)
        await echo.scheduler.changed.wait()
        (admitted,) = echo.scheduler.admitted
        path = f"/v1/responses/resp_{admitted.request_id.rpartition('-')[0]}"
        for method, end in (("GET", ""), ("POST", "/cancel")):
            answer = await ask(echo, path + end, method=method, headers=bearer("open"))
            assert answer.status == 404, end
        headers = bearer("sesame")
        answer = await ask(echo, f"{path}/cancel", method="POST", headers=headers)
        assert (answer.status, answer.json["status"]) == (200, "cancelled")


async def test_without_keys_all_clients_are_the_same_owner() -> None:
    async with EchoEngine() as echo:
        ids: list[str] = []
        for address in ("127.0.0.1", "127.0.0.2"):
            await echo.ask_from(address)
            ids = ids or [(await made_by(echo, "any"))["id"]]
            assert (await ask(echo, f"/v1/responses/{ids[0]}")).status == 200


class Counted(UserList[Message]):
    """Messages that are made when they are looked at."""

    num_looks = 0

    def __len__(self) -> int:
        return 500_000

    def __getitem__(self, place: Any) -> Any:
        self.num_looks += 1
        return Message(f"msg_{place}", "user", ("a",))


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_a_page_converts_only_its_own_messages(order: Any) -> None:
    messages = Counted()
    page = page_of(messages, PageQuery(limit=3, order=order))
    places = (0, 1, 2) if order == "asc" else (499_999, 499_998, 499_997)
    assert [item.id for item in page.data] == [f"msg_{place}" for place in places]
    assert (page.first_id, page.last_id) == (page.data[0].id, page.data[-1].id)
    assert page.has_more
    assert messages.num_looks == 3


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_follow_each_other_to_the_end(order: Any) -> None:
    messages = [Message(f"msg_{number}", "user", ("a",)) for number in range(10)]
    seen: list[str] = []
    after = None
    while True:
        page = page_of(messages, PageQuery(limit=4, order=order, after=after))
        seen += [item.id for item in page.data]
        after = page.last_id
        if not page.has_more:
            break
    numbers = range(10) if order == "asc" else range(9, -1, -1)
    assert seen == [f"msg_{number}" for number in numbers]


async def test_more_items_than_the_bound_are_refused(echo: EchoEngine) -> None:
    items = [{"role": "user", "content": "a"}] * (MAX_ITEMS + 1)
    answer = await ask(echo, "/v1/responses", {"input": items})
    assert (answer.status, answer.error["param"]) == (400, "input")
    assert str(MAX_ITEMS) in answer.error["message"]


def test_the_items_of_earlier_responses_count() -> None:
    earlier = (Message("msg", "user", ("a",)),) * MAX_ITEMS
    body = ResponseBody(
        input=[InputItem(role="user", content="a")], previous_response_id="resp_earlier"
    )
    with pytest.raises(InvalidRequest, match=str(MAX_ITEMS)):
        response_call(body, Origin("request", 0, ("echo",)), FakeHistory(*earlier))
