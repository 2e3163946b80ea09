"""`KvSender`: computes the prompts that other engines ask for, and sends them the KV."""

# Theory of operation
#
# A connection has one thread, which blocks on the socket. It reads the Fetch, hands a `_Transfer`
# to the event loop, and then sends what comes out of the transfer's queue. The loop admits a
# request for the prompt (max_tokens 0, so that nothing is sampled). For each StreamKv of the
# scheduler it asks the device for the layers of the next step as they are computed, and for each
# SendKv for what is left of the tokens that are, at once: the read is then ordered before the next
# launch, and only later launches can write the pages. So no page need be held for a peer that reads
# slowly. What is read waits on the host; MAX_TRANSFERS bounds that. From there it is sent over the
# connection, or laid out in memory that the peer reads (transports.py).

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import logging
import queue
import socket
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from aserve.actors.base import Actor
from aserve.channel import Sink
from aserve.disagg.spans import SentSpans, Span
from aserve.disagg.transports import BlockSender, BlockSenders
from aserve.disagg.wire import (
    VERSION,
    WAITING_S,
    Connection,
    Failed,
    Fetch,
    TransferError,
    Waiting,
)
from aserve.errors import ErrorInfo
from aserve.host.threads import in_thread
from aserve.messages.base import VALUE_BYTES, array_i32
from aserve.messages.executor import SchedulerEvent
from aserve.messages.output import DetokenizerEvent, Refused, Retired
from aserve.messages.requests import AdmitRequest, Cancel, SamplingParams
from aserve.messages.transfers import HostKv, LayeredKvAccess, ReceiveKv, SendKv, StreamKv
from aserve.observability.reports import KvTransferred

MAX_TRANSFERS = 256  # connections at a time
ACCEPT_RETRY_S = 1.0  # as asyncio's servers do
PART_BYTES = 4 << 20  # one is copied while the one before it is sent
REPLACED = "the weights are replaced here"
CLIENT = "disaggregation"  # has one share of the engine beside its own clients

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peers:
    """Both sides must have the same key and model. `model` names the weights."""

    key: str
    model: str

    def refusal(self, fetch: Fetch, geometry: str) -> str | None:
        """Returns why a peer gets nothing, or None."""
        if not hmac.compare_digest(fetch.key.encode(), self.key.encode()):
            return "--disaggregation-key is another one here"
        theirs = (fetch.version, fetch.model, fetch.geometry)
        for what, mine, its in zip(
            ("protocol", "model", "KV"), (VERSION, self.model, geometry), theirs, strict=True
        ):
            if mine != its:
                return f"the two engines differ in their {what}: {mine} here, {its} there"
        if len(fetch.token_ids) % VALUE_BYTES:
            return f"{len(fetch.token_ids)} bytes are no token ids, which have {VALUE_BYTES} each"
        length = len(array_i32(fetch.token_ids))
        if not 0 <= fetch.first < length - 1:
            return f"there is nothing to send from token {fetch.first} on of a prompt of {length}"
        return None


@dataclass(slots=True, eq=False)
class _Part:
    tokens: range
    layers: range
    values: HostKv


@dataclass(slots=True, eq=False)
class _Transfer:
    """`parts` gives the KV in order, and then None, or the reason why no more comes."""

    request_id: str
    spans: SentSpans
    num_bytes: int = 0  # on their way or there
    transport: str = "none"
    is_over: bool = False  # the peer has gone, and the request is being cancelled
    parts: queue.SimpleQueue[_Part | str | None] = field(default_factory=queue.SimpleQueue)


class KvSender(Actor[None]):
    """`send` is the scheduler's port for KV. It acts at once: see above."""

    def __init__(
        self,
        access: LayeredKvAccess,
        events: Sink[SchedulerEvent],
        peers: Peers,
        sock: socket.socket,
        report: Callable[[KvTransferred], None],
        *,
        block_senders: BlockSenders,
    ) -> None:
        """`sock` listens."""
        super().__init__("kv-sender")
        self._block_senders = block_senders
        self._access = access
        self._part_len = max(1, PART_BYTES // access.bytes_per_token)
        self._span_len = max(1, PART_BYTES // max(access.layer_bytes))
        self._events = events
        self._peers = peers
        self._report = report
        self._sock = sock
        self._namespace = ""  # behind that of a peer, once the weights have been replaced
        self._transfers: dict[str, _Transfer] = {}
        self._connections: set[Connection] = set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._sock.setblocking(False)
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._sock)
            except OSError as error:  # no file descriptor is free, or the peer has gone again
                logger.warning("a connection for KV could not be accepted: %s", error)
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            if len(self._connections) >= MAX_TRANSFERS:
                accepted.close()  # the peer tries another engine, or computes the prompt itself
                continue
            accepted.setblocking(True)
            connection = Connection(accepted)
            self._connections.add(connection)
            name = f"kv-{uuid.uuid4().hex}"
            self.spawn_for(name, self._serve(name, connection))

    def end_request(self, request_id: str, error: ErrorInfo) -> None:
        """`_serve` has ended the transfer, whatever it raised."""
        logger.info("a transfer of KV ended early: %s", error.message)

    async def stop(self) -> None:
        for connection in self._connections:
            connection.abort()
        await super().stop()
        self._sock.close()
        self._block_senders.close()

    def name_model(self, model: str, *, namespace: str) -> None:
        """Serves peers with these weights from now on, and ends the transfers of the others. What
        comes after has no KV of other weights, since its namespace in the prefix cache is another.
        """
        self._peers = dataclasses.replace(self._peers, model=model)
        self._namespace = namespace
        for transfer in self._transfers.values():
            transfer.parts.put(REPLACED)

    def owns(self, request_id: str) -> bool:
        """Returns whether a request is that of a transfer, up to its Retired or Refused."""
        return request_id in self._transfers

    def send(self, effect: ReceiveKv | SendKv | StreamKv | Retired | Refused) -> None:
        transfer = self._transfers.get(effect.request_id)
        if transfer is None or isinstance(effect, ReceiveKv):
            return
        if transfer.is_over and isinstance(effect, SendKv | StreamKv):
            return
        if isinstance(effect, SendKv):
            self._read(transfer, effect.pages, effect.num_tokens)
            return
        if isinstance(effect, StreamKv):
            if transfer.spans.restart(effect.first):
                self._read(transfer, effect.pages, effect.first)  # of a prefix hit
            for span in transfer.spans.stream(effect.first, effect.stop, span_len=self._span_len):
                self._stream(transfer, effect, span)
            return
        del self._transfers[effect.request_id]
        error: ErrorInfo | None = effect.error
        reason = error.message if error else "the prompt was not computed to its end"
        transfer.parts.put(None if transfer.spans.is_whole else reason)

    def _read(self, transfer: _Transfer, pages: tuple[bytes, ...], num_tokens: int) -> None:
        num_layers = len(self._access.layer_bytes)
        for span in transfer.spans.commit(num_tokens):
            tokens, layers = span.tokens, range(span.num_layers, num_layers)
            values = self._access.read(pages, tokens.start, tokens.stop, layers.start)
            transfer.parts.put(_Part(tokens, layers, functools.partial(_result, values)))

    def _stream(self, transfer: _Transfer, effect: StreamKv, span: Span) -> None:
        def on_layer(layer: int, values: HostKv) -> None:
            """Called on the executor's thread, before the result of the step is there."""
            if layer == span.num_layers:
                span.num_layers += 1
                transfer.parts.put(_Part(span.tokens, range(layer, layer + 1), values))

        self._access.stream(effect.iteration, effect.pages, span.tokens, on_layer)

    async def _serve(self, request_id: str, connection: Connection) -> None:
        loop, began_s, outcome = asyncio.get_running_loop(), time.monotonic(), "failed"
        transfers: list[_Transfer] = []

        def begin(fetch: Fetch) -> _Transfer:
            """Called on the connection's thread."""
            num_tokens = len(array_i32(fetch.token_ids)) - 1
            spans = SentSpans(fetch.first, num_tokens, part_len=self._part_len)
            transfer = _Transfer(request_id, spans)
            transfers.append(transfer)
            loop.call_soon_threadsafe(self._admit, transfer, fetch)
            return transfer

        work = functools.partial(self._talk, connection, begin)
        try:
            await in_thread(work, name="kv-sender")
            outcome = "ok"
        except (OSError, TransferError, RuntimeError) as error:
            logger.info("a transfer of KV ended early: %s", error)
        finally:
            connection.close()
            self._connections.discard(connection)
            num_bytes = sum(each.num_bytes for each in transfers)
            transport = transfers[0].transport if transfers else "none"
            seconds = time.monotonic() - began_s
            self._report(KvTransferred("sent", outcome, transport, num_bytes, seconds))
            for transfer in transfers:
                if transfer.request_id in self._transfers:
                    transfer.is_over = True
                    self._events.send(Cancel(transfer.request_id, None, 0, "cancelled"))

    def _talk(self, connection: Connection, begin: Callable[[Fetch], _Transfer]) -> None:
        """The whole conversation, on a thread of its own."""
        fetch = connection.receive()
        if not isinstance(fetch, Fetch):
            raise TransferError(f"a conversation begins with a Fetch, not with {fetch}")
        refusal = self._peers.refusal(fetch, self._access.geometry)
        if refusal is not None:
            connection.send(Failed(refusal))
            return
        transfer = begin(fetch)
        with contextlib.closing(self._block_senders.open(connection)) as block_sender:
            transfer.transport = block_sender.transport
            _send_parts(connection, transfer, block_sender)

    def _admit(self, transfer: _Transfer, fetch: Fetch) -> None:
        if fetch.model != self._peers.model:  # it has changed a moment ago
            transfer.parts.put(REPLACED)
            return
        self._transfers[transfer.request_id] = transfer
        self._events.send(
            AdmitRequest(
                transfer.request_id,
                fetch.token_ids,
                SamplingParams(seed=0, max_tokens=0),
                namespace=f"{fetch.namespace}{self._namespace}",
                client=CLIENT,
                sends_kv=True,
            )
        )


class WithoutTransfers:
    """The scheduler's port for text, but for the requests of transfers: these have no client."""

    def __init__(self, text: Sink[DetokenizerEvent], sender: KvSender) -> None:
        self._text = text
        self._sender = sender

    def send(self, message: DetokenizerEvent) -> None:
        if isinstance(message, Retired | Refused) and self._sender.owns(message.request_id):
            return
        self._text.send(message)


def _send_parts(connection: Connection, transfer: _Transfer, block_sender: BlockSender) -> None:
    while True:
        try:
            part = transfer.parts.get(timeout=WAITING_S)
        except queue.Empty:
            connection.send(Waiting())
            continue
        if part is None:
            block_sender.end()
            return
        if isinstance(part, str):
            connection.send(Failed(part))
            return
        values = part.values()
        block_sender.send(part.tokens, part.layers, values)
        transfer.num_bytes += len(values)


def _result(values: Future[HostKv]) -> memoryview:
    return values.result()()


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError if the address cannot be used."""
    return socket.create_server((host, port), backlog=MAX_TRANSFERS)
