"""Labels and splits of vectors, from NumPy files or from columns of the vectors' file."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.listing import Listing
from dmlkit.datasets.files.paths import PickedPaths
from dmlkit.datasets.files.table_columns import ArrowNames
from dmlkit.datasets.files.table_file import check_texts, known_columns
from dmlkit.datasets.files.table_rows import TableRows
from dmlkit.datasets.files.vector_file import VectorFile
from dmlkit.errors import UserError
from dmlkit.files.arrays import read_array

MEANINGS = ("split", "query", "gallery", "super_class")
"""Columns with metadata of vectors, in addition to the label, as in tables of images."""


@dataclass(frozen=True)
class VectorListing(Listing):
    """Listing of the vectors of a dataset.

    Args:
        vectors: files of the vectors.
    """

    sample = "vector"
    vectors: VectorFile = field(kw_only=True)

    def pick(self, rows: np.ndarray) -> "ListedVectors":
        return ListedVectors(self, rows)


class ListedVectors(Dataset):
    """Dataset of vectors of a listing.

    Args:
        listing: listing with labels.
        rows: (n,) int64, rows of the listing.
    """

    in_memory = True  # the file is memory-mapped

    def __init__(self, listing: VectorListing, rows: np.ndarray) -> None:
        super().__init__(**listing.labelling(rows), paths=_paths(listing, rows))
        self.vectors = listing.vectors
        self.num_features = listing.vectors.num_features
        self.rows = _numbers(listing)[rows]

    def key(self, index: int) -> str:
        return f"{self.vectors.path}:{self.rows[index]}"

    def sample(self, index: int) -> Tensor:
        return torch.from_numpy(self.vectors.row(int(self.rows[index])))


class VectorList(Dataset):
    """Dataset of unlabeled vectors.

    Args:
        vectors: files of the vectors.
    """

    in_memory = True

    def __init__(self, vectors: VectorFile) -> None:
        names = [f"{vectors.path}:{row}" for row in range(len(vectors))]
        super().__init__(torch.zeros(len(vectors), dtype=torch.int64), ("",), names)
        self.vectors = vectors
        self.num_features = vectors.num_features

    def sample(self, index: int) -> Tensor:
        return torch.from_numpy(self.vectors.row(index))


def list_vectors(vectors: VectorFile, labels: str, splits: str | None) -> VectorListing:
    """Return the listing of vectors with their labels and splits, with all problems.

    Args:
        vectors: files of the vectors.
        labels: an .npy file with one integer or text per vector, or the name of a column in the vectors' file.
        splits: an .npy file or a column with ``train``, ``validation`` or ``test`` per vector; None uses the column
            ``split`` if there is one.

    Raises:
        UserError: there is no such file or column, or it does not fit the vectors.
    """
    columns = {name: vectors.columns[name] for name in MEANINGS if name in vectors.columns.column_names}
    columns["label"] = _column(vectors, labels, "dataset.labels")
    if splits is not None:
        columns["split"] = _column(vectors, splits, "dataset.splits")
    import pyarrow as pa

    if columns["label"].null_count == len(vectors):
        raise UserError(f"dataset.labels: {vectors.path}: no vector has a label; set it to an .npy file of labels")
    columns["path"] = pa.array(np.arange(len(vectors))).cast(pa.string())
    where = f"dataset.embeddings: {vectors.path}"
    if "path" in vectors.columns.column_names:
        check_texts(vectors.columns["path"], "path", where)
    table = known_columns(pa.table(columns), where)
    rows = TableRows(table, vectors.path, vectors.path.parent, key="dataset.embeddings")
    listing = VectorListing(**vars(rows.listing()), vectors=vectors)
    listing.faults.extend(vectors.faults())
    return listing


def _column(vectors: VectorFile, name: str, key: str) -> Any:
    """Return one value per vector, from an .npy file or a column."""
    import pyarrow as pa

    if not name.endswith(".npy"):
        known = vectors.columns.column_names
        if name not in known:
            has = f"its columns: {', '.join(known)}" if known else "an .npy file has no columns"
            raise UserError(f"{key}: {vectors.path} has no column {name!r} ({has}); use a column or an .npy file")
        return vectors.columns[name]
    values = read_array(Path(name))
    if values.dtype.kind not in "iuSU":
        raise UserError(f"{key}: {name} has type {values.dtype}; expected integers or text")
    if values.shape != (len(vectors),):
        raise UserError(
            f"{key}: {name} has shape {values.shape}, but {vectors.path} has {len(vectors)} vectors; expected one "
            "value per vector"
        )
    try:
        values = np.strings.decode(values, "utf-8") if values.dtype.kind == "S" else values
        return pa.array(values.astype(values.dtype.newbyteorder("=")))
    except (UnicodeError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{key}: {name}: expected text in UTF-8: {error!s:.60}") from error


def _numbers(listing: VectorListing) -> np.ndarray:
    """Return (N,) int64, the row of each listed vector in its file."""
    names: ArrowNames = listing.names
    return names.column.cast("int64").to_numpy()


def _paths(listing: VectorListing, rows: np.ndarray) -> PickedPaths:
    """Return the vectors' paths from the column ``path`` if there is one, else the file and the row."""
    vectors = listing.vectors
    if "path" in vectors.columns.column_names:
        return PickedPaths(ArrowNames(vectors.columns["path"].cast("string").combine_chunks()), _numbers(listing)[rows])
    return PickedPaths(listing.names, rows, prefix=f"{vectors.path}:")
