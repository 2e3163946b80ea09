"""Tool calls and reasoning in /v1/chat/completions. The template is the last message's content,
which the engine echoes: so each test writes the model's output.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from aserve.parsers.registry import NO_PARSERS, ParserNames
from aserve.text.defaults import bad_word_ids
from aserve.text.load import load_tokenizer
from aserve.text.tokenizer import TextTokenizer
from aserve.tiny import MODEL_DIR
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import ask, prompts, told

TOKENIZER = load_tokenizer(MODEL_DIR)
PARSERS = ParserNames("aserve_tiny", "aserve_tiny")
TEMPLATE = "{{ messages[-1].content }}"
F: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
G: dict[str, Any] = {"type": "function", "function": {"name": "g", "parameters": {}}}
TOOLS = [F, G]
THINK = "<|think|>so<|/think|>"


def call(name: str, arguments: str = "{}") -> str:
    return f'<|tool_call|>{{"name": "{name}", "arguments": {arguments}}}<|/tool_call|>'


@pytest.fixture
async def echo() -> AsyncIterator[EchoEngine]:
    async with EchoEngine(tokenizer=TOKENIZER, template=TEMPLATE, parsers=PARSERS) as engine:
        yield engine


def body_of(output: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": output}], "tools": TOOLS, **fields}


async def message_of(echo: EchoEngine, output: str, **fields: Any) -> dict[str, Any]:
    """The choice of a whole answer, with its message."""
    answer = await told(echo, "/v1/chat/completions", body_of(output, **fields))
    choice: dict[str, Any] = answer["choices"][0]
    return choice


async def deltas_of(echo: EchoEngine, output: str, **fields: Any) -> list[dict[str, Any]]:
    body = body_of(output, stream=True, **fields)
    answer = await ask(echo, "/v1/chat/completions", body)
    assert answer.status == 200, answer.text
    return [choice for chunk in answer.chunks for choice in chunk["choices"]]


def joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of the deltas, by OpenAI's rules."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for choice in choices:
        delta = choice["delta"]
        found["content"] += delta.get("content") or ""
        found["reasoning"] += delta.get("reasoning_content") or ""
        for part in delta.get("tool_calls", []):
            if "id" in part:
                assert (part["index"], part["type"]) == (len(found["calls"]), "function")
                found["calls"].append([part["function"]["name"], part["function"]["arguments"]])
            else:
                found["calls"][part["index"]][1] += part["function"]["arguments"]
    return found | {"finish_reason": choices[-1]["finish_reason"]}


def shown(choice: dict[str, Any]) -> dict[str, Any]:
    """The same of a whole answer."""
    message = choice["message"]
    calls = message.get("tool_calls", [])
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": [[each["function"]["name"], each["function"]["arguments"]] for each in calls],
        "finish_reason": choice["finish_reason"],
    }


ARGUMENTS = '{"a": [1, "}"]}'
OUTPUTS = [
    ("hello", "hello", "", [], "stop"),
    (f"{THINK}hello", "hello", "so", [], "stop"),
    (call("f"), "", "", [["f", "{}"]], "tool_calls"),
    (
        THINK + "Wait. " + call("f", ARGUMENTS) + call("g"),
        "Wait.",
        "so",
        [["f", ARGUMENTS], ["g", "{}"]],
        "tool_calls",
    ),
    ("<|tool_call|>f()<|/tool_call|>", "<|tool_call|>f()<|/tool_call|>", "", [], "stop"),
]


def some_cuts(num_tokens: int) -> Iterator[tuple[int, ...]]:
    """How many tokens come in each step: every cut in two, and random cuts in many."""
    chance = random.Random(num_tokens)
    for cut in range(1, num_tokens):
        yield cut, num_tokens - cut
    for _ in range(12):
        cuts = sorted(chance.sample(range(1, num_tokens), min(5, num_tokens - 1)))
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, num_tokens)))


@pytest.mark.parametrize(("output", "content", "reasoning", "calls", "reason"), OUTPUTS)
async def test_each_part_of_an_output_has_its_place_wherever_a_stream_is_cut(
    echo: EchoEngine, output: str, content: str, reasoning: str, calls: Any, reason: str
) -> None:
    choice = await message_of(echo, output)
    expected = {"content": content, "reasoning": reasoning, "calls": calls, "finish_reason": reason}
    assert shown(choice) == expected
    message = choice["message"]
    assert (message["content"] is None) == (not content)
    assert message.get("reasoning", "") == reasoning
    ids = [each["id"] for each in message.get("tool_calls", [])]
    assert len(set(ids)) == len(calls)
    for runs in some_cuts(len(TOKENIZER.encode(output, with_special=False)) + 1):
        echo.scheduler.runs = runs
        deltas = await deltas_of(echo, output)
        assert joined(deltas) == expected, runs
        kinds = [set(delta["delta"]) - {"reasoning"} for delta in deltas[1:]]
        assert all(len(kind) <= 1 for kind in kinds), kinds


async def test_ids_have_the_form_that_the_templates_of_a_family_accept() -> None:
    """Mistral's templates raise for ids that are not nine letters and digits."""
    output = '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]'
    parsers = ParserNames(None, "mistral")
    async with EchoEngine(tokenizer=TOKENIZER, template=TEMPLATE, parsers=parsers) as echo:
        choice = await message_of(echo, output)
    ids = [call["id"] for call in choice["message"]["tool_calls"]]
    assert [(len(each), each.isalnum()) for each in ids] == [(9, True)] * 2
    assert len(set(ids)) == 2


async def test_a_call_that_is_cut_by_max_tokens_keeps_its_arguments(echo: EchoEngine) -> None:
    output = call("f", '{"city": "Rome"}')
    num_tokens = len(TOKENIZER.encode(output, with_special=False)) - 3
    choice = await message_of(echo, output, max_tokens=num_tokens)
    ((name, arguments),) = shown(choice)["calls"]
    assert (name, choice["finish_reason"]) == ("f", "length")
    assert '{"city": "Rome"}'.startswith(arguments)
    assert len(arguments) > 5


async def test_a_malformed_call_is_logged_without_its_text(
    echo: EchoEngine, caplog: pytest.LogCaptureFixture
) -> None:
    await message_of(echo, "<|tool_call|>secret<|/tool_call|>")
    (record,) = [each for each in caplog.records if "malformed" in each.message]
    assert record.levelname == "WARNING"
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("fields", "content", "calls"),
    [
        ({"parallel_tool_calls": False}, "", ["f"]),
        ({"tools": None}, call("f") + call("g"), []),
        ({"tool_choice": "auto"}, "", ["f", "g"]),
    ],
)
async def test_calls_come_out_as_far_as_the_request_allows(
    echo: EchoEngine, fields: dict[str, Any], content: str, calls: list[str]
) -> None:
    output = call("f") + call("g")
    whole = shown(await message_of(echo, output, **fields))
    assert (whole["content"], [name for name, _ in whole["calls"]]) == (content, calls)
    assert joined(await deltas_of(echo, output, **fields)) == whole


NAMED_G: dict[str, Any] = {"type": "function", "function": {"name": "g"}}
REQUIRED = {"mode": "required"}
ALLOWED: dict[str, Any] = {"mode": "auto", "tools": [NAMED_G]}
STRICT: dict[str, Any] = {"type": "function", "function": {"name": "f", "strict": True}}


@pytest.mark.parametrize(
    ("fields", "in_grammar", "in_prompt"),
    [
        ({}, None, "fg"),
        ({"tools": [STRICT, G]}, "fg", "fg"),
        ({"tool_choice": "required"}, "fg", "fg"),
        ({"tool_choice": NAMED_G}, "g", "fg"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}}, None, "g"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED | REQUIRED}},
            "g",
            "g",
        ),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "fg", "fg"),
        ({"response_format": {"type": "json_object"}}, "fg", "fg"),
        ({"tool_choice": "none"}, None, ""),
    ],
)
async def test_a_choice_is_a_grammar_of_the_calls_that_may_come(
    fields: dict[str, Any], in_grammar: str | None, in_prompt: str
) -> None:
    template = "{{ (tools or []) | map(attribute='function.name') | join }}"
    async with EchoEngine(
        tokenizer=TOKENIZER, template="<|user|>" + template, parsers=PARSERS
    ) as echo:
        await message_of(echo, "a", **fields)
        (request,) = echo.scheduler.admitted
        assert prompts(echo) == [in_prompt]
    grammar = request.sampling.grammar
    assert (grammar is None) == (in_grammar is None)
    if grammar is not None and in_grammar is not None:
        assert grammar.kind == "structural_tag"
        named = [name for name in "fg" if f'\\"{name}\\"' in grammar.source]
        assert named == [*in_grammar]


async def test_a_choice_that_no_parser_can_force_is_refused() -> None:
    async with EchoEngine(tokenizer=TOKENIZER, template=TEMPLATE) as echo:
        body = body_of("a", tool_choice="required")
        answer = await ask(echo, "/v1/chat/completions", body)
    assert (answer.status, answer.error["code"]) == (400, "unsupported_value")
    assert answer.error["param"] == "tool_choice"


@pytest.mark.parametrize(
    ("end", "effort", "has_reasoning"),
    [("<|think|>", None, True), ("", "low", True), ("", None, False), ("", "none", False)],
)
async def test_reasoning_comes_before_a_grammar_if_the_prompt_or_the_client_asks_for_it(
    end: str, effort: str | None, has_reasoning: bool
) -> None:
    parsers = PARSERS._replace(prompt_end=lambda _: end)
    for fields in ({"tool_choice": "required"}, {"structured_outputs": {"regex": "a+"}}):
        async with EchoEngine(tokenizer=TOKENIZER, template=TEMPLATE, parsers=parsers) as echo:
            await message_of(echo, "a", reasoning_effort=effort, **fields)
            (request,) = echo.scheduler.admitted
        assert request.sampling.grammar is not None
        assert ("<|/think|>" in request.sampling.grammar.source) == has_reasoning


async def test_tool_choice_none_forbids_the_tokens_of_calls(echo: EchoEngine) -> None:
    await message_of(echo, "a", tool_choice="none", bad_words=["no"])
    await message_of(echo, "a")
    banned, free = echo.scheduler.admitted
    markers = bad_word_ids(["<|tool_call|>", "<|/tool_call|>"], TOKENIZER)
    assert set(markers) < set(banned.bad_word_ids)
    assert [len(marker) for marker in markers] == [1, 1]
    assert not free.bad_word_ids


@pytest.mark.parametrize(
    ("fields", "reasoning", "content"),
    [
        ({}, "so", "hello"),
        ({"include_reasoning": False}, "", "hello"),
        ({"separate_reasoning": False}, "", f"{THINK}hello"),
        ({"stream_reasoning": False}, "so", "hello"),
        ({"structured_outputs": {"regex": ".*"}, "tools": None}, "", f"{THINK}hello"),
    ],
)
async def test_reasoning_is_shown_as_the_request_says(
    echo: EchoEngine, fields: dict[str, Any], reasoning: str, content: str
) -> None:
    whole = shown(await message_of(echo, f"{THINK}hello", **fields))
    assert (whole["reasoning"], whole["content"]) == (reasoning, content)
    deltas = await deltas_of(echo, f"{THINK}hello", **fields)
    assert joined(deltas) == whole
    kinds = [name for delta in deltas[1:] for name in delta["delta"]]
    assert kinds == sorted(kinds, key=lambda name: name == "content")
    pieces = [delta for delta in deltas if "reasoning" in delta["delta"]]
    assert len(pieces) <= (1 if fields == {"stream_reasoning": False} else len(reasoning))


async def test_reasoning_tokens_are_counted(echo: EchoEngine) -> None:
    answer = await told(echo, "/v1/chat/completions", body_of(f"{THINK}hello"))
    details = answer["usage"]["completion_tokens_details"]
    thought = len(TOKENIZER.encode("so", with_special=False))
    assert details == {"reasoning_tokens": thought}


async def test_an_output_begins_inside_the_reasoning_that_the_prompt_has_opened(
    echo: EchoEngine,
) -> None:
    output = "so<|/think|>hello<|think|>"  # its end is the end of the prompt
    whole = shown(await message_of(echo, output))
    assert (whole["reasoning"], whole["content"]) == ("so", "hello<|think|>")


async def test_the_parsers_are_told_by_the_server(echo: EchoEngine) -> None:
    info = (await ask(echo, "/server_info")).json
    assert (info["reasoning_parser"], info["tool_call_parser"]) == PARSERS[:2]


async def test_functions_are_the_older_form_of_tools(echo: EchoEngine) -> None:
    fields: dict[str, Any] = {"tools": None, "functions": [{"name": "f"}], "function_call": "auto"}
    output = call("f", '{"a": 1}')
    choice = await message_of(echo, output, **fields)
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "f", "arguments": '{"a": 1}'}
    assert "tool_calls" not in choice["message"]
    parts = [
        each["delta"].get("function_call", {}) for each in await deltas_of(echo, output, **fields)
    ]
    assert [part["name"] for part in parts if "name" in part] == ["f"]
    assert "".join(part.get("arguments", "") for part in parts) == '{"a": 1}'


async def test_history_in_either_form_is_rendered_alike() -> None:
    """Arguments are objects for the template, and ids join calls and results."""
    arguments = '{"a": [1]}'
    newer = [
        {
            "role": "assistant",
            "content": None,
            "reasoning": "so",
            "tool_calls": [
                {
                    "id": "call_f",
                    "type": "function",
                    "function": {"name": "f", "arguments": arguments},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_f", "name": "f", "content": "4"},
    ]
    older = [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "so",
            "function_call": {"name": "f", "arguments": arguments},
        },
        {"role": "function", "name": "f", "content": "4"},
    ]
    async with EchoEngine(tokenizer=TOKENIZER, template="{{ messages | tojson }}") as echo:
        for messages in (newer, older):
            await told(echo, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        answers = [await told(echo, "/render", {"messages": each}) for each in (newer, older)]
    assistant, result = json.loads(answers[0]["prompt"])
    assert answers[0]["prompt"] == answers[1]["prompt"]
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"a": [1]}
    assert assistant["tool_calls"][0]["id"] == result["tool_call_id"]
    assert (assistant["reasoning_content"], result["role"]) == ("so", "tool")


VARIABLES = "{{ reasoning_effort }},{{ enable_thinking }},{{ thinking }};"


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, ",,;"),
        ({"reasoning_effort": "low"}, "low,True,True;"),
        ({"reasoning_effort": "none"}, "none,False,False;"),
        ({"thinking": {"type": "disabled"}}, ",False,False;"),
        ({"reasoning_budget": 0}, ",False,False;"),
        ({"reasoning_budget": -1}, ",,;"),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"thinking": False}},
            "high,True,False;",
        ),
    ],
)
async def test_the_effort_reaches_the_template_under_the_names_of_each_family(
    fields: dict[str, Any], prompt: str
) -> None:
    async with EchoEngine(tokenizer=TOKENIZER, template=VARIABLES) as echo:
        body = {"messages": [{"role": "user", "content": "a"}], **fields}
        answer = await told(echo, "/v1/chat/completions/render", body)
    assert answer["prompt"] == prompt


TURNS = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
BEGUN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": " Once;"}]


@pytest.mark.parametrize(
    ("fields", "prompt", "prefix"),
    [
        ({}, "u:hi;a: Once;;a:", ""),
        ({"continue_final_message": True}, "u:hi;a: Once;", ""),
        ({"continue_final_message": True, "echo": True}, "u:hi;a: Once;", " Once;"),
    ],
)
async def test_an_output_continues_the_last_message(
    fields: dict[str, Any], prompt: str, prefix: str
) -> None:
    async with EchoEngine(tokenizer=TOKENIZER, template=TURNS, parsers=NO_PARSERS) as echo:
        body = {"messages": BEGUN, **fields}
        whole = await told(echo, "/v1/chat/completions", body)
        answer = await ask(echo, "/v1/chat/completions", body | {"stream": True})
    assert whole["choices"][0]["message"]["content"] == prefix + prompt
    deltas = [choice["delta"] for chunk in answer.chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == prefix + prompt


async def test_only_the_special_tokens_that_a_parser_reads_stay_in_the_text() -> None:
    """Some models' markers are special tokens, which the detokenizer drops otherwise."""
    backend = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    backend.add_special_tokens(["<|think|>", "<|/think|>"])
    tokenizer = TextTokenizer(backend, eos_ids=TOKENIZER.eos_ids)
    assert {"<|think|>", "<|user|>"} < set(tokenizer.special_texts)
    template = "<|user|><|think|>so<|/think|>{{ messages[-1].content }}<|user|>"
    for parsers, reasoning in ((PARSERS, "so"), (NO_PARSERS, "")):
        async with EchoEngine(tokenizer=tokenizer, template=template, parsers=parsers) as echo:
            choice = shown(await message_of(echo, "hello"))
        assert choice["reasoning"] == reasoning
        assert choice["content"] == ("hello" if reasoning else "sohello")
