"""The parts that the Triton attention kernels share: tile sizes, the split of keys, and the online
softmax over tiles of paged keys.
"""

# Theory of operation
#
# Both kernels compute, for each query head h and query at position i of a row,
#     out = sum_j w_j v_j / sum_j w_j,    w_j = exp(cap(scale * q k_j^T)),    i - window < j <= i
# with cap(s) = softcap * tanh(s / softcap), or the identity. Without a causal mask, the sum is over
# |i - j| < window. paged_decode.py serves rows with one query, paged_extend.py rows with several
# (prefill, chunked prefill, verification).
#
# Tiles. One program computes a block of BLOCK_M query rows of one KV head: the query heads that
# share a KV head (grouped-query attention), for one query or several, padded to a power of two of
# at least 16, the smallest side of a tensor-core product. It walks over its keys in tiles of
# BLOCK_N, which it reads from the KV pools through the page table: slot = page * page_size +
# offset. Nothing is gathered or copied.
#
# Online softmax (Milakov and Gimelshein, 2018; FlashAttention, 2022). The state of a query row is
#     row_max = the greatest score s so far,
#     row_sum = sum of 2^(s - row_max),   acc = sum of 2^(s - row_max) v.
# A tile with a greater maximum first rescales row_sum and acc to it. Scores are kept in units of
# log2(e), so that weights are powers of two, which the hardware computes fastest.
#
# Masks. Only tiles that some query of the block sees in part are masked: those at the edge of the
# causal diagonal, and those at the edge of the sliding window. Tiles beyond both are not read, and
# tiles between need no mask. A masked key is not read from memory either: its page may have been
# given to another request, and NaN * 0 is NaN.
#
# Draft trees. The queries of a row may be the nodes of a tree. A node sees the keys before the
# row's queries, its ancestors and itself. Ancestors come before it, so the keys of a block end
# where they do without a tree; the tiles with keys of nodes are masked by a table [tokens,
# query_len] that says which nodes a node sees. For the window, the position of a node is its depth.
#
# Splits (Flash-Decoding, 2023). A decode row has one query but may have thousands of keys, too much
# for one program. Its keys are split; each split gives a state, and `merge_states`
# combines two states like a tile and the state before it. The number of splits follows from the
# row's own length, never from its neighbours, and lengths are read on the device, so a captured
# launch serves every step of its shape.
#
# Batch invariance. Tiles lie at absolute positions, multiples of BLOCK_N, and a tile that a query
# does not see changes no bit of its state. So a query's result depends on the tile and split sizes
# alone. With `fixed_split`, decode and extend use the same tiles and the same splits, at absolute
# multiples of it, and merge them in order: then a query's output is bitwise the same whether it was
# computed in a decode step, in a chunk of any size, or in a whole prefill.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from aserve_kernels.dot import dot_add
from aserve_kernels.paged_rows import PagedRows, Scoring

# The kinds of masks, besides windows.
CAUSAL = tl.constexpr("causal")
ALL = tl.constexpr("all")  # each query sees all keys of its row
TREE = tl.constexpr("tree")
LOG2_E = 1.4426950408889634
MIN_DOT = 16  # the smallest side of a product on tensor cores
MIN_FIXED_SPLIT = 1024
MAX_SPLITS = 32


@dataclass(frozen=True, slots=True)
class Chip:
    """The limits of a GPU that tile sizes depend on.

    The defaults are the number of SMs of an H100, and the shared memory of an A10, which every GPU
    since Ampere has.
    """

    num_sms: int = 132
    shared_bytes: int = 99 << 10  # shared memory that one program may use


@dataclass(frozen=True, slots=True)
class KvSplits:
    """The split of a row's keys among programs, whose states are then merged in order.

    Without `fixed_split`, a row has at most `max_splits` splits of at least `min_split` keys, by
    its own length. With it, splits are at absolute multiples of `fixed_split` keys, which must be a
    multiple of every tile, and all kernels use the same tiles: a query's result is then bitwise the
    same in every step.
    """

    chip: Chip = Chip()
    min_split: int = 128
    max_splits: int = MAX_SPLITS
    fixed_split: int | None = None

    def most(self, max_len: int, window: int | None) -> int:
        """Returns the most splits that a decode row of at most `max_len` tokens may have."""
        split = self.fixed_split or self.min_split
        num_splits = -(-max_len // split)
        if window is not None:
            num_splits = min(num_splits, -(-window // split) + 1)
        return num_splits if self.fixed_split else min(num_splits, self.max_splits)


@dataclass(frozen=True, slots=True)
class Tiles:
    """`block_m` query rows (query heads times queries, padded) by `block_n` keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def fixed_split(max_len: int) -> int:
    """Returns the `fixed_split` for contexts of up to `max_len` tokens: a power of two, so that
    tiles divide it, that gives at most MAX_SPLITS splits.
    """
    return max(MIN_FIXED_SPLIT, 1 << (-(-max_len // MAX_SPLITS) - 1).bit_length())


def decode_tiles(group_size: int, head_dim: int, dtype: torch.dtype, splits: KvSplits) -> Tiles:
    """Returns the tiles for one query of `group_size` query heads."""
    if splits.fixed_split is not None:
        return extend_tiles(group_size, head_dim, dtype, splits)
    return _tiles(padded(group_size), head_dim, dtype, splits.chip)


def extend_tiles(group_size: int, head_dim: int, dtype: torch.dtype, splits: KvSplits) -> Tiles:
    """Returns the tiles for several queries of `group_size` query heads each."""
    block_m = 64 if splits.fixed_split is not None or head_dim > 128 else 128
    return _tiles(max(block_m, padded(group_size)), head_dim, dtype, splits.chip)


def _tiles(block_m: int, head_dim: int, dtype: torch.dtype, chip: Chip) -> Tiles:
    """NOTE: the choice is not measured. It keeps a thread's accumulators within 64 registers, and
    takes as many stages as shared memory has room for, up to 3."""
    block_d = padded(head_dim)
    block_n = (64 if block_d <= 128 else 32) * 2 // dtype.itemsize
    room = chip.shared_bytes - block_m * block_d * dtype.itemsize
    return Tiles(
        block_m,
        block_n,
        num_warps=8 if block_m * block_d > 64 * 128 else 4,
        num_stages=max(1, min(3, room // (2 * block_n * block_d * dtype.itemsize))),
    )


def padded(size: int) -> int:
    """Returns the next power of two that is a side of a tensor-core product."""
    return max(MIN_DOT, 1 << (size - 1).bit_length())


def mask_kind(paged: PagedRows, scoring: Scoring) -> str:
    kind: tl.constexpr = CAUSAL if scoring.is_causal else ALL
    return str((kind if paged.tree is None else TREE).value)


def score_factors(scoring: Scoring) -> tuple[float, float]:
    """Returns the factor of q k^T, and the cap of the scores, 0 for none, in units of log2(e).

    With a soft cap the factor is doubled, so that `1 - 2 / (1 + 2^(factor * q k^T))` is the tanh.
    """
    scale = scoring.scale * scoring.key_scale
    if scoring.softcap is None:
        return scale * LOG2_E, 0.0
    return 2 * LOG2_E * scale / scoring.softcap, scoring.softcap * LOG2_E


@triton.jit
def empty_state(
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The online softmax's state before any key, in float32: row_max and row_sum [BLOCK_M], acc
    [BLOCK_M, BLOCK_D]."""
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    return row_max, tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M, BLOCK_D), tl.float32)


@triton.jit
def normalised(
    row_max: tl.tensor, row_sum: tl.tensor, acc: tl.tensor, sinks: tl.tensor | None,
    heads: tl.tensor, has_head: tl.tensor, LOG2E: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The output of a softmax's state, [BLOCK_M, BLOCK_D]. A sink joins the sum like the score of a
    key with the value zero. `heads` [BLOCK_M] are the heads of the query rows."""
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=has_head, other=float("-inf")).to(tl.float32)
        excess = sink * LOG2E - row_max
        rescale = tl.exp2(-tl.maximum(excess, 0.0))
        acc *= rescale[:, None]
        row_sum = row_sum * rescale + tl.exp2(tl.minimum(excess, 0.0))
    return acc / row_sum[:, None]


@triton.jit
def keys_end(
    last_query: tl.tensor, kv_len: tl.tensor, WINDOW: tl.constexpr, MASK: tl.constexpr
) -> tl.tensor:
    """Returns the position behind the last key that some query up to `last_query` sees."""
    end = last_query + 1
    if MASK == ALL:
        end = kv_len
        if WINDOW > 0:
            end = tl.minimum(kv_len, last_query + WINDOW)
    return end


@triton.jit
def attend_keys(
    q: tl.tensor, positions: tl.tensor, first_query: tl.tensor, last_query: tl.tensor,
    kv_len: tl.tensor, seen: tl.tensor, depths: tl.tensor, first: tl.tensor, last: tl.tensor,
    pages: tl.tensor, keys: tl.tensor, values: tl.tensor, factor: float, cap: float,
    WINDOW: tl.constexpr, MASK: tl.constexpr, HAS_CAP: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Attends q [BLOCK_M, BLOCK_D] to keys first..last -> the softmax's state.

    `first` is a multiple of BLOCK_N. `positions` [BLOCK_M] are the queries', all within
    first_query..last_query. Tiles that all of these see whole need no mask, and keys that none of
    them sees are not read. In a draft tree, first_query is the position of the row's first query,
    `seen` [BLOCK_M] point to the queries' rows of the table, and `depths` to the depth of the row's
    first query; otherwise neither is read.
    """
    row_max, row_sum, acc = empty_state(BLOCK_M, BLOCK_D)
    low = 0
    last = tl.minimum(last, keys_end(last_query, kv_len, WINDOW, MASK))
    full_first = first
    full_end = first_query + 1
    if MASK == TREE:
        full_end = first_query
    if MASK == ALL:
        full_end = keys_end(first_query, kv_len, WINDOW, MASK)
    if WINDOW > 0:
        low = tl.maximum(0, first_query - WINDOW + 1)
        all_visible_from = tl.maximum(0, last_query - WINDOW + 1)
        full_first = tl.maximum(
            first, tl.minimum(last, tl.cdiv(all_visible_from, BLOCK_N) * BLOCK_N)
        )
        row_max, row_sum, acc = _attend_tiles(
            q, positions, first_query, seen, depths, low, first, full_first, pages, keys, values,
            factor, cap, row_max, row_sum, acc, WINDOW, MASK, HAS_CAP, PAGE_SIZE, SLOT_STRIDE,
            HEAD_DIM, BLOCK_D, BLOCK_N, True,
        )  # fmt: skip
    full_last = tl.maximum(full_first, tl.minimum(last, full_end) // BLOCK_N * BLOCK_N)
    row_max, row_sum, acc = _attend_tiles(
        q, positions, first_query, seen, depths, low, full_first, full_last, pages, keys, values,
        factor, cap, row_max, row_sum, acc, WINDOW, MASK, HAS_CAP, PAGE_SIZE, SLOT_STRIDE, HEAD_DIM,
        BLOCK_D, BLOCK_N, False,
    )  # fmt: skip
    row_max, row_sum, acc = _attend_tiles(
        q, positions, first_query, seen, depths, low, full_last, last, pages, keys, values,
        factor, cap, row_max, row_sum, acc, WINDOW, MASK, HAS_CAP, PAGE_SIZE, SLOT_STRIDE, HEAD_DIM,
        BLOCK_D, BLOCK_N, True,
    )  # fmt: skip
    return row_max, row_sum, acc


@triton.jit
def _attend_tiles(
    q: tl.tensor, positions: tl.tensor, first_query: tl.tensor, seen: tl.tensor, depths: tl.tensor,
    low: tl.tensor, first: tl.tensor, last: tl.tensor, pages: tl.tensor, keys: tl.tensor,
    values: tl.tensor, factor: float, cap: float, row_max: tl.tensor, row_sum: tl.tensor,
    acc: tl.tensor, WINDOW: tl.constexpr, MASK: tl.constexpr, HAS_CAP: tl.constexpr,
    PAGE_SIZE: tl.constexpr, SLOT_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, IS_MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    dims = tl.arange(0, BLOCK_D)
    for tile in range(first, last, BLOCK_N):
        key_positions = tile + tl.arange(0, BLOCK_N)
        is_loaded = (dims < HEAD_DIM)[None, :]
        if IS_MASKED:
            # WHY: pages outside the window may belong to other requests by now, and NaN * 0 is NaN.
            is_needed = (key_positions >= low) & (key_positions < last)
            page = tl.load(pages + key_positions // PAGE_SIZE, mask=is_needed, other=0).to(tl.int64)
            is_loaded = is_loaded & is_needed[:, None]
        else:
            page = tl.load(pages + key_positions // PAGE_SIZE).to(tl.int64)
        slots = page * PAGE_SIZE + key_positions % PAGE_SIZE
        indices = (slots * SLOT_STRIDE)[:, None] + dims[None, :]
        k = tl.load(keys + indices, mask=is_loaded, other=0.0).to(q.dtype)
        scores = tl.zeros((q.shape[0], BLOCK_N), tl.float32)
        scores = dot_add(scores, q, tl.trans(k)) * factor
        if HAS_CAP:
            scores = cap * (1 - 2 / (1 + tl.exp2(scores)))
        if IS_MASKED:
            is_visible = _sees(
                positions, key_positions, first_query, last, seen, depths, WINDOW, MASK
            )
            scores = tl.where(is_visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        v = tl.load(values + indices, mask=is_loaded, other=0.0).to(q.dtype)
        acc = dot_add(acc * rescale[:, None], weights.to(q.dtype), v)
        row_max = new_max
    return row_max, row_sum, acc


@triton.jit
def _sees(
    positions: tl.tensor, key_positions: tl.tensor, first_query: tl.tensor, last: tl.tensor,
    seen: tl.tensor, depths: tl.tensor, WINDOW: tl.constexpr, MASK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns which queries see which keys of a tile that ends before `last`."""
    distance = positions[:, None] - key_positions[None, :]
    is_visible = distance >= 0
    if MASK == ALL:
        is_visible = (key_positions < last)[None, :] & (distance == distance)
        distance = tl.abs(distance)
    if MASK == TREE:
        nodes = key_positions - first_query
        is_node = (nodes >= 0) & (key_positions < last)
        is_seen = tl.load(seen[:, None] + nodes[None, :], mask=is_node[None, :], other=0) != 0
        is_visible = is_seen | (nodes < 0)[None, :]
        if WINDOW > 0:
            depth = tl.load(depths + nodes, mask=is_node, other=0).to(tl.int32)
            logical = tl.where(is_node, first_query + depth, key_positions)
            distance = positions[:, None] - logical[None, :]
    if WINDOW > 0:
        is_visible = is_visible & (distance < WINDOW)
    return is_visible


@triton.jit
def merge_states(
    row_max: tl.tensor,
    row_sum: tl.tensor,
    acc: tl.tensor,
    other_max: tl.tensor,
    other_sum: tl.tensor,
    other_acc: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Merges two states of the online softmax. An empty state changes no bit of the other."""
    new_max = tl.maximum(row_max, other_max)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    scale = tl.exp2(row_max - shift)
    other_scale = tl.exp2(other_max - shift)
    acc = acc * scale[:, None] + other_acc * other_scale[:, None]
    return new_max, row_sum * scale + other_sum * other_scale, acc
