"""Near-duplicates within a set or between two, and a threshold that the pairs suggest: ``dmlkit duplicates``."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dmlkit.datasets.files.listing import LISTED_SPLITS, Listing
from dmlkit.distributed.launch import start_ranks
from dmlkit.errors import UserError
from dmlkit.files.outputs import write_table
from dmlkit.gallery.sources import check_same_model, embedded_points
from dmlkit.identify.page import Picture, Shelf
from dmlkit.loading.check import Finding, Findings
from dmlkit.nearest.near_pairs import NearPairs, check_reachable, complete_groups, near_pairs, neighbors_of
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.points import PointsInMemory
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.trained import load_model

MOST_PICTURES = 24  # of a row of a page


@dataclass(frozen=True)
class DuplicateGroups:
    """Groups of images in which every pair reaches a threshold, the largest first."""

    collection: PointsInMemory
    pairs: NearPairs
    groups: Sequence[Tensor]

    @cached_property
    def group_of(self) -> Tensor:
        """Group of each image, (N,) int64; -1 for an image in none."""
        numbers = torch.full((len(self.collection),), -1)
        for number, rows in enumerate(self.groups):
            numbers[rows] = number
        return numbers

    @property
    def images(self) -> int:
        """Number of images in a group."""
        return int((self.group_of >= 0).sum())

    @property
    def loose(self) -> int:
        """Number of pairs that reach the threshold but share no group: links of chains with dissimilar ends."""
        return len(self.pairs.first) - int(self._is_within().sum())

    @property
    def mixed(self) -> int:
        """Number of groups with several labels."""
        labels = self.collection.labels
        return sum(len({labels[row] for row in rows.tolist()} - {None}) > 1 for rows in self.groups)

    def least(self) -> Tensor:
        """Return the similarity (N,) of each image to the least similar one of its group; infinite outside groups."""
        least = torch.full((len(self.collection),), torch.inf, dtype=torch.float64)
        within = self._is_within()
        for ends in (self.pairs.first, self.pairs.second):
            least.scatter_reduce_(0, ends[within], self.pairs.similarities[within], "amin")
        return least

    def write(self, path: Path) -> None:
        """Write a CSV table: one row per image, group after group, with their boxes."""
        paths, labels, least = self.collection.paths, self.collection.labels, self.least()
        listed = [(number, row) for number, group in enumerate(self.groups, start=1) for row in group.tolist()]
        rows = ((number, paths[row], labels[row] or "", f"{float(least[row]):.9g}") for number, row in listed)
        columns = ("group", "path", "label", "least_similarity")
        write_table(path, columns, rows, [self.collection.boxes[row] for _, row in listed])

    def shelves(self) -> Iterator[Shelf]:
        """Yield a row of pictures per group."""
        least = self.least()
        for number, group in enumerate(self.groups, start=1):
            first, *others = group[:MOST_PICTURES].tolist()
            pictures = [picture_of(self.collection, row, [f"at least {float(least[row]):.4f}"]) for row in others]
            yield Shelf(picture_of(self.collection, first, [f"group {number}, {len(group)} images"]), pictures)

    def _is_within(self) -> Tensor:
        one, other = self.group_of[self.pairs.first], self.group_of[self.pairs.second]
        return (one == other) & (one >= 0)


@dataclass(frozen=True)
class Matches:
    """Pairs of images of two sources that reach a threshold."""

    one: PointsInMemory
    other: PointsInMemory
    pairs: NearPairs

    @property
    def images(self) -> tuple[int, int]:
        """Number of images of either source with a near-duplicate in the other."""
        return len(self.pairs.first.unique()), len(self.pairs.second.unique())

    def write(self, path: Path) -> None:
        """Write a CSV table, one row per pair, with their boxes."""
        ends = ((self.one, self.pairs.first), (self.other, self.pairs.second))
        boxes = ([points.boxes[row] for row in rows.tolist()] for points, rows in ends)
        columns = ("path", "label", "other_path", "other_label", "similarity")
        ours, theirs = self.one, self.other
        rows = (
            (ours.paths[one], ours.labels[one] or "", theirs.paths[other], theirs.labels[other] or "", f"{alike:.9g}")
            for one, other, alike in zip(*(column.tolist() for column in self.pairs), strict=True)
        )
        write_table(path, columns, rows, *boxes)

    def shelves(self) -> Iterator[Shelf]:
        """Yield a row of pictures per image of the first source with near-duplicates, the most similar first."""
        rows, counts = self.pairs.first.unique_consecutive(return_counts=True)
        blocks = torch.arange(len(self.pairs.first)).split(counts.tolist())
        for row, indices in zip(rows.tolist(), blocks, strict=True):
            best = indices[self.pairs.similarities[indices].argsort(descending=True)][:MOST_PICTURES]
            pictures = [
                picture_of(self.other, int(self.pairs.second[pair]), [f"{float(self.pairs.similarities[pair]):.4f}"])
                for pair in best
            ]
            yield Shelf(picture_of(self.one, row, []), pictures)


def duplicate_groups(collection: PointsInMemory, threshold: float, *, bar: Bar = no_bar) -> DuplicateGroups:
    """Find the near-duplicates of a set of images, by complete linkage; see `complete_groups`."""
    check_reachable(collection.manifold, threshold)
    with bar("comparing", len(collection)) as advance:
        pairs = near_pairs(collection.manifold, collection.points, None, threshold, advance=advance)
    groups = complete_groups(pairs, len(collection))
    return DuplicateGroups(collection, pairs, sorted(groups, key=len, reverse=True))


def matches(points: PointsInMemory, other: PointsInMemory, threshold: float, *, bar: Bar = no_bar) -> Matches:
    """Find the near-duplicates between two sources of the same model: every pair of an image of each."""
    check_same_model(other, points)
    check_reachable(points.manifold, threshold)
    with bar("comparing", len(points)) as advance:
        pairs = near_pairs(points.manifold, points.points, other.points, threshold, advance=advance)
    return Matches(points, other, pairs)


def picture_of(collection: PointsInMemory, row: int, lines: Sequence[str]) -> Picture:
    """Return an image for a page, its label first."""
    label = collection.labels[row]
    caption = [*([] if label is None else [label]), *lines]
    return Picture(collection.paths[row], caption, collection.picture(row) or b"")


def check_leaks(
    listing: Listing,
    findings: Findings,
    run: Path,
    threshold: float,
    *,
    is_published: bool,
    device: str = "auto",
    bar: Bar = no_bar,
) -> None:
    """Embed all images with a run's model, and add the near-duplicates in two splits to findings.

    A pair is an error, or a note for a published benchmark, whose splits are fixed.
    """
    ranks = start_ranks(device)
    trained = load_model(RunFolder(run), ranks)
    check_reachable(trained.manifold, threshold)  # before images are embedded
    images = embedded_points(trained, ranks, listing.everything(), str(listing.source or listing.root), bar)
    assert images.images is not None
    splits = torch.from_numpy(listing.splits[images.images.rows.numpy()])
    for one, other in combinations(range(len(LISTED_SPLITS)), 2):
        ones, others = ((splits == split).nonzero()[:, 0] for split in (one, other))
        if not len(ones) or not len(others):
            continue
        pairs = near_pairs(images.manifold, images.points[ones], images.points[others], threshold)
        lines = [
            f"near-duplicate in two splits, {alike:.4f}: {images.paths[int(first)]}, {images.paths[int(second)]}"
            for first, second, alike in zip(ones[pairs.first], others[pairs.second], pairs.similarities, strict=True)
        ]
        verdict = ("note" if is_published else "fault") if lines else "ok"
        (findings.notes if is_published else findings.faults).extend(lines)
        named = f"{LISTED_SPLITS[one]} and {LISTED_SPLITS[other]}"
        findings.rows.append(Finding(f"near-duplicates in {named}", "0", str(len(lines)), verdict))


LEAST_GAP = 1e-6  # relative; float32 similarities of equal images differ by less


class Proposal(NamedTuple):
    """Threshold in the middle of a gap between similarities."""

    threshold: float
    above: float  # similarity at the upper end of the gap
    below: float  # similarity at its lower end
    images: int  # that reach the threshold


def propose_threshold(nearest: Tensor) -> Proposal | None:
    """Return the middle of the largest gap in the upper half of similarities (N,) to the nearest other; None without.

    Near-duplicates are far more similar to each other than other images to their nearest one. Gaps in the lower half
    are left out: images that resemble no other make the largest ones.

    Example:
        >>> propose_threshold(torch.tensor([0.5, 1.0, 0.25, 0.9375, 0.625, 0.0]))
        Proposal(threshold=0.78125, above=0.9375, below=0.625, images=2)
    """
    ordered = nearest.double().sort(descending=True).values
    gaps = -ordered.diff()[: max(1, len(ordered) // 2)]
    if not len(gaps) or float(gaps.max()) <= LEAST_GAP * max(1.0, float(ordered.abs().max())):
        return None
    index = int(gaps.argmax())
    above, below = ordered[index : index + 2].tolist()
    return Proposal((above + below) / 2, above, below, index + 1)


def most_similar_pairs(
    points: PointsInMemory, other: PointsInMemory | None, count: int, *, bar: Bar = no_bar
) -> tuple[Matches, Proposal | None]:
    """Return the most similar pairs within a source or between two, the most similar first, and a threshold.

    A pair among the ``count`` most similar ones is among the ``count`` nearest neighbors of both of its images.
    """
    if other is not None:
        check_same_model(other, points)
    candidates = len(points) - 1 if other is None else len(other)
    if candidates < 1:
        raise UserError(f"{points.source}: has a single image; expected at least two")
    others = None if other is None else other.points
    with bar("comparing", len(points)) as advance:
        neighbors = neighbors_of(points.manifold, points.points, min(count, candidates), others, advance=advance)
    first = torch.arange(len(points)).repeat_interleave(neighbors.indices.shape[1])
    second, similarities = neighbors.indices.flatten(), neighbors.similarities.flatten().double()
    if other is None:  # both images of a pair may have found it
        pairs, inverse = torch.stack([first.minimum(second), first.maximum(second)], 1).unique(
            dim=0, return_inverse=True
        )
        first, second = pairs.unbind(1)
        similarities = torch.full((len(pairs),), -torch.inf).double().scatter_reduce(0, inverse, similarities, "amax")
    best = similarities.argsort(descending=True, stable=True)[:count]
    chosen = NearPairs(first[best], second[best], similarities[best])
    return Matches(points, other or points, chosen), propose_threshold(neighbors.similarities[:, 0])
