"""What gpu-check says of a goal, and the table for the page about performance."""

from __future__ import annotations

from pathlib import Path

import pytest

from aserve.bench.machine import Machine
from tools.gpu_check.goals import MEASURES, Measure, judge_all
from tools.gpu_check.host import Gpu, Host
from tools.gpu_check.marked_tests import read_report
from tools.gpu_check.records import Figures, Record, Status
from tools.gpu_check.table import markdown

HOST = Host(
    Machine("a processor", 16, (), {"torch": "2.11.0+cu130"}, "2026-12-01T10:00:00+00:00"),
    Gpu("NVIDIA H200", 139.8, "9.0", "580.1", "13.0", {"triton": "3.6.0"}),
)


def record(
    part: str,
    figures: Figures,
    *,
    status: Status = "done",
    reason: str = "",
    shape: str = "full",
) -> Record:
    return Record(
        part=part,
        status=status,
        device="cuda",
        shape=shape,
        reason=reason,
        figures=figures,
        host=HOST,
    )


def verdict_of(*records: Record, part: str) -> tuple[str, str]:
    """Value and text of the first measure of the part."""
    verdicts = judge_all({one.part: one for one in records})
    return next((v.value, v.text) for v in verdicts if v.measure.part == part)


@pytest.mark.parametrize(
    ("measure", "value", "text"),
    [
        (Measure("", "", "", low=0.8), 0.8, "reached"),
        (Measure("", "", "", low=0.8), 0.76, "missed by 5.0%"),
        (Measure("", "", "", high=15.0), 15.0, "reached"),
        (Measure("", "", "", high=15.0), 18.0, "missed by 20.0%"),
        (Measure("", "", ""), 3.0, "reported"),
    ],
)
def test_a_goal_is_reached_or_missed_by_so_much(measure: Measure, value: float, text: str) -> None:
    assert measure.judge(value) == text


def test_a_figure_is_judged_and_one_that_is_not_there_says_why() -> None:
    assert verdict_of(record("overlap", {"gain": 1.2}), part="overlap") == ("1.200", "reached")
    assert verdict_of(part="overlap") == ("", "not run")
    lost = record("overlap", {}, status="killed", reason="after 470 s")
    assert verdict_of(lost, part="overlap") == ("", "killed: after 470 s")
    assert verdict_of(record("overlap", {}), part="overlap") == ("", "no figure")


def test_a_figure_may_lie_under_others() -> None:
    figures: Figures = {"idle": {"resolve_p50_us": 250.4}, "saturated": {}}
    assert verdict_of(record("bench-relay", figures), part="bench-relay") == ("250", "reached")


def test_a_dry_run_reaches_nothing() -> None:
    dry = record("overlap", {"gain": 9.0}, shape="tiny")
    assert verdict_of(dry, part="overlap") == ("9.000", "a dry run shows nothing")
    text = markdown(judge_all({"overlap": dry}), {"overlap": dry})
    assert "no figures of a GPU" in text
    assert "reached" not in text


def test_tests_are_green_when_all_of_them_ran_and_none_failed() -> None:
    good = record("tests-a", {"passed": 7, "failed": 0})
    bad = record("tests-b", {"passed": 2, "failed": 1})
    lost = record("tests-c", {}, status="killed")
    assert verdict_of(good, part="tests") == ("0 of 7", "reached")
    assert verdict_of(good, bad, part="tests") == ("1 of 10", "missed: 1 failed")
    assert verdict_of(good, lost, part="tests") == (
        "0 of 7",
        "missed: 0 failed, no result of tests-c",
    )
    left = record("tests-a", {}, status="not run", reason="no GPU")
    assert verdict_of(left, part="tests") == ("", "not run: no GPU")
    assert verdict_of(good, left, part="tests")[1].startswith("not run")


def test_the_table_of_nothing_has_every_measure_and_empty_cells() -> None:
    lines = markdown(judge_all({}), {}).splitlines()
    measures = lines[lines.index("| measure | goal | measured | |") + 2 :]
    assert len(measures) == len(MEASURES) + 1
    assert all("|  |" in line for line in measures)
    assert not any("reached" in line or "missed" in line for line in measures)
    assert sum("nano-vllm: 1,434 on an RTX 4070 Laptop" in line for line in measures) == 1
    assert "| GPU |  |" in lines


def test_the_table_has_date_gpu_driver_and_versions_above_it() -> None:
    one = record("overlap", {"gain": 1.2})
    text = markdown(judge_all({"overlap": one}), {"overlap": one})
    for fact in ("2026-12-01", "NVIDIA H200, 140 GiB", "driver 580.1", "CUDA 13.0",
                 "16 cores of a processor", "torch 2.11.0+cu130, triton 3.6.0"):  # fmt: skip
        assert fact in text
    assert "batch 256 | at least 1.150 | 1.200 | reached |" in text


def test_each_kernel_has_a_line_with_its_share_of_a_copy() -> None:
    rates = {"us": 1234.5, "gb_per_s": 3900.1, "of_copy": 0.91}
    one = record("bench-kernels", {"kernels": {"rms_norm": rates}})
    text = markdown(judge_all({"bench-kernels": one}), {"bench-kernels": one})
    assert "| rms_norm | 1,234.5 | 3,900.1 | 0.91 |" in text.splitlines()


def test_a_test_that_was_skipped_counts_as_failed(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite><testcase name='a'/><testcase name='b'><failure/></testcase>"
        "<testcase name='c'><skipped/></testcase><testcase name='d'><error/></testcase>"
        "</testsuite></testsuites>"
    )
    assert read_report(report) == {"passed": 1, "failed": 3, "names": ["b", "c", "d"]}
