"""The times that a request may take, and whether it is timed: fields of its body, and headers that
go with any endpoint.

`X-Deadline-Ms`, `X-Max-Queue-Ms` and `X-Include-Timings` mean the same as the fields `deadline_ms`,
`max_queue_ms` and `include_timings`. Where a time is given in several ways, the shortest counts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from aserve.errors import InvalidRequest
from aserve.http.openai.limits import check_range
from aserve.http.openai.schema import StreamOptions
from aserve.messages.requests import GenerateRequest

DEADLINE = "X-Deadline-Ms"
MAX_QUEUE = "X-Max-Queue-Ms"
INCLUDE_TIMINGS = "X-Include-Timings"
YES = ("1", "true")
TRACEPARENT = "traceparent"
MAX_TRACEPARENT = 55  # characters of version 00


class TimedBody(Protocol):
    """The fields of a body about its times; the values were checked before."""

    stream_options: StreamOptions | None
    include_timings: bool | None

    timeout: float | None
    deadline_ms: float | None
    max_queue_ms: float | None


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """The longest time until the end of an answer, and until the launch of its first step. A
    request that cannot end within `strict_timeout_s` is refused at once. `started_s` is the time
    when the request began. It is used if the request is timed, which all are with `is_timed`.
    """

    timeout_s: float | None = None
    strict_timeout_s: float | None = None
    max_queue_s: float | None = None
    started_s: float | None = None
    is_timed: bool = False
    traceparent: str = ""

    def apply(self, request: GenerateRequest) -> GenerateRequest:
        is_timed = self.is_timed or request.started_s is not None
        if self.timeout_s is None and self.max_queue_s is None and not is_timed:
            return request
        return msgspec.structs.replace(
            request,
            timeout_s=_shortest(request.timeout_s, self.timeout_s),
            strict_timeout_s=_shortest(request.strict_timeout_s, self.strict_timeout_s),
            max_queue_s=_shortest(request.max_queue_s, self.max_queue_s),
            started_s=_shortest(request.started_s, self.started_s) if is_timed else None,
            traceparent=self.traceparent,
        )


NO_LIMITS = TimeLimits()


def limits_in_body(body: TimedBody) -> TimeLimits:
    strict_s = _seconds(body.deadline_ms)
    in_stream = body.stream_options is not None and body.stream_options.include_timings
    is_timed = bool(body.include_timings or in_stream)
    return TimeLimits(
        _shortest(body.timeout, strict_s),
        strict_s,
        _seconds(body.max_queue_ms),
        time.monotonic(),
        is_timed,
    )


def limits_in_headers(
    headers: Mapping[str, str], *, started_s: float, is_traced: bool = False
) -> TimeLimits:
    strict_s = _seconds(_header(headers, DEADLINE))
    return TimeLimits(
        strict_s,
        strict_s,
        _seconds(_header(headers, MAX_QUEUE)),
        started_s,
        is_traced or headers.get(INCLUDE_TIMINGS, "").lower() in YES,
        headers.get(TRACEPARENT, "")[:MAX_TRACEPARENT] if is_traced else "",
    )


def _header(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        raise InvalidRequest(
            f"Invalid '{name}': expected a number of milliseconds, but got {text[:40]!r}.",
            param=name,
            code="invalid_type",
        ) from None
    check_range(value, name)
    return value


def _seconds(value_ms: float | None) -> float | None:
    return None if value_ms is None else value_ms / 1000


def _shortest(*times: float | None) -> float | None:
    return min([each for each in times if each is not None], default=None)
