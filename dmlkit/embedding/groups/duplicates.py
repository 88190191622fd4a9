"""Near-duplicates within a collection or between two: what ``dmlkit duplicates`` finds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from dmlkit.datasets.files.listing import LISTED_SPLITS, Listing
from dmlkit.distributed.launch import start_fabric
from dmlkit.embedding.groups.near_pairs import NearPairs, complete_groups, near_pairs
from dmlkit.embedding.points import PointsInMemory
from dmlkit.embedding.progress_bar import Bar, no_bar
from dmlkit.embedding.questions.answers import write_table
from dmlkit.embedding.questions.page import Picture, Shelf
from dmlkit.embedding.sources import check_same_model, embedded_points
from dmlkit.embedding.trained import load_model
from dmlkit.errors import UserError
from dmlkit.loading.check import Finding, Findings
from dmlkit.run_folder.folder import RunFolder

GROUP_COLUMNS = ("group", "path", "label", "least_similarity")
MATCH_COLUMNS = ("path", "label", "other_path", "other_label", "similarity")
MOST_PICTURES = 24  # of a row of a page


@dataclass(frozen=True)
class DuplicateGroups:
    """Groups of images in which every two are as alike as a threshold, the largest first.

    Args:
        collection: whose.
        pairs: all that are as alike.
        groups: rows of each.
    """

    collection: PointsInMemory
    pairs: NearPairs
    groups: Sequence[Tensor]

    @cached_property
    def group_of(self) -> Tensor:
        """The group of each image, (N,) int64; -1 where it is in none."""
        found = torch.full((len(self.collection),), -1)
        for number, rows in enumerate(self.groups):
            found[rows] = number
        return found

    @property
    def shelf_count(self) -> int:
        """Rows of a page."""
        return len(self.groups)

    @property
    def images(self) -> int:
        """How many are in a group."""
        return int((self.group_of >= 0).sum())

    @property
    def loose(self) -> int:
        """Pairs as alike that are in no group together: links of chains, whose ends are unlike."""
        return len(self.pairs.first) - int(self._is_within().sum())

    @property
    def mixed(self) -> int:
        """How many groups hold images of several labels."""
        labels = self.collection.labels
        return sum(len({labels[row] for row in rows.tolist()} - {None}) > 1 for rows in self.groups)

    def least(self) -> Tensor:
        """The similarity of each image to the least alike of its group, (N,) float64; infinite outside groups."""
        found = torch.full((len(self.collection),), torch.inf, dtype=torch.float64)
        within = self._is_within()
        for ends in (self.pairs.first, self.pairs.second):
            found.scatter_reduce_(0, ends[within], self.pairs.similarities[within], "amin")
        return found

    def write(self, path: Path) -> None:
        """Write a CSV table: one row an image, groups one after the other."""
        paths, labels, least = self.collection.paths, self.collection.labels, self.least()
        rows = (
            (number, paths[row], labels[row] or "", f"{float(least[row]):.9g}")
            for number, group in enumerate(self.groups, start=1)
            for row in group.tolist()
        )
        write_table(path, GROUP_COLUMNS, rows)

    def shelves(self) -> Iterator[Shelf]:
        """A row of pictures for each group."""
        least = self.least()
        for number, group in enumerate(self.groups, start=1):
            told = f"group {number}, {len(group)} images"
            rows = group[:MOST_PICTURES].tolist()
            pictures = [picture_of(self.collection, row, [f"at least {float(least[row]):.4f}"]) for row in rows]
            first = picture_of(self.collection, rows[0], [told])
            yield Shelf(first, pictures[1:])

    def _is_within(self) -> Tensor:
        one, other = self.group_of[self.pairs.first], self.group_of[self.pairs.second]
        return (one == other) & (one >= 0)


@dataclass(frozen=True)
class Matches:
    """Pairs of one image of each of two collections that are as alike as a threshold.

    Args:
        one, other: the collections.
        pairs: rows of both.
    """

    one: PointsInMemory
    other: PointsInMemory
    pairs: NearPairs

    @property
    def shelf_count(self) -> int:
        """Rows of a page."""
        return self.images[0]

    @property
    def images(self) -> tuple[int, int]:
        """How many images of either side have a near-duplicate on the other."""
        return len(self.pairs.first.unique()), len(self.pairs.second.unique())

    def write(self, path: Path) -> None:
        """Write a CSV table, one row a pair."""
        write_table(path, MATCH_COLUMNS, (self.row(place) for place in range(len(self.pairs.first))))

    def row(self, place: int) -> tuple[str, str, str, str, str]:
        """A pair as `MATCH_COLUMNS`."""
        one, other = int(self.pairs.first[place]), int(self.pairs.second[place])
        ours, theirs = self.one, self.other
        similarity = f"{float(self.pairs.similarities[place]):.9g}"
        return ours.paths[one], ours.labels[one] or "", theirs.paths[other], theirs.labels[other] or "", similarity

    def shelves(self) -> Iterator[Shelf]:
        """A row of pictures for each image of the first with a near-duplicate in the other, the most alike first."""
        rows, counts = self.pairs.first.unique_consecutive(return_counts=True)
        blocks = torch.arange(len(self.pairs.first)).split(counts.tolist())
        for row, places in zip(rows.tolist(), blocks, strict=True):
            best = places[self.pairs.similarities[places].argsort(descending=True)][:MOST_PICTURES]
            found = [
                picture_of(self.other, int(self.pairs.second[place]), [f"{float(self.pairs.similarities[place]):.4f}"])
                for place in best
            ]
            yield Shelf(picture_of(self.one, row, []), found)


def duplicate_groups(collection: PointsInMemory, threshold: float, *, bar: Bar = no_bar) -> DuplicateGroups:
    """The near-duplicates of a collection, by complete linkage; see `complete_groups`.

    Raises:
        UserError: the threshold is no similarity of the manifold, or see `near_pairs`.
    """
    check_reachable(collection, threshold)
    with bar("comparing", len(collection)) as advance:
        pairs = near_pairs(collection.manifold, collection.points, None, threshold, advance=advance)
    groups = complete_groups(pairs, len(collection))
    return DuplicateGroups(collection, pairs, sorted(groups, key=len, reverse=True))


def matches(one: PointsInMemory, other: PointsInMemory, threshold: float, *, bar: Bar = no_bar) -> Matches:
    """The near-duplicates of two collections of the same model: every pair, since only those between them are asked.

    Raises:
        UserError: they are of two models, or see `duplicate_groups`.
    """
    check_same_model(other, one)
    check_reachable(one, threshold)
    with bar("comparing", len(one)) as advance:
        pairs = near_pairs(one.manifold, one.points, other.points, threshold, advance=advance)
    return Matches(one, other, pairs)


def check_reachable(collection: PointsInMemory, threshold: float) -> None:
    """Refuse a threshold that no similarity reaches, and nan.

    Raises:
        UserError: as it says.
    """
    name = collection.manifold.similarity_name
    highest = 0.0 if name.endswith("distance") else 1.0 if name.endswith("cosine") else torch.inf
    if not -torch.inf < threshold <= highest:
        most = "a number" if highest == torch.inf else f"at most {highest:g}"
        raise UserError(f"--threshold {threshold:g}: the similarity here is {name.replace('_', ' ')}; expected {most}")


def picture_of(collection: PointsInMemory, row: int, lines: Sequence[str]) -> Picture:
    """An image of a collection for a page, its label first."""
    label = collection.labels[row]
    told = [*([] if label is None else [label]), *lines]
    return Picture(collection.paths[row], told, collection.picture(row) or b"")


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
    """Embed all images by a run's model; pairs of two splits that are as alike as a threshold are added to findings.

    Args:
        listing: of the dataset.
        findings: that this adds to; a pair is a fault, or a note where the images are a benchmark's.
        run: whose model.
        threshold: the least similarity of a near-duplicate.
        is_published: the images are a benchmark's, whose splits are as their authors want them.
        device: see `start_fabric`.
        bar: shows each step.

    Raises:
        UserError: there is no such run, or it takes other samples, or see `duplicate_groups`.
    """
    fabric = start_fabric(device)
    trained = load_model(RunFolder(run), fabric)
    images = embedded_points(trained, fabric, listing.everything(), str(listing.source or listing.root), bar)
    check_reachable(images, threshold)
    assert images.rows is not None
    splits = listing.splits[images.rows.numpy()]
    for one, other in combinations(range(len(LISTED_SPLITS)), 2):
        ones, others = ((images.rows.new_tensor(splits) == split).nonzero()[:, 0] for split in (one, other))
        if not len(ones) or not len(others):
            continue
        lines = list(_leaks(images, ones, others, threshold))
        verdict = ("note" if is_published else "fault") if lines else "ok"
        (findings.notes if is_published else findings.faults).extend(lines)
        named = f"{LISTED_SPLITS[one]} and {LISTED_SPLITS[other]}"
        findings.rows.append(Finding(f"near-duplicates in {named}", "0", str(len(lines)), verdict))


def _leaks(images: PointsInMemory, ones: Tensor, others: Tensor, threshold: float) -> Iterator[str]:
    pairs = near_pairs(images.manifold, images.points[ones], images.points[others], threshold)
    for first, second, similarity in zip(ones[pairs.first], others[pairs.second], pairs.similarities, strict=True):
        paths = f"{images.paths[int(first)]}, {images.paths[int(second)]}"
        yield f"near-duplicate in two splits, {similarity:.4f}: {paths}"
