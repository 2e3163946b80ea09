"""The compiled form of a Gated DeltaNet, from its first product to the input of its last one.

For each token and head of values, with b and a the narrow product of the layer's input:

    g = -exp(A_log) softplus(a + dt_bias)        rate = sigmoid(b)
    y = the recurrence of channels, g and the rate (delta_rule.py)
    attended = norm(y) * silu(z)

It is a function of C that the layers call by its address, so that models without such layers do not
compile it. Channels are rounded to the model's dtype, in which a row keeps the last of them; all
else is float32.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit

from aserve_kernels.cpu.bf16 import Float32s, Floats, empty_array, narrow
from aserve_kernels.cpu.callback import Callback, compile_callback
from aserve_kernels.cpu.decoder_layers import Inputs, norm_row
from aserve_kernels.cpu.delta_rule import advance_head
from aserve_kernels.cpu.gated_mul import SILU, activate, sigmoid
from aserve_kernels.cpu.layers_function import CALL_LIKE, inputs_of
from aserve_kernels.cpu.memory import FLOAT32_LIKE, INT64_LIKE, array_at
from aserve_kernels.cpu.product import PRODUCT, multiply_by
from aserve_kernels.cpu.team import MEETING_LEN, Team, meet

# The record of a recurrent layer: the product of b and a; sizes; how many groups the outputs of the
# products have, each with its part of q, k, v and z, or of b and a; the sizes of the buffers; how
# many states and inputs of conv a row keeps; the addresses of float32 weights and of the states.
RECURRENT: Any = np.dtype(
    [
        ("narrow", PRODUCT),
        *[(name, np.int64) for name in ("key_heads", "value_heads", "key_dim", "value_dim")],
        *[(name, np.int64) for name in ("width", "groups", "mixed", "attended")],
        *[(name, np.int64) for name in ("table_rows", "num_places", "num_inputs")],
        *[(name, np.int64) for name in ("conv", "decay", "dt_bias", "norm")],
        *[(name, np.int64) for name in ("matrices", "inputs")],
        ("eps", np.float32),
    ],
    align=True,
)
RECURRENT_LIKE = np.empty(0, RECURRENT)
# The addresses of the record, of the layers' CALL, of the layer's input, of its product of q, k, v
# and z, and of its output; the worker and the number of workers.
NUM_ARGUMENTS = 7


class Parts(NamedTuple):
    """Holds what a layer computes for the tokens of a forward. Workers share it."""

    wide: Float32s  # [tokens, q + k + v + z]
    narrow: Float32s  # [tokens, b + a]
    log_decay: Float32s  # [tokens, value heads]
    rate: Float32s  # [tokens, value heads]
    y: Float32s  # [tokens, value heads, d_v]
    channels: Floats  # [tokens, q + k + v]
    attended: Floats  # [tokens, value heads * d_v]


def buffer_sizes(num_channels: int, value_size: int, num_heads: int) -> tuple[int, int]:
    """Returns how many float32 and how many elements of the model's dtype the buffers of a layer
    have for each token, with its first product and its output."""
    return num_channels + 2 * value_size + 4 * num_heads, value_size + num_channels


def compile_delta_layer(dtype: torch.dtype) -> None:
    delta_layer_function(dtype)


@cache
def delta_layer_function(dtype: torch.dtype) -> Callback:
    """Returns the function of layers of a model of this dtype, which all teams share."""
    like = empty_array((0,), dtype)

    def advance_layer_at(
        record: int, address: int, x: int, mixed: int, attended: int, worker: int, num_workers: int
    ) -> None:
        layer = array_at(record, (1,), RECURRENT_LIKE)[0]
        call = array_at(address, (1,), CALL_LIKE)[0]
        team = Team(worker, num_workers, array_at(call.meeting, (MEETING_LEN,), INT64_LIKE))
        num_tokens = call.num_tokens
        inputs = inputs_of(call, 0, like)
        parts = _parts_in(
            layer,
            array_at(mixed, (num_tokens * layer.mixed,), FLOAT32_LIKE),
            array_at(attended, (num_tokens * layer.attended,), like),
            num_tokens,
        )
        source = array_at(x, (num_tokens, layer.narrow.num_in), like)
        multiply_by(layer.narrow, source, parts.narrow, worker, num_workers)
        meet(team)
        _advance(layer, inputs, parts, worker, num_workers)

    return compile_callback(advance_layer_at, NUM_ARGUMENTS)


@njit(inline="always")
def _num_channels(layer: Any) -> int:
    size: int = 2 * layer.key_heads * layer.key_dim + layer.value_heads * layer.value_dim
    return size


@njit(nogil=True)
def _parts_in(layer: Any, mixed: Float32s, attended: Floats, num_tokens: int) -> Parts:
    """Divides memory of `buffer_sizes` for each token."""
    num_heads, num_channels = layer.value_heads, _num_channels(layer)
    value_size = num_heads * layer.value_dim
    wide_size, channels_first = num_channels + value_size, num_tokens * value_size
    after_wide = mixed[num_tokens * wide_size :]
    after_narrow = after_wide[2 * num_tokens * num_heads :]
    after_decay = after_narrow[num_tokens * num_heads :]
    after_rate = after_decay[num_tokens * num_heads :]
    return Parts(
        mixed[: num_tokens * wide_size].reshape((num_tokens, wide_size)),
        after_wide[: 2 * num_tokens * num_heads].reshape((num_tokens, 2 * num_heads)),
        after_narrow[: num_tokens * num_heads].reshape((num_tokens, num_heads)),
        after_decay[: num_tokens * num_heads].reshape((num_tokens, num_heads)),
        after_rate[: num_tokens * value_size].reshape((num_tokens, num_heads, layer.value_dim)),
        attended[channels_first:].reshape((num_tokens, num_channels)),
        attended[:channels_first].reshape((num_tokens, value_size)),
    )


@njit(nogil=True)
def _advance(layer: Any, inputs: Inputs, parts: Parts, worker: int, num_workers: int) -> None:
    """A worker's share: every num_workers-th head of queries and keys of a row, with the heads of
    values that it serves."""
    num_heads, num_channels = layer.value_heads, _num_channels(layer)
    conv = array_at(layer.conv, (num_channels, layer.width), FLOAT32_LIKE)
    states = (layer.table_rows, layer.num_places, num_heads, layer.key_dim, layer.value_dim)
    matrices = array_at(layer.matrices, states, FLOAT32_LIKE)
    kept = (layer.table_rows, layer.num_inputs, num_channels)
    last_inputs = array_at(layer.inputs, kept, parts.channels)
    unit = 0
    for r in range(inputs.rows.shape[0]):
        row, query_len = inputs.rows[r], inputs.query_lens[r]
        first, last = inputs.starts[r], inputs.starts[r] + query_len
        for head in range(layer.key_heads):
            unit += 1
            if unit % num_workers != worker:
                continue
            for token in range(first, last):
                _split(layer, head, parts, token)
            advance_head(
                parts.channels[first:last], conv, parts.log_decay[first:last],
                parts.rate[first:last], matrices[row], last_inputs[row], parts.y[first:last],
                inputs.lens[r] - query_len, head, layer.key_heads,
            )  # fmt: skip
            for token in range(first, last):
                _gate(layer, head, parts, token)


@njit(nogil=True)
def _places(layer: Any, head: int) -> tuple[int, int, int]:
    """Returns where q, v and z of a head of queries and keys are in the first product."""
    per_group = layer.key_heads // layer.groups
    group, number = head // per_group, head % per_group
    keys = per_group * layer.key_dim
    size = layer.value_heads * layer.value_dim // layer.key_heads
    first = group * 2 * (keys + per_group * size)
    v = first + 2 * keys + number * size
    return first + number * layer.key_dim, v, v + per_group * size


@njit(nogil=True)
def _split(layer: Any, head: int, parts: Parts, token: int) -> None:
    """Writes the inputs of the recurrence for one head of queries and keys."""
    key_dim, key_size = layer.key_dim, layer.key_heads * layer.key_dim
    size = layer.value_heads * layer.value_dim // layer.key_heads  # of its values
    q, v, _ = _places(layer, head)
    k = q + key_size // layer.groups
    wide, channels = parts.wide[token], parts.channels[token]
    to_q, to_v = head * key_dim, 2 * key_size + head * size
    to_k = key_size + to_q
    narrow(wide[q : q + key_dim], channels[to_q : to_q + key_dim])
    narrow(wide[k : k + key_dim], channels[to_k : to_k + key_dim])
    narrow(wide[v : v + size], channels[to_v : to_v + size])
    decay = array_at(layer.decay, (layer.value_heads,), wide)
    dt_bias = array_at(layer.dt_bias, (layer.value_heads,), wide)
    per_group, per_key = layer.value_heads // layer.groups, layer.value_heads // layer.key_heads
    for own in range(head * per_key, (head + 1) * per_key):
        b = own // per_group * 2 * per_group + own % per_group
        parts.rate[token, own] = sigmoid(parts.narrow[token, b])
        a = parts.narrow[token, b + per_group] + dt_bias[own]
        softplus = max(a, np.float32(0)) + np.float32(math.log1p(math.exp(-abs(a))))
        parts.log_decay[token, own] = decay[own] * softplus


@njit(nogil=True)
def _gate(layer: Any, head: int, parts: Parts, token: int) -> None:
    """Writes the output of the heads of values of one head of queries and keys."""
    per_key, size = layer.value_heads // layer.key_heads, layer.value_dim
    _, _, z = _places(layer, head)
    weight = array_at(layer.norm, (size,), parts.wide)
    for own in range(head * per_key, (head + 1) * per_key):
        gate, y = parts.wide[token, z : z + size], parts.y[token, own]
        norm_row(y, weight, layer.eps, y)
        activate(gate, y, SILU, parts.attended)
        narrow(gate, parts.attended[token, own * size : (own + 1) * size])
        z += size
