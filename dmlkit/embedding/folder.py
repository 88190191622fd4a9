"""A folder of embeddings that `dmlkit embed` wrote."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.lib import format as npy

from dmlkit.embedding.finite import first_non_finite
from dmlkit.embedding.manifest import Manifest
from dmlkit.errors import UserError
from dmlkit.manifolds.base import Manifold

BLOCK = 65_536  # rows handled at once: 128 MB at 512 dimensions
COLUMNS = ("id", "path", "label")  # of the items


class EmbeddingFolder:
    """Embeddings that ``dmlkit embed`` wrote.

    Args:
        path: the folder.

    Attributes:
        points: (N, D) float32, mapped into memory.
        items: N rows with the columns ``id path label``.

    Raises:
        UserError: files are missing, damaged or do not belong together.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = Manifest.read(path / "manifest.json")
        self.points = _read_points(path / "embeddings.npy", self.manifest)
        self.items = _read_items(path / "items.parquet", self.manifest)

    def manifold(self) -> Manifold:
        """The geometry of the points."""
        return self.manifest.manifold.build(self.manifest.features)

    def blocks(self) -> Iterator[torch.Tensor]:
        """The points, a bounded number of rows at a time."""
        for start in range(0, len(self.points), BLOCK):
            yield torch.from_numpy(np.array(self.points[start : start + BLOCK]))

    def check_finite(self) -> None:
        """Make sure that every point has a place.

        Raises:
            UserError: one has nan or inf.
        """
        for number, block in enumerate(self.blocks()):
            row = first_non_finite(block)
            if row is not None:
                self.refuse_row(number * BLOCK + row, "its embedding has nan or inf")

    def refuse_row(self, row: int, fault: str) -> NoReturn:
        """Tell what is wrong with one embedding.

        Raises:
            UserError: always.
        """
        path = self.items["path"][row].as_py()
        raise UserError(
            f"{self.path}: row {row} ({path}): {fault}; embed the images again, with weights that are sound"
        )


def _read_points(path: Path, manifest: Manifest) -> np.ndarray:
    try:
        points = npy.open_memmap(path, mode="r")  # unlike np.load takes no other format than .npy
    except FileNotFoundError:
        raise UserError(f"{path}: missing; expected embeddings that dmlkit embed wrote") from None
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"{path}: cannot read these embeddings: {error}; embed the images again") from error
    expected = (manifest.count, manifest.dim)
    if points.dtype != np.float32 or points.shape != expected:
        raise UserError(
            f"{path}: holds {points.dtype} {points.shape}, expected float32 {expected} as manifest.json says; all "
            "files must be of one run of dmlkit embed"
        )
    return points


def _read_items(path: Path, manifest: Manifest) -> Any:
    from pyarrow import ArrowException, parquet

    try:
        items: Any = parquet.read_table(path)
    except FileNotFoundError:
        raise UserError(f"{path}: missing; expected the items of embeddings that dmlkit embed wrote") from None
    except (OSError, ArrowException) as error:
        raise UserError(f"{path}: cannot read these items: {error}; embed the images again") from error
    if any(items.column_names.count(name) != 1 for name in COLUMNS):
        raise UserError(
            f"{path}: has the columns {', '.join(items.column_names) or 'none'}; expected {', '.join(COLUMNS)}, as "
            "dmlkit embed writes them"
        )
    if items.num_rows != manifest.count:
        raise UserError(
            f"{path}: has {items.num_rows} rows, expected {manifest.count} as manifest.json says; all files must be "
            "of one run of dmlkit embed"
        )
    return items
