"""Recurrent layers keep a state for each row in place of KV for each token; this file has their
sizes, and how they reach their states.

A forward can only begin behind a token whose state the row has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import msgspec
from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec
from aserve.gpu.models.base import Attend, CausalModel
from aserve_kernels.delta_rule import DeltaTokens


class StateShape(Protocol):
    """The sizes of a layer's states."""

    @property
    def matrix_sizes(self) -> tuple[int, int, int]:
        """Returns (heads, d_k, d_v) of the matrices; zeros for a layer that has none."""

    @property
    def num_channels(self) -> int:
        """Returns the number of channels that conv reads."""

    @property
    def num_taps(self) -> int:
        """Returns the width of conv."""


class RecurrentSpec(msgspec.Struct, frozen=True):
    """The static facts of one recurrent layer."""

    index: int
    shape: StateShape


@runtime_checkable
class RecurrentMixer(Protocol):
    """A mixer with a state, or with a mixer that has one."""

    spec: RecurrentSpec


def recurrent_specs(mixers: Iterable[object]) -> tuple[RecurrentSpec, ...]:
    return tuple(mixer.spec for mixer in mixers if isinstance(mixer, RecurrentMixer))


@runtime_checkable
class HasRecurrentLayers(Protocol):
    """A `CausalModel` some of whose layers may be recurrent."""

    recurrent_layers: tuple[RecurrentSpec, ...]


def recurrent_layers_of(model: CausalModel) -> tuple[RecurrentSpec, ...]:
    return model.recurrent_layers if isinstance(model, HasRecurrentLayers) else ()


@runtime_checkable
class RecurrentStage(Protocol):
    """A pipeline's stage of such a model. It may have none of these layers itself."""

    every_recurrent_layer: tuple[RecurrentSpec, ...]


def is_recurrent(model: CausalModel) -> bool:
    """Says whether rows of the model keep states, in this stage of a pipeline or in another."""
    if isinstance(model, RecurrentStage):
        return bool(model.every_recurrent_layer)
    return bool(recurrent_layers_of(model))


@runtime_checkable
class RecurrentAttend(Protocol):
    """An `Attend` for models with recurrent layers."""

    def __call__(self, layer: LayerSpec, inputs: AttentionInputs, /) -> Tensor: ...

    def advance(self, layer: RecurrentSpec, tokens: DeltaTokens, /) -> Tensor:
        """Advances the states of the rows by the forward's tokens -> y [tokens, value heads, d_v],
        at least float32."""

    def convolve(self, layer: RecurrentSpec, x: Tensor, conv: Tensor, /) -> Tensor:
        """x [tokens, channels], conv [channels, taps] -> the causal convolution of each row's
        channels [tokens, channels], at least float32."""


def with_states(attend: Attend, layer: RecurrentSpec) -> RecurrentAttend:
    if not isinstance(attend, RecurrentAttend):
        raise BugError(f"layer {layer.index} is recurrent, and its forward has no states")
    return attend
