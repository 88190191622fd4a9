"""Error rates of a calibration per value of a column, and the columns of galleries and embeddings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError
from dmlkit.evaluation.by_value import ByColumn, advice_on_tables, column_table, figures_by_value, read_column
from dmlkit.files.columns import SIGHTING
from dmlkit.files.csv_table import column_called
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.gallery.sources import open_points, split_points
from dmlkit.identify.calibration import Identification, most_tried
from dmlkit.identify.decisions import labeled_decider
from dmlkit.identify.probability import Trials, are_repeated, drawn_rows
from dmlkit.identify.search import LocalMatches
from dmlkit.recipe.file import plain
from dmlkit.run_folder.folder import RunFolder
from dmlkit.run_folder.threshold import Threshold
from dmlkit.vectors.manifest import Manifest
from dmlkit.vectors.points import PointSet, PointsInMemory
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.trained import load_model

BLOCK_ENTRIES = 2**23  # similarities at once: 32 MB in float32


def values_of_points(column: str, table: Path | None, points: PointSet) -> list[str | None]:
    """Return the values of the labeled images of points in a column of a gallery, or of a table that lists them.

    Args:
        table: the table. Default: the columns of a gallery; the table that was embedded; that of the dataset of the
            run. The images of a gallery may come from several places.
    """
    if table is None and isinstance(points, GalleryFolder):
        columns = points.cells()
        index = column_called([*columns], column, f"--by {column}: {points.source}")
        if index is not None:
            values = [*columns.values()][index]
            return [value for value, label in zip(values, points.labels, strict=True) if label is not None]
    source = column_table(column, table, _dataset_of(column, table, points))
    images = [path for path, label in zip(points.paths, points.labels, strict=True) if label is not None]
    return read_column(images, source, column)


def _dataset_of(column: str, table: Path | None, points: PointSet) -> dict[str, Any] | Path | None:
    """Return the dataset that lists the images of points: a table that was embedded, a folder, or that of their run."""
    if not isinstance(points.manifest, Manifest):
        return points.run
    listing, source = points.manifest.table, points.manifest.source
    if listing is not None and (table is not None or Path(listing.file).exists()):
        return {"name": "table", **listing.model_dump()}
    if table is not None:
        return points.run
    if listing is not None and listing.file == source:
        raise UserError(f"--by {column}: {source}, which was embedded, is no longer there; {advice_on_tables(column)}")
    if listing is not None or not Path(source).exists():  # a split
        return points.run
    if column not in SIGHTING:
        raise UserError(
            f"--by {column}: {points.source} has the images of {source}, which is no table; {advice_on_tables(column)}"
        )
    return {"name": "folder"}


@torch.no_grad()  # the curvature of a manifold may be learned
def pair_rates_by_value(
    path: Path,
    threshold: Threshold,
    column: str,
    table: Path | None,
    *,
    overrides: Sequence[str] = (),
    ranks: Ranks,
    bar: Bar = no_bar,
) -> ByColumn:
    """Measure FAR and FRR of a run's threshold per value of a column, over the pairs of test images.

    Each image is compared with all others; its rates are those of its own pairs, so that a pair counts for the values
    of both of its images. Images of one group form no pair, and those without a pair of their class are left out.
    """
    run = RunFolder(path)
    trained = load_model(run, ranks, threshold.checkpoint, overrides=overrides)
    own_table = column_table(column, table, plain(trained.recipe)["dataset"])
    points = split_points(run, trained, ranks, "test", bar)
    codes = points.class_codes()[1]
    assert points.images is not None
    dataset, numbers = points.images.dataset, points.images.rows
    rates = rates_of_images(points, codes, dataset.groups_of(numbers), threshold.threshold)
    rows = (~rates["frr"].isnan()).nonzero()[:, 0]
    images = [dataset.key(row) for row in numbers[rows].tolist()]
    values = read_column(images, own_table, column)
    row_rates = {name: rate[rows] for name, rate in rates.items()}
    return figures_by_value(row_rates, codes[rows], values, column, are_errors=True)


def rates_of_images(points: PointsInMemory, codes: Tensor, groups: Tensor, threshold: float) -> dict[str, Tensor]:
    """Return FAR and FRR of the pairs of each image, both (N,) float64; without such pairs FAR is 0, and FRR NaN.

    Args:
        codes, groups: (N,) int64; images of one group form no pair.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> line = torch.tensor([[0.0], [1.0], [1.5], [9.0]])
        >>> points = PointsInMemory("line", Euclidean(1), line, [""] * 4, ["a", "a", "b", "b"])
        >>> rates = rates_of_images(points, torch.tensor([0, 0, 1, 1]), torch.arange(4), -1.0)
        >>> rates["far"].tolist(), rates["frr"].tolist()
        ([0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 1.0, 1.0])
    """
    every, manifold = points.points, points.manifold
    far, frr = torch.empty(len(every), dtype=torch.float64), torch.empty(len(every), dtype=torch.float64)
    for rows in torch.arange(len(every)).split(max(1, BLOCK_ENTRIES // len(every))):
        accepted = manifold.exact_similarity(every[rows], every) >= threshold
        same, apart = codes[rows, None] == codes, groups[rows, None] != groups
        false, rejected = (accepted & ~same & apart).sum(1), (~accepted & same & apart).sum(1)
        far[rows] = false.double() / (~same & apart).sum(1).clamp(min=1)
        frr[rows] = rejected.double() / (same & apart).sum(1)
    return {"far": far, "frr": frr}


def identification_rates_by_value(path: Path, calibration: Identification, column: str, table: Path | None) -> ByColumn:
    """Measure FPIR and FNIR of a calibrated gallery per value of a column, over images of the gallery.

    Each image whose label has others is identified twice, without itself and without its whole label. The probability
    and its threshold are those of the calibration, which was fitted to these images too. Images of labels that the
    model was trained on are left out as in `trials_of`.
    """
    gallery = open_points(path)
    own_table = column_table(column, table, gallery.run)
    names, decider = labeled_decider(gallery, near=calibration.near, second=LocalMatches.of(gallery))
    left_out = np.isin(names, () if calibration.is_optimistic else calibration.trained_labels or ())
    rows = np.flatnonzero(are_repeated(decider) & ~left_out[decider.codes])
    rows = drawn_rows(rows, decider.codes, most_tried(decider))
    points, classes = decider.points_of(rows[:, None]), decider.codes[rows]
    numbers = decider.numbers[torch.from_numpy(rows)]
    known, unknown = (
        Trials.of(decider, points, classes, rows, absent=absent, numbers=numbers) for absent in (False, True)
    )
    fit = calibration.fits[0]
    probabilities = [fit.sigmoid.of(trials.margins, trials.scores) for trials in (known, unknown)]
    rates = {
        "fpir": torch.from_numpy(probabilities[1] >= fit.threshold).double(),
        "fnir": torch.from_numpy(~(known.right & (probabilities[0] >= fit.threshold))).double(),
    }
    paths = decider.searched.paths
    values = read_column([paths[int(row)] for row in rows], own_table, column)
    return figures_by_value(rates, torch.from_numpy(classes), values, column, are_errors=True)
