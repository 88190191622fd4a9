"""Metrics per value of a column of a table, e.g. per camera: whom a model fails."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from dmlkit.datasets.table import TableConfig, other_table
from dmlkit.errors import UserError
from dmlkit.files.columns import LABEL, SIGHTING, text_column, time_of
from dmlkit.files.escape import command_word
from dmlkit.files.exif import exif_sightings
from dmlkit.files.outputs import BOX
from dmlkit.files.paths import raise_faults
from dmlkit.files.readers.base import ImageTable
from dmlkit.files.where import check_values
from dmlkit.metrics.statistics import bootstrap_intervals, holm, part_comparison
from dmlkit.recipe.file import plain
from dmlkit.run_folder.folder import RunFolder

MOST_DATES = 31  # values of a time


class PartFigures(BaseModel, frozen=True, extra="forbid"):
    """One metric over the queries with one value, compared with all other queries."""

    mean: float
    interval: tuple[float, float] | None  # 95 % bootstrap interval over classes; null for fewer than 5 classes
    difference: float  # from the mean over all other queries
    difference_interval: tuple[float, float] | None  # null if one of the two sides has fewer than 5 classes
    p_value: float
    corrected: float  # the p-value after Holm's correction for all values and metrics


class ValueFigures(BaseModel, frozen=True, extra="forbid"):
    """Metrics over the queries with one value of the column."""

    value: str
    queries: int
    classes: int
    metrics: dict[str, PartFigures]


class ByColumn(BaseModel, frozen=True, extra="forbid"):
    """Metrics per value of a column."""

    column: str
    without: int  # queries without a value, which count in no comparison
    values: tuple[ValueFigures, ...]  # worst values of the last metric first


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
        >>> cameras = figures_by_value(hits, torch.tensor([0, 0, 1, 1]), ["back", "back", "front", None], "camera")
        >>> [(camera.value, camera.metrics["recall@1"].mean) for camera in cameras.values], cameras.without
        ([('back', 0.5), ('front', 1.0)], 1)
    """
    if not per_query:
        raise UserError("--by: none of the metrics has a value per query; add one with --metric, e.g. recall@1")
    values = dated(values) if column == "time" else values
    names = sorted({value for value in values if value is not None})
    check_values(names, column)
    codes = torch.tensor([-1 if value is None else names.index(value) for value in values])
    has_value = codes >= 0
    per_query = {name: figures[has_value] for name, figures in per_query.items()}
    codes, classes = codes[has_value], classes[has_value]
    parts = [codes == code for code in range(len(names))]
    changes = [[part_comparison(figures, part, classes) for figures in per_query.values()] for part in parts]
    corrected = iter(holm([change.p_value for of_value in changes for change in of_value]))
    value_figures: list[ValueFigures] = []
    for value, part, of_value in zip(names, parts, changes, strict=True):
        intervals = bootstrap_intervals({name: figures[part] for name, figures in per_query.items()}, classes[part])
        metrics = {
            name: PartFigures(
                mean=interval.mean,
                interval=interval.ends,
                difference=change.difference,
                difference_interval=change.ends,
                p_value=change.p_value,
                corrected=next(corrected),
            )
            for (name, interval), change in zip(intervals.items(), of_value, strict=True)
        }
        value_figures.append(
            ValueFigures(value=value, queries=int(part.sum()), classes=len(classes[part].unique()), metrics=metrics)
        )
    last = list(per_query)[-1]
    value_figures.sort(key=lambda figures: figures.metrics[last].mean, reverse=are_errors)
    return ByColumn(column=column, without=int((~has_value).sum()), values=tuple(value_figures))


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
    names = listed_paths(read)
    values: list[str | None] = text_column(table, str(file), LABEL).to_pylist()
    boxes = list(zip(*(table[name].to_pylist() for name in BOX), strict=True)) if BOX[0] in table.column_names else []
    paths = [absolute(root / name) for name in names]
    listed: dict[str, set[str | None]] = {}
    for name, path, value in zip(names, paths, values, strict=True):
        for key in {name, path}:  # names of samples that are not files stand in the table as they are
            listed.setdefault(key, set()).add(value)
    for path, value, box in zip(paths, values, boxes, strict=False):
        if None not in box:
            listed[f"{path} {tuple(map(float, box))}"] = {value}
    cells, is_any_listed = list[str | None](), False
    for image in images:
        options = listed.get(image) or listed.get(absolute(image)) or set()
        is_any_listed |= bool(options)
        if len(options) > 1:
            raise UserError(
                f"{file}: the boxes of {image} have different values of {column}; evaluate the run, which knows the "
                "box of each image"
            )
        cells.append(next(iter(options), None))
    if images and not is_any_listed:
        evaluated = f"{len(images)} evaluated images, e.g. {images[0]}"
        raise UserError(f"{file}: has none of the {evaluated}; expected a table that lists them")
    return cells


def listed_paths(listed: ImageTable) -> list[str]:
    """Return the paths (N,) of the rows of a table; raise a `UserError` that names those without one."""
    names: list[str | None] = text_column(listed.table, str(listed.file), "path").to_pylist()
    raise_faults(
        f"{listed.place(row)}: no path; add it, or remove the row" for row, name in enumerate(names) if not name
    )
    return [name for name in names if name]


def absolute(path: str | Path) -> str:
    """Return a path from the root of the file system, without resolving links."""
    return os.path.abspath(path)  # noqa: PTH100


def column_table(column: str, table: Path | None, dataset: Mapping[str, Any] | Path | None) -> TableConfig | None:
    """Return the table that has a column, by the recipe's names, see `other_table`; None for EXIF data.

    They have the columns of `SIGHTING` where the dataset has no table, or its table no such column. The dataset is that
    of a resolved recipe or of a run, and its table the default.
    """
    known = plain(RunFolder(dataset).recipe())["dataset"] if isinstance(dataset, Path) else dataset
    kind, keys = known["name"] if known else "", ("file", "root", "columns")
    dataset_table = TableConfig(**{key: known[key] for key in keys}) if known and kind == "table" else None
    if table is None and column in SIGHTING and kind in ("folder", "table"):
        has_column = dataset_table is not None and column in dataset_table.table(("path",)).table.column_names
        if not has_column:
            return None
    config = dataset_table if table is None else other_table(table, dataset_table)
    if config is None:
        reason = f"the dataset of the run is {kind}, which has no columns" if kind else "no run is known"
        raise UserError(f"--by {column}: {reason}; {advice_on_tables(column)}")
    config.table(**{LABEL: config.columns.get(column) or column})
    return config


def advice_on_tables(column: str) -> str:
    """Return how to name a table that has a column."""
    return f"name a table with the columns path and {column}: --by {command_word(f'FILE:{column}')}"
