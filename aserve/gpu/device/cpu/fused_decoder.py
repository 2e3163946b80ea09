"""The CPU's fused step: a decoder's forward for few tokens as one compiled call, or a whole step.

A forward writes keys and values of its own slots. A step also writes what `resolve` and the stash
write: token ids in the token pool, and the drawn tokens and stamps in the relay. Both run on the
executor's thread. The kernel is aserve_kernels.cpu.decoder_forward; this module fills in its
records, which hold addresses of weights, pools and tables, and sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.decode.base import OnPublish
from aserve.gpu.device.cpu.model_records import (
    ModelRecords,
    are_layers_covered,
    describe_loras,
    has_packed_head,
    num_workers_of,
    ranks_of,
)
from aserve.gpu.device.cpu.team_choice import TeamChoice
from aserve.gpu.device.fused_step import FusedWindows
from aserve.gpu.kv.layer_groups import Mask
from aserve.gpu.kv.store import FP8
from aserve.gpu.models.base import CausalModel, HiddenCapture
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.models.vision_language import VisionLanguageModel
from aserve.gpu.parallel.stages import StagedDecoder
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.gpu.step.plan import LogitsPlan, StepPlan, are_among
from aserve.gpu.step.resolve import DeviceState
from aserve.gpu.step.results import Layout, Packed
from aserve.messages.step import stamp_of
from aserve_kernels.cpu.bf16 import as_tensor
from aserve_kernels.cpu.decoder_forward import (
    StepRows,
    compile_decoder_forward,
    compile_decoder_layers,
    decoder_forward,
    decoder_step,
)
from aserve_kernels.cpu.decoder_layers import Tables
from aserve_kernels.cpu.delta_rule import fits_blocks
from aserve_kernels.cpu.host_rows import Int64s, QueryRows
from aserve_kernels.cpu.team import team_size
from aserve_kernels.row_columns import INT_COLUMNS

R = TypeVar("R")

FEW_TOKENS = 256  # per row; above this, torch's attention within a prompt is faster


@dataclass(frozen=True, slots=True)
class _Shared:
    """Holds what plans that repeat each other share. These have the same `logits`
    (step/repeated.py)."""

    logits: LogitsPlan
    rows: StepRows
    has_adapters: bool
    layout: Layout


class CompiledForward:
    """A `FusedDecoder`."""

    __slots__ = (
        *("_adapted", "_can_draw", "_plain", "_ranks", "_records"),
        *("_shared", "_stage", "_state", "_team"),
    )

    def __init__(
        self, decoder: Decoder | StagedDecoder, state: DeviceState, *, num_workers: int = 1
    ) -> None:
        self._state = state
        self._ranks = ranks_of(decoder)
        self._stage = decoder if isinstance(decoder, StagedDecoder) else None
        self._can_draw = self._stage is None and has_packed_head(decoder)
        self._team = TeamChoice(num_workers)
        self._shared: _Shared | None = None  # of the last plan
        self._records = ModelRecords(decoder, state)
        self._plain = self._records.tables
        self._adapted = replace(self._plain, loras=describe_loras(decoder))

    def can_run(self, batch: ForwardBatch) -> bool:
        is_plain = batch.rope_override is None and batch.tree_mask is None
        return bool(
            is_plain
            and batch.features is None
            and batch.query_lens_cpu.max(initial=0) <= FEW_TOKENS
        )

    def run(self, batch: ForwardBatch) -> Tensor:
        stage = self._stage
        if stage is None:
            return self._run(batch, batch.capture)
        num_tokens = len(batch.input_ids)
        if stage.is_first:
            stream = torch.empty((num_tokens, stage.hidden_size), dtype=torch.float32)
        else:
            stream = stage.receive(num_tokens)
        own = stage.own_capture(batch.capture)
        hidden = self._run(batch, own, stream)
        stage.finish(stream, own, batch.capture)
        return hidden

    def _run(
        self, batch: ForwardBatch, capture: HiddenCapture | None, stream: Tensor | None = None
    ) -> Tensor:
        rows, query_lens = batch.rows.numpy(), batch.query_lens_cpu.astype(np.int64)
        starts = batch.cu_query_lens.numpy()[:-1]
        own = QueryRows(rows, batch.lens.numpy(), starts, query_lens)
        slots = self._slots_of(rows, query_lens)
        tables = self._tables_for(bool(slots.any()), capture)
        ids = batch.input_ids.numpy()
        forward = partial(decoder_forward, ids, own, slots, tables, stream=stream)
        hidden, streams = self._of_ranks(len(ids), lambda num: forward(num_workers=num))
        _fill(capture, streams)
        return hidden

    def can_step(self, plan: StepPlan) -> bool:
        """Whether each sampled row needs at most noise: no filters, penalties, masks, logprobs or
        prompt results."""
        shared = self._shared
        if shared is not None and shared.logits is plan.logits:
            return True  # it repeats a plan that could
        is_short = len(plan.input_ids) == len(plan.rows) or plan.query_lens.max() <= FEW_TOKENS
        return (
            self._can_draw
            and plan.prompts is None
            and not len(plan.held_rows)
            and bool(is_short)
            and all(part.is_plain and not part.needs_filter for part in plan.logits.slices)
        )

    def step(self, plan: StepPlan, publish: OnPublish) -> Packed:
        return self.verify(plan).packed

    def verify(
        self,
        plan: StepPlan,
        capture: HiddenCapture | None = None,
        *,
        is_block: bool = False,
        keeps_hidden: bool = False,
    ) -> FusedWindows:
        shared = self._shared
        if shared is None or shared.logits is not plan.logits:
            shared = self._shared = self._share(plan)
        ids, kv_lens = plan.input_ids.astype(np.int64), plan.kv_lens.astype(np.int64)
        rows = shared.rows
        if keeps_hidden or capture is not None:
            rows = replace(rows, num_read=rows.query_lens)
        work = partial(
            decoder_step,
            *(ids, kv_lens, rows, self._tables_for(shared.has_adapters, capture)),
            iteration=stamp_of(plan.iteration),
            is_block=is_block,
        )
        done = self._of_ranks(len(ids), lambda num: work(num_workers=num))
        if capture is not None:
            _fill(capture, as_tensor(done.streams, self._plain.dtype))
        packed = Packed(torch.from_numpy(done.words), shared.layout)
        hidden = as_tensor(done.hidden, self._plain.dtype)
        return FusedWindows(plan, packed, done.counts, done.token_ids, done.kv_lens, hidden)

    def _share(self, plan: StepPlan) -> _Shared:
        rows, logits = plan.rows.astype(np.int64), plan.logits
        query_lens, num_drafts = plan.query_lens.astype(np.int64), plan.num_drafts.astype(np.int64)
        is_sampled = are_among(rows, logits.rows).astype(np.int64)
        windows = (1 + num_drafts) * is_sampled
        num_samples, num_logits = len(logits.rows), int(windows.sum())
        width = int(windows.max(initial=1))
        slots = self._slots_of(rows, query_lens)
        return _Shared(
            logits,
            StepRows(
                *(rows, plan.is_bound.astype(np.int64), query_lens, num_drafts, is_sampled),
                *(windows, slots, num_samples, num_logits, width),
            ),
            bool(slots.any()),
            Layout(num_samples, width, num_logits, 0, 0, num_prompt_words=0),
        )

    def _of_ranks(self, num_tokens: int, work: Callable[[int], R]) -> R:
        """Calls `work` with a number of threads. Raises RankLost if another rank was lost."""
        ranks = self._ranks
        if ranks is None:
            return self._team.run(num_tokens, work)
        ranks.begin()
        result = self._team.run(num_tokens, work)
        ranks.end()
        return result

    def _slots_of(self, rows: Int64s, query_lens: Int64s) -> Int64s:
        """Returns the adapter slot of each token, [tokens]."""
        slots = self._state.tables.int_table.numpy()[rows, INT_COLUMNS.index("lora_slot")]
        return np.repeat(slots, query_lens)

    def _tables_for(self, has_adapters: bool, capture: HiddenCapture | None = None) -> Tables:
        tables = self._adapted if has_adapters else self._plain
        if capture is None:
            return tables
        before_norm = [-1] * capture.wants_before_norm
        layer_ids = [*capture.layer_ids, *before_norm]
        return replace(tables, captured=self._records.last_records[layer_ids])


def _fill(capture: HiddenCapture | None, streams: Tensor) -> None:
    if capture is None:
        return
    num_layers = len(capture.layer_ids)
    capture.layers.extend(streams[:num_layers])
    if capture.wants_before_norm:
        capture.before_norm = streams[num_layers]


def make_compiled_forward(model: CausalModel, state: DeviceState) -> CompiledForward | None:
    if isinstance(model, VisionLanguageModel) and not model.has_axes:
        model = model.text
    if not isinstance(model, Decoder | StagedDecoder):
        return None
    if state.pools.dtype not in (model.dtype, torch.bfloat16, FP8):
        return None
    if not are_layers_covered(model, masks=(Mask.CAUSAL,)):
        return None
    if not all(map(fits_blocks, state.recurrent.values())):
        return None
    compile_decoder_layers(model.dtype, state.pools.dtype)
    compile_decoder_forward(model.dtype)
    return CompiledForward(model, state, num_workers=team_size(num_workers_of(model)))
