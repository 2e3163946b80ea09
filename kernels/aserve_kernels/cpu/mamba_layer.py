"""The compiled form of a Mamba-2 layer, from behind its first product to the input of its last one.

    [z ; channels ; dt] = factors * the first product
    step = clamp(softplus(dt + dt_bias), low, high)        g = -exp(A_log) step
    y = the recurrence of channels, g and the step (state_space.py)
    attended = norm(y * silu(z)), a norm for each group of heads; or norm(y) * silu(z); or no norm

It is a function of C that the layers call by its address, as delta_layer.py. Channels are rounded
to the model's dtype, in which a row keeps the last of them; all else is float32. The threads share
the heads of each row, and then the tokens.
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
from aserve_kernels.cpu.delta_layer import NUM_ARGUMENTS
from aserve_kernels.cpu.gated_mul import sigmoid
from aserve_kernels.cpu.layers_function import CALL_LIKE, inputs_of
from aserve_kernels.cpu.memory import FLOAT32_LIKE, INT64_LIKE, array_at
from aserve_kernels.cpu.precompile import FASTMATH, NO_REFCOUNT
from aserve_kernels.cpu.state_space import advance_space_head, convolve_head
from aserve_kernels.cpu.team import MEETING_LEN, Team, meet, share_of

# The record of a layer: sizes; the groups of the norm (0: none), and whether it is before the gate;
# the sizes of the buffers; how many states and inputs of conv a row keeps; the addresses of float32
# weights, of the factors of the first product [z + channels + heads] (0: all are 1), and of the
# states.
MAMBA: Any = np.dtype(
    [
        *[(name, np.int64) for name in ("heads", "head_dim", "groups", "state_dim", "width")],
        *[(name, np.int64) for name in ("norm_groups", "is_norm_first", "mixed", "attended")],
        *[(name, np.int64) for name in ("table_rows", "num_places", "num_inputs")],
        *[(name, np.int64) for name in ("conv", "bias", "decay", "dt_bias", "skip", "norm")],
        *[(name, np.int64) for name in ("factors", "matrices", "inputs")],
        *[(name, np.float32) for name in ("eps", "low", "high")],
    ],
    align=True,
)
MAMBA_LIKE = np.empty(0, MAMBA)


class Parts(NamedTuple):
    """Holds what a layer computes for the tokens of a forward. Workers share it."""

    wide: Float32s  # [tokens, z + channels + heads]
    log_decay: Float32s  # [tokens, heads]
    step: Float32s  # [tokens, heads]
    y: Float32s  # [tokens, heads, head_dim]
    values: Float32s  # [heads, tokens, head_dim]
    keys: Float32s  # [2 * groups, tokens, state_dim], then the queries
    factors: Float32s  # [z + channels + heads] of `wide`; [0]: all are 1
    channels: Floats  # [tokens, channels]
    attended: Floats  # [tokens, heads * head_dim]


def mamba_buffer_sizes(inner_size: int, num_channels: int, num_heads: int) -> tuple[int, int]:
    """Returns how many float32 and how many elements of the model's dtype the buffers of a layer
    have for each token, with its first product and its output."""
    return 2 * inner_size + 2 * num_channels + 3 * num_heads, inner_size + num_channels


def compile_mamba_layer(dtype: torch.dtype) -> None:
    mamba_layer_function(dtype)


@cache
def mamba_layer_function(dtype: torch.dtype) -> Callback:
    """Returns the function of layers of a model of this dtype, which all teams share."""
    like = empty_array((0,), dtype)

    def advance_mamba_at(
        record: int, address: int, x: int, mixed: int, attended: int, worker: int, num_workers: int
    ) -> None:
        layer = array_at(record, (1,), MAMBA_LIKE)[0]
        call = array_at(address, (1,), CALL_LIKE)[0]
        team = Team(worker, num_workers, array_at(call.meeting, (MEETING_LEN,), INT64_LIKE))
        num_tokens, inputs = call.num_tokens, inputs_of(call, 0, like)
        parts = _parts_in(
            layer,
            array_at(mixed, (num_tokens * layer.mixed,), FLOAT32_LIKE),
            array_at(attended, (num_tokens * layer.attended,), like),
            num_tokens,
        )
        meet(team)
        _convolve(layer, inputs, parts, team)
        meet(team)
        _advance(layer, inputs, parts, team)
        meet(team)
        _gate(layer, parts, team)

    return compile_callback(advance_mamba_at, NUM_ARGUMENTS)


@njit(nogil=True)
def _parts_in(layer: Any, mixed: Float32s, attended: Floats, num_tokens: int) -> Parts:
    """Divides memory of `mamba_buffer_sizes` for each token."""
    num_heads, inner_size = layer.heads, layer.heads * layer.head_dim
    num_keys = 2 * layer.groups
    num_channels = inner_size + num_keys * layer.state_dim
    wide_size = inner_size + num_channels + num_heads
    after_wide = mixed[num_tokens * wide_size :]
    after_decay = after_wide[num_tokens * num_heads :]
    after_step = after_decay[num_tokens * num_heads :]
    after_y = after_step[num_tokens * inner_size :]
    after_values = after_y[num_tokens * inner_size :]
    key_size = num_keys * num_tokens * layer.state_dim
    own = attended[: num_tokens * inner_size]
    channels = attended[num_tokens * inner_size : num_tokens * (inner_size + num_channels)]
    return Parts(
        mixed[: num_tokens * wide_size].reshape((num_tokens, wide_size)),
        after_wide[: num_tokens * num_heads].reshape((num_tokens, num_heads)),
        after_decay[: num_tokens * num_heads].reshape((num_tokens, num_heads)),
        after_step[: num_tokens * inner_size].reshape((num_tokens, num_heads, layer.head_dim)),
        after_y[: num_tokens * inner_size].reshape((num_heads, num_tokens, layer.head_dim)),
        after_values[:key_size].reshape((num_keys, num_tokens, layer.state_dim)),
        array_at(layer.factors, (wide_size if layer.factors != 0 else 0,), FLOAT32_LIKE),
        channels.reshape((num_tokens, num_channels)),
        own.reshape((num_tokens, inner_size)),
    )


@njit(nogil=True)
def _convolve(layer: Any, inputs: Inputs, parts: Parts, team: Team) -> None:
    """A worker's share of the inputs of the recurrence: every num_workers-th head of values, of
    keys or of queries of a row."""
    num_heads, num_channels = layer.heads, parts.channels.shape[1]
    conv = array_at(layer.conv, (num_channels, layer.width), FLOAT32_LIKE)
    bias = array_at(layer.bias, (num_channels,), FLOAT32_LIKE)
    kept = (layer.table_rows, layer.num_inputs, num_channels)
    last_inputs = array_at(layer.inputs, kept, parts.channels)
    unit = 0
    for r in range(inputs.rows.shape[0]):
        row, query_len = inputs.rows[r], inputs.query_lens[r]
        first, last = inputs.starts[r], inputs.starts[r] + query_len
        for head in range(num_heads + 2 * layer.groups):
            unit += 1
            if unit % team.num_workers != team.worker:
                continue
            if head < num_heads:
                _note_steps(layer, head, parts, first, last)
                channel, size = head * layer.head_dim, layer.head_dim
                target = parts.values[head, first:last]
            else:
                channel = num_heads * layer.head_dim + (head - num_heads) * layer.state_dim
                size, target = layer.state_dim, parts.keys[head - num_heads, first:last]
            place = num_heads * layer.head_dim + channel  # in the first product
            for token in range(first, last):
                own = parts.wide[token, place : place + size]
                _multiply(own, parts.factors[place : place + size])
                narrow(own, parts.channels[token, channel : channel + size])
            convolve_head(
                parts.channels[first:last], conv, bias, last_inputs[row],
                inputs.lens[r] - query_len, channel, target,
            )  # fmt: skip


@njit(nogil=True)
def _note_steps(layer: Any, head: int, parts: Parts, first: int, last: int) -> None:
    """Writes the steps of one head, and the logarithms of its decays."""
    decay = array_at(layer.decay, (layer.heads,), FLOAT32_LIKE)[head]
    dt_bias = array_at(layer.dt_bias, (layer.heads,), FLOAT32_LIKE)[head]
    place = parts.wide.shape[1] - layer.heads + head
    for token in range(first, last):
        _multiply(parts.wide[token, place : place + 1], parts.factors[place : place + 1])
        dt = parts.wide[token, place] + dt_bias
        softplus = max(dt, np.float32(0)) + np.float32(math.log1p(math.exp(-abs(dt))))
        step = min(max(softplus, layer.low), layer.high)
        parts.step[token, head] = step
        parts.log_decay[token, head] = decay * step


@njit(nogil=True, **NO_REFCOUNT)
def _multiply(x: Float32s, factors: Float32s) -> None:
    """Multiplies x by its factors, of which there may be none."""
    for i in range(factors.shape[0]):
        x[i] *= factors[i]


@njit(nogil=True)
def _advance(layer: Any, inputs: Inputs, parts: Parts, team: Team) -> None:
    """A worker's share: every num_workers-th head of a row."""
    states = (layer.table_rows, layer.num_places, layer.heads, layer.state_dim, layer.head_dim)
    matrices = array_at(layer.matrices, states, FLOAT32_LIKE)
    skip = array_at(layer.skip, (layer.heads,), FLOAT32_LIKE)
    unit, per_group = 0, layer.heads // layer.groups
    for r in range(inputs.rows.shape[0]):
        row, query_len = inputs.rows[r], inputs.query_lens[r]
        first, last = inputs.starts[r], inputs.starts[r] + query_len
        for head in range(layer.heads):
            unit += 1
            if unit % team.num_workers != team.worker:
                continue
            key = head // per_group
            advance_space_head(
                parts.keys[layer.groups + key, first:last], parts.keys[key, first:last],
                parts.values[head, first:last], parts.log_decay[first:last],
                parts.step[first:last], matrices[row], parts.y[first:last],
                inputs.lens[r] - query_len, head, skip[head],
            )  # fmt: skip


@njit(nogil=True, fastmath=FASTMATH, error_model="numpy")
def _gate(layer: Any, parts: Parts, team: Team) -> None:
    """Writes the output of a worker's share of the tokens."""
    num_tokens, inner_size = parts.attended.shape
    first, last = share_of(num_tokens, team)
    outputs = parts.y.reshape((num_tokens, inner_size))
    for token in range(first, last):
        z, y = parts.wide[token, :inner_size], outputs[token]
        _multiply(z, parts.factors[:inner_size])
        if layer.is_norm_first != 0:
            _norm_groups(layer, y)
        for i in range(np.uint64(inner_size)):
            z[i] = z[i] * sigmoid(z[i]) * y[i]
        if layer.is_norm_first == 0:
            _norm_groups(layer, z)
        narrow(z, parts.attended[token])


@njit(nogil=True)
def _norm_groups(layer: Any, x: Float32s) -> None:
    """Normalises each group of the elements of a token, if there is a norm."""
    if layer.norm_groups == 0:
        return
    weight, size = array_at(layer.norm, x.shape, x), x.shape[0] // layer.norm_groups
    for place in range(0, x.shape[0], size):
        own = x[place : place + size]
        norm_row(own, weight[place : place + size], layer.eps, own)
