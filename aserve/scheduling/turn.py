"""The bounds of one turn of the scheduler, so that no load makes a turn long.

A turn costs about 4 us for every running row, and 15 to 50 us for every sequence that is received,
admitted or finished in it. So the fewer rows run, the more of the others a turn may take; the rest
waits for the next turn. What remains where many rows run is enough for a steady load in which each
sequence runs for at least 32 steps.
"""

from __future__ import annotations

from aserve.messages.executor import EngineSpec

MOST = 32  # sequences, where no row runs
LEAST = 8  # sequences, however many rows run
ROWS_PER_SEQUENCE = 10  # running rows that cost as much as one sequence
STEPS_PER_SEQUENCE = 32
PAGES_PER_LOOK = 1024  # cached pages that cost as much as one look when they are opened


def max_received(num_running: int) -> int:
    """New sequences that enter the queue in one turn; a larger group of one request comes alone."""
    return max(LEAST, MOST - num_running // ROWS_PER_SEQUENCE)


def max_looks(spec: EngineSpec, *, num_running: int) -> int:
    """Waiting sequences that one turn looks at, to admit them."""
    return max(_steady(spec), MOST - num_running // ROWS_PER_SEQUENCE)


def max_finished(spec: EngineSpec) -> int:
    """Sequences of those whose last token came that one turn finishes."""
    return 2 * _steady(spec)


def _steady(spec: EngineSpec) -> int:
    return max(LEAST, spec.max_rows // STEPS_PER_SEQUENCE)
