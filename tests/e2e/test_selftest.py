"""`aserve selftest` passes against this server, and each of its checks fails against a server that
is wrong in one way: a proxy in front of this one, with a defect.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from aserve.cli import main
from aserve.config import SelftestOptions
from aserve.selftest.run import CHECKS, Result, run_checks
from tests.e2e.server_process import ServerProcess

Body = dict[str, Any]
NAMES = [check.__name__ for checks in CHECKS.values() for check in checks]
CUT: list[Body] = [{"role": "user", "content": "cut"}]
OFF = {"keeps_files"}  # the server has no --files-dir


@dataclass(frozen=True)
class Defect:
    """What a wrong server does to the bodies that it gets and to the answers that it gives."""

    asked: Callable[[Body], Body] = lambda body: body
    answered: Callable[[str], str] = lambda text: text
    status: int | None = None
    delay_s: float = 0.0  # of each answer that is not streamed


def ignores(*names: str, **others: Any) -> Defect:
    """Some fields have no effect, or the one of `others`."""
    return Defect(lambda body: {k: v for k, v in body.items() if k not in names} | others)


def says(pattern: str, instead: str) -> Defect:
    return Defect(answered=lambda text: re.sub(pattern, instead, text))


def without_parts(body: Body) -> Body:
    content = body["messages"][0]["content"]
    return body if isinstance(content, str) else body | {"messages": CUT}


OK = Defect(status=200)
UNFORMED = says('"message"', '"reason"')
DEFECTS: dict[str, Defect] = {
    "lists_models": says('"object":"list"', '"object":"no"'),
    "shows_one_model": says('"object":"model"', '"object":"no"'),
    "answers_a_chat": says('"role":"assistant"', '"role":"user"'),
    "counts_tokens": says(r'"total_tokens":\d+', '"total_tokens":1'),
    "stops_at_max_tokens": ignores(max_tokens=60),
    "knows_max_completion_tokens": ignores(max_completion_tokens=60),
    "reads_content_parts": Defect(without_parts),
    "reads_a_conversation": Defect(lambda body: body | {"messages": body["messages"][:1]}),
    "gives_several_choices": ignores("n"),
    "stops_before_a_stop_string": ignores("stop"),
    "streams_the_same_text": says(r"\[DONE\]", "{}"),
    "ends_a_stream_once": says('"finish_reason":null', '"finish_reason":"stop"'),
    "streams_usage": ignores("stream_options"),
    "never_streams_a_stop_string": ignores("stop"),
    "streams_characters_whole": says("한", "\ufffd"),
    "is_greedy_at_temperature_0": ignores(temperature=1.5),
    "repeats_a_seed": ignores("seed"),
    "samples_with_other_seeds": ignores("seed", temperature=0),
    "takes_a_tiny_top_p_for_greedy": ignores("top_p"),
    "takes_top_k_1_for_greedy": ignores("top_k"),
    "applies_a_logit_bias": ignores("logit_bias"),
    "applies_penalties": ignores("frequency_penalty", "presence_penalty"),
    "gives_logprobs": says('"logprob":-', '"logprob":1'),
    "spells_the_text_in_logprobs": says(r'"bytes":\[', '"bytes":[0,'),
    "gives_logprobs_of_a_completion": says(r'"token_logprobs":\[', '"token_logprobs":[-1,'),
    "completes_a_text": says("text_completion", "no"),
    "completes_a_list_of_texts": says('"index":1', '"index":0'),
    "completes_token_ids": says('"prompt_tokens":3', '"prompt_tokens":4'),
    "echoes_a_prompt": ignores("echo"),
    "streams_a_completion": says('"text":"', '"text":"x'),
    "calls_a_required_tool": says("get_weather", "get_rain"),
    "calls_a_named_tool": says("get_time", "get_weather"),
    "calls_no_tool_if_told_so": ignores(tool_choice="required"),
    "may_call_a_tool": Defect(
        lambda body: body | {"tool_choice": "required"},
        lambda text: text.replace('"arguments":"', '"arguments":"x'),
    ),
    "streams_a_tool_call": says("city", "town"),
    "reads_the_result_of_a_tool": says('"role":"assistant"', '"role":"tool"'),
    "writes_json": ignores("response_format", max_tokens=20),
    "follows_a_schema": ignores("response_format", max_tokens=20),
    "streams_by_a_schema": ignores("response_format", max_tokens=20),
    "follows_a_regex": ignores("structured_outputs"),
    "takes_one_of_the_choices": ignores("structured_outputs"),
    "follows_a_grammar": ignores("structured_outputs"),
    "refuses_broken_json": UNFORMED,
    "refuses_a_chat_without_messages": UNFORMED,
    "refuses_messages_of_a_wrong_type": Defect(status=500),
    "refuses_a_temperature_of_99": ignores("temperature"),
    "refuses_negative_max_tokens": ignores(max_tokens=2),
    "refuses_n_of_0": ignores("n"),
    "refuses_a_top_p_of_2": ignores("top_p"),
    "refuses_a_broken_schema": ignores("response_format"),
    "refuses_a_stream_with_a_status": OK,
    "refuses_an_unknown_model": ignores("model"),
    "refuses_a_prompt_beyond_the_context": ignores(messages=CUT),
    "refuses_deep_json": Defect(status=500),
    "answers_unknown_paths_with_404": OK,
    "answers_many_at_once": says(r'"content":"(\\.|[^"\\])*"', '"content":""'),
    "frees_what_clients_leave": Defect(lambda body: body | {"max_tokens": 4}, delay_s=0.3),
    "answers_a_long_prompt": says(r'"prompt_tokens":\d+', '"prompt_tokens":9'),
    "finds_a_prompt_in_its_cache": says(r'"cached_tokens":\d+', '"cached_tokens":0'),
    "creates_a_response": says('"object":"response"', '"object":"no"'),
    "streams_a_response": says("response.created", "response.begun"),
    "goes_on_from_a_response": ignores("previous_response_id"),
    "answers_over_a_websocket": Defect(),
    "answers_messages": says('"type":"message"', '"type":"no"'),
    "streams_messages": says("message_stop", "message_end"),
    "embeds_texts": says('"index":1', '"index":0'),
    "embeds_in_base64": ignores("encoding_format"),
    "tells_its_health": Defect(status=500),
    "has_metrics": says("# TYPE", "# KIND"),
    "describes_its_api": says('"schema"', '"scheme"'),
    "tokenizes_and_back": says('"prompt":"', '"prompt":"x'),
    "keeps_files": Defect(),
}


class WrongServer:
    """Passes requests on, with a defect. It loses files, and fails on its websocket. Each stream
    that a client leaves delays all later answers by the defect's `delay_s`.
    """

    def __init__(self, address: str, defect: Defect) -> None:
        self._address = address
        self._defect = defect
        self._num_streams = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return await self._fail_on(request)
        if request.path.startswith("/v1/files"):
            return web.json_response({"id": "lost"})
        data, is_streaming = await request.read(), False
        try:
            body = self._defect.asked(json.loads(data))
            data, is_streaming = json.dumps(body).encode(), bool(body.get("stream"))
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
            pass  # it is passed on as it is
        await asyncio.sleep(self._num_streams * self._defect.delay_s)
        self._num_streams += is_streaming
        headers = {"Content-Type": request.headers.get("Content-Type", "")}
        async with (
            aiohttp.ClientSession(self._address) as session,
            session.request(request.method, request.path_qs, data=data, headers=headers) as answer,
        ):
            kind = answer.headers["Content-Type"].partition(";")[0]
            text = self._defect.answered(await answer.text())
            status = self._defect.status or answer.status
            return web.Response(text=text, status=status, content_type=kind)

    async def _fail_on(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_str('{"type": "error"}')
        return socket


async def results_of(address: str, only: str | None = None) -> dict[str, Result]:
    options = SelftestOptions(against=address, only=only)
    return {result.check: result for result in await run_checks(options)}


async def test_every_check_passes_against_this_server(server: ServerProcess) -> None:
    results = await results_of(server.address)
    assert list(results) == NAMES
    wrong = {name: each for name, each in results.items() if each.outcome != "pass"}
    assert wrong.keys() == OFF, wrong
    assert all(wrong[name].outcome == "off" for name in OFF)


def test_there_is_a_defect_for_every_check() -> None:
    assert DEFECTS.keys() == set(NAMES)
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("name", NAMES)
async def test_a_check_fails_against_a_wrong_server(name: str, server: ServerProcess) -> None:
    app = web.Application(client_max_size=1 << 24)
    wrong = WrongServer(server.address, DEFECTS[name])
    app.router.add_route("*", "/{path:.*}", wrong.answer)
    async with TestServer(app) as proxy:
        address = str(proxy.make_url("")).rstrip("/")
        results = await run_checks(SelftestOptions(against=address, model="aserve-tiny", only=name))
    assert [result.outcome for result in results] == ["fail"], results


def test_the_command_counts_what_fails(
    server: ServerProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["selftest", "--against", server.address, "--only", "models"]) == 0
    assert "2 pass, 0 off, 0 fail" in capfd.readouterr().out
    assert main(["selftest", "--against", server.address, "--only", "nothing"]) == 2
    assert main(["selftest", "--against", "http://127.0.0.1:1", "--wait", "0"]) == 2


async def test_a_server_that_starts_is_waited_for() -> None:
    statuses = [503, 503, 404]
    told: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/readyz":
            return web.Response(status=statuses.pop(0), text="loading the model")
        return web.json_response({"object": "list", "data": [{"id": "a"}]})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        options = SelftestOptions(
            against=str(server.make_url("")).rstrip("/"), only="lists_models", wait=5
        )
        [result] = await run_checks(options, starting=told.append)
    assert (result.outcome, statuses) == ("pass", [])
    assert [line for line in told if "loading the model" in line] == told != []
