"""`KvStreams`: tells which layers of a step have stored their KV, while the step runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec
from aserve.gpu.models.base import Attend
from aserve.gpu.models.indexer import IndexInputs
from aserve.gpu.models.latent_attention import LatentAttend, LatentInputs, SparseAttend

OnStored: TypeAlias = Callable[[int], None]
Tell: TypeAlias = Callable[[LayerSpec, int], None]


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

        def tell(layer: LayerSpec, num_stored: int) -> None:
            if num_stored == num_tokens:
                for on_stored in self._current:
                    on_stored(layer.index)

        if isinstance(attend, SparseAttend):
            return _SparseTold(attend, tell)
        if isinstance(attend, LatentAttend):
            return _LatentsTold(attend, tell)
        return _Told(attend, tell)


class _Told:
    """Attention that calls `tell` with each layer and the number of tokens whose KV it has stored.
    A subclass has the method of the kind of attention (`LatentAttend`, `SparseAttend`)."""

    __slots__ = ("_attend", "_tell")

    def __init__(self, attend: Attend, tell: Tell) -> None:
        self._attend = attend
        self._tell = tell

    def __call__(self, layer: LayerSpec, inputs: AttentionInputs, /) -> Tensor:
        out = self._attend(layer, inputs)
        self._tell(layer, len(inputs.heads))
        return out


class _LatentsTold(_Told):
    _attend: LatentAttend

    def attend_latents(self, layer: LayerSpec, inputs: LatentInputs, /) -> Tensor:
        out = self._attend.attend_latents(layer, inputs)
        self._tell(layer, len(inputs.q))
        return out


class _SparseTold(_Told):
    _attend: SparseAttend

    def attend_sparse(
        self, layer: LayerSpec, inputs: LatentInputs, index: IndexInputs, /
    ) -> Tensor:
        out = self._attend.attend_sparse(layer, inputs, index)
        self._tell(layer, len(inputs.q))
        return out
