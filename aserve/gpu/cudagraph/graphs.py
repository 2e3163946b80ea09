"""`StepGraphs`: the captured graphs of decode steps, their capture, and their replay.

All state is written on the executor's thread.
"""

# Theory of operation
#
# A decode step of a few rows is hundreds of kernels of a few microseconds each, and launching them
# from Python takes longer than running them. A captured graph holds these launches, and one call
# replays them. A graph reads and writes the very addresses, and has the very shapes, of its
# capture. So everything in a step that differs from replay to replay must be data in buffers.
#
# What is captured. The whole step: apply, resolve, forward, sampling and stash, as one call of
# `ModelRunner.step`. All its host values are staged words (DeviceArrays), and the only buffer that
# the host fills is `_words`, from which every graph reads its step. Tables (row parameters, page
# tables, relay) are allocated before the first capture and never move.
#
# Shapes. A step is replayed if `shape_of` (shapes.py) finds a StepShape: all rows have the same
# number of tokens, all are sampled, none is new, and sampling needs no more than the shape says. A
# decode mode declares the widths (tokens per row) that are worth a graph. With speculation a graph
# has the whole decode step: draft, forward, verify and extend. Its rows have equally many drafts; a
# step of rows with different numbers of drafts runs eagerly. Windows that are narrower than the
# drafter's longest, and those of predictions, are captured when a step has them (ShapeTable). Rows
# are padded on the host, as part of the StepPlan, up to the next captured number of rows. Padding
# rows are row 0 with KV length 0 and write to page 0, so a replay touches nothing that belongs to a
# request. The result has the padded length, and its reader drops the last rows.
#
# Capture. The shape's padding plan is run under `Device.capture`. Host values that the code reads
# while it is captured (the longest row, whether sampling needs noise) are set to the most that the
# shape allows, because a replay cannot change them. Capturing starts with the largest shape, so
# that smaller ones fit into its memory. A shape that is first met in a running engine goes to
# `_pending`, its step runs eagerly, and the executor thread captures it when it is idle. If a
# capture fails, for instance because there is too little memory, its shape and those with more rows
# are not captured any more. Graphs that are there stay in use.
#
# Ranks. A captured step contains the collectives of its layers, and running it once before the
# capture takes part in them. So all ranks must capture the same shapes between the same two steps.
# They get the same steps in the same order, so the same shapes become pending at the same step; a
# shape is captured right behind that step, and not when the executor is idle, which each rank would
# be at another time. After each capture the ranks agree whether all of them have it.
#
# Experts. Those of ranks may move between two steps (gpu/parallel/balancer.py), but not within a
# capture. Each replay is told of as a forward.
#
# Attention. Some backends plan on the host for each step. Under graphs they make a plan per shape
# (`StaticPlans.make`), whose buffers the graph reads, and `refresh` it before each replay.
#
# Published lengths. With speculation the host wants the lengths in the middle of a step. The
# capture is split there: the part before is replayed, then `publish` copies the lengths out, then
# the rest is replayed.
#
# Results. All graphs share one memory pool, so the next replay may overwrite what this one leaves.
# Lengths and packed results are therefore cloned on the stream right after the replay.

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.attention.base import AttentionBackend, StaticShape
from aserve.gpu.cudagraph.forwards import REPLAYED, ForwardGraphs
from aserve.gpu.cudagraph.shapes import ShapeTable, StepShape, padded_plan, padding_plan, shape_of
from aserve.gpu.decode.base import OnPublish
from aserve.gpu.device.base import Captured, Device, GraphBreak, slice_len_of
from aserve.gpu.parallel.collectives import ALONE, Collectives
from aserve.gpu.parallel.experts import ExpertRanks
from aserve.gpu.runner import ModelRunner
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.results import Layout, Packed
from aserve.gpu.transfer.staging import DeviceArrays, HostArrays
from aserve.messages.executor import EngineSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GraphParts:
    runner: ModelRunner
    device: Device
    attention: AttentionBackend
    spec: EngineSpec
    table: ShapeTable
    ranks: Collectives = ALONE  # that capture together
    forwards: ForwardGraphs | None = None  # those of steps that have no graph
    experts: ExpertRanks | None = None


class Launched(NamedTuple):
    """When a step was launched, and how it ran (`StepGraphs.ran`)."""

    start_s: float
    ran: str


@dataclass(frozen=True, slots=True)
class StepGraph:
    """The captured step of one shape."""

    shape: StepShape
    captured: Captured
    layout: Layout
    words: Tensor  # int32 [n], the buffer from which the graph reads its step
    page_size: int

    def padded(self, plan: StepPlan) -> StepPlan:
        """Returns the plan of a step for which `find` returned this graph, padded to its shape."""
        return padded_plan(plan, self.shape, self.page_size)

    def room_for(self, arrays: HostArrays) -> Tensor:
        """`words`, after a check that the arrays fill it exactly."""
        if arrays.num_words != len(self.words):
            raise BugError(
                f"a step of {self.shape} has {arrays.num_words} words; its graph was captured "
                f"with {len(self.words)}"
            )
        return self.words


class StepGraphs:
    """Graphs by shape. All read their step from the beginning of one buffer."""

    __slots__ = ("_graphs", "_parts", "_pending", "_plans", "_refused", "_words")

    def __init__(self, parts: GraphParts) -> None:
        self._parts = parts
        self._graphs: dict[StepShape, StepGraph] = {}
        self._pending: dict[StepShape, None] = {}  # shapes to capture, in order
        self._refused: list[StepShape] = []  # these and those with more rows are not captured
        self._plans: dict[StepShape, object] = {}  # attention's static plans
        shapes = parts.table.largest()
        staged = (parts.runner.stage(self._padding(shape)) for shape in shapes)
        num_words = max((arrays.num_words for arrays in staged), default=0)
        self._words = torch.zeros(num_words, dtype=torch.int32, device=parts.device.torch_device)

    @property
    def about(self) -> str:
        counts, forwards = self._parts.table.counts, self._parts.forwards
        about = f"graphs of up to {counts[-1]} rows" if counts else "no graphs"
        return about if forwards is None else f"{about}, {forwards.about}"

    @property
    def has_pending(self) -> bool:
        forwards = self._parts.forwards
        return bool(self._pending) or (forwards is not None and forwards.has_pending)

    def is_due(self, *, is_idle: bool) -> bool:
        """Returns whether the next pending shape is to be captured now."""
        return self.has_pending and (is_idle or self._parts.ranks is not ALONE)

    def capture_all(self, on_progress: Callable[[int, int], None]) -> None:
        """Captures every shape that is captured at the start."""
        self._pending = dict.fromkeys(self._parts.table.at_start())
        total = len(self._pending)
        if self._parts.forwards is not None:
            total += self._parts.forwards.request_all()
        for number in range(total):
            if self.has_pending:
                self.capture_next()
            on_progress(number + 1, total)

    def capture_largest(self) -> None:
        """Captures the largest shape of each kind."""
        self._pending = dict.fromkeys(self._parts.table.largest())
        if self._parts.forwards is not None:
            self._parts.forwards.request_largest()
        while self.has_pending:
            self.capture_next()

    def ran(self, graph: StepGraph | None) -> str:
        """Returns how a step ran that was just launched, `graph` being its own. Empty on a device
        that captures nothing."""
        forwards = self._parts.forwards
        if graph is not None or forwards is None:
            return "" if graph is None else REPLAYED
        return forwards.ran

    def find(self, plan: StepPlan) -> StepGraph | None:
        """Returns the graph for a step, or None if there is none. A missing graph that could be
        captured is requested.

        WHY a replay is not always faster: cascade attention is not captured, and reads a shared
        prefix once. Such a step runs in pieces, if forwards are captured (forwards.py).
        """
        forwards = self._parts.forwards
        if forwards is not None:
            forwards.may_request = True
        if not self._parts.table.counts:
            return None
        planner = self._parts.attention.static_plans
        if planner and planner.is_better_eager(len(plan.rows), plan.batch.shared_pages):
            return None
        pictures = self._parts.runner.pictures
        if pictures is not None and pictures.touches(plan):
            return None
        shape = shape_of(plan, self._parts.spec.page_size)
        padded = None if shape is None else self._parts.table.padded(shape)
        if padded is None:
            return None
        graph = self._graphs.get(padded)
        if graph is None and not self._is_refused(padded):
            self._pending[padded] = None
            if forwards is not None:
                forwards.may_request = False
        return graph

    def replay(self, graph: StepGraph, plan: StepPlan, publish: OnPublish) -> Packed:
        """Replays a graph whose words have been staged. `plan` is padded. The result is a copy."""
        if self._parts.experts is not None:
            self._parts.experts.before_replay()
        planner = self._parts.attention.static_plans
        if planner is not None:
            planner.refresh(self._plans[graph.shape], plan.kv_lens + plan.query_lens)
        words = graph.captured.replay(lambda lens: publish(lens.clone()))
        return Packed(words.clone(), graph.layout)

    def capture_next(self) -> None:
        """Captures the first requested shape. One that fails, on any rank, is refused, unless the
        device has become unusable: then this raises. Whole steps come first.
        """
        forwards = self._parts.forwards
        if forwards is not None and not self._pending:
            self._capture_forward(forwards)
            return
        shape = next(iter(self._pending))
        graph: StepGraph | None = None
        reason = "it failed on another rank"
        try:
            with contextlib.nullcontext() if forwards is None else forwards.paused():
                graph = self._capture(shape)
        except Exception as error:
            reason = self._reason_of(error)
        if not self._parts.ranks.least(graph is not None) or graph is None:
            self._refuse(reason)
            return
        self._graphs[shape] = graph
        del self._pending[shape]
        logger.debug("captured rows=%d sampling=%s", shape.num_rows, shape.sampling)

    def _capture_forward(self, forwards: ForwardGraphs) -> None:
        try:
            forwards.capture_next()
        except Exception as error:
            forwards.refuse(self._reason_of(error))

    def _reason_of(self, error: Exception) -> str:
        """Raises if the error has made the device unusable."""
        self._parts.device.mark()
        return f"{type(error).__name__}: {error}"

    def _refuse(self, reason: str) -> None:
        """Drops the first requested shape, and those that differ from it by more rows."""
        refused = next(iter(self._pending))
        self._refused.append(refused)
        kept = (shape for shape in self._pending if not self._is_refused(shape))
        self._pending = dict.fromkeys(kept)
        logger.warning(
            "steps with rows=%d or more, width=%d and sampling=%s run without graphs, because "
            "capturing one failed: %s",
            refused.num_rows,
            refused.width,
            refused.sampling,
            reason,
        )

    def _is_refused(self, shape: StepShape) -> bool:
        return any(shape.is_at_least(refused) for refused in self._refused)

    def _padding(self, shape: StepShape) -> StepPlan:
        spec = self._parts.spec
        slice_len = slice_len_of(self._parts.device, vocab_size=spec.vocab_size)
        return padding_plan(shape, spec, slice_len=slice_len)

    def _capture(self, shape: StepShape) -> StepGraph:
        parts = self._parts
        plan = self._padding(shape)
        planner = parts.attention.static_plans
        if planner is not None:
            static_shape = StaticShape(shape.num_rows, shape.width, parts.spec.max_model_len)
            self._plans[shape] = planner.make(static_shape)
            plan = dataclasses.replace(plan, attention_plan=self._plans[shape])
        arrays = parts.runner.stage(plan)
        host = parts.device.host_buffer(arrays.num_words)
        host.numpy().fill(0)
        slices = arrays.write(host.numpy())
        words = parts.device.stage(host, self._words[: len(host)])
        layouts: list[Layout] = []

        def body(graph_break: GraphBreak) -> Tensor:
            arrays = DeviceArrays(words, slices)
            parts.runner.apply(plan.batch, arrays)
            packed = parts.runner.step(plan, arrays, graph_break)
            layouts.append(packed.layout)
            return packed.words

        with contextlib.nullcontext() if parts.experts is None else parts.experts.capturing():
            captured = parts.device.capture(body)
        return StepGraph(shape, captured, layouts[-1], words, parts.spec.page_size)
