"""The compiled form of a short convolution with gates, from its first product to the input of its
last one.

    [b ; c ; u] = the first product        attended = c * (conv(b * u) + bias)

It is a function of C that the layers call by its address, as delta_layer.py. What conv reads is
rounded to the model's dtype, in which a row keeps the last of it; all else is float32. The threads
share the channels.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit

from aserve_kernels.cpu.bf16 import Float32s, Floats, empty_array, narrow, widen
from aserve_kernels.cpu.callback import Callback, compile_callback
from aserve_kernels.cpu.decoder_layers import Inputs
from aserve_kernels.cpu.delta_layer import NUM_ARGUMENTS
from aserve_kernels.cpu.layers_function import CALL_LIKE, inputs_of
from aserve_kernels.cpu.memory import FLOAT32_LIKE, INT64_LIKE, array_at, scratch
from aserve_kernels.cpu.precompile import FASTMATH
from aserve_kernels.cpu.team import MEETING_LEN, Team, meet, share_of

# The record of a layer: sizes; the sizes of the buffers; how many inputs a row keeps; the addresses
# of the float32 weights [taps, channels] and [channels] (0: no bias), and of the inputs.
SHORT_CONV: Any = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("channels", "taps", "mixed", "attended", "table_rows", "num_inputs"),
            *("conv", "bias", "inputs"),
        )
    ]
)
SHORT_CONV_LIKE = np.empty(0, SHORT_CONV)


class Parts(NamedTuple):
    """Holds what a layer computes for the tokens of a forward, and its weights."""

    mixed: Float32s  # [tokens, 3 * channels]: b, c and u
    x: Floats  # [tokens, channels], b * u
    attended: Floats  # [tokens, channels]
    conv: Float32s  # [taps, channels]
    bias: Float32s  # [channels]


def conv_buffer_sizes(num_channels: int) -> tuple[int, int]:
    """Returns how many float32 and how many elements of the model's dtype the buffers of a layer
    have for each token, with its first product and its output."""
    return 3 * num_channels, 2 * num_channels


def compile_conv_layer(dtype: torch.dtype) -> None:
    conv_layer_function(dtype)


@cache
def conv_layer_function(dtype: torch.dtype) -> Callback:
    """Returns the function of layers of a model of this dtype, which all teams share."""
    like = empty_array((0,), dtype)

    def advance_conv_at(
        record: int, address: int, x: int, mixed: int, attended: int, worker: int, num_workers: int
    ) -> None:
        layer = array_at(record, (1,), SHORT_CONV_LIKE)[0]
        call = array_at(address, (1,), CALL_LIKE)[0]
        team = Team(worker, num_workers, array_at(call.meeting, (MEETING_LEN,), INT64_LIKE))
        num_tokens, size = call.num_tokens, layer.channels
        buffer = array_at(attended, (2, num_tokens, size), like)
        parts = Parts(
            array_at(mixed, (num_tokens, 3 * size), FLOAT32_LIKE),
            buffer[1],
            buffer[0],
            array_at(layer.conv, (layer.taps, size), FLOAT32_LIKE),
            array_at(layer.bias, (size if layer.bias != 0 else 0,), FLOAT32_LIKE),
        )
        inputs = array_at(layer.inputs, (layer.table_rows, layer.num_inputs, size), like)
        meet(team)
        _advance(inputs_of(call, 0, like), parts, inputs, team)

    return compile_callback(advance_conv_at, NUM_ARGUMENTS)


@njit(nogil=True)
def _advance(inputs: Inputs, parts: Parts, kept: Floats, team: Team) -> None:
    """A worker's share of the channels. `kept` [rows, places, channels] are the rows' inputs."""
    first, stop = share_of(parts.x.shape[1], team)
    own, total = scratch((stop - first,), FLOAT32_LIKE), scratch((stop - first,), FLOAT32_LIKE)
    num_places = kept.shape[1]
    for r in range(inputs.rows.shape[0]):
        row, num_tokens, start = inputs.rows[r], inputs.query_lens[r], inputs.starts[r]
        begin = inputs.lens[r] - num_tokens
        for token in range(start, start + num_tokens):
            _multiply(parts, token, first, stop, own)
        for index in range(num_tokens):
            _convolve(parts, kept[row], start, index, begin, first, own, total)
        for index in range(max(num_tokens - num_places, 0), num_tokens):
            place = (begin + index) % num_places
            for c in range(first, stop):
                kept[row, place, c] = parts.x[start + index, c]


@njit(nogil=True, fastmath=FASTMATH, error_model="numpy")
def _multiply(parts: Parts, token: int, first: int, stop: int, own: Float32s) -> None:
    """Writes the inputs of conv for the channels from `first` on."""
    size = parts.x.shape[1]
    b = parts.mixed[token, first:stop]
    u = parts.mixed[token, 2 * size + first : 2 * size + stop]
    for i in range(np.uint64(stop - first)):
        own[i] = b[i] * u[i]
    narrow(own, parts.x[token, first:stop])


@njit(nogil=True, fastmath=FASTMATH, error_model="numpy")
def _convolve(
    parts: Parts, kept: Floats, start: int, index: int, begin: int, first: int, own: Float32s,
    total: Float32s,
) -> None:  # fmt: skip
    """Writes the output of token `index` of a row whose tokens begin at `start`, and whose first
    one has the position `begin`."""
    count, size, taps = own.shape[0], parts.x.shape[1], parts.conv.shape[0]
    stop = first + count
    total[:] = np.float32(0)
    if parts.bias.shape[0] != 0:
        total[:] = parts.bias[first:stop]
    for tap in range(taps):
        source = index + tap - (taps - 1)
        if begin + source < 0:
            continue
        if source < 0:
            widen(kept[(begin + source) % kept.shape[0], first:stop], own)
        else:
            widen(parts.x[start + source, first:stop], own)
        weight = parts.conv[tap, first:stop]
        for i in range(np.uint64(count)):
            total[i] += own[i] * weight[i]
    gate = parts.mixed[start + index, size + first : size + stop]
    for i in range(np.uint64(count)):
        total[i] *= gate[i]
    narrow(total, parts.attended[start + index, first:stop])
