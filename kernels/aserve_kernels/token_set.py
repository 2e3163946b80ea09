"""Exact search of one row's allowed set under top-k, top-p and min-p: the slow path of sample.py.

The set consists of the tokens above a threshold logit, and of some tokens that equal it, by token
id. As int32 keys that are ordered like the floats, thresholds can be bisected: each of at most 33
steps counts the tokens above a key and sums their mass, until the last member's key is found. Then
one more pass finds the member with the highest noisy score.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aserve_kernels.gumbel import gumbel


@triton.jit
def load_scaled(
    logits: tl.tensor, columns: tl.tensor, vocab_size: int, temperature: tl.tensor
) -> tl.tensor:
    """logits[columns] / temperature in float32; minus infinity beyond `vocab_size`.

    NaN is read as plus infinity, so that maxima show it, and -0 as 0, so that the two rank alike.
    """
    scores = tl.load(logits + columns, mask=columns < vocab_size, other=float("-inf"))
    scores = scores.to(tl.float32)
    scores = tl.where(scores != scores, float("inf"), scores)
    return tl.div_rn(scores, temperature) + 0.0


@triton.jit
def collect(
    logits: tl.tensor,
    vocab_size: int,
    temperature: tl.tensor,
    edge: tl.tensor,
    split_softmax: tl.tensor,
    collected: tl.tensor,
    collected_ids: tl.tensor,
    SPLIT: tl.constexpr,
) -> tl.tensor:
    """Writes the scaled logits that are at least `edge`, and their token ids, in ascending order of
    token id, as many as fit into SPLIT. Returns how many there are."""
    num = tl.zeros((), tl.int32)
    for begin in range(0, vocab_size, SPLIT):
        if tl.load(split_softmax + begin // SPLIT * 2) >= edge:
            columns = begin + tl.arange(0, SPLIT)
            scaled = load_scaled(logits, columns, vocab_size, temperature)
            is_collected = (scaled >= edge) & (columns < vocab_size)
            indices = num + tl.cumsum(is_collected.to(tl.int32), axis=0) - 1
            has_room = is_collected & (indices < SPLIT)
            tl.store(collected + indices, scaled, mask=has_room)
            tl.store(collected_ids + indices, columns, mask=has_room)
            num += tl.sum(is_collected.to(tl.int32), axis=0)
    tl.debug_barrier()  # other threads of the program read what was stored
    return num


@triton.jit
def search(
    logits: tl.tensor,
    ids: tl.tensor,
    length: tl.tensor,
    temperature: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    edge: tl.tensor,
    top_k: tl.tensor,
    has_top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    start: tl.tensor,
    is_drawn: tl.tensor,
    HAS_IDS: tl.constexpr,
    SPLIT: tl.constexpr,
) -> tl.tensor:
    """Returns the index in `logits` [length] of the set's member with the highest noisy score.

    Every member of the set is among `logits`. With HAS_IDS, `ids` are their token ids; without,
    `logits` is the whole row.
    """
    limit = float("inf")
    if top_p < 1:
        limit = top_p * total
        if has_top_k:
            last, above, mass_above = _last_member(
                logits, length, temperature, largest, edge, top_k, float("inf"), SPLIT
            )
            mass_of_one = tl.exp(_from_key(last) - largest)
            limit = top_p * (mass_above + (top_k - above).to(tl.float32) * mass_of_one)
    last, above, mass_above = _last_member(
        logits, length, temperature, largest, edge, top_k, limit, SPLIT
    )
    mass_of_one = tl.exp(_from_key(last) - largest)
    value, chosen = float("-inf"), 0
    num_equal = 0
    for begin in range(0, length, SPLIT):
        columns = begin + tl.arange(0, SPLIT)
        scaled = load_scaled(logits, columns, length, temperature)
        keys = _key(scaled)
        is_equal = ((keys == last) & (columns < length)).to(tl.int32)
        before = num_equal + tl.cumsum(is_equal, axis=0) - is_equal
        num_equal += tl.sum(is_equal, axis=0)
        rank = above + before
        is_within = mass_above + before.to(tl.float32) * mass_of_one < limit
        is_within = ((rank < top_k) & is_within) | (rank == 0)
        is_member = (keys > last) | ((is_equal == 1) & is_within)
        is_member &= tl.exp(scaled - largest) >= min_p
        noisy = scaled
        if is_drawn:
            token_ids = columns
            if HAS_IDS:
                token_ids = tl.load(ids + columns, mask=columns < length, other=0)
            noisy = scaled + gumbel(start, token_ids)
        noisy = tl.where(is_member, noisy, float("-inf"))
        tile_value, index = tl.max(
            noisy, axis=0, return_indices=True, return_indices_tie_break_left=True
        )
        chosen = tl.where(tile_value > value, begin + index, chosen)
        value = tl.maximum(value, tile_value)
    return chosen


@triton.jit
def _key(x: tl.tensor) -> tl.tensor:
    """Maps float32 to int32 that compare like the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _from_key(key: tl.tensor) -> tl.tensor:
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _last_member(
    logits: tl.tensor,
    vocab_size: int,
    temperature: tl.tensor,
    largest: tl.tensor,
    edge: tl.tensor,
    top_k: tl.tensor,
    limit: tl.tensor,
    SPLIT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns the key of the set's last member, and the number and mass of the tokens above it: the
    smallest key above which there are fewer than top_k tokens with a mass below the limit."""
    low = _key(edge).to(tl.int64) - 1  # below the set, or every token is a member
    high = _key(largest).to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        count, mass = _above(logits, vocab_size, temperature, largest, middle, SPLIT)
        is_enough = (count < top_k) & (mass < limit)
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough, low, middle + 1)
    count, mass = _above(logits, vocab_size, temperature, largest, high, SPLIT)
    return high.to(tl.int32), count, mass


@triton.jit
def _above(
    logits: tl.tensor,
    vocab_size: int,
    temperature: tl.tensor,
    largest: tl.tensor,
    key: tl.tensor,
    SPLIT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    count = tl.zeros((), tl.int32)
    mass = tl.zeros((), tl.float32)
    for begin in range(0, vocab_size, SPLIT):
        columns = begin + tl.arange(0, SPLIT)
        scaled = load_scaled(logits, columns, vocab_size, temperature)
        is_above = (_key(scaled).to(tl.int64) > key) & (columns < vocab_size)
        count += tl.sum(is_above.to(tl.int32), axis=0)
        mass += tl.sum(tl.where(is_above, tl.exp(scaled - largest), 0.0), axis=0)
    return count, mass
