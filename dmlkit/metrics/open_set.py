"""Open-set metrics: queries of known classes and of classes without gallery images."""

from dataclasses import dataclass
from math import floor
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, FiniteFloat
from torch import Tensor

from dmlkit.metrics.base import MetricConfig, Points


class AurocUnknownConfig(MetricConfig, frozen=True):
    """AUROC, the probability that a query of a known class scores above one of an unknown class; equal scores half.

    `OpenSet` says which classes are unknown, what is searched, and what the score is.
    """

    name: Literal["auroc_unknown"] = "auroc_unknown"
    unknown_fraction: float = Field(0.5, gt=0, lt=1)
    """Share of the classes, the last of them, that are unknown."""
    key: ClassVar[str] = "auroc_unknown"
    definition: ClassVar[str] = "auroc_unknown: probability that a known query scores above an unknown one"
    searches: ClassVar[bool] = False

    def of_points(self, points: Points) -> dict[str, float]:
        found = OpenSet.of(points, self.unknown_fraction)
        beaten = wins(found.known_scores, found.unknown_scores)
        return {"auroc_unknown": float(beaten.mean()) / len(found.unknown_scores)}


class OscrConfig(MetricConfig, frozen=True):
    """OSCR, the area under the rate of right answers over the false accept rate (Dhamija et al., NeurIPS 2018).

    The threshold goes over all scores. A known query counts where its answer is right and its score reaches the
    threshold, an unknown one is accepted where its score does. So the area is the share of pairs of a known and an
    unknown query in which the known one is answered rightly and scores higher; equal scores half. `OpenSet` says what
    is searched.
    """

    name: Literal["oscr"] = "oscr"
    unknown_fraction: float = Field(0.5, gt=0, lt=1)
    """Share of the classes, the last of them, that are unknown."""
    key: ClassVar[str] = "oscr"
    definition: ClassVar[str] = (
        "oscr: known queries answered rightly and scoring above unknown ones, over all pairs of the two"
    )
    searches: ClassVar[bool] = False

    def of_points(self, points: Points) -> dict[str, float]:
        found = OpenSet.of(points, self.unknown_fraction)
        beaten = wins(found.known_scores, found.unknown_scores) * found.right
        return {"oscr": float(beaten.mean()) / len(found.unknown_scores)}


class BaksConfig(MetricConfig, frozen=True):
    """BAKS, the share of queries of known classes that are accepted and answered rightly, mean over the classes.

    Accepted is a score from the threshold on. It is given: one chosen on these images would flatter. `OpenSet` says
    what is searched.
    """

    name: Literal["baks"] = "baks"
    threshold: Annotated[tuple[FiniteFloat, ...], Field(min_length=1)]
    """Similarities, each a figure; ``dmlkit calibrate`` finds one on validation classes."""
    unknown_fraction: float = Field(0.5, gt=0, lt=1)
    """Share of the classes, the last of them, that are unknown."""
    key: ClassVar[str] = "baks@threshold=x"
    definition: ClassVar[str] = (
        "baks@threshold=x: queries scoring at least x and answered rightly, mean over known classes"
    )
    searches: ClassVar[bool] = False

    def of_points(self, points: Points) -> dict[str, float]:
        found = OpenSet.of(points, self.unknown_fraction)
        return {
            name: class_mean(found.right & (found.known_scores >= threshold), found.known_labels)
            for name, threshold in zip(self.names(), self.threshold, strict=True)
        }


class BausConfig(MetricConfig, frozen=True):
    """BAUS, the share of queries of unknown classes that score less than the threshold, mean over the classes.

    The threshold is given: one chosen on these images would flatter. `OpenSet` says what is searched.
    """

    name: Literal["baus"] = "baus"
    threshold: Annotated[tuple[FiniteFloat, ...], Field(min_length=1)]
    """Similarities, each a figure; ``dmlkit calibrate`` finds one on validation classes."""
    unknown_fraction: float = Field(0.5, gt=0, lt=1)
    """Share of the classes, the last of them, that are unknown."""
    key: ClassVar[str] = "baus@threshold=x"
    definition: ClassVar[str] = "baus@threshold=x: queries scoring less than x, mean over unknown classes"
    searches: ClassVar[bool] = False

    def of_points(self, points: Points) -> dict[str, float]:
        found = OpenSet.of(points, self.unknown_fraction)
        return {
            name: class_mean(found.unknown_scores < threshold, found.unknown_labels)
            for name, threshold in zip(self.names(), self.threshold, strict=True)
        }


BLOCK_ENTRIES = 2**21  # similarities in float64 held at once: 16 MB, and as much for each step of a distance


@dataclass(frozen=True)
class OpenSet:
    """What a search for known and unknown classes found.

    1. Of the C classes, in the order of their labels, the last ``unknown_fraction`` (rounded to the nearest integer,
       at least one and at most C - 1) are unknown; the others are known.
    2. The gallery is the first half of the images of every known class, in the order of the split and rounded up.
       Where the dataset names a gallery, it is what that has of the known classes.
    3. Queries are the other half of the known classes and all images of the unknown ones. Where the dataset names
       queries, they are those; none finds itself.
    4. The score of a query is its largest similarity to the gallery, in float64 rounded to float32, and its answer is
       the class of that image (the first of several).

    Nothing is chosen on these images: a threshold comes from elsewhere.

    Args:
        known_scores: (K,) float32.
        known_labels: (K,) int64.
        right: (K,) bool; the answer is the class of the query.
        unknown_scores: (U,) float32.
        unknown_labels: (U,) int64.
    """

    known_scores: Tensor
    known_labels: Tensor
    right: Tensor
    unknown_scores: Tensor
    unknown_labels: Tensor

    @classmethod
    def of(cls, points: Points, unknown_fraction: float) -> "OpenSet":
        """Search; once for each share of unknown classes.

        Raises:
            ValueError: there is no query of a known class, none of an unknown one, or no gallery.

        Example:
            >>> from dmlkit.manifolds import Euclidean
            >>> line = Points(torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([0, 0, 1]), Euclidean(1))
            >>> found = OpenSet.of(line, 0.5)
            >>> found.known_scores.tolist(), found.unknown_scores.tolist()
            ([-1.0], [-5.0])
        """
        key = cls, unknown_fraction
        if key not in points.found:
            points.found[key] = cls._search(points, unknown_fraction)
        return points.found[key]

    @classmethod
    def _search(cls, points: Points, unknown_fraction: float) -> "OpenSet":
        targets, device = points.targets, points.embeddings.device
        labels = (points.labels if targets is None else targets.point_labels).to(device)
        items = labels if targets is None else targets.labels.to(device)
        classes = torch.cat([labels, items]).unique()
        unknown = min(max(floor(unknown_fraction * len(classes) + 0.5), 1), len(classes) - 1)
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
                f"labels: {len(gallery)} images of known classes to search, {int((~is_unknown).sum())} queries of "
                f"known and {int(is_unknown.sum())} of unknown classes; open-set figures need all three: a known class "
                "with two images, and an unknown one"
            )
        found = points.embeddings if targets is None else targets.embeddings
        scores, nearest = most_similar(
            points, points.embeddings[queries], ids[queries], found[gallery], items_ids[gallery]
        )
        asked = labels[queries]
        right = items[gallery][nearest] == asked
        kept = ~is_unknown
        return cls(scores[kept], asked[kept], right[kept], scores[is_unknown], asked[is_unknown])


def first_half(labels: Tensor) -> Tensor:
    """Which items of (N,) are in the first half of their class, rounded up: (N,) bool.

    Example:
        >>> first_half(torch.tensor([0, 1, 0, 0, 1])).tolist()
        [True, True, True, False, False]
    """
    order = labels.argsort(stable=True)
    sizes = labels[order].unique_consecutive(return_counts=True)[1]
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    place = torch.arange(len(labels), device=labels.device) - starts
    half = torch.zeros_like(labels, dtype=torch.bool)
    half[order] = 2 * place < sizes.repeat_interleave(sizes)
    return half


def most_similar(
    points: Points, queries: Tensor, ids: Tensor, items: Tensor, item_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """The largest similarity of each query (Q, D) to items (M, D) of other ids, and the item: (Q,), (Q,) int64."""
    wide, best, nearest = items.double(), list[Tensor](), list[Tensor]()
    height = max(1, BLOCK_ENTRIES // len(items))
    for rows, own in zip(queries.split(height), ids.split(height), strict=True):
        scores = points.manifold.similarity(rows.double(), wide).float()
        value, place = scores.masked_fill_(own[:, None] == item_ids, -torch.inf).max(1)
        best.append(value)
        nearest.append(place)
    return torch.cat(best), torch.cat(nearest)


def wins(scores: Tensor, others: Tensor) -> Tensor:
    """How many of the others (m,) each score (n,) beats; equal ones count half: (n,) float64.

    Example:
        >>> wins(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 2.0])).tolist()
        [1.0, 1.5]
    """
    ordered = others.sort().values
    return (torch.searchsorted(ordered, scores) + torch.searchsorted(ordered, scores, right=True)).double() / 2


def class_mean(values: Tensor, labels: Tensor) -> float:
    """The mean over classes of the share of their values (n,) bool that are true."""
    _, place, sizes = labels.unique(return_inverse=True, return_counts=True)
    shares = torch.zeros(len(sizes), dtype=torch.float64, device=values.device)
    return float((shares.index_add_(0, place, values.double()) / sizes).mean())
