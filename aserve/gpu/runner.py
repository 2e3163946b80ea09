"""`ModelRunner`: the models with their KV pools, row tables and relay, and the parts of a step.

The executor calls `stage`, `apply` and `step`; the decode mode, which `step` calls, combines the
other parts. Nothing here waits for the device. All state (the tables in `state`, the logits of held
rows) is written on the executor's stream only.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.gpu.attention.base import AttentionBackend
from aserve.gpu.decode.base import DecodeMode, OnPublish
from aserve.gpu.device.fused_step import FusedStep
from aserve.gpu.lora.tables import LoraTables
from aserve.gpu.models.base import Attend, CausalModel, DraftModel
from aserve.gpu.models.ngram_embedding import id_window_of
from aserve.gpu.models.pooling import LAST_TOKEN, Pooler
from aserve.gpu.sampling.ops import PLAIN_OPS, SampleOps
from aserve.gpu.sampling.params import LogitsRows
from aserve.gpu.sampling.sampler import Sampled, Sampler
from aserve.gpu.sampling.tree_paths import TreePaths
from aserve.gpu.step.forward_batch import NO_OVERRIDES, DeviceBatch, ForwardBatch, ForwardOverrides
from aserve.gpu.step.future_map import SEQ_LEN, FutureMap
from aserve.gpu.step.held import HeldRows, HeldSample, HeldStep
from aserve.gpu.step.id_windows import id_windows
from aserve.gpu.step.pictures import picture_rows
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.prompts import score_prompts
from aserve.gpu.step.resolve import (
    DeviceState,
    DeviceStep,
    Resolve,
    apply_tables,
    resolve,
    stage_tables,
)
from aserve.gpu.step.results import Packed
from aserve.gpu.step.slices import sample_slices
from aserve.gpu.transfer.staging import DeviceArrays, HostArrays
from aserve.messages.step import ScheduleBatch

UNKNOWN = -1  # the KV length of a row that the device has not seen yet


@dataclass(frozen=True, slots=True)
class DraftParts:
    """The second model of a runner. Its KV pools are `DeviceState.draft_pools`."""

    model: DraftModel
    attention: AttentionBackend


@dataclass(frozen=True, slots=True)
class RunnerParts:
    model: CausalModel
    state: DeviceState
    attention: AttentionBackend
    mode: DecodeMode
    is_debug: bool
    sample_ops: SampleOps = PLAIN_OPS
    fused_step: FusedStep | None = None  # used for the forwards and steps that it supports
    resolve: Resolve = resolve
    drafter: DraftParts | None = None
    loras: LoraTables | None = None  # of the target model
    pooler: Pooler = LAST_TOKEN


class ModelRunner:
    __slots__ = (
        "_own_lens",
        "_parts",
        "_sampler",
        "drafter",
        "held",
        "loras",
        "model",
        "pictures",
        "relay",
        "state",
    )

    def __init__(self, parts: RunnerParts) -> None:
        self._parts = parts
        self.model = parts.model
        self.drafter: DraftModel | None = None if parts.drafter is None else parts.drafter.model
        self.loras = parts.loras
        self.pictures = picture_rows(parts.model, parts.mode.caps)
        self.state = parts.state
        self.relay: FutureMap = parts.state.relay
        self._sampler = Sampler(parts.state.tables, parts.state.pools, parts.sample_ops)
        self.held: HeldRows[HeldStep] = HeldRows()
        self._own_lens = torch.full_like(self.relay.written_iter, UNKNOWN)  # debug checks only

    def stage(self, plan: StepPlan) -> HostArrays:
        """Returns the host values that `apply` and `step` read."""
        arrays = HostArrays()
        if self.fused_step_for(plan) is None:
            plan.stage(arrays)
        stage_tables(plan.batch, arrays, self.state)
        if self.pictures is not None:
            self.pictures.stage(plan, arrays)
        return arrays

    def apply(self, batch: ScheduleBatch, tables: DeviceArrays) -> None:
        """Writes the tables for new requests and new pages, before the step itself."""
        apply_tables(batch, tables, self.state)
        if self._parts.is_debug and batch.row_inits:
            self._own_lens.index_fill_(0, tables.ints("init_rows"), UNKNOWN)

    def step(self, plan: StepPlan, arrays: DeviceArrays, publish: OnPublish) -> Packed:
        """Runs a step from resolve to the packed result. `publish` is called with int32 lengths.

        In debug mode the result carries the values that `check_step` reads: the iteration that
        stamped each row's relay, and the KV length before the step as the device knows it.

        NOTE: a graph capture records this call, and a replay runs it without its Python. So host
        values read here must be equal for all steps of one shape; all else comes from `arrays`.
        """
        if (fused_step := self.fused_step_for(plan)) is not None:
            return fused_step.step(plan, publish)
        self._parts.mode.draft(self, plan, arrays)
        step = self._parts.resolve(plan, arrays, self.state)
        if self.pictures is not None:
            step = self.pictures.applied(step)

        def on_publish(lens: Tensor) -> None:
            self.relay.publish(step.batch.rows, lens)
            publish(lens.to(torch.int32))

        if not self._parts.is_debug:
            return self._parts.mode.step(self, step, on_publish)
        step = dataclasses.replace(step, batch=step.batch.overridden(NO_OVERRIDES, is_debug=True))
        stamps = self.relay.written_iter.index_select(0, step.batch.rows)
        lens = self._lens_before(step)
        packed = self._parts.mode.step(self, step, on_publish)
        self._note_lens(step)
        return packed.with_checks(stamps, lens)

    def fused_step_for(self, plan: StepPlan) -> FusedStep | None:
        """Returns the fused step that runs this whole step from its plan alone, or None."""
        fused_step = self._parts.fused_step
        if fused_step is None or self._parts.is_debug or not self._parts.mode.can_fuse:
            return None
        if self.pictures is not None and self.pictures.touches(plan):
            return None
        return fused_step if fused_step.can_step(plan) else None

    def _lens_before(self, step: DeviceStep) -> Tensor:
        """[rows], each row's KV length as the device itself counted it. A new row, and a row whose
        length the relay resolved, have the step's own."""
        own = self._own_lens.index_select(0, step.batch.rows)
        is_given = (own == UNKNOWN) | (step.arrays.ints("is_bound") > 0)
        return torch.where(is_given, step.batch.kv_lens, own)

    def _note_lens(self, step: DeviceStep) -> None:
        rows = step.batch.rows
        lens = self.relay.read(SEQ_LEN, rows) if SEQ_LEN in self.relay else step.batch.lens
        self._own_lens.index_copy_(0, rows, lens)
        self._own_lens[:1].fill_(UNKNOWN)  # the padding row has no length

    def finish_held(self, held: HeldSample, publish: OnPublish) -> Packed:
        """Runs the rest of a step for held rows. `publish` is called as in `step`."""

        def on_publish(lens: Tensor) -> None:
            self.relay.publish(held.rows, lens)
            self._own_lens.index_copy_(0, held.rows, lens)
            publish(lens.to(torch.int32))

        return self._parts.mode.sample_held(self, held, on_publish)

    def init_forward(
        self, batch: DeviceBatch, overrides: ForwardOverrides = NO_OVERRIDES
    ) -> ForwardBatch:
        """NOTE: page tables are shared, so that the drafter's slots are those of the target."""
        is_debug = self._parts.is_debug
        return ForwardBatch.init_new(batch, self.state.pools, overrides, is_debug=is_debug)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Runs the target model -> hidden states [tokens, hidden], valid until the next forward."""
        if self.loras is not None:
            self.loras.bind(self.state.tables, batch.token_rows)
        fused_step = self._parts.fused_step
        if fused_step is not None and fused_step.can_run(batch):
            return fused_step.run(batch)
        attention = self._parts.attention
        plan = attention.plan(batch) if batch.needs_attention_plan() else batch.plan
        attend = self.state.kv_streams.watched(attention.bind(batch, plan), len(batch.input_ids))
        if self.pictures is not None and batch.features is not None:
            return self.pictures.forward(batch, attend)
        ids = id_windows(batch, self.state.pools, id_window_of(self.model))
        return self.model.forward(ids, batch.rope_positions, attend, capture=batch.capture)

    def draft(self, batch: ForwardBatch, hidden: Tensor | None = None) -> Tensor:
        assert self.drafter is not None
        attend = self.draft_attention(batch)
        return self.drafter.forward(batch.input_ids, batch.rope_positions, attend, hidden=hidden)

    def draft_attention(self, batch: ForwardBatch) -> Attend:
        """NOTE: this attention plans for itself, because the batch's plan is the target's."""
        assert self._parts.drafter is not None
        attention = self._parts.drafter.attention
        return attention.bind(batch, attention.plan(batch))

    def sample(self, step: DeviceStep, hidden: Tensor, paths: TreePaths | None = None) -> Sampled:
        """hidden [tokens, hidden] -> a token for every logits row of the step's plan, and the
        prompt logprobs and embeddings that the plan asks for. `paths`: those of a draft tree.
        """
        batch, arrays = step.batch, step.arrays
        tokens = arrays.ints("logits_tokens")

        def of_logits(values: Tensor) -> Tensor:
            """Selects the tokens that need logits. PERF: mostly these are all, in order."""
            return values if len(tokens) == len(hidden) else values.index_select(0, tokens)

        rows, positions, last = map(of_logits, (batch.token_rows, batch.token_positions, hidden))
        sampled = sample_slices(
            self._sampler,
            step.plan.logits,
            arrays,
            LogitsRows(rows, positions + 1, paths=paths),
            lambda part: self.model.logits(last[part]),
        )
        if step.plan.prompts is None:
            return sampled
        pooler = self._parts.pooler
        prompts = score_prompts(step.plan.prompts, arrays, hidden, self.model.logits, pooler)
        return dataclasses.replace(sampled, prompts=prompts)

    def hold(self, step: DeviceStep, hidden: Tensor, features: tuple[Tensor, ...] = ()) -> None:
        """Keeps the logits of held rows, and what a drafter reads, until their Sample."""
        if not len(step.plan.held_rows):
            return
        indices = step.arrays.ints("held_tokens")
        logits = self.model.logits(hidden.index_select(0, indices))
        kept = tuple(values.index_select(0, indices) for values in features)
        self.held.keep(HeldStep.of(step, indices, logits, kept))

    def sample_held(self, sample: HeldSample, paths: TreePaths | None = None) -> Sampled:
        held, kept = sample.origin, sample.kept
        batch, indices = held.step.batch, held.indices.index_select(0, kept)
        rows, positions = (
            values.index_select(0, indices) for values in (batch.token_rows, batch.token_positions)
        )
        return sample_slices(
            self._sampler,
            sample.plan.logits,
            sample.arrays,
            LogitsRows(rows, positions + 1, sample.mask, paths),
            lambda part: held.logits.index_select(0, kept[part]),
        )
