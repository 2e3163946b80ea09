"""Answers that would be enormous are refused with the numbers, before any of the work is done."""

from __future__ import annotations

from typing import Any

import pytest

from aserve.http.openai.answer_size import AnswerLimits, check_answer_size
from aserve.http.openai.call import request_of
from aserve.http.openai.schema import CompletionBody
from aserve.messages.requests import SamplingParams, TokenPrompt
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import ask, told

PATHS = {"prompt": "/v1/completions", "messages": "/v1/chat/completions", "input": "/v1/responses"}
CHAT = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
INCLUDE = ["message.output_text.logprobs"]


def path_of(body: dict[str, Any]) -> str:
    return PATHS[next(iter(body))]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [[1] * 1000] * 256, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": ["x" * 1000] * 256, "prompt_logprobs": 20}, "prompt_logprobs"),
        (
            {"prompt": [[1] * 500] * 256, "logprobs": 20, "echo": True, "stream": True},
            "prompt_logprobs",
        ),
        ({"prompt": [[1] * 500], "prompt_logprobs": 20, "n": 128}, "prompt_logprobs"),
        ({"prompt": "a", "n": 128, "logprobs": 20, "max_tokens": 900}, "logprobs"),
        ({"prompt": "a", "best_of": 128, "logprobs": 20, "max_tokens": 900}, "logprobs"),
        (CHAT | {"n": 128}, "logprobs"),
    ],
)
async def test_an_enormous_answer_is_refused_before_any_work(
    echo: EchoEngine, body: dict[str, Any], param: str
) -> None:
    answer = await ask(echo, path_of(body), body)
    assert (answer.status, answer.error["code"]) == (400, "answer_too_large")
    assert answer.error["param"] == param
    assert str(1 << 20) in answer.error["message"], "it says the limit"
    assert echo.scheduler.admitted == []


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [[1] * 500], "prompt_logprobs": 5, "max_tokens": 1},
        {"prompt": [[1] * 400] * 64, "logprobs": 1, "echo": True, "max_tokens": 0},
        CHAT,
        {"input": "a", "top_logprobs": 20, "include": INCLUDE},
    ],
)
async def test_ordinary_scores_are_given(echo: EchoEngine, body: dict[str, Any]) -> None:
    await told(echo, path_of(body), body)


async def test_the_limit_is_an_option_and_streamed_outputs_do_not_count() -> None:
    body = {"prompt": "a", "logprobs": 1, "max_tokens": 500, "n": 2}
    async with EchoEngine(max_answer_logprobs=1999) as echo:
        answer = await ask(echo, "/v1/completions", body)
        assert answer.status == 400
        assert "2000 log-probabilities" in answer.error["message"]
        assert (await ask(echo, "/v1/completions", body | {"stream": True})).status == 200
        asked = {"input": "a", "top_logprobs": 20, "include": INCLUDE, "stream": True}
        answer = await ask(echo, "/v1/responses", asked)
        assert answer.status == 400, "its last events repeat all of the output"


def test_scoring_as_evaluation_programs_do_it_passes_on_large_contexts() -> None:
    limits = AnswerLimits(max_model_len=131_072)
    for num_prompts, prompt_len, num_top in ((1, 4096, 5), (64, 2048, 1), (1, 131_072, 5)):
        sampling = SamplingParams(seed=1, max_tokens=1, prompt_logprobs=num_top)
        prompt = TokenPrompt((1,) * prompt_len)
        request = request_of(CompletionBody(), prompt, sampling=sampling, request_id="r-0")
        check_answer_size([request] * num_prompts, limits, is_whole=True)
