"""A gallery as its readers see it: one version of it, whatever is written meanwhile."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dmlkit.embedding.gallery.manifest import (
    TABLE,
    ApproximateIndex,
    GalleryVersion,
    lancedb,
    read_gallery_manifest,
)
from dmlkit.embedding.searchable import GalleryItem
from dmlkit.errors import UserError
from dmlkit.files.arrays import Values
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.numerics.check_points import check_points

IDS = 1000  # looked up at once


class GalleryFolder:
    """A gallery, read at the version that it has now.

    Args:
        path: the folder.

    Raises:
        UserError: there is no gallery, or it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_gallery_manifest(path)
        self._space = self.manifold()
        self.table = open_table(path)
        self.version: int = self.table.version
        self.table.checkout(self.version)
        self.size: int = self.table.count_rows()

    @property
    def run(self) -> Path | None:
        """The run whose model embeds, where it is there still."""
        return Path(self.manifest.run) if Path(self.manifest.run).is_dir() else None

    def manifold(self) -> Manifold:
        """The geometry of the points."""
        return self.manifest.manifold.build(self.manifest.features)

    def __len__(self) -> int:
        """How many images there are."""
        return self.size

    def blocks(self, rows: int) -> Iterator[Tensor]:
        """The points in the order in which they were added, at most ``rows`` rows at a time."""
        kept, count, start = list[Tensor](), 0, 0
        for batch in self.table.search().select(["point"]).to_batches(rows):
            if count + batch.num_rows > rows:
                yield torch.cat(kept)
                kept, count = [], 0
            kept.append(_points(batch.column("point"), self.manifest.dim))  # a batch never spans two files
            self._check(kept[-1], torch.arange(start, start + batch.num_rows))
            count, start = count + batch.num_rows, start + batch.num_rows
        if kept:
            yield torch.cat(kept)

    def points_at(self, rows: Tensor) -> Tensor:
        """The points (M, D) of rows (M,)."""
        found, places = self._take(rows, ["point"])
        points = _points(found.column("point").combine_chunks(), self.manifest.dim)[places]
        self._check(points, rows)
        return points

    def items_at(self, rows: Tensor) -> list[GalleryItem]:
        """What is known of the images of rows (M,)."""
        found, places = self._take(rows, ["id", "label", "path", "thumbnail"])
        items = [GalleryItem(**row) for row in found.to_pylist()]
        return [items[place] for place in places.tolist()]

    def row_addresses(self) -> Values:
        """LanceDB's numbers (N,) of the rows."""
        return self.table.search().select(["added"]).with_row_id(True).to_arrow()["_rowid"].to_numpy()

    @property
    def approximate(self) -> ApproximateIndex | None:
        """The index of this version, if there is one."""
        index = self.manifest.approximate
        return index if index and any(one.name == index.name for one in self.table.list_indices()) else None

    def not_indexed(self) -> int:
        """How many images are not in the index: a search looks at each of them."""
        index = self.approximate
        return self.table.index_stats(index.name).num_unindexed_rows if index else len(self)

    def labels(self) -> list[str | None]:
        """The labels of all images, in their order."""
        batches = self.table.search().select(["label"]).to_batches(65_536)
        return [label for batch in batches for label in batch.column("label").to_pylist()]

    def label_counts(self) -> Counter[str | None]:
        """How many images each label has."""
        return Counter(self.labels())

    def history(self) -> list[GalleryVersion]:
        """All versions that can be restored, the oldest first."""
        return [
            GalleryVersion(found["version"], found["timestamp"], int(found["metadata"]["total_rows"]))
            for found in open_table(self.path).list_versions()
        ]

    def _check(self, points: Tensor, rows: Tensor) -> None:
        def name(place: int) -> str:
            row = rows[place : place + 1]
            return f"{self.path}: image {int(row)} ({self.items_at(row)[0].path})"

        check_points(self._space, points, name, "its files are damaged: bring them back, or create the gallery again")

    def _take(self, rows: Tensor, columns: list[str]) -> tuple[Any, Tensor]:
        """Columns of some rows, each once and in order, and where each of ``rows`` is among them."""
        once, places = rows.unique(return_inverse=True)
        return self.table.take_offsets(once.tolist()).select(columns).to_arrow(), places


def open_table(path: Path) -> Any:
    """The table of a gallery, at its newest version.

    Raises:
        UserError: it is damaged.
    """
    try:
        return lancedb().connect(path).open_table(TABLE)
    except (ValueError, RuntimeError, OSError) as error:
        told = (str(error).splitlines() or [""])[0]
        raise UserError(f"{path}: cannot read this gallery: {told}; bring its files back, or create it anew") from error


def is_any(column: str, values: list[str]) -> str:
    """The condition that a column has one of some values.

    Example:
        >>> is_any("label", ["robin", "crow's"])
        "label IN ('robin', 'crow''s')"
    """
    quoted = ", ".join("'" + value.replace("'", "''") + "'" for value in values)
    return f"{column} IN ({quoted})"


def present(table: Any, ids: list[str]) -> dict[str, str | None]:
    """The labels of those ids that a table has."""
    found: dict[str, str | None] = {}
    for start in range(0, len(ids), IDS):
        chunk = ids[start : start + IDS]
        rows = table.search().where(is_any("id", chunk)).select(["id", "label"]).limit(len(chunk)).to_arrow()
        found |= dict(zip(rows["id"].to_pylist(), rows["label"].to_pylist(), strict=True))
    return found


def _points(column: Any, dim: int) -> Tensor:
    """The points (n, D) of an Arrow column of lists of D floats."""
    return torch.from_numpy(np.array(column.flatten()).reshape(-1, dim))
