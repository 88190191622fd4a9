"""Metrics, and error rates of a calibration, per value of a column of a table, e.g. per camera: whom a model fails."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor

from dmlkit.datasets.table import TableConfig, other_table
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError
from dmlkit.files.csv_table import column_called
from dmlkit.files.exif import exif_sightings
from dmlkit.files.image_table import BOX, LABEL, SIGHTING, text_column, time_of
from dmlkit.files.readers.base import reader_of
from dmlkit.files.regular import TABLES
from dmlkit.files.where import check_values
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.gallery.sources import open_points, split_points
from dmlkit.identify.calibrated import Identification
from dmlkit.identify.calibration import most_tried
from dmlkit.identify.decisions import labeled_decider
from dmlkit.identify.probability import Trials, are_repeated, drawn_rows
from dmlkit.identify.second import LocalMatches
from dmlkit.metrics.statistics import bootstrap_intervals, holm, part_comparison
from dmlkit.recipe.file import plain
from dmlkit.run_folder.folder import RunFolder
from dmlkit.run_folder.threshold import Threshold
from dmlkit.vectors.folder import EmbeddingFolder
from dmlkit.vectors.points import PointSet, PointsInMemory
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.trained import load_model

MOST_DATES = 31  # values of a time
BLOCK_ENTRIES = 2**23  # similarities at once: 32 MB in float32


class PartFigures(BaseModel, frozen=True, extra="forbid"):
    """One metric over the queries with one value, compared with all other queries."""

    mean: float
    interval: tuple[float, float] | None
    """95 % bootstrap interval over classes; null for fewer than 5 classes."""
    difference: float
    """From the mean over all other queries."""
    difference_interval: tuple[float, float] | None
    """Null if one of the two sides has fewer than 5 classes."""
    p_value: float
    corrected: float
    """The p-value after Holm's correction for all values and metrics."""


class ValueFigures(BaseModel, frozen=True, extra="forbid"):
    """Metrics over the queries with one value of the column."""

    value: str
    queries: int
    classes: int
    metrics: dict[str, PartFigures]


class ByColumn(BaseModel, frozen=True, extra="forbid"):
    """Metrics per value of a column."""

    column: str
    without: int
    """Queries without a value, which count in no comparison."""
    values: tuple[ValueFigures, ...]
    """Worst values of the last metric first."""


def figures_by_value(
    per_query: Mapping[str, Tensor],
    classes: Tensor,
    values: Sequence[str | None],
    column: str,
    *,
    are_errors: bool = False,
) -> ByColumn:
    """Compute each metric per value of a column, with intervals, and compare each value with all others.

    Args:
        values: (Q,) values of the column; None leaves a query out.
        are_errors: whether the largest values are the worst.

    Example:
        >>> hits = {"recall@1": torch.tensor([1.0, 0.0, 1.0, 1.0])}
        >>> found = figures_by_value(hits, torch.tensor([0, 0, 1, 1]), ["back", "back", "front", None], "camera")
        >>> [(one.value, one.metrics["recall@1"].mean) for one in found.values], found.without
        ([('back', 0.5), ('front', 1.0)], 1)
    """
    if not per_query:
        raise UserError("--by: none of the metrics has a value per query; add one with --metric, e.g. recall@1")
    values = dated(values) if column == "time" else values
    names = sorted({value for value in values if value is not None})
    check_values(names, column)
    codes = torch.tensor([-1 if value is None else names.index(value) for value in values])
    kept = codes >= 0
    per_query = {name: figures[kept] for name, figures in per_query.items()}
    codes, classes = codes[kept], classes[kept]
    changes = [
        part_comparison(figures, codes == code, classes) for code in range(len(names)) for figures in per_query.values()
    ]
    corrected = iter(holm([change.p_value for change in changes]))
    compared = iter(changes)
    found: list[ValueFigures] = []
    for code, value in enumerate(names):
        own = codes == code
        intervals = bootstrap_intervals({name: figures[own] for name, figures in per_query.items()}, classes[own])
        metrics: dict[str, PartFigures] = {}
        for name, interval in intervals.items():
            change = next(compared)
            metrics[name] = PartFigures(
                mean=interval.mean,
                interval=interval.ends,
                difference=change.difference,
                difference_interval=change.ends,
                p_value=change.p_value,
                corrected=next(corrected),
            )
        found.append(
            ValueFigures(value=value, queries=int(own.sum()), classes=len(classes[own].unique()), metrics=metrics)
        )
    last = list(per_query)[-1]
    found.sort(key=lambda one: one.metrics[last].mean, reverse=are_errors)
    return ByColumn(column=column, without=int((~kept).sum()), values=tuple(found))


def dated(values: Sequence[str | None]) -> Sequence[str | None]:
    """Return times as days, months or years, the finest of which there are few; others as they are.

    Example:
        >>> dated([f"2026-{month:02}-{day:02}T12:00" for month in (5, 6) for day in range(1, 31)])[29:31]
        ['2026-05', '2026-06']
    """
    try:
        times = [time_of(value, "") for value in values]
    except UserError:  # morning, evening
        return values
    for length in (10, 7, 4):
        dates = [None if time is None else time.isoformat()[:length] for time in times]
        if len({*dates}) <= MOST_DATES:
            return dates
    return values


BOX_OF_KEY = re.compile(r" \([-+.\w]+(, [-+.\w]+){3}\)( margin \S+)?$")


def read_column(images: Sequence[str], source: TableConfig | None, column: str) -> list[str | None]:
    """Return the values (N,) of images in a table; None for an empty cell, or an image that is not in the table.

    Args:
        images: paths, or keys of a dataset, see `dmlkit.datasets.files.dataset.Dataset.key`.
        source: table with the columns ``path``, the named one and, if it has boxes, ``x1 y1 x2 y2``; None for a column
            of `SIGHTING` by the EXIF data of the images.
        column: its name in the table, or dmlkit's.
    """
    if source is None:
        return [getattr(seen, column) for seen in exif_sightings([BOX_OF_KEY.sub("", image) for image in images])]
    read = source.table(**{LABEL: source.columns.get(column) or column})
    table, file, root = read.table, read.file, read.root
    names: list[str] = text_column(table, str(file), "path").to_pylist()
    values: list[str | None] = text_column(table, str(file), LABEL).to_pylist()
    boxes = list(zip(*(table[name].to_pylist() for name in BOX), strict=True)) if BOX[0] in table.column_names else []
    paths = [absolute(root / name) for name in names]
    whole: dict[str, set[str | None]] = {}
    for name, path, value in zip(names, paths, values, strict=True):
        for key in {name, path}:  # names of samples that are not files stand in the table as they are
            whole.setdefault(key, set()).add(value)
    parts = {
        f"{path} {tuple(map(float, box))}": value
        for path, value, box in zip(paths, values, boxes, strict=False)
        if None not in box
    }
    cells: list[str | None] = []
    known = 0
    for image in images:
        key = next((key for key in (image, absolute(image)) if key in parts or key in whole), None)
        known += key is not None
        options = {None} if key is None else {parts[key]} if key in parts else whole[key]
        if len(options) > 1:
            raise UserError(
                f"{file}: the boxes of {image} have different values of {column}; evaluate the run, which knows the "
                "box of each image"
            )
        cells.append(next(iter(options)))
    if not known:
        some = f"{len(images)} evaluated images, e.g. {images[0]}"
        raise UserError(f"{file}: has none of the {some}; expected a table that lists them")
    return cells


def absolute(path: str | Path) -> str:
    """Return a path from the root of the file system, without resolving links."""
    return os.path.abspath(path)  # noqa: PTH100


def column_table(column: str, table: Path | None, dataset: Mapping[str, Any] | Path | None) -> TableConfig | None:
    """Return the table that has a column, by the recipe's names, see `other_table`; None for EXIF data.

    They have the columns of `SIGHTING` where the dataset has no table, or its table no such column.

    Args:
        table: the table. Default: that of the dataset.
        dataset: dataset of a resolved recipe, or the run that has it; None if no run is known.
    """
    known = plain(RunFolder(dataset).recipe())["dataset"] if isinstance(dataset, Path) else dataset
    kind, keys = known["name"] if known else "", ("file", "root", "columns")
    own = TableConfig(**{key: known[key] for key in keys}) if known and kind == "table" else None
    if table is None and column in SIGHTING and kind in ("folder", "table"):
        has_column = own is not None and column in own.table(("path",)).table.column_names
        if not has_column:
            return None
    config = own if table is None else other_table(table, own)
    if config is None:
        what = f"the dataset of the run is {kind}, which has no columns" if kind else "no run is known"
        advice = f"name a table with the columns path and {column}: --by FILE:{column}"
        raise UserError(f"--by {column}: {what}; {advice}")
    config.table(**{LABEL: config.columns.get(column) or column})
    return config


def own_values(column: str, table: Path | None, points: PointSet) -> list[str | None] | None:
    """Return the values of the labeled images of a gallery in a column of its own; None without such a column."""
    if table is not None or not isinstance(points, GalleryFolder):
        return None
    columns = points.cells()
    place = column_called([*columns], column, f"--by {column}: {points.source}")
    values = None if place is None else zip([*columns.values()][place], points.labels, strict=True)
    return values and [value for value, label in values if label is not None]


def points_table(column: str, table: Path | None, points: PointSet) -> Path | None:
    """Return the table of the images of points, which has a column; None for that of the dataset of their run.

    Args:
        table: the table. Default: the one that was embedded.
        points: a folder of embeddings knows what was embedded; the images of a gallery may come from several places.
    """
    if table is None and isinstance(points, EmbeddingFolder):
        source = Path(points.manifest.source)
        advice = f"name a table with the columns path and {column}: --by FILE:{column}"
        if source.suffix.lower() in TABLES or reader_of(source) is not None:
            if not source.exists():
                raise UserError(f"--by {column}: {source}, which was embedded, is no longer there; {advice}")
            table = source
        elif source.exists() and column not in SIGHTING:  # otherwise the name of a split
            raise UserError(f"--by {column}: {points.source} has the images of {source}, which is no table; {advice}")
    column_table(column, table, points.run)
    return table


@torch.no_grad()  # the curvature of a manifold may be learned
def pair_rates_by_value(
    path: Path, threshold: Threshold, column: str, table: Path | None, *, ranks: Ranks, bar: Bar = no_bar
) -> ByColumn:
    """Measure FAR and FRR of a run's threshold per value of a column, over the pairs of test images.

    Each image is compared with all others; its rates are those of its own pairs, so that a pair counts for the values
    of both of its images. Images that are alone in their class are left out.
    """
    run = RunFolder(path)
    own_table = column_table(column, table, path)
    points = split_points(run, load_model(run, ranks, threshold.checkpoint), ranks, "test", bar)
    codes = points.class_codes()[1]
    rates = rates_of_images(points, codes, threshold.threshold)
    rows = (codes.bincount()[codes] > 1).nonzero()[:, 0]
    assert points.images is not None
    images = [points.images.dataset.key(row) for row in points.images.rows[rows].tolist()]
    values = read_column(images, own_table, column)
    own = {name: rate[rows] for name, rate in rates.items()}
    return figures_by_value(own, codes[rows], values, column, are_errors=True)


def rates_of_images(points: PointsInMemory, codes: Tensor, threshold: float) -> dict[str, Tensor]:
    """Return FAR and FRR of the pairs of each image, both (N,) float64; 0 for an image without such pairs.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> line = torch.tensor([[0.0], [1.0], [1.5], [9.0]])
        >>> points = PointsInMemory("line", Euclidean(1), line, [""] * 4, ["a", "a", "b", "b"])
        >>> found = rates_of_images(points, torch.tensor([0, 0, 1, 1]), -1.0)
        >>> found["far"].tolist(), found["frr"].tolist()
        ([0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 1.0, 1.0])
    """
    every, manifold = points.points, points.manifold
    false, rejected = torch.zeros(len(every), dtype=torch.float64), torch.zeros(len(every), dtype=torch.float64)
    for rows in torch.arange(len(every)).split(max(1, BLOCK_ENTRIES // len(every))):
        accepted = manifold.similarity(every[rows], every) >= threshold
        same = codes[rows, None] == codes
        false[rows] = (accepted & ~same).sum(1).double()
        accepted[torch.arange(len(rows)), rows] = True  # itself
        rejected[rows] = (~accepted & same).sum(1).double()
    sizes = codes.bincount()[codes].double()
    return {"far": false / (len(every) - sizes).clamp(min=1), "frr": rejected / (sizes - 1).clamp(min=1)}


def identification_rates_by_value(path: Path, calibration: Identification, column: str, table: Path | None) -> ByColumn:
    """Measure FPIR and FNIR of a calibrated gallery per value of a column, over images of the gallery.

    Each image whose label has others is identified twice, without itself and without its whole label. The probability
    and its threshold are those of the calibration, which was fitted to these images too. Images of labels that the
    model was trained on are left out as in `trials_of`.
    """
    gallery = open_points(path)
    own_table = column_table(column, table, gallery.run)
    names, decider = labeled_decider(gallery, near=calibration.near, second=LocalMatches.of(gallery))
    allowed = (
        np.ones(len(names), bool) if calibration.is_optimistic else ~np.isin(names, calibration.trained_labels or ())
    )
    rows = np.flatnonzero(are_repeated(decider) & allowed[decider.codes])
    rows = drawn_rows(rows, decider.codes, most_tried(decider))
    points, classes = decider.points_of(rows[:, None]), decider.codes[rows]
    numbers = decider.numbers[torch.from_numpy(rows)]
    own, without = (
        Trials.of(decider, points, classes, rows, absent=absent, numbers=numbers) for absent in (False, True)
    )
    fit = calibration.fits[0]
    said = [fit.sigmoid.of(trials.margins, trials.scores) for trials in (own, without)]
    rates = {
        "fpir": torch.from_numpy(said[1] >= fit.threshold).double(),
        "fnir": torch.from_numpy(~(own.right & (said[0] >= fit.threshold))).double(),
    }
    paths = decider.searched.paths
    values = read_column([paths[int(row)] for row in rows], own_table, column)
    return figures_by_value(rates, torch.from_numpy(classes), values, column, are_errors=True)
