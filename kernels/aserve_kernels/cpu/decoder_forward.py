"""A whole decoder forward, and optionally the sampling after it, in one compiled call and thread.
A chain of drafts is several of them in one call.

WHY: with a small model and few tokens, most of a step on the CPU is the overhead of the calls
between the matrix products. Per layer, with pre-norm residuals:

    h = h + residual_scale * out(attention(rope(norm(qkv(norm(h))))))
    h = h + residual_scale * down(activation(gate(norm(h))) * up(norm(h)))

Norms behind attention and MLP are supported too. Hidden states and sums are float32; the operands
of the matrix products, and the KV cache, have the model's dtype. Sampling is greedy or Gumbel-max,
without filters, penalties or masks.

A step draws a token at each node of a row's window, which is its last known token and the drafts
after it. The drafts that equal the tokens drawn before them are accepted, so the row gets 1 to
1 + num_drafts tokens. A row without drafts is a window of one token.
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
from aserve_kernels.cpu.host_rows import Int64s
from aserve_kernels.cpu.lora import add_to_wide
from aserve_kernels.cpu.memory import array_at
from aserve_kernels.cpu.paged_attention import attend_share
from aserve_kernels.cpu.precompile import FASTMATH, NO_REFCOUNT, cached_njit, compile_ahead

Int32s: TypeAlias = npt.NDArray[np.int32]
Records: TypeAlias = npt.NDArray[np.void]

SILU, GELU, GELU_TANH = range(3)
GELU_SCALE = np.float32(math.sqrt(2 / math.pi))
GELU_CUBE = np.float32(0.044715)
MAX_LOGITS_ROWS = 64  # rows whose logits are in memory at a time
NO_ROWS = np.empty(0, np.int64)
# For `array_at`, which takes their dtypes.
INT32_LIKE, FLOAT64_LIKE = np.empty(0, np.int32), np.empty(0, np.float64)

# The record of a model: sizes, then addresses. The embeddings [vocab, hidden] in the model's dtype;
# the float32 weight [hidden] of the norm before the first layer (0 for none); the packed LM head
# and its bias; the engine's token pool and its page table; the relay's last token of each row, the
# step that wrote it, and the published KV length (0 in modes that publish none), [max_rows + 1]
# int64; the relay's drafts [max_rows + 1, max_drafts] int64 (0 for none); the columns of seeds
# (int64) and temperatures (float64) in the parameter tables. A softcap of 0 is none.
MODEL: Any = np.dtype(
    [
        *[(name, np.int64) for name in ("hidden", "inner", "vocab", "max_len")],
        *[(name, np.int64) for name in ("heads", "kv_heads", "head_dim", "rotary_dim")],
        *[(name, np.int64) for name in ("page_size", "table_rows", "table_columns", "activation")],
        *[(name, np.int64) for name in ("embeddings", "first_norm", "head", "head_bias")],
        *[(name, np.int64) for name in ("token_pool", "num_slots", "token_pages")],
        *[(name, np.int64) for name in ("last_token", "written_iter", "seq_len")],
        *[(name, np.int64) for name in ("drafts", "max_drafts")],
        *[(name, np.int64) for name in ("seeds", "seed_columns")],
        *[(name, np.int64) for name in ("temperatures", "temperature_columns")],
        *[(name, np.float32) for name in ("eps", "residual_scale", "embedding_factor")],
        *[(name, np.float32) for name in ("logit_divisor", "logit_softcap")],
    ],
    align=True,
)

# The record of a layer, of addresses: packed weights; float32 biases (zeros for none) and norm
# weights (0 for none); the cos/sin table [max_len, rotary_dim]; the layer's KV and page table.
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

# The record of a linear layer's adapters: sizes, then the addresses of a LoraStack's arrays.
LORA: Any = np.dtype(
    [
        *[(name, np.int64) for name in ("slots", "parts", "rank")],
        *[(name, np.int64) for name in ("a", "b", "ranks", "bounds")],
    ],
    align=True,
)
LORA_LAYERS = ("qkv", "out", "gate_up", "down")  # the order of a layer's records
NO_LORAS = np.empty(0, LORA)


@dataclass(frozen=True, slots=True)
class Tables:
    """The caller keeps the memory alive that the records point to."""

    model: Records  # [1] MODEL
    layers: Records  # [layers] LAYER
    dtype: torch.dtype  # of weights and KV
    loras: Records  # [layers * 4] LORA, or none if no token has an adapter


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step as the host knows them, int64 [rows] each."""

    rows: Int64s
    kv_lens: Int64s  # KV lengths before the step
    is_bound: Int64s  # 1 where kv_lens is an upper bound, and the relay has the length
    query_lens: Int64s
    num_drafts: Int64s  # the last tokens of the row, which the relay has
    is_sampled: Int64s  # 0 for a chunk that is not the prompt's last


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """The results of a step, beside what it writes to the pools and the relay."""

    words: Tensor  # int32: tokens [samples, width], counts [samples], is_valid [logits]
    counts: Int64s  # [rows], the tokens that each row gets
    token_ids: Int64s  # [tokens], without placeholders
    kv_lens: Int64s  # [rows], exact KV lengths before the step
    hidden: Tensor  # [tokens, hidden] after the final norm, in the model's dtype


def decoder_forward(input_ids: Int64s, rows: StepRows, slots: Int64s, tables: Tables) -> Tensor:
    """Returns the hidden states after the final norm [tokens, hidden], in the model's dtype.

    input_ids [tokens], row after row; slots [tokens] are those of adapters. Writes the tokens' KV
    slots, and their ids to the token pool. No row is sampled.
    """
    outputs = _empty_outputs(rows, len(input_ids), tables, num_words=0)
    _run(input_ids, rows, slots, 0, tables, outputs)
    return outputs.hidden


def decoder_step(
    input_ids: Int64s, rows: StepRows, slots: Int64s, iteration: int, tables: Tables
) -> StepOutputs:
    """Runs the forward, draws tokens for the sampled rows, and accepts drafts.

    An id of -r stands for the last token of row r. Also writes the relay: each sampled row's last
    token, and the iteration that wrote it; and every row's KV length after the step, in a mode that
    publishes it.
    """
    windows = (1 + rows.num_drafts) * rows.is_sampled
    num_samples, width = int(rows.is_sampled.sum()), int(windows.max(initial=1))
    num_words = num_samples * (width + 1) + int(windows.sum())
    outputs = _empty_outputs(rows, len(input_ids), tables, num_words=num_words)
    _run(input_ids, rows, slots, iteration, tables, outputs)
    return outputs


def draft_chain(rows: StepRows, slots: Int64s, tables: Tables) -> None:
    """Draws num_drafts tokens for each row, one forward after the other, and writes them to the
    relay. The first forward takes the row's last token. Query lengths are 1, no row is sampled, and
    num_drafts do not rise from row to row. The last draft of a row gets no KV.
    """
    outputs = _empty_outputs(rows, len(rows.rows), tables, num_words=0)
    _run(-rows.rows, rows, slots, 0, tables, outputs, num_chained=int(rows.num_drafts.max()))


def _empty_outputs(
    rows: StepRows, num_tokens: int, tables: Tables, *, num_words: int
) -> StepOutputs:
    return StepOutputs(
        torch.zeros(num_words, dtype=torch.int32),
        np.zeros_like(rows.rows),
        np.empty(num_tokens, np.int64),
        np.empty_like(rows.rows),
        torch.empty((num_tokens, int(tables.model["hidden"][0])), dtype=tables.dtype),
    )


def _run(
    ids: Int64s,
    rows: StepRows,
    slots: Int64s,
    iteration: int,
    tables: Tables,
    outputs: StepOutputs,
    num_chained: int = 0,
) -> None:
    known = (rows.rows, rows.kv_lens, rows.is_bound, rows.query_lens, rows.num_drafts)
    records = (tables.model, tables.layers, tables.loras)
    written = (outputs.counts, outputs.token_ids, outputs.kv_lens, as_array(outputs.hidden))
    numbers = (iteration, num_chained)
    words = outputs.words.numpy()
    _step(ids, *known, rows.is_sampled, slots, *numbers, *records, *written, words)


def compile_decoder_forward(dtype: torch.dtype) -> None:
    floats = types.uint16 if dtype == torch.bfloat16 else types.float32
    column = types.Array(types.int64, 1, "C")
    records = (types.Array(from_dtype(kind), 1, "C") for kind in (MODEL, LAYER, LORA))
    outputs = (*[column] * 3, types.Array(floats, 2, "C"), types.Array(types.int32, 1, "C"))
    compile_ahead(_step, *[column] * 8, types.int64, types.int64, *records, *outputs)


@cached_njit(nogil=True)
def _step(
    ids: Int64s, rows: Int64s, kv_lens: Int64s, is_bound: Int64s, query_lens: Int64s,
    num_drafts: Int64s, is_sampled: Int64s, slots: Int64s, iteration: int, num_chained: int,
    models: Records, layers: Records, loras: Records,
    counts: Int64s, token_ids: Int64s, exact_lens: Int64s, out: Floats, words: Int32s,
) -> None:  # fmt: skip
    """num_chained: the forwards of a chain of drafts; 0 for a forward or a step of the model."""
    model = models[0]
    starts, lens = np.empty_like(rows), np.empty_like(rows)
    _resolve_lens(rows, kv_lens, is_bound, query_lens, model, exact_lens, starts, lens)
    num_from_relay = num_drafts if num_chained == 0 else np.zeros_like(rows)
    _resolve(ids, rows, lens, starts, query_lens, num_from_relay, model, token_ids)
    num_rows, num_tokens = rows.shape[0], ids.shape[0]
    for depth in range(max(1, num_chained)):
        if num_chained > 0:
            num_rows = num_tokens = int(np.count_nonzero(num_drafts > depth))
        _forward(
            token_ids[:num_tokens], rows[:num_rows], lens[:num_rows], starts[:num_rows],
            query_lens[:num_rows], slots[:num_tokens], model, layers, loras, out[:num_tokens],
        )  # fmt: skip
        if num_chained > 0:
            _draw_drafts(rows[:num_rows], lens, depth, model, out[:num_tokens], token_ids)
    if words.shape[0] > 0:
        _accept(
            rows, exact_lens, starts, query_lens, num_drafts, is_sampled, iteration, model,
            token_ids, out, counts, words,
        )  # fmt: skip
    if model.seq_len != 0 and num_chained == 0:
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


@njit(inline="always")
def _draw_drafts(
    rows: Int64s, lens: Int64s, depth: int, model: Any, hidden: Floats, token_ids: Int64s
) -> None:
    """Draws the draft after each row's token, with the noise of its position. It becomes the token
    of the next forward."""
    drafts = array_at(model.drafts, (model.table_rows, model.max_drafts), rows)
    for first in range(0, rows.shape[0], MAX_LOGITS_ROWS):
        logits = _logits(hidden[first : first + MAX_LOGITS_ROWS], model)
        for i in range(logits.shape[0]):
            r = first + i
            token, _ = _draw(logits[i], rows[r], lens[r], model)
            drafts[rows[r], depth] = token_ids[r] = token
            lens[r] += 1


@njit(inline="always")
def _accept(
    rows: Int64s, kv_lens: Int64s, starts: Int64s, query_lens: Int64s, num_drafts: Int64s,
    is_sampled: Int64s, iteration: int, model: Any, token_ids: Int64s, hidden: Floats,
    counts: Int64s, words: Int32s,
) -> None:  # fmt: skip
    """Draws the tokens of each window in order, up to the first that differs from the draft after
    it. Nodes after that are not drawn, and count as valid."""
    sampled = np.flatnonzero(is_sampled)
    width = 1
    for r in sampled:
        width = max(width, 1 + num_drafts[r])
    num_samples = sampled.shape[0]
    num_tokens = num_samples * width
    is_valid = words[num_tokens + num_samples :]
    is_valid[:] = 1
    # Of each logits row: its index in `sampled`, and its place in the window.
    samples, places = np.empty_like(is_valid), np.empty_like(is_valid)
    logits_row = 0
    for i in range(num_samples):
        for place in range(1 + num_drafts[sampled[i]]):
            samples[logits_row], places[logits_row] = i, place
            logits_row += 1
    last_token = array_at(model.last_token, (model.table_rows,), rows)
    written_iter = array_at(model.written_iter, (model.table_rows,), rows)
    is_open = np.ones(num_samples, np.bool_)
    gathered = np.empty((min(len(is_valid), MAX_LOGITS_ROWS), model.hidden), hidden.dtype)
    for first in range(0, is_valid.shape[0], MAX_LOGITS_ROWS):
        num = min(MAX_LOGITS_ROWS, is_valid.shape[0] - first)
        for i in range(num):
            r = sampled[samples[first + i]]
            token = starts[r] + query_lens[r] - 1 - num_drafts[r] + places[first + i]
            for d in range(model.hidden):
                gathered[i, d] = hidden[token, d]
        logits = _logits(gathered[:num], model)
        for i in range(num):
            sample, place = samples[first + i], places[first + i]
            r = sampled[sample]
            if not is_open[sample]:
                continue
            offset = query_lens[r] - 1 - num_drafts[r] + place
            drawn, is_valid[first + i] = _draw(logits[i], rows[r], kv_lens[r] + offset + 1, model)
            words[sample * width + place] = drawn
            counts[r] = words[num_tokens + sample] = place + 1
            last_token[rows[r]], written_iter[rows[r]] = drawn, iteration
            is_open[sample] = place < num_drafts[r] and token_ids[starts[r] + offset + 1] == drawn


@njit(inline="always")
def _draw(logits: Float32s, row: int, position: int, model: Any) -> tuple[int, bool]:
    seeds = array_at(model.seeds, (model.table_rows, model.seed_columns), NO_ROWS)
    scales = array_at(
        model.temperatures, (model.table_rows, model.temperature_columns), FLOAT64_LIKE
    )
    return draw_row(logits, seeds[row, 0], position, np.float32(scales[row, 0]))


@njit(inline="always")
def _logits(hidden: Floats, model: Any) -> Float32s:
    logits = np.empty((hidden.shape[0], model.vocab), np.float32)
    _multiply(hidden, model.head, model.head_bias, logits)
    _cap_logits(logits.reshape(-1), hidden, model.logit_divisor, model.logit_softcap)
    return logits


@njit(nogil=True)
def _cap_logits(logits: Float32s, like: Floats, divisor: np.float32, cap: np.float32) -> None:
    """Divides and soft-caps the logits, rounded where the model itself rounds, so that both sample
    the same tokens."""
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
    ids: Int64s, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s, slots: Int64s,
    model: Any, layers: Records, loras: Records, out: Floats,
) -> None:  # fmt: skip
    num_tokens = ids.shape[0]
    # Buffers of all layers. `x` is the input of the next matrix product, and finally the result.
    x, hidden = out, np.empty((num_tokens, model.hidden), np.float32)
    attended = np.empty((num_tokens, model.heads, model.head_dim), out.dtype)
    gated = np.empty((num_tokens, model.inner), out.dtype)
    num_heads = model.heads + 2 * model.kv_heads
    heads = np.empty((num_tokens, num_heads, model.head_dim), np.float32)
    gate_up = np.empty((num_tokens, 2 * model.inner), np.float32)
    added = np.empty((num_tokens, model.hidden), np.float32)
    _embed(ids, model, hidden, added[0], x)
    for index in range(layers.shape[0]):
        layer = layers[index]
        flat_heads = heads.reshape((num_tokens, num_heads * model.head_dim))
        _multiply(x, layer.qkv, layer.qkv_bias, flat_heads)
        _add_lora(x, slots, loras, 4 * index, flat_heads)
        _attend(model, layer, rows, lens, starts, query_lens, heads, attended)
        flat = attended.reshape((num_tokens, model.heads * model.head_dim))
        _multiply(flat, layer.out, layer.out_bias, added)
        _add_lora(flat, slots, loras, 4 * index + 1, added)
        _add_norm(model, added, layer.after_attention, layer.before_mlp, hidden, x)
        _multiply(x, layer.gate_up, layer.gate_up_bias, gate_up)
        _add_lora(x, slots, loras, 4 * index + 2, gate_up)
        _gate(gate_up, model.activation, gated)
        _multiply(gated, layer.down, layer.down_bias, added)
        _add_lora(gated, slots, loras, 4 * index + 3, added)
        _add_norm(model, added, layer.after_mlp, layer.before_next, hidden, x)


@njit(nogil=True)
def _embed(ids: Int64s, model: Any, hidden: Float32s, scratch: Float32s, x: Floats) -> None:
    table = array_at(model.embeddings, (model.vocab, model.hidden), x)
    for token in range(ids.shape[0]):
        widen(table[ids[token]], hidden[token])
        for i in range(model.hidden):
            hidden[token, i] *= model.embedding_factor
        _norm_into(hidden[token], model.first_norm, model.eps, scratch, x[token])


@njit(nogil=True)
def _multiply(x: Floats, packed: int, bias: int, out: Float32s) -> None:
    num_out = out.shape[1]
    size = -(-num_out // 32) * 32 * x.shape[1]
    multiply(x, array_at(packed, (size,), x), array_at(bias, (num_out,), out), out)


@njit(nogil=True)
def _add_lora(x: Floats, slots: Int64s, loras: Records, index: int, out: Float32s) -> None:
    """Adds each token's adapter of one linear layer to its product, out [tokens, out]."""
    if loras.shape[0] == 0:
        return
    lora = loras[index]
    num_in, num_out = x.shape[1], out.shape[1]
    a = array_at(lora.a, (lora.slots, lora.parts, lora.rank, num_in), x)
    b = array_at(lora.b, (lora.slots, lora.rank, num_out), x)
    ranks = array_at(lora.ranks, (lora.slots, lora.parts), slots)
    bounds = array_at(lora.bounds, (lora.parts + 1,), slots)
    add_to_wide(x, slots, a, b, ranks, bounds, out)


@njit(inline="always")
def _attend(
    model: Any, layer: Any, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s,
    heads: Float32s, attended: Floats,
) -> None:  # fmt: skip
    """Applies norm and RoPE to heads [tokens, q + k + v, head_dim] in place, stores k and v, and
    attends."""
    kv_shape = (layer.num_slots, model.kv_heads, model.head_dim)
    keys = array_at(layer.keys, kv_shape, attended)
    values = array_at(layer.values, kv_shape, attended)
    table = array_at(layer.page_table, (model.table_rows, model.table_columns), rows)
    cos_sin = array_at(layer.cos_sin, (model.max_len, model.rotary_dim), attended)
    num_rotated = model.heads + model.kv_heads
    norms = array_at(layer.head_norms, (num_rotated, model.head_dim), heads)
    rope = np.empty(model.rotary_dim, np.float32)
    for r in range(rows.shape[0]):
        _rope_and_store(
            heads[starts[r] : starts[r] + query_lens[r]], keys, values, table[rows[r]],
            lens[r] - query_lens[r], model, layer, cos_sin, norms, rope,
        )  # fmt: skip
    attend_share(
        heads[:, : model.heads], keys, values, attended, table, rows, lens, starts, query_lens,
        model.page_size, layer.window, layer.factor, layer.cap, 0, 1,
    )  # fmt: skip


@njit(nogil=True, **NO_REFCOUNT)
def _rope_and_store(
    heads: Float32s, keys: Floats, values: Floats, pages: Int64s, position: int,
    model: Any, layer: Any, cos_sin: Floats, norms: Float32s, rope: Float32s,
) -> None:  # fmt: skip
    """Handles one row's tokens, from `position` on. `rope` [rotary_dim] is scratch memory."""
    num_rotated = norms.shape[0]
    for token in range(heads.shape[0]):
        token_position = position + token
        token_heads = heads[token]
        widen(cos_sin[token_position], rope)
        for head in range(num_rotated):
            if layer.head_norms != 0:
                _norm(token_heads[head], norms[head], layer.head_eps, token_heads[head])
            _rope_head(token_heads[head], rope)
        page = pages[token_position // model.page_size]
        slot = page * model.page_size + token_position % model.page_size
        narrow(token_heads[model.heads : num_rotated].reshape(-1), keys[slot].reshape(-1))
        narrow(token_heads[num_rotated:].reshape(-1), values[slot].reshape(-1))


@njit(nogil=True, fastmath=FASTMATH, **NO_REFCOUNT)
def _rope_head(x: Float32s, rope: Float32s) -> None:
    half = rope.shape[0] // 2
    left, right = x[:half], x[half : 2 * half]
    for i in range(half):
        a, b = left[i], right[i]
        left[i] = a * rope[i] - b * rope[half + i]
        right[i] = b * rope[i] + a * rope[half + i]


@njit(nogil=True)
def _add_norm(
    model: Any, added: Float32s, norm_of_added: int, norm: int, hidden: Float32s, x: Floats
) -> None:
    """hidden += residual_scale * added, which may be normalised first; x becomes the sum's norm."""
    for token in range(hidden.shape[0]):
        total, more = hidden[token], added[token]
        if norm_of_added != 0:
            _norm(more, array_at(norm_of_added, more.shape, more), model.eps, more)
        for i in range(total.shape[0]):
            total[i] += model.residual_scale * more[i]
        _norm_into(total, norm, model.eps, more, x[token])


@njit(nogil=True, fastmath=FASTMATH, **NO_REFCOUNT)
def _norm(x: Float32s, weight: Float32s, eps: np.float32, out: Float32s) -> None:
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    scale = np.float32(1) / np.float32(math.sqrt(total / np.float32(x.shape[0]) + eps))
    for i in range(x.shape[0]):
        out[i] = x[i] * scale * weight[i]


@njit(nogil=True)
def _norm_into(x: Float32s, norm: int, eps: np.float32, scratch: Float32s, out: Floats) -> None:
    if norm == 0:
        narrow(x, out)
        return
    _norm(x, array_at(norm, x.shape, x), eps, scratch)
    narrow(scratch, out)


# PERF: numba's default error model checks divisors for zero, which prevents vectorisation.
@njit(nogil=True, fastmath=FASTMATH, error_model="numpy", **NO_REFCOUNT)
def _gate(gate_up: Float32s, activation: int, gated: Floats) -> None:
    """gated = activation(gate) * up."""
    size = np.uint64(gated.shape[1])  # PERF: unsigned, as in rope_and_store_kv.py
    for token in range(gate_up.shape[0]):
        row = gate_up[token]
        if activation == SILU:
            for i in range(size):
                row[i] *= row[size + i] * _sigmoid(row[i])
        elif activation == GELU_TANH:
            for i in range(size):
                x = row[i]
                # (1 + tanh(y)) / 2 is the sigmoid of 2 y.
                inner = GELU_SCALE * (x + GELU_CUBE * x * x * x)
                row[i] = x * row[size + i] * _sigmoid(np.float32(2) * inner)
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
