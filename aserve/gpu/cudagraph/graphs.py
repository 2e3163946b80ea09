"""Decode steps as captured graphs: which there are, which are wished for, and the replay of one.

A step is padded to the next captured number of rows on the host, its words go to where the graph
reads them, and what it leaves is copied before the next replay overwrites it. It knows no decode
mode. Everything here is written on the executor's thread.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.attention.base import AttentionBackend, StaticShape
from aserve.gpu.cudagraph.shapes import ShapeTable, StepShape, padded_plan, padding_plan, shape_of
from aserve.gpu.decode.base import OnPublish
from aserve.gpu.device.base import Captured, Cut, Device, slice_len_of
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


@dataclass(frozen=True, slots=True)
class StepGraph:
    """One shape's; `words`: where it reads its step's, int32 [n]."""

    shape: StepShape
    captured: Captured
    layout: Layout
    words: Tensor

    def padded(self, plan: StepPlan) -> StepPlan:
        """Of a step that `find` has found this graph for."""
        return padded_plan(plan, self.shape)

    def room_for(self, arrays: HostArrays) -> Tensor:
        """`words`, which these must fill."""
        if arrays.num_words != len(self.words):
            raise BugError(
                f"a step of {self.shape} has {arrays.num_words} words; its graph was captured "
                f"with {len(self.words)}"
            )
        return self.words


class StepGraphs:
    """All read their step's words at the front of one buffer."""

    __slots__ = ("_graphs", "_parts", "_pending", "_planned_for", "_plans", "_refused", "_words")

    def __init__(self, parts: GraphParts) -> None:
        self._parts = parts
        self._graphs: dict[StepShape, StepGraph] = {}
        self._pending: dict[StepShape, None] = {}  # in order
        self._refused: set[str] = set()  # kinds of sampling
        self._plans: dict[StepShape, object] = {}  # of attention
        self._planned_for: tuple[int, StepShape] | None = None
        shapes = parts.table.largest_first()
        staged = (parts.runner.stage(self._padding(shape)) for shape in shapes)
        num_words = max((arrays.num_words for arrays in staged), default=0)
        self._words = torch.zeros(num_words, dtype=torch.int32, device=parts.device.torch_device)

    @property
    def about(self) -> str:
        counts = self._parts.table.counts
        return f"graphs of up to {counts[-1]} rows" if counts else "no graphs"

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def request_all(self) -> int:
        """How many these are."""
        self._pending = dict.fromkeys(self._parts.table.largest_first())
        return len(self._pending)

    def find(self, plan: StepPlan) -> StepGraph | None:
        """None for a step that runs eagerly; if it need not, its graph is wished for.

        WHY a replay is not always best: where attention dominates, a way of it that saves most of
        its reading gains more than launches cost, which are hidden, the host being ahead.
        """
        planner = self._parts.attention.static_plans
        if planner and planner.is_better_eager(len(plan.rows), plan.batch.shared_pages):
            return None
        shape = shape_of(plan)
        padded = None if shape is None else self._parts.table.padded(shape)
        if padded is None or padded.sampling in self._refused:
            return None
        graph = self._graphs.get(padded)
        if graph is None:
            self._pending[padded] = None
        return graph

    def plan_ahead(self, graph: StepGraph, plan: StepPlan) -> None:
        """What attention plans on the host for this replay, if that is not done yet. `plan` is
        padded.
        """
        planner = self._parts.attention.static_plans
        step = plan.iteration, graph.shape
        if planner is not None and self._planned_for != step:
            planner.refresh(self._plans[graph.shape], plan.kv_lens + plan.query_lens)
            self._planned_for = step

    def replay(self, graph: StepGraph, plan: StepPlan, publish: OnPublish) -> Packed:
        """`plan` is padded, and its words are where the graph reads them. The result is a copy."""
        self.plan_ahead(graph, plan)
        words = graph.captured.replay(lambda lens: publish(lens.clone()))
        return Packed(words.clone(), graph.layout)

    def capture_next(self) -> None:
        """Captures what was wished for first. If it raises, `refuse` is to be called."""
        shape = next(iter(self._pending))
        self._graphs[shape] = self._capture(shape)
        del self._pending[shape]
        logger.debug("captured rows=%d sampling=%s", shape.num_rows, shape.sampling)

    def refuse(self, error: Exception) -> None:
        """What was wished for first cannot be had, nor anything of its kind."""
        refused = next(iter(self._pending))
        self._refused.add(refused.sampling)
        kept = (shape for shape in self._pending if shape.sampling != refused.sampling)
        self._pending = dict.fromkeys(kept)
        logger.warning(
            "steps of sampling=%s run without graphs: capturing %d rows failed with %s: %s",
            refused.sampling,
            refused.num_rows,
            type(error).__name__,
            error,
        )

    def _padding(self, shape: StepShape) -> StepPlan:
        spec = self._parts.spec
        slice_len = slice_len_of(self._parts.device, vocab_size=spec.vocab_size)
        return padding_plan(shape, spec, slice_len=slice_len)

    def _capture(self, shape: StepShape) -> StepGraph:
        parts = self._parts
        plan = self._padding(shape)
        planner = parts.attention.static_plans
        if planner is not None:
            of_forward = StaticShape(shape.num_rows, shape.width, parts.spec.max_model_len)
            self._plans[shape] = planner.make(of_forward)
            plan = dataclasses.replace(plan, attention_plan=self._plans[shape])
        arrays = parts.runner.stage(plan)
        host = parts.device.host_buffer(arrays.num_words)
        host.numpy().fill(0)
        places = arrays.write(host.numpy())
        words = parts.device.stage(host, self._words[: len(host)])
        layouts: list[Layout] = []

        def body(cut: Cut) -> Tensor:
            arrays = DeviceArrays(words, places)
            parts.runner.apply(plan.batch, arrays)
            packed = parts.runner.step(plan, arrays, cut)
            layouts.append(packed.layout)
            return packed.words

        captured = parts.device.capture(body)
        return StepGraph(shape, captured, layouts[-1], words)
