"""A forward, or a whole step, of a decoder as one compiled call, by one thread or a team."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numba import types
from torch import Tensor

from aserve_kernels.cpu.bf16 import (
    Float32s,
    Floats,
    as_array,
    as_tensor,
    empty_array,
    numba_type,
)
from aserve_kernels.cpu.decoder_layers import MAX_LOGITS_ROWS, Inputs, Tables
from aserve_kernels.cpu.host_rows import Int64s, QueryRows
from aserve_kernels.cpu.layers_function import (
    COLUMN,
    NO_STREAM,
    NUM_WORDS,
    Results,
    empty_results,
    layers_function,
    note_layers,
    types_of,
)
from aserve_kernels.cpu.memory import INT64_LIKE, scratch
from aserve_kernels.cpu.precompile import cached_njit, compile_ahead
from aserve_kernels.cpu.step_function import (
    NUM_STEP_WORDS,
    Int32s,
    Step,
    note_step,
    step_function,
)
from aserve_kernels.cpu.team import new_meeting, run_shares


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
    `num_workers` threads share the work, of a draft model only one.
    """
    residual = NO_STREAM if stream is None else stream.numpy()
    results = empty_results(tables, len(input_ids), stream=residual, meeting=new_meeting())
    hiddens = results.out[:0] if hidden is None else as_array(hidden)
    own = (rows.rows, rows.lens, rows.starts, rows.query_lens, rows.query_lens)
    inputs = Inputs(input_ids, hiddens, *own, slots)
    function = layers_function(tables.dtype, tables.kv_dtype).address
    _forward(function, num_workers, tables.words, *inputs, *results)
    return as_tensor(results.out, tables.dtype), as_tensor(results.streams, tables.dtype)


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
    words, counts = np.zeros(num_words, np.int32), np.zeros_like(kv_lens)
    token_ids, exact_lens = np.empty_like(input_ids), np.empty_like(kv_lens)
    lens, starts = np.empty_like(kv_lens), np.empty_like(kv_lens)
    results = empty_results(tables, len(input_ids), meeting=new_meeting())
    own = (rows.rows, lens, starts, rows.query_lens, rows.num_read, rows.slots)
    inputs = Inputs(token_ids, results.out[:0], *own)
    num_logits = min(MAX_LOGITS_ROWS, rows.num_logits)
    gathered = empty_array((num_logits, tables.hidden_size), tables.dtype)
    logits = np.empty((num_logits, tables.vocab_size), np.float32)
    known = (input_ids, kv_lens, rows.is_bound, exact_lens, rows.num_drafts, rows.is_sampled)
    step = Step(*known, counts, words, gathered, logits)
    layers = layers_function(tables.dtype, tables.kv_dtype).address
    functions = (step_function(tables.dtype).address, layers)
    numbers = (iteration, int(is_block), num_workers)
    _step(*functions, *numbers, tables.words, *inputs, *results, *step)
    return StepOutputs(words, counts, token_ids, exact_lens, results.out, results.streams)


def compile_decoder_layers(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    layers_function(dtype, kv_dtype)


def compile_decoder_forward(dtype: torch.dtype) -> None:
    """Compiles what calls the layers, for teams of any size."""
    step_function(dtype)
    words, logits = types.Array(types.int32, 1, "C"), types.Array(types.float32, 2, "C")
    step = (*[COLUMN] * 7, words, types.Array(numba_type(dtype), 2, "C"), logits)
    compile_ahead(_forward, *[types.int64] * 2, COLUMN, *types_of(dtype))
    compile_ahead(_step, *[types.int64] * 5, COLUMN, *types_of(dtype), *step)


@cached_njit(nogil=True)
def _forward(
    function: int, num_workers: int, tables: Int64s, ids: Int64s, hiddens: Floats, rows: Int64s,
    lens: Int64s, starts: Int64s, query_lens: Int64s, num_read: Int64s, slots: Int64s, out: Floats,
    streams: Floats, wide: Float32s, narrow: Floats, stream: Float32s, meeting: Int64s,
) -> None:  # fmt: skip
    """PERF: numba takes 75 ns for each array that it gets, but some us for a tuple of arrays, and
    for an array of records."""
    words = scratch((NUM_WORDS,), INT64_LIKE)
    inputs = Inputs(ids, hiddens, rows, lens, starts, query_lens, num_read, slots)
    note_layers(words, tables, inputs, Results(out, streams, wide, narrow, stream, meeting))
    run_shares(function, words.ctypes.data, num_workers)


@cached_njit(nogil=True)
def _step(
    function: int, layers: int, iteration: int, is_block: int, num_workers: int, tables: Int64s,
    token_ids: Int64s, hiddens: Floats, rows: Int64s, lens: Int64s, starts: Int64s,
    query_lens: Int64s, num_read: Int64s, slots: Int64s, out: Floats, streams: Floats,
    wide: Float32s, narrow: Floats, stream: Float32s, meeting: Int64s, ids: Int64s,
    kv_lens: Int64s, is_bound: Int64s, exact_lens: Int64s, num_drafts: Int64s, is_sampled: Int64s,
    counts: Int64s, output_words: Int32s, gathered: Floats, logits: Float32s,
) -> None:  # fmt: skip
    words = scratch((NUM_STEP_WORDS,), INT64_LIKE)
    inputs = Inputs(token_ids, hiddens, rows, lens, starts, query_lens, num_read, slots)
    step = Step(
        ids, kv_lens, is_bound, exact_lens, num_drafts, is_sampled, counts, output_words, gathered,
        logits,
    )  # fmt: skip
    note_layers(words, tables, inputs, Results(out, streams, wide, narrow, stream, meeting))
    note_step(words, step, layers, iteration, is_block)
    run_shares(function, words.ctypes.data, num_workers)
