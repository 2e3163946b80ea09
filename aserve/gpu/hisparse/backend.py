"""HiSparse: sparse attention whose KV is in the host's memory.

In decode rows, the keys that the indexer chose are swapped in from the host to a buffer of hot rows
on the device, unless they are there. Rows with several queries, as in prefill, are staged
(`PrefillStaging`). Keys are read in the order of their positions wherever they are, so the result
has the same bits for any buffer size, any history of swaps, and any time of the backup.
Source: https://github.com/sgl-project/sglang (managers/hisparse_coordinator.py)
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.errors import BugError, ConfigError
from aserve.gpu.attention.base import StaticPlans
from aserve.gpu.attention.latents import Part, part_of
from aserve.gpu.attention.select import Attention
from aserve.gpu.attention.slots import Chosen
from aserve.gpu.attention.sparse import SparseBackend
from aserve.gpu.hisparse.host_kv import HostKvPools, NewRows, PrefillStaging
from aserve.gpu.hisparse.hot_rows import NOWHERE
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec
from aserve.gpu.kv.pools import LayerKv
from aserve.gpu.models.base import Attend
from aserve.gpu.models.indexer import IndexInputs
from aserve.gpu.models.latent_attention import LatentInputs
from aserve.gpu.step.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class HiSparsePlan:
    """The rows of a forward of `num_rows` rows: those with one query, and those with several."""

    num_rows: int
    decode: Part | None
    prefill: Part | None


class HiSparseBackend:
    """An `AttentionBackend` over `HostKvPools`."""

    __slots__ = ("pools", "sparse")
    static_plans: StaticPlans | None = None

    def __init__(self, sparse: SparseBackend, pools: HostKvPools) -> None:
        self.sparse = sparse
        self.pools = pools

    def plan(self, batch: ForwardBatch) -> object:
        is_decode = batch.query_lens_cpu == 1
        decode = part_of(batch, is_decode, self.pools) if is_decode.any() else None
        prefill = part_of(batch, ~is_decode, self.pools) if not is_decode.all() else None
        return HiSparsePlan(batch.num_rows, decode, prefill)

    def bind(self, batch: ForwardBatch, plan: object) -> Attend:
        if not isinstance(plan, HiSparsePlan):
            raise BugError(f"step {batch.iteration}: a plan of another backend: {plan!r}")
        if plan.num_rows != batch.num_rows:
            return self.bind(batch, self.plan(batch))
        return AttendHot(self, batch, plan)


class AttendHot:
    """The `SparseAttend` of one forward. The forward begins when this is made."""

    __slots__ = ("_backend", "_batch", "_decode", "_new", "_prefill", "_staging")

    def __init__(self, backend: HiSparseBackend, batch: ForwardBatch, plan: HiSparsePlan) -> None:
        self._backend = backend
        self._batch = batch
        self._decode = plan.decode
        self._prefill = plan.prefill
        pools = backend.pools
        decode = batch if plan.decode is None else plan.decode.batch
        self._new: NewRows = pools.backup.begin(batch, decode.slots[0])
        pools.hot.begin(batch.rows, batch.kv_lens)
        self._staging: PrefillStaging | None = None
        if plan.prefill is not None:
            self._staging = PrefillStaging(plan.prefill.batch, pools)

    def __call__(self, layer: LayerSpec, inputs: AttentionInputs, /) -> Tensor:
        raise BugError(f"layer {layer.index} has no indexer, as all others have")

    def attend_sparse(
        self, layer: LayerSpec, inputs: LatentInputs, index: IndexInputs, /
    ) -> Tensor:
        self._backend.sparse.index_keys.store(layer, index.keys, self._batch.slots[0])
        out = inputs.q.new_empty((*inputs.q.shape[:2], inputs.up.value.shape[1]))
        for part, attend in (
            (self._decode, self._attend_hot),
            (self._prefill, self._attend_staged),
        ):
            if part is None:
                continue
            if part.tokens is None:
                return attend(layer, inputs, index, part.batch)
            own = inputs.select(part.tokens), index.select(part.tokens)
            out.index_copy_(0, part.tokens, attend(layer, *own, part.batch))
        return out

    def _attend_hot(
        self, layer: LayerSpec, inputs: LatentInputs, index: IndexInputs, batch: ForwardBatch
    ) -> Tensor:
        pools = self._backend.pools
        hot, rows = pools.hot, batch.rows
        places = hot.write(layer, rows, batch.cache_positions, inputs.latents)
        self._new.places[layer.index] = places
        positions, lens = self._chosen(layer, index, batch)
        is_key = positions != NOWHERE
        slots = pools.slots(0, rows[:, None].expand_as(positions), positions * is_key)
        chosen = Chosen(hot.swap_in(layer, rows, positions, slots), lens)
        return self._attend(layer, inputs, hot.kv(layer), chosen)

    def _attend_staged(
        self, layer: LayerSpec, inputs: LatentInputs, index: IndexInputs, batch: ForwardBatch
    ) -> Tensor:
        assert self._staging is not None
        self._staging.write(layer, inputs.latents)
        positions, lens = self._chosen(layer, index, batch)
        is_key = positions != NOWHERE
        chosen = Chosen(self._staging.slots(positions * is_key) * is_key, lens)
        return self._attend(layer, inputs, self._staging.read(layer), chosen)

    def _chosen(
        self, layer: LayerSpec, index: IndexInputs, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """Returns the positions of the chosen keys, int64 [tokens, k] and NOWHERE behind them, and
        their numbers, int64 [tokens]."""
        positions = self._backend.sparse.index_keys.choose(layer, index, batch)
        lens = (batch.cache_positions + 1).clamp(max=positions.shape[1])
        is_key = torch.arange(positions.shape[1], device=lens.device) < lens[:, None]
        return positions.where(is_key, NOWHERE), lens

    def _attend(
        self, layer: LayerSpec, inputs: LatentInputs, kv: LayerKv, chosen: Chosen
    ) -> Tensor:
        q = inputs.up.absorb(inputs.q)
        return inputs.up.values(self._backend.sparse.attend_slots(q, kv, chosen, layer))


def with_hisparse(attention: Attention, pools: HostKvPools) -> Attention:
    """Returns the attention over pools in the host's memory."""
    if not isinstance(attention.backend, SparseBackend):
        raise ConfigError(
            "--enable-hisparse needs a model with sparse attention", param="enable_hisparse"
        )
    backend = HiSparseBackend(attention.backend, pools)
    # The clock, and the queue of rows to back up, are the host's, and a replay would not move them.
    capabilities = dataclasses.replace(attention.capabilities, can_capture=False)
    return dataclasses.replace(attention, backend=backend, capabilities=capabilities)
