"""How labeled images decide on the label of another: the nearest, a vote of several, or the nearest mean."""

from collections.abc import Iterator
from copy import copy
from math import inf

import numpy as np
import torch
from torch import Tensor

from dmlkit.identify.answers import Decision, Rule, vote
from dmlkit.identify.scored import MatchedSearch, MatchedSpace
from dmlkit.identify.search import searcher_of
from dmlkit.manifolds.base import frechet_mean
from dmlkit.nearest.scored import CANDIDATES
from dmlkit.nearest.search import Gallery, Neighbors, PointSearch
from dmlkit.vectors.points import PointSet

VOTERS = 5  # by default
BLOCK_ROWS = 2048  # points and pictures whose similarities are computed at once: 32 MB
FIRST = 16  # neighbors in which another label is looked for at first


class Decider:
    """Labeled points with a rule for the label of other points.

    Args:
        codes: (N,) the labels of all points as integers from 0.
        rule: see `dmlkit.identify.identify.identify`.
        groups: (N,) integers from 0; images of one group, e.g. near-duplicates, are left out together. Default: each
            image is a group.

    Attributes:
        members: rows of each group of images that is tried as one, by its first row; None if each image is tried.
        size: number of images of such a group.
    """

    members: dict[int, np.ndarray] | None = None
    size = 1

    def __init__(
        self, searched: PointSet, codes: np.ndarray, rule: Rule, k: int | None = None, groups: np.ndarray | None = None
    ) -> None:
        self.searched, self.codes, self.k = searched, codes, k
        self.rule: Rule = rule
        self.groups = np.arange(len(codes)) if groups is None else groups
        self.voters = k or VOTERS if rule == "vote" else 1
        self.sizes = np.bincount(codes)
        if rule == "mean":
            order = torch.from_numpy(np.argsort(codes, kind="stable"))
            self.rows_of = order.split(self.sizes.tolist())
            means = [frechet_mean(searched.manifold, searched.points_at(rows)) for rows in self.rows_of]
            self.means = Gallery(searched.manifold, torch.stack(means).float())
            self.last_group = -1, torch.empty(0)
        else:
            self.searcher: PointSearch = searcher_of(searched)

    def together(self, size: int, seed: int) -> "Decider":
        """Return a decider to be tried on random groups of images of one label, which are left out together.

        A group has one image of each of ``size`` of the decider's own groups, e.g. no two near-duplicates. Images of a
        label that do not fill a group are not tried.
        """
        one_each = np.random.default_rng(seed).permutation(len(self.codes))
        one_each = one_each[np.unique(self.groups[one_each], return_index=True)[1]]
        chunks = one_each[random_groups(self.codes[one_each], size, seed)]
        found, merged = copy(self), np.arange(self.groups.max() + 1)
        merged[self.groups[chunks]] = self.groups[chunks[:, :1]]
        found.groups, found.members, found.size = merged[self.groups], {int(rows[0]): rows for rows in chunks}, size
        return found

    def grouped(self, groups: np.ndarray) -> "Decider":
        """Return a decider that leaves other groups of images out together."""
        found = copy(self)
        found.groups = groups
        return found

    @property
    def compares_matches(self) -> bool:
        """Whether the matches of the nearest images count, each of which takes 0.08 ms."""
        return isinstance(self.searched.manifold, MatchedSpace)

    @property
    def tried(self) -> np.ndarray:
        """Rows (N,) bool that are tried: all, or one per group of images."""
        if self.members is None:
            return np.ones(len(self.codes), bool)
        return np.isin(np.arange(len(self.codes)), [*self.members])

    def trial_points(self, rows: np.ndarray) -> Tensor:
        """Return the points (M, D) of tried rows (M,), or (M, n, D), those of their groups of n images."""
        if self.members is None:
            return self.searched.points_at(torch.from_numpy(rows))
        images = np.array([self.members[row] for row in rows.tolist()], np.int64).reshape(len(rows), self.size)
        return self.searched.points_at(torch.from_numpy(images.ravel())).reshape(
            *images.shape, self.searched.manifold.point_dim
        )

    @property
    def length(self) -> int:
        """Number of neighbors among which a decision is looked for at first."""
        return min(max(FIRST, self.voters + 1), len(self.codes))

    def decide(
        self, points: Tensor, own: np.ndarray | None = None, *, absent: bool = False, near: Neighbors | None = None
    ) -> list[Decision]:
        """Decide on points (Q, D), or on Q groups of n points, (Q, n, D).

        The score of a label for a group is the mean over its points (the sum rule of Kittler et al. 1998), not counting
        votes.

        Args:
            own: (Q,) rows of the points if they are labeled ones; their groups are left out of their own decisions.
                Fastest in the order of their labels.
            absent: leave out the whole labels of ``own``, of which at least one other must remain.
            near: the `length` nearest images of each point, if they were searched before. Default: search.
        """
        if points.ndim == 3:
            return self._on_groups(points, own, absent)
        if self.rule == "mean":
            return list(self._by_means(points, own, absent))
        return self._by_pictures(points, own, absent, near)

    def _by_pictures(
        self, points: Tensor, own: np.ndarray | None, absent: bool, near: Neighbors | None
    ) -> list[Decision]:
        """Search among more and more neighbors, until there is one with another label."""
        found: dict[int, Decision] = {}
        remaining, size = list(range(len(points))), len(self.codes)
        length = self.length
        units, single = self.codes if absent else self.groups, len(self.sizes) - absent == 1
        while remaining:
            near = near or self._search(points[remaining], length, None if own is None else own[remaining], units)
            for query, similarities, rows in zip(remaining, near.similarities, near.indices.numpy(), strict=True):
                kept = np.ones(len(rows), bool) if own is None else units[rows] != units[own[query]]
                codes = self.codes[rows[kept]]
                if len(np.unique(codes)) > 1 or (single and len(codes)) or length == size:
                    scores = (similarities[torch.from_numpy(kept)] + 0.0).tolist()
                    found[query] = vote(codes.tolist(), scores, self.voters)
            remaining = [query for query in remaining if query not in found]
            near, length = None, min(2 * length, size)
        return [found[query] for query in range(len(points))]

    def _search(self, points: Tensor, length: int, own: np.ndarray | None, units: np.ndarray) -> Neighbors:
        """Return the nearest images of points; where matches count, those of other units than their own rows."""
        if own is not None and isinstance(self.searcher, MatchedSearch):
            return self.searcher.search_others(points, length, units, units[own])
        return self.searcher.search(points, length)

    def _by_means(self, points: Tensor, own: np.ndarray | None, absent: bool) -> Iterator[Decision]:
        found = self.means.search(points, min(2 if own is None else 3, len(self.sizes)))
        for query, (scores, codes) in enumerate(
            zip((found.similarities + 0.0).tolist(), found.indices.tolist(), strict=True)
        ):
            ranked = list(zip(scores, codes, strict=True))
            if own is not None:
                code = int(self.codes[own[query]])
                left = None if absent else self._score_without(code, int(own[query]), points[query])
                ranked = [pair for pair in ranked if pair[1] != code] + ([] if left is None else [(left, code)])
                ranked.sort(reverse=True)
            score, code = ranked[0]
            yield Decision(code, score, score - ranked[1][0] if len(ranked) > 1 else None)

    def _on_groups(self, points: Tensor, own: np.ndarray | None, absent: bool) -> list[Decision]:
        count, size, _ = points.shape
        each = self._scores(points.flatten(0, 1), None if own is None else own.repeat(size), absent=absent)
        scores = each.reshape(count, size, len(self.sizes)).mean(1)
        if absent and own is not None:
            scores[torch.arange(count), torch.from_numpy(self.codes[own])] = -torch.inf
        best = scores.topk(min(2, scores.shape[1]), dim=1)
        return [
            Decision(codes[0], values[0], values[0] - values[1] if len(values) > 1 and values[1] > -inf else None)
            for values, codes in zip((best.values + 0.0).tolist(), best.indices.tolist(), strict=True)
        ]

    def _scores(self, points: Tensor, own: np.ndarray | None, *, absent: bool) -> Tensor:
        """Return the similarity (Q, L) float64 of points to the nearest picture, or to the mean, of every label."""
        if self.rule == "mean":
            scores = self.searched.manifold.similarity(points.double(), self.means.points.double())
            for row, (query, code) in enumerate([] if own is None else zip(own, self.codes[own], strict=True)):
                left = self._score_without(int(code), int(query), points[row])
                scores[row, code] = -torch.inf if left is None else left
            return scores
        found = torch.full((len(points), len(self.sizes)), -torch.inf, dtype=torch.float64)
        codes, start, space = torch.from_numpy(self.codes), 0, self.searched.manifold
        compare = space.without_matches if isinstance(space, MatchedSpace) else space.similarity
        for block in self.searched.blocks(BLOCK_ROWS):
            columns = slice(start, start + len(block))
            for rows in torch.arange(len(points)).split(BLOCK_ROWS):
                similarities = compare(points[rows].double(), block.double())
                if own is not None:
                    units = self.groups[own[rows.numpy()]]
                    similarities[torch.from_numpy(units[:, None] == self.groups[columns])] = -torch.inf
                found[rows] = found[rows].scatter_reduce(1, codes[columns].expand(len(rows), -1), similarities, "amax")
            start += len(block)
        if isinstance(self.searcher, MatchedSearch):  # the nearest images match too, and never lower a score
            units = self.codes if absent else self.groups
            near = self._search(points, min(CANDIDATES, len(self.codes)), own, units)
            found = found.scatter_reduce(1, codes[near.indices], near.similarities.double(), "amax")
        return found

    def _score_without(self, code: int, row: int, point: Tensor) -> float | None:
        """Return the similarity of a point to the mean of the others with its label; None if they are of its group."""
        if self.last_group[0] != code:
            self.last_group = code, self.searched.points_at(self.rows_of[code])
        others = self.groups[self.rows_of[code].numpy()] != self.groups[row]
        if not others.any():
            return None
        mean = frechet_mean(self.searched.manifold, self.last_group[1][torch.from_numpy(others)])
        return float(self.searched.manifold.paired_similarity(point.double(), mean))


def random_groups(codes: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Divide items at random into groups (G, size) of one code each; those that do not fill a group are left out.

    Example:
        >>> rows = random_groups(np.array([7, 8, 7, 8, 7]), 2, seed=0)
        >>> rows.shape, np.array([7, 8, 7, 8, 7])[rows].tolist()
        ((2, 2), [[7, 7], [8, 8]])
    """
    order = np.random.default_rng(seed).permutation(len(codes))
    order = order[np.argsort(codes[order], kind="stable")]
    counts = np.unique(codes, return_counts=True)[1]
    place = np.arange(len(codes)) - np.repeat(counts.cumsum() - counts, counts)  # within its code
    return order[place < np.repeat(counts - counts % size, counts)].reshape(-1, size)
