"""The layers of a decoder as one function of C, which forwards, steps and chains of drafts call.

There is one for each dtype of a model and of its KV, so those that call it know neither attention
nor KV, and teams of any size share it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit, types

from aserve_kernels.cpu.bf16 import Float32s, Floats, empty_array, numba_type
from aserve_kernels.cpu.callback import Callback, compile_callback
from aserve_kernels.cpu.decoder_layers import (
    LAYER,
    LORA,
    MODEL,
    NO_IDS,
    TABLES,
    WORD_BYTES,
    Inputs,
    Tables,
    buffers_in,
    run_layers,
)
from aserve_kernels.cpu.host_rows import Int64s
from aserve_kernels.cpu.memory import FLOAT32_LIKE, INT64_LIKE, array_at
from aserve_kernels.cpu.team import MEETING_LEN, Team

# The arguments of `run_layers`: the words of a Tables, lengths, and the addresses of the arrays of
# its Inputs and of its Results. A residual stream at 0 is a buffer.
CALL: Any = np.dtype(
    [
        ("tables", TABLES),
        *[(name, np.int64) for name in ("num_tokens", "num_rows", "num_wide", "num_narrow")],
        *[(name, np.int64) for name in ("ids", "hiddens", "rows", "lens", "starts", "query_lens")],
        *[(name, np.int64) for name in ("num_read", "slots")],
        *[(name, np.int64) for name in ("out", "streams", "wide", "narrow", "stream", "meeting")],
    ]
)
NUM_WORDS = CALL.itemsize // WORD_BYTES
NUM_ARGUMENTS = 3  # the address of the record, the worker and the number of workers
CALL_LIKE, MODEL_LIKE = np.empty(0, CALL), np.empty(0, MODEL)
LAYER_LIKE, LORA_LIKE = np.empty(0, LAYER), np.empty(0, LORA)
NO_STREAM = np.empty((0, 0), np.float32)


class Results(NamedTuple):
    """Holds what the layers write, and their buffers, until they return."""

    out: Floats  # [tokens, hidden]
    streams: Floats  # [captured, tokens, hidden]
    wide: Float32s
    narrow: Floats
    stream: Float32s  # [tokens, hidden], the residual stream before and after; none: a buffer
    meeting: Int64s  # none for a team of one


def empty_results(
    tables: Tables, num_tokens: int, *, stream: Float32s = NO_STREAM, meeting: Int64s = NO_IDS
) -> Results:
    shape = (num_tokens, tables.hidden_size)
    return Results(
        empty_array(shape, tables.dtype),
        empty_array((len(tables.captured), *shape), tables.dtype),
        np.empty(num_tokens * tables.num_wide, np.float32),
        empty_array((num_tokens * tables.num_narrow,), tables.dtype),
        stream,
        meeting,
    )


COLUMN = types.Array(types.int64, 1, "C")


def types_of(dtype: torch.dtype) -> tuple[types.Type, ...]:
    """Returns the types of the arrays of Inputs and of Results of a model of this dtype."""
    row, table, streams = (types.Array(numba_type(dtype), size, "C") for size in (1, 2, 3))
    wide, stream = (types.Array(types.float32, size, "C") for size in (1, 2))
    return (COLUMN, table, *[COLUMN] * 6, table, streams, wide, row, stream, COLUMN)


@njit(nogil=True)
def note_layers(words: Int64s, tables: Int64s, inputs: Inputs, results: Results) -> None:
    """Writes a CALL into the first words.

    NOTE: numba frees an array that a function made after the last line there that names it. What a
    function was given lives as long as the function runs.
    """
    words[: tables.shape[0]] = tables
    call = array_at(words.ctypes.data, (1,), CALL_LIKE)[0]
    call.num_tokens, call.num_rows = inputs.ids.shape[0], inputs.rows.shape[0]
    call.num_wide, call.num_narrow = results.wide.shape[0], results.narrow.shape[0]
    call.ids, call.hiddens = inputs.ids.ctypes.data, inputs.hiddens.ctypes.data
    call.rows, call.lens = inputs.rows.ctypes.data, inputs.lens.ctypes.data
    call.starts, call.query_lens = inputs.starts.ctypes.data, inputs.query_lens.ctypes.data
    call.num_read, call.slots = inputs.num_read.ctypes.data, inputs.slots.ctypes.data
    call.out, call.streams = results.out.ctypes.data, results.streams.ctypes.data
    call.wide, call.narrow = results.wide.ctypes.data, results.narrow.ctypes.data
    call.stream = results.stream.ctypes.data if results.stream.size > 0 else 0
    call.meeting = results.meeting.ctypes.data


@njit(nogil=True)
def inputs_of(call: Any, num_joined: int, like: Floats) -> Inputs:
    """Returns the Inputs of a record CALL, whose model has the dtype of `like`."""
    num_tokens, num_rows = call.num_tokens, call.num_rows
    return Inputs(
        array_at(call.ids, (num_tokens,), INT64_LIKE),
        array_at(call.hiddens, (num_tokens, num_joined), like),
        array_at(call.rows, (num_rows,), INT64_LIKE),
        array_at(call.lens, (num_rows,), INT64_LIKE),
        array_at(call.starts, (num_rows,), INT64_LIKE),
        array_at(call.query_lens, (num_rows,), INT64_LIKE),
        array_at(call.num_read, (num_rows,), INT64_LIKE),
        array_at(call.slots, (num_tokens if call.tables.num_loras != 0 else 0,), INT64_LIKE),
    )


@njit(inline="always")
def mixer_buffers_of(call: Any, hidden_size: int) -> tuple[int, int]:
    """Returns the addresses of Buffers.mixed and attended, which nothing needs while an MLP is
    computed. They are where `buffers_in` has them."""
    skipped = 2 * call.num_tokens * hidden_size
    return call.wide + skipped * FLOAT32_LIKE.itemsize, call.narrow


@cache
def layers_function(dtype: torch.dtype, kv_dtype: torch.dtype) -> Callback:
    """Returns `run_layers` of a model of this dtype with KV of `kv_dtype`. Its arguments are the
    address of a record CALL, a worker and the number of workers."""
    like, kv_like = empty_array((0,), dtype), empty_array((0,), kv_dtype)

    def run_layers_at(address: int, worker: int, num_workers: int) -> None:
        call = array_at(address, (1,), CALL_LIKE)[0]
        tables = call.tables
        model = array_at(tables.model, (1,), MODEL_LIKE)[0]
        shape = (call.num_tokens, model.hidden)
        buffers = buffers_in(
            array_at(call.wide, (call.num_wide,), FLOAT32_LIKE),
            array_at(call.narrow, (call.num_narrow,), like),
            array_at(call.stream if call.stream != 0 else call.wide, shape, FLOAT32_LIKE),
            model,
            array_at(call.narrow, (0,), kv_like),
        )
        run_layers(
            inputs_of(call, model.joined, like),
            model,
            array_at(tables.layers, (tables.num_layers,), LAYER_LIKE),
            array_at(tables.loras, (tables.num_loras,), LORA_LIKE),
            array_at(tables.captured, (tables.num_captured,), INT64_LIKE),
            array_at(call.out, shape, like),
            array_at(call.streams, (tables.num_captured, *shape), like),
            buffers,
            address,
            Team(worker, num_workers, array_at(call.meeting, (MEETING_LEN,), INT64_LIKE)),
        )

    return compile_callback(run_layers_at, NUM_ARGUMENTS)
