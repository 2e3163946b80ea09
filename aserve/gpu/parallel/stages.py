"""One stage of a pipeline: its part of a decoder, and its part of each step.

All stages get the same batches and keep the same tables, so each of them resolves ids and lengths
alone. The residual stream travels from stage to stage, as wide as it is computed, which gives the
same bits as one device does. Only the last stage samples. No row is in two steps at once (`lead` is
1), so the scheduler knows every token that a step reads, and none travels back but drafts.

A drafter that reads token ids alone is on every stage. Any other one is on the last stage: it reads
the hidden states there, and those of earlier layers travel with the residual stream. Its drafts
travel to the first stage, which embeds them (staged_drafts.py). They are made before the turn of
their step, while the last stage runs another one (early_drafts.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor

from aserve.errors import BugError, ConfigError
from aserve.gpu.decode.base import DecodeMode, OnPublish, StepRunner
from aserve.gpu.kv.layer_groups import LayerGroup, LayerSpec, group_layers
from aserve.gpu.layers.norm import AddNorm, Norm
from aserve.gpu.models.base import Attend, CausalModel, HiddenCapture
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.models.stages import StageLayers, stage_layers
from aserve.gpu.parallel.collectives import ALONE, Collectives
from aserve.gpu.parallel.early_drafts import EarlyDrafts
from aserve.gpu.parallel.pipe import Pipe
from aserve.gpu.parallel.staged_drafts import (
    UNWATCHED,
    DraftSender,
    ReceivedDrafts,
    StepWatch,
    TurnDevice,
)
from aserve.gpu.spec.request import DraftRequest, LoadedDrafter
from aserve.gpu.spec.tree import DraftTrees
from aserve.gpu.step.forward_batch import ForwardBatch, ForwardOverrides
from aserve.gpu.step.future_map import LAST_TOKEN, SEQ_LEN
from aserve.gpu.step.held import HeldSample
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.resolve import DeviceStep
from aserve.gpu.step.results import Packed, pack_nothing
from aserve.gpu.transfer.staging import DeviceArrays
from aserve.gpu.weights.source import ONE_STAGE, Stage, Target, wide_dtype
from aserve.messages.executor import EngineSpec
from aserve.messages.step import DraftTree, ScheduleBatch

WITHOUT_MODEL = "NGRAM"  # the drafter that reads token ids alone
UNKNOWN = -1  # a length that only the last stage knows
FAR = 1 << 31  # more drafts than any drafter has


class StagedDecoder:
    """A `CausalModel` of the layers of one stage."""

    def __init__(self, decoder: Decoder, own: StageLayers, pipe: Pipe) -> None:
        self.layers = tuple(layer for layer in decoder.layers if own.has(layer.index))
        self.every_layer = decoder.layers
        self.every_recurrent_layer = decoder.recurrent_layers
        self.recurrent_layers = tuple(
            layer for layer in decoder.recurrent_layers if own.has(layer.index)
        )
        self.vocab_size = decoder.vocab_size
        self.hidden_size = decoder.hidden_size
        self.max_model_len = decoder.max_model_len
        self.dtype = decoder.dtype
        self.iteration = 0  # of the step that runs
        self.decoder = decoder
        self.own = own
        self.captured: tuple[int, ...] = ()  # layers whose streams the drafter reads
        self.captures = False  # the step that runs has a drafter
        self.is_first, self.is_last = own.is_first, own.is_last
        self.blocks = decoder.blocks[own.first : own.end]
        self.first_norm = decoder.first_norm if own.is_first else _norm_before(decoder, own.first)
        self.pipe = pipe
        is_compiled = pipe.device.type == "cpu"  # which computes wide streams
        self._sent_dtype = wide_dtype(self.dtype) if is_compiled else self.dtype
        self.drafts: DraftSender | ReceivedDrafts | None = None  # that travel between stages
        self.draft_early: Callable[[], None] = _do_nothing
        self._streams: list[Tensor] = []  # captured in this step, [tokens, hidden] each

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
        own = self.own_capture(capture)
        normed = self.first_norm(hidden)
        cos_sin = [rotary.at(positions) for rotary in decoder.rotaries]
        for index, block in enumerate(self.blocks):
            hidden, normed = block(hidden, normed, cos_sin[block.rotary], attend)
            if index in own.layer_ids:
                own.layers.append(hidden)
        own.before_norm = hidden
        self.finish(hidden, own, capture)
        return normed

    def own_capture(self, capture: HiddenCapture | None) -> HiddenCapture:
        """Returns a capture of this stage's layers, which are counted from its first one."""
        wanted = self.captured if self.captures else ()
        first = self.own.first
        ids = tuple(index - first for index in wanted if self.own.has(index))
        return HiddenCapture(ids, capture is not None and capture.wants_before_norm)

    def receive(self, num_tokens: int) -> Tensor:
        """Returns the residual stream of the stage before, [tokens, hidden], and keeps the streams
        that earlier stages captured."""
        wanted = self.captured if self.captures else ()
        num_streams = 1 + sum(index < self.own.first for index in wanted)
        shape = (num_streams, num_tokens, self.hidden_size)
        streams = torch.empty(shape, dtype=self._sent_dtype, device=self.pipe.device)
        self.draft_early()
        if not self.pipe.receive(self.iteration, streams):
            raise BugError(f"the stage before has left out step {self.iteration}")
        self.draft_early()
        self._streams = list(streams[1:].to(self.dtype))
        return streams[0]

    def finish(self, stream: Tensor, own: HiddenCapture, capture: HiddenCapture | None) -> None:
        """Sends the residual stream [tokens, hidden], and the streams that were captured so far, to
        the next stage. The last stage gives them to its drafter."""
        streams, self._streams = [*self._streams, *own.layers], []
        if not self.is_last:
            sent = [each.to(self._sent_dtype) for each in (stream, *streams)]
            self.pipe.send(self.iteration, torch.stack(sent))
        elif capture is not None:
            capture.layers.extend(streams)
            capture.before_norm = own.before_norm if capture.wants_before_norm else None

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)


def _do_nothing() -> None:
    """A stage without a drafter drafts nothing."""


def _norm_before(decoder: Decoder, first: int) -> Norm:
    """The norm before the layer `first`, which the layer before it owns."""
    found = decoder.blocks[first - 1].before_next
    if isinstance(found, AddNorm):
        return found.norm
    return lambda hidden: found(hidden, torch.zeros_like(hidden))[1]  # a kernel adds and norms


class StagedMode:
    """The decode mode of a stage. The last stage samples by the engine's mode, and the others find
    the same drafts by it."""

    def __init__(self, mode: DecodeMode, model: StagedDecoder, ranks: Collectives) -> None:
        """ranks: those of this stage."""
        self.caps = mode.caps
        self.can_fuse = False
        self.fields = mode.fields
        self.num_forwards = mode.num_forwards
        self.num_draft_forwards = mode.num_draft_forwards
        self.graph_widths = mode.graph_widths
        self._mode = mode
        self._model = model
        self._samples = model.is_last
        self._drafts = model.drafts
        self._device: TurnDevice | None = None  # None: the step is none of the executor's
        self._early: EarlyDrafts | None = None
        self._trees: DraftTrees | None = None
        if not isinstance(self._drafts, DraftSender):
            if mode.caps.tree is not None:
                self._trees = DraftTrees(mode.caps.tree, mode.caps.max_tokens_per_step - 1)
        else:
            self._early = EarlyDrafts(mode, self._drafts, ranks, vocab_size=model.vocab_size)

    def note_launch(self, batch: ScheduleBatch) -> None:
        """The step will have its turn. It is called on the event loop's thread."""
        if self._early is not None:
            self._early.note(batch)

    def begin(self, runner: StepRunner, batch: ScheduleBatch, device: TurnDevice) -> None:
        """The step has its turn. Nothing of it has been written yet."""
        self._device = device
        self._receive(runner, batch)

    def _receive(self, runner: StepRunner, batch: ScheduleBatch) -> None:
        if isinstance(self._drafts, ReceivedDrafts):
            self._drafts.begin(runner, batch, self._device)

    def draft(self, runner: StepRunner, plan: StepPlan, arrays: DeviceArrays) -> None:
        if self._early is not None:
            self._early.draft(runner, plan, arrays)
            return
        self._receive(runner, plan.batch)
        self._mode.draft(runner, plan, arrays)
        if self._drafts is not None:
            self._drafts.pass_step(plan.iteration)

    def step(self, runner: StepRunner, step: DeviceStep, publish: OnPublish) -> Packed:
        self._model.iteration = step.plan.iteration
        self._model.captures = not step.plan.batch.skips_drafter
        early, device = self._early, self._device
        if early is not None and device is not None:
            early.await_launch(device)
            self._model.draft_early = functools.partial(early.make, runner, device)
        if self._samples:
            return self._mode.step(runner, step, publish)
        runner.forward(self._planted(runner, step))
        rows, relay = step.batch.rows, runner.relay
        if SEQ_LEN in relay:
            # How many drafts are accepted is known in the last stage. The host knows it before the
            # row's next step, whose length is exact.
            has_drafts = step.arrays.ints("num_drafts") > 0
            relay.publish(rows, torch.where(has_drafts, UNKNOWN, step.batch.lens))
        relay.stash(rows, {LAST_TOKEN: torch.zeros_like(rows)}, iteration=step.iteration)
        return pack_nothing(rows.device)

    def _planted(self, runner: StepRunner, step: DeviceStep) -> ForwardBatch:
        """Returns the forward with the positions and masks of its draft trees."""
        tree = None if self._trees is None else self._trees.of(step, runner.relay)
        if tree is None:
            return step.batch
        overrides = ForwardOverrides(rope_positions=tree.positions, tree_mask=tree.mask)
        return step.batch.overridden(overrides, is_debug=step.batch.is_debug)

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

    def load_drafter(
        self, request: DraftRequest, load: Callable[[DraftRequest], LoadedDrafter]
    ) -> LoadedDrafter:
        """Returns the drafter of this stage. All stages call it together.

        WHY: where all stages draft, they find the same drafts, and only the last one knows the
        outputs with which a table of several rows is filled."""
        model, options = request.target, request.options
        if not isinstance(model, StagedDecoder):
            return load(request)
        if options.algorithm == WITHOUT_MODEL:
            options = msgspec.structs.replace(options, shared_table_size=0)
            return load(replace(request, options=options))
        if not model.is_last:
            model.drafts = self._received(model)
            model.captured = self._agreed_layers(model, ())
            return LoadedDrafter(model.drafts, None, "in the last stage")
        loaded = load(replace(request, target=model.decoder))
        if loaded.model is not None:
            refuse_kv_elsewhere(loaded.model.layers, model.own)
        tree = loaded.drafter.tree
        self.world.least(loaded.drafter.max_drafts)
        self.world.least(0 if tree is None else tree.max_depth)
        model.captured = self._agreed_layers(model, loaded.drafter.inputs.layer_ids)
        model.drafts = DraftSender(loaded.drafter, model.pipe)
        return replace(loaded, drafter=model.drafts)

    def _received(self, model: StagedDecoder) -> ReceivedDrafts:
        """Returns the drafts of a stage before the last one."""
        max_drafts, depth = self.world.least(FAR), self.world.least(FAR)
        tree = DraftTree(depth) if depth else None
        is_read = model.is_first or tree is not None
        is_passed_on = tree is not None and self.stage.number + 2 < self.stage.count
        pipe = model.pipe
        return ReceivedDrafts(
            max_drafts, pipe if is_read else None, pipe if is_passed_on else None, tree
        )

    def _agreed_layers(self, model: StagedDecoder, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the layers whose streams the last stage wants."""
        numbers = range(len(model.decoder.blocks))
        return tuple(n for n in numbers if not self.world.least(int(n not in wanted)))

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

    def mode_of(self, mode: DecodeMode, model: CausalModel, ranks: Collectives) -> DecodeMode:
        """ranks: those of this stage."""
        if not isinstance(model, StagedDecoder):
            return mode
        return StagedMode(mode, model, ranks)

    def agreed(self, spec: EngineSpec) -> EngineSpec:
        """Returns the spec with the fewest pages and checkpoints, and the shortest context, of all
        stages."""
        groups = tuple(
            msgspec.structs.replace(group, num_pages=self.world.least(group.num_pages))
            for group in spec.groups
        )
        length = self.world.least(spec.max_model_len)
        num_checkpoints = self.world.least(spec.num_checkpoints)
        needs_checkpoints = spec.decode.is_recurrent
        return msgspec.structs.replace(
            spec,
            groups=groups,
            max_model_len=length,
            num_checkpoints=num_checkpoints,
            prefix_cache=spec.prefix_cache and (num_checkpoints > 0 or not needs_checkpoints),
        )


UNDIVIDED = Pipeline()


def watch_of(mode: DecodeMode, runner: StepRunner) -> StepWatch:
    """Returns what a pipeline's stage does when a step is launched, and when it has its turn."""
    if not isinstance(mode, StagedMode):
        return UNWATCHED
    return StepWatch(mode.note_launch, functools.partial(mode.begin, runner))


def groups_of(model: CausalModel) -> tuple[LayerGroup, ...]:
    """Returns the model's layers by their page tables, which are those of the whole model."""
    if not isinstance(model, StagedDecoder):
        return group_layers(model.layers)
    own = {layer.index for layer in model.layers}
    return tuple(
        replace(group, layers=tuple(layer for layer in group.layers if layer.index in own))
        for group in group_layers(model.every_layer)
    )


def refuse_kv_elsewhere(layers: Sequence[LayerSpec], own: StageLayers) -> None:
    """Refuses a drafter of these layers if it reads KV of the model which earlier stages have."""
    stored = {layer.index for layer in layers if layer.kv_layer is None}
    read = {layer.kv_layer for layer in layers if layer.kv_layer is not None} - stored
    if elsewhere := sorted(layer for layer in read if not own.has(layer)):
        raise ConfigError(
            f"the drafter reads the KV of the layers {elsewhere}, but the "
            f"last stage has the layers {own.first} to {own.end - 1}; lower "
            "--pipeline-parallel-size, or take another --speculative-algorithm",
            param="speculative_algorithm",
        )


def _reads_elsewhere(kv_layer: int | None, own: StageLayers) -> bool:
    return kv_layer is not None and not own.has(kv_layer)
