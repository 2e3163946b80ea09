"""The protocol of attention over paged KV: plan a forward once, then attend in every layer.

It knows no model and no step. A backend keeps no state between forwards: what it prepared is in the
plan, and the plan is on its ForwardBatch or in its caller's hands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from aserve.gpu.device.base import Device
from aserve.gpu.kv.layer_groups import LayerGroup, LayerSpec
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.kv.store import kv_dtype_name
from aserve.gpu.models.base import Attend
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.gpu.weights.format import dtype_name
from aserve.messages.base import ArrayI32


class AttentionBackend(Protocol):
    """Where a forward is captured, `plan` is too, unless there are `static_plans`: it reads lengths
    on the device, and of the host only spans and bounds, which are the same at each replay."""

    @property
    def static_plans(self) -> StaticPlans | None: ...

    def plan(self, batch: ForwardBatch) -> object:
        """What all layers of one forward share."""

    def bind(self, batch: ForwardBatch, plan: object) -> Attend:
        """The callable that the model gets: turns, stores in the batch's slots, then attends."""


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """A backend before it is built. `build` may raise AttentionUnavailable."""

    capabilities: Capabilities
    build: Callable[[AttentionSite], AttentionBackend]


class AttentionUnavailable(Exception):
    """This machine lacks what the backend needs; the text says what."""


T = TypeVar("T", int, str)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """None: any. `kv_dtypes` are those that KV may have besides the dtype of q."""

    devices: frozenset[str] | None = None  # types of torch devices
    dtypes: frozenset[torch.dtype] | None = None  # of q
    kv_dtypes: frozenset[torch.dtype] = frozenset()
    head_dims: frozenset[int] | None = None
    page_sizes: frozenset[int] | None = None
    windows: bool = True
    softcaps: bool = True
    host_lens: bool = False  # plans on the host, from exact lengths
    whole_pages: bool = False  # what lies behind a row's length is read, then masked
    can_capture: bool = False  # a forward may be captured and replayed
    shared_pages: bool = False  # gains from knowing what pages all rows share
    deterministic: bool = False  # can give a token the same bits in whatever step it is computed

    def refusals(self, site: AttentionSite) -> Iterator[str]:
        """What it cannot of what is asked, each with its limits."""
        yield from _outside("device", [site.pools.device.type], self.devices)
        yield from _outside("dtype", [dtype_name(site.dtype)], _names(self.dtypes))
        if site.pools.dtype != site.dtype and site.pools.dtype not in self.kv_dtypes:
            known = sorted(map(kv_dtype_name, {site.dtype, *self.kv_dtypes}))
            yield f"KV of {kv_dtype_name(site.pools.dtype)} (has {', '.join(known)})"
        layers = site.layers
        yield from _outside("head_dim", {layer.head_dim for layer in layers}, self.head_dims)
        yield from _outside("page size", [site.pools.page_size], self.page_sizes)
        if not self.windows and any(layer.window is not None for layer in layers):
            yield "sliding windows"
        if not self.softcaps and any(layer.softcap is not None for layer in layers):
            yield "soft caps"
        if site.is_deterministic and not self.deterministic:
            yield "--deterministic"
        if self.host_lens and site.has_bounds:
            yield "lengths that the host does not know yet, as speculation has them"


@dataclass(frozen=True, slots=True)
class AttentionSite:
    """Where a backend is to work: the KV with its dtype, device and page size, the layers in the
    groups that share a page table, the dtype of q, how many steps may be in flight, whether a token
    must get the same bits in whatever step it is computed, and whether the host knows only bounds
    of some lengths."""

    pools: KvPools
    groups: tuple[LayerGroup, ...]
    dtype: torch.dtype
    device: Device
    num_in_flight: int = 2
    is_deterministic: bool = False
    has_bounds: bool = False

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer group."""
        return tuple(group.window for group in self.groups)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return tuple(layer for group in self.groups for layer in group.layers)


def _outside(what: str, asked: Iterable[T], able: frozenset[T] | None) -> Iterator[str]:
    if able is None:
        return
    known = ", ".join(str(value) for value in sorted(able))
    for value in asked:
        if value not in able:
            yield f"{what} {value} (has {known})"


def _names(dtypes: Iterable[torch.dtype] | None) -> frozenset[str] | None:
    return None if dtypes is None else frozenset(map(dtype_name, dtypes))


@dataclass(frozen=True, slots=True)
class StaticShape:
    """Of a captured forward: each of its rows has `width` tokens, and none is longer than
    `max_len`."""

    num_rows: int
    width: int
    max_len: int


class StaticPlans(Protocol):
    """All are called on the executor's stream, outside of captures. Only `make` may wait for the
    device."""

    def is_better_eager(self, num_rows: int, shared_pages: int) -> bool:
        """Of a step that could be replayed: attention takes a faster way that is not captured."""

    def make(self, shape: StaticShape) -> object:
        """What `bind` takes for a forward of this shape, refreshed for rows of `width` tokens. What
        `bind` and its callable do is captured, once: page tables, rows and lengths are read on the
        device then, so only what the host alone can make needs to be in the plan.
        """

    def refresh(self, plan: object, lens: ArrayI32) -> None:
        """Before a replay: lens int32 [num_rows], KV lengths with the step's own tokens, of which
        the last may be padding's, of `width`. The array is nobody's afterwards: what is copied to
        the device later comes from a buffer of the backend's, free after the step's event.
        """
