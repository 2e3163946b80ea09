"""Limits the requests and tokens per minute of each client, by token buckets.

A bucket holds the limit of a minute and refills evenly. Tokens are charged by an estimate when a
request comes, at most a full bucket, and corrected when its answer has ended. The clock of
`RateLimits` is an argument.
"""

from __future__ import annotations

import math
import re
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET

from aserve.errors import UNDECODABLE, ErrorInfo
from aserve.http.errors import ErrorFields, RequestFailed, error_fields
from aserve.router.request_facts import facts_of

MAX_CLIENTS = 1 << 16  # whose buckets are kept; the one that was idle longest is full again
MINUTE_S = 60.0
REQUESTS = ("response.create", "response.fork")  # messages of a websocket that make tokens
END = re.compile(r'"type": ?"response\.(completed|incomplete|failed)"')
TOTAL = re.compile(r'"total_tokens": ?(\d{1,15})(?!\d)')


class Bucket:
    __slots__ = ("_at_s", "_level", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._level = float(limit)
        self._at_s = -math.inf

    def level(self, now_s: float) -> float:
        """Refills the bucket up to now."""
        refill = (now_s - self._at_s) * self.limit / MINUTE_S
        self._level = min(float(self.limit), self._level + refill)
        self._at_s = now_s
        return self._level

    def take(self, amount: float) -> None:
        self._level = min(float(self.limit), self._level - amount)

    def wait_s(self, amount: float, now_s: float) -> float:
        """Returns the seconds until the bucket holds the amount, or is full if that is less."""
        missing = min(amount, self.limit) - self.level(now_s)
        return max(0.0, missing) * MINUTE_S / self.limit


@dataclass(frozen=True, slots=True)
class RateLimits:
    """`limits` are `requests` and `tokens` per minute; one that is left out does not apply."""

    limits: dict[str, int]
    _clients: OrderedDict[str, dict[str, Bucket]] = field(default_factory=OrderedDict)

    def admit(self, client: str, num_tokens: int, now_s: float) -> int:
        """Charges a request, and returns the tokens that it was charged for. Raises a 429 that says
        when to come again if it is over a limit.
        """
        buckets = self._buckets(client)
        amounts = {"requests": 1, "tokens": num_tokens}
        waits = {kind: bucket.wait_s(amounts[kind], now_s) for kind, bucket in buckets.items()}
        for kind, wait_s in waits.items():
            if wait_s > 0:
                raise RequestFailed(_too_many(kind, buckets[kind], amounts[kind], wait_s))
        charged = {kind: min(amounts[kind], bucket.limit) for kind, bucket in buckets.items()}
        for kind, bucket in buckets.items():
            bucket.take(charged[kind])
        return charged.get("tokens", 0)

    def correct(self, client: str, *, charged: int, used: int) -> None:
        """Replaces the charge of a request by the tokens that it has used."""
        bucket = self._buckets(client).get("tokens")
        if bucket is not None:
            bucket.take(used - charged)

    def headers(self, client: str, now_s: float) -> dict[str, str]:
        """Returns the headers in which OpenAI tells a client its limits."""
        told = {}
        for kind, bucket in self._buckets(client).items():
            told[f"x-ratelimit-limit-{kind}"] = str(bucket.limit)
            told[f"x-ratelimit-remaining-{kind}"] = str(max(0, int(bucket.level(now_s))))
            told[f"x-ratelimit-reset-{kind}"] = f"{bucket.wait_s(bucket.limit, now_s):.3f}s"
        return told

    def _buckets(self, client: str) -> dict[str, Bucket]:
        buckets = self._clients.get(client)
        if buckets is None:
            buckets = {kind: Bucket(limit) for kind, limit in self.limits.items()}
            self._clients[client] = buckets
        self._clients.move_to_end(client)
        if len(self._clients) > MAX_CLIENTS:
            self._clients.popitem(last=False)
        return buckets


class SocketLimits:
    """The rate limits of the requests in one websocket (OpenAI's /v1/responses). Each is charged in
    advance, and the end of an answer corrects the oldest charge.
    """

    def __init__(self, rates: RateLimits, client: str, on_refusal: Callable[[], None]) -> None:
        self._rates = rates
        self._client = client
        self._on_refusal = on_refusal
        self._charged: deque[int] = deque()

    def asked(self, text: str) -> str | None:
        """Returns the error event of a request that is over a limit."""
        try:
            envelope = msgspec.json.decode(text, type=_Envelope)
        except UNDECODABLE:
            return None
        if envelope.type not in REQUESTS:
            return None
        try:
            num_tokens = facts_of(text.encode()).num_tokens
            self._charged.append(self._rates.admit(self._client, num_tokens, time.monotonic()))
        except RequestFailed as refusal:
            self._on_refusal()
            event = _ErrorEvent(refusal.info.status, error_fields(refusal.info), envelope.stream_id)
            return msgspec.json.encode(event).decode()
        return None

    def answered(self, text: str) -> None:
        """An answer without a usage costs what was charged.

        WHY: so does an error, and every usage counts: a client that makes an error, or reads an old
        answer again, would get back the charge of a request that runs.
        """
        if END.search(text) is not None:
            charged = self._charged.popleft() if self._charged else 0
            told = TOTAL.findall(text)
            self._rates.correct(
                self._client, charged=charged, used=int(told[-1]) if told else charged
            )


class _Envelope(msgspec.Struct):
    type: Any = None
    stream_id: Any = UNSET


class _ErrorEvent(msgspec.Struct):
    status: int
    error: ErrorFields
    stream_id: Any = UNSET
    type: str = "error"


def _too_many(kind: str, bucket: Bucket, amount: int, wait_s: float) -> ErrorInfo:
    return ErrorInfo(
        f"Rate limit reached: {bucket.limit} {kind} per minute, and this request needs {amount}. "
        f"Try again in {wait_s:.1f} seconds.",
        type="rate_limit_error",
        code="rate_limit_exceeded",
        status=429,
        retry_after_s=max(wait_s, 0.001),
    )
