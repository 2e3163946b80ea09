"""Answers that would be enormous are refused with the numbers, before any of the work is done."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from aserve.http.openai.answer_size import AnswerLimits, check_answer_size
from aserve.http.openai.call import request_of
from aserve.http.openai.schema import CompletionBody
from aserve.messages.requests import SamplingParams, TokenPrompt
from tests.fakes.echo_engine import EchoEngine

CHAT = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
INCLUDE = ["message.output_text.logprobs"]

TOO_LARGE: dict[str, tuple[str, dict[str, Any], str]] = {
    "prompts x ids x prompt_logprobs": (
        "/v1/completions",
        {"prompt": [[1] * 1000] * 256, "prompt_logprobs": 20, "max_tokens": 1},
        "prompt_logprobs",
    ),
    "texts x prompt_logprobs": (
        "/v1/completions",
        {"prompt": ["x" * 1000] * 256, "prompt_logprobs": 20, "max_tokens": 1},
        "prompt_logprobs",
    ),
    "echo with logprobs, streamed": (
        "/v1/completions",
        {"prompt": [[1] * 500] * 256, "logprobs": 20, "echo": True, "stream": True},
        "prompt_logprobs",
    ),
    "prompt x n x prompt_logprobs": (
        "/v1/completions",
        {"prompt": [[1] * 500], "prompt_logprobs": 20, "n": 128},
        "prompt_logprobs",
    ),
    "n x logprobs x max_tokens": (
        "/v1/completions",
        {"prompt": "a", "n": 128, "logprobs": 20, "max_tokens": 900},
        "logprobs",
    ),
    "best_of x logprobs x max_tokens": (
        "/v1/completions",
        {"prompt": "a", "best_of": 128, "logprobs": 20, "max_tokens": 900},
        "logprobs",
    ),
    "a chat's n x logprobs x the context": ("/v1/chat/completions", {**CHAT, "n": 128}, "logprobs"),
}

ORDINARY: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [[1] * 500], "prompt_logprobs": 5, "max_tokens": 1}),
    ("/v1/completions", {"prompt": [[1] * 400] * 64, "logprobs": 1, "echo": True, "max_tokens": 0}),
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", {"input": "a", "top_logprobs": 20, "include": INCLUDE}),
]


@pytest.mark.parametrize("name", TOO_LARGE)
async def test_an_enormous_answer_is_refused_before_any_work(
    echo: EchoEngine, web: aiohttp.ClientSession, name: str
) -> None:
    path, body, param = TOO_LARGE[name]
    async with web.post(path, json=body) as answer:
        error = (await answer.json())["error"]
        assert answer.status == 400, error
    assert (error["code"], error["param"]) == ("answer_too_large", param)
    assert str(1 << 20) in error["message"], "it says the limit"
    assert echo.scheduler.admitted == []


@pytest.mark.parametrize(("path", "body"), ORDINARY)
async def test_ordinary_scores_are_given(
    web: aiohttp.ClientSession, path: str, body: dict[str, Any]
) -> None:
    async with web.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()


async def test_the_limit_is_an_option_and_streamed_outputs_do_not_count() -> None:
    body = {"prompt": "a", "logprobs": 1, "max_tokens": 500, "n": 2}
    async with (
        EchoEngine(max_answer_logprobs=1999) as echo,
        aiohttp.ClientSession(echo.url) as web,
    ):
        async with web.post("/v1/completions", json=body) as answer:
            assert answer.status == 400
            assert "2000 log-probabilities" in (await answer.json())["error"]["message"]
        async with web.post("/v1/completions", json=body | {"stream": True}) as answer:
            assert answer.status == 200
            await answer.read()
        asked = {"input": "a", "top_logprobs": 20, "include": INCLUDE, "stream": True}
        async with web.post("/v1/responses", json=asked) as answer:
            assert answer.status == 400, "its last events repeat all of the output"


def test_scoring_as_evaluation_programs_do_it_passes_on_large_contexts() -> None:
    limits = AnswerLimits(max_model_len=131_072)
    for num_prompts, prompt_len, num_top in ((1, 4096, 5), (64, 2048, 1), (1, 131_072, 5)):
        sampling = SamplingParams(seed=1, max_tokens=1, prompt_logprobs=num_top)
        prompt = TokenPrompt((1,) * prompt_len)
        request = request_of(CompletionBody(), prompt, sampling=sampling, request_id="r-0")
        check_answer_size([request] * num_prompts, limits, is_whole=True)
