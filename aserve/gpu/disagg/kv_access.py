"""Gathers the KV of single tokens from the pools, and scatters it into them.

The bytes of a transfer are the pools of the model and then those of the drafter, group by group,
keys before values. Each pool gives [layers, tokens, bytes of a slot].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.device.base import Device
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.step.resolve import DeviceState
from aserve.messages.base import array_i32
from aserve.messages.transfers import HostKv

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
T = TypeVar("T")


class TorchKvAccess:
    """Implements messages.transfers.KvAccess. `submit` takes a job for the executor's thread."""

    __slots__ = (
        "_device",
        "_groups",
        "_pools",
        "_submit",
        "bytes_per_token",
        "geometry",
        "pool_shapes",
    )

    def __init__(
        self,
        state: DeviceState,
        device: Device,
        submit: Callable[[Callable[[], None]], None],
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
        self._groups = [self._pools_of(group) for group in range(len(pools.num_pages))]
        shapes = [
            [(len(pool), pool.shape[2] * pool.itemsize) for pool in group] for group in self._groups
        ]
        self.bytes_per_token = sum(num * size for group in shapes for num, size in group)
        self.pool_shapes = tuple(shape for group in shapes for shape in group)
        self.geometry = f"{[str(each.dtype) for each in self._pools]} {shapes}"

    def read(self, pages: tuple[bytes, ...], first: int, stop: int) -> Future[HostKv]:
        return self._run(lambda: self._read(pages, first, stop))

    def write(
        self, pages: tuple[bytes, ...], first: int, token_ids: bytes, values: memoryview
    ) -> Future[None]:
        return self._run(lambda: self._write(pages, first, token_ids, values))

    def _run(self, work: Callable[[], T]) -> Future[T]:
        done: Future[T] = Future()

        def job() -> None:
            try:
                done.set_result(work())
            except (RuntimeError, IndexError, ValueError) as error:
                # NOTE: an exception that left this job would end the executor's thread.
                done.set_exception(error)

        self._submit(job)
        return done

    def _read(self, pages: tuple[bytes, ...], first: int, stop: int) -> HostKv:
        device, start = self._pools[0].device, 0
        size = (stop - first) * self.bytes_per_token
        packed = torch.empty(size, dtype=torch.uint8, device=device)
        for group, group_pages in zip(self._groups, pages, strict=True):
            slots = self._slots(group_pages, first, stop)
            for pool in group:
                part, start = _part(packed, start, pool, len(slots))
                torch.index_select(pool, 1, slots, out=part)
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
        self, pages: tuple[bytes, ...], first: int, token_ids: bytes, values: memoryview
    ) -> None:
        ids, device = array_i32(token_ids), self._pools[0].device
        packed, start = torch.frombuffer(values, dtype=torch.uint8).to(device), 0
        for number, (group, group_pages) in enumerate(zip(self._groups, pages, strict=True)):
            slots = self._slots(group_pages, first, first + len(ids))
            self._clear_last(number, group_pages, first, first + len(ids))
            if not number:
                tokens = torch.from_numpy(ids.copy()).to(device)
                self._pools[0].token_pool.index_copy_(0, slots, tokens)
            for pool in group:
                part, start = _part(packed, start, pool, len(ids))
                for layer, values_of_layer in zip(pool, part, strict=True):
                    layer.index_copy_(0, slots, values_of_layer)

    def _pools_of(self, group: int) -> list[Tensor]:
        pools = [pool for each in self._pools for pool in each.pools_of(group)]
        return [_slot_words(pool) for pool in pools if pool.numel()]

    def _clear_last(self, group: int, pages: bytes, first: int, stop: int) -> None:
        """Clears the page of the last token, if this is the first write to it: attention reads
        whole pages, and the rest of it holds what a former owner left.
        """
        size = self._pools[0].page_size
        if (stop - 1) // size * size >= first:
            page = torch.tensor([array_i32(pages)[(stop - 1) // size]], dtype=torch.int64)
            for each in self._pools:
                each.clear(group, page.to(each.device))

    def _slots(self, pages: bytes, first: int, stop: int) -> Tensor:
        size, positions = self._pools[0].page_size, np.arange(first, stop)
        slots = array_i32(pages)[positions // size].astype(np.int64) * size + positions % size
        return torch.from_numpy(slots).to(self._pools[0].device)


def _slot_words(pool: Tensor) -> Tensor:
    """A view of a pool [layers, slots, heads, dim] as words [layers, slots, words of a slot].

    PERF: words of 8 bytes are copied up to three times as fast as single bytes.
    """
    stored = pool.flatten(2).view(torch.uint8)
    widest = next(word for word in WORDS if stored.shape[2] % word.itemsize == 0)
    return stored.view(widest)


def _part(packed: Tensor, start: int, pool: Tensor, num_tokens: int) -> tuple[Tensor, int]:
    """The bytes of a transfer from `start` on that belong to a pool, as [layers, tokens, words],
    and where they end.
    """
    shape = (len(pool), num_tokens, pool.shape[2])
    stop = start + math.prod(shape) * pool.itemsize
    return packed[start:stop].view(pool.dtype).view(shape), stop
