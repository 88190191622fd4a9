"""A gallery as its readers see it: one version, even if others are written meanwhile."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dmlkit.datasets.files.table_file import UNKNOWN_SIGHTING, SightingCells
from dmlkit.embedding.gallery.files import ApproximateIndex, GalleryState, check_files, way_back
from dmlkit.embedding.gallery.manifest import (
    BLOCK,
    CHECKED,
    CHECKSUM,
    check_content,
    check_rows,
    manifest_at,
    read_gallery_manifest,
    state_of,
)
from dmlkit.embedding.gallery.table import open_table, reading
from dmlkit.embedding.items import PointItem
from dmlkit.errors import UserError
from dmlkit.files.arrays import Values
from dmlkit.files.image_file import Box, box_of_cell
from dmlkit.manifolds.base import check_points
from dmlkit.run_folder.folder import find_run

IDS = 1000  # looked up at once
KEPT = 2**26  # bytes of points that stay in memory: for LanceDB to look rows up takes milliseconds each time
LARGE_ROWS = 1024  # with local features, read at once: 23 MB of 100 patches of 112 numbers


class GalleryFolder:
    """Gallery, read at its version at this moment; a `PointSet`.

    Raises:
        UserError: there is no gallery, or it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        manifest = read_gallery_manifest(path)
        check_files(path, manifest)
        self.table = open_table(path)
        with reading(path):
            self.version: int = self.table.version
            self.table.checkout(self.version)
            self.size: int = self.table.count_rows()
            self.manifest = manifest_at(path, manifest, self.table)
        self.manifold = self.manifest.build_manifold()
        self.has_checksums = check_content(path, self.manifest, self.table)
        self._kept: Tensor | None = None

    @property
    def run(self) -> Path | None:
        """Run whose model embeds, if it still exists or moved together with the gallery."""
        return find_run(Path(self.manifest.run), self.path)

    @property
    def source(self) -> str:
        return str(self.path)

    @property
    def skipped(self) -> tuple[str, ...]:
        """No messages: images that cannot be read are not added."""
        return ()

    def __len__(self) -> int:
        return self.size

    def blocks(self, rows: int) -> Iterator[Tensor]:
        """Yield the points in the order in which they were added, at most ``rows`` rows at a time."""
        if 4 * self.size * self.manifest.dim > KEPT:
            yield from self._blocks(rows)
            return
        if self._kept is None:
            self._kept = torch.cat([torch.empty(0, self.manifest.dim), *self._blocks(rows)])
        yield from self._kept.split(rows) if self.size else ()

    def _blocks(self, rows: int) -> Iterator[Tensor]:
        """Read the points."""
        kept, count, start = list[Tensor](), 0, 0
        for batch in self.batches(["point"], rows):
            if count + batch.num_rows > rows:
                yield torch.cat(kept)
                kept, count = [], 0
            kept.append(_points(batch.column("point"), self.manifest.dim))  # a batch never spans two files
            self._check(kept[-1], torch.arange(start, start + batch.num_rows))
            count, start = count + batch.num_rows, start + batch.num_rows
        if kept:
            yield torch.cat(kept)

    def points_at(self, rows: Tensor) -> Tensor:
        if self._kept is not None:
            return self._kept[rows]
        found, places = self._take(rows, ["point"])
        points = _points(found.column("point").combine_chunks(), self.manifest.dim)[places]
        self._check(points, rows)
        return points

    def local_at(self, rows: Tensor) -> Tensor:
        """Return the local features (M, P, C) float16 of rows (M,), of a gallery that has them."""
        assert self.manifest.local is not None
        found, places = self._take(rows, ["local"])
        content = bytearray().join(found.column("local").to_pylist())
        return torch.frombuffer(content, dtype=torch.float16).view(-1, *self.manifest.local.shape)[places]

    def items_at(self, rows: Tensor) -> list[PointItem]:
        names = ["id", "label", "path", "thumbnail"]
        found, places = self._take(rows, [*names, *self._box_column])
        boxes = [box_of_cell(cell) for name in self._box_column for cell in found.column(name).to_pylist()]
        columns = (found.column(name).to_pylist() for name in names)
        items = [PointItem(*cells) for cells in zip(*columns, boxes or [None] * len(found), strict=True)]
        return [items[place] for place in places.tolist()]

    def row_addresses(self) -> Values:
        """Return LanceDB's numbers (N,) of the rows."""
        with reading(self.path):
            return self.table.search().select(["added"]).with_row_id(True).to_arrow()["_rowid"].to_numpy()

    @property
    def approximate(self) -> ApproximateIndex | None:
        """Approximate index of this version, if there is one."""
        index = self.manifest.approximate
        with reading(self.path):
            return index if index and any(one.name == index.name for one in self.table.list_indices()) else None

    @property
    def labels(self) -> list[str | None]:
        return self._column("label")

    @property
    def paths(self) -> list[str]:
        return self._column("path")

    @property
    def boxes(self) -> list[Box | None]:
        """Boxes of all images, in their order; None for a full image, and in galleries of earlier versions."""
        return [box_of_cell(cell) for cell in self._column("box")] if self._box_column else [None] * self.size

    @property
    def ids(self) -> list[str]:
        """Ids of all images, in their order."""
        return self._column("id")

    def _column(self, name: str) -> list[Any]:
        return [cell for batch in self.batches([name]) for cell in batch.column(name).to_pylist()]

    @property
    def sightings(self) -> list[SightingCells]:
        """Places and times of all images, in their order; all unknown in galleries of earlier versions."""
        names = SightingCells._fields
        if names[0] not in self.table.schema.names:
            return [UNKNOWN_SIGHTING] * self.size
        rows = (zip(*(batch.column(name).to_pylist() for name in names), strict=True) for batch in self.batches(names))
        return [SightingCells(*row) for part in rows for row in part]

    def label_counts(self) -> Counter[str | None]:
        """Return the number of images of each label."""
        return Counter(self.labels)

    def state(self) -> GalleryState:
        """Return the contents of this version."""
        self.check(["label"])
        with reading(self.path):
            return state_of(self.table, self.manifest.approximate)

    def check(self, columns: Sequence[str] | None = None) -> None:
        """Read columns of all rows, and raise an error if they are not what was written.

        Args:
            columns: the columns. Default: all with a checksum, and the files of the gallery.

        Raises:
            UserError: they cannot be read, or have other checksums.
        """
        if columns is None:
            columns = [name for name in CHECKED if name in self.table.schema.names]
            check_files(self.path, self.manifest, self.version, trust_stamps=False)
        for _ in self.batches(columns, LARGE_ROWS if "local" in columns else BLOCK):
            pass

    def batches(self, columns: Sequence[str], rows: int = BLOCK) -> Iterator[Any]:
        """Yield columns of all rows in order, at most ``rows`` rows at a time."""
        count, checked = 0, [name for name in columns if name in CHECKED]
        with reading(self.path):
            for batch in self.table.search().select(self._with_checksums(columns)).to_batches(rows):
                if self.has_checksums:
                    check_rows(self.path, batch, checked, range(count, count + batch.num_rows))
                count += batch.num_rows
                yield batch
        if count != self.size:
            raise UserError(
                f"{self.path}: this gallery is damaged: found {count} rows, expected {self.size}; {way_back(self.path)}"
            )

    def _check(self, points: Tensor, rows: Tensor) -> None:
        def name(place: int) -> str:
            row = rows[place : place + 1]
            return f"{self.path}: image {int(row)} ({self.items_at(row)[0].path})"

        check_points(self.manifold, points, name, "its files are damaged: bring them back, or create the gallery again")

    def _take(self, rows: Tensor, columns: list[str]) -> tuple[Any, Tensor]:
        """Return columns of some rows, each once and in order, and the place of each of ``rows`` among them."""
        once, places = rows.unique(return_inverse=True)
        with reading(self.path):
            found = self.table.take_offsets(once.tolist()).select(self._with_checksums(columns)).to_arrow()
            found = found.combine_chunks()
            if len(found) != len(once):
                raise ValueError(f"{len(found)} of {len(once)} rows are there")
            if self.has_checksums:
                for batch in found.to_batches():  # one, or none of no rows
                    check_rows(self.path, batch, columns, once.tolist())
        return found, places

    @property
    def _box_column(self) -> list[str]:
        return ["box"] if "box" in self.table.schema.names else []

    def _with_checksums(self, columns: Sequence[str]) -> list[str]:
        return [*columns, CHECKSUM] if self.has_checksums else list(columns)


def is_any(column: str, values: list[str]) -> str:
    """Return the condition that a column has one of some values.

    Example:
        >>> is_any("label", ["robin", "crow's"])
        "label IN ('robin', 'crow''s')"
    """
    quoted = ", ".join("'" + value.replace("'", "''") + "'" for value in values)
    return f"{column} IN ({quoted})"


def present(table: Any, ids: list[str]) -> dict[str, str | None]:
    """Return the labels of those ids that a table has."""
    found: dict[str, str | None] = {}
    for start in range(0, len(ids), IDS):
        chunk = ids[start : start + IDS]
        rows = table.search().where(is_any("id", chunk)).select(["id", "label"]).limit(len(chunk)).to_arrow()
        found |= dict(zip(rows["id"].to_pylist(), rows["label"].to_pylist(), strict=True))
    return found


def _points(column: Any, dim: int) -> Tensor:
    """Return the points (n, D) of an Arrow column of lists of D floats."""
    return torch.from_numpy(np.array(column.flatten()).reshape(-1, dim))
