"""All layers of a decoder in one call, for rows of few tokens, and the draw behind them, by one
thread: a small model's step is else mostly the calls between its products.

Hidden states and all sums are float32; what a product multiplies, and KV, have the model's dtype.
It knows no filter, penalty or mask. Nothing is kept between calls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from numba import from_dtype, njit, types
from torch import Tensor

from aserve_kernels.cpu.bf16 import Float32s, Floats, as_array, narrow, rounded, widen
from aserve_kernels.cpu.draw import draw_row
from aserve_kernels.cpu.exp2 import LOG2_E, power_of_two
from aserve_kernels.cpu.gemm import multiply
from aserve_kernels.cpu.host_rows import Int64s, QueryRows
from aserve_kernels.cpu.memory import array_at
from aserve_kernels.cpu.paged_attention import attend_share
from aserve_kernels.cpu.precompile import FAST, UNCOUNTED, cached_njit, compile_ahead

Int32s: TypeAlias = npt.NDArray[np.int32]
Records: TypeAlias = npt.NDArray[np.void]

SILU, GELU, GELU_TANH = range(3)
GELU_INSIDE = np.float32(math.sqrt(2 / math.pi))
GELU_CUBE = np.float32(0.044715)
DRAWN = 64  # rows whose logits are alive at a time
NOTHING = np.empty(0, np.int64)
WORDS, DOUBLES = np.empty(0, np.int32), np.empty(0, np.float64)  # only their dtypes count

# One record. Sizes, then addresses: of a table of the model's dtype [vocab, hidden], of the float32
# weight [hidden] of the norm before the first layer (no norm: 0), of the packed head and its bias,
# and of the engine's tables: the token pool and its page table; [max_rows + 1] int64 of the last
# token of each row and of the step that drew it; in its row tables, int64 and float64, the columns
# of seeds and of temperatures. A softcap of 0 is none.
MODEL: Any = np.dtype(
    [
        *[(name, np.int64) for name in ("hidden", "inner", "vocab", "max_len")],
        *[(name, np.int64) for name in ("heads", "kv_heads", "head_dim", "rotary_dim")],
        *[(name, np.int64) for name in ("page_size", "table_rows", "table_columns", "activation")],
        *[(name, np.int64) for name in ("embeddings", "first_norm", "head", "head_bias")],
        *[(name, np.int64) for name in ("token_pool", "num_slots", "token_pages")],
        *[(name, np.int64) for name in ("last_token", "written_iter")],
        *[(name, np.int64) for name in ("seeds", "seed_columns")],
        *[(name, np.int64) for name in ("temperatures", "temperature_columns")],
        *[(name, np.float32) for name in ("eps", "residual_scale", "embedding_factor")],
        *[(name, np.float32) for name in ("logit_divisor", "logit_softcap")],
    ],
    align=True,
)

# One record for each layer, of addresses: packed products, float32 biases (zeros for none) and norm
# weights (0 for none), the table of turns [max_len, rotary_dim], this layer's KV, its page table.
LAYER: Any = np.dtype(
    [
        *[(name, np.int64) for name in ("qkv", "out", "gate_up", "down")],
        *[(name, np.int64) for name in ("qkv_bias", "out_bias", "gate_up_bias", "down_bias")],
        *[(name, np.int64) for name in ("head_norms", "after_attention", "before_mlp")],
        *[(name, np.int64) for name in ("after_mlp", "before_next", "cos_sin")],
        *[(name, np.int64) for name in ("keys", "values", "num_slots", "page_table", "window")],
        *[(name, np.float32) for name in ("factor", "cap", "head_eps")],
    ],
    align=True,
)


@dataclass(frozen=True, slots=True)
class Tables:
    """`model` [1] is a MODEL, `layers` are LAYERs; who made them keeps what they point to."""

    model: Records
    layers: Records
    dtype: torch.dtype  # of weights and KV


def decoder_forward(input_ids: Tensor, own: QueryRows, tables: Tables) -> Tensor:
    """input_ids int64 [tokens]; `own` says whose they are, and has every token once. Written are
    the slots of these tokens only. -> hidden states behind the last norm [tokens, hidden].
    """
    out = torch.empty((len(input_ids), int(tables.model["hidden"][0])), dtype=tables.dtype)
    of_rows = (own.rows, own.lens, own.starts, own.query_lens)
    words = np.empty(0, np.int32)
    made = (as_array(out), words)
    _step(input_ids.numpy(), *of_rows, NOTHING, 0, tables.model, tables.layers, *made)
    return out


def decoder_step(
    input_ids: Int64s, own: QueryRows, sampled: Int64s, iteration: int, tables: Tables
) -> Tensor:
    """The same forward of ids of which -row stands for that row's last token, and one draw for each
    of the rows at the places `sampled`. -> int32 [3 n]: tokens, how many each row got (one), and
    whether it could be drawn. Written besides KV: the token pool and what is kept of each row.
    """
    words = torch.empty(3 * len(sampled), dtype=torch.int32)
    given = torch.empty((len(input_ids), int(tables.model["hidden"][0])), dtype=tables.dtype)
    of_rows = (own.rows, own.lens, own.starts, own.query_lens)
    made = (as_array(given), words.numpy())
    _step(input_ids, *of_rows, sampled, iteration, tables.model, tables.layers, *made)
    return words


def compile_decoder_forward(dtype: torch.dtype) -> None:
    """For this dtype."""
    floats = types.uint16 if dtype == torch.bfloat16 else types.float32
    column = types.Array(types.int64, 1, "C")
    records = (types.Array(from_dtype(kind), 1, "C") for kind in (MODEL, LAYER))
    made = (types.Array(floats, 2, "C"), types.Array(types.int32, 1, "C"))
    compile_ahead(_step, *[column] * 6, types.int64, *records, *made)


@cached_njit(nogil=True)
def _step(
    ids: Int64s, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s,
    sampled: Int64s, iteration: int, models: Records, layers: Records,
    out: Floats, words: Int32s,
) -> None:  # fmt: skip
    model = models[0]
    known = _resolve(ids, rows, lens, starts, query_lens, model)
    _forward(known, rows, lens, starts, query_lens, model, layers, out)
    for first in range(0, sampled.shape[0], DRAWN):
        indices = sampled[first : first + DRAWN]
        _draw_rows(
            indices,
            rows,
            lens,
            starts,
            query_lens,
            iteration,
            model,
            out,
            words[first:],
            words.shape[0] // 3,
        )


@njit(inline="always")
def _resolve(
    ids: Int64s, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s, model: Any
) -> Int64s:  # fmt: skip
    """Ids without placeholders, which are also written beside the KV."""
    last_token = array_at(model.last_token, (model.table_rows,), ids)
    pages = array_at(model.token_pages, (model.table_rows, model.table_columns), ids)
    pool = array_at(model.token_pool, (model.num_slots,), WORDS)
    known = np.empty(ids.shape[0], np.int64)
    for r in range(rows.shape[0]):
        for place in range(query_lens[r]):
            token = starts[r] + place
            position = lens[r] - query_lens[r] + place
            known[token] = ids[token] if ids[token] >= 0 else last_token[-ids[token]]
            page = pages[rows[r], position // model.page_size]
            pool[page * model.page_size + position % model.page_size] = known[token]
    return known


@njit(inline="always")
def _draw_rows(
    sampled: Int64s, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s, iteration: int,
    model: Any, hidden: Floats, words: Int32s, stride: int,
) -> None:  # fmt: skip
    num = sampled.shape[0]
    last = np.empty((num, model.hidden), hidden.dtype)
    for i in range(num):
        token = starts[sampled[i]] + query_lens[sampled[i]] - 1
        for d in range(model.hidden):
            last[i, d] = hidden[token, d]
    logits = np.empty((num, model.vocab), np.float32)
    _multiply(last, model.head, model.head_bias, logits)
    _cap(logits.reshape(-1), hidden, model.logit_divisor, model.logit_softcap)
    row_shape = (model.table_rows,)
    seeds = array_at(model.seeds, (model.table_rows, model.seed_columns), rows)
    scales = array_at(model.temperatures, (model.table_rows, model.temperature_columns), DOUBLES)
    last_token = array_at(model.last_token, row_shape, rows)
    written_iter = array_at(model.written_iter, row_shape, rows)
    for i in range(num):
        row = rows[sampled[i]]
        temperature = np.float32(scales[row, 0])
        token, is_valid = draw_row(logits[i], seeds[row, 0], lens[sampled[i]], temperature)
        words[i], words[stride + i], words[2 * stride + i] = token, 1, is_valid
        last_token[row], written_iter[row] = token, iteration


@njit(nogil=True)
def _cap(logits: Float32s, like: Floats, divisor: np.float32, cap: np.float32) -> None:
    """Rounded where the model itself rounds, so that both draw alike."""
    for i in range(logits.shape[0]):
        logits[i] = rounded(logits[i], like)
    if divisor != np.float32(1):
        for i in range(logits.shape[0]):
            logits[i] /= divisor
    if cap > 0:
        for i in range(logits.shape[0]):
            logits[i] = cap * np.float32(math.tanh(logits[i] / cap))


@njit(inline="always")
def _forward(
    ids: Int64s, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s,
    model: Any, layers: Records, out: Floats,
) -> None:  # fmt: skip
    num_tokens = ids.shape[0]
    # Room for every layer. `given` is what the next product reads, and in the end the result.
    given, hidden = out, np.empty((num_tokens, model.hidden), np.float32)
    attended = np.empty((num_tokens, model.heads, model.head_dim), out.dtype)
    gated = np.empty((num_tokens, model.inner), out.dtype)
    num_heads = model.heads + 2 * model.kv_heads
    heads = np.empty((num_tokens, num_heads, model.head_dim), np.float32)
    joined = np.empty((num_tokens, 2 * model.inner), np.float32)
    added = np.empty((num_tokens, model.hidden), np.float32)
    _embed(ids, model, hidden, added[0], given)
    for index in range(layers.shape[0]):
        layer = layers[index]
        flat_heads = heads.reshape((num_tokens, num_heads * model.head_dim))
        _multiply(given, layer.qkv, layer.qkv_bias, flat_heads)
        _attend(model, layer, rows, lens, starts, query_lens, heads, attended)
        flat = attended.reshape((num_tokens, model.heads * model.head_dim))
        _multiply(flat, layer.out, layer.out_bias, added)
        _add(model, added, layer.after_attention, layer.before_mlp, hidden, given)
        _multiply(given, layer.gate_up, layer.gate_up_bias, joined)
        _gate(joined, model.activation, gated)
        _multiply(gated, layer.down, layer.down_bias, added)
        _add(model, added, layer.after_mlp, layer.before_next, hidden, given)


@njit(nogil=True)
def _embed(ids: Int64s, model: Any, hidden: Float32s, room: Float32s, given: Floats) -> None:
    table = array_at(model.embeddings, (model.vocab, model.hidden), given)
    for token in range(ids.shape[0]):
        widen(table[ids[token]], hidden[token])
        for i in range(model.hidden):
            hidden[token, i] *= model.embedding_factor
        _norm_into(hidden[token], model.first_norm, model.eps, room, given[token])


@njit(nogil=True)
def _multiply(x: Floats, packed: int, bias: int, out: Float32s) -> None:
    num_out = out.shape[1]
    size = -(-num_out // 32) * 32 * x.shape[1]
    multiply(x, array_at(packed, (size,), x), array_at(bias, (num_out,), out), out)


@njit(inline="always")
def _attend(
    model: Any, layer: Any, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s,
    heads: Float32s, attended: Floats,
) -> None:  # fmt: skip
    """heads [tokens, q + k + v, head_dim] are turned in place; k and v go where they belong."""
    kv_shape = (layer.num_slots, model.kv_heads, model.head_dim)
    keys = array_at(layer.keys, kv_shape, attended)
    values = array_at(layer.values, kv_shape, attended)
    table = array_at(layer.page_table, (model.table_rows, model.table_columns), rows)
    cos_sin = array_at(layer.cos_sin, (model.max_len, model.rotary_dim), attended)
    num_turned = model.heads + model.kv_heads
    norms = array_at(layer.head_norms, (num_turned, model.head_dim), heads)
    rope = np.empty(model.rotary_dim, np.float32)
    for r in range(rows.shape[0]):
        _turn_and_store(
            heads[starts[r] : starts[r] + query_lens[r]], keys, values, table[rows[r]],
            lens[r] - query_lens[r], model, layer, cos_sin, norms, rope,
        )  # fmt: skip
    attend_share(
        heads[:, : model.heads], keys, values, attended, table, rows, lens, starts, query_lens,
        model.page_size, layer.window, layer.factor, layer.cap, 0, 1,
    )  # fmt: skip


@njit(nogil=True, **UNCOUNTED)
def _turn_and_store(
    heads: Float32s, keys: Floats, values: Floats, pages: Int64s, position: int,
    model: Any, layer: Any, cos_sin: Floats, norms: Float32s, rope: Float32s,
) -> None:  # fmt: skip
    """Of one row's tokens, from `position` on. Room: `turn` [rotary_dim]."""
    num_turned = norms.shape[0]
    for token in range(heads.shape[0]):
        place = position + token
        of_token = heads[token]
        widen(cos_sin[place], rope)
        for head in range(num_turned):
            if layer.head_norms != 0:
                _norm(of_token[head], norms[head], layer.head_eps, of_token[head])
            _rope_head(of_token[head], rope)
        slot = pages[place // model.page_size] * model.page_size + place % model.page_size
        narrow(of_token[model.heads : num_turned].reshape(-1), keys[slot].reshape(-1))
        narrow(of_token[num_turned:].reshape(-1), values[slot].reshape(-1))


@njit(nogil=True, fastmath=FAST, **UNCOUNTED)
def _rope_head(x: Float32s, rope: Float32s) -> None:
    half = rope.shape[0] // 2
    left, right = x[:half], x[half : 2 * half]
    for i in range(half):
        a, b = left[i], right[i]
        left[i] = a * rope[i] - b * rope[half + i]
        right[i] = b * rope[i] + a * rope[half + i]


@njit(nogil=True)
def _add(
    model: Any, added: Float32s, norm_of_added: int, norm: int, hidden: Float32s, given: Floats
) -> None:
    """hidden += scale * added, which may be normed first; `given` is the norm of the sum."""
    for token in range(hidden.shape[0]):
        x, more = hidden[token], added[token]
        if norm_of_added != 0:
            _norm(more, array_at(norm_of_added, more.shape, more), model.eps, more)
        for i in range(x.shape[0]):
            x[i] += model.residual_scale * more[i]
        _norm_into(x, norm, model.eps, more, given[token])


@njit(nogil=True, fastmath=FAST, **UNCOUNTED)
def _norm(x: Float32s, weight: Float32s, eps: np.float32, out: Float32s) -> None:
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    scale = np.float32(1) / np.float32(math.sqrt(total / np.float32(x.shape[0]) + eps))
    for i in range(x.shape[0]):
        out[i] = x[i] * scale * weight[i]


@njit(nogil=True)
def _norm_into(x: Float32s, norm: int, eps: np.float32, room: Float32s, out: Floats) -> None:
    if norm == 0:
        narrow(x, out)
        return
    _norm(x, array_at(norm, x.shape, x), eps, room)
    narrow(room, out)


# `numpy`: division checks for no zero, which would keep the loops from being vectorised.
@njit(nogil=True, fastmath=FAST, error_model="numpy", **UNCOUNTED)
def _gate(joined: Float32s, activation: int, gated: Floats) -> None:
    """gated = activation(gate) * up."""
    size = np.uint64(gated.shape[1])  # PERF: unsigned: see turn_and_store
    for token in range(joined.shape[0]):
        row = joined[token]
        if activation == SILU:
            for i in range(size):
                row[i] *= row[size + i] * _sigmoid(row[i])
        elif activation == GELU_TANH:
            for i in range(size):
                x = row[i]
                # (1 + tanh(y)) / 2 is the sigmoid of 2 y.
                inside = GELU_INSIDE * (x + GELU_CUBE * x * x * x)
                row[i] = x * row[size + i] * _sigmoid(np.float32(2) * inside)
        else:
            for i in range(size):
                x = row[i]
                part = np.float32(math.erf(x * np.float32(math.sqrt(0.5))))
                row[i] = np.float32(0.5) * x * (np.float32(1) + part) * row[size + i]
        narrow(row[:size], gated[token])


@njit(inline="always")
def _sigmoid(x: np.float32) -> np.float32:
    power = power_of_two(-abs(x) * np.float32(LOG2_E))
    part = np.float32(1) / (np.float32(1) + power)
    return part if x >= 0 else power * part
