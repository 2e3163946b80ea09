"""The parts of drafting that are one compiled call each: a chain of drafts, draws from the logits
of hidden states, and the storing of keys and values without attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import from_dtype, njit, types
from torch import Tensor

from aserve_kernels.cpu.bf16 import Float32s, Floats, as_array, empty_array, narrow, numba_type
from aserve_kernels.cpu.callback import call_at
from aserve_kernels.cpu.decoder_layers import (
    LAYER,
    MAX_LOGITS_ROWS,
    MODEL,
    NO_IDS,
    Inputs,
    Records,
    Tables,
    logits_of,
    store_keys,
)
from aserve_kernels.cpu.host_rows import Int64s, QueryRows
from aserve_kernels.cpu.layers_function import (
    CALL_LIKE,
    COLUMN,
    NUM_WORDS,
    Results,
    empty_results,
    layers_function,
    note_layers,
    types_of,
)
from aserve_kernels.cpu.memory import INT64_LIKE, array_at, scratch
from aserve_kernels.cpu.precompile import cached_njit, compile_ahead
from aserve_kernels.cpu.product import multiply_by
from aserve_kernels.cpu.rejection import draw_draft
from aserve_kernels.draft_chain import ChainKind


@dataclass(frozen=True, slots=True)
class ChainRows:
    """The rows that get drafts, int64 [rows] each. num_drafts do not rise from row to row."""

    rows: Int64s
    kv_lens: Int64s
    is_bound: Int64s  # 1 where kv_lens is an upper bound, and the relay has the length
    num_drafts: Int64s


def draft_chain(
    rows: ChainRows, kind: ChainKind, tables: Tables, relay: Tensor | None = None
) -> None:
    """Draws num_drafts tokens for each row and writes them to the relay. `relay` [max_rows + 1,
    size] has the rows' hidden states, for kinds that read them."""
    num_rows = len(rows.rows)
    results, function = empty_results(tables, num_rows), layers_function(tables.dtype, tables.dtype)
    hiddens = empty_array((num_rows, tables.joined_size), tables.dtype)
    stored = hiddens if relay is None else as_array(relay)
    ids, ends, ones = np.empty_like(rows.rows), np.empty_like(rows.rows), np.ones_like(rows.rows)
    inputs = Inputs(ids, hiddens, rows.rows, ends, np.arange(num_rows), ones, ones, NO_IDS)
    own = (rows.kv_lens, rows.is_bound, rows.num_drafts, stored)
    shape = (kind.num_skipped, kind.start, int(kind.moves))
    _chain(function.address, tables.words, tables.model, *own, *shape, *inputs, *results)


def draw_drafts(
    hidden: Tensor, rows: Int64s, positions: Int64s, roots: Int64s, tables: Tables
) -> Int64s:
    """Draws a token from the logits of each hidden state, [n, hidden], with the noise of its row
    and position, [n]. roots [n] are the positions of the windows' roots."""
    tokens = np.empty_like(rows)
    _draw(as_array(hidden), rows, positions, roots, tables.model, tokens)
    return tokens


def store_inputs(inputs: Tensor, rows: QueryRows, tables: Tables) -> None:
    """Stores the keys and values that each layer makes of the same inputs [tokens, hidden].

    PERF: the queries of the joined projection are computed and not used.
    """
    own = (rows.rows, rows.lens, rows.starts, rows.query_lens)
    _store(as_array(inputs), *own, tables.model, tables.layers)


def compile_draft_forward(dtype: torch.dtype) -> None:
    table = types.Array(numba_type(dtype), 2, "C")
    models, layers = [types.Array(from_dtype(kind), 1, "C") for kind in (MODEL, LAYER)]
    layers_function(dtype, dtype)
    own = (types.int64, COLUMN, models, *[COLUMN] * 3, table, *[types.int64] * 3)
    compile_ahead(_chain, *own, *types_of(dtype))
    compile_ahead(_draw, table, *[COLUMN] * 3, models, COLUMN)
    compile_ahead(_store, table, *[COLUMN] * 4, models, layers)


@cached_njit(nogil=True)
def _chain(
    function: int, tables: Int64s, models: Records, kv_lens: Int64s, is_bound: Int64s,
    num_drafts: Int64s, relay: Floats, num_skipped: int, start: int, moves: int, ids: Int64s,
    hidden: Floats, rows: Int64s, ends: Int64s, starts: Int64s, query_lens: Int64s,
    num_read: Int64s, slots: Int64s, out: Floats, streams: Floats, wide: Float32s, narrow_: Floats,
    stream: Float32s, meeting: Int64s,
) -> None:  # fmt: skip
    """Writes ids, hidden and ends, [rows], of which each forward reads the first ones."""
    words = scratch((NUM_WORDS,), INT64_LIKE)
    inputs = Inputs(ids, hidden, rows, ends, starts, query_lens, num_read, slots)
    note_layers(words, tables, inputs, Results(out, streams, wide, narrow_, stream, meeting))
    call = array_at(words.ctypes.data, (1,), CALL_LIKE)[0]
    model, num_rows, lens = models[0], rows.shape[0], kv_lens.copy()
    drafts = array_at(model.drafts, (model.table_rows, model.max_drafts), rows)
    last_token = array_at(model.last_token, (model.table_rows,), rows)
    for r in range(num_rows):
        if is_bound[r] != 0:
            lens[r] = array_at(model.seq_len, (model.table_rows,), rows)[rows[r]]
        ids[r] = last_token[rows[r]]
        if model.joined != 0:
            hidden[r] = relay[rows[r]]
    for depth in range(num_drafts[0]):
        num = int(np.count_nonzero(num_drafts > depth))
        source = hidden[:num]
        if depth >= num_skipped:
            for r in range(num):
                ends[r] = lens[r] + start + 1 + depth * moves
            call.num_tokens = call.num_rows = num
            call_at(function, (words.ctypes.data, 0, 1))
            source = out[:num]
        draw_rows(source, rows[:num], lens[:num] + depth + 1, lens[:num], model, ids)
        for r in range(num):
            drafts[rows[r], depth] = ids[r]
        if depth >= num_skipped and model.joined != 0:
            _next_hidden(out[:num], model, hidden)


@njit(nogil=True)
def _next_hidden(out: Floats, model: Any, hidden: Floats) -> None:
    """Writes the hidden states that the next forward reads, [n, joined]."""
    if model.next_hidden.weight == 0:
        hidden[: out.shape[0]] = out
        return
    wide = np.empty((out.shape[0], model.joined), np.float32)
    multiply_by(model.next_hidden, out, wide, 0, 1)
    for r in range(out.shape[0]):
        narrow(wide[r], hidden[r])


@njit(nogil=True)
def draw_rows(
    hidden: Floats, rows: Int64s, positions: Int64s, roots: Int64s, model: Any, tokens: Int64s
) -> None:
    for first in range(0, rows.shape[0], MAX_LOGITS_ROWS):
        logits = logits_of(hidden[first : first + MAX_LOGITS_ROWS], model)
        for i in range(logits.shape[0]):
            tokens[first + i] = draw_draft(
                logits[i], rows[first + i], positions[first + i], roots[first + i], model
            )


@cached_njit(nogil=True)
def _draw(
    hidden: Floats, rows: Int64s, positions: Int64s, roots: Int64s, models: Records, tokens: Int64s
) -> None:
    draw_rows(hidden, rows, positions, roots, models[0], tokens)


@cached_njit(nogil=True)
def _store(
    inputs: Floats, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s,
    models: Records, layers: Records,
) -> None:  # fmt: skip
    model = models[0]
    num_heads = model.heads + 2 * model.kv_heads + model.gates
    heads = np.empty((inputs.shape[0], num_heads, model.head_dim), np.float32)
    flat_heads = heads.reshape((inputs.shape[0], num_heads * model.head_dim))
    for index in range(layers.shape[0]):
        layer = layers[index]
        multiply_by(layer.qkv, inputs, flat_heads, 0, 1)
        like = inputs.reshape(-1)[:0]
        store_keys(
            model, layer, rows, lens, starts, query_lens, heads, inputs, like, 0, len(inputs)
        )
