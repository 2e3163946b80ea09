"""Changes to running requests of a server with the bundled model, in two processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

pytestmark = pytest.mark.slow

LONG: dict[str, Any] = {
    "model": "aserve-tiny",
    "prompt": "Once",
    "seed": 3,
    "max_tokens": 900,
    "stream": True,
    "extra_body": {"ignore_eos": True, "return_token_ids": True},
}


async def change(client: AsyncOpenAI, request_id: str, **fields: Any) -> Any:
    return await client.post(f"/requests/{request_id}", body=fields, cast_to=object)


async def test_a_running_answer_is_cut_or_lengthened(client: AsyncOpenAI) -> None:
    async def run(max_tokens: int) -> tuple[int, str, int]:
        """The tokens of an answer that gets this limit after its first ones, and those that were
        out when it got it.
        """
        num_tokens, reason, num_out = 0, "", 0
        async for event in await client.completions.create(**LONG | {"max_tokens": 300}):
            [choice] = event.choices
            num_tokens += len(choice.model_dump().get("token_ids") or ())
            reason = choice.finish_reason or reason
            if not num_out:
                state = await change(client, event.id, max_tokens=max_tokens)
                num_out = state["choices"][0]["completion_tokens"]
        return num_tokens, reason, num_out

    num_tokens, reason, num_out = await run(1)
    assert (num_tokens, reason) == (num_out, "length")
    assert num_out < 300
    assert (await run(400))[:2] == (400, "length")


async def test_stop_strings_are_added_and_the_reasoning_is_ended(client: AsyncOpenAI) -> None:
    texts: list[str] = []
    num_before, reason = 0, None
    async for event in await client.completions.create(**LONG):
        if not texts:
            state = await change(client, event.id, stop=["e"])
            num_before = state["choices"][0]["completion_tokens"]
        texts.append(event.choices[0].text)
        reason = event.choices[0].finish_reason or reason
    assert reason == "stop"
    assert "e" not in "".join(texts[num_before:])
    chats = client.chat.completions
    stream: Any = await chats.create(
        model="aserve-tiny",
        messages=[{"role": "user", "content": "What is 27 plus 15?"}],
        temperature=0,
        stream=True,
        extra_body={"bad_words": ["<|/think|>"], "ignore_eos": True, "max_tokens": 600},
    )
    kinds, has_changed = set[str](), False
    async for event in stream:
        delta = event.choices[0].delta.model_dump()
        kinds |= {name for name in ("content", "reasoning_content") if delta.get(name)}
        if "reasoning_content" in kinds and not has_changed:
            assert "content" not in kinds, "a banned tag came"
            await change(client, event.id, end_thinking=True)
            has_changed = True
        if "content" in kinds:
            break
    assert kinds == {"content", "reasoning_content"}


async def test_many_changes_at_once_leave_every_other_answer_as_it_is(client: AsyncOpenAI) -> None:
    async def text_of(seed: int) -> str:
        stream = await client.completions.create(**LONG | {"seed": seed, "max_tokens": 60})
        return "".join([event.choices[0].text async for event in stream])

    async def changed(seed: int) -> None:
        first = True
        async for event in await client.completions.create(**LONG | {"seed": seed}):
            if first:
                changes: list[dict[str, Any]] = [{"max_tokens": 900}, {"stop": ["zz"]}]
                await asyncio.gather(*(change(client, event.id, **each) for each in changes))
                await change(client, event.id, max_tokens=5)
            first = False

    alone = [await text_of(seed) for seed in range(4)]
    together = await asyncio.gather(*map(text_of, range(4)), *map(changed, range(10, 16)))
    assert together[:4] == alone


async def test_a_fork_repeats_the_answer_and_with_another_seed_only_its_beginning(
    client: AsyncOpenAI,
) -> None:
    async def fork(request_id: str, **fields: Any) -> list[int]:
        body = {"token": 8, "stream": False, **fields}
        answer: Any = await client.post(f"/requests/{request_id}/fork", body=body, cast_to=object)
        assert answer["id"] != request_id
        token_ids: list[int] = answer["choices"][0]["token_ids"]
        return token_ids

    ids: list[int] = []
    forks: list[asyncio.Future[list[int]]] = []
    async for event in await client.completions.create(**LONG | {"max_tokens": 400}):
        ids += event.choices[0].model_dump().get("token_ids") or ()
        if not forks and len(ids) >= 8:
            changes: tuple[dict[str, Any], ...] = ({}, {"seed": 4}, {"token_id": 70})
            forks = [asyncio.ensure_future(fork(event.id, **each)) for each in changes]
    same, reseeded, forced = [await each for each in forks]
    assert same == ids
    assert reseeded[:8] == forced[:8] == ids[:8]
    assert reseeded[8:] != ids[8:]
    assert forced[8] == 70
    assert len(reseeded) == len(forced) == 400
