"""Points with the places and times of their images, which are evidence next to their similarity."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf, isfinite
from pathlib import Path

import torch
from pydantic import PositiveFloat
from torch import Tensor

from dmlkit.datasets.files.sightings import LIMITS, SightingCells, days_of, degrees_of, read_sightings
from dmlkit.embedding.gallery.folder import GalleryFolder
from dmlkit.embedding.images import TABLES
from dmlkit.embedding.manifest import Fusion
from dmlkit.embedding.points import PointSet, PointsInMemory, in_memory
from dmlkit.embedding.search import Neighbors
from dmlkit.errors import UserError
from dmlkit.files.source import PLACE
from dmlkit.metrics.ranking.place import PlacedSpace, Range, Sightings

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
        asked: the points.
        fusion: weight of the evidence.

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
