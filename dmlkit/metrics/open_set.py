"""Open-set metrics: how well scores separate queries of known classes from those of classes outside the gallery."""

from abc import abstractmethod
from dataclasses import dataclass
from math import floor
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, FiniteFloat
from torch import Tensor

from dmlkit.metrics.base import MetricConfig, Points

Thresholds = Annotated[tuple[FiniteFloat, ...], Field(min_length=1)]


class OpenSetConfig(MetricConfig, frozen=True, abstract=True):
    """Base of metrics of an `OpenSet`, which defines the unknown classes, the gallery, and the score."""

    unknown_fraction: float = Field(0.5, gt=0, lt=1)
    """Share of the classes that count as unknown: the last ones in the order of their labels."""
    searches: ClassVar[bool] = False

    def of_points(self, points: Points) -> dict[str, float]:
        return dict(zip(self.names(), self.of_search(OpenSet.of(points, self.unknown_fraction)), strict=True))

    @abstractmethod
    def of_search(self, open_set: "OpenSet") -> list[float]:
        """Compute the values in the order of `names`."""


class AurocUnknownConfig(OpenSetConfig, frozen=True):
    """AUROC, the probability that a query of a known class scores above one of an unknown class; ties count half."""

    name: Literal["auroc_unknown"] = "auroc_unknown"
    definition: ClassVar[str] = "auroc_unknown: probability that a known query scores above an unknown one"

    def of_search(self, open_set: "OpenSet") -> list[float]:
        beaten = wins(open_set.known_scores, open_set.unknown_scores)
        return [float(beaten.mean()) / len(open_set.unknown_scores)]


class OscrConfig(OpenSetConfig, frozen=True):
    """OSCR, the area under the rate of correct answers over the false accept rate (Dhamija et al., NeurIPS 2018).

    The threshold takes all scores as values. A known query counts if its answer is correct and its score reaches the
    threshold; an unknown query is accepted if its score reaches it. So the area is the share of pairs of a known and an
    unknown query in which the known one has a correct answer and a higher score; ties count half.
    """

    name: Literal["oscr"] = "oscr"
    definition: ClassVar[str] = (
        "oscr: known queries answered rightly and scoring above unknown ones, over all pairs of the two"
    )

    def of_search(self, open_set: "OpenSet") -> list[float]:
        beaten = wins(open_set.known_scores, open_set.unknown_scores) * open_set.right
        return [float(beaten.mean()) / len(open_set.unknown_scores)]


class BaksConfig(OpenSetConfig, frozen=True):
    """BAKS, the share of queries of known classes that are accepted and answered correctly, averaged over the classes.

    A query is accepted if its score is at least the threshold. The threshold is an option, because one chosen on these
    images would be too optimistic.
    """

    name: Literal["baks"] = "baks"
    threshold: Thresholds
    """Similarity thresholds; each gives one metric. ``dmlkit calibrate`` chooses one on validation classes."""
    key: ClassVar[str] = "baks@threshold=x"
    definition: ClassVar[str] = (
        "baks@threshold=x: queries scoring at least x and answered rightly, mean over known classes"
    )

    def of_search(self, open_set: "OpenSet") -> list[float]:
        right, labels = open_set.right, open_set.known_labels
        return [class_mean(right & (open_set.known_scores >= threshold), labels) for threshold in self.threshold]


class BausConfig(OpenSetConfig, frozen=True):
    """BAUS, the share of queries of unknown classes that score less than the threshold, averaged over the classes.

    The threshold is an option, because one chosen on these images would be too optimistic.
    """

    name: Literal["baus"] = "baus"
    threshold: Thresholds
    """Similarity thresholds; each gives one metric. ``dmlkit calibrate`` chooses one on validation classes."""
    key: ClassVar[str] = "baus@threshold=x"
    definition: ClassVar[str] = "baus@threshold=x: queries scoring less than x, mean over unknown classes"

    def of_search(self, open_set: "OpenSet") -> list[float]:
        scores, labels = open_set.unknown_scores, open_set.unknown_labels
        return [class_mean(scores < threshold, labels) for threshold in self.threshold]


BLOCK_ENTRIES = 2**21  # similarities in float64 held at once: 16 MB, and as much for each temporary of a distance


@dataclass(frozen=True)
class OpenSet:
    """Result of a search with queries of known and unknown classes.

    1. Of the C classes, in the order of their labels, the last ``unknown_fraction`` (rounded to the nearest integer,
       at least one and at most C - 1) are unknown; the others are known.
    2. The gallery is the first half, rounded up, of the images of every known class in the order of the split. If the
       dataset has a gallery, it is the images of known classes in that gallery.
    3. The queries are the other half of the known classes and all images of the unknown classes. If the dataset has
       queries, it is those. No query finds itself.
    4. The score of a query is its largest similarity to the gallery, in float64 rounded to float32, and its answer is
       the class of that image (the first of several).

    No threshold is chosen on these images.
    """

    known_scores: Tensor  # (K,) float32
    known_labels: Tensor  # (K,) int64
    right: Tensor  # (K,) bool; whether the answer is the class of the query
    unknown_scores: Tensor  # (U,) float32
    unknown_labels: Tensor  # (U,) int64

    @classmethod
    def of(cls, points: Points, unknown_fraction: float) -> "OpenSet":
        """Search with points; the result is cached for each share of unknown classes."""
        key = cls, unknown_fraction
        if key not in points.shared:
            points.shared[key] = cls._search(points, unknown_fraction)
        return points.shared[key]

    @classmethod
    def _search(cls, points: Points, unknown_fraction: float) -> "OpenSet":
        targets, device = points.targets, points.embeddings.device
        labels = (points.labels if targets is None else targets.point_labels).to(device)
        items = labels if targets is None else targets.labels.to(device)
        classes = torch.cat([labels, items]).unique()
        unknown = max(min(floor(unknown_fraction * len(classes) + 0.5), len(classes) - 1), 1)
        first_unknown = classes[len(classes) - unknown]
        if targets is None:
            enrolled = first_half(labels) & (labels < first_unknown)
            queries, gallery = (~enrolled).nonzero()[:, 0], enrolled.nonzero()[:, 0]
            ids = items_ids = torch.arange(len(labels), device=device)
        else:
            queries, gallery = torch.arange(len(labels), device=device), (items < first_unknown).nonzero()[:, 0]
            ids, items_ids = targets.point_ids.to(device), targets.ids.to(device)
        is_unknown = labels[queries] >= first_unknown
        if len(gallery) == 0 or is_unknown.all() or not is_unknown.any():
            raise ValueError(
                f"labels: got {len(gallery)} gallery images of known classes, {int((~is_unknown).sum())} queries of "
                f"known and {int(is_unknown.sum())} of unknown classes; open-set metrics need all three: at least one "
                "known class with two images, and one unknown class"
            )
        gallery_points = (points.embeddings if targets is None else targets.embeddings)[gallery].double()
        best: list[tuple[Tensor, Tensor]] = []
        for rows in queries.split(max(1, BLOCK_ENTRIES // len(gallery))):
            similarities = points.manifold.similarity(points.embeddings[rows].double(), gallery_points).float()
            best.append(similarities.masked_fill_(ids[rows, None] == items_ids[gallery], -torch.inf).max(1))
        scores, nearest = (torch.cat(column) for column in zip(*best, strict=True))
        query_labels = labels[queries]
        right = items[gallery][nearest] == query_labels
        is_known = ~is_unknown
        return cls(
            scores[is_known], query_labels[is_known], right[is_known], scores[is_unknown], query_labels[is_unknown]
        )


def first_half(labels: Tensor) -> Tensor:
    """Return which items of (N,) are in the first half of their class, rounded up, (N,) bool."""
    order = labels.argsort(stable=True)
    sizes = labels[order].unique_consecutive(return_counts=True)[1]
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    position = torch.arange(len(labels), device=labels.device) - starts
    half = torch.zeros_like(labels, dtype=torch.bool)
    half[order] = 2 * position < sizes.repeat_interleave(sizes)
    return half


def wins(scores: Tensor, others: Tensor) -> Tensor:
    """Count how many of the others (m,) are below each score (n,); equal scores count half, (n,) float64."""
    ordered = others.sort().values
    return (torch.searchsorted(ordered, scores) + torch.searchsorted(ordered, scores, right=True)).double() / 2


def class_mean(values: Tensor, labels: Tensor) -> float:
    """Compute the share of true values (n,) bool in each class, averaged over the classes."""
    _, codes, sizes = labels.unique(return_inverse=True, return_counts=True)
    shares = torch.zeros(len(sizes), dtype=torch.float64, device=values.device)
    return float((shares.index_add_(0, codes, values.double()) / sizes).mean())
