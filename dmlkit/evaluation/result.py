"""What an evaluation found, and how it is told: figures, intervals, and which classes fare worst."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dmlkit.embedding.trained import TrainedModel
from dmlkit.errors import UserError
from dmlkit.evaluation.breakdown import ClassScore, class_scores, confusions
from dmlkit.evaluation.significance import bootstrap_intervals
from dmlkit.files.atomic import atomic_write, write_json
from dmlkit.metrics.scoring.retrieval import Scores

LISTED = 10  # classes and confusions in a report


@dataclass(frozen=True)
class Evaluation:
    """Scores with what the queries are.

    Args:
        scores: of Q queries.
        labels: (Q,) int64, indices of ``class_names``.
        nearest_labels: (Q,) int64, of their nearest neighbours.
        class_names: C names.
        images: Q names that tell the queries apart.
        classes: how many classes were queried, those without a positive included.
        faults: one message per image that could not be read.
    """

    scores: Scores
    labels: Tensor
    nearest_labels: Tensor
    class_names: Sequence[str]
    images: Sequence[str]
    classes: int
    faults: list[str]

    def figures(self, split: str) -> dict[str, Any]:
        """The metrics, and what they were measured on."""
        return {
            "metrics": self.scores.values,
            "split": split,
            "queries": len(self.scores.queries),
            "classes": self.classes,
            "notes": list(self.scores.notes),
            "skipped": self.faults,
        }

    def details(self) -> dict[str, Any]:
        """95 % intervals over queries, the worst classes and the most frequent confusions."""
        found: dict[str, Any] = {"intervals": {}, "worst_classes": [], "confusions": []}
        if self.scores.per_query:
            intervals = bootstrap_intervals(self.scores.per_query)
            found["intervals"] = {name: [interval.low, interval.high] for name, interval in intervals.items()}
            found["worst_classes"] = [self._named(score) for score in self.class_scores()[:LISTED]]
            found["confusions"] = [
                {"class": self.class_names[pair.label], "taken_for": self.class_names[pair.taken_for]}
                | {"queries": pair.queries, "share": pair.share}
                for pair in confusions(self.labels, self.nearest_labels)[:LISTED]
            ]
        return found

    def class_scores(self) -> list[ClassScore]:
        """Every class, worst first by the last of the metrics."""
        return class_scores(self.scores.per_query, self.labels, by=list(self.scores.per_query)[-1])

    def _named(self, score: ClassScore) -> dict[str, Any]:
        return {"class": self.class_names[score.label], "queries": score.queries, "metrics": score.metrics}

    def fingerprint(self) -> str:
        """A hash of the queries: values of two models can be compared one by one where it is equal."""
        labels = [self.class_names[label] for label in self.labels.tolist()]
        lines = (f"{image}\0{label}\n" for image, label in zip(self.images, labels, strict=True))
        return sha256("".join(lines).encode()).hexdigest()

    def save_per_query(self, path: Path) -> None:
        """Write the values of every query, one array a metric."""
        with atomic_write(path) as partial, partial.open("wb") as file:
            arrays: dict[str, Any] = {name: value.numpy() for name, value in self.scores.per_query.items()}
            np.savez_compressed(file, **arrays)

    def save_classes(self, path: Path) -> None:
        """Write a CSV table of every class, worst first.

        Raises:
            UserError: no metric is made of queries, or the folder is missing.
        """
        import csv

        if not self.scores.per_query:
            raise UserError("--per-class: none of the metrics is made of single queries")
        if not path.parent.is_dir():
            raise UserError(f"--per-class {path}: no such folder {path.parent}")
        with atomic_write(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["class", "queries", *self.scores.per_query])
            for score in self.class_scores():
                writer.writerow([self.class_names[score.label], score.queries, *score.metrics.values()])


def save_evaluation(
    target: Path,
    evaluation: Evaluation,
    trained: TrainedModel,
    split: str,
    dataset: dict[str, Any],
    *,
    ties: str = "expected",
) -> dict[str, Any]:
    """Write the report of an evaluation and the values of its queries; returns the report."""
    report = {
        **evaluation.figures(split),
        **evaluation.details(),
        "ties": ties,
        "checkpoint": trained.checkpoint,
        "epoch": trained.epoch,
        "model": trained.model.fingerprint(),
        "images": evaluation.fingerprint(),
        "dataset": dataset,
    }
    target.parent.mkdir(exist_ok=True)
    evaluation.save_per_query(target.with_suffix(".npz"))
    write_json(target, report)
    return report
