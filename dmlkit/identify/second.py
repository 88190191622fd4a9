"""Second similarities of a gallery's images: matches of their local features, or evidence of their places and times.

Images are numbered: those of the gallery come first, and then those that are added to be compared with them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from difflib import get_close_matches
from math import inf, isfinite
from pathlib import Path

import torch
from pydantic import PositiveFloat
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.files.exif import exif_sightings
from dmlkit.files.image_table import (
    LIMITS,
    SIGHTING,
    SightingCells,
    days_of,
    degrees_of,
    has_sightings,
    sighting_cells,
    warn_of_unplaced,
)
from dmlkit.files.source import PLACE
from dmlkit.gallery.folder import GalleryFolder, gallery_of
from dmlkit.nearest.matches import match_scores
from dmlkit.nearest.place import Range, Sightings, evidence_of
from dmlkit.nearest.rescore import CANDIDATES, Rescorer
from dmlkit.vectors.fusion import ModelChoice, with_local
from dmlkit.vectors.images import query_table
from dmlkit.vectors.local_features import features_of
from dmlkit.vectors.manifest import Fusion, LocalFusion
from dmlkit.vectors.points import PointSet
from dmlkit.vectors.progress_bar import Bar, no_bar

KEPT_NUMBERS = 2**28  # of a gallery's features in memory, 0.5 GB; those of larger galleries are read for each block


class Second(ABC):
    """Second similarity of the images of a gallery.

    Attributes:
        rescorer: the similarity.
        added: (M, ...) what is compared of images that were added, see `add`.
    """

    rescorer: Rescorer
    added: Tensor

    def __init__(self, gallery: GalleryFolder) -> None:
        self.gallery = gallery

    def add(self, compared: Tensor) -> Tensor:
        """Add what is compared of images (M, ...), and return the numbers (M,) of the images."""
        first = self._stored + len(self.added)
        self.added = torch.cat([self.added, compared])
        return torch.arange(first, first + len(compared))

    @property
    def _stored(self) -> int:
        """Number of images that are not in ``added``."""
        return 0

    @abstractmethod
    def ask(
        self, asked: PointSet, images: Path, model: ModelChoice, rows: Tensor | None = None, bar: Bar = no_bar
    ) -> Tensor:
        """Add the images of queries, and return their numbers.

        Args:
            asked: points of images that were embedded now, or of a gallery.
            rows: (M,) the rows of the queries that are wanted. Default: all.
        """


class LocalMatches(Second):
    """Matches of the local features that a gallery keeps, in the share of `LocalFusion`, for the nearest images."""

    def __init__(self, gallery: GalleryFolder, local: LocalFusion) -> None:
        super().__init__(gallery)
        self.local, self.added = local, torch.empty(0, *local.shape, dtype=torch.float16)
        count = len(gallery) if len(gallery) * local.shape[0] * local.shape[1] <= KEPT_NUMBERS else 0
        self.kept, self.is_read = torch.empty(count, *local.shape, dtype=torch.float16), torch.zeros(count).bool()
        self.rescorer = Rescorer(match_scores(self.at), local.share, CANDIDATES, "matches")

    @classmethod
    def of(cls, opened: PointSet) -> "LocalMatches | None":
        """Return the matches that a gallery with local features compares; None for other points."""
        gallery = gallery_of(opened)
        return None if gallery is None or gallery.manifest.local is None else cls(gallery, gallery.manifest.local)

    @property
    def _stored(self) -> int:
        return len(self.gallery)

    def at(self, numbers: Tensor) -> Tensor:
        """Return the features (M, P, C) float16 of images; those of the gallery are read when they are needed."""
        found, stored = torch.empty(len(numbers), *self.local.shape, dtype=torch.float16), numbers < self._stored
        found[~stored] = self.added[numbers[~stored] - self._stored]
        rows = numbers[stored]
        if not len(self.kept):
            found[stored] = self.gallery.local_at(rows)
            return found
        missing = rows[~self.is_read[rows]].unique()
        if len(missing):
            self.kept[missing], self.is_read[missing] = self.gallery.local_at(missing), True
        found[stored] = self.kept[rows]
        return found

    def ask(
        self, asked: PointSet, images: Path, model: ModelChoice, rows: Tensor | None = None, bar: Bar = no_bar
    ) -> Tensor:
        chosen, local = torch.arange(len(asked)) if rows is None else rows, self.local
        if not len(chosen):
            return chosen
        gallery = gallery_of(asked)
        if gallery is not None and gallery.manifest.local == local:
            return self.add(gallery.local_at(chosen))
        if asked.images is not None:
            embedder, dataset, places, features = asked.images
            if features is not None:
                return self.add(features[chosen])
            trained = with_local(embedder, local, self.gallery.source)
            return self.add(features_of(local, trained, model.start(), dataset, places[chosen], bar))
        raise UserError(
            f"{asked.source}: has no patches, which {self.gallery.source} compares; give the images themselves"
        )


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


class Places(Second):
    """Evidence of the places and times of a gallery's images, in the share of `PlaceFusion`."""

    def __init__(self, gallery: PointSet, fusion: PlaceFusion) -> None:
        super().__init__(check_placed(gallery))
        self.fusion = fusion
        self.added = self._sightings(sightings_in(self.gallery), gallery.source)
        self.rescorer = Rescorer(self._evidence, fusion.share, what="place")

    def _evidence(self, queries: Tensor, items: Tensor) -> Tensor:
        return evidence_of(Sightings(self.added[:, :-1], self.added[:, -1]), self.fusion.range)(queries, items)

    def ask(
        self, asked: PointSet, images: Path, model: ModelChoice, rows: Tensor | None = None, bar: Bar = no_bar
    ) -> Tensor:
        gallery = gallery_of(asked)
        table = None if gallery is not None else query_table(images, None)
        if gallery is not None:
            cells, where = sightings_in(gallery), asked.source
        elif table is not None and has_sightings(table) and asked.images is not None:
            read, where = sighting_cells(table), str(images)
            cells = [read[row] for row in asked.images.rows.tolist()]
        elif not any(one.latitude for one in exif_sightings(asked.paths)):
            names = [] if table is None else table.table.column_names
            near = next((name for side in SIGHTING if side not in names for name in get_close_matches(side, names)), "")
            raise UserError(
                f"--with {PLACE}: {images} has no places; give a table with the columns path, latitude, longitude and "
                "time, or photos with these EXIF data" + (f"; did you mean {near!r}?" if near else "")
            )
        else:
            cells, where = exif_sightings(asked.paths), str(images)
        numbers = self.add(self._sightings(cells, where))
        return numbers if rows is None else numbers[rows]

    def _sightings(self, cells: Sequence[SightingCells], where: str) -> Tensor:
        """Return places and days (N, 4) float64 of sightings; times count only where the evidence decays."""
        degrees = [[degrees_of(getattr(one, column), column, where) for one in cells] for column in LIMITS]
        decays = isfinite(self.fusion.range.days)
        days = [days_of(one.time, where) if decays else 0.0 for one in cells]
        found = Sightings.at(*(torch.tensor(column, dtype=torch.float64) for column in (*degrees, days)))
        if not (found.places.isfinite().all(1) & found.days.isfinite()).any():
            needed = "latitude, longitude and time" if decays else "latitude and longitude"
            raise UserError(
                f"--with {PLACE}: no image of {where} has {needed}; fill these columns, or leave the option out"
            )
        warn_of_unplaced(cells, where)
        return torch.cat([found.places, found.days[:, None]], dim=1)


def sightings_in(gallery: GalleryFolder) -> list[SightingCells]:
    """Return where and when the images of a gallery were taken: by its table, or else by the EXIF data of the files."""
    found = gallery.sightings
    return found if any(one.latitude for one in found) else exif_sightings(gallery.paths)


def check_placed(gallery: PointSet) -> GalleryFolder:
    """Return a gallery whose images have places."""
    if gallery.manifest is not None and gallery.manifest.fusion is not None:
        raise UserError(f"--with {PLACE}: {gallery.source} has embeddings of two runs; expected a gallery of one run")
    found = gallery_of(gallery)
    if found is None or not any(one.latitude for one in sightings_in(found)):
        raise UserError(
            f"--with {PLACE}: no image of {gallery.source} has a place; create a gallery from a table with the columns "
            "path, label, latitude, longitude and time, or from photos with these EXIF data"
        )
    return found
