"""Samples one token per row of logits, with temperature, top-k, top-p and min-p, without a sort.

    token = argmax over the allowed tokens t of  logits[t] / temperature + noise(seed, position, t)

`sample` runs one kernel per stage; `sample_ref` is the same by a stable sort. The noise is in
gumbel.py, and the slow exact search of stage 4 is in token_set.py.
"""

# Theory of operation
#
# Gumbel-max sampling. The argmax of `logits / temperature + g`, with independent standard Gumbel
# noise g, is distributed as softmax(logits / temperature) (Gumbel, 1954; Maddison, Tarlow and
# Minka, 2014). So a draw needs one pass over the logits, and no softmax or cumulative sum.
#
# Coupled noise. g is a pure function of (seed, position, token id). So the same request draws the
# same token at the same position in any batch, with or without a CUDA graph, in torch or in
# Triton, and after it was preempted and computed again. Two models with similar logits mostly draw
# the same token, which is what raises the acceptance rate of speculative decoding. A row with a
# temperature of 0 has no noise.
#
# The allowed set. Tokens rank by logit, and equal logits by token id. With the probabilities p of
# the scaled logits, a token t belongs to the set if
#     fewer than top_k tokens rank above it,
#     these have a mass below top_p times the mass of the top k, and
#     p[t] >= min_p * p[best].
# The best token always belongs. The drawn token is the member with the highest noisy score.
#
# Why there is no sort. A sort of 150,000 logits per row costs more than everything else in the
# sampler. Instead the kernels propose and verify, as rejection sampling does: the tokens with the
# highest noisy scores are candidates, and the first of them that belongs to the set is accepted.
# Verifying a candidate takes only the number of tokens that rank above it, and their mass: one pass
# over the logits for all candidates together. Unlike rejection sampling with fresh random numbers
# (FlashInfer's), this gives exactly the argmax that a sort would give, since candidates come in
# descending order of their noisy scores.
#
# The vocabulary is divided into splits of SPLIT tokens. The size is fixed, so that a row's sums are
# rounded alike in every batch. The stages, each one kernel launch:
#   1. `_scan` (a program per row and split): the split's best noisy tokens, its largest logit and
#      its sum of exponentials.
#   2. `_merge` (a program per row): combines the splits. Without limits the best noisy token is the
#      result, and stages 3 and 4 are not launched. With limits it writes PIVOTS pivots: the
#      CANDIDATES best noisy tokens, and fixed levels below the largest logit. The levels bracket
#      the mass of the top k, which top_p refers to.
#   3. `_count_above` (a program per row and split): for each pivot, how many tokens rank above it
#      and their mass. Splits whose largest logit is below all pivots are not read.
#   4. `_select` (a program per row): accepts the first candidate that is not certainly outside the
#      set, if it is certainly inside. It may be undecided, because the mass of the top k is only
#      bracketed, or all candidates may be outside. Then an exact search follows: collect the tokens
#      that rank no lower than a pivot which is certainly outside, find the set's last member by
#      bisection over the bits of the logits, and take the best noisy member. If more tokens than a
#      split holds qualify, the whole row is searched. This is rare, so it may be slow.
# Nothing as large as the logits is written. No stage needs a value on the host, so all of them can
# be captured in a CUDA graph.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.gumbel import gumbel, gumbel_ref, gumbel_start
from aserve_kernels.row_columns import FLOAT_COLUMNS, INT_COLUMNS
from aserve_kernels.token_set import collect, load_scaled, search

SPLIT = 4096  # tokens of a split; the same for every batch
WARPS = 8  # of a program that holds a split
TILE = 256  # tokens that `_count_above` compares with all pivots at once
CANDIDATES = 4
PIVOTS = 16  # the candidates and 12 levels

SEED: tl.constexpr = tl.constexpr(INT_COLUMNS.index("seed"))
TOP_K: tl.constexpr = tl.constexpr(INT_COLUMNS.index("top_k"))
TEMPERATURE: tl.constexpr = tl.constexpr(FLOAT_COLUMNS.index("temperature"))
TOP_P: tl.constexpr = tl.constexpr(FLOAT_COLUMNS.index("top_p"))
MIN_P: tl.constexpr = tl.constexpr(FLOAT_COLUMNS.index("min_p"))


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
    """Returns the tokens, int64 [n], and whether each is valid, bool [n].

    logits float32, bfloat16 or float16 [n, vocab] with contiguous rows. rows and positions int64
    [n]: the row of the parameter tables, and the position that the noise belongs to. ints int64 and
    floats float64 [max_rows + 1, columns]: the tables of row_columns.py. A temperature of 0 is
    greedy; a top_k of 0, a top_p of 1 and a min_p of 0 are off. Without `has_noise` every row is
    treated as greedy; without `has_limits` no row's limits are applied.

    A row is invalid if a logit is NaN or plus infinity, or if none is finite; its token is then any
    token id.
    """
    num, vocab_size = logits.shape
    tokens = torch.empty(num, dtype=torch.int64, device=logits.device)
    is_valid = torch.empty(num, dtype=torch.bool, device=logits.device)
    if not num:
        return tokens, is_valid
    splits = triton.cdiv(vocab_size, SPLIT)
    candidates = CANDIDATES if has_limits else 1
    best = logits.new_empty((num, splits, candidates), dtype=torch.float32)
    best_ids = best.new_empty(best.shape, dtype=torch.int32)
    softmax = best.new_empty((num, splits, 2))  # a split's largest logit, its sum of exponentials
    tables = (ints, floats, ints.stride(0), floats.stride(0))
    inputs = (logits, rows, positions, logits.stride(0), vocab_size, *tables)
    scanned = (best, best_ids, softmax)
    _scan[(num, splits)](
        *inputs, *scanned, has_noise, has_limits, candidates, SPLIT, num_warps=WARPS
    )
    pivots = best.new_empty((num, PIVOTS + 2))  # then the row's largest logit, sum of exponentials
    pivot_ids = best_ids.new_empty((num, PIVOTS))  # token ids; -1 for a level
    block = triton.next_power_of_2(splits)
    results = (tokens, is_valid, splits)
    _merge[(num,)](
        *inputs, *scanned, pivots, pivot_ids, *results, has_limits, candidates, PIVOTS, block
    )
    if not has_limits:
        return tokens, is_valid
    counts = best_ids.new_empty((num, splits, PIVOTS))
    masses = best.new_empty((num, splits, PIVOTS))
    _count_above[(num, splits)](
        *inputs, softmax, pivots, pivot_ids, counts, masses, PIVOTS, TILE, SPLIT, num_warps=WARPS
    )
    collected, collected_ids = best.new_empty((num, SPLIT)), best_ids.new_empty((num, SPLIT))
    _select[(num,)](
        *inputs, softmax, pivots, pivot_ids, counts, masses, collected, collected_ids, *results,
        PIVOTS, block, SPLIT, num_warps=WARPS,
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
    """The same in plain torch, by a stable sort of each row."""
    logits = logits.float()
    is_valid = logits.amax(dim=1).isfinite()
    temperature = floats[rows, TEMPERATURE.value, None].float()
    is_noisy = (temperature > 0) & has_noise
    scaled = logits / torch.where(is_noisy, temperature, 1)
    noise = gumbel_ref(ints[rows, SEED.value], positions, logits.shape[1])
    noisy = torch.where(is_noisy, scaled + noise, scaled)
    if not has_limits:
        return noisy.argmax(dim=1), is_valid
    top_k = ints[rows, TOP_K.value, None]
    top_p, min_p = (floats[rows, column.value, None].float() for column in (TOP_P, MIN_P))
    order = scaled.argsort(dim=1, descending=True, stable=True)
    probs = scaled.softmax(dim=1).gather(1, order)
    ranks = torch.arange(logits.shape[1], device=logits.device)
    in_top_k = (top_k == 0) | (ranks < top_k)
    mass_above = probs.cumsum(dim=1) - probs
    limit = top_p * (probs * in_top_k).sum(dim=1, keepdim=True)
    in_set = in_top_k & ((mass_above < limit) | (top_p >= 1))
    in_set &= probs >= min_p * probs[:, :1]
    allowed = noisy.gather(1, order).masked_fill(~in_set, -torch.inf)
    return order.gather(1, allowed.argmax(dim=1, keepdim=True))[:, 0], is_valid


@triton.jit
def _temperature(
    floats: tl.tensor, row: tl.tensor, float_stride: int
) -> tuple[tl.tensor, tl.tensor]:
    """Returns the requested temperature, and the divisor of the logits: 1 where the row is
    greedy.
    """
    requested = tl.load(floats + row * float_stride + TEMPERATURE).to(tl.float32)
    return requested, tl.where(requested > 0, requested, 1.0)


@triton.jit
def _is_noisy(temperature: tl.tensor, top_k: tl.tensor) -> tl.tensor:
    """With a top_k of 1 the noise cannot change the result, and is not computed."""
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
    CANDIDATES: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    logits_row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split_index = logits_row * tl.num_programs(1) + split
    indices = tl.arange(0, SPLIT)
    columns = split * SPLIT + indices
    row = tl.load(rows + logits_row)
    temperature = 1.0
    is_noisy = False
    if HAS_NOISE:
        requested, temperature = _temperature(floats, row, float_stride)
        top_k = 0
        if HAS_LIMITS:
            top_k = tl.load(ints + row * int_stride + TOP_K)
        is_noisy = _is_noisy(requested, top_k)
    scaled = load_scaled(logits + logits_row * stride, columns, vocab_size, temperature)
    largest = tl.max(scaled, axis=0)
    tl.store(softmax + split_index * 2, largest)
    if HAS_LIMITS:
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        tl.store(softmax + split_index * 2 + 1, tl.sum(tl.exp(scaled - shift), axis=0))
    noisy = scaled
    if is_noisy:
        start = gumbel_start(
            tl.load(ints + row * int_stride + SEED), tl.load(positions + logits_row)
        )
        noisy = scaled + gumbel(start, columns)
    for candidate in tl.static_range(CANDIDATES):
        value, index = tl.max(
            noisy, axis=0, return_indices=True, return_indices_tie_break_left=True
        )
        tl.store(best + split_index * CANDIDATES + candidate, value)
        tl.store(best_ids + split_index * CANDIDATES + candidate, split * SPLIT + index)
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
    pivots: tl.tensor,
    pivot_ids: tl.tensor,
    tokens: tl.tensor,
    is_valid: tl.tensor,
    splits: int,
    HAS_LIMITS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    logits_row = tl.program_id(0).to(tl.int64)
    split_ids = tl.arange(0, BLOCK)
    split_softmax = softmax + logits_row * splits * 2
    split_maxima = tl.load(
        split_softmax + split_ids * 2, mask=split_ids < splits, other=float("-inf")
    )
    largest = tl.max(split_maxima, axis=0)
    is_finite = (largest > float("-inf")) & (largest < float("inf"))
    tl.store(is_valid + logits_row, is_finite)
    entries = tl.arange(0, BLOCK * CANDIDATES)
    in_bounds = entries < splits * CANDIDATES
    noisy = tl.load(
        best + logits_row * splits * CANDIDATES + entries, mask=in_bounds, other=float("-inf")
    )
    if not HAS_LIMITS:
        index = tl.argmax(noisy, axis=0)
        tl.store(tokens + logits_row, tl.load(best_ids + logits_row * splits + index).to(tl.int64))
    else:
        sums = tl.load(split_softmax + split_ids * 2 + 1, mask=split_ids < splits, other=0.0)
        shift = tl.where(is_finite, largest, 0.0)
        total = tl.sum(sums * tl.exp(split_maxima - shift), axis=0)
        tl.store(pivots + logits_row * (PIVOTS + 2) + PIVOTS, largest)
        tl.store(pivots + logits_row * (PIVOTS + 2) + PIVOTS + 1, total)
        row = tl.load(rows + logits_row)
        requested, temperature = _temperature(floats, row, float_stride)
        top_k = tl.load(ints + row * int_stride + TOP_K)
        top_p = tl.load(floats + row * float_stride + TOP_P)
        min_p = tl.load(floats + row * float_stride + MIN_P)
        has_top_k = (top_k > 0) & (top_k < vocab_size)
        has_limit = (requested > 0) & (has_top_k | (top_p < 1) | (min_p > 0))
        pivot_columns = tl.arange(0, PIVOTS)
        # Whether later pivots matter: not after a candidate that certainly belongs to the set.
        is_needed = largest < float("inf")
        for candidate in tl.static_range(CANDIDATES):
            value, index = tl.max(
                noisy, axis=0, return_indices=True, return_indices_tie_break_left=True
            )
            token = tl.load(best_ids + logits_row * splits * CANDIDATES + index)
            score = load_scaled(logits + logits_row * stride, token, vocab_size, temperature)
            remains = is_needed & (value > float("-inf"))
            is_needed &= has_limit
            tl.store(pivot_ids + logits_row * PIVOTS + candidate, tl.where(remains, token, -1))
            # No token ranks above an infinite pivot, so nothing is read for it.
            pivot = tl.where(is_needed, score, float("inf"))
            tl.store(pivots + logits_row * (PIVOTS + 2) + candidate, pivot)
            is_needed &= score < largest
            noisy = tl.where(entries == index, float("-inf"), noisy)
        # Levels are about a nat apart near the largest logit, where the mass is, and further
        # apart below.
        depth = (pivot_columns - CANDIDATES + 1).to(tl.float32)
        levels = largest - depth * (0.4 + 0.1 * depth)
        levels = tl.where(has_top_k & is_needed, levels, float("inf"))
        is_level = pivot_columns >= CANDIDATES
        tl.store(pivots + logits_row * (PIVOTS + 2) + pivot_columns, levels, mask=is_level)
        tl.store(pivot_ids + logits_row * PIVOTS + pivot_columns, -1, mask=is_level)


@triton.jit
def _count_above(
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
    pivots: tl.tensor,
    pivot_ids: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    PIVOTS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """Counts the tokens of a split that rank above each pivot, and sums their mass, in units of the
    best token's probability."""
    logits_row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split_index = logits_row * tl.num_programs(1) + split
    pivot_columns = tl.arange(0, PIVOTS)
    score = tl.load(pivots + logits_row * (PIVOTS + 2) + pivot_columns)
    end = tl.where(tl.load(softmax + split_index * 2) >= tl.min(score, axis=0), SPLIT, 0)
    score = score[:, None]
    token = tl.load(pivot_ids + logits_row * PIVOTS + pivot_columns)[:, None]
    largest = tl.load(pivots + logits_row * (PIVOTS + 2) + PIVOTS)
    _, temperature = _temperature(floats, tl.load(rows + logits_row), float_stride)
    count = tl.zeros((PIVOTS, TILE), tl.int32)
    mass = tl.zeros((PIVOTS, TILE), tl.float32)
    for start in range(0, end, TILE):
        columns = split * SPLIT + start + tl.arange(0, TILE)
        scaled = load_scaled(logits + logits_row * stride, columns, vocab_size, temperature)
        probs = tl.exp(scaled - largest)[None, :]
        scaled, columns = scaled[None, :], columns[None, :]
        is_above = (scaled > score) | ((scaled == score) & (columns < token))
        count += is_above.to(tl.int32)
        mass += tl.where(is_above, probs, 0.0)
    tl.store(counts + split_index * PIVOTS + pivot_columns, tl.sum(count, axis=1))
    tl.store(masses + split_index * PIVOTS + pivot_columns, tl.sum(mass, axis=1))


@triton.jit
def _select(
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
    pivots: tl.tensor,
    pivot_ids: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    collected: tl.tensor,
    collected_ids: tl.tensor,
    tokens: tl.tensor,
    is_valid: tl.tensor,
    splits: int,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    logits_row = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + logits_row)
    top_k = tl.load(ints + row * int_stride + TOP_K)
    top_p = tl.load(floats + row * float_stride + TOP_P).to(tl.float32)
    min_p = tl.load(floats + row * float_stride + MIN_P).to(tl.float32)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    top_k = tl.where(has_top_k, top_k, vocab_size)
    pivot_columns = tl.arange(0, PIVOTS)
    score = tl.load(pivots + logits_row * (PIVOTS + 2) + pivot_columns)
    token = tl.load(pivot_ids + logits_row * PIVOTS + pivot_columns)
    largest = tl.load(pivots + logits_row * (PIVOTS + 2) + PIVOTS)
    total = tl.load(pivots + logits_row * (PIVOTS + 2) + PIVOTS + 1)
    split_ids = tl.arange(0, BLOCK)[:, None]
    entries = (logits_row * splits + split_ids) * PIVOTS + pivot_columns[None, :]
    count = tl.sum(tl.load(counts + entries, mask=split_ids < splits, other=0), axis=0)
    mass = tl.sum(tl.load(masses + entries, mask=split_ids < splits, other=0.0), axis=0)
    # The mass of the top k is at least that of k or fewer of the best tokens, and at most that of k
    # or more.
    prob = tl.exp(score - largest)
    up_to_pivot = tl.where((token >= 0) & (count < top_k), mass + prob, 0.0)
    low = tl.max(tl.maximum(up_to_pivot, tl.where(count <= top_k, mass, 0.0)), axis=0)
    high = tl.min(tl.where(count >= top_k, mass, total), axis=0)
    low, high = tl.where(has_top_k, low, total), tl.where(has_top_k, high, total)
    has_top_p = top_p < 1
    certain_in = tl.where(has_top_p, top_p * low, float("inf"))
    certain_out = tl.where(has_top_p, top_p * high, float("inf"))
    is_best = count == 0  # the best token always belongs to the set
    is_outside = (count >= top_k) | (prob < min_p) | (mass >= certain_out)
    is_out = (token < 0) | (is_outside & (is_best == 0))
    is_inside = (mass < certain_in) | is_best
    first = tl.min(tl.where(is_out, PIVOTS, pivot_columns), axis=0)
    is_known = tl.sum(tl.where((pivot_columns == first) & is_inside, 1, 0), axis=0) > 0
    if is_known | (tl.load(is_valid + logits_row) == 0):
        chosen = tl.sum(tl.where(pivot_columns == tl.where(is_known, first, 0), token, 0), axis=0)
        tl.store(tokens + logits_row, tl.maximum(chosen, 0).to(tl.int64))
    else:
        requested, temperature = _temperature(floats, row, float_stride)
        is_noisy = _is_noisy(requested, top_k)
        start = gumbel_start(
            tl.load(ints + row * int_stride + SEED), tl.load(positions + logits_row)
        )
        # Every token that ranks below a token outside the set is outside too. But the mass of the
        # top k needs all of the top k, so then only pivots beyond these bound the search.
        is_beyond = tl.where(has_top_k & has_top_p, count >= top_k, is_outside & (is_best == 0))
        edge = tl.max(tl.where(is_beyond, score, float("-inf")), axis=0)
        source = logits + logits_row * stride
        collected += logits_row * SPLIT
        collected_ids += logits_row * SPLIT
        num_collected = collect(
            source, vocab_size, temperature, edge, softmax + logits_row * splits * 2, collected,
            collected_ids, SPLIT,
        )  # fmt: skip
        if num_collected <= SPLIT:
            index = search(
                collected, collected_ids, num_collected, 1.0, largest, total, edge, top_k,
                has_top_k, top_p, min_p, start, is_noisy, True, SPLIT,
            )  # fmt: skip
            tl.store(tokens + logits_row, tl.load(collected_ids + index).to(tl.int64))
        else:
            index = search(
                source, collected_ids, vocab_size, temperature, largest, total, edge, top_k,
                has_top_k, top_p, min_p, start, is_noisy, False, SPLIT,
            )  # fmt: skip
            tl.store(tokens + logits_row, index.to(tl.int64))
