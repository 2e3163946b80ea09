"""`KvStreams`: tells which layers of a step have stored their KV, while the step runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec
from aserve.gpu.models.base import Attend

OnStored: TypeAlias = Callable[[int], None]


class KvStreams:
    """Keeps the callbacks that want the KV of steps while these run. It is used on the executor's
    thread only."""

    __slots__ = ("_current", "_wanted")

    def __init__(self) -> None:
        self._wanted: list[tuple[int, OnStored]] = []  # with the iterations of their steps
        self._current: list[OnStored] = []

    def add(self, iteration: int, on_stored: OnStored) -> None:
        """`on_stored` is called with the index of each layer whose KV that step has stored."""
        self._wanted.append((iteration, on_stored))

    def begin(self, iteration: int) -> None:
        """The next forward is of this step. Earlier steps that did not run were dropped."""
        self._current = [each for number, each in self._wanted if number == iteration]
        self._wanted = [wanted for wanted in self._wanted if wanted[0] > iteration]

    @property
    def are_open(self) -> bool:
        """Whether somebody wants the KV of the current step."""
        return bool(self._current)

    def watched(self, attend: Attend, num_tokens: int) -> Attend:
        """Attention that tells when a layer has stored the KV of all tokens of the forward."""
        if not self._current:
            return attend

        def attend_and_tell(layer: LayerSpec, inputs: AttentionInputs) -> Tensor:
            out = attend(layer, inputs)
            if len(inputs.heads) == num_tokens:
                for on_stored in self._current:
                    on_stored(layer.index)
            return out

        return attend_and_tell
