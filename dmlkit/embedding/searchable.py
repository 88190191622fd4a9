"""What can be searched: points on a disk with what is known of their images."""

from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from dmlkit.embedding.manifest import Description
from dmlkit.embedding.search import StoredPoints
from dmlkit.manifolds.base import Manifold


class GalleryItem(NamedTuple):
    """What is known of one image of a gallery."""

    id: int | str
    label: str | None
    path: str
    thumbnail: bytes | None = None  # a JPEG


class Searchable(StoredPoints, Protocol):
    """Where to search: a folder of embeddings, or a gallery."""

    @property
    def manifest(self) -> Description:
        """Of the model that embedded it."""
        ...

    @property
    def path(self) -> Path:
        """Where it is."""
        ...

    @property
    def run(self) -> Path | None:
        """The run whose model embeds images for it, where that is known."""
        ...

    def manifold(self) -> Manifold:
        """The geometry of the points."""
        ...

    def items_at(self, rows: Tensor) -> list[GalleryItem]:
        """What is known of the images of rows (M,)."""
        ...
