"""The layers of a decoder, and the logits and draws behind them, for the compiled steps.

WHY one call: with a small model and few tokens, most of a step on the CPU is the overhead of the
calls between the matrix products. Per layer, with pre-norm residuals:

    h = h + mixer_scale * out(attention(rope(norm(qkv(norm(h))))))
    h = (h + mlp_scale * down(activation(gate(norm(h))) * up(norm(h)))) * out_scale

The output of attention may be gated, and a layer may be recurrent: then a function of its own
computes what is between its first product and `out` (delta_layer.py). So does one that stands for
the MLP of a layer with experts (expert_mlp.py). A layer may have only one of the two sublayers. Two
mixers that read the same norm of h are two layers, of which the first leaves that norm as it is,
but for a factor.

The threads of a team share each product by outputs, attention by rows and KV heads, and the rest by
tokens. Norms behind attention and MLP are supported too. Hidden states and sums are float32; the
operands of the matrix products have the model's dtype, and KV has it or is fp8. Tokens are drawn
greedily or by Gumbel-max, without filters, penalties or masks.

A draft model may read a hidden state beside each token. Both, each after a norm, are joined, and a
projection makes the residual stream of them, or they are the input of the first layer as they are
and the hidden state is the residual stream. Its layers may store no keys and values, may see the
tokens of a forward in both directions, and its vocabulary may be a part of the target's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from aserve_kernels.cpu.bf16 import Float32s, Floats, narrow, rounded, widen
from aserve_kernels.cpu.callback import call_at
from aserve_kernels.cpu.exp2 import LOG2_E
from aserve_kernels.cpu.gated_mul import ONE, Gate, apply_gate, sigmoid
from aserve_kernels.cpu.host_rows import Int64s
from aserve_kernels.cpu.lora import add_to_wide
from aserve_kernels.cpu.memory import FLOAT32_LIKE, array_at, scratch
from aserve_kernels.cpu.paged_attention import attend_share
from aserve_kernels.cpu.precompile import FASTMATH, NO_REFCOUNT
from aserve_kernels.cpu.product import PRODUCT, multiply_by
from aserve_kernels.cpu.rank_sum import sum_over_ranks
from aserve_kernels.cpu.team import Team, meet, share_of
from aserve_kernels.cpu.tiles import outputs_of

Records: TypeAlias = npt.NDArray[np.void]

MAX_LOGITS_ROWS = 64  # rows whose logits are in memory at a time
NO_IDS = NO_LAYERS = np.empty(0, np.int64)
NO_LIMIT = np.float32(np.inf)
SAME_INPUT = -1  # in place of a norm's address: the next layer reads the same input as this one

# The record of a model: sizes, then addresses, of which 0 is none. The embeddings [num_embeddings,
# hidden] in the model's dtype; the float32 weight [hidden] of the norm before the first layer; the
# LM head; the engine's token pool and its page table; the relay's last token of
# each row, the step that wrote it, and the published KV length (0 in modes that publish none),
# [max_rows + 1] int64; the relay's drafts [max_rows + 1, max_drafts] int64, and their distributions
# [max_rows + 1, probs_drafts, probs_vocab] float32 (0 where none are kept); the columns of seeds
# (int64) and temperatures (float64) in the parameter tables. A softcap of 0 is none. Without
# embeddings the residual stream is given. `ranks` has the words of rank_sum.py, for layers whose
# products are sums over ranks; sizes are those of this rank. The output of attention is gated if
# there are `gates`: as many as heads. `mixed` and `attended` are the sizes of two buffers, for each
# token, that suffice for the mixers of all layers, and for their experts. `query_factors` is the
# address of the factors of queries by position, float32 [max_len] (0 for none).
#
# Of draft models: `joined` is the size of the embeddings and of the hidden states that are joined
# with them, 0 if none are. Then the weights of the norms of both parts and before the head; the
# packed projection of the joined inputs; the layer that makes the next hidden state; the
# target's ids of a reduced vocabulary, int64 [vocab].
MODEL: Any = np.dtype(
    [
        *[(name, np.int64) for name in ("hidden", "inner", "vocab", "num_embeddings", "max_len")],
        *[(name, np.int64) for name in ("heads", "kv_heads", "head_dim", "rotary_dim", "gates")],
        *[(name, np.int64) for name in ("mixed", "attended", "query_factors")],
        *[(name, np.int64) for name in ("page_size", "table_rows", "table_columns")],
        *[(name, np.int64) for name in ("embeddings", "first_norm")],
        ("head", PRODUCT),
        *[(name, np.int64) for name in ("token_pool", "num_slots", "token_pages")],
        *[(name, np.int64) for name in ("last_token", "written_iter", "seq_len")],
        *[(name, np.int64) for name in ("drafts", "max_drafts")],
        *[(name, np.int64) for name in ("draft_probs", "probs_drafts", "probs_vocab")],
        *[(name, np.int64) for name in ("seeds", "seed_columns")],
        *[(name, np.int64) for name in ("temperatures", "temperature_columns")],
        *[(name, np.int64) for name in ("joined", "is_hidden_first", "keeps_normed")],
        *[(name, np.int64) for name in ("stores_kv", "is_causal", "ranks")],
        *[(name, np.int64) for name in ("embedding_norm", "hidden_norm", "head_norm")],
        *[(name, PRODUCT) for name in ("projection", "next_hidden")],
        ("token_ids", np.int64),
        *[(name, np.float32) for name in ("eps", "embedding_factor")],
        *[(name, np.float32) for name in ("logit_divisor", "logit_softcap")],
    ],
    align=True,
)

# The record of a layer: its linear layers, and addresses: float32 norm weights (0 for none); the
# cos/sin table [max_len, rotary_dim]; the layer's KV and page table; what elements of KV stand for,
# as `element * scale`; the float32 sinks [heads] of its softmax (0 for none). `head_norms` are of
# each head alone, or with a `key_norm` of all heads of a query together, as that one is of a key. A
# recurrent layer has none of these but norms, and `qkv` is its first product. `advance` is the
# address of its function, and `recurrent` that of its record. One with experts has neither
# `gate_up` nor `down`: `mlp` is the address of its function, and `experts` that of its record. A
# layer without a mixer has no `out`, and `before_mlp` of one without an MLP is the norm before the
# next layer, or SAME_INPUT. A mixer's input is multiplied by `input_factor` first. `activation` and
# `gate_factor` are those of a Gate.
LAYER: Any = np.dtype(
    [
        *[(name, PRODUCT) for name in ("qkv", "out", "gate_up", "down")],
        *[(name, np.int64) for name in ("head_norms", "key_norm", "after_attention", "before_mlp")],
        *[(name, np.int64) for name in ("after_mlp", "before_next", "cos_sin")],
        *[(name, np.int64) for name in ("keys", "values", "num_slots", "page_table", "window")],
        *[(name, np.int64) for name in ("sinks", "advance", "recurrent", "mlp", "experts")],
        ("activation", np.int64),
        *[(name, np.float32) for name in ("factor", "cap", "head_eps", "input_factor")],
        *[(name, np.float32) for name in ("key_scale", "value_scale", "gate_factor")],
        *[(name, np.float32) for name in ("mixer_scale", "mlp_scale", "out_scale")],
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


# The record of a Tables: the addresses of its arrays, and how many elements they have.
TABLES: Any = np.dtype(
    [
        *[(name, np.int64) for name in ("model", "layers", "num_layers", "loras", "num_loras")],
        *[(name, np.int64) for name in ("captured", "num_captured")],
    ]
)
WORD_BYTES = 8


@dataclass(frozen=True)
class Tables:
    """The caller keeps the memory alive that the records point to."""

    model: Records  # [1] MODEL
    layers: Records  # [layers] LAYER
    dtype: torch.dtype  # of weights
    kv_dtype: torch.dtype
    loras: Records  # [layers * 4] LORA, or none if no token has an adapter
    captured: Int64s  # the layers after which the residual stream is an output

    @cached_property
    def words(self) -> Int64s:
        """Returns the words of its record TABLES."""
        arrays = (self.layers, self.loras, self.captured)
        refs = [word for array in arrays for word in (array.ctypes.data, len(array))]
        return np.array([self.model.ctypes.data, *refs], np.int64)

    @cached_property
    def hidden_size(self) -> int:
        return int(self.model["hidden"][0])

    @cached_property
    def vocab_size(self) -> int:
        return int(self.model["vocab"][0])

    @cached_property
    def joined_size(self) -> int:
        return int(self.model["joined"][0])

    @cached_property
    def num_wide(self) -> int:
        """Returns how many float32 the buffers of a forward have for each token."""
        model = self.model[0]
        return int(2 * model["hidden"] + model["mixed"] + 2 * model["inner"])

    @cached_property
    def num_narrow(self) -> int:
        """Returns how many elements of the model's dtype they have for each token."""
        model = self.model[0]
        return int(model["attended"] + model["inner"])


class Inputs(NamedTuple):
    """Holds what the layers of one forward read. Tokens of a row are its last ones, or, where the
    layers store nothing, have the row's last position."""

    ids: Int64s  # [tokens]
    hiddens: Floats  # [tokens, joined], of a model that reads hidden states
    rows: Int64s  # [rows]
    lens: Int64s  # [rows], with these tokens
    starts: Int64s  # [rows], the first token of each
    query_lens: Int64s  # [rows]
    # How many last tokens of each row the caller reads: all, or fewer where nothing is captured and
    # the model is causal.
    num_read: Int64s
    slots: Int64s  # [tokens] of adapters, if there are any


class Buffers(NamedTuple):
    """Holds what the layers of one forward write. The workers of a team share it."""

    hidden: Float32s  # [tokens, hidden], the residual stream
    attended: Floats  # [tokens * attended], the input of `out`
    gated: Floats  # [tokens, inner]
    mixed: Float32s  # [tokens * mixed], the heads of q, k, v and gates [tokens, heads, head_dim]
    gate_up: Float32s  # [tokens * 2 * inner]
    added: Float32s  # [tokens, hidden]
    kv: Floats  # [0] in the dtype of KV


@njit(nogil=True)
def buffers_in(
    wide: Float32s, narrow_: Floats, hidden: Float32s, model: Any, kv: Floats
) -> Buffers:
    """Divides memory of `Tables.num_wide` and `num_narrow` elements for each token. `hidden` is its
    first part, or comes from elsewhere; `kv` is like KV."""
    num_tokens, size = hidden.shape[0], hidden.size
    mixed_size, gate_size = num_tokens * model.mixed, num_tokens * 2 * model.inner
    attended_size = num_tokens * model.attended
    rest = wide[2 * size :]
    return Buffers(
        hidden,
        narrow_[:attended_size],
        narrow_[attended_size:][: num_tokens * model.inner].reshape((num_tokens, model.inner)),
        rest[:mixed_size],
        rest[mixed_size:][:gate_size],
        wide[size : 2 * size].reshape((num_tokens, model.hidden)),
        kv,
    )


@njit(nogil=True)
def run_layers(
    inputs: Inputs, model: Any, layers: Records, loras: Records, captured: Int64s, out: Floats,
    streams: Floats, buffers: Buffers, call: int, team: Team,
) -> None:  # fmt: skip
    """Writes the output of the layers, [tokens, hidden], and the captured residual streams. All
    workers have written when it returns.

    Outputs that the caller reads come first in `out`, row after row, and the last layer computes no
    more of the others than keys and values. Without embeddings, buffers.hidden has the residual
    stream that the layers begin with. A model that reads hidden states has a team of one. `call`
    is the address of the record CALL of these arguments (layers_function.py).
    """
    ids, hiddens, rows, lens, starts, query_lens, num_read, slots = inputs
    num_tokens = ids.shape[0]
    worker, num_workers = team.worker, team.num_workers
    first, last = share_of(num_tokens, team)
    # `x` is the input of the next matrix product, and finally the result.
    x, own = out, out[first:last]
    hidden, attended, gated, mixed, gates_and_ups, added, kv = buffers
    own_hidden, own_added = hidden[first:last], added[first:last]
    own_slots = slots[first:last]
    num_heads = model.heads + 2 * model.kv_heads * model.stores_kv + model.gates
    heads_shape, num_out = (num_tokens, num_heads, model.head_dim), num_heads * model.head_dim
    num_kept = num_read.sum()
    query_starts, num_queries = starts, query_lens
    source = x
    if model.embeddings == 0:
        _norm_rows(own_hidden, model, own)
    elif model.joined == 0:
        _embed(ids[first:last], model, own_hidden, own)
    else:
        source = _join(ids, hiddens, model, hidden, x)
    meet(team)
    for index in range(layers.shape[0]):
        layer = layers[index]
        has_mixer = layer.out.product != 0
        if index == layers.shape[0] - 1:
            query_starts, num_queries = starts + query_lens - num_read, num_read
        flat = x
        if layer.input_factor != ONE:
            _multiply_rows(own, layer.input_factor)
            meet(team)
        if has_mixer:
            multiply_by(layer.qkv, source, mixed, worker, num_workers)
            num_in = layer.out.num_in
            flat = attended[: num_tokens * num_in].reshape((num_tokens, num_in))
        if layer.advance != 0:
            arrays = (source.ctypes.data, mixed.ctypes.data, attended.ctypes.data)
            call_at(layer.advance, (layer.recurrent, call, *arrays, worker, num_workers))
        elif has_mixer:
            meet(team)
            flat_heads = mixed[: num_tokens * num_out].reshape((num_tokens, num_out))
            _add_lora(source[first:last], own_slots, loras, 4 * index, flat_heads[first:last])
            heads = flat_heads.reshape(heads_shape)
            store_keys(
                model, layer, rows, lens, starts, query_lens, heads, attended, kv, first, last
            )  # fmt: skip
            meet(team)
            out_heads = flat.reshape((num_tokens, model.heads, model.head_dim))
            _attend(model, layer, rows, lens, query_starts, num_queries, heads, out_heads, kv, team)
            meet(team)
            if model.gates != 0:
                _gate_heads(flat_heads, flat, team)
        meet(team)
        # PERF: 640 tokens of a model of four layers take 47 ms, and 59 if all of them go on.
        if index == layers.shape[0] - 1 and num_kept < num_tokens:
            if worker == 0:
                _move_to_front(query_starts, num_queries, flat, hidden)
            if loras.shape[0] != 0:
                slots = _slots_at(query_starts, num_queries, slots)
            num_tokens = num_kept
            first, last = share_of(num_tokens, team)
            flat, gated, added = flat[:num_kept], gated[:num_kept], added[:num_kept]
            x = x[:num_kept]
            own, own_hidden, own_added = x[first:last], hidden[first:last], added[first:last]
            own_slots = slots[first:last]
            meet(team)
        if has_mixer:
            multiply_by(layer.out, flat, added, worker, num_workers)
            meet(team)
            _add_lora(flat[first:last], own_slots, loras, 4 * index + 1, own_added)
            sum_over_ranks(model.ranks, added.reshape(-1), team)
            _add_norm(
                model, own_added, layer.after_attention, layer.before_mlp, layer.mixer_scale, ONE,
                own_hidden, own,
            )  # fmt: skip
            meet(team)
        if layer.mlp != 0:
            addresses = (layer.experts, call, x.ctypes.data, added.ctypes.data)
            call_at(layer.mlp, (*addresses, num_tokens, worker, num_workers))
        elif layer.down.product != 0:
            num_inner = layer.gate_up.num_out
            gate_up = gates_and_ups[: num_tokens * num_inner].reshape((num_tokens, num_inner))
            multiply_by(layer.gate_up, x, gate_up, worker, num_workers)
            meet(team)
            if loras.shape[0] != 0:
                _add_lora(x[first:last], own_slots, loras, 4 * index + 2, gate_up[first:last])
                meet(team)
            gate_share(gate_up, Gate(layer.activation, layer.gate_factor, NO_LIMIT), gated, team)
            meet(team)
            multiply_by(layer.down, gated, added, worker, num_workers)
        if layer.mlp != 0 or layer.down.product != 0:
            meet(team)
            _add_lora(gated[first:last], own_slots, loras, 4 * index + 3, own_added)
            sum_over_ranks(model.ranks, added.reshape(-1), team)
            _add_norm(
                model, own_added, layer.after_mlp, layer.before_next, layer.mlp_scale,
                layer.out_scale, own_hidden, own,
            )  # fmt: skip
        for number in range(captured.shape[0]):
            if captured[number] == index:
                narrow(own_hidden.reshape(-1), streams[number][first:last].reshape(-1))
        source = x
        meet(team)


@njit(nogil=True)
def _move_to_front(starts: Int64s, num_queries: Int64s, attended: Floats, hidden: Float32s) -> None:
    """Moves the vectors of these tokens of each row to the front, row after row."""
    kept = 0
    for r in range(starts.shape[0]):
        for token in range(starts[r], starts[r] + num_queries[r]):
            attended[kept] = attended[token]
            hidden[kept] = hidden[token]
            kept += 1


@njit(nogil=True)
def _multiply_rows(x: Floats, factor: np.float32) -> None:
    wide = scratch((x.shape[1],), FLOAT32_LIKE)
    for token in range(x.shape[0]):
        widen(x[token], wide)
        for i in range(x.shape[1]):
            wide[i] *= factor
        narrow(wide, x[token])


@njit(nogil=True)
def _slots_at(starts: Int64s, num_queries: Int64s, slots: Int64s) -> Int64s:
    kept = np.empty(num_queries.sum(), np.int64)
    end = 0
    for r in range(starts.shape[0]):
        kept[end : end + num_queries[r]] = slots[starts[r] : starts[r] + num_queries[r]]
        end += num_queries[r]
    return kept


@njit(nogil=True)
def _embed(ids: Int64s, model: Any, hidden: Float32s, x: Floats) -> None:
    normed = scratch((model.hidden,), hidden)
    table = array_at(model.embeddings, (model.num_embeddings, model.hidden), x)
    for token in range(ids.shape[0]):
        widen(table[ids[token]], hidden[token])
        for i in range(model.hidden):
            hidden[token, i] *= model.embedding_factor
        _norm_into(hidden[token], model.first_norm, model.eps, normed, x[token])


@njit(nogil=True)
def _norm_rows(hidden: Float32s, model: Any, x: Floats) -> None:
    """Makes the first layer's input of the residual stream, [tokens, hidden]."""
    normed = scratch((model.hidden,), hidden)
    for token in range(hidden.shape[0]):
        _norm_into(hidden[token], model.first_norm, model.eps, normed, x[token])


@njit(nogil=True)
def _join(ids: Int64s, hiddens: Floats, model: Any, hidden: Float32s, x: Floats) -> Floats:
    """Writes the residual stream `hidden`, and returns the input of the first layer, which is x if
    there is a projection."""
    size, num_tokens = model.joined, ids.shape[0]
    table = array_at(model.embeddings, (model.num_embeddings, size), x)
    joined = np.empty((num_tokens, 2 * size), x.dtype)
    wide, other = np.empty(size, np.float32), np.empty(max(size, model.hidden), np.float32)
    first = size if model.is_hidden_first != 0 else 0  # of the embedding
    for token in range(num_tokens):
        widen(table[ids[token]], wide)
        for i in range(size):
            wide[i] *= model.embedding_factor
        inputs = joined[token]
        _norm_into(wide, model.embedding_norm, model.eps, other, inputs[first : first + size])
        widen(hiddens[token], wide)
        normed = inputs[size - first : 2 * size - first]
        _norm_into(wide, model.hidden_norm, model.eps, other, normed)
        if model.projection.weight == 0:
            if model.keeps_normed != 0:
                widen(normed, wide)
            for i in range(size):
                hidden[token, i] = wide[i]
    if model.projection.weight == 0:
        return joined
    multiply_by(model.projection, joined, hidden, 0, 1)
    for token in range(num_tokens):
        _norm_into(hidden[token], model.first_norm, model.eps, other, x[token])
    return x


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
    heads: Float32s, attended: Floats, kv: Floats, team: Team,
) -> None:  # fmt: skip
    """Attends for a worker's share of the queries, heads [tokens, q + k + v, head_dim]."""
    kv_shape = (layer.num_slots, model.kv_heads, model.head_dim)
    keys, values = array_at(layer.keys, kv_shape, kv), array_at(layer.values, kv_shape, kv)
    table = array_at(layer.page_table, (model.table_rows, model.table_columns), rows)
    if model.is_causal == 0:
        rows, lens, starts, query_lens = _as_last_tokens(rows, lens, query_lens)
    attend_share(
        heads[:, : model.heads], keys, values, attended, table, rows, lens, starts, query_lens,
        model.page_size, layer.window, layer.factor, layer.cap,
        _sinks_of(layer, heads, model.heads), layer.value_scale, team.worker, team.num_workers,
    )  # fmt: skip


@njit(nogil=True)
def _sinks_of(layer: Any, like: Float32s, num_heads: int) -> Float32s:
    """Returns the sinks in units of log2(e), [heads]; -inf for none."""
    sinks = np.full(num_heads, np.float32(-np.inf))
    stored = array_at(layer.sinks, (num_heads if layer.sinks != 0 else 0,), like)
    for head in range(stored.shape[0]):
        sinks[head] = stored[head] * np.float32(LOG2_E)
    return sinks


@njit(nogil=True)
def _as_last_tokens(
    rows: Int64s, lens: Int64s, query_lens: Int64s
) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Returns a row for each token, as if it were the last one of its row: it sees all keys."""
    num_tokens = query_lens.sum()
    token_rows, token_lens = np.empty(num_tokens, np.int64), np.empty(num_tokens, np.int64)
    start = 0
    for r in range(rows.shape[0]):
        token_rows[start : start + query_lens[r]] = rows[r]
        token_lens[start : start + query_lens[r]] = lens[r]
        start += query_lens[r]
    return token_rows, token_lens, np.arange(num_tokens), np.ones(num_tokens, np.int64)


@njit(nogil=True)
def store_keys(
    model: Any, layer: Any, rows: Int64s, lens: Int64s, starts: Int64s, query_lens: Int64s,
    heads: Float32s, like: Floats, kv: Floats, first: int, last: int,
) -> None:  # fmt: skip
    """Applies norm and RoPE to heads [tokens, q + k + v, head_dim] in place, and stores k and v if
    the model stores them, for the tokens from `first` to `last` - 1. Gates, which come with q, move
    behind v. `like` has the model's dtype, and `kv` that of KV."""
    kv_shape = (layer.num_slots, model.kv_heads, model.head_dim)
    keys, values = array_at(layer.keys, kv_shape, kv), array_at(layer.values, kv_shape, kv)
    table = array_at(layer.page_table, (model.table_rows, model.table_columns), rows)
    cos_sin = array_at(layer.cos_sin, (model.max_len, model.rotary_dim), like)
    num_rotated = model.heads + model.kv_heads * model.stores_kv
    norms = array_at(layer.head_norms, (num_rotated, model.head_dim), heads)
    key_norm = array_at(layer.key_norm, (model.kv_heads * model.head_dim,), heads)
    num_factors = model.max_len if model.query_factors != 0 else 0
    factors = array_at(model.query_factors, (num_factors,), heads)
    rope = np.empty(model.rotary_dim, np.float32)
    gates = np.empty((model.gates, model.head_dim), np.float32)
    for r in range(rows.shape[0]):
        start, stop = max(first, starts[r]), min(last, starts[r] + query_lens[r])
        if start < stop:
            position = lens[r] - query_lens[r] + start - starts[r]
            _rope_and_store(
                heads[start:stop], keys, values, table[rows[r]], position, model, layer, cos_sin,
                norms, key_norm, factors, rope, gates,
            )  # fmt: skip


@njit(nogil=True, **NO_REFCOUNT)
def _rope_and_store(
    heads: Float32s, keys: Floats, values: Floats, pages: Int64s, position: int,
    model: Any, layer: Any, cos_sin: Floats, norms: Float32s, key_norm: Float32s,
    factors: Float32s, rope: Float32s, gates: Float32s,
) -> None:  # fmt: skip
    """Handles one row's tokens, from `position` on. `rope` [rotary_dim] and `gates` [gates,
    head_dim] are scratch memory."""
    num_rotated = norms.shape[0]
    for token in range(heads.shape[0]):
        token_position = position + token
        token_heads = heads[token]
        if model.gates != 0:
            _move_gates(token_heads, gates)
        widen(cos_sin[token_position], rope)
        if layer.key_norm != 0:
            num_own = token_heads[: model.heads].size
            together = token_heads[:num_rotated].reshape(-1)
            query, key = together[:num_own], together[num_own:]
            norm_row(query, norms.reshape(-1)[:num_own], model.eps, query)
            norm_row(key, key_norm, model.eps, key)
        for head in range(num_rotated):
            if layer.head_norms != 0 and layer.key_norm == 0:
                norm_row(token_heads[head], norms[head], layer.head_eps, token_heads[head])
            _rope_head(token_heads[head], rope)
        if factors.shape[0] != 0:
            _multiply(token_heads[: model.heads].reshape(-1), factors[token_position])
        if model.stores_kv == 0:
            continue
        page = pages[token_position // model.page_size]
        slot = page * model.page_size + token_position % model.page_size
        token_keys = token_heads[model.heads : num_rotated].reshape(-1)
        token_values = token_heads[num_rotated : num_rotated + model.kv_heads].reshape(-1)
        _divide(token_keys, layer.key_scale)
        _divide(token_values, layer.value_scale)
        narrow(token_keys, keys[slot].reshape(-1))
        narrow(token_values, values[slot].reshape(-1))


@njit(nogil=True, **NO_REFCOUNT)
def _move_gates(heads: Float32s, gates: Float32s) -> None:
    """Changes the order of heads [q + k + v + gates, head_dim]: each gate comes behind its query,
    and then all come last. `gates` [gates, head_dim] is scratch memory."""
    num_gates, num_others = gates.shape[0], heads.shape[0] - gates.shape[0]
    for head in range(num_gates):
        _copy(heads[2 * head + 1], gates[head])
        _copy(heads[2 * head], heads[head])
    for head in range(num_gates, num_others):
        _copy(heads[head + num_gates], heads[head])
    for head in range(num_gates):
        _copy(gates[head], heads[num_others + head])


@njit(nogil=True, **NO_REFCOUNT)
def _copy(source: Float32s, target: Float32s) -> None:
    for i in range(source.shape[0]):
        target[i] = source[i]


@njit(nogil=True, fastmath=FASTMATH, error_model="numpy")
def _gate_heads(heads: Float32s, attended: Floats, team: Team) -> None:
    """attended *= sigmoid(gates), for a worker's share of the elements. The gates of attended
    [tokens, size] are the last elements of heads [tokens, q + k + v + gates]."""
    num_tokens, size = attended.shape
    first, last = share_of(size, team)
    wide = scratch((last - first,), FLOAT32_LIKE)
    for token in range(num_tokens):
        gates = heads[token, heads.shape[1] - size + first : heads.shape[1] - size + last]
        own = attended[token, first:last]
        widen(own, wide)
        for i in range(np.uint64(last - first)):
            wide[i] *= sigmoid(gates[i])
        narrow(wide, own)


@njit(nogil=True, **NO_REFCOUNT)
def _multiply(x: Float32s, factor: np.float32) -> None:
    for i in range(x.shape[0]):
        x[i] *= factor


@njit(nogil=True, **NO_REFCOUNT)
def _divide(x: Float32s, scale: np.float32) -> None:
    if scale != ONE:
        for i in range(x.shape[0]):
            x[i] /= scale


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
    model: Any, added: Float32s, norm_of_added: int, norm: int, scale: np.float32,
    factor: np.float32, hidden: Float32s, x: Floats,
) -> None:  # fmt: skip
    """hidden = (hidden + scale * added) * factor, where `added` may be normalised first; x becomes
    the sum's norm, or stays as it is for SAME_INPUT."""
    for token in range(hidden.shape[0]):
        total, more = hidden[token], added[token]
        if norm_of_added != 0:
            norm_row(more, array_at(norm_of_added, more.shape, more), model.eps, more)
        for i in range(total.shape[0]):
            total[i] = (total[i] + scale * more[i]) * factor
        if norm != SAME_INPUT:
            _norm_into(total, norm, model.eps, more, x[token])


@njit(nogil=True, fastmath=FASTMATH, **NO_REFCOUNT)
def norm_row(x: Float32s, weight: Float32s, eps: np.float32, out: Float32s) -> None:
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    scale = np.float32(1) / np.float32(math.sqrt(total / np.float32(x.shape[0]) + eps))
    for i in range(x.shape[0]):
        out[i] = x[i] * scale * weight[i]


@njit(nogil=True)
def _norm_into(x: Float32s, norm: int, eps: np.float32, normed: Float32s, out: Floats) -> None:
    if norm == 0:
        narrow(x, out)
        return
    norm_row(x, array_at(norm, x.shape, x), eps, normed)
    narrow(normed[: x.shape[0]], out)


@njit(nogil=True, **NO_REFCOUNT)
def gate_share(gate_up: Float32s, gate: Gate, gated: Floats, team: Team) -> None:
    """gated = activation(gate) * up, for a worker's share of the inner features. Without gates,
    gate_up [tokens, inner] is up alone."""
    first, last = share_of(gated.shape[1], team)
    skipped = gate_up.shape[1] - gated.shape[1]
    for token in range(gate_up.shape[0]):
        both = gate_up[token]
        row, up = both[first:last], both[skipped + first : skipped + last]
        apply_gate(row, up, gate)
        narrow(row, gated[token][first:last])


@njit(inline="always")
def logits_of(hidden: Floats, model: Any) -> Float32s:
    """Returns the logits of hidden states [n, hidden], [n, vocab], in one thread."""
    logits = np.empty((hidden.shape[0], model.vocab), np.float32)
    write_logits(hidden, model, logits, 0, 1)
    return logits


@njit(nogil=True)
def write_logits(
    hidden: Floats, model: Any, logits: Float32s, worker: int, num_workers: int
) -> None:
    """Writes a worker's share of the logits [n, vocab] of hidden states [n, hidden]."""
    normed = hidden
    if model.head_norm != 0:
        normed = np.empty(hidden.shape, hidden.dtype)
        wide, other = np.empty(model.hidden, np.float32), np.empty(model.hidden, np.float32)
        for row in range(hidden.shape[0]):
            widen(hidden[row], wide)
            _norm_into(wide, model.head_norm, model.eps, other, normed[row])
    multiply_by(model.head, normed, logits, worker, num_workers)
    first, last = outputs_of(model.vocab, worker, num_workers)
    for row in range(hidden.shape[0]):
        _cap_logits(logits[row][first:last], hidden, model.logit_divisor, model.logit_softcap)


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
