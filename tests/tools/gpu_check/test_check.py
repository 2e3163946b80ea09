"""gpu-check: a part that is there is not run again, and one that goes wrong says why."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aserve.bench.machine import Machine
from aserve.errors import ConfigError
from tools.gpu_check.check import Check
from tools.gpu_check.goals import judge_all
from tools.gpu_check.host import Gpu, Host
from tools.gpu_check.marked_tests import read_report
from tools.gpu_check.options import GpuCheckOptions
from tools.gpu_check.parts import Part
from tools.gpu_check.records import Figures, Record, Records

MODULE = "tests.tools.gpu_check.sample_part"
LIMIT_S = 60.0


def part(argument: str = "fine", *, limit_s: float = LIMIT_S) -> Part:
    return Part("a sample", MODULE, argument, needs=(), limit_s=limit_s)


def check(out: Path, catalog: dict[str, Part], **options: Any) -> dict[str, Record]:
    given = GpuCheckOptions(out=str(out), device="cpu", shape="tiny")
    return Check(dataclasses.replace(given, **options), catalog).run_all()


def stored(out: Path, name: str, **fields: Any) -> Record:
    """As an earlier call left it."""
    record = Record(part=name, status="done", device="cpu", shape="tiny", figures={"value": 1.0})
    record = msgspec.structs.replace(record, **fields)
    Records(out).write(record)
    return record


@pytest.mark.parametrize(
    ("again", "rerun"),
    [("two", {"two"}), ("failed", {"two"}), ("all", {"one", "two"}), ("one,two", {"one", "two"})],
)
def test_again_runs_what_it_names(tmp_path: Path, again: str, rerun: set[str]) -> None:
    """Each can be seen to be tried, for it lacks a package."""
    before = {"one": stored(tmp_path, "one"), "two": stored(tmp_path, "two", status="failed")}
    lacking = dataclasses.replace(part(), needs=("no_such_package",))
    found = check(tmp_path, dict.fromkeys(before, lacking), again=again)
    assert {name for name in found if found[name].status == "not run"} == rerun
    assert {name for name in found if found[name] != before[name]} == rerun


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "status", "reason", "figures"),
    [
        ("fine", "done", "", {"value": 2.5, "said": "fine"}),
        ("raises", "failed", "ValueError: what went wrong", {"kept": 1}),
        ("dies", "killed", "SIGKILL", {"kept": 1}),
        ("leaves", "failed", "without a result", {"kept": 1}),
        ("cannot", "not run", "no such device", {}),
    ],
)
def test_a_part_leaves_its_figures_and_how_it_ended(
    tmp_path: Path, argument: str, status: str, reason: str, figures: Figures
) -> None:
    found = check(tmp_path, {"one": part(argument)})["one"]
    assert (found.status, found.figures) == (status, figures)
    assert reason in found.reason
    assert found.host is not None
    assert Records(tmp_path).read()["one"] == found


def test_a_part_for_two_gpus_is_not_run_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    for_two = dataclasses.replace(part(), num_gpus=2)
    found = check(tmp_path, {"one": for_two}, device="cuda")["one"]
    assert (found.status, found.reason) == ("not run", "it needs 2 GPUs, and torch finds 1")


def test_a_part_that_hangs_is_killed_at_its_limit(tmp_path: Path) -> None:
    """Killed parts keep their figures: the test above."""
    found = check(tmp_path, {"one": part("hangs", limit_s=0.5)})["one"]
    assert (found.status, found.took_s) == ("killed", 0.5)
    assert "had not ended after 0 s" in found.reason


def test_a_part_that_is_killed_says_what_it_was_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho one.py::test_that_hangs\nsleep 60\n")
    program.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(program))
    found = check(tmp_path, {"one": part(limit_s=2.0)})["one"]
    assert found.reason.endswith("its last line: one.py::test_that_hangs")


def test_what_was_interrupted_is_begun_once_more_and_then_given_up(tmp_path: Path) -> None:
    stored(tmp_path, "one", status="running", attempt=1)
    lacking = dataclasses.replace(part(), needs=("no_such_package",))
    assert check(tmp_path, {"one": lacking})["one"].attempt == 2
    stored(tmp_path, "one", status="running", attempt=2)
    found = check(tmp_path, {"one": part()})["one"]
    assert found.status == "killed"
    assert "ended while this part ran, 2 times" in found.reason


@pytest.mark.parametrize(
    ("needed", "options", "reason"),
    [
        ({"needs": ("json", "no_such_package")}, {}, "no_such_package is not installed"),
        ({"needs_gpu": True}, {}, "it needs a GPU"),
        ({}, {"time_limit": 59.0}, "60 s, more than --time-limit leaves"),
        ({}, {"device": "cuda"}, "no GPU"),
    ],
)
def test_what_cannot_run_says_why_and_may_run_later(
    tmp_path: Path, needed: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    parts = {"one": dataclasses.replace(part(), **needed)}
    found = check(tmp_path, parts, **options)["one"]
    assert found.status == "not run"
    assert reason in found.reason
    assert not found.is_final


def test_what_a_user_can_mend_is_one_line(tmp_path: Path) -> None:
    parts = {"one": part(), "two": part()}
    with pytest.raises(ConfigError, match="--parts onne: no part; there are one, two"):
        check(tmp_path, parts, parts="onne")
    stored(tmp_path, "one", device="cuda", shape="full")
    with pytest.raises(ConfigError, match="results of --device cuda --shape full"):
        check(tmp_path, parts)
    (tmp_path / "parts" / "one.json").write_text("{")
    with pytest.raises(ConfigError, match=r"one\.json: not a record of gpu-check"):
        check(tmp_path, parts)


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


def test_a_test_that_was_skipped_counts_as_failed(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite><testcase name='a'/><testcase name='b'><failure/></testcase>"
        "<testcase name='c'><skipped/></testcase><testcase name='d'><error/></testcase>"
        "</testsuite></testsuites>"
    )
    assert read_report(report) == {"passed": 1, "failed": 3, "names": ["b", "c", "d"]}
