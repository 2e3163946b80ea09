"""Answers a call in the format of an API other than OpenAI's.

Such an API has a body record, a function from the body to a `Call`, and a `Rendering`. Streamed and
whole answers are made from the same outputs, so that they agree.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import msgspec
from aiohttp import web

from aserve.errors import AserveError, ErrorInfo
from aserve.http.delivery import closer_of, send_json
from aserve.http.errors import RequestFailed
from aserve.http.openai.answers import ids_of
from aserve.http.openai.call import Call
from aserve.http.openai.parsed import ParsedChoice, ParsePlan
from aserve.http.sse import SseWriter
from aserve.http.state import HttpContext
from aserve.messages.base import FinishReason
from aserve.messages.output import OutputChunk, Usage
from aserve.messages.scored import PromptToken, TokenLogprob
from aserve.parsers.events import ParsedEvent, joined
from aserve.request_stream import RequestStream


class Output:
    """The output of one sequence so far. `logprobs` and `prompt` stay empty unless the sampling
    parameters ask for them. The times are those of time.monotonic.
    """

    __slots__ = (
        *("_texts", "_token_ids", "error", "finish_reason", "first_s", "last_s", "logprobs"),
        *("prompt", "prompt_tail", "start_s", "stop_reason", "text_len", "usage"),
    )

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids = bytearray()
        self.text_len = 0  # characters
        self.logprobs: list[TokenLogprob] = []
        self.prompt: list[PromptToken] = []
        self.prompt_tail = ""
        self.usage = Usage()
        self.error: ErrorInfo | None = None  # why it ended, if its answer goes on
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.start_s = self.first_s = self.last_s = time.monotonic()

    def add(self, chunk: OutputChunk) -> None:
        self.last_s = time.monotonic()
        if not self.usage.completion_tokens:
            self.first_s = self.last_s
        self._texts.append(chunk.text)
        self.text_len += len(chunk.text)
        self._token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.prompt_tail = self.prompt_tail or chunk.prompt_tail
        if chunk.prompt is not None:
            self.prompt += chunk.prompt.tokens
        self.error = chunk.error
        if chunk.error is None:
            self.usage = chunk.usage
        self.finish_reason = chunk.finish_reason
        self.stop_reason = chunk.stop_reason

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def token_ids(self) -> list[int]:
        return ids_of(bytes(self._token_ids))


def parsed_whole(plan: ParsePlan, call: Call, output: Output) -> list[ParsedEvent]:
    """Returns the events of a whole output. The parser makes the same of it as of its parts."""
    whole = OutputChunk(
        request_id=call.requests[0].request_id,
        child=0,
        text=output.text,
        token_ids=b"",
        usage=output.usage,
        finish_reason=output.finish_reason,
        prompt_tail=output.prompt_tail,
    )
    return joined(ParsedChoice(plan, choice_id_of(call)).add(whole))


def choice_id_of(call: Call) -> str:
    """Returns the id from which the ids of tool calls are derived, of a call with one choice."""
    return f"{call.call_id}/0"


class Rendering(Protocol):
    """Renders the answer of one call. Events are framed: they are the bytes of the stream."""

    call: Call
    content_type: str  # of a stream
    keep_alive: bytes  # what a silent stream writes; b"" writes nothing
    names: Mapping[str, str]  # this API's names of the fields that errors name
    answered: frozenset[str]  # codes of errors that end an output, but not the answer

    def events(self, index: int, chunk: OutputChunk, output: Output) -> Iterable[bytes]:
        """Returns the events of a chunk, which `output` includes already."""

    def last_events(self, outputs: list[Output]) -> Iterable[bytes]:
        """Returns the events at the end of a stream."""

    def failure(self, info: ErrorInfo) -> Iterable[bytes]:
        """Returns the last events of a stream that fails."""

    def whole(self, outputs: list[Output]) -> Iterable[bytes]:
        """Returns the pieces of an answer that is not streamed."""


def one_or_list(values: Iterable[msgspec.Struct], *, is_list: bool) -> Iterator[bytes]:
    """Yields the JSON of the values as a list, or that of the only one."""
    for index, value in enumerate(values):
        if is_list:
            yield b"," if index else b"["
        yield msgspec.json.encode(value)
    if is_list:
        yield b"]"


async def answer(
    request: web.Request, context: HttpContext, rendering: Rendering
) -> web.StreamResponse:
    """Answers the call. A client that disconnects cancels this handler, and so its requests."""
    refusal = context.state.refusal()
    if refusal is not None:
        raise refusal
    outputs = [Output() for _ in range(rendering.call.num_sequences)]
    request_stream = context.gateway.open(*rendering.call.requests)
    try:
        if rendering.call.is_streaming:
            request_stream.bound_unread(closer_of(request))
            return await _stream(request, context, request_stream, rendering, outputs)
        async for chunk in request_stream:
            error = _error_of(chunk, rendering)
            if error is not None:
                raise RequestFailed(error)
            for index in _receivers(chunk, rendering.call, outputs):
                outputs[index].add(chunk)
        pieces = rendering.whole(outputs)
        return await send_json(request, pieces, timeout_s=context.options.write_timeout)
    finally:
        request_stream.cancel()


async def _stream(
    request: web.Request,
    context: HttpContext,
    request_stream: RequestStream,
    rendering: Rendering,
    outputs: list[Output],
) -> web.StreamResponse:
    """Streams the answer. The status line waits for the first chunk, so that a refusal has its own
    status.
    """
    writer = SseWriter(
        request, timeout_s=context.options.write_timeout, content_type=rendering.content_type
    )

    async def fail(info: ErrorInfo) -> None:
        await writer.write(rendering.failure(info))
        await writer.end()

    def send_at_once(chunk: OutputChunk) -> bool:
        direct = writer.direct
        if direct is None or not direct.takes(chunk):
            return False
        direct.write(b"".join(_events([chunk], rendering, outputs)))
        return True

    offer = send_at_once if rendering.call.num_sequences == 1 else None
    async for chunks in request_stream.batches(idle_s=context.keep_alive_s, offer=offer):
        errors = (_error_of(chunk, rendering) for chunk in chunks)
        failed = next((error for error in errors if error is not None), None)
        if not writer.response.prepared:
            if failed is not None:
                raise RequestFailed(failed)
            await writer.start(fail)
        pieces = list(_events(chunks, rendering, outputs))
        await writer.write(pieces if chunks else (rendering.keep_alive,))
        if failed is not None:
            await fail(failed)
            return writer.response
    await writer.write(rendering.last_events(outputs))
    await writer.end()
    return writer.response


def _events(
    chunks: list[OutputChunk], rendering: Rendering, outputs: list[Output]
) -> Iterator[bytes]:
    for chunk in chunks:
        if _error_of(chunk, rendering) is None:
            for index in _receivers(chunk, rendering.call, outputs):
                outputs[index].add(chunk)
                yield from rendering.events(index, chunk, outputs[index])


def _receivers(chunk: OutputChunk, call: Call, outputs: list[Output]) -> list[int]:
    """Returns the sequences that a chunk is about: an error ends all sequences of its request that
    have not ended before.
    """
    index = call.index_of(chunk)
    if chunk.error is None:
        return [index]
    children = range(index, index + call.num_children)
    return [each for each in children if outputs[each].finish_reason is None]


def _error_of(chunk: OutputChunk, rendering: Rendering) -> ErrorInfo | None:
    if chunk.error is None or chunk.error.code in rendering.answered:
        return None
    return renamed(chunk.error, rendering.names)


@contextmanager
def field_names(names: Mapping[str, str]) -> Iterator[None]:
    """Errors of the code inside name the fields of this API."""
    try:
        yield
    except AserveError as error:
        raise RequestFailed(renamed(error.info(), names)) from None


def renamed(info: ErrorInfo, names: Mapping[str, str]) -> ErrorInfo:
    """Replaces the name of the field in an error. `names` maps the first part of a path."""
    first, dot, rest = (info.param or "").partition(".")
    name = names.get(first)
    if name is None:
        return info
    param = f"{name}{dot}{rest}"
    message = info.message.replace(f"'{info.param}'", f"'{param}'")
    return msgspec.structs.replace(info, param=param, message=message)
