"""The protocol of attention over paged KV: plan once per forward, then attend in every layer.

A backend keeps no state between forwards. What it prepares is in its plan, which its caller keeps,
mostly on the ForwardBatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from aserve.errors import BugError
from aserve.gpu.attention.slots import SparseOps
from aserve.gpu.device.base import Device
from aserve.gpu.kv.layer_groups import LayerGroup, LayerSpec, Mask
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.kv.store import kv_dtype_name
from aserve.gpu.models.base import Attend
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.gpu.weights.format import dtype_name
from aserve.messages.base import ArrayI32


class AttentionBackend(Protocol):
    """Plans and runs attention.

    When a forward is captured, a backend without `static_plans` plans inside the capture. Its plan
    may then read lengths on the device only; from the host it may read query lengths and length
    bounds, which are equal in all replays.
    """

    @property
    def static_plans(self) -> StaticPlans | None: ...

    def plan(self, batch: ForwardBatch) -> object:
        """Prepares what all layers of one forward share."""

    def bind(self, batch: ForwardBatch, plan: object) -> Attend:
        """Returns the attention function that the model calls in each layer."""


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """A backend that is not built yet. `build` may raise AttentionUnavailable."""

    capabilities: Capabilities
    build: Callable[[AttentionSite], AttentionBackend]
    make_sparse_ops: Callable[[AttentionSite], SparseOps] = lambda _site: SparseOps()


class AttentionUnavailable(Exception):
    """This machine lacks something that the backend needs. The text completes the sentence
    "<backend> ..."."""


T = TypeVar("T", int, str)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features that a backend supports. None means any value."""

    devices: frozenset[str] | None = None  # types of torch devices
    dtypes: frozenset[torch.dtype] | None = None  # of q
    kv_dtypes: frozenset[torch.dtype] = frozenset()  # of KV, besides the dtype of q
    head_dims: frozenset[int] | None = None
    page_sizes: frozenset[int] | None = None
    masks: frozenset[Mask] = frozenset({Mask.CAUSAL})
    windows: bool = True
    softcaps: bool = True
    sinks: bool = False  # scores without a value, one per head
    latents: bool = False  # layers that store one latent vector as key and value (MLA)
    tree_masks: bool = False  # ForwardBatch.tree_mask
    host_lens: bool = False  # plans on the host, and needs exact lengths there
    whole_pages: bool = False  # reads slots beyond a row's length before it masks them
    can_capture: bool = False  # a forward may be captured and replayed
    shared_pages: bool = False  # is faster if it is told which pages all rows share
    deterministic: bool = False  # a token can have the same bits in whatever step it is computed

    def refusals(self, site: AttentionSite) -> Iterator[str]:
        """Yields one message per requirement of the model or the engine that is not met."""
        yield from _outside("device", [site.pools.device.type], self.devices)
        yield from _outside("dtype", [dtype_name(site.dtype)], _names(self.dtypes))
        if site.pools.dtype != site.dtype and site.pools.dtype not in self.kv_dtypes:
            known = sorted(map(kv_dtype_name, {site.dtype, *self.kv_dtypes}))
            yield f"KV of {kv_dtype_name(site.pools.dtype)} (has {', '.join(known)})"
        yield from _outside("page size", [site.pools.page_size], self.page_sizes)
        yield from self._layer_refusals(site.layers)
        if site.is_deterministic and not self.deterministic:
            yield "--deterministic"
        if self.host_lens and site.has_bounds:
            yield "lengths that the host does not know yet, as in speculative decoding"
        if site.has_tree_masks and not self.tree_masks:
            yield "tree masks"

    def _layer_refusals(self, layers: tuple[LayerSpec, ...]) -> Iterator[str]:
        yield from _outside("head_dim", {layer.head_dim for layer in layers}, self.head_dims)
        masks = {layer.mask.value for layer in layers}
        yield from _outside("mask", sorted(masks), frozenset(mask.value for mask in self.masks))
        if not self.windows and any(layer.window is not None for layer in layers):
            yield "sliding windows"
        if not self.softcaps and any(layer.softcap is not None for layer in layers):
            yield "soft caps"
        if not self.sinks and any(layer.has_sinks for layer in layers):
            yield "attention sinks"
        if not self.latents and any(layer.value_dim is not None for layer in layers):
            yield "latent KV"


@dataclass(frozen=True, slots=True)
class AttentionSite:
    """The pools, layers and limits that a backend is built for."""

    pools: KvPools
    groups: tuple[LayerGroup, ...]
    dtype: torch.dtype  # of q
    device: Device
    num_plans: int = 3  # of all steps in flight and of one step more
    is_deterministic: bool = False  # a token must have the same bits in whatever step it is in
    has_bounds: bool = False  # some forwards have lengths that the host does not know
    has_tree_masks: bool = False  # some forwards verify a draft tree
    has_spans: bool = False  # tokens of a picture see each other: TokenFeatures.spans

    @property
    def windows(self) -> tuple[int | None, ...]:
        """One per layer group."""
        return tuple(group.window for group in self.groups)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return tuple(layer for group in self.groups for layer in group.layers)


P = TypeVar("P")


def own_plan(batch: ForwardBatch, plan: object, kind: type[P], *, tree_masks: bool = False) -> P:
    """`plan`, after a check that this backend made it and supports the batch's mask."""
    if not isinstance(plan, kind):
        raise BugError(f"step {batch.iteration}: a plan of another backend: {plan!r}")
    if batch.tree_mask is not None and not tree_masks:
        raise BugError(f"step {batch.iteration}: this attention backend supports no tree masks")
    return plan


def _outside(what: str, required: Iterable[T], supported: frozenset[T] | None) -> Iterator[str]:
    if supported is None:
        return
    known = ", ".join(str(value) for value in sorted(supported))
    for value in required:
        if value not in supported:
            yield f"{what} {value} (has {known})"


def _names(dtypes: Iterable[torch.dtype] | None) -> frozenset[str] | None:
    return None if dtypes is None else frozenset(map(dtype_name, dtypes))


@dataclass(frozen=True, slots=True)
class StaticShape:
    """The shape of a captured forward: each row has `width` tokens, and no row is longer than
    `max_len`."""

    num_rows: int
    width: int
    max_len: int


class StaticPlans(Protocol):
    """Plans of captured forwards, for backends that plan on the host.

    All methods are called on the executor's stream, outside of captures. Only `make` may wait for
    the device.
    """

    def is_better_eager(self, num_rows: int, shared_pages: int) -> bool:
        """Returns whether a step should run eagerly although a graph could replay it, because
        attention has a faster algorithm for it that is not captured.
        """

    def make(self, shape: StaticShape) -> object:
        """A plan that `bind` accepts for forwards of this shape, refreshed for rows of `width`
        tokens. What `bind` and the bound function do is captured once. They read page tables, rows
        and lengths on the device, so the plan holds only what the host alone can compute.
        """

    def refresh(self, plan: object, lens: ArrayI32) -> None:
        """Plans anew before a replay. `lens` is int32 [num_rows]: KV lengths with the step's own
        tokens; the last rows may be padding rows of `width` tokens. The caller may reuse the array
        afterwards: what the device copies later is in a buffer of the backend.
        """
