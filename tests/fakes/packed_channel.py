"""Channels that encode and decode each message with msgpack, which shows that a socket could carry
it; and an engine whose actors have such channels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeAlias, TypeVar, get_args
from unittest import mock

import msgspec

import aserve.actors.base
import aserve.engine_core
import aserve.frontend
from aserve.channel import Channel
from aserve.engine import Engine
from aserve.frontend import Frontend
from aserve.grammar.process import CompileProcess
from aserve.load import Loaded
from aserve.messages.executor import SchedulerEvent
from aserve.messages.output import DetokenizerEvent
from aserve.messages.requests import EngineEvent, TokenizerEvent

T = TypeVar("T")
AnyEvent: TypeAlias = TokenizerEvent | DetokenizerEvent | EngineEvent | SchedulerEvent


class Codec:
    """msgpack both ways for one union of message types."""

    __slots__ = ("_decoder", "_encoder")

    def __init__(self, kind: Any) -> None:  # a type form: a class or a union of them
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(kind)

    def round_trip(self, message: object) -> Any:
        return self._decoder.decode(self._encoder.encode(message))


class PackedChannel(Channel[T]):
    """Carries messages of `kind`, or any: those that never leave a process are then as they are."""

    __slots__ = ("_codec", "_kind")

    def __init__(self, kind: Any = AnyEvent) -> None:
        super().__init__()
        self._kind, self._codec = kind, Codec(kind)

    def send(self, message: T) -> None:
        is_message = self._kind is not AnyEvent or isinstance(message, get_args(AnyEvent))
        super().send(self._codec.round_trip(message) if is_message else message)


class PackedFrontend(Frontend):
    def __init__(self, *args: Any, **options: Any) -> None:
        with _packed_channels():
            super().__init__(*args, **options)

    async def start(self, loaded: Loaded, worker: CompileProcess | None = None) -> None:
        """Its actors are made before it first waits."""
        with _packed_channels():
            await super().start(loaded, worker)
        assert self._running is not None
        assert isinstance(self._running.inbox, PackedChannel)


class PackedEngine(Engine):
    def __init__(self, *args: Any, **options: Any) -> None:
        with mock.patch("aserve.engine.Frontend", PackedFrontend):
            super().__init__(*args, **options)


@contextlib.contextmanager
def _packed_channels() -> Iterator[None]:
    """The actors that are made meanwhile get such channels.

    NOTE: several engines may start at a time, so it ends with the real one, not the one before.
    """
    modules = (aserve.frontend, aserve.engine_core, aserve.actors.base)
    try:
        for module in modules:
            vars(module)["Channel"] = PackedChannel
        yield
    finally:
        for module in modules:
            vars(module)["Channel"] = Channel
