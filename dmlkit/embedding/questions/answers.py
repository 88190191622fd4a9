"""The neighbours that a search has found, as people and programs read them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from dmlkit.embedding.gallery.manifest import ApproximateIndex
from dmlkit.embedding.searchable import GalleryItem, Searchable


class Neighbor(NamedTuple):
    """One of the nearest."""

    rank: int  # from 1
    similarity: float
    item: GalleryItem

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        item = self.item
        told = {"id": item.id, "label": item.label, "path": item.path}
        return {"rank": self.rank, "similarity": self.similarity, **told}


@dataclass(frozen=True)
class Answers:
    """The nearest of each query, nearest first.

    Args:
        searched: where.
        queries: Q paths.
        similarities: (Q, k).
        rows: (Q, k), of what was searched.
        skipped: one message per query that could not be read.
        index: that has found them, if the search was approximate.
    """

    searched: Searchable
    queries: Sequence[str]
    similarities: Tensor
    rows: Tensor
    skipped: tuple[str, ...]
    index: ApproximateIndex | None = None

    @property
    def k(self) -> int:
        """Neighbours of a query."""
        return self.rows.shape[1]

    def neighbors(self) -> Iterator[tuple[str, list[Neighbor]]]:
        """Each query's path with its neighbours."""
        for path, similarities, rows in zip(self.queries, self.similarities, self.rows, strict=True):
            items = self.searched.items_at(rows)
            found = zip((similarities + 0.0).tolist(), items, strict=True)  # a distance of 0 is no -0
            yield path, [Neighbor(rank, similarity, item) for rank, (similarity, item) in enumerate(found, start=1)]

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "similarity": self.searched.manifest.similarity,
            "k": self.k,
            "recall": self.index.recall if self.index else 1.0,
            "queries": [
                {"path": path, "neighbors": [neighbor.plain() for neighbor in neighbors]}
                for path, neighbors in self.neighbors()
            ],
            "skipped": list(self.skipped),
        }
