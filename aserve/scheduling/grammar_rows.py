"""Asks for the token masks of rows with a grammar, and samples a held row when its mask is there.

The matcher lives in a worker, and advances by the outputs that each BuildMask carries, once per
token. Writes `Sequence.mask`, `SchedulerState.samples` and `SchedulerState.held` (out).
"""

from __future__ import annotations

from aserve.messages.base import pack_i32
from aserve.messages.executor import EngineSpec
from aserve.messages.results import BuildMask, MaskReady
from aserve.messages.step import Sample
from aserve.scheduling.finish import finish, retract
from aserve.scheduling.request import Sequence
from aserve.scheduling.state import SchedulerState

SLOW_PART = 8  # one in so many rows


def ask_mask(state: SchedulerState, sequence: Sequence) -> None:
    """Asks for the mask of the next output, unless it was asked for already (a retracted
    sequence comes again).
    """
    mask_state = sequence.mask
    if mask_state is None or mask_state.asked == sequence.num_outputs:
        return
    start = sequence.prompt_len + mask_state.num_sent
    new_ids = sequence.tokens.span(start, sequence.tokens.num)
    mask_state.asked = sequence.num_outputs
    mask_state.num_sent = sequence.num_outputs
    mask_state.mask = None
    state.effects.append(
        BuildMask(
            request_id=sequence.request_id,
            child=sequence.child,
            position=mask_state.asked,
            new_ids=new_ids.tobytes(),
        )
    )


def receive_mask(state: SchedulerState, ready: MaskReady) -> None:
    """Gives a mask to the sequence that waits for it. One that nobody waits for is ignored."""
    sequence = state.groups.get(ready.request_id, {}).get(ready.child)
    if sequence is None or sequence.mask is None or sequence.mask.asked != ready.position:
        return
    if ready.error is not None:
        finish(state, sequence, "error", error=ready.error)
        return
    sequence.mask.mask = ready.mask
    if ready.is_slow and not sequence.mask.is_slow:
        _mark_slow(state, ready.request_id)


def has_slow_room(state: SchedulerState, sequence: Sequence) -> bool:
    """Returns whether one more row may be given to this sequence, as far as slow masks limit it."""
    if sequence.mask is None or not sequence.mask.is_slow:
        return True
    return len(_slow_rows(state)) < max_slow_rows(state.spec)


def return_slow(state: SchedulerState) -> None:
    """Puts as many sequences with slow masks back into the queue as may get rows now."""
    if not state.slow_waiting:
        return
    for _ in range(max_slow_rows(state.spec) - len(_slow_rows(state))):
        sequence = state.slow_waiting.pop()
        if sequence is None:
            return
        state.waiting.add(sequence)


def max_slow_rows(spec: EngineSpec) -> int:
    """Sequences whose masks take long hold at most this part of the rows, so that they cannot keep
    the others from running.
    """
    return max(1, spec.max_rows // SLOW_PART)


def waits_for_masks(state: SchedulerState) -> bool:
    """A launch waits for held rows' masks that are likely to come soon, while another step keeps
    the device busy, never longer.
    """
    if state.spec.lead != state.spec.depth or not state.steps:
        return False
    return any(not _is_slow(state.masked[row]) for row in state.held)


def _is_slow(sequence: Sequence) -> bool:
    return sequence.mask is not None and sequence.mask.is_slow


def _slow_rows(state: SchedulerState) -> list[Sequence]:
    return [sequence for sequence in state.masked.values() if _is_slow(sequence)]


def _mark_slow(state: SchedulerState, request_id: str) -> None:
    """Marks all children of the request as slow. Rows beyond the bound are retracted, the latest
    first; what their matchers have seen stays valid.
    """
    for child in state.groups[request_id].values():
        if child.mask is not None:
            child.mask.is_slow = True
    rows = sorted(_slow_rows(state), key=lambda sequence: sequence.arrival)
    for sequence in rows[max_slow_rows(state.spec) :]:
        if not sequence.awaits_kv:
            retract(state, sequence)


def give_samples(state: SchedulerState) -> None:
    """Samples every held row whose mask is there, one message per step; before any launch that
    may name those rows.
    """
    ready: dict[int, list[int]] = {}
    for row, step in state.held.items():
        sequence = state.masked[row]
        if sequence.mask and sequence.mask.mask is not None and sequence.num_sampling == 1:
            ready.setdefault(step.iteration, []).append(row)
    for iteration, rows in sorted(ready.items()):
        state.effects.append(_give_sample(state, iteration, rows))


def _give_sample(state: SchedulerState, iteration: int, rows: list[int]) -> Sample:
    masks: list[bytes] = []
    for row in rows:
        sequence = state.masked[row]
        assert sequence.mask is not None
        assert sequence.mask.mask is not None
        sequence.is_blocked = False
        state.samples[iteration, row] = state.held.pop(row)
        masks.append(sequence.mask.mask)
    return Sample(iteration=iteration, rows=pack_i32(rows), masks=b"".join(masks))
