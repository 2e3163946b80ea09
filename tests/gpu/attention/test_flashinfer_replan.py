"""Captured forwards over the fake FlashInfer: replanned in one call where the package allows it, or
else by their plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from aserve.gpu.attention.base import AttentionBackend, StaticShape
from aserve.gpu.attention.flashinfer.backend import FlashInfer
from aserve.gpu.attention.flashinfer.plan import find_planner_call
from aserve.gpu.attention.reference import TorchReference
from aserve.gpu.device.base import GraphBreak
from aserve.gpu.kv.layer_groups import AttentionInputs
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.messages.base import ArrayI32
from tests.fakes.flashinfer import LISTED_IN_TORCH, FakeFlashInfer, FakePrefill
from tests.gpu.attention.backend_parity import HEADS, Layout, fill, layer, random
from tests.gpu.attention.test_flashinfer import site_of
from tests.gpu.device_tables import device_batch
from tools.gpu_check.recorded_graphs import record

pytestmark = pytest.mark.usefixtures("small_workspace")

LENGTHS = ([0, 3, 7, 20], [30, 1], [5], [9, 9, 9, 36])


class Replays:
    """A captured forward of one shape and one layer, with fixed buffers."""

    def __init__(self, layout: Layout, shape: StaticShape, package: FakeFlashInfer) -> None:
        self.layout, self.shape = layout, shape
        self.pools = layout.pools(shape.num_rows)
        site = site_of(layout, self.pools)
        self.backend = FlashInfer(package, site, ops=LISTED_IN_TORCH)
        self.plan = self.backend.static_plans.make(shape)
        self.batch = device_batch([shape.width] * shape.num_rows, [0] * shape.num_rows)
        self.batch.rows.zero_()
        heads = layout.layer.num_heads + layout.layer.num_stored_heads
        num_tokens = shape.num_rows * shape.width
        sizes = num_tokens, heads, layout.layer.head_dim
        self.qkv = torch.zeros(sizes, dtype=layout.dtype)
        self.captured = record(self._body)

    def set(self, kv_lens: list[int]) -> None:
        """Rows 1, 2, ..., then padding; the pages and histories of `fill`."""
        given = device_batch([self.shape.width] * len(kv_lens), kv_lens)
        fill(self.pools, self.layout, given)
        self.batch.rows.zero_()[: len(kv_lens)] = given.rows
        self.batch.kv_lens.zero_()[: len(kv_lens)] = given.kv_lens
        self.batch.len_bounds_cpu[:] = self.host_lens()
        self.qkv.copy_(random(torch.Generator().manual_seed(len(kv_lens)), *self.qkv.shape))

    def host_lens(self) -> ArrayI32:
        return self.batch.kv_lens.numpy().astype(np.int32) + self.shape.width

    def replay(self) -> Tensor:
        self.backend.static_plans.refresh(self.plan, self.host_lens())
        return self.captured.replay(lambda _: None).clone()

    def expected(self) -> Tensor:
        return self._attend(TorchReference(self.pools), None)

    def assert_right(self) -> None:
        for kv_lens in LENGTHS:
            self.set(kv_lens)
            torch.testing.assert_close(self.replay(), self.expected(), rtol=1e-12, atol=1e-12)

    def _body(self, _graph_break: GraphBreak) -> Tensor:
        return self._attend(self.backend, self.plan)

    def _attend(self, backend: AttentionBackend, plan: object) -> Tensor:
        batch = ForwardBatch.init_new(self.batch, self.pools)
        return backend.bind(batch, plan)(self.layout.layer, AttentionInputs(self.qkv))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("heads", [*HEADS, (8, 2)])
def test_a_refresh_is_one_call_of_the_compiled_planner(
    heads: tuple[int, int], window: int | None
) -> None:
    """Fewer rows than were captured are padded; nothing but buffers changes between replays. The
    planner of wrappers with tensor cores also takes lengths."""
    package = FakeFlashInfer()
    layout = Layout(layer(heads=heads, window=window), page_size=4)
    replays = Replays(layout, StaticShape(4, 1, 40), package)
    before = len(package.plans), package.num_plans
    replays.assert_right()
    assert (len(package.plans), package.num_plans) == (before[0], before[1] + len(LENGTHS))


@dataclass
class EarlierPrefill(FakePrefill):
    def plan(self, *args: Any, **more: Any) -> None:
        assert "uniform_q_len" not in more
        super().plan(*args, **more)


class Earlier(FakeFlashInfer):
    """A release that cannot be told how many queries each row has."""

    def _prefill(self, *args: Any) -> FakePrefill:
        made = super()._prefill(*args)
        return EarlierPrefill(*(getattr(made, each.name) for each in fields(made) if each.init))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("kind", "told"), [(FakeFlashInfer, 3), (Earlier, None)])
def test_captured_rows_may_have_several_queries(
    kind: type[FakeFlashInfer], told: int | None, window: int | None
) -> None:
    """A planner that is told how many are the same in every row makes no tiles for ragged ones."""
    package = kind()
    layout = Layout(layer(window=window), page_size=4)
    Replays(layout, StaticShape(4, 3, 40), package).assert_right()
    assert {plan.uniform_q_len for plan in package.plans} == {told}


class Hidden(FakeFlashInfer):
    """A release whose wrappers hide their planner."""

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **more: Any) -> Any:
        made = super().BatchDecodeWithPagedKVCacheWrapper(*args, **more)
        plan = made.plan

        def planning(*args: Any, **more: Any) -> None:
            plan(*args, **more)
            del made._cached_module

        made.plan = planning  # type: ignore[method-assign]  # as another release would have it
        return made


class Converting(FakeFlashInfer):
    """A release that copies the arrays before it passes them to its planner."""

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **more: Any) -> Any:
        made = super().BatchDecodeWithPagedKVCacheWrapper(*args, **more)
        plan = made.plan
        made.plan = lambda starts, *args, **more: plan(starts.clone(), *args, **more)  # type: ignore[method-assign]  # as another release would have it
        return made


@pytest.mark.parametrize("kind", [Hidden, Converting])
def test_another_release_plans_as_it_likes_and_is_said_to_take_longer(
    kind: type[FakeFlashInfer], caplog: pytest.LogCaptureFixture
) -> None:
    package = kind()
    replays = Replays(Layout(layer(), page_size=4), StaticShape(4, 1, 40), package)
    before = len(package.plans)
    replays.assert_right()
    assert len(package.plans) == before + len(LENGTHS)
    assert caplog.text.count("cannot be replanned in one call") == 1


# ---------------------------------------------------------------- a planner's arguments


class Arrays:
    """`numbers` on the host, filled with 1, then with 2; `wrapper` has planned."""

    def __init__(self) -> None:
        self.numbers = torch.zeros(3, dtype=torch.int32)
        self.seen: list[list[int]] = []
        self.wrapper = SimpleNamespace(_cached_module=SimpleNamespace(plan=self._plan))

    def _plan(self, numbers: Tensor, *_args: object, **_named: object) -> None:
        self.seen.append(numbers.tolist())

    def call(self, plan: Callable[[], object]) -> Callable[[], object] | None:
        fills = (partial(self.numbers.fill_, value) for value in (1, 2))
        return find_planner_call(self.wrapper, plan, fills)


@pytest.mark.parametrize(
    ("more", "may_repeat"),
    [
        (lambda numbers: {}, True),
        (lambda numbers: {"size": 7, "is_static": True, "backend": "fa2", "mask": None}, True),
        (lambda numbers: {"empty": torch.empty(0), "range": torch.arange(4)}, True),  # made anew
        (lambda numbers: {"most": int(numbers.max())}, False),
        (lambda numbers: {"lens": numbers + 1}, False),
        (lambda numbers: {"lens": numbers.tolist()}, False),
        (lambda numbers: {"kind": 1 if numbers[0] == 1 else True}, False),
        (lambda numbers: {"on_device": numbers.to("meta")}, False),  # nobody waits for its values
        (lambda numbers: {f"number{numbers[0]}": 1}, False),
    ],
)
def test_a_call_is_repeated_if_only_arrays_depend_on_the_numbers(
    more: Callable[[Tensor], Any], *, may_repeat: bool
) -> None:
    arrays = Arrays()
    module = arrays.wrapper._cached_module
    call = arrays.call(lambda: module.plan(arrays.numbers, 1, **more(arrays.numbers)))
    assert (call is not None) == may_repeat
    assert module.plan == arrays._plan
    if call is not None:
        arrays.numbers.fill_(9)
        call()
        assert arrays.seen == [[0] * 3, [1] * 3, [2] * 3, [9] * 3]


def test_a_plan_that_is_not_one_call_of_a_planner_is_needed_whole() -> None:
    arrays = Arrays()
    module = arrays.wrapper._cached_module
    assert arrays.call(lambda: [module.plan(arrays.numbers, more) for more in (1, 2)]) is None
    assert arrays.call(lambda: None) is None
    del arrays.wrapper._cached_module
    assert arrays.call(lambda: None) is None
