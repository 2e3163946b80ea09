"""Asks for the token masks of rows with a grammar, and samples a held row when its mask is there.

The matcher lives in a worker, and advances by the outputs that each BuildMask carries, once per
token. Where the row has drafts, they come with the result of the step that holds it, and the masks
cover the whole window. Writes `Sequence.mask`, `SchedulerState.samples` and `SchedulerState.held`
(out).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from aserve.messages.base import VALUE_BYTES, num_mask_words, pack_i32
from aserve.messages.executor import EngineSpec
from aserve.messages.results import BuildMask, MaskReady, RowDrafts
from aserve.messages.step import Sample
from aserve.scheduling.finish import finish, retract
from aserve.scheduling.flights import Step
from aserve.scheduling.request import Sequence
from aserve.scheduling.state import SchedulerState

SLOW_PART = 8  # one in so many rows


def ask_mask(state: SchedulerState, sequence: Sequence) -> None:
    """Asks for the masks of the next output and of the outputs after its drafts, unless they were
    asked for already (a retracted sequence comes again). While the drafts are not known, it does
    nothing: it is called again when a step holds the row, and when that step's drafts come.
    """
    mask_state = sequence.mask
    if mask_state is None or mask_state.asked == sequence.num_outputs:
        return
    num_drafts = _num_drafts(state, sequence)
    drafts = mask_state.drafts if num_drafts else None
    if num_drafts is None or (num_drafts and drafts is None):
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
            drafts=b"" if drafts is None else drafts.tokens,
            parents=b"" if drafts is None else drafts.parents,
        )
    )


def held_flights(state: SchedulerState, step: Step) -> npt.NDArray[np.bool_]:
    """Returns which flights wait for a mask before they sample."""
    return step.samples & (state.table.has_mask[step.rows] > 0)


def _num_drafts(state: SchedulerState, sequence: Sequence) -> int | None:
    """Returns the drafts behind the sequence's last known token, or None if a step that is not
    launched, or tokens that are not back, decide about them.
    """
    if sequence.max_step_tokens == state.spec.decode.root_len:
        return 0
    step = state.held.get(sequence.row)
    if step is None or sequence.num_sampling != 1:
        return None
    assert sequence.mask is not None
    if sequence.mask.drafts_iteration != step.iteration:
        sequence.mask.drafts = None
    return int(step.num_drafts[step.index_of(sequence.row)])


def receive_drafts(state: SchedulerState, step: Step, drafts: RowDrafts) -> None:
    """Notes the drafts of a held row."""
    index = step.index_of(drafts.row)
    sequence = step.sequences[index]
    if step.is_dropped(index) or sequence.mask is None:
        return
    sequence.mask.drafts, sequence.mask.drafts_iteration = drafts, step.iteration
    ask_mask(state, sequence)


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
    """Samples every held row whose mask is there, one message per step and data-parallel rank;
    before any launch that may name those rows.
    """
    if not state.held:
        return
    ready: dict[tuple[int, int], list[int]] = {}
    for row, step in state.held.items():
        sequence = state.masked[row]
        if sequence.num_sampling == 1 and _has_mask(sequence):
            ready.setdefault((step.iteration, sequence.rank), []).append(row)
    for (iteration, _), rows in sorted(ready.items()):
        state.effects.append(_give_sample(state, iteration, rows))


def _has_mask(sequence: Sequence) -> bool:
    mask = sequence.mask
    return mask is not None and mask.mask is not None and mask.asked == sequence.num_outputs


def _num_nodes(step: Step, row: int) -> int:
    return 1 + int(step.num_drafts[step.index_of(row)])


def _give_sample(state: SchedulerState, iteration: int, rows: list[int]) -> Sample:
    masks: list[bytes] = []
    for row in rows:
        sequence = state.masked[row]
        assert sequence.mask is not None
        assert sequence.mask.mask is not None
        sequence.is_blocked = False
        step = state.samples[iteration, row] = state.held.pop(row)
        size = num_mask_words(state.spec.vocab_size) * VALUE_BYTES
        masks.append(sequence.mask.mask[: size * _num_nodes(step, row)])
    return Sample(iteration=iteration, rows=pack_i32(rows), masks=b"".join(masks))
