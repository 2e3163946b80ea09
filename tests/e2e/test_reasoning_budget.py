"""The limit of reasoning tokens in all chat endpoints of a server with the bundled model, which
thinks before it answers a sum.
"""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI

pytestmark = pytest.mark.slow

CHAT: dict[str, Any] = {
    "model": "aserve-tiny",
    "messages": [{"role": "user", "content": "What is 27 plus 15?"}],
    "temperature": 0,
}
LIMIT = 5


async def message_of(client: AsyncOpenAI, **extra: Any) -> tuple[str, str, int]:
    """The reasoning and the content of an answer, and the number of its reasoning tokens."""
    answer = await client.chat.completions.create(**CHAT, extra_body=extra)
    message, usage = answer.choices[0].message, answer.usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    num_tokens = usage.completion_tokens_details.reasoning_tokens
    assert num_tokens is not None
    reasoning: str = message.model_dump()["reasoning_content"]
    assert message.content
    return reasoning, message.content, num_tokens


async def test_the_reasoning_ends_at_its_limit_and_the_answer_follows(client: AsyncOpenAI) -> None:
    free, content, num_free = await message_of(client)
    assert num_free > LIMIT + 1
    cut, answer, num_tokens = await message_of(client, thinking_token_budget=LIMIT)
    assert free.startswith(cut)
    assert len(cut) < len(free)
    assert answer
    for extra in (
        {"reasoning": {"max_tokens": LIMIT}},
        {"thinking": {"type": "enabled", "budget_tokens": LIMIT}},
    ):
        assert await message_of(client, **extra) == (cut, answer, num_tokens)
    assert await message_of(client, thinking_budget=num_free + 9) == (free, content, num_free)
    shape = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    constraint = {"structured_outputs": {"json": shape}, "reasoning_effort": "high"}
    limited = await message_of(client, thinking_token_budget=LIMIT, max_tokens=40, **constraint)
    assert limited[1].startswith("{")
    assert len(limited[0]) < len((await message_of(client, max_tokens=60, **constraint))[0])


@pytest.mark.parametrize(
    "extra",
    [
        {"thinking_token_budget": 0},
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"enabled": False}},
    ],
)
async def test_reasoning_is_off_for_a_template_without_a_switch(
    client: AsyncOpenAI, extra: dict[str, Any]
) -> None:
    answer = await client.chat.completions.create(**CHAT, extra_body=extra)
    message, usage = answer.choices[0].message, answer.usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 0
    assert message.content
    assert "<|" not in message.content
    assert "reasoning_content" not in message.model_dump()


async def test_a_response_and_a_message_of_anthropic_have_the_same_limit(
    client: AsyncOpenAI,
) -> None:
    cut, _, _ = await message_of(client, thinking_token_budget=LIMIT)
    response = await client.responses.create(
        model="aserve-tiny",
        input="What is 27 plus 15?",
        temperature=0,
        extra_body={"reasoning": {"max_tokens": LIMIT}},
    )
    thought = response.model_dump()["output"][0]
    assert thought["type"] == "reasoning"
    assert cut in str(thought)
    thinking = {"type": "enabled", "budget_tokens": LIMIT}
    message: Any = await client.post(
        "/messages", body=CHAT | {"max_tokens": 60, "thinking": thinking}, cast_to=object
    )
    assert message["content"][0]["thinking"] == cut
