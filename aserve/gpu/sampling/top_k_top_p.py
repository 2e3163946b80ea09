"""Top-k, top-p and min-p: the argmax of logits plus noise, among the tokens that may be drawn.

It knows no step, row or history. All functions may overwrite their `noisy` argument only.

The set: the top_k most probable tokens; of these, renormalised, those whose strictly more probable
ones have a mass below top_p; of these those with p >= min_p * p_max. Equal logits rank by token id.
No sort on the common path: the noisy argmax is tested by one reduction, and is nearly always in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# PERF: measured 1.07 to 1.10 tries per row with common settings; what is left after these is
# sorted.
NUM_TRIES = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """[n] each; a limit that is off is infinite (or 0, for the floor)."""

    count: Tensor  # a token needs fewer better ones than this, int64
    mass: Tensor  # and less mass of better ones than this
    floor: Tensor  # and at least this probability

    def at(self, index: Tensor) -> Limits:
        return Limits(
            self.count.index_select(0, index),
            self.mass.index_select(0, index),
            self.floor.index_select(0, index),
        )


def set_limits(
    probs: Tensor, *, top_k: Tensor, top_p: Tensor, min_p: Tensor, max_top_k: int
) -> Limits:
    """probs [n, vocab]; top_k int64 [n], top_p and min_p [n]; `max_top_k` bounds those that are
    on.
    """
    vocab_size = probs.shape[1]
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    mass = top_p
    if max_top_k:
        best = probs.topk(max_top_k, dim=1).values.cumsum(dim=1)
        kept = best.gather(1, (top_k - 1).clamp(0, max_top_k - 1)[:, None])[:, 0]
        mass = torch.where(has_top_k, top_p * kept, top_p)
    return Limits(
        count=torch.where(has_top_k, top_k, vocab_size),
        # Rounded sums may exceed 1: a top_p of 1 must not cut the last token off.
        mass=torch.where(top_p < 1, mass, torch.inf),
        floor=min_p * probs.amax(dim=1),
    )


def choose(scaled: Tensor, noisy: Tensor, probs: Tensor, limits: Limits) -> Tensor:
    """[n, vocab] each -> token ids int64 [n]. How many rows are left after a try decides what is
    computed next, so a device that runs behind would have to be waited for.
    """
    tokens = noisy.argmax(dim=1)
    pending = torch.arange(len(tokens), device=tokens.device)
    for _ in range(NUM_TRIES):
        candidates = tokens.index_select(0, pending)
        is_in = _is_member(
            scaled.index_select(0, pending),
            probs.index_select(0, pending),
            candidates,
            limits.at(pending),
        )
        noisy.index_put_((pending, candidates), _minus_infinity(noisy))
        pending = pending[~is_in]
        # No row is left in nearly all steps, and then this is nearly free.
        tokens.index_copy_(0, pending, noisy.index_select(0, pending).argmax(dim=1))
    exact = choose_sorted(
        scaled.index_select(0, pending),
        noisy.index_select(0, pending),
        probs.index_select(0, pending),
        limits.at(pending),
    )
    return tokens.index_copy_(0, pending, exact)


def _is_member(scaled: Tensor, probs: Tensor, candidates: Tensor, limits: Limits) -> Tensor:
    """candidates int64 [n] -> bool [n]."""
    column = candidates[:, None]
    value = scaled.gather(1, column)
    ids = torch.arange(scaled.shape[1], device=scaled.device)
    is_better = (scaled > value) | ((scaled == value) & (ids < column))
    count = is_better.sum(dim=1)
    mass = (probs * is_better).sum(dim=1)
    prob = probs.gather(1, column)[:, 0]
    return (count < limits.count) & (mass < limits.mass) & (prob >= limits.floor)


def choose_sorted(scaled: Tensor, noisy: Tensor, probs: Tensor, limits: Limits) -> Tensor:
    """As `choose`, by a stable sort: for rows of which the best tries were all outside, and for all
    where nobody may ask which these are.
    """
    order = scaled.argsort(dim=1, descending=True, stable=True)
    ranked = probs.gather(1, order)
    mass = ranked.cumsum(dim=1) - ranked
    ranks = torch.arange(scaled.shape[1], device=scaled.device)
    is_in = (
        (ranks < limits.count[:, None])
        & (mass < limits.mass[:, None])
        & (ranked >= limits.floor[:, None])
    )
    drawn = noisy.gather(1, order).masked_fill_(~is_in, -torch.inf)
    return order.gather(1, drawn.argmax(dim=1, keepdim=True))[:, 0]


def _minus_infinity(like: Tensor) -> Tensor:
    return torch.full((), -torch.inf, dtype=like.dtype, device=like.device)
