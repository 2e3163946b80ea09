"""The prediction of an output in a body, and the drafts that came of it in the usage. The played
engine verifies two drafts for its first step of one token, and one more than it accepts always."""

from __future__ import annotations

from typing import Any

import pytest

from aserve.text.defaults import MAX_PREDICTION_TOKENS
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import ask, told

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
PARTS = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]


@pytest.mark.parametrize("content", ["hello", PARTS])
@pytest.mark.parametrize("n", [1, 2])
async def test_accepted_and_rejected_tokens_are_counted(
    echo: EchoEngine, content: Any, n: int
) -> None:
    echo.scheduler.runs = (3, 1)
    prediction = {"type": "content", "content": content}
    answer = await told(echo, CHAT, BODY | {"prediction": prediction, "n": n})
    assert answer["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 2 * n,
        "rejected_prediction_tokens": 4 * n,
    }
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    body = BODY | {"prediction": prediction, "n": n} | streamed
    assert (await ask(echo, CHAT, body)).chunks[-1]["usage"] == answer["usage"]
    assert "completion_tokens_details" not in (await told(echo, CHAT, BODY))["usage"]


@pytest.mark.parametrize(
    "prediction",
    [
        "hello",
        {"type": "text", "content": "hello"},
        {"type": "content"},
        {"type": "content", "content": 3},
        {"type": "content", "content": [{"type": "image_url"}]},
        {"type": "content", "content": [{"type": "text"}]},
        {"type": "content", "content": "word " * (MAX_PREDICTION_TOKENS + 1)},
    ],
)
async def test_a_bad_or_long_prediction_is_refused(echo: EchoEngine, prediction: Any) -> None:
    answer = await ask(echo, CHAT, BODY | {"prediction": prediction})
    assert answer.status == 400
    assert "prediction" in answer.error["param"]
