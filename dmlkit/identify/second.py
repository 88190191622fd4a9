"""Matches of the local features of a gallery's images.

Images are numbered: those of the gallery come first, and then those that are added to be compared with them.
"""

import torch
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.gallery.folder import GalleryFolder, gallery_of
from dmlkit.nearest.matches import match_scores
from dmlkit.nearest.rescore import CANDIDATES, Rescorer
from dmlkit.vectors.fusion import ModelChoice, with_local
from dmlkit.vectors.in_memory import features_of
from dmlkit.vectors.manifest import LocalFusion
from dmlkit.vectors.points import PointSet
from dmlkit.vectors.progress_bar import Bar, no_bar

KEPT_NUMBERS = 2**28  # of a gallery's features in memory, 0.5 GB; those of larger galleries are read for each block


class LocalMatches:
    """Matches of the local features that a gallery keeps, in the share of `LocalFusion`, for the nearest images."""

    def __init__(self, gallery: GalleryFolder, local: LocalFusion) -> None:
        self.gallery, self.local = gallery, local
        self.added = torch.empty(0, *local.shape, dtype=torch.float16)
        count = len(gallery) if len(gallery) * local.shape[0] * local.shape[1] <= KEPT_NUMBERS else 0
        self.kept, self.is_read = torch.empty(count, *local.shape, dtype=torch.float16), torch.zeros(count).bool()
        self.rescorer = Rescorer(match_scores(self.at), local.share, CANDIDATES, "matches")

    @classmethod
    def of(cls, opened: PointSet) -> "LocalMatches | None":
        """Return the matches that a gallery with local features compares; None for other points."""
        gallery = gallery_of(opened)
        return None if gallery is None or gallery.manifest.local is None else cls(gallery, gallery.manifest.local)

    def add(self, features: Tensor) -> Tensor:
        """Add the features of images (M, P, C), and return the numbers (M,) of the images."""
        first = len(self.gallery) + len(self.added)
        self.added = torch.cat([self.added, features])
        return torch.arange(first, first + len(features))

    def at(self, numbers: Tensor) -> Tensor:
        """Return the features (M, P, C) float16 of images; those of the gallery are read when they are needed."""
        stored = numbers < len(self.gallery)
        features = torch.empty(len(numbers), *self.local.shape, dtype=torch.float16)
        features[~stored] = self.added[numbers[~stored] - len(self.gallery)]
        rows = numbers[stored]
        if not len(self.kept):
            features[stored] = self.gallery.local_at(rows)
            return features
        missing = rows[~self.is_read[rows]].unique()
        if len(missing):
            self.kept[missing], self.is_read[missing] = self.gallery.local_at(missing), True
        features[stored] = self.kept[rows]
        return features

    def ask(self, asked: PointSet, model: ModelChoice, rows: Tensor | None = None, bar: Bar = no_bar) -> Tensor:
        """Add the images of queries, or those in ``rows`` (M,), and return their numbers."""
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
