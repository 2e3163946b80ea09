"""The options of a running server that the administrator may change.

A change is a transaction: it has all its values or none, and makes the next version. A client that
read a version may name it, and gets a 409 if another change came between. The scheduler takes a
change in as one event, between two steps, so it is recorded and replayed like all others.
`LiveSettings` alone writes the settings of a frontend, and the capacity of its gateway.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from aserve.errors import EngineDead, ErrorInfo
from aserve.http.errors import RequestFailed
from aserve.http.openai.limits import Range, check_within
from aserve.messages.base import MAX_INT32
from aserve.messages.changes import ChangeSettings
from aserve.messages.executor import EngineSpec
from aserve.observability.request_log import WHOLE_LEVEL, RequestLog
from aserve.request_stream import Capacity, Gateway

REQUESTS_LEVELS = Range(0, WHOLE_LEVEL)
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


class Settings(msgspec.Struct, frozen=True):
    """The names are those of the options. Without `max_mixed_prefill_tokens` there is no cap."""

    version: int
    max_queue: int
    max_num_batched_tokens: int
    max_mixed_prefill_tokens: int | None
    log_level: str
    log_requests: bool
    log_requests_level: int


class SettingsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The settings to change. `version` is that of the settings that the client has read."""

    version: int | None = None
    max_queue: int | UnsetType = UNSET
    max_num_batched_tokens: int | UnsetType = UNSET
    max_mixed_prefill_tokens: int | UnsetType | None = UNSET
    log_level: LogLevel | UnsetType = UNSET
    log_requests: bool | UnsetType = UNSET
    log_requests_level: int | UnsetType = UNSET


class LiveSettings:
    def __init__(self) -> None:
        self.spec: EngineSpec | None = None  # once the engine has started
        self._now: Settings | None = None
        self._engine: _Engine | None = None

    @property
    def now(self) -> Settings:
        if self._now is None:
            raise EngineDead("the server has no settings before it has started")
        return self._now

    def open(
        self,
        spec: EngineSpec,
        send: Callable[[ChangeSettings], None],
        gateway: Gateway,
        log: RequestLog,
    ) -> None:
        """Starts with the values of the options. `send` sends a change to the engine."""
        self._engine = _Engine(spec.max_batched_tokens, spec.max_waiting, send, gateway, log)
        self._resize(spec)
        self._now = Settings(
            version=1,
            max_queue=spec.max_waiting,
            max_num_batched_tokens=spec.max_batched_tokens,
            max_mixed_prefill_tokens=spec.max_mixed_prefill_tokens,
            log_level=logging.getLevelName(logging.getLogger().level).lower(),
            log_requests=log.is_on,
            log_requests_level=log.level,
        )

    def change(self, body: SettingsBody) -> Settings:
        """Applies a change. If it raises, nothing has changed."""
        now, engine = self.now, self._engine
        assert engine is not None
        if body.version not in (None, now.version):
            reason = (
                f"The settings have version {now.version}, but the change is for version "
                f"{body.version}. Read them again."
            )
            kind, code = "invalid_request_error", "version_conflict"
            raise RequestFailed(ErrorInfo(reason, kind, code, 409))
        given = msgspec.structs.asdict(body) | {"version": now.version + 1}
        new = msgspec.structs.replace(
            now, **{name: value for name, value in given.items() if value is not UNSET}
        )
        engine.check(new)
        self._now = new
        change = ChangeSettings(
            max_waiting=new.max_queue,
            max_batched_tokens=new.max_num_batched_tokens,
            max_mixed_prefill_tokens=new.max_mixed_prefill_tokens,
            log_level=new.log_level,
            log_requests=new.log_requests,
            log_requests_level=new.log_requests_level,
        )
        engine.send(change)
        self.follow(change)
        return new

    def follow(self, change: ChangeSettings) -> None:
        """Applies a change that a frontend, this or another one, has sent to the engine."""
        logging.getLogger().setLevel(change.log_level.upper())
        if self.spec is not None:
            assert self._engine is not None
            log = self._engine.log
            log.is_on, log.level = change.log_requests, change.log_requests_level
            self._resize(self.spec.changed(change))

    def _resize(self, spec: EngineSpec) -> None:
        """NOTE: the gateway's limit never falls below that of the start. Below it the engine
        refuses, which knows the order of the queue and the expected wait.
        """
        assert self._engine is not None
        self.spec = spec
        most_waiting = max(spec.max_waiting, self._engine.most_waiting)
        self._engine.gateway.capacity = Capacity(spec.max_rows, most_waiting)


@dataclass(frozen=True, slots=True)
class _Engine:
    most_tokens: int  # of a step
    most_waiting: int
    send: Callable[[ChangeSettings], None]
    gateway: Gateway
    log: RequestLog

    def check(self, new: Settings) -> None:
        """The bounds are those of the options, but the engine has no memory for larger steps than
        at the start.
        """
        most = Range(1, self.most_tokens)
        check_within(new.max_queue, Range(1, MAX_INT32), param="max_queue")
        check_within(new.max_num_batched_tokens, most, param="max_num_batched_tokens")
        if new.max_mixed_prefill_tokens is not None:
            most = Range(1, 1 << 20)
            check_within(new.max_mixed_prefill_tokens, most, param="max_mixed_prefill_tokens")
        check_within(new.log_requests_level, REQUESTS_LEVELS, param="log_requests_level")
