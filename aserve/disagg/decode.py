"""`KvReceiver`: fetches the KV of prompts from prefill engines, with a thread for each transfer."""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from aserve.actors.base import Actor
from aserve.channel import Sink
from aserve.disagg.spans import ReceivedSpans
from aserve.disagg.transports import BlockReader, BlockReaders, receive_values
from aserve.disagg.wire import (
    VERSION,
    Block,
    Choice,
    Connection,
    Failed,
    Fetch,
    Offers,
    TransferError,
    TransferRefused,
    Waiting,
    connect,
)
from aserve.errors import ErrorInfo, StepError
from aserve.host.threads import in_thread
from aserve.messages.executor import SchedulerEvent
from aserve.messages.output import Refused, Retired
from aserve.messages.requests import AdmitRequest
from aserve.messages.transfers import (
    KvFailed,
    KvReady,
    LayeredKvAccess,
    ReceiveKv,
    SendKv,
    StreamKv,
)
from aserve.observability.reports import KvTransferred

COOL_S = 5.0  # a prefill engine that broke a transfer off is left alone for this long
MAX_WRITES = 2  # blocks that wait for the device, per transfer

logger = logging.getLogger(__name__)


class Awaiting:
    """The scheduler's inbox for requests: those whose prompt another engine can compute await their
    KV.
    """

    def __init__(self, events: Sink[SchedulerEvent]) -> None:
        self._events = events

    def send(self, message: SchedulerEvent) -> None:
        if isinstance(message, AdmitRequest) and _is_plain(message):
            message = msgspec.structs.replace(message, awaits_kv=True)
        self._events.send(message)


def _is_plain(request: AdmitRequest) -> bool:
    """Returns whether the KV of a prompt depends on its tokens alone, and nothing but the tokens
    behind it is wanted.
    """
    is_special = request.embeds or request.lora_slot or request.pictures
    sampling = request.sampling
    generates_alone = bool(sampling.max_tokens) and sampling.prompt_logprobs is None
    return request.is_causal and not is_special and generates_alone


@dataclass(slots=True, eq=False)
class _Peer:
    address: tuple[str, int]
    num_transfers: int = 0
    failed_at_s: float = float("-inf")

    @property
    def is_cooling(self) -> bool:
        """WHY: a host that does not answer would cost every request CONNECT_S."""
        return time.monotonic() - self.failed_at_s < COOL_S

    def __str__(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"


@dataclass(slots=True, eq=False)
class _Transfer:
    """Holds a transfer. KV that has come is on the device, or on the way to it in `writes`."""

    asked: ReceiveKv
    spans: ReceivedSpans
    barrier: Future[None]  # of what was launched before, such as a Sample of the pages' last owner
    connection: Connection | None = None
    block_reader: BlockReader | None = None  # of the last prefill engine that made an offer
    is_cancelled: bool = False
    num_bytes: int = 0
    began_s: float = field(default_factory=time.monotonic)
    writes: deque[Future[None]] = field(default_factory=deque)

    def settle(self, *, most: int = 0) -> None:
        """Waits until at most so many writes are under way."""
        while len(self.writes) > most:
            self.writes.popleft().result()

    def cancel(self) -> None:
        self.is_cancelled = True
        if self.connection is not None:
            self.connection.abort()


class KvReceiver(Actor[None]):
    """`send` is the scheduler's port for KV."""

    def __init__(
        self,
        access: LayeredKvAccess,
        events: Sink[SchedulerEvent],
        addresses: Sequence[tuple[str, int]],
        *,
        key: str,
        model: str,
        report: Callable[[KvTransferred], None],
        block_readers: BlockReaders,
    ) -> None:
        super().__init__("kv-receiver")
        self._block_readers = block_readers
        self._access = access
        self._events = events
        self._peers = [_Peer(address) for address in addresses]
        self._key, self._model = key, model
        self._report = report
        self._transfers: dict[str, _Transfer] = {}  # by the name of the sequence

    async def run(self) -> None:
        """Its work is in the tasks of transfers."""

    async def stop(self) -> None:
        for transfer in self._transfers.values():
            transfer.cancel()
        self._block_readers.close()
        await super().stop()

    def send(self, effect: ReceiveKv | SendKv | StreamKv | Retired | Refused) -> None:
        if isinstance(effect, ReceiveKv):
            stop, layer_bytes = effect.num_tokens - 1, self._access.layer_bytes
            spans = ReceivedSpans(effect.first, stop, layer_bytes)
            transfer = _Transfer(effect, spans, self._access.barrier())
            name = _name_of(effect)
            self._transfers[name] = transfer
            self.spawn_for(name, self._receive(name, transfer))
        elif isinstance(effect, Retired):
            ended = self._transfers.get(_name_of(effect))
            if ended is not None:
                ended.cancel()

    def name_model(self, model: str, *, namespace: str) -> None:
        """Asks for KV of these weights from now on. The scheduler names the namespace."""
        self._model = model

    def end_request(self, request_id: str, error: ErrorInfo) -> None:
        """Ends the transfer of a sequence, which is computed here. The thread has ended."""
        if request_id in self._transfers:
            self._end(request_id, error.message)

    async def _receive(self, name: str, transfer: _Transfer) -> None:
        work = functools.partial(self._try_peers, transfer)
        self._end(name, await in_thread(work, name="kv-receiver"))

    def _end(self, name: str, reason: str | None) -> None:
        transfer = self._transfers.pop(name)
        asked = transfer.asked
        if reason is None:
            self._events.send(KvReady(asked.request_id, asked.child))
        else:
            self._events.send(KvFailed(asked.request_id, asked.child, StepError(reason).info()))
        if reason is not None and not transfer.is_cancelled:
            logger.warning("the KV of %s is computed here: %s", asked.request_id, reason)
        outcome = "ok" if reason is None else "cancelled" if transfer.is_cancelled else "failed"
        seconds = time.monotonic() - transfer.began_s
        transport = "none" if transfer.block_reader is None else transfer.block_reader.transport
        self._report(KvTransferred("received", outcome, transport, transfer.num_bytes, seconds))

    def _try_peers(self, transfer: _Transfer) -> str | None:
        """Runs on the transfer's thread. Returns None when all KV is in the pools, or the reason
        why not; nothing writes to the pages any more.
        """
        reason = "every prefill engine failed just now"
        for peer in sorted(self._peers, key=lambda each: each.num_transfers):
            if transfer.is_cancelled:
                return "cancelled"
            if peer.is_cooling:
                continue
            peer.num_transfers += 1
            try:
                self._talk(transfer, peer)
                return None
            except TransferRefused as refusal:
                reason = f"{peer}: {refusal}"
            except (OSError, TransferError, RuntimeError) as error:
                reason = f"{peer}: {error}"
                if transfer.block_reader is not None:
                    transfer.block_reader.forget()
                if not transfer.is_cancelled:
                    peer.failed_at_s = time.monotonic()
            finally:
                peer.num_transfers -= 1
                if transfer.connection is not None:
                    transfer.connection.close()
                _wait_for(transfer.writes)
        return reason

    def _talk(self, transfer: _Transfer, peer: _Peer) -> None:
        asked, spans = transfer.asked, transfer.spans
        spans.restart()
        connection = transfer.connection = connect(*peer.address)
        if transfer.is_cancelled:  # while it connected, when there was nothing to abort
            raise TransferError("cancelled")
        connection.send(
            Fetch(
                VERSION,
                *(self._key, self._model, self._access.geometry),
                first=spans.done,
                token_ids=asked.token_ids,
                namespace=asked.namespace,
            )
        )
        block_reader = transfer.block_reader = self._agree(connection)
        while not spans.is_whole:
            match connection.receive():
                case Block() as block:
                    self._take(transfer, connection, block_reader, block)
                case Failed(reason):
                    raise TransferRefused(reason)
                case Waiting():
                    pass
                case message:
                    raise TransferError(f"{message} is not what a prefill engine says")
        transfer.settle()

    def _agree(self, connection: Connection) -> BlockReader:
        match connection.receive():
            case Offers() as offers:
                block_reader = self._block_readers.choose(offers)
            case Failed(reason):
                raise TransferRefused(reason)
            case message:
                raise TransferError(f"{message} is no offer: the peer is not a prefill engine")
        connection.send(Choice(block_reader.transport))
        return block_reader

    def _take(
        self, transfer: _Transfer, connection: Connection, block_reader: BlockReader, block: Block
    ) -> None:
        asked, first = transfer.asked, block.first
        transfer.spans.check(block)
        values = receive_values(connection, block_reader, block)
        ids = asked.token_ids[4 * first : 4 * (first + block.num_tokens)]
        layers = range(block.from_layer, block.from_layer + block.num_layers)
        transfer.barrier.result()
        transfer.settle(most=MAX_WRITES - 1)
        transfer.writes.append(self._access.write(asked.pages, first, ids, values, layers))
        transfer.spans.note(block)
        transfer.num_bytes += block.num_bytes


def _name_of(effect: ReceiveKv | Retired) -> str:
    return f"{effect.request_id}/{effect.child}"


def _wait_for(writes: deque[Future[None]]) -> None:
    """Waits for all of them, whether they fail or not: the pages are then left alone."""
    while writes:
        writes.popleft().exception()
