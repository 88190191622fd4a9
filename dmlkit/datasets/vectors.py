"""Dataset of vectors: embeddings of any model, with labels, and the files that hold them."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
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
from dmlkit.datasets.files.samples import VectorSamples
from dmlkit.datasets.table import TableRows
from dmlkit.errors import OptionError, UserError, option_errors
from dmlkit.files.arrays import read_array
from dmlkit.files.columns import LABEL, ArrowNames, arrow_compute, check_texts, known_columns, text_column
from dmlkit.files.paths import PickedPaths, raise_faults
from dmlkit.files.readers.base import ImageTable
from dmlkit.files.vector_file import VectorFile, as_column, label_name


class VectorsConfig(DatasetConfig, frozen=True):
    """Embeddings of any model, of images or other data, to train a head on; needs ``backbone: {name: identity}``.

    Without splits, the first half of the sorted labels is for training, the rest for testing. In a Parquet file or a
    folder of embeddings, the columns ``query``, ``gallery``, ``super_class`` and ``group`` have the same meaning as in
    a table of images, and ``path`` names the source of a vector.
    """

    titled_by: ClassVar = "embeddings"
    sample: ClassVar = "vector"

    name: Literal["vectors"] = "vectors"
    embeddings: str = Field(min_length=1)
    """An .npy, .npz or .safetensors file with an array (N, D), a .parquet or .arrow file with lists of D numbers
    in a column, a .csv file with D numbered columns, or a folder that ``dmlkit embed`` wrote."""
    labels: str = Field(default=LABEL, min_length=1)
    """An .npy file of N integers or texts, or the name of a column or array in the vectors' file."""
    splits: str | None = Field(default=None, min_length=1)
    """An .npy file or a column of ``train``, ``validation`` or ``test``; null uses the column ``split`` if there is
    one."""

    def listing(self) -> Listing:
        with option_errors("dataset.embeddings"):
            vectors = VectorFile(Path(self.embeddings))
        import pyarrow as pa

        known = {*vectors.columns.column_names} - {self.labels}  # labels that are groups too would have no matches
        meanings = ("split", "query", "gallery", "super_class", "group")  # as in tables of images
        # in any case; one in lower case is the last, so it goes before others
        columns = {name: vectors.columns[own] for own in sorted(known) if (name := own.lower()) in meanings}
        label = label_name(vectors.columns.column_names, str(vectors.path)) if self.labels == LABEL else None
        columns[LABEL] = _column(vectors, label or self.labels, "dataset.labels")
        if self.splits is not None:
            columns["split"] = _column(vectors, self.splits, "dataset.splits")
        columns["path"] = pa.array(np.arange(len(vectors))).cast(pa.string())
        with option_errors("dataset.embeddings"):
            if "path" in vectors.columns.column_names:
                check_texts(vectors.columns["path"], "path", str(vectors.path))
            table = known_columns(pa.table(columns), str(vectors.path))
            rows = TableRows(ImageTable(table, vectors.path, vectors.path.parent)).listing()
        if (rows.labels < 0).all():
            message = f"{vectors.path}: no vector has a label; set it to an .npy file of labels"
            raise OptionError("dataset.labels", message)
        rows.faults.extend(_faults(vectors))
        return replace(rows, sample=self.sample, make=partial(_listed, vectors))

    def unlabeled(self, path: Path) -> "Vectors":
        if path.is_dir() and not (path / "manifest.json").exists():
            raise UserError(
                f"{path}: is a folder, but the model takes vectors; expected a file of them, or a "
                "folder that dmlkit embed wrote"
            )
        vectors = VectorFile(path)
        raise_faults(_faults(vectors))
        rows = np.arange(len(vectors))
        names = [f"{vectors.path}:{row}" for row in rows]
        return Vectors(vectors, rows, labels=torch.full((len(rows),), -1), class_names=(), paths=names)

    def requirements(self) -> list[Requirement]:
        return [Requirement("dataset.on_bad_image", ("error",), "the dataset has no images")]


BLOCK = 65_536  # rows checked at a time: 128 MB at 512 coordinates


def _faults(vectors: VectorFile) -> Iterator[str]:
    """Yield an error line for each vector with a coordinate that is not finite in float32."""
    for start in range(0, len(vectors), BLOCK):
        with np.errstate(over="ignore", invalid="ignore"):
            block = np.asarray(vectors.values[start : start + BLOCK], dtype=np.float32)
            if np.isfinite(block.sum(dtype=np.float64)):  # 4 times as fast as checking each number
                continue
        for row in np.flatnonzero(~np.isfinite(block).all(1)).tolist():
            yield f"{vectors.path}: row {start + row} (counted from 0) contains nan or inf; fix or remove the row"


def _listed(vectors: VectorFile, listing: Listing, rows: np.ndarray) -> "Vectors":
    """Return some vectors, named by a cell of the column ``path`` if there is one, else by the file and the row."""
    import pyarrow as pa

    names: ArrowNames = listing.names  # rows of the file
    numbers, file = names.column.cast("int64").to_numpy()[rows], str(vectors.path)
    paths = PickedPaths(names, rows, prefix=f"{file}:")
    if "path" in vectors.columns.column_names:
        compute, rows_of_file = arrow_compute(), pa.array(np.arange(len(vectors.columns))).cast(pa.string())
        others = compute.binary_join_element_wise(file, rows_of_file, ":")
        paths = PickedPaths(ArrowNames(compute.coalesce(text_column(vectors.columns, file, "path"), others)), numbers)
    return Vectors(vectors, numbers, **listing.labelling(rows), paths=paths)


class Vectors(Dataset):
    """Dataset of some rows (n,) int64 of a file of vectors; ``data`` are the other arguments of a `Dataset`."""

    in_memory = True  # the file is memory-mapped

    def __init__(self, vectors: VectorFile, rows: np.ndarray, **data: Any) -> None:
        super().__init__(**data)
        self.vectors, self.rows, self.kind = vectors, rows, VectorSamples(vectors.num_features)

    def key(self, index: int) -> str:
        return f"{self.vectors.path}:{self.rows[index]}"

    def sample(self, index: int) -> Tensor:
        return torch.from_numpy(self.vectors.row(int(self.rows[index])))


def _column(vectors: VectorFile, name: str, key: str) -> Any:
    """Return one value per vector, from an .npy file or a column."""
    if not name.endswith(".npy"):
        known = vectors.columns.column_names
        if name not in known:
            has = f"its columns: {', '.join(known)}" if known else "an .npy file has none"
            raise OptionError(key, f"{vectors.path} has no column {name!r} ({has}); use a column or an .npy file")
        return vectors.columns[name]
    with option_errors(key):
        values = as_column(read_array(Path(name)), name)
    if len(values) != len(vectors):
        raise OptionError(
            key,
            f"{name} has {len(values)} values, but {vectors.path} has {len(vectors)} vectors; expected one per vector",
        )
    return values
