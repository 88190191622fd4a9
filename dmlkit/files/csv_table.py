"""CSV tables as people bring them: any usual separator and encoding, padded cells, no header, names in any case."""

import csv
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from io import StringIO
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from dmlkit.errors import UserError, counted, first_line, some_of, warn_once
from dmlkit.files.escape import ESCAPED, quoted
from dmlkit.files.regular import EXTENSIONS, other_content, read_start, reading, utf8_of

DELIMITERS = (",", ";", "\t", "|")
SEPARATOR = re.compile(r'"?sep=([,;\t|])"?\r?\n', re.IGNORECASE)  # first line for Excel, which states the delimiter
SAMPLE = 2**18  # bytes, of which 10,000 numbers take 250 thousand, and
SAMPLE_ROWS = 20  # rows, in which the delimiter is looked for
MOST_COLUMNS = 20  # that a message names
DECIMAL_COMMA = rb'(?m)(^|;)[\s"]*[-+]?[0-9]*,[0-9]'  # in a number between semicolons, not in a text such as Doe, Ann


class CsvTable(NamedTuple):
    """Text of a CSV table, and how it is to be read."""

    file: Path
    body: bytes
    """Rows in UTF-8."""
    delimiter: str
    names: list[str]
    """Names of the columns, without blanks at the ends."""
    is_padded: bool
    """Whether cells have blanks at their ends, as in ``path, label``."""
    first: int
    """Line of the first row."""

    def rows(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Yield the line and the cells of each row by name, without blanks at the ends; for tables that people edit.

        A row with fewer cells ends with empty ones; one without any, as Excel saves it, is a blank line.
        """
        for line, texts in self._rows():
            if any(texts):
                yield line, dict(zip_longest(self.names, texts, fillvalue=""))

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        text = StringIO(self.body.decode(), "")
        lines = csv.reader(text, delimiter=self.delimiter, skipinitialspace=self.is_padded, strict=True)
        start = self.first
        try:
            for cells in lines:
                if len(cells) > len(self.names):
                    raise UserError(self._ragged(f"{self.file}:{start}", len(cells), self.delimiter.join(cells)))
                if cells:
                    yield start, [ESCAPED.sub(r"\1", cell.strip()) for cell in cells]
                start = self.first + lines.line_num
        except csv.Error as error:
            raise UserError(f"{self.file}:{start}: cannot read this table: {error}") from error

    def lines(self, rows: int) -> Sequence[int] | None:
        """Return the lines of all rows, whose number is ``rows``; blank lines and those within a cell count.

        None for a table that `rows` does not read, but `table` does, e.g. one with a cell of more than 131,072
        characters.
        """
        if self.body.rstrip(b"\r\n").count(b"\n") == rows - 1:
            return range(self.first, self.first + rows)
        try:
            lines = [line for line, _ in self._rows()]
        except UserError:
            return None
        return lines if len(lines) == rows else None

    def table(self, numbers: Collection[int] = ()) -> Any:
        """Return the rows as a pyarrow table of text, null for an empty cell.

        The columns at the places ``numbers`` are float64, with commas for points between semicolons.
        """
        import pyarrow as pa
        from pyarrow import compute
        from pyarrow import csv as arrow

        functions: Any = compute
        keys = [str(index) for index in range(len(self.names))]
        kinds = {key: pa.float64() if int(key) in numbers else pa.string() for key in keys}
        point = "," if numbers and self.delimiter == ";" and re.search(DECIMAL_COMMA, self.body[:SAMPLE]) else "."
        if not self.body.strip():
            return pa.table({key: pa.array([], pa.string()) for key in keys}).rename_columns(self.names)
        try:
            table = arrow.read_csv(
                pa.BufferReader(self.body),
                arrow.ReadOptions(column_names=keys),
                arrow.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
                arrow.ConvertOptions(
                    column_types=kinds, null_values=[""], strings_can_be_null=True, decimal_point=point
                ),
            )
        except pa.ArrowException as error:
            wrong = re.search(r"In CSV column #(\d+): .*invalid value '(.*)'", str(error), re.DOTALL)
            if wrong is not None:
                name, value = self.names[int(wrong[1])], quoted(wrong[2])
                raise UserError(f"{self.file}: column {name!r} has {value}; expected numbers") from error
            wrong = re.search(r"Expected \d+ columns, got (\d+): (.*)", str(error))
            if wrong is None:
                raise UserError(f"{self.file}: cannot read this table: {first_line(error)}") from error
            raise UserError(self._ragged(str(self.file), int(wrong[1]), wrong[2])) from error
        columns = list(table.columns)
        is_open = self.body.count(b'"') % 2 and len(table) and any("\n" in str(column[-1]) for column in columns)
        if is_open or (self.body.rstrip(b"\r\n").count(b"\n") >= len(table) and self._holds_rows(columns, functions)):
            raise UserError(f"{self.file}: cannot read this table: a quotation mark is not closed")
        for index, column in enumerate(columns):
            if index in numbers:
                continue
            if self.is_padded:
                column = functions.replace_substring_regex(functions.utf8_trim_whitespace(column), '^"(.*)"$', r"\1")
                column = functions.if_else(functions.equal(column, ""), pa.scalar(None, pa.string()), column)
            if functions.any(functions.starts_with(column, "'")).as_py():
                column = functions.replace_substring_regex(column, ESCAPED.pattern, r"\1")
            columns[index] = column
        return pa.Table.from_arrays(columns, self.names)

    def _holds_rows(self, columns: Sequence[Any], functions: Any) -> bool:
        """Return whether a cell of several lines has one that is a row of the table, with an image at its place."""
        texts = [functions.cast(column, "string") for column in columns]
        firsts = [str(text[0]) for text in texts]
        place = next((index for index, text in enumerate(firsts) if Path(text).suffix.lower() in EXTENSIONS), None)
        if place is None:
            return False
        for text in texts:
            for cell in text.filter(functions.match_substring(text, "\n")).to_pylist():
                rows = (line.split(self.delimiter) for line in cell.splitlines()[1:])
                fitting = (row[place] for row in rows if len(row) == len(self.names))
                if any(Path(name.strip('" ')).suffix.lower() in EXTENSIONS for name in fitting):
                    return True
        return False

    def _ragged(self, where: str, cells: int, row: str) -> str:
        columns = f"{len(self.names)} ({some_of(self.names)})"
        way = f"put cells that contain {self.delimiter!r} between quotation marks"
        if cells < len(self.names):
            way = "add the missing cells, which may be empty"
        return f"{where}: a row has {counted(cells, 'cell')}, expected {columns}: {quoted(row)}; {way}"


def read_csv(file: Path, missing: str = "no such file") -> CsvTable:
    """Read a CSV table, without taking it apart: in UTF-8, UTF-16 or Windows-1252, with any of the `DELIMITERS`.

    A table without a header, which has photos in its first line, has the columns ``path`` and ``label`` in any order.
    """
    with reading(file, "this table", missing=missing):
        content = file.read_bytes()
    if instead := other_content(content[:512]):
        raise UserError(f"{file}: cannot read this table: {instead}")
    content = utf8_of(content, str(file))
    sample = content[:SAMPLE].decode(errors="ignore")
    if len(content) > SAMPLE:
        sample = sample[: sample.rfind("\n") + 1] or sample
    stated = SEPARATOR.match(sample)
    if stated is not None:
        content, sample = content[stated.end() :], sample[stated.end() :]
    before, delimiters = (0, DELIMITERS) if stated is None else (1, stated[1])
    if not sample.strip():
        raise UserError(f"{file}: cannot read this table: the file is empty; expected a line with the columns' names")
    delimiter, rows = _best_rows(sample, delimiters)
    is_padded = any(name != name.strip() for name in rows[0])
    header = csv.reader(StringIO(sample, ""), delimiter=delimiter, skipinitialspace=True)
    names = [ESCAPED.sub(r"\1", name.strip()) for name in next(filter(None, header))]
    photos = [Path(name).suffix.lower() in EXTENSIONS for name in names]
    if any(photos):
        if len(names) > 2 or sum(photos) > 1:
            raise UserError(
                f"{file}: has no header: its first line is {quoted(delimiter.join(names))}; put a line with the "
                "names of the columns before it"
            )
        names = ["path" if is_photo else "label" for is_photo in photos]
        warn_once(f"{file}: has no header; its columns are read as {' and '.join(names)}")
        return CsvTable(file, content, delimiter, names, is_padded, before + 1)
    start = sum(len(line.encode()) for line, _ in zip(StringIO(sample, ""), range(header.line_num), strict=False))
    return CsvTable(file, content[start:], delimiter, names, is_padded, before + 1 + header.line_num)


def csv_start(file: Path) -> tuple[list[str], list[str]]:
    """Return the names of the columns and the cells of the first row, if any, without reading the file whole."""
    start = read_start(file, SAMPLE)
    sample = start.decode("utf-16" if start[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig", errors="ignore")
    stated = SEPARATOR.match(sample)
    sample, delimiters = (sample, DELIMITERS) if stated is None else (sample[stated.end() :], stated[1])
    if not sample.strip():
        return [], []
    _, rows = _best_rows(sample, delimiters)
    return [name.strip() for name in rows[0]], rows[1] if len(rows) > 1 and len(rows[1]) == len(rows[0]) else []


def _first_rows(sample: str, delimiter: str) -> list[list[str]]:
    rows: list[list[str]] = []
    with suppress(csv.Error):  # a cell is too long, e.g. after a quotation mark that is not closed
        for row in islice(filter(None, csv.reader(StringIO(sample, ""), delimiter=delimiter)), SAMPLE_ROWS):
            rows.append(row)
    return rows or [[sample.splitlines()[0]]]


def _best_rows(sample: str, delimiters: Sequence[str]) -> tuple[str, list[list[str]]]:
    """Return the delimiter that fits best, and the first rows.

    A delimiter fits if all rows have as many cells as the header, at least two. Of several, the one with the most cells
    is taken, and a bar only if no other fits, because bars also separate the labels in a cell.
    """

    def fit(delimiter: str) -> tuple[bool, bool, int]:
        cells = len(heads[delimiter][0])
        is_even = cells > 1 and all(len(row) == cells for row in heads[delimiter])
        return is_even, cells > 1 and delimiter != "|", cells

    heads = {delimiter: _first_rows(sample, delimiter) for delimiter in delimiters}
    delimiter = max(delimiters, key=fit)
    return delimiter, heads[delimiter]


USUAL = {
    "path": ("file", "filename", "filepath", "image", "imagefile", "imagename", "imagepath", "img", "imgpath", "photo"),
    "label": ("identity", "individual", "individualid", "class", "classname", "name", "id"),
    "query": ("isquery",),
    "gallery": ("isgallery",),
    "super_class": ("category",),
    "group": ("sequence", "seqid", "encounter", "encounterid", "eventid"),
    "time": ("datetime", "date", "timestamp", "datetaken"),
    "latitude": ("lat", "decimallatitude"),
    "longitude": ("lon", "lng", "long", "decimallongitude"),
}
"""Usual names of columns that are read by dmlkit's name, in lower case and without ``_``, ``-`` and blanks."""


def number_of(text: str) -> float | None:
    """Return the number that a cell is, perhaps with a decimal comma; None for another text."""
    try:
        return float(text.replace(",", "."))
    except ValueError:
        return None


def key_of(name: str) -> str:
    """Return a column's name as it is compared.

    Example:
        >>> key_of("FileName"), key_of("individual_id"), key_of("is-query ")
        ('filename', 'individualid', 'isquery')
    """
    return re.sub(r"[\s_-]", "", name).lower()


def column_called(columns: Sequence[str], wanted: str, where: str) -> int | None:
    """Return the place of the column that has dmlkit's name, also in other case, or else the usual one; None without.

    Example:
        >>> column_called(["Image", "Id"], "label", "t.csv"), column_called(["id", "label"], "label", "t.csv")
        (1, 1)
    """
    keys = [key_of(name) for name in columns]
    for fits in (
        [name == wanted for name in columns],
        [key == key_of(wanted) for key in keys],
        [key in USUAL.get(wanted, ()) for key in keys],
    ):
        matches = [index for index, is_wanted in enumerate(fits) if is_wanted]
        if len(matches) == 1:
            return matches[0]
        names = [columns[index] for index in matches]
        if len(set(names)) == 1:
            raise UserError(f"{where}: has {len(names)} columns {names[0]!r}; expected one")
        if matches:
            raise UserError(
                f"{where}: {' and '.join(map(repr, names))} may be the {wanted}; name the right one with --column "
                f"{wanted}=NAME"
            )
    return None


def own_column(columns: Sequence[str], name: str, where: str, wanted: str = "") -> int:
    """Return the place of a column that a user names, also in other case; ``wanted`` is dmlkit's name of it."""
    index = column_called(columns, name, where)
    if index is None:
        usual = f" (or {', '.join(USUAL[name][:5])})" if name in ("path", "label") else ""
        hint = "".join(f"; did you mean {match!r}?" for match in get_close_matches(name, columns, n=1))
        way = f"; name it with --column {wanted}=NAME" if wanted == name and not hint else ""
        raise UserError(f"{where}: has no column {name!r}{usual}; it has {some_of(columns, MOST_COLUMNS)}{hint}{way}")
    return index
