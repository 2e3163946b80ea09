"""The paged KV cache on MLX arrays, and attention over it."""

# Theory of operation
#
# MLX arrays are values: to write into an array makes a new one. MLX writes in place where nobody
# else holds the old buffer, but the operators of a step in flight do hold the buffers that they
# read. With two steps in flight a write into the pools would therefore copy them, each step.
#
# So a step does not write the pools. The keys and values of its tokens are appended to the log, one
# short array per layer, and `_located` says for each slot which entry of the log holds its KV, or
# -1 if the pool does. Attention gathers the keys of its rows from the pool, and puts those that the
# log has into their places. When the log is longer than LOG_TOKENS, the next step first waits for
# the steps in flight, and moves the log's entries into the pools, which then happens in place. Such
# a wait comes once per LOG_TOKENS tokens, and once after a long chunk of a prompt.
#
# Page tables, slots and `_located` are numpy arrays on the host, because this executor knows every
# KV length when it builds a step. A step enters the log with `commit`. If building it fails, its
# slots keep entries that nobody reads, because a slot is read only once a step that was built has
# written it.

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from aserve.gpu.kv.layer_groups import LayerGroup, LayerSpec
from aserve.gpu.mlx.arrays import ints
from aserve.gpu.step.plan import StepPlan
from aserve.messages.base import ArrayI32, array_i32
from aserve.messages.executor import GroupSpec
from aserve.messages.step import PageWrites

LOG_TOKENS = 512
IN_POOL = -1

Pair: TypeAlias = tuple[mx.array, mx.array]  # keys and values, [n, kv_heads, head_dim]
Table: TypeAlias = npt.NDArray[np.int32]  # two dimensions


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that some rows read in one layer group: [rows, len] positions, of which those behind
    the end of a row are masked. Row r reads its key p from the log if (r, p) is in `logged`."""

    slots: mx.array  # int32 [rows, len]
    positions: mx.array  # int32 [rows, len]
    logged: tuple[mx.array, mx.array]  # int32 [logged] each: r, and p
    entries: mx.array  # int32 [logged], index into the log

    def gather(self, pool: mx.array, log: mx.array) -> mx.array:
        """-> [rows, kv_heads, len, head_dim]"""
        gathered = pool[self.slots]
        gathered[self.logged] = log[self.entries]
        return gathered.transpose(0, 2, 1, 3)


@dataclass(frozen=True, slots=True)
class Bunch:
    """Rows of a step with the same number of tokens, whose attention is one call."""

    tokens: mx.array  # int32 [rows * tokens of each], indices into the step's tokens
    num_rows: int
    positions: mx.array  # int32 [rows, tokens of each]
    keys: tuple[Keys, ...]  # of each layer group

    def attend(self, layer: LayerSpec, queries: mx.array, keys: Keys, pair: Pair) -> mx.array:
        """queries [tokens of the step, heads, head_dim], pair [rows, kv_heads, len, head_dim]
        -> [rows * tokens of each, heads, head_dim]"""
        own = queries[self.tokens].reshape(self.num_rows, -1, *queries.shape[1:])
        mask = _sees(self.positions, keys.positions, layer.window)[:, None]
        attend = _fast_attention if layer.softcap is None else _capped_attention
        out = attend(layer, own.transpose(0, 2, 1, 3), pair, mask)
        return out.transpose(0, 2, 1, 3).reshape(-1, *queries.shape[1:])


class StepAttention:
    """Attention of one step, which also appends the step's KV to the log: a `models` Attend."""

    def __init__(self, kv: PagedKv, bunches: tuple[Bunch, ...], order: mx.array | None) -> None:
        self._kv = kv
        self._bunches = bunches
        self._order = order  # of the bunches' tokens in the step; None: as they are
        self.log: dict[int, Pair] = {}  # by layer, with the step's tokens

    def __call__(
        self, layer: LayerSpec, queries: mx.array, keys: mx.array, values: mx.array
    ) -> mx.array:
        """queries [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim] ->
        [tokens, heads, head_dim]"""
        logs = self.log[layer.index] = self._kv.appended(layer.index, (keys, values))
        pools, group = self._kv.pools[layer.index], self._kv.group_of[layer.index]
        outs: list[mx.array] = []
        for bunch in self._bunches:
            own = bunch.keys[group]
            pair = own.gather(pools[0], logs[0]), own.gather(pools[1], logs[1])
            outs.append(bunch.attend(layer, queries, own, pair))
        joined = outs[0] if len(outs) == 1 else mx.concatenate(outs)
        return joined if self._order is None else joined[self._order]


class PagedKv:
    """Written by the executor thread. `pools` and `log` have one pair per layer."""

    def __init__(
        self,
        groups: tuple[LayerGroup, ...],
        specs: tuple[GroupSpec, ...],
        *,
        page_size: int,
        table_shape: tuple[int, int],
        dtype: mx.Dtype,
    ) -> None:
        self.pools: dict[int, Pair] = {}
        self.group_of: dict[int, int] = {}
        self._page_size = page_size
        self._windows = tuple(group.window for group in groups)
        self._tables = tuple(np.zeros(table_shape, np.int32) for _ in specs)
        num_slots = [spec.num_pages * page_size for spec in specs]
        self._located = tuple(np.full(num, IN_POOL, np.int32) for num in num_slots)
        for number, group in enumerate(groups):
            for layer in group.layers:
                shape = num_slots[number], layer.num_kv_heads, layer.head_dim
                self.pools[layer.index] = mx.zeros(shape, dtype), mx.zeros(shape, dtype)
                self.group_of[layer.index] = number
        self._log: dict[int, Pair] = {}
        self._log_len = 0
        mx.eval(self.pools)

    @property
    def size_bytes(self) -> int:
        return sum(pool.nbytes for pair in self.pools.values() for pool in pair)

    def write_pages(self, page_writes: Iterable[PageWrites]) -> None:
        for table, own in zip(self._tables, page_writes, strict=False):
            table[array_i32(own.rows), array_i32(own.columns)] = array_i32(own.pages)

    def slots(self, group: int, rows: ArrayI32, positions: Table) -> Table:
        """rows and positions of shapes that broadcast to each other -> slots, int32."""
        size = self._page_size
        slots: Table = self._tables[group][rows, positions // size] * size + positions % size
        return slots

    def begin(self, plan: StepPlan, *, wait: Callable[[], None]) -> StepAttention:
        """Finds places for the tokens of a step. `wait` blocks until no step is in flight."""
        if self._log_len > LOG_TOKENS:
            wait()
            self._empty_log()
        rows = plan.rows[plan.token_to_row]
        positions = plan.kv_lens[plan.token_to_row] + plan.offsets
        entries = self._log_len + np.arange(len(rows), dtype=np.int32)
        for group, located in enumerate(self._located):
            located[self.slots(group, rows, positions)] = entries
        starts = (np.cumsum(plan.query_lens) - plan.query_lens).astype(np.int32)
        members = [np.flatnonzero(plan.query_lens == num) for num in np.unique(plan.query_lens)]
        bunches = tuple(self._bunch(plan, each, starts[each]) for each in members)
        order = None
        if len(bunches) > 1:
            order = ints(np.argsort(np.concatenate([_tokens_of(plan, own) for own in members])))
        return StepAttention(self, bunches, order)

    def commit(self, step: StepAttention) -> None:
        self._log = step.log
        self._log_len = len(next(iter(step.log.values()))[0])

    def appended(self, layer: int, pair: Pair) -> Pair:
        """Returns the log of a layer with new keys and values."""
        if layer not in self._log:
            return pair
        keys, values = self._log[layer]
        return mx.concatenate([keys, pair[0]]), mx.concatenate([values, pair[1]])

    def _bunch(self, plan: StepPlan, members: npt.NDArray[np.intp], starts: ArrayI32) -> Bunch:
        """members [rows]: indices of the plan's rows, each of which has as many tokens."""
        num_tokens = int(plan.query_lens[members[0]])
        offsets = np.arange(num_tokens, dtype=np.int32)
        rows, kv_lens = plan.rows[members], plan.kv_lens[members]
        return Bunch(
            tokens=ints((starts[:, None] + offsets).reshape(-1)),
            num_rows=len(members),
            positions=ints(kv_lens[:, None] + offsets),
            keys=tuple(
                self._keys(number, rows, kv_lens, num_tokens) for number in range(len(self._tables))
            ),
        )

    def _keys(self, group: int, rows: ArrayI32, kv_lens: ArrayI32, num_tokens: int) -> Keys:
        """The keys before the window of a row's first token are left out."""
        ends = kv_lens + num_tokens
        window = self._windows[group]
        starts = np.zeros_like(kv_lens) if window is None else (kv_lens - window + 1).clip(min=0)
        positions = starts[:, None] + np.arange((ends - starts).max(), dtype=np.int32)
        is_real = positions < ends[:, None]
        # NOTE: slot 0, the padding, is finite. What lies in another slot behind the end may be NaN,
        # which a weight of 0 does not remove from a sum.
        in_row = np.where(is_real, positions, 0)
        slots = np.where(is_real, self.slots(group, rows[:, None], in_row), 0)
        located = self._located[group][slots]
        logged = np.nonzero(located != IN_POOL)
        return Keys(
            slots=ints(slots),
            positions=ints(positions),
            logged=(ints(logged[0]), ints(logged[1])),
            entries=ints(located[logged]),
        )

    def _empty_log(self) -> None:
        """Moves the log into the pools. No step may be in flight, or the pools would be copied."""
        for layer, log in self._log.items():
            located = self._located[self.group_of[layer]]
            slots = np.flatnonzero((located != IN_POOL) & (located < self._log_len))
            entries = ints(located[slots])
            keys, values = self.pools[layer]
            keys[ints(slots)], values[ints(slots)] = log[0][entries], log[1][entries]
        self._log, self._log_len = {}, 0
        for located in self._located:
            located.fill(IN_POOL)
        mx.eval(self.pools)


def _tokens_of(plan: StepPlan, members: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Returns the indices of the tokens of some rows, which are in the plan's order."""
    return np.flatnonzero(np.isin(plan.token_to_row, members))


def _sees(queries: mx.array, keys: mx.array, window: int | None) -> mx.array:
    """Positions int32 [rows, n] and [rows, len] -> bool [rows, n, len]."""
    distance = queries[:, :, None] - keys[:, None, :]
    sees = distance >= 0
    return sees if window is None else sees & (distance < window)


def _fast_attention(layer: LayerSpec, queries: mx.array, pair: Pair, mask: mx.array) -> mx.array:
    return mx.fast.scaled_dot_product_attention(queries, *pair, scale=layer.scale, mask=mask)


def _capped_attention(layer: LayerSpec, queries: mx.array, pair: Pair, mask: mx.array) -> mx.array:
    """softmax(softcap * tanh(q k^T * scale / softcap)) v, which MLX has no kernel for."""
    assert layer.softcap is not None
    shape = queries.shape
    grouped = queries.reshape(shape[0], layer.num_kv_heads, -1, *shape[2:])
    keys, values = (part[:, :, None] for part in pair)
    scores = (grouped @ keys.swapaxes(-1, -2)) * (layer.scale / layer.softcap)
    scores = mx.where(mask[:, None], layer.softcap * mx.tanh(scores), -mx.inf)
    return (mx.softmax(scores, axis=-1, precise=True) @ values).reshape(shape)
