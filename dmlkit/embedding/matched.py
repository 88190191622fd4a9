"""Points with the local features of their images, whose matches count next to the similarity of the nearest images."""

from dataclasses import replace
from math import inf

import numpy as np
import torch
from torch import Tensor

from dmlkit.embedding.fusion import ModelChoice, with_local
from dmlkit.embedding.gallery.folder import GalleryFolder
from dmlkit.embedding.local_features import features_of, match_features
from dmlkit.embedding.manifest import LocalFusion
from dmlkit.embedding.points import PointSet, PointsInMemory, in_memory
from dmlkit.embedding.progress_bar import Bar, no_bar
from dmlkit.embedding.search import Neighbors, PointSearch
from dmlkit.errors import UserError
from dmlkit.manifolds.base import Manifold
from dmlkit.metrics.ranking.local import CANDIDATES
from dmlkit.metrics.ranking.scored import ScoredSpace

KEPT_NUMBERS = 2**28  # of a gallery's features in memory, 0.5 GB; those of larger galleries are read for each block
AT_ONCE = 16  # queries whose candidates are in memory at once: 36 MB of 100 patches of 112 numbers


class FeatureStore:
    """Local features by number: first those of a gallery, read when they are needed, and then those that were added.

    Args:
        gallery: the gallery, if there is one.
        local: kind of the features.
    """

    def __init__(self, gallery: GalleryFolder | None, local: LocalFusion) -> None:
        self.gallery, self.local, self.size = gallery, local, 0 if gallery is None else len(gallery)
        self.added = torch.empty(0, *local.shape, dtype=torch.float16)
        count = self.size if self.size * local.shape[0] * local.shape[1] <= KEPT_NUMBERS else 0
        self.kept, self.is_kept = torch.empty(count, *local.shape, dtype=torch.float16), torch.zeros(count).bool()

    def add(self, features: Tensor) -> Tensor:
        """Add features (M, P, C), and return their numbers (M,)."""
        first = self.size + len(self.added)
        self.added = torch.cat([self.added, features])
        return torch.arange(first, first + len(features))

    def at(self, numbers: Tensor) -> Tensor:
        """Return the features (M, P, C) float16 of numbers (M,) int64."""
        found, stored = torch.empty(len(numbers), *self.local.shape, dtype=torch.float16), numbers < self.size
        found[~stored] = self.added[numbers[~stored] - self.size]
        rows = numbers[stored]
        if self.gallery is None:
            return found
        if not len(self.kept):
            found[stored] = self.gallery.local_at(rows)
            return found
        missing = rows[~self.is_kept[rows]].unique()
        if len(missing):
            self.kept[missing], self.is_kept[missing] = self.gallery.local_at(missing), True
        found[stored] = self.kept[rows]
        return found


class MatchedSpace(ScoredSpace):
    """Geometry of points that are followed by the number of their local features, in float64.

    The similarity is that of the points with the score of the matches, in the shares of `LocalFusion`.

    Args:
        space: geometry of the points.
        store: the features.
    """

    def __init__(self, space: Manifold, store: FeatureStore) -> None:
        super().__init__(space, 1, "matches")
        self.store, self.share = store, store.local.share

    def matched(self, points: Tensor, numbers: Tensor) -> Tensor:
        """Return points (N, D) followed by the numbers (N,) of their features, (N, D + 1) float64."""
        return torch.cat([points.double(), numbers[:, None].double()], dim=1)

    def without_matches(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the similarities of points x (N, D + 1) and y (M, D + 1) without a match, (N, M)."""
        return (1 - self.share) * self.space.similarity(x[:, :-1], y[:, :-1])

    def similarity(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the similarities of points x (N, D + 1) and y (M, D + 1), (N, M), of which each pair is matched."""
        numbers = y[:, -1].long().expand(len(x), -1)
        return self.without_matches(x, y) + self.share * self.matches(x[:, -1].long(), numbers)

    def paired_similarity(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the similarities of points x and y (N, D + 1): (N,)."""
        alone = self.space.paired_similarity(x[:, :-1], y[:, :-1])
        matches = self.matches(x[:, -1].long(), y[:, -1:].long())[:, 0]
        return (1 - self.share) * alone + self.share * matches

    def matches(self, queries: Tensor, items: Tensor) -> Tensor:
        """Return how well images match, (Q, K) float64, given the numbers of features (Q,) and of K others, (Q, K)."""
        found = torch.empty(items.shape, dtype=torch.float64)
        for rows in torch.arange(len(queries)).split(AT_ONCE):
            once, places = items[rows].unique(return_inverse=True)
            match = match_features(self.store.local.run, self.store.at(queries[rows]), self.store.at(once))
            for row, place in zip(rows.tolist(), places, strict=True):
                found[row] = match(row - int(rows[0]), place)
        return found


class MatchedSearch:
    """Search by similarity, which orders the 100 nearest images again by similarity and matches.

    Matches are never negative, so that an image without one is never before one of the 100.

    Args:
        searched: points with the numbers of their features, whose geometry is a `MatchedSpace`.
        base: search of the points alone.
    """

    def __init__(self, searched: PointsInMemory, base: PointSearch) -> None:
        assert isinstance(searched.manifold, MatchedSpace)
        self.space, self.numbers, self.base = searched.manifold, searched.points[:, -1].long(), base

    @torch.no_grad()
    def search(self, queries: Tensor, k: int) -> Neighbors:
        """Return the k most similar points of each query (Q, D + 1)."""
        return self.search_others(queries, k, np.zeros(len(self.numbers), np.int64), np.full(len(queries), -1))

    @torch.no_grad()
    def search_others(self, queries: Tensor, k: int, units: np.ndarray, own: np.ndarray) -> Neighbors:
        """Return the k most similar points of each query (Q, D + 1), those of its own unit with a similarity of -inf.

        Args:
            queries: the queries.
            k: number of neighbors.
            units: (N,) integers from 0, the unit of each point.
            own: (Q,) the unit of each query, or -1.
        """
        width = min(max(k, CANDIDATES), len(self.numbers))
        left_out = int(np.bincount(units)[own[own >= 0]].max(initial=0))
        near = self.base.search(queries[:, :-1].float(), min(width + left_out, len(self.numbers)))
        scores = near.similarities.double()
        scores[torch.from_numpy(units[near.indices.numpy()] == own[:, None])] = -inf
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        scores, rows = scores[:, :width], near.indices.gather(1, order)[:, :width]
        matches = torch.zeros_like(scores)
        matches[:, :CANDIDATES] = self.space.matches(queries[:, -1].long(), self.numbers[rows[:, :CANDIDATES]])
        scores = torch.where(scores == -inf, scores, (1 - self.space.share) * scores + self.space.share * matches)
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        return Neighbors(scores[:, :k], rows.gather(1, order)[:, :k])


def matched_gallery(opened: PointSet) -> PointsInMemory | None:
    """Return the points of a gallery with the numbers of their features; None if it has no local features."""
    if not isinstance(opened, GalleryFolder) or opened.manifest.local is None:
        return None
    space = MatchedSpace(opened.manifold, FeatureStore(opened, opened.manifest.local))
    found = in_memory(opened)
    return replace(found, manifold=space, points=space.matched(found.points, torch.arange(len(found))))


def matched_queries(
    searched: PointsInMemory, asked: PointSet, model: ModelChoice, rows: Tensor | None = None, bar: Bar = no_bar
) -> PointsInMemory:
    """Return queries with the numbers of their features, which are added to those of a gallery.

    Args:
        searched: see `matched_gallery`.
        asked: points of images that were embedded now, or of a gallery with the same features.
        model: device.
        rows: (M,) the rows of the queries that are wanted. Default: all.
        bar: shows the images.

    Raises:
        UserError: the queries have no features, or those of another network.
    """
    assert isinstance(searched.manifold, MatchedSpace)
    space, store = searched.manifold, searched.manifold.store
    chosen = torch.arange(len(asked)) if rows is None else rows
    if not len(chosen):
        features = store.added[:0]
    elif isinstance(asked, GalleryFolder) and asked.manifest.local == store.local:
        features = asked.local_at(chosen)
    elif isinstance(asked, PointsInMemory) and asked.local is not None:
        features = asked.local[chosen]
    elif isinstance(asked, PointsInMemory) and asked.trained and asked.dataset and asked.rows is not None:
        trained = with_local(asked.trained, store.local, searched.source)
        features = features_of(store.local, trained, model.start(), asked.dataset, asked.rows[chosen], bar)
    else:
        raise UserError(
            f"{asked.source}: has no {store.local.what}, which {searched.source} compares; give the images themselves"
        )
    loaded = in_memory(asked)
    kept = chosen.tolist()
    return replace(
        loaded,
        manifold=space,
        points=space.matched(loaded.points[chosen], store.add(features)),
        paths=[loaded.paths[row] for row in kept],
        labels=[loaded.labels[row] for row in kept],
        rows=None if loaded.rows is None else loaded.rows[chosen],
        local=None,
        stored=loaded.stored if rows is None else None,
    )
