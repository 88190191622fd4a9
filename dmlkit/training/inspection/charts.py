"""Charts as SVG that take the colours of the page: lines and steps that differ in their dashes, too."""

from collections.abc import Sequence
from math import ceil, floor, isfinite, log10
from typing import NamedTuple

from dmlkit.files.escape import html

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 10, 38


class ChartLine(NamedTuple):
    """A line of a chart: its name, and its places."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def line_chart(title: str, lines: Sequence[ChartLine], *, x_name: str) -> str:
    """Lines in one frame whose axes hold them all; places that are not finite are left out.

    Example:
        >>> chart = line_chart("Loss", [ChartLine("train", [1, 2], [3.0, 1.0])], x_name="epoch")
        >>> chart.count("<polyline"), "epoch" in chart  # the line, and that of its name
        (2, True)
    """
    places = [[(x, y) for x, y in zip(line.x, line.y, strict=True) if isfinite(x) and isfinite(y)] for line in lines]
    every = [place for one in places for place in one] or [(0.0, 0.0)]
    low_x, high_x = _range([x for x, _ in every])
    low_y, high_y = _range([y for _, y in every])

    def at(x: float, y: float) -> str:
        across = LEFT + (x - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - (y - low_y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM)
        return f"{across:.1f},{down:.1f}"

    drawn = "".join(
        f'<polyline class="line{number % 6}" points="{" ".join(at(x, y) for x, y in one)}"/>'
        for number, one in enumerate(places)
    )
    ticks = "".join(
        f'<text x="{LEFT - 6}" y="{at(low_x, value).partition(",")[2]}" class="end">{_number(value)}</text>'
        for value in round_values(low_y, high_y)
    )
    below = HEIGHT - BOTTOM + 16
    ticks += "".join(
        f'<text x="{at(value, low_y).partition(",")[0]}" y="{below}" class="middle">{_number(value)}</text>'
        for value in round_values(low_x, high_x)
    )
    ticks += f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 3}" class="middle">{html(x_name)}</text>'
    frame = f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>'
    keys = "".join(
        f'<li><svg class="key" viewBox="0 0 30 8"><polyline class="line{number % 6}" points="0,4 30,4"/></svg> '
        f"{html(line.name)}</li>"
        for number, line in enumerate(lines)
    )
    return (
        f'<figure class="chart"><figcaption>{html(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{html(title)}">{frame}{drawn}{ticks}</svg><ul>{keys}</ul></figure>'
    )


def steps(name: str, edges: Sequence[float], shares: Sequence[float]) -> ChartLine:
    """A histogram as a line that goes up and down at the edges of its bins.

    Example:
        >>> steps("same", [0, 1, 2], [0.25, 0.75])
        ChartLine(name='same', x=[0, 0, 1, 1, 2, 2], y=[0.0, 0.25, 0.25, 0.75, 0.75, 0.0])
    """
    x = [edge for edge in edges for _ in range(2)]
    return ChartLine(name, x, [0.0, *(share for share in shares for _ in range(2)), 0.0])


def round_values(low: float, high: float) -> list[float]:
    """Three to six round numbers in a range.

    Example:
        >>> round_values(-0.078, 0.9976), round_values(1, 10)
        ([0.0, 0.2, 0.4, 0.6, 0.8], [2.0, 4.0, 6.0, 8.0, 10.0])
    """
    exponent = floor(log10((high - low) / 3))
    step = max(part * 10.0**exponent for part in (1, 2, 5) if (high - low) / (part * 10.0**exponent) >= 3)
    return [round(place * step, 12 - exponent) + 0.0 for place in range(ceil(low / step), floor(high / step) + 1)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _number(value: float) -> str:
    return f"{value:.4g}"
