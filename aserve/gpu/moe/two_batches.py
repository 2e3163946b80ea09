"""Two-batch overlap: a forward as two halves, whose layers take turns.

While the rows of one half travel to their experts and back, the other half computes. The first half
is always a stage ahead:

    first   attention, send | experts, return | attention, send | ...
    second                  | attention, send | experts, return | ...

Source: DeepSeek-V3's report, https://arxiv.org/abs/2412.19437, section 3.2.1
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from aserve.errors import BugError, ConfigError
from aserve.gpu.attention.base import AttentionBackend
from aserve.gpu.decode.base import OnPublish
from aserve.gpu.models.base import Attend, CausalModel
from aserve.gpu.models.decoder import Block, Decoder
from aserve.gpu.moe.layer import ExpertMlp
from aserve.gpu.moe.shortcut_decoder import ShortcutDecoder
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.gpu.step.halves import cut_in_two
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.results import Packed

# A forward that yields wherever rows have begun to travel, and returns hidden states.
Stages: TypeAlias = Generator[None, None, Tensor]


def decoder_in_stages(
    decoder: Decoder, input_ids: Tensor, positions: Tensor, attend: Attend
) -> Stages:
    """`Decoder.forward`, stage by stage."""
    cos_sin = [rotary.at(positions) for rotary in decoder.rotaries]
    hidden = decoder.embed(input_ids)
    normed = decoder.first_norm(hidden)
    for block in decoder.blocks:
        hidden, normed = block.attended(hidden, normed, cos_sin[block.rotary], attend)
        if isinstance(block.mlp, ExpertMlp):
            started = block.mlp.start(normed)
            yield
            computed = block.mlp.compute(started)
            yield
            mixed = block.mlp.finish(computed)
        else:
            mixed = block.mlp(normed)
        hidden, normed = block.before_next(hidden, block.after_mlp(mixed))
    return normed


class TwoBatches:
    """A `FusedStep` that runs forwards and no whole steps."""

    __slots__ = ("_attention", "_decoder")

    def __init__(self, decoder: Decoder, attention: AttentionBackend) -> None:
        self._decoder = decoder
        self._attention = attention

    def can_run(self, batch: ForwardBatch) -> bool:
        """A forward that is planned for its whole shape, as in some captures, stays in one."""
        is_plain = batch.capture is None and batch.tree_mask is None
        return is_plain and batch.num_tokens > 1 and batch.needs_attention_plan()

    def run(self, batch: ForwardBatch) -> Tensor:
        return drain(self.stages(batch))

    def stages(self, batch: ForwardBatch) -> Stages:
        return in_turns(*(self._half(half) for half in cut_in_two(batch)))

    def can_step(self, plan: StepPlan) -> bool:
        return False

    def step(self, plan: StepPlan, publish: OnPublish) -> Packed:
        raise BugError(f"step {plan.iteration}: two batches run no whole steps")

    def _half(self, half: ForwardBatch) -> Stages:
        attend = self._attention.bind(half, self._attention.plan(half))
        return decoder_in_stages(self._decoder, half.input_ids, half.rope_positions, attend)


def two_batches(model: CausalModel, attention: AttentionBackend, *, has_loras: bool) -> TwoBatches:
    """Raises ConfigError for a model or options that cannot be computed in halves."""
    param = "enable_two_batch_overlap"
    if has_loras:
        message = "--enable-two-batch-overlap does not go with --enable-lora"
        raise ConfigError(f"{message}, whose adapters are bound to a whole forward", param=param)
    if not isinstance(model, Decoder) or not expert_layers(model):
        message = "--enable-two-batch-overlap is for models with experts that have native code"
        raise ConfigError(f"{message}; leave it out", param=param)
    return TwoBatches(model, attention)


def expert_layers(model: CausalModel) -> tuple[ExpertMlp, ...]:
    """Returns the mixtures of experts of a decoder, in the order of its layers."""
    match model:
        case Decoder():
            return experts_of(model.blocks)
        case ShortcutDecoder():
            return model.shortcuts
        case _:
            return ()


def experts_of(blocks: Sequence[Block]) -> tuple[ExpertMlp, ...]:
    return tuple(block.mlp for block in blocks if isinstance(block.mlp, ExpertMlp))


def in_turns(first: Stages, second: Stages) -> Stages:
    """Runs one stage of each in turns, yields after each, and returns both results, joined."""
    results: dict[Stages, Tensor] = {}
    while len(results) < 2:
        for stages in (first, second):
            if stages in results:
                continue
            try:
                next(stages)
            except StopIteration as stop:
                results[stages] = stop.value
            else:
                yield
    return torch.cat((results[first], results[second]))


def drain(stages: Stages) -> Tensor:
    """Runs all stages, one right after the other."""
    while True:
        try:
            next(stages)
        except StopIteration as stop:
            result: Tensor = stop.value
            return result
