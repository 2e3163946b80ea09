"""Draft trees for the CPU's attention kernels: each node is a row of its own.

The kernels read the KV of a row through a page table. A node of a tree sees the KV before the
window and then its ancestors and itself, so it gets a table with pages of one slot that names
just these. It is then a decode at the position of its depth: windows need no other rule, and a
node gets the bits that a decode after its path gets.

PERF: the nodes of a row do not share the tiles of the KV before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from aserve.gpu.step.forward_batch import ForwardBatch
from aserve_kernels.cpu.host_rows import HostRows, Int64s, QueryRows

Bools: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


def rows_with_trees(batch: ForwardBatch, query_lens: Int64s) -> Bools:
    """bool [rows], the rows whose queries are no chain."""
    is_tree = np.zeros(len(query_lens), np.bool_)
    if batch.tree_mask is None:
        return is_tree
    mask = batch.tree_mask.numpy()
    starts = np.cumsum(query_lens) - query_lens
    for row, (start, length) in enumerate(zip(starts, query_lens, strict=True)):
        own = mask[start : start + length, :length]
        is_tree[row] = not np.array_equal(own, np.tri(int(length), dtype=np.bool_))
    return is_tree


def node_rows(
    batch: ForwardBatch, which: Bools, tables: Sequence[Int64s], page_size: int
) -> tuple[HostRows, ...]:
    """Returns the nodes of the rows `which` as rows of one query, for each layer group. `tables`
    [max_rows + 1, pages] are the page tables."""
    assert batch.tree_mask is not None
    token_to_row = batch.token_to_row.numpy()
    tokens = np.flatnonzero(which[token_to_row])
    rows = token_to_row[tokens]
    query_lens = batch.query_lens.numpy()[rows]
    prefix_lens = batch.lens.numpy()[rows] - query_lens
    longest = int(query_lens.max())
    order = np.arange(longest)
    seen = batch.tree_mask.numpy()[tokens, :longest] & (order < query_lens[:, None])
    # An ancestor comes before its descendants, so a node's path is what it sees, in order.
    paths = np.sort(np.where(seen, order, longest - 1), axis=1)
    lens = prefix_lens + seen.sum(axis=1)
    columns = np.arange(int(lens.max()))
    indices = columns - prefix_lens[:, None]
    inside = np.take_along_axis(paths, indices.clip(0, longest - 1), axis=1)
    positions = np.where(indices < 0, columns, prefix_lens[:, None] + inside)
    positions = positions.clip(max=(prefix_lens + query_lens - 1)[:, None])
    pages, offsets = positions // page_size, positions % page_size
    own_rows = batch.rows.numpy()[rows][:, None]
    queries = QueryRows(np.arange(len(tokens)), lens, tokens, np.ones_like(tokens))
    return tuple(
        HostRows(table[own_rows, pages] * page_size + offsets, 1, queries) for table in tables
    )
