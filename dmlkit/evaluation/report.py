"""What an evaluation tells: figures, intervals, and which classes fare worst, as a document."""

from math import nan
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, Field
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.evaluation.result import CLASS, Evaluation, confusions
from dmlkit.evaluation.statistics import Unit, bootstrap_intervals, told_few
from dmlkit.files.arrays import read_arrays
from dmlkit.files.document import Document
from dmlkit.run_folder.question import Question

LISTED = 10  # classes and confusions in a report


class ClassFigures(BaseModel, frozen=True, extra="forbid"):
    """The queries of one class."""

    name: str = Field(alias="class")
    queries: int
    metrics: dict[str, float]


class ConfusedClasses(BaseModel, frozen=True, extra="forbid"):
    """Queries of one class whose nearest neighbour is of another."""

    name: str = Field(alias="class")
    taken_for: str
    queries: int
    share: float
    """Of the queries of the class."""


class Report(Document, frozen=True):
    """What ``dmlkit eval`` found."""

    kind: ClassVar[str] = "report of an evaluation"
    version: ClassVar[int] = 3  # 1 told no question, of 2 the intervals were over queries, whose classes it had not

    source: str
    """What was evaluated: a run, a folder of embeddings, or an array."""
    split: str
    """Whose images; ``all`` of a folder or an array."""
    queries: int
    """That were scored."""
    classes: int
    """That were queried, those without a positive included."""
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float] | None]
    """95 % by bootstrap, of the metrics that are means over queries; null where they are of fewer than 5 classes."""
    intervals_by: Unit
    """What the bootstrap draws."""
    worst_classes: tuple[ClassFigures, ...]
    """Worst first, by the last of the metrics."""
    confusions: tuple[ConfusedClasses, ...]
    """Most frequent first."""
    notes: tuple[str, ...]
    """What a reader of the figures must know."""
    skipped: tuple[str, ...]
    """One message per image that could not be read."""
    ties: str
    """How items of the same score counted."""
    images: str
    """A hash of the queries: values of two models can be compared one by one where it is equal."""
    epoch: int | None = None
    """Of a run: finished epochs of the checkpoint."""
    question: Question | None = None
    """Of a run: everything that the figures depend on."""

    @classmethod
    def of(
        cls,
        evaluation: Evaluation,
        source: str,
        split: str,
        *,
        ties: str = "expected",
        epoch: int | None = None,
        question: Question | None = None,
    ) -> "Report":
        """The report of an evaluation."""
        scores, names = evaluation.scores, evaluation.class_names
        per_query = scores.per_query
        confused = confusions(evaluation.labels, evaluation.nearest_labels)[:LISTED] if per_query else []
        intervals = bootstrap_intervals(per_query, evaluation.labels)
        few = told_few(len(evaluation.labels.unique())) if per_query else None
        return cls(
            source=source,
            split=split,
            queries=len(scores.queries),
            classes=evaluation.classes,
            metrics=scores.values,
            intervals={name: interval.ends for name, interval in intervals.items()},
            intervals_by="classes",
            worst_classes=tuple(
                ClassFigures.model_validate(
                    {"class": names[score.label], "queries": score.queries, "metrics": score.metrics}
                )
                for score in (evaluation.class_scores()[:LISTED] if per_query else [])
            ),
            confusions=tuple(
                ConfusedClasses.model_validate(
                    {"class": names[pair.label], "taken_for": names[pair.taken_for]}
                    | {"queries": pair.queries, "share": pair.share}
                )
                for pair in confused
            ),
            notes=(*scores.notes, *([few] if few else [])),
            skipped=tuple(evaluation.faults),
            ties=ties,
            images=evaluation.fingerprint(),
            epoch=epoch,
            question=question,
        )


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
