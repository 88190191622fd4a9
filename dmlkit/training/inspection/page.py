"""The page of ``dmlkit inspect``, one self-contained HTML file, and its charts."""

from collections.abc import Callable, Sequence
from math import ceil, floor, isfinite, log10
from pathlib import Path
from typing import NamedTuple

from dmlkit.embedding.progress_bar import Bar, no_bar
from dmlkit.embedding.questions.page import Page, open_page
from dmlkit.files.escape import html
from dmlkit.training.inspection.findings import ModelInspection
from dmlkit.training.inspection.pictures import (
    as_json,
    page_data,
    write_confusions,
    write_leaks,
    write_similar,
    write_suspects,
    write_worst,
)

HERE = Path(__file__).parent


class Section(NamedTuple):
    """A section of the page."""

    anchor: str
    heading: str
    write: Callable[[Page, ModelInspection], None]
    is_there: bool


def write_inspection(found: ModelInspection, path: Path, title: str, *, bar: Bar = no_bar) -> int:
    """Write the page atomically.

    Returns:
        The number of pictures that are placeholders, or missing in the map, because their images are missing.

    Raises:
        UserError: the file cannot be written.
    """
    data, missing = page_data(found, bar=bar)
    sections = [section for section in sections_of(found) if section.is_there]
    style, script = ((HERE / f"inspect.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    with open_page(path, title, style=style, script=script) as page:
        links = "".join(f'<li><a href="#{one.anchor}">{html(one.heading)}</a></li>' for one in sections)
        page.markup(f'<nav aria-label="sections"><ul>{links}</ul></nav>')
        for section in sections:
            page.markup(f'<section class="part" id="{section.anchor}"><h2>{html(section.heading)}</h2>')
            section.write(page, found)
            page.markup("</section>")
        page.markup(f'<script type="application/json" id="data">{as_json(data)}</script>')
    return page.gone + missing


def sections_of(found: ModelInspection) -> list[Section]:
    """Return all sections in their order, and whether each of them has content."""
    scored, history = found.evaluation is not None, found.history
    labeled = found.neighbors is not None and len(found.names) > 1
    has_curves = history is not None and bool(history.rows)
    return [
        Section("figures", "Figures", _write_figures, True),
        Section("similarities", "Similarities of pairs", _write_histograms, found.histograms is not None),
        Section("worst", "Worst queries", write_worst, scored),
        Section("confused", "Confused classes", write_confusions, scored),
        Section("classes", "Classes", _write_classes, scored),
        Section("suspects", "Suspected wrong labels", write_suspects, labeled),
        Section("alike", "Similar across labels", write_similar, labeled),
        Section("leaks", "Similar across splits", write_leaks, history is not None),
        Section("map", "Map", _write_map, True),
        Section("training", "Training", _write_curves, has_curves),
        Section("recipe", "Recipe", _write_recipe, history is not None),
    ]


def _write_figures(page: Page, found: ModelInspection) -> None:
    images = found.collection
    contents = f"{len(images):,} images of {len(found.names):,} classes, {images.source}; similarity: "
    page.text(contents + images.manifold.similarity_name.replace("_", " "))
    if found.report is not None and found.evaluation is not None:
        untouched = found.history.untouched if found.history else None
        head = ["metric", "value", "95 % interval", *(["pretrained baseline"] if untouched else []), "definition"]
        rows: list[list[str]] = []
        for name, value in found.report.metrics.items():
            interval = found.report.intervals.get(name)
            row = [name, f"{value:.4f}", f"{interval[0]:.4f} to {interval[1]:.4f}" if interval else ""]
            row += [f"{untouched[name]:.4f}" if name in untouched else ""] if untouched else []
            rows.append([*row, found.evaluation.scores.definitions[name]])
        page.markup(table(head, rows))
    notes = [*found.notes, *(found.report.notes if found.report else ())]
    if images.skipped:
        notes.append(f"{len(images.skipped)} images could not be read: {images.skipped[0]}")
    for note in notes:
        page.text(f"Note: {note}")


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table as HTML; it scrolls on a narrow screen.

    Example:
        >>> table(["class"], [["<b>"]])
        '<div class="wide"><table><tr><th>class</th></tr><tr><td>&lt;b&gt;</td></tr></table></div>'
    """
    lines = ["".join(f"<th>{html(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{html(cell)}</td>" for cell in row) for row in rows]
    return f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _write_histograms(page: Page, found: ModelInspection) -> None:
    counts = found.histograms
    assert counts is not None
    edges = counts.edges.tolist()
    lines: list[ChartLine] = []
    for name, bins in (("same class", counts.same), ("different classes", counts.different)):
        share = bins.double() / max(1, int(bins.sum()))
        lines.append(steps(f"{name}: {int(bins.sum()):,} pairs", edges, share.tolist()))
    name = found.collection.manifold.similarity_name.replace("_", " ")
    page.markup(line_chart("Share of the pairs by their similarity", lines, x_name=name))
    if counts.sampled < len(found.labels):
        page.text(f"Pairs of different classes are from {counts.sampled:,} images drawn at random.")


def _write_classes(page: Page, _: ModelInspection) -> None:
    page.markup(
        '<p><label>Filter <input id="filter" type="search" autocomplete="off"></label> '
        '<span id="shown" role="status"></span></p><div class="wide"><table id="class-table"></table></div>'
        '<p><button id="more" type="button">Show more</button></p>'
    )


def _write_map(page: Page, found: ModelInspection) -> None:
    choices = "".join(f"<option>{html(name)}</option>" for name in found.planes)
    page.markup(
        f'<p class="tools"><label>Plane <select id="plane">{choices}</select></label> '
        '<label>Highlight class <input id="highlight" type="search" autocomplete="off"></label> '
        '<button id="closer" type="button" aria-label="zoom in">+</button> '
        '<button id="farther" type="button" aria-label="zoom out">&minus;</button> '
        '<button id="whole" type="button">Reset</button></p>'
        '<canvas id="embedding-map" tabindex="0" role="application" aria-describedby="map-help" '
        'aria-label="Map of all images"></canvas>'
        '<p id="map-help">Each dot is an image, its color is the class. Wheel or + and &minus; zoom, dragging or '
        "arrows move, 0 resets. The image under the pointer, or nearest to the center, is described below.</p>"
        '<div id="under" role="status"></div>'
    )


def _write_curves(page: Page, found: ModelInspection) -> None:
    assert found.history is not None
    rows = found.history.rows
    epochs = [float(row.epoch) for row in rows]
    page.markup(line_chart("Training loss", [ChartLine("loss", epochs, [row.loss for row in rows])], x_name="epoch"))
    validated = [(float(row.epoch), row.validation) for row in rows if row.validation]
    names = list(validated[0][1]) if validated else []
    lines = [
        ChartLine(
            name, [epoch for epoch, _ in validated], [figures.get(name, float("nan")) for _, figures in validated]
        )
        for name in names
    ]
    if lines:
        page.markup(line_chart("Metrics on validation classes", lines, x_name="epoch"))


def _write_recipe(page: Page, found: ModelInspection) -> None:
    assert found.history is not None
    lines = "\n".join(html(line) for line in found.history.recipe.splitlines())
    page.markup(f"<details><summary>All keys</summary><pre>{lines}</pre></details>")


WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 10, 38


class ChartLine(NamedTuple):
    """A line of a chart: its name and its points."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def line_chart(title: str, lines: Sequence[ChartLine], *, x_name: str) -> str:
    """Draw lines in one frame, with axes that cover all of them; points that are not finite are omitted.

    Example:
        >>> chart = line_chart("Loss", [ChartLine("train", [1, 2], [3.0, 1.0])], x_name="epoch")
        >>> chart.count("<polyline"), "epoch" in chart  # the line, and the one in the legend
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
    """Return a histogram as a line that steps at the edges of its bins.

    Example:
        >>> steps("same", [0, 1, 2], [0.25, 0.75])
        ChartLine(name='same', x=[0, 0, 1, 1, 2, 2], y=[0.0, 0.25, 0.25, 0.75, 0.75, 0.0])
    """
    x = [edge for edge in edges for _ in range(2)]
    return ChartLine(name, x, [0.0, *(share for share in shares for _ in range(2)), 0.0])


def round_values(low: float, high: float) -> list[float]:
    """Return three to six round numbers in a range.

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
