"""The parts of drafting that are one compiled call each: a chain of drafts, draws from the logits
of hidden states, and the storing of keys and values without attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import njit, types
from torch import Tensor

from aserve_kernels.cpu.bf16 import Floats, as_array, narrow, numba_type
from aserve_kernels.cpu.decoder_forward import COLUMN, RECORDS
from aserve_kernels.cpu.decoder_layers import (
    MAX_LOGITS_ROWS,
    NO_IDS,
    Records,
    Tables,
    logits_of,
    num_narrow,
    num_wide,
    store_keys,
)
from aserve_kernels.cpu.host_rows import Int64s, QueryRows
from aserve_kernels.cpu.layers_function import call_layers, layers_function
from aserve_kernels.cpu.memory import array_at
from aserve_kernels.cpu.precompile import cached_njit, compile_ahead
from aserve_kernels.cpu.product import multiply_by
from aserve_kernels.cpu.rejection import draw_draft
from aserve_kernels.cpu.team import Team
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
    hidden = torch.empty((0, 0), dtype=tables.dtype) if relay is None else relay
    own = (rows.rows, rows.kv_lens, rows.is_bound, rows.num_drafts, as_array(hidden))
    shape = (kind.num_skipped, kind.start, int(kind.moves))
    function = layers_function(tables.dtype, tables.dtype).address
    _chain(function, *own, *shape, tables.model, tables.layers, tables.loras)


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
    models, layers, loras = RECORDS
    layers_function(dtype, dtype)
    own = (types.int64, *[COLUMN] * 4, table)
    compile_ahead(_chain, *own, *[types.int64] * 3, models, layers, loras)
    compile_ahead(_draw, table, *[COLUMN] * 3, models, COLUMN)
    compile_ahead(_store, table, *[COLUMN] * 4, models, layers)


@cached_njit(nogil=True)
def _chain(
    function: int, rows: Int64s, kv_lens: Int64s, is_bound: Int64s, num_drafts: Int64s,
    relay: Floats, num_skipped: int, start: int, moves: int,
    models: Records, layers: Records, loras: Records,
) -> None:  # fmt: skip
    model, num_rows = models[0], rows.shape[0]
    drafts = array_at(model.drafts, (model.table_rows, model.max_drafts), rows)
    last_token = array_at(model.last_token, (model.table_rows,), rows)
    lens, ids, ones = kv_lens.copy(), np.empty_like(rows), np.ones_like(rows)
    starts, ends = np.arange(num_rows), np.empty_like(rows)
    hidden = np.empty((num_rows, model.joined), relay.dtype)
    out = np.empty((num_rows, model.hidden), relay.dtype)
    no_streams = np.empty((0, 0, 0), relay.dtype)
    wide = np.empty(num_wide(num_rows, model), np.float32)
    narrow_ = np.empty(num_narrow(num_rows, model), relay.dtype)
    team = Team(0, 1, NO_IDS)  # of one worker, who meets nobody
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
            call_layers(
                function, ids[:num], hidden[:num], rows[:num], ends[:num], starts[:num], ones[:num],
                ones[:num], NO_IDS, models, layers, loras, NO_IDS, out[:num], no_streams, wide,
                narrow_, team,
            )  # fmt: skip
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
    num_heads = model.heads + 2 * model.kv_heads
    heads = np.empty((inputs.shape[0], num_heads, model.head_dim), np.float32)
    flat_heads = heads.reshape((inputs.shape[0], num_heads * model.head_dim))
    for index in range(layers.shape[0]):
        layer = layers[index]
        multiply_by(layer.qkv, inputs, flat_heads, 0, 1)
        like = inputs.reshape(-1)[:0]
        store_keys(
            model, layer, rows, lens, starts, query_lens, heads, inputs, like, 0, len(inputs)
        )
