"""Dataset of a table of images, CSV or Parquet, with a path and a label per row, and the checks of its cells."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from unicodedata import normalize

import numpy as np
from pydantic import AfterValidator, Field, model_validator

from dmlkit.datasets.base import DatasetConfig, Split
from dmlkit.datasets.files.class_names import (
    SplitClasses,
    cut_between_groups,
    in_groups,
    label_in,
    label_set,
    path_fault,
)
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.image import ROUNDING
from dmlkit.datasets.files.listing import LISTED_SPLITS, Listing
from dmlkit.errors import UserError, option_errors
from dmlkit.files.columns import (
    LABEL,
    PATTERN,
    UNKNOWN,
    ArrowNames,
    arrow_compute,
    group_numbers,
    rows_where,
    text_column,
)
from dmlkit.files.csv_table import key_of
from dmlkit.files.image_table import lists_images, read_images
from dmlkit.files.labels import label_notes
from dmlkit.files.outputs import BOX
from dmlkit.files.paths import SUSPICIOUS, inside, leaves_root
from dmlkit.files.readers.base import ImageTable, reader_of
from dmlkit.files.source import MOVED
from dmlkit.files.where import Where, cells_of


def _conditions(text: str) -> str:
    try:
        return Where.of(text).text
    except UserError as error:
        raise ValueError(str(error)) from None


class TableConfig(DatasetConfig, frozen=True):
    """CSV or Parquet file with columns ``path`` and ``label``, or usual names of them; OML's tables are supported.

    Optional columns: ``split`` (train, validation or test; without test rows, the validation rows are used for testing,
    as in OML), ``query`` and ``gallery`` (true or false), ``super_class``, ``group`` (camera, burst, video), and the
    box in pixels: ``x1 y1 x2 y2``, ``xmin ymin xmax ymax``, ``x y width height`` or ``bbox``. Without ``split``, the
    first half of the sorted labels is for training, the rest for testing. Training ignores other columns; ``dmlkit eval
    --by`` reads them.
    """

    titled_by: ClassVar = "file"
    own_levels: ClassVar[tuple[str, ...] | None] = None  # two levels with a column super_class
    name: Literal["table"] = "table"
    file: str = Field(min_length=1)
    """Path of the table: .csv, .tsv, .jsonl, .parquet or .arrow; or annotations that list images, see docs/data.md."""
    root: str | None = None
    """Folder that the paths in the table are relative to; null is the table's own folder."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Columns of the table by dmlkit's names, e.g. ``{label: species}``, if they have other names than the usual ones.
    A path may be made of several, ``{path: "{folder}/{file}"}``; an empty name leaves a column out, ``{group: ""}``."""
    separator: Annotated[str, Field(min_length=1)] | None = None
    """Text between several labels of an image in the column ``label``, e.g. ``|`` for ``a|b``: images that share a
    label are positives, in losses that compare pairs and in metrics that search; null is one label per image."""
    where: Annotated[str, AfterValidator(_conditions)] | None = None
    """Conditions on the rows, e.g. ``side=left and year=2020..2022``; others are left out. null takes all."""

    @property
    def data_root(self) -> None:
        return None  # files that the table does not name are not read

    def listing(self) -> Listing:
        with option_errors("dataset.file"):
            table = self.table()
            return TableRows(table, self.levels, self.separator, is_whole=self.split == "all").listing()

    def table(self, needs: Sequence[str] = ("path", "label"), **columns: str) -> ImageTable:
        """Return the rows of the file; ``columns`` are others than those of the recipe."""
        file = Path(self.file)
        if not file.exists():
            raise UserError(f"{file}: no such file; {MOVED}file=PATH")
        root = None if self.root is None else Path(self.root)
        prints_columns = not columns and self.classes_of_run is None  # the training of a run printed it
        listed = read_images(file, root, self.columns | columns, needs, prints_columns=prints_columns)
        if self.where is None or columns:
            return listed
        cells = cells_of({name: listed.table[name] for name in listed.table.column_names})
        return listed.kept(Where.of(self.where).rows(cells, str(file), len(listed)))

    def limited(self, where: Where) -> "TableConfig":
        texts = [where.text] if self.where is None else [self.where, where.text]
        return self.model_copy(update={"where": " and ".join(texts)})

    def _recorded(self, of_run: SplitClasses, listing: Listing | None, split: Split) -> Dataset:
        wanted, adds_classes = {*of_run.names[split]}, self.new_classes == "test" and split == "test"
        is_lost = listing is not None and wanted.isdisjoint(listing.class_names) and not adds_classes
        if self.where is not None and is_lost:
            whole = self.model_copy(update={"where": None}).table()
            labels = text_column(whole.table, str(whole.file), "label").to_pylist()
            rows = [row for row, text in enumerate(labels) if label_in(text, self.levels, self.separator) in wanted]
            if rows:  # none of which fulfills the conditions: the error names their values
                kept = whole.kept(rows).table
                cells = cells_of({name: kept[name] for name in kept.column_names})
                place = f"{whole.file}, the {split} classes of {of_run.run}"
                Where.of(self.where).rows(cells, place, len(rows))
        return super()._recorded(of_run, listing, split)

    @model_validator(mode="after")
    def _has_paths_or_sets(self) -> "TableConfig":
        if self.separator is not None and self.levels:
            raise ValueError("separator and levels cannot be used together; remove one")
        if self.separator is not None and (self.tests_known or self.split in ("halves", "reality_check")):
            raise ValueError(f"split {self.split_text} does not support a separator; use official or all")
        return self


def other_table(file: Path, known: TableConfig | None) -> TableConfig:
    """Return a table on images that another one lists, whose names of columns hold as far as it has them.

    Texts that mean no label, parts of the paths and columns that are left out hold for any table. Its paths are
    relative to its own folder; if they lead to no image there, to that of the other table.
    """
    reader = reader_of(file)
    if known is None or not lists_images(file, known.columns):
        return TableConfig(file=str(file))
    names = reader.read(file).table.column_names if reader is not None and known.columns else ["path"]
    keys, columns = set(map(key_of, names)), dict[str, str]()
    for name, text in known.columns.items():
        holds_always = name == UNKNOWN or not text or PATTERN in text
        if holds_always or keys.issuperset(map(key_of, re.findall(r"\{(.*?)\}", text) or [text])):
            columns[name] = text
    config, folder = TableConfig(file=str(file), columns=columns), Path(known.file)
    folder = Path(known.root) if known.root is not None else folder if folder.is_dir() else folder.parent
    if reader is None or folder.resolve() == file.parent.resolve():
        return config
    read = read_images(file, None, columns | {LABEL: ""}, ("path",), prints_columns=False)
    paths = text_column(read.table, str(file), "path")
    is_near = len(paths) and paths[0].is_valid and (read.root / paths[0].as_py()).exists()
    return config if is_near else config.model_copy(update={"root": str(folder)})


MAX_DIGITS = 4000  # longer labels are not sorted as numbers; Python converts at most 4300 digits
TRUTHS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


class TableRows:
    """Conversion of a table to a `Listing`.

    Args:
        table: the table, whose faults and notes are those of the listing too. Its file is its root for rows without a
            file, whose faults are located by their paths.
        is_whole: whether all images are used together, whatever their split.
        are_boxes_measured: whether `box_faults` compares the boxes with their images; only then one beyond the left
            or top border is no fault here.
    """

    def __init__(
        self,
        table: ImageTable,
        levels: Sequence[str] = (),
        separator: str | None = None,
        *,
        is_whole: bool = False,
        are_boxes_measured: bool = False,
    ) -> None:
        self.rows, self.table, self.file, self.root = table, table.table, table.file, table.root
        self.levels, self.separator = levels, separator
        self.is_whole, self.are_boxes_measured = is_whole, are_boxes_measured
        self.keep = np.ones(len(table), dtype=bool)
        self.faults, self.notes = [*table.faults], [*table.notes]

    def listing(self) -> Listing:
        """Check all columns and return the listing without the rows that have problems."""
        names = self._paths()
        labels, class_names = self._labels()
        splits = self._splits(labels, class_names)
        query, gallery = (self._truths(name) for name in ("query", "gallery"))
        groups = group_numbers(self.table, str(self.file))
        boxes = self._boxes()
        times = text_column(self.table, str(self.file), "time") if "time" in self.table.column_names else None
        self._refuse_repeated(names, labels, boxes)
        keep = self.keep.nonzero()[0]
        query, gallery = (None if mask is None else mask[keep] for mask in (query, gallery))
        for mask, name, other in ((query, "query", gallery), (gallery, "gallery", query)):
            if mask is not None and other is not None and other.any() and not mask.any():
                way = "mark at least one, or remove the columns query and gallery"
                self.faults.append(f"{self.file}: no row has {name} true; {way}")
        super_classes = self._super_classes(labels, len(class_names))
        return Listing(
            self.root,
            ArrowNames(names.take(keep) if len(keep) < len(names) else names),
            labels[keep],
            class_names,
            splits[keep],
            query=query,
            gallery=gallery,
            super_classes=super_classes,
            groups=None if groups is None else groups[keep],
            boxes=None if boxes is None else boxes[keep],
            faults=self.faults,
            notes=self.notes,
            source=self.file,
            separator=self.separator,
            times=None if times is None else ArrowNames(times.take(keep)),
        )

    def where(self, row: int) -> str:
        """Return the place of a row in its file, for messages."""
        if self.file == self.root and not self.rows.places:
            return f"{self.root / self.table['path'][row].as_py()}"
        return self.rows.place(row)

    def _refuse(self, rows: np.ndarray, fault: str) -> None:
        self.faults += [f"{self.where(row)}: {fault}" for row in rows.tolist()]
        self.keep[rows] = False

    def _texts(self, name: str, blank: str = "") -> tuple[list[str], np.ndarray]:
        """Return the distinct texts of a column, and (N,) positions of its cells in them; empty cells are ``blank``."""
        texts = arrow_compute().fill_null(text_column(self.table, str(self.file), name), blank)
        encoded = texts.dictionary_encode()
        return encoded.dictionary.to_pylist(), encoded.indices.to_numpy()

    def _encoded(self, name: str, blank: str = "") -> tuple[list[str], np.ndarray]:
        """Return the same as `_texts`, composed (NFC), without blanks at the ends."""
        texts, codes = self._texts(name, blank)
        plain = [normalize("NFC", text.strip()) for text in texts]
        values = {value: index for index, value in enumerate(dict.fromkeys(plain))}
        return list(values), np.array([values[text] for text in plain], dtype=np.int64)[codes]

    def _paths(self) -> Any:
        import pyarrow as pa

        compute = arrow_compute()
        names = text_column(self.table, str(self.file), "path")
        self._refuse(rows_where(compute.is_null(names)), "no path")
        suspects = rows_where(compute.fill_null(compute.match_substring_regex(names, SUSPICIOUS), False))
        if len(suspects) == 0:
            return names
        safe = [inside(self.root, names[row].as_py()) for row in suspects.tolist()]
        outside = [row for row, name in zip(suspects.tolist(), safe, strict=True) if name is None]
        if outside:  # often all rows, by the same mistake: a line for the first one
            more = f"; so do {len(outside) - 1} more rows" if len(outside) > 1 else ""
            self.faults.append(leaves_root(self.where(outside[0]), names[outside[0]].as_py(), self.root) + more)
            self.keep[outside] = False
        mask = np.zeros(len(names), dtype=bool)
        mask[suspects] = True
        return compute.replace_with_mask(names, pa.array(mask), pa.array(safe, pa.string()))

    def _labels(self) -> tuple[np.ndarray, list[str]]:
        """Return (N,) positions in the sorted names, -1 for a row without a label, and the names, see `label_in`."""
        if "label" not in self.table.column_names:
            return np.full(len(self.table), -1), []
        texts, codes = self._texts("label")
        labels = {text: label_in(text, self.levels, self.separator) for text in texts}
        counts = dict(zip(texts, np.bincount(codes, minlength=len(texts)).tolist(), strict=True))
        self.notes += label_notes(counts, str(self.file), labels.__getitem__)
        faults: dict[int, str] = {}
        for code, (text, label) in enumerate(labels.items()):
            fault = path_fault(label, self.levels) if label is not None and self.levels else None
            if label is not None and self.separator is not None:  # b|a is the set a|b
                labels[text], fault = label_set(label, self.separator)
            if fault is not None:
                faults[code] = fault
        for row in np.isin(codes, [*faults]).nonzero()[0].tolist():
            self.faults.append(f"{self.where(row)}: {faults[codes[row]]}")
            self.keep[row] = False
        names = self._sorted({label for label in labels.values() if label is not None})
        position = {name: rank for rank, name in enumerate(names)}
        return np.array([position.get(labels[text] or "", -1) for text in texts], dtype=np.int64)[codes], names

    def _sorted(self, names: Collection[str]) -> list[str]:
        """Sort numbers as numbers, and sets as `in_groups`."""
        if self.separator is not None:
            return in_groups([*names], self.separator)
        numeric = all(name.removeprefix("-").isdecimal() and len(name) < MAX_DIGITS for name in names)
        return sorted(names, key=lambda name: (int(name) if numeric else 0, name))

    def _half(self, class_names: list[str]) -> int:
        """Return how many classes are for training if the table has no column ``split``."""
        half = len(class_names) // 2
        if self.separator is None:
            return half
        cut = cut_between_groups(class_names, self.separator, half, (1, len(class_names) - 1))
        if cut is None:
            self.faults.append(
                f"{self.file}: common labels connect all images, so no split has test labels that are unseen in "
                "training; use dataset.split=all to train on all of them, or one label per image"
            )
        return len(class_names) if cut is None else cut

    def _splits(self, labels: np.ndarray, class_names: list[str]) -> np.ndarray:
        """Return (N,) positions in `LISTED_SPLITS`."""
        if self.is_whole and self.separator is not None:  # labels may be in several splits
            return np.zeros(len(labels), dtype=np.int8)
        if "split" not in self.table.column_names:
            return np.where(labels < self._half(class_names), 0, LISTED_SPLITS.index("test")).astype(np.int8)
        values, codes = self._encoded("split")
        known = {name: index for index, name in enumerate(LISTED_SPLITS)}
        splits = np.array([known.get(value, -1) for value in values], dtype=np.int8)[codes]
        for code, value in enumerate(values):
            if value not in known:
                self._refuse((codes == code).nonzero()[0], f"split {value!r}; expected {', '.join(LISTED_SPLITS)}")
        if "validation" in values and "test" not in values:
            self.notes.append(f"{self.file}: no test rows; the validation rows are used for testing, as in OML")
            splits[splits == LISTED_SPLITS.index("validation")] = LISTED_SPLITS.index("test")
        return splits

    def _truths(self, name: str) -> np.ndarray | None:
        """Return a column as (N,) bool, where an empty cell is false; None without the column."""
        if name not in self.table.column_names:
            return None
        values, codes = self._encoded(name, blank="false")
        for code, value in enumerate(values):
            if value.lower() not in TRUTHS:
                self._refuse((codes == code).nonzero()[0], f"{name} {value!r}; expected true or false")
        return np.array([TRUTHS.get(value.lower(), False) for value in values], dtype=bool)[codes]

    def _boxes(self) -> np.ndarray | None:
        if BOX[0] not in self.table.column_names:
            return None
        boxes = np.stack([self.table[name].to_numpy() for name in BOX], axis=1)
        left, top, right, bottom = boxes.T
        is_blank = np.isnan(boxes)
        is_outside = boxes < -ROUNDING
        is_wrong = (np.isinf(boxes).sum(axis=1) > 0) | (is_blank.any(1) & ~is_blank.all(1))
        if not self.are_boxes_measured:
            is_wrong |= is_outside.any(1) | (left >= right) | (top >= bottom)
        for row in is_wrong.nonzero()[0].tolist():
            shown = ", ".join(f"{name} {side:g}" for name, side in zip(BOX, boxes[row], strict=True))
            self.faults.append(
                f"{self.where(row)}: got the box {shown.replace('nan', 'blank')}; expected 0 <= x1 < x2 and "
                "0 <= y1 < y2 in pixels, or four blank cells for the full image"
            )
        self.keep &= ~is_wrong
        return np.where(is_outside, boxes, np.maximum(boxes, 0.0))  # NaN stays

    def _refuse_repeated(self, names: Any, labels: np.ndarray, boxes: np.ndarray | None) -> None:
        """Report images listed twice, which would find themselves; another box is another image."""
        compute = arrow_compute()
        plain = compute.replace_substring_regex(names, r"(^|/)(\.?/)+", r"\1")  # ./a.jpg and b//a.jpg
        codes = plain.dictionary_encode().indices.fill_null(-1).to_numpy()
        rows = (np.bincount(codes + 1, minlength=1)[codes + 1] > 1).nonzero()[0]
        first: dict[tuple[float, ...], int] = {}
        for row in rows[self.keep[rows]].tolist():
            box = () if boxes is None or np.isnan(boxes[row]).any() else tuple(boxes[row].tolist())
            before = first.setdefault((int(codes[row]), *box), row)
            if before != row:
                other = "" if labels[row] == labels[before] else ", with another label"
                self.faults.append(
                    f"{self.where(row)}: {names[row].as_py()} is already listed in {self.where(before)}{other}; list "
                    "each image once, or with different boxes"
                )
                self.keep[row] = False

    def _super_classes(self, labels: np.ndarray, classes: int) -> np.ndarray | None:
        """Return (C,) positions in the sorted names; report classes with two super-classes."""
        if "super_class" not in self.table.column_names:
            return None
        names, codes = self._encoded("super_class")
        position = np.unique(np.array(names, dtype=object), return_inverse=True)[1]
        of_class = np.zeros(classes, dtype=np.int64)
        rows = (self.keep & (labels >= 0)).nonzero()[0]
        of_class[labels[rows]] = position[codes[rows]]
        clashes = rows[of_class[labels[rows]] != position[codes[rows]]]
        way = "use one super_class per label, or leave the column out with --column super_class="
        self._refuse(clashes, f"the label has another super_class in other rows; {way}")
        return of_class
