"""`aserve bench host-step`: the load that it measures, and the form of what it says."""

from __future__ import annotations

from aserve.bench.host_step import Load
from tests.bench.last_line import Captured, figures_of


def test_the_last_line_has_a_median_for_each_number_of_rows(capsys: Captured) -> None:
    figures = figures_of(capsys, "host-step", "--rows", "4,8", "--steps", "20", "--repeats", "2")
    assert list(figures["rows"]) == ["4", "8"]
    assert all(median_us > 0 for median_us in figures["rows"].values())
    assert [line["rows"] for line in figures["details"]] == [4, 8]
    assert figures["cached_tokens"] == 0


def test_every_step_is_full_while_rows_end_and_others_join() -> None:
    load = Load(8, seed=1)
    measured = load.measure(200)
    assert len(measured.times_us) == 200
    assert set(measured.num_running) == {8}
    assert measured.num_joins > 0
    assert measured.num_cached == 0


def test_the_output_has_machine_versions_and_date(capsys: Captured) -> None:
    machine = figures_of(capsys, "host-step", "--rows", "2", "--steps", "1", "--repeats", "1")[
        "machine"
    ]
    assert machine["cpu"]
    assert machine["cores"] >= 1
    assert machine["versions"].keys() >= {"aserve", "python", "torch"}
    assert machine["date"].startswith("20")
