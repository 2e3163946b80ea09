"""Charts: points lie where the ticks say, bars are as long as their figures."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from aserve.bench.chart import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axes,
    Comparison,
    Panel,
    bar_chart,
    line_chart,
    ticks,
)

SVG = "{http://www.w3.org/2000/svg}"
AXES = Axes("A < B & C", "tokens", "ms")


def parsed(series: dict[str, dict[float, float]]) -> ElementTree.Element:
    return ElementTree.fromstring(line_chart(AXES, series))


@pytest.mark.parametrize(
    ("largest", "values"),
    [
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (4000, [0, 1000, 2000, 3000, 4000]),
        (0.37, [0, 0.1, 0.2, 0.3, 0.4]),
        (7, [0, 2, 4, 6, 8]),
        (0, [0, 1]),
    ],
)
def test_ticks_are_round_and_reach_the_largest_value(largest: float, values: list[float]) -> None:
    assert ticks(largest) == pytest.approx(values)


def test_points_match_the_axes() -> None:
    root = parsed({"one": {0: 0, 100: 5, 50: 2.5}})
    line = root.find(f"{SVG}polyline")
    assert line is not None
    places = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    middle = ((LEFT + right) / 2, (TOP + bottom) / 2)
    assert places == [(LEFT, bottom), middle, (right, TOP)]


def test_each_series_has_a_line_dots_and_a_label_of_one_colour() -> None:
    root = parsed({"here": {1: 1, 2: 2}, "there": {1: 3}})
    lines = root.findall(f"{SVG}polyline")
    names = [text for text in root.findall(f"{SVG}text") if text.text in ("here", "there")]
    assert len(root.findall(f"{SVG}circle")) == 3
    assert [line.get("stroke") for line in lines] == [name.get("fill") for name in names]
    assert len({line.get("stroke") for line in lines}) == 2
    highest = min(float(dot.attrib["cy"]) for dot in root.findall(f"{SVG}circle"))
    assert highest > max(float(name.attrib["y"]) for name in names)


def test_a_title_cannot_break_the_svg() -> None:
    title = parsed({"one": {1: 1}}).find(f"{SVG}title")
    assert title is not None
    assert title.text == "A < B & C"


def test_bars_are_as_long_as_their_figures_and_the_longest_comes_first() -> None:
    panel = Panel("speed", "a machine, a day", {"b": (10.0, 20.0), "aserve": (40.0, 40.0)})
    root = ElementTree.fromstring(bar_chart(Comparison("engines", [panel])))
    ours, _, low, rest = (
        (float(bar.attrib["x"]), float(bar.attrib["width"])) for bar in root.findall(f"{SVG}rect")
    )
    assert low[1] == pytest.approx(ours[1] / 4, abs=0.1)
    assert rest[0] == pytest.approx(low[0] + low[1], abs=0.1)
    assert rest[1] == pytest.approx(ours[1] / 4, abs=0.1)
    words = [text.text for text in root.findall(f"{SVG}text")]
    assert words == ["engines", "speed", "a machine, a day", "aserve", "40", "b", "10 to 20"]


def test_text_follows_the_readers_colour_scheme() -> None:
    root = parsed({"one": {1: 1}})
    style = root.find(f"{SVG}style")
    assert style is not None
    assert "prefers-color-scheme: dark" in str(style.text)
    assert {text.get("class") for text in root.findall(f"{SVG}text")} == {"ink"}
    assert root.find(f"{SVG}rect") is None  # no background
