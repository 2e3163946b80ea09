"""What numba is told of functions that it compiles: it knows no operation."""

from collections.abc import Mapping
from typing import Any

# What may be done with sums and products of floats: infinities and NaN keep their meaning.
FAST = {"contract", "reassoc", "nsz", "arcp"}

# Of functions that make no array: nobody counts who holds a view, which numba otherwise does with
# two locked instructions for each.
# PERF: a prompt of 64 tokens through the tiny model of docs/performance.md spent 23 % of its time
# on them; 16 rows of 100 positions, 8 heads of 32: attention takes 57 us, and 74 with them.
UNCOUNTED: Mapping[str, Any] = {"_nrt": False}
