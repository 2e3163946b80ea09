"""Changes sequences that wait or run: their priority, their max_tokens, and the end of reasoning.

Everything is tested first, so that a change that is refused changes nothing. It takes effect behind
the outputs that have been committed: results in flight count as far as the new limits allow.
"""

from __future__ import annotations

from aserve.errors import ClientError, ContextTooLong, InvalidRequest, NeverFits
from aserve.messages.changes import Amend, Amended, SequenceState
from aserve.scheduling.budget import most_pages
from aserve.scheduling.finish import finish_at_end, settle
from aserve.scheduling.followers import abandon, lead, unfollow
from aserve.scheduling.forced import drop_results, end_reasoning
from aserve.scheduling.grammar_rows import ask_mask
from aserve.scheduling.refusals import fits_alone
from aserve.scheduling.request import Phase, Sequence
from aserve.scheduling.state import SchedulerState
from aserve.scheduling.token_log import max_kv_len


def amend(state: SchedulerState, event: Amend) -> None:
    children = state.groups.get(event.request_id, {}).values()
    living = [sequence for sequence in children if not sequence.has_ended]
    error = next((found for each in living if (found := _refusal(state, each, event))), None)
    if error is None:
        for sequence in living:
            _change(state, sequence, event)
        for step in state.steps.values():
            step.repeat = None  # it says when rows end
    states = tuple(_state_of(state, sequence) for sequence in living)
    state.effects.append(Amended(event, states, None if error is None else error.info()))


def _refusal(state: SchedulerState, sequence: Sequence, event: Amend) -> ClientError | None:
    if event.ends_reasoning and sequence.reasoning is None:
        return InvalidRequest(
            "This request has no reasoning that could be ended.",
            param="end_thinking",
            code="no_reasoning",
        )
    if event.max_tokens is None:
        return None
    if not sequence.max_tokens:
        return InvalidRequest(
            "This request generates nothing, so its 'max_tokens' cannot be changed.",
            param="max_tokens",
            code="invalid_value",
        )
    max_len = sequence.prompt_len + event.max_tokens
    if max_len > state.spec.max_model_len:
        return ContextTooLong(
            f"This model's maximum context length is {state.spec.max_model_len} tokens. However, "
            f"the prompt has {sequence.prompt_len} tokens and you requested {event.max_tokens} in "
            f"the completion. At most {state.spec.max_model_len - sequence.prompt_len} are left.",
            param="max_tokens",
        )
    needed_len = max_kv_len(sequence.prompt_len, event.max_tokens, state.spec.decode)
    if not fits_alone(state, sequence, max_kv_len=needed_len):
        needed, usable = most_pages(state, needed_len)[0], state.spec.groups[0].num_pages - 1
        return NeverFits(
            f"With max_tokens {event.max_tokens} this request would need {needed} KV pages of "
            f"{state.spec.page_size} tokens, but the engine has {usable}.",
            param="max_tokens",
        )
    return None


def _change(state: SchedulerState, sequence: Sequence, event: Amend) -> None:
    if event.priority is not None and event.priority != sequence.priority:
        _set_priority(state, sequence, event.priority)
    if event.max_tokens is not None:
        _set_max_tokens(state, sequence, event.max_tokens)
    if event.ends_reasoning and sequence.reasoning is not None and not sequence.is_at_end:
        sequence.reasoning.max_tokens = 0
        end_reasoning(state, sequence)
    if sequence.is_at_end:
        finish_at_end(state, sequence)
    else:
        ask_mask(state, sequence)
        settle(state, sequence)


def _set_priority(state: SchedulerState, sequence: Sequence, priority: int) -> None:
    """NOTE: a queue knows the place of a sequence by its priority, so it leaves the queue first."""
    queues = [queue for queue in (state.waiting, state.slow_waiting) if sequence in queue]
    for queue in queues:
        queue.remove(sequence)
    if sequence.leader is not None:
        unfollow(state, sequence)
        queues = [state.waiting]
    sequence.priority = priority
    for queue in queues:
        queue.add(sequence)
    if sequence.followers:
        abandon(state, sequence)
        lead(state, sequence, num_committed=sequence.cacheable_len // state.spec.page_size)


def _set_max_tokens(state: SchedulerState, sequence: Sequence, max_tokens: int) -> None:
    sequence.set_max_tokens(max_tokens, state.spec.decode)
    if not sequence.row:
        return
    table, row = state.table, sequence.row
    table.max_tokens[row] = sequence.max_tokens
    table.max_len[row] = sequence.max_len
    table.look_len[row] = sequence.look_len
    table.max_kv_len[row] = sequence.max_kv_len
    if sequence.scheduled_len > sequence.max_kv_len and not sequence.is_at_end:
        drop_results(state, sequence)


def _state_of(state: SchedulerState, sequence: Sequence) -> SequenceState:
    return SequenceState(
        sequence.child,
        sequence.phase.value,
        sequence.prompt_len,
        sequence.num_outputs,
        sequence.max_tokens,
        sequence.priority,
        _num_ahead(state, sequence) if sequence.phase is Phase.WAITING else None,
    )


def _num_ahead(state: SchedulerState, sequence: Sequence) -> int:
    own = _order(sequence)
    waiting = [each for each in state.living() if each.phase is Phase.WAITING]
    return sum(_order(each) < own for each in waiting)


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return (sequence.priority, sequence.client.key, sequence.arrival)
