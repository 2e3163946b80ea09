"""/v1/conversations through the official client, and the responses that continue them."""

from __future__ import annotations

import base64
from typing import Any

import openai
import pytest

from aserve.http.responses.conversation import SUMMARY
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import ask, bearer, prompts


def user(text: str) -> Any:
    return {"role": "user", "content": text}


async def texts_in(echo: EchoEngine, conversation_id: str, **query: Any) -> list[str]:
    listed = echo.client.conversations.items.list(conversation_id, **query)
    items: list[Any] = [item async for item in listed]
    return [item.content[0].text for item in items]


async def test_a_conversation_is_created_read_changed_and_deleted(echo: EchoEngine) -> None:
    conversations = echo.client.conversations
    made = await conversations.create(items=[user("a")], metadata={"k": "v"})
    assert (made.id[:5], made.metadata) == ("conv_", {"k": "v"})
    assert await conversations.retrieve(made.id) == made
    changed = await conversations.update(made.id, metadata={"k": "w"})
    assert (changed.created_at, changed.metadata) == (made.created_at, {"k": "w"})
    assert await conversations.retrieve(made.id) == changed
    assert await texts_in(echo, made.id) == ["a"]
    assert (await conversations.delete(made.id)).deleted
    for again in (conversations.retrieve, conversations.delete, conversations.items.list):
        with pytest.raises(openai.NotFoundError, match=made.id):
            await again(made.id)


async def test_items_are_added_listed_read_and_deleted(echo: EchoEngine) -> None:
    items = echo.client.conversations.items
    made = await echo.client.conversations.create()
    added = await items.create(made.id, items=[user("a"), user("b")])
    await items.create(made.id, items=[user("c")])
    assert await texts_in(echo, made.id, order="asc", limit=2) == ["a", "b", "c"]
    assert await texts_in(echo, made.id) == ["c", "b", "a"]
    assert (added.first_id, added.last_id, added.has_more) == (
        added.data[0].id,
        added.data[1].id,
        False,
    )
    read = await items.retrieve(added.first_id, conversation_id=made.id)
    assert read == added.data[0]
    assert await items.delete(added.first_id, conversation_id=made.id) == made
    assert await texts_in(echo, made.id, order="asc") == ["b", "c"]
    with pytest.raises(openai.NotFoundError, match=added.first_id):
        await items.retrieve(added.first_id, conversation_id=made.id)


@pytest.mark.parametrize("given", ["id", "object"])
async def test_responses_continue_a_conversation_and_add_to_it(
    echo: EchoEngine, given: str
) -> None:
    made = await echo.client.conversations.create(items=[user("a")])
    body: Any = {
        "model": "echo",
        "conversation": made.id if given == "id" else {"id": made.id},
        "max_output_tokens": 4,
    }
    first = await echo.client.responses.create(**body, input="b", store=False)
    events = [e async for e in await echo.client.responses.create(**body, input="c", stream=True)]
    assert prompts(echo) == ["u:a;u:b;", "u:a;u:b;a:u:a;;u:c;"]
    assert first.conversation is not None
    assert (first.conversation.id, first.previous_response_id) == (made.id, None)
    last: Any = events[-1]
    assert last.response.conversation.id == made.id
    assert await texts_in(echo, made.id, order="asc") == ["a", "b", "u:a;", "c", "u:a;"]


async def test_a_response_that_fails_or_is_cancelled_adds_nothing(echo: EchoEngine) -> None:
    made = await echo.client.conversations.create(items=[user("a")])
    body: Any = {"model": "echo", "conversation": made.id, "input": "b"}
    echo.scheduler.is_paused = True
    background = await echo.client.responses.create(**body, background=True)
    await echo.client.responses.cancel(background.id)
    with pytest.raises(openai.BadRequestError):
        await echo.client.responses.create(**body | {"input": "x" * 999})
    assert await texts_in(echo, made.id) == ["a"]


async def test_a_conversation_belongs_to_its_key() -> None:
    async with EchoEngine(api_key="a,b") as echo:
        made = await ask(echo, "/v1/conversations", {}, headers=bearer("a"))
        path = f"/v1/conversations/{made.json['id']}"
        assert (await ask(echo, path, headers=bearer("a"))).status == 200
        assert (await ask(echo, path, headers=bearer("b"))).status == 404
        body = {"input": "a", "conversation": made.json["id"]}
        answer = await ask(echo, "/v1/responses", body, headers=bearer("b"))
        assert (answer.status, answer.error["code"]) == (404, "conversation_not_found")


@pytest.mark.parametrize(
    ("options", "body", "error"),
    [
        ({}, {"items": [user("a")] * 21}, ("array_above_max_length", "items")),
        ({}, {"items": [{"type": "x"}]}, ("unsupported_value", "items[0].type")),
        ({}, {"metadata": {"k" * 65: "v"}}, ("string_above_max_length", "metadata")),
        (
            {"max_stored_bytes": 999},
            {"items": [user("a" * 999)]},
            ("conversation_too_large", "items"),
        ),
        ({"max_stored_responses": 0}, {}, ("conversation_too_large", "items")),
    ],
)
async def test_a_conversation_has_limits(
    options: dict[str, Any], body: Any, error: tuple[str, str]
) -> None:
    async with EchoEngine(**options) as echo:
        answer = await ask(echo, "/v1/conversations", body)
        assert (answer.status, answer.error["code"], answer.error["param"]) == (400, *error)


async def test_a_compacted_conversation_goes_on_from_its_summary(echo: EchoEngine) -> None:
    responses = echo.client.responses
    turn: Any = [user("a"), {"role": "assistant", "content": "b"}]
    first = await responses.create(model="echo", input=turn, max_output_tokens=1)
    compacted = await responses.compact(model="echo", previous_response_id=first.id, input="c")
    items: list[Any] = list(compacted.output)
    assert [item.type for item in items] == ["message", "message", "compaction"]
    assert [item.content[0].text for item in items[:-1]] == ["a", "c"]
    assert compacted.usage.output_tokens > 0
    echoed = prompts(echo)[-1]
    assert echoed.startswith("u:a;a:b;a:u;u:c;u:Summarize our conversation")
    given = [item.to_dict() for item in items]
    continued: Any = [*given, user("d")]
    await responses.create(model="echo", input=continued, max_output_tokens=1)
    summary = base64.b64decode(items[-1].encrypted_content).decode()
    assert len(summary) > 99
    assert echoed.startswith(summary)
    assert prompts(echo)[-1] == f"u:a;u:c;a:{SUMMARY}{summary};u:d;"
    forged: Any = [{"type": "compaction", "encrypted_content": "%"}]
    with pytest.raises(openai.BadRequestError, match="encrypted_content"):
        await responses.create(model="echo", input=forged)


async def test_a_conversation_that_outgrows_the_store_is_dropped() -> None:
    async with EchoEngine(max_stored_bytes=900) as echo:
        made = await echo.client.conversations.create(items=[user("a" * 200)])
        await echo.client.responses.create(
            model="echo", input="b", conversation=made.id, store=False
        )
        with pytest.raises(openai.NotFoundError):
            await echo.client.conversations.retrieve(made.id)
