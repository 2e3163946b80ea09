"""`ForwardGraphs`: captured forwards of steps that are not replayed as a whole.

It is a `FusedStep` of the runner: a forward whose graph is there is replayed, and all else of the
step (the head, sampling, the relay) runs eagerly. All state is written on the executor's thread.
"""

# Theory of operation
#
# `StepGraphs` replays whole decode steps. A step that it cannot replay, because it has a prompt, a
# new row, penalties, logprobs, a mask or a shared prefix that is worth cascade attention, consists
# mostly of its forward. This is captured in one of two forms.
#
# A decode (one token per row) is captured as one graph with its attention. Its inputs are the rows
# of a static table (static_inputs.py), which is filled before each replay; attention's static plans
# are refreshed as for whole steps. So penalties and logprobs cost their own operators, and not
# those of the forward.
#
# Any other forward of up to `token_counts[-1]` tokens is captured in pieces: the model runs under a
# capture, and each call of `attend` ends a graph and begins the next. This is vLLM's PIECEWISE mode
# and SGLang's piecewise CUDA graph. Between two pieces attention runs eagerly with the step's own
# plan, on the real tokens only: so there is a graph per number of tokens and none per number of
# rows or lengths, and padded tokens write no KV. The piece before a layer's attention copies the
# heads into a buffer, and attention's result is copied into another one, from which the next piece
# reads (HandOver). The tables of rope that a piece computes stay where they are.
#
# Token counts. The padding is computed, too. Above 64 tokens there are 8 counts per power of two,
# so that padding is at most an eighth; below that, a forward takes as long as its weights are read,
# and there are two.
#
# A capture that fails, and those of its kind with more tokens, are not tried again. The reason is
# logged. A model with layers of latents runs its prompts eagerly: its attention chooses between two
# forms of these layers by the step, which a capture would freeze. So does a model with recurrent
# layers, which compute neighbouring rows with equally many tokens together.

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.attention.base import AttentionBackend, StaticShape
from aserve.gpu.cudagraph.static_inputs import DECODE_PADDING, HandOver, StaticTable, decode_batch
from aserve.gpu.decode.base import OnPublish
from aserve.gpu.device.base import Captured, Device, GraphBreak
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec
from aserve.gpu.layers.rope import RopeInputs
from aserve.gpu.lora.tables import LoraTables
from aserve.gpu.models.base import CausalModel, HiddenCapture
from aserve.gpu.models.ngram_embedding import id_window_of
from aserve.gpu.models.recurrent import recurrent_layers_of
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.gpu.step.id_windows import id_windows
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.resolve import DeviceState
from aserve.gpu.step.results import Packed

logger = logging.getLogger(__name__)

# How a step ran: as one graph, with its forward as one graph, with its forward in pieces, or
# operator by operator.
REPLAYED, FORWARD, PIECES, EAGER = "replayed", "forward", "pieces", "eager"
KINDS = (REPLAYED, FORWARD, PIECES, EAGER)
FINE_FROM = 64  # tokens
PER_OCTAVE = 8


@dataclass(frozen=True, slots=True)
class ForwardParts:
    """`row_counts` and `token_counts` are ascending, and empty where nothing is captured."""

    model: CausalModel
    state: DeviceState
    attention: AttentionBackend
    device: Device
    loras: LoraTables | None
    row_counts: tuple[int, ...]  # of decodes
    token_counts: tuple[int, ...]  # of forwards in pieces


@dataclass(frozen=True, slots=True)
class ForwardShape:
    num_tokens: int
    is_decode: bool
    rope_axes: int  # rows of the rope positions
    capture: tuple[tuple[int, ...], bool] | None  # layers whose hidden states are kept; before norm

    @property
    def kind(self) -> str:
        return FORWARD if self.is_decode else PIECES

    def is_at_least(self, other: ForwardShape) -> bool:
        """Whether this shape differs from the other one at most by more tokens."""
        same = dataclasses.replace(other, num_tokens=self.num_tokens)
        return self.num_tokens >= other.num_tokens and self == same

    def new_capture(self) -> HiddenCapture | None:
        return None if self.capture is None else HiddenCapture(*self.capture)


@dataclass(frozen=True, slots=True)
class Site:
    """A call of attention between two pieces. Its tensors have the padded number of tokens."""

    layer: LayerSpec
    inputs: AttentionInputs
    out: Tensor

    def first_inputs(self, num_tokens: int) -> AttentionInputs:
        rope = self.inputs.rope
        if rope is not None:
            rope = RopeInputs(rope.cos_sin[:num_tokens], rope.norms)
        return AttentionInputs(self.inputs.heads[:num_tokens], rope, self.inputs.sinks)


@dataclass(slots=True)
class ForwardGraph:
    """The captured forward of one shape. `sites` are empty for a decode."""

    shape: ForwardShape
    table: StaticTable
    kept: HiddenCapture | None = None
    sites: list[Site] = dataclasses.field(default_factory=list)
    plan: object | None = None  # attention's static plan
    captured: Captured | None = None

    def replay(self, on_break: GraphBreak) -> Tensor:
        assert self.captured is not None
        return self.captured.replay(on_break)


class ForwardGraphs:
    """`ran` is the kind of the last forward that did not belong to the capture of a step. Without
    `may_request` missing graphs are not requested, because that of the whole step is."""

    __slots__ = (
        *("_graphs", "_hand_over", "_is_paused", "_parts", "_pending", "_refused"),
        *("_window", "may_request", "ran"),
    )

    def __init__(self, parts: ForwardParts) -> None:
        self._parts = parts
        self._graphs: dict[ForwardShape, ForwardGraph] = {}
        self._pending: dict[ForwardShape, None] = {}  # shapes to capture, in order
        self._refused: list[ForwardShape] = []  # these and those with more tokens
        self._is_paused = False
        self._window = id_window_of(parts.model)
        self._hand_over = HandOver(
            parts.model.layers if parts.token_counts else (),
            max(parts.token_counts, default=0),
            dtype=parts.model.dtype,
            device=parts.device.torch_device,
        )
        self.may_request = True
        self.ran = EAGER

    # ------------------------------------------------------------ the runner's FusedStep

    def can_run(self, batch: ForwardBatch) -> bool:
        """Whether the graph of this forward is there. A missing one is requested."""
        if self._is_paused:
            return False
        self.ran = EAGER
        shape = self._shape_of(batch)
        if shape is None:
            return False
        is_there = shape in self._graphs
        if not is_there and self.may_request and not self._is_refused(shape):
            self._pending[shape] = None
        return is_there

    def run(self, batch: ForwardBatch) -> Tensor:
        shape = self._shape_of(batch)
        assert shape is not None
        graph = self._graphs[shape]
        graph.table.fill(self._values(batch, is_decode=shape.is_decode))
        num_tokens, self.ran = batch.num_tokens, shape.kind
        run = self._run_decode if shape.is_decode else self._run_pieces
        hidden = run(graph, batch)
        if batch.capture is not None and graph.kept is not None:
            kept = graph.kept
            batch.capture.layers.extend(values[:num_tokens] for values in kept.layers)
            if kept.before_norm is not None:
                batch.capture.before_norm = kept.before_norm[:num_tokens]
        return hidden[:num_tokens]

    def can_step(self, plan: StepPlan) -> bool:
        return False

    def step(self, plan: StepPlan, publish: OnPublish) -> Packed:
        raise BugError(f"step {plan.iteration}: captured forwards run no whole steps")

    # ------------------------------------------------------------ captures

    @property
    def about(self) -> str:
        """Completes the list of what is captured."""
        counts = self._parts.token_counts
        return f"pieces of up to {counts[-1]:,} tokens" if counts else "no pieces"

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def _at_start(self) -> list[ForwardShape]:
        """PERF: captured in this order, smaller graphs reuse the memory of larger ones."""
        return [
            ForwardShape(num_tokens, is_decode, 1, None)
            for is_decode, counts in (
                (False, self._parts.token_counts),
                (True, self._parts.row_counts),
            )
            for num_tokens in reversed(counts)
        ]

    def request_all(self) -> int:
        """Requests every shape that is captured at the start, and returns their number."""
        self._pending = dict.fromkeys(self._at_start())
        return len(self._pending)

    def request_largest(self) -> None:
        largest = {shape.kind: shape for shape in reversed(self._at_start())}
        self._pending = dict.fromkeys(largest.values())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within it every forward runs operator by operator, as the capture of a step needs it."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def capture_next(self) -> None:
        """Captures the first requested shape. If this raises, call `refuse`."""
        shape = next(iter(self._pending))
        capture = self._capture_decode if shape.is_decode else self._capture_pieces
        self._graphs[shape] = capture(shape)
        del self._pending[shape]
        logger.debug("captured kind=%s tokens=%d", shape.kind, shape.num_tokens)

    def refuse(self, reason: str) -> None:
        """Drops the first requested shape, and those that differ from it by more tokens."""
        shape = next(iter(self._pending))
        self._refused.append(shape)
        self._pending = dict.fromkeys(each for each in self._pending if not self._is_refused(each))
        logger.warning(
            "forwards of tokens=%d or more run without graphs (kind=%s), because capturing one "
            "failed: %s",
            *(shape.num_tokens, shape.kind, reason),
        )

    def _is_refused(self, shape: ForwardShape) -> bool:
        return any(shape.is_at_least(refused) for refused in self._refused)

    # ------------------------------------------------------------ shapes and inputs

    def _shape_of(self, batch: ForwardBatch) -> ForwardShape | None:
        """Returns the padded shape, or None if the forward must run eagerly."""
        if batch.features is not None or batch.tree_mask is not None:
            return None
        if not batch.num_tokens or not batch.needs_attention_plan():
            return None
        is_decode = self._is_decode(batch)
        counts = self._parts.row_counts if is_decode else self._parts.token_counts
        index = bisect.bisect_left(counts, batch.num_tokens)
        if index == len(counts):
            return None
        positions, capture = batch.rope_positions, batch.capture
        wanted = None if capture is None else (capture.layer_ids, capture.wants_before_norm)
        axes = 1 if positions.ndim == 1 else len(positions)
        return ForwardShape(counts[index], is_decode, axes, wanted)

    def _is_decode(self, batch: ForwardBatch) -> bool:
        """Whether the forward is replayed with its attention. Where a transfer wants the KV of each
        layer while the step runs, and where cascade attention is worth it, it runs in pieces."""
        parts = self._parts
        is_small = batch.num_rows <= max(parts.row_counts, default=0)
        if not is_small or batch.num_rows != batch.num_tokens or parts.state.kv_streams.are_open:
            return False
        planner = parts.attention.static_plans
        if planner is None:
            return True
        is_better_eager = planner.is_better_eager(batch.num_rows, batch.shared_pages)
        return batch.lens_cpu is not None and not is_better_eager

    def _values(self, batch: ForwardBatch, *, is_decode: bool) -> list[Tensor]:
        """Returns the rows of the static table, as `_table` lays them out."""
        parts = self._parts
        if is_decode:
            own = (batch.rows, batch.kv_lens, batch.lens, batch.input_ids, batch.cache_positions)
            values = [*own, *batch.slots]
        else:
            ids = id_windows(batch, parts.state.pools, self._window)
            values = [ids.view(batch.num_tokens, self._window).t()]
        values.append(batch.rope_positions)
        if parts.loras is not None:
            slots = parts.loras.token_slots
            values.append(batch.input_ids.new_zeros(batch.num_tokens) if slots is None else slots)
        return values

    def _table(self, shape: ForwardShape) -> StaticTable:
        parts = self._parts
        num_groups = len(parts.state.pools.page_tables)
        own = (*DECODE_PADDING, *[0] * num_groups) if shape.is_decode else [0] * self._window
        padding = [*own, *[0] * (shape.rope_axes + (parts.loras is not None))]
        return StaticTable(padding, shape.num_tokens, parts.device.torch_device)

    def _rope_positions(self, graph: ForwardGraph) -> Tensor:
        end = len(graph.table.values) - (self._parts.loras is not None)
        positions = graph.table.values[end - graph.shape.rope_axes : end]
        return positions[0] if graph.shape.rope_axes == 1 else positions

    @contextlib.contextmanager
    def _bound_loras(self, graph: ForwardGraph) -> Iterator[None]:
        """Within it, layers add the adapters of the slots in the table."""
        loras = self._parts.loras
        if loras is None:
            yield
            return
        own, loras.token_slots = loras.token_slots, graph.table.values[-1]
        try:
            yield
        finally:
            loras.token_slots = own

    # ------------------------------------------------------------ a decode in one graph

    def _capture_decode(self, shape: ForwardShape) -> ForwardGraph:
        parts = self._parts
        pools, max_len = parts.state.pools, parts.model.max_model_len
        graph = ForwardGraph(shape, self._table(shape))
        batch = decode_batch(graph.table.values, len(pools.page_tables), max_len)
        planner = parts.attention.static_plans
        if planner is not None:
            graph.plan = planner.make(StaticShape(shape.num_tokens, 1, max_len))

        def body(_break: GraphBreak) -> Tensor:
            plan = parts.attention.plan(batch) if graph.plan is None else graph.plan
            attend = parts.attention.bind(batch, plan)
            graph.kept = shape.new_capture()
            ids = id_windows(batch, pools, self._window)
            positions = self._rope_positions(graph)
            return parts.model.forward(ids, positions, attend, capture=graph.kept)

        with self._bound_loras(graph):
            graph.captured = parts.device.capture(body)
        return graph

    def _run_decode(self, graph: ForwardGraph, batch: ForwardBatch) -> Tensor:
        planner = self._parts.attention.static_plans
        if planner is not None:
            assert batch.lens_cpu is not None
            more = graph.shape.num_tokens - batch.num_rows
            planner.refresh(graph.plan, np.pad(batch.lens_cpu, (0, more), constant_values=1))
        return graph.replay(lambda _values: None)

    # ------------------------------------------------------------ a forward in pieces

    def _capture_pieces(self, shape: ForwardShape) -> ForwardGraph:
        parts, num_tokens = self._parts, shape.num_tokens
        graph = ForwardGraph(shape, self._table(shape))
        ids = graph.table.values[: self._window].t()

        def body(graph_break: GraphBreak) -> Tensor:
            graph.sites.clear()

            def attend(layer: LayerSpec, inputs: AttentionInputs) -> Tensor:
                heads = self._hand_over.heads(layer, num_tokens).copy_(inputs.heads)
                out = self._hand_over.out(layer, num_tokens)
                graph.sites.append(Site(layer, dataclasses.replace(inputs, heads=heads), out))
                graph_break(out)
                return out

            graph.kept = shape.new_capture()
            return parts.model.forward(
                ids[:, 0] if self._window == 1 else ids,
                self._rope_positions(graph),
                attend,
                capture=graph.kept,
            )

        with self._bound_loras(graph):
            graph.captured = parts.device.capture(body)
        return graph

    def _run_pieces(self, graph: ForwardGraph, batch: ForwardBatch) -> Tensor:
        attention, num_tokens = self._parts.attention, batch.num_tokens
        streams = self._parts.state.kv_streams
        attend = streams.watched(attention.bind(batch, attention.plan(batch)), num_tokens)
        sites = iter(graph.sites)

        def on_break(_values: Tensor) -> None:
            site = next(sites)
            site.out[:num_tokens].copy_(attend(site.layer, site.first_inputs(num_tokens)))

        return graph.replay(on_break)


def token_counts(most: int) -> tuple[int, ...]:
    """Returns the token counts to capture: powers of two and 1.5 times these up to 64, then 8 per
    power of two up to `most`. None for 0."""
    counts = {2**i * step // 2 for i in range(FINE_FROM.bit_length()) for step in (2, 3)}
    start = FINE_FROM
    while start < most:
        counts.update(range(start, 2 * start, start // PER_OCTAVE))
        start *= 2
    return tuple(sorted({*(count for count in counts if count <= most), most} - {0}))


def takes_pieces(model: CausalModel) -> bool:
    """Whether the model's attention may run between captured pieces."""
    has_plain = all(not layer.value_dim and not layer.index_top_k for layer in model.layers)
    return has_plain and not recurrent_layers_of(model)
