"""The engines that `aserve bench parallel` compares."""

from __future__ import annotations

from aserve.bench.parallel import ONE, OTHERS, _divided, broadcast_us
from aserve.config import Facts, Raw, resolve
from aserve.tiny import MODEL_DIR


def test_engines_share_as_many_threads_and_a_pipeline_has_a_step_in_each_stage() -> None:
    given = resolve(Raw(command_line={"threads": "4"}), Facts(default_model=str(MODEL_DIR)))
    engines = {name: _divided(given, name, 2, max_rows=8) for name in (ONE, *OTHERS)}
    totals = {
        each.num_ranks * each.machine.pipeline_parallel_size * (each.machine.threads or 0)
        for each in engines.values()
    }
    assert totals == {4}
    depths = {
        OTHERS[name]: (each.num_ranks, each.scheduler.overlap_depth, each.scheduler.overlap_lead)
        for name, each in engines.items()
        if name != ONE
    }
    assert depths == {"tp": (2, 2, 2), "pp": (1, 2, 1), "pp_one_part": (1, 1, 1)}


def test_a_broadcast_is_read_by_another_process_which_then_ends() -> None:
    assert broadcast_us(8) > 0
