"""Verification metrics: how well a similarity separates pairs of one class from other pairs."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from dmlkit.metrics.base import MetricConfig, Points
from dmlkit.metrics.pairing import Pairing

Share = Annotated[float, Field(gt=0, lt=1)]


class TarAtFarConfig(MetricConfig, frozen=True):
    """TAR@FAR, the share of the pairs of one class that are accepted where few of two classes are.

    Accepted are the scores from t on, the smallest threshold that at most the share ``far`` of the pairs of different
    classes reaches. Nothing is interpolated: t is one of the scores. Pairs are those of `roc_auc`.
    """

    name: Literal["tar_at_far"] = "tar_at_far"
    far: Annotated[tuple[Share, ...], Field(min_length=1)] = (1e-3,)
    """Shares of the pairs of different classes that may be accepted, each a figure."""
    key: ClassVar[str] = "tar@far=x"
    definition: ClassVar[str] = (
        "tar@far=x: pairs of one class accepted at the lowest threshold that at most a share x of the others reaches"
    )
    searches: ClassVar[bool] = False

    def of_points(self, points: Points) -> dict[str, float]:
        curve = PairCurve.of(points)
        accepted = [0] * len(self.far)
        for band in curve.bands():
            rate = band.reached.double() / curve.different
            for place, far in enumerate(self.far):
                accepted[place] += int(band.count[rate <= far].sum())
        return {name: count / curve.same for name, count in zip(self.names(), accepted, strict=True)}

    def notes(self, points: Points) -> Iterable[str]:
        """Where there are fewer pairs of different classes than one accepted needs."""
        different = PairCurve.of(points).different
        for name, far in zip(self.names(), self.far, strict=True):
            if far * different < 1:
                yield f"{name}: with {different} pairs of different classes, none of them may be accepted"


BAND_SCORES = 2**22  # scores of the same class held at once, with their counts: 120 MB
SORTED_ENTRIES = 2**22  # scores of different classes sorted at once, 3.4 ns each; 1.6 more to look up 130 000 levels


@dataclass(frozen=True)
class Band:
    """The pairs of one class within a range of scores, and how many pairs of different classes score as high.

    Args:
        scores: (n,) float32, distinct, descending.
        count: (n,) int64 >= 1, pairs of one class with that score.
        above: (n,) int64, pairs of different classes that score higher.
        reached: (n,) int64, that score as high or higher.
        before: pairs of one class above the band.
    """

    scores: Tensor
    count: Tensor
    above: Tensor
    reached: Tensor
    before: int


@dataclass(frozen=True)
class PairCurve:
    """The ROC curve over all pairs: a pair is accepted, taken for the same class, where its score reaches a threshold.

    Its points at the scores of the same class say all: between two of them the true accept rate stays.

    Args:
        same: how many pairs are of one class.
        different: how many are of two.
        pairing: the pairs, in which a band is found in one pass over all of them.
        kept: all scores of the same class from the highest on where they are one band, else empty.
    """

    same: int
    different: int
    pairing: Pairing
    kept: list[Band]

    @classmethod
    def of(cls, points: Points) -> "PairCurve":
        """The curve of labelled points; computed once.

        Example:
            >>> from dmlkit.manifolds import Euclidean
            >>> line = Points(torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([0, 0, 1]), Euclidean(1))
            >>> (band,) = PairCurve.of(line).bands()
            >>> band.scores.tolist(), band.reached.tolist()
            ([-1.0], [0])
        """
        if cls not in points.found:
            pairing = Pairing.of(points)
            if pairing.same == 0 or pairing.different == 0:
                raise ValueError(
                    f"labels: {pairing.same} pairs of one class and {pairing.different} of different ones; figures "
                    "over pairs need both"
                )
            kept: list[Band] = []
            if pairing.same <= BAND_SCORES:
                kept = [band_of(pairing, -torch.inf, torch.inf, 0)]
            points.found[cls] = cls(pairing.same, pairing.different, pairing, kept)
        return points.found[cls]

    def bands(self) -> Iterator[Band]:
        """All scores of the same class, from the highest on."""
        yield from self.kept or self._bands()

    def _bands(self) -> Iterator[Band]:
        edges, before = band_edges(self.pairing), 0
        for high, low in pairwise(edges):
            band = band_of(self.pairing, low, high, before)
            before += int(band.count.sum())
            yield band


def band_of(pairing: Pairing, low: float, high: float, before: int) -> Band:
    """The scores of the same class in ``low <= score < high``; of infinite bounds, all."""
    found = [torch.empty(0, device=pairing.rows.device)]
    counts = [torch.empty(0, dtype=torch.int64, device=pairing.rows.device)]
    for block in pairing.same_scores():
        scores = block[(block >= low) & (block < high)]
        if len(scores) < len(block) or len(block) > SORTED_ENTRIES:
            scores, count = scores.unique(return_counts=True)
        else:
            count = torch.ones_like(scores, dtype=torch.int64)
        found.append(scores)
        counts.append(count)
    scores, place = torch.cat(found).unique(return_inverse=True)
    count = torch.zeros_like(scores, dtype=torch.int64).index_add_(0, place, torch.cat(counts))
    del found, counts, place
    above, reached = count_different(pairing, scores)
    return Band(scores.flip(0), count.flip(0), above.flip(0), reached.flip(0), before)


def band_edges(pairing: Pairing) -> list[float]:
    """Bounds of bands of about `BAND_SCORES` scores, from infinity down: by the upper 16 bits of each score."""
    histogram = torch.zeros(2**16, dtype=torch.int64, device=pairing.rows.device)
    for scores in pairing.same_scores():
        bits = (scores + 0.0).view(torch.int32)
        ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> 16  # as the scores are
        histogram += (ordered + 2**15).bincount(minlength=2**16)
    edges, held = [torch.inf], 0
    for place in range(2**16 - 1, -1, -1):
        size = int(histogram[place])
        if held and held + size > BAND_SCORES:
            edges.append(_least(place + 1 - 2**15))
            held = 0
        held += size
    return [*edges, -torch.inf]


def _least(ordered: int) -> float:
    """The least score with these upper 16 bits in their order."""
    bits = torch.tensor(ordered << 16, dtype=torch.int32)
    return float(torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(torch.float32))


def count_different(pairing: Pairing, levels: Tensor) -> tuple[Tensor, Tensor]:
    """How many pairs of different classes score above each level (n,), ascending, and how many reach it."""
    above, reached, lock = (
        torch.zeros_like(levels, dtype=torch.int64),
        torch.zeros_like(levels, dtype=torch.int64),
        Lock(),
    )

    def use(scores: Tensor, _rows: slice, _columns: slice) -> None:
        for piece in scores.flatten().split(SORTED_ENTRIES):
            higher, as_high = count_levels_of_any(piece, levels)
            with lock:
                above.add_(higher)
                reached.add_(as_high)

    pairing.each_block(use)
    return above, reached


def count_levels_of_any(scores: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """How many scores (m,) are above each of the ascending levels (n,), and how many reach it; scores may be sorted.

    Example:
        >>> count_levels_of_any(torch.tensor([2.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, 3.0]))
        (tensor([2, 0, 0]), tensor([3, 2, 0]))
    """
    size = len(scores)
    if scores.device.type != "cpu":
        ordered = scores.sort().values
        return size - torch.searchsorted(ordered, levels, right=True), size - torch.searchsorted(ordered, levels)
    values: Any = scores.numpy()
    values.sort()  # torch's takes five times as long
    wanted: Any = levels.numpy()
    below = values.searchsorted(wanted)
    upto = below.copy()
    tied = values[below.clip(max=size - 1)] == wanted
    upto[tied] = values.searchsorted(wanted[tied], "right")
    return torch.from_numpy(size - upto), torch.from_numpy(size - below)


class EerConfig(MetricConfig, frozen=True):
    """EER, the false accept rate where it equals the false reject rate, over the pairs of `roc_auc`; less is better.

    Between two thresholds both rates go along straight lines: the figure is where the ROC curve, drawn through its
    points at all distinct scores, meets the diagonal TAR = 1 - FAR.
    """

    name: Literal["eer"] = "eer"
    key: ClassVar[str] = "eer"
    definition: ClassVar[str] = (
        "eer: false accept rate where it equals the false reject rate, over all pairs; less is better"
    )
    searches: ClassVar[bool] = False
    smaller_is_better: ClassVar[bool] = True

    def of_points(self, points: Points) -> dict[str, float]:
        return {"eer": equal_error_rate(PairCurve.of(points))}


def equal_error_rate(curve: PairCurve) -> float:
    """Where the curve meets the diagonal TAR = 1 - FAR: the false accept rate there."""
    for band in curve.bands():
        hits = band.before + band.count.cumsum(0)
        tar, far = hits.double() / curve.same, band.reached.double() / curve.different
        passed = (tar + far >= 1).nonzero()
        if len(passed):
            place = int(passed[0])
            first_tar = float(hits[place] - band.count[place]) / curve.same
            first_far = float(band.above[place]) / curve.different
            if first_tar + first_far >= 1:  # before this score, on the way along which the TAR stays
                return 1 - first_tar
            wide, high = float(far[place]) - first_far, float(tar[place]) - first_tar
            return first_far + wide * (1 - first_tar - first_far) / (wide + high)
    raise AssertionError  # the last point has TAR 1


class RocAucConfig(MetricConfig, frozen=True):
    """ROC-AUC, the probability that a pair of one class scores higher than a pair of two; equal scores count half.

    All pairs count, each unordered one once; with queries and a gallery, every query with every item but itself.
    """

    name: Literal["roc_auc"] = "roc_auc"
    key: ClassVar[str] = "roc_auc"
    definition: ClassVar[str] = "roc_auc: probability that a pair of one class scores above a pair of two; ties half"
    searches: ClassVar[bool] = False

    def of_points(self, points: Points) -> dict[str, float]:
        return {"roc_auc": area(PairCurve.of(points))}


def area(curve: PairCurve) -> float:
    """The area under the curve, in integers up to the last division."""
    twice = sum(int((band.count * (2 * curve.different - band.above - band.reached)).sum()) for band in curve.bands())
    return twice / (2 * curve.same * curve.different)
