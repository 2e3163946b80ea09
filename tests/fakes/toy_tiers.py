"""Tiers below the prefix cache of a toy device: a few pages by key, and mishaps by chance."""

from __future__ import annotations

import random
from typing import TypeAlias

from aserve.cache.page_keys import split_keys
from aserve.messages.base import array_i32
from aserve.messages.transfers import KvLoaded, LoadKv, SaveKv, TiersChanged
from tests.fakes.toy_device import FakeDevice

Slots: TypeAlias = list[list[int]]  # tokens, next tokens, and the KV of each group


class ToyTiers:
    """`rate` is how often a page is not taken, is lost before it is loaded, or is lost unheard."""

    def __init__(
        self, device: FakeDevice, *, chaos: random.Random, max_pages: int, rate: float = 0.0
    ) -> None:
        self.device = device
        self.chaos = chaos
        self.max_pages = max_pages
        self.rate = rate
        self.pages: dict[bytes, Slots] = {}
        self.num_loaded = 0

    def save(self, effect: SaveKv) -> TiersChanged:
        added, removed = b"", b""
        for index, key in enumerate(split_keys(effect.keys)):
            if self.chaos.random() < self.rate:
                removed += key
                continue
            self.pages[key] = self._read([int(array_i32(each)[index]) for each in effect.pages])
            added += key
            if len(self.pages) > self.max_pages:
                oldest = next(iter(self.pages))
                del self.pages[oldest]
                removed += oldest
        return TiersChanged(added, removed)

    def load(self, effect: LoadKv) -> KvLoaded:
        """Pages that were lost leave anything where they should be."""
        keys, num_pages = split_keys(effect.keys), effect.first
        for index, key in enumerate(keys):
            slots = self.pages.get(key)
            if slots is None or self.chaos.random() < self.rate:
                break
            self._write([int(array_i32(each)[index]) for each in effect.pages], slots)
            num_pages += 1
        self.num_loaded += num_pages - effect.first
        return KvLoaded(effect.request_id, effect.child, num_pages)

    def _pools(self) -> list[list[int]]:
        device = self.device
        return [device.token_pool, device.next_pool, *device.kv]

    def _read(self, pages: list[int]) -> Slots:
        size = self.device.spec.page_size
        of_pool = [pages[0], pages[0], *pages]
        return [
            pool[page * size : (page + 1) * size]
            for pool, page in zip(self._pools(), of_pool, strict=True)
        ]

    def _write(self, pages: list[int], slots: Slots) -> None:
        size = self.device.spec.page_size
        of_pool = [pages[0], pages[0], *pages]
        for pool, page, values in zip(self._pools(), of_pool, slots, strict=True):
            if page:
                pool[page * size : (page + 1) * size] = values
