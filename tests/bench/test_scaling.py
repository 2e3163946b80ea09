"""`aserve bench scaling` measures the curves, and `report` draws them."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from aserve.bench.chart import CURVES
from aserve.cli import main
from tests.bench.last_line import Captured, figures_of

SIZES = ("--contexts", "16,40,5000", "--prefills", "32", "--rows", "2,4")
MACHINE = {"cpu": "c", "cores": 1, "flags": [], "versions": {}, "date": "2026-01-01T00:00:00"}


@pytest.fixture
def result(tmp_path: Path) -> Path:
    """What a bench printed: a table, then the last line."""
    curves = {name: {"1": 2.0, "10": 3.0} for name in CURVES}
    path = tmp_path / "scaling.txt"
    path.write_text("a table\n" + json.dumps({"curves": curves, "machine": MACHINE}) + "\n")
    return path


@pytest.mark.slow
def test_every_curve_has_its_sizes_except_those_that_do_not_fit(capsys: Captured) -> None:
    figures = figures_of(capsys, "scaling", *SIZES, "--steps", "2", "--repeats", "1")
    curves = figures["curves"]
    assert list(curves) == list(CURVES)
    assert list(curves["decode"]) == ["16", "40"]
    assert list(curves["prefill"]) == ["32"]
    assert list(curves["host-step"]) == ["2", "4"]
    assert figures["left_out"] == [5000]
    assert len(curves["start"]) == len(curves["memory"]) == 1
    assert all(value > 0 for curve in curves.values() for value in curve.values())


def test_every_curve_is_a_chart_with_a_line_for_every_result(
    capsys: Captured, result: Path, tmp_path: Path
) -> None:
    out = tmp_path / "pictures"
    both = ("--results", f"{result},{result}", "--labels", "old,new", "--out", str(out))
    pictures = figures_of(capsys, "report", *both)["pictures"]
    assert pictures == {name: str(out / f"{name}.svg") for name in CURVES}
    for path in pictures.values():
        root = ElementTree.parse(path).getroot()
        assert root is not None
        assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--results", "missing.json"], "--results missing.json"),
        (["--labels", "a,b,c"], "--labels a,b,c: got 3 labels for 1 results"),
    ],
)
def test_invalid_input_of_report_is_one_line(
    arguments: list[str], words: str, capsys: Captured, result: Path
) -> None:
    given = [] if "--results" in arguments else ["--results", str(result)]
    assert main(["bench", "report", *given, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_servers_are_started_first_and_with_the_given_context(capsys: Captured) -> None:
    too_long = ("--max-model-len", "100000")
    assert main(["bench", "scaling", *SIZES, *too_long]) == 2
    said = capsys.readouterr()
    assert "the server did not start" in said.err
    assert "max_model_len is 100000" in said.err
    assert said.out == ""
