"""Tables: CSV, TSV, Excel, Parquet, Arrow and JSON lines."""

import json
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from dmlkit.errors import UserError, some_of
from dmlkit.files.csv_table import read_csv
from dmlkit.files.readers.base import ImageTable, Reader, as_text, start_of
from dmlkit.files.regular import WORKBOOKS, read_text, reading


class CsvReader(Reader):
    """Reader of CSV tables in any dialect; the cells are text, so that the label 007 stays one."""

    title, suffixes = "CSV", (".csv", ".tsv")

    def read(self, path: Path) -> ImageTable:
        source = read_csv(path)
        table = source.table()
        listed = ImageTable(table, path, path.parent, lines=source.lines(len(table)))
        has_cells = np.any([column.is_valid().to_numpy() for column in table.columns], axis=0)
        return listed if has_cells.all() else listed.kept(has_cells.nonzero()[0].tolist())  # Excel saves rows of ";;;"


class ExcelReader(Reader):
    """Reader of the first visible sheet with cells of a workbook: its stored values, formulas are not computed."""

    title, suffixes = "Excel", WORKBOOKS

    def read(self, path: Path) -> ImageTable:
        import pyarrow as pa

        if find_spec("python_calamine") is None:
            raise UserError(f"{path}: needs python-calamine: pip install 'dmlkit[excel]'; or save the sheet as CSV")
        from python_calamine import CalamineError, SheetVisibleEnum, load_workbook

        with reading(path, "this workbook", CalamineError):
            book = load_workbook(str(path))
            visible = [entry.name for entry in book.sheets_metadata if entry.visible == SheetVisibleEnum.Visible]
            sheets = {name: book.get_sheet_by_name(name).to_python(skip_empty_area=False) for name in visible}
        sheet, *others = [name for name, rows in sheets.items() if any(map(any, rows))] or [""]
        if not sheet:
            raise UserError(f"{path}: this workbook has no cells; expected a line with the columns' names")
        filled = [(number, row) for number, row in enumerate(sheets[sheet], start=1) if any(cell != "" for cell in row)]
        columns = [[*map(_cell, cells)] for cells in zip(*(row for _, row in filled), strict=True)]
        table = pa.Table.from_arrays(  # not slices of whole columns: if_else of pyarrow 23 and before garbles these
            [pa.array(cells, pa.string()) for _, *cells in columns], [name or "" for name, *_ in columns]
        )
        notes = [f"{path}: reads the sheet {sheet!r}; left out: {some_of(others)}"] if others else []
        return ImageTable(table, path, path.parent, [f"{path}: row {number}" for number, _ in filled[1:]], notes=notes)


def _cell(value: object) -> str | None:
    """Return a cell as text: whole numbers without decimals, dates as in ISO 8601; None for an empty one."""
    if isinstance(value, float):  # 15 digits, as Excel shows them; whole numbers such as ids of 16 keep theirs
        return f"{value:.0f}" if value.is_integer() and abs(value) < 2**53 else f"{value:.15g}"
    return (value.isoformat() if isinstance(value, date) else str(value).strip()) or None


class ParquetReader(Reader):
    """Reader of Parquet and Arrow files, also Feather."""

    title, suffixes = "Parquet", (".parquet", ".arrow", ".feather", ".ipc")

    def read(self, path: Path) -> ImageTable:
        import pyarrow as pa
        from pyarrow import parquet

        with reading(path, "this table", pa.ArrowException, UnicodeDecodeError):
            if path.suffix.lower() == ".parquet":
                return ImageTable(parquet.read_table(path), path, path.parent)
            source: Any = pa.memory_map(str(path))
            try:
                table = pa.ipc.open_file(source).read_all()
            except pa.ArrowInvalid:  # a stream, as the library datasets writes it
                table = pa.ipc.open_stream(source).read_all()
            return ImageTable(table, path, path.parent)


class JsonRowsReader(Reader):
    """Reader of JSON rows: an object per line, or a list of objects, whose values are cells."""

    title, suffixes = "JSON rows", (".jsonl", ".ndjson")

    def recognizes(self, path: Path) -> bool:
        if path.suffix.lower() == ".json" and path.is_file():
            return start_of(path).lstrip().startswith(b"[")
        return super().recognizes(path)

    def read(self, path: Path) -> ImageTable:
        import pyarrow as pa

        text, rows = read_text(path), list[dict[str, Any]]()
        if path.suffix.lower() == ".json":
            entries = enumerate(_parsed(str(path), text, "file"), start=1)
            lines = [(f"{path}: row {number}", row) for number, row in entries]
        else:
            entries = enumerate(text.split("\n"), start=1)  # splitlines also cuts at U+2028, which a string may have
            lines = [(f"{path}:{number}", line) for number, line in entries if line.strip()]
        if not lines:
            raise UserError(f"{path}: this file has no rows; expected a JSON object per line, or a list of them")
        for where, line in lines:
            row = _parsed(where, line, "line") if isinstance(line, str) else line
            if not isinstance(row, dict):
                raise UserError(f"{where}: got {str(line)[:50]!r}; expected a JSON object")
            rows.append(row)
        names = dict.fromkeys(name for row in rows for name in row)
        table = pa.table({name: pa.array((as_text(row.get(name)) for row in rows), pa.string()) for name in names})
        return ImageTable(table, path, path.parent, [where for where, _ in lines])


def _parsed(where: str, text: str, unit: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: cannot read this JSON {unit}: {error}; expected objects") from error
