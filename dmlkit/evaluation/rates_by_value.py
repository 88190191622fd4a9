"""Error rates of a calibration per value of a column of a table, e.g. per camera: whom a threshold fails."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dmlkit.distributed.launch import Ranks
from dmlkit.embedding.matched import matched_gallery
from dmlkit.embedding.points import PointsInMemory
from dmlkit.embedding.progress_bar import Bar, no_bar
from dmlkit.embedding.questions.calibration import Identification, labeled_decider
from dmlkit.embedding.questions.probability import Trials, repeated_rows
from dmlkit.embedding.questions.rates import most_trials
from dmlkit.embedding.sources import open_points, split_points
from dmlkit.embedding.trained import load_model
from dmlkit.evaluation.by_value import ByColumn, figures_by_value, read_column, run_table
from dmlkit.run_folder.folder import RunFolder
from dmlkit.run_folder.threshold import Threshold

BLOCK_ENTRIES = 2**23  # similarities at once: 32 MB in float32


@torch.no_grad()  # the curvature of a manifold may be learned
def pair_rates_by_value(
    path: Path, threshold: Threshold, column: str, table: Path | None, *, fabric: Ranks, bar: Bar = no_bar
) -> ByColumn:
    """Measure FAR and FRR of a run's threshold per value of a column, over the pairs of test images.

    Each image is compared with all others; its rates are those of its own pairs, so that a pair counts for the values
    of both of its images. Images that are alone in their class are left out.

    Args:
        path: the run.
        threshold: its threshold.
        column: name of the column.
        table: table that has it. Default: that of the run's dataset.
        fabric: device.
        bar: shows each step.

    Raises:
        UserError: see `run_table`, `read_column` and `figures_by_value`.
    """
    run = RunFolder(path)
    file, root = run_table(column, table, path)
    points = split_points(run, load_model(run, fabric, threshold.checkpoint), fabric, "test", bar)
    codes = points.class_codes()[1]
    rates = rates_of_images(points, codes, threshold.threshold)
    rows = (codes.bincount()[codes] > 1).nonzero()[:, 0]
    assert points.dataset is not None and points.rows is not None
    images = [points.dataset.key(row) for row in points.rows[rows].tolist()]
    values = read_column(images, file, root, column)
    own = {name: rate[rows] for name, rate in rates.items()}
    return figures_by_value(own, codes[rows], values, column, are_errors=True)


def rates_of_images(points: PointsInMemory, codes: Tensor, threshold: float) -> dict[str, Tensor]:
    """Return FAR and FRR of the pairs of each image, both (N,) float64; 0 for an image without such pairs.

    Args:
        points: (N, D).
        codes: (N,) int64, their classes.
        threshold: similarity from which on a pair is accepted.

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


def identification_rates_by_value(path: Path, found: Identification, column: str, table: Path | None) -> ByColumn:
    """Measure FPIR and FNIR of a calibrated gallery per value of a column, over images of the gallery.

    Each image whose label has others is identified twice, without itself and without its whole label. The probability
    and its threshold are those of the calibration, which was fitted to these images too. Images of labels that the
    model was trained on are left out as in `trials_on`.

    Args:
        path: the gallery.
        found: its calibration.
        column: name of the column.
        table: table that has it. Default: that of the dataset of the gallery's run.

    Raises:
        UserError: see `run_table`, `read_column` and `figures_by_value`.
    """
    gallery = open_points(path)
    file, root = run_table(column, table, gallery.run)
    names, decider = labeled_decider(matched_gallery(gallery) or gallery, near=found.near)
    allowed = np.ones(len(names), bool) if found.is_optimistic else ~np.isin(names, found.trained_labels or ())
    rows = repeated_rows(decider, most_trials(decider), allowed[decider.codes])
    points, classes = decider.trial_points(rows), decider.codes[rows]
    own, without = (Trials.of(decider, points, classes, rows, absent=absent) for absent in (False, True))
    said = [found.acceptance.sigmoid.of(trials.margins, trials.scores) for trials in (own, without)]
    rates = {
        "fpir": torch.from_numpy(said[1] >= found.threshold).double(),
        "fnir": torch.from_numpy(~(own.right & (said[0] >= found.threshold))).double(),
    }
    paths = gallery.paths
    values = read_column([paths[int(row)] for row in rows], file, root, column)
    return figures_by_value(rates, torch.from_numpy(classes), values, column, are_errors=True)
