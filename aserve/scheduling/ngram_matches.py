"""Finds n-gram matches: rows whose last tokens have occurred before in their own prompt or output,
as a drafter finds them that looks up what followed (gpu/spec/ngram.py). And what is usual for
windows, by which that is judged.

The scheduler has the tokens up to the last result, so this costs no step and no message. A search
is one call of bytes.rfind, and takes about 1 us for 1,000 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from aserve.scheduling.rows import Column
from aserve.scheduling.token_log import TokenLog

Floats = npt.NDArray[np.float64]

# A match of at least LENGTHS[i] tokens has the level i + 1. USUAL_OF_LEVELS are the probabilities
# that the next token is that of the match, before any was seen; the drafts of level 0 come from
# other rows, or from matches too short to tell.
LENGTHS = (3, 8)
USUAL_OF_LEVELS = (0.02, 0.5, 0.85)
MOST_SEARCHED = 1 << 16  # tokens of all rows together
TOKEN_BYTES = 4
MOST_MISALIGNED = 64  # places at which the bytes match across tokens, before a search is given up
PRIOR = 2.0  # observations that count as usual ones for each row
FADING = 64  # steps after which an observation counts 1/e
FIRST_FADING = 4  # the same in the beginning


def match_levels(logs: Sequence[TokenLog]) -> list[int]:
    """Returns the level of each row's match. Of long texts only the last tokens are searched."""
    most = MOST_SEARCHED // max(len(logs), 1)
    return [match_level(log.packed(max(log.num - most, 0), log.num)) for log in logs]


def match_level(tokens: bytes) -> int:
    """tokens: int32."""
    level = 0
    for length in LENGTHS:
        last = tokens[-length * TOKEN_BYTES :]
        place = tokens.rfind(last, 0, -TOKEN_BYTES)
        for _ in range(MOST_MISALIGNED):
            if place % TOKEN_BYTES == 0 or place < 0:
                break
            place = tokens.rfind(last, 0, place + len(last) - 1)
        if place < 0 or place % TOKEN_BYTES:
            break
        level += 1
    return level


def near_usual(accepted: Floats, rejected: Floats, usual: Floats) -> Floats:
    """Returns each row's probability of acceptance, of drafts that were accepted and windows that
    ended with a rejected one. Rows whose drafts differ from the usual ones by no more than chance
    count as usual (James-Stein estimate)."""
    num_seen = accepted + rejected
    differences = (accepted - num_seen * usual) / (num_seen + PRIOR)
    by_chance = usual * (1 - usual) * num_seen / (num_seen + PRIOR) ** 2
    squares = float((differences**2).sum())
    keep = max(0.0, 1 - float(by_chance.sum()) / squares) if squares else 0.0
    near: Floats = usual + keep * differences
    return near


class UsualWindows:
    """Learns how often drafts are right, by the level of their match. This is what is expected of a
    new row."""

    __slots__ = ("_fadings", "_seen")

    def __init__(self, chances: Sequence[float]) -> None:
        """chances: of each level, before any window."""
        # Accepted drafts and rejected windows of a usual window.
        self._seen = np.array([[chance, 1 - chance] for chance in chances])
        self._fadings = [FIRST_FADING] * len(chances)

    @property
    def chances(self) -> Floats:
        chances: Floats = self._seen[:, 0] / self._seen.sum(axis=1)
        return chances

    def note(
        self, levels: Column, num_accepted: Column, is_rejected: npt.NDArray[np.bool_]
    ) -> None:
        for level, fading in enumerate(self._fadings):
            seen = levels == level
            if seen.any():
                mean = np.array([num_accepted[seen].mean(), is_rejected[seen].mean()])
                self._seen[level] += (mean - self._seen[level]) / fading
                self._fadings[level] = min(fading + 1, FADING)
