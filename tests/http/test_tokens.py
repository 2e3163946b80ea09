"""/tokenize and /detokenize: what they say is what the engine would be given, and nobody waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeAlias

import pytest

from aserve.http.tokenize_service import MAX_WAITING
from aserve.messages.requests import TextPrompt
from aserve.text.prompt import PromptEncoder
from aserve.text.tokenizer import TextTokenizer
from tests.fakes.echo_engine import MAX_MODEL_LEN, EchoEngine
from tests.http.asking import ask, told
from tests.text.vocabularies import byte_level_backend

Line: TypeAlias = Sequence[asyncio.Future[list[int]]]
TEXT = "hello 한국어 🚀 stop <|eos|><mark>"
MESSAGES = [{"role": "user", "content": TEXT}]


@pytest.mark.parametrize("version", ["", "/v1"])
async def test_a_text_goes_to_tokens_and_back(echo: EchoEngine, version: str) -> None:
    answer = await told(echo, f"{version}/tokenize", {"prompt": TEXT})
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), MAX_MODEL_LEN)
    assert answer["token_strs"] is None
    back = await told(echo, f"{version}/detokenize", {"tokens": answer["tokens"]})
    assert back == {"prompt": TEXT}


async def test_the_tokens_of_a_prompt_are_those_that_the_engine_gets(echo: EchoEngine) -> None:
    for path, prompt in (
        ("completions", {"prompt": TEXT}),
        ("chat/completions", {"messages": MESSAGES}),
        ("chat/completions", {"messages": MESSAGES, "add_special_tokens": True}),
        ("completions", {"prompt": TEXT, "add_special_tokens": False}),
    ):
        given = await told(echo, f"/v1/{path}", prompt, return_token_ids=True, max_tokens=1)
        owner = given if path.startswith("chat") else given["choices"][0]
        assert (await told(echo, "/tokenize", prompt))["tokens"] == owner["prompt_token_ids"]


async def test_special_tokens_and_the_assistants_turn_are_added_as_asked() -> None:
    tokenizer = TextTokenizer(byte_level_backend(), bos_id=0)
    template = "{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    async with EchoEngine(tokenizer=tokenizer, template=template) as echo:
        results = [
            (await told(echo, "/tokenize", body, return_token_strs=True))["token_strs"]
            for body in (
                {"prompt": "A"},
                {"prompt": "A", "add_special_tokens": False},
                {"messages": [{"role": "user", "content": "A"}]},
                {
                    "messages": [{"role": "user", "content": "A"}],
                    "add_special_tokens": True,
                    "add_generation_prompt": False,
                },
            )
        ]
    assert results == [["<|eos|>", "A"], ["A"], ["A", ">"], ["<|eos|>", "A"]]


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("tokenize", {}, "messages", "missing_required_parameter"),
        ("tokenize", {"prompt": "a", "messages": MESSAGES}, "messages", "invalid_value"),
        ("tokenize", {"messages": [{"role": "king"}]}, "messages[0].role", "invalid_value"),
        ("tokenize", {"prompt": "a", "model": "other"}, "model", "model_not_found"),
        ("detokenize", {}, "tokens", "missing_required_parameter"),
        ("detokenize", {"tokens": [-1]}, "tokens", "token_id_out_of_range"),
        ("detokenize", {"tokens": [5, 10_000]}, "tokens", "token_id_out_of_range"),
        ("detokenize", {"tokens": [0] * (2**20 + 1)}, None, "body_too_complex"),
    ],
)
async def test_a_wrong_body_is_refused_with_its_field(
    echo: EchoEngine, path: str, body: dict[str, Any], param: str | None, code: str
) -> None:
    answer = await ask(echo, f"/{path}", body)
    assert (answer.error["param"], answer.error["code"]) == (param, code)
    assert answer.status == (404 if code == "model_not_found" else 400)


class GatedEncoder(PromptEncoder):
    """Waits in whichever thread it is asked, so that a blocked loop would never answer."""

    __slots__ = ("gate", "threads")

    def __init__(self, encoder: PromptEncoder) -> None:
        super().__init__(encoder.tokenizer, template=None, limits=encoder.limits)
        self.gate = threading.Event()
        self.threads: set[threading.Thread] = set()

    def encode(self, prompt: Any, *, is_truncated: bool = True) -> list[int]:
        self.threads.add(threading.current_thread())
        assert self.gate.wait(60)
        return super().encode(prompt, is_truncated=is_truncated)


@pytest.fixture
def encoder(echo: EchoEngine) -> GatedEncoder:
    gated = GatedEncoder(echo.encoder)
    echo.tokenize_service.open(gated)
    return gated


@pytest.fixture
async def line(encoder: GatedEncoder, echo: EchoEngine) -> AsyncIterator[Line]:
    """As many calls as may wait, none of them answered."""
    prompt = TextPrompt(TEXT)
    line = [
        asyncio.ensure_future(echo.tokenize_service.run(lambda asked: asked.encode(prompt)))
        for _ in range(MAX_WAITING)
    ]
    await asyncio.sleep(0)  # each of them has begun
    yield line
    encoder.gate.set()
    answers = await asyncio.gather(*line, return_exceptions=True)
    assert {type(answer) for answer in answers} <= {list, asyncio.CancelledError}
    assert len(encoder.threads) == 1


@pytest.mark.usefixtures("line")
async def test_a_long_text_delays_no_answer_and_its_queue_is_bounded(
    echo: EchoEngine,
) -> None:
    assert (await told(echo, "/v1/completions", {"prompt": "hello"}))["usage"]["completion_tokens"]
    answer = await ask(echo, "/detokenize", {"tokens": [5]})
    assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
    assert answer.error["code"] == "queue_full"


async def test_a_client_that_disconnects_frees_its_place_in_the_queue(
    echo: EchoEngine, encoder: GatedEncoder, line: Line
) -> None:
    for place in line:
        place.cancel()
    await asyncio.wait(line)
    encoder.gate.set()
    assert (await told(echo, "/tokenize", {"prompt": TEXT}))["count"] > 0
