"""One replayed step from close by: what it asks of the device, reads and writes."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.attention.base import AttentionKind, AttentionSite, Capabilities, StaticShape
from aserve.gpu.attention.flashinfer import wrappers
from aserve.gpu.attention.reference import TorchReference
from aserve.gpu.attention.registry import BACKENDS
from aserve.gpu.attention.sdpa import PagedSdpa
from aserve.gpu.attention.triton import TritonAttention
from aserve.gpu.cudagraph.graphs import StepGraph, StepGraphs
from aserve.gpu.decode.base import OnPublish
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.models.base import Attend
from aserve.gpu.runner import ModelRunner
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.gpu.step.future_map import LAST_TOKEN
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.results import Packed
from aserve.gpu.transfer.staging import DeviceArrays, HostArrays
from aserve.messages.base import ArrayI32, array_i32
from aserve.messages.results import StepResult
from tests.fakes.cuda import Event, FakeCuda, Graph, Stream
from tests.fakes.flashinfer import LISTED_IN_TORCH, FakeFlashInfer, Planner
from tests.fakes.graph_device import GraphDevice
from tests.fakes.hash_model import VOCAB, HashModel
from tests.gpu.attention.test_flashinfer import register
from tests.gpu.batch_builder import BatchBuilder, greedy
from tests.gpu.device.cuda.test_device import executor_on, unless_dead
from tests.gpu.drive import make_executor, request, serve
from tests.gpu.plain_engine import plain_outputs

PROMPTS = {
    row: [(5 * i * i + row * i + 3) % VOCAB for i in range(4 + 3 * row)] for row in (1, 2, 3)
}
# A step's words in, its graph, and its result out beside the next step.
MAX_CALLS = 16
PLAIN_CALLS = [
    *("aten.copy_.default", "replay", "aten.clone.default"),
    *("record_event", "wait_event", "on", "aten.copy_.default", "keep"),
    *("new_event", "record_event"),
]


def nothing(_done: int, _total: int) -> None:
    pass


# ---------------------------------------------------------------- what it asks for


class Counter:
    """Names of what was asked of torch and of CUDA while it counts."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.counts = False

    def note(self, name: str) -> None:
        if self.counts and threading.current_thread().name == "aserve-executor":
            self.asked.append(name)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A graph's replay is one call, whatever is in it, and so is a compiled planner's."""
        for owner, name in (
            (FakeCuda, "dispatch"),
            (FakeCuda, "on"),
            (FakeCuda, "new_event"),
            (FakeCuda, "keep"),
            (Event, "synchronize"),
            (Stream, "record_event"),
            (Stream, "wait_event"),
            (Graph, "replay"),
            (Planner, "plan"),
        ):
            monkeypatch.setattr(owner, name, self._noting(name, getattr(owner, name)))

    def _noting(self, name: str, real: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.note(str(args[1]) if name == "dispatch" else name)
            counted, self.counts = self.counts, self.counts and name != "plan"
            try:
                return real(*args, **kwargs)
            finally:
                self.counts = counted

        return noted


@pytest.mark.parametrize("has_new_page", [False, True])
@pytest.mark.parametrize(
    ("window", "sampling"),
    [
        (None, {}),
        (6, {}),
        (None, {"temperature": 0.8}),
        (6, {"temperature": 1.0, "top_p": 0.6}),
    ],
)
async def test_a_replayed_step_is_ten_calls(
    *,
    window: int | None,
    sampling: dict[str, float],
    has_new_page: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one layer group or two, whether a row gets a page or not."""
    executor = executor_on(
        FakeCuda(),
        lambda where: HashModel(window=window, device=where),
        graph_rows=1,
        debug_checks=False,
    )
    assert (
        await calls_of_a_decode(
            executor, has_new_page=has_new_page, monkeypatch=monkeypatch, **sampling
        )
        == PLAIN_CALLS
    )


@pytest.mark.parametrize("has_new_page", [False, True])
@pytest.mark.parametrize("window", [None, 6])
async def test_flashinfers_plan_adds_a_call_for_each_window_and_three(
    *, window: int | None, has_new_page: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event for its host memory, which is waited for when it is used again: long after."""
    cuda = FakeCuda()
    monkeypatch.setattr(wrappers, "FLOAT_BYTES", 16)
    register(monkeypatch, FakeFlashInfer(pinned_memory=cuda.pinned), ops=LISTED_IN_TORCH)
    executor = executor_on(
        cuda,
        lambda where: HashModel(window=window, device=where),
        attention="flashinfer",
        graph_rows=1,
        debug_checks=False,
    )
    num_windows = 1 if window is None else 2
    calls = await calls_of_a_decode(executor, has_new_page=has_new_page, monkeypatch=monkeypatch)
    planning = ["synchronize", *["plan"] * num_windows, "new_event", "record_event"]
    assert calls == [PLAIN_CALLS[0], *planning, *PLAIN_CALLS[1:]]
    assert len(calls) <= MAX_CALLS
    cuda.assert_sound()


@pytest.mark.parametrize("backend", [TorchReference, PagedSdpa, TritonAttention])
def test_attention_that_plans_in_its_graph_asks_for_nothing_before_a_replay(
    backend: type[TorchReference | PagedSdpa | TritonAttention],
) -> None:
    """So the calls above are all that there are with each of these."""
    assert backend.static_plans is None


async def calls_of_a_decode(
    executor: TorchExecutor, *, has_new_page: bool, monkeypatch: pytest.MonkeyPatch, **sampling: Any
) -> list[str]:
    """Row 1 has 7 positions and pages of 4: its second decode needs a page, and its third none.
    What the steps before have made once is there."""
    counter = Counter()
    counter.watch(monkeypatch)
    executor.capture_graphs(nothing)
    executor.start(asyncio.get_running_loop())
    try:
        builder = BatchBuilder(executor.spec)
        batches = [builder.batch({1: PROMPTS[1]}, sampling=[1], inits=[greedy(1, **sampling)])]
        batches += [builder.batch({1: [-1]}, sampling=[1]) for _ in range(3 - has_new_page)]
        assert {bool(part.rows) for part in batches[-1].page_writes} == {has_new_page}
        for batch in batches:
            is_last = batch is batches[-1]
            executor._inbox.put(functools.partial(setattr, counter, "counts", is_last))
            ticket = executor.launch(batch)
            executor._inbox.put(functools.partial(setattr, counter, "counts", False))
            assert isinstance(await unless_dead(executor, ticket.outcome), StepResult)
    finally:
        executor.close()
    return counter.asked


# ---------------------------------------------------------------- what it reads and writes


def tables_of(runner: ModelRunner) -> dict[str, Tensor]:
    """Everything on the device that outlives a step."""
    state = runner.state
    tables = {f"page_table{group}": table for group, table in enumerate(state.pools.page_tables)}
    for index, layer in state.pools.layers.items():
        tables |= {f"keys{index}": layer.keys, f"values{index}": layer.values}
    return tables | {
        "tokens": state.pools.token_pool,
        "stamps": state.relay.written_iter,
        "relay": state.relay._fields[LAST_TOKEN],
    }


def copied(tables: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: table.clone() for name, table in tables.items()}


class Comparing:
    """Runs each replayed step once more, eagerly, from where it began. What differs is in
    `found`: raised, it would be one more step that failed, and was tried again."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.found: list[AssertionError] = []
        self._replay = StepGraphs.replay

    def __call__(
        self, graphs: StepGraphs, graph: StepGraph, plan: StepPlan, publish: OnPublish
    ) -> Packed:
        try:
            return self._compare(graphs, graph, plan, publish)
        except AssertionError as error:
            self.found.append(error)
            raise

    def _compare(
        self, graphs: StepGraphs, graph: StepGraph, plan: StepPlan, publish: OnPublish
    ) -> Packed:
        runner = graphs._parts.runner
        tables = tables_of(runner)
        before = copied(tables)
        replayed = self._replay(graphs, graph, plan, publish)
        after = copied(tables)
        self.assert_only_own_rows_and_padding(runner, plan, before, after)
        for name, table in tables.items():
            table.copy_(before[name])
        indices = runner.stage(plan).write(np.zeros(len(graph.words), np.int32))
        staged = DeviceArrays(graph.words, indices)
        runner.apply(plan.batch, staged)
        eager = runner.step(graphs._padding(graph.shape), staged, publish)
        assert torch.equal(eager.words, replayed.words)
        assert eager.layout == replayed.layout
        for name, table in tables.items():
            assert torch.equal(table, after[name]), name
        self.num_steps += 1
        return replayed

    def assert_only_own_rows_and_padding(
        self,
        runner: ModelRunner,
        plan: StepPlan,
        before: dict[str, Tensor],
        after: dict[str, Tensor],
    ) -> None:
        """Trap 11. Row 0 is nobody's, as is page 0. New pages are emptied."""
        of_row = torch.from_numpy(array_i32(plan.batch.rows).astype(np.int64))
        at = torch.from_numpy(array_i32(plan.batch.kv_lens).astype(np.int64))
        rows = {0, *of_row.tolist()}
        growing = [set(array_i32(part.rows).tolist()) for part in plan.batch.page_writes]
        groups = range(len(growing))
        pools = runner.state.pools
        slots = {int(slot) for g in groups for slot in pools.slots(g, of_row, at)}
        new = {0, *(int(page) for part in plan.batch.page_writes for page in array_i32(part.pages))}
        slots |= {page * pools.page_size + i for page in new for i in range(pools.page_size)}
        for name in before:
            changed = (before[name] != after[name]).nonzero()[:, 0].tolist()
            if name.startswith("page_table"):
                assert set(changed) == growing[int(name[-1])] - {0}, name
            else:
                assert set(changed) <= (rows if name in ("stamps", "relay") else slots), name


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.6}])
@pytest.mark.parametrize("window", [None, 6])
def test_a_padded_replay_equals_the_eager_step_bit_for_bit_and_touches_nobody_else(
    sampling: dict[str, Any], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows in a graph of four, at every length from 7 on."""
    comparing = Comparing()
    monkeypatch.setattr(StepGraphs, "replay", lambda *args: comparing(*args))
    asked = [
        request(f"r{row}", ids, seed=row, max_tokens=14, **sampling) for row, ids in PROMPTS.items()
    ]
    model, device = HashModel(window=window), GraphDevice()
    executor = make_executor(model, device=device, graph_rows=4, debug_checks=False)
    executor.capture_graphs(nothing)
    served = serve(executor, asked)
    assert served.outputs == {(r.request_id, 0): plain_outputs(model, r) for r in asked}
    assert not comparing.found
    assert comparing.num_steps > 5


def test_words_that_the_graph_was_not_captured_with_are_a_bug() -> None:
    executor = make_executor(HashModel(), device=GraphDevice(), graph_rows=1)
    executor.capture_graphs(nothing)
    graphs = executor._graphs
    [graph, *_] = graphs._graphs.values()
    with pytest.raises(BugError, match="has 0 words; its graph was captured with"):
        graph.room_for(HostArrays())


# ---------------------------------------------------------------- attention's plans


class HostPlanned:
    """Attention that has lengths from its plan alone; a static one only from `refresh`."""

    def __init__(self, site: AttentionSite) -> None:
        self._reference = TorchReference(site.pools)
        self.made: list[StaticShape] = []
        self.refreshed: list[list[int]] = []

    @property
    def static_plans(self) -> HostPlanned:
        return self

    def is_better_eager(self, num_rows: int, shared_pages: int) -> bool:
        return False

    def make(self, shape: StaticShape) -> object:
        self.made.append(shape)
        return torch.full((shape.num_rows,), shape.width, dtype=torch.int64)

    def refresh(self, plan: object, lens: ArrayI32) -> None:
        assert isinstance(plan, Tensor)
        self.refreshed.append(lens.tolist())
        plan.copy_(torch.from_numpy(lens))

    def plan(self, batch: ForwardBatch) -> object:
        assert batch.lens_cpu is not None, "a captured forward is planned again"
        return torch.from_numpy(batch.lens_cpu.astype(np.int64))

    def bind(self, batch: ForwardBatch, plan: object) -> Attend:
        assert isinstance(plan, Tensor)
        return self._reference.bind(dataclasses.replace(batch, lens=plan), None)


@pytest.mark.parametrize("is_planned_ahead", [False, True])
def test_plans_of_the_host_are_refreshed_once_before_each_replay(
    *, is_planned_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay that was planned before still gets its own ids and positions."""
    can = Capabilities(host_lens=True, can_capture=True)
    monkeypatch.setitem(BACKENDS, "host-planned", lambda: AttentionKind(can, HostPlanned))
    find = StepGraphs.find

    def find_and_plan(graphs: StepGraphs, plan: StepPlan) -> StepGraph | None:
        graph = find(graphs, plan)
        if graph is not None:
            graphs.plan_ahead(graph, graph.padded(plan))
        return graph

    if is_planned_ahead:
        monkeypatch.setattr(StepGraphs, "find", find_and_plan)
    device = GraphDevice()
    executor = make_executor(
        HashModel(), device=device, graph_rows=4, attention="host-planned", prefix_cache=False
    )
    executor.capture_graphs(nothing)
    backend = executor._graphs._parts.attention
    assert isinstance(backend, HostPlanned)
    assert {shape.num_rows for shape in backend.made} == {1, 2, 4}
    asked = [request(f"r{row}", ids) for row, ids in PROMPTS.items()]
    served = serve(executor, asked)
    assert served.outputs == {(r.request_id, 0): plain_outputs(HashModel(), r) for r in asked}
    assert len(backend.refreshed) == device.num_replays > 5
    assert any(lens[3:] == [1] for lens in backend.refreshed)
