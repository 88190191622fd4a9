"""A folder of embeddings that `dmlkit embed` wrote."""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn
from zlib import crc32

import numpy as np
import torch

from dmlkit.errors import UserError
from dmlkit.files.arrays import read_array
from dmlkit.files.image_file import Box
from dmlkit.files.outputs import BOX
from dmlkit.files.regular import file_checksum, require_regular_file
from dmlkit.files.source import place_of_run
from dmlkit.manifolds.base import find_invalid_point
from dmlkit.nearest.search import BLOCK_ROWS
from dmlkit.run_folder.folder import RunFolder, find_run
from dmlkit.vectors.manifest import Manifest
from dmlkit.vectors.points import PointItem, PointsOnDisk, taken


class EmbeddingFolder(PointsOnDisk):
    """Embeddings that ``dmlkit embed`` wrote, a `PointSet`.

    Attributes:
        points: (N, D) float32, mapped into memory; see `check_points`.
        items: N rows with the columns ``id path label``, and ``x1 y1 x2 y2`` if any has a box.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = Manifest.read(path / "manifest.json")
        self.manifold, self.skipped = self.manifest.build_manifold(), self.manifest.skipped
        recorded = self.manifest.dim, self.manifest.similarity
        expected: Any = self.manifold.point_dim, self.manifold.similarity_name
        if recorded != expected:
            raise UserError(
                f"{path / 'manifest.json'}: got dim and similarity {recorded}, expected {expected} for manifold "
                f"{self.manifest.manifold.name} and {self.manifest.features} features; the file was edited: restore "
                "it, or embed the images again"
            )
        self.points, expected = read_array(path / "embeddings.npy"), (self.manifest.count, self.manifest.dim)
        if self.points.dtype != np.float32 or self.points.shape != expected:
            raise UserError(
                f"{path / 'embeddings.npy'}: got {self.points.dtype} {self.points.shape}, expected float32 {expected} "
                "as in manifest.json; all files must come from one run of dmlkit embed"
            )
        self.items = _read_items(path / "items.parquet", self.manifest)
        self._is_checked = False

    @property
    def run(self) -> Path | None:
        """Run that made the embeddings, around this folder or as recorded, if it is there or moved with the folder."""
        above, recorded = self.path.resolve().parent, self.manifest.run
        moved = None if recorded is None else find_run(Path(recorded), self.path)
        places = [above.parent if above.name == "embeddings" else None, moved]
        return next((place_of_run(place) for place in places if place and RunFolder(place).holds_run()), None)

    @property
    def paths(self) -> list[str]:
        return self.items["path"].to_pylist()

    @property
    def labels(self) -> list[str | None]:
        return self.items["label"].to_pylist()

    @property
    def boxes(self) -> list[Box | None]:
        """Boxes of all images, without their margins; None for a full image."""
        return _boxes(self.items)

    def __len__(self) -> int:
        return len(self.points)

    def blocks(self, rows: int = BLOCK_ROWS) -> Iterator[torch.Tensor]:
        """Yield the points, at most ``rows`` rows at a time, all of which are checked before, see `check_points`."""
        self.check_points()
        for start in range(0, len(self.points), rows):
            yield torch.from_numpy(np.array(self.points[start : start + rows]))
            self._give_back()

    def points_at(self, rows: torch.Tensor) -> torch.Tensor:
        self.check_points()
        points = torch.from_numpy(self.points[rows.numpy()])
        self._give_back()  # a row brings in 64 KB or more around it: 26 000 rows of 2 KB held 1.3 GB
        return points

    def _give_back(self) -> None:
        """Release the pages just read, so that they do not count as memory of the process."""
        if hasattr(mmap, "MADV_DONTNEED"):
            mapped: Any = self.points.base
            mapped.madvise(mmap.MADV_DONTNEED)

    def items_at(self, rows: torch.Tensor) -> list[PointItem]:
        items = taken(self.items, rows)
        columns = (items[name].to_pylist() for name in ("id", "label", "path"))
        return [PointItem(*cells, box=box) for *cells, box in zip(*columns, _boxes(items), strict=True)]

    def check_points(self) -> None:
        """Check all rows when the first ones are read: 0.1 s for 200 MB."""
        if self._is_checked:
            return
        checksum, checksums = 0, self.manifest.checksums
        for start in range(0, len(self.points), BLOCK_ROWS):
            values = np.array(self.points[start : start + BLOCK_ROWS], order="C")
            checksum = crc32(values.data.cast("B"), checksum)
            if fault := find_invalid_point(self.manifold, torch.from_numpy(values)):
                self.refuse_row(start + fault[0], fault[1])
            self._give_back()
        if checksums is not None and checksum != checksums.points:
            raise UserError(_changed(self.path / "embeddings.npy"))
        self._is_checked = True

    def refuse_row(self, row: int, fault: str) -> NoReturn:
        """Raise a `UserError` for one embedding."""
        path = self.items["path"][row].as_py()
        raise UserError(
            f"{self.path}: row {row} ({path}): {fault}; restore embeddings.npy, or embed the images again with "
            "undamaged weights"
        )


def _boxes(items: Any) -> list[Box | None]:
    """Return the boxes of rows of ``items.parquet``, which has columns of them if there are any."""
    if not {*BOX} <= {*items.column_names}:
        return [None] * len(items)
    sides = zip(*(items[name].to_pylist() for name in BOX), strict=True)
    return [None if None in cells else Box(*cells) for cells in sides]


def _changed(path: Path) -> str:
    return (
        f"{path}: this file was changed: its checksum differs from manifest.json; restore the file from a "
        "backup, or embed the images again"
    )


def _read_items(path: Path, manifest: Manifest) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    types = {"id": pa.int64(), "path": pa.string(), "label": pa.string()}
    require_regular_file(path)
    try:
        with path.open("rb") as file, parquet.ParquetFile(file) as stored:
            names, rows = stored.schema_arrow.names, stored.metadata.num_rows
            if any(names.count(name) != 1 for name in types):
                raise UserError(
                    f"{path}: has the columns {', '.join(names) or 'none'}; expected {', '.join(types)}, as dmlkit "
                    "embed writes them"
                )
            if rows != manifest.count:  # before any is read: a few bytes of Parquet may stand for many rows
                raise UserError(
                    f"{path}: has {rows} rows, expected {manifest.count} as manifest.json says; all files must be of "
                    "one run of dmlkit embed"
                )
            items: Any = stored.read()
        boxes = {name: pa.float64() for name in BOX if names.count(name) == 1}
        for name, kind in {**types, **boxes}.items():
            column = items[name].cast(kind)
            column.validate(full=True)  # a text that is no UTF-8 is reported here, not where it is shown
            items = items.set_column(names.index(name), name, column)
    except FileNotFoundError:
        raise UserError(f"{path}: missing; expected the items of embeddings that dmlkit embed wrote") from None
    except PermissionError:
        raise
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(f"{path}: cannot read these items: {reason}; embed the images again") from error
    if manifest.checksums is not None and file_checksum(path) != manifest.checksums.items:
        raise UserError(_changed(path))
    if items["id"].null_count or items["path"].null_count:
        raise UserError(f"{path}: an item has no id or no path; embed the images again")
    return items
