"""POST /v1/completions: the engine answers with the prompt, and scores its token i as -i."""

from __future__ import annotations

import time
from typing import Any

import pytest
from openai.types import Completion

from aserve.http.openai.completion_logprobs import top_of
from aserve.messages.scored import TokenLogprob, TopLogprob
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import ask, complete

LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
TEXT = "hello 한국어 🚀 stop sign <mark>"
FOREIGN = "hello 한국어"


async def streamed(echo: EchoEngine, /, **body: Any) -> list[Completion]:
    options = {"include_usage": True}
    stream = await complete(echo, **body, stream=True, stream_options=options)
    return [chunk async for chunk in stream]


def gather(chunks: list[Completion], index: int) -> dict[str, Any]:
    """What a client has of one choice when its stream is over, in the shape of the whole one."""
    parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    logprobs = [part.logprobs.model_dump() for part in parts if part.logprobs is not None]
    return {
        "index": index,
        "text": "".join(part.text for part in parts),
        "logprobs": {key: [x for each in logprobs for x in each[key] or []] for key in LISTS},
        "finish_reason": parts[-1].finish_reason,
    }


BODIES: list[dict[str, Any]] = [
    {"prompt": TEXT, "max_tokens": 3, "echo": True},
    {"prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 1},
    {"prompt": [TEXT, "a"], "max_tokens": 4, "n": 3, "echo": True, "logprobs": 2, "stop": "lo"},
    {"prompt": TEXT, "max_tokens": 100},
    {"prompt": TEXT, "max_tokens": 7, "logprobs": 3},
    {"prompt": TEXT, "max_tokens": 100, "logprobs": 1, "stop": ["sto", "p s"]},
    {"prompt": [TEXT, "again"], "max_tokens": 100, "n": 3, "logprobs": 2},
    {"prompt": [[40, 41, 42], [43]], "max_tokens": 2, "stop": "never"},
]


@pytest.mark.parametrize("body", BODIES)
async def test_streamed_and_whole_answers_are_the_same(
    echo: EchoEngine, body: dict[str, Any]
) -> None:
    whole = await complete(echo, **body)
    chunks = await streamed(echo, **body)
    assert len(whole.choices) == body.get("n", 1) * (
        len(body["prompt"]) if isinstance(body["prompt"], list) else 1
    )
    for choice in whole.choices:
        expected = choice.model_dump(include={"index", "text", "logprobs", "finish_reason"})
        if expected["logprobs"] is None:
            expected["logprobs"] = {key: [] for key in LISTS}
        assert gather(chunks, choice.index) == expected
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_every_kind_of_prompt_is_answered_in_its_order(echo: EchoEngine) -> None:
    texts = await complete(echo, ["one", "two", "three"])
    assert [choice.text for choice in texts.choices] == ["one", "two", "three"]
    token_ids = [[ord(c) - 32 for c in word] for word in ("HI", "YOU")]
    lists = await complete(echo, token_ids)
    single = await complete(echo, token_ids[1])
    assert single.choices[0].text == lists.choices[1].text
    assert lists.usage.prompt_tokens == 5


async def test_children_share_one_prompt_in_the_usage(echo: EchoEngine) -> None:
    answer = await complete(echo, [40, 41, 42], n=4, max_tokens=2)
    usage = answer.model_dump()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 8)
    assert (usage["total_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (11, 3)


async def test_a_stop_string_ends_text_logprobs_and_usage_together(echo: EchoEngine) -> None:
    answer = await complete(echo, TEXT, max_tokens=100, logprobs=0, stop=["stop"])
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("hello 한국어 🚀 ", "stop")
    assert choice.model_dump()["stop_reason"] == "stop"
    assert len(choice.logprobs.tokens) == answer.usage.completion_tokens
    assert [cancel.reason for cancel in echo.scheduler.cancels] == ["stop"]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "count", "reason"),
    [("z " * 40, None, 16, "length"), (TEXT, 0, 0, "length"), ("a", 100, 2, "stop")],
)
async def test_an_answer_ends_at_its_length_or_its_end(
    echo: EchoEngine, prompt: str, max_tokens: int | None, count: int, reason: str
) -> None:
    answer = await complete(echo, prompt, max_tokens=max_tokens)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (count, reason)


async def test_the_seed_is_returned_and_drawn_if_none_was_given(echo: EchoEngine) -> None:
    given = await complete(echo, "a", seed=-5)
    assert given.model_dump()["seed"] == -5
    drawn = [await streamed(echo, prompt="a") for _ in range(2)]
    seeds = {chunks[-1].model_dump()["seed"] for chunks in drawn}
    assert len(seeds) == 2
    assert seeds == {request.sampling.seed for request in echo.scheduler.admitted[1:]}


async def test_sampling_fields_reach_the_engine(echo: EchoEngine) -> None:
    started_s = time.monotonic()
    await echo.client.completions.create(
        model="parrot",
        prompt="a",
        temperature=0,
        top_p=0.5,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"7": -100},
        stop="x",
        user="somebody",
        extra_body={
            "top_k": -1,
            "min_p": 0.1,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [9],
            "allowed_token_ids": [40, 41],
            "bad_words": ["AB"],
            "priority": -3,
            "timeout": 2.5,
            "metadata": {"any": "thing"},
        },
    )
    (admitted,) = echo.scheduler.admitted
    sampling = admitted.sampling
    found = [sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p]
    assert found == [0, 0.5, 0, 0.1]
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert (sampling.repetition_penalty, sampling.min_tokens) == (1.5, 2)
    assert (sampling.logit_bias, sampling.stop) == (((7, -100.0),), ("x",))
    assert (sampling.allowed_token_ids, sampling.bad_words) == ((40, 41), ("AB",))
    assert (admitted.end_ids, admitted.priority) == ((9,), -3)
    assert admitted.deadline_s is not None
    assert 0 < admitted.deadline_s - started_s - 2.5 < 60


async def test_top_p_zero_means_the_likeliest_token_and_not_none(echo: EchoEngine) -> None:
    await complete(echo, "a", top_p=0)
    assert 0 < echo.scheduler.admitted[0].sampling.top_p < 1e-3


@pytest.mark.parametrize("reports_usage", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_usage_is_null_in_every_chunk_but_the_last_and_absent_where_not_asked_for(
    echo: EchoEngine, path: str, reports_usage: bool
) -> None:
    body: dict[str, Any] = {"prompt": TEXT, "stream": True}
    body["messages"] = [{"role": "user", "content": TEXT}]
    if reports_usage:
        body["stream_options"] = {"include_usage": True}
    chunks = (await ask(echo, f"/v1/{path}", body)).chunks
    if reports_usage:
        *chunks, last = chunks
        assert last["choices"] == []
        assert last["usage"]["total_tokens"] > 0
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)


def test_the_chosen_token_is_among_the_alternatives_even_where_it_is_not_one_of_the_best() -> None:
    best = TopLogprob(1, "a", b"a", -0.1)
    entry = TokenLogprob(2, "\ufffd", b"\xed", -5.0, (best,))
    assert top_of(entry, num_top=1) == {"a": -0.1, "bytes:\\xed": -5.0}
    assert top_of(TokenLogprob(1, "a", b"a", -0.1, (best,)), num_top=1) == {"a": -0.1}


async def test_an_echo_stands_before_each_choice_of_each_prompt(echo: EchoEngine) -> None:
    answer = await complete(echo, [FOREIGN, "b"], n=2, max_tokens=2, echo=True)
    plain = await complete(echo, [FOREIGN, "b"], n=2, max_tokens=2)
    assert [choice.text for choice in answer.choices] == [
        prompt + choice.text
        for prompt, choice in zip([FOREIGN, FOREIGN, "b", "b"], plain.choices, strict=True)
    ]
    assert all(choice.logprobs is None for choice in answer.choices)
    assert answer.usage == plain.usage


def assert_offsets_point_at_their_tokens(choice: Any) -> None:
    logprobs = choice.logprobs
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        is_partial = token.startswith("bytes:") or token == "<|eos|>"
        assert is_partial or choice.text[offset:].startswith(token)


async def test_a_prompt_is_scored_without_any_output_as_evaluation_tools_ask(
    echo: EchoEngine,
) -> None:
    ids = echo.tokenizer.encode(FOREIGN, with_special=False)
    answer: Any = await complete(echo, [ids, ids[:1]], max_tokens=0, logprobs=1, echo=True)
    scored, single = answer.choices
    assert (scored.text, scored.finish_reason) == (FOREIGN, "length")
    assert scored.logprobs.token_logprobs == [None, *(-float(i) for i in range(1, len(ids)))]
    assert scored.logprobs.top_logprobs[0] is None
    assert all(scored.logprobs.top_logprobs[1:])
    assert len(scored.logprobs.tokens) == len(ids)
    assert_offsets_point_at_their_tokens(scored)
    assert single.logprobs.token_logprobs == [None]
    assert [request.sampling.prompt_logprobs for request in echo.scheduler.admitted] == [1, 1]


@pytest.mark.parametrize("is_echoed", [False, True])
async def test_text_offsets_continue_after_the_echo(echo: EchoEngine, is_echoed: bool) -> None:
    answer: Any = await complete(echo, FOREIGN, max_tokens=100, logprobs=0, echo=is_echoed)
    (choice,) = answer.choices
    assert choice.text == FOREIGN * (1 + is_echoed)
    assert_offsets_point_at_their_tokens(choice)
    assert choice.logprobs.top_logprobs is None


@pytest.mark.parametrize("n", [1, 3])
async def test_a_streamed_echo_comes_before_any_output(echo: EchoEngine, n: int) -> None:
    """The first child is scored in two runs, while its siblings are ahead of it."""
    stream = await complete(echo, FOREIGN, max_tokens=3, n=n, logprobs=0, echo=True, stream=True)
    parts: dict[int, list[Any]] = {}
    async for event in stream:
        for choice in event.choices:
            parts.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs or [])
    num_tokens = len([None, *parts[0]]) - 1
    prompt_len = num_tokens - 3
    for index in range(n):
        assert parts[index][:prompt_len] == [None, *(-float(i) for i in range(1, prompt_len))]
        assert len(parts[index]) == num_tokens


async def test_prompt_logprobs_have_the_shape_that_other_servers_gave_them(
    echo: EchoEngine,
) -> None:
    extra = {"prompt_logprobs": 2}
    ids = [64, 65, 66]
    text = await complete(echo, ids, n=2, extra_body=extra)
    for choice in text.choices:
        assert choice.logprobs is None
        first, second, third = choice.model_dump()["prompt_logprobs"]
        assert first is None
        token = echo.tokenizer.decode([65])
        assert second["65"] == {"logprob": -1.0, "rank": 1, "decoded_token": token}
        assert [score["rank"] for score in third.values()] == [2, 1, 2]
        assert [int(token_id) for token_id in third] == [ids[2], 0, 1]
    chat = await echo.client.chat.completions.create(
        model="echo", messages=[{"role": "user", "content": "a"}], extra_body=extra
    )
    scores = chat.model_dump()["prompt_logprobs"]
    assert [score is None for score in scores] == [True] + [False] * (len(scores) - 1)
    plain = await complete(echo, ids)
    assert "prompt_logprobs" not in plain.choices[0].model_dump()


async def test_an_echo_and_prompt_logprobs_each_get_the_alternatives_that_they_asked_for(
    echo: EchoEngine,
) -> None:
    asked: dict[str, Any] = {"max_tokens": 0, "logprobs": 1, "echo": True}
    answer = await complete(echo, FOREIGN, **asked, extra_body={"prompt_logprobs": 3})
    choice = answer.choices[0].model_dump()
    assert echo.scheduler.admitted[0].sampling.prompt_logprobs == 3
    assert {len(scores) for scores in choice["prompt_logprobs"][1:]} == {4}
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} == {2}


async def test_a_truncated_prompt_is_echoed_as_the_model_saw_it(echo: EchoEngine) -> None:
    asked: dict[str, Any] = {"max_tokens": 0, "echo": True}
    ids = echo.tokenizer.encode("abcdef", with_special=False)
    first = echo.tokenizer.decode(ids[:2], skip_special=False)
    for side, text in ((None, "ef"), ("left", "ef"), ("right", first)):
        extra = {"truncate_prompt_tokens": 2, "truncation_side": side}
        answer = await complete(echo, "abcdef", **asked, extra_body=extra)
        assert answer.choices[0].text == text


async def test_tokens_of_logprobs_may_be_spelled_as_their_ids(echo: EchoEngine) -> None:
    asked = {"return_tokens_as_token_ids": True, "return_token_ids": True, "max_tokens": 2}
    text = {"prompt": "ab", "logprobs": 2, "echo": True} | asked
    chat = {"messages": [{"role": "user", "content": "ab"}], "logprobs": True, "top_logprobs": 2}
    for streams in (False, True):
        answer = await ask(echo, "/v1/completions", text | {"stream": streams})
        choices = [each["choices"][0] for each in (answer.chunks if streams else [answer.json])]
        scores = [choice["logprobs"] for choice in choices]
        names = [name for each in scores for name in each["tokens"]]
        ids = [each for choice in choices for each in choice.get("token_ids", ())]
        assert names[-2:] == [f"token_id:{token_id}" for token_id in ids]
        tops = [name for each in scores for top in each["top_logprobs"][2:] for name in top]
        assert all(name.startswith("token_id:") for name in [*names, *tops])
    answer = await ask(echo, "/v1/chat/completions", chat | asked)
    entry = answer.json["choices"][0]["logprobs"]["content"][0]
    assert entry["token"] == bytes(entry["bytes"]).decode()
    for each in (entry, *entry["top_logprobs"]):
        assert each["token"].startswith("token_id:")
