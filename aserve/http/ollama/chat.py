"""POST /api/chat and /api/generate as in Ollama: a stream is one line of JSON for each part."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from aserve.errors import ErrorInfo
from aserve.http.delivery import json_response
from aserve.http.ollama.body import (
    ChatBody,
    GenerateBody,
    OllamaBody,
    generation_of,
    grammar_of,
    plan_of_chat,
    plan_of_prompt,
)
from aserve.http.openai.call import Call, Origin, build_call, sampling_of
from aserve.http.openai.chat_plan import ChatPlan
from aserve.http.openai.checks import check_body, check_unsupported
from aserve.http.openai.json_values import object_in
from aserve.http.openai.parsed import PLAIN, ParsedChoice, ParsePlan
from aserve.http.rendering import Output, answer, choice_id_of, field_names, parsed_whole
from aserve.http.route import post
from aserve.http.state import HttpContext, origin_of
from aserve.messages.output import OutputChunk
from aserve.messages.requests import Prompt, TextPrompt
from aserve.parsers.events import Content, ParsedEvent, Reasoning, ToolArguments, ToolCallStart

NDJSON = "application/x-ndjson"
NANOSECONDS = 1_000_000_000
NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    **{
        name: f"options.{name}"
        for name in (
            *("temperature", "top_k", "top_p", "min_p", "seed", "stop"),
            *("presence_penalty", "frequency_penalty"),
        )
    },
}
NEUTRAL_PROMPT: dict[str, tuple[object, ...]] = {
    "suffix": ("",),
    "template": ("",),
    "images": ([],),
    "context": ([],),
}


class OllamaError(msgspec.Struct):
    """Ollama's error with the code and field that aserve's other APIs have."""

    error: str
    code: str
    param: str | None


def ollama_error(info: ErrorInfo) -> bytes:
    return msgspec.json.encode(OllamaError(info.message, info.code, info.param))


async def chat(request: web.Request, context: HttpContext, body: ChatBody) -> web.StreamResponse:
    origin = origin_of(request, context)
    if not body.messages:
        return _loaded(body, origin, {"message": OllamaReply("")})
    with field_names(NAMES):
        plan = plan_of_chat(body, origin.parsers)
        call = _call_of(body, origin, plan.prompt, plan)
    return await answer(request, context, OllamaRendering(call, plan.parse, is_chat=True))


async def generate(
    request: web.Request, context: HttpContext, body: GenerateBody
) -> web.StreamResponse:
    origin = origin_of(request, context)
    if not body.prompt:
        return _loaded(body, origin, {"response": ""})
    check_unsupported(body, NEUTRAL_PROMPT)
    with field_names(NAMES):
        if body.raw:
            call = _call_of(body, origin, TextPrompt(body.prompt), None)
            return await answer(request, context, OllamaRendering(call, PLAIN, is_chat=False))
        plan = plan_of_prompt(body, origin.parsers)
        call = _call_of(body, origin, plan.prompt, plan)
    return await answer(request, context, OllamaRendering(call, plan.parse, is_chat=False))


def _call_of(body: OllamaBody, origin: Origin, prompt: Prompt, plan: ChatPlan | None) -> Call:
    generation = generation_of(body)
    check_body(generation, origin.model_names)
    sampling = sampling_of(
        generation,
        max_tokens=generation.max_tokens,
        logprobs=None,
        draw_seed=origin.draw_seed,
        defaults=origin.defaults,
    )
    if plan is None:
        sampling = msgspec.structs.replace(sampling, grammar=grammar_of(body))
    else:
        sampling = plan.constrained(sampling)
    return build_call(generation, origin, prompts=[prompt], sampling=sampling, id_prefix="")


def _loaded(body: OllamaBody, origin: Origin, empty: dict[str, Any]) -> web.Response:
    """Answers a request without a prompt, by which Ollama's clients load a model."""
    with field_names(NAMES):
        generation = generation_of(body)
        check_body(generation, origin.model_names)
    model = generation.model or origin.model_names[0]
    part = Part(model=model, created_at=now(), done=True, done_reason="load", **empty)
    return json_response(part)


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


class OllamaReply(msgspec.Struct):
    """The assistant's message, or the part of it that came."""

    content: str
    role: str = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class Part(msgspec.Struct, kw_only=True):
    """A line of a stream. The last one is `done`, and so is the answer that is not streamed. The
    durations are in nanoseconds, measured here: that of the prompt includes the wait in the queue.
    """

    model: str
    created_at: str
    done: bool
    message: OllamaReply | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaRendering:
    content_type = NDJSON
    keep_alive = b""  # a line that is no JSON would be an error to its clients
    names: Mapping[str, str] = NAMES
    answered: frozenset[str] = frozenset()

    def __init__(self, call: Call, plan: ParsePlan, *, is_chat: bool) -> None:
        self.call = call
        self._plan = plan
        self._is_chat = is_chat
        self._parsed = ParsedChoice(plan, choice_id_of(call))
        self._calls = WholeCalls()

    def events(self, index: int, chunk: OutputChunk, output: Output) -> Iterator[bytes]:
        for event in self._calls.of(self._parsed.add(chunk)):
            yield self._line(self._part([event]))
        if chunk.finish_reason is not None:
            for event in self._calls.end():
                yield self._line(self._part([event]))
            yield self._line(self._done(self._part([]), output))

    def last_events(self, outputs: list[Output]) -> Iterable[bytes]:
        return ()

    def failure(self, info: ErrorInfo) -> Iterable[bytes]:
        return (ollama_error(info) + b"\n",)

    def whole(self, outputs: list[Output]) -> Iterable[bytes]:
        calls = WholeCalls()
        events = [*calls.of(parsed_whole(self._plan, self.call, outputs[0])), *calls.end()]
        return (msgspec.json.encode(self._done(self._part(events), outputs[0])),)

    def _line(self, part: Part) -> bytes:
        return msgspec.json.encode(part) + b"\n"

    def _part(self, events: list[Content | Reasoning | WholeCall]) -> Part:
        content = "".join(event.text for event in events if isinstance(event, Content))
        thinking = "".join(event.text for event in events if isinstance(event, Reasoning))
        calls = [event.body() for event in events if isinstance(event, WholeCall)]
        part = Part(model=self.call.model, created_at=now(), done=False)
        if self._is_chat:
            part.message = OllamaReply(
                content, thinking=thinking or UNSET, tool_calls=calls or UNSET
            )
        else:
            part.response = content
            part.thinking = thinking or UNSET
        return part

    def _done(self, part: Part, output: Output) -> Part:
        part.done = True
        part.done_reason = "length" if output.finish_reason == "length" else "stop"
        part.total_duration = _nanoseconds(output.last_s - output.start_s)
        part.load_duration = 0
        part.prompt_eval_count = output.usage.prompt_tokens
        part.prompt_eval_duration = _nanoseconds(output.first_s - output.start_s)
        part.eval_count = output.usage.completion_tokens
        part.eval_duration = _nanoseconds(output.last_s - output.first_s)
        return part


def _nanoseconds(seconds: float) -> int:
    return int(seconds * NANOSECONDS)


class WholeCall(msgspec.Struct):
    """A tool call with all of its arguments, since Ollama's clients know no parts of calls."""

    index: int
    name: str
    arguments: str = ""

    def body(self) -> dict[str, Any]:
        arguments = object_in(self.arguments)
        return {"function": {"index": self.index, "name": self.name, "arguments": arguments}}


class WholeCalls:
    """Gathers the parts of each call. The other events pass."""

    def __init__(self) -> None:
        self._open: WholeCall | None = None

    def of(self, events: Iterable[ParsedEvent]) -> Iterator[Content | Reasoning | WholeCall]:
        for event in events:
            if isinstance(event, ToolArguments):
                if self._open is not None:
                    self._open.arguments += event.text
                continue
            yield from self.end()
            match event:
                case ToolCallStart(index, name):
                    self._open = WholeCall(index, name)
                case Content() | Reasoning():
                    yield event

    def end(self) -> Iterator[WholeCall]:
        if self._open is not None:
            yield self._open
            self._open = None


ROUTES = (
    post("/api/chat", ChatBody, chat, errors=ollama_error),
    post("/api/generate", GenerateBody, generate, errors=ollama_error),
)
