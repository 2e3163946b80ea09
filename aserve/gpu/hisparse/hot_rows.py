"""The hot rows: latents of each request in a buffer on the device, with least-recently-used swaps.

Each layer has a buffer of its own, because its indexer chooses keys of its own. A request has the
columns of its row in the batch: `num_hot` for swapped-in latents, and one for each step whose new
latents are not backed up yet. A column is known by the position of its token.
"""

# Theory of operation
#
# The state of a column is (position, clock of its last use). Two values of the clock are special:
# an EMPTY column has 0, and one that is not backed up has PENDING, which is above every clock. So
# the columns in ascending order of their clocks are: empty ones, then the least recently used, then
# those of this step, then those that must stay.
#
# A forward of decode rows calls, in each layer:
#   1. `write`: the new token takes the first column of that order, and is PENDING.
#   2. `swap_in`: chosen positions are looked up. Those that are found are stamped with this step's
#      clock; the others take the first columns of the order, and are copied from the host. At most
#      top_k columns are chosen and `num_hot` >= top_k, so no chosen column is taken.
# `back_up` later makes a PENDING column the last used one of its step.
#
# A step may be computed again, or a row may be given to a new request. `begin` empties the columns
# of positions that a forward is about to write, and `forget` all columns of rows.
#
# The host knows no length and no position here: everything is computed on the device.

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aserve.gpu.kv.layer_groups import LayerSpec
from aserve.gpu.kv.pools import LayerKv, Zeros
from aserve.gpu.kv.store import byte_view, store_latents

NOWHERE = -1  # the position of an empty column
EMPTY = 0
PENDING = 1 << 62


class CopyRows(Protocol):
    """Copies rows of one tensor to rows of another, which may be in the host's memory."""

    def __call__(
        self, source: Tensor, source_rows: Tensor, target: Tensor, target_rows: Tensor, /
    ) -> None:
        """source and target [rows, ...]; both lists int64 [n]. Pairs with a negative target are
        left out; the targets of the others differ."""


def copy_rows(source: Tensor, source_rows: Tensor, target: Tensor, target_rows: Tensor) -> None:
    """The reference `CopyRows`, for memory that torch's operators can read."""
    is_copied = target_rows >= 0
    rows = byte_view(source).index_select(0, source_rows[is_copied])
    byte_view(target).index_copy_(0, target_rows[is_copied], rows)


@dataclass(frozen=True, slots=True)
class HotShape:
    max_rows: int
    num_hot: int
    num_pending: int  # steps whose new latents may wait for their backup

    @property
    def num_columns(self) -> int:
        return self.num_hot + self.num_pending


class HotRows:
    """Written by the forward of sparse attention and, in `forget`, at the head of a step."""

    __slots__ = (
        "_buffers",
        "_clock",
        "_host",
        "_places",
        "_positions",
        "_used",
        "copied",
        "copy",
        "shape",
    )

    def __init__(
        self, layers: dict[int, LayerKv], shape: HotShape, zeros: Zeros, copy: CopyRows
    ) -> None:
        """`layers` have the latents in the host's memory."""
        self.shape = shape
        self._host = layers
        self.copy = copy
        size = (shape.max_rows + 1) * shape.num_columns
        self._buffers = {
            index: zeros((size, *kv.keys.shape[1:]), kv.keys.dtype) for index, kv in layers.items()
        }
        self._places = {index: place for place, index in enumerate(layers)}
        table = (len(layers), shape.max_rows + 1, shape.num_columns + 1)  # a column for nothing
        device = next(iter(self._buffers.values())).device
        self._positions = torch.full(table, NOWHERE, dtype=torch.int64, device=device)
        self._used = torch.zeros(table, dtype=torch.int64, device=device)
        self._clock = 0
        self.copied = torch.zeros(2, dtype=torch.int64, device=device)  # latents in, and out

    @property
    def size_bytes(self) -> int:
        tables = self._positions.nbytes + self._used.nbytes
        return tables + sum(buffer.nbytes for buffer in self._buffers.values())

    def forget(self, rows: Tensor) -> None:
        """Empties all columns of rows, int64 [n]."""
        self._positions.index_fill_(1, rows, NOWHERE)
        self._used.index_fill_(1, rows, EMPTY)

    def begin(self, rows: Tensor, kv_lens: Tensor) -> None:
        """Begins a forward of rows, int64 [n], with these lengths before it, int64 [n]."""
        self._clock += 2
        positions = self._positions.index_select(1, rows)
        is_past = positions < kv_lens[:, None]
        self._positions.index_copy_(1, rows, positions.where(is_past, NOWHERE))
        self._used.index_copy_(1, rows, self._used.index_select(1, rows).where(is_past, EMPTY))

    def write(self, layer: LayerSpec, rows: Tensor, positions: Tensor, latents: Tensor) -> Tensor:
        """Stores the latents [n, 1, r + d_rope] of one new token of each row. Returns their places
        in the buffer, int64 [n], where they stay until `back_up`."""
        place = self._places[layer.index]
        columns = self._used[place, rows, :-1].argmin(dim=1)
        self._positions[place, rows, columns] = positions
        self._used[place, rows, columns] = PENDING
        places = rows * self.shape.num_columns + columns
        store_latents(
            latents, places, self._buffers[layer.index], self._host[layer.index].scales[0]
        )
        return places

    def back_up(self, index: int, places: Tensor, slots: Tensor) -> None:
        """Copies what `write` stored in `places` to slots of the host, int64 [n] each."""
        self.copy(self._buffers[index], places, self._host[index].keys, slots)
        self.copied[1] += len(places)
        used = self._used[self._places[index]]
        rows = places // self.shape.num_columns
        columns = places % self.shape.num_columns
        was_used = used[rows, columns]
        used[rows, columns] = was_used.clamp(max=self._clock + 1)

    def swap_in(self, layer: LayerSpec, rows: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """positions of chosen keys and their slots in the host's memory, int64 [n, k]; NOWHERE is
        no key. Returns their places in the buffer, int64 [n, k], which is 0 for no key."""
        place, num_columns = self._places[layer.index], self.shape.num_columns
        held, used = self._positions[place, rows], self._used[place, rows]
        in_order, columns = held[:, :-1].sort(dim=1)
        at = torch.searchsorted(in_order, positions).clamp_(max=num_columns - 1)
        is_key = positions != NOWHERE
        is_hit = (in_order.gather(1, at) == positions) & is_key
        is_miss = is_key & ~is_hit
        found = columns.gather(1, at)
        # A hit takes part in the order of victims with this step's clock.
        nothing = torch.full_like(positions, num_columns)
        hits = torch.where(is_hit, found, nothing)
        used.scatter_(1, hits, used.gather(1, hits).clamp_(min=self._clock))
        victims = used[:, :-1].argsort(dim=1, stable=True)
        rank = (is_miss.cumsum(dim=1) - 1).clamp_(min=0)
        taken = victims.gather(1, rank.clamp_(max=num_columns - 1))
        misses = torch.where(is_miss, taken, nothing)
        used.scatter_(1, misses, self._clock)
        held.scatter_(1, misses, positions)
        self._positions[place, rows] = held
        self._used[place, rows] = used
        places = rows[:, None] * num_columns + torch.where(is_hit, found, taken)
        targets = torch.where(is_miss, places, NOWHERE).flatten()
        host, buffer = self._host[layer.index].keys, self._buffers[layer.index]
        self.copy(host, slots.flatten(), buffer, targets)
        self.copied[0] += is_miss.sum()
        return places * is_key

    def kv(self, layer: LayerSpec) -> LayerKv:
        """The layer's buffer, as attention reads it."""
        buffer, host = self._buffers[layer.index], self._host[layer.index]
        return dataclasses.replace(host, keys=buffer, values=buffer[..., : layer.out_dim])
