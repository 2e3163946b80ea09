"""The states of recurrent layers, which rows keep beside their KV.

A forward of a row reads the state before its first token, and writes those after its last ones, as
many as a step may reject; a row without KV begins with zeros, so that nothing has to be cleared
when a row is given to another request. Steps run in order on one stream, so a row needs no older
states: rows whose results are dropped begin anew (`DecodeCaps.is_recurrent`), at a checkpoint
(step/state_checkpoints.py) or with their first token.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import msgspec
import torch
from torch import Tensor

from aserve.errors import BugError, ConfigError
from aserve.gpu.attention.base import AttentionBackend, StaticPlans
from aserve.gpu.attention.select import Attention
from aserve.gpu.device.ops import DeviceOps
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec
from aserve.gpu.models.base import Attend, CausalModel
from aserve.gpu.models.recurrent import RecurrentSpec, is_recurrent, recurrent_layers_of
from aserve.gpu.parallel.collectives import Collectives
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.gpu.step.resolve import DeviceState
from aserve.gpu.weights.source import wide_dtype
from aserve.messages.base import MIB
from aserve.messages.executor import DecodeCaps, EngineSpec
from aserve_kernels.delta_rule import (
    AdvanceRows,
    DeltaRows,
    DeltaStates,
    DeltaTokens,
    convolve_rows,
)

CHECKPOINT_PART = 4  # of the memory for KV, where their number is not given


class RecurrentBackend:
    """An `AttentionBackend` for models with recurrent layers, around one for the other layers."""

    __slots__ = ("_advance", "_inner", "states")

    def __init__(
        self, inner: AttentionBackend, states: Mapping[int, DeltaStates], advance: AdvanceRows
    ) -> None:
        self._inner = inner
        self._advance = advance
        self.states = states  # by layer; written by `_Advance` only

    @property
    def size_bytes(self) -> int:
        tables = self.states.values()
        return sum(table.matrices.nbytes + table.inputs.nbytes for table in tables)

    @property
    def static_plans(self) -> StaticPlans | None:
        return self._inner.static_plans

    def plan(self, batch: ForwardBatch) -> object:
        return self._inner.plan(batch)

    def bind(self, batch: ForwardBatch, plan: object) -> Attend:
        attend = self._inner.bind(batch, plan)
        return _Advance(attend, batch, self.states, self._advance)


class _Advance:
    """The `RecurrentAttend` of one forward."""

    __slots__ = ("_advance", "_attend", "_rows", "_states")

    def __init__(
        self,
        attend: Attend,
        batch: ForwardBatch,
        states: Mapping[int, DeltaStates],
        advance: AdvanceRows,
    ) -> None:
        if batch.tree_mask is not None:
            raise BugError(f"step {batch.iteration}: a recurrent layer cannot verify a draft tree")
        self._attend = attend
        self._states = states
        self._advance = advance
        self._rows = DeltaRows(
            batch.rows,
            batch.kv_lens,
            batch.query_lens,
            batch.cu_query_lens,
            batch.token_to_row,
            batch.query_lens_cpu,
        )

    def __call__(self, layer: LayerSpec, inputs: AttentionInputs, /) -> Tensor:
        return self._attend(layer, inputs)

    def advance(self, layer: RecurrentSpec, tokens: DeltaTokens, /) -> Tensor:
        return self._advance(tokens, self._rows, self._states[layer.index])

    def convolve(self, layer: RecurrentSpec, x: Tensor, conv: Tensor, /) -> Tensor:
        return convolve_rows(x, conv, self._rows, self._states[layer.index].inputs)


def empty_states(
    model: CausalModel, spec: EngineSpec, zeros: Callable[[tuple[int, ...], torch.dtype], Tensor]
) -> Mapping[int, DeltaStates]:
    """Returns the states of the model's recurrent layers, by layer. `zeros` allocates memory."""
    num_rows, num_places = spec.max_rows + 1, spec.decode.max_tokens_per_step
    states: dict[int, DeltaStates] = {}
    for layer in recurrent_layers_of(model):
        shape = layer.shape
        num_inputs = num_places + shape.num_taps - 1
        states[layer.index] = DeltaStates(
            zeros((num_rows, num_places, *shape.matrix_sizes), wide_dtype(model.dtype)),
            zeros((num_rows, num_inputs, shape.num_channels), model.dtype),
        )
    return states


def refuse_beside_recurrent(model: CausalModel, options: Mapping[str, bool]) -> None:
    """Raises ConfigError if the model has recurrent layers, and one of the options is on that such
    a model cannot have."""
    if not recurrent_layers_of(model):
        return
    for flag, is_on in options.items():
        if is_on:
            raise ConfigError(
                f"{flag} is for models whose layers all keep KV: this one has recurrent layers, "
                f"whose states follow a single sequence of tokens; leave out {flag}",
                param=flag.removeprefix("--").replace("-", "_"),
            )


def with_recurrent(
    attention: Attention, model: CausalModel, state: DeviceState, ops: DeviceOps
) -> Attention:
    """Returns the attention, with the states of the model's recurrent layers if it has any."""
    if not state.recurrent:
        return attention
    if any(layer.window is not None for layer in model.layers):
        # A row that is computed anew would find the pages behind its window given away.
        raise ConfigError("sliding windows are not supported beside recurrent layers")
    backend = RecurrentBackend(attention.backend, state.recurrent, ops.make_advance_rows())
    memory = {**attention.memory, "states of recurrent layers": backend.size_bytes}
    if state.checkpoints.size_bytes:
        memory["checkpoints of these states"] = state.checkpoints.size_bytes
    return dataclasses.replace(attention, backend=backend, memory=memory)


def checkpoint_memory(
    spec: EngineSpec, model: CausalModel, *, wanted: int | None, budget_bytes: int
) -> int:
    """Returns how much of the memory for KV goes to checkpoints of states: what the `wanted` ones
    take, or else a part of it."""
    one = _checkpoint_bytes(model, spec.decode)
    if not one or not spec.prefix_cache:
        return 0
    if wanted is None:
        return budget_bytes // CHECKPOINT_PART
    if wanted * one > budget_bytes:
        raise ConfigError(
            f"--num-state-checkpoints {wanted} takes {wanted * one // MIB:,} MiB, but "
            f"{budget_bytes // MIB:,} MiB are free; lower it or leave it out",
            param="num_state_checkpoints",
        )
    return wanted * one


def with_checkpoints(
    spec: EngineSpec, model: CausalModel, ranks: Collectives, *, checkpoint_bytes: int
) -> EngineSpec:
    """Returns the spec of an engine whose rows keep states, if the model has recurrent layers. A
    row with a prediction drafts as others do: it would need a state for each of its drafts. The
    prefix cache needs checkpoints: as many as fit into `checkpoint_bytes`, and no more than there
    are KV pages. A stage of a pipeline without such layers has room for any number.
    """
    if not is_recurrent(model):
        return spec
    decode = msgspec.structs.replace(spec.decode, is_recurrent=True, max_predicted=0)
    most = spec.groups[0].num_pages - 1 if spec.prefix_cache else 0
    if one := _checkpoint_bytes(model, decode):
        most = min(most, checkpoint_bytes // one)
    num_checkpoints = ranks.least(most)
    return msgspec.structs.replace(
        spec,
        prefix_cache=num_checkpoints > 0,
        num_checkpoints=num_checkpoints + 1 if num_checkpoints else 0,  # page 0 is padding
        decode=decode,
    )


def _checkpoint_bytes(model: CausalModel, decode: DecodeCaps) -> int:
    """Returns the size of a checkpoint of all recurrent layers, 0 if the model has none."""
    total, wide = 0, wide_dtype(model.dtype).itemsize
    for layer in recurrent_layers_of(model):
        shape = layer.shape
        num_inputs = decode.max_tokens_per_step + shape.num_taps - 1
        total += math.prod(shape.matrix_sizes) * wide
        total += num_inputs * shape.num_channels * model.dtype.itemsize
    return total
