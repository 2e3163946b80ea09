"""Structured output through the official client and real compile workers."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from aserve.engine import GenerationError
from aserve.engine_core import LocalEngineCore
from tests.e2e.server_process import ServerProcess
from tests.fakes.packed_channel import PackedEngine
from tests.grammar.languages import PERSON, conforms

pytestmark = pytest.mark.slow

MODEL = "aserve-tiny"
QUESTION: Any = [{"role": "user", "content": "Who are you?"}]
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": PERSON, "strict": True},
}
# Small to compile; every letter of an output multiplies the ways to read it.
EXPLODING = "(((((a?){50}){50}){50}){50}){50}"


async def complete(client: AsyncOpenAI, **wanted: Any) -> Any:
    """One completion that keeps to one of `structured_outputs`; other fields as they are."""
    fields = {"max_tokens": 40, "temperature": 1.0, "seed": 3} | wanted.pop("fields", {})
    extra = {"structured_outputs": wanted} | fields.pop("extra_body", {})
    return await client.completions.create(
        model=MODEL, prompt="This is it: ", extra_body=extra, **fields
    )


async def test_a_stop_string_cuts_a_structured_output(client: AsyncOpenAI) -> None:
    whole = (await complete(client, regex="[a-z]{3},[a-z]{3}")).choices[0]
    cut = (await complete(client, regex="[a-z]{3},[a-z]{3}", fields={"stop": ","})).choices[0]
    assert whole.text.startswith(f"{cut.text},")
    assert (cut.finish_reason, cut.stop_reason) == ("stop", ",")


async def test_a_bad_schema_is_a_400_while_a_stream_goes_on_undisturbed(
    client: AsyncOpenAI,
) -> None:
    free: Any = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 60, "seed": 1}
    free |= {"extra_body": {"ignore_eos": True}}
    alone = (await client.completions.create(**free)).choices[0].text
    text = ""
    bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}}
    async for chunk in await client.completions.create(**free, stream=True):
        if not text:
            with pytest.raises(openai.BadRequestError, match='Unsupported type "thing"') as caught:
                await client.chat.completions.create(
                    model=MODEL, messages=QUESTION, response_format=bad
                )
            assert (caught.value.code, caught.value.param) == ("invalid_grammar", "response_format")
        text += chunk.choices[0].text
    assert text == alone


async def test_an_exploding_grammar_is_a_400_and_delays_no_other(
    client: AsyncOpenAI, server: ServerProcess
) -> None:
    order: list[str] = []

    async def ask(pattern: str) -> None:
        try:
            await complete(client, regex=pattern, fields={"max_tokens": 4})
        except openai.BadRequestError as error:
            order.append(str(error.code))
        else:
            order.append("answered")

    await asyncio.gather(*(ask(f"[a-c]{{{i}}}") for i in range(1, 7)))  # both workers are there
    order.clear()
    await asyncio.gather(ask(EXPLODING), *(ask(f"[x-z]{{{i}}}") for i in range(1, 4)))
    assert order == ["answered"] * 3 + ["grammar_timeout"]
    name = 'aserve_grammar_compiles_total{outcome="grammar_timeout"}'
    assert server.metric(name) == 1, "counts come from the engine's process"


def test_the_embedded_engine_takes_the_same_fields_and_leaves_no_worker() -> None:
    before = set(threading.enumerate())
    fields: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": 1, "n": 2}
    with PackedEngine(debug_checks=True, grammar_workers=1) as engine:
        [answer] = engine.generate_sync(["It is: "], response_format=FORMAT, **fields)
        [pick] = engine.generate_sync(["It is: "], structured_outputs={"choice": ["a b"]}, **fields)
        with pytest.raises(GenerationError, match="parenthesis"):
            engine.generate_sync(["It is: "], structured_outputs={"regex": "("})
        assert engine._frontend._running is not None
        core = engine._frontend._running.core
        assert isinstance(core, LocalEngineCore)
        workers = list(core.grammars._workers._all)
    assert all(conforms(json.loads(choice.text), PERSON) for choice in answer.choices)
    assert [choice.text for choice in pick.choices] == ["a b", "a b"]
    assert workers
    assert all(worker._process.returncode is not None for worker in workers)
    for thread in set(threading.enumerate()) - before:
        thread.join(5)  # the one that closed the executor has only just said so
        assert not thread.is_alive()
