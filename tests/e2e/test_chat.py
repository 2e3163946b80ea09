"""A chat with the bundled model by the embeddable engine."""

from __future__ import annotations

import pytest

from aserve.engine import Engine
from aserve.errors import InvalidRequest
from aserve.parsers.events import Content, Reasoning, joined

QUESTION = [{"role": "user", "content": "What is 27+15?"}]
ANSWER = "27 plus 15 is 42."
THOUGHT = "7+5=12 20+10=30 30+12=42"


async def test_reasoning_and_content_come_apart() -> None:
    async with Engine() as engine:
        events = [event async for event in engine.chat(QUESTION, max_tokens=80)]
        assert joined(events) == [Reasoning(THOUGHT), Content(ANSWER)]
        with pytest.raises(InvalidRequest, match="one answer, and n is 2"):
            await anext(engine.chat(QUESTION, n=2))
    async with Engine(reasoning_parser="none") as engine:
        events = [event async for event in engine.chat(QUESTION, max_tokens=80)]
        assert joined(events) == [Content(f"<|think|>{THOUGHT}<|/think|>{ANSWER}")]
