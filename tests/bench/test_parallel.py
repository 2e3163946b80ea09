"""The engines that `aserve bench parallel` compares."""

from __future__ import annotations

from aserve.bench.parallel import ONE, OTHERS, _divided, broadcast_us
from aserve.config import Facts, Raw, resolve
from aserve.tiny import MODEL_DIR


def test_as_many_threads_compute_at_a_time_in_each_engine() -> None:
    given = resolve(Raw(command_line={"threads": "4"}), Facts(default_model=str(MODEL_DIR)))
    engines = {name: _divided(given, name, 2, max_rows=8) for name in (ONE, *OTHERS)}
    found = {
        OTHERS[name]: (
            each.num_ranks,
            each.machine.threads,
            each.scheduler.overlap_depth,
            each.scheduler.overlap_lead,
        )
        for name, each in engines.items()
        if name != ONE
    }
    assert found == {"tp": (2, 2, 2, 2), "pp": (1, 4, 1, 1), "pp_in_parts": (1, 2, 2, 1)}


def test_a_broadcast_is_read_by_another_process_which_then_ends() -> None:
    assert broadcast_us(8) > 0
