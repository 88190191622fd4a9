"""Which images to label next, and whether they teach more than random ones, on labeled data.

Those are chosen that resemble many unlabeled images and no labeled one.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.files.outputs import write_table
from dmlkit.gallery.sources import check_same_model
from dmlkit.identify.answers import Decision
from dmlkit.identify.decisions import BLOCK_ROWS, Decider
from dmlkit.manifolds.base import Manifold, frechet_mean
from dmlkit.metrics.statistics import Comparison, paired_runs
from dmlkit.nearest.near_pairs import check_reachable
from dmlkit.nearest.search import CACHED_ELEMENTS, Gallery
from dmlkit.vectors.points import PointsInMemory, require_one_label
from dmlkit.vectors.progress_bar import Bar, no_bar

Rule = Literal["coverage", "k_center"]
COVERED = 4096  # unlabeled images, drawn at random from more, whose distances to the labeled ones are to shrink
TRIED = 64  # candidates whose gain is computed at once: 1 MB of similarities
SAME = 1e-6  # relative; the cosine of equal float32 vectors is off by up to 4e-7


@dataclass(frozen=True)
class ChosenImages:
    """Images to label next, the most informative first."""

    images: PointsInMemory
    rows: Tensor  # (n,) int64, the chosen ones
    guesses: list[str | None]  # label of the nearest labeled image of each chosen one; None if there are no labels
    similarities: Tensor  # (n,) to that image
    margins: Tensor  # (n,) the same less the similarity to the nearest image with another label; nan without one
    scores: Tensor  # (n,) see `select`
    threshold: float  # similarity from which images count as near-duplicates
    duplicates: int  # images left out because a labeled or chosen one is a near-duplicate
    skipped: list[str]  # one message per image, labeled or not, that could not be read

    def write(self, path: Path) -> None:
        """Write a CSV table with the columns ``path`` and an empty ``label``, as `dmlkit train` reads it, and more.

        The last columns are the boxes of the images, if some have one. An earlier table is kept, see `write_table`.
        """
        chosen, rows = list(self.chosen()), list[list[str]]()
        for item in chosen:
            numbers = ("" if item[name] is None else f"{item[name]:.9g}" for name in ("similarity", "margin", "score"))
            rows.append([item["path"], "", item["guess"] or "", *numbers])
        columns = ("path", "label", "guess", "similarity", "margin", "score")
        write_table(path, columns, rows, [item["box"] for item in chosen], is_data=True, keeps_old=True)

    def chosen(self) -> Iterator[dict[str, Any]]:
        """Yield path, box, guess, similarity, margin and score of each chosen image, None where there is none."""
        columns = {"similarity": self.similarities, "margin": self.margins, "score": self.scores}
        for index, row in enumerate(map(int, self.rows)):
            path, box = self.images.paths[row], self.images.boxes[row]
            yield {
                "path": os.path.abspath(path) if os.path.exists(path) else path,  # noqa: PTH100, PTH110 - links stay
                "box": None if box is None else list(box[:4]),
                "guess": self.guesses[index],
                **{
                    name: float(values[index]) if values[index].isfinite() else None for name, values in columns.items()
                },
            }

    def plain(self) -> dict[str, Any]:
        return {
            "threshold": self.threshold,
            "images": list(self.chosen()),
            "unlabeled": len(self.images),
            "duplicates": self.duplicates,
            "skipped": self.skipped,
        }


def select(
    source: PointsInMemory,
    images: PointsInMemory | None = None,
    *,
    count: int,
    rule: Rule = "coverage",
    threshold: float | None = None,
    bar: Bar = no_bar,
) -> ChosenImages:
    r"""Choose images to label next, one after the other, as if the label of those before were known.

    With centers C, at first the labeled images, the next one is

    .. math:: \arg\max_x \sum_y w_y (d(y, C) - d(y, C \cup \{x\})) \quad \text{(coverage)}, \qquad
        \arg\max_x w_x d(x, C) \quad \text{(k_center)},

    where y are the unlabeled images, at most `COVERED` of them, d(y, C) is the dissimilarity to the nearest center (1
    minus a cosine, or a distance), and w the uncertainty: the dissimilarity to the nearest labeled image, divided by
    that to the nearest with another label, in [0, 1]; 1 if there are not two labels. With w = 1, k_center is the greedy
    2-approximation of the smallest largest distance (Gonzalez 1985; Sener & Savarese, ICLR 2018, algorithm 1), and
    coverage the greedy (1 - 1/e)-approximation of the smallest mean distance (Nemhauser et al. 1978; Wei et al., ICML
    2015), which outliers do not attract. Near-duplicates of centers are not chosen. Without labels, the first image is
    the one nearest to the mean.

    Args:
        source: points, of which those with a label are the labeled images.
        images: unlabeled images of the same model; what labels they have is not used. Default: the points of
            ``source`` without a label.
        count: number of images to choose; there are fewer if the others are near-duplicates.
        threshold: least similarity of near-duplicates, see `dmlkit duplicates`. Default: that of equal images; other
            near-duplicates have small scores.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> line = torch.tensor([[0.0], [0.1], [5.0], [5.1], [5.2], [9.0]])
        >>> points = PointsInMemory("line", Euclidean(1), line, list("uvwxyz"), ["a", *[None] * 5])
        >>> select(points, count=2).rows  # the middle of three, and the outlier; rows of the unlabeled images
        tensor([2, 4])
        >>> select(points, count=2, rule="k_center").rows
        tensor([4, 1])
    """
    if count < 1:
        raise UserError(f"-n {count}: expected at least 1 image")
    require_one_label(source)
    is_known = source.class_codes()[1] >= 0
    if images is None:
        images = source.part((~is_known).nonzero()[:, 0])
        if not len(images):
            raise UserError(
                f"{source.source}: every image has a label; name the unlabeled IMAGES, or embed with --labels none"
            )
    else:
        check_same_model(images, source)
        if not is_known.any():
            raise UserError(
                f"{source.source}: no image has a label; leave out {images.source} to choose among its own images"
            )
    return choose(source.part(is_known.nonzero()[:, 0]), images, count, rule, threshold, bar)


def choose(
    labeled: PointsInMemory, images: PointsInMemory, count: int, rule: Rule, threshold: float | None, bar: Bar = no_bar
) -> ChosenImages:
    """Choose at least one of unlabeled images, see `select`; there may be no labeled one."""
    if threshold is not None:
        check_reachable(images.manifold, threshold)
    names, codes = labeled.class_codes()
    guesses: list[str | None] = [None] * len(images)
    nearest, margins = torch.full((len(images),), -torch.inf), torch.full((len(images),), torch.nan)
    if names:
        decider = Decider(labeled, codes.numpy(), "nearest")
        decisions = list[Decision]()
        with bar("comparing", len(images)) as advance:
            for block in images.blocks(BLOCK_ROWS):
                decisions += decider.decide(block)
                advance(len(block))
        guesses = [names[decision.code] for decision in decisions]
        nearest = torch.tensor([decision.score for decision in decisions])
        margins = torch.tensor([torch.nan if decision.margin is None else decision.margin for decision in decisions])
    all_points = torch.cat([labeled.points, images.points])
    origin = float(images.manifold.paired_similarity(all_points, all_points).max())
    equal = origin - SAME * max(1.0, abs(origin))
    near_threshold = equal if threshold is None else min(threshold, equal)
    pool = Pool(images.manifold, images.points, nearest, margins, origin, near_threshold)
    greedy, rows, scores = k_center if rule == "k_center" else coverage, list[int](), list[float]()
    with bar("choosing", min(count, len(images))) as advance:
        for row, score in greedy(pool, min(count, len(images))):
            rows.append(row)
            scores.append(score)
            advance(1)
    return ChosenImages(
        images=images,
        rows=torch.tensor(rows, dtype=torch.int64),
        guesses=[guesses[row] for row in rows],
        similarities=nearest[rows],
        margins=margins[rows],
        scores=torch.tensor(scores),
        threshold=near_threshold,
        duplicates=int(pool.is_near().sum()) - len(rows),
        skipped=[*dict.fromkeys((*labeled.skipped, *images.skipped))],  # both may be of one source
    )


class Pool:
    """Unlabeled points, and how similar each is to the nearest center, labeled or chosen.

    Args:
        nearest: (N,) similarity to the nearest labeled point; -inf if there is none.
        margins: (N,) the same less that to the nearest point with another label; nan if there is none.
        origin: similarity that counts as no dissimilarity: the largest of a point to itself.
        threshold: similarity to a center from which a point is not chosen.

    Attributes:
        weights: (N,) uncertainty, see `select`.
    """

    def __init__(
        self, manifold: Manifold, points: Tensor, nearest: Tensor, margins: Tensor, origin: float, threshold: float
    ) -> None:
        self.manifold, self.points, self.nearest = manifold, points, nearest.clone()
        self.origin, self.threshold = origin, threshold
        distance = self.distance()
        self.weights = torch.where(distance + margins > 0, distance / (distance + margins), 1.0)

    def distance(self) -> Tensor:
        """Return the dissimilarity (N,) to the nearest center."""
        return (self.origin - self.nearest).clamp(min=0)

    def is_near(self) -> Tensor:
        """Return whether points, (N,) bool, are centers, or as similar to one as the threshold."""
        return self.nearest >= self.threshold

    def add(self, row: int) -> None:
        """Make a point a center."""
        self.nearest = self.nearest.maximum(self._similarity(self.points[row]))
        self.nearest[row] = torch.inf

    def central(self) -> int:
        """Return the row of the point nearest to the mean."""
        mean = frechet_mean(self.manifold, self.points).to(self.points.dtype)
        return int(self._similarity(mean).argmax())

    def _similarity(self, point: Tensor) -> Tensor:
        """Return how similar each point is to one (D,): (N,)."""
        blocks = self.points.split(max(1, CACHED_ELEMENTS // len(point)))
        return torch.cat([self.manifold.paired_similarity(block, point) for block in blocks])


@torch.no_grad()
def k_center(pool: Pool, count: int) -> Iterator[tuple[int, float]]:
    """Yield at most ``count`` rows and their scores by k_center, see `select`; the pool gets them as centers."""
    for _ in range(count):
        score = pool.weights * pool.distance()
        score[pool.is_near()] = -torch.inf
        row = pool.central() if bool(pool.nearest.isneginf().all()) else int(score.argmax())
        if bool(score[row].isneginf()):
            return
        pool.add(row)
        yield row, float(score[row])


@torch.no_grad()
def coverage(pool: Pool, count: int) -> Iterator[tuple[int, float]]:
    """Yield at most ``count`` rows and their scores by coverage, see `select`; the pool gets them as centers.

    The scores are the gains, divided by the weighted distances at the beginning. A gain can only shrink while points
    are chosen, so that gains computed before are bounds, and few are computed again (Minoux 1978).
    """
    if bool(pool.nearest.isneginf().all()):
        pool.add(first := pool.central())
        yield first, torch.nan
        count -= 1
    size = len(pool.points)
    covered = torch.randperm(size, generator=torch.Generator().manual_seed(0))[:COVERED]
    distance, weights, others = pool.distance()[covered], pool.weights[covered], pool.points[covered]
    if pool.manifold.similarity_name.endswith("distance"):  # which are computed in float64: not converted in each call
        others = others.double()

    def gains_of(candidates: Tensor) -> Tensor:
        apart = pool.origin - pool.manifold.exact_similarity(pool.points[candidates], others)
        return (distance - apart).clamp(min=0) @ weights

    whole = float(distance @ weights) or 1.0
    gains = torch.cat([gains_of(part) for part in torch.arange(size).split(TRIED)])
    for _ in range(count):
        gains[pool.is_near()] = -torch.inf
        is_fresh = torch.zeros(size, dtype=torch.bool)
        while not is_fresh[row := int(gains.argmax())] and not gains[row].isneginf():
            stale = gains.masked_fill(is_fresh, -torch.inf).topk(min(TRIED, size)).indices
            stale = stale[~is_fresh[stale] & ~gains[stale].isneginf()]
            gains[stale] = gains_of(stale)
            is_fresh[stale] = True
        if gains[row].isneginf():
            return
        pool.add(row)
        distance = pool.distance()[covered]
        yield row, float(gains[row]) / whole


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
    classes = len(codes[known].unique())
    if count < 1:
        raise UserError(f"-n {count}: expected at least 1 image")
    require_one_label(points)
    if classes < 2:
        raise UserError(f"{points.source}: --measure needs images with at least 2 labels")
    half = len(known) - len(known) // 2
    rounds = min(ROUNDS, (half - 1) // count)  # with all labels there is nothing to choose
    if rounds < 2:
        raise UserError(
            f"-n {count}: half of the {len(known)} labeled images of {points.source} are held out, and the others are "
            f"too few for two rounds; expected at most {(half - 1) // 2}"
        )
    curves: list[list[list[float]]] = [[], []]  # of selected and random images, by seed
    ways: tuple[tuple[Rule, float | None] | None, ...] = ((rule, threshold), None)
    with bar("measuring", 2 * seeds) as advance:
        for seed in range(seeds):
            order = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))]
            pool, held_out = order[:half], order[half:]
            for curve, how in zip(curves, ways, strict=True):
                accuracies: list[float] = []
                for rows in _labeled(points, pool, count, rounds, how):
                    gallery = Gallery(points.manifold, points.points[rows])
                    nearest = gallery.search(points.points[held_out], 1).indices[:, 0]
                    accuracies.append(float((codes[rows][nearest] == codes[held_out]).double().mean()))
                curve.append(accuracies)
                advance(1)
    curve_points: list[CurvePoint] = []
    for index in range(rounds):
        selected, random = ([of_seed[index] for of_seed in curve] for curve in curves)
        change = paired_runs(random, selected)
        curve_points.append(CurvePoint(count * (index + 1), sum(selected) / seeds, sum(random) / seeds, change))
    selected, random = ([sum(of_seed[1:]) / (rounds - 1) for of_seed in curve] for curve in curves)
    change = paired_runs(random, selected)
    return LearningCurve(tuple(curve_points), change, len(known), len(known) - half, classes, seeds)


def _labeled(
    points: PointsInMemory, pool: Tensor, count: int, rounds: int, how: tuple[Rule, float | None] | None
) -> list[Tensor]:
    """Return the rows that have a label after each round, by a rule and threshold or at random.

    The pool is in random order. Where all others are near-duplicates, random ones are labeled.
    """
    labeled = [pool[:count]]
    for _ in range(rounds - 1):
        unlabeled = pool[~torch.isin(pool, labeled[-1])]
        chosen = torch.arange(0)
        if how is not None:
            chosen = choose(points.part(labeled[-1]), points.part(unlabeled), count, *how).rows
        others = unlabeled[~torch.isin(torch.arange(len(unlabeled)), chosen)]
        labeled.append(torch.cat([labeled[-1], unlabeled[chosen], others])[: len(labeled[-1]) + count])
    return labeled
