"""The report of an evaluation as a document: metrics, intervals, worst classes, confusions, question, stored forms."""

import hashlib
import json
from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, SerializeAsAny
from torch import Tensor

from dmlkit.datasets.base import Split
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.errors import UserError
from dmlkit.evaluation.by_value import ByColumn, column_table, figures_by_value, read_column
from dmlkit.evaluation.evaluate import CLASS, ClassFigures, ConfusedClasses, Evaluation
from dmlkit.files.arrays import read_arrays
from dmlkit.files.atomic import atomic_write
from dmlkit.files.document import Document
from dmlkit.loading.image_changes import hash_files
from dmlkit.metrics.ranking.codec import RESCORED, Codec, Precision, Stored
from dmlkit.metrics.ranking.rerank import Rerank
from dmlkit.metrics.statistics import Unit, bootstrap_intervals, few_classes_note, holm, paired_differences
from dmlkit.recipe.file import plain
from dmlkit.recipe.schema import Copies, Recipe
from dmlkit.run_folder.folder import CheckpointName
from dmlkit.vectors.manifest import Fusion

LISTED = 10  # classes and confusions in a report


class Question(BaseModel, frozen=True, extra="forbid"):
    """Everything that the metrics of an evaluation depend on."""

    weights: str  # fingerprint of the model
    checkpoint: CheckpointName  # ``pretrained`` is the backbone before training, without the head
    split: Split
    dataset: dict[str, Any]  # dataset of the resolved recipe
    transform: dict[str, Any] | None  # transform of the resolved recipe; null for vectors
    metrics: list[Any]  # names of metrics, or their options where a name is not enough

    @classmethod
    def of(cls, recipe: Recipe, weights: str, checkpoint: str, split: str) -> "Question":
        """Build the question for weights and a recipe's dataset, transform and metrics."""
        resolved = plain(recipe)
        fields = {name: resolved[name] for name in ("dataset", "transform", "metrics")}
        return cls.model_validate({"weights": weights, "checkpoint": checkpoint, "split": split, **fields})

    def key(self) -> str:
        """Return a hash of eight characters that identifies the question."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()[:8]

    def file_name(self, run_question: "Question") -> str:
        """Return the file name of the report without its suffix; only ``run_question``, the run's own, has no hash."""
        name = f"{self.split}-{self.checkpoint}"
        return name if self == run_question else f"{name}-{self.key()}"


class Alternative(BaseModel, frozen=True, extra="forbid"):
    """Metrics of the same queries, re-ranked, with the means of images and mirror images, or by two runs."""

    tta: Copies | None  # copies of which the mean with each image was taken
    fusion: SerializeAsAny[Fusion] | None = None  # second run, or local scores, or place and time
    rerank: str | None  # method of re-ranking
    options: dict[str, float]  # of the method
    metrics: dict[str, float]
    differences: dict[str, dict[str, float | None]]
    """From the plain metric: difference, its 95 % interval ``low`` and ``high`` over classes, ``p_value`` and, after
    Holm's correction for all metrics, ``corrected``; see `paired_comparison`."""


class FormFigures(BaseModel, frozen=True, extra="forbid"):
    """Metrics of the same queries with a stored form of the embeddings."""

    dims: int  # number of first coordinates
    precision: Precision
    bytes: int  # bytes per vector
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float] | None]  # as those of the report
    differences: dict[str, dict[str, float | None]]
    """From the full embeddings: difference, its 95 % interval ``low`` and ``high`` over classes, and ``p_value``."""


class Evidence(BaseModel, frozen=True, extra="forbid"):
    """Share of a retrieval metric that comes from outside of regions of the images, e.g. from backgrounds."""

    metric: str
    regions: str  # table with boxes or masks, or ``center``
    area: float  # mean share of the pixels that is outside
    whole: float  # the metric
    inside: float  # with images that show their regions alone
    outside: float  # with images whose regions are painted over
    chance: float  # without any: all images are equally similar
    share: float | None  # of whole - chance, the outside's, see `dmlkit.look.evidence`; null if that is not positive
    interval: tuple[float, float] | None  # 95 % bootstrap interval over classes; null for fewer than 5 classes


class Report(Document, frozen=True):
    """Result of ``dmlkit eval``."""

    kind: ClassVar[str] = "report of an evaluation"

    source: str  # evaluated run, folder of embeddings, or array
    split: str  # split of the run; ``all`` for a folder or an array
    queries: int  # number of scored queries
    classes: int  # number of classes of the queries, including queries without a positive
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float] | None]  # 95 %, of means over queries; null for fewer than 5 classes
    intervals_by: Unit  # units that the bootstrap draws
    worst_classes: tuple[ClassFigures, ...]  # classes with the lowest values of the last metric, worst first
    confusions: tuple[ConfusedClasses, ...]  # confused pairs of classes, most frequent first
    notes: tuple[str, ...]  # notes for the reader of the metrics
    skipped: tuple[str, ...]  # one message per image that could not be read
    images: str  # hash of the queries: two models can be compared per query if their hashes are equal
    files: str | None = None  # for a run, a hash of the sizes and times of the images' files; null for images in memory
    contents: str | None = None
    """Hash of the contents of these files: for ``pretrained``, and for other checkpoints of a run that has it."""
    epoch: int | None = None  # for a run, the number of finished epochs of the checkpoint
    question: Question | None = None  # for a run, everything that the metrics depend on
    by: ByColumn | None = None  # metrics per value of a column, with ``--by``
    alternative: Alternative | None = None  # metrics with ``--rerank`` or ``--with``
    forms: tuple[FormFigures, ...] | None = None  # metrics of stored forms, with ``--form``
    evidence: Evidence | None = None  # share of a metric that comes from outside the objects, with ``--evidence``

    @classmethod
    def of(
        cls,
        evaluation: Evaluation,
        source: str,
        split: str,
        *,
        epoch: int | None = None,
        question: Question | None = None,
        notes: Sequence[str] = (),
    ) -> "Report":
        """Build the report of an evaluation, with more notes than its own."""
        scores, per_query = evaluation.scores, evaluation.scores.per_query
        intervals = bootstrap_intervals(per_query, evaluation.labels)
        class_note = few_classes_note(len(evaluation.labels.unique())) if per_query else None
        return cls(
            source=source,
            split=split,
            queries=len(scores.queries),
            classes=evaluation.classes,
            metrics=scores.values,
            intervals={name: interval.ends for name, interval in intervals.items()},
            intervals_by="classes",
            worst_classes=tuple(evaluation.worst_classes()[:LISTED] if per_query else ()),
            confusions=tuple(evaluation.confusions()[:LISTED]),
            notes=(*scores.notes, *([class_note] if class_note else []), *notes),
            skipped=tuple(evaluation.faults),
            images=evaluation.fingerprint(),
            epoch=epoch,
            question=question,
        )

    def with_files(self, dataset: Dataset, known: "Report | None" = None, *, contents: bool = True) -> "Report":
        """Return the report with the hashes of the images' files.

        Args:
            known: report whose hash of contents is taken if it is on the same files, instead of reading them all.
            contents: whether the files are read for it otherwise.
        """
        files = hash_files(dataset)
        known_contents = known.contents if known is not None and known.files == files else None
        if known_contents is None and contents:
            known_contents = hash_files(dataset, contents=True)
        return self.model_copy(update={"files": files, "contents": known_contents})

    def has_files_of(self, other: "Report") -> bool:
        """Return whether two reports are on the same files, by their times or contents; unknown ones count as same."""
        if None in (self.files, other.files) or self.files == other.files:
            return True
        return self.contents is not None and self.contents == other.contents

    def with_column(
        self,
        evaluation: Evaluation,
        column: str,
        table: Path | None = None,
        point_values: Sequence[str | None] | None = None,
    ) -> "Report":
        """Return the report with the metrics per value of a column: of each evaluated point, or of a run's dataset."""
        if point_values is not None:
            values = [point_values[row] for row in evaluation.scores.queries.tolist()]
        else:
            source = column_table(column, table, self.question.dataset if self.question else None)
            values = read_column(evaluation.images, source, column)
        by = figures_by_value(evaluation.scores.per_query, evaluation.labels, values, column)
        return self.model_copy(update={"by": by})

    def with_alternative(
        self, evaluation: Evaluation, rerank: Rerank | None, *, copies: Copies | None, fusion: Fusion | None = None
    ) -> "Report":
        """Return the report with the metrics of the alternative, if the evaluation has one."""
        scores = evaluation.alternative
        if scores is None:
            return self
        changes = paired_differences(evaluation.scores.per_query, scores.per_query, evaluation.labels)
        corrected = holm([change.p_value for change in changes.values()])
        alternative = Alternative(
            tta=copies,
            fusion=fusion,
            rerank=None if rerank is None else rerank.name,
            options={} if rerank is None else rerank._asdict(),
            metrics=scores.values,
            differences={
                name: {**change.as_dict(), "corrected": p_value}
                for (name, change), p_value in zip(changes.items(), corrected, strict=True)
            },
        )
        return self.model_copy(update={"alternative": alternative})


ROUNDING = 1e-9  # rounding error of the mean of float64 values in [0, 1], for any order of the sum


class Figures(NamedTuple):
    """Report with the values of each query."""

    report: Report
    per_query: dict[str, Tensor]  # (Q,) values by metric
    classes: Tensor  # (Q,) int64, of the queries


def stored_answer(path: Path, question: Question) -> Figures | None:
    """Read the stored report and values that answer a question; return None if there are none."""
    if not path.exists():
        return None
    report, values = Report.read(path), path.with_suffix(".npz")
    if report.question != question:
        return None
    arrays = read_arrays(values, {**dict.fromkeys(report.intervals, np.float64), CLASS: np.int64}, report.queries)
    classes = torch.from_numpy(arrays.pop(CLASS))
    for name, array in arrays.items():
        if not abs(float(array.mean()) - report.metrics.get(name, nan)) < ROUNDING:
            raise UserError(
                f"{values}: the mean of {name} differs from the value in {path.name}; evaluate again to replace both"
            )
    return Figures(report, {name: torch.from_numpy(array) for name, array in arrays.items()}, classes)


def store(report: Report, evaluation: Evaluation, path: Path) -> None:
    """Write the values of the queries and then the report, so that a report exists only if its values are complete."""
    path.parent.mkdir(parents=True, exist_ok=True)  # a pretrained model has no folder yet
    columns = {**evaluation.scores.per_query, CLASS: evaluation.labels}
    arrays: dict[str, Any] = {name: value.numpy() for name, value in columns.items()}
    with atomic_write(path.with_suffix(".npz")) as partial, partial.open("wb") as file:
        np.savez_compressed(file, **arrays)
    report.write(path)


def with_stored_forms(report: Report, evaluation: Evaluation, wanted: Sequence[Stored]) -> Report:
    """Return a report with the metrics of each stored form, and their paired differences from the full embeddings."""
    if not wanted:
        return report
    rescoring, notes = evaluation.rescoring, [*report.notes]
    forms: list[FormFigures] = []
    for stored in wanted:
        try:
            ranges = rescoring.ranges() if stored.precision == "int8" else rescoring.points
            codec = Codec(rescoring.manifold, stored, ranges)
            scores = rescoring.score(codec)
        except ValueError as error:
            raise UserError(str(error)) from error
        changes = paired_differences(evaluation.scores.per_query, scores.per_query, evaluation.labels)
        intervals = bootstrap_intervals(scores.per_query, evaluation.labels)
        forms.append(
            FormFigures(
                dims=codec.dims,
                precision=stored.precision,
                bytes=codec.bytes,
                metrics=scores.values,
                intervals={name: interval.ends for name, interval in intervals.items()},
                differences={name: change.as_dict() for name, change in changes.items()},
            )
        )
    precisions = {stored.precision for stored in wanted}
    if "int8" in precisions:
        notes.append(f"int8: the ranges of the coordinates are those of {rescoring.ranges_of}")
    if "rescored" in precisions:
        count = len(rescoring.points)
        candidates = f"{RESCORED} candidates of each query"
        candidates += f", which are all {count} images here" if count <= RESCORED + 1 else ""
        notes.append(f"rescored: signs choose {candidates}; the full vectors, kept elsewhere, order them")
    return report.model_copy(update={"forms": tuple(forms), "notes": tuple(notes)})
