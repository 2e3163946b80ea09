"""A forward, or a whole step, of a decoder in one compiled call, by one thread or a team of them.

A step draws a token at each node of a row's window, which is its last known token and the drafts
after it. The drafts that equal the tokens drawn before them are accepted, so the row gets 1 to
1 + num_drafts tokens. A row without drafts is a window of one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from numba import from_dtype, njit, prange, types
from torch import Tensor

from aserve_kernels.cpu.bf16 import (
    Float32s,
    Floats,
    as_array,
    as_tensor,
    empty_array,
    numba_type,
)
from aserve_kernels.cpu.decoder_layers import (
    LAYER,
    LORA,
    MAX_LOGITS_ROWS,
    MODEL,
    Records,
    Tables,
    num_narrow,
    num_wide,
    write_logits,
)
from aserve_kernels.cpu.host_rows import Int64s, QueryRows
from aserve_kernels.cpu.layers_function import call_layers, layers_function
from aserve_kernels.cpu.memory import INT32_LIKE, array_at
from aserve_kernels.cpu.precompile import cached_njit, compile_ahead
from aserve_kernels.cpu.rejection import (
    NO_DRAFT,
    draw_block,
    draw_verified,
    is_random_window,
    keep_target_probs,
)
from aserve_kernels.cpu.team import Team, meet, new_meeting, share_of, worker_of

Int32s: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step as the host knows them, int64 [rows] each. Steps that repeat each other
    have the same ones."""

    rows: Int64s
    is_bound: Int64s  # 1 where the KV length is an upper bound, and the relay has the length
    query_lens: Int64s
    num_drafts: Int64s  # the last tokens of the row, which the relay has
    is_sampled: Int64s  # 0 for a chunk that is not the prompt's last
    # How many last tokens of the row have a hidden state that is read: those of its window, or all
    # of them, as always where a layer is captured.
    num_read: Int64s
    slots: Int64s  # [tokens], of adapters
    num_samples: int
    num_logits: int  # tokens of all windows
    width: int  # tokens of the longest window, at least 1


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """The results of a step, beside what it writes to the pools and the relay."""

    words: Int32s  # tokens [samples, width], counts [samples], is_valid [logits]
    counts: Int64s  # [rows], the tokens that each row gets
    token_ids: Int64s  # [tokens], without placeholders
    kv_lens: Int64s  # [rows], exact KV lengths before the step
    # [tokens, hidden] after the final norm, in the model's dtype. Those that are read come first,
    # row after row; the others are undefined.
    hidden: Floats
    streams: Floats  # [captured, tokens, hidden], residual streams in the model's dtype


def decoder_forward(
    input_ids: Int64s,
    rows: QueryRows,
    slots: Int64s,
    tables: Tables,
    hidden: Tensor | None = None,
    *,
    stream: Tensor | None = None,
    num_workers: int = 1,
) -> tuple[Tensor, Tensor]:
    """Returns the output of the layers [tokens, hidden], which for a whole model are the hidden
    states after the final norm, and the residual streams [captured, tokens, hidden], in the model's
    dtype. Writes the tokens' KV slots.

    input_ids [tokens], row after row; slots [tokens] are those of adapters. `hidden` [tokens, size]
    are the hidden states that a draft model reads. `stream` float32 [tokens, hidden] becomes the
    residual stream after the layers; layers without embeddings begin with what it has.
    `num_workers` threads share the work, of a draft model only one; it was compiled for one, or for
    any number above.
    """
    out, streams = _empty_outputs(len(input_ids), tables)
    inputs = out[:0] if hidden is None else as_array(hidden)
    own = (rows.rows, rows.lens, rows.starts, rows.query_lens, slots, tables.captured)
    records = (tables.model, tables.layers, tables.loras)
    forward = _forward_alone if num_workers == 1 else _forward
    residual = np.empty((0, out.shape[1]), np.float32) if stream is None else stream.numpy()
    team = (new_meeting(), num_workers)
    forward(_layers_of(tables), input_ids, inputs, *own, *records, out, streams, residual, *team)
    return as_tensor(out, tables.dtype), as_tensor(streams, tables.dtype)


def decoder_step(
    input_ids: Int64s,
    kv_lens: Int64s,
    rows: StepRows,
    tables: Tables,
    *,
    iteration: int,
    is_block: bool = False,
    num_workers: int = 1,
) -> StepOutputs:
    """Runs the forward, draws tokens for the sampled rows, and accepts drafts.

    An id of -r stands for the last token of row r; kv_lens int64 [rows] are the KV lengths before
    the step. Also writes the ids to the token pool, and the relay: each sampled row's last token,
    and the iteration that wrote it; and every row's KV length after the step, in a mode that
    publishes it. `is_block`: windows are verified as blocks where the relay has the distributions
    of their drafts. `num_workers` as in `decoder_forward`.
    """
    num_words = rows.num_samples * (rows.width + 1) + rows.num_logits
    words = np.zeros(num_words, np.int32)
    counts, exact_lens = np.zeros_like(kv_lens), np.empty_like(kv_lens)
    token_ids = np.empty_like(input_ids)
    out, streams = _empty_outputs(len(input_ids), tables)
    known = (rows.rows, kv_lens, rows.is_bound, rows.query_lens, rows.num_drafts)
    inputs = (input_ids, *known, rows.is_sampled, rows.num_read, rows.slots, tables.captured)
    written = (counts, token_ids, exact_lens, out, streams, words)
    numbers = (iteration, int(is_block))
    step = _step_alone if num_workers == 1 else _step
    records = (tables.model, tables.layers, tables.loras)
    team = (new_meeting(), num_workers)
    step(_layers_of(tables), *inputs, *numbers, *records, *written, *team)
    return StepOutputs(words, counts, token_ids, exact_lens, out, streams)


def _empty_outputs(num_tokens: int, tables: Tables) -> tuple[Floats, Floats]:
    """Returns memory for the output of the layers, and for the residual streams."""
    shape = (num_tokens, int(tables.model["hidden"][0]))
    streams = empty_array((len(tables.captured), *shape), tables.dtype)
    return empty_array(shape, tables.dtype), streams


def _layers_of(tables: Tables) -> int:
    return layers_function(tables.dtype, tables.kv_dtype).address


COLUMN = types.Array(types.int64, 1, "C")
RECORDS = tuple(types.Array(from_dtype(kind), 1, "C") for kind in (MODEL, LAYER, LORA))


def compile_decoder_forward(
    dtype: torch.dtype, num_workers: int = 1, kv_dtype: torch.dtype | None = None
) -> None:
    """Compiles for this dtype, of KV as well unless another one is given, and either for one worker
    or for several."""
    layers_function(dtype, kv_dtype or dtype)
    table, streams = (types.Array(numba_type(dtype), size, "C") for size in (2, 3))
    words = types.Array(types.int32, 1, "C")
    forward, step = (_forward_alone, _step_alone) if num_workers == 1 else (_forward, _step)
    address, team = types.int64, (COLUMN, types.int64)
    residual = types.Array(types.float32, 2, "C")
    written = (table, streams, residual)
    compile_ahead(forward, address, COLUMN, table, *[COLUMN] * 6, *RECORDS, *written, *team)
    results = (*[COLUMN] * 3, table, streams, words, *team)
    compile_ahead(step, address, *[COLUMN] * 10, *[types.int64] * 2, *RECORDS, *results)


@cached_njit(parallel=True, nogil=True)
def _forward(
    function: int, ids: Int64s, hiddens: Floats, rows: Int64s, lens: Int64s, starts: Int64s,
    query_lens: Int64s, slots: Int64s, captured: Int64s, models: Records, layers: Records,
    loras: Records, out: Floats, streams: Floats, stream: Float32s, meeting: Int64s,
    num_workers: int,
) -> None:  # fmt: skip
    wide = np.empty(num_wide(ids.shape[0], models[0]), np.float32)
    narrow_ = np.empty(num_narrow(ids.shape[0], models[0]), out.dtype)
    for index in prange(num_workers):
        _forward_share(
            function, ids, hiddens, rows, lens, starts, query_lens, slots, captured, models, layers,
            loras, out, streams, stream, wide, narrow_, meeting, worker_of(index), num_workers,
        )  # fmt: skip


@cached_njit(nogil=True)
def _forward_alone(
    function: int, ids: Int64s, hiddens: Floats, rows: Int64s, lens: Int64s, starts: Int64s,
    query_lens: Int64s, slots: Int64s, captured: Int64s, models: Records, layers: Records,
    loras: Records, out: Floats, streams: Floats, stream: Float32s, meeting: Int64s,
    num_workers: int,
) -> None:  # fmt: skip
    wide = np.empty(num_wide(ids.shape[0], models[0]), np.float32)
    narrow_ = np.empty(num_narrow(ids.shape[0], models[0]), out.dtype)
    for worker in range(num_workers):
        _forward_share(
            function, ids, hiddens, rows, lens, starts, query_lens, slots, captured, models, layers,
            loras, out, streams, stream, wide, narrow_, meeting, worker, num_workers,
        )  # fmt: skip


@njit(nogil=True)
def _forward_share(
    function: int, ids: Int64s, hiddens: Floats, rows: Int64s, lens: Int64s, starts: Int64s,
    query_lens: Int64s, slots: Int64s, captured: Int64s, models: Records, layers: Records,
    loras: Records, out: Floats, streams: Floats, stream: Float32s, wide: Float32s, narrow_: Floats,
    meeting: Int64s, worker: int, num_workers: int,
) -> None:  # fmt: skip
    team = Team(worker, num_workers, meeting)
    hidden = wide[: stream.size].reshape(stream.shape)  # the residual stream
    first, last = share_of(stream.shape[0], team)
    hidden[first:last] = stream[first:last]
    call_layers(
        function, ids, hiddens, rows, lens, starts, query_lens, query_lens, slots, models, layers,
        loras, captured, out, streams, wide, narrow_, team,
    )  # fmt: skip
    stream[first:last] = hidden[first:last]


@cached_njit(parallel=True, nogil=True)
def _step(
    function: int, ids: Int64s, rows: Int64s, kv_lens: Int64s, is_bound: Int64s, query_lens: Int64s,
    num_drafts: Int64s, is_sampled: Int64s, num_read: Int64s, slots: Int64s, captured: Int64s,
    iteration: int, is_block: int, models: Records, layers: Records, loras: Records,
    counts: Int64s, token_ids: Int64s, exact_lens: Int64s, out: Floats, streams: Floats,
    words: Int32s, meeting: Int64s, num_workers: int,
) -> None:  # fmt: skip
    starts, lens = np.empty_like(rows), np.empty_like(rows)
    num_logits = min(MAX_LOGITS_ROWS, _num_logits(is_sampled, num_drafts))
    wide = np.empty(num_wide(ids.shape[0], models[0]), np.float32)
    narrow_ = np.empty(num_narrow(ids.shape[0], models[0]), out.dtype)
    gathered = np.empty((num_logits, models[0].hidden), out.dtype)
    logits = np.empty((num_logits, models[0].vocab), np.float32)
    for index in prange(num_workers):
        _step_share(
            function, ids, rows, kv_lens, is_bound, query_lens, num_drafts, is_sampled, num_read,
            slots, captured, iteration, is_block, models, layers, loras, counts, token_ids,
            exact_lens, out, streams, words, starts, lens, wide, narrow_, gathered, logits, meeting,
            worker_of(index), num_workers,
        )  # fmt: skip


@cached_njit(nogil=True)
def _step_alone(
    function: int, ids: Int64s, rows: Int64s, kv_lens: Int64s, is_bound: Int64s, query_lens: Int64s,
    num_drafts: Int64s, is_sampled: Int64s, num_read: Int64s, slots: Int64s, captured: Int64s,
    iteration: int, is_block: int, models: Records, layers: Records, loras: Records,
    counts: Int64s, token_ids: Int64s, exact_lens: Int64s, out: Floats, streams: Floats,
    words: Int32s, meeting: Int64s, num_workers: int,
) -> None:  # fmt: skip
    starts, lens = np.empty_like(rows), np.empty_like(rows)
    num_logits = min(MAX_LOGITS_ROWS, _num_logits(is_sampled, num_drafts))
    wide = np.empty(num_wide(ids.shape[0], models[0]), np.float32)
    narrow_ = np.empty(num_narrow(ids.shape[0], models[0]), out.dtype)
    gathered = np.empty((num_logits, models[0].hidden), out.dtype)
    logits = np.empty((num_logits, models[0].vocab), np.float32)
    for worker in range(num_workers):
        _step_share(
            function, ids, rows, kv_lens, is_bound, query_lens, num_drafts, is_sampled, num_read,
            slots, captured, iteration, is_block, models, layers, loras, counts, token_ids,
            exact_lens, out, streams, words, starts, lens, wide, narrow_, gathered, logits, meeting,
            worker, num_workers,
        )  # fmt: skip


@njit(nogil=True)
def _step_share(
    function: int, ids: Int64s, rows: Int64s, kv_lens: Int64s, is_bound: Int64s, query_lens: Int64s,
    num_drafts: Int64s, is_sampled: Int64s, num_read: Int64s, slots: Int64s, captured: Int64s,
    iteration: int, is_block: int, models: Records, layers: Records, loras: Records,
    counts: Int64s, token_ids: Int64s, exact_lens: Int64s, out: Floats, streams: Floats,
    words: Int32s, starts: Int64s, lens: Int64s, wide: Float32s, narrow_: Floats,
    gathered: Floats, logits: Float32s, meeting: Int64s, worker: int, num_workers: int,
) -> None:  # fmt: skip
    model, team = models[0], Team(worker, num_workers, meeting)
    if worker == 0:
        _resolve_lens(rows, kv_lens, is_bound, query_lens, model, exact_lens, starts, lens)
        _resolve(ids, rows, lens, starts, query_lens, num_drafts, model, token_ids)
    meet(team)
    call_layers(
        function, token_ids, out, rows, lens, starts, query_lens, num_read, slots, models, layers,
        loras, captured, out, streams, wide, narrow_, team,
    )  # fmt: skip
    _accept(
        rows, exact_lens, starts, query_lens, num_read, num_drafts, is_sampled, iteration, is_block,
        model, token_ids, out, gathered, logits, counts, words, team,
    )  # fmt: skip
    if worker == 0:
        _publish(rows, lens, num_drafts, is_sampled, counts, model)


@njit(inline="always")
def _publish(
    rows: Int64s, lens: Int64s, num_drafts: Int64s, is_sampled: Int64s, counts: Int64s, model: Any
) -> None:
    """Writes the lengths after the step to the relay, in modes that publish them."""
    if model.seq_len != 0:
        published = array_at(model.seq_len, (model.table_rows,), rows)
        for r in range(rows.shape[0]):
            num_rejected = is_sampled[r] * (1 + num_drafts[r] - counts[r])
            published[rows[r]] = lens[r] - num_rejected


@njit(inline="always")
def _resolve_lens(
    rows: Int64s, kv_lens: Int64s, is_bound: Int64s, query_lens: Int64s, model: Any,
    exact_lens: Int64s, starts: Int64s, lens: Int64s,
) -> None:  # fmt: skip
    """Replaces bounds by published lengths; `lens` are those with this step's tokens."""
    start = 0
    for r in range(rows.shape[0]):
        exact_lens[r], starts[r] = kv_lens[r], start
        if is_bound[r] != 0:
            exact_lens[r] = array_at(model.seq_len, (model.table_rows,), rows)[rows[r]]
        lens[r] = exact_lens[r] + query_lens[r]
        start += query_lens[r]


@njit(inline="always")
def _resolve(
    ids: Int64s, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s,
    num_drafts: Int64s, model: Any, token_ids: Int64s,
) -> None:  # fmt: skip
    """Replaces placeholders by token ids and fills in the drafts, and writes the ids to the token
    pool."""
    last_token = array_at(model.last_token, (model.table_rows,), ids)
    drafts = array_at(model.drafts, (model.table_rows, model.max_drafts), ids)
    pages = array_at(model.token_pages, (model.table_rows, model.table_columns), ids)
    pool = array_at(model.token_pool, (model.num_slots,), INT32_LIKE)
    for r in range(rows.shape[0]):
        num_known = query_lens[r] - num_drafts[r]
        for offset in range(query_lens[r]):
            token = starts[r] + offset
            position = lens[r] - query_lens[r] + offset
            if offset >= num_known:
                token_ids[token] = drafts[rows[r], offset - num_known]
            else:
                token_ids[token] = ids[token] if ids[token] >= 0 else last_token[-ids[token]]
            page = pages[rows[r], position // model.page_size]
            pool[page * model.page_size + position % model.page_size] = token_ids[token]


@njit(nogil=True)
def _num_logits(is_sampled: Int64s, num_drafts: Int64s) -> int:
    total = 0
    for r in range(is_sampled.shape[0]):
        total += is_sampled[r] * (1 + num_drafts[r])
    return total


@njit(inline="always")
def _accept(
    rows: Int64s, kv_lens: Int64s, starts: Int64s, query_lens: Int64s, num_read: Int64s,
    num_drafts: Int64s, is_sampled: Int64s, iteration: int, is_block: int, model: Any,
    token_ids: Int64s, hidden: Floats, gathered: Floats, logits: Float32s, counts: Int64s,
    words: Int32s, team: Team,
) -> None:  # fmt: skip
    """Draws the tokens of each window in order, up to the first that differs from the draft after
    it. Nodes after that are not drawn, and count as valid. A window that is verified as a block is
    decided at its last node. The logits are shared by outputs, and the draws by windows."""
    sampled = np.flatnonzero(is_sampled)
    width = 1
    for r in sampled:
        width = max(width, 1 + num_drafts[r])
    num_samples = sampled.shape[0]
    num_tokens = num_samples * width
    is_valid = words[num_tokens + num_samples :]
    # Of each logits row: its index in `sampled`, its place in the window, and its hidden state.
    samples, places = np.empty_like(is_valid), np.empty_like(is_valid)
    ends, hidden_rows = num_read.cumsum(), np.empty_like(is_valid)
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
            root = kv_lens[r] + query_lens[r] - 1 - num_drafts[r]
            end = starts[r] + query_lens[r]
            drafts = token_ids[end - num_drafts[r] : end]
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
            counts[r] = words[num_tokens + sample] = place + 1
            last_token[rows[r]], written_iter[rows[r]] = drawn, iteration
        meet(team)
