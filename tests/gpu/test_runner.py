"""The runner's forward: planned once, eager or through a graph; hidden states kept when asked."""

from __future__ import annotations

import dataclasses

import torch

from aserve.gpu.attention.sdpa import PagedSdpa
from aserve.gpu.decode.autoregressive import Autoregressive
from aserve.gpu.models.base import HiddenCapture
from aserve.gpu.runner import ModelRunner, RunnerParts
from aserve.gpu.step.forward_batch import DeviceBatch, ForwardBatch, ForwardOverrides
from aserve.gpu.step.resolve import DeviceState
from tests.fakes.hash_model import HashModel
from tests.gpu.device_tables import device_batch, make_tables


class CountingSdpa(PagedSdpa):
    num_plans = 0

    def plan(self, batch: ForwardBatch) -> object:
        self.num_plans += 1
        return super().plan(batch)


def make_runner() -> tuple[ModelRunner, CountingSdpa]:
    state: DeviceState = make_tables()
    state.pools.page_tables[0][1:, 0] = torch.arange(1, 7)
    state.pools.page_tables[0][1:, 1] = torch.arange(7, 13)
    attention = CountingSdpa(state.pools, (None,))
    parts = RunnerParts(
        model=HashModel(),
        state=state,
        attention=attention,
        mode=Autoregressive(),
        is_debug=True,
    )
    return ModelRunner(parts), attention


def test_a_forward_is_planned_once_for_all_layers() -> None:
    runner, attention = make_runner()
    runner.forward(runner.init_forward(device_batch([3, 2], [0, 0])))
    assert attention.num_plans == 1


def test_a_forward_that_was_planned_before_is_not_planned_again() -> None:
    runner, attention = make_runner()
    batch = runner.init_forward(device_batch([3, 2], [0, 0]))
    expected = runner.forward(batch)
    planned = runner.init_forward(device_batch([3, 2], [0, 0]))
    planned.mark_attention_planned(attention.plan(planned))
    num_plans = attention.num_plans
    assert torch.equal(runner.forward(planned), expected)
    assert attention.num_plans == num_plans


def test_hidden_states_are_kept_for_the_forward_that_asked_and_no_other() -> None:
    runner, _ = make_runner()
    capture = HiddenCapture(wants_before_norm=True)
    overrides = ForwardOverrides(capture=capture)
    hidden = runner.forward(runner.init_forward(device_batch([3], [0]), overrides))
    assert capture.before_norm is not None
    kept = capture.before_norm
    assert torch.equal(kept, hidden)
    runner.forward(runner.init_forward(device_batch([2], [3], first_id=9)))
    assert capture.before_norm is kept


def test_one_more_forward_within_a_step_changes_nothing_of_the_first() -> None:
    """A drafter's forward: its own lengths and ids, beside those of the step."""
    runner, _ = make_runner()
    batch = device_batch([3, 2], [0, 0])
    first = runner.init_forward(batch)
    expected = runner.forward(first).clone()
    rows = torch.tensor([2])
    more = first.decode(rows, input_ids=torch.tensor([5]), kv_lens=torch.tensor([2]))
    drafted = runner.forward(runner.init_forward(more))
    assert batch.kv_lens.tolist() == [0, 0]
    assert first.lens.tolist() == [3, 2]
    assert torch.equal(runner.forward(first), expected)
    whole = runner.forward(runner.init_forward(_row_2([3, 4, 5])))
    torch.testing.assert_close(drafted[0], whole[2], rtol=0, atol=1e-9)


def _row_2(ids: list[int]) -> DeviceBatch:
    """The same three tokens of row 2 in one prefill."""
    made = device_batch([len(ids)], [0])
    return dataclasses.replace(made, rows=torch.tensor([2]), input_ids=torch.tensor(ids))
