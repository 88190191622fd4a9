"""Points that are compared by more than their coordinates: by local features of their images, or by place and time.

Matches of local features count next to the similarity of the nearest images; places and times are evidence for all.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf, isfinite
from pathlib import Path

import numpy as np
import torch
from pydantic import PositiveFloat
from torch import Tensor

from dmlkit.datasets.files.table_file import LIMITS, SightingCells, days_of, degrees_of, read_sightings
from dmlkit.errors import UserError
from dmlkit.files.source import PLACE
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.manifolds.base import Manifold
from dmlkit.nearest.scored import CANDIDATES, PlacedSpace, Range, ScoredSpace, Sightings
from dmlkit.nearest.search import Neighbors, PointSearch
from dmlkit.vectors.fusion import ModelChoice, with_local
from dmlkit.vectors.images import TABLES
from dmlkit.vectors.local_features import features_of, match_features
from dmlkit.vectors.manifest import Fusion, LocalFusion
from dmlkit.vectors.points import PointSet, PointsInMemory, in_memory
from dmlkit.vectors.progress_bar import Bar, no_bar

KEPT_NUMBERS = 2**28  # of a gallery's features in memory, 0.5 GB; those of larger galleries are read for each block
AT_ONCE = 16  # queries whose candidates are in memory at once: 36 MB of 100 patches of 112 numbers


class FeatureStore:
    """Local features by number: first those of a gallery, read when they are needed, and then those that were added."""

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


BLOCK_ENTRIES = 2**24  # scores at once: 128 MB


class PlaceFusion(Fusion, frozen=True, extra="forbid", strict=True):
    """Weight of the evidence of place and time, see `Range`."""

    kilometers: PositiveFloat
    """Home range r."""
    spread: PositiveFloat
    """Spread R of different individuals, in km."""
    days: PositiveFloat | None
    """Decay tau; null for none."""

    @property
    def range(self) -> Range:
        """Home range and decay."""
        return Range(self.kilometers, self.spread, inf if self.days is None else self.days)


def check_placed(gallery: PointSet) -> list[SightingCells]:
    """Return the cells of the images of a gallery.

    Raises:
        UserError: it is a fusion of two runs, or no image has a place.
    """
    if gallery.manifest is not None and gallery.manifest.fusion is not None:
        raise UserError(f"--with {PLACE}: {gallery.source} has embeddings of two runs; expected a gallery of one run")
    cells = gallery.sightings if isinstance(gallery, GalleryFolder) else []
    if not any(one.latitude for one in cells):
        raise UserError(
            f"--with {PLACE}: no image of {gallery.source} has a place; create a gallery from a table with the columns "
            "path, label, latitude, longitude and time"
        )
    return cells


def place_gallery(gallery: PointSet, fusion: PlaceFusion) -> PointsInMemory:
    """Return the points of a gallery with their sightings, all in memory.

    Raises:
        UserError: see `check_placed`, or no place has a time although the evidence decays.
    """
    return _placed(gallery, check_placed(gallery), fusion, gallery.source)


def place_queries(images: Path, asked: PointSet, fusion: PlaceFusion) -> PointsInMemory:
    """Return points of queries with their sightings.

    Args:
        images: where they are from: a table, or a gallery.

    Raises:
        UserError: they are from something else, the table lacks a column, a cell is out of range, or no place is known.
    """
    if isinstance(asked, GalleryFolder):
        return _placed(asked, asked.sightings, fusion, asked.source)
    if images.suffix.lower() not in TABLES or not isinstance(asked, PointsInMemory) or asked.rows is None:
        raise UserError(
            f"--with {PLACE}: {images} is no table and has no places; give a table with the columns path, latitude, "
            "longitude and time"
        )
    cells = read_sightings(images)
    return _placed(asked, [cells[row] for row in asked.rows.tolist()], fusion, str(images))


def _placed(points: PointSet, cells: Sequence[SightingCells], fusion: PlaceFusion, where: str) -> PointsInMemory:
    """Return points with their sightings; times count only where the evidence decays."""
    degrees = [[degrees_of(getattr(one, column), column, where) for one in cells] for column in LIMITS]
    decays = isfinite(fusion.range.days)
    days = [days_of(one.time, where) if decays else 0.0 for one in cells]
    sightings = Sightings.at(*(torch.tensor(column, dtype=torch.float64) for column in (*degrees, days)))
    if not (sightings.places.isfinite().all(1) & sightings.days.isfinite()).any():
        needed = "latitude, longitude and time" if decays else "latitude and longitude"
        raise UserError(
            f"--with {PLACE}: no image of {where} has {needed}; fill these columns, or leave the option out"
        )
    loaded = in_memory(points)
    space = PlacedSpace(loaded.manifold, fusion.range, fusion.share)
    return replace(loaded, manifold=space, points=space.placed(loaded.points, sightings))


class PlacedGallery:
    """Search by similarity and evidence, which compares each query with all points.

    Args:
        space: geometry of the points and their sightings.
        points: (N, D + 4).
    """

    def __init__(self, space: PlacedSpace, points: Tensor) -> None:
        self.space, self.points = space, points

    @torch.no_grad()
    def search(self, queries: Tensor, k: int) -> Neighbors:
        """Return the k most similar points of each query (Q, D + 4); of equally similar ones the lower index first."""
        found: list[Neighbors] = []
        for part in queries.split(max(1, BLOCK_ENTRIES // len(self.points))):
            scores, rows = self.space.similarity(part, self.points).sort(dim=1, descending=True, stable=True)
            found.append(Neighbors(scores[:, :k], rows[:, :k]))
        return Neighbors.joined(found, k)
