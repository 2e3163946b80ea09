"""Plain decoding: one forward, one sampled token per row, one stash.

The host knows all lengths, so this mode publishes none.
"""

from __future__ import annotations

from aserve.gpu.decode.base import OnPublish, StepRunner
from aserve.gpu.step.future_map import LAST_TOKEN, RelayField
from aserve.gpu.step.held import HeldSample
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.resolve import DeviceStep
from aserve.gpu.step.results import Packed, pack_one_each
from aserve.gpu.transfer.staging import DeviceArrays
from aserve.messages.executor import DecodeCaps


class Autoregressive:
    __slots__ = (
        *("caps", "can_fuse", "fields", "graph_widths"),
        *("num_draft_forwards", "num_forwards"),
    )

    def __init__(self) -> None:
        self.caps = DecodeCaps()
        self.can_fuse = True
        self.fields: tuple[RelayField, ...] = ()
        self.num_forwards = 1
        self.num_draft_forwards = 0
        self.graph_widths: tuple[int, ...] = (1,)

    def draft(self, runner: StepRunner, plan: StepPlan, arrays: DeviceArrays) -> None:
        pass

    def step(self, runner: StepRunner, step: DeviceStep, publish: OnPublish) -> Packed:
        hidden = runner.forward(step.batch)
        runner.hold(step, hidden)
        sampled = runner.sample(step, hidden)
        rows = step.arrays.ints("sample_rows")
        runner.relay.stash(rows, {LAST_TOKEN: sampled.tokens}, iteration=step.iteration)
        return pack_one_each(sampled)

    def sample_held(self, runner: StepRunner, held: HeldSample, publish: OnPublish) -> Packed:
        sampled = runner.sample_held(held)
        runner.relay.stash(held.rows, {LAST_TOKEN: sampled.tokens}, iteration=held.iteration)
        return pack_one_each(sampled)
