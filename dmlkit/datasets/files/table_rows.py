"""The rows of a table: each cell checked, each fault with its line."""

from pathlib import Path
from typing import Any

import numpy as np

from dmlkit.datasets.files.listing import LISTED_SPLITS, Listing
from dmlkit.datasets.files.paths import SUSPICIOUS, inside, leaves_root
from dmlkit.datasets.files.table_file import BOX, is_csv

TRUTHS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


class ArrowNames:
    """The strings of an Arrow column, made when they are asked for: 60 bytes each instead of 150.

    Args:
        column: a pyarrow array of strings.
    """

    def __init__(self, column: Any) -> None:
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, index: int) -> str:
        return self.column[index].as_py()


class TableRows:
    """The rows of a table on their way to a `Listing`.

    Args:
        table: a pyarrow table.
        file: where it came from.
        root: what its paths are relative to.
    """

    def __init__(self, table: Any, file: Path, root: Path) -> None:
        self.table, self.file, self.root = table, file, root
        self.keep = np.ones(len(table), dtype=bool)
        self.faults: list[str] = []
        self.notes: list[str] = []

    def listing(self) -> Listing:
        """All columns checked; rows at fault are left out."""
        names = self._paths()
        labels, class_names = self._labels()
        splits = self._splits(labels, len(class_names))
        query, gallery = (
            self._truths(name) if name in self.table.column_names else None for name in ("query", "gallery")
        )
        boxes = self._boxes()
        keep = self.keep.nonzero()[0]
        masks = [None if mask is None else mask[keep] for mask in (query, gallery)]
        self._check_search(*masks)
        super_classes, super_class_names = self._super_classes(labels, len(class_names))
        return Listing(
            self.root,
            ArrowNames(names.take(keep) if len(keep) < len(names) else names),
            labels[keep],
            class_names,
            splits[keep],
            query=masks[0],
            gallery=masks[1],
            super_classes=super_classes,
            super_class_names=super_class_names,
            boxes=None if boxes is None else boxes[keep],
            faults=self.faults,
            notes=self.notes,
        )

    def _where(self, row: int) -> str:
        return f"{self.file}:{row + 2}" if is_csv(self.file) else f"{self.file}: row {row + 1}"

    def _refuse(self, rows: np.ndarray, fault: str) -> None:
        self.faults += [f"{self._where(row)}: {fault}" for row in rows.tolist()]
        self.keep[rows] = False

    def _text(self, name: str) -> Any:
        """A column as one array of strings."""
        import pyarrow as pa

        column = self.table[name].cast(pa.string())
        return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column

    def _paths(self) -> Any:
        import pyarrow as pa

        compute = arrow_compute()

        names = self._text("path")
        self._refuse(rows_where(compute.is_null(names)), "no path")
        suspects = rows_where(compute.fill_null(compute.match_substring_regex(names, SUSPICIOUS), False))
        if len(suspects) == 0:
            return names
        safe = [inside(self.root, names[row].as_py()) for row in suspects.tolist()]
        for row, name in zip(suspects.tolist(), safe, strict=True):
            if name is None:
                self.faults.append(leaves_root(self._where(row), names[row].as_py(), self.root))
                self.keep[row] = False
        mask = np.zeros(len(names), dtype=bool)
        mask[suspects] = True
        return compute.replace_with_mask(names, pa.array(mask), pa.array(safe, pa.string()))

    def _labels(self) -> tuple[np.ndarray, list[str]]:
        """(N,) positions in the sorted names, and the names; numbers are sorted as numbers."""
        compute = arrow_compute()

        column = self._text("label")
        self._refuse(rows_where(compute.is_null(column)), "no label")
        encoded = column.dictionary_encode()
        names: list[str] = encoded.dictionary.to_pylist()
        numeric = all(name.removeprefix("-").isdecimal() for name in names)
        order = sorted(range(len(names)), key=lambda index: (int(names[index]) if numeric else 0, names[index]))
        position = np.empty(len(names) + 1, dtype=np.int64)
        position[order] = np.arange(len(names))
        position[-1] = 0  # of rows without a label, which are left out
        labels = position[compute.fill_null(encoded.indices, len(names)).to_numpy(zero_copy_only=False)]
        if numeric and names:
            self._note_gaps({int(name) for name in names})
        return labels, [names[index] for index in order]

    def _note_gaps(self, numbers: set[int]) -> None:
        span = range(min(numbers), max(numbers) + 1)
        if len(span) > len(numbers):
            first = next(number for number in span if number not in numbers)
            self.notes.append(
                f"{self.file}: the labels {span[0]} to {span[-1]} have gaps: no image has {first} "
                f"({len(span) - len(numbers)} such numbers); labels are renumbered, so this does no harm"
            )

    def _splits(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """(N,) positions in `LISTED_SPLITS`."""
        compute = arrow_compute()

        if "split" not in self.table.column_names:
            return np.where(labels < classes // 2, 0, LISTED_SPLITS.index("test")).astype(np.int8)
        encoded = compute.fill_null(self._text("split"), "").dictionary_encode()
        values: list[str] = encoded.dictionary.to_pylist()
        known = {name: index for index, name in enumerate(LISTED_SPLITS)}
        splits = np.array([known.get(value, -1) for value in values], dtype=np.int8)[encoded.indices.to_numpy()]
        for code, value in enumerate(values):
            if value not in known:
                rows = (encoded.indices.to_numpy() == code).nonzero()[0]
                self._refuse(rows, f"split {value!r}; expected {', '.join(LISTED_SPLITS)}")
        if "validation" in values and "test" not in values:
            self.notes.append(f"{self.file}: no test rows; the validation rows test, as in OML's tables")
            splits[splits == LISTED_SPLITS.index("validation")] = LISTED_SPLITS.index("test")
        return splits

    def _truths(self, name: str) -> np.ndarray | None:
        """(N,) bool, or None without that column; an empty cell is false."""
        if name not in self.table.column_names:
            return None
        compute = arrow_compute()

        encoded = compute.utf8_lower(compute.fill_null(self._text(name), "false")).dictionary_encode()
        values: list[str] = encoded.dictionary.to_pylist()
        codes = encoded.indices.to_numpy()
        for code, value in enumerate(values):
            if value not in TRUTHS:
                self._refuse((codes == code).nonzero()[0], f"{name} {value!r}; expected true or false")
        return np.array([TRUTHS.get(value, False) for value in values], dtype=bool)[codes]

    def _check_search(self, query: np.ndarray | None, gallery: np.ndarray | None) -> None:
        for mask, name, other in ((query, "query", gallery), (gallery, "gallery", query)):
            if mask is not None and other is not None and other.any() and not mask.any():
                self.faults.append(f"{self.file}: no row is {name}; expected some, or no query and gallery columns")

    def _boxes(self) -> np.ndarray | None:
        import pyarrow as pa

        if BOX[0] not in self.table.column_names:
            return None
        try:
            columns = [self.table[name].cast(pa.float64()).to_numpy() for name in BOX]
        except pa.ArrowException as error:
            self.faults.append(f"{self.file}: the box columns hold something that is no number: {error}")
            return None
        boxes = np.stack(columns, axis=1)
        left, top, right, bottom = boxes.T
        self._refuse(((left >= right) | (top >= bottom) | (left < 0) | (top < 0)).nonzero()[0], f"box {BOX} is empty")
        return boxes

    def _super_classes(self, labels: np.ndarray, classes: int) -> tuple[np.ndarray | None, list[str]]:
        """(C,) positions in the sorted names; a class of two super-classes is a fault."""
        compute = arrow_compute()

        if "super_class" not in self.table.column_names:
            return None, []
        encoded = compute.fill_null(self._text("super_class"), "").dictionary_encode()
        names: list[str] = encoded.dictionary.to_pylist()
        codes = encoded.indices.to_numpy()
        order = np.argsort(np.array(names, dtype=object), kind="stable")
        position = np.empty(len(names), dtype=np.int64)
        position[order] = np.arange(len(names))
        of_class = np.zeros(classes, dtype=np.int64)
        of_class[labels] = position[codes]
        clashes = (of_class[labels] != position[codes]).nonzero()[0]
        self._refuse(clashes, "its label has another super_class in other rows; a class belongs to one")
        return of_class, [names[index] for index in order]


def arrow_compute() -> Any:
    """pyarrow.compute, whose functions are made at run time: their types are unknown."""
    from pyarrow import compute

    return compute


def rows_where(mask: Any) -> np.ndarray:
    """The rows at which an Arrow mask is true."""
    return mask.to_numpy(zero_copy_only=False).nonzero()[0]
