"""A step of padding rows and nothing else: it touches row 0 and page 0, which are nobody's.

It knows no scheduler: such a step has the number 0, and nobody waits for its tokens.
"""

from __future__ import annotations

from aserve.messages import PageWrites, ScheduleBatch, pack_i32


def padding_batch(span: int, *, num_groups: int, num_rows: int = 1) -> ScheduleBatch:
    """Each row has `span` tokens and is sampled."""
    return ScheduleBatch(
        iteration=0,
        rows=pack_i32([0] * num_rows),
        spans=pack_i32([span] * num_rows),
        input_ids=pack_i32([0] * span * num_rows),
        next_ids=pack_i32([0] * num_rows),
        kv_lens=pack_i32([0] * num_rows),
        bounds=bytes(num_rows),
        expects=pack_i32([0] * num_rows),
        sample_rows=pack_i32([0] * num_rows),
        page_writes=tuple(PageWrites() for _ in range(num_groups)),
    )
