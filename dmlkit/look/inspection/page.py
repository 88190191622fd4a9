"""The page of ``dmlkit inspect``, one self-contained HTML file, and its charts."""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, floor, isfinite, log10, nan
from pathlib import Path
from typing import Any

from dmlkit.identify.page import Block, write_blocks
from dmlkit.look.inspection.findings import ModelInspection
from dmlkit.look.inspection.pictures import confusions, leaks, page_data, similar, suspected, worst
from dmlkit.vectors.progress_bar import Bar, no_bar

HERE = Path(__file__).parent


def write_inspection(inspection: ModelInspection, path: Path, title: str, *, bar: Bar = no_bar) -> int:
    """Write the page atomically.

    Returns:
        The number of pictures that are placeholders, or missing in the map, because their images are missing.
    """
    data, missing = page_data(inspection, bar=bar)
    scored = inspection.evaluation is not None
    labeled = inspection.neighbors is not None and len(inspection.names) > 1
    sections: list[tuple[str, str, bool, Callable[[ModelInspection], list[Block]]]] = [
        ("figures", "Figures", True, _figures),
        ("similarities", "Similarities of pairs", inspection.histograms is not None, _histograms),
        ("worst", "Worst queries", scored, worst),
        ("confused", "Confused classes", scored, confusions),
        ("classes", "Classes", scored, lambda _: [("classes", None)]),
        ("suspects", "Suspected wrong labels", labeled, suspected),
        ("alike", "Similar across labels", labeled, similar),
        ("leaks", "Similar across splits", inspection.leaks is not None, leaks),
        ("map", "Map", True, lambda _: [("map", inspection.planes)]),
        ("training", "Training", bool(inspection.epochs), _curves),
        (
            "recipe",
            "Recipe",
            inspection.recipe is not None,
            lambda _: [("recipe", str(inspection.recipe).splitlines())],
        ),
    ]
    shown = {(anchor, heading): blocks(inspection) for anchor, heading, is_there, blocks in sections if is_there}
    style, script = ((HERE / f"inspect.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    return write_blocks(path, title, sections=shown, style=style, script=script, data=data) + missing


def _figures(inspection: ModelInspection) -> list[Block]:
    images = inspection.collection
    contents = f"{len(images):,} images of {len(inspection.names):,} classes, {images.source}; similarity: "
    blocks: list[Block] = [("text", contents + images.manifold.similarity_name.replace("_", " "))]
    if inspection.report is not None and inspection.evaluation is not None:
        pretrained = inspection.pretrained
        rows = [["metric", "value", "95 % interval", *(["pretrained"] if pretrained else []), "definition"]]
        for name, value in inspection.report.metrics.items():
            interval = inspection.report.intervals.get(name)
            row = [name, f"{value:.4f}", f"{interval[0]:.4f} to {interval[1]:.4f}" if interval else ""]
            row += [f"{pretrained[name]:.4f}" if name in pretrained else ""] if pretrained else []
            rows.append([*row, inspection.evaluation.scores.definitions[name]])
        blocks.append(("table", rows))
    notes = [*inspection.notes, *(inspection.report.notes if inspection.report else ())]
    if images.skipped:
        notes.append(f"{len(images.skipped)} images could not be read: {images.skipped[0]}")
    return [*blocks, *(("text", f"Note: {note}") for note in notes)]


def _histograms(inspection: ModelInspection) -> list[Block]:
    counts = inspection.histograms
    assert counts is not None
    places = counts.edges.repeat_interleave(2).tolist()  # two heights at each edge make a step
    lines: dict[str, Sequence[tuple[float, float]]] = {}
    for name, bins in (("same class", counts.same), ("different classes", counts.different)):
        pairs = int(bins.sum())
        heights = [0.0, *(bins.double() / max(1, pairs)).repeat_interleave(2).tolist(), 0.0]
        lines[f"{name}: {pairs:,} pairs"] = list(zip(places, heights, strict=True))
    name = inspection.collection.manifold.similarity_name.replace("_", " ")
    blocks: list[Block] = [("chart", line_chart("Share of the pairs by their similarity", lines, x_name=name))]
    if counts.sampled < len(inspection.labels):
        blocks.append(("text", f"Pairs of different classes are from {counts.sampled:,} images drawn at random."))
    return blocks


def _curves(inspection: ModelInspection) -> list[Block]:
    rows = inspection.epochs
    losses = {"loss": [(row.epoch, row.loss) for row in rows]}
    for term in rows[0].terms or ():
        losses[term] = [(row.epoch, (row.terms or {}).get(term, nan)) for row in rows]
    charts = [line_chart("Training loss", losses, x_name="epoch")]
    if validated := [(row.epoch, row.validation) for row in rows if row.validation]:
        names = validated[0][1]
        metrics = {name: [(epoch, figures.get(name, nan)) for epoch, figures in validated] for name in names}
        charts.append(line_chart("Metrics on validation", metrics, x_name="epoch"))
    return [("chart", chart) for chart in charts]


WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 10, 38


def line_chart(title: str, lines: Mapping[str, Sequence[tuple[float, float]]], *, x_name: str) -> dict[str, Any]:
    """Return the chart that the page's template draws: lines of points (x, y) in one frame that shows all of them.

    Points that are not finite are omitted. The labels of the axes have their place, alignment and text.

    Example:
        >>> line_chart("Loss", {"train": [(1, 3.0), (2, 1.0)]}, x_name="epoch")["lines"]
        {'train': '56.0,10.0 624.0,202.0'}
    """
    finite = {name: [(x, y) for x, y in line if isfinite(x) and isfinite(y)] for name, line in lines.items()}
    every = [point for line in finite.values() for point in line] or [(0.0, 0.0)]
    (low_x, high_x), (low_y, high_y) = map(_range, zip(*every, strict=True))

    def across(x: float) -> str:
        return f"{LEFT + (x - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT):.1f}"

    def down(y: float) -> str:
        return f"{HEIGHT - BOTTOM - (y - low_y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM):.1f}"

    below = str(HEIGHT - BOTTOM + 16)
    labels = [(str(LEFT - 6), down(value), "end", f"{value:.4g}") for value in round_values(low_y, high_y)]
    labels += [(across(value), below, "middle", f"{value:.4g}") for value in round_values(low_x, high_x)]
    labels.append((str((LEFT + WIDTH - RIGHT) / 2), str(HEIGHT - 3), "middle", x_name))
    drawn = {name: " ".join(f"{across(x)},{down(y)}" for x, y in line) for name, line in finite.items()}
    axes = f"M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"
    return {"title": title, "lines": drawn, "labels": labels, "axes": axes, "width": WIDTH, "height": HEIGHT}


def round_values(low: float, high: float) -> list[float]:
    """Return three to six round numbers in a range.

    Example:
        >>> round_values(-0.078, 0.9976), round_values(1, 10)
        ([0.0, 0.2, 0.4, 0.6, 0.8], [2.0, 4.0, 6.0, 8.0, 10.0])
    """
    exponent = floor(log10((high - low) / 3))
    step = max(part * 10.0**exponent for part in (1, 2, 5) if (high - low) / (part * 10.0**exponent) >= 3)
    return [round(multiple * step, 12 - exponent) + 0.0 for multiple in range(ceil(low / step), floor(high / step) + 1)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
