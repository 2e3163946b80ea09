"""The kinds of chains of drafts, which have one token per row and forward.

They differ in what forward k = 0, 1, ... reads, and at which position. L is the row's KV length.

    kind        reads                                                 position
    TOKENS      the last known token, then the draft before           L + k
    RECURRENT   the draft before, and the output before; there is     L + k - 1
                no forward 0: the first draft is drawn from the
                row's hidden state
    FROZEN      as TOKENS, and the output before                      L - 1

Before there is an output, the row's hidden state in the relay stands for it. Draft k is drawn with
the noise of position L + k + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

# The relay field [drafts, vocab] of the distributions that a row's drafts were drawn from.
DRAFT_PROBS = "draft_probs"


@dataclass(frozen=True, slots=True)
class ChainKind:
    num_skipped: int  # draws before the first forward
    start: int  # the position of forward 0, relative to L
    moves: bool  # each forward has the position behind the one before


TOKENS = ChainKind(num_skipped=0, start=0, moves=True)
RECURRENT = ChainKind(num_skipped=1, start=-1, moves=True)
FROZEN = ChainKind(num_skipped=0, start=-1, moves=False)
