"""A gallery as its readers see it: one version, even if others are written meanwhile."""

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.files.arrays import Values
from dmlkit.files.image_file import Box, box_of_cell
from dmlkit.files.where import Where, cells_of, columns_of
from dmlkit.gallery.files import VECTORS, ApproximateIndex, damaged, read_rows, thumbnail_file
from dmlkit.gallery.manifest import GalleryManifest
from dmlkit.manifolds.base import find_invalid_point
from dmlkit.run_folder.folder import find_run
from dmlkit.vectors.points import PointItem, PointSet, PointsOnDisk, taken
from dmlkit.vectors.store import DTYPES, gathered, open_part

KEPT = 2**28  # bytes of points that are read when a gallery is opened, in 0.15 s, and that stay in memory if scattered
RUN = 1024  # rows on average that are read where they are in their files; shorter runs would cost more than copies


class GalleryFolder(PointsOnDisk):
    """Gallery, read at its newest version at this moment; a `PointSet`.

    Args:
        where: conditions that its images fulfill; others are left out. Its index is of all images, so that it is not
            used.
    """

    skipped: tuple[str, ...] = ()  # images that cannot be read are not added

    def __init__(self, path: Path, where: Where | None = None) -> None:
        import pyarrow as pa

        self.path, self.where = path, where
        self.manifest = GalleryManifest.of(path)
        newest = self.manifest.versions[-1]
        self.version, self.table = newest.number, read_rows(path, newest)
        if where is not None:
            columns = {name: self.table[name] for name in ("id", "label", "path")}
            rows = where.rows(cells_of(columns) | self.cells(), str(path), len(self.table))
            self.table = self.table.take(pa.array(rows, pa.int64()))
        self.rows: Sequence[int] = range(len(self.table))  # of those among which `limited` looked
        self.manifold = self.manifest.build_manifold()
        local = self.manifest.local
        self._shapes: dict[str, tuple[int, ...]] = {"points": (self.manifest.dim,)}
        self._shapes |= {"local": local.shape} if local else {}
        self._read: dict[str, dict[str, Tensor]] = {}
        self._place()
        for name in self.parts:
            self._open(name, is_read=self._is_small)  # now: the first answer then takes no longer than the others

    def _place(self) -> None:
        """Look up where the points of the table's rows are."""
        encoded = self.table["part"].combine_chunks().dictionary_encode()
        self.parts: list[str] = encoded.dictionary.to_pylist()
        self._part_codes: Values = np.from_dlpack(encoded.indices)  # to_numpy would import pandas: .3 s
        self._part_rows: Values = np.from_dlpack(self.table["row"].combine_chunks())
        self._columns: dict[str, list[Any]] = {}
        is_next = (np.diff(self._part_codes) == 0) & (np.diff(self._part_rows) == 1)
        self._breaks: Values = np.flatnonzero(~is_next) + 1  # rows that do not follow the one before in a file
        self._kept: Tensor | None = None
        self._is_small = 4 * len(self) * self.manifest.dim <= KEPT

    def limited(self, where: Where, rows: Sequence[int]) -> Self:
        """Return the rows of the same version that fulfill conditions."""
        part = copy(self)
        part.where, part.rows, part.table = where, rows, self.table.take(rows)
        part._place()
        return part

    def cells(self) -> dict[str, list[str | None]]:
        """Return the columns that the tables of its images had besides paths, labels and boxes."""
        return columns_of(self.table["cells"].to_pylist())

    @property
    def run(self) -> Path | None:
        """Run whose model embeds, if it still exists or moved together with the gallery."""
        return find_run(Path(self.manifest.run), self.path)

    def __len__(self) -> int:
        return len(self.table)

    def blocks(self, rows: int) -> Iterator[Tensor]:
        """Yield the points in the order in which they were added, at most ``rows`` rows at a time.

        Rows in sequence are yielded where they are in their files, mapped into memory. Scattered ones are copied, which
        takes ten times as long as a search of one query, once if they are few enough to be kept.
        """
        starts, is_scattered = np.arange(0, len(self), rows), len(self) < RUN * (len(self._breaks) + 1)
        if not is_scattered:
            starts = np.union1d(starts, self._breaks)
        elif self._kept is None and self._is_small:
            self._kept = self._gather(np.arange(len(self)), "points")
        for start, stop in pairwise([*starts.tolist(), len(self)]):
            if self._kept is not None:
                yield self._kept[start:stop]
            elif is_scattered:
                yield self._gather(np.arange(start, stop), "points")
            else:
                first = int(self._part_rows[start])
                yield self._open(self.parts[self._part_codes[start]])["points"][first : first + stop - start]

    def points_at(self, rows: Tensor) -> Tensor:
        return self._gather(rows.numpy(), "points") if self._kept is None else self._kept[rows]

    def local_at(self, rows: Tensor) -> Tensor:
        """Return the local features (M, P, C) float16 of rows (M,), of a gallery that has them."""
        return self._gather(rows.numpy(), "local")

    def items_at(self, rows: Tensor) -> list[PointItem]:
        columns = taken(self.table.select(["id", "label", "path", "box"]), rows).to_pydict().values()
        items = list[PointItem]()
        for name, label, path, box in zip(*columns, strict=True):
            file = thumbnail_file(self.path, name)
            picture = file.read_bytes() if self.manifest.thumbnails and file.is_file() else None
            items.append(PointItem(name, label, path, picture, box_of_cell(box)))
        return items

    @property
    def approximate(self) -> ApproximateIndex | None:
        return None if self.where else self.manifest.approximate

    @property
    def labels(self) -> list[str | None]:
        return self._column("label")

    @property
    def paths(self) -> list[str]:
        return self._column("path")

    @property
    def boxes(self) -> list[Box | None]:
        return [box_of_cell(cell) for cell in self._column("box")]

    @property
    def ids(self) -> list[str]:
        return self._column("id")

    def _column(self, name: str) -> list[Any]:
        if name not in self._columns:
            self._columns[name] = self.table[name].to_pylist()
        return self._columns[name]

    @property
    def numbers(self) -> Values:
        """Numbers (N,) of all images, which an index has."""
        return np.from_dlpack(self.table["number"].combine_chunks())

    def check(self) -> None:
        """Read all files of this version, and raise an error if they are not what was written."""
        for name in self.parts:
            self._open(name)

    def _open(self, part: str, *, is_read: bool = True) -> dict[str, Tensor]:
        """Map a part into memory; before its numbers are first read, check that they are as written and points."""
        if part not in self._read:
            file = self.path / VECTORS / part
            try:
                tensors, _ = open_part(file, self._shapes, is_read=is_read)
                if is_read and (fault := find_invalid_point(self.manifold, tensors["points"])):
                    raise UserError(f"has no point in row {fault[0]}: {fault[1]}")
            except UserError as error:
                raise damaged(self.path, file, str(error).removeprefix(f"{file}: ")) from error
            if not is_read:
                return tensors
            self._read[part] = tensors
        return self._read[part]

    def _gather(self, rows: Values, name: str) -> Tensor:
        codes, part_rows, shape = self._part_codes[rows], self._part_rows[rows], self._shapes[name]
        return gathered(codes, part_rows, lambda code: self._open(self.parts[code])[name], shape, DTYPES[name])


def gallery_of(points: PointSet) -> GalleryFolder | None:
    """Return the gallery that points are of, also those that were read into memory; None for other points."""
    return points.stored if isinstance(points.stored, GalleryFolder) else None
