"""Neighbors that a search has found, as tables, JSON and CSV. This module imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dmlkit.embedding.gallery.files import ApproximateIndex
from dmlkit.embedding.items import PointItem
from dmlkit.files.outputs import NEIGHBOR_COLUMNS, write_table

if TYPE_CHECKING:
    from dmlkit.datasets.files.dataset import Box
    from dmlkit.metrics.ranking.rerank import Rerank


class Searched(Protocol):
    """What was searched: points, or an exported gallery."""

    @property
    def source(self) -> str:
        """Name for people."""
        ...

    def __len__(self) -> int:
        """Return the number of images."""
        ...

    def items_at(self, rows: Any) -> list[PointItem]:
        """Return what is known of the images of rows (M,)."""
        ...


class Neighbor(NamedTuple):
    """One neighbor of a query."""

    rank: int  # from 1
    similarity: float
    item: PointItem

    def plain(self) -> dict[str, Any]:
        """Return plain data."""
        item = self.item
        told = {"id": item.id, "label": item.label, "path": item.path}
        return {"rank": self.rank, "similarity": self.similarity, **told}


@dataclass(frozen=True)
class Answers:
    """Nearest neighbors of each query, nearest first.

    Args:
        searched: what was searched.
        queries: Q paths, or names of groups of images.
        similarities: (Q, k), a tensor or an array.
        rows: (Q, k) rows of what was searched, in the same form.
        skipped: one message per query that could not be read.
        pictures: Q paths of the images that show the queries.
        boxes: Q boxes of the queries in these images; None for a full image.
        similarity_name: name of the similarity that orders the neighbors.
        index: index that found them, if the search was approximate.
        rerank: how the gallery was re-ranked for each query, if it was.
    """

    searched: Searched
    queries: Sequence[str]
    similarities: Any
    rows: Any
    skipped: Sequence[str]
    pictures: Sequence[str]
    boxes: "Sequence[Box | None]"
    similarity_name: str
    index: ApproximateIndex | None = None
    rerank: "Rerank | None" = None

    @property
    def k(self) -> int:
        """Number of neighbors per query."""
        return self.rows.shape[1]

    def neighbors(self) -> Iterator[tuple[str, list[Neighbor]]]:
        """Yield each query's path with its neighbors."""
        for path, similarities, rows in zip(self.queries, self.similarities, self.rows, strict=True):
            items = self.searched.items_at(rows)
            found = zip((similarities + 0.0).tolist(), items, strict=True)  # a distance of 0 is no -0
            yield path, [Neighbor(rank, similarity, item) for rank, (similarity, item) in enumerate(found, start=1)]

    def plain(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "similarity": self.similarity_name,
            "rerank": None if self.rerank is None else {"method": self.rerank.name, **self.rerank._asdict()},
            "k": self.k,
            "recall": self.index.recall if self.index else 1.0,
            "queries": [
                {
                    "path": path,
                    "box": None if box is None else list(box[:4]),
                    "neighbors": [neighbor.plain() for neighbor in neighbors],
                }
                for box, (path, neighbors) in zip(self.boxes, self.neighbors(), strict=True)
            ],
            "skipped": list(self.skipped),
        }


def write_neighbors(answers: Answers, path: Path) -> None:
    """Write a CSV table, one row per query and neighbor."""
    rows = (
        (query, rank, f"{similarity:.9g}", item.id, item.label or "", item.path, *(box[:4] if box else [""] * 4))
        for box, (query, neighbors) in zip(answers.boxes, answers.neighbors(), strict=True)
        for rank, similarity, item in neighbors
    )
    write_table(path, NEIGHBOR_COLUMNS, rows)
