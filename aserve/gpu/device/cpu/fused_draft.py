"""The forwards of a draft model on the CPU as compiled calls. The kernels are
aserve_kernels.cpu.draft_forward, and decoder_forward.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from torch import Tensor

from aserve.gpu.device.cpu.model_records import (
    LayerStack,
    ModelRecords,
    are_layers_covered,
    has_packed_head,
    num_workers_of,
)
from aserve.gpu.device.fused_step import FusedRows
from aserve.gpu.kv.layer_groups import Mask
from aserve.gpu.models.base import CausalModel
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.models.draft_decoder import DraftDecoder
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.resolve import DeviceState
from aserve_kernels.cpu.decoder_forward import compile_decoder_forward, decoder_forward
from aserve_kernels.cpu.draft_forward import (
    ChainRows,
    compile_draft_forward,
    draft_chain,
    draw_drafts,
    store_inputs,
)
from aserve_kernels.cpu.host_rows import Int64s, QueryRows
from aserve_kernels.draft_chain import ChainKind

NO_SLOTS = np.empty(0, np.int64)  # draft models have no adapters


class CompiledDraft:
    """A `FusedDraft`."""

    __slots__ = ("_records", "_relay")

    def __init__(self, model: LayerStack, state: DeviceState) -> None:
        self._records = ModelRecords(model, state)
        self._relay = state.relay

    def draft_chain(self, plan: StepPlan, kind: ChainKind, relay_field: str | None = None) -> None:
        order = np.argsort(-plan.num_drafts, kind="stable")[: np.count_nonzero(plan.num_drafts)]
        own = (plan.rows, plan.kv_lens, plan.is_bound, plan.num_drafts)
        rows = ChainRows(*(values[order].astype(np.int64) for values in own))
        hidden = None if relay_field is None else self._relay.table(relay_field)
        draft_chain(rows, kind, self._records.tables, hidden)

    def forward(self, input_ids: Int64s, rows: FusedRows, hidden: Tensor | None = None) -> Tensor:
        tables = self._records.tables
        return decoder_forward(input_ids, _query_rows(rows), NO_SLOTS, tables, hidden)[0]

    def draw(self, hidden: Tensor, rows: Int64s, positions: Int64s, roots: Int64s) -> Int64s:
        return draw_drafts(hidden, rows, positions, roots, self._records.tables)

    def store(self, inputs: Tensor, rows: FusedRows) -> None:
        store_inputs(inputs, _query_rows(rows), self._records.tables)


def _query_rows(rows: FusedRows) -> QueryRows:
    return QueryRows(rows.rows, rows.lens, rows.starts, rows.query_lens)


def make_compiled_draft(
    model: CausalModel | DraftDecoder, state: DeviceState
) -> CompiledDraft | None:
    if not isinstance(model, Decoder | DraftDecoder):
        return None
    if state.draft_pools is None or state.draft_pools.dtype != model.dtype:
        return None
    if not (has_packed_head(model) and are_layers_covered(model, masks=(Mask.CAUSAL, Mask.NONE))):
        return None
    if num_workers_of(model) > 1:  # a compiled draft runs in one thread, and is too slow there
        return None
    compile_decoder_forward(model.dtype)
    compile_draft_forward(model.dtype)
    return CompiledDraft(model, dataclasses.replace(state, pools=state.draft_pools))
