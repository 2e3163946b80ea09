"""Sends one streamed request to an OpenAI-compatible server and times its chunks.

Times are in seconds on the client's clock: TTFT until the first chunk of the answer, ITL between
two chunks, E2EL until the end of the answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp
import msgspec


class Timings(msgspec.Struct):
    """The server's own times between two chunks."""

    itl_p50_ms: float = 0.0
    itl_p99_ms: float = 0.0


@dataclass(slots=True)
class Answer:
    """The times and token counts of one answer. `error` is not empty if the request failed."""

    ttft_s: float | None = None
    e2el_s: float = 0.0
    itls_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    timings: Timings | None = None  # of the server, for a body with `include_timings`
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """The time per output token after the first. An answer of one token has none."""
        if self.ttft_s is None or self.completion_tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.completion_tokens - 1)


async def send_request(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, object]
) -> Answer:
    """Sends a request and returns its answer. Errors do not raise; they are in `answer.error`."""
    answer = Answer()
    start_s = time.perf_counter()
    try:
        async with await _post(session, url, body) as response:
            if response.status != 200:
                answer.error = f"{response.status}: {(await response.text())[:300]}"
                return answer
            await _read(response.content, answer, start_s=start_s)
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.e2el_s = time.perf_counter() - start_s
    return answer


async def _post(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, object]
) -> aiohttp.ClientResponse:
    """Sends a request, and repeats it once if the server had closed the kept-alive connection."""
    try:
        return await session.post(url, json=body)
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
        return await session.post(url, json=body)


async def _read(lines: aiohttp.StreamReader, answer: Answer, *, start_s: float) -> None:
    """Reads the chunks. If the server sends no usage, each chunk counts as one token. If it sends
    usage in each chunk, the time to a chunk with several tokens is that of all of them: tokens
    wait for those that complete a character.
    """
    num_chunks = 0
    last_s = start_s
    async for line in lines:
        if not line.startswith(b"data:") or line.startswith(b"data: [DONE]"):
            continue
        chunk = DECODER.decode(line[5:])
        if chunk.error is not None:
            answer.error = msgspec.json.encode(chunk.error).decode()
        num_before = answer.completion_tokens
        if chunk.usage is not None:
            _count(chunk.usage, answer)
        if not chunk.choices or not chunk.choices[0].has_token:
            continue
        now_s = time.perf_counter()
        if num_chunks:
            num_new = max(answer.completion_tokens - num_before, 1) if num_before else 1
            answer.itls_s += [(now_s - last_s) / num_new] * num_new
        else:
            answer.ttft_s = now_s - start_s
        num_chunks, last_s = num_chunks + 1, now_s
    answer.completion_tokens = answer.completion_tokens or num_chunks
    if not answer.completion_tokens and not answer.error:
        answer.error = "the answer has no token"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_token(self) -> bool:
        """True for a chunk with text, and for one without that does not end the answer, because
        some tokens have no text.
        """
        delta = self.delta or _Delta()
        return bool(self.text or delta.content or delta.reasoning_content or not self.finish_reason)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    timings: Timings | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, object] | str | None = None


DECODER = msgspec.json.Decoder(_Chunk)


def _count(usage: _Usage, answer: Answer) -> None:
    details = usage.prompt_tokens_details or _Details()
    answer.prompt_tokens = usage.prompt_tokens
    answer.completion_tokens = usage.completion_tokens
    answer.cached_tokens = details.cached_tokens or 0
    answer.timings = usage.timings
