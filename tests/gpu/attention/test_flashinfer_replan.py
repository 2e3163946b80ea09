"""A captured forward is replanned in one call where the package allows it, else by its plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from aserve.gpu.attention.base import StaticShape
from aserve.gpu.attention.flashinfer import wrappers
from aserve.gpu.attention.flashinfer.plan import find_planner_call
from tests.fakes.flashinfer import FakeFlashInfer
from tests.gpu.attention.backend_parity import HEADS, Layout, layer
from tests.gpu.attention.test_flashinfer import Replays

LENGTHS = ([0, 3, 7, 20], [30, 1], [5], [9, 9, 9, 36])


@pytest.fixture(autouse=True)
def _small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrappers, "FLOAT_BYTES", 16)


def assert_right(replays: Replays) -> None:
    for kv_lens in LENGTHS:
        replays.set(kv_lens)
        torch.testing.assert_close(replays.replay(), replays.expected(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("heads", [*HEADS, (8, 2)])
def test_a_refresh_is_one_call_of_the_compiled_planner(
    heads: tuple[int, int], window: int | None
) -> None:
    """The planner of wrappers with tensor cores also takes lengths."""
    package = FakeFlashInfer()
    replays = Replays(
        Layout(layer(heads=heads, window=window), page_size=4), StaticShape(4, 1, 40), package
    )
    before = len(package.plans), package.num_plans
    assert_right(replays)
    assert (len(package.plans), package.num_plans) == (before[0], before[1] + len(LENGTHS))


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
    assert_right(replays)
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
    "more",
    [
        lambda numbers: (),
        lambda numbers: (7, True, "fa2", None),
        lambda numbers: (torch.empty(0), torch.arange(4)),  # made anew, and the same
    ],
)
def test_what_does_not_depend_on_the_numbers_may_stay(more: Callable[[Tensor], Any]) -> None:
    arrays = Arrays()
    module = arrays.wrapper._cached_module
    call = arrays.call(lambda: module.plan(arrays.numbers, *more(arrays.numbers), named=1))
    assert call is not None
    arrays.numbers.fill_(9)
    call()
    assert arrays.seen == [[0] * 3, [1] * 3, [2] * 3, [9] * 3]
    assert module.plan == arrays._plan


@pytest.mark.parametrize(
    "more",
    [
        lambda numbers: {"most": int(numbers.max())},
        lambda numbers: {"lens": numbers + 1},
        lambda numbers: {"lens": numbers.tolist()},
        lambda numbers: {"kind": 1 if numbers[0] == 1 else True},
        lambda numbers: {"on_device": numbers.to("meta")},  # whose values nobody waits for
        lambda numbers: {f"number{numbers[0]}": 1},
    ],
)
def test_what_depends_on_the_numbers_needs_the_whole_plan(more: Callable[[Tensor], Any]) -> None:
    arrays = Arrays()
    module = arrays.wrapper._cached_module
    assert arrays.call(lambda: module.plan(arrays.numbers, **more(arrays.numbers))) is None
    assert module.plan == arrays._plan


def test_a_plan_without_a_planner_is_needed_whole() -> None:
    arrays = Arrays()
    assert arrays.call(lambda: None) is None
    del arrays.wrapper._cached_module
    assert arrays.call(lambda: None) is None


def test_two_different_calls_of_a_planner_are_needed_both() -> None:
    arrays = Arrays()
    module = arrays.wrapper._cached_module

    def plan() -> None:
        module.plan(arrays.numbers, 1)
        module.plan(arrays.numbers, 2)

    assert arrays.call(plan) is None
