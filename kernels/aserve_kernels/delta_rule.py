"""The recurrences of Gated DeltaNet and Mamba-2 for rows of a batch: short convolutions, then the
gated delta rule or a selective state space.

Channels hold what is to become queries, keys and values, one after the other. conv is causal and
has weights of its own for each channel:

    [q ; k ; v]_t = silu(sum_j w_j channels_{t - width + 1 + j})

A head of values keeps a matrix S [d_k, d_v], which maps keys to values. A token with the log decay
g <= 0 and the rate beta in (0, 1) changes it, and reads it. Its k has the length 1, and its q the
length d_k^-0.5. Each head of queries and keys serves several neighbouring heads of values.

    S = exp(g) S + k (beta (v - k^T exp(g) S))        y = q^T S

Many tokens are computed in chunks. With c the running sum of g within a chunk, and L the strictly
lower triangle, the corrections u of all its tokens solve one triangular system, and products of
matrices do the rest:

    (I + L(beta k k^T exp(c_i - c_j))) u = beta (v - exp(c) k S)
    y = exp(c) q S + lower(q k^T exp(c_i - c_j)) u
    S = exp(c_last) S + (exp(c_last - c) k)^T u

The selective state space of Mamba-2 (`StateSpace`) is this recurrence without the correction. Its
channels are values, keys and queries in this order, which the paper calls x, B and C. With the step
dt as the rate and the skip D of a head:

    [x ; B ; C]_t = silu(bias + sum_j w_j channels_{t - width + 1 + j})
    S = exp(g) S + B (dt x)        y = C^T S + D x

Without the correction there is no system to solve: u = dt x.

A row keeps the matrices, and the inputs of conv for its last tokens; a row without KV begins with
zeros. It keeps the matrices after each of its last S tokens, by position, so a forward may begin
before any of these: tokens that are rejected cost nothing. The matrix before position p has the
place p mod S, and the input of position p has the place p mod M.

Source: https://arxiv.org/abs/2412.06464 (Gated DeltaNet), and for the form in chunks
https://arxiv.org/abs/2406.06484; https://arxiv.org/abs/2405.21060 (Mamba-2)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64  # tokens
LENGTH_EPS = 1e-6  # added to the squared lengths of queries and keys, in the reference code


@dataclass(frozen=True, slots=True)
class DeltaStates:
    """The states of one layer, by row; row 0 is padding. A forward of S tokens does not overwrite
    the inputs that it reads: M = S + width - 1."""

    matrices: Tensor  # [max_rows + 1, S, value heads, d_k, d_v], at least float32
    inputs: Tensor  # [max_rows + 1, M, channels], the last inputs of conv


@dataclass(frozen=True, slots=True)
class StateSpace:
    """The weights that the recurrence of a selective state space has beside those of conv."""

    bias: Tensor  # [channels], of conv, at least float32
    skip: Tensor  # [value heads], at least float32


@dataclass(frozen=True, slots=True)
class DeltaTokens:
    """The tokens of one forward, before conv."""

    channels: Tensor  # [tokens, channels]
    conv: Tensor  # [channels, width]
    log_decay: Tensor  # [tokens, value heads], at least float32
    rate: Tensor  # [tokens, value heads]
    space: StateSpace | None = None  # None: the delta rule


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """The rows of one forward. Tensors are int64."""

    rows: Tensor  # [rows], their numbers
    kv_lens: Tensor  # [rows], before this forward
    query_lens: Tensor  # [rows]
    cu_query_lens: Tensor  # [rows + 1]
    token_to_row: Tensor  # [tokens], index into rows
    query_lens_cpu: npt.NDArray[np.int32]  # [rows]


class AdvanceRows(Protocol):
    def __call__(self, tokens: DeltaTokens, rows: DeltaRows, states: DeltaStates, /) -> Tensor:
        """Does what `advance_rows_ref` does."""


def advance_rows_ref(tokens: DeltaTokens, rows: DeltaRows, states: DeltaStates) -> Tensor:
    """Advances the states of the rows by their tokens -> y [tokens, value heads, d_v], of the
    states' dtype. The host reads `query_lens_cpu` alone, so that the operators can be captured."""
    space = tokens.space
    mixed = convolve_rows(tokens.channels, tokens.conv, rows, states.inputs)
    if space is not None:
        mixed += space.bias
    channels = functional.silu(mixed).to(states.matrices.dtype)
    split = _delta_parts if space is None else _space_parts
    q, k, v = split(channels, states.matrices)
    parts = (q, k, v, tokens.log_decay, tokens.rate.to(v.dtype))
    out = torch.empty_like(v)
    for run in runs_of(rows.query_lens_cpu):
        own, begins = rows.rows[run.rows], rows.kv_lens[run.rows]
        each = [part[run.tokens].unflatten(0, (len(own), -1)) for part in parts]
        given = DeltaInputs(space is None, *each)
        out[run.tokens] = _advance_run(given, own, begins, states.matrices).flatten(0, 1)
    return out if space is None else out.addcmul_(v, space.skip[:, None].to(v.dtype))


def _delta_parts(channels: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k [tokens, heads, d_k] and v [tokens, heads, d_v] of the delta rule."""
    num_heads, key_dim, value_dim = matrices.shape[2:]
    value_size = num_heads * value_dim
    qk, v = channels.split((channels.shape[1] - value_size, value_size), -1)
    q, k = (_normalised(x.unflatten(-1, (-1, key_dim))) for x in qk.chunk(2, dim=-1))
    q = _of_each_head(q * key_dim**-0.5, num_heads)
    return q, _of_each_head(k, num_heads), v.unflatten(-1, (num_heads, value_dim))


def _space_parts(channels: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Does the same for a state space."""
    num_heads, key_dim, value_dim = matrices.shape[2:]
    value_size = num_heads * value_dim
    v, kq = channels.split((value_size, channels.shape[1] - value_size), -1)
    k, q = (_of_each_head(x.unflatten(-1, (-1, key_dim)), num_heads) for x in kq.chunk(2, dim=-1))
    return q, k, v.unflatten(-1, (num_heads, value_dim))


def _of_each_head(x: Tensor, num_heads: int) -> Tensor:
    """x [tokens, heads of keys, d_k] -> [tokens, heads, d_k]: neighbouring heads share one."""
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _advance_run(inputs: DeltaInputs, rows: Tensor, begins: Tensor, matrices: Tensor) -> Tensor:
    """Returns y [rows, tokens, heads, d_v] of rows whose tokens begin at these positions, and
    leaves the matrices after the last tokens."""
    num_tokens, num_places = inputs.v.shape[1], matrices.shape[1]
    states = matrices[rows, begins % num_places]
    states.masked_fill_((begins == 0)[:, None, None, None], 0)
    parts, start = [], 0
    for end in range(max(num_tokens - num_places, 0) + 1, num_tokens + 1):
        parts.append(delta_rule(inputs.tokens(start, end), states))
        matrices[rows, (begins + end) % num_places] = states
        start = end
    return torch.cat(parts, dim=1)


def convolve_rows(x: Tensor, conv: Tensor, rows: DeltaRows, inputs: Tensor) -> Tensor:
    """x [tokens, channels], conv [channels, width] -> the causal convolution [tokens, channels], at
    least float32. Writes the rows' last inputs to `inputs` [max_rows + 1, M, channels].

    Each row's last inputs and its new ones stand one after the other in a table.
    """
    num_places, width = inputs.shape[1], conv.shape[1] - 1
    steps = torch.arange(width, device=x.device)
    numbers = torch.arange(len(rows.rows), device=x.device)
    begins = rows.cu_query_lens[:-1] + numbers * width
    places = torch.arange(len(x), device=x.device) + (rows.token_to_row + 1) * width
    positions = rows.kv_lens[:, None] - width + steps
    before = inputs[rows.rows[:, None], positions % num_places]
    before.masked_fill_((positions < 0)[..., None], 0)
    table = x.new_empty(len(x) + len(rows.rows) * width, x.shape[1])
    table.index_copy_(0, (begins[:, None] + steps).flatten(), before.flatten(0, 1))
    table.index_copy_(0, places, x)
    _keep_inputs(x, rows, inputs)
    wide = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros_like(x, dtype=wide)
    for tap, weight in enumerate(conv.to(wide).unbind(1)):
        out.addcmul_(table.index_select(0, places - width + tap).to(wide), weight)
    return out


def _keep_inputs(x: Tensor, rows: DeltaRows, inputs: Tensor) -> None:
    """Writes the inputs of each row's last tokens."""
    num_places = inputs.shape[1]
    back = torch.arange(num_places, device=x.device)
    places = (rows.kv_lens + rows.query_lens - 1)[:, None] - back
    target = (rows.rows[:, None], places % num_places)
    new = x[(rows.cu_query_lens[1:, None] - 1 - back).clamp(min=0)]
    inputs[target] = torch.where((places >= rows.kv_lens[:, None])[..., None], new, inputs[target])


def _normalised(x: Tensor) -> Tensor:
    """x / |x|, of each head."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + LENGTH_EPS)


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring rows of a forward with equally many tokens."""

    rows: slice
    tokens: slice


def runs_of(query_lens: npt.NDArray[np.int32]) -> tuple[Run, ...]:
    """Returns the runs of a forward, in order. All decodes of a step are mostly one run."""
    ends = [*(np.flatnonzero(np.diff(query_lens)) + 1).tolist(), len(query_lens)]
    tokens = np.concatenate(([0], np.cumsum(query_lens))).tolist()
    starts = [0, *ends[:-1]]
    return tuple(
        Run(slice(first, end), slice(tokens[first], tokens[end]))
        for first, end in zip(starts, ends, strict=True)
    )


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """The inputs of rows with equally many tokens, at least float32. Those of the delta rule are
    normalised and scaled. `corrects`: what a key already maps to is subtracted from its value."""

    corrects: bool
    q: Tensor  # [rows, tokens, heads, d_k]
    k: Tensor  # [rows, tokens, heads, d_k]
    v: Tensor  # [rows, tokens, heads, d_v]
    log_decay: Tensor  # [rows, tokens, heads]
    rate: Tensor  # [rows, tokens, heads]

    def tokens(self, first: int, stop: int) -> DeltaInputs:
        """Returns the inputs of some of the tokens."""
        parts = (self.q, self.k, self.v, self.log_decay, self.rate)
        return DeltaInputs(self.corrects, *(part[:, first:stop] for part in parts))


def delta_rule(inputs: DeltaInputs, states: Tensor) -> Tensor:
    """Returns y [rows, tokens, heads, d_v], and leaves the last state in `states` [rows, heads,
    d_k, d_v]."""
    if inputs.v.shape[1] == 1:
        return delta_rule_step(inputs, states)
    return delta_rule_chunks(inputs, states)


def delta_rule_step(inputs: DeltaInputs, states: Tensor) -> Tensor:
    """Does what `delta_rule` does, for one token of each row."""
    q, k, v = (x.squeeze(1).unsqueeze(-2) for x in (inputs.q, inputs.k, inputs.v))
    states.mul_(inputs.log_decay.squeeze(1).exp()[..., None, None])
    wanted = v - k @ states if inputs.corrects else v
    states.add_(k.mT * (wanted * inputs.rate.squeeze(1)[..., None, None]))
    return (q @ states).squeeze(-2).unsqueeze(1)


def delta_rule_chunks(inputs: DeltaInputs, states: Tensor) -> Tensor:
    """Does what `delta_rule` does, for any number of tokens."""
    num_tokens = inputs.v.shape[1]
    chunks = (inputs.tokens(first, first + CHUNK) for first in range(0, num_tokens, CHUNK))
    return torch.cat([_chunk(chunk, states) for chunk in chunks], dim=1)


def _chunk(inputs: DeltaInputs, states: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    num_tokens = v.shape[2]
    sums = inputs.log_decay.transpose(1, 2).cumsum(-1)
    decay, rate = sums.exp()[..., None], inputs.rate.transpose(1, 2)[..., None]
    # exp(c_i - c_j) of later tokens j would overflow, so these are left out before.
    later = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=v.device).triu(1)
    pairs = (sums[..., None] - sums[..., None, :]).masked_fill(later, -torch.inf).exp()
    change: Tensor = rate * v
    if inputs.corrects:
        system = (rate * (k @ k.mT) * pairs).tril(-1)
        wanted = rate * (v - decay * (k @ states))
        change = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = decay * (q @ states) + ((q @ k.mT) * pairs) @ change
    left = (sums[..., -1:] - sums).exp()[..., None]
    states.mul_(decay[..., -1:, :]).add_((left * k).mT @ change)
    return out.transpose(1, 2)
