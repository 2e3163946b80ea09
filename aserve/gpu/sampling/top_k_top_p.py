"""Top-k, top-p and min-p: the argmax of scores plus noise among the tokens that pass the filters.

The tokens that pass: the top_k most probable ones; of these, with their probabilities renormalised,
those for which the more probable ones sum to less than top_p; of these those with
p >= min_p * p_max. Equal logits rank by token id.

The common path needs no sort. It takes the noisy argmax over all tokens and tests by one reduction
whether that token passes, which it nearly always does (rejection sampling). Functions here may
overwrite their `noisy` argument only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# PERF: measured 1.07 to 1.10 tries per row with common settings. Rows without a token after these
# tries are sorted.
NUM_TRIES = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """The filters of n rows. A token passes if fewer than `count` tokens are better, if these have
    a mass below `mass`, and if its own probability is at least `floor`."""

    count: Tensor  # int64 [n]; vocab: off
    mass: Tensor  # [n]; infinite: off
    floor: Tensor  # [n]; 0: off

    def at(self, index: Tensor) -> Limits:
        return Limits(
            self.count.index_select(0, index),
            self.mass.index_select(0, index),
            self.floor.index_select(0, index),
        )


def set_limits(
    probs: Tensor, *, top_k: Tensor, top_p: Tensor, min_p: Tensor, max_top_k: int
) -> Limits:
    """probs [n, vocab]; top_k int64 [n], top_p and min_p [n]. `max_top_k` is the largest top_k of a
    row whose top-k filter is on; 0 if there is none."""
    vocab_size = probs.shape[1]
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    mass = top_p
    if max_top_k:
        best = probs.topk(max_top_k, dim=1).values.cumsum(dim=1)
        kept = best.gather(1, (top_k - 1).clamp(0, max_top_k - 1)[:, None])[:, 0]
        mass = torch.where(has_top_k, top_p * kept, top_p)
    return Limits(
        count=torch.where(has_top_k, top_k, vocab_size),
        # Rounded sums may exceed 1, and a top_p of 1 must not exclude the last token.
        mass=torch.where(top_p < 1, mass, torch.inf),
        floor=min_p * probs.amax(dim=1),
    )


def choose(scaled: Tensor, noisy: Tensor, probs: Tensor, limits: Limits) -> Tensor:
    """scaled, noisy, probs [n, vocab] -> token ids int64 [n].

    NOTE: the shapes of each try depend on the values of the one before, so this is for the CPU: on
    a device with a stream it would wait for the device.
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
        # PERF: in nearly all steps no row is left, and empty tensors cost nearly nothing.
        tokens.index_copy_(0, pending, noisy.index_select(0, pending).argmax(dim=1))
    exact = choose_sorted(
        scaled.index_select(0, pending),
        noisy.index_select(0, pending),
        probs.index_select(0, pending),
        limits.at(pending),
    )
    return tokens.index_copy_(0, pending, exact)


def _is_member(scaled: Tensor, probs: Tensor, candidates: Tensor, limits: Limits) -> Tensor:
    """Returns whether each row's candidate, int64 [n], passes the filters: bool [n]."""
    column = candidates[:, None]
    value = scaled.gather(1, column)
    ids = torch.arange(scaled.shape[1], device=scaled.device)
    is_better = (scaled > value) | ((scaled == value) & (ids < column))
    count = is_better.sum(dim=1)
    mass = (probs * is_better).sum(dim=1)
    prob = probs.gather(1, column)[:, 0]
    return (count < limits.count) & (mass < limits.mass) & (prob >= limits.floor)


def choose_sorted(scaled: Tensor, noisy: Tensor, probs: Tensor, limits: Limits) -> Tensor:
    """Does what `choose` does by a stable sort. It serves rows for which all tries failed, and all
    rows where a capture forbids to look at values.
    """
    order, is_in = _ranked_members(scaled, probs, limits)
    drawn = noisy.gather(1, order).masked_fill_(~is_in, -torch.inf)
    return order.gather(1, drawn.argmax(dim=1, keepdim=True))[:, 0]


def keep_probs(scaled: Tensor, probs: Tensor, limits: Limits) -> Tensor:
    """Returns the probabilities of the tokens that pass, renormalised, and zeros for the others."""
    order, is_in = _ranked_members(scaled, probs, limits)
    kept = probs * torch.zeros_like(is_in).scatter_(1, order, is_in)
    return kept / kept.sum(dim=1, keepdim=True)


def _ranked_members(scaled: Tensor, probs: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    """Returns the token ids of each row by descending probability, int64 [n, vocab], and which of
    them pass, bool [n, vocab]."""
    order = scaled.argsort(dim=1, descending=True, stable=True)
    ranked = probs.gather(1, order)
    mass = ranked.cumsum(dim=1) - ranked
    ranks = torch.arange(scaled.shape[1], device=scaled.device)
    is_in = (
        (ranks < limits.count[:, None])
        & (mass < limits.mass[:, None])
        & (ranked >= limits.floor[:, None])
    )
    return order, is_in


def _minus_infinity(like: Tensor) -> Tensor:
    return torch.full((), -torch.inf, dtype=like.dtype, device=like.device)
