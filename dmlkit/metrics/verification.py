"""Verification metrics (TAR@FAR, EER, ROC-AUC): how well scores separate pairs of one class from other pairs.

The metrics come first, then the ROC curve over all pairs from which they are computed, in bounded memory.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context
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
    """TAR@FAR, the share of pairs of one class that are accepted at a given false accept rate.

    A pair is accepted if its score is at least t, the smallest score that at most a share ``far`` of the pairs of
    different classes reaches. There is no interpolation. Pairs are those of `roc_auc`.
    """

    name: Literal["tar_at_far"] = "tar_at_far"
    far: Annotated[tuple[Share, ...], Field(min_length=1)] = (1e-3,)
    """False accept rates: maximum shares of the pairs of different classes that are accepted. Each gives one metric."""
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
            for index, far in enumerate(self.far):
                accepted[index] += int(band.count[rate <= far].sum())
        return {name: count / curve.same for name, count in zip(self.names(), accepted, strict=True)}

    def notes(self, points: Points) -> Iterable[str]:
        """Return a note for each false accept rate at which not even one pair of different classes may be accepted."""
        different = PairCurve.of(points).different
        for name, far in zip(self.names(), self.far, strict=True):
            if far * different < 1:
                yield f"{name}: at this rate none of the {different} pairs of different classes may be accepted"


class EerConfig(MetricConfig, frozen=True):
    """EER, the false accept rate where it equals the false reject rate, over the pairs of `roc_auc`; less is better.

    Between two thresholds both rates are interpolated linearly: the value is the point where the ROC curve, drawn
    through its points at all distinct scores, meets the line TAR = 1 - FAR.
    """

    name: Literal["eer"] = "eer"
    definition: ClassVar[str] = (
        "eer: false accept rate where it equals the false reject rate, over all pairs; less is better"
    )
    searches: ClassVar[bool] = False
    smaller_is_better: ClassVar[bool] = True

    def of_points(self, points: Points) -> dict[str, float]:
        curve = PairCurve.of(points)
        for band in curve.bands():
            hits = band.before + band.count.cumsum(0)
            tar, far = hits.double() / curve.same, band.reached.double() / curve.different
            passed = (tar + far >= 1).nonzero()
            if len(passed):
                crossing = int(passed[0])
                first_tar = float(hits[crossing] - band.count[crossing]) / curve.same
                first_far = float(band.above[crossing]) / curve.different
                if first_tar + first_far >= 1:  # before this score, where the TAR is constant
                    return {"eer": 1 - first_tar}
                width, height = float(far[crossing]) - first_far, float(tar[crossing]) - first_tar
                return {"eer": first_far + width * (1 - first_tar - first_far) / (width + height)}
        raise AssertionError  # the last point has TAR 1


class RocAucConfig(MetricConfig, frozen=True):
    """ROC-AUC, the probability that a pair of one class scores above a pair of different classes; ties count half.

    Every unordered pair counts once; with queries and a gallery, the pairs are every query with every item but itself.
    """

    name: Literal["roc_auc"] = "roc_auc"
    definition: ClassVar[str] = "roc_auc: probability that a pair of one class scores above any other; ties count half"
    searches: ClassVar[bool] = False

    def of_points(self, points: Points) -> dict[str, float]:
        curve = PairCurve.of(points)  # with integers up to the last division
        beaten = (band.count * (2 * curve.different - band.above - band.reached) for band in curve.bands())
        return {"roc_auc": sum(int(twice.sum()) for twice in beaten) / (2 * curve.same * curve.different)}


BAND_SCORES = 2**22  # scores of the same class in memory at once, with their counts: 120 MB
SORTED_ENTRIES = 2**22  # scores of different classes sorted at once: 3.4 ns each, and 1.6 to look up 130 000 levels


@dataclass(frozen=True)
class Band:
    """Pairs of the same class within a range of scores, and how many pairs of different classes score as high."""

    scores: Tensor  # (n,) float32, distinct, descending
    count: Tensor  # (n,) int64 >= 1, number of pairs of the same class with each score
    above: Tensor  # (n,) int64, number of pairs of different classes that score higher
    reached: Tensor  # (n,) int64, number of pairs of different classes that score as high or higher
    before: int  # number of pairs of the same class above the band


@dataclass(frozen=True)
class PairCurve:
    """ROC curve over all pairs. A pair is accepted as the same class if its score reaches the threshold.

    Its points at the scores of pairs of the same class determine the curve: between two of them the true accept rate
    is constant.
    """

    same: int  # number of pairs of the same class
    different: int  # number of pairs of different classes
    pairing: Pairing
    kept: list[Band]  # the only band if all scores fit into one; if empty, `bands` passes over all pairs once per band

    @classmethod
    def of(cls, points: Points) -> "PairCurve":
        """Build the curve of labeled points; the result is cached."""
        if cls not in points.shared:
            pairing = Pairing.of(points)
            if pairing.same == 0 or pairing.different == 0:
                raise ValueError(
                    f"labels: got {pairing.same} pairs of one class and {pairing.different} of different classes; "
                    "metrics over pairs need both"
                )
            bands: list[Band] = []
            if pairing.same <= BAND_SCORES:
                bands = [band_of(pairing, -torch.inf, torch.inf, 0)]
            points.shared[cls] = cls(pairing.same, pairing.different, pairing, bands)
        return points.shared[cls]

    def bands(self) -> Iterator[Band]:
        """Yield all scores of the same class in bands, from the highest on."""
        if self.kept:
            yield from self.kept
            return
        before = 0
        for high, low in pairwise(band_edges(self.pairing)):
            band = band_of(self.pairing, low, high, before)
            before += int(band.count.sum())
            yield band


def band_of(pairing: Pairing, low: float, high: float, before: int) -> Band:
    """Build the band of the scores of the same class in ``low <= score < high``."""
    block_scores = [torch.empty(0, device=pairing.rows.device)]
    counts = [torch.empty(0, dtype=torch.int64, device=pairing.rows.device)]
    for block in pairing.same_scores():
        scores = block[(block >= low) & (block < high)]
        if len(scores) < len(block) or len(block) > SORTED_ENTRIES:
            scores, count = scores.unique(return_counts=True)
        else:
            count = torch.ones_like(scores, dtype=torch.int64)
        block_scores.append(scores)
        counts.append(count)
    scores, index = torch.cat(block_scores).unique(return_inverse=True)
    count = torch.zeros_like(scores, dtype=torch.int64).index_add_(0, index, torch.cat(counts))
    del block_scores, counts, index
    above, reached = count_different(pairing, scores)
    return Band(scores.flip(0), count.flip(0), above.flip(0), reached.flip(0), before)


def band_edges(pairing: Pairing) -> list[float]:
    """Compute bounds of bands of about `BAND_SCORES` scores, descending, from a histogram of their upper 16 bits."""
    histogram = torch.zeros(2**16, dtype=torch.int64, device=pairing.rows.device)
    for scores in pairing.same_scores():
        bits = (scores + 0.0).view(torch.int32)
        ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> 16  # in the order of the scores
        histogram += (ordered + 2**15).bincount(minlength=2**16)
    edges, total = [torch.inf], 0
    for bucket in range(2**16 - 1, -1, -1):
        size = int(histogram[bucket])
        if total and total + size > BAND_SCORES:
            bits = torch.tensor((bucket + 1 - 2**15) << 16, dtype=torch.int32)  # of the least score of this bucket
            edges.append(float(torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(torch.float32)))
            total = 0
        total += size
    return [*edges, -torch.inf]


def count_different(pairing: Pairing, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Count how many pairs of different classes score above each ascending level (n,), and how many reach it."""
    above, reached = (torch.zeros_like(levels, dtype=torch.int64) for _ in range(2))
    lock = Lock()

    def use(scores: Tensor, _rows: slice, _columns: slice) -> None:
        for piece in scores.flatten().split(SORTED_ENTRIES):
            higher, as_high = count_levels_of_any(piece, levels)
            with lock:
                above.add_(higher)
                reached.add_(as_high)

    pairing.each_block(use)
    return above, reached


def count_levels_of_any(scores: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Count how many scores (m,) are above each of the ascending levels (n,), and how many reach it.

    The scores may be sorted in place.
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


def lowest_share(least: int, count: int) -> float:
    """Return the smallest share of ``count`` with at least ``least`` of them, rounded up to two digits; at most 1.

    Example:
        >>> lowest_share(10, 864), lowest_share(5, 324), lowest_share(10, 3)
        (0.012, 0.016, 1.0)
    """
    return float(Context(prec=2, rounding=ROUND_CEILING).divide(least, max(least, count)))
