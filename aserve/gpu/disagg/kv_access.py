"""Gathers the KV of single tokens from the pools, and scatters it into them.

The bytes of a transfer are those of the model's layers in their order, and then those of the
drafter's. Each layer gives keys [tokens, bytes of a slot], and then values, or the index keys of
sparse layers, which have latents.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.device.base import Device
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.step.resolve import DeviceState
from aserve.gpu.transfer.pinned import to_device
from aserve.messages.base import array_i32
from aserve.messages.transfers import HostKv, KvLayer, KvLayout, OnLayer

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
T = TypeVar("T")


class TorchKvAccess:
    """Implements messages.transfers.LayeredKvAccess. `submit` takes a job for the thread of the
    executor. With `writes_here`, the thread that asks for a write does it.
    """

    __slots__ = (
        "_device",
        "_layers",
        "_pools",
        "_streams",
        "_submit",
        "_writes_here",
        "bytes_per_token",
        "geometry",
        "layer_bytes",
        "layout",
        "pool_shapes",
    )

    def __init__(
        self,
        state: DeviceState,
        device: Device,
        submit: Callable[[Callable[[], None]], None],
        *,
        writes_here: bool = False,
    ) -> None:
        pools, draft_pools = state.pools, state.draft_pools
        if type(pools) is not KvPools:
            raise ConfigError(
                "KV in host memory cannot be transferred: leave out --enable-hisparse, or "
                "--disaggregation-mode and --enable-hierarchical-cache"
            )
        self._pools = (pools,) if draft_pools is None else (pools, draft_pools)
        self._device = device
        self._submit = submit
        self._writes_here = writes_here
        self._streams = state.kv_streams
        self._layers = _layers_of(self._pools)
        self.layout = KvLayout(
            tuple(_dtypes_of(each) for each in self._pools),
            tuple(KvLayer(each.group, each.slot_bytes, each.is_divided) for each in self._layers),
        )
        self.layer_bytes = self.layout.layer_bytes
        self.bytes_per_token = sum(self.layer_bytes)
        self.pool_shapes = self.layout.pool_shapes
        self.geometry = self.layout.text

    def barrier(self) -> Future[None]:
        return self._run(lambda: None)

    def read(
        self, pages: tuple[bytes, ...], first: int, stop: int, from_layer: int = 0
    ) -> Future[HostKv]:
        layers = self._layers[from_layer:]
        return self._run(lambda: self._read(layers, pages, first, stop))

    def write(
        self,
        pages: tuple[bytes, ...],
        first: int,
        token_ids: bytes,
        values: memoryview,
        layers: range | None = None,
    ) -> Future[None]:
        work = functools.partial(self._write, pages, first, token_ids, values, layers)
        return _run_here(work) if self._writes_here else self._run(work)

    def stream(
        self, iteration: int, pages: tuple[bytes, ...], tokens: range, on_layer: OnLayer
    ) -> None:
        places = {
            layer.index: place for place, layer in enumerate(self._layers) if layer.index >= 0
        }

        def on_stored(index: int) -> None:
            """Called on the executor's thread."""
            place = places.get(index)
            if place is not None and place < len(self._layers) - 1:
                layer = self._layers[place : place + 1]
                with contextlib.suppress(RuntimeError, IndexError, ValueError):  # read afterwards
                    on_layer(place, self._read(layer, pages, tokens.start, tokens.stop))

        self._submit(lambda: self._streams.add(iteration, on_stored))

    def _run(self, work: Callable[[], T]) -> Future[T]:
        done: Future[T] = Future()
        self._submit(lambda: _settle(done, work))
        return done

    def _read(
        self, layers: list[_Layer], pages: tuple[bytes, ...], first: int, stop: int
    ) -> HostKv:
        device, start = self._pools[0].device, 0
        size = (stop - first) * sum(sum(layer.slot_bytes) for layer in layers)
        packed = torch.empty(size, dtype=torch.uint8, device=device)
        slots = [self._slots(group_pages, first, stop) for group_pages in pages]
        for layer in layers:
            for pool in layer.pools:
                part, start = _part(packed, start, pool, stop - first)
                torch.index_select(pool, 0, slots[layer.group], out=part)
        host = packed
        if device.type != "cpu":
            host = self._device.host_buffer(-(-size // 4)).view(torch.uint8)[:size]
            host.copy_(packed, non_blocking=True)
        event = self._device.mark()

        def wait() -> memoryview:
            event.synchronize()
            values: memoryview = host.numpy().data
            return values

        return wait

    def _write(
        self,
        pages: tuple[bytes, ...],
        first: int,
        token_ids: bytes,
        values: memoryview,
        layers: range | None,
    ) -> None:
        ids, device = array_i32(token_ids), self._pools[0].device
        packed, start = to_device(np.frombuffer(values, np.uint8), device), 0
        slots = [self._slots(group_pages, first, first + len(ids)) for group_pages in pages]
        if layers is None or not layers.start:
            tokens = to_device(ids.copy(), device)
            _store(self._pools[0].token_pool, slots[0], tokens)
        for layer in self._layers if layers is None else self._layers[layers.start : layers.stop]:
            self._clear_last(layer, pages[layer.group], first, first + len(ids))
            for pool in layer.pools:
                part, start = _part(packed, start, pool, len(ids))
                _store(pool, slots[layer.group], part)

    def _clear_last(self, layer: _Layer, pages: bytes, first: int, stop: int) -> None:
        """Clears the page of the last token, if this is the first write to it: attention reads
        whole pages, and the rest of it holds what a former owner left.
        """
        size = self._pools[0].page_size
        if (stop - 1) // size * size >= first:
            start = int(array_i32(pages)[(stop - 1) // size]) * size
            for pool in layer.pools:
                pool[start : start + size].zero_()

    def _slots(self, pages: bytes, first: int, stop: int) -> Tensor:
        size, positions = self._pools[0].page_size, np.arange(first, stop)
        slots = array_i32(pages)[positions // size].astype(np.int64) * size + positions % size
        return to_device(slots, self._pools[0].device)


def _run_here(work: Callable[[], T]) -> Future[T]:
    """PERF: on the executor's thread, a write of 4 MiB between two steps took as long as a step of
    a tiny model (bench disagg).
    """
    done: Future[T] = Future()
    with torch.inference_mode():
        _settle(done, work)
    return done


def _settle(done: Future[T], work: Callable[[], T]) -> None:
    """NOTE: an exception that left a job would end the executor's thread."""
    try:
        done.set_result(work())
    except (RuntimeError, IndexError, ValueError) as error:
        done.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer that stores KV. `index` is that of the model, or -1 for a drafter's. `pools` are
    views [slots, words of a slot]: of keys and values, or of latents and their index keys.
    """

    index: int
    group: int
    pools: tuple[Tensor, ...]
    is_latent: bool

    @property
    def is_divided(self) -> bool:
        """Tensor-parallel ranks divide heads. Latents and drafters are whole on each of them."""
        return self.index >= 0 and not self.is_latent

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        return tuple(pool.shape[1] * pool.itemsize for pool in self.pools)


def _dtypes_of(pools: KvPools) -> str:
    kinds = dict.fromkeys((pools.dtype, *(keys.dtype for keys in pools.index_keys.values())))
    return " ".join(map(str, kinds))


def _layers_of(pools: tuple[KvPools, ...]) -> list[_Layer]:
    """The layers of all pools, each once: a layer may read what another one stores."""
    found: list[_Layer] = []
    seen: set[int] = set()
    for number, each in enumerate(pools):
        for index, layer in sorted(each.layers.items()):
            if layer.keys.data_ptr() in seen or not layer.keys.numel():
                continue
            seen.add(layer.keys.data_ptr())
            is_latent = layer.values.data_ptr() == layer.keys.data_ptr()
            stored = [layer.keys] if is_latent else [layer.keys, layer.values]
            if index in each.index_keys:
                stored.append(each.index_keys[index])
            words = tuple(_slot_words(pool) for pool in stored)
            found.append(_Layer(-1 if number else index, layer.group, words, is_latent))
    return found


def _slot_words(pool: Tensor) -> Tensor:
    """A view of a layer's pool [slots, ...] as words [slots, words of a slot].

    PERF: words of 8 bytes are copied up to three times as fast as single bytes.
    """
    stored = pool.flatten(1).view(torch.uint8)
    widest = next(word for word in WORDS if stored.shape[1] % word.itemsize == 0)
    return stored.view(widest)


def _store(pool: Tensor, slots: Tensor, values: Tensor) -> None:
    """pool[slots] = values, for a pool [slots, ...].

    PERF: numpy's copy takes 14 us for 512 KiB, torch's 70 to 107, and more than one thread.
    """
    if pool.device.type == "cpu":
        pool.numpy()[slots.numpy()] = values.numpy()
    else:
        pool.index_copy_(0, slots, values)


def _part(packed: Tensor, start: int, pool: Tensor, num_tokens: int) -> tuple[Tensor, int]:
    """The bytes of a transfer from `start` on that belong to a pool, as [tokens, words], and where
    they end.
    """
    shape = (num_tokens, pool.shape[1])
    stop = start + math.prod(shape) * pool.itemsize
    return packed[start:stop].view(pool.dtype).view(shape), stop
