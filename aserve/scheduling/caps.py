"""How far ahead and how wide: the numbers that `depth` and `lead` give. Knows nothing of
sequences' contents.
"""

from __future__ import annotations

from aserve.messages import EngineSpec
from aserve.scheduling.request import Sequence


def max_decode_rows(spec: EngineSpec, num_running: int) -> int:
    """Decode rows of one step at most: with lead < depth (a pipeline) the rows are spread over
    the steps in flight.
    """
    return -(-num_running * spec.lead // spec.depth)


def may_run_ahead(sequence: Sequence, *, lead: int) -> bool:
    """Whether another step may name this row now, as far as what it has in flight is concerned."""
    return sequence.flights.num_sampling < lead and not sequence.is_at_end and not sequence.is_held


def waits_for_masks(spec: EngineSpec, *, num_in_flight: int, has_held_rows: bool) -> bool:
    """A launch waits for held rows' masks while another step keeps the device busy, never
    longer.
    """
    return spec.lead == spec.depth and has_held_rows and num_in_flight > 0
