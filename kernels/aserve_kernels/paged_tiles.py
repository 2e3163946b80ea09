"""What the attention kernels share: the online softmax (Milakov and Gimelshein, 2018) over tiles of
paged keys, how its parts are merged, and how large tiles and parts are.

Tiles lie at absolute positions, and one that a query does not see changes no bit of its state. So a
query's result depends on the size of its tiles and parts, and on no neighbour.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from aserve_kernels.paged_rows import Scoring
from aserve_kernels.tile_product import add_product

LOG2_E = 1.4426950408889634
LEAST_DOT = 16  # the smallest side of a product on tensor cores
LEAST_FIXED_SPLIT = 1024
MOST_SPLITS = 32


@dataclass(frozen=True, slots=True)
class Chip:
    """What of the device the choice of tiles depends on. As it comes: an A10's shared memory, which
    every chip since Ampere has, and the processors of an H100."""

    num_processors: int = 132
    shared_bytes: int = 99 << 10  # that one program may have


@dataclass(frozen=True, slots=True)
class Cut:
    """How a row's keys are cut into parts that are attended to separately, then merged in order.

    By its own length: at most `most_splits` parts, of at least `least_split` keys. With
    `fixed_split`, a multiple of every tile: at absolute multiples of it, and with the same tiles in
    every op, so that a query's result is bitwise the same wherever it is computed.
    """

    chip: Chip = Chip()
    least_split: int = 128
    most_splits: int = MOST_SPLITS
    fixed_split: int | None = None

    def max_splits(self, max_len: int, window: int | None) -> int:
        """Of a row that has one query."""
        split = self.fixed_split or self.least_split
        num_splits = -(-max_len // split)
        if window is not None:
            num_splits = min(num_splits, -(-window // split) + 1)
        return num_splits if self.fixed_split else min(num_splits, self.most_splits)


@dataclass(frozen=True, slots=True)
class Tiles:
    """`lines` are query heads times queries, padded; the rest as Triton has it."""

    lines: int
    keys: int
    num_warps: int
    num_stages: int


def fixed_split(max_len: int) -> int:
    """For a context of this length: a power of two, so that tiles fit, with few parts to merge."""
    return max(LEAST_FIXED_SPLIT, 1 << (-(-max_len // MOST_SPLITS) - 1).bit_length())


def decode_tiles(num_groups: int, head_dim: int, dtype: torch.dtype, cut: Cut) -> Tiles:
    """For one query of each of `num_groups` heads."""
    if cut.fixed_split is not None:
        return extend_tiles(num_groups, head_dim, dtype, cut)
    return _tiles(padded(num_groups), head_dim, dtype, cut.chip)


def extend_tiles(num_groups: int, head_dim: int, dtype: torch.dtype, cut: Cut) -> Tiles:
    lines = 64 if cut.fixed_split is not None or head_dim > 128 else 128
    return _tiles(max(lines, padded(num_groups)), head_dim, dtype, cut.chip)


def _tiles(lines: int, head_dim: int, dtype: torch.dtype, chip: Chip) -> Tiles:
    """What is chosen is not measured: it keeps a thread's accumulators within 64 registers, and as
    many stages as shared memory has room for, up to 3."""
    width = padded(head_dim)
    keys = (64 if width <= 128 else 32) * 2 // dtype.itemsize
    room = chip.shared_bytes - lines * width * dtype.itemsize
    return Tiles(
        lines,
        keys,
        num_warps=8 if lines * width > 64 * 128 else 4,
        num_stages=max(1, min(3, room // (2 * keys * width * dtype.itemsize))),
    )


def padded(size: int) -> int:
    return max(LEAST_DOT, 1 << (size - 1).bit_length())


def score_factors(scoring: Scoring) -> tuple[float, float]:
    """-> what q k^T is multiplied with, and the cap of its result, 0 for none. Scores become powers
    of two; with a cap the first factor makes them e^(2 x) of tanh(x)."""
    scale = scoring.scale * scoring.key_scale
    if scoring.softcap is None:
        return scale * LOG2_E, 0.0
    return 2 * LOG2_E * scale / scoring.softcap, scoring.softcap * LOG2_E


@triton.jit
def no_part(LINES: tl.constexpr, WIDTH: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """-> the state of a softmax that has seen nothing: most [lines], the greatest score; total
    [lines] and mixed [lines, width], sums of weights and of weighted values, relative to 2^most."""
    most = tl.full((LINES,), float("-inf"), tl.float32)
    return most, tl.zeros((LINES,), tl.float32), tl.zeros((LINES, WIDTH), tl.float32)


@triton.jit
def attend_part(
    q: tl.tensor, positions: tl.tensor, first_query: tl.tensor, last_query: tl.tensor,
    first: tl.tensor, last: tl.tensor, pages: tl.tensor, keys: tl.tensor, values: tl.tensor,
    factor: float, cap: float, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    PAGE_SIZE: tl.constexpr, SLOT_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr,
    LINES: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """q [lines, width] over keys first..last, `first` a multiple of KEYS -> a softmax's state.

    The lines' `positions` are within first_query..last_query. Tiles that all of these see whole
    need no mask; keys that none of them sees are not read.
    """
    most, total, mixed = no_part(LINES, WIDTH)
    low = 0
    last = tl.minimum(last, last_query + 1)
    whole_first = first
    if WINDOW > 0:
        low = tl.maximum(0, first_query - WINDOW + 1)
        inner = tl.maximum(0, last_query - WINDOW + 1)
        whole_first = tl.maximum(first, tl.minimum(last, tl.cdiv(inner, KEYS) * KEYS))
        most, total, mixed = _attend_tiles(
            q, positions, low, first, whole_first, pages, keys, values, factor, cap,
            most, total, mixed, WINDOW, HAS_CAP, PAGE_SIZE, SLOT_STRIDE, HEAD_DIM, WIDTH, KEYS,
            True,
        )  # fmt: skip
    whole_last = tl.maximum(whole_first, tl.minimum(last, first_query + 1) // KEYS * KEYS)
    most, total, mixed = _attend_tiles(
        q, positions, low, whole_first, whole_last, pages, keys, values, factor, cap,
        most, total, mixed, WINDOW, HAS_CAP, PAGE_SIZE, SLOT_STRIDE, HEAD_DIM, WIDTH, KEYS,
        False,
    )  # fmt: skip
    most, total, mixed = _attend_tiles(
        q, positions, low, whole_last, last, pages, keys, values, factor, cap,
        most, total, mixed, WINDOW, HAS_CAP, PAGE_SIZE, SLOT_STRIDE, HEAD_DIM, WIDTH, KEYS,
        True,
    )  # fmt: skip
    return most, total, mixed


@triton.jit
def _attend_tiles(
    q: tl.tensor, positions: tl.tensor, low: tl.tensor, first: tl.tensor, last: tl.tensor,
    pages: tl.tensor, keys: tl.tensor, values: tl.tensor, factor: float, cap: float,
    most: tl.tensor, total: tl.tensor, mixed: tl.tensor, WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr, PAGE_SIZE: tl.constexpr, SLOT_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, IS_MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    dims = tl.arange(0, WIDTH)
    for tile in range(first, last, KEYS):
        at = tile + tl.arange(0, KEYS)
        is_there = (dims < HEAD_DIM)[None, :]
        if IS_MASKED:
            # What nobody sees may belong to other owners by now, and a NaN goes through a 0.
            is_read = (at >= low) & (at < last)
            page = tl.load(pages + at // PAGE_SIZE, mask=is_read, other=0).to(tl.int64)
            is_there = is_there & is_read[:, None]
        else:
            page = tl.load(pages + at // PAGE_SIZE).to(tl.int64)
        indices = ((page * PAGE_SIZE + at % PAGE_SIZE) * SLOT_STRIDE)[:, None] + dims[None, :]
        k = tl.load(keys + indices, mask=is_there, other=0.0).to(q.dtype)
        scores = tl.zeros((q.shape[0], KEYS), tl.float32)
        scores = add_product(scores, q, tl.trans(k)) * factor
        if HAS_CAP:
            scores = cap * (1 - 2 / (1 + tl.exp2(scores)))
        if IS_MASKED:
            distance = positions[:, None] - at[None, :]
            is_seen = distance >= 0
            if WINDOW > 0:
                is_seen = is_seen & (distance < WINDOW)
            scores = tl.where(is_seen, scores, float("-inf"))
        new_most = tl.maximum(most, tl.max(scores, 1))
        level = tl.where(new_most == float("-inf"), 0.0, new_most)
        weights = tl.exp2(scores - level[:, None])
        shrink = tl.exp2(most - level)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(values + indices, mask=is_there, other=0.0).to(q.dtype)
        mixed = add_product(mixed * shrink[:, None], weights.to(q.dtype), v)
        most = new_most
    return most, total, mixed


@triton.jit
def merge(
    most: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    other_most: tl.tensor,
    other_total: tl.tensor,
    other_mixed: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Two states of a softmax as one; an empty one changes no bit of the other."""
    new_most = tl.maximum(most, other_most)
    level = tl.where(new_most == float("-inf"), 0.0, new_most)
    own = tl.exp2(most - level)
    other = tl.exp2(other_most - level)
    mixed = mixed * own[:, None] + other_mixed * other[:, None]
    return new_most, total * own + other_total * other, mixed
