"""gpu-check: a part that is there is not run again, and one that goes wrong says why."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aserve.errors import ConfigError
from tools.gpu_check.check import Check
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


def test_what_is_there_is_not_run_again(tmp_path: Path) -> None:
    records = {
        "one": stored(tmp_path, "one"),
        "two": stored(tmp_path, "two", status="failed", reason="it did"),
        "three": stored(tmp_path, "three", status="killed", reason="it was"),
    }
    assert check(tmp_path, {name: part() for name in records}) == records


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
    ("argument", "limit_s", "status", "reason", "figures"),
    [
        ("fine", LIMIT_S, "done", "", {"value": 2.5, "said": "fine"}),
        ("raises", LIMIT_S, "failed", "ValueError: what went wrong", {"kept": 1}),
        ("dies", LIMIT_S, "killed", "SIGKILL", {"kept": 1}),
        ("hangs", 10.0, "killed", "had not ended after 10 s", {"kept": 1}),
        ("leaves", LIMIT_S, "failed", "without a result", {"kept": 1}),
        ("cannot", LIMIT_S, "not run", "no such device", {}),
    ],
)
def test_a_part_leaves_its_figures_and_how_it_ended(
    tmp_path: Path, argument: str, limit_s: float, status: str, reason: str, figures: Figures
) -> None:
    found = check(tmp_path, {"one": part(argument, limit_s=limit_s)})["one"]
    assert (found.status, found.figures) == (status, figures)
    assert reason in found.reason
    assert found.host is not None
    assert Records(tmp_path).read()["one"] == found


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


def test_the_merged_file_alone_is_enough_to_go_on(tmp_path: Path) -> None:
    """As after a machine that gives back one file: and a part's own file is newer."""
    old = {"one": stored(tmp_path, "one"), "two": stored(tmp_path, "two")}
    Records(tmp_path).merge(old)
    for path in (tmp_path / "parts").iterdir():
        path.unlink()
    assert Records(tmp_path).read() == old
    newer = stored(tmp_path, "two", status="failed")
    assert check(tmp_path, {name: part() for name in old}) == old | {"two": newer}
