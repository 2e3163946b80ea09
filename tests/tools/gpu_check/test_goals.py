"""What gpu-check says of a goal, and the table for the page about performance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aserve.bench.machine import Machine
from tools.gpu_check.goals import judge_all
from tools.gpu_check.host import Gpu, Host
from tools.gpu_check.marked_tests import read_report
from tools.gpu_check.records import Figures, Record
from tools.gpu_check.table import markdown

HOST = Host(
    Machine("a processor", 16, (), {"torch": "2.11.0+cu130"}, "2026-12-01T10:00:00+00:00"),
    Gpu("NVIDIA H200", 139.8, "9.0", "580.1", "13.0", {"triton": "3.6.0"}),
)


def record(part: str, figures: Figures, **fields: Any) -> Record:
    fields = {"status": "done", "shape": "full"} | fields
    return Record(part=part, device="cuda", figures=figures, host=HOST, **fields)


def relay(p50_us: float) -> Record:
    return record("bench-relay", {"idle": {"resolve_p50_us": p50_us}, "saturated": {}})


GREEN = record("tests-a", {"passed": 7, "failed": 0})
RED = record("tests-b", {"passed": 2, "failed": 1})
LOST = record("tests-c", {}, status="killed")
LEFT = record("tests-a", {}, status="not run", reason="no GPU")


@pytest.mark.parametrize(
    ("records", "part", "value", "text"),
    [
        ([record("overlap", {"gain": 1.2})], "overlap", "1.200", "reached"),
        ([record("overlap", {"gain": 1.15 * 0.95})], "overlap", "1.092", "missed by 5.0%"),
        ([relay(18.0)], "bench-relay", "18", "reached"),
        ([relay(360.0)], "bench-relay", "360", "missed by 20.0%"),
        ([], "overlap", "", "not run"),
        (
            [record("overlap", {}, status="killed", reason="after 470 s")],
            *("overlap", "", "killed: after 470 s"),
        ),
        ([record("overlap", {})], "overlap", "", "no figure"),
        (
            [record("overlap", {"gain": 9.0}, shape="tiny")],
            *("overlap", "9.000", "dry run: no verdict"),
        ),
        ([GREEN], "tests", "0 of 7", "reached"),
        ([GREEN, RED], "tests", "1 of 10", "missed: 1 failed"),
        ([GREEN, LOST], "tests", "0 of 7", "missed: 0 failed, no result of tests-c"),
        ([LEFT], "tests", "", "not run: no GPU"),
    ],
)
def test_a_figure_is_judged_and_one_that_is_not_there_says_why(
    records: list[Record], part: str, value: str, text: str
) -> None:
    verdicts = judge_all({one.part: one for one in records})
    assert next((v.value, v.text) for v in verdicts if v.measure.part == part) == (value, text)


def test_the_table_has_its_machine_above_it_and_a_line_for_each_kernel() -> None:
    rates = {"us": 1234.5, "gb_per_s": 3900.1, "of_copy": 0.91}
    kept = {
        "overlap": record("overlap", {"gain": 1.2}),
        "bench-kernels": record("bench-kernels", {"kernels": {"rms_norm": rates}}),
    }
    text = markdown(judge_all(kept), kept)
    for fact in ("2026-12-01", "NVIDIA H200, 140 GiB", "driver 580.1", "CUDA 13.0",
                 "16 cores of a processor", "torch 2.11.0+cu130, triton 3.6.0"):  # fmt: skip
        assert fact in text
    assert "batch 256 | at least 1.150 | 1.200 | reached |" in text
    assert "| rms_norm | 1,234.5 | 3,900.1 | 0.91 |" in text.splitlines()


def test_a_test_that_was_skipped_counts_as_failed(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite><testcase name='a'/><testcase name='b'><failure/></testcase>"
        "<testcase name='c'><skipped/></testcase><testcase name='d'><error/></testcase>"
        "</testsuite></testsuites>"
    )
    assert read_report(report) == {"passed": 1, "failed": 3, "names": ["b", "c", "d"]}
