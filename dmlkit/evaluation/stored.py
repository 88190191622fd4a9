"""Evaluations on disk: a report, and beside it the values of every query, to be used again for the same question."""

from math import nan
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.evaluation.report import Report
from dmlkit.evaluation.result import CLASS, Evaluation
from dmlkit.files.arrays import read_arrays
from dmlkit.run_folder.question import Question

ROUNDING = 1e-9  # of the mean of float64 in [0, 1], whatever the order of the sum


class Figures(NamedTuple):
    """A report with the values that it is made of.

    Args:
        report: what was found.
        per_query: (Q,) values by metric.
        classes: (Q,) int64, of the queries.
    """

    report: Report
    per_query: dict[str, Tensor]
    classes: Tensor


def stored_answer(path: Path, question: Question) -> Figures | None:
    """The stored report that answers a question, and the values of its queries; none where there is none.

    Raises:
        UserError: it is damaged, or of an older dmlkit.
    """
    if not path.exists():
        return None
    report, values = Report.read(path), path.with_suffix(".npz")
    if report.question != question:
        return None
    arrays = read_arrays(values, {**dict.fromkeys(report.intervals, np.float64), CLASS: np.int64}, report.queries)
    classes = torch.from_numpy(arrays.pop(CLASS))
    for name, array in arrays.items():
        if not abs(float(array.mean()) - report.metrics.get(name, nan)) < ROUNDING:
            raise UserError(f"{values}: the mean of {name} is not what {path.name} says")
    return Figures(report, {name: torch.from_numpy(array) for name, array in arrays.items()}, classes)


def store(report: Report, evaluation: Evaluation, path: Path) -> None:
    """Write a report, and before it the values of its queries: what a kill leaves has no report, or a whole answer."""
    path.parent.mkdir(exist_ok=True)
    evaluation.save_per_query(path.with_suffix(".npz"))
    report.write(path)
