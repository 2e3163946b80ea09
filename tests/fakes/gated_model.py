"""A HashModel whose forwards do what a test wants before they run: wait, raise, or give NaN."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from aserve.gpu.models.base import Attend
from tests.fakes.hash_model import HashModel

TIMEOUT_S = 30.0  # of waits that only a bug lets run out


class Gate:
    """The executor's thread says that it is there, and waits until it may go on."""

    def __init__(self) -> None:
        self._is_there = threading.Event()
        self._may_go = threading.Event()

    def open(self) -> None:
        self._may_go.set()

    def wait_until_there(self) -> None:
        assert self._is_there.wait(TIMEOUT_S)

    def __call__(self) -> None:
        self._is_there.set()
        assert self._may_go.wait(TIMEOUT_S)


class HookedModel(HashModel):
    """`before` maps the number of a forward (from 1 on) to what runs before it, on its thread.
    `spoil` maps the number of a call of `logits` to what becomes of them."""

    def __init__(
        self,
        before: dict[int, Callable[[], None]] | None = None,
        *,
        spoil: dict[int, Callable[[Tensor], Tensor]] | None = None,
    ) -> None:
        super().__init__()
        self.before = before or {}
        self.spoil = spoil or {}
        self.num_forwards = 0
        self.num_logits = 0

    def hidden(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        self.num_forwards += 1
        if hook := self.before.get(self.num_forwards):
            hook()
        return super().hidden(input_ids, positions, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        self.num_logits += 1
        logits = super().logits(hidden)
        spoil = self.spoil.get(self.num_logits)
        return logits if spoil is None else spoil(logits)
