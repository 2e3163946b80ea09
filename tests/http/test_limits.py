"""Every limit that /server_info shows is the one that is enforced."""

from __future__ import annotations

from typing import Any

import pytest

from aserve.http.openai.limits import RANGES
from aserve.http.routes import ROUTES
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import ask

MESSAGES = [{"role": "user", "content": "a"}]
PROMPT, CHAT, INPUT = {"prompt": "a", "max_tokens": 1}, {"messages": MESSAGES}, {"input": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}
GRAMMAR = "structured_outputs"
KIND: Any = {
    # Limits by group and name, each with a body that has `n` of what it bounds.
    ("items", "stop"): ("/v1/completions", lambda n: PROMPT | {"stop": ["b"] * n}),
    ("items", "stop_token_ids"): (
        "/v1/completions",
        lambda n: PROMPT | {"stop_token_ids": [1] * n},
    ),
    ("items", "logit_bias"): (
        "/v1/completions",
        lambda n: PROMPT | {"logit_bias": {str(i): 0 for i in range(n)}},
    ),
    ("items", "allowed_token_ids"): (
        "/v1/completions",
        lambda n: PROMPT | {"allowed_token_ids": [1] * n},
    ),
    ("items", "bad_words"): ("/v1/completions", lambda n: PROMPT | {"bad_words": ["b"] * n}),
    ("items", "tools"): ("/v1/chat/completions", lambda n: CHAT | {"tools": [TOOL] * n}),
    ("items", "metadata"): (
        "/v1/responses",
        lambda n: INPUT | {"metadata": {str(i): "a" for i in range(n)}},
    ),
    ("items", "conversation"): ("/v1/responses", lambda n: {"input": MESSAGES * n}),
    ("characters", "stop"): ("/v1/completions", lambda n: PROMPT | {"stop": "b" * n}),
    ("characters", "bad_words"): ("/v1/completions", lambda n: PROMPT | {"bad_words": ["b" * n]}),
    ("characters", "cache_salt"): ("/v1/completions", lambda n: PROMPT | {"cache_salt": "b" * n}),
    ("characters", "metadata_key"): (
        "/v1/responses",
        lambda n: INPUT | {"metadata": {"b" * n: "a"}},
    ),
    ("characters", "metadata_value"): (
        "/v1/responses",
        lambda n: INPUT | {"metadata": {"a": "b" * n}},
    ),
    ("depth", "body"): ("/v1/completions", lambda n: PROMPT | {"more": nested(n - 1)}),
    ("depth", "template_values"): (
        "/v1/chat/completions",
        lambda n: CHAT | {"chat_template_kwargs": {"more": nested(n)}},
    ),
    ("depth", "json_schema"): (
        "/v1/completions",
        lambda n: PROMPT | {GRAMMAR: {"json": {"enum": nested(n - 1)}}},
    ),
    ("body", "fields"): ("/v1/completions", lambda n: PROMPT | {str(i): 1 for i in range(n - 2)}),
    ("body", "arrays_and_objects"): ("/v1/completions", lambda n: PROMPT | {"more": [[]] * n}),
    ("body", "members"): ("/v1/completions", lambda n: PROMPT | {"more": dict.fromkeys(range(n))}),
    ("body", "values"): ("/v1/completions", lambda n: PROMPT | {"more": [1] * n}),
    ("body", "exponents"): ("/v1/completions", lambda n: PROMPT | {"more": [1e300] * n}),
    ("requests", "sequences"): ("/v1/completions", lambda n: {"prompt": ["a"] * n}),
}


async def shown_by(echo: EchoEngine) -> Any:
    return (await ask(echo, "/server_info")).json["limits"]


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize("key", KIND, ids=" ".join)
async def test_one_more_than_a_limit_is_refused_with_it(
    echo: EchoEngine, key: tuple[str, str]
) -> None:
    group, name = key
    limit = (await shown_by(echo))[group][name]
    path, body = KIND[key]
    answer = await ask(echo, path, body(limit + 1))
    assert answer.status == 400, answer.text
    assert str(limit) in answer.error["message"].replace(",", "")
    if limit <= 256:
        assert (await ask(echo, path, body(limit))).status == 200


@pytest.mark.parametrize("name", RANGES)
async def test_a_number_outside_its_limits_is_refused_by_its_name(
    echo: EchoEngine, name: str
) -> None:
    low, high = (await shown_by(echo))["numbers"][name]
    fields = {"prompt": "a"} | CHAT | INPUT
    for value in (low - 1, high + 1):
        if name.startswith("X-"):
            answer = await ask(echo, "/v1/completions", PROMPT, headers={name: str(value)})
        else:
            route = next(each for each in ROUTES if each.body and name in fields_of(each.body))
            answer = await ask(echo, route.path, fields | {name: value})
        assert (answer.status, answer.error["param"]) == (400, name), value


def fields_of(body: type[Any]) -> tuple[str, ...]:
    fields: tuple[str, ...] = body.__struct_fields__
    return fields


async def test_the_size_of_a_body_is_shown(echo: EchoEngine) -> None:
    limit = (await shown_by(echo))["body"]["bytes"]
    assert (await ask(echo, "/v1/completions", b"[" * (limit + 1))).status == 413
