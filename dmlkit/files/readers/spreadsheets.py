"""Tables: CSV, TSV, Parquet, Arrow and JSON lines."""

import json
from pathlib import Path
from typing import Any

from dmlkit.errors import UserError, first_line
from dmlkit.files.csv_table import read_csv
from dmlkit.files.readers.base import ImageTable, Reader, as_text
from dmlkit.files.regular import check_regular, read_text, what_instead


class CsvReader(Reader):
    """Reader of CSV tables in any dialect; the cells are text, so that the label 007 stays one."""

    title = "CSV"

    def recognizes(self, path: Path) -> bool:
        return path.suffix.lower() in (".csv", ".tsv") and not path.is_dir()

    def read(self, path: Path) -> ImageTable:
        found = read_csv(path)
        return ImageTable(found.table(), path, path.parent, first=found.first)


class ParquetReader(Reader):
    """Reader of Parquet files."""

    title = "Parquet"

    def recognizes(self, path: Path) -> bool:
        return path.suffix.lower() == ".parquet" and not path.is_dir()

    def read(self, path: Path) -> ImageTable:
        import pyarrow as pa
        from pyarrow import parquet

        try:
            check_regular(path)
            return ImageTable(parquet.read_table(path), path, path.parent)
        except FileNotFoundError:
            raise UserError(f"{path}: no such file") from None
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot read this table: {what_instead(path, first_line(error))}") from error


class ArrowReader(Reader):
    """Reader of Arrow files, also Feather."""

    title = "Arrow"

    def recognizes(self, path: Path) -> bool:
        return path.suffix.lower() in (".arrow", ".feather", ".ipc") and not path.is_dir()

    def read(self, path: Path) -> ImageTable:
        import pyarrow as pa

        try:
            check_regular(path)
            source: Any = pa.memory_map(str(path))
            try:
                table = pa.ipc.open_file(source).read_all()
            except pa.ArrowInvalid:  # a stream, as the library datasets writes it
                table = pa.ipc.open_stream(source).read_all()
            return ImageTable(table, path, path.parent)
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{path}: cannot read this table: {what_instead(path, first_line(error))}") from error


class JsonLinesReader(Reader):
    """Reader of JSON lines: an object per line, whose values are cells."""

    title = "JSON lines"

    def recognizes(self, path: Path) -> bool:
        return path.suffix.lower() in (".jsonl", ".ndjson") and not path.is_dir()

    def read(self, path: Path) -> ImageTable:
        import pyarrow as pa

        columns: dict[str, list[str | None]] = {}
        count = 0
        places = list[str]()
        for number, line in enumerate(read_text(path, "", "no such file").splitlines(), start=1):
            if not line.strip():
                continue
            try:
                row: Any = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}:{number}: cannot read this line: {error}; expected a JSON object") from error
            if not isinstance(row, dict):
                raise UserError(f"{path}:{number}: got {line[:50]!r}; expected a JSON object")
            for name, value in row.items():
                columns.setdefault(name, [None] * count).append(as_text(value))
            count += 1
            for cells in columns.values():
                cells += [None] * (count - len(cells))
            places.append(f"{path}:{number}")
        table = pa.table({name: pa.array(cells, pa.string()) for name, cells in columns.items()})
        return ImageTable(table, path, path.parent, places)
