"""One replayed step from close by: what it asks of the device, reads and writes."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.attention.flashinfer import wrappers
from aserve.gpu.cudagraph.graphs import StepGraph, StepGraphs
from aserve.gpu.decode.base import OnPublish
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.runner import ModelRunner
from aserve.gpu.step.future_map import LAST_TOKEN
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.results import Packed
from aserve.gpu.transfer.staging import DeviceArrays, HostArrays
from aserve.messages.base import array_i32
from aserve.messages.results import StepResult
from tests.fakes.cuda import Event, FakeCuda, Graph, Stream
from tests.fakes.flashinfer import LISTED_IN_TORCH, FakeFlashInfer, Planner
from tests.fakes.graph_device import GraphDevice
from tests.fakes.hash_model import VOCAB, HashModel
from tests.gpu.attention.test_flashinfer import register
from tests.gpu.batch_builder import greedy, running
from tests.gpu.device.cuda.test_device import executor_on, unless_dead
from tests.gpu.drive import captured, make_executor, request, serve
from tests.gpu.plain_engine import plain_tokens

PROMPTS = {
    row: [(5 * i * i + row * i + 3) % VOCAB for i in range(4 + 3 * row)] for row in (1, 2, 3)
}
# A step's words in, its graph, and its result out beside the next step.
PLAIN_CALLS = [
    *("aten.copy_.default", "replay", "aten.clone.default"),
    *("record_event", "wait_event", "on", "aten.copy_.default", "keep"),
    *("new_event", "record_event"),
]


# ---------------------------------------------------------------- what it asks for


class Counter:
    """Names of what was asked of torch and of CUDA while it counts. A graph's replay is one call,
    whatever is in it, and so is a compiled planner's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.counts = False
        for owner, names in (
            (FakeCuda, ("dispatch", "on", "new_event", "keep")),
            (Event, ("synchronize",)),
            (Stream, ("record_event", "wait_event")),
            (Graph, ("replay",)),
            (Planner, ("plan",)),
        ):
            for name in names:
                monkeypatch.setattr(owner, name, self._noting(name, getattr(owner, name)))

    def _noting(self, name: str, real: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if self.counts and threading.current_thread().name == "aserve-executor":
                self.asked.append(str(args[1]) if name == "dispatch" else name)
            counted, self.counts = self.counts, self.counts and name != "plan"
            try:
                return real(*args, **kwargs)
            finally:
                self.counts = counted

        return noted


@pytest.mark.parametrize(
    ("attention", "window", "sampling", "has_new_page"),
    [
        ("torch-ref", None, {}, False),
        ("torch-ref", 6, {}, True),
        ("torch-ref", None, {"temperature": 0.8}, True),
        ("torch-ref", 6, {"temperature": 1.0, "top_p": 0.6}, False),
        ("flashinfer", None, {}, False),
        ("flashinfer", 6, {}, True),
    ],
)
async def test_a_replayed_step_is_ten_calls_and_flashinfer_adds_three_and_one_for_each_window(
    *,
    attention: str,
    window: int | None,
    sampling: dict[str, float],
    has_new_page: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FlashInfer has an event for its host memory, which is waited for when it is used again: long
    after."""
    cuda = FakeCuda()
    planning: list[str] = []
    if attention == "flashinfer":
        monkeypatch.setattr(wrappers, "FLOAT_BYTES", 16)
        register(monkeypatch, FakeFlashInfer(pinned_memory=cuda.pinned), ops=LISTED_IN_TORCH)
        num_windows = 1 if window is None else 2
        planning = ["synchronize", *["plan"] * num_windows, "new_event", "record_event"]
    executor = executor_on(
        cuda,
        lambda where: HashModel(window=window, device=where),
        attention=attention,
        graph_rows=1,
        debug_checks=False,
    )
    calls = await calls_of_a_decode(
        executor, has_new_page=has_new_page, monkeypatch=monkeypatch, **sampling
    )
    assert calls == [PLAIN_CALLS[0], *planning, *PLAIN_CALLS[1:]]
    cuda.assert_sound()


async def calls_of_a_decode(
    executor: TorchExecutor, *, has_new_page: bool, monkeypatch: pytest.MonkeyPatch, **sampling: Any
) -> list[str]:
    """Row 1 has 7 positions and pages of 4: its second decode needs a page, and its third none.
    What the steps before have made once is there."""
    counter = Counter(monkeypatch)
    async with running(captured(executor)) as builder:
        batches = [builder.batch({1: PROMPTS[1]}, sampling=[1], inits=[greedy(1, **sampling)])]
        batches += [builder.batch({1: [-1]}, sampling=[1]) for _ in range(3 - has_new_page)]
        assert {bool(part.rows) for part in batches[-1].page_writes} == {has_new_page}
        for batch in batches:
            is_last = batch is batches[-1]
            executor._threads.jobs.put(functools.partial(setattr, counter, "counts", is_last))
            ticket = executor.launch(batch)
            executor._threads.jobs.put(functools.partial(setattr, counter, "counts", False))
            assert isinstance(await unless_dead(executor, ticket.outcome), StepResult)
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


@pytest.mark.parametrize(
    ("sampling", "window"),
    [({}, None), ({"temperature": 0.8}, 6), ({"temperature": 1.0, "top_p": 0.6}, 6)],
)
def test_b36_a_padded_replay_equals_the_eager_step_bit_for_bit_and_touches_nobody_else(
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
    served = serve(captured(executor), asked)
    assert served.outputs == plain_tokens(asked, model)
    assert not comparing.found
    assert comparing.num_steps > 5


def test_words_that_the_graph_was_not_captured_with_are_a_bug() -> None:
    executor = captured(make_executor(HashModel(), device=GraphDevice(), graph_rows=1))
    [graph, *_] = executor._graphs._graphs.values()
    with pytest.raises(BugError, match="has 0 words; its graph was captured with"):
        graph.room_for(HostArrays())
