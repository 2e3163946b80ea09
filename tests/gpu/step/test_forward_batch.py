"""The device form of a forward: pure, one-shot overrides, and the attention plan's marker."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from aserve.errors import BugError
from aserve.gpu.step.forward_batch import ForwardBatch, PlanMarker
from tests.gpu.device_tables import device_batch, paged


def forward(query_lens: list[int], kv_lens: list[int], *, is_debug: bool = False) -> ForwardBatch:
    return ForwardBatch.init_new(device_batch(query_lens, kv_lens), paged(), is_debug=is_debug)


def contents(batch: object) -> dict[str, object]:
    """Every field by value, tensors as lists."""

    def plain(value: object) -> object:
        match value:
            case torch.Tensor() | np.ndarray():
                return value.tolist()
            case tuple():
                return [plain(item) for item in value]
            case _:
                return value

    assert dataclasses.is_dataclass(batch)
    names = [field.name for field in dataclasses.fields(batch) if field.compare]
    return {name: plain(getattr(batch, name)) for name in names}


def test_a_mixed_batch_is_shaped_for_a_forward() -> None:
    made = forward([1, 3], [5, 2])
    assert made.lens.tolist() == [6, 5]
    assert made.cache_positions.tolist() == [5, 2, 3, 4]
    assert made.cu_query_lens.tolist() == [0, 1, 4]
    # Row 1 has the pages 3 and 4, row 2 the pages 6 and 7, of 4 slots each.
    assert [slots.tolist() for slots in made.slots] == [[17, 26, 27, 28]] * 2


def test_padding_rows_are_row_0_with_one_token_in_slot_0() -> None:
    made = forward([1, 1], [5, 2]).padded(4)
    assert made.rows.tolist() == [1, 2, 0, 0]
    assert made.lens.tolist() == [6, 3, 1, 1]
    assert made.cu_query_lens.tolist() == [0, 1, 2, 3, 4]
    assert made.token_to_row.tolist() == [0, 1, 2, 3]
    assert made.cache_positions.tolist() == [5, 2, 0, 0]
    assert made.input_ids.tolist()[2:] == [0, 0]
    assert [slots.tolist()[2:] for slots in made.slots] == [[0, 0]] * 2
    assert (made.query_lens_cpu.tolist(), made.len_bounds_cpu.tolist()) == ([1] * 4, [6, 3, 1, 1])


def test_building_changes_nothing_and_what_it_made_belongs_to_one_forward() -> None:
    """A forward that changes its own lengths, positions or slots changes nobody else's."""
    batch, shared = device_batch([1, 3, 2], [5, 0, 1]), paged()
    before = contents(batch), [table.tolist() for table in shared.page_tables]
    first = ForwardBatch.init_new(batch, shared)
    expected = contents(first)
    for tensor in (first.lens, first.cache_positions, first.cu_query_lens, *first.slots):
        tensor.fill_(0)
    assert contents(ForwardBatch.init_new(batch, shared)) == expected
    assert before == (contents(batch), [table.tolist() for table in shared.page_tables])


# ---------------------------------------------------------------- the attention plan's marker


def test_a_fresh_batch_needs_a_plan_and_a_marked_one_does_not() -> None:
    made = forward([1, 1], [3, 4])
    assert made.needs_attention_plan()
    with pytest.raises(BugError, match="nobody planned"):
        assert made.plan
    made.mark_attention_planned("plan")
    assert not made.needs_attention_plan()
    assert made.plan == "plan"


def test_a_batch_reshaped_after_a_replannable_plan_is_planned_again() -> None:
    made = forward([1, 1], [3, 4])
    made.mark_attention_planned("first", replan_equivalent=True)
    assert not made.padded(2).needs_attention_plan()
    padded = made.padded(4)
    assert padded.needs_attention_plan()
    padded.mark_attention_planned("second", replan_equivalent=True)
    assert not padded.needs_attention_plan()
    assert (made.plan, padded.plan) == ("first", "second")


@pytest.mark.parametrize("query_lens", [[2, 1], [4], [1, 1, 2]])
def test_rows_and_tokens_each_make_another_shape(query_lens: list[int]) -> None:
    """Against a plan of two rows with four tokens: fewer tokens, or fewer or more rows."""
    planned = forward([1, 3], [3, 4])
    planned.mark_attention_planned("plan", replan_equivalent=True)
    other = forward(query_lens, [0] * len(query_lens))
    assert planned.marker.record is not None
    moved = dataclasses.replace(other, marker=PlanMarker(planned.marker.record))
    assert moved.needs_attention_plan()
    same = dataclasses.replace(forward([2, 2], [0, 0]), marker=PlanMarker(planned.marker.record))
    assert not same.needs_attention_plan()


def test_a_batch_reshaped_after_another_plan_keeps_it_and_raises_in_debug_mode() -> None:
    made, debugged = (forward([1, 1], [3, 4], is_debug=is_debug) for is_debug in (False, True))
    for each in (made, debugged):
        each.mark_attention_planned("plan")
        assert not each.needs_attention_plan()
    assert not made.padded(4).needs_attention_plan()
    assert made.padded(4).plan == "plan"
    with pytest.raises(BugError, match="planned for 2 rows and 2 tokens, has 4 and 4"):
        debugged.padded(4).needs_attention_plan()
