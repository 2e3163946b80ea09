"""Charts: every point is in the plot, at the place that the ticks say."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from aserve.bench.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axes, line_chart, ticks

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


def test_points_lie_where_the_axes_say() -> None:
    root = parsed({"one": {0: 0, 100: 5, 50: 2.5}})
    line = root.find(f"{SVG}polyline")
    assert line is not None
    places = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    middle = ((LEFT + right) / 2, (TOP + bottom) / 2)
    assert places == [(LEFT, bottom), middle, (right, TOP)]


def test_each_series_has_a_line_dots_and_a_name_of_one_colour() -> None:
    root = parsed({"here": {1: 1, 2: 2}, "there": {1: 3}})
    lines = root.findall(f"{SVG}polyline")
    names = [text for text in root.findall(f"{SVG}text") if text.text in ("here", "there")]
    assert len(root.findall(f"{SVG}circle")) == 3
    assert [line.get("stroke") for line in lines] == [name.get("fill") for name in names]
    assert len({line.get("stroke") for line in lines}) == 2
    highest = min(float(dot.attrib["cy"]) for dot in root.findall(f"{SVG}circle"))
    assert highest > max(float(name.attrib["y"]) for name in names)


def test_words_of_a_title_cannot_break_the_document() -> None:
    title = parsed({"one": {1: 1}}).find(f"{SVG}title")
    assert title is not None
    assert title.text == "A < B & C"
