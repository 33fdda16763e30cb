"""Charts as SVG text: a line or bars over steps, and a bar that is split into shares.

No style and no script is inside: the classes `c0` to `c7` are coloured by the page. Labels are escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 720, 220
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 26
MOST_POINTS, MOST_BARS = 240, 90

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line, or, with `errors`, single points with bars of `errors` to both sides; colour `c<colour>`."""

    label: str
    points: Sequence[Point]
    colour: int
    errors: Sequence[float] = field(default=())


def lines(series: Sequence[Series], *, low: float | None = None, high: float | None = None) -> str:
    """Return a chart of values over steps; `low` and `high` are values that the axis holds at least."""
    shown = [each for each in series if each.points]
    values = [y + sign * e for each in shown for (_, y), e in _with_errors(each) for sign in (-1, 1)]
    axis = Axis.over([*values, *(v for v in (low, high) if v is not None)])
    steps = Steps.over([x for each in shown for x, _ in each.points])
    parts = [_frame(axis, steps)]
    for each in shown:
        parts.append(_dots(each, axis, steps) if each.errors else _line(each, axis, steps))
    return _svg(parts, HEIGHT)


def stacked(steps: Sequence[float], series: Mapping[str, Sequence[float]], colours: Mapping[str, int]) -> str:
    """Return bars over steps, each stacked from the series in their order; many steps share a bar."""
    width = max(1, math.ceil(len(steps) / MOST_BARS))
    starts = range(0, len(steps), width)
    bars = {name: [sum(values[s : s + width]) for s in starts] for name, values in series.items()}
    totals = [sum(column) for column in zip(*bars.values(), strict=True)]
    axis = Axis.over([0.0, *totals])
    across = Steps.over([steps[0] - 0.5, steps[-1] + 0.5])
    parts = [_frame(axis, across)]
    for index, start in enumerate(starts):
        first, last = steps[start], steps[min(start + width, len(steps)) - 1]
        left, right = across.x(first - 0.5), across.x(last + 0.5)
        base = 0.0
        for name, values in bars.items():
            if not (value := values[index]):
                continue
            top, bottom = axis.y(base + value), axis.y(base)
            base += value
            span = f"step {first:g}" if first == last else f"steps {first:g} to {last:g}"
            parts.append(
                f'<rect class="c{colours[name]}" x="{left + 0.5:.1f}" y="{top:.1f}" '
                f'width="{max(0.5, right - left - 1):.1f}" height="{bottom - top:.1f}">'
                f"<title>{span}: {value:g} {escape(name)}</title></rect>"
            )
    return _svg(parts, HEIGHT)


def shares(parts: Mapping[str, float], colours: Mapping[str, int]) -> str:
    """Return one bar split into the shares of the parts' sum."""
    total = sum(parts.values())
    left, drawn = 0.0, []
    for name, value in parts.items():
        width = WIDTH * value / total
        drawn.append(
            f'<rect class="c{colours[name]}" x="{left:.1f}" y="0" width="{width:.1f}" height="22">'
            f"<title>{escape(name)}: {value:,.1f} s, {value / total:.1%}</title></rect>"
        )
        left += width
    return _svg(drawn, 22)


@dataclass(frozen=True)
class Axis:
    """The vertical axis: from `low` to `high`, with a tick every `every`."""

    low: float
    high: float
    every: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Axis:
        """Return an axis with three to six round ticks that holds the values."""
        low, high = min(values, default=0.0), max(values, default=1.0)
        if high - low < 1e-9 * max(1.0, abs(low), abs(high)):
            pad = 0.5 * max(1.0, abs(high))
            low, high = low - pad * (low != 0), high + pad
        every = _round_up((high - low) / 4)
        return cls(math.floor(low / every + 1e-6) * every, math.ceil(high / every - 1e-6) * every, every)

    def y(self, value: float) -> float:
        """Return where a value is drawn."""
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.high - value) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return the values that are labelled."""
        return [self.low + self.every * n for n in range(round((self.high - self.low) / self.every) + 1)]


@dataclass(frozen=True)
class Steps:
    """The horizontal axis: steps from `first` to `last`."""

    first: float
    last: float

    @classmethod
    def over(cls, steps: Sequence[float]) -> Steps:
        """Return the axis that holds these steps."""
        first, last = min(steps, default=0.0), max(steps, default=1.0)
        return cls(first, last) if last > first else cls(first - 0.5, last + 0.5)

    def x(self, step: float) -> float:
        """Return where a step is drawn."""
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - self.first) / (self.last - self.first)

    def ticks(self) -> list[float]:
        """Return the steps that are labelled: whole ones, about six."""
        every = _round_up(max(1.0, (self.last - self.first) / 6))
        start = math.ceil(self.first / every) * every
        return [start + every * n for n in range(int((self.last - start) / every + 1e-6) + 1)]


def _round_up(value: float) -> float:
    """Return the least of 1, 2, 5 times a power of ten that is not below a positive value."""
    power = 10.0 ** math.floor(math.log10(value))
    return next((m * power for m in (1, 2, 5) if m * power >= value * 0.999), 10 * power)


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most `MOST_POINTS` points: means over neighbours where there are more."""
    width = math.ceil(len(points) / MOST_POINTS)
    if width <= 1:
        return list(points)
    groups = [points[start : start + width] for start in range(0, len(points), width)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def _with_errors(series: Series) -> list[tuple[Point, float]]:
    return list(zip(series.points, series.errors or [0.0] * len(series.points), strict=True))


def _line(series: Series, axis: Axis, steps: Steps) -> str:
    points = [(steps.x(x), axis.y(y)) for x, y in thinned(series.points)]
    if len(points) == 1:
        return f'<circle class="c{series.colour}" cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="3"/>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    title = f"<title>{escape(series.label)}</title>"
    return f'<polyline class="line c{series.colour}" points="{path}">{title}</polyline>'


def _dots(series: Series, axis: Axis, steps: Steps) -> str:
    drawn = []
    for (step, value), error in _with_errors(series):
        x, y, top, bottom = steps.x(step), axis.y(value), axis.y(value + error), axis.y(value - error)
        drawn.append(
            f'<g class="c{series.colour}">'
            f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>'
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
            f"<title>{escape(series.label)}, step {step:g}: {value:.3f} ± {error:.3f}</title></g>"
        )
    return "".join(drawn)


def _frame(axis: Axis, steps: Steps) -> str:
    """Return grid lines and labels."""
    drawn = []
    for value in axis.ticks():
        y = axis.y(value)
        drawn.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(f'<text class="end" x="{LEFT - 8}" y="{y + 4:.1f}">{round(value, 10):g}</text>')
    drawn.append(f'<text x="0" y="{HEIGHT - 8}">step</text>')
    for step in steps.ticks():
        drawn.append(f'<text class="mid" x="{steps.x(step):.1f}" y="{HEIGHT - 8}">{step:g}</text>')
    return "".join(drawn)


def _svg(parts: Sequence[str], height: int) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'
