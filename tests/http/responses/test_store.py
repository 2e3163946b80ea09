"""What is kept of responses: never more than was allowed, and what was used last stays."""

from __future__ import annotations

import msgspec

from aserve.http.responses.conversation import Message
from aserve.http.responses.records import OutputMessage, OutputText
from aserve.http.responses.store import ResponseKey, ResponseStore, StoredResponse
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
    store.put(stored("b", "x" * 10_000))
    assert ids_in(store, "a", "b") == ["a"]


def test_a_store_without_room_stores_nothing() -> None:
    store = ResponseStore(max_count=0, max_bytes=1 << 20)
    store.put(stored("a"))
    assert ids_in(store, "a") == []


def test_the_answer_is_part_of_what_the_next_turn_continues() -> None:
    item = OutputMessage("msg_1", "completed", (OutputText("b"),))
    response = msgspec.structs.replace(HEADING, output=(item,))
    turn = StoredResponse(response, stored("a").messages)
    assert [(each.role, each.text) for each in turn.conversation] == [
        ("user", "a"),
        ("assistant", "b"),
    ]
