"""Draws SVG charts: lines for the curves of `scaling`, bars for a comparison of several engines.

A chart has no background, and its style sheet follows `prefers-color-scheme`, so one file is
readable on light and on dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

import msgspec

Curve: TypeAlias = dict[float, float]  # y by x
Point: TypeAlias = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axes:
    title: str
    x_label: str
    y_label: str


class Panel(msgspec.Struct, frozen=True):
    """One group of bars. `bars` has the lowest and the highest figure of each engine."""

    title: str
    setting: str  # machine and date
    bars: dict[str, tuple[float, float]]

    def __post_init__(self) -> None:
        if not any(high > 0 for _, high in self.bars.values()):
            raise ValueError(f"the panel {self.title!r} has no figure above 0")


class Comparison(msgspec.Struct, frozen=True):
    """The figures of several engines that ran alternately on one machine; higher is better."""

    title: str
    panels: list[Panel]


CURVES: Mapping[str, Axes] = {
    "decode": Axes("Decode step by context length", "tokens of context", "ms per step"),
    "prefill": Axes("Prefill time per token by prompt length", "tokens of prompt", "ms per token"),
    "host-step": Axes("Host time of a step by batch size", "running requests", "ms per step"),
    "start": Axes("Start by model size", "million parameters", "seconds until ready"),
    "cluster": Axes("Throughput by size of the cluster", "devices", "tokens per s and device"),
    "cluster-one-router": Axes(
        "Throughput behind one router", "devices", "tokens per s and device"
    ),
    "memory": Axes("Memory by model size", "million parameters", "GB resident"),
}


WIDTH, HEIGHT = 560, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 36, 48  # margins around the plot
NUM_TICKS = 5  # approximate
# Each has a contrast of at least 3:1 with white and with GitHub's dark background.
COLOURS = ("#2f81f7", "#d55e00", "#1a9a6c", "#c2579a", "#b7791f", "#8a63d2")
STYLE = """
.ink { fill: #1f2328 } .faint { fill: #656d76 } .grid { stroke: #d0d7de } .other { fill: #8c959f }
@media (prefers-color-scheme: dark) {
.ink { fill: #e6edf3 } .faint { fill: #9198a1 } .grid { stroke: #3d444d } .other { fill: #6e7681 } }
"""
LEGEND_STEP = 16

OURS = "aserve"
BARS_WIDTH = 760
BARS_LEFT, BARS_RIGHT = 110, 110  # room for the names, and for the figures
BAR_STEP, BAR_HEIGHT = 20, 13
PANEL_HEAD, PANEL_GAP = 40, 14


def line_chart(axes: Axes, series: Mapping[str, Curve]) -> str:
    """Returns an SVG document. Every series has at least one point, and no value is below 0."""
    names = list(series) if len(series) > 1 else []
    plot = _Plot(
        top=TOP + LEGEND_STEP * len(names),
        x_ticks=ticks(max(x for curve in series.values() for x in curve)),
        y_ticks=ticks(max(y for curve in series.values() for y in curve.values())),
    )
    root = _document(axes.title, WIDTH, HEIGHT)
    _text(root, axes.title, (WIDTH / 2, 20), anchor="middle")
    plot.draw_axes(root, axes)
    for number, name in enumerate(names):
        at = (LEFT, TOP + LEGEND_STEP * number)
        _text(root, name, at, anchor="start", colour=COLOURS[number % len(COLOURS)])
    for number, curve in enumerate(series.values()):
        plot.draw_line(root, curve, colour=COLOURS[number % len(COLOURS)])
    return _serialized(root)


def bar_chart(comparison: Comparison) -> str:
    """Returns an SVG document of panels, each with one bar per engine, the longest first.

    A bar ends at the highest figure; its pale end reaches from the lowest to the highest.
    """
    heights = [PANEL_HEAD + BAR_STEP * len(panel.bars) + PANEL_GAP for panel in comparison.panels]
    root = _document(comparison.title, BARS_WIDTH, TOP + sum(heights))
    _text(root, comparison.title, (BARS_WIDTH / 2, 20), anchor="middle", weight="bold")
    top = float(TOP)
    for panel, height in zip(comparison.panels, heights, strict=True):
        _draw_panel(root, panel, top=top)
        top += height
    return _serialized(root)


def _draw_panel(root: Element, panel: Panel, *, top: float) -> None:
    _text(root, panel.title, (8, top + 12), anchor="start", weight="bold")
    _text(root, panel.setting, (8, top + 27), anchor="start", style="faint")
    longest = max(high for _, high in panel.bars.values())
    scale = (BARS_WIDTH - BARS_LEFT - BARS_RIGHT) / longest
    ranked = sorted(panel.bars.items(), key=lambda bar: -sum(bar[1]))
    for number, (name, (low, high)) in enumerate(ranked):
        y = top + PANEL_HEAD + BAR_STEP * number
        weight = "bold" if name == OURS else "normal"
        _text(root, name, (BARS_LEFT - 8, y + 11), anchor="end", weight=weight)
        _bar(root, name, (BARS_LEFT, y), scale * low)
        _bar(root, name, (BARS_LEFT + scale * low, y), scale * (high - low)).set("opacity", "0.45")
        figures = f"{low:,g}" if low == high else f"{low:,g} to {high:,g}"
        _text(root, figures, (BARS_LEFT + scale * high + 6, y + 11), anchor="start")


def _bar(root: Element, name: str, at: Point, width: float) -> Element:
    shape = {"x": f"{at[0]:.1f}", "y": f"{at[1]:g}", "width": f"{width:.1f}"}
    paint = {"fill": COLOURS[0]} if name == OURS else {"class": "other"}
    return SubElement(root, "rect", {**shape, "height": str(BAR_HEIGHT), **paint})


def ticks(largest: float) -> list[float]:
    """Returns round values from 0 to the first that is not below `largest`."""
    rough = largest / NUM_TICKS or 1.0
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough)
    count = math.ceil(round(largest / step, 9)) or 1
    return [number * step for number in range(count + 1)]


class _Plot:
    """Maps values to coordinates of the picture, and draws axes and lines with them."""

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
        points = [(self._x(x), self._y(y)) for x, y in sorted(curve.items())]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        stroke = {"fill": "none", "stroke": colour, "stroke-width": "2"}
        SubElement(root, "polyline", {"points": path, **stroke})
        for (x, y), (size, value) in zip(points, sorted(curve.items()), strict=True):
            dot = {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": "3.5", "fill": colour}
            SubElement(SubElement(root, "circle", dot), "title").text = f"{size:g}: {value:.4g}"

    def _x(self, value: float) -> float:
        return LEFT + value / self._x_ticks[-1] * (WIDTH - LEFT - RIGHT)

    def _y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self._y_ticks[-1] * (HEIGHT - self._top - BOTTOM)


def _document(title: str, width: int, height: int) -> Element:
    size = {"width": str(width), "height": str(height), "viewBox": f"0 0 {width} {height}"}
    root = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size})
    root.set("font-family", "sans-serif")
    root.set("font-size", "12")
    SubElement(root, "title").text = title
    SubElement(root, "style").text = STYLE
    return root


def _serialized(root: Element) -> str:
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _line(root: Element, start: Point, end: Point) -> None:
    (x1, y1), (x2, y2) = start, end
    ends = {"x1": f"{x1:g}", "y1": f"{y1:g}", "x2": f"{x2:g}", "y2": f"{y2:g}"}
    SubElement(root, "line", {**ends, "class": "grid"})


def _text(
    root: Element,
    text: str,
    at: Point,
    *,
    anchor: str,
    colour: str = "",
    style: str = "ink",
    weight: str = "normal",
) -> Element:
    """`colour` is a fixed colour; without one the text follows the reader's colour scheme."""
    paint = {"fill": colour} if colour else {"class": style}
    position = {"x": f"{at[0]:g}", "y": f"{at[1]:g}", "text-anchor": anchor}
    element = SubElement(root, "text", {**position, **paint})
    if weight != "normal":
        element.set("font-weight", weight)
    element.text = text
    return element
