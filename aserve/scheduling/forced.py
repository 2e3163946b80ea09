"""Appends tokens to a sequence that were not sampled: the end of its reasoning.

How it works: results of the sequence that are still in flight are dropped, as after a failed step,
but for this sequence alone. The forced tokens are handed out as outputs, without logprobs, and the
next step computes them as a chunk and samples behind them. So nothing else in the scheduler or on
the device knows of them. A sequence that no forced token may follow yet (its KV is being
transferred, or its prompt is being scored) is looked at again when its next output comes.
"""

from __future__ import annotations

from aserve.messages.base import pack_i32
from aserve.messages.output import SequenceOutput, StepOutput
from aserve.scheduling.flights import drop_flights
from aserve.scheduling.request import Sequence
from aserve.scheduling.state import SchedulerState


def end_reasoning(state: SchedulerState, sequence: Sequence) -> None:
    """Forces the end of the reasoning if its limit is reached."""
    reasoning = sequence.reasoning
    if reasoning is None:
        return
    if reasoning.is_limited:
        reasoning.read_rest(sequence.tokens.outputs[reasoning.num_read :])
    is_ready = not sequence.awaits_kv and sequence.num_scored >= sequence.prompt_len
    if reasoning.is_due and is_ready:
        _force(state, sequence, reasoning.missing_ids())
        reasoning.is_over = True
    if sequence.row:
        state.table.look_len[sequence.row] = sequence.look_len


def drop_results(state: SchedulerState, sequence: Sequence) -> None:
    """The results of this sequence that are in flight will not count. The device learns its row
    anew in the next step, whose KV replaces what those steps write.
    """
    if state.held.pop(sequence.row, None) is not None:
        sequence.is_blocked = False
    sequence.written_pages = 0
    sequence.relay_stamp = 0
    drop_flights(sequence)
    sequence.first_iteration = state.next_iteration
    sequence.failures = 0


def _force(state: SchedulerState, sequence: Sequence, token_ids: tuple[int, ...]) -> None:
    """Appends the tokens, as far as max_tokens allows."""
    forced = token_ids[: sequence.max_tokens - sequence.num_outputs]
    position = sequence.num_outputs
    sequence.tokens.outputs.extend(forced)
    sequence.client.serve_outputs(len(forced))
    drop_results(state, sequence)
    if sequence.row:
        state.table.num_tokens[sequence.row] = sequence.tokens.num
        state.table.last_id[sequence.row] = forced[-1]
    output = SequenceOutput(
        sequence.request_id, sequence.child, position, pack_i32(forced), max(sequence.cached_len, 0)
    )
    state.effects.append(StepOutput(iteration=state.landed, sequences=(output,)))
