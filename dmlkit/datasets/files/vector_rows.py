"""What is known of vectors: labels and splits, from NumPy files or from columns beside them."""

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
"""Columns that say something of a vector, beside its label; as in tables of images."""


@dataclass(frozen=True)
class VectorListing(Listing):
    """Vectors of a dataset.

    Args:
        vectors: the files.
    """

    sample = "vector"
    vectors: VectorFile = field(kw_only=True)

    def pick(self, rows: np.ndarray) -> "ListedVectors":
        return ListedVectors(self, rows)


class ListedVectors(Dataset):
    """Vectors of a listing.

    Args:
        listing: their labels.
        rows: (n,) int64, which of its vectors.
    """

    in_memory = True  # mapped: a row is there at once

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
    """Unlabelled vectors.

    Args:
        vectors: the files.
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
    """Vectors with their labels and splits, faults included.

    Args:
        vectors: the files.
        labels: an .npy file with an integer or text a vector, or the name of a column beside the vectors.
        splits: likewise of ``train``, ``validation`` or ``test``; None takes the column ``split`` where there is one.

    Raises:
        UserError: there is no such file or column, or it is not of these vectors.
    """
    columns = {name: vectors.columns[name] for name in MEANINGS if name in vectors.columns.column_names}
    columns["label"] = _column(vectors, labels, "dataset.labels")
    if splits is not None:
        columns["split"] = _column(vectors, splits, "dataset.splits")
    import pyarrow as pa

    if columns["label"].null_count == len(vectors):
        raise UserError(f"dataset.labels: {vectors.path}: no vector has a label; name an .npy file of labels")
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
    """A value a vector, from an .npy file or a column."""
    import pyarrow as pa

    if not name.endswith(".npy"):
        known = vectors.columns.column_names
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "an .npy file has none"
            raise UserError(f"{key}: {vectors.path} has no column {name!r}, {has}; name a column or an .npy file")
        return vectors.columns[name]
    values = read_array(Path(name))
    if values.dtype.kind not in "iuSU":
        raise UserError(f"{key}: {name}: holds {values.dtype}; expected integers or text")
    if values.shape != (len(vectors),):
        raise UserError(
            f"{key}: {name}: has shape {values.shape}, but {vectors.path} holds {len(vectors)} vectors; expected one "
            "value for each"
        )
    try:
        values = np.strings.decode(values, "utf-8") if values.dtype.kind == "S" else values
        return pa.array(values.astype(values.dtype.newbyteorder("=")))
    except (UnicodeError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{key}: {name}: expected text in UTF-8: {error!s:.60}") from error


def _numbers(listing: VectorListing) -> np.ndarray:
    """(N,) int64, the row of each vector in its file; those at fault are not listed."""
    names: ArrowNames = listing.names
    return names.column.cast("int64").to_numpy()


def _paths(listing: VectorListing, rows: np.ndarray) -> PickedPaths:
    """What the vectors are of, where a column ``path`` says so; else the file and the row."""
    vectors = listing.vectors
    if "path" in vectors.columns.column_names:
        return PickedPaths(ArrowNames(vectors.columns["path"].cast("string").combine_chunks()), _numbers(listing)[rows])
    return PickedPaths(listing.names, rows, prefix=f"{vectors.path}:")
