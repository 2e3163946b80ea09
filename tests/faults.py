"""What goes wrong on a fake device in a random trace: every command that names a poisoned row, and
now and then another one, but never twice in a row on one row alone, which would rightly end it.
"""

from __future__ import annotations

import random

import msgspec

from aserve.messages.base import array_i32
from aserve.messages.executor import EngineSpec
from aserve.messages.step import Sample, ScheduleBatch
from tests.fakes.toy_device import FakeDevice
from tests.stories import POISON_SEED


class Faults:
    """Makes the device, and decides for each of its commands how it goes wrong, if it does: it
    fails at once, or its result is found to be no good when it is read.
    """

    def __init__(self, spec: EngineSpec, *, chaos: random.Random, rate: float) -> None:
        # With several ranks, what went well here may have failed elsewhere.
        self._forgives = spec.dp_size == 1
        self.chaos = chaos
        self.rate = rate
        self.device = FakeDevice(
            spec,
            must_fail=self._must_fail,
            must_fail_sample=self._must_fail_sample,
            is_unsound=lambda _command: self._goes_wrong,
            notices=lambda: chaos.random() < 0.5,
        )
        self._goes_wrong = False  # the command that runs
        self._hurt: set[bytes] = set()  # rows of failed steps that have not gone well since

    def _must_fail(self, batch: ScheduleBatch) -> bool:
        """A step with held rows has gone well when its Sample has."""
        keys = self._keys(batch.rows)
        is_hit = self._is_hit(keys, is_whole=not batch.held_rows)
        self._goes_wrong = is_hit or any(_is_poisoned(key) for key in keys)
        return self._goes_wrong and self.chaos.random() < 0.5

    def _must_fail_sample(self, sample: Sample) -> bool:
        self._goes_wrong = self._is_hit(self._keys(sample.rows), is_whole=True)
        return self._goes_wrong and self.chaos.random() < 0.5

    def _keys(self, rows: bytes) -> list[bytes]:
        return [self.device.rows[row].key for row in array_i32(rows).tolist()]

    def _is_hit(self, keys: list[bytes], *, is_whole: bool) -> bool:
        may_fail = len(keys) > 1 or keys[0] not in self._hurt
        is_hit = may_fail and self.chaos.random() < self.rate
        if is_hit:
            self._hurt.update(keys)
        elif self._forgives and is_whole and not self.device.was_unsound:
            self._hurt.difference_update(keys)
        return is_hit


def _is_poisoned(key: bytes) -> bool:
    return bool(key) and msgspec.msgpack.decode(key)["seed"] == POISON_SEED
