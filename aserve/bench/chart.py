"""The curves that `scaling` measures and `report` draws, by name.

It knows no figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

Curve: TypeAlias = dict[float, float]  # y by x


@dataclass(frozen=True, slots=True)
class Axes:
    title: str
    x_label: str
    y_label: str


CURVES: Mapping[str, Axes] = {
    "decode": Axes("A decode step by its context", "tokens before it", "ms per step"),
    "prefill": Axes("A prefilled token by its prompt", "tokens of the prompt", "ms per token"),
    "host-step": Axes("A host step by its rows", "running requests", "ms per step"),
    "start": Axes("Start by the model's size", "million parameters", "seconds until ready"),
    "memory": Axes("Memory by the model's size", "million parameters", "GB resident"),
}


WIDTH, HEIGHT = 560, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 36, 48  # margins around the plot
NUM_TICKS = 5  # about
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#767676"
LEGEND_STEP = 16


def line_chart(axes: Axes, series: Mapping[str, Curve]) -> str:
    """An SVG document. Every series has at least one point, and no value is below 0."""
    names = list(series) if len(series) > 1 else []
    plot = _Plot(
        top=TOP + LEGEND_STEP * len(names),
        x_ticks=ticks(max(x for curve in series.values() for x in curve)),
        y_ticks=ticks(max(y for curve in series.values() for y in curve.values())),
    )
    size = {"width": str(WIDTH), "height": str(HEIGHT), "viewBox": f"0 0 {WIDTH} {HEIGHT}"}
    root = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size})
    root.set("font-family", "sans-serif")
    root.set("font-size", "12")
    SubElement(root, "title").text = axes.title
    _text(root, axes.title, (WIDTH / 2, 20), anchor="middle")
    plot.draw_axes(root, axes)
    for number, name in enumerate(names):
        at = (LEFT, TOP + LEGEND_STEP * number)
        _text(root, name, at, anchor="start", colour=COLOURS[number % len(COLOURS)])
    for number, curve in enumerate(series.values()):
        plot.draw_line(root, curve, colour=COLOURS[number % len(COLOURS)])
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def ticks(largest: float) -> list[float]:
    """Round values from 0 to the first that is not below `largest`."""
    rough = largest / NUM_TICKS or 1.0
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough)
    count = math.ceil(round(largest / step, 9)) or 1
    return [number * step for number in range(count + 1)]


class _Plot:
    """From values to places in the picture."""

    def __init__(self, *, top: int, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> None:
        self._top = top
        self._x_ticks = x_ticks
        self._y_ticks = y_ticks

    def draw_axes(self, root: Element, axes: Axes) -> None:
        for tick in self._y_ticks:
            y = self._y(tick)
            _line(root, (LEFT, y), (WIDTH - RIGHT, y))
            _text(root, f"{tick:g}", (LEFT - 6, y + 4), anchor="end")
        for tick in self._x_ticks:
            _text(root, f"{tick:g}", (self._x(tick), HEIGHT - BOTTOM + 16), anchor="middle")
        _text(root, axes.x_label, ((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10), anchor="middle")
        middle = (self._top + HEIGHT - BOTTOM) / 2
        label = _text(root, axes.y_label, (16, middle), anchor="middle")
        label.set("transform", f"rotate(-90 16 {middle:g})")

    def draw_line(self, root: Element, curve: Curve, *, colour: str) -> None:
        places = [(self._x(x), self._y(y)) for x, y in sorted(curve.items())]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        stroke = {"fill": "none", "stroke": colour, "stroke-width": "2"}
        SubElement(root, "polyline", {"points": points, **stroke})
        for (x, y), (size, value) in zip(places, sorted(curve.items()), strict=True):
            dot = {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": "3.5", "fill": colour}
            SubElement(SubElement(root, "circle", dot), "title").text = f"{size:g}: {value:.4g}"

    def _x(self, value: float) -> float:
        return LEFT + value / self._x_ticks[-1] * (WIDTH - LEFT - RIGHT)

    def _y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self._y_ticks[-1] * (HEIGHT - self._top - BOTTOM)


def _line(root: Element, start: tuple[float, float], end: tuple[float, float]) -> None:
    (x1, y1), (x2, y2) = start, end
    places = {"x1": f"{x1:g}", "y1": f"{y1:g}", "x2": f"{x2:g}", "y2": f"{y2:g}"}
    SubElement(root, "line", {**places, "stroke": GREY, "stroke-opacity": "0.3"})


def _text(
    root: Element, text: str, at: tuple[float, float], *, anchor: str, colour: str = GREY
) -> Element:
    place = {"x": f"{at[0]:g}", "y": f"{at[1]:g}", "text-anchor": anchor, "fill": colour}
    element = SubElement(root, "text", place)
    element.text = text
    return element
