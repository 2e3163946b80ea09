"""A prediction in a server with the bundled model, engine and frontend apart."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

pytestmark = pytest.mark.slow

CHAT: dict[str, Any] = {
    "model": "aserve-tiny",
    "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
    "max_tokens": 60,
}


async def predicted(client: AsyncOpenAI, text: str, **fields: Any) -> ChatCompletion:
    prediction: Any = {"type": "content", "content": text}
    answer: ChatCompletion = await client.chat.completions.create(
        **CHAT, prediction=prediction, **fields
    )
    return answer


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1.5, "seed": 3}])
async def test_an_answer_is_the_same_whatever_is_predicted(
    client: AsyncOpenAI, fields: dict[str, Any]
) -> None:
    plain = await client.chat.completions.create(**CHAT, **fields)
    text = plain.choices[0].message.content
    assert text
    accepted = []
    for guess in (text, f"{text[:50]}{text[60:]}", "Something else."):
        answer = await predicted(client, guess, extra_body={"include_timings": True}, **fields)
        assert answer.choices[0].message.content == text
        assert answer.usage is not None
        details = answer.usage.completion_tokens_details
        assert details is not None
        accepted.append(details.accepted_prediction_tokens or 0)
        assert details.rejected_prediction_tokens is not None
        timings = (answer.usage.model_extra or {})["timings"]
        numbers = [timings.get(name, 0) for name in ("draft_n", "draft_n_accepted")]
        assert numbers == [accepted[-1] + details.rejected_prediction_tokens, accepted[-1]]
        assert_acceptance(timings)
    assert accepted[0] > accepted[1] > 20 > accepted[2]


def assert_acceptance(timings: dict[str, Any]) -> None:
    """Mean, rates by position and histogram say the same."""
    if "draft_n" not in timings:
        return
    num, counts = timings["draft_windows"], timings["accept_histogram"]
    assert sum(counts) == num
    assert sum(place * count for place, count in enumerate(counts)) == timings["draft_n_accepted"]
    assert timings["accept_len"] == pytest.approx(1 + timings["draft_n_accepted"] / num)
    longer = [sum(counts[place + 1 :]) / num for place in range(len(counts) - 1)]
    assert timings["accept_rates"] == pytest.approx(longer)
