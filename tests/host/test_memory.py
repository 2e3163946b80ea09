"""Pauses of the collector of cyclic garbage."""

from __future__ import annotations

import contextlib
import gc

from aserve.host.memory import PausedCollector


def test_a_pause_of_the_collector_ends_with_its_block_also_where_that_raises() -> None:
    assert gc.isenabled()
    with contextlib.suppress(ValueError), PausedCollector():
        assert not gc.isenabled()
        with PausedCollector():
            pass
        assert not gc.isenabled(), "the outer pause goes on"
        raise ValueError("inside")
    assert gc.isenabled()
