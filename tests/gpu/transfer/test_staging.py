"""A step's arrays in one buffer, and the host buffers that are used again."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.transfer.pinned import MAX_PREFIXES, MIN_WORDS, POISON, PinnedSlots
from aserve.gpu.transfer.staging import DeviceArrays, HostArrays

KERNEL_BYTES = 16  # a pointer that is a multiple of it is another kernel's than one that is not
LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@given(narrow=LENGTHS, wide=LENGTHS)
def test_every_array_is_found_again_and_begins_where_all_others_do(
    narrow: list[int], wide: list[int]
) -> None:
    """Whatever lengths the arrays before it have: no step meets a kernel that is not compiled."""
    arrays = HostArrays()
    given_values: dict[str, np.ndarray[tuple[int], np.dtype[np.int32]]] = {}
    for number, length in enumerate(narrow):
        values = given_values[f"n{number}"] = np.arange(length, dtype=np.int32) + number
        arrays.add(f"n{number}", values)
    for number, length in enumerate(wide):
        arrays.add_wide(f"w{number}", np.arange(length) - (1 << 40))
    words = torch.empty(arrays.num_words, dtype=torch.int32)
    indices = arrays.write(words.numpy())
    there = DeviceArrays(words, indices)
    for name, values in given_values.items():
        assert there.narrow_ints(name).tolist() == there.ints(name).tolist() == values.tolist()
    for number, length in enumerate(wide):
        assert there.wide_ints(f"w{number}").tolist() == [n - (1 << 40) for n in range(length)]
    for place in indices.values():
        assert place.start * words.itemsize % KERNEL_BYTES == 0


def test_a_slot_is_used_again_only_after_it_was_given_back_and_if_it_is_large_enough() -> None:
    slots = PinnedSlots(CpuDevice())
    first = slots.take(10)
    second = slots.take(10)
    assert second is not first
    slots.give_back(first)
    assert slots.take(10) is first
    slots.give_back(second)
    large = slots.take(MIN_WORDS + 1)
    assert len(large.words) > MIN_WORDS
    slots.give_back(large)
    assert slots.take(10) is large


def test_a_front_of_the_same_length_is_made_once_and_not_kept_for_ever() -> None:
    slot = PinnedSlots(CpuDevice()).take(MIN_WORDS)
    first = slot.prefix(7)
    assert slot.prefix(7) is first
    for num_words in range(8, 8 + MAX_PREFIXES):
        assert len(slot.prefix(num_words)) == num_words
    assert slot.prefix(7) is not first


def test_in_debug_mode_nothing_can_be_read_from_a_slot_that_was_given_back() -> None:
    slots = PinnedSlots(CpuDevice(), is_debug=True)
    slot = slots.take(3)
    slot.words[:3] = [1, 2, 3]
    slots.give_back(slot)
    assert slot.prefix(3).tolist() == [POISON] * 3
