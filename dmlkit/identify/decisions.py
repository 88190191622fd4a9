"""How labeled images decide on the label of another: the nearest, or a vote of several."""

from math import inf

import numpy as np
import torch
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.gallery.folder import gallery_of
from dmlkit.identify.answers import Decision, vote
from dmlkit.identify.rule import Rule
from dmlkit.identify.search import LocalMatches, searcher_of
from dmlkit.nearest.near_pairs import components_of, near_pairs
from dmlkit.nearest.rescore import RescoredSearch
from dmlkit.nearest.search import Neighbors, PointSearch
from dmlkit.vectors.points import PointSet, in_memory, require_one_label, some_points

VOTERS = 5  # by default
BLOCK_ROWS = 2048  # points and pictures whose similarities are computed at once: 32 MB
FIRST = 16  # neighbors in which another label is looked for at first


def labeled_decider(
    searched: PointSet,
    rule: Rule = "nearest",
    k: int | None = None,
    near: float | None = None,
    second: LocalMatches | None = None,
) -> tuple[list[str], "Decider"]:
    """Return the labels of points, sorted, and the rule that decides by them; images without a label do not count.

    Args:
        near: similarity above which images of one label are near-duplicates, which are left out together.
    """
    require_one_label(searched)
    numbers, lacks_some = torch.arange(len(searched)), None in searched.labels
    if lacks_some:
        numbers = torch.tensor([row for row, label in enumerate(searched.labels) if label is not None]).long()
    if not len(numbers):
        way = "expected images with labels" if gallery_of(searched) is None else "add images with their labels"
        raise UserError(f"{searched.source}: no image has a label; {way}")
    searched = some_points(searched, numbers) if lacks_some else searched
    names, codes = np.unique(np.array(searched.labels, dtype=object), return_inverse=True)
    groups = None
    if near is not None:
        pairs = near_pairs(searched.manifold, in_memory(searched).points, None, near)
        same_label = torch.from_numpy(codes[pairs.first.numpy()] == codes[pairs.second.numpy()])
        groups = components_of(pairs.first[same_label], pairs.second[same_label], len(codes))
    return [str(name) for name in names], Decider(searched, codes, rule, k, groups, second, numbers)


class Decider:
    """Labeled points with a rule for the label of other points.

    Args:
        codes: (N,) the labels of all points as integers from 0.
        groups: (N,) integers from 0; images of one group, e.g. near-duplicates, are left out together. Default: each
            image is a group.
        numbers: (N,) int64, the numbers of the images for it. Default: their rows.
    """

    def __init__(
        self,
        searched: PointSet,
        codes: np.ndarray,
        rule: Rule = "nearest",
        k: int | None = None,
        groups: np.ndarray | None = None,
        second: LocalMatches | None = None,
        numbers: Tensor | None = None,
    ) -> None:
        self.searched, self.codes = searched, codes
        self.numbers = torch.arange(len(codes)) if numbers is None else numbers
        self.groups = np.arange(len(codes)) if groups is None else groups
        self.voters = k or VOTERS if rule == "vote" else 1
        self.sizes = np.bincount(codes)
        self.searcher: PointSearch = searcher_of(searched)
        self.rescored: RescoredSearch | None = None  # if the matches of the nearest images count, 0.08 ms each
        if second is not None:
            self.rescored = RescoredSearch(self.searcher, searched.manifold, second.rescorer, self.numbers)

    @property
    def similarity_name(self) -> str:
        """Name of the similarity, or of both."""
        return (self.rescored or self.searched.manifold).similarity_name

    def points_of(self, rows: np.ndarray) -> Tensor:
        """Return the points of groups of images (M, n): (M, n, D), or (M, D) for single images."""
        points = self.searched.points_at(torch.from_numpy(rows.ravel()))
        return points if rows.shape[1] == 1 else points.reshape(*rows.shape, self.searched.manifold.point_dim)

    @property
    def length(self) -> int:
        """Number of neighbors among which a decision is looked for at first."""
        return min(max(FIRST, self.voters + 1), len(self.codes))

    def decide(
        self,
        points: Tensor,
        own_rows: np.ndarray | None = None,
        *,
        absent: bool = False,
        near: Neighbors | None = None,
        numbers: Tensor | None = None,
    ) -> list[Decision]:
        """Decide on points (Q, D), or on Q groups of n points, (Q, n, D).

        The score of a label for a group is the mean over its points (the sum rule of Kittler et al. 1998), not counting
        votes.

        Args:
            own_rows: (Q,) rows of the points if they are labeled ones; their groups are left out of their own
                decisions. Fastest in the order of their labels.
            absent: leave out the whole labels of ``own_rows``, of which at least one other must remain.
            near: the `length` nearest images of each point, if they were searched before. Default: search.
            numbers: the numbers of the images, (Q,) or (Q, n), with a second similarity.
        """
        if points.ndim == 3:
            return self._on_groups(points, own_rows, absent, numbers)
        decided, remaining = dict[int, Decision](), list(range(len(points)))
        length, size = self.length, len(self.codes)
        units, single = self.codes if absent else self.groups, len(self.sizes) - absent == 1
        while remaining:  # among more and more neighbors, until all voters are there, and one has another label
            owners = None if own_rows is None else own_rows[remaining]
            query_numbers = None if numbers is None else numbers[remaining]
            near = near or self._search(points[remaining], length, owners, units, query_numbers)
            for query, similarities, rows in zip(remaining, near.similarities, near.indices.numpy(), strict=True):
                is_other = np.ones(len(rows), bool) if own_rows is None else units[rows] != units[own_rows[query]]
                codes = self.codes[rows[is_other]]
                is_enough = len(codes) >= self.voters and (single or len(np.unique(codes)) > 1)
                if is_enough or length == size:
                    scores = (similarities[torch.from_numpy(is_other)] + 0.0).tolist()
                    decided[query] = vote(codes.tolist(), scores, self.voters)
            remaining = [query for query in remaining if query not in decided]
            near, length = None, min(2 * length, size)
        return [decided[query] for query in range(len(points))]

    def _search(
        self, points: Tensor, length: int, own_rows: np.ndarray | None, units: np.ndarray, numbers: Tensor | None
    ) -> Neighbors:
        """Return the nearest images of points; with a second similarity, those of other units than their own rows."""
        if self.rescored is None or numbers is None:
            return self.searcher.search(points, length)
        return self.rescored.search(points, length, numbers, None if own_rows is None else (units, units[own_rows]))

    def _on_groups(
        self, points: Tensor, own_rows: np.ndarray | None, absent: bool, numbers: Tensor | None
    ) -> list[Decision]:
        count, size, _ = points.shape
        owners = None if own_rows is None else own_rows.repeat(size)
        all_scores = self._scores(points.flatten(0, 1), owners, absent, None if numbers is None else numbers.flatten())
        scores = all_scores.reshape(count, size, len(self.sizes)).mean(1)
        if absent and own_rows is not None:
            scores[torch.arange(count), torch.from_numpy(self.codes[own_rows])] = -torch.inf
        best = scores.topk(min(2, scores.shape[1]), dim=1)
        return [
            Decision(codes[0], values[0], values[0] - values[1] if len(values) > 1 and values[1] > -inf else None)
            for values, codes in zip((best.values + 0.0).tolist(), best.indices.tolist(), strict=True)
        ]

    def _scores(self, points: Tensor, own_rows: np.ndarray | None, absent: bool, numbers: Tensor | None) -> Tensor:
        """Return the similarity (Q, L) float64 of points to the nearest picture of every label."""
        if self.rescored is None or numbers is None:
            return self._of_points(points, own_rows, 1.0)
        rescorer = self.rescored.rescorer
        # matches of the nearest images never lower a score
        scores = self._of_points(points, own_rows, 1 - rescorer.share)
        width = min(rescorer.most, len(self.codes))
        codes, units = torch.from_numpy(self.codes), self.codes if absent else self.groups
        for rows in torch.arange(len(points)).split(max(1, BLOCK_ROWS**2 // width)):
            owners = None if own_rows is None else own_rows[rows.numpy()]
            near = self._search(points[rows], width, owners, units, numbers[rows])
            scores[rows] = scores[rows].scatter_reduce(1, codes[near.indices], near.similarities, "amax")
        return scores

    def _of_points(self, points: Tensor, own_rows: np.ndarray | None, weight: float) -> Tensor:
        """Return the weighted similarity (Q, L) float64 of points to the nearest picture of every label."""
        best = torch.full((len(points), len(self.sizes)), -torch.inf, dtype=torch.float64)
        codes, start = torch.from_numpy(self.codes), 0
        for block in self.searched.blocks(BLOCK_ROWS):
            columns = slice(start, start + len(block))
            for rows in torch.arange(len(points)).split(BLOCK_ROWS):
                similarities = weight * self.searched.manifold.similarity(points[rows].double(), block.double())
                if own_rows is not None:
                    units = self.groups[own_rows[rows.numpy()]]
                    similarities[torch.from_numpy(units[:, None] == self.groups[columns])] = -torch.inf
                best[rows] = best[rows].scatter_reduce(1, codes[columns].expand(len(rows), -1), similarities, "amax")
            start += len(block)
        return best
