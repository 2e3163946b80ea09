"""The model with everything that lives beside it on the device, and the parts of a step.

It decides nothing and never waits. All its state is written on the executor's stream only: the
tables in `state`, and the logits of held rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.gpu.attention.base import AttentionBackend
from aserve.gpu.decode.base import DecodeMode, OnPublish
from aserve.gpu.device.ops import FusedStep
from aserve.gpu.models.base import CausalModel
from aserve.gpu.sampling.ops import PLAIN_OPS, SampleOps
from aserve.gpu.sampling.params import LogitsRows
from aserve.gpu.sampling.sampler import Sampled, Sampler, Staged
from aserve.gpu.step.forward_batch import NO_OVERRIDES, ForwardBatch, ForwardOverrides
from aserve.gpu.step.future_map import SEQ_LEN, FutureMap
from aserve.gpu.step.inputs import DeviceBatch, DeviceStep, HeldSample
from aserve.gpu.step.plan import LogitsPlan, StepPlan
from aserve.gpu.step.prompts import value_prompts
from aserve.gpu.step.resolve import DeviceState, Resolve, apply_tables, resolve, stage_tables
from aserve.gpu.step.results import Packed, pack
from aserve.gpu.transfer.staging import DeviceArrays, HostArrays
from aserve.messages.step import ScheduleBatch

UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """What a runner is made of."""

    model: CausalModel
    state: DeviceState
    attention: AttentionBackend
    mode: DecodeMode
    is_debug: bool
    sample_ops: SampleOps = PLAIN_OPS
    fused_step: FusedStep | None = None  # for the forwards that it can run
    resolve: Resolve = resolve


class ModelRunner:
    __slots__ = (
        "_held_lens",
        "_held_logits",
        "_own_lens",
        "_parts",
        "_sampler",
        "model",
        "relay",
        "state",
    )

    def __init__(self, parts: RunnerParts) -> None:
        self._parts = parts
        self.model = parts.model
        self.state = parts.state
        self.relay: FutureMap = parts.state.relay
        self._sampler = Sampler(parts.state.tables, parts.state.pools, parts.sample_ops)
        self._held_lens = torch.zeros_like(self.relay.written_iter)
        self._own_lens = torch.full_like(self.relay.written_iter, UNKNOWN)  # debug checks only
        self._held_logits: Tensor | None = None  # [max_rows + 1, vocab], once a row is held

    def stage(self, plan: StepPlan) -> HostArrays:
        """What `apply` and `step` read of the host."""
        arrays = HostArrays()
        if self.fused_step_for(plan) is None:
            plan.stage(arrays)
        stage_tables(plan.batch, arrays, self.state)
        return arrays

    def apply(self, batch: ScheduleBatch, tables: DeviceArrays) -> None:
        """New tenants and pages, before the step itself."""
        apply_tables(batch, tables, self.state)
        if self._parts.is_debug and batch.row_inits:
            self._own_lens.index_fill_(0, tables.ints("init_rows"), UNKNOWN)

    def step(self, plan: StepPlan, arrays: DeviceArrays, publish: OnPublish) -> Packed:
        """From resolve to the packed result, with the debug checks after it: the iteration that
        wrote each row's relay, and its own KV length before the step. `publish` gets lengths as
        int32.

        NOTE: captured, this is run again without its Python: of the host it reads what is the same
        in all steps of one shape, and the rest from `arrays`.
        """
        if (fused_step := self.fused_step_for(plan)) is not None:
            return fused_step.step(plan)
        step = self._parts.resolve(plan, arrays, self.state)

        def on_publish(lens: Tensor) -> None:
            self.relay.publish(step.batch.rows, lens)
            publish(lens.to(torch.int32))

        if not self._parts.is_debug:
            return pack(self._parts.mode.step(self, step, on_publish))
        stamps = self.relay.written_iter.index_select(0, step.batch.rows)
        lens = self._lens_before(step)
        emitted = self._parts.mode.step(self, step, on_publish)
        self._note_lens(step)
        return pack(emitted, (stamps, lens))

    def fused_step_for(self, plan: StepPlan) -> FusedStep | None:
        """What runs this step in one call, and reads the plan alone, if there is such a thing."""
        fused_step = self._parts.fused_step
        if fused_step is None or self._parts.is_debug or not self._parts.mode.draws_once:
            return None
        return fused_step if fused_step.can_step(plan) else None

    def _lens_before(self, step: DeviceStep) -> Tensor:
        """What the device itself knows of each row's KV length; of a new row what it was told."""
        own = self._own_lens.index_select(0, step.batch.rows)
        is_told = (own == UNKNOWN) | (step.arrays.ints("is_bound") > 0)
        return torch.where(is_told, step.batch.kv_lens, own)

    def _note_lens(self, step: DeviceStep) -> None:
        rows = step.batch.rows
        if SEQ_LEN in self.relay:
            lens = self.relay.read(SEQ_LEN, rows)
        else:
            lens = step.batch.kv_lens + step.batch.query_lens
        self._own_lens.index_copy_(0, rows, lens)
        self._own_lens[:1].fill_(UNKNOWN)  # the padding row has no length

    def finish_held(self, held: HeldSample) -> Packed:
        return pack(self._parts.mode.sample_held(self, held))

    def init_forward(
        self, batch: DeviceBatch, overrides: ForwardOverrides = NO_OVERRIDES
    ) -> ForwardBatch:
        pools = self.state.pools
        made = ForwardBatch.init_new(batch, pools, overrides, is_debug=self._parts.is_debug)
        if batch.attention_plan is not None:
            made.mark_attention_planned(batch.attention_plan)
        return made

    def forward(self, batch: ForwardBatch) -> Tensor:
        """-> hidden states [tokens, hidden], valid until the next forward."""
        fused_step = self._parts.fused_step
        if fused_step is not None and fused_step.can_run(batch):
            return fused_step.run(batch)
        attention = self._parts.attention
        plan = attention.plan(batch) if batch.needs_attention_plan() else batch.plan
        attend = attention.bind(batch, plan)
        return self.model.forward(
            batch.input_ids, batch.rope_positions, attend, capture=batch.capture
        )

    def sample(self, step: DeviceStep, hidden: Tensor) -> Sampled:
        """hidden [tokens, hidden] -> a token for every logits row of the step's plan, in slices,
        and what the step owes its rows' prompts.
        """
        placed, arrays = step.batch.place(self.state.pools), step.arrays
        tokens = arrays.ints("logits_tokens")

        def of_logits(values: Tensor) -> Tensor:
            """Those of the tokens that have logits: mostly of all, and then in the same order."""
            return values if len(tokens) == len(hidden) else values.index_select(0, tokens)

        rows, lens, wanted = map(of_logits, (placed.token_rows, placed.positions, hidden))
        sampled = self._sample_slices(
            step.plan.logits,
            arrays,
            LogitsRows(rows, lens + 1),
            lambda part: self.model.logits(wanted[part]),
        )
        if step.plan.prompts is None:
            return sampled
        prompts = value_prompts(step.plan.prompts, arrays, hidden, self.model.logits)
        return dataclasses.replace(sampled, prompts=prompts.packed())

    def hold(self, step: DeviceStep, hidden: Tensor) -> None:
        """Keeps logits of the held rows until their Sample."""
        if not len(step.plan.held_rows):
            return
        rows = step.arrays.ints("held_rows")
        tokens = step.arrays.ints("held_tokens")
        logits = self.model.logits(hidden.index_select(0, tokens))
        if self._held_logits is None:
            self._held_logits = logits.new_zeros((len(self._held_lens), logits.shape[1]))
        self._held_logits.index_copy_(0, rows, logits)
        ends = step.batch.kv_lens + step.batch.query_lens
        token_to_row = step.batch.token_to_row.index_select(0, tokens)
        self._held_lens.index_copy_(0, rows, ends.index_select(0, token_to_row))

    def sample_held(self, held: HeldSample) -> Sampled:
        assert self._held_logits is not None  # the executor checked that the rows are held
        logits, lens = self._held_logits, self._held_lens.index_select(0, held.rows)
        return self._sample_slices(
            held.logits,
            held.arrays,
            LogitsRows(held.rows, lens, held.mask),
            lambda part: logits.index_select(0, held.rows[part]),
        )

    def _sample_slices(
        self,
        plan: LogitsPlan,
        arrays: DeviceArrays,
        rows: LogitsRows,
        logits_of: Callable[[slice], Tensor],
    ) -> Sampled:
        """One slice's logits are alive at a time; `logits_of` makes them."""
        parts: list[Sampled] = []
        start = 0
        for number, slice_plan in enumerate(plan.slices):
            part = slice(start, start + slice_plan.num)
            staged = Staged(slice_plan, arrays, f"slice{number}")
            parts.append(self._sampler.sample(logits_of(part), rows.at(part), staged))
            start = part.stop
        return _joined(parts, rows.rows)


def _joined(parts: list[Sampled], like: Tensor) -> Sampled:
    """Slices one after the other; alternatives are as wide as the widest slice's."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        nothing, empty = like.new_zeros(0), torch.zeros(0, device=like.device)
        table = nothing.view(0, 0)
        return Sampled(nothing, nothing.to(torch.bool), empty, table, table.float())
    width = max(part.top_ids.shape[1] for part in parts)
    return Sampled(
        tokens=torch.cat([part.tokens for part in parts]),
        is_valid=torch.cat([part.is_valid for part in parts]),
        chosen=torch.cat([part.chosen for part in parts]),
        top_ids=torch.cat([_widen(part.top_ids, width) for part in parts]),
        top_logprobs=torch.cat([_widen(part.top_logprobs, width) for part in parts]),
    )


def _widen(table: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(table, (0, width - table.shape[1]))
