"""Files of vectors of any program: .npy, .npz, .safetensors, Parquet, Arrow and CSV, with labels and other columns."""

import re
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from dmlkit.errors import UserError, some_of, warn_once
from dmlkit.files.arrays import Values, read_array
from dmlkit.files.columns import TEXTS, WHOLE, arrow_compute, check_texts, text_column
from dmlkit.files.csv_table import USUAL, column_called, csv_start, key_of, number_of, read_csv
from dmlkit.files.readers.base import reader_of
from dmlkit.files.regular import read_text, reading

ARRAYS = (".npy", ".npz", ".safetensors")
CSV = (".csv", ".tsv")
TABLES = (".parquet", ".arrow", ".feather", ".ipc", *CSV)
EXPECTED = "a file of vectors (.npy, .npz, .safetensors, .parquet, .arrow or .csv)"
PREFERRED = ("embedding", "embeddings")
"""Name of the vectors, if others could be the vectors too."""
LABELS = ("label", "labels", "y", "target", "targets")
"""Names of labels that go before those of `column_called`, of which an id is left out: each vector may have its own."""
SAMPLE = 4096  # rows whose rounding is measured; 0.02 s at 512 coordinates
MOST_LOST = 1e-3  # share of the differences of vectors that float32 may change; 2e-8 of normal numbers
FEWEST = 3  # numbered columns of a CSV table that are vectors; x1, y1, x2, y2 are a box


class VectorFile:
    """Vectors and their metadata.

    Args:
        path: an .npy file (N, D), mapped into memory; an .npz or .safetensors file with an array (N, D); a .parquet or
            .arrow file with lists of D numbers in a column; a .csv file with D numbered columns, or of numbers alone;
            or a folder with ``embeddings.npy`` and ``items.parquet``, as ``dmlkit embed`` writes it. If several arrays
            or columns may be the vectors, one must be called ``embedding``.

    Attributes:
        path: file of the vectors.
        columns: pyarrow table of N rows with the other columns, or arrays of N values; none for an .npy file.
        num_features: D.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self.path = path / "embeddings.npy" if path.is_dir() else path
        self._values: Values | None = None
        self.columns: Any = pa.table({})
        suffix = self.path.suffix.lower()
        if path.is_dir():
            if not (path / "manifest.json").exists():
                raise UserError(f"{path} has no embeddings; expected a folder that dmlkit embed has finished")
            self.columns = _read_table(path / "items.parquet")
        elif suffix in CSV:
            self._values, self.columns = _csv_vectors(path)
        elif suffix in TABLES:
            table = _read_table(path)
            name = _vectors_among(_lists_in(table.schema), path, table.column_names, "a column with lists of numbers")
            self._values, self.columns = _numbers_of(table[name], name, path), table.drop_columns([name])
        elif suffix in ARRAYS[1:]:
            self._values, self.columns = _array_vectors(path)
        elif suffix != ".npy":
            raise UserError(f"{path}: expected {EXPECTED}, or a folder that dmlkit embed wrote")
        if self.values.dtype.kind not in "fiub" or self.values.dtype.itemsize > 8:
            raise UserError(f"{self.path}: expected real numbers of up to 64 bits, got {self.values.dtype}")
        if self.values.ndim != 2 or 0 in self.values.shape:
            raise UserError(
                f"{self.path} has shape {self.values.shape}; expected an array of 2 dimensions (N, D), one vector per "
                "row, N and D at least 1"
            )
        if path.is_dir() and len(self.columns) != len(self):
            raise UserError(
                f"{path}: items.parquet has {len(self.columns)} rows, but embeddings.npy has {len(self)}; expected the "
                "files of one run of dmlkit embed; run it again"
            )
        self.num_features: int = self.values.shape[1]
        self._note_rounding()

    def _note_rounding(self) -> None:
        """Warn if float32, in which vectors are compared, changes their differences, e.g. of numbers near 1e6."""
        if np.can_cast(self.values.dtype, np.float32):
            return
        rows = self.values[:SAMPLE].astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is reported by its row
            lost = np.square(rows - rows.astype(np.float32)).sum()
            spread = np.square(rows - rows[:1]).sum()
        if np.inf > lost > MOST_LOST**2 * spread > 0:
            warn_once(
                f"{self.path}: vectors are compared in float32, which changes the differences between these by "
                f"{np.sqrt(lost / spread):.1%}, since their numbers are large; subtract the mean of all vectors first"
            )

    def __len__(self) -> int:
        return len(self.values)

    @property
    def values(self) -> Values:
        """Vectors (N, D), of any type of numbers."""
        if self._values is None:
            self._values = read_array(self.path)
        return self._values

    def row(self, index: int) -> Values:
        """Return a vector as (D,) float32."""
        return np.array(self.values[index], dtype=np.float32)

    @property
    def names(self) -> list[str]:
        """Names of the vectors, (N,): the paths in a column, or the numbers of their rows."""
        known = self.columns.column_names
        index = column_called(known, "path", str(self.path))
        if index is None:
            return [f"row {row}" for row in range(len(self))]
        check_texts(self.columns[known[index]], known[index], str(self.path))
        paths = text_column(self.columns, str(self.path), known[index]).to_pylist()
        is_near = any((self.path.parent / path).is_file() for path in paths[:1] if path)
        root = self.path.parent if is_near else Path()
        return [str(root / path) if path else f"row {row}" for row, path in enumerate(paths)]

    def labels(self) -> Any:
        """Return the labels (N,) in the file as a pyarrow array of texts; None without a column of them."""
        name = label_name(self.columns.column_names, str(self.path))
        return None if name is None else _label_texts(self.columns, name, self.path)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the memory map of an .npy file, which other processes open themselves."""
        return {**self.__dict__, "_values": None if self.path.suffix == ".npy" else self._values}


def holds_vectors(path: Path, *, with_paths: bool = False) -> bool:
    """Return whether a file has vectors, by its suffix, or by the names and types of the columns of a table.

    Tables that have the paths of images too count only ``with_paths``.
    """
    suffix = path.suffix.lower()
    if suffix not in TABLES:
        return suffix in ARRAYS
    from pyarrow import parquet

    with suppress(UserError, OSError, ValueError):  # a damaged table is reported by what reads it
        if suffix in CSV:
            names, row = csv_start(path)
            if _is_headless(names):
                return True
            numbered = _numbered(names).values() if row else ()
            candidates = [series for series in numbered if _are_numbers([row[index] for index in series])]
        else:
            schema = parquet.read_schema(path) if suffix == ".parquet" else _read_table(path).schema
            names, candidates = schema.names, _lists_in(schema)
        return bool(candidates) and (with_paths or column_called(names, "path", "") is None)
    return False


def label_name(names: Sequence[str], where: str) -> str | None:
    """Return the name of the column of labels; None without one. Errors begin with ``where``.

    ``y`` is a coordinate, not the label, next to ``x`` and a usual name of labels.

    Example:
        >>> label_name(["id", "y"], "x.npz"), label_name(["id", "e0"], "x.csv")
        ('y', None)
    """
    candidates = [name for name in LABELS if name in names]
    others = [name for name in names if key_of(name) != "id"]
    usual = {*USUAL["label"]} - {"name", "id"}
    if candidates == ["y"] and "x" in names and any(key_of(name) in usual for name in others):
        candidates = []  # it is a coordinate, e.g. of a box
    elif candidates == ["y"]:
        warn_once(f"{where}: reads label from 'y'")
    if not candidates:
        index = column_called(others, "label", where)
        if index is None:
            return None
        warn_once(f"{where}: reads label from {others[index]!r}")
        return others[index]
    if len(candidates) > 1 and candidates[0] != "label":
        raise UserError(f"{where}: {' and '.join(map(repr, candidates))} may be the labels; call the right one 'label'")
    return candidates[0]


def read_label_file(path: Path) -> Any:
    """Return the labels (N,) in a file as a pyarrow array of texts.

    Args:
        path: an .npy file; an .npz file or a table with labels in its only array or column, or the one with the usual
            name; or a text file with a label per line.
    """
    import pyarrow as pa

    suffix = path.suffix.lower()
    if suffix == ".npy":
        return as_column(read_array(path), str(path)).cast(pa.string())
    if suffix == ".txt":
        return pa.array(read_text(path).splitlines(), pa.string())
    if suffix in ARRAYS:
        arrays = _arrays(path)
        names: Sequence[str] = [name for name, values in arrays.items() if values.ndim == 1]
        table: Any = {name: as_column(arrays[name], f"{path}: {name!r}") for name in names}
    elif suffix in TABLES:
        table = read_csv(path).table() if suffix in CSV else _read_table(path)
        names = table.column_names
    else:
        raise UserError(f"{path}: expected labels in a file .npy, .npz, .txt, .csv, .parquet or .arrow")
    name = names[0] if len(names) == 1 else label_name(names, str(path))
    if name is None:
        raise UserError(f"{path}: has {some_of(names) or 'nothing'}; expected labels in a column called 'label'")
    return _label_texts(table if suffix in TABLES else pa.table({name: table[name]}), name, path)


def as_column(values: Values, where: str) -> Any:
    """Return metadata of vectors (N,), integers, truths or text, as a pyarrow array; errors begin with ``where``."""
    import pyarrow as pa

    if values.dtype.kind not in "biuSU":  # numbers with fractions would each be a label of its own
        raise UserError(f"{where} has type {values.dtype}; expected integers or text")
    if values.ndim != 1:
        raise UserError(f"{where} has shape {values.shape}; expected an array of 1 dimension, one value per vector")
    try:
        values = np.strings.decode(values, "utf-8") if values.dtype.kind == "S" else values
        return pa.array(values.astype(values.dtype.newbyteorder("=")))
    except (UnicodeError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{where}: expected text in UTF-8: {error!s:.60}") from error


def _label_texts(columns: Any, name: str, path: Path) -> Any:
    import pyarrow as pa

    check_texts(columns[name], name, str(path))
    if pa.types.is_floating(columns[name].type):  # pandas writes integers with an empty cell so
        numbers = columns[name].to_numpy()
        wrong = numbers[~np.isnan(numbers) & (numbers % 1 != 0)]
        if len(wrong):
            raise UserError(f"{path}: column {name!r} has the number {wrong[0]:g}; expected integers or text as labels")
    return text_column(columns, str(path), name)


def _read_table(path: Path) -> Any:
    """Return a Parquet or Arrow file as a pyarrow table, with the names in the file."""
    reader = reader_of(path)
    assert reader is not None
    return reader.read(path).table


def _vectors_among(candidates: Sequence[str], path: Path, names: Sequence[str], expected: str) -> str:
    """Return the name of the vectors: the only one that was found, or the one of `PREFERRED`."""
    if not candidates:
        raise UserError(f"{path}: has no vectors ({some_of(names) or 'it is empty'}); expected {expected}")
    chosen = candidates if len(candidates) == 1 else [name for name in candidates if name in PREFERRED]
    if len(chosen) != 1:
        shown = " and ".join(map(repr, candidates[:3]))
        raise UserError(f"{path}: {shown} may be the vectors; call the right one 'embedding', or remove the others")
    return chosen[0]


def _lists_in(schema: Any) -> list[str]:
    """Return the names of the columns with lists of numbers, without boxes."""
    import pyarrow as pa

    is_list = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    is_number = (pa.types.is_floating, pa.types.is_integer)
    return [
        field.name
        for field in schema
        if any(check(field.type) for check in is_list)
        and any(check(field.type.value_type) for check in is_number)
        and key_of(field.name) not in WHOLE
    ]


def _numbers_of(column: Any, name: str, path: Path) -> Values:
    """Convert a column of lists of numbers to (N, D)."""
    if not len(column):
        raise UserError(f"{path} has no rows; expected at least one vector")
    compute = arrow_compute()
    lengths = compute.list_value_length(column).to_numpy()
    odd = np.flatnonzero(lengths != lengths[0])  # a blank cell has the length nan, which differs from itself
    numbers = compute.list_flatten(column)
    if len(odd) or numbers.null_count:
        blanks = compute.list_parent_indices(column).filter(numbers.is_null()).to_numpy()
        row = min(*odd[:1].tolist(), *blanks[:1].tolist(), len(column))
        raise UserError(
            f"{path}: column {name!r}: row {row} (counted from 0) is blank or differs in length from the first; "
            "expected lists of equal length without blanks"
        )
    return numbers.to_numpy().reshape(len(column), int(lengths[0]))


def _arrays(path: Path) -> dict[str, Values]:
    """Read the arrays of an .npz or .safetensors file; one of Python objects, which are never read, is empty."""
    # numpy, zipfile, zlib and safetensors raise many kinds for damaged files
    with reading(path, "these arrays", Exception, missing=f"no such file; expected {EXPECTED}"):
        if path.suffix.lower() == ".npz":
            if not zipfile.is_zipfile(path):  # NumPy would advise to unpickle it
                raise ValueError("this is no .npz file")
            with np.load(path, allow_pickle=False) as stored:
                return {name: _unpickled(stored, name) for name in stored.files}
        import torch
        from safetensors import safe_open

        with safe_open(path, "pt") as stored:  # NumPy has no bfloat16
            tensors: dict[str, torch.Tensor] = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        return {
            name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
            for name, tensor in tensors.items()
        }


def _unpickled(stored: Any, name: str) -> Values:
    try:
        return stored[name]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        return np.array([], dtype=object)


def _array_vectors(path: Path) -> tuple[Values, Any]:
    """Return the vectors among the arrays of a file, and its arrays with a value per vector as a pyarrow table."""
    import pyarrow as pa

    arrays = _arrays(path)
    tables = [name for name, values in arrays.items() if values.ndim == 2]
    candidates = [name for name in tables if arrays[name].dtype.kind == "f"]
    candidates = candidates or [name for name in tables if arrays[name].dtype.kind in "iub"]
    shapes = [f"{name} {values.dtype} {values.shape}" for name, values in arrays.items()]
    name = _vectors_among(candidates, path, shapes, "a 2-dimensional array of numbers")
    label = label_name([other for other in arrays if other != name], str(path))
    columns = dict[str, Any]()
    for other, values in arrays.items():
        if other == "path" and values.dtype.kind == "O":
            warn_once(f"{path}: 'path' holds Python objects, which are never read; save text with path.astype(str)")
        elif (other == label or other in TEXTS) and values.dtype.kind == "O":
            raise UserError(
                f"{path}: {other!r} holds Python objects, which are never read; save text with {other}.astype(str)"
            )
        if other == label and values.shape != (len(arrays[name]),):
            raise UserError(
                f"{path}: {label!r} has shape {values.shape}, but {name!r} has {len(arrays[name])} vectors; expected "
                "one label per vector"
            )
        if other == label or (values.shape == (len(arrays[name]),) and values.dtype.kind in "biuSU"):
            columns[other] = as_column(values, f"{path}: {other!r}")
        elif other in TEXTS and values.shape == (len(arrays[name]),) and values.dtype.kind == "f":
            columns[other] = pa.array(values.astype(np.float64))  # groups with a gap are 3.0 and nan
    return arrays[name], pa.table(columns)


NUMBERED = re.compile(r"(.*?)[\s_.\-\[]*([0-9]+)\]?")


def _numbered(names: Sequence[str]) -> dict[str, list[int]]:
    """Return the places of columns that are numbered without a gap, in the order of their numbers, by their name.

    Example:
        >>> _numbered(["id", "e0", "e2", "e1", "x1", "x2"])
        {'e': [1, 3, 2]}
    """
    series: dict[str, dict[int, int]] = {}
    for index, name in enumerate(names):
        if match := NUMBERED.fullmatch(name):
            series.setdefault(match[1], {}).setdefault(int(match[2]), index)
    return {
        name: [indices[number] for number in sorted(indices)]
        for name, indices in series.items()
        if len(indices) >= FEWEST and min(indices) in (0, 1) and max(indices) - min(indices) == len(indices) - 1
    }


def _is_headless(names: Sequence[str]) -> bool:
    """Return whether the first row of a CSV table is a vector, perhaps with a label before or after it."""
    texts = sum(number_of(name) is None for name in names)
    return len(names) - texts >= max(2, len(names) - 1) and not _numbered(names)


def _csv_vectors(path: Path) -> tuple[Values, Any]:
    """Return the vectors and the other columns of a CSV file."""
    table = read_csv(path)
    is_headless = _is_headless(table.names)
    if is_headless:
        head = table.delimiter.join(table.names)
        names = ["label" if number_of(cell) is None else f"e{index}" for index, cell in enumerate(table.names)]
        table = table._replace(body=f"{head}\n".encode() + table.body, names=names, first=table.first - 1)
        vector_indices = [index for index, name in enumerate(names) if name != "label"]
    else:
        series = _numbered(table.names)
        first = next(table.rows(), None)
        if first is None:
            raise UserError(f"{path} has no rows; expected at least one vector")
        cells = {name: [first[1][table.names[index]] for index in indices] for name, indices in series.items()}
        series = {name: indices for name, indices in series.items() if _are_numbers(cells[name])}
        name = _vectors_among([*series], path, table.names, f"{FEWEST} or more columns of numbers, e0, e1, e2, ...")
        vector_indices = series[name]
    cells = table.table(numbers=vector_indices)
    columns = [cells.column(index) for index in vector_indices]
    for index, column in zip(vector_indices, columns, strict=True):
        if column.null_count:
            row, lines = int(np.flatnonzero(column.is_null().to_numpy())[0]), table.lines(len(cells))
            place = f"{path}: row {row + 1}" if lines is None else f"{path}:{lines[row]}"
            raise UserError(f"{place}: column {table.names[index]!r} is empty; expected a number")
    values = np.stack([column.to_numpy() for column in columns], axis=1)
    if is_headless:
        _refuse_labels(values, path)
    others = [index for index, name in enumerate(table.names) if index not in {*vector_indices} and name]
    return values, cells.select(others)


def _are_numbers(cells: Sequence[str]) -> bool:
    """Return whether the cells of a row are numbers, but for a few blank ones, which are refused by their line."""
    numbers = [number_of(cell) for cell in cells if cell.strip()]
    return 2 * len(numbers) > len(cells) and None not in numbers


def _refuse_labels(values: Values, path: Path) -> None:
    """Raise a `UserError` if the first or last column has whole numbers, as labels have, and others have not."""
    is_whole = (values % 1 == 0).all(0)
    is_dead = (values == 0).all(0)  # a coordinate after a ReLU
    ends = [name for name, index in (("first", 0), ("last", -1)) if is_whole[index] and not is_dead[index]]
    if ends and not is_whole.all():
        columns = f"its {ends[0]} column has" if len(ends) == 1 else "its first and its last column have"
        raise UserError(
            f"{path}: has no header, and {columns} whole numbers, which may be labels or row numbers; put a line with "
            "names before it: label or index, and e0, e1, e2, ..."
        )
