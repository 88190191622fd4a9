"""Sections of the page that show images, and the data of its map and its table of classes."""

import base64
from typing import Any

import torch
from torch import Tensor

from dmlkit.errors import counted
from dmlkit.evaluation.mistakes import (
    NEIGHBORS,
    PLANTED,
    planted_precision,
    similar_pairs_across_labels,
    suspects,
    worst_queries,
)
from dmlkit.files.escape import printable
from dmlkit.identify.page import Block, Picture, Shelf
from dmlkit.look.inspection.findings import ModelInspection
from dmlkit.vectors.points import PointsInMemory
from dmlkit.vectors.progress_bar import Bar, no_bar

WORST, CONFUSED, SUSPECTS, PAIRS = 20, 10, 30, 24
"""Numbers of entries; with their neighbors they are about 600 pictures, 4 MB."""
NEIGHBORS_SHOWN = 8
SIDE_BY_SIDE = 4  # images of each of two confused classes


def picture(images: PointsInMemory, row: int, *lines: str, is_right: bool | None = None) -> Picture:
    """Return the picture of an image with its label and more lines."""
    caption = [line for line in (images.labels[row], *lines) if line is not None]
    return Picture(images.short_paths[row], caption, images.picture(row) or b"", is_right)


def worst(inspection: ModelInspection) -> list[Block]:
    """Return the queries with the lowest values of the last metric, with their nearest neighbors."""
    evaluation, images = inspection.evaluation, inspection.collection
    rows, neighbors = inspection.rows, inspection.neighbors
    assert evaluation is not None and rows is not None and neighbors is not None
    if not evaluation.scores.per_query:
        return [("text", "None of the metrics has values per query.")]
    name, values = list(evaluation.scores.per_query.items())[-1]
    labels, first = inspection.labels, neighbors.indices[rows, 0]
    positions = worst_queries(values, labels[rows], labels[first], neighbors.similarities[rows, 0].double(), WORST)
    order = f"Lowest {name} first, in a tie those whose nearest image is wrong; at most two queries per class."
    blocks: list[Block] = [("text", order)]
    for position in positions.tolist():
        row = int(rows[position])
        nearest = [
            picture(images, other, f"{rank}.  {similarity:.4f}", is_right=images.labels[other] == images.labels[row])
            for rank, other, similarity in _nearest(inspection, row)
        ]
        blocks.append(("shelf", Shelf(picture(images, row, f"{name} {float(values[position]):.4f}"), nearest)))
    return blocks


def confusions(inspection: ModelInspection) -> list[Block]:
    """Return the most confused pairs of classes side by side: most queries have their nearest image in the other."""
    assert inspection.evaluation is not None and inspection.neighbors is not None
    pairs, nearest = inspection.evaluation.confusions()[:CONFUSED], inspection.neighbors.indices[:, 0]
    if not pairs:
        return [("text", "No query has its nearest image in another class.")]
    blocks: list[Block] = []
    codes = {name: code for code, name in enumerate(inspection.names)}
    for pair in pairs:
        heading = f"{pair.name} taken for {pair.taken_for} by {pair.queries} queries, {pair.share:.0%} of its queries"
        if pair.taken_for not in codes:  # the gallery may have images that are not inspected, see `_scored`
            heading += f"; no picture of {pair.taken_for}, which only the gallery has"
        is_own, is_other = (inspection.labels == codes.get(name, len(codes)) for name in (pair.name, pair.taken_for))
        confused = (is_own & is_other[nearest]).nonzero()[:, 0]
        ours = [*confused.tolist(), *is_own.nonzero()[:, 0].tolist()]
        theirs = [*nearest[confused[:SIDE_BY_SIDE]].tolist(), *is_other.nonzero()[:, 0].tolist()]
        shown = (list(dict.fromkeys(rows))[:SIDE_BY_SIDE] for rows in (ours, theirs))
        sides = [[picture(inspection.collection, row) for row in rows] for rows in shown]
        blocks += [("heading", heading), ("sides", sides)]
    return blocks


def suspected(inspection: ModelInspection) -> list[Block]:
    """Return the images whose neighbors agree on another label, with the expected precision of this list."""
    neighbors, images = inspection.neighbors, inspection.collection
    assert neighbors is not None
    if bool((inspection.labels < 0).any()):
        return [("text", "Some images have no label, so wrong labels are not searched.")]
    listed = suspects(inspection.labels, neighbors.indices)
    precision, k = planted_precision(inspection.labels, neighbors.indices), neighbors.indices.shape[1]
    text = (
        f"{len(listed.rows):,} images whose {k} nearest neighbors have another label more often than their own; the "
        f"most suspicious first. Expected precision {precision:.2f}: when {PLANTED:.0%} of the labels are replaced by "
        "wrong ones, this share of the suspects has a replaced label. Labels that were wrong before lower it."
    )
    blocks: list[Block] = [("text", text)]
    for index, row in enumerate(listed.rows[:SUSPECTS].tolist()):
        name = inspection.names[int(listed.suggested[index])]
        votes = f"{int(listed.agreeing[index])} of {k} nearest: {name}"
        nearest = [picture(images, other, f"{similarity:.4f}") for _, other, similarity in _nearest(inspection, row)]
        blocks.append(("shelf", Shelf(picture(images, row, votes), nearest)))
    return blocks


def similar(inspection: ModelInspection) -> list[Block]:
    """Return the most similar pairs with different labels; near-duplicates among them have a wrong label."""
    assert inspection.neighbors is not None
    pairs = similar_pairs_across_labels(inspection.labels, inspection.neighbors, PAIRS)
    text = f"The most similar pairs with different labels, among the {NEIGHBORS} nearest neighbors of each image."
    return [("text", text), ("pairs", _pairs(inspection.collection, inspection.collection, *pairs))]


def leaks(inspection: ModelInspection) -> list[Block]:
    """Return the images that are most similar to a training image."""
    assert inspection.leaks is not None
    training, nearest = inspection.leaks
    rows = nearest.similarities[:, 0].argsort(descending=True, stable=True)[:PAIRS]
    text = "The most similar pairs of an image here and a training image. `dmlkit duplicates` lists all of them."
    if training.skipped:
        text += f" {counted(len(training.skipped), 'training image')} could not be read: {training.skipped[0]}"
    pairs = rows, nearest.indices[rows, 0], nearest.similarities[rows, 0]
    return [("text", text), ("pairs", _pairs(inspection.collection, training, *pairs))]


def _pairs(
    one: PointsInMemory, other: PointsInMemory, first: Tensor, second: Tensor, values: Tensor
) -> list[list[Picture]]:
    return [
        [picture(one, ours, f"{similarity:.4f}"), picture(other, theirs)]
        for ours, theirs, similarity in zip(first.tolist(), second.tolist(), values.tolist(), strict=True)
    ]


def _nearest(inspection: ModelInspection, row: int) -> list[tuple[int, int, float]]:
    """Return rank, row and similarity of the nearest neighbors of an image."""
    assert inspection.neighbors is not None
    indices = inspection.neighbors.indices[row, :NEIGHBORS_SHOWN].tolist()
    similarities = (inspection.neighbors.similarities[row, :NEIGHBORS_SHOWN] + 0.0).tolist()
    return [(rank, *pair) for rank, pair in enumerate(zip(indices, similarities, strict=True), start=1)]


GRID = 4095  # places along the longer side of a map
MOST_PICTURES = 1500  # thumbnails of the map: 4 MB for any number of images
SIDE = 64  # of such a thumbnail


def page_data(inspection: ModelInspection, *, bar: Bar = no_bar) -> tuple[dict[str, Any], int]:
    """Return the data of the script, and the number of thumbnails that could not be drawn."""
    images = inspection.collection
    generator = torch.Generator().manual_seed(0)
    sample = torch.randperm(len(images), generator=generator)[:MOST_PICTURES].sort().values.tolist()
    pictures: dict[str, str] = {}
    with bar("drawing", len(sample)) as advance:
        for row in sample:
            small = images.picture(row, SIDE)
            if small is not None:
                pictures[str(row)] = base64.b64encode(small).decode()
            advance(1)
    data = {
        "planes": {name: (in_disk if name == "disk" else on_grid)(plane) for name, plane in inspection.planes.items()},
        "labels": inspection.labels.tolist(),
        "names": [printable(name) for name in inspection.names],
        "paths": [printable(path) for path in images.short_paths],
        "pictures": pictures,
        "classes": class_rows(inspection),
    }
    return data, len(sample) - len(pictures)


def class_rows(inspection: ModelInspection) -> dict[str, Any]:
    """Return the table of classes: a header and one row per class, the worst by the last metric first."""
    evaluation = inspection.evaluation
    if evaluation is None or not evaluation.scores.per_query:
        return {"head": [], "rows": []}
    taken: dict[str, str] = {}  # by class, the other class that most of its queries are taken for
    for pair in evaluation.confusions():
        taken.setdefault(pair.name, f"{printable(pair.taken_for)} ({pair.queries})")
    rows: list[list[Any]] = []
    for score in evaluation.worst_classes():
        values = (round(value, 4) for value in score.metrics.values())
        rows.append([printable(score.name), score.queries, *values, taken.get(score.name, "")])
    return {"head": ["class", "queries", *evaluation.scores.per_query, "most taken for"], "rows": rows}


def on_grid(plane: Tensor) -> list[list[int]]:
    """Return coordinates (N, 2) as two lists of integers from 0 to `GRID`, at one scale."""
    low = plane.min(0).values
    span = float((plane.max(0).values - low).max()) or 1.0
    return ((plane - low) / span * GRID).round().long().T.tolist()


def in_disk(plane: Tensor) -> list[list[int]]:
    """Return coordinates (N, 2) in the unit disk as integers; the disk fills the square from 0 to `GRID`.

    Example:
        >>> in_disk(torch.tensor([[-1.0, 0.0], [0.0, 1.0]]))
        [[0, 2048], [2048, 4095]]
    """
    return ((plane + 1) / 2 * GRID).round().long().T.tolist()
