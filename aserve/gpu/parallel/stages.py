"""One stage of a pipeline: its part of a decoder, and its part of each step.

All stages get the same batches and keep the same tables, so each of them resolves ids, lengths and
drafts alone. The residual stream travels from stage to stage, as wide as it is computed, which
gives the same bits as one device does. Only the last stage samples. No row is in two steps at once
(`lead` is 1), so the scheduler knows every token that a step reads, and none travels back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.decode.base import DecodeMode, OnPublish, StepRunner
from aserve.gpu.kv.layer_groups import LayerGroup, group_layers
from aserve.gpu.layers.norm import AddNorm, Norm
from aserve.gpu.models.base import Attend, CausalModel, HiddenCapture
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.models.stages import StageLayers, stage_layers
from aserve.gpu.parallel.collectives import ALONE, Collectives
from aserve.gpu.parallel.pipe import Pipe
from aserve.gpu.spec.request import SpecOptions
from aserve.gpu.step.future_map import LAST_TOKEN, SEQ_LEN
from aserve.gpu.step.held import HeldSample
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.resolve import DeviceStep
from aserve.gpu.step.results import Packed, pack_nothing
from aserve.gpu.transfer.staging import DeviceArrays
from aserve.gpu.weights.source import ONE_STAGE, Stage, Target, wide_dtype
from aserve.messages.executor import EngineSpec

WITHOUT_MODEL = "NGRAM"  # the drafter that reads token ids alone
UNKNOWN = -1  # a length that only the last stage knows


class StagedDecoder:
    """A `CausalModel` of the layers of one stage."""

    def __init__(self, decoder: Decoder, own: StageLayers, pipe: Pipe) -> None:
        self.layers = tuple(layer for layer in decoder.layers if own.has(layer.index))
        self.every_layer = decoder.layers
        self.vocab_size = decoder.vocab_size
        self.hidden_size = decoder.hidden_size
        self.max_model_len = decoder.max_model_len
        self.dtype = decoder.dtype
        self.iteration = 0  # of the step that runs
        self.decoder = decoder
        self.is_first, self.is_last = own.is_first, own.is_last
        self.blocks = decoder.blocks[own.first : own.end]
        self.first_norm = decoder.first_norm if own.is_first else _norm_before(decoder, own.first)
        self._pipe = pipe

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        capture: HiddenCapture | None = None,
    ) -> Tensor:
        """Returns what `CausalModel.forward` does in the last stage. In the others the result is
        the norm that the next stage gets, and stands for nothing."""
        decoder = self.decoder
        if self.is_first:
            hidden = decoder.embed(input_ids)
        else:
            hidden = self.receive(len(input_ids)).to(self.dtype)
        normed = self.first_norm(hidden)
        cos_sin = [rotary.at(positions) for rotary in decoder.rotaries]
        for block in self.blocks:
            hidden, normed = block(hidden, normed, cos_sin[block.rotary], attend)
        if not self.is_last:
            self.send(hidden)
        return normed

    def receive(self, num_tokens: int) -> Tensor:
        """Returns the residual stream of the stage before, [tokens, hidden]."""
        stream = torch.empty((num_tokens, self.hidden_size), dtype=wide_dtype(self.dtype))
        self._pipe.receive(self.iteration, stream)
        return stream

    def send(self, stream: Tensor) -> None:
        """Sends the residual stream to the next stage, [tokens, hidden]."""
        self._pipe.send(self.iteration, stream.to(wide_dtype(self.dtype)))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)


def _norm_before(decoder: Decoder, first: int) -> Norm:
    """The norm before the layer `first`, which the layer before it owns."""
    found = decoder.blocks[first - 1].before_next
    assert isinstance(found, AddNorm)  # all that the CPU's operators make
    return found.norm


class StagedMode:
    """The decode mode of a stage. The last stage samples by the engine's mode, and the others find
    the same drafts by it."""

    def __init__(self, mode: DecodeMode, model: StagedDecoder, *, samples: bool) -> None:
        self.caps = mode.caps
        self.can_fuse = False
        self.fields = mode.fields
        self.num_forwards = mode.num_forwards
        self.num_draft_forwards = mode.num_draft_forwards
        self.graph_widths = mode.graph_widths
        self._mode = mode
        self._model = model
        self._samples = samples

    def draft(self, runner: StepRunner, plan: StepPlan, arrays: DeviceArrays) -> None:
        self._mode.draft(runner, plan, arrays)

    def step(self, runner: StepRunner, step: DeviceStep, publish: OnPublish) -> Packed:
        self._model.iteration = step.plan.iteration
        if self._samples:
            return self._mode.step(runner, step, publish)
        runner.forward(step.batch)
        rows, relay = step.batch.rows, runner.relay
        if SEQ_LEN in relay:
            # How many drafts are accepted is known in the last stage. The host knows it before the
            # row's next step, whose length is exact.
            has_drafts = step.arrays.ints("num_drafts") > 0
            relay.publish(rows, torch.where(has_drafts, UNKNOWN, step.batch.lens))
        relay.stash(rows, {LAST_TOKEN: torch.zeros_like(rows)}, iteration=step.iteration)
        return pack_nothing(rows.device)

    def sample_held(self, runner: StepRunner, held: HeldSample, publish: OnPublish) -> Packed:
        return self._mode.sample_held(runner, held, publish)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The place of this rank in a pipeline. `world` has the ranks of all stages."""

    stage: Stage = ONE_STAGE
    pipe: Pipe | None = None
    world: Collectives = ALONE

    def target(self, target: Target, *, beside: Mapping[str, object]) -> Target:
        """Returns the target that the stage's part is built for. `beside` has the values of options
        that do not go with stages; ConfigError is raised if one is set."""
        if self.stage.count == 1:
            return target
        asked = [flag for flag, value in beside.items() if value]
        if asked:
            raise ConfigError(
                f"{' and '.join(asked)} does not go with stages; leave out "
                "--pipeline-parallel-size",
                param="pipeline_parallel_size",
            )
        return replace(target, stage=self.stage)

    def drafts(self, options: SpecOptions | None) -> SpecOptions | None:
        """WHY: all stages find the same drafts, and only the last one knows the outputs with which
        a table of several rows is filled."""
        if self.stage.count == 1 or options is None:
            return options
        if options.algorithm != WITHOUT_MODEL:
            raise ConfigError(
                f"--speculative-algorithm {options.algorithm} reads hidden states of the last "
                f"stage; with --pipeline-parallel-size only {WITHOUT_MODEL} drafts",
                param="speculative_algorithm",
            )
        return msgspec.structs.replace(options, shared_table_size=0)

    def part_of(self, model: CausalModel) -> CausalModel:
        if self.pipe is None:
            return model
        if not isinstance(model, Decoder):
            raise ConfigError(
                "only models of native code that generate text can be divided into stages",
                param="pipeline_parallel_size",
            )
        own = stage_layers(self.stage, model.spec.config)
        staged = StagedDecoder(model, own, self.pipe)
        if any(_reads_elsewhere(layer.kv_layer, own) for layer in staged.layers):
            raise ConfigError(
                "layers of this model read the KV of a layer of another stage",
                param="pipeline_parallel_size",
            )
        return staged

    def mode_of(self, mode: DecodeMode, model: CausalModel) -> DecodeMode:
        if not isinstance(model, StagedDecoder):
            return mode
        is_last = self.stage.number == self.stage.count - 1
        return StagedMode(mode, model, samples=is_last)

    def agreed(self, spec: EngineSpec) -> EngineSpec:
        """Returns the spec with the fewest pages and the shortest context of all stages."""
        groups = tuple(
            msgspec.structs.replace(group, num_pages=self.world.least(group.num_pages))
            for group in spec.groups
        )
        length = self.world.least(spec.max_model_len)
        return msgspec.structs.replace(spec, groups=groups, max_model_len=length)


UNDIVIDED = Pipeline()


def groups_of(model: CausalModel) -> tuple[LayerGroup, ...]:
    """Returns the model's layers by their page tables, which are those of the whole model."""
    if not isinstance(model, StagedDecoder):
        return group_layers(model.layers)
    own = {layer.index for layer in model.layers}
    return tuple(
        replace(group, layers=tuple(layer for layer in group.layers if layer.index in own))
        for group in group_layers(model.every_layer)
    )


def _reads_elsewhere(kv_layer: int | None, own: StageLayers) -> bool:
    return kv_layer is not None and not own.has(kv_layer)
