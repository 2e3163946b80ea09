"""Tokens from logits: the argmax of logits / temperature + Gumbel noise, among the tokens that
top-k, top-p and min-p leave. No sort, nothing as large as the logits is written.

The vocabulary is cut into splits of a fixed size, so a row's result doesn't depend on the others.
`_scan` finds each split's best noisy tokens and its part of the softmax; `_merge` puts them
together: without limits that is all. With limits, `_rank` counts what is better than each of the
best TRIES candidates, and than some fixed levels, which bracket the mass of the top k; splits below
all of these are not read. `_settle` takes the first candidate that belongs to the set. Where none
surely does, it collects what is no worse than something surely outside, and finds the set's last
member among these by bisection over the bits of the logits; if they are more than a split, among
all: rare, so it may be slow.

It knows no step. Equal logits rank by token id. A token belongs to the set if fewer than top_k are
better, these have a mass below top_p of the top k's, and it has min_p of the best one's
probability; the best one always does (design: architecture.md, "Coupled sampling").
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.gumbel import gumbel, gumbel_ref, gumbel_start
from aserve_kernels.row_columns import MIN_P, SEED, TEMPERATURE, TOP_K, TOP_P
from aserve_kernels.token_set import collect, load_scaled, search

SPLIT = 4096  # tokens of the vocabulary; fixed, whatever the batch is
WARPS = 8  # where a program holds a split
TILE = 256  # of a split, where each token is compared with all RANKED
TRIES = 4
RANKED = 16  # the candidates and 12 levels


def sample(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    ints: Tensor,
    floats: Tensor,
    *,
    has_noise: bool,
    has_limits: bool,
) -> tuple[Tensor, Tensor]:
    """logits float32, bfloat16 or float16 [n, vocab], the tokens of a row side by side; rows,
    positions int64 [n]: which row of the tables, and which place of its noise; ints int64 and
    floats float64 [max_rows + 1, columns], as in row_columns.py. A temperature of 0 is greedy; a
    top_k of 0, a top_p of 1 and a min_p of 0 are off. Without `has_noise` all rows are greedy,
    without `has_limits` no row's limits count -> tokens int64 [n]; bool [n], False where a logit is
    NaN or plus infinity, or none is finite: the token of such a row is any.
    """
    num, vocab_size = logits.shape
    tokens = torch.empty(num, dtype=torch.int64, device=logits.device)
    is_valid = torch.empty(num, dtype=torch.bool, device=logits.device)
    if not num:
        return tokens, is_valid
    splits = triton.cdiv(vocab_size, SPLIT)
    tries = TRIES if has_limits else 1
    best = logits.new_empty((num, splits, tries), dtype=torch.float32)
    best_ids = best.new_empty(best.shape, dtype=torch.int32)
    softmax = best.new_empty((num, splits, 2))  # the largest logit, and the sum beside it
    tables = (ints, floats, ints.stride(0), floats.stride(0))
    given = (logits, rows, positions, logits.stride(0), vocab_size, *tables)
    found = (best, best_ids, softmax)
    _scan[(num, splits)](*given, *found, has_noise, has_limits, tries, SPLIT, num_warps=WARPS)
    values = best.new_empty((num, RANKED + 2))  # of what is ranked; then of the softmax
    ids = best_ids.new_empty((num, RANKED))
    block = triton.next_power_of_2(splits)
    drawn = (tokens, is_valid, splits)
    _merge[(num,)](*given, *found, values, ids, *drawn, has_limits, tries, RANKED, block)
    if not has_limits:
        return tokens, is_valid
    counts = best_ids.new_empty((num, splits, RANKED))
    masses = best.new_empty((num, splits, RANKED))
    _rank[(num, splits)](
        *given, softmax, values, ids, counts, masses, RANKED, TILE, SPLIT, num_warps=WARPS
    )
    near, near_ids = best.new_empty((num, SPLIT)), best_ids.new_empty((num, SPLIT))
    _settle[(num,)](
        *given, softmax, values, ids, counts, masses, near, near_ids, *drawn, RANKED, block, SPLIT,
        num_warps=WARPS,
    )  # fmt: skip
    return tokens, is_valid


def sample_ref(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    ints: Tensor,
    floats: Tensor,
    *,
    has_noise: bool,
    has_limits: bool,
) -> tuple[Tensor, Tensor]:
    """By a stable sort of each row."""
    logits = logits.float()
    is_valid = logits.amax(dim=1).isfinite()
    temperature = floats[rows, TEMPERATURE.value, None].float()
    is_drawn = (temperature > 0) & has_noise
    scaled = logits / torch.where(is_drawn, temperature, 1)
    noise = gumbel_ref(ints[rows, SEED.value], positions, logits.shape[1])
    noisy = torch.where(is_drawn, scaled + noise, scaled)
    if not has_limits:
        return noisy.argmax(dim=1), is_valid
    top_k = ints[rows, TOP_K.value, None]
    top_p, min_p = (floats[rows, column.value, None].float() for column in (TOP_P, MIN_P))
    order = scaled.argsort(dim=1, descending=True, stable=True)
    ranked = scaled.softmax(dim=1).gather(1, order)
    ranks = torch.arange(logits.shape[1], device=logits.device)
    is_kept = (top_k == 0) | (ranks < top_k)
    before = ranked.cumsum(dim=1) - ranked
    limit = top_p * (ranked * is_kept).sum(dim=1, keepdim=True)
    is_in = is_kept & ((before < limit) | (top_p >= 1))
    is_in &= ranked >= min_p * ranked[:, :1]
    drawn = noisy.gather(1, order).masked_fill(~is_in, -torch.inf)
    return order.gather(1, drawn.argmax(dim=1, keepdim=True))[:, 0], is_valid


@triton.jit
def _temperature(
    floats: tl.tensor, row: tl.tensor, float_stride: int
) -> tuple[tl.tensor, tl.tensor]:
    """As it was asked for, and what logits are divided by."""
    asked = tl.load(floats + row * float_stride + TEMPERATURE).to(tl.float32)
    return asked, tl.where(asked > 0, asked, 1.0)


@triton.jit
def _is_drawn(temperature: tl.tensor, top_k: tl.tensor) -> tl.tensor:
    """Of one token that may be drawn, the noise says nothing."""
    return (temperature > 0) & (top_k != 1)


@triton.jit
def _scan(
    logits: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    stride: int,
    vocab_size: int,
    ints: tl.tensor,
    floats: tl.tensor,
    int_stride: int,
    float_stride: int,
    best: tl.tensor,
    best_ids: tl.tensor,
    softmax: tl.tensor,
    HAS_NOISE: tl.constexpr,
    HAS_LIMITS: tl.constexpr,
    TRIES: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    place, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part = place * tl.num_programs(1) + split
    indices = tl.arange(0, SPLIT)
    columns = split * SPLIT + indices
    row = tl.load(rows + place)
    temperature = 1.0
    is_drawn = False
    if HAS_NOISE:
        asked, temperature = _temperature(floats, row, float_stride)
        top_k = 0
        if HAS_LIMITS:
            top_k = tl.load(ints + row * int_stride + TOP_K)
        is_drawn = _is_drawn(asked, top_k)
    scaled = load_scaled(logits + place * stride, columns, vocab_size, temperature)
    largest = tl.max(scaled, axis=0)
    tl.store(softmax + part * 2, largest)
    if HAS_LIMITS:
        floor = tl.where(largest == float("-inf"), 0.0, largest)
        tl.store(softmax + part * 2 + 1, tl.sum(tl.exp(scaled - floor), axis=0))
    noisy = scaled
    if is_drawn:
        start = gumbel_start(tl.load(ints + row * int_stride + SEED), tl.load(positions + place))
        noisy = scaled + gumbel(start, columns)
    for attempt in tl.static_range(TRIES):
        value, index = tl.max(
            noisy, axis=0, return_indices=True, return_indices_tie_break_left=True
        )
        tl.store(best + part * TRIES + attempt, value)
        tl.store(best_ids + part * TRIES + attempt, split * SPLIT + index)
        noisy = tl.where(indices == index, float("-inf"), noisy)


@triton.jit
def _merge(
    logits: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    stride: int,
    vocab_size: int,
    ints: tl.tensor,
    floats: tl.tensor,
    int_stride: int,
    float_stride: int,
    best: tl.tensor,
    best_ids: tl.tensor,
    softmax: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    tokens: tl.tensor,
    is_valid: tl.tensor,
    splits: int,
    HAS_LIMITS: tl.constexpr,
    TRIES: tl.constexpr,
    RANKED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, BLOCK)
    first = softmax + place * splits * 2
    peaks = tl.load(first + parts * 2, mask=parts < splits, other=float("-inf"))
    largest = tl.max(peaks, axis=0)
    is_finite = (largest > float("-inf")) & (largest < float("inf"))
    tl.store(is_valid + place, is_finite)
    entries = tl.arange(0, BLOCK * TRIES)
    is_in = entries < splits * TRIES
    noisy = tl.load(best + place * splits * TRIES + entries, mask=is_in, other=float("-inf"))
    if not HAS_LIMITS:
        index = tl.argmax(noisy, axis=0)
        tl.store(tokens + place, tl.load(best_ids + place * splits + index).to(tl.int64))
    else:
        sums = tl.load(first + parts * 2 + 1, mask=parts < splits, other=0.0)
        floor = tl.where(is_finite, largest, 0.0)
        total = tl.sum(sums * tl.exp(peaks - floor), axis=0)
        tl.store(values + place * (RANKED + 2) + RANKED, largest)
        tl.store(values + place * (RANKED + 2) + RANKED + 1, total)
        row = tl.load(rows + place)
        asked, temperature = _temperature(floats, row, float_stride)
        top_k = tl.load(ints + row * int_stride + TOP_K)
        top_p = tl.load(floats + row * float_stride + TOP_P)
        min_p = tl.load(floats + row * float_stride + MIN_P)
        has_top_k = (top_k > 0) & (top_k < vocab_size)
        has_limit = (asked > 0) & (has_top_k | (top_p < 1) | (min_p > 0))
        ranked = tl.arange(0, RANKED)
        is_wanted = largest < float("inf")  # none is, once a candidate surely belongs to the set
        for attempt in tl.static_range(TRIES):
            value, index = tl.max(
                noisy, axis=0, return_indices=True, return_indices_tie_break_left=True
            )
            token = tl.load(best_ids + place * splits * TRIES + index)
            score = load_scaled(logits + place * stride, token, vocab_size, temperature)
            is_left = is_wanted & (value > float("-inf"))
            is_wanted &= has_limit
            tl.store(ids + place * RANKED + attempt, tl.where(is_left, token, -1))
            # Of infinity there is nothing to count.
            ranked_as = tl.where(is_wanted, score, float("inf"))
            tl.store(values + place * (RANKED + 2) + attempt, ranked_as)
            is_wanted &= score < largest
            noisy = tl.where(entries == index, float("-inf"), noisy)
        # A nat apart near the best, where the mass is; further and further apart below.
        depth = (ranked - TRIES + 1).to(tl.float32)
        levels = largest - depth * (0.4 + 0.1 * depth)
        levels = tl.where(has_top_k & is_wanted, levels, float("inf"))
        is_level = ranked >= TRIES
        tl.store(values + place * (RANKED + 2) + ranked, levels, mask=is_level)
        tl.store(ids + place * RANKED + ranked, -1, mask=is_level)


@triton.jit
def _rank(
    logits: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    stride: int,
    vocab_size: int,
    ints: tl.tensor,
    floats: tl.tensor,
    int_stride: int,
    float_stride: int,
    softmax: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    RANKED: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """Of a split: how many tokens are better than each that is ranked, and their mass, in units of
    the best token's."""
    place, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part = place * tl.num_programs(1) + split
    ranked = tl.arange(0, RANKED)
    own = tl.load(values + place * (RANKED + 2) + ranked)
    end = tl.where(tl.load(softmax + part * 2) >= tl.min(own, axis=0), SPLIT, 0)
    own = own[:, None]
    own_ids = tl.load(ids + place * RANKED + ranked)[:, None]
    largest = tl.load(values + place * (RANKED + 2) + RANKED)
    _, temperature = _temperature(floats, tl.load(rows + place), float_stride)
    count = tl.zeros((RANKED, TILE), tl.int32)
    mass = tl.zeros((RANKED, TILE), tl.float32)
    for start in range(0, end, TILE):
        columns = split * SPLIT + start + tl.arange(0, TILE)
        scaled = load_scaled(logits + place * stride, columns, vocab_size, temperature)
        probs = tl.exp(scaled - largest)[None, :]
        scaled, columns = scaled[None, :], columns[None, :]
        is_better = (scaled > own) | ((scaled == own) & (columns < own_ids))
        count += is_better.to(tl.int32)
        mass += tl.where(is_better, probs, 0.0)
    tl.store(counts + part * RANKED + ranked, tl.sum(count, axis=1))
    tl.store(masses + part * RANKED + ranked, tl.sum(mass, axis=1))


@triton.jit
def _settle(
    logits: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    stride: int,
    vocab_size: int,
    ints: tl.tensor,
    floats: tl.tensor,
    int_stride: int,
    float_stride: int,
    softmax: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    near: tl.tensor,
    near_ids: tl.tensor,
    tokens: tl.tensor,
    is_valid: tl.tensor,
    splits: int,
    RANKED: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    top_k = tl.load(ints + row * int_stride + TOP_K)
    top_p = tl.load(floats + row * float_stride + TOP_P).to(tl.float32)
    min_p = tl.load(floats + row * float_stride + MIN_P).to(tl.float32)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    top_k = tl.where(has_top_k, top_k, vocab_size)
    ranked = tl.arange(0, RANKED)
    score = tl.load(values + place * (RANKED + 2) + ranked)
    token = tl.load(ids + place * RANKED + ranked)
    largest = tl.load(values + place * (RANKED + 2) + RANKED)
    total = tl.load(values + place * (RANKED + 2) + RANKED + 1)
    parts = tl.arange(0, BLOCK)[:, None]
    entries = (place * splits + parts) * RANKED + ranked[None, :]
    count = tl.sum(tl.load(counts + entries, mask=parts < splits, other=0), axis=0)
    mass = tl.sum(tl.load(masses + entries, mask=parts < splits, other=0.0), axis=0)
    # The mass of the top k is at least that of any k better ones, at most that of any k or more.
    prob = tl.exp(score - largest)
    with_own = tl.where((token >= 0) & (count < top_k), mass + prob, 0.0)
    least = tl.max(tl.maximum(with_own, tl.where(count <= top_k, mass, 0.0)), axis=0)
    most = tl.min(tl.where(count >= top_k, mass, total), axis=0)
    least, most = tl.where(has_top_k, least, total), tl.where(has_top_k, most, total)
    has_top_p = top_p < 1
    surely_in = tl.where(has_top_p, top_p * least, float("inf"))
    surely_out = tl.where(has_top_p, top_p * most, float("inf"))
    is_best = count == 0  # of which there is always one in the set
    is_outside = (count >= top_k) | (prob < min_p) | (mass >= surely_out)
    is_out = (token < 0) | (is_outside & (is_best == 0))
    is_in = (mass < surely_in) | is_best
    first = tl.min(tl.where(is_out, RANKED, ranked), axis=0)
    is_known = tl.sum(tl.where((ranked == first) & is_in, 1, 0), axis=0) > 0
    if is_known | (tl.load(is_valid + place) == 0):
        chosen = tl.sum(tl.where(ranked == tl.where(is_known, first, 0), token, 0), axis=0)
        tl.store(tokens + place, tl.maximum(chosen, 0).to(tl.int64))
    else:
        asked, temperature = _temperature(floats, row, float_stride)
        is_drawn = _is_drawn(asked, top_k)
        start = gumbel_start(tl.load(ints + row * int_stride + SEED), tl.load(positions + place))
        # What is worse than something outside is outside. For the mass of the top k all of these
        # are needed.
        is_beyond = tl.where(has_top_k & has_top_p, count >= top_k, is_outside & (is_best == 0))
        edge = tl.max(tl.where(is_beyond, score, float("-inf")), axis=0)
        source = logits + place * stride
        near += place * SPLIT
        near_ids += place * SPLIT
        num_near = collect(
            source, vocab_size, temperature, edge, softmax + place * splits * 2, near, near_ids,
            SPLIT,
        )  # fmt: skip
        if num_near <= SPLIT:
            index = search(
                near, near_ids, num_near, 1.0, largest, total, edge, top_k, has_top_k, top_p,
                min_p, start, is_drawn, True, SPLIT,
            )  # fmt: skip
            tl.store(tokens + place, tl.load(near_ids + index).to(tl.int64))
        else:
            index = search(
                source, near_ids, vocab_size, temperature, largest, total, edge, top_k, has_top_k,
                top_p, min_p, start, is_drawn, False, SPLIT,
            )  # fmt: skip
            tl.store(tokens + place, index.to(tl.int64))
