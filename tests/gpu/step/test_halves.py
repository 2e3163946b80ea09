"""A forward that is cut in two: each half is the forward that its rows would have alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from aserve.errors import BugError
from aserve.gpu.step.forward_batch import ForwardBatch, ForwardOverrides
from aserve.gpu.step.halves import cut_in_two
from tests.gpu.device_tables import device_batch, paged
from tests.gpu.step.test_forward_batch import contents, forward

# Query and KV lengths; those of the halves, with the number of their first row.
CUTS = {
    "between rows": ([2, 2], [5, 2], ([2], [5], 0), ([2], [2], 1)),
    "where it balances best": ([1, 1, 3], [5, 2, 4], ([1, 1], [5, 2], 0), ([3], [4], 2)),
    "within a row": ([6, 1], [1, 2], ([3], [1], 0), ([3, 1], [4, 2], 0)),
    "the only row": ([5], [2], ([2], [2], 0), ([3], [4], 0)),
}


@pytest.mark.parametrize("cut", CUTS)
def test_each_half_is_the_forward_of_its_own_tokens(cut: str) -> None:
    query_lens, kv_lens, *expected = CUTS[cut]
    made = forward(query_lens, kv_lens)
    made.mark_attention_planned("plan")
    first_id = 0
    for half, (own_query_lens, own_kv_lens, first_row) in zip(
        cut_in_two(made), expected, strict=True
    ):
        own = device_batch(own_query_lens, own_kv_lens, first_id=first_id)
        own = dataclasses.replace(own, rows=own.rows + first_row)
        assert contents(half) == contents(ForwardBatch.init_new(own, paged()))
        assert half.needs_attention_plan()
        first_id += sum(own_query_lens)


def test_lengths_of_the_host_and_positions_of_several_axes_are_cut_too() -> None:
    positions = torch.arange(15).view(3, 5)
    batch = dataclasses.replace(device_batch([5], [2]), is_exact=True)
    made = ForwardBatch.init_new(batch, paged(), ForwardOverrides(rope_positions=positions))
    first, second = cut_in_two(made)
    assert first.lens_cpu is not None
    assert second.lens_cpu is not None
    assert (first.lens_cpu.tolist(), second.lens_cpu.tolist()) == ([4], [7])
    assert torch.equal(first.rope_positions, positions[:, :2])
    assert torch.equal(second.rope_positions, positions[:, 2:])


def test_a_field_that_nobody_cuts_is_an_error() -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Wider(ForwardBatch):
        images: object = None

    made = forward([4], [0])
    fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    with pytest.raises(BugError, match=r"nothing says what becomes of \['images'\]"):
        cut_in_two(Wider(**fields, images="some"))


def test_draft_trees_stay_with_their_rows_and_are_not_cut() -> None:
    tree = torch.arange(16).view(4, 4) % 3 == 0
    overrides = ForwardOverrides(tree_mask=tree)
    halves = cut_in_two(ForwardBatch.init_new(device_batch([2, 2], [0, 0]), paged(), overrides))
    for half, own in zip(halves, (tree[:2], tree[2:]), strict=True):
        assert half.tree_mask is not None
        assert torch.equal(half.tree_mask, own)
    with pytest.raises(BugError, match="a draft tree cannot be cut"):
        cut_in_two(ForwardBatch.init_new(device_batch([4], [0]), paged(), overrides))
