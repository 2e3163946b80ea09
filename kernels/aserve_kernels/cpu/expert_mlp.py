"""The compiled form of a mixture of experts, in place of a layer's gated MLP.

    y = sum over the chosen experts e of w_e * mlp_e(x)  [+ sigmoid(x w_g) * shared(x)]

Of MLPs without gates, which some activations stand for (gated_mul.py), `gate_up` is up alone.

Scores, choice and weights are those of aserve/gpu/moe/routing.py, in float32. Of experts that score
alike, those with lower numbers are chosen; torch promises no order. Logits are not rounded to the
model's dtype, so that few score alike.

It is a function of C that the layers call by its address, as delta_layer.py. The rows of an expert,
which are copies of the tokens that chose it, pass over its weights together, so a step reads each
chosen expert once. Threads share the products by outputs, as those of other layers, and meet after
all experts' gates and ups. An output of down is added up by the thread that has computed it, over a
token's experts in the order of their choice, so a token's sum is the same in every batch.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit

from aserve_kernels.cpu.bf16 import Float32s, Floats, empty_array
from aserve_kernels.cpu.callback import Callback, compile_callback
from aserve_kernels.cpu.decoder_layers import Records, gate_share
from aserve_kernels.cpu.gated_mul import Gate, num_inner_parts, sigmoid
from aserve_kernels.cpu.layers_function import CALL_LIKE, mixer_buffers_of
from aserve_kernels.cpu.memory import FLOAT32_LIKE, INT32_LIKE, INT64_LIKE, array_at, scratch
from aserve_kernels.cpu.precompile import FASTMATH
from aserve_kernels.cpu.product import PRODUCT, RECORD_LIKE, multiply_by
from aserve_kernels.cpu.step_function import Int32s
from aserve_kernels.cpu.team import MEETING_LEN, Team, meet, share_of
from aserve_kernels.cpu.tiles import outputs_of

SOFTMAX, SIGMOID, LOGITS = range(3)  # `scores`: the function from logits to scores
LOWEST = np.float32(np.finfo(np.float32).min)  # below the score of any expert that may be chosen
TAKEN = np.float32(-np.inf)
TINY = np.float32(1e-20)  # as in routing.py

# The record of a mixture: the products of the router and of the MLP that all tokens share (none: of
# address 0); the addresses of arrays of PRODUCT, of gate and up and of down of each expert; the
# address of the float32 bias [experts] of the choice (0: none); sizes; how many groups of experts
# there are, how many are kept, and how many scores of a group are summed (0: no groups).
MIXTURE: Any = np.dtype(
    [
        *[(name, PRODUCT) for name in ("router", "shared_gate_up", "shared_down", "shared_gate")],
        *[(name, np.int64) for name in ("gate_ups", "downs", "bias")],
        *[(name, np.int64) for name in ("hidden", "count", "size", "shared_size", "activation")],
        *[(name, np.int64) for name in ("top_k", "scores", "is_normalised")],
        *[(name, np.int64) for name in ("groups", "kept_groups", "summed_scores")],
        *[(name, np.float32) for name in ("factor", "gate_factor", "limit")],
    ],
    align=True,
)
MIXTURE_LIKE = np.empty(0, MIXTURE)
# The addresses of the record, of the layers' CALL, of the MLP's input and of its output; the number
# of tokens, the worker and the number of workers.
NUM_ARGUMENTS = 7


class Parts(NamedTuple):
    """Holds what a layer computes for the tokens of a forward. Workers share it. A row is a token
    beside one of its experts; rows are in the order of experts."""

    scores: Float32s  # [tokens, experts]
    experts: Int32s  # [tokens, k]
    weights: Float32s  # [tokens, k]
    gate: Float32s  # [tokens, 1] of the shared MLP
    gate_up: Float32s  # [rows, 2 * size], or [rows, size] without gates
    down: Float32s  # [rows, hidden]
    shared_gate_up: Float32s  # [tokens, 2 * shared size], or [tokens, shared size]
    shared_down: Float32s  # [tokens, hidden]
    rows: Floats  # [rows, hidden]
    gated: Floats  # [rows, size]
    shared_gated: Floats  # [tokens, shared size]


class Places(NamedTuple):
    """Says where the rows of tokens and of experts are."""

    rows: Int32s  # [tokens, k]
    ends: Int32s  # [experts]: an expert's rows end where those of the next one begin


def mixture_sizes(
    num_experts: int, top_k: int, hidden: int, size: int, shared_size: int
) -> tuple[int, int]:
    """Returns how many float32 and how many elements of the model's dtype suffice for each token of
    a layer."""
    has_shared = int(shared_size > 0)
    wide = num_experts + 2 * top_k + top_k * (2 * size + hidden)
    return (
        wide + 2 * shared_size + (1 + hidden) * has_shared,
        top_k * (hidden + size) + shared_size,
    )


def compile_expert_mlp(dtype: torch.dtype) -> None:
    expert_mlp_function(dtype)


@cache
def expert_mlp_function(dtype: torch.dtype) -> Callback:
    """Returns the function of layers of a model of this dtype, which all teams share."""
    like = empty_array((0,), dtype)

    def run_experts_at(
        record: int, address: int, x: int, added: int, num_tokens: int, worker: int,
        num_workers: int,
    ) -> None:  # fmt: skip
        layer = array_at(record, (1,), MIXTURE_LIKE)[0]
        call = array_at(address, (1,), CALL_LIKE)[0]
        team = Team(worker, num_workers, array_at(call.meeting, (MEETING_LEN,), INT64_LIKE))
        shape = (num_tokens, layer.hidden)
        inputs, out = array_at(x, shape, like), array_at(added, shape, FLOAT32_LIKE)
        parts = _parts_at(layer, mixer_buffers_of(call, layer.hidden), num_tokens, inputs)
        _route(layer, inputs, parts, team)
        places = Places(
            scratch((num_tokens, layer.top_k), INT32_LIKE), scratch((layer.count,), INT32_LIKE)
        )
        _sort_by_expert(parts.experts, places)
        _copy_rows(inputs, places, parts.rows, team)
        meet(team)
        _multiply_gates_and_ups(layer, inputs, places, parts, team)
        meet(team)
        gate = Gate(layer.activation, layer.gate_factor, layer.limit)
        gate_share(parts.gate_up, gate, parts.gated, team)
        gate_share(parts.shared_gate_up, gate, parts.shared_gated, team)
        meet(team)
        _multiply_downs(layer, places, parts, team)
        _add_up(layer, places, parts, out, team)

    return compile_callback(run_experts_at, NUM_ARGUMENTS)


@njit(nogil=True)
def _parts_at(layer: Any, buffers: tuple[int, int], num_tokens: int, like: Floats) -> Parts:
    """Divides memory of `mixture_sizes`, at these addresses."""
    wide, narrow = buffers
    num_rows, has_shared = num_tokens * layer.top_k, int(layer.shared_size > 0)
    num_parts = num_inner_parts(layer.activation)
    shapes = (
        (num_tokens, layer.count),
        (num_tokens, layer.top_k),
        (num_tokens, layer.top_k),
        (num_tokens, has_shared),
        (num_rows, num_parts * layer.size),
        (num_rows, layer.hidden),
        (num_tokens, num_parts * layer.shared_size),
        (num_tokens, layer.hidden * has_shared),
    )
    starts, end = scratch((8,), INT64_LIKE), wide
    for index, shape in enumerate(shapes):
        starts[index] = end
        end += shape[0] * shape[1] * FLOAT32_LIKE.itemsize
    size = like.itemsize
    gated = narrow + num_rows * layer.hidden * size
    return Parts(
        array_at(starts[0], shapes[0], FLOAT32_LIKE),
        array_at(starts[1], shapes[1], INT32_LIKE),
        array_at(starts[2], shapes[2], FLOAT32_LIKE),
        array_at(starts[3], shapes[3], FLOAT32_LIKE),
        array_at(starts[4], shapes[4], FLOAT32_LIKE),
        array_at(starts[5], shapes[5], FLOAT32_LIKE),
        array_at(starts[6], shapes[6], FLOAT32_LIKE),
        array_at(starts[7], shapes[7], FLOAT32_LIKE),
        array_at(narrow, (num_rows, layer.hidden), like),
        array_at(gated, (num_rows, layer.size), like),
        array_at(gated + num_rows * layer.size * size, (num_tokens, layer.shared_size), like),
    )


@njit(nogil=True)
def _route(layer: Any, x: Floats, parts: Parts, team: Team) -> None:
    """Chooses the experts of all tokens, which the workers share."""
    multiply_by(layer.router, x, parts.scores, team.worker, team.num_workers)
    meet(team)
    first, last = share_of(x.shape[0], team)
    bias = array_at(layer.bias, (layer.count if layer.bias != 0 else 0,), FLOAT32_LIKE)
    choice = scratch((layer.count,), FLOAT32_LIKE)
    for token in range(first, last):
        route_token(
            layer, parts.scores[token], bias, choice, parts.experts[token], parts.weights[token]
        )
    meet(team)


@njit(nogil=True)
def route_token(
    layer: Any, scores: Float32s, bias: Float32s, choice: Float32s, experts: Int32s,
    weights: Float32s,
) -> None:  # fmt: skip
    """Turns logits into scores [experts], in place, and writes the chosen experts and their weights
    [k], the best first. bias [experts] or [0]; choice [experts] is scratch memory."""
    num_experts = scores.shape[0]
    if layer.scores == SOFTMAX:
        _softmax(scores)
    elif layer.scores == SIGMOID:
        for e in range(num_experts):
            scores[e] = np.float32(1) / (np.float32(1) + np.float32(math.exp(-scores[e])))
    for e in range(num_experts):
        choice[e] = scores[e]
        if bias.shape[0] != 0:
            choice[e] += bias[e]
    if layer.groups != 0:
        _leave_groups(layer, choice)
    for e in range(num_experts):
        if not choice[e] > LOWEST:  # nor a NaN, of which there may be as many as experts
            choice[e] = LOWEST
    for k in range(experts.shape[0]):
        experts[k] = _take_best(choice)
        weights[k] = scores[experts[k]]
    if layer.scores == LOGITS:
        _softmax(weights)
    elif layer.is_normalised != 0:
        total = TINY
        for k in range(weights.shape[0]):
            total += weights[k]
        for k in range(weights.shape[0]):
            weights[k] /= total
    for k in range(weights.shape[0]):
        weights[k] *= layer.factor


@njit(nogil=True)
def _softmax(x: Float32s) -> None:
    most = x[0]
    for i in range(x.shape[0]):
        most = max(most, x[i])
    total = np.float32(0)
    for i in range(x.shape[0]):
        x[i] = np.float32(math.exp(x[i] - most))
        total += x[i]
    for i in range(x.shape[0]):
        x[i] /= total


@njit(nogil=True)
def _take_best(choice: Float32s) -> int:
    """Returns the number of the highest score, of several the lowest number, and marks it."""
    best = 0
    for e in range(1, choice.shape[0]):
        if choice[e] > choice[best]:
            best = e
    choice[best] = TAKEN
    return best


@njit(nogil=True)
def _leave_groups(layer: Any, choice: Float32s) -> None:
    """Gives the lowest score to experts outside of the best groups."""
    size = layer.count // layer.groups
    sums, rest = scratch((layer.groups,), FLOAT32_LIKE), scratch((size,), FLOAT32_LIKE)
    for group in range(layer.groups):
        own = choice[group * size : (group + 1) * size]
        rest[:] = own
        sums[group] = np.float32(0)
        for _ in range(layer.summed_scores):
            sums[group] += own[_take_best(rest)]
    for _ in range(layer.kept_groups):
        _take_best(sums)
    for group in range(layer.groups):
        if sums[group] != TAKEN:
            choice[group * size : (group + 1) * size] = LOWEST


@njit(nogil=True)
def _sort_by_expert(experts: Int32s, places: Places) -> None:
    """Gives a row to each of experts [tokens, k]. All workers do so by themselves."""
    num_tokens, top_k = experts.shape
    rows, ends = places
    ends[:] = 0
    for token in range(num_tokens):
        for k in range(top_k):
            ends[experts[token, k]] += 1
    total = 0
    for e in range(ends.shape[0]):
        total, ends[e] = total + ends[e], total
    for token in range(num_tokens):
        for k in range(top_k):
            expert = experts[token, k]
            rows[token, k] = ends[expert]
            ends[expert] += 1


@njit(nogil=True)
def _copy_rows(x: Floats, places: Places, rows: Floats, team: Team) -> None:
    """Copies the tokens of a worker's share."""
    first, last = share_of(x.shape[0] * places.rows.shape[1], team)
    for index in range(first, last):
        token, k = divmod(index, places.rows.shape[1])
        target, source = rows[places.rows[token, k]], x[token]
        for i in range(source.shape[0]):
            target[i] = source[i]


@njit(nogil=True)
def _multiply_gates_and_ups(
    layer: Any, x: Floats, places: Places, parts: Parts, team: Team
) -> None:
    products = array_at(layer.gate_ups, (layer.count,), RECORD_LIKE)
    _multiply_rows(products, places.ends, parts.rows, parts.gate_up, team)
    if layer.shared_size != 0:
        multiply_by(layer.shared_gate_up, x, parts.shared_gate_up, team.worker, team.num_workers)
    if layer.shared_gate.product != 0:
        multiply_by(layer.shared_gate, x, parts.gate, team.worker, team.num_workers)


@njit(nogil=True)
def _multiply_downs(layer: Any, places: Places, parts: Parts, team: Team) -> None:
    products = array_at(layer.downs, (layer.count,), RECORD_LIKE)
    _multiply_rows(products, places.ends, parts.gated, parts.down, team)
    if layer.shared_size != 0:
        gated, out = parts.shared_gated, parts.shared_down
        multiply_by(layer.shared_down, gated, out, team.worker, team.num_workers)


@njit(nogil=True)
def _multiply_rows(products: Records, ends: Int32s, x: Floats, out: Float32s, team: Team) -> None:
    """Multiplies each expert's rows by its own weight: a worker's share of the outputs."""
    start = 0
    for e in range(ends.shape[0]):
        if start < ends[e]:
            own = slice(start, ends[e])
            multiply_by(products[e], x[own], out[own], team.worker, team.num_workers)
        start = ends[e]


@njit(nogil=True, fastmath=FASTMATH, error_model="numpy")
def _add_up(layer: Any, places: Places, parts: Parts, out: Float32s, team: Team) -> None:
    """Writes the sums of the outputs that this worker has computed."""
    first, last = outputs_of(layer.hidden, team.worker, team.num_workers)
    size = np.uint64(last - first)  # PERF: unsigned, as in rope_and_store_kv.py
    for token in range(out.shape[0]):
        total = out[token, first:last]
        total[:] = np.float32(0)
        for k in range(places.rows.shape[1]):
            row, weight = parts.down[places.rows[token, k], first:last], parts.weights[token, k]
            for i in range(size):
                total[i] += weight * row[i]
        if layer.shared_size != 0:
            gate = np.float32(1)
            if layer.shared_gate.product != 0:
                gate = sigmoid(parts.gate[token, 0])
            row = parts.shared_down[token, first:last]
            for i in range(size):
                total[i] += gate * row[i]
