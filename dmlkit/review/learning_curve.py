"""Whether selected images teach more than random ones: nearest-neighbor accuracy as labels grow, on labeled data."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.metrics.statistics import Comparison, paired_runs
from dmlkit.nearest.search import Gallery
from dmlkit.review.select import Rule, choose
from dmlkit.vectors.points import PointsInMemory, require_one_label
from dmlkit.vectors.progress_bar import Bar, no_bar

ROUNDS, SEEDS = 5, 5  # of labeling, the first one random in any case; and repetitions


class CurvePoint(NamedTuple):
    """Accuracies with one number of labels."""

    labels: int
    selected: float
    random: float
    difference: Comparison
    """Of the seeds: selected - random."""


class LearningCurve(NamedTuple):
    """Accuracies as labels grow, of selected and of random images."""

    points: tuple[CurvePoint, ...]
    difference: Comparison
    """Of the mean over all points but the first, which both have in common."""
    images: int
    held_out: int
    classes: int
    seeds: int

    @property
    def is_separable(self) -> bool:
        """Whether the interval of the difference excludes 0."""
        return self.difference.low > 0 or self.difference.high < 0

    def plain(self) -> dict[str, Any]:
        """Return plain data."""
        points = [{**point._asdict(), "difference": point.difference.as_dict()} for point in self.points]
        return {**self._asdict(), "points": points, "difference": self.difference.as_dict()}


def measure(
    points: PointsInMemory,
    count: int,
    *,
    rule: Rule = "coverage",
    threshold: float | None = None,
    seeds: int = SEEDS,
    bar: Bar = no_bar,
) -> LearningCurve:
    """Compare selection with random choice on images whose labels are known.

    For each seed half of the images are held out, and ``count`` random images of the other half get their label. Then,
    up to `ROUNDS` times in all, ``count`` more of this half get their label: by `choose`, or at random. The accuracy is
    the share of held-out images whose nearest labeled image has their label. The held-out images are the same for both,
    so that images that are hard to label do not leave the measurement by being selected. Intervals are those of
    Student's t for the paired differences of the seeds: they are on these images, not on others.
    """
    codes = points.class_codes()[1]
    known = (codes >= 0).nonzero()[:, 0]
    if count < 1:
        raise UserError(f"-n {count}: expected at least 1 image")
    require_one_label(points)
    if len(codes[known].unique()) < 2:
        raise UserError(f"{points.source}: --measure needs images with at least 2 labels")
    half = len(known) - len(known) // 2
    rounds = min(ROUNDS, (half - 1) // count)  # with all labels there is nothing to choose
    if rounds < 2:
        raise UserError(
            f"-n {count}: half of the {len(known)} labeled images of {points.source} are held out, and the others are "
            f"too few for two rounds; expected at most {(half - 1) // 2}"
        )
    curves: list[list[list[float]]] = [[], []]  # of selected and random images, by seed
    with bar("measuring", 2 * seeds) as advance:
        for seed in range(seeds):
            order = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))]
            for curve, is_random in zip(curves, (False, True), strict=True):
                labels = _labeled(points, order[:half], count, rounds, None if is_random else (rule, threshold))
                accuracies: list[float] = []
                for rows in labels:
                    gallery = Gallery(points.manifold, points.points[rows])
                    near = gallery.search(points.points[order[half:]], 1).indices[:, 0]
                    accuracies.append(float((codes[rows][near] == codes[order[half:]]).double().mean()))
                curve.append(accuracies)
                advance(1)
    curve_points: list[CurvePoint] = []
    for place in range(rounds):
        selected, random = ([one[place] for one in curve] for curve in curves)
        change = paired_runs(random, selected)
        curve_points.append(CurvePoint(count * (place + 1), sum(selected) / seeds, sum(random) / seeds, change))
    selected, random = ([sum(one[1:]) / (rounds - 1) for one in curve] for curve in curves)
    classes = len(codes[known].unique())
    return LearningCurve(
        tuple(curve_points), paired_runs(random, selected), len(known), len(known) - half, classes, seeds
    )


def _labeled(
    points: PointsInMemory, pool: Tensor, count: int, rounds: int, how: tuple[Rule, float | None] | None
) -> list[Tensor]:
    """Return the rows that have a label after each round, by a rule and threshold or at random.

    The pool is in random order. Where all others are near-duplicates, random ones are labeled.
    """
    labeled = [pool[:count]]
    for _ in range(rounds - 1):
        rest = pool[~torch.isin(pool, labeled[-1])]
        chosen = torch.arange(0)
        if how is not None:
            chosen = choose(points.part(labeled[-1]), points.part(rest), count, *how).rows
        others = rest[~torch.isin(torch.arange(len(rest)), chosen)]
        labeled.append(torch.cat([labeled[-1], rest[chosen], others])[: len(labeled[-1]) + count])
    return labeled
