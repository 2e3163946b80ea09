"""One token per row and step: one forward, one sample, one stash.

Lengths are known to the host, so it publishes none.
"""

from __future__ import annotations

import torch

from aserve.gpu.decode.base import OnPublish, StepRunner
from aserve.gpu.sampling.sampler import Sampled
from aserve.gpu.step.future_map import LAST_TOKEN, RelayField
from aserve.gpu.step.inputs import DeviceStep, HeldSample
from aserve.gpu.step.results import Emitted
from aserve.messages.executor import DecodeCaps


class Autoregressive:
    __slots__ = ("caps", "draws_once", "fields")

    def __init__(self) -> None:
        self.caps = DecodeCaps()
        self.draws_once = True
        self.fields: tuple[RelayField, ...] = ()

    def step(self, runner: StepRunner, step: DeviceStep, publish: OnPublish) -> Emitted:
        hidden = runner.forward(runner.init_forward(step.batch))
        runner.hold(step, hidden)
        sampled = runner.sample(step, hidden)
        rows = step.arrays.ints("sample_rows")
        runner.relay.stash(rows, {LAST_TOKEN: sampled.tokens}, iteration=step.iteration)
        return _one_each(sampled)

    def sample_held(self, runner: StepRunner, held: HeldSample) -> Emitted:
        sampled = runner.sample_held(held)
        runner.relay.stash(held.rows, {LAST_TOKEN: sampled.tokens}, iteration=held.iteration)
        return _one_each(sampled)


def _one_each(sampled: Sampled) -> Emitted:
    return Emitted(sampled.tokens[:, None], torch.ones_like(sampled.tokens), sampled)
