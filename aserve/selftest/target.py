"""The server under test, as a client sees it, and the outcomes of a check."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

import aiohttp

Json: TypeAlias = dict[str, Any]

TIMEOUT_S = 120.0
POLL_S = 0.25  # between two looks at a server that is starting
QUESTION: list[Json] = [{"role": "user", "content": "Tell me a short story about a fox."}]
NOT_THERE = frozenset({404, 405, 501})  # statuses of a route that a server does not have


class Wrong(Exception):
    """The server's answer is not what its API promises; the message says what was seen."""


class Missing(Exception):
    """The server says that it does not have the feature."""


def expect(is_right: object, seen: object) -> None:
    """Raises Wrong with what was seen instead, unless `is_right`."""
    if not is_right:
        raise Wrong(str(seen)[:300])


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        try:
            return json.loads(self.text)
        except ValueError:
            raise Wrong(f"status {self.status} with no JSON: {self.text[:100]!r}") from None

    @property
    def events(self) -> list[Json]:
        """The data of the events of a stream, without the last, which is [DONE]."""
        expect("text/event-stream" in self.headers.get("Content-Type", ""), self.headers)
        lines = [line for line in self.text.splitlines() if line.startswith("data:")]
        data = [line.removeprefix("data:").strip() for line in lines]
        return [json.loads(each) for each in data if each != "[DONE]"]


class Target:
    """Asks one server. The methods that return an answer raise Missing if it refuses the request,
    and Wrong if it fails. `starting` is called once if the server has not started yet, for which
    the target waits `wait_s` seconds.
    """

    def __init__(
        self,
        address: str,
        *,
        model: str = "",
        api_key: str = "",
        wait_s: float = 0.0,
        starting: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.model = model
        self._wait_s = wait_s
        self._starting = starting
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = aiohttp.ClientTimeout(TIMEOUT_S)
        # WHY force_close: some servers close kept-alive connections under the next request.
        self._session = aiohttp.ClientSession(
            address.rstrip("/").removesuffix("/v1"),
            headers=headers,
            timeout=timeout,
            connector=aiohttp.TCPConnector(force_close=True, limit=0),
        )

    async def __aenter__(self) -> Target:
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._session.close)
            await self._started()
            if not self.model:
                listed = (await self.ask("GET", "/v1/models")).json
                self.model = listed["data"][0]["id"]
            undo.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def ask(self, method: str, path: str, body: object = None, **more: Any) -> Reply:
        """Returns the answer, whatever its status is."""
        given = more if body is None else {"json": body, **more}
        async with self._session.request(method, path, **given) as answer:
            return Reply(answer.status, dict(answer.headers), await answer.text(errors="replace"))

    async def _started(self) -> None:
        end_s = time.monotonic() + self._wait_s
        reason = await self._not_ready()
        if reason and self._wait_s:
            self._starting(f"waiting for the server, at most {self._wait_s:g} s: {reason}")
        while reason and time.monotonic() < end_s:
            await asyncio.sleep(POLL_S)
            reason = await self._not_ready()

    async def _not_ready(self) -> str:
        """Returns why the server is not ready. One without /readyz is ready if it answers."""
        try:
            reply = await self.ask("GET", "/readyz")
        except (aiohttp.ClientError, OSError) as error:
            return str(error)
        return reply.text[:200] if reply.status == 503 else ""

    async def get(self, path: str) -> Reply:
        return _answered(await self.ask("GET", path))

    async def post(self, path: str, body: Json) -> Reply:
        return _answered(await self.ask("POST", path, {"model": self.model, **body}))

    async def chat(self, **body: Any) -> Json:
        """Greedy and short, unless `body` says otherwise."""
        answer: Json = (await self.post("/v1/chat/completions", self.chat_body(**body))).json
        return answer

    async def chat_events(self, **body: Any) -> list[Json]:
        body = self.chat_body(**body, stream=True)
        return (await self.post("/v1/chat/completions", body)).events

    async def complete(self, **body: Any) -> Json:
        given = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, **body}
        answer: Json = (await self.post("/v1/completions", given)).json
        return answer

    def chat_body(self, **body: Any) -> Json:
        return {"messages": QUESTION, "max_tokens": 24, "temperature": 0, **body}

    @asynccontextmanager
    async def opened(self, path: str, body: Json) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer that may be left before its end."""
        async with self._session.post(path, json={"model": self.model, **body}) as answer:
            yield answer

    @asynccontextmanager
    async def websocket(self, path: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        try:
            async with self._session.ws_connect(path) as socket:
                yield socket
        except aiohttp.WSServerHandshakeError as error:
            raise Missing(f"the handshake was answered with {error.status}") from None


def _answered(reply: Reply) -> Reply:
    if reply.status in NOT_THERE:
        raise Missing(f"status {reply.status}")
    if 400 <= reply.status < 500:
        raise Missing(f"refused with {reply.status}: {message_of(reply)}")
    expect(reply.status == 200, f"status {reply.status}: {reply.text[:200]}")
    return reply


def message_of(reply: Reply) -> str:
    """Returns the message of an error body, or its beginning if it has none."""
    try:
        found = json.loads(reply.text)
        return str(found["error"]["message"])[:160]
    except (ValueError, TypeError, KeyError):
        return reply.text[:160]


def text_of(answer: Json) -> str:
    """The content of the first choice of a chat."""
    return answer["choices"][0]["message"].get("content") or ""


def streamed_text(events: list[Json]) -> str:
    """The content of choice 0 of a streamed chat."""
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)
