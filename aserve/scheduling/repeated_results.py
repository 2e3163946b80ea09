"""The results of steps that repeated the one before (steady.py), where nothing came but the next
token of every row. They change all rows alike, so that commit.py does not look at each.
"""

from __future__ import annotations

import numpy as np

from aserve.messages.base import array_i32, pack_i32
from aserve.messages.output import NextTokens, StepOutput
from aserve.messages.results import StepResult
from aserve.scheduling.advance import commit_pages
from aserve.scheduling.flights import Repeat, Step, land_alike
from aserve.scheduling.state import SchedulerState


def land_repeated(state: SchedulerState, step: Step, result: StepResult) -> bool:
    """Commits the result of a step that repeated the one before, and returns True; or changes
    nothing, and returns False, if more than the next token of every row comes with it.

    Other steps may have been launched since, with other rows. They change nothing of these.
    """
    repeat, table = step.repeat, state.table
    if repeat is None:
        return False
    number, tokens = step.iteration - repeat.first, array_i32(result.tokens)
    if number >= repeat.num_quiet or not _is_plain_result(result, repeat):
        return False
    is_dropped = table.first_iteration[repeat.places] > step.iteration  # or has no row
    if np.count_nonzero(is_dropped) or np.count_nonzero(state.end_ids[tokens]):
        return False
    positions = pack_i32(repeat.positions + number)
    columns = (repeat.children, positions, result.tokens, repeat.cached_lens)
    state.effects.append(
        StepOutput(step.iteration, next_tokens=NextTokens(repeat.request_ids, *columns))
    )
    for append, token_id in zip(repeat.appends, tokens.tolist(), strict=True):
        append(token_id)
    for client, num_tokens in repeat.clients:
        client.serve_outputs(num_tokens)
    table.last_id[repeat.rows] = tokens
    land_alike(table, repeat.places)
    if state.spec.prefix_cache:
        has_page = repeat.page_phase == number % state.spec.page_size
        commit_pages(state, repeat.rows[has_page])
    return True


def _is_plain_result(result: StepResult, repeat: Repeat) -> bool:
    is_alike = result.rows == repeat.step.packed_rows and result.counts == repeat.ones
    return is_alike and not result.logprobs and len(result.tokens) == len(repeat.ones)
