"""POST /v1/chat/completions through the official client; the template is `u:text;`."""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest

from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import ask, prompts

HELLO: Any = [{"role": "user", "content": "hello 한"}]


async def prompt_of(echo: EchoEngine, messages: Any = HELLO, **body: Any) -> str:
    """The prompt that the template made of it."""
    body = {"model": "echo", "messages": messages, "max_tokens": 1} | body
    await echo.client.chat.completions.create(**body)
    return prompts(echo)[-1]


async def test_streamed_and_whole_answers_are_the_same(echo: EchoEngine) -> None:
    body: dict[str, Any] = {"model": "echo", "messages": HELLO, "n": 2, "max_tokens": 50}
    body |= {"logprobs": True, "top_logprobs": 2, "stop": "llo"}
    whole = await echo.client.chat.completions.create(**body)
    stream = await echo.client.chat.completions.create(
        **body, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    for choice in whole.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        roles = [(part.delta.role, part.delta.content) for part in parts]
        assert roles[0] == ("assistant", "")
        assert all(role is None for role, _ in roles[1:])
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        entries = [e for part in parts if part.logprobs for e in part.logprobs.content or []]
        assert entries == choice.logprobs.content
        assert [len(entry.top_logprobs) for entry in entries] == [2] * len(entries)
        reasons = [part.finish_reason for part in parts]
        assert reasons == [None] * (len(parts) - 1) + [choice.finish_reason]
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].model_dump()["seed"] != whole.model_dump()["seed"]


@pytest.mark.parametrize("stop", [[], ["never to be seen"]])
async def test_no_chunk_is_empty_but_the_first_and_the_last(
    echo: EchoEngine, stop: list[str]
) -> None:
    stream = await echo.client.chat.completions.create(
        model="echo", messages=HELLO, stream=True, stop=stop
    )
    deltas = [chunk.choices[0].delta.content async for chunk in stream]
    assert all(deltas[1:-1])
    assert "".join(delta or "" for delta in deltas) == "u:hello 한;"


async def test_the_whole_context_is_room_for_an_answer(echo: EchoEngine) -> None:
    await prompt_of(echo, max_tokens=None)
    await prompt_of(echo, max_tokens=9, max_completion_tokens=3)
    first, second = echo.scheduler.admitted
    assert first.sampling.max_tokens == 512 - len(first.prompt_ids) // 4
    assert second.sampling.max_tokens == 3


async def test_content_may_be_parts_of_text(echo: EchoEngine) -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]
    assert await prompt_of(echo, messages) == "s:x;u:abcd;"


REFUSAL = [{"type": "text", "text": "I "}, {"type": "refusal", "refusal": "won't"}]


@pytest.mark.parametrize("fields", [{"content": REFUSAL}, {"content": None, "refusal": "I won't"}])
async def test_an_earlier_refusal_of_the_assistant_is_its_text(
    echo: EchoEngine, fields: dict[str, Any]
) -> None:
    """Whichever way, also where the answer continues it and begins with it."""
    messages = [{"role": "user", "content": "u"}, {"role": "assistant"} | fields]
    assert await prompt_of(echo, messages) == "u:u;a:I won't;"
    continued = {"add_generation_prompt": False, "continue_final_message": True, "echo": True}
    body = {"messages": messages, "max_tokens": 1} | continued
    answer = await ask(echo, "/v1/chat/completions", body)
    assert answer.json["choices"][0]["message"]["content"].startswith("I won't")


async def test_only_the_assistant_refuses(echo: EchoEngine) -> None:
    with pytest.raises(openai.BadRequestError, match="content type 'refusal'"):
        await prompt_of(echo, [{"role": "user", "content": REFUSAL}])
    with pytest.raises(openai.BadRequestError, match="content'"):
        await prompt_of(echo, [{"role": "user", "content": None, "refusal": "no"}])
    user = {"role": "user", "content": "u", "refusal": "no"}
    assert await prompt_of(echo, [user]) == "u:u;"


async def test_an_image_is_refused_by_name(echo: EchoEngine) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with pytest.raises(openai.BadRequestError, match="content type 'image_url'") as caught:
        await prompt_of(echo, [{"role": "user", "content": [image]}])
    assert caught.value.param == "messages[0].content[0]"


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
async def test_a_picture_that_is_not_the_users_is_refused_in_words(
    echo: EchoEngine, role: str
) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with pytest.raises(openai.BadRequestError, match="only be in messages of the user") as caught:
        await prompt_of(echo, [{"role": role, "content": [image], "tool_call_id": "c"}])
    assert caught.value.param == "messages[0].content[0]"


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
BROKEN_CALL = {"id": "d", "type": "function", "function": {"name": "f", "arguments": "{city"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def test_tool_calls_are_accepted_even_if_their_arguments_are_not_json() -> None:
    template = "{{ (tools or []) | length }}{{ messages | tojson }}"
    messages: Any = [
        {"role": "assistant", "content": None, "tool_calls": [CALL, BROKEN_CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    async with EchoEngine(template=template) as echo:
        prompt = await prompt_of(echo, messages, tools=[TOOL])
        none = await prompt_of(echo, messages, tools=[TOOL], tool_choice="none")
    rendered = msgspec.json.decode(prompt[1:])
    arguments = [call["function"]["arguments"] for call in rendered[0]["tool_calls"]]
    assert arguments == [{"city": "Rome"}, "{city"]
    assert (prompt[0], none[0], rendered[1]["tool_call_id"]) == ("1", "0", "c")


async def test_variables_for_the_template_reach_it() -> None:
    template = "{{ 'think' if enable_thinking else 'answer' }}:{{ style and style.tone }};"
    async with EchoEngine(template=template) as echo:
        variables = {"enable_thinking": False, "style": {"tone": "dry"}}
        extra = {"extra_body": {"chat_template_kwargs": variables}}
        assert await prompt_of(echo, **extra) == "answer:dry;"
        assert await prompt_of(echo) == "answer:;"


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "chat_template", "tokenize"]
)
async def test_variables_cannot_replace_those_of_the_server(echo: EchoEngine, name: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await prompt_of(echo, extra_body={"chat_template_kwargs": {name: "x"}})
    assert caught.value.param == f"chat_template_kwargs.{name}"
