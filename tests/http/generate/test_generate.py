"""The generate endpoints of SGLang, Text Generation Inference and llama.cpp."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import msgspec
import pytest

from aserve.errors import StepError
from aserve.http.generate.body import GenerateBody, SglangSampling, TgiBody, TgiParameters
from aserve.http.generate.sglang import sglang_rendering
from aserve.http.generate.tgi import TgiRendering, tgi_call
from aserve.http.openai.call import Origin
from aserve.http.rendering import Output
from aserve.messages.base import FinishReason, pack_i32
from aserve.messages.output import OutputChunk, Usage
from aserve.messages.requests import Grammar
from aserve.messages.scored import TokenLogprob, TopLogprob
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import Answer, ask, prompts, told

TEXT = "hi 한 stop"
GREEDY = {"temperature": 0, "max_new_tokens": 50}
SCHEMA = {"type": "object"}


def events_of(answer: Answer) -> list[dict[str, Any]]:
    assert answer.status == 200, answer.text
    events = [event.removeprefix("data: ") for event in answer.events]
    return [json.loads(event) for event in events if event != "[DONE]"]


def ids_of(echo: EchoEngine, text: str) -> list[int]:
    return echo.tokenizer.encode(text, with_special=False)


async def test_sglang_answers_one_prompt_with_its_text_ids_and_counts(echo: EchoEngine) -> None:
    body = {"text": TEXT, "sampling_params": {"max_new_tokens": 50, "stop": ["sto"]}, "rid": "me"}
    answer = await told(echo, "/generate", body)
    meta = answer["meta_info"]
    assert answer["text"] == "hi 한 "
    assert answer["output_ids"] == ids_of(echo, TEXT)[: len(answer["output_ids"])]
    assert meta["id"] == "me"
    assert meta["finish_reason"] == {"type": "stop", "matched": "sto"}
    assert meta["prompt_tokens"] == len(ids_of(echo, TEXT))
    assert meta["completion_tokens"] == len(answer["output_ids"])


async def test_sglang_answers_a_batch_with_a_list_in_its_order(echo: EchoEngine) -> None:
    ids = [ids_of(echo, "one"), ids_of(echo, "two")]
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 3, "n": 2}, "rid": ["a", "b"]}
    answers = await told(echo, "/generate", body)
    assert [answer["text"] for answer in answers] == ["one", "neo", "two", "wot"]
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "a", "b", "b"]
    reason = {"type": "length", "length": 3}
    assert all(answer["meta_info"]["finish_reason"] == reason for answer in answers)
    (single,) = await told(echo, "/generate", {"text": ["one"]})
    assert single["text"] == "one"


async def test_sglang_scores_the_output_and_the_prompt_from_where_it_is_told(
    echo: EchoEngine,
) -> None:
    """The engine scores token i of the prompt as -i, and each token of the output as -0.5."""
    scored = {
        "text": "xyz",
        "sampling_params": {"max_new_tokens": 2},
        "return_logprob": True,
        "top_logprobs_num": 1,
        "return_text_in_logprobs": True,
    }
    meta = (await told(echo, "/generate", scored))["meta_info"]
    first, second, third = ids_of(echo, "xyz")
    assert meta["output_token_logprobs"] == [[-0.5, first, "x"], [-0.5, second, "y"]]
    assert meta["output_top_logprobs"] == [[[-0.5, first, "x"]], [[-0.5, second, "y"]]]
    assert "input_token_logprobs" not in meta
    meta = (await told(echo, "/generate", scored, logprob_start_len=1))["meta_info"]
    assert meta["input_token_logprobs"] == [[-1.0, second, "y"], [-2.0, third, "z"]]
    whole = (await told(echo, "/generate", scored, logprob_start_len=0))["meta_info"]
    assert whole["input_token_logprobs"][0] == [None, first, "x"]


async def test_tgi_answers_with_the_details_that_are_asked_for(echo: EchoEngine) -> None:
    parameters: dict[str, Any] = {"max_new_tokens": 50, "stop": ["sto"], "seed": 5}
    body = {"inputs": TEXT, "parameters": parameters}
    assert await told(echo, "/generate", body) == {"generated_text": "hi 한 sto"}
    parameters |= {"details": True, "decoder_input_details": True, "return_full_text": True}
    answer = await told(echo, "/generate", body)
    details = answer["details"]
    assert answer["generated_text"] == TEXT + "hi 한 sto"
    assert (details["finish_reason"], details["seed"]) == ("stop_sequence", 5)
    assert details["generated_tokens"] == len(details["tokens"])
    assert details["tokens"][0] == {
        "id": ids_of(echo, "h")[0],
        "text": "h",
        "logprob": -0.5,
        "special": False,
    }
    assert [each["logprob"] for each in details["prefill"][:3]] == [None, -1.0, -2.0]


async def test_tgi_marks_the_special_tokens_that_its_text_leaves_out(echo: EchoEngine) -> None:
    body = {"inputs": "hi", "parameters": {"details": True}}
    answer = await told(echo, "/generate", body)
    shown = [each["text"] for each in answer["details"]["tokens"] if not each["special"]]
    assert "".join(shown) == answer["generated_text"] == "hi"
    assert answer["details"]["tokens"][-1]["special"]


async def test_llama_cpp_answers_with_its_counts_and_reason(echo: EchoEngine) -> None:
    body = {"prompt": TEXT, "stop": ["sto"], "return_tokens": True, "n_probs": 1}
    answer = await told(echo, "/completion", body)
    assert (answer["content"], answer["stop"], answer["stop_type"]) == ("hi 한 ", True, "word")
    assert (answer["stopping_word"], answer["tokens_cached"]) == ("sto", 3)
    assert answer["tokens_predicted"] == len(answer["tokens"])
    assert answer["completion_probabilities"][0]["token"] == "h"
    ended = await told(echo, "/completion", {"prompt": "a"})
    assert (ended["stop_type"], ended["content"], ended["tokens"]) == ("eos", "a", [])
    cut = await told(echo, "/completions", {"prompt": ["xyz", "uvw"], "n_predict": 2})
    assert [(each["stop_type"], each["content"]) for each in cut] == [
        ("limit", "xy"),
        ("limit", "uv"),
    ]


WHOLE_AND_STREAMED: dict[str, tuple[str, dict[str, Any], str]] = {
    "sglang": ("/generate", {"text": "é한", "sampling_params": GREEDY}, "/generate"),
    "tgi": ("/", {"inputs": "é한", "parameters": {"details": True}}, "/generate_stream"),
    "llama": ("/completion", {"prompt": "é한", "return_tokens": True}, "/completion"),
}


def joined(api: str, events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client has of a stream in the end, in the fields of the whole answer."""
    last = events[-1]
    match api:
        case "sglang":
            texts = [event["text"] for event in events]
            assert all(b.startswith(a) for a, b in itertools.pairwise(texts))
            return last
        case "tgi":
            tokens = [event["token"] for event in events]
            assert [event["index"] for event in events] == list(range(1, len(events) + 1))
            assert {event["generated_text"] for event in events[:-1]} == {None}
            del last["details"]["input_length"]
            details = last["details"] | {"tokens": tokens, "prefill": []}
            details["top_tokens"] = [event["top_tokens"] for event in events]
            return {"generated_text": last["generated_text"], "details": details}
        case _:
            content = "".join(event["content"] for event in events)
            tokens = [token for event in events for token in event["tokens"]]
            return last | {"content": content, "tokens": tokens}


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    answer.pop("timings", None)
    answer.pop("generation_settings", None)
    for part in (answer.get("meta_info", {}), answer.get("details", {})):
        for name in ("e2e_latency", "id", "seed"):
            part.pop(name, None)
    return answer


@pytest.mark.parametrize("api", WHOLE_AND_STREAMED)
async def test_every_cut_of_a_stream_says_what_the_whole_answer_says(
    echo: EchoEngine, api: str
) -> None:
    path, body, stream_path = WHOLE_AND_STREAMED[api]
    whole = without_times(await told(echo, path, body))
    num_tokens = len(ids_of(echo, "é한")) + 1
    for num_cuts in range(num_tokens):
        for cuts in itertools.combinations(range(1, num_tokens), num_cuts):
            echo.scheduler.runs = tuple(
                b - a for a, b in itertools.pairwise((0, *cuts, num_tokens))
            )
            streamed = body | ({} if api == "tgi" else {"stream": True})
            events = events_of(await ask(echo, stream_path, streamed))
            assert without_times(joined(api, events)) == whole, cuts


def test_a_stream_of_tgi_keeps_no_scores_that_it_has_sent() -> None:
    """No limit of an answer's size counts them, because they are not in one answer."""
    parameters = TgiParameters(top_n_tokens=2)
    body = TgiBody(inputs="x", parameters=parameters)
    call = tgi_call(body, parameters, Origin("id", 0, ("echo",)), is_streaming=True)
    rendering, output = TgiRendering(call, body.inputs, parameters), Output()
    for text in "abc":
        entry = TokenLogprob(5, text, text.encode(), -1.0)
        chunk = OutputChunk("id-0", 0, text, pack_i32([5]), Usage(1, 1), logprobs=(entry,))
        output.add(chunk)
        [*rendering.events(0, chunk, output)]
    assert (output.text, output.logprobs) == ("abc", [])


def test_an_output_of_tgi_without_tokens_is_not_the_best_one() -> None:
    parameters = TgiParameters(best_of=2)
    body = TgiBody(inputs="x", parameters=parameters)
    call = tgi_call(body, parameters, Origin("id", 0, ("echo",)), is_streaming=False)
    outputs = [Output(), Output()]
    entry = TokenLogprob(5, "a", b"a", -1.0)
    outputs[1].add(OutputChunk("id-0", 1, "a", pack_i32([5]), Usage(1, 1), logprobs=(entry,)))
    [whole] = TgiRendering(call, body.inputs, parameters).whole(outputs)
    assert json.loads(whole)["generated_text"] == "a"


def sglang_bytes(num_tokens: int, text: str, num_top: int | None = None) -> list[int]:
    """Returns the lengths of the events of a stream, one of whose tokens comes at a time."""
    params = SglangSampling(max_new_tokens=1)
    body = GenerateBody(text="a", sampling_params=params, stream=True)
    body.return_logprob, body.top_logprobs_num = num_top is not None, num_top
    top = (TopLogprob(5, "a", b"a", -1.0),) * (num_top or 0)
    entries = () if num_top is None else (TokenLogprob(5, "a", b"a", -1.0, top),)
    rendering, output = sglang_rendering(body, Origin("id", 0, ("echo",))), Output()
    lengths: list[int] = []
    for number in range(1, num_tokens + 1):
        reason: FinishReason | None = "length" if number == num_tokens else None
        chunk = OutputChunk(
            "id-0", 0, text, pack_i32([1]), Usage(1, number), entries, finish_reason=reason
        )
        output.add(chunk)
        lengths += map(len, rendering.events(0, chunk, output))
    return lengths


@pytest.mark.parametrize("text", ["four", ""])
def test_the_bytes_of_a_cumulative_stream_grow_linearly_with_the_output(text: str) -> None:
    sizes = [sum(sglang_bytes(num_tokens, text)) for num_tokens in (20_000, 40_000)]
    assert sizes[1] < 2.2 * sizes[0]


def test_a_cumulative_stream_is_few_times_as_long_as_an_answer_with_logprobs() -> None:
    lengths = sglang_bytes(900, "four", num_top=20)
    assert sum(lengths) < 20 * lengths[-1]


CONSTRAINED = {"regex": Grammar("regex", "a+", "structured_outputs.regex")}
MAPPED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "/generate",
        {
            "text": "a",
            "sampling_params": {
                "max_new_tokens": 7,
                "min_new_tokens": 2,
                "temperature": 0.5,
                "top_p": 0.25,
                "top_k": 3,
                "min_p": 0.125,
                "sampling_seed": 9,
                "frequency_penalty": 0.5,
                "presence_penalty": 1,
                "repetition_penalty": 1.5,
                "stop_token_ids": [4],
                "ignore_eos": True,
                "skip_special_tokens": False,
                "no_stop_trim": True,
                "logit_bias": {"5": 1.5},
            },
        },
        {
            "max_tokens": 7,
            "min_tokens": 2,
            "temperature": 0.5,
            "top_p": 0.25,
            "top_k": 3,
            "min_p": 0.125,
            "seed": 9,
            "frequency_penalty": 0.5,
            "presence_penalty": 1.0,
            "repetition_penalty": 1.5,
            "stop_token_ids": (4,),
            "ignore_eos": True,
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "logit_bias": ((5, 1.5),),
        },
    ),
    ("/generate", {"text": "a"}, {"max_tokens": 128, "logprobs": None}),
    (
        "/generate",
        {"text": "a", "sampling_params": {"regex": "a+"}},
        {"grammar": CONSTRAINED["regex"]},
    ),
    (
        "/generate",
        {"text": "a", "sampling_params": {"json_schema": json.dumps(SCHEMA)}},
        {"grammar": Grammar("json_schema", json.dumps(SCHEMA), "structured_outputs.json")},
    ),
    (
        "/generate",
        {"text": "a", "sampling_params": {"ebnf": "root ::= a"}},
        {"grammar": Grammar("ebnf", "root ::= a", "structured_outputs.grammar")},
    ),
    (
        "/generate",
        {
            "inputs": "a",
            "parameters": {
                "max_new_tokens": 7,
                "temperature": 0.5,
                "top_p": 0.25,
                "top_k": 3,
                "seed": 9,
                "repetition_penalty": 1.5,
                "frequency_penalty": 0.5,
                "best_of": 2,
            },
        },
        {
            "max_tokens": 7,
            "temperature": 0.5,
            "top_p": 0.25,
            "top_k": 3,
            "seed": 9,
            "n": 2,
            "repetition_penalty": 1.5,
            "frequency_penalty": 0.5,
        },
    ),
    ("/generate", {"inputs": "a"}, {"max_tokens": 100, "temperature": 0.0}),
    ("/generate_stream", {"inputs": "a", "parameters": {"do_sample": True}}, {"temperature": 1.0}),
    (
        "/generate",
        {"inputs": "a", "parameters": {"grammar": {"type": "regex", "value": "a+"}}},
        {"grammar": CONSTRAINED["regex"]},
    ),
    (
        "/generate",
        {"inputs": "a", "parameters": {"grammar": {"type": "json", "value": SCHEMA}}},
        {"grammar": Grammar("json_schema", '{"type":"object"}', "structured_outputs.json")},
    ),
    (
        "/completion",
        {
            "prompt": "a",
            "n_predict": 7,
            "temperature": 0.5,
            "top_p": 0.25,
            "top_k": 3,
            "min_p": 0.125,
            "repeat_penalty": 1.5,
            "presence_penalty": 1,
            "seed": 9,
            "frequency_penalty": 0.5,
            "logit_bias": [[5, 1.5], [6, False]],
        },
        {
            "max_tokens": 7,
            "temperature": 0.5,
            "top_p": 0.25,
            "top_k": 3,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "presence_penalty": 1.0,
            "frequency_penalty": 0.5,
            "seed": 9,
            "logit_bias": ((5, 1.5), (6, -100.0)),
        },
    ),
    ("/completion", {"prompt": "a", "n_predict": -1}, {"max_tokens": 511}),
    (
        "/completion",
        {"prompt": "a", "json_schema": SCHEMA},
        {"grammar": Grammar("json_schema", '{"type":"object"}', "structured_outputs.json")},
    ),
]


@pytest.mark.parametrize(("path", "body", "expected"), MAPPED)
async def test_each_parameter_reaches_the_engine(
    echo: EchoEngine, path: str, body: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert (await ask(echo, path, body)).status == 200
    given = msgspec.structs.asdict(echo.scheduler.admitted[-1].sampling)
    assert {name: given[name] for name in expected} == expected
    assert prompts(echo)[-1] == "a"


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("/generate", {}, "missing_required_parameter", "text"),
    ("/generate", {"text": "a", "input_ids": [1]}, "missing_required_parameter", "text"),
    ("/generate", {"text": []}, "empty_array", "text"),
    (
        "/generate",
        {"text": "a", "sampling_params": {"heat": 1}},
        "invalid_type",
        "sampling_params",
    ),
    ("/generate", {"text": "a", "image_data": "x"}, "unsupported_parameter", "image_data"),
    (
        "/generate",
        {"text": "a", "return_hidden_states": True},
        "unsupported_parameter",
        "return_hidden_states",
    ),
    ("/generate", {"text": ["a", "b"], "rid": ["x", "x"]}, "invalid_value", "rid"),
    (
        "/generate",
        {"text": ["a", "b"], "sampling_params": [{}, {"n": 2}]},
        "unsupported_value",
        "sampling_params",
    ),
    (
        "/generate",
        {"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}},
        "invalid_value",
        "ebnf",
    ),
    (
        "/generate",
        {"text": "a", "sampling_params": {"max_new_tokens": -1}},
        "integer_below_min_value",
        "sampling_params.max_new_tokens",
    ),
    (
        "/generate",
        {"text": "a", "sampling_params": {"stop_regex": "a"}},
        "unsupported_parameter",
        "sampling_params.stop_regex",
    ),
    ("/generate", {"text": "a", "parameters": {}}, "invalid_value", "parameters"),
    ("/generate", {"inputs": "a", "sampling_params": {}}, "invalid_value", "inputs"),
    (
        "/generate",
        {"inputs": "a", "parameters": {"watermark": True}},
        "unsupported_parameter",
        "parameters.watermark",
    ),
    (
        "/generate",
        {"inputs": "a", "parameters": {"typical_p": 0.5}},
        "unsupported_parameter",
        "parameters.typical_p",
    ),
    (
        "/generate",
        {"inputs": "a", "parameters": {"grammar": {"type": "xml", "value": ""}}},
        "invalid_value",
        "parameters.grammar",
    ),
    (
        "/generate_stream",
        {"inputs": "a", "parameters": {"decoder_input_details": True}},
        "invalid_value",
        "parameters.decoder_input_details",
    ),
    (
        "/generate_stream",
        {"inputs": "a", "parameters": {"max_new_tokens": 0}},
        "integer_below_min_value",
        "parameters.max_new_tokens",
    ),
    ("/completion", {"prompt": "a", "mirostat": 2}, "unsupported_parameter", "mirostat"),
    ("/completion", {"prompt": "a", "grammar": "x", "json_schema": {}}, "invalid_value", "grammar"),
    (
        "/completion",
        {"prompt": "a", "repeat_penalty": 0},
        "decimal_below_min_value",
        "repeat_penalty",
    ),
]


@pytest.mark.parametrize(("path", "body", "code", "param"), REFUSED)
async def test_what_cannot_be_done_is_refused_with_the_name_of_the_apis_field(
    echo: EchoEngine, path: str, body: dict[str, Any], code: str, param: str
) -> None:
    answer = await ask(echo, path, body)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, code, param)
    assert not echo.scheduler.admitted
    if "inputs" in body:
        assert answer.json["error_type"] == "validation"


async def test_a_failing_request_ends_its_stream_in_the_shape_of_its_api(
    echo: EchoEngine,
) -> None:
    """The error comes after the first event, when the status is already sent."""
    bodies: dict[str, dict[str, Any]] = {
        "/generate": {"text": "abc", "stream": True},
        "/generate_stream": {"inputs": "abc"},
        "/completion": {"prompt": "abc", "stream": True},
    }
    echo.scheduler.is_paused = True
    for path, body in bodies.items():
        asked = asyncio.ensure_future(echo.web.post(path, json=body))
        await echo.until(lambda: bool(echo.scheduler.live))
        echo.scheduler.step()
        echo.scheduler.step()
        async with await asked as answer:
            echo.scheduler.fail(StepError("the step failed").info())
            text = (await answer.text()).replace("data: [DONE]\n\n", "")
        *_, last, _ = text.split("\n\n")
        error = json.loads(last.removeprefix("data: "))["error"]
        assert "the step failed" in (error if path == "/generate_stream" else error["message"])


async def test_the_descriptions_have_what_clients_read(echo: EchoEngine) -> None:
    info = (await ask(echo, "/info")).json
    assert (info["model_id"], info["max_total_tokens"], info["router"]) == ("echo", 512, "aserve")
    props = (await ask(echo, "/props")).json
    assert props["default_generation_settings"]["n_ctx"] == 512
