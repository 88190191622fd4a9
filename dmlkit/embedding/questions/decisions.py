"""How labeled images decide on the label of another: the nearest, a vote of several, or the nearest mean."""

from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dmlkit.embedding.points import PointSet
from dmlkit.embedding.questions.search import searcher_of
from dmlkit.embedding.search import Gallery
from dmlkit.manifolds.numerics.frechet import frechet_mean

Rule = Literal["nearest", "vote", "mean"]
VOTERS = 5  # by default
FIRST = 16  # neighbors in which another label is looked for at first


class Decision(NamedTuple):
    """Decision on one image."""

    code: int  # of the label
    score: float  # similarity of the label's nearest picture, or of its mean
    margin: float | None  # the score less that of the best other label; None where there is no other


class Decider:
    """Labeled points with a rule for the label of other points.

    Args:
        searched: the points.
        codes: (N,) the labels of all points as integers from 0.
        rule: see `dmlkit.embedding.questions.identify.identify`.
        k: number of images that vote.
        groups: (N,) integers from 0; images of one group, e.g. near-duplicates, are left out together. Default: each
            image is a group.
    """

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
            self.searcher = searcher_of(searched)

    def decide(self, points: Tensor, own: np.ndarray | None = None, *, absent: bool = False) -> list[Decision]:
        """Decide on points (Q, D).

        Args:
            points: the points.
            own: (Q,) rows of the points if they are labeled ones; their groups are left out of their own decisions.
                Fastest in the order of their labels.
            absent: leave out the whole labels of ``own``, of which at least one other must remain.
        """
        if self.rule == "mean":
            return list(self._by_means(points, own, absent))
        return self._by_pictures(points, own, absent)

    def _by_pictures(self, points: Tensor, own: np.ndarray | None, absent: bool) -> list[Decision]:
        """Search among more and more neighbors, until there is one with another label."""
        found: dict[int, Decision] = {}
        remaining, size = list(range(len(points))), len(self.codes)
        length = min(max(FIRST, self.voters + 1), size)
        units, single = self.codes if absent else self.groups, len(self.sizes) - absent == 1
        while remaining:
            near = self.searcher.search(points[remaining], length)
            for query, similarities, rows in zip(remaining, near.similarities, near.indices.numpy(), strict=True):
                kept = np.ones(len(rows), bool) if own is None else units[rows] != units[own[query]]
                codes = self.codes[rows[kept]]
                if len(np.unique(codes)) > 1 or (single and len(codes)) or length == size:
                    scores = (similarities[torch.from_numpy(kept)] + 0.0).tolist()
                    found[query] = _vote(codes.tolist(), scores, self.voters)
            remaining = [query for query in remaining if query not in found]
            length = min(2 * length, size)
        return [found[query] for query in range(len(points))]

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

    def _score_without(self, code: int, row: int, point: Tensor) -> float | None:
        """Return the similarity of a point to the mean of the others with its label; None if they are of its group."""
        if self.last_group[0] != code:
            self.last_group = code, self.searched.points_at(self.rows_of[code])
        others = self.groups[self.rows_of[code].numpy()] != self.groups[row]
        if not others.any():
            return None
        mean = frechet_mean(self.searched.manifold, self.last_group[1][torch.from_numpy(others)])
        return float(self.searched.manifold.paired_similarity(point.double(), mean))


def _vote(near: list[int], similarities: list[float], voters: int) -> Decision:
    """Return the label of most voters, if tied that of the nearest, with its score and margin."""
    winner = Counter(near[:voters]).most_common(1)[0][0]  # in the order in which they come first
    others = [similarity for code, similarity in zip(near, similarities, strict=True) if code != winner]
    score = similarities[near.index(winner)]
    return Decision(winner, score, score - others[0] if others else None)
