"""What a request gets that doesn't say: the model's defaults, unless the client says otherwise."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from aserve.messages.requests import SamplingParams
from aserve.text.defaults import GenerationDefaults
from tests.fakes.echo_engine import EchoEngine

DEFAULTS = GenerationDefaults(
    temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.1
)
RECOMMENDED = {
    "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1
}  # fmt: skip
CHAT: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}


def sampled(echo: EchoEngine) -> dict[str, float]:
    sampling: SamplingParams = echo.scheduler.admitted[-1].sampling
    return {name: getattr(sampling, name) for name in RECOMMENDED}


async def test_the_models_defaults_replace_missing_fields(
    echo: EchoEngine, client: openai.AsyncOpenAI
) -> None:
    echo.state.defaults = DEFAULTS
    await client.chat.completions.create(**CHAT)
    assert sampled(echo) == RECOMMENDED
    await client.completions.create(model="echo", prompt="hi")
    assert sampled(echo) == RECOMMENDED
    await client.responses.create(model="echo", input="hi")
    assert sampled(echo) == RECOMMENDED


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", 0, 0.0),
        ("temperature", None, 0.6),
        ("top_p", 0.5, 0.5),
        ("top_k", 0, 0),
        ("top_k", -1, 0),
        ("min_p", 0, 0.0),
        ("repetition_penalty", 1, 1.0),
    ],
)
async def test_the_clients_fields_win_and_null_counts_as_missing(
    echo: EchoEngine, client: openai.AsyncOpenAI, name: str, value: float, expected: float
) -> None:
    echo.state.defaults = DEFAULTS
    await client.chat.completions.create(**CHAT, extra_body={name: value})
    assert sampled(echo) == RECOMMENDED | {name: expected}
