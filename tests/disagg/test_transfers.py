"""The two sides of a transfer over a real socket, before toy devices and peers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import os
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from aserve.channel import Channel
from aserve.config import Facts, Raw, resolve
from aserve.disagg import wire
from aserve.disagg.arena import NUM_SLOTS
from aserve.disagg.connect import (
    TransferredWeights,
    Transfers,
    fingerprint,
    name_of_model,
    open_transfers,
)
from aserve.disagg.decode import Awaiting, KvReceiver
from aserve.disagg.prefill import KvSender, Peers, WithoutTransfers, listen
from aserve.disagg.transports import BlockReaders, BlockSender, BlockSenders
from aserve.disagg.wire import Block, Connection, Failed, Fetch
from aserve.errors import ConfigError, ErrorInfo, InvalidRequest, StepError
from aserve.frames import framed
from aserve.messages.base import array_i32, pack_i32
from aserve.messages.changes import LoadWeights
from aserve.messages.executor import DecodeCaps, EngineSpec, SchedulerEvent
from aserve.messages.output import DetokenizerEvent, Refused, Retired
from aserve.messages.requests import AdmitRequest, Cancel, SamplingParams
from aserve.messages.transfers import (
    HostKv,
    KvFailed,
    KvLayer,
    KvLayout,
    KvReady,
    OnLayer,
    ReceiveKv,
    SendKv,
    StreamKv,
)
from aserve.observability.reports import KvTransferred
from aserve.tiny import MODEL_DIR
from tests.fakes.executor import SPEC, FakeExecutor

LAYERS = 2
SIZE = 4 * LAYERS  # bytes of a token's KV: its id in each layer, for the toy device
PROMPT = list(range(100, 111))  # the KV of all but the last one travels
WHOLE = dict(enumerate(PROMPT[:-1]))
TOO_LONG = StepError("too long for this engine").info()
LAYOUT = KvLayout(("toy",), (KvLayer(0, (4,)),) * LAYERS)
PAGES = (pack_i32([7]),)


@dataclass(slots=True)
class ToyAccess:
    """The KV of a token is its id. `layers` have what was written, by position. `launched` is done
    when what was launched before the last transfer has run.
    """

    layout: KvLayout = LAYOUT
    geometry: str = "toy"
    bytes_per_token: int = SIZE
    layer_bytes: tuple[int, ...] = (4,) * LAYERS
    pool_shapes: tuple[tuple[int, int], ...] = ((1, 4),) * LAYERS
    prompt: list[int] = field(default_factory=lambda: PROMPT)
    layers: tuple[dict[int, int], ...] = field(default_factory=lambda: ({}, {}))
    num_reads: int = 0
    streams: list[tuple[range, OnLayer]] = field(default_factory=list)
    is_ahead: threading.Event = field(default_factory=threading.Event)  # the first layer is whole
    launched: Future[None] = field(default_factory=Future)

    @property
    def tokens(self) -> dict[int, int]:
        """Those that have all layers."""
        first, last = self.layers
        return dict(first.items() & last.items())

    def barrier(self) -> Future[None]:
        self.launched = Future()
        asyncio.get_running_loop().call_later(0.01, self.launched.set_result, None)
        return self.launched

    def read(
        self, pages: tuple[bytes, ...], first: int, stop: int, from_layer: int = 0
    ) -> Future[HostKv]:
        assert pages == PAGES
        self.num_reads += 1
        done: Future[HostKv] = Future()
        values = pack_i32(self.prompt[first:stop]) * (LAYERS - from_layer)
        done.set_result(lambda: memoryview(values))
        return done

    def write(
        self,
        pages: tuple[bytes, ...],
        first: int,
        token_ids: bytes,
        values: memoryview,
        layers: range | None = None,
    ) -> Future[None]:
        assert pages == PAGES
        assert layers is not None
        assert self.launched.done(), "a step may still write these pages"
        for layer, part in zip(
            layers, np.split(array_i32(bytes(values)), len(layers)), strict=True
        ):
            self.layers[layer].update(enumerate(part.tolist(), first))
        if len(self.prompt) - 2 in self.layers[0]:
            self.is_ahead.set()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def stream(
        self, iteration: int, pages: tuple[bytes, ...], tokens: range, on_layer: OnLayer
    ) -> None:
        assert pages == PAGES
        self.streams.append((tokens, on_layer))

    def compute_first_layer(self, *, spoils: bool = False) -> None:
        """What the step does that the last StreamKv announced. `spoils`: its values are wrong."""
        tokens, on_layer = self.streams[-1]
        ids = [7 if spoils else token for token in self.prompt[tokens.start : tokens.stop]]
        on_layer(0, lambda: memoryview(pack_i32(ids)))


class Events:
    """A scheduler's inbox."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[SchedulerEvent] = asyncio.Queue()

    def send(self, message: SchedulerEvent) -> None:
        self.queue.put_nowait(message)

    async def next(self) -> SchedulerEvent:
        async with asyncio.timeout(10):
            return await self.queue.get()


class Texts:
    """A detokenizer's inbox."""

    def send(self, message: DetokenizerEvent) -> None:
        raise AssertionError(message)


class Side:
    """One engine, of which only the transfers are real."""

    def __init__(self) -> None:
        self.access = ToyAccess()
        self.events = Events()
        self.reports: list[KvTransferred] = []
        self.has_reported = asyncio.Event()

    def report(self, one: KvTransferred) -> None:
        self.reports.append(one)
        self.has_reported.set()

    def outcomes(self) -> list[tuple[str, int]]:
        return [(report.outcome, report.num_bytes) for report in self.reports]


class Prefill(Side):
    def __init__(self, backend: str = "auto") -> None:
        super().__init__()
        sock = listen("127.0.0.1", 0)
        self.address: tuple[str, int] = sock.getsockname()[:2]
        peers = Peers("secret", "a model")
        self.block_senders = BlockSenders(backend)
        self.actor = KvSender(
            self.access, self.events, peers, sock, self.report, block_senders=self.block_senders
        )

    async def admitted(self) -> AdmitRequest:
        event = await self.events.next()
        assert isinstance(event, AdmitRequest)
        return event

    def compute(self, request: AdmitRequest, *lengths: int) -> None:
        for length in lengths:
            self.actor.send(SendKv(request.request_id, length, PAGES))
        if lengths[-1] == len(PROMPT) - 1:
            self.actor.send(Retired(request.request_id, 0, "length", 0))


class Decode(Side):
    def __init__(self, *addresses: tuple[str, int], backend: str = "auto") -> None:
        super().__init__()
        self.actor = KvReceiver(
            self.access,
            self.events,
            addresses,
            key="secret",
            model="a model",
            report=self.report,
            block_readers=BlockReaders(backend),
        )

    def ask(self, first: int = 0) -> None:
        ids = pack_i32(PROMPT)
        self.actor.send(ReceiveKv("r", 0, first, len(PROMPT), ids, "salt", PAGES))

    async def failure(self) -> str:
        event = await self.events.next()
        assert isinstance(event, KvFailed)
        return event.error.message


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aserve.disagg.wire.IDLE_S", 0.5)
    monkeypatch.setattr("aserve.disagg.prefill.WAITING_S", 0.05)


@contextlib.asynccontextmanager
async def running(*sides: Prefill | Decode) -> AsyncIterator[None]:
    deaths: list[tuple[str, BaseException]] = []
    for side in sides:
        side.actor.start(lambda name, error: deaths.append((name, error)))
    yield
    for side in sides:
        await side.actor.stop()
    assert deaths == []


@pytest.fixture(params=["shm", "tcp"])
async def prefill(request: pytest.FixtureRequest) -> AsyncIterator[Prefill]:
    """Its peers take what it offers."""
    side = Prefill(request.param)
    async with running(side):
        yield side
    for thread in threading.enumerate():
        if thread.name == "kv-sender":
            thread.join(10)
    assert side.block_senders.arena is None or side.block_senders.arena.num_free == NUM_SLOTS


# Messages that msgspec cannot decode, for each of which it raises another exception.
NO_MESSAGES = {
    "no message": framed(b"abc"),
    "a text that is not UTF-8": framed(b"\x82\xa4type\xa6Failed\xa6reason\xa1\xff"),
    "deep nesting": framed(b"\x82\xa1x" + b"\x91" * 100_000),
}

Script = Callable[[Connection], object]


@contextlib.contextmanager
def peer(script: Script) -> Iterator[tuple[str, int]]:
    """A prefill engine that reads the Fetch, follows the script and closes the connection."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            accepted, _ = sock.accept()
            with contextlib.closing(Connection(accepted)) as connection:
                connection.receive()
                BlockSenders("tcp").open(connection)
                script(connection)

    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=serve)
        thread.start()
        yield sock.getsockname()[:2]
        thread.join()


def block(connection: Connection, first: int, stop: int) -> None:
    values = memoryview(pack_i32(PROMPT[first:stop]) * LAYERS)
    BlockSender(connection, None).send(range(first, stop), range(LAYERS), values)


def wrong_checksum(connection: Connection) -> None:
    connection.send_values(Block(0, 1, SIZE, 0, LAYERS, checksum=1), memoryview(bytes(SIZE)))


def silence(connection: Connection) -> None:
    connection._socket.settimeout(10)
    with contextlib.suppress(OSError):
        connection.receive()


def says(data: bytes) -> Script:
    return lambda connection: connection._socket.sendall(data)


BAD_PEERS: dict[str, tuple[Script, str]] = {
    "closes": (lambda _: None, "closed the connection"),
    "closes after a block": (lambda c: block(c, 0, 4), "closed the connection"),
    "another checksum": (wrong_checksum, "checksum of a block is"),
    "a block that is not the next": (
        lambda c: block(c, 1, 4),
        "tokens 1 to 4, layers 0 to 2, with 24 bytes, not",
    ),
    "more tokens than asked for": (
        lambda c: block(c, 0, 11),
        "tokens 0 to 11, layers 0 to 2, with 88 bytes, not",
    ),
    "an empty block": (lambda c: block(c, 0, 0), "tokens 0 to 0, layers 0 to 2, with 0 bytes, not"),
    "bytes of another size": (lambda c: c.send(Block(0, 1, 9, 0, 2, 0)), "with 9 bytes, not"),
    "no such layer": (lambda c: c.send(Block(0, 1, 12, 0, 3, 0)), "layers 0 to 3, with 12"),
    "a layer too early": (lambda c: c.send(Block(0, 1, 4, 1, 1, 0)), "layers 1 to 2, with 4"),
    "no layer": (lambda c: c.send(Block(0, 1, 0, 0, 0, 0)), "layers 0 to 0, with 0"),
    **{name: (says(data), "not a message") for name, data in NO_MESSAGES.items()},
    "an endless message": (says(b"\xff" * 4), "4294967295 bytes: at most"),
    "asks back": (
        lambda c: c.send(Fetch(1, "", "", "", 0, b"", "")),
        "is not what a prefill engine says",
    ),
    "a block elsewhere": (
        lambda c: c.send(Block(0, 1, SIZE, 0, 2, 0, 0)),
        "its bytes should follow",
    ),
    "refuses": (lambda c: c.send(Failed("the queue is full")), "the queue is full"),
    "says nothing": (silence, "timed out"),
}


async def test_kv_comes_chunk_by_chunk_and_in_parts(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill.actor, "_part_len", 3)
    decode = Decode(prefill.address)
    async with running(decode):
        decode.ask(first=2)
        request = await prefill.admitted()
        assert array_i32(request.prompt_ids).tolist() == PROMPT
        assert (request.sampling.max_tokens, request.namespace) == (0, "salt")
        assert request.sends_kv
        prefill.compute(request, 1, 4)
        assert prefill.access.num_reads == 1  # at once: a later launch may write the pages
        await asyncio.sleep(0.2)  # it says Waiting
        prefill.compute(request, 10)
        assert await decode.events.next() == KvReady("r", 0)
    assert decode.access.tokens == {at: token for at, token in WHOLE.items() if at >= 2}
    await prefill.has_reported.wait()  # it does when the other side has hung up
    assert decode.outcomes() == prefill.outcomes() == [("ok", 8 * SIZE)]


async def test_layers_come_while_their_step_runs_and_count_when_it_is_done(
    prefill: Prefill,
) -> None:
    decode = Decode(prefill.address)
    async with running(decode):
        decode.ask(first=2)
        request = await prefill.admitted()

        def launch(iteration: int, first: int, stop: int) -> None:
            prefill.actor.send(StreamKv(request.request_id, iteration, first, stop, PAGES))

        launch(1, 0, 6)
        prefill.access.compute_first_layer()
        launch(2, 6, 11)  # before the result of step 1, and without the last token
        assert [tokens for tokens, _ in prefill.access.streams] == [range(2, 6), range(6, 10)]
        prefill.access.compute_first_layer(spoils=True)  # step 2 fails
        assert await asyncio.to_thread(decode.access.is_ahead.wait, 10)
        assert decode.access.tokens == {}
        prefill.compute(request, 6)
        launch(3, 6, 8)  # it is run again in two parts
        prefill.access.compute_first_layer()
        prefill.compute(request, 8)
        launch(4, 8, 11)  # as a step that does not run layer by layer
        prefill.compute(request, 10)
        assert await decode.events.next() == KvReady("r", 0)
    assert decode.access.tokens == {at: token for at, token in WHOLE.items() if at >= 2}
    await prefill.has_reported.wait()
    assert prefill.access.num_reads == 3
    assert decode.outcomes() == [("ok", 8 * SIZE + 4 * 4)]


async def test_what_the_prefill_side_has_in_its_cache_comes_before_the_layers(
    prefill: Prefill,
) -> None:
    decode = Decode(prefill.address)
    async with running(decode):
        decode.ask(first=2)
        request = await prefill.admitted()
        prefill.actor.send(StreamKv(request.request_id, 1, 6, 11, PAGES))
        prefill.access.compute_first_layer()
        assert await asyncio.to_thread(decode.access.is_ahead.wait, 10)
        assert sorted(decode.access.tokens) == [2, 3, 4, 5]
        prefill.compute(request, 10)
        assert await decode.events.next() == KvReady("r", 0)
    assert decode.outcomes() == [("ok", 8 * SIZE)]


@pytest.mark.parametrize("name", BAD_PEERS)
async def test_a_peer_that_misbehaves_is_left_for_the_next_one(name: str, prefill: Prefill) -> None:
    script, reason = BAD_PEERS[name]
    with peer(script) as bad:
        decode = Decode(bad)
        async with running(decode):
            decode.ask()
            assert reason in await decode.failure()
            assert [outcome for outcome, _ in decode.outcomes()] == ["failed"]
    with peer(script) as bad:
        decode = Decode(bad, prefill.address)
        async with running(decode):
            decode.ask()
            request = await prefill.admitted()
            prefill.compute(request, 10)
            assert await decode.events.next() == KvReady("r", 0)
        assert decode.access.tokens == WHOLE


async def test_a_peer_that_failed_is_left_alone_for_a_while(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def connect(host: str, port: int) -> Connection:
        asked.append((host, port))
        return wire.connect(host, port)

    monkeypatch.setattr("aserve.disagg.decode.connect", connect)
    with listen("127.0.0.1", 0) as closed:
        gone = closed.getsockname()[:2]
    decode = Decode(gone, prefill.address)
    async with running(decode):
        for _ in range(2):
            decode.ask()
            prefill.compute(await prefill.admitted(), 10)
            assert isinstance(await decode.events.next(), KvReady)
        assert asked == [gone, prefill.address, prefill.address]
        monkeypatch.setattr("aserve.disagg.decode.COOL_S", 0.0)
        decode.ask()
        prefill.compute(await prefill.admitted(), 10)
        assert isinstance(await decode.events.next(), KvReady)
        assert asked[3:] == [gone, prefill.address]
    alone = Decode(gone)
    monkeypatch.setattr("aserve.disagg.decode.COOL_S", 60.0)
    async with running(alone):
        for reason in ("refused", "every prefill engine failed just now"):
            alone.ask()
            assert reason in await alone.failure()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"key": "another"}, "--disaggregation-key is another one here"),
        ({"model": "b"}, "differ in their model: a model here, b there"),
        ({"geometry": "g"}, "differ in their KV: toy here, g there"),
        ({"version": 9}, f"differ in their protocol: {wire.VERSION} here, 9 there"),
        ({"first": 2}, "nothing to send from token 2 on of a prompt of 3"),
        ({"first": -1}, "nothing to send from token -1 on of a prompt of 3"),
        ({"token_ids": b"abcde"}, "5 bytes are no token ids"),
    ],
)
async def test_a_fetch_that_does_not_fit_is_refused(
    prefill: Prefill, change: dict[str, Any], reason: str
) -> None:
    fields: dict[str, Any] = {
        "version": wire.VERSION,
        "key": "secret",
        "model": "a model",
        "geometry": "toy",
        "first": 0,
        "token_ids": pack_i32([1, 2, 3]),
    }
    fetch = Fetch(**fields | change, namespace="")

    def talk() -> wire.Message:
        with contextlib.closing(wire.connect(*prefill.address)) as connection:
            connection.send(fetch)
            return connection.receive()

    answer = await asyncio.to_thread(talk)
    assert isinstance(answer, Failed)
    assert reason in answer.reason
    assert prefill.events.queue.empty()


async def test_a_request_that_ends_on_the_decode_side_ends_on_both(prefill: Prefill) -> None:
    decode = Decode(prefill.address)
    async with running(decode):
        decode.ask()
        request = await prefill.admitted()
        decode.actor.send(Retired("r", 0, "cancelled", 0))
        await decode.failure()
        assert decode.outcomes() == [("cancelled", 0)]
        assert await prefill.events.next() == Cancel(request.request_id, None, 0, "cancelled")
        port = WithoutTransfers(Texts(), prefill.actor)
        reads, end = prefill.access.num_reads, Retired(request.request_id, 0, "cancelled", 0)
        prefill.compute(request, 4)
        assert prefill.access.num_reads == reads  # nobody wants it any more
        port.send(end)  # no client hears of it
        prefill.actor.send(end)
        assert not prefill.actor.owns(request.request_id)


async def test_a_request_that_ends_while_it_connects_asks_for_nothing(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It connects to the second peer, and has the closed connection of the first one."""
    loop = asyncio.get_running_loop()
    is_connecting, may_connect = asyncio.Event(), threading.Event()

    def connect(host: str, port: int) -> Connection:
        if port == prefill.address[1]:
            loop.call_soon_threadsafe(is_connecting.set)
            assert may_connect.wait(10)
        return wire.connect(host, port)

    monkeypatch.setattr("aserve.disagg.decode.connect", connect)
    with peer(lambda connection: connection.send(Failed("busy"))) as busy:
        decode = Decode(busy, prefill.address)
        async with running(decode):
            decode.ask()
            await is_connecting.wait()
            decode.actor.send(Retired("r", 0, "cancelled", 0))
            may_connect.set()
            assert "cancelled" in await decode.failure()
            assert decode.outcomes() == [("cancelled", 0)]
            await prefill.has_reported.wait()
            assert prefill.events.queue.empty()


async def test_an_accept_that_fails_ends_no_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()
    accept, errors = loop.sock_accept, [errno.EMFILE, errno.ECONNABORTED]

    async def sock_accept(sock: socket.socket) -> tuple[socket.socket, Any]:
        if errors:
            raise OSError(number := errors.pop(), os.strerror(number))
        return await accept(sock)

    monkeypatch.setattr(loop, "sock_accept", sock_accept)
    monkeypatch.setattr("aserve.disagg.prefill.ACCEPT_RETRY_S", 0.0)
    prefill = Prefill()
    decode = Decode(prefill.address)
    async with running(prefill, decode):
        decode.ask()
        prefill.compute(await prefill.admitted(), 10)
        assert isinstance(await decode.events.next(), KvReady)
    assert "Too many open files" in caplog.text


@pytest.mark.parametrize(
    "end",
    [
        lambda name: Refused(name, TOO_LONG),
        lambda name: Retired(name, 0, "error", 0, error=TOO_LONG),
        lambda name: Retired(name, 0, "shutdown", 0),
    ],
)
async def test_a_prompt_that_is_not_computed_fails(
    prefill: Prefill, end: Callable[[str], Refused | Retired]
) -> None:
    decode = Decode(prefill.address)
    async with running(decode):
        decode.ask()
        request = await prefill.admitted()
        prefill.actor.send(SendKv(request.request_id, 4, PAGES))
        prefill.actor.send(end(request.request_id))
        reason = await decode.failure()
        assert TOO_LONG.message in reason or "not computed to its end" in reason
    assert decode.access.tokens == {at: token for at, token in WHOLE.items() if at < 4}


async def test_connections_that_ask_for_nothing_do_no_harm(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aserve.disagg.prefill.MAX_TRANSFERS", 1)
    monkeypatch.setattr("aserve.disagg.decode.COOL_S", 0.0)
    say = functools.partial(socket.create_connection, prefill.address, timeout=10)
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", *NO_MESSAGES.values(), framed(b"")):
        with say() as client:
            client.sendall(garbage)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.to_thread(client.recv, 1) == b""
    with say():
        decode = Decode(prefill.address)
        async with running(decode):
            decode.ask()
            reason = await decode.failure()
            assert "closed" in reason or "reset" in reason
            await asyncio.sleep(0.8)  # IDLE_S
            decode.ask()
            prefill.compute(await prefill.admitted(), 10)
            assert isinstance(await decode.events.next(), KvReady)


def fail(*_: object) -> Any:
    raise KeyError("a bug")


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_bug_ends_one_transfer_and_no_engine(
    side: str,
    prefill: Prefill,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    decode = Decode(prefill.address)
    broken, name = {
        "prefill": (prefill.actor._block_senders, "open"),
        "decode": (decode.actor._block_readers, "choose"),
    }[side]
    async with running(decode):
        with monkeypatch.context() as patched:
            patched.setattr(broken, name, fail)
            decode.ask()
            request = await prefill.admitted()
            await decode.failure()
            end = await prefill.events.next()
            assert end == Cancel(request.request_id, None, 0, "cancelled")
        assert [each.outcome for each in (*decode.reports, *prefill.reports)] == ["failed"] * 2
        assert "KeyError: 'a bug'" in caplog.text
        monkeypatch.setattr("aserve.disagg.decode.COOL_S", 0.0)
        decode.ask()
        prefill.compute(await prefill.admitted(), 10)
        assert isinstance(await decode.events.next(), KvReady)


@pytest.mark.parametrize(
    ("sampling", "awaits"),
    [
        (SamplingParams(seed=0, max_tokens=4), True),
        (SamplingParams(seed=0, max_tokens=0), False),
        (SamplingParams(seed=0, max_tokens=4, prompt_logprobs=0), False),
    ],
)
def test_only_prompts_before_tokens_await_kv(sampling: SamplingParams, *, awaits: bool) -> None:
    """The scheduler refuses a request that awaits KV and generates nothing as a bug."""
    events: Channel[SchedulerEvent] = Channel()
    Awaiting(events).send(AdmitRequest("a", pack_i32(PROMPT), sampling))
    [request] = events.take()
    assert isinstance(request, AdmitRequest)
    assert request.awaits_kv == awaits


def test_a_fingerprint_sees_the_configuration_and_each_tensor(tmp_path: Path) -> None:
    """A merged adapter changes few tensors. Engines that took such models for equal gave each other
    KV of other weights.
    """

    def write(config: str = "{}", changed: int | None = None) -> str:
        tensors = {f"layer{i}": np.zeros((300, 300), np.float32) for i in range(5)}
        tensors["norm"] = np.zeros((3, 1), np.float32)
        if changed is not None:
            [*tensors.values()][changed][...] = 1
        (tmp_path / "config.json").write_text(config)
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        return fingerprint(tmp_path, max_model_len=99)

    same = write()
    assert write() == same
    others = {write('{"a": 1}'), *(write(changed=i) for i in range(6))}
    assert len(others | {same}) == 8
    assert fingerprint(tmp_path, max_model_len=99, is_dummy=True) not in others
    (tmp_path / "other.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    assert len(fingerprint(tmp_path, max_model_len=99)) == len(same)


@pytest.mark.parametrize(
    ("config", "num_names"),
    [
        pytest.param({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 2, id="dynamic"),
        pytest.param({"rope_parameters": {"full": {"rope_type": "longrope"}}}, 2, id="longrope"),
        pytest.param({"text_config": {"rope_scaling": {"type": "su"}}}, 2, id="nested"),
        pytest.param({"rope_scaling": {"type": "yarn"}, "x": [{"type": "su"}]}, 1, id="yarn"),
    ],
)
def test_kv_of_frequencies_for_another_context_is_that_of_another_model(
    tmp_path: Path, config: dict[str, object], num_names: int
) -> None:
    """Files of a server with a shorter context gave one with a longer context wrong tokens."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = {fingerprint(tmp_path, max_model_len=length) for length in (1024, 4096)}
    assert len(names) == num_names


def test_kv_of_rounded_weights_is_that_of_another_model() -> None:
    asked: list[dict[str, object]] = [{}, {"quantization": "int8"}, {"quantization": "int4"}]
    facts = Facts(default_model=str(MODEL_DIR))
    names = {name_of_model(resolve(Raw(command_line=each), facts), SPEC) for each in asked}
    assert len(names) == len(asked)


OPTIONS: dict[str, object] = {
    "disaggregation_mode": "decode",
    "disaggregation_prefill": "a:1, [::1]:2",
}
CASES: list[tuple[dict[str, object], EngineSpec, str]] = [
    (OPTIONS, msgspec.structs.replace(SPEC, task="embed"), "not for diffusion, embedding"),
    (OPTIONS, msgspec.structs.replace(SPEC, decode=DecodeCaps(root_len=0)), "not for diffusion"),
    (OPTIONS, msgspec.structs.replace(SPEC, decode=DecodeCaps(is_recurrent=True)), "recurrent"),
    ({"disaggregation_mode": "decode"}, SPEC, "needs --disaggregation-prefill HOST:PORT"),
    (OPTIONS | {"disaggregation_prefill": "a:1,b"}, SPEC, "'b' is not HOST:PORT"),
    (OPTIONS | {"disaggregation_prefill": "a..b:1"}, SPEC, "'a..b:1' is not HOST:PORT"),
]


@dataclass(slots=True)
class ToyExecutor:
    spec: EngineSpec

    def kv_access(self) -> ToyAccess:
        return ToyAccess()


@pytest.mark.parametrize(("options", "spec", "reason"), CASES)
def test_options_that_do_not_fit_end_the_start(
    options: dict[str, object], spec: EngineSpec, reason: str
) -> None:
    resolved = resolve(Raw(command_line=options), Facts(default_model=str(MODEL_DIR)))
    events = Events()
    with pytest.raises(ConfigError, match=re.escape(reason)):
        open_transfers(ToyExecutor(spec), resolved, events=events, text=Texts(), report=print)


def test_a_device_without_transfers_is_refused() -> None:
    resolved = resolve(Raw(command_line=OPTIONS), Facts(default_model=str(MODEL_DIR)))
    with pytest.raises(ConfigError, match="cannot transfer KV"):
        open_transfers(FakeExecutor(), resolved, events=Events(), text=Texts(), report=print)


async def test_weights_that_are_replaced_on_one_side_first_give_no_kv(prefill: Prefill) -> None:
    """A request may not have KV of two checkpoints."""
    decode = Decode(prefill.address)
    async with running(decode):
        decode.ask()
        request = await prefill.admitted()
        prefill.compute(request, 4)
        prefill.actor.name_model("b", namespace="/1")
        assert "the weights are replaced here" in await decode.failure()
        assert await prefill.events.next() == Cancel(request.request_id, None, 0, "cancelled")
        prefill.actor.send(Retired(request.request_id, 0, "cancelled", 0))
        decode.ask()
        assert "differ in their model: b here, a model there" in await decode.failure()
        decode.actor.name_model("b", namespace="/7")
        decode.ask()
        request = await prefill.admitted()
        assert request.namespace == "salt/1", "KV of the old weights may be cached for `salt`"
        prefill.compute(request, 10)
        assert await decode.events.next() == KvReady("r", 0)


async def test_a_transfer_that_was_agreed_upon_before_an_update_does_not_begin_behind_it(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = Decode(prefill.address)
    admit = prefill.actor._admit

    def admit_late(transfer: Any, fetch: Any) -> None:
        prefill.actor.name_model("b", namespace="/1")
        admit(transfer, fetch)

    monkeypatch.setattr(prefill.actor, "_admit", admit_late)
    async with running(decode):
        decode.ask()
        assert "the weights are replaced here" in await decode.failure()


class Named:
    def __init__(self) -> None:
        self.names: list[tuple[str, str]] = []

    def name_model(self, model: str, *, namespace: str) -> None:
        self.names.append((model, namespace))


async def test_the_name_of_the_weights_follows_an_update_and_matches_nobody_meanwhile(
    tmp_path: Path,
) -> None:
    resolved = resolve(Raw(), Facts(default_model=str(MODEL_DIR)))
    spec, actor = SPEC, Named()
    model = name_of_model(resolved, spec)
    weights = TransferredWeights(actor, model, resolved=resolved, spec=spec)
    refusal = InvalidRequest("no").info()

    async def updated(load: LoadWeights, error: ErrorInfo | None = None) -> tuple[str, str]:
        async def work() -> ErrorInfo | None:
            assert actor.names[-1][0].startswith("update ")
            return error

        transfers = Transfers(Events(), Texts(), weights=weights)
        assert await transfers.run_job(load, work()) == error
        return actor.names[-1]

    save_file({"model.norm.weight": np.ones(2, np.float32)}, tmp_path / "x")
    assert await updated(LoadWeights(1, str(tmp_path / "nowhere")), refusal) == (model, "")
    assert await updated(LoadWeights(2, str(MODEL_DIR))) == (model, "/2")
    name, namespace = await updated(LoadWeights(3, "", (str(tmp_path / "x"),)))
    assert name.startswith(f"{model} + ")
    assert namespace == "/3"
    name, _ = await updated(LoadWeights(4, str(tmp_path / "nowhere")))
    assert name.startswith("unknown ")
    assert len({name for name, _ in actor.names}) == len(actor.names) - 1
