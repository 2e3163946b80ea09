"""Host buffers: one step each at a time, used again when they are large enough."""

from __future__ import annotations

from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.transfer.pinned import MAX_PREFIXES, MIN_WORDS, POISON, PinnedSlots


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
