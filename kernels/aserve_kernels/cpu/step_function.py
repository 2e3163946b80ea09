"""A step of a decoder as one function of C: it looks up the tokens, calls the layers, draws tokens
for the sampled rows, and accepts drafts. There is one for each dtype of a model.

Each sampled row has a window, which is its last known token and the drafts after it, and a token is
drawn at each node of it. The drafts that equal the tokens drawn before them are accepted, so the
row gets 1 to 1 + num_drafts tokens. A row without drafts is a window of one token.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from aserve_kernels.cpu.bf16 import Float32s, Floats, empty_array
from aserve_kernels.cpu.callback import Callback, call_at, compile_callback
from aserve_kernels.cpu.decoder_layers import (
    MAX_LOGITS_ROWS,
    WORD_BYTES,
    Inputs,
    write_logits,
)
from aserve_kernels.cpu.host_rows import Int64s
from aserve_kernels.cpu.layers_function import (
    CALL,
    MODEL_LIKE,
    NUM_ARGUMENTS,
    inputs_of,
)
from aserve_kernels.cpu.memory import FLOAT32_LIKE, INT32_LIKE, INT64_LIKE, array_at
from aserve_kernels.cpu.rejection import (
    NO_DRAFT,
    draw_block,
    draw_verified,
    is_random_window,
    keep_target_probs,
)
from aserve_kernels.cpu.team import MEETING_LEN, Team, meet, share_of

Int32s: TypeAlias = npt.NDArray[np.int32]


# The arguments of a step: those of its layers, whose address is `function`, and those of its Step.
STEP: Any = np.dtype(
    [
        ("layers", CALL),
        *[(name, np.int64) for name in ("function", "iteration", "is_block", "num_logits")],
        *[(name, np.int64) for name in ("num_words", "ids", "kv_lens", "is_bound", "exact_lens")],
        *[(name, np.int64) for name in ("num_drafts", "is_sampled", "counts", "words")],
        *[(name, np.int64) for name in ("gathered", "logits")],
    ]
)
STEP_LIKE, NUM_STEP_WORDS = np.empty(0, STEP), STEP.itemsize // WORD_BYTES


class Step(NamedTuple):
    """Holds what a step reads and writes beside the Inputs of its layers, int64 [rows] unless
    something else is said."""

    ids: Int64s  # [tokens]; -r stands for the last token of row r
    kv_lens: Int64s  # before the step, or bounds of them
    is_bound: Int64s
    exact_lens: Int64s  # KV lengths before the step
    num_drafts: Int64s
    is_sampled: Int64s
    counts: Int64s  # the tokens that each row gets
    words: Int32s  # those of StepOutputs
    gathered: Floats  # [logits, hidden], hidden states of as many rows as are in memory at a time
    logits: Float32s  # [logits, vocab]


@njit(nogil=True)
def note_step(words: Int64s, step: Step, function: int, iteration: int, is_block: int) -> None:
    """Writes a STEP but for its layers, as `note_layers` does."""
    call = array_at(words.ctypes.data, (1,), STEP_LIKE)[0]
    call.function, call.iteration, call.is_block = function, iteration, is_block
    call.num_logits, call.num_words = step.logits.shape[0], step.words.shape[0]
    call.ids, call.kv_lens = step.ids.ctypes.data, step.kv_lens.ctypes.data
    call.is_bound, call.exact_lens = step.is_bound.ctypes.data, step.exact_lens.ctypes.data
    call.num_drafts, call.is_sampled = step.num_drafts.ctypes.data, step.is_sampled.ctypes.data
    call.counts, call.words = step.counts.ctypes.data, step.words.ctypes.data
    call.gathered, call.logits = step.gathered.ctypes.data, step.logits.ctypes.data


@cache
def step_function(dtype: torch.dtype) -> Callback:
    """Returns the step of a model of this dtype. Its arguments are the address of a record STEP, a
    worker and the number of workers."""
    like = empty_array((0,), dtype)

    def run_step_at(address: int, worker: int, num_workers: int) -> None:
        call = array_at(address, (1,), STEP_LIKE)[0]
        layers, num_rows, num_logits = call.layers, call.layers.num_rows, call.num_logits
        model = array_at(layers.tables.model, (1,), MODEL_LIKE)[0]
        team = Team(worker, num_workers, array_at(layers.meeting, (MEETING_LEN,), INT64_LIKE))
        inputs = inputs_of(layers, 0, like)
        step = Step(
            array_at(call.ids, (layers.num_tokens,), INT64_LIKE),
            array_at(call.kv_lens, (num_rows,), INT64_LIKE),
            array_at(call.is_bound, (num_rows,), INT64_LIKE),
            array_at(call.exact_lens, (num_rows,), INT64_LIKE),
            array_at(call.num_drafts, (num_rows,), INT64_LIKE),
            array_at(call.is_sampled, (num_rows,), INT64_LIKE),
            array_at(call.counts, (num_rows,), INT64_LIKE),
            array_at(call.words, (call.num_words,), INT32_LIKE),
            array_at(call.gathered, (num_logits, model.hidden), like),
            array_at(call.logits, (num_logits, model.vocab), FLOAT32_LIKE),
        )
        if worker == 0:
            _resolve_lens(step, inputs, model)
            _resolve(step, inputs, model)
        meet(team)
        call_at(call.function, (address, worker, num_workers))
        out = array_at(layers.out, (layers.num_tokens, model.hidden), like)
        _accept(step, inputs, out, model, call.iteration, call.is_block, team)
        if worker == 0:
            _publish(step, inputs, model)

    return compile_callback(run_step_at, NUM_ARGUMENTS)


@njit(nogil=True)
def _resolve_lens(step: Step, inputs: Inputs, model: Any) -> None:
    """Replaces bounds by published lengths."""
    start = 0
    published = array_at(model.seq_len, (model.table_rows,), inputs.rows)
    for r in range(inputs.rows.shape[0]):
        exact_len = step.kv_lens[r] if step.is_bound[r] == 0 else published[inputs.rows[r]]
        step.exact_lens[r], inputs.starts[r] = exact_len, start
        inputs.lens[r] = exact_len + inputs.query_lens[r]
        start += inputs.query_lens[r]


@njit(nogil=True)
def _resolve(step: Step, inputs: Inputs, model: Any) -> None:
    """Replaces placeholders by token ids and fills in the drafts, and writes the ids to the token
    pool."""
    ids, token_ids = step.ids, inputs.ids
    last_token = array_at(model.last_token, (model.table_rows,), ids)
    drafts = array_at(model.drafts, (model.table_rows, model.max_drafts), ids)
    pages = array_at(model.token_pages, (model.table_rows, model.table_columns), ids)
    pool = array_at(model.token_pool, (model.num_slots,), INT32_LIKE)
    for r in range(inputs.rows.shape[0]):
        row, query_len = inputs.rows[r], inputs.query_lens[r]
        num_known = query_len - step.num_drafts[r]
        for offset in range(query_len):
            token = inputs.starts[r] + offset
            position = step.exact_lens[r] + offset
            if offset >= num_known:
                token_ids[token] = drafts[row, offset - num_known]
            else:
                token_ids[token] = ids[token] if ids[token] >= 0 else last_token[-ids[token]]
            page = pages[row, position // model.page_size]
            pool[page * model.page_size + position % model.page_size] = token_ids[token]


@njit(nogil=True)
def _accept(
    step: Step, inputs: Inputs, hidden: Floats, model: Any, iteration: int, is_block: int,
    team: Team,
) -> None:  # fmt: skip
    """Draws the tokens of each window in order, up to the first that differs from the draft after
    it. Nodes after that are not drawn, and count as valid. A window that is verified as a block is
    decided at its last node. The logits are shared by outputs, and the draws by windows."""
    rows, num_drafts, words = inputs.rows, step.num_drafts, step.words
    gathered, logits = step.gathered, step.logits
    sampled = np.flatnonzero(step.is_sampled)
    width = 1
    for r in sampled:
        width = max(width, 1 + num_drafts[r])
    num_samples = sampled.shape[0]
    num_tokens = num_samples * width
    is_valid = words[num_tokens + num_samples :]
    # Of each logits row: its index in `sampled`, its place in the window, and its hidden state.
    samples, places = np.empty_like(is_valid), np.empty_like(is_valid)
    ends, hidden_rows = inputs.num_read.cumsum(), np.empty_like(is_valid)
    logits_row = 0
    for i in range(num_samples):
        window = 1 + num_drafts[sampled[i]]
        for place in range(window):
            samples[logits_row], places[logits_row] = i, place
            hidden_rows[logits_row] = ends[sampled[i]] - window + place
            logits_row += 1
    last_token = array_at(model.last_token, (model.table_rows,), rows)
    written_iter = array_at(model.written_iter, (model.table_rows,), rows)
    is_open = np.ones(num_samples, np.bool_)
    probs = np.empty((is_block * (1 + model.probs_drafts), model.probs_vocab), np.float32)
    for first in range(0, is_valid.shape[0], MAX_LOGITS_ROWS):
        num = min(MAX_LOGITS_ROWS, is_valid.shape[0] - first)
        first_own, last_own = share_of(num, team)
        for i in range(first_own, last_own):
            is_valid[first + i] = 1
            for d in range(model.hidden):
                gathered[i, d] = hidden[hidden_rows[first + i], d]
        meet(team)
        write_logits(gathered[:num], model, logits[:num], team.worker, team.num_workers)
        meet(team)
        for i in range(num):
            sample, place = samples[first + i], places[first + i]
            r = sampled[sample]
            if not is_open[sample] or sample % team.num_workers != team.worker:
                continue
            root = step.exact_lens[r] + inputs.query_lens[r] - 1 - num_drafts[r]
            end = inputs.starts[r] + inputs.query_lens[r]
            drafts = inputs.ids[end - num_drafts[r] : end]
            if is_block and len(drafts) > 0 and is_random_window(rows[r], drafts[0], model):
                keep_target_probs(logits[i], rows[r], model, probs[place])
                if place < len(drafts):
                    continue
                place, drawn, is_real = draw_block(
                    probs[: len(drafts) + 1], drafts, rows[r], root, model
                )
                is_valid[first + i - len(drafts) + place] = is_real
                for depth in range(place):
                    words[sample * width + depth] = drafts[depth]
                is_open[sample] = False
            else:
                draft = drafts[place] if place < len(drafts) else NO_DRAFT
                drawn, is_valid[first + i] = draw_verified(
                    logits[i], rows[r], root + 1 + place, root, draft, model
                )
                is_open[sample] = draft == drawn
            words[sample * width + place] = drawn
            step.counts[r] = words[num_tokens + sample] = place + 1
            last_token[rows[r]], written_iter[rows[r]] = drawn, iteration
        meet(team)


@njit(nogil=True)
def _publish(step: Step, inputs: Inputs, model: Any) -> None:
    """Writes the lengths after the step to the relay, in modes that publish them."""
    if model.seq_len != 0:
        published = array_at(model.seq_len, (model.table_rows,), inputs.rows)
        for r in range(inputs.rows.shape[0]):
            num_rejected = step.is_sampled[r] * (1 + step.num_drafts[r] - step.counts[r])
            published[inputs.rows[r]] = inputs.lens[r] - num_rejected
