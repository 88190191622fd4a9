"""Dataset of vectors: embeddings of any model, with labels, and the files that hold them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from dmlkit.component import Requirement
from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.listing import Listing
from dmlkit.datasets.table import TableRows
from dmlkit.errors import OptionError, UserError, first_line, option_errors
from dmlkit.files.arrays import Values, read_array
from dmlkit.files.image_table import ArrowNames, check_texts, known_columns
from dmlkit.files.paths import PickedPaths, raise_faults
from dmlkit.files.readers.base import ImageTable
from dmlkit.files.regular import check_regular


class VectorsConfig(DatasetConfig, frozen=True):
    """Embeddings of any model, of images or other data, to train a head on; needs ``backbone: {name: identity}``.

    Without splits, the first half of the sorted labels is for training, the rest for testing. In a Parquet file or a
    folder of embeddings, the columns ``query``, ``gallery`` and ``super_class`` have the same meaning as in a table of
    images, and ``path`` names the source of a vector.
    """

    titled_by: ClassVar = "embeddings"
    sample: ClassVar = "vector"

    name: Literal["vectors"] = "vectors"
    embeddings: str = Field(min_length=1)
    """Path of an .npy file (N, D), a .parquet file with lists of D numbers in the column ``embedding``, or a folder
    that ``dmlkit embed`` wrote."""
    labels: str = Field(default="label", min_length=1)
    """An .npy file of N integers or texts, or the name of a column in the vectors' file."""
    splits: str | None = Field(default=None, min_length=1)
    """An .npy file or a column of ``train``, ``validation`` or ``test``; null uses the column ``split`` if there is
    one."""

    def listing(self) -> Listing:
        with option_errors("dataset.embeddings"):
            vectors = VectorFile(Path(self.embeddings))
        import pyarrow as pa

        columns = {name: vectors.columns[name] for name in MEANINGS if name in vectors.columns.column_names}
        columns["label"] = _column(vectors, self.labels, "dataset.labels")
        if self.splits is not None:
            columns["split"] = _column(vectors, self.splits, "dataset.splits")
        columns["path"] = pa.array(np.arange(len(vectors))).cast(pa.string())
        with option_errors("dataset.embeddings"):
            if "path" in vectors.columns.column_names:
                check_texts(vectors.columns["path"], "path", str(vectors.path))
            table = known_columns(pa.table(columns), str(vectors.path))
            rows = TableRows(ImageTable(table, vectors.path, vectors.path.parent)).listing()
        if (rows.labels < 0).all():
            what = f"{vectors.path}: no vector has a label; set it to an .npy file of labels"
            raise OptionError("dataset.labels", what)
        listing = VectorListing(**vars(rows), vectors=vectors)
        listing.faults.extend(vectors.faults())
        return listing

    def unlabeled(self, path: Path) -> "Vectors":
        if path.is_dir() and not (path / "manifest.json").exists():
            raise UserError(
                f"{path}: is a folder, but the model takes vectors; expected an .npy or .parquet file of them, or a "
                "folder that dmlkit embed wrote"
            )
        vectors = VectorFile(path)
        raise_faults(vectors.faults())
        rows = np.arange(len(vectors))
        names = [f"{vectors.path}:{row}" for row in rows]
        return Vectors(vectors, rows, labels=torch.full((len(rows),), -1), class_names=(), paths=names)

    def requirements(self) -> list[Requirement]:
        return [
            Requirement("dataset.on_bad_image", ("error",), "the dataset has no images"),
        ]


COLUMN = "embedding"  # column of the vectors in a Parquet file, as dmlkit export writes it
BLOCK = 65_536  # rows checked at a time: 128 MB at 512 coordinates


class VectorFile:
    """Vectors and their metadata.

    Args:
        path: an .npy file (N, D), mapped into memory; a .parquet file with lists of D numbers in the column
            ``embedding``; or a folder with ``embeddings.npy`` and ``items.parquet``, as ``dmlkit embed`` writes it.

    Attributes:
        path: file of the vectors.
        columns: pyarrow table of N rows with the other columns; it has no columns for an .npy file.
        num_features: D.

    Raises:
        UserError: a file is missing or damaged, or does not contain vectors.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self.path = path / "embeddings.npy" if path.is_dir() else path
        self._values: Values | None = None
        if path.is_dir():
            if not (path / "manifest.json").exists():
                raise UserError(f"{path} has no embeddings; expected a folder that dmlkit embed has finished")
            self.columns: Any = _read_columns(path / "items.parquet")
        elif path.suffix == ".npy":
            self.columns = pa.table({})
        elif path.suffix == ".parquet":
            table = _read_columns(path)
            if COLUMN not in table.column_names:
                found = ", ".join(table.column_names) or "none"
                raise UserError(f"{path} has no column {COLUMN!r}, which holds the vectors; its columns: {found}")
            self._values = _lists(table[COLUMN], path)
            self.columns = table.drop_columns([COLUMN])
        else:
            raise UserError(f"{path}: expected an .npy or .parquet file, or a folder that dmlkit embed wrote")
        _check_values(self.values, self.path)
        if path.is_dir() and len(self.columns) != len(self):
            raise UserError(
                f"{path}: items.parquet has {len(self.columns)} rows, but embeddings.npy has {len(self)}; expected the "
                "files of one run of dmlkit embed; run it again"
            )
        self.num_features: int = self.values.shape[1]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def values(self) -> Values:
        """Vectors (N, D) in float16, float32 or float64."""
        if self._values is None:
            self._values = read_array(self.path)
        return self._values

    def row(self, index: int) -> Values:
        """Return a vector as (D,) float32."""
        return np.array(self.values[index], dtype=np.float32)

    def faults(self) -> Iterator[str]:
        """Yield an error line for each vector with a coordinate that is not finite in float32."""
        for start in range(0, len(self), BLOCK):
            with np.errstate(over="ignore", invalid="ignore"):
                block = np.asarray(self.values[start : start + BLOCK], dtype=np.float32)
                if np.isfinite(block.sum(dtype=np.float64)):  # 4 times as fast as checking each number
                    continue
            for row in np.flatnonzero(~np.isfinite(block).all(1)).tolist():
                yield f"{self.path}: row {start + row} (counted from 0) contains nan or inf; fix or remove the row"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the memory map of an .npy file, which other processes open themselves."""
        return {**self.__dict__, "_values": self._values if self.path.suffix == ".parquet" else None}


def _check_values(values: Values, path: Path) -> None:
    if values.dtype.kind != "f" or values.dtype.itemsize > 8:
        raise UserError(f"{path} has type {values.dtype}; expected vectors in float16, float32 or float64")
    if values.ndim != 2 or 0 in values.shape:
        raise UserError(f"{path} has shape {values.shape}; expected (N, D), one vector per row, N and D at least 1")


def _read_columns(path: Path) -> Any:
    from pyarrow import ArrowException, parquet

    try:
        check_regular(path)
        return parquet.read_table(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected a Parquet file") from None
    except (OSError, ArrowException, UnicodeDecodeError) as error:
        reason = first_line(error)
        raise UserError(f"{path}: cannot read this Parquet file: {reason}") from error


def _lists(column: Any, path: Path) -> Values:
    """Convert a column of lists of numbers to (N, D)."""
    import pyarrow as pa
    from pyarrow import compute

    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not pa.types.is_floating(kind.value_type):
        raise UserError(f"{path}: column {COLUMN!r} has type {kind}; expected lists of float16, float32 or float64")
    if not len(column):
        raise UserError(f"{path} has no rows; expected at least one vector")
    lengths = compute.list_value_length(column).to_numpy()  # pyright: ignore[reportAttributeAccessIssue]
    odd = np.flatnonzero(lengths != lengths[0])  # a blank cell has the length nan
    numbers = compute.list_flatten(column)  # pyright: ignore[reportAttributeAccessIssue]
    if np.isnan(lengths[0]) or len(odd) or numbers.null_count:
        row = int(odd[0]) if len(odd) else 0
        raise UserError(
            f"{path}: column {COLUMN!r}: row {row} (counted from 0) is blank or differs in length from the first; "
            "expected lists of equal length without blanks"
        )
    return numbers.to_numpy().reshape(len(column), int(lengths[0]))


MEANINGS = ("split", "query", "gallery", "super_class")
"""Columns with metadata of vectors, in addition to the label, as in tables of images."""


@dataclass(frozen=True)
class VectorListing(Listing):
    """Listing of the vectors of a dataset."""

    sample = "vector"
    vectors: VectorFile = field(kw_only=True)

    def pick(self, rows: np.ndarray) -> "Vectors":
        """Return some vectors, named by the column ``path`` if there is one, else by the file and the row."""
        names: ArrowNames = self.names  # rows of the file
        numbers, columns = names.column.cast("int64").to_numpy()[rows], self.vectors.columns
        paths = PickedPaths(names, rows, prefix=f"{self.vectors.path}:")
        if "path" in columns.column_names:
            paths = PickedPaths(ArrowNames(columns["path"].cast("string").combine_chunks()), numbers)
        return Vectors(self.vectors, numbers, **self.labelling(rows), paths=paths)


class Vectors(Dataset):
    """Dataset of some rows (n,) int64 of a file of vectors; ``data`` are the other arguments of a `Dataset`."""

    in_memory = True  # the file is memory-mapped

    def __init__(self, vectors: VectorFile, rows: np.ndarray, **data: Any) -> None:
        super().__init__(**data)
        self.vectors, self.rows = vectors, rows
        self.num_features = vectors.num_features

    def key(self, index: int) -> str:
        return f"{self.vectors.path}:{self.rows[index]}"

    def sample(self, index: int) -> Tensor:
        return torch.from_numpy(self.vectors.row(int(self.rows[index])))


def _column(vectors: VectorFile, name: str, key: str) -> Any:
    """Return one value per vector, from an .npy file or a column."""
    import pyarrow as pa

    if not name.endswith(".npy"):
        known = vectors.columns.column_names
        if name not in known:
            has = f"its columns: {', '.join(known)}" if known else "an .npy file has no columns"
            raise OptionError(key, f"{vectors.path} has no column {name!r} ({has}); use a column or an .npy file")
        return vectors.columns[name]
    values = read_array(Path(name))
    if values.dtype.kind not in "iuSU":
        raise OptionError(key, f"{name} has type {values.dtype}; expected integers or text")
    if values.shape != (len(vectors),):
        raise OptionError(
            key,
            f"{name} has shape {values.shape}, but {vectors.path} has {len(vectors)} vectors; expected one "
            "value per vector",
        )
    try:
        values = np.strings.decode(values, "utf-8") if values.dtype.kind == "S" else values
        return pa.array(values.astype(values.dtype.newbyteorder("=")))
    except (UnicodeError, ValueError, pa.ArrowException) as error:
        raise OptionError(key, f"{name}: expected text in UTF-8: {error!s:.60}") from error
