"""Which pages a sliding window still sees: the one place for this arithmetic.

Knows nothing of who holds the pages; keeps no state. With a window of W, the query at position p
sees p - W + 1..p.
"""

from __future__ import annotations


def first_visible_page(kv_len: int, *, window: int | None, page_size: int) -> int:
    """The first page index that the query at position `kv_len`, or any later one, sees."""
    if window is None:
        return 0
    return max(kv_len - window + 1, 0) // page_size
