"""Metrics per value of a column of a table, e.g. per camera: whom a model fails."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from pydantic import BaseModel
from torch import Tensor

from dmlkit.datasets.files.table_file import BOX, LABEL, column_names, read_images_table, text_column
from dmlkit.errors import UserError
from dmlkit.files.columns import require_column
from dmlkit.metrics.statistics import bootstrap_intervals, holm, part_comparison
from dmlkit.recipe.file import plain
from dmlkit.run_folder.folder import RunFolder

MOST_VALUES = 200  # more are names of images, not groups of them


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
        per_query: (Q,) values by metric.
        classes: (Q,) int64, classes of the queries.
        values: (Q,) values of the column; None leaves a query out.
        column: name of the column.
        are_errors: whether the largest values are the worst.

    Raises:
        UserError: there are fewer than two values or more than `MOST_VALUES`, or no metric has a value per query.

    Example:
        >>> hits = {"recall@1": torch.tensor([1.0, 0.0, 1.0, 1.0])}
        >>> found = figures_by_value(hits, torch.tensor([0, 0, 1, 1]), ["back", "back", "front", None], "camera")
        >>> [(one.value, one.metrics["recall@1"].mean) for one in found.values], found.without
        ([('back', 0.5), ('front', 1.0)], 1)
    """
    if not per_query:
        raise UserError("--by: none of the metrics has a value per query; add one with --metric, e.g. recall@1")
    names = sorted({value for value in values if value is not None})
    if not 2 <= len(names) <= MOST_VALUES:
        given = f"the only value is {names[0]!r}" if len(names) == 1 else f"it has {len(names)} values"
        raise UserError(f"--by {column}: {given}; expected a column with 2 to {MOST_VALUES} values for these images")
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


def read_column(images: Sequence[str], file: Path, root: Path, column: str) -> list[str | None]:
    """Return the values (N,) of images in a table; None for an empty cell, or an image that is not in the table.

    Args:
        images: paths, or keys of a dataset, see `dmlkit.datasets.files.dataset.Dataset.key`.
        file: table with the columns ``path``, the named one and, if it has boxes, ``x1 y1 x2 y2``.
        root: folder that the paths in the table are relative to.
        column: name of the column.

    Raises:
        UserError: the table cannot be read or lacks a column, none of the images is in it, or boxes of one image have
            other values and the box of an image is not known.
    """
    table = read_images_table(file, column)
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
    found: list[str | None] = []
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
        found.append(next(iter(options)))
    if not known:
        raise UserError(f"{file}: has none of the {len(images)} evaluated images, e.g. {images[0]}")
    return found


def absolute(path: str | Path) -> str:
    """Return a path from the root of the file system, without resolving links."""
    return os.path.abspath(path)  # noqa: PTH100


def table_of(column: str, dataset: Mapping[str, object] | None) -> tuple[Path, Path]:
    """Return the table of a dataset, and the folder that its paths are relative to.

    Args:
        column: column that is looked for.
        dataset: dataset of a resolved recipe; None if no run is known.

    Raises:
        UserError: the dataset is not a table.
    """
    if dataset is None or dataset["name"] != "table":
        what = "no run is known" if dataset is None else f"the dataset is {dataset['name']}, which has no columns"
        raise UserError(f"--by {column}: {what}; name a table with the columns path and {column} with --table FILE")
    file, root = Path(str(dataset["file"])), dataset["root"]
    return file, Path(str(root)) if root else file.parent


def column_table(column: str, table: Path | None, dataset: Mapping[str, object] | None) -> tuple[Path, Path]:
    """Return the table that has a column, and the folder that its paths are relative to.

    Args:
        column: name of the column.
        table: the table. Default: that of the dataset.
        dataset: see `table_of`.

    Raises:
        UserError: see `table_of`, or the table lacks the column.
    """
    file, root = table_of(column, dataset) if table is None else (table, table.parent)
    require_column(file, column_names(file), column)
    return file, root


def run_table(column: str, table: Path | None, run: Path | None) -> tuple[Path, Path]:
    """Return the same as `column_table` for the dataset of a run; None if no run is known."""
    dataset = None if table is not None or run is None else plain(RunFolder(run).recipe())["dataset"]
    return column_table(column, table, dataset)
