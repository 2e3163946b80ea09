"""The KV of an engine of tensor-parallel ranks, read and written as if one device had it.

Each rank has some of the KV heads, so the bytes of a token in a layer's pool are those of the
ranks, one behind the other. Where there are fewer heads than ranks, neighbours have the same head:
all of them write it, and it is read of the first one. Latents and the KV of drafters are whole on
each rank. So engines of different numbers of ranks understand each other.

Requests travel to the other ranks behind the launches that were sent before, and are ordered with
them as on rank 0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from aserve.messages.transfers import HostKv, KvLayer, LayeredKvAccess, OnLayer
from aserve.parallel.topology import ReadKv, WriteKv

T = TypeVar("T")
Bytes: TypeAlias = npt.NDArray[np.uint8]
# Asks another rank, and completes with the bytes that it read. Any thread may call it.
AskRank: TypeAlias = Callable[[int, ReadKv | WriteKv], Future[bytes]]


class KvOfRanks:
    """Implements messages.transfers.LayeredKvAccess. `own` is rank 0's."""

    def __init__(
        self, own: LayeredKvAccess, ask: AskRank, *, num_ranks: int, num_parts: int
    ) -> None:
        """The heads are divided into `num_parts`, of which each of `num_ranks` has one."""
        self.layout = own.layout.of_all(num_parts)
        self.layer_bytes = self.layout.layer_bytes
        self.bytes_per_token = sum(self.layer_bytes)
        self.pool_shapes = self.layout.pool_shapes
        self.geometry = self.layout.text
        self._own = own
        self._ask = ask
        self._num_ranks = num_ranks
        self._num_parts = num_parts

    def barrier(self) -> Future[None]:
        """NOTE: the other ranks write in the order of launches."""
        return self._own.barrier()

    def read(
        self, pages: tuple[bytes, ...], first: int, stop: int, from_layer: int = 0
    ) -> Future[HostKv]:
        message = ReadKv(0, pages, first, stop, from_layer)
        others = [self._ask(rank, message) for rank in self._readers() if rank]
        own = self._own.read(pages, first, stop, from_layer)
        layers = self._own.layout.layers[from_layer:]

        def joined(_: object) -> HostKv:
            parts = [own.result(), *(_constant(other.result()) for other in others)]
            return lambda: _join([_as_bytes(part()) for part in parts], layers, stop - first)

        return _when_all([own, *others], joined)

    def write(
        self,
        pages: tuple[bytes, ...],
        first: int,
        token_ids: bytes,
        values: memoryview,
        layers: range | None = None,
    ) -> Future[None]:
        layers = range(len(self.layer_bytes)) if layers is None else layers
        own_layers = self._own.layout.layers[layers.start : layers.stop]
        parts = _split(_as_bytes(values), own_layers, len(token_ids) // 4, self._num_parts)
        done: list[Future[bytes] | Future[None]] = []
        for rank in range(1, self._num_ranks):
            part = parts[self._part_of(rank)].tobytes()
            message = WriteKv(0, pages, first, token_ids, part, layers.start, layers.stop)
            done.append(self._ask(rank, message))
        own = parts[self._part_of(0)].data
        done.append(self._own.write(pages, first, token_ids, own, layers))
        return _when_all(done, lambda _: None)

    def stream(
        self, iteration: int, pages: tuple[bytes, ...], tokens: range, on_layer: OnLayer
    ) -> None:
        """WHY nothing: the ranks would have to send each layer within their step. What a step has
        computed is read behind it, as where steps do not run layer by layer."""

    def _part_of(self, rank: int) -> int:
        return rank * self._num_parts // self._num_ranks

    def _readers(self) -> list[int]:
        """The first rank of each part."""
        return [part * self._num_ranks // self._num_parts for part in range(self._num_parts)]


def _join(parts: Sequence[Bytes], layers: Sequence[KvLayer], num_tokens: int) -> memoryview:
    """Returns the bytes of whole layers; each part has those of one rank."""
    found, start = [], 0
    for layer in layers:
        for size in layer.slot_bytes:
            stop = start + num_tokens * size
            own = [part[start:stop].reshape(num_tokens, size) for part in parts]
            found.append(np.concatenate(own if layer.is_divided else own[:1], axis=1).ravel())
            start = stop
    values: memoryview = np.concatenate(found).data
    return values


def _split(
    values: Bytes, layers: Sequence[KvLayer], num_tokens: int, num_parts: int
) -> list[Bytes]:
    """The reverse of `_join`; `layers` are those of a rank."""
    found: list[list[Bytes]] = [[] for _ in range(num_parts)]
    start = 0
    for layer in layers:
        count = num_parts if layer.is_divided else 1
        for size in layer.slot_bytes:
            stop = start + num_tokens * size * count
            heads = values[start:stop].reshape(num_tokens, count, size)
            for number, part in enumerate(found):
                part.append(heads[:, number % count].ravel())
            start = stop
    return [np.concatenate(part) for part in found]


def _when_all(
    futures: Sequence[Future[T] | Future[bytes] | Future[None]], result: Callable[[object], T]
) -> Future[T]:
    """Completes with `result` when all of them have, or with the error of one that failed."""
    done: Future[T] = Future()
    left, lock = len(futures), threading.Lock()

    def note(_: object) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        errors = [each.exception() for each in futures]
        error = next((each for each in errors if each is not None), None)
        if error is None:
            done.set_result(result(None))
        else:
            done.set_exception(error)

    for future in futures:
        future.add_done_callback(note)
    return done


def _constant(values: bytes) -> HostKv:
    return lambda: memoryview(values)


def _as_bytes(values: memoryview) -> Bytes:
    return np.frombuffer(values, np.uint8)
